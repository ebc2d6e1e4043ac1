"""Compactions that workers do: handed over through a queue in the store's own database, and looked at there.

A job has names and numbers in it, never what was said: whoever runs it reads the conversation.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec
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

QUEUE, TASK = "refold", "refold.compact"
AGAIN_S, SELDOM_S = 0.05, 1.0
"""Between the first two looks at whether a job is still under way, and then ever longer, up to that."""
ALIVE_S = 30.0
"""Who was not heard of for so long works no more."""
MOST_ID = 1 << 63
KEPT_S = 86_400.0
"""How long jobs that are done can be looked at; those that failed stay until somebody drops them."""

Status: TypeAlias = Literal["queued", "running", "done", "failed"]
NAMES: dict[Status, tuple[str, ...]] = {
    "queued": ("todo",),
    "running": ("doing",),
    "done": ("succeeded", "cancelled", "aborted"),
    "failed": ("failed",),
}
"""What the queue calls them."""


Tell: TypeAlias = Callable[[str], object]


class RetryLater(Exception):
    """Nothing came of a job now, but something may another time."""


class PermanentFailure(Exception):
    """Nothing came of a job, and nothing will in this round."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """On which a worker works."""

    concurrency: int = 4
    """Jobs at a time."""
    attempts: int = 5
    """How often a job is tried before it has failed."""
    retry_s: float = 2.0
    """Before the second attempt; twice as long before each that follows."""
    lost_s: float = ALIVE_S
    """A worker that was not heard of for so long is gone: others do its jobs."""
    grace_s: float = 20.0
    """Told to stop, it gives back what is not done by then."""
    once: bool = False
    """Stop when nothing is left to do now."""


class CompactionJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker is to do for one view: have summaries ready for a budget, or carry out an order."""

    owner: str
    conversation: str
    view: str
    round: int
    """Of the compaction that it is for: once that was, there is nothing left to do."""
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
    def line(self) -> str:
        """Of each kind, one waits or runs at a time."""
        return f"{self.lock}:{'ahead' if self.order is None else 'order'}"


codec.decoder(CompactionJob)


class QueuedJob(NamedTuple):
    """A job as the queue has it."""

    id: int
    errand: CompactionJob
    status: Status
    attempts: int
    """That are over."""
    created: float
    changed: float
    """When it last began, ended or was put back."""
    due: float | None
    """When it is tried again, where it failed before."""
    told: str | None
    """What came of it, or why nothing did."""
    worker: str | None
    """Who ran it last."""


class JobHandle:
    """A job that somebody else does. It can be waited for like one of our own."""

    def __init__(self, queue: "JobQueue", id: int, *, is_new: bool, problem: str | None = None) -> None:
        self.id, self.is_new, self.problem = id, is_new, problem
        self._queue, self._has_ended = queue, False

    @property
    def is_running(self) -> bool:
        """It waits for its turn, or is being done."""
        return self._look() == "awaited"

    @property
    def is_unheard(self) -> bool:
        """It is in the queue, but nobody works."""
        return self._look() == "unheard"

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended by then. Where nobody works, nobody waits."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        wait_s = AGAIN_S
        while (found := self._look()) == "awaited":
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(wait_s, left))
            wait_s = min(2 * wait_s, SELDOM_S)
        return found == "ended"

    def _look(self) -> str:
        if self._has_ended:
            return "ended"
        try:
            found = self._queue.look(self.id)
        except StoreError:  # it may go on, but nobody here hears of it
            return "unheard"
        self._has_ended = found == "ended"
        return found


class JobQueue:
    """The jobs of refold in one database. Safe to use from several threads."""

    def __init__(self, pool: "PostgresPool") -> None:
        self.pool, self._sql, self._is_there = pool, queries("jobs"), False

    # Handing over

    def hand_over(self, errand: CompactionJob) -> JobHandle:
        """The same as `put`, for those who wait for it.

        Raises:
            StoreError: the queue cannot be used now, or nobody works.
        """
        ticket = self.put(errand)
        if ticket.is_unheard:
            raise StoreError(f"No worker was heard of for {ALIVE_S:g} s: `refold worker` starts one")
        return ticket

    def put(self, errand: CompactionJob) -> JobHandle:
        """One job for an errand, however many ask for it.

        What was done in vain for the same round is not done again, unless by an order.

        Raises:
            StoreError: the queue cannot be used now.
        """
        import procrastinate

        tried = None if errand.order else str(errand.round)
        locks: dict[str, Any] = {"queue": QUEUE, "lock": errand.lock, "queueing_lock": errand.line}
        args = {"errand": codec.dumps(errand).decode(), "round": str(errand.round)}

        def work(ask: NamedQueries) -> JobHandle:
            ask("one_at_a_time", errand.lock)
            for id, has_failed, told in ask("known", errand.lock, errand.line, tried):
                tip = f"; `refold jobs retry {id}` tries it again" if has_failed else ""
                return JobHandle(self, id, is_new=False, problem=told and f"Job {id}: {told}{tip}")
            app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
            job = app.configure_task(TASK, **locks, connection=ask.connection)
            return JobHandle(self, job.defer(**args), is_new=True)

        return self._do(work)

    def look(self, id: int) -> Literal["awaited", "unheard", "ended"]:
        """Whether a job is worth waiting for: not where no worker was heard of for long."""
        for is_open, is_served in self._do(lambda ask: ask("look", ALIVE_S, ALIVE_S, id)):
            return "ended" if not is_open else "awaited" if is_served else "unheard"
        return "ended"

    # For people

    def posted(
        self,
        statuses: Sequence[Status],
        limit: int | None = None,
        since: float = 0.0,
        tell: Tell = lambda text: None,
    ) -> list[QueuedJob]:
        """The newest first; of those that are done, the ones that ended since. What others put into the queue
        is passed over, and told.
        """
        names = [name for status in statuses for name in NAMES[status]]
        rows = self._do(lambda ask: ask("posted", None, None, names, since, limit))
        known = {row[0]: _posted(row) for row in rows}
        for id in (id for id, posted in known.items() if posted is None):
            tell(f"Job {id} in the queue {QUEUE!r} is none of refold's, and is passed over")
        return [posted for posted in known.values() if posted is not None]

    def one(self, id: int) -> QueuedJob:
        """
        Raises:
            NotFoundError: there is none.
        """
        names = [name for status in NAMES.values() for name in status]
        if 0 <= id < MOST_ID:
            for row in self._do(lambda ask: ask("posted", id, id, names, 0.0, 1)):
                if posted := _posted(row):
                    return posted
        raise NotFoundError(f"There is no job {id}; `refold jobs --all` shows what there is")

    def retry(self, id: int) -> None:
        """Puts a job that failed back into the queue, as if it was never tried.

        Raises:
            NotFoundError: there is none.
            ConflictError: it did not fail, or another for the same is under way.
        """
        lock = self._failed(id).errand.lock
        if not self._do(lambda ask: ask("one_at_a_time", lock) and ask("retry", id)):
            raise ConflictError(f"Job {id} is not needed: a newer one for the same is under way; drop it")

    def drop(self, id: int) -> None:
        """
        Raises:
            NotFoundError: there is none.
            ConflictError: it did not fail.
        """
        self._failed(id)
        self._do(lambda ask: ask("drop", id))

    def _failed(self, id: int) -> QueuedJob:
        posted = self.one(id)
        if posted.status != "failed":
            raise ConflictError(f"Job {id} is {posted.status}; only those that failed are retried or dropped")
        return posted

    # For workers

    def note(self, id: int, **facts: str) -> None:
        """Keeps what a worker has to say about a job."""
        from psycopg.types.json import Jsonb

        told = Jsonb({name: _plain(text) for name, text in facts.items()})
        self._do(lambda ask: ask("note", told, id))

    def recover(self, attempts: int, lost_s: float) -> list[int]:
        """Says that somebody works, and puts back what workers left that are gone; after so many attempts it
        has failed.
        """
        self._do(lambda ask: ask("beat"))
        return [id for (id,) in self._do(lambda ask: ask("recover", lost_s, attempts))]

    def forget(self) -> None:
        """What is done for long."""
        self._do(lambda ask: ask("forget", KEPT_S))

    def set_up(self) -> None:
        """Makes the tables of the queue, unless they are there; many may try at once.

        Raises:
            StoreError: this role may not.
        """
        from procrastinate.schema import SchemaManager
        from psycopg.errors import InsufficientPrivilege

        def work(ask: NamedQueries) -> None:
            ask("one_at_a_time", QUEUE)
            [(has_tables, has_index)] = ask("is_there")
            try:
                if not has_tables:
                    ask.connection.execute(SchemaManager.get_schema())
            except InsufficientPrivilege as error:
                raise StoreError(
                    f"The queue of jobs has no tables yet, and this role may not make them ({error}):"
                    " run `refold jobs --store URL` once as a role that may"
                ) from error
            with suppress(InsufficientPrivilege), ask.connection.transaction():  # it is only faster with it
                if not has_index:
                    ask("make_index")

        if self._transact(lambda ask: ask("is_there")) != [(True, True)]:
            self._transact(work)
        self._is_there = True

    def _do(self, work: "Callable[[NamedQueries], T]") -> T:
        """One transaction, in a database that has the tables."""
        if not self._is_there:
            self.set_up()
        return self._transact(work)

    def _transact(self, work: "Callable[[NamedQueries], T]") -> T:
        from procrastinate.exceptions import ConnectorException

        try:
            return self.pool.transact(lambda run: work(NamedQueries(run.connection, self._sql)))
        except ConnectorException as error:
            why = " ".join(str(error.__cause__ or error).split())
            raise StoreError(f"The queue of jobs cannot be used now: {why}") from error


class NamedQueries:
    """Asks named queries on one connection."""

    def __init__(self, connection: "Connection[Any]", sql: dict[str, str]) -> None:
        self.connection, self._sql = connection, sql

    def __call__(self, query: str, *values: Any) -> list[Any]:
        cursor = self.connection.execute(self._sql[query].encode(), values)
        return cursor.fetchall() if cursor.description else []


def queue_of(store: Store, place: str = "store") -> JobQueue:
    """The queue in a store's database; `place` is what an error is blamed on.

    Raises:
        SettingError: the store has no such database, or what it takes is not installed.
    """
    if find_spec("procrastinate") is None or find_spec("psycopg") is None:
        raise SettingError(place, 'workers need procrastinate: pip install "refold[worker]"')
    from refold.stores.postgres import PostgresStore

    if not isinstance(store, PostgresStore):
        raise SettingError(place, f"workers need a store at postgresql://…, this is a {type(store).__name__}")
    return JobQueue(store.pool)


def job_from_json(text: str) -> CompactionJob:
    return msgspec.convert(codec.loads(text.encode()), CompactionJob)


def _posted(row: Sequence[Any]) -> QueuedJob | None:
    """None where somebody else put it there."""
    id, args, status, attempts, created, changed, due = row
    try:
        errand = job_from_json(args["errand"])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    [known] = [known for known, names in NAMES.items() if status in names]
    times = (created.timestamp(), changed.timestamp(), due.timestamp() if due and status == "todo" else None)
    return QueuedJob(id, errand, known, attempts, *times, args.get("told"), args.get("worker"))


def _plain(text: str) -> str:
    """As the database takes it."""
    return text.replace("\0", "").encode("utf-8", "backslashreplace").decode()
