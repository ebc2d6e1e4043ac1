"""The command learn: proposes when tool results expire, from how long they were used."""

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Annotated, Any

import typer

from refold.cli.format import one_line, plural
from refold.cli.options import (
    Access,
    ConfigFile,
    Json,
    OutFile,
    Owner,
    StoreUrl,
    existing,
    ids,
    reporting_damage,
)
from refold.cli.terminal import complain, emit, say, waiting, writing
from refold.config.config import DEFAULT, AgentSettings, Config, with_database
from refold.config.validate import plain_fields
from refold.core import codec
from refold.core.codec import dumps
from refold.core.errors import CorruptError, NotFoundError, SettingError
from refold.core.event import Expiry
from refold.policies.learn_expiry import CONFIDENCE, ENOUGH, Lesson, Trial, propose, wanted
from refold.policies.usage import UsageHistory, past
from refold.session.inspect import parse
from refold.session.meter import Meter
from refold.stores.store import ConversationInfo, Key, Store

LEAST_COVER, MOST_COVER = 0.5, 0.999
_PLAIN = re.compile(r"(?!(?:on|off|yes|no|y|n|true|false|null)$)[a-z_][\w-]*", re.ASCII | re.IGNORECASE)

Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Only these conversations; default: all.",
        autocompletion=ids,
        show_default=False,
    ),
]
Agent = Annotated[
    str | None, typer.Option("--agent", metavar="NAME", help="The agent to propose settings for.")
]
Cover = Annotated[
    float,
    typer.Option(
        "--cover",
        metavar="SHARE",
        min=LEAST_COVER,
        max=MOST_COVER,
        help="The share of later uses that must still find the result.",
    ),
]


def learn(
    conversations: Ids = None,
    agent: Agent = None,
    cover: Cover = 0.99,
    out: OutFile = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Propose when tool results expire, from how long they were used.

    Prints settings as YAML, with the evidence: a later step uses a result if it takes an exact value from it,
    or asks for it again. Nothing is changed.
    """
    if out is not None and out.exists():
        raise SettingError("--out", f"{one_line(str(out))} already exists; name another file")
    access = Access.to(store, config)
    with access.open() as backend:
        settings = with_database(access.config, backend)
        current = _current(settings, agent)
        rows = _chosen(backend, access, owner, conversations or [])
        pasts = _pasts(backend, rows, Meter(None, settings, current.model, current.counter))
    if not any(one.results for one in pasts):
        raise NotFoundError(
            f"There is nothing to learn from in {access.shown}: owner {owner!r} has"
            f" {plural(len(pasts), 'conversation')} without tool results. `refold import FILE` adds some"
        )
    proposal = Proposal(agent or DEFAULT, cover, current, pasts, propose(pasts, cover))
    if out is not None:
        with writing(out) as file:
            file.write(proposal.yaml.encode("utf-8", "backslashreplace"))
    if json:
        emit({"store": access.shown, "file": out and str(out), **proposal.json})
    elif out is None:
        say(proposal.yaml.rstrip())
    else:
        say(f"{proposal.title}: see {one_line(str(out))}")


def _current(config: Config, agent: str | None) -> AgentSettings:
    """The current settings; without configured agents, any name is allowed."""
    is_known = agent is not None and agent != DEFAULT and bool(config.agents)
    return config.agent(agent if is_known else None)


def _chosen(store: Store, access: Access, owner: str, names: Sequence[str]) -> list[ConversationInfo]:
    keys = {existing(store, access.shown, Key(owner, name)) for name in names}
    return sorted(row for row in store.conversations(owner) if row.key in keys or not names)


def _pasts(store: Store, rows: Sequence[ConversationInfo], meter: Meter) -> list[UsageHistory]:
    """The history of each conversation that can be read. Events that forks share count once."""
    found = list[UsageHistory]()
    keys = {row.key for row in rows}
    with waiting("Reading") as tell:
        for n, row in enumerate(rows):
            tell(n, len(rows))
            try:
                with reporting_damage(row.key.conversation):
                    events = [codec.decode(link.entry, parse) for link in store.read(row.key)]
                    since = row.fork_at if row.parent in keys else 0
                    found.append(past(events, meter.counter.message, since))
            except CorruptError as error:
                complain(f"{row.key.conversation} is skipped: {error}")
    return found


class Proposal:
    """Proposed settings, as YAML and as JSON."""

    def __init__(
        self,
        agent: str,
        cover: float,
        current: AgentSettings,
        pasts: Sequence[UsageHistory],
        lessons: Sequence[Lesson],
    ) -> None:
        self.agent = agent
        self.cover = cover
        self.current = current
        self.lessons = lessons
        self.conversations = len(pasts)
        self.steps = sum(one.steps for one in pasts)
        self.tokens = sum(one.tokens for one in pasts)
        self.saved = sum(one.trial.saved for one in lessons)

    @property
    def title(self) -> str:
        proposed = sum(one.expire is not None for one in self.lessons)
        return f"Settings for {proposed} of {plural(len(self.lessons), 'tool')}"

    @property
    def yaml(self) -> str:
        return "\n".join((*self._head(), *self._proposed(), *self._left_alone(), ""))

    def _head(self) -> Iterator[str]:
        read = f"{plural(self.conversations, 'conversation')} with {plural(self.steps, 'step')}"
        saved = f"{self.saved:,} of {self.tokens:,} tokens ({_percent(self.saved, self.tokens)})"
        yield f"# {self.title}, learned from {read}."
        yield f"# They would have saved {saved} there. They keep results"
        few = f"with a margin for tools with fewer than {wanted(self.cover)} uses"
        yield f"# for {self.cover:.1%} of later uses, at a confidence of {CONFIDENCE:.0%}, {few}."

    def _proposed(self) -> Iterator[str]:
        proposed = [(one, one.expire) for one in self.lessons if one.expire is not None]
        if not proposed:
            yield "agents: {}"
            return
        yield from ("agents:", f"  {_key(self.agent)}:", "    tools:")
        for one, expire in proposed:
            yield from (f"      # {line}" for line in self._evidence(one, expire))
            fields = ", ".join(f"{name}: {value}" for name, value in plain_fields(expire).items())
            yield from (f"      {_key(one.tool)}:", f"        expire: {{{fields}}}")

    def _evidence(self, one: Lesson, expire: Expiry) -> Iterator[str]:
        errors = sum(result.is_error for result in one.results)
        size = f"{median(result.line.tokens for result in one.results):,.0f} tokens (median)"
        some = f", {plural(errors, 'error')} among them" if errors else ""
        used = f"{one.used:,} of them used later, in {plural(len(one.needs), 'step')}"
        used = used if one.needs else "none used later"
        yield f"{plural(len(one.results), 'result')} of {size}{some}; {used}"
        if one.needs:
            yield f"steps between result and use: {_distances(one)}"
        asked = _asked_again(one)
        expired = sum(result.had_expired for result in one.results)
        if expired or asked:
            yield f"{expired:,} had expired in the record; asked for again {plural(asked, 'time')}"
        yield f"replayed: {_trial_text(one.trial)}"
        unseen = "too few conversations to tell" if one.unseen is None else _trial_text(one.unseen)
        yield f"held out: {unseen}"
        yield f"now: {_expiry_text(self._now(one.tool))} → {_expiry_text(expire)}"

    def _left_alone(self) -> Iterator[str]:
        alone = [one for one in self.lessons if one.expire is None]
        if alone:
            yield "# Without a proposal:"
        for one in alone:
            size = median(result.line.tokens for result in one.results)
            known = {
                "too few results": f"{len(one.results)}, and {ENOUGH} are the least",
                "already small": f"{plural(len(one.results), 'result')} of {size:,.0f} tokens (median)",
            }
            uses = [_distances(one)] if one.needs else []
            if one.beside:
                longest = max(need.steps for need in one.beside)
                uses.append(f"{longest} for others in the same message")
            why = known.get(one.why) or f"steps between result and use: {'; '.join(uses)}"
            now = self._now(one.tool)
            notes = [f"now: {_expiry_text(now)}"] if now.after_steps is not None else []
            if one.trial.late:  # results in the same message share the shortest expiry
                notes.append(f"with others in the same message: {_trial_text(one.trial)}")
            yield "; ".join((f"#   {one_line(one.tool)}: {one.why} ({why})", *notes))

    def _now(self, tool: str) -> Expiry:
        known = self.current.tools.get(tool)
        return Expiry() if known is None else known.expire

    @property
    def json(self) -> dict[str, Any]:
        whole = {"agent": self.agent, "cover": self.cover, "confidence": CONFIDENCE}
        counts = {"conversations": self.conversations, "steps": self.steps}
        tokens = {"tokens": self.tokens, "saved": self.saved}
        return {**whole, **counts, **tokens, "tools": list(map(self._json, self.lessons))}

    def _json(self, one: Lesson) -> dict[str, Any]:
        return {
            "tool": one.tool,
            "now": plain_fields(self._now(one.tool)),
            "proposed": None if one.expire is None else plain_fields(one.expire),
            "why": one.why or None,
            "results": len(one.results),
            "errors": sum(result.is_error for result in one.results),
            "median_tokens": median(result.line.tokens for result in one.results),
            "used": one.used,
            "uses": len(one.needs),
            "asked_again": _asked_again(one),
            "had_expired": sum(result.had_expired for result in one.results),
            "steps": _quantiles(one),
            "learned_from": one.trial,
            "not_learned_from": one.unseen,
        }


def _quantiles(one: Lesson) -> dict[str, int]:
    steps, shares = one.steps, {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    return {
        name: steps[min(len(steps) - 1, int(share * len(steps)))] for name, share in shares.items() if steps
    }


def _distances(one: Lesson) -> str:
    return ", ".join(f"{steps} ({name})" for name, steps in _quantiles(one).items())


def _asked_again(one: Lesson) -> int:
    return sum(need.is_asked for need in one.needs)


def _trial_text(trial: Trial) -> str:
    saves = f"saves {trial.saved:,} of {trial.tokens:,} tokens ({_percent(trial.saved, trial.tokens)})"
    if not trial.uses:
        return saves
    missed = f"missing a value: {trial.missed:,} ({_percent(trial.missed, trial.uses)})"
    return f"{saves}; uses: {trial.uses:,}, later than that: {trial.late:,}, {missed}"


def _percent(part: int, whole: int) -> str:
    return f"{part / (whole or 1):.1%}"


def _expiry_text(expire: Expiry) -> str:
    if expire.after_steps is None or expire.mode == "none":
        return "never expires"
    return f"{expire.mode or 'compact'} after {plural(expire.after_steps, 'step')}"


def _key(name: str) -> str:
    """A text in YAML."""
    return name if _PLAIN.fullmatch(name) else dumps(name).decode()
