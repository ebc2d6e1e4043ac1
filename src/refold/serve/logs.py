"""What is logged: one line of JSON each, without secrets."""

import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from refold.serve.redact import redacted
from refold.serve.upstream import UpstreamError

OURS = ("refold", "uvicorn")
"""Whose lines are wanted at the level that is asked for; of others, only warnings."""
LONGEST = 8_000
"""Characters of a message, or of the end of a traceback."""


class Wanted(logging.Filter):
    """All but what was told already: an answer is cut off so that the client learns what an upstream did."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], UpstreamError))


class Lines(logging.Formatter):
    """`known` are secrets of the configuration, which are hidden wherever they turn up."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        super().__init__()
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        row: dict[str, Any] = {"time": time, "level": record.levelname.lower()}
        row |= {"from": record.name, "message": record.getMessage()[:LONGEST], **getattr(record, "facts", {})}
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)[-LONGEST:]
        line = msgspec.json.encode(row, enc_hook=str).decode()
        return redacted(line, self._known)


def begin(level: str, known: Sequence[str] = (), to: TextIO | None = None) -> None:
    """From now on all that this process logs goes there, to stderr unless told otherwise."""
    handler = logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(Lines(known))
    handler.addFilter(Wanted())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(level.upper())
