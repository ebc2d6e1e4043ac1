"""The URL of a server, looked at before a driver sees it: drivers guess, and repeat passwords."""

import re
from urllib.parse import SplitResult, quote, unquote, urlsplit

from refold.core.errors import SettingError

ENCODING_HELP = (
    "percent-encode what is special in a user name, a password or an option: @ is %40, : is %3A, / is"
)
ENCODING_HELP += " %2F, ? is %3F, # is %23, % is %25"


def split_url(url: str) -> SplitResult:
    """
    Raises:
        SettingError: it cannot be told where a password ends, or the port is no number. Shows nothing of it.
    """
    scheme, _, rest = url.partition("://")
    before, _, after = rest.partition("@")
    if "#" in rest or "@" in after or (after and re.search(r"[/?\[\]]", before)):
        raise SettingError(
            f"store {scheme}://…", f"it is not clear where the host begins or the URL ends; {ENCODING_HELP}"
        )
    try:
        parts = urlsplit(url)
        for host in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        problem = f"the host or the port is none (a port is a number up to 65535); {ENCODING_HELP}"
        raise SettingError(f"store {scheme}://…", problem) from None
    return parts


def require_between(where: str, low: float, high: float, **values: float) -> None:
    """
    Raises:
        SettingError: a value is smaller or larger, or no number.
    """
    for name, value in values.items():
        if not low <= value <= high:
            raise SettingError(where, f"{name}={value} is not allowed; expected {low:g} to {high:,.0f}")


USER_SCHEMES = ("postgresql", "postgres", "redis", "rediss", "valkey", "valkeys", "mem0")
"""Schemes of URLs that begin with the name of a user; elsewhere it may be a key."""


def shown_url(url: str) -> str:
    """A store's URL for people to read: without passwords and keys, those of a URL inside it included."""
    scheme, sep, rest = url.partition("://") if "://" in url else ("", "", url)
    is_path = scheme == "sqlite" and rest.startswith("/")
    user, at, host = ("", "", rest) if is_path else rest.rpartition("@")
    if "@" in user:  # whatever is behind it may be of a password too
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
