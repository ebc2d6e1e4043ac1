"""The `Store` protocol, and optional protocols for what only some engines do well.

A store keeps entries in order and interprets none of them. A session uses an optional protocol if the store
has it; everything but the logs is kept on a `Shelf` (`stores/shelf.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

import msgspec

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


def with_its_forks(key: Key, rows: Iterable[ConversationInfo]) -> list[Key]:
    """A conversation, its forks, and forks of forks, from the list of conversations."""
    listed = list(rows)
    found = [key]
    for one in found:  # it grows
        found += [row.key for row in listed if row.parent == one]
    return found


class Lease(NamedTuple):
    name: str
    holder: str
    fence: int
    """Grows with each new holder: tells a late holder from the current one."""
    until: float


class Snapshot(NamedTuple):
    """A view as of a place, to resume from."""

    at: int
    """The first place that is not in it."""
    body: bytes
    digest: bytes
    """Chained to the entry before `at`, so that it cannot belong to another record."""


class Store(Protocol):
    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        """Stores all of `entries` or none, durably, and returns the digest of the last.

        A `lease` is given only to stores that have leases. One that expired stays valid until another
        holder takes it.

        Raises:
            ConflictError: their places are not the next free ones; or `after` is not the digest of the
                entry before them; or `lease` was released or taken by another holder.
            StoreError: the engine cannot store them now.
        """

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        """Entries from `start` up to `stop`, in order, except those of the kind `but`."""

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        """The places of the entries that have these ids."""

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Erases a conversation for good: entries, snapshots, leases, summaries.

        Entries that forks share pass to the forks, which are returned; `with_forks` erases those too.
        """

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        """All conversations, the newest first."""

    def close(self) -> None: ...


LOCATED = "~"
"""Ids that begin with this can be found without knowing the conversation."""


@runtime_checkable
class LocatesIds(Protocol):
    def locate(self, owner: str, ids: Collection[str], /) -> dict[str, tuple[Key, int]]:
        """The conversation and place of each id, among all of an owner's conversations; the newest if there
        are several. All `ids` begin with `LOCATED`.
        """


@runtime_checkable
class Forks(Protocol):
    def fork(self, key: Key, new: Key, at: int, /) -> None:
        """Creates a conversation that shares the entries of another before `at`.

        Raises:
            ConflictError: `new` already exists.
            NotFoundError: `key` has no place `at`.
        """


Scope: TypeAlias = Key | str
"""What to search: one conversation, with what it shares, or all conversations of an owner."""


FEW_RESULTS = 3
"""If fewer entries match all words, those that match any are added."""


class FoundPlace(NamedTuple):
    """A match; if several conversations share the entry, in one of them."""

    key: Key
    at: int
    score: float
    """Higher is better."""


@runtime_checkable
class SearchIndex(Protocol):
    """An index of words and one of vectors. Both follow the entries by a cursor and are erased with them."""

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None], /) -> Iterator[int]:
        """Indexes new entries in small steps; yields how many entries each step indexed.

        `words` returns the searchable text of an entry, or None.
        """

    def search(self, scope: Scope, query: Query, limit: int, /) -> list[FoundPlace]:
        """The best matches, as `Query.matches` defines them; if there are few, followed by those that match
        any word.
        """

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]], /
    ) -> Iterator[int]:
        """Stores embeddings of new entries, like `index`: float32 vectors of length 1, for each embedder."""

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int, /) -> list[FoundPlace]:
        """The nearest entries; the score is the cosine similarity."""


class ToolSetting(NamedTuple):
    """When the results of a tool expire for an agent."""

    agent: str
    """Its name; empty for every agent."""
    tool: str
    expiry: Expiry


@runtime_checkable
class RemoteReads(Protocol):
    """Combined reads and waiting, for engines across a network."""

    def resume(self, key: Key, view: str, /) -> tuple[Snapshot | None, Iterator[Link]]:
        """The newest snapshot of a view, and the entries from the last one in it on; without a snapshot, all
        entries. One round trip, unless there are very many.
        """

    def fetch(self, key: Key, places: Collection[int], /) -> dict[int, Entry]:
        """The entries at these places, in one round trip; missing ones are left out."""

    def wait(self, key: Key, next: int, seconds: float, /) -> bool:
        """Waits up to `seconds` for an entry at the place `next`; True if there is one."""


class SpokenMessage(NamedTuple):
    """A message as it is delivered to a service that learns from conversations."""

    at: int
    role: str
    text: str
    time: float


@runtime_checkable
class MessageListener(Protocol):
    """A store that delivers messages to such a service, and so needs to read entries as messages."""

    def listen(self, spoken: Callable[[Entry], SpokenMessage | None], /) -> None:
        """`spoken` returns the message of an entry, or None. Called whenever a session begins."""


@runtime_checkable
class SessionHooks(Protocol):
    """A store that acts when sessions begin and end. Neither call blocks."""

    def begin(self, key: Key, /) -> None:
        """Continues what earlier sessions left undone."""

    def end(self, key: Key, /) -> None:
        """Does what waited for the end of the session."""


class Memory(msgspec.Struct, frozen=True):
    """Something that a service learned from conversations, in words of its own."""

    id: str
    text: str
    score: float | None = None
    """Similarity to the query; higher is better."""
    namespace: str | None = None
    created: float | None = None


@runtime_checkable
class Memories(Protocol):
    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> Sequence[Memory]:
        """Memories related to `query`, the best first; without a query, any.

        Raises:
            StoreError: the service does not answer.
        """

    @property
    def recalls(self) -> bool:
        """Whether memories are added to requests automatically."""


class Memorizer(Protocol):
    """A service that learns from conversations; a hybrid store combines it with a record."""

    @property
    def name(self) -> str:
        """Identifies the service: each has its own delivery cursor."""

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        """Learns from messages. Delivering the same again does no harm, as far as the service can tell.

        Raises:
            StoreError: the service fails now.
            MessageError: it will never accept a message.
        """

    def memories(
        self, key: Key, query: str | None, limit: int, namespace: str | None, /
    ) -> Sequence[Memory]: ...

    def forget(self, key: Key, /) -> None:
        """Erases what was learned from a conversation, as far as the service keeps that apart.

        Raises:
            StoreError: the service cannot be reached; nothing is certain then.
        """

    def close(self) -> None: ...


Ability: TypeAlias = Literal["compare-and-append", "whole-batches", "order", "any-size"]
"""What a store should be able to do, and some engines are not."""


def missing_ability(store: object, ability: Ability) -> str | None:
    """Why a store lacks an ability, as its `cannot` says; None if it has it."""
    return dict(getattr(store, "cannot", {})).get(ability)


class StoreProblem(NamedTuple):
    """A problem that `SelfCheck.examine` found."""

    where: str
    problem: str
    advice: str | None = None
    """What to do about it; None if only a backup helps."""


@runtime_checkable
class SelfCheck(Protocol):
    def examine(self) -> Iterable[StoreProblem]:
        """Checks the engine's own files and rows."""


def require_next(key: Key, entries: Sequence[Entry], next: int, last: bytes, after: bytes | None) -> None:
    """The compare step of compare-and-append, for a record with this next place and last digest.

    Raises:
        ConflictError: the entries do not continue from there.
    """
    for at, entry in enumerate(entries, next):
        if entry.at != at:
            raise ConflictError(f"{key.conversation!r} goes on at {at}, not with an entry at {entry.at}")
    if after not in (None, last):
        raise ConflictError(f"{key.conversation!r} was erased and started again since it was read")


ENGINES = {
    "memory": "memory",
    "sqlite": "sqlite",
    **dict.fromkeys(("postgresql", "postgres"), "postgres"),
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), "redis"),
    "agentcore": "agentcore",
    "mem0": "mem0",
    "hybrid": "hybrid",
}
"""The module of an engine, by the scheme of its URLs; imported when it is used: it may need a driver."""


def open_store(url: str) -> Store:
    """The store behind a URL: `memory://`, `memory://NAME`, `sqlite:///file.db`, `postgresql://…`,
    `redis://…`, `agentcore://…`, `mem0://…`, `hybrid://…`; each has a page in docs/stores.

    Raises:
        SettingError: nothing can be opened by such a URL.
        StoreError: it could not be opened.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # which shows the password
        raise SettingError(f"store {shown_url(url)!r}", f"is not a valid URL; {ENCODING_HELP}") from None
    if scheme not in ENGINES:
        raise SettingError(
            f"store {shown_url(url)!r}",
            "expected memory://, sqlite:///file.db, postgresql://, redis://, rediss://, unix://, agentcore://,"
            " mem0:// or hybrid://",
        )
    store: Store = import_module(f"refold.stores.{ENGINES[scheme]}").from_url(url)
    return store
