"""Plans: a policy proposes edits of a view, and `settle` turns them into events."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from refold.core.budget import Budget
from refold.core.errors import ConflictError
from refold.core.event import Certificate, Line, Replaced, Span
from refold.core.expiry import is_leased
from refold.core.message import Message
from refold.core.view import Item, View, display

Count: TypeAlias = Callable[[Message], int]


class Edit(msgspec.Struct, frozen=True):
    """A proposal to show these messages instead of those in the span."""

    span: Span
    shown: tuple[Message | int, ...]
    """New messages, or places of messages in the span that stay as they are."""
    kind: str
    why: str
    setting: tuple[str, ...] = ()
    """The path of the agent's setting that decided it."""
    certificate: Certificate | None = None
    """Of a summary: how it was made and checked."""
    focus: str = ""
    """Of a summary: its requested focus."""


Plan: TypeAlias = Sequence[Edit]


class Policy(Protocol):
    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        """Edits that bring the view towards `budget.target`, or none.

        A function of its arguments: no clock, no randomness, no I/O. Spans are whole items.
        """


class CompactionRequest(msgspec.Struct, frozen=True):
    """A compaction on demand, down to the newest messages or to a number of tokens."""

    strategy: str
    keep_recent: int | None = None
    target: int | None = None
    focus: str = ""

    @property
    def why(self) -> str:
        if self.target is not None:
            return f"asked for: at most {self.target:,} tokens"
        return f"asked for: keep the newest {self.keep_recent}"


def protected(view: View) -> set[int]:
    """The places that no edit may hide: the task, pinned messages and the latest user message."""
    return {*view.kept} | ({view.latest} if view.latest is not None else set())


def must_stay(view: View) -> list[Line]:
    """The lines that every view has: protected messages, and system text before the conversation."""
    fixed = protected(view)
    first = next((line.place for line in view.lines if line.role != "system"), 0)
    return [line for line in view.lines if line.at in fixed or (line.role == "system" and line.place < first)]


def reducible(view: View) -> list[Item]:
    """Items of one message, recorded or already shortened, that may be reduced in place.

    Leaves out restored messages, messages whose edit was undone, and expansions under lease.
    """
    found: list[Item] = []
    for item in view.items:
        if not is_reducible(item) or any(item.span.start in span for span in view.spared):
            continue
        line = item.lines[0]
        if line.expiry is None or not is_leased(line, view.step):
            found.append(item)
    return found


def is_reducible(item: Item) -> bool:
    if len(item.lines) != 1 or item.span.end != item.span.start + 1:
        return False
    line = item.lines[0]
    if line.summary or line.corrects is not None:
        return False
    return item.edit is None or line.at == item.edit


class Stamp(msgspec.Struct, frozen=True):
    """The place, time and view of a new event, which pure code cannot know."""

    at: int
    time: float
    view: str = "main"
    round: int = 0
    keeps_originals: bool = True


def settle(edit: Edit, view: View, stamp: Stamp, count: Count) -> Replaced:
    """The event for an edit; protected messages in its span stay shown.

    Raises:
        ConflictError: the edit would cut what is shown in two, or names what is not shown.
    """
    covered = _covered(edit, view)
    lines = [line for item in covered for line in item.lines]
    by_place = {line.at: line for line in lines}
    stay_anyway = {
        line.place: line for line in lines if line.at in view.kept
    }  # the fold shows them in any case
    latest = view.latest  # listed by itself, since a pin can be undone
    shown = list(edit.shown)
    if latest is not None and latest in by_place and latest not in edit.shown:
        shown.append(latest)
    after: list[Line] = []
    for n, one in enumerate(shown):
        if isinstance(one, int):
            if one not in by_place:
                raise ConflictError(f"An edit of {edit.span} names #{one}, which is not shown there")
            after.append(by_place[one])
        else:
            turn, step = (lines[-1].turn, lines[-1].step) if lines else (0, 0)
            line = line_of(one, stamp.at, count(one), turn, step, n)
            if len(lines) == 1:  # the new message replaces it in its place
                old = lines[0]
                kept = {"whole": old.whole, "expiry": old.expiry, "retry": old.retry}
                line = msgspec.structs.replace(line, **kept, wordless=old.wordless)
            after.append(line)
    return Replaced(
        stamp.at,
        stamp.view,
        edit.span,
        tuple(shown),
        tuple(after),
        edit.kind,
        edit.why,
        (cost(lines), cost(display(after, edit.span, stay_anyway))),
        stamp.time,
        stamp.round,
        edit.certificate,
        keeps_originals=stamp.keeps_originals,
    )


def applied(view: View, edit: Replaced) -> View:
    """The view once a settled edit is in force."""
    first, last = _meeting(view, edit.span)
    covered = view.items[first:last]
    kept = {line.place: line for item in covered for line in item.lines if line.at in view.kept}
    known = {line.at: item.words for item in covered for line in item.lines}
    first_words = covered[0].words if covered else None

    def words(line: Line) -> Message:
        if line.at == edit.at:
            new = edit.shown[line.n]
            assert isinstance(new, Message)
            return new
        read = known.get(line.at, first_words)  # the first one has the original of a shortened message
        assert read is not None
        return read(line)

    item = Item(edit.span, display(edit.lines, edit.span, kept), words, edit.at)
    items = (*view.items[:first], item, *view.items[last:])
    return msgspec.structs.replace(view, items=items, next=max(view.next, edit.at + 1))


def cost(lines: Iterable[Line]) -> int:
    return sum(line.tokens for line in lines)


def line_of(message: Message, at: int, tokens: int, turn: int, step: int, n: int = 0) -> Line:
    calls = message.calls
    results = message.results
    tools = [call.tool for call in calls] or [result.tool for result in results if result.tool]
    return Line(
        at,
        message.role,
        tokens,
        turn,
        step,
        calls=tuple(call.call_id for call in calls),
        answers=results[0].call_id if results else None,
        tools=tuple(tools),
        n=n,
        summary=message.is_summary,
        wordless=message.role == "user" and not message.has_words,
    )


def _covered(edit: Edit, view: View) -> Sequence[Item]:
    first, last = _meeting(view, edit.span)
    met = view.items[first:last]
    cut = [item for item in met if not edit.span.covers(item.span)]
    if cut:
        raise ConflictError(f"An edit of {edit.span} would cut what is shown for {cut[0].span} in two")
    return met


def _meeting(view: View, span: Span) -> tuple[int, int]:
    """The range of the indices of items that meet a span."""
    first = bisect_right(view.items, span.start, key=lambda item: item.span.end)
    return first, max(first, bisect_left(view.items, span.end, key=lambda item: item.span.start))
