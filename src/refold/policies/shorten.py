"""Shortened messages: a header that names the message, with its handle, and a part of the text.

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
from refold.policies.outline import SHORTEST, Bonus, Outline, excerpt, no_bonus, outline, size_of
from refold.policies.text import PLAIN, clip, vocabulary

HEADER_TOKENS = 28
MIN_SAVED = 0.05
"""The share of its tokens that shortening a message must save."""
NAME_CHARS = 24
"""If fewer characters fit, only the header is shown."""
SKELETON_TOKENS = 400
"""With more room than this, head and tail are shown besides the skeleton."""
RETRY_FACTOR = 0.98
"""A message that was still too long is tried again slightly shorter than it seems to need."""
SUMMARIZED = "shown, summarized"
"""How the header ends if a model wrote what follows."""
ERROR_CHARS = 2_000
"""An error is shown in full up to so many characters."""

_BRACKET = regex(r"\[refold [^\]\n]*")
_HANDLE = regex(r"(?<!#)#(?=\d)")
_HEADER = regex(r"\[refold (?:#\d+ )?(?P<what>[^\n]*?): (?P<size>[^;\n]*)(?:; [^\]\n]*)?\]\n?")


def quoted(text: str) -> str:
    """Text in which every handle is doubled, so that it opens nothing."""
    return _BRACKET.sub(lambda found: _HANDLE.sub("##", found.group()), text)


def _body(shortened: Message) -> str:
    """The text after the header."""
    header = _HEADER.match(shortened.text)
    return shortened.text[header.end() :] if header else shortened.text


class Reduction(msgspec.Struct, frozen=True, dict=True):
    """A message that can be shortened in place."""

    line: Line
    shown: Message
    """As it is shown now."""
    place: int
    """Where its original stands."""
    handles: bool = True
    is_short: bool = False
    """It is shown shortened already."""
    source: Item | None = None
    """Where to read the original, if it is shortened already and may be shortened again from that."""

    @classmethod
    def of(cls, item: Item, view: View) -> "Reduction | None":
        """The message that an item shows; None if it cannot be shortened.

        A shortened message is shortened again from its original, unless that is withheld or a model wrote
        the short form.
        """
        if not is_reducible(item) or item.lines[0].role == "system":
            return None
        line, place = item.lines[0], item.span.start
        shown = item.words(line)
        if shown.is_sealed:
            return None
        is_withheld = any(place in span for span in view.withheld)
        is_by_model = shown.text.partition("\n")[0].endswith(f" {SUMMARIZED}]")
        is_original_better = item.is_shortened and not is_withheld and not is_by_model
        source = item if is_original_better else None
        return cls(line, shown, place, view.handles and not is_withheld, item.is_shortened, source)

    @cached_property
    def message(self) -> Message:
        """The message to shorten: the original, if it can be used."""
        return self.shown if self.source is None else self.source.original

    @property
    def is_error(self) -> bool:
        return any(result.is_error for result in self.shown.results)

    @property
    def text(self) -> str:
        is_body = self.is_short and self.source is None
        return _body(self.shown) if is_body else self.message.text

    def is_within(self, chars: int) -> bool:
        """True if at most so many characters are shown now, besides the mark of a cut."""
        return len(_body(self.shown)) <= chars + 1 if self.is_short else len(self.text) <= chars

    def outline(self, bonus: Bonus = no_bonus) -> Outline:
        return outline(self.text, bonus)

    def as_skeleton(self, outline: Outline, chars: int, count: Count) -> Message | None:
        """Shorter than it is now, or None."""
        chars = max(chars, ERROR_CHARS) if self.is_error else chars
        if not self.is_within(chars):
            return self._shorter(outline.cut(chars), outline.size, count)
        return self._without_media(count)

    def as_head(self, chars: int, count: Count) -> Message | None:
        """The first characters; None if the text is short enough."""
        text = self.text
        if self.is_within(chars):
            return self._without_media(count)
        head = f"first {chars:,} shown" if chars else "none shown"
        size = ", ".join(filter(None, (f"{len(text):,} characters", size_of(text))))
        return self.if_shorter(self._with(self.header(size, head), clip(quoted(text), chars + 1)), count)

    def as_name(self, why: str, body: str = "") -> Message:
        """Only the header, with `body` after it."""
        sizes = "" if self.is_short else ", ".join(filter(None, (size_of(self.text), self._media)))
        return self._with(self.header(self._size(sizes), why), body)

    def as_cut(self, outline: Outline, chars: int, count: Count) -> Message | None:
        """Head, skeleton and tail; None if that is not shorter."""
        if self.is_within(chars):
            return self._without_media(count)
        return self._shorter(excerpt(self.text, outline, chars), outline.size, count)

    def _without_media(self, count: Count) -> Message | None:
        """The text, with pictures and files named in the header; None if there are none."""
        return self._shorter(self.text, self._media, count) if not self.is_short and self._media else None

    def within(self, tokens: int, outline: Outline, count: Count) -> Message | None:
        """As much as fits into so many tokens; only the header, if nothing else fits."""
        cut = self.as_cut if tokens > SKELETON_TOKENS else self.as_skeleton
        best: Message | None = None
        chars = int(len(self.shown.text) * (tokens - HEADER_TOKENS) / max(1, self.line.tokens))
        while chars >= NAME_CHARS and best is None:
            shown = cut(outline, chars, count)
            used = count(shown) if shown else self.line.tokens
            if shown and used <= tokens:
                best = shown
            chars = int(RETRY_FACTOR * chars * (tokens - HEADER_TOKENS) / max(1, used - HEADER_TOKENS))
        return best or self.if_shorter(self.as_name("0 shown"), count)

    def as_summary(self, summary: str, chars: int, count: Count) -> Message | None:
        """What a model wrote about it, and as many of its exact values as there is room for."""
        summary = clip(summary, chars)
        known = vocabulary(summary)
        rest = self.outline(lambda word: -9.0 if word in known else 0.0)
        values = [piece for piece in rest.pieces if not piece.is_line and piece.score >= PLAIN]
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
        """The given form if it saves enough; None otherwise."""
        return made if count(made) <= (1 - MIN_SAVED) * self.line.tokens else None

    @property
    def _media(self) -> str:
        """Its pictures, files and sounds, such as `2 image`."""
        outputs = [result.output for result in self.message.results if isinstance(result.output, tuple)]
        kinds = [part.kind for part in chain(self.message.parts, *outputs) if isinstance(part, Media)]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    def _size(self, items: str) -> str:
        """The size of the original."""
        known = _HEADER.match(self.shown.text) if self.is_short else None
        return known["size"] if known else f"{self.line.tokens:,} tokens" + (f", {items}" if items else "")

    def _with(self, header: str, body: str) -> Message:
        text = f"{header}\n{quoted(body)}" if body else header
        result = next(iter(self.shown.results), None)
        tool = self.line.tools[0] if self.line.tools else None
        part: Part = Text(text) if result is None else ToolResult(result.call_id, text, tool, result.is_error)
        others = self.shown.calls  # calls stay with their results
        return Message(self.shown.role, (part, *others), name=self.shown.name)


def _plain(name: str) -> str:
    """A tool's name without characters that have a meaning in a header."""
    return re.sub(r"[\[\]#:;\n]+", "_", name)[:64] or "tool"
