"""Replays a conversation step by step through a session, and looks in each request for what it needs."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import msgspec

import refold
from refold.cli.bench.trace import (
    DIALECT,
    EVERYTHING,
    MODEL,
    Json,
    Probe,
    Trace,
    counted,
    has_key_near,
    text_of,
)
from refold.config.config import Config, load_config
from refold.core.codec import dumps
from refold.core.errors import OverBudgetError, RefoldError
from refold.dialects.rules.targets import check_request
from refold.models.count import counter
from refold.policies.shorten import quoted
from refold.session.results import Fitted
from refold.testing.scribe import Scribe

MIN_BUDGET = 4_000
"""In tokens; no model has a smaller window."""
TARGET = 0.75
"""What a compaction should come down to, as a share of its trigger."""
MAX_ROUNDS = 4
"""Compactions before a use that are told apart; the last stands for all above."""
CONTROLS = ("everything", "nothing", "least")
HANDLE = re.compile(r"\[refold [^\]]*?#(\d+)")
ALL_OF_THE_WINDOW: Json = {
    "system_reserve": 0,
    "output_reserve": 0,
    "safety_buffer": 0,
    "threshold_percent": 1.0,
}
WINDOW_ONLY: Json = {"strategy": "sliding-window", "prune": "off", "cap": "off"}
SETTINGS: dict[str, Json] = {
    "newest": {"agents": {"default": {"dedupe": "off", "compact": WINDOW_ONLY}}},
    "written": {"agents": {"default": {"summarizer": {"max_calls": 100_000}}}},
    **dict.fromkeys(CONTROLS, EVERYTHING),
}
BY_RULE: Json = {"summarizer": {"models": [], "executor": "thread"}}
"""A replay calls no model."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What is tried: `refold`; `written`, the same with a fake model that forgets and invents; a user's
    configuration; `newest`, a sliding window; or a control: `everything`, `nothing`, or the `least` that any
    view has (system text, the task and the latest user message).
    """

    name: str
    percent: int | None = None
    """The budget, in percent of the conversation's tokens; None for a configuration's own window."""
    policy: str | None = None
    """The configuration's file; empty for the default configuration."""
    model: str | None = None
    """The model that replaces the configuration's."""
    agent: str | None = None

    def __str__(self) -> str:
        return self.name if self.percent is None else f"{self.name} {self.percent} %"

    def budget(self, trace: Trace) -> int | None:
        """Tokens of the window; None for the configuration's own."""
        if self.policy is not None and self.percent is None:
            return None
        return max(MIN_BUDGET, sum(trace.counts) * (self.percent or 100) // 100)

    def config(self, budget: int | None) -> Config:
        """The settings, with a window of that size."""
        agent = self.agent or "default"
        sources: list[Json | str] = [SETTINGS.get(self.name, {})]
        if self.policy is not None:
            sources = [*filter(None, [self.policy]), {"agents": {agent: BY_RULE}}]
        config = load_config(sources)
        settings = config.agent(self.agent)
        if budget is None or settings.is_off:
            return config
        compact = {k: v for k, v in msgspec.to_builtins(settings.compaction).items() if v is not None}
        window = {"models": {self.model or MODEL: {"window": budget, "max_output": 1}}}
        return load_config([config, window, {"agents": {agent: {"compact": compact | ALL_OF_THE_WINDOW}}}])


@dataclass(slots=True)
class Run:
    """The numbers of one conversation under one arm, or of several together."""

    arm: Arm
    source: str
    numbers: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    """How often something did not hold that must always hold."""
    worst: float = 0.0
    """The most that a compaction left, as a share of its trigger."""
    lost: list[Probe] = field(default_factory=list)

    def add(self, other: "Run") -> None:
        self.numbers.update(other.numbers)
        self.broken.update(other.broken)
        self.worst = max(self.worst, other.worst)
        self.lost += other.lost

    def share(self, part: str, whole: str) -> float:
        return self.numbers[part] / (self.numbers[whole] or 1)


def replay(trace: Trace, arm: Arm, budget: int | None = None) -> Run:
    """Replays a conversation; the budget is the arm's, unless given."""
    one = Replay(trace, arm, budget or arm.budget(trace))
    with one.session as session:
        for n, message in enumerate(trace.messages):
            needed = [probe for probe in trace.probes if probe.use_at == n]
            is_call = message["role"] == "assistant"
            if n and (needed or is_call):
                one.step(n, needed, is_call=is_call)
            session.append(message, dialect=DIALECT)
        with suppress(OverBudgetError):
            one.check_handles(session.fit(dialect=DIALECT).messages)
    return one.run


class Replay:
    """A conversation on its way through a session."""

    def __init__(self, trace: Trace, arm: Arm, budget: int | None) -> None:
        config = arm.config(budget)
        configured = config.agent(arm.agent).model if arm.policy is not None else None
        model = arm.model or configured or MODEL
        summarizer = Scribe() if arm.name == "written" else None
        self.trace = trace
        self.arm = arm
        self.session = refold.open(
            "replay", store="memory://", model=model, config=config, agent=arm.agent, summarizer=summarizer
        )
        self.run = Run(arm, trace.source, Counter(conversations=1, dropped=trace.dropped))
        self.run.numbers["probes"] = len(trace.probes)
        self.sent: list[bytes] = []
        """The messages of the last request."""
        self._counts = trace.counts if model == MODEL else counted(trace.messages, model)
        self._counter = counter(model)
        self._recorded: dict[int, list[str]] = {}
        """The texts of each message by its place, as far as they were read."""
        self._expanded = cache(self._expand)
        self._returns = cache(self._is_returned)

    def step(self, n: int, needed: Sequence[Probe], *, is_call: bool) -> None:
        """Makes the request for message `n`, and looks for what it needs."""
        users = [k for k in range(n) if self.trace.messages[k]["role"] == "user"]
        must_have = sorted({*users[:1], *users[-1:]})
        numbers = self.run.numbers
        full = self._counter.estimate(sum(self._counts[:n])) if is_call else 0
        messages: list[Json] = []
        tokens = 0
        try:
            if self.arm.name == "least":
                messages, tokens = self._least(n, must_have)
            elif self.arm.name != "nothing":
                messages, tokens = self._fit(must_have)
        except OverBudgetError:
            self.sent = []
            numbers.update(refused=is_call, refused_full=full, refused_probes=len(needed))
        numbers.update(calls=is_call, full=full, saved=(full - tokens) * is_call)
        if needed:
            self._look_for(needed, messages)

    def _look_for(self, needed: Sequence[Probe], messages: list[Json]) -> None:
        text = "\n".join(map(text_of, messages))
        numbers = self.run.numbers
        rounds = min(numbers["batches"], MAX_ROUNDS)
        for probe in needed:
            is_lost = probe.value not in text
            numbers.update({"keyed": bool(probe.key), "lost": is_lost})
            numbers.update({f"probes after {rounds}": 1, f"lost after {rounds}": is_lost})
            if is_lost:
                self.run.lost.append(probe)
                opened = map(self._expanded, _handles(messages))
                numbers["lost in view"] += bool(messages)  # a refused request has no view
                numbers["expandable"] += any(probe.value in text for text in opened)
                numbers["searchable"] += self._finds(probe.value)
            elif probe.key and not has_key_near(text, probe.value, probe.key):
                numbers["bare"] += 1

    def _least(self, n: int, must_have: Sequence[int]) -> tuple[list[Json], int]:
        messages: list[Json] = []
        tokens = 0
        for k, message in enumerate(self.trace.messages[:n]):
            if k in must_have or message["role"] in ("system", "developer"):
                messages.append(message)
                tokens += self._counts[k]
        return messages, self._counter.estimate(tokens)

    def _fit(self, must_have: Sequence[int]) -> tuple[list[Json], int]:
        fitted = self.session.fit(dialect=DIALECT)
        report = fitted.report
        sent = [dumps(message) for message in fitted.messages]
        missing = [k for k in must_have if dumps(self.trace.messages[k]) not in sent]
        self.run.broken["task or latest"] += len(missing)
        self.run.broken["invalid"] += bool(check_request(DIALECT, fitted.request))
        self._compare_with_last(sent, fitted)
        self.sent = sent
        if report.fired and report.edits:
            threshold = self.session.check_overflow().threshold
            self.run.worst = max(self.run.worst, report.tokens.final / threshold)
            self.run.numbers.update(batches=1, above=report.tokens.final > TARGET * threshold)
            self.check_handles(fitted.messages)
        return fitted.messages, report.tokens.final

    def _compare_with_last(self, sent: list[bytes], fitted: Fitted) -> None:
        """Counts how much of the last request begins this one: all of it where nothing was edited."""
        same = 0
        for old, new in zip(self.sent, sent, strict=False):
            if old != new:
                break
            same += 1
        sizes = [len(message) for message in self.sent]
        self.run.numbers.update(prior=sum(sizes), kept=sum(sizes[:same]))
        is_untouched = not fitted.report.edits and fitted.report.cache_break_at is None
        self.run.broken["prefix"] += is_untouched and same < len(sizes)

    # What is hidden, and can be had by a handle of the request or by a search

    def check_handles(self, messages: list[Json]) -> None:
        """Counts the messages that are hidden, and those that no handle expands whole."""
        self._read_new()
        items = [item for item in self.session.view().items if item.edit is not None]
        shown = {line.at for item in items for line in item.lines}
        places = {at for item in items for at in item.span}
        hidden = [at for at in places - shown if any(self._recorded.get(at, ()))]
        handles = _handles(messages)
        self.run.numbers["hidden"] += len(hidden)
        for at in hidden:
            self.run.broken["unreachable"] += not any(self._returns(handle, at) for handle in handles)

    def _finds(self, value: str) -> bool:
        """True if a search for the value finds a message that has it."""
        self._read_new()
        with suppress(RefoldError):
            found = [text for hit in self.session.search(value) for text in self._recorded.get(hit.at, ())]
            return any(value in text for text in found)
        return False

    def _read_new(self) -> None:
        for new in self.session.get_range(len(self._recorded), sys.maxsize):
            self._recorded[new.at] = [new.message.text, *(call.input for call in new.message.calls)]

    def _is_returned(self, handle: int, at: int) -> bool:
        # an expansion doubles handles that occur in the text, as results of refold's own tools have them
        return all(quoted(text) in self._expanded(handle) for text in self._recorded[at])

    def _expand(self, handle: int) -> str:
        with suppress(RefoldError):
            return str(self.session.expand(handle))
        return ""


def _handles(messages: list[Json]) -> set[int]:
    return {int(handle) for handle in HANDLE.findall(dumps(messages).decode())}
