"""Where a provider that wants to be told so is told to cache: behind what stays until the next edit."""

from collections.abc import Mapping
from typing import Any

from refold.formats.anthropic import as_blocks
from refold.formats.shape import kind_of

MOST = 4
"""Marks that Anthropic takes in a request."""
UNMARKABLE = ("thinking", "redacted_thinking")
DEFAULT = {"type": "ephemeral"}


def marked(request: dict[str, Any], settled: int, cache: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request with a mark behind its `settled` messages, and one at its end where the client marks, too.

    The client's own marks stay where they stand beside the messages: on tools and system text.
    """
    beside = [*(request.get("tools") or ()), *_list(request.get("system"))]
    left = MOST - sum("cache_control" in one for one in beside if isinstance(one, dict))
    messages = list(request["messages"])
    wanted = [len(messages)] if cache else []
    wanted += [settled] if settled and settled not in wanted else []
    for count in wanted[: max(0, left)]:
        messages[count - 1] = _marked(messages[count - 1], dict(cache or DEFAULT))
    return {**request, "messages": messages}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _marked(message: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    """With the mark on the last block that takes one."""
    blocks = as_blocks(message["content"])
    for n in reversed(range(len(blocks))):
        block = blocks[n]
        empty = kind_of(block) == "text" and not block.get("text")
        if isinstance(block, dict) and kind_of(block) not in UNMARKABLE and not empty:
            blocks[n] = {**block, "cache_control": mark}
            return {**message, "content": blocks}
    return message
