"""How long the results of each tool should last, by what past conversations needed, and what that costs.

>>> lasts([1] * 300, cover=0.99), lasts([1] * 299 + [40], cover=0.99), lasts([4] * 10, cover=0.99)
(2, 40, 10)
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import ceil, exp, inf, lgamma, log

import msgspec
from msgspec.structs import replace

from refold.core.event import Expiry
from refold.policies.expire import Expire
from refold.policies.usage import REDUCED, Need, UsageHistory, UsedResult

CONFIDENCE = 0.95
"""How sure it is to be that not more uses come later than wanted."""
LEAST = 2
"""Steps that any result lasts: the one that reads it, and one more."""
ENOUGH = 20
"""Results of a tool of which fewer say nothing."""
WORTHWHILE = 0.05
"""Of the tokens that a tool's results take: what a setting must save at least."""
HALVES = 4
"""Conversations from which on what was learned of one half is tried on the other."""


class Trial(msgspec.Struct, frozen=True):
    """What settings would have done to the results of one tool."""

    uses: int = 0
    late: int = 0
    """Uses after the result had expired."""
    missed: int = 0
    """Of these, those that took a value which then stood nowhere."""
    tokens: int = 0
    """Of its results, in all requests that had them."""
    saved: int = 0

    def __add__(self, other: "Trial") -> "Trial":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Trial(*(one + two for one, two in pairs))


class Lesson(msgspec.Struct, frozen=True):
    """What is known of one tool, and what follows from it."""

    tool: str
    results: tuple[UsedResult, ...]
    needs: tuple[Need, ...]
    beside: tuple[Need, ...] = ()
    """Needs of other tools' results that came in one message with its own, and would expire with them."""
    used: int = 0
    """Results that were needed at all."""
    expire: Expiry | None = None
    """What is proposed; None where it is left alone."""
    why: str = ""
    """Why it is left alone."""
    trial: Trial = Trial()
    """With all that is proposed in force, in the conversations that it was learned from."""
    unseen: Trial | None = None
    """In those that it was not learned from; None where there are too few to tell."""

    @property
    def steps(self) -> list[int]:
        """For how long its results were needed, the shortest first."""
        return sorted(need.steps for need in self.needs)

    def saves(self, after_steps: int | None) -> float:
        """Of the tokens that its results take, if they last so many steps."""
        tokens = sum(one.line.tokens * one.requests for one in self.results)
        saved = sum(one.saved * max(0, one.requests - (after_steps or 0)) for one in self.results)
        return saved / (tokens or 1)


def propose(pasts: Sequence[UsageHistory], cover: float) -> list[Lesson]:
    """Of every tool, those first that save the most; those that are left alone come last."""
    known = {lesson.tool: lesson for lesson in lessons(pasts)}
    rules = {tool: _rule(one, cover) for tool, one in known.items() if len(one.results) >= ENOUGH}
    good = {tool: rule for tool, rule in rules.items() if known[tool].saves(rule.after_steps) >= WORTHWHILE}
    trials, unseen = tried(pasts, good), _unseen(pasts, good, cover)
    told = list[Lesson]()
    for tool, one in known.items():
        is_small = one.saves(LEAST) < WORTHWHILE
        why = "too few results" if tool not in rules else "already small" if is_small else "needed for long"
        told.append(
            replace(
                one,
                expire=good.get(tool),
                why="" if tool in good else why,
                trial=trials[tool],
                unseen=unseen.get(tool),
            )
        )
    return sorted(told, key=lambda one: (one.expire is None, -one.trial.saved, -one.trial.tokens, one.tool))


def lessons(pasts: Sequence[UsageHistory]) -> list[Lesson]:
    """What is known of every tool."""
    results, needs = defaultdict[str, list[UsedResult]](list), defaultdict[str, list[Need]](list)
    beside, used = defaultdict[str, list[Need]](list), Counter[str]()
    for past in pasts:
        for result in past.results:
            results[result.line.tools[0]].append(result)
        for need in past.needs:
            own, whole = need.of.tools[0], need.of.whole
            needs[own].append(need)
            for tool in {*past.together.get(whole, ())} - {own} if whole is not None else ():
                beside[tool].append(need)
        used.update(need.of.tools[0] for need in {need.of.at: need for need in past.needs}.values())
    return [
        Lesson(tool, tuple(found), tuple(needs[tool]), tuple(beside[tool]), used[tool])
        for tool, found in results.items()
    ]


def _rule(lesson: Lesson, cover: float) -> Expiry:
    """Uses that find all they take in what expiry leaves count as early ones; but half of all uses, whatever
    they take, see the whole result: what an agent reads besides exact values cannot be told from its words.
    """
    needs = (*lesson.needs, *lesson.beside)
    steps = [need.steps if need.only_in else 1 for need in needs]
    after = lasts(steps or [1] * len(lesson.results), cover)  # what nobody took up was read once
    half = lesson.steps[len(lesson.needs) // 2 :][:1]
    return replace(REDUCED, after_steps=max([after, *half]))


def lasts(steps: Sequence[int], cover: float) -> int:
    """Steps within which so large a share of all uses will lie, most likely, by those that were seen.

    This is the upper confidence bound of a quantile: no shape is assumed. Where too few were seen for one,
    the longest is stretched as if long ones became rarer at a constant rate.
    """
    ordered, spare = sorted(steps), spared(len(steps), cover)
    if spare is not None:
        return max(LEAST, ordered[-1 - spare])
    stretch = log(wanted(cover)) / log(len(ordered) + 1)
    return max(LEAST, ceil(ordered[-1] * max(1.0, stretch)))


def wanted(cover: float) -> int:
    """Uses that must have been seen for the longest of them to be long enough.

    >>> wanted(0.99), wanted(0.9)
    (299, 29)
    """
    return ceil(log(1 - CONFIDENCE) / log(cover))


def spared(seen: int, cover: float) -> int | None:
    """How many of the longest may be left out; None where even the longest may be too short.

    >>> [spared(n, 0.99) for n in (298, 299, 1_000)]
    [None, 0, 4]
    """
    total, spare = 0.0, None
    for beyond in range(seen):
        ways = lgamma(seen + 1) - lgamma(beyond + 1) - lgamma(seen - beyond + 1)
        total += exp(ways + beyond * log(1 - cover) + (seen - beyond) * log(cover))
        if total > 1 - CONFIDENCE:
            break
        spare = beyond
    return spare


def tried(pasts: Sequence[UsageHistory], rules: Mapping[str, Expiry]) -> dict[str, Trial]:
    """What these rules would have done, by tool: each conversation is gone through with them in force."""
    trials = defaultdict[str, Trial](Trial)
    expire = Expire(rules)
    for past in pasts:
        ends = {one.line.at: _end(expire, one, past) for one in past.results}
        for one in past.results:
            less = max(0, past.steps - ends[one.line.at])
            full, saved = one.line.tokens * one.requests, int(one.saved * less)
            trials[one.line.tools[0]] += Trial(tokens=full, saved=saved)
        for need in past.needs:
            late = ends.get(need.of.at, inf) < need.step
            missed = late and any(all(ends.get(at, inf) < need.step for at in some) for some in need.only_in)
            trials[need.of.tools[0]] += Trial(uses=1, late=late, missed=missed)
    return trials


def _end(expire: Expire, result: UsedResult, past: UsageHistory) -> float:
    """The last step that sees all of it."""
    after = expire.rule(result.line, past.together).after_steps
    return inf if after is None else result.line.step + after


def _unseen(pasts: Sequence[UsageHistory], rules: Mapping[str, Expiry], cover: float) -> dict[str, Trial]:
    """What each half of the conversations would have taught about the other."""
    if len(pasts) < HALVES:
        return {}
    halves = (pasts[::2], pasts[1::2])
    known = [{one.tool: one for one in lessons(half)} for half in halves]
    both = [tool for tool in rules if all(tool in half for half in known)]
    told = [tried(halves[1 - n], {tool: _rule(known[n][tool], cover) for tool in both}) for n in (0, 1)]
    return {tool: told[0][tool] + told[1][tool] for tool in both}
