"""Live events as server-sent events: what any process appends to the store, and what sessions here report.

One thread of the `EventBroker` reads new events once, writes them as text, and queues them for the
subscribers of their conversation, of its owner, and of everything. `EventStream` is the response to one.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec.structs import asdict
from starlette.types import Receive, Scope, Send

from refold.core import codec
from refold.core.codec import Link
from refold.core.errors import RefoldError
from refold.core.event import Called, Event, Named, Pinned, Replaced, Said, Undone
from refold.core.message import Message
from refold.serve.conversations import Conversations
from refold.serve.http_protocol import until_disconnect
from refold.serve.logs import redacted
from refold.session.inspect import parse
from refold.session.notify import NOT_SHORTENING, CompactionEvent, MessageEvent, SessionEvent, session_events
from refold.stores.store import Key

if TYPE_CHECKING:
    from refold.serve.service import Service

MAX_QUEUED_EVENTS = 1_000
"""A subscriber that falls behind by more events is cut off."""
BATCH = 50
"""Events that are read or sent at once."""
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

EventScope: TypeAlias = Key | str | None
"""One conversation, all conversations of an owner, or everyone's."""
Notice: TypeAlias = tuple[Key, SessionEvent | None]
"""What happened in this process; without an event, it can be read from the store."""


# Events as text


def stored_frames(key: Key, event: Event) -> list[bytes]:
    """A stored event as text, in several parts if it means several things to subscribers, or none."""
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
    return frames


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


# Subscribers, and what is queued for each


class QueuedEvent(NamedTuple):
    key: Key
    frames: Sequence[bytes]
    next: int | None = None
    """The place after it, which is its id, too; None if it is not stored."""


class ReadPosition(NamedTuple):
    """How far a conversation was read, and which: its id may be used again after it was erased."""

    next: int
    digest: bytes | None = None
    """Of the event before; None if it was not read yet."""


class Subscriber:
    """The events that one client has still to be sent."""

    def __init__(self, scope: EventScope, loop: AbstractEventLoop) -> None:
        self.scope = scope
        self.start = 0
        """Of a conversation: the first place that it is still to be sent."""
        self.next = 0
        """The first place that is queued; events before it are read from the store."""
        self.queue = deque[QueuedEvent]()
        self.is_lagging = False
        self.is_closed = False
        """The conversation was erased, or the service ends."""
        self.changed = asyncio.Event()
        self._loop = loop

    def covers(self, key: Key) -> bool:
        return self.scope in (None, key.owner, key)

    def wake(self) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.changed.set)

    def close(self) -> None:
        self.is_closed = True
        self.wake()

    def text(self, event: QueuedEvent) -> bytes:
        if event.next is None or event.key != self.scope:
            return b"".join(event.frames)
        return b"".join([*event.frames[:-1], b"id: %d\n" % event.next, event.frames[-1]])


class EventBroker:
    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._store = conversations.store
        self._subscribers: list[Subscriber] = []
        self._positions: dict[Key, ReadPosition] = {}
        """Of all conversations in the scope of a subscriber, and perhaps of others."""
        self._notices = deque[Notice](maxlen=MAX_NOTICES)
        self._lock = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def publish(self, key: Key, event: SessionEvent | None = None) -> None:
        """Makes subscribers see at once what was appended, not at the next poll.

        `event` is what a session of this process reports. From any thread; never blocks.
        """
        with self._lock:
            if self._subscribers:
                self._notices.append((key, None if event is None or is_stored(event) else event))
                self._lock.notify_all()

    def subscribe(self, scope: EventScope, loop: AbstractEventLoop, after: int | None = None) -> Subscriber:
        """Adds a subscriber, until `unsubscribe`. For a thread, since the store is read.

        `after` is how many events of a conversation it has seen; None starts with new ones.

        Raises:
            NotFoundError: there is no such conversation.
        """
        subscriber = Subscriber(scope, loop)
        ends: dict[Key, int] = {}
        if isinstance(scope, Key):
            with self._conversations.inspecting(scope) as inspector:
                end = ends[scope] = inspector.state.next
            subscriber.start = end if after is None else min(after, end)
        else:
            ends = {row.key: row.next for row in self._store.conversations(scope)}
        with self._lock:
            scopes = {one.scope for one in self._subscribers}
            for key, end in ends.items():
                if key not in self._positions or scopes.isdisjoint((None, key.owner, key)):
                    self._positions[key] = ReadPosition(end)
            if isinstance(scope, Key):
                subscriber.next = self._positions[scope].next
            subscriber.is_closed = self._is_closed
            self._subscribers.append(subscriber)
            if self._thread is None and not self._is_closed:
                self._thread = Thread(target=self._run, name="refold-events", daemon=True)
                self._thread.start()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        with self._lock:
            self._subscribers.remove(subscriber)
            if not self._subscribers:
                self._positions.clear()
                self._notices.clear()

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def read(self, subscriber: Subscriber) -> list[QueuedEvent]:
        """The next few events of a conversation that were appended before its queue begins."""
        assert isinstance(subscriber.scope, Key)
        links = self._store.read(subscriber.scope, subscriber.start, subscriber.next)
        return _queued(subscriber.scope, islice(links, BATCH))

    def take(self, subscriber: Subscriber) -> list[QueuedEvent]:
        """The next few events of its queue."""
        with self._lock:
            count = min(BATCH, len(subscriber.queue))
            return [subscriber.queue.popleft() for _ in range(count)]

    def close(self) -> None:
        """Ends all subscriptions. From any thread."""
        with self._lock:
            self._is_closed = True
            for subscriber in self._subscribers:
                subscriber.close()
            self._lock.notify_all()

    # The thread

    def _run(self) -> None:
        next_poll = time.monotonic() + POLL_S
        while True:
            with self._lock:
                self._lock.wait_for(
                    lambda: self._is_closed or self._notices, max(0.0, next_poll - time.monotonic())
                )
                if self._is_closed or not self._subscribers:
                    self._thread = None
                    return
                notices = list(self._notices)
                self._notices.clear()
                scopes = {subscriber.scope for subscriber in self._subscribers}
            self._handle(notices)
            started = time.monotonic()
            if started >= next_poll:
                for scope in scopes:
                    with _logging_errors():
                        self._poll(scope)
                ended = time.monotonic()
                next_poll = ended + max(POLL_S, POLL_PAUSE * (ended - started))

    def _handle(self, notices: Sequence[Notice]) -> None:
        """Reads what this process appended, and adds what its sessions only reported.

        A conversation that was not read yet is left to the next poll.
        """
        read: set[Key] = set()
        for key, event in notices:
            if not any(subscriber.covers(key) for subscriber in self._subscribers):
                continue
            is_start = event is not None and event.kind == "compaction:start"  # before what it appends
            if key not in read and not is_start:
                read.add(key)
                with _logging_errors():
                    self._read(key)
            if event is not None:
                self._queue(key, [QueuedEvent(key, [live_frame(key, event)])])

    def _poll(self, scope: EventScope) -> None:
        """Reads what any process appended since."""
        if isinstance(scope, Key):
            self._read(scope)
            return
        for row in self._store.conversations(scope):
            position = self._positions.get(row.key)
            if position is None or position.next > row.next:  # it is new, or another one of that name
                position = self._positions[row.key] = ReadPosition(row.fork_at)
            if position.next < row.next:
                self._read(row.key)

    def _read(self, key: Key) -> None:
        """Reads the new events of a conversation, unless it was erased, even if its id is used again."""
        position = self._positions.get(key)
        if position is None:
            return
        links = self._store.read(key, max(0, position.next - 1))
        if position.next:
            last = next(links, None)
            if last is None or position.digest not in (None, last.digest):
                with self._lock:
                    self._positions.pop(key, None)
                    for subscriber in self._subscribers:
                        if subscriber.scope == key:
                            subscriber.close()
                return
            self._positions[key] = position._replace(digest=last.digest)
        while batch := list(islice(links, BATCH)):
            events = _queued(key, batch)
            with self._lock:  # whoever subscribes now is told either by the queue or by the store
                self._positions[key] = ReadPosition(batch[-1].entry.at + 1, batch[-1].digest)
                self._queue(key, [event for event in events if event.frames])

    def _queue(self, key: Key, events: Sequence[QueuedEvent]) -> None:
        with self._lock:
            for subscriber in self._subscribers:
                if events and subscriber.covers(key):
                    subscriber.queue += events
                    if len(subscriber.queue) > MAX_QUEUED_EVENTS:
                        subscriber.is_lagging = True
                        subscriber.queue.clear()
                    subscriber.wake()


def _queued(key: Key, links: Iterable[Link]) -> list[QueuedEvent]:
    events = [codec.decode(link.entry, parse) for link in links]
    return [QueuedEvent(key, stored_frames(key, event), event.at + 1) for event in events]


@contextmanager
def _logging_errors() -> Iterator[None]:
    """A failure with one conversation does not concern the others; the next poll may succeed."""
    try:
        yield
    except RefoldError as error:
        _LOG.warning("live events: the store could not be read: %s", type(error).__name__)
    except Exception:
        _LOG.exception("live events: an event could not be read")


# Streams


class EventStream:
    """The response to one subscriber, as an ASGI application: resumable by id, with heartbeats."""

    def __init__(self, service: "Service", scope: EventScope, after: int | None = None) -> None:
        self._service = service
        self._scope = scope
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        broker = self._service.events
        loop = asyncio.get_running_loop()
        subscriber = await self._service.work(broker.subscribe, self._scope, loop, self._after)
        try:
            await until_disconnect(self._send_all(subscriber, send), receive)
        finally:
            broker.unsubscribe(subscriber)

    async def _send_all(self, subscriber: Subscriber, send: Send) -> None:
        broker = self._service.events

        async def send_body(data: bytes) -> None:
            """Waits while the client does not read, for at most `write_timeout_s`."""
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send_body(BEGIN)
        while subscriber.start < subscriber.next and not subscriber.is_closed:
            events = await self._service.work(broker.read, subscriber)
            subscriber.start += len(events) or subscriber.next  # there are none if it was erased
            await send_body(b"".join(subscriber.text(event) for event in events if event.frames))

        while not subscriber.is_closed:
            subscriber.changed.clear()
            if subscriber.is_lagging:
                await send_body(LAGGING)
                break
            if events := broker.take(subscriber):
                new = [event for event in events if event.next is None or event.next > subscriber.start]
                await send_body(b"".join(map(subscriber.text, new)))
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await subscriber.changed.wait()
            except TimeoutError:
                await send_body(HEARTBEAT)
                continue
            delay_s = min(DELAY_PER_SUBSCRIBER_S * broker.subscribers, MAX_DELAY_S)
            await asyncio.sleep(random.uniform(0, delay_s))  # not all at once
        await send({"type": "http.response.body", "body": b""})
