"""The newest messages that fit, and what must never be lost."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line, Span
from refold.core.message import Message, Text
from refold.core.plan import Count, Edit, Plan, protected
from refold.core.view import Item, View


class Window(msgspec.Struct, frozen=True):
    """Hides the oldest messages, with a note that they were there.

    System text, the task, pinned messages, the latest user message and the newest step stay; a tool
    result is never parted from its call. System text in mid-conversation goes where there is no room for it.
    """

    keep_recent: int | None = None
    """How many of the newest messages to keep, whatever they cost; unset, as many as fit."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        items = view.items
        target = budget.counted(budget.target)
        own = {line.at for line in view.lines if line.role == "system" or line.at == view.latest}
        stay = _whole(view.lines, protected(view) | own)
        fixed = budget.overhead + sum(line.tokens for line in view.lines if line.at in stay)
        if fixed > target:  # then only what stood before the conversation is spared
            first = next((line.at for line in view.lines if line.role != "system"), 0)
            own = {at for at in own if at < first or at == view.latest}
            stay = _whole(view.lines, protected(view) | own)
            fixed = budget.overhead + sum(line.tokens for line in view.lines if line.at in stay)
        room = 0 if self.keep_recent is not None else target - fixed - count(NOTE)
        first = _first_kept(items, stay, room, self.keep_recent or 0)
        hidden = [i for i in range(first) if items[i].edit is not None or not _stays(items[i], stay)]
        if not hidden:
            return ()
        covered = items[hidden[0] : hidden[-1] + 1]
        named = stay - (view.kept - own)  # the fold itself keeps the others in sight
        kept = tuple(line.at for item in covered for line in item.lines if line.at in named)
        saved = sum(line.tokens for item in covered for line in item.lines if line.at not in stay)
        if saved <= count(NOTE):  # nothing to hide, or only what is hidden already
            return ()
        what = f"that fit in {budget.target:,} tokens" if self.keep_recent is None else f"{self.keep_recent}"
        why = f"only the newest {what} stay"
        span = Span(covered[0].span.start, covered[-1].span.end)
        return (Edit(span, (NOTE, *kept), "window", why),)


NOTE = Message("user", (Text("[refold: earlier messages are not shown here]"),))


def _whole(lines: Sequence[Line], stay: set[int]) -> set[int]:
    """With a result its call, and with a call all its results."""
    asked = {line.answers for line in lines if line.at in stay}
    stay = stay | {line.at for line in lines if asked & {*line.calls}}
    calls = {call for line in lines if line.at in stay for call in line.calls}
    return stay | {line.at for line in lines if line.answers in calls}


def _stays(item: Item, stay: set[int]) -> bool:
    return all(line.at in stay for line in item.lines)


def _first_kept(items: Sequence[Item], stay: set[int], room: int, keep_recent: int) -> int:
    """Index of the oldest item that stays: as many of the newest as fit, cut where no call is open."""
    cuts = _cuts(items)
    costs = [[line.tokens for line in item.lines if line.at not in stay] for item in items]
    newest_step = max((line.step for item in items for line in item.lines), default=0)
    required, seen = len(items), 0
    for i in range(len(items) - 1, -1, -1):
        newest = any(line.step == newest_step > 0 for line in items[i].lines)
        if items[i].edit is None and (newest or seen < keep_recent):
            required = i
        seen += len(costs[i])
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
    """Before which items the view can be parted so that no result loses its call."""
    opened: dict[str, int] = {}
    depth = [0] * (len(items) + 1)
    for i, item in enumerate(items):
        for line in item.lines:
            if line.answers is not None and line.answers in opened:
                depth[opened.pop(line.answers) + 1] += 1
                depth[i + 1] -= 1
            opened.update(dict.fromkeys(line.calls, i))
    return [open_groups == 0 for open_groups in accumulate(depth)]
