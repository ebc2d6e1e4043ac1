"""Modules and patterns that are loaded when they are first used, to keep `import refold` fast."""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class LazyImports(Mapping[str, T], Generic[T]):
    """`{name: "module:attribute"}`: the attribute is imported on access."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._sources[name].partition(":")
        return cast(T, getattr(import_module(module), attribute))

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


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
