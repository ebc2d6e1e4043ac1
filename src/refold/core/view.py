"""What the model sees: `fold` turns the stream of one conversation into a view of it.

This is the definition, short and slow. `core.live` keeps the same view up to date at a cost per
event that does not grow; the tests hold the two equal.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from refold.core.event import Event, Line, Pinned, Replaced, Said, Span, Undone
from refold.core.message import Message

Words: TypeAlias = Callable[[Line], Message]


class Spanned(Protocol):
    @property
    def at(self) -> int: ...
    @property
    def span(self) -> Span: ...
    @property
    def lines(self) -> tuple[Line, ...]: ...


class Item(msgspec.Struct, frozen=True, eq=False):
    """A stretch of the record and what stands for it: itself, or what an edit shows instead."""

    span: Span
    lines: tuple[Line, ...]
    words: Words
    edit: int | None = None
    """Place of the edit that decided this; of the newest, where neighbors that show nothing merged."""
    merged: bool = False

    def __eq__(self, other: object) -> bool:
        """The same stretch and the same lines; where the words are read does not matter."""
        return isinstance(other, Item) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    @property
    def _facts(self) -> tuple[object, ...]:
        return (self.span, self.lines, self.edit, self.merged)

    @property
    def shown(self) -> tuple[Message, ...]:
        return tuple(map(self.words, self.lines))

    @property
    def is_shortened(self) -> bool:
        """It shows one message shorter than it was said."""
        one = len(self.span) == 1 and len(self.lines) == 1
        return one and self.lines[0].at == self.edit and self.lines[0].corrects is None

    @property
    def original(self) -> Message:
        """The message that a shortened one was before any edit."""
        return self.words(msgspec.structs.replace(self.lines[0], at=self.span.start, n=0))

    @property
    def tokens(self) -> int:
        return sum(line.tokens for line in self.lines)

    @property
    def is_folded(self) -> bool:
        """It shows something that stands for several messages."""
        return any(line.summary for line in self.lines)

    @property
    def is_corrected(self) -> bool:
        """It shows what somebody put in the place of a message, which counts like what was said."""
        return any(line.corrects is not None for line in self.lines)


class View(msgspec.Struct, frozen=True):
    """Every message of the record is covered by exactly one item."""

    items: tuple[Item, ...]
    kept: frozenset[int] = frozenset()
    """Places that stay in sight whatever is around them: the task and what is pinned.

    Of what was corrected, here and in `latest`, the place of the correction."""
    latest: int | None = None
    """Place of the latest user message."""
    next: int = 0
    """The first free place. Of edits that are planned, the first will stand here and the others after it."""
    step: int = 1
    """The step to come."""
    handles: bool = True
    """Whether what is reduced may say how to get it back."""
    spared: tuple[Span, ...] = ()
    """What somebody took an edit back from: it is not reduced again unless there is no other way."""
    withheld: tuple[Span, ...] = ()
    """What was reduced with `keep_originals: false`: its originals are not shown again."""

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
        """Tools that are still mentioned: others may be dropped from what an agent has discovered."""
        return frozenset(tool for line in self.lines for tool in line.tools)


def fold(events: Iterable[Event], view: str = "main") -> View:
    """The view after `events`.

    An edit stands unless it would cut what is shown in two; it is judged once, when it comes.
    Undoing takes an edit or a pin out of force; undoing that puts it back, unless it would now cross
    an edit made meanwhile. The widest edits that stand decide what is shown, and in them the task,
    the pinned messages and the newest system text that stands apart stay in sight, or what somebody
    put in their place.
    """
    said: dict[int, Said] = {}
    facts: dict[int, Replaced | Pinned] = {}
    holds: set[int] = set()
    did: dict[int, tuple[int, bool]] = {}  # what each event put in force, or out of it
    open_calls: dict[str, int] = {}
    pins: dict[int, list[Line]] = {}

    def standing() -> list[Replaced]:
        return [fact for fact in facts.values() if isinstance(fact, Replaced) and fact.at in holds]

    def may_stand(fact: Replaced | Pinned) -> bool:
        return isinstance(fact, Pinned) or not any(crosses(fact.span, e.span) for e in standing())

    def put_in_force(fact: Replaced | Pinned) -> None:
        facts[fact.at], did[fact.at] = fact, (fact.at, True)
        holds.add(fact.at)

    next = 0
    for event in events:
        next = event.at + 1
        match event:
            case Said(line=line):
                said[line.at] = event
                call = open_calls.pop(line.answers, None) if line.answers is not None else None
                for lines in pins.values():  # a result is pinned with its call
                    lines += [line] if call in {pinned.at for pinned in lines} else []
                open_calls.update(dict.fromkeys(line.calls, line.at))
            case Replaced() if event.view == view and sound(event):
                if not cuts(event.span, widest(standing())):
                    put_in_force(event)
            case Pinned():
                put_in_force(event)
                pins[event.at] = list(event.lines)
            case Undone() if event.of in did:
                fact, on = did[event.of]
                if (fact in holds) == on and (on or may_stand(facts[fact])):
                    holds ^= {fact}
                    did[event.at] = (fact, not on)

    users = [s.line for s in said.values() if s.line.asks]
    apart = [s.line for s in said.values() if s.line.apart][-1:]
    pinned = [line for at in pins if at in holds for line in pins[at]]
    corrected = corrections(standing())
    kept = {line.at: corrected.get(line.at, line) for line in current([*users[:1], *apart, *pinned], apart)}

    def words(line: Line) -> Message:
        if line.at in said:
            return said[line.at].message
        message = facts[line.at].shown[line.n]  # type: ignore[union-attr]
        assert isinstance(message, Message)
        return message

    edits = widest(standing())
    covered = {at for edit in edits for at in edit.span}
    bare = [s.line for at, s in said.items() if at not in covered]
    items = [Item(Span(line.at, line.at + 1), current((line,), apart), words) for line in bare]
    items += [Item(e.span, current(display(e.lines, e.span, kept), apart), words, e.at) for e in edits]
    shown = tuple(merge(sorted(items, key=lambda item: item.span)))
    latest = shown_at(users[-1].at, shown) if users else None
    spared = {f.span for f in facts.values() if isinstance(f, Replaced) and f.at not in holds}
    step = max((s.line.step for s in said.values()), default=0) + 1
    fixed = frozenset(line.at for line in kept.values())
    withheld = {edit.span for edit in standing() if not edit.keeps_originals}
    return View(
        shown, fixed, latest, next, step, spared=tuple(sorted(spared)), withheld=tuple(sorted(withheld))
    )


def sound(edit: "Spanned") -> bool:
    """It covers something, and nothing said after it."""
    return 0 <= edit.span.start < edit.span.end <= edit.at


def cuts(span: Span, shown: Iterable[Replaced]) -> bool:
    """It would leave a part of what one of them shows."""
    return any(edit.span.meets(span) and not span.covers(edit.span) for edit in shown)


def crosses(one: Span, other: Span) -> bool:
    """They overlap and neither holds the other."""
    return one.meets(other) and not one.covers(other) and not other.covers(one)


def widest(edits: Sequence[Replaced]) -> list[Replaced]:
    """Those that no other covers; of two with the same span the newer."""
    rank = {e.at: (len(e.span), e.at) for e in edits}
    return [e for e in edits if not any(o.span.covers(e.span) and rank[o.at] > rank[e.at] for o in edits)]


def current(lines: Iterable[Line], apart: Sequence[Line]) -> tuple[Line, ...]:
    """Without system text that newer one took the place of, where it stands apart from the messages."""
    return tuple(line for line in lines if not line.apart or line.place in {newest.at for newest in apart})


def corrections(edits: Iterable["Spanned"]) -> dict[int, Line]:
    """What people put in the place of messages; the newest edit that shows one, corrected or not, decides."""
    found: dict[int, Line] = {}
    for edit in edits:
        found |= {line.place: line for line in edit.lines if line.place in edit.span}
    return {at: line for at, line in found.items() if line.corrects is not None}


def shown_at(place: int, items: Iterable[Item]) -> int:
    """Who has the words of a message as it is shown: its own event, or its correction."""
    return next((line.at for item in items for line in item.lines if line.place == place), place)


def display(lines: Sequence[Line], span: Span, kept: dict[int, Line]) -> tuple[Line, ...]:
    """What an edit shows, and what must stay in sight of its span, each in its order."""
    own = [kept[at] for at in kept if at in span and not kept[at].apart]
    lines = [line for line in lines if _may_stand(line, span, kept, own)]
    shown = {line.place for line in lines}
    more = deque(sorted(at for at in kept if at in span and at not in shown))
    result: list[Line] = []
    for line in lines:
        while more and line.place in span and more[0] < line.place:
            result.append(kept[more.popleft()])
        result.append(line)
    return (*result, *(kept[at] for at in more))


def _may_stand(line: Line, span: Span, kept: dict[int, Line], own: Sequence[Line]) -> bool:
    """It takes no place of what is kept in sight."""
    if line.place not in span:
        return line.recalled or not _stands_for_one(line, span, own)
    return kept.get(line.place, line).at == line.at


def _stands_for_one(line: Line, span: Span, kept: Sequence[Line]) -> bool:
    """It is a shorter form of a message that is kept in sight as it was."""
    return bool(kept) and (
        len(span) == 1
        or (line.answers is not None and line.answers in {one.answers for one in kept})
        or (bool(line.calls) and line.calls in {one.calls for one in kept})
    )


def merge(items: Iterable[Item]) -> list[Item]:
    """Neighbors that show nothing become one."""
    result: list[Item] = []
    for item in items:
        last = result[-1] if result else None
        if last and not last.lines and not item.lines and last.edit is not None and item.edit is not None:
            span, edit = Span(last.span.start, item.span.end), max(last.edit, item.edit)
            result[-1] = Item(span, (), item.words, edit, merged=True)
        else:
            result.append(item)
    return result
