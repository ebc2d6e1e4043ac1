"""Skeletons of texts: the exact values first, then prose, in a given number of characters.

JSON becomes `key=value` pairs, other text its head, its errors, its identifiers and its tail.

>>> outline('{"user": {"id": "mia_li_3668", "dob": "1990-04-05"}}').cut(40)
'user.id=mia_li_3668 user.dob=1990-04-05'
>>> outline('[{"flight": "HAT078", "seats": 9}, {"flight": "HAT118", "seats": 12}]').cut(40)
'flight=HAT078 HAT118\\nseats=9 12'
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold.core.lazy import regex
from refold.policies.text import LETTERS, PLAIN, clip, exact_values, exactness, words

Bonus: TypeAlias = Callable[[str], float]
"""Added to the score of a word, by what is known of it besides its shape."""

MAX_PIECES = 4_000
"""Pieces of one text that are considered."""
HEAD_LINES = 2
TAIL_LINES = 2
LINE_CHARS = 160
LONG = 80
"""A value of more characters is outlined as a text."""
DENSE = 2.6
"""Characters per token in a text of exact values."""
SHORTEST = 16
"""Room with fewer characters is not filled."""
MIN_TABLE_ROWS = 3
ERROR_SCORE = 10.0
EDGE_SCORE = 7.0
"""Of the first and last lines."""
PROSE_SCORE = 1.3
"""Of prose among data."""
MAX_ERRORS = 40

_PAIR = regex(r"(?:^|(?<=\s))([A-Za-z_][\w.-]*)=([^\s,;&\"'<>()\[\]{}|=]+)(?=\s|$|,)", re.MULTILINE)
_PAIRS = regex(r"""[A-Za-z_][\w.-]*=(?!.*=["'\[{])[^"'\[{]""")
_NEXT = regex(r" (?=[A-Za-z_][\w.-]*=)")
_ERROR = regex(
    r"^.*(?:error|exception"
    r"|\b(?:traceback|fatal|failed|failure|denied|refused|cannot|not found|no such))\b.*$",
    re.IGNORECASE | re.MULTILINE,
)
_DEFINED = regex(
    r"\b(?:def|class|function|func|fn|interface|type|const|struct|enum|trait|impl|module|package)"
    r"\s+([A-Za-z_]\w*)"
)
_NUMBERED = regex(r"\s*(\d+)\s*[\t:|→]")
_CELL = regex(r"[^\s:|=+-]")
_NAME = regex(r"[^\w.-]+")
_OPENING = regex(r"""[\[{](?=\s*(?:["{\[]|$))""")
_ESCAPED = regex(r"""\\+([n"'])""")


class OutlinePiece(NamedTuple):
    text: str
    score: float
    key: str = ""
    """Neighbors with the same key are written after it together."""
    is_line: bool = False
    """It is written on a line of its own."""

    @property
    def rank(self) -> float:
        """The score, less a penalty for length."""
        return self.score - len(self.text) / 80


class Outline(msgspec.Struct, frozen=True, dict=True):
    """The pieces of a text in their order, with their scores."""

    pieces: tuple[OutlinePiece, ...]
    size: str = ""
    """The size of the text, such as `50 items` or `310 lines`."""
    is_data: bool = False
    """The text is JSON, so that its pairs say more than its beginning."""

    @cached_property
    def _ranked(self) -> list[int]:
        return sorted(range(len(self.pieces)), key=lambda n: -self.pieces[n].rank)

    def cut(self, chars: int, share: int = 3) -> str:
        """The pieces with the highest ranks that fit, in their order."""
        chosen: dict[int, OutlinePiece] = {}
        keys: set[str] = set()
        left = chars + 1
        text = ""
        for n in self._ranked:
            piece = self.pieces[n]
            if piece.is_line:
                limit = min(left - 2, chars // share)
                if len(piece.text) > limit > SHORTEST:
                    piece = piece._replace(text=clip(piece.text, limit))
            size = len(piece.text) + 1
            if piece.key and piece.key not in keys:
                size += len(piece.key) + 1
            if size > left:
                if left < SHORTEST:
                    break
                continue
            if not piece.key and len(piece.text) > 4 and not piece.text.isdigit() and piece.text in text:
                continue  # a chosen line contains it
            chosen[n] = piece
            keys.add(piece.key)
            left -= size
            text += piece.text + "\n"
        return join_pieces(chosen[n] for n in sorted(chosen))


def join_pieces(pieces: Iterable[OutlinePiece]) -> str:
    """Values after their keys, words in a row, lines on lines of their own."""
    parts: list[str] = []
    last = OutlinePiece("", 0.0, is_line=True)
    has_several_values = False  # such a key has a line of its own
    for piece in pieces:
        is_same_key = bool(piece.key) and piece.key == last.key
        begins_line = not is_same_key and (piece.is_line or last.is_line or has_several_values)
        if is_same_key and not has_several_values and len(parts) > 1:
            parts[-2] = "\n"
        has_several_values = is_same_key
        parts.append("\n" if begins_line else " ")
        parts.append(f"{piece.key}={piece.text}" if piece.key and not is_same_key else piece.text)
        last = piece
    return "".join(parts[1:])


def excerpt(text: str, outline: Outline, chars: int) -> str:
    """Head, skeleton and tail of a text that is much too long."""
    text = unescaped(text)
    part = chars // 8
    head, tail = (part, part // 2) if outline.is_data else (2 * part, part)
    middle = outline.cut(chars - head - tail)
    left = max(0, chars - head - tail - len(middle))  # room that the values do not fill
    tail += left // 3
    end = text if len(text) <= tail else f"…{text[len(text) - tail + 1 :]}"
    return "\n".join([clip(text, head + 2 * left // 3), middle, end])


def no_bonus(word: str) -> float:
    return 0.0


def outline(text: str, bonus: Bonus = no_bonus) -> Outline:
    """The outline of a text; `bonus` is added to the scores of its words."""
    value = _json(text)
    if value is None:
        return Outline(_grouped_by_key(_text_or_embedded_data(unescaped(text), bonus)), _size(text, None))
    return Outline(_grouped_by_key(_values(value, bonus)), _size(text, value), is_data=True)


def size_of(text: str) -> str:
    """The size of a text in items or lines, by which parts can be expanded; empty for one line."""
    return _size(text, _json(text))


def _size(text: str, value: dict[str, Any] | list[Any] | None) -> str:
    if value is None:
        lines = text.count("\n") + (not text.endswith("\n"))
        return f"{lines:,} lines" if lines > 1 else ""
    lists = [value] if isinstance(value, list) else [one for one in value.values() if isinstance(one, list)]
    count = max(map(len, lists), default=0)
    return f"{count:,} items" if count else ""


def outline_of_skeleton(text: str) -> Outline:
    """The outline of a text that is a skeleton already: its pairs are pairs again."""
    pairs: list[str] = []
    rest: list[str] = []
    for line in text.split("\n"):
        (pairs if _PAIRS.match(line) else rest).append(line)
    pieces = list(_text("\n".join(rest), no_bonus))
    for pair in chain.from_iterable(map(_NEXT.split, pairs)):
        key, _, value = pair.partition("=")
        values = value.split(" ")
        if not all(exactness(one) >= PLAIN for one in values):
            values = [value]
        pieces += [OutlinePiece(one, _value_score(one, one, no_bonus), key) for one in values]
    return Outline(_grouped_by_key(pieces))


def _grouped_by_key(pieces: Iterable[OutlinePiece]) -> tuple[OutlinePiece, ...]:
    """The values of a key together, at the position of the first."""
    groups = dict[tuple[str, int], list[OutlinePiece]]()
    for n, piece in enumerate(pieces):
        groups.setdefault((piece.key, 0 if piece.key else n), []).append(piece)
    return tuple(piece for group in groups.values() for piece in group)


def _json(text: str) -> dict[str, Any] | list[Any] | None:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) and value else None


def _leaves(value: Any, outer: str, key: str) -> Iterator[tuple[str, Any]]:
    """Keys and values; nested keys are prefixed by the key around them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, key, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, outer, key)
    else:
        yield (f"{outer}.{key}" if outer else key), value


def _values(value: Any, bonus: Bonus) -> Iterator[OutlinePiece]:
    seen = set[tuple[str, str]]()
    for key, leaf in _leaves(value, "", ""):
        text = leaf if isinstance(leaf, str) else json.dumps(leaf)
        if (key, text) in seen or not text:
            continue
        late = min(0.4, len(seen) / 1_000)
        seen.add((key, text))
        if len(seen) > MAX_PIECES:
            return
        if len(text) > LONG or "\n" in text:
            inside = _json(text)
            inner = (
                _values(inside, bonus)
                if inside is not None
                else _text(unescaped(f"{key}={text}" if key else text), bonus, head=1, tail=0)
            )
            for piece in inner:
                is_head = piece.is_line and piece.score < ERROR_SCORE
                yield piece._replace(score=(PROSE_SCORE if is_head else piece.score - 0.3) - late)
        else:
            yield OutlinePiece(text, _value_score(text, leaf, bonus) - late, "" if text in key else key)


def _value_score(text: str, value: Any, bonus: Bonus) -> float:
    if value is None or isinstance(value, bool):
        return 0.8
    return max([1.4, *(exactness(word) + bonus(word) for word in words(text))])


def _text_or_embedded_data(text: str, bonus: Bonus) -> Iterator[OutlinePiece]:
    """A text; or JSON, if that is most of the text; or a table."""
    opening = _OPENING.search(text)
    start = opening.start() if opening else len(text)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):  # no JSON begins there
        end = start
    if end - start > len(text) / 2:
        yield from _text(text[:start], bonus, head=1, tail=0)
        yield from _values(value, bonus)
        yield from _text(text[end:], bonus, head=0, tail=1)
        return
    table = _table(text)
    if table:
        yield from _table_cells(table, bonus)
    else:
        yield from _text(text, bonus)


def _table(text: str) -> list[list[str]]:
    """Rows of cells, if nearly all of the text is a table; the first row names the columns."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    for mark in ("|", "\t", ",", ";"):
        width = lines[0].count(mark) if len(lines) > MIN_TABLE_ROWS else 0
        if width and sum(line.count(mark) == width for line in lines) > 0.9 * len(lines):
            rows = [[cell.strip() for cell in line.strip().strip("|").split(mark)] for line in lines]
            named = all(len(cell) <= LONG // 2 and LETTERS.search(cell) for cell in rows[0] if cell)
            return [row for row in rows if any(_CELL.search(cell) for cell in row)] if named else []
    return []


def _table_cells(rows: list[list[str]], bonus: Bonus) -> Iterator[OutlinePiece]:
    seen = set[tuple[str, str]]()
    for n, row in enumerate(rows[1:]):
        for key, text in zip(rows[0], row, strict=False):
            if text and (key, text) not in seen:
                seen.add((key, text))
                late = min(0.4, n / 100)
                yield OutlinePiece(
                    clip(text, LONG), _value_score(text, text, bonus) - late, _NAME.sub("_", key)
                )


def _text(text: str, bonus: Bonus, head: int = HEAD_LINES, tail: int = TAIL_LINES) -> Iterator[OutlinePiece]:
    """The first and last lines of a text, its errors, and its exact values."""
    lines = [line.strip() for line in text.strip().split("\n")]
    for line in filter(None, lines[:head]):
        yield OutlinePiece(clip(line, LINE_CHARS), EDGE_SCORE, is_line=True)
    errors = dict.fromkeys(clip(match.group().strip(), 2 * LINE_CHARS) for match in _ERROR.finditer(text))
    for line in islice(errors, MAX_ERRORS):
        yield OutlinePiece(line, ERROR_SCORE, is_line=True)
    pairs = {value: key for key, value in _PAIR.findall(text) if exactness(value) >= PLAIN}
    for value, key in islice(pairs.items(), MAX_PIECES):
        yield OutlinePiece(value, exactness(value) + bonus(value) + 0.2, key)
    defined = _definitions(lines)
    for word, score in islice(exact_values(text).items(), MAX_PIECES):
        if word in defined and word not in pairs:
            yield OutlinePiece(f"{word}:{defined[word]}", score + bonus(word) + 1.0)
        elif word not in pairs:
            yield OutlinePiece(word, score + bonus(word))
    for line in filter(None, lines[max(head, len(lines) - tail) :]):
        yield OutlinePiece(clip(line, LINE_CHARS), EDGE_SCORE, is_line=True)


def _definitions(lines: list[str]) -> dict[str, str]:
    """Names that code defines, and their line numbers: those in the text, if its lines are numbered."""
    found = dict[str, str]()
    for n, line in enumerate(lines, 1):
        for name in _DEFINED.findall(line) if len(line) < 2 * LINE_CHARS else ():
            number = _NUMBERED.match(line)
            found.setdefault(name, number[1] if number else str(n))
    return found


def unescaped(text: str) -> str:
    """Decode escaped line ends and quotes in a text that is full of them."""
    if text.count("\\n") <= max(2, text.count("\n")):
        return text
    return _ESCAPED.sub(lambda match: "\n" if match.group(1) == "n" else match.group(1), text)
