"""What users hand in becomes drafts: parsed, counted once, and kept as it came."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from math import isfinite
from typing import Any, NamedTuple, TypeVar

import msgspec

from refold.core.codec import dumps
from refold.core.draft import Draft, part_id, split
from refold.core.errors import MessageError
from refold.core.event import Expiry, Piece
from refold.core.message import Kind, Media, Message, Opaque
from refold.core.sound import MAX_DEPTH
from refold.formats import flat, openai_responses, replies
from refold.formats.dialects import FORMATS, recognize, spoken
from refold.formats.shape import kind_of
from refold.formats.sheet import APART
from refold.repairs.targets import mend
from refold.rules.targets import JUDGES
from refold.tokens.count import Units

T = TypeVar("T")
LONG_PLACE = 100
"""Characters of a place that are told."""
PLAIN = (str, int, float, bool, type(None))
HOPELESS = ("S1", "A11", "A14", "A15", "R9")
"""Rules that a message breaks by itself and that no mending keeps."""
UNDERSTOOD = ("text", "tool_use", "tool_result", "function_call", "function_call_output")
"""Types that have parts of their own: as opaque ones they would escape all rules."""
PARSED = ("parsed", "parsed_arguments", "parsed_output")
"""Fields that SDKs add to what a provider said: it takes none of them back."""


class _Beside(msgspec.Struct, frozen=True):
    """What comes with a message, as it must be to be stored."""

    id: str | None = None
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    expiry: Expiry | None = None
    tools: tuple[str, ...] = ()


class _Unit(NamedTuple):
    """What becomes one message: a refold message, or the JSON of one in some dialect."""

    n: int
    """Which of the things that were handed in."""
    where: str
    value: Any
    raw: bytes | None = None
    dialect: str | None = None
    reply: replies.Reply | None = None


class Taken(NamedTuple):
    drafts: list[Draft]
    first: list[int]
    """For each thing that was handed in, which draft its first word is in."""


class Intake(NamedTuple):
    """How messages are taken in."""

    counter: Units
    default: str
    """The dialect of a message that could be in several."""
    dialect: str | None = None
    """The dialect they are all in, where that is known."""

    def take(
        self,
        values: Sequence[object],
        where: Callable[[int], str] = "messages[{}]".format,
        raws: Sequence[bytes] | None = None,
        **beside: Any,
    ) -> Taken:
        """Messages, SDK objects, whole replies, or the chunks of a stream, on their way in.

        `beside` is id, tags, kind, expiry and tools; `raws` the JSON of each where that was read as text.

        Raises:
            MessageError: one of them cannot be stored; nothing was.
        """
        extra = _checked(beside, _Beside, where(0)) if beside else _Beside()
        if extra.id == "":
            raise MessageError(f"{where(0)}.id", "an id has at least one character; leave it out instead")
        plain = [_plain(value, where(n)) for n, value in enumerate(values)]
        units = list(self._units(plain, where, raws))
        drafts: list[Draft] = []
        first = [0] * len(plain)
        seen = set[int]()
        for group in _groups(units):
            for unit in group:
                if unit.n not in seen:
                    first[unit.n] = len(drafts)
                    seen.add(unit.n)
            drafts += self._drafts(group, extra)
        return Taken(drafts, first)

    def _units(
        self, values: list[Any], where: Callable[[int], str], raws: Sequence[bytes] | None
    ) -> Iterable[_Unit]:
        stream = replies.collect(values, where(0).removesuffix("[0]"))
        if stream is not None:
            if where(0) == where(1):  # not in a list
                raise MessageError(where(0), "is a chunk of a stream; append the list of all that came")
            yield from _reply(stream, 0, where(0))
            return
        default = self.dialect or spoken(values) or self.default
        for n, value in enumerate(values):
            if isinstance(value, Message):
                yield _Unit(n, where(n), value)
                continue
            reply = replies.take(value, where(n))
            if reply is not None:
                yield from _reply(reply, n, where(n))
            else:
                dialect = self.dialect or recognize(value) or default
                yield _Unit(n, where(n), value, raws[n] if raws else None, dialect)

    def _drafts(self, group: Sequence[_Unit], extra: _Beside) -> list[Draft]:
        unit = group[0]
        rest: dict[str, Any] = {name: getattr(extra, name) for name in ("tags", "kind", "expiry", "tools")}
        if isinstance(unit.value, Message):
            message = _checked(unit.value, Message, unit.where)
            if message.role == "tool" and not (message.parts and len(message.results) == len(message.parts)):
                raise MessageError(f"{unit.where}.parts", "a tool message has tool results and nothing else")
            _sendable(message, unit.where)
            if message.id == "":
                raise MessageError(
                    f"{unit.where}.id", "an id has at least one character; leave it out instead"
                )
            message = msgspec.structs.replace(message, id=extra.id) if extra.id is not None else message
            return [Draft(part, self.counter.message(part), **rest) for part in split(message)]
        assert unit.dialect is not None
        format = FORMATS[unit.dialect]
        drafts: list[Draft] = []
        for value, raw, piece in _pieces(group, format.results):
            message = format.parse(value, unit.where)
            if unit.dialect == flat.DIALECT:
                _sendable(message, unit.where)
            else:
                _shaped(value, unit.dialect, unit.where)
            if unit.dialect == flat.DIALECT and message.results:
                return self._steps(message, value, extra.id, rest)
            known = _known(unit.reply) if unit.reply and not drafts else {}
            id = part_id(extra.id or message.id, len(drafts))
            message = msgspec.structs.replace(message, id=id, **known)
            tokens = self.counter.message(message) + sum(map(self.counter.json, format.unread(value)))
            drafts.append(Draft(message, tokens, unit.dialect, raw, **rest, piece=piece))
        return drafts

    def _steps(self, message: Message, record: Any, id: str | None, rest: dict[str, Any]) -> list[Draft]:
        """A record of several steps becomes a message for each; the first has the record as its `meta`."""
        parts = [part for step in flat.steps(message) for part in split(step)]
        first = msgspec.structs.replace(parts[0], meta=record)
        named = [
            msgspec.structs.replace(part, id=part_id(id or message.id, n))
            for n, part in enumerate([first, *parts[1:]])
        ]
        return [Draft(part, self.counter.message(part), **rest) for part in named]


def _reply(reply: replies.Reply, n: int, where: str) -> Iterable[_Unit]:
    for message in reply.messages:
        _walk(message, where, 0)  # what came in pieces may be no JSON as a whole
        yield _Unit(n, where, message, None, reply.dialect, reply)
    if not reply.messages:  # it failed, and what it took is worth knowing
        yield _Unit(n, where, Message("assistant", **_known(reply)))


def _known(reply: replies.Reply) -> dict[str, Any]:
    return {"usage": reply.usage, "model": reply.model, "finish": reply.finish}


def _groups(units: Sequence[_Unit]) -> Iterable[Sequence[_Unit]]:
    """What the model said in one answer is one message, however many items it has."""
    answers = [
        unit.reply is not None or openai_responses.role_of(unit.value, unit.where) == "assistant"
        if unit.dialect == openai_responses.DIALECT and isinstance(unit.value, dict)
        else False
        for unit in units
    ]
    goes_on = [
        n > 0 and answers[n - 1] and answers[n] and units[n - 1].reply is units[n].reply
        for n in range(len(units))
    ]
    starts = [*(n for n, on in enumerate(goes_on) if not on), len(units)]
    return (units[start:end] for start, end in pairwise(starts))


def _pieces(
    group: Sequence[_Unit], results: Callable[[Any], list[int]]
) -> Iterable[tuple[Any, bytes, Piece | None]]:
    """A message, or each tool result in it and the rest: its JSON, decoded and as text."""
    whole: Any = [unit.value for unit in group] if len(group) > 1 else group[0].value
    texts = [unit.raw if unit.raw is not None else _encoded(unit.value, unit.where) for unit in group]
    if len(group) > 1:
        yield whole, b"[" + b",".join(texts) + b"]", None
        return
    found = results(whole)
    count = len(whole["content"]) if found else 0
    if not found or count == 1:
        yield whole, texts[0], None
        return
    rest = tuple(n for n in range(count) if n not in found)
    places = [*((n,) for n in found), *([rest] if rest else [])]
    written = _written(texts[0])
    for n, blocks in enumerate(places):
        value = {**whole, "content": [whole["content"][block] for block in blocks]}
        yield value, _part(written, blocks) if written else dumps(value), Piece(n, len(places), blocks)


def _written(text: bytes) -> tuple[dict[str, bytes], list[bytes]] | None:
    """A message's fields and blocks as they are written."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        blocks = msgspec.json.decode(fields["content"], type=list[msgspec.Raw])
    except msgspec.DecodeError:  # a lone surrogate: it is written anew
        return None
    return {key: bytes(raw) for key, raw in fields.items()}, [bytes(block) for block in blocks]


def _part(written: tuple[dict[str, bytes], list[bytes]], blocks: Sequence[int]) -> bytes:
    fields, texts = written
    content = b"[" + b",".join(texts[n] for n in blocks) + b"]"
    inner = [dumps(key) + b":" + (content if key == "content" else text) for key, text in fields.items()]
    return b"{" + b",".join(inner) + b"}"


def _sendable(message: Message, where: str) -> None:
    """What no provider would take in any form is better refused here than found out there."""
    if message.role != "assistant" and message.calls:
        raise MessageError(f"{where}.parts", "only an assistant makes tool calls")
    if not all(call.tool for call in message.calls):
        raise MessageError(f"{where}.parts", "a call has the name of its tool")
    if any(isinstance(part, Media) and not (part.url or part.data) for part in message.parts):
        raise MessageError(f"{where}.parts", "an image, file or sound has a url or data")
    inner = [part.output for part in message.results if not isinstance(part.output, str)]
    opaque = [part for part in chain(message.parts, *inner) if isinstance(part, Opaque)]
    for part in opaque:
        if (kind := kind_of(part.value)) is None or kind in UNDERSTOOD:
            raise MessageError(f"{where}.parts", f"an opaque part is no {kind or 'object without a type'}")
    for dialect in JUDGES if opaque else ():
        if any(part.dialect in (None, dialect) for part in opaque):
            for value in FORMATS[dialect].render(message)[0]:
                _shaped(value, dialect, where)


def _shaped(value: Any, dialect: str, where: str) -> None:
    """The same for a provider's JSON: once stored, it would stand in the way of every request."""
    items = value if isinstance(value, list) else [value]
    if APART.get(dialect) in items[0] and not {"role", "type"} & items[0].keys():
        return
    odd = _odd(items, dialect)
    if odd and (odd := _odd(mend(dialect, items).messages, dialect)):
        raise MessageError(where, odd.split(" ", 2)[2].replace("this API", dialect))


def _odd(items: Sequence[Any], dialect: str) -> str:
    """What is wrong with them that nothing around them makes right, in a sentence."""
    judge = JUDGES[dialect]()
    judge.feed(items)
    return next((fault.message for fault in judge.violations if fault.rule in HOPELESS), "")


def _checked(value: Any, type: type[T], where: str) -> T:
    """The value as it will be read again, if it can be."""
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray))  # left for the next to refuse
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
        return dumps(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise MessageError(where, f"is not JSON: {error}") from error


def _plain(value: Any, where: str) -> Any:
    """A refold message as it is, anything else as the JSON it stands for.

    Raises:
        MessageError: it stands for none.
    """
    if isinstance(value, Message):
        return value
    try:
        return _json_of(value, where)
    except MessageError:
        raise
    except Exception as error:  # whatever somebody else's object may raise
        raise MessageError(where, f"{type(value).__name__} cannot be read: {error}") from error


def _json_of(value: Any, where: str) -> Any:
    if not isinstance(value, Mapping) and not hasattr(value, "model_dump"):
        raise MessageError(
            where, f"expected a dict, an SDK object or a refold.Message, got {type(value).__name__}"
        )
    plain = value if type(value) is dict else _dumped(value, where)
    if not _walk(plain, where, 0):
        plain = _converted(plain, where)
        if not _walk(plain, where, 0):
            raise MessageError(where, f"{type(value).__name__}.model_dump() gives no JSON")
    if not isinstance(plain, dict):
        raise MessageError(where, f"{type(value).__name__}.model_dump() gives a {type(plain).__name__}")
    return plain if isinstance(value, Mapping) else replies.returnable(plain)


def _walk(value: Any, where: str, depth: int) -> bool:
    """Whether it is JSON already, rather than something that stands for it.

    JSON has no NaN and no infinity, and an encoder that wrote null for them would lose data.
    """
    if depth > MAX_DEPTH:
        raise MessageError(where[:LONG_PLACE] + "…", f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, float) and not isfinite(value):
        raise MessageError(where, f"{value} is no number that JSON can hold; send it as text")
    plain = True
    if isinstance(value, Mapping):
        plain = type(value) is dict
        for key, inner in value.items():
            if type(key) is not str:
                plain = False
                if not isinstance(key, str):
                    raise MessageError(where, f"has the key {key!r}; keys of JSON are text")
            if type(inner) is not str:
                plain &= _walk(inner, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        plain = type(value) is list
        for n, inner in enumerate(value):
            if type(inner) is not str:
                plain &= _walk(inner, f"{where}[{n}]", depth + 1)
    elif hasattr(value, "model_dump"):
        return False
    elif not isinstance(value, str | int | float | None):
        raise MessageError(where, f"{type(value).__name__} is nothing that JSON has")
    else:
        plain = type(value) in PLAIN
    return plain


def _converted(value: Any, where: str) -> Any:
    """The same with every SDK object, and every kind of text or number, as the JSON it stands for."""
    if isinstance(value, Mapping):
        return {str.__str__(key): _converted(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_converted(inner, f"{where}[{n}]") for n, inner in enumerate(value)]
    if hasattr(value, "model_dump"):
        return _dumped(value, where)
    match value:
        case bool():
            return value
        case str():
            return str.__str__(value)
        case float():
            return float.__float__(value)
        case int():
            return int.__int__(value)
    return value


def _dumped(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    try:  # only what its maker set: what a provider never said must not be said back to it
        said = {"mode": "json", "exclude_unset": True, "by_alias": True, "exclude": _parsed(value)}
        for options in ({**said, "warnings": False}, said):
            with suppress(TypeError, ValueError):  # an older pydantic, or what only looks like one
                return value.model_dump(**options)
        return value.model_dump()
    except Exception as error:  # whatever an SDK may raise
        raise MessageError(where, f"{type(value).__name__}.model_dump() failed: {error}") from error


def _parsed(value: Any) -> dict[Any, Any] | None:
    """Where in an SDK object those fields are."""
    named = getattr(value, "__dict__", {}) if hasattr(value, "model_dump") else {}
    fields = enumerate(value) if isinstance(value, list) else named.items()
    found = {key: True if key in PARSED else _parsed(inner) for key, inner in fields}
    return {key: inner for key, inner in found.items() if inner} or None
