"""Tokens of a message, counted offline with the vocabulary of OpenAI's current models."""

from functools import cache
from typing import Any

from refold.core.codec import dumps
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)

FRAMING_TOKENS = 4
"""What role and framing of a message take."""
MEDIA_TOKENS = 1_000
"""What an image, a file or a sound is taken for."""


def count_text(text: str) -> int:
    """What the text takes; what looks like a special token in it is text too."""
    if not text:
        return 0
    try:
        if "<|" in text:
            return len(_tokenizer().encode_ordinary(text))
        return len(_tokenizer().encode_flat(text)) // 4  # four bytes an id
    except UnicodeEncodeError:
        return count_text(text.encode("utf-8", "replace").decode())


def count_message(message: Message) -> int:
    return FRAMING_TOKENS + count_text(message.name or "") + sum(map(_count_part, message.parts))


def count_json(value: Any) -> int:
    """What tool schemas and the like take, written as compact JSON."""
    return count_text(dumps(value).decode())


def _count_part(part: Part) -> int:
    match part:
        case Text(text=text) | Reasoning(text=text):
            return count_text(text)
        case ToolCall(tool=tool, input=input):
            return count_text(tool) + count_text(input)
        case ToolResult(output=str(text)):
            return count_text(text)
        case ToolResult(output=tuple(parts)):
            return sum(map(_count_part, parts))
        case Media():
            return MEDIA_TOKENS
        case Opaque(value=value) | CompactionMarker(value=value):
            return count_json(value)
        case StepStart():
            return 0
    raise AssertionError(part)


@cache
def _tokenizer() -> Any:
    from splintr import Tokenizer  # 43 ms, paid only by those who count

    return Tokenizer.from_pretrained("o200k_base")
