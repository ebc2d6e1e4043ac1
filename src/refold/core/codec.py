"""How events are stored: an entry has a head (all but the words), a body (the words) and a digest.

Both are JSON. `docs/format.md` is the description for people; a change here is a change there.
"""

import hashlib
import json
from collections.abc import Callable, Hashable
from math import isfinite
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from refold.core.errors import CorruptError
from refold.core.event import (
    Called,
    Certificate,
    Event,
    Expiry,
    Line,
    Measured,
    Named,
    Piece,
    Pinned,
    Replaced,
    Said,
    Span,
    Undone,
    Unknown,
    Worth,
)
from refold.core.live import CalledHead, Head, MeasuredHead, ReplacedHead
from refold.core.message import Kind, Message, Role, Usage
from refold.core.pairing import with_original_ids, with_unique_ids

FORMAT = 1
"""The version of the stored format. Readers refuse a higher one."""

GENESIS = bytes(16)
"""The digest before the first event."""

Parse: TypeAlias = Callable[[str, Any], Message]
"""From a dialect's name and its decoded JSON to a message."""

MAX_DEPTH = 200
"""How deep the JSON of a message may nest."""
_MESSAGE_DEPTH = 5  # levels of a message around the input of a tool call
_SCALARS = frozenset({bool, int, type(None)})

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
    if isinstance(value, dict):
        if depth > MAX_DEPTH:
            return f"values nested deeper than {MAX_DEPTH} levels"
        for key, inner in value.items():
            if type(key) is not str or not key.isascii():
                if not isinstance(key, str):
                    return "a key that is not a string"
                if _has_lone_surrogate(key):
                    return "a key with a lone surrogate"
            kind = type(inner)
            if kind is str:
                if not inner.isascii() and _has_lone_surrogate(inner):
                    return "a lone surrogate"
            elif kind not in _SCALARS and (problem := json_problem(inner, depth + 1)):
                return problem
        return None
    if isinstance(value, list):
        if depth > MAX_DEPTH:
            return f"values nested deeper than {MAX_DEPTH} levels"
        for inner in value:
            if type(inner) not in _SCALARS and (problem := json_problem(inner, depth + 1)):
                return problem
        return None
    if isinstance(value, str):
        return "a lone surrogate" if not value.isascii() and _has_lone_surrogate(value) else None
    if isinstance(value, float):
        return None if isfinite(value) else "a number that is not finite"
    return None if value is None or isinstance(value, int) else f"a {type(value).__name__}, no JSON value,"


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


class _SaidHead(msgspec.Struct, frozen=True, array_like=True):
    role: Role
    tokens: int
    index: int
    turn: int
    step: int
    total: int
    calls: tuple[str, ...] = ()
    answers: str | None = None
    tools: tuple[str, ...] = ()
    apart: bool = False
    whole: int | None = None
    expiry: Expiry | None = None
    summary: bool = False
    retry: bool = False
    wordless: bool = False


class _SaidWords(msgspec.Struct, frozen=True, omit_defaults=True):
    time: float
    dialect: str | None = None
    message: Message | None = None
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    piece: Piece | None = None


class _SaidBody(_SaidWords, frozen=True):
    raw: msgspec.Raw = msgspec.Raw()


class _ReplacedHead(msgspec.Struct, frozen=True, array_like=True):
    view: str
    span: Span
    lines: tuple[Line, ...]
    kind: str
    round: int
    tokens: tuple[int, int]


class _CoverHead(_ReplacedHead, frozen=True, array_like=True):
    keeps_originals: bool = True
    """Written only where it is false: most heads are shorter."""


class _ReplacedBody(msgspec.Struct, frozen=True, omit_defaults=True):
    shown: tuple[Message | int, ...]
    why: str
    time: float
    certificate: Certificate | None = None
    worth: Worth | None = None


class _CalledHead(msgspec.Struct, frozen=True, array_like=True):
    view: str
    time: float
    calls: int
    cost: float


class _CalledBody(msgspec.Struct, frozen=True):
    span: Span
    model: str
    problem: str | None
    usage: Usage | None


class _PinnedHead(msgspec.Struct, frozen=True, array_like=True):
    lines: tuple[Line, ...]


class _UndoneHead(msgspec.Struct, frozen=True, array_like=True):
    of: int


class _MeasuredHead(msgspec.Struct, frozen=True, array_like=True):
    view: str
    of: int
    estimate: int
    input: int = 0
    model: str | None = None
    prefix: str | None = None
    made: int = 0


class _MeasuredBody(msgspec.Struct, frozen=True):
    usage: Usage
    model: str | None
    time: float


class _NamedHead(msgspec.Struct, frozen=True, array_like=True):
    title: str | None
    model: str | None


class _When(msgspec.Struct, frozen=True):
    time: float


class _Note(msgspec.Struct, frozen=True):
    why: str
    time: float


BESIDE = ("meta", "model", "finish", "usage", "error", "summary")
"""What a message has that its provider's JSON does not say."""


def _beside(message: Message) -> Message | None:
    known = {name: getattr(message, name) for name in BESIDE}
    return Message(message.role, **known) if any(known.values()) else None


def encode(event: Event) -> Entry:
    head: Any
    body: Any
    match event:
        case Said(line=line, message=message):
            numbers = (line.role, line.tokens, event.index, line.turn, line.step, event.total)
            facts = (line.calls, line.answers, line.tools, line.apart, line.whole)
            head = _SaidHead(*numbers, *facts, line.expiry, line.summary, line.retry, line.wordless)
            told = with_original_ids(message) if event.raw is None else _beside(message)
            beside = (event.tags, event.kind, event.piece)
            body = dumps(_SaidWords(event.time, event.dialect, told, *beside))
            if event.raw is not None:  # spliced in, so that it stays as it was written
                body = body[:-1] + b',"raw":' + event.raw + b"}"
            return Entry(line.at, "said", message.id, dumps(head), body)
        case Replaced():
            head = _ReplacedHead(event.view, event.span, event.lines, event.kind, event.round, event.tokens)
            if not event.keeps_originals:
                head = _CoverHead(**msgspec.structs.asdict(head), keeps_originals=False)
            body = _ReplacedBody(event.shown, event.why, event.time, event.certificate, event.worth)
        case Undone(of=of):
            head, body = _UndoneHead(of), _Note(event.why, event.time)
        case Pinned(lines=lines):
            head, body = _PinnedHead(lines), _Note(event.why, event.time)
        case Measured():
            alone = event.usage.input if event.usage.calls == 1 else 0  # a sum says nothing of one request
            known = (event.estimate, alone, event.model, event.prefix, event.made)
            head = _MeasuredHead(event.view, event.of, *known)
            body = _MeasuredBody(event.usage, event.model, event.time)
        case Called():
            head = _CalledHead(event.view, event.time, event.calls, event.cost)
            body = _CalledBody(event.span, event.model, event.problem, event.usage)
        case Named():
            head, body = _NamedHead(event.title, event.model), _When(event.time)
        case Unknown(kind=kind):
            return Entry(event.at, kind, None, dumps(event.head), dumps(event.body))
    return Entry(event.at, type(event).__name__.lower(), None, dumps(head), dumps(body))


def decode(entry: Entry, parse: Parse) -> Event:
    """The whole event.

    Raises:
        CorruptError: the entry is not what `encode` wrote.
    """
    at = entry.at
    match entry.kind:
        case "said":
            said = _read(entry, entry.head, _SaidHead)
            line, body = _line(entry, said), _said_body(entry)
            raw = bytes(body.raw) or None
            message = body.message
            if raw is not None:
                message = parse(body.dialect or "", loads(raw))
                known = {name: getattr(body.message, name) for name in BESIDE} if body.message else {}
                message = msgspec.structs.replace(message, id=entry.id, **known)
            if message is None:
                raise CorruptError(f"Event {at} has neither a message nor its JSON")
            rest = (body.dialect, raw, body.tags, body.kind, body.piece)
            return Said(line, with_unique_ids(message, line), said.index, said.total, body.time, *rest)
        case "replaced":
            edit = _read(entry, entry.head, _CoverHead)
            shown = _read(entry, entry.body, _ReplacedBody)
            new = (shown.shown, edit.lines, edit.kind, shown.why, edit.tokens, shown.time, edit.round)
            keeps = edit.keeps_originals
            return Replaced(at, edit.view, edit.span, *new, shown.certificate, shown.worth, keeps)
        case "undone":
            note = _read(entry, entry.body, _Note)
            return Undone(at, _read(entry, entry.head, _UndoneHead).of, note.why, note.time)
        case "pinned":
            note = _read(entry, entry.body, _Note)
            return Pinned(at, _read(entry, entry.head, _PinnedHead).lines, note.why, note.time)
        case "measured":
            head, usage = _read(entry, entry.head, _MeasuredHead), _read(entry, entry.body, _MeasuredBody)
            numbers = (usage.usage, head.estimate, usage.model, usage.time, head.prefix, head.made)
            return Measured(at, head.view, head.of, *numbers)
        case "called":
            bill, told = _read(entry, entry.head, _CalledHead), _read(entry, entry.body, _CalledBody)
            facts = (told.span, told.model, told.problem, bill.calls, told.usage, bill.cost, bill.time)
            return Called(at, bill.view, *facts)
        case "named":
            name = _read(entry, entry.head, _NamedHead)
            return Named(at, name.title, name.model, _read(entry, entry.body, _When).time)
        case kind:
            return Unknown(at, kind, _json(entry, entry.head), _json(entry, entry.body))


def head(entry: Entry) -> Head | None:
    """The event without its words; None for one that views pass over."""
    match entry.kind:
        case "said":
            return _line(entry, _read(entry, entry.head, _SaidHead))
        case "replaced":
            edit = _read(entry, entry.head, _CoverHead)
            return ReplacedHead(entry.at, edit.view, edit.span, edit.lines, edit.round, edit.keeps_originals)
        case "undone":
            return Undone(entry.at, _read(entry, entry.head, _UndoneHead).of)
        case "pinned":
            return Pinned(entry.at, _read(entry, entry.head, _PinnedHead).lines)
        case "measured":
            measured = _read(entry, entry.head, _MeasuredHead)
            rest = (measured.estimate, measured.input, measured.model, measured.prefix, measured.made)
            return MeasuredHead(entry.at, measured.view, measured.of, *rest)
        case "called":
            bill = _read(entry, entry.head, _CalledHead)
            return CalledHead(entry.at, bill.view, bill.time, bill.calls, bill.cost)
        case "named":
            name = _read(entry, entry.head, _NamedHead)
            return Named(entry.at, name.title, name.model)
        case _:
            return None


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


def _line(entry: Entry, head: _SaidHead) -> Line:
    numbers = (head.role, head.tokens, head.turn, head.step)
    rest = (head.apart, head.whole, head.expiry, head.summary)
    line = Line(entry.at, *numbers, head.calls, head.answers, head.tools, 0, *rest, retry=head.retry)
    return msgspec.structs.replace(line, wordless=True) if head.wordless else line


def _said_body(entry: Entry) -> _SaidBody:
    try:
        body: _SaidBody = _DECODERS[_SaidBody].decode(entry.body)
        return body
    except msgspec.DecodeError:
        value = _json(entry, entry.body)
        raw = value.pop("raw", None) if isinstance(value, dict) else None
        body = _convert(entry, value, _SaidBody)
        return body if raw is None else msgspec.structs.replace(body, raw=msgspec.Raw(dumps(raw)))


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


_HEADS = (_SaidHead, _CoverHead, _CalledHead, _PinnedHead, _UndoneHead, _MeasuredHead, _NamedHead)
_BODIES = (_SaidBody, _ReplacedBody, _CalledBody, _MeasuredBody, _Note, _When)
_DECODERS: dict[Hashable, msgspec.json.Decoder[Any]] = {type: decoder(type) for type in (*_HEADS, *_BODIES)}
