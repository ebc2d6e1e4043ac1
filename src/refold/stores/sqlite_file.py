"""A SQLite file: one connection for writing, one for reading; its errors as `StoreError`."""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, TypeAlias
from weakref import WeakSet

import apsw

from refold.core.codec import FORMAT
from refold.core.errors import CorruptError, RefoldError, StoreError
from refold.stores.sql import migrations, queries, require_known

LogIdentity: TypeAlias = tuple[int, int, int] | None
"""Device and inode of a write-ahead log, and the inode of its database."""


class SQLiteQueries:
    """Runs named queries on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._sql = queries("sqlite")

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        return self._connection.execute(self._sql[query], values).fetchall()

    def plain(self, text: str) -> list[Any]:
        return self._connection.execute(text).fetchall()

    @property
    def changes(self) -> int:
        """Rows changed by this connection so far."""
        return self._connection.total_changes()


class SQLiteFile:
    """Opened when first used, and again after a fork of the process."""

    def __init__(self, path: Path, synchronous: str, timeout_s: float) -> None:
        self.path = path
        self.synchronous = synchronous
        self.timeout_s = timeout_s
        self.writing = RLock()
        self.reading = RLock()
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._pid = os.getpid()
        self._log_path = f"{path}-wal"
        self._log: LogIdentity = None
        self._level = synchronous
        """The writer's current `PRAGMA synchronous`."""
        _watch_forks()
        with _forking:
            _files.add(self)

    @contextmanager
    def write(self, *, durable: bool = True, wait: bool | None = None) -> Iterator[SQLiteQueries]:
        self.renew()
        with self.transaction(durable=durable, wait=wait) as run:
            yield run

    @contextmanager
    def transaction(self, *, durable: bool = True, wait: bool | None = None) -> Iterator[SQLiteQueries]:
        """One transaction. By default, one that is not durable fails at once where the file is locked."""
        with self.writing, _explained_errors(self.path):
            self._after_fork()
            if self._writer is None:
                self._writer = self._connect()
                self._level = self.synchronous
            connection = self._writer
            level = self.synchronous if durable else "normal"
            if level != self._level:
                connection.execute(f"PRAGMA synchronous = {level}")
                self._level = level
            self._begin(connection, wait=durable if wait is None else wait)
            self._log = log = self._log or self._identity()
            try:
                yield SQLiteQueries(connection)
                connection.execute("COMMIT")
                if log != self._identity():
                    raise StoreError(f"{self.path} was closed by another SQLite in this process; retry")
            except BaseException:
                _roll_back(connection)
                raise

    @contextmanager
    def read(self) -> Iterator[SQLiteQueries]:
        """All queries in the block see the same snapshot of the file."""
        self.renew()
        with self.reading, _explained_errors(self.path):
            self._after_fork()
            if self._reader is None:
                self._reader = self._connect()
            connection = self._reader
            connection.execute("BEGIN")
            self._log = self._log or self._identity()
            try:
                yield SQLiteQueries(connection)
            finally:
                _roll_back(connection)

    def renew(self) -> None:
        """Reopens the file if its write-ahead log was replaced. The caller must not hold a lock.

        A second SQLite library in this process, such as Python's own, deletes the log when it closes the
        file, because the two do not see each other's locks; later commits to the deleted log would be lost.
        Using two libraries on one file at the same moment is never safe.
        """
        if self._log is not None and self._log != self._identity():
            _close_all(self.path)
            _release_all()

    def _identity(self) -> LogIdentity:
        try:
            log = os.stat(self._log_path)
            file = os.stat(self.path)
        except OSError:
            return None
        return log.st_dev, log.st_ino, file.st_ino

    def _begin(self, connection: apsw.Connection, *, wait: bool) -> None:
        if wait:
            connection.execute("BEGIN IMMEDIATE")
            return
        connection.setbusytimeout(0)
        try:
            connection.execute("BEGIN IMMEDIATE")
        finally:
            connection.setbusytimeout(self._wait_ms)

    @property
    def _wait_ms(self) -> int:
        return int(min(self.timeout_s, 1e6) * 1000)

    def _after_fork(self) -> None:
        """Handles a fork that ran no `os.register_at_fork` hook: the child opens its own connections."""
        if self._pid != os.getpid():
            self._abandoned = (self._writer, self._reader)  # closing them would drop the parent's locks
            self._writer = self._reader = None
            self._pid = os.getpid()

    def _connect(self) -> apsw.Connection:
        connection = self._open()
        try:
            connection.setbusytimeout(self._wait_ms)
            known = len(migrations("sqlite")), FORMAT
            version = self._version(SQLiteQueries(connection))  # before anything is written
            self._use_wal(connection)
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute(f"PRAGMA synchronous = {self.synchronous}")
            if version != known:
                self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self) -> apsw.Connection:
        try:
            if not self.path.is_dir():
                return apsw.Connection(str(self.path))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{str(self.path)!r} is not a valid file name ({error}); use another name"
            ) from error
        raise StoreError(f"{self.path} is a folder; name a file in it, as in sqlite:///{self.path}/refold.db")

    def _use_wal(self, connection: apsw.Connection) -> None:
        """Retries while another process opens the same new file; SQLite itself does not wait here."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                with suppress(apsw.ReadOnlyError):  # the file can still be read
                    connection.execute("PRAGMA journal_mode = WAL")
                return
            except apsw.BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _migrate(self, connection: apsw.Connection) -> None:
        run = SQLiteQueries(connection)
        steps = migrations("sqlite")
        connection.execute("BEGIN IMMEDIATE")
        try:
            version, _ = self._version(run)
            for step in steps[version:]:
                connection.execute(step)
            for query in ("create_schema", "clear_schema"):
                run(query)
            run("set_schema", version=len(steps), format=FORMAT)
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise

    def _version(self, run: SQLiteQueries) -> tuple[int, int]:
        """Of the schema and of the format.

        Raises:
            NewerError: only a newer refold knows one of them.
        """
        rows = run("get_schema") if run("has_schema")[0][0] else []
        version, format = rows[0] if rows else (0, 0)
        require_known(str(self.path), version, len(migrations("sqlite")), format)
        return version, format

    def purge_log(self) -> None:
        """Removes erased words from the write-ahead log."""
        with self.writing, self.reading, _explained_errors(self.path):
            done = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall() if self._writer else []
            if done and done[0][0]:
                raise StoreError(
                    f"Erased, but the text remains in {self.path}-wal while another process reads the file;"
                    " erase it again after that"
                )

    def close(self) -> None:
        with self.writing, self.reading:
            stale = self._log is not None and self._log != self._identity()
            for connection in (self._writer, self._reader):
                if connection is not None and self._pid == os.getpid():
                    if stale:  # a deleted log must not overwrite newer commits
                        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                    connection.close()
            self._writer = self._reader = self._log = None


def is_foreign(path: Path) -> bool:
    """True for a database of another program. Nothing is written to it."""
    try:
        with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
            names = [str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master")]
    except apsw.Error:
        return False  # opening it as a store explains the error
    return bool(names) and not any(name.startswith("refold_") for name in names)


def _roll_back(connection: apsw.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


_files: WeakSet[SQLiteFile] = WeakSet()
_forking = RLock()
_held: list[SQLiteFile] = []


@cache
def _watch_forks() -> None:
    """Closes all files before a fork: if connections or SQLite's knowledge of locks crossed it, the parent's
    last close would delete the log that the child writes to.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_close_all, after_in_parent=_release_all, after_in_child=_release_all)


def _close_all(path: Path | None = None) -> None:
    """Closes all files, or one, and keeps them locked until `_release_all`."""
    _forking.acquire()
    for file in [file for file in _files if path in (None, file.path)]:
        file.writing.acquire()
        file.reading.acquire()
        _held.append(file)
    for file in _held:
        with suppress(apsw.Error):
            file.close()


def _release_all() -> None:
    while _held:
        file = _held.pop()
        file.reading.release()
        file.writing.release()
    _forking.release()


@contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except RefoldError:
        raise
    except apsw.Error as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: apsw.Error) -> StoreError:
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StoreError(f"{path} is locked by another process; retry, or find out which one")
        case apsw.FullError():
            return StoreError(f"The disk with {path} is full; free some space and retry")
        case apsw.ReadOnlyError() | apsw.PermissionsError():
            return StoreError(f"{path} cannot be written: the file or its folder is read-only for this user")
        case apsw.CantOpenError():
            return StoreError(
                f"{path} cannot be opened; check that its folder exists and that this user may write there"
            )
        case apsw.CorruptError() | apsw.NotADBError():
            return CorruptError(f"{path} is damaged or not a SQLite database ({error}); restore a backup")
        case apsw.IOError():
            return StoreError(f"{path} could not be read or written ({error}); check the disk and retry")
    return StoreError(f"SQLite and {path}: {error}")
