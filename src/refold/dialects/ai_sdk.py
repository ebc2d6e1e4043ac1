"""Vercel AI SDK: one `ModelMessage`, of version 5 or newer, or a `CoreMessage` of version 4.

>>> parse({"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}).text
'Hello'
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.core.message import Media, Message, Opaque, Part, Reasoning, Role, Text, ToolCall, ToolResult
from refold.dialects.dialect import Dialect
from refold.dialects.rules.ai_sdk import AiSdkRules
from refold.dialects.rules.request import Facts
from refold.dialects.shape import (
    EMPTY,
    expect,
    expect_one_of,
    expressible,
    fitting_id,
    json_or,
    kind_of,
    lost_name,
    own_facts,
    parse_content,
    render_rest,
    text_field,
    with_results,
    with_summary_texts,
)

DIALECT = "ai-sdk"
ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
DENIED = "Tool call execution denied."
"""The SDK's result for a denial without a reason."""
OWN = ("metadata", "error", "expiry", "tags")
"""Fields that are for refold; an `id` is the SDK's own."""
DEFAULT_MIMES = {"image": "image/png", "audio": "audio/wav", "file": "application/octet-stream"}
FILES = ("file", "file-data", "file-url", "image", "image-data", "image-url", "media")


def parse(value: Any, where: str = "message") -> Message:
    """The message in `value`; parts of unknown types are kept as they are.

    So are the calls and results of tools that the provider executes: nobody else answers them.

    Raises:
        MessageError: the value is not a message; names the message and the field.
    """
    expect(value, dict, where)
    role = expect_one_of(value.get("role"), ROLES, f"{where}.role")
    content = value.get("content")
    if isinstance(content, str) and role == "tool":
        raise MessageError(f"{where}.content", "expected a list of parts, got str")
    own = own_facts(value, OWN)
    inside = set[str | None]()
    if role == "assistant" and isinstance(content, list):
        inside = {_id(part) for part in content if kind_of(part) == "tool-result"}
    parts = parse_content(content, f"{where}.content", partial(_part, role, inside))
    return Message(ROLES[role], tuple(parts), **own)


def render(message: Message) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages to send for a message of another dialect, and what they cannot express of it."""
    lost = lost_name(message)
    role = "user" if message.role == "tool" else message.role
    results: list[Any] = []
    said: list[Any] = []
    for part in expressible(message, lost) if role == "system" else with_summary_texts(message):
        if isinstance(part, ToolResult) or (isinstance(part, Opaque) and message.role == "tool"):
            results += render_part(part, "tool", lost)
        else:
            said += render_part(part, role, lost)
    answer = [{"role": "tool", "content": results}] if results else []
    if not said and (results or lost):
        return answer, lost
    texts = [part.text for part in message.parts if isinstance(part, Text)]
    is_text = role == "system" or len(said) == len(texts) <= 1
    whole = {"role": role, "content": "".join(texts) if is_text else said}
    return with_results(message, [whole], answer), lost


def render_part(part: Part, role: str, lost: list[str]) -> list[Any]:
    """The block of a part in a message of this role, or none if `lost` names it."""
    match part:
        case ToolResult():
            return [_render_result(part, lost)]
        case Text(text=text):
            return [{"type": "text", "text": text}]
        case Opaque(value=value) if role == "system":
            lost.append(f"a {kind_of(value) or 'part'} of the system")
            return []
        case Reasoning(text=text) if role == "assistant":
            return [{"type": "reasoning", "text": text}]
        case ToolCall(call_id=id, tool=tool, input=text):
            return [
                {
                    "type": "tool-call",
                    "toolCallId": tool_id(id),
                    "toolName": tool,
                    "input": json_or(text, text),
                }
            ]
        case Media(kind="image", url=url, data=data, mime=mime) if role == "user":
            return [{"type": "image", "image": url or data} | ({"mediaType": mime} if mime else {})]
        case Media(url=url, data=data, name=name):
            named = {"filename": name} if name else {}
            return [{"type": "file", "data": url or data, "mediaType": _mime(part)} | named]
    return render_rest(part, DIALECT, lost)


def tool_id(id: str) -> str:
    return fitting_id(id)


def _part(role: str, inside: set[str | None], value: Any, where: str) -> Part:
    expect(value, dict, where)
    match value:
        case {"type": "tool-call"} if role == "assistant":
            if value.get("providerExecuted") is True or _id(value) in inside:
                return Opaque(value, DIALECT)
            for field in ("toolCallId", "toolName"):
                expect(value.get(field), str, f"{where}.{field}")
            asked = value["input"] if "input" in value else value.get("args", {})
            return ToolCall(value["toolCallId"], value["toolName"], dumps(asked).decode())
        case {"type": "tool-result"} if role == "tool":
            return _result(value, where)
        case {"type": "tool-call" | "tool-result" as kind} if role != "assistant":
            only = "an assistant" if kind == "tool-call" else "an assistant or a tool"
            raise MessageError(f"{where}.type", f"only {only} has a {kind}")
        case {"type": "reasoning", "text": str(text)} if role == "assistant":
            return Reasoning(text)
        case _ if role == "tool":
            return Opaque(value, DIALECT)
    return _inner(value)


def _inner(value: dict[str, Any]) -> Text | Media | Opaque:
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": str(kind)} if kind in FILES:
            return _media(value) or Opaque(value, DIALECT)
    return Opaque(value, DIALECT)


def _media(value: dict[str, Any]) -> Media | None:
    """The file of a part as versions of the SDK write it; None for references and bytes."""
    source: Any = next((value[field] for field in ("data", "image", "url") if field in value), None)
    match source:
        case {"type": "data", "data": str(found)} | {"type": "url", "url": str(found)} | str(found):
            pass
        case _:
            return None
    mime = text_field(value, "mediaType", "mimeType")
    name = text_field(value, "filename")
    top = "image" if value["type"].startswith("image") else (mime or "").partition("/")[0]
    kind: Literal["image", "audio", "file"] = "file"
    if top == "image":
        kind = "image"
    elif top == "audio":
        kind = "audio"
    return Media(kind, found, None, mime, name) if ":" in found else Media(kind, None, found, mime, name)


def _result(value: dict[str, Any], where: str) -> ToolResult:
    for field, kind in (("toolCallId", str), ("toolName", str | None)):
        expect(value.get(field), kind, f"{where}.{field}")
    output = value["output"] if "output" in value else value.get("result", "")
    said, is_error = _output(output, f"{where}.output")
    error = is_error or value.get("isError") is True
    return ToolResult(value["toolCallId"], said, value.get("toolName"), error)


def _output(value: Any, where: str) -> tuple[str | tuple[Text | Media | Opaque, ...], bool]:
    """The output of a tool, and whether it is an error. Anything that is not the SDK's becomes JSON text."""
    match value:
        case str(text) | {"type": "text", "value": str(text)}:
            return text, False
        case {"type": "error-text", "value": str(text)}:
            return text, True
        case {"type": "json" | "error-json" as kind, "value": inner}:
            return dumps(inner).decode(), kind == "error-json"
        case {"type": "execution-denied"}:
            return str(value.get("reason") or DENIED), True
        case {"type": "content", "value": list(parts)}:
            for n, part in enumerate(parts):
                expect(part, dict, f"{where}.value[{n}]")
            return tuple(map(_inner, parts)), False
    return dumps(value).decode(), False


def _id(part: Any) -> str | None:
    id = part.get("toolCallId")
    return id if isinstance(id, str) else None


def _render_result(result: ToolResult, lost: list[str]) -> dict[str, Any]:
    said, error = result.output, "error-" if result.is_error else ""
    if not isinstance(said, str) and all(isinstance(part, Text) for part in said) and error:
        said = "".join(part.text for part in said if isinstance(part, Text))
    if isinstance(said, str):
        output: dict[str, Any] = {"type": f"{error}text", "value": said}
    else:
        lost += ["that a result is an error"] if error else []
        output = {"type": "content", "value": [one for part in said for one in _render_inner(part, lost)]}
    name = result.tool or "unknown"
    return {"type": "tool-result", "toolCallId": tool_id(result.call_id), "toolName": name, "output": output}


def _render_inner(part: Text | Media | Opaque, lost: list[str]) -> list[Any]:
    if not isinstance(part, Media):
        return render_part(part, "tool", lost)
    form = "image" if part.kind == "image" else "file"
    if part.inline is None:
        return [{"type": f"{form}-url", "url": part.url}]
    named = {"filename": part.name} if part.name and form == "file" else {}
    return [{"type": f"{form}-data", "data": part.inline[1], "mediaType": _mime(part)} | named]


def _mime(media: Media) -> str:
    mime = (media.inline or (media.mime,))[0] or media.mime
    if mime and "/" not in mime and media.kind != "file":
        return f"{media.kind}/{mime}"
    return mime or DEFAULT_MIMES[media.kind]


def repair(messages: Sequence[dict[str, Any]], notices: list[str], facts: Facts) -> list[dict[str, Any]]:
    return [_repaired(message, f"messages[{n}]", notices) for n, message in enumerate(messages)]


def _repaired(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_with_id_of(part, where, notices) for part in content]
    if message.get("role") == "assistant":
        parts = _run_by_the_provider(parts, where, notices)
    same = len(parts) == len(content) and all(new is old for new, old in zip(parts, content, strict=True))
    return message if same else {**message, "content": parts or EMPTY}


def _with_id_of(part: Any, where: str, notices: list[str]) -> Any:
    if kind_of(part) not in ("tool-call", "tool-result") or part.get("toolCallId") != "":
        return part
    notices.append(f"{where}: replaced an empty call id by {tool_id('')!r}")
    return {**part, "toolCallId": tool_id("")}


def _run_by_the_provider(parts: list[Any], where: str, notices: list[str]) -> list[Any]:
    """Mark a call that has its result in the same message as run by the provider."""
    calls = {_id_of(part, "tool-call") for part in parts}
    answered = {_id_of(part, "tool-result") for part in parts} - {None}
    kept: list[Any] = []
    for part in parts:
        call, result = _id_of(part, "tool-call"), _id_of(part, "tool-result")
        if result is not None and result not in calls:
            notices.append(f"{where}: removed a result without its call {result!r}")
            continue
        if call in answered and part.get("providerExecuted") is not True:
            notices.append(f"{where}: marked the call {call!r} as run by the provider")
            part = {**part, "providerExecuted": True}
        kept.append(part)
    return kept


def _id_of(part: Any, kind: str) -> str | None:
    id = part.get("toolCallId") if kind_of(part) == kind else None
    return id if isinstance(id, str) else None


def declare_tool(name: str, about: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": about, "inputSchema": schema}


AI_SDK = Dialect(
    DIALECT,
    parse,
    render,
    rules=AiSdkRules,
    blocks=("tool-call", "tool-result", "tool-approval-request", "tool-approval-response"),
    own_fields=lambda value: OWN,
    result_type="tool-result",
    repair=repair,
    declare_tool=declare_tool,
)
