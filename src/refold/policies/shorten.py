"""A message as what it was: a line that names it, with the handle to get it back, and a skeleton of it.

[refold #57 web_search: 12,431 tokens, 50 items; 212 shown]
"""

import re
from functools import cached_property
from itertools import chain

import msgspec

from refold.core.event import Line
from refold.core.lazy import regex
from refold.core.message import Media, Message, Part, Text, ToolResult
from refold.core.plan import Count, is_reducible
from refold.core.view import Item, View
from refold.policies.outline import (
    PLAIN,
    SHORTEST,
    Bonus,
    Outline,
    clip,
    excerpt,
    outline,
    size_of,
    vocabulary,
)

HEADER = 28
"""Tokens of the line that names it, about."""
LEAST_SAVED = 0.05
"""Of its tokens, that a change of a message must save."""
NAME_CHARS = 24
"""Of a message that may show fewer characters, only its name is shown."""
SKELETON_TOKENS = 400
"""Up to so many tokens a message is shown as a skeleton alone; above, with its head and tail."""
CLOSE = 0.98
"""How much less than it seems to need is tried next, for a message that was still too long."""
SUMMARIZED = "shown, summarized"
"""How the header ends if a model wrote what follows."""
ERROR_CHARS = 2_000
"""An error is shown in full up to so many characters."""

_BRACKET, _HANDLE = regex(r"\[refold [^\]\n]*"), regex(r"(?<!#)#(?=\d)")
_HEADER = regex(r"\[refold (?:#\d+ )?(?P<what>[^\n]*?): (?P<size>[^;\n]*)(?:; [^\]\n]*)?\]\n?")


def quoted(text: str) -> str:
    """Somebody else's text in ours: a handle in it is doubled, so that it opens nothing."""
    return _BRACKET.sub(lambda found: _HANDLE.sub("##", found.group()), text)


def _body(shortened: Message) -> str:
    """What stands below the line that names it."""
    header = _HEADER.match(shortened.text)
    return shortened.text[header.end() :] if header else shortened.text


def _is_model_summary(shortened: Message) -> bool:
    """A model wrote what is shown."""
    return shortened.text.partition("\n")[0].endswith(f" {SUMMARIZED}]")


class Reduction(msgspec.Struct, frozen=True, dict=True):
    """One message that may be made shorter."""

    line: Line
    shown: Message
    """As it is shown now."""
    place: int
    """Where its original stands."""
    handles: bool = True
    is_short: bool = False
    """It is shown shorter than it was said."""
    source: Item | None = None
    """Where its original is read from, if it is shown shorter and may be shortened from that."""

    @classmethod
    def of(cls, item: Item, view: View) -> "Reduction | None":
        """The one message that an item shows, if it can be reduced in its place.

        What is shortened already is shortened again from its original, unless that is withheld or a model
        wrote what is shown.
        """
        if not is_reducible(item) or item.lines[0].role == "system":
            return None
        line, place = item.lines[0], item.span.start
        shown = item.words(line)
        if shown.is_sealed:
            return None
        is_withheld = any(place in span for span in view.withheld)
        is_original_better = item.is_shortened and not is_withheld and not _is_model_summary(shown)
        source = item if is_original_better else None
        return cls(line, shown, place, view.handles and not is_withheld, item.is_shortened, source)

    @cached_property
    def message(self) -> Message:
        """What it is shortened from."""
        return self.shown if self.source is None else self.source.original

    @property
    def is_error(self) -> bool:
        return any(result.is_error for result in self.shown.results)

    @property
    def text(self) -> str:
        is_body = self.is_short and self.source is None
        return _body(self.shown) if is_body else self.message.text

    def is_within(self, chars: int) -> bool:
        """What is shown now has at most so many characters, and the mark where it was cut."""
        return len(_body(self.shown)) <= chars + 1 if self.is_short else len(self.text) <= chars

    def outline(self, bonus: Bonus | None = None) -> Outline:
        return outline(self.text, bonus)

    def as_skeleton(self, outline: Outline, chars: int, count: Count) -> Message | None:
        """Shorter than it is now, or None."""
        chars = max(chars, ERROR_CHARS) if self.is_error else chars
        if not self.is_within(chars):
            return self._shorter(outline.cut(chars), outline.size, count)
        return self._without_media(count)

    def as_head(self, chars: int, count: Count) -> Message | None:
        """Its first characters, with how many were cut; None if it is short enough."""
        text = self.text
        if self.is_within(chars):
            return self._without_media(count)
        head = f"first {chars:,} shown" if chars else "none shown"
        size = ", ".join(filter(None, (f"{len(text):,} characters", size_of(text))))
        return self.if_shorter(self._with(self.header(size, head), clip(quoted(text), chars + 1)), count)

    def as_name(self, why: str, body: str = "") -> Message:
        """Nothing but what it was, and what is said of it."""
        sizes = "" if self.is_short else ", ".join(filter(None, (size_of(self.text), self._media)))
        return self._with(self.header(self._size(sizes), why), body)

    def as_cut(self, outline: Outline, chars: int, count: Count) -> Message | None:
        """Head, skeleton and tail: what a reader wants of a text that is much too long."""
        if self.is_within(chars):
            return self._without_media(count)
        return self._shorter(excerpt(self.text, outline, chars), outline.size, count)

    def _without_media(self, count: Count) -> Message | None:
        """Its text, with names in the place of pictures and files; None if it has none."""
        return self._shorter(self.text, self._media, count) if not self.is_short and self._media else None

    def within(self, tokens: int, outline: Outline, count: Count) -> Message | None:
        """As much of the message as takes at most so many tokens; at least its name, if that is shorter."""
        cut = self.as_cut if tokens > SKELETON_TOKENS else self.as_skeleton
        best: Message | None = None
        chars = int(len(self.shown.text) * (tokens - HEADER) / max(1, self.line.tokens))
        while chars >= NAME_CHARS and best is None:
            shown = cut(outline, chars, count)
            used = count(shown) if shown else self.line.tokens
            if shown and used <= tokens:
                best = shown
            chars = int(CLOSE * chars * (tokens - HEADER) / max(1, used - HEADER))
        return best or self.if_shorter(self.as_name("0 shown"), count)

    def as_summary(self, summary: str, chars: int, count: Count) -> Message | None:
        """What a model wrote about it, and as many of its exact values as there is room for."""
        summary = clip(summary, chars)
        known = vocabulary(summary)
        rest = self.outline(lambda word: -9.0 if word in known else 0.0)
        values = [piece for piece in rest.pieces if not piece.is_line and piece.worth >= PLAIN]
        left = chars - len(summary) - 1
        body = f"{summary}\n{Outline(tuple(values)).cut(left)}".rstrip() if left > SHORTEST else summary
        return self._shorter(body, rest.size, count, SUMMARIZED)

    def header(self, size: str, shown: str) -> str:
        handle = f"#{self.place} " if self.handles else ""
        names = self.line.tools or (self.line.role,)
        return f"[refold {handle}{', '.join(map(_plain, names))}: {size}; {shown}]"

    def _shorter(self, skeleton: str, size: str, count: Count, what: str = "shown") -> Message | None:
        whole = self._size(size)
        made = self._with(self.header(whole, f"0,000 {what}"), skeleton)
        shown = count(self._with(self.header(whole, f"{count(made):,} {what}"), skeleton))
        return self.if_shorter(self._with(self.header(whole, f"{shown:,} {what}"), skeleton), count)

    def if_shorter(self, made: Message, count: Count) -> Message | None:
        """What may stand for the message, if it saves enough to be worth a change."""
        return made if count(made) <= (1 - LEAST_SAVED) * self.line.tokens else None

    @property
    def _media(self) -> str:
        """What it has besides text: it is named, not shown."""
        outputs = [result.output for result in self.message.results if isinstance(result.output, tuple)]
        kinds = [part.kind for part in chain(self.message.parts, *outputs) if isinstance(part, Media)]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    def _size(self, items: str) -> str:
        """Of the original, also where this is a short form of it already."""
        known = _HEADER.match(self.shown.text) if self.is_short else None
        return known["size"] if known else f"{self.line.tokens:,} tokens" + (f", {items}" if items else "")

    def _with(self, header: str, body: str) -> Message:
        text = f"{header}\n{quoted(body)}" if body else header
        result = next(iter(self.shown.results), None)
        tool = self.line.tools[0] if self.line.tools else None
        part: Part = Text(text) if result is None else ToolResult(result.call_id, text, tool, result.is_error)
        others = self.shown.calls  # they keep their results
        return Message(self.shown.role, (part, *others), name=self.shown.name)


def _plain(name: str) -> str:
    """A tool's name as it can stand in a header."""
    return re.sub(r"[\[\]#:;\n]+", "_", name)[:64] or "tool"
