"""What conversations cost at the providers' prices: sent whole, and kept small in several ways."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import NamedTuple, TypeAlias

import refold
from refold.cli.bench.retention import in_processes, require_agent
from refold.cli.bench.tables import BenchTable
from refold.cli.bench.trace import DIALECT, Json, Trace
from refold.config.config import load_config
from refold.core.cache_cost import Prices
from refold.core.codec import dumps
from refold.core.errors import SettingError
from refold.dialects import openai_chat
from refold.models.count import counter
from refold.models.limits import find

MIN_CACHED = 1_024
"""Tokens; no provider caches less."""
SUMMARY_TOKENS = 800
DEFAULT = "refold, as it is"
ECONOMY = "refold, economy: on"
WITH_ECONOMY: Json = {"agents": {"default": {"compact": {"economy": "on"}}}}
CAPTION = "Money against sending everything"
TITLES = ("model", "way", "conversations", "index", "worst", "cached", "tokens a call", "edits")


class Charges:
    """What a provider charges for requests: the part that begins the request before is read from its cache,
    and the rest is written.

    Replies cost the same in all ways and are left out; summaries are not.
    """

    def __init__(self, model: str) -> None:
        limits = find(model).limits
        if limits.cached is None or limits.output is None:
            raise SettingError("models", f"the prices of {model!r} are not known, or it has no cache")
        self.model = model
        self.prices: Prices = limits.cached
        self.output_price = limits.output
        self.read = 0
        self.written = 0
        self.calls = 0
        self.summaries_usd = 0.0
        self._count = counter(model)
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


NextRequest: TypeAlias = Callable[[Sequence[Json]], Sequence[Json]]
"""From all recorded messages to those of the next request."""


class Way(NamedTuple):
    """One way to make the requests of a conversation."""

    name: str
    begin: Callable[[Charges], NextRequest]
    """Begins a conversation. Summaries that it writes are charged."""


def append_only(charges: Charges) -> NextRequest:
    return lambda messages: messages


class RefoldRequests:
    """The requests of a session with some settings."""

    def __init__(self, config: Json | str | None, charges: Charges) -> None:
        settings = load_config(config)
        self.edits = 0
        """Requests before which something was edited."""
        self._chat = refold.open("replay", store="memory://", model=charges.model, config=settings)
        self._appended = 0

    def __call__(self, messages: Sequence[Json]) -> Sequence[Json]:
        self._chat.append(list(messages[self._appended :]), dialect=DIALECT)
        self._appended = len(messages)
        fitted = self._chat.fit(dialect=DIALECT)
        self.edits += bool(fitted.report.edits)
        return fitted.messages


WAYS = [
    Way("append only", append_only),
    Way(DEFAULT, partial(RefoldRequests, None)),
    Way(ECONOMY, partial(RefoldRequests, WITH_ECONOMY)),
]


def ways_of(policy: str | None) -> list[Way]:
    """Sending everything, the default, and each configuration; economy if none is given.

    Raises:
        SettingError: a configuration is invalid.
    """
    if policy is None:
        return WAYS
    files = [file.strip() for file in policy.split(",")]
    for file in files:
        require_agent(file, None)
    return [*WAYS[:2], *(Way(file, partial(RefoldRequests, file)) for file in files)]


@dataclass(frozen=True, slots=True)
class CostRow:
    """One conversation, kept small in one way, at the prices of one model."""

    way: str
    model: str
    source: str
    usd: float
    whole_usd: float
    """The cost of sending everything."""
    cached: float
    tokens: int
    edits: int

    @property
    def index(self) -> float:
        return self.usd / self.whole_usd if self.whole_usd else 1.0


def replay(trace: Trace, way: Way, model: str) -> CostRow:
    """Replays a conversation in one way."""
    whole = Charges(model)
    charges = Charges(model)
    next_request = way.begin(charges)
    for n, message in enumerate(trace.messages):
        if n and message["role"] == "assistant":
            recorded = trace.messages[:n]
            whole.send(recorded)
            charges.send(next_request(recorded))
    sent = charges.read + charges.written
    return CostRow(
        way.name,
        model,
        trace.source,
        usd=charges.usd,
        whole_usd=whole.usd,
        cached=charges.read / (sent or 1),
        tokens=sent // max(1, charges.calls),
        edits=getattr(next_request, "edits", 0),
    )


def measure(traces: Sequence[Trace], models: Sequence[str], ways: Sequence[Way], jobs: int) -> list[CostRow]:
    """A row for each conversation, model and way.

    Raises:
        SettingError: the prices of a model are not known.
    """
    for model in models:
        Charges(model)
    return list(in_processes(replay, list(product(traces, ways, models)), jobs))


def to_json(rows: Sequence[CostRow]) -> list[Json]:
    return [asdict(row) | {"index": row.index} for row in rows]


def table(rows: Sequence[CostRow], caption: str = CAPTION) -> BenchTable:
    """The averages of each model and way, and the worst conversation."""
    lines: list[list[str]] = []
    for model in dict.fromkeys(row.model for row in rows):
        for way in dict.fromkeys(row.way for row in rows):
            some = [row for row in rows if row.model == model and row.way == way]
            shares = [row.index for row in some]
            cached = f"{mean(row.cached for row in some):.0%}"
            tokens = f"{mean(row.tokens for row in some):,.0f}"
            edits = f"{mean(row.edits for row in some):.1f}"
            index = [f"{mean(shares):.2f}", f"{max(shares):.2f}"]
            lines.append([model, way, f"{len(some)}", *index, cached, tokens, edits])
    return BenchTable(caption, TITLES, lines, texts=2)


def brief_table(groups: Mapping[str, Sequence[CostRow]]) -> BenchTable:
    """The average and the worst index of each way; a column for each group of rows and model."""
    lines: dict[str, list[str]] = {}
    titles = [""]
    for name, rows in groups.items():
        for model in sorted({row.model for row in rows}):
            titles.append(f"{name}, {model}" if name else model)
            for way in dict.fromkeys(row.way for row in rows):
                shares = [row.index for row in rows if row.model == model and row.way == way]
                cells = lines.setdefault(way, [way])
                cells.append(f"{mean(shares):.2f} ({max(shares):.2f})")
    return BenchTable(f"{CAPTION}: average (worst)", titles, list(lines.values()))
