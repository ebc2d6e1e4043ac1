"""The guard in front of every route: host, origin, token, rate and size of a request."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from time import monotonic

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refold.config.serving import ServeSettings
from refold.serve.http_errors import error_body, has_control_characters, http_error, requested_id
from refold.serve.http_protocol import LINGER_S
from refold.serve.logs import METHODS, WITH_BODY, LoggedRequest
from refold.serve.metrics import Metrics
from refold.serve.tokens import ANONYMOUS, LOCAL_AGENT, LOCAL_USER, Caller, Tokens, require_scope

PUBLIC = ("/", "/healthz", "/panel")
"""Paths without any conversation behind them: the panel asks for its token itself."""
PROBES = ("/healthz", "/metrics")
"""Paths that are answered under overload too."""
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_CALLERS = 10_000
"""Callers whose requests are counted; the longest inactive one is forgotten first."""
_LOG = logging.getLogger("refold.serve")


class Guard:
    """ASGI middleware that passes on only requests that are allowed, and turns errors into responses.

    Routes find who sent a request in `request.state.caller`, and its body in `request.state.body`.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, tokens: Tokens, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._tokens = tokens
        self._metrics = metrics
        self._hosts = AllowedHosts(settings)
        self._rate = RateLimit(settings.limits.requests_per_s, settings.limits.burst)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = LoggedRequest(scope, send, self._metrics)
        has_unread_body = scope["method"] in WITH_BODY
        state = scope.setdefault("state", {})
        try:
            self._running += 1
            try:
                state["caller"] = self._check(scope, request)
                if has_unread_body:
                    state["body"] = await read_body(receive, request.headers, self._settings)
                    has_unread_body = False
                scope["app"] = self._app  # makes routes raise their errors instead of answering them
                await self._app(scope, receive, request.send)
            finally:
                self._running -= 1
        except ClientDisconnect:
            pass
        except Exception as error:
            if request.status:  # the response has begun: it can only be cut off
                request.has_failed = True
                raise
            request.is_refused = True
            refusal = http_error(error)
            if refusal.status_code >= 500 and refusal is not error:
                _LOG.error("a request failed with status %d", refusal.status_code, exc_info=error)
            await _refuse(refusal, request.send, receive, has_unread_body=has_unread_body)
        finally:
            request.end()

    def _check(self, scope: Scope, request: LoggedRequest) -> Caller:
        """Raises HTTPException if something about the request is not allowed."""
        path = request.path
        method = scope["method"]
        headers = request.headers
        self._hosts.check(headers, scope.get("server"))
        if method not in METHODS:
            raise HTTPException(405, f"{method[:20]} is not supported", {"allow": ", ".join(METHODS)})
        if "websocket" in headers.get("upgrade", "").lower():
            message = "websockets are not supported; send plain HTTP requests"
            raise HTTPException(426, message, {"upgrade": "HTTP/1.1", "connection": "close"})
        if has_control_characters(path):
            raise HTTPException(400, "the path contains a control character")
        if request.is_gateway and {".", ".."} & set(path.replace("\\", "/").split("/")):
            raise HTTPException(400, "a path of the gateway must not contain . or ..")
        requested_id(headers)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method in WITH_BODY and content_type != "application/json":
            raise HTTPException(415, "expected a body of content type application/json")
        caller = self._caller(request)
        if path not in PROBES:
            if self._running > self._settings.limits.requests:
                raise HTTPException(503, "too many requests at once; try again", {"retry-after": "1"})
            address = (scope.get("client") or ("",))[0]
            if wait_s := self._rate.wait_s(caller.owner or address, monotonic()):
                retry = {"retry-after": f"{int(wait_s) + 1}"}
                raise HTTPException(
                    429,
                    "too many requests from this caller; try again after the seconds in retry-after",
                    retry,
                )
        if request.is_gateway and not (method in ("GET", "HEAD") and "read" in caller.scopes):
            require_scope(caller, "append")
        return caller

    def _caller(self, request: LoggedRequest) -> Caller:
        """On the gateway, `Authorization` holds the key of the upstream."""
        if not self._tokens.are_needed:
            return LOCAL_AGENT if request.is_gateway else LOCAL_USER
        token = request.headers.get("x-refold-token")
        if token is None and not request.is_gateway:
            scheme, _, rest = request.headers.get("authorization", "").partition(" ")
            token = rest.strip() if scheme.lower() == "bearer" else None
        caller = None if token is None else self._tokens.caller_of(token)
        if caller is not None:
            return caller
        if request.path in PUBLIC or request.path.startswith("/panel/"):
            return ANONYMOUS
        problem = "a refold token is needed" if token is None else "this refold token is not valid"
        where = "x-refold-token" if request.is_gateway else "x-refold-token, or in Authorization as Bearer"
        message = f"{problem}; send one in {where}; `refold token` makes one"
        raise HTTPException(401, message, {"www-authenticate": "Bearer"})


class AllowedHosts:
    """Which `Host` and `Origin` headers are accepted: against DNS rebinding and foreign web pages.

    The service's own names are accepted on its own port; those in `serve.hosts` on the port given there, or
    without one on the default ports and the service's own.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._own = {"localhost", "127.0.0.1", "[::1]", _bracketed(settings.host.lower())}
        self._configured = {_normalized(host) for host in settings.hosts}

    def check(self, headers: Headers, server: tuple[str, int | None] | None) -> None:
        """`server` is the address that the request came to.

        Raises:
            HTTPException: the request is meant for another host, or comes from a page of another origin.
        """
        name, port = server or ("localhost", None)
        allowed = set(self._configured)
        for host in self._own | {_bracketed(name)}:
            allowed |= {host, f"{host}:{port}"}
        for host in self._configured:
            if not host.rpartition(":")[2].isdigit():
                allowed |= {f"{host}:{port}", *(f"{host}:{default}" for default in DEFAULT_PORTS.values())}
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _normalized(hosts[0]) not in allowed:
            raise HTTPException(403, "the Host header names an unknown host; add it to serve.hosts")
        for origin in headers.getlist("origin"):
            scheme, _, host = origin.partition("://")
            host = _normalized(host)
            if not host.rpartition(":")[2].isdigit():
                host = f"{host}:{DEFAULT_PORTS.get(scheme)}"
            if scheme not in DEFAULT_PORTS or host not in allowed:
                raise HTTPException(
                    403, "requests from pages of this origin are refused; add its host to serve.hosts"
                )


def _normalized(host: str) -> str:
    return host.lower().replace(".:", ":").removesuffix(".")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class RateLimit:
    """A token bucket for each caller."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: Hashable, now: float) -> float:
        """Counts a request and returns 0, or returns the seconds until one is allowed."""
        left, since = self._buckets.pop(caller, (float(self._burst), now))
        left = min(self._burst, left + (now - since) * self._per_s)
        is_allowed = left >= 1
        self._buckets[caller] = (left - 1 if is_allowed else left, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if is_allowed else (1 - left) / self._per_s


async def read_body(receive: Receive, headers: Headers, settings: ServeSettings) -> bytes:
    """
    Raises:
        HTTPException: the body is too large, or takes too long.
        ClientDisconnect: the client has gone.
    """
    limits = settings.limits
    max_bytes = round(settings.max_body_mb * 2**20)
    too_large = HTTPException(413, f"the body is larger than serve.max_body_mb, {settings.max_body_mb:g} MB")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length[:18]) > max_bytes:
        raise too_large
    body = bytearray()
    deadline = monotonic() + limits.body_s
    message: Message = {"more_body": True}
    while message.get("more_body"):
        try:
            async with asyncio.timeout(max(0.0, min(limits.body_idle_s, deadline - monotonic()))):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(
                408,
                f"the body took too long: at most {limits.body_idle_s:g} s may pass without a byte, and"
                f" {limits.body_s:g} s in all",
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def _refuse(refusal: HTTPException, send: Send, receive: Receive, *, has_unread_body: bool) -> None:
    headers = dict(refusal.headers or {})
    if has_unread_body:
        headers.setdefault("connection", "close")
    content = error_body(refusal.status_code, refusal.detail)
    response = Response(content, refusal.status_code, headers, "application/json")
    status = response.status_code
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    # Some of it is discarded: were the connection closed at once, a reset would cost the response.
    if has_unread_body:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
    await send({"type": "http.response.body"})
