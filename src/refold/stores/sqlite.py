"""Streams in a SQLite file: the default, durable, for many processes on one machine.

Write-ahead log, an fsync for every commit, and threads that append at the same moment share one.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, CorruptError, NotFoundError, SettingError, StoreError
from refold.core.event import Expiry
from refold.core.query import Query, SearchText
from refold.stores.packing import pack, unpack
from refold.stores.sqlite_file import SQLiteFile, SQLiteQueries
from refold.stores.sqlite_index import PLACES, Segment, SQLiteIndex
from refold.stores.store import (
    KEPT_SUMMARIES,
    ConversationInfo,
    FoundPlace,
    Key,
    Lease,
    Scope,
    Snapshot,
    StoreProblem,
    ToolSetting,
    require_held,
    require_next,
)
from refold.stores.url import shown_url

CHUNK = 1_000
"""Rows read at a time."""


class _ConversationRow(NamedTuple):
    cid: int
    parent: int | None
    fork_at: int
    base: bytes


class _PendingAppend:
    """One append that waits for the commit it shares with others."""

    def __init__(self, key: Key, entries: Sequence[Entry], after: bytes | None, lease: Lease | None) -> None:
        self.key, self.entries, self.after, self.lease = key, entries, after, lease
        self.pid = os.getpid()
        self.digest = b""
        self.error: Exception | None = None
        self.done = False


class SQLiteStore:
    """Safe to use from many threads, from many processes, and after a fork of the process."""

    def __init__(
        self, path: str | os.PathLike[str], *, synchronous: str = "full", timeout_s: float = 10.0
    ) -> None:
        try:
            self.path = Path(os.path.realpath(path))  # as SQLite names the log beside it
        except ValueError as error:
            raise StoreError(f"{str(path)!r} cannot be a file: {error}; give it another name") from error
        self._file = SQLiteFile(self.path, synchronous, timeout_s)
        self._queue: deque[_PendingAppend] = deque()
        self._index = SQLiteIndex(self._file, self._segments, _entry, _text)
        with self._file.read():
            pass  # a file that cannot be opened says so now

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        ticket = _PendingAppend(key, entries, after, lease)
        self._file.renew()
        self._queue.append(ticket)
        with self._file.writing:
            if not ticket.done:
                self._commit()
        if ticket.error:
            raise ticket.error.with_traceback(None)  # others may raise the same one
        return ticket.digest

    def _commit(self) -> None:
        """Everything that waits, in one transaction; whoever comes first does it for all."""
        waiting = [self._queue.popleft() for _ in range(len(self._queue))]
        tickets = [ticket for ticket in waiting if ticket.pid == os.getpid()]  # others came with a fork
        try:
            with self._file.transaction() as run:
                for ticket in tickets:
                    self._insert(run, ticket)
        except BaseException as error:
            for ticket in tickets:
                ticket.error = ticket.error or StoreError(f"The commit was stopped by {error!r}; retry")
                if isinstance(error, Exception):
                    ticket.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            for ticket in tickets:
                ticket.done = True

    def _insert(self, run: SQLiteQueries, ticket: _PendingAppend) -> None:
        row = self._row(run, ticket.key)
        next, digest = (0, GENESIS) if row is None else self._tip(run, row)
        try:
            if ticket.lease is not None:
                current = None if row is None else self._lease(run, row, ticket.lease.name)
                require_held(ticket.key, ticket.lease, current)
            require_next(ticket.key, ticket.entries, next, digest, ticket.after)
        except (ConflictError, CorruptError) as error:  # which are no business of the other tickets
            ticket.error = error
            return
        if row is None and ticket.entries:
            row = self._add(run, ticket.key, None, 0, GENESIS)
        for entry in ticket.entries:
            assert row is not None
            digest = chain(digest, entry)
            id = None if entry.id is None else to_bytes(entry.id)
            place, body = (row.cid << PLACES) + entry.at, pack(entry.body)
            run("append", place=place, kind=entry.kind, id=id, head=entry.head, body=body, digest=digest)
        ticket.digest = digest

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        while True:
            with self._file.read() as run:  # one moment; a parent may be erased before the next
                rows = self._chunk(run, key, start, stop, but)
            for row in rows:
                entry = _entry(row)
                start = entry.at + 1
                yield Link(entry, row[-1])
            if len(rows) < CHUNK:
                break

    def _chunk(
        self, run: SQLiteQueries, key: Key, start: int, stop: int | None, but: str | None
    ) -> list[Any]:
        rows: list[Any] = []
        for cid, low, high in self._segments(run, key):
            first, last = max(start, low), high if stop is None else min(stop, high)
            if first < last and len(rows) < CHUNK:
                where = {"low": (cid << PLACES) + first, "high": (cid << PLACES) + last}
                limit = CHUNK - len(rows)
                if but == "said":  # there is an index for what is left
                    rows += run("read_unsaid", **where, limit=limit)
                else:
                    rows += run("read", **where, but=but, limit=limit)
        return rows

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._file.read() as run:
            for cid, low, high in self._segments(run, key):
                for id in ids:
                    where = {"low": (cid << PLACES) + low, "high": (cid << PLACES) + high}
                    for (place,) in run("find", **where, id=to_bytes(id)):
                        found[id] = place & ((1 << PLACES) - 1)
        return found

    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        mine = to_bytes(owner)
        with self._file.read() as run:
            rows = [(id, *row) for id in ids for row in run("locate", id=to_bytes(id), owner=mine)]
            lost = [row for row in rows if row[2] is None]  # erased, but for what forks share
            heirs = {
                cid: run("heirs", cid=cid, owner=mine) for cid in {place >> PLACES for _, place, _ in lost}
            }
        found: dict[str, tuple[Key, int]] = {}
        for id, place, name in rows:
            at = place & ((1 << PLACES) - 1)
            names = [(name, at + 1)] if name is not None else heirs[place >> PLACES]
            for heir in [one for one, shared in names if shared > at]:
                found[id] = Key(owner, _text(heir)), at
        return found

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        with self._file.read() as run:
            rows = run("conversations", owner=None if owner is None else to_bytes(owner))
            origins = [self._origin(run, parent, fork_at) for *_, parent, fork_at, _ in rows]
        for (owned, name, created, _, fork_at, last), (parent, since) in zip(rows, origins, strict=True):
            next = fork_at if last is None else (last & ((1 << PLACES) - 1)) + 1
            of = Key(*map(_text, parent)) if parent else None
            yield ConversationInfo(Key(_text(owned), _text(name)), created, next, of, since)

    def _origin(
        self, run: SQLiteQueries, parent: int | None, fork_at: int
    ) -> tuple[tuple[bytes, bytes] | None, int]:
        """Owner and name of what a conversation is a fork of, past those that were erased, and where."""
        while parent is not None:
            _, owner, name, _, above, since, _ = run("row", cid=parent)[0]
            if name is not None:
                return (owner, name), fork_at
            parent, fork_at = above, min(fork_at, since)
        return None, 0

    # Forking and erasing

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        with self._file.write() as run:
            row = self._row(run, key)
            if self._row(run, new):
                raise ConflictError(f"There is a conversation {new.conversation!r} already")
            if row is None or not 0 <= at <= self._tip(run, row)[0]:
                raise NotFoundError(f"{key.conversation!r} has no place {at}")
            self._add(run, new, row.cid, at, self._digest_before(run, key, at))

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        with self._file.write() as run:
            row = self._row(run, key)
            forks = run("forks", cid=row.cid, and_theirs=with_forks) if row else []
            erased = [row.cid, *(cid for cid, *_ in forks if with_forks)] if row else []
            names = [(to_bytes(key.owner), to_bytes(key.conversation))]
            names += [(owner, name) for _, owner, name in forks if with_forks and name is not None]
            for owner, name in names:
                run("erase_cursors", owner=owner, name=name)
            for cid in erased:
                for query in ("erase_snapshots", "erase_leases", "erase_summaries", "bury"):
                    run(query, cid=cid)
            for cid in reversed(erased):  # a fork is younger than its parent
                self._prune(run, cid)
        self._index.shred()
        self._file.shred()
        named = [] if with_forks else [(owner, name) for _, owner, name in forks if name is not None]
        return [Key(_text(owner), _text(name)) for owner, name in named]

    def _prune(self, run: SQLiteQueries, cid: int | None) -> None:
        """Deletes what no fork shares of an erased conversation, and then of the erased ones before it."""
        while cid is not None and (rows := run("buried", cid=cid)):
            parent, fork_at, shared = rows[0]
            keep = max(fork_at, shared or 0)
            run("erase_entries", low=(cid << PLACES) + keep, high=(cid + 1) << PLACES)
            self._index.forget(run, (cid << PLACES) + keep, (cid + 1) << PLACES)
            if keep > fork_at:
                self._seal(run, cid)
                return
            for (fork,) in run("hand_over", cid=cid, parent=parent):
                self._seal(run, fork)
            run("erase_followed", cid=cid)
            run("erase_conversation", cid=cid)
            cid = parent

    # Searching

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None], /) -> Iterator[int]:
        return self._index.index(scope, words)

    def search(self, scope: Scope, query: Query, limit: int, /) -> list[FoundPlace]:
        return self._index.search(scope, query, limit)

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]], /
    ) -> Iterator[int]:
        return self._index.embed(scope, embedder, vectors)

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int, /) -> list[FoundPlace]:
        return self._index.nearest(scope, embedder, vector, limit)

    # Snapshots, leases, notes, summaries, cursors, settings

    def save(self, key: Key, view: str, snapshot: Snapshot, /) -> None:
        with self._file.write(durable=False) as run:
            row = self._row(run, key)
            if row is not None:
                at, body, digest = snapshot
                values = {"cid": row.cid, "view": to_bytes(view), "at": at, "digest": digest}
                run("save", **values, body=pack(body))

    def saved(self, key: Key, /) -> dict[str, Snapshot]:
        with self._file.read() as run:
            row = self._row(run, key)
            rows = [] if row is None else run("saved", cid=row.cid)
        return {_text(view): Snapshot(at, unpack(body), digest) for view, at, body, digest in rows}

    def acquire(self, key: Key, name: str, holder: str, now: float, seconds: float, /) -> Lease | None:
        with self._file.write() as run:
            row = self._row(run, key)
            if row is None:
                return None
            last = self._lease(run, row, name) or Lease(name, "", 0, 0.0)
            if last.until > now and last.holder != holder:
                return None
            fence = last.fence if last.holder == holder else last.fence + 1
            lease = Lease(name, holder, fence, now + seconds)
            values = {"cid": row.cid, "name": to_bytes(name), "holder": to_bytes(holder)}
            run("set_lease", **values, fence=fence, until=lease.until)
            return lease

    def release(self, key: Key, lease: Lease, /) -> None:
        with self._file.write() as run:
            row = self._row(run, key)
            if row is not None:
                name, holder = to_bytes(lease.name), to_bytes(lease.holder)
                run("end_lease", cid=row.cid, name=name, holder=holder, fence=lease.fence)

    def leases(self, key: Key, now: float, /) -> Sequence[Lease]:
        with self._file.read() as run:
            row = self._row(run, key)
            rows = [] if row is None else run("leases", cid=row.cid, now=now)
        return [Lease(_text(name), _text(holder), fence, until) for name, holder, fence, until in rows]

    def note(self, name: str, /) -> bytes | None:
        with self._file.read() as run:
            rows = run("note", name=to_bytes(name))
        return rows[0][0] if rows else None

    def keep_note(self, name: str, body: bytes, /) -> None:
        with self._file.write(durable=False) as run:
            run("keep_note", name=to_bytes(name), body=body)

    def summary(self, key: Key, digest: bytes, /) -> bytes | None:
        with self._file.read() as run:
            owner, name = map(to_bytes, key)
            rows = run("summary", owner=owner, name=name, digest=digest)
        return unpack(rows[0][0]) if rows else None

    def keep_summary(self, key: Key, digest: bytes, body: bytes, /) -> None:
        with self._file.write() as run:  # durable: a disk is cheaper to wait for than a model
            row = self._row(run, key)
            if row is not None:
                run("keep_summary", cid=row.cid, digest=digest, body=pack(body))
                run("drop_summaries", cid=row.cid, keep=KEPT_SUMMARIES)

    def cursor(self, key: Key, name: str, /) -> int | None:
        with self._file.read() as run:
            rows = run("cursor", **_named(key), cursor=to_bytes(name))
        return rows[0][0] if rows else None

    def set_cursor(self, key: Key, name: str, next: int, /) -> None:
        with self._file.write() as run:
            run("set_cursor", **_named(key), cursor=to_bytes(name), next=next)

    def behind(self, name: str, /) -> Iterator[Key]:
        with self._file.read() as run:
            rows = run("behind_cursor", cursor=to_bytes(name))
        return (Key(_text(owner), _text(conversation)) for owner, conversation in rows)

    def settings(self) -> Sequence[ToolSetting]:
        with self._file.read() as run:
            rows = run("settings")
        texts: list[list[Any]] = [[_text(v) if isinstance(v, bytes) else v for v in row] for row in rows]
        return [ToolSetting(agent, tool, Expiry(*values)) for agent, tool, *values in texts]

    def set_setting(self, setting: ToolSetting, /) -> None:
        name = {"agent": to_bytes(setting.agent), "tool": to_bytes(setting.tool)}
        values = {field: getattr(setting.expiry, field) for field in Expiry.__struct_fields__}
        values["prompt"] = None if values["prompt"] is None else to_bytes(values["prompt"])
        with self._file.write() as run:
            run("unset_setting", **name)
            if setting.expiry != Expiry():
                run("set_setting", **name, **values)

    # Health

    def examine(self) -> Iterable[StoreProblem]:
        with self._file.read() as run:
            lines = run.plain("PRAGMA integrity_check")
        yield from (StoreProblem(str(self.path), line) for (line,) in lines if line != "ok")
        with self._file.read() as run:
            rows, strays = run("seals"), run("strays")
        for *row, seal in rows:
            if _seal_of(row) != seal:
                name = (row[2] or b"(erased)").decode("utf-8", "replace")
                yield StoreProblem(f"conversation {name!r}", "its row was altered: name, owner or fork")
        for what, count in strays:
            yield StoreProblem(str(self.path), f"{count} {what} belong to no conversation")

    def close(self) -> None:
        self._file.close()

    # Rows

    def _row(self, run: SQLiteQueries, key: Key) -> _ConversationRow | None:
        rows = run("conversation", owner=to_bytes(key.owner), name=to_bytes(key.conversation))
        return _ConversationRow(*rows[0]) if rows else None

    def _add(
        self, run: SQLiteQueries, key: Key, parent: int | None, fork_at: int, base: bytes
    ) -> _ConversationRow:
        values = {"owner": to_bytes(key.owner), "name": to_bytes(key.conversation), "created": time.time()}
        run("add_conversation", **values, parent=parent, fork_at=fork_at, base=base)
        row = self._row(run, key)
        assert row is not None
        self._seal(run, row.cid)
        return row

    def _seal(self, run: SQLiteQueries, cid: int) -> None:
        run("set_seal", cid=cid, seal=_seal_of(run("row", cid=cid)[0]))

    def _lease(self, run: SQLiteQueries, row: _ConversationRow, name: str) -> Lease | None:
        rows = run("lease", cid=row.cid, name=to_bytes(name))
        return Lease(name, _text(rows[0][0]), *rows[0][1:]) if rows else None

    def _tip(self, run: SQLiteQueries, row: _ConversationRow) -> tuple[int, bytes]:
        """The next free place and the digest of the entry before it."""
        last = run("last", low=row.cid << PLACES, high=(row.cid + 1) << PLACES)
        return ((last[0][0] & ((1 << PLACES) - 1)) + 1, last[0][1]) if last else (row.fork_at, row.base)

    def _digest_before(self, run: SQLiteQueries, key: Key, at: int) -> bytes:
        for cid, low, high in self._segments(run, key):
            if low < at <= high:
                digest: bytes = run("digest", place=(cid << PLACES) + at - 1)[0][0]
                return digest
        return GENESIS

    def _segments(self, run: SQLiteQueries, key: Key) -> list[Segment]:
        """Which conversation has which of the places, in order."""
        row, high = self._row(run, key), 1 << PLACES
        result: list[Segment] = []
        while row is not None:
            result.append(Segment(row.cid, row.fork_at, high))
            high = min(high, row.fork_at)
            row = None if row.parent is None else _ConversationRow(*run("ancestor", cid=row.parent)[0])
        return result[::-1]


def from_url(url: str) -> SQLiteStore:
    """The store in `sqlite:///relative.db` or `sqlite:////absolute.db`.

    Options: `?synchronous=normal` (the newest commits may be lost to a power cut), `?timeout_s=3`.
    """
    where = f"store {shown_url(url)!r}"
    path, _, query = url.removeprefix("sqlite:///").partition("?")
    if not url.startswith("sqlite:///") or not path or path == ":memory:":
        raise SettingError(where, "expected sqlite:///file.db (or memory:// for no file)")
    options = dict(parse_qsl(query, keep_blank_values=True))
    synchronous, timeout_s = options.pop("synchronous", "full"), options.pop("timeout_s", "10")
    if options or synchronous not in ("full", "normal") or not timeout_s.replace(".", "", 1).isdecimal():
        raise SettingError(where, "its options are synchronous=full|normal and timeout_s=SECONDS")
    return SQLiteStore(path, synchronous=synchronous, timeout_s=float(timeout_s))


def _named(key: Key) -> dict[str, bytes]:
    return {"owner": to_bytes(key.owner), "name": to_bytes(key.conversation)}


def _entry(row: Sequence[Any]) -> Entry:
    place, kind, id, head, body, *_ = row
    text = None if id is None else _text(id)
    return Entry(place & ((1 << PLACES) - 1), kind, text, head, unpack(body))


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except (UnicodeDecodeError, AttributeError) as error:
        raise CorruptError(f"A stored name or id is no text: {data!r}") from error


def _seal_of(row: Sequence[Any]) -> bytes:
    return blake2b(repr(tuple(row)).encode(), digest_size=16).digest()
