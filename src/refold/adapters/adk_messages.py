"""How ADK says things."""

import json
from base64 import b64decode, b64encode
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from google.adk.events.event import Event
from google.genai import types
from msgspec.structs import replace
from pydantic import BaseModel

from refold.core.message import (
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    Usage,
)

DIALECT = "adk"


class Told(NamedTuple):
    """A content for a model, and the event that it tells of."""

    content: types.Content
    event: Event | None = None
    whose: Sequence[str] = ()
    is_changed: bool = False
    """Somebody made it say something else than the event."""


def functions(content: types.Content | None) -> Iterator[types.FunctionCall | types.FunctionResponse]:
    for part in (content and content.parts) or ():
        one = part.function_call or part.function_response
        if one:
            yield one


class Words:
    """How ADK says things."""

    def mark(self, told: Told) -> Hashable:
        id = told.event.id if told.event else None
        return (id, told.content.model_dump_json()) if told.is_changed else id

    def read(self, told: Told) -> Message:
        content, event = told.content, told.event
        assert event is not None
        parts = [_read(part, id) for part, id in _named(told)]
        role: Role = "user" if event.author == "user" else "assistant"
        results = [part for part in parts if isinstance(part, ToolResult)]
        if results and (role == "assistant" or len(results) == len(parts)):
            role, parts = "tool", [*results[:-1], _joined(results[-1], parts)]
        usage = _usage(event.usage_metadata) if content.role == "model" and event.usage_metadata else None
        return Message(role, tuple(parts), event.id, {DIALECT: list(told.whose)}, usage=usage)

    def write(self, message: Message, original: Told | None) -> Told:
        if original is None:
            role = "model" if message.role == "assistant" else "user"
            return Told(types.Content(role=role, parts=list(map(_written, message.parts))))
        known = list(_named(original))
        parts = [_rewritten(part, known) for part in message.parts]
        return Told(original.content.model_copy(update={"parts": parts}), original.event)


def _named(told: Told) -> Iterator[tuple[types.Part, str]]:
    """Parts that say something, calls and results with the ids that they have in the event."""
    own = list(functions(told.event.content)) if told.event else []
    for part in told.content.parts or ():
        one = part.function_call or part.function_response
        if one:
            known = next((other for other in own if _is_one(one, other)), one)
            own = [other for other in own if other is not known]
            yield part, known.id or known.name or ""
        elif any(vars(part).values()):
            yield part, ""


def _is_one(one: Any, other: Any) -> bool:
    """The same call, or a result of the same tool."""
    is_it = type(one) is type(other) and one.name == other.name
    return is_it and getattr(one, "args", None) == getattr(other, "args", None)


def _read(part: types.Part, id: str) -> Part:
    if call := part.function_call:
        return ToolCall(id, call.name or "", _json(call.args or {}))
    if result := part.function_response:
        media = tuple(filter(None, map(_media, result.parts or ())))
        failed, text = bool((result.response or {}).get("error")), _output(result)
        return ToolResult(id, (Text(text), *media) if media else text, result.name, is_error=failed)
    if part.text:
        return Reasoning(part.text) if part.thought else Text(part.text)
    return _media(part) or Opaque(part.model_dump(mode="json", exclude_none=True), DIALECT)


def _output(result: types.FunctionResponse) -> str:
    response = result.response or {}
    match list(response.items()):
        case [("result" | "output" | "error", str(text))]:
            return text
    return _json(response)


def _media(part: Any) -> Media | None:
    """Of a content, or of a result."""
    blob, file = part.inline_data, part.file_data
    if not (blob or file):
        return None
    mime, name = (blob or file).mime_type, (blob or file).display_name
    kind: Literal["image", "audio", "file"] = "file"
    match (mime or "").partition("/")[0]:
        case "image" | "audio" as family:
            kind = family
    data = b64encode(blob.data or b"").decode() if blob else None
    return Media(kind, None if blob else file.file_uri, data, mime, name)


def _joined(result: ToolResult, parts: Iterable[Part]) -> ToolResult:
    """With what is shown beside the results of tools, such as an image that one of them made."""
    beside = tuple(part for part in parts if isinstance(part, Text | Media | Opaque))
    output = (Text(result.output),) if isinstance(result.output, str) else result.output
    return replace(result, output=(*output, *beside)) if beside else result


def _rewritten(part: Part, known: Sequence[tuple[types.Part, str]]) -> types.Part:
    """Like the part that it was, with all that ADK has beside it."""
    if isinstance(part, ToolCall | ToolResult):
        name = "function_call" if isinstance(part, ToolCall) else "function_response"
        own = next((one for one, id in known if id == part.call_id and getattr(one, name)), None)
        if own is None or (len(known) > 1 and _read(own, part.call_id) == part):
            return own or _written(part)
        return own.model_copy(update={name: getattr(own, name).model_copy(update=_fields(part))})
    return next((one for one, id in known if not id and _read(one, id) == part), None) or _written(part)


def _written(part: Part) -> types.Part:
    match part:
        case Text(text=text):
            return types.Part(text=text)
        case Reasoning(text=text):
            return types.Part(text=text, thought=True)
        case ToolCall(call_id=id, tool=tool):
            return types.Part(function_call=types.FunctionCall(id=id, name=tool, **_fields(part)))
        case ToolResult(call_id=id, tool=tool):
            result = types.FunctionResponse(id=id, name=tool or "unnamed", **_fields(part))
            return types.Part(function_response=result)
        case Media(data=None, url=url, mime=mime, name=name):
            return types.Part(file_data=types.FileData(file_uri=url, mime_type=mime, display_name=name))
        case Media(data=str(data), mime=mime, name=name):
            return types.Part(inline_data=types.Blob(data=b64decode(data), mime_type=mime, display_name=name))
        case Opaque(value=value, dialect="adk"):
            return types.Part.model_validate_json(_json(value))
    return types.Part(text="")


def _fields(part: ToolCall | ToolResult) -> dict[str, Any]:
    """What a call asks, or a result answers."""
    if isinstance(part, ToolCall):
        value = json.loads(part.input or "{}")
        return {"args": value if isinstance(value, dict) else {}}
    said = (Text(part.output),) if isinstance(part.output, str) else part.output
    text = "".join(one.text for one in said if isinstance(one, Text))
    media = [_written(one).model_dump(exclude_none=True) for one in said if isinstance(one, Media)]
    beside = list(map(types.FunctionResponsePart.model_validate, media))
    return {"response": {"error" if part.is_error else "result": text}, "parts": beside or None}


def _usage(given: types.GenerateContentResponseUsageMetadata) -> Usage:
    output = (given.candidates_token_count or 0) + (given.thoughts_token_count or 0)
    return Usage(given.prompt_token_count or 0, output, given.cached_content_token_count or 0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Tools may return anything."""
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else str(value)
