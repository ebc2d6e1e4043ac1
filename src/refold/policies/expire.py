"""`Expire` and `EndLeases`: messages that are reduced after a set number of steps."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from refold.core.budget import Budget
from refold.core.event import Expiry, Line
from refold.core.expiry import (
    expiry_for,
    lease_has_ended,
    lease_steps,
    matching_names,
    merge_expiries,
    most_aggressive,
)
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import Item, View
from refold.policies.importance import ViewReading
from refold.policies.shorten import Reduction

MessageKey: TypeAlias = tuple[int, str | None, int]
"""A message to be summarized: its place, the prompt, and the length of the summary."""
Batches: TypeAlias = Mapping[int, tuple[str, ...]]

LENGTH = 500
THRESHOLD = 0.3
RECENT_MESSAGES = 4


class Expire(msgspec.Struct, frozen=True):
    """Reduces messages once they are older than their setting allows, whether or not the view is full.

    A result added in step 1 that lasts 2 steps is whole in steps 2 and 3, and reduced in step 4.
    """

    tools: Mapping[str, Expiry] = {}
    """By the name of the tool, or a pattern such as `web_*`."""
    overrides: tuple[Mapping[str, Expiry], ...] = ()
    """By name or pattern, too; each overrides the settings of tools and messages, and the ones before it."""

    only: frozenset[int] | None = None
    """Places to look at; unset, all."""
    told: Mapping[MessageKey, str] = {}
    """Summaries of messages that a model wrote."""
    cache: dict[tuple[Any, ...], Expiry] = {}
    """Merged settings, by what they depend on; most messages share a few."""
    near: Mapping[int, float] = {}
    """Similarity in meaning to the newest messages, from 0 to 1, by place, if there is an embedder."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed = protected(view)
        reading = ViewReading(view)
        items = {item.lines[0].at: item for item in reducible(view)}
        lines = [item.lines[0] for at, item in items.items() if self.only is None or at in self.only]
        together = batches(view.lines)
        plan: list[Edit] = []
        for line in self.due(lines, view.step, together):
            if line.at in fixed:
                continue
            item = items[line.at]
            rule = self.rule(line, together)
            if rule.strategy == "relevance" and not self._is_irrelevant(rule, line, reading):
                continue
            summary = self.told.get((item.span.start, rule.prompt, length_of(rule)))
            shown = _reduced(rule, item, count, view, summary)
            if shown is not None:
                setting = self._setting(rule, line, together)
                plan.append(Edit(item.span, (shown,), "expire", _why(rule), setting))
        return plan

    def due(self, lines: Sequence[Line], step: int, together: Batches) -> list[Line]:
        """The lines that have expired. This runs in every step, so most are told by their age alone."""
        soonest = step
        for settings in (self.tools, *self.overrides):
            for rule in settings.values():
                if rule.after_steps is not None:
                    soonest = min(soonest, rule.after_steps)
        return [
            line
            for line in lines
            if (step - line.step > soonest or line.expiry is not None)
            and self.concerns(line)
            and is_due(self.rule(line, together), line, step)
        ]

    def concerns(self, line: Line) -> bool:
        """True for messages that can have an expiry."""
        if line.expiry is not None:
            return line.role != "system"
        return line.role in ("tool", "user") and _is_of_tool(line)

    def rule(self, line: Line, together: Batches) -> Expiry:
        """The expiry of a message; results that came in one message share the most aggressive one."""
        names = _tool_names(line, together)
        key = (names, line.expiry, _is_of_tool(line))
        if key not in self.cache:
            own = [self._rule_for(tool, line) for tool in names]
            self.cache[key] = own[0] if len(own) == 1 else most_aggressive(own)
        return self.cache[key]

    def _rule_for(self, tool: str, line: Line) -> Expiry:
        expiry = line.expiry or Expiry()
        if _is_of_tool(line):
            expiry = merge_expiries(expiry_for(tool, self.tools), expiry)
        return merge_expiries(expiry, *(expiry_for(tool, settings) for settings in self.overrides))

    def _is_irrelevant(self, rule: Expiry, line: Line, reading: ViewReading) -> bool:
        threshold = THRESHOLD if rule.threshold is None else rule.threshold
        relevance = reading.relevance(line, current_work(reading.view.lines))
        return max(relevance, self.near.get(line.at, 0.0)) < threshold

    def _setting(self, rule: Expiry, line: Line, together: Batches) -> tuple[str, ...]:
        """The setting that the message's age was compared with."""
        names = _tool_names(line, together)
        for settings in self.overrides:
            if any(expiry_for(tool, settings).after_steps is not None for tool in names):
                return ("override", "after_steps")
        if line.expiry is not None and line.expiry.after_steps is not None:
            return ("message", "after_steps")
        for tool in names:
            for name in reversed(matching_names(tool, self.tools)):
                if self.tools[name].after_steps == rule.after_steps:
                    return ("tools", name, "expire", "after_steps")
        return ("tools", names[0], "expire", "after_steps")


def _is_of_tool(line: Line) -> bool:
    return bool(line.tools or line.answers)


def _tool_names(line: Line, together: Batches) -> tuple[str, ...]:
    """The tools behind a message, or behind all results that came in one message with it."""
    names = line.tools
    if line.whole is not None:
        names = together.get(line.whole, line.tools)
    return names or ("",)


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


def current_work(lines: Sequence[Line]) -> list[Line]:
    """The newest messages of the user and the agent, which tell what the agent is working on."""
    own = [line for line in lines if line.role == "assistant" or line.asks]
    return [line for line in own if line.calls or not line.tools][-RECENT_MESSAGES:]


def _reduced(rule: Expiry, item: Item, count: Count, view: View, summary: str | None) -> Message | None:
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
    if rule.compact_mode == "ai-summary" and summary:
        made = reduction.as_summary(summary, length, count)
        if made is not None:
            return made
    return reduction.as_head(length, count)


def length_of(rule: Expiry) -> int:
    return LENGTH if rule.length is None else rule.length


def _why(rule: Expiry) -> str:
    age = f"{rule.mode or 'compact'}: older than {rule.after_steps} step{'s' * (rule.after_steps != 1)}"
    return f"{age}, and of little relevance" if rule.strategy == "relevance" else age


class EndLeases(msgspec.Struct, frozen=True):
    """Removes results of `refold_expand` and `refold_search` whose lease has ended; their names stay.

    The end of a lease alone is no reason for an edit, since the provider's cache would lose all that follows
    the result. This policy runs where the view is edited anyway, or where the cache is cold.
    """

    since: int = 0
    """Results before this place stay."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed = protected(view)
        plan: list[Edit] = []
        for item in reducible(view):
            line = item.lines[0]
            if item.edit is not None or item.span.start < self.since or line.at in fixed:
                continue
            reduction = Reduction.of(item, view) if lease_has_ended(line, view.step) else None
            name = reduction and reduction.if_shorter(reduction.as_name("removed"), count)
            if name:
                why = f"remove: its lease of {lease_steps(line)} steps has ended"
                plan.append(Edit(item.span, (name,), "expire", why, ("expand", "lease_steps")))
        return plan
