"""What conversations cost at the providers' prices: sent whole, and kept small in several ways."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import mean
from typing import NamedTuple, TypeAlias

import refold
from refold.cli.bench.charges import Charges
from refold.cli.bench.retention import in_processes, require_agent
from refold.cli.bench.tables import BenchTable
from refold.cli.bench.trace import DIALECT, Json, Trace
from refold.config.config import load_config

Way: TypeAlias = Callable[[Sequence[Json], Charges], Sequence[Json]]
"""From all recorded messages, and the charges so far, to the messages of the next request."""
DEFAULT = "refold, as it is"
ECONOMY = "refold, economy: on"
WITH_ECONOMY: Json = {"agents": {"default": {"compact": {"economy": "on"}}}}


class RefoldWay(NamedTuple):
    """Requests of a session with these settings."""

    name: str
    config: Json | str | None = None


class OtherWay(NamedTuple):
    """Requests that a function makes; each conversation gets a new one."""

    name: str
    begin: Callable[[], Way]


CAPTION = "Money against sending everything"
TITLES = ("model", "way", "conversations", "index", "worst", "cached", "tokens a call", "edits")


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


def send_all(messages: Sequence[Json], charges: Charges) -> Sequence[Json]:
    return messages


def _append_only() -> Way:
    return send_all


WAYS: list[RefoldWay | OtherWay] = [
    OtherWay("append only", _append_only),
    RefoldWay(DEFAULT),
    RefoldWay(ECONOMY, WITH_ECONOMY),
]


def ways_of(policy: str) -> list[RefoldWay | OtherWay]:
    """Sending everything, the default, and each configuration.

    Raises:
        SettingError: a configuration is invalid.
    """
    files = [file.strip() for file in policy.split(",")]
    for file in files:
        require_agent(file, None)
    return [*WAYS[:2], *(RefoldWay(file, file) for file in files)]


def replay(trace: Trace, way: RefoldWay | OtherWay, model: str) -> CostRow:
    """Replay a conversation in one way."""
    whole = Charges(model)
    charges = Charges(model)
    edits = 0
    calls = [n for n, message in enumerate(trace.messages) if n and message["role"] == "assistant"]
    if isinstance(way, OtherWay):
        other = way.begin()
        for n in calls:
            charges.send(other(trace.messages[:n], charges))
    else:
        config = load_config(way.config)
        with refold.open("replay", store="memory://", model=model, config=config) as chat:
            before = 0
            for n in calls:
                chat.append(list(trace.messages[before:n]), dialect=DIALECT)
                fitted = chat.fit(dialect=DIALECT)
                edits += bool(fitted.report.edits)
                charges.send(fitted.messages)
                before = n
    for n in calls:
        whole.send(trace.messages[:n])
    tokens = (charges.read + charges.written) // max(1, charges.calls)
    return CostRow(way.name, model, trace.source, charges.usd, whole.usd, charges.cached, tokens, edits)


def measure(
    traces: Sequence[Trace], models: Sequence[str], ways: Sequence[RefoldWay | OtherWay], jobs: int
) -> list[CostRow]:
    """A row for each conversation, model and way.

    Raises:
        SettingError: the prices of a model are not known.
    """
    for model in models:
        Charges(model)
    tasks = list(product(traces, ways, models))
    return list(in_processes(replay, tasks, jobs))


def to_json(rows: Sequence[CostRow]) -> list[Json]:
    return [asdict(row) | {"index": row.index} for row in rows]


def table(rows: Sequence[CostRow], caption: str = CAPTION) -> BenchTable:
    """The averages of each model and way, and the worst conversation."""
    lines: list[list[str]] = []
    ends: list[int] = []
    ways = dict.fromkeys(row.way for row in rows)
    for model in dict.fromkeys(row.model for row in rows):
        for way in ways:
            some = [row for row in rows if row.model == model and row.way == way]
            shares = [row.index for row in some]
            lines.append(
                [
                    model,
                    way,
                    f"{len(some)}",
                    f"{mean(shares):.2f}",
                    f"{max(shares):.2f}",
                    f"{mean(row.cached for row in some):.0%}",
                    f"{mean(row.tokens for row in some):,.0f}",
                    f"{mean(row.edits for row in some):.1f}",
                ]
            )
        ends.append(len(lines) - 1)
    return BenchTable(caption, TITLES, lines, ends, texts=2)


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
