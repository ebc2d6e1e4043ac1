"""Errors of model calls as one short line without secrets, and whether a retry or a bill follows."""

import re
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from math import isfinite
from typing import Any

from refold.core.errors import RefoldError, SettingError

MAX_CHARS = 300
_SECRETS = re.compile(
    r"\b(?:sk|pk|rk|xai|gsk|hf)[-_][\w*.-]{6,}|\bAIza[\w-]{20,}|\beyJ[\w-]{10,}\.[\w.-]+"
    r"|(?<=Bearer )\S+|(?<=://)[^\s/@]+(?=@)|(?<=key=)[^\s&]+|(?<=token=)[^\s&]+",
    re.IGNORECASE,
)
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_UNREACHED = {"ConnectError", "ConnectTimeout", "ConnectionRefusedError", "gaierror"}


def describe(error: Exception) -> str:
    """Such as `429 Too Many Requests: slow down`, `connection error: …` or `ValueError: …`."""
    try:
        text = _text_of(error)
    except Exception:  # an error's own text may raise
        text = ""
    status = status_of(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, RefoldError):
        kind = ""
    elif status is not None:
        kind = str(status)
        with suppress(ValueError):
            kind = f"{status} {HTTPStatus(status).phrase}"
    elif kinds & {"APIConnectionError", "ConnectionError"}:
        kind = "connection error"
        text = _text_of(error.__cause__ or error) or text
    else:
        kind = type(error).__name__
    for secret in _sent_keys(error):
        text = text.replace(secret, "***")
    return single_line(": ".join(filter(None, (kind, text))))


def single_line(text: str) -> str:
    """Whitespace collapsed, secrets masked, and cut to `MAX_CHARS`."""
    clean = " ".join(_SECRETS.sub("***", text[: 10 * MAX_CHARS]).split())
    clean = clean.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_CHARS else clean[: MAX_CHARS - 1] + "…"


def status_of(error: Exception) -> int | None:
    """The HTTP status of an SDK's error."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def is_free(error: Exception) -> bool:
    """True if the request costs nothing: it was refused, or never reached a model."""
    kinds = {kind.__name__ for one in (error, error.__cause__) for kind in type(one).__mro__}
    return status_of(error) is not None or isinstance(error, SettingError) or bool(kinds & _UNREACHED)


def retry_after(error: Exception) -> float | None:
    """The seconds in the Retry-After header of the response."""
    response: Any = getattr(error, "response", None)
    try:
        seconds = float(response.headers["retry-after"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return max(0.0, seconds) if isfinite(seconds) else None


def _text_of(error: BaseException) -> str:
    match getattr(error, "body", None):
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
    return re.sub(r"^Error code: \d+( - )?", "", str(error))


def _sent_keys(error: Any) -> list[str]:
    """The API keys of the request, which some servers repeat in their errors."""
    headers: Mapping[str, str] = {}
    with suppress(Exception):  # httpx's `request` raises if there was none
        headers = error.request.headers
    values = [headers.get(name, "").rpartition(" ")[2] for name in _KEY_HEADERS]
    return [value for value in values if len(value) >= 6]
