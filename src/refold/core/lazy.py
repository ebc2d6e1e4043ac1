"""Patterns that are compiled when they are first used, to keep `import refold` fast."""

import re
from typing import Any, cast


class _LazyPattern:
    def __init__(self, pattern: str, flags: int) -> None:
        self._source = (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(*self._source)
        for method in ("match", "search", "fullmatch", "findall", "finditer", "sub", "split"):
            setattr(self, method, getattr(compiled, method))
        return getattr(compiled, name)


def regex(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Behaves like `re.compile(pattern, flags)`, but compiles on first use."""
    return cast(re.Pattern[str], _LazyPattern(pattern, flags))
