"""Where a provider is told to cache: where the client wants it, and behind what stays until the next edit."""

from collections.abc import Sequence
from typing import Any

from refold.core.codec import loads
from refold.dialects.anthropic import as_blocks
from refold.dialects.shape import kind_of
from refold.serve.incoming import unmarked

MARK = "cache_control"
MOST = 4
"""Marks that Anthropic takes in a request."""
UNMARKABLE = ("thinking", "redacted_thinking")
DEFAULT = {"type": "ephemeral"}


def marked(request: dict[str, Any], settled: int, came: Sequence[bytes]) -> dict[str, Any]:
    """The request with the client's own marks on what is sent as it `came`, and one more behind its `settled`
    messages, if there may be one more.
    """
    messages = list(request["messages"])
    for n in range(1, min(len(messages), len(came)) + 1):
        value = loads(came[-n]) if b'"cache_control"' in came[-n] else None
        if value is not None and unmarked(value) == messages[-n]:
            messages[-n] = value
    marks = _marks([request.get("tools"), request.get("system"), *messages])
    if settled and MARK not in request and len(marks) < MOST:
        later = _marks(messages[settled:])  # those that last longer come first
        messages[settled - 1] = _marked(messages[settled - 1], dict(later[0] if later else DEFAULT))
    return {**request, "messages": messages}


def _marks(value: Any) -> list[dict[str, Any]]:
    """All that stand in a part of a request, in order."""
    match value:
        case dict():
            own = [value[MARK]] if isinstance(value.get(MARK), dict) else []
            return own + [mark for key, one in value.items() if key != MARK for mark in _marks(one)]
        case list():
            return [mark for one in value for mark in _marks(one)]
    return []


def _marked(message: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    """With the mark on the last block that takes one."""
    blocks = as_blocks(message["content"])
    for n in reversed(range(len(blocks))):
        block = blocks[n]
        empty = kind_of(block) == "text" and not block.get("text")
        if isinstance(block, dict) and kind_of(block) not in UNMARKABLE and not empty:
            blocks[n] = {MARK: mark, **block}
            return {**message, "content": blocks}
    return message
