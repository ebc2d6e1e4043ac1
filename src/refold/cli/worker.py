"""The commands for work that sessions queue: worker, jobs."""

import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refold.cli.format import one_line, plural
from refold.cli.options import Access, Json, argument, flag, option, with_store
from refold.cli.terminal import Cell, complain, emit, say, table
from refold.core.errors import SettingError
from refold.summaries.queue import QueuedJob, WorkerSettings, queue_of

RECENT_S = 3_600.0
"""How long finished jobs are listed by default."""
MAX_PRINTED_JOBS = 100
STYLES = {"queued": "", "running": "yellow", "done": "green", "failed": "red"}


DEFAULTS = WorkerSettings()
SUMMARIZER_HELP = "openai/gpt-4o-mini, or your own as module:function; default: as configured."


@with_store
def worker(
    access: Access,
    concurrency: Annotated[int, option("Jobs at the same time.", "N", min=1)] = DEFAULTS.concurrency,
    name: Annotated[str | None, option("Shown by refold jobs; default: the machine's name.", "NAME")] = None,
    summarizer: Annotated[list[str] | None, option(SUMMARIZER_HELP, "MODEL")] = None,
    attempts: Annotated[int, option("Attempts before a job fails.", "N", min=1)] = DEFAULTS.attempts,
    grace: Annotated[
        float, option("Seconds to finish in after a signal to stop.", "S", min=0)
    ] = DEFAULTS.grace_s,
    once: Annotated[bool, flag("Do the jobs that wait now, then exit.", "--once")] = False,
) -> None:
    """Write summaries and compact for sessions, until it is stopped.

    For agents with `summarizer: {executor: worker}` and a PostgreSQL store. Any number of workers share the
    jobs, on any number of machines; each needs the same configuration as the sessions.
    """
    from refold.session.worker import run

    given = list(map(_summarizer, summarizer or ()))
    settings = WorkerSettings(concurrency=concurrency, attempts=attempts, grace_s=grace, once=once)
    rest: dict[str, Any] = {"config": access.config, "summarizer": given or None, "name": name}
    run(access.given, **rest, settings=settings, log=lambda text: complain(one_line(text)))


def _summarizer(name: str) -> Any:
    """The name of a model, or a function from a module of the user."""
    where = f"--summarizer {name}"
    module, is_own, attribute = name.partition(":")
    if "/" in name:
        return name
    if not is_own:
        raise SettingError(where, "expected openai/MODEL, anthropic/MODEL or module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(where, f"cannot be loaded: {error}") from error
    if not callable(found):
        raise SettingError(where, f"expected a function, got a {type(found).__name__}")
    return found


@with_store
def jobs(
    access: Access,
    action: Annotated[
        Literal["retry", "drop"] | None, argument("Retry a failed job, or drop it.", "ACTION")
    ] = None,
    id: Annotated[int | None, argument("The job to retry or drop.", "ID")] = None,
    failed: Annotated[bool, flag("Only failed jobs.", "--failed")] = False,
    every: Annotated[bool, flag("Jobs finished within a day; default: within an hour.", "--all")] = False,
    json: Json = False,
) -> None:
    """List the jobs of workers: queued, running, done and failed.

    Jobs write summaries ahead of time, or compact. A failed job stays until you retry it
    (refold jobs retry ID) or drop it (refold jobs drop ID).
    """
    if (action is None) != (id is None):
        raise typer.BadParameter("give an action and a job: refold jobs retry ID")
    with access.open() as backend:
        queue = queue_of(backend, f"store {access.shown!r}")
        if action is not None and id is not None:
            if action == "retry":
                queue.retry(id)
            else:
                queue.drop(id)
            if json:
                emit({"did": action, "job": id})
            else:
                say(f"Job {id} is {'queued again' if action == 'retry' else 'dropped'}.")
            return
        found = queue.list_jobs(
            "failed" if failed else None,
            since=0.0 if every else time.time() - RECENT_S,
            limit=None if json else MAX_PRINTED_JOBS + 1,
        )
    if json:
        emit({"store": access.shown, "jobs": found})
    elif found:
        _print_jobs(found)
    else:
        say("No failed jobs." if failed else "No jobs are waiting, and none finished recently.")


def _print_jobs(found: list[QueuedJob]) -> None:
    rows = [_job_cells(job) for job in found[:MAX_PRINTED_JOBS]]
    titles = (">id", "status", "conversation", "view", "what", ">tries", ">age", "worker", "")
    table(titles, rows)
    if len(found) > MAX_PRINTED_JOBS:
        say(f"… these are the newest {MAX_PRINTED_JOBS}; --json has all")
    if many := sum(job.status == "failed" for job in found):
        say(f"{plural(many, 'job')} failed: retry with refold jobs retry ID, or refold jobs drop ID")


def _job_cells(job: QueuedJob) -> list[Cell]:
    now = datetime.now(UTC)
    told = one_line(job.result or "")
    if job.due is not None and job.due > now:
        told = f"retry in {_duration((job.due - now).total_seconds())}: {told}"
    who = job.conversation if job.owner == "default" else f"{job.owner}/{job.conversation}"
    return [
        (str(job.id), ""),
        (job.status, STYLES[job.status]),
        (one_line(who), ""),
        (one_line(job.view), "dim"),
        (job.what, ""),
        (str(job.attempts + (job.status == "running")), ""),
        (_duration((now - job.created).total_seconds()), "dim"),
        (one_line(job.worker or ""), "dim"),
        (told, "red" if job.status == "failed" else ""),
    ]


def _duration(seconds: float) -> str:
    """
    >>> _duration(59), _duration(61), _duration(7300)
    ('59 s', '1 min', '2 h')
    """
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
