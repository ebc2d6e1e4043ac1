"""`Summarize` and `Window`: the oldest messages are replaced by a summary, or by a note."""

import re
from collections.abc import Sequence

import msgspec

from refold.core.budget import Budget
from refold.core.event import Certificate, Line, Span
from refold.core.lazy import regex
from refold.core.message import Message, Text
from refold.core.plan import Count, Edit, Plan
from refold.core.view import Item, View
from refold.policies.extract import NOTHING, Summary, Written, summary
from refold.policies.importance import ViewReading
from refold.policies.sections import quote_line
from refold.policies.selection import Selection, Shape, select_again, select_oldest
from refold.policies.text import vocabulary

TARGET_SHARE = 1 / 3
"""Of the compaction target, that a summary may take if no limit is set."""
MAX_TOKENS = 8_000
MAX_RATIO = 0.9
"""A summary is used only if it takes at most this share of what it replaces."""
FILL_SHARE = 0.9
"""Of the target, that is filled: summarizing more at once puts off the next compaction."""
LATER_ITEMS = 24
"""Items after a part that are searched for the answer to its last request."""
RULES_RATIO = 2
"""How many times its limit a summary may take if the user's rules need it."""
_MESSAGES = regex(r"([\d,]+) messages")
_TOKENS = regex(r"([\d,]+) tokens")


class Window(msgspec.Struct, frozen=True):
    """Hides the oldest messages and leaves a note in their place."""

    keep_recent: int | None = None
    """How many of the newest messages to keep, whatever they cost; unset, as many as fit."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        note = NOTE
        if view.handles:
            text = f"[refold #{view.next}: earlier messages are not shown here]"
            note = Message("user", (Text(text),), summary=True)
        exactly = self.keep_recent is not None
        old = select_oldest(
            view, budget, besides=count(note), keep_recent=self.keep_recent or 0, only=exactly
        )
        if old is None or old.tokens <= count(note):  # nothing to hide, or only what is hidden already
            return ()
        newest = f"{self.keep_recent}" if exactly else f"that fit in {budget.target:,} tokens"
        why = f"only the newest {newest} stay"
        return (Edit(old.span, (note, *old.kept), "window", why, ("compact", "strategy")),)


NOTE = Message("user", (Text("[refold: earlier messages are not shown here]"),), summary=True)


class Summarize(msgspec.Struct, frozen=True):
    """Replaces the oldest messages by one summary, which takes in the previous one; or, with `segments`,
    leaves a summary for each compaction, and merges too many of them into an era."""

    keep_recent: int = 10
    """How many of the newest messages stay, whatever they cost."""
    max_tokens: int | None = None
    """The longest summary; unset, a third of the compaction target, and at most 8,000. A segment has a third
    of it."""
    fill: bool = True
    """Keep more than `keep_recent` messages where there is room for them."""
    focus: str = ""
    """What the summary should tell most about."""
    segments: int | None = None
    """How many segments stay before they are merged."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        limit = summary_limit(self.max_tokens, budget)
        old = select_oldest(
            view, budget, besides=limit, keep_recent=self.keep_recent, only=not self.fill, share=FILL_SHARE
        )
        parts: list[SummaryPart] = []
        if old is not None and self.segments is not None:
            parts = self._segments(old, limit)
        elif old is not None and (self.fill or len(old.hidden) > 1 or not old.hidden[0].summary):
            parts.append(SummaryPart.of(old, limit, "summarize", focus=self.focus))
        return summary_edits(parts, view, count)

    def _segments(self, old: Selection, limit: int) -> "list[SummaryPart]":
        """The segments that become an era, if there are too many, and the messages that become a segment."""
        parts: list[SummaryPart] = []
        segments = [n for n, item in enumerate(old.items) if item.is_folded and item.edit is not None]
        if self.segments is not None and len(segments) >= self.segments:
            era = old.only(old.items[segments[0] : segments[-1] + 1])  # with what was restored between them
            parts.append(SummaryPart.of(era, limit, "hierarchy", "era", self.focus))
        new = old.only(old.items[segments[-1] + 1 :] if segments else old.items)
        if new.hidden:
            parts.append(SummaryPart.of(new, limit // 3, "hierarchy", "segment", self.focus))
        return parts


class SummaryPart(msgspec.Struct, frozen=True):
    """A part of the view that one summary replaces, and what a model has written for it.

    It names the part by places, so that a later view, in this process or another, can be searched for it.
    """

    span: Span
    kept: tuple[int, ...]
    shape: Shape
    most: int
    """The longest summary, in counted tokens."""
    kind: str
    level: str = "summary"
    focus: str = ""
    free: int | None = None
    """How long the summary may be if the user's rules need it; unset, twice `most`."""
    written: Written = NOTHING
    certificate: Certificate | None = None
    """Of the model; unset, the summary is made by rule."""
    made: int = 0
    """The next free place when it was planned."""
    tip: str = ""
    """The digest of the record up to that place."""

    @staticmethod
    def of(old: Selection, most: int, kind: str, level: str = "summary", focus: str = "") -> "SummaryPart":
        return SummaryPart(old.span, old.kept, old.shape, most, kind, level, focus)

    @property
    def model(self) -> str:
        """The model that wrote it; empty if none did."""
        return self.certificate.model or "" if self.certificate else ""

    def selection(self, view: View) -> Selection | None:
        """The part in this view; None if it has changed.

        If a summary by rule replaced a part that a model has written about, it is the part around that
        summary: what it covers besides goes into the new one by rule.
        """
        old = select_again(view, self.span, self.kept)
        if old is not None and old.shape == self.shape:
            return old
        met = [item for item in view.items if item.span.meets(self.span)]
        edits = [item.edit for item in met if item.is_folded and item.edit is not None]
        if self.certificate is None or not any(edit >= self.made for edit in edits):
            return None
        start = min(self.span.start, *(item.span.start for item in met))
        end = max(self.span.end, *(item.span.end for item in met))
        shown = {line.at for item in met for line in item.lines}
        around = select_again(view, Span(start, end), [at for at in self.kept if at in shown])
        if around is None or _corrections(around.shape) != _corrections(self.shape):
            return None
        return around


def _corrections(shape: Shape) -> list[tuple[int, int, int]]:
    return [place for place in shape if place[0] == place[1]]


class UsePrepared(msgspec.Struct, frozen=True):
    """Applies summaries that were prepared in the background, if what they cover has not changed."""

    prepared: tuple[SummaryPart, ...]

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        return summary_edits(self.prepared, view, count)


def summary_edits(parts: Sequence[SummaryPart], view: View, count: Count) -> Plan:
    plan: list[Edit] = []
    for part in parts:
        plan += _summary_edit(part, msgspec.structs.replace(view, next=view.next + len(plan)), count)
    return plan


def summary_limit(max_tokens: int | None, budget: Budget) -> int:
    """The longest summary, in counted tokens."""
    if max_tokens is None:
        max_tokens = min(MAX_TOKENS, int(budget.target * TARGET_SHARE))
    return budget.counted(max_tokens)


def _summary_edit(part: SummaryPart, view: View, count: Count) -> Plan:
    """The edit that shows a summary, a model's or one by rule; none if that would not be shorter."""
    old = part.selection(view)
    if old is None:
        return ()
    replaces_rule = old.shape != part.shape  # a summary by rule, which may be shorter
    items = {(line.at, line.n): item for item in old.items for line in item.lines}
    hidden = [line for line in old.hidden if not line.recalled]
    originals = [(line, items[line.at, line.n].words(line)) for line in hidden]
    if not originals:
        return ()
    messages, tokens = _size(originals, items)
    handle = f"#{view.next} " if view.handles else ""
    gone = {(line.at, line.n) for line in old.hidden}
    still_shown = [line for line in view.lines if (line.at, line.n) not in gone]
    made = summary(
        [(_at_original(line, items[line.at, line.n]), message) for line, message in originals],
        later=_following(view, old.span),
        header=f"refold {handle}{part.level}: {messages:,} messages, {tokens:,} tokens",
        active=next((line.place for line in view.lines if line.at == view.latest), view.latest),
        elsewhere=vocabulary(ViewReading(view).text(*still_shown)),
        tokens=part.most if replaces_rule else min(part.most, int(MAX_RATIO * old.tokens)),
        at_most=RULES_RATIO * part.most if part.free is None else part.free,
        count=count,
        task=next((line.place for line in view.lines if line.asks), None),
        written=part.written,
        focus=vocabulary(part.focus.casefold()),
    )
    if not replaces_rule and count(made.message) > MAX_RATIO * old.tokens:
        return ()
    why = f"{messages:,} messages are too many for the room there is"
    if made.left_out:
        why += f"; {made.left_out} rules of the user are in their originals only"
    certificate = _certificate(made, part)
    setting = ("compact", "strategy")
    return (Edit(old.span, (made.message, *old.kept), part.kind, why, setting, certificate, part.focus),)


def _following(view: View, span: Span) -> list[tuple[Line, Message]]:
    """The next messages after a span, which may answer what was asked in it."""
    found: list[tuple[Line, Message]] = []
    for item in [item for item in view.items if item.span.start >= span.end][:LATER_ITEMS]:
        found += [(line, item.words(line)) for line in item.lines if not line.recalled]
    return found


def _certificate(made: Summary, part: SummaryPart) -> Certificate:
    if part.certificate is None:
        return Certificate(kept=len(made.entries), left_out=made.left_out)
    own = {(entry.section, quote_line(entry.text)) for entry in part.written.entries}
    appended = tuple(entry.text for entry in made.entries if (entry.section, entry.text) not in own)
    return msgspec.structs.replace(part.certificate, appended=appended, left_out=made.left_out)


def _at_original(line: Line, item: Item) -> Line:
    """A shortened message is referred to by the place of its original."""
    if line.summary:
        return line
    place = line.place if line.place in item.span else item.span.start
    return msgspec.structs.replace(line, at=place)


def _size(originals: list[tuple[Line, Message]], items: dict[tuple[int, int], Item]) -> tuple[int, int]:
    """How many messages and tokens a summary stands for, including those of summaries in it."""
    messages = 0
    tokens = 0
    for line, message in originals:
        item = items[line.at, line.n]
        header = message.text.partition("\n")[0] if line.place not in item.span else ""
        messages += _number(_MESSAGES, header) or (0 if item.is_folded else 1)
        tokens += _number(_TOKENS, header) or line.tokens
    return messages, tokens


def _number(pattern: re.Pattern[str], header: str) -> int:
    found = pattern.search(header) if header.startswith("[refold ") else None
    return int(found[1].replace(",", "")) if found else 0
