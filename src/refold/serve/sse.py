"""Live events over HTTP as server-sent events: resumable by id, with heartbeats."""

from asyncio import FIRST_COMPLETED, create_task, get_running_loop, sleep, timeout, wait

from starlette.types import Receive, Scope, Send

from refold.serve.events import BATCH, Topic, TopicScope
from refold.serve.frames import BEGIN, HEARTBEAT, LAGGING
from refold.serve.http_protocol import abort, cancel, wait_for_disconnect
from refold.serve.service import Service
from refold.stores.store import Key

HEARTBEAT_S = 15.0
PAUSE_PER_SUBSCRIBER_S = 0.005
MAX_PAUSE_S = 2.5
"""The more subscribers there are, the longer each waits between two writes, up to this."""
FAREWELL_S = 0.5
"""For a client to read the end of its stream."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """The response to one subscriber, as an ASGI application."""

    def __init__(self, service: Service, scope: TopicScope, after: int | None) -> None:
        """`after` is how many events the subscriber has seen; None starts with new ones."""
        self._service = service
        self._scope = scope
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        broker = self._service.events
        loop = get_running_loop()
        topic = await self._service.work(broker.subscribe, self._service.store, self._scope, loop)
        sending = create_task(self._send_all(topic, send))
        disconnected = create_task(wait_for_disconnect(receive))
        tasks = (sending, disconnected, create_task(topic.closed.wait()))
        try:
            await wait(tasks, return_when=FIRST_COMPLETED)
            if topic.is_closed:
                await wait((sending,), timeout=FAREWELL_S)
                if not sending.done():  # the client does not read
                    abort(scope)
                    await wait((disconnected,), timeout=FAREWELL_S)
        finally:
            broker.unsubscribe(topic)
            await cancel(*tasks)
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, topic: Topic, send: Send) -> None:
        seen, next = topic.position  # before anything is sent, so that nothing is missed
        start = next if self._after is None else self._after
        if self._after is None and topic.is_behind and isinstance(self._scope, Key):
            start = await self._service.work(topic.end_of_record)  # without what others have not read yet
        elif start > next:  # an id beyond the end is another record's
            start = min(start, await self._service.work(topic.end_of_record))
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await _send(topic, send, BEGIN)
        while start < next and not topic.is_closed:
            frame = await self._service.work(topic.replay, start, next)
            start = frame.next or next
            if frame.data:
                await _send(topic, send, frame.data)
        await self._follow(topic, seen, start, send)
        await _send(topic, send, topic.farewell, more=False)

    async def _follow(self, topic: Topic, seen: int, start: int, send: Send) -> None:
        """Sends the frames after the first `seen`, of events from a place on, until the topic closes."""
        while not topic.is_closed:
            frames = topic.frames_after(seen)
            if frames is None:
                await _send(topic, send, LAGGING)
                return
            seen += len(frames)
            data = b"".join(frame.data for frame in frames if frame.next is None or frame.next > start)
            if data:
                await _send(topic, send, data)
            if not frames:
                try:
                    async with timeout(HEARTBEAT_S):
                        await topic.wait_for_frames()
                except TimeoutError:
                    await _send(topic, send, HEARTBEAT)
            elif len(frames) < BATCH:
                await sleep(min(PAUSE_PER_SUBSCRIBER_S * self._service.events.subscribers, MAX_PAUSE_S))


async def _send(topic: Topic, send: Send, data: bytes, *, more: bool = True) -> None:
    """Waits while the client does not read, for at most `write_timeout_s`."""
    with topic.sending():
        await send({"type": "http.response.body", "body": data, "more_body": more})
