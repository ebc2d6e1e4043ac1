"""A SQLite file with a connection for writing and one for reading, and its errors explained."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import apsw

from refold.core.codec import FORMAT
from refold.core.errors import CorruptError, NewerError, RefoldError, StoreError
from refold.stores.sql import migrations, queries


class Run:
    """Runs named queries on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection, self._sql = connection, queries("sqlite")

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        return self._connection.execute(self._sql[query], values).fetchall()

    def plain(self, text: str) -> list[Any]:
        return self._connection.execute(text).fetchall()


class SQLiteFile:
    """Opened when first used, and again by a process forked from the one that opened it."""

    def __init__(self, path: Path, synchronous: str, timeout_s: float) -> None:
        self.path, self.synchronous, self.timeout_s = path, synchronous, timeout_s
        self.writing, self._reading = RLock(), RLock()
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._pid = os.getpid()

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Run]:
        with self.writing, _told(self.path):
            self._after_fork()
            if self._writer is None:
                self._writer = self._connect()
            connection = self._writer
            connection.execute(f"PRAGMA synchronous = {self.synchronous if durable else 'normal'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Run(connection)
                connection.execute("COMMIT")
            except BaseException:
                if not connection.getautocommit():
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def read(self) -> Iterator[Run]:
        with self._reading, _told(self.path):
            self._after_fork()
            if self._reader is None:
                self._reader = self._connect()
            yield Run(self._reader)

    def _after_fork(self) -> None:
        """A connection must not cross a fork of the process; the child opens its own."""
        if self._pid != os.getpid():
            self._abandoned = (self._writer, self._reader)  # never closed: that would drop the parent's locks
            self._writer = self._reader = None
            self._pid = os.getpid()

    def _connect(self) -> apsw.Connection:
        if self.path.is_dir():
            raise StoreError(
                f"{self.path} is a folder; name a file in it, as in sqlite:///{self.path}/refold.db"
            )
        connection = apsw.Connection(str(self.path))
        try:
            connection.setbusytimeout(int(self.timeout_s * 1000))
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute(f"PRAGMA synchronous = {self.synchronous}")
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: apsw.Connection) -> None:
        run, steps = Run(connection), migrations("sqlite")
        if self._version(run) == (len(steps), FORMAT):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            version, format = self._version(run)
            if version > len(steps) or format > FORMAT:
                raise NewerError(
                    f"{self.path} was written by a newer refold (schema {version}, format {format}; this one"
                    f" knows {len(steps)} and {FORMAT}). Upgrade refold to open it; nothing was changed."
                )
            for step in steps[version:]:
                connection.execute(step)
            for query in ("create_schema", "clear_schema"):
                run(query)
            run("set_schema", version=len(steps), format=FORMAT)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _version(self, run: Run) -> tuple[int, int]:
        if not run("has_schema")[0][0]:
            return 0, 0
        rows = run("get_schema")
        return (rows[0][0], rows[0][1]) if rows else (0, 0)

    def shred(self) -> None:
        """Erased words must not linger in the write-ahead log."""
        with self.writing, self._reading, _told(self.path):
            if self._writer is not None:
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self.writing, self._reading:
            for connection in (self._writer, self._reader):
                if connection is not None and self._pid == os.getpid():
                    connection.close()
            self._writer = self._reader = None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns the engine's errors into ours, with what to do about them."""
    try:
        yield
    except RefoldError:
        raise
    except apsw.Error as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: apsw.Error) -> StoreError:
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StoreError(f"{path} is locked by another process; retry, or find who is writing to it")
        case apsw.FullError():
            return StoreError(f"The disk with {path} is full; free some space and retry")
        case apsw.ReadOnlyError() | apsw.PermissionsError():
            return StoreError(f"{path} cannot be written: the file or its folder is read-only for this user")
        case apsw.CantOpenError():
            return StoreError(f"{path} cannot be opened; does its folder exist, may this user write there?")
        case apsw.CorruptError() | apsw.NotADBError():
            return CorruptError(f"{path} is damaged or no SQLite database ({error}); restore a backup")
        case apsw.IOError():
            return StoreError(f"{path} could not be read or written ({error}); check the disk and retry")
    return StoreError(f"SQLite and {path}: {error}")
