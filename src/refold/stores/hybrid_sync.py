"""Delivers what is recorded to a service that learns from it; a cursor in the record says how far it got."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, RLock, Thread
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from refold.core.codec import Entry, Link
from refold.core.errors import CorruptError, MessageError, StoreError
from refold.stores.forks import renew_after_fork
from refold.stores.lease_holder import RenewedLease
from refold.stores.packing import key_digest, pack, unpack
from refold.stores.shelf import Shelf
from refold.stores.store import Key, Memorizer, SpokenMessage

BATCH_CHARS = 100_000
PATIENCE_S = 5.0
"""How long closing waits for the service, and erasing for another process that delivers."""
WAIT_S = 0.5
"""Before a retry; doubled with every failure."""
LONGEST_WAIT_S = 60.0
LEASE_S = 30.0
POLL_S = 0.05
ENTRIES_PER_READ = 128
BATCHES_PER_TURN = 10
MAX_REFUSALS_IN_A_ROW = 20
MAX_KNOWN = 10_000
"""Conversations that this process remembers; for others it asks the record."""

K = TypeVar("K")
V = TypeVar("V")
Batch: TypeAlias = list[tuple[SpokenMessage, Link]]


class BoundedDict(OrderedDict[K, V]):
    """Drops what was set longest ago. Safe to use from many threads.

    >>> recent = BoundedDict[str, int](2)
    >>> for name in ("a", "b", "a", "c"):
    ...     recent[name] = len(recent)
    >>> list(recent)
    ['a', 'c']
    """

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self._max_size = max_size

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # not move_to_end, which fails if another thread drops the key
        super().__setitem__(key, value)
        while len(self) > self._max_size:
            self.popitem(last=False)


class RefusedMessage(NamedTuple):
    """A recorded message that the service refused, though it accepted others."""

    key: Key
    at: int
    why: str


class RefusalNote(msgspec.Struct):
    of: str
    """Digest of the first entry, which tells the conversation from an earlier one of the same name."""
    refused: dict[str, list[int]]
    """Places by the reason."""


class _RefusedError(StoreError):
    """The service refuses one message after the other."""


class MemorySync:
    """Delivers one conversation at a time, in a thread that ends when there is nothing to do. Other processes
    may deliver too; a lease keeps two from delivering the same conversation.
    """

    def __init__(self, record: Shelf, memorizer: Memorizer, batch_size: int) -> None:
        self._record = record
        self._memorizer = memorizer
        self._batch_size = batch_size
        self._name = f"memory:{memorizer.name}"
        self.spoken: Callable[[Entry], SpokenMessage | None] | None = None
        self.problem: str | None = None
        """Why the last delivery failed; None if it did not."""
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """A forked process delivers what it appends, in a thread of its own."""
        self._is_closed = False
        self._using = RLock()
        """Held while the record is used and closed: a closed store would reopen."""
        self._changed = Condition()
        self._thread: Thread | None = None
        self._delivering: Key | None = None
        self._due: dict[Key, float] = {}
        """When the conversations are to be delivered."""
        self._not_before = 0.0
        """While the service fails, nothing is due earlier."""
        self._failures = 0
        self._undelivered: dict[Key, int] = {}
        """How many entries were appended here since the last delivery."""
        self._known = BoundedDict[Key, None](MAX_KNOWN)
        """Conversations with a cursor that this process has written to."""
        self._erased = set[Key]()
        """Erased during a delivery: the service must forget what it was sent."""
        self._leases = set[RenewedLease]()
        self._accepted = 0
        self._stuck = BoundedDict[Key, int](MAX_KNOWN)
        """The value of `_accepted` when the service began to refuse a conversation's next message."""

    def open(self) -> None:
        """May be called again after `close`."""
        self._is_closed = False

    def close(self) -> None:
        """Waits up to `PATIENCE_S` for pending deliveries. After that, the record is not used any more."""
        self.open()
        for key in list(self._undelivered):
            self.schedule(key, 0.0)
        with self._changed:
            self._changed.wait_for(lambda: self._failures or not self._is_pending(), PATIENCE_S)
            with self._using:
                self._is_closed = True
            self._changed.notify_all()
        for lease in list(self._leases):
            lease.release()

    def _is_pending(self) -> bool:
        """A delivery is running, or is due soon."""
        soon = time.monotonic() + PATIENCE_S
        is_due = any(due < soon for due in self._due.values())
        return self._thread is not None and (is_due or self._delivering is not None)

    @contextmanager
    def _open_record(self) -> Iterator[Shelf]:
        with self._using:
            if self._is_closed:
                raise StoreError("The store was closed; what is left is delivered later")
            yield self._record

    @contextmanager
    def exclusive(self, key: Key, patience_s: float = 0.0) -> Iterator[RenewedLease | None]:
        """Gives a lease if nobody else delivers or erases the conversation until the block ends."""
        lease = RenewedLease(self._record, key, self._name, LEASE_S)
        self._leases.add(lease)
        until = time.monotonic() + patience_s
        try:
            while True:
                with self._open_record():
                    lease.acquire()
                if lease.rival is None or time.monotonic() >= until:
                    break
                time.sleep(POLL_S)
            yield lease if lease.rival is None else None
        finally:
            lease.release()
            self._leases.discard(lease)

    # Scheduling

    def before_append(self, key: Key, *, is_new: bool) -> None:
        """Sets the cursor, so that after a crash the entry is still known to be undelivered."""
        if (is_new or key not in self._known) and self.cursor(key) is None:
            self.set_cursor(key, 0)
        self._known[key] = None

    def appended(self, key: Key, count: int, delay_s: float | None) -> None:
        """Schedules a delivery; a full batch does not wait. `delay_s` None waits for the session's end."""
        with self._changed:
            count += self._undelivered.get(key, 0)
            self._undelivered[key] = count
        if delay_s is not None:
            self.schedule(key, 0.0 if count >= self._batch_size else delay_s)

    def schedule(self, key: Key, delay_s: float) -> None:
        if self.spoken is None:
            return
        with self._changed:
            due = time.monotonic() + delay_s
            self._due[key] = min(due, self._due.get(key, due))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="refold-memory", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while (key := self._next()) is not None:
            try:
                retry_s = self._visit(key)
            except Exception as error:  # a service's client may raise anything
                retry_s = 0.0 if self._is_closed else self._wait_after(error)
            with self._changed:
                self._delivering = None
                if retry_s is not None:
                    self._due.setdefault(key, time.monotonic() + retry_s)
                self._changed.notify_all()

    def _next(self) -> Key | None:
        """Waits for the conversation that is due first; None if there is none."""
        with self._changed:
            while self._due and not self._is_closed:
                key = min(self._due, key=self._due.__getitem__)
                wait_s = max(self._due[key], self._not_before) - time.monotonic()
                if wait_s <= 0:
                    self._delivering = key
                    del self._due[key]
                    self._undelivered.pop(key, None)
                    return key
                self._changed.wait(wait_s)
            self._thread = None
            self._changed.notify_all()
            return None

    def _visit(self, key: Key) -> float | None:
        """Delivers a part of a conversation; returns when to continue, in seconds."""
        if key not in self._erased:
            cursor = self.cursor(key)
            if cursor is None and key not in self._known:
                return None
            if cursor is not None:  # None if it was erased meanwhile, and started again
                links = self._read(key, cursor, ENTRIES_PER_READ)
                if len(links) < ENTRIES_PER_READ and not any(self._message(link.entry) for link in links):
                    return None
        with self.exclusive(key) as lease:
            if lease is None:
                return WAIT_S
            is_done = self.deliver(key, lease, batches=BATCHES_PER_TURN)
        self._failures = 0
        self.problem = None
        return None if is_done else 0.0

    def _wait_after(self, error: Exception) -> float:
        """Seconds until the conversation is tried again. All others wait, too, except after a first refusal,
        which may be due to this conversation alone.
        """
        self.problem = str(error) or repr(error)
        is_refusal = isinstance(error, _RefusedError)
        seconds: float = min(LONGEST_WAIT_S, WAIT_S * 2 ** min(self._failures, 16))
        if not is_refusal or self._failures:
            self._not_before = time.monotonic() + seconds
        self._failures += 1
        return LONGEST_WAIT_S if is_refusal else seconds

    # Delivering

    def deliver(self, key: Key, lease: RenewedLease, *, batches: float = math.inf) -> bool:
        """Delivers what is after the cursor; False if `batches` were not all.

        Raises:
            StoreError: the service fails, or refuses one message after the other.
        """
        self._forget_erased(key)
        refused: list[RefusedMessage] = []
        for batch, last in self._batches(key, self.cursor(key) or 0):
            if batches <= 0:
                return False
            batches -= 1
            self._send(key, lease, batch, last, refused)
            if len(refused) >= MAX_REFUSALS_IN_A_ROW:
                break
        if refused:
            _, at, why = refused[0]
            raise _RefusedError(
                f"{self._memorizer.name} refuses the messages of {key.conversation!r} from #{at} on, and"
                f" accepted nothing else meanwhile: {why}. They are recorded, and delivered again later"
            )
        return True

    def _batches(self, key: Key, next: int) -> Iterator[tuple[Batch, Link]]:
        """The messages of each batch and the last entry that was read; the last batch may be empty."""
        batch: Batch = []
        chars = 0
        last = None
        # In parts: the record is not in use while the service is called
        while links := self._read(key, next, ENTRIES_PER_READ):
            for last in links:
                next = last.entry.at + 1
                if message := self._message(last.entry):
                    batch.append((message, last))
                    chars += len(message.text)
                if len(batch) >= self._batch_size or chars >= BATCH_CHARS:
                    yield batch, last
                    batch = []
                    chars = 0
                    last = None
        if last is not None:
            yield batch, last

    def _send(
        self, key: Key, lease: RenewedLease, batch: Batch, last: Link, refused: list[RefusedMessage]
    ) -> None:
        """Sends a batch, or its messages one by one if the service refuses it; moves the cursor.

        A message is skipped and noted if the service accepts others before or after it. If it accepts none,
        the message is not at fault: it is added to `refused`, the cursor stays, and it is tried again.
        """
        if self._is_closed:
            raise StoreError("The store was closed; what is left is delivered later")
        before = self._accepted
        try:
            if batch:
                self._memorizer.remember(key, [message for message, _ in batch])
                self._accepted += 1
        except MessageError as error:
            before = self._stuck.setdefault(key, before)
            if len(batch) == 1:
                refused.append(RefusedMessage(key, batch[0][0].at, error.problem))
            else:
                for one in batch:
                    self._send(key, lease, [one], one[1], refused)
        if refused and self._accepted == before:
            return
        self._require_present(key, last)
        with self._open_record() as record:
            lease.acquire()
            if lease.rival is not None:
                raise StoreError("The delivery took so long that another process continues it")
            if refused:
                known: list[RefusedMessage] = []
                with suppress(CorruptError):  # an unreadable note is replaced
                    known = self.refused(key)
                self._set_refused(key, [*known, *refused])
                refused.clear()
            record.set_cursor(key, self._name, last.entry.at + 1)
        self._stuck.pop(key, None)

    def retry_refused(self, key: Key) -> None:
        """Raises StoreError if the service fails."""
        left = {one.at: one for one in self.refused(key)}
        try:
            for one in list(left.values()):
                for link in self._read(key, one.at, 1):
                    try:
                        if message := self._message(link.entry):
                            self._memorizer.remember(key, [message])
                        del left[one.at]
                    except MessageError as error:
                        left[one.at] = one._replace(why=error.problem)
                    self._require_present(key, link)
        finally:
            self._set_refused(key, list(left.values()))

    def _require_present(self, key: Key, last: Link) -> None:
        """Makes the service forget a conversation that was erased during the delivery.

        Raises:
            StoreError: it was.
        """
        if [link.digest for link in self._read(key, last.entry.at, 1)] != [last.digest]:
            self._erased.add(key)
            self.schedule(key, WAIT_S)  # in case the service fails now
            self._forget_erased(key)
            raise StoreError(f"{key.conversation!r} was erased during its delivery")

    def _forget_erased(self, key: Key) -> None:
        if key in self._erased:
            self._memorizer.forget(key)
            self._erased.discard(key)

    def may_be_known(self, key: Key) -> bool:
        """True if the service may know something of a conversation."""
        return key in self._erased or self.cursor(key) is not None

    def forgotten(self, key: Key) -> None:
        """Must be called after a conversation was erased."""
        self._known.pop(key, None)
        self._stuck.pop(key, None)
        self._erased.discard(key)
        self._set_refused(key, ())

    # Refused messages: one note per conversation, changed only by the process that delivers it

    def refused(self, key: Key) -> list[RefusedMessage]:
        """In order.

        Raises:
            CorruptError: the note was altered.
        """
        body = self._record.note(self._refusal_note(key))
        if not body:
            return []
        try:
            note = msgspec.json.decode(unpack(body), type=RefusalNote)
        except msgspec.DecodeError as error:
            raise CorruptError(
                f"The note of refused messages of {key.conversation!r} cannot be read: {error}"
            ) from error
        if note.of != self._first_digest(key):  # of a conversation that was erased
            return []
        return sorted(RefusedMessage(key, at, why) for why, places in note.refused.items() for at in places)

    def refusing(self) -> list[Key]:
        """Conversations that ever had a note, which a cursor at 0 marks."""
        return list(self._record.behind(f"refused by {self._name}"))

    def _set_refused(self, key: Key, refused: Sequence[RefusedMessage]) -> None:
        body = b""
        if refused:
            note = RefusalNote(self._first_digest(key), {})
            for one in refused:
                note.refused.setdefault(one.why, []).append(one.at)
            body = pack(msgspec.json.encode(note))
            # Before the note, which is found by it
            self._record.set_cursor(key, f"refused by {self._name}", 0)
        if body != (self._record.note(self._refusal_note(key)) or b""):
            self._record.keep_note(self._refusal_note(key), body)

    def _refusal_note(self, key: Key) -> str:
        return f"refused by {self._name} of {key_digest(key)}"

    def _first_digest(self, key: Key) -> str:
        return "".join(link.digest.hex() for link in self._record.read(key, 0, 1))

    # The record

    def _message(self, entry: Entry) -> SpokenMessage | None:
        return self.spoken(entry) if self.spoken else None

    def _read(self, key: Key, start: int, count: int) -> list[Link]:
        with self._open_record() as record:
            return list(record.read(key, start, start + count))

    def cursor(self, key: Key) -> int | None:
        with self._open_record() as record:
            return record.cursor(key, self._name)

    def set_cursor(self, key: Key, next: int) -> None:
        with self._open_record() as record:
            record.set_cursor(key, self._name, next)

    def behind(self) -> list[Key]:
        """Conversations that are not delivered to the end."""
        return list(self._record.behind(self._name))
