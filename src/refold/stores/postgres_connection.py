"""One connection to PostgreSQL: its named queries, its time limit, and what its errors mean."""

from typing import Any, TypeVar

from refold.core.errors import SettingError, StoreError
from refold.stores.sql import queries

try:
    import psycopg
    from psycopg.abc import PQGen
except ImportError as error:
    raise SettingError("store postgresql://", 'needs psycopg: pip install "refold[postgres]"') from error

Answer = TypeVar("Answer")

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


class PatientConnection(psycopg.Connection[tuple[Any, ...]]):
    """Gives up when the server stops answering, as behind a proxy that hangs."""

    limit_s: float | None = None
    """The time limit of one statement, round trip included."""

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


def is_away(error: Exception) -> bool:
    """The server starts, stops, is full or is a replica: it may answer another connection soon."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return error.sqlstate in AWAY_STATES
    return any(text in str(error) for text in AWAY_MESSAGES)


def explained(shown: str, error: psycopg.Error, doubt: str | None) -> StoreError:
    """`doubt` is given if the connection was lost: what to add to the message."""
    advice = ADVICE.get(type(error))
    if advice is None and doubt is not None:
        advice = "the connection was lost and not restored in time"
    elif advice is None:
        advice = "the tables are not as refold expects them"
    return StoreError(f"{shown}: {one_line(error)}: {advice}{doubt or ''}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
