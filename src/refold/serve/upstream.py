"""HTTP connections to the providers: only to the configured upstreams, without following redirects."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 600.0
"""For the next byte of a response."""
OWN_PREFIX = "x-refold-"
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
}
NOT_SENT = HOP_BY_HOP | {"accept-encoding", "origin", "referer", "cookie", "forwarded", "expect", "x-real-ip"}
NOT_RETURNED = HOP_BY_HOP | {
    "content-encoding",
    "set-cookie",
    "location",
    "server",
    "date",
    "alt-svc",
    "strict-transport-security",
}


class UpstreamError(Exception):
    """The upstream did not answer, or its response was cut off; the message says why."""


class Upstream:
    """The connection pool for all providers."""

    def __init__(self) -> None:
        self._client: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body is still to be read. Leaving early closes its connection.

        Raises:
            UpstreamError: there is none, or it was cut off.
        """
        if self._client is None:
            self._client = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
                ),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                auto_decompress=True,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        has_answered = False
        try:
            async with self._client.request(
                method,
                URL(url, encoded=True),
                headers=[*headers, ("accept-encoding", "identity")],
                data=body,
                allow_redirects=False,
                skip_auto_headers=("User-Agent",),
            ) as response:
                has_answered = True
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = "cannot be reached; check serve.upstreams"
            if has_answered:
                problem = "cut off its response"
            raise UpstreamError(f"the upstream {problem} ({type(error).__name__})") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """A client's headers that are sent upstream."""
    decoded = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    skipped = set(NOT_SENT)
    for name, value in decoded:
        if name == "connection":  # it names further hop-by-hop headers
            skipped |= {one.strip().lower() for one in value.split(",")}
    prefixes = (OWN_PREFIX, "x-forwarded-")
    return [(name, value) for name, value in decoded if name not in skipped and not name.startswith(prefixes)]


def response_headers(headers: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """An upstream's headers that the client sees."""
    returned = []
    for key, value in headers.items():
        name = key.lower()
        if name not in NOT_RETURNED and not name.startswith((OWN_PREFIX, "access-control-")):
            returned.append((name.encode("latin-1"), value.encode("utf-8", "surrogateescape")))
    return returned
