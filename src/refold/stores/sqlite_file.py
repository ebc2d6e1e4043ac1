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

from refold.core.errors import CorruptError, StoreError
from refold.stores.sql import is_current, migrate, queries

LogIdentity: TypeAlias = tuple[int, int, int] | None
"""Device and inode of a write-ahead log, and the inode of its database."""


class SQLiteQueries:
    """One connection, and its named queries."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self._sql = queries("sqlite")

    def __call__(self, query: str, /, **values: Any) -> list[Any]:
        return self.connection.execute(self._sql[query], values).fetchall()


class SQLiteFile:
    """Opened when first used, and again after a fork of the process."""

    def __init__(self, path: Path, synchronous: str, timeout_s: float) -> None:
        self.path = path
        self.writing = RLock()
        self.reading = RLock()
        self._synchronous = synchronous
        self._timeout_s = timeout_s
        self._wait_ms = int(min(timeout_s, 1e6) * 1000)
        self._writer: SQLiteQueries | None = None
        self._reader: SQLiteQueries | None = None
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
        """One transaction. By default, one that is not durable fails at once where the file is locked."""
        self.renew()
        with self.transaction(durable=durable, wait=durable if wait is None else wait) as run:
            yield run

    @contextmanager
    def transaction(self, *, durable: bool = True, wait: bool = True) -> Iterator[SQLiteQueries]:
        """Like `write`, for a caller that holds `writing` and called `renew` before."""
        with self.writing:
            run = None
            try:
                if self._writer is None or self._pid != os.getpid():
                    self._writer = self._connect()
                    self._level = self._synchronous
                run = self._writer
                level = self._synchronous if durable else "normal"
                if level != self._level:
                    run.connection.execute(f"PRAGMA synchronous = {level}")
                    self._level = level
                if wait:
                    run.connection.execute("BEGIN IMMEDIATE")
                else:
                    run.connection.setbusytimeout(0)
                    try:
                        run.connection.execute("BEGIN IMMEDIATE")
                    finally:
                        run.connection.setbusytimeout(self._wait_ms)
                self._log = log = self._log or self._identity()
                yield run
                run.connection.execute("COMMIT")
                if log != self._identity():
                    raise StoreError(f"{self.path} was closed by another SQLite in this process; retry")
            except BaseException as error:
                if run is not None:
                    _roll_back(run.connection)
                if isinstance(error, apsw.Error):
                    raise _explain(self.path, error) from error
                raise

    @contextmanager
    def read(self) -> Iterator[SQLiteQueries]:
        """All queries in the block see the same snapshot of the file."""
        self.renew()
        with self.reading:
            run = None
            try:
                if self._reader is None or self._pid != os.getpid():
                    self._reader = self._connect()
                run = self._reader
                run.connection.execute("BEGIN")
                self._log = self._log or self._identity()
                yield run
            except apsw.Error as error:
                raise _explain(self.path, error) from error
            finally:
                if run is not None:
                    _roll_back(run.connection)

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

    def _connect(self) -> SQLiteQueries:
        if self._pid != os.getpid():  # a fork that ran no hook
            self._abandoned = (self._writer, self._reader)  # closing them would drop the parent's locks
            self._writer = self._reader = None
            self._pid = os.getpid()
        try:
            if self.path.is_dir():
                advice = f"name a file in it, as in sqlite:///{self.path}/refold.db"
                raise StoreError(f"{self.path} is a folder; {advice}")
            connection = apsw.Connection(str(self.path))
        except (OSError, ValueError) as error:
            problem = f"{str(self.path)!r} is not a valid file name ({error}); use another name"
            raise StoreError(problem) from error
        try:
            run = SQLiteQueries(connection)
            connection.setbusytimeout(self._wait_ms)
            is_ready = is_current(run, "sqlite", str(self.path))  # before anything is written
            deadline = time.monotonic() + self._timeout_s
            while True:
                try:
                    with suppress(apsw.ReadOnlyError):  # the file can still be read
                        connection.execute("PRAGMA journal_mode = WAL")
                    break
                except apsw.BusyError:  # another process opens the same new file; SQLite does not wait here
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            if not is_ready:
                self._migrate(run)
        except BaseException:
            connection.close()
            raise
        return run

    def _migrate(self, run: SQLiteQueries) -> None:
        run.connection.execute("BEGIN IMMEDIATE")
        try:
            migrate(run, "sqlite", str(self.path), run.connection.execute)
            run.connection.execute("COMMIT")
        except BaseException:
            _roll_back(run.connection)
            raise

    def purge_log(self) -> None:
        """Removes erased words from the write-ahead log."""
        with self.writing, self.reading:
            if self._writer is None:
                return
            try:
                [(is_busy, *_)] = self._writer.connection.execute(
                    "PRAGMA wal_checkpoint(TRUNCATE)"
                ).fetchall()
            except apsw.Error as error:
                raise _explain(self.path, error) from error
            if is_busy:
                raise StoreError(
                    f"Erased, but the text remains in {self.path}-wal while another process reads the file;"
                    " erase it again after that"
                )

    def close(self) -> None:
        with self.writing, self.reading:
            is_stale = self._log is not None and self._log != self._identity()
            for one in (self._writer, self._reader):
                if one is not None and self._pid == os.getpid():
                    if is_stale:  # a deleted log must not overwrite newer commits
                        one.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                    one.connection.close()
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
