"""What stands before every route: who may come in, and with what."""

import logging
from time import monotonic

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from refold.config.serving import ServeSettings
from refold.core.errors import RefoldError
from refold.serve.access_log import METHODS, Exchange
from refold.serve.caller import AGENT, LOCAL, NOBODY, Caller
from refold.serve.hosts import Hosts
from refold.serve.http_errors import (
    Refused,
    asked_id,
    conversation_id,
    demand,
    has_control,
    problem,
    refusal_of,
)
from refold.serve.limits import Body, Rate, body_of
from refold.serve.metrics import Metrics
from refold.serve.tokens import Tokens

__all__ = ["Guard", "Refused", "asked_id", "body_of", "conversation_id", "demand", "problem"]

OPEN = ("/", "/healthz", "/panel")
"""Nothing that anybody said is behind these: a panel asks for its token itself."""
PROBES = ("/healthz", "/metrics")
"""Answered also when all others are too many."""
WITH_BODY = ("POST", "PUT", "PATCH")
_LOG = logging.getLogger("refold.serve")


class Guard:
    """An ASGI application around another, which gets only what has passed `_demand`."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, tokens: Tokens, metrics: Metrics) -> None:
        self._app, self._settings, self._tokens, self._metrics = app, settings, tokens, metrics
        self._hosts = Hosts(settings)
        self._rate = Rate(settings.limits.requests_per_s, settings.limits.burst)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, send, self._metrics)
        self._running += 1
        body: Body | None = None
        try:
            body = self._demand(scope, exchange, receive)
            scope["app"] = self._app  # so that what routes refuse comes here too
            await self._app(scope, body.receive, exchange.send)
        except ClientDisconnect:
            pass
        except Exception as error:
            if exchange.status:  # the answer has begun: all that is left is to cut it off
                exchange.has_failed = True
                raise
            exchange.is_refused = True
            refused = _refusal_of(error)
            if scope["method"] in WITH_BODY and not (body and body.is_whole):
                refused.headers.setdefault("connection", "close")  # nobody reads what still comes
            await problem(refused.status, refused.message, refused.headers)(scope, receive, exchange.send)
        finally:
            self._running -= 1
            exchange.end()

    def _demand(self, scope: Scope, exchange: Exchange, receive: Receive) -> Body:
        """
        Raises:
            Refused: something about the request is not allowed.
        """
        path, method, headers = exchange.path, scope["method"], exchange.headers
        self._hosts.demand(headers, scope.get("server"))
        if method not in METHODS:
            raise Refused(405, f"{method[:20]} is not known here", {"allow": ", ".join(METHODS)})
        if "websocket" in headers.get("upgrade", "").lower():
            why = "there are no websockets here; live events are at /api/events"
            raise Refused(400, why, {"connection": "close"})
        if has_control(path):
            raise Refused(400, "there is a control character in the path")
        if exchange.is_gateway and {".", ".."} & set(path.split("/")):
            raise Refused(400, "a path to an upstream has no steps up or down")
        asked_id(headers)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method in WITH_BODY and kind != "application/json":
            raise Refused(415, "expected a body of the content type application/json")
        caller = scope.setdefault("state", {})["caller"] = self._caller(exchange, headers)
        if path not in PROBES:
            self._demand_room(caller, scope)
        if exchange.is_gateway and not (method in ("GET", "HEAD") and "read" in caller.scopes):
            demand(caller, "append")
        body = Body(receive, self._settings)
        body.demand_length(headers.get("content-length"))
        return body

    def _caller(self, exchange: Exchange, headers: Headers) -> Caller:
        """On the gateway, `Authorization` has the upstream's key."""
        if not self._tokens.are_needed:
            return AGENT if exchange.is_gateway else LOCAL
        given = headers.get("x-refold-token")
        if given is None and not exchange.is_gateway:
            scheme, _, rest = headers.get("authorization", "").partition(" ")
            given = rest.strip() if scheme.lower() == "bearer" else None
        caller = None if given is None else self._tokens.caller_of(given)
        if caller is not None:
            return caller
        if exchange.path in OPEN or exchange.path.startswith("/panel/"):
            return NOBODY
        where = "x-refold-token" if exchange.is_gateway else "Authorization (as Bearer) or x-refold-token"
        why = "is not known" if given is not None else f"is needed, in {where}"
        raise Refused(401, f"a refold token {why}; `refold token` makes one", {"www-authenticate": "Bearer"})

    def _demand_room(self, caller: Caller, scope: Scope) -> None:
        if self._running > self._settings.limits.requests:
            raise Refused(503, "there are too many requests at once; try again", {"retry-after": "1"})
        address = (scope.get("client") or ("",))[0]
        if wait_s := self._rate.wait_s(caller.owner or address, monotonic()):
            raise Refused(
                429, "these are too many requests; slow down", {"retry-after": f"{int(wait_s) + 1}"}
            )


def _refusal_of(error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case HTTPException(status_code=status, detail=detail, headers=headers):
            return Refused(status, detail, headers)
        case RefoldError():
            refused = refusal_of(error)
        case _:
            refused = Refused(500, "something went wrong here; the log says what")
    if refused.status >= 500:
        _LOG.error("a request failed", exc_info=error)
    return refused
