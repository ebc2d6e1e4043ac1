"""Who mends what, by dialect."""

from collections.abc import Callable, Sequence
from typing import Any

from refold.core.event import Line
from refold.core.lazy import Lazy
from refold.core.pairing import is_told_apart
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
        "openai-chat": "refold.dialects.repairs.openai_chat:told_apart",
        "openai-responses": "refold.dialects.repairs.openai_responses:told_apart",
        "anthropic": "refold.dialects.repairs.anthropic:told_apart",
        "ai-sdk": "refold.dialects.repairs.ai_sdk:told_apart",
    }
)


def mend(dialect: str, messages: list[dict[str, Any]], **facts: Any) -> Mended:
    """The messages as the API of a dialect takes them."""
    return MENDS[dialect](messages, **facts)


def told_apart(dialect: str, value: Any, line: Line) -> Any:
    """A message as it came, with the ids by which its line tells calls apart."""
    if not is_told_apart(line):
        return value
    return APART[dialect](value, line.calls or (line.answers or "",))
