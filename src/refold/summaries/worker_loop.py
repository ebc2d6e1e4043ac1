"""The working hours of a worker: takes jobs out of the queue until it is told to stop, whatever fails."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import procrastinate
import psycopg
from procrastinate.exceptions import ConnectorException
from procrastinate.jobs import Job
from procrastinate.retry import BaseRetryStrategy, RetryDecision

from refold.core.errors import CorruptError, NewerError, SettingError, StoreError
from refold.summaries.background import in_thread
from refold.summaries.queue import (
    ALIVE_S,
    QUEUE,
    TASK,
    CompactionJob,
    JobQueue,
    PermanentFailure,
    RetryLater,
    Tell,
    WorkerSettings,
    job_from_json,
)

T = TypeVar("T")
LONGEST_S = 300.0
"""Between two attempts."""
SOONEST_S, POLL_S = 0.1, 5.0
"""How often it looks by itself: new jobs are told of, those that are due again are not."""
FORGET_S = 3_600.0
"""Between two looks at what is done for long."""


class WorkerLoop:
    """Of one worker: several jobs at a time, each in a thread."""

    def __init__(
        self,
        queue: JobQueue,
        work: Callable[[CompactionJob], str],
        name: str,
        terms: WorkerSettings,
        tell: Tell,
    ) -> None:
        self._queue, self._work, self._name, self._terms, self._tell = queue, work, name, terms, tell
        self._serving: asyncio.Task[None] | None = None
        self._is_over = False
        logging.getLogger("procrastinate").addHandler(logging.NullHandler())  # it is told here

    def run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        """Begins anew whenever the database was gone."""
        wait_s = self._terms.retry_s
        with self._signals():
            while not self._is_over:
                begun = time.monotonic()
                try:
                    await self._serve()
                except (ConnectorException, psycopg.Error, StoreError) as error:
                    why = f"The queue of jobs cannot be used now: {error.__cause__ or error}"
                    if self._terms.once:
                        raise StoreError(why) from error
                    self._tell(why)
                if self._terms.once or self._is_over:
                    return
                is_short = time.monotonic() - begun < wait_s
                wait_s = min(LONGEST_S, 2 * wait_s) if is_short else self._terms.retry_s
                self._serving = asyncio.create_task(asyncio.sleep(wait_s))
                with suppress(asyncio.CancelledError):
                    await self._serving

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first one ends it gently, the second at once."""
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()  # others get no signals
        known = (signal.SIGTERM, signal.SIGINT) if is_main else ()

        def stop() -> None:
            self._is_over = True
            for one in known:
                loop.remove_signal_handler(one)
            if self._serving is not None:
                self._serving.cancel()

        for one in known:
            loop.add_signal_handler(one, stop)
        yield
        for one in known:
            loop.remove_signal_handler(one)

    async def _serve(self) -> None:
        terms = self._terms
        await asyncio.to_thread(self._queue.recover, terms.attempts, terms.lost_s)
        connector = procrastinate.PsycopgConnector(**self._queue.pool.beside, min_size=1, max_size=2)
        app = procrastinate.App(connector=connector)

        @app.task(name=TASK, queue=QUEUE, pass_context=True, retry=_Retry(terms))
        async def compact(context: Any, /, errand: str, **_: Any) -> None:
            await in_thread(lambda: self._run(context.job.id, errand))

        async with app.open_async():
            work = app.run_worker_async(
                queues=[QUEUE],
                name=self._name,
                concurrency=terms.concurrency,
                wait=not terms.once,
                fetch_job_polling_interval=max(SOONEST_S, min(POLL_S, terms.retry_s)),
                shutdown_graceful_timeout=terms.grace_s,
                update_heartbeat_interval=min(terms.lost_s, ALIVE_S) / 3,
                stalled_worker_timeout=terms.lost_s,
                install_signal_handlers=False,
            )
            self._serving = asyncio.create_task(work)
            looking = asyncio.create_task(self._look_after())
            if self._is_over:  # told to stop while it began
                self._serving.cancel()
            try:
                await self._serving
            except asyncio.CancelledError:
                if not self._is_over:
                    raise
            finally:
                looking.cancel()

    async def _look_after(self) -> None:
        """What dead workers left is put back; what is done for long is forgotten."""
        forgot = 0.0
        while True:
            with suppress(StoreError):
                await asyncio.to_thread(self._queue.recover, self._terms.attempts, self._terms.lost_s)
                if time.monotonic() - forgot > FORGET_S:
                    await asyncio.to_thread(self._queue.forget)
                    forgot = time.monotonic()
            await asyncio.sleep(min(self._terms.lost_s, ALIVE_S) / 3)

    def _run(self, id: int, given: str) -> None:
        """One job; what came of it is kept beside it.

        Raises:
            AgainError: it should be tried again; whatever else is raised, it should not.
        """
        begun, facts = time.monotonic(), dict[str, str]()
        errand = job_from_json(given)
        try:
            self._queue.note(id, worker=self._name)
            facts = {"told": self._work(errand)}
        except PermanentFailure as error:
            facts = {"told": str(error), "vain": "yes"}
        except (CorruptError, NewerError, SettingError) as error:
            facts = {"told": str(error)}
            raise
        except (RetryLater, StoreError) as error:
            facts = {"told": str(error)}
            raise RetryLater(str(error)) from error
        except BaseException as error:
            facts = {"told": f"{type(error).__name__}: {error}"}
            raise
        finally:
            with suppress(StoreError):
                self._queue.note(id, **facts)
            took, what = time.monotonic() - begun, f"{errand.conversation} ({errand.view})"
            with suppress(Exception):  # whoever is told, it harms nothing here
                self._tell(f"Job {id}, {what}: {facts['told']} ({took:.1f} s)")


class _Retry(BaseRetryStrategy):
    """What may come to something another time is tried again, after waits that grow."""

    def __init__(self, terms: WorkerSettings) -> None:
        self._terms = terms

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        if isinstance(exception, asyncio.CancelledError):  # given back
            return RetryDecision(retry_in={"seconds": 0})
        if not isinstance(exception, RetryLater) or job.attempts + 1 >= self._terms.attempts:
            return None
        wait_s = min(LONGEST_S, self._terms.retry_s * 2**job.attempts)
        return RetryDecision(retry_in={"milliseconds": int(1_000 * wait_s)})
