"""The command learn: proposes when tool results expire, from how long they were used."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Annotated, Any

from refold.cli.format import one_line, plural
from refold.cli.options import Access, Json, OutFile, argument, ids, option, reporting_damage, with_owner
from refold.cli.terminal import complain, emit, progress, say, writing
from refold.config.config import DEFAULT, with_database
from refold.config.validate import plain_fields
from refold.core import codec
from refold.core.errors import CorruptError, NotFoundError, SettingError
from refold.core.event import Expiry
from refold.policies.learn_expiry import CONFIDENCE, ENOUGH, Lesson, Trial, propose, wanted
from refold.policies.usage import UsageHistory, past
from refold.session.inspect import parse
from refold.session.meter import Meter
from refold.stores.store import ConversationInfo, Store

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
COVER_HELP = "The share of later uses that must still find the result."


@with_owner
def learn(
    access: Access,
    conversations: Annotated[
        list[str] | None, argument("Only these conversations; default: all.", "[ID]...", autocompletion=ids)
    ] = None,
    agent: Annotated[str | None, option("The agent to propose settings for.", "NAME")] = None,
    cover: Annotated[float, option(COVER_HELP, "SHARE", min=0.5, max=0.999)] = 0.99,
    out: OutFile = None,
    json: Json = False,
) -> None:
    """Propose when tool results expire, from how long they were used.

    Prints settings as YAML, with the evidence: a later step uses a result if it takes an exact value from it,
    or asks for it again. Nothing is changed.
    """
    if out is not None and out.exists():
        raise SettingError("--out", f"{one_line(str(out))} already exists; name another file")
    name = agent or DEFAULT
    with access.open() as backend:
        settings = with_database(access.config, backend)
        # Without configured agents, any name is allowed.
        current = settings.agent(agent if agent != DEFAULT and settings.agents else None)
        keys = {access.existing(backend, id) for id in conversations or ()}
        rows = sorted(
            row for row in backend.conversations(access.owner) if row.key in keys or not conversations
        )
        pasts = _pasts(backend, rows, Meter(None, settings, current.model, current.counter))
    if not any(one.results for one in pasts):
        raise NotFoundError(
            f"There is nothing to learn from in {access.shown}: owner {access.owner!r} has"
            f" {plural(len(pasts), 'conversation')} without tool results. `refold import FILE` adds some"
        )
    lessons = propose(pasts, cover)
    now = {tool: own.expire for tool, own in current.tools.items()}
    proposed = sum(one.expire is not None for one in lessons)
    title = f"Settings for {proposed} of {plural(len(lessons), 'tool')}"
    yaml = "\n".join([*_heading(title, pasts, lessons, cover), *_yaml(name, lessons, now)])
    if out is not None:
        with writing(out) as file:
            file.write(f"{yaml}\n".encode("utf-8", "backslashreplace"))
    if json:
        found = {
            "agent": name,
            "cover": cover,
            "confidence": CONFIDENCE,
            "conversations": len(pasts),
            "steps": sum(one.steps for one in pasts),
            "tokens": sum(one.tokens for one in pasts),
            "saved": sum(one.trial.saved for one in lessons),
            "tools": [_json(one, now.get(one.tool)) for one in lessons],
        }
        emit({"store": access.shown, "file": out and str(out), **found})
    elif out is None:
        say(yaml)
    else:
        say(f"{title}: see {one_line(str(out))}")


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


def _json(one: Lesson, now: Expiry | None) -> dict[str, Any]:
    """How one tool's results were used, and what is proposed for them."""
    return {
        "tool": one.tool,
        "now": {} if now is None else plain_fields(now),
        "proposed": None if one.expire is None else plain_fields(one.expire),
        "why": one.why or None,
        "results": len(one.results),
        "errors": _errors(one),
        "median_tokens": _median_tokens(one),
        "used": one.used,
        "uses": len(one.needs),
        "asked_again": sum(need.is_asked for need in one.needs),
        "had_expired": sum(result.had_expired for result in one.results),
        "steps": _quantiles(one.steps),
        "learned_from": one.trial,
        "not_learned_from": one.unseen,
    }


def _errors(one: Lesson) -> int:
    return sum(result.is_error for result in one.results)


def _median_tokens(one: Lesson) -> float:
    return median(result.line.tokens for result in one.results)


def _quantiles(steps: Sequence[int]) -> dict[str, int]:
    last = len(steps) - 1
    return {name: steps[min(last, int(share * len(steps)))] for name, share in QUANTILES.items() if steps}


# The settings, with the evidence as comments


def _heading(
    title: str, pasts: Sequence[UsageHistory], lessons: Sequence[Lesson], cover: float
) -> Iterator[str]:
    read = f"{plural(len(pasts), 'conversation')} with {plural(sum(one.steps for one in pasts), 'step')}"
    yield f"# {title}, learned from {read}."
    saved = sum(one.trial.saved for one in lessons)
    tokens = sum(one.tokens for one in pasts)
    share = f"{saved:,} of {tokens:,} tokens ({_percent(saved, tokens)})"
    yield f"# They would have saved {share} there. They keep results"
    few = f"with a margin for tools with fewer than {wanted(cover)} uses"
    yield f"# for {cover:.1%} of later uses, at a confidence of {CONFIDENCE:.0%}, {few}."


def _yaml(agent: str, lessons: Sequence[Lesson], now: dict[str, Expiry]) -> Iterator[str]:
    from yaml import safe_dump

    proposed: dict[str, Any] = {}
    for one in lessons:
        tool = one_line(one.tool)
        if one.why == "too few results":
            yield f"# {tool}: {one.why} ({len(one.results)}, and {ENOUGH} are the least)"
            continue
        yield f"# {tool}: {one.why}".removesuffix(" ")
        yield from (f"#   {line}" for line in _evidence(one, now.get(one.tool)))
        if one.expire is not None:
            proposed[one.tool] = {"expire": plain_fields(one.expire)}
    agents = {agent: {"tools": proposed}} if proposed else {}
    yield safe_dump({"agents": agents}, default_flow_style=None, sort_keys=False, width=1_000).strip()


def _evidence(one: Lesson, now: Expiry | None) -> Iterator[str]:
    some = f", {plural(_errors(one), 'error')} among them" if _errors(one) else ""
    used = f"{one.used:,} of them used later, in {plural(len(one.needs), 'step')}"
    yield f"{plural(len(one.results), 'result')} of {_median_tokens(one):,.0f} tokens (median){some}; {used}"
    if one.needs:
        distances = [f"{steps} ({name})" for name, steps in _quantiles(one.steps).items()]
        yield f"steps between result and use: {', '.join(distances)}"
    if one.expire is None:
        yield f"now: {_expiry_text(now)}"
        return
    yield f"replayed: {_trial_text(one.trial)}"
    yield f"held out: {_trial_text(one.unseen) if one.unseen else 'too few conversations to tell'}"
    yield f"now: {_expiry_text(now)} → {_expiry_text(one.expire)}"


def _trial_text(trial: Trial) -> str:
    saves = f"saves {trial.saved:,} of {trial.tokens:,} tokens ({_percent(trial.saved, trial.tokens)})"
    if not trial.uses:
        return saves
    missed = f"missing a value: {trial.missed:,} ({_percent(trial.missed, trial.uses)})"
    return f"{saves}; uses: {trial.uses:,}, later than that: {trial.late:,}, {missed}"


def _percent(part: int, whole: int) -> str:
    return f"{part / (whole or 1):.1%}"


def _expiry_text(expire: Expiry | None) -> str:
    if expire is None or expire.after_steps is None or expire.mode == "none":
        return "never expires"
    return f"{expire.mode or 'compact'} after {plural(expire.after_steps, 'step')}"
