"""Which tokens there are, and who holds a given one."""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from refold.config.config import Config
from refold.core.errors import RefoldError, SettingError
from refold.serve.caller import EVERYTHING, Caller

PREFIX = "rft_"
"""What a token begins with, so that it is known for what it is wherever it turns up."""
LOOK_S = 1.0
"""How often the files are looked at."""
_LOG = logging.getLogger("refold.serve")


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Tokens are random and long: nothing slower than a plain digest is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Tokens:
    """Those of a configuration, and of what becomes of its files while the service runs."""

    def __init__(
        self,
        config: Config,
        files: Sequence[Path] = (),
        read: Callable[[], Config] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Raises:
            SettingError: something in them is not allowed.
        """
        self._known = _known(config)
        self.are_needed = _has_any(config)
        """Once there was any, a revoked one too, for good: a file without tokens lets nobody in."""
        self._files, self._read, self._clock = files, read, clock
        self._state, self._looked = self._stamps(), clock()

    def caller_of(self, token: str) -> Caller | None:
        """As many comparisons whether it is known or not, each of them of the same length."""
        self._look()
        asked, found = hash_of(token), None
        for known, caller in self._known:
            if hmac.compare_digest(asked, known):
                found = caller
        return found

    def read_again(self) -> None:
        """What is wrong with a file is logged, and then all stays as it was."""
        if self._read is None:
            return
        try:
            config = self._read()
            self._known = _known(config)
            self.are_needed = self.are_needed or _has_any(config)
            _LOG.info("the tokens were read again: %d allow something", len(self._known))
        except RefoldError as error:
            _LOG.error("the tokens were not read again: %s", error)

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        self._looked, state = now, self._stamps()
        if state != self._state:
            self._state = state
            self.read_again()

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _has_any(config: Config) -> bool:
    return bool(config.serve.token or config.serve.tokens)


def _known(config: Config) -> list[tuple[str, Caller]]:
    serve = config.serve
    known = []
    if serve.token is not None:
        if not serve.token:
            raise SettingError(config.place("serve", "token"), "is empty; `refold token` makes one")
        known.append((hash_of(serve.token), Caller("default", EVERYTHING)))
    for n, one in enumerate(serve.tokens):
        place = f"{config.place('serve', 'tokens')}.{n}"
        if not re.fullmatch("[0-9a-f]{64}", one.hash):
            raise SettingError(place, "its hash is no SHA-256; `refold token` makes a token and its hash")
        if not one.owner or not one.scopes:
            raise SettingError(place, "it needs an owner, and a scope at least")
        if not one.revoked:
            rights = EVERYTHING if "admin" in one.scopes else frozenset(one.scopes)
            known.append((one.hash, Caller(one.owner, rights)))
    return known
