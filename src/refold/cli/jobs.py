"""The command that looks at what workers do, did and could not do: jobs."""

import time
from typing import Annotated, Any

import typer

from refold.cli.options import Access, ConfigFile, Json, StoreUrl
from refold.cli.terminal import Cell, Columns, complain, console, emit, fitting, say
from refold.cli.words import iso, one_line, plural
from refold.summaries.queue import STATUSES, JobQueue, QueuedJob, Status, queue_of

RECENT_S = 3_600.0
"""How long what is done is shown unasked."""
MOST = 100
"""Jobs that are told one by one to people."""
ACTIONS = ("retry", "drop")
STYLES = {"queued": "", "running": "yellow", "done": "green", "failed": "red"}


def jobs(
    action: Annotated[
        str | None,
        typer.Argument(metavar="retry|drop", help="Try one that failed again, or forget it."),
    ] = None,
    id: Annotated[
        int | None, typer.Argument(metavar="ID", help="Which one to retry or drop.", show_default=False)
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="All that were done within a day; else within an hour.")
    ] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """What workers are handed, and what came of it.

    Summaries that are to be written ahead, and compactions: queued, running, done and failed.
    What failed stays here until it is tried again (refold jobs retry ID) or dropped (refold jobs drop ID).
    """
    if action not in (None, *ACTIONS):
        raise typer.BadParameter(f"{action!r} is not known; known are {' and '.join(ACTIONS)}")
    if (action is None) != (id is None):
        raise typer.BadParameter("say which: refold jobs retry ID")
    access = Access.to(store, config)
    with access.open() as backend:
        queue = queue_of(backend, f"store {access.shown!r}")
        if action is not None and id is not None:
            _act(queue, action, id, json)
            return
        wanted: tuple[Status, ...] = ("failed",) if failed else tuple(STATUSES)
        since = 0.0 if every or failed else time.time() - RECENT_S
        found = queue.list_jobs(wanted, None if json else MOST + 1, since, complain)
    if json:
        emit({"store": access.shown, "jobs": list(map(_json, found))})
    elif found:
        _print(found)
    else:
        say("No job has failed." if failed else "No jobs: nothing waits, and nothing was done of late.")


def _act(queue: JobQueue, action: str, id: int, json: bool) -> None:
    (queue.retry if action == "retry" else queue.drop)(id)
    if json:
        emit({"did": action, "job": id})
    else:
        say(f"Job {id} waits for a worker again." if action == "retry" else f"Job {id} is dropped.")


def _json(job: QueuedJob) -> dict[str, Any]:
    errand = job.job
    return {
        "id": job.id,
        "status": job.status,
        "owner": errand.owner,
        "conversation": errand.conversation,
        "view": errand.view,
        "agent": errand.agent,
        "what": _what(job),
        "attempts": job.attempts,
        "created": iso(job.created),
        "changed": iso(job.changed),
        "due": None if job.due is None else iso(job.due),
        "worker": job.worker,
        "told": job.result,
    }


def _what(job: QueuedJob) -> str:
    return "write ahead" if job.job.order is None else "compact"


def _print(found: list[QueuedJob]) -> None:
    now = time.time()
    rows = [_row(job, now) for job in found[:MOST]]
    titles = (">id", "status", "conversation", "view", "what", ">tries", ">age", "worker", "")
    table = Columns(*fitting(titles, rows, most=max(12, console().width // 6)))
    table.head()
    for row in rows:
        table.line(*row)
    if len(found) > MOST:
        say(f"… and older ones: the newest {MOST} are shown; --json has all")
    if many := sum(job.status == "failed" for job in found):
        tip = "refold jobs retry ID tries one again, refold jobs drop ID forgets it"
        say(f"{plural(many, 'job')} failed: {tip}")


def _row(job: QueuedJob, now: float) -> list[Cell]:
    errand = job.job
    told = one_line(job.result or "")
    if job.due is not None and job.due > now:
        told = f"again in {_span(job.due - now)}: {told}"
    who = errand.conversation if errand.owner == "default" else f"{errand.owner}/{errand.conversation}"
    return [
        (str(job.id), ""),
        (job.status, STYLES[job.status]),
        (one_line(who), ""),
        (one_line(errand.view), "dim"),
        (_what(job), ""),
        (str(job.attempts + (job.status == "running")), ""),
        (_span(now - job.created), "dim"),
        (one_line(job.worker or ""), "dim"),
        (told, "red" if job.status == "failed" else ""),
    ]


def _span(seconds: float) -> str:
    """
    >>> _span(59), _span(61), _span(7300)
    ('59 s', '1 min', '2 h')
    """
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
