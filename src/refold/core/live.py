"""The view kept up to date: each event is applied once, and the past is read again only to undo."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol, TypeAlias

import msgspec

from refold.core.event import Line, Named, Pinned, Span, Undone
from refold.core.message import Role
from refold.core.view import (
    Item,
    View,
    Words,
    corrections,
    crosses,
    current,
    display,
    merge,
    shown_at,
    sound,
)


class ReplacedHead(msgspec.Struct, frozen=True):
    """A Replaced without its words."""

    at: int
    view: str
    span: Span
    lines: tuple[Line, ...]
    round: int = 0
    keeps_originals: bool = True


class MeasuredHead(msgspec.Struct, frozen=True, array_like=True):
    """A Measured without its words: what was counted for a request, and what it took."""

    at: int
    view: str
    of: int
    estimate: int
    input: int
    model: str | None = None
    prefix: str | None = None
    made: int = 0


class CalledHead(msgspec.Struct, frozen=True, array_like=True):
    """A Called without its words."""

    at: int
    view: str
    time: float
    calls: int
    cost: float


Head: TypeAlias = Line | ReplacedHead | Undone | Pinned | MeasuredHead | CalledHead | Named
"""An event without its words. A Said is its line."""


class PastReader(Protocol):
    """The part of the past that undoing needs."""

    def facts(self, before: int, /) -> Iterable[Head]:
        """The heads of all events before a place, but for what was said."""

    def lines(self, span: Span, /) -> Iterable[Line]:
        """What was said in a span."""


PERIOD_S = 600.0
"""For which calls are remembered: a limit counts them."""


class Pin(msgspec.Struct, array_like=True):
    lines: list[Line]
    holds: bool = True


class State(msgspec.Struct, array_like=True):
    """What a snapshot keeps: spans, counts and places, never what was said."""

    version: int = 9
    """Of this shape: a snapshot of another one is passed over."""
    next: int = 0
    """The first place not yet applied."""
    index: int = 0
    """Messages said."""
    turn: int = 0
    step: int = 0
    total: int = 0
    """Tokens said."""
    task: Line | None = None
    latest: int | None = None
    round: int = 0
    """Compactions of this view."""
    compacted: int | None = None
    """Place of the newest compaction."""
    open: dict[str, tuple[int, str]] = {}
    """Calls not answered yet: place and tool."""
    pins: dict[int, Pin] = {}
    items: list[tuple[Span, tuple[Line, ...], int | None, bool]] = []
    stale: list[Span] = []
    """Where what was said followed on something that was changed since: from the change to its event."""
    gauge: MeasuredHead | None = None
    """The newest measurement, if nothing was changed since."""
    prefix: str | None = None
    """What stood before the messages when it was last measured, as a digest."""
    speaker: Role | None = None
    """Whose the newest message is."""
    apart: list[Line] = []
    """The newest system text that stands apart, if there is any."""
    spared: list[Span] = []
    """Of edits that were taken back."""
    called: list[tuple[float, int]] = []
    """When models were asked for summaries of this view, and how often: the newest."""
    spent: float = 0.0
    """USD for the summaries of all views."""
    corrected: dict[int, Line] = {}
    """What somebody put in the place of messages."""
    title: str | None = None
    model: str | None = None
    """Of the newest answer that says it, or as it was named since."""
    carried: int = 0
    """Tokens that all requests up to now would have had together, had nothing ever been edited."""
    shown: int = 0
    """Tokens that they had."""
    rewritten: int = 0
    """Tokens in them that had been sent before, after something that was changed since."""
    changed: int | None = None
    """The earliest place that was changed since the last answer."""
    fresh: int = 0
    """Tokens said since, the answer's own among them."""
    withheld: list[Span] = []
    """Of edits in force whose originals cannot be expanded."""


class Live:
    """One named view, incrementally. Equal to `fold` over the same events."""

    def __init__(self, view: str, words: Words, state: State | None = None) -> None:
        self.view, self.words = view, words
        self.state = state or State()
        self.items = [Item(i[0], i[1], words, i[2], i[3]) for i in self.state.items]
        self.state.items = []
        self._starts = [item.span.start for item in self.items]
        self.tokens = sum(item.tokens for item in self.items)
        self.edition = 0
        """Grows whenever what was already shown changes."""

    def snapshot(self) -> State:
        items = [(item.span, item.lines, item.edit, item.merged) for item in self.items]
        return msgspec.structs.replace(self.state, items=items)

    def freeze(self) -> View:
        state = self.state
        kept = frozenset(line.at for line in self.kept.values())
        facts = (kept, self.latest, state.next, state.step + 1)
        spared, withheld = (tuple(sorted(set(spans))) for spans in (state.spared, state.withheld))
        return View(tuple(self.items), *facts, spared=spared, withheld=withheld)

    @property
    def latest(self) -> int | None:
        """Where the words of the latest user message are: at its place, or at that of its correction."""
        at = self.state.latest
        item = None if at is None else self.item_at(at)
        return at if at is None or item is None else shown_at(at, [item])

    @property
    def kept(self) -> dict[int, Line]:
        """What stays in sight whatever covers it, by place: the task, what is pinned, or its correction."""
        task, apart = [self.state.task] if self.state.task else [], self.state.apart
        pinned = [line for pin in self.state.pins.values() if pin.holds for line in pin.lines]
        corrected = self.state.corrected
        return {line.at: corrected.get(line.at, line) for line in current([*task, *apart, *pinned], apart)}

    def is_withheld(self, at: int) -> bool:
        """True for a message that is hidden and cannot be expanded."""
        item = self.item_at(at)
        is_shown = item is None or any(line.at == at for line in item.lines)
        return not is_shown and any(at in span for span in self.state.withheld)

    def item_at(self, at: int) -> Item | None:
        i = bisect_right(self._starts, at) - 1
        return self.items[i] if i >= 0 and at in self.items[i].span else None

    def apply(self, head: Head | None, at: int, recall: PastReader) -> None:
        """Events come in order, each once; `head` is None for one that views pass over."""
        assert at == self.state.next, f"event {at} applied where {self.state.next} was expected"
        self.state.next = at + 1
        match head:
            case Line():
                self._say(head)
            case ReplacedHead(view=self.view) if sound(head):
                self._replace(head, recall)
            case Pinned():
                self.state.pins[at] = Pin(list(head.lines))
                self._show_again(head.lines, recall)
            case Undone():
                self._undo(head, recall)
            case MeasuredHead():
                self.state.model = head.model or self.state.model
                if head.view == self.view:
                    self._measure(head)
            case CalledHead():
                self.state.spent += head.cost
                if head.view == self.view and head.calls:
                    recent = [one for one in self.state.called if one[0] > head.time - PERIOD_S]
                    self.state.called = [*recent, (head.time, head.calls)]
            case Named():
                self.state.title = self.state.title if head.title is None else head.title
                self.state.model = self.state.model if head.model is None else head.model

    def _say(self, line: Line) -> None:
        state = self.state
        if line.role == "assistant":
            self._answered()
        state.fresh += line.tokens
        state.index += 1
        state.turn, state.step, state.total = line.turn, line.step, state.total + line.tokens
        state.speaker = line.role
        if line.asks:
            state.latest = line.at
            state.task = state.task or line
        call = state.open.pop(line.answers, None) if line.answers is not None else None
        if call is not None:
            for pin in state.pins.values():  # a result is pinned with its call
                pin.lines += [line] if call[0] in {pinned.at for pinned in pin.lines} else []
        names = line.tools if len(line.tools) == len(line.calls) else ("",) * len(line.calls)
        state.open.update({id: (line.at, tool) for id, tool in zip(line.calls, names, strict=True)})
        self.items.append(Item(Span(line.at, line.at + 1), (line,), self.words))
        self._starts.append(line.at)
        self.tokens += line.tokens
        if line.apart:
            before, state.apart = state.apart, [line]
            for old in before:
                self._hide(old.at)

    def _answered(self) -> None:
        """The request before this answer, as a provider's cache saw it."""
        state = self.state
        state.carried, state.shown = state.carried + state.total, state.shown + self.tokens
        if state.changed is not None:
            first = self._meeting(Span(state.changed, state.changed + 1))[0]
            after = sum(item.tokens for item in self.items[first:])
            state.rewritten, state.changed = state.rewritten + max(0, after - state.fresh), None
        state.fresh = 0

    def _hide(self, at: int) -> None:
        """Newer system text took its place. What was said after it is as it was: the text is not among it."""
        i = bisect_right(self._starts, at) - 1
        shown = current(self.items[i].lines, self.state.apart)
        item = self.items[i]
        self._splice(i, i + 1, [Item(item.span, shown, item.words, item.edit, item.merged)], mark=False)

    def _replace(self, cover: ReplacedHead, recall: PastReader) -> None:
        first, last = self._meeting(cover.span)
        cut = [item for item in self.items[first:last] if not cover.span.covers(item.span)]
        if not cut:
            self._correct(cover)
            follows = last < len(self.items) or not any(line.recalled for line in cover.lines)
            new = Item(cover.span, self._display(cover), self.words, cover.at)
            self._splice(first, last, [new], mark=follows)  # else nothing was said on what is changed
        elif not any(item.merged for item in cut):
            return
        else:  # neighbors that show nothing were merged: only the past knows where they end
            standing = ActiveEdits(self.view, recall.facts(cover.at + 1))
            if cover.at not in standing.covers:
                return
            self._correct(cover)
            self._rebuild(cover.span, standing, recall)
        if cover.round:
            self.state.round, self.state.compacted = cover.round, cover.at
        if not cover.keeps_originals:
            self.state.withheld.append(cover.span)

    def _correct(self, cover: ReplacedHead) -> None:
        """What the newest edit says of a message is what counts."""
        for line in cover.lines:
            if line.place in cover.span:
                self.state.corrected.pop(line.place, None)
        self.state.corrected |= corrections([cover])

    def _undo(self, undone: Undone, recall: PastReader) -> None:
        standing = ActiveEdits(self.view, recall.facts(undone.at))
        covers, pins = dict(standing.covers), set(standing.pins)
        standing.apply(undone)
        self.state.corrected = standing.corrected
        for at in covers.keys() ^ standing.covers.keys():
            cover = (covers | standing.covers)[at]
            (self.state.spared.append if at in covers else self.state.spared.remove)(cover.span)
            if not cover.keeps_originals:
                (self.state.withheld.remove if at in covers else self.state.withheld.append)(cover.span)
            self._rebuild(cover.span, standing, recall)
        for at in pins ^ standing.pins:
            self.state.pins[at].holds = at in standing.pins
            self._show_again(self.state.pins[at].lines, recall, standing)
        self.state.compacted = max((at for at, c in standing.covers.items() if c.round), default=None)

    def _show_again(
        self, lines: Iterable[Line], recall: PastReader, standing: "ActiveEdits | None" = None
    ) -> None:
        items = [self.item_at(line.at) for line in lines]
        for span in dict.fromkeys(item.span for item in items if item and item.edit is not None):
            standing = standing or ActiveEdits(self.view, recall.facts(self.state.next))
            self._rebuild(span, standing, recall)

    def _rebuild(self, span: Span, standing: "ActiveEdits", recall: PastReader) -> None:
        """What is shown in and around `span`, from the edits that stand there."""
        first, last = self._meeting(span)
        met = [item.span for item in self.items[first:last]]
        span = Span(min([span, *met]).start, max([span.end, *(other.end for other in met)]))
        items, gap = list[Item](), span.start
        for cover in (cover for cover in standing.widest if cover.span.meets(span)):
            items += self._raw(Span(gap, cover.span.start), recall)
            items.append(Item(cover.span, self._display(cover), self.words, cover.at))
            gap = cover.span.end
        items += self._raw(Span(gap, span.end), recall)
        self._splice(*self._meeting(span), items)

    def _raw(self, span: Span, recall: PastReader) -> list[Item]:
        lines = recall.lines(span) if span.start < span.end else ()
        return [
            Item(Span(line.at, line.at + 1), current((line,), self.state.apart), self.words) for line in lines
        ]

    def _display(self, cover: ReplacedHead) -> tuple[Line, ...]:
        return current(display(cover.lines, cover.span, self.kept), self.state.apart)

    def _meeting(self, span: Span) -> tuple[int, int]:
        """Which items meet a span: from the first index up to the second."""
        first = bisect_left(self._starts, span.start)
        if first and self.items[first - 1].span.end > span.start:
            first -= 1
        return first, max(first, bisect_left(self._starts, span.end))

    def _splice(self, first: int, last: int, items: list[Item], *, mark: bool = True) -> None:
        low, high = max(0, first - 1), last + 1  # neighbors too: they may merge
        new = merge([*self.items[low:first], *items, *self.items[last:high]])
        self._mark(_first_change(self.items[low:high], new) if mark else None)
        self.tokens += sum(item.tokens for item in new) - sum(item.tokens for item in self.items[low:high])
        self.items[low:high] = new
        self._starts[low:high] = [item.span.start for item in new]
        self.edition += 1

    def _measure(self, gauge: MeasuredHead) -> None:
        if None not in (self.state.prefix, gauge.prefix) and gauge.prefix != self.state.prefix:
            self.state.stale = [Span(0, gauge.of), *(s for s in self.state.stale if s.start >= gauge.of)]
            self.edition += 1
        changed = self.state.stale[-1].end if self.state.stale else 0
        if gauge.input and changed <= gauge.made:  # what was changed since was not measured
            self.state.gauge = gauge
        self.state.prefix = gauge.prefix or self.state.prefix

    def _mark(self, changed: int | None) -> None:
        if changed is None:
            return
        self.state.gauge = None
        self.state.changed = changed if self.state.changed is None else min(self.state.changed, changed)
        apart = [span for span in self.state.stale if span.end <= changed]
        start = min([changed, *(span.start for span in self.state.stale if span.end > changed)])
        self.state.stale = [*apart, Span(start, self.state.next)]


class ActiveEdits:
    """Which edits and pins hold, from heads alone."""

    def __init__(self, view: str, facts: Iterable[Head]) -> None:
        self.view = view
        self.covers: dict[int, ReplacedHead] = {}
        self.pins: set[int] = set()
        self.widest: list[ReplacedHead] = []
        """Those that decide what is shown, in order."""
        self._facts: dict[int, ReplacedHead | Pinned] = {}
        self._did: dict[int, tuple[int, bool]] = {}
        """What each event put in force, or out of it."""
        for fact in facts:
            self.apply(fact)

    def apply(self, fact: Head) -> None:
        match fact:
            case ReplacedHead(view=self.view) if sound(fact):
                first = bisect_left(self.widest, fact.span.start, key=lambda cover: cover.span.end - 1)
                last = bisect_left(self.widest, fact.span.end, key=lambda cover: cover.span.start)
                if all(fact.span.covers(cover.span) for cover in self.widest[first:last]):
                    self.covers[fact.at] = self._facts[fact.at] = fact
                    self.widest[first:last] = [fact]
                    self._did[fact.at] = (fact.at, True)
            case Pinned():
                self._facts[fact.at] = fact
                self.pins.add(fact.at)
                self._did[fact.at] = (fact.at, True)
            case Undone() if self.holds(fact.of):
                at, on = self._did[fact.of]
                if self._switch(self._facts[at], not on):
                    self._did[fact.at] = (at, not on)

    @property
    def corrected(self) -> dict[int, Line]:
        """What stands in the place of messages that were corrected."""
        return corrections(self.covers[at] for at in sorted(self.covers))

    def holds(self, at: int) -> bool:
        """What the event at a place did is still the case."""
        fact, on = self._did.get(at, (None, False))
        return fact is not None and (fact in self.covers or fact in self.pins) == on

    def in_the_way(self, at: int) -> int | None:
        """The edit because of which the undoing at a place cannot be undone."""
        fact = self._facts[self._did[at][0]]
        if not isinstance(fact, ReplacedHead):
            return None
        return next((one.at for one in self.covers.values() if crosses(fact.span, one.span)), None)

    def _switch(self, fact: ReplacedHead | Pinned, on: bool) -> bool:
        if isinstance(fact, Pinned):
            (self.pins.add if on else self.pins.discard)(fact.at)
            return True
        if on and any(crosses(fact.span, other.span) for other in self.covers.values()):
            return False
        if on:
            self.covers[fact.at] = fact
        else:
            del self.covers[fact.at]
        self.widest = _widest(self.covers.values())
        return True


def _first_change(before: Sequence[Item], after: Sequence[Item]) -> int | None:
    """The earliest place that is shown otherwise now."""
    old = [(line.at, line.n, item.span.start) for item in before for line in item.lines]
    new = [(line.at, line.n, item.span.start) for item in after for line in item.lines]
    for one, other in zip_longest(old, new):
        if one is None or other is None or one[:2] != other[:2]:
            return min(there[2] for there in (one, other) if there is not None)
    return None


def _widest(covers: Iterable[ReplacedHead]) -> list[ReplacedHead]:
    result, reach = list[ReplacedHead](), 0
    for cover in sorted(covers, key=lambda c: (c.span.start, -c.span.end, -c.at)):
        if cover.span.end > reach:
            result.append(cover)
            reach = cover.span.end
    return result
