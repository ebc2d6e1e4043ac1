"""Connections: limits on headers, idle time and unread responses; what to do when a client disconnects."""

import socket
from asyncio import FIRST_COMPLETED, CancelledError, TimerHandle, Transport, create_task, wait
from collections.abc import Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from refold.config.serving import Limits
from refold.serve.http_errors import error_body

MAX_HEADER_BYTES = 65_536
MAX_UNSENT_BYTES = 16_384
"""Buffered for a client that does not read, here and again in the kernel."""
LINGER_S = 2.0
"""How long a client may go on sending after it was refused, so that it gets to read the response."""


class HeadersTooLargeError(Exception):
    """Ends the parser's work."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the limits of `serve.limits`."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._header_bytes: int | None = None
        """Of the headers that are being received; None outside of headers."""
        self._is_refused = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        with suppress(AttributeError, OSError):  # some systems and Unix sockets have no such option
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._set_timer(self.limits.idle_s)
        if len(self.connections) > self.limits.connections:
            self._refuse(503, "too many connections; try again")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_headers = self._header_bytes is not None
        super().data_received(data)
        if was_in_headers and self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, "the headers are larger than 64 KB")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._set_timer(self.limits.header_s)

    def on_headers_complete(self) -> None:
        self._header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise HeadersTooLargeError
        self._header_bytes = None
        self._set_timer(None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self._header_bytes is None:  # no pipelined request follows
            self._set_timer(self.limits.idle_s)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for whatever its parser refuses."""
        if self._header_bytes is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "the headers are larger than 64 KB")
        else:
            self._refuse(400, "this is not a valid HTTP request")

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        if self._is_refused:
            self.transport.abort()
        elif self._header_bytes is not None:
            self._refuse(408, f"the headers took longer than {self.limits.header_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, and discards what the client still sends, so that it gets to read that.

        If another response is under way, that is cut off instead.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
        elif not self.transport.is_closing():
            body = error_body(status, message)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            rest = f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + rest.encode() + body)
            self.transport.write_eof()
            self._is_refused = True
            self._set_timer(LINGER_S)


def protocol_with(limits: Limits) -> type[LimitedProtocol]:
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


async def until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs work for a request whose body was read; cancels it if the client disconnects."""
    working = create_task(work)
    disconnected = create_task(_disconnected(receive))
    try:
        await wait((working, disconnected), return_when=FIRST_COMPLETED)
    finally:
        working.cancel()
        disconnected.cancel()
        await wait((working, disconnected))
        for task in (working, disconnected):
            if task.cancelled():
                # Until the result is asked for, a task keeps all frames of where it was.
                with suppress(CancelledError):
                    task.result()
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
