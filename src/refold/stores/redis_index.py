"""The lists of conversations in Redis, in the order of creation, and the locations of ids.

A conversation is listed before its first entry is stored, and the location of an id before its entry, so that
nothing is stored that cannot be found. What is listed and never stored is skipped, and removed once it is too
late to be stored.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from refold.core.codec import to_bytes
from refold.core.errors import CorruptError
from refold.stores.packing import to_text
from refold.stores.redis_connection import Command, RedisConnection, ScriptCall
from refold.stores.shelf import CURSOR, LEASE, SETTING, SNAPSHOT
from refold.stores.store import LOCATED, Key

PAGE = 200
SWEEP_EVERY = 64
"""After about so many new conversations, one page of old ones is checked for stale rows."""
STALE_US = 1_200_000_000
"""A listed conversation without entries is stale after so long: twice what `lua` allows."""

KINDS = ("head", "log", "ids", "unsaid", "summaries", "kept")
"""The keys of a conversation, in the order that `lua/conversation.lua` expects."""


class ConversationHead(NamedTuple):
    """The fields of a conversation's head."""

    key: Key
    next: int
    order: bytes
    """Creation time in microseconds, unique."""
    parent: bytes
    """Name of the conversation it was forked from; empty if none."""
    fork_at: int
    value: bytes | None
    """A field of its shelf."""

    @property
    def name(self) -> bytes:
        """Identifies it, also among later conversations with the same key."""
        return encode_name(self.key, self.order)


class RedisKeys:
    """Names of keys. Those of one conversation share a hash tag, and so a slot."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.clock = f"{prefix}:{{list}}:clock"
        self.all = f"{prefix}:{{list}}:all"

    def of(self, key: Key, draft: str = "") -> list[str]:
        return self.by(member(key), draft)

    def by(self, member: bytes, draft: str = "") -> list[str]:
        return [f"{self._prefix}:{{{member[16:].hex()}}}:{draft}{kind}" for kind in KINDS]

    def value(self, scope: Key | None, name: str) -> tuple[str, bytes]:
        """The hash and the field of a value on a shelf. The head of a conversation has other fields, too."""
        if scope is not None:
            is_plain = name.startswith((SNAPSHOT, LEASE, CURSOR))
            return self.of(scope)[0], to_bytes(name if is_plain else f"n:{name}")
        if name.startswith(SETTING):
            return f"{self._prefix}:settings", to_bytes(name.removeprefix(SETTING))
        return f"{self._prefix}:notes", to_bytes(name)

    def owned(self, member: bytes) -> str:
        return f"{self._prefix}:{{list}}:{member[:16].hex()}"

    def located(self, owner: str, id: str) -> str:
        """The set of an owner's conversations that contain an id."""
        return f"{self._prefix}:{{{_hash(to_bytes(owner)).hex()}}}:said:{_hash(to_bytes(id)).hex()}"

    def shelved(self, owner: str, field: bytes) -> str:
        """The set of an owner's conversations that have a value in this field."""
        return f"{self._prefix}:{{{_hash(to_bytes(owner)).hex()}}}:shelf:{_hash(field).hex()}"


class ConversationList:
    def __init__(self, connection: RedisConnection, keys: RedisKeys) -> None:
        self._connection = connection
        self._keys = keys

    def row(self, key: Key) -> ConversationHead | None:
        return self.rows([member(key)])[0]

    def rows(self, members: Sequence[bytes], field: bytes = b"next") -> list[ConversationHead | None]:
        found = self._connection.call_each(
            [ScriptCall("row", self._keys.by(one), (field,)) for one in members]
        )
        return [None if head[0] is None else _row(*head) for head in found]

    def pages(self, owner: str | None, field: bytes = b"next") -> Iterator[list[ConversationHead]]:
        """All conversations, the newest first."""
        before: bytes | str = "+inf"
        of = self._keys.all if owner is None else self._keys.owned(member(Key(owner, "")))
        while page := self._page(of, before, field):
            before, rows = page
            yield rows

    def _page(
        self, of: str, before: bytes | str, field: bytes
    ) -> tuple[bytes, list[ConversationHead]] | None:
        now, *listed = self._connection.call("page", [of], before, PAGE)
        orders = dict(zip(listed[::2], listed[1::2], strict=True))
        rows = self.rows(list(orders), field)
        gone = [one for one, row in zip(orders, rows, strict=True) if row is None]
        stale = [one for one in gone if int(now) - int(orders[one]) > STALE_US]
        self._connection.call_each([self._settling(one, orders[one], b"") for one in stale])
        there = [row for row in rows if row is not None]
        return (listed[-1], there) if listed else None

    def enroll(self, key: Key) -> bytes:
        one = member(key)
        keys = self._list_keys(one)
        order: bytes = self._connection.call("enroll", keys, one, durable=True)
        if int(order) % SWEEP_EVERY == 0:
            self._page(self._keys.all, "", b"next")
        return order

    def settle(self, one: bytes, before: bytes, after: bytes) -> None:
        """Moves a list entry from `before` to `after`, if it is at `before`. Empty means not listed."""
        if before != after:
            self._connection.call_each([self._settling(one, before, after)])

    def _settling(self, one: bytes, before: bytes, after: bytes) -> ScriptCall:
        return ScriptCall("settle", self._list_keys(one), (one, before, after))

    def _list_keys(self, one: bytes) -> list[str]:
        return [self._keys.clock, self._keys.all, self._keys.owned(one)]


def member(key: Key) -> bytes:
    """The list entry of a conversation: digests of its owner and of its key."""
    owner = to_bytes(key.owner)
    name = to_bytes(key.conversation)
    return _hash(owner) + _hash(b"%d " % len(owner) + owner + name)


def encode_name(key: Key, order: bytes = b"") -> bytes:
    return msgspec.msgpack.encode((to_bytes(key.owner), to_bytes(key.conversation), order))


def decode_name(data: bytes) -> tuple[Key, bytes]:
    try:
        owner, name, order = msgspec.msgpack.decode(data, type=tuple[bytes, bytes, bytes])
    except msgspec.DecodeError as error:
        raise CorruptError(f"A stored conversation name was altered: {error}") from error
    return Key(to_text(owner), to_text(name)), order


def _row(
    next: bytes,
    order: bytes,
    owner: bytes,
    name: bytes,
    parent: bytes | None,
    fork_at: bytes | None,
    value: bytes | None,
) -> ConversationHead:
    return ConversationHead(
        Key(to_text(owner), to_text(name)), int(next), order, parent or b"", int(fork_at or 0), value
    )


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class IdLocations:
    """Which conversations contain an id. A location expires `ttl` ms after its last use (0: never)."""

    def __init__(
        self, connection: RedisConnection, keys: RedisKeys, list: ConversationList, ttl: int
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._list = list
        self._ttl = ttl

    def locate(self, owner: str, ids: Collection[str]) -> dict[str, tuple[Key, int]]:
        """The newest conversation that recorded each id, or else a fork that shares it."""
        names = {id: self._keys.located(owner, id) for id in ids}
        lookups = [("ZRANGE", name, 0, -1, "WITHSCORES") for name in names.values()]
        expiries = [self._expiry(name) for name in names.values()]
        answers = self._connection.send(lookups[0][1], *lookups, *expiries)[: len(names)] if names else []
        left: dict[Key, dict[str, float]] = {}
        for id, said in zip(names, answers, strict=True):
            for name, since in zip(said[::2], said[1::2], strict=True):
                left.setdefault(Key(owner, to_text(name)), {})[id] = float(since)
        rows = [row for row in self._list.rows([member(key) for key in left]) if row is not None]
        finds = [ScriptCall("find", self._keys.of(row.key), [*map(to_bytes, left[row.key])]) for row in rows]
        found = dict[str, tuple[bool, int, Key, int]]()
        for row, places in zip(rows, self._connection.call_each(finds), strict=True):
            there = {id: int(at) for id, at in zip(left[row.key], places, strict=True) if at is not None}
            for id, at in there.items():
                one = (at >= row.fork_at, int(row.order), row.key, at)
                found[id] = max(found.get(id, one), one)
                del left[row.key][id]
        self._remove_stale(names, left)
        return {id: (key, at) for id, (_, _, key, at) in found.items()}

    def _remove_stale(self, names: dict[str, str], left: dict[Key, dict[str, float]]) -> None:
        stale = time.time() - STALE_US / 1_000_000
        pairs = [(id, key) for key, ids in left.items() for id, since in ids.items() if since < stale]
        gone = [("ZREM", names[id], to_bytes(key.conversation)) for id, key in pairs]
        if gone:
            self._connection.send(gone[0][1], *gone)

    def add(self, key: Key, ids: Iterable[str | None]) -> None:
        """Must be called before the entries are stored. Ids without the `LOCATED` prefix are skipped."""
        located = [id for id in ids if id is not None and id.startswith(LOCATED)]
        names = [self._keys.located(key.owner, id) for id in located]
        now = int(time.time())
        name = to_bytes(key.conversation)
        if names:
            adds = [("ZADD", one, now, name) for one in names]
            self._connection.send(names[0], *adds, *map(self._expiry, names))

    def forget(self, key: Key) -> None:
        """Must be called before the conversation is erased, while its ids are known."""
        ids = self._keys.of(key)[2]
        name = to_bytes(key.conversation)
        cursor = b""
        while cursor != b"0":
            look = ("HSCAN", ids, cursor or 0, "MATCH", f"{LOCATED}*", "COUNT", PAGE)
            ((cursor, page),) = self._connection.send(ids, look)
            names = [self._keys.located(key.owner, to_text(id)) for id in page[::2]]
            if names:
                self._connection.send(names[0], *(("ZREM", one, name) for one in names))

    def _expiry(self, name: str) -> Command:
        return ("PEXPIRE", name, self._ttl) if self._ttl else ("PERSIST", name)
