"""Who mends what, by dialect."""

from collections.abc import Callable, Sequence
from typing import Any

from refold.core.event import Line
from refold.core.lazy import Lazy
from refold.core.pairing import has_renamed_ids
from refold.dialects.repairs.marks import Mended

MENDS: Lazy[Callable[..., Mended]] = Lazy(
    {
        "openai-chat": "refold.dialects.repairs.openai_chat:mend",
        "openai-responses": "refold.dialects.repairs.openai_responses:mend",
        "anthropic": "refold.dialects.repairs.anthropic:mend",
        "ai-sdk": "refold.dialects.repairs.ai_sdk:mend",
    }
)

APART: Lazy[Callable[[Any, Sequence[str]], Any]] = Lazy(
    {
        "openai-chat": "refold.dialects.repairs.openai_chat:unique_ids",
        "openai-responses": "refold.dialects.repairs.openai_responses:unique_ids",
        "anthropic": "refold.dialects.repairs.anthropic:unique_ids",
        "ai-sdk": "refold.dialects.repairs.ai_sdk:unique_ids",
    }
)


def mend(dialect: str, messages: list[dict[str, Any]], **facts: Any) -> Mended:
    """The messages as the API of a dialect takes them."""
    return MENDS[dialect](messages, **facts)


def unique_ids(dialect: str, value: Any, line: Line) -> Any:
    """A message as it came, with the ids by which its line tells calls apart."""
    if not has_renamed_ids(line):
        return value
    return APART[dialect](value, line.calls or (line.answers or "",))
