"""The command compact: makes a view smaller now, with a model or by rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import typer
from msgspec.structs import asdict

from refold.cli.format import one_line, places, plural, quoted
from refold.cli.log import event_json, event_line
from refold.cli.options import Access, Id, Json, ViewName, flag, option, with_owner
from refold.cli.terminal import at_most, complain, emit, progress, say
from refold.config.config import DEFAULT
from refold.core.errors import RefoldError
from refold.core.event import Called, Replaced, Span
from refold.core.plan import CompactionRequest
from refold.session.results import CompactionResult
from refold.session.session import Session
from refold.summaries.queue import CompactionJob, queue_of

Strategy: TypeAlias = Literal["summarize", "sliding-window", "hierarchical"]
SLIDING_WINDOW = "sliding-window"
"""The strategy that writes no summary."""
MAX_PRINTED_EDITS = 10
INTERRUPTED = 130
SUMMARIZER_HELP = "A model to write the summary, such as openai/gpt-4o-mini; several are tried in order."


@with_owner
def compact(
    access: Access,
    id: Id,
    strategy: Annotated[
        Strategy | None, option(f"{', '.join(get_args(Strategy))}; default: as configured.", "NAME")
    ] = None,
    keep: Annotated[
        int | None, option("Keep the newest N messages; default: as configured.", "N", min=0)
    ] = None,
    target: Annotated[
        int | None, option("Compact until the view has at most this many tokens.", "TOKENS", min=0)
    ] = None,
    focus: Annotated[str, option("What a summary should focus on.", "TEXT")] = "",
    model: Annotated[str | None, option("The model whose window applies.", "M")] = None,
    agent: Annotated[str | None, option("The agent whose settings apply.", "NAME")] = None,
    summarizer: Annotated[list[str] | None, option(SUMMARIZER_HELP, "MODEL")] = None,
    dry_run: Annotated[
        bool, flag("Print what would be done by rule; change nothing, call no model.", "--dry-run")
    ] = False,
    later: Annotated[bool, flag("Queue it for a worker: see `refold jobs`.", "--later")] = False,
    view: ViewName = "main",
    json: Json = False,
) -> None:
    """Compact the view now.

    The oldest messages become a summary, until the newest --keep messages or --target tokens are left. The
    command waits for configured or named models; without one, or if all fail, the summary is made by rule.
    """
    if later and (dry_run or summarizer):
        raise typer.BadParameter("cannot be combined with --dry-run or --summarizer", param_hint="--later")
    options: dict[str, Any] = {"model": model, "agent": agent, "summarizer": summarizer or None}
    with access.session(id, view, **options) as session:
        request = CompactionRequest(strategy or session.settings.compaction.strategy, keep, target, focus)
        for name, given in (("--focus", focus), ("--summarizer", summarizer)):
            if given and request.strategy == SLIDING_WINDOW:
                raise typer.BadParameter(f"{SLIDING_WINDOW} writes no summary", param_hint=name)
        if session.settings.is_off:
            origin = session.config.origin("agents", agent or DEFAULT, "compact")
            raise RefoldError(f"Compaction is off for the agent {agent or DEFAULT!r} (compact, {origin})")
        if later:
            _queue(session, agent, request, json)
            return
        done = _compact(session, request, dry_run)
    if json:
        found = {
            "did": "compact" if done.edits else None,
            "dry_run": dry_run,
            "conversation": id,
            "view": view,
            "strategy": request.strategy,
            "span": done.span,
            "tokens": done.tokens,
            "edits": list(map(event_json, done.edits)),
            "called": list(map(event_json, done.called)),
            "cost": sum((one.cost for one in done.called), 0.0),
        }
        emit({**found, **asdict(done.result)})
    else:
        _print(done, quoted(id), request, dry_run)


def _queue(session: Session, agent: str | None, request: CompactionRequest, json: bool) -> None:
    inspector = session.inspect
    round = inspector.state.round + 1
    job = CompactionJob(
        *session.key, inspector.view_name, round, agent=agent, model=session.model, order=request
    )
    handle = queue_of(session.store, f"store {type(session.store).__name__}").put(job)
    if json:
        emit({"did": "queue" if handle.is_new else None, "job": handle.id})
        return
    waits = "waits" if handle.is_new else "is already queued and waits"
    say(f"Job {handle.id} {waits} for a worker; `refold jobs` shows its progress.")


class Compacted(NamedTuple):
    """What the command did, or would do."""

    result: CompactionResult
    span: Span | None
    """From the first compacted message to the last."""
    tokens: tuple[int, int]
    """Of the view, before and after."""
    edits: list[Replaced]
    called: list[Called]


def _compact(session: Session, request: CompactionRequest, dry_run: bool) -> Compacted:
    inspector = session.inspect
    start = inspector.state.next
    before = inspector.tokens
    with _interruptible(session, start), progress("Compacting") as advance:
        result = session.compact(
            request.strategy,
            keep_recent=request.keep_recent,
            target_tokens=request.target,
            focus=request.focus,
            dry_run=dry_run,
            on_progress=lambda done, of: advance(completed=done, total=of),
        )
    first, end = result.compacted_range
    covered = list(inspector.messages(first, end - first))
    span = Span(covered[0].at, covered[-1].at + 1) if covered else None
    new = [event for event in session.events(start) if getattr(event, "view", "") == inspector.view_name]
    edits = [event for event in new if isinstance(event, Replaced) and event.round]
    called = [event for event in new if isinstance(event, Called)]
    after = before - result.tokens_saved if dry_run else inspector.tokens
    session.close()
    return Compacted(result, span, (before, after), edits, called)


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


def _print(done: Compacted, id: str, request: CompactionRequest, dry_run: bool) -> None:
    """Why a model was not used, the new events as `refold log` prints them, and what came of it."""
    before, after = done.tokens
    for problem in done.result.problems:
        say(one_line(problem))
    for call in done.called:
        if not call.problem:
            say(f"#{call.at} {event_line(call)}")
    if done.span is None:
        say(f"Nothing to compact: nothing in the {plural(before, 'token')} of the view can be made shorter.")
        return
    tokens = f"{before:,} → {after:,} tokens"
    if dry_run:
        what = f"{places(done.span)} would be compacted by rule ({request.strategy})"
        say(f"{what}; the view would have {tokens}. Nothing was changed.")
        return
    for line in at_most([f"#{edit.at} {event_line(edit)}" for edit in done.edits], MAX_PRINTED_EDITS):
        say(line)
    say(f"The view has {tokens} (round {done.result.round:,}). Undo it: refold undo {id} {done.edits[-1].at}")
    if request.target is not None and done.result.missed_by:
        missed = f"The target of {request.target:,} tokens was missed"
        say(f"{missed}: {request.target + done.result.missed_by:,} are left, nothing else can be hidden.")
