"""OpenAI Chat Completions: one message of the `messages` list.

>>> parse({"role": "user", "content": "Hello"}).text
'Hello'
"""

from collections.abc import Iterable
from typing import Any

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.core.message import Media, Message, Opaque, Part, Role, Text, ToolCall, ToolResult

DIALECT = "openai-chat"
READ = {
    "message": ("role", "content", "tool_calls", "tool_call_id", "name"),
    "text": ("type", "text"),
    "call": ("id", "type", "function", "custom"),
    "function": ("name", "arguments"),
}
"""Fields that become parts; others are sent along as they came."""
LONG_ID = 64
"""Characters of an id that cost next to nothing."""
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def parse(value: Any, where: str = "message") -> Message:
    """The message in `value`; parts that we do not know are kept as they are.

    Raises:
        MessageError: it is no message; says which field of which message.
    """
    if not isinstance(value, dict):
        raise MessageError(where, f"a message is an object, not {_name(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MessageError(f"{where}.role", f"{role!r} is not one of {', '.join(ROLES)}")
    name = value.get("name")
    _expect(name, str | None, f"{where}.name")
    for field, only in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != only and value.get(field) is not None:
            raise MessageError(f"{where}.{field}", f"only a message of the role {only} has it")
    parts = _content(value.get("content"), f"{where}.content")
    if role == "tool":
        id = value.get("tool_call_id")
        _expect(id, str, f"{where}.tool_call_id")
        plain = value.get("content")
        output = plain if isinstance(plain, str) else tuple(parts)
        parts = [ToolResult(str(id), output, name)]  # type: ignore[arg-type]
    if role == "assistant":
        parts += _calls(value.get("tool_calls"), f"{where}.tool_calls")
    return Message(ROLES[role], tuple(parts), name=name)


def render(message: Message) -> list[dict[str, Any]]:
    """What to send for a message that did not come in this dialect; a tool message for each result."""
    results = [_render_result(part) for part in message.parts if isinstance(part, ToolResult)]
    if message.role == "tool":
        return results
    said: dict[str, Any] = {"role": message.role}
    parts = [part for part in message.parts if isinstance(part, Text | Media | Opaque)]
    calls = [_render_call(call) for call in message.calls]
    if all(isinstance(part, Text) for part in parts):
        text = "".join(part.text for part in parts if isinstance(part, Text))
        said["content"] = text if text or not calls else None
    else:
        said["content"] = list(map(_render_part, parts))
    if message.name:
        said["name"] = message.name
    if calls:
        said["tool_calls"] = calls
    return [said, *results]


def unread(value: dict[str, Any]) -> list[Any]:
    """What is sent with a message beside what `parse` reads of it; it takes tokens as well."""
    content, calls = value.get("content"), value.get("tool_calls") or ()
    parts = content if isinstance(content, list) else []
    rest = [_but(value, "message")]
    rest += [_but(part, "text") for part in parts if part.get("type") == "text"]
    rest += [_but(call, "call") for call in calls]
    rest += [_but(call["function"], "function") for call in calls if "function" in call]
    ids = (value.get("tool_call_id") or "", *(call["id"] for call in calls))
    return [one for one in rest if one] + [id for id in ids if len(id) > LONG_ID]


def _but(value: dict[str, Any], read: str) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner and key not in READ[read]}


def _content(value: Any, where: str) -> list[Part]:
    if value is None:
        return []
    if isinstance(value, str):
        return [Text(value)]
    _expect(value, list, where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]


def _part(value: Any, where: str) -> Part:
    _expect(value, dict, where)
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return Media("image", url=url)
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(mime)}}:
            return Media("audio", data=data, mime=mime)
        case {"type": "file", "file": {"file_data": str(data), "filename": str(name)}}:
            return Media("file", data=data, name=name)
        case _:
            return Opaque(value)


def _calls(value: Any, where: str) -> Iterable[Part]:
    _expect(value, list | None, where)
    for i, call in enumerate(value or ()):
        match call:
            case {"id": str(id), "function": {"name": str(name), "arguments": arguments}}:
                text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
                yield ToolCall(id, name, text)
            case {"id": str(id), "custom": {"name": str(name), "input": str(text)}}:
                yield ToolCall(id, name, text)
            case _:
                raise MessageError(f"{where}[{i}]", "a call has an id and a function with name and arguments")


def _render_part(part: Text | Media | Opaque) -> Any:
    match part:
        case Text(text=text):
            return {"type": "text", "text": text}
        case Media(kind="image", url=url, data=data, mime=mime):
            source = url or f"data:{mime or 'image/png'};base64,{data}"
            return {"type": "image_url", "image_url": {"url": source}}
        case Media(kind="audio", data=data, mime=mime):
            return {"type": "input_audio", "input_audio": {"data": data, "format": mime or "wav"}}
        case Media(data=data, name=name):
            return {"type": "file", "file": {"file_data": data, "filename": name}}
        case Opaque(value=value):
            return value


def _render_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.tool, "arguments": call.input}}


def _render_result(result: ToolResult) -> dict[str, Any]:
    output = result.output
    content = output if isinstance(output, str) else list(map(_render_part, output))
    return {"role": "tool", "tool_call_id": result.call_id, "content": content}


def _expect(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind):
        raise MessageError(where, f"expected {getattr(kind, '__name__', kind)}, got {_name(value)}")


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
