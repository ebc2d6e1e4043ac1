"""The service, or what is put in its place behind the guard, over real sockets in this process."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from refold.config.config import Config, load_config
from refold.core.errors import StoreError
from refold.serve.app import app_of
from refold.serve.guard import Guard
from refold.serve.metrics import Metrics
from refold.serve.run import GracefulServer, listening, url_of
from refold.serve.service import Service
from refold.serve.tokens import Tokens
from refold.stores.store import Store

WAIT_S = 30


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, str]:
        return json.loads(self.body)["error"]


class Served(NamedTuple):
    url: str
    server: GracefulServer
    metrics: Metrics
    entered: list[str]
    """The paths that got past the guard."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str | None) -> Answer:
        """A header is named with _ for -, and left out where it is None."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.putrequest(method, path, skip_host="host" in named)
            if body is not None and "transfer-encoding" not in named and "content-length" not in named:
                connection.putheader("content-length", str(len(body)))
            for name, value in named.items():
                if value is not None:
                    connection.putheader(name, value.encode())
            connection.endheaders(body, encode_chunked="transfer-encoding" in named)
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = b"{}", **headers: str | None) -> Answer:
        return self.ask(path, "POST", body, **{"content_type": "application/json", **headers})

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)


@contextmanager
def behind_the_guard(**settings: Any) -> Iterator[Served]:
    """The guard, and routes of our own behind it."""
    config = load_config({"serve": {"port": 0, **settings}})
    metrics, entered = Metrics(), list[str]()
    router = Router(routes(), redirect_slashes=False)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        entered.append(scope["path"])
        await router(scope, receive, send)

    guard = Guard(inner, config.serve, Tokens(config), metrics)
    with running(guard, config) as (url, server):
        yield Served(url, server, metrics, entered)


@contextmanager
def whole_service(store: Store, **settings: Any) -> Iterator[Served]:
    config = load_config({"serve": {"port": 0, **settings}})
    service = Service(config, store)
    try:
        with running(app_of(service), config, service) as (url, server):
            yield Served(url, server, service.metrics, [])
    finally:
        service.close()


@contextmanager
def running(app: Any, config: Config, service: Service | None = None) -> Iterator[tuple[str, GracefulServer]]:
    with listening(config) as listener:
        server = GracefulServer(app, config.serve.limits, service)
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            until(lambda: server.started)
            yield url_of(listener), server
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


def routes() -> list[Route]:
    async def echo(request: Request) -> Response:
        body = getattr(request.state, "body", b"")
        caller = request.scope["state"]["caller"]
        return JSONResponse({"bytes": len(body), "owner": caller.owner, "scopes": sorted(caller.scopes)})

    async def page(request: Request) -> Response:
        return HTMLResponse("<script>alert(1)</script>")

    async def broken(request: Request) -> Response:
        raise RuntimeError("the password=hunter2 of /var/lib/secret.db")

    async def storeless(request: Request) -> Response:
        raise StoreError("postgresql://me:hunter2@db.internal does not answer")

    async def stream(request: Request) -> Response:
        async def drops() -> Any:
            yield b"data: 1\n\n"
            await asyncio.sleep(float(request.query_params.get("s", "0")))
            yield b"data: 2\n\n"

        return StreamingResponse(drops(), media_type="text/event-stream")

    async def flood(request: Request) -> Response:
        async def drops() -> Any:
            while True:
                yield b"x" * 65_536
                await asyncio.sleep(0)

        return StreamingResponse(drops())

    both = ["GET", "POST"]
    return [
        Route("/api/echo", echo, methods=both),
        Route("/openai/v1/echo", echo, methods=both),
        Route("/openai/v1/page", page),
        Route("/panel/page", page),
        Route("/api/broken", broken),
        Route("/api/storeless", storeless),
        Route("/api/stream", stream),
        Route("/api/flood", flood),
        Route("/healthz", echo),
        Route("/metrics", echo),
    ]


def until(so: Callable[[], Any]) -> Any:
    """Waits for it to become true."""
    end = time.monotonic() + WAIT_S
    while not (found := so()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)
    return found
