"""The URL of a Redis store: refold's options, and those of redis-py."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlencode

from refold.core.errors import SettingError
from refold.stores.url import shown_url, split_url

_NUMBER, _POSITIVE, _ANY = r"\d{1,9}", r"(?=.*[1-9])\d{1,6}(\.\d+)?", (r".+", "a value")
OURS = {
    "cluster": (r"[01]", "0 or 1"),
    "prefix": (r"[\w.:-]+", "letters, digits and . : - _"),
    "timeout_s": (_POSITIVE, "seconds"),
    "ttl_s": (rf"{_NUMBER}(\.\d+)?", "seconds, or 0 for never"),
    "wait_aof": (r"[01](,\d)?", "1, or 1,2 for two replicas besides"),
}
THEIRS = {
    "db": (_NUMBER, "the number of a database"),
    "health_check_interval": (_NUMBER, "seconds"),
    "max_connections": (r"[1-9]\d{0,8}", "a number above 0"),
    "socket_connect_timeout": (_POSITIVE, "seconds"),
    **dict.fromkeys(("client_name", "socket_keepalive", "ssl_ca_certs", "ssl_ca_path"), _ANY),
    **dict.fromkeys(("ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"), _ANY),
}
_READ: dict[str, Callable[[str], Any]] = {
    "cluster": lambda value: value == "1",
    "prefix": str,
    "timeout_s": float,
    "ttl_s": float,
    "wait_aof": lambda value: tuple(map(int, f"{value},0".split(",")[:2])),
}


def parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """Splits the URL for redis-py from the options of the store.

    Raises:
        SettingError: an option is unknown or its value not allowed; redis-py would ignore it.
    """
    parts = split_url(url)
    plain = url.partition("?")[0]
    allowed = OURS | THEIRS
    where = f"store {shown_url(plain)!r}"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in options.items():
        if name not in allowed:
            known = f"its options are {', '.join(OURS)}, and of redis-py {', '.join(THEIRS)}"
            raise SettingError(where, f"{name!r} is not known; {known}")
        pattern, expected = allowed[name]
        if not re.fullmatch(pattern, value, re.ASCII):
            raise SettingError(where, f"{name}={value} is not allowed; expected {expected}")
    if parts.scheme != "unix" and not re.fullmatch(rf"/?|/{_NUMBER}", parts.path, re.ASCII):
        raise SettingError(where, "expected nothing after the host, or the number of a database")
    ours = {name: _READ[name](options.pop(name)) for name in OURS if name in options}
    if ours.get("cluster") and (parts.scheme == "unix" or int(options.get("db") or parts.path[1:] or 0)):
        raise SettingError(where, "a cluster is reached by redis:// or rediss://, and has only database 0")
    return f"{plain}?{urlencode(options)}" if options else plain, ours
