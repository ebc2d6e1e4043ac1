"""Does the compactions that sessions hand over, beside any number of others on any number of machines."""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from refold.config.config import Config, Source, load_config
from refold.core.errors import ConflictError, SettingError
from refold.core.plan import Policy
from refold.session.session import Session
from refold.stores.store import Store, open_store
from refold.stores.url import shown_url
from refold.summaries.prepare import summarizers_of
from refold.summaries.queue import CompactionJob, PermanentFailure, RetryLater, Tell, WorkerSettings, queue_of

_LOG = logging.getLogger("refold.worker")


def run(
    store: str,
    *,
    config: Source = None,
    summarizer: Any = None,
    policies: Sequence[Policy] = (),
    name: str | None = None,
    terms: WorkerSettings | None = None,
    tell: Tell = _LOG.info,
) -> None:
    """Runs jobs until SIGTERM or SIGINT, on its usual terms or others. `tell` is given a line about each.

    `config`, `summarizer` and `policies` are what the sessions have that hand jobs over.

    Raises:
        SettingError: the store is none in PostgreSQL, what it takes is not installed, or a summarizer or a
            prompt, also of one agent only, cannot be used.
        StoreError: it cannot be used.
    """
    settings, terms = load_config(config), terms or WorkerSettings()
    _demand_writers(settings, summarizer)
    opened = open_store(store)
    try:
        queue = queue_of(opened)
        queue.set_up()
        from refold.summaries.worker_loop import WorkerLoop  # needs what is known to be installed now

        work = JobRunner(opened, settings, summarizer, policies)
        if not terms.once:
            tell(f"working for {shown_url(store)}, {terms.concurrency} at a time; Ctrl-C ends it")
        WorkerLoop(queue, work, name or f"{socket.gethostname()}-{os.getpid()}", terms, tell).run()
    finally:
        opened.close()


def _demand_writers(config: Config, given: Any) -> None:
    """Before there is a job: who is to write for any agent, and what it is asked."""
    summarizers_of(given, {})
    for agent in (None, *config.agents):
        settings = config.agent(agent).summarizer
        summarizers_of([*config.prompts(agent).conversation.models, *settings.models], settings.base_urls)


class JobRunner:
    """Carries out errands, several at a time, each with a session of its own."""

    def __init__(
        self, store: Store, config: Config, summarizer: Any = None, policies: Sequence[Policy] = ()
    ) -> None:
        self._store, self._config = store, config
        self._rest: dict[str, Any] = {"summarizer": summarizer, "policies": policies}

    def __call__(self, job: CompactionJob) -> str:
        """What came of it.

        Raises:
            AgainError: it should be tried again.
            VainError: nothing will come of it in this round.
        """
        if next(self._store.read(job.key, 0, 1), None) is None:
            return "there is no such conversation"
        if job.agent is not None and job.agent not in self._config.agents:
            return f"the agent {job.agent!r} is not configured here"
        facts: dict[str, Any] = {"agent": job.agent, "model": job.model, "view": job.view}
        with Session(self._store, job.key, config=self._config, **facts, **self._rest) as session:
            session.reducer.handles = job.handles
            with session.notifier:
                session.record.catch_up()
            if session.settings.is_off:
                return "compaction is off"
            if session.record.live.state.round + 1 != job.round:
                return "it was compacted meanwhile"
            return _ahead(session, job) if job.order is None else _ordered(session, job)


def _ahead(session: Session, job: CompactionJob) -> str:
    """Has summaries ready for when the view is too large."""
    summaries = session.reducer.summaries
    if summaries is None or not summaries.can_write:
        raise SettingError("summarizer", "no model is configured for this worker, and none was handed in")
    with session.notifier:
        if summaries.ready(session.record.live.freeze()) is not None:
            return "it was written already"
        writing = session.fitter.written((), job.budget)
    if writing is not None:
        writing.wait()
    with session.notifier:
        session.record.catch_up()
        ready = summaries.ready(session.record.live.freeze())
    if ready is not None:
        models = dict.fromkeys(one.certificate.model or "" for one in ready.prepared)
        return f"written by {', '.join(models)}"
    if session.record.live.state.round + 1 != job.round:
        return "it was compacted meanwhile"
    if summaries.again is not None:
        raise RetryLater(summaries.again)
    if summaries.problems:
        raise PermanentFailure(summaries.problems[-1])
    return "there is nothing to summarize yet"


def _ordered(session: Session, job: CompactionJob) -> str:
    """Compacts, unless somebody else does or did."""
    assert job.order is not None
    try:
        result = session.compaction.fenced(job.order, job.round)
    except ConflictError as error:
        if session.record.live.state.round + 1 == job.round:
            raise RetryLater(str(error)) from error
        return "it was compacted meanwhile"
    summaries = session.reducer.summaries
    why = f"; {summaries.problems[-1]}" if summaries and summaries.problems else ""
    if not result.tokens_saved:
        return f"there is nothing that this would make shorter{why}"
    first, end = result.compacted_range
    return f"{end - first:,} messages compacted, {result.tokens_saved:,} tokens saved{why}"
