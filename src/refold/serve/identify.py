"""Which conversation a history belongs to: known again by what was said, not by how it is written.

Each message has a mark, a digest of what it says and of all marks before it. Marks are the ids of what the
gateway stores, so that one look into the store tells where the longest known beginning of a history was said.
Cache marks, key order, null and empty fields, a text or one block of text, arguments written anew and
reasoning left out make no difference.
"""

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from refold.core.codec import dumps, read_json
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Reasoning,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.stores.store import LOCATED, Key

PROBES = 8
"""Marks that are looked up at once."""
UNSAID = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts that clients may leave out."""


class Spot(NamedTuple):
    """The last message of a known beginning."""

    known: int
    """How many of the history's messages."""
    key: Key
    at: int


def essence(message: Message) -> bytes:
    """What a message says, as a digest: the same however it is written."""
    return blake2b(dumps([message.role, *_said(message.parts)]), digest_size=16).digest()


def chained(seed: bytes, digests: Iterable[bytes]) -> list[str]:
    """The mark of each message, from its own digest and all before it."""
    marks, last = list[str](), blake2b(seed, digest_size=16).digest()
    for digest in digests:
        last = blake2b(last + digest, digest_size=16).digest()
        marks.append(LOCATED + urlsafe_b64encode(last).rstrip(b"=").decode())
    return marks


def longest(
    marks: Sequence[str], locate: Callable[[Sequence[str]], Mapping[str, tuple[Key, int]]]
) -> Spot | None:
    """The longest beginning that is stored. What is stored of one is stored of all shorter ones, too.

    The newest are looked up first, since there it is nearly always; then ever narrower.
    """
    low, high = 0, len(marks)  # a beginning of `low` messages is known, one of more than `high` is not
    best: Spot | None = None
    probes = list(range(max(0, high - PROBES), high))
    while probes:
        found = locate([marks[n] for n in probes])
        known = [n for n in probes if marks[n] in found]
        if known:
            low = known[-1] + 1
            best = Spot(low, *found[marks[known[-1]]])
        high = min([high, *(n for n in probes if n >= low)])
        step = max(1, (high - low + PROBES) // (PROBES + 1))
        probes = list(range(low, high, step))[:PROBES]
    return best


def _said(parts: Iterable[Any]) -> list[Any]:
    said: list[Any] = []
    for part in parts:
        match part:
            case Text(text=text):
                if said and isinstance(said[-1], str):
                    said[-1] += text
                else:
                    said.append(text)
            case ToolCall(call_id=id, tool=tool, input=input):
                said.append(["call", id, tool, _arguments(input)])
            case ToolResult(call_id=id, output=output, is_error=is_error):
                inner = [Text(output)] if isinstance(output, str) else output
                said.append(["result", id, is_error, *_said(inner)])
            case Media(kind=kind):
                said.append(["media", kind, part.inline or part.url])
            case Opaque(value=value) if _type(value) not in UNSAID:
                said.append(["opaque", _plain(value)])
            case CompactionMarker(value=value):
                was_opaque = _type(value) == "compaction_summary"  # in digests that are stored already
                said.append(["opaque" if was_opaque else "compaction", _plain(value)])
            case Reasoning() | StepStart() | Opaque():
                pass
    stripped = [one.strip() if isinstance(one, str) else one for one in said]
    return [one for one in stripped if one]


def _type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _arguments(text: str) -> Any:
    try:
        return _plain(read_json(text or "{}"))
    except (ValueError, RecursionError):
        return text.strip()


def _plain(value: Any) -> Any:
    """JSON without what makes no difference: order, marks for caches, what is null or empty, 1.0 for 1."""
    match value:
        case dict():
            inner = {key: _plain(one) for key, one in sorted(value.items()) if key != "cache_control"}
            return {key: one for key, one in inner.items() if one not in (None, "", [], {})}
        case list():
            return list(map(_plain, value))
        case float() if value.is_integer():
            return int(value)
    return value
