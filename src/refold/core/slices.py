"""Parts of a text: which one is requested, and that part, exactly as it stands there."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, TypeAlias

import msgspec

from refold.core.errors import CannotExpandError
from refold.core.lazy import regex

Range: TypeAlias = tuple[int, int | None]
Stretch: TypeAlias = tuple[int, int]
"""Where something begins and ends in a text."""
FindPattern: TypeAlias = Callable[[str, Sequence[str]], list[list[Stretch]]]
"""Where a regular expression matches in each of several texts, within a time limit."""

LONG_LINE = 2_000
"""Characters; of a longer line only the surroundings of a match are shown."""
CHARS_AROUND_MATCH = 200
MIN_TABLE_LINES = 3
"""Including the line that names the columns."""
MAX_NAMED_LINES = 20
WAYS = ("lines", "items", "chars", "match")
_SPACE = regex(r"[\s,:]*")
_RULE = regex(r"[\s|:+-]*")
_FROM_TO = regex(r"(-?\d{1,15})|(-?\d{1,15})?\s*(?:-|\.\.|:|–)\s*(-?\d{1,15})?")
_DECODER = json.JSONDecoder()


class Slice(msgspec.Struct, frozen=True):
    """A request for a part of a text, measured in one of four ways; without any, for all of it."""

    way: str = ""
    range: Range = (0, None)
    pattern: str = ""

    def __str__(self) -> str:
        if self.way == "match":
            return f"match {self.pattern!r}"
        start, end = self.range
        stop = "" if end is None else end
        return f"{self.way} {start}-{stop}" if self.way else "all"


def slice_of(given: Mapping[str, Any]) -> Slice:
    """Reads a request: `lines`, `items`, `chars` are pairs or texts such as `40-50`, `match` is a text.

    Raises:
        CannotExpandError: it is none of these, or several at once.
    """
    requested = [name for name in WAYS if given.get(name) is not None]
    if not requested:
        return Slice()
    if len(requested) > 1:
        raise CannotExpandError(f"Ask for {requested[0]} or {requested[1]}, not for both at once")
    way = requested[0]
    value = given[way]
    if way != "match":
        return Slice(way, _range(way, value))
    if not isinstance(value, str) or not value.strip("/"):
        raise CannotExpandError(
            f"match: expected a text, or a regular expression between slashes; got {value!r}"
        )
    return Slice(way, pattern=value)


def _range(way: str, given: Any) -> Range:
    value = _numbers(given) if isinstance(given, str) else given
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if type(value) is int:
        value = (value, value + (way == "chars"))
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_end, value)):
        raise CannotExpandError(f"{way}: expected two numbers, such as 40-50 or (40, 50); got {given!r}")
    start, end = value
    if start is None:
        start = 0 if way == "chars" else 1
    if way != "chars" and (start < 1 or (end is not None and end < start)):
        raise CannotExpandError(f"{way} are counted from 1, the first before the last; got {given!r}")
    return start, end


def _numbers(text: str) -> Any:
    """A number, or a pair of which one may be None; anything else unchanged."""
    found = _FROM_TO.fullmatch(text.strip())
    if found is None:
        return text
    number, first, last = (None if digits is None else int(digits) for digits in found.groups())
    return (first, last) if number is None else number


def _is_end(value: Any) -> bool:
    return value is None or (type(value) is int and abs(value) < 2**53)


class Cut(msgspec.Struct, frozen=True):
    """A part of a text."""

    text: str
    way: str
    span: Stretch
    """The part; for `match`, from the first match to the last."""
    label: str
    """Such as `lines 40-50 of 300`."""
    units: Sequence[Stretch] = ()
    """The lines or items in it, or the lines around matches."""
    first: int = 1
    """Number of the first unit."""
    total: int | None = 1
    """Units of the whole text; None if only its beginning is in `text`."""

    @property
    def shown(self) -> str:
        units = self.units if self.way == "match" else [self.span]
        return "\n".join(self.text[start:end] for start, end in units)

    def beginning(self, share: float) -> "Cut":
        """The first units, or characters if not even one unit fits. The label says how to go on."""
        many = int(len(self.units) * share)
        if not many:
            start = self.span[0]
            end = start + max(1, int(len(self.shown) * share))
            label = _label("chars", start, end, None if self.total is None else len(self.text))
            return Cut(self.text, "chars", (start, end), f"{label}; go on with chars {end}-")
        last = self.first + many - 1
        if self.way == "match":
            label = f"{self.label}; the first {many} of {len(self.units)} stretches"
        else:
            label = _label(self.way, self.first, last, self.total)
            label += f"; go on with {self.way} {last + 1}-"
        units = self.units[:many]
        return msgspec.structs.replace(self, span=(self.span[0], units[-1][1]), label=label, units=units)


def cut(text: str, part: Slice, find_pattern: FindPattern | None = None) -> Cut:
    """The part of a text.

    >>> cut("one\\ntwo\\nthree", Slice("lines", (2, 3))).shown
    'two\\nthree'

    Raises:
        CannotExpandError: it has no such part; says what it has instead.
    """
    lines = line_spans(text)
    match part.way:
        case "lines":
            return _numbered(text, part, lines)
        case "items":
            return _numbered(text, part, item_spans(text))
        case "chars":
            start, end, _ = slice(*part.range).indices(len(text))
            if start >= end:
                raise CannotExpandError(f"it has {len(text):,} characters, none in {part}")
            return Cut(text, "chars", (start, end), _label("chars", start, end, len(text)))
        case "match":
            (hits,) = matches([text], part.pattern, find_pattern)
            if not hits:
                raise CannotExpandError(f"nothing in its {len(lines):,} lines matches {part.pattern!r}")
            return around(text, hits)
    way = "lines" if len(lines) > 1 else "items"
    units = lines if len(lines) > 1 else item_spans(text)
    return Cut(text, way, (0, len(text)), f"all {len(text):,} characters", units, total=len(units))


def _label(way: str, first: int, last: int, total: int | None) -> str:
    return f"{way} {first}-{last}" if total is None else f"{way} {first}-{last} of {total}"


def _numbered(text: str, part: Slice, units: Sequence[Stretch]) -> Cut:
    """The units with the numbers of the range."""
    first, last = part.range
    total = len(units)
    if not total:
        raise CannotExpandError("it is no list and no table; ask for lines, chars or match")
    if first > total:
        raise CannotExpandError(f"it has {total:,} {part.way}, none in {part}")
    last = min(last or total, total)
    units = units[first - 1 : last]
    span = (units[0][0], units[-1][1])
    return Cut(text, part.way, span, _label(part.way, first, last, total), units, first, total)


def matches(texts: Sequence[str], pattern: str, find_pattern: FindPattern | None) -> list[list[Stretch]]:
    """Where each text contains the pattern: a text in any case, or a regular expression between slashes."""
    if len(pattern) > 2 and pattern[0] == pattern[-1] == "/" and find_pattern is not None:
        return find_pattern(pattern[1:-1], texts)
    plain = re.compile(re.escape(pattern), re.IGNORECASE)
    return [[found.span() for found in plain.finditer(text)] for text in texts]


def around(text: str, hits: Sequence[Stretch]) -> Cut:
    """The lines with matches; of very long lines, the surroundings of each match."""
    lines = line_spans(text)
    units = list[Stretch]()
    numbers = dict[int, None]()
    n = 0
    for start, end in hits:
        while lines[n][1] < start:
            n += 1
        numbers[n + 1] = None
        first = lines[n][0]
        while lines[n][1] < end:
            n += 1
        last = lines[n][1]
        if last - first > LONG_LINE:
            first = max(first, start - CHARS_AROUND_MATCH)
            last = min(last, end + CHARS_AROUND_MATCH)
        if units and first <= units[-1][1]:
            first = units.pop()[0]
        units.append((first, last))
    named = ", ".join(map(str, islice(numbers, MAX_NAMED_LINES)))
    if len(numbers) > MAX_NAMED_LINES:
        named += f" and {len(numbers) - MAX_NAMED_LINES:,} more"
    label = f"{'line' if len(numbers) == 1 else 'lines'} {named} of {len(lines)} match"
    return Cut(text, "match", (units[0][0], units[-1][1]), label, units)


# Units


def line_spans(text: str) -> list[Stretch]:
    """Where each line stands, without its end."""
    ends = [found.start() for found in re.finditer("\n", text)]
    return [(start + 1, end) for start, end in pairwise([-1, *ends, len(text)])]


def item_spans(text: str) -> list[Stretch]:
    """Where each item stands: in a JSON list, in the longest list of a JSON object, as a row of a table."""
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return _json_items(text, start)
    return _table_rows(text)


def _json_items(text: str, start: int) -> list[Stretch]:
    """Raises ValueError if the text is not one JSON value."""
    values, end = _json_values(text, start)
    if text[end:].strip():
        raise ValueError("more text follows the JSON")
    if text[start] == "{":
        lists = [(begin, value) for begin, _, value in values[1::2] if isinstance(value, list)]  # after keys
        if not lists:
            return []
        begin, _ = max(lists, key=lambda found: len(found[1]))
        values, _ = _json_values(text, begin)
    return [(begin, end) for begin, end, _ in values]


def _json_values(text: str, start: int) -> tuple[list[tuple[int, int, Any]], int]:
    """The values in a list, or the keys and values in turn of an object, with their places; and its end."""
    values = list[tuple[int, int, Any]]()
    at = _after_space(text, start + 1)
    while text[at : at + 1] not in ("]", "}"):
        value, end = _DECODER.raw_decode(text, at)
        values.append((at, end, value))
        at = _after_space(text, end)
    return values, at + 1


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _table_rows(text: str) -> list[Stretch]:
    """The rows under the names of the columns of a table, or lines that are JSON objects."""
    lines = [(start, end) for start, end in line_spans(text) if text[start:end].strip()]
    if lines and all(text[start] == "{" for start, _ in lines):
        return lines
    if len(lines) < MIN_TABLE_LINES:
        return []
    for mark in "|\t,;":
        width = text.count(mark, *lines[0])
        even = sum(text.count(mark, *line) == width for line in lines)
        if width and even > 0.9 * len(lines):
            return [line for line in lines[1:] if not _RULE.fullmatch(text, *line)]
    return []
