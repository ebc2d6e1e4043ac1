"""Live events: what any process appends to the store, and what the sessions of this process report.

Subscribers of the same conversation, owner or store share a `Topic`, a ring buffer of events that are read
and written as text once. One thread of the `EventBroker` fills all topics.
"""

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
from refold.session.inspect import Inspector, parse
from refold.session.notify import SessionEvent
from refold.stores.store import Key, Store

BUFFERED_FRAMES = 1_000
"""A subscriber that falls behind by more is cut off."""
BATCH = 50
"""Frames, or events, that are read at once."""
POLL_S = 0.25
"""How often the store is asked for what other processes appended."""
STALE_S = 1.0
"""A topic whose subscribers read nothing for so long is closed when another subscriber comes."""
POLL_PAUSE = 20
"""A pause between polls is at least this many times as long as a poll."""
WAKE_S = 0.005
"""Between waking one waiting subscriber and the next."""
MAX_NOTIFICATIONS = 10_000
"""Waiting to be handled; beyond that the oldest are dropped."""
_LOG = logging.getLogger("refold.serve")

TopicScope: TypeAlias = Key | str | None
"""One conversation, all conversations of an owner, or everyone's."""


class SSEFrame(NamedTuple):
    """An event as text."""

    data: bytes
    next: int | None = None
    """The place after the event; None for an event that is not stored."""


class ReadPosition(NamedTuple):
    """How far a conversation was read, and which: its id may be used again after it was erased."""

    next: int = 0
    digest: bytes | None = None
    """Of the last event that was read, if known."""
    created: float | None = None
    """From the store's list of conversations, if that was read."""


class Topic:
    """Buffers the events of a scope for its subscribers."""

    def __init__(
        self,
        store: Store,
        scope: TopicScope,
        loop: AbstractEventLoop,
        on_reader: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_reader` is called when a subscriber reads again after events were skipped."""
        self.store = store
        self.scope = scope
        self.subscribers = 0
        self.is_closed = False
        """The conversation was erased, or the service ends."""
        self.closed = Event()
        self.farewell = b""
        """What subscribers are sent last."""
        self._on_reader = on_reader
        self._loop = loop
        self._lock = Lock()
        self._waiting: dict[Future[None], None] = {}
        self._to_wake = 0
        self._frames = deque[SSEFrame](maxlen=BUFFERED_FRAMES)
        self._frame_count = 0
        """Including those that are no longer in the buffer."""
        self._positions: dict[Key, ReadPosition] = {}
        self._skipped: dict[Key, int | None] = {}
        """Conversations that went on while no subscriber could read: reading is put off until one can."""
        self._skipped_since = 0.0
        self._blocked = 0
        """Subscribers that have not read yet what they were sent."""
        if isinstance(scope, Key):
            end = self.end_of_record()
            last = next(store.read(scope, max(0, end - 1)), None)
            self._positions[scope] = ReadPosition(end, last.digest if last else None)
        else:
            for row in store.conversations(scope):
                self._positions[row.key] = ReadPosition(row.next, created=row.created)

    # For subscribers

    @property
    def position(self) -> tuple[int, int]:
        """How many frames there were, and, of a conversation, the first place that was not read."""
        with self._lock:
            read = self._positions.get(self.scope) if isinstance(self.scope, Key) else None
            return self._frame_count, read.next if read else 0

    def frames_after(self, seen: int) -> list[SSEFrame] | None:
        """The next few frames after the first `seen`; None if they are no longer buffered."""
        with self._lock:
            start = len(self._frames) - (self._frame_count - seen)
            return None if start < 0 else list(islice(self._frames, start, start + BATCH))

    async def wait_for_frames(self) -> None:
        """Waits until there may be more frames than `frames_after` returned last."""
        waiting = self._loop.create_future()
        self._waiting[waiting] = None
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def end_of_record(self) -> int:
        """The first free place of the conversation, read or not."""
        assert isinstance(self.scope, Key)
        return Inspector.open(self.store, self.scope).state.next

    def replay(self, start: int, stop: int) -> SSEFrame:
        """Some earlier events of the conversation, in one frame."""
        assert isinstance(self.scope, Key)
        entries = [link.entry for link in islice(self.store.read(self.scope, start, stop), BATCH)]
        data = b"".join(self._data(self.scope, entry) for entry in entries)
        return SSEFrame(data, entries[-1].at + 1 if entries else stop)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Marks a subscriber as blocked while it is sent something."""
        self._blocked += 1
        try:
            yield
        finally:
            self._blocked -= 1
            if self._skipped:
                self._on_reader()

    # For the broker's thread

    def covers(self, key: Key) -> bool:
        return self.scope in (None, key.owner, key)

    @property
    def is_behind(self) -> bool:
        """Events were skipped because no subscriber could read them."""
        return bool(self._skipped)

    @property
    def has_reader(self) -> bool:
        return self.subscribers > self._blocked

    @property
    def is_stale(self) -> bool:
        """No subscriber has read anything for a while."""
        waited_s = time.monotonic() - self._skipped_since
        return self.is_behind and not self.has_reader and waited_s > STALE_S

    def publish(self, key: Key, event: SessionEvent | None, at: int | None = None) -> None:
        """Takes what a session reported: the start of a compaction before what it appends, all else after."""
        if not self._skipped:
            self._skipped_since = time.monotonic()
        self._skipped.setdefault(key, at)
        try:
            if event is None:
                self.catch_up()
            elif event.kind != "compaction:start":
                self.poll(key, self._skipped.pop(key))
        finally:  # the next poll finds what cannot be read now, but not this event
            if event is not None:
                self._add([SSEFrame(live_frame(key, event))], key, None)

    def forget(self, key: Key) -> None:
        """A conversation was erased: another one may get its id."""
        self._skipped.pop(key, None)
        self._positions.pop(key, None)

    def catch_up(self) -> None:
        while self._skipped and self.has_reader:
            key = next(iter(self._skipped))
            self.poll(key, self._skipped.pop(key))

    def poll(self, key: Key | None = None, at: int | None = None) -> None:
        """Reads what anyone appended since: to one conversation, or to any.

        `at` is the place of an appended message: with 0, the conversation began in this process.
        """
        if isinstance(self.scope, Key):
            if not self._read(self.scope):
                self.close()
            return
        is_listed = key is not None and (key in self._positions or at == 0)
        if key is None or not is_listed or not self._read(key):
            self._read_all(self.scope)

    def close(self, farewell: bytes = b"") -> None:
        self.is_closed = True
        self.farewell = self.farewell or farewell
        self._wake()

    def _read(self, key: Key) -> bool:
        """Reads the new events of a conversation; False if it was erased, even if its id is used again."""
        position = self._positions.get(key, ReadPosition())
        links = self.store.read(key, max(0, position.next - 1))
        if position.next:
            last = next(links, None)
            if last is None or position.digest not in (None, last.digest):
                self._positions = {one: read for one, read in self._positions.items() if one != key}
                return False
        self._buffer(key, links)
        return True

    def _read_all(self, owner: str | None) -> None:
        rows = {row.key: row for row in self.store.conversations(owner)}
        self._positions = {key: read for key, read in self._positions.items() if key in rows}
        for key, row in rows.items():
            position = self._positions.get(key)
            if position is None or position.next > row.next or position.created not in (None, row.created):
                position = ReadPosition(row.fork_at)
            self._positions[key] = position._replace(created=row.created)
            if position.next < row.next:
                self._read(key)

    def _buffer(self, key: Key, links: Iterator[Link]) -> None:
        while batch := list(islice(links, BATCH)):
            frames = [SSEFrame(self._data(key, link.entry), link.entry.at + 1) for link in batch]
            before = self._positions.get(key, ReadPosition())
            position = before._replace(next=batch[-1].entry.at + 1, digest=batch[-1].digest)
            self._add([frame for frame in frames if frame.data], key, position)

    def _data(self, key: Key, entry: Entry) -> bytes:
        return stream_frames(key, codec.decode(entry, parse), with_id=key == self.scope)

    def _add(self, frames: list[SSEFrame], key: Key, position: ReadPosition | None) -> None:
        with self._lock:
            self._frames += frames
            self._frame_count += len(frames)
            if position is not None:
                self._positions[key] = position
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop has ended, with all subscribers
            self._loop.call_soon_threadsafe(self._start_waking)

    def _start_waking(self) -> None:
        if self.is_closed:
            self.closed.set()
        is_waking = self._to_wake > 0
        self._to_wake = len(self._waiting)
        if self.is_closed or not is_waking:
            self._wake_next()

    def _wake_next(self) -> None:
        """One at a time, since hundreds at once would block everything else; all when the topic closes."""
        count = self._to_wake if self.is_closed else 1
        for waiting in list(islice(self._waiting, count)):
            del self._waiting[waiting]
            if not waiting.done():
                waiting.set_result(None)
        self._to_wake = max(0, self._to_wake - 1)
        if self._to_wake:
            self._loop.call_later(WAKE_S, self._wake_next)


class _Notification(NamedTuple):
    """Something to publish in the topics that existed at that time: later ones do not need it."""

    topics: list[Topic]
    key: Key
    event: SessionEvent | None = None
    at: int | None = None
    is_erased: bool = False


class EventBroker:
    """Keeps topics up to date with one thread for all of them."""

    def __init__(self) -> None:
        self._topics: dict[TopicScope, Topic] = {}
        self._notifications = deque[_Notification](maxlen=MAX_NOTIFICATIONS)
        self._lock = Condition()
        self._thread: Thread | None = None
        self._is_closed = False
        self._has_reader = False

    def publish(self, owner: str, event: SessionEvent) -> None:
        """Takes what a session of this process reports. From any thread; never blocks."""
        key = Key(owner, event.conversation)
        at = event.at if event.kind == "message-added" else None
        self._notify(key, None if is_in_stream(event) else event, at)

    def appended(self, key: Key) -> None:
        """Makes subscribers see at once what was appended, not at the next poll."""
        self._notify(key)

    def erased(self, key: Key) -> None:
        """Ends the subscriptions of a conversation, even of subscribers that do not read."""
        with self._lock:
            if (topic := self._topics.get(key)) is not None:
                topic.close()
        self._notify(key, is_erased=True)

    def _notify(
        self, key: Key, event: SessionEvent | None = None, at: int | None = None, *, is_erased: bool = False
    ) -> None:
        with self._lock:
            topics = [one for one in self._topics.values() if one.covers(key) and not one.is_closed]
            if not topics:
                return
            new = _Notification(topics, key, event, at, is_erased)
            last = self._notifications[-1] if self._notifications else None
            if event is not None or last is None or last._replace(at=at) != new:
                self._notifications.append(new)
            self._lock.notify_all()

    def subscribe(self, store: Store, scope: TopicScope, loop: AbstractEventLoop) -> Topic:
        """Adds a subscriber, until `unsubscribe`. For a thread, since the store is read.

        Raises:
            NotFoundError: there is no such conversation.
        """
        if isinstance(scope, Key) and next(store.read(scope, 0, 1), None) is None:
            raise NotFoundError(f"There is no conversation {scope.conversation!r}")
        with self._lock:
            known = self._topics.get(scope)
            if known is not None and known.is_stale:  # its subscribers come back with the last event's id
                known.close(LAGGING)
        if known is None or known.is_closed:
            known = Topic(store, scope, loop, self._reader_is_back)
        with self._lock:
            topic = self._topics.get(scope)
            if topic is None or topic.is_closed:
                topic = known
                self._topics[scope] = known
            topic.subscribers += 1
            if self._is_closed:
                topic.close()
            elif self._thread is None:
                self._thread = Thread(target=self._run, name="refold-events", daemon=True)
                self._thread.start()
            return topic

    def unsubscribe(self, topic: Topic) -> None:
        with self._lock:
            topic.subscribers -= 1
            if not topic.subscribers and self._topics.get(topic.scope) is topic:
                del self._topics[topic.scope]

    def _reader_is_back(self) -> None:
        with self._lock:
            self._has_reader = True
            self._lock.notify_all()

    @property
    def subscribers(self) -> int:
        with self._lock:
            return sum(topic.subscribers for topic in self._topics.values())

    def close(self) -> None:
        """Ends all subscriptions. From any thread."""
        with self._lock:
            self._is_closed = True
            for topic in self._topics.values():
                topic.close()
            self._lock.notify_all()

    def _has_work(self) -> bool:
        return bool(self._notifications) or self._has_reader or self._is_closed

    def _run(self) -> None:
        next_poll = time.monotonic() + POLL_S
        while True:
            with self._lock:
                self._lock.wait_for(self._has_work, max(0.0, next_poll - time.monotonic()))
                notifications = list(self._notifications)
                self._notifications.clear()
                if self._is_closed or not self._topics:
                    self._thread = None
                    return
                topics = list(self._topics.values())
                self._has_reader = False
            for topic in topics:
                _try(topic, topic.catch_up)
            for one in notifications:
                for topic in one.topics:
                    if one.is_erased:
                        _try(topic, partial(topic.forget, one.key))
                    else:
                        _try(topic, partial(topic.publish, one.key, one.event, one.at))
            started = time.monotonic()
            if started >= next_poll:
                for topic in topics:
                    if topic.has_reader:
                        _try(topic, topic.poll)
                ended = time.monotonic()
                next_poll = ended + max(POLL_S, POLL_PAUSE * (ended - started))


def _try(topic: Topic, do: Callable[[], None]) -> None:
    """A failure in one topic does not concern the others; the next poll may succeed."""
    if topic.is_closed:
        return
    try:
        do()
    except RefoldError as error:
        _LOG.warning("could not read events: %s", type(error).__name__)
    except Exception:
        _LOG.exception("could not publish events")
