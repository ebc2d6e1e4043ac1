"""Which conversations there are in a Redis: their keys, and lists of them in the order of their creation.

A conversation is enrolled before it begins, so that none is stored that is not listed. Who enrolls and then
does not begin leaves a row with nothing behind it: that is passed over, and struck off when it is too late to
begin.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from refold.core.codec import to_bytes
from refold.core.errors import CorruptError
from refold.stores.redis_connection import Command, RedisConnection, ScriptCall
from refold.stores.store import LOCATED, Key

PAGE = 200
"""Conversations that are looked at in one go."""
NOT_BEGUN = "it is not stored, since what lists it is not yet certain on disk"
SWEEP_EVERY = 64
"""About so many conversations are created for each look at as many old ones as a page has."""
STALE_US = 1_200_000_000
"""A conversation that is not there so long after it was enrolled will not begin: twice what `lua` allows."""

KINDS = ("head", "log", "ids", "unsaid", "summaries", "kept")
"""The keys that a conversation has, as `lua/conversation.lua` expects them."""


class ConversationHead(NamedTuple):
    """What the head of a conversation says."""

    key: Key
    next: int
    order: bytes
    """Microseconds, as digits; no two conversations have the same."""
    parent: bytes
    """Name and order of what it is a fork of; empty if it is none."""
    fork_at: int
    cursor: int | None

    @property
    def name(self) -> bytes:
        """Tells it from any other, also from one that has the same key later."""
        return dumped(self.key, self.order)


class RedisKeys:
    """What keys are called. All of one conversation have the same hash tag, and so are in one slot."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.clock, self.all = f"{prefix}:{{list}}:clock", f"{prefix}:{{list}}:all"
        self.notes, self.settings = f"{prefix}:notes", f"{prefix}:settings"

    def of(self, key: Key, draft: str = "") -> list[str]:
        return self.by(member(key), draft)

    def by(self, member: bytes, draft: str = "") -> list[str]:
        return [f"{self._prefix}:{{{member[16:].hex()}}}:{draft}{kind}" for kind in KINDS]

    def owned(self, member: bytes) -> str:
        return f"{self._prefix}:{{list}}:{member[:16].hex()}"

    def located(self, owner: str, id: str) -> str:
        """Where it stands which conversations of the owner said something with an id."""
        return f"{self._prefix}:{{{_hash(to_bytes(owner)).hex()}}}:said:{_hash(to_bytes(id)).hex()}"

    def summary(self, owner: str, digest: bytes) -> str:
        """Where it stands which conversations of the owner keep a summary."""
        return f"{self._prefix}:{{{_hash(to_bytes(owner)).hex()}}}:summary:{_hash(digest).hex()}"


class ConversationList:
    def __init__(self, link: RedisConnection, names: RedisKeys) -> None:
        self._link, self._names = link, names

    def row(self, key: Key) -> ConversationHead | None:
        return self.rows([member(key)])[0]

    def rows(self, members: Sequence[bytes], cursor: bytes = b"next") -> list[ConversationHead | None]:
        found = self._link.each([ScriptCall("row", self._names.by(one), (cursor,)) for one in members])
        return [None if head[0] is None else _row(*head) for head in found]

    def pages(self, owner: str | None, cursor: bytes = b"next") -> Iterator[list[ConversationHead]]:
        """All that there are, the newest first."""
        before: bytes | str = "+inf"
        of = self._names.all if owner is None else self._names.owned(member(Key(owner, "")))
        while page := self._page(of, before, cursor):
            before, rows = page
            yield rows

    def _page(
        self, of: str, before: bytes | str, cursor: bytes
    ) -> tuple[bytes, list[ConversationHead]] | None:
        now, *listed = self._link.call("page", [of], before, PAGE)
        orders = dict(zip(listed[::2], listed[1::2], strict=True))
        rows = self.rows(list(orders), cursor)
        gone = [one for one, row in zip(orders, rows, strict=True) if row is None]
        stale = [one for one in gone if int(now) - int(orders[one]) > STALE_US]
        self._link.each([self._settling(one, orders[one], b"") for one in stale])
        there = [row for row in rows if row is not None]
        return (listed[-1], there) if listed else None

    def enroll(self, key: Key) -> bytes:
        one = member(key)
        keys = self._keys(one)
        order: bytes = self._link.call("enroll", keys, one, durable=True, unsafe=NOT_BEGUN)
        if int(order) % SWEEP_EVERY == 0:
            self._page(self._names.all, "", b"next")
        return order

    def settle(self, one: bytes, before: bytes, after: bytes) -> None:
        """Corrects where a conversation is listed, as long as it is listed at `before`; nowhere is b""."""
        if before != after:
            self._link.each([self._settling(one, before, after)])

    def _settling(self, one: bytes, before: bytes, after: bytes) -> ScriptCall:
        return ScriptCall("settle", self._keys(one), (one, before, after))

    def _keys(self, one: bytes) -> list[str]:
        return [self._names.clock, self._names.all, self._names.owned(one)]


def member(key: Key) -> bytes:
    """A conversation in a list: digests of its owner and of both its names."""
    owner, name = to_bytes(key.owner), to_bytes(key.conversation)
    return _hash(owner) + _hash(b"%d " % len(owner) + owner + name)


def dumped(key: Key, order: bytes = b"") -> bytes:
    return msgspec.msgpack.encode((to_bytes(key.owner), to_bytes(key.conversation), order))


def loaded(data: bytes) -> tuple[Key, bytes]:
    try:
        owner, name, order = msgspec.msgpack.decode(data, type=tuple[bytes, bytes, bytes])
    except msgspec.DecodeError as error:
        raise CorruptError(f"The name of a conversation was altered: {error}") from error
    return Key(text(owner), text(name)), order


def text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptError(f"A stored name or id is no text: {data!r}") from error


def _row(
    next: bytes,
    order: bytes,
    owner: bytes,
    name: bytes,
    parent: bytes | None,
    fork_at: bytes | None,
    cursor: bytes | None,
) -> ConversationHead:
    at = None if cursor is None else int(cursor)
    return ConversationHead(
        Key(text(owner), text(name)), int(next), order, parent or b"", int(fork_at or 0), at
    )


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class IdLocations:
    """What nobody said or looked for in `ttl` milliseconds is not found any more (0: it always is)."""

    def __init__(self, link: RedisConnection, names: RedisKeys, list: ConversationList, ttl: int) -> None:
        self._link, self._names, self._list, self._ttl = link, names, list, ttl

    def locate(self, owner: str, ids: Collection[str]) -> dict[str, tuple[Key, int]]:
        """Where each was said last, by those that are there; or else where it is kept by a fork."""
        names = {id: self._names.located(owner, id) for id in ids}
        asked = [("ZRANGE", name, 0, -1, "WITHSCORES") for name in names.values()]
        kept = [self._kept(name) for name in names.values()]
        answers = self._link.ask(asked[0][1], *asked, *kept)[: len(names)] if names else []
        left: dict[Key, dict[str, float]] = {}
        for id, said in zip(names, answers, strict=True):
            for name, since in zip(said[::2], said[1::2], strict=True):
                left.setdefault(Key(owner, text(name)), {})[id] = float(since)
        rows = [row for row in self._list.rows([member(key) for key in left]) if row is not None]
        finds = [ScriptCall("find", self._names.of(row.key), [*map(to_bytes, left[row.key])]) for row in rows]
        found = dict[str, tuple[bool, int, Key, int]]()
        for row, places in zip(rows, self._link.each(finds), strict=True):
            there = {id: int(at) for id, at in zip(left[row.key], places, strict=True) if at is not None}
            for id, at in there.items():
                one = (at >= row.fork_at, int(row.order), row.key, at)
                found[id] = max(found.get(id, one), one)
                del left[row.key][id]
        self._strike(names, left)
        return {id: (key, at) for id, (_, _, key, at) in found.items()}

    def _strike(self, names: dict[str, str], left: dict[Key, dict[str, float]]) -> None:
        stale = time.time() - STALE_US / 1_000_000
        pairs = [(id, key) for key, ids in left.items() for id, since in ids.items() if since < stale]
        gone = [("ZREM", names[id], to_bytes(key.conversation)) for id, key in pairs]
        if gone:
            self._link.ask(gone[0][1], *gone)

    def point(self, key: Key, ids: Iterable[str | None]) -> None:
        """Before they are stored there. Those that cannot be located are passed over."""
        located = [id for id in ids if id is not None and id.startswith(LOCATED)]
        names = [self._names.located(key.owner, id) for id in located]
        now, name = int(time.time()), to_bytes(key.conversation)
        if names:
            adds = [("ZADD", one, now, name) for one in names]
            self._link.ask(names[0], *adds, *map(self._kept, names))

    def forget(self, key: Key) -> None:
        """Before it is erased, since nobody knows its ids after that."""
        ids, name, cursor = self._names.of(key)[2], to_bytes(key.conversation), b""
        while cursor != b"0":
            look = ("HSCAN", ids, cursor or 0, "MATCH", f"{LOCATED}*", "COUNT", PAGE)
            ((cursor, page),) = self._link.ask(ids, look)
            names = [self._names.located(key.owner, text(id)) for id in page[::2]]
            if names:
                self._link.ask(names[0], *(("ZREM", one, name) for one in names))

    def _kept(self, name: str) -> Command:
        return ("PEXPIRE", name, self._ttl) if self._ttl else ("PERSIST", name)
