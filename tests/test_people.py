"""What people do to a record: correct, undo, restore, compare; each an event, none a loss."""

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refold
from refold.core.errors import MessageError
from refold.core.event import Replaced, Said, Span, Undone
from refold.core.message import Media, Message, Reasoning, Text, ToolCall, ToolResult
from refold.core.view import fold
from refold.dialects.rules.targets import check_request
from refold.session.aio import AsyncSession
from refold.session.results import Undoing
from refold.session.session import Session
from strategies import corrections, deeds
from test_cli import STORE, ask, run
from test_invariants import do, new_session
from test_summaries import Talk, reading, summary

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def agent(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(*ids: str, text: str | None = None) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "ls", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


@pytest.fixture
def chat() -> Session:
    """The task, a call, its result, an answer, a second request, its answer."""
    session = refold.open("trip", store="memory://", model="gpt-5")
    session.append([user("Fly to Oslo."), call("c1", text="Looking."), result("c1", "HAT078 costs 120")])
    session.append([agent("HAT078 it is."), user("And a hotel?"), agent("The Grand.")])
    return session


def texts(chat: Session, at: int | None = None) -> list[str]:
    return [message.text for message in chat.view(at).messages]


SAID = ["Fly to Oslo.", "Looking.", "HAT078 costs 120", "HAT078 it is.", "And a hotel?", "The Grand."]


# Correct


@pytest.mark.parametrize("at", range(6))
def test_a_correction_stands_in_the_place_of_any_message_and_the_original_stays(chat, at):
    before = chat.view()
    edit = chat.correct(at, "Otherwise.", why="it was wrong")
    assert texts(chat) == [*SAID[:at], "Otherwise.", *SAID[at + 1 :]]
    assert [message.role for message in chat.view().messages] == [m.role for m in before.messages]
    assert check_request("openai-chat", chat.fit().request) == []
    assert [stored.message.text for stored in chat.get_all()] == SAID
    assert SAID[at] in chat.expand(at)
    event = chat.record.event(edit)
    assert isinstance(event, Replaced)
    assert (event.kind, event.why, event.shown[0].text) == ("correct", "it was wrong", "Otherwise.")
    chat.undo()
    assert chat.view().messages == before.messages


def test_a_correction_is_whatever_append_takes(chat):
    chat.correct(2, result("c1", "HAT118 costs 90"))
    chat.correct(3, Message("assistant", "HAT118 it is."))
    anthropic = {"type": "tool_result", "tool_use_id": "c1", "content": "HAT118 costs 95"}
    assert texts(chat)[2:4] == ["HAT118 costs 90", "HAT118 it is."]
    chat.correct(2, {"role": "user", "content": [anthropic]})
    assert chat.fit().messages[2] == result("c1", "HAT118 costs 95")


def test_a_text_keeps_all_but_what_a_message_says(chat):
    seen = Media("image", url="https://example.org/a.png")
    thought = [Reasoning("hm"), Text("Looking"), Text(" again."), ToolCall("c9", "ls", '{"a": 1}')]
    shown, called = chat.append([Message("user", [Text("See"), seen]), Message("assistant", thought)])
    answered = chat.append(Message("tool", [ToolResult("c9", "no such file", "ls", is_error=True)]))
    for at in (shown, called, answered):
        chat.correct(at, "new")
    parts = [message.parts for message in chat.view().messages[-3:]]
    assert parts[0] == (Text("new"), seen)
    assert parts[1] == (Text("new"), ToolCall("c9", "ls", '{"a": 1}'))
    assert parts[2] == (ToolResult("c9", "new", "ls", is_error=True),)


@pytest.mark.parametrize(
    ("at", "message", "told"),
    [
        (0, agent("x"), "expected user as in #0, got assistant"),
        (2, result("c2", "x"), "#2 answers c1; its correction must do so too"),
        (2, user("x"), "expected tool as in #2"),
        (1, agent("x"), "the calls of #1 (c1) must stay; a text in place of a message keeps them"),
        (1, call("c1", "c2"), "the calls of #1 (c1) must stay"),
        (3, call("c2"), "the calls of #3 (none) must stay"),
        (0, [user("x")], "expected a dict, an SDK object or a refold.Message, got list"),
        (0, None, "expected a dict"),
        (0, 7, "expected a dict"),
    ],
)
def test_a_correction_that_does_not_fit_its_place_is_refused_and_nothing_is_stored(chat, at, message, told):
    before = len(list(chat.events()))
    with pytest.raises(MessageError, match=re.escape(told)):
        chat.correct(at, message)
    assert len(list(chat.events())) == before


def test_only_what_was_said_is_corrected(chat):
    edit = chat.correct(0, "Fly to Bergen.")
    for at in (edit, 99, -1):
        with pytest.raises(refold.NotFoundError):
            chat.correct(at, "x")
    with pytest.raises(refold.RefoldError, match="why"):
        chat.correct(0, "x", why=3)  # type: ignore[arg-type]


def test_a_result_among_others_is_corrected_by_itself(chat):
    blocks = [{"type": "tool_use", "id": id, "name": "ls", "input": {}} for id in ("a", "b")]
    answers = [{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"} for id in ("a", "b")]
    chat.append({"role": "assistant", "content": blocks})
    first = chat.append({"role": "user", "content": [*answers, {"type": "text", "text": "Go on."}]})
    chat.correct(first + 1, "of b, corrected")
    shown = chat.fit(dialect="anthropic")
    assert check_request("anthropic", shown.request) == []
    told = json.dumps(shown.messages)
    assert all(text in told for text in ('"of a"', '"of b, corrected"', "Go on."))
    with pytest.raises(MessageError, match="2 when taken apart; correct each in its own place"):
        chat.correct(first, {"role": "user", "content": answers})
    chat.undo()
    assert chat.fit(dialect="anthropic").messages[-1]["content"][1] == answers[1]


def test_a_correction_is_corrected_and_each_is_taken_back_by_itself(chat):
    first, second = chat.correct(3, "one"), chat.correct(3, "two")
    assert texts(chat)[3] == "two"
    undone = chat.undo(first)
    assert (undone.of, undone.covered_by) == (first, second)
    assert texts(chat)[3] == "two"
    assert chat.undo(3).of == second
    assert texts(chat) == SAID
    chat.undo(undone)
    assert texts(chat)[3] == "one"


def test_a_corrected_message_is_restored(chat):
    chat.correct(0, "Fly to Bergen.")
    chat.correct(3, "Neither.")
    for at in (0, 3):
        chat.restore(at)
    assert texts(chat) == SAID
    chat.undo()
    assert texts(chat)[3] == "Neither."


def test_the_task_the_latest_request_and_a_pinned_message_stay_as_they_were_corrected(chat):
    chat.pin(2)
    edits = [chat.correct(at, f"new {at}") for at in (0, 2, 4)]
    chat.compact("sliding-window", keep_recent=0)
    assert [one for one in texts(chat) if one.startswith("new")] == ["new 0", "new 2", "new 4"]
    assert not {"Fly to Oslo.", "HAT078 costs 120", "And a hotel?"} & {*texts(chat)}
    assert check_request("openai-chat", chat.fit().request) == []
    assert chat.explain(2).shown == "corrected"
    assert chat.explain(2).causes[-1].state == "in force"
    for at, edit in zip((0, 2), edits, strict=False):
        undone = chat.undo(at)
        assert (undone.of, undone.covered_by) == (edit, None)
        assert SAID[at] in texts(chat)
        assert f"new {at}" not in texts(chat)


def test_what_is_pinned_after_it_was_corrected_stays_corrected(chat):
    chat.correct(3, "Neither.")
    chat.pin(3)
    chat.compact("sliding-window", keep_recent=0)
    assert "Neither." in texts(chat)
    assert "HAT078 it is." not in texts(chat)


def test_what_is_in_sight_beside_a_summary_is_corrected_there(chat):
    chat.compact("sliding-window", keep_recent=1)
    chat.pin(3)
    hidden = texts(chat)
    assert "HAT078 it is." in hidden
    edit = chat.correct(3, "Neither.")
    assert texts(chat) == ["Neither." if text == "HAT078 it is." else text for text in hidden]
    with pytest.raises(refold.NotFoundError, match=rf"#2 is hidden by #{edit}; restore #2 first"):
        chat.correct(2, "x")
    chat.restore(2)
    chat.correct(2, "HAT118 costs 90")
    assert [text for text in texts(chat) if text in ("HAT118 costs 90", "Neither.")] == [
        "HAT118 costs 90",
        "Neither.",
    ]
    assert check_request("openai-chat", chat.fit().request) == []
    for _ in range(3):
        chat.undo()
    assert texts(chat) == hidden


def test_what_is_reduced_is_corrected_in_full_and_reduced_again_when_that_is_undone():
    rule = {"expire": {"after_steps": 0, "mode": "compact", "length": 20}}
    agents = {"default": {"tools": {"ls": rule}}}
    chat = refold.open("c", store="memory://", model="gpt-5", config={"agents": agents})
    chat.append([user("List."), call("c1"), result("c1", "file " * 200), agent("Many.")])
    chat.fit()
    assert "[refold #2 ls" in texts(chat)[2]
    long = "report.pdf is the only one. " * 20
    chat.correct(2, long)
    chat.append([agent("One."), user("And?")])
    chat.fit()
    assert texts(chat)[2] == long
    assert chat.explain(2).shown == "corrected"
    chat.undo()
    assert "[refold #2 ls" in texts(chat)[2]


def test_nothing_points_from_a_correction_to_what_it_corrects():
    """A short form of it would have the handle of the original."""
    ladder = {"compact": {"keep_recent": 2, "prune": {"protect": 0, "minimum": 0, "keep_steps": 0}}}
    models = {"m": {"window": 3_000, "max_output": 300}}
    settings = {"models": models, "agents": {"default": ladder}}
    chat = refold.open("c", store="memory://", model="m", config=settings)
    chat.append([user("List."), call("c1"), result("c1", "old.txt " * 100)])
    chat.correct(2, "new.txt " * 100)
    for n in range(30):
        chat.append([call(f"d{n}"), result(f"d{n}", f"other{n}.txt " * 40)])
        chat.fit()
        assert "[refold #2 " not in "\n".join(texts(chat))
        assert "old.txt" not in "\n".join(texts(chat))


def test_system_text_is_corrected_wherever_it_stands():
    for before in ({"role": "system", "content": "Be brief."}, {"system": "Be brief."}):
        chat = refold.open("c", store="memory://", model="claude-sonnet-5")
        chat.append([before, user("Hello.")], dialect="anthropic" if "system" in before else None)
        chat.correct(0, "Be kind.")
        assert "Be kind." in json.dumps(chat.fit().request)
        chat.undo(0)
        assert "Be brief." in json.dumps(chat.fit().request)
    chat.append({"system": "Be quick."}, dialect="anthropic")
    with pytest.raises(refold.NotFoundError, match="newer system text replaced it"):
        chat.correct(0, "x")


def test_a_correction_holds_in_its_own_view_after_a_restart_and_in_a_fork(tmp_path):
    url = f"sqlite:///{tmp_path}/a.db"
    with refold.open("c", store=url, model="gpt-5") as chat:
        chat.append([user("Fly to Oslo."), agent("Well.")])
        chat.correct(0, "Fly to Bergen.")
    with refold.open("c", store=url) as chat, refold.open("c", store=url, view="other") as other:
        assert texts(chat)[0] == "Fly to Bergen."
        assert texts(other)[0] == "Fly to Oslo."
        fork = chat.fork("d")
        chat.undo()
        assert (texts(chat)[0], texts(fork)[0]) == ("Fly to Oslo.", "Fly to Bergen.")
        loaded = refold.load(fork.export(), store="memory://", conversation="e")
        assert texts(loaded)[0] == "Fly to Bergen."


# Summaries are made of corrections


WRONG, RIGHT = "The invoice is INV-4117.", "The invoice is INV-4711."


def test_a_summary_is_made_of_what_was_corrected():
    asked = []

    def write(one):
        asked.append(one)
        return summary("The files were read.")

    talk = Talk(write)
    talk.step(agent(WRONG))
    talk.chat.correct(3, RIGHT)
    talk.until(lambda: talk.written)
    assert any(RIGHT in one.prompt for one in asked)
    assert not any("INV-4117" in one.prompt for one in asked)
    assert "INV-4117" not in "\n".join(texts(talk.chat))
    assert "INV-4711" in talk.summary


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("is_undone", [False, True])
def test_what_was_prepared_before_a_correction_is_not_applied(at, is_undone):
    """Neither what was made without one, nor what was made of one that was taken back; also of the task."""
    talk = Talk(lambda one: summary(f"{WRONG if WRONG in one.prompt else RIGHT}"))
    talk.step(agent(WRONG))
    if is_undone:
        talk.chat.correct(at, RIGHT)
    summaries = talk.chat.chat.summaries
    while not summaries.ready(talk.chat.record.live.freeze()):
        assert not any(edit.round for edit in talk.edits)
        talk.say(*_reading(talk))
        talk.chat.fit()
        talk.settle()
    if is_undone:
        talk.chat.undo(at)
    else:
        talk.chat.correct(at, RIGHT)
    assert summaries.ready(talk.chat.record.live.freeze()) is None
    while not any(edit.round for edit in talk.edits):
        talk.say(*_reading(talk))
        talk.chat.fit()
    assert (RIGHT if is_undone else WRONG) not in "\n".join(texts(talk.chat))


def _reading(talk: Talk) -> list[dict[str, Any]]:
    talk.read += 1
    return reading(talk.read)


# Undo


def edits_of(session: Session) -> list[Replaced]:
    return [event for event in session.events() if isinstance(event, Replaced)]


def try_to(session: Session, deed: tuple) -> None:
    with suppress(refold.RefoldError):
        if deed[0] == "correct":
            session.correct(*deed[1:])
        else:
            do(session, deed)


def begun() -> Session:
    session = new_session()
    session.append([user("Fly."), call("c1", "c2"), result("c1", "120"), result("c2", "90"), agent("Well.")])
    return session


things = st.lists(deeds | corrections | corrections, max_size=25)


# proves: B9
@given(things, st.randoms(use_true_random=False))
def test_edits_undone_in_any_order_give_back_what_was_said(deeds, random):
    session = begun()
    for deed in deeds:
        try_to(session, deed)
    standing = edits_of(session)
    random.shuffle(standing)
    for edit in standing:
        before = session.view().items
        with suppress(refold.NotFoundError):  # it never stood, or is undone already
            undone = session.undo(edit.at)
            after = session.view().items
            assert undone.of == edit.at
            assert (undone.covered_by is not None) == (before == after)
            if undone.covered_by is not None:
                assert session.record.event(undone.covered_by).span.covers(edit.span)
    newest = [event.at for event in session.events() if isinstance(event, Said) and event.line.apart][-1:]
    said = [event for event in session.events() if isinstance(event, Said)]
    assert session.view().messages == [e.message for e in said if not e.line.apart or e.at in newest]


@given(things, st.integers(0, 40))
def test_an_undoing_that_is_undone_puts_back_what_there_was_or_says_what_is_in_the_way(deeds, at):
    session = begun()
    for deed in deeds:
        try_to(session, deed)
    before = session.view().messages
    with suppress(refold.NotFoundError):
        undone = session.undo(at)
        session.undo(undone)
        assert session.view().messages == before
    for event in [event for event in session.events() if isinstance(event, Undone)]:
        try:
            session.undo(event.at)
        except refold.NotFoundError:
            continue
        except refold.ConflictError as error:
            other = int(str(error).partition("undo #")[2].split()[0])
            assert session.record.event(other).span
            assert session.undo(other).of == other


@given(things)
@settings(max_examples=settings().max_examples // 2)
def test_whatever_people_do_requests_are_valid_and_the_view_is_the_fold(deeds):
    session = begun()
    for deed in deeds:
        try_to(session, deed)
        assert session.view() == fold(session.events())
        with suppress(refold.OverBudgetError):
            request = session.fit().request
            assert [fault for fault in check_request("openai-chat", request) if fault.rule != "G2"] == []


@given(things)
def test_what_must_be_in_every_view_is_there_as_it_was_said_or_corrected(deeds):
    session = begun()
    for deed in deeds:
        try_to(session, deed)
        state = session.record.live.state
        pinned = {line.at for pin in state.pins.values() if pin.holds for line in pin.lines}
        must = pinned | {at for at in (state.task and state.task.at, state.latest) if at is not None}
        shown = [line for line in session.view().lines if line.place in must]
        assert sorted(line.place for line in shown) == sorted(must)
        for line in shown:
            event = session.record.event(line.at)
            assert line.corrects is None or event.kind == "correct"


def test_undo_beneath_a_later_edit_says_so_and_shows_when_that_is_undone(chat):
    first = chat.correct(3, "Neither.")
    chat.compact("sliding-window", keep_recent=1)
    cover = edits_of(chat)[-1].at
    undone = chat.undo(first)
    assert isinstance(undone, Undoing)
    assert (undone.of, undone.covered_by) == (first, cover)
    last = chat.undo(cover)
    assert (last.of, last.covered_by, last) == (cover, None, undone + 1)
    assert texts(chat) == SAID
    again = chat.undo(undone)
    assert (texts(chat)[3], again.covered_by) == ("Neither.", None)


def test_an_undoing_that_cannot_be_undone_names_what_is_in_the_way(chat):
    def hide(start: int, end: int) -> int:
        span = Span(start, end)
        return chat.record.append(lambda: [_hiding(chat.record.live.state.next, span)])[0].at

    first = hide(1, 4)
    undone = chat.undo(first)
    second = hide(3, 6)
    with pytest.raises(refold.ConflictError, match=f"#{undone} cannot be undone: #{second} is in the way"):
        chat.undo(undone)
    chat.undo(second)
    chat.undo(undone)
    assert texts(chat) == [SAID[0], *SAID[4:]]


def _hiding(at: int, span: Span) -> Replaced:
    return Replaced(at, "main", span, (), (), "test", "", (0, 0), 0.0)


# Diff


def test_a_diff_has_what_one_moment_shows_and_the_other_does_not(chat):
    chat.correct(3, "Neither.")
    found = chat.diff(5)
    assert [(one.at, one.role, one.text, one.edit) for one in found.removed] == [
        (3, "assistant", "HAT078 it is.", None)
    ]
    assert [(one.at, one.text, one.edit) for one in found.added] == [(3, "Neither.", 6)]
    assert (found.old.at, found.new.at, found.old.messages, found.parted_at) == (5, None, 6, None)
    assert found.new.tokens == chat.view().tokens
    assert "".join(change.sign for change in found.changes) == "   -+  "
    back = chat.diff(6, 5)
    assert [(one.at, one.message) for one in back.removed] == [(one.at, one.message) for one in found.added]
    assert [(one.at, one.message) for one in back.added] == [(one.at, one.message) for one in found.removed]
    assert not chat.diff(3, 3)
    assert [one.at for one in chat.diff(1, 3).added] == [2, 3]
    assert [one.text for one in chat.diff(0, 1).added] == ["Looking. ls {}"]


def test_a_long_message_is_told_by_its_beginning(chat):
    at = chat.append(user("many words " * 50))
    [seen] = chat.diff(at - 1).added
    assert len(seen.text) == 80
    assert seen.message.text == "many words " * 50


@pytest.mark.parametrize("place", [99, -1, "x"])
def test_a_diff_with_a_moment_that_never_was_is_refused(chat, place):
    with pytest.raises(refold.RefoldError):
        chat.diff(place)
    with pytest.raises(refold.RefoldError, match="Give a place, or another conversation"):
        chat.diff()


def test_a_fork_is_compared_with_where_it_came_from(chat):
    fork = chat.fork("sea", at=3)
    assert [one.at for one in chat.diff(other=fork).removed] == [4, 5]
    fork.append([user("By sea."), agent("DFDS leaves at 16:30.")])
    fork.correct(2, "HAT118 costs 90")
    found = chat.diff(other=fork)
    assert (found.old.conversation, found.new.conversation, found.parted_at) == ("trip", "sea", 3)
    assert [one.text for one in found.old.recorded] == SAID[4:]
    assert [one.text for one in found.new.recorded] == ["By sea.", "DFDS leaves at 16:30."]
    assert [one.text for one in found.removed] == ["HAT078 costs 120", *SAID[4:]]
    assert [one.at for one in found.added] == [2, 4, 5]
    then = chat.diff(4, 4, other=fork)
    assert ([one.at for one in then.old.recorded], [one.at for one in then.new.recorded]) == ([4], [4])


def test_what_both_said_alike_after_they_parted_is_no_difference(chat):
    fork = chat.fork("sea")
    for session in (chat, fork):
        session.append(user("Thanks."))
    found = chat.diff(other=fork)
    assert not found
    assert found.parted_at == 5
    stranger = refold.open("other", store="memory://", model="gpt-5")
    stranger.append(user("Hello."))
    found = chat.diff(other=stranger)
    assert (found.parted_at, len(found.removed), len(found.added)) == (-1, 7, 1)
    assert chat.diff(other=chat).parted_at == 6


# proves: B9
def test_the_view_at_any_place_is_what_was_shown_then(chat):
    seen = []
    for at in range(6):
        seen.append((at, SAID[: at + 1]))
    for text in ("one", "two"):
        seen.append((chat.correct(0, text), [text, *SAID[1:]]))
    seen.append((int(chat.undo()), ["one", *SAID[1:]]))
    for at, shown in seen:
        assert texts(chat, at) == shown


# By their twins


def test_the_async_twin_has_the_same_words():
    async def play() -> None:
        async with await refold.aopen("c", store="memory://", model="gpt-5") as chat:
            await chat.append([user("Fly to Oslo."), agent("Well.")])
            edit = await chat.correct(0, "Fly to Bergen.")
            fork = await chat.fork("d")
            await fork.append(user("More."))
            assert [one.at for one in (await chat.diff(1)).added] == [0]
            assert [one.text for one in (await chat.diff(other=fork)).added] == ["More."]
            assert isinstance(fork, AsyncSession)
            assert (await chat.undo()).of == edit

    asyncio.run(play())


# On the command line


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A folder with the same conversation in its store, as the command line finds it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REFOLD_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    with refold.open("trip", store=STORE, model="gpt-5") as session:
        session.append([user("Fly to Oslo."), call("c1", text="Looking."), result("c1", "HAT078 costs 120")])
        session.append([agent("HAT078 it is."), user("And a hotel?"), agent("The Grand.")])
    return tmp_path


def shown(*args: Any) -> list[str]:
    found = ask("show", "trip", *args)
    return [one["message"]["parts"][0].get("text") for item in found["items"] for one in item["shown"]]


def counts(id: str) -> tuple[int, ...]:
    """Messages that are shown whole, shown reduced, and hidden."""
    items = ask("show", id)["items"]
    return tuple(sum(item[name] for item in items) for name in ("whole", "reduced", "hidden"))


def test_correct_takes_a_text_a_file_standard_input_or_a_message(shell):
    done = ask("correct", "trip", 3, "Neither.", "--why", "sold out")
    assert {key: done[key] for key in ("did", "of", "at", "conversation")} == {
        "did": "correct",
        "of": 3,
        "at": 6,
        "conversation": "trip",
    }
    assert shown()[3] == "Neither."
    (shell / "new.txt").write_text("From a file.\n")
    run("correct", "trip", 3, "--file", "new.txt")
    assert shown()[3] == "From a file."
    run("correct", "trip", 3, "-", input="From a pipe.")
    assert shown()[3] == "From a pipe."
    run("correct", "trip", 3, "--message", json.dumps(agent("Whole.")))
    assert shown()[3] == "Whole."
    out = run("correct", "trip", 0, "Fly to Bergen.").stdout
    assert out.startswith("#0 is corrected (event #10)")
    assert "Undo it: refold undo trip 10" in out
    assert "sold out" in run("explain", "trip", 3).stdout


def test_what_cannot_be_corrected_says_why(shell):
    assert "has no place 99" in run("correct", "trip", 99, "x", code=1).stderr
    assert "give either a text" in run("correct", "trip", 3, code=2).stderr
    assert "give either a text" in run("correct", "trip", 3, "x", "--file", "y", code=2).stderr
    assert "expected assistant as in #3, got user" in (
        run("correct", "trip", 3, "--message", json.dumps(user("x")), code=1).stderr
    )
    assert "is not JSON" in run("correct", "trip", 3, "--message", "{", code=1).stderr
    run("correct", "trip", 3, "--file", "absent.txt", code=1)
    (shell / "latin.txt").write_bytes(b"\xff\xfe")
    assert "UTF-8" in run("correct", "trip", 3, "--file", "latin.txt", code=1).stderr


def test_a_corrected_message_is_seen_as_such(shell):
    run("correct", "trip", 3, "[refold #1 x: y; z] Neither.")
    row = next(line for line in run("show", "trip").stdout.splitlines() if line.startswith("#3 "))
    assert "correct" in row
    assert "[refold #1 x: y; z] Neither." in row
    assert "is corrected: another message is shown in its place" in run("explain", "trip", 3).stdout
    assert run("expand", "trip", 3).stdout.strip() == "HAT078 it is."
    assert counts("trip") == (5, 1, 0)
    assert shown("--at", 5)[3] == "HAT078 it is."


def test_a_correction_beside_a_summary_is_seen_there(shell):
    with refold.open("trip", store=STORE, model="gpt-5") as session:
        session.correct(0, "Fly to Bergen.")
        session.pin(0)
        session.compact("sliding-window", keep_recent=1)
        session.pin(3)
        session.correct(3, "Neither.")
    assert sum(counts("trip")) == ask("show", "trip")["recorded_messages"] == 6
    assert counts("trip")[1] == 2
    out = run("show", "trip").stdout
    assert "  #3" in out
    assert "Neither." in run("show", "trip", "--full").stdout
    assert ask("doctor")["healthy"]


def test_undo_says_what_still_covers_it(shell):
    run("correct", "trip", 3, "one")
    run("correct", "trip", 3, "two")
    assert ask("undo", "trip", 6)["covered_by"] == 7
    run("undo", "trip", 8)
    out = run("undo", "trip", 6).stdout
    assert "#6 is undone, but #7 still covers it: refold undo trip 7 (event #10)" in out
    assert "covered_by" not in ask("undo", "trip", 7)
    assert shown()[3] == "HAT078 it is."


def test_a_diff_with_a_fork_says_where_they_part_and_what_each_said(shell):
    run("fork", "trip", "sea", "--at", 3)
    with refold.open("sea", store=STORE, model="gpt-5") as session:
        session.append([user("By sea."), agent("DFDS leaves at 16:30.")])
    found = ask("diff", "trip", "--with", "sea")
    assert (found["old"]["conversation"], found["new"]["conversation"], found["parted_at"]) == (
        "trip",
        "sea",
        3,
    )
    assert [one["message"]["parts"][0]["text"] for one in found["old"]["recorded"]] == SAID[4:]
    assert [one["at"] for one in found["changes"] if one["sign"] == "+"] == [4, 5]
    lines = run("diff", "trip", "--with", "sea").stdout.splitlines()
    assert lines[0] == "Both share the events up to #3"
    assert lines[1] == "trip recorded 2 messages since"
    assert "sea recorded 2 messages since" in lines
    assert any(line.startswith("--- trip view now") for line in lines)
    assert lines[-1].startswith("2 removed, 2 added")
    assert "There is no conversation 'see'" in run("diff", "trip", "--with", "see", code=1).stderr
    assert "give a place" in run("diff", "trip", code=2).stderr


def test_a_part_is_expanded_by_lines_items_characters_or_what_matches(shell):
    text = json.dumps([{"file": f"f{n}", "size": n} for n in range(9)], indent=1)
    with refold.open("trip", store=STORE, model="gpt-5") as session:
        at = session.append([call("c2"), result("c2", text)])[1]
    for name, value in (("lines", "2-4"), ("items", "1-2"), ("chars", "0-20"), ("match", "f7")):
        found = ask("expand", "trip", at, f"--{name}", value)
        assert found == {"at": at, name: value, "text": session_text(at, **{name: value})}
        assert run("expand", "trip", at, f"--{name}", value).stdout.rstrip("\n") == found["text"].rstrip("\n")
    run("expand", "trip", at, "--lines", "900-901", code=1)


def session_text(at: int, **part: Any) -> str:
    with refold.open("trip", store=STORE) as session:
        return session.expand(at, **part)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"recorded conversations are not at {TRACES}")
@pytest.mark.parametrize("name", ["anthropic_pi_coding_agent", "livemcpbench", "tau_bench_airline"])
def test_all_of_a_recorded_conversation_is_corrected_and_that_is_undone_in_any_order(name):
    history = json.loads((TRACES / f"{name}.jsonl").read_text().partition("\n")[0])["messages"][:60]
    dialect = "anthropic" if name.startswith("anthropic") else "openai-chat"
    chat = refold.open("c", store="memory://", model="gpt-5")
    chat.append(history, dialect=dialect)
    before, request = chat.view().messages, chat.fit(dialect=dialect).request
    places = [line.at for line in chat.view().lines]
    edits = [chat.correct(at, f"corrected {at}") for at in places]
    assert texts(chat) == [f"corrected {at}" for at in places]
    assert check_request(dialect, chat.fit(dialect=dialect).request) == []
    for edit in edits[::2] + edits[1::2]:
        chat.undo(edit)
    assert chat.view().messages == before
    assert chat.fit(dialect=dialect).request == request
