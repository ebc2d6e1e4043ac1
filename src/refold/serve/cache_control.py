"""Cache marks of Anthropic requests: the client's own, and one behind what stays until the next edit."""

from collections.abc import Sequence
from typing import Any

from refold.core.codec import loads
from refold.dialects.anthropic import as_blocks
from refold.dialects.shape import kind_of
from refold.serve.incoming import without_cache_control

FIELD = "cache_control"
MAX_MARKS = 4
"""That Anthropic allows in a request."""
UNMARKABLE = ("thinking", "redacted_thinking")
DEFAULT = {"type": "ephemeral"}


def with_cache_control(request: dict[str, Any], settled: int, raws: Sequence[bytes]) -> dict[str, Any]:
    """The request with the client's marks on messages that are sent as they came, whose JSON is `raws`, and
    one more mark behind its first `settled` messages, if another is allowed.
    """
    messages = list(request["messages"])
    for n in range(1, min(len(messages), len(raws)) + 1):
        if b'"cache_control"' in raws[-n]:
            original = loads(raws[-n])
            if without_cache_control(original) == messages[-n]:
                messages[-n] = original
    marks = _marks([request.get("tools"), request.get("system"), *messages])
    if settled and FIELD not in request and len(marks) < MAX_MARKS:
        later = _marks(messages[settled:])
        mark = later[0] if later else DEFAULT  # marks with a longer lifetime must come first
        messages[settled - 1] = _marked(messages[settled - 1], dict(mark))
    return {**request, "messages": messages}


def _marks(value: Any) -> list[dict[str, Any]]:
    """All marks in a part of a request, in order."""
    marks: list[dict[str, Any]] = []
    if isinstance(value, list):
        for one in value:
            marks += _marks(one)
    elif isinstance(value, dict):
        if isinstance(value.get(FIELD), dict):
            marks.append(value[FIELD])
        for key, one in value.items():
            if key != FIELD:
                marks += _marks(one)
    return marks


def _marked(message: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    """The message with the mark on its last block that can have one."""
    blocks = as_blocks(message["content"])
    for n in reversed(range(len(blocks))):
        block = blocks[n]
        is_empty = kind_of(block) == "text" and not block.get("text")
        if isinstance(block, dict) and kind_of(block) not in UNMARKABLE and not is_empty:
            blocks[n] = {FIELD: mark, **block}
            return {**message, "content": blocks}
    return message
