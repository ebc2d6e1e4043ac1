"""Where streams are kept: what every store can do, and what some can do besides.

A store keeps entries in order and understands none of them. What only some engines can do well is
a protocol of its own; a session uses it where the store has it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

from refold.core.codec import Entry, Link
from refold.core.errors import ConflictError, SettingError
from refold.core.event import Expiry
from refold.core.query import Query, Words


class Key(NamedTuple):
    """A conversation is found by its owner and its id."""

    owner: str
    conversation: str


class Listed(NamedTuple):
    """One row of a store's list of conversations."""

    key: Key
    created: float
    next: int
    """The place that the next event will have."""
    parent: Key | None = None
    fork_at: int = 0
    """The events before this place are the parent's."""


class Lease(NamedTuple):
    name: str
    holder: str
    fence: int
    """Grows with each new holder, so that a late one can be told from the current one."""
    until: float


class Store(Protocol):
    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        """Stores all of `entries` or none, durably, and returns the digest of the last.

        A `lease` is given only to stores that have leases. One that ran out still counts until
        somebody else takes it.

        Raises:
            ConflictError: their places are not the next free ones, or `after` is given and is not
                the digest of the entry before them: another record has the same length. Or `lease`
                is given and was released or taken by another holder.
            StoreError: the engine cannot take it now.
        """

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        """The entries from `start` up to `stop`, in order, without those of the kind `but`."""

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Erases a conversation for good: entries, snapshots, leases, summaries.

        What forks share passes to them, and these are returned; or they are erased too, and theirs.
        """

    def conversations(self, owner: str | None = None, /) -> Iterator[Listed]:
        """All conversations, the newest first."""

    def close(self) -> None: ...


@runtime_checkable
class Ids(Protocol):
    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        """The places of the entries that have these ids."""


@runtime_checkable
class Forks(Protocol):
    def fork(self, key: Key, new: Key, at: int, /) -> None:
        """A conversation that shares the entries of another before `at`, without copying them.

        Raises:
            ConflictError: there is one of that name.
            NotFoundError: there is nothing to fork.
        """


class Snapshot(NamedTuple):
    """A view as of a place, to start from instead of the beginning."""

    at: int
    """The first place that is not in it."""
    body: bytes
    digest: bytes
    """Chained to the entry before `at`, so that it cannot belong to another record."""


@runtime_checkable
class Snapshots(Protocol):
    def save(self, key: Key, view: str, snapshot: Snapshot, /) -> None:
        """Keeps the newest of each view. Loses nothing if it fails."""

    def saved(self, key: Key, /) -> dict[str, Snapshot]: ...


@runtime_checkable
class Leases(Protocol):
    def acquire(self, key: Key, name: str, holder: str, now: float, seconds: float, /) -> Lease | None:
        """The lease, if nobody else holds it at `now`; held again, it lasts longer."""

    def release(self, key: Key, lease: Lease, /) -> None: ...

    def leases(self, key: Key, now: float, /) -> Sequence[Lease]: ...


@runtime_checkable
class Notes(Protocol):
    """Small things that outlive conversations, such as how far a model's counts are off."""

    def note(self, name: str, /) -> bytes | None: ...

    def keep_note(self, name: str, body: bytes, /) -> None:
        """Instead of what was kept under the name. Loses nothing if it fails."""


KEPT_SUMMARIES = 200
"""How many a conversation keeps."""


@runtime_checkable
class Summaries(Protocol):
    """What models wrote and somebody paid for, by a digest of what they were asked; erased with the
    conversation.
    """

    def summary(self, key: Key, digest: bytes, /) -> bytes | None:
        """What this conversation, or else any other of the same owner, keeps under the digest."""

    def keep_summary(self, key: Key, digest: bytes, body: bytes, /) -> None:
        """Instead of what this conversation kept under it; of a conversation that is not there, nothing
        is kept. Where there are more than `KEPT_SUMMARIES`, those that were kept first go.
        """


Scope: TypeAlias = Key | str
"""Where to search: in one conversation, what it shares with others included, or in all of an owner's."""


FEW = 3
"""Where fewer entries have all the words, those that have any of them are looked for too."""


class Found(NamedTuple):
    """A place where something was found; in one conversation that has it, if there are several."""

    key: Key
    at: int
    score: float
    """More is better."""


@runtime_checkable
class Searched(Protocol):
    """An index of words, which follows the streams by a cursor of its own and is erased with them."""

    def index(self, scope: Scope, words: Callable[[Entry], Words | None], /) -> Iterator[int]:
        """Takes in what was appended since, in small steps; yields how many entries each step took in.

        `words` says what can be found of an entry; None is nothing.
        """

    def search(self, scope: Scope, query: Query, limit: int, /) -> list[Found]:
        """The best of what is in the index, as `query.matches` defines it; where few have all the words,
        those that have any come after them.
        """


@runtime_checkable
class Vectors(Protocol):
    """What entries mean, as vectors of length 1 (float32, as many numbers as the embedder makes)."""

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]], /
    ) -> Iterator[int]:
        """Takes in what was appended since, as `Searched.index` does, by a cursor for each embedder."""

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int, /) -> list[Found]:
        """What is nearest in meaning: the score is the cosine."""


class ToolSetting(NamedTuple):
    """When the results of a tool expire for an agent."""

    agent: str
    """Its name; empty for every agent."""
    tool: str
    expiry: Expiry


@runtime_checkable
class Settings(Protocol):
    """Settings that are kept beside the conversations, and beat those in files."""

    def settings(self) -> Sequence[ToolSetting]:
        """All of them. Cheap: it is asked for whenever a conversation is opened."""

    def set_setting(self, setting: ToolSetting, /) -> None:
        """Instead of what was set for that agent and tool; with nothing set in it, nothing is left."""


class Flaw(NamedTuple):
    """Something that a store's own examination found."""

    where: str
    problem: str


@runtime_checkable
class Examined(Protocol):
    def examine(self) -> Iterable[Flaw]:
        """What is wrong with the engine's own files and rows."""


def demand_next(key: Key, entries: Sequence[Entry], next: int, last: bytes, after: bytes | None) -> None:
    """The compare of compare-and-append, for a record whose next place and last digest are these.

    Raises:
        ConflictError: the entries do not go on from there.
    """
    places = [entry.at for entry in entries]
    if places != list(range(next, next + len(places))):
        raise ConflictError(f"{key.conversation!r} goes on at {next}, one by one, not with {places[:9]}")
    if after not in (None, last):
        raise ConflictError(f"{key.conversation!r} is another record than was read: erased and begun anew")


def demand_held(key: Key, lease: Lease, current: Lease | None) -> None:
    """The fence of an append, for a record whose lease of that name is `current`.

    Raises:
        ConflictError: it is no longer the one that was given out.
    """
    if current is None or current.until == 0 or current[:3] != lease[:3]:
        raise ConflictError(
            f"{lease.holder!r} no longer holds {lease.name!r} of {key.conversation!r}: it was released, or"
            " somebody else took it; acquire it again"
        )


def open_store(url: str) -> Store:
    """The store behind a URL: `memory://`, `memory://NAME`, `sqlite:///file.db`.

    Raises:
        SettingError: nothing can be opened by such a URL.
        StoreError: it could not be opened.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "memory":
            from refold.stores import memory

            return memory.shared(parts.netloc) if parts.netloc else memory.MemoryStore()
        case "sqlite":
            from refold.stores import sqlite

            return sqlite.from_url(url)
    raise SettingError(f"store {url!r}", "expected memory://, memory://NAME or sqlite:///file.db")
