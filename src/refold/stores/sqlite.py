"""Conversations in a SQLite file: the default. Durable, and safe for many processes on one machine.

The file uses a write-ahead log with an fsync for every commit; threads that append at the same moment share
one commit.
"""

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, CorruptError, NotFoundError, SettingError, StoreError
from refold.stores.packing import pack, to_text
from refold.stores.shelf import LEASE, Shelf, require_held
from refold.stores.sql import delete_unshared, read_settings, row_problems, write_setting
from refold.stores.sqlite_file import SQLiteFile, SQLiteQueries
from refold.stores.sqlite_index import PLACE_BITS, Segment, SQLiteIndex, place_of, row_id, to_entry
from refold.stores.store import ConversationInfo, Key, Lease, StoreProblem, ToolSetting, require_next
from refold.stores.url import UrlOption, parse_options, shown_url

ROWS_PER_READ = 1_000
OPTIONS = {
    "synchronous": UrlOption("full|normal", "full or normal"),
    "timeout_s": UrlOption(r"\d{0,9}\.?\d+|\d+\.", "a number of seconds", float),
}


@dataclass(slots=True)
class _PendingAppend:
    """An append that waits for the commit it shares with others."""

    key: Key
    entries: Sequence[Entry]
    after: bytes | None
    lease: Lease | None
    pid: int
    digest: bytes = b""
    error: Exception | None = None
    is_done: bool = False


class _Tip(NamedTuple):
    cid: int
    next: int
    """The next free place."""
    digest: bytes
    """Of the entry before it."""


class SQLiteStore(SQLiteIndex, Shelf):
    """Safe to use from many threads, from many processes, and after a fork of the process."""

    def __init__(
        self, path: str | os.PathLike[str], *, synchronous: str = "full", timeout_s: float = 10.0
    ) -> None:
        try:
            self.path = Path(os.path.realpath(path))  # SQLite names the log after the real path
        except ValueError as error:
            raise StoreError(f"{str(path)!r} is not a valid file name ({error}); use another name") from error
        super().__init__(SQLiteFile(self.path, synchronous, timeout_s))
        self._queue: deque[_PendingAppend] = deque()
        with self._file.read():
            pass  # fail now if the file cannot be opened

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        pending = _PendingAppend(key, entries, after, lease, os.getpid())
        self._file.renew()
        self._queue.append(pending)
        with self._file.writing:
            if not pending.is_done:
                self._commit()
        if pending.error:
            raise pending.error.with_traceback(None)  # other threads may raise the same one
        return pending.digest

    def _commit(self) -> None:
        """Commits everything that waits, in one transaction: the first thread does it for all."""
        batch: list[_PendingAppend] = []
        while self._queue:
            pending = self._queue.popleft()
            if pending.pid == os.getpid():  # a fork of the process copied the rest
                batch.append(pending)
        try:
            with self._file.transaction() as run:
                for pending in batch:
                    try:
                        pending.digest = self._insert(run, pending)
                    except (ConflictError, CorruptError) as error:  # the other appends go on
                        pending.error = error
        except BaseException as error:
            for pending in batch:
                pending.error = pending.error or StoreError(f"The commit was stopped by {error!r}; retry")
                if isinstance(error, Exception):
                    pending.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            for pending in batch:
                pending.is_done = True

    def _insert(self, run: SQLiteQueries, pending: _PendingAppend) -> bytes:
        key = pending.key
        cid, next, digest = self._tip(run, key) or (None, 0, GENESIS)
        if pending.lease is not None:
            require_held(key, pending.lease, _value(run, key, LEASE + pending.lease.name))
        require_next(key, pending.entries, next, digest, pending.after)
        if cid is None and pending.entries:
            cid = self._add_conversation(run, key, None, 0, GENESIS)
        for entry in pending.entries:
            assert cid is not None
            digest = chain(digest, entry)
            id = None if entry.id is None else to_bytes(entry.id)
            values = {"kind": entry.kind, "id": id, "head": entry.head, "body": pack(entry.body)}
            run("append", place=row_id(cid, entry.at), **values, digest=digest)
        return digest

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        rows: list[Any] | None = None
        while rows is None or len(rows) == ROWS_PER_READ:
            rows = []
            with self._file.read() as run:  # one snapshot: a parent may be erased before the next chunk
                for cid, low, high in self._segments(run, key):
                    first = max(start, low)
                    last = high if stop is None else min(stop, high)
                    if first < last and len(rows) < ROWS_PER_READ:
                        where = Segment(cid, first, last).row_ids | {"limit": ROWS_PER_READ - len(rows)}
                        if but == "said":  # which has an index
                            rows += run("read_unsaid", **where)
                        else:
                            rows += run("read", **where, but=but)
            for row in rows:
                entry = to_entry(row)
                start = entry.at + 1
                yield Link(entry, row[-1])

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._file.read() as run:
            for segment in self._segments(run, key):
                for id in ids:
                    for (place,) in run("find", **segment.row_ids, id=to_bytes(id)):
                        found[id] = place_of(place)
        return found

    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        found: dict[str, tuple[Key, int]] = {}
        owned = to_bytes(owner)
        with self._file.read() as run:
            for id in ids:
                for place, name in run("locate", id=to_bytes(id), owner=owned):
                    at = place_of(place)
                    names = [name]
                    if name is None:  # its conversation was erased; forks may still share the entry
                        heirs = run("heirs", cid=place >> PLACE_BITS, owner=owned)
                        names = [heir for heir, shared in heirs if shared > at]
                    for one in names:
                        found[id] = Key(owner, to_text(one)), at
        return found

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        with self._file.read() as run:
            rows = run("conversations", owner=None if owner is None else to_bytes(owner))
            origins = [self._origin(run, parent, fork_at) for *_, parent, fork_at, _ in rows]
        for (owned, name, created, _, fork_at, last), (parent, since) in zip(rows, origins, strict=True):
            next = fork_at if last is None else place_of(last) + 1
            yield ConversationInfo(Key(to_text(owned), to_text(name)), created, next, parent, since)

    def _origin(self, run: SQLiteQueries, parent: int | None, fork_at: int) -> tuple[Key | None, int]:
        """The nearest ancestor that was not erased, and up to where its entries are shared."""
        while parent is not None:
            rows = run("row", cid=parent)
            if not rows:  # the row was lost
                break
            _, owner, name, _, above, since, _ = rows[0]
            if name is not None:
                return Key(to_text(owner), to_text(name)), fork_at
            parent = above
            fork_at = min(fork_at, since)
        return None, 0

    # Forking and erasing

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        with self._file.write() as run:
            tip = self._tip(run, key)
            if self._tip(run, new):
                raise ConflictError(f"Conversation {new.conversation!r} already exists")
            if tip is None or not 0 <= at <= tip.next:
                raise NotFoundError(f"{key.conversation!r} has no place {at}")
            base = GENESIS
            for cid, low, high in self._segments(run, key):
                if low < at <= high:
                    base = run("digest", place=row_id(cid, at - 1))[0][0]
            self._add_conversation(run, new, tip.cid, at, base)

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        with self._file.write() as run:
            tip = self._tip(run, key)
            forks = run("forks", cid=tip.cid, and_theirs=with_forks) if tip else []
            named_forks = [(owner, name) for _, owner, name in forks if name is not None]
            erased = [tip.cid] if tip else []
            if with_forks:
                erased += [cid for cid, *_ in forks]
                for owner, name in named_forks:
                    run("erase_shelf", scope=_scope(Key(to_text(owner), to_text(name))))
            run("erase_shelf", scope=_scope(key))
            for cid in erased:
                run("bury", cid=cid)
            for cid in reversed(erased):  # forks have higher row ids than their parents
                delete_unshared(run, cid, lambda cid: self._seal(run, cid))
        self._purge_index()
        self._file.purge_log()
        return [] if with_forks else [Key(to_text(owner), to_text(name)) for owner, name in named_forks]

    # The shelf and settings

    def get(self, scope: Key | None, name: str, /) -> bytes | None:
        with self._file.read() as run:
            return _value(run, scope, name)

    def put(self, scope: Key | None, name: str, value: bytes | None, /, *, durable: bool = True) -> None:
        with self._file.write(durable=durable) as run:
            if value is None:
                run("remove_value", scope=_scope(scope), name=to_bytes(name))
            elif scope is None or self._tip(run, scope):
                run("put_value", scope=_scope(scope), name=to_bytes(name), value=value)

    def compare_and_set(
        self, scope: Key | None, name: str, old: bytes | None, new: bytes, /, *, early: bool = False
    ) -> bool:
        with self._file.write() as run:
            is_there = early or scope is None or self._tip(run, scope)
            if not is_there or _value(run, scope, name) != old:
                return False
            run("put_value", scope=_scope(scope), name=to_bytes(name), value=new)
            return True

    def values(self, scope: Key | None, prefix: str, /) -> dict[str, bytes]:
        low = to_bytes(prefix)
        high = low[:-1] + bytes([low[-1] + 1])
        with self._file.read() as run:
            rows = run("values", scope=_scope(scope), low=low, high=high)
        return {to_text(name): value for name, value in rows}

    def shelved(self, name: str, owner: str | None = None, /) -> Iterator[tuple[Key, bytes, int]]:
        with self._file.read() as run:
            scopes = [scope for (scope,) in run("shelved", name=to_bytes(name))]
        for key in map(_key, scopes):
            with self._file.read() as run:
                tip = self._tip(run, key) if owner in (None, key.owner) else None
                value = _value(run, key, name)
            if tip is not None and value is not None:
                yield key, value, tip.next

    def settings(self) -> Sequence[ToolSetting]:
        with self._file.read() as run:
            return read_settings(run)

    def set_setting(self, setting: ToolSetting, /) -> None:
        with self._file.write() as run:
            write_setting(run, setting)

    # Health

    def examine(self) -> Iterable[StoreProblem]:
        with self._file.read() as run:
            lines = run("integrity_check")
        yield from (StoreProblem(str(self.path), line) for (line,) in lines if line != "ok")
        with self._file.read() as run:
            rows = run("seals")
            strays = run("strays")
        altered = [row[2] for *row, seal in rows if _seal_of(row) != seal]
        yield from row_problems(str(self.path), altered, strays)

    def close(self) -> None:
        self._file.close()

    # Rows

    def _add_conversation(
        self, run: SQLiteQueries, key: Key, parent: int | None, fork_at: int, base: bytes
    ) -> int:
        names = {"owner": to_bytes(key.owner), "name": to_bytes(key.conversation)}
        values = {"created": time.time(), "parent": parent, "fork_at": fork_at, "base": base}
        [(cid,)] = run("add_conversation", **names, **values)
        self._seal(run, cid)
        return int(cid)

    def _seal(self, run: SQLiteQueries, cid: int) -> None:
        run("set_seal", cid=cid, seal=_seal_of(run("row", cid=cid)[0]))

    def _tip(self, run: SQLiteQueries, key: Key) -> _Tip | None:
        rows = run("tip", owner=to_bytes(key.owner), name=to_bytes(key.conversation))
        if not rows:
            return None
        cid, fork_at, base, last, digest = rows[0]
        return _Tip(cid, fork_at, base) if last is None else _Tip(cid, place_of(last) + 1, digest)


def from_url(url: str) -> SQLiteStore:
    """The store in `sqlite:///relative.db` or `sqlite:////absolute.db`.

    Options: `?synchronous=normal` (a power failure may lose the newest commits), `?timeout_s=3`.
    """
    where = f"store {shown_url(url)!r}"
    path, _, query = url.removeprefix("sqlite:///").partition("?")
    if not url.startswith("sqlite:///") or not path or path == ":memory:":
        raise SettingError(where, "expected sqlite:///file.db (or memory:// for no file)")
    return SQLiteStore(path, **parse_options(where, query, OPTIONS))


def _scope(key: Key | None) -> bytes:
    """Names a shelf; that of the whole store has no name."""
    if key is None:
        return b""
    owner = to_bytes(key.owner)
    return b"%d:%b%b" % (len(owner), owner, to_bytes(key.conversation))


def _key(scope: bytes) -> Key:
    size, _, rest = scope.partition(b":")
    return Key(to_text(rest[: int(size)]), to_text(rest[int(size) :]))


def _value(run: SQLiteQueries, scope: Key | None, name: str) -> bytes | None:
    rows = run("get_value", scope=_scope(scope), name=to_bytes(name))
    return rows[0][0] if rows else None


def _seal_of(row: Sequence[Any]) -> bytes:
    return blake2b(repr(tuple(row)).encode(), digest_size=16).digest()
