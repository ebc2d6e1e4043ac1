"""What users hand in becomes drafts: parsed, counted once, and kept as it came."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from refold.config.validate import brief_repr
from refold.core.codec import dumps
from refold.core.draft import Draft, part_id, split
from refold.core.errors import MessageError, SettingError
from refold.core.event import Expiry, Piece
from refold.core.message import Kind, Media, Message, Opaque
from refold.dialects.dialect import Dialect
from refold.dialects.registry import DIALECTS, TARGETS, is_plain, readable_as, recognize
from refold.dialects.rules.targets import RULES
from refold.dialects.shape import kind_of, own_id
from refold.models.count import Units
from refold.session.streams import chunks_of, is_async_stream, is_stream
from refold.session.to_json import EXPECTED, checked, encoded, plain, walk
from refold.session.validate import expiry_of

if TYPE_CHECKING:
    from refold.dialects.replies import ParsedReply

HOPELESS = ("S1", "A11", "A14", "A15", "R9")
"""Rules that a message breaks by itself and that no mending keeps."""
TIMES = ("created_at", "createdAt", "timestamp")
"""Where rows say when they were written."""
LATEST_S = 100_000_000_000
"""Seconds up to the year 5138; larger numbers are milliseconds."""
UNDERSTOOD = ("text", "tool_use", "tool_result", "function_call", "function_call_output")
"""Types that have parts of their own: as opaque ones they would escape all rules."""


class _MessageFields(msgspec.Struct, frozen=True):
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
    reply: "ParsedReply | None" = None


class ParsedMessages(NamedTuple):
    drafts: list[Draft]
    first: list[int]
    """For each thing that was handed in, which draft its first word is in."""
    is_stream: bool = False
    """They were the chunks of one reply."""


class Intake(NamedTuple):
    """How messages are taken in."""

    counter: Units
    default: str
    """The dialect of a message that could be in several."""
    dialect: str | None = None
    """The dialect they are all in, where that is known."""
    reads_own: bool = True
    """Fields such as `expiry` and `tags` are for refold, where the API has none of that name."""

    def take(
        self,
        values: Sequence[object],
        where: Callable[[int], str] = "messages[{}]".format,
        raws: Sequence[bytes] | None = None,
        **beside: Any,
    ) -> ParsedMessages:
        """Messages, SDK objects, whole replies, or the chunks of a stream, on their way in.

        One of several may be a stream as well, or the list of its chunks. `beside` is id, tags, kind, expiry
        and tools; `raws` the JSON of each where that was read as text.

        Raises:
            MessageError: one of them cannot be stored; nothing was.
            SettingError: the expiry has something that is not known, or not allowed.
        """
        if beside.get("expiry") is not None:
            beside["expiry"] = expiry_of(beside["expiry"])
        extra = checked(beside, _MessageFields, where(0)) if beside else _MessageFields()
        if extra.id == "":
            raise MessageError(f"{where(0)}.id", "an id has at least one character; leave it out instead")
        json = [_json_of(value, where(n)) for n, value in enumerate(values)]
        stream = _collected(json, where)
        units = list(self._units(json, where, raws) if stream is None else _reply(stream, 0, where(0)))
        drafts: list[Draft] = []
        first = [0] * (len(json) if stream is None else 1)
        seen = set[int]()
        for group in _groups(units):
            for unit in group:
                if unit.n not in seen:
                    first[unit.n] = len(drafts)
                    seen.add(unit.n)
            drafts += self._drafts(group, extra)
        return ParsedMessages(drafts, first, stream is not None)

    def _units(
        self, values: list[Any], where: Callable[[int], str], raws: Sequence[bytes] | None
    ) -> Iterable[_Unit]:
        dialects = [self.dialect or recognize(value) for value in values]
        default = next((one for one in dialects if one in TARGETS), self.default)
        has_rows = "flat" in dialects
        for n, value in enumerate(values):
            reply = None
            if isinstance(value, list):
                reply = _joined(value, where(n))
            elif _is_odd(value):
                from refold.dialects import replies

                reply = replies.take(value, where(n))
            if isinstance(value, Message):
                yield _Unit(n, where(n), value)
            elif reply is not None:
                yield from _reply(reply, n, where(n))
            else:
                is_row = has_rows and isinstance(value.get("content"), str)
                dialect = dialects[n] or ("flat" if is_row else readable_as(value, default))
                if dialect != "flat":
                    _demand_content(value, where(n))
                yield _Unit(n, where(n), value, raws[n] if raws else None, dialect)

    def _drafts(self, group: Sequence[_Unit], extra: _MessageFields) -> list[Draft]:
        unit = group[0]
        rest: dict[str, Any] = {name: getattr(extra, name) for name in ("tags", "kind", "expiry", "tools")}
        if isinstance(unit.value, Message):
            message = checked(unit.value, Message, unit.where)
            if message.role == "tool" and not (message.parts and len(message.results) == len(message.parts)):
                raise MessageError(f"{unit.where}.parts", "a tool message has tool results and nothing else")
            _sendable(message, unit.where)
            if message.id == "":
                raise MessageError(
                    f"{unit.where}.id", "an id has at least one character; leave it out instead"
                )
            message = msgspec.structs.replace(message, id=extra.id) if extra.id is not None else message
            parts = split(message)
            return [
                Draft(part, self.counter.message(part), **rest, before=n if len(parts) > 1 else None)
                for n, part in enumerate(parts)
            ]
        assert unit.dialect is not None
        format = DIALECTS[unit.dialect]
        own = _own_fields(group, format)
        reads_own = self.reads_own and unit.reply is None  # what a provider says is not for us
        if reads_own:
            rest |= _beside_own(own, extra, unit.where)
        drafts: list[Draft] = []
        for value, raw, piece in _pieces(group, format.results):
            message = format.parse(value, unit.where)
            if unit.dialect == "flat":
                _sendable(message, unit.where)
            elif not is_plain(value, DIALECTS[unit.dialect]):
                _shaped(value, unit.dialect, unit.where)
            if unit.dialect == "flat":
                rest["time"] = _time_of(value)
                if message.results:
                    return self._steps(message, value, extra.id, rest)
            known = _known(unit.reply) if unit.reply and not drafts else {}
            named = message.id if reads_own else None
            id = part_id(extra.id or named, len(drafts))
            message = msgspec.structs.replace(message, id=id, **known)
            unread = [*format.unread(value), *([] if self.reads_own else [own])]
            tokens = self.counter.message(message) + sum(map(self.counter.json, filter(None, unread)))
            apart = format.stands_apart(value)
            known = {"piece": piece, "apart": apart, "before": piece.n if piece else None}
            drafts.append(Draft(message, tokens, unit.dialect, raw, **rest, **known))
        return drafts

    def _steps(self, message: Message, record: Any, id: str | None, rest: dict[str, Any]) -> list[Draft]:
        """A record of several steps becomes a message for each; the first has the record as its `meta`."""
        from refold.dialects import flat

        parts = [part for step in flat.steps(message) for part in split(step)]
        first = msgspec.structs.replace(parts[0], meta=record)
        named = [
            msgspec.structs.replace(part, id=part_id(id or message.id, n))
            for n, part in enumerate([first, *parts[1:]])
        ]
        return [Draft(part, self.counter.message(part), **rest) for part in named]


def _own_fields(group: Sequence[_Unit], format: Dialect) -> dict[str, Any]:
    """Fields of a message that are for refold; of several items that are one message, those of the first."""
    value = group[0].value
    names = format.own_fields(value) if isinstance(value, dict) else ()
    return {name: value[name] for name in names if value.get(name) is not None}


def _beside_own(own: dict[str, Any], extra: _MessageFields, where: str) -> dict[str, Any]:
    """Tags and expiry that a message has in fields of its own, unless the caller gave others.

    Raises:
        MessageError: one of these fields is not as it must be.
    """
    if own.get("id", "") != "" and own_id(own["id"]) is None:
        raise MessageError(f"{where}.id", f"expected a text or a whole number, got {brief_repr(own['id'])}")
    found = dict[str, Any]()
    if "tags" in own and not extra.tags:
        found["tags"] = checked({"tags": own["tags"]}, _MessageFields, where).tags
    if "expiry" in own and extra.expiry is None:
        try:
            found["expiry"] = expiry_of(own["expiry"], f"{where}.expiry")
        except SettingError as error:
            raise MessageError(error.where, error.problem) from error
    return found


def _is_odd(value: Any) -> bool:
    """It may be a reply or a chunk of one: no message looks like that, but for items of Responses."""
    return isinstance(value, dict) and ("role" not in value or "type" in value)


def _json_of(value: Any, where: str) -> Any:
    """A message as JSON; for a stream, or the list of its chunks, a list of these."""
    if is_stream(value) or is_async_stream(value):
        value = chunks_of(value, where)
    if isinstance(value, list | tuple):
        return [plain(chunk, f"{where}[{n}]") for n, chunk in enumerate(value)]
    return plain(value, where)


def _collected(values: Sequence[Any], where: Callable[[int], str]) -> "ParsedReply | None":
    """What values say together, where they are the chunks of one stream.

    Raises:
        MessageError: it is only one of them.
    """
    if not values or not _is_odd(values[0]):
        return None
    from refold.dialects import replies  # with the dialects they come in

    stream = replies.collect(values, where(0).removesuffix("[0]"))
    if stream is not None and where(0) == where(1):  # not in a list
        raise MessageError(where(0), "is a chunk of a stream; append the stream, or all that came of it")
    return stream


def _joined(chunks: list[Any], where: str) -> "ParsedReply":
    from refold.dialects import replies

    reply = replies.collect(chunks, where) if chunks and _is_odd(chunks[0]) else None
    if reply is None:
        raise MessageError(where, f"{EXPECTED}, got list, which is not the chunks of a stream")
    return reply


def _demand_content(value: dict[str, Any], where: str) -> None:
    """
    Raises:
        MessageError: it is a user's or a system message that has no content at all.
    """
    is_message = kind_of(value) in (None, "message")  # other items of Responses have a role too
    speaks = value.get("role") in ("user", "system", "developer")
    if is_message and speaks and value.get("content") is None:
        raise MessageError(f"{where}.content", "is missing: expected a text or a list of parts")


def _reply(reply: "ParsedReply", n: int, where: str) -> Iterable[_Unit]:
    for message in reply.messages:
        walk(message, where, 0)  # what came in pieces may be no JSON as a whole
        yield _Unit(n, where, message, None, reply.dialect, reply)
    if not reply.messages:  # it failed, and what it took is worth knowing
        yield _Unit(n, where, Message("assistant", **_known(reply)))


def _known(reply: "ParsedReply") -> dict[str, Any]:
    return {"usage": reply.usage, "model": reply.model, "finish": reply.finish}


def _time_of(row: dict[str, Any]) -> float | None:
    """When a row says that it was written, in seconds; None where it does not, or not in a way that is known.

    A number is seconds, or milliseconds where it is too large for that; a text is ISO 8601, UTC by default.
    """
    found = next((row[field] for field in TIMES if row.get(field) is not None), None)
    if isinstance(found, str):
        try:
            moment = datetime.fromisoformat(found)
        except ValueError:
            return None
        found = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    if not 0 <= found <= 1_000 * LATEST_S:
        return None
    return found / 1_000 if found > LATEST_S else float(found)


def _groups(units: Sequence[_Unit]) -> Iterable[Sequence[_Unit]]:
    """What the model said in one answer is one message, however many items it has."""
    if all(unit.dialect != "openai-responses" for unit in units):
        return [[unit] for unit in units]
    from refold.dialects import openai_responses

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
    texts = [unit.raw if unit.raw is not None else encoded(unit.value, unit.where) for unit in group]
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
    for dialect in RULES if opaque else ():
        if any(part.dialect in (None, dialect) for part in opaque):
            for value in DIALECTS[dialect].render(message)[0]:
                _shaped(value, dialect, where)


def _shaped(value: Any, dialect: str, where: str) -> None:
    """The same for a provider's JSON: once stored, it would stand in the way of every request."""
    items = value if isinstance(value, list) else [value]
    if DIALECTS[dialect].stands_apart(items[0]):
        return
    odd = _odd(items, dialect)
    if odd and (odd := _odd(DIALECTS[dialect].repair(items).messages, dialect)):
        raise MessageError(where, odd.split(" ", 2)[2].replace("this API", dialect))


def _odd(items: Sequence[Any], dialect: str) -> str:
    """What is wrong with them that nothing around them makes right, in a sentence."""
    judge = RULES[dialect]()
    judge.feed(items)
    return next((fault.message for fault in judge.violations if fault.rule in HOPELESS), "")
