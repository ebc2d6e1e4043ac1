"""Takes messages in: parses what users append, counts it once, and stores it as it came."""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from refold.config.validate import brief_repr
from refold.core.codec import dumps
from refold.core.draft import PART, Draft, LastRequest, number, part_id, split
from refold.core.errors import ConflictError, MessageError, SettingError
from refold.core.event import Event, Expiry, Piece, Said
from refold.core.message import Kind, Media, Message, Opaque
from refold.dialects import flat, openai_responses, replies
from refold.dialects.dialect import Dialect
from refold.dialects.registry import DIALECTS, TARGETS, is_plain, readable_as, recognize
from refold.dialects.replies import ParsedReply
from refold.dialects.rules.request import Facts
from refold.dialects.rules.targets import RULES
from refold.dialects.shape import kind_of, own_id
from refold.models.count import Units
from refold.session.streams import chunks_of, is_async_stream, is_stream
from refold.session.to_json import EXPECTED, checked, encoded, plain, to_json
from refold.session.validate import expiry_of

if TYPE_CHECKING:
    from refold.session.conversation import Conversation
    from refold.session.tools import Toolbox

UNREPAIRABLE = ("S1", "A11", "A14", "A15", "R9")
"""Rules that a message breaks by itself and that no repair fixes."""
TIMES = ("created_at", "createdAt", "timestamp")
"""Fields of a row with the time at which it was written."""
LATEST_S = 100_000_000_000
"""Seconds up to the year 5138; larger numbers are milliseconds."""
UNDERSTOOD = ("text", "tool_use", "tool_result", "function_call", "function_call_output")
"""Types that have parts of their own: as opaque parts they would escape all rules."""


class _MessageFields(msgspec.Struct, frozen=True):
    """What a caller passes along with a message, validated."""

    id: str | None = None
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    expiry: Expiry | None = None
    tools: tuple[str, ...] = ()


class _Unit(NamedTuple):
    """What becomes one message: a refold message, or JSON in some dialect."""

    where: str
    values: list[Any]
    """One, or the items of one answer."""
    raws: list[bytes | None]
    """How they were written, where that is known."""
    dialect: str | None = None
    reply: ParsedReply | None = None

    def has_answer_items(self) -> bool:
        """True for items of an answer, which are one message however many they are."""
        if self.dialect is None or not DIALECTS[self.dialect].has_items:
            return False
        role = openai_responses.role_of(self.values[0], self.where) if self.reply is None else "assistant"
        return role == "assistant"


class ParsedMessages(NamedTuple):
    drafts: list[Draft]
    first: list[int]
    """For each value that was passed, the index of its first draft."""
    is_stream: bool = False
    """The values were the chunks of one reply."""


class Intake(NamedTuple):
    """How messages are parsed and counted."""

    counter: Units
    default: str
    """The dialect of a message that could be in several."""
    dialect: str | None = None
    """The dialect of all messages, if it is known."""
    reads_own: bool = True
    """Fields such as `expiry` and `tags` are for refold, unless the API has fields of that name."""

    def take(
        self,
        values: Sequence[object],
        where: Callable[[int], str] = "messages[{}]".format,
        raws: Sequence[bytes] | None = None,
        **fields: Any,
    ) -> ParsedMessages:
        """Parses messages, SDK objects, whole replies, or the chunks of a stream.

        One of several values may be a stream, too, or the list of its chunks. `fields` are id, tags, kind,
        expiry and tools; `raws` has the JSON of each value, if it was read as text.

        Raises:
            MessageError: one of them cannot be stored.
            SettingError: the expiry has a field that is not known, or a value that is not allowed.
        """
        given = _MessageFields()
        if fields:
            if fields.get("expiry") is not None:
                fields["expiry"] = expiry_of(fields["expiry"])
            given = checked(fields, _MessageFields, where(0))
            _require_id(given.id, where(0))
        json = list[Any]()
        for n, value in enumerate(values):
            if is_stream(value) or is_async_stream(value):
                value = chunks_of(value, where(n))
            if isinstance(value, list | tuple):
                json.append([plain(chunk, f"{where(n)}[{m}]") for m, chunk in enumerate(value)])
            else:
                json.append(plain(value, where(n)))
        stream = _joined(json, where(0).removesuffix("[0]"))
        if stream is not None and where(0) == where(1):  # a single chunk, not in a list
            raise MessageError(where(0), "is a chunk of a stream; append the stream, or all that came of it")
        found = [_units_of(stream, where(0))] if stream is not None else self._units(json, where, raws)
        units = list[_Unit]()
        unit_of = list[int]()  # for each value, the unit that it begins or belongs to
        before: _Unit | None = None
        for new in found:
            place = len(units)
            for unit in new:
                is_item = unit.has_answer_items()
                if is_item and before is not None and before.reply is unit.reply:
                    place = min(place, len(units) - 1)
                    before.values.extend(unit.values)
                    before.raws.extend(unit.raws)
                    continue
                units.append(unit)
                before = unit if is_item else None
            unit_of.append(place)
        drafts = list[Draft]()
        first = list[int]()
        for unit in units:
            first.append(len(drafts))
            drafts += self._drafts(unit, given)
        return ParsedMessages(drafts, [first[n] for n in unit_of], stream is not None)

    def _units(
        self, values: list[Any], where: Callable[[int], str], raws: Sequence[bytes] | None
    ) -> Iterable[list[_Unit]]:
        """The units of each value; several for a reply."""
        dialects = [self.dialect or recognize(value) for value in values]
        default = next((dialect for dialect in dialects if dialect in TARGETS), self.default)
        has_rows = "flat" in dialects
        for n, value in enumerate(values):
            reply = None
            if isinstance(value, list):
                reply = _joined(value, where(n))
                if reply is None:
                    raise MessageError(where(n), f"{EXPECTED}, got list, which is not the chunks of a stream")
            elif _may_be_reply(value):
                reply = replies.take(value, where(n))
            if isinstance(value, Message):
                yield [_Unit(where(n), [value], [None])]
            elif reply is not None:
                yield _units_of(reply, where(n))
            else:
                is_row = has_rows and isinstance(value.get("content"), str)
                dialect = dialects[n] or ("flat" if is_row else readable_as(value, default))
                if dialect != "flat":
                    _require_content(value, where(n))
                yield [_Unit(where(n), [value], [raws[n] if raws else None], dialect)]

    def _drafts(self, unit: _Unit, given: _MessageFields) -> list[Draft]:
        rest: dict[str, Any] = {name: getattr(given, name) for name in ("tags", "kind", "expiry", "tools")}
        if unit.dialect is None:
            return self._drafts_of_message(unit, given.id, rest)
        dialect = DIALECTS[unit.dialect]
        own = dict[str, Any]()  # of several items that are one message, the fields of the first
        for name in dialect.own_fields(unit.values[0]):
            if unit.values[0].get(name) is not None:
                own[name] = unit.values[0][name]
        reads_own = self.reads_own and unit.reply is None  # a provider's fields are not for refold
        if reads_own and own:
            rest |= _read_own(own, given, unit.where)
        drafts: list[Draft] = []
        for value, raw, piece in _pieces(unit, dialect.results):
            message = dialect.parse(value, unit.where)
            if unit.dialect == "flat":
                _require_sendable(message, unit.where)
                rest["time"] = _time_of(value)
                if message.results:
                    return self._steps(message, value, given.id, rest)
            elif not is_plain(value, dialect):
                _require_repairable(value, dialect, unit.where)
            facts = _facts_of(unit.reply) if unit.reply and not drafts else {}
            id = part_id(given.id or (message.id if reads_own else None), len(drafts))
            message = msgspec.structs.replace(message, id=id, **facts)
            unread = [*dialect.unread(value), *([] if self.reads_own else [own])]
            draft = Draft(
                message,
                self.counter.message(message) + sum(map(self.counter.json, filter(None, unread))),
                unit.dialect,
                raw,
                piece=piece,
                apart=dialect.stands_apart(value),
                is_item=dialect.has_items,
                before=piece.n if piece else None,
                **rest,
            )
            drafts.append(draft)
        return drafts

    def _drafts_of_message(self, unit: _Unit, id: str | None, rest: dict[str, Any]) -> list[Draft]:
        """The drafts of a refold message, one for each tool result in it."""
        message = checked(unit.values[0], Message, unit.where)
        if message.role == "tool" and not (message.parts and len(message.results) == len(message.parts)):
            raise MessageError(f"{unit.where}.parts", "a tool message has tool results and nothing else")
        _require_sendable(message, unit.where)
        _require_id(message.id, unit.where)
        if id is not None:
            message = msgspec.structs.replace(message, id=id)
        parts = split(message)
        return [
            Draft(part, self.counter.message(part), **rest, before=n if len(parts) > 1 else None)
            for n, part in enumerate(parts)
        ]

    def _steps(self, message: Message, record: Any, id: str | None, rest: dict[str, Any]) -> list[Draft]:
        """A record of several steps becomes a message for each; the first has the record as its `meta`."""
        parts = [part for step in flat.steps(message) for part in split(step)]
        parts[0] = msgspec.structs.replace(parts[0], meta=record)
        drafts = list[Draft]()
        for n, part in enumerate(parts):
            part = msgspec.structs.replace(part, id=part_id(id or message.id, n))
            drafts.append(Draft(part, self.counter.message(part), **rest))
        return drafts


def _read_own(own: dict[str, Any], given: _MessageFields, where: str) -> dict[str, Any]:
    """The tags and the expiry in fields of a message, unless the caller gave others.

    Raises:
        MessageError: one of these fields is not valid.
    """
    if own.get("id", "") != "" and own_id(own["id"]) is None:
        raise MessageError(f"{where}.id", f"expected a text or a whole number, got {brief_repr(own['id'])}")
    found = dict[str, Any]()
    if "tags" in own and not given.tags:
        found["tags"] = checked({"tags": own["tags"]}, _MessageFields, where).tags
    if "expiry" in own and given.expiry is None:
        try:
            found["expiry"] = expiry_of(own["expiry"], f"{where}.expiry")
        except SettingError as error:
            raise MessageError(error.where, error.problem) from error
    return found


def _require_id(id: str | None, where: str) -> None:
    """Raises MessageError if the id is empty."""
    if id == "":
        raise MessageError(f"{where}.id", "an id has at least one character; leave it out instead")


def _may_be_reply(value: Any) -> bool:
    """True for a reply or a chunk of one, and for items of Responses; false for other messages."""
    return isinstance(value, dict) and ("role" not in value or "type" in value)


def _joined(values: Sequence[Any], where: str) -> ParsedReply | None:
    """The reply whose chunks these are; None if they are something else."""
    if not values or not _may_be_reply(values[0]):
        return None
    return replies.collect(values, where)


def _require_content(value: dict[str, Any], where: str) -> None:
    """Raises MessageError if it is a user's or a system message without content."""
    needs_content = value.get("role") in ("user", "system", "developer")
    if needs_content and value.get("content") is None and kind_of(value) in (None, "message"):
        raise MessageError(f"{where}.content", "is missing: expected a text or a list of parts")


def _units_of(reply: ParsedReply, where: str) -> list[_Unit]:
    if not reply.messages:  # it failed; its usage is recorded
        return [_Unit(where, [Message("assistant", **_facts_of(reply))], [None])]
    for message in reply.messages:
        to_json(message, where)  # joined chunks may not be valid JSON
    return [_Unit(where, [message], [None], reply.dialect, reply) for message in reply.messages]


def _facts_of(reply: ParsedReply) -> dict[str, Any]:
    return {"usage": reply.usage, "model": reply.model, "finish": reply.finish}


def _time_of(row: dict[str, Any]) -> float | None:
    """The time at which a row was written, in seconds; None if it is unset or in an unknown format.

    A number is seconds, or milliseconds if it is too large for that; a text is ISO 8601, UTC by default.
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


def _pieces(unit: _Unit, results: Callable[[Any], list[int]]) -> Iterable[tuple[Any, bytes, Piece | None]]:
    """A message, or each tool result in it and the rest: the JSON, decoded and as text."""
    texts = list[bytes]()
    for value, raw in zip(unit.values, unit.raws, strict=True):
        texts.append(raw if raw is not None else encoded(value, unit.where))
    if len(texts) > 1:
        return [(unit.values, b"[" + b",".join(texts) + b"]", None)]
    whole = unit.values[0]
    found = results(whole)
    count = len(whole["content"]) if found else 0
    if not found or count == 1:
        return [(whole, texts[0], None)]
    rest = tuple(n for n in range(count) if n not in found)
    places = [*((n,) for n in found), *([rest] if rest else [])]
    written = _written(texts[0], places)
    pieces = list[tuple[Any, bytes, Piece | None]]()
    for n, blocks in enumerate(places):
        value = {**whole, "content": [whole["content"][block] for block in blocks]}
        pieces.append((value, written[n] if written else dumps(value), Piece(n, len(places), blocks)))
    return pieces


def _written(text: bytes, places: Sequence[Sequence[int]]) -> list[bytes] | None:
    """The pieces of a message with numbers as they were written; None if they must be encoded again."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        blocks = msgspec.json.decode(fields["content"], type=list[msgspec.Raw])
    except msgspec.DecodeError:  # a lone surrogate
        return None
    pieces = list[bytes]()
    for place in places:
        fields["content"] = msgspec.Raw(msgspec.json.encode([blocks[n] for n in place]))
        pieces.append(msgspec.json.encode(fields))
    return pieces


def _require_sendable(message: Message, where: str) -> None:
    """Raises MessageError if no provider would accept the message in any form."""
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
    for name in RULES if opaque else ():
        if any(part.dialect in (None, name) for part in opaque):
            for value in DIALECTS[name].render(message)[0]:
                _require_repairable(value, DIALECTS[name], where)


def _require_repairable(value: Any, dialect: Dialect, where: str) -> None:
    """Raises MessageError if it would make every later request invalid."""
    items = value if isinstance(value, list) else [value]
    if dialect.stands_apart(items[0]):
        return
    problem = _unrepairable(items, dialect)
    if problem:
        problem = _unrepairable(dialect.repair(items, [], Facts()), dialect)
    if problem:
        raise MessageError(where, problem.split(" ", 2)[2].replace("this API", dialect.name))


def _unrepairable(items: Sequence[Any], dialect: Dialect) -> str:
    """Which rule they break whatever stands around them, in a sentence."""
    rules = RULES[dialect.name]()
    rules.feed(items)
    return next((fault.message for fault in rules.violations if fault.rule in UNREPAIRABLE), "")


# Storing them


def append_drafts(
    chat: "Conversation", toolbox: "Toolbox", drafts: Sequence[Draft], after: int | None = None
) -> list[int]:
    """Stores drafts and returns their places; a message whose id is known is stored once.

    `after` is the number of messages that the conversation must have until then.

    Raises:
        ConflictError: it has more or fewer messages; nothing was stored.
    """
    record = chat.record
    ids = [draft.message.id for draft in drafts if draft.message.id is not None]
    known: dict[str, int] = {}

    def build() -> Sequence[Event]:
        if after not in (None, record.live.state.index):
            raise ConflictError(f"{record.key.conversation!r} no longer has {after} messages")
        known.clear()
        if ids:
            known.update(record.store.find(record.key, ids))
        new = list[Draft]()
        seen = set(known)
        for draft in drafts:
            id = draft.message.id
            if id is None:
                new.append(draft)
            elif id not in seen and id.partition(PART)[0] not in known:
                new.append(draft)
                seen.add(id)
        return toolbox.leased(number(new, record.live.state, chat.last, time.time()))

    measured = record.live.state.measured
    places = list[int]()  # of messages without an id
    for event in record.append(build):
        if not isinstance(event, Said):
            continue
        if event.message.id is None:
            places.append(event.at)
        else:
            known[event.message.id] = event.at
        usage = event.message.usage
        if usage is not None:
            if chat.last.counted and usage.input and usage.calls == 1:
                chat.meter.learn(chat.last.counted, usage.input, measured)
            chat.last = LastRequest(record.view, model=chat.model)  # a request is measured once
    unnamed = iter(places)
    found = list[int]()
    for draft in drafts:
        id = draft.message.id
        if id is None:
            found.append(next(unnamed))
        else:
            found.append(known.get(id, known.get(id.partition(PART)[0], 0)))
    return found
