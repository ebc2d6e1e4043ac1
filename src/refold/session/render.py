"""The next request, rendered: what was rendered before is kept as long as nothing shown has changed."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold.core import codec
from refold.core.errors import RefoldError
from refold.core.event import Line, Piece
from refold.core.message import Message, Text, ToolResult
from refold.core.pairing import NO_RESULT, MissingResult, OrphanResult, Slot, has_renamed_ids, repair_pairs
from refold.dialects.message_list import MessageList
from refold.dialects.registry import FORMATS, is_plain
from refold.dialects.repairs.repair import RepairedMessages, repair, unique_ids
from refold.dialects.rules.targets import RULES, Facts, RequestRules, has_cache_mark
from refold.dialects.shape import APART, without
from refold.models.count import Units
from refold.session.inline import Copy, copier
from refold.stores.record import Record

Place: TypeAlias = tuple[int, int, int]
"""Of a line: its event, which of its messages, and where the span begins that it stands for."""

REPAIR = 8
"""Tokens that a repair may add: a mark where nothing stood, a label before a text."""
UNSAID = "{}: {} cannot be said in {}; the record keeps it"
STALE = "{}: signed thinking is left out, since what stood before it was changed"
TORN = "{}: a lone surrogate is written as its escape"
UNTIED = "{}: its id is left out with the reasoning that came before it"
TOLD_APART = "{}: several calls came with one id; in their order, each has one of its own here"


class RenderRequest(msgspec.Struct, frozen=True):
    """What a page is made for."""

    dialect: str
    facts: Facts = Facts()
    binds_thinking: bool = False
    """The model refuses signed thinking that followed on something else than what stands before it now."""
    all_stale: bool = False
    """System text or tools changed, and with them what stands before all thinking."""
    repair: bool = True
    system_beside: bool = False
    """The caller gives system text of its own: the record's is not sent."""
    sends_own: bool = False
    """Fields that are for refold are sent as they came: a gateway's client addresses the provider."""


class Rendered(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    """The caller's own: it may do with them what it likes."""
    system: Any = None
    """What stands apart from the messages."""
    mended: int = 0
    """Tokens that mending added."""
    notices: tuple[str, ...] = ()
    """One for each thing mended, and one for each kind of thing that the dialect cannot say."""
    break_at: int | None = None
    """The earliest place that looks different from the request before."""
    settled: int = 0
    """How many messages there are up to the last that stands for something else; 0 where it is not known."""


class RenderedLine(NamedTuple):
    """A line in the words of the dialect."""

    values: list[Any]
    piece: Piece | None = None
    came: bool = False
    """It stands as its sender wrote it."""
    notes: tuple[str, ...] = ()
    unsent: int = 0
    """Tokens of a summary that only another provider can read."""


class Renderer:
    """One view of a record, as one kind of request."""

    def __init__(self, record: Record, ask: RenderRequest, counter: Units) -> None:
        self._record, self._ask, self._counter = record, ask, counter
        self._places: list[Place] = []
        self._before: list[Place] | None = None
        """The places of the request before, once what it showed has changed."""
        self._sent: Any = None
        self._spoken: dict[tuple[int, int], RenderedLine] = {}
        self._live = record.live
        self._start(-1)

    def _start(self, edition: int) -> None:
        self._edition, self._items, self._settled, self._unsent = edition, 0, 0, 0
        self._sheet = self._new_sheet()
        self._copies: list[tuple[Copy, dict[str, Any]]] = []
        self._judge = RULES[self._ask.dialect](self._ask.facts)
        self._notes: dict[str, list[int]] = {}
        begun_anew, self._live = self._live is not self._record.live, self._record.live
        if begun_anew or self._ask.binds_thinking or self._ask.dialect == "openai-responses":
            self._spoken = {}  # for those two, how a line is said depends on what stands before it
        lines = {(line.at, line.n) for item in self._record.live.items for line in item.lines}
        self._spoken = {key: said for key, said in self._spoken.items() if key in lines}

    def _new_sheet(self) -> MessageList:
        return MessageList(self._ask.dialect, self._ask.facts.system_inside)

    def unsent(self) -> int:
        """Tokens that are counted for what is shown and not sent: summaries that only another provider can
        read. They stay, whatever is compacted.
        """
        self._catch_up()
        return self._unsent

    def _catch_up(self) -> None:
        live = self._record.live
        if self._edition != live.edition:
            self._start(live.edition)
            self._before = self._places if self._before is None else self._before
            self._places = []
        items = live.items[self._items :]
        new = [line for item in items for line in item.lines]
        self._record.load(new)
        for item in items:
            for line in item.lines:
                self._unsent += self._put(self._sheet, line, self._notes).unsent
            self._settled = len(self._sheet.messages) if item.edit is not None else self._settled
        self._places += [
            (line.at, line.n, item.span.start) for item in items for line in item.lines if not line.apart
        ]
        self._items = len(live.items)

    def render(self) -> Rendered:
        self._catch_up()
        live, judge = self._record.live, self._judged()
        broken = None if self._before is None else _first_change(self._before, self._places)
        self._before = None
        if self._sheet.system != self._sent and self._sent is not None:
            broken = 0
        self._sent = self._sheet.system
        faults = _faults(judge)
        if faults and self._ask.repair:
            paired = not any(fault.rule in judge.PAIRING for fault in faults)
            return self._mended([line for item in live.items for line in item.lines], paired, broken)
        told = [*self._told(self._notes), *self._sheet.notices, *(f"{f.rule}: {f.message}" for f in faults)]
        messages = [copy(message) for copy, message in self._copies]
        return Rendered(messages, self._system(self._sheet), 0, tuple(told), broken, self._settled)

    def _judged(self) -> RequestRules:
        """What is judged is what leaves. The newest message may still grow, so it is judged every time."""
        sheet, known = self._sheet, len(self._copies) - 1 if self._copies else 0
        settled = max(0, len(sheet.messages) - 1)
        self._judge.feed(sheet.messages[known:settled])
        self._copies[known:] = [(copier(message), message) for message in sheet.messages[known:]]
        judge = self._judge.copy()
        judge.facts = self._facts(sheet)
        judge.feed(sheet.messages[settled:])
        return judge

    def _facts(self, sheet: MessageList) -> Facts:
        """With the cache marks of the system text, which count too."""
        facts, system = self._ask.facts, sheet.system
        sent = isinstance(system, list) and not self._ask.system_beside
        marks = sum(map(has_cache_mark, system)) if sent else 0
        return msgspec.structs.replace(facts, marks=facts.marks + marks) if marks else facts

    def _mended(self, lines: list[Line], paired: bool, broken: int | None) -> Rendered:
        slots, notices = (list[Slot](lines), list[str]()) if paired else repair_pairs(lines)
        self._record.load(lines)
        sheet, notes, tokens = self._new_sheet(), dict[str, list[int]](), 0
        for slot in slots:
            if isinstance(slot, Line):
                self._put(sheet, slot, notes)
                continue
            for value in map(_clean, FORMATS[self._ask.dialect].render(self._stand_in(slot))[0]):
                sheet.add(value, -1)
            tokens += REPAIR if isinstance(slot, OrphanResult) else self._missing_tokens
        tokens -= sum(line.tokens for line in {*lines} - {*_lines(slots)})
        facts = self._facts(sheet)
        made, judge = RepairedMessages(sheet.messages, []), self._verdict(sheet.messages, facts)
        if _faults(judge):
            known = {"no_prefill": facts.no_prefill, "store": facts.store, "marks": facts.marks}
            made = repair(self._ask.dialect, sheet.messages, **known)
            judge = self._verdict(made.messages, facts)
        if paired and any(fault.rule in judge.PAIRING for fault in judge.violations):
            return self._mended(lines, False, broken)
        _demand(judge)
        told = (*self._told(notes), *sheet.notices, *notices, *made.notices)
        messages = [copier(message)(message) for message in made.messages]
        added = tokens + REPAIR * len(made.notices)
        return Rendered(messages, self._system(sheet), added, told, broken)

    def _verdict(self, messages: list[dict[str, Any]], facts: Facts) -> RequestRules:
        judge = RULES[self._ask.dialect](facts)
        judge.feed(messages)
        return judge

    @cached_property
    def _missing_tokens(self) -> int:
        return self._counter.message(self._stand_in(MissingResult("", "")))

    def _system(self, sheet: MessageList) -> Any:
        whole = {"system": sheet.system}
        return copier(whole)(whole)["system"]

    def _put(self, sheet: MessageList, line: Line, notes: dict[str, list[int]]) -> RenderedLine:
        said = self._spoken.get((line.at, line.n))
        if said is None:
            said = self._spoken[line.at, line.n] = self._in_words(line)
        for value in said.values:
            sheet.add(value, line.at, said.piece, said.came)
        for note in said.notes:
            notes.setdefault(note, []).append(line.at)
        return said

    def _in_words(self, line: Line) -> RenderedLine:
        entry, dialect = self._record.entry(line.at), self._ask.dialect
        came = codec.came(entry)
        torn = b"\\ud" in entry.body or b"\\uD" in entry.body
        notes = [TORN] if torn and _clean(text := self._record.message(line).text) != text else []
        notes += [TOLD_APART] if line.calls and has_renamed_ids(line) else []
        is_row = came is not None and came.dialect == "flat"  # its text may be the JSON of its parts
        if came is not None and (came.dialect == dialect or (not is_row and is_plain(came.value, dialect))):
            value = came.value if self._ask.sends_own else _for_api(came.value, came.dialect)
            value = self._as_sent(line, _clean(value) if torn else value, notes)
            value = value if value is None else unique_ids(dialect, value, line)
            whole = came.dialect == dialect
            return RenderedLine([] if value is None else [value], came.piece, whole, tuple(notes))
        message = _with_tool(self._record.message(line), line)
        if came is None and not message.parts and message.role == "assistant":
            return RenderedLine([])  # an answer that never came
        if line.apart and dialect in APART:
            return RenderedLine([{APART[dialect]: message.text}], notes=tuple(notes))
        values, lost = FORMATS[dialect].render(message)
        if not values and message.role == "user":  # never left out, whatever it was
            mark = Message("user", (Text(f"[{', '.join(lost)}: cannot be shown here]"),))
            values, _ = FORMATS[dialect].render(mark)
        sealed = [self._counter.json(marker.value) for marker in message.markers if marker.is_sealed]
        unsent = line.tokens if sealed and not values else sum(sealed)
        cleaned = [_clean(value) for value in values]
        return RenderedLine(cleaned, notes=(*notes, *dict.fromkeys(lost)), unsent=unsent)

    def _as_sent(self, line: Line, value: Any, notes: list[str]) -> Any:
        """What came, less what an edit has made invalid."""
        if self._ask.binds_thinking and line.role == "assistant" and self._is_stale(line.at):
            from refold.dialects.repairs.anthropic import without_thinking

            new = without_thinking(value)
            notes += [STALE] if new is not value else []
            return new
        if isinstance(value, dict) and "id" in value and self._lost_its_reasoning(line, value):
            notes.append(UNTIED)
            return {key: inner for key, inner in value.items() if key != "id"}
        return value

    def _is_stale(self, at: int) -> bool:
        return self._ask.all_stale or any(at in span for span in self._record.live.state.stale)

    def _lost_its_reasoning(self, line: Line, value: dict[str, Any]) -> bool:
        """It is an item of Responses that came right after reasoning, which is hidden now."""
        if self._ask.dialect != "openai-responses" or line.role != "assistant" or not line.at:
            return False
        before = self._record.live.item_at(line.at - 1)
        hidden = before is not None and line.at - 1 not in {shown.at for shown in before.lines}
        if not hidden or value.get("type") in ("reasoning", "item_reference"):
            return False
        came = codec.came(self._record.entry(line.at - 1))
        return came is not None and isinstance(came.value, dict) and came.value.get("type") == "reasoning"

    def _told(self, notes: dict[str, list[int]]) -> list[str]:
        return [
            note.format(_places(places))
            if note in (STALE, TORN, UNTIED, TOLD_APART)
            else UNSAID.format(_places(places), note, self._ask.dialect)
            for note, places in notes.items()
        ]

    def _stand_in(self, slot: MissingResult | OrphanResult) -> Message:
        if isinstance(slot, MissingResult):
            return Message("tool", (ToolResult(slot.call, NO_RESULT, slot.tool or None, is_error=True),))
        tool = f" of {slot.line.tools[0]}" if slot.line.tools else ""
        text = self._record.message(slot.line).text
        return Message("user", (Text(f"[refold: result{tool} without its call]\n{text}"),))


def _for_api(value: Any, dialect: str) -> Any:
    """What came, without the fields that are for refold."""
    own = FORMATS[dialect].own
    if isinstance(value, list):
        return [without(item, own(item)) for item in value]
    return without(value, own(value))


def _with_tool(message: Message, line: Line) -> Message:
    """A result with the name of its tool, which its sender may not have said."""
    if line.answers is None or not any(line.tools) or any(result.tool for result in message.results):
        return message
    parts = tuple(
        msgspec.structs.replace(part, tool=line.tools[0]) if isinstance(part, ToolResult) else part
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts)


def _places(places: Sequence[int]) -> str:
    unique = list(dict.fromkeys(places))
    shown = ", ".join(f"#{at}" for at in unique[:3])
    return shown if len(unique) <= 3 else f"{shown} and {len(unique) - 3} more"


def _faults(judge: RequestRules) -> list[Any]:
    """An empty conversation is no request yet, and no fault."""
    return [fault for fault in judge.violations if fault.rule != "G2"]


def _demand(judge: RequestRules) -> None:
    """What is not valid must not leave."""
    for fault in _faults(judge):
        if fault.rule == "S1":
            raise RefoldError(f"The request cannot be sent and not be mended: {fault.message}")
        raise RefoldError(f"refold made an invalid view, which is a bug; please report it: {fault}")


def _lines(slots: Iterable[Slot]) -> list[Line]:
    there = [slot for slot in slots if not isinstance(slot, MissingResult)]
    return [slot.line if isinstance(slot, OrphanResult) else slot for slot in there]


def _first_change(before: Sequence[Place], after: Sequence[Place]) -> int | None:
    for old, new in zip(before, after, strict=False):
        if old != new:
            return min(old[-1], new[-1])
    return None if len(before) <= len(after) else before[len(after)][-1]


def _clean(value: Any) -> Any:
    """The same with every lone surrogate as its escape: it cannot be sent as UTF-8, and ids stay apart."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return value.encode("utf-8", "backslashreplace").decode()
            return value
        case dict():
            return {_clean(key): _clean(inner) for key, inner in value.items()}
        case list():
            return list(map(_clean, value))
    return value
