"""Follows a record and tells a service that learns what is said in it; a cursor says how far it was told."""

import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from threading import Condition, Lock, Thread
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from refold.core.codec import Entry, Link, to_bytes
from refold.core.errors import CorruptError, MessageError, RefoldError, StoreError
from refold.stores.lease_holder import is_dead, new_holder
from refold.stores.packing import pack, unpack
from refold.stores.store import Cursors, Forks, Key, Lease, Leases, Memorizer, Notes, SpokenMessage, Store

BATCH_CHARS = 100_000
"""Of what is handed over in one go, about."""
PATIENCE_S = 5.0
"""How long closing waits for the service, and erasing for somebody else who hands over."""
IDLE_S = 10.0
"""A thread without work ends after so long."""
WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Before a service that failed is asked again: doubled with every failure."""
CHUNK = 128
"""Entries read at a time. After so many that say nothing, the cursor is moved for them alone."""
BATCHES = 10
"""Handed over of a conversation before it is the turn of others that wait."""
IN_A_ROW = 20
"""Messages refused one after the other, before nothing more is tried."""
MOST_KNOWN = 10_000
"""Conversations that this process remembers something of; it asks the record about others."""


K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """At most so many entries. Safe to use from many threads."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # so that it is the newest; moving it would fail where another thread drops it
        super().__setitem__(key, value)
        while len(self) > self._most:
            self.popitem(last=False)


LEASE_S = 30.0
"""After so long it is another's turn, where a process died elsewhere; where one died here, at once."""

Turn: TypeAlias = Lease | Literal["none needed"] | None
"""None where it is somebody else's."""


class SyncLeases:
    """Among processes by a lease, where the record has them. `using` is entered to ask the record."""

    def __init__(self, record: Store, name: str, using: Callable[[], AbstractContextManager[object]]) -> None:
        self._record, self._name, self._using = record, name, using
        self._holder = new_holder()
        self._changed, self._taken = Condition(), set[Key]()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._held: dict[Key, Lease] = {}
        """Those that are renewed."""

    @contextmanager
    def alone(self, key: Key, patience_s: float = 0.0) -> Iterator[bool]:
        """Whether nobody else hands over the conversation, or erases it, meanwhile."""
        until = time.monotonic() + patience_s
        with self._changed:
            is_free = self._changed.wait_for(lambda: key not in self._taken, patience_s)
            self._taken |= {key} if is_free else set()
        if not is_free:
            yield False
            return
        try:
            lease = self.lease(key)
            while lease is None and time.monotonic() < until:
                time.sleep(0.05)
                lease = self.lease(key)
            with self._renewed(key, lease):
                yield lease is not None
        finally:
            with self._changed:
                self._taken.discard(key)
                self._changed.notify_all()

    def lease(self, key: Key) -> Turn:
        """Held again, it lasts longer."""
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
                    return self.lease(key)
        return lease

    @contextmanager
    def _renewed(self, key: Key, lease: Turn) -> Iterator[None]:
        """However long a service is waited for; released at the end."""
        if not isinstance(lease, Lease):
            yield
            return
        with self._lock:
            self._held[key] = lease
            if self._thread is None:
                self._thread = Thread(target=self._renew, name="refold-memory-lease", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                lease = self._held.pop(key)
                with suppress(RefoldError), self._using():  # it runs out by itself
                    if isinstance(self._record, Leases):
                        self._record.release(key, lease)

    def _renew(self) -> None:
        """One thread for all that are held, which ends where none is any more."""
        while True:
            time.sleep(LEASE_S / 3)
            with self._lock:
                keys = list(self._held)
            for key in keys:
                with self._lock, suppress(Exception):  # another time, then
                    lease = self.lease(key) if key in self._held else None
                    if isinstance(lease, Lease):
                        self._held[key] = lease
            with self._lock:
                if not self._held:
                    self._thread = None
                    return


class RefusedMessage(NamedTuple):
    """A message that the service did not take, though it took others. It is in the record."""

    key: Key
    at: int
    why: str


class Refusals:
    """A note for each conversation, which only who hands it over may change: nobody loses another's.
    A cursor at its beginning marks those that ever had one, so that the others are not asked.

    Where the record keeps no notes, they are gone with the process.
    """

    def __init__(self, record: Store, name: str) -> None:
        assert isinstance(record, Cursors)
        self._record, self._cursors, self._name = record, record, name
        self._here: dict[str, bytes] = {}

    def of(self, key: Key) -> list[RefusedMessage]:
        """In order.

        Raises:
            CorruptError: the note was altered.
        """
        if not (body := self._note(key)):
            return []
        try:
            note = json.loads(unpack(body))
            whose, reasons = note["of"], dict(note["refused"])
            found = [RefusedMessage(key, int(at), why) for why, places in reasons.items() for at in places]
        except (ValueError, TypeError, KeyError) as error:
            what = f"The note of what was refused of {key.conversation!r} cannot be read: {error!r}"
            raise CorruptError(what) from error
        return sorted(found) if whose == self._whose(key) else []  # else of an erased one of that name

    def all(self) -> Iterator[RefusedMessage]:
        for key in self.places():
            yield from self.of(key)

    def places(self) -> list[Key]:
        """Conversations of which something was refused, be it that it was taken since."""
        return list(self._cursors.behind(f"refused by {self._name}"))

    def add(self, key: Key, more: Iterable[RefusedMessage]) -> None:
        known = list[RefusedMessage]()
        with suppress(CorruptError):  # there is nothing left to keep of it
            known = self.of(key)
        self.set(key, [*known, *more])

    def set(self, key: Key, refused: Iterable[RefusedMessage]) -> None:
        reasons = dict[str, list[int]]()
        for one in {one.at: one for one in refused}.values():
            reasons.setdefault(one.why, []).append(one.at)
        whose = self._whose(key) if reasons else ""
        body = pack(json.dumps({"of": whose, "refused": reasons}).encode()) if whose else b""
        if body:  # first: a note that is not marked would not be found
            self._cursors.set_cursor(key, f"refused by {self._name}", 0)
        if body == (self._note(key) or b""):
            return
        if isinstance(self._record, Notes):
            self._record.keep_note(self._title(key), body)
        elif body:
            self._here[self._title(key)] = body
        else:
            del self._here[self._title(key)]

    def _note(self, key: Key) -> bytes | None:
        title = self._title(key)
        return self._record.note(title) if isinstance(self._record, Notes) else self._here.get(title)

    def _title(self, key: Key) -> str:
        owner, conversation = map(to_bytes, key)
        digest = blake2b(b"%d:%b%b" % (len(owner), owner, conversation), digest_size=16)
        return f"refused by {self._name} of {digest.hexdigest()}"

    def _whose(self, key: Key) -> str:
        """Tells a record from an earlier one of the same name, by how it begins."""
        return "".join(link.digest.hex() for link in self._record.read(key, 0, 1))


class SpokenEntry(NamedTuple):
    """What an entry says, and the entry."""

    said: SpokenMessage
    link: Link


class MemorySync:
    """One conversation at a time, by a thread that ends when there is nothing to do. Others may hand over
    as well: two never do so with the same conversation.
    """

    def __init__(self, record: Store, memorizer: Memorizer, batch_size: int) -> None:
        assert isinstance(record, Cursors)
        self._record, self._memorizer, self._batch_size = record, memorizer, batch_size
        self._cursors: Cursors = record
        self._name = f"memory:{memorizer.name}"
        self._unsure = f"{self._name} may begin later"
        """A cursor beside the other: at 0 while it is not known whether the conversation is a fork."""
        self.refusals = Refusals(record, self._name)
        self.spoken: Callable[[Entry], SpokenMessage | None] | None = None
        self.problem: str | None = None
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._news = Condition()
        self._due: dict[Key, float] = {}
        """When what is new in them is handed over."""
        self.new: dict[Key, int] = {}
        """How many entries were appended here since."""
        self._is_more = False
        """There were too many that are due: the record knows which."""
        self._known = BoundedDict[Key, None](MOST_KNOWN)
        """Those that have a cursor, and were appended to here."""
        self._turns = SyncLeases(self._record, self._name, self._using)
        self.alone = self._turns.alone
        self._erased = set[Key]()
        """Those that were erased while they were handed over: what landed is to be forgotten."""
        self._accepted = 0
        """How often the service took something."""
        self._stuck = BoundedDict[Key, int](MOST_KNOWN)
        """How often it had when it began to refuse what is next of a conversation."""
        self._took = -1
        """How often it had when something failed last."""
        self._busy: Key | None = None
        self._thread: Thread | None = None
        self._users = 0
        self._failures, self._not_before, self._is_closed = 0, 0.0, False

    def open(self) -> None:
        """Who closed it may go on."""
        self._here()
        self._is_closed = False

    def _here(self) -> None:
        """Threads and locks do not come with a fork of the process."""
        if self._pid != os.getpid():
            self._start()

    def close(self) -> None:
        """Waits a little for what is to be handed over. From then on, it leaves the record alone."""
        self._here()
        with self._news:
            left = list(self.new)
        for key in left:
            self.wake(key, 0.0)
        with self._news:
            self._news.wait_for(lambda: self._failures or not self._owes, PATIENCE_S)
            self._is_closed = True
            self._news.notify_all()
            self._news.wait_for(lambda: not self._users, PATIENCE_S)

    @property
    def _owes(self) -> bool:
        """Something is being handed over, or was appended here and is about to be."""
        soon = time.monotonic() + PATIENCE_S
        is_due = any(due < soon and key in self._known for key, due in self._due.items())
        return self._thread is not None and (is_due or self._busy is not None)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """The record is closed while nobody uses it: it would open again, and nobody would close it."""
        with self._news:
            if self._is_closed:
                raise StoreError("handing over ends here; what is left is handed over another time")
            self._users += 1
        try:
            yield
        finally:
            with self._news:
                self._users -= 1
                self._news.notify_all()

    # When

    def expect(self, key: Key, *, is_new: bool) -> None:
        """Something is about to be said: from now on, a crash leaves it behind the cursor."""
        if (is_new or key not in self._known) and self.cursor(key) is None:
            if not is_new:  # where it begins is found out when it is handed over: nobody waits for that
                self._set_cursor(key, self._unsure, 0)
            self.set_cursor(key, 0)
        self._known[key] = None

    def appended(self, key: Key, count: int, seconds: float | None) -> None:
        """So many entries, to be handed over after so long, or at the end of the session if None; at once
        where they make a batch.
        """
        with self._news:
            self.new[key] = count = self.new.get(key, 0) + count
            oldest = next(iter(self.new))
            is_over = len(self.new) > MOST_KNOWN  # so many that did not end: the oldest does not wait for it
            if is_over:
                del self.new[oldest]
        if seconds is not None:
            self.wake(key, 0.0 if count >= self._batch_size else seconds)
        if is_over:
            self.wake(oldest, 0.0)

    def wake(self, key: Key, seconds: float) -> None:
        if self.spoken is None:
            return
        with self._news:
            due = time.monotonic() + seconds
            if key in self._due or len(self._due) < MOST_KNOWN:
                self._due[key] = min(due, self._due.get(key, due))
            else:
                self._is_more = True
            if self._thread is None:
                self._thread = Thread(target=self._follow, name="refold-memory", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def _follow(self) -> None:
        while (key := self._next()) is not None:
            again: float | None = None
            try:
                if key in self._erased or self._is_more or self._has_news(key):
                    again = WAIT_S
                    with self.alone(key) as is_alone:
                        if is_alone:
                            again = self._hand_over_some(key)
                            self._failures, self.problem = 0, None
                if self._is_more and self._is_free:
                    self._catch_up()
            except Exception as error:  # whatever a service, or a client of one, makes of it
                again = 0.0 if self._is_closed else self._wait_after(error, key)
            with self._news:
                self._busy = None
                if again is not None:
                    self._due.setdefault(key, time.monotonic() + again)
                self._news.notify_all()

    def _hand_over_some(self, key: Key) -> float | None:
        """When it is the conversation's turn again; None where all was handed over. What says nothing is left
        where it is, unless the record is to tell which conversations have something new.
        """
        return None if self.hand_over(key, to_the_end=self._is_more, batches=BATCHES) else 0.0

    def _wait_after(self, error: Exception, key: Key) -> float:
        self.problem = str(error) or repr(error)
        took_others, self._took = self._accepted > self._took, self._accepted
        if key in self._stuck and took_others:  # which may be because of what it says: others are tried
            return LONGEST_WAIT_S
        seconds: float = min(LONGEST_WAIT_S, WAIT_S * 2 ** min(self._failures, 16))
        self._failures += 1
        self._not_before = time.monotonic() + seconds
        return LONGEST_WAIT_S if key in self._stuck else seconds

    @property
    def _is_free(self) -> bool:
        """Nothing is due now, and there is room for more."""
        with self._news:
            soonest = min(self._due.values(), default=math.inf)
            return len(self._due) < MOST_KNOWN and soonest > time.monotonic()

    def _catch_up(self) -> None:
        self._is_more = False
        try:
            with self._using():
                keys = list(islice(self._cursors.behind(self._name), MOST_KNOWN + 1))
        except BaseException:
            self._is_more = True
            raise
        for key in keys:
            if key not in self._due:  # else it waits for a reason
                self.wake(key, 0.0)

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
                    self.new.pop(key, None)
                    return key
                self._news.wait(due - now)
            self._thread = None
            self._news.notify_all()
            return None

    def _has_news(self, key: Key) -> bool:
        """Something was said after the cursor, as far as one look can tell."""
        cursor = self.cursor(key)
        if cursor is None:
            return key in self._known  # erased meanwhile, and begun anew
        links = self._read(key, cursor, CHUNK)
        return len(links) == CHUNK or any(self._said(link.entry) for link in links)

    # What

    def hand_over(self, key: Key, *, to_the_end: bool = False, batches: float = math.inf) -> bool:
        """What is after the cursor, in order, which moves on with every batch; False where so many were not
        all. `to_the_end` it moves behind what says nothing, too.

        Raises:
            StoreError: the service does not take it now: it fails, or refuses one message after the other.
        """
        self._forget_erased(key)
        done, refused = self._begun(key), list[RefusedMessage]()
        for batch, last in self._batches(key, done):
            if batch:
                self._tell(key, batch, last, refused)
                batches -= 1
                if not refused:
                    self._stuck.pop(key, None)
                    done = last.entry.at + 1
                    if batches <= 0:
                        return False
            elif not refused and last.entry.at + 1 - done >= (1 if to_the_end else CHUNK):
                self._move(key, last, refused)
        if refused:
            raise self._refusing(refused)
        return True

    def hand_in_again(self, key: Key) -> None:
        """What was refused before; what is refused again stays noted.

        Raises:
            StoreError: the service does not take it now.
        """
        left = {one.at: one for one in self.refusals.of(key)}
        try:
            for one in list(left.values()):
                for link in self._read(key, one.at, 1):
                    try:
                        if said := self._said(link.entry):
                            self._memorizer.remember(key, [said])
                        del left[one.at]
                    except MessageError as error:
                        left[one.at] = one._replace(why=error.problem)
                    self._demand(key, link)
        finally:
            with self._using():
                self.refusals.set(key, left.values())

    def _batches(self, key: Key, next: int) -> Iterator[tuple[list[SpokenEntry], Link]]:
        """What was said, and the last entry that was looked at; at the end perhaps nothing was."""
        batch, last = list[SpokenEntry](), None
        while links := self._read(key, next, CHUNK):  # nothing is open while it is told
            for last in links:
                said, next = self._said(last.entry), last.entry.at + 1
                batch += [SpokenEntry(said, last)] if said else []
                if len(batch) >= self._batch_size or sum(len(one.said.text) for one in batch) >= BATCH_CHARS:
                    yield batch, last
                    batch = []
        if last is not None:
            yield batch, last

    def _tell(
        self, key: Key, batch: Sequence[SpokenEntry], last: Link, refused: list[RefusedMessage]
    ) -> None:
        """One batch, or each of its messages alone where the service refuses something in it.

        A message is passed over where the service takes others around it. Where it takes none, it is not the
        message that is wrong, and `refused` holds what is to be tried again.
        """
        if self._is_closed:
            raise StoreError("handing over ends here; what is left is handed over another time")
        try:
            self._memorizer.remember(key, [one.said for one in batch])
        except MessageError as error:
            before = self._stuck.setdefault(key, self._accepted)
            if len(batch) == 1:
                refused.append(RefusedMessage(key, batch[0].said.at, error.problem))
            for one in batch if len(batch) > 1 else ():
                self._tell(key, [one], one.link, refused)
            if self._accepted == before:
                if len(refused) >= IN_A_ROW:
                    raise self._refusing(refused) from error
                return
        else:
            self._accepted += 1
        self._move(key, last, refused)

    def _refusing(self, refused: Sequence[RefusedMessage]) -> StoreError:
        key, at, why = refused[0]
        return StoreError(
            f"{self._memorizer.name} refuses what it is told of {key.conversation!r} from #{at} on, and took"
            f" nothing else meanwhile: {why}. It is kept, and handed in again"
        )

    def _move(self, key: Key, last: Link, refused: list[RefusedMessage]) -> None:
        """The cursor, behind what the service took or will not take."""
        self._demand(key, last)
        if self._turns.lease(key) is None:
            raise StoreError("it took so long that somebody else goes on from here")
        with self._using():
            if refused:
                self.refusals.add(key, refused)
                refused.clear()
            self._cursors.set_cursor(key, self._name, last.entry.at + 1)

    def _demand(self, key: Key, last: Link) -> None:
        """That the conversation is still there: what landed after it was erased is forgotten.

        Raises:
            StoreError: it is not.
        """
        if [link.digest for link in self._read(key, last.entry.at, 1)] != [last.digest]:
            self._erased.add(key)
            self.wake(key, WAIT_S)  # should the service fail now
            self._forget_erased(key)
            raise StoreError(f"{key.conversation!r} was erased while it was handed over")

    def _forget_erased(self, key: Key) -> None:
        if key in self._erased:
            self._memorizer.forget(key)
            self._erased.discard(key)

    def may_have_told(self, key: Key) -> bool:
        """Whether the service may know something of a conversation."""
        return key in self._erased or self.cursor(key) is not None

    def forgotten(self, key: Key) -> None:
        """Nothing is known of a conversation that was erased."""
        self._known.pop(key, None)
        self._stuck.pop(key, None)
        self._erased.discard(key)
        self.refusals.set(key, ())

    def _said(self, entry: Entry) -> SpokenMessage | None:
        return self.spoken(entry) if self.spoken else None

    def _read(self, key: Key, start: int, count: int) -> list[Link]:
        with self._using():
            return list(self._record.read(key, start, start + count))

    # How far

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

    def _begun(self, key: Key) -> int:
        """The cursor; where there is none yet, the place where it is to begin."""
        cursor = self.cursor(key)
        if cursor is None:
            return self._beginning(key)
        if cursor == 0 and self._cursor(key, self._unsure) == 0:
            cursor = self._beginning(key)
            self.set_cursor(key, cursor)
            self._set_cursor(key, self._unsure, 1)
        return cursor

    def _beginning(self, key: Key) -> int:
        """Where a conversation goes its own way: what it shares was learned from another."""
        if not isinstance(self._record, Forks):
            return 0
        with self._using():
            return next((row.fork_at for row in self._record.conversations(key.owner) if row.key == key), 0)
