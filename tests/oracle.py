"""What a store must have answered, told by the order in which requests took effect."""

from collections.abc import Mapping, Sequence
from typing import Any

from refold.core.codec import GENESIS, Entry, chain
from refold.stores.store import Key, Lease, Snapshot


class Oracle:
    """As simple as a store can be; whatever the real one answers otherwise is a broken promise."""

    def __init__(self) -> None:
        self.entries: dict[Key, list[Entry]] = {}
        self.digests: dict[Key, list[bytes]] = {}
        self.erased = 0
        """How often a conversation was."""
        self._parents: dict[Key, Key] = {}
        self._leases: dict[tuple[Key, str], Lease] = {}
        """The newest of each name, released ones too."""
        self._kept: dict[tuple[Key, bytes], bytes] = {}
        self._saved: dict[tuple[Key, str], Snapshot] = {}

    def judge(self, verb: str, given: Sequence[Any], named: Mapping[str, Any], answer: Any) -> None:
        """
        Raises:
            AssertionError: this cannot be the answer.
        """
        check = getattr(self, f"on_{verb}", None)
        if check is not None:
            check(answer, *given, **named)

    def on_append(
        self,
        answer: bytes,
        key: Key,
        entries: Sequence[Entry],
        after: bytes | None = None,
        lease: Lease | None = None,
    ) -> None:
        known, digests = self.entries.get(key, []), self.digests.get(key, [])
        digest = digests[-1] if digests else GENESIS
        if lease is not None:
            held = self._leases.get((key, lease.name))
            assert held is not None, f"committed under a lease that nobody was given: {lease}"
            assert held.until > 0, f"committed under a lease that was released: {lease}"
            assert held[:3] == lease[:3], f"committed under {lease}; the newest is {held}"
        places = [entry.at for entry in entries]
        assert places == list(range(len(known), len(known) + len(places))), (
            f"{key.conversation!r} took {places}, but goes on at {len(known)}"
        )
        assert after in (None, digest), f"{key.conversation!r} took what was written for another record"
        for entry in entries:
            digest = chain(digest, entry)
            self.entries.setdefault(key, known).append(entry)
            self.digests.setdefault(key, digests).append(digest)
        assert answer == digest, f"the digest of {places} is another"

    def on_read(
        self, answer: Any, key: Key, start: int = 0, stop: int | None = None, *, but: str | None = None
    ) -> None:
        entries, digests = self.entries.get(key, ()), self.digests.get(key, ())
        expected = [
            digest
            for entry, digest in zip(
                entries[max(0, start) : stop], digests[max(0, start) : stop], strict=True
            )
            if entry.kind != but
        ]
        assert [link.digest for link in answer] == expected, (
            f"{key.conversation!r} has {len(expected)} entries in {start}:{stop}, and {len(answer)} were read"
        )

    def on_find(self, answer: Mapping[str, int], key: Key, ids: Sequence[str]) -> None:
        known = {entry.id: entry.at for entry in self.entries.get(key, ())}
        assert answer == {id: known[id] for id in ids if id in known}

    def on_erase(self, answer: Sequence[Key], key: Key, *, with_forks: bool = False) -> None:
        forks = [fork for fork, parent in self._parents.items() if parent == key]
        parent = self._parents.pop(key, None)
        self.erased += 1
        self.entries.pop(key, None)
        self.digests.pop(key, None)
        for kept in (self._leases, self._kept, self._saved):
            for one in [one for one in kept if one[0] == key]:
                del kept[one]
        if with_forks:
            for fork in forks:
                self.on_erase([], fork, with_forks=True)
            forks = []
        for fork in forks:
            del self._parents[fork]
            if parent is not None:
                self._parents[fork] = parent
        assert sorted(answer) == sorted(forks), f"{answer} were said to be its heirs, these are: {forks}"

    def on_fork(self, answer: None, key: Key, new: Key, at: int) -> None:
        assert new not in self._parents
        assert new not in self.entries, f"there was a conversation {new.conversation!r} already"
        assert 0 <= at <= len(self.entries.get(key, ()))
        self._parents[new] = key
        self.entries[new], self.digests[new] = self.entries[key][:at], self.digests[key][:at]

    def on_acquire(
        self, answer: Lease | None, key: Key, name: str, holder: str, now: float, seconds: float
    ) -> None:
        held = self._leases.get((key, name))
        is_held = held is not None and held.until > now and held.holder != holder
        if key not in self.entries or is_held:
            assert answer is None, f"{answer} was given out while somebody else had it: {held}"
            return
        fence = 0 if held is None else held.fence
        assert answer is not None, f"nobody has {name!r}, but {holder} does not get it"
        assert answer[:2] == (name, holder)
        assert answer.until == now + seconds
        if held is not None and held.holder == holder:
            assert answer.fence == fence, f"{holder} held {name!r} already, under another fence"
        else:
            assert answer.fence > fence, f"{answer} has no newer fence than {held}"
        self._leases[key, name] = answer

    def on_release(self, answer: None, key: Key, lease: Lease) -> None:
        held = self._leases.get((key, lease.name))
        if held is not None and held.fence == lease.fence:
            self._leases[key, lease.name] = held._replace(until=0.0)

    def on_keep_summary(self, answer: None, key: Key, digest: bytes, body: bytes) -> None:
        if key in self.entries:
            self._kept[key, digest] = body

    def on_summary(self, answer: bytes | None, key: Key, digest: bytes) -> None:
        own = self._kept.get((key, digest))
        others = [
            body for (one, kept), body in self._kept.items() if one.owner == key.owner and kept == digest
        ]
        assert answer == own if own is not None else answer in (others or [None])

    def on_save(self, answer: None, key: Key, view: str, snapshot: Snapshot) -> None:
        if key in self.entries:
            self._saved[key, view] = snapshot

    def on_saved(self, answer: Mapping[str, Snapshot], key: Key) -> None:
        assert answer == {view: one for (of, view), one in self._saved.items() if of == key}
