"""The way to the providers: requests go where the configuration says, and nowhere else."""

from collections.abc import Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONNECT_S, SILENCE_S = 15.0, 600.0
"""For a connection, and for the next byte of an answer."""
OURS = "x-refold-"
HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
    *("trailer", "transfer-encoding", "upgrade", "host", "content-length"),
}
"""Headers that are for one hop only."""
UNSENT = HOP | {"accept-encoding", "origin", "referer", "cookie", "forwarded", "expect", "x-real-ip"}
UNTOLD = HOP | {"content-encoding", "set-cookie", "location", "server", "date", "alt-svc"}
UNTOLD |= {"strict-transport-security"}


class UpstreamError(Exception):
    """No answer came, or it was cut off; says why."""


class Upstream:
    """Connections to all providers."""

    def __init__(self) -> None:
        self._client: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def asked(
        self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        """An answer whose body is still to be read. Whoever leaves early ends the call.

        Raises:
            UpstreamError: there is none.
        """
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._client = aiohttp.ClientSession(
                timeout=timeout,
                connector=connector,
                auto_decompress=True,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        sent = [*headers, ("accept-encoding", "identity")]
        try:
            answer = await self._client.request(
                method,
                URL(url, encoded=True),
                headers=sent,
                data=body,
                allow_redirects=False,
                skip_auto_headers=("User-Agent",),
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(f"the upstream cannot be reached: {type(error).__name__}") from error
        is_over = False
        try:
            yield answer
            is_over = answer.content.at_eof()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(f"the upstream's answer was cut off: {type(error).__name__}") from error
        finally:
            if is_over:
                answer.release()
            else:
                answer.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """What of a client's headers goes upstream."""
    named = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    hops = {one.strip().lower() for name, value in named if name == "connection" for one in value.split(",")}
    away = (OURS, "x-forwarded-")
    return [one for one in named if one[0] not in UNSENT | hops and not one[0].startswith(away)]


def handed_back(headers: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """What of an upstream's headers the client sees."""
    kept = [(name.lower(), value) for name, value in headers.items()]
    away = (OURS, "access-control-")
    kept = [(name, value) for name, value in kept if name not in UNTOLD and not name.startswith(away)]
    return [(name.encode("latin-1"), value.encode("utf-8", "surrogateescape")) for name, value in kept]
