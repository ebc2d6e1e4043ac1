"""Connections to PostgreSQL: the URL's options, psycopg's pool, retries, and errors as `StoreError`."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from refold.core.errors import SettingError, StoreError
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.stores.sql import queries
from refold.stores.url import ANY, ENCODING_HELP, UrlOption, parse_options, require_between, split_url

try:
    import psycopg
    from psycopg.abc import PQGen
    from psycopg.conninfo import conninfo_to_dict
    from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout
except ImportError as error:
    raise SettingError("store postgresql://", 'needs psycopg: pip install "refold[postgres]"') from error

T = TypeVar("T")

RECONNECT_S = 0.1
"""How often the pool tries to connect while somebody waits."""
CLOSE_S = 1.0
"""How long `close` waits for connections that are being opened."""
KEEPALIVES_S = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
MAX_NAME_BYTES = 63
OWN_OPTIONS = {
    "pool_size": UrlOption(r"-?\d+", "a number", int),
    "timeout_s": UrlOption(r"-?\d*\.?\d+", "a number of seconds", float),
    "statement_timeout_s": UrlOption(r"-?\d*\.?\d+", "a number of seconds", float),
    "schema": ANY,
}
OPTIONS_HELP = (
    "refold's own options are pool_size, timeout_s, statement_timeout_s and schema; all others are libpq's,"
    " such as sslmode, host or target_session_attrs"
)
TRANSACTION_STATES = {"40001", "40P01", "53200"}
"""Serialization failure, deadlock, out of locks: retried on the same connection."""
AWAY_STATES = {"57P01", "57P02", "57P03", "57P05", "53300", "25006", "25P03", "26000"}
"""The server starts, stops, has no free connection or is a replica: retried on a new connection."""
AWAY_MESSAGES = ("the database system is", "too many", "connection slots", "unexpectedly", "reset by peer")
"""Connection errors, which have no state, while a server starts, stops or is full."""
ADVICE: dict[type[psycopg.Error], str] = {
    psycopg.errors.QueryCanceled: "took too long and was stopped; retry, or raise statement_timeout_s",
    psycopg.errors.LockNotAvailable: "another transaction holds the conversation for too long, or a migration"
    " is running; retry, or raise timeout_s",
    psycopg.errors.OutOfMemory: "the server is out of memory, most often for locks; retry, or raise its"
    " max_locks_per_transaction",
    psycopg.errors.InsufficientPrivilege: "this user lacks a privilege; grant those listed in"
    " docs/stores/postgresql.md",
    psycopg.errors.DiskFull: "the server's disk is full; free some space and retry",
}
logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())  # errors say what failed


class PatientConnection(psycopg.Connection[tuple[Any, ...]]):
    """Gives up when the server stops answering, as behind a proxy that hangs."""

    limit_s: float | None = None
    """The time limit of one statement, round trip included."""

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
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


class PostgresOptions:
    """Where a store is, and how it is used.

    Raises:
        SettingError: an option is not known, or its value is not allowed.
    """

    def __init__(
        self, url: str, pool_size: int, timeout_s: float, statement_timeout_s: float, schema: str | None
    ) -> None:
        self.shown = shown_host(url)
        where = f"store {self.shown!r}"
        require_between(where, 1, 1e6, pool_size=pool_size)
        require_between(where, 0.001, 1e6, timeout_s=timeout_s, statement_timeout_s=statement_timeout_s)
        if schema is not None and not _is_schema_name(schema):
            problem = (
                f"has 1 to {MAX_NAME_BYTES} bytes, no NUL, and is not $user, which differs for each user"
            )
            raise SettingError(where, f"schema={schema!r} is not allowed: a schema {problem}; {OPTIONS_HELP}")
        try:
            known = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            odd = re.search(r'query parameter: "([a-z_]+)"', "" if "password=" in url else str(error))
            problem = f"{odd[1]} is not an option" if odd else f"is not a PostgreSQL URL; {ENCODING_HELP}"
            raise SettingError(where, f"{problem}; {OPTIONS_HELP}") from None
        self.url = url
        self.schema = schema
        self.pool_size = pool_size
        self.timeout_s = timeout_s
        self.limit_s = statement_timeout_s + timeout_s
        """Of one statement, with the round trip and the wait for a lock."""
        waits = {"connect_timeout": max(2, round(timeout_s)), "tcp_user_timeout": round(timeout_s * 1000)}
        defaults = {"application_name": "refold", **waits, **KEEPALIVES_S}
        self.arguments: dict[str, Any] = {name: v for name, v in defaults.items() if name not in known}
        """For libpq, besides the URL."""
        self.settings = {
            "schema": None if schema is None else '"' + schema.replace('"', '""') + '"',
            "statement_ms": str(round(statement_timeout_s * 1000)),
            "lock_ms": str(round(timeout_s * 1000)),
            "idle_ms": str(round(self.limit_s * 1000)),
        }
        """For the query that configures a session."""
        self._options = str(known.get("options") or os.environ.get("PGOPTIONS", ""))

    @property
    def connect_args(self) -> dict[str, Any]:
        """For a pool of another kind, to the same database and schema."""
        arguments = dict(self.arguments)
        if self.schema is not None:
            schema = str(self.settings["schema"]).replace("\\", "\\\\").replace(" ", "\\ ")
            arguments["options"] = f"{self._options} -c search_path={schema}".strip()
        return {"conninfo": self.url, "kwargs": arguments}


def split_options(url: str) -> tuple[str, dict[str, Any]]:
    """Splits the URL for libpq from refold's options.

    Raises:
        SettingError: the URL is ambiguous, or the value of an option is not allowed.
    """
    plain, mark, _ = url.partition("?")
    pairs = split_url(url).query.split("&")
    ours = [pair for pair in pairs if pair.partition("=")[0] in OWN_OPTIONS]
    theirs = [pair for pair in pairs if pair and pair not in ours]
    options = parse_options(f"store {shown_host(url)!r}", "&".join(ours), OWN_OPTIONS)
    return plain + mark + "&".join(theirs), options


def shown_host(url: str) -> str:
    """A URL to show: without user name, password and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


Work: TypeAlias = Callable[[PostgresQueries], T]


class PostgresPool:
    """Opened when first used, and again after a fork of the process."""

    def __init__(self, options: PostgresOptions) -> None:
        self.options = options
        self.shown = options.shown
        self.timeout_s = options.timeout_s
        self._is_away = True
        """The server was never reached, or not for `timeout_s`: it is not waited for."""
        self._pool: ConnectionPool[PatientConnection] | None = None
        self._opening = Lock()
        self._closed = False
        renew_after_fork(self)

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        """One statement, in one round trip."""
        return self.run(lambda run: run(query, **values))

    def transact(self, work: Work[T], doubt: str = "") -> T:
        def transaction(run: PostgresQueries) -> T:
            with run.connection.transaction():
                return work(run)

        return self.run(transaction, doubt)

    def run(self, work: Work[T], doubt: str = "") -> T:
        """Runs `work` on a connection, and retries after a lost connection or while the server restarts.

        Up to `timeout_s` are spent on getting a connection, and again on retries after the first failure.

        Raises:
            StoreError: the work could not be done in time, or the server refuses it. The message ends with
                `doubt` if it was interrupted and may have been done.
        """
        until = time.monotonic() + self.timeout_s
        is_retry = False
        wait_s = 0.005
        while True:
            with self._connection(until - time.monotonic(), doubt if is_retry else "") as connection:
                connection.limit_s = self.options.limit_s
                try:
                    return work(PostgresQueries(connection, is_retry=is_retry))
                except psycopg.Error as error:
                    is_lost = connection.closed or _is_away(error)
                    is_temporary = is_lost or error.sqlstate in TRANSACTION_STATES
                    until = until if is_retry else time.monotonic() + self.timeout_s
                    if not is_temporary or time.monotonic() + wait_s > until:
                        raise self._explained(error, doubt if is_temporary else None) from error
                    if is_lost:
                        connection.close()
            is_retry = True
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
            if is_lost:  # the others most likely are too
                self._opened().drain()

    @contextmanager
    def _connection(self, wait_s: float, doubt: str) -> Iterator[PatientConnection]:
        pool = self._opened()
        if self._is_away:
            problem = self._problem()
            if problem is not None and not _is_away(problem):
                raise self._unavailable(problem, doubt) from problem
        try:
            connection = pool.getconn(max(0.001, wait_s))
        except PoolClosed:
            raise self._was_closed() from None
        except PoolTimeout:
            problem = self._problem(connect_timeout=2)
            self._is_away = problem is not None
            raise self._unavailable(problem, doubt) from problem
        self._is_away = False
        try:
            yield connection
        finally:
            pool.putconn(connection)

    def _opened(self) -> "ConnectionPool[PatientConnection]":
        with self._opening:
            if self._closed:
                raise self._was_closed()
            if self._pool is None:
                self._pool = ConnectionPool(
                    self.options.url,
                    connection_class=PatientConnection,
                    kwargs={"autocommit": True, **self.options.arguments},
                    configure=self.configure,
                    min_size=0,
                    max_size=self.options.pool_size,
                    reconnect_timeout=RECONNECT_S,
                    reconnect_failed=_reconnect,
                    open=True,
                )
            return self._pool

    def configure(self, connection: PatientConnection) -> None:
        connection.limit_s = self.timeout_s
        PostgresQueries(connection)("configure", **self.options.settings)

    def _problem(self, **arguments: Any) -> Exception | None:
        """Why no connection can be opened now."""
        arguments = {"autocommit": True, **self.options.arguments, **arguments}
        try:
            with PatientConnection.connect(self.options.url, **arguments) as connection:
                self.configure(connection)
        except Exception as error:  # the resolver raises odd errors for odd host names
            return error
        return None

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
            keep_for_parent(self._pool)
        self._pool = None
        self._opening = Lock()

    def _was_closed(self) -> StoreError:
        return StoreError(f"{self.shown} was closed; open the store again to use it")

    def _unavailable(self, problem: Exception | None, doubt: str) -> StoreError:
        if problem is None:
            used = f"none of its {self.options.pool_size} connections was free for {self.timeout_s:g} s"
            advice = "retry, or give the store a larger pool_size or timeout_s"
            return StoreError(f"{self.shown}: {used}; {advice}{doubt}")
        return StoreError(
            f"{self.shown} cannot be reached: {_one_line(problem)}; check the URL and the server{doubt}"
        )

    def _explained(self, error: psycopg.Error, doubt: str | None) -> StoreError:
        """`doubt` is given if the connection was lost: what to add to the message."""
        advice = ADVICE.get(type(error))
        if advice is None and doubt is not None:
            advice = "the connection was lost and not restored in time"
        elif advice is None:
            advice = "the tables are not as refold expects them"
        return StoreError(f"{self.shown}: {_one_line(error)}: {advice}{doubt or ''}")


def _is_schema_name(name: str) -> bool:
    return 0 < len(name.encode()) <= MAX_NAME_BYTES and "\0" not in name and name != "$user"


def _reconnect(pool: "ConnectionPool[Any]") -> None:
    """Tries to connect again, which the pool itself does only for whoever comes next."""
    if pool.get_stats().get("requests_waiting"):
        pool.check()


def _is_away(error: Exception) -> bool:
    """The server starts, stops, is full or is a replica: it may answer another connection soon."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return error.sqlstate in AWAY_STATES
    return any(text in str(error) for text in AWAY_MESSAGES)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
