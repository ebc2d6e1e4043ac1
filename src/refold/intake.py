"""What users hand in becomes drafts: parsed, counted once, and kept as it came."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar

import msgspec

from refold.core.codec import dumps
from refold.core.draft import Draft, split
from refold.core.errors import MessageError
from refold.core.event import Expiry
from refold.core.message import Kind, Media, Message, ToolResult
from refold.formats import openai_chat
from refold.tokens.count import count_json, count_message

T = TypeVar("T")
MAX_DEPTH = 200
"""How deep the JSON of a message may nest."""


class _Beside(msgspec.Struct, frozen=True):
    """What comes with a message, as it must be to be stored."""

    id: str | None = None
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    expiry: Expiry | None = None
    tools: tuple[str, ...] = ()


def drafts(value: object, where: str = "message", *, raw: bytes | None = None, **beside: Any) -> list[Draft]:
    """A message on its way in: one draft, or one for each tool result in it.

    `beside` is id, tags, kind, expiry and tools; `raw` the message's JSON where that was read as text.

    Raises:
        MessageError: it cannot be stored; nothing was.
    """
    extra = _checked(beside, _Beside, where) if beside else _Beside()
    if extra.id == "" or (isinstance(value, Message) and value.id == ""):
        raise MessageError(f"{where}.id", "an id has at least one character; leave it out instead")
    rest: dict[str, Any] = {name: getattr(extra, name) for name in ("tags", "kind", "expiry", "tools")}
    if isinstance(value, Message):
        message = _checked(value, Message, where)
        _sendable(message, where)
        message = msgspec.structs.replace(message, id=extra.id) if extra.id is not None else message
        return [Draft(part, count_message(part), **rest) for part in split(message)]
    if isinstance(value, Mapping):
        value = dict(value)
        json = raw if raw is not None else _encoded(value, where)
        message = msgspec.structs.replace(openai_chat.parse(value, where), id=extra.id)
        tokens = count_message(message) + sum(map(count_json, openai_chat.unread(value)))
        return [Draft(message, tokens, openai_chat.DIALECT, json, **rest)]
    raise MessageError(where, f"expected a dict or a refold.Message, got {type(value).__name__}")


def _sendable(message: Message, where: str) -> None:
    """What no provider would take in any form is better refused here than found out there."""
    if message.role == "tool" and not all(isinstance(part, ToolResult) for part in message.parts or (0,)):
        raise MessageError(f"{where}.parts", "a tool message has tool results and nothing else")
    if message.role != "assistant" and message.calls:
        raise MessageError(f"{where}.parts", "only an assistant makes tool calls")
    if any(isinstance(part, Media) and not (part.url or part.data) for part in message.parts):
        raise MessageError(f"{where}.parts", "an image, file or sound has a url or data")


def _checked(value: Any, type: type[T], where: str) -> T:
    """The value as it will be read again, if it can be."""
    try:
        plain = msgspec.to_builtins(value)
        _walk(plain, where, 0)
        dumps(plain)
        return msgspec.convert(plain, type)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise MessageError(where + path.rstrip("`"), problem) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(where, f"is not JSON: {error}") from error


def _encoded(value: Any, where: str) -> bytes:
    try:
        _walk(value, where, 0)
        return dumps(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise MessageError(where, f"is not JSON: {error}") from error


def _walk(value: Any, where: str, depth: int) -> None:
    """JSON has no NaN and no infinity, and an encoder that wrote null for them would lose data."""
    if depth > MAX_DEPTH:
        raise MessageError(where, f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, float) and not isfinite(value):
        raise MessageError(where, f"{value} is no number that JSON can hold; send it as text")
    if not isinstance(value, str | int | float | Mapping | list | tuple | None):
        raise MessageError(where, f"{type(value).__name__} is nothing that JSON has")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(inner, str):
                _walk(inner, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for n, inner in enumerate(value):
            if not isinstance(inner, str):
                _walk(inner, f"{where}[{n}]", depth + 1)
