"""Which part of a text is asked for, and that part, exactly as it stands there."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec

from refold.core.errors import CannotExpandError
from refold.core.lazy import regex

Range: TypeAlias = tuple[int, int | None]
Find: TypeAlias = Callable[[str, Sequence[str]], list[list[tuple[int, int]]]]
"""Where a regular expression matches in texts: this may take long, so somebody else bounds it."""

LONG_LINE = 2_000
"""Characters from which on a line that matches is shown only around what matches."""
AROUND = 200
"""Characters on each side, then."""
TABLE = 3
"""Rows that a table has at least, with the one that names its columns."""
WAYS = ("lines", "items", "chars", "match")
_SPACE = regex(r"[\s,:]*")
_RULE = regex(r"[\s|:+-]*")
_FROM_TO = regex(r"\s*(-?\d{1,15})?\s*(?:(?P<to>-|\.\.|:|–)\s*(-?\d{1,15})?\s*)?")


class Slice(msgspec.Struct, frozen=True):
    """A part of a text, by one of four measures; by none, all of it."""

    way: str = ""
    range: Range = (0, None)
    pattern: str = ""

    def __str__(self) -> str:
        """As it is asked for."""
        if self.way == "match":
            return f"match {self.pattern!r}"
        start, end = self.range
        return f"{self.way} {start}-{'' if end is None else end}" if self.way else "all"


def slice_of(given: Mapping[str, Any]) -> Slice:
    """From what was asked: `lines`, `items`, `chars` are pairs or texts such as `40-50`, `match` is a text.

    Raises:
        CannotExpandError: it is none of these, or several at once.
    """
    asked = [name for name in WAYS if given.get(name) is not None]
    if len(asked) > 1:
        raise CannotExpandError(f"Ask for {asked[0]} or {asked[1]}, not for both at once")
    if not asked:
        return Slice()
    way, value = asked[0], given[asked[0]]
    if way == "match":
        if not isinstance(value, str) or not value.strip("/"):
            raise CannotExpandError(
                f"match is a text, or a regular expression between slashes; got {value!r}"
            )
        return Slice(way, pattern=value)
    return Slice(way, _range(way, value))


def _range(way: str, value: Any) -> Range:
    ends: Sequence[Any] = ()
    if isinstance(value, str) and (found := _FROM_TO.fullmatch(value)) and value.strip():
        start, to, end = found.groups()
        first = int(start) if start is not None else 0 if way == "chars" else 1
        ends = (first, int(end) if end is not None else None if to else first + (way == "chars"))
    elif isinstance(value, int) and not isinstance(value, bool):
        ends = (value, value + (way == "chars"))
    elif isinstance(value, list | tuple) and len(value) in (1, 2):
        ends = (*value, value[0]) if len(value) == 1 else value
        ends = (0, ends[1]) if way == "chars" and ends[0] is None else ends
    numbers = [end for end in ends if end is not None]
    if not numbers or ends[0] is None or not all(type(end) is int and abs(end) < 2**53 for end in numbers):
        raise CannotExpandError(f"{way} are two numbers, such as 40-50 or (40, 50); got {value!r}")
    start, end = ends
    if way != "chars" and (start < 1 or (end is not None and end < start)):
        raise CannotExpandError(f"{way} are counted from 1, the first before the last; got {value!r}")
    return start, end


class Cut(msgspec.Struct, frozen=True):
    """Stretches of a text, and what they are of it."""

    text: str
    spans: tuple[tuple[int, int], ...]
    label: str
    """Such as `lines 40-50 of 300`."""
    first: int | None = None
    """Number of the first line of the text, where that is a part already and nobody knows of how much."""

    @property
    def shown(self) -> str:
        return "\n".join(self.text[start:end] for start, end in self.spans)


def cut(text: str, part: Slice, find: Find | None = None) -> Cut:
    """The part of a text.

    >>> cut("one\\ntwo\\nthree", Slice("lines", (2, 3))).shown
    'two\\nthree'

    Raises:
        CannotExpandError: it has no such part; says what it has instead.
    """
    match part.way:
        case "lines":
            return _counted(text, part, line_spans(text))
        case "items":
            return _counted(text, part, item_spans(text))
        case "chars":
            start, stop, _ = slice(*part.range).indices(len(text))
            if start >= stop:
                raise CannotExpandError(f"it has {len(text):,} characters, none in {part}")
            return Cut(text, ((start, stop),), f"chars {start}-{stop} of {len(text)}")
        case "match":
            (hits,) = matches([text], part.pattern, find)
            if not hits:
                many = f"{len(line_spans(text)):,} lines"
                raise CannotExpandError(f"nothing in its {many} matches {part.pattern!r}")
            return around(text, hits)
    return Cut(text, ((0, len(text)),), f"all {len(text):,} characters")


def _counted(text: str, part: Slice, spans: Sequence[tuple[int, int]]) -> Cut:
    start, end = part.range[0], min(part.range[1] or len(spans), len(spans))
    if not spans:
        raise CannotExpandError("it is no list and no table; ask for lines, chars or match")
    if start > len(spans):
        raise CannotExpandError(f"it has {len(spans):,} {part.way}, none in {part}")
    span = (spans[start - 1][0], spans[end - 1][1])
    return Cut(text, (span,), f"{part.way} {start}-{end} of {len(spans)}")


def line_spans(text: str) -> list[tuple[int, int]]:
    """Where each line stands, without its end."""
    ends = [found.start() for found in re.finditer("\n", text)]
    return [(start + 1, end) for start, end in pairwise([-1, *ends, len(text)])]


def matches(texts: Sequence[str], pattern: str, find: Find | None) -> list[list[tuple[int, int]]]:
    """Where each text has another in it, in capitals or not; or where a regular expression between slashes
    matches.
    """
    if len(pattern) > 2 and pattern[0] == pattern[-1] == "/" and find is not None:
        return find(pattern[1:-1], texts)
    plain = re.compile(re.escape(pattern), re.IGNORECASE)
    return [[found.span() for found in plain.finditer(text)] for text in texts]


def around(text: str, hits: Sequence[tuple[int, int]]) -> Cut:
    """The lines that have hits in them."""
    lines = line_spans(text)
    spans, numbers, n = list[tuple[int, int]](), list[int](), 0
    for start, end in hits:
        while lines[n][1] < start:
            n += 1
        first, numbers = lines[n][0], [*numbers, n + 1]
        while lines[n][1] < end:
            n += 1
        last = lines[n][1]
        if last - first > LONG_LINE:
            first, last = max(first, start - AROUND), min(last, end + AROUND)
        if spans and first <= spans[-1][1]:
            first = spans.pop()[0]
        spans.append((first, last))
    return Cut(text, tuple(spans), f"{_named([*dict.fromkeys(numbers)])} of {len(lines)} match")


def _named(numbers: Sequence[int]) -> str:
    """Lines by their numbers, the first of many."""
    named = ", ".join(map(str, numbers[:20]))
    more = f" and {len(numbers) - 20:,} more" if len(numbers) > 20 else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}"


def item_spans(text: str) -> list[tuple[int, int]]:
    """Where each item stands: in a JSON list, in the longest list of a JSON object, as a row of a table."""
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] in ("[", "{"):
        found = _json_spans(text, start)
        if found is not None:
            return found
    return _rows(text)


def _json_spans(text: str, start: int) -> list[tuple[int, int]] | None:
    """None where it is no JSON, or has more after it."""
    read = json.JSONDecoder().raw_decode
    try:
        if text[read(text, start)[1] :].strip():
            return None
        if text[start] == "[":
            return [(one, end) for one, end, _ in _inner(text, start, read)]
        values = list(_inner(text, start, read))[1::2]  # keys and values in turn
        lists = [(one, value) for one, _, value in values if isinstance(value, list)]
        longest = max(lists, key=lambda found: len(found[1]), default=None)
        return [] if longest is None else [(one, end) for one, end, _ in _inner(text, longest[0], read)]
    except (ValueError, RecursionError):
        return None


def _inner(text: str, start: int, read: Callable[[str, int], tuple[Any, int]]) -> list[tuple[int, int, Any]]:
    """What stands in a list or an object, from where to where."""
    found, at = list[tuple[int, int, Any]](), _after_space(text, start + 1)
    while text[at] not in "]}":
        value, end = read(text, at)
        found.append((at, end, value))
        at = _after_space(text, end)
    return found


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _rows(text: str) -> list[tuple[int, int]]:
    """The rows under the names of the columns, if the text is nearly nothing but a table."""
    lines = [(start, end) for start, end in line_spans(text) if text[start:end].strip()]
    if lines and all(text[start] == "{" for start, _ in lines):  # one JSON object a line
        return lines
    for mark in "|\t,;":
        width = text.count(mark, *lines[0]) if len(lines) >= TABLE else 0
        even = sum(text.count(mark, *line) == width for line in lines)
        if width and even > 0.9 * len(lines):
            return [line for line in lines[1:] if not _RULE.fullmatch(text, *line)]
    return []
