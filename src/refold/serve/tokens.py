"""Tokens of the service: who sends a request, and what they may do."""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, get_args

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from refold.config.config import Config, Source, load_config
from refold.config.serving import Right
from refold.core.errors import RefoldError, SettingError

PREFIX = "rft_"
"""Makes a token recognizable wherever it turns up."""
RELOAD_CHECK_S = 1.0
CREDENTIALS = ("x-api-key", "authorization", "api-key", "x-goog-api-key")
"""Headers that carry a credential of a provider."""
_AWS_KEY = re.compile(r"Credential=([^/,\s]+)")
_LOG = logging.getLogger("refold.serve")


class Caller(NamedTuple):
    """Who sends a request."""

    owner: str | None
    """Whose conversations they may see; None means everyone's, or on the gateway those of the API key."""
    scopes: frozenset[Right]


ALL_SCOPES: frozenset[Right] = frozenset(get_args(Right))
LOCAL_USER = Caller(None, ALL_SCOPES)
"""Without tokens: the service then listens on this machine only."""
LOCAL_AGENT = Caller(None, frozenset[Right](("read", "append")))
"""Without tokens, on the gateway."""
ANONYMOUS = Caller(None, frozenset())
"""Without the token that is needed: may only see what is public."""


def require_scope(caller: Caller, scope: Right) -> None:
    """Raises HTTPException if the caller's token does not have the scope."""
    if scope not in caller.scopes:
        raise HTTPException(403, f"this token does not have the scope {scope!r}, which this request needs")


def credential_of(headers: Headers) -> str:
    """What tells the clients of a provider apart: all credentials in a request; empty if there are none."""
    found: list[str] = []
    for name in CREDENTIALS:
        value = headers.get(name, "").strip()
        if name == "authorization":
            scheme, _, rest = value.partition(" ")
            signed_by = _AWS_KEY.search(value)
            if scheme.lower() == "bearer":
                value = rest.strip()
            elif signed_by is not None:  # the signature differs with each request
                value = signed_by[1]
        if value:
            found.append(value)
    return "\n".join(found)


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """SHA-256: a token is long and random, so no slow hash is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Tokens:
    """The configured tokens; changes of the configuration files take effect while the service runs."""

    def __init__(
        self, config: Config, source: Source = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`source` is what the configuration was loaded from.

        Raises:
            SettingError: a token's entry is not valid.
        """
        self._callers = _callers(config)
        self.are_needed = bool(config.serve.token or config.serve.tokens)
        """Stays true once any token was configured, revoked or not: an emptied file lets nobody in."""
        self._source = source
        self._clock = clock
        self._versions = _versions(source)
        self._checked_at = clock()

    def caller_of(self, token: str) -> Caller | None:
        """Takes equally long whether the token is known or not."""
        now = self._clock()
        if now - self._checked_at >= RELOAD_CHECK_S:
            self._checked_at = now
            versions = _versions(self._source)
            if versions != self._versions:
                self._versions = versions
                self.reload()
        given = hash_of(token)
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(given, known):
                found = caller
        return found

    def reload(self) -> None:
        """Reads the configuration again. If it is not valid, that is logged and nothing changes."""
        try:
            config = load_config(self._source)
            self._callers = _callers(config)
            self.are_needed |= bool(config.serve.token or config.serve.tokens)
            _LOG.info("reloaded the tokens: %d are valid", len(self._callers))
        except RefoldError as error:
            _LOG.error("could not reload the tokens; the previous ones stay valid: %s", error)


def _versions(source: Source) -> list[tuple[int, int, int] | None]:
    """Tells whether a file of the configuration has changed."""
    versions: list[tuple[int, int, int] | None] = []
    for one in source if isinstance(source, list | tuple) else [source]:
        if isinstance(one, str | Path):
            versions.append(None)
            with suppress(OSError):
                found = Path(one).stat()
                versions[-1] = (found.st_mtime_ns, found.st_size, found.st_ino)
    return versions


def _callers(config: Config) -> list[tuple[str, Caller]]:
    """The hash of each valid token, and whose it is."""
    serve = config.serve
    callers = []
    if serve.token is not None:
        if not serve.token:
            raise SettingError(config.place("serve", "token"), "is empty; `refold token` makes one")
        callers.append((hash_of(serve.token), Caller("default", ALL_SCOPES)))
    for n, entry in enumerate(serve.tokens):
        place = f"{config.place('serve', 'tokens')}.{n}"
        if not re.fullmatch("[0-9a-f]{64}", entry.hash):
            raise SettingError(
                place, "hash is not a SHA-256 in hexadecimal; `refold token` prints a valid entry"
            )
        if not entry.owner or not entry.scopes:
            raise SettingError(
                place, "needs an owner and at least one scope; `refold token` prints a valid entry"
            )
        if not entry.revoked:
            scopes = ALL_SCOPES if "admin" in entry.scopes else frozenset(entry.scopes)
            callers.append((entry.hash, Caller(entry.owner, scopes)))
    return callers
