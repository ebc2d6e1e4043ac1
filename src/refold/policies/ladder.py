"""`Ladder`: runs policies, the cheapest first, until the view fits."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from refold.core.budget import Budget
from refold.core.message import Message, Text
from refold.core.plan import Count, Edit, Plan, Policy, Stamp, applied, settle
from refold.core.view import View

_TRIAL_PLACES = 1 << 60
"""Edits that are only tried out get places from here on, which no record has."""


class Ladder(msgspec.Struct, frozen=True):
    """Runs its stages one after the other until the view is within the target."""

    stages: tuple[Policy, ...]

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        room = budget.counted(budget.room) - budget.overhead
        goal = budget.counted(budget.goal) - budget.overhead
        least = budget.worthwhile
        after, plan = run_stages(self.stages, view, budget, count)
        if after.tokens > goal and view.tokens - after.tokens >= least:
            # a second run may reduce what the first one left
            after, plan = run_stages(self.stages * 2, view, budget, count)
        reaches_limit = any(after.tokens <= limit < view.tokens for limit in (room, goal))
        helps = reaches_limit or view.tokens - after.tokens >= least
        return plan if helps and after.tokens <= room else ()


class _TriedEdit(NamedTuple):
    edit: Edit
    place: int
    """The place that the stage expected it to get."""


def run_stages(stages: Sequence[Policy], view: View, budget: Budget, count: Count) -> tuple[View, list[Edit]]:
    """The view after the stages, and the edits that lead to it, without those that later edits cover."""
    goal = budget.counted(budget.goal) - budget.overhead
    base = view.next
    tried: list[_TriedEdit] = []
    trial_place = _TRIAL_PLACES
    for stage in stages:
        if view.tokens <= goal:
            break
        next = base + len(tried)
        for n, edit in enumerate(stage(msgspec.structs.replace(view, next=next), budget, count)):
            covered = [other.edit for other in tried if edit.span.covers(other.edit.span)]
            tried = [other for other in tried if other.edit not in covered]
            tried.append(_TriedEdit(_with_credit(edit, covered), next + n))
            view = applied(view, settle(edit, view, Stamp(trial_place, 0.0), count))
            trial_place += 1
    edits = [_with_place(one.edit, one.place, base + n) for n, one in enumerate(tried)]
    return msgspec.structs.replace(view, next=base + len(edits)), edits


def _with_credit(edit: Edit, covered: Sequence[Edit]) -> Edit:
    """A summary by rule that keeps lines of a model's summary that it covers has that model's certificate."""
    if edit.certificate is None or edit.certificate.model:
        return edit
    text = _text(edit)
    for other in covered:
        by = other.certificate
        if by is None or not by.model:
            continue
        lines = [line[2:] for line in _text(other).split("\n") if line.startswith("- ")]
        kept = [line for line in lines if line not in by.appended and line in text]
        if kept:
            appended = tuple(line for line in by.appended if line in text)
            certificate = msgspec.structs.replace(by, kept=len(kept), appended=appended)
            return msgspec.structs.replace(edit, certificate=certificate)
    return edit


def _text(edit: Edit) -> str:
    return edit.shown[0].text if edit.shown and isinstance(edit.shown[0], Message) else ""


def _with_place(edit: Edit, old: int, new: int) -> Edit:
    """The edit with its real place in its handle."""
    first = edit.shown[0] if edit.shown else None
    handles = (f"[refold #{old} ", f"[refold #{old}:")
    if old == new or not isinstance(first, Message) or not first.text.startswith(handles):
        return edit
    text = first.text.replace(f"#{old}", f"#{new}", 1)
    moved = msgspec.structs.replace(first, parts=(Text(text), *first.parts[1:]))
    return msgspec.structs.replace(edit, shown=(moved, *edit.shown[1:]))
