"""What is saved, and what is lost: conversations are replayed and asked for the values they used.

A value is lost if the request that uses it does not have it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import msgspec

from refold.cli.bench.replay import CONTROLS, MAX_ROUNDS, Arm, Run, replay
from refold.cli.bench.tables import BenchTable
from refold.cli.bench.trace import Json, Trace
from refold.cli.terminal import progress
from refold.config.config import DEFAULT, load_config
from refold.core.errors import SettingError

Result = TypeVar("Result")
NONE = "–"
"""Shown where there is nothing to count."""
NAMES = {"newest": "the newest that fit"}
BRIEF = ("", "budget", "tokens saved", "needed values lost from view", "unreachable")
SAVED = (
    *("budget", "source", "conversations", "calls", "probes", "lost", "saved", "batches", "prefix kept"),
    *("above ¾ (worst)", "unreachable", "violations", "refused"),
)
LOST = ("budget", "probes", "value lost", "value or key lost", "lost: one expansion", "lost: found by search")


def arms_of(
    budgets: str, policy: str | None, model: str | None, agent: str | None, *, own_windows: bool
) -> list[Arm]:
    """Refold under each budget; or the default and each configuration, with `own_windows` in their own.

    Raises:
        SettingError: a budget is no percentage, or a configuration is invalid.
    """
    percents = [_percent(text) for text in budgets.split(",")]
    if policy is None:
        return [Arm("refold", percent) for percent in percents]
    files = [file.strip() for file in policy.split(",") if file.strip()]
    for file in files:
        require_agent(file, agent)
    names = [Path(file).stem for file in files]
    if len({*names}) < len(names):
        names = files
    arms: list[Arm] = []
    for percent in [None] if own_windows else percents:
        arms.append(Arm("default", percent, "", model, agent))
        for name, file in zip(names, files, strict=True):
            arms.append(Arm(name, percent, file, model, agent))
    for arm in arms:
        arm.config(None if own_windows else 10**6)  # reports an error before anything is replayed
    return arms


def require_agent(file: str, agent: str | None) -> None:
    """Raises SettingError if the configuration has agents, but no default one, and none is named."""
    agents = load_config(file).agents
    if agent is None and agents and DEFAULT not in agents:
        known = ", ".join(sorted(agents))
        raise SettingError(file, f"has no agent {DEFAULT!r}; --agent names another: {known}")


def _percent(text: str) -> int:
    if not (text.strip().isdecimal() and 1 <= int(text) <= 100):
        raise SettingError("--budget", f"{text.strip()!r} is no percentage; expected numbers like 50,25,10")
    return int(text)


def measure(traces: Sequence[Trace], arms: Sequence[Arm], jobs: int) -> list[Run]:
    """A row for each arm and source, and each arm's total."""
    sources = [*sorted({trace.source for trace in traces}), "total"]
    rows = {(arm, source): Run(arm, source) for arm in arms for source in sources}
    tasks = [(trace, arm) for trace in traces for arm in arms]
    for run in in_processes(replay, tasks, jobs):
        rows[run.arm, run.source].add(run)
        rows[run.arm, "total"].add(run)
    return list(rows.values())


def in_processes(
    work: Callable[..., Result], tasks: Sequence[tuple[object, ...]], jobs: int
) -> Iterator[Result]:
    """The results of a function, called with each task in one of several processes; with a progress bar."""
    with (
        ProcessPoolExecutor(jobs, get_context("spawn")) as pool,
        progress("Replaying", len(tasks)) as advance,
    ):
        try:
            for future in [pool.submit(work, *task) for task in tasks]:
                yield future.result()
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)


def failed_controls(rows: Sequence[Run]) -> Iterator[str]:
    """What the controls did that they must not do; then no other number can be trusted."""
    numbers = {row.arm.name: row.numbers for row in totals(rows)}
    for name, share in (("everything", 0), ("nothing", 1)):
        if name in numbers and numbers[name]["lost"] != numbers[name]["probes"] * share:
            yield f"keeping {name} loses {numbers[name]['lost']} of {numbers[name]['probes']} values"
    if "everything" in numbers and numbers["everything"]["bare"]:
        yield f"keeping everything loses the keys of {numbers['everything']['bare']} values"


def totals(rows: Sequence[Run]) -> list[Run]:
    return [row for row in rows if row.source == "total"]


def to_json(rows: Sequence[Run]) -> list[Json]:
    """Every number of every row, and the lost values."""
    found: list[Json] = []
    for row in rows:
        shares = {"lost": row.share("lost", "probes"), "saved": row.share("saved", "full")}
        found.append(msgspec.to_builtins(row) | shares | {"lost_values": row.lost})
    return found


def brief_table(rows: Sequence[Run]) -> BenchTable:
    """What each arm saved and lost, without the controls."""
    sums = totals(rows)
    lines: list[list[str]] = []
    for row in sums:
        name = row.arm.name
        budget = f"{row.arm.percent} %" if row.arm.percent else NONE
        unreachable = NONE if name == "newest" else f"{row.broken['unreachable']}"
        saved = f"{row.share('saved', 'full'):.1%}"
        if name not in CONTROLS:
            lost = _share_of(row, "lost", "probes")
            lines.append([NAMES.get(name, name), budget, saved, lost, unreachable])
    calls = max(row.numbers["calls"] for row in sums)
    conversations = max(row.numbers["conversations"] for row in sums)
    return BenchTable(f"{conversations} conversations, {calls:,} calls of a model", BRIEF, lines)


def tables(rows: Sequence[Run], *, only_totals: bool) -> list[BenchTable]:
    """What is saved and lost by source, what of the lost can be had, and what is lost after compactions."""
    sums = totals(rows)
    by_source = sums if only_totals else rows
    rounds = [f"after {n}" for n in range(MAX_ROUNDS)]
    rounds.append(f"after {MAX_ROUNDS} or more")
    compacted = [_after_rounds(row) for row in sums if row.numbers["batches"]]
    return [
        BenchTable("Saved and lost, by source", SAVED, [_saved(row) for row in by_source], texts=2),
        BenchTable("What is kept, and what of the lost can be had", LOST, [_lost(row) for row in sums]),
        BenchTable("Values lost, by the compactions before their use", ["budget", *rounds], compacted),
    ]


def _saved(row: Run) -> list[str]:
    numbers = row.numbers
    broken = [f"{count} {what}" for what, count in row.broken.items() if count and what != "unreachable"]
    return [
        str(row.arm),
        row.source,
        f"{numbers['conversations']:,}",
        f"{numbers['calls']:,}",
        f"{numbers['probes']:,}",
        f"{row.share('lost', 'probes'):.1%}",
        f"{row.share('saved', 'full'):.1%}",
        f"{row.share('batches', 'conversations'):.1f}",
        f"{row.share('kept', 'prior'):.1%}",
        f"{numbers['above']} ({row.worst:.2f})",
        f"{row.broken['unreachable']} of {numbers['hidden']:,}",
        ", ".join(broken) or "0",
        f"{numbers['refused']}",
    ]


def _lost(row: Run) -> list[str]:
    numbers = row.numbers
    both = (numbers["lost"] + numbers["bare"]) / (numbers["probes"] or 1)
    return [
        str(row.arm),
        f"{numbers['probes']:,} ({numbers['keyed']:,} with a key)",
        f"{row.share('lost', 'probes'):.1%}" if numbers["probes"] else NONE,
        f"{both:.1%}",
        _share_of(row, "expandable", "lost in view"),
        _share_of(row, "searchable", "lost"),
    ]


def _after_rounds(row: Run) -> list[str]:
    shares = [_share_of(row, f"lost after {n}", f"probes after {n}") for n in range(MAX_ROUNDS + 1)]
    return [str(row.arm), *shares]


def _share_of(row: Run, part: str, whole: str) -> str:
    return f"{row.share(part, whole):.1%} of {row.numbers[whole]:,}" if row.numbers[whole] else NONE
