"""The names that we are called by, by those who ask and by the pages that make them ask."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from starlette.datastructures import Headers

from refold.config.serving import ServeSettings
from refold.serve.http_errors import Refused

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(?::([0-9]{1,5}))?")
_DEFAULTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    name: str
    port: int | None


class Hosts:
    """Our own, on our own port, and those that are set: these on their port, on the usual ones or on ours."""

    def __init__(self, settings: ServeSettings) -> None:
        self._own = {"localhost", "127.0.0.1", "[::1]", _bracketed(settings.host.lower())}
        self._others = {found for one in settings.hosts for found in parsed(one)}

    def demand(self, headers: Headers, server: tuple[str, int | None] | None) -> None:
        """`server` is the address that the request came to.

        Raises:
            Refused: it is meant for another host, or comes from a page of another.
        """
        name, port = server or ("localhost", None)
        given, own = headers.getlist("host"), {*self._own, _bracketed(name)}
        if len(given) != 1 or not any(self._is_ours(one, own, port) for one in parsed(given[0])):
            raise Refused(403, "this host is not known here; the setting is serve.hosts")
        for origin in headers.getlist("origin"):
            scheme, _, rest = origin.partition("://")
            default = _DEFAULTS.get(scheme)
            found = [Address(one.name, one.port or default) for one in parsed(rest)]
            if default is None or not any(self._is_ours(one, own, port) for one in found):
                raise Refused(403, "pages of another origin may not ask; the setting is serve.hosts")

    def _is_ours(self, asked: Address, own: set[str], port: int | None) -> bool:
        if asked.name in own and asked.port in (None, port):
            return True
        is_usual = asked.port in (None, port, *_DEFAULTS.values())
        return asked in self._others or (is_usual and Address(asked.name, None) in self._others)


def parsed(host: str) -> Iterator[Address]:
    """One, or none if it is no host at all."""
    if found := _HOST.fullmatch(host.lower()):
        yield Address(found[1].rstrip("."), int(found[2]) if found[2] else None)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
