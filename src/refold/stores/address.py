"""The URL of a server, looked at before a driver sees it: drivers guess, and repeat passwords."""

import re
from urllib.parse import SplitResult, urlsplit

from refold.core.errors import SettingError

ENCODED = "percent-encode what is special in a user name, a password or an option: @ is %40, : is %3A, / is"
ENCODED += " %2F, ? is %3F, # is %23, % is %25"


def parts_of(url: str) -> SplitResult:
    """
    Raises:
        SettingError: it cannot be told where a password ends, or the port is no number. Shows nothing of it.
    """
    scheme, _, rest = url.partition("://")
    before, _, after = rest.partition("@")
    if "#" in rest or "@" in after or (after and re.search(r"[/?\[\]]", before)):
        raise SettingError(
            f"store {scheme}://…", f"it is not clear where the host begins or the URL ends; {ENCODED}"
        )
    try:
        parts = urlsplit(url)
        for host in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        problem = f"the host or the port is none (a port is a number up to 65535); {ENCODED}"
        raise SettingError(f"store {scheme}://…", problem) from None
    return parts


def demand_between(where: str, low: float, high: float, **values: float) -> None:
    """
    Raises:
        SettingError: a value is smaller or larger, or no number.
    """
    for name, value in values.items():
        if not low <= value <= high:
            raise SettingError(where, f"{name}={value} is not allowed; expected {low:g} to {high:,.0f}")
