"""What the provider says a request took corrects the next estimate.

A model's `Calibration` is learned from every answer and outlives the conversation. An `Anchor` is the newest
measured request of one view since its last edit: what every request has and nobody counted is in it too.
"""

from math import ceil
from typing import Protocol

import msgspec

LOWEST, HIGHEST = 0.5, 2.0
"""A count is not further off than that; whatever seems so has another reason."""
KEPT = 16
"""Answers that a calibration remembers."""
HEAVIEST = 1_000
"""Tokens from which on one answer counts no more than another."""
SHARE = 0.6
"""Which of them is believed, from the lowest: too much does less harm than too little."""


class Counts(Protocol):
    def estimate(self, counted: int, /) -> int: ...


class Anchor(msgspec.Struct, frozen=True):
    """A request that was measured."""

    counted: int
    """What was counted for it: messages, system and tools, not corrected."""
    tokens: int
    """What it took."""


class Calibration(msgspec.Struct, frozen=True):
    """What a model's requests took for each token that was counted.

    >>> Calibration(((1.3, 800), (1.2, 900), (2.0, 100))).ratio
    1.3
    """

    seen: tuple[tuple[float, int], ...] = ()
    """How much one counted token was, and how many tokens say so; the newest last."""

    @property
    def ratio(self) -> float:
        heard, all = 0, sum(weight for _, weight in self.seen)
        for ratio, weight in sorted(self.seen):
            heard += weight
            if heard >= SHARE * all:
                return ratio
        return 1.0


def update(
    calibration: Calibration, counted: int, reported: int, anchor: Anchor | None = None
) -> Calibration:
    """What is known after an answer: of what the request grew since the anchor, or else of all of it."""
    if anchor is not None:
        grown, took = counted - anchor.counted, reported - anchor.tokens
    else:
        grown, took = counted, reported
    if grown <= 0 or reported <= 0:
        return calibration
    ratio = round(took / grown, 4)
    if anchor is None and not LOWEST <= ratio <= HIGHEST:
        return calibration  # something that nobody counted is in it: no fault of the vocabulary
    new = (min(max(ratio, LOWEST), HIGHEST), min(grown, HEAVIEST))
    return Calibration((*calibration.seen, new)[-KEPT:])


def estimate(counted: int, counter: Counts, calibration: Calibration, anchor: Anchor | None = None) -> int:
    """What a request will take for which so much is counted."""
    ratio = calibration.ratio
    if anchor is None:
        return ceil(counter.estimate(counted) * ratio)
    tokens = anchor.tokens + ratio * (counted - anchor.counted)
    if counted < anchor.counted:
        tokens = max(tokens, anchor.tokens * counted / anchor.counted)
    return ceil(tokens)


def scale(counter: Counts, calibration: Calibration, anchor: Anchor | None = None) -> tuple[float, int]:
    """The same as a line, for planning what to leave out: a ratio to multiply counts by, and a constant."""
    ratio = calibration.ratio
    if anchor is None:
        return ratio, ceil(counter.estimate(0) * ratio)
    constant = anchor.tokens - ratio * anchor.counted
    return (ratio, ceil(constant)) if constant >= 0 else (anchor.tokens / anchor.counted, 0)
