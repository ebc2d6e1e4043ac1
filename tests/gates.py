"""A gateway in front of the strict upstream, and clients for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, NamedTuple

from anthropic import Anthropic
from openai import OpenAI

from refold.config.config import load_config
from refold.serve.app import app_of
from refold.serve.service import Service
from refold.session.api import open
from refold.session.results import StoredMessage
from refold.session.session import Session
from refold.stores.store import Key, Store
from served import running
from upstream import Upstream

SMALL = {"window": 8_000, "max_output": 1_000}
MODELS = {"gpt-5": SMALL, "claude-sonnet-5": SMALL}


class Gate(NamedTuple):
    url: str
    upstream: Upstream
    service: Service

    @property
    def openai_url(self) -> str:
        return f"{self.url}/openai/v1"

    @property
    def anthropic_url(self) -> str:
        return f"{self.url}/anthropic"

    def openai(self, key: str = "sk-test", **how: Any) -> OpenAI:
        return OpenAI(base_url=self.openai_url, api_key=key, **{"max_retries": 0, "timeout": 30, **how})

    def anthropic(self, key: str = "sk-ant-test", **how: Any) -> Anthropic:
        return Anthropic(base_url=self.anthropic_url, api_key=key, **{"max_retries": 0, "timeout": 30, **how})

    def conversations(self) -> list[Key]:
        """Of all conversations, the oldest first."""
        return [one.key for one in self.service.store.conversations()][::-1]

    def session(self, key: Key) -> Session:
        return open(key.conversation, store=self.service.store, owner=key.owner)

    def said(self, key: Key | None = None) -> list[StoredMessage]:
        """In a conversation, or in the only one there is."""
        if key is None:
            (key,) = self.conversations()
        return self.session(key).get_all()

    def texts(self, key: Key | None = None) -> list[str]:
        return [one.message.text for one in self.said(key)]

    def bodies(self) -> list[Any]:
        return [one["body"] for one in self.upstream.seen()]


@contextmanager
def gate(
    store: Store, upstream: Upstream, *, config: dict[str, Any] | None = None, **serve: Any
) -> Iterator[Gate]:
    to = {"openai": upstream.openai, "anthropic": upstream.url}
    settings = load_config(
        {"models": MODELS, **(config or {}), "serve": {"port": 0, "upstreams": to, **serve}}
    )
    service = Service(settings, store)
    try:
        with running(app_of(service), settings, service) as (url, _):
            yield Gate(url, upstream, service)
    finally:
        service.close()


# Upstreams of a test's own


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(handler: type[Quiet], host: str = "127.0.0.1") -> Iterator[Any]:
    """An upstream of the test's own: its addresses."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True  # a client may keep its connection
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        url = f"http://{host}:{server.server_port}"
        try:
            yield SimpleNamespace(openai=f"{url}/v1", url=url)
        finally:
            server.shutdown()
            thread.join()
