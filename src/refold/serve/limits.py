"""How much one caller may send, and how often."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from time import monotonic

from starlette.requests import Request
from starlette.types import Message, Receive

from refold.config.serving import ServeSettings
from refold.serve.http_errors import Refused

MOST_CALLERS = 10_000
"""Whose requests are counted apart; who did not ask for longest is forgotten."""


class Rate:
    """A bucket for each caller, with a drop for each request, refilled all the time."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: Hashable, now: float) -> float:
        """Takes a drop and returns 0, or returns how long it takes until there is one."""
        drops, since = self._buckets.pop(caller, (float(self._burst), now))
        drops = min(self._burst, drops + (now - since) * self._per_s)
        is_enough = drops >= 1
        self._buckets[caller] = (drops - 1 if is_enough else drops, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if is_enough else (1 - drops) / self._per_s


class Body:
    """The body of a request as it comes in: not too much, and not too slowly, whoever reads it."""

    def __init__(self, receive: Receive, settings: ServeSettings) -> None:
        self._receive, self._limits = receive, settings.limits
        self._most_mb, self._left = settings.max_body_mb, round(settings.max_body_mb * 2**20)
        self._end = monotonic() + settings.limits.body_s
        self.is_whole = False
        """All of it was read."""

    def demand_length(self, length: str | None) -> None:
        """What is known to be too large is not read at all.

        Raises:
            Refused: it is.
        """
        if length is not None and length.isdigit() and int(length[:18]) > self._left:
            raise self._too_large()

    async def receive(self) -> Message:
        """
        Raises:
            Refused: it is too large, or too slow.
        """
        if self.is_whole:  # what comes now is that the client went away, and that takes as long as it takes
            return await self._receive()
        pause = self._limits.body_idle_s
        try:
            async with asyncio.timeout(max(0.0, min(pause, self._end - monotonic()))):
                message = await self._receive()
        except TimeoutError as error:
            whole = self._limits.body_s
            raise Refused(408, f"the body took {pause:g} s without a byte, or {whole:g} s in all") from error
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._too_large()
        self.is_whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> Refused:
        return Refused(413, f"a body has at most {self._most_mb:g} MB; the setting is serve.max_body_mb")


async def body_of(request: Request) -> bytes:
    """All of it, as bytes.

    Raises:
        Refused: it is too large, or too slow; the guard answers it.
        ClientDisconnect: nobody waits for an answer any more.
    """
    return await request.body()
