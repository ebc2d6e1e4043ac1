"""Connections to PostgreSQL: a pool per process, retries while a server restarts, errors as `StoreError`."""

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
from refold.core.errors import SettingError, StoreError
from refold.stores.sql import migrations, queries, require_known
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
TRANSACTION_STATES = {"40001", "40P01", "53200"}
"""Serialization failure, deadlock, out of locks: retried on the same connection."""
TEMPORARY_STATES = TRANSACTION_STATES | {
    *("57P01", "57P02", "57P03", "57P05", "53300", "25006", "25P03", "26000")
}
"""These, and a server that starts, stops, has no free connection or is a replica."""
TEMPORARY_MESSAGES = (
    "the database system is",
    "too many",
    "connection slots",
    "unexpectedly",
    "reset by peer",
)
"""Connection errors, which have no state, while a server starts, stops or is full."""
KEEPALIVES_S = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
MAX_NAME_BYTES = 63
CLOSE_S = 1.0
"""How long `close` waits for connections that are being opened."""


class PatientConnection(psycopg.Connection[tuple[Any, ...]]):
    """Gives up when the server stops answering, as behind a proxy that hangs."""

    limit_s: float | None = None
    """The time limit of one statement, round trip included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.created = time.monotonic()

    def wait(self, gen: PQGen[Answer], interval: float = 0.1, timeout: float | None = None) -> Answer:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.limit_s)
        except psycopg.errors._WaitTimeout as error:
            self.close()
            raise psycopg.OperationalError(f"no answer within {self.limit_s:g} s") from error


class PostgresQueries:
    """Runs named queries on one connection."""

    def __init__(self, connection: PatientConnection, *, is_retry: bool = False) -> None:
        self.connection = connection
        self._sql = queries("postgres")
        self.is_retry = is_retry
        """An earlier try was interrupted, and may have been committed."""

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        cursor = self.connection.cursor(binary=True)
        cursor.execute(self._sql[query].encode(), values)
        return cursor.fetchall() if cursor.rownumber is not None else []

    def lift_timeouts(self) -> None:
        """For the rest of the transaction."""
        self("lift_timeout")
        self.connection.limit_s = None


class PostgresPool:
    """Opened when first used, and again after a fork of the process."""

    def __init__(
        self, url: str, pool_size: int, timeout_s: float, statement_timeout_s: float, schema: str | None
    ) -> None:
        self.shown = shown(url)
        where = f"store {self.shown!r}"
        require_between(where, 1, 1e6, pool_size=pool_size)
        require_between(where, 0.001, 1e6, timeout_s=timeout_s, statement_timeout_s=statement_timeout_s)
        if schema is not None and (problem := _name_problem(schema)):
            raise SettingError(where, f"schema {problem}: use another name, or leave it out; {OPTIONS}")
        try:
            known = conninfo_to_dict(url)
        except psycopg.Error as error:
            odd = re.search(r'query parameter: "([a-z_]+)"', "" if "password=" in url else str(error))
            problem = f"{odd[1]} is not an option" if odd else f"is not a PostgreSQL URL; {ENCODING_HELP}"
            raise SettingError(where, f"{problem}; {OPTIONS}") from None
        self.url = url
        self.pool_size = pool_size
        self.timeout_s = timeout_s
        self._limit_s = statement_timeout_s + timeout_s
        self._options = str(known.get("options") or os.environ.get("PGOPTIONS", ""))
        waits = {"connect_timeout": max(2, round(timeout_s)), "tcp_user_timeout": round(timeout_s * 1000)}
        defaults = {"application_name": "refold", **waits, **KEEPALIVES_S}
        self._arguments: dict[str, Any] = {name: v for name, v in defaults.items() if name not in known}
        self._settings = {
            "schema": None if schema is None else '"' + schema.replace('"', '""') + '"',
            "statement_ms": str(round(statement_timeout_s * 1000)),
            "lock_ms": str(round(timeout_s * 1000)),
            "idle_ms": str(round((timeout_s + statement_timeout_s) * 1000)),
        }
        self._schema = schema
        self._problem: Exception | None = None
        """Why the last connection attempt failed."""
        self._unreachable_since = -math.inf
        """-inf: it was never reached; inf: it is reachable."""
        self._pool: ConnectionPool[PatientConnection] | None = None
        self._opening = Lock()
        self._closed = False
        self._slots = FairSemaphore(pool_size)
        self._drained_at = 0.0
        renew_after_fork(self)
        self.run(self._check_schema)

    # Running queries

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        """One statement, in one round trip."""
        return self.run(lambda run: run(query, **values))

    def transact(self, work: Work[T], doubt: str = "") -> T:
        def transaction(run: PostgresQueries) -> T:
            with run.connection.transaction():
                return work(run)

        return self.run(transaction, doubt=doubt)

    def run(self, work: Work[T], patience_s: float | None = None, doubt: str = "") -> T:
        """Runs `work` on a connection, and retries after a broken connection or while the server restarts.

        Up to `patience_s` are spent on getting a connection, and again on retries after the first failure. A
        server that was never reached, or not for that long, is not waited for.

        Raises:
            StoreError: the work could not be done in time, or the server refuses it. The message ends with
                `doubt` if it was interrupted and may have been done.
        """
        limit_s = self._limit_s if patience_s is None else patience_s
        patience_s = self.timeout_s if patience_s is None else patience_s
        until = time.monotonic() + patience_s
        is_retry = False
        wait_s = 0.005
        while True:
            with self._connection(until, doubt if is_retry else "") as connection:
                connection.limit_s = limit_s
                try:
                    return work(PostgresQueries(connection, is_retry=is_retry))
                except psycopg.Error as error:
                    is_temporary = (
                        connection.closed or connection.broken or error.sqlstate in TEMPORARY_STATES
                    )
                    until = until if is_retry else time.monotonic() + patience_s
                    if not is_temporary or time.monotonic() + wait_s > until:
                        raise self._explained(error, doubt if is_temporary else None) from error
                    if error.sqlstate not in TRANSACTION_STATES:
                        connection.close()
            is_retry = True
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
            if connection.closed:
                self._drain(connection.created)

    @contextmanager
    def _connection(self, until: float, doubt: str) -> Iterator[PatientConnection]:
        slots = self._slots
        if not slots.acquire(until - time.monotonic()):
            raise self._unavailable(self._problem, f"all {self.pool_size} connections were in use", doubt)
        try:
            pool, connection = self._get(until, doubt)
            try:
                yield connection
            finally:
                pool.putconn(connection)
        finally:
            slots.release()

    def _get(self, until: float, doubt: str) -> "tuple[ConnectionPool[PatientConnection], PatientConnection]":
        """A free or a new connection. Whoever holds a slot competes with nobody for it."""
        before = self._problem
        wait_s = 0.05
        while True:
            pool = self._opened()
            try:
                connection = pool.getconn(wait_s)
            except PoolClosed:  # by another thread
                continue
            except PoolTimeout:
                problem = self._problem
                now = time.monotonic()
                if now > until or (problem not in (None, before) and self._is_hopeless(problem)):
                    raise self._unavailable(problem, "it gave no connection", doubt) from problem
                wait_s = min(2 * wait_s, 1.0, max(0.01, until - now))
            else:
                self._problem = None
                self._unreachable_since = math.inf
                return pool, connection

    def _is_hopeless(self, problem: Exception | None) -> bool:
        is_away = time.monotonic() - self._unreachable_since > self.timeout_s
        return is_away and not any(text in str(problem) for text in TEMPORARY_MESSAGES)

    def _opened(self) -> "ConnectionPool[PatientConnection]":
        pool = self._pool
        if pool is None:
            with self._opening:
                self._require_open()
                pool = self._pool = self._pool or self._new()
        return pool

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.shown} was closed; open the store again to use it")

    def _new(self) -> "ConnectionPool[PatientConnection]":
        logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())  # errors say what failed

        class PooledConnection(PatientConnection):
            """Records why it could not be opened, which the pool does not report."""

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
                except Exception as error:  # the resolver raises odd errors for odd host names
                    self._problem = error
                    self._unreachable_since = min(self._unreachable_since, time.monotonic())
                    raise

        return ConnectionPool(
            self.url,
            connection_class=PooledConnection,
            kwargs={"autocommit": True, **self._arguments},
            min_size=0,
            max_size=self.pool_size,
            reconnect_timeout=0,  # `run` retries, not the pool
            num_workers=2,
            open=True,
        )

    def configure(self, connection: PatientConnection) -> None:
        PostgresQueries(connection)("configure", **self._settings)

    @property
    def connect_args(self) -> dict[str, Any]:
        """For a pool of another kind, to the same database and schema."""
        schema = str(self._settings["schema"]).replace("\\", "\\\\").replace(" ", "\\ ")
        path = {} if self._schema is None else {"options": f"{self._options} -c search_path={schema}".strip()}
        return {"conninfo": self.url, "kwargs": {**self._arguments, **path}}

    def connect(self) -> PatientConnection:
        """A connection outside the pool, to listen on."""
        self._require_open()
        connection = PatientConnection.connect(self.url, autocommit=True, **self._arguments)
        connection.limit_s = self.timeout_s
        return connection

    def _drain(self, created: float) -> None:
        """Replaces all connections after one of them broke: the others most likely did too."""
        with self._opening:
            pool = self._pool if created > self._drained_at else None
            if pool is not None:
                self._drained_at = time.monotonic()
        if pool is not None:
            pool.drain()

    def close(self) -> None:
        """Closes the pool for good."""
        with self._opening:
            self._closed = True
            pool = self._pool
            self._pool = None
        if pool is not None:
            pool.close(CLOSE_S)

    def after_fork(self) -> None:
        """Connections must not cross a fork of the process; the child opens its own."""
        if self._pool is not None:
            self._pool._closed = True  # so that the child never closes it
            _abandoned.append(self._pool)
        self._pool = None
        self._opening = Lock()
        self._slots = FairSemaphore(self.pool_size)

    # The schema

    def _check_schema(self, run: PostgresQueries) -> None:
        self._require_server(run)
        if self._version(run) != (len(migrations("postgres")), FORMAT):
            with run.connection.transaction():
                self._migrate(run)

    def _require_server(self, run: PostgresQueries) -> None:
        info = run.connection.info
        if info.server_version < OLDEST_SERVER * 10_000:
            raise StoreError(f"{self.shown} is older than PostgreSQL {OLDEST_SERVER}; upgrade the server")
        encoding = info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreError(f"{self.shown} uses the encoding {encoding}; create a database with UTF8")

    def _migrate(self, run: PostgresQueries) -> None:
        run.lift_timeouts()
        try:
            run("lock_schema")
        except psycopg.errors.LockNotAvailable as error:
            problem = f"another migration is running and did not finish within {self.timeout_s:g} s"
            raise StoreError(f"{self.shown}: {problem}; retry later") from error
        run("lift_lock_timeout")
        if self._schema is not None and not run("has_namespace", name=self._schema)[0][0]:
            run.connection.execute(f"CREATE SCHEMA {self._settings['schema']}".encode())
        version, _ = self._version(run)
        for step in migrations("postgres")[version:]:
            run.connection.execute(step.encode())
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
        require_known(self.shown, version, len(migrations("postgres")), format)
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
        """`lost` is given if the connection was lost: the doubt to add to the message."""
        match error:
            case psycopg.errors.QueryCanceled():
                advice = "took too long and was stopped; retry, or raise statement_timeout_s"
            case psycopg.errors.LockNotAvailable():
                held = "another transaction holds the conversation for too long, or a migration is running"
                advice = f"{held}; retry, or raise timeout_s"
            case psycopg.errors.OutOfMemory():
                full = "the server is out of memory, most often for locks"
                advice = f"{full}; retry, or raise its max_locks_per_transaction{lost or ''}"
            case psycopg.errors.InsufficientPrivilege():
                advice = "this user lacks a privilege; grant those listed in docs/stores/postgresql.md"
            case psycopg.errors.DiskFull():
                advice = "the server's disk is full; free some space and retry"
            case _ if lost is not None:
                advice = f"the connection was lost and not restored in time{lost}"
            case _:
                advice = "the tables are not as refold expects them"
        return StoreError(f"{self.shown}: {_line(error)}: {advice}")


OPTIONS = (
    "refold's own options are pool_size, timeout_s, statement_timeout_s and schema; all others are libpq's,"
    " such as sslmode, host or target_session_attrs"
)


def shown(url: str) -> str:
    """A URL to show: without user name, password and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _name_problem(schema: str) -> str:
    """What is wrong with the name of a schema; empty if nothing is."""
    if not 0 < len(schema.encode()) <= MAX_NAME_BYTES:
        return f"is empty or longer than {MAX_NAME_BYTES} bytes"
    if "\0" in schema:
        return "has a NUL in it"
    return "must not be $user, which differs for each user" if schema == "$user" else ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Forked(Protocol):
    def after_fork(self) -> None:
        """Runs in the child, before anything else."""


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
    """Serves those who wait in the order in which they came."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._lock = Lock()
        self._waiting: deque[Lock] = deque()

    def acquire(self, seconds: float) -> bool:
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            mine = Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            is_acquired = mine.acquire(timeout=max(0.0, seconds))
        except BaseException:  # such as Ctrl-C
            if not self._leave(mine):
                self.release()
            raise
        return is_acquired or not self._leave(mine)

    def _leave(self, mine: Lock) -> bool:
        """True if the waiter was still queued."""
        with self._lock:
            is_waiting = mine in self._waiting
            if is_waiting:
                self._waiting.remove(mine)
            return is_waiting

    def release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
