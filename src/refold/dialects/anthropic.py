"""Anthropic Messages: one message of the `messages` list, or the system text that stands apart.

>>> parse({"role": "user", "content": "Hello"}).text
'Hello'
"""

from collections.abc import Sequence
from typing import Any

from refold.core.codec import dumps, read_json
from refold.core.errors import MessageError
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from refold.dialects.shape import (
    OWN,
    expect,
    expect_parts,
    id_within,
    kind_of,
    named,
    own_facts,
    rest_of,
    sayable,
)

DIALECT = "anthropic"
ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
THINKING = ("thinking", "redacted_thinking")


def parse(value: Any, where: str = "message") -> Message:
    """The message in `value`, or the system text in `{"system": …}`; unknown blocks stay as they are.

    Raises:
        MessageError: it is no message; says which field of which message.
    """
    expect(value, dict, where)
    if "system" in value and "role" not in value:
        parts = _content(value["system"], f"{where}.system", "system")
        return Message("system", tuple(parts), **own_facts(value))
    role = named(value.get("role"), ROLES, f"{where}.role")
    if "content" not in value:
        raise MessageError(f"{where}.content", "a message has content: a text or a list of blocks")
    parts = _content(value["content"], f"{where}.content", role)
    only_results = parts and all(isinstance(part, ToolResult) for part in parts)
    return Message("tool" if only_results else ROLES[role], tuple(parts), **own_facts(value))


def render(message: Message) -> tuple[list[dict[str, Any]], list[str]]:
    """What to send for a message that did not come in this dialect, and what could not be said in it."""
    lost = ["the author's name"] if message.name and message.role != "tool" else []
    said: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in sayable(message, lost):
        match part:
            case ToolCall():
                calls.append(_render_call(part))
            case ToolResult():
                results.append(_render_result(part, lost))
            case _:
                said += _render_part(part, lost)
    rendered: list[dict[str, Any]] = []
    if results:
        rendered.append({"role": "user", "content": results})
    if said or calls or not (results or lost):
        plain = not calls and len(said) == 1 and kind_of(said[0]) == "text"
        content = said[0]["text"] if plain else [*said, *calls]
        role = "user" if message.role == "tool" else message.role
        whole = {"role": role, "content": content}
        rendered = [whole, *rendered] if message.role == "assistant" else [*rendered, whole]
    return rendered, lost


def unread(value: dict[str, Any]) -> list[Any]:
    """Nothing: what parts do not hold (signatures, cache marks, citations) takes no tokens."""
    return []


def own(value: dict[str, Any]) -> Sequence[str]:
    """The fields that are for refold: messages of this API have none of them."""
    return OWN


def results(value: dict[str, Any]) -> list[int]:
    """Which blocks of its content are tool results."""
    content = value.get("content")
    blocks = content if isinstance(content, list) else []
    return [n for n, block in enumerate(blocks) if kind_of(block) == "tool_result"]


def _content(value: Any, where: str, role: str) -> list[Part]:
    if isinstance(value, str):
        return [Text(value)]
    expect_parts(value, where)
    return [_block(block, f"{where}[{n}]", role) for n, block in enumerate(value)]


def _block(value: Any, where: str, role: str) -> Part:
    expect(value, dict, where)
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "thinking", "thinking": str(text)}:
            return Reasoning(text)
        case {"type": "tool_use"}:
            if role != "assistant":
                raise MessageError(where, "only an assistant uses tools")
            for field in ("id", "name"):
                expect(value.get(field), str, f"{where}.{field}")
            return ToolCall(value["id"], value["name"], dumps(value.get("input", {})).decode())
        case {"type": "tool_result"}:
            if role != "user":
                raise MessageError(where, "tool results stand in messages of the user")
            return _result(value, where)
        case {"type": "compaction"}:
            return CompactionMarker(value)
        case _:
            return _media(value) or Opaque(value, DIALECT)


def _result(value: dict[str, Any], where: str) -> ToolResult:
    id, content = value.get("tool_use_id"), value.get("content")
    expect(id, str, f"{where}.tool_use_id")
    error = value.get("is_error") is True
    if content is None or isinstance(content, str):
        return ToolResult(str(id), content or "", is_error=error)
    expect(content, list, f"{where}.content")
    blocks = [_inner(block, f"{where}.content[{n}]") for n, block in enumerate(content)]
    return ToolResult(str(id), tuple(blocks), is_error=error)


def _inner(value: Any, where: str) -> Text | Media | Opaque:
    expect(value, dict, where)
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case _:
            return _media(value) or Opaque(value, DIALECT)


def _media(value: dict[str, Any]) -> Media | None:
    match value:
        case {"type": "image", "source": {"type": "base64", "data": str(data), "media_type": str(mime)}}:
            return Media("image", data=data, mime=mime)
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return Media("image", url=url)
        case {"type": "document", "source": {"type": "base64", "data": str(data), "media_type": str(mime)}}:
            return Media("file", data=data, mime=mime, name=_title(value))
        case {"type": "document", "source": {"type": "url", "url": str(url)}}:
            return Media("file", url=url, name=_title(value))
    return None


def _title(value: dict[str, Any]) -> str | None:
    title = value.get("title")
    return title if isinstance(title, str) else None


def _render_part(part: Part, lost: list[str]) -> list[dict[str, Any]]:
    match part:
        case Text(text=text):
            return [{"type": "text", "text": text}]
        case Media():
            block = _render_media(part)
            if block is None:
                lost.append(f"a {part.kind} that is no image and no PDF")
            return [block] if block else []
    return rest_of(part, DIALECT, lost)


def _render_media(media: Media) -> dict[str, Any] | None:
    mime, data = media.inline or ("", "")
    kind = "image" if media.kind == "image" or mime.startswith("image/") else "document"
    if media.kind == "audio" or (kind == "document" and data and mime not in ("application/pdf", "")):
        return None
    title = {"title": media.name} if media.name and kind == "document" else {}
    if data:
        mime = mime or ("image/png" if kind == "image" else "application/pdf")
        return {"type": kind, "source": {"type": "base64", "media_type": mime, "data": data}} | title
    return {"type": kind, "source": {"type": "url", "url": media.url}} | title


def _render_call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": tool_id(call.call_id),
        "name": call.tool,
        "input": as_object(call.input),
    }


def _render_result(result: ToolResult, lost: list[str]) -> dict[str, Any]:
    output = result.output
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": tool_id(result.call_id)}
    if isinstance(output, str):
        block["content"] = output
    else:
        block["content"] = [inner for part in output for inner in _render_part(part, lost)]
    return block | ({"is_error": True} if result.is_error else {})


def as_object(text: str) -> dict[str, Any]:
    """A call's input, which must be an object here whatever the model wrote."""
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"input": value}


def tool_id(id: str) -> str:
    """The same id in letters that are allowed here."""
    return id_within(id, 64, "-_")


def system_of(contents: Sequence[Any]) -> Any:
    """System text to send apart, from the content of one or several messages."""
    if len(contents) <= 1:
        return contents[0] if contents else None
    return [block for content in contents for block in as_blocks(content)]


def as_blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def as_user(message: dict[str, Any]) -> dict[str, Any]:
    """System text in the midst of a conversation, as something that the user may say."""
    blocks = as_blocks(message.get("content") or [])
    return {"role": "user", "content": [{"type": "text", "text": "[system]"}, *blocks]}
