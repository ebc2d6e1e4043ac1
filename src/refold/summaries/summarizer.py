"""Who writes summaries: any callable that takes an `Ask` and returns a text, or an awaitable of one.

The text may be prose or Markdown, with any headings or none. What stands under refold's own headings is read
into the sections of the summary; anything else becomes its narrative as it stands.

>>> def shortest(ask: Ask) -> str:
...     return f"## Work done\\n- {len(ask.messages)} messages were exchanged"
"""

from collections.abc import Awaitable
from typing import Literal, Protocol, TypeAlias

import msgspec

from refold.core.message import Message, Usage


class Ask(msgspec.Struct, frozen=True):
    """What is wanted: a model needs no more than `system`, `prompt` and `max_tokens`."""

    kind: Literal["message", "conversation"]
    prompt: str
    """The whole of it, rendered: instructions, the previous summary, and what is newly covered."""
    system: str
    messages: tuple[Message, ...]
    """The originals that are covered, long results whole."""
    previous: str | None
    """The summary before this one, which this one takes the place of."""
    round: int
    max_tokens: int
    """The longest answer that is any use."""
    profile: str


class Answer(msgspec.Struct, frozen=True):
    """A summary with what is known of how it came about."""

    text: str
    model: str | None = None
    usage: Usage | None = None
    finish: Literal["stop", "length", "refusal", "tool-calls", "other"] = "stop"
    """Why the model stopped there."""


Given: TypeAlias = str | Answer


class Summarizer(Protocol):
    """It may have a `name` to be called by, and a `window`: how many tokens its own model takes."""

    def __call__(self, ask: Ask, /) -> Given | Awaitable[Given]:
        """Whatever it raises is a reason to do without it this time; one with a `status_code` of 429 or
        5xx is worth another try."""
