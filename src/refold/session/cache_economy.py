"""Decides whether compacting a view now saves money, given what a rewrite costs at the provider's cache."""

import time

from refold.config.settings import Compact, Economy
from refold.core import codec
from refold.core.budget import Budget
from refold.core.cache_cost import CacheTerms, Prices, batch, stake
from refold.core.event import Said
from refold.models.limits import same_model
from refold.session.meter import Meter
from refold.stores.record import Record

REGROWTH = 1.1
"""How much a view must grow before a rejected compaction is considered again."""
MAX_TOOL_SETS = 20
COLD_BATCH = 0.25
"""With a cold cache, a batch of this share of `keep_tokens` is enough."""


class CacheEconomy:
    """Remembers when requests were made, and with which tools and system text."""

    def __init__(self, record: Record, compact: Compact) -> None:
        self._record = record
        self.settings = compact.economizing
        self._requested_at = 0.0
        self._requested: dict[object, float] = {}
        """The time of the last request, by the JSON of its tools and system text."""
        self._declined = 0
        """Below so many tokens it is not worth another look."""

    def note_request(self, extras: object) -> None:
        self._requested_at = self._requested[extras] = time.time()
        if len(self._requested) > MAX_TOOL_SETS:
            del self._requested[min(self._requested, key=self._requested.__getitem__)]

    def note_result(self, tokens: int, is_worth_it: bool) -> None:
        self._declined = 0 if is_worth_it else int(tokens * REGROWTH)

    def forced_terms(self, prices: Prices, budget: Budget, meter: Meter) -> CacheTerms:
        """For an edit that is made whatever it costs."""
        calls = max(1, self._record.live.state.step)
        return CacheTerms(prices, calls, self.is_cold(meter), budget.ratio)

    def proposal(
        self, tokens: int, least: int, budget: Budget, meter: Meter, extras: object
    ) -> tuple[Budget, CacheTerms] | None:
        """The target for a view of so many tokens and the terms of the edit; None if it cannot pay.

        `least` are the tokens that no edit can hide.
        """
        settings = self.settings
        prices = meter.limits.cached
        state = self._record.live.state
        if settings is None or prices is None or not state.step or tokens < least:
            return None
        keep = settings.keep_tokens
        forced = self.forced_terms(prices, budget, meter)
        is_new = forced.is_cold or self._is_new(extras)
        if tokens < self._declined and not is_new:
            return None
        waited = batch(prices, keep, state.total * budget.ratio / state.step)
        trigger = least + keep + int(COLD_BATCH * keep if is_new else waited)
        if tokens < trigger or trigger >= budget.trigger:  # otherwise the window requires it first
            return None
        sums = (state.total, state.carried, state.shown, state.rewritten)
        calls = forced.calls if is_new else self._calls_since_compaction()
        most = stake(prices, settings.max_loss, *sums)
        terms = CacheTerms(prices, calls, forced.is_cold, budget.ratio, most)
        return budget.down_to(least + keep, trigger), terms

    def _calls_since_compaction(self) -> int:
        """The next compaction is expected after as many calls: an edit must pay before that."""
        live = self._record.live
        if live.state.compacted is None:
            return live.state.step
        lines = [line for item in live.items for line in item.lines]
        return sum(line.role == "assistant" and line.at > live.state.compacted for line in lines)

    def _is_new(self, extras: object) -> bool:
        """True if nothing is cached for these tools. What is cached for others may be needed again."""
        cache_s = (self.settings or Economy()).cache_s
        return bool(self._requested_at) and time.time() - self._requested.get(extras, 0.0) > cache_s

    def is_cold(self, meter: Meter) -> bool:
        """True if the cache has nothing of this view: it has expired, or the model has changed."""
        state = self._record.live.state
        if not state.step or not same_model(state.model, meter.model):
            return True
        cache_s = (self.settings or Economy()).cache_s
        return time.time() - (self._requested_at or self._answered_at()) > cache_s

    def _answered_at(self) -> float:
        """The time of the newest answer in the view, of any process."""
        for item in reversed(self._record.live.items):
            if item.edit is None and item.lines and item.lines[0].role == "assistant":
                event = codec.decode(self._record.entry(item.lines[0].at), self._record.parse)
                return event.time if isinstance(event, Said) else 0.0
        return 0.0
