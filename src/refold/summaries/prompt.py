"""What a model is asked for: the originals in words, in pieces that its window has room for."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from refold.config.prompts import Template
from refold.core.event import Said
from refold.core.lazy import regex
from refold.core.message import CompactionMarker, Message, ToolCall
from refold.core.view import Item, View
from refold.policies.extract import demands
from refold.policies.outline import Outline, clip, excerpt, outline
from refold.policies.sections import body
from refold.policies.summarize import Brief, Part
from refold.stores.record import Record
from refold.summaries.summarizer import Ask

SAFE = 0.92
"""Of the window of a summarizer: what counting gets wrong must not make a request too long."""
LEAST = 160
"""Tokens of messages that a request must have room for."""
FRAME = 40
"""Tokens that a request takes besides its texts."""
SIZES = (6_000, 3_000, 1_500, 800, 400)
"""Characters that stay of a message, the most that lead to few requests."""
ANSWER = (4, 10)
"""What part of the window an answer may take; the smaller, where there would be many requests."""
FEW = 3
"""Requests for one summary that are nothing special."""
LISTED, REQUEST = 2_000, 160
"""Characters of the task, of all requests and of all rules, where they are named apart; and of each."""
_FENCE = regex(r"<(\s*/?\s*(?:messages|previous|task|requests|rules|focus|content|record)\b)", re.IGNORECASE)

_LISTED = regex(r"^- #(\d+) \(", re.MULTILINE)


class Original(NamedTuple):
    """A message as it was said, or as somebody corrected it."""

    at: int
    message: Message
    tools: tuple[str, ...] = ()


class WordedMessage(NamedTuple):
    original: Original
    text: str
    """As the model reads it."""


class PromptContent(NamedTuple):
    """A request without the places in it, and which those are, in their order."""

    prompt: str
    places: tuple[int, ...]


class SummaryInput(msgspec.Struct, frozen=True):
    """What one summary is made of."""

    brief: Brief
    originals: tuple[Original, ...]
    previous: str | None
    """The summary that it takes the place of, made here or elsewhere; of several, one after the other."""
    summaries: int = 0
    """How many that are."""
    task: str = ""
    round: int = 1
    focus: str | None = None
    made: int = 0
    """The first place that was free then."""
    tip: str = ""
    """The digest of the record up to there."""

    @property
    def is_new(self) -> bool:
        """There is something to write that is not written yet."""
        return bool(self.originals) or self.summaries > 1

    @property
    def messages(self) -> list[Message]:
        return [one.message for one in self.originals]


def matter_of(part: Part, view: View, record: Record, **about: Any) -> SummaryInput:
    """What a part of the view was before anything was done to it; errors that say nothing are left out, and
    what only told the model to try again."""
    hidden = {(line.at, line.n) for line in part.old.hidden}
    originals, summaries = list[Original](), list[str]()
    for item in part.old.items:
        gone = [line for line in item.lines if (line.at, line.n) in hidden and not line.recalled]
        summaries += [_summary(item.words(line)) for line in gone if line.summary]
        if any(not line.summary for line in gone):
            for one in _said(item, view, record):
                summaries += [one.message.summaries] if one.message.summaries else []
                originals += [] if _is_only_error(one.message) else [_without_markers(one)]
    task = next((item.words(line).text for item in view.items for line in item.lines if line.asks), "")
    previous = "\n".join(filter(None, summaries)) or None
    return SummaryInput(part.brief, tuple(originals), previous, len(summaries), task, **about)


def _said(item: Item, view: View, record: Record) -> Iterator[Original]:
    is_withheld = any(item.span.start in span for span in view.withheld)
    is_reduced = item.edit is not None and len(item.span) == 1 and not item.is_corrected  # where it stands
    if is_reduced and not is_withheld:
        event = record.stored(item.span.start)
        if isinstance(event, Said):
            if not event.line.retry:
                yield Original(event.at, event.message, event.line.tools)
            return
    for line in item.lines:
        if not line.summary and not line.retry:
            place = item.span.start if item.is_shortened else line.place
            yield Original(place, item.words(line), line.tools)


def _summary(message: Message) -> str:
    return message.summaries if message.markers else body(message.text)


def _without_markers(one: Original) -> Original:
    """The same without a summary that stands in it: that is handed over as the previous one."""
    if not one.message.markers:
        return one
    rest = tuple(part for part in one.message.parts if not isinstance(part, CompactionMarker))
    return one._replace(message=msgspec.structs.replace(one.message, parts=rest))


def _is_only_error(message: Message) -> bool:
    return (
        message.role == "assistant" and message.error is not None and not message.text and not message.calls
    )


class PromptSeries(msgspec.Struct, frozen=True):
    """The requests for one summary: each fits, and each but the first goes on from the one before it."""

    matter: SummaryInput
    system: str
    template: Template
    profile: str
    max_tokens: int
    pieces: tuple[tuple[WordedMessage, ...], ...]
    carried: int
    """Tokens of the previous summary, at most."""
    listed: int
    """Characters of requests, and of rules, that are named apart."""
    count: Callable[[str], int]

    def ask(self, n: int, previous: str | None) -> Ask:
        """The nth request, with what was written for those before it."""
        piece = self.pieces[n]
        before = trimmed(previous, self.carried, self.count)
        messages = tuple(one.original.message for one in piece)
        rest = (before, self.matter.round, self.max_tokens, self.profile)
        return Ask("conversation", self._prompt(piece, before), self.system, messages, *rest)

    def content(self, n: int, previous: str | None) -> PromptContent:
        """The same wherever it stands: what is asked, with other numbers for the places in it."""
        piece, before = self.pieces[n], trimmed(previous, self.carried, self.count)
        places = {one.original.at for one in piece} | {int(at) for at in _LISTED.findall(before or "")}
        ranks = {at: rank for rank, at in enumerate(sorted(places))}
        moved = [_moved(one, ranks[one.original.at]) for one in piece]
        listed = before and _LISTED.sub(lambda found: f"- #{ranks[int(found[1])]} (", before)
        same = msgspec.structs.replace(self, matter=msgspec.structs.replace(self.matter, round=0))
        return PromptContent(same._prompt(moved, listed), tuple(ranks))

    def _prompt(self, piece: Sequence[WordedMessage], previous: str | None) -> str:
        originals = [one.original for one in piece]
        values = _values(self.matter, originals, previous, self.max_tokens, self.listed)
        return self.template.render(**values, messages="\n\n".join(one.text for one in piece))


def briefing(
    matter: SummaryInput,
    system: str,
    template: Template,
    profile: str,
    *,
    window: int,
    max_tokens: int,
    count: Callable[[str], int],
) -> PromptSeries | None:
    """Requests that fit the summarizer's window, answers included; None where it has no room for any."""
    listed = min(LISTED, window // 8)
    named = template.render(**_values(matter, matter.originals, None, max_tokens, listed), messages="")
    whole = int(window * SAFE) - FRAME - count(system) - count(named)
    before = count(matter.previous or "")
    made: PromptSeries | None = None
    for answer in dict.fromkeys(min(max_tokens, window // part) for part in ANSWER):
        carried = min((whole - answer) // 2, max(answer, before))
        left, alone = whole - answer - carried, whole - answer - min(carried, before)
        for chars in SIZES if left >= LEAST else ():
            pieces = tuple(_packed(matter.originals, alone, chars, count)) or ((),)
            if len(pieces) > 1:  # each carries what was written before it
                pieces = tuple(_packed(matter.originals, left, chars, count))
            made = PromptSeries(matter, system, template, profile, answer, pieces, carried, listed, count)
            if len(pieces) <= FEW:
                return made
    return made


def _packed(
    originals: Iterable[Original], room: int, chars: int, count: Callable[[str], int]
) -> Iterator[tuple[WordedMessage, ...]]:
    piece, used = list[WordedMessage](), 0
    for original in originals:
        one = _fitting(original, chars, room, count)
        tokens = count(one.text) + 2
        if piece and used + tokens > room:
            yield tuple(piece)
            piece, used = [], 0
        piece.append(one)
        used += tokens
    if piece:
        yield tuple(piece)


def _fitting(one: Original, chars: int, room: int, count: Callable[[str], int]) -> WordedMessage:
    text = _worded(one, chars)
    while count(text) + 2 > room:
        chars //= 2
        text = clip(_worded(one, chars), 2 * chars + 1)
    return WordedMessage(one, text)


def _moved(one: WordedMessage, at: int) -> WordedMessage:
    text = f"#{at}{one.text.removeprefix(f'#{one.original.at}')}"
    return WordedMessage(one.original._replace(at=at), text)


def _values(
    matter: SummaryInput, piece: Sequence[Original], previous: str | None, max_tokens: int, listed: int
) -> dict[str, Any]:
    asked = [one for one in piece if one.message.role == "user" and not one.tools and one.message.has_words]
    rules = [rule for one in asked for rule in demands(one.message.text)]
    return {
        "task": fenced(clip(matter.task, listed)),
        "previous": fenced(previous or ""),
        "round": str(matter.round),
        "max_tokens": max_tokens,
        "requests": _newest([f"#{one.at} {_flat(one.message.text)}" for one in asked], listed),
        "rules": _newest([f"- {clip(rule, REQUEST)}" for rule in rules], listed),
        "focus": fenced(matter.focus or ""),
    }


def _newest(lines: Sequence[str], chars: int) -> str:
    """As many of the last lines as fit."""
    sizes = accumulate(len(line) + 1 for line in reversed(lines))
    many = sum(size <= chars for size in sizes)
    return fenced("\n".join(lines[len(lines) - many :]))


def _flat(text: str) -> str:
    return clip(" ".join(text.split()), REQUEST)


def _worded(one: Original, chars: int) -> str:
    """A message with its place and who said it; a long text as its head, its skeleton and its tail."""
    message = one.message
    names = f" {', '.join(one.tools)}" if message.role == "tool" and one.tools else ""
    failed = " failed" if any(result.is_error for result in message.results) else ""
    parts = [f"#{one.at} {message.role}{names}{failed}:"]
    if message.text:
        parts.append(shortened(message.text, chars))
    parts += [_called(call, chars // 2) for call in message.calls]
    return fenced("\n".join(parts))


def _called(call: ToolCall, chars: int) -> str:
    return f"→ {call.tool} {shortened(call.input, chars)}"


def shortened(text: str, chars: int) -> str:
    return text if len(text) <= chars else clip(excerpt(text, _outlined(text), chars), 2 * chars)


@lru_cache(maxsize=256)
def _outlined(text: str) -> Outline:
    """It is looked at again for every size that is tried."""
    return outline(text)


def fenced(text: str) -> str:
    """Somebody else's words in a prompt: they do not end the part that they stand in."""
    return _FENCE.sub(r"‹\1", text)


def trimmed(text: str | None, tokens: int, count: Callable[[str], int]) -> str | None:
    """As many of its first lines as fit: what matters most stands at the beginning of a summary."""
    if not text or count(text) <= tokens:
        return text or None
    lines = text.split("\n")
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        if count("\n".join(lines[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    return "\n".join(lines[:low]) or None
