"""What a summary may rest on: the texts it was made of, and whether they have what a sentence says."""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile
from math import log2
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from refold.core.message import Message, Role, ToolResult
from refold.core.regex import regex
from refold.policies.importance import all_text
from refold.policies.outline import PLAIN, words, worth
from refold.policies.sections import CLOSE, OPEN, SECTIONS, read

By: TypeAlias = Role | Literal["summary"]
"""Who said something."""

COMMANDING = ("rules", "decisions", "pending", "next")
"""Sections that an agent acts upon."""
WINDOW = 60
"""Words of the source that stand together."""
TOGETHER, BESIDE, ASKED = 0.35, 0.3, 0.5
"""Of the words of a sentence, that must stand together in the source; or anywhere, if it names an exact
value; or together in what the user said, if the user is to have asked for it."""
MORE = 1.5
"""How many times the words must stand together in what a tool said, against others, to be the tool's."""
FEW = 3
"""Words of a sentence of which fewer say too little to be looked for."""
RUN = 4
"""Words in a row that are not the same by chance."""

_ESCAPED = regex(r"\\u([0-9a-f]{4})")
_UNSPACED = r"\u2e80-\u9fff\uac00-\ud7af"  # scripts in which every character is taken for a word
_ATOM, _ASCII_ATOM = regex(rf"[^\W_{_UNSPACED}]+|[{_UNSPACED}]"), regex(r"[a-z0-9]+")  # the second is faster
_BETWEEN = regex(rf"[{_UNSPACED}\uff00-\uffef]+")
_THOUSANDS = regex(r"(?<=\d),(?=\d{3}(?!\d))")
_SPLIT = regex(r"[:=→…()\[\]{}<>|+&#@~^%*-]+|\.\.+")
_DIGITS = regex(r"\d+")
_HUMPS = regex(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_QUANTITY, _VERSION = regex(r"(\d{1,30}(?:\.\d{1,30})?)([a-z]{0,3})"), regex(r"v\d[\d.]*")
_PROSE = regex(r"[A-Za-z]?[a-z]*(?:-[A-Za-z]?[a-z]*)*")
_CODE, _LITERAL = regex(r"`([^`]+)`"), regex(r"[A-Za-z][A-Za-z-]{3,}")
_MONTHS = words("january february march april may june july august september october november december")
_MONTH = rf"((?:{'|'.join(name[:3] for name in _MONTHS)})[a-z]*)\.?"
_DAY = regex(
    rf"\b{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?\b|\b(\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?\s+{_MONTH}(?!\w)"
    r"|(?<=\b\d{4})-(\d\d)-(\d\d)(?![\dT])",
    re.IGNORECASE,
)
_TIME = regex(
    r"(?<![\w:.])(\d{1,2})(?::(\d\d))?\s*([ap])\.?m\b\.?|(?<![\w:.+])(\d{1,2}):(\d\d)(?::\d\d)?(?![\w:])",
    re.I,
)
_COUNTED = regex(r"(?<![\w.,:/$#-])(\d{1,2}) ([A-Za-z]{3,})")
_PLACES = regex(r"\b(?:requests?|messages?) (?:#\d+(?:, | and )?)+", re.I)
_LABEL, _PIECE = regex(r"(?:[\w'-]+ ){0,4}[\w'-]+: "), regex(r"\S+")
_SUBJECT = regex(
    r"([A-Z][a-z]+)(?<!ing)(?<!ion)(?<!ment)(?<!ness) (?:was|is|has|had|will|would|said|wants?|[a-z]+ed)\b"
)
_ASKS = regex(
    r"\b(?:user|customer|client)\b(?!')\W+(?:\w+\W+){0,2}?(?:said|says|told|ask(?:s|ed)?|want(?:s|ed)?"
    r"|require[sd]?|request(?:s|ed)?|insist(?:s|ed)?|demand(?:s|ed)?|prefer(?:s|red)?|forbids?|forbade"
    r"|prohibit(?:s|ed)|must|(?:do|does|did)(?:n't| not) want|constraints?|rules?)\b"
    r"|^(?:always|never|do not|don't)\b",
    re.IGNORECASE,
)
_ORDER = regex(
    r"\b(?:ignore|disregard|forget|you (?:must|should|are|will|need)|instructions?|system prompt|override"
    r"|do not tell|from now on|new task|act as|pretend|reveal|send (?:all|the|your|it))\b",
    re.IGNORECASE,
)
_ENDING = regex(r"(?<=\w{3})(?:ations?|ings?|ied|ies|edly|ed|es|ers?|ly|ions?|ment|s|e|y)$")
_GERMAN = frozenset(words("der die das den und nicht wurde wurden für mit ist ein eine von"))
_COMMON = frozenset(
    words(
        "the and for that this with from were was has have had been are not but they then than when which"
        " into also after before their there its his her she him who what will would can could should may"
        " might did does done all any each both such only other some more most one two three four five user"
        " users customer agent assistant tool tools task result results called call calls using used use"
        " made make found find asked ask asks requested request requests summary section none nothing"
        " everything noted still yet now next currently already because while where between without within"
        " about over under again later first second third last new via per you your our out off since until"
        " though although even them these those being every another same several finally instead rather said"
        " says told never always must want wants requires required prefers pending today api json http https"
        " url html cli ids conversation answer answered response wait waiting thanks thanked final attempt"
        " attempts tried unless"
    )
).union(_MONTHS, (name[:3] for name in _MONTHS))


class Support(NamedTuple):
    """How many words of a sentence a source has: anywhere, and together in what somebody said."""

    words: int
    anywhere: float
    by_user: float
    by_agent: float
    by_tool: float


class Source(msgspec.Struct, frozen=True, dict=True):
    """What a summary may rest on: the texts that it was made of, each with who said it."""

    texts: tuple[tuple[By, str], ...]

    @staticmethod
    def of(messages: Sequence[Message], previous: str | None, *others: str) -> "Source":
        """The originals, the summary before, and what else the model was told."""
        own = [said for message in messages for said in _said(message)]
        more = [said for text in others for said in _summarized(text, "user")]
        return Source((*own, *_summarized(previous or "", "summary"), *more))

    @cached_property
    def plain(self) -> list[str]:
        return [_plain(text) for _, text in self.texts]

    @cached_property
    def text(self) -> str:
        return "\n".join(self.plain)

    @cached_property
    def atoms(self) -> tuple[list[list[str]], ...]:
        """The words of texts, also those that identifiers are made of: of the user, of others, of tools."""
        found: tuple[list[list[str]], ...] = ([], [], [])
        for (by, _), text in zip(self.texts, self.plain, strict=True):
            pattern = _ASCII_ATOM if text.isascii() else _ATOM
            found[{"user": 0, "system": 0, "tool": 2}.get(by, 1)].append(pattern.findall(text))
        return found

    @cached_property
    def flat(self) -> list[str]:
        return [f" {' '.join(chain.from_iterable(texts))} " for texts in self.atoms]

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(chain.from_iterable(self.atoms)))

    @cached_property
    def ordered(self) -> list[str]:
        return sorted(self.known)

    @cached_property
    def numbers(self) -> list[str]:
        return [atom for atom in self.ordered if atom.isdecimal()]

    @cached_property
    def shape(self) -> str:
        """The text with any number as the same."""
        return _shape(self.text)

    @cached_property
    def looked_up(self) -> dict[str, bool]:
        """What it was asked for, and whether it has that: an answer may name the same again and again."""
        return {}

    @cached_property
    def windows(self) -> tuple[dict[str, list[int]], list[int]]:
        """Where words stand, in one form or another, and where what each of the three said ends."""
        stems = {atom: _stem(atom) for atom in self.known}
        found, ends, size = defaultdict[str, list[int]](list), list[int](), 0
        for texts in self.atoms:
            for atoms in texts:
                for start in range(0, len(atoms), WINDOW):
                    for stem in {stems[atom] for atom in atoms[start : start + WINDOW]}:
                        found[stem].append(size)
                    size += 1
            ends.append(size)
        return found, ends

    @cached_property
    def counts(self) -> dict[str, set[str]]:
        """How many there are of what, wherever a number stands before a word."""
        found = defaultdict[str, set[str]](set)
        for number, word in _COUNTED.findall(self.text):
            found[_stem(word)].add(number)
        return found

    @cached_property
    def by_chance(self) -> float:
        """The share of any words that it has: the more, the larger it is."""
        return max(TOGETHER, 0.1 * log2(len(self.windows[0]) + 1) - 0.35)

    def stands(self, word: str) -> bool:
        """It stands there, and is not a part of a longer word or number."""
        *whole, last = _ATOM.findall(word) or [""]  # looking through all of the text is slow
        may_stand = self.known.issuperset(whole) and (last in self.known or _begins(last, self.ordered))
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
        """A name, a number, a path or an identifier, in one form or another."""
        if word not in self.looked_up:
            self.looked_up[word] = self._has(word)
        return self.looked_up[word]

    def _has(self, word: str) -> bool:
        known = _plain(word).strip("'\".*_,?!$€£¥~≈/%#").removesuffix("'s").removesuffix("()")
        if _VERSION.fullmatch(known):
            return self.stands(known) or self.stands(known[1:])
        if not known or known in self.known or self.stands(known):
            return True
        if quantity := _QUANTITY.fullmatch(known):
            return self.has_quantity(*quantity.groups())
        folder, slash, name = known.rpartition("/")
        if slash:  # a file that is only ever called by its name may be anywhere
            return self.stands(name) and f"/{name}" not in self.text and self.has(folder)
        if known[-1] == "s" and self.stands(known[:-1]):
            return True
        has_digit = re.search(r"\d", known) is not None
        if has_digit and len(known) > 6 and known.isalnum():  # the beginning of a long one
            return _begins(known, self.ordered)
        if has_digit and re.search(r"[a-z]", known) and _shape(known) in self.shape:
            return False  # there is the same with other digits
        parts = [part for part in _SPLIT.split(known) if part]
        if len(parts) < 2 and not has_digit:
            parts = known.split(".")
        if len(parts) < 2:
            humps = _HUMPS.findall(word)
            return len(humps) > 1 and known.isalpha() and self.stands(" ".join(humps).casefold())
        return all(map(self.has, parts))

    def has_quantity(self, number: str, unit: str) -> bool:
        """The same number as it is written elsewhere, or one that was rounded to it."""
        bare = (number.rstrip("0").rstrip(".") if "." in number else number).lstrip("0") or "0"
        forms = (
            [bare, f"{bare}0"]
            if "." in bare
            else [bare, f"{int(bare):,}", f"0{bare}", f"{bare}.0", f"{bare}000"]
        )
        if any(form in self.known or self.stands(form) for form in forms):
            return True
        digits = bare.replace(".", "")
        below = f"{int(digits) - 1:0{len(digits)}}"
        return unit != "" and (_begins(digits, self.numbers) or _begins(below, self.numbers))

    def invented(self, sentence: str) -> Iterator[str]:
        """What it names that the source does not."""
        rest = _BETWEEN.sub(" ", _THOUSANDS.sub("", _PLACES.sub(" ", sentence.replace("\\n", " "))))
        for pattern, forms in ((_DAY, _days), (_TIME, _times)):
            yield from (at.group() for at in pattern.finditer(rest) if not any(map(self.stands, forms(at))))
            rest = pattern.sub(" ", rest)
        for number, word in _COUNTED.findall(rest):
            if len(told := self.counts.get(_stem(word.casefold()), set())) == 1 and number not in told:
                yield f"{number} {word}"
        for code in _CODE.findall(rest):
            yield from (word for word in words(code) if _LITERAL.fullmatch(word) and not self.has(word))
        stems, _ = self.windows
        names = (word for word in _names(rest) if not all(_stem(part) in stems for part in _parts(word)))
        yield from chain(names, (word for word in words(rest) if _is_exact(word) and not self.has(word)))

    def support(self, sentence: str) -> Support:
        own = {word for word in _ATOM.findall(_plain(sentence)) if word.isalpha() and word not in _COMMON}
        stems = {_stem(word) for word in own if len(word) > 2 or not word.isascii()}
        found, ends = self.windows
        known = [found[stem] for stem in stems if stem in found]
        most = [0, 0, 0]
        for at, count in Counter(chain.from_iterable(known)).items():
            who = (at >= ends[0]) + (at >= ends[1])
            most[who] = max(most[who], count)
        size = max(1, len(stems))
        return Support(len(stems), len(known) / size, *(count / size for count in most))

    def supports(self, sentence: str, section: str = "") -> bool:
        """It speaks of what the source speaks of, and asks for nothing that the user did not speak of."""
        found = self.support(sentence)
        has_value = any(map(_is_exact, words(sentence)))
        if found.words and _ASKS.search(sentence):
            return found.by_user >= (ASKED if has_value or found.words >= FEW else 1.0)
        if found.words > 1 and _ORDER.search(sentence):  # that it names something known is not enough
            said = self.support(" ".join(word for word in words(sentence) if not _is_exact(word)))
            return max(said.by_user, said.by_agent) >= TOGETHER
        if section in COMMANDING and found.words < FEW and (has_value or found.words > 1):
            said = self.support(" ".join(word for word in words(sentence) if not _is_exact(word)))
            return not said.words or max(said.by_user, said.by_agent) == 1.0
        if found.words < FEW:
            return has_value or found.words < 2 or found.anywhere > 0
        if max(found[2:]) >= TOGETHER or found.anywhere >= self.by_chance:
            return True
        has_value = has_value or any(map(_is_name, words(sentence)[1:]))
        return found.anywhere >= BESIDE and (has_value or found.words == FEW)

    def quotes_tool(self, sentence: str, section: str) -> bool:
        """It gives an order that only a tool's output gave, word for word or nearly so."""
        is_order = _ORDER.search(sentence) is not None
        if section not in COMMANDING and not is_order:
            return False
        users, others, tools = self.flat
        own = _ATOM.findall(_plain(sentence))
        runs = [f" {' '.join(own[n : n + RUN])} " for n in range(max(1, len(own) - RUN + 1))]
        runs = [run for run in runs if run in tools and run not in users]
        found = self.support(sentence)
        people = max(found.by_user, found.by_agent)
        if runs and (is_order or (found.by_tool > people and any(run not in others for run in runs))):
            return True
        return found.by_tool * found.words > 1 and found.by_tool >= max(ASKED, MORE * people)


def _said(message: Message) -> Iterator[tuple[By, str]]:
    if message.summary:
        yield from _summarized(message.text, "summary")
        return
    for part in message.parts:
        by: By = "tool" if isinstance(part, ToolResult) else message.role
        yield by, all_text(Message(message.role, (part,)))


def _summarized(text: str, by: By) -> Iterator[tuple[By, str]]:
    """What is the user's or a tool's in a summary is still theirs; what is no summary is one's own."""
    of: dict[str, By] = {"requests": "user", "rules": "user", "quotes": "tool", "errors": "tool"}
    entries = list(read(text if OPEN in text else f"{OPEN}\n{text}\n{CLOSE}"))
    titles = {f"{title}:" for title in SECTIONS.values()}
    head = takewhile(lambda line: line not in titles, text.split("\n"))
    yield by, "\n".join(head) if entries else text
    yield from ((of.get(entry.section, "summary"), entry.text) for entry in entries)


def _is_exact(word: str) -> bool:
    """A number or an identifier: it is wrong if a single character is."""
    return len(word) > 1 if word.isdigit() else worth(word) >= PLAIN and not _PROSE.fullmatch(word)


def _is_name(word: str) -> bool:
    return word[:1].isupper() and len(word) > 2 and word.casefold() not in _COMMON


def _names(sentence: str) -> Iterator[str]:
    """Words with a capital that they do not have for where they stand."""
    if len(_GERMAN.intersection(sentence.split())) > 1:
        return
    if (subject := _SUBJECT.match(sentence)) and _is_name(subject[1]):
        yield subject[1]
    label, begins = _LABEL.match(sentence), True
    for piece in _PIECE.finditer(sentence, label.end() if label else 0):
        yield from (word for word in words(piece[0]) if not begins and _is_name(word) and not _is_exact(word))
        begins = piece[0].endswith((":", ";", "“", '"')) or not any(map(str.isalnum, piece[0]))


def _days(match: re.Match[str]) -> Iterator[str]:
    """How else a day is written."""
    if match[5]:
        iso, month, day = match.string[match.start() - 4 : match.end()], int(match[5]), int(match[6])
        yield from (iso, iso.replace("-", "/"))
    else:
        name, day = (match[1] or match[4]).casefold()[:3], int(match[2] or match[3])
        month = next(n for n, full in enumerate(_MONTHS, 1) if full[:3] == name)
        yield from (f"-{month:02}-{day:02}", f"{month:02}/{day:02}", f"{month}/{day}")
    for of in (name for full in _MONTHS[month - 1 : month] for name in (full, full[:3])):
        yield from (f"{of} {day}", f"{of} {day:02}", f"{day} {of}", f"{day}th {of}", f"{day}th of {of}")


def _times(match: re.Match[str]) -> Iterator[str]:
    """How else a time of day is written."""
    hour, minute, half = int(match[1] or match[4]), match[2] or match[5] or "00", (match[3] or "").lower()
    of_day = hour % 12 + 12 * (half == "p") if half and hour <= 12 else hour
    yield from (f"{of_day:02}:{minute}", f"{of_day}:{minute}", f"{hour:02}:{minute}", f"{hour}:{minute}")
    if minute == "00" and hour <= 24:
        yield from (f"{of_day % 12 or 12}{between}{half or 'pa'[of_day < 12]}m" for between in ("", " "))


def _begins(start: str, ordered: Sequence[str]) -> bool:
    """Whether one of them goes on where this ends."""
    after = bisect_right(ordered, start)
    return after < len(ordered) and ordered[after].startswith(start)


def _shape(text: str) -> str:
    return _DIGITS.sub("0", text)


def _stem(word: str) -> str:
    return _ENDING.sub("", word)[:7]


def _plain(text: str) -> str:
    """In one case, with one kind of dashes and apostrophes, with spaces between scripts, without escapes."""
    text = text.casefold()
    if "\\" in text:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
        text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text) if "\\u" in text else text
    return text if text.isascii() else _BETWEEN.sub(r" \g<0> ", text.replace("’", "'").replace("–", "-"))


def _parts(text: str) -> list[str]:
    return _ATOM.findall(_plain(text).removesuffix("'s"))


def flattened(text: str) -> str:
    """Its words alone."""
    return " ".join(_ATOM.findall(_plain(text)))
