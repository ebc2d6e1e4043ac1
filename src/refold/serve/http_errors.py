"""Errors as HTTP responses: `{"error": {"code", "message"}}`, without secrets and without internals."""

import re
from collections.abc import Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

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
CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    415: "not_json",
    426: "no_websockets",
    429: "too_many",
    431: "too_large",
    500: "internal",
    503: "unavailable",
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
        return HTTPException(500, "internal error; the log of the service has the details")
    return HTTPException(status, str(error))


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    error = {"code": CODES.get(status, "error"), "message": redacted(message[:MAX_MESSAGE_CHARS])}
    return Response(msgspec.json.encode({"error": error}), status, headers, "application/json")


def valid_id(text: str) -> str:
    """
    Raises:
        HTTPException: no conversation can have this id.
    """
    if not 1 <= len(text) <= MAX_ID_CHARS or has_control_characters(text):
        raise HTTPException(400, f"an id has 1 to {MAX_ID_CHARS} characters and no control characters")
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
