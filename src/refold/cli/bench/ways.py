"""Ways to keep a request small that others have, and the bill of a provider with a cache."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from refold.cli.bench.trace import Json
from refold.core.cache_cost import Prices
from refold.core.codec import dumps
from refold.core.errors import SettingError
from refold.dialects import openai_chat
from refold.models.count import Counter, counter
from refold.models.limits import find

LEAST_CACHED = 1_024
"""Tokens: no provider caches less."""
TRIGGER = 20_000
"""Tokens from which on others do something."""
RESULTS, MESSAGES = 3, 20
"""The newest ones, which they leave."""
SUMMARY = 800
"""Tokens of a summary."""
GONE = "[cleared]"

Keep: TypeAlias = Callable[[Sequence[Json], "Bill"], Sequence[Json]]
"""From all that was said, and what was sent so far, to what is sent now."""


class Bill:
    """What a provider with a cache puts on it."""

    def __init__(self, model: str) -> None:
        limits = find(model).limits
        if limits.cached is None or limits.output is None:
            raise SettingError("models", f"the prices of {model!r} are not known, or it has no cache")
        self.prices: Prices = limits.cached
        self.output = limits.output
        self.read = self.written = self.calls = 0
        self.summaries = 0.0
        self._count: Counter = counter(model)
        self._sizes: dict[bytes, int] = {}
        self._sent: list[bytes] = []

    def send(self, messages: Iterable[Json]) -> None:
        now = [self._known(message) for message in messages]
        pairs = enumerate(zip(self._sent, now, strict=False))
        same = next((n for n, (old, new) in pairs if old != new), min(len(self._sent), len(now)))
        cached = sum(self._sizes[one] for one in now[:same])
        cached = cached if cached >= LEAST_CACHED else 0
        self.calls += 1
        self.read += cached
        self.written += sum(self._sizes[one] for one in now) - cached
        self._sent = now

    def summarize(self, messages: Iterable[Json]) -> None:
        """A model reads them, out of the cache, and writes a summary."""
        tokens = sum(map(self.size, messages))
        self.summaries += (tokens * self.prices.read + SUMMARY * self.output) / 1e6

    def size(self, message: Json) -> int:
        return self._sizes[self._known(message)]

    def _known(self, message: Json) -> bytes:
        data = dumps(message)
        if data not in self._sizes:
            self._sizes[data] = self._count.message(openai_chat.parse(message))
        return data

    @property
    def usd(self) -> float:
        return (self.read * self.prices.read + self.written * self.prices.write) / 1e6 + self.summaries

    @property
    def cached(self) -> float:
        return self.read / (self.read + self.written or 1)


# What others do


def append_only(said: Sequence[Json], bill: Bill) -> Sequence[Json]:
    """Everything, always."""
    return said


def masked(said: Sequence[Json], bill: Bill) -> Sequence[Json]:
    """All results but the newest are blank, in every request anew."""
    return _cleared(said, len(said))


def window(said: Sequence[Json], bill: Bill) -> Sequence[Json]:
    """The system text, the first request and the newest messages."""
    head = _head(said)
    first = max(len(head), len(said) - MESSAGES)
    while first < len(said) and said[first]["role"] == "tool":
        first += 1
    return [*said[: len(head)], *said[first:]]


class Cleared:
    """Old results are blanked all at once, whenever there is too much."""

    def __init__(self) -> None:
        self._until = 0

    def __call__(self, said: Sequence[Json], bill: Bill) -> Sequence[Json]:
        shown = _cleared(said, self._until)
        if sum(map(bill.size, shown)) > TRIGGER:
            self._until = len(said)
            shown = _cleared(said, self._until)
        return shown


class Summarized:
    """A model sums up all but the newest messages, whenever there is too much."""

    def __init__(self) -> None:
        self._summary: list[Json] = []
        self._from = 0

    def __call__(self, said: Sequence[Json], bill: Bill) -> Sequence[Json]:
        head = _head(said)
        shown = [*head, *self._summary, *said[max(len(head), self._from) :]]
        if sum(map(bill.size, shown)) <= TRIGGER:
            return shown
        first = max(len(head), len(said) - MESSAGES // 2)
        while first < len(said) and said[first]["role"] == "tool":
            first += 1
        bill.summarize(shown)
        words = " ".join(f"word{len(said)}x{n}" for n in range(SUMMARY // 4))
        self._summary, self._from = [{"role": "user", "content": f"What happened before: {words}"}], first
        return [*head, *self._summary, *said[first:]]


def _head(said: Sequence[Json]) -> list[Json]:
    task = next((n for n, one in enumerate(said) if one["role"] == "user"), 0)
    return [*said[: task + 1]]


def _cleared(said: Sequence[Json], until: int) -> list[Json]:
    results = [n for n, one in enumerate(said[:until]) if one["role"] == "tool"]
    blank = {*results[:-RESULTS]}
    return [{**one, "content": GONE} if n in blank else one for n, one in enumerate(said)]


OTHERS: dict[str, Callable[[], Keep]] = {
    "append only": lambda: append_only,
    "mask old results in every step": lambda: masked,
    f"the newest {MESSAGES} messages": lambda: window,
    f"clear old results above {TRIGGER:,}": Cleared,
    f"summarize above {TRIGGER:,}": Summarized,
}
