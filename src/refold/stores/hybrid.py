"""A record and a memory: what is said is kept in a store, and a service that learns from it is told.

The record is the outbox. A cursor beside it says how far the service was told; a thread follows. So
an append never waits for the service, and whatever becomes of the service or of this process, what is
after the cursor is handed over later.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Condition, RLock, Thread
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args
from urllib.parse import parse_qsl, urlsplit

from refold.core.codec import Entry, Link
from refold.core.errors import MessageError, SettingError, StoreError
from refold.stores.holder import holder, is_dead
from refold.stores.store import (
    Batched,
    Cursors,
    Examined,
    Flaw,
    Forks,
    Ids,
    Key,
    Lease,
    Leases,
    Listed,
    Memorizer,
    Memory,
    Notes,
    Searched,
    Settings,
    Snapshots,
    Spoken,
    Store,
    Summaries,
    Vectors,
    Watched,
    open_store,
    shown_url,
)

Sync: TypeAlias = Literal["immediate", "batch", "end"]

PASSED_ON = (
    *(Ids, Forks, Snapshots, Leases, Notes, Summaries, Searched, Vectors, Settings),
    *(Batched, Watched, Cursors, Examined),
)
"""What a record may be able to do besides, and this store then too."""
BATCH_CHARS = 100_000
"""Of what is handed over in one go, about."""
PATIENCE_S = 5.0
"""How long closing waits for the service, and erasing for somebody else who hands over."""
LEASE_S = 30.0
"""For handing over one batch; longer than a service is waited for."""
IDLE_S = 10.0
"""A thread without work ends after so long."""
WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Before a service that failed is asked again: doubled with every failure."""
CHUNK = 128
"""Entries read at a time. After so many that say nothing, the cursor is moved for them alone."""
MOST_REFUSED = 100
"""Refused messages that are remembered; the oldest are forgotten."""


class Refused(NamedTuple):
    """A message that the service will never take. It is in the record."""

    key: Key
    at: int
    why: str


class HybridStore:
    """Whatever its record is and can do, and has memories. Safe to use as the record is."""

    def __new__(cls, record: Store, *_: Any, **__: Any) -> Self:
        """Of a class that has the verbs of the record's protocols, so that others see what it can do."""
        able = [protocol for protocol in PASSED_ON if isinstance(record, protocol)]
        verbs = [name for protocol in able for name in vars(protocol) if not name.startswith("_")]
        own = {"fork": cls._fork, "examine": cls._examine}
        made = {name: own.get(name) or _passing(name) for name in verbs}
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
        if not isinstance(record, Cursors):
            raise SettingError(
                "record",
                f"{type(record).__name__} keeps no cursors, so nobody would know what was handed over;"
                " use sqlite://, postgresql:// or redis://",
            )
        self.record, self.memorizer, self.sync = record, memorizer, sync
        self.batch_size, self.batch_s = batch_size, batch_s
        self.cannot = getattr(record, "cannot", {})
        self.problem: str | None = None
        """Why the service did not take what was handed over last; None where it did."""
        self._cursors: Cursors = record
        self._name = f"memory:{memorizer.name}"
        self._spoken: Callable[[Entry], Spoken | None] | None = None
        self._refused: list[Refused] = []
        self._start()

    def _start(self) -> None:
        self._pid, self._holder = os.getpid(), holder()
        self._news, self._handing = Condition(), RLock()
        self._due: dict[Key, float] = {}
        """When what is new in them is handed over."""
        self._new: dict[Key, int] = {}
        """How many entries were appended here since."""
        self._known = set[Key]()
        """Those that have a cursor, and were appended to here."""
        self._busy: Key | None = None
        self._thread: Thread | None = None
        self._failures, self._not_before, self._is_closed = 0, 0.0, False

    def _here(self) -> None:
        """Threads and locks do not come with a fork of the process."""
        if self._pid != os.getpid():
            self._start()

    # The record

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        self._here()
        if entries and (key not in self._known or entries[0].at == 0):
            if self._cursors.cursor(key, self._name) is None:
                self._cursors.set_cursor(key, self._name, 0)  # before it can be said: nothing is missed
            self._known.add(key)
        fence = {} if lease is None else {"lease": lease}
        digest = self.record.append(key, entries, after=after, **fence)
        if entries:
            self._new[key] = new = self._new.get(key, 0) + len(entries)
            at_once = self.sync == "immediate" or new >= self.batch_size
            if self.sync != "end":
                self._wake(key, 0.0 if at_once else self.batch_s)
        return digest

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        return self.record.read(key, start, stop, but=but)

    def conversations(self, owner: str | None = None, /) -> Iterator[Listed]:
        return self.record.conversations(owner)

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """The memory is forgotten first. What was learned from a past that a fork shares is forgotten too.

        Raises:
            StoreError: the service cannot be reached, or somebody else is handing over: nothing is erased.
        """
        self._here()
        keys = [key, *(self._forks_of(key) if with_forks else ())]
        with ExitStack() as stack:
            for gone in keys:
                if self._cursors.cursor(gone, self._name) is not None:
                    if not stack.enter_context(self._alone(gone, PATIENCE_S)):
                        raise StoreError(f"{gone.conversation!r} is being handed over right now; retry")
                    self.memorizer.forget(gone)
            heirs = self.record.erase(key, with_forks=with_forks)
        self._note([one for one in self._all_refused() if one.key not in keys])
        return heirs

    def _forks_of(self, key: Key) -> list[Key]:
        rows, found = list(self.record.conversations(key.owner)), [key]
        for one in found:
            found += [row.key for row in rows if row.parent == one]
        return found[1:]

    def _fork(self, key: Key, new: Key, at: int, /) -> None:
        assert isinstance(self.record, Forks)
        self.record.fork(key, new, at)
        self._cursors.set_cursor(new, self._name, at)  # what it shares was learned from the parent

    def _examine(self) -> Iterable[Flaw]:
        assert isinstance(self.record, Examined)
        yield from self.record.examine()
        for key, at, why in self._all_refused():
            yield Flaw(
                f"conversation {key.conversation!r}, #{at}", f"{self.memorizer.name} refused it: {why}"
            )

    def close(self) -> None:
        """Waits a little for what is being handed over; the rest is handed over another time."""
        self._here()
        for key in list(self._new):
            self._wake(key, 0.0)
        with self._news:
            self._news.wait_for(lambda: self._failures or not self._owes, PATIENCE_S)
            self._is_closed = True
            self._news.notify_all()
        self.memorizer.close()
        self.record.close()

    @property
    def _owes(self) -> bool:
        """Something is being handed over, or was appended here and is about to be."""
        is_due = self._busy is not None or any(key in self._known for key in self._due)
        return self._thread is not None and is_due

    # The memory

    def listen(self, spoken: Callable[[Entry], Spoken | None], /) -> None:
        self._spoken = spoken

    def begin(self, key: Key, /) -> None:
        if self.sync != "end":
            self._here()
            self._wake(key, 0.0)

    def end(self, key: Key, /) -> None:
        self._here()
        self._wake(key, 0.0)

    @property
    def recalls(self) -> bool:
        return bool(getattr(self.memorizer, "recalls", True))

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> Sequence[Memory]:
        return self.memorizer.memories(key, query, limit, namespace)

    def refused(self, key: Key, /) -> list[Refused]:
        """What the service will never take of a conversation."""
        return [one for one in self._all_refused() if one.key == key]

    def left(self) -> list[Key]:
        """Conversations of which something was not handed over yet."""
        return list(self._cursors.behind(self._name))

    def drain(self, key: Key, /, patience_s: float = LEASE_S + PATIENCE_S) -> bool:
        """Hands over all that is left of a conversation, now; False where somebody else does for so long.

        Raises:
            StoreError: the service does not take it now.
        """
        self._here()
        with self._alone(key, patience_s) as is_alone:
            if is_alone:
                self._hand_over(key, to_the_end=True)
            return is_alone

    # Following

    def _wake(self, key: Key, seconds: float) -> None:
        if self._spoken is None:
            return
        with self._news:
            self._is_closed = False
            due = time.monotonic() + seconds
            self._due[key] = min(due, self._due.get(key, due))
            if self._thread is None:
                self._thread = Thread(target=self._follow, name="refold-memory", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def _follow(self) -> None:
        while (key := self._next()) is not None:
            again: float | None = None
            try:
                if self._has_news(key):
                    with self._alone(key) as is_alone:
                        if is_alone:
                            self._hand_over(key)
                            self._failures, self.problem = 0, None
                    again = None if is_alone else WAIT_S
            except Exception as error:  # whatever a service, or a client of one, makes of it
                self.problem = str(error) or repr(error)
                again = min(LONGEST_WAIT_S, WAIT_S * 2 ** min(self._failures, 16))
                self._failures += 1
                self._not_before = time.monotonic() + again
            with self._news:
                self._busy = None
                if again is not None:
                    self._due.setdefault(key, time.monotonic() + again)
                self._news.notify_all()

    def _next(self) -> Key | None:
        """Waits for a conversation that is due; None when there was none for long."""
        with self._news:
            idle = time.monotonic() + IDLE_S
            while not self._is_closed:
                now = time.monotonic()
                if now < self._not_before:
                    self._news.wait(self._not_before - now)
                    continue
                key = min(self._due, key=self._due.__getitem__, default=None)
                due = idle if key is None else self._due[key]
                if due <= now:
                    if key is None:
                        break
                    self._busy = key
                    del self._due[key]
                    self._new.pop(key, None)
                    return key
                self._news.wait(due - now)
            self._thread = None
            self._news.notify_all()
            return None

    @contextmanager
    def _alone(self, key: Key, patience_s: float = 0.0) -> Iterator[bool]:
        """Whether nobody else, in this process or another, hands over the conversation meanwhile."""
        until = time.monotonic() + patience_s
        if not self._handing.acquire(timeout=max(patience_s, 0.001)):
            yield False
            return
        try:
            lease = self._lease(key)
            while lease is None and time.monotonic() < until:
                time.sleep(0.05)
                lease = self._lease(key)
            try:
                yield lease is not None
            finally:
                if isinstance(lease, Lease) and isinstance(self.record, Leases):
                    with suppress(StoreError):  # it runs out by itself
                        self.record.release(key, lease)
        finally:
            self._handing.release()

    def _lease(self, key: Key) -> Lease | Literal["none needed"] | None:
        """None where somebody else has it."""
        if not isinstance(self.record, Leases):
            return "none needed"
        now = time.time()
        lease = self.record.acquire(key, self._name, self._holder, now, LEASE_S)
        if lease is None:
            held = next((one for one in self.record.leases(key, now) if one.name == self._name), None)
            if held is None:
                return "none needed"  # there is no such conversation
            if is_dead(held.holder):
                self.record.release(key, held)
                return self._lease(key)
        return lease

    def _has_news(self, key: Key) -> bool:
        """Something was said after the cursor, as far as one look can tell."""
        cursor = self._cursors.cursor(key, self._name)
        if cursor is None:
            return key in self._known  # erased meanwhile, and begun anew
        links = list(self.record.read(key, cursor, cursor + CHUNK))
        return len(links) == CHUNK or any(self._said(link.entry) for link in links)

    def _said(self, entry: Entry) -> Spoken | None:
        return self._spoken(entry) if self._spoken else None

    def _hand_over(self, key: Key, *, to_the_end: bool = False) -> None:
        """All that is after the cursor, in order, which moves on with every batch."""
        done = next = self._cursors.cursor(key, self._name) or 0
        batch = list[Spoken]()
        while links := list(self.record.read(key, next, next + CHUNK)):  # nothing is open while it is told
            for entry, _ in links:
                said, next = self._said(entry), entry.at + 1
                batch += [said] if said else []
                if len(batch) >= self.batch_size or sum(len(one.text) for one in batch) >= BATCH_CHARS:
                    done, batch = self._tell(key, batch, next), []
        if batch:
            done = self._tell(key, batch, next)
        if next - done >= (1 if to_the_end else CHUNK):
            self._cursors.set_cursor(key, self._name, next)

    def _tell(self, key: Key, batch: Sequence[Spoken], next: int) -> int:
        """One batch, or each of its messages alone where the service refuses something in it."""
        if self._is_closed or self._lease(key) is None:  # which lasts longer from now on
            raise StoreError("handing over ends here; what is left is handed over another time")
        begun = time.monotonic()
        try:
            self.memorizer.remember(key, batch)
        except MessageError as error:
            if len(batch) == 1:
                refused = Refused(key, batch[0].at, str(error))
                self._note([*self._all_refused(), refused])
            for one in batch if len(batch) > 1 else ():
                self._tell(key, [one], one.at + 1)
        if time.monotonic() - begun > LEASE_S / 2 and self._is_lost(key):
            raise StoreError("it took so long that somebody else goes on from here")
        if not self._is_closed:
            self._cursors.set_cursor(key, self._name, next)
        return next

    def _is_lost(self, key: Key) -> bool:
        """Somebody else has the lease by now, or erased the conversation."""
        return isinstance(self.record, Leases) and not isinstance(self._lease(key), Lease)

    # What was refused

    def _all_refused(self) -> list[Refused]:
        if not isinstance(self.record, Notes):
            return self._refused
        rows = json.loads(self.record.note(f"refused by {self._name}") or b"[]")
        return [Refused(Key(owner, conversation), at, why) for owner, conversation, at, why in rows]

    def _note(self, refused: Sequence[Refused]) -> None:
        if list(refused) == self._all_refused():
            return
        self._refused = list(dict.fromkeys(refused))[-MOST_REFUSED:]
        if isinstance(self.record, Notes):
            body = json.dumps([(*key, at, why) for key, at, why in self._refused]).encode()
            self.record.keep_note(f"refused by {self._name}", body)


def _passing(name: str) -> Callable[..., Any]:
    def pass_on(self: HybridStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.record, name)(*args, **kwargs)

    return pass_on


def from_url(url: str) -> HybridStore:
    """The store behind `hybrid://?record=URL&memory=URL`, with the URLs in it percent-encoded.

    Options: `sync=immediate|batch|end`, and for batches `batch_size=20` (messages) and `batch_s=5`.
    """
    where = f"store {shown_url(url)!r}"
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    record, memory = options.pop("record", ""), options.pop("memory", "")
    sync = options.pop("sync", "immediate")
    size, seconds = options.pop("batch_size", "20"), options.pop("batch_s", "5")
    if options or parts.netloc or parts.path or not record or not memory:
        raise SettingError(
            where, "expected hybrid://?record=URL&memory=URL; it may have sync, batch_size and batch_s"
        )
    if sync not in get_args(Sync):
        raise SettingError(where, f"sync is immediate, batch or end, not {sync!r}")
    if not (size.isascii() and size.isdecimal() and int(size) and _is_number(seconds)):
        raise SettingError(where, "batch_size is a number of messages, batch_s one of seconds")
    return joined(record, memorizer(memory, where), sync=sync, batch_size=int(size), batch_s=float(seconds))


def joined(record: str, memorizer: Memorizer, **how: Any) -> HybridStore:
    """A record that is opened by its URL, with a memory beside it."""
    store = open_store(record)
    try:
        return HybridStore(store, memorizer, **how)
    except BaseException:
        store.close()
        raise


def memorizer(url: str, where: str) -> Memorizer:
    """The service behind a URL."""
    match urlsplit(url).scheme:
        case "mem0":
            from refold.stores import mem0

            return mem0.memorizer(url)
        case "agentcore":
            from refold.stores import agentcore

            return agentcore.memorizer(url)
    raise SettingError(where, f"memory is mem0://… or agentcore://…, not {shown_url(url)!r}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdecimal()
