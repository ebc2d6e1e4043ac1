"""Whether a summary can be trusted: what it says must stand in what it was made of, sentence by sentence.

A sentence is struck if it names, counts or dates what the source does not have, if its words stand together
nowhere in the source, or if it lets the user ask for what the user did not speak of. Orders that only a tool
gave are quoted as such. What the source has and the summary lacks is not looked for: `extract` appends it.
"""

import re
from collections.abc import Sequence

import msgspec

from refold.core.regex import regex
from refold.policies.extract import Written
from refold.policies.outline import clip
from refold.policies.sections import SECTIONS, WORTH, Entry
from refold.policies.source import Source, flattened

TITLES: dict[str, tuple[str, ...]] = {
    "requests": ("requests of the user", "user requests", "requests", "request states"),
    "rules": ("rules of the user", "user rules", "rules", "constraints"),
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
"""How models write the titles of sections."""
WANTED = ("requests", "done", "decisions", "state", "errors", "pending", "next")
"""Sections that a summary must have, if only to say that there is nothing."""
MOST_STRUCK = 0.5
"""Of its sentences; where more are not true, the rest is not believed either."""
LONGEST = 600
"""Characters of one entry."""

_THINKING = regex(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TITLE = regex(r"(#{1,6}\s+|\*\*|__)?(?:\d+[.)]\s+)?(.+)")
_BULLET = regex(r"^(?:[-*•+]|\d+[.)])\s+(?:\[[ xX]\]\s+)?")
_NOTHING = regex(
    r"\W*(?:none\b[,;:.—-].*|none|nothing|n/?a|not applicable|no (?:errors|decisions|pending)[^.]{0,30})\W*$",
    re.I,
)
_REQUEST = regex(r"#(\d{1,9})(?=[^#]*?\b(done|completed|active|in progress|superseded|open|pending)\b)", re.I)
_BRACKETED = regex(
    r"#(\d{1,9})\b[^#\n]*?[(\[](done|completed|active|in progress|superseded|open|pending)[)\]]", re.I
)
_NEGATED = regex(r"\b(?:not|partly|partially|half|almost|nearly)\b[^)\]]{0,12}\b(?:done|completed)\b", re.I)
_EACH = regex(r"(?=#\d)")
_STATES = {"completed": "done", "in progress": "active", "pending": "open"}
_SENTENCES = regex(r"(?<=[.!?])(?<!\b[A-Z][a-z]\.)(?<!\bMrs\.)\s+(?=[\"'`(]?[A-Z0-9])|(?<=[。！？])")


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
    text = _THINKING.sub("", text)
    sections, lines = _parsed(text)
    sections |= {title for title in wanted if title not in SECTIONS and _is_there(title, text)}
    struck, true, kept, states = list[str](), list[Entry](), 0, dict[int, str]()
    for section, line in lines:
        if section == "requests":
            for one in _EACH.split(line):
                found = _BRACKETED.match(one) or _REQUEST.match(one)
                if found and not _NEGATED.search(one):
                    state = found[2].lower()
                    states[int(found[1])] = _STATES.get(state, state)
            continue
        if section == "rules":  # the user's own are kept by rule: a part of one may say the opposite
            struck += [] if source.supports(line) else [clip(line, LONGEST)]
            continue
        good = list[str]()
        for sentence in filter(None, map(str.strip, _SENTENCES.split(line))):
            is_invented = any(source.invented(sentence))
            if not is_invented and source.quotes_tool(sentence, section):
                true.append(Entry("quotes", f"“{clip(sentence, LONGEST)}”", WORTH["quotes"]))
            elif not is_invented and source.supports(sentence, section):
                good.append(sentence)
            else:
                struck.append(clip(sentence, LONGEST))
                continue
            kept += 1
        if good:
            true.append(Entry(section, clip(" ".join(good), LONGEST), WORTH[section] + 1.0))
    problem = _problem(sections, kept, len(struck), wanted)
    return Verdict(Written(tuple(true), states), kept, tuple(struck), problem)


def _problem(sections: set[str], kept: int, struck: int, wanted: Sequence[str]) -> str | None:
    if not kept and not struck:
        return "it says nothing"
    missing = [SECTIONS.get(section, section) for section in wanted if section not in sections]
    if missing:
        return f"it has no {', '.join(missing)}"
    if struck > MOST_STRUCK * (kept + struck):
        return f"{struck} of its {kept + struck} sentences are not in what it was made of"
    return None


def _parsed(text: str) -> tuple[set[str], list[tuple[str, str]]]:
    """Which sections a text has, and its lines, each with its section."""
    section, heading = "notes", ""
    sections, lines = set[str](), list[tuple[str, str]]()
    for line in filter(None, map(str.strip, text.splitlines())):
        bare = _BULLET.sub("", line, count=1)
        title = _TITLE.match(bare)
        mark, whole = title.groups() if title else (None, bare)
        name, _, rest = whole.replace("*", "").replace("__", "").partition(":")
        is_item = bare != line and not (line[0].isdigit() and " " in name and not rest)
        known = (_section(name) or _section(whole)) if mark or not is_item else None
        if known:
            section, heading, bare = known, "", rest.strip()
            sections.add(section)
        elif mark and not is_item and (mark[0] == "#" or whole.endswith(("**", "**:", "__"))):
            section, heading, bare = "notes", whole.strip("*_: "), ""
        plain = bare.replace("**", "")
        if plain.strip("|-: ") and not plain.startswith("```") and not _NOTHING.match(plain):
            lines.append((section, f"{heading}: {plain}" if heading else plain))
    return sections, lines


def _is_there(title: str, text: str) -> bool:
    """A section of somebody's own."""
    return any(flattened(line.partition(":")[0]) == flattened(title) for line in text.splitlines())


def _section(title: str) -> str | None:
    plain = flattened(title.replace("&", " and "))
    return next((section for section, names in TITLES.items() if plain in names), None)
