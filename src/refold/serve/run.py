"""Starts and stops the service."""

import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from refold.config.config import Config, Source, load_config
from refold.config.serving import Limits
from refold.core.errors import SettingError
from refold.serve import logs
from refold.serve.app import app_of
from refold.serve.http_protocol import protocol_with
from refold.serve.service import Service
from refold.serve.tokens import Tokens
from refold.session.api import DEFAULT_STORE
from refold.stores.store import Store, open_store

BACKLOG = 2_048
SWITCH_S = 0.0005
"""Threads take turns this often, so that requests wait less for each other."""
COLLECT = (500, 2, 1_000)
"""Thresholds of the garbage collector: young objects in small batches, since all threads wait meanwhile, and
old ones every few thousand requests, since next to nothing is found among them.
"""
MAX_OPEN_FILES = 65_536


def run(
    store: str | Store | None = None,
    *,
    config: Source = None,
    summarizer: Any = None,
    embedder: Any = None,
    log_level: str = "info",
    tell: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT. `tell` is given the address once the service listens.

    Raises:
        SettingError: a setting is not safe, or the port is taken.
        StoreError: the store cannot be used.
    """
    settings = load_config(config)
    check_safe(settings)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)
    tokens = Tokens(settings, config)
    opened = store if store is not None else settings.store or DEFAULT_STORE
    with listening(settings) as listener:
        backend = open_store(opened) if isinstance(opened, str) else opened
        service = Service(settings, backend, summarizer=summarizer, embedder=embedder)
        try:
            logs.configure(log_level, [settings.serve.token] if settings.serve.token else [])
            server = GracefulServer(app_of(service, tokens), settings.serve.limits, service, tokens)
            tell(url_of(listener))
            server.run([listener])
        finally:
            service.close()


class GracefulServer(uvicorn.Server):
    """Told to stop, it accepts no more and gives running requests `grace_s`; told again, it ends at once."""

    def __init__(
        self, app: ASGIApp, limits: Limits, service: Service | None = None, tokens: Tokens | None = None
    ) -> None:
        """`tokens` are read again at SIGHUP."""
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            http=protocol_with(limits),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=limits.grace_s,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._service = service
        self._tokens = tokens

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self._stop) for one in (signal.SIGTERM, signal.SIGINT)}
        tokens = self._tokens
        if tokens is not None and hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: tokens.reload())
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _stop(self, *_: object) -> None:
        self.should_exit = True
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)  # the next one ends the process

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service is not None:
            self._service.events.close()  # these responses would go on forever
        await super().shutdown(sockets)
        if self._service is not None:
            await self._service.upstream.close()


def check_safe(config: Config) -> None:
    """Raises SettingError if anyone could use the service, or API keys would be sent unencrypted."""
    serve = config.serve
    has_tokens = serve.token is not None or bool(serve.tokens)
    if not has_tokens and not is_loopback(serve.host):
        raise SettingError(
            config.place("serve", "host"),
            f"{serve.host} can be reached from other machines, and no token is set: `refold token` makes"
            " one; or listen on 127.0.0.1",
        )
    for name in ("openai", "anthropic"):
        if problem := _upstream_problem(getattr(serve.upstreams, name), serve.allow_insecure_upstreams):
            raise SettingError(config.place("serve", "upstreams", name), problem)


def _upstream_problem(url: str, allow_insecure: bool) -> str:
    """Why a base URL is not safe; empty if it is."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # raises if the port is not a number
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        return "expected an address such as https://host/v1"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user or a password; clients send their own keys"
    if parts.scheme == "http" and not (allow_insecure or is_loopback(parts.hostname or "")):
        return "would send API keys without encryption; use https, or set serve.allow_insecure_upstreams"
    return ""


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


@contextmanager
def listening(config: Config) -> Iterator[socket.socket]:
    """A socket that listens on the configured address.

    Raises:
        SettingError: the address cannot be used.
    """
    host = config.serve.host
    port = config.serve.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        message = f"cannot listen on {host}:{port} ({error}); choose another --host or --port, 0 for any port"
        raise SettingError(config.place("serve", "port"), message) from error
    with listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        with suppress(ImportError, OSError, ValueError):  # many systems allow 1,024 open files at first
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
        yield listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
