"""The shelf of a store: small named values beside the logs.

Snapshots, leases, cursors, summaries and notes are values on it, written here once for all engines.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from refold.core import codec
from refold.core.codec import to_bytes
from refold.core.errors import ConflictError, CorruptError
from refold.core.event import Expiry
from refold.stores.packing import pack, to_text, unpack
from refold.stores.store import LOCATED, Key, Lease, Snapshot, Store, ToolSetting

SNAPSHOT, LEASE, CURSOR, SETTING, SUMMARY = "v:", "l:", "c:", "setting:", LOCATED
"""Prefixes of names. A summary is found in any conversation of an owner."""
SUMMARIES = "summaries"
"""The digests of a conversation's summaries, the oldest first."""
DIGESTS = msgspec.msgpack.Decoder(list[bytes])
KEPT_SUMMARIES = 200


@runtime_checkable
class Shelf(Store, Protocol):
    """Values of a conversation (`scope`), which are erased with it, or of the whole store (`None`).

    A store inherits from this and implements the first five methods.
    """

    @abstractmethod
    def get(self, scope: Key | None, name: str, /) -> bytes | None: ...

    @abstractmethod
    def put(self, scope: Key | None, name: str, value: bytes | None, /, *, durable: bool = True) -> None:
        """Replaces a value, or removes it (None). Does nothing if there is no such conversation.

        One that is not `durable` is a cache: it may be lost in a crash, and StoreError is raised instead of
        waiting for a lock.
        """

    @abstractmethod
    def compare_and_set(
        self, scope: Key | None, name: str, old: bytes | None, new: bytes, /, *, early: bool = False
    ) -> bool:
        """Replaces a value if it is `old`; False if it is not, or if there is no such conversation.

        One that is `early` may be set before the conversation begins.
        """

    @abstractmethod
    def values(self, scope: Key | None, prefix: str, /) -> dict[str, bytes]:
        """All values whose names begin with a prefix, by name."""

    @abstractmethod
    def shelved(self, name: str, owner: str | None = None, /) -> Iterator[tuple[Key, bytes, int]]:
        """The conversations with a value of this name, that value, and the place of the next event.

        For a name that begins with `LOCATED` and an owner, this is fast, and may leave out some if it finds
        any.
        """

    # Snapshots

    def save(self, key: Key, view: str, snapshot: Snapshot, /) -> None:
        """Replaces the snapshot of a view. It is only a cache."""
        self.put(key, SNAPSHOT + view, encode_snapshot(snapshot), durable=False)

    def saved(self, key: Key, /) -> dict[str, Snapshot]:
        found = self.values(key, SNAPSHOT)
        return {name.removeprefix(SNAPSHOT): decode_snapshot(value) for name, value in found.items()}

    # Leases

    def acquire(self, key: Key, name: str, holder: str, now: float, seconds: float, /) -> Lease | None:
        """The lease, or None if another holder has it at `now`. Acquiring it again extends it."""
        stored = self.get(key, LEASE + name)
        while True:
            last = decode_lease(name, stored) if stored else Lease(name, "", 0, 0.0)
            if last.until > now and last.holder != holder:
                return None
            fence = last.fence if last.holder == holder and stored else last.fence + 1
            lease = Lease(name, holder, fence, now + seconds)
            if self.compare_and_set(key, LEASE + name, stored, encode_lease(lease)):
                return lease
            current = self.get(key, LEASE + name)
            if current == stored:  # there is no such conversation
                return None
            stored = current

    def release(self, key: Key, lease: Lease, /) -> None:
        """Lets others acquire it. An append with it is refused from then on."""
        stored = self.get(key, LEASE + lease.name)
        while stored and decode_lease(lease.name, stored)[:3] == lease[:3]:
            released = encode_lease(lease._replace(until=0.0))
            if self.compare_and_set(key, LEASE + lease.name, stored, released):
                return
            stored = self.get(key, LEASE + lease.name)

    def leases(self, key: Key, now: float, /) -> Sequence[Lease]:
        found = self.values(key, LEASE)
        leases = [decode_lease(name.removeprefix(LEASE), value) for name, value in found.items()]
        return [lease for lease in leases if lease.until > now]

    # Cursors: named positions in conversations

    def cursor(self, key: Key, name: str, /) -> int | None:
        """The first unprocessed place; None if it was never set."""
        found = self.get(key, CURSOR + name)
        return None if found is None else int(found)

    def set_cursor(self, key: Key, name: str, next: int, /) -> None:
        """Durable when this returns. May be set before the conversation begins; never goes back."""
        while True:
            found = self.get(key, CURSOR + name)
            if found is not None and int(found) >= next:
                return
            if self.compare_and_set(key, CURSOR + name, found, b"%d" % next, early=True):
                return

    def behind(self, name: str, /) -> Iterator[Key]:
        """The conversations whose cursor was set and that have entries at or after it."""
        return (key for key, cursor, next in self.shelved(CURSOR + name) if int(cursor) < next)

    # Summaries, by the digest of their request

    def summary(self, key: Key, digest: bytes, /) -> bytes | None:
        """From this conversation, or else from any other of the same owner."""
        name = SUMMARY + digest.hex()
        found = self.get(key, name)
        if found is None:
            found = next((value for _, value, _ in self.shelved(name, key.owner)), None)
        return None if found is None else unpack(found)

    def keep_summary(self, key: Key, digest: bytes, body: bytes, /) -> None:
        """Replaces the one with that digest; drops the oldest above `KEPT_SUMMARIES`."""
        self.put(key, SUMMARY + digest.hex(), pack(body))
        while True:
            stored = self.get(key, SUMMARIES)
            listed = DIGESTS.decode(stored) if stored else []
            kept = [one for one in listed if one != digest] + [digest]
            dropped = kept[:-KEPT_SUMMARIES]
            if self.compare_and_set(key, SUMMARIES, stored, msgspec.msgpack.encode(kept[-KEPT_SUMMARIES:])):
                break
            if self.get(key, SUMMARIES) == stored:  # there is no such conversation
                return
        for one in dropped:
            self.put(key, SUMMARY + one.hex(), None)

    # Settings, which override those in files

    def settings(self) -> Sequence[ToolSetting]:
        """Must be cheap: called whenever a conversation is opened."""
        found: list[ToolSetting] = []
        for name, value in self.values(None, SETTING).items():
            try:
                agent, tool = codec.loads(name.removeprefix(SETTING).encode())
                found.append(ToolSetting(agent, tool, msgspec.convert(codec.loads(value), Expiry)))
            except (ValueError, msgspec.ValidationError) as error:
                raise CorruptError(f"A stored setting was altered: {error}") from error
        return found

    def set_setting(self, setting: ToolSetting, /) -> None:
        """Replaces the setting of that agent and tool; an empty `Expiry` removes it."""
        name = codec.dumps([setting.agent, setting.tool]).decode()
        value = None if setting.expiry == Expiry() else codec.dumps(setting.expiry)
        self.put(None, SETTING + name, value)

    # Notes, which outlive conversations, such as the calibration of token counts

    def note(self, name: str, /) -> bytes | None:
        return self.get(None, name)

    def keep_note(self, name: str, body: bytes, /) -> None:
        """Replaces the note of that name. It is only a cache."""
        self.put(None, name, body, durable=False)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    return b"%d " % snapshot.at + msgspec.msgpack.encode((pack(snapshot.body), snapshot.digest))


def decode_snapshot(value: bytes) -> Snapshot:
    """Raises CorruptError if the value was altered."""
    at, _, rest = value.partition(b" ")
    try:
        body, digest = msgspec.msgpack.decode(rest, type=tuple[bytes, bytes])
        return Snapshot(int(at), unpack(body), digest)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptError(f"A stored snapshot was altered: {error}") from error


def encode_lease(lease: Lease) -> bytes:
    """Engines compare this with the lease of an append: fence, end (0.0: released) and holder."""
    return b"%d %b %b" % (lease.fence, repr(float(lease.until)).encode(), to_bytes(lease.holder))


def decode_lease(name: str, value: bytes) -> Lease:
    """Raises CorruptError if the value was altered."""
    try:
        fence, until, holder = value.split(b" ", 2)
        return Lease(name, to_text(holder), int(fence), float(until))
    except ValueError as error:
        raise CorruptError(f"The stored lease {name!r} was altered: {value!r}") from error


def require_held(key: Key, lease: Lease | None, stored: bytes | None) -> None:
    """Checks the lease of an append, if it has one, against the value that is stored for its name.

    Raises:
        ConflictError: it was released, or another holder took it.
    """
    if lease is None:
        return
    current = decode_lease(lease.name, stored) if stored else None
    if current is None or current.until == 0 or current[:3] != lease[:3]:
        raise ConflictError(
            f"{lease.holder!r} no longer holds {lease.name!r} of {key.conversation!r}: it was released, or"
            " another holder took it; acquire it again"
        )
