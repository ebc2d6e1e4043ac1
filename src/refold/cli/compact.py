"""The command that makes a view smaller on demand, with a model or by rule: compact."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from refold.cli.log import event_json
from refold.cli.options import Access, ConfigFile, Id, Json, Owner, StoreUrl, ViewName
from refold.cli.terminal import complain, emit, say, waiting
from refold.cli.words import one_line, places, plural, quoted
from refold.config.config import DEFAULT
from refold.core.errors import RefoldError
from refold.core.event import Called, Certificate, Replaced, Span
from refold.core.plan import CompactionRequest
from refold.session.results import CompactionResult
from refold.session.session import STRATEGIES, Session
from refold.summaries.queue import CompactionJob, queue_of

WINDOW = "sliding-window"
"""The strategy that writes nothing."""
MOST_EDITS = 10
"""Edits told one by one to people."""
INTERRUPTED = 130


def known_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise typer.BadParameter(f"{name!r} is not known; known are {', '.join(STRATEGIES)}")
    return name


def compact(
    id: Id,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            parser=known_strategy,
            help=f"{', '.join(STRATEGIES)}; else the configured one.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="N", min=0, help="The newest messages, which stay; else as configured."
        ),
    ] = None,
    target: Annotated[
        int | None,
        typer.Option("--target", metavar="TOKENS", min=0, help="Down to this, by whatever it takes."),
    ] = None,
    focus: Annotated[
        str, typer.Option("--focus", metavar="TEXT", help="What a summary should tell most about.")
    ] = "",
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Whose window must not be exceeded.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Whose settings to use.")
    ] = None,
    summarizer: Annotated[
        list[str] | None,
        typer.Option(
            "--summarizer",
            metavar="MODEL",
            help="Who writes, such as openai/gpt-4o-mini; several are tried in order. Else the configured.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done by rule; change nothing, ask nobody.")
    ] = False,
    later: Annotated[bool, typer.Option("--later", help="Leave it to a worker: see `refold jobs`.")] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    view: ViewName = "main",
    json: Json = False,
) -> None:
    """Make the view smaller now.

    The oldest messages become a summary, down to the newest --keep or to --target tokens. Models that are
    configured or named are waited for; without any, or where none is of use, the summary is made by rule.
    """
    access = Access.to(store, config, for_settings=True)
    opening: dict[str, Any] = {"model": model, "agent": agent, "summarizer": summarizer or None}
    with access.session(id, owner, view, **opening) as session:
        chosen = strategy or session.settings.compaction.strategy
        _demand_use(session, chosen, agent, focus, summarizer)
        order: dict[str, Any] = {"keep_recent": keep, "target_tokens": target, "focus": focus}
        if later:
            if dry_run or summarizer:
                raise typer.BadParameter(
                    "it is up to the worker who is asked, and done", param_hint="--later"
                )
            _leave(session, agent, CompactionRequest(chosen, keep, target, focus), json)
            return
        if dry_run:
            before = session.record.live.tokens
            result = session.compact(chosen, **order, dry_run=True)
            done = Done(session, chosen, result, before, before - result.tokens_saved, is_dry=True)
        else:
            done = _compacted(session, chosen, order)
        if json:
            emit(_json(done))
        else:
            _tell(done, target, summarizer)


def _leave(session: Session, agent: str | None, order: CompactionRequest, json: bool) -> None:
    """Hands it to whoever works in the store's database."""
    round = session.record.live.state.round + 1
    names: dict[str, Any] = {"agent": agent, "model": session.model}
    errand = CompactionJob(*session.key, session.record.view, round, **names, order=order)
    ticket = queue_of(session.store, f"store {type(session.store).__name__}").put(errand)
    if json:
        emit({"did": "queue" if ticket.is_new else None, "job": ticket.id})
    else:
        is_there = "" if ticket.is_new else " is in the queue already: it"
        say(f"Job {ticket.id}{is_there} waits for a worker; refold jobs shows what becomes of it.")


def _demand_use(
    session: Session, strategy: str, agent: str | None, focus: str, summarizer: list[str] | None
) -> None:
    for option, given in (("--focus", focus), ("--summarizer", summarizer)):
        if given and strategy == WINDOW:
            raise typer.BadParameter(f"{WINDOW} hides messages and writes no summary", param_hint=option)
    if session.settings.is_off:
        origin = session.config.origin("agents", agent or DEFAULT, "compact")
        raise RefoldError(f"Compaction is off for the agent {agent or DEFAULT!r} (compact, {origin})")


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it, or would."""

    session: Session
    strategy: str
    result: CompactionResult
    before: int
    after: int
    """Tokens of the view."""
    edits: Sequence[Replaced] = ()
    called: Sequence[Called] = ()
    problems: Sequence[str] = ()
    """Why models were done without."""
    is_dry: bool = False

    @property
    def span(self) -> Span | None:
        """The places of the messages, from the first to the last."""
        first, end = self.result.compacted_range
        record = self.session.record
        ends = [record.said_from(record.place_of(index)) for index in (first, end - 1)] if first < end else []
        found = [said.at for said in ends if said is not None]
        return Span(found[0], found[-1] + 1) if found else None


def _compacted(session: Session, strategy: str, order: dict[str, Any]) -> Done:
    start, before = session.record.live.state.next, session.record.live.tokens
    with _interruptible(session, start), waiting("Compacting") as tell:
        summaries = session.reducer.summaries
        if summaries is not None:
            summaries.context.progress = tell
        result = session.compact(strategy, **order)
    events = [event for event in session.events(start) if isinstance(event, Replaced | Called)]
    mine = [event for event in events if event.view == session.record.view]
    edits = [event for event in mine if isinstance(event, Replaced) and event.round]
    called = [event for event in mine if isinstance(event, Called)]
    after = session.record.live.tokens
    session.close()
    return Done(
        session, strategy, result, before, after, edits, called, summaries.problems if summaries else ()
    )


@contextmanager
def _interruptible(session: Session, start: int) -> Iterator[None]:
    """Ctrl-C ends the wait: who was asked is no longer, and others may compact at once."""
    try:
        yield
    except KeyboardInterrupt as error:
        session.close()
        edits = [event for event in session.events(start) if isinstance(event, Replaced)]
        seen = f"see `refold log {quoted(session.conversation)} --after {start - 1}`"
        complain(f"Interrupted: {f'it was done already, {seen}' if edits else 'nothing was changed'}")
        raise typer.Exit(INTERRUPTED) from error


# What is told


def _json(done: Done) -> dict[str, Any]:
    session = done.session
    return {
        "did": "compact" if done.edits else None,
        "dry_run": done.is_dry,
        "conversation": session.conversation,
        "view": session.record.view,
        "strategy": done.strategy,
        "span": done.span,
        "tokens": {"before": done.before, "after": done.after},
        **asdict(done.result),
        "edits": list(map(event_json, done.edits)),
        "called": list(map(event_json, done.called)),
        "cost": sum((one.cost for one in done.called), 0.0),
        "problems": done.problems,
    }


def _tell(done: Done, target: int | None, summarizer: list[str] | None) -> None:
    for problem in done.problems:
        say(one_line(problem))
    if done.span is None:
        _tell_nothing(done, target)
        return
    if done.is_dry:
        _tell_plan(done, done.span, summarizer)
    else:
        _tell_edits(done)
    if target is not None and done.result.missed_by:
        left = target + done.result.missed_by
        say(f"The target of {target:,} tokens was missed: {left:,} are left, and nothing else can be hidden.")


def _tell_nothing(done: Done, target: int | None) -> None:
    fits = target is not None and done.before <= target
    why = f"{target:,} were wanted" if fits else "there is nothing that this would make shorter"
    view = f"the view of {one_line(done.session.conversation)} has {plural(done.before, 'token')}"
    say(f"Nothing to compact: {view}, and {why}{_took(done.called)}.")


def _tell_plan(done: Done, span: Span, summarizer: list[str] | None) -> None:
    first, end = done.result.compacted_range
    change = f"{done.before:,} → {done.after:,} tokens"
    what = f"{places(span)}, {plural(end - first, 'message')}, would be compacted by rule ({done.strategy})"
    say(f"{what}; the view would have {change}. Nothing was changed.")
    summaries = done.session.reducer.summaries
    if summaries is not None and done.strategy != WINDOW:
        set_up = (*summaries.context.prompts.conversation.models, *summaries.context.settings.models)
        if asked := " or ".join(map(one_line, summarizer or set_up)):
            say(f"Without --dry-run, {asked} is asked for a summary.")


def _tell_edits(done: Done) -> None:
    id, edits = quoted(done.session.conversation), done.edits
    for edit in edits[:MOST_EDITS]:
        before, after = edit.tokens
        what = f"#{edit.at} {one_line(edit.kind)} of {places(edit.span)}: {_messages(done.session, edit)}"
        say(f"{what}, {before:,} → {after:,} tokens{_by(edit.certificate)}")
    if left := edits[MOST_EDITS:]:
        say(f"… and {plural(len(left), 'edit')} more: refold log {id} --after {left[0].at - 1}")
    if not done.problems and done.called and not any(_model(edit) for edit in edits):
        say("What the model wrote could not be used: it was not shorter, or the view had changed meanwhile.")
    round = f"round {done.result.round:,}"
    say(f"The view has {done.before:,} → {done.after:,} tokens ({round}){_took(done.called)}.")
    if len(edits) == 1:
        say(f"Take it back: refold undo {id} {edits[0].at}")
    else:
        say(f"Take one back: refold undo {id} AT, such as {edits[-1].at}")


def _messages(session: Session, edit: Replaced) -> str:
    """How many are no longer shown as they were."""
    record = session.record
    said = record.index_from(edit.span.end) - record.index_from(edit.span.start)
    return plural(said - sum(isinstance(one, int) for one in edit.shown), "message")


def _model(edit: Replaced) -> str | None:
    return edit.certificate.model if edit.certificate else None


def _by(certificate: Certificate | None) -> str:
    """Who wrote it, and what was done to it."""
    if certificate is None:
        return ""
    if certificate.model is None:
        return ", by rule"
    kept, struck = plural(certificate.kept, "sentence"), f"{len(certificate.struck):,} struck"
    added = f"{(n := len(certificate.appended)):,} {'entry' if n == 1 else 'entries'}"
    cached = ", as written before for the same messages" if certificate.was_cached else ""
    return f", by {one_line(certificate.model)}{cached}: {kept} kept, {struck}, {added} appended by rule"


def _took(called: Sequence[Called]) -> str:
    if not called:
        return ""
    used = [event.usage for event in called if event.usage]
    tokens = (
        f", {sum(one.input for one in used):,} in, {sum(one.output for one in used):,} out" if used else ""
    )
    cost = sum(event.cost for event in called)
    return f"; it took {plural(sum(event.calls for event in called), 'call')}{tokens}" + (
        f", ${cost:.4f}" if cost else ""
    )
