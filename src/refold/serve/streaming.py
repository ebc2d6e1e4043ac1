"""Answers on their way from an upstream to a client, kept before their last byte is handed on."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import aiohttp
from starlette.types import Send

from refold.core.codec import dumps, loads
from refold.core.errors import RefoldError
from refold.dialects.chunks import join
from refold.dialects.replies import take
from refold.dialects.shape import kind_of
from refold.serve.hide_tools import ENDS, Splice, splice_of, visible
from refold.serve.incoming import Dialect
from refold.serve.upstream import Upstream, UpstreamError, handed_back

DONE = object()
"""The value of an event that says no more than that it is the last."""
LONGEST_EVENT = 64 * 2**20
LINGER_S = 1.0
"""For an upstream to close a stream that is over."""
UNANSWERED = ("failed", "queued", "in_progress", "cancelled", "interrupted")
"""States of a response that says nothing yet, or never will."""
P = ParamSpec("P")
T = TypeVar("T")
_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_LOG = logging.getLogger("refold.serve")


class Sent(NamedTuple):
    """A request on its way upstream, but for its body."""

    method: str
    url: str
    headers: list[tuple[str, str]]


class Step(NamedTuple):
    """What to do after an answer."""

    body: bytes | None
    """To be asked next, where the model only wanted to look something up; else the answer is complete."""


After = Callable[[dict[str, Any], dict[str, Any]], Awaitable[Step]]
"""Keeps an answer: what the model said, and what the client sees of it and of the rounds before."""


class Relay:
    """One request of a client, and all that is asked upstream for it."""

    def __init__(self, upstream: Upstream, send: Send, sent: Sent, told: Mapping[str, str]) -> None:
        self._upstream, self._send, self._sent, self._told = upstream, send, sent, dict(told)
        self._has_begun = self._is_stream = False

    async def pass_on(self, body: bytes | None) -> None:
        """As it came, there and back."""
        try:
            async with self._upstream.asked(*self._sent, body) as answer:
                await self._hand_on(answer)
        except UpstreamError as error:
            await self._fail(error)

    async def converse(self, dialect: Dialect, body: bytes, after: After, *, hides: bool) -> None:
        """Asks until there is an answer for the client; with `hides`, without what our own tools are for.

        What cannot be understood of an answer is handed on as it came, and not kept.
        """
        splice, rounds, asked = splice_of(dialect) if hides else None, list[dict[str, Any]](), body
        try:
            while True:
                async with self._upstream.asked(*self._sent, asked) as answer:
                    if answer.status != 200:
                        if self._has_begun or rounds:
                            raise UpstreamError(f"the upstream answered {answer.status} in mid-answer")
                        await self._hand_on(answer)
                        return
                    came = await self._came(answer, dialect, splice)
                if came.reply is None:
                    break
                rounds.append(came.reply)
                shown = _understood(visible, dialect, rounds) if hides else came.reply
                if shown is None:
                    break
                came = came._replace(shown=shown)
                step = await after(came.reply or {}, shown)
                if step.body is None:
                    break
                asked = step.body
            await self._finish(dialect, came, splice)
        except UpstreamError as error:
            await self._fail(error)

    async def _finish(self, dialect: Dialect, came: "_Came", splice: Splice | None) -> None:
        rest = came.rest
        if splice is not None and self._is_stream:
            rest = b"".join(_written(dialect, event) for event in splice.end()) + rest
        elif came.shown is not None and came.shown != came.reply:
            rest = dumps(came.shown)
        if not self._has_begun:
            await self._begin(came.answer, len(rest))
        await self._more(rest)
        await self._end()

    async def _came(self, answer: aiohttp.ClientResponse, dialect: Dialect, splice: Splice | None) -> "_Came":
        if answer.content_type == "text/event-stream":
            return await self._streamed(answer, dialect, splice)
        data = await answer.read()
        return _Came(answer, _understood(lambda: _kept(loads(data))), data)

    async def _streamed(
        self, answer: aiohttp.ClientResponse, dialect: Dialect, splice: Splice | None
    ) -> "_Came":
        """Hands a stream on, all but its end."""
        await self._begin(answer)
        values, rest = list[Any](), list[bytes]()
        is_held = is_over = has_failed = False
        stream, until = _events(answer.content), None
        if splice is not None:
            splice.begin()
        while events := await _next(stream, until):
            out: list[bytes] = []
            for raw, value in events:
                has_failed = has_failed or (_is_error(value) and not is_over)
                is_over = is_over or value is DONE or kind_of(value) in ENDS
                is_held = is_held or is_over or _is_last(value)
                says = isinstance(value, dict) and bool(value) and not _is_error(value)
                values += [value] if says else []
                shown = _understood(_fed, splice, value) if splice and says else None
                if shown is not None:
                    out += [raw if one is value else _written(dialect, one) for one in shown]
                elif is_held:
                    rest.append(raw)
                else:
                    out.append(raw)
            await self._more(b"".join(out))
            if is_over and until is None:
                until = asyncio.get_running_loop().time() + LINGER_S
        is_over = is_over or (is_held and dialect == "openai-chat")  # not all of its servers say [DONE]
        if not is_over and not has_failed:
            raise UpstreamError("the upstream's answer was cut off")
        reply = None if has_failed else _understood(lambda: _kept(join(values)))
        return _Came(answer, reply, b"".join(rest))

    # To the client

    async def _hand_on(self, answer: aiohttp.ClientResponse) -> None:
        if 300 <= answer.status < 400:
            raise UpstreamError("the upstream redirects, which is not followed; correct serve.upstreams")
        await self._begin(answer)
        async for chunk in answer.content.iter_any():
            await self._more(chunk)
        await self._end()

    async def _begin(self, answer: aiohttp.ClientResponse, length: int | None = None) -> None:
        if self._has_begun:
            return
        headers = [*handed_back(answer.headers), *self._ours()]
        headers += [] if length is None else [(b"content-length", b"%d" % length)]
        self._has_begun, self._is_stream = True, answer.content_type == "text/event-stream"
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    def _ours(self) -> list[tuple[bytes, bytes]]:
        """An id may have any letters: it is told as it can be asked for, in UTF-8."""
        return [(name.encode(), value.encode()) for name, value in self._told.items()]

    async def _more(self, body: bytes) -> None:
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: UpstreamError) -> None:
        """An answer that has begun ends as an error: never as if it were complete.

        Raises:
            UpstreamError: so that the connection is closed.
        """
        _LOG.warning("%s", error)
        told = {"type": "api_error", "code": "upstream", "message": f"refold: {error}"}
        body = dumps({"type": "error", "error": told})
        if self._has_begun:
            if self._is_stream:
                await self._more(b"event: error\ndata: " + body + b"\n\n")
            raise error
        headers = [(b"content-type", b"application/json"), *self._ours()]
        await self._send({"type": "http.response.start", "status": 502, "headers": headers})
        await self._more(body)
        await self._end()


class _Came(NamedTuple):
    answer: aiohttp.ClientResponse
    reply: dict[str, Any] | None
    """None where it is nothing to keep: an error, or nothing that is known."""
    rest: bytes
    """Not yet handed on."""
    shown: dict[str, Any] | None = None
    """What the client sees of it and of the rounds before."""


def _understood(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """None, and a line in the log, where an upstream says what nobody expects of it."""
    try:
        return read(*args, **kwargs)
    except (
        RefoldError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        _LOG.warning("an answer is handed on but not kept, since it is not understood: %r", error)
        return None


def _fed(splice: Splice, event: dict[str, Any]) -> list[dict[str, Any]]:
    return list(splice.feed(event))


def _kept(reply: Any) -> dict[str, Any] | None:
    """The same, if it is an answer: one that failed or is yet to come is none."""
    if not isinstance(reply, dict) or reply.get("status") in UNANSWERED:
        return None
    return reply if take(reply) is not None else None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[list[tuple[bytes, Any]]]:
    """Server-sent events as they come, each as it is written and what it says."""
    left = bytearray()
    async for chunk in content.iter_any():
        new = max(0, len(left) - 3)  # a boundary may have begun
        left += chunk
        found, start = list[tuple[bytes, Any]](), 0
        for boundary in _BOUNDARY.finditer(left, new):
            raw = bytes(left[start : boundary.end()])
            found.append((raw, _value(raw)))
            start = boundary.end()
        del left[:start]
        if len(left) > LONGEST_EVENT:
            raise UpstreamError("the upstream sent an event that never ends")
        if found:
            yield found
    if left.strip():
        yield [(bytes(left), _value(bytes(left)))]


async def _next(stream: AsyncIterator[T], until: float | None) -> T | None:
    """None at the end, or when it is too late for more."""
    try:
        async with asyncio.timeout_at(until) as limit:
            return await anext(stream, None)
    except TimeoutError:
        if limit.expired():
            return None
        raise


def _value(raw: bytes) -> Any:
    lines = [line[5:].removeprefix(b" ") for line in raw.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if data.strip() == b"[DONE]":
        return DONE
    try:
        return loads(data) if data else None
    except (ValueError, RecursionError):
        return None


def _is_last(value: Any) -> bool:
    """From here on a client may believe that the answer is complete."""
    if kind_of(value) == "message_delta":
        return True
    choices = value.get("choices") if isinstance(value, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") is not None


def _is_error(value: Any) -> bool:
    return kind_of(value) == "error" or (
        isinstance(value, dict) and bool(value.get("error")) and kind_of(value) is None
    )


def _written(dialect: Dialect, event: dict[str, Any]) -> bytes:
    name = b"" if dialect == "openai-chat" else b"event: " + str(event.get("type")).encode() + b"\n"
    return name + b"data: " + dumps(event) + b"\n\n"
