"""How events are stored: an entry has a head (all but the words), a body (the words) and a digest.

Both are JSON. `docs/format.md` is the description for people; a change here is a change there.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable
from math import isfinite
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import structs
from msgspec.structs import asdict, replace

from refold.core.errors import CorruptError
from refold.core.event import (
    Called,
    Event,
    Head,
    Line,
    Measured,
    Named,
    Piece,
    Pinned,
    Replaced,
    Said,
    Undone,
    Unknown,
)
from refold.core.message import Kind, Message, Usage
from refold.core.pairing import with_original_ids, with_unique_ids

FORMAT = 1
"""The version of the stored format. Readers refuse a higher one."""

GENESIS = bytes(16)
"""The digest before the first event."""

Parse: TypeAlias = Callable[[str, Any], Message]
"""From a dialect's name and its decoded JSON to a message."""

MAX_JSON_DEPTH = 200
_MESSAGE_DEPTH = 5  # levels of a message around the input of a tool call

T = TypeVar("T")


class Entry(NamedTuple):
    """An event as stores keep it. They need to understand only `at` and `id`."""

    at: int
    kind: str
    id: str | None
    head: bytes
    body: bytes


class Link(NamedTuple):
    """An entry in its chain."""

    entry: Entry
    digest: bytes


def chain(previous: bytes, entry: Entry) -> bytes:
    """The digest of an entry and, through `previous`, of all before it."""
    digest = hashlib.blake2b(previous, digest_size=16)
    fields = (b"%d" % entry.at, to_bytes(entry.kind), to_bytes(entry.id or ""), entry.head, entry.body)
    marks = b"%d %d %d %d %d %d\n" % (entry.id is not None, *map(len, fields))
    digest.update(marks + b"".join(fields))
    return digest.digest()


def to_bytes(text: str) -> bytes:
    """UTF-8, and for a lone surrogate the three bytes that UTF-8 would have had for it."""
    return text.encode("utf-8", "surrogatepass")


def dumps(value: Any) -> bytes:
    """Compact JSON. A lone surrogate, which UTF-8 cannot hold, is written as its escape."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """The JSON in `data`, also where msgspec refuses it: lone surrogates, numbers out of range.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data)


def read_json(text: str) -> Any:
    """Parse a JSON text, such as the input that a model wrote for a tool.

    Raises:
        ValueError: the text is not JSON, or is JSON that could not be sent on.
    """
    try:
        value = loads(to_bytes(text))
        problem = json_problem(value, _MESSAGE_DEPTH)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if problem and "surrogate" not in problem:
        raise ValueError(problem)
    return value


def json_problem(value: Any, depth: int = 0) -> str | None:
    """The first thing that keeps a value from being sent as JSON in UTF-8, in words; None if it can be."""
    if isinstance(value, str):
        return "a lone surrogate" if _has_lone_surrogate(value) else None
    if value is None or isinstance(value, int):
        return None
    if isinstance(value, float):
        return None if isfinite(value) else "a number that is not finite"
    if not isinstance(value, dict | list):
        return f"a {type(value).__name__}, no JSON value,"
    if depth > MAX_JSON_DEPTH:
        return f"values nested deeper than {MAX_JSON_DEPTH} levels"
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return "a key that is not a string"
            if not key.isascii() and _has_lone_surrogate(key):
                return "a key with a lone surrogate"
    for inner in value.values() if isinstance(value, dict) else value:
        is_usual = type(inner) is str and inner.isascii()
        if not is_usual and (problem := json_problem(inner, depth + 1)):
            return problem
    return None


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def decoder(type: Any) -> msgspec.json.Decoder[Any]:
    """A decoder, made where its type is defined: msgspec learns a type when it is first used, and where two
    threads do that at once the process crashes.
    """
    return msgspec.json.Decoder(type)


OWN_FIELDS = ("meta", "model", "finish", "usage", "error", "summary")
"""What a message has that its provider's JSON does not say."""


class _SaidBody(msgspec.Struct, frozen=True, omit_defaults=True):
    time: float
    dialect: str | None = None
    message: Message | None = None
    """The message; or, where it is in `raw`, only what that does not say."""
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    piece: Piece | None = None
    raw: msgspec.Raw = msgspec.Raw()
    """Written as it came, hence not by the encoder."""


def encode(event: Event) -> Entry:
    match event:
        case Said():
            return _encode_said(event)
        case Unknown():
            return Entry(event.at, event.kind, None, dumps(event.head), dumps(event.body))
    head = [getattr(event, name) for name in event.HEAD]
    body = {name: getattr(event, name) for name in event.BODY}
    if isinstance(event, Replaced):  # what most edits do not have is left out
        body = {name: value for name, value in body.items() if value is not None}
        if event.keeps_originals:
            head.pop()
    return Entry(event.at, type(event).__name__.lower(), None, dumps(head), dumps(body))


def _encode_said(event: Said) -> Entry:
    facts = asdict(event.line) | {"index": event.index, "total": event.total}
    head = [facts[name] for name in Said.HEAD]
    if event.raw is None:
        message: Message | None = with_original_ids(event.message)
    else:
        extra = {name: getattr(event.message, name) for name in OWN_FIELDS}
        message = Message(event.message.role, **extra) if any(extra.values()) else None
    body = dumps(_SaidBody(event.time, event.dialect, message, event.tags, event.kind, event.piece))
    if event.raw is not None:
        body = body[:-1] + b',"raw":' + event.raw + b"}"
    return Entry(event.at, "said", event.message.id, dumps(head), body)


def decode(entry: Entry, parse: Parse) -> Event:
    """The whole event.

    Raises:
        CorruptError: the entry is not what `encode` wrote.
    """
    if entry.kind == "said":
        return _decode_said(entry, parse)
    if entry.kind in _EVENTS:
        stored = _EVENTS[entry.kind]
        fields = _head_fields(entry, stored) | asdict(_read(entry, entry.body, stored.body))
        return stored.event(entry.at, **fields)
    return Unknown(entry.at, entry.kind, _json(entry, entry.head), _json(entry, entry.body))


def _decode_said(entry: Entry, parse: Parse) -> Said:
    facts = asdict(_read(entry, entry.head, _SAID_HEAD))
    index = facts.pop("index")
    total = facts.pop("total")
    line = Line(entry.at, **facts)
    body = _said_body(entry)
    message = body.message
    raw = bytes(body.raw) or None
    if raw is not None:
        extra = {name: getattr(message, name) for name in OWN_FIELDS} if message else {}
        message = replace(parse(body.dialect or "", loads(raw)), id=entry.id, **extra)
    if message is None:
        raise CorruptError(f"Event {entry.at} has neither a message nor its JSON")
    message = with_unique_ids(message, line)
    return Said(line, message, index, total, body.time, body.dialect, raw, body.tags, body.kind, body.piece)


def head(entry: Entry) -> Head | None:
    """The event without its texts; None for one that views pass over."""
    if entry.kind == "said":
        facts = asdict(_read(entry, entry.head, _SAID_HEAD))
        del facts["index"], facts["total"]
        return Line(entry.at, **facts)
    if entry.kind not in _EVENTS:
        return None
    stored = _EVENTS[entry.kind]
    return stored.event(entry.at, **(stored.event.BODY | _head_fields(entry, stored)))


def _head_fields(entry: Entry, stored: "_Stored") -> dict[str, Any]:
    fields = asdict(_read(entry, entry.head, stored.head))
    if "input" in fields:
        fields["usage"] = Usage(fields.pop("input"))
    return fields


class Came(NamedTuple):
    """A message as its sender wrote it."""

    dialect: str
    value: Any
    """Its JSON, decoded."""
    piece: Piece | None


def came(entry: Entry) -> Came | None:
    """How a Said came, where it came as a provider's JSON."""
    if entry.kind != "said":
        return None
    body = _said_body(entry)
    return Came(body.dialect, loads(bytes(body.raw)), body.piece) if body.dialect else None


def dialect_of(entry: Entry) -> str | None:
    """The dialect in which a Said came."""
    return _said_body(entry).dialect if entry.kind == "said" else None


def _said_body(entry: Entry) -> _SaidBody:
    try:
        body: _SaidBody = _DECODERS[_SaidBody].decode(entry.body)
        return body
    except msgspec.DecodeError:
        value = _json(entry, entry.body)
        raw = value.pop("raw", None) if isinstance(value, dict) else None
        body = _convert(entry, value, _SaidBody)
        return body if raw is None else replace(body, raw=msgspec.Raw(dumps(raw)))


def _read(entry: Entry, data: bytes, type: type[T]) -> T:
    try:
        value: T = _DECODERS[cast(Hashable, type)].decode(data)
        return value
    except msgspec.DecodeError:
        return _convert(entry, _json(entry, data), type)


def _json(entry: Entry, data: bytes) -> Any:
    try:
        return loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"Event {entry.at} ({entry.kind}) is not JSON: {error}") from error


def _convert(entry: Entry, value: Any, type: type[T]) -> T:
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise CorruptError(f"Event {entry.at} is no '{entry.kind}': {error}") from error


def _part(event: type[msgspec.Struct], names: Iterable[str], *, array_like: bool) -> type[msgspec.Struct]:
    """The struct of an event's head or body, with the types and defaults that its fields have."""
    known = {field.name: field for field in (*structs.fields(Line), *structs.fields(event))}
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name in names:
        field = known.get(name)
        if field is None:  # a property, which older entries may not have
            fields.append((name, int, 0))
        elif field.required:
            fields.append((name, field.type))
        else:
            fields.append((name, field.type, field.default))
    return msgspec.defstruct(event.__name__, fields, frozen=True, array_like=array_like, kw_only=True)


class _Stored(NamedTuple):
    """How one kind of event is stored."""

    event: type[Replaced | Undone | Pinned | Measured | Called | Named]
    head: type[msgspec.Struct]
    body: type[msgspec.Struct]


_SAID_HEAD = _part(Said, Said.HEAD, array_like=True)
_EVENTS = {
    event.__name__.lower(): _Stored(
        event,
        _part(event, event.HEAD, array_like=True),
        _part(event, event.BODY, array_like=False),
    )
    for event in (Replaced, Undone, Pinned, Measured, Called, Named)
}
_TYPES = [_SAID_HEAD, _SaidBody, *(part for stored in _EVENTS.values() for part in stored[1:])]
_DECODERS: dict[Hashable, msgspec.json.Decoder[Any]] = {type: decoder(type) for type in _TYPES}
