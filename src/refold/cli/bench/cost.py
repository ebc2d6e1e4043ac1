"""What does it cost? The same conversations, kept small in several ways, at the providers' prices.

refold bench cost                       on a set that anybody can make again
refold bench cost ../shared/data        on recorded conversations
refold bench cost agent.db --policy a.yaml,b.yaml     on your own, before you deploy

What begins the request before it is read from the cache, all else is written. What the answers cost
is the same for all and left out; what summaries cost is not.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

import refold
from refold.cli.bench.lengths import pieces
from refold.cli.bench.options import Brief, Conversations, Data, Jobs, Markdown, Numbers, Owner, Seed
from refold.cli.bench.own import Which
from refold.cli.bench.plot import Point, scatter
from refold.cli.bench.recorded import load
from refold.cli.bench.tables import Sheet, show, write
from refold.cli.bench.trace import Json, Trace
from refold.cli.bench.ways import OTHERS, Bill
from refold.config.config import DEFAULT as DEFAULT_AGENT
from refold.config.config import load_config
from refold.core.codec import dumps
from refold.core.errors import NotFoundError, SettingError
from refold.session.session import Session

MODELS, LENGTHS = "claude-sonnet-5,gpt-5", "40,200"
LEAST = 2_000
"""In tokens: shorter conversations are left out of what is joined."""
REFOLD, DEFAULT = "refold, economy: on", "refold, as it is"
ECONOMY: Json = {"agents": {"default": {"compact": {"economy": "on"}}}}


@dataclass(frozen=True, slots=True)
class CostRow:
    """One conversation, kept small in one way, at the prices of one model."""

    steps: int
    arm: str
    model: str
    source: str
    usd: float
    whole_usd: float
    """What sending everything costs."""
    cached: float
    tokens: int
    edits: int

    @property
    def index(self) -> float:
        return self.usd / self.whole_usd


def replay(trace: Trace, arm: str, model: str, config: Json | str | None, steps: int = 0) -> CostRow:
    """One conversation in one way."""
    whole, bill, edits = Bill(model), Bill(model), 0
    keep = OTHERS[arm]() if arm in OTHERS else None
    with refold.open("replay", store="memory://", model=model, config=load_config(config)) as chat:
        for n, message in enumerate(trace.messages):
            if n and message["role"] == "assistant":
                whole.send(trace.messages[:n])
                if keep is not None:
                    bill.send(keep(trace.messages[:n], bill))
                else:
                    shown, was_edited = _fitted(chat)
                    edits += was_edited
                    bill.send(shown)
            if keep is None:
                chat.append(message, dialect="openai-chat")
    numbers = (bill.usd, whole.usd, bill.cached, (bill.read + bill.written) // max(1, bill.calls))
    return CostRow(steps, arm, model, trace.source, *numbers, edits)


def _fitted(chat: Session) -> tuple[list[Json], bool]:
    fitted = chat.fit(dialect="openai-chat")
    return fitted.messages, bool(fitted.report.edits)


def measure(
    traces: Sequence[Trace],
    lengths: Sequence[int],
    models: Sequence[str],
    arms: Sequence[tuple[str, Json | str | None]],
    jobs: int = 2,
) -> list[CostRow]:
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [
            pool.submit(replay, trace, arm, model, config, steps)
            for steps in lengths
            for trace, model, (arm, config) in product(pieces(traces, steps), models, arms)
        ]
        if not tasks:
            raise NotFoundError(f"No conversation has {min(lengths)} answers, nor all of them together")
        try:
            shown = track(tasks, "replaying", console=Console(stderr=True))
            return [task.result() for task in shown]
        finally:
            pool.shutdown(cancel_futures=True)


TITLES = ("model", "way", "conversations", "index", "worst", "cached", "tokens a call", "edits")


def sheets(rows: Sequence[CostRow]) -> list[Sheet]:
    found = []
    for steps in sorted({row.steps for row in rows}):
        lines, ends = list[list[str]](), list[int]()
        for model in dict.fromkeys(row.model for row in rows):
            for arm in dict.fromkeys(row.arm for row in rows):
                lines.append(_cells([r for r in rows if (r.steps, r.model, r.arm) == (steps, model, arm)]))
            ends.append(len(lines) - 1)
        found.append(Sheet(f"Money against sending everything, {steps} steps", TITLES, lines, ends, 2))
    return found


def _cells(some: Sequence[CostRow]) -> list[str]:
    first, shares = some[0], [row.index for row in some]
    numbers = [f"{len(some)}", f"{mean(shares):.2f}", f"{max(shares):.2f}"]
    more = [f"{mean(row.cached for row in some):.0%}", f"{mean(row.tokens for row in some):,.0f}"]
    return [first.model, first.arm, *numbers, *more, f"{mean(row.edits for row in some):.1f}"]


def briefly(rows: Sequence[CostRow]) -> Sheet:
    """The average index, and the worst, by length and model."""
    both = sorted({(row.steps, row.model) for row in rows})
    lines = []
    for arm in dict.fromkeys(row.arm for row in rows):
        shares = [[r.index for r in rows if (r.steps, r.model, r.arm) == (*one, arm)] for one in both]
        lines.append([arm, *(f"{mean(some):.2f} ({max(some):.2f})" for some in shares)])
    titles = ("", *(f"{steps} steps, {model}" for steps, model in both))
    return Sheet("Money against sending everything: average (worst)", titles, lines)


def drawn(rows: Sequence[CostRow]) -> str:
    """Cached share against the index of each way, of the longest conversations."""
    longest = [row for row in rows if row.steps == max(one.steps for one in rows)]
    points = list[Point]()
    for arm, model in dict.fromkeys((row.arm, row.model) for row in longest):
        some = [row for row in longest if (row.arm, row.model) == (arm, model)]
        points.append(Point(arm, model, mean(row.cached for row in some), mean(row.index for row in some)))
    return scatter("What it costs", "read from the cache", "money against sending everything", points)


def main(
    data: Data = None,
    steps: Annotated[
        str, typer.Option(metavar="N,N,…", help="Answers of a conversation, which is cut or joined to that.")
    ] = LENGTHS,
    models: Annotated[str, typer.Option(metavar="M,M,…", help="Whose prices.")] = MODELS,
    policy: Annotated[
        str | None, typer.Option(metavar="FILE,FILE,…", help="Configurations to compare with the default.")
    ] = None,
    conversation: Conversations = None,
    owner: Owner = "default",
    seed: Seed = 0,
    jobs: Jobs = 2,
    numbers: Numbers = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Cost and cached share, as a picture.")
    ] = None,
    brief: Brief = False,
    markdown: Markdown = False,
) -> None:
    """What conversations cost, kept small in several ways, at the providers' prices."""
    lengths = [_whole(one) for one in steps.split(",")]
    arms: list[tuple[str, Json | str | None]] = [(name, None) for name in OTHERS]
    arms += [(DEFAULT, None), (REFOLD, ECONOMY)]
    if policy is not None:
        files = [file.strip() for file in policy.split(",")]
        for file in files:
            if (agents := load_config(file).agents) and DEFAULT_AGENT not in agents:
                raise SettingError(file, f"has no agent {DEFAULT_AGENT!r}, only {', '.join(sorted(agents))}")
        arms = [("append only", None), (DEFAULT, None), *((file, file) for file in files)]
    for model in models.split(","):
        Bill(model)  # prices that are not known are told before anything is replayed
    which = Which(owner, conversation or ())
    rows = measure(load(data, least=LEAST, which=which, seed=seed), lengths, models.split(","), arms, jobs)
    if numbers is not None:
        write(numbers, dumps([asdict(row) | {"index": row.index} for row in rows]))
    if plot is not None:
        write(plot, drawn(rows).encode())
    if str(numbers) != "-":
        show([briefly(rows)] if brief else sheets(rows), markdown=markdown)


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise SettingError("steps", f"{text!r} is no number of steps; for example 40,200")
    return int(text)
