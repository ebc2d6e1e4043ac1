"""Conversations in this process's memory: for tests and one-off fits."""

import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock

from refold.core.codec import GENESIS, Entry, Link, chain
from refold.core.errors import ConflictError, NotFoundError, SettingError
from refold.stores.shelf import LEASE, Shelf, require_held
from refold.stores.store import ConversationInfo, Key, Lease, require_next
from refold.stores.url import shown_url


@dataclass(slots=True)
class _Conversation:
    created: float
    parent: Key | None = None
    fork_at: int = 0
    links: list[Link] = field(default_factory=list)
    """Including those that a fork shares."""
    places: dict[str, int] = field(default_factory=dict)

    def add(self, links: Sequence[Link]) -> None:
        self.links += links
        self.places |= {link.entry.id: link.entry.at for link in links if link.entry.id is not None}


class MemoryStore(Shelf):
    """Safe to use from many threads; gone with the process."""

    def __init__(self) -> None:
        self._all: dict[Key, _Conversation] = {}
        self._shelf: dict[tuple[Key | None, str], bytes] = {}
        self._lock = RLock()

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        with self._lock:
            own = self._all.get(key) or _Conversation(time.time())
            require_held(key, lease, None if lease is None else self.get(key, LEASE + lease.name))
            digest = own.links[-1].digest if own.links else GENESIS
            require_next(key, entries, len(own.links), digest, after)
            links = []
            for entry in entries:
                digest = chain(digest, entry)
                links.append(Link(entry, digest))
            if links:
                own.add(links)
                self._all[key] = own
            return digest

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        with self._lock:
            own = self._all.get(key)
            links = own.links[max(0, start) : stop] if own else []
        return (link for link in links if link.entry.kind != but)

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        with self._lock:
            places = self._all[key].places if key in self._all else {}
            return {id: places[id] for id in ids if id in places}

    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        with self._lock:
            found: dict[str, tuple[Key, int]] = {}
            for key, one in self._all.items():
                if key.owner == owner:
                    places = {id: at for id in ids if (at := one.places.get(id, -1)) >= one.fork_at}
                    found |= {id: (key, at) for id, at in places.items()}
            return found

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        with self._lock:
            own = self._all.pop(key, None)
            self._shelf = {of: value for of, value in self._shelf.items() if of[0] != key}
            forks = [fork for fork, one in self._all.items() if own and one.parent == key]
            if with_forks:
                for fork in forks:
                    self.erase(fork, with_forks=True)
                return []
            for fork in forks:
                one = self._all[fork]
                assert own is not None
                one.parent = own.parent
                one.fork_at = min(one.fork_at, own.fork_at)
            return forks

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        with self._lock:
            rows = [
                ConversationInfo(key, one.created, len(one.links), one.parent, one.fork_at)
                for key, one in self._all.items()
                if owner is None or key.owner == owner
            ]
        return reversed(rows)

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        with self._lock:
            if new in self._all:
                raise ConflictError(f"Conversation {new.conversation!r} already exists")
            if key not in self._all or not 0 <= at <= len(self._all[key].links):
                raise NotFoundError(f"{key.conversation!r} has no place {at}")
            self._all[new] = _Conversation(time.time(), key, at)
            self._all[new].add(self._all[key].links[:at])

    def get(self, scope: Key | None, name: str, /) -> bytes | None:
        return self._shelf.get((scope, name))

    def put(self, scope: Key | None, name: str, value: bytes | None, /, *, durable: bool = True) -> None:
        with self._lock:
            if value is None:
                self._shelf.pop((scope, name), None)
            elif scope is None or scope in self._all:
                self._shelf[scope, name] = value

    def compare_and_set(
        self, scope: Key | None, name: str, old: bytes | None, new: bytes, /, *, early: bool = False
    ) -> bool:
        with self._lock:
            is_there = early or scope is None or scope in self._all
            if not is_there or self._shelf.get((scope, name)) != old:
                return False
            self._shelf[scope, name] = new
            return True

    def values(self, scope: Key | None, prefix: str, /) -> dict[str, bytes]:
        with self._lock:
            shelf = list(self._shelf.items())
        return {name: value for (of, name), value in shelf if of == scope and name.startswith(prefix)}

    def shelved(self, name: str, owner: str | None = None, /) -> Iterator[tuple[Key, bytes, int]]:
        with self._lock:
            rows = [(key, len(one.links)) for key, one in self._all.items() if owner in (None, key.owner)]
        for key, next in rows:
            value = self.get(key, name)
            if value is not None:
                yield key, value, next

    def close(self) -> None:
        pass


_shared: dict[str, MemoryStore] = {}
_sharing = RLock()


def from_url(url: str) -> MemoryStore:
    """A new store for `memory://`; for `memory://NAME` the store of that name, shared within this process."""
    scheme, _, name = url.partition("://")
    if scheme != "memory" or re.search("[/?#]", name):
        where = f"store {shown_url(url)!r}"
        raise SettingError(where, "expected memory:// or memory://NAME; it has no options")
    if not name:
        return MemoryStore()
    with _sharing:
        return _shared.setdefault(name, MemoryStore())
