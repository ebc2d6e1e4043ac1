"""Patterns that are compiled when they are first used: importing them costs nothing."""

import re
from typing import Any, cast


class _Later:
    def __init__(self, pattern: str, flags: int) -> None:
        self._source = (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(*self._source)
        for verb in ("match", "search", "fullmatch", "findall", "finditer", "sub", "split"):
            setattr(self, verb, getattr(compiled, verb))
        return getattr(compiled, name)


def regex(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Used like a compiled pattern."""
    return cast(re.Pattern[str], _Later(pattern, flags))
