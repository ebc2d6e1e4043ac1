"""Conversations in Redis or Valkey: fast, for many machines, and as durable as the server is configured.

Each operation on a conversation is a verb in `lua/`, so that it is atomic and takes one round trip.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import msgspec

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, CorruptError, NotFoundError, SettingError, StoreError
from refold.stores.packing import pack, to_text, unpack
from refold.stores.redis_connection import RedisConnection, ScriptCall
from refold.stores.redis_index import (
    STALE_US,
    SWEEP_EVERY,
    ConversationHead,
    ConversationList,
    IdLocations,
    RedisKeys,
    decode_name,
    encode_name,
    member,
)
from refold.stores.shelf import LEASE, Shelf, decode_snapshot, require_held
from refold.stores.store import LOCATED, ConversationInfo, Key, Lease, Snapshot, StoreProblem, require_next
from refold.stores.url import SWITCH, UrlOption, parse_options, require_between, shown_url, split_url

MAX_BYTES = 500_000_000
"""Of one append: servers accept at most 512 MB in one piece."""
DRAFT_MS = 3_600_000
"""An unfinished copy for a fork expires after so long."""
MAX_PLACE = 1 << 53
"""Up to here, Lua's numbers are exact."""

_NUMBER = r"\d{1,9}"
_POSITIVE = r"(?=.*[1-9])\d{1,6}(\.\d+)?"
_ANY = UrlOption(r".+", "a value")
OPTIONS = {
    "cluster": SWITCH,
    "prefix": UrlOption(r"[\w.:-]+", "letters, digits and . : - _"),
    "timeout_s": UrlOption(_POSITIVE, "seconds", float),
    "ttl_s": UrlOption(rf"{_NUMBER}(\.\d+)?", "seconds, or 0 for never", float),
    "wait_aof": UrlOption(
        r"[01](,\d)?",
        "1, or 1,2 for two replicas besides",
        lambda value: tuple(map(int, f"{value},0".split(",")[:2])),
    ),
}
DRIVER_OPTIONS = {
    "db": UrlOption(_NUMBER, "the number of a database"),
    "health_check_interval": UrlOption(_NUMBER, "seconds"),
    "max_connections": UrlOption(r"[1-9]\d{0,8}", "a number above 0"),
    "socket_connect_timeout": UrlOption(_POSITIVE, "seconds"),
    **dict.fromkeys(("client_name", "socket_keepalive", "ssl_ca_certs", "ssl_ca_path"), _ANY),
    **dict.fromkeys(("ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"), _ANY),
}


class _StoredEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at: int
    kind: bytes
    id: bytes | None
    head: bytes
    body: bytes
    digest: bytes
    """The last 16 bytes of the encoded entry, where `lua/conversation.lua` reads it."""


class RedisStore(Shelf):
    """Safe to use from many threads, from many processes, and after a fork of the process.

    A conversation expires `ttl_s` seconds after its last use, reads included (0: never). A fork copies what
    it shares, so that it can outlive its parent. There is no search index: a search reads everything.
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
        """`wait_aof`: how many disks must have an append before it returns: here (0 or 1), of replicas."""
        require_between(f"store {shown_url(url)!r}", 0, 1e9, ttl_s=ttl_s)
        require_between(f"store {shown_url(url)!r}", 0.001, 1e6, timeout_s=timeout_s)
        self._ttl = max(1, int(ttl_s * 1000)) if ttl_s else 0
        self._waits = wait_aof[0] > 0
        self._keys = RedisKeys(prefix)
        self._connection = RedisConnection(url, timeout_s, wait_aof, cluster)
        self._list = ConversationList(self._connection, self._keys)
        self._locations = IdLocations(self._connection, self._keys, self._list, self._ttl)

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        keys = self._keys.of(key)
        first = entries[0].at if entries else 0
        is_run = [entry.at for entry in entries] == list(range(first, first + len(entries)))
        field = b"" if lease is None else to_bytes(LEASE + lease.name)
        fence = (field, b"", b"") if lease is None else (field, lease.fence, to_bytes(lease.holder))
        while True:
            last = GENESIS if after is None and first == 0 else after
            if last is None or not entries or not is_run:
                last = _require(key, entries, after, lease, self._connection.call("tip", keys, field))
            if not entries:
                return last
            rows, digest = _chained(entries, last)
            self._locations.add(key, [entry.id for entry in entries])
            enrolled = self._list.enroll(key) if first == 0 else b""
            names = (enrolled, to_bytes(key.owner), to_bytes(key.conversation))
            args = (self._ttl, first, last, digest, *names, *fence, *rows)
            state, order, due, *tip = self._connection.call("append", keys, *args, durable=True)
            if state == b"torn":
                problem = "some of its keys were evicted or deleted"
                raise CorruptError(f"{key.conversation!r} is incomplete: {problem}")
            self._relist(key, due)
            if enrolled:
                self._list.settle(member(key), enrolled, order)
            if state == b"stored":
                return digest
            if tip:
                _require(key, entries, after, lease, tip)  # else it was erased and started again: retry

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        start = _place(start)
        last = "" if stop is None else _place(stop)
        while stop is None or start < stop:
            args = (self._ttl, start, last, to_bytes(but or ""))
            due, more, *rows = self._connection.call("read", self._keys.of(key), *args)
            self._relist(key, due)
            yield from (link for link in map(_link, rows) if link.entry.kind != but)
            if not more:
                return
            start = int(more)

    def resume(self, key: Key, view: str, /) -> tuple[Snapshot | None, Iterator[Link]]:
        answer = self._connection.call("resume", self._keys.of(key), self._ttl, to_bytes(view))
        snapshot, due, more, *rows = answer
        self._relist(key, due)
        return decode_snapshot(snapshot) if snapshot else None, self._continue(key, rows, more)

    def _continue(self, key: Key, rows: Sequence[bytes], more: bytes) -> Iterator[Link]:
        yield from map(_link, rows)
        if more:
            yield from self.read(key, int(more))

    def fetch(self, key: Key, places: Collection[int], /) -> dict[int, Entry]:
        found = dict[int, Entry]()
        left = [at for at in places if 0 <= at < MAX_PLACE]
        while left:  # one round trip, unless they are very large
            due, *rows = self._connection.call("fetch", self._keys.of(key), self._ttl, *left)
            self._relist(key, due)
            found |= {at: _link(row).entry for at, row in zip(left, rows, strict=False) if row}
            left = left[len(rows) :]
        return found

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        found = self._connection.call("find", self._keys.of(key), *map(to_bytes, ids)) if ids else []
        return {id: int(place) for id, place in zip(ids, found, strict=True) if place is not None}

    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        return self._locations.locate(owner, ids)

    def wait(self, key: Key, next: int, seconds: float, /) -> bool:
        keys = self._keys.of(key)
        until = time.monotonic() + seconds
        while True:
            left_s = until - time.monotonic()
            block_ms = max(1, int(1000 * min(left_s, self._connection.timeout_s / 2)))
            block = ("BLOCK", block_ms) if left_s > 0 else ()
            look = ("XREAD", "COUNT", 1, *block, "STREAMS", keys[1], f"{_place(next)}-0")
            due, found = self._connection.send(keys[0], ScriptCall("use", keys, (self._ttl,)), look)
            self._relist(key, due)
            if found or left_s <= 0:
                return bool(found)

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        for rows in self._list.pages(owner):
            parents = [decode_name(row.parent)[0] for row in rows if row.parent]
            alive = {row.name for row in self._list.rows(list(map(member, parents))) if row is not None}
            for row in rows:
                parent = decode_name(row.parent)[0] if row.parent in alive else None
                created = int(row.order) / 1_000_000
                yield ConversationInfo(row.key, created, row.next, parent, row.fork_at if parent else 0)

    def _relist(self, key: Key, due: bytes) -> None:
        """Lists a conversation in use again, if its list entry was lost."""
        if due:
            self._list.settle(member(key), b"", due)

    # Forking and erasing

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        parent = self._list.row(key)
        if self._list.row(new) is not None:
            raise ConflictError(f"Conversation {new.conversation!r} already exists")
        if parent is None or not 0 <= at <= parent.next:
            raise NotFoundError(f"{key.conversation!r} has no place {at}")
        draft = self._keys.of(new, f"draft-{uuid4().hex}-")
        order = self._list.enroll(new)
        if int(order) % SWEEP_EVERY == 0:
            self._forks(parent, int(order))
        try:
            digest = self._draft(key, new, draft, at, order)
            is_forked = bool(digest) and self._publish(new, draft, order, parent, at, digest)
        finally:
            self._connection.send(draft[0], ("UNLINK", *draft))
        now = self._list.row(key)
        if is_forked and now is not None and now.order == parent.order:
            return
        if is_forked:
            self.erase(new)
        else:
            self._list.settle(member(new), order, b"")
        raise NotFoundError(f"{key.conversation!r} was erased while it was copied")

    def _draft(self, key: Key, new: Key, draft: Sequence[str], at: int, order: bytes) -> bytes:
        """Copies the entries before a place to other keys; returns the last digest, empty if erased."""
        start = 0
        digest = GENESIS
        while start < at:
            _, _, *rows = self._connection.call("read", self._keys.of(key), self._ttl, start, at, b"")
            if not rows:
                return b""
            last = rows[-1][-len(GENESIS) :]
            stored = [_stored(row) for row in rows]
            marked = [part for one, row in zip(stored, rows, strict=True) for part in (_mark(one), row)]
            self._locations.add(new, [to_text(one.id) for one in stored if one.id is not None])
            names = (order, *[b""] * 5)
            args = (DRAFT_MS, start, digest, last, *names, *marked)
            if self._connection.call("append", draft, *args)[0] != b"stored":
                break  # it expired: `publish` refuses it
            start = start + len(rows)
            digest = last
        return digest

    def _publish(
        self, new: Key, draft: Sequence[str], order: bytes, parent: ConversationHead, at: int, digest: bytes
    ) -> bool:
        """False if the parent is gone."""
        if not self._adopt(parent.key, parent.order, encode_name(new, order)):
            return False
        keys = [*self._keys.of(new), *draft]
        names = (to_bytes(new.owner), to_bytes(new.conversation))
        args = (self._ttl, order, *names, at, digest, parent.name, at)
        found = self._connection.call("publish", keys, *args, durable=True)
        if found in (b"torn", b"late"):
            raise StoreError(f"The copy for {new.conversation!r} expired before it was done; retry")
        self._list.settle(member(new), order, found)
        if found != order:
            raise ConflictError(f"Conversation {new.conversation!r} already exists")
        return True

    def _adopt(self, parent: Key, order: bytes, fork: bytes) -> bool:
        return bool(self._connection.call("adopt", self._keys.of(parent), order, b"f:" + fork))

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        row = self._list.row(key)
        if row is None:
            self._connection.call("erase", self._keys.of(key), b"")  # it may have cursors
            return []
        erased = [row]
        if with_forks:
            for one in erased:
                erased += self._forks(one)
        heirs = [] if with_forks else self._forks(row)
        for heir in heirs:
            self._hand_over(heir, row)
        for one in reversed(erased):  # forks first: they are found through their parents
            self._locations.forget(one.key)
            fields = self._connection.call("erase", self._keys.of(one.key), one.order, durable=True)
            self._list.settle(member(one.key), one.order, b"")
            for field in fields:
                index = self._keys.shelved(one.key.owner, field)
                self._connection.send(index, ("SREM", index, member(one.key)))
        if row.parent:
            head = self._keys.of(decode_name(row.parent)[0])[0]
            self._connection.send(head, ("HDEL", head, b"f:" + row.name))
        return [heir.key for heir in heirs]

    def _forks(self, row: ConversationHead, now_us: int = 0) -> list[ConversationHead]:
        """The forks of a conversation; removes those that are gone, or were never finished."""
        head, *_ = keys = self._keys.of(row.key)
        names = self._connection.call("fields", keys, b"f:")[::2]
        orders = {name: decode_name(name) for name in names}
        rows = self._list.rows([member(fork) for fork, _ in orders.values()])
        there = {fork.name: fork for fork in rows if fork is not None}
        late = [name for name, (_, order) in orders.items() if now_us - int(order) > STALE_US]
        gone = [b"f:" + name for name in late if name not in there]
        if gone:
            self._connection.send(head, ("HDEL", head, *gone))
        return [there[name] for name in names if name in there and there[name].parent == row.name]

    def _hand_over(self, fork: ConversationHead, erased: ConversationHead) -> None:
        """A fork of an erased conversation becomes a fork of its parent."""
        parent = b""
        if erased.parent:
            above, order = decode_name(erased.parent)
            if self._adopt(above, order, fork.name):
                parent = erased.parent
        fork_at = min(fork.fork_at, erased.fork_at)
        self._connection.call("reparent", self._keys.of(fork.key), erased.name, parent, fork_at, durable=True)

    # The shelf

    def get(self, scope: Key | None, name: str, /) -> bytes | None:
        at, field = self._keys.value(scope, name)
        (found,) = self._connection.send(at, ("HGET", at, field))
        return None if found is None else bytes(found)

    def put(self, scope: Key | None, name: str, value: bytes | None, /, *, durable: bool = True) -> None:
        at, field = self._keys.value(scope, name)
        if scope is None or value is None:
            command = ("HDEL", at, field) if value is None else ("HSET", at, field, value)
            self._connection.send(at, command, durable=durable)
            return
        args = (self._ttl, field, value)
        is_put = self._connection.call("put", self._keys.of(scope), *args, durable=durable)
        if is_put and name.startswith(LOCATED):
            index = self._keys.shelved(scope.owner, field)
            last = ("PEXPIRE", index, self._ttl) if self._ttl else ("PERSIST", index)
            self._connection.send(index, ("SADD", index, member(scope)), last)

    def compare_and_set(
        self, scope: Key | None, name: str, old: bytes | None, new: bytes, /, *, early: bool = False
    ) -> bool:
        at, field = self._keys.value(scope, name)
        keys = [at] if scope is None else self._keys.of(scope)
        ttl = "" if scope is None else self._ttl
        must_exist = int(scope is not None and not early)
        known = (0, b"") if old is None else (1, old)
        args = (ttl, must_exist, field, *known, new)
        return bool(self._connection.call("compare_and_set", keys, *args, durable=True))

    def values(self, scope: Key | None, prefix: str, /) -> dict[str, bytes]:
        at, field = self._keys.value(scope, prefix)
        found = self._connection.call("fields", [at], field)
        rest = zip(found[::2], found[1::2], strict=True)
        return {prefix + to_text(name): value for name, value in rest}

    def shelved(self, name: str, owner: str | None = None, /) -> Iterator[tuple[Key, bytes, int]]:
        _, field = self._keys.value(Key("", ""), name)
        if owner is None or not name.startswith(LOCATED):
            for rows in self._list.pages(owner, field):
                yield from ((row.key, row.value, row.next) for row in rows if row.value is not None)
            return
        index = self._keys.shelved(owner, field)
        while True:
            (members,) = self._connection.send(index, ("SRANDMEMBER", index, 9))
            rows = [row for row in self._list.rows(members, field) if row is not None]
            found = [(row.key, row.value, row.next) for row in rows if row.value is not None]
            yield from found
            if found or not members:
                return
            self._connection.send(index, ("SREM", index, *members))  # erased, expired or evicted

    # Health

    def examine(self) -> Iterable[StoreProblem]:
        for server in self._connection.servers():
            yield from (
                StoreProblem(self._connection.shown, *danger) for danger in _dangers(server, self._waits)
            )
        for rows in self._list.pages(None):
            calls = [ScriptCall("examine", self._keys.of(row.key)) for row in rows]
            for row, problems in zip(rows, self._connection.call_each(calls), strict=True):
                for problem in problems:
                    yield StoreProblem(f"conversation {row.key.conversation!r}", problem.decode())

    def close(self) -> None:
        self._connection.close()


def from_url(url: str) -> RedisStore:
    """The store behind `redis://host:6379/0`, `rediss://…` (TLS) or `unix:///path/to.sock`.

    Options: `?ttl_s=604800` (0: nothing expires), `?timeout_s=10`, `?wait_aof=1` or `?wait_aof=1,1` (on this
    disk, and on so many replicas'), `?cluster=1`, `?prefix=refold`; others go to redis-py.
    """
    url = re.sub("^valkey", "redis", url)
    parts = split_url(url)
    plain = url.partition("?")[0]
    where = f"store {shown_url(plain)!r}"
    options = parse_options(where, parts.query, OPTIONS | DRIVER_OPTIONS)
    ours = {name: options.pop(name) for name in OPTIONS if name in options}
    if parts.scheme != "unix" and not re.fullmatch(rf"/?|/{_NUMBER}", parts.path, re.ASCII):
        raise SettingError(where, "expected nothing after the host, or the number of a database")
    if ours.get("cluster") and (parts.scheme == "unix" or int(options.get("db") or parts.path[1:] or 0)):
        raise SettingError(where, "a cluster is reached by redis:// or rediss://, and has only database 0")
    return RedisStore(f"{plain}?{urlencode(options)}" if options else plain, **ours)


def _place(at: int) -> int:
    return max(0, min(at, MAX_PLACE))


def _require(
    key: Key, entries: Sequence[Entry], after: bytes | None, lease: Lease | None, tip: Sequence[bytes]
) -> bytes:
    """Returns the last digest, if the entries continue from there."""
    next, last, held = tip
    require_held(key, lease, held)
    require_next(key, entries, int(next), last, after)
    return last


def _dangers(server: dict[str, Any], waits: bool) -> Iterator[tuple[str, str]]:
    """Server settings that lose data, and what to set instead."""
    policy = server.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"maxmemory-policy is {policy}, which evicts conversations", "set it to noeviction"
    if not server.get("aof_enabled"):
        yield (
            "appendonly is off: a crash loses what was acknowledged since the last snapshot",
            "set it to yes",
        )
    elif waits and server.get("appendfsync") == "everysec" and server.get("server_name") == "valkey":
        yield "WAITAOF of Valkey answers before the disk does", "set appendfsync to always"


def _chained(entries: Sequence[Entry], digest: bytes) -> tuple[list[bytes], bytes]:
    """The encoded entries, each after its mark, and the digest of the last."""
    rows = list[bytes]()
    for entry in entries:
        digest = chain(digest, entry)
        id = None if entry.id is None else to_bytes(entry.id)
        row = _StoredEntry(entry.at, to_bytes(entry.kind), id, entry.head, pack(entry.body), digest)
        rows += (_mark(row), msgspec.msgpack.encode(row))
    if sum(map(len, rows)) > MAX_BYTES:
        raise StoreError(f"Redis takes at most {MAX_BYTES:,} bytes in one append; append less at a time")
    return rows, digest


def _mark(row: _StoredEntry) -> bytes:
    """What `lua/conversation.lua` needs to know about an entry."""
    kind = b"s" if row.kind == b"said" else b"u"
    return kind if row.id is None else kind + b"=" + row.id


def _stored(data: bytes) -> _StoredEntry:
    try:
        return msgspec.msgpack.decode(data, type=_StoredEntry)
    except msgspec.DecodeError as error:
        raise CorruptError(f"A stored entry was altered: {error}") from error


def _link(data: bytes) -> Link:
    row = _stored(data)
    id = None if row.id is None else to_text(row.id)
    return Link(Entry(row.at, to_text(row.kind), id, row.head, unpack(row.body)), row.digest)
