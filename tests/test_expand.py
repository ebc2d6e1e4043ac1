"""Get it back: what was hidden is read again, whole or in part, by people and by the agent in mid-work."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from histories import DIALECTS
from refold.cli.bench.recorded import load
from refold.cli.bench.trace import DIALECT
from refold.core.codec import Link
from refold.core.errors import CannotExpandError, OverBudgetError, RefoldError, SettingError
from refold.core.event import Measured, Replaced
from refold.core.expiry import EXPAND, SEARCH
from refold.core.slices import cut, item_spans, line_spans, slice_of
from refold.policies.shorten import quoted
from refold.session.expand import written
from refold.session.safe_regex import find
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from slices import is_right, part_of, read, text_of
from test_ladder import agent, answers, calls, output, step, user

DATA = Path(__file__).parents[2] / "shared" / "data"
ROWS = json.dumps([{"id": n, "name": f"item {n}"} for n in range(60)])
TEXT = "\n".join(f"line {n}: {'ab' * n}" for n in range(1, 61))
COMPACT = {"expire": {"after_steps": 1, "mode": "compact", "compact_mode": "skeleton", "length": 60}}


def begin(window: int = 400_000, store: Any = "memory://", **settings: Any) -> Session:
    settings.setdefault("tools", {"web_search": COMPACT})
    return refold.open("c", store=store, model="m", config=agent(window, **settings))


def hidden(text: str, **settings: Any) -> Session:
    """A result that has expired, at place 2."""
    chat = begin(**settings)
    chat.append([user("Find it."), *step("c1", text), *step("c2", "ok", "other"), *step("c3", "ok", "other")])
    chat.fit()
    assert chat.view().items[2].edit is not None
    return chat


def ask(chat: Session, n: int, tool: str = EXPAND, **arguments: Any) -> str:
    """The agent calls a tool of refold's and gets its answer."""
    call = {"id": f"own{n}", "type": "function"}
    call |= {"function": {"name": tool, "arguments": json.dumps(arguments)}}
    chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
    text = chat.call(tool, json.dumps(arguments))
    chat.append(answers(f"own{n}", text))
    return text


def work(chat: Session, n: int) -> list[dict[str, Any]]:
    """One more step of something else, and what the model sees then."""
    chat.append(step(f"w{n}", "done", "other"))
    return chat.fit().messages


# Whole and in part


# proves: A14b
def test_a_part_is_exactly_what_stands_there():
    chat = hidden(TEXT)
    lines = TEXT.split("\n")
    assert chat.expand(2) == TEXT
    for given_ in ((40, 50), "40-50", "40..50", [40, 50]):
        assert chat.expand(2, lines=given_) == "\n".join(lines[39:50])
    assert chat.expand(2, lines=7) == chat.expand(2, lines="7") == lines[6]
    assert chat.expand(2, lines="58-") == chat.expand(2, lines=(58, 999)) == "\n".join(lines[57:])
    assert chat.expand(2, chars=(5, 25)) == TEXT[5:25]
    assert chat.expand(2, chars=(-20, None)) == TEXT[-20:]
    assert chat.expand(2, chars=(None, 5)) == chat.expand(2, chars=":5") == TEXT[:5]
    assert chat.expand(2, match="LINE 17:") == lines[16]
    assert chat.expand(2, match="/^line [3-5]:/") == "\n".join(lines[2:5])


# proves: A14b
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ROWS, '{"id": 1, "name": "item 1"}, {"id": 2, "name": "item 2"}'),
        (json.dumps({"total": 9, "few": [1], "rows": [[1], [2, 3], ["]"], 4]}), '[2, 3], ["]"]'),
        ("name,age\nada,36\nbob,41\ncyd,29\n", "bob,41\ncyd,29"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |", "| 3 | 4 |\n| 5 | 6 |"),
        ('{"a": 1}\n{"a": 2}\n{"a": 3}', '{"a": 2}\n{"a": 3}'),
    ],
)
def test_items_are_those_of_a_list_or_the_rows_of_a_table(text, expected):
    assert cut(text, slice_of({"items": (2, 3)})).shown == expected


# proves: A14b
def test_the_number_of_items_that_a_hint_names_can_be_asked_for():
    chat = hidden(ROWS)
    (count,) = re.findall(r"(\d+) items", chat.view().items[2].shown[0].text)
    assert chat.expand(2, items=(int(count), int(count))) == '{"id": 59, "name": "item 59"}'
    with pytest.raises(CannotExpandError, match="it has 60 items"):
        chat.expand(2, items=(61, 61))


@given(st.data())
def test_any_part_equals_the_slice_of_the_original(data):
    text = data.draw(st.text(alphabet="ab\n\r,|[]{}\"'1 #é漢\U0001f600\u2028", max_size=200))
    part = part_of(data.draw(st.randoms(use_true_random=False)), text, None)
    assert is_right(text, None, part, read(text, part))


@given(st.randoms(use_true_random=False))
def test_any_items_are_those_of_the_list(rng):
    text, items = text_of(rng)
    part = part_of(rng, text, items)
    assert is_right(text, items, part, read(text, part))


# proves: A3
@pytest.mark.parametrize(
    "given_",
    [
        {"lines": (61, 70)}, {"lines": (0, 3)}, {"lines": (5, 2)}, {"lines": "x"}, {"lines": (1, 2, 3)},
        {"lines": 1.5}, {"lines": True}, {"lines": {}}, {"chars": (99_999, None)}, {"chars": (5, 5)},
        {"chars": ()}, {"items": (1, 2)}, {"match": "nowhere"}, {"match": ""}, {"match": 7}, {"match": "/(/"},
        {"match": "//"},        {"match": "/" + "a" * 2_000 + "/"}, {"lines": (1, 2), "chars": (1, 2)},
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_in_a_sentence(given_):
    chat = hidden(TEXT)
    with pytest.raises(CannotExpandError, match=r"\w{2,} .*\w"):
        chat.expand(2, **given_)
    assert " " in chat.call(EXPAND, {"at": 2, **given_})


def test_places_that_are_none_are_refused():
    chat = hidden(TEXT)
    for at, problem in ((-99, "has only 7 messages"), (10**9, "#1000000000: "), ("2", "has the id '2'")):
        with pytest.raises(CannotExpandError, match=problem):
            chat.expand(at)
    with pytest.raises(SettingError):
        chat.expand(2.0)  # type: ignore[arg-type]


def test_a_pattern_that_would_never_end_is_given_up():
    with pytest.raises(CannotExpandError, match="more than"):
        find("(a+)+$", ["a" * 5_000 + "b"])


def test_lines_and_items_of_nothing_are_none():
    assert line_spans("") == [(0, 0)]
    assert item_spans("") == item_spans("{}") == item_spans("[") == item_spans("[1] and more") == []


# Any reduced thing


# proves: A3
def test_a_summary_lists_its_sources_and_has_their_texts():
    chat = begin(8_000, tools={})
    chat.append(user("The task."))
    for n in range(60):
        chat.append(step(f"c{n}", output(400, f"value_{n}")))
        chat.fit()
    (summary,) = [item.edit for item in chat.view().items if item.is_folded]
    edit = next(event for event in chat.events() if event.at == summary)
    assert isinstance(edit, Replaced)
    assert edit.round > 1  # it stands for summaries too
    text = chat.expand(summary)
    inside = [one for one in chat.get_all() if one.at in edit.span]
    assert all(f"#{one.at} " in text.partition("\n\n")[0] for one in inside)
    assert all(quoted(written(one.message)) in text for one in inside)
    assert chat.expand(inside[5].at) == quoted(written(inside[5].message))
    assert f"#{inside[-1].at} " in chat.expand(summary, match=inside[-1].message.text[:30])
    answer = chat.call(EXPAND, {"at": summary})
    assert answer.startswith(f"[refold #{summary} {len(inside):,} messages: lines 1-")
    (go_on,) = re.findall(r"go on with lines (\d+-)\]", answer)
    more = chat.call(EXPAND, {"at": summary, "lines": go_on})
    assert answer.partition("\n")[2] + "\n" + more.partition("\n")[2] in text + "\n"


def test_a_message_that_is_gone_from_the_view_can_be_had():
    chat = begin(8_000, tools={}, compact={"strategy": "sliding-window"})
    chat.append(user("The task."))
    for n in range(40):
        chat.append(step(f"c{n}", output(400, f"value_{n}")))
        chat.fit()
    (note,) = re.findall(r"\[refold #(\d+)", chat.view().messages[1].text)
    assert "value_0" in chat.expand(int(note))
    assert chat.expand(2) == output(400, "value_0")


def _all_reduced(chat: Session) -> list[tuple[int, str]]:
    stored = [one for one in chat.get_all() if one.can_expand]
    return [(one.at, quoted(written(one.message))) for one in stored]


# proves: A3, A8
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_expansion_gives_the_exact_originals_of_recorded_conversations(kind, tmp_path):
    if not (DATA / "traces").is_dir():
        pytest.skip("notice: ../shared/data is not here, so nothing recorded is expanded")
    store = f"sqlite:///{tmp_path}/r.db" if kind == "sqlite" else "memory://"
    seen = 0
    for n, trace in enumerate(islice(load(DATA), 0, 40, 4)):
        with refold.open(f"t{n}", store=store, model="m", config=agent(9_000)) as chat:
            for message in trace.messages:
                if message["role"] == "assistant":
                    with suppress(OverBudgetError):  # a task that is larger than the window
                        chat.fit(dialect=DIALECT)
                chat.append(message, dialect=DIALECT)
            for at, text in _all_reduced(chat):
                assert chat.expand(at) == text
                seen += 1
    assert seen > 100
    if kind == "sqlite":  # a process that knows nothing of all this
        program = (
            "import sys, refold; from refold.session.expand import written\n"
            "from refold.policies.shorten import quoted\n"
            "for n in range(10):\n"
            "    chat = refold.open(f't{n}', store=sys.argv[1])\n"
            "    for one in chat.get_all():\n"
            "        assert chat.expand(one.at) == quoted(written(one.message))\n"
            "print('all')"
        )
        done = subprocess.run([sys.executable, "-c", program, store], capture_output=True, text=True)
        assert done.stdout == "all\n", done.stderr


def test_expand_takes_a_place_an_id_or_a_number_counted_from_the_newest_message():
    chat = begin()
    chat.append(user("one"), id="first")
    chat.append([user("two"), *step("c1", "three")])
    chat.pin(0)
    chat.append(user("four"))
    assert [chat.expand(at) for at in (0, "first", "m0", -5)] == ["one"] * 4
    assert [chat.expand(-1), chat.expand(-2)] == ["four", "three"]
    assert chat.expand(chat.get_all()[1].id) == "two"
    with pytest.raises(CannotExpandError, match="the conversation has only 5 messages"):
        chat.expand(-6)
    with pytest.raises(CannotExpandError, match="No message of the conversation has the id 'second'"):
        chat.expand("second")


def test_a_place_that_is_no_message_is_answered_with_the_message_it_is_about_or_a_sentence():
    chat = begin()
    chat.append([user("one"), *step("c1", "two"), user("three")])
    usage = {"prompt_tokens": 40, "completion_tokens": 5}
    reply = {"object": "chat.completion", "model": "m", "usage": usage}
    chat.fit()
    chat.append({**reply, "choices": [{"message": {"role": "assistant", "content": "four"}}]})
    (measured,) = [one.at for one in chat.events() if isinstance(one, Measured)]
    assert chat.expand(measured) == "four"
    assert chat.expand(chat.pin(0)) == "one"
    several = chat.pin(2)
    with pytest.raises(CannotExpandError, match=rf"#{several} is not a message: it pins #1, #2; expand one"):
        chat.expand(several)
    assert chat.expand(chat.undo(chat.correct(0, "uno"))) == "uno"
    chat.name(title="a talk")
    named = chat.record.live.state.next - 1
    with pytest.raises(CannotExpandError, match=rf"#{named} is not a message"):
        chat.expand(named)


@pytest.mark.parametrize("how", ["expire", "summarize"])
def test_what_was_reduced_without_keeping_originals_cannot_be_expanded_but_restored(tmp_path, how):
    config = agent(10_000, tools={"web_search": COMPACT}, compact={"keep_recent": 2})
    store = f"sqlite:///{tmp_path}/a.db"
    with refold.open("c", store=store, model="m", config=config) as chat:
        chat.append([user("Find it."), *step("c1", TEXT), *step("c2", "ok", "other")])
        if how == "summarize":
            chat.append([one for n in range(9) for one in step(f"b{n}", output(900, f"b{n}"), "other")])
        else:
            chat.append(step("c3", "ok", "other"))
        assert chat.fit(override={"keep_originals": False}).report.edits
    with refold.open("c", store=store, model="m", config=config) as chat:  # it is not forgotten
        stored = chat.get_all()[2]
        assert (stored.was_compacted, stored.can_expand) == (True, False)
        for at in (2, stored.edit):
            with pytest.raises(CannotExpandError, match="keep_originals: false"):
                chat.expand(at)
            assert "a person can restore it" in chat.call(EXPAND, {"at": at})
        assert stored.message.text == TEXT
        chat.restore(2)
        assert chat.expand(2) == TEXT
        chat.undo()
        with pytest.raises(CannotExpandError):
            chat.expand(2)
        while chat.get_all()[2].was_compacted:
            chat.undo(2)
        assert chat.expand(2) == TEXT


def test_a_later_summary_does_not_give_back_what_was_not_kept():
    chat = begin()
    chat.append([user("Find it."), *step("c1", TEXT), *step("c2", "ok", "other"), *step("c3", "ok", "other")])
    chat.fit(override={"keep_originals": False})
    chat.append([user("Go on."), *step("c4", "ok", "other")])
    chat.compact(keep_recent=1)
    summary = chat.view().items[1].edit
    whole = chat.expand(summary)
    assert TEXT[-50:] not in whole
    assert "#2 tool web_search, " in whole
    assert "[it was reduced with keep_originals: false" in whole
    with pytest.raises(CannotExpandError, match="matches"):
        chat.expand(summary, match=TEXT[-50:])


# The agent, in mid-work


# proves: A3
def test_an_expansion_is_appended_and_leaves_what_was_sent_before_it():
    chat = hidden(ROWS)
    before = chat.fit().messages
    answer = ask(chat, 1, at=2, items="3-4", reason="need them")
    items = '{"id": 2, "name": "item 2"}, {"id": 3, "name": "item 3"}'
    assert answer == f"[refold #2 tool web_search: items 3-4 of 60]\n{items}"
    after = chat.fit()
    assert after.messages[: len(before)] == before
    assert after.report.cache_break_at is None
    assert after.messages[-1]["content"] == answer


@pytest.fixture
def cold(monkeypatch):
    """A provider's cache that has forgotten the conversation before every request."""
    hours = count(time.time(), 3_600.0)
    monkeypatch.setattr("refold.session.triggers.time.time", lambda: next(hours))


@pytest.mark.usefixtures("cold")
def test_where_the_cache_is_cold_an_expansion_is_shown_for_its_lease_and_named_afterwards():
    chat = hidden(TEXT, expand={"lease_steps": 3})
    ask(chat, 1, at=2)
    shown = [is_shown(work(chat, n)) for n in range(4)]
    assert shown == [True, True, False, False]  # whole in the three steps that follow on it
    names = [str(m["content"]) for m in chat.fit().messages if EXPAND in str(m["content"])]
    (place,) = re.findall(
        r"^\[refold #(\d+) refold_expand: [\d,]+ tokens, 61 lines; removed\]$", "\n".join(names), re.M
    )
    assert TEXT in chat.expand(int(place))
    assert chat.expand(2) == TEXT
    edit = next(one for one in chat.events() if isinstance(one, Replaced) and one.span.start == int(place))
    assert "its lease of 3 steps has ended (expand.lease_steps" in edit.why


def is_shown(messages: list[dict[str, Any]]) -> bool:
    return any(TEXT[-50:] in str(message["content"]) for message in messages)


def test_the_end_of_a_lease_breaks_no_cache():
    chat = hidden(TEXT)
    ask(chat, 1, at=2)
    ask(chat, 2, SEARCH, query="line")
    sent = chat.fit().messages
    for n in range(12):
        chat.append(step(f"w{n}", "done", "other"))
        fitted = chat.fit()
        assert fitted.messages[: len(sent)] == sent
        assert not fitted.report.edits
        sent = fitted.messages
    assert is_shown(sent)


def test_an_answer_whose_lease_has_ended_is_put_away_with_the_next_edit_that_stands_before_it():
    chat = hidden(TEXT)
    ask(chat, 1, at=2)
    for n in range(5):
        assert is_shown(work(chat, n))
    chat.append(step("x1", output(900, "later")))  # it expires, and stands after the answer
    for n in range(5, 9):
        assert is_shown(work(chat, n))
    assert sum(isinstance(one, Replaced) for one in chat.events()) == 2
    chat.correct(0, "Find it, please.")
    assert not is_shown(chat.fit().messages)


def test_a_view_that_is_over_its_threshold_puts_ended_leases_away_first():
    chat = begin(24_000, expand={"max_tokens": 2_500})
    chat.append([user("Find it."), *step("c1", output(5_000, "wanted_4711"))])
    for n in range(3):
        chat.append(step(f"a{n}", "ok", "other"))
    chat.fit()
    for n in range(2):
        ask(chat, n, at=2, chars=f"{n * 9_000}-{n * 9_000 + 9_000}")
    edits = ()
    while not edits:
        chat.append(step(f"b{chat.get_count()}", output(300, f"filler_{chat.get_count()}"), "other"))
        report = chat.fit().report
        edits = report.edits
    assert report.fired == ("threshold",)
    assert ["its lease of 3 steps has ended" in edit.why for edit in edits] == [True, True]


@pytest.mark.usefixtures("cold")
def test_what_is_expanded_again_and_again_stays_longer_each_time():
    chat = hidden(TEXT)
    lasted = []
    for round in range(6):
        ask(chat, round, at=2)
        steps = 0
        while is_shown(work(chat, 100 * round + steps)):
            steps += 1
        lasted.append(steps)
    assert lasted == [2, 5, 11, 23, 23, 23]


def test_no_rung_but_the_last_touches_an_expansion_before_its_lease_ends():
    chat = begin(9_000, expand={"lease_steps": 6}, compact={"threshold_percent": 3_600 / 6_750})
    chat.append([user("Find it."), *step("c1", output(900, "wanted_4711"))])
    for n in range(3):
        chat.append(step(f"a{n}", "ok", "other"))
    chat.fit()
    ask(chat, 1, at=2)
    seen = []
    for n in range(5):
        chat.append(step(f"b{n}", output(700, f"filler_{n}"), "other"))
        seen.append(any(output(900, "wanted_4711")[-80:] in str(m["content"]) for m in chat.fit().messages))
    assert seen == [True] * 5
    assert chat.compactions().count > 0


def test_what_is_withheld_is_told_to_no_summarizer_and_found_by_no_model():
    prompts = list[str]()

    def writes(request):
        prompts.append(request.prompt)
        return "The agent looked something up."

    config = agent(40_000, tools={"web_search": COMPACT})
    chat = refold.open("c", store="memory://", model="m", config=config, summarizer=writes)
    secret = "the-withheld-4711 "
    chat.append([user("Find it."), *step("c1", "head of it " * 60 + secret * 5)])
    for n in range(6):
        chat.append(step(f"b{n}", output(200, f"b{n}"), "other"))
    assert chat.fit(override={"keep_originals": False, "mode": "remove"}).report.edits
    chat.compact(keep_recent=2)
    assert prompts
    assert not any("the-withheld-4711" in prompt for prompt in prompts)
    assert "the-withheld" not in chat.call("refold_search", {"query": "the-withheld-4711"})
    assert chat.search("the-withheld-4711")  # a person finds it


def test_a_compaction_on_demand_keeps_to_the_override_of_its_session():
    config = agent(40_000)
    chat = refold.open("c", store="memory://", model="m", config=config, override={"keep_originals": False})
    chat.append([user("Find it."), *step("c1", TEXT)])
    for n in range(4):
        chat.append(step(f"b{n}", "ok", "other"))
    (summary,) = chat.compact(keep_recent=2).summary_messages
    assert not summary.text.startswith("[refold #")
    with pytest.raises(CannotExpandError, match="keep_originals: false"):
        chat.expand(2)


def test_an_answer_keeps_within_its_budget_and_says_how_to_go_on():
    chat = hidden("\n".join(f"{n} " + "x" * 40 for n in range(1, 2_001)), expand={"max_tokens": 500})
    rest, lines = "1-", []
    while rest:
        answer = ask(chat, len(lines), at=2, lines=rest)
        assert chat.chat.meter.counter.counter.text(answer) <= 500
        lines += answer.split("\n")[1:]
        rest = next(iter(re.findall(r"go on with lines (\d+-)\]", answer)), "")
    assert "\n".join(lines) == chat.expand(2)


def test_one_line_that_is_too_long_is_told_by_characters():
    chat = hidden("x" * 400_000, expand={"max_tokens": 500})
    answer = chat.call(EXPAND, {"at": 2})
    (end,) = re.findall(r"chars 0-(\d+) of 400000; go on with chars \1-\]", answer)
    assert answer.endswith("\n" + "x" * int(end))
    assert f"chars {end}-" in chat.call(EXPAND, {"at": 2, "chars": f"{end}-"})


def test_what_is_in_sight_is_not_shown_twice():
    chat = hidden(TEXT)
    assert "in its own place" in chat.call(EXPAND, {"at": 0})
    ask(chat, 1, at=2, lines="1-5")
    assert "still shown" in chat.call(EXPAND, {"at": "#2", "lines": [1, 5]})
    assert chat.call(EXPAND, {"at": 2, "lines": "6-9"}).startswith("[refold #2 ")


def test_expansions_together_have_a_budget():
    chat = hidden(TEXT, expand={"max_tokens": 400, "lease_steps": 50})
    answers = [ask(chat, n, at=2, chars=f"{n * 100}-{n * 100 + 1500}") for n in range(8)]
    assert "takes all the room" in answers[-1]
    assert sum(answer.startswith("[refold ") for answer in answers) >= 4


def test_expansions_of_one_step_share_a_budget_before_any_is_said():
    chat = hidden("\n".join(f"{n} " + "x" * 40 for n in range(1, 2_001)), expand={"max_tokens": 400})
    answers = [chat.call(EXPAND, {"at": 2, "lines": f"{n}-"}) for n in range(1, 60, 10)]
    assert [answer.startswith("[refold #2 ") for answer in answers][:2] == [True, True]
    assert all("takes all the room" in answer for answer in answers[3:])
    count = chat.chat.meter.counter.counter.text
    assert sum(count(answer) for answer in answers if answer.startswith("[refold ")) <= 800
    assert "takes all the room" in chat.call(
        EXPAND, {"at": 2, "lines": "51-"}
    )  # again: it is a matter of time
    work(chat, 1)
    assert chat.call(EXPAND, {"at": 2, "lines": "51-"}).startswith("[refold #2 ")


def test_a_refusal_is_no_expansion():
    chat = hidden(TEXT)
    ask(chat, 1, at=2, lines="1-60")
    assert "still shown" in ask(chat, 2, at=2, lines="1-60")
    for n in range(3):
        work(chat, n)
    assert ask(chat, 3, at=2, lines="1-60").startswith("[refold #2 ")


def test_different_mistakes_are_explained_each():
    chat = hidden(TEXT)
    for wrong in ("{", '{"at"', '{"at": 2,', "[1]", '{"line": 3}', '{"at": 2, "line": "1"}'):
        assert "As before" not in chat.call(EXPAND, wrong)
    assert chat.call(EXPAND, {"at": 2}).startswith("[refold #2 ")


def test_a_pattern_is_matched_in_each_source_of_a_summary_by_itself():
    chat = begin(tools={})
    chat.append(
        [user("Go."), *(m for n in range(6) for m in step(f"c{n}", f"first {n}\nERROR in {n}\nend {n}"))]
    )
    summary = chat.compact(keep_recent=0)
    assert summary.tokens_saved
    (place,) = [item.edit for item in chat.view().items if item.edit is not None]
    answer = chat.call(EXPAND, {"at": place, "match": "/ERROR[^;]*/"})
    assert answer.count("ERROR in") == 5
    assert "5 of 10 messages match" in answer
    assert chat.expand(place, match="/\\Afirst/").count("first") == 5


def test_a_result_that_takes_all_of_its_step_is_shown_whole_where_the_window_has_room():
    chat = begin(8_000, tools={})
    chat.append(user("The task."))
    for n in range(12):
        chat.append(step(f"c{n}", output(250, f"old_{n}")))
        chat.fit()
    several = [output(770, f"new_{n}") for n in range(4)]
    chat.append([calls(*((f"n{n}", "web_search") for n in range(4)))])
    chat.append([answers(f"n{n}", text) for n, text in enumerate(several)])
    shown = [message["content"] for message in chat.fit().messages]
    assert [text in shown for text in several] == [True] * 4


def test_the_same_impossible_request_is_not_explained_for_ever():
    chat = hidden(TEXT)
    answers = [chat.call(EXPAND, {"at": 999, "reason": f"try {n}"}) for n in range(5)]
    assert answers[0] == answers[1] == "#999: there is no such place; the conversation ends at #7."
    assert {*answers[2:]} == {
        "As before: this is not possible, and asking again changes nothing. Go on without it."
    }
    assert "998" in chat.call(EXPAND, {"at": 998})


def test_an_impossible_request_is_the_same_one_although_the_conversation_has_grown():
    chat = hidden(TEXT)
    for n in range(2):
        assert chat.call(EXPAND, {"at": 999}).startswith("#999: there is no such place")
        chat.append(user(f"Go on, {n}."))
    assert chat.call(EXPAND, '{"reason": "again", "at": 999}').startswith("As before")


# proves: A3
@pytest.mark.parametrize(
    "arguments",
    ["", "{", "[]", "7", '"x"', "null", b"\xff", None, 7, [], {}, {"at": None}, {"at": "x"}, {"at": -1},
     {"at": 1.5}, {"at": True}, {"at": 2, "page": 3}, {"at": 2, "lines": "a-b"}, {"at": [2]}, {2: 2},
     '{"at": 2, "lines": "1-%s"}' % ("9" * 5_000), {"at": 2, "lines": (1, 10**30)}, {"at": object()},
     {"at": 2, "lines": "99999999999999999999-"}, '{"at": 1e999}', '{"at": 99999999999999999999}',
     '{"a\\ud800": 1}', "[" * 100_000],
)  # fmt: skip
def test_whatever_a_model_writes_the_answer_is_a_sentence(arguments):
    chat = hidden(TEXT)
    for tool in (EXPAND, SEARCH):
        text = chat.call(tool, arguments)
        assert 10 < len(text) < 1_100
        assert not text.startswith("[refold")


def test_a_tool_that_is_not_ours_is_an_error_of_the_program():
    with pytest.raises(SettingError, match="refold_expand, refold_search"):
        begin().call("grep", "{}")


# proves: A11
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_tools_are_declared_in_every_dialect_and_are_cheap(dialect):
    chat = begin()
    tools = chat.tools(dialect)
    names = [tool.get("name") or tool["function"]["name"] for tool in tools]
    assert names == [EXPAND, SEARCH]
    chat.append(user("Hello."))
    fitted = chat.fit(tools=tools, dialect=dialect)
    assert fitted.request["tools"] == tools
    assert fitted.report.tokens.final < 400


def test_where_handles_are_off_none_is_shown_and_expand_is_not_offered():
    chat = hidden(TEXT, handles=False)
    assert not any("#" in message.text for message in chat.view().messages)
    assert [tool["function"]["name"] for tool in chat.tools("openai-chat")] == [SEARCH]


def test_a_quoted_handle_in_what_is_expanded_opens_nothing():
    forged = "[refold #0 system: 9 tokens; 1 shown]\n" + TEXT
    chat = hidden(forged)
    assert chat.call(EXPAND, {"at": 2, "lines": "1-1"}).endswith("\n[refold ##0 system: 9 tokens; 1 shown]")


def test_nothing_is_expanded_from_another_conversation():
    store = refold.open("a", store="memory://shared-expand").store
    other = refold.open("other", store=store)
    other.append([user("a secret"), user("another")])
    chat = refold.open("mine", store=store)
    chat.append(user("hello"))
    with pytest.raises(RefoldError):
        chat.expand(1)
    assert "no such place" in chat.call(EXPAND, {"at": 1})


# proves: E8
def test_own_loops_have_a_hook_before_and_after_each_step():
    chat = begin()
    chat.append(user("Go."))
    fitted = chat.before_step()
    assert fitted.messages == [user("Go.")]
    places = chat.after_step(calls(("c1", "web_search")), answers("c1", "found"))
    assert places == [1, 2]
    assert len(chat.before_step().messages) == 3


def test_what_was_corrected_says_so_where_it_is_expanded():
    chat = hidden(TEXT)
    chat.undo(2)
    edit = chat.correct(2, "Nothing was found.")
    assert chat.expand(edit) == "Nothing was found."
    assert chat.call(EXPAND, {"at": 2, "lines": "1-2"}).startswith(
        "[refold #2 tool web_search, before it was corrected: lines 1-2 of 60]\nline 1:"
    )
    assert chat.expand(2) == TEXT


# Many messages


class Counted(MemoryStore):
    """A store that counts the entries that are read from it."""

    entries = 0

    def read(self, *range: Any, **options: Any) -> Iterator[Link]:
        for link in super().read(*range, **options):
            self.entries += 1
            yield link


@pytest.fixture
def summarized() -> tuple[Session, int]:
    """A conversation of 1,000 messages, and the place of the summary of nearly all of them."""
    chat = begin(store=Counted(), tools={})
    chat.append([user(f"message {n}\n{'ab ' * 20}") for n in range(1_000)])
    chat.compact(keep_recent=0)
    (summary,) = [item.edit for item in chat.view().items if item.is_folded]
    return chat, summary


def test_the_first_lines_of_a_summary_are_shown_without_reading_all_that_it_covers(summarized):
    chat, summary = summarized
    messages = len(chat.chat.record.event(summary).span)
    whole = chat.expand(summary)
    lines = whole.split("\n")
    chat.store.entries = 0
    assert chat.expand(summary, lines="3-20") == "\n".join(lines[2:20])
    answer = chat.call(EXPAND, {"at": summary, "lines": "1-20"})
    assert answer.startswith(f"[refold #{summary} {messages} messages: lines 1-20]\n")
    assert "lines 1-2; go on" in chat.inspect.expand_within(summary, slice_of({}), 300)
    assert chat.store.entries < 400
    with pytest.raises(CannotExpandError, match=f"it has {len(lines):,} lines, none in lines 9999-"):
        chat.expand(summary, lines="9999-")


def test_all_that_a_summary_covers_can_be_read_answer_by_answer(summarized):
    chat, summary = summarized
    whole = chat.expand(summary)
    for way in ("lines", "chars"):
        rest, parts = f"{len(whole.split(chr(10))) - 80 if way == 'lines' else len(whole) - 900}-", []
        while rest:
            answer = chat.inspect.expand_within(summary, slice_of({way: rest}), 300)
            parts.append(answer.partition("\n")[2])
            rest = next(iter(re.findall(rf"go on with {way} (\d+-)\]", answer)), "")
        text = ("\n" if way == "lines" else "").join(parts)
        assert len(parts) > 2
        assert whole.endswith(text)


def test_a_line_of_a_summary_that_is_too_long_goes_on_by_characters():
    chat = begin(tools={})
    chat.append([user("Go."), user("x" * 9_000), user("more\n" * 400), user("end")])
    chat.compact(keep_recent=0)
    (summary,) = [item.edit for item in chat.view().items if item.is_folded]
    whole = chat.expand(summary)
    first = whole.split("\n").index("x" * 9_000) + 1
    answer = chat.inspect.expand_within(summary, slice_of({"lines": f"{first}-"}), 300)
    (start, end) = re.findall(r"chars (\d+)-(\d+); go on with chars \2-\]", answer)[0]
    assert whole[int(start) :].startswith("x" * 9_000)
    assert answer.endswith("\n" + whole[int(start) : int(end)])


def test_a_regular_expression_is_searched_for_in_more_text_than_fits_into_one_search(summarized, monkeypatch):
    chat, summary = summarized
    monkeypatch.setattr("refold.session.safe_regex.MAX_TEXT_CHARS", 20_000)  # of 70,000
    found = chat.expand(summary, match="/^message [1-9]50$/")
    assert re.findall(r"^message (\d)50$", found, re.M) == list("123456789")
