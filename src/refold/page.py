"""The next request, rendered: what was rendered before is kept as long as nothing shown has changed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from refold.core import codec
from refold.core.check import Check, Missing, Order, Orphan, Slot, repair
from refold.core.errors import RefoldError
from refold.core.event import Line
from refold.core.message import Message, Text, ToolResult
from refold.formats import openai_chat
from refold.record import Record
from refold.tokens.count import count_message

Copy: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
Place: TypeAlias = tuple[int, int, int]
"""Of a line: its event, which of its messages, and where the span begins that it stands for."""


class Rendered(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    """The caller's own: it may do with them what it likes."""
    mended: int = 0
    """Tokens that mending added."""
    notices: tuple[str, ...] = ()
    """One for each thing mended."""
    break_at: int | None = None
    """The earliest place that looks different from the request before."""


class Page:
    """One view of a record in one dialect."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._places: list[Place] = []
        self._start(-1)

    def _start(self, edition: int) -> None:
        self._edition, self._items = edition, 0
        self._check, self._order = Check(), Order()
        self._messages: list[tuple[Copy, dict[str, Any]]] = []

    def render(self) -> Rendered:
        live, before = self._record.live, None
        if self._edition != live.edition:
            self._start(live.edition)
            before, self._places = self._places, []
        items = live.items[self._items :]
        new = [line for item in items for line in item.lines]
        self._record.load(new)
        rendered = [message for line in new for message in self._line(line)]
        self._messages += [(_copier(message), message) for message in rendered]
        self._places += [(line.at, line.n, item.span.start) for item in items for line in item.lines]
        self._items = len(live.items)
        for judge in (self._check, self._order):
            judge.feed(map(_seen, rendered))
        broken = None if before is None else _first_change(before, self._places)
        if self._order.kept and not self._order.waiting:
            _demand(self._check)
            return Rendered([copy(message) for copy, message in self._messages], break_at=broken)
        return self._mended([line for item in live.items for line in item.lines], broken)

    def _mended(self, lines: list[Line], broken: int | None) -> Rendered:
        slots, notices = repair(lines)
        self._record.load(lines)
        messages, tokens = list[dict[str, Any]](), 0
        for slot in slots:
            if isinstance(slot, Line):
                messages += self._line(slot)
            else:
                message = self._stand_in(slot)
                tokens += count_message(message)
                tokens -= slot.line.tokens if isinstance(slot, Orphan) else 0
                messages += map(_clean, openai_chat.render(message))
        tokens -= sum(line.tokens for line in {*lines} - {*_lines(slots)})
        judge = Check()
        judge.feed(map(_seen, messages))
        _demand(judge)
        return Rendered(messages, tokens, tuple(notices), broken)

    def _line(self, line: Line) -> list[dict[str, Any]]:
        entry = self._record.entry(line.at)
        came = codec.raw_json(entry, openai_chat.DIALECT)
        if came is None:
            return [_clean(message) for message in openai_chat.render(self._record.message(line))]
        return [_clean(came) if b"\\ud" in entry.body or b"\\uD" in entry.body else came]

    def _stand_in(self, slot: Missing | Orphan) -> Message:
        if isinstance(slot, Missing):
            text = "The call was interrupted: it never returned a result."
            return Message("tool", (ToolResult(slot.call, text, slot.tool or None, is_error=True),))
        tool = f" of {slot.line.tools[0]}" if slot.line.tools else ""
        text = self._record.message(slot.line).text
        return Message("user", (Text(f"[refold: result{tool} without its call]\n{text}"),))


def _demand(judge: Check) -> None:
    """What is not valid must not leave. An empty conversation is no request yet, and no fault."""
    broken = [violation for violation in judge.violations if violation.rule != "G2"]
    if broken:
        raise RefoldError(f"refold made an invalid view, which is a bug; please report it: {broken[0]}")


def _lines(slots: list[Slot]) -> list[Line]:
    there = [slot for slot in slots if not isinstance(slot, Missing)]
    return [slot.line if isinstance(slot, Orphan) else slot for slot in there]


def _seen(message: dict[str, Any]) -> Line:
    """A rendered message as its reader sees it: what is judged is what leaves."""
    role = message["role"]
    calls = tuple(call["id"] for call in message.get("tool_calls") or ()) if role == "assistant" else ()
    return Line(0, role, 0, 0, 0, calls, message.get("tool_call_id") if role == "tool" else None)


def _first_change(before: Sequence[Place], after: Sequence[Place]) -> int | None:
    for old, new in zip(before, after, strict=False):
        if old != new:
            return min(old[-1], new[-1])
    return None if len(before) <= len(after) else before[len(after)][-1]


def _copier(message: dict[str, Any]) -> Copy:
    """How to copy a message down to its leaves: every step does it for hundreds of them."""
    nested = [key for key, value in message.items() if isinstance(value, dict | list)]
    if not nested:
        return dict.copy
    if nested == ["tool_calls"] and all(map(_is_plain_call, message["tool_calls"])):
        return _copy_calls
    return _copy


def _is_plain_call(call: Any) -> bool:
    nested = [key for key, value in call.items() if isinstance(value, dict | list)]
    return nested == ["function"] and all(isinstance(value, str) for value in call["function"].values())


def _copy_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _copy(message: dict[str, Any]) -> dict[str, Any]:
    new = message.copy()
    for key, inner in message.items():
        if type(inner) is dict:
            new[key] = _copy(inner)
        elif type(inner) is list:
            new[key] = _copy_list(inner)
    return new


def _copy_list(values: list[Any]) -> list[Any]:
    return [_copy(v) if type(v) is dict else _copy_list(v) if type(v) is list else v for v in values]


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
