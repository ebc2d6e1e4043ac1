"""`Shrink`, the last resort: every message gets a share of the room, by its age and importance."""

from collections.abc import Sequence

import msgspec

from refold.core.budget import LEAST_ROOM, Budget
from refold.core.event import Line
from refold.core.message import Message, Text
from refold.core.plan import Count, Edit, Plan, Policy, must_stay, protected
from refold.core.view import Item, View
from refold.policies.importance import ViewReading
from refold.policies.ladder import run_stages
from refold.policies.outline import Bonus, Outline
from refold.policies.selection import select_oldest
from refold.policies.shorten import Reduction, quoted
from refold.policies.summarize import MAX_TOKENS, Summarize, SummaryPart, summary_edits, summary_limit
from refold.policies.text import demands, vocabulary

NEWEST = 2 / 3
"""Of the room, that the newest results may take before they are cut."""
FLOOR = 48
"""A message is not cut below so many tokens if there is another way."""
TRIES = 8
RULES = 0.5
"""Of the rest of the window, that the user's rules may take beyond the target."""


class Shrink(msgspec.Struct, frozen=True):
    """Takes the first way that fits: cut old messages, cut new ones, or summarize almost everything."""

    exclude_tools: tuple[str, ...] = ()
    """Tools whose outputs are not cut; they are summarized if there is no other way."""
    spare_newest: bool = True
    """Keep the newest results whole if they fit the window, whatever the target is."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        must = {line.at: line.tokens for line in must_stay(view)}
        new = {line.at: line.tokens for line in view.lines if line.step >= view.step - 1}
        overhead = budget.overhead + budget.unsent
        least = budget.tokens(overhead + sum(must.values()))
        goal = max(budget.target, least + int(LEAST_ROOM * budget.scale))
        if self.spare_newest:  # with room for a summary of the rest
            whole = overhead + sum((must | new).values()) + summary_limit(None, budget)
            goal = max(goal, min(budget.room, budget.tokens(whole)))
        best: list[Edit] = []
        fewest = view.tokens
        cut_old = Squeeze(newest=False, exclude_tools=self.exclude_tools)
        cut_new = Squeeze(newest=True, exclude_tools=self.exclude_tools)
        ways: list[Sequence[Policy]] = [
            (cut_old,),
            (Summarize(keep_recent=0),),
            (cut_new, cut_old),
            (cut_new, Summarize(keep_recent=0)),
            (cut_new, Fold(1)),
            (cut_new, Fold(1), Squeeze(newest=True, share=1.0, floor=0)),
            (Fold(0),),
        ]
        for way in ways:
            after, plan = run_stages(way, view, msgspec.structs.replace(budget, max_tokens=goal), count)
            if after.tokens < fewest:
                fewest = after.tokens
                best = plan
            if after.tokens + budget.overhead <= budget.counted(min(goal, budget.room)):
                return plan
        return best


class Fold(msgspec.Struct, frozen=True):
    """Replaces everything but the newest steps by one summary in the room that is left."""

    steps: int

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        old = select_oldest(view, budget, besides=0, only=True, steps=self.steps)
        if old is None:
            return ()
        rest = view.tokens - old.tokens + budget.overhead
        most = max(FLOOR, budget.counted(budget.target) - rest)
        free = int(RULES * (budget.counted(budget.room) - rest))
        part = SummaryPart.of(old, most, "shrink")
        part = msgspec.structs.replace(part, free=max(most, min(MAX_TOKENS, free)))
        return summary_edits((part,), view, count)


class Squeeze(msgspec.Struct, frozen=True):
    """Cuts results and texts to their shares: those of the newest step, or those before it."""

    newest: bool
    share: float = NEWEST
    """Of the whole room, that the newest may take."""
    floor: int = FLOOR
    exclude_tools: tuple[str, ...] = ()

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed_places = protected(view)
        items = [item for item in view.items if self._may_cut(item, view.step, fixed_places)]
        if not items:
            return ()
        reading = ViewReading(view)
        held = {(line.at, line.n) for item in items for line in item.lines}
        stays = [line for line in view.lines if (line.at, line.n) not in held]
        room = budget.counted(budget.target) - budget.overhead - sum(line.tokens for line in stays)
        if self.newest:
            fixed = budget.overhead + budget.unsent + sum(line.tokens for line in must_stay(view))
            whole = budget.counted(budget.target) - fixed
            room = max(room, int(self.share * whole)) if self.share < 1 else room
        known = vocabulary(reading.text(*stays))
        parts = [_Share(item, reading, lambda word: -1.5 if word in known else 0.0) for item in items]
        return self._cut(parts, room, count)

    def _may_cut(self, item: Item, step: int, fixed: set[int]) -> bool:
        if len(item.lines) != 1 or item.is_folded:
            return False
        line = item.lines[0]
        if line.role == "system" or line.calls or line.at in fixed:
            return False
        if {*line.tools} & {*self.exclude_tools}:
            return False
        is_unseen = line.step >= step - 1 and (line.answers is not None or line.role == "user")
        return is_unseen == self.newest

    def _cut(self, parts: "Sequence[_Share]", room: int, count: Count) -> Plan:
        if sum(part.tokens for part in parts) <= room:
            return ()
        level = _level(parts, room, self.floor)
        plan: list[Edit] = []
        for _ in range(TRIES):
            plan = []
            total = 0
            for part in parts:
                most = max(self.floor, int(level * part.weight))
                shown = part.within(most, count) if part.tokens > most else None
                total += part.tokens if shown is None else count(shown)
                if shown is not None:
                    why = f"{part.tokens:,} tokens are more than its share of {most:,}"
                    plan.append(Edit(part.item.span, (shown,), "shrink", why, ("compact", "max_tokens")))
            if total <= room:
                break
            level *= 0.8
        return plan


class _Share:
    """A message and its weight."""

    def __init__(self, item: Item, reading: ViewReading, bonus: Bonus) -> None:
        self.item = item
        self.line = item.lines[0]
        self._bonus = bonus
        self.tokens = self.line.tokens
        self.weight = _weight(self.line, reading)
        self._reduction = Reduction.of(item, reading.view)
        self._outline: Outline | None = None

    def within(self, most: int, count: Count) -> Message | None:
        if self._reduction is None:
            return None
        self._outline = self._outline or self._reduction.outline(self._bonus)
        shown = self._reduction.within(most, self._outline, count)
        rules = [rule for rule in demands(self._reduction.text) if shown and rule not in shown.text]
        if shown is None or not self.line.asks or not rules:
            return shown
        text = "\n- ".join([f"{shown.text}\nRules in it:", *map(quoted, rules)])
        return self._reduction.if_shorter(
            msgspec.structs.replace(shown, parts=(Text(text), *shown.parts[1:])), count
        )


def _weight(line: Line, reading: ViewReading) -> float:
    age = reading.view.step - line.step
    recent = 0.6 + 1.4 / (1 + age / 6)
    if line.answers is None:
        return recent * (2.0 if line.asks else 1.2)
    return recent * (0.5 + reading.importance(line))


def _level(parts: "Sequence[_Share]", room: int, floor: int) -> float:
    """The share of a weight of 1, such that all messages together take the room."""
    low = 0.0
    high = 4.0 * max(part.tokens for part in parts)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(min(part.tokens, max(floor, middle * part.weight)) for part in parts) > room:
            high = middle
        else:
            low = middle
    return low
