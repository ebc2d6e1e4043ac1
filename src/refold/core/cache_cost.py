"""What an edit costs in the provider's cache, and what it saves in later requests.

A token that the cache has costs `read`, a token that is written to the cache costs `write`. After an edit,
everything behind its place is written once more; every later request is shorter by what the edit removed.
"""

from math import sqrt

import msgspec

from refold.core.event import Worth


class Prices(msgspec.Struct, frozen=True):
    """Prices of a request's tokens, in USD per million."""

    read: float
    """Of tokens that are in the cache."""
    write: float
    """Of tokens that are written to the cache."""

    @property
    def rewrite_ratio(self) -> float:
        """For how many calls a token can be read for the extra price of writing it once.

        >>> Prices(read=0.5, write=5.0).rewrite_ratio
        9.0
        """
        return (self.write - self.read) / self.read


def break_even(prices: Prices, kept: int, removed: int, cost: float = 0.0) -> float:
    """After how many calls an edit has paid that removes some tokens and has others written again.

    `kept` tokens stand behind the edit; `cost` is what a summary cost, in USD.

    >>> round(break_even(Prices(0.3, 3.75), kept=4_000, removed=10_000), 1)
    4.6
    """
    if removed <= 0:
        return float("inf")
    return (prices.rewrite_ratio * kept + cost * 1e6 / prices.read) / removed


def batch(prices: Prices, kept: int, per_step: float) -> float:
    """The cheapest size of a batch, in tokens, if `per_step` tokens become removable in every step.

    At this size, sending the removable tokens has cost as much as writing the `kept` ones again.

    >>> round(batch(Prices(0.3, 3.75), kept=8_000, per_step=500))
    9592
    """
    return sqrt(2 * prices.rewrite_ratio * kept * per_step)


class CacheTerms(msgspec.Struct, frozen=True):
    """What decides whether an edit pays: prices, and the calls that are expected."""

    prices: Prices
    calls: int
    """Calls within which it must pay: as many are expected as there were since the last compaction."""
    is_cold: bool = False
    """The cache has expired: everything is written again, edited or not."""
    ratio: float = 1.0
    """Tokens of the model for one counted token."""
    stake: float | None = None
    """The largest loss if the conversation ends at once, in cached tokens; None if the edit must be made."""

    def weigh(self, removed: int, kept: int, cost: float = 0.0) -> Worth:
        """What an edit is expected to save that removes some counted tokens and keeps others behind it."""
        removed = int(removed * self.ratio)
        rewritten = 0 if self.is_cold else int(kept * self.ratio)
        prices = self.prices
        loss = rewritten * (prices.write - prices.read)
        saved = (self.calls * removed * prices.read - loss) / 1e6 - cost
        calls = min(break_even(prices, rewritten, removed, cost), 1e9)
        return Worth(
            removed,
            rewritten,
            after=round(calls, 1),
            calls=self.calls,
            saved=round(saved, 6),
            cost=cost,
            was_forced=self.stake is None,
            was_cold=self.is_cold,
        )

    def accepts(self, worth: Worth) -> bool:
        """True if the edit must be made, or if it pays and its possible loss is within the stake."""
        if self.stake is None:
            return True
        return worth.after <= self.calls and self.prices.rewrite_ratio * worth.rewritten <= self.stake


def stake(prices: Prices, risk: float, said: int, carried: int, shown: int, rewritten: int) -> float:
    """The largest loss that is accepted, in cached tokens: the savings so far, and a share of the full cost.

    `said` is the tokens of all messages, `carried` their sum over all requests without edits, `shown` the
    sum over the requests as sent, and `rewritten` the tokens that edits had written again.
    """
    whole = carried + said * prices.write / prices.read
    return max(0.0, carried - shown - prices.rewrite_ratio * rewritten + risk * whole)
