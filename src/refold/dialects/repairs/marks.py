"""What mending gives back, and what stands where something would be missing."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

EMPTY = "[empty]"
GO_ON = "[refold: go on]"


class Mended(NamedTuple):
    messages: list[dict[str, Any]]
    notices: list[str]
    """One for each repair."""


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def again(ids: Sequence[Hashable]) -> list[bool]:
    """Which of them were there before."""
    seen: set[Hashable] = set()
    result = []
    for id in ids:
        result.append(id in seen)
        seen.add(id)
    return result
