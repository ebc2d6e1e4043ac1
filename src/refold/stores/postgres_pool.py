"""Connections to PostgreSQL: a pool in each process, patience while a server restarts, errors explained."""

import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from refold.core.codec import FORMAT
from refold.core.errors import NewerError, SettingError, StoreError
from refold.stores.sql import migrations, queries
from refold.stores.url import ENCODING_HELP, require_between

try:
    import psycopg
    from psycopg.abc import PQGen
    from psycopg.conninfo import conninfo_to_dict
    from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout
except ImportError as error:
    raise SettingError("store postgresql://", 'needs psycopg: pip install "refold[postgres]"') from error

T = TypeVar("T")
Work: TypeAlias = Callable[["PostgresQueries"], T]
Answer = TypeVar("Answer")

OLDEST_SERVER = 13
CROSSED = {"40001", "40P01", "53200"}
"""Transactions that stood in each other's way, or took all locks: the connection is as good as before."""
PASSING = CROSSED | {"57P01", "57P02", "57P03", "57P05", "53300", "25006", "25P03", "26000"}
"""States that go by themselves: these, and a server that starts, stops, is full or a replica."""
BUSY = ("the database system is", "too many", "connection slots", "unexpectedly", "reset by peer")
"""What is said to those who connect while a server starts, stops or is full."""
ALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""A peer that is gone without a word is missed after a minute, in seconds."""
LONGEST_NAME = 63
"""Bytes that PostgreSQL keeps of a schema's name."""
CLOSE_S = 1.0
"""How long closing waits for those who are connecting."""


class PatientConnection(psycopg.Connection[tuple[Any, ...]]):
    """One that is given up where nobody answers any more, as behind a proxy that hangs."""

    limit_s: float | None = None
    """How long a statement may take, there and back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made = time.monotonic()

    def wait(self, gen: PQGen[Answer], interval: float = 0.1, timeout: float | None = None) -> Answer:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.limit_s)
        except psycopg.errors._WaitTimeout as error:
            self.close()
            raise psycopg.OperationalError(f"no answer for {self.limit_s:g} s") from error


class PostgresQueries:
    """Runs named queries on one connection."""

    def __init__(self, connection: PatientConnection, *, again: bool = False) -> None:
        self._connection = self.connection = connection
        self._sql = queries("postgres")
        self.again = again
        """An earlier try was cut off, and may have been committed."""

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        cursor = self._connection.cursor(binary=True)
        cursor.execute(self._sql[query].encode(), values)
        return cursor.fetchall() if cursor.rownumber is not None else []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """One transaction: all that is done in it, or nothing."""
        with self._connection.transaction():
            yield

    def take_time(self) -> None:
        """For the rest of a transaction nothing takes too long."""
        self("lift_timeout")
        self._connection.limit_s = None


class PostgresPool:
    """Opened when first used, and again after a fork of the process."""

    def __init__(
        self, url: str, pool_size: int, timeout_s: float, statement_timeout_s: float, schema: str | None
    ) -> None:
        self.shown = shown(url)
        where = f"store {self.shown!r}"
        require_between(where, 1, 1e6, pool_size=pool_size)
        require_between(where, 0.001, 1e6, timeout_s=timeout_s, statement_timeout_s=statement_timeout_s)
        if schema is not None and (problem := _unfit(schema)):
            raise SettingError(where, f"schema {problem}: name another, or leave it out; {OPTIONS}")
        try:
            known = conninfo_to_dict(url)
        except psycopg.Error as error:
            odd = re.search(r'query parameter: "([a-z_]+)"', "" if "password=" in url else str(error))
            problem = f"{odd[1]} is no option" if odd else f"is no URL of PostgreSQL; {ENCODING_HELP}"
            raise SettingError(where, f"{problem}; {OPTIONS}") from None
        self.url, self.pool_size, self.timeout_s = url, pool_size, timeout_s
        self._limit_s = statement_timeout_s + timeout_s
        self._options = str(known.get("options") or os.environ.get("PGOPTIONS", ""))
        waits = {"connect_timeout": max(2, round(timeout_s)), "tcp_user_timeout": round(timeout_s * 1000)}
        beside = {"application_name": "refold", **waits, **ALIVE}
        self._arguments: dict[str, Any] = {name: v for name, v in beside.items() if name not in known}
        self._settings = {
            "schema": None if schema is None else '"' + schema.replace('"', '""') + '"',
            "statement_ms": str(round(statement_timeout_s * 1000)),
            "lock_ms": str(round(timeout_s * 1000)),
            "idle_ms": str(round((timeout_s + statement_timeout_s) * 1000)),
        }
        self._schema = schema
        self._problem: Exception | None = None
        """Why the last try to connect failed."""
        self._away_since = -math.inf
        """When the server was first found not to answer any more; it never did yet."""
        self._pool: ConnectionPool[PatientConnection] | None = None
        self._opening, self._closed = Lock(), False
        self._turns = FairSemaphore(pool_size)
        self._drained = 0.0
        """When all connections that there were had been given up."""
        renew_after_fork(self)
        self.ask(self._migrated)

    # Asking

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        """One statement, in one round trip."""
        return self.ask(lambda run: run(query, **values))

    def transact(self, work: Work[T], doubt: str = "") -> T:
        def whole(run: PostgresQueries) -> T:
            with run.whole():
                return work(run)

        return self.ask(whole, doubt=doubt)

    def ask(self, work: Work[T], patience_s: float | None = None, doubt: str = "") -> T:
        """Does the work on a connection, and again where the connection broke or the server restarts.

        Patience is for a connection, and then once more from the first trouble on. A server that never
        answered, or not for so long, is not waited for.

        Raises:
            StoreError: it could not be done in time, or the server refuses it; with `doubt` where it was cut
                off, and may have been done.
        """
        limit_s = self._limit_s if patience_s is None else patience_s
        patience_s = self.timeout_s if patience_s is None else patience_s
        until = time.monotonic() + patience_s
        again, wait_s = False, 0.005
        while True:
            with self._connection(until, doubt if again else "") as connection:
                connection.limit_s = limit_s
                try:
                    return work(PostgresQueries(connection, again=again))
                except psycopg.Error as error:
                    passing = connection.closed or connection.broken or error.sqlstate in PASSING
                    until = until if again else time.monotonic() + patience_s
                    if not passing or time.monotonic() + wait_s > until:
                        raise self._explained(error, doubt if passing else None) from error
                    if error.sqlstate not in CROSSED:
                        connection.close()
            again = True
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
            if connection.closed:
                self._drain(connection.made)

    @contextmanager
    def _connection(self, until: float, doubt: str) -> Iterator[PatientConnection]:
        turns = self._turns
        if not turns.take(until - time.monotonic()):
            raise self._unavailable(self._problem, f"all {self.pool_size} connections were in use", doubt)
        try:
            pool, connection = self._got(until, doubt)
            try:
                yield connection
            finally:
                pool.putconn(connection)
        finally:
            turns.give()

    def _got(self, until: float, doubt: str) -> "tuple[ConnectionPool[PatientConnection], PatientConnection]":
        """A connection, which is free or has to be made: whoever has a turn waits for nobody else."""
        before, wait_s = self._problem, 0.05
        while True:
            pool = self._opened()
            try:
                connection = pool.getconn(wait_s)
            except PoolClosed:  # by another thread, while this one asked
                continue
            except PoolTimeout:
                problem, now = self._problem, time.monotonic()
                if now > until or (problem not in (None, before) and self._is_hopeless(problem)):
                    raise self._unavailable(problem, "it gave no connection", doubt) from problem
                wait_s = min(2 * wait_s, 1.0, max(0.01, until - now))
            else:
                self._problem, self._away_since = None, math.inf
                return pool, connection

    def _is_hopeless(self, problem: Exception | None) -> bool:
        is_away = time.monotonic() - self._away_since > self.timeout_s
        return is_away and not any(word in str(problem) for word in BUSY)

    def _opened(self) -> "ConnectionPool[PatientConnection]":
        pool = self._pool
        if pool is None:
            with self._opening:
                self._demand_open()
                pool = self._pool = self._pool or self._new()
        return pool

    def _demand_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.shown} was closed here; open the store anew to use it")

    def _new(self) -> "ConnectionPool[PatientConnection]":
        logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())  # what fails is told by errors

        class Told(PatientConnection):
            """Tells why it cannot be opened, which the pool keeps for itself."""

            limit_s = self.timeout_s

            @classmethod
            def connect(cls, *args: Any, **kwargs: Any) -> Any:
                try:
                    connection = super().connect(*args, **kwargs)
                    try:
                        self.configure(connection)
                    except Exception:
                        connection.close()
                        raise
                    return connection
                except Exception as error:  # a name of a host may be more than the resolver bears
                    self._problem, self._away_since = error, min(self._away_since, time.monotonic())
                    raise

        return ConnectionPool(
            self.url,
            connection_class=Told,
            kwargs={"autocommit": True, **self._arguments},
            min_size=0,
            max_size=self.pool_size,
            reconnect_timeout=0,  # whoever asks has more patience than the pool
            num_workers=2,
            open=True,
        )

    def configure(self, connection: PatientConnection) -> None:
        PostgresQueries(connection)("configure", **self._settings)

    @property
    def beside(self) -> dict[str, Any]:
        """What a pool of another kind connects with, to the same database and schema."""
        schema = str(self._settings["schema"]).replace("\\", "\\\\").replace(" ", "\\ ")
        path = {} if self._schema is None else {"options": f"{self._options} -c search_path={schema}".strip()}
        return {"conninfo": self.url, "kwargs": {**self._arguments, **path}}

    def alone(self) -> PatientConnection:
        """A connection beside the pool, to listen on."""
        self._demand_open()
        connection = PatientConnection.connect(self.url, autocommit=True, **self._arguments)
        connection.limit_s = self.timeout_s
        return connection

    def _drain(self, made: float) -> None:
        """What broke one connection, made then, broke others: all that there are make way for new ones."""
        with self._opening:
            pool = self._pool if made > self._drained else None  # or else that was done already
            if pool is not None:
                self._drained = time.monotonic()
        if pool is not None:
            pool.drain()

    def close(self) -> None:
        """For good: whoever asks after that is refused."""
        with self._opening:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(CLOSE_S)

    def after_fork(self) -> None:
        """Connections must not cross a fork of the process; the child opens its own."""
        if self._pool is not None:
            self._pool._closed = True  # so that it is never closed here: it is the parent's
            _abandoned.append(self._pool)
        self._pool, self._opening, self._turns = None, Lock(), FairSemaphore(self.pool_size)

    # The schema

    def _migrated(self, run: PostgresQueries) -> None:
        self._demand_server(run)
        if self._version(run) != (len(migrations("postgres")), FORMAT):
            with run.whole():
                self._migrate(run)

    def _demand_server(self, run: PostgresQueries) -> None:
        info = run._connection.info
        if info.server_version < OLDEST_SERVER * 10_000:
            raise StoreError(f"{self.shown} is older than PostgreSQL {OLDEST_SERVER}; upgrade the server")
        encoding = info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreError(f"{self.shown} has the encoding {encoding}; create a database with UTF8")

    def _migrate(self, run: PostgresQueries) -> None:
        run.take_time()
        try:
            run("lock_schema")
        except psycopg.errors.LockNotAvailable as error:
            problem = f"a migration is under way, and was not done after {self.timeout_s:g} s"
            raise StoreError(f"{self.shown}: {problem}; open it again later") from error
        run("lift_lock_timeout")
        if self._schema is not None and not run("has_namespace", name=self._schema)[0][0]:
            run._connection.execute(f"CREATE SCHEMA {self._settings['schema']}".encode())
        version, _ = self._version(run)
        for step in migrations("postgres")[version:]:
            run._connection.execute(step.encode())
        for query in ("create_schema", "clear_schema"):
            run(query)
        run("set_schema", version=len(migrations("postgres")), format=FORMAT)

    def _version(self, run: PostgresQueries) -> tuple[int, int]:
        """Of the schema and of the format.

        Raises:
            NewerError: only a newer refold knows one of them.
        """
        rows = run("get_schema") if run("has_schema")[0][0] else []
        version, format = rows[0] if rows else (0, 0)
        known = len(migrations("postgres"))
        if version > known or format > FORMAT:
            raise NewerError(
                f"{self.shown} was written by a newer refold (schema {version}, format {format}; this one"
                f" knows {known} and {FORMAT}). Upgrade refold to open it; nothing was changed."
            )
        return version, format

    # Errors

    def _unavailable(self, problem: Exception | None, otherwise: str, doubt: str) -> StoreError:
        if problem is None:
            advice = "retry, or give the store a larger pool_size or timeout_s"
            return StoreError(f"{self.shown}: {otherwise} for {self.timeout_s:g} s; {advice}{doubt}")
        return StoreError(
            f"{self.shown} cannot be reached: {_line(problem)}; check the URL and the server{doubt}"
        )

    def _explained(self, error: psycopg.Error, lost: str | None) -> StoreError:
        """`lost`: the connection was, and what is in doubt now."""
        match error:
            case psycopg.errors.QueryCanceled():
                advice = "took too long and was stopped; retry, or raise statement_timeout_s"
            case psycopg.errors.LockNotAvailable():
                held = "somebody else holds the conversation for too long, or a migration is under way"
                advice = f"{held}; retry, or raise timeout_s"
            case psycopg.errors.OutOfMemory():
                full = "the server has no room, most often for locks"
                advice = f"{full}; retry, or raise its max_locks_per_transaction{lost or ''}"
            case psycopg.errors.InsufficientPrivilege():
                advice = "this user may not do that; grant it the rights that docs/stores/postgresql.md names"
            case psycopg.errors.DiskFull():
                advice = "the server's disk is full; free some space and retry"
            case _ if lost is not None:
                advice = f"the connection was lost and did not come back in time{lost}"
            case _:
                advice = "this is not what refold expects of its tables"
        return StoreError(f"{self.shown}: {_line(error)}: {advice}")


OPTIONS = (
    "refold's own options are pool_size, timeout_s, statement_timeout_s and schema; all others are libpq's,"
    " such as sslmode, host or target_session_attrs"
)


def shown(url: str) -> str:
    """A URL for people to read: without the user's name, password and all options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _unfit(schema: str) -> str:
    """What is wrong with the name of a schema, if anything is."""
    if not 0 < len(schema.encode()) <= LONGEST_NAME:
        return f"is empty or longer than {LONGEST_NAME} bytes"
    if "\0" in schema:
        return "has a NUL in it"
    return "$user is none, but whoever asks" if schema == "$user" else ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Forked(Protocol):
    def after_fork(self) -> None:
        """Is called in a new process, before anything else happens there."""


_forked: WeakSet[Forked] = WeakSet()
_abandoned: list[Any] = []


def renew_after_fork(one: Forked) -> None:
    _watch_forks()
    _forked.add(one)


@cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew)


def _renew() -> None:
    for one in list(_forked):
        one.after_fork()


class FairSemaphore:
    def __init__(self, many: int) -> None:
        self._free, self._lock = many, Lock()
        self._waiting: deque[Lock] = deque()

    def take(self, seconds: float) -> bool:
        """Whether it came in that time."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            mine = Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            came = mine.acquire(timeout=max(0.0, seconds))
        except BaseException:  # Ctrl-C, where one waits longest
            if not self._leave(mine):
                self.give()
            raise
        return came or not self._leave(mine)

    def _leave(self, mine: Lock) -> bool:
        """Whether it was still waited for, and not given just now."""
        with self._lock:
            is_waiting = mine in self._waiting
            if is_waiting:
                self._waiting.remove(mine)
            return is_waiting

    def give(self) -> None:
        """To whoever waits longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
