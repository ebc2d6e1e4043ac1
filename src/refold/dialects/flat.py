"""Older flat records: a row for each message, with `content` as text or as the JSON text of its parts.

>>> parse({"role": "assistant", "content": '[{"type": "text", "text": "Hello"}]'}).text
'Hello'

JSON text is parsed only where it can hardly be anything else: a JSON string, an object with nothing but
`text`, or a list of typed parts as the AI SDK (model or UI messages), Anthropic or OpenAI have them. The
output of a tool is parsed only if it is a list of results. Any other JSON stays text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Role,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.dialects import ai_sdk, anthropic, openai_chat, openai_responses
from refold.dialects.dialect import Dialect
from refold.dialects.shape import expect, expect_one_of, json_or, kind_of, own_facts, text_field

DIALECT = "flat"
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}
SAYS = {"tool-call": "assistant", "tool_use": "assistant", "reasoning": "assistant", "tool-result": "tool"}
"""The role of a part that its dialect accepts from no other role."""
INPUT_FIELDS = ("input", "args", "arguments", "rawInput")


def parse(value: Any, where: str = "message") -> Message:
    """The message in a record. Unknown content stays text, and unknown parts are kept as they are.

    Raises:
        MessageError: the value is not a record, or has no known role.
    """
    expect(value, dict, where)
    role = ROLES[expect_one_of(value.get("role"), ROLES, f"{where}.role")]
    name = text_field(value, "name")
    call, tool = text_field(value, "tool_call_id", "toolCallId"), text_field(value, "tool_name", "toolName")
    is_ui = isinstance(value.get("parts"), list)
    content = value["parts"] if is_ui else value.get("content")
    is_result = role == "tool" and call is not None
    parts = _results(content, call or "", tool or name) if is_result else _parts(content)
    if role == "assistant":
        separate = [[_call(one)] for one in _list(_first(value, "tool_calls", "toolCalls"))]
        separate += [] if is_ui else [_invocation(one, one) for one in _list(value.get("toolInvocations"))]
        known = {part.call_id for part in parts if isinstance(part, ToolCall)}
        parts += [part for group in separate if _id(group[0]) not in known for part in group]
    is_answer = bool(parts) and all(isinstance(part, ToolResult) for part in parts)
    return Message(
        "tool" if is_answer else role,
        tuple(parts),
        name=name if role != "tool" else None,
        model=text_field(value, "model", "model_id", "modelId"),
        finish=text_field(value, "finish_reason", "finishReason"),
        summary=_first(value, "is_summary", "isSummary") is True,
        **own_facts(value),
    )


def steps(message: Message) -> list[Message]:
    """The steps of a turn that is stored in one record; only the first keeps the id."""
    groups: list[list[Part]] = [[]]
    for part in message.parts:
        has_results = any(isinstance(before, ToolResult) for before in groups[-1])
        if groups[-1] and (
            isinstance(part, StepStart) or (has_results and isinstance(part, Text | Reasoning))
        ):
            groups.append([])
        groups[-1].append(part)
    ids = [message.id, *[None] * len(groups)]
    return [
        msgspec.structs.replace(message, parts=tuple(parts), id=id)
        for parts, id in zip(groups, ids, strict=False)
    ]


def _parts(content: Any) -> list[Part]:
    is_text = isinstance(content, str)
    match _read(content) if is_text else content:
        case None:
            return [Text(content)] if is_text else []
        case str(text):
            return [Text(text)]
        case {"text": str(text), **rest} if not rest:
            return [Text(text)]
        case {"content": list(inner)} | {"parts": list(inner)} if not is_text:
            return _parts(inner)
        case {"type": str()} if not is_text:
            return _parts([content])
        case [*values] if all(map(kind_of, values)):
            theirs = [value.get("toolCallId") for value in values if value.get("providerExecuted") is True]
            found = [part for value in values for part in _part(value, theirs)]
            if not is_text or not all(isinstance(part, Opaque) for part in found):
                return found
    return [Text(_written(content))]


def _results(content: Any, call: str, tool: str | None) -> list[Part]:
    """The output of a tool: one result, or a list of them."""
    values = _read(content) if isinstance(content, str) else content
    if not isinstance(values, list) or not all(map(kind_of, values)):
        return [ToolResult(call, _written(content), tool)]
    found = [part for value in values for part in _part(value)]
    if found and all(isinstance(part, ToolResult) for part in found):
        return found
    inner = tuple(part for part in found if isinstance(part, Text | Media | Opaque))
    is_open = not isinstance(content, str) and len(inner) == len(found)
    return [ToolResult(call, inner if is_open else _written(content), tool)]


def _part(value: dict[str, Any], theirs: Sequence[Any] = ()) -> list[Part]:
    """The parts of a value of any dialect; `theirs` are calls that the provider executes."""
    kind = kind_of(value) or ""
    match value:
        case {"toolCallId": str(id)} if id in theirs:
            return [Opaque(value, ai_sdk.DIALECT if kind in ("tool-call", "tool-result") else DIALECT)]
        case {"type": "step-start"}:
            return [StepStart()]
        case {"type": "compaction-marker"}:
            return [CompactionMarker(value)]
        case {"type": "reasoning", "reasoning": str(text)}:
            return [Reasoning(text)]
        case {"type": "file", "url": str(url), **rest}:
            return _part({**rest, "type": "file", "data": url})
        case {"type": "tool-invocation", "toolInvocation": inner}:
            return _invocation(inner, value)
        case {"toolCallId": str(), "state": str()}:
            return _invocation({"toolName": kind.removeprefix("tool-"), **value}, value)
    for format in (ai_sdk, anthropic, openai_chat, openai_responses):
        try:
            (part,) = format.parse({"role": SAYS.get(kind, "user"), "content": [value]}).parts
        except MessageError:
            continue
        if not isinstance(part, Opaque):
            return [part]
    return [Opaque(value, DIALECT)]


def _invocation(call: Any, value: Any) -> list[Part]:
    """A call of a UI message, with its result if it has one."""
    found = _call(call)
    if not isinstance(found, ToolCall) or call.get("state") in ("partial-call", "input-streaming"):
        return [Opaque(value, DIALECT)]
    id, tool = found.call_id, found.tool
    match call:
        case {"state": "output-error"}:
            return [found, ToolResult(id, _written(call.get("errorText")), tool, True)]
        case {"state": "output-denied"}:
            return [found, ToolResult(id, ai_sdk.DENIED, tool, True)]
        case {"state": "result" | "output-available"}:
            return [found, ToolResult(id, _written(_first(call, "output", "result")), tool)]
    return [found]


def _call(value: Any) -> Part:
    """A call of a row: as OpenAI or the AI SDK have it, or with its fields side by side."""
    match value:
        case {"id": str(id), "function": {"name": str(name)} as function}:
            return ToolCall(id, name, _written(function.get("arguments")))
        case {"id": str(id), "name": str(name), "arguments": str(text)}:
            return ToolCall(id, name, text)
        case {"toolCallId": str(id), "toolName": str(name)} | {"id": str(id), "name": str(name)}:
            input = _first(value, *INPUT_FIELDS)
            return ToolCall(id, name, dumps({} if input is None else input).decode())
    return Opaque(value, DIALECT)


def _id(part: Part) -> str | None:
    return part.call_id if isinstance(part, ToolCall) else None


def _read(text: str) -> Any:
    """The JSON in a text; None if it has none."""
    return json_or(text, None) if text.lstrip().startswith(("[", "{", '"')) else None


def _written(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value).decode()


def _list(value: Any) -> list[Any]:
    found = _read(value) if isinstance(value, str) else value
    return found if isinstance(found, list) else [] if found is None else [found]


def _first(value: Mapping[str, Any], *fields: str) -> Any:
    return next((value[field] for field in fields if value.get(field) is not None), None)


FLAT = Dialect(
    DIALECT,
    parse,
    openai_chat.render,
    blocks=("compaction-marker",),
    declare_tool=openai_chat.declare_tool,
)
"""Read, but never sent: what it renders are messages of OpenAI's chat."""
