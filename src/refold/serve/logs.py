"""Logs in JSON without secrets; the line, the metrics and the security headers of each request."""

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TextIO
from uuid import uuid4

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from refold.serve.metrics import Metrics
from refold.serve.tokens import ANONYMOUS
from refold.serve.upstream import OWN_PREFIX, UpstreamError

OWN_LOGGERS = ("refold", "uvicorn")
"""Log at the configured level; all others only warnings."""
MAX_CHARS = 8_000
"""Of a message, or of the end of a traceback."""
GATEWAY = ("/openai/", "/anthropic/")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
WITH_BODY = ("POST", "PUT", "PATCH")
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
HIDDEN = "***"
_NAMES = "authorization|x-api-key|x-refold-token|api[-_]?key|access[-_]?key|password|passwd|secret|token"
_PATTERNS = (
    r"(?P<scheme>://[^\s/@:\"']*:)[^\s/@\"']+(?=@)",  # the password of a URL
    r"(?i:(?P<bearer>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,})",
    r"(?P<known>\b(?:sk|pk|rk|rft|ghp|gho|ghs|ghu|github_pat|glpat|hf|xox[abeprs]|AIza|AKIA|ASIA)[-_]?)"
    r"(?=[\w-]{0,99}\d)[\w-]{12,}",
    r"\beyJ[\w-]{8,999}\.[\w-]{8,}(?:\.[\w-]*)?",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*",
    rf"(?i:(?P<named>(?:{_NAMES})\\*[\"']?\s*[:=]\s*(?:bearer\s+|basic\s+)?\\*[\"']?)[^\s\"'\\,;&}})]{{3,}})",
)
_SECRET = re.compile("|".join(_PATTERNS))
"""Takes linear time on any text."""
_LOG = logging.getLogger("refold.request")


# Secrets


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The text with `***` for `secrets` and for whatever looks like a key, a token or a password.

    >>> redacted("Authorization: Bearer sk-ant-0123456789abcdef at https://me:word@host")
    'Authorization: Bearer *** at https://me:***@host'
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _SECRET.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    before = found[found.lastgroup] if found.lastgroup else ""
    return f"{before}{HIDDEN}"


# Lines


class JSONFormatter(logging.Formatter):
    """Hides `secrets`, those of the configuration, wherever they appear."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "from": record.name,
            "message": record.getMessage()[:MAX_CHARS],
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)[-MAX_CHARS:]
        return redacted(msgspec.json.encode(row, enc_hook=str).decode(), self._secrets)


def configure(level: str, secrets: Sequence[str] = (), to: TextIO | None = None) -> None:
    """Sends everything that this process logs to one stream, stderr by default."""
    handler = logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(JSONFormatter(secrets))
    handler.addFilter(_is_new)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        logger.setLevel(level.upper())


def _is_new(record: logging.LogRecord) -> bool:
    """False for an upstream's failure: it was logged before it was raised to close the connection."""
    return not (record.exc_info and isinstance(record.exc_info[1], UpstreamError))


# Requests


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
        """Sends a part of the response to the client.

        An upstream's response keeps its headers, unless it is a page: that must not act in our name.
        """
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            content_type = headers.get("content-type", "")
            self.status = message["status"]
            self._is_stream = content_type.startswith("text/event-stream")
            if self._is_stream:
                self._metrics.open_streams.inc()
            for name, value in headers.items():
                if name.startswith(OWN_PREFIX):
                    self._response_facts[name.removeprefix(OWN_PREFIX).replace("-", "_")] = value
            if not self.is_gateway:
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["x-request-id"] = self._id
                headers.setdefault("cache-control", "no-store")
            elif not content_type.startswith(("application/json", "text/event-stream")):
                headers.update(HEADERS)
        await self._send(message)

    def end(self) -> None:
        """Logs and counts the request: by its route, since the rest of a path may contain anything."""
        metrics = self._metrics
        seconds = monotonic() - self._started_at
        route = getattr(self._scope.get("route"), "path", None) or "none"
        method = self._scope["method"] if self._scope["method"] in METHODS else "other"
        metrics.requests.labels(route, method, self.status).inc()
        if self._is_stream:
            metrics.open_streams.dec()
        else:
            metrics.request_seconds.labels(route).observe(seconds)
        if self.is_refused:
            metrics.refusals.labels(self.status).inc()
        elif self.is_gateway and (self.status >= 400 or self.has_failed):
            status = "cut" if self.has_failed else self.status
            metrics.upstream_errors.labels(self.path.split("/")[1], status).inc()
        if "bypass" in self._response_facts:
            metrics.bypasses.inc()
        if "tokens_sent" in self._response_facts:
            before = int(self._response_facts["tokens_before"])
            sent = int(self._response_facts["tokens_sent"])
            metrics.tokens_before.inc(before)
            metrics.tokens_sent.inc(sent)
            metrics.tokens_saved.inc(max(0, before - sent))

        facts: dict[str, Any] = {
            "id": self._id,
            "method": method,
            "route": route,
            "status": self.status,
            "ms": round(seconds * 1_000, 1),
            "owner": self._scope.get("state", {}).get("caller", ANONYMOUS).owner,
            **self._response_facts,
        }
        if "id" in self._scope.get("path_params", {}):
            facts["conversation"] = self._scope["path_params"]["id"]
        for name in LOGGED_REQUEST_HEADERS:
            if name in self.headers:
                facts[name] = self.headers[name][:200]
        _LOG.info("request", extra={"facts": facts})
