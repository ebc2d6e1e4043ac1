"""The next request, rendered: what was rendered before is kept as long as nothing shown has changed."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from refold.copies import Copy, copier
from refold.core import codec
from refold.core.check import Missing, Orphan, Slot, repair
from refold.core.errors import RefoldError
from refold.core.event import Line
from refold.core.message import Message, Text, ToolResult
from refold.formats import openai_responses
from refold.formats.dialects import FORMATS
from refold.formats.sheet import Sheet
from refold.record import Record
from refold.repairs.anthropic import without_thinking
from refold.repairs.targets import mend
from refold.rules.judge import Facts, Judge
from refold.rules.targets import JUDGES
from refold.tokens.count import Counter

Place: TypeAlias = tuple[int, int, int]
"""Of a line: its event, which of its messages, and where the span begins that it stands for."""


class Ask(msgspec.Struct, frozen=True):
    """What a page is made for."""

    dialect: str
    facts: Facts = Facts()
    binds_thinking: bool = False
    """The model refuses signed thinking that followed on something else than what stands before it now."""
    all_stale: bool = False
    """System text or tools changed, and with them what stands before all thinking."""
    repair: bool = True


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


class Page:
    """One view of a record, as one kind of request."""

    def __init__(self, record: Record, ask: Ask, counter: Counter) -> None:
        self._record, self._ask, self._counter = record, ask, counter
        self._places: list[Place] = []
        self._start(-1)

    def _start(self, edition: int) -> None:
        self._edition, self._items = edition, 0
        self._sheet = self._new_sheet()
        self._copies: list[tuple[Copy, dict[str, Any]]] = []
        self._judge = self._new_judge()
        self._lost: dict[str, list[int]] = {}

    def _new_sheet(self) -> Sheet:
        return Sheet(self._ask.dialect)

    def _new_judge(self) -> Judge:
        return JUDGES[self._ask.dialect](self._ask.facts)

    def render(self) -> Rendered:
        live, before = self._record.live, None
        if self._edition != live.edition:
            self._start(live.edition)
            before, self._places = self._places, []
        items = live.items[self._items :]
        new = [line for item in items for line in item.lines]
        self._record.load(new)
        self._put(self._sheet, new)
        self._places += [(line.at, line.n, item.span.start) for item in items for line in item.lines]
        self._items = len(live.items)
        judge = self._judged(self._sheet)
        broken = None if before is None else _first_change(before, self._places)
        faults = [fault for fault in judge.violations if fault.rule != "G2"]
        if faults and self._ask.repair:
            paired = not any(fault.rule in judge.PAIRING for fault in faults)
            return self._mended([line for item in live.items for line in item.lines], paired, broken)
        notices = [
            *self._unsaid(),
            *self._sheet.notices,
            *(f"{fault.rule}: {fault.message}" for fault in faults),
        ]
        messages = [copy(message) for copy, message in self._copies]
        return Rendered(messages, self._sheet.system, 0, tuple(notices), broken)

    def _judged(self, sheet: Sheet) -> Judge:
        """What is judged is what leaves. The newest message may still grow, so it is judged every time."""
        settled = max(0, len(sheet.messages) - 1)
        known = len(self._copies) - 1 if self._copies else 0
        self._judge.feed(sheet.messages[known:settled])
        self._copies[known:] = [(copier(message), message) for message in sheet.messages[known:]]
        judge = self._judge.copy()
        judge.feed(sheet.messages[settled:])
        return judge

    def _mended(self, lines: list[Line], paired: bool, broken: int | None) -> Rendered:
        slots, notices = (list[Slot](lines), list[str]()) if paired else repair(lines)
        self._record.load(lines)
        self._lost = {}
        sheet, tokens = self._new_sheet(), 0
        for slot in slots:
            if isinstance(slot, Line):
                self._put(sheet, [slot])
                continue
            message = self._stand_in(slot)
            tokens += self._counter.message(message)
            tokens -= slot.line.tokens if isinstance(slot, Orphan) else 0
            for value in map(_clean, FORMATS[self._ask.dialect].render(message)[0]):
                sheet.add(value, -1)
        tokens -= sum(line.tokens for line in {*lines} - {*_lines(slots)})
        facts = self._ask.facts
        made = mend(
            self._ask.dialect,
            sheet.messages,
            no_prefill=facts.no_prefill,
            store=facts.store,
            marks=facts.marks,
        )
        tokens += self._difference(sheet.messages, made.messages)
        judge = self._new_judge()
        judge.feed(made.messages)
        if paired and any(fault.rule in judge.PAIRING for fault in judge.violations):
            return self._mended(lines, False, broken)
        _demand(judge)
        notices = [*self._unsaid(), *sheet.notices, *notices, *made.notices]
        messages = [copier(message)(message) for message in made.messages]
        return Rendered(messages, sheet.system, tokens, tuple(notices), broken)

    def _difference(self, before: Iterable[Any], after: Iterable[Any]) -> int:
        old, new = {id(message): message for message in before}, {id(message): message for message in after}
        gone, come = old.keys() - new.keys(), new.keys() - old.keys()
        return sum(self._counter.json(new[n]) for n in come) - sum(self._counter.json(old[n]) for n in gone)

    def _put(self, sheet: Sheet, lines: Iterable[Line]) -> None:
        for line in lines:
            entry = self._record.entry(line.at)
            came = codec.came(entry)
            if came is None or came.dialect != self._ask.dialect:
                message = self._record.message(line)
                if came is None and not message.parts and message.role == "assistant":
                    continue  # an answer that never came
                rendered, lost = FORMATS[self._ask.dialect].render(message)
                for what in lost:
                    self._lost.setdefault(what, []).append(line.at)
                for value in rendered:
                    sheet.add(_clean(value), line.at)
                continue
            odd = b"\\ud" in entry.body or b"\\uD" in entry.body
            value = self._as_sent(line, _clean(came.value) if odd else came.value)
            if value is not None:
                sheet.add(value, line.at, came.piece, came=True)

    def _as_sent(self, line: Line, value: Any) -> Any:
        """What came, less what an edit has made invalid."""
        if self._ask.binds_thinking and line.role == "assistant" and self._is_stale(line.at):
            new = without_thinking(value)
            if new is not value:
                self._lost.setdefault(STALE, []).append(line.at)
            return new
        if self._ask.dialect == openai_responses.DIALECT and isinstance(value, dict) and "id" in value:
            return self._without_reasoning(line, value)
        return value

    def _is_stale(self, at: int) -> bool:
        return self._ask.all_stale or any(at in span for span in self._record.live.state.stale)

    def _without_reasoning(self, line: Line, value: dict[str, Any]) -> dict[str, Any]:
        """An item loses its id with the reasoning that came right before it."""
        before = self._record.live.item_at(line.at - 1) if line.at else None
        hidden = before is not None and line.at - 1 not in {shown.at for shown in before.lines}
        if not hidden or line.role != "assistant" or value.get("type") == "reasoning":
            return value
        came = codec.came(self._record.entry(line.at - 1))
        if came is None or not isinstance(came.value, dict) or came.value.get("type") != "reasoning":
            return value
        return {key: inner for key, inner in value.items() if key != "id"}

    def _unsaid(self) -> list[str]:
        return [
            what.format(_places(places))
            if what is STALE
            else f"{_places(places)}: {what} cannot be said in {self._ask.dialect}; the record keeps it"
            for what, places in self._lost.items()
        ]

    def _stand_in(self, slot: Missing | Orphan) -> Message:
        if isinstance(slot, Missing):
            text = "The call was interrupted: it never returned a result."
            return Message("tool", (ToolResult(slot.call, text, slot.tool or None, is_error=True),))
        tool = f" of {slot.line.tools[0]}" if slot.line.tools else ""
        text = self._record.message(slot.line).text
        return Message("user", (Text(f"[refold: result{tool} without its call]\n{text}"),))


STALE = "{}: signed thinking is left out, since what stood before it was changed"


def _places(places: Sequence[int]) -> str:
    unique = list(dict.fromkeys(places))
    shown = ", ".join(f"#{at}" for at in unique[:3])
    return shown if len(unique) <= 3 else f"{shown} and {len(unique) - 3} more"


def _demand(judge: Judge) -> None:
    """What is not valid must not leave. An empty conversation is no request yet, and no fault."""
    for fault in judge.violations:
        if fault.rule == "S1":
            raise RefoldError(f"The request cannot be sent and not be mended: {fault.message}")
        if fault.rule != "G2":
            raise RefoldError(f"refold made an invalid view, which is a bug; please report it: {fault}")


def _lines(slots: list[Slot]) -> list[Line]:
    there = [slot for slot in slots if not isinstance(slot, Missing)]
    return [slot.line if isinstance(slot, Orphan) else slot for slot in there]


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
