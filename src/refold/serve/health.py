"""Health of the service, and its metrics."""

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from refold.serve.service import Service
from refold.serve.tokens import require_scope
from refold.stores.store import Key, Store

TIMEOUT_S = 2.0
PROBED = Key("refold", "healthz")
"""A conversation that no store has."""
_LOG = logging.getLogger("refold.serve")


class Health:
    """Asks the store whether it answers: one probe at a time, shared by all who ask meanwhile."""

    def __init__(self, probe: Callable[[], None], timeout_s: float = TIMEOUT_S) -> None:
        self._probe = probe
        self._timeout_s = timeout_s
        self._running: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Why the service is not healthy, without internals; None if it is."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        try:
            return await asyncio.wait_for(asyncio.shield(self._running), self._timeout_s)
        except TimeoutError:
            return "the store does not answer in time"

    async def _run(self) -> str | None:
        try:
            await asyncio.to_thread(self._probe)  # the service's own threads may all be busy
        except Exception:
            _LOG.warning("the store is not available", exc_info=True)
            return "the store is not available"
        return None


def routes(service: Service) -> list[Route]:
    health = Health(lambda: probe(service.store))

    async def healthz(request: Request) -> Response:
        """200 while the store answers, else 503 and the reason; needs no token"""
        problem = await health.problem()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": problem}, 503)

    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus; needs the scope `read`"""
        require_scope(request.state.caller, "read")
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    return [Route("/healthz", healthz), Route("/metrics", metrics)]


def probe(store: Store) -> None:
    next(iter(store.read(PROBED, 0, 1)), None)
