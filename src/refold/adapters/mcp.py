"""The MCP server: `refold mcp` serves an owner's conversations as tools and resources."""

import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
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
from refold.adapters.mcp_tools import Tools, escape_surrogates, truncate
from refold.config.config import Config
from refold.core.errors import NotFoundError, RefoldError, SettingError
from refold.stores.store import Store

try:
    SDK: Any = import_module("mcp.server.mcpserver")
except ModuleNotFoundError:  # before 2.0
    SDK = import_module("mcp.server.fastmcp")
ERRORS: Any = import_module(f"{SDK.__name__}.exceptions")
IS_SDK_1 = hasattr(SDK, "FastMCP")

ERROR_CHARS = 2_000
SHUTDOWN_S = 2
CONVERSATIONS = "refold://conversations"
JSON = "application/json"
INSTRUCTIONS = (
    "The recorded messages of agents, and the view of them that the model sees. A place, such as 57 or #57,"
    " is the position of a message or an edit in its conversation. Start with list_conversations or search;"
    " expand returns the text of what is hidden or was cut."
)
log = logging.getLogger(__name__)

READS = {"readOnlyHint": True, "openWorldHint": False}
ADDS = {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False}
TOOLS = {
    **dict.fromkeys(("list_conversations", "show_view", "expand", "search", "explain"), READS),
    **dict.fromkeys(("undo", "append"), ADDS),
}


class McpServer(SDK.FastMCP if IS_SDK_1 else SDK.MCPServer):  # type: ignore[misc]
    """Works with SDK 1 and 2; a tool that fails answers with one sentence."""

    def __init__(self, tools: Tools) -> None:
        options: dict[str, Any] = {"instructions": INSTRUCTIONS, "log_level": "WARNING"}
        if not IS_SDK_1:  # an id is not a path: any text is safe
            security = import_module(f"{SDK.__name__}.resources").ResourceSecurity(exempt_params={"id"})
            options |= {"version": __version__, "resource_security": security}
        super().__init__("refold", **options)
        if IS_SDK_1:  # which would report its own version
            self._mcp_server.version = __version__
        for name, hints in TOOLS.items():
            annotations = ToolAnnotations.model_validate(hints)
            run = _in_thread(getattr(tools, name), ERRORS.ToolError, ERRORS.ToolError)
            self.add_tool(run, annotations=annotations, structured_output=False)
        failed = ERRORS.ResourceError
        errors = (failed, getattr(ERRORS, "ResourceNotFoundError", failed))
        self._ids = _in_thread(tools.ids, *errors)
        resources: dict[str, Callable[..., str]] = {
            "": tools.conversations,
            "/{id}": tools.conversation,
            "/{id}/view": tools.view,
        }
        for path, read in resources.items():
            self.resource(f"{CONVERSATIONS}{path}", mime_type=JSON)(_in_thread(read, *errors))

    async def call_tool(self, name: str, arguments: dict[str, Any], *rest: Any) -> Any:
        known = signature(getattr(Tools, name)).parameters if name in TOOLS else arguments
        try:
            if unknown := [one for one in arguments if one not in known]:
                allowed = ", ".join(one for one in known if one != "self")
                raise ERRORS.ToolError(f"{name} has no argument {unknown[0]!r}; its arguments are {allowed}")
            return await super().call_tool(name, arguments, *rest)
        except ERRORS.ToolError as error:
            raise ERRORS.ToolError(_sentence(error.__cause__ or error)) from None

    async def read_resource(self, *args: Any) -> Any:
        try:
            return await super().read_resource(*args)
        except ValueError as error:  # SDK 1 puts its own text before ours
            raise ERRORS.ResourceError(str(error).rpartition("from template: ")[2]) from None

    async def list_resources(self) -> list[Any]:
        """The resources, with the newest conversations and their views."""
        listed = [_resource(id, end) for id in await self._ids() for end in ("", "/view")]
        return [*await super().list_resources(), *listed]


def _resource(id: str, end: str) -> Resource:
    uri = f"{CONVERSATIONS}/{quote(id, safe='', errors='replace')}{end}"
    return Resource.model_validate({"uri": uri, "name": escape_surrogates(f"{id}{end}"), "mimeType": JSON})


def _in_thread(
    function: Callable[..., Any], failed: type[Exception], not_found: type[Exception]
) -> Callable[..., Awaitable[Any]]:
    """Runs a function in a thread, which goes on if the request is canceled; raises the SDK's errors."""

    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = await to_thread.run_sync(partial(function, *args, **kwargs), abandon_on_cancel=True)
            return truncate(escape_surrogates(answer)) if isinstance(answer, str) else answer
        except NotFoundError as error:
            raise not_found(_sentence(error)) from None
        except Exception as error:
            if not isinstance(error, RefoldError):
                log.error("%s failed: %r", function.__name__, error)
            raise failed(_sentence(error)) from None

    return run


def _sentence(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        return escape_surrogates("; ".join(faults))[:ERROR_CHARS]
    is_ours = isinstance(error, RefoldError | ERRORS.ToolError)
    return escape_surrogates(f"{error}" if is_ours else f"{type(error).__name__}: {error}")[:ERROR_CHARS]


def run(
    store: Store,
    *,
    owner: str = "default",
    config: Config | None = None,
    http: int | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serves on stdin and stdout until they are closed, or on a local port until SIGTERM or SIGINT.

    `tell` is called with the address once the server listens.

    Raises:
        SettingError: the port cannot be used.
    """
    server = McpServer(Tools(store, owner, config or Config()))
    if http is None:
        server.run("stdio")
        return
    try:
        listener = socket.create_server(("127.0.0.1", http))
    except OSError as error:
        why = f"port {http} cannot be used ({error.strerror}); name another one, or 0 for any free port"
        raise SettingError("--http", why) from error
    with listener, suppress(KeyboardInterrupt):
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"log_config": None, "access_log": False, "ws": "none"}
        app = uvicorn.Config(_app(server, port), **options, timeout_graceful_shutdown=SHUTDOWN_S)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the store is closed
        tell(f"http://127.0.0.1:{port}/mcp")
        uvicorn.Server(app).run([listener])


def _app(server: McpServer, port: int) -> Any:
    """Accepts requests to this address only, and none from other sites."""
    hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=hosts,
        allowed_origins=[f"http://{host}" for host in hosts],
    )
    if not IS_SDK_1:
        return server.streamable_http_app(transport_security=security)
    server.settings.transport_security = security
    return server.streamable_http_app()
