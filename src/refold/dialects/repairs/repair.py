"""Repairs of messages that an API would refuse, by dialect."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from refold.core.event import Line
from refold.core.lazy import LazyImports
from refold.core.pairing import has_renamed_ids

EMPTY = "[empty]"
"""Stands where a message or block would be empty."""
GO_ON = "[refold: go on]"


class RepairedMessages(NamedTuple):
    messages: list[dict[str, Any]]
    notices: list[str]
    """One for each repair."""


_REPAIRS: LazyImports[Callable[..., RepairedMessages]] = LazyImports(
    {
        "openai-chat": "refold.dialects.repairs.openai_chat:repair",
        "openai-responses": "refold.dialects.repairs.openai_responses:repair",
        "anthropic": "refold.dialects.repairs.anthropic:repair",
        "ai-sdk": "refold.dialects.repairs.ai_sdk:repair",
    }
)
_UNIQUE_IDS: LazyImports[Callable[[Any, Sequence[str]], Any]] = LazyImports(
    {
        "openai-chat": "refold.dialects.repairs.openai_chat:unique_ids",
        "openai-responses": "refold.dialects.repairs.openai_responses:unique_ids",
        "anthropic": "refold.dialects.repairs.anthropic:unique_ids",
        "ai-sdk": "refold.dialects.repairs.ai_sdk:unique_ids",
    }
)


def repair(dialect: str, messages: list[dict[str, Any]], **facts: Any) -> RepairedMessages:
    """The messages as the API of a dialect accepts them."""
    return _REPAIRS[dialect](messages, **facts)


def unique_ids(dialect: str, value: Any, line: Line) -> Any:
    """A message as it came, with the unique call ids of its line in place of its own."""
    if not has_renamed_ids(line):
        return value
    return _UNIQUE_IDS[dialect](value, line.calls or (line.answers or "",))


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def repeated(ids: Sequence[Hashable]) -> list[bool]:
    """For each id, whether it occurs earlier in the list."""
    seen: set[Hashable] = set()
    result = []
    for id in ids:
        result.append(id in seen)
        seen.add(id)
    return result
