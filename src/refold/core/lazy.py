"""Things by name, each loaded when it is first used: who speaks one dialect pays for one."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Lazy(Mapping[str, T], Generic[T]):
    """`{name: "module"}`, or `"module:attribute"` for something in it."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources, self._loaded = dict(sources), dict[str, T]()

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            module, _, attribute = self._sources[name].partition(":")
            found = import_module(module)
            self._loaded[name] = cast(T, getattr(found, attribute) if attribute else found)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
