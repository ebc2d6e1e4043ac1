"""Does an edit pay? What it costs where the provider keeps a cache, against what it saves from then on.

A cached token costs `read`, one that the cache must take in `write`. An edit makes all that stands after its
place new to the cache, once; every later request is shorter by what it removed.
"""

from math import sqrt

import msgspec

from refold.core.event import Worth


class Prices(msgspec.Struct, frozen=True):
    """Of a request's tokens, in USD per million."""

    read: float
    """Those that the cache has."""
    write: float
    """Those that it has not, and is told to keep."""

    @property
    def rewrite_ratio(self) -> float:
        """For how many calls a token could stay for what it costs to write it anew.

        >>> Prices(read=0.5, write=5.0).rewrite_ratio
        9.0
        """
        return (self.write - self.read) / self.read


def break_even(prices: Prices, kept: int, removed: int, cost: float = 0.0) -> float:
    """After how many calls it has paid to remove so much, where so much after it is kept and written anew.

    `cost` is what a summary cost, in USD.

    >>> round(break_even(Prices(0.3, 3.75), kept=4_000, removed=10_000), 1)
    4.6
    """
    if removed <= 0:
        return float("inf")
    return (prices.rewrite_ratio * kept + cost * 1e6 / prices.read) / removed


def batch(prices: Prices, kept: int, per_step: float) -> float:
    """How much should become removable before it is removed, where so much becomes so in every step.

    By then, to carry it has cost what it costs to write anew: waiting longer is dearer, and so is haste.

    >>> round(batch(Prices(0.3, 3.75), kept=8_000, per_step=500))
    9592
    """
    return sqrt(2 * prices.rewrite_ratio * kept * per_step)


class CacheTerms(msgspec.Struct, frozen=True):
    """Under which an edit is made: what is known of the conversation's past, and assumed of its future."""

    prices: Prices
    calls: int
    """Calls by which it must have paid: as many are expected as there were since the last compaction."""
    is_cold: bool = False
    """The cache has forgotten the conversation: all is written anew, edited or not."""
    ratio: float = 1.0
    """How many tokens of the model's one counted token is."""
    stake: float | None = None
    """Cached tokens that may be lost by it, should the conversation end at once; None if it must be made."""

    def weigh(self, removed: int, kept: int, cost: float = 0.0) -> Worth:
        """Both as they are counted."""
        removed, kept = int(removed * self.ratio), 0 if self.is_cold else int(kept * self.ratio)
        prices = self.prices
        saved = (self.calls * removed * prices.read - kept * (prices.write - prices.read)) / 1e6 - cost
        calls = min(break_even(prices, kept, removed, cost), 1e9)
        told = (round(calls, 1), self.calls, round(saved, 6), cost)
        return Worth(removed, kept, *told, self.stake is None, self.is_cold)

    def accepts(self, worth: Worth) -> bool:
        """Whether it is made: it must be, or it pays, and the loss is bearable if it does not after all."""
        if self.stake is None:
            return True
        return worth.after <= self.calls and self.prices.rewrite_ratio * worth.rewritten <= self.stake


def stake(prices: Prices, risk: float, said: int, carried: int, shown: int, rewritten: int) -> float:
    """What may be put at risk: all that was saved so far, and a share of what it would have cost to send all.

    In cached tokens. `said` are the tokens of all messages; `carried` is their sum over all requests, `shown`
    what those requests had of it; `rewritten` is what edits made new to the cache.
    """
    whole = carried + said * prices.write / prices.read
    return max(0.0, carried - shown - prices.rewrite_ratio * rewritten + risk * whole)
