"""Old tool outputs, shown as what they were instead of what they said."""

from collections.abc import Iterator
from itertools import groupby

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line
from refold.core.message import Message, ToolResult
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import Item, View
from refold.policies.importance import ViewReading
from refold.policies.shorten import Reduction


class Prune(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clears outputs from the newest backwards, up to the last summary; every call stays."""

    protect: int | None = None
    """Tokens of the newest outputs that stay; unset, 40,000 or half of the threshold if that is less."""
    minimum: int | None = None
    """What is saved at least, or nothing is changed; unset, 20,000 or a quarter of the threshold."""
    keep_turns: int = 2
    """The newest turns, shown whole whatever they cost."""
    keep_steps: int = 4
    """The newest steps, where those turns are the whole conversation."""
    exclude_tools: tuple[str, ...] = ()
    """Tools whose outputs are never cleared."""
    length: int = 600
    """Characters of what stays of an output; half of it of one that nobody used, more of one that matters."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        protect, minimum = self.limits(budget)
        old = self._old(view, protect, count)
        if sum(item.tokens for item in old) < minimum:
            return ()
        plan, saved, reading = list[Edit](), 0, ViewReading(view)
        for item in old:
            shown = self._skeleton(item, reading, count)
            if shown is not None:
                saved += item.tokens - count(shown)
                why = f"older than the newest {protect:,} tokens of output"
                plan.append(Edit(item.span, (shown,), "prune", why, ("compact", "prune", "protect")))
        return plan[::-1] if saved >= minimum else ()

    def _old(self, view: View, protect: int, count: Count) -> list[Item]:
        """Outputs that may be cleared, the newest first."""
        framing = count(Message("tool", (ToolResult("", ""),)))
        fixed, free = protected(view), {item.span.start for item in reducible(view)}
        seen, old = 0, list[Item]()
        for _, batch in groupby(self._outputs(view), key=lambda item: item.lines[0].step):
            whole = list(batch)  # results of one step stay together
            starts = seen
            seen += sum(item.tokens - framing for item in whole)
            if starts + whole[0].tokens - framing > protect:
                old += [
                    item for item in whole if item.span.start in free and self._may_go(item.lines[0], fixed)
                ]
        return old

    def _may_go(self, line: Line, fixed: set[int]) -> bool:
        return line.at not in fixed and not {*line.tools} & {*self.exclude_tools}

    def limits(self, budget: Budget) -> tuple[int, int]:
        """What is protected, and what is saved at least, as it is counted."""
        protect = min(40_000, budget.trigger // 2) if self.protect is None else self.protect
        minimum = min(20_000, budget.trigger // 4) if self.minimum is None else self.minimum
        return budget.counted(protect), budget.counted(minimum)

    def _outputs(self, view: View) -> Iterator[Item]:
        """The newest first, without those of the newest turns or steps, up to a summary."""
        newest_turn = max((line.turn for line in view.lines), default=0)
        by_step = newest_turn <= self.keep_turns  # they are the whole conversation
        for item in reversed(view.items):
            if item.is_folded:
                return
            if len(item.lines) != 1 or item.lines[0].answers is None:
                continue
            line = item.lines[0]
            is_new = (
                line.step > view.step - 1 - self.keep_steps
                if by_step
                else line.turn > newest_turn - self.keep_turns
            )
            if not is_new:
                yield item

    def _skeleton(self, item: Item, reading: ViewReading, count: Count) -> Message | None:
        reduction = Reduction.of(item, reading.view)
        if reduction is None:
            return None
        chars = int(self.length * (0.5 + reading.importance(item.lines[0])))
        if reduction.is_short and reduction.is_within(chars):
            return None
        return reduction.as_skeleton(reduction.outline(), chars, count)
