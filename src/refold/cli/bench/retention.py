"""What is saved, and what is lost? Conversations are replayed and asked for the values they used.

refold bench retention                         on a set that anybody can make again
refold bench retention ../shared/data          on recorded conversations
refold bench retention agent.db --policy a.yaml,b.yaml   on your own, before you deploy

A budget is percent of a conversation's tokens. A value is lost if the request that uses it does not have it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import track

from refold.cli.bench.options import Brief, Conversations, Data, Jobs, Markdown, Numbers, Owner, Seed
from refold.cli.bench.own import Which
from refold.cli.bench.plot import Point, scatter
from refold.cli.bench.recorded import SMALLEST, each, large, load
from refold.cli.bench.replay import MOST_ROUNDS, Arm, Mode, Reach, Replay, Run, pinned, replay
from refold.cli.bench.tables import Sheet, show, write
from refold.cli.bench.trace import Json, Probe, Trace, text_of
from refold.config.config import DEFAULT, load_config
from refold.core.codec import dumps
from refold.core.errors import NotFoundError, RefoldError, SettingError

__all__ = ["Arm", "Probe", "Reach", "Replay", "Run", "Trace", "load", "main", "measure", "replay", "text_of"]

BUDGETS = "50,25,10"
NONE = "–"
"""What is shown where there is nothing to count."""
TITLES = (
    *("budget", "source", "conversations", "calls", "probes", "lost", "saved", "batches", "prefix kept"),
    *("above ¾ (worst)", "unreachable", "violations", "refused"),
)
KEPT = (
    *("budget", "probes", "value lost", "value or key lost", "lost: one expansion", "lost: found by search"),
    *("pinned kept", "task kept"),
)


def measure(traces: Sequence[Trace], arms: Sequence[Arm], jobs: int) -> list[Run]:
    """By arm and source, and of each arm the total."""
    sources = [*sorted({trace.source for trace in traces}), "total"]
    rows = {(arm, source): Run(arm, source) for arm in arms for source in sources}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        both = [(trace, arm) for trace in traces for arm in arms]
        tasks = [pool.submit(_tried, replay, *one) for one in both]
        tasks += [pool.submit(_tried, pinned, *one) for one in both if one[1].is_replayed]
        try:
            for task in track(tasks, "replaying", console=Console(stderr=True)):
                run = task.result()
                if isinstance(run, str):
                    raise SettingError(*run.split(": ", 1))
                rows[run.arm, run.source].add(run)
                rows[run.arm, "total"].add(run)
        finally:
            pool.shutdown(cancel_futures=True)
    return list(rows.values())


def _tried(work: Callable[[Trace, Arm], Run], trace: Trace, arm: Arm) -> Run | str:
    """A fault comes back as its words: not every error finds its way from one process to another."""
    try:
        return work(trace, arm)
    except RefoldError as error:
        return f"{arm} on {trace.id or trace.source}: {error}"


def briefly(rows: Sequence[Run]) -> Sheet:
    """Of each arm that hides something, what is saved and lost."""
    some = [row for row in rows if row.arm.name not in ("everything", "nothing", "least")]
    cells = [
        [
            {"refold": "refold", "newest": "the newest that fit"}.get(row.arm.name, row.arm.name),
            f"{row.arm.percent} %" if row.arm.percent else NONE,
            f"{row.share('saved', 'full'):.1%}",
            f"{row.share('lost', 'probes'):.1%} of {row.numbers['probes']:,}",
            f"{row.broken['unreachable']}" if row.arm.is_replayed and row.arm.name != "newest" else NONE,
        ]
        for row in some
    ]
    titles = ("", "budget", "tokens saved", "needed values lost from view", "unreachable")
    many = max((row.numbers["conversations"] for row in some), default=0)
    calls = max((row.numbers["calls"] for row in some), default=0)
    return Sheet(f"{many} conversations, {calls:,} calls of a model", titles, cells)


def unruly(rows: Sequence[Run]) -> Iterator[str]:
    """What the controls did that they must not do: then no other number is worth anything."""
    totals = {row.arm.name: row.numbers for row in _totals(rows)}
    for name, wanted in (("everything", 0), ("nothing", 1)):
        if name in totals and totals[name]["lost"] != totals[name]["probes"] * wanted:
            yield f"keeping {name} loses {totals[name]['lost']} of {totals[name]['probes']} values"
    if "everything" in totals and totals["everything"]["bare"]:
        yield f"keeping everything loses the keys of {totals['everything']['bare']} values"


# What is printed


def cells(row: Run) -> list[str]:
    n = row.numbers
    reach = f"{row.broken['unreachable']} of {n['hidden']:,}"
    broken = [f"{count} {what}" for what, count in row.broken.items() if count and what != "unreachable"]
    counts = [f"{n[name]:,}" for name in ("conversations", "calls", "probes")]
    shares = [f"{row.share('lost', 'probes'):.1%}", f"{row.share('saved', 'full'):.1%}"]
    shares += [f"{row.share('batches', 'conversations'):.1f}", f"{row.share('kept', 'prior'):.1%}"]
    checks = [f"{n['above']} ({row.worst:.2f})", reach, ", ".join(broken) or "0", f"{n['refused']}"]
    return [str(row.arm), row.source, *counts, *shares, *checks]


def kept_cells(row: Run) -> list[str]:
    n = row.numbers
    probes = f"{n['probes']:,} ({n['keyed']:,} with a key)"
    both = f"{(n['lost'] + n['bare']) / (n['probes'] or 1):.1%}"
    got = [_share_of(row, "expandable", "lost in view"), _share_of(row, "searchable", "lost")]
    kept = [_share(row, "pin_kept", "pin_views"), _share(row, "task_kept", "task_views")]
    return [str(row.arm), probes, _share(row, "lost", "probes"), both, *got, *kept]


def drift_cells(row: Run) -> list[str]:
    names = [(f"lost after {rounds}", f"probes after {rounds}") for rounds in range(MOST_ROUNDS + 1)]
    return [str(row.arm), *(_share_of(row, lost, of) for lost, of in names)]


def _share(row: Run, part: str, whole: str) -> str:
    return f"{row.share(part, whole):.1%}" if row.numbers[whole] else NONE


def _share_of(row: Run, part: str, whole: str) -> str:
    return f"{_share(row, part, whole)} of {row.numbers[whole]:,}" if row.numbers[whole] else NONE


def sheets(rows: Sequence[Run]) -> list[Sheet]:
    """What was saved and lost by source, what became of the lost, and how it went over the rounds."""
    totals = _totals(rows)
    ends = [n for n, row in enumerate(rows) if row.source == "total" and len(totals) < len(rows)]
    drift = [row for row in totals if row.numbers["batches"]]
    rounds = [f"after {n}" for n in range(MOST_ROUNDS)]
    return [
        Sheet("Saved and lost, by source", TITLES, list(map(cells, rows)), ends, texts=2),
        Sheet("What is kept, and what of the lost can be had", KEPT, list(map(kept_cells, totals))),
        Sheet(
            "Values lost, by the compactions before their use",
            ("budget", *rounds, f"after {MOST_ROUNDS} or more"),
            list(map(drift_cells, drift)),
        ),
    ]


def _totals(rows: Sequence[Run]) -> list[Run]:
    return [row for row in rows if row.source == "total"]


def plot(rows: Sequence[Run]) -> str:
    """Tokens saved and values lost by each arm, as SVG."""
    points = [
        Point(
            row.arm.name,
            f"{row.arm.percent} %" if row.arm.percent else "",
            row.share("saved", "full"),
            row.share("lost", "probes"),
        )
        for row in _totals(rows)
        if row.arm.name not in ("nothing", "least")  # what they lose would make all else look the same
    ]
    return scatter("Saved and lost", "tokens saved", "needed values lost from view", points)


def told(rows: Sequence[Run]) -> list[Json]:
    """Every number of every row."""
    shares = [{"lost": r.share("lost", "probes"), "saved": r.share("saved", "full")} for r in rows]
    return [msgspec.to_builtins(row) | share for row, share in zip(rows, shares, strict=True)]


# The command


def arms_of(
    budget: str | None, policy: str | None, mode: Mode, model: str | None, agent: str | None
) -> list[Arm]:
    """Refold under each budget; or it and each configuration, in their own windows or under each budget.

    Raises:
        SettingError: a budget is no percentage, or two files have one name.
    """
    percents = [_percent(text) for text in (budget or BUDGETS).split(",")]
    if policy is None:
        return [Arm("refold", percent, mode) for percent in percents]
    files = [file.strip() for file in policy.split(",") if file.strip()]
    names = [Path(file).stem for file in files]
    names = names if len({*names}) == len(names) else files
    named = {"default": "", **dict(zip(names, files, strict=True))}
    windows: list[int | None] = [*percents] if budget else [None]
    arms = [Arm(name, p, mode, file, model, agent) for p in windows for name, file in named.items()]
    for file in files:
        if agent is None and (known := load_config(file).agents) and DEFAULT not in known:
            others = ", ".join(sorted(known))
            raise SettingError(file, f"has no agent {DEFAULT!r}; --agent says which: {others}")
    for arm in arms:
        arm.config(10**6)  # a fault in it is told before anything is replayed
    return arms


def _percent(text: str) -> int:
    if not (text.strip().isdigit() and 1 <= int(text) <= 100):
        raise SettingError("--budget", f"{text.strip()!r} is no percentage; expected numbers like {BUDGETS}")
    return int(text)


def main(
    data: Data = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="P,P,…", help=f"Percent of each conversation's tokens; else {BUDGETS}."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE,FILE,…",
            help="Configurations to compare with the default, in their windows unless there is --budget.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="With --policy: whose window; else the configuration's.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --policy: whose settings; else default.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="What the budget is given as.")] = "room",
    conversation: Conversations = None,
    owner: Owner = "default",
    source: Annotated[str | None, typer.Option(help="Only the conversations of this one.")] = None,
    least: Annotated[int, typer.Option(metavar="TOKENS", help="Smaller ones are left out.")] = SMALLEST,
    seed: Seed = 0,
    dialects: Annotated[bool, typer.Option(help="Also the copies in other dialects.")] = False,
    written: Annotated[bool, typer.Option(help="Also with a model that writes badly.")] = False,
    controls: Annotated[bool, typer.Option(help="Also everything, nothing, the least, the newest.")] = True,
    jobs: Jobs = 2,
    totals: Annotated[bool, typer.Option("--totals", help="One row for all sources.")] = False,
    numbers: Numbers = None,
    lost: Annotated[Path | None, typer.Option(metavar="FILE", help="The lost values.")] = None,
    drawn: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Saved and lost, as a picture.")
    ] = None,
    brief: Brief = False,
    markdown: Markdown = False,
) -> None:
    """What is saved and what is lost, on conversations that are replayed step by step.

    Each is given a budget, and asked for the exact values that its later calls used. Without DATA it needs
    nothing and is the same everywhere.

    \b
    Examples:
      refold bench retention
      refold bench retention sqlite:///agent.db --policy careful.yaml,tight.yaml --model gpt-5
      refold bench retention exports/ --budget 25 --json numbers.json --plot retention.svg
    """
    arms = arms_of(budget, policy, mode, model, agent)
    percents = sorted({arm.percent for arm in arms if arm.percent}, reverse=True)
    if written:
        arms += [Arm("written", percent, mode) for percent in percents]
    if controls:
        arms += [Arm("everything"), Arm("nothing"), Arm("least")]
        arms += [Arm("newest", percent, mode) for percent in percents]
    traces = _read(data, source, dialects, Which(owner, conversation or ()), seed, least)
    rows = measure(traces, arms, jobs)
    if str(numbers) != "-" and brief:
        show([briefly(_totals(rows))], markdown=markdown)
    elif str(numbers) != "-":
        show(sheets(_totals(rows) if totals else rows), markdown=markdown)
        _say_beside(rows, arms)
    if numbers:
        write(numbers, dumps(told(rows)))
    if drawn:
        write(drawn, plot(rows).encode())
    if lost:
        found = [(row.arm, probe) for row in _totals(rows) for probe in row.lost]
        lines = ({"budget": str(arm), **msgspec.structs.asdict(probe)} for arm, probe in found)
        write(lost, b"".join(dumps(line) + b"\n" for line in lines))
    if faults := list(unruly(rows)):
        print(f"The controls fail: {'; '.join(faults)}. Trust none of these numbers.", file=sys.stderr)
        raise typer.Exit(1)


def _read(data: Any, source: str | None, dialects: bool, which: Which, seed: int, least: int) -> list[Trace]:
    found = each(data, source, dialects, which=which, seed=seed)
    known = list(track(found, "reading", console=Console(stderr=True), transient=True))
    traces = large(known, least)
    if not traces:
        most = max((sum(trace.counts) for trace in known), default=0)
        of = f" of source {source!r}" if source else ""
        raise NotFoundError(
            f"There is no conversation{of} with {least:,} tokens in {data or 'the set'}; the largest of"
            f" {len(known):,} has {most:,}. --least TOKENS takes smaller ones"
        )
    return traces


def _say_beside(rows: Sequence[Run], arms: Sequence[Arm]) -> None:
    dropped = max((row.numbers["dropped"] for row in rows), default=0)
    print(f"{dropped} probes left out: their value does not stand before its use.")
    if not any(row.numbers["probes"] for row in rows):
        print("No call uses a value of an earlier result: nothing can be said about what is lost.")
    if any(arm.policy for arm in arms):
        print("Configurations are replayed by rule: no model is called, whatever they name.")
    if any(arm.name == "everything" for arm in arms) and not any(unruly(rows)):
        print("The controls hold: keeping everything loses nothing, keeping nothing loses all.")


if __name__ == "__main__":
    typer.run(main)
