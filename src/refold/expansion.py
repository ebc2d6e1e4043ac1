"""What was hidden, read again: a message as it was said, or all that an edit stands for, or a part of it."""

from collections.abc import Iterator
from itertools import accumulate, islice

from refold.core.errors import CannotExpandError, NotFoundError
from refold.core.event import Line, Replaced, Said, Span
from refold.core.message import CompactionMarker, Media, Message, Opaque, Part, Text, ToolCall, ToolResult
from refold.core.slices import Cut, Slice, around, cut, matches
from refold.matching import find
from refold.policies.reduced import quoted
from refold.record import Record

GIST = 80
"""Characters of a message in a list of many."""
BATCH = 200
"""Messages that are looked through at a time."""


class Source:
    """What stands behind a place: one message, or those that a summary stands for, read as far as needed."""

    def __init__(
        self, record: Record, at: int, span: Span, count: int, correction: Message | None = None
    ) -> None:
        self.record, self.at, self.span, self.count, self._correction = record, at, span, count, correction
        self.is_one = count == 1 and len(span) == 1
        """It is a message, not a list of some."""

    @property
    def name(self) -> str:
        """Whose words they are."""
        return _who(next(self._said()).line) if self.is_one else f"{self.count:,} messages"

    def cut(self, part: Slice) -> Cut:
        """
        Raises:
            CannotExpandError: it has no such part.
        """
        try:
            if self.is_one:
                return cut(written(self._correction or next(self._said()).message), part, find)
            if part.way == "match":
                return self._matching(part.pattern)
            if part.way == "lines" and part.range[1] is not None:
                return self._first_lines(part)
            return cut("\n".join(self._lines()), part, find)
        except CannotExpandError as error:
            raise CannotExpandError(f"#{self.at}: {error}") from error

    def _said(self) -> Iterator[Said]:
        events = self.record.events(self.span.start, self.span.end)
        return (event for event in events if isinstance(event, Said))

    def _lines(self) -> Iterator[str]:
        """A list of what a summary stands for, each with its place, and then their texts."""
        for one in self._said():
            yield f"#{one.at} {_who(one.line)}, {one.line.tokens:,} tokens: {_gist(one.message)}"
        for one in self._said():
            yield from ("", f"#{one.at} {_who(one.line)}:", *written(one.message).split("\n"))

    def _first_lines(self, part: Slice) -> Cut:
        """No more is read than is asked for."""
        start, end = part.range
        text = "\n".join(islice(self._lines(), start - 1, end))
        if not text:
            return cut("\n".join(self._lines()), part)  # which says how many there are
        last = start + text.count("\n")
        more = f"; the first {self.count:,} are a list of what follows" if last <= self.count else ""
        return Cut(text, ((0, len(text)),), f"lines {start}-{last}{more}", start)

    def _matching(self, pattern: str) -> Cut:
        """What matches, under the place that it comes from."""
        found, said = list[str](), self._said()
        while batch := list(islice(said, BATCH)):
            texts = [written(one.message) for one in batch]
            for one, text, hits in zip(batch, texts, matches(texts, pattern, find), strict=True):
                if hits:
                    lines = around(text, hits)
                    found.append(f"#{one.at} {_who(one.line)}, {lines.label}:\n{lines.shown}\n")
        if not found:
            raise CannotExpandError(f"nothing in its {self.count:,} messages matches {pattern!r}")
        ends = [*accumulate(len(text) + 1 for text in found)]
        spans = tuple((end - len(text) - 1, end - 1) for text, end in zip(found, ends, strict=True))
        return Cut("\n".join(found), spans, f"{len(found):,} of {self.count:,} messages match")


def source(record: Record, at: int) -> Source:
    """What stands behind a place.

    Raises:
        CannotExpandError: there is no message and no edit there.
    """
    try:
        event = record.event(at)
    except NotFoundError as error:
        last = record.live.state.next - 1
        raise CannotExpandError(
            f"#{at}: there is no such place; this conversation ends at #{last}"
        ) from error
    match event:
        case Said():
            return Source(record, at, Span(at, at + 1), 1)
        case Replaced(kind="correct", span=span, shown=(Message() as message, *_)):
            return Source(record, at, span, 1, message)
        case Replaced(span=span):
            count = record.index_from(span.end) - record.index_from(span.start)
            return Source(record, at, span, count)
        case _:
            what = type(event).__name__.lower()
            raise CannotExpandError(f"#{at} is no message and no summary, but something {what}")


def text_of(found: Source, part: Slice) -> str:
    """All of it, or a part; a handle that somebody wrote into it is doubled.

    Raises:
        CannotExpandError: there is no such part.
    """
    return quoted(found.cut(part).shown)


def _who(line: Line) -> str:
    tools = ", ".join(line.tools)
    return f"{line.role} {tools}" if tools and line.role == "tool" else line.role


def _gist(message: Message) -> str:
    text = " ".join(written(message).split())
    return text if len(text) <= GIST else f"{text[: GIST - 1]}…"


def written(message: Message) -> str:
    """All that a message says, in the order it says it."""
    return "\n".join(text for part in message.parts for text in _written(part))


def _written(part: Part) -> Iterator[str]:
    match part:
        case Text(text=text) | ToolResult(output=str(text)):
            yield text
        case ToolResult(output=tuple(inner)):
            for one in inner:
                yield from _written(one)
        case ToolCall(tool=tool, input=input):
            yield f"{tool} {input}"
        case Media(kind=kind, name=name, url=url):
            yield f"[{' '.join(filter(None, (kind, name or (url if url and len(url) < GIST else None))))}]"
        case CompactionMarker(text=text):
            yield text or "[a compaction that only its provider can read]"
        case Opaque(value=value):
            yield f"[{value.get('type', 'part') if isinstance(value, dict) else 'part'}]"
        case _:
            return
