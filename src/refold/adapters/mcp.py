"""For any MCP client: `refold mcp` serves an owner's conversations as tools and resources."""

import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from typing import Any
from urllib.parse import quote

import uvicorn
from anyio import to_thread
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import Resource, ToolAnnotations
from pydantic import ValidationError

from refold import __version__
from refold.adapters.mcp_format import capped, safe
from refold.adapters.mcp_handlers import Verbs
from refold.config.config import Config
from refold.core.errors import NotFoundError, RefoldError, SettingError
from refold.stores.store import Store

try:
    SDK: Any = import_module("mcp.server.mcpserver")
except ModuleNotFoundError:  # before 2.0
    SDK = import_module("mcp.server.fastmcp")
ERRORS: Any = import_module(f"{SDK.__name__}.exceptions")
IS_FIRST = hasattr(SDK, "FastMCP")

ERROR_CHARS = 2_000
GRACE_S = 2
"""For open streams to end in, when it is told to stop."""
CONVERSATIONS, JSON = "refold://conversations", "application/json"
INSTRUCTIONS = (
    "The record of what agents said, and the view of it that their model sees. A place, such as 57 or #57, is"
    " where a message or an edit stands in its conversation. Begin with list_conversations or search; expand"
    " shows what is hidden or was cut."
)
log = logging.getLogger(__name__)

READS = {"readOnlyHint": True, "openWorldHint": False}
ADDS = {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False}
TOOLS = {
    **dict.fromkeys(("list_conversations", "show_view", "expand", "search", "explain"), READS),
    **dict.fromkeys(("undo", "append"), ADDS),
}


class Server(SDK.FastMCP if IS_FIRST else SDK.MCPServer):  # type: ignore[misc]
    """The server of either SDK, whose tools fail in a sentence."""

    def __init__(self, verbs: Verbs) -> None:
        how: dict[str, Any] = {"instructions": INSTRUCTIONS, "log_level": "WARNING"}
        if not IS_FIRST:  # ids are no paths: any may be asked for
            anything = import_module(f"{SDK.__name__}.resources").ResourceSecurity(exempt_params={"id"})
            how |= {"version": __version__, "resource_security": anything}
        super().__init__("refold", **how)
        if IS_FIRST:  # which would tell its own
            self._mcp_server.version = __version__
        for name, hints in TOOLS.items():
            about = {"annotations": ToolAnnotations.model_validate(hints), "structured_output": False}
            self.add_tool(_awaited(getattr(verbs, name), ERRORS.ToolError, ERRORS.ToolError), **about)
        failed = ERRORS.ResourceError
        errors = (failed, getattr(ERRORS, "ResourceNotFoundError", failed))
        self._ids = _awaited(verbs.ids, *errors)
        ends: dict[str, Callable[..., str]] = {"": verbs.conversations, "/{id}": verbs.conversation}
        for end, verb in {**ends, "/{id}/view": verbs.view}.items():
            self.resource(f"{CONVERSATIONS}{end}", mime_type=JSON)(_awaited(verb, *errors))

    async def call_tool(self, name: str, arguments: dict[str, Any], *rest: Any) -> Any:
        known = signature(getattr(Verbs, name)).parameters if name in TOOLS else arguments
        try:
            if unknown := [one for one in arguments if one not in known]:
                allowed = ", ".join(one for one in known if one != "self")
                raise ERRORS.ToolError(f"{name} has no argument {unknown[0]!r}; it has {allowed}")
            return await super().call_tool(name, arguments, *rest)
        except ERRORS.ToolError as error:
            raise ERRORS.ToolError(_sentence(error.__cause__ or error)) from None

    async def read_resource(self, *args: Any) -> Any:
        try:
            return await super().read_resource(*args)
        except ValueError as error:  # before 2.0, with words of the SDK before ours
            raise ERRORS.ResourceError(str(error).rpartition("from template: ")[2]) from None

    async def list_resources(self) -> list[Any]:
        """With the newest conversations and their views."""
        listed = [_resource(id, end) for id in await self._ids() for end in ("", "/view")]
        return [*await super().list_resources(), *listed]


def _resource(id: str, end: str) -> Resource:
    uri = f"{CONVERSATIONS}/{quote(id, safe='', errors='replace')}{end}"
    return Resource.model_validate({"uri": uri, "name": safe(f"{id}{end}"), "mimeType": JSON})


def _awaited(
    verb: Callable[..., Any], failed: type[Exception], not_there: type[Exception]
) -> Callable[..., Awaitable[Any]]:
    """Does it in a thread, which is left alone when the request is canceled; fails as the SDK wants it."""

    @wraps(verb)
    async def run(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = await to_thread.run_sync(partial(verb, *args, **kwargs), abandon_on_cancel=True)
            return capped(safe(answer)) if isinstance(answer, str) else answer
        except NotFoundError as error:
            raise not_there(_sentence(error)) from None
        except Exception as error:
            if not isinstance(error, RefoldError):
                log.error("%s failed: %r", verb.__name__, error)
            raise failed(_sentence(error)) from None

    return run


def _sentence(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        return safe("; ".join(faults))[:ERROR_CHARS]
    is_ours = isinstance(error, RefoldError | ERRORS.ToolError)
    return safe(f"{error}" if is_ours else f"{type(error).__name__}: {error}")[:ERROR_CHARS]


def run(
    store: Store,
    *,
    owner: str = "default",
    config: Config | None = None,
    http: int | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serves on stdin and stdout, until that ends, or on a port of this machine, until SIGTERM or SIGINT.

    `tell` is given the address, once somebody listens there.

    Raises:
        SettingError: the port cannot be had.
    """
    server = Server(Verbs(store, owner, config or Config()))
    if http is None:
        server.run("stdio")
        return
    with _listening(http) as listener, suppress(KeyboardInterrupt):
        port = listener.getsockname()[1]
        how: dict[str, Any] = {"log_config": None, "access_log": False, "ws": "none"}
        app = uvicorn.Config(_app(server, port), **how, timeout_graceful_shutdown=GRACE_S)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # or else nobody would close the store
        tell(f"http://127.0.0.1:{port}/mcp")
        uvicorn.Server(app).run([listener])


def _app(server: Server, port: int) -> Any:
    """For requests that are meant for this address, and come from no other site."""
    hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=hosts,
        allowed_origins=[f"http://{host}" for host in hosts],
    )
    if not IS_FIRST:
        return server.streamable_http_app(transport_security=security)
    server.settings.transport_security = security
    return server.streamable_http_app()


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            why = f"port {port} cannot be used ({error.strerror}); name another, or 0 for any that is free"
            raise SettingError("--http", why) from error
        listener.listen()
        yield listener
