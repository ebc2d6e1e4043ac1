"""Who mends what, by dialect."""

from collections.abc import Callable
from typing import Any

from refold.repairs import anthropic, openai_chat, openai_responses
from refold.repairs.marks import Mended

MENDS: dict[str, Callable[..., Mended]] = {
    "openai-chat": openai_chat.mend,
    "openai-responses": openai_responses.mend,
    "anthropic": anthropic.mend,
}


def mend(dialect: str, messages: list[dict[str, Any]], **facts: Any) -> Mended:
    """The messages as the API of a dialect takes them; for one that has none, as they are."""
    return MENDS[dialect](messages, **facts) if dialect in MENDS else Mended(messages, [])
