"""Starts the service and stops it again."""

import gc
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from refold.config.config import Config, Source, load_config
from refold.config.serving import Limits
from refold.core.errors import SettingError
from refold.serve import logs
from refold.serve.app import app_of
from refold.serve.http_protocol import wire_of
from refold.serve.service import Service
from refold.serve.tokens import Tokens
from refold.session.api import DEFAULT_STORE
from refold.stores.store import Store, open_store

BACKLOG = 2_048
SWITCH_S = 0.0005
"""For which one thread keeps others from running: requests wait for each other in turns."""
COLLECT = (500, 2, 1_000)
"""How often what nobody needs any more is looked for, among what is new, older and old: what is new in small
bites, since everybody waits meanwhile, and all of it seldom, since next to nothing is found there: every few
thousand requests.
"""
FILES = 65_536
"""Sockets and files that a process may have open, where the system allows it."""


def run(
    store: str | Store | None = None,
    *,
    config: Source = None,
    summarizer: Any = None,
    embedder: Any = None,
    log_level: str = "info",
    tell: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT. `tell` is given the address, once somebody listens there.

    Raises:
        SettingError: a setting is not safe, or the port is taken.
        StoreError: the store cannot be used.
    """
    settings = load_config(config)
    demand_safe(settings)
    _ready()
    tokens = Tokens(settings, files_of(config), lambda: load_config(config))
    opened = store if store is not None else settings.store or DEFAULT_STORE
    with listening(settings) as listener:
        backend = open_store(opened) if isinstance(opened, str) else opened
        service = Service(settings, backend, summarizer=summarizer, embedder=embedder)
        try:
            logs.begin(log_level, [one for one in (settings.serve.token,) if one])
            server = Server(app_of(service, tokens), settings.serve.limits)
            server.on_stop, server.on_end = service.hub.close, service.finish
            server.on_hangup = tokens.read_again
            tell(url_of(listener))
            server.run([listener])
        finally:
            service.close()


class Server(uvicorn.Server):
    """Told to stop, it takes no more, ends what it is at within the grace time, and ends at once when told
    again.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        how: dict[str, Any] = {"lifespan": "off", "ws": "none", "http": wire_of(limits), "log_config": None}
        how |= {"access_log": False, "proxy_headers": False, "server_header": False, "backlog": BACKLOG}
        how |= {"timeout_keep_alive": limits.idle_s, "timeout_graceful_shutdown": limits.grace_s}
        super().__init__(uvicorn.Config(app, **how))
        self.on_stop: Callable[[], None] | None = None
        """Called when it takes no more: what would go on for ever is ended here."""
        self.on_end: Callable[[], Awaitable[None]] | None = None
        """Awaited when all answers have ended."""
        self.on_hangup: Callable[[], None] | None = None
        """Called at SIGHUP, which ends nothing."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self._stop) for one in (signal.SIGTERM, signal.SIGINT)}
        if hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: _call(self.on_hangup))
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _stop(self, *_: object) -> None:
        self.should_exit = True
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)  # the next one ends the process, whatever it is at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        _call(self.on_stop)
        await super().shutdown(sockets)
        if self.on_end is not None:
            await self.on_end()


def _call(what: Callable[[], None] | None) -> None:
    if what is not None:
        what()


def _ready() -> None:
    """Everybody waits while all objects are looked through: that is done less often, and not for modules."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)


def demand_safe(config: Config) -> None:
    """
    Raises:
        SettingError: anybody could come in, or what is sent upstream could be read on its way.
    """
    serve = config.serve
    is_open = serve.token is None and not serve.tokens
    if is_open and not is_loopback(serve.host):
        raise SettingError(
            config.place("serve", "host"),
            f"{serve.host} can be reached from other machines, and there is no token: `refold token` makes"
            " one; or listen on 127.0.0.1",
        )
    for name in ("openai", "anthropic"):
        place, url = config.place("serve", "upstreams", name), getattr(serve.upstreams, name)
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise SettingError(place, "is no address such as https://host/v1") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise SettingError(place, "expected an address such as https://host/v1")
        if parts.username is not None or parts.password is not None:
            raise SettingError(place, "has a user or a password in it; keys are the clients'")
        if parts.scheme == "http" and not (serve.allow_insecure_upstreams or is_loopback(host)):
            raise SettingError(
                place, "keys would be sent unencrypted; use https, or set serve.allow_insecure_upstreams"
            )


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


def files_of(config: Source) -> Sequence[Path]:
    several = config if isinstance(config, list | tuple) else [config]
    return [Path(one) for one in several if isinstance(one, str | Path)]


@contextmanager
def listening(config: Config) -> Iterator[socket.socket]:
    """A socket at the address that is set.

    Raises:
        SettingError: it cannot be had.
    """
    host, port = config.serve.host, config.serve.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)  # or else asyncio would not know it is TCP
    except OSError as error:
        raise SettingError(config.place("serve", "host"), f"{host} cannot be used: {error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            why = f"{host}:{port} cannot be used ({error.strerror}); --port names another, 0 takes any"
            raise SettingError(config.place("serve", "port"), why) from error
        more_files()
        yield listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def more_files() -> None:
    """Every connection is a file, and many systems begin with 1,024."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
