"""Conversations in PostgreSQL: for many processes on many machines.

Compare-and-append is one database function, in one round trip. After a broken connection, the digest that the
append would have produced shows whether it was committed.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import psycopg

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, CorruptError, NotFoundError, StoreError
from refold.stores.packing import pack, to_text
from refold.stores.postgres_index import PostgresIndex, key_digest, owner_digest, to_entry
from refold.stores.postgres_pool import PostgresOptions, PostgresPool, PostgresQueries, split_options
from refold.stores.shelf import LEASE, SNAPSHOT, Shelf, decode_snapshot, require_held
from refold.stores.sql import delete_unshared, is_current, migrate, read_settings, row_problems, write_setting
from refold.stores.store import (
    ConversationInfo,
    Key,
    Lease,
    Snapshot,
    StoreProblem,
    ToolSetting,
    require_next,
)

CHUNK, CHUNK_BYTES = 1_000, 8 << 20
"""Entries and stored bytes read at a time."""
STATEMENT_BYTES = 64 << 20
"""A larger batch is sent in several statements."""
MAX_ERASED = 200
"""Conversations erased in one transaction: each holds one of the server's locks until the end."""
MAX_PLACE = 1 << 32
POLL_S, LONGEST_POLL_S = 0.05, 0.25
"""How often a waiter looks for new entries: less and less often while there are none."""
OLDEST_SERVER = 13
UNKNOWN = ". The last append may or may not be stored: read, or append again with the same ids"


class PostgresStore(PostgresIndex, Shelf):
    """Safe to use from many threads, from many processes, and after a fork of the process."""

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 10,
        timeout_s: float = 10.0,
        statement_timeout_s: float = 60.0,
        schema: str | None = None,
    ) -> None:
        options = PostgresOptions(url, pool_size, timeout_s, statement_timeout_s, schema)
        super().__init__(PostgresPool(options))
        try:
            self.pool.run(self._open_schema)
        except BaseException:
            self.pool.close()
            raise

    def _open_schema(self, run: PostgresQueries) -> None:
        """Creates or migrates the tables, in one transaction, if they are not there or older.

        Raises:
            NewerError: only a newer refold knows them.
            StoreError: the server is too old, or uses another encoding.
        """
        info = run.connection.info
        if info.server_version < OLDEST_SERVER * 10_000:
            raise StoreError(
                f"{self.pool.shown} is older than PostgreSQL {OLDEST_SERVER}; upgrade the server"
            )
        encoding = info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreError(f"{self.pool.shown} uses the encoding {encoding}; create a database with UTF8")
        if is_current(run, "postgres", self.pool.shown):
            return
        with run.connection.transaction():
            run.lift_timeouts()
            try:
                run("lock_schema")
            except psycopg.errors.LockNotAvailable as error:
                limit = f"did not finish within {self.pool.timeout_s:g} s"
                raise StoreError(
                    f"{self.pool.shown}: another migration is running and {limit}; retry later"
                ) from error
            run("lift_lock_timeout")
            options = self.pool.options
            if options.schema is not None and not run("has_namespace", name=options.schema)[0][0]:
                run.connection.execute(f"CREATE SCHEMA {options.settings['schema']}".encode())
            execute = run.connection.execute
            migrate(run, "postgres", self.pool.shown, lambda step: execute(step.encode()))

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        places = [entry.at for entry in entries]
        known = after
        while True:
            if known is None or not places or places != list(range(places[0], places[0] + len(places))):
                rows = self.pool("tip", key=key_digest(key), lease=_lease_name(lease))
                next, known, held = rows[0] if rows else (0, GENESIS, None)
                require_held(key, lease, held)
                require_next(key, entries, next, known, after)
            if not places:
                return known
            digests = [known]
            for entry in entries:
                digests.append(chain(digests[-1], entry))
            stored, next, last, held = self._append(key, entries, digests, lease)
            if stored:
                return digests[-1]
            require_held(key, lease, held)
            require_next(key, entries, next, last, after)
            known = None  # the conversation was erased and started again in between

    def _append(
        self, key: Key, entries: Sequence[Entry], digests: Sequence[bytes], lease: Lease | None
    ) -> Sequence[Any]:
        is_next = len(entries) == 1 and entries[0].at > 0 and lease is None
        size = sum(len(entry.body) for entry in entries)

        def work(run: PostgresQueries) -> Sequence[Any]:
            if is_next and not run.is_retry:
                [(is_stored,)] = run("append_next", key=key_digest(key), **_next_values(entries[0], digests))
                if is_stored:
                    return True, None, None, None
            always = {**_names(key), **_fence(lease), "now": time.time()}
            for values in _statements(entries, digests):
                row: Sequence[Any] = run("append", **values, **always, again=run.is_retry)[0]
                if not row[0]:
                    break
            return row

        return (self.pool.run if size < STATEMENT_BYTES else self.pool.transact)(work, doubt=UNKNOWN)

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        where = {"key": key_digest(key), "stop": _place(stop), "but": None if but is None else to_bytes(but)}
        start = _place(start)
        rows = None
        while rows is None or not _is_last(rows):
            rows = self.pool("read", **where, start=start, rows=CHUNK, bytes=CHUNK_BYTES)
            for row in rows:
                start = row[0] + 1
                yield _link(row)

    def resume(self, key: Key, view: str, /) -> tuple[Snapshot | None, Iterator[Link]]:
        most = {"stop": MAX_PLACE, "rows": CHUNK, "bytes": CHUNK_BYTES}
        rows = self.pool("resume", key=key_digest(key), view=to_bytes(SNAPSHOT + view), **most)
        if not rows or rows[0][0] >= 0:
            return None, self._continue(key, rows)
        try:
            return decode_snapshot(rows[0][-1]), self._continue(key, rows[1:])
        except CorruptError:  # only a cache
            return None, self.read(key)

    def _continue(self, key: Key, rows: Sequence[Any]) -> Iterator[Link]:
        yield from map(_link, rows)
        if not _is_last(rows):
            yield from self.read(key, rows[-1][0] + 1)

    def fetch(self, key: Key, places: Collection[int], /) -> dict[int, Entry]:
        some = [place for place in places if 0 <= place < MAX_PLACE]
        rows = self.pool("fetch", key=key_digest(key), places=some) if some else []
        return {row[0]: to_entry(row) for row in rows}

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        rows = self.pool("find", key=key_digest(key), ids=list(map(to_bytes, ids))) if ids else []
        return {to_text(id): at for id, at in rows}

    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        names = list(map(to_bytes, ids))
        rows = self.pool("locate", owner_key=owner_digest(owner), ids=names) if ids else []
        return {to_text(id): (Key(owner, to_text(name)), at) for id, at, name in rows}

    def wait(self, key: Key, next: int, seconds: float, /) -> bool:
        until = time.monotonic() + seconds
        pause_s = POLL_S
        while True:
            rows = self.pool("tip", key=key_digest(key), lease=None)
            if rows and rows[0][0] > next:
                return True
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_POLL_S)

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        owner_key = None if owner is None else owner_digest(owner)
        before = 1 << 62
        rows = None
        while rows is None or len(rows) == CHUNK:
            rows = self.pool("conversations", owner_key=owner_key, before=before, limit=CHUNK)
            for cid, owned, name, created, next, *parent, fork_at in rows:
                before = cid
                of = None if parent[1] is None else Key(*map(to_text, parent))
                yield ConversationInfo(Key(to_text(owned), to_text(name)), created, next, of, fork_at)

    # Forking and erasing

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        def work(run: PostgresQueries) -> None:
            for name in sorted({key_digest(key), key_digest(new)}):
                run("hold", key=name)
            rows = run("conversation", key=key_digest(key))
            existing = run("conversation", key=key_digest(new))
            if existing and run.is_retry and rows and existing[0][2:] == (rows[0][0], at):
                return  # an earlier try created it
            if existing:
                raise ConflictError(f"Conversation {new.conversation!r} already exists")
            tip = run("tip", key=key_digest(key), lease=None)
            if not tip or not 0 <= at <= tip[0][0]:
                raise NotFoundError(f"{key.conversation!r} has no place {at}")
            base = run("digest", key=key_digest(key), at=at - 1) if at else [(GENESIS,)]
            values = {"family": rows[0][1], "parent": rows[0][0], "fork_at": at, "base": base[0][0]}
            run("add_fork", **_names(new), now=time.time(), **values)

        self.pool.transact(work)

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Many forks are erased in several transactions, the newest first and the conversation itself last,
        so that an interrupted erasure can be repeated.
        """
        which = {"and_theirs": with_forks, "most": MAX_ERASED if with_forks else None}

        def work(run: PostgresQueries) -> list[Key] | None:
            """None if there is more to erase."""
            cid = self._lock_family(run, key_digest(key))
            forks = run("forks", cid=cid, **which) if cid else []
            erased = [(fork, name) for fork, name, *_ in forks if with_forks]
            for _, name in erased:
                if name is not None:
                    run("hold", key=name)
            is_all = len(erased) < MAX_ERASED and (not erased or forks == run("forks", cid=cid, **which))
            if is_all:  # and no fork was added in between
                erased.append((cid, key_digest(key)))
            for one, name in erased:
                run("erase_shelf", scope=name)
                run("bury", cid=one)
            for one, _ in erased:  # forks come before their parents
                delete_unshared(run, one, lambda cid: run("seal", cid=cid))
            kept = [] if with_forks else [(owner, name) for *_, owner, name in reversed(forks) if name]
            return [Key(to_text(owner), to_text(name)) for owner, name in kept] if is_all else None

        while (kept := self.pool.transact(work)) is None:
            pass
        return kept

    def _lock_family(self, run: PostgresQueries, key: bytes) -> int | None:
        """Locks the conversation and all that share entries with it, against erasure by others."""
        while rows := run("conversation", key=key):
            run("hold_family", family=rows[0][1])
            cid: int | None = run("hold", key=key)[0][0]
            if cid == rows[0][0]:
                return cid
        return None

    # The shelf and settings

    def get(self, scope: Key | None, name: str, /) -> bytes | None:
        rows = self.pool("get_value", scope=_scope(scope), name=to_bytes(name))
        return rows[0][0] if rows else None

    def put(self, scope: Key | None, name: str, value: bytes | None, /, *, durable: bool = True) -> None:
        where = {"scope": _scope(scope), "name": to_bytes(name)}
        if value is None:
            self.pool("remove_value", **where)
        else:
            self.pool("put_value", **where, value=value, durable=durable)

    def compare_and_set(
        self, scope: Key | None, name: str, old: bytes | None, new: bytes, /, *, early: bool = False
    ) -> bool:
        where = {"scope": _scope(scope), "name": to_bytes(name)}
        if old is None:
            return bool(self.pool("add_value", **where, value=new, early=early))
        return bool(self.pool("replace_value", **where, value=new, old=old))

    def values(self, scope: Key | None, prefix: str, /) -> dict[str, bytes]:
        rows = self.pool("values", scope=_scope(scope), prefix=to_bytes(prefix))
        return {to_text(name): value for name, value in rows}

    def shelved(self, name: str, owner: str | None = None, /) -> Iterator[tuple[Key, bytes, int]]:
        owner_key = None if owner is None else owner_digest(owner)
        after = b""
        rows = None
        while rows is None or len(rows) == CHUNK:
            rows = self.pool("shelved", name=to_bytes(name), owner_key=owner_key, after=after, limit=CHUNK)
            for scope, owned, conversation, value, next in rows:
                after = scope
                yield Key(to_text(owned), to_text(conversation)), value, next

    def settings(self) -> Sequence[ToolSetting]:
        return read_settings(self.pool)

    def set_setting(self, setting: ToolSetting, /) -> None:
        self.pool.transact(lambda run: write_setting(run, setting))

    # Health

    def examine(self) -> Iterable[StoreProblem]:
        def work(run: PostgresQueries) -> tuple[list[Any], list[Any]]:
            run.lift_timeouts()
            return run("altered"), run("strays")

        altered, strays = self.pool.transact(work)
        yield from row_problems(self.pool.shown, [name for (name,) in altered], strays)

    def close(self) -> None:
        self.pool.close()


def from_url(url: str) -> PostgresStore:
    """The store in `postgresql://user:password@host/database`.

    Options of refold: `pool_size`, `timeout_s`, `statement_timeout_s`, `schema`. All others go to libpq.
    """
    plain, options = split_options(url)
    return PostgresStore(plain, **options)


def _names(key: Key) -> dict[str, Any]:
    owner, name = map(to_bytes, key)
    return {"key": key_digest(key), "owner_key": owner_digest(key.owner), "owner": owner, "name": name}


def _scope(key: Key | None) -> bytes:
    """Names a shelf; that of the whole store has no name."""
    return b"" if key is None else key_digest(key)


def _lease_name(lease: Lease | None) -> bytes | None:
    return None if lease is None else to_bytes(LEASE + lease.name)


def _fence(lease: Lease | None) -> dict[str, Any]:
    holder = None if lease is None else to_bytes(lease.holder)
    fence = None if lease is None else lease.fence
    return {"lease": _lease_name(lease), "holder": holder, "fence": fence}


def _next_values(entry: Entry, digests: Sequence[bytes]) -> dict[str, Any]:
    """The values of one entry; `digests` begins with the digest before it."""
    after, digest = digests
    id = None if entry.id is None else to_bytes(entry.id)
    body = pack(entry.body)
    row = {"kind": to_bytes(entry.kind), "id": id, "head": entry.head, "body": body, "digest": digest}
    return {"first": entry.at, "after": after, **row}


def _statements(entries: Sequence[Entry], digests: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The values of each statement that appends a batch; `digests` begins with the digest before it."""
    ids = [None if entry.id is None else to_bytes(entry.id) for entry in entries]
    bodies = [pack(entry.body) for entry in entries]
    start = 0
    size = 0
    for n, body in enumerate(bodies, 1):
        size += len(body)
        if size >= STATEMENT_BYTES or n == len(bodies):
            some = entries[start:n]
            columns = {"ids": ids[start:n], "bodies": bodies[start:n], "digests": digests[start + 1 : n + 1]}
            columns |= {"kinds": [to_bytes(one.kind) for one in some], "heads": [one.head for one in some]}
            yield {"first": some[0].at, "after": digests[start], **columns}
            start = n
            size = 0


def _place(at: int | None) -> int:
    return MAX_PLACE if at is None else max(0, min(at, MAX_PLACE))


def _is_last(rows: Sequence[Any]) -> bool:
    return len(rows) < CHUNK and sum(len(row[4]) for row in rows) < CHUNK_BYTES


def _link(row: Sequence[Any]) -> Link:
    return Link(to_entry(row), row[5])
