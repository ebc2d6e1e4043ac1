"""Checks a model's summary against the messages it stands for.

A sentence is struck if it has an exact value that the messages do not have: a number, a date, a time, an
identifier, a path, a word in quotes or backticks, or a capitalized name. Only values are compared; what a
sentence says of them is not understood.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import msgspec

from refold.core.lazy import regex
from refold.core.message import Message, ToolResult
from refold.policies.extract import Written
from refold.policies.importance import all_text
from refold.policies.outline import PLAIN, clip, exactness, words
from refold.policies.sections import SECTION_SCORES, SECTIONS, SummaryEntry, read

TITLES: dict[str, tuple[str, ...]] = {
    "requests": ("requests of the user", "user requests", "requests", "request states"),
    "rules": ("rules of the user", "user rules"),
    "done": ("work done", "done", "completed", "work completed", "completed work", "progress"),
    "decisions": ("decisions", "key decisions", "decisions made"),
    "state": ("current state", "state", "current status", "status"),
    "errors": ("errors and what followed", "errors what followed", "errors", "errors and fixes", "problems"),
    "pending": ("pending", "open", "remaining", "pending work", "pending tasks", "remaining work", "to do"),
    "next": ("next action", "exact next action", "next actions", "next step", "next steps", "next"),
    "quotes": ("quoted from tools", "quoted from tools data not orders"),
    "values": ("exact values", "exact identifiers", "identifiers"),
    "files": ("files and resources", "files"),
}
"""Titles that models write for each section."""
COMMANDING = ("decisions", "pending", "next")
"""Sections that an agent acts on."""
NARRATIVE_SCORE = 9.0
"""Of a line of a model's narrative; only the user's rules score higher."""
MAX_STRUCK = 0.5
"""If a larger share of sentences is struck, the whole summary is rejected."""
ENTRY_CHARS = 600
NAMED_VALUES = 3
"""Missing values that a problem names."""
RUN = 4
"""Words in a row that do not match by chance."""
MIN_LETTERS = 4
"""Shorter words in quotes are not compared."""

_THINKING = regex(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TITLE = regex(r"(#{1,6}\s+|\*\*|__)?(?:\d+[.)]\s+)?(.+)")
_BULLET = regex(r"^\s*(?:[-*•+>]|\d+[.)])\s+(?:\[[ xX]\]\s+)?")
_NOTHING = regex(
    r"\W*(?:none\b[,;:.—-].*|none|nothing|n/?a|not applicable|no (?:errors|decisions|pending)[^.]{0,30})\W*$",
    re.I,
)
_REQUEST = regex(r"#(\d{1,9})(?=[^#]*?\b(done|completed|active|in progress|superseded|open|pending)\b)", re.I)
_BRACKETED = regex(
    r"#(\d{1,9})\b[^#\n]*?[(\[](done|completed|active|in progress|superseded|open|pending)[)\]]", re.I
)
_NEGATED = regex(r"\b(?:not|partly|partially|half|almost|nearly)\b[^)\]]{0,12}\b(?:done|completed)\b", re.I)
_EACH, _BLANK = regex(r"(?=#\d)"), regex(r"\n{3,}")
_STATES = {"completed": "done", "in progress": "active", "pending": "open"}
_SENTENCES = regex(
    r"(?<=[.!?])(?<!\b[A-Z][a-z]\.)(?<!\bMrs\.)(?<!\b\d\.)\s+(?=[\"'`(]?[A-Z0-9])|(?<=[。！？])"
)

_ESCAPED = regex(r"\\u([0-9a-f]{4})")
_UNSPACED = r"\u2e80-\u9fff\uac00-\ud7af"  # scripts without spaces between words
_ATOM, _ASCII_ATOM = regex(rf"[^\W_{_UNSPACED}]+|[{_UNSPACED}]"), regex(r"[a-z0-9]+")  # the second is faster
_BETWEEN = regex(rf"[{_UNSPACED}\uff00-\uffef]+")
_THOUSANDS = regex(r"(?<=\d),(?=\d{3}(?!\d))")
_SPLIT = regex(r"[:=→…()\[\]{}<>|+&#@~^%*-]+|\.\.+")
_DIGITS, _LETTER = regex(r"\d+"), regex(r"[a-z]")
_QUANTITY, _VERSION = regex(r"(\d{1,30}(?:\.\d{1,30})?)([a-z]{0,3})"), regex(r"v\d[\d.]*")
_PLACE, _NUMBERING = regex(r"#(\d{1,9})\b"), regex(r"(?<!\S)(?:\d{1,2}[.)]|\(\d\))(?=\s)")
_PROSE = regex(r"[A-Za-z]?[a-z]*(?:-[A-Za-z]?[a-z]*)*")
_QUOTED = regex(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”")
_LABEL = regex(r"\s*(?:\*\*[^*]+\*\*:?\s|(?:[\w'-]+ ){0,4}[\w'-]+:\s)")
_MONTHS = words("january february march april may june july august september october november december")
_MONTH = rf"({'|'.join(f'{name[:3]}(?:{name[3:]})?' if name[3:] else name for name in _MONTHS)}|sept)\b\.?"
_DAY = regex(
    rf"\b(\d{{4}})[-/.](\d\d?)[-/.](\d\d?)(?![\dT])"
    rf"|\b{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?(?!\d)(?:,?\s+(\d{{4}}))?"
    rf"|\b(\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?\s+{_MONTH}(?!\w)(?:,?\s+(\d{{4}}))?",
    re.IGNORECASE,
)
_STAMPED = regex(r"(?<=\d)[tz](?![^\W\d])")  # of text in one case
_SLASHED = regex(r"(?<![\d/])(\d{1,2})/(\d{1,2})(?!\d)")
_TIME = regex(
    r"(?<![\w:.])(\d{1,2})(?::(\d\d))?\s*([ap])\.?m\b\.?|(?<![\d:.+])(\d{1,2}):(\d\d)(?::\d\d)?(?![\w:])",
    re.I,
)
_GERMAN = frozenset(words("der die das den und nicht wurde wurden für mit ist ein eine von"))
_ORDINARY = frozenset(
    words(
        "api json http https url html css sql cli ids pdf csv faq gui todo utc e.g i.e etc and/or n/a w/o"
        " a.m p.m user users customer agent assistant none yes not all any only and must never always done"
        " open failed important warning note"
    )
).union(_MONTHS, (name[:3] for name in _MONTHS), ("i'm", "i've", "i'll", "i'd"))
"""Words that look like values and are none."""


class Evidence(msgspec.Struct, frozen=True, dict=True):
    """The texts that a summary was written from, to look up values in them."""

    texts: tuple[str, ...]
    """Messages of people and the agent, and earlier summaries."""
    outputs: tuple[str, ...] = ()
    """Tool outputs."""
    places: frozenset[int] = frozenset()
    """Places of the messages, as the model saw them."""

    @staticmethod
    def of(messages: Iterable[Message], *prompt_texts: str, places: Iterable[int] = ()) -> "Evidence":
        """From the original messages, and from other texts in the prompt: the previous summary, the task."""
        texts, outputs = list[str](), list[str]()
        for message in messages:
            for part in message.parts:
                known = outputs if isinstance(part, ToolResult) else texts
                known.append(all_text(Message(message.role, (part,))))
        for text in prompt_texts:
            quotes = [entry.text for entry in _entries(text) if entry.section in ("quotes", "errors")]
            outputs += quotes
            texts += [line for line in text.split("\n") if line.removeprefix("- ") not in quotes]
        return Evidence(tuple(texts), tuple(outputs), frozenset(places))

    @cached_property
    def _normalized_texts(self) -> list[str]:
        return [_normalized(text) for text in (*self.texts, *self.outputs)]

    @cached_property
    def text(self) -> str:
        return "\n".join(self._normalized_texts)

    @cached_property
    def _atoms(self) -> list[list[str]]:
        """The words of each text, and the parts of its identifiers."""
        return [(_ASCII_ATOM if text.isascii() else _ATOM).findall(text) for text in self._normalized_texts]

    @cached_property
    def known(self) -> frozenset[str]:
        """Every word."""
        return frozenset(chain.from_iterable(self._atoms))

    @cached_property
    def _ordered(self) -> list[str]:
        return sorted(self.known)

    @cached_property
    def _shape(self) -> str:
        """The text with 0 in place of every number."""
        return _DIGITS.sub("0", self.text)

    @cached_property
    def _flat(self) -> tuple[str, str]:
        """The words of people and of tools, in a row."""
        many = len(self.texts)
        parts = (self._atoms[:many], self._atoms[many:])
        said, put_out = (" ".join(chain.from_iterable(atoms)) for atoms in parts)
        return f" {said} ", f" {put_out} "

    @cached_property
    def _dated(self) -> str:
        """The text with date and time of timestamps separated."""
        return _STAMPED.sub(" ", self.text)

    @cached_property
    def _days(self) -> set[tuple[int, int, int]]:
        days = set(map(_day, _DAY.finditer(self._dated)))
        for one, two in _SLASHED.findall(self._dated):  # either may be the month
            days |= {(0, int(one), int(two)), (0, int(two), int(one))}
        return days

    @cached_property
    def _times(self) -> set[tuple[int, int]]:
        return set[tuple[int, int]]().union(*map(_times, _TIME.finditer(self._dated)))

    @cached_property
    def _looked_up(self) -> dict[str, bool]:
        """Results of `has`; a summary often repeats a value."""
        return {}

    def stands(self, word: str) -> bool:
        """True if it occurs and is not part of a longer word or number."""
        *whole, last = _ATOM.findall(word) or [""]  # searching all of the text is slow
        may_stand = self.known.issuperset(whole) and (last in self.known or _is_prefix(last, self._ordered))
        start = self.text.find(word) if word and may_stand else -1
        while start >= 0:
            end = start + len(word)
            before, after = self.text[start - 1 : start], self.text[end : end + 1]
            goes_on = after.isdigit() if word[-1].isdigit() else after.isalnum() and word[-1].isalnum()
            if not goes_on and not (before.isalnum() and word[0].isalnum()):
                return True
            start = self.text.find(word, start + 1)
        return False

    def has(self, word: str) -> bool:
        """True if the texts have the value, in any of its forms."""
        if word not in self._looked_up:
            self._looked_up[word] = self._has(word)
        return self._looked_up[word]

    def _has(self, word: str) -> bool:
        value = _normalized(word).strip("'\".*_,?!$€£¥~≈/%#").removesuffix("'s").removesuffix("()")
        if not value or value in self.known or self.stands(value):
            return True
        if quantity := _QUANTITY.fullmatch(value):
            return self._has_quantity(*quantity.groups())
        if _VERSION.fullmatch(value):
            return self.stands(value[1:])
        folder, slash, name = value.rpartition("/")
        if slash:  # a file that the texts name without a folder may be in any
            return self.stands(name) and f"/{name}" not in self.text and self.has(folder)
        if value[-1] == "s" and self.stands(value[:-1]):
            return True
        has_digit = _DIGITS.search(value) is not None
        if has_digit and len(value) > 6 and value.isalnum():  # the beginning of a long one
            return _is_prefix(value, self._ordered)
        if has_digit and _LETTER.search(value) and _DIGITS.sub("0", value) in self._shape:
            return False  # there is the same with other digits
        parts = [part for part in _SPLIT.split(value) if part]
        if len(parts) < 2 and not has_digit:
            parts = value.split(".")
        return len(parts) > 1 and all(map(self.has, parts))

    def _has_quantity(self, number: str, unit: str) -> bool:
        """True if the number occurs, with or without separators and zeros, or with k for thousands."""
        bare = (number.rstrip("0").rstrip(".") if "." in number else number).lstrip("0") or "0"
        forms = [bare, f"{bare}0"] if "." in bare else [bare, f"{int(bare):,}", f"{bare}.0"]
        if unit[:1] == "k":
            forms.append(f"{float(bare) * 1000:.0f}")
        return any(form in self.known or self.stands(form) for form in forms)

    def missing(self, sentence: str, names: bool = True) -> list[str]:
        """The exact values of a sentence that the texts do not have; with `names`, capitalized words too."""
        found = list[str]()
        rest = _BETWEEN.sub(" ", _THOUSANDS.sub("", sentence.replace("\\n", " ")))
        for place in _PLACE.finditer(rest):
            if int(place[1]) not in self.places and not self.has(place[1]):
                found.append(place[0])
        rest = _NUMBERING.sub(" ", _PLACE.sub(" ", rest))
        for match in _DAY.finditer(rest):
            if not self._has_day(_day(match)):
                found.append(match[0])
        rest = _DAY.sub(" ", rest)
        for match in _TIME.finditer(rest):
            if self._times.isdisjoint(_times(match)):
                found.append(match[0])
        rest = _TIME.sub(" ", rest)
        quoted = " ".join(chain.from_iterable(_QUOTED.findall(rest)))
        exact = [word for word in words(rest) if _is_exact(word)]
        exact += [word for word in words(quoted) if _is_long(word)]
        exact += _names(rest) if names else []
        return [*found, *(word for word in dict.fromkeys(exact) if not self.has(word))]

    def _has_day(self, day: tuple[int, int, int]) -> bool:
        """A day without a year matches that day of any year."""
        if day in self._days:
            return True
        year, *rest = day
        if year:
            return (0, *rest) in self._days and self.has(str(year))
        return any(known[1:] == (*rest,) for known in self._days)

    def only_tools_say(self, sentence: str) -> bool:
        """True if only a tool output has the sentence, word for word."""
        own = _ATOM.findall(_normalized(sentence))
        run = f" {' '.join(own)} "
        said, put_out = self._flat
        return len(own) >= RUN and run in put_out and run not in said


class Verdict(msgspec.Struct, frozen=True):
    """A model's text without the sentences that have missing values."""

    written: Written
    kept: int
    """Number of sentences."""
    struck: tuple[str, ...]
    problem: str | None = None
    """Why the text is rejected."""

    @property
    def text(self) -> str:
        return " ".join(entry.text for entry in self.written.entries if entry.text)


def checked(text: str, evidence: Evidence, *, is_off: bool = False, is_plain: bool = False) -> Verdict:
    """Check what a model wrote; with `is_off` nothing is struck.

    Text under refold's own headings goes into their sections, unless `is_plain`; the rest is narrative and
    stays line by line.
    """
    check = _Check(evidence, is_off)
    narrative, entries, states = list[str](), list[SummaryEntry](), dict[int, str]()
    text = _THINKING.sub("", text)
    for section, line in (("narrative", one) for one in text.splitlines()) if is_plain else _parsed(text):
        if section == "requests":
            states.update(_states(line))
            section = "requests" if _PLACE.search(line) else "narrative"
        if section == "narrative":
            narrative += check.line(line)
        elif section != "requests" and section != "rules":  # these are kept by rule, word for word
            entries += check.entries(section, line)
    written = Written((*_narrative_entries(narrative), *entries), states)
    return Verdict(written, check.kept, tuple(check.struck), check.problem())


class _Check:
    """Counts kept sentences and collects struck ones."""

    def __init__(self, evidence: Evidence, is_off: bool) -> None:
        self.evidence, self._is_off = evidence, is_off
        self.kept = 0
        self.struck, self._missing = list[str](), list[str]()

    def line(self, line: str) -> list[str]:
        """A line of a narrative without its struck sentences; empty if nothing is left."""
        bullet = _BULLET.match(line)
        start = bullet.end() if bullet else 0
        is_heading = line.lstrip().startswith("#") or not any(map(str.isalnum, line))
        is_whole = is_heading or line.lstrip().startswith(("|", "```"))
        sentences = [line[start:]] if is_whole else _SENTENCES.split(line[start:])
        good = [sentence for sentence in sentences if self._passes(sentence, is_heading)]
        self.kept += 0 if is_heading or _NOTHING.match(line) else sum(map(bool, good))
        if len(good) == len(sentences):
            return [line.rstrip()]
        return [f"{line[:start]}{' '.join(good)}".rstrip()] if good else []

    def entries(self, section: str, line: str) -> Iterator[SummaryEntry]:
        """The entries of a line in a section. What only a tool output says is quoted."""
        score, good = SECTION_SCORES[section] + 1.0, ""
        for sentence in filter(None, map(str.strip, _SENTENCES.split(line))):
            if not self._passes(sentence):
                continue
            self.kept += 1
            sentence = sentence.replace("**", "")
            if section in COMMANDING and not self._is_off and self.evidence.only_tools_say(sentence):
                yield SummaryEntry("quotes", f"“{clip(sentence, ENTRY_CHARS)}”", SECTION_SCORES["quotes"])
                continue
            if good and len(good) + len(sentence) >= ENTRY_CHARS:
                yield SummaryEntry(section, good, score)
                good = ""
            good = f"{good} {clip(sentence, ENTRY_CHARS)}".lstrip()
        if good:
            yield SummaryEntry(section, good, score)

    def _passes(self, sentence: str, is_heading: bool = False) -> bool:
        missing = [] if self._is_off else self.evidence.missing(sentence, not is_heading)
        if missing:
            self.struck.append(clip(sentence.strip().replace("**", ""), ENTRY_CHARS))
            self._missing += missing
        return not missing

    def problem(self) -> str | None:
        """Why the text is rejected, for the model that writes it again; None if it is not."""
        struck, total = len(self.struck), self.kept + len(self.struck)
        if not total:
            return "it says nothing"
        if struck <= MAX_STRUCK * total:
            return None
        values = ", ".join(list(dict.fromkeys(self._missing))[:NAMED_VALUES])
        return (
            f"{struck} of its {total} sentences have values that the messages do not have, such as {values}"
        )


class _Title(NamedTuple):
    """A heading in a model's text."""

    section: str
    """One of refold's sections, or `narrative` for any other heading."""
    rest: str
    """The rest of its line."""
    is_asked_for: bool
    """It is a title of the prompt, word for word."""


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    """Its lines, each with its section; those of the narrative as they stand.

    A text is read into sections if it begins with a heading that was asked for, or has one beside another of
    ours, and no more of its own. A format of somebody's own is not torn apart for a heading that is alike.
    """
    lines = text.strip("\n").splitlines()
    titles = dict(_titles(lines))
    asked_for = [n for n, title in titles.items() if title.is_asked_for]
    others = sum(title.section == "narrative" for title in titles.values())
    is_alone = len(titles) - others < 2 and 0 not in asked_for
    if is_alone or len(asked_for) < max(1, others):
        titles.clear()
    section = "narrative"
    for n, line in enumerate(lines):
        bare = _BULLET.sub("", line.strip(), count=1)
        if n in titles:
            section, bare = titles[n].section, titles[n].rest
        if section == "narrative":
            yield section, line
        elif bare.strip("|-: ") and not bare.startswith("```") and not _NOTHING.match(bare):
            yield section, bare


def _titles(lines: Sequence[str]) -> Iterator[tuple[int, _Title]]:
    """The lines that are or begin with a heading, outside of code blocks."""
    fences = [n for n, line in enumerate(lines) if line.startswith("```")]
    code = {n for start, end in zip(fences[::2], fences[1::2], strict=False) for n in range(start, end)}
    for n, line in enumerate(lines):
        title = _title(line.strip()) if n not in code else None
        if title is not None:
            yield n, title


def _title(line: str) -> _Title | None:
    bare = _BULLET.sub("", line, count=1)
    found = _TITLE.match(bare)
    if found is None:
        return None
    mark, whole = found.groups()
    name, _, rest = whole.replace("*", "").replace("__", "").partition(":")
    is_item = bare != line and not (line[0].isdigit() and " " in name and not rest)
    section = _section(name) or _section(whole)
    if section and (mark or not (is_item or name.endswith((".", "!", "?")))):
        is_asked_for = flattened(name) == flattened(SECTIONS[section])
        return _Title(section, rest.strip(), is_asked_for)
    if mark and not is_item and (mark[0] == "#" or whole.endswith(("**", "**:", "__"))):
        return _Title("narrative", "", False)
    return None


def _states(line: str) -> Iterator[tuple[int, str]]:
    """Places and states of the requests in a line."""
    for one in _EACH.split(line):
        found = _BRACKETED.match(one) or _REQUEST.match(one)
        if found and not _NEGATED.search(one):
            state = found[2].lower()
            yield int(found[1]), _STATES.get(state, state)


def _narrative_entries(lines: Iterable[str]) -> Iterator[SummaryEntry]:
    """The entries of a narrative, one per line; the last lines are left out first."""
    text = _BLANK.sub("\n\n", "\n".join(lines).strip("\n"))
    for n, line in enumerate(text.split("\n") if text else ()):
        yield SummaryEntry("narrative", line, NARRATIVE_SCORE - n / 1000)


def _entries(text: str) -> Iterator[SummaryEntry]:
    """The entries of a summary without its fence; none if it has no sections of refold's."""
    return read(f"[refold summary:]\n<record note=>\n{text}")


def _section(title: str) -> str | None:
    plain = flattened(title.replace("&", " and "))
    return next((section for section, names in TITLES.items() if plain in names), None)


def _is_exact(word: str) -> bool:
    """True for a number or an identifier."""
    if _normalized(word) in _ORDINARY:
        return False
    return _DIGITS.search(word) is not None or (exactness(word) >= PLAIN and not _PROSE.fullmatch(word))


def _is_long(word: str) -> bool:
    return sum(map(str.isalpha, word)) >= MIN_LETTERS and _normalized(word) not in _ORDINARY


def _names(sentence: str) -> Iterator[str]:
    """Capitalized words, except at the beginning of sentences and clauses."""
    if len(_GERMAN.intersection(sentence.split())) > 1:  # German nouns are capitalized
        return
    label, begins = _LABEL.match(sentence), True
    for piece in (sentence[label.end() :] if label else sentence).split():
        for word in () if begins or piece[0] == "(" else words(piece):
            if word[:1].isupper() and len(word) > 2 and _normalized(word) not in _ORDINARY:
                yield word
        begins = piece.endswith((":", ";", "“", '"', "—")) or not any(map(str.isalnum, piece))


def _day(match: re.Match[str]) -> tuple[int, int, int]:
    """Year, month and day; the year is 0 if there is none."""
    if match[1]:
        return int(match[1]), int(match[2]), int(match[3])
    name = (match[4] or match[8]).casefold()[:3]
    month = next(n for n, full in enumerate(_MONTHS, 1) if full[:3] == name)
    return int(match[6] or match[9] or 0), month, int(match[5] or match[7])


def _times(match: re.Match[str]) -> set[tuple[int, int]]:
    """Hours and minutes that a time can mean: 9:05 may be in the evening, 09:05 may not."""
    digits = match[1] or match[4]
    hour = int(digits)
    minute = int(match[2] or match[5] or 0)
    morning, evening = (hour % 12, minute), (hour % 12 + 12, minute)
    if match[3]:
        return {morning if match[3] in "aA" else evening}
    is_plain = hour > 12 or digits[0] == "0"
    return {(hour, minute)} if is_plain else {morning, evening}


def _is_prefix(start: str, ordered: Sequence[str]) -> bool:
    """True if a longer word begins with `start`."""
    after = bisect_right(ordered, start)
    return after < len(ordered) and ordered[after].startswith(start)


def _normalized(text: str) -> str:
    """Normalize case, dashes, apostrophes and escapes, and put spaces between scripts."""
    text = text.casefold()
    if "\\" in text:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
        text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text) if "\\u" in text else text
    return text if text.isascii() else _BETWEEN.sub(r" \g<0> ", text.replace("’", "'").replace("–", "-"))


def flattened(text: str) -> str:
    """The words of a text, separated by spaces."""
    return " ".join(_ATOM.findall(_normalized(text)))
