"""The oldest messages, put together into one record of what was in them."""

import re

import msgspec

from refold.core.budget import Budget
from refold.core.event import Certificate, Line, Span
from refold.core.lazy import regex
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan
from refold.core.view import Item, View
from refold.policies.extract import NOTHING, Summary, Written, summary
from refold.policies.importance import ViewReading
from refold.policies.outline import vocabulary
from refold.policies.sections import tame
from refold.policies.selection import Selection, Shape, oldest, stretch

SHARE = 1 / 3
"""Of what compaction comes down to, that a summary may take where no limit is set."""
WORTH_IT = 0.9
"""Of what it stands for, that a summary takes at most."""
DEEPER = 0.9
"""Of the same, that is filled: what is summarized at once need not be summarized again so soon."""
LATER = 24
"""Items after a stretch that are looked at for the answer to its last request."""
STRETCH = 2
"""How many times its limit a summary may take where the user's own rules need it."""
LONGEST = 8_000
"""Tokens that it takes at most, then."""
_MANY, _TOKENS = regex(r"([\d,]+) messages"), regex(r"([\d,]+) tokens")


class Summarize(msgspec.Struct, frozen=True):
    """One summary stands for all that is older; the one before it goes into it."""

    keep_recent: int = 10
    """How many of the newest messages stay, whatever they cost."""
    max_tokens: int | None = None
    """The longest summary; unset, a third of what compaction comes down to, and at most 8,000."""
    fill: bool = True
    """Whether more than that stays where there is room for it."""
    focus: str = ""
    """What it should tell most about."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        return [edit for part in self.parts(view, budget) for edit in fold_away(part, view, count)]

    def parts(self, view: View, budget: Budget) -> "list[Part]":
        """What is to be summarized."""
        most = longest(self.max_tokens, budget)
        old = oldest(
            view, budget, besides=most, keep_recent=self.keep_recent, only=not self.fill, share=DEEPER
        )
        if old is None or (not self.fill and len(old.hidden) == 1 and old.hidden[0].summary):
            return []  # nothing, or nothing new
        return [Part(old, most, "summarize", focus=self.focus)]


class Part(msgspec.Struct, frozen=True):
    """A stretch of the view that one summary will stand for."""

    old: Selection
    most: int
    """Tokens of the summary, as they are counted."""
    kind: str
    level: str = "summary"
    focus: str = ""
    free: int | None = None
    """What it may take where the user's own rules need it; unset, twice as much."""
    replaces_rule: bool = False
    """It stands for a summary by rule, which may be shorter."""

    @property
    def brief(self) -> "Brief":
        how = (self.most, self.kind, self.level, self.focus)
        return Brief(self.old.span, self.old.kept, self.old.shape, *how)


class Brief(msgspec.Struct, frozen=True):
    """The same without its words: it can be found again in a later view, if it is still as it was."""

    span: Span
    kept: tuple[int, ...]
    shape: Shape
    most: int
    kind: str
    level: str
    focus: str = ""

    def part(self, view: View) -> Part | None:
        old = stretch(view, self.span, self.kept)
        if old is None or old.shape != self.shape:
            return None
        return Part(old, self.most, self.kind, self.level, self.focus)

    def compacted_since(self, view: View, made: int) -> Part | None:
        """The stretch around it, if a summary by rule took its place after it was planned.

        What that summary covers besides goes into this one by rule.
        """
        met = [item for item in view.items if item.span.meets(self.span)]
        if not any(item.is_folded and item.edit is not None and item.edit >= made for item in met):
            return None
        start = min(self.span.start, *(item.span.start for item in met))
        end = max(self.span.end, *(item.span.end for item in met))
        shown = {line.at for item in met for line in item.lines}
        old = stretch(view, Span(start, end), [at for at in self.kept if at in shown])
        if old is None or _corrections(old.shape) != _corrections(self.shape):
            return None
        return Part(old, self.most, self.kind, self.level, self.focus, replaces_rule=True)


def _corrections(shape: Shape) -> list[tuple[int, int, int]]:
    return [place for place in shape if place[0] == place[1]]


class PreparedSummary(msgspec.Struct, frozen=True):
    """What a model wrote for a part, checked."""

    brief: Brief
    written: Written
    certificate: Certificate
    made: int = 0
    """The first place that was free when it was planned."""
    tip: str = ""
    """The digest of the record up to there."""

    def part(self, view: View) -> Part | None:
        """What it stands for in the view: the part as it was, or what was compacted by rule since."""
        return self.brief.part(view) or self.brief.compacted_since(view, self.made)


class UsePrepared(msgspec.Struct, frozen=True):
    """Summaries that were made ahead stand for what they were made of, as far as that is as it was."""

    prepared: tuple[PreparedSummary, ...]

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        plan = list[Edit]()
        for one in self.prepared:
            part = one.part(view)
            if part is not None:
                here = msgspec.structs.replace(view, next=view.next + len(plan))
                plan += fold_away(part, here, count, one)
        return plan


def longest(max_tokens: int | None, budget: Budget) -> int:
    """How much a summary may take, as it is counted."""
    share = min(LONGEST, int(budget.target * SHARE))
    return budget.counted(share if max_tokens is None else max_tokens)


def fold_away(part: Part, view: View, count: Count, by: PreparedSummary | None = None) -> Plan:
    """The edit that shows a summary in its place, a model's or one by rule, if that is shorter."""
    old = part.old
    words = {(line.at, line.n): item.words for item in old.items for line in item.lines}
    said = [(line, words[line.at, line.n](line)) for line in old.hidden if not line.recalled]
    if not said:
        return ()
    places = {
        (line.at, line.n): line.place if line.place in item.span else item.span.start
        for item in old.items
        for line in item.lines
    }
    gone = {(line.at, line.n) for line in old.hidden}
    reading = ViewReading(view)
    rest = vocabulary(reading.text(line for line in view.lines if (line.at, line.n) not in gone))
    messages, tokens = _measure(old, said)
    handle = f"#{view.next} " if view.handles else ""

    def header(shown: str) -> str:
        return f"[refold {handle}{part.level}: {messages:,} messages, {tokens:,} tokens; {shown}]"

    made = summary(
        [(_at_its_place(line, places), message) for line, message in said],
        later=[(line, item.words(line)) for item, line in _after(view, old.span)],
        header=header,
        active=next((line.place for line in view.lines if line.at == view.latest), view.latest),
        elsewhere=rest,
        tokens=part.most if part.replaces_rule else min(part.most, int(WORTH_IT * old.tokens)),
        at_most=STRETCH * part.most if part.free is None else part.free,
        count=count,
        task=next((line.place for line in view.lines if line.asks), None),
        written=by.written if by else NOTHING,
        focus=vocabulary(part.focus.casefold()),
    )
    if not part.replaces_rule and count(made.message) > WORTH_IT * old.tokens:
        return ()
    why = f"{messages:,} messages are too many for the room there is"
    if made.left_out:
        why += f"; {made.left_out} rules of the user are in their originals only"
    setting, certificate = ("compact", "strategy"), _certificate(made, by)
    return (Edit(old.span, (made.message, *old.kept), part.kind, why, setting, certificate, part.focus),)


def _after(view: View, span: Span) -> list[tuple[Item, Line]]:
    """The next of what was said: it may answer what was asked before."""
    items = [item for item in view.items if item.span.start >= span.end][:LATER]
    return [(item, line) for item in items for line in item.lines if not line.recalled]


def _certificate(made: Summary, by: PreparedSummary | None) -> Certificate:
    if by is None:
        return Certificate(kept=len(made.entries), left_out=made.left_out)
    own = {(entry.section, tame(entry.text)) for entry in by.written.entries}
    appended = tuple(entry.text for entry in made.entries if (entry.section, entry.text) not in own)
    return msgspec.structs.replace(by.certificate, appended=appended, left_out=made.left_out)


def _at_its_place(line: Line, places: dict[tuple[int, int], int]) -> Line:
    """A shortened message is spoken of by the place of its original."""
    return line if line.summary else msgspec.structs.replace(line, at=places[line.at, line.n])


def _measure(old: Selection, said: list[tuple[Line, Message]]) -> tuple[int, int]:
    """How many messages and tokens were there, also where something stands for them already."""
    messages = tokens = 0
    inside = {(line.at, line.n): item for item in old.items for line in item.lines}
    for line, message in said:
        item = inside[line.at, line.n]
        head = message.text.partition("\n")[0] if line.place not in item.span else ""
        messages += _number(_MANY, head) or (0 if item.is_folded else 1)
        tokens += _number(_TOKENS, head) or line.tokens
    return messages, tokens


def _number(pattern: re.Pattern[str], head: str) -> int:
    found = pattern.search(head) if head.startswith("[refold ") else None
    return int(found[1].replace(",", "")) if found else 0
