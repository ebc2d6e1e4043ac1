"""The command compact: makes a view smaller now, with a model or by rule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import asdict

from refold.cli.format import one_line, places, plural, quoted
from refold.cli.log import event_json
from refold.cli.options import Access, ConfigFile, Id, Json, Owner, StoreUrl, ViewName
from refold.cli.terminal import complain, emit, say, waiting
from refold.config.config import DEFAULT
from refold.core.errors import RefoldError
from refold.core.event import Called, Certificate, Replaced, Span
from refold.core.plan import CompactionRequest
from refold.session.results import CompactionResult
from refold.session.session import STRATEGIES, Session
from refold.summaries.queue import CompactionJob, queue_of

SLIDING_WINDOW = "sliding-window"
"""The strategy that writes no summary."""
MAX_EDITS = 10
"""Edits that are printed one by one."""
INTERRUPTED = 130


def strategy_name(name: str) -> str:
    if name not in STRATEGIES:
        raise typer.BadParameter(f"{name!r} is not a strategy; use one of {', '.join(STRATEGIES)}")
    return name


def compact(
    id: Id,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            parser=strategy_name,
            help=f"{', '.join(STRATEGIES)}; default: as configured.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="N", min=0, help="Keep the newest N messages; default: as configured."
        ),
    ] = None,
    target: Annotated[
        int | None,
        typer.Option(
            "--target", metavar="TOKENS", min=0, help="Compact until the view has at most this many tokens."
        ),
    ] = None,
    focus: Annotated[
        str, typer.Option("--focus", metavar="TEXT", help="What a summary should focus on.")
    ] = "",
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="The model whose window applies.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="The agent whose settings apply.")
    ] = None,
    summarizer: Annotated[
        list[str] | None,
        typer.Option(
            "--summarizer",
            metavar="MODEL",
            help="A model to write the summary, such as openai/gpt-4o-mini; several are tried in order.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be done by rule; change nothing, call no model."),
    ] = False,
    later: Annotated[bool, typer.Option("--later", help="Queue it for a worker: see `refold jobs`.")] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    view: ViewName = "main",
    json: Json = False,
) -> None:
    """Compact the view now.

    The oldest messages become a summary, until the newest --keep messages or --target tokens are left. The
    command waits for configured or named models; without one, or if all fail, the summary is made by rule.
    """
    access = Access.to(store, config, for_settings=True)
    options: dict[str, Any] = {"model": model, "agent": agent, "summarizer": summarizer or None}
    with access.session(id, owner, view, **options) as session:
        request = CompactionRequest(strategy or session.settings.compaction.strategy, keep, target, focus)
        for option, given in (("--focus", focus), ("--summarizer", summarizer)):
            if given and request.strategy == SLIDING_WINDOW:
                raise typer.BadParameter(f"{SLIDING_WINDOW} writes no summary", param_hint=option)
        if session.settings.is_off:
            origin = session.config.origin("agents", agent or DEFAULT, "compact")
            raise RefoldError(f"Compaction is off for the agent {agent or DEFAULT!r} (compact, {origin})")
        if later and (dry_run or summarizer):
            raise typer.BadParameter(
                "cannot be combined with --dry-run or --summarizer", param_hint="--later"
            )
        if later:
            _queue(session, agent, request, json)
            return
        done = _compact(session, request, dry_run)
        if json:
            emit(_json(session, done))
            return
        for problem in done.result.problems:
            say(one_line(problem))
        if done.span is None:
            _say_nothing_to_do(session, done)
        elif dry_run:
            models = summarizer or [
                *session.config.prompts(agent).conversation.models,
                *session.settings.summarizer.models,
            ]
            _say_plan(done, done.span, models)
        else:
            _say_edits(session, done)
        if done.span is not None and target is not None and done.result.missed_by:
            left = target + done.result.missed_by
            say(f"The target of {target:,} tokens was missed: {left:,} are left, nothing else can be hidden.")


def _queue(session: Session, agent: str | None, request: CompactionRequest, json: bool) -> None:
    inspector = session.inspect
    round = inspector.state.round + 1
    job = CompactionJob(
        *session.key, inspector.view_name, round, agent=agent, model=session.model, order=request
    )
    handle = queue_of(session.store, f"store {type(session.store).__name__}").put(job)
    if json:
        emit({"did": "queue" if handle.is_new else None, "job": handle.id})
    elif handle.is_new:
        say(f"Job {handle.id} waits for a worker; `refold jobs` shows its progress.")
    else:
        say(f"Job {handle.id} is already queued and waits for a worker; `refold jobs` shows its progress.")


class Done(NamedTuple):
    """What a compaction did, or would do."""

    request: CompactionRequest
    result: CompactionResult
    span: Span | None
    """From the first compacted message to the last."""
    before: int
    after: int
    """Tokens of the view."""
    edits: Sequence[Replaced] = ()
    called: Sequence[Called] = ()
    is_dry: bool = False

    @property
    def tokens(self) -> str:
        return f"{self.before:,} → {self.after:,} tokens"


def _compact(session: Session, request: CompactionRequest, dry_run: bool) -> Done:
    inspector = session.inspect
    start = inspector.state.next
    before = inspector.tokens
    limits: dict[str, Any] = {"keep_recent": request.keep_recent, "target_tokens": request.target}
    with _interruptible(session, start), waiting("Compacting") as on_progress:
        result = session.compact(
            request.strategy, **limits, focus=request.focus, dry_run=dry_run, on_progress=on_progress
        )
    first, end = result.compacted_range
    span = None
    if first < end:
        (first_message,) = inspector.messages(first, 1)
        (last_message,) = inspector.messages(end - 1, 1)
        span = Span(first_message.at, last_message.at + 1)
    if dry_run:
        return Done(request, result, span, before, before - result.tokens_saved, is_dry=True)
    edits = list[Replaced]()
    called = list[Called]()
    for event in session.events(start):
        if isinstance(event, Called) and event.view == inspector.view_name:
            called.append(event)
        elif isinstance(event, Replaced) and event.view == inspector.view_name and event.round:
            edits.append(event)
    after = inspector.tokens
    session.close()
    return Done(request, result, span, before, after, edits, called)


@contextmanager
def _interruptible(session: Session, start: int) -> Iterator[None]:
    """Ctrl-C cancels the requests to models, and lets other processes compact at once."""
    try:
        yield
    except KeyboardInterrupt as error:
        session.close()
        outcome = "nothing was changed"
        if any(isinstance(event, Replaced) for event in session.events(start)):
            command = f"refold log {quoted(session.conversation)} --after {start - 1}"
            outcome = f"the view was already compacted, see `{command}`"
        complain(f"Interrupted: {outcome}")
        raise typer.Exit(INTERRUPTED) from error


def _json(session: Session, done: Done) -> dict[str, Any]:
    return {
        "did": "compact" if done.edits else None,
        "dry_run": done.is_dry,
        "conversation": session.conversation,
        "view": session.inspect.view_name,
        "strategy": done.request.strategy,
        "span": done.span,
        "tokens": {"before": done.before, "after": done.after},
        **asdict(done.result),
        "edits": list(map(event_json, done.edits)),
        "called": list(map(event_json, done.called)),
        "cost": sum((one.cost for one in done.called), 0.0),
    }


def _say_nothing_to_do(session: Session, done: Done) -> None:
    target = done.request.target
    why = "nothing in it can be made shorter"
    if target is not None and done.before <= target:
        why = f"the target is {target:,}"
    view = f"the view of {one_line(session.conversation)} has {plural(done.before, 'token')}"
    say(f"Nothing to compact: {view}, and {why}{_usage(done.called)}.")


def _say_plan(done: Done, span: Span, models: Sequence[str]) -> None:
    first, end = done.result.compacted_range
    what = f"{places(span)}, {plural(end - first, 'message')}, would be compacted by rule"
    say(f"{what} ({done.request.strategy}); the view would have {done.tokens}. Nothing was changed.")
    if models and done.request.strategy != SLIDING_WINDOW:
        say(f"Without --dry-run, {' or '.join(map(one_line, models))} is asked for a summary.")


def _say_edits(session: Session, done: Done) -> None:
    id = quoted(session.conversation)
    for edit in done.edits[:MAX_EDITS]:
        recorded = session.inspect.recorded_in(edit.span).messages
        kept = sum(isinstance(one, int) for one in edit.shown)
        before, after = edit.tokens
        what = (
            f"#{edit.at} {one_line(edit.kind)} of {places(edit.span)}: {plural(recorded - kept, 'message')}"
        )
        say(f"{what}, {before:,} → {after:,} tokens{_author(edit.certificate)}")
    if left := done.edits[MAX_EDITS:]:
        say(f"… and {plural(len(left), 'edit')} more: refold log {id} --after {left[0].at - 1}")
    has_model_summary = any(edit.certificate and edit.certificate.model for edit in done.edits)
    if not done.result.problems and done.called and not has_model_summary:
        say("The model's summary was not used: it was not shorter, or the view had changed meanwhile.")
    say(f"The view has {done.tokens} (round {done.result.round:,}){_usage(done.called)}.")
    if len(done.edits) == 1:
        say(f"Undo it: refold undo {id} {done.edits[0].at}")
    else:
        say(f"Undo one: refold undo {id} AT, such as {done.edits[-1].at}")


def _author(certificate: Certificate | None) -> str:
    """Who wrote a summary, and what the check changed."""
    if certificate is None:
        return ""
    if certificate.model is None:
        return ", by rule"
    cached = ", cached" if certificate.was_cached else ""
    kept = plural(certificate.kept, "sentence")
    added = len(certificate.appended)
    entries = f"{added:,} entry" if added == 1 else f"{added:,} entries"
    checked = f"{kept} kept, {len(certificate.struck):,} struck, {entries} appended by rule"
    return f", by {one_line(certificate.model)}{cached}: {checked}"


def _usage(called: Sequence[Called]) -> str:
    if not called:
        return ""
    used = f"; it took {plural(sum(event.calls for event in called), 'call')}"
    usages = [event.usage for event in called if event.usage]
    if usages:
        used += f", {sum(one.input for one in usages):,} in, {sum(one.output for one in usages):,} out"
    cost = sum(event.cost for event in called)
    return f"{used}, ${cost:.4f}" if cost else used
