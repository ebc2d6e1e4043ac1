"""How the service is: whether its store answers, and what was counted."""

import asyncio
import logging
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from refold.serve.http_errors import demand
from refold.serve.service import Service
from refold.stores.store import Key, Store

BOUND_S = 2.0
"""A store that takes longer does not answer."""
NOWHERE = Key("refold", "healthz")
_LOG = logging.getLogger("refold.serve")


class Health:
    """Asks the store, one question at a time, however many want to know."""

    def __init__(self, ask: Callable[[], None], bound_s: float = BOUND_S) -> None:
        self._ask, self._bound_s = ask, bound_s
        self._asked: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Why the service is of no use now, in a few words that name nothing; None if it is."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._answer())
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), self._bound_s)
        except TimeoutError:
            return "the store does not answer in time"

    async def _answer(self) -> str | None:
        try:
            await asyncio.to_thread(self._ask)  # not in the service's own threads, which may all be at work
        except Exception:  # whatever it is, there is no use in it
            _LOG.warning("the store does not answer", exc_info=True)
            return "the store cannot be used"
        return None


def routes(service: Service) -> list[Route]:
    health = Health(lambda: ask(service.store))

    async def healthz(request: Request) -> Response:
        """200 while the store answers, else 503 and why; needs no token"""
        problem = await health.problem()
        told = {"status": "ok"} if problem is None else {"status": "unavailable", "reason": problem}
        return JSONResponse(told, 200 if problem is None else 503)

    async def metrics(request: Request) -> Response:
        """What was counted, for Prometheus; needs the scope `read`"""
        demand(request.state.caller, "read")
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return [Route("/healthz", healthz), Route("/metrics", metrics)]


def ask(store: Store) -> None:
    """Something that any store has to look up and none can have."""
    next(iter(store.read(NOWHERE, 0, 1)), None)
