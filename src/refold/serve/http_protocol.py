"""Sockets: headers have a size and a time, and who asks nothing, or does not stop sending, is let go."""

import socket
from asyncio import TimerHandle, Transport
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from weakref import ref

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from refold.config.serving import Limits
from refold.serve.http_errors import CODES

HEADER_BYTES = 65_536
UNSENT_BYTES = 16_384
"""What waits here, and again in the kernel, for a client to read it: who does not read is not sent more."""
LINGER_S = 2.0
"""How long a client that was answered may go on sending, so that it gets to read the answer."""


ABORT = "refold.abort"
"""What a request can do to its connection, in the scope."""


class TooLargeError(Exception):
    """The headers are; it ends the parser's work."""


class Wire(HttpToolsProtocol):
    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._stall: TimerHandle | None = None
        self._head: int | None = None
        """Bytes of the headers that are coming in now."""
        self._is_leaving = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT_BYTES)
        with suppress(AttributeError, OSError):  # other systems have no such option, Unix sockets neither
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._wait(self.limits.idle_s)
        if len(self.connections) > self.limits.connections:
            self._tell(503, "there are too many connections; try again")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not take what it asked for."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        if self._is_leaving:
            return
        before = self._head
        super().data_received(data)
        if self._head is not None and before is not None:
            self._head = max(self._head, before + len(data))
            if self._head > HEADER_BYTES:
                self._refuse(431, "these headers have more than 64 KB")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._wait(self.limits.header_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._take(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._take(len(name) + len(value) + 4)

    def _take(self, size: int) -> None:
        self._head = (self._head or 0) + size
        if self._head > HEADER_BYTES:
            raise TooLargeError

    def on_headers_complete(self) -> None:
        self._head = None
        self._wait(None)
        self.scope["extensions"] = {ABORT: {"do": partial(_abort, ref(self))}}
        super().on_headers_complete()
        self.cycle.transport = _Parting(self, self.cycle)  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:
            return  # this one was asked while another was answered
        if self.cycle.more_body:
            self.part(self.cycle)
        elif self._head is None:
            self._wait(self.limits.idle_s)

    def part(self, answered: RequestResponseCycle) -> None:
        """Closes the connection, once the client has sent what it wants to send."""
        if answered.more_body:
            self._leave()
        else:
            self.transport.close()

    def _leave(self) -> None:
        """What the client is still sending is taken and thrown away for a while, or it would not get to read
        what it was answered.
        """
        if not self._is_leaving and not self.transport.is_closing():
            self._is_leaving = True
            self.transport.write_eof()
            self._wait(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        """Called for whatever the parser does not take."""
        if self._head is not None and self._head > HEADER_BYTES:
            self._refuse(431, "these headers have more than 64 KB")
        else:
            self._refuse(400, "this is not HTTP")

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._is_leaving:
            self.transport.abort()
        elif self._head is not None:
            self._refuse(408, f"these headers took more than {self.limits.header_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Unless another answer is under way: then that is cut off."""
        if self.cycle is None or self.cycle.response_complete:
            self._tell(status, message)
            self._leave()
        else:
            self.transport.close()

    def _tell(self, status: int, message: str) -> None:
        body = msgspec.json.encode({"error": {"code": CODES[status], "message": message}})
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        rest = f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + rest.encode() + body)


def abort(scope: Scope) -> None:
    """Closes the connection of a request at once: what its client has not taken, it does not get."""
    if (how := scope.get("extensions", {}).get(ABORT)) is not None:
        how["do"]()


def _abort(wire: "ref[Wire]") -> None:
    if (there := wire()) is not None:
        there.transport.abort()


class _Parting:
    """A transport as the answer of a request has it: closing it is up to the connection."""

    def __init__(self, wire: Wire, cycle: RequestResponseCycle) -> None:
        self._wire, self._cycle = wire, ref(cycle)  # which holds this one: nothing is left to collect
        self.write, self.is_closing = wire.transport.write, wire.transport.is_closing

    def close(self) -> None:
        if (cycle := self._cycle()) is not None:
            self._wire.part(cycle)


def wire_of(limits: Limits) -> type[Wire]:
    """What uvicorn makes of every connection."""
    return type("Wire", (Wire,), {"limits": limits})
