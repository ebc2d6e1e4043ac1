"""Security headers, the access log and metrics of each request."""

import logging
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from refold.serve.metrics import Metrics
from refold.serve.tokens import ANONYMOUS

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
LOGGED_REQUEST_HEADERS = ("user-agent", "content-length")
LOGGED_RESPONSE_HEADERS = {
    "x-refold-conversation": "conversation",
    "x-refold-tokens-before": "tokens_before",
    "x-refold-tokens-sent": "tokens_sent",
    "x-refold-bypass": "bypass",
}
"""Each with its name in the log."""
_LOG = logging.getLogger("refold.request")


class LoggedRequest:
    """A request on its way through the service; logged and counted by `end`."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self.headers = Headers(scope=scope)
        self.path = str(scope["path"])
        self.is_gateway = self.path.startswith(GATEWAY)
        self.is_refused = False
        self.has_failed = False
        self.status = 0
        """Of the response; 0 until it has begun."""
        self._id = uuid4().hex
        self._started_at = monotonic()
        self._response_facts: dict[str, str] = {}
        self._is_stream = False

    async def send(self, message: Message) -> None:
        """Sends a part of the response to the client."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            content_type = headers.get("content-type", "")
            self.status = message["status"]
            self._is_stream = content_type.startswith("text/event-stream")
            for header, name in LOGGED_RESPONSE_HEADERS.items():
                if header in headers:
                    self._response_facts[name] = headers[header]
            if self._is_stream:
                self._metrics.open_streams.inc()
            self._add_headers(headers, content_type)
        await self._send(message)

    def _add_headers(self, headers: MutableHeaders, content_type: str) -> None:
        """An upstream's response keeps its headers, unless it is a page: that must not act in our name."""
        if self.is_gateway:
            if not content_type.startswith(("application/json", "text/event-stream")):
                headers.update(HEADERS)
            return
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        headers["x-request-id"] = self._id
        headers.setdefault("cache-control", "no-store")

    def end(self) -> None:
        """Logs and counts the request: by its route, since the rest of a path may contain anything."""
        seconds = monotonic() - self._started_at
        if self._is_stream:
            self._metrics.open_streams.dec()
        route = getattr(self._scope.get("route"), "path", None) or "none"
        method = self._scope["method"] if self._scope["method"] in METHODS else "other"
        self._count(route, method, seconds)
        caller = self._scope.get("state", {}).get("caller", ANONYMOUS)
        facts: dict[str, Any] = {
            "id": self._id,
            "method": method,
            "route": route,
            "status": self.status,
            "ms": round(seconds * 1_000, 1),
            "owner": caller.owner,
            **self._response_facts,
        }
        path_params = self._scope.get("path_params", {})
        if "id" in path_params:
            facts["conversation"] = path_params["id"]
        for name in LOGGED_REQUEST_HEADERS:
            if name in self.headers:
                facts[name] = self.headers[name][:200]
        _LOG.info("request", extra={"facts": facts})

    def _count(self, route: str, method: str, seconds: float) -> None:
        metrics = self._metrics
        metrics.requests.labels(route, method, self.status).inc()
        if not self._is_stream:
            metrics.request_seconds.labels(route).observe(seconds)
        if self.is_refused:
            metrics.refusals.labels(self.status).inc()
        elif self.is_gateway and (self.status >= 400 or self.has_failed):
            status = "cut" if self.has_failed else self.status
            metrics.upstream_errors.labels(self.path.split("/")[1], status).inc()
        if "bypass" in self._response_facts:
            metrics.bypasses.inc()
        before = self._response_facts.get("tokens_before", "")
        sent = self._response_facts.get("tokens_sent", "")
        if before.isdigit() and sent.isdigit():
            metrics.tokens_before.inc(int(before))
            metrics.tokens_sent.inc(int(sent))
            metrics.tokens_saved.inc(max(0, int(before) - int(sent)))
