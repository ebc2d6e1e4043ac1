"""An output that is larger than its share is shown in part, from the first request on that would have it."""

import msgspec

from refold.core.budget import Budget
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import View
from refold.policies.shorten import Reduction


class Cap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Head, skeleton and tail of what is too large; nothing that was sent before is changed by it."""

    share: float = 0.25
    """Of the window, that one output may take."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        most = self.most(budget)
        fixed = protected(view)
        plan = list[Edit]()
        for item in reducible(view):
            line = item.lines[0]
            if item.edit is not None or line.tokens <= most or line.answers is None or line.at in fixed:
                continue
            reduction = Reduction.of(item, view)
            if reduction is None:
                continue
            shown = reduction.within(most, reduction.outline(), count)
            if shown is not None:
                why = f"{line.tokens:,} tokens are more than {self.share:.0%} of the window"
                plan.append(Edit(item.span, (shown,), "cap", why, ("compact", "cap", "share")))
        return plan

    def most(self, budget: Budget) -> int:
        """What one output may take, as it is counted."""
        return int(budget.window * self.share / budget.margin)
