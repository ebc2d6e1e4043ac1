"""Whether a summary can be trusted: what it says must stand in what it was made of, sentence by sentence.

A sentence is struck if it names, counts or dates what the source does not have, if its words stand together
nowhere in the source, or if it lets the user ask for what the user did not speak of. Orders that only a tool
gave are quoted as such. What the source has and the summary lacks is not looked for: `extract` appends it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from refold.core.message import Message, Role, ToolResult
from refold.core.regex import regex
from refold.policies.extract import Written
from refold.policies.importance import all_text
from refold.policies.outline import PLAIN, clip, words, worth
from refold.policies.sections import CLOSE, OPEN, SECTIONS, WORTH, Entry, read

By: TypeAlias = Role | Literal["summary"]
"""Who said something."""

TITLES: dict[str, tuple[str, ...]] = {
    "requests": ("requests of the user", "user requests", "requests", "request states"),
    "rules": ("rules of the user", "user rules", "rules", "constraints"),
    "done": ("work done", "done", "completed", "work completed", "completed work", "progress"),
    "decisions": ("decisions", "key decisions", "decisions made"),
    "state": ("current state", "state", "current status", "status"),
    "errors": ("errors and what followed", "errors what followed", "errors", "errors and fixes")
    + ("errors and their resolution", "errors and resolutions", "problems"),
    "pending": ("pending", "open", "remaining", "pending work", "pending tasks", "remaining work", "to do"),
    "next": ("next action", "exact next action", "next actions", "next step", "next steps", "next"),
    "values": ("exact values", "exact identifiers", "identifiers"),
    "files": ("files and resources", "files"),
}
"""How models write the titles of sections."""
WANTED = ("requests", "done", "decisions", "state", "errors", "pending", "next")
"""Sections that a summary must have, if only to say that there is nothing."""
ORDERING: tuple[By, ...] = ("user", "system")
"""Whose words are rules."""
COMMANDING = ("rules", "decisions", "pending", "next")
"""Sections that an agent acts upon."""
MOST_STRUCK = 0.5
"""Of its sentences; where more are not true, the rest is not believed either."""
LONGEST = 600
"""Characters of one entry."""
WINDOW = 60
"""Words of the source that stand together."""
TOGETHER, ANYWHERE, BESIDE, ASKED = 0.35, 0.74, 0.3, 0.5
"""Of the words of a sentence, that stand together in the source; or anywhere in it; or anywhere, beside an
exact value; or together in what the user said, if the user is to have asked for it."""
FEW = 3
"""Words of a sentence of which fewer say too little to be looked for."""
RUN = 4
"""Words in a row that are not the same by chance."""

_THINKING = regex(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TITLE = regex(r"\s*(#{1,6}\s+|\*\*|__)?(?:\d+[.)]\s+)?(.+?)\s*$")
_BULLET = regex(r"\s*(?:[-*•+]|\d+[.)])\s+(?:\[[ xX]\]\s+)?")
_NOTHING = regex(
    r"\W*(?:none|nothing|n/?a|not applicable|no (?:errors|decisions|pending)[^.]{0,30})\W*$", re.I
)
_REQUEST = regex(r"#(\d+)(?=[^#]*?\b(done|completed|active|in progress|superseded|open|pending)\b)", re.I)
_STATES = {"completed": "done", "in progress": "active", "pending": "open"}
_SENTENCES = regex(r"(?<=[.!?])(?<!\b[A-Z][a-z]\.)(?<!\bMrs\.)\s+(?=[\"'`(]?[A-Z0-9])|(?<=[。！？])")
_ESCAPED = regex(r"\\u([0-9a-f]{4})")
_ATOM = regex(r"[^\W_]+")
_THOUSANDS = regex(r"(?<=\d),(?=\d{3}(?!\d))")
_SPLIT = regex(r"[:=→…()\[\]{}<>|+&#@~^%*-]+|\.\.+")
_HUMPS = regex(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_QUANTITY = regex(r"(\d+(?:\.\d+)?)([a-z]{0,3})")
_VERSION = regex(r"v\d[\d.]*")
_PROSE = regex(r"[A-Za-z]?[a-z]*(?:-[A-Za-z]?[a-z]*)*")
_CODE, _LITERAL = regex(r"`([^`]+)`"), regex(r"[A-Za-z][A-Za-z-]{3,}")
_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = rf"((?:{'|'.join(name[:3] for name in _MONTHS)})[a-z]*)\.?"
_DAY = regex(
    rf"\b{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?\b|\b(\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?\s+{_MONTH}(?!\w)"
    r"|\b\d{4}-(\d\d)-(\d\d)(?!\d)",
    re.IGNORECASE,
)
_TIME = regex(
    r"(?<![\w:.])(\d{1,2})(?::(\d\d))?\s*([ap])\.?m\b\.?|(?<![\w:.])(\d{1,2}):(\d\d)(?::\d\d)?(?![\w:])", re.I
)
_COUNTED = regex(r"(?<![\w.,:/$-])(\d{1,2}) ([A-Za-z]{3,})")
_SUBJECT = regex(
    r"([A-Z][a-z]+)(?<!ing)(?<!ion)(?<!ment)(?<!ness) (?:was|is|has|had|will|would|said|wants?|[a-z]+ed)\b"
)
_ASKS = regex(
    r"\b(?:user|customer|client)\b(?:'s)?\W+(?:\w+\W+){0,2}?(?:said|says|told|ask(?:s|ed)?|want(?:s|ed)?"
    r"|require[sd]?|request(?:s|ed)?|insist(?:s|ed)?|demand(?:s|ed)?|prefer(?:s|red)?|forbids?|forbade"
    r"|prohibit(?:s|ed)|must|(?:do|does|did)(?:n't| not) want|constraints?|rules?)\b"
    r"|^(?:always|never|do not|don't)\b",
    re.IGNORECASE,
)
_ORDER = regex(
    r"\b(?:ignore|disregard|forget|you (?:must|should|are|will|need)|instructions?|system prompt|override"
    r"|do not tell|from now on|new task|act as|pretend|execute|reveal|send (?:all|the|your|it))\b",
    re.IGNORECASE,
)
_ENDING = regex(r"(?<=\w{3})(?:ations?|ings?|ied|ies|edly|ed|es|ers?|ly|ions?|ment|s|e|y)$")
_COMMON = frozenset(
    "the and for that this with from were was has have had been are not but they then than when which into also"
    " after before their there its his her she him who what will would can could should may might did does done"
    " all any each both such only other some more most one two three four five user users customer agent"
    " assistant tool tools task result results called call calls using used use made make found find asked ask"
    " asks requested request requests summary section none nothing everything noted still yet now next currently"
    " already because while where between without within about over under again later first second third last"
    " new via per you your our out off since until though although even them these those being every another"
    " same several finally instead rather said says told never always must want wants requires required prefers"
    " pending today api json http https url html cli ids".split()
) | {*_MONTHS, *(name[:3] for name in _MONTHS)}


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
    def text(self) -> str:
        return "\n".join(_plain(text) for _, text in self.texts)

    @cached_property
    def atoms(self) -> list[tuple[By, list[str]]]:
        """The words of each text, and what identifiers and numbers are made of."""
        return [(by, _ATOM.findall(_plain(text))) for by, text in self.texts]

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(atoms for _, atoms in self.atoms))

    @cached_property
    def windows(self) -> tuple[dict[str, list[int]], int, int]:
        """Where words stand, in one form or another: first what the user said, then others, then tools."""
        stems = {atom: _stem(atom) for atom in self.known}
        found, ends = defaultdict[str, list[int]](list), [0, 0, 0]
        for rank, atoms in sorted(((_rank(by), atoms) for by, atoms in self.atoms), key=itemgetter(0)):
            for start in range(0, len(atoms), WINDOW):
                for stem in {stems[atom] for atom in atoms[start : start + WINDOW]}:
                    found[stem].append(ends[2])
                ends[rank:] = [ends[2] + 1] * (3 - rank)
        return found, ends[0], ends[1]

    @cached_property
    def counts(self) -> dict[str, set[str]]:
        """How many there are of what, wherever a number stands before a word."""
        found = defaultdict[str, set[str]](set)
        for number, word in _COUNTED.findall(self.text):
            found[_stem(word)].add(number)
        return found

    def flat(self, *by: By) -> str:
        """What they said, in words only."""
        return f" {' '.join(chain.from_iterable(atoms for who, atoms in self.atoms if who in by))} "

    @cached_property
    def from_user(self) -> str:
        return self.flat(*ORDERING)

    @cached_property
    def from_people(self) -> str:
        return self.flat(*ORDERING, "assistant", "summary")

    @cached_property
    def from_tools(self) -> str:
        return self.flat("tool")

    def stands(self, word: str) -> bool:
        """It stands there, and is not a part of a longer word or number."""
        if not all(atom in self.known for atom in _ATOM.findall(word)[:-1]):
            return False
        start = self.text.find(word)
        while start >= 0:
            before, after = self.text[start - 1 : start], self.text[start + len(word) :][:1]
            ends = after.isdigit() if word[-1].isdigit() else after.isalnum() and word[-1].isalnum()
            if not ends and not (before.isalnum() and word[0].isalnum()):
                return True
            start = self.text.find(word, start + 1)
        return False

    def has(self, word: str) -> bool:
        """A name, a number, a path or an identifier, in one form or another."""
        known = _plain(word).strip("'\".*_,?!$€£¥~≈/%#").removesuffix("'s").removesuffix("()")
        known = known[1:] if _VERSION.fullmatch(known) else known
        if not known or known in self.known or self.stands(known):
            return True
        if quantity := _QUANTITY.fullmatch(known):
            return self.has_quantity(*quantity.groups())
        folder, slash, name = known.rpartition("/")
        if slash and (not folder.strip("./") or not re.search(r"[\d_./]", known)):
            return all(map(self.has, filter(None, known.split("/"))))
        if slash:  # a file that is only ever called by its name may be anywhere
            return self.stands(name) and f"/{name}" not in self.text and self.has(folder)
        if known[:-1] in self.known and known[-1] == "s":
            return True
        if len(known) > 6 and known.isalnum() and re.search(r"\d", known):  # the beginning of a long one
            return any(atom.startswith(known) for atom in self.known)
        name, colon, at = known.rpartition(":")
        if colon and at.isdigit() and re.search(re.escape(f"{name}:") + r"\d", self.text):
            return False
        parts = [part for part in _SPLIT.split(known) if part]
        if len(parts) < 2 and not re.search(r"\d", known):
            parts = known.split(".")
        if len(parts) < 2:
            humps = _HUMPS.findall(word)
            return len(humps) > 1 and known.isalpha() and self.stands(" ".join(humps).casefold())
        return all(map(self.has, parts))

    def has_quantity(self, number: str, unit: str) -> bool:
        """The same number as it is written elsewhere, or one that was rounded to it."""
        bare = number.lstrip("0") or "0"
        forms = [bare, f"{int(bare):,}", f"0{bare}", f"{bare}.0", f"{bare}000"] if bare.isdigit() else [f"{bare}0"]
        if any(form in self.known or self.stands(form) for form in forms):
            return True
        digits = bare.replace(".", "")
        if not unit and len(bare.partition(".")[2]) != 1:
            return False
        longer = (atom for atom in self.known if atom.isdigit() and len(atom) > len(digits))
        return any(0 <= int(digits) - int(atom[: len(digits)]) <= 1 for atom in longer)

    def invented(self, sentence: str) -> Iterator[str]:
        """What it names that the source does not."""
        rest = _THOUSANDS.sub("", sentence)
        for pattern, forms in ((_DAY, _days), (_TIME, _times)):
            yield from (at.group() for at in pattern.finditer(rest) if not any(map(self.stands, forms(at))))
            rest = pattern.sub(" ", rest)
        for number, word in _COUNTED.findall(rest):
            if len(told := self.counts.get(_stem(word.casefold()), set())) == 1 and number not in told:
                yield f"{number} {word}"
        for code in _CODE.findall(rest):
            yield from (word for word in words(code) if _LITERAL.fullmatch(word) and not self.has(word))
        subject, begins = _SUBJECT.match(rest), True
        if subject and self.is_strange(subject[1]):
            yield subject[1]
        for part in rest.split():
            for word in words(part):
                if not self.has(word) if _is_exact(word) else not begins and self.is_strange(word):
                    yield word
            begins = part.endswith((":", ";", "“", '"')) or not any(map(str.isalnum, part))

    def is_strange(self, word: str) -> bool:
        """A name that does not stand there."""
        return _is_name(word) and _stem(_plain(word).removesuffix("'s")) not in self.windows[0]

    def support(self, sentence: str) -> "Support":
        own = [atom for atom in _ATOM.findall(_plain(sentence)) if len(atom) > 2 and atom.isalpha()]
        stems = {_stem(word) for word in own if word not in _COMMON}
        windows, users, peoples = self.windows
        known = [windows[stem] for stem in stems if stem in windows]
        most = [0, 0, 0]
        for at, count in Counter(chain.from_iterable(known)).items():
            rank = (at >= users) + (at >= peoples)
            most[rank] = max(most[rank], count)
        size = max(1, len(stems))
        return Support(len(stems), len(known) / size, *(count / size for count in most))

    def supports(self, sentence: str) -> bool:
        """It speaks of what the source speaks of, and asks for nothing that the user did not speak of."""
        found = self.support(sentence)
        if found.words and _ASKS.search(sentence):
            return found.by_user >= (ASKED if found.words >= FEW else 1.0)
        if found.words < FEW or found.together >= TOGETHER or found.anywhere >= ANYWHERE:
            return True
        has_value = any(_is_exact(word) or _is_name(word) for word in words(sentence)[1:])
        return found.anywhere >= BESIDE and (has_value or found.words == FEW)

    def quotes_tool(self, sentence: str, section: str) -> bool:
        """It gives an order that only a tool's output gave."""
        is_order = _ORDER.search(sentence) is not None
        if section not in COMMANDING and not is_order:
            return False
        own = _ATOM.findall(_plain(sentence))
        others = self.from_user if is_order else self.from_people
        runs = (f" {' '.join(own[n : n + RUN])} " for n in range(max(1, len(own) - RUN + 1)))
        if any(run in self.from_tools and run not in others for run in runs):
            return True
        found = self.support(sentence)
        return found.words > 1 and found.by_tool >= max(ASKED, 1.5 * found.by_user, 1.5 * found.by_agent)


class Support(NamedTuple):
    """How many words of a sentence a source has: anywhere, and together in what somebody said."""

    words: int
    anywhere: float
    by_user: float
    by_agent: float
    by_tool: float

    @property
    def together(self) -> float:
        return max(self.by_user, self.by_agent, self.by_tool)


class Verdict(msgspec.Struct, frozen=True):
    """What is left of a text once everything untrue is struck."""

    written: Written
    kept: int
    """Sentences."""
    struck: tuple[str, ...]
    problem: str | None = None
    """Why none of it is any use."""

    @property
    def score(self) -> float:
        """The share of it that was found to be true."""
        return self.kept / max(1, self.kept + len(self.struck))


def judged(text: str, source: Source, wanted: Sequence[str] = WANTED) -> Verdict:
    """What a model wrote, held against its source."""
    sections, entries = _parsed(_THINKING.sub("", text))
    struck, true, kept = list[str](), list[Entry](), 0
    states = dict[int, str]()
    for section, line in entries:
        if section == "requests":
            states |= {int(at): _STATES.get(state.lower(), state.lower()) for at, state in _REQUEST.findall(line)}
            continue
        if section == "rules" and f" {_flat(line)} " not in source.from_user:
            struck += [] if source.supports(line) else [clip(line, LONGEST)]
            continue  # the user's own words are kept by rule
        good = list[str]()
        for sentence in filter(None, map(str.strip, _SENTENCES.split(line))):
            if source.quotes_tool(sentence, section):
                true.append(Entry("quotes", f"“{clip(sentence, LONGEST)}”", WORTH["quotes"]))
            elif any(source.invented(sentence)) or not source.supports(sentence):
                struck.append(clip(sentence, LONGEST))
                continue
            else:
                good.append(sentence)
            kept += 1
        if good:
            whole = clip(" ".join(good), LONGEST)
            true.append(Entry(section, whole, WORTH[section] + 1.0, must=section == "rules"))
    problem = _problem(sections, kept, len(struck), wanted)
    return Verdict(Written(tuple(true), states), kept, tuple(struck), problem)


def _problem(sections: set[str], kept: int, struck: int, wanted: Sequence[str]) -> str | None:
    if not kept and not struck:
        return "it says nothing"
    missing = [SECTIONS[section] for section in wanted if section not in sections]
    if missing:
        return f"it has no {', '.join(missing)}"
    if struck > MOST_STRUCK * (kept + struck):
        return f"{struck} of its {kept + struck} sentences are not in what it was made of"
    return None


def _parsed(text: str) -> tuple[set[str], list[tuple[str, str]]]:
    """Which sections a text has, and its lines, each with its section."""
    section, heading = "notes", ""
    sections, lines = set[str](), list[tuple[str, str]]()
    for line in filter(str.strip, text.splitlines()):
        title = _TITLE.match(line)
        mark, whole = title.groups() if title else (None, line)
        name, _, rest = whole.replace("*", "").replace("__", "").partition(":")
        known = _section(name) if mark or not _BULLET.match(line) else None
        if known:
            section, heading, line = known, "", rest
            sections.add(section)
        elif mark and (mark[0] == "#" or whole.endswith(("**", "**:", "__"))):
            section, heading, line = "notes", name.strip(), rest
        plain = _BULLET.sub("", line, count=1).strip().replace("**", "")
        if plain.strip("|-: ") and not plain.startswith("```") and not _NOTHING.match(plain):
            lines.append((section, f"{heading}: {plain}" if heading else plain))
    return sections, lines


def _section(title: str) -> str | None:
    plain = _flat(title.replace("&", " and "))
    return next((section for section, names in TITLES.items() if plain in names), None)


def _said(message: Message) -> Iterator[tuple[By, str]]:
    if message.summary:
        yield from _summarized(message.text, "summary")
        return
    for part in message.parts:
        by: By = "tool" if isinstance(part, ToolResult) else message.role
        yield by, all_text(Message(message.role, (part,)))


def _summarized(text: str, by: By) -> Iterator[tuple[By, str]]:
    """What is the user's or a tool's in a summary is still theirs; what is no summary is all one's own."""
    of: dict[str, By] = {"requests": "user", "rules": "user", "quotes": "tool", "errors": "tool"}
    entries = read(text if OPEN in text else f"{OPEN}\n{text}\n{CLOSE}")
    yield from [(of.get(entry.section, "summary"), entry.text) for entry in entries] or [(by, text)]


def _rank(by: By) -> int:
    return 0 if by in ORDERING else 2 if by == "tool" else 1


def _is_exact(word: str) -> bool:
    """A number or an identifier: it is wrong if a single character is."""
    return len(word) > 1 if word.isdigit() else worth(word) >= PLAIN and not _PROSE.fullmatch(word)


def _is_name(word: str) -> bool:
    return word[:1].isupper() and len(word) > 2 and word.casefold() not in _COMMON


def _days(match: re.Match[str]) -> Iterator[str]:
    """How else a day is written."""
    name = (match[1] or match[4] or "").casefold()[:3]
    month = int(match[5]) if match[5] else next(n for n, full in enumerate(_MONTHS, 1) if full[:3] == name)
    day = int(match[2] or match[3] or match[6])
    yield from (f"-{month:02}-{day:02}", f"{month:02}/{day:02}", f"{month}/{day}")
    for full in _MONTHS[month - 1 : month]:
        for number in (f"{day:02}", *(f"{day}{end}" for end in ("", "st", "nd", "rd", "th"))):
            for of in (full, full[:3]):
                yield from (f"{of} {number}", f"{number} {of}", f"{number} of {of}")


def _times(match: re.Match[str]) -> Iterator[str]:
    """How else a time of day is written."""
    hour, minute, half = int(match[1] or match[4]), match[2] or match[5] or "00", (match[3] or "").lower()
    of_day = hour % 12 + 12 * (half == "p") if half else hour
    yield from (f"{of_day:02}:{minute}", f"{of_day}:{minute}", f"{hour:02}:{minute}", f"{hour}:{minute}")
    if minute == "00":
        yield from (f"{of_day % 12 or 12}{between}{half or 'pa'[of_day < 12]}m" for between in ("", " "))


def _stem(word: str) -> str:
    return _ENDING.sub("", word)[:7]


def _plain(text: str) -> str:
    """In one case, with one kind of dashes and apostrophes, and with line ends that are none."""
    text = text.casefold().replace("’", "'").replace("–", "-")
    if "\\" in text:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    return _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text) if "\\u" in text else text


def _flat(text: str) -> str:
    return " ".join(_ATOM.findall(_plain(text)))
