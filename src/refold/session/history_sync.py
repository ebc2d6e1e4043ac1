"""A history that is sent again in full: which messages of it are known, what is new, and where it forks.

The gateway and the adapters ask the same three questions, and this module answers them with pure functions:

identity    `content_digest` and `content_id` say when two messages are the same. Cache marks, key order, null
            and empty fields, a string versus one text block, re-encoded arguments and reasoning left out make
            no difference.
lookup      `prefix_ids` names each message after itself and all messages before it. The gateway stores them
            as ids, and `longest_known_prefix` finds a history among all conversations of a store.
alignment   `align` compares a history with the messages of one conversation, `match_request` one request with
            the history that it was made from.
"""

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple, TypeVar

from refold.core.codec import dumps, read_json
from refold.core.event import Event, Said
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Role,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.stores.store import LOCATED, Key

M = TypeVar("M")
PROBES = 8
"""Prefix ids that are looked up at once."""
OMITTABLE = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts that clients may leave out."""
CONTENT_ID = "said-"
"""The beginning of ids that stand for the content of messages without an id of their own."""
MOST_ENDS = 20
"""Positions that are tried for the newest known message."""


# Identity


def content_digest(message: Message) -> bytes:
    return blake2b(dumps([message.role, *_content(message.parts)]), digest_size=16).digest()


def content_id(pieces: Sequence[Message]) -> str:
    """The id of a message that has none of its own, from the message or from all pieces it is stored in."""
    parts = [part for piece in pieces for part in piece.parts]
    results: list[Part] = [part for part in parts if isinstance(part, ToolResult)]
    others = [part for part in parts if not isinstance(part, ToolResult)]
    role: Role = "tool"
    if others or not results:
        role = next((piece.role for piece in pieces if piece.role != "tool"), "tool")
    return CONTENT_ID + content_digest(Message(role, (*results, *others))).hex()[:24]


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


# Lookup among all conversations


class KnownPrefix(NamedTuple):
    """The part of a history that is stored."""

    length: int
    """In messages."""
    key: Key
    at: int
    """The place of its last message."""


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


# Alignment with one conversation


def recorded_digests(events: Iterable[Event]) -> list[bytes]:
    """The digest of each recorded message, in one piece, after leading system messages."""
    found: list[bytes] = []
    parts: list[Part] = []
    for said in events:
        if not isinstance(said, Said) or (said.line.role == "system" and not found):
            continue
        parts += said.message.parts
        if said.piece is not None and said.piece.n + 1 < said.piece.of:
            continue
        has_other_parts = not all(isinstance(part, ToolResult) for part in parts)
        role = "user" if said.piece and has_other_parts else said.line.role
        found.append(content_digest(Message(role, tuple(parts))))
        parts = []
    return found


def overlap(recorded: Sequence[Any], sent: Sequence[Any]) -> int:
    """How many of the newest recorded messages the sent history begins with."""
    return _run_lengths(sent, recorded)[-1] if recorded else 0


def common_prefix(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many messages two histories have in common at their beginning."""
    most = min(len(one), len(two))
    if one[:most] == two[:most]:
        return most
    return next(n for n in range(most) if one[n] != two[n])


class Alignment(NamedTuple):
    keep: int
    """How many of the known messages still hold; if not all, the past was changed."""
    places: list[int | None]
    """The known message that each passed one is; None, and whatever comes after the list, is new."""


def align(known: Sequence[str], passed: Sequence[str]) -> Alignment:
    """Aligns two histories, given as ids.

    Frameworks pass the history again, some without its oldest messages or with a summary of their own in
    their place; users change the newest. Whatever follows the newest known message is new.

    >>> align("abc", "abcd")
    Alignment(keep=3, places=[0, 1, 2])
    >>> align("abcdef", "aefa")  # trimmed in the middle: all of it still holds
    Alignment(keep=6, places=[0, 4, 5])
    >>> align("abcdef", "Sefg")  # a summary replaces what was trimmed
    Alignment(keep=6, places=[None, 4, 5])
    >>> align("abcdef", "abx")  # changed
    Alignment(keep=2, places=[0, 1])
    """
    head = common_prefix(known, passed)
    if head == len(known):
        return Alignment(head, [*range(head)])
    ends = [n for n, id in enumerate(passed) if n >= head and id == known[-1]]
    if ends:
        newest = max(ends[-MOST_ENDS:], key=lambda n: common_prefix(known[::-1], passed[n::-1]))
        return Alignment(len(known), [*_match_backwards(known[:-1], passed[:newest]), len(known) - 1])
    if head:
        return Alignment(head, [*range(head)])
    return _trimmed_and_changed(known, passed)


def _trimmed_and_changed(known: Sequence[str], passed: Sequence[str]) -> Alignment:
    """Neither the oldest nor the newest is passed: the longest run of known messages still holds."""
    known_ids = set(known)
    start = next((n for n, id in enumerate(passed) if id in known_ids), len(passed))
    lengths = _run_lengths(passed[start:], known)
    length, end = max((length, end) for end, length in enumerate(lengths, start=1))
    if not length or (start and start + length == len(passed)):  # the newest is never taken for an old one
        return Alignment(len(known), [])
    return Alignment(end, [*[None] * start, *range(end - length, end)])


def _run_lengths(beginning: Sequence[Any], messages: Sequence[Any]) -> list[int]:
    """For each message, with how many of `beginning` the messages up to it end: found in linear time.

    >>> _run_lengths("aab", "aaabb")
    [1, 2, 2, 3, 0]
    """
    both = [*beginning, object(), *messages]
    lengths = [0]
    for message in both[1:]:
        length = lengths[-1]
        while length and both[length] != message:
            length = lengths[length - 1]
        lengths.append(length + (both[length] == message))
    return lengths[len(beginning) + 1 :]


def _match_backwards(known: Sequence[str], passed: Sequence[str]) -> list[int | None]:
    """Matches from the end, each known message at most once and in order."""
    indices: dict[str, list[int]] = {}
    for n, id in enumerate(known):
        indices.setdefault(id, []).append(n)
    below = len(known)
    places: list[int | None] = []
    for id in reversed(passed):
        candidates = indices.get(id, [])
        while candidates and candidates[-1] >= below:
            candidates.pop()
        if candidates:
            below = candidates.pop()
            places.append(below)
        else:
            places.append(None)
    return places[::-1]


# Alignment of one request with its history


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if both have the same objects: nothing is compared by value."""
    return len(some) == len(others) and all(map(is_, some, others))


def match_request(history: Sequence[Hashable], request: Sequence[Hashable]) -> dict[int, int]:
    """Which message of the history each message of a request is; the others are in this request only.

    Other middleware may change messages, leave some out, or insert some. Unknown messages between two known
    ones are taken for changed ones if there are at least as many as the history has there.

    >>> match_request("abc", "abcx")
    {0: 0, 1: 1, 2: 2}
    >>> match_request("abc", "aBcx")  # changed
    {0: 0, 1: 1, 2: 2}
    >>> match_request("abcd", "xcd")  # left out
    {1: 2, 2: 3}
    """
    indices = {key: n for n, key in enumerate(_numbered(history))}
    found = [(-1, -1)]
    for n, key in enumerate(_numbered(request)):
        if indices.get(key, -1) > found[-1][1]:
            found.append((n, indices[key]))
    matches = dict(found[1:])
    for (n, at), (next_n, next_at) in pairwise([*found, (len(request), len(history))]):
        if next_n - n >= next_at - at:
            matches.update((n + k, at + k) for k in range(1, next_at - at))
    return dict(sorted(matches.items()))


def _numbered(keys: Sequence[Hashable]) -> list[Hashable]:
    """Equal keys get different numbers, counted from the end, since the oldest may be left out."""
    times = Counter[Hashable]()
    numbered: list[Hashable] = []
    for key in reversed(keys):
        times[key] += 1
        numbered.append((key, times[key]))
    return numbered[::-1]


def insert_transient(shown: Sequence[M], places: Sequence[int | None], transient: Mapping[int, M]) -> list[M]:
    """Puts messages that are in this request only before the first shown one that followed them there.

    >>> insert_transient("abd", [0, 1, 3], {2: "c", 4: "e"})
    ['a', 'b', 'c', 'd', 'e']
    """
    waiting = sorted(transient)
    merged: list[M] = []
    for message, place in zip(shown, places, strict=True):
        while place is not None and waiting and waiting[0] < place:
            merged.append(transient[waiting.pop(0)])
        merged.append(message)
    return [*merged, *(transient[n] for n in waiting)]
