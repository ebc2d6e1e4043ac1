"""Delivers what is recorded to a service that learns from it; a cursor in the record says how far it got."""

import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from threading import Condition, Lock, Thread
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from refold.core.codec import Entry, Link
from refold.core.errors import CorruptError, MessageError, RefoldError, StoreError
from refold.stores.lease_holder import is_dead, new_holder
from refold.stores.packing import key_digest, pack, unpack
from refold.stores.store import Cursors, Forks, Key, Lease, Leases, Memorizer, Notes, SpokenMessage, Store

BATCH_CHARS = 100_000
PATIENCE_S = 5.0
"""How long closing waits for the service, and erasing for another process that delivers."""
IDLE_S = 10.0
"""The thread ends after so long without work."""
WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Before a retry: doubled with every failure."""
LEASE_S = 30.0
CHUNK = 128
"""Entries read at a time. After so many without a message, the cursor is moved for them alone."""
BATCHES = 10
"""Delivered of one conversation before others get their turn."""
IN_A_ROW = 20
"""Delivery stops after so many consecutive refusals."""
MOST_KNOWN = 10_000
"""Conversations that this process remembers; for others it asks the record."""

K = TypeVar("K")
V = TypeVar("V")
HeldLease: TypeAlias = Lease | Literal["none needed"] | None
"""None if another process holds it."""


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


class SyncLeases:
    """Lets one thread of one process deliver a conversation at a time; among processes by a lease, if the
    record has leases. `using` is entered around each use of the record.
    """

    def __init__(self, record: Store, name: str, using: Callable[[], AbstractContextManager[object]]) -> None:
        self._record = record
        self._name = name
        self._using = using
        self._holder = new_holder()
        self._changed = Condition()
        self._taken = set[Key]()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._renewed: dict[Key, Lease] = {}

    @contextmanager
    def exclusive(self, key: Key, patience_s: float = 0.0) -> Iterator[bool]:
        """Gives True if nobody else delivers or erases the conversation until the block ends."""
        until = time.monotonic() + patience_s
        with self._changed:
            if is_free := self._changed.wait_for(lambda: key not in self._taken, patience_s):
                self._taken.add(key)
        if not is_free:
            yield False
            return
        try:
            lease = self.acquire(key)
            while lease is None and time.monotonic() < until:
                time.sleep(0.05)
                lease = self.acquire(key)
            if isinstance(lease, Lease):
                self._keep_renewing(key, lease)
            try:
                yield lease is not None
            finally:
                self._release(key)
        finally:
            with self._changed:
                self._taken.discard(key)
                self._changed.notify_all()

    def acquire(self, key: Key) -> HeldLease:
        """Acquires or renews the lease; takes over that of a process that died on this machine."""
        if not isinstance(self._record, Leases):
            return "none needed"
        now = time.time()
        with self._using():
            lease = self._record.acquire(key, self._name, self._holder, now, LEASE_S)
            if lease is None:
                held = next((one for one in self._record.leases(key, now) if one.name == self._name), None)
                if held is None:
                    return "none needed"  # there is no such conversation
                if is_dead(held.holder):
                    self._record.release(key, held)
                    return self.acquire(key)
        return lease

    def _keep_renewing(self, key: Key, lease: Lease) -> None:
        with self._lock:
            self._renewed[key] = lease
            if self._thread is None:
                self._thread = Thread(target=self._renew, name="refold-memory-lease", daemon=True)
                self._thread.start()

    def _release(self, key: Key) -> None:
        with self._lock:
            lease = self._renewed.pop(key, None)
            if lease is not None and isinstance(self._record, Leases):
                with suppress(RefoldError), self._using():  # it expires anyway
                    self._record.release(key, lease)

    def _renew(self) -> None:
        """Runs in a thread, as long as there is a lease to renew."""
        while True:
            time.sleep(LEASE_S / 3)
            with self._lock:
                keys = list(self._renewed)
            for key in keys:
                with self._lock, suppress(Exception):  # the next round tries again
                    lease = self.acquire(key) if key in self._renewed else None
                    if isinstance(lease, Lease):
                        self._renewed[key] = lease
            with self._lock:
                if not self._renewed:
                    self._thread = None
                    return


class RefusedMessage(NamedTuple):
    """A recorded message that the service refused, though it accepted others."""

    key: Key
    at: int
    why: str


class Refusals:
    """One note per conversation, changed only by the process that delivers it. A cursor at 0 marks the
    conversations that ever had one. If the record keeps no notes, they are lost with the process.
    """

    def __init__(self, record: Store, name: str) -> None:
        assert isinstance(record, Cursors)
        self._record = record
        self._cursors: Cursors = record
        self._name = name
        self._notes: dict[str, bytes] = {}

    def of(self, key: Key) -> list[RefusedMessage]:
        """In order.

        Raises:
            CorruptError: the note was altered.
        """
        body = self._note(key)
        if not body:
            return []
        try:
            note = json.loads(unpack(body))
            first = note["of"]
            reasons = dict(note["refused"]).items()
            found = [RefusedMessage(key, int(at), why) for why, places in reasons for at in places]
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(
                f"The note of refused messages of {key.conversation!r} cannot be read: {error!r}"
            ) from error
        return sorted(found) if first == self._first_digest(key) else []  # else of an erased conversation

    def conversations(self) -> list[Key]:
        """Conversations with refused messages, though they may have been accepted since."""
        return list(self._cursors.behind(f"refused by {self._name}"))

    def add(self, key: Key, more: Iterable[RefusedMessage]) -> None:
        known = list[RefusedMessage]()
        with suppress(CorruptError):  # an unreadable note is replaced
            known = self.of(key)
        self.set(key, [*known, *more])

    def set(self, key: Key, refused: Iterable[RefusedMessage]) -> None:
        reasons = dict[str, list[int]]()
        for one in {one.at: one for one in refused}.values():
            reasons.setdefault(one.why, []).append(one.at)
        first = self._first_digest(key) if reasons else ""
        body = pack(json.dumps({"of": first, "refused": reasons}).encode()) if first else b""
        if body:  # before the note, which would not be found without it
            self._cursors.set_cursor(key, f"refused by {self._name}", 0)
        if body == (self._note(key) or b""):
            return
        if isinstance(self._record, Notes):
            self._record.keep_note(self._title(key), body)
        else:
            self._notes[self._title(key)] = body

    def _note(self, key: Key) -> bytes | None:
        title = self._title(key)
        return self._record.note(title) if isinstance(self._record, Notes) else self._notes.get(title)

    def _title(self, key: Key) -> str:
        return f"refused by {self._name} of {key_digest(key)}"

    def _first_digest(self, key: Key) -> str:
        """Tells a record from an earlier one of the same name."""
        return "".join(link.digest.hex() for link in self._record.read(key, 0, 1))


class SpokenEntry(NamedTuple):
    message: SpokenMessage
    link: Link


class MemorySync:
    """Delivers one conversation at a time, in a thread that ends when there is nothing to do. Other processes
    may deliver too, but never the same conversation at the same time.
    """

    def __init__(self, record: Store, memorizer: Memorizer, batch_size: int) -> None:
        assert isinstance(record, Cursors)
        self._record = record
        self._memorizer = memorizer
        self._batch_size = batch_size
        self._cursors: Cursors = record
        self._name = f"memory:{memorizer.name}"
        self._unsure = f"{self._name} may begin later"
        """A second cursor: at 0 while it is not known whether the conversation is a fork."""
        self.refusals = Refusals(record, self._name)
        self.spoken: Callable[[Entry], SpokenMessage | None] | None = None
        self.problem: str | None = None
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._due: dict[Key, float] = {}
        """When the conversations are to be delivered."""
        self.undelivered: dict[Key, int] = {}
        """How many entries were appended here since the last delivery."""
        self._overflowed = False
        """More conversations are due than `_due` may hold: ask the record which."""
        self._known = BoundedDict[Key, None](MOST_KNOWN)
        """Conversations with a cursor that this process has written to."""
        self._leases = SyncLeases(self._record, self._name, self._using)
        self.exclusive = self._leases.exclusive
        self._erased = set[Key]()
        """Erased during a delivery: the service must forget what it was sent."""
        self._accepted = 0
        self._accepted_at_failure = -1
        self._stuck = BoundedDict[Key, int](MOST_KNOWN)
        """The value of `_accepted` when the service began to refuse a conversation's next message."""
        self._delivering: Key | None = None
        self._thread: Thread | None = None
        self._users = 0
        self._failures = 0
        self._not_before = 0.0
        self._is_closed = False

    def open(self) -> None:
        """May be called again after `close`."""
        self._after_fork()
        self._is_closed = False

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._start()

    def close(self) -> None:
        """Waits up to `PATIENCE_S` for pending deliveries. After that, the record is not used any more."""
        self._after_fork()
        with self._changed:
            left = list(self.undelivered)
        for key in left:
            self.schedule(key, 0.0)
        with self._changed:
            self._changed.wait_for(lambda: self._failures or not self._is_pending, PATIENCE_S)
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._users, PATIENCE_S)

    @property
    def _is_pending(self) -> bool:
        """A delivery is running, or is due soon for what this process appended."""
        soon = time.monotonic() + PATIENCE_S
        is_due = any(due < soon and key in self._known for key, due in self._due.items())
        return self._thread is not None and (is_due or self._delivering is not None)

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreError("The store was closed; what is left is delivered later")

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keeps the record open: used after it was closed, it would open again and stay open."""
        with self._changed:
            self._require_open()
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    # Scheduling

    def before_append(self, key: Key, *, is_new: bool) -> None:
        """Sets the cursor, so that after a crash the entry is still known to be undelivered."""
        if (is_new or key not in self._known) and self.cursor(key) is None:
            if not is_new:  # its start is determined on delivery, so that the append does not wait for it
                self._set_cursor(key, self._unsure, 0)
            self.set_cursor(key, 0)
        self._known[key] = None

    def appended(self, key: Key, count: int, delay_s: float | None) -> None:
        """Schedules a delivery; a full batch does not wait. `delay_s` None waits for the session's end."""
        oldest: Key | None = None
        with self._changed:
            self.undelivered[key] = count = self.undelivered.get(key, 0) + count
            if len(self.undelivered) > MOST_KNOWN:  # too many open sessions: the oldest does not wait
                oldest = next(iter(self.undelivered))
                del self.undelivered[oldest]
        if delay_s is not None:
            self.schedule(key, 0.0 if count >= self._batch_size else delay_s)
        if oldest is not None:
            self.schedule(oldest, 0.0)

    def schedule(self, key: Key, delay_s: float) -> None:
        if self.spoken is None:
            return
        with self._changed:
            due = time.monotonic() + delay_s
            if key in self._due or len(self._due) < MOST_KNOWN:
                self._due[key] = min(due, self._due.get(key, due))
            else:
                self._overflowed = True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="refold-memory", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while (key := self._next()) is not None:
            retry_s: float | None = None
            try:
                if key in self._erased or self._overflowed or self._has_news(key):
                    retry_s = WAIT_S
                    with self.exclusive(key) as is_exclusive:
                        if is_exclusive:
                            # If the record is asked who is behind, the cursor must pass what has no message.
                            is_done = self.deliver(key, to_the_end=self._overflowed, batches=BATCHES)
                            retry_s = None if is_done else 0.0
                            self._failures = 0
                            self.problem = None
                if self._overflowed and self._is_free:
                    self._schedule_those_behind()
            except Exception as error:  # a service's client may raise anything
                retry_s = 0.0 if self._is_closed else self._wait_after(error, key)
            with self._changed:
                self._delivering = None
                if retry_s is not None:
                    self._due.setdefault(key, time.monotonic() + retry_s)
                self._changed.notify_all()

    def _wait_after(self, error: Exception, key: Key) -> float:
        self.problem = str(error) or repr(error)
        accepted_others = self._accepted > self._accepted_at_failure
        self._accepted_at_failure = self._accepted
        if key in self._stuck and accepted_others:  # perhaps only this conversation is refused
            return LONGEST_WAIT_S
        seconds: float = min(LONGEST_WAIT_S, WAIT_S * 2 ** min(self._failures, 16))
        self._failures += 1
        self._not_before = time.monotonic() + seconds
        return LONGEST_WAIT_S if key in self._stuck else seconds

    @property
    def _is_free(self) -> bool:
        """Nothing is due now, and there is room for more."""
        with self._changed:
            soonest = min(self._due.values(), default=math.inf)
            return len(self._due) < MOST_KNOWN and soonest > time.monotonic()

    def _schedule_those_behind(self) -> None:
        self._overflowed = False
        try:
            with self._using():
                keys = list(islice(self._cursors.behind(self._name), MOST_KNOWN + 1))
        except BaseException:
            self._overflowed = True
            raise
        for key in keys:
            if key not in self._due:  # else it waits for a reason
                self.schedule(key, 0.0)

    def _next(self) -> Key | None:
        """Waits for a conversation that is due; None after `IDLE_S` without one."""
        with self._changed:
            idle = time.monotonic() + IDLE_S
            while not self._is_closed:
                now = time.monotonic()
                if now < self._not_before:
                    self._changed.wait(self._not_before - now)
                    continue
                key = min(self._due, key=self._due.__getitem__, default=None)
                due = idle if key is None else self._due[key]
                if due > now:
                    self._changed.wait(due - now)
                    continue
                if key is None:
                    break
                self._delivering = key
                del self._due[key]
                self.undelivered.pop(key, None)
                return key
            self._thread = None
            self._changed.notify_all()
            return None

    def _has_news(self, key: Key) -> bool:
        """True if there may be a message after the cursor: only one chunk is read."""
        cursor = self.cursor(key)
        if cursor is None:
            return key in self._known  # erased meanwhile, and started again
        links = self._read(key, cursor, CHUNK)
        return len(links) == CHUNK or any(self._message(link.entry) for link in links)

    # Delivering

    def deliver(self, key: Key, *, to_the_end: bool = False, batches: float = math.inf) -> bool:
        """Delivers what is after the cursor, which moves with every batch; False if `batches` were not all.
        With `to_the_end`, the cursor also passes entries without a message.

        Raises:
            StoreError: the service fails, or refuses one message after the other.
        """
        self._forget_erased(key)
        done = self._start_of(key)
        refused = list[RefusedMessage]()
        for batch, last in self._batches(key, done):
            if batch:
                self._send(key, batch, last, refused)
                batches -= 1
                if not refused:
                    self._stuck.pop(key, None)
                    done = last.entry.at + 1
                    if batches <= 0:
                        return False
            elif not refused and last.entry.at + 1 - done >= (1 if to_the_end else CHUNK):
                self._advance(key, last, refused)
        if refused:
            raise self._refusal(refused)
        return True

    def retry_refused(self, key: Key) -> None:
        """
        Raises:
            StoreError: the service fails.
        """
        left = {one.at: one for one in self.refusals.of(key)}
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
            with self._using():
                self.refusals.set(key, left.values())

    def _batches(self, key: Key, next: int) -> Iterator[tuple[list[SpokenEntry], Link]]:
        """The messages of each batch and the last entry that was read; the last batch may be empty."""
        batch = list[SpokenEntry]()
        last = None
        while links := self._read(key, next, CHUNK):  # the record is not in use while the service is called
            for last in links:
                next = last.entry.at + 1
                if message := self._message(last.entry):
                    batch.append(SpokenEntry(message, last))
                chars = sum(len(one.message.text) for one in batch)
                if len(batch) >= self._batch_size or chars >= BATCH_CHARS:
                    yield batch, last
                    batch = []
        if last is not None:
            yield batch, last

    def _send(
        self, key: Key, batch: Sequence[SpokenEntry], last: Link, refused: list[RefusedMessage]
    ) -> None:
        """Sends one batch, or its messages one by one if the service refuses something in it.

        A message is skipped if the service accepts others around it. If it accepts none, the message is not
        at fault: it is added to `refused`, and tried again.
        """
        self._require_open()
        try:
            self._memorizer.remember(key, [one.message for one in batch])
        except MessageError as error:
            before = self._stuck.setdefault(key, self._accepted)
            if len(batch) == 1:
                refused.append(RefusedMessage(key, batch[0].message.at, error.problem))
            else:
                for one in batch:
                    self._send(key, [one], one.link, refused)
            if self._accepted == before:
                if len(refused) >= IN_A_ROW:
                    raise self._refusal(refused) from error
                return
        else:
            self._accepted += 1
        self._advance(key, last, refused)

    def _refusal(self, refused: Sequence[RefusedMessage]) -> StoreError:
        key, at, why = refused[0]
        return StoreError(
            f"{self._memorizer.name} refuses the messages of {key.conversation!r} from #{at} on, and accepted"
            f" nothing else meanwhile: {why}. They are recorded, and delivered again later"
        )

    def _advance(self, key: Key, last: Link, refused: list[RefusedMessage]) -> None:
        """Moves the cursor past what the service accepted or will not accept."""
        self._require_present(key, last)
        if self._leases.acquire(key) is None:
            raise StoreError("The delivery took so long that another process continues it")
        with self._using():
            if refused:
                self.refusals.add(key, refused)
                refused.clear()
            self._cursors.set_cursor(key, self._name, last.entry.at + 1)

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
        self.refusals.set(key, ())

    def _message(self, entry: Entry) -> SpokenMessage | None:
        return self.spoken(entry) if self.spoken else None

    def _read(self, key: Key, start: int, count: int) -> list[Link]:
        with self._using():
            return list(self._record.read(key, start, start + count))

    # Cursors

    def cursor(self, key: Key) -> int | None:
        return self._cursor(key, self._name)

    def set_cursor(self, key: Key, next: int) -> None:
        self._set_cursor(key, self._name, next)

    def _cursor(self, key: Key, name: str) -> int | None:
        with self._using():
            return self._cursors.cursor(key, name)

    def _set_cursor(self, key: Key, name: str, next: int) -> None:
        with self._using():
            self._cursors.set_cursor(key, name, next)

    def behind(self) -> list[Key]:
        return list(self._cursors.behind(self._name))

    def _start_of(self, key: Key) -> int:
        """The cursor; for a conversation without one, the first place that it does not share with a parent,
        from which the service has learned already.
        """
        cursor = self.cursor(key)
        is_unsure = cursor == 0 and self._cursor(key, self._unsure) == 0
        if cursor is not None and not is_unsure:
            return cursor
        start = 0
        if isinstance(self._record, Forks):
            with self._using():
                rows = self._record.conversations(key.owner)
                start = next((row.fork_at for row in rows if row.key == key), 0)
        if is_unsure:
            self.set_cursor(key, start)
            self._set_cursor(key, self._unsure, 1)
        return start
