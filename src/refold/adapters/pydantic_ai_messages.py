"""How Pydantic AI says things, part by part."""

from base64 import b64decode
from collections.abc import Hashable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from pydantic_ai.messages import (
    AudioUrl,
    BinaryContent,
    CachePoint,
    DocumentUrl,
    ImageUrl,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextContent,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
    VideoUrl,
    is_multi_modal_content,
)

from refold.core import codec
from refold.core.message import (
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    Usage,
)

DIALECT = "pydantic-ai"
SAID = frozenset(("user-prompt", "tool-return", "retry-prompt", "retry-feedback", "compaction", "speech"))
"""Parts of a request that are said. All others, such as system prompts, go along with every request."""


class Saying(NamedTuple):
    """A response, or a part of a request: what stands in one request now may stand in two in the next run."""

    whole: Any
    """The message."""
    part: Any = None
    n: int | None = None
    """Which message of the history it is, or is in."""
    place: int = 0
    """Which part of that message it is."""
    said: tuple[Part, ...] = ()
    mark: str = ""
    own: "Saying | None" = None
    """What the history says there, where others say it otherwise in one request."""


def saying(whole: Any, part: Any, n: int, place: int = 0) -> Saying:
    said = _said(part) if part is not None else tuple(one for part in whole.parts for one in _said(part))
    mark = blake2b(codec.dumps([part is None, said]), digest_size=12).hexdigest()
    return Saying(whole, part, n, place, said, mark)


class Words:
    """How Pydantic AI says things."""

    def mark(self, saying: Saying) -> Hashable:
        """The same for all that say the same, however they are written, and for no others."""
        return saying.mark

    def read(self, saying: Saying) -> Message:
        if saying.part is not None:
            return Message("tool" if is_result(saying.part) else "user", saying.said)
        return Message("assistant", saying.said, usage=_usage(saying.whole))

    def write(self, message: Message, original: Saying | None) -> Saying:
        known = original.part if original else None
        if message.role == "assistant":
            return _response(message, None if known else original)
        part = _result(message, known) if message.results else _prompt(message, known)
        return original._replace(part=part) if original and known else Saying(ModelRequest([part]))


def _said(part: Any) -> tuple[Part, ...]:
    match part.part_kind:
        case "text" | "speech" | "compaction" if part.content:
            return (Text(part.content),)
        case "thinking" if part.content:
            return (Reasoning(part.content),)
        case "text" | "speech" | "thinking":
            return ()
        case "tool-call":
            return (ToolCall(part.tool_call_id, part.tool_name, _input(part.args)),)
        case "tool-return":
            items = part.content_items(mode="str", wrap_if_error=False) if part.files else ()
            output = tuple(map(_item, items)) or part.model_response_str(wrap_if_error=False)
            failed = part.outcome != "success"
            return (ToolResult(part.tool_call_id, output, part.tool_name, is_error=failed),)
        case "retry-prompt" if part.tool_name:
            return (ToolResult(part.tool_call_id, part.model_response(), part.tool_name, is_error=True),)
        case "retry-prompt" | "retry-feedback":
            return (Text(part.model_response()),)
        case "user-prompt":
            items = [part.content] if isinstance(part.content, str) else part.content
            return tuple(_item(one) for one in items if one and not isinstance(one, CachePoint))
        case "file":
            return (_item(part.content),)
    return (_opaque(part),)


def is_result(part: Any) -> bool:
    return part.part_kind == "tool-return" or (part.part_kind == "retry-prompt" and bool(part.tool_name))


def _item(item: Any) -> Any:
    """A text or a file of a prompt or a result."""
    match item:
        case str():
            return Text(item)
        case TextContent():
            return Text(item.content)
        case BinaryContent(media_type=mime):
            kind: Any = mime.partition("/")[0]
            return Media(kind if kind in ("image", "audio") else "file", data=item.base64, mime=mime)
        case ImageUrl() | AudioUrl():
            return Media("image" if isinstance(item, ImageUrl) else "audio", url=item.url)
        case DocumentUrl() | VideoUrl():
            return Media("file", url=item.url, mime="video/*" if isinstance(item, VideoUrl) else None)
    return Opaque({"type": item.kind, "id": item.file_id, "provider": item.provider_name}, DIALECT)


def _opaque(part: Any) -> Opaque:
    """Something between the framework and its provider, as it is stored there."""
    whole = ModelRequest if part.part_kind in SAID else ModelResponse
    value = ModelMessagesTypeAdapter.dump_python([whole([part])], mode="json")[0]["parts"][0]
    value.pop("timestamp", None)
    return Opaque({"type": value.pop("part_kind"), **value}, DIALECT)


def _response(message: Message, original: Saying | None) -> Saying:
    """Thinking is left out: it belongs to what was said exactly so."""
    given: Sequence[Any] = original.whole.parts if original else ()
    known = [(_said(part), part) for part in given if part.part_kind != "thinking"]
    calls = {part.tool_call_id: part for part in given if isinstance(part, ToolCallPart)}
    parts = list[Any]()
    for one in message.parts:
        same = next((part for said, part in known if said == (one,)), None)
        match one:
            case Text(text=text):
                parts.append(same or TextPart(text))
            case ToolCall(call_id=id, tool=tool, input=input):
                changed = replace(calls[id], args=input) if id in calls else ToolCallPart(tool, input, id)
                parts.append(same or changed)
            case _ if same:
                parts.append(same)
    response = replace(original.whole, parts=parts) if original else ModelResponse(parts)
    return original._replace(whole=response) if original else Saying(response)


def _result(message: Message, known: Any) -> Any:
    result = message.results[0]
    output = (Text(result.output),) if isinstance(result.output, str) else result.output
    if known is None:
        outcome: Any = "failed" if result.is_error else "success"
        return ToolReturnPart(result.tool or "unknown", _content(output), result.call_id, outcome=outcome)
    return known if getattr(known, "tool_kind", None) else replace(known, content=_content(output, known))


def _prompt(message: Message, known: Any) -> Any:
    if message.role == "system":
        return SystemPromptPart(message.text)
    if not isinstance(known, UserPromptPart):
        return UserPromptPart(_content(message.parts))
    return replace(known, content=_content(message.parts, known))


def _content(parts: Sequence[Part], known: Any = None) -> Any:
    """Of a prompt or a result; what stays as it was is the very same."""
    given = getattr(known, "content", ())
    files = [
        one for one in (given if isinstance(given, list | tuple) else (given,)) if is_multi_modal_content(one)
    ]
    same = ((next((one for one in files if _item(one) == part), None), part) for part in parts)
    items = [one for file, part in same if (one := file or _media(part)) is not None]
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def _media(part: Part) -> Any:
    match part:
        case Text(text=text):
            return text
        case Media(kind="image", url=str(url)):
            return ImageUrl(url)
        case Media(kind="audio", url=str(url)):
            return AudioUrl(url)
        case Media(url=str(url), mime=mime):
            return VideoUrl(url) if mime else DocumentUrl(url)
        case Media(data=str(data), mime=mime):
            return BinaryContent(b64decode(data), media_type=mime or "application/octet-stream")
    return None


def _usage(response: Any) -> Usage | None:
    """As a provider tells it: models without one make it up."""
    took = response.usage
    if response.provider_name is None or not took.input_tokens:
        return None
    return Usage(took.input_tokens, took.output_tokens, took.cache_read_tokens, took.cache_write_tokens)


def _input(args: Any) -> str:
    """Arguments come as a text or as a dictionary, and may come back as the other."""
    try:
        return to_json(msgspec.json.decode(args) if isinstance(args, str) and args else args or {})
    except (ValueError, OverflowError):
        return str(args)  # broken, as the model wrote it


def to_json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
