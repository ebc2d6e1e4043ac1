"""Logs: one JSON object per line, without secrets."""

import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from refold.serve.redact import redacted
from refold.serve.upstream import UpstreamError

OWN_LOGGERS = ("refold", "uvicorn")
"""Log at the configured level; all others only warnings."""
MAX_CHARS = 8_000
"""Of a message, or of the end of a traceback."""


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
