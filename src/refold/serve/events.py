"""What happens, told live to those who watch: from the streams of the store, and from this process."""

import logging
import time
from asyncio import AbstractEventLoop, Event, Future
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from threading import Condition, Lock, Thread
from typing import NamedTuple, TypeAlias

from refold.core import codec
from refold.core.codec import Entry, Link
from refold.core.errors import NotFoundError, RefoldError
from refold.serve.frames import LAGGING, is_in_stream, live_frame, stream_frames
from refold.session.inspect import parse
from refold.session.notify import Happened
from refold.stores.record import Record
from refold.stores.store import Key, Store

RING = 1_000
"""Frames that are kept for those who watch: who falls behind by more is cut off."""
CHUNK = 50
"""Frames, or events, that are handed on in one go."""
LOOK_S = 0.25
"""How often is looked for what other processes appended."""
STALE_S = 1.0
"""After which those who take nothing are sent away when somebody else comes."""
SHARE = 20
"""Times as long as a look took is waited before the next."""
ROUSE_S = 0.005
"""From when one who waits is woken up to the next."""
MOST_TOLD = 10_000
"""What sessions told and nobody handed on yet: of more, the oldest is forgotten."""

Scope: TypeAlias = Key | str | None
"""What is watched: a conversation, all of an owner's, or everybody's."""


class Frame(NamedTuple):
    text: bytes
    next: int | None = None
    """The place after the event; None where it is none of the stream."""


class Place(NamedTuple):
    """How much of a conversation was told, and of which: it may be erased and begun anew under its name."""

    next: int = 0
    digest: bytes | None = None
    """Of the last event that was told, where it is known."""
    created: float | None = None
    """As the store's list says, where that was looked at."""

    @property
    def before(self) -> int:
        return max(0, self.next - 1)


class Feed:
    """What is told of a scope: once for all who watch it, each of whom has only a place in it."""

    def __init__(
        self, store: Store, scope: Scope, loop: AbstractEventLoop, ask: Callable[[], None] = lambda: None
    ) -> None:
        """`ask` is called when somebody can be told again what was left out while nobody could."""
        self.store, self.scope, self.watchers, self._ask = store, scope, 0, ask
        self.is_over = False
        """The conversation was erased, or the service ends."""
        self.over, self.farewell = Event(), b""
        """What those who watch are told last."""
        self._loop, self._lock, self._waiting = loop, Lock(), dict[Future[None], None]()
        self._asleep = 0
        """How many of those who wait are still to be woken up."""
        self._ring, self._end = deque[Frame](maxlen=RING), 0
        self._places: dict[Key, Place] = {}
        self._behind: dict[Key, int | None] = {}
        """What was told of while nobody could be told: whoever reads nothing costs nothing."""
        self._stuck, self._since = 0, 0.0
        """How many have not taken yet what they were sent; since when something was left out for them."""
        if isinstance(scope, Key):
            record = Record(store, scope, "main", parse)
            self._places[scope] = Place(record.live.state.next, bytes.fromhex(record.tip))
        else:
            rows = store.conversations(scope)
            self._places = {row.key: Place(row.next, created=row.created) for row in rows}

    # For those who watch

    @property
    def here(self) -> tuple[int, int]:
        """How many frames there were, and the first place that was not told, of a conversation."""
        with self._lock:
            place = self._places.get(self.scope, Place()) if isinstance(self.scope, Key) else Place()
            return self._end, place.next

    def since(self, seen: int) -> list[Frame] | None:
        """The next few frames after so many; None where they are no longer known."""
        with self._lock:
            start = len(self._ring) - (self._end - seen)
            return None if start < 0 else list(islice(self._ring, start, start + CHUNK))

    async def more(self) -> None:
        """Waits until there may be more than was there when `since` was last asked."""
        waiting = self._loop.create_future()
        self._waiting[waiting] = None
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def end_of_record(self) -> int:
        """The first place that is free, of a conversation, whether it was told of or not."""
        assert isinstance(self.scope, Key)
        return Record(self.store, self.scope, "main", parse).live.state.next

    def past(self, start: int, stop: int) -> Frame:
        """Some of the events of a conversation that were before."""
        assert isinstance(self.scope, Key)
        entries = [link.entry for link in islice(self.store.read(self.scope, start, stop), CHUNK)]
        text = b"".join(self._text(self.scope, entry) for entry in entries)
        return Frame(text, entries[-1].at + 1 if entries else stop)

    # For the thread that follows

    def holds(self, key: Key) -> bool:
        return self.scope in (None, key.owner, key)

    def tell(self, key: Key, event: Happened | None, at: int | None = None) -> None:
        """What a session told: a beginning before what came of it, anything else after that."""
        self._since = self._since if self._behind else time.monotonic()
        self._behind.setdefault(key, at)
        try:
            if event is None:
                self.catch_up()
            elif event.kind != "compaction:start":
                self.look(key, self._behind.pop(key))
        finally:  # what cannot be read now is found by the next look; this would not be
            if event is not None:
                self._add([Frame(live_frame(key, event))], key, None)

    def erased(self, key: Key) -> None:
        """What comes under its name is another one's."""
        self._behind.pop(key, None)
        self._places.pop(key, None)

    @property
    def is_behind(self) -> bool:
        """Something was said that was not told, since nobody could be."""
        return bool(self._behind)

    @property
    def is_awaited(self) -> bool:
        return self.watchers > self._stuck

    @property
    def is_stale(self) -> bool:
        """Nobody could be told anything for a while."""
        return bool(self._behind) and not self.is_awaited and time.monotonic() - self._since > STALE_S

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While somebody is sent something."""
        self._stuck += 1
        try:
            yield
        finally:
            self._stuck -= 1
            if self._behind:
                self._ask()

    def catch_up(self) -> None:
        while self._behind and self.is_awaited:
            key = next(iter(self._behind))
            self.look(key, self._behind.pop(key))

    def look(self, key: Key | None = None, at: int | None = None) -> None:
        """Tells what was appended since, whoever did it: to one conversation, or to any.

        `at` is a place where something was said: 0 in one that began here.
        """
        if isinstance(self.scope, Key):
            if not self._follow(self.scope):
                self.end()
        elif key is None or (key not in self._places and at != 0) or not self._follow(key):
            self._list(self.scope)

    def end(self, farewell: bytes = b"") -> None:
        self.is_over, self.farewell = True, self.farewell or farewell
        self._wake()

    def _follow(self, key: Key) -> bool:
        """Whether it is still the same one; if not, it was erased, be it begun anew."""
        place = self._places.get(key, Place())
        links = self.store.read(key, place.before)
        before = next(links, None) if place.next else None
        if place.next and (before is None or place.digest not in (None, before.digest)):
            self._places = {one: place for one, place in self._places.items() if one != key}
            return False
        self._take(key, links)
        return True

    def _list(self, owner: str | None) -> None:
        rows = {row.key: row for row in self.store.conversations(owner)}
        self._places = {key: place for key, place in self._places.items() if key in rows}
        for key, row in rows.items():
            place = self._places.get(key)
            if place is None or place.next > row.next or place.created not in (None, row.created):
                place = Place(row.fork_at)
            self._places[key] = place._replace(created=row.created)
            if place.next < row.next:
                self._follow(key)

    def _take(self, key: Key, links: Iterator[Link]) -> None:
        while some := list(islice(links, CHUNK)):
            frames = [Frame(self._text(key, link.entry), link.entry.at + 1) for link in some]
            known, last = self._places.get(key, Place()), some[-1]
            place = known._replace(next=last.entry.at + 1, digest=last.digest)
            self._add([frame for frame in frames if frame.text], key, place)

    def _text(self, key: Key, entry: Entry) -> bytes:
        return stream_frames(key, codec.decode(entry, parse), with_id=key == self.scope)

    def _add(self, frames: list[Frame], key: Key, place: Place | None) -> None:
        with self._lock:
            self._ring += frames
            self._end += len(frames)
            if place is not None:
                self._places[key] = place
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, and all who watched with it
            self._loop.call_soon_threadsafe(self._rouse)

    def _rouse(self) -> None:
        if self.is_over:
            self.over.set()
        is_under_way, self._asleep = self._asleep > 0, len(self._waiting)
        if self.is_over or not is_under_way:
            self._rouse_next()

    def _rouse_next(self) -> None:
        """Hundreds that wake up at once would keep everything else waiting; but for the last time."""
        for waiting in list(islice(self._waiting, self._asleep if self.is_over else 1)):
            del self._waiting[waiting]
            if not waiting.done():
                waiting.set_result(None)
        self._asleep = max(0, self._asleep - 1)
        if self._asleep:
            self._loop.call_later(ROUSE_S, self._rouse_next)


class _Told(NamedTuple):
    """What is to be handed on, and to whom: those who come later know it already, or need not know."""

    feeds: list[Feed]
    key: Key
    event: Happened | None = None
    at: int | None = None
    is_erased: bool = False


class Hub:
    """Hands on what happens to all who watch, by one thread for all of them."""

    def __init__(self) -> None:
        self._feeds: dict[Scope, Feed] = {}
        self._told = deque[_Told](maxlen=MOST_TOLD)
        self._lock = Condition()
        self._thread: Thread | None = None
        self._is_closed = self._is_asked = False

    def tell(self, owner: str, event: Happened) -> None:
        """Something that a session of this process did. From any thread; waits for nothing."""
        key, at = Key(owner, event.conversation), event.at if event.kind == "message-added" else None
        self._note(key, None if is_in_stream(event) else event, at)

    def look(self, key: Key) -> None:
        """Something was appended: it is told at once, and not when it is found."""
        self._note(key)

    def erased(self, key: Key) -> None:
        """Who watches it is sent away, whether it takes what it is sent or not."""
        with self._lock:
            if (feed := self._feeds.get(key)) is not None:
                feed.end()
        self._note(key, is_erased=True)

    def _note(
        self, key: Key, event: Happened | None = None, at: int | None = None, *, is_erased: bool = False
    ) -> None:
        with self._lock:
            if feeds := [feed for feed in self._feeds.values() if feed.holds(key) and not feed.is_over]:
                new = _Told(feeds, key, event, at, is_erased)
                if event is not None or not self._told or self._told[-1]._replace(at=at) != new:
                    self._told.append(new)
                self._lock.notify_all()

    def join(self, store: Store, scope: Scope, loop: AbstractEventLoop) -> Feed:
        """One more who watches; ends with `leave`. For a thread, since the store is read.

        Raises:
            NotFoundError: there is no such conversation.
        """
        if isinstance(scope, Key) and next(store.read(scope, 0, 1), None) is None:
            raise NotFoundError(f"There is no conversation {scope.conversation!r}")
        with self._lock:
            known = self._feeds.get(scope)
            if known is not None and known.is_stale:  # they come back by the id of what they took last
                known.end(LAGGING)
        made = Feed(store, scope, loop, self._ask) if known is None or known.is_over else known
        with self._lock:
            feed = self._feeds.get(scope)
            if feed is None or feed.is_over:
                feed = self._feeds[scope] = made
            feed.watchers += 1
            if self._is_closed:
                feed.end()
            elif self._thread is None:
                self._thread = Thread(target=self._follow, name="refold-events", daemon=True)
                self._thread.start()
            return feed

    def leave(self, feed: Feed) -> None:
        with self._lock:
            feed.watchers -= 1
            if not feed.watchers and self._feeds.get(feed.scope) is feed:
                del self._feeds[feed.scope]

    def _ask(self) -> None:
        with self._lock:
            self._is_asked = True
            self._lock.notify_all()

    @property
    def watchers(self) -> int:
        with self._lock:
            return sum(feed.watchers for feed in self._feeds.values())

    def close(self) -> None:
        """All who watch are sent away, at once. From any thread."""
        with self._lock:
            self._is_closed = True
            for feed in self._feeds.values():
                feed.end()
            self._lock.notify_all()

    def _is_due(self) -> bool:
        return bool(self._told) or self._is_asked or self._is_closed

    def _follow(self) -> None:
        due = time.monotonic() + LOOK_S
        while True:
            with self._lock:
                self._lock.wait_for(self._is_due, max(0.0, due - time.monotonic()))
                if self._is_closed or not self._feeds:
                    self._told.clear()
                    self._thread = None
                    return
                told, feeds = list(self._told), list(self._feeds.values())
                self._told.clear()
                self._is_asked = False
            for feed in feeds:
                _safely(feed, feed.catch_up)
            for one in told:
                for feed in one.feeds:
                    do = partial(feed.tell, one.key, one.event, one.at)
                    _safely(feed, partial(feed.erased, one.key) if one.is_erased else do)
            begun = time.monotonic()
            if begun >= due:
                for feed in feeds:
                    if feed.is_awaited:
                        _safely(feed, feed.look)
                due = time.monotonic() + max(LOOK_S, SHARE * (time.monotonic() - begun))


def _safely(feed: Feed, do: Callable[[], None]) -> None:
    """Whatever goes wrong with one is no reason not to tell the others; the next look may go well."""
    if feed.is_over:
        return
    try:
        do()
    except RefoldError as error:
        logging.getLogger("refold.serve").warning("events cannot be read: %s", type(error).__name__)
    except Exception:
        logging.getLogger("refold.serve").exception("events cannot be told")
