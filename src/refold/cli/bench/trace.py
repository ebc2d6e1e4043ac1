"""A recorded conversation, the values in it that later calls needed, and how to look for them.

A value is needed if the arguments of a call have it, and it first occurred in the result of an earlier call:
neither the user nor the model wrote it before. The search is plain text search. It shares no code with
`refold.policies`, which it measures.
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
LENGTHS = range(5, 121)
"""Characters of a value: shorter ones occur by chance, longer ones are texts."""
MIN_GAP = 2
"""Messages from a value's last mention to its use; every request has the newest result anyway."""
BORDERS = str.maketrans(dict.fromkeys("\"'`,;()[]{}<>|=\\", " "))
"""Characters that no value contains."""
TRIMMED = ".:!?*"
MAX_KEY_CHARS = 40
MAX_LABELS = 20
"""Occurrences of a value at which a label is looked for."""


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


# The values that were needed


def extracted(messages: Sequence[Json], conversation: str = "") -> list[Probe]:
    """Values of results that a later call has; each once, for the use farthest from its last mention."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    written: set[str] = set()
    found: dict[str, Probe] = {}
    for n, message in enumerate(messages):
        for value in sorted(_called_with(message)):
            if value in written or n - last.get(value, n) < MIN_GAP:
                continue
            known = found.get(value)
            if known is None or n - last[value] > known.use_at - known.last:
                roles = (messages[first[value]]["role"], messages[last[value]]["role"])
                found[value] = Probe(conversation, value, _kind(value), first[value], last[value], n, *roles)
        for word in set(_split(text_of(message))):
            if message["role"] == "tool" or word in last:
                first.setdefault(word, n)
                last[word] = n
            else:
                written.add(word)
    return sorted(found.values(), key=lambda probe: (probe.use_at, probe.value))


def _called_with(message: Json) -> set[str]:
    """The exact values in the arguments of a message's calls."""
    values: set[str] = set()
    for text in _arguments(message):
        given: Any = text
        with suppress(ValueError):
            given = json.loads(text)
        for leaf in _leaves(given):
            values.update(word for word in _split(leaf) if _is_exact(word))
    return values


def _arguments(message: Json) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call.get("custom") or {}
        yield str(function.get("arguments") or "")


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _split(text: str) -> list[str]:
    words = (word.strip(TRIMMED) for word in text.translate(BORDERS).split())
    return [word for word in words if len(word) in LENGTHS]


def _is_exact(word: str) -> bool:
    """True if nobody would guess it: it has a digit, or is several words in one."""
    return any(char.isdigit() for char in word) or any(mark in word[1:-1] for mark in "/_.@-")


def _kind(value: str) -> str:
    if value.replace(".", "").replace(",", "").isdigit():
        return "number"
    return "path" if "/" in value else "id"


def with_key(probe: Probe, messages: Sequence[Json]) -> Probe:
    """The probe with the key or label of its value, if a search for the two together finds them."""
    source = messages[probe.first] if probe.first < len(messages) else {}
    key = key_of(source, probe.value)
    is_near = bool(key) and has_key_near(text_of(source), probe.value, key)
    return msgspec.structs.replace(probe, key=key) if is_near else probe


def key_of(message: Json, value: str) -> str:
    """The JSON key of a value, or the label before it; empty if it has none."""
    contents = [text for text in _leaves(message.get("content")) if value in text]
    for text in (*contents, *_arguments(message)):
        with suppress(ValueError, RecursionError):
            key = _key(json.loads(text), value)
            if key:
                return key
        label = _label(text, value)
        if label:
            return label
    return ""


def _key(tree: Any, value: str, key: str = "") -> str:
    match tree:
        case dict():
            keys = (_key(inner, value, name) for name, inner in tree.items())
            return next(filter(None, keys), "")
        case list():
            keys = (_key(inner, value, key) for inner in tree)
            return next(filter(None, keys), "")
        case str() if tree != value:
            return _label(tree, value)
        case _:
            return key if str(tree) == value else ""


def _label(text: str, value: str) -> str:
    at = text.find(value)
    for _ in range(MAX_LABELS):
        if at < 0:
            break
        before = text[text.rfind("\n", 0, at) + 1 : at].rstrip(" \t\"'`*")
        words = before[:-1].translate(BORDERS).split() if before.endswith((":", "=")) else []
        label = words[-1].strip("*#.:-?&") if words else ""
        if any(char.isalpha() for char in label) and len(label) <= MAX_KEY_CHARS:
            return label
        at = text.find(value, at + 1)
    return ""
