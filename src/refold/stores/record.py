"""One conversation as this process knows it: its live view, the text of what is shown, and its store."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b

import msgspec

from refold.core import codec
from refold.core.codec import GENESIS, Entry, Link, Parse
from refold.core.errors import ConflictError, CorruptError, NotFoundError, StoreError
from refold.core.event import Event, Head, Line, Replaced, Said, Span
from refold.core.live import Live, State
from refold.core.message import Message
from refold.core.view import View
from refold.stores.shelf import Shelf
from refold.stores.store import Key, Lease, RemoteReads, Snapshot, Store

SNAPSHOT_EVERY = 64
"""Events between two snapshots; more for a view that is very long, so that its cost stays small."""
MAX_APPEND_TRIES = 1_000
NEAR = 32
"""Places that are at most this far apart are read together."""
SHORT = 80
"""A shortened message with at most this many tokens is hardly shortened again."""
PAST_EVERY = 2_000
"""Events between two cached views of the past."""
WATCH_S, POLL_S = 5.0, 0.1
"""How long a store waits for the next event; how often one that cannot wait is polled."""
HELP = "`refold doctor` says what is damaged"
STATE = codec.decoder(State)


class Entries:
    """Stored events by place: those that are shown are in memory, the others are read from the store.

    A view refers to this and not to its record, so that the two form no reference cycle.
    """

    def __init__(self, store: Store, key: Key, parse: Parse) -> None:
        self._store = store
        self._key = key
        self._parse = parse
        self.at_hand: dict[int, Entry] = {}

    def entry(self, at: int) -> Entry:
        found = self.at_hand.get(at)
        if found is None:
            link = next(self._store.read(self._key, at, at + 1), None) if at >= 0 else None
            if link is None:
                raise NotFoundError(f"{self._key.conversation!r} has no place {at}")
            found = link.entry
        return found

    def message(self, line: Line) -> Message:
        return _message(codec.decode(self.entry(line.at), self._parse), line)

    def facts(self, before: int, /) -> Iterable[Head]:
        heads = (codec.head(link.entry) for link in self._store.read(self._key, 0, before, but="said"))
        return (head for head in heads if head is not None)

    def lines(self, span: Span, /) -> Iterable[Line]:
        for link in self._store.read(self._key, span.start, span.end):
            head = codec.head(link.entry)
            if isinstance(head, Line):
                yield head


class Record:
    """Reads what other writers appended, appends new events, and keeps the text of what is shown."""

    def __init__(
        self,
        store: Store,
        key: Key,
        view: str,
        parse: Parse,
        listener: Callable[[Sequence[Event], State], None] | None = None,
    ) -> None:
        """`listener` is called with the events that this record has appended."""
        self.store = store
        self.key = key
        self.view = view
        self.parse = parse
        self.entries = Entries(store, key, parse)
        self._live = Live(view, self.entries.message)
        self._listener = listener
        self.forget()
        if not isinstance(store, RemoteReads):  # across a network, it is read when it is needed
            self.catch_up()

    # Catching up

    @property
    def live(self) -> Live:
        """The view as of the last `catch_up`."""
        if not self._known:
            self.catch_up()
        return self._live

    @property
    def known(self) -> Live:
        """The view as far as it was read, without reading now."""
        return self._live

    def catch_up(self) -> None:
        """Applies what other writers appended; starts again if the conversation was erased meanwhile."""
        if not self._known:
            self._apply(self._start())
            return
        links = self.store.read(self.key, max(0, self._live.state.next - 1))
        if self._live.state.next:
            known = next(links, None)
            if known is None or known.digest != self._digest:
                self.forget()
                links = self._start()
        self._apply(links)

    def forget(self) -> None:
        """Drops all that was read."""
        self.entries.at_hand = {}
        self._past: dict[int, bytes] = {}
        """Views of the past, by the place that comes next, from which `as_of` starts."""
        self._newest_dialect: tuple[int, str | None] = (0, None)
        """The place up to which messages were looked at, and the dialect that was found."""
        self._digest = GENESIS
        self._saved = 0
        self._known = False
        self._begin(State())

    def _begin(self, state: State) -> None:
        """Replaces the live view; its edition differs from that of the one before."""
        self._edition = self._live.edition + 1
        self._live = Live(self.view, self.entries.message, state)
        self._live.edition = self._edition

    def _start(self) -> Iterator[Link]:
        """Begins with the newest snapshot that belongs to this log; returns the entries after it."""
        snapshot, links = self._resumed()
        before = next(links, None) if snapshot else None
        self._known = True
        if snapshot and before and seal(before.digest, snapshot.body) == snapshot.digest:
            with suppress(msgspec.DecodeError, ValueError):  # of another version
                self._begin(_state(snapshot.body))
                self._digest = before.digest
                self._saved = snapshot.at
                return links
        return self.store.read(self.key) if snapshot else links

    def _resumed(self) -> tuple[Snapshot | None, Iterator[Link]]:
        snapshot = None
        with suppress(CorruptError):  # only a cache
            if isinstance(self.store, RemoteReads):
                return self.store.resume(self.key, self.view)
            if isinstance(self.store, Shelf):
                snapshot = self.store.saved(self.key).get(self.view)
        return snapshot, self.store.read(self.key, snapshot.at - 1 if snapshot else 0)

    def _apply(self, links: Iterable[Link]) -> None:
        try:
            for entry, digest in links:
                if entry.at != self._live.state.next:
                    raise CorruptError(
                        f"{self.key.conversation!r} has no event {self._live.state.next}: {HELP}"
                    )
                self.entries.at_hand[entry.at] = entry
                self._live.apply(codec.head(entry), entry.at, self.entries)
                self._digest = digest
        except BaseException:
            self.forget()  # a half-applied view is wrong
            raise
        self._tidy()

    def _tidy(self) -> None:
        """Drops the text of what is no longer shown."""
        if self._edition != self._live.edition:
            self._edition = self._live.edition
            shown = {line.at for item in self._live.items for line in item.lines}
            at_hand = self.entries.at_hand
            self.entries.at_hand = {at: entry for at, entry in at_hand.items() if at in shown}

    def save(self) -> None:
        """Stores a snapshot. It is only a cache: if the store cannot take it now, a later one will do."""
        if self._known and isinstance(self.store, Shelf) and self.live.state.next > self._saved:
            body = codec.dumps(self.live.snapshot())
            with suppress(StoreError):
                snapshot = Snapshot(self.live.state.next, body, seal(self._digest, body))
                self.store.save(self.key, self.view, snapshot)
                self._saved = self.live.state.next

    # Appending

    def append(self, build: Callable[[], Sequence[Event]], lease: Lease | None = None) -> Sequence[Event]:
        """Appends the events that `build` returns; it is called again whenever another writer wins the race.

        Raises:
            ConflictError: another holder took the `lease`.
        """
        for attempt in range(MAX_APPEND_TRIES):
            events = build()
            if not events:
                return events
            entries = [codec.encode(event) for event in events]
            try:
                digest = self.store.append(self.key, entries, after=self._digest, lease=lease)
            except ConflictError:
                known = self._digest
                time.sleep(_jitter(attempt))
                self.catch_up()
                if lease is not None and self._digest == known:  # no other writer: it is the lease
                    raise
                continue
            self._apply(Link(entry, digest) for entry in entries)  # only the last digest is used
            if self.live.state.next - self._saved >= max(SNAPSHOT_EVERY, len(self.live.items) // 8):
                self.save()
            if self._listener is not None:
                self._listener(events, self._live.state)
            return events
        raise ConflictError(
            f"{self.key.conversation!r}: other writers won the race {MAX_APPEND_TRIES} times in a row; retry"
        )

    # Reading

    def event(self, at: int) -> Event:
        return codec.decode(self.entry(at), self.parse)

    def events(self, start: int = 0, stop: int | None = None) -> Iterator[Event]:
        for link in self.store.read(self.key, start, stop):
            yield codec.decode(link.entry, self.parse)

    def followed(self, start: int) -> Iterator[Event | None]:
        """The same, and then what any writer appends, as it comes (see `follow`)."""
        for link in follow(self.store, self.key, start):
            yield None if link is None else codec.decode(link.entry, self.parse)

    def entry(self, at: int) -> Entry:
        return self.entries.entry(at)

    def stored(self, at: int) -> Event | None:
        """The event at a place, read from the store; safe in any thread."""
        link = next(self.store.read(self.key, at, at + 1), None)
        return codec.decode(link.entry, self.parse) if link else None

    def end_of(self, at: int) -> int:
        """The place after a message, including all its pieces."""
        came = codec.came(self.entry(at))
        piece = came.piece if came else None
        return at + 1 if piece is None else at - piece.n + piece.of

    def message(self, line: Line) -> Message:
        """The message of a line."""
        return self.entries.message(line)

    def load(self, lines: Iterable[Line]) -> None:
        """Reads the messages of shown lines into memory."""
        self._load({line.at for line in lines})

    def load_all(self, *, originals: bool = False) -> None:
        """Reads the messages of the whole view into memory, and originals that may be shortened again."""
        places = {line.at for item in self.live.items for line in item.lines}
        if originals:
            places |= {
                item.span.start for item in self.live.items if item.is_shortened and item.tokens > SHORT
            }
        self._load(places)

    def _load(self, places: set[int]) -> None:
        at_hand = self.entries.at_hand
        at_hand |= self._fetch(places - at_hand.keys())

    def with_words(self, view: View) -> View:
        """The same view with all its messages in memory, independent of this record."""
        places = {line.at for line in view.lines}
        at_hand = self.entries.at_hand
        found = {at: at_hand[at] for at in places & at_hand.keys()}
        found |= self._fetch(places - found.keys())
        known: dict[int, Event] = {}

        def words(line: Line) -> Message:
            if line.at not in known:
                event = codec.decode(found[line.at], self.parse) if line.at in found else self.stored(line.at)
                if event is None:
                    raise NotFoundError(f"{self.key.conversation!r} has no place {line.at}: it was erased")
                known[line.at] = event
            return _message(known[line.at], line)

        items = [msgspec.structs.replace(item, words=words) for item in view.items]
        return msgspec.structs.replace(view, items=tuple(items))

    @property
    def tip(self) -> str:
        """The digest of the last event that was read."""
        return self._digest.hex()

    def digest_before(self, at: int) -> str:
        """The digest of the log up to a place."""
        link = next(self.store.read(self.key, at - 1, at), None)
        return link.digest.hex() if link else ""

    def _fetch(self, places: set[int]) -> dict[int, Entry]:
        """Entries by place, in as few reads as their places allow."""
        if places and isinstance(self.store, RemoteReads):
            return self.store.fetch(self.key, places)
        runs: list[list[int]] = []
        for at in sorted(places):
            if runs and at - runs[-1][-1] <= NEAR:
                runs[-1].append(at)
            else:
                runs.append([at])
        found: dict[int, Entry] = {}
        for run in runs:
            links = self.store.read(self.key, run[0], run[-1] + 1)
            found |= {link.entry.at: link.entry for link in links if link.entry.at in places}
        return found

    def said_from(self, at: int) -> Said | None:
        """The first message at or after a place."""
        while at < self.live.state.next:
            for link in self.store.read(self.key, at, at + NEAR):
                if link.entry.kind == "said":
                    event = codec.decode(link.entry, self.parse)
                    return event if isinstance(event, Said) else None
            at += NEAR
        return None

    def index_from(self, at: int) -> int:
        """Index of the first message at or after a place."""
        said = self.said_from(at)
        return said.index if said else self.live.state.index

    def place_of(self, index: int) -> int:
        """The place of a message: at least its index, since each message has one."""
        low = index
        high = self.live.state.next
        while low < high:
            middle = (low + high) // 2
            if self.index_from(middle) < index:
                low = middle + 1
            else:
                high = middle
        return low

    def backwards(self) -> Iterator[Said]:
        """The recorded messages, the newest first."""
        stop = self.live.state.next
        while stop > 0:
            start = max(0, stop - NEAR)
            yield from (e for e in reversed(list(self.events(start, stop))) if isinstance(e, Said))
            stop = start

    @property
    def newest_dialect(self) -> str | None:
        """The dialect of the newest message that has one. No event is looked at twice."""
        stop = self.live.state.next
        start, newest = self._newest_dialect
        found = self.entries.at_hand
        for at in reversed(range(start, stop)):
            if at not in found:  # more at a time the further back it is
                found = self._fetch({*range(max(start, at - min(stop - at, 1_000)), at + 1)})
            dialect = codec.dialect_of(found[at]) if at in found else None  # erased just now
            if dialect is not None:
                newest = dialect
                break
        self._newest_dialect = (stop, newest)
        return newest

    def as_of(self, at: int) -> Live:
        """The view right after the event at a place, including all pieces of a message."""
        end = self.end_of(at)
        past = self._past
        near = max((next for next in past if next <= end), default=None)
        live = Live(self.view, self.entries.message, None if near is None else _state(past[near]))
        for link in self.store.read(self.key, live.state.next, end):
            live.apply(codec.head(link.entry), link.entry.at, self.entries)
            if live.state.next % PAST_EVERY == 0 and len(live.items) <= PAST_EVERY:
                past[live.state.next] = codec.dumps(live.snapshot())
        return live


def follow(store: Store, key: Key, start: int) -> Iterator[Link | None]:
    """Entries from a place on, with what is appended later; ends when the conversation is erased.

    None is yielded whenever there are no more entries at the moment, so that the caller can stop waiting.
    """
    last: bytes | None = None
    while True:
        links = store.read(key, max(0, start - 1))
        before = next(links, None) if start else None
        if last is not None and (before is None or before.digest != last):
            return
        if before is not None:
            last = before.digest
        for link in links:
            start = link.entry.at + 1
            last = link.digest
            yield link
        yield None
        if isinstance(store, RemoteReads):
            store.wait(key, start, WATCH_S)
        else:
            time.sleep(POLL_S)


def _state(body: bytes) -> State:
    try:
        state: State = STATE.decode(body)
    except msgspec.DecodeError:  # the id of a call may have a lone surrogate
        state = msgspec.convert(codec.loads(body), State, str_keys=True)
    if state.version != State().version:
        raise ValueError("a snapshot of another version")
    return state


def _message(event: Event, line: Line) -> Message:
    if isinstance(event, Said):
        return event.message
    message = event.shown[line.n] if isinstance(event, Replaced) and line.n < len(event.shown) else None
    if not isinstance(message, Message):
        raise CorruptError(f"Event {event.at} has no text for what it shows: {HELP}")
    return message


def _jitter(attempt: int) -> float:
    """Seconds to wait, so that writers that collided do not collide again."""
    from random import random  # imported only after a collision

    return random() * min(attempt, 10) / 1000


def seal(digest: bytes, body: bytes) -> bytes:
    """The digest of a snapshot, chained to the last event in it."""
    return blake2b(digest + body, digest_size=16).digest()
