"""URLs of stores: validated before a driver sees them, since drivers guess and print passwords; masked."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from refold.core.errors import SettingError

ENCODING_HELP = (
    "percent-encode what is special in a user name, a password or an option: @ is %40, : is %3A, / is %2F,"
    " ? is %3F, # is %23, % is %25"
)


class UrlOption(NamedTuple):
    """An option in a store's URL, and how its value is read."""

    pattern: str
    expected: str
    read: Callable[[str], Any] = str


ANY = UrlOption("(?s).*", "a value")
SWITCH = UrlOption("[01]", "0 or 1", lambda value: value == "1")
SECONDS = UrlOption(r"(?=.*[1-9])\d{0,6}\.?\d*", "a number of seconds", float)


def parse_options(where: str, query: str, known: Mapping[str, UrlOption]) -> dict[str, Any]:
    """The options in the query of a URL.

    Raises:
        SettingError: an option is unknown, or its value is not allowed.
    """
    options = dict[str, Any]()
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise SettingError(where, f"{name!r} is not known; its options are {', '.join(known)}")
        pattern, expected, read = known[name]
        if not re.fullmatch(pattern, value, re.ASCII):
            raise SettingError(where, f"{name}={shown_url(value)} is not allowed; expected {expected}")
        options[name] = read(value)
    return options


def split_url(url: str) -> SplitResult:
    """
    Raises:
        SettingError: it is ambiguous where a password ends, or the port is not a number. Shows no part of it.
    """
    scheme, _, rest = url.partition("://")
    before, _, after = rest.partition("@")
    if "#" in rest or "@" in after or (after and re.search(r"[/?\[\]]", before)):
        raise SettingError(
            f"store {scheme}://…", f"it is ambiguous where the host begins or the URL ends; {ENCODING_HELP}"
        )
    try:
        parts = urlsplit(url)
        for host in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        problem = f"the host or the port is not valid (a port is a number up to 65535); {ENCODING_HELP}"
        raise SettingError(f"store {scheme}://…", problem) from None
    return parts


def require_between(where: str, low: float, high: float, **values: float) -> None:
    """Raises SettingError if a value is out of range or NaN."""
    for name, value in values.items():
        if not low <= value <= high:
            raise SettingError(where, f"{name}={value} is not allowed; expected {low:g} to {high:,.0f}")


USER_SCHEMES = ("postgresql", "postgres", "redis", "rediss", "valkey", "valkeys", "mem0")
"""Schemes with a user name before the host; in others it may be a key."""


def shown_url(url: str) -> str:
    """A store's URL without passwords and keys, also those of URLs inside it."""
    scheme, sep, rest = url.partition("://") if "://" in url else ("", "", url)
    is_path = scheme == "sqlite" and rest.startswith("/")
    user, at, host = ("", "", rest) if is_path else rest.rpartition("@")
    if "@" in user:  # the rest may be part of a password
        return f"{scheme}{sep}***"
    name, colon, _ = user.partition(":")
    is_name = scheme in USER_SCHEMES and not re.search(r"[/?#]", user)
    kept = f"{name}:***" if colon else name if is_name else "***"
    plain = f"{scheme}{sep}{kept}{at}{host}" if at else url
    before, mark, query = plain.partition("?")
    return before + mark + "&".join(map(_shown_option, query.split("&")))


def _shown_option(option: str) -> str:
    name, sign, value = option.partition("=")
    inner = unquote(value)
    if re.search(r"(?i)password|passfile|key|token|secret", name):
        return f"{name}{sign}***"
    return f"{name}{sign}{quote(shown_url(inner), safe='*')}" if "://" in inner or "@" in inner else option
