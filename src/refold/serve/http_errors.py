"""What is answered to a request that is refused: why, and what to do; never how things are inside."""

import re
from collections.abc import Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from refold.config.serving import Right
from refold.core.errors import (
    ConflictError,
    MessageError,
    NotFoundError,
    OverBudgetError,
    RefoldError,
    SettingError,
    StoreError,
)
from refold.serve.caller import Caller
from refold.serve.redact import redacted

LONGEST_ID = 500
LONGEST = 2_000
"""Characters of a message: it may quote what was sent."""
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


class Refused(Exception):
    """Raised anywhere below the guard, which answers it."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """`{"error": {"code", "message"}}`, without anything that looks like a secret."""
    told = {"error": {"code": CODES.get(status, "error"), "message": redacted(message[:LONGEST])}}
    return Response(msgspec.json.encode(told), status, headers, "application/json")


def refusal_of(error: RefoldError) -> Refused:
    """What our own errors are in the words of HTTP. A store's stay with us: they may name hosts and files."""
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    if status == 503:
        return Refused(503, "the store cannot be used now; try again", {"retry-after": "1"})
    return Refused(status, str(error) if status < 500 else "something went wrong here; the log says what")


def conversation_id(text: str) -> str:
    """
    Raises:
        Refused: nothing may be called that.
    """
    if not 1 <= len(text) <= LONGEST_ID or has_control(text):
        raise Refused(400, f"an id has 1 to {LONGEST_ID} characters, and no control characters")
    return text


def asked_id(headers: Headers) -> str | None:
    """The conversation that a request names in a header, as UTF-8.

    Raises:
        Refused: nothing may be called that.
    """
    given = headers.get("x-refold-conversation")
    if given is None:
        return None
    return conversation_id(given.encode("latin-1").decode("utf-8", "surrogateescape"))


def demand(caller: Caller, what: Right) -> None:
    """
    Raises:
        Refused: they may not.
    """
    if what not in caller.scopes:
        raise Refused(403, f"this token does not allow it; it needs the scope {what!r}")


def has_control(text: str) -> bool:
    return _CONTROL.search(text) is not None
