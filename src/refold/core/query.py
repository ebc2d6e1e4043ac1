"""Search queries, and the terms of messages that they are compared with.

Queries and messages are split into terms by the same functions, so that text copied from a message finds it.

>>> fold("getUserById failed: ERR-4711, 数据库")
'getuserbyid failed err 4711 数 据 库'
>>> query = parse_query('"err 4711" user data* tool:psql')
>>> query.matches(SearchText.of("getUserById failed: ERR-4711 in database", ("psql",), "tool"))
True
"""

import re
from collections.abc import Sequence
from itertools import chain, islice
from math import log
from typing import NamedTuple, get_args
from unicodedata import normalize

import msgspec

from refold.core.errors import SettingError
from refold.core.lazy import regex
from refold.core.message import Role

MAX_QUERY_CHARS = 10_000
MAX_WORDS = 32
"""Words and phrases of a query; further ones are ignored."""
MAX_PREFIXES = 4
"""Further prefixes are searched for as whole words."""
MAX_TERMS = 64
"""Terms of one word or phrase; further ones are ignored."""
MIN_PREFIX_CHARS = 3
"""A shorter prefix is searched for as a whole word."""
MAX_TERM_CHARS = 128
MAX_NAME_PARTS = 8
"""Something with more parts, or with parts of one character on average, is a hash and no name."""
MAX_MATCHES = 256
"""Matches of a word that an excerpt considers."""
MAX_PLACES = 32
"""Of these, how many are compared."""
EXCERPT_TERMS = 4
"""Terms of a phrase that an excerpt looks for."""

_SIGNS = (  # scripts written without spaces, and emoji: each character is a term, and a run of them a phrase
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u318f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U0001f000-\U0001faff\U00020000-\U0003ffff"
)
_TERM = regex(f"[{_SIGNS}]|[^\\W_{_SIGNS}]+")
_BETWEEN = r"[\x00-/:-@\[-`{-\x7f]*"  # characters of no term, so that matching cannot backtrack
_SPACES = {code: " " for code in range(128) if not chr(code).isalnum()}
_JOINERS = "_-./:@#$~+"
_JOINED = {code: " " for code in _SPACES if chr(code) not in _JOINERS}
_ODD = regex(f"[^\\w{re.escape(_JOINERS)}]")
_PRIVATE = {ord(char): chr(0xE000 + ord(char)) for char in _JOINERS}
_SEPARATED = dict.fromkeys(map(ord, _PRIVATE.values()), " ")
_PART = regex(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_ESCAPE = regex(r"\\+(?:u([0-9a-fA-F]{4})|[nrtbf])?")
_TOKEN = regex(r'(?P<filter>(?i:tool|role)):(?P<value>"[^"]+"|[^\s"]+)|"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+)')


def fold(text: str) -> str:
    """The terms of a text in order, separated by spaces: runs of letters and digits in lower case."""
    if text.isascii():
        terms = text.lower().translate(_SPACES).split()
    else:
        terms = _TERM.findall(_normalized(text))
    if len(text) > MAX_TERM_CHARS:
        terms = [term[:MAX_TERM_CHARS] for term in terms]
    return " ".join(terms)


def _normalized(text: str) -> str:
    return normalize("NFKC", text).casefold()


def parts(text: str) -> str:
    """The parts of names such as `getUserById` or `ERR4711`, as terms."""
    found: list[str] = []
    for run in dict.fromkeys(text.translate(_SPACES).split()):
        if run.isdecimal() or (run.islower() and run.isalpha()):
            continue
        name_parts = _PART.findall(run)
        is_hash = len(name_parts) > MAX_NAME_PARTS or sum(map(len, name_parts)) < 2 * len(name_parts)
        if len(name_parts) > 1 and not is_hash:
            found += name_parts
    return " ".join(found).lower()


def names(text: str) -> str:
    """Names of several pieces, such as `src/a/b.py` or `ERR-4711`, as one term each.

    The characters that join the pieces are replaced by private ones, which no text contains.
    """
    plain = text if text.isascii() else _ODD.sub(" ", _normalized(text))
    runs = dict.fromkeys(plain.translate(_JOINED).split())
    found = " ".join([run.strip(_JOINERS)[:MAX_TERM_CHARS] for run in runs if not run.isalnum()])
    return " ".join([run for run in found.casefold().split() if not run.isalnum()]).translate(_PRIVATE)


class SearchText(NamedTuple):
    """The searchable text of a message."""

    text: str
    """Its terms."""
    parts: str
    """Parts of its names and whole names; if it has escapes of JSON such as `\\n`, also its terms after
    unescaping.
    """
    tools: tuple[str, ...]
    role: str

    @classmethod
    def of(cls, text: str, tools: Sequence[str], role: str) -> "SearchText":
        terms = fold(text)
        plain = _ESCAPE.sub(_unescaped, text) if "\\" in text else text
        more = [parts(plain), names(plain)]
        if plain is not text and (unescaped := fold(plain)) != terms:
            more += [unescaped, names(text)]
        return cls(terms, " ".join(filter(None, more)), tuple(tools), role)


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else " "


class SearchTerm(msgspec.Struct, frozen=True):
    """A word, a name or a phrase."""

    terms: tuple[str, ...]
    """Must follow one another."""
    parts: tuple[str, ...] = ()
    """Of a name: a match, too, if they follow one another."""
    name: str = ""
    """The whole name if it has several pieces; a match of it ranks highest."""
    is_prefix: bool = False
    """The last term may be the beginning of a longer one."""
    must: bool = False
    """It was quoted: messages without it do not match."""

    def count(self, words: SearchText) -> int:
        """How often it occurs."""
        end = "" if self.is_prefix else " "
        count = 0
        for sequence in (self.terms, self.parts):
            if sequence:
                needle = f" {' '.join(sequence)}{end}"
                count += f" {words.text} ".count(needle) + f" {words.parts} ".count(needle)
        return count


class Query(msgspec.Struct, frozen=True):
    wanted: tuple[SearchTerm, ...]
    tools: tuple[str, ...] = ()
    """Any of these, in any case; one that ends with * is a prefix."""
    roles: tuple[str, ...] = ()
    """Any of these."""
    text: str = ""
    """The query without filters, for an embedder."""

    def allows(self, tools: Sequence[str], role: str) -> bool:
        """True if a message with these tools and this role passes the filters."""
        if self.roles and role not in self.roles:
            return False
        names = [tool.casefold() for tool in tools]
        wanted = [tool.casefold() for tool in self.tools]
        prefixes = tuple(tool[:-1] for tool in wanted if tool.endswith("*"))
        return not wanted or any(name in wanted or name.startswith(prefixes) for name in names)

    def matches(self, words: SearchText, *, any_word: bool = False) -> bool:
        """True if the message has all terms; with `any_word`, all quoted ones and any of the others."""
        if not self.allows(words.tools, words.role):
            return False
        if not any_word:
            return all(one.count(words) for one in self.wanted)
        optional = [one for one in self.wanted if not one.must]
        has_quoted = all(one.count(words) for one in self.wanted if one.must)
        return has_quoted and (not optional or any(one.count(words) for one in optional))

    @property
    def is_phrase(self) -> bool:
        """True for a single phrase, or a single name of several pieces."""
        if len(self.wanted) != 1:
            return False
        one = self.wanted[0]
        return len(one.terms) > 1 and (one.must or bool(one.name))

    @property
    def can_relax(self) -> bool:
        """True if `any_word` makes a difference."""
        return len(self.wanted) > 1 and not all(one.must for one in self.wanted)

    def weight(self, words: SearchText) -> float:
        """The rank of a message if it is not known how rare the terms are."""
        counts = [one.count(words) for one in self.wanted]
        names = sum(f" {one.name} " in f" {words.parts} " for one in self.wanted if one.name)
        return 10.0 * names + sum(1 + log(count) for count in counts if count)


def parse_query(text: str) -> Query:
    """Parses words, "a phrase", pref*, tool:NAME and role:ROLE; everything else is text.

    Raises:
        SettingError: it has no terms and no filters.
    """
    if not isinstance(text, str):
        raise SettingError("query", f"expected a text, got {type(text).__name__}")
    if len(text) > MAX_QUERY_CHARS:
        text = text[:MAX_QUERY_CHARS].rsplit(None, 1)[0]
    wanted: dict[SearchTerm, None] = {}
    tools: dict[str, None] = {}
    roles: dict[str, None] = {}
    plain: list[str] = []
    for token in _TOKEN.finditer(text):
        filter = (token["filter"] or "").lower()
        value = (token["value"] or "").strip('"')
        if filter == "tool":
            tools[value] = None
            continue
        if filter == "role" and value.lower() in get_args(Role):
            roles[value.lower()] = None
            continue
        words = token.group() if token["phrase"] is None else token["phrase"]
        plain.append(words)
        may_be_prefix = sum(one.is_prefix for one in wanted) < MAX_PREFIXES
        term = _term(words, must=token["phrase"] is not None, may_be_prefix=may_be_prefix)
        if term.terms and len(wanted) < MAX_WORDS:
            wanted[term] = None
    if not (wanted or tools or roles):
        raise SettingError(
            "query", 'there is nothing to search for; give words, "a phrase", pref*, tool:NAME or role:user'
        )
    return Query(tuple(wanted), tuple(tools)[:MAX_WORDS], tuple(roles), " ".join(plain))


def _term(text: str, *, must: bool, may_be_prefix: bool) -> SearchTerm:
    terms = tuple(fold(text).split()[:MAX_TERMS])
    is_prefix = may_be_prefix and text.endswith("*") and bool(terms) and len(terms[-1]) >= MIN_PREFIX_CHARS
    if must:
        return SearchTerm(terms, is_prefix=is_prefix, must=True)
    name_parts = tuple(parts(text).split()[:MAX_TERMS])
    if name_parts == terms:
        name_parts = ()
    name = "" if is_prefix else names(text)
    if name.translate(_SEPARATED).split() != list(terms):
        name = ""
    return SearchTerm(terms, name_parts, name, is_prefix)


def excerpt(text: str, query: Query, chars: int) -> str:
    """The part of a text with most of the query's terms, in one line."""
    lower = text.lower()
    places = [_places(lower, term) for term in query.wanted]

    def terms_near(place: int) -> int:
        return sum(any(place <= other < place + chars // 2 for other in some) for some in places)

    best = max(sorted(chain.from_iterable(places)), key=terms_near, default=0)
    start = max(0, min(best - chars // 4, len(text) - chars))
    shown = " ".join(text[start : start + 2 * chars].split())
    if len(shown) > chars:
        shown = f"{shown[: chars - 1]}…"
    return f"…{shown}" if start else shown


def _places(lower: str, wanted: SearchTerm) -> list[int]:
    """Where a term occurs in a text; as a whole word, if it does anywhere."""
    terms = wanted.parts or wanted.terms
    places: list[int] = []
    for some in (terms[:EXCERPT_TERMS], terms[:1]):  # all of it, or unusual characters separate its pieces
        pattern = _BETWEEN.join(map(re.escape, some))
        places = places or [match.start() for match in islice(re.finditer(pattern, lower), MAX_MATCHES)]
    words = [place for place in places if not lower[place - 1 : place].isalnum()]
    return (words or places)[:MAX_PLACES]
