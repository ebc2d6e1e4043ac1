"""One conversation, replayed step by step through a session of its own, and asked for what it needed."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias

import msgspec

import refold
from refold.cli.bench.score import has, has_beside
from refold.cli.bench.trace import MODEL, Json, Probe, Trace, counted, text_of
from refold.config.config import Config, load_config
from refold.core.codec import dumps
from refold.core.errors import OverBudgetError, RefoldError
from refold.dialects.rules.targets import check_request
from refold.models.count import counter
from refold.policies.shorten import quoted
from refold.session.results import Fitted
from refold.session.session import Session
from refold.testing.scribe import Scribe

Mode: TypeAlias = Literal["room", "threshold", "window"]
LEAST_BUDGET = 4_000
"""In tokens; smaller budgets would be no real window."""
TARGET = 0.75
"""What a batch should come down to, of what set it off."""
MOST_ROUNDS = 4
"""Compactions before a use that are told apart; the last stands for all above."""
HANDLE = re.compile(r"\[refold [^\]]*?#(\d+)")
TOOL_RESULT = b'"type":"tool_result"'
"""What Anthropic has in messages of the user's role that are not the user's."""
WINDOW_ONLY: Json = {"strategy": "sliding-window", "prune": "off", "cap": "off"}
BY_RULE: Json = {"summarizer": {"models": [], "executor": "thread"}}
"""Nobody is called for a replay."""
RULES = ("must", "never", "always", "do not", "don't", "only", "make sure")
"""Words of a message that somebody might pin."""
PINNED_CHARS = range(20, 2_001)


@dataclass(frozen=True, slots=True)
class Arm:
    """What is tried: `refold`, the same with a model that writes badly (`written`), a configuration's
    `policy`, or a control: `everything`, `nothing`, the `least` that any view has (system text, the task
    and what the user said last), or the `newest` that fits.
    """

    name: str
    percent: int | None = None
    """Of the conversation's tokens."""
    mode: Mode = "room"
    policy: str | None = None
    """A configuration's file; empty, what refold does by itself. Without `percent`, in its own window."""
    model: str | None = None
    """Whose window it is, where there is a policy; else the configuration's."""
    agent: str | None = None

    def __str__(self) -> str:
        return self.name if self.percent is None else f"{self.name} {self.percent} %"

    @property
    def is_replayed(self) -> bool:
        """Whether there is a session that could lose something."""
        return self.name not in ("everything", "nothing", "least")

    def config(self, budget: int) -> Config:
        """The settings that give it so many tokens."""
        if self.policy is None:
            return load_config(self._limited({}, {}, budget) if self.is_replayed else EVERYTHING)
        name = self.agent or "default"
        whole = load_config([*([self.policy] if self.policy else []), {"agents": {name: BY_RULE}}])
        settings = whole.agent(self.agent)
        if self.percent is None or settings.is_off:
            return whole
        compact = {k: v for k, v in msgspec.to_builtins(settings.compaction).items() if v is not None}
        return load_config([whole, self._limited({}, compact, budget)])

    def _limited(self, agent: Json, compact: Json, budget: int) -> Json:
        limits: Json = {"window": budget, "max_output": 1_000}
        if self.name == "newest":
            agent, compact = {"dedupe": "off"}, WINDOW_ONLY
        if self.mode == "threshold":
            limits, compact = {}, compact | {"token_threshold": budget}
        elif self.mode == "room":
            none = dict.fromkeys(("system_reserve", "output_reserve", "safety_buffer"), 0)
            limits["max_output"], compact = 1, compact | none | {"threshold_percent": 1.0}
        if self.name == "written":
            agent = {"summarizer": {"max_calls": 100_000}}
        models = {self.model or MODEL: limits}
        return {"models": models, "agents": {self.agent or "default": {**agent, "compact": compact}}}


EVERYTHING: Json = {"models": {MODEL: {"window": 10**12}}, "agents": {"default": {"compact": "off"}}}


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


def replay(trace: Trace, arm: Arm, budget: int | None = None) -> Run:
    """One conversation under one arm; unless given, the budget is the arm's share of it."""
    return _replayed(Replay(trace, arm, budget or _share(trace, arm)))


def pinned(trace: Trace, arm: Arm, budget: int | None = None) -> Run:
    """The same with an early message pinned: how many requests there were with it, and where it was kept.

    A pin takes room, so nothing else of this replay is told.
    """
    one = Replay(trace, arm, budget or _share(trace, arm), pin=worth_pinning(trace))
    if one.pin is not None:
        _replayed(one, is_asked=False)
    names = ("pin_views", "pin_kept")
    return Run(arm, trace.source, Counter({name: one.run.numbers[name] for name in names}))


def _share(trace: Trace, arm: Arm) -> int:
    return max(LEAST_BUDGET, sum(trace.counts) * (arm.percent or 100) // 100)


def _replayed(one: "Replay", *, is_asked: bool = True) -> Run:
    trace = one.trace
    with one.session as session:
        for n, message in enumerate(trace.messages):
            needed = [probe for probe in trace.probes if probe.use_at == n and is_asked]
            if n and (needed or message["role"] == "assistant"):
                one.step(n, needed, is_call=message["role"] == "assistant")
            at = session.append(message, dialect=trace.dialect)
            if n == one.pin:
                session.pin(at)
        with suppress(OverBudgetError):
            one.reach.check(session.fit(dialect=trace.dialect).messages, one.run)
    return one.run


def worth_pinning(trace: Trace) -> int | None:
    """An early message after the task: the first that sounds like a rule, else the first that is short."""
    users = [n for n, message in enumerate(trace.messages) if message["role"] == "user"]
    first = users[0] + 1 if users else 0
    texts = {n: trace.messages[n].get("content") for n in range(first, max(first, len(trace.messages) // 2))}
    short = {n: text for n, text in texts.items() if isinstance(text, str) and len(text) in PINNED_CHARS}
    alone = [n for n in short if not trace.messages[n].get("tool_calls")]
    rules = (n for n in alone if any(rule in short[n].lower() for rule in RULES))
    return next(rules, alone[0] if alone else None)


class Replay:
    """One conversation through a session of its own."""

    def __init__(self, trace: Trace, arm: Arm, budget: int, pin: int | None = None) -> None:
        self.trace, self.arm, self.budget, self.pin = trace, arm, budget, pin
        config = arm.config(budget)
        self.model = arm.model or (config.agent(arm.agent).model if arm.policy is not None else None) or MODEL
        rest: Json = {"config": config, "agent": arm.agent}
        rest["summarizer"] = Scribe() if arm.name == "written" else None
        self.session = refold.open("replay", store="memory://", model=self.model, **rest)
        self.counts = (
            trace.counts if self.model == MODEL else counted(trace.messages, trace.dialect, self.model)
        )
        counts = Counter(conversations=1, probes=len(trace.probes), dropped=trace.dropped)
        self.run = Run(arm, trace.source, counts)
        self.reach, self._sent = Reach(self.session), list[bytes]()
        wrote = (m["role"] == "user" and TOOL_RESULT not in dumps(m) for m in trace.messages)
        self._by_user = [n for n, is_users in enumerate(wrote) if is_users]

    def step(self, n: int, needed: Sequence[Probe], *, is_call: bool) -> None:
        """The request for message `n`, and whether what it needs is there."""
        users = [k for k in self._by_user if k < n]
        must = sorted({*users[:1], *users[-1:]})
        full = counter(self.model).estimate(sum(self.counts[:n])) if is_call else 0
        try:
            match self.arm.name:
                case "nothing":
                    messages, tokens = list[Json](), 0
                case "least":
                    messages, tokens = self._least(n, must)
                case _:
                    messages, tokens = self._fit(n, must)
        except OverBudgetError:
            messages, tokens, self._sent = [], 0, []  # what it hid before it gave up is hidden
            self.run.numbers.update(refused=is_call, refused_full=full, refused_probes=len(needed))
        self.run.numbers.update(calls=is_call, full=full, saved=(full - tokens) * is_call)
        if needed:
            self._ask(needed, messages)

    def _ask(self, needed: Sequence[Probe], messages: list[Json]) -> None:
        text = "\n".join(map(text_of, messages))
        lost = [probe for probe in needed if not has(text, probe.value)]
        bare = [p for p in needed if p.key and p not in lost and not has_beside(text, p.value, p.key)]
        numbers, rounds = self.run.numbers, min(self.run.numbers["batches"], MOST_ROUNDS)
        numbers.update(lost=len(lost), bare=len(bare), keyed=sum(bool(probe.key) for probe in needed))
        numbers.update({f"probes after {rounds}": len(needed), f"lost after {rounds}": len(lost)})
        numbers["lost in view"] += len(lost) * bool(messages)  # who is refused has no view
        numbers["expandable"] += sum(self.reach.opens(messages, probe.value) for probe in lost)
        numbers["searchable"] += sum(self.reach.finds(probe.value) for probe in lost)
        self.run.lost += lost

    def _least(self, n: int, must: Sequence[int]) -> tuple[list[Json], int]:
        said = self.trace.messages
        stay = [k for k in range(n) if k in must or said[k]["role"] in ("system", "developer")]
        return [said[k] for k in stay], counter(MODEL).estimate(sum(self.trace.counts[k] for k in stay))

    def _fit(self, n: int, must: Sequence[int]) -> tuple[list[Json], int]:
        fitted = self.session.fit(dialect=self.trace.dialect)
        sent = [dumps(message) for message in fitted.messages]
        missing = [k for k in must if dumps(self.trace.messages[k]) not in sent]
        invalid = bool(check_request(self.trace.dialect, fitted.request))
        self.run.broken.update({"task or latest": len(missing), "invalid": invalid})
        self.run.numbers.update(task_views=bool(must), task_kept=bool(must) and must[0] not in missing)
        if self.pin is not None and self.pin < n:
            is_kept = dumps(self.trace.messages[self.pin]) in sent
            self.run.numbers.update(pin_views=1, pin_kept=is_kept)
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
    """What is hidden and can be had: by one of the handles that a request shows, or by a search."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._said: dict[int, list[str]] = {}
        self._holds, self._expanded = cache(self._look), cache(self._expand)

    def check(self, messages: list[Json], run: Run) -> None:
        """Counts the messages that are hidden, and those of them that cannot be had whole by a handle."""
        self._catch_up()
        items = [item for item in self.session.view().items if item.edit is not None]
        shown = {line.at for item in items for line in item.lines}
        hidden = {at for item in items for at in item.span if any(self._said.get(at, ()))} - shown
        handles = self._handles(messages)
        run.numbers["hidden"] += len(hidden)
        run.broken["unreachable"] += sum(not any(self._holds(h, at) for h in handles) for at in hidden)

    def opens(self, messages: list[Json], value: str) -> bool:
        """Whether one expansion of a handle in view gives it back."""
        return any(has(self._expanded(handle), value) for handle in self._handles(messages))

    def finds(self, value: str) -> bool:
        """Whether a search for it leads to a place where it was said."""
        self._catch_up()
        with suppress(RefoldError):
            places = (self._said.get(hit.at, ()) for hit in self.session.search(value))
            return any(has(text, value) for texts in places for text in texts)
        return False

    def _catch_up(self) -> None:
        for new in self.session.get_range(len(self._said), sys.maxsize):
            self._said[new.at] = [new.message.text, *(call.input for call in new.message.calls)]

    def _handles(self, messages: list[Json]) -> set[int]:
        return set(map(int, HANDLE.findall(dumps(messages).decode())))

    def _look(self, handle: int, at: int) -> bool:
        # an expansion doubles handles that stand in the text, as the answers of refold's own tools have
        return all(quoted(text) in self._expanded(handle) for text in self._said[at])

    def _expand(self, handle: int) -> str:
        with suppress(RefoldError):
            return str(self.session.expand(handle))
        return ""
