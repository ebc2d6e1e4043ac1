"""Which values of a conversation were needed later? Read from the record, where nobody has written it down.

A value is needed if the arguments of a call have it, and neither the user nor the model was the first to say
it: it came with the result of an earlier call.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from refold.cli.bench.score import has_beside
from refold.cli.bench.trace import Json, Probe, text_of

LENGTHS = range(5, 121)
"""Characters: shorter ones stand somewhere by chance, longer ones are no values but texts."""
LEAST_GAP = 2
"""Messages from a value's last mention to its use: what the newest result says is in every request anyway."""
BORDERS = str.maketrans(dict.fromkeys("\"'`,;()[]{}<>|=\\", " "))
"""What no value goes across."""
TRIMMED = ".:!?*"
LONGEST_KEY = 40
FEW = 20
"""Places of a value that are looked at for a label."""


def extracted(messages: Sequence[Json], conversation: str = "") -> list[Probe]:
    """Values of a result that a later call has, each once: where its last mention is farthest away."""
    first, last, known = dict[str, int](), dict[str, int](), set[str]()
    found = dict[str, Probe]()
    for n, message in enumerate(messages):
        for value in sorted({one for text in arguments(message) for one in _values(text)}):
            if value not in known and n - last.get(value, n) >= LEAST_GAP:
                roles = (messages[first[value]]["role"], messages[last[value]]["role"])
                probe = Probe(conversation, value, _kind(value), first[value], last[value], n, *roles)
                if value not in found or n - last[value] > found[value].use_at - found[value].last:
                    found[value] = probe
        for word in set(_split(text_of(message))):
            if message["role"] == "tool" or word in last:
                first.setdefault(word, n)
                last[word] = n
            else:
                known.add(word)
    return sorted(found.values(), key=lambda probe: (probe.use_at, probe.value))


def arguments(message: Json) -> Iterator[str]:
    """What each call of a message is called with."""
    for call in message.get("tool_calls") or ():
        yield str((call.get("function") or call.get("custom") or {}).get("arguments") or "")


def _values(arguments: str) -> Iterator[str]:
    try:
        given = json.loads(arguments)
    except ValueError:
        given = arguments
    for leaf in _leaves(given):
        yield from filter(_is_exact, _split(leaf))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _split(text: str) -> list[str]:
    words = (word.strip(TRIMMED) for word in text.translate(BORDERS).split())
    return [word for word in words if len(word) in LENGTHS]


def _is_exact(word: str) -> bool:
    """Nobody would guess it: it has a digit, or is several words in one."""
    return any(map(str.isdigit, word)) or any(mark in word[1:-1] for mark in "/_.@-")


def _kind(value: str) -> str:
    if value.replace(".", "").replace(",", "").isdigit():
        return "number"
    return "path" if "/" in value else "id"


# What stands beside a value


def with_key(probe: Probe, messages: Sequence[Json]) -> Probe:
    """The same, with the key or label that it has where it stood first, if that can be found there again."""
    source = messages[probe.first] if probe.first < len(messages) else {}
    key = key_of(source, probe.value)
    near = bool(key) and has_beside(text_of(source), probe.value, key)
    return msgspec.structs.replace(probe, key=key) if near else probe


def key_of(message: Json, value: str) -> str:
    """The JSON key of a value, or the label before it; nothing where it has none."""
    contents = [text for text in _leaves(message.get("content")) if value in text]
    for text in (*contents, *arguments(message)):
        with suppress(ValueError, RecursionError):
            if key := _key(json.loads(text), value):
                return key
        if label := _label(text, value):
            return label
    return ""


def _key(tree: Any, value: str, key: str = "") -> str:
    match tree:
        case dict():
            return next((found for name, one in tree.items() if (found := _key(one, value, name))), "")
        case list():
            return next((found for one in tree if (found := _key(one, value, key))), "")
        case str() if tree != value:
            return _label(tree, value)
        case _:
            return key if str(tree) == value else ""


def _label(text: str, value: str) -> str:
    for at in islice(_places(text, value), FEW):
        before = text[text.rfind("\n", 0, at) + 1 : at].rstrip(" \t\"'`*")
        if before.endswith((":", "=")):
            words = before[:-1].translate(BORDERS).split()
            label = words[-1].strip("*#.:-?&") if words else ""
            if any(map(str.isalpha, label)) and len(label) <= LONGEST_KEY:
                return label
    return ""


def _places(text: str, value: str) -> Iterator[int]:
    at = text.find(value)
    while at >= 0:
        yield at
        at = text.find(value, at + 1)
