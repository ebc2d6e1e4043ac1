"""Connections to PostgreSQL: psycopg's pool, retries after a lost connection, errors as `StoreError`."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from refold.core.errors import SettingError, StoreError
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.stores.postgres_connection import (
    TRANSACTION_STATES,
    PatientConnection,
    PostgresQueries,
    explained,
    is_away,
    one_line,
)
from refold.stores.postgres_url import PostgresOptions

try:
    import psycopg
    from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout
except ImportError as error:
    raise SettingError("store postgresql://", 'needs psycopg: pip install "refold[postgres]"') from error

T = TypeVar("T")
Work: TypeAlias = Callable[[PostgresQueries], T]

RECONNECT_S = 0.1
"""How often the pool tries to connect while somebody waits."""
CLOSE_S = 1.0
"""How long `close` waits for connections that are being opened."""
logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())  # errors say what failed


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

        return self.run(transaction, doubt=doubt)

    def run(self, work: Work[T], patience_s: float | None = None, doubt: str = "") -> T:
        """Runs `work` on a connection, and retries after a lost connection or while the server restarts.

        Up to `patience_s` are spent on getting a connection, and again on retries after the first failure.

        Raises:
            StoreError: the work could not be done in time, or the server refuses it. The message ends with
                `doubt` if it was interrupted and may have been done.
        """
        limit_s = self.options.limit_s if patience_s is None else patience_s
        patience_s = self.timeout_s if patience_s is None else patience_s
        until = time.monotonic() + patience_s
        is_retry = False
        wait_s = 0.005
        while True:
            with self._connection(until - time.monotonic(), doubt if is_retry else "") as connection:
                connection.limit_s = limit_s
                try:
                    return work(PostgresQueries(connection, is_retry=is_retry))
                except psycopg.Error as error:
                    is_lost = connection.closed or is_away(error)
                    is_temporary = is_lost or error.sqlstate in TRANSACTION_STATES
                    until = until if is_retry else time.monotonic() + patience_s
                    if not is_temporary or time.monotonic() + wait_s > until:
                        raise explained(self.shown, error, doubt if is_temporary else None) from error
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
            if problem is not None and not is_away(problem):
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

    def connect(self, **arguments: Any) -> PatientConnection:
        """A connection outside the pool, such as one to listen on."""
        if self._closed:
            raise self._was_closed()
        connection = PatientConnection.connect(
            self.options.url, autocommit=True, **(self.options.arguments | arguments)
        )
        try:
            self.configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _problem(self, **arguments: Any) -> Exception | None:
        """Why no connection can be opened now."""
        try:
            self.connect(**arguments).close()
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
            f"{self.shown} cannot be reached: {one_line(problem)}; check the URL and the server{doubt}"
        )


def _reconnect(pool: "ConnectionPool[Any]") -> None:
    """Tries to connect again, which the pool itself does only for whoever comes next."""
    if pool.get_stats().get("requests_waiting"):
        pool.check()
