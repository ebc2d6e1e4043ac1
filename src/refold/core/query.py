"""What to look for in what was said: one way to take text apart, used on both sides, so that a thing asked
for exactly as it was said is always found.

>>> fold("getUserById failed: ERR-4711, 数据库")
'getuserbyid failed err 4711 数 据 库'
>>> query = parse_query('"err 4711" user data* tool:psql')
>>> query.matches(SearchText.of("getUserById failed: ERR-4711 in database", ("psql",), "tool"))
True
"""

import re
from collections.abc import Sequence
from itertools import islice
from math import log
from typing import NamedTuple, get_args
from unicodedata import normalize

import msgspec

from refold.core.errors import SettingError
from refold.core.lazy import regex
from refold.core.message import Role

LONGEST = 10_000
"""Characters of a query that are read."""
MOST_WORDS = 32
"""Words and phrases of a query that are looked for: the first ones."""
MOST_PREFIXES = 4
"""Of these, how many may be prefixes; more are taken as whole words."""
MOST_TERMS = 64
"""Terms of one word or phrase that are looked for: the first ones."""
LEAST_PREFIX = 3
"""Characters of a prefix; a shorter one is taken as a whole word."""
LONGEST_TERM = 128
"""Characters of a term that count."""
MOST_PARTS = 8
"""A name has no more parts than this, of two characters or more on the average; else it is a hash."""

MOST_PLACES, FIRST_TERMS = 256, 4
"""How often an excerpt looks for a word in a text, and for how much of a phrase."""

_SIGNS = (  # scripts that are written without spaces, and emoji: any run of them is a phrase
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u318f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U0001f000-\U0001faff\U00020000-\U0003ffff"
)
_TERM = regex(f"[{_SIGNS}]|[^\\W_{_SIGNS}]+")
_BETWEEN = r"[\x00-/:-@\[-`{-\x7f]*"  # what no term has: nothing can be matched in two ways
_SPACES = {code: " " for code in range(128) if not chr(code).isalnum()}
_JOINERS = "_-./:@#$~+"
_JOINED = {code: " " for code in _SPACES if chr(code) not in _JOINERS}
_ODD = regex(f"[^\\w{re.escape(_JOINERS)}]")
_PRIVATE = {ord(char): chr(0xE000 + ord(char)) for char in _JOINERS}
_APART = dict.fromkeys(map(ord, _PRIVATE.values()), " ")
_PART = regex(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_ESCAPE = regex(r"\\+(?:u([0-9a-fA-F]{4})|[nrtbf])?")
_ASKED = regex(r'(?P<filter>(?i:tool|role)):(?P<value>"[^"]+"|[^\s"]+)|"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+)')


def fold(text: str) -> str:
    """The terms of a text, in order and one space apart: runs of letters and digits, whatever their case."""
    is_plain = text.isascii()
    terms = text.lower().translate(_SPACES).split() if is_plain else _TERM.findall(_one_form(text))
    return " ".join([term[:LONGEST_TERM] for term in terms] if len(text) > LONGEST_TERM else terms)


def _one_form(text: str) -> str:
    return normalize("NFKC", text).casefold()


def parts(text: str) -> str:
    """The parts of names such as `getUserById` or `ERR4711`, as terms."""
    runs = dict.fromkeys(text.translate(_SPACES).split())
    names = (
        _PART.findall(run) for run in runs if not run.isdecimal() and not (run.islower() and run.isalpha())
    )
    return " ".join(part.lower() for some in names if _is_name(some) for part in some)


def names(text: str) -> str:
    """Names of several pieces, such as `src/a/b.py` or `ERR-4711`, as one term each: what joins them is
    written with characters that no text has.
    """
    plain = text if text.isascii() else _ODD.sub(" ", _one_form(text))
    runs = dict.fromkeys(plain.translate(_JOINED).split())
    found = " ".join([run.strip(_JOINERS)[:LONGEST_TERM] for run in runs if not run.isalnum()])
    return " ".join([run for run in found.casefold().split() if not run.isalnum()]).translate(_PRIVATE)


def _is_name(some: list[str]) -> bool:
    return 1 < len(some) <= MOST_PARTS and sum(map(len, some)) >= 2 * len(some)


class SearchText(NamedTuple):
    """What can be found of a message."""

    text: str
    """Its terms."""
    parts: str
    """Parts of its names, and names as a whole; and all its terms again, with escapes such as `\\n` of JSON
    taken for what they mean.
    """
    tools: tuple[str, ...]
    role: str

    @classmethod
    def of(cls, text: str, tools: Sequence[str], role: str) -> "SearchText":
        terms = fold(text)
        plain = _ESCAPE.sub(_meant, text) if "\\" in text else text
        again = fold(plain) if plain is not text else terms
        more = [parts(plain), names(plain), *((again, names(text)) if again != terms else ())]
        return cls(terms, " ".join(filter(None, more)), tuple(tools), role)


def _meant(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else " "


class SearchTerm(msgspec.Struct, frozen=True):
    """A word, a name or a phrase: its terms stand one after the other."""

    terms: tuple[str, ...]
    parts: tuple[str, ...] = ()
    """Of a name: it is also found where these stand one after the other."""
    name: str = ""
    """The whole of a name of several pieces: where this is found, it is what was meant."""
    is_prefix: bool = False
    """The last term may go on."""
    must: bool = False
    """It was asked for in quotes: nothing is found without it."""

    def count(self, words: SearchText) -> int:
        """How often it is there."""
        end = "" if self.is_prefix else " "
        needles = [f" {' '.join(some)}{end}" for some in (self.terms, self.parts) if some]
        return sum(f" {text} ".count(needle) for text in words[:2] for needle in needles)


class Query(msgspec.Struct, frozen=True):
    wanted: tuple[SearchTerm, ...]
    tools: tuple[str, ...] = ()
    """Any of these; case does not matter, and one that ends with * is a prefix."""
    roles: tuple[str, ...] = ()
    """Any of these."""
    text: str = ""
    """As it was asked, without filters: what an embedder gets."""

    def allows(self, tools: Sequence[str], role: str) -> bool:
        """The filters are met."""
        names = [tool.casefold() for tool in tools]
        asked = [tool.casefold() for tool in self.tools]
        is_tool = not asked or any(
            name.startswith(one[:-1]) if one.endswith("*") else name == one for name in names for one in asked
        )
        return is_tool and (not self.roles or role in self.roles)

    def matches(self, words: SearchText, *, any_word: bool = False) -> bool:
        """All that is wanted is there; or all that must be, and any of the words."""
        if not self.allows(words.tools, words.role):
            return False
        needed = [one for one in self.wanted if one.must or not any_word]
        words_wanted = [one for one in self.wanted if not one.must] if any_word else []
        return all(one.count(words) for one in needed) and (
            not words_wanted or any(one.count(words) for one in words_wanted)
        )

    @property
    def is_phrase(self) -> bool:
        """It is one phrase, or one name of several pieces, and no other word says which place is better."""
        return len(self.wanted) == 1 and any(
            len(one.terms) > 1 and (one.must or bool(one.name)) for one in self.wanted
        )

    @property
    def can_relax(self) -> bool:
        """There are several words, any of which may be better than nothing."""
        return len(self.wanted) > 1 and not all(one.must for one in self.wanted)

    def weight(self, words: SearchText) -> float:
        """How much there is of what is wanted, where nothing is known of how rare it is."""
        counts = [one.count(words) for one in self.wanted]
        names = sum(f" {one.name} " in f" {words.parts} " for one in self.wanted if one.name)
        return 10.0 * names + sum(1 + log(count) for count in counts if count)


def parse_query(text: str) -> Query:
    """SearchText, "a phrase", pref*, tool:NAME, role:ROLE; whatever else is in it is taken as text.

    Raises:
        SettingError: there is nothing in it to look for.
    """
    if not isinstance(text, str):
        raise SettingError("query", f"expected a text, got {type(text).__name__}")
    wanted, filters, plain = dict[SearchTerm, None](), dict[str, list[str]](tool=[], role=[]), list[str]()
    asked = text if len(text) <= LONGEST else text[:LONGEST].rsplit(None, 1)[0]
    for found in _ASKED.finditer(asked):
        filter, value = (found["filter"] or "").lower(), (found["value"] or "").strip('"')
        value = value.lower() if filter == "role" else value
        if filter == "tool" or (filter == "role" and value in get_args(Role)):
            filters[filter].append(value)
            continue
        phrase = found["phrase"]
        words = phrase if phrase is not None else found.group()
        plain.append(words)
        prefixes = sum(one.is_prefix for one in wanted)
        one = _wanted(words, must=phrase is not None, may_go_on=prefixes < MOST_PREFIXES)
        if one.terms and len(wanted) < MOST_WORDS:
            wanted[one] = None
    tools, roles = (tuple(dict.fromkeys(filters[name][:MOST_WORDS])) for name in ("tool", "role"))
    if not (wanted or tools or roles):
        raise SettingError(
            "query", 'nothing in it to look for; give words, "a phrase", pref*, tool:NAME or role:user'
        )
    return Query(tuple(wanted), tools, roles, " ".join(plain))


def _wanted(asked: str, *, must: bool, may_go_on: bool) -> SearchTerm:
    terms = tuple(fold(asked).split()[:MOST_TERMS])
    is_prefix = asked.endswith("*") and may_go_on and bool(terms) and len(terms[-1]) >= LEAST_PREFIX
    pieces = () if must else tuple(parts(asked).split()[:MOST_TERMS])
    name = "" if must or is_prefix else names(asked)
    name = name if name.translate(_APART).split() == list(terms) else ""
    return SearchTerm(terms, pieces if pieces != terms else (), name, is_prefix, must)


def excerpt(text: str, query: Query, chars: int) -> str:
    """The place in a text where most of what is wanted stands together, in one line."""
    lower = text.lower()
    places = sorted((place, n) for n, one in enumerate(query.wanted) for place in _places(lower, one))
    best, most = 0, 0
    for i, (place, _) in enumerate(places):
        near = {n for other, n in places[i : i + MOST_WORDS] if other < place + chars // 2}
        if len(near) > most:
            best, most = place, len(near)
    start = max(0, min(best - chars // 4, len(text) - chars))
    shown = " ".join(text[start : start + 2 * chars].split())
    shown = shown if len(shown) <= chars else shown[: chars - 1] + "…"
    return f"…{shown}" if start else shown


def _places(lower: str, wanted: SearchTerm) -> list[int]:
    """Where it stands in a text, as words of their own if there are any such: the first few."""
    terms = wanted.parts or wanted.terms
    found = re.finditer(_BETWEEN.join(map(re.escape, terms[:FIRST_TERMS])), lower)
    places = [match.start() for match in islice(found, MOST_PLACES)]
    if not places and len(terms) > 1:  # what stands between them is unusual
        places = [match.start() for match in islice(re.finditer(re.escape(terms[0]), lower), MOST_PLACES)]
    apart = [place for place in places if not lower[place - 1 : place].isalnum()]
    return (apart or places)[:MOST_WORDS]
