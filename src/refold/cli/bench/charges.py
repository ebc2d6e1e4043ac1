"""What a provider with a cache charges for a conversation's requests."""

from collections.abc import Iterable

from refold.cli.bench.trace import Json
from refold.core.cache_cost import Prices
from refold.core.codec import dumps
from refold.core.errors import SettingError
from refold.dialects import openai_chat
from refold.models.count import Counter, counter
from refold.models.limits import find

MIN_CACHED = 1_024
"""Tokens; no provider caches less."""
SUMMARY_TOKENS = 800


class Charges:
    """The charges for requests: what begins the request before is read from the cache, the rest is written.

    Replies cost the same in all ways and are left out; summaries are not.
    """

    def __init__(self, model: str) -> None:
        limits = find(model).limits
        if limits.cached is None or limits.output is None:
            raise SettingError("models", f"the prices of {model!r} are not known, or it has no cache")
        self.prices: Prices = limits.cached
        self.output_price = limits.output
        self.read = 0
        self.written = 0
        self.calls = 0
        self.summaries_usd = 0.0
        self._count: Counter = counter(model)
        self._sizes: dict[bytes, int] = {}
        self._sent: list[bytes] = []

    def send(self, messages: Iterable[Json]) -> None:
        sent = [self._measured(message) for message in messages]
        cached = 0
        for old, new in zip(self._sent, sent, strict=False):
            if old != new:
                break
            cached += self._sizes[new]
        if cached < MIN_CACHED:
            cached = 0
        self.calls += 1
        self.read += cached
        self.written += sum(self._sizes[one] for one in sent) - cached
        self._sent = sent

    def summarize(self, messages: Iterable[Json]) -> None:
        """A model reads the messages from the cache and writes a summary."""
        read = self.size(messages) * self.prices.read
        self.summaries_usd += (read + SUMMARY_TOKENS * self.output_price) / 1e6

    def size(self, messages: Iterable[Json]) -> int:
        return sum(self._sizes[self._measured(message)] for message in messages)

    def _measured(self, message: Json) -> bytes:
        data = dumps(message)
        if data not in self._sizes:
            self._sizes[data] = self._count.message(openai_chat.parse(message))
        return data

    @property
    def usd(self) -> float:
        requests = self.read * self.prices.read + self.written * self.prices.write
        return requests / 1e6 + self.summaries_usd

    @property
    def cached(self) -> float:
        return self.read / (self.read + self.written or 1)
