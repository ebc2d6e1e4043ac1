"""The whole service over loopback, in this process, and what tests say to it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, NamedTuple

import httpx

from refold.config.config import load_config
from refold.serve.app import app_of
from refold.serve.run import GracefulServer, listening, url_of
from refold.serve.service import Service
from refold.stores.store import open_store
from served import WAIT_S, until

MODELS = {"m": {"window": 8_000, "max_output": 1_000, "input": 3.0, "output": 15.0}}


class Running(NamedTuple):
    service: Service
    server: GracefulServer
    url: str
    http: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def running(
    store: str,
    *,
    summarizer: Any = None,
    headers: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
    **serve: Any,
) -> Iterator[Running]:
    config = load_config({"models": MODELS, **(settings or {}), "serve": {"port": 0, **serve}})
    service = Service(config, open_store(store), summarizer=summarizer)
    with listening(config) as listener:
        server = GracefulServer(app_of(service), config.serve.limits, service)
        thread = Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        url = url_of(listener)
        try:
            until(lambda: server.started)
            with httpx.Client(base_url=url, timeout=WAIT_S, headers=headers) as http:
                yield Running(service, server, url, http)
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            service.close()
            assert not thread.is_alive()


def tool_loop(steps: int, start: int = 0) -> list[dict[str, Any]]:
    """A task, and so many calls with their results."""
    said: list[dict[str, Any]] = (
        [{"role": "user", "content": "Find the flight to Oslo."}] if not start else []
    )
    for n in range(start, start + steps):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "grep", "arguments": f'{{"n":{n}}}'}}
        said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        said.append({"role": "tool", "tool_call_id": f"c{n}", "content": f"HAT{n:03} costs {n}.\n" * 60})
    return said
