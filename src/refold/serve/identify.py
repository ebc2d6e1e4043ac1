"""Which conversation a history belongs to: recognized by content, not by how it is written.

Each message has a prefix id, a digest of its content and of all messages before it. Prefix ids are the ids of
the messages that the gateway stores, so one lookup in the store finds the longest known prefix of a history.
Cache marks, key order, null and empty fields, a string versus one text block, re-encoded arguments and
reasoning left out make no difference.
"""

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from refold.core.codec import dumps, read_json
from refold.core.event import Event, Said
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
from refold.stores.store import LOCATED, Key

PROBES = 8
"""Prefix ids that are looked up at once."""
OMITTABLE = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts that clients may leave out."""


class KnownPrefix(NamedTuple):
    """The part of a history that is stored."""

    length: int
    """In messages."""
    key: Key
    at: int
    """The place of its last message."""


def content_digest(message: Message) -> bytes:
    return blake2b(dumps([message.role, *_content(message.parts)]), digest_size=16).digest()


def prefix_ids(seed: bytes, digests: Iterable[bytes]) -> list[str]:
    """The prefix id of each message, from its own digest and all before it."""
    ids = []
    last = blake2b(seed, digest_size=16).digest()
    for digest in digests:
        last = blake2b(last + digest, digest_size=16).digest()
        ids.append(LOCATED + urlsafe_b64encode(last).rstrip(b"=").decode())
    return ids


def longest_known_prefix(
    ids: Sequence[str], locate: Callable[[Sequence[str]], Mapping[str, tuple[Key, int]]]
) -> KnownPrefix | None:
    """The longest prefix that is stored. Where one is stored, all shorter ones are.

    The newest ids are looked up first, since the end of the prefix is nearly always there.
    """
    low = 0  # a prefix of `low` messages is known
    high = len(ids)  # a prefix of more than `high` messages is not
    best: KnownPrefix | None = None
    probes = list(range(max(0, high - PROBES), high))
    while probes:
        found = locate([ids[n] for n in probes])
        known = [n for n in probes if ids[n] in found]
        if known:
            low = known[-1] + 1
            best = KnownPrefix(low, *found[ids[known[-1]]])
        high = min([high, *(n for n in probes if n >= low)])
        step = max(1, (high - low + PROBES) // (PROBES + 1))
        probes = list(range(low, high, step))[:PROBES]
    return best


def recorded_digests(events: Iterable[Event]) -> list[tuple[int, bytes]]:
    """Place and digest of each recorded message, in one piece, after leading system messages."""
    found: list[tuple[int, bytes]] = []
    parts: list[Part] = []
    for said in events:
        if not isinstance(said, Said) or (said.line.role == "system" and not found):
            continue
        parts += said.message.parts
        if said.piece is not None and said.piece.n + 1 < said.piece.of:
            continue
        has_other_parts = not all(isinstance(part, ToolResult) for part in parts)
        role = "user" if said.piece and has_other_parts else said.line.role
        found.append((said.at, content_digest(Message(role, tuple(parts)))))
        parts = []
    return found


def overlap(recorded: Sequence[bytes], sent: Sequence[bytes]) -> int:
    """How many of the newest recorded messages the sent history begins with."""
    for length in range(min(len(recorded), len(sent)), 0, -1):
        if recorded[-length] == sent[0] and recorded[-length:] == sent[:length]:
            return length
    return 0


def _content(parts: Iterable[Any]) -> list[Any]:
    """What counts of parts, as JSON. Digests of it are stored: it must never change."""
    content: list[Any] = []
    for part in parts:
        match part:
            case Text(text=text):
                if content and isinstance(content[-1], str):
                    content[-1] += text
                else:
                    content.append(text)
            case ToolCall(call_id=id, tool=tool, input=input):
                content.append(["call", id, tool, _arguments(input)])
            case ToolResult(call_id=id, output=output, is_error=is_error):
                inner = [Text(output)] if isinstance(output, str) else output
                content.append(["result", id, is_error, *_content(inner)])
            case Media(kind=kind):
                content.append(["media", kind, part.inline or part.url])
            case Opaque(value=value) if _type(value) not in OMITTABLE:
                content.append(["opaque", _normalized(value)])
            case CompactionMarker(value=value):
                was_opaque = _type(value) == "compaction_summary"  # in digests that are stored already
                content.append(["opaque" if was_opaque else "compaction", _normalized(value)])
            case Reasoning() | StepStart() | Opaque():
                pass
    stripped = (one.strip() if isinstance(one, str) else one for one in content)
    return list(filter(None, stripped))


def _type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _arguments(text: str) -> Any:
    try:
        return _normalized(read_json(text or "{}"))
    except (ValueError, RecursionError):
        return text.strip()


def _normalized(value: Any) -> Any:
    """JSON without what does not count: key order, cache marks, null and empty fields, 1.0 for 1."""
    match value:
        case dict():
            fields = {key: _normalized(one) for key, one in sorted(value.items()) if key != "cache_control"}
            return {key: one for key, one in fields.items() if one not in (None, "", [], {})}
        case list():
            return list(map(_normalized, value))
        case float() if value.is_integer():
            return int(value)
    return value
