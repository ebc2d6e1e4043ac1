"""The command learn: proposes when tool results expire, from how long they were used."""

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Annotated, Any

import msgspec
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
from refold.cli.terminal import complain, emit, progress, say, writing
from refold.config.config import DEFAULT, AgentSettings, with_database
from refold.config.validate import plain_fields
from refold.core import codec
from refold.core.codec import dumps
from refold.core.errors import CorruptError, NotFoundError, SettingError
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
        # Without configured agents, any name is allowed.
        current = settings.agent(agent if agent != DEFAULT and settings.agents else None)
        keys = {existing(backend, access.shown, Key(owner, name)) for name in conversations or ()}
        rows = sorted(row for row in backend.conversations(owner) if row.key in keys or not conversations)
        pasts = _pasts(backend, rows, Meter(None, settings, current.model, current.counter))
    if not any(one.results for one in pasts):
        raise NotFoundError(
            f"There is nothing to learn from in {access.shown}: owner {owner!r} has"
            f" {plural(len(pasts), 'conversation')} without tool results. `refold import FILE` adds some"
        )
    proposal = _proposal(agent or DEFAULT, cover, current, pasts, propose(pasts, cover))
    yaml = "\n".join(_yaml(proposal))
    if out is not None:
        with writing(out) as file:
            file.write(f"{yaml}\n".encode("utf-8", "backslashreplace"))
    if json:
        emit({"store": access.shown, "file": out and str(out), **msgspec.structs.asdict(proposal)})
    elif out is None:
        say(yaml)
    else:
        say(f"{proposal.title}: see {one_line(str(out))}")


def _pasts(store: Store, rows: Sequence[ConversationInfo], meter: Meter) -> list[UsageHistory]:
    """The history of each conversation that can be read. Events that forks share count once."""
    found = list[UsageHistory]()
    keys = {row.key for row in rows}
    with progress("Reading", len(rows)) as advance:
        for row in rows:
            try:
                with reporting_damage(row.key.conversation):
                    events = [codec.decode(link.entry, parse) for link in store.read(row.key)]
                    since = row.fork_at if row.parent in keys else 0
                    found.append(past(events, meter.counter.message, since))
            except CorruptError as error:
                complain(f"{row.key.conversation} is skipped: {error}")
            advance(1)
    return found


class ToolProposal(msgspec.Struct, frozen=True):
    """How one tool's results were used, and what is proposed for them."""

    tool: str
    now: dict[str, Any]
    proposed: dict[str, Any] | None
    why: str | None
    """Why nothing is proposed."""
    results: int
    errors: int
    median_tokens: float
    used: int
    uses: int
    asked_again: int
    had_expired: int
    steps: dict[str, int]
    """Steps between a result and its use: quantiles."""
    learned_from: Trial
    not_learned_from: Trial | None


class Proposal(msgspec.Struct, frozen=True):
    """Proposed settings of an agent, and the conversations that they were learned from."""

    agent: str
    cover: float
    confidence: float
    conversations: int
    steps: int
    tokens: int
    saved: int
    tools: list[ToolProposal]

    @property
    def title(self) -> str:
        proposed = sum(one.proposed is not None for one in self.tools)
        return f"Settings for {proposed} of {plural(len(self.tools), 'tool')}"


def _proposal(
    agent: str, cover: float, current: AgentSettings, pasts: Sequence[UsageHistory], lessons: Sequence[Lesson]
) -> Proposal:
    return Proposal(
        agent=agent,
        cover=cover,
        confidence=CONFIDENCE,
        conversations=len(pasts),
        steps=sum(one.steps for one in pasts),
        tokens=sum(one.tokens for one in pasts),
        saved=sum(one.trial.saved for one in lessons),
        tools=[_tool_proposal(one, current) for one in lessons],
    )


def _tool_proposal(one: Lesson, current: AgentSettings) -> ToolProposal:
    known = current.tools.get(one.tool)
    return ToolProposal(
        tool=one.tool,
        now={} if known is None else plain_fields(known.expire),
        proposed=None if one.expire is None else plain_fields(one.expire),
        why=one.why or None,
        results=len(one.results),
        errors=sum(result.is_error for result in one.results),
        median_tokens=median(result.line.tokens for result in one.results),
        used=one.used,
        uses=len(one.needs),
        asked_again=sum(need.is_asked for need in one.needs),
        had_expired=sum(result.had_expired for result in one.results),
        steps=_quantiles(one.steps),
        learned_from=one.trial,
        not_learned_from=one.unseen,
    )


def _quantiles(steps: Sequence[int]) -> dict[str, int]:
    if not steps:
        return {}
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    return {name: steps[min(len(steps) - 1, int(share * len(steps)))] for name, share in shares.items()}


def _yaml(made: Proposal) -> Iterator[str]:
    """The lines of the settings, with the evidence as comments."""
    read = f"{plural(made.conversations, 'conversation')} with {plural(made.steps, 'step')}"
    yield f"# {made.title}, learned from {read}."
    saved = f"{made.saved:,} of {made.tokens:,} tokens ({_percent(made.saved, made.tokens)})"
    yield f"# They would have saved {saved} there. They keep results"
    few = f"with a margin for tools with fewer than {wanted(made.cover)} uses"
    yield f"# for {made.cover:.1%} of later uses, at a confidence of {CONFIDENCE:.0%}, {few}."
    proposed = [one for one in made.tools if one.proposed is not None]
    if proposed:
        yield from ("agents:", f"  {_key(made.agent)}:", "    tools:")
    else:
        yield "agents: {}"
    for one in proposed:
        yield from (f"      # {line}" for line in _evidence(one))
        fields = ", ".join(f"{name}: {value}" for name, value in (one.proposed or {}).items())
        yield from (f"      {_key(one.tool)}:", f"        expire: {{{fields}}}")
    left_alone = [one for one in made.tools if one.proposed is None]
    if left_alone:
        yield "# Without a proposal:"
    for one in left_alone:
        reason = f"{plural(one.results, 'result')} of {one.median_tokens:,.0f} tokens (median)"
        if one.uses and one.why == "needed for long":
            reason = f"steps between result and use: {_distances(one)}"
        if one.why == "too few results":
            reason = f"{one.results}, and {ENOUGH} are the least"
        now = f"; now: {_expiry_text(one.now)}" if one.now else ""
        yield f"#   {one_line(one.tool)}: {one.why} ({reason}){now}"


def _evidence(one: ToolProposal) -> Iterator[str]:
    some = f", {plural(one.errors, 'error')} among them" if one.errors else ""
    used = f"{one.used:,} of them used later, in {plural(one.uses, 'step')}"
    yield f"{plural(one.results, 'result')} of {one.median_tokens:,.0f} tokens (median){some}; {used}"
    if one.uses:
        yield f"steps between result and use: {_distances(one)}"
    if one.had_expired or one.asked_again:
        asked = f"asked for again {plural(one.asked_again, 'time')}"
        yield f"{one.had_expired:,} had expired in the record; {asked}"
    yield f"replayed: {_trial_text(one.learned_from)}"
    unseen = one.not_learned_from
    yield f"held out: {'too few conversations to tell' if unseen is None else _trial_text(unseen)}"
    yield f"now: {_expiry_text(one.now)} → {_expiry_text(one.proposed or {})}"


def _distances(one: ToolProposal) -> str:
    return ", ".join(f"{steps} ({name})" for name, steps in one.steps.items())


def _trial_text(trial: Trial) -> str:
    saves = f"saves {trial.saved:,} of {trial.tokens:,} tokens ({_percent(trial.saved, trial.tokens)})"
    if not trial.uses:
        return saves
    missed = f"missing a value: {trial.missed:,} ({_percent(trial.missed, trial.uses)})"
    return f"{saves}; uses: {trial.uses:,}, later than that: {trial.late:,}, {missed}"


def _percent(part: int, whole: int) -> str:
    return f"{part / (whole or 1):.1%}"


def _expiry_text(expire: dict[str, Any]) -> str:
    mode = expire.get("mode", "compact")
    if "after_steps" not in expire or mode == "none":
        return "never expires"
    return f"{mode} after {plural(expire['after_steps'], 'step')}"


def _key(name: str) -> str:
    """A text in YAML."""
    return name if _PLAIN.fullmatch(name) else dumps(name).decode()
