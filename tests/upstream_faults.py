"""How does an answer leave the server, and how does it go wrong when a fault was asked for?"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from itertools import pairwise

from aiohttp import web

from upstream_rules import Body, Dialect, Refusal
from upstream_streams import compact, failed

PAUSE = 0.05
"""Seconds after an event of a slow stream."""
FAILURES = {
    "fail-429": (429, "rate_limit_error", "Rate limit reached for requests. Please try again in 7s."),
    "fail-500": (
        500,
        "api_error",
        "The server had an error while processing your request. Sorry about that!",
    ),
    "fail-503": (503, "api_error", "The engine is currently overloaded, please try again later"),
    "fail-529": (529, "overloaded_error", "Overloaded"),
}
OPENAI_KINDS = {"rate_limit_error": "requests", "api_error": "server_error"}
MODES = {*FAILURES, "fail-502", "cut-stream", "error-stream", "stall-stream", "slow", "hang", "garbage"}
MODES |= {"redirect", "huge", "echo", "unknown"}


def as_json(body: Body, status: int = 200) -> web.Response:
    return web.Response(
        body=compact(body).encode("utf-8", "replace"), status=status, content_type="application/json"
    )


def request_id(request: web.Request) -> str:
    return f"req_{hashlib.sha256(str(id(request)).encode()).hexdigest()[:24]}"


def unknown(model: str, dialect: Dialect) -> Refusal:
    if dialect == "anthropic":
        return Refusal("", f"model: {model}", status=404, kind="not_found_error")
    words = f"The model `{model}` does not exist or you do not have access to it."
    return Refusal("", words, status=404, code="model_not_found")


async def fault(request: web.Request, dialect: Dialect, mode: str, model: str) -> web.StreamResponse | None:
    """The answer of a mode that does not look at the request."""
    if mode in FAILURES:
        status, kind, words = FAILURES[mode]
        kind = kind if dialect == "anthropic" else OPENAI_KINDS.get(kind, "server_error")
        code = "rate_limit_exceeded" if status == 429 and dialect != "anthropic" else None
        refusal = Refusal("", words, status=status, kind=kind, code=code)
        response = as_json(refusal.body(dialect, request_id(request)), status)
        if status == 429:
            response.headers["retry-after"] = "7"
            response.headers["x-ratelimit-remaining-requests"] = "0"
        return response
    match mode:
        case "fail-502":
            page = "<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n</html>\r\n"
            return web.Response(text=page, status=502, content_type="text/html")
        case "garbage":
            return web.Response(body=b'{"id": \xff not JSON', content_type="application/json")
        case "redirect":
            assert request.transport is not None
            port = request.transport.get_extra_info("sockname")[1]
            return web.Response(status=302, headers={"location": f"http://localhost:{port}/elsewhere"})
        case "hang":
            await asyncio.Event().wait()
        case "unknown":
            raise unknown(model, dialect)
    return None


async def send_stream(
    request: web.Request, dialect: Dialect, mode: str, said: list[str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"cache-control": "no-cache", "content-type": "text/event-stream"})
    await response.prepare(request)
    half = max(2, len(said) // 2)
    async for data in _cut(said[:half] if mode.endswith("-stream") else said, mode == "slow"):
        await response.write(data)
    match mode:
        case "cut-stream":
            assert request.transport is not None
            request.transport.close()
        case "error-stream":
            await response.write(failed(dialect).encode())
        case "stall-stream":
            await asyncio.Event().wait()
    if mode != "cut-stream":
        await response.write_eof()
    return response


async def _cut(said: list[str], is_slow: bool) -> AsyncIterator[bytes]:
    """One event at a time, or three pieces whose borders lie anywhere, inside characters too."""
    if is_slow:
        for event in said:
            yield event.encode()
            await asyncio.sleep(PAUSE)
        return
    data = "".join(said).encode()
    borders = [0, len(data) // 3, len(data) * 2 // 3, len(data)]
    for start, end in pairwise(borders):
        if end > start:
            yield data[start:end]
            await asyncio.sleep(0)


async def send_whole(request: web.Request, mode: str, data: bytes, dialect: Dialect) -> web.StreamResponse:
    named = "request-id" if dialect == "anthropic" else "x-request-id"
    headers = {"content-type": "application/json", named: request_id(request)}
    if mode == "slow":
        await asyncio.sleep(PAUSE * 5)
    if mode == "cut-stream":
        response = web.StreamResponse(headers={**headers, "content-length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.close()
        return response
    return web.Response(body=data, headers=headers)
