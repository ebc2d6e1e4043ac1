"""The newest messages that fit, and what must never be lost."""

import msgspec

from refold.core.budget import Budget
from refold.core.message import Message, Text
from refold.core.plan import Count, Edit, Plan
from refold.core.view import View
from refold.policies.selection import oldest


class Window(msgspec.Struct, frozen=True):
    """Hides the oldest messages, with a note that they were there."""

    keep_recent: int | None = None
    """How many of the newest messages to keep, whatever they cost; unset, as many as fit."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        text = f"[refold #{view.next}: earlier messages are not shown here]" if view.handles else NOTE.text
        note = Message("user", (Text(text),), summary=True)
        only = self.keep_recent is not None
        old = oldest(view, budget, besides=count(note), keep_recent=self.keep_recent or 0, only=only)
        if old is None or old.tokens <= count(note):  # nothing to hide, or only what is hidden already
            return ()
        what = f"that fit in {budget.target:,} tokens" if self.keep_recent is None else f"{self.keep_recent}"
        why, setting = f"only the newest {what} stay", ("compact", "strategy")
        return (Edit(old.span, (note, *old.kept), "window", why, setting),)


NOTE = Message("user", (Text("[refold: earlier messages are not shown here]"),), summary=True)
