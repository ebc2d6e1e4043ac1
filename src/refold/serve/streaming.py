"""Responses on their way from an upstream to a client: recorded before their last byte is passed on."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import aiohttp
from starlette.types import Send

from refold.core.codec import dumps, loads
from refold.core.errors import RefoldError
from refold.dialects.chunks import join
from refold.dialects.replies import take
from refold.dialects.shape import kind_of
from refold.serve.hide_tools import STREAM_ENDS, tool_hider
from refold.serve.incoming import ClientDialect
from refold.serve.upstream import UpstreamError, response_headers

DONE = object()
"""The value of the event `[DONE]`."""
MAX_EVENT_BYTES = 64 * 2**20
CLOSE_S = 1.0
"""For an upstream to close a stream after its last event."""
WITHOUT_ANSWER = ("failed", "queued", "in_progress", "cancelled", "interrupted")
"""States of a response that has no answer in it."""
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_LOG = logging.getLogger("refold.serve")


class Forwarder:
    """Answers one request of a client with one or more responses of an upstream.

    With `hides_tools`, the client sees nothing of the gateway's own tools. What is not understood of a
    response is passed on as it came.
    """

    def __init__(
        self,
        upstream: Callable[[bytes | None], AbstractAsyncContextManager[aiohttp.ClientResponse]],
        send: Send,
        own_headers: Mapping[str, str],
        dialect: ClientDialect = "openai-chat",
        *,
        hides_tools: bool = False,
    ) -> None:
        """`upstream` sends a request with this body."""
        self._upstream = upstream
        self._send = send
        self._own_headers = [(name.encode(), value.encode()) for name, value in own_headers.items()]
        """In UTF-8, since a conversation's id may have any characters."""
        self._dialect: ClientDialect = dialect
        self._hider = tool_hider(dialect) if hides_tools else None
        self._replies: list[dict[str, Any]] = []
        self._visible: dict[str, Any] | None = None
        """What the client sees of all replies, if there is something to record."""
        self._response: aiohttp.ClientResponse | None = None
        """The last one, as long as its end is held back."""
        self._rest = b""
        """Of the last response: what was not passed on yet."""
        self._has_begun = False
        self._is_stream = False

    async def forward(self, body: bytes | None) -> None:
        """Sends a request as it came, and its response as it comes."""
        try:
            async with self._upstream(body) as response:
                await self._pass_on(response)
        except UpstreamError as error:
            await self.fail(error)

    async def receive(self, body: bytes) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Sends a request and passes its response on, all but the end.

        Returns the reply of the model, and what the client sees of all replies; None if there is nothing to
        record.

        Raises:
            UpstreamError: there is no response, or it was cut off.
        """
        self._visible = None
        async with self._upstream(body) as response:
            if response.status != 200:
                if self._has_begun or self._replies:
                    raise UpstreamError(f"the upstream answered a later round with status {response.status}")
                await self._pass_on(response)
                return None
            self._response = response
            if response.content_type == "text/event-stream":
                reply = await self._receive_stream(response)
            else:
                reply = None
                self._rest = await response.read()
                with _tolerating():
                    reply = _answer(loads(self._rest))
        if reply is None:
            return None
        self._replies.append(reply)
        if self._hider is None:
            self._visible = reply
        else:
            with _tolerating():
                self._visible = self._hider.reply(self._replies)
                if self._is_stream:  # the client has seen the id of the first round
                    self._visible["id"] = self._replies[0].get("id")
        return None if self._visible is None else (reply, self._visible)

    async def finish(self) -> None:
        """Sends the end of the answer, once it is recorded."""
        if self._response is None:
            return
        rest = self._rest
        if self._hider is not None and self._is_stream:
            ends = self._hider.end(self._visible) if self._visible else self._hider.held_back
            rest = b"".join(_as_sse(self._dialect, event) for event in ends) + rest
        elif self._visible is not None and self._visible != self._replies[-1]:
            rest = dumps(self._visible)
        await self._begin(self._response, len(rest))
        await self._send_body(rest)
        await self._end()

    async def _receive_stream(self, response: aiohttp.ClientResponse) -> dict[str, Any] | None:
        await self._begin(response)
        hider = self._hider
        values: list[Any] = []
        rest: list[bytes] = []
        is_held_back = False
        is_over = False
        has_failed = False
        if hider is not None:
            hider.begin_stream()
        try:
            async with asyncio.timeout(None) as limit:
                async for batch in _events(response.content):
                    out: list[bytes] = []
                    for raw, value in batch:
                        is_error = _is_error(value)
                        has_failed = has_failed or (is_error and not is_over)
                        is_over = is_over or value is DONE or kind_of(value) in STREAM_ENDS
                        is_held_back = is_held_back or is_over or _is_finish(value)
                        shown: list[dict[str, Any]] | None = None
                        if isinstance(value, dict) and value and not is_error:
                            values.append(value)
                            if hider is not None:
                                with _tolerating():
                                    shown = list(hider.feed(value))
                        if shown is not None:
                            out += [raw if one is value else _as_sse(self._dialect, one) for one in shown]
                        elif is_held_back:
                            rest.append(raw)
                        else:
                            out.append(raw)
                    await self._send_body(b"".join(out))
                    if is_over and limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + CLOSE_S)
        except TimeoutError:
            if not limit.expired():
                raise
        is_over = is_over or (is_held_back and self._dialect == "openai-chat")  # some servers send no [DONE]
        if not is_over and not has_failed:
            raise UpstreamError("the upstream's response was cut off")
        self._rest = b"".join(rest)
        if not has_failed:
            with _tolerating():
                return _answer(join(values))
        return None

    async def _pass_on(self, response: aiohttp.ClientResponse) -> None:
        if 300 <= response.status < 400:
            raise UpstreamError(
                "the upstream answered with a redirect, which is not followed; correct serve.upstreams"
            )
        await self._begin(response)
        async for chunk in response.content.iter_any():
            await self._send_body(chunk)
        await self._end()

    async def _begin(self, response: aiohttp.ClientResponse, length: int | None = None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._is_stream = response.content_type == "text/event-stream"
        headers = [*response_headers(response.headers), *self._own_headers]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _send_body(self, body: bytes) -> None:
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: UpstreamError) -> None:
        """A response that has begun ends with an error, never as if it were complete.

        Raises:
            UpstreamError: so that the connection is closed.
        """
        _LOG.warning("%s", error)
        detail = {"type": "api_error", "code": "upstream", "message": f"refold: {error}"}
        body = dumps({"type": "error", "error": detail})
        if self._has_begun:
            if self._is_stream:
                await self._send_body(b"event: error\ndata: " + body + b"\n\n")
            raise error
        headers = [(b"content-type", b"application/json"), *self._own_headers]
        await self._send({"type": "http.response.start", "status": 502, "headers": headers})
        await self._send_body(body)
        await self._end()


@contextmanager
def _tolerating() -> Iterator[None]:
    """Logs a warning if an upstream's response is not as expected."""
    try:
        yield
    except (RefoldError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        _LOG.warning(
            "a response was passed on without being recorded, since it was not understood: %r", error
        )


def _answer(reply: Any) -> dict[str, Any] | None:
    """The reply, if it is an answer: not one that failed or is still to come."""
    if not isinstance(reply, dict) or reply.get("status") in WITHOUT_ANSWER:
        return None
    return reply if take(reply) is not None else None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[list[tuple[bytes, Any]]]:
    """Server-sent events as they come, each as text and as its value."""
    pending = bytearray()
    async for chunk in content.iter_any():
        search_from = max(0, len(pending) - 3)  # the end of an event may be split between chunks
        pending += chunk
        found: list[tuple[bytes, Any]] = []
        start = 0
        for end in _EVENT_END.finditer(pending, search_from):
            raw = bytes(pending[start : end.end()])
            found.append((raw, _event_value(raw)))
            start = end.end()
        del pending[:start]
        if len(pending) > MAX_EVENT_BYTES:
            raise UpstreamError(f"the upstream sent an event of more than {MAX_EVENT_BYTES >> 20} MB")
        if found:
            yield found
    if pending.strip():
        yield [(bytes(pending), _event_value(bytes(pending)))]


def _event_value(raw: bytes) -> Any:
    lines = [line[5:].removeprefix(b" ") for line in raw.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if data.strip() == b"[DONE]":
        return DONE
    try:
        return loads(data) if data else None
    except (ValueError, RecursionError):
        return None


def _is_finish(value: Any) -> bool:
    """True for an event after which a client may take the answer for complete."""
    match value:
        case {"choices": [{"finish_reason": reason}, *_]}:
            return reason is not None
    return kind_of(value) == "message_delta"


def _is_error(value: Any) -> bool:
    if kind_of(value) == "error":
        return True
    return isinstance(value, dict) and bool(value.get("error")) and kind_of(value) is None


def _as_sse(dialect: ClientDialect, event: dict[str, Any]) -> bytes:
    name = b"" if dialect == "openai-chat" else b"event: " + str(event.get("type")).encode() + b"\n"
    return name + b"data: " + dumps(event) + b"\n\n"
