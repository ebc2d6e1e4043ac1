"""The queue of compaction jobs for worker processes, in the store's own database.

A job has names and numbers in it, never messages: the worker reads the conversation itself.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import ConflictError, NotFoundError, SettingError, StoreError
from refold.core.plan import CompactionRequest
from refold.stores.sql import queries
from refold.stores.store import Key, Store

if TYPE_CHECKING:
    from psycopg import Connection

    from refold.stores.postgres_pool import PostgresPool

T = TypeVar("T")

QUEUE = "refold"
TASK = "refold.compact"
FIRST_POLL_S = 0.05
"""Doubles up to `LONGEST_POLL_S`."""
LONGEST_POLL_S = 1.0
WORKER_TIMEOUT_S = 30.0
"""A worker without a heartbeat for so long is dead."""
MAX_ID = 1 << 63
KEEP_DONE_S = 86_400.0
"""Jobs that are done are deleted after that; failed ones stay until they are dropped."""

Status: TypeAlias = Literal["queued", "running", "done", "failed"]
STATUSES: dict[Status, tuple[str, ...]] = {
    "queued": ("todo",),
    "running": ("doing",),
    "done": ("succeeded", "cancelled", "aborted"),
    "failed": ("failed",),
}
"""With procrastinate's names for each."""
Log: TypeAlias = Callable[[str], object]


class RetryLater(Exception):
    """The job failed and may succeed later."""


class PermanentFailure(Exception):
    """The job failed and is not tried again in this round."""


class WorkerSettings(msgspec.Struct, frozen=True):
    concurrency: int = 4
    """Jobs at a time."""
    attempts: int = 5
    """After so many attempts a job has failed."""
    retry_s: float = 2.0
    """Before the second attempt; doubles with each that follows."""
    lost_s: float = WORKER_TIMEOUT_S
    """Other workers take over the jobs of one that has sent no heartbeat for so long."""
    grace_s: float = 20.0
    """When it is stopped, jobs that are not done by then go back to the queue."""
    once: bool = False
    """Stop when the queue is empty."""


class CompactionJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker does for one view: prepare summaries for a budget, or compact on demand (`order`)."""

    owner: str
    conversation: str
    view: str
    round: int
    """The compaction that it is for: after that one, there is nothing left to do."""
    agent: str | None = None
    model: str | None = None
    handles: bool = True
    budget: Budget | None = None
    order: CompactionRequest | None = None

    @property
    def key(self) -> Key:
        return Key(self.owner, self.conversation)

    @property
    def lock(self) -> str:
        """Jobs of one view run one after the other."""
        names = codec.dumps((self.owner, self.conversation, self.view))
        return f"refold:{blake2b(names, digest_size=16).hexdigest()}"

    @property
    def queueing_lock(self) -> str:
        """One job of each kind is queued or running at a time."""
        return f"{self.lock}:{'ahead' if self.order is None else 'order'}"


codec.decoder(CompactionJob)


class QueuedJob(NamedTuple):
    """A job and its state in the queue."""

    id: int
    job: CompactionJob
    status: Status
    attempts: int
    """That are over."""
    created: float
    changed: float
    """When it last started, ended or was put back."""
    due: float | None
    """When it is retried, if it failed before."""
    result: str | None
    """What was done, or why it failed."""
    worker: str | None
    """The last one that ran it."""


class JobHandle:
    """A queued job that a session can wait for."""

    def __init__(self, queue: "JobQueue", id: int, *, is_new: bool, problem: str | None = None) -> None:
        self.id = id
        self.is_new = is_new
        self.problem = problem
        self._queue = queue
        self._has_ended = False

    @property
    def is_running(self) -> bool:
        """True if it is queued or running, and there is a worker."""
        return self._progress() == "active"

    @property
    def has_no_worker(self) -> bool:
        return self._progress() == "unserved"

    def wait(self, seconds: float | None = None) -> bool:
        """True if it has ended by then. Returns at once if there is no worker."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        poll_s = FIRST_POLL_S
        while (progress := self._progress()) == "active":
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(poll_s, left))
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
        return progress == "ended"

    def _progress(self) -> str:
        if self._has_ended:
            return "ended"
        try:
            progress = self._queue.progress(self.id)
        except StoreError:  # it may go on, but nobody here hears of it
            return "unserved"
        self._has_ended = progress == "ended"
        return progress


class JobQueue:
    """The jobs of refold in one database. Safe to use from several threads."""

    def __init__(self, pool: "PostgresPool") -> None:
        self.pool = pool
        self._sql = queries("jobs")
        self._has_tables = False

    # For sessions

    def put_if_served(self, job: CompactionJob) -> JobHandle:
        """The same as `put`, for callers that wait for it.

        Raises:
            StoreError: the queue cannot be used now, or there is no worker.
        """
        handle = self.put(job)
        if handle.has_no_worker:
            raise StoreError(
                f"No worker has been active for {WORKER_TIMEOUT_S:g} s; `refold worker` starts one"
            )
        return handle

    def put(self, job: CompactionJob) -> JobHandle:
        """Adds a job, or returns the one that is queued or running for the same.

        A job that failed for good is not added again in its round, except on demand.

        Raises:
            StoreError: the queue cannot be used now.
        """
        import procrastinate

        tried_round = None if job.order else str(job.round)
        locks: dict[str, Any] = {"queue": QUEUE, "lock": job.lock, "queueing_lock": job.queueing_lock}
        args = {"errand": codec.dumps(job).decode(), "round": str(job.round)}

        def work(query: NamedQueries) -> JobHandle:
            query("one_at_a_time", job.lock)
            for id, has_failed, result in query("known", job.lock, job.queueing_lock, tried_round):
                hint = f"; `refold jobs retry {id}` tries it again" if has_failed else ""
                return JobHandle(self, id, is_new=False, problem=result and f"Job {id}: {result}{hint}")
            app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
            deferrer = app.configure_task(TASK, **locks, connection=query.connection)
            return JobHandle(self, deferrer.defer(**args), is_new=True)

        return self._transact(work)

    def progress(self, id: int) -> Literal["active", "unserved", "ended"]:
        """Whether a job is worth waiting for: not if there is no worker."""
        rows = self._transact(lambda query: query("look", WORKER_TIMEOUT_S, WORKER_TIMEOUT_S, id))
        for is_open, is_served in rows:
            if is_open:
                return "active" if is_served else "unserved"
        return "ended"

    # For people

    def list_jobs(
        self,
        statuses: Sequence[Status],
        limit: int | None = None,
        since: float = 0.0,
        log: Log = lambda text: None,
    ) -> list[QueuedJob]:
        """The newest first; jobs that are done, if they ended after `since`."""
        names = list[str]()
        for status in statuses:
            names += STATUSES[status]
        jobs = list[QueuedJob]()
        for row in self._transact(lambda query: query("posted", None, None, names, since, limit)):
            job = _from_row(row)
            if job is None:
                log(f"Job {row[0]} in the queue {QUEUE!r} is not refold's; skipped")
            else:
                jobs.append(job)
        return jobs

    def get(self, id: int) -> QueuedJob:
        """
        Raises:
            NotFoundError: there is no such job.
        """
        names = list(chain.from_iterable(STATUSES.values()))
        rows = []
        if 0 <= id < MAX_ID:
            rows = self._transact(lambda query: query("posted", id, id, names, 0.0, 1))
        for row in rows:
            if job := _from_row(row):
                return job
        raise NotFoundError(f"There is no job {id}; `refold jobs --all` lists them")

    def retry(self, id: int) -> None:
        """Puts a failed job back into the queue, with all its attempts.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it did not fail, or a newer one for the same is queued or running.
        """
        lock = self._failed(id).job.lock
        if not self._transact(lambda query: query("one_at_a_time", lock) and query("retry", id)):
            raise ConflictError(f"Job {id} cannot be retried: a newer one for the same is active; drop it")

    def drop(self, id: int) -> None:
        """
        Raises:
            NotFoundError: there is no such job.
            ConflictError: it did not fail.
        """
        self._failed(id)
        self._transact(lambda query: query("drop", id))

    def _failed(self, id: int) -> QueuedJob:
        job = self.get(id)
        if job.status != "failed":
            raise ConflictError(f"Job {id} is {job.status}; only failed jobs can be retried or dropped")
        return job

    # For workers

    def annotate(self, id: int, **notes: str) -> None:
        """Stores what a worker reports about a job."""
        from psycopg.types.json import Jsonb

        storable = Jsonb({name: _storable(text) for name, text in notes.items()})
        self._transact(lambda query: query("note", storable, id))

    def recover(self, attempts: int, lost_s: float) -> list[int]:
        """Sends a heartbeat and puts back the jobs of dead workers; after `attempts` they have failed."""
        self._transact(lambda query: query("beat"))
        return [id for (id,) in self._transact(lambda query: query("recover", lost_s, attempts))]

    def delete_done(self) -> None:
        """Deletes jobs that have been done for `KEEP_DONE_S`."""
        self._transact(lambda query: query("forget", KEEP_DONE_S))

    def create_tables(self) -> None:
        """Creates the tables of the queue if they do not exist. Safe to run concurrently.

        Raises:
            StoreError: this role may not.
        """
        from procrastinate.schema import SchemaManager
        from psycopg.errors import InsufficientPrivilege

        def create(query: NamedQueries) -> None:
            query("one_at_a_time", QUEUE)
            [(has_tables, has_index)] = query("is_there")
            try:
                if not has_tables:
                    query.connection.execute(SchemaManager.get_schema())
            except InsufficientPrivilege as error:
                raise StoreError(
                    f"The job queue has no tables yet, and this role may not create them ({error}):"
                    " run `refold jobs --store URL` once with a role that may"
                ) from error
            with suppress(InsufficientPrivilege), query.connection.transaction():  # only for speed
                if not has_index:
                    query("make_index")

        if self._run(lambda query: query("is_there")) != [(True, True)]:
            self._run(create)
        self._has_tables = True

    def _transact(self, work: "Callable[[NamedQueries], T]") -> T:
        """Runs one transaction, and creates the tables first."""
        if not self._has_tables:
            self.create_tables()
        return self._run(work)

    def _run(self, work: "Callable[[NamedQueries], T]") -> T:
        from procrastinate.exceptions import ConnectorException

        try:
            return self.pool.transact(lambda run: work(NamedQueries(run.connection, self._sql)))
        except ConnectorException as error:
            why = " ".join(str(error.__cause__ or error).split())
            raise StoreError(f"The job queue cannot be used now: {why}") from error


class NamedQueries:
    """Runs named queries on one connection."""

    def __init__(self, connection: "Connection[Any]", sql: dict[str, str]) -> None:
        self.connection = connection
        self._sql = sql

    def __call__(self, query: str, *values: Any) -> list[Any]:
        cursor = self.connection.execute(self._sql[query].encode(), values)
        return cursor.fetchall() if cursor.description else []


def queue_of(store: Store, place: str = "store") -> JobQueue:
    """The queue in a store's database; `place` names the setting in errors.

    Raises:
        SettingError: the store is not PostgreSQL, or procrastinate is not installed.
    """
    if find_spec("procrastinate") is None or find_spec("psycopg") is None:
        raise SettingError(place, 'workers need procrastinate: pip install "refold[worker]"')
    from refold.stores.postgres import PostgresStore

    if not isinstance(store, PostgresStore):
        raise SettingError(
            place, f"workers need a PostgreSQL store (postgresql://…), got {type(store).__name__}"
        )
    return JobQueue(store.pool)


def job_from_json(text: str) -> CompactionJob:
    return msgspec.convert(codec.loads(text.encode()), CompactionJob)


def _from_row(row: Sequence[Any]) -> QueuedJob | None:
    """None if another application put it there."""
    id, args, queue_status, attempts, created, changed, due = row
    try:
        job = job_from_json(args["errand"])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    [status] = [status for status, names in STATUSES.items() if queue_status in names]
    return QueuedJob(
        id,
        job,
        status,
        attempts,
        created.timestamp(),
        changed.timestamp(),
        due.timestamp() if due and status == "queued" else None,
        args.get("told"),
        args.get("worker"),
    )


def _storable(text: str) -> str:
    """PostgreSQL's JSON has no NUL and no lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "backslashreplace").decode()
