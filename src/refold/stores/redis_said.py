"""Which conversations of an owner in a Redis said something with an id that can be located.

It is put down before the entry is stored, so that none is stored that is not found; what is put down and then
not stored is passed over, and struck off when it is too late to be stored.
"""

import time
from collections.abc import Collection, Iterable

from refold.core.codec import to_bytes
from refold.stores.redis_link import Call, Command, RedisLink
from refold.stores.redis_list import PAGE, STALE_US, Names, RedisList, member, text
from refold.stores.store import LOCATED, Key


class RedisSaid:
    """What nobody said or looked for in `ttl` milliseconds is not found any more (0: it always is)."""

    def __init__(self, link: RedisLink, names: Names, list: RedisList, ttl: int) -> None:
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
        finds = [Call("find", self._names.of(row.key), [*map(to_bytes, left[row.key])]) for row in rows]
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
