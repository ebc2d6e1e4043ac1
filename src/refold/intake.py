"""What users hand in becomes drafts: parsed, counted once, and kept as it came."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec

from refold.core.codec import dumps
from refold.core.draft import Draft
from refold.core.errors import MessageError
from refold.core.event import Expiry
from refold.core.message import Kind, Message
from refold.formats import openai_chat
from refold.tokens.count import count_message

MAX_DEPTH = 200
"""How deep the JSON of a message may nest."""


def draft(
    value: object,
    where: str = "message",
    *,
    id: str | None = None,
    tags: tuple[str, ...] = (),
    kind: Kind | None = None,
    expiry: Expiry | None = None,
    tools: tuple[str, ...] = (),
    raw: bytes | None = None,
) -> Draft:
    """A message on its way in; `raw` is its JSON where that was read as text.

    Raises:
        MessageError: it is none; nothing was stored.
    """
    rest: dict[str, Any] = {"tags": tags, "kind": kind, "expiry": expiry, "tools": tools}
    if isinstance(value, Message):
        _encodable(value, where)
        message = msgspec.structs.replace(value, id=id) if id else value
        return Draft(message, count_message(message), **rest)
    if isinstance(value, Mapping):
        value = dict(value)
        message = openai_chat.parse(value, where)
        json = raw if raw is not None else _encodable(value, where)
        message = msgspec.structs.replace(message, id=id)
        return Draft(message, count_message(message), openai_chat.DIALECT, json, **rest)
    raise MessageError(where, f"expected a dict or a refold.Message, got {type(value).__name__}")


def _encodable(value: Any, where: str) -> bytes:
    try:
        _walk(msgspec.to_builtins(value) if isinstance(value, Message) else value, where, 0)
        return dumps(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise MessageError(where, f"is not JSON: {error}") from error


def _walk(value: Any, where: str, depth: int) -> None:
    """JSON has no NaN and no infinity, and an encoder that wrote null for them would lose data."""
    if depth > MAX_DEPTH:
        raise MessageError(where, f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, float) and not isfinite(value):
        raise MessageError(where, f"{value} is no number that JSON can hold; send it as text")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(inner, str):
                _walk(inner, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for n, inner in enumerate(value):
            if not isinstance(inner, str):
                _walk(inner, f"{where}[{n}]", depth + 1)
