"""`fold` turns the events of a conversation into a view: the messages that the model sees.

This is the definition, short and slow. `core.live` keeps the same view up to date at a constant cost per
event; tests check that both are equal. `ActiveEdits` says for both which edits stand.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from refold.core.event import Event, Head, Line, Pinned, Replaced, Said, Span, Undone
from refold.core.message import Message

Words: TypeAlias = Callable[[Line], Message]


class Item(msgspec.Struct, frozen=True, eq=False):
    """A span of the record and the lines shown for it: its own, or those of an edit."""

    span: Span
    lines: tuple[Line, ...]
    words: Words
    edit: int | None = None
    """Place of the edit that shows it; of the newest, if empty items were merged."""
    merged: bool = False

    def __eq__(self, other: object) -> bool:
        """Equal spans and lines; where messages are read does not matter."""
        return isinstance(other, Item) and self.facts == other.facts

    @property
    def facts(self) -> tuple[Span, tuple[Line, ...], int | None, bool]:
        """What a snapshot stores of it."""
        return (self.span, self.lines, self.edit, self.merged)

    @property
    def shown(self) -> tuple[Message, ...]:
        return tuple(map(self.words, self.lines))

    @property
    def is_shortened(self) -> bool:
        """It shows one message shortened."""
        is_one = self.span.end == self.span.start + 1 and len(self.lines) == 1
        return is_one and self.lines[0].at == self.edit and self.lines[0].corrects is None

    @property
    def original(self) -> Message:
        """The original of a shortened message."""
        return self.words(msgspec.structs.replace(self.lines[0], at=self.span.start, n=0))

    @property
    def tokens(self) -> int:
        return sum(line.tokens for line in self.lines)

    @property
    def is_folded(self) -> bool:
        """It shows a summary."""
        return any(line.summary for line in self.lines)

    @property
    def is_corrected(self) -> bool:
        """It shows a correction."""
        return any(line.corrects is not None for line in self.lines)


class View(msgspec.Struct, frozen=True):
    """Every message of the record is covered by exactly one item."""

    items: tuple[Item, ...]
    kept: frozenset[int] = frozenset()
    """Places that no edit hides: the task and pinned messages; of a corrected message, its correction."""
    latest: int | None = None
    """Place of the latest user message, or of its correction."""
    next: int = 0
    """The next free place. The first planned edit gets it, and the others those after it."""
    step: int = 1
    """The next step."""
    handles: bool = True
    """Whether shortened messages and summaries show handles."""
    spared: tuple[Span, ...] = ()
    """Spans of undone edits: they are not reduced again unless nothing else is left."""
    withheld: tuple[Span, ...] = ()
    """Spans reduced with `keep_originals: false`, whose originals cannot be expanded."""

    def __repr__(self) -> str:
        """One line; the messages are in `messages`."""
        edits = {item.edit for item in self.items if item.edit is not None}
        return f"<refold.View messages={len(self.lines)} tokens={self.tokens} edits={len(edits)}>"

    @property
    def lines(self) -> list[Line]:
        return [line for item in self.items for line in item.lines]

    @property
    def messages(self) -> list[Message]:
        return [message for item in self.items for message in item.shown]

    @property
    def tokens(self) -> int:
        return sum(item.tokens for item in self.items)

    @property
    def tools(self) -> frozenset[str]:
        """Tools that the view mentions."""
        return frozenset(tool for line in self.lines for tool in line.tools)


def fold(events: Iterable[Event], view: str = "main") -> View:
    """The view after `events`.

    `ActiveEdits` says which edits stand, and the widest of them decide what is shown. The task, pinned
    messages and the newest system text that is sent apart stay shown inside them, or their corrections.
    """
    said: dict[int, Said] = {}
    pins: dict[int, list[Line]] = {}
    open_calls: dict[str, int] = {}
    active = ActiveEdits(view)
    next = 0
    for event in events:
        next = event.at + 1
        active.apply(event)
        match event:
            case Said(line=line):
                said[line.at] = event
                call = open_calls.pop(line.answers, None) if line.answers is not None else None
                for lines in pins.values():  # a result is pinned with its call
                    if any(pinned.at == call for pinned in lines):
                        lines.append(line)
                open_calls.update(dict.fromkeys(line.calls, line.at))
            case Pinned():
                pins[event.at] = list(event.lines)

    users = [event.line for event in said.values() if event.line.asks]
    apart = [event.line for event in said.values() if event.line.apart][-1:]
    pinned = [line for at in pins if at in active.pins for line in pins[at]]
    corrected = active.corrected
    stays = without_replaced([*users[:1], *apart, *pinned], apart)
    kept = {line.at: corrected.get(line.at, line) for line in stays}

    def words(line: Line) -> Message:
        if line.at in said:
            return said[line.at].message
        message = active.edits[line.at].shown[line.n]
        assert isinstance(message, Message)
        return message

    items: list[Item] = []
    covered: set[int] = set()
    for edit in active.outermost:
        inside = display(edit.lines, edit.span, kept)
        items.append(Item(edit.span, without_replaced(inside, apart), words, edit.at))
        covered.update(edit.span)
    for at, event in said.items():
        if at not in covered:
            items.append(Item(Span(at, at + 1), without_replaced((event.line,), apart), words))
    shown = merge(sorted(items, key=lambda item: item.span))
    return View(
        tuple(shown),
        kept=frozenset(line.at for line in kept.values()),
        latest=shown_at(users[-1].at, shown) if users else None,
        next=next,
        step=max((event.line.step for event in said.values()), default=0) + 1,
        spared=tuple(active.spared),
        withheld=tuple(active.withheld),
    )


class ActiveEdits:
    """The edits and pins in force.

    An edit takes effect unless it would split what another edit shows; this is decided once, when it comes.
    An Undone takes an edit or a pin out of force; undoing that puts it back, unless it would cross an edit
    made meanwhile.
    """

    def __init__(self, view: str, heads: Iterable[Head] = ()) -> None:
        self.view = view
        self.edits: dict[int, Replaced] = {}
        self.pins: set[int] = set()
        self.outermost: list[Replaced] = []
        """The edits that no other covers, in order: they decide what is shown."""
        self._heads: dict[int, Replaced | Pinned] = {}
        self._effects: dict[int, tuple[int, bool]] = {}
        """For each event: the edit or pin that it switched, and whether on or off."""
        for head in heads:
            self.apply(head)

    def apply(self, head: Head | Event) -> None:
        match head:
            case Replaced(view=self.view) if is_valid_edit(head):
                first = bisect_left(self.outermost, head.span.start, key=lambda edit: edit.span.end - 1)
                last = bisect_left(self.outermost, head.span.end, key=lambda edit: edit.span.start)
                if all(head.span.covers(edit.span) for edit in self.outermost[first:last]):
                    self.edits[head.at] = self._heads[head.at] = head
                    self.outermost[first:last] = [head]
                    self._effects[head.at] = (head.at, True)
            case Pinned():
                self._heads[head.at] = head
                self.pins.add(head.at)
                self._effects[head.at] = (head.at, True)
            case Undone() if self.holds(head.of):
                at, on = self._effects[head.of]
                if on or self.blocking_edit(head.of) is None:
                    self._switch(self._heads[at], not on)
                    self._effects[head.at] = (at, not on)

    @property
    def corrected(self) -> dict[int, Line]:
        """Corrections, by the place of the message."""
        return corrections(self.edits[at] for at in sorted(self.edits))

    @property
    def spared(self) -> list[Span]:
        """Spans of undone edits."""
        edits = [head for head in self._heads.values() if isinstance(head, Replaced)]
        return sorted({edit.span for edit in edits if edit.at not in self.edits})

    @property
    def withheld(self) -> list[Span]:
        """Spans of edits whose originals cannot be expanded."""
        return sorted({edit.span for edit in self.edits.values() if not edit.keeps_originals})

    def holds(self, at: int) -> bool:
        """True if the effect of the event at a place still holds."""
        head, on = self._effects.get(at, (None, False))
        return head is not None and (head in self.edits or head in self.pins) == on

    def blocking_edit(self, at: int) -> int | None:
        """The edit that keeps the effect of the event at a place from being reversed."""
        head = self._heads[self._effects[at][0]]
        if not isinstance(head, Replaced):
            return None
        return next((one.at for one in self.edits.values() if crosses(head.span, one.span)), None)

    def _switch(self, head: Replaced | Pinned, on: bool) -> None:
        if isinstance(head, Pinned):
            self.pins ^= {head.at}
            return
        if on:
            self.edits[head.at] = head
        else:
            del self.edits[head.at]
        self.outermost = _outermost(self.edits.values())


def is_valid_edit(edit: Replaced) -> bool:
    """True if its span is not empty and ends before the edit."""
    return 0 <= edit.span.start < edit.span.end <= edit.at


def crosses(one: Span, other: Span) -> bool:
    """True if they overlap and neither covers the other."""
    return one.meets(other) and not one.covers(other) and not other.covers(one)


def _outermost(edits: Iterable[Replaced]) -> list[Replaced]:
    result: list[Replaced] = []
    reach = 0
    for edit in sorted(edits, key=lambda edit: (edit.span.start, -edit.span.end, -edit.at)):
        if edit.span.end > reach:
            result.append(edit)
            reach = edit.span.end
    return result


def without_replaced(lines: Iterable[Line], apart: Sequence[Line]) -> tuple[Line, ...]:
    """The lines without system text, sent apart, that newer text has replaced."""
    return tuple(line for line in lines if not line.apart or line.place in {newest.at for newest in apart})


def corrections(edits: Iterable[Replaced]) -> dict[int, Line]:
    """Corrections by the place of the message; the newest edit that shows a message decides."""
    found: dict[int, Line] = {}
    for edit in edits:
        found |= {line.place: line for line in edit.lines if line.place in edit.span}
    return {at: line for at, line in found.items() if line.corrects is not None}


def shown_at(place: int, items: Iterable[Item]) -> int:
    """Place of the event that has a message as it is shown: its own, or its correction's."""
    return next((line.at for item in items for line in item.lines if line.place == place), place)


def display(lines: Sequence[Line], span: Span, kept: dict[int, Line]) -> tuple[Line, ...]:
    """The lines of an edit and the `kept` lines of its span, in order."""
    inside = {at: line for at, line in kept.items() if span.start <= at < span.end}
    if not inside:
        return tuple(lines)
    own = [line for line in inside.values() if not line.apart]
    shown: list[Line] = []
    for line in lines:
        if line.place in span:
            is_shown = inside.get(line.place, line).at == line.at
        else:  # unless it would be shown besides the kept message that it stands for
            is_shown = line.recalled or not _is_short_form(line, span, own)
        if is_shown:
            shown.append(line)
    missing = deque(sorted(inside.keys() - {line.place for line in shown}))
    result: list[Line] = []
    for line in shown:
        while missing and line.place in span and missing[0] < line.place:
            result.append(inside[missing.popleft()])
        result.append(line)
    return (*result, *(inside[at] for at in missing))


def _is_short_form(line: Line, span: Span, kept: Sequence[Line]) -> bool:
    """True if the line is a short form of a kept message."""
    return bool(kept) and (
        len(span) == 1
        or (line.answers is not None and line.answers in {one.answers for one in kept})
        or (bool(line.calls) and line.calls in {one.calls for one in kept})
    )


def merge(items: Iterable[Item]) -> list[Item]:
    """Join adjacent items that show nothing."""
    result: list[Item] = []
    for item in items:
        last = result[-1] if result else None
        if last and not last.lines and not item.lines and last.edit is not None and item.edit is not None:
            span = Span(last.span.start, item.span.end)
            result[-1] = Item(span, (), item.words, max(last.edit, item.edit), merged=True)
        else:
            result.append(item)
    return result
