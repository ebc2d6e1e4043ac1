"""What a text was about, in as few characters as wanted: its exact values before its prose.

JSON becomes `key=value` pairs, other text its head, its errors, its identifiers and its tail.

>>> outline('{"user": {"id": "mia_li_3668", "dob": "1990-04-05"}}').cut(40)
'user.id=mia_li_3668 user.dob=1990-04-05'
>>> outline('[{"flight": "HAT078", "seats": 9}, {"flight": "HAT118", "seats": 12}]').cut(40)
'flight=HAT078 HAT118\\nseats=9 12'
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import islice
from math import log2
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold.core.lazy import regex

Bonus: TypeAlias = Callable[[str], float]
"""What is known of a word besides its shape."""

MOST_PIECES = 4_000
"""Of one text, that are looked at: no skeleton is that long."""
HEAD, TAIL, LINE = 2, 2, 160
"""Lines that stay of the beginning and of the end, and how much of each."""
LONG = 80
"""A value of more characters is a text of its own."""
DENSE = 2.6
"""Characters a token, in text of exact values."""
SHORT = 8_000
"""Characters of a text that is remembered with what was found in it."""
LONGEST_WORD = 300
"""What is longer is no value but data."""
SHORTEST = 16
"""Characters that are worth filling."""
TABLE = 3
"""Lines that make a table at least, besides the one that names its columns."""
ERROR, EDGE, PROSE = 10.0, 7.0, 1.3
"""What a line is worth that tells of an error, that begins or ends a text, or that is prose among data."""
MOST_ERRORS = 40
MANY = 12
"""Words of one shape in one text, from which on each counts less."""
PLAIN = 1.0
"""What is worth less is left out of a skeleton: words that anybody could have used."""

_WORD = regex(r"""https?://[^\s"'`<>\\\])}]+|[^\s"'`<>()\[\]{},;|=\\]+""")
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
_DATE = regex(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}")
_MONEY = regex(r"[$€£¥]\d")
_CAMEL = regex(r"[a-z][A-Z]|[A-Z]{2}[a-z]")
_DOTTED = regex(r"\w\.[A-Za-z_]\w*")
_NUMBER = regex(r"[-+]?[\d.,:]+(?:[eE][-+]?\d+)?(?:[-+]\d\d:\d\d)?%?")
_CELL = regex(r"[^\s:|=+-]")
_NAME = regex(r"[^\w.-]+")
_OPENING = regex(r"""[\[{](?=\s*(?:["{\[]|$))""")
_LETTERS, _DIGITS = regex(r"[A-Za-z]+"), regex(r"\d+")
_ESCAPED = regex(r"""\\+([n"'])""")


class OutlinePiece(NamedTuple):
    text: str
    worth: float
    key: str = ""
    """What it is the value of. Neighbors with the same key stand behind it together."""
    is_line: bool = False
    """It stands on a line of its own."""

    @property
    def rank(self) -> float:
        """What it is worth for the room it takes."""
        return self.worth - len(self.text) / 80


class Outline(msgspec.Struct, frozen=True, dict=True):
    """The pieces of a text in their order, each with what it is worth."""

    pieces: tuple[OutlinePiece, ...]
    size: str = ""
    """How much it was, in its own measure: `50 items`, `310 lines`."""
    is_data: bool = False
    """It was JSON, not prose: its pairs say more than its beginning."""

    @cached_property
    def _ranked(self) -> list[int]:
        return sorted(range(len(self.pieces)), key=lambda n: -self.pieces[n].rank)

    def cut(self, chars: int, share: int = 3) -> str:
        """The most valuable pieces that fit, in their order."""
        chosen, keys, left, text = dict[int, OutlinePiece](), set[str](), chars + 1, ""
        for n in self._ranked:
            piece = self.pieces[n]
            if piece.is_line and len(piece.text) > (most := min(left - 2, chars // share)) > SHORTEST:
                piece = piece._replace(text=clip(piece.text, most))
            size = len(piece.text) + 1 + (len(piece.key) + 1 if piece.key and piece.key not in keys else 0)
            if size > left:
                if left < SHORTEST:
                    break
                continue
            if not piece.key and len(piece.text) > 4 and not piece.text.isdigit() and piece.text in text:
                continue  # a line that stays has it already
            chosen[n] = piece
            keys.add(piece.key)
            left -= size
            text += piece.text + "\n"
        return joined(chosen[n] for n in sorted(chosen))


def joined(pieces: Iterable[OutlinePiece]) -> str:
    """Values behind their keys, words in a row, lines as lines."""
    parts, last, several = list[str](), OutlinePiece("", 0.0, is_line=True), False
    for piece in pieces:
        goes_on = bool(piece.key) and piece.key == last.key
        glue = " " if goes_on or not (piece.is_line or last.is_line or several) else "\n"
        if goes_on and not several:  # keys with several values have a line of their own
            several = True
            if len(parts) > 1:
                parts[-2] = "\n"
        elif not goes_on:
            several = False
        parts += [glue, piece.text if goes_on or not piece.key else f"{piece.key}={piece.text}"]
        last = piece
    return "".join(parts[1:])


def excerpt(text: str, outline: Outline, chars: int) -> str:
    """Head, skeleton and tail of a text: what a reader wants of one that is much too long."""
    text = unescaped(text)
    part = chars // 8
    head, tail = (part, part // 2) if outline.is_data else (2 * part, part)
    middle = outline.cut(chars - head - tail)
    left = max(0, chars - head - tail - len(middle))  # what it has no values for is text
    parts = [clip(text, head + 2 * left // 3), middle, clip(text, tail + left // 3, end=True)]
    return "\n".join(parts)


def outline(text: str, bonus: Bonus | None = None) -> Outline:
    """`bonus` adds to what a word is worth, or takes from it where it is known already."""
    if bonus is None:  # what stays in a view is looked at again and again
        return _remembered(text) if len(text) < SHORT else _outline(text, _nothing)
    return _outline(text, bonus)


def _nothing(word: str) -> float:
    return 0.0


def _outline(text: str, bonus: Bonus) -> Outline:
    value = _json(text)
    if value is None:
        return Outline(_by_key(_mixed(unescaped(text), bonus)), _size(text, None))
    return Outline(_by_key(_values(value, bonus)), _size(text, value), is_data=True)


def size_of(text: str) -> str:
    """How much it is, in its own measure, by which parts of it can be asked for."""
    return _size(text, _json(text))


def _size(text: str, value: dict[str, Any] | list[Any] | None) -> str:
    if value is None:
        lines = text.count("\n") + (not text.endswith("\n"))
        return f"{lines:,} lines" if lines > 1 else ""
    count = len(value) if isinstance(value, list) else _longest(value)
    return f"{count:,} items" if count else ""


@lru_cache(maxsize=256)
def _remembered(text: str) -> Outline:
    return _outline(text, _nothing)


def reread(text: str, bonus: Bonus | None = None) -> Outline:
    """Of what an outline left: its pairs are pairs again."""
    return Outline(_by_key(_left(text, bonus or _nothing)))


def _left(text: str, bonus: Bonus) -> Iterator[OutlinePiece]:
    pairs, rest = list[str](), list[str]()
    for line in text.split("\n"):
        (pairs if _PAIRS.match(line) else rest).append(line)
    yield from _text("\n".join(rest), bonus)
    for line in pairs:
        for pair in _NEXT.split(line):
            key, _, value = pair.partition("=")
            several = value.split(" ")
            many = several if all(worth(one) >= PLAIN for one in several) else [value]
            yield from (OutlinePiece(one, _value_worth(one, one, bonus), key) for one in many)


def _by_key(pieces: Iterable[OutlinePiece]) -> tuple[OutlinePiece, ...]:
    """The values of a key together, where the first of them stood."""
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


def _longest(value: dict[str, Any]) -> int:
    return max((len(inner) for inner in value.values() if isinstance(inner, list)), default=0)


def _leaves(value: Any, outer: str, key: str) -> Iterator[tuple[str, Any]]:
    """Keys and values; what is nested has the outer key before its own."""
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
        if len(seen) > MOST_PIECES:
            return
        if len(text) > LONG or "\n" in text:
            inside = _json(text)
            inner = (
                _values(inside, bonus)
                if inside is not None
                else _text(unescaped(f"{key}={text}" if key else text), bonus, head=1, tail=0)
            )
            for piece in inner:
                is_head = piece.is_line and piece.worth < ERROR
                yield piece._replace(worth=(PROSE if is_head else piece.worth - 0.3) - late)
        else:
            yield OutlinePiece(text, _value_worth(text, leaf, bonus) - late, "" if text in key else key)


def _value_worth(text: str, value: Any, bonus: Bonus) -> float:
    if value is None or isinstance(value, bool):
        return 0.8
    return max([1.4, *(worth(word) + bonus(word) for word in words(text))])


def _mixed(text: str, bonus: Bonus) -> Iterator[OutlinePiece]:
    """A text, and the JSON in it if that is most of it."""
    start = next((m.start() for m in _OPENING.finditer(text)), None)
    if start is not None:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, 0
        if end - start > len(text) / 2:
            yield from _text(text[:start], bonus, head=1, tail=0)
            yield from _values(value, bonus)
            yield from _text(text[end:], bonus, head=0, tail=1)
            return
    table = _table(text)
    if table:
        yield from _cells(table, bonus)
    else:
        yield from _text(text, bonus)


def _table(text: str) -> list[list[str]]:
    """Rows of cells, if the text is nearly nothing else: the first row names the columns."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    for mark in ("|", "\t", ",", ";"):
        width = lines[0].count(mark) if len(lines) > TABLE else 0
        if width and sum(line.count(mark) == width for line in lines) > 0.9 * len(lines):
            rows = [[cell.strip() for cell in line.strip().strip("|").split(mark)] for line in lines]
            named = all(len(cell) <= LONG // 2 and _LETTERS.search(cell) for cell in rows[0] if cell)
            return [row for row in rows if any(_CELL.search(cell) for cell in row)] if named else []
    return []


def _cells(rows: list[list[str]], bonus: Bonus) -> Iterator[OutlinePiece]:
    seen = set[tuple[str, str]]()
    for n, row in enumerate(rows[1:]):
        for key, text in zip(rows[0], row, strict=False):
            if text and (key, text) not in seen:
                seen.add((key, text))
                late = min(0.4, n / 100)
                yield OutlinePiece(
                    clip(text, LONG), _value_worth(text, text, bonus) - late, _NAME.sub("_", key)
                )


def _text(text: str, bonus: Bonus, head: int = HEAD, tail: int = TAIL) -> Iterator[OutlinePiece]:
    """A text's own beginning and end, its errors, and the words in it that are exact."""
    lines = [line.strip() for line in text.strip().split("\n")]
    first, last = lines[:head], lines[max(head, len(lines) - tail) :]
    yield from (OutlinePiece(clip(line, LINE), EDGE, is_line=True) for line in first if line)
    errors = dict.fromkeys(clip(match.group().strip(), 2 * LINE) for match in _ERROR.finditer(text))
    yield from (OutlinePiece(line, ERROR, is_line=True) for line in islice(errors, MOST_ERRORS))
    pairs = {value: key for key, value in _PAIR.findall(text) if worth(value) >= PLAIN}
    most = islice(pairs.items(), MOST_PIECES)
    yield from (OutlinePiece(value, worth(value) + bonus(value) + 0.2, key) for value, key in most)
    defined = _definitions(lines)
    for word, value in islice(exact(text).items(), MOST_PIECES):
        if word not in pairs:
            where = f":{defined[word]}" if word in defined else ""
            yield OutlinePiece(f"{word}{where}", value + bonus(word) + (1.0 if where else 0.0))
    yield from (OutlinePiece(clip(line, LINE), EDGE, is_line=True) for line in last if line)


def _definitions(lines: list[str]) -> dict[str, str]:
    """What code defines, and in which line: its own number, where the lines are numbered."""
    found = dict[str, str]()
    for n, line in enumerate(lines, 1):
        for name in _DEFINED.findall(line) if len(line) < 2 * LINE else ():
            number = _NUMBERED.match(line)
            found.setdefault(name, number[1] if number else str(n))
    return found


def exact(text: str) -> dict[str, float]:
    """The words that could not be guessed, in their order, with what they are worth: more if repeated."""
    found = dict[str, float]()
    for raw, times in Counter(_WORD.findall(text)).items():
        word = _bare(raw)
        value = worth(word)
        if value >= PLAIN:
            value += min(0.9, 0.3 * log2(times))
            found[word] = max(found.get(word, 0.0), value)
    shapes = Counter(map(shape, found))
    return {word: value - crowd(shapes[shape(word)]) for word, value in found.items()}


def shape(word: str) -> str:
    """Words of one shape are of one kind: 14:00 and 09:30, HAT078 and HAT118."""
    return _LETTERS.sub("a", _DIGITS.sub("9", word))


def crowd(alike: int) -> float:
    """Where a text has very many of a kind, each is less likely to be the one."""
    return 0.15 * log2(alike / MANY) if alike > MANY else 0.0


def words(text: str) -> list[str]:
    return list(map(_bare, _WORD.findall(text)))


def vocabulary(text: str) -> set[str]:
    return set(map(_bare, set(_WORD.findall(text))))


def _bare(word: str) -> str:
    return word.rstrip(".:!?*").lstrip("*#&!")


def clip(text: str, chars: int, end: bool = False) -> str:
    """Its beginning or its end, with a mark where it was cut: a word that is not whole is no value."""
    if len(text) <= chars:
        return text
    return f"…{text[len(text) - chars + 1 :]}" if end else f"{text[: chars - 1]}…"


def unescaped(text: str) -> str:
    """JSON or a program's own notation inside a text: its line ends and quotes as they were meant."""
    if text.count("\\n") <= max(2, text.count("\n")):
        return text
    return _ESCAPED.sub(lambda match: "\n" if match.group(1) == "n" else match.group(1), text)


def worth(word: str) -> float:
    """How exact a word is: from 0 for any word to 3 for one that could not be guessed."""
    return _worth(word) if 1 < len(word) <= LONGEST_WORD else 0.0


@lru_cache(maxsize=1 << 13)
def _worth(word: str) -> float:
    size = len(word)
    if "…" in word:
        return 0.0
    digits = any(map(str.isdigit, word))
    letters = any(map(str.isalpha, word))
    if _DATE.match(word):
        return 2.8
    if _MONEY.match(word):
        return 2.6
    if digits and (not letters or _NUMBER.fullmatch(word)):
        return _number(word)
    if not letters:
        return 0.0
    if "/" in word or "@" in word:
        return 3.0 if digits or "." in word or word.count("/") > 1 or word[0] == "/" else 1.6
    if digits:
        return 3.0 if size > 3 else 1.4
    if "_" in word.strip("_"):
        return 2.5
    if _CAMEL.search(word):
        return 2.3
    if _DOTTED.search(word):
        return 2.4
    if word.isupper() and size > 2:
        return 1.6
    if "-" in word and size > 4:
        return 1.5
    return 0.5 if word[0].isupper() else 0.0


def _number(word: str) -> float:
    count = sum(map(str.isdigit, word))
    return 2.0 if count > 3 or "." in word else 1.5 if count == 3 else 0.3
