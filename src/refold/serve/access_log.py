"""One request and its answer, as far as headers, log and counts are concerned."""

import logging
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from refold.serve.caller import NOBODY
from refold.serve.metrics import Metrics

GATEWAY = ("/openai/", "/anthropic/")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
LOGGED = ("user-agent", "content-length")
"""The only headers of a request that are logged."""
TOLD = {
    "x-refold-conversation": "conversation",
    "x-refold-tokens-before": "tokens_before",
    "x-refold-tokens-sent": "tokens_sent",
    "x-refold-bypass": "bypass",
}
"""Headers of an answer that are logged, and what they are called there."""
_LOG = logging.getLogger("refold.request")


class Exchange:
    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self._scope, self._send, self._metrics = scope, send, metrics
        self.headers, self.path = Headers(scope=scope), str(scope["path"])
        self.is_gateway = self.path.startswith(GATEWAY)
        self.is_refused = self.has_failed = False
        self.status = 0
        """Of the answer, once it has begun."""
        self._id, self._begun = uuid4().hex, monotonic()
        self._told, self._is_stream = dict[str, str](), False

    async def send(self, message: Message) -> None:
        """The way out for all answers."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            kind = headers.get("content-type", "")
            self.status, self._is_stream = message["status"], kind.startswith("text/event-stream")
            self._told = {name: headers[header] for header, name in TOLD.items() if header in headers}
            self._metrics.streams += self._is_stream
            self._dress(headers, kind)
        await self._send(message)

    def _dress(self, headers: MutableHeaders, kind: str) -> None:
        """An upstream's answers go out as they are, but a page of its must not act in our name."""
        if self.is_gateway:
            headers.update({} if kind.startswith(("application/json", "text/event-stream")) else HEADERS)
            return
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        headers["x-request-id"] = self._id
        headers.setdefault("cache-control", "no-store")

    def end(self) -> None:
        """Of a path only the route is counted and logged: there may be anything in the rest."""
        seconds = monotonic() - self._begun
        self._metrics.streams -= self._is_stream
        route = getattr(self._scope.get("route"), "path", None) or "none"
        method = self._scope["method"] if self._scope["method"] in METHODS else "other"
        self._count(route, method, seconds)
        caller, named = self._scope.get("state", {}).get("caller", NOBODY), self._scope.get("path_params", {})
        facts: dict[str, Any] = {"id": self._id, "method": method, "route": route, "status": self.status}
        facts |= {"ms": round(seconds * 1_000, 1), "owner": caller.owner, **self._told}
        facts |= {"conversation": named["id"]} if "id" in named else {}
        facts |= {name: self.headers[name][:200] for name in LOGGED if name in self.headers}
        _LOG.info("request", extra={"facts": facts})

    def _count(self, route: str, method: str, seconds: float) -> None:
        count, told = self._metrics.count, self._told
        count("requests", route=route, method=method, status=self.status)
        if not self._is_stream:
            self._metrics.observe("request_seconds", seconds, route=route)
        if self.is_refused:
            count("refusals", status=self.status)
        elif self.is_gateway and (self.status >= 400 or self.has_failed):
            kind = "cut" if self.has_failed else self.status
            count("upstream_errors", upstream=self.path.split("/")[1], status=kind)
        if "bypass" in told:
            count("bypasses")
        before, sent = told.get("tokens_before", ""), told.get("tokens_sent", "")
        if before.isdigit() and sent.isdigit():
            count("tokens_before", int(before))
            count("tokens_sent", int(sent))
            count("tokens_saved", max(0, int(before) - int(sent)))
