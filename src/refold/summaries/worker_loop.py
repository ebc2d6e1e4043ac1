"""The loop of a worker: takes jobs out of the queue until it is stopped, and survives a lost database."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import procrastinate
import psycopg
from procrastinate.exceptions import ConnectorException
from procrastinate.jobs import Job
from procrastinate.retry import BaseRetryStrategy, RetryDecision

from refold.core.errors import CorruptError, NewerError, SettingError, StoreError
from refold.summaries.background import in_thread
from refold.summaries.queue import (
    QUEUE,
    TASK,
    WORKER_TIMEOUT_S,
    CompactionJob,
    JobQueue,
    Log,
    PermanentFailure,
    RetryLater,
    WorkerSettings,
    job_from_json,
)

LONGEST_RETRY_S = 300.0
SHORTEST_POLL_S = 0.1
LONGEST_POLL_S = 5.0
"""New jobs are announced; jobs that are due again are found by polling."""
DELETE_DONE_S = 3_600.0


class WorkerLoop:
    """Runs the jobs of one worker: several at a time, each in a thread."""

    def __init__(
        self,
        queue: JobQueue,
        work: Callable[[CompactionJob], str],
        name: str,
        settings: WorkerSettings,
        log: Log,
    ) -> None:
        self._queue = queue
        self._work = work
        self._name = name
        self._settings = settings
        self._log = log
        logging.getLogger("procrastinate").addHandler(logging.NullHandler())  # `log` says it all

    async def run(self) -> None:
        """Returns after SIGTERM or SIGINT. Starts over whenever the database was unreachable."""
        wait_s = self._settings.retry_s
        while True:
            started = time.monotonic()
            try:
                return await self._serve()
            except (ConnectorException, psycopg.Error, StoreError) as error:
                why = f"The job queue cannot be used now: {error.__cause__ or error}"
                if self._settings.once:
                    raise StoreError(why) from error
                self._log(why)
            is_short = time.monotonic() - started < wait_s
            wait_s = min(LONGEST_RETRY_S, 2 * wait_s) if is_short else self._settings.retry_s
            await asyncio.sleep(wait_s)

    async def _serve(self) -> None:
        settings = self._settings
        await asyncio.to_thread(self._queue.recover, settings.attempts, settings.lost_s)
        connect_args = self._queue.pool.options.connect_args
        connector = procrastinate.PsycopgConnector(**connect_args, min_size=1, max_size=2)
        app = procrastinate.App(connector=connector)

        @app.task(name=TASK, queue=QUEUE, pass_context=True, retry=_Retry(settings))
        async def compact(context: Any, /, errand: str, **_: Any) -> None:
            await in_thread(lambda: self._run(context.job.id, errand))

        async with app.open_async():
            housekeeping = asyncio.create_task(self._housekeep())
            try:
                await app.run_worker_async(
                    queues=[QUEUE],
                    name=self._name,
                    concurrency=settings.concurrency,
                    wait=not settings.once,
                    fetch_job_polling_interval=max(SHORTEST_POLL_S, min(LONGEST_POLL_S, settings.retry_s)),
                    shutdown_graceful_timeout=settings.grace_s,
                    update_heartbeat_interval=min(settings.lost_s, WORKER_TIMEOUT_S) / 3,
                    stalled_worker_timeout=settings.lost_s,
                )
            finally:
                housekeeping.cancel()

    async def _housekeep(self) -> None:
        """Puts back the jobs of dead workers and deletes old ones."""
        deleted = 0.0
        while True:
            with suppress(StoreError):
                await asyncio.to_thread(self._queue.recover, self._settings.attempts, self._settings.lost_s)
                if time.monotonic() - deleted > DELETE_DONE_S:
                    await asyncio.to_thread(self._queue.delete_done)
                    deleted = time.monotonic()
            await asyncio.sleep(min(self._settings.lost_s, WORKER_TIMEOUT_S) / 3)

    def _run(self, id: int, payload: str) -> None:
        """Runs one job and stores its result with it.

        Raises:
            RetryLater: it should be tried again; any other error says that it should not.
        """
        started = time.monotonic()
        notes = dict[str, str]()
        job = job_from_json(payload)
        try:
            self._queue.annotate(id, worker=self._name)
            notes = {"told": self._work(job)}
        except PermanentFailure as error:
            notes = {"told": str(error), "vain": "yes"}
        except (CorruptError, NewerError, SettingError) as error:
            notes = {"told": str(error)}
            raise
        except (RetryLater, StoreError) as error:
            notes = {"told": str(error)}
            raise RetryLater(str(error)) from error
        except BaseException as error:
            notes = {"told": f"{type(error).__name__}: {error}"}
            raise
        finally:
            with suppress(StoreError):
                self._queue.annotate(id, **notes)
            seconds = time.monotonic() - started
            with suppress(Exception):  # a failing log harms no job
                self._log(f"Job {id}, {job.conversation} ({job.view}): {notes['told']} ({seconds:.1f} s)")


class _Retry(BaseRetryStrategy):
    """Retries `RetryLater`, with exponential backoff."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        if isinstance(exception, asyncio.CancelledError):  # back to the queue, the worker stops
            return RetryDecision(retry_in={"seconds": 0})
        if not isinstance(exception, RetryLater) or job.attempts + 1 >= self._settings.attempts:
            return None
        wait_s = min(LONGEST_RETRY_S, self._settings.retry_s * 2**job.attempts)
        return RetryDecision(retry_in={"milliseconds": int(1_000 * wait_s)})
