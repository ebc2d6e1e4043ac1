"""A summarizer is any callable that takes an `Ask` and returns a text, or an awaitable of one.

The text may be prose or Markdown, with any headings or none. Text under refold's own headings goes into the
sections of the summary; everything else becomes its narrative.

>>> def shortest(ask: Ask) -> str:
...     return f"## Work done\\n- {len(ask.messages)} messages were exchanged"
"""

from collections.abc import Awaitable
from typing import Literal, Protocol, TypeAlias

import msgspec

from refold.core.message import Message, Usage


class Ask(msgspec.Struct, frozen=True):
    """A request for a summary: a model needs no more than `system`, `prompt` and `max_tokens`."""

    kind: Literal["message", "conversation"]
    prompt: str
    """Rendered: instructions, the previous summary and the messages."""
    system: str
    messages: tuple[Message, ...]
    """The original messages to summarize, in full."""
    previous: str | None
    """The summary that this one replaces."""
    round: int
    max_tokens: int
    """The longest useful answer."""
    profile: str


class Answer(msgspec.Struct, frozen=True):
    """A summary, with the model and the usage where they are known."""

    text: str
    model: str | None = None
    usage: Usage | None = None
    finish: Literal["stop", "length", "refusal", "tool-calls", "other"] = "stop"
    """Why the model stopped."""


Summary: TypeAlias = str | Answer


class Summarizer(Protocol):
    """May have a `name`, and a `window`: how many tokens its model takes."""

    def __call__(self, ask: Ask, /) -> Summary | Awaitable[Summary]:
        """An error makes refold try the next summarizer, or else compact without a model."""
