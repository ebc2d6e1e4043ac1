"""Who mends what, by dialect."""

from collections.abc import Callable
from typing import Any

from refold.repairs import ai_sdk, anthropic, openai_chat, openai_responses
from refold.repairs.marks import Mended

MENDS: dict[str, Callable[..., Mended]] = {
    "openai-chat": openai_chat.mend,
    "openai-responses": openai_responses.mend,
    "anthropic": anthropic.mend,
    "ai-sdk": ai_sdk.mend,
}


def mend(dialect: str, messages: list[dict[str, Any]], **facts: Any) -> Mended:
    """The messages as the API of a dialect takes them."""
    return MENDS[dialect](messages, **facts)
