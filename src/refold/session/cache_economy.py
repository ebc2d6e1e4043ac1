"""Whether it pays to make a view smaller now: what a rewrite costs at the provider's cache, for one view."""

import time

from refold.config.settings import Compact, Economy
from refold.core import codec
from refold.core.budget import Budget
from refold.core.cache_cost import CacheTerms, Prices, batch, stake
from refold.core.event import Said
from refold.models.limits import same_model
from refold.session.meter import Meter
from refold.stores.record import Record

PATIENCE = 1.1
"""By how much a view must have grown before what did not pay is looked at again."""
MOST_SETS = 20
"""Sets of tools that are remembered."""
COLD = 0.25
"""Of what is kept: so much more is put away where the cache has forgotten everything anyway."""


class CacheEconomy:
    """Remembers when the cache was last asked, and with what."""

    def __init__(self, record: Record, compact: Compact) -> None:
        self._record, self.economy = record, compact.economizing
        self._asked_at = 0.0
        self._asked: dict[object, float] = {}
        """When requests were made with what stood beside the messages: tools and system text."""
        self._declined = 0
        """Below so many tokens it was found not to pay yet."""

    def asked(self, beside: object) -> None:
        """A request was made, with this beside its messages."""
        self._asked_at = self._asked[beside] = time.time()
        if len(self._asked) > MOST_SETS:
            del self._asked[min(self._asked, key=self._asked.__getitem__)]

    def found(self, tokens: int, is_worth_it: bool) -> None:
        self._declined = 0 if is_worth_it else int(tokens * PATIENCE)

    def terms(self, prices: Prices, budget: Budget, meter: Meter) -> CacheTerms:
        """Of an edit that must be made, whatever it costs."""
        calls = max(1, self._record.live.state.step)
        return CacheTerms(prices, calls, self.is_cold(meter), budget.ratio)

    def due(
        self, tokens: int, least: int, budget: Budget, meter: Meter, beside: object
    ) -> tuple[Budget, CacheTerms] | None:
        """What a view of so many tokens should come down to, and on which terms, if it may pay.

        `least` is what no edit can hide.
        """
        economy, prices, state = self.economy, meter.limits.cached, self._record.live.state
        if economy is None or prices is None or not state.step or tokens < least:
            return None
        keep = economy.keep_tokens
        forced = self.terms(prices, budget, meter)
        is_new = forced.is_cold or self._is_new(beside)
        if tokens < self._declined and not is_new:
            return None
        waited = batch(prices, keep, state.total * budget.ratio / state.step)
        trigger = least + keep + int(COLD * keep if is_new else waited)
        if tokens < trigger or trigger >= budget.trigger:  # else the window asks for it first
            return None
        sums = (state.total, state.carried, state.shown, state.rewritten)
        calls = forced.calls if is_new else self._calls_since_compaction()
        most = stake(prices, economy.max_loss, *sums)
        terms = CacheTerms(prices, calls, forced.is_cold, budget.ratio, most)
        return budget.down_to(least + keep, trigger), terms

    def _calls_since_compaction(self) -> int:
        """After as many the next one is expected: an edit that has not paid by then comes too early."""
        live = self._record.live
        if live.state.compacted is None:
            return live.state.step
        lines = [line for item in live.items for line in item.lines]
        return sum(line.role == "assistant" and line.at > live.state.compacted for line in lines)

    def _is_new(self, beside: object) -> bool:
        """Nothing is cached behind these tools: no batch is waited for. What is cached behind others may be
        asked for again, so that it is still to be lost.
        """
        cache_s = (self.economy or Economy()).cache_s
        return bool(self._asked_at) and time.time() - self._asked.get(beside, 0.0) > cache_s

    def is_cold(self, meter: Meter) -> bool:
        """True if the cache has nothing of this view: it is too old, or another model is asked."""
        state = self._record.live.state
        if not state.step or not same_model(state.model, meter.model):
            return True
        cache_s = (self.economy or Economy()).cache_s
        return time.time() - (self._asked_at or self._answered_at()) > cache_s

    def _answered_at(self) -> float:
        """When another process had the newest answer that is in sight."""
        for item in reversed(self._record.live.items):
            if item.edit is None and item.lines and item.lines[0].role == "assistant":
                event = codec.decode(self._record.entry(item.lines[0].at), self._record.parse)
                return event.time if isinstance(event, Said) else 0.0
        return 0.0
