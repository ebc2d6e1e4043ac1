"""Selects the oldest messages that can be hidden together, so that the rest is valid and fits."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line, Span
from refold.core.plan import protected
from refold.core.view import Item, View

Shape: TypeAlias = tuple[tuple[int, int, int], ...]
"""Start, end and edit of each item; a correction is its place three times."""


class Selection(msgspec.Struct, frozen=True):
    """A part of the view: consecutive items, and what of them is hidden."""

    items: tuple[Item, ...]
    kept: tuple[int, ...]
    """Places that stay shown, besides those that the fold keeps by itself."""
    hidden: tuple[Line, ...]
    corrected: tuple[int, ...] = ()
    """Corrections in the whole view."""

    @property
    def span(self) -> Span:
        return Span(self.items[0].span.start, self.items[-1].span.end)

    @property
    def tokens(self) -> int:
        return sum(line.tokens for line in self.hidden)

    @property
    def shape(self) -> Shape:
        """What it consists of: spans of its messages, whole or shortened, and of its summaries.

        All corrections of the view are in it, too: a summary written without one is out of date.
        """
        hidden = {(line.at, line.n) for line in self.hidden}
        places: list[tuple[int, int, int]] = []
        for item in self.items:
            if any((line.at, line.n) in hidden for line in item.lines):
                edit = item.edit if item.is_folded and item.edit is not None else -1
                places.append((item.span.start, item.span.end, edit))
        return (*places, *((at, at, at) for at in self.corrected))

    def only(self, items: Sequence[Item]) -> "Selection":
        """The part of it that some of its items make up."""
        lines = {(line.at, line.n) for item in items for line in item.lines}
        places = {at for at, _ in lines}
        hidden = tuple(line for line in self.hidden if (line.at, line.n) in lines)
        return Selection(tuple(items), tuple(at for at in self.kept if at in places), hidden, self.corrected)


def select_oldest(
    view: View,
    budget: Budget,
    *,
    besides: int,
    keep_recent: int = 0,
    only: bool = False,
    steps: int | None = None,
    share: float = 1.0,
) -> Selection | None:
    """Everything but what must stay and the newest `keep_recent` messages; None if that is nothing.

    System text, the task, pinned messages, the latest user message and summaries that only a provider can
    read stay; a tool result is never separated from its call. System text inside the conversation is hidden
    if there is no room for it.

    `besides` are the tokens of what will replace the rest. With `only`, exactly the newest messages are kept,
    and a newest one that the model has not seen; without it, they are kept besides what stays anyway, with
    the newest step, and more up to a `share` of the target. `steps` is how many of the newest steps are kept.
    """
    if steps is None:
        steps = 0 if only else 1
        is_newest_unseen = bool(view.lines) and view.lines[-1].role in ("tool", "user")
        keep_recent = max(keep_recent, int(is_newest_unseen))
    goal = budget.counted(budget.goal)
    unreadable = sealed(view)
    own = {line.at for line in view.lines if line.role == "system" or line.at == view.latest}
    own |= unreadable
    stay = _with_pairs(view.lines, protected(view) | own)
    fixed = budget.overhead + sum(line.tokens for line in view.lines if line.at in stay)
    if fixed > goal:  # then only the system text before the conversation stays
        first = next((line.place for line in view.lines if line.role != "system"), 0)
        first_or_latest = (line for line in view.lines if line.place < first or line.at == view.latest)
        own &= {line.at for line in first_or_latest} | unreadable
        stay = _with_pairs(view.lines, protected(view) | own)
        fixed = budget.overhead + sum(line.tokens for line in view.lines if line.at in stay)
    room = 0 if only else int(share * goal) - fixed - besides
    counted = {line.at for line in view.lines if not line.recalled and (only or line.at not in stay)}
    end = _first_kept(view, stay, room, _nth_newest(view, keep_recent, steps, counted))
    gone = [i for i in range(end) if _may_go(view.items[i], stay)]
    if not gone:
        return None
    cuts = _cuts(view.items)  # a pinned call is covered with its result
    start = max(i for i in range(gone[0] + 1) if cuts[i])
    stop = min(i for i in range(gone[-1] + 1, len(cuts)) if cuts[i])
    covered = view.items[start:stop]
    named = stay - (view.kept - own)  # the fold itself keeps the others in sight
    lines = [line for item in covered for line in item.lines]
    kept = tuple(line.at for line in lines if line.at in named)
    hidden = tuple(line for line in lines if line.at not in stay)
    return Selection(covered, kept, hidden, _corrected(view))


def select_again(view: View, span: Span, kept: Sequence[int]) -> Selection | None:
    """The selection of a span in a view that may have changed; None if it can no longer be hidden."""
    covered = tuple(item for item in view.items if item.span.meets(span))
    if not covered or not all(span.covers(item.span) for item in covered):
        return None
    lines = [line for item in covered for line in item.lines]
    stay = {line.at for line in lines} & (protected(view) | {*kept})
    if _with_pairs(view.lines, stay) != stay or not {*kept} <= stay:
        return None
    named = tuple(line.at for line in lines if line.at in kept or line.at in stay - view.kept)
    hidden = tuple(line for line in lines if line.at not in stay)
    return Selection(covered, named, hidden, _corrected(view))


def sealed(view: View) -> set[int]:
    """Places of summaries that only a provider can read, so that no other summary can replace them."""
    found = set[int]()
    for item in view.items:
        for line in item.lines:
            may_be = line.role == "assistant" and line.at in item.span
            if may_be and item.words(line).is_sealed:
                found.add(line.at)
    return found


def _corrected(view: View) -> tuple[int, ...]:
    return tuple(line.at for line in view.lines if line.corrects is not None)


def _with_pairs(lines: Sequence[Line], stay: set[int]) -> set[int]:
    """The same with the calls of results and all results of calls."""
    answered = {line.answers for line in lines if line.at in stay}
    stay = stay | {line.at for line in lines if answered & {*line.calls}}
    calls = {call for line in lines if line.at in stay for call in line.calls}
    return stay | {line.at for line in lines if line.answers in calls}


def _may_go(item: Item, stay: set[int]) -> bool:
    """True if hiding the item hides something."""
    is_edited = item.edit is not None and not item.is_corrected
    return is_edited or not all(line.at in stay for line in item.lines)


def _nth_newest(view: View, keep_recent: int, steps: int, counted: set[int]) -> int:
    """Index of the oldest item among the newest messages and steps."""
    newest_step = max((line.step for line in view.lines), default=0)
    oldest_index = len(view.items)
    seen = 0
    for i in range(len(view.items) - 1, -1, -1):
        item = view.items[i]
        is_new = any(line.step > max(0, newest_step - steps) for line in item.lines)
        if not item.is_folded and (is_new or seen < keep_recent):
            oldest_index = i
        seen += sum(line.at in counted for line in item.lines)
    return oldest_index


def _first_kept(view: View, stay: set[int], room: int, required: int) -> int:
    """Index of the oldest item that stays: as many of the newest as fit, cut where no call is open."""
    cuts = _cuts(view.items)
    costs = [[line.tokens for line in item.lines if line.at not in stay] for item in view.items]
    first = max(i for i in range(required + 1) if cuts[i])
    used = sum(map(sum, costs[first:]))
    for i in range(first - 1, -1, -1):
        used += sum(costs[i])
        if used > room:
            break
        if cuts[i]:
            first = i
    return first


def _cuts(items: Sequence[Item]) -> list[bool]:
    """Whether the view can be cut before each item without separating a call from its result."""
    opened: dict[str, int] = {}
    depth = [0] * (len(items) + 1)
    for i, item in enumerate(items):
        for line in item.lines:
            if line.answers is not None and line.answers in opened:
                depth[opened.pop(line.answers) + 1] += 1
                depth[i + 1] -= 1
            opened.update(dict.fromkeys(line.calls, i))
    return [open_groups == 0 for open_groups in accumulate(depth)]
