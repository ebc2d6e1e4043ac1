"""What a user does with a conversation, as they would type it."""

import asyncio
import json
from itertools import product
from random import Random
from threading import Thread

import pytest

import histories
import refold
from refold import AsyncSession, Message, Text, ToolCall, ToolResult
from refold.core.event import Expiry, Measured, Replaced, Said, Span
from refold.core.message import Media, Usage
from refold.dialects.registry import TARGETS
from refold.session import aio
from refold.stores.memory import MemoryStore

SMALL = {
    "models": {"m": {"window": 1_000, "max_output": 200, "provider": "openai"}},
    "agents": {"default": {"compact": {"strategy": "sliding-window", "prune": "off"}, "dedupe": "off"}},
}


def call(id: str, name: str = "ls", arguments: str = "{}") -> dict:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": id, "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.fixture
def chat():
    return refold.open("task", store="memory://", model="m", config=SMALL)


def work(chat, steps: int, words: int = 40, start: int = 0) -> None:
    for n in range(start, start + steps):
        chat.append([call(f"c{n}"), result(f"c{n}", f"file{n} " * words)])
        chat.fit()


@pytest.fixture
def worked(chat):
    chat.append([{"role": "system", "content": "Be brief."}, user("Sort the files.")])
    work(chat, 20)
    return chat


def test_append_returns_the_place(chat):
    assert chat.append(user("one")) == 0
    assert chat.append([user("two"), user("three")]) == [1, 2]
    assert chat.append([]) == []


def test_fit_gives_back_what_was_appended_while_it_fits(chat):
    history = [
        user("hello"),
        call("a"),
        result("a", "x"),
        {"role": "assistant", "content": "done", "x_note": 1},
    ]
    chat.append(history)
    fitted = chat.fit()
    assert fitted.messages == history
    assert fitted.request == {"model": "m", "messages": history}
    assert fitted.report.edits == ()
    assert fitted.report.tokens.before == fitted.report.tokens.final


def test_fit_keeps_system_task_and_the_newest_when_it_does_not(worked):
    messages = worked.fit().messages
    assert messages[0]["content"] == "Be brief."
    assert messages[1]["content"] == "Sort the files."
    assert messages[-1]["content"].startswith("file19 ")
    assert len(messages) < worked.get_count()
    assert worked.get_count() == 42


# proves: B3, C10b
def test_the_report_says_what_was_done_and_why(chat):
    chat.append(user("Sort the files."))
    for n in range(8):
        chat.append([call(f"c{n}"), result(f"c{n}", "word " * 60)])
    report = chat.fit().report
    (edit,) = report.edits
    assert report.fired == ("threshold",)
    assert report.cache_break_at == edit.span.start == 1
    assert report.tokens.after == {"window": report.tokens.final}
    assert edit.tokens_saved == report.tokens.before - report.tokens.final
    assert "newest" in edit.why
    assert report.limit == 1_000
    assert report.room == 800 - report.tokens.final


def test_tools_count_towards_the_request(chat):
    chat.append(user("hello"))
    tools = [{"type": "function", "function": {"name": "ls", "description": "list " * 50}}]
    fitted = chat.fit(tools=tools)
    assert fitted.request["tools"] == tools
    assert fitted.report.tokens.final > chat.fit().report.tokens.final + 50


def test_the_caller_may_change_what_fit_returned(chat):
    chat.append([user("hello"), call("a"), result("a", "x")])
    first = chat.fit().messages
    first[0]["content"] = "spoiled"
    first[1]["tool_calls"][0]["function"]["name"] = "spoiled"
    first.clear()
    assert "spoiled" not in json.dumps(chat.fit().messages)
    assert len(chat.fit().messages) == 3


# proves: A4
def test_off_means_off(chat):
    chat.append(user("x " * 2_000))
    before = list(chat.events())
    fitted = chat.fit(override={"off": True})
    assert fitted.messages == [user("x " * 2_000)]
    assert "room for" in fitted.report.notices[0]
    assert list(chat.events()) == before
    off = {**SMALL, "agents": {"a": {"compact": False}}}
    still = refold.open("task", store=chat.store, model="m", agent="a", config=off)
    assert still.fit().messages == fitted.messages


def test_what_must_be_shown_is_larger_than_the_window(chat):
    chat.append(user("x " * 2_000))
    with pytest.raises(refold.OverBudgetError) as caught:
        chat.fit()
    assert caught.value.tokens > 2_000
    assert caught.value.room == 800
    assert chat.get_count() == 1


# proves: E9
def test_an_empty_conversation_is_no_fault(chat):
    assert chat.fit().messages == []
    assert chat.view().items == ()
    assert chat.get_all() == chat.get_recent() == []
    assert chat.compact().tokens_saved == 0
    with pytest.raises(refold.NotFoundError):
        chat.undo()


# proves: C15
def test_a_call_that_was_never_answered_is_mended_in_the_view_only(chat):
    chat.append([user("go"), call("a"), user("stop that")])
    fitted = chat.fit()
    assert [m["role"] for m in fitted.messages] == ["user", "assistant", "tool", "user"]
    assert "interrupted" in fitted.messages[2]["content"]
    assert "a" in fitted.report.notices[0]
    assert chat.get_count() == 3
    chat.append(result("a", "late"))
    assert chat.fit().messages[2] == result("a", "late")
    assert chat.fit().report.notices == ()


# proves: C15, E9
def test_a_result_without_its_call_becomes_labelled_text(chat):
    chat.append([user("go"), result("ghost", "boo")])
    last = chat.fit().messages[-1]
    assert last["role"] == "user"
    assert "boo" in last["content"]


def test_of_two_results_the_last_wins(chat):
    chat.append([user("go"), call("a"), result("a", "first"), result("a", "second")])
    assert [m["content"] for m in chat.fit().messages] == ["go", None, "second"]


def test_a_lone_surrogate_is_kept_in_the_record_and_replaced_in_the_request(chat):
    chat.append(user("broken \ud800 text"))
    assert chat.get_all()[0].message.text == "broken \ud800 text"
    assert chat.fit().messages[0]["content"] == "broken \\ud800 text"


def test_an_id_appended_twice_is_stored_once(chat):
    assert chat.append(user("hello"), id="x") == 0
    assert chat.append(user("hello again"), id="x") == 0
    mixed = [Message("user", "b", id="y"), Message("user", "hello", id="x"), Message("user", "c", id="y")]
    assert chat.append(mixed) == [1, 0, 1]
    assert [m.id for m in chat.get_all()] == ["x", "y"]


def test_several_results_in_one_message_become_one_event_each(chat):
    asked = Message("assistant", [ToolCall("a", "ls", "{}"), ToolCall("b", "cat", "{}")])
    answered = Message("tool", [ToolResult("a", "1"), ToolResult("b", "2")], id="both")
    chat.append(user("go"))
    assert chat.append([asked, answered]) == [1, 2]
    assert [m.id for m in chat.get_all()] == ["m0", "m1", "both", "both␟1"]
    assert chat.append(answered) == 2
    assert [m["content"] for m in chat.fit().messages[2:]] == ["1", "2"]
    assert [m.tools for m in chat.get_all()] == [(), ("ls", "cat"), ("ls",), ("cat",)]


# proves: A2, B2
def test_a_stored_message_knows_everything_about_itself(worked):
    stored = worked.get_all()[3]
    assert (stored.at, stored.index, stored.turn, stored.step) == (3, 3, 1, 1)
    assert stored.kind == "action-result"
    assert stored.tools == ("ls",)
    assert stored.was_compacted
    assert stored.can_expand
    assert stored.tokens_saved == stored.tokens
    assert stored.original_length == len(stored.message.text)
    assert stored.part_id(0) == "m3.0"
    assert stored.conversation == "task"
    newest = worked.get_all()[-1]
    assert not newest.was_compacted
    assert newest.tokens_saved == 0


# proves: A1, A2
def test_metadata_of_the_application_and_of_the_engine_survive(tmp_path):
    expiry = Expiry(after_steps=2, mode="compact")
    with refold.open("task", store=f"sqlite:///{tmp_path}/a.db") as chat:
        message = Message("user", [Text("hi")], meta={"ticket": 7})
        chat.append(message, tags=["vip"], kind="retry-context", expiry=expiry, tools=["crm"])
    (stored,) = refold.open("task", store=f"sqlite:///{tmp_path}/a.db").get_all()
    assert stored.message.meta == {"ticket": 7}
    assert (stored.tags, stored.kind, stored.expiry, stored.tools) == (
        ("vip",),
        "retry-context",
        expiry,
        ("crm",),
    )


OWN = {"metadata": {"ticket": 7}, "error": "it broke", "tags": ["vip"], "id": "row-1"}
OWN["expiry"] = {"after_steps": 2, "mode": "compact"}
DIALECTS = {
    "openai-chat": {"role": "user", "content": "hi"},
    "anthropic": {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    "openai-responses": {"type": "message", "role": "user", "content": "hi"},
    "ai-sdk": {"role": "user", "content": [{"type": "text", "text": "hi"}]},
}


# proves: A1, A2
@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_of_a_dict_that_are_for_refold_are_kept_with_the_message_and_not_sent(dialect, tmp_path):
    said, store = DIALECTS[dialect], f"sqlite:///{tmp_path}/a.db"
    has_ids = dialect in ("openai-responses", "ai-sdk")
    value = said | OWN | {"id": "msg_1"}
    with refold.open("task", store=store) as chat:
        place = chat.append(value, dialect=dialect)
        assert (chat.append(value, dialect=dialect) == place) is not has_ids  # an id is stored once
    chat = refold.open("task", store=store)
    stored = chat.get_all()[0]
    assert (stored.message.meta, stored.message.error) == ({"ticket": 7}, "it broke")
    assert (stored.tags, stored.expiry) == (("vip",), Expiry(after_steps=2, mode="compact"))
    assert stored.id == ("m0" if has_ids else "msg_1")
    assert chat.fit(dialect=dialect).messages[0] == (said | {"id": "msg_1"} if has_ids else said)
    assert json.loads(next(chat.events()).raw) == value  # the record has it as it came
    bare = refold.open("bare", store=store)
    bare.append(said, dialect=dialect)
    assert stored.tokens == bare.get_all()[0].tokens


# proves: A1, A2
@pytest.mark.parametrize(
    ("field", "dialect"), [("system", "anthropic"), ("instructions", "openai-responses")]
)
@pytest.mark.parametrize("is_named", [True, False])
def test_fields_that_are_for_refold_are_kept_with_system_text_that_stands_apart(field, dialect, is_named):
    said = {field: "Be brief."}
    chat = refold.open("task", store="memory://")
    place = chat.append(said | OWN, dialect=dialect if is_named else None)
    assert chat.append(said | OWN, dialect=dialect if is_named else None) == place
    chat.append(user("hi"))
    stored, _ = chat.get_all()
    assert (stored.id, stored.message.meta, stored.message.error) == ("row-1", {"ticket": 7}, "it broke")
    assert (stored.tags, stored.expiry) == (("vip",), Expiry(after_steps=2, mode="compact"))
    assert chat.fit(dialect=dialect).system == "Be brief."
    assert chat.fit(dialect=dialect).messages == [user("hi")]
    chat.append({field: "Be long."})
    assert chat.fit(dialect=dialect).system == "Be long."


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_an_error_that_an_item_of_the_api_does_not_have_is_for_refold(kind):
    call = {"type": kind, "call_id": "c1", "name": "ls"}
    call |= {"arguments": "{}"} if kind == "function_call" else {"input": "x"}
    output = {"type": f"{kind}_output", "call_id": "c1", "output": "a.txt"}
    said = {"type": "message", "role": "user", "content": "hi"}
    chat = refold.open("task", store="memory://", model="gpt-5")
    chat.append([said, call | {"error": "it broke"}, output | {"error": {"message": "late"}}])
    assert chat.fit().messages == [said, call, output]
    assert [one.message.error for one in chat.get_all()] == [None, "it broke", "late"]


def test_fields_that_are_for_refold_go_with_each_result_of_a_message_that_has_several():
    uses = [{"type": "tool_use", "id": id, "name": "ls", "input": {}} for id in "ab"]
    found = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in "ab"]
    history = [user("go"), {"role": "assistant", "content": uses}, {"role": "user", "content": found}]
    chat = refold.open("task", store="memory://", model="claude-sonnet-5")
    chat.append([*history[:2], history[2] | OWN])
    assert [one.message.meta for one in chat.get_all()[2:]] == [{"ticket": 7}] * 2
    assert [one.tags for one in chat.get_all()[2:]] == [("vip",)] * 2
    assert chat.fit().messages == history
    assert refold.fit([*history[:2], history[2] | OWN], model="claude-sonnet-5") == history


def test_fields_that_a_provider_knows_are_sent_as_they_came():
    item = {"type": "mcp_call", "id": "mcp_1", "name": "ls", "arguments": "{}", "server_label": "files"}
    item |= {"error": "no such server", "output": None}
    chat = refold.open("task", store="memory://", model="gpt-5")
    chat.append([{"type": "message", "role": "user", "content": "hi"}, item | {"metadata": {"ticket": 7}}])
    assert chat.fit().messages[1] == item
    assert chat.get_all()[1].message.meta == {"ticket": 7}


def test_an_id_that_a_provider_gives_the_message_of_its_reply_is_not_the_messages_id(chat):
    said = {"role": "assistant", "content": "hi", "id": "0", "tags": "any"}
    reply = {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop", "message": said}]}
    assert [chat.append(user("hi")), chat.append(reply), chat.append(reply)] == [0, 1, 2]
    assert chat.get_all()[1].tags == ()


def test_what_is_given_to_append_beats_the_fields_of_a_dict(chat):
    chat.append(user("hi") | OWN, id="other", tags=["new"], expiry=Expiry(after_steps=9))
    (stored,) = chat.get_all()
    assert (stored.id, stored.tags, stored.expiry) == ("other", ("new",), Expiry(after_steps=9))


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"id": []}, "message.id: expected a text or a whole number"),
        ({"tags": "vip"}, "message.tags: "),
        ({"expiry": {"after_steps": -1}}, "message.expiry.after_steps: -1 is too small"),
        ({"expiry": {"after_stps": 1}}, "message.expiry.after_stps: is not known"),
    ],
)
def test_a_field_that_is_for_refold_and_is_not_as_it_must_be_is_refused_by_its_place(chat, own, problem):
    with pytest.raises(refold.RefoldError) as caught:
        chat.append(user("hi") | own)
    assert str(caught.value).startswith(problem)
    assert chat.get_count() == 0


def test_usage_of_an_answer_is_measured_against_what_was_sent(chat):
    chat.append(user("hello"))
    sent = chat.fit() and chat.view().tokens
    chat.append(Message("assistant", "hi", model="m", usage=Usage(input=12, output=1)))
    measured = list(chat.events())[-1]
    assert isinstance(measured, Measured)
    assert (measured.usage.input, measured.estimate, measured.of) == (12, sent, 1)


# proves: B1
def test_messages_by_index_and_the_newest_first_ones(worked):
    assert [m.index for m in worked.get_range(5, 8)] == [5, 6, 7]
    assert [m.index for m in worked.get_range(40, 99)] == [40, 41]
    assert worked.get_range(99, 120) == worked.get_range(7, 7) == []
    assert [m.index for m in worked.get_recent(3)] == [39, 40, 41]
    newest = worked.get_all()[-1].tokens
    assert [m.index for m in worked.get_recent(max_tokens=newest)] == [41]
    assert worked.get_recent(99, include_system=False)[0].index == 1


# proves: B9
def test_undo_gives_back_the_view_before(worked):
    before = worked.view()
    while any(item.edit is not None for item in worked.view().items):
        worked.undo()
    assert len(worked.view().messages) == worked.get_count()
    assert before.messages != worked.view().messages


def test_undo_of_an_undoing_is_redo(worked):
    before = worked.view()
    undoing = worked.undo()
    assert worked.view().messages != before.messages
    worked.undo(undoing)
    assert worked.view().messages == before.messages


def test_undo_by_the_place_of_a_hidden_message(worked):
    hidden = len(worked.view().messages)
    worked.undo(5)
    assert len(worked.view().messages) > hidden
    with pytest.raises(refold.NotFoundError):
        worked.undo(0)


# proves: A3
def test_a_restored_message_comes_with_its_call(worked):
    hidden = worked.view()
    worked.restore(5)
    shown = worked.fit(override={"off": True}).messages
    assert result("c1", "file1 " * 40) in shown
    assert call("c1") in shown
    worked.undo()
    assert worked.view().messages == hidden.messages
    with pytest.raises(refold.NotFoundError, match="shown already"):
        worked.restore(0)


def test_restoring_an_edit_brings_all_of_it_back(worked):
    edit = next(item.edit for item in worked.view().items if item.edit is not None)
    worked.restore(edit)
    assert len(worked.view().messages) == worked.get_count()


def test_a_pinned_message_stays_whatever_comes(worked):
    worked.pin(5)
    work(worked, 30, start=20)
    shown = worked.fit().messages
    assert call("c1") in shown
    assert result("c1", "file1 " * 40) in shown
    worked.unpin(5)
    assert call("c1") not in worked.fit().messages
    with pytest.raises(refold.NotFoundError):
        worked.unpin(5)


def test_a_result_that_comes_after_its_call_was_pinned_is_pinned_too(chat):
    chat.append([user("go"), call("a")])
    chat.pin(1)
    chat.append(result("a", "late"))
    work(chat, 20)
    assert result("a", "late") in chat.fit().messages


# proves: B9
def test_the_view_as_it_was(worked):
    assert [m.text for m in worked.view(1).messages] == ["Be brief.", "Sort the files."]
    edits = [event.at for event in worked.events() if isinstance(event, Replaced)]
    assert len(worked.view(edits[0] - 1).messages) > len(worked.view(edits[0]).messages)
    assert worked.view(max(event.at for event in worked.events())) == worked.view()
    with pytest.raises(refold.NotFoundError):
        worked.view(10_000)


# proves: B9
def test_a_fork_shares_the_past_and_goes_its_own_way(worked):
    fork = worked.fork("other", at=7)
    assert [m.text for m in fork.view(7).messages] == [m.text for m in worked.view(7).messages]
    assert fork.append(user("another way")) == 8
    worked.append(user("this way"))
    assert "another way" not in [m.message.text for m in worked.get_all()]
    assert "this way" not in [m.message.text for m in fork.get_all()]
    with pytest.raises(refold.ConflictError):
        worked.fork("other")


def test_an_export_in_a_format_has_all_that_was_said_as_it_was_said(worked):
    worked.correct(0, "Another text.")
    (line,) = worked.export(format="openai-chat")
    (view,) = worked.export("openai-chat", view=True)
    whole = json.loads(line)["messages"]
    assert len(whole) == worked.get_count()
    assert whole[0]["content"] == worked.get_all()[0].message.text
    assert json.loads(view)["messages"] == worked.fit(dialect="openai-chat").messages
    assert json.loads(view)["messages"][0]["content"] == "Another text."
    again = refold.open("again", store="memory://", model="gpt-5")
    again.append(whole)
    assert [one.message for one in again.get_all()] == [one.message for one in worked.get_all()]


@pytest.mark.parametrize("format", TARGETS)
def test_an_export_of_a_broken_history_is_valid_in_every_format(format):
    for seed, write in product(range(12), histories.DIALECTS.values()):
        chat = refold.open("c", store="memory://", model="m", config=SMALL)
        chat.append(write(histories.steps(Random(seed))))
        for view in (False, True):
            request = json.loads("".join(chat.export(format, view=view)))
            assert refold.check(request["messages"], dialect=format, system=request.get("system")) == []


def test_an_export_may_end_with_the_answer_whatever_the_model_is():
    for model in (None, "claude-opus-4-8"):
        chat = refold.open("c", store="memory://", model=model)
        chat.append([user("Hello"), {"role": "assistant", "content": "Yes?"}])
        (line,) = chat.export("anthropic")
        assert json.loads(line)["messages"][-1]["role"] == "assistant"


def test_an_export_is_the_same_in_async_code(worked):
    async def lines() -> list[str]:
        return [line async for line in AsyncSession(worked).export("anthropic", view=True)]

    assert asyncio.run(lines()) == list(worked.export("anthropic", view=True))


def test_an_export_without_a_format_has_no_view(chat):
    with pytest.raises(refold.RefoldError, match="view: needs a format"):
        chat.export(view=True)
    with pytest.raises(refold.RefoldError, match="format: 'latin' is not known"):
        chat.export("latin")


# proves: B9
def test_export_and_load_are_exact_to_the_byte(worked):
    lines = list(worked.export())
    copy = refold.load(lines, store="memory://", conversation="copy")
    assert list(copy.export())[1:] == lines[1:]
    assert copy.view().messages == worked.view().messages
    with pytest.raises(refold.ConflictError):
        refold.load(lines, store=copy.store, conversation="copy")


def test_a_changed_line_is_not_loaded(worked):
    lines = list(worked.export())
    lines[4] = lines[4].replace("file0", "file9")
    store = MemoryStore()
    with pytest.raises(refold.RefoldError, match="Line 5"):
        refold.load(lines, store=store)
    assert list(store.conversations()) == []


# proves: B10
def test_several_views_of_one_record(worked):
    other = refold.open("task", store=worked.store, view="audit")
    assert len(other.view().messages) == worked.get_count()
    other.append(user("seen by all"))
    assert worked.fit().messages[-1] == user("seen by all")
    before = worked.view().messages
    other.compact(keep_recent=2)
    assert worked.view().messages == before
    assert [m.role for m in other.view().messages] == ["system", "user", "user", "assistant", "tool", "user"]


@pytest.mark.parametrize("strategy", ["summarize", "sliding-window", "hierarchical"])
@pytest.mark.parametrize("keep", range(8))
def test_compact_keeps_exactly_the_newest_messages_and_no_call_loses_its_result(strategy, keep):
    talk = refold.open("task", store="memory://")
    talk.append(user("The task, in a few words."))
    work(talk, 6)
    talk.append(
        [user("Go on."), call("a"), result("a", "word " * 30), {"role": "assistant", "content": "Ok."}]
    )
    talk.compact(strategy, keep_recent=keep)
    places = [line.at for line in talk.view().lines]
    newest = talk.get_count() - 1
    wanted = {*range(newest + 1 - keep, newest + 1), newest - 3}  # and the latest user message
    if keep == 2:
        wanted.add(newest - 2)  # the call of the result
    if keep > 4:
        wanted |= {newest - 4, newest - 5}
    if keep == 7:
        wanted.add(newest - 7)
    edit = talk.view().items[1].edit
    assert {at for at in places if at not in (0, edit)} == wanted
    (told,) = [event.why for event in talk.events() if isinstance(event, Replaced)]
    assert told == f"asked for: keep the newest {keep}"


def test_results_that_the_model_has_not_seen_yet_are_kept(worked):
    worked.append([call("z"), result("z", "fresh")])
    worked.compact(keep_recent=0)
    assert [message.text for message in worked.view().messages][-1] == "fresh"


def test_a_compaction_says_by_how_much_it_missed_its_target():
    talk = refold.open("task", store="memory://")
    talk.append(user("word " * 500))
    work(talk, 6)
    missed = talk.compact(target_tokens=300)
    assert missed.tokens_saved > 0
    assert missed.missed_by == talk.check_overflow().current_tokens - 300 > 0
    reached = refold.open("task", store="memory://")
    work(reached, 12)
    planned = reached.compact(target_tokens=300, dry_run=True)
    done = reached.compact(target_tokens=300)
    assert planned.missed_by == done.missed_by == 0
    assert {event.why for event in reached.events() if isinstance(event, Replaced)} == {
        "asked for: at most 300 tokens"
    }


def test_no_message_fits_into_less_than_nothing(worked):
    assert worked.get_recent(max_tokens=-1) == []


# proves: B1, B2, B3, C8b
def test_compact_on_demand_says_what_it_did():
    worked = refold.open("task", store="memory://")
    worked.append([{"role": "system", "content": "Be brief."}, user("Sort the files.")])
    work(worked, 20)
    done = worked.compact(keep_recent=4)
    assert done.compacted_range == (2, 38)
    assert done.tokens_saved > 0
    assert len(done.summary_messages) == 1
    assert worked.compactions().count == done.round
    assert worked.compactions().last is not None
    assert not worked.compactions().running
    assert worked.messages_since_compaction() == []
    worked.append(user("more"))
    assert [m.message.text for m in worked.messages_since_compaction()] == ["more"]
    assert worked.compact(target_tokens=200).tokens_saved > 0
    assert worked.view().tokens <= 200
    with pytest.raises(refold.RefoldError, match="sliding-window"):
        worked.compact("magic")


# proves: B1
def test_clear_erases_and_the_session_can_begin_anew(worked):
    assert worked.clear() == []
    assert worked.get_count() == 0
    assert worked.append(user("again")) == 0


# proves: B9
def test_another_session_goes_on_where_the_first_one_was(tmp_path):
    url = f"sqlite:///{tmp_path}/a.db"
    with refold.open("task", store=url, model="m", config=SMALL) as one:
        one.append(user("Sort the files."))
        work(one, 30)
        seen = one.fit().messages
    with refold.open("task", store=url, model="m", config=SMALL) as other:
        assert other.fit().messages == seen
        other.append(user("next"))
    assert one.get_count() == 62


def test_two_sessions_see_what_the_other_says(chat):
    other = refold.open("task", store=chat.store, model="m", config=SMALL)
    chat.append(user("one"))
    other.append(user("two"))
    assert chat.append(user("three")) == 2
    assert [m["content"] for m in other.fit().messages] == ["one", "two", "three"]


def test_threads_may_share_a_session(chat):
    def say(name: str) -> None:
        for n in range(20):
            chat.append(user(f"{name} {n}"))

    threads = [Thread(target=say, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [m.message.text for m in chat.get_all()]
    assert sorted(texts) == sorted(f"{name} {n}" for name in "abcd" for n in range(20))
    for name in "abcd":
        assert [t for t in texts if t.startswith(name)] == [f"{name} {n}" for n in range(20)]


def test_a_one_off_fit_leaves_its_input_alone():
    history = [user("Sort the files.")]
    for n in range(30):
        history += [call(f"c{n}"), result(f"c{n}", "word " * 60)]
    before = json.dumps(history)
    fitted = refold.fit(history, model="m", config=SMALL)
    assert len(fitted) < len(history)
    assert fitted[0] == history[0]
    assert fitted[-1] == history[-1]
    assert json.dumps(history) == before


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("hello", "message"),
        (None, "message"),
        ({"content": "x"}, "message.role"),
        ({"role": "wizard", "content": "x"}, "message.role"),
        ({"role": "user", "content": 5}, "message.content"),
        ({"role": "user", "content": [5]}, "message.content[0]"),
        ({"role": "tool", "content": "x"}, "message.tool_call_id"),
        ({"role": "assistant", "tool_calls": [{}]}, "message.tool_calls[0]"),
        ({"role": "user", "content": "x", "score": float("nan")}, "message.score"),
        ({"role": "user", "content": "x", "thing": object()}, "message"),
    ],
)
def test_bad_input_is_refused_with_its_place_and_nothing_is_stored(chat, message, where):
    with pytest.raises(refold.RefoldError) as caught:
        chat.append(message)
    assert str(caught.value).startswith(where)
    with pytest.raises(refold.RefoldError, match=r"messages\[1\]"):
        chat.append([user("fine"), message])
    assert chat.get_count() == 0


def test_deeply_nested_input_is_refused(chat):
    deep: list = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(refold.RefoldError):
        chat.append({"role": "user", "content": "x", "deep": deep})


def test_unknown_words_are_refused_with_the_known_ones(chat):
    with pytest.raises(refold.RefoldError, match="openai-chat"):
        chat.fit(dialect="klingon")
    with pytest.raises(refold.RefoldError, match="known here: off"):
        chat.fit(override={"of": True})
    with pytest.raises(refold.RefoldError, match="sqlite:///"):
        refold.open("x", store="mysql://localhost")
    with pytest.raises(refold.RefoldError, match="at least one character"):
        refold.open("", store="memory://")


def test_a_named_memory_store_is_shared_and_an_unnamed_one_is_not():
    refold.open("a", store="memory://shared-here").append(user("x"))
    assert refold.open("a", store="memory://shared-here").get_count() == 1
    refold.open("a", store="memory://").append(user("x"))
    assert refold.open("a", store="memory://").get_count() == 0


def test_said_events_carry_the_numbers_they_were_given(worked):
    said = [event for event in worked.events() if isinstance(event, Said)]
    assert [event.index for event in said] == list(range(42))
    assert said[-1].total == sum(event.line.tokens for event in said)
    assert (said[-1].line.turn, said[-1].line.step) == (1, 20)


def test_restoring_leaves_in_sight_what_was_in_sight(chat):
    chat.append([user(f"question {n}") for n in range(5)])
    chat.append([{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}])
    chat.compact(keep_recent=0)
    chat.append({"role": "assistant", "content": "three"})
    chat.restore(1)
    shown = [m["content"] for m in chat.fit().messages]
    assert {"question 0", "question 1", "question 4"} <= {*shown}
    chat.compact(keep_recent=0)
    assert "question 4" in [m["content"] for m in chat.fit().messages]


@pytest.mark.parametrize(
    ("message", "beside"),
    [
        (Message("robot", "hi"), {}),  # type: ignore[arg-type]
        (Message("user", ("hi",)), {}),  # type: ignore[arg-type]
        (Message("user", (Text(5),)), {}),  # type: ignore[arg-type]
        (Message("user", "hi", id=5), {}),  # type: ignore[arg-type]
        (Message("user", "hi", name=5), {}),  # type: ignore[arg-type]
        (Message("user", "hi", meta=object()), {}),
        (Message("tool", (Text("hi"),)), {}),
        (Message("tool"), {}),
        (Message("assistant", (ToolCall("a", "f", {"x": 1}),)), {}),  # type: ignore[arg-type]
        (Message("assistant", "hi", usage=Usage(1.5)), {}),  # type: ignore[arg-type]
        (user("hi"), {"id": 5}),
        (user("hi"), {"tags": [1]}),
        (user("hi"), {"kind": "bogus"}),
        (user("hi"), {"tools": [1]}),
        ([user("hi")], {"id": "x"}),
    ],
)
def test_what_could_not_be_read_again_is_not_stored(chat, message, beside):
    with pytest.raises(refold.RefoldError):
        chat.append(message, **beside)
    assert chat.get_count() == 0
    chat.append(user("fine"), tags=["odd \ud800 tag"])
    assert chat.fit().messages == [user("fine")]
    assert next(chat.events()).tags == ("odd \ud800 tag",)


def roles(chat) -> list[str]:
    return [m["role"] for m in chat.fit().messages]


def test_results_stand_in_messages_of_their_own_whoever_brings_them(chat):
    calls = Message("assistant", (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")))
    chat.append([user("go"), calls])
    chat.append(Message("user", (ToolResult("a", "1"), Text("thanks"), ToolResult("b", "2"))))
    assert roles(chat) == ["user", "assistant", "tool", "tool", "user"]
    chat.append(Message("assistant", (Text("on"), ToolCall("c", "f", "{}"), ToolResult("c", "3"))))
    assert roles(chat)[5:] == ["assistant", "tool"]
    assert chat.fit().report.notices == ()
    tokens = [stored.tokens for stored in chat.get_all()]
    assert sum(tokens) == chat.view().tokens
    assert tokens[2] == tokens[3] < 10


def test_something_is_done_from_the_threshold_on(chat):
    chat.append([user("go"), {"role": "assistant", "content": "word " * 200}, user("on")])
    tokens = chat.fit().report.tokens.final
    exact = {"models": {"m": {"window": tokens * 5 // 3, "max_output": 0, "provider": "openai"}}}
    edge = refold.open("task", store=chat.store, model="m", config=exact)
    assert edge.check_overflow().threshold == tokens == edge.check_overflow().current_tokens
    assert edge.fit().report.fired == ("threshold",)


def test_off_is_off_for_compact_too(chat):
    off = {**SMALL, "agents": {"a": {"compact": False}}}
    chat.append([user(f"question {n}") for n in range(30)])
    still = refold.open("task", store=chat.store, model="m", agent="a", config=off)
    assert still.compact(keep_recent=1).tokens_saved == 0
    assert len(still.fit().messages) == 30


def test_saved_tokens_are_what_the_view_lost(worked):
    worked.pin(3)
    work(worked, 3, start=20)
    worked.append([{"role": "assistant", "content": f"thought {n} " * 9} for n in range(5)])
    before = worked.view().tokens
    done = worked.compact(keep_recent=0)
    assert done.tokens_saved == before - worked.view().tokens > 0
    before = worked.view().tokens
    edit = worked.restore(6)
    event = worked.record.event(edit)
    assert event.tokens[1] - event.tokens[0] == worked.view().tokens - before


# proves: C8b, C14
def test_a_compaction_waits_for_another_only_as_long_as_it_is_set_to(worked):
    config = {**SMALL, "agents": {"default": {"summarizer": {"wait_s": 0}}}}
    worked = refold.open("task", store=worked.store, model="m", config=config)
    lease = worked.store.acquire(worked.key, "compaction:main", "another process", 0.0, 1e12)
    assert worked.compactions().running
    assert worked.compact(keep_recent=0).tokens_saved > 0
    assert worked.compactions().running
    worked.store.release(worked.key, lease)
    assert not worked.compactions().running


def test_a_view_is_a_value(chat):
    chat.append(user("old"))
    view = chat.view()
    chat.clear()
    chat.append(user("new"))
    assert [m.text for m in view.messages] == ["old"]


def test_looking_at_the_past_leaves_nothing_behind(worked):
    held = len(worked.record.entries.at_hand)
    for event in list(worked.events()):
        worked.view(event.at)
    assert len(worked.record.entries.at_hand) == held


def remove(chat, start: int, end: int) -> int:
    """An edit that shows nothing, as a policy that removes would make it."""
    state = chat.record.live.state
    edit = Replaced(state.next, "main", Span(start, end), (), (), "remove", "test", (0, 0), 0.0)
    chat.record.append(lambda: [edit])
    return edit.at


def test_undo_and_restore_find_the_edit_that_hides_a_message_among_neighbors(chat):
    chat.append([user(f"m{n}") for n in range(6)])
    first, second = remove(chat, 1, 3), remove(chat, 3, 5)
    assert len([item for item in chat.view().items if item.edit is not None]) == 1
    chat.undo(1)
    assert [m["content"] for m in chat.fit().messages] == ["m0", "m1", "m2", "m5"]
    chat.undo()
    assert first < second
    remove(chat, 1, 3)
    remove(chat, 3, 5)
    chat.restore(4)
    assert [m["content"] for m in chat.fit().messages] == ["m0", "m4", "m5"]


def test_a_message_in_sight_has_no_edit_to_undo(worked):
    worked.pin(5)
    with pytest.raises(refold.NotFoundError, match="Nothing hides #5"):
        worked.undo(5)


def test_a_file_that_was_cut_off_is_not_loaded(worked):
    lines = list(worked.export())
    for bad in (lines[:-1], lines[:1], lines[:-2] + lines[-1:], ['{"refold":1}', *lines[1:]]):
        store = MemoryStore()
        with pytest.raises(refold.RefoldError):
            refold.load(bad, store=store)
        assert list(store.conversations()) == []


def test_what_breaks_the_providers_cache_is_told(worked):
    assert worked.fit().report.cache_break_at is None
    worked.pin(5)
    assert worked.fit().report.cache_break_at == 2
    worked.append(user("more"))
    assert worked.fit().report.cache_break_at is None


def test_tools_and_stores_that_are_none_are_refused(chat, tmp_path):
    with pytest.raises(refold.RefoldError, match="tools"):
        chat.fit(tools=[object()])
    with pytest.raises(refold.RefoldError, match="store"):
        refold.open("x", store=tmp_path / "a.db")


def test_the_latest_user_message_stays_when_its_pin_is_taken_off(chat):
    chat.append([user("task"), {"role": "assistant", "content": "w " * 60}, user("LATEST")])
    chat.append([call("a"), result("a", "w " * 300)])
    chat.pin(2)
    chat.append([call("b"), result("b", "w " * 100)])
    assert user("LATEST") in chat.fit().messages
    chat.unpin(2)
    assert user("LATEST") in chat.fit().messages


def test_all_that_is_sent_is_counted(chat):
    plain = chat.append({"role": "assistant", "content": "x"})
    odd = {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "word " * 100,
        "name": "n",
        "refusal": None,
    }
    place = chat.append(odd)
    assert chat.get_all()[place].tokens >= chat.get_all()[plain].tokens + 100
    assert chat.fit().messages[1] == odd


def test_a_hidden_group_of_many_results_can_be_pinned(chat):
    ids = [f"k{n}" for n in range(400)]
    calls = [call(id)["tool_calls"][0] for id in ids]
    chat.append([user("go"), {"role": "assistant", "content": None, "tool_calls": calls}])
    chat.append([result(id, "ok") for id in ids])
    chat.append([user("next"), {"role": "assistant", "content": "done"}])
    chat.compact(keep_recent=1)
    chat.pin(1)
    assert [line.at for line in chat.view().lines if line.answers] == list(range(2, 402))


@pytest.mark.parametrize("at", ["1", 1.0, True, [1]])
def test_a_place_that_is_no_number_is_refused(chat, at):
    chat.append([user("a"), user("b"), user("c")])
    for verb in (chat.pin, chat.unpin, chat.undo, chat.restore, chat.view, chat.events):
        with pytest.raises(refold.RefoldError, match="whole number"):
            verb(at)
    with pytest.raises(refold.RefoldError, match="whole number"):
        chat.fork("b", at=at)


def test_a_fork_needs_a_name_and_a_place_that_is_there(chat):
    chat.append([user("a"), user("b")])
    for name in ("", None, 5):
        with pytest.raises(refold.RefoldError, match="new_id"):
            chat.fork(name)
    for at in (-1, 2, 50):
        with pytest.raises(refold.NotFoundError, match=f"no place {at}"):
            chat.fork("b", at=at)


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": 5},
        {"view": []},
        {"view": ""},
        {"owner": 5},
        {"model": 5},
        {"agent": "nobody"},
        {"store": 5},
    ],
)
def test_what_open_cannot_use_is_refused(wrong):
    with pytest.raises(refold.RefoldError):
        refold.open("x", **{"store": "memory://", **wrong})


def test_what_cannot_be_loaded_or_fitted_is_refused():
    for lines in ([], "", ["{}"], ["nonsense"]):
        with pytest.raises(refold.RefoldError):
            refold.load(lines, store="memory://")
    for history in (None, 5, "text", {"role": "user"}):
        with pytest.raises(refold.RefoldError):
            refold.fit(history, model="m")
    chat = refold.open("x", store="memory://")
    chat.append(user("a"))
    assert refold.load("\n".join(chat.export()), store="memory://").get_count() == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "tool_call_id": "z"},
        {"role": "user", "content": "x", "tool_call_id": ""},
        {"role": "user", "content": "x", "tool_calls": [call("a")["tool_calls"][0]]},
        {"role": "user", "content": "x", "tool_calls": 5},
        {"role": "assistant", "content": "x", "odd": {1, 2}},
        {"role": "assistant", "content": "x", "odd": {(1, 2): 3}},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": object()}}]},
        Message("user", "x", meta={(1, 2): 3}),
        Message("user", "x", id=""),
        Message("user", (ToolCall("a", "f", "{}"),)),
        Message("user", (Media("image"),)),
    ],
)
def test_nothing_gets_in_that_would_spoil_every_later_request(chat, message):
    chat.append(user("go"))
    with pytest.raises(refold.RefoldError):
        chat.append(message)
    assert chat.fit().messages == [user("go")]


def test_ids_with_lone_surrogates_stay_apart_in_the_request(chat):
    chat.append([user("go"), call("a\ud800"), result("a\ud800", "1"), call("a\ud801"), user("stop")])
    fitted = chat.fit().messages
    json.dumps(fitted).encode()
    assert [m.get("tool_call_id") for m in fitted] == [None, None, "a\\ud800", None, "a\\ud801", None]


def test_a_reason_that_is_no_text_is_refused(chat):
    chat.append(user("go"))
    with pytest.raises(refold.RefoldError, match="why"):
        chat.pin(0, why=None)
    assert len(list(chat.events())) == 1


def test_the_parts_of_a_message_never_take_the_ids_of_others(chat):
    chat.append([user("go"), Message("assistant", (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")))])
    chat.append(Message("user", "mine", id="m/1"))
    chat.append(Message("user", (ToolResult("a", "1"), ToolResult("b", "2")), id="m"))
    assert [s.message.text for s in chat.get_all()][2:] == ["mine", "1", "2"]


def test_what_mending_adds_is_made_room_for():
    config = {"models": {"m": {"window": 500, "max_output": 40}}}
    chat = refold.open("task", store="memory://", model="m", config=config)
    chat.append(user("task"))
    chat.append([{"role": "assistant", "content": "word " * 20} for _ in range(12)])
    calls = [call(f"k{n}")["tool_calls"][0] for n in range(12)]
    chat.append({"role": "assistant", "content": None, "tool_calls": calls})
    assert chat.fit().report.tokens.final <= 460


def test_what_was_restored_is_hidden_again_when_it_does_not_fit(worked):
    edit = next(item.edit for item in worked.view().items if item.edit is not None)
    worked.restore(edit)
    assert worked.fit().report.tokens.final <= 800


def test_fields_inside_parts_and_calls_are_counted(chat):
    odd = call("x" * 400)
    odd["tool_calls"][0]["function"]["extra"] = "word " * 100
    chat.append(
        [user("go"), {"role": "user", "content": [{"type": "text", "text": "x", "blob": "word " * 100}]}]
    )
    chat.append([odd, Message("user", "x", name="word " * 100)])
    assert all(stored.tokens > 100 for stored in chat.get_all()[1:])


def test_followers_keep_nobody_from_working_and_end_when_they_are_given_up(tmp_path):
    async def follow(session, seen):
        async for event in session.events(follow=True):
            seen.append(event.at)

    async def main():
        chats = [await refold.aopen("live", store=f"sqlite:///{tmp_path}/a.db") for _ in range(20)]
        seen = [[] for _ in chats]
        tasks = [asyncio.create_task(follow(*one)) for one in zip(chats, seen, strict=True)]
        for n in range(3):
            await chats[0].append({"role": "user", "content": str(n)})
        while min(map(len, seen)) < 3:
            await asyncio.sleep(0.01)
        for task in tasks[1:]:
            task.cancel()
        await chats[0].clear()
        await tasks[0]
        return seen

    assert asyncio.run(main()) == [[0, 1, 2]] * 20


# In one line


def test_a_session_and_a_view_show_themselves_in_one_readable_line(chat):
    chat.append(user("The task."))
    work(chat, 2)
    tokens = chat.view().tokens
    known = f"'task' owner='default' model='m' view='main' recorded=5 tokens={tokens}>"
    assert repr(chat) == f"<refold.Session {known}"
    assert repr(AsyncSession(chat)) == f"<refold.AsyncSession {known}"
    assert repr(chat.view()) == f"<refold.View messages=5 tokens={tokens} edits=0>"
    chat.compact("sliding-window", keep_recent=2)
    view = chat.view()
    assert repr(view) == f"<refold.View messages={len(view.messages)} tokens={view.tokens} edits=1>"


def test_a_session_on_a_store_that_is_far_away_shows_itself_without_asking_it():
    class Far(MemoryStore):
        asked = 0

        def resume(self, key, view, /):
            self.asked += 1
            return None, self.read(key)

        def fetch(self, key, places, /):
            return {}

    store = Far()
    chat = refold.open("c", store=store)
    assert repr(chat) == "<refold.Session 'c' owner='default' model=None view='main' recorded=0 tokens=0>"
    assert store.asked == 0


def test_a_follower_reads_what_is_there_in_chunks(monkeypatch):
    calls = []

    async def in_this_thread(work):
        calls.append(work)
        return work()

    monkeypatch.setattr(aio, "in_thread", in_this_thread)

    async def main():
        chat = await refold.aopen("task", store="memory://")
        await chat.append([{"role": "user", "content": str(n)} for n in range(1_000)])
        events = chat.events(follow=True)
        return [(await anext(events)).at for _ in range(1_000)]

    assert asyncio.run(main()) == list(range(1_000))
    assert len(calls) < 20


def test_aopen_may_be_awaited_or_entered():
    async def both() -> list[int]:
        entered = refold.aopen("task", store="memory://aopen")
        async with entered as chat:
            await chat.append(user("Hello"))
        again = await refold.aopen("task", store="memory://aopen")
        task = asyncio.create_task(refold.aopen("task", store="memory://aopen"))
        counts = [await again.get_count(), await (await task).get_count()]
        await again.close()
        return counts

    assert asyncio.run(both()) == [1, 1]


def test_a_session_that_was_entered_is_closed_also_after_an_error():
    class Attended(MemoryStore):
        ended = 0

        def begin(self, key, /):
            pass

        def end(self, key, /):
            self.ended += 1

    async def fail() -> None:
        async with refold.aopen("task", store=store):
            raise ValueError("in the middle")

    store = Attended()
    with pytest.raises(ValueError, match="in the middle"):
        asyncio.run(fail())
    assert store.ended == 1


def test_aopen_that_cannot_open_raises_in_either_way():
    async def enter() -> None:
        async with refold.aopen("", store="memory://"):
            pass

    async def wait() -> None:
        await refold.aopen("", store="memory://")

    for way in (enter, wait):
        with pytest.raises(refold.RefoldError):
            asyncio.run(way())
