"""Converts between the contents of Google's Agent Development Kit and our messages."""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


class EventContent(NamedTuple):
    """A content for a model, and the event that it was made from."""

    content: types.Content
    event: Event | None = None
    owner: Sequence[str] = ()


def functions(content: types.Content | None) -> Iterator[types.FunctionCall | types.FunctionResponse]:
    for part in (content and content.parts) or ():
        function = part.function_call or part.function_response
        if function:
            yield function


class AdkConverter:
    def parse(self, given: EventContent) -> Message:
        event = given.event
        parts = [_part(part, id) for part, id in _parts_with_ids(given)]
        if event is None:  # it is in one request only
            return Message("user", tuple(parts))
        role: Role = "user" if event.author == "user" else "assistant"
        results = [part for part in parts if isinstance(part, ToolResult)]
        if results and (role == "assistant" or len(results) == len(parts)):
            # Other parts, such as an image that a tool made, belong to the last result.
            role = "tool"
            last = results[-1]
            others = tuple(part for part in parts if isinstance(part, Text | Media | Opaque))
            if others:
                output = (Text(last.output),) if isinstance(last.output, str) else last.output
                results[-1] = replace(last, output=(*output, *others))
            parts = [*results]
        usage = _usage(event.usage_metadata) if given.content.role == "model" else None
        return Message(role, tuple(parts), event.id, {DIALECT: list(given.owner)}, usage=usage)

    def render(self, message: Message, original: EventContent | None) -> EventContent:
        if original is None:
            role = "model" if message.role == "assistant" else "user"
            return EventContent(types.Content(role=role, parts=[*map(_rendered, message.parts)]))
        known = list(_parts_with_ids(original))
        parts = [_rendered_like(part, known) for part in message.parts]
        return EventContent(original.content.model_copy(update={"parts": parts}), original.event)


def _parts_with_ids(given: EventContent) -> Iterator[tuple[types.Part, str]]:
    """Parts with content; calls and results with the ids that they have in the event."""
    own = list(functions(given.event.content)) if given.event else []
    for part in given.content.parts or ():
        function = part.function_call or part.function_response
        if function:
            known = next((other for other in own if _is_same_function(function, other)), function)
            own = [other for other in own if other is not known]
            yield part, known.id or known.name or ""
        elif any(vars(part).values()):
            yield part, ""


def _is_same_function(one: Any, other: Any) -> bool:
    """The same call, or a result of the same tool."""
    if type(one) is not type(other) or one.name != other.name:
        return False
    return bool(getattr(one, "args", None) == getattr(other, "args", None))


def _part(part: types.Part, id: str) -> Part:
    if call := part.function_call:
        return ToolCall(id, call.name or "", _json(call.args or {}))
    if result := part.function_response:
        response = result.response or {}
        match [*response.items()]:
            case [("result" | "output" | "error", str(text))]:
                pass
            case _:
                text = _json(response)
        media = tuple(filter(None, map(_media, result.parts or ())))
        is_error = bool(response.get("error"))
        return ToolResult(id, (Text(text), *media) if media else text, result.name, is_error=is_error)
    if part.text:
        return Reasoning(part.text) if part.thought else Text(part.text)
    return _media(part) or Opaque(part.model_dump(mode="json", exclude_none=True), DIALECT)


def _media(part: Any) -> Media | None:
    file = part.inline_data or part.file_data
    if not file:
        return None
    kind: Any = (file.mime_type or "").partition("/")[0]
    if kind not in ("image", "audio"):
        kind = "file"
    if part.inline_data:
        data = b64encode(file.data or b"").decode()
        return Media(kind, None, data, file.mime_type, file.display_name)
    return Media(kind, file.file_uri, None, file.mime_type, file.display_name)


def _rendered_like(part: Part, known: Sequence[tuple[types.Part, str]]) -> types.Part:
    """The original part with the new content, so that all else that ADK has in it stays."""
    if not isinstance(part, ToolCall | ToolResult):
        same = next((one for one, id in known if not id and _part(one, id) == part), None)
        return same or _rendered(part)
    name = "function_call" if isinstance(part, ToolCall) else "function_response"
    own = next((one for one, id in known if id == part.call_id and getattr(one, name)), None)
    if own is None:
        return _rendered(part)
    if len(known) > 1 and _part(own, part.call_id) == part:
        return own
    return own.model_copy(update={name: getattr(own, name).model_copy(update=_function_fields(part))})


def _rendered(part: Part) -> types.Part:
    match part:
        case Text(text=text):
            return types.Part(text=text)
        case Reasoning(text=text):
            return types.Part(text=text, thought=True)
        case ToolCall(call_id=id, tool=tool):
            return types.Part(function_call=types.FunctionCall(id=id, name=tool, **_function_fields(part)))
        case ToolResult(call_id=id, tool=tool):
            result = types.FunctionResponse(id=id, name=tool or "unnamed", **_function_fields(part))
            return types.Part(function_response=result)
        case Media(data=None, url=url, mime=mime, name=name):
            return types.Part(file_data=types.FileData(file_uri=url, mime_type=mime, display_name=name))
        case Media(data=str(data), mime=mime, name=name):
            return types.Part(inline_data=types.Blob(data=b64decode(data), mime_type=mime, display_name=name))
        case Opaque(value=value, dialect="adk"):
            return types.Part.model_validate_json(_json(value))
    return types.Part(text="")


def _function_fields(part: ToolCall | ToolResult) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        arguments = json.loads(part.input or "{}")
        return {"args": arguments if isinstance(arguments, dict) else {}}
    output = (Text(part.output),) if isinstance(part.output, str) else part.output
    text = "".join(one.text for one in output if isinstance(one, Text))
    media = [_rendered(one).model_dump(exclude_none=True) for one in output if isinstance(one, Media)]
    parts = [*map(types.FunctionResponsePart.model_validate, media)]
    return {"response": {"error" if part.is_error else "result": text}, "parts": parts or None}


def _usage(metadata: types.GenerateContentResponseUsageMetadata | None) -> Usage | None:
    if not metadata:
        return None
    output = (metadata.candidates_token_count or 0) + (metadata.thoughts_token_count or 0)
    return Usage(metadata.prompt_token_count or 0, output, metadata.cached_content_token_count or 0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_json_default)


def _json_default(value: Any) -> Any:
    """Tools may return anything."""
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else str(value)
