"""Errors as HTTP responses: `{"error": {"code", "message"}}`, without secrets and without internals."""

import re
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from refold.core.errors import (
    ConflictError,
    MessageError,
    NotFoundError,
    OverBudgetError,
    RefoldError,
    SettingError,
    StoreError,
)
from refold.serve.logs import redacted

MAX_ID_CHARS = 500
MAX_MESSAGE_CHARS = 2_000
"""A message may quote what was sent."""


class ErrorKind(NamedTuple):
    code: str
    meaning: str


ERRORS = {
    400: ErrorKind("bad_request", "A parameter or field is unknown or invalid; the message says which."),
    401: ErrorKind("unauthorized", "A token is required."),
    403: ErrorKind("forbidden", "The token does not allow this."),
    404: ErrorKind("not_found", "There is no such conversation, place or part."),
    405: ErrorKind("not_allowed", "The path does not have this method."),
    408: ErrorKind("timeout", "The request did not arrive in time."),
    409: ErrorKind("conflict", "The name is taken, or another writer won the race."),
    413: ErrorKind("too_large", "The body is too large."),
    415: ErrorKind("not_json", "The body is not JSON."),
    426: ErrorKind("no_websockets", "Websockets are not supported."),
    429: ErrorKind("too_many", "Too many requests; `retry-after` says when to try again."),
    431: ErrorKind("too_large", "The headers are too large."),
    500: ErrorKind("internal", "An internal error; see the log."),
    503: ErrorKind("unavailable", "The store is unavailable."),
}
STATUSES: dict[type[RefoldError], int] = {
    SettingError: 400,
    MessageError: 400,
    OverBudgetError: 400,
    NotFoundError: 404,
    ConflictError: 409,
    StoreError: 503,
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def http_error(error: Exception) -> HTTPException:
    """The HTTP error for any exception. What a store says stays here: it may name hosts and files."""
    if isinstance(error, HTTPException):
        return error
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    if status == 503:
        return HTTPException(503, "the store is not available; try again", {"retry-after": "1"})
    if status == 500:
        return HTTPException(500, "internal error; the service has logged the details")
    return HTTPException(status, str(error))


class ErrorJson(msgspec.Struct, frozen=True):
    code: str
    message: str
    """Where, why, and what to do."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorJson


def error_body(status: int, message: str) -> bytes:
    code = ERRORS[status].code if status in ERRORS else "error"
    return msgspec.json.encode(ErrorAnswer(ErrorJson(code, redacted(message[:MAX_MESSAGE_CHARS]))))


def valid_id(text: str) -> str:
    """Raises HTTPException if no conversation can have this id."""
    if not 1 <= len(text) <= MAX_ID_CHARS or has_control_characters(text):
        raise HTTPException(
            400, f"the id of a conversation has 1 to {MAX_ID_CHARS} characters and no control characters"
        )
    return text


def requested_id(headers: Headers) -> str | None:
    """The conversation that `x-refold-conversation` names, in UTF-8.

    Raises:
        HTTPException: no conversation can have this id.
    """
    given = headers.get("x-refold-conversation")
    if given is None:
        return None
    return valid_id(given.encode("latin-1").decode("utf-8", "surrogateescape"))


def has_control_characters(text: str) -> bool:
    return _CONTROL.search(text) is not None
