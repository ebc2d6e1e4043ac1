"""A record and a memory: conversations are kept in a store and delivered to a service that learns from them.

The record is the outbox: a cursor in it says how far it was delivered, by a thread. So an append never waits
for the service, and after a crash or an outage the delivery continues at the cursor.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

from refold.core.codec import Entry, Link
from refold.core.errors import CorruptError, RefoldError, SettingError, StoreError
from refold.stores.hybrid_sync import LEASE_S, PATIENCE_S, MemorySync, RefusedMessage
from refold.stores.shelf import Shelf
from refold.stores.store import (
    ConversationInfo,
    Forks,
    Key,
    Lease,
    LocatesIds,
    Memories,
    Memorizer,
    Memory,
    RemoteReads,
    SearchIndex,
    SelfCheck,
    SpokenMessage,
    Store,
    StoreProblem,
    open_store,
    with_its_forks,
)
from refold.stores.url import ANY, ENCODING_HELP, UrlOption, parse_options, shown_url

Sync: TypeAlias = Literal["immediate", "batch", "end"]

DELEGATED = (LocatesIds, Forks, Shelf, SearchIndex, RemoteReads, SelfCheck)
"""Protocols of the record that this store has too, by delegation."""
RECORDS = "a record is sqlite://, postgresql://, redis:// or memory://"
LEFT = "the record is complete: solve the problem, then `refold sync` delivers the rest"
REFUSED = "the record has it, only the memory has not: `refold sync --refused` delivers it again"

OPTIONS = {
    "record": ANY,
    "memory": ANY,
    "sync": UrlOption("immediate|batch|end", "immediate, batch or end"),
    "batch_size": UrlOption(r"0*[1-9]\d{0,8}", "a number of messages", int),
    "batch_s": UrlOption(r"\d{0,9}\.?\d+", "a number of seconds", float),
}


class HybridStore:
    """A store with the protocols of its record, and memories. As thread-safe as the record."""

    def __new__(cls, record: Store, *_: Any, **__: Any) -> Self:
        """Makes a subclass with the methods of the record's protocols, so that `isinstance` sees them."""
        able = [protocol for protocol in DELEGATED if isinstance(record, protocol)]
        verbs = [name for protocol in able for name in vars(protocol) if not name.startswith("_")]
        own = {"fork": cls._fork, "examine": cls._examine}
        made = {name: own.get(name) or _delegate(name) for name in verbs}
        return super().__new__(type(cls.__name__, (cls,), made))

    def __init__(
        self,
        record: Store,
        memorizer: Memorizer,
        *,
        sync: Sync = "immediate",
        batch_size: int = 20,
        batch_s: float = 5.0,
    ) -> None:
        if sync not in get_args(Sync):
            raise SettingError("hybrid", f"sync is immediate, batch or end, not {sync!r}")
        if isinstance(record, Memories):
            raise SettingError("record", f"{type(record).__name__} has a memory already; {RECORDS}")
        if not isinstance(record, Shelf):
            kind = type(record).__name__
            raise SettingError(
                "record",
                f"{kind} has no shelf, where delivery keeps its cursors and leases; {RECORDS}",
            )
        self.record = record
        self.memorizer = memorizer
        self.sync = sync
        self.batch_size = batch_size
        self.batch_s = batch_s
        self._delay_s = {"immediate": 0.0, "batch": batch_s, "end": None}[sync]
        self.cannot = getattr(record, "cannot", {})
        self._sync = MemorySync(record, memorizer, batch_size)

    # The record

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        self._sync.open()
        if entries:
            self._sync.before_append(key, is_new=entries[0].at == 0)
        digest = self.record.append(key, entries, after=after, lease=lease)
        if entries:
            self._sync.appended(key, len(entries), self._delay_s)
        return digest

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        return self.record.read(key, start, stop, but=but)

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        return self.record.find(key, ids)

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        return self.record.conversations(owner)

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Erases the memory first, including what was learned from entries that a fork shares.

        Raises:
            StoreError: the service cannot be reached, or another process is delivering: nothing is erased.
        """
        self._sync.open()
        keys = with_its_forks(key, self.conversations(key.owner)) if with_forks else [key]
        with ExitStack() as stack:
            for gone in keys:
                if self._sync.may_be_known(gone):
                    if not stack.enter_context(self._sync.exclusive(gone, PATIENCE_S)):
                        raise StoreError(f"{gone.conversation!r} is being delivered right now; retry")
                    self.memorizer.forget(gone)
            heirs = self.record.erase(key, with_forks=with_forks)
            for gone in keys:
                self._sync.forgotten(gone)
        return heirs

    def _fork(self, key: Key, new: Key, at: int, /) -> None:
        assert isinstance(self.record, Forks)
        self._sync.open()
        self.record.fork(key, new, at)
        self._sync.set_cursor(new, at)  # the service learned the shared part from the parent

    def _examine(self) -> Iterable[StoreProblem]:
        assert isinstance(self.record, SelfCheck)
        yield from self.record.examine()
        if left := self.left():
            try:
                self.memorizer.memories(left[0], None, 1, None)
            except RefoldError as error:
                waiting = f"{error} (conversations not delivered: {len(left)})"
                yield StoreProblem(f"memory {self.memorizer.name}", waiting, LEFT)
        for key in self.refusing():
            where = f"conversation {key.conversation!r}"
            try:
                for _, at, why in self.refused(key):
                    yield StoreProblem(f"{where}, #{at}", f"{self.memorizer.name} refused it: {why}", REFUSED)
            except CorruptError as error:
                yield StoreProblem(where, str(error))

    def close(self) -> None:
        """Waits a little for pending deliveries; the rest is delivered later."""
        self._sync.close()
        try:
            self.memorizer.close()
        finally:
            self.record.close()

    # The memory

    def listen(self, spoken: Callable[[Entry], SpokenMessage | None], /) -> None:
        self._sync.spoken = spoken

    def begin(self, key: Key, /) -> None:
        if self.sync != "end":
            self.end(key)

    def end(self, key: Key, /) -> None:
        self._sync.open()
        self._sync.schedule(key, 0.0)

    @property
    def recalls(self) -> bool:
        return bool(getattr(self.memorizer, "recalls", True))

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> Sequence[Memory]:
        return self.memorizer.memories(key, query, limit, namespace)

    @property
    def problem(self) -> str | None:
        """Why the last delivery failed; None if it did not."""
        return self._sync.problem

    def refused(self, key: Key | None = None, /) -> list[RefusedMessage]:
        """Messages of a conversation, or of all, that the service refused though it accepted others."""
        keys = self.refusing() if key is None else [key]
        return [one for each in keys for one in self._sync.refused(each)]

    def refusing(self) -> list[Key]:
        """Conversations with refused messages; they may have been accepted since."""
        return self._sync.refusing()

    def left(self) -> list[Key]:
        """Conversations that are not delivered to the end."""
        return self._sync.behind()

    def drain(
        self, key: Key, /, patience_s: float = LEASE_S + PATIENCE_S, *, with_refused: bool = False
    ) -> bool:
        """Delivers the rest of a conversation now; False if another process does, for all of `patience_s`.

        Raises:
            StoreError: the service fails, or there was no `listen` before.
        """
        self._sync.open()
        if self._sync.spoken is None:
            raise StoreError("Entries cannot be read as messages yet: open a session, or use `refold sync`")
        with self._sync.exclusive(key, patience_s) as lease:
            if lease is None:
                return False
            if with_refused:
                self._sync.retry_refused(key)
            self._sync.deliver(key, lease)
            return True


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: HybridStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.record, name)(*args, **kwargs)

    return method


def from_url(url: str) -> HybridStore:
    """The store behind `hybrid://?record=URL&memory=URL`, with the URLs in it percent-encoded.

    Options: `sync=immediate|batch|end`, and for batches `batch_size=20` (messages) and `batch_s=5`.
    """
    where = f"store {shown_url(url)!r}"
    parts = urlsplit(url)
    options = parse_options(where, parts.query, OPTIONS)
    record = options.pop("record", "")
    memory = options.pop("memory", "")
    if parts.netloc or parts.path or not record or not memory:
        raise SettingError(
            where, "expected hybrid://?record=URL&memory=URL; it may have sync, batch_size and batch_s"
        )
    return open_hybrid(record, memorizer(memory, where), **options)


def open_hybrid(record: str, memorizer: Memorizer, **how: Any) -> HybridStore:
    """Opens a record by its URL, and adds a memory to it."""
    if record.partition(":")[0].lower() in ("agentcore", "hybrid", "mem0"):
        raise SettingError("record", f"{shown_url(record)!r} has a memory already; {RECORDS}")
    store = open_store(record)
    try:
        return HybridStore(store, memorizer, **how)
    except BaseException:
        store.close()
        raise


def memorizer(url: str, where: str) -> Memorizer:
    """The service behind a URL."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # which shows the password
        raise SettingError(where, f"memory is no URL; {ENCODING_HELP}") from None
    if scheme not in ("mem0", "agentcore"):
        raise SettingError(where, f"memory is mem0://… or agentcore://…, not {shown_url(url)!r}")
    service: Memorizer = import_module(f"refold.stores.{scheme}").memorizer(url)
    return service
