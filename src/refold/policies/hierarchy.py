"""Summaries in levels: segments of the conversation, and eras made of segments; the newest detail stays."""

import msgspec

from refold.core.budget import Budget
from refold.core.plan import Count, Edit, Plan
from refold.core.view import Item, View
from refold.policies.selection import Selection, oldest
from refold.policies.summarize import DEEPER, Part, fold_away, longest


class Hierarchy(msgspec.Struct, frozen=True):
    """Each compaction leaves a segment of its own; when there are too many, the oldest become an era."""

    keep_recent: int = 10
    """How many of the newest messages stay, whatever they cost."""
    max_tokens: int | None = None
    """The longest era; unset, a third of what compaction comes down to. A segment has a third of it."""
    fill: bool = True
    """Whether more than that stays where there is room for it."""
    segments: int = 4
    """How many stay before they are merged."""
    focus: str = ""
    """What they should tell most about."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        plan = list[Edit]()
        for part in self.parts(view, budget):
            plan += fold_away(part, msgspec.structs.replace(view, next=view.next + len(plan)), count)
        return plan

    def parts(self, view: View, budget: Budget) -> list[Part]:
        """What is to be summarized: segments that become an era, and what becomes a segment."""
        most = longest(self.max_tokens, budget)
        old = oldest(
            view, budget, besides=most, keep_recent=self.keep_recent, only=not self.fill, share=DEEPER
        )
        if old is None:
            return []
        known = [item for item in old.items if item.is_folded and item.edit is not None]
        era, new = _merged(old, known) if len(known) >= self.segments else None, _after(old, known)
        eras = [Part(era, most, "hierarchy", "era", self.focus)] if era else []
        return eras + ([Part(new, most // 3, "hierarchy", "segment", self.focus)] if new else [])


def _merged(old: Selection, known: list[Item]) -> Selection:
    """All from the first segment to the last, also what somebody took out of one again."""
    first, last = old.items.index(known[0]), old.items.index(known[-1])
    return _of(old, old.items[first : last + 1])


def _after(old: Selection, known: list[Item]) -> Selection | None:
    """What is not in a segment yet."""
    start = known[-1].span.end if known else 0
    part = _of(old, tuple(item for item in old.items if item.span.start >= start))
    return part if part.hidden else None


def _of(old: Selection, items: tuple[Item, ...]) -> Selection:
    lines = {(line.at, line.n) for item in items for line in item.lines}
    hidden = tuple(line for line in old.hidden if (line.at, line.n) in lines)
    kept = {at for at, _ in lines} & {*old.kept}
    return Selection(items, tuple(at for at in old.kept if at in kept), hidden, old.corrected)
