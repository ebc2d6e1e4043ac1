"""Answers of refold's own tools whose lease has ended: only their names stay."""

import msgspec

from refold.core.budget import Budget
from refold.core.expiry import lease_has_ended, lease_steps
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import View
from refold.policies.shorten import Reduction


class EndLeases(msgspec.Struct, frozen=True):
    """Puts away answers of `refold_expand` and `refold_search` whose lease has ended.

    The end of a lease is no reason for an edit of its own: the provider's cache would lose all that stands
    after the answer. This runs where the view is edited anyway, or where the cache is cold.
    """

    since: int = 0
    """Answers before this place stay."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed = protected(view)
        plan = list[Edit]()
        for item in reducible(view):
            line = item.lines[0]
            may_end = item.edit is None and item.span.start >= self.since and line.at not in fixed
            if not may_end or not lease_has_ended(line, view.step):
                continue
            reduction = Reduction.of(item, view)
            if reduction is None:
                continue
            name = reduction.if_shorter(reduction.as_name("removed"), count)
            if name is not None:
                why = f"remove: its lease of {lease_steps(line)} steps has ended"
                plan.append(Edit(item.span, (name,), "expire", why, ("expand", "lease_steps")))
        return plan
