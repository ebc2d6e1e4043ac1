"""Live events over HTTP: resumed by an id, kept alive, and cut off when nobody reads them."""

from asyncio import FIRST_COMPLETED, create_task, get_running_loop, sleep, timeout, wait

from starlette.types import Message, Receive, Send
from starlette.types import Scope as Connection

from refold.serve.disconnect import end, gone
from refold.serve.events import CHUNK, Feed, Hub, Scope
from refold.serve.frames import BEGIN, HEARTBEAT, LAGGING
from refold.serve.http_protocol import abort
from refold.serve.service import Service
from refold.stores.store import Key

HEARTBEAT_S = 15.0
SPREAD_S, LONGEST_SPREAD_S = 0.005, 2.5
"""For each who watches, everybody is told so much more seldom, up to that."""
END_S = 0.5
"""For a client to be told that it is over."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """The answer to one who watches, as an ASGI application."""

    def __init__(self, service: Service, scope: Scope, after: int | None) -> None:
        self._service, self._scope, self._after = service, scope, after

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        hub: Hub = self._service.hub
        feed = await self._service.work(hub.join, self._service.store, self._scope, get_running_loop())
        telling, left = create_task(self._tell(feed, send)), create_task(gone(receive))
        tasks = (telling, left, create_task(feed.over.wait()))
        try:
            await wait(tasks, return_when=FIRST_COMPLETED)
            if feed.is_over:
                await wait((telling,), timeout=END_S)
                if not telling.done():  # nor would it take its end
                    abort(scope)
                    await wait((left,), timeout=END_S)
        finally:
            hub.leave(feed)
            await end(*tasks)
        if not telling.cancelled():
            telling.result()

    async def _tell(self, feed: Feed, send: Send) -> None:
        seen, next = feed.here  # before anything is sent: from now on nothing is missed
        start = next if self._after is None else self._after
        if self._after is None and feed.is_behind and isinstance(self._scope, Key):
            start = await self._service.work(feed.end_of_record)  # what was said before is not told
        elif start > next:  # beyond the end is another record's
            start = min(start, await self._service.work(feed.end_of_record))
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await _sent(feed, send, BEGIN)
        while start < next and not feed.is_over:
            frame = await self._service.work(feed.past, start, next)
            start = frame.next or next
            if frame.text:
                await _sent(feed, send, frame.text)
        await self._follow(feed, seen, start, send)
        await _sent(feed, send, feed.farewell, more=False)

    async def _follow(self, feed: Feed, seen: int, start: int, send: Send) -> None:
        """Frames after those that were `seen`, of events from a place on, until there can be no more."""
        while not feed.is_over:
            frames = feed.since(seen)
            if frames is None:
                await _sent(feed, send, LAGGING)
                return
            seen += len(frames)
            text = b"".join(one.text for one in frames if one.next is None or one.next > start)
            if text:
                await _sent(feed, send, text)
            if 0 < len(frames) < CHUNK:  # there are no more
                await sleep(min(SPREAD_S * self._service.hub.watchers, LONGEST_SPREAD_S))
            elif not frames:
                try:
                    async with timeout(HEARTBEAT_S):
                        await feed.more()
                except TimeoutError:
                    await _sent(feed, send, HEARTBEAT)


async def _sent(feed: Feed, send: Send, text: bytes, *, more: bool = True) -> None:
    """Waits for as long as a connection may be left unread: see `Wire`."""
    message: Message = {"type": "http.response.body", "body": text, "more_body": more}
    with feed.sending():
        await send(message)
