"""Who mends what, by dialect."""

from collections.abc import Callable
from typing import Any

from refold.core.lazy import Lazy
from refold.repairs.marks import Mended

MENDS: Lazy[Callable[..., Mended]] = Lazy(
    {
        "openai-chat": "refold.repairs.openai_chat:mend",
        "openai-responses": "refold.repairs.openai_responses:mend",
        "anthropic": "refold.repairs.anthropic:mend",
        "ai-sdk": "refold.repairs.ai_sdk:mend",
    }
)


def mend(dialect: str, messages: list[dict[str, Any]], **facts: Any) -> Mended:
    """The messages as the API of a dialect takes them."""
    return MENDS[dialect](messages, **facts)
