"""Streams in this process's memory: for tests, one-off fits, and nothing to clean up."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock

from refold.core.codec import GENESIS, Entry, Link, chain
from refold.core.errors import ConflictError, NotFoundError
from refold.stores.store import Key, Lease, Listed, Snapshot


@dataclass(slots=True)
class _Conversation:
    created: float
    parent: Key | None = None
    fork_at: int = 0
    links: list[Link] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)

    @property
    def next(self) -> int:
        return self.fork_at + len(self.links)


class MemoryStore:
    """Safe to use from many threads; gone with the process."""

    def __init__(self) -> None:
        self._all: dict[Key, _Conversation] = {}
        self._lock = RLock()

    def append(self, key: Key, entries: Sequence[Entry], /) -> bytes:
        with self._lock:
            mine = self._all.get(key) or _Conversation(time.time())
            if [entry.at for entry in entries] != list(range(mine.next, mine.next + len(entries))):
                raise ConflictError(f"{key.conversation!r} goes on at {mine.next}, not at {entries[0].at}")
            digest = self._digest(key, mine.next)
            for entry in entries:
                digest = chain(digest, entry)
                mine.links.append(Link(entry, digest))
                if entry.id is not None:
                    mine.places[entry.id] = entry.at
            self._all[key] = mine
            return digest

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        with self._lock:
            links: list[Link] = []
            for of, low, high in reversed(self._segments(key)):
                first, last = max(start, low), high if stop is None else min(stop, high)
                links += self._all[of].links[first - low : max(0, last - low)]
        return iter([link for link in links if link.entry.kind != but])

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        with self._lock:
            found: dict[str, int] = {}
            for of, _, high in self._segments(key):
                places = self._all[of].places
                found |= {id: places[id] for id in ids if id in places and places[id] < high}
            return found

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        with self._lock:
            mine = self._all.pop(key, None)
            forks = [(fork.fork_at, k) for k, fork in self._all.items() if fork.parent == key]
            if mine is None or not forks:
                return []
            if with_forks:
                for _, fork in forks:
                    self.erase(fork, with_forks=True)
                return []
            _, heir = max(forks)
            self._inherit(heir, mine)
            for at, fork in forks:
                if fork != heir:
                    self._all[fork].parent = heir if at > mine.fork_at else mine.parent
            return sorted(fork for _, fork in forks)

    def _inherit(self, heir: Key, dead: _Conversation) -> None:
        fork = self._all[heir]
        shared = dead.links[: max(0, fork.fork_at - dead.fork_at)]
        fork.links[:0] = shared
        fork.places |= {link.entry.id: link.entry.at for link in shared if link.entry.id is not None}
        fork.parent, fork.fork_at = dead.parent, min(dead.fork_at, fork.fork_at)

    def conversations(self, owner: str | None = None, /) -> Iterator[Listed]:
        with self._lock:
            rows = [
                Listed(key, one.created, one.next, one.parent, one.fork_at)
                for key, one in self._all.items()
                if owner is None or key.owner == owner
            ]
        return iter(sorted(rows, key=lambda row: -row.created))

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        with self._lock:
            if new in self._all:
                raise ConflictError(f"There is a conversation {new.conversation!r} already")
            if key not in self._all or not 0 <= at <= self._all[key].next:
                raise NotFoundError(f"{key.conversation!r} has no place {at}")
            self._all[new] = _Conversation(time.time(), key, at)

    def save(self, key: Key, view: str, snapshot: Snapshot, /) -> None:
        with self._lock:
            if key in self._all:
                self._all[key].snapshots[view] = snapshot

    def saved(self, key: Key, /) -> dict[str, Snapshot]:
        with self._lock:
            return dict(self._all[key].snapshots) if key in self._all else {}

    def acquire(self, key: Key, name: str, holder: str, now: float, seconds: float, /) -> Lease | None:
        with self._lock:
            mine = self._all.get(key)
            held = mine.leases.get(name) if mine else None
            if mine is None or (held and held.until > now and held.holder != holder):
                return None
            fence = (held.fence if held else 0) + (held is None or held.holder != holder)
            mine.leases[name] = Lease(name, holder, fence, now + seconds)
            return mine.leases[name]

    def release(self, key: Key, lease: Lease, /) -> None:
        with self._lock:
            held = self._all[key].leases.get(lease.name) if key in self._all else None
            if held and held.fence == lease.fence:
                self._all[key].leases[lease.name] = lease._replace(until=0.0)

    def leases(self, key: Key, now: float, /) -> Sequence[Lease]:
        with self._lock:
            mine = self._all.get(key)
            return [lease for lease in mine.leases.values() if lease.until > now] if mine else []

    def close(self) -> None:
        pass

    def _segments(self, key: Key) -> list[tuple[Key, int, int]]:
        """Which conversation has which of the places, the newest first."""
        result: list[tuple[Key, int, int]] = []
        at: Key | None = key if key in self._all else None
        high = self._all[key].next if at else 0
        while at is not None:
            mine = self._all[at]
            result.append((at, mine.fork_at, high))
            at, high = mine.parent, min(high, mine.fork_at)
        return result

    def _digest(self, key: Key, at: int) -> bytes:
        last = list(self.read(key, at - 1, at)) if at else []
        return last[0].digest if last else GENESIS


_shared: dict[str, MemoryStore] = {}
_sharing = RLock()


def shared(name: str) -> MemoryStore:
    """The store that everybody in this process who asks for the name gets."""
    with _sharing:
        return _shared.setdefault(name, MemoryStore())
