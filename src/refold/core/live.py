"""The view kept up to date: each event is applied once, and earlier events are read again only to undo."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

import msgspec

from refold.core.event import Called, Head, Line, Measured, Named, Pinned, Replaced, Span, Undone
from refold.core.message import Role
from refold.core.view import (
    ActiveEdits,
    Item,
    View,
    Words,
    corrections,
    display,
    is_valid_edit,
    merge,
    shown_at,
    without_replaced,
)


class PastReader(Protocol):
    """Reads the earlier events that undoing needs."""

    def facts(self, before: int, /) -> Iterable[Head]:
        """The heads of all events before a place, except for messages."""

    def lines(self, span: Span, /) -> Iterable[Line]:
        """The lines of the messages in a span."""


PERIOD_S = 600.0
"""How long model calls are remembered, for the limit on them."""


class Pin(msgspec.Struct, array_like=True):
    lines: list[Line]
    holds: bool = True


class State(msgspec.Struct, array_like=True):
    """The state of a view as a snapshot stores it: spans, counts and places, but no text."""

    version: int = 10
    """Version of this struct; snapshots of other versions are ignored."""
    next: int = 0
    """The next event to apply."""
    index: int = 0
    """Number of messages."""
    turn: int = 0
    step: int = 0
    total: int = 0
    """Tokens of all messages."""
    task: Line | None = None
    latest: int | None = None
    round: int = 0
    """Number of compactions of this view."""
    compacted: int | None = None
    """Place of the newest compaction."""
    open: dict[str, tuple[int, str]] = {}
    """Calls without a result: place and tool."""
    pins: dict[int, Pin] = {}
    items: list[tuple[Span, tuple[Line, ...], int | None, bool]] = []
    stale: list[Span] = []
    """Messages written after something that changed since: from the change to its event."""
    measured: Measured | None = None
    """The newest measured request, if nothing was changed since."""
    prefix: str | None = None
    """Digest of system text and tools of the newest measured request."""
    speaker: Role | None = None
    """Role of the newest message."""
    apart: list[Line] = []
    """The newest system text that is sent apart from the messages, if any."""
    spared: list[Span] = []
    """Spans of undone edits."""
    called: list[tuple[float, int]] = []
    """Recent model calls for summaries of this view: time and number."""
    spent: float = 0.0
    """USD for the summaries of all views."""
    corrected: dict[int, Line] = {}
    """Corrections, by the place of the message."""
    title: str | None = None
    model: str | None = None
    """The model of the newest answer, or the one named since."""
    carried: int = 0
    """Tokens that all requests up to now would have had together without any edit."""
    shown: int = 0
    """Tokens that they had with the edits."""
    rewritten: int = 0
    """Tokens that were sent again because something before them had changed."""
    changed: int | None = None
    """The earliest place that changed since the last answer."""
    fresh: int = 0
    """Tokens added since the last answer, including the answer."""
    withheld: list[Span] = []
    """Spans of active edits whose originals cannot be expanded."""


class Live:
    """One view, updated incrementally. Equal to `fold` over the same events."""

    def __init__(self, view: str, words: Words, state: State | None = None) -> None:
        self.view = view
        self.words = words
        self.state = state or State()
        self.items = [Item(i[0], i[1], words, i[2], i[3]) for i in self.state.items]
        self.state.items = []
        self._starts = [item.span.start for item in self.items]
        self.tokens = sum(item.tokens for item in self.items)
        self.edition = 0
        """Increases whenever a part of the view that was already shown changes."""

    def snapshot(self) -> State:
        return msgspec.structs.replace(self.state, items=[item.facts for item in self.items])

    def freeze(self) -> View:
        state = self.state
        kept = frozenset(line.at for line in self.kept.values())
        return View(
            tuple(self.items),
            kept,
            self.latest,
            state.next,
            state.step + 1,
            spared=tuple(sorted(set(state.spared))),  # an older snapshot may repeat one
            withheld=tuple(sorted(set(state.withheld))),
        )

    @property
    def latest(self) -> int | None:
        """Place of the latest user message, or of its correction."""
        at = self.state.latest
        if at is None:
            return None
        item = self.item_at(at)
        return at if item is None else shown_at(at, [item])

    @property
    def kept(self) -> dict[int, Line]:
        """Lines that no edit hides, by place: the task and pinned messages, or their corrections."""
        state = self.state
        lines = [*([state.task] if state.task else []), *state.apart]
        for pin in state.pins.values():
            if pin.holds:
                lines += pin.lines
        return {line.at: state.corrected.get(line.at, line) for line in without_replaced(lines, state.apart)}

    def is_withheld(self, at: int) -> bool:
        """True for a message that is hidden and cannot be expanded."""
        item = self.item_at(at)
        is_shown = item is None or any(line.at == at for line in item.lines)
        return not is_shown and any(at in span for span in self.state.withheld)

    def item_at(self, at: int) -> Item | None:
        i = bisect_right(self._starts, at) - 1
        return self.items[i] if i >= 0 and at in self.items[i].span else None

    def apply(self, head: Head | None, at: int, past: PastReader) -> None:
        """Apply the next event; `head` is None for one that does not concern views."""
        assert at == self.state.next, f"event {at} applied where {self.state.next} was expected"
        self.state.next = at + 1
        match head:
            case Line():
                self._add_message(head)
            case Replaced(view=self.view) if is_valid_edit(head):
                self._replace(head, past)
            case Pinned():
                self.state.pins[at] = Pin(list(head.lines))
                self._rebuild_around(head.lines, past)
            case Undone():
                self._undo(head, past)
            case Measured():
                self.state.model = head.model or self.state.model
                if head.view == self.view:
                    self._measure(head)
            case Called():
                self.state.spent += head.cost
                if head.view == self.view and head.calls:
                    recent = [one for one in self.state.called if one[0] > head.time - PERIOD_S]
                    self.state.called = [*recent, (head.time, head.calls)]
            case Named():
                if head.title is not None:
                    self.state.title = head.title
                if head.model is not None:
                    self.state.model = head.model

    def _add_message(self, line: Line) -> None:
        state = self.state
        if line.role == "assistant":
            self._add_request()
        state.fresh += line.tokens
        state.index += 1
        state.turn = line.turn
        state.step = line.step
        state.total += line.tokens
        state.speaker = line.role
        if line.asks:
            state.latest = line.at
            state.task = state.task or line
        call = state.open.pop(line.answers, None) if line.answers is not None else None
        if call is not None:
            for pin in state.pins.values():  # a result is pinned with its call
                if any(pinned.at == call[0] for pinned in pin.lines):
                    pin.lines.append(line)
        names = line.tools if len(line.tools) == len(line.calls) else ("",) * len(line.calls)
        state.open.update({id: (line.at, tool) for id, tool in zip(line.calls, names, strict=True)})
        self.items.append(Item(Span(line.at, line.at + 1), (line,), self.words))
        self._starts.append(line.at)
        self.tokens += line.tokens
        if line.apart:
            replaced = state.apart
            state.apart = [line]
            for old in replaced:
                self._hide(old.at)

    def _add_request(self) -> None:
        """Account for the request before an answer, as a provider's cache saw it."""
        state = self.state
        state.carried += state.total
        state.shown += self.tokens
        if state.changed is not None:
            first = self._overlapping(Span(state.changed, state.changed + 1))[0]
            after = sum(item.tokens for item in self.items[first:])
            state.rewritten += max(0, after - state.fresh)
            state.changed = None
        state.fresh = 0

    def _hide(self, at: int) -> None:
        """Hide system text that newer text replaced. It is not among the messages, so they do not change."""
        i = bisect_right(self._starts, at) - 1
        item = self.items[i]
        shown = without_replaced(item.lines, self.state.apart)
        self._splice(i, i + 1, [Item(item.span, shown, item.words, item.edit, item.merged)], is_change=False)

    def _replace(self, edit: Replaced, past: PastReader) -> None:
        first, last = self._overlapping(edit.span)
        cut = [item for item in self.items[first:last] if not edit.span.covers(item.span)]
        if not cut:
            self._correct(edit)
            follows = last < len(self.items) or not any(line.recalled for line in edit.lines)
            new = Item(edit.span, self._display(edit), self.words, edit.at)
            self._splice(first, last, [new], is_change=follows)  # memories change nothing sent
        elif not any(item.merged for item in cut):
            return
        else:  # merged items: earlier events tell where each ends
            active = ActiveEdits(self.view, past.facts(edit.at + 1))
            if edit.at not in active.edits:
                return
            self._correct(edit)
            self._rebuild(edit.span, active, past)
        if edit.round:
            self.state.round = edit.round
            self.state.compacted = edit.at
        if not edit.keeps_originals:
            self.state.withheld.append(edit.span)

    def _correct(self, edit: Replaced) -> None:
        """Update the corrections: the newest edit of a message decides."""
        for line in edit.lines:
            if line.place in edit.span:
                self.state.corrected.pop(line.place, None)
        self.state.corrected |= corrections([edit])

    def _undo(self, undone: Undone, past: PastReader) -> None:
        active = ActiveEdits(self.view, past.facts(undone.at))
        edits_before = dict(active.edits)
        pins_before = set(active.pins)
        active.apply(undone)
        state = self.state
        state.corrected = active.corrected
        state.spared = active.spared
        state.withheld = active.withheld
        state.compacted = max((at for at, edit in active.edits.items() if edit.round), default=None)
        for at, edit in (edits_before | active.edits).items():
            if (at in edits_before) != (at in active.edits):
                self._rebuild(edit.span, active, past)
        for at in pins_before ^ active.pins:
            state.pins[at].holds = at in active.pins
            self._rebuild_around(state.pins[at].lines, past, active)

    def _rebuild_around(
        self, lines: Iterable[Line], past: PastReader, active: ActiveEdits | None = None
    ) -> None:
        items = [self.item_at(line.at) for line in lines]
        for span in dict.fromkeys(item.span for item in items if item and item.edit is not None):
            active = active or ActiveEdits(self.view, past.facts(self.state.next))
            self._rebuild(span, active, past)

    def _rebuild(self, span: Span, active: ActiveEdits, past: PastReader) -> None:
        """Compute what is shown in and around `span` from the active edits."""
        first, last = self._overlapping(span)
        met = [item.span for item in self.items[first:last]]
        span = Span(min([span, *met]).start, max([span.end, *(other.end for other in met)]))
        items: list[Item] = []
        gap = span.start
        for edit in [edit for edit in active.outermost if edit.span.meets(span)]:
            items += self._unedited(Span(gap, edit.span.start), past)
            items.append(Item(edit.span, self._display(edit), self.words, edit.at))
            gap = edit.span.end
        items += self._unedited(Span(gap, span.end), past)
        self._splice(*self._overlapping(span), items)

    def _unedited(self, span: Span, past: PastReader) -> list[Item]:
        lines = past.lines(span) if span.start < span.end else ()
        apart = self.state.apart
        return [
            Item(Span(line.at, line.at + 1), without_replaced((line,), apart), self.words) for line in lines
        ]

    def _display(self, edit: Replaced) -> tuple[Line, ...]:
        return without_replaced(display(edit.lines, edit.span, self.kept), self.state.apart)

    def _overlapping(self, span: Span) -> tuple[int, int]:
        """The items that overlap a span, as a half-open range of indices."""
        first = bisect_left(self._starts, span.start)
        if first and self.items[first - 1].span.end > span.start:
            first -= 1
        return first, max(first, bisect_left(self._starts, span.end))

    def _splice(self, first: int, last: int, items: list[Item], *, is_change: bool = True) -> None:
        low = max(0, first - 1)  # with the neighbors, which may merge
        high = last + 1
        new = merge([*self.items[low:first], *items, *self.items[last:high]])
        self._note_change(_first_change(self.items[low:high], new) if is_change else None)
        self.tokens += sum(item.tokens for item in new) - sum(item.tokens for item in self.items[low:high])
        self.items[low:high] = new
        self._starts[low:high] = [item.span.start for item in new]
        self.edition += 1

    def _measure(self, measured: Measured) -> None:
        if None not in (self.state.prefix, measured.prefix) and measured.prefix != self.state.prefix:
            later = [span for span in self.state.stale if span.start >= measured.of]
            self.state.stale = [Span(0, measured.of), *later]
            self.edition += 1
        changed = self.state.stale[-1].end if self.state.stale else 0
        if measured.input and changed <= measured.made:  # else something changed after the request
            self.state.measured = measured
        self.state.prefix = measured.prefix or self.state.prefix

    def _note_change(self, changed: int | None) -> None:
        if changed is None:
            return
        self.state.measured = None
        if self.state.changed is None or changed < self.state.changed:
            self.state.changed = changed
        before = [span for span in self.state.stale if span.end <= changed]
        start = min([changed, *(span.start for span in self.state.stale if span.end > changed)])
        self.state.stale = [*before, Span(start, self.state.next)]


def _first_change(before: Sequence[Item], after: Sequence[Item]) -> int | None:
    """The earliest place that is shown differently."""
    old = [(line.at, line.n, item.span.start) for item in before for line in item.lines]
    new = [(line.at, line.n, item.span.start) for item in after for line in item.lines]
    for one, other in zip_longest(old, new):
        if one is None or other is None or one[:2] != other[:2]:
            return min(there[2] for there in (one, other) if there is not None)
    return None
