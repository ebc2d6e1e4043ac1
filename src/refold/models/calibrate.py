"""The correction of estimates by the token counts that providers report.

A model's `Calibration` is learned from every reply and outlives the conversation. An `Anchor` is the newest
measured request of a view since its last edit: it includes what every request has and nobody can count.
"""

from math import ceil

import msgspec

from refold.models.count import Counter

LOWEST, HIGHEST = 0.5, 2.0
"""Limits of a ratio: no count is further off, so that anything beyond has another cause."""
REMEMBERED_REPLIES = 16
HEAVIEST = 1_000
"""The highest weight of a reply, in tokens."""
SHARE = 0.6
"""The quantile of the ratios that is used: an estimate that is too high does less harm."""


class Anchor(msgspec.Struct, frozen=True):
    """A measured request."""

    counted: int
    """Counted tokens of messages, system text and tools, without correction."""
    tokens: int
    """Reported tokens."""


class Calibration(msgspec.Struct, frozen=True):
    """The reported tokens of a model for each counted one.

    >>> Calibration(((1.3, 800), (1.2, 900), (2.0, 100))).ratio
    1.3
    """

    seen: tuple[tuple[float, int], ...] = ()
    """Ratios and their weights in tokens, the newest last."""

    @property
    def ratio(self) -> float:
        total = sum(weight for _, weight in self.seen)
        below = 0
        for ratio, weight in sorted(self.seen):
            below += weight
            if below >= SHARE * total:
                return ratio
        return 1.0


def update(
    calibration: Calibration, counted: int, reported: int, anchor: Anchor | None = None
) -> Calibration:
    """The calibration after a reply: by the growth of the request since the anchor, or by all of it."""
    before = anchor or Anchor(0, 0)
    grown = counted - before.counted
    if grown <= 0 or reported <= 0:
        return calibration
    ratio = round((reported - before.tokens) / grown, 4)
    if anchor is None and not LOWEST <= ratio <= HIGHEST:
        return calibration  # it includes something that nobody can count
    new = (min(max(ratio, LOWEST), HIGHEST), min(grown, HEAVIEST))
    return Calibration((*calibration.seen, new)[-REMEMBERED_REPLIES:])


def estimate(counted: int, counter: Counter, calibration: Calibration, anchor: Anchor | None = None) -> int:
    """The tokens that a provider will report for a request with so many counted ones."""
    ratio = calibration.ratio
    if anchor is None:
        return ceil(counter.estimate(counted) * ratio)
    tokens = anchor.tokens + ratio * (counted - anchor.counted)
    if counted < anchor.counted:
        tokens = max(tokens, anchor.tokens * counted / anchor.counted)
    return ceil(tokens)


def scale(counter: Counter, calibration: Calibration, anchor: Anchor | None = None) -> tuple[float, int]:
    """The estimate as a line, for planning: the ratio by which counts are multiplied, and a constant."""
    ratio = calibration.ratio
    if anchor is None:
        return ratio, ceil(counter.estimate(0) * ratio)
    constant = anchor.tokens - ratio * anchor.counted
    return (ratio, ceil(constant)) if constant >= 0 else (anchor.tokens / anchor.counted, 0)
