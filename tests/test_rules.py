"""Judges of requests: what was accepted passes, what is broken is named, and nothing makes them raise."""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.dialects.rules.request import Facts, Violation
from refold.dialects.rules.targets import RULES, check, check_request

Json = Any
PAGE = Path(__file__).parents[1] / "docs" / "validity.md"
RECORDINGS = Path(__file__).parents[2] / "shared" / "data" / "recordings"
RECORDED = {
    "api_openai_chat": "openai-chat",
    "api_openai_responses": "openai-responses",
    "api_anthropic_messages": "anthropic",
    "api_anthropic_count_tokens": "anthropic",
}
NOTHING = Facts()
CHAT, RESPONSES, ANTHROPIC, SDK = RULES
ASK: Json = {"role": "user", "content": "Go"}
LONE = "\ud800"


class Case(NamedTuple):
    """A request that is valid, also strictly, and its twin that breaks one rule."""

    dialect: str
    rule: str
    good: list[Json]
    bad: list[Json]
    facts: Facts = NOTHING
    strictly: bool = False
    """The twin is seen accepted and breaks the rule only strictly."""
    spoiled: Facts | None = None
    """The twin's facts, where they differ."""


def says(text: Json, **more: Json) -> Json:
    return {"role": "assistant", "content": text, **more}


def calls(*ids: str, arguments: Json = "{}") -> Json:
    made = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}} for id in ids
    ]
    return says(None, tool_calls=made)


def answer(id: str) -> Json:
    return {"role": "tool", "tool_call_id": id, "content": "4"}


def call(call_id: str, **more: Json) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}", **more}


def output(id: str, kind: str = "function_call_output") -> Json:
    return {"type": kind, "call_id": id, "output": "4"}


def search(id: str) -> Json:
    return {"type": "tool_search_call", "call_id": id, "execution": "client", "arguments": {}}


def reasoning(**more: Json) -> Json:
    return {"type": "reasoning", "summary": [], **more}


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": [*blocks]}


def model(*blocks: Json) -> Json:
    return {"role": "assistant", "content": [*blocks]}


def system(text: str = "Now in French.") -> Json:
    return {"role": "system", "content": text}


def text(words: Json = "So", **more: Json) -> Json:
    return {"type": "text", "text": words, **more}


def use(id: str, kind: str = "tool_use", input: Json = None) -> Json:
    return {"type": kind, "id": id, "name": "look", "input": {} if input is None else input}


def result(id: str, kind: str = "tool_result", content: Json = "4") -> Json:
    return {"type": kind, "tool_use_id": id, "content": content}


def thinking(signature: str = "c2ln") -> Json:
    return {"type": "thinking", "thinking": "Hm", "signature": signature}


def tool_call(id: str, **more: Json) -> Json:
    return {"type": "tool-call", "toolCallId": id, "toolName": "look", "input": {}, **more}


def tool_result(id: str) -> Json:
    return {
        "type": "tool-result",
        "toolCallId": id,
        "toolName": "look",
        "output": {"type": "text", "value": "4"},
    }


def tools(*parts: Json) -> Json:
    return {"role": "tool", "content": [*parts]}


MARK = {"cache_control": {"type": "ephemeral"}}
PATCH = {"type": "apply_patch_call", "call_id": "a", "operation": {}}
FOUR = [text(**MARK)] * 4
INSIDE = Facts(system_inside=True)
SEARCH, FOUND = "server_tool_use", "web_search_tool_result"
ASKED = {"type": "tool-approval-request", "approvalId": "p", "toolCallId": "a"}
GRANTED = {"type": "tool-approval-response", "approvalId": "p", "approved": True}

GENERAL = [
    case
    for dialect in RULES
    for case in (
        Case(dialect, "G1", [{"role": "user", "content": "😀"}], [{"role": "user", "content": f"a{LONE}"}]),
        Case(dialect, "G1", [{**ASK, "x": {"ü": 1.5}}], [{**ASK, "x": {LONE: 1}}]),
        Case(dialect, "G1", [{**ASK, "x": [1e300]}], [{**ASK, "x": [float("nan")]}]),
        Case(dialect, "G1", [{**ASK, "x": [10**400]}], [{**ASK, "x": {"y": float("-inf")}}]),
        Case(dialect, "G1", [{**ASK, "x": [None, True]}], [{**ASK, "x": (1, 2)}]),
        Case(dialect, "G1", [{**ASK, "x": {"1": "y"}}], [{**ASK, "x": {1: "y"}}]),
        Case(dialect, "G2", [ASK], []),
        Case(dialect, "G3", [ASK], [ASK], Facts(tokens=9, room=9), spoiled=Facts(tokens=10, room=9)),
        Case(dialect, "S1", [ASK], [ASK, "Go"]),
        Case(dialect, "S1", [ASK], [{"role": "boss", "content": "Go"}]),
        Case(dialect, "S1", [ASK], [{"role": "user", "content": 7}]),
        Case(dialect, "S1", [ASK], [{"role": "user", "content": ["Go"]}]),
    )
]
CASES = [
    *GENERAL,
    Case(CHAT, "C1", [ASK, calls("a"), answer("a")], [ASK, says("So"), answer("a")]),
    Case(CHAT, "C1", [ASK, calls("a"), answer("a")], [ASK, calls("a"), answer("a"), answer("a")]),
    Case(CHAT, "C2", [ASK, calls("a", "b"), answer("b"), answer("a")], [ASK, calls("a", "b"), answer("b")]),
    Case(CHAT, "C2", [ASK, calls("a"), answer("a"), ASK], [ASK, calls("a"), ASK]),
    Case(CHAT, "C3", [ASK, calls("a"), answer("a"), ASK], [ASK, calls("a"), ASK, answer("a")]),
    Case(
        CHAT,
        "C4",
        [calls(*map(str, range(128))), *(answer(str(n)) for n in range(128))],
        [calls(*map(str, range(129))), *(answer(str(n)) for n in range(129))],
    ),
    Case(CHAT, "C5", [says("x" * 10_485_760)], [says("x" * 10_485_761)]),
    Case(CHAT, "C5", [says([text("x")])], [says([text("x" * 10_485_761)])]),
    Case(CHAT, "C6", [ASK, calls("a" * 40), answer("a" * 40)], [ASK, calls("a" * 41), answer("a" * 41)]),
    Case(CHAT, "C7", [system(), ASK], [system(), answer("a"), ASK]),
    Case(CHAT, "C8", [ASK, says("")], [ASK, says(None)]),
    Case(CHAT, "C8", [ASK, says(None, refusal="No")], [ASK, {"role": "assistant"}]),
    Case(CHAT, "C9", [ASK, says("So")], [ASK, says("So", tool_calls=[])]),
    Case(CHAT, "C9", [ASK, says("So")], [ASK, says("So", tool_calls=None)], strictly=True),
    Case(CHAT, "C10", [calls("a"), answer("a")], [calls("a", arguments={}), answer("a")]),
    Case(CHAT, "G4", [calls("a", "b"), answer("a"), answer("b")], [calls("a", "a"), answer("a")]),
    Case(
        CHAT,
        "G4",
        [calls("a"), answer("a"), calls("b"), answer("b")],
        [calls("a"), answer("a"), calls("a"), answer("a")],
        strictly=True,
    ),
    Case(CHAT, "S1", [calls("a"), answer("a")], [says("So", tool_calls=[{"type": "function"}])]),
    Case(CHAT, "S1", [ASK], [ASK, {"role": "tool", "content": "4"}]),
    Case(CHAT, "S1", [ASK], [{**ASK, "tool_calls": [1]}]),
    Case(RESPONSES, "R1", [ASK, call("a"), output("a")], [ASK, output("a")]),
    Case(RESPONSES, "R1", [call("a"), output("a")], [call("a"), output("a"), output("a")]),
    Case(RESPONSES, "R1", [PATCH, output("a", "apply_patch_call_output")], [PATCH, output("a")]),
    Case(
        RESPONSES,
        "R1",
        [search("a"), output("a", "tool_search_output")],
        [search("a"), output("a")],
        strictly=True,
    ),
    Case(RESPONSES, "R1", [ASK], [output("a")], Facts(stored_elsewhere=True), strictly=True),
    Case(
        RESPONSES,
        "R1",
        [{"type": "item_reference", "id": "fc_1"}],
        [{"type": "item_reference", "id": "fc_1"}, output("a")],
        strictly=True,
    ),
    Case(RESPONSES, "R2", [call("a"), says("So"), output("a")], [call("a"), says("So")]),
    Case(RESPONSES, "R2", [ASK], [call("a"), {"type": "item_reference", "id": "x"}], strictly=True),
    Case(RESPONSES, "R3", [ASK, reasoning(), says("So")], [ASK, reasoning(), ASK]),
    Case(RESPONSES, "R3", [reasoning(), reasoning(), says("So")], [says("So"), reasoning()]),
    Case(
        RESPONSES,
        "R4",
        [reasoning(), call("a", id="fc_1"), output("a"), call("b"), output("b")],
        [ASK, call("a", id="fc_1"), output("a")],
        Facts(reasoned=(1, 3)),
    ),
    Case(
        RESPONSES,
        "R5",
        [reasoning(encrypted_content="x"), says("So")],
        [reasoning(encrypted_content=None), says("So")],
        Facts(store=False),
    ),
    Case(RESPONSES, "R6", [call("a", id="fc_1"), output("a")], [call("a", id="call_1"), output("a")]),
    Case(RESPONSES, "R6", [says("So", id="msg_1")], [says("So", id="1")]),
    Case(RESPONSES, "R6", [reasoning(id="rs_1"), says("So")], [reasoning(id=1), says("So")]),
    Case(RESPONSES, "R7", [call("a" * 64), output("a" * 64)], [call("a" * 65), output("a" * 65)]),
    Case(
        RESPONSES,
        "R8",
        [call("a"), call("b"), output("b"), output("a"), says("So")],
        [call("a"), call("b"), output("b"), says("So"), output("a")],
    ),
    Case(RESPONSES, "R9", [{"type": "compaction", "encrypted_content": "x"}], [{"type": "compaction"}]),
    Case(
        RESPONSES, "G4", [call("a"), call("b"), output("a"), output("b")], [call("a"), call("a"), output("a")]
    ),
    Case(
        RESPONSES,
        "G4",
        [call("a"), output("a"), call("b"), output("b")],
        [call("a"), output("a"), call("a"), output("a")],
        strictly=True,
    ),
    Case(RESPONSES, "S1", [ASK], [{"content": "Go"}]),
    Case(
        RESPONSES, "S1", [call("a"), output("a")], [{"type": "function_call", "name": "f", "arguments": "{}"}]
    ),
    Case(RESPONSES, "S1", [call("a"), output("a")], [call("a", arguments={}), output("a")]),
    Case(ANTHROPIC, "A1", [ASK, model(text())], [model(text()), ASK], strictly=True),
    Case(ANTHROPIC, "A2", [ASK, system()], [system(), ASK, model(text())], INSIDE),
    Case(ANTHROPIC, "A2", [ASK, model(use("s", SEARCH)), system()], [ASK, model(text()), system()], INSIDE),
    Case(ANTHROPIC, "A2", [ASK, system(), model(text()), ASK], [ASK, system(), ASK], INSIDE),
    Case(ANTHROPIC, "A2", [ASK], [ASK, system()], strictly=True),
    Case(ANTHROPIC, "A2", [ASK, system()], [ASK, system(), system()], INSIDE, strictly=True),
    Case(ANTHROPIC, "A3", [ASK, model(use("a")), user(result("a"))], [ASK, model(use("a")), ASK]),
    Case(
        ANTHROPIC,
        "A3",
        [ASK, model(use("a")), model(use("b")), user(result("b")), user(result("a"), text())],
        [ASK, model(use("a")), model(use("b")), user(result("b"))],
    ),
    Case(ANTHROPIC, "A4", [ASK, model(use("a")), user(result("a"))], [ASK, model(text()), user(result("a"))]),
    Case(
        ANTHROPIC,
        "A5",
        [ASK, model(use("a")), user(result("a"), text())],
        [ASK, model(use("a")), user(text(), result("a"))],
    ),
    Case(
        ANTHROPIC,
        "A6",
        [ASK, model(use("a")), user(result("a"))],
        [ASK, model(use("a")), user(result("a")), user(result("a"))],
    ),
    Case(
        ANTHROPIC,
        "A6",
        [ASK, model(use("a"), use("b")), user(result("a"), result("b"))],
        [ASK, model(use("a"), use("a")), user(result("a"))],
    ),
    Case(
        ANTHROPIC,
        "A6",
        [ASK, model(use("a")), user(result("a")), model(use("b")), user(result("b"))],
        [ASK, model(use("a")), user(result("a")), model(use("a")), user(result("a"))],
        strictly=True,
    ),
    Case(
        ANTHROPIC,
        "A7",
        [ASK, model(text(), use("a")), user(result("a"))],
        [ASK, model(use("a"), text()), user(result("a"))],
    ),
    Case(
        ANTHROPIC, "A8", [ASK, model(use("s", SEARCH), result("s", FOUND))], [ASK, model(result("s", FOUND))]
    ),
    Case(
        ANTHROPIC,
        "A8",
        [ASK, model(use("s", SEARCH), use("a")), user(result("a")), model(result("s", FOUND), text())],
        [ASK, model(use("s", SEARCH), text()), ASK, model(text()), ASK],
    ),
    Case(
        ANTHROPIC,
        "A8",
        [ASK, model(use("m", "mcp_tool_use"), result("m", "mcp_tool_result"), text()), ASK],
        [ASK, model(use("m", "mcp_tool_use")), user(result("m", "mcp_tool_result"))],
    ),
    Case(ANTHROPIC, "A9", [ASK, model(text("."))], [ASK, model(text(" \n"))]),
    Case(ANTHROPIC, "A9", [ASK, model()], [ASK, model(), ASK]),
    Case(ANTHROPIC, "A9", [ASK], [{"role": "user", "content": ""}]),
    Case(
        ANTHROPIC,
        "A9",
        [ASK, model(use("a")), user(result("a", content=""))],
        [ASK, model(use("a")), user(result("a", content=[text("")]))],
    ),
    Case(
        ANTHROPIC,
        "A9",
        [ASK, model(use("a")), user(result("a", content=[text("4")]))],
        [ASK, model(use("a")), user(result("a", content=[text(" ")]))],
        strictly=True,
    ),
    Case(ANTHROPIC, "A10", [user(*FOUR)], [user(*FOUR, text(**MARK))]),
    Case(ANTHROPIC, "A10", [user(*FOUR[:2])], [user(*FOUR[:3])], Facts(marks=2)),
    Case(
        ANTHROPIC,
        "A11",
        [ASK, model(thinking(), text(), use("a")), user(result("a"))],
        [ASK, model(text(), thinking(), use("a")), user(result("a"))],
    ),
    Case(
        ANTHROPIC,
        "A11",
        [ASK, model({"type": "redacted_thinking", "data": "x"}, use("a")), user(result("a"))],
        [ASK, model({"type": "redacted_thinking"}, use("a")), user(result("a"))],
    ),
    Case(ANTHROPIC, "A11", [ASK, model(text(), thinking()), ASK], [ASK, model(thinking("")), ASK]),
    Case(
        ANTHROPIC,
        "A12",
        [ASK, model(text()), ASK, model(thinking(), text())],
        [ASK, model(thinking(), text()), ASK],
        Facts(stale=(1,)),
    ),
    Case(ANTHROPIC, "A13", [ASK, model(text()), ASK], [ASK, model(text())], Facts(no_prefill=True)),
    Case(
        ANTHROPIC,
        "A14",
        [ASK, model({"type": "compaction", "content": None})],
        [ASK, model({"type": "compaction", "content": ""})],
    ),
    Case(
        ANTHROPIC,
        "A14",
        [ASK, model({"type": "compaction", "encrypted_content": "x"})],
        [ASK, model({"type": "compaction"})],
    ),
    Case(
        ANTHROPIC,
        "A15",
        [ASK, model(use("a")), user(result("a"))],
        [ASK, model(use("a", input="{}")), user(result("a"))],
    ),
    Case(ANTHROPIC, "S1", [ASK, model(text())], [ASK, model(use(""))]),
    Case(ANTHROPIC, "S1", [ASK, model(text())], [ASK, model(text(None))]),
    Case(ANTHROPIC, "S1", [ASK], [user(thinking())]),
    Case(ANTHROPIC, "S1", [ASK], [ASK, model(result("a"))]),
    Case(
        SDK,
        "G4",
        [model(tool_call("a")), tools(tool_result("a"))],
        [model(tool_call("a"), tool_call("a")), tools(tool_result("a"))],
    ),
    Case(
        SDK,
        "G4",
        [model(tool_call("a")), tools(tool_result("a"))],
        [model(tool_call("a")), tools(tool_result("a"))] * 2,
        strictly=True,
    ),
    Case(SDK, "G5", [model(tool_call("a")), tools(tool_result("a"))], [ASK, tools(tool_result("a"))]),
    Case(
        SDK, "G5", [model(tool_call("a", providerExecuted=True), tool_result("a"))], [model(tool_result("a"))]
    ),
    Case(SDK, "G6", [model(tool_call("a")), tools(tool_result("a")), ASK], [model(tool_call("a")), ASK]),
    Case(
        SDK,
        "G6",
        [model(tool_call("a")), tools(tool_result("a"))],
        [model(tool_call("a")), ASK, tools(tool_result("a"))],
    ),
    Case(SDK, "G6", [model(tool_call("a"), ASKED), tools(GRANTED)], [model(tool_call("a"), ASKED)]),
    Case(SDK, "S1", [model(tool_call("a")), tools(tool_result("a"))], [tools({"type": "tool-result"})]),
    Case(SDK, "S1", [ASK], [{"role": "tool", "content": "4"}]),
]
named = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dialect}-{case.rule}")


def strictly(facts: Facts) -> Facts:
    return msgspec.structs.replace(facts, strict=True)


def rules(violations: list[Violation]) -> set[str]:
    return {violation.rule for violation in violations}


# proves: C15
@named
def test_a_valid_request_passes_strictly_and_its_twin_breaks_the_rule_it_should(case: Case) -> None:
    facts = case.spoiled or case.facts
    assert check(case.dialect, case.good, case.facts) == []
    assert check(case.dialect, case.good, strictly(case.facts)) == []
    assert rules(check(case.dialect, case.bad, facts)) == (set() if case.strictly else {case.rule})
    assert rules(check(case.dialect, case.bad, strictly(facts))) == {case.rule}


@named
def test_a_violation_says_where_it_is_in_a_sentence(case: Case) -> None:
    for violation in check(case.dialect, case.bad, strictly(case.spoiled or case.facts)):
        assert 0 <= violation.index < max(1, len(case.bad))
        assert re.match(r"(Message|Item) \d+ \w|The request ", violation.message)
        violation.message.encode()


@named
def test_feeding_message_by_message_is_feeding_at_once(case: Case) -> None:
    for facts in (case.facts, strictly(case.facts)):
        judge = RULES[case.dialect](facts)
        for end, message in enumerate(case.bad, 1):
            judge.feed([message])
            assert judge.violations == check(case.dialect, case.bad[:end], facts)


@named
def test_a_copy_goes_on_by_itself(case: Case) -> None:
    for at in range(len(case.bad) + 1):
        judge = RULES[case.dialect](case.facts)
        judge.feed(case.bad[:at])
        before = judge.violations
        copy = judge.copy()
        copy.feed(case.bad[at:])
        assert judge.violations == before
        judge.feed(case.bad[at:])
        assert judge.violations == copy.violations == check(case.dialect, case.bad, case.facts)


def documented() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        name = re.match(r".*: `([\w-]+)`$", section.split("\n", 1)[0])
        rows = set(re.findall(r"^\| ([A-Z]\d+) \|", section, re.MULTILINE))
        if rows:
            found[name[1] if name else "any"] = rows
    return found


def test_every_rule_on_the_page_is_tried_and_every_rule_tried_is_on_the_page() -> None:
    page = documented()
    tried = {dialect: {case.rule for case in CASES if case.dialect == dialect} for dialect in RULES}
    assert tried == {dialect: page[dialect] | page["any"] for dialect in RULES}


def test_every_rule_is_told_where_it_is_judged_and_every_version_on_the_page() -> None:
    for dialect, judge in RULES.items():
        told = sys.modules[judge.__module__].__doc__ or ""
        assert all(re.search(rf"\b{rule}\b", told) for rule in documented()[dialect])
        assert documented()[dialect] >= judge.PAIRING
        assert judge.VERSION in PAGE.read_text()


def recorded() -> list[Any]:
    return [
        pytest.param(dialect, line["request"], id=line["id"])
        for name, dialect in RECORDED.items()
        if (RECORDINGS / f"{name}.jsonl").exists()
        for line in map(json.loads, (RECORDINGS / f"{name}.jsonl").read_text().splitlines())
        if line["status"] == 200
    ]


@pytest.mark.skipif(not RECORDINGS.exists(), reason="the recorded requests are not beside the project")
@pytest.mark.parametrize(("dialect", "request_"), recorded())
def test_what_a_provider_accepted_passes(dialect: str, request_: Json) -> None:
    assert check_request(dialect, request_) == []
    said = request_["input" if dialect == RESPONSES else "messages"]
    if isinstance(said, list) and not request_.get("previous_response_id"):
        judge = RULES[dialect]()
        for message in said:
            judge.feed([message])
        assert judge.violations == check(dialect, said)


class TestARequestTellsItsFacts:
    def test_a_string_is_the_input_of_a_user(self) -> None:
        assert check_request(RESPONSES, {"input": "Hello"}, strict=True) == []

    def test_a_conversation_at_the_provider_has_the_calls(self) -> None:
        assert rules(check_request(RESPONSES, {"input": [output("a")]})) == {"R1"}
        for field in ("previous_response_id", "conversation"):
            assert check_request(RESPONSES, {"input": [output("a")], field: "x"}) == []
            assert check_request(RESPONSES, {field: "x"}) == []

    def test_what_is_not_stored_needs_its_reasoning_encrypted(self) -> None:
        request = {"input": [reasoning(), says("So")]}
        assert check_request(RESPONSES, {**request, "store": True}) == []
        assert rules(check_request(RESPONSES, {**request, "store": False})) == {"R5"}

    def test_marks_on_system_tools_and_the_request_count(self) -> None:
        request = {"system": [text(**MARK)], "tools": [{"name": "look", **MARK}], **MARK}
        assert check_request(ANTHROPIC, {**request, "messages": [user(*FOUR[:1])]}) == []
        assert rules(check_request(ANTHROPIC, {**request, "messages": [user(*FOUR[:2])]})) == {"A10"}

    def test_adaptive_thinking_may_come_late(self) -> None:
        request = {"messages": [ASK, model(text(), thinking(), use("a")), user(result("a"))]}
        assert rules(check_request(ANTHROPIC, request)) == {"A11"}
        assert check_request(ANTHROPIC, {**request, "thinking": {"type": "adaptive"}}) == []

    def test_what_is_known_otherwise_is_told(self) -> None:
        assert rules(check_request(ANTHROPIC, {"messages": [ASK]}, tokens=2, room=1)) == {"G3"}
        with pytest.raises(TypeError, match="prefill"):
            check_request(ANTHROPIC, {"messages": [ASK]}, prefill=False)

    @pytest.mark.parametrize("dialect", RULES)
    def test_the_rest_of_a_request_is_json_too_and_its_messages_are_a_list(self, dialect: str) -> None:
        field = "input" if dialect == RESPONSES else "messages"
        assert rules(check_request(dialect, {field: [ASK], "user": LONE})) == {"G1"}
        assert rules(check_request(dialect, {field: {"role": "user"}})) == {"S1"}
        assert rules(check_request(dialect, {})) == {"G2"}


@pytest.mark.parametrize("dialect", RULES)
@pytest.mark.parametrize("depth", [1_000, 50_000])
def test_what_nests_too_deeply_is_named(dialect: str, depth: int) -> None:
    listed: Json = []
    held: Json = {}
    for _ in range(depth):
        listed, held = [listed], {"type": "text", "text": held}
    for deep in (listed, held, [held]):
        assert "G1" in rules(check(dialect, [ASK, {"role": "user", "content": deep}]))
        assert rules(check(dialect, [deep])) & {"G1", "S1"}
        assert "G1" in rules(check(dialect, [{**ASK, "role": deep}]))


@pytest.mark.parametrize("dialect", RULES)
def test_what_contains_itself_is_named(dialect: str) -> None:
    knot: list[Json] = []
    knot += [knot, knot]
    assert "G1" in rules(check(dialect, [{"role": "user", "content": knot}]))


def size(judge: Any) -> int:
    values = msgspec.structs.asdict(judge).values()
    return sum(len(value) for value in values if isinstance(value, dict | set | list))


@pytest.mark.parametrize("dialect", RULES)
def test_a_judge_does_not_grow_with_what_it_was_fed(dialect: str) -> None:
    judge = RULES[dialect]()
    sizes = set()
    for n in range(300):
        id = f"call_{n}"
        judge.feed(
            {
                CHAT: [ASK, calls(id), answer(id), says("So")],
                RESPONSES: [ASK, reasoning(), call(id), output(id), says("So")],
                ANTHROPIC: [ASK, model(use(id)), user(result(id)), model(text())],
                SDK: [ASK, model(tool_call(id)), tools(tool_result(id)), model(text())],
            }[dialect]
        )
        sizes.add(size(judge))
    assert judge.violations == []
    assert sizes == {0}


SMALL = [case for case in CASES if case.rule not in ("C4", "C5")]
FIELDS = sorted(
    set(re.findall(r'"(\w+)"', json.dumps([(case.good, case.bad) for case in SMALL if case not in GENERAL])))
)
"""Words of the APIs: keys, and values that mean something to a judge."""
scalars = st.one_of(
    st.sampled_from(FIELDS),
    st.sampled_from(
        [None, True, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", " ", LONE, "a", b"a", object(), ()]
    ),
    st.text(max_size=3),
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=2) | st.integers(), inner, max_size=5)
    ),
    max_leaves=12,
)


@st.composite
def spoiled(draw: st.DrawFn) -> Case:
    """A request of the table with something in it replaced by junk, at any depth."""
    case: Case = draw(st.sampled_from(SMALL))
    messages = _deep_copy(case.bad)
    for _ in range(draw(st.integers(1, 3))):
        here: Json = messages
        while isinstance(here, dict | list) and here:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            key = draw(st.sampled_from(keys))
            if not isinstance(here[key], dict | list) or not here[key] or draw(st.integers(0, 3)) == 0:
                here[key] = draw(junk)
                break
            here = here[key]
    return case._replace(bad=messages)


def _deep_copy(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _deep_copy(inner) for key, inner in value.items()}
    return [_deep_copy(inner) for inner in value] if isinstance(value, list) else value


@given(st.lists(junk | st.lists(junk), max_size=5), st.booleans())
def test_no_junk_makes_a_judge_raise(messages: list[Json], strict: bool) -> None:
    for dialect in RULES:
        judge = RULES[dialect](Facts(strict=strict, store=False, no_prefill=True, stale=(0,), reasoned=(0,)))
        judge.feed(messages)
        assert all(isinstance(violation, Violation) for violation in judge.violations)


@given(spoiled(), st.booleans())
def test_no_spoiled_request_makes_a_judge_raise(case: Case, strict: bool) -> None:
    facts = strictly(case.facts) if strict else case.facts
    for dialect in RULES:
        judge = RULES[dialect](facts)
        for message in case.bad:
            judge.feed([message])
        assert judge.violations == check(dialect, case.bad, facts)
        for violation in judge.violations:
            assert 0 <= violation.index < max(1, len(case.bad))
            violation.message.encode()
    assert isinstance(check_request(case.dialect, {"messages": case.bad, "input": case.bad}), list)
