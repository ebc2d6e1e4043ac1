"""A recorded conversation, and the values in it that were needed later."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from refold.core.codec import dumps
from refold.dialects.registry import FORMATS
from refold.models.count import counter

Json: TypeAlias = dict[str, Any]
MODEL = "gpt-5"
"""Whose tokens are counted, and whose window is set to the budget."""


class Probe(msgspec.Struct, frozen=True):
    """A value that was needed, and the messages where it stood first and last and was used."""

    conversation: str
    value: str
    kind: str
    first: int
    last: int
    use_at: int
    first_role: str = ""
    last_role: str = ""
    key: str = ""
    """What stands beside it where it stood first: a JSON key or a label. Empty where there is none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded conversation."""

    source: str
    dialect: str
    messages: Sequence[Json]
    counts: Sequence[int]  # tokens of each message
    probes: Sequence[Probe] = ()
    dropped: int = 0
    """Probes of no use: their value does not stand before it is used."""
    id: str = ""


def counted(messages: Sequence[Json], dialect: str, model: str = MODEL) -> list[int]:
    """The tokens of each message."""
    return [counter(model).message(FORMATS[dialect].parse(message)) for message in messages]


def text_of(message: Json) -> str:
    """All strings in a message, those in JSON arguments too, and the message as it is sent."""
    return "\n".join((*_strings(message), dumps(message).decode()))


def _strings(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str):
        yield value
        if key == "arguments":
            with suppress(ValueError):
                yield from _strings(json.loads(value))
    elif isinstance(value, list | dict):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(inner, str(name))
