"""What went wrong with a request, in one line that may be shown: short, and without secrets."""

import re
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isnan
from time import time
from typing import Any

from refold.core.errors import RefoldError, SettingError

LONGEST = 300
"""Characters of a problem, at most."""
_SECRETS = re.compile(
    r"\b(?:sk|pk|rk|xai|gsk|hf)[-_][\w*.-]{6,}|\bAIza[\w-]{20,}|\beyJ[\w-]{10,}\.[\w.-]+"
    r"|(?<=Bearer )\S+|(?<=://)[^\s/@]+(?=@)|(?<=key=)[^\s&]+|(?<=token=)[^\s&]+",
    re.IGNORECASE,
)
_CARRIERS = ("authorization", "x-api-key", "api-key")
_NEVER_THERE = {"ConnectError", "ConnectTimeout", "ConnectionRefusedError", "gaierror"}


def problem(error: Exception) -> str:
    """`429 Too Many Requests: slow down`, `connection error: …`, or the error as it calls itself."""
    said, status = _said(error), status_of(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, RefoldError):
        kind = ""
    elif status is not None:
        kind = f"{status} {_phrase(status)}".strip()
    elif kinds & {"APIConnectionError", "ConnectionError"}:
        kind, said = "connection error", _said(error.__cause__ or error) or said
    else:
        kind = type(error).__name__
    for secret in _sent(error):
        said = said.replace(secret, "***")
    return line(": ".join(filter(None, (kind, said))))


def line(text: str) -> str:
    """As much of a text as may be shown, on one line."""
    clean = " ".join(_SECRETS.sub("***", text[: 10 * LONGEST]).split())
    clean = clean.encode("utf-8", "replace").decode()
    return clean if len(clean) <= LONGEST else clean[: LONGEST - 1] + "…"


def status_of(error: Exception) -> int | None:
    """The HTTP status of an error that has one, as those of the SDKs do."""
    status = _of(error, "status_code")
    return int(status) if isinstance(status, int) else None


def is_free(error: Exception) -> bool:
    """Nobody pays for the request: it was refused, or it never got to a model."""
    kinds = {kind.__name__ for one in (error, error.__cause__) for kind in type(one).__mro__}
    return status_of(error) is not None or isinstance(error, SettingError) or bool(kinds & _NEVER_THERE)


def wait_of(error: Exception) -> float | None:
    """How many seconds the server wants to be left alone; None where it does not say."""
    headers = _of(error, "response", "headers")
    try:
        ms, wait = headers.get("retry-after-ms"), headers.get("retry-after")
        seconds = float(ms) / 1000 if ms is not None else _seconds(wait)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return None if isnan(seconds) else max(0.0, seconds)


def _seconds(wait: str) -> float:
    try:
        return float(wait)
    except ValueError:
        return parsedate_to_datetime(wait).timestamp() - time()


def _said(error: BaseException) -> str:
    match _of(error, "body"):
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
    try:
        return re.sub(r"^Error code: \d+( - )?", "", str(error))
    except Exception:  # an error that cannot even be shown
        return ""


def _sent(error: Exception) -> list[str]:
    """The keys in the request, which some servers repeat when they refuse it."""
    headers = _of(error, "request", "headers")
    try:
        values = [str(headers.get(name) or "").rpartition(" ")[2] for name in _CARRIERS]
    except AttributeError:
        return []
    return [value for value in values if len(value) >= 6]


def _of(error: BaseException, *names: str) -> Any:
    """An attribute that only some errors have, and that may be a property that fails."""
    found: Any = error
    try:
        for name in names:
            found = getattr(found, name, None)
    except Exception:
        return None
    return found


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
