"""Proposes how long each tool's results should last, from what past conversations needed.

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
"""The confidence that no more uses come too late than allowed."""
LEAST = 2
"""The least number of steps: the one that reads the result, and one more."""
ENOUGH = 20
"""Results that a tool must have before anything is proposed for it."""
WORTHWHILE = 0.05
"""The share of a tool's tokens that a proposed setting must save."""
HALVES = 4
"""With so many conversations, what one half teaches is tried on the other."""


class Trial(msgspec.Struct, frozen=True):
    """What settings would have done to one tool's results."""

    uses: int = 0
    late: int = 0
    """Uses after the result had expired."""
    missed: int = 0
    """Late uses of a value that was nowhere else."""
    tokens: int = 0
    """Tokens of its results in all requests."""
    saved: int = 0

    def __add__(self, other: "Trial") -> "Trial":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Trial(*(one + two for one, two in pairs))


class Lesson(msgspec.Struct, frozen=True):
    """The usage of one tool's results, and the setting that follows from it."""

    tool: str
    results: tuple[UsedResult, ...]
    needs: tuple[Need, ...]
    beside: tuple[Need, ...] = ()
    """Needs of other tools' results that came in one message with its own and expire with them."""
    used: int = 0
    """Number of results that were needed."""
    expire: Expiry | None = None
    """The proposed setting; None for none."""
    why: str = ""
    """Why nothing is proposed."""
    trial: Trial = Trial()
    """All proposals tried on the conversations that they were learned from."""
    unseen: Trial | None = None
    """The same on conversations that they were not learned from; None if there are too few."""

    @property
    def steps(self) -> list[int]:
        """The steps for which results were needed, in ascending order."""
        return sorted(need.steps for need in self.needs)

    def saves(self, after_steps: int | None) -> float:
        """The share of its tokens that is saved if results last so many steps."""
        tokens = sum(one.line.tokens * one.requests for one in self.results)
        saved = sum(one.saved * max(0, one.requests - (after_steps or 0)) for one in self.results)
        return saved / (tokens or 1)


def propose(pasts: Sequence[UsageHistory], cover: float) -> list[Lesson]:
    """A lesson for every tool; those with the largest savings first, those without a proposal last."""
    known = {lesson.tool: lesson for lesson in lessons(pasts)}
    rules = {tool: _rule(one, cover) for tool, one in known.items() if len(one.results) >= ENOUGH}
    good = {tool: rule for tool, rule in rules.items() if known[tool].saves(rule.after_steps) >= WORTHWHILE}
    trials = tried(pasts, good)
    unseen = _unseen(pasts, good, cover)
    found: list[Lesson] = []
    for tool, one in known.items():
        why = "needed for long"
        if tool in good:
            why = ""
        elif tool not in rules:
            why = "too few results"
        elif one.saves(LEAST) < WORTHWHILE:
            why = "already small"
        trial = trials[tool]
        found.append(replace(one, expire=good.get(tool), why=why, trial=trial, unseen=unseen.get(tool)))
    return sorted(found, key=lambda one: (one.expire is None, -one.trial.saved, -one.trial.tokens, one.tool))


def lessons(pasts: Sequence[UsageHistory]) -> list[Lesson]:
    """The usage of every tool's results."""
    results = defaultdict[str, list[UsedResult]](list)
    needs = defaultdict[str, list[Need]](list)
    beside = defaultdict[str, list[Need]](list)
    used = Counter[str]()
    for past in pasts:
        for result in past.results:
            results[result.line.tools[0]].append(result)
        for need in past.needs:
            own = need.of.tools[0]
            needs[own].append(need)
            together = () if need.of.whole is None else past.together.get(need.of.whole, ())
            for tool in {*together} - {own}:
                beside[tool].append(need)
        used.update({need.of.at: need.of.tools[0] for need in past.needs}.values())
    return [
        Lesson(tool, tuple(found), tuple(needs[tool]), tuple(beside[tool]), used[tool])
        for tool, found in results.items()
    ]


def _rule(lesson: Lesson, cover: float) -> Expiry:
    """The setting under which at most a share of `1 - cover` of the uses come too late.

    Uses that find their values in what expiry leaves are never late. But half of all uses see the whole
    result, since what an agent reads besides exact values is not known.
    """
    needs = (*lesson.needs, *lesson.beside)
    steps = [need.steps if need.only_in else 1 for need in needs]
    after = lasts(steps or [1] * len(lesson.results), cover)  # a result without uses was read once
    half = lesson.steps[len(lesson.needs) // 2 :][:1]
    return replace(REDUCED, after_steps=max([after, *half]))


def lasts(steps: Sequence[int], cover: float) -> int:
    """The steps within which a share `cover` of all uses lies, with confidence.

    This is the upper confidence bound of a quantile, without an assumed distribution. If there are too few
    uses for one, the longest is stretched as if long uses became rarer at a constant rate.
    """
    ordered = sorted(steps)
    spare = spared(len(steps), cover)
    if spare is not None:
        return max(LEAST, ordered[-1 - spare])
    stretch = log(wanted(cover)) / log(len(ordered) + 1)
    return max(LEAST, ceil(ordered[-1] * max(1.0, stretch)))


def wanted(cover: float) -> int:
    """The number of uses from which on the longest of them is a bound.

    >>> wanted(0.99), wanted(0.9)
    (299, 29)
    """
    return ceil(log(1 - CONFIDENCE) / log(cover))


def spared(seen: int, cover: float) -> int | None:
    """How many of the longest uses may be left out; None if even the longest is no bound.

    >>> [spared(n, 0.99) for n in (298, 299, 1_000)]
    [None, 0, 4]
    """
    total = 0.0
    spare = None
    for beyond in range(seen):
        ways = lgamma(seen + 1) - lgamma(beyond + 1) - lgamma(seen - beyond + 1)
        total += exp(ways + beyond * log(1 - cover) + (seen - beyond) * log(cover))
        if total > 1 - CONFIDENCE:
            break
        spare = beyond
    return spare


def tried(pasts: Sequence[UsageHistory], rules: Mapping[str, Expiry]) -> dict[str, Trial]:
    """What these rules would have done in each conversation, by tool."""
    trials = defaultdict[str, Trial](Trial)
    expire = Expire(rules)
    for past in pasts:
        ends = {one.line.at: _end(expire, one, past) for one in past.results}
        for one in past.results:
            less = max(0, past.steps - ends[one.line.at])
            tokens = one.line.tokens * one.requests
            trials[one.line.tools[0]] += Trial(tokens=tokens, saved=int(one.saved * less))
        for need in past.needs:
            late = ends.get(need.of.at, inf) < need.step
            missed = late and any(all(ends.get(at, inf) < need.step for at in some) for some in need.only_in)
            trials[need.of.tools[0]] += Trial(uses=1, late=late, missed=missed)
    return trials


def _end(expire: Expire, result: UsedResult, past: UsageHistory) -> float:
    """The last step that sees the whole result."""
    after = expire.rule(result.line, past.together).after_steps
    return inf if after is None else result.line.step + after


def _unseen(pasts: Sequence[UsageHistory], rules: Mapping[str, Expiry], cover: float) -> dict[str, Trial]:
    """What rules learned from each half of the conversations would have done in the other half."""
    if len(pasts) < HALVES:
        return {}
    halves = (pasts[::2], pasts[1::2])
    known = [{one.tool: one for one in lessons(half)} for half in halves]
    both = [tool for tool in rules if all(tool in half for half in known)]
    trials: list[dict[str, Trial]] = []
    for lessons_of_half, other in zip(known, reversed(halves), strict=True):
        trials.append(tried(other, {tool: _rule(lessons_of_half[tool], cover) for tool in both}))
    return {tool: trials[0][tool] + trials[1][tool] for tool in both}
