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
from refold.notify import Happened
from refold.record import Record
from refold.serve.frames import is_in_stream, live_frame, stream_frames
from refold.session import parse
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


class Feed:
    """What is told of a scope: once for all who watch it, each of whom has only a place in it."""

    def __init__(
        self, store: Store, scope: Scope, loop: AbstractEventLoop, ask: Callable[[], None] = lambda: None
    ) -> None:
        """`ask` is called when somebody can be told again what was left out while nobody could."""
        self.store, self.scope, self.watchers, self._ask = store, scope, 0, ask
        self.is_over = False
        """The conversation was erased, or the service ends."""
        self.over = Event()
        self._loop, self._lock, self._waiting = loop, Lock(), dict[Future[None], None]()
        self._asleep = 0
        """How many of those who wait are still to be woken up."""
        self._ring, self._end = deque[Frame](maxlen=RING), 0
        self._next: dict[Key, int] = {}
        self._behind: dict[Key, int | None] = {}
        """What was told of while nobody could be told: whoever reads nothing costs nothing."""
        self._stuck, self._since = 0, 0.0
        """How many have not taken yet what they were sent; since when something was left out for them."""
        self._digest = b""
        if isinstance(scope, Key):
            record = Record(store, scope, "main", parse)
            self._next[scope], self._digest = record.live.state.next, bytes.fromhex(record.tip)
        else:
            self._next = {row.key: row.next for row in store.conversations(scope)}

    # For those who watch

    @property
    def here(self) -> tuple[int, int]:
        """How many frames there were, and the first place that was not told, of a conversation."""
        with self._lock:
            return self._end, self._next.get(self.scope, 0) if isinstance(self.scope, Key) else 0

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
        if event is None:
            self.catch_up()
        elif event.kind != "compaction:start":
            self.look(key, self._behind.pop(key))
        if event is not None:
            self._add([Frame(live_frame(key, event))], key, None)

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
            self._follow(self.scope)
        elif key is not None and (key in self._next or at == 0):
            self._take(key, self.store.read(key, self._next.get(key, 0)))
        else:
            self._list(self.scope)

    def end(self) -> None:
        self.is_over = True
        self._wake()

    def _follow(self, key: Key) -> None:
        links = self.store.read(key, self._next[key] - 1)
        before = next(links, None)
        if before is None or before.digest != self._digest:
            self.end()  # erased, be it begun anew
        else:
            self._take(key, links)

    def _list(self, owner: str | None) -> None:
        rows = {row.key: row for row in self.store.conversations(owner)}
        self._next = {key: next for key, next in self._next.items() if key in rows}
        for key, row in rows.items():
            known = self._next.get(key, row.fork_at)
            self._next[key] = known if known <= row.next else row.fork_at  # or else it was begun anew
            if self._next[key] < row.next:
                self._take(key, self.store.read(key, self._next[key], row.next))

    def _take(self, key: Key, links: Iterator[Link]) -> None:
        while some := list(islice(links, CHUNK)):
            frames = [Frame(self._text(key, link.entry), link.entry.at + 1) for link in some]
            self._digest = some[-1].digest
            self._add([frame for frame in frames if frame.text], key, frames[-1].next)

    def _text(self, key: Key, entry: Entry) -> bytes:
        return stream_frames(key, codec.decode(entry, parse), with_id=key == self.scope)

    def _add(self, frames: list[Frame], key: Key, next: int | None) -> None:
        with self._lock:
            self._ring += frames
            self._end += len(frames)
            if next is not None:
                self._next[key] = next
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


class Hub:
    """Hands on what happens to all who watch, by one thread for all of them."""

    def __init__(self) -> None:
        self._feeds: dict[Scope, Feed] = {}
        self._told = deque[tuple[Key, Happened | None, int | None]](maxlen=MOST_TOLD)
        self._lock = Condition()
        self._thread: Thread | None = None
        self._is_closed = self._is_asked = False

    def tell(self, owner: str, event: Happened) -> None:
        """Something that a session of this process did. From any thread; waits for nothing."""
        key, at = Key(owner, event.conversation), event.at if event.kind == "message-added" else None
        self._note(key, None if is_in_stream(event) else event, at)

    def look(self, key: Key) -> None:
        """Something was appended: it is told at once, and not when it is found."""
        self._note(key, None)

    def erased(self, key: Key) -> None:
        """Who watches it is sent away, whether it takes what it is sent or not."""
        with self._lock:
            if (feed := self._feeds.get(key)) is not None:
                feed.end()
        self.look(key)

    def _note(self, key: Key, event: Happened | None, at: int | None = None) -> None:
        with self._lock:
            if any(feed.holds(key) for feed in self._feeds.values()):
                if event is not None or not self._told or self._told[-1][:2] != (key, None):
                    self._told.append((key, event, at))
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
                known.end()
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
                    self._thread = None
                    return
                told, feeds = list(self._told), list(self._feeds.values())
                self._told.clear()
                self._is_asked = False
            for feed in feeds:
                _safely(feed, feed.catch_up)
            for key, event, at in told:
                for feed in feeds:
                    if feed.holds(key):
                        _safely(feed, partial(feed.tell, key, event, at))
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
