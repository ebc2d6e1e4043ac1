"""Prompts for summaries of conversations, in pieces that fit into the summarizer's window."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from refold.config.prompts import Template
from refold.core.event import Said
from refold.core.lazy import regex
from refold.core.message import CompactionMarker, Message
from refold.core.view import Item, View
from refold.policies.outline import Outline, excerpt, outline
from refold.policies.sections import body
from refold.policies.summarize import SummaryPart
from refold.policies.text import clip, demands
from refold.stores.record import Record
from refold.summaries.summarizer import Ask

USABLE_WINDOW = 0.92
"""Of the summarizer's window: leaves room for errors in counting."""
MIN_MESSAGE_TOKENS = 160
"""Tokens of messages that a request must have room for."""
REQUEST_OVERHEAD_TOKENS = 40
MESSAGE_CHARS = (6_000, 3_000, 1_500, 800, 400)
"""Characters kept of each message: the most that need at most `FEW_REQUESTS`."""
WINDOW_PARTS = (4, 10)
"""The answer takes at most 1/4 of the window, or 1/10 if there would be many requests."""
FEW_REQUESTS = 3
LIST_CHARS = 2_000
"""Characters of the task, of all requests and of all rules, where they are listed."""
LIST_ITEM_CHARS = 160
_TAGS = regex(r"<(\s*/?\s*(?:messages|previous|task|requests|rules|focus|content|record)\b)", re.IGNORECASE)
_LISTED_PLACE = regex(r"^- #(\d+) \(", re.MULTILINE)


class Original(NamedTuple):
    """A message as it was recorded, or as it was corrected."""

    at: int
    message: Message
    tools: tuple[str, ...] = ()


class WordedMessage(NamedTuple):
    original: Original
    text: str


class PromptContent(NamedTuple):
    """A prompt with ranks instead of places, and the places in order: a cache key across conversations."""

    prompt: str
    places: tuple[int, ...]


class SummaryInput(msgspec.Struct, frozen=True):
    """What one summary is written from."""

    part: SummaryPart
    originals: tuple[Original, ...]
    previous: str | None
    """The summaries that it replaces, joined."""
    summaries: int = 0
    """How many `previous` is made of."""
    task: str = ""
    round: int = 1
    focus: str | None = None

    @property
    def is_new(self) -> bool:
        """True if there is something that no summary covers yet."""
        return bool(self.originals) or self.summaries > 1

    @property
    def messages(self) -> list[Message]:
        return [one.message for one in self.originals]


def summary_input(part: SummaryPart, view: View, record: Record, **about: Any) -> SummaryInput | None:
    """The original messages behind a part of the view, without bare errors and retry messages.

    None if the view does not have that part.
    """
    old = part.selection(view)
    if old is None:
        return None
    hidden = {(line.at, line.n) for line in old.hidden}
    originals = list[Original]()
    summaries = list[str]()
    for item in old.items:
        replaced = [line for line in item.lines if (line.at, line.n) in hidden and not line.recalled]
        for line in replaced:
            if line.summary:
                message = item.words(line)
                summaries.append(message.summaries if message.markers else body(message.text))
        if all(line.summary for line in replaced):
            continue
        for original in _originals(item, view, record):
            if original.message.summaries:
                summaries.append(original.message.summaries)
            if not _is_only_error(original.message):
                originals.append(_without_markers(original))
    previous = "\n".join(filter(None, summaries)) or None
    return SummaryInput(part, tuple(originals), previous, len(summaries), task_of(view), **about)


def task_of(view: View) -> str:
    """The text of the first user message that is shown."""
    for item in view.items:
        for line in item.lines:
            if line.asks:
                return item.words(line).text
    return ""


def _originals(item: Item, view: View, record: Record) -> Iterator[Original]:
    is_withheld = any(item.span.start in span for span in view.withheld)
    is_reduced = item.edit is not None and len(item.span) == 1 and not item.is_corrected
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


def _without_markers(original: Original) -> Original:
    """Without summaries in the message: those are part of `previous`."""
    if not original.message.markers:
        return original
    rest = tuple(part for part in original.message.parts if not isinstance(part, CompactionMarker))
    return original._replace(message=msgspec.structs.replace(original.message, parts=rest))


def _is_only_error(message: Message) -> bool:
    return (
        message.role == "assistant" and message.error is not None and not message.text and not message.calls
    )


class PromptSeries(msgspec.Struct, frozen=True):
    """The prompts for one summary; each continues the summary that the one before it produced."""

    summary_input: SummaryInput
    system: str
    template: Template
    profile: str
    max_tokens: int
    pieces: tuple[tuple[WordedMessage, ...], ...]
    previous_tokens: int
    """Room for the previous summary."""
    list_chars: int
    count: Callable[[str], int]

    def ask(self, n: int, previous: str | None) -> tuple[Ask, PromptContent]:
        """The nth request, after the summary of those before it."""
        piece = self.pieces[n]
        round = self.summary_input.round
        before = first_lines(previous, self.previous_tokens, self.count)
        prompt = self._prompt(piece, before, round)
        messages = tuple(worded.original.message for worded in piece)
        ask = Ask("conversation", prompt, self.system, messages, before, round, self.max_tokens, self.profile)
        listed = map(int, _LISTED_PLACE.findall(before or ""))
        places = sorted({*(worded.original.at for worded in piece), *listed})
        ranks = {at: rank for rank, at in enumerate(places)}
        ranked = [_at_place(worded, ranks[worded.original.at]) for worded in piece]
        if before:
            before = _LISTED_PLACE.sub(lambda found: f"- #{ranks[int(found[1])]} (", before)
        return ask, PromptContent(self._prompt(ranked, before, 0), tuple(places))

    def _prompt(self, piece: Sequence[WordedMessage], previous: str | None, round: int) -> str:
        values = _values(
            self.summary_input,
            [worded.original for worded in piece],
            previous,
            round,
            self.max_tokens,
            self.list_chars,
        )
        return self.template.render(**values, messages="\n\n".join(worded.text for worded in piece))


def plan_prompts(
    summary_input: SummaryInput,
    system: str,
    template: Template,
    profile: str,
    *,
    window: int,
    max_tokens: int,
    count: Callable[[str], int],
) -> PromptSeries | None:
    """Prompts that fit into the window with their answers; None if it is too small for any."""
    originals = summary_input.originals
    list_chars = min(LIST_CHARS, window // 8)
    values = _values(summary_input, originals, None, summary_input.round, max_tokens, list_chars)
    frame = template.render(**values, messages="")
    usable = int(window * USABLE_WINDOW) - REQUEST_OVERHEAD_TOKENS - count(system) - count(frame)
    previous_size = count(summary_input.previous or "")
    series: PromptSeries | None = None
    for answer in dict.fromkeys(min(max_tokens, window // part) for part in WINDOW_PARTS):
        previous_tokens = min((usable - answer) // 2, max(answer, previous_size))
        room = usable - answer - previous_tokens
        room_if_single = usable - answer - min(previous_tokens, previous_size)
        if room < MIN_MESSAGE_TOKENS:
            continue
        for chars in MESSAGE_CHARS:
            pieces = tuple(_packed(originals, room_if_single, chars, count)) or ((),)
            if len(pieces) > 1:  # each carries the summary of those before it
                pieces = tuple(_packed(originals, room, chars, count))
            series = PromptSeries(
                summary_input, system, template, profile, answer, pieces, previous_tokens, list_chars, count
            )
            if len(pieces) <= FEW_REQUESTS:
                return series
    return series


def _packed(
    originals: Iterable[Original], room: int, chars: int, count: Callable[[str], int]
) -> Iterator[tuple[WordedMessage, ...]]:
    piece = list[WordedMessage]()
    used = 0
    for original in originals:
        text = _worded(original, chars)
        shorter = chars
        while count(text) + 2 > room:
            shorter //= 2
            text = clip(_worded(original, shorter), 2 * shorter + 1)
        tokens = count(text) + 2
        if piece and used + tokens > room:
            yield tuple(piece)
            piece = []
            used = 0
        piece.append(WordedMessage(original, text))
        used += tokens
    if piece:
        yield tuple(piece)


def _at_place(worded: WordedMessage, at: int) -> WordedMessage:
    text = f"#{at}{worded.text.removeprefix(f'#{worded.original.at}')}"
    return WordedMessage(worded.original._replace(at=at), text)


def _values(
    summary_input: SummaryInput,
    piece: Sequence[Original],
    previous: str | None,
    round: int,
    max_tokens: int,
    list_chars: int,
) -> dict[str, Any]:
    requests = list[str]()
    rules = list[str]()
    for original in piece:
        message = original.message
        if message.role == "user" and not original.tools and message.has_words:
            requests.append(f"#{original.at} {clip(' '.join(message.text.split()), LIST_ITEM_CHARS)}")
            rules += [f"- {clip(rule, LIST_ITEM_CHARS)}" for rule in demands(message.text)]
    return {
        "task": escape_tags(clip(summary_input.task, list_chars)),
        "previous": escape_tags(previous or ""),
        "round": str(round),
        "max_tokens": max_tokens,
        "requests": _last_lines(requests, list_chars),
        "rules": _last_lines(rules, list_chars),
        "focus": escape_tags(summary_input.focus or ""),
    }


def _last_lines(lines: Sequence[str], chars: int) -> str:
    sizes = accumulate(len(line) + 1 for line in reversed(lines))
    many = sum(size <= chars for size in sizes)
    return escape_tags("\n".join(lines[len(lines) - many :]))


def _worded(original: Original, chars: int) -> str:
    """A message with its place and role; of a long text, the head, the skeleton and the tail."""
    message = original.message
    tools = f" {', '.join(original.tools)}" if message.role == "tool" and original.tools else ""
    failed = " failed" if any(result.is_error for result in message.results) else ""
    parts = [f"#{original.at} {message.role}{tools}{failed}:"]
    if message.text:
        parts.append(shortened(message.text, chars))
    parts += [f"→ {call.tool} {shortened(call.input, chars // 2)}" for call in message.calls]
    return escape_tags("\n".join(parts))


def shortened(text: str, chars: int) -> str:
    return text if len(text) <= chars else clip(excerpt(text, _outlined(text), chars), 2 * chars)


@lru_cache(maxsize=16)
def _outlined(text: str) -> Outline:
    """Cached for a few texts, since several sizes of one are tried in a row."""
    return outline(text)


def escape_tags(text: str) -> str:
    """Quoted text cannot close the section of the prompt that it is in."""
    return _TAGS.sub(r"‹\1", text)


def first_lines(text: str | None, tokens: int, count: Callable[[str], int]) -> str | None:
    """The first lines that fit: a summary begins with what matters most."""
    if not text or count(text) <= tokens:
        return text or None
    lines = text.split("\n")
    sizes = accumulate(count(line) + 1 for line in lines)
    many = sum(size <= tokens for size in sizes)
    return "\n".join(lines[:many]) or None
