"""OpenAI Chat Completions: one message of the `messages` list.

>>> parse({"role": "user", "content": "Hello"}).text
'Hello'
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.core.message import Media, Message, Opaque, Part, Role, StepStart, Text, ToolCall, ToolResult
from refold.dialects.dialect import Dialect
from refold.dialects.rules.openai_chat import ChatRules
from refold.dialects.rules.request import Facts
from refold.dialects.shape import (
    EMPTY,
    OWN,
    data_url,
    expect,
    expect_one_of,
    expressible,
    fitting_id,
    kind_of,
    name_of,
    own_facts,
    parse_content,
    render_rest,
    with_results,
)

DIALECT = "openai-chat"
READ = {
    "message": ("role", "content", "tool_calls", "tool_call_id", "name", "refusal", *OWN),
    "text": ("type", "text"),
    "call": ("id", "type", "function", "custom"),
    "function": ("name", "arguments"),
}
"""Fields that are in the parts of a message; others are sent as they came."""
LONG_ID = 64
"""Characters; a longer id is counted."""
MAX_CALLS = 128
MAX_CHARS = 10_485_760
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def parse(value: Any, where: str = "message") -> Message:
    """The message in `value`; parts of unknown types are kept as they are.

    Raises:
        MessageError: the value is not a message; names the message and the field.
    """
    if not isinstance(value, dict):
        raise MessageError(where, f"a message is an object, not {name_of(value)}")
    role = expect_one_of(value.get("role"), ROLES, f"{where}.role")
    name = value.get("name")
    expect(name, str | None, f"{where}.name")
    for field, only in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != only and value.get(field) is not None:
            raise MessageError(f"{where}.{field}", f"only a message of the role {only} has it")
    content = value.get("content")
    inner = [] if content is None else parse_content(content, f"{where}.content", _part)
    if isinstance(refusal := value.get("refusal"), str) and not inner:
        inner = [Text(refusal)]
    parts: list[Part] = [*inner]
    if role == "tool":
        id = value.get("tool_call_id")
        expect(id, str, f"{where}.tool_call_id")
        parts = [ToolResult(str(id), content if isinstance(content, str) else tuple(inner), name)]
    if role == "assistant":
        parts += _calls(value.get("tool_calls"), f"{where}.tool_calls")
    return Message(ROLES[role], tuple(parts), name=name, **own_facts(value))


def render(message: Message) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages to send for a message of another dialect, and what they cannot express of it."""
    lost: list[str] = []
    results = [_render_result(part, lost) for part in message.results]
    parts = [
        part for part in expressible(message, lost) if not isinstance(part, ToolCall | ToolResult | StepStart)
    ]
    calls = [_render_call(call) for call in message.calls]
    said: dict[str, Any] = {"role": "user" if message.role == "tool" else message.role}
    if all(isinstance(part, Text) for part in parts):
        text = "\n\n".join(part.text for part in parts if isinstance(part, Text))
        said["content"] = text if text or not calls else None
    else:
        content = [inner for part in parts for inner in _render_part(part, lost)]
        is_text = all(kind_of(inner) == "text" for inner in content)
        said["content"] = "\n\n".join(inner["text"] for inner in content) or None if is_text else content
    if message.name and message.role != "tool":
        said["name"] = message.name
    if calls:
        said["tool_calls"] = calls
    if not (said.get("content") or calls) and (results or lost):
        return results, lost
    return with_results(message, [said], results), lost


def unread(value: dict[str, Any]) -> list[Any]:
    """What is sent with a message and takes tokens, but is in no part of it."""
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


def _part(value: Any, where: str) -> Text | Media | Opaque:
    expect(value, dict, where)
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
            return Opaque(value, DIALECT)


def _calls(value: Any, where: str) -> Iterable[Part]:
    expect(value, list | None, where)
    for i, call in enumerate(value or ()):
        match call:
            case {"id": str(id), "function": {"name": str(name), "arguments": arguments}}:
                text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
                yield ToolCall(id, name, text)
            case {"id": str(id), "custom": {"name": str(name), "input": str(text)}}:
                yield ToolCall(id, name, text)
            case _:
                raise MessageError(f"{where}[{i}]", "a call has an id and a function with name and arguments")


def _render_part(part: Part, lost: list[str]) -> list[Any]:
    match part:
        case Text(text=text):
            return [{"type": "text", "text": text}]
        case Media(kind="image"):
            return [{"type": "image_url", "image_url": {"url": data_url(part, "image/png")}}]
        case Media(kind="audio", data=str(data), mime=mime):
            return [{"type": "input_audio", "input_audio": {"data": data, "format": _sound(mime)}}]
        case Media(kind="file", name=name) if part.inline:
            file = {"file_data": data_url(part, "application/pdf"), "filename": name or "file"}
            return [{"type": "file", "file": file}]
        case Media(kind=kind):
            lost.append(f"a {kind} that is only a URL")
            return []
    return render_rest(part, DIALECT, lost)


def _sound(mime: str | None) -> str:
    return "mp3" if mime in ("audio/mpeg", "audio/mp3", "mp3") else "wav"


def _render_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.tool, "arguments": call.input}
    return {"id": tool_id(call.call_id), "type": "function", "function": function}


def _render_result(result: ToolResult, lost: list[str]) -> dict[str, Any]:
    """A tool message with the text of the result: the API accepts nothing else from a tool."""
    lost += ["that a result is an error"] if result.is_error else []
    texts: list[str] = []
    for part in (Text(result.output),) if isinstance(result.output, str) else result.output:
        match part:
            case Text(text=text):
                texts.append(text)
            case Media(kind=kind):
                lost.append(f"{kind} data in a result")
                texts.append(f"[{kind}]")
            case Opaque(value=value):
                lost.append(f"a {kind_of(value) or 'part'} in a result")
    return {"role": "tool", "tool_call_id": tool_id(result.call_id), "content": "\n".join(texts)}


def tool_id(id: str) -> str:
    return fitting_id(id, 40)


def repair(messages: Sequence[dict[str, Any]], notices: list[str], facts: Facts) -> list[dict[str, Any]]:
    repaired = [_repaired(message, f"messages[{n}]", notices) for n, message in enumerate(messages)]
    return _in_batches(repaired, notices)


def _repaired(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    new = dict(message)
    if "tool_calls" in message:
        new["tool_calls"] = _repaired_calls(message["tool_calls"] or (), where, notices)
        if not new["tool_calls"]:
            del new["tool_calls"]
            notices.append(f"{where}: removed an empty `tool_calls`")
    if isinstance(message.get("tool_call_id"), str):
        new["tool_call_id"] = tool_id(message["tool_call_id"])
    content = message.get("content")
    says = any(new.get(field) for field in ("tool_calls", "function_call", "audio", "refusal"))
    if not says and content in (None, []):
        new["content"] = EMPTY
        notices.append(f"{where}: an empty message is sent as {EMPTY}")
    if isinstance(content, str) and len(content) > MAX_CHARS:
        new["content"] = _shortened(content)
        notices.append(f"{where}: removed the middle of a text of more than {MAX_CHARS:,} characters")
    return message if new == message else new


def _repaired_calls(calls: Sequence[dict[str, Any]], where: str, notices: list[str]) -> list[dict[str, Any]]:
    new: list[dict[str, Any]] = []
    for call in calls:
        id, function = call.get("id"), call.get("function")
        if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
            call = {
                **call,
                "function": {**function, "arguments": dumps(function.get("arguments") or {}).decode()},
            }
            notices.append(f"{where}: wrote the arguments of {id!r} as a string")
        if isinstance(id, str) and tool_id(id) != id:
            call = {**call, "id": tool_id(id)}
            notices.append(f"{where}: replaced a call id of {len(id)} characters by {call['id']!r}")
        new.append(call)
    return new


def _shortened(text: str) -> str:
    half = MAX_CHARS // 2 - 100
    return f"{text[:half]}\n[refold: {len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


def _in_batches(messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Split a message with more calls than the API accepts, each part followed by its results."""
    result: list[dict[str, Any]] = []
    n = 0
    while n < len(messages):
        message, calls = messages[n], messages[n].get("tool_calls") or ()
        n += 1
        if len(calls) <= MAX_CALLS:
            result.append(message)
            continue
        notices.append(f"messages[{n - 1}]: split {len(calls)} calls into messages of at most {MAX_CALLS}")
        answers = list(takewhile(lambda other: other.get("role") == "tool", messages[n:]))
        n += len(answers)
        for start in range(0, len(calls), MAX_CALLS):
            batch = calls[start : start + MAX_CALLS]
            ids = {call.get("id") for call in batch}
            result.append({**({"role": "assistant"} if start else message), "tool_calls": batch})
            result += [answer for answer in answers if answer.get("tool_call_id") in ids]
    return result


def declare_tool(name: str, about: str, schema: Any) -> dict[str, Any]:
    function = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


OPENAI_CHAT = Dialect(
    DIALECT,
    parse,
    render,
    rules=ChatRules,
    blocks=("image_url", "input_audio", "refusal"),
    unread=unread,
    repair=repair,
    declare_tool=declare_tool,
)
