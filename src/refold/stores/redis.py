"""Streams in Redis or Valkey: fast, for many machines, and as durable as the server is set to be.

What is done to a conversation is a verb in `lua/`, so that it is done as a whole and in one round trip.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from refold.core import codec
from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, CorruptError, NotFoundError, SettingError, StoreError
from refold.core.event import Expiry
from refold.stores.packing import pack, unpack
from refold.stores.redis_connection import parse_url
from refold.stores.store import (
    KEPT_SUMMARIES,
    ConversationInfo,
    Key,
    Lease,
    Snapshot,
    StoreProblem,
    ToolSetting,
    require_held,
    require_next,
)
from refold.stores.url import require_between, shown_url

try:
    from refold.stores.redis_connection import RedisConnection, ScriptCall
    from refold.stores.redis_index import (
        STALE_US,
        SWEEP_EVERY,
        ConversationHead,
        ConversationList,
        IdLocations,
        RedisKeys,
        dumped,
        loaded,
        member,
        text,
    )
except ModuleNotFoundError as error:
    raise SettingError("redis://", 'needs redis-py: pip install "refold[redis]"') from error

MOST_BYTES = 500_000_000
"""In one append: servers take at most 512 MB in one piece."""
DRAFT_MS = 3_600_000
"""How long what was copied for a fork is kept that was never finished."""
END = 1 << 53
"""No place is as high; up to there Lua tells numbers apart."""


class _StoredEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at: int
    kind: bytes
    id: bytes | None
    head: bytes
    body: bytes
    digest: bytes
    """The last 16 bytes of it all, where `lua/conversation.lua` looks for it."""


class RedisStore:
    """Safe to use from many threads, from many processes, and after a fork of the process.

    A conversation that nobody used for `ttl_s` seconds is gone (0: never); reading is using. A fork has a
    copy of what it shares, so that it may outlive its parent. There is no index of words: to search is to
    read everything.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float = 7 * 24 * 3600,
        timeout_s: float = 10.0,
        wait_aof: tuple[int, int] = (0, 0),
        cluster: bool = False,
        prefix: str = "refold",
    ) -> None:
        """`wait_aof`: on how many disks an append must be when it returns, here (0 or 1) and of replicas."""
        require_between(f"store {shown_url(url)!r}", 0, 1e9, ttl_s=ttl_s)
        require_between(f"store {shown_url(url)!r}", 0.001, 1e6, timeout_s=timeout_s)
        self._ttl = max(1, int(ttl_s * 1000)) if ttl_s else 0
        self._waits = wait_aof[0] > 0
        self._names = RedisKeys(prefix)
        self._link = RedisConnection(url, timeout_s, wait_aof, cluster)
        self._list = ConversationList(self._link, self._names)
        self._said = IdLocations(self._link, self._names, self._list, self._ttl)

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        first = entries[0].at if entries else 0
        is_run = [entry.at for entry in entries] == list(range(first, first + len(entries)))
        field = b"" if lease is None else b"l:" + to_bytes(lease.name)
        while True:
            last = GENESIS if after is None and first == 0 else after
            if last is None or not entries or not is_run:
                tip = self._link.call("tip", self._names.of(key), field)
                last = _demanded(key, entries, after, lease, tip)
            if not entries:
                return last
            rows, digest = _chained(entries, last)
            fence = (field, b"", b"") if lease is None else (field, lease.fence, to_bytes(lease.holder))
            self._said.point(key, [entry.id for entry in entries])
            tip = self._store(key, rows, (first, last, digest), fence)
            if tip is None:
                return digest
            if tip:
                _demanded(key, entries, after, lease, tip)  # or else it was begun anew meanwhile: again

    def _store(
        self, key: Key, rows: Sequence[bytes], at: tuple[Any, ...], fence: tuple[Any, ...]
    ) -> list[bytes] | None:
        """None if it is stored; else the tip that it does not go on from, or [] if it took too long."""
        enrolled = self._list.enroll(key) if at[0] == 0 else b""
        names = (enrolled, to_bytes(key.owner), to_bytes(key.conversation))
        args = (self._ttl, *at, *names, *fence, *rows)
        answer = self._link.call("append", self._names.of(key), *args, durable=True)
        if answer == b"stored":
            return None
        state, *tip = answer
        if state == b"torn":
            raise CorruptError(f"{key.conversation!r} cannot go on: some of its keys were evicted or deleted")
        if state == b"stored":
            self._see(key, tip[1])
        if enrolled:
            order = {b"stored": tip[:1], b"conflict": tip[2:3]}.get(state) or [b""]
            self._list.settle(member(key), enrolled, order[0])
        return None if state == b"stored" else tip

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        start, last = _place(start), "" if stop is None else _place(stop)
        while stop is None or start < stop:
            args = (self._ttl, start, last, to_bytes(but or ""))
            due, more, *rows = self._link.call("read", self._names.of(key), *args)
            self._see(key, due)
            yield from (link for link in map(_link, rows) if link.entry.kind != but)
            if not more:
                return
            start = int(more)

    def resume(self, key: Key, view: str, /) -> tuple[Snapshot | None, Iterator[Link]]:
        answer = self._link.call("resume", self._names.of(key), self._ttl, to_bytes(view))
        snapshot, due, more, *rows = answer
        self._see(key, due)
        return _snapshot(snapshot) if snapshot else None, self._going_on(key, rows, more)

    def _going_on(self, key: Key, rows: Sequence[bytes], more: bytes) -> Iterator[Link]:
        yield from map(_link, rows)
        if more:
            yield from self.read(key, int(more))

    def fetch(self, key: Key, places: Collection[int], /) -> dict[int, Entry]:
        found, left = dict[int, Entry](), [at for at in places if 0 <= at < END]
        while left:  # once, unless they are very large
            due, *rows = self._link.call("fetch", self._names.of(key), self._ttl, *left)
            self._see(key, due)
            found |= {at: _link(row).entry for at, row in zip(left, rows, strict=False) if row}
            left = left[len(rows) :]
        return found

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        found = self._link.call("find", self._names.of(key), *map(to_bytes, ids)) if ids else []
        return {id: int(place) for id, place in zip(ids, found, strict=True) if place is not None}

    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        return self._said.locate(owner, ids)

    def wait(self, key: Key, next: int, seconds: float, /) -> bool:
        keys, until = self._names.of(key), time.monotonic() + seconds
        while True:
            left_s = until - time.monotonic()
            block_ms = max(1, int(1000 * min(left_s, self._link.timeout_s / 2)))
            block = ("BLOCK", block_ms) if left_s > 0 else ()
            look = ("XREAD", "COUNT", 1, *block, "STREAMS", keys[1], f"{_place(next)}-0")
            due, found = self._link.ask(keys[0], ScriptCall("use", keys, (self._ttl,)), look)
            self._see(key, due)
            if found or left_s <= 0:
                return bool(found)

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        for rows in self._list.pages(owner):
            parents = [loaded(row.parent)[0] for row in rows if row.parent]
            alive = {row.name for row in self._list.rows(list(map(member, parents))) if row is not None}
            for row in rows:
                parent = loaded(row.parent)[0] if row.parent in alive else None
                created = int(row.order) / 1_000_000
                yield ConversationInfo(row.key, created, row.next, parent, row.fork_at if parent else 0)

    def _see(self, key: Key, due: bytes) -> None:
        """That a conversation in use is listed, should the list have been lost."""
        if due:
            self._list.settle(member(key), b"", due)

    # Forking and erasing

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        parent = self._list.row(key)
        if self._list.row(new) is not None:
            raise ConflictError(f"There is a conversation {new.conversation!r} already")
        if parent is None or not 0 <= at <= parent.next:
            raise NotFoundError(f"{key.conversation!r} has no place {at}")
        draft = self._names.of(new, f"draft-{uuid4().hex}-")
        order = self._list.enroll(new)
        if int(order) % SWEEP_EVERY == 0:
            self._forks(parent, int(order))
        try:
            digest = self._draft(key, new, draft, at, order)
            if digest and self._publish(new, draft, order, parent, (at, digest, parent.name, at)):
                now = self._list.row(key)
                if now is not None and now.order == parent.order:
                    return
                self.erase(new)
            else:
                self._list.settle(member(new), order, b"")
        finally:
            self._link.ask(draft[0], ("UNLINK", *draft))
        raise NotFoundError(f"{key.conversation!r} was erased while it was copied")

    def _draft(self, key: Key, new: Key, draft: Sequence[str], at: int, order: bytes) -> bytes:
        """Copies the entries before a place to other keys; the last digest; b"" if it was erased."""
        start, digest = 0, GENESIS
        while start < at:
            _, _, *rows = self._link.call("read", self._names.of(key), self._ttl, start, at, b"")
            if not rows:
                return b""
            last = rows[-1][-len(GENESIS) :]
            names = (order, *[b""] * 5)
            stored = [_stored(row) for row in rows]
            marked = [part for one, row in zip(stored, rows, strict=True) for part in (_mark(one), row)]
            self._said.point(new, [text(one.id) for one in stored if one.id is not None])
            self._link.call("append", draft, DRAFT_MS, start, digest, last, *names, *marked)
            start, digest = start + len(rows), last
        return digest

    def _publish(
        self, new: Key, draft: Sequence[str], order: bytes, parent: ConversationHead, origin: tuple[Any, ...]
    ) -> bool:
        """False if the parent is gone."""
        keys, names = [*self._names.of(new), *draft], (to_bytes(new.owner), to_bytes(new.conversation))
        while self._adopt(parent.key, parent.order, dumped(new, order)):
            found = self._link.call("publish", keys, self._ttl, order, *names, *origin, durable=True)
            if found == b"torn":
                raise StoreError(f"The copy for {new.conversation!r} expired before it was done; retry")
            if found != b"late":
                self._list.settle(member(new), order, found)
                if found != order:
                    raise ConflictError(f"There is a conversation {new.conversation!r} already")
                return True
            order = self._list.enroll(new)
        return False

    def _adopt(self, parent: Key, order: bytes, fork: bytes) -> bool:
        return bool(self._link.call("adopt", self._names.of(parent), order, b"f:" + fork))

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        row = self._list.row(key)
        if row is None:
            self._link.call("erase", self._names.of(key), b"")  # somebody may have set a cursor
            return []
        doomed = [row]
        if with_forks:
            for one in doomed:
                doomed += self._forks(one)
        heirs = [] if with_forks else self._forks(row)
        for heir in heirs:
            self._hand_over(heir, row)
        for one in reversed(doomed):  # forks first: they are found by their parents
            self._said.forget(one.key)
            digests = self._link.call("erase", self._names.of(one.key), one.order, durable=True)
            self._list.settle(member(one.key), one.order, b"")
            for digest in digests:
                index = self._names.summary(one.key.owner, digest)
                self._link.ask(index, ("SREM", index, member(one.key)))
        if row.parent:
            head = self._names.of(loaded(row.parent)[0])[0]
            self._link.ask(head, ("HDEL", head, b"f:" + row.name))
        return [heir.key for heir in heirs]

    def _forks(self, row: ConversationHead, now_us: int = 0) -> list[ConversationHead]:
        """Strikes off those that are gone, or were not made and it is too late now."""
        head, *_ = keys = self._names.of(row.key)
        names = self._link.call("fields", keys, b"f:")[::2]
        orders = {name: loaded(name) for name in names}
        rows = self._list.rows([member(fork) for fork, _ in orders.values()])
        there = {fork.name: fork for fork in rows if fork is not None}
        late = [name for name, (_, order) in orders.items() if now_us - int(order) > STALE_US]
        gone = [b"f:" + name for name in late if name not in there]
        if gone:
            self._link.ask(head, ("HDEL", head, *gone))
        return [there[name] for name in names if name in there and there[name].parent == row.name]

    def _hand_over(self, fork: ConversationHead, erased: ConversationHead) -> None:
        """A fork becomes one of what the conversation that is erased was a fork of."""
        parent = b""
        if erased.parent:
            above, order = loaded(erased.parent)
            if self._adopt(above, order, fork.name):
                parent = erased.parent
        fork_at = min(fork.fork_at, erased.fork_at)
        self._link.call("reparent", self._names.of(fork.key), erased.name, parent, fork_at, durable=True)

    # Snapshots, leases, cursors

    def save(self, key: Key, view: str, snapshot: Snapshot, /) -> None:
        body = msgspec.msgpack.encode((pack(snapshot.body), snapshot.digest))
        self._link.call("save", self._names.of(key), b"v:" + to_bytes(view), snapshot.at, body)

    def saved(self, key: Key, /) -> dict[str, Snapshot]:
        fields = self._link.call("fields", self._names.of(key), b"v:")
        return {text(view): _snapshot(body) for view, body in zip(fields[::2], fields[1::2], strict=True)}

    def acquire(self, key: Key, name: str, holder: str, now: float, seconds: float, /) -> Lease | None:
        until = now + seconds
        args = (b"l:" + to_bytes(name), to_bytes(holder), repr(float(now)), repr(float(until)))
        fence = self._link.call("acquire", self._names.of(key), *args)
        return None if fence is None else Lease(name, holder, int(fence), until)

    def release(self, key: Key, lease: Lease, /) -> None:
        args = (b"l:" + to_bytes(lease.name), lease.fence, to_bytes(lease.holder))
        self._link.call("release", self._names.of(key), *args)

    def leases(self, key: Key, now: float, /) -> Sequence[Lease]:
        fields = self._link.call("fields", self._names.of(key), b"l:")
        leases = [_lease(text(name), held) for name, held in zip(fields[::2], fields[1::2], strict=True)]
        return [lease for lease in leases if lease.until > now]

    def cursor(self, key: Key, name: str, /) -> int | None:
        head = self._names.of(key)[0]
        (found,) = self._link.ask(head, ("HGET", head, b"c:" + to_bytes(name)))
        return None if found is None else int(found)

    def set_cursor(self, key: Key, name: str, next: int, /) -> None:
        args = (self._ttl, b"c:" + to_bytes(name), next)
        self._link.call("follow", self._names.of(key), *args, durable=True)

    def behind(self, name: str, /) -> Iterator[Key]:
        for rows in self._list.pages(None, b"c:" + to_bytes(name)):
            yield from (row.key for row in rows if row.cursor is not None and row.cursor < row.next)

    # Summaries, notes, settings

    def summary(self, key: Key, digest: bytes, /) -> bytes | None:
        found = self._link.call("summary", self._names.of(key), digest)
        index = self._names.summary(key.owner, digest)
        while found is None:
            (others,) = self._link.ask(index, ("SRANDMEMBER", index, 9))
            if not others:
                return None
            calls = [ScriptCall("summary", self._names.by(other), (digest,)) for other in others]
            found = next((one for one in self._link.each(calls) if one is not None), None)
            if found is None:  # erased, expired, or kept too long ago
                self._link.ask(index, ("SREM", index, *others))
        return unpack(found)

    def keep_summary(self, key: Key, digest: bytes, body: bytes, /) -> None:
        args = (self._ttl, KEPT_SUMMARIES, digest, pack(body))
        if self._link.call("keep", self._names.of(key), *args, durable=True):
            index = self._names.summary(key.owner, digest)
            last = ("PEXPIRE", index, self._ttl) if self._ttl else ("PERSIST", index)
            self._link.ask(index, ("SADD", index, member(key)), last)

    def note(self, name: str, /) -> bytes | None:
        (found,) = self._link.ask(self._names.notes, ("HGET", self._names.notes, to_bytes(name)))
        return None if found is None else bytes(found)

    def keep_note(self, name: str, body: bytes, /) -> None:
        self._link.ask(self._names.notes, ("HSET", self._names.notes, to_bytes(name), body))

    def settings(self) -> Sequence[ToolSetting]:
        (found,) = self._link.ask(self._names.settings, ("HGETALL", self._names.settings))
        return [_setting(name, body) for name, body in zip(found[::2], found[1::2], strict=True)]

    def set_setting(self, setting: ToolSetting, /) -> None:
        at, name = self._names.settings, codec.dumps([setting.agent, setting.tool])
        if setting.expiry == Expiry():
            self._link.ask(at, ("HDEL", at, name), durable=True)
        else:
            self._link.ask(at, ("HSET", at, name, codec.dumps(setting.expiry)), durable=True)

    # Health

    def examine(self) -> Iterable[StoreProblem]:
        for server in self._link.servers():
            yield from (StoreProblem(self._link.shown, *danger) for danger in _dangers(server, self._waits))
        for rows in self._list.pages(None):
            calls = [ScriptCall("examine", self._names.of(row.key)) for row in rows]
            for row, problems in zip(rows, self._link.each(calls), strict=True):
                for problem in problems:
                    yield StoreProblem(f"conversation {row.key.conversation!r}", problem.decode())

    def close(self) -> None:
        self._link.close()


def from_url(url: str) -> RedisStore:
    """The store behind `redis://host:6379/0`, `rediss://…` (TLS) or `unix:///path/to.sock`.

    Options: `?ttl_s=604800` (0: nothing expires), `?timeout_s=10`, `?wait_aof=1` or `?wait_aof=1,1` (on this
    disk, and on so many replicas'), `?cluster=1`, `?prefix=refold`; others are redis-py's.
    """
    plain, options = parse_url(url)
    return RedisStore(plain, **options)


def _place(at: int) -> int:
    return max(0, min(at, END))


def _demanded(
    key: Key, entries: Sequence[Entry], after: bytes | None, lease: Lease | None, tip: Sequence[bytes]
) -> bytes:
    """The last digest, if the entries go on from there."""
    next, last, _, held = tip
    if lease is not None:
        require_held(key, lease, _lease(lease.name, held) if held else None)
    require_next(key, entries, int(next), last, after)
    return last


def _dangers(server: dict[str, Any], waits: bool) -> Iterator[tuple[str, str]]:
    """The settings of a server that lose data, and what they should be."""
    policy = server.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"maxmemory-policy is {policy}, which drops conversations", "set it to noeviction"
    if not server.get("aof_enabled"):
        yield (
            "appendonly is off: a crash loses what was acknowledged since the last snapshot",
            "set it to yes",
        )
    elif waits and server.get("appendfsync") == "everysec" and server.get("server_name") == "valkey":
        yield "WAITAOF of Valkey answers before the disk does", "set appendfsync to always"


def _chained(entries: Sequence[Entry], digest: bytes) -> tuple[list[bytes], bytes]:
    """What is stored of entries, each with its mark before it, and the digest of the last."""
    rows = list[bytes]()
    for entry in entries:
        digest = chain(digest, entry)
        id = None if entry.id is None else to_bytes(entry.id)
        row = _StoredEntry(entry.at, to_bytes(entry.kind), id, entry.head, pack(entry.body), digest)
        rows += (_mark(row), msgspec.msgpack.encode(row))
    if sum(map(len, rows)) > MOST_BYTES:
        raise StoreError(f"An append has at most {MOST_BYTES:,} bytes in Redis; append less at a time")
    return rows, digest


def _mark(row: _StoredEntry) -> bytes:
    """What `lua/conversation.lua` has to know of an entry."""
    kind = b"s" if row.kind == b"said" else b"u"
    return kind if row.id is None else kind + b"=" + row.id


def _stored(data: bytes) -> _StoredEntry:
    try:
        return msgspec.msgpack.decode(data, type=_StoredEntry)
    except msgspec.DecodeError as error:
        raise CorruptError(f"A stored entry was altered: {error}") from error


def _link(data: bytes) -> Link:
    row = _stored(data)
    id = None if row.id is None else text(row.id)
    return Link(Entry(row.at, text(row.kind), id, row.head, unpack(row.body)), row.digest)


def _snapshot(data: bytes) -> Snapshot:
    at, _, rest = data.partition(b" ")
    try:
        body, digest = msgspec.msgpack.decode(rest, type=tuple[bytes, bytes])
        return Snapshot(int(at), unpack(body), digest)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptError(f"A stored snapshot was altered: {error}") from error


def _lease(name: str, held: bytes) -> Lease:
    fence, until, holder = held.split(b" ", 2)
    return Lease(name, text(holder), int(fence), float(until))


def _setting(name: bytes, body: bytes) -> ToolSetting:
    try:
        agent, tool = codec.loads(name)
        return ToolSetting(agent, tool, msgspec.convert(codec.loads(body), Expiry))
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptError(f"A stored setting was altered: {error}") from error
