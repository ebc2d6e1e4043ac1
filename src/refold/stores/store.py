"""Where streams are kept: what every store can do, and what some can do besides.

A store keeps entries in order and understands none of them. What only some engines can do well is
a protocol of its own; a session uses it where the store has it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

from refold.core.codec import Entry, Link
from refold.core.errors import ConflictError, SettingError
from refold.core.event import Expiry
from refold.core.query import Query, SearchText
from refold.stores.url import ENCODING_HELP, shown_url


class Key(NamedTuple):
    """A conversation is found by its owner and its id."""

    owner: str
    conversation: str


class ConversationInfo(NamedTuple):
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

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        """All conversations, the newest first."""

    def close(self) -> None: ...


@runtime_checkable
class FindsIds(Protocol):
    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        """The places of the entries that have these ids."""


LOCATED = "~"
"""FindsIds that begin with this can be found without knowing the conversation."""


@runtime_checkable
class LocatesIds(Protocol):
    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        """In which of an owner's conversations, and where, entries with these ids were said; of several that
        said the same, the newest. All `ids` begin with `LOCATED`.
        """


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
class SummaryCache(Protocol):
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


FEW_RESULTS = 3
"""Where fewer entries have all the words, those that have any of them are looked for too."""


class FoundPlace(NamedTuple):
    """A place where something was found; in one conversation that has it, if there are several."""

    key: Key
    at: int
    score: float
    """More is better."""


@runtime_checkable
class SearchIndex(Protocol):
    """An index of words, which follows the streams by a cursor of its own and is erased with them."""

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None], /) -> Iterator[int]:
        """Takes in what was appended since, in small steps; yields how many entries each step took in.

        `words` says what can be found of an entry; None is nothing.
        """

    def search(self, scope: Scope, query: Query, limit: int, /) -> list[FoundPlace]:
        """The best of what is in the index, as `query.matches` defines it; where few have all the words,
        those that have any come after them.
        """


@runtime_checkable
class Vectors(Protocol):
    """What entries mean, as vectors of length 1 (float32, as many numbers as the embedder makes)."""

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]], /
    ) -> Iterator[int]:
        """Takes in what was appended since, as `SearchIndex.index` does, by a cursor for each embedder."""

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int, /) -> list[FoundPlace]:
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


@runtime_checkable
class BatchReads(Protocol):
    """What a store across a network answers in one go, where others are asked several times."""

    def resume(self, key: Key, view: str, /) -> tuple[Snapshot | None, Iterator[Link]]:
        """The newest snapshot of a view, and the entries from the one before it on; without a snapshot, all
        entries. One round trip, unless there are very many.
        """

    def fetch(self, key: Key, places: Collection[int], /) -> dict[int, Entry]:
        """The entries at these places, in one round trip; those that are not there are left out."""


@runtime_checkable
class Watchable(Protocol):
    def wait(self, key: Key, next: int, seconds: float, /) -> bool:
        """Waits until the conversation has an entry at the place `next`, or for so long; whether it has."""


@runtime_checkable
class Cursors(Protocol):
    """How far somebody has followed each conversation, by a name; erased with the conversation."""

    def cursor(self, key: Key, name: str, /) -> int | None:
        """The first place that it has not seen; None where it was never set."""

    def set_cursor(self, key: Key, name: str, next: int, /) -> None:
        """Durable when this returns. May be set before the conversation begins; never goes back."""

    def behind(self, name: str, /) -> Iterator[Key]:
        """The conversations whose cursor was set and that have entries at or after it."""


class SpokenMessage(NamedTuple):
    """A message as a service that learns from conversations is told of it."""

    at: int
    role: str
    text: str
    time: float


@runtime_checkable
class MessageListener(Protocol):
    """A store that hands what is said to such a service, and so must know what entries say."""

    def listen(self, spoken: Callable[[Entry], SpokenMessage | None], /) -> None:
        """From now on, this tells what an entry says; None is nothing. Called whenever a session begins."""


@runtime_checkable
class SessionHooks(Protocol):
    """A store that has something to do when sessions begin and end. Neither is waited for."""

    def begin(self, key: Key, /) -> None:
        """A session of this conversation began: what was left undone before is done now."""

    def end(self, key: Key, /) -> None:
        """It ended: what waited for that is done now."""


class Memory(NamedTuple):
    """Something that a service learned from conversations, in words of its own."""

    id: str
    text: str
    score: float | None = None
    """How near it is to what was asked; more is nearer."""
    namespace: str | None = None
    created: float | None = None


@runtime_checkable
class Memories(Protocol):
    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> Sequence[Memory]:
        """What has to do with `query`, the nearest first; without one, what there is.

        Raises:
            StoreError: the service does not answer.
        """

    @property
    def recalls(self) -> bool:
        """Whether models are to be shown what is remembered, unasked."""


class Memorizer(Protocol):
    """A service that learns from conversations: what a hybrid store puts beside a record."""

    @property
    def name(self) -> str:
        """Tells it from others: what one has taken in, another has not."""

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        """Takes in what was said; the same handed in again does no harm, as far as it can tell.

        Raises:
            StoreError: it cannot take it now.
            MessageError: it will never take it.
        """

    def memories(
        self, key: Key, query: str | None, limit: int, namespace: str | None, /
    ) -> Sequence[Memory]: ...

    def forget(self, key: Key, /) -> None:
        """All that was learned from a conversation, as far as it is kept apart from the rest.

        Raises:
            StoreError: it cannot be reached: then nothing is certain.
        """

    def close(self) -> None: ...


Ability: TypeAlias = Literal["compare-and-append", "whole-batches", "order", "any-size"]
"""What every store should be able to do, and some engines are not."""


def missing_ability(store: object, ability: Ability) -> str | None:
    """Why a store is not able to do something, in a sentence: what its `cannot` says; None where it is."""
    return dict(getattr(store, "cannot", {})).get(ability)


class StoreProblem(NamedTuple):
    """Something that a store's own examination found."""

    where: str
    problem: str
    advice: str | None = None
    """What to do about it; None where only a backup helps."""


@runtime_checkable
class SelfCheck(Protocol):
    def examine(self) -> Iterable[StoreProblem]:
        """What is wrong with the engine's own files and rows."""


def require_next(key: Key, entries: Sequence[Entry], next: int, last: bytes, after: bytes | None) -> None:
    """The compare of compare-and-append, for a record whose next place and last digest are these.

    Raises:
        ConflictError: the entries do not go on from there.
    """
    places = [entry.at for entry in entries]
    if places != list(range(next, next + len(places))):
        raise ConflictError(f"{key.conversation!r} goes on at {next}, one by one, not with {places[:9]}")
    if after not in (None, last):
        raise ConflictError(f"{key.conversation!r} is another record than was read: erased and begun anew")


def require_held(key: Key, lease: Lease, current: Lease | None) -> None:
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
    """The store behind a URL: `memory://`, `memory://NAME`, `sqlite:///file.db`, `postgresql://…`,
    `redis://…`, `agentcore://…`, `mem0://…`, `hybrid://…`; each has a page in docs/stores.

    Raises:
        SettingError: nothing can be opened by such a URL.
        StoreError: it could not be opened.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # which shows the password
        raise SettingError(f"store {shown_url(url)!r}", f"is no URL; {ENCODING_HELP}") from None
    match parts.scheme:
        case "memory":
            from refold.stores import memory

            if parts.path or parts.query or parts.fragment:
                only = "expected memory:// or memory://NAME; it has no options"
                raise SettingError(f"store {shown_url(url)!r}", only)
            return memory.shared(parts.netloc) if parts.netloc else memory.MemoryStore()
        case "sqlite":
            from refold.stores import sqlite

            return sqlite.from_url(url)
        case "postgresql" | "postgres":
            from refold.stores import postgres

            return postgres.from_url(url)
        case "redis" | "rediss" | "unix" | "valkey" | "valkeys":
            from refold.stores import redis

            return redis.from_url(re.sub("^valkey", "redis", url))
        case "agentcore":
            from refold.stores import agentcore

            return agentcore.from_url(url)
        case "mem0":
            from refold.stores import mem0

            return mem0.from_url(url)
        case "hybrid":
            from refold.stores import hybrid

            return hybrid.from_url(url)
    known = (
        "memory://, sqlite:///file.db, postgresql://, redis://, rediss://, unix://, agentcore://, mem0:// or"
    )
    known += " hybrid://"
    raise SettingError(f"store {shown_url(url)!r}", f"expected {known}")
