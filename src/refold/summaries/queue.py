"""The queue of compaction jobs for worker processes, in the store's own database.

A job has names and numbers in it, never messages: the worker reads the conversation itself.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import ConflictError, NotFoundError, SettingError, StoreError
from refold.core.plan import CompactionRequest
from refold.stores.store import Key, Store

if TYPE_CHECKING:
    from refold.stores.postgres_pool import PostgresPool, PostgresQueries

T = TypeVar("T")

QUEUE = "refold"
TASK = "refold.compact"
POLL_S = 0.2
WORKER_TIMEOUT_S = 30.0
"""A worker without a heartbeat for so long is dead."""
MAX_ID = 1 << 63
KEEP_DONE_S = 86_400.0
"""Jobs that are done are deleted after that; failed ones stay until they are dropped."""

Status: TypeAlias = Literal["queued", "running", "done", "failed"]
Progress: TypeAlias = Literal["active", "unserved", "ended"]
"""`unserved`: no worker is active."""
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


class QueuedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as `refold jobs` shows it, and its JSON."""

    id: int
    status: Status
    owner: str
    conversation: str
    view: str
    agent: str | None
    what: Literal["write ahead", "compact"]
    attempts: int
    """That are over."""
    created: datetime
    changed: datetime
    """When it last started, ended or was put back."""
    due: datetime | None
    """When it is retried, if it failed before."""
    worker: str | None
    """The last one that ran it."""
    result: str | None = msgspec.field(name="told")
    """What was done, or why it failed."""


class JobHandle:
    """A queued job that a session can wait for."""

    def __init__(self, queue: "JobQueue", id: int, *, is_new: bool, problem: str | None = None) -> None:
        self.id = id
        self.is_new = is_new
        self.problem = problem
        self._queue = queue

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
        while (progress := self._progress()) == "active" and time.monotonic() < until:
            time.sleep(POLL_S)
        return progress == "ended"

    def _progress(self) -> Progress:
        try:
            return self._queue.progress(self.id)
        except StoreError:  # it may go on, but nobody here hears of it
            return "unserved"


class JobQueue:
    """The jobs of refold in one database. Safe to use from several threads."""

    def __init__(self, pool: "PostgresPool") -> None:
        self.pool = pool
        self._has_tables = False

    # For sessions

    def put(self, job: CompactionJob) -> JobHandle:
        """Adds a job, or returns the one that is queued or running for the same.

        A job that failed for good is not added again in its round, except on demand.

        Raises:
            StoreError: the queue cannot be used now.
        """
        import procrastinate
        from procrastinate.exceptions import ConnectorException

        tried_round = None if job.order else str(job.round)
        locks: dict[str, Any] = {"lock": job.lock, "queueing_lock": job.queueing_lock}
        args = {"errand": codec.dumps(job).decode(), "round": str(job.round)}

        def work(run: "PostgresQueries") -> JobHandle:
            run("job_lock", lock=job.lock)
            for id, has_failed, result in run("job_known", round=tried_round, **locks):
                hint = f"; `refold jobs retry {id}` tries it again" if has_failed else ""
                return JobHandle(self, id, is_new=False, problem=result and f"Job {id}: {result}{hint}")
            app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
            deferrer = app.configure_task(TASK, queue=QUEUE, connection=run.connection, **locks)
            return JobHandle(self, deferrer.defer(**args), is_new=True)

        try:
            return self._database().transact(work)
        except ConnectorException as error:
            why = " ".join(str(error.__cause__ or error).split())
            raise StoreError(f"The job queue cannot be used now: {why}") from error

    def progress(self, id: int) -> Progress:
        """Whether a job is worth waiting for: not if there is no worker."""
        rows = self._database()("job_progress", id=id, timeout_s=WORKER_TIMEOUT_S)
        progress: Progress = rows[0][0] if rows else "ended"
        return progress

    # For people

    def list_jobs(
        self, status: Status | None = None, *, since: float = 0.0, limit: int | None = None
    ) -> list[QueuedJob]:
        """The newest first; jobs that are done, if they ended after `since`."""
        return self._list(id=None, status=status, since=since, limit=limit)

    def get(self, id: int) -> QueuedJob:
        """Raises NotFoundError if there is no such job."""
        for job in self._list(id=id, status=None, since=0.0, limit=1) if 0 <= id < MAX_ID else ():
            return job
        raise NotFoundError(f"There is no job {id}; `refold jobs --all` lists them")

    def _list(self, **filters: Any) -> list[QueuedJob]:
        return [_queued_job(*row) for row in self._database()("job_list", task=TASK, **filters)]

    def retry(self, id: int) -> None:
        """Puts a failed job back into the queue, with all its attempts.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it did not fail, or a newer one for the same is queued or running.
        """
        self._require_failed(id)
        if not self._database().transact(lambda run: run("job_lock_of", id=id) and run("job_retry", id=id)):
            raise ConflictError(f"Job {id} cannot be retried: a newer one for the same is active; drop it")

    def drop(self, id: int) -> None:
        """
        Raises:
            NotFoundError: there is no such job.
            ConflictError: it did not fail.
        """
        self._require_failed(id)
        self._database()("job_drop", id=id)

    def _require_failed(self, id: int) -> None:
        job = self.get(id)
        if job.status != "failed":
            raise ConflictError(f"Job {id} is {job.status}; only failed jobs can be retried or dropped")

    # For workers

    def annotate(self, id: int, **notes: str) -> None:
        """Stores what a worker reports about a job."""
        from psycopg.types.json import Jsonb

        storable = Jsonb({name: _storable(text) for name, text in notes.items()})
        self._database()("job_note", notes=storable, id=id)

    def recover(self, attempts: int, lost_s: float) -> None:
        """Sends a heartbeat and puts back the jobs of dead workers; after `attempts` they have failed."""
        self._database()("job_beat")
        self._database()("job_recover", lost_s=lost_s, attempts=attempts)

    def delete_done(self) -> None:
        """Deletes jobs that have been done for `KEEP_DONE_S`."""
        self._database()("job_forget", keep_s=KEEP_DONE_S)

    def create_tables(self) -> None:
        """Creates the tables of the queue if they do not exist. Safe to run concurrently.

        Raises:
            StoreError: this role may not.
        """
        from procrastinate.schema import SchemaManager
        from psycopg.errors import InsufficientPrivilege

        def create(run: "PostgresQueries") -> None:
            run("job_lock", lock=QUEUE)
            [(has_tables, has_index)] = run("job_tables")
            try:
                if not has_tables:
                    run.connection.execute(SchemaManager.get_schema())
            except InsufficientPrivilege as error:
                raise StoreError(
                    f"The job queue has no tables yet, and this role may not create them ({error}):"
                    " run `refold jobs --store URL` once with a role that may"
                ) from error
            with suppress(InsufficientPrivilege), run.connection.transaction():  # only for speed
                if not has_index:
                    run("job_index")

        if self.pool("job_tables") != [(True, True)]:
            self.pool.transact(create)
        self._has_tables = True

    def _database(self) -> "PostgresPool":
        """The pool of a database that has the tables."""
        if not self._has_tables:
            self.create_tables()
        return self.pool


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


def _queued_job(id: int, status: Status, payload: str, attempts: int, *rest: Any) -> QueuedJob:
    """From a row of the table."""
    job = job_from_json(payload)
    *times, worker, result = rest
    created, changed, due = (one and one.astimezone(UTC) for one in times)
    return QueuedJob(
        id=id,
        status=status,
        owner=job.owner,
        conversation=job.conversation,
        view=job.view,
        agent=job.agent,
        what="write ahead" if job.order is None else "compact",
        attempts=attempts,
        created=created,
        changed=changed,
        due=due,
        worker=worker,
        result=result,
    )


def _storable(text: str) -> str:
    """PostgreSQL's JSON has no NUL and no lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "backslashreplace").decode()
