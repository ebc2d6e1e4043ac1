"""A recorded conversation, the values in it that were needed later, and how to look for them.

The search is plain text search. It shares no code with `refold.policies`, which it measures.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from refold.core.codec import dumps
from refold.dialects import openai_chat
from refold.models.count import counter

Json: TypeAlias = dict[str, Any]
DIALECT = "openai-chat"
"""The format in which every conversation is replayed."""
MODEL = "gpt-5"
"""The model whose tokens are counted, and whose window is set to the budget."""
EVERYTHING: Json = {"models": {MODEL: {"window": 10**12}}, "agents": {"default": {"compact": "off"}}}
"""Settings under which nothing is ever hidden."""
NEAR_CHARS = 200
"""Characters before and after a value, and at the beginning of its line, where its key may be."""


class Probe(msgspec.Struct, frozen=True):
    """A value that was needed, and the messages where it first and last occurred and where it was used."""

    conversation: str
    value: str
    kind: str
    first: int
    last: int
    use_at: int
    first_role: str = ""
    last_role: str = ""
    key: str = ""
    """The JSON key or label of the value where it first occurred."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded conversation."""

    source: str
    messages: Sequence[Json]
    counts: Sequence[int]
    """Tokens of each message."""
    probes: Sequence[Probe] = ()
    dropped: int = 0
    """Probes left out, since their value does not occur before its use."""
    id: str = ""


def counted(messages: Sequence[Json], model: str = MODEL) -> list[int]:
    """The tokens of each message."""
    count = counter(model)
    return [count.message(openai_chat.parse(message)) for message in messages]


def text_of(message: Json) -> str:
    """All strings in a message, those in JSON arguments too, and the message as it is sent."""
    return "\n".join((*_strings(message), dumps(message).decode()))


def _strings(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str):
        yield value
        if key == "arguments":
            with suppress(ValueError):
                yield from _strings(json.loads(value))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def has_key_near(text: str, value: str, key: str) -> bool:
    """True if the text has the value with its key near it, or with its key at the beginning of the line."""
    wanted = _words(key)
    at = text.find(value)
    while at >= 0:
        line = text.rfind("\n", 0, at) + 1
        end = at + len(value)
        label = text[line : min(line + NEAR_CHARS, at)]
        before = text[max(0, at - NEAR_CHARS) : at]
        after = text[end : end + NEAR_CHARS]
        if any(wanted in _words(part) for part in (label, before, after)):
            return True
        at = text.find(value, at + 1)
    return False


def _words(text: str) -> str:
    """Letters and digits in lower case, so that `Order-ID` is the label of `order_id`."""
    plain = "".join(char if char.isalnum() else " " for char in text.lower())
    return f" {' '.join(plain.split())} "
