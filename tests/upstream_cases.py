"""Requests that break one rule each, with what the provider says of it, and some that break none."""

from typing import Any

from upstream_rules import compaction_block, compaction_item, encrypted, signature

Message = dict[str, Any]
Few = tuple[Message, ...]


def user(content: Any = "Hello") -> Message:
    return {"role": "user", "content": content}


def tool(name: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": "done"}


def calls(*names: str, arguments: Any = "{}") -> Message:
    function = {"name": "look", "arguments": arguments}
    made = [{"id": name, "type": "function", "function": function} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": made}


def fc(name: str, **more: Any) -> Message:
    return {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}", **more}


def out(name: str) -> Message:
    return {"type": "function_call_output", "call_id": name, "output": "done"}


def rs(**more: Any) -> Message:
    name = f"rs_{'a' * 24}"
    return {"type": "reasoning", "id": name, "summary": [], "encrypted_content": encrypted(name), **more}


def use(*names: str, first: Few = (), last: Few = (), given: Any = None) -> Message:
    made = [{"type": "tool_use", "id": name, "name": "look", "input": given or {}} for name in names]
    return {"role": "assistant", "content": [*first, *made, *last]}


def got(*names: str, first: Few = (), last: Few = ()) -> Message:
    results = [{"type": "tool_result", "tool_use_id": name, "content": "done"} for name in names]
    return user([*first, *results, *last])


def words(text: str = "Well", **more: Any) -> Message:
    return {"type": "text", "text": text, **more}


def thought(text: str = "Hm") -> Message:
    """Signed for other words, when it has any."""
    return {"type": "thinking", "thinking": text, "signature": signature("Hm", "0" * 24)}


def says(*content: Message) -> Message:
    return {"role": "assistant", "content": [*content]}


U = user()
BE = {"role": "system", "content": "Be brief"}
MARK = {"cache_control": {"type": "ephemeral"}}
SEARCHED = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
T = "toolu_01Ta"  # whose message had thinking, as this server's ids tell

CHAT: list[tuple[str, list[Message], str]] = [
    ("G2", [], "Invalid 'messages': empty array"),
    ("G4", [U, calls("a"), tool("a"), calls("a"), tool("a")], "Duplicate value for 'tool_call_id'"),
    ("C1", [U, tool("a")], "messages with role 'tool' must be a response to a preceeding message"),
    ("C1", [U, calls("a"), tool("b")], "'tool_call_id' of 'b' not found in 'tool_calls'"),
    ("C1", [U, calls("a"), tool("a"), tool("a")], "Duplicate value for 'tool_call_id'"),
    ("C2", [U, calls("a", "b"), tool("a")], "did not have response messages: b"),
    ("C2", [U, calls("a", "b"), tool("a"), U], "did not have response messages: b"),
    ("C3", [U, calls("a", "b"), tool("a"), U, tool("b")], "must be followed by tool messages"),
    ("C4", [U, calls(*map(str, range(129)))], "Expected an array with maximum length 128"),
    ("C5", [user("x" * 10_485_761)], "Expected a string with maximum length 10485760"),
    ("C6", [U, calls("a" * 41), tool("a" * 41)], "Expected a string with maximum length 40"),
    ("C7", [BE, tool("a")], "messages with role 'tool' must be a response"),
    ("C8", [U, {"role": "assistant", "content": None}], "expected a string, got null"),
    ("C8", [user([])], "Invalid 'messages[0].content': empty array"),
    ("C8", [user([{"type": "input_text", "text": "Hello"}])], "Invalid value: 'input_text'"),
    ("C8", [{**U, "x_time": 1}], "Unknown parameter: 'messages[0].x_time'"),
    ("C9", [U, {"role": "assistant", "content": "Hm", "tool_calls": []}], "empty array"),
    ("C10", [U, calls("a", arguments={}), tool("a")], "expected a string, but got an object instead"),
]
RESPONSES: list[tuple[str, list[Message], str]] = [
    ("G2", [], "Invalid 'input': empty array"),
    ("G4", [U, fc("a"), out("a"), fc("a"), out("a")], "Duplicate function call found"),
    ("G4", [U, fc("a", id="fc_1"), out("a"), fc("b", id="fc_1"), out("b")], "Duplicate item found"),
    ("R1", [U, out("a")], "No tool call found for function call output with call_id a."),
    ("R1", [U, out("a"), fc("a")], "No tool call found for function call output with call_id a."),
    ("R2", [U, fc("a")], "No tool output found for function call a."),
    ("R2", [U, fc("a"), fc("b"), out("b"), fc("c"), out("c"), out("a")], "No tool output found"),
    ("R3", [U, rs(), U], "of type 'reasoning' was provided without its required following item"),
    ("R3", [U, rs()], "of type 'reasoning' was provided without its required following item"),
    ("R3", [U, rs(), fc("a", id=f"fc_p{'b' * 24}"), out("a")], "without its required following item"),
    ("R4", [U, fc("a", id=f"fc_r{'a' * 24}"), out("a")], "without its required 'reasoning' item: 'rs_a"),
    ("R5", [U, rs(encrypted_content=None), fc("a"), out("a")], "Items are not persisted when `store`"),
    ("R5", [U, rs(encrypted_content="gAAA"), fc("a"), out("a")], "could not be verified"),
    ("R5", [U, rs(id="rs_b"), fc("a"), out("a")], "item_id did not match the target item id"),
    ("R6", [U, fc("a", id="call_a"), out("a")], "Expected an ID that begins with 'fc'."),
    ("R6", [{**U, "id": "item_1"}], "Expected an ID that begins with 'msg'."),
    ("R7", [U, fc("a" * 65), out("a" * 65)], "Expected a string with maximum length 64"),
    ("R9", [{**compaction_item("it"), "encrypted_content": "A summary"}, U], "could not be verified"),
]
ANTHROPIC: list[tuple[str, list[Message], str]] = [
    ("G2", [], "messages: at least one message is required"),
    ("A1", [says(words()), U], 'first message must use the "user" role'),
    ("A2", [U, BE], 'Unexpected role "system"'),
    ("A2", [{**U, "id": "1"}], "messages.0.id: Extra inputs are not permitted"),
    ("A3", [U, use("a")], "messages.1: `tool_use` ids were found without `tool_result` blocks"),
    ("A3", [U, use("a", "b"), got("a")], "immediately after: b. Each `tool_use` block must have"),
    ("A4", [U, got("a")], "unexpected `tool_use_id` found in `tool_result` blocks: a"),
    (
        "A4",
        [U, use("a"), got("a"), says(words()), got("a")],
        "messages.4.content.0: unexpected `tool_use_id`",
    ),
    ("A5", [U, use("a"), got("a", first=(words(),))], "`tool_result` blocks immediately after: a"),
    ("A6", [U, use("a"), got("a", "a")], "Found multiple `tool_result` blocks with id: a"),
    ("A6", [U, use("a"), got("a"), use("a"), got("a")], "`tool_use` ids must be unique"),
    ("A7", [U, use("a", last=(words(),)), got("a")], "`tool_result` blocks immediately after: a"),
    ("A8", [U, says(SEARCHED, words()), U], "without a corresponding `web_search_tool_result` block"),
    ("A8", [U, says(FOUND, words()), U], "unexpected `tool_use_id` found in `web_search_tool_result` blocks"),
    ("A9", [user([words("")])], "text content blocks must be non-empty"),
    ("A9", [user([words(" \n")])], "text content blocks must contain non-whitespace text"),
    ("A9", [user("")], "messages.0: all messages must have non-empty content"),
    (
        "A10",
        [user([words(**MARK)] * 5)],
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    ("A10", [user([words("", **MARK)])], "cache_control cannot be set for empty text blocks"),
    ("A11", [U, use("a", first=(thought("Ha"),)), got("a")], "in the latest assistant message cannot be"),
    ("A11", [U, says(thought("Ha"), words()), U, use("a"), got("a")], "Invalid `signature` in `thinking`"),
    ("A11", [U, use(T), got(T)], "in the latest assistant message cannot be modified"),
    ("A11", [U, use(T, first=(words(), thought())), got(T)], "Expected `thinking` or `redacted_thinking`"),
    ("A12", [U, use("a", first=(thought(),)), got("a")], "The block is bound to a different conversation"),
    ("A13", [U, says(words())], "The conversation must end with a user message."),
    ("A14", [U, says({**compaction_block("a"), "content": "b"}), U], "Invalid `signature` in `compaction`"),
    ("A15", [U, use("a", given="{}"), got("a")], "tool_use.input: Input should be a valid dictionary"),
]
BROKEN = [(dialect, *row) for dialect, rows in
          (("chat", CHAT), ("responses", RESPONSES), ("anthropic", ANTHROPIC)) for row in rows]  # fmt: skip
NEEDS = {"R5": {"store": False}, "A12": {"model": "claude-sonnet-5-5"}, "A13": {"model": "claude-sonnet-5"}}
"""What else is in the request, by rule."""

VALID: list[tuple[str, list[Message]]] = [
    ("chat", [U, calls("a", "b"), tool("b"), tool("a"), calls("c"), tool("c"), U]),
    ("responses", [U, fc("a"), {"role": "assistant", "content": "Well"}, fc("b"), out("b"), out("a")]),
    ("responses", [compaction_item("it"), U, rs(), fc("a", id=f"fc_r{'a' * 24}"), out("a")]),
    ("responses", [U, rs(), fc("a"), out("a")]),
    ("anthropic", [U, U, use("a", "b", first=(thought(), words())), got("b", "a", last=(words(),))]),
    ("anthropic", [U, says(SEARCHED, FOUND, compaction_block("a"), words()), user([words(**MARK)] * 4)]),
    ("anthropic", [U, use("a"), got("a"), says(words())]),
]
