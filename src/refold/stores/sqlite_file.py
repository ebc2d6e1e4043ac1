"""A SQLite file with a connection for writing and one for reading, and its errors explained."""

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
from refold.core.errors import CorruptError, NewerError, RefoldError, StoreError
from refold.stores.sql import migrations, queries

Log: TypeAlias = tuple[int, int, int] | None
"""Which write-ahead log this is, and of which file: device and inodes."""


class SQLiteQueries:
    """Runs named queries on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection, self._sql = connection, queries("sqlite")

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
        self.path, self.synchronous, self.timeout_s = path, synchronous, timeout_s
        self.writing, self.reading = RLock(), RLock()
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._pid = os.getpid()
        self._log_path = f"{path}-wal"
        self._log: Log = None
        """The write-ahead log in use."""
        self._level = synchronous
        """How durable the writer's next commit is."""
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
        """One transaction: all that is done in it, or nothing. One that is not durable waits for nobody,
        unless it is told to.
        """
        with self.writing, _told(self.path):
            self._after_fork()
            if self._writer is None:
                self._writer, self._level = self._connect(), self.synchronous
            connection, level = self._writer, self.synchronous if durable else "normal"
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
        """One moment: whatever is read in it stands side by side in the file."""
        self.renew()
        with self.reading, _told(self.path):
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
        """Opens the file anew where the write-ahead log in use is no longer the file's. No lock may be held.

        A second SQLite library in this process, such as Python's own, deletes the log when it closes
        the file: the two do not see each other's locks. What is written to it then would be lost. This
        mends what can be mended; to use two libraries on one file at the same moment is never safe.
        """
        if self._log is not None and self._log != self._identity():
            _hold(self.path)
            _let_go()

    def _identity(self) -> Log:
        try:
            log, file = os.stat(self._log_path), os.stat(self.path)
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
        """A connection must not cross a fork that nobody announced; the child opens its own."""
        if self._pid != os.getpid():
            self._abandoned = (self._writer, self._reader)  # never closed: that would drop the parent's locks
            self._writer = self._reader = None
            self._pid = os.getpid()

    def _connect(self) -> apsw.Connection:
        connection = self._open()
        try:
            connection.setbusytimeout(self._wait_ms)
            known = len(migrations("sqlite")), FORMAT
            version = self._version(SQLiteQueries(connection))  # a newer file is left as it is
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
            raise StoreError(f"{str(self.path)!r} cannot be a file: {error}; give it another name") from error
        raise StoreError(f"{self.path} is a folder; name a file in it, as in sqlite:///{self.path}/refold.db")

    def _use_wal(self, connection: apsw.Connection) -> None:
        """Whoever else opens a new file at this moment is waited for, which SQLite does not do here."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                with suppress(apsw.ReadOnlyError):  # then it is read as it is
                    connection.execute("PRAGMA journal_mode = WAL")
                return
            except apsw.BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _migrate(self, connection: apsw.Connection) -> None:
        run, steps = SQLiteQueries(connection), migrations("sqlite")
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
        known = len(migrations("sqlite"))
        if version > known or format > FORMAT:
            raise NewerError(
                f"{self.path} was written by a newer refold (schema {version}, format {format}; this one"
                f" knows {known} and {FORMAT}). Upgrade refold to open it; nothing was changed."
            )
        return version, format

    def shred(self) -> None:
        """Erased words must not linger in the write-ahead log."""
        with self.writing, self.reading, _told(self.path):
            done = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall() if self._writer else []
            if done and done[0][0]:
                raise StoreError(
                    f"Erased, but the words stay in {self.path}-wal while another process reads from it;"
                    " erase it again when that is done"
                )

    def close(self) -> None:
        with self.writing, self.reading:
            stale = self._log is not None and self._log != self._identity()
            for connection in (self._writer, self._reader):
                if connection is not None and self._pid == os.getpid():
                    if stale:  # what is in a deleted log must not be written over what others stored since
                        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                    connection.close()
            self._writer = self._reader = self._log = None


def is_foreign(path: Path) -> bool:
    """A database with tables of somebody else's, and none of ours. Nothing is written to it."""
    try:
        with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
            names = [str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master")]
    except apsw.Error:
        return False  # opening it as ours says what is wrong
    return bool(names) and not any(name.startswith("refold_") for name in names)


def _roll_back(connection: apsw.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


_files: WeakSet[SQLiteFile] = WeakSet()
_forking = RLock()
_held: list[SQLiteFile] = []


@cache
def _watch_forks() -> None:
    """Nothing of SQLite may cross a fork of the process, neither connections nor what it knows of locks:
    the parent's last close would delete the log that the child writes to. So all is closed before.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)


def _hold(path: Path | None = None) -> None:
    """Closes all that this process has open, or all of one file, and keeps others from opening it."""
    _forking.acquire()
    for file in [file for file in _files if path in (None, file.path)]:
        file.writing.acquire()
        file.reading.acquire()
        _held.append(file)
    for file in _held:
        with suppress(apsw.Error):
            file.close()


def _let_go() -> None:
    while _held:
        file = _held.pop()
        file.reading.release()
        file.writing.release()
    _forking.release()


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
