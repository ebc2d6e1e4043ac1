"""What is old by its own rule: tool outputs that were set to last so many steps."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from refold.core.budget import Budget
from refold.core.event import Expiry, Line
from refold.core.expiry import expiry_for, matching_names, merge_expiries, most_aggressive
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import Item, View
from refold.policies.importance import ViewReading
from refold.policies.shorten import Reduction

MessageKey: TypeAlias = tuple[int, str | None, int]
"""A message by its place, with the prompt and the length that its summary is to have."""
Batches: TypeAlias = Mapping[int, tuple[str, ...]]

LENGTH = 500
THRESHOLD = 0.3
RECENT = 4
"""Messages that tell what the work at hand is."""


class Expire(msgspec.Struct, frozen=True):
    """Acts on the step that a setting names, whatever room there is.

    A result added in step 1 that lasts 2 steps is whole in steps 2 and 3, and reduced in step 4.
    """

    tools: Mapping[str, Expiry] = {}
    """By the name of the tool, or a pattern such as `web_*`."""
    overrides: tuple[Mapping[str, Expiry], ...] = ()
    """By name or pattern too; each beats what is set for a tool or a message, and the ones before it."""

    only: frozenset[int] | None = None
    """Places that are looked at; unset, all."""
    told: Mapping[MessageKey, str] = {}
    """What a model wrote about messages that are to be summarized."""
    cache: dict[tuple[Any, ...], Expiry] = {}
    """Rules that were worked out, by what they depend on: nearly all messages share a few."""
    near: Mapping[int, float] = {}
    """How near messages are to the work at hand in meaning, from 0 to 1, by place: what an embedder says."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed, reading = protected(view), ViewReading(view)
        bare = {item.lines[0].at: item for item in reducible(view)}
        lines = [item.lines[0] for at, item in bare.items() if self.only is None or at in self.only]
        together = batches(view.lines)
        plan = list[Edit]()
        for line in self.due(lines, view.step, together):
            rule, item = self.rule(line, together), bare[line.at]
            if line.at in fixed:
                continue
            told = self.told.get((item.span.start, rule.prompt, length_of(rule)))
            stale = _is_stale(rule, line, reading, self.near)
            shown = _reduced(rule, item, count, view, told) if stale else None
            if shown is not None:
                setting = self._setting(rule, line, together)
                plan.append(Edit(item.span, (shown,), "expire", _why(rule), setting))
        return plan

    def due(self, lines: Sequence[Line], step: int, together: Batches) -> list[Line]:
        """Those whose time is over. This is asked in every step, so most are told by their age alone."""
        rules = [rule for one in (self.tools, *self.overrides) for rule in one.values()]
        soonest = min((rule.after_steps for rule in rules if rule.after_steps is not None), default=step)
        return [
            line
            for line in lines
            if (step - line.step > soonest or line.expiry is not None)
            and self.concerns(line)
            and is_due(self.rule(line, together), line, step)
        ]

    def concerns(self, line: Line) -> bool:
        """Whether a rule may be set for it."""
        if line.expiry is not None:
            return line.role != "system"
        return line.role in ("tool", "user") and _is_of_tool(line)

    def rule(self, line: Line, together: Batches) -> Expiry:
        """What holds for a message: results that came in one message share the most aggressive rule."""
        names = _names(line, together)
        key = (names, line.expiry, _is_of_tool(line))
        if key not in self.cache:
            own = [self._rule_for(tool, line) for tool in names]
            self.cache[key] = own[0] if len(own) == 1 else most_aggressive(own)
        return self.cache[key]

    def _rule_for(self, tool: str, line: Line) -> Expiry:
        said = line.expiry or Expiry()
        if _is_of_tool(line):
            said = merge_expiries(expiry_for(tool, self.tools), said)
        return merge_expiries(said, *(expiry_for(tool, one) for one in self.overrides))

    def _setting(self, rule: Expiry, line: Line, together: Batches) -> tuple[str, ...]:
        """The setting that its age was compared with."""
        names = _names(line, together)
        asked = [expiry_for(tool, one) for tool in names for one in self.overrides]
        if any(one.after_steps is not None for one in asked):
            return ("override", "after_steps")
        if line.expiry is not None and line.expiry.after_steps is not None:
            return ("message", "after_steps")
        found = [name for tool in names for name in reversed(matching_names(tool, self.tools))]
        same = (name for name in found if self.tools[name].after_steps == rule.after_steps)
        return ("tools", next(same, names[0]), "expire", "after_steps")


def _is_of_tool(line: Line) -> bool:
    return bool(line.tools or line.answers)


def _names(line: Line, together: Batches) -> tuple[str, ...]:
    """The tools behind a message, or those behind all that came in one message with it."""
    return (together.get(line.whole, line.tools) if line.whole is not None else line.tools) or ("",)


def batches(lines: Sequence[Line]) -> Batches:
    """The tools whose results came in one message, by the place where that begins."""
    found = dict[int, tuple[str, ...]]()
    for line in lines:
        if line.whole is not None and line.tools:
            found[line.whole] = (*found.get(line.whole, ()), *line.tools)
    return found


def is_due(rule: Expiry, line: Line, step: int) -> bool:
    """
    >>> [is_due(Expiry(after_steps=2), Line(0, "tool", 9, 1, 1), step) for step in (2, 3, 4)]
    [False, False, True]
    """
    return rule.after_steps is not None and rule.mode != "none" and step - line.step > rule.after_steps


def at_hand(lines: Sequence[Line]) -> list[Line]:
    """The newest messages of the user and the agent: they tell what the work at hand is."""
    own = [line for line in lines if line.role == "assistant" or line.asks]
    return [line for line in own if line.calls or not line.tools][-RECENT:]


def _is_stale(rule: Expiry, line: Line, reading: ViewReading, near: Mapping[int, float]) -> bool:
    if rule.strategy != "relevance":
        return True
    threshold = THRESHOLD if rule.threshold is None else rule.threshold
    relevance = reading.relevance(line, at_hand(reading.view.lines))
    return max(relevance, near.get(line.at, 0.0)) < threshold


def _reduced(rule: Expiry, item: Item, count: Count, view: View, told: str | None) -> Message | None:
    reduction = Reduction.of(item, view)
    if reduction is None:
        return None
    length = length_of(rule)
    if rule.mode == "remove":
        return reduction.if_shorter(reduction.as_name("removed"), count)
    if reduction.is_short and reduction.is_within(length):
        return None
    if rule.compact_mode == "skeleton":
        return reduction.as_skeleton(reduction.outline(), length, count)
    if rule.compact_mode == "ai-summary" and told:
        made = reduction.as_told(told, length, count)
        if made is not None:
            return made
    return reduction.as_head(length, count)


def length_of(rule: Expiry) -> int:
    return LENGTH if rule.length is None else rule.length


def _why(rule: Expiry) -> str:
    how = rule.mode or "compact"
    aged = f"older than {rule.after_steps} step{'s' * (rule.after_steps != 1)}"
    return f"{how}: {aged}, and of little relevance" if rule.strategy == "relevance" else f"{how}: {aged}"
