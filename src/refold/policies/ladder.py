"""Fit any conversation into any window: the cheapest thing first, and no more than it takes."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from refold.core.budget import Budget
from refold.core.message import Message, Text
from refold.core.plan import Count, Edit, Plan, Policy, Stamp, applied, settle
from refold.core.view import View

_FAR = 1 << 60
"""Places that no record has: edits that are only tried out stand there."""


class Ladder(msgspec.Struct, frozen=True):
    """Runs its rungs one after the other until the view is within the target."""

    rungs: tuple[Policy, ...]

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        room = budget.counted(budget.room) - budget.overhead
        least = budget.worthwhile
        after, plan = climb(self.rungs, view, budget, count)
        goal = budget.counted(budget.goal) - budget.overhead
        if after.tokens > goal and view.tokens - after.tokens >= least:
            after, plan = climb(self.rungs * 2, view, budget, count)  # what one leaves, another may take
        is_reached = any(after.tokens <= limit < view.tokens for limit in (room, goal))
        helps = is_reached or view.tokens - after.tokens >= least
        return plan if helps and after.tokens <= room else ()


def climb(rungs: Sequence[Policy], view: View, budget: Budget, count: Count) -> tuple[View, list[Edit]]:
    """The view that the rungs lead to, and the edits that make it, without those that others swallow."""
    goal = budget.counted(budget.goal) - budget.overhead
    base, plan, tried = view.next, list[_Tried](), 0
    for rung in rungs:
        if view.tokens <= goal:
            break
        next = base + len(plan)
        for n, edit in enumerate(rung(msgspec.structs.replace(view, next=next), budget, count)):
            gone = [one.edit for one in plan if edit.span.covers(one.edit.span)]
            plan = [one for one in plan if one.edit not in gone]
            plan.append(_Tried(_credited(edit, gone), next + n))
            view = applied(view, settle(edit, view, Stamp(_FAR + tried, 0.0), count))
            tried += 1
    edits = [_moved(one.edit, one.place, base + n) for n, one in enumerate(plan)]
    return msgspec.structs.replace(view, next=base + len(edits)), edits


class _Tried(NamedTuple):
    edit: Edit
    place: int
    """Where the rung believed that it would stand."""


def _credited(edit: Edit, gone: Sequence[Edit]) -> Edit:
    """A summary of a summary that a model has just written is the model's too, as far as it is in it."""
    text = _text(edit)
    for one in gone if edit.certificate is not None and not edit.certificate.model else ():
        by = one.certificate
        lines = [line[2:] for line in _text(one).split("\n") if line.startswith("- ")]
        own = [line for line in lines if by and line not in by.appended and line in text]
        if by and by.model and own:
            appended = tuple(line for line in by.appended if line in text)
            certificate = msgspec.structs.replace(by, kept=len(own), appended=appended)
            return msgspec.structs.replace(edit, certificate=certificate)
    return edit


def _text(edit: Edit) -> str:
    return edit.shown[0].text if edit.shown and isinstance(edit.shown[0], Message) else ""


def _moved(edit: Edit, old: int, new: int) -> Edit:
    """With its own place in its handle, which others that were swallowed have shifted."""
    first = edit.shown[0] if edit.shown else None
    handles = (f"[refold #{old} ", f"[refold #{old}:")
    if old == new or not isinstance(first, Message) or not first.text.startswith(handles):
        return edit
    text = first.text.replace(f"#{old}", f"#{new}", 1)
    moved = msgspec.structs.replace(first, parts=(Text(text), *first.parts[1:]))
    return msgspec.structs.replace(edit, shown=(moved, *edit.shown[1:]))
