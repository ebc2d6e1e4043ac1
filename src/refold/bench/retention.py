"""What is saved, and what is lost? Recorded conversations are replayed and asked for the values they used.

python -m refold.bench.retention ../shared/data --budget 50,25,10 --lost lost.jsonl

A budget is percent of a conversation's tokens. A value is lost if the request that uses it does not have it.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import refold
from refold.answers import Fitted
from refold.core.codec import dumps
from refold.core.errors import OverBudgetError, RefoldError
from refold.formats.dialects import FORMATS
from refold.rules.targets import check_request
from refold.session import Session
from refold.testing.scribe import Scribe
from refold.tokens.count import counter

Json: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["room", "threshold", "window"]
MODEL = "gpt-5"
"""Whose tokens are counted, and whose window is set to the budget."""
SMALLEST, LEAST_BUDGET = 8_000, 4_000
"""In tokens; smaller conversations or budgets would fit any real window."""
TARGET = 0.75
"""What a batch should come down to, of what set it off."""
HANDLE = re.compile(r"\[refold [^\]]*?#(\d+)")
TOOL_RESULT = b'"type":"tool_result"'
"""What Anthropic has in messages of the user's role that are not the user's."""
WINDOW_ONLY: Json = {"strategy": "sliding-window", "prune": "off", "cap": "off"}
DIALECTS = {"openai": "openai-chat", "anthropic": "anthropic"}


class Probe(msgspec.Struct, frozen=True):
    """A value that was needed, and the messages where it stood first and last and was used."""

    conversation: str
    value: str
    kind: str
    first: int
    last: int
    use_at: int
    first_role: str = ""
    last_role: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded conversation."""

    source: str
    dialect: str
    messages: Sequence[Json]
    counts: Sequence[int]  # tokens of each message
    probes: Sequence[Probe] = ()
    dropped: int = 0
    """Probes of no use: their value does not stand before it is used."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What is tried: `refold`, the same with a model that writes badly (`written`), or a control:
    `everything`, `nothing`, or the `newest` that fits.
    """

    name: str
    percent: int | None = None
    """Of the conversation's tokens."""
    mode: Mode = "room"

    def __str__(self) -> str:
        return self.name if self.percent is None else f"{self.name} {self.percent} %"

    def config(self, budget: int) -> Json:
        """The settings that give it so many tokens."""
        if self.name in ("everything", "nothing"):
            return {"agents": {"default": {"compact": "off"}}}
        compact: Json = WINDOW_ONLY if self.name == "newest" else {}
        agent: Json = {"dedupe": "off"} if self.name == "newest" else {}
        limits: Json = {"window": budget, "max_output": 1_000}
        if self.mode == "threshold":
            limits, compact = {}, compact | {"token_threshold": budget}
        elif self.mode == "room":
            none = dict.fromkeys(("system_reserve", "output_reserve", "safety_buffer"), 0)
            limits["max_output"], compact = 1, compact | none | {"threshold_percent": 1.0}
        if self.name == "written":
            agent = {"summarizer": {"max_calls": 100_000}}
        return {"models": {MODEL: limits}, "agents": {"default": {**agent, "compact": compact}}}


@dataclass(slots=True)
class Run:
    """One conversation under one arm, or the sum of several."""

    arm: Arm
    source: str
    numbers: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    """What must always hold and did not, how often."""
    worst: float = 0.0
    """The most that a batch left, as a share of what set it off."""
    lost: list[Probe] = field(default_factory=list)

    def add(self, other: "Run") -> None:
        self.numbers.update(other.numbers)
        self.broken.update(other.broken)
        self.worst = max(self.worst, other.worst)
        self.lost += other.lost

    def share(self, part: str, whole: str) -> float:
        return self.numbers[part] / (self.numbers[whole] or 1)


def load(data: Path, source: str | None = None, least: int = SMALLEST, copies: bool = False) -> list[Trace]:
    """Conversations of so many tokens, the longest first; `copies` are in other dialects."""
    probes = defaultdict[str, list[Probe]](list)
    for line in _lines(data / "probes"):
        probes[line["conversation"]].append(msgspec.convert(line, Probe))
    lines = (line for line in _lines(data / "traces") if copies or line["format"] == "openai")
    found = (_trace(line, probes[line["id"]]) for line in lines if source in (None, line["source"]))
    large = [trace for trace in found if sum(trace.counts) >= least]
    return sorted(large, key=lambda trace: -len(trace.messages))


def _lines(folder: Path) -> Iterator[Json]:
    for file in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, file.read_bytes().splitlines())


def _trace(line: Json, probes: list[Probe]) -> Trace:
    dialect = DIALECTS[line["format"]]
    messages = [{k: v for k, v in m.items() if not k.startswith("x_")} for m in line["messages"]]
    counts = [counter(MODEL).message(FORMATS[dialect].parse(message)) for message in messages]
    texts = list(map(text_of, messages)) if probes else []
    known = [p for p in probes if any(p.value in text for text in texts[: p.use_at])]
    return Trace(line["source"], dialect, messages, counts, known, len(probes) - len(known))


def text_of(message: Json) -> str:
    """All strings in a message, those in JSON arguments too, and the message as it is sent."""
    return "\n".join((*_strings(message), dumps(message).decode()))


def _strings(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str):
        yield value
        if key == "arguments":
            with suppress(ValueError):
                yield from _strings(json.loads(value))
    elif isinstance(value, list | dict):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(inner, str(name))


def replay(trace: Trace, arm: Arm, budget: int | None = None) -> Run:
    """One conversation under one arm; unless given, the budget is the arm's share of it."""
    share = max(LEAST_BUDGET, sum(trace.counts) * (arm.percent or 100) // 100)
    one = Replay(trace, arm, budget or share)
    with one.session as session:
        for n, message in enumerate(trace.messages):
            needed = [probe for probe in trace.probes if probe.use_at == n]
            if n and (needed or message["role"] == "assistant"):
                one.step(n, needed, is_call=message["role"] == "assistant")
            session.append(message, dialect=trace.dialect)
        with suppress(OverBudgetError):
            one.reach.check(session.fit(dialect=trace.dialect).messages, one.run)
    return one.run


class Replay:
    """One conversation through a session of its own."""

    def __init__(self, trace: Trace, arm: Arm, budget: int) -> None:
        self.trace, self.arm, self.budget = trace, arm, budget
        rest: Json = {"config": arm.config(budget), "summarizer": Scribe() if arm.name == "written" else None}
        self.session = refold.open("replay", store="memory://", model=MODEL, **rest)
        counts = Counter(conversations=1, probes=len(trace.probes), dropped=trace.dropped)
        self.run = Run(arm, trace.source, counts)
        self.reach, self._sent = Reach(self.session), list[bytes]()
        wrote = (m["role"] == "user" and TOOL_RESULT not in dumps(m) for m in trace.messages)
        self._by_user = [n for n, is_users in enumerate(wrote) if is_users]

    def step(self, n: int, needed: Sequence[Probe], *, is_call: bool) -> None:
        """The request for message `n`, and whether what it needs is there."""
        users = [k for k in self._by_user if k < n]
        must = sorted({*users[:1], *users[-1:]})
        full = counter(MODEL).estimate(sum(self.trace.counts[:n])) if is_call else 0
        try:
            messages, tokens = self._least(n, must) if self.arm.name == "nothing" else self._fit(must)
        except OverBudgetError:
            messages, tokens, self._sent = [], 0, []  # what it hid before it gave up is hidden
            self.run.numbers.update(refused=is_call, refused_full=full, refused_probes=len(needed))
        self.run.numbers.update(calls=is_call, full=full, saved=(full - tokens) * is_call)
        text = "\n".join(map(text_of, messages)) if needed else ""
        lost = [probe for probe in needed if probe.value not in text]
        self.run.numbers["lost"] += len(lost)
        self.run.lost += lost

    def _least(self, n: int, must: Sequence[int]) -> tuple[list[Json], int]:
        said = self.trace.messages
        stay = [k for k in range(n) if k in must or said[k]["role"] in ("system", "developer")]
        return [said[k] for k in stay], counter(MODEL).estimate(sum(self.trace.counts[k] for k in stay))

    def _fit(self, must: Sequence[int]) -> tuple[list[Json], int]:
        fitted = self.session.fit(dialect=self.trace.dialect)
        sent = [dumps(message) for message in fitted.messages]
        missing = sum(dumps(self.trace.messages[k]) not in sent for k in must)
        invalid = bool(check_request(self.trace.dialect, fitted.request))
        self.run.broken.update({"task or latest": missing, "invalid": invalid})
        self._check_prefix(sent, fitted)
        self._sent = sent
        if fitted.report.fired and fitted.report.edits:
            self._check_batch(fitted.report.tokens.final)
            self.reach.check(fitted.messages, self.run)
        apart = [{"role": "system", "content": fitted.system}] if fitted.system is not None else []
        return apart + fitted.messages, fitted.report.tokens.final

    def _check_prefix(self, sent: list[bytes], fitted: Fitted) -> None:
        """How much of the last request begins this one: all of it where nothing was edited."""
        sizes = list(map(len, self._sent))
        pairs = enumerate(zip(self._sent, sent, strict=False))
        same = next((k for k, (old, new) in pairs if old != new), min(len(sizes), len(sent)))
        self.run.numbers.update(prior=sum(sizes), kept=sum(sizes[:same]))
        untouched = not fitted.report.edits and fitted.report.cache_break_at is None
        self.run.broken["prefix"] += untouched and same < len(sizes)

    def _check_batch(self, final: int) -> None:
        threshold = self.session.check_overflow().threshold
        trigger = min(threshold, self.budget) if self.arm.mode == "threshold" else threshold
        self.run.worst = max(self.run.worst, final / trigger)
        self.run.numbers.update(batches=1, above=final > TARGET * trigger)


class Reach:
    """Whether each hidden message can be had, whole, by one of the handles that a request shows."""

    def __init__(self, session: Session) -> None:
        self.session: Any = session
        self._said: dict[int, list[str]] = {}
        self._holds, self._expanded = cache(self._look), cache(self._expand)

    def check(self, messages: list[Json], run: Run) -> None:
        """Counts the messages that are hidden, and those of them that cannot be had."""
        if not hasattr(self.session, "expand"):
            return
        for new in self.session.get_range(len(self._said), sys.maxsize):
            self._said[new.at] = [new.message.text, *(call.input for call in new.message.calls)]
        items = [item for item in self.session.view().items if item.edit is not None]
        shown = {line.at for item in items for line in item.lines}
        hidden = {at for item in items for at in item.span if any(self._said.get(at, ()))} - shown
        handles = set(map(int, HANDLE.findall(dumps(messages).decode())))
        run.numbers["hidden"] += len(hidden)
        run.broken["unreachable"] += sum(not any(self._holds(h, at) for h in handles) for at in hidden)

    def _look(self, handle: int, at: int) -> bool:
        return all(text in self._expanded(handle) for text in self._said[at])

    def _expand(self, handle: int) -> str:
        with suppress(RefoldError):
            return str(self.session.expand(handle))
        return ""


# What is printed

TITLES = (
    *("budget", "source", "conversations", "calls", "probes", "lost", "saved", "batches", "prefix kept"),
    *("above ¾ (worst)", "unreachable", "violations", "refused"),
)


def measure(traces: Sequence[Trace], arms: Sequence[Arm], jobs: int) -> list[Run]:
    """By arm and source, and of each arm the total."""
    sources = [*sorted({trace.source for trace in traces}), "total"]
    rows = {(arm, source): Run(arm, source) for arm in arms for source in sources}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [pool.submit(replay, trace, arm) for trace in traces for arm in arms]
        for task in track(tasks, "conversations", console=Console(stderr=True)):
            run = task.result()
            rows[run.arm, run.source].add(run)
            rows[run.arm, "total"].add(run)
    return list(rows.values())


def cells(row: Run) -> list[str]:
    n = row.numbers
    reach = f"{row.broken['unreachable']} of {n['hidden']:,}" if hasattr(Session, "expand") else "n/a"
    broken = [f"{count} {what}" for what, count in row.broken.items() if count and what != "unreachable"]
    counts = [f"{n[name]:,}" for name in ("conversations", "calls", "probes")]
    shares = [f"{row.share('lost', 'probes'):.1%}", f"{row.share('saved', 'full'):.1%}"]
    shares += [f"{row.share('batches', 'conversations'):.1f}", f"{row.share('kept', 'prior'):.1%}"]
    checks = [f"{n['above']} ({row.worst:.2f})", reach, ", ".join(broken) or "0", f"{n['refused']}"]
    return [str(row.arm), row.source, *counts, *shares, *checks]


def show(rows: Sequence[Run], markdown: bool) -> None:
    if markdown:
        for line in (TITLES, ["---", "---"] + ["---:"] * (len(TITLES) - 2), *map(cells, rows)):
            print(f"| {' | '.join(line)} |")
    else:
        table = Table(*TITLES)
        for row in rows:
            table.add_row(*cells(row), end_section=row.source == "total")
        Console(width=None if sys.stdout.isatty() else 170).print(table)
    dropped = max((row.numbers["dropped"] for row in rows), default=0)
    print(f"{dropped} probes left out: their value does not stand before its use.")


def main(
    data: Path,
    budget: Annotated[str, typer.Option(help="Percent of each conversation's tokens.")] = "50,25,10",
    mode: Annotated[Mode, typer.Option(help="What the budget is given as.")] = "room",
    source: Annotated[str | None, typer.Option(help="Only the conversations of this one.")] = None,
    dialects: Annotated[bool, typer.Option(help="Also the copies in other dialects.")] = False,
    written: Annotated[bool, typer.Option(help="Also with a model that writes badly.")] = False,
    controls: Annotated[bool, typer.Option(help="Also keep everything, nothing, the newest.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1, max=2)] = 2,
    numbers: Annotated[Path | None, typer.Option("--json", help="A file for all numbers.")] = None,
    lost: Annotated[Path | None, typer.Option(help="A file for the lost values.")] = None,
    markdown: bool = False,
) -> None:
    """What refold saves and loses on recorded conversations."""
    percents = [int(percent) for percent in budget.split(",")]
    arms = [Arm("refold", percent, mode) for percent in percents]
    if written:
        arms += [Arm("written", percent, mode) for percent in percents]
    if controls:
        arms += [Arm("everything"), Arm("nothing"), *(Arm("newest", p, mode) for p in percents)]
    rows = measure(load(data, source, copies=dialects), arms, jobs)
    show(rows, markdown)
    if numbers:
        shares = [{"lost": r.share("lost", "probes"), "saved": r.share("saved", "full")} for r in rows]
        told = [msgspec.to_builtins(row) | share for row, share in zip(rows, shares, strict=True)]
        numbers.write_bytes(dumps(told))
    if lost:
        found = [(row.arm, probe) for row in rows if row.source == "total" for probe in row.lost]
        lines = ({"budget": str(arm), **msgspec.structs.asdict(probe)} for arm, probe in found)
        lost.write_bytes(b"".join(dumps(line) + b"\n" for line in lines))


if __name__ == "__main__":
    typer.run(main)
