"""System text that newer system text has taken the place of."""

import msgspec

from refold.core.budget import Budget
from refold.core.event import Span
from refold.core.plan import Count, Edit, Plan
from refold.core.view import View


class Supersede(msgspec.Struct, frozen=True):
    """Hides what is not sent any more, so that it is not counted either."""

    places: tuple[int, ...]
    """Which messages."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        shown = {line.at for item in view.items if item.edit is None for line in item.lines}
        why = "newer system text took its place"
        return [Edit(Span(at, at + 1), (), "supersede", why) for at in self.places if at in shown]
