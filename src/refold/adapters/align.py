"""Where the history that a framework hands over goes on from what is known of it. Pure."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

M = TypeVar("M")


class Aligned(NamedTuple):
    keep: int
    """So much of what is known still holds; where that is not all, the past was changed."""
    places: list[int | None]
    """Which of the known each one is that is given, from the first on; None, and what comes after all
    these, is new.
    """


def aligned(known: Sequence[str], given: Sequence[str]) -> Aligned:
    """Frameworks repeat what was said, some without the oldest of it, or with a summary of their own in its
    place; people change the newest. What comes after the newest that is known is new, whatever it says.

    >>> aligned("abc", "abcd")
    Aligned(keep=3, places=[0, 1, 2])
    >>> aligned("abcdef", "aefa")  # trimmed in the middle: all of it still holds
    Aligned(keep=6, places=[0, 4, 5])
    >>> aligned("abcdef", "Sefg")  # something stands for what was trimmed
    Aligned(keep=6, places=[None, 4, 5])
    >>> aligned("abcdef", "abx")  # said otherwise
    Aligned(keep=2, places=[0, 1])
    """
    head = _shared(known, given)
    if head == len(known):
        return Aligned(head, [*range(head)])
    ends = [n for n, one in enumerate(given) if n >= head and one == known[-1]][-ENDS:]
    if ends:
        newest = max(ends, key=lambda n: _shared(known[::-1], given[n::-1]))
        return Aligned(len(known), [*_upwards(known[:-1], given[:newest]), len(known) - 1])
    return Aligned(head, [*range(head)]) if head else _trimmed_and_changed(known, given)


ENDS = 20
"""Places where the newest that is known may stand, of which the best is taken."""


def _trimmed_and_changed(known: Sequence[str], given: Sequence[str]) -> Aligned:
    """Neither the oldest nor the newest is there: it goes on from the longest run of what is known."""
    all = set(known)
    begun = next((n for n, one in enumerate(given) if one in all), len(given))
    starts = [at for at, one in enumerate(known) if [one] == [*given[begun : begun + 1]]]
    size, at = max(((_shared(known[at:], given[begun:]), at) for at in starts), default=(0, 0))
    if not size or (begun and begun + size == len(given)):  # the newest is never taken for an old one
        return Aligned(len(known), [None] * begun)
    return Aligned(at + size, [*[None] * begun, *range(at, at + size)])


def _upwards(known: Sequence[str], given: Sequence[str]) -> list[int | None]:
    """From the end on, each of the known at most once and in order."""
    where: dict[str, list[int]] = {}
    for n, one in enumerate(known):
        where.setdefault(one, []).append(n)
    below, places = len(known), list[int | None]()
    for one in reversed(given):
        found = where.get(one, [])
        while found and found[-1] >= below:
            found.pop()
        at = found.pop() if found else None
        below = below if at is None else at
        places.append(at)
    return places[::-1]


def _shared(one: Sequence[str], two: Sequence[str]) -> int:
    """How many come first in both."""
    most = min(len(one), len(two))
    if one[:most] == two[:most]:
        return most
    return next(n for n in range(most) if one[n] != two[n])


# What others make of a history for one request


def standing(history: Sequence[Hashable], request: Sequence[Hashable]) -> dict[int, int]:
    """Which of the history each one of a request stands for; those without are in this request only.

    Others may say something otherwise, leave it out, or put something between; what stands between the same
    two, as many as there were or more, stands for those.

    >>> standing("abc", "abcx")
    {0: 0, 1: 1, 2: 2}
    >>> standing("abc", "aBcx")  # said otherwise
    {0: 0, 1: 1, 2: 2}
    >>> standing("abcd", "xcd")  # left out
    {1: 2, 2: 3}
    """
    where, found = {key: n for n, key in enumerate(history)}, [(-1, -1)]
    for n, key in enumerate(request):
        if where.get(key, -1) > found[-1][1]:
            found.append((n, where[key]))
    between = list[tuple[int, int]]()
    for (n, at), (m, to) in pairwise([*found, (len(request), len(history))]):
        between += [(n + k, at + k) for k in range(1, to - at)] if m - n >= to - at else []
    return dict(sorted([*found[1:], *between]))


def numbered(keys: Sequence[Hashable]) -> list[Hashable]:
    """Told apart where they are the same; counted from the end, since the oldest may be left out.

    >>> numbered("aba")
    [('a', 2), ('b', 1), ('a', 1)]
    """
    times, told = Counter[Hashable](), list[Hashable]()
    for key in reversed(keys):
        times[key] += 1
        told.append((key, times[key]))
    return told[::-1]


def woven(shown: Sequence[M], places: Sequence[int | None], passing: Mapping[int, M]) -> list[M]:
    """What is shown, with what is in this request only put before the first that stood after it there.

    >>> woven("abd", [0, 1, 3], {2: "c", 4: "e"})
    ['a', 'b', 'c', 'd', 'e']
    """
    due, whole = sorted(passing), list[M]()
    for one, place in zip(shown, places, strict=True):
        while place is not None and due and due[0] < place:
            whole.append(passing[due.pop(0)])
        whole.append(one)
    return [*whole, *(passing[n] for n in due)]
