"""The worker: compacts for sessions of other processes, which put jobs into a queue."""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from refold.config.config import Config, Source, load_config
from refold.core.errors import ConflictError, SettingError
from refold.core.plan import Policy
from refold.session.ahead import start_summaries
from refold.session.compaction import compact_for_worker
from refold.session.session import Session
from refold.stores.store import Store, open_store
from refold.stores.url import shown_url
from refold.summaries.prepare import summarizers_of
from refold.summaries.queue import CompactionJob, Log, PermanentFailure, RetryLater, WorkerSettings, queue_of

_LOG = logging.getLogger("refold.worker")


def run(
    store: str,
    *,
    config: Source = None,
    summarizer: Any = None,
    policies: Sequence[Policy] = (),
    name: str | None = None,
    settings: WorkerSettings | None = None,
    log: Log = _LOG.info,
) -> None:
    """Runs jobs until SIGTERM or SIGINT. `log` is called with a line about each job.

    `config`, `summarizer` and `policies` must be those of the sessions that put the jobs into the queue.

    Raises:
        SettingError: the store is not PostgreSQL, procrastinate is not installed, or the summarizer or a
            prompt of any agent cannot be used.
        StoreError: the store cannot be used.
    """
    loaded = load_config(config)
    settings = settings or WorkerSettings()
    summarizers_of(summarizer, {})  # those of all agents are checked before the first job
    for agent in (None, *loaded.agents):
        own = loaded.agent(agent).summarizer
        summarizers_of([*loaded.prompts(agent).conversation.models, *own.models], own.base_urls)
    opened = open_store(store)
    try:
        queue = queue_of(opened)
        queue.create_tables()
        from refold.summaries.worker_loop import WorkerLoop  # queue_of has checked that it can be imported

        work = partial(run_job, opened, loaded, summarizer, policies)
        if not settings.once:
            log(f"working for {shown_url(store)}, {settings.concurrency} at a time; Ctrl-C ends it")
        loop = WorkerLoop(queue, work, name or f"{socket.gethostname()}-{os.getpid()}", settings, log)
        asyncio.run(loop.run())
    finally:
        opened.close()


def run_job(
    store: Store, config: Config, summarizer: Any, policies: Sequence[Policy], job: CompactionJob
) -> str:
    """Runs a job with a session of its own. Returns the result, as a sentence.

    Raises:
        RetryLater: it should be tried again.
        PermanentFailure: it will not succeed in this round.
    """
    if next(store.read(job.key, 0, 1), None) is None:
        return "there is no such conversation"
    if job.agent is not None and job.agent not in config.agents:
        return f"the agent {job.agent!r} is not configured here"
    with Session(
        store,
        job.key,
        model=job.model,
        agent=job.agent,
        config=config,
        view=job.view,
        policies=policies,
        summarizer=summarizer,
    ) as session:
        session.shows_handles = job.handles
        with session.locked() as inspector:
            round = inspector.state.round
        if session.settings.is_off:
            return "compaction is off"
        if round + 1 != job.round:
            return "it was compacted meanwhile"
        return _prepare_summaries(session, job) if job.order is None else _compact(session, job)


def _prepare_summaries(session: Session, job: CompactionJob) -> str:
    """For the compaction that comes next."""
    summaries = session.chat.summaries
    if summaries is None or not summaries.can_write:
        raise SettingError("summarizer", "this worker has no model: configure or pass a summarizer")
    with session.chat.lock:
        if summaries.ready(session.record.live.freeze()) is not None:
            return "it was written already"
        writing = start_summaries(session.chat, summaries, job.budget)
    writing.wait()
    with session.chat.lock:
        session.record.catch_up()
        ready = summaries.ready(session.record.live.freeze())
    if ready is not None:
        models = dict.fromkeys(one.model for one in ready.prepared)
        return f"written by {', '.join(models)}"
    if session.record.live.state.round + 1 != job.round:
        return "it was compacted meanwhile"
    if summaries.retry_reason is not None:
        raise RetryLater(summaries.retry_reason)
    if summaries.problems:
        raise PermanentFailure(summaries.problems[-1])
    return "there is nothing to summarize yet"


def _compact(session: Session, job: CompactionJob) -> str:
    """On demand, unless another process does or did."""
    assert job.order is not None
    try:
        result = compact_for_worker(session.chat, job.order, job.round)
    except ConflictError as error:
        if session.record.live.state.round + 1 == job.round:
            raise RetryLater(str(error)) from error
        return "it was compacted meanwhile"
    summaries = session.chat.summaries
    problem = f"; {summaries.problems[-1]}" if summaries and summaries.problems else ""
    if not result.tokens_saved:
        return f"nothing can be made shorter{problem}"
    first, end = result.compacted_range
    return f"{end - first:,} messages compacted, {result.tokens_saved:,} tokens saved{problem}"
