"""Checks a model's summary against the messages it stands for.

A sentence is struck if it has an exact value that the messages do not have: a number, a date, a time, an
identifier, a path, a word in quotes or backticks, or a capitalized name. Only values are compared; what a
sentence says of them is not understood.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain

import msgspec

from refold.core.lazy import regex
from refold.core.message import Message, ToolResult
from refold.policies.extract import Written
from refold.policies.sections import SECTION_SCORES, SummaryEntry, by_section, listed_entries, split_line
from refold.policies.text import PLAIN, SENTENCES, all_text, clip, exactness, words

COMMANDING = ("decisions", "pending", "next")
"""Sections that an agent acts on."""
NARRATIVE_SCORE = 9.0
"""Of a line of a model's narrative; only the user's rules score higher."""
MAX_STRUCK = 0.5
"""If a larger share of sentences is struck, the whole summary is rejected."""
ENTRY_CHARS = 600
MAX_NAMED_VALUES = 3
MIN_QUOTED_WORDS = 4
"""Words in a row that do not match by chance."""
MIN_LETTERS = 4
"""Shorter words in quotes are not compared."""
MIN_ID_CHARS = 7
"""The beginning of an identifier with so many characters stands for all of it."""

# How a model's text is read
_THINKING = regex(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_BULLET = regex(r"^\s*(?:[-*•+>]|\d+[.)])\s+(?:\[[ xX]\]\s+)?")
_NOTHING = regex(r"\W*(?:none|nothing|n/?a|no (?:errors|decisions|pending)\b[^.]{0,30})\W*", re.IGNORECASE)
_REQUEST = regex(
    r"#(\d{1,9})\b(?:[^#\n]*?[(\[](?=[\w ]+[)\]])|\W{1,6})"
    r"(done|completed|active|in progress|superseded|open|pending)\b",
    re.IGNORECASE,
)
_STATES = {"completed": "done", "in progress": "active", "pending": "open"}

# Values in one form
_ESCAPED = regex(r"\\u([0-9a-f]{4})", re.IGNORECASE)
_MONTHS = words("january february march april may june july august september october november december")
_MONTH = rf"({'|'.join(f'{name[:3]}(?:{name[3:]})?' for name in _MONTHS)}|sept)\b\.?"
_DAY = regex(
    rf"\b(\d{{4}})[-/.](\d\d?)[-/.](\d\d?)(?!\d)"
    rf"|\b{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?(?!\d)(?:,?\s+(\d{{4}}))?"
    rf"|\b(\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?\s+{_MONTH}(?!\w)(?:,?\s+(\d{{4}}))?",
    re.IGNORECASE,
)
_TIMESTAMP = regex(r"(?<=\d)T(?=\d\d:\d\d)")
_TIME = regex(r"(?<![\w:.])(\d{1,2})(?::(\d\d))?\s*([ap])\.?m\b\.?", re.IGNORECASE)
_THOUSANDS = regex(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = regex(r"(?<!\w)\d{1,30}(?:\.\d{1,30})?")
_QUANTITY = regex(r"(\d{1,30}(?:\.\d{1,30})?)[a-z]{0,3}")
_UNSPACED = r"\u2e80-\u9fff\uac00-\ud7af"  # scripts without spaces between words
_BETWEEN = regex(rf"[{_UNSPACED}\uff00-\uffef]+")
_ATOM = regex(rf"[^\W\d_{_UNSPACED}]+|\d+|[{_UNSPACED}]")
_ASCII_ATOM = regex(r"[a-z]+|\d+")  # the same for ASCII, and faster
_DIGITS = regex(r"\d+")
_SEPARATORS = regex(r"[:=→…()\[\]{}<>|+&#@~^%*-]+|\.\.+")

# Values in a sentence
_PLACE = regex(r"#(\d{1,9})\b")
_NUMBERING = regex(r"(?<!\S)(?:\d{1,2}[.)]|\(\d\))(?=\s)")
_PROSE = regex(r"[A-Za-z]?[a-z]*(?:-[A-Za-z]?[a-z]*)*")
_QUOTED = regex(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”")
_LABEL = regex(r"\s*(?:\*\*[^*]+\*\*:?\s|(?:[\w'-]+ ){0,4}[\w'-]+:\s)")
_AFTER_A_WORD = regex(r"(?<=[\w.,)'’] )[\"'`*]*([^\W\d_][\w’'-]{2,})")
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
        texts: list[str] = []
        outputs: list[str] = []
        for message in messages:
            for part in message.parts:
                known = outputs if isinstance(part, ToolResult) else texts
                known.append(all_text(Message(message.role, (part,))))
        for text in prompt_texts:
            quotes = [entry.text for entry in listed_entries(text) if entry.section in ("quotes", "errors")]
            outputs += quotes
            texts += [line for line in text.split("\n") if line.removeprefix("- ") not in quotes]
        return Evidence(tuple(texts), tuple(outputs), frozenset(places))

    @cached_property
    def text(self) -> str:
        return normalized("\n".join((*self.texts, *self.outputs)))

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(_atoms(self.text))

    @cached_property
    def _shape(self) -> str:
        """The text with 0 in place of every number."""
        return _DIGITS.sub("0", self.text)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        return frozenset(_plain_number(number) for number in _NUMBER.findall(_THOUSANDS.sub("", self.text)))

    @cached_property
    def _flat(self) -> tuple[str, str]:
        """The words of people and of tools, in a row."""
        return (f" {flattened(' '.join(self.texts))} ", f" {flattened(' '.join(self.outputs))} ")

    def stands(self, word: str, *, is_beginning: bool = False) -> bool:
        """True if it occurs and is not part of a longer word or number, or with `is_beginning` begins one."""
        if not is_beginning and not self.words.issuperset(_atoms(word)):
            return False  # searching all of the text is slow
        start = self.text.find(word) if word else -1
        while start >= 0:
            end = start + len(word)
            before = self.text[start - 1 : start]
            after = self.text[end : end + 1]
            goes_on = after.isdigit() if word[-1].isdigit() else after.isalnum() and word[-1].isalnum()
            if (is_beginning or not goes_on) and not (before.isalnum() and word[0].isalnum()):
                return True
            start = self.text.find(word, start + 1)
        return False

    def has(self, word: str) -> bool:
        """True if the texts have the value, in any of its forms."""
        value = normalized(word).strip("'\".*_,?!$€£¥~≈/%#").removesuffix("'s").removesuffix("()")
        value = f"0{value}" if value[1:2] == ":" else value  # 9:05 is 09:05
        if not value or self.stands(value):
            return True
        quantity = _QUANTITY.fullmatch(value)
        if quantity:  # the number may have another unit
            return _plain_number(quantity[1].lstrip("0")) in self._numbers
        folder, slash, name = value.rpartition("/")
        if slash:  # a file that the texts name without a folder may be in any
            return self.stands(name) and f"/{name}" not in self.text and self.has(folder)
        if value[-1] == "s" and self.stands(value[:-1]):
            return True
        has_digit = _DIGITS.search(value) is not None
        if has_digit and value.isalnum():
            return len(value) >= MIN_ID_CHARS and self.stands(value, is_beginning=True)
        if has_digit and not value.isdecimal() and _DIGITS.sub("0", value) in self._shape:
            return False  # there is the same with other digits
        parts = [part for part in _SEPARATORS.split(value) if part]
        if len(parts) < 2 and not has_digit:
            parts = value.split(".")
        return len(parts) > 1 and all(self.has(part) for part in parts)

    def missing(self, sentence: str, names: bool = True) -> list[str]:
        """The exact values of a sentence that the texts do not have; with `names`, capitalized words too."""
        rest = _BETWEEN.sub(" ", _THOUSANDS.sub("", _with_plain_dates(sentence.replace("\\n", " "))))
        found = [
            place[0]
            for place in _PLACE.finditer(rest)
            if int(place[1]) not in self.places and not self.has(place[1])
        ]
        rest = _NUMBERING.sub(" ", _PLACE.sub(" ", rest))
        quoted = " ".join(chain.from_iterable(_QUOTED.findall(rest)))
        values = [word for word in words(rest) if _is_exact(word)]
        values += [word for word in words(quoted) if sum(map(str.isalpha, word)) >= MIN_LETTERS]
        values += _names(rest) if names else []
        for word in dict.fromkeys(values):
            if word.casefold().replace("’", "'") not in _ORDINARY and not self.has(word):
                found.append(word)
        return found

    def only_tools_say(self, sentence: str) -> bool:
        """True if only a tool output has the sentence, word for word."""
        run = flattened(sentence)
        by_people, by_tools = self._flat
        is_long = run.count(" ") + 1 >= MIN_QUOTED_WORDS
        return is_long and f" {run} " in by_tools and f" {run} " not in by_people


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
    check = _Check(None if is_off else evidence)
    narrative: list[str] = []
    entries: list[SummaryEntry] = []
    states: dict[int, str] = {}
    text = _THINKING.sub("", text)
    for section, line in by_section(text, is_plain=is_plain):
        if section == "narrative":
            narrative += check.line(line)
        elif section == "requests":
            for place, state in _REQUEST.findall(line):
                states[int(place)] = _STATES.get(state.lower(), state.lower())
        elif section != "rules":  # rules and requests are kept by rule, word for word
            entries += check.entries(section, line)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(narrative).strip("\n"))
    lines = text.split("\n") if text else []
    told = [SummaryEntry("narrative", line, NARRATIVE_SCORE - n / 1000) for n, line in enumerate(lines)]
    return Verdict(Written((*told, *entries), states), check.kept, tuple(check.struck), check.problem())


class _Check:
    """Counts kept sentences and collects struck ones; without evidence nothing is struck."""

    def __init__(self, evidence: Evidence | None) -> None:
        self._evidence = evidence
        self._missing: list[str] = []
        self.kept = 0
        self.struck: list[str] = []

    def line(self, line: str) -> list[str]:
        """A line of a narrative without its struck sentences; empty if nothing is left."""
        bullet = _BULLET.match(line)
        start = bullet.end() if bullet else 0
        is_heading = line.lstrip().startswith("#") or not any(map(str.isalnum, line))
        is_whole = is_heading or line.lstrip().startswith(("|", "```"))
        sentences = [line[start:]] if is_whole else SENTENCES.split(line[start:])
        good = [sentence for sentence in sentences if self._passes(sentence, names=not is_heading)]
        if not is_heading and not _NOTHING.fullmatch(line):
            self.kept += sum(map(bool, good))
        if len(good) == len(sentences):
            return [line.rstrip()]
        return [f"{line[:start]}{' '.join(good)}".rstrip()] if good else []

    def entries(self, section: str, line: str) -> Iterator[SummaryEntry]:
        """The entries of a line in a section. What only a tool output says is quoted."""
        line = _BULLET.sub("", line, count=1).strip()
        if not line.strip("|-: ") or line.startswith("```") or _NOTHING.fullmatch(line):
            return
        good: list[str] = []
        for sentence in SENTENCES.split(line):
            if not sentence.strip() or not self._passes(sentence):
                continue
            self.kept += 1
            sentence = sentence.strip().replace("**", "")
            if section in COMMANDING and self._evidence and self._evidence.only_tools_say(sentence):
                yield SummaryEntry("quotes", f"“{clip(sentence, ENTRY_CHARS)}”", SECTION_SCORES["quotes"])
            else:
                good.append(sentence)
        if good:
            for part in split_line(" ".join(good), ENTRY_CHARS):
                yield SummaryEntry(section, clip(part, ENTRY_CHARS), SECTION_SCORES[section] + 1.0)

    def _passes(self, sentence: str, *, names: bool = True) -> bool:
        missing = self._evidence.missing(sentence, names) if self._evidence else []
        if missing:
            self.struck.append(clip(sentence.strip().replace("**", ""), ENTRY_CHARS))
            self._missing += missing
        return not missing

    def problem(self) -> str | None:
        """Why the text is rejected, for the model that writes it again; None if it is not."""
        struck = len(self.struck)
        total = self.kept + struck
        if not total:
            return "it says nothing"
        if struck <= MAX_STRUCK * total:
            return None
        values = ", ".join(list(dict.fromkeys(self._missing))[:MAX_NAMED_VALUES])
        return (
            f"{struck} of its {total} sentences have values that the messages do not have, such as {values}"
        )


def _is_exact(word: str) -> bool:
    """True for a number or an identifier."""
    return _DIGITS.search(word) is not None or (exactness(word) >= PLAIN and not _PROSE.fullmatch(word))


def _names(sentence: str) -> list[str]:
    """Capitalized words, except at the beginning of sentences and clauses."""
    if len(_GERMAN.intersection(sentence.split())) > 1:  # German nouns are capitalized
        return []
    label = _LABEL.match(sentence)
    rest = sentence[label.end() :] if label else sentence
    return [name for name in _AFTER_A_WORD.findall(rest) if name[0].isupper()]


def _plain_number(number: str) -> str:
    """The number without zeros at its end; 1074.00 is 1074."""
    return (number.rstrip("0").rstrip(".") if "." in number else number) or "0"


def normalized(text: str) -> str:
    """A text in which values have one form: case, dashes, escapes, dates and times.

    >>> normalized("On May 3rd at 4 PM, or 2026-5-4T09:05:00Z")
    'on 05-03 at 16:00, or 2026-05-04 09:05:00z'
    """
    if "\\" in text:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
        text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text)
    text = _with_plain_dates(text).casefold()
    if text.isascii():
        return text
    return _BETWEEN.sub(r" \g<0> ", text.replace("’", "'").replace("–", "-"))


def _with_plain_dates(text: str) -> str:
    """Days as 2026-05-03 or 05-03, and times of twelve hours as those of twenty-four."""
    return _TIME.sub(_plain_time, _TIMESTAMP.sub(" ", _DAY.sub(_plain_day, text)))


def _plain_day(match: re.Match[str]) -> str:
    year, month, day, *_ = match.groups()
    if not year:
        name = (match[4] or match[8]).casefold()
        month = next(str(n) for n, full in enumerate(_MONTHS, 1) if full[:3] == name[:3])
        year = match[6] or match[9]
        day = match[5] or match[7]
    plain = f"{month:0>2}-{day:0>2}"
    return f"{year}-{plain}" if year else plain


def _plain_time(match: re.Match[str]) -> str:
    hour = int(match[1]) % 12 + 12 * (match[3] in "pP")
    return f"{hour:02}:{match[2] or '00'}"


def _atoms(text: str) -> list[str]:
    """The words and numbers of a normalized text."""
    return (_ASCII_ATOM if text.isascii() else _ATOM).findall(text)


def flattened(text: str) -> str:
    """The words of a text, separated by spaces."""
    return " ".join(_atoms(normalized(text)))
