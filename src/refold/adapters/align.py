"""How the history that a framework passes relates to the history that is known. Pure functions.

`align` compares a whole history with the known one; `match_request` compares one request with the history
that it was made from.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple, TypeVar

M = TypeVar("M")
MOST_ENDS = 20
"""Positions that are tried for the newest known message."""


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
    head = _common_prefix(known, passed)
    if head == len(known):
        return Alignment(head, [*range(head)])
    ends = [n for n, id in enumerate(passed) if n >= head and id == known[-1]]
    if ends:
        newest = max(ends[-MOST_ENDS:], key=lambda n: _common_prefix(known[::-1], passed[n::-1]))
        return Alignment(len(known), [*_match_backwards(known[:-1], passed[:newest]), len(known) - 1])
    if head:
        return Alignment(head, [*range(head)])
    return _trimmed_and_changed(known, passed)


def _trimmed_and_changed(known: Sequence[str], passed: Sequence[str]) -> Alignment:
    """Neither the oldest nor the newest is passed: the longest run of known messages still holds."""
    known_ids = set(known)
    start = next((n for n, id in enumerate(passed) if id in known_ids), len(passed))
    length, at = 0, 0
    for n, id in enumerate(known):
        if start < len(passed) and id == passed[start]:
            length, at = max((length, at), (_common_prefix(known[n:], passed[start:]), n))
    if not length or (start and start + length == len(passed)):  # the newest is never taken for an old one
        return Alignment(len(known), [None] * start)
    return Alignment(at + length, [*[None] * start, *range(at, at + length)])


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


def _common_prefix(one: Sequence[str], two: Sequence[str]) -> int:
    most = min(len(one), len(two))
    if one[:most] == two[:most]:
        return most
    return next(n for n in range(most) if one[n] != two[n])


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
