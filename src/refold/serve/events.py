"""Live events as server-sent events: what any process appends to the store, and what sessions here report.

Subscribers of the same conversation, owner or store share a `Topic`, a ring buffer of events that are read
and written as text once. One thread of the `EventBroker` fills all topics.

Events are named as in `refold.session.notify`. Besides those there are:

restored   an original is shown in its place again
corrected  another message is shown in the place of one
recalled   memories of the store are shown beside a message
undone     an edit, a pin or an undo no longer holds
pinned     messages stay in every view from now on
named      the conversation got a title or a model
lagging    the subscriber reads too slowly and is cut off; it can resume with the id of its last event
"""

import asyncio
import logging
import random
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec.structs import asdict
from starlette.types import Receive, Scope, Send

from refold.core import codec
from refold.core.codec import Link
from refold.core.errors import NotFoundError, RefoldError
from refold.core.event import Called, Event, Named, Pinned, Replaced, Said, Undone
from refold.core.message import Message
from refold.serve.http_protocol import abort, cancel, until_disconnect
from refold.serve.logs import redacted
from refold.session.inspect import Inspector, parse
from refold.session.notify import NOT_SHORTENING, CompactionEvent, MessageEvent, SessionEvent, session_events
from refold.stores.store import Key, Store

if TYPE_CHECKING:
    from refold.serve.service import Service

BUFFERED_FRAMES = 1_000
"""A subscriber that falls behind by more is cut off."""
BATCH = 50
"""Frames, or events, that are read at once."""
POLL_S = 0.25
"""How often the store is asked for what other processes appended."""
POLL_PAUSE = 20
"""A pause between polls is at least this many times as long as a poll."""
MAX_NOTICES = 10_000
"""Waiting to be handled; beyond that the oldest are dropped."""
HEARTBEAT_S = 15.0
DELAY_PER_SUBSCRIBER_S = 0.005
MAX_DELAY_S = 2.5
"""The more subscribers there are, the longer each waits before it is sent what is new, up to this."""
FAREWELL_S = 0.5
"""For a client to read the end of its stream."""
MAX_CHARS = 200
REDACTED_CHARS = 300
"""Longer than what is shown, so that a secret is recognized before it is cut."""
KINDS = dict(zip(NOT_SHORTENING, ("restored", "corrected", "recalled"), strict=True))
"""Event names of edits that shorten nothing."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
BEGIN = b"retry: 1000\n: watching\n\n"
HEARTBEAT = b": still here\n\n"
LAGGING = b'event: lagging\ndata: {"advice":"reconnect with the id of the last event"}\n\n'
_LOG = logging.getLogger("refold.serve")

TopicScope: TypeAlias = Key | str | None
"""One conversation, all conversations of an owner, or everyone's."""
Notice: TypeAlias = tuple[Key, SessionEvent | None]
"""What happened in this process; without an event, it can be read from the store."""


# Events as text


def stored_frames(key: Key, event: Event, *, with_id: bool) -> bytes:
    """A stored event as text, empty if subscribers need not know of it. Its id counts the events so far."""
    frames: list[bytes] = []
    extra: dict[str, Any] = {}
    match event:
        case Said(line=line, index=index, time=time):
            extra = {"index": index, "tokens": line.tokens, "time": time}
        case Replaced(kind=kind, time=time, tokens=tokens):
            extra = {"edit": event.at, "edit_kind": kind, "view": event.view, "tokens": tokens, "time": time}
            if kind in KINDS:
                own = {"at": event.span.start, "span": event.span, "reason": event.why}
                frames.append(_frame(key, KINDS[kind], own | extra))
        case Undone(at=at, of=of, why=why, time=time):
            frames.append(_frame(key, "undone", {"at": at, "of": of, "reason": why, "time": time}))
        case Pinned(at=at, lines=lines, why=why, time=time):
            places = [line.at for line in lines]
            frames.append(_frame(key, "pinned", {"at": at, "places": places, "reason": why, "time": time}))
        case Named(at=at, title=title, model=model, time=time):
            frames.append(_frame(key, "named", {"at": at, "title": title, "model": model, "time": time}))
        case Called(time=time):
            extra = {"time": time}
    for one in session_events(event, "", 0, 0):
        frames.append(_frame(key, one.kind, _facts(one) | extra))
    if frames and with_id:
        frames[-1] = b"id: %d\n" % (event.at + 1) + frames[-1]
    return b"".join(frames)


def live_frame(key: Key, event: SessionEvent) -> bytes:
    """An event that is not stored, as text."""
    return _frame(key, event.kind, _facts(event))


def is_stored(event: SessionEvent) -> bool:
    """True if the event is in the log, too, and read from there for the subscribers of all processes."""
    if isinstance(event, MessageEvent):
        return event.kind != "message-expanded"
    return event.kind == "compaction:failed" and not event.limit


def _facts(event: SessionEvent) -> dict[str, Any]:
    facts = asdict(event)
    del facts["kind"], facts["conversation"]
    if isinstance(event, CompactionEvent):
        return facts
    message = facts.pop("message")
    known = {name: value for name, value in facts.items() if value or name == "at"}
    if isinstance(message, Message):
        known["text"] = message.text
    return known


def _frame(key: Key, kind: str, facts: dict[str, Any]) -> bytes:
    for name, value in facts.items():
        if isinstance(value, str):
            text = redacted(value[:REDACTED_CHARS])
            facts[name] = text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
    data = {"conversation": key.conversation, "owner": key.owner, **facts}
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), codec.dumps(data))


# Topics


class SSEFrame(NamedTuple):
    """Events as text."""

    data: bytes
    next: int | None = None
    """The place after the last of them; None for an event that is not stored."""


class ReadPosition(NamedTuple):
    """How far a conversation was read, and which: its id may be used again after it was erased."""

    next: int
    digest: bytes | None = None
    """Of the last event that was read; None if it is only known from the store's list."""
    created: float | None = None
    """From the store's list of conversations, if that was read."""


class Topic:
    """The newest events of a scope, for its subscribers."""

    def __init__(self, store: Store, scope: TopicScope, loop: AbstractEventLoop) -> None:
        self.store = store
        self.scope = scope
        self.subscribers = 0
        self.is_closed = False
        """The conversation was erased, or the service ends."""
        self.closed = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when there are more frames; another one takes its place then."""
        self.notices = deque[Notice](maxlen=MAX_NOTICES)
        """For the broker's thread."""
        self._loop = loop
        self._lock = Lock()
        self._frames = deque[SSEFrame](maxlen=BUFFERED_FRAMES)
        self._frame_count = 0
        """Including those that are no longer in the buffer."""
        self._positions: dict[Key, ReadPosition] = {}
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

    def end_of_record(self) -> int:
        """The first free place of the conversation, read or not."""
        assert isinstance(self.scope, Key)
        return Inspector.open(self.store, self.scope).state.next

    def replay(self, start: int, stop: int) -> SSEFrame:
        """Some earlier events of the conversation."""
        assert isinstance(self.scope, Key)
        links = islice(self.store.read(self.scope, start, stop), BATCH)
        frames = [self._stored(self.scope, link) for link in links]
        return SSEFrame(b"".join(frame.data for frame in frames), frames[-1].next if frames else stop)

    # For the broker

    def covers(self, key: Key) -> bool:
        return self.scope in (None, key.owner, key)

    def handle(self, notices: Iterable[Notice]) -> None:
        """Reads what this process appended, and adds what its sessions only reported.

        A conversation that this topic has not read yet is left to the next poll.
        """
        for key, event in notices:
            position = self._positions.get(key)
            is_start = event is not None and event.kind == "compaction:start"  # before what it appends
            if position is not None and position.digest is not None and not is_start:
                with _logging_errors():
                    self._read(key, position)
            if event is not None:
                self._add([SSEFrame(live_frame(key, event))], key, None)

    def poll(self) -> None:
        """Reads what any process appended since."""
        if isinstance(self.scope, Key):
            self._read(self.scope, self._positions[self.scope])
            return
        rows = {row.key: row for row in self.store.conversations(self.scope)}
        self._positions = {key: read for key, read in self._positions.items() if key in rows}
        for key, row in rows.items():
            position = self._positions.get(key)
            if position is None or position.next > row.next or position.created not in (None, row.created):
                position = ReadPosition(row.fork_at)
            position = position._replace(created=row.created)
            self._positions[key] = position
            if position.next < row.next:
                self._read(key, position)

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _read(self, key: Key, position: ReadPosition) -> None:
        """Reads the new events of a conversation, unless it was erased, even if its id is used again."""
        links = self.store.read(key, max(0, position.next - 1))
        if position.next:
            last = next(links, None)
            if last is None or position.digest not in (None, last.digest):
                if key == self.scope:
                    self.close()
                else:
                    del self._positions[key]
                return
        while batch := list(islice(links, BATCH)):
            position = position._replace(next=batch[-1].entry.at + 1, digest=batch[-1].digest)
            frames = [self._stored(key, link) for link in batch]
            self._add([frame for frame in frames if frame.data], key, position)

    def _stored(self, key: Key, link: Link) -> SSEFrame:
        event = codec.decode(link.entry, parse)
        return SSEFrame(stored_frames(key, event, with_id=key == self.scope), link.entry.at + 1)

    def _add(self, frames: list[SSEFrame], key: Key, position: ReadPosition | None) -> None:
        with self._lock:
            self._frames += frames
            self._frame_count += len(frames)
            if position is not None:
                self._positions[key] = position
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop has ended, with all subscribers
            self._loop.call_soon_threadsafe(self._set_changed)

    def _set_changed(self) -> None:
        if self.is_closed:
            self.closed.set()
        self.changed.set()
        self.changed = asyncio.Event()


class EventBroker:
    """Keeps topics up to date with one thread for all of them."""

    def __init__(self) -> None:
        self._topics: dict[TopicScope, Topic] = {}
        self._lock = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def publish(self, key: Key, event: SessionEvent | None = None) -> None:
        """Makes subscribers see at once what was appended, not at the next poll.

        `event` is what a session of this process reports. From any thread; never blocks.
        """
        notice = (key, None if event is None or is_stored(event) else event)
        with self._lock:
            for topic in self._topics.values():
                is_repeated = notice[1] is None and topic.notices and topic.notices[-1] == notice
                if topic.covers(key) and not is_repeated:
                    topic.notices.append(notice)
            self._lock.notify_all()

    def erased(self, key: Key) -> None:
        """Ends the subscriptions of a conversation."""
        with self._lock:
            if (topic := self._topics.get(key)) is not None:
                topic.close()

    def subscribe(self, store: Store, scope: TopicScope, loop: AbstractEventLoop) -> Topic:
        """Adds a subscriber, until `unsubscribe`. For a thread, since the store is read.

        Raises:
            NotFoundError: there is no such conversation.
        """
        if isinstance(scope, Key) and next(store.read(scope, 0, 1), None) is None:
            raise NotFoundError(f"There is no conversation {scope.conversation!r}")
        topic = self._topics.get(scope)
        if topic is None or topic.is_closed:
            topic = Topic(store, scope, loop)
        with self._lock:
            current = self._topics.get(scope)
            if current is not None and not current.is_closed:
                topic = current
            self._topics[scope] = topic
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

    def _run(self) -> None:
        next_poll = time.monotonic() + POLL_S
        while True:
            with self._lock:
                self._lock.wait_for(
                    lambda: self._is_closed or any(topic.notices for topic in self._topics.values()),
                    max(0.0, next_poll - time.monotonic()),
                )
                if self._is_closed or not self._topics:
                    self._thread = None
                    return
                notices = {topic: list(topic.notices) for topic in self._topics.values()}
                for topic in notices:
                    topic.notices.clear()
            for topic, new in notices.items():
                topic.handle(new)
            started = time.monotonic()
            if started >= next_poll:
                for topic in notices:
                    with _logging_errors():
                        topic.poll()
                ended = time.monotonic()
                next_poll = ended + max(POLL_S, POLL_PAUSE * (ended - started))


@contextmanager
def _logging_errors() -> Iterator[None]:
    """A failure in one topic does not concern the others; the next poll may succeed."""
    try:
        yield
    except RefoldError as error:
        _LOG.warning("could not read events: %s", type(error).__name__)
    except Exception:
        _LOG.exception("could not publish events")


# Streams


class EventStream:
    """The response to one subscriber, as an ASGI application: resumable by id, with heartbeats."""

    def __init__(self, service: "Service", scope: TopicScope, after: int | None) -> None:
        """`after` is how many events the subscriber has seen; None starts with new ones."""
        self._service = service
        self._scope = scope
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        broker = self._service.events
        loop = asyncio.get_running_loop()
        topic = await self._service.work(broker.subscribe, self._service.store, self._scope, loop)
        closing = asyncio.create_task(_abort_if_stalled(topic, scope))
        try:
            await until_disconnect(self._send_all(topic, send), receive)
        finally:
            broker.unsubscribe(topic)
            await cancel(closing)

    async def _send_all(self, topic: Topic, send: Send) -> None:
        async def send_body(data: bytes) -> None:
            """Waits while the client does not read, for at most `write_timeout_s`."""
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        seen, next = topic.position  # before anything is sent, so that nothing is missed
        start = 0
        if isinstance(self._scope, Key):
            end = await self._service.work(topic.end_of_record)
            start = end if self._after is None else min(self._after, end)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send_body(BEGIN)
        while start < next and not topic.is_closed:
            frame = await self._service.work(topic.replay, start, next)
            start = frame.next or next
            await send_body(frame.data)

        while not topic.is_closed:
            changed = topic.changed
            frames = topic.frames_after(seen)
            if frames is None:
                await send_body(LAGGING)
                break
            seen += len(frames)
            new = [frame.data for frame in frames if frame.next is None or frame.next > start]
            await send_body(b"".join(new))
            if frames:
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await changed.wait()
            except TimeoutError:
                await send_body(HEARTBEAT)
                continue
            delay_s = min(DELAY_PER_SUBSCRIBER_S * self._service.events.subscribers, MAX_DELAY_S)
            await asyncio.sleep(random.uniform(0, delay_s))  # not all at once
        await send({"type": "http.response.body", "body": b""})


async def _abort_if_stalled(topic: Topic, scope: Scope) -> None:
    """Cuts off a subscriber that does not read the end of its stream when the topic closes."""
    await topic.closed.wait()
    await asyncio.sleep(FAREWELL_S)
    abort(scope)
