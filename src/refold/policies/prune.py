"""`Cap` and `Prune`: tool outputs that are too large or too old are shown as skeletons."""

from itertools import groupby

import msgspec

from refold.core.budget import Budget
from refold.core.message import Message, ToolResult
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import Item, View
from refold.policies.importance import ViewReading
from refold.policies.shorten import Reduction


class Cap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shows head, skeleton and tail of an output that takes more than its share of the window.

    It acts before the output is first sent, so that no cached prefix changes.
    """

    share: float = 0.25
    """Of the window, that one output may take."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        limit = self.most(budget)
        fixed = protected(view)
        plan: list[Edit] = []
        for item in reducible(view):
            line = item.lines[0]
            if item.edit is not None or line.tokens <= limit or line.answers is None or line.at in fixed:
                continue
            reduction = Reduction.of(item, view)
            shown = reduction and reduction.within(limit, reduction.outline(), count)
            if shown:
                why = f"{line.tokens:,} tokens are more than {self.share:.0%} of the window"
                plan.append(Edit(item.span, (shown,), "cap", why, ("compact", "cap", "share")))
        return plan

    def most(self, budget: Budget) -> int:
        """The largest output that is not capped, in counted tokens."""
        return int(budget.window * self.share / budget.margin)


class Prune(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replaces old tool outputs by skeletons, from the newest back to the last summary. Every call stays."""

    protect: int | None = None
    """Tokens of the newest outputs that stay; unset, 40,000 or half of the threshold if that is less."""
    minimum: int | None = None
    """What is saved at least, or nothing is changed; unset, 20,000 or a quarter of the threshold."""
    keep_turns: int = 2
    """The newest turns, shown whole whatever they cost."""
    keep_steps: int = 4
    """The newest steps, where those turns are the whole conversation."""
    exclude_tools: tuple[str, ...] = ()
    """Tools whose outputs are never pruned."""
    length: int = 600
    """Characters that stay of an output: half as many if nobody used it, more if it is important."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        protect, minimum = self.limits(budget)
        old = self._old_outputs(view, protect, count)
        if sum(item.tokens for item in old) < minimum:
            return ()
        plan: list[Edit] = []
        saved = 0
        reading = ViewReading(view)
        for item in old:
            shown = self._skeleton(item, reading, count)
            if shown is not None:
                saved += item.tokens - count(shown)
                why = f"older than the newest {protect:,} tokens of output"
                plan.append(Edit(item.span, (shown,), "prune", why, ("compact", "prune", "protect")))
        return plan[::-1] if saved >= minimum else ()

    def limits(self, budget: Budget) -> tuple[int, int]:
        """`protect` and `minimum` in counted tokens."""
        protect = min(40_000, budget.trigger // 2) if self.protect is None else self.protect
        minimum = min(20_000, budget.trigger // 4) if self.minimum is None else self.minimum
        return budget.counted(protect), budget.counted(minimum)

    def _old_outputs(self, view: View, protect: int, count: Count) -> list[Item]:
        """Outputs older than the protected ones, the newest first; outputs of one step stay together."""
        framing = count(Message("tool", (ToolResult("", ""),)))
        fixed = protected(view)
        may_reduce = {item.span.start for item in reducible(view)}
        old: list[Item] = []
        seen = 0
        for _, batch in groupby(self._candidates(view), key=lambda item: item.lines[0].step):
            items = list(batch)
            is_old = seen + items[0].tokens - framing > protect
            seen += sum(item.tokens - framing for item in items)
            for item in items if is_old else ():
                line = item.lines[0]
                is_excluded = line.at in fixed or not {*line.tools}.isdisjoint(self.exclude_tools)
                if item.span.start in may_reduce and not is_excluded:
                    old.append(item)
        return old

    def _candidates(self, view: View) -> list[Item]:
        """Outputs before the newest turns or steps and after the last summary, the newest first."""
        newest_turn = max((line.turn for line in view.lines), default=0)
        turns_are_everything = newest_turn <= self.keep_turns
        found: list[Item] = []
        for item in reversed(view.items):
            if item.is_folded:
                break
            if len(item.lines) != 1 or item.lines[0].answers is None:
                continue
            line = item.lines[0]
            if turns_are_everything:
                is_new = line.step > view.step - 1 - self.keep_steps
            else:
                is_new = line.turn > newest_turn - self.keep_turns
            if not is_new:
                found.append(item)
        return found

    def _skeleton(self, item: Item, reading: ViewReading, count: Count) -> Message | None:
        reduction = Reduction.of(item, reading.view)
        if reduction is None:
            return None
        chars = int(self.length * (0.5 + reading.importance(item.lines[0])))
        if reduction.is_short and reduction.is_within(chars):
            return None
        return reduction.as_skeleton(reduction.outline(), chars, count)
