"""Demands of docs/requirements.md that no other file has a place for, each as a user would meet it."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

import refold
from mem0_stub import Mem0Stub
from refold import Message, Text, ToolCall, ToolResult
from refold.agent import Agent
from refold.core.budget import Budget
from refold.core.event import Replaced, Said
from refold.core.message import CompactionMarker, Media, Opaque, Reasoning, StepStart, Usage
from refold.models.count import counter
from refold.policies.prune import Prune
from refold.testing.stand_in import Reply, StandIn
from test_ladder import agent, output, step, user


def opened(window: int = 400_000, **settings: Any) -> refold.Session:
    return refold.open("c", store="memory://", model="m", config=agent(window, **settings))


def edits(chat: refold.Session) -> list[Replaced]:
    return [event for event in chat.events() if isinstance(event, Replaced)]


# Messages


EVERY_PART = (
    Text("It is here."),
    Reasoning("Where was it?"),
    ToolCall("a", "look", '{"at": 1}'),
    Media("image", url="https://example.org/a.png"),
    Media("file", data="QQ==", mime="application/pdf", name="a.pdf"),
    Media("audio", data="QQ==", mime="audio/wav"),
    StepStart(),
    CompactionMarker({"summary": "so far"}),
    Opaque({"type": "hologram", "size": 3}),
)


# proves: C3
def test_every_kind_of_part_comes_back_from_the_store_and_its_id_stays(tmp_path):
    url = f"sqlite:///{tmp_path}/log.db"
    answer = Message("tool", (ToolResult("a", "no", "look", is_error=True),), id="mine")
    with refold.open("c", store=url) as chat:
        chat.append([user("Go."), Message("assistant", EVERY_PART), answer])
        before = chat.get_all()
    after = refold.open("c", store=url).get_all()
    assert [one.message.parts for one in after[1:]] == [EVERY_PART, answer.parts]
    assert [one.id for one in after] == [one.id for one in before] == ["m0", "m1", "mine"]
    ids = [one.part_id(n) for one in after for n in range(len(one.message.parts))]
    assert len({*ids}) == len(ids) == len(EVERY_PART) + 2


# proves: C4
def test_an_answer_keeps_its_model_its_end_its_usage_its_error_and_that_it_is_a_summary(tmp_path):
    url = f"sqlite:///{tmp_path}/log.db"
    facts: dict[str, Any] = {"model": "gpt-5", "finish": "length", "usage": Usage(12, 3, 1), "error": "503"}
    said = [
        Message("system", "Be brief."),
        Message("user", "Go."),
        Message("assistant", "Well", **facts),
        Message("assistant", "All in all.", summary=True),
    ]
    with refold.open("c", store=url) as chat:
        chat.append(said)
    again = refold.open("c", store=url)
    assert [one.message for one in again.get_all()] == said


class Ticket(msgspec.Struct, frozen=True):
    number: int


# proves: A1
def test_metadata_of_the_application_has_its_own_type_and_who_has_none_sees_none():
    chat = opened()
    typed: Message[Ticket] = Message("user", "Help!", meta=Ticket(7))
    chat.append([typed, user("And me?")])
    mine, bare = chat.get_all()
    assert msgspec.convert(mine.message.meta, Ticket) == typed.meta
    assert bare.message.meta is None
    assert json.dumps(chat.fit().messages) == json.dumps([user("Help!"), user("And me?")])


# proves: A2
def test_a_message_is_of_the_kind_that_its_role_says():
    chat = opened()
    chat.append([{"role": "system", "content": "Be brief."}, user("Go."), *step("a", "found")])
    assert [one.kind for one in chat.get_all()] == ["system", "user-input", None, "action-result"]


# proves: B2
def test_a_stored_message_says_when_it_was_said_and_a_summary_what_it_stands_for():
    chat = opened()
    chat.append(user("task"), tags=["first"])
    chat.append([m for n in range(8) for m in step(f"a{n}", output(200, f"w{n}"))])
    done = chat.compact(keep_recent=2)
    stored = chat.get_all()
    times = [one.timestamp for one in stored]
    assert times == sorted(times)
    assert times[0].tzinfo is not None
    assert (stored[0].index, stored[0].conversation, stored[0].tags) == (0, "c", ("first",))
    assert [one.index for one in stored] == [*range(17)]
    start, end = done.compacted_range
    assert [one.index for one in stored if one.was_compacted] == [*range(start, end)]
    [summary] = [item for item in chat.view().items if item.is_folded]
    assert (summary.span.start, summary.span.end) == (stored[start].at, stored[end - 1].at + 1)


STRANGE = {"type": "hologram", "size": 3.0, "deep": {"b": [1], "a": None}}
STRANGERS: dict[str, dict[str, Any]] = {
    "openai-chat": {"role": "user", "content": [{"type": "text", "text": "x"}, STRANGE], "odd": 1.0},
    "openai-responses": {"type": "message", "role": "user", "content": [STRANGE], "odd": 1.0},
    "anthropic": {"content": [STRANGE, {"type": "text", "text": "x"}], "role": "user", "odd": 1.0},
    "ai-sdk": {"role": "user", "content": [STRANGE, {"type": "text", "text": "x"}], "odd": 1.0},
}


# proves: C11
@pytest.mark.parametrize("dialect", STRANGERS)
def test_what_is_not_known_comes_back_as_it_was_in_every_dialect(tmp_path, dialect):
    url = f"sqlite:///{tmp_path}/log.db"
    with refold.open("c", store=url) as chat:
        chat.append(STRANGERS[dialect], dialect=dialect)
    again = refold.open("c", store=url)
    assert json.dumps(again.fit(dialect=dialect).messages) == json.dumps([STRANGERS[dialect]])
    assert STRANGE in [part.value for part in again.get_all()[0].message.parts if isinstance(part, Opaque)]


# proves: C8
def test_rows_of_an_older_record_are_appended_as_they_are():
    rows = [
        {"id": "r1", "role": "human", "content": "Look it up.", "created_at": "2024-01-01"},
        {"id": "r2", "role": "ai", "content": json.dumps([{"type": "text", "text": "Found."}])},
    ]
    chat = opened()
    chat.append(rows)
    assert [(one.id, one.message.text) for one in chat.get_all()] == [("r1", "Look it up."), ("r2", "Found.")]
    assert [message["content"] for message in chat.fit().messages] == ["Look it up.", "Found."]


# The record and the view


# proves: E6
def test_an_edit_is_stored_with_all_that_was_decided_and_marks_follow_from_it():
    chat = opened()
    chat.append([user("task"), *(m for n in range(6) for m in step(f"a{n}", output(200, f"w{n}")))])
    before = chat.view().tokens
    chat.compact(keep_recent=2)
    [edit] = edits(chat)
    assert (edit.kind, edit.view, edit.round) == ("summarize", "main", 1)
    assert [edit.span.start, edit.span.end] == [1, 11]
    assert edit.tokens[0] - edit.tokens[1] == before - chat.view().tokens > 0
    assert edit.shown[0] == next(m for m in chat.view().messages if m.summary)
    assert chat.get_all()[-1].timestamp.timestamp() <= edit.time
    last = [event for event in chat.events() if isinstance(event, Said) and event.at < edit.at][-1]
    assert (last.line.turn, last.line.step) == (1, 6)  # when it was: after these
    marked = [one.at for one in chat.get_all() if one.was_compacted]
    assert marked == [*edit.span]
    chat.undo(edit.at)
    assert not any(one.was_compacted for one in chat.get_all())


# proves: B9
def test_a_new_process_has_exactly_the_view_of_the_old_one(tmp_path):
    url, config = f"sqlite:///{tmp_path}/log.db", agent(8_000)
    with refold.open("c", store=url, model="m", config=config) as chat:
        chat.append(user("task"))
        for n in range(40):
            chat.append(step(f"a{n}", output(300, f"w{n}")))
            chat.fit()
        assert edits(chat)
    program = """
import json, sys, refold
chat = refold.open("c", store=sys.argv[1], model="m", config=json.loads(sys.argv[2]))
print(json.dumps([[m.text for m in chat.view().messages], chat.fit().messages, len(list(chat.events()))]))
"""
    asked = [sys.executable, "-c", program, url, json.dumps(config)]
    view, request, events = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    here = refold.open("c", store=url, model="m", config=config)
    assert view == [message.text for message in here.view().messages]
    assert request == here.fit().messages
    assert events == len(list(here.events()))


# proves: B10
def test_agents_with_windows_of_their_own_work_on_one_record():
    config = agent(400_000)
    config["models"]["small"] = {"window": 4_000, "max_output": 500, "provider": "openai"}
    wide = refold.open("c", store="memory://two-windows", model="m", config=config, view="wide")
    narrow = refold.open("c", store="memory://two-windows", model="small", config=config, view="narrow")
    wide.append(user("task"))
    for n in range(12):
        (wide, narrow)[n % 2].append(step(f"a{n}", output(400, f"w{n}")))
        assert len(wide.fit().messages) == 3 + 2 * n
        assert narrow.fit().report.tokens.final <= 3_500
    assert narrow.check_overflow().limit == 4_000
    assert len(narrow.view().messages) < len(wide.view().messages)
    assert [one.at for one in wide.get_all()] == [one.at for one in narrow.get_all()]


# proves: B1, B6
def test_recent_messages_are_fifty_unless_more_are_asked_for_and_come_in_order():
    chat = opened()
    chat.append([user(f"message {n}") for n in range(120)])
    assert [one.index for one in chat.get_recent()] == [*range(70, 120)]
    assert [one.index for one in chat.get_recent(100)] == [*range(20, 120)]


# Counting and triggers


# proves: E1
def test_a_cleared_result_counts_as_what_stands_in_its_place():
    chat = opened(tools={"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}})
    chat.append([user("task"), *step("a", output(900, "w"))])
    chat.fit()
    item = chat.view().items[2]
    assert item.shown[0].text.endswith("removed]")
    assert item.tokens == counter("m", kind="estimate").message(item.shown[0]) < 30


# proves: C10
def test_nothing_is_done_about_an_answer_before_the_next_request():
    chat = opened(8_000)
    chat.append([user("task"), *(m for n in range(8) for m in step(f"a{n}", output(300, f"w{n}")))])
    chat.fit()
    known = len(edits(chat))
    chat.after_step({"role": "assistant", "content": output(4_000, "long")})
    assert chat.should_compact()
    assert len(edits(chat)) == known
    chat.before_step()
    assert len(edits(chat)) > known


# Reduction


# proves: E4
@pytest.mark.parametrize("strategy", ["summarize", "hierarchical"])
def test_the_newest_ten_messages_stay_unless_told_otherwise(strategy):
    chat = opened()
    chat.append([{"role": "system", "content": "Be brief."}, user("task")])
    chat.append([m for n in range(12) for m in step(f"a{n}", output(200, f"w{n}"))])
    before = chat.fit().messages
    chat.compact(strategy)
    after = chat.fit().messages
    assert after[:2] == before[:2]
    assert after[-10:] == before[-10:]
    assert len(after) == 2 + 1 + 10


# proves: C7
def test_pruning_protects_40_000_tokens_and_wants_to_save_20_000_unless_told_otherwise():
    assert Prune().limits(Budget()) == (40_000, 20_000)
    assert Prune().keep_turns == 2


SAME, IDLE = (
    output(1_200, "same"),
    [{"role": "assistant", "content": output(200, f"t{n}")} for n in range(32)],
)
CHEAPEST: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "nothing": (step("a", "found"), []),
    "expire": ([*step("a", SAME, "old"), *IDLE[:3]], ["expire"]),
    "dedupe": ([m for n in range(6) for m in step(f"a{n}", SAME)], ["dedupe"]),
    "prune": ([m for n in range(9) for m in (*step(f"a{n}", output(700, f"w{n}")), user("on"))], ["prune"]),
    "summarize": (IDLE, ["summarize"]),
    "shrink": (
        [*IDLE, *step("a", output(1_900, "a")), *step("b", output(1_800, "b"))],
        ["summarize", "shrink"],
    ),
    "one after the other": ([*IDLE, *step("a", SAME), *step("b", SAME)], ["dedupe", "summarize"]),
}


# proves: C10b
@pytest.mark.parametrize("name", CHEAPEST)
def test_the_cheapest_that_works_is_done_and_no_more(name):
    said, rungs = CHEAPEST[name]
    tools = {"old": {"expire": {"after_steps": 1, "mode": "remove"}}}
    chat = opened(12_000, tools=tools, compact={"threshold_percent": 4_800 / 9_000})
    chat.append([user("task"), *said])
    report = chat.fit().report
    assert [*report.tokens.after] == rungs
    counts = [report.tokens.before, *report.tokens.after.values(), report.tokens.final]
    assert counts == sorted(counts, reverse=True)
    assert {edit.kind for edit in report.edits} <= {*rungs}
    assert all(edit.why and edit.span for edit in report.edits)


# proves: A15
def test_the_same_text_is_told_by_a_model_once_wherever_it_stands():
    asked = list[str]()

    def write(ask: Any) -> str:
        asked.append(ask.messages[0].text)
        return json.dumps({"summary": "Flight HAT007 leaves at 17:40."})

    page = "Flight HAT007 leaves at 17:40. Nothing else is known of it.\n" * 40
    expire = {"after_steps": 0, "mode": "compact", "compact_mode": "ai-summary", "length": 200}
    config = agent(tools={"web_search": {"expire": expire}}, dedupe="off")
    for name in ("one", "two"):
        chat = refold.open(name, store="memory://told-once", model="m", config=config, summarizer=write)
        chat.append([user("task"), *step("a", page), *step("b", page)])
        for n in range(3):
            chat.append({"role": "assistant", "content": f"Thought {n}."})
            texts = [m["content"] for m in chat.fit().messages if m["role"] == "tool"]
        assert all("HAT007 leaves at 17:40." in text and len(text) < 300 for text in texts)
    assert len(asked) == 1


# The loop


# proves: A11b
def test_the_steps_that_expiry_counts_are_those_of_the_loop():
    seen = list[bool]()

    def script(request: Any) -> Reply | str:
        if len(seen) or len(request["messages"]) > 2:
            seen.append("w11 said" in json.dumps(request["messages"]))
        return Reply(calls=(("look", {"n": len(seen)}),)) if len(seen) < 5 else "Done."

    def look(n: int) -> str:
        return output(400, "w") if not n else "nothing"

    model = StandIn(script, window=16_000)
    rule = {"tools": {"look": {"expire": {"after_steps": 2, "mode": "remove"}}}}
    Agent("looker", model, [look], config=[model.config, rule], store="memory://").run("Go")
    assert seen == [True, True, False, False, False]  # in steps 2, 3, 4, …


# proves: A11
def test_the_prompt_of_the_loop_explains_how_to_get_things_back():
    told = list[str]()

    def script(request: Any) -> str:
        told.append(request["messages"][0]["content"])
        assert {tool["function"]["name"] for tool in request["tools"]} == {"refold_expand", "refold_search"}
        return "Done."

    model = StandIn(script, window=16_000)
    Agent("a", model, config=model.config, store="memory://").run("Go")
    assert all(word in told[0] for word in ("refold_expand", "refold_search", "[refold #N"))


# proves: B6
def test_a_session_holds_the_words_of_what_is_shown_and_no_others():
    chat = opened(8_000)
    chat.append(user("task"))
    held = list[int]()
    for n in range(150):
        chat.append(step(f"a{n}", output(200, f"w{n}")))
        chat.fit()
        held.append(len(chat.record.entries.at_hand))
    shown = {line.at for item in chat.view().items for line in item.lines}
    assert {*chat.record.entries.at_hand} <= shown | {one.at for one in chat.get_recent(2)}
    assert max(held[75:]) <= max(held[:75])
    assert chat.get_count() == 301


# Stores


# proves: B4f
def test_clearing_deletes_what_mem0_remembers_and_the_raw_messages(tmp_path, monkeypatch):
    with Mem0Stub() as stub:
        monkeypatch.setenv("MEM0_API_KEY", stub.key)
        url = f"mem0://ann?host={stub.host}&record=sqlite:///{tmp_path}/raw.db"
        with refold.open("c", store=url) as chat:
            chat.append([user("I like tea."), {"role": "assistant", "content": "Noted."}])
        raw = refold.open("c", store=f"sqlite:///{tmp_path}/raw.db")
        assert [one.message.text for one in raw.get_all()] == ["I like tea.", "Noted."]
        with refold.open("c", store=url) as chat:
            assert chat.memories("tea")
            chat.clear()
        assert stub.texts == []
        assert refold.open("c", store=f"sqlite:///{tmp_path}/raw.db").get_count() == 0
