"""Expansion: the text of a message as it was recorded, or of all that an edit covers, or a part of it."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from refold.core.errors import CannotExpandError, NotFoundError
from refold.core.event import Line, Measured, Pinned, Replaced, Said, Span, Undone
from refold.core.lazy import regex
from refold.core.message import CompactionMarker, Media, Message, Opaque, Part, Text, ToolCall, ToolResult
from refold.core.slices import Cut, Slice, Stretch, around, cut, matches
from refold.session.results import shortened
from refold.session.safe_regex import find
from refold.stores.record import Record

SHORT_URL_CHARS = 80
BATCH = 200
"""Messages that are searched at once."""
GENERATED_ID = regex(r"m\d{1,15}")
"""The id of a message that came without one: `m` and its place."""
WITHHELD = "it was reduced with keep_originals: false, so it cannot be expanded; a person can restore it"


class Source(NamedTuple):
    """The messages behind a place: one, or those that an edit covers. They are read as far as needed."""

    record: Record
    at: int
    span: Span
    messages: int
    """How many there are."""
    correction: Message | None = None

    @property
    def name(self) -> str:
        """The role of the message, or the number of messages."""
        return _who(next(self._said()).line) if self.is_one else f"{self.messages:,} messages"

    @property
    def is_one(self) -> bool:
        return self.messages == 1 and len(self.span) == 1

    def cut(self, part: Slice, max_lines: int = 2**53) -> Cut:
        """The part; of several messages at most so many lines, and only what they need is read.

        Raises:
            CannotExpandError: it has no such part.
        """
        try:
            if self.is_one:
                return cut(written(self.correction or next(self._said()).message), part, find)
            if part.way == "match":
                return self._matching(part.pattern)
            end = None
            if part.way in ("", "lines"):
                end = max(1, part.range[0]) + max_lines - 1
                end = min(end, part.range[1] or end)
            lines = list(islice(self._lines(), end))
            found = cut("\n".join(lines), part, find)
            if len(lines) == end:  # there may be more
                label = f"lines {found.first}-{end}"
                found = msgspec.structs.replace(found, label=label, total=None)
            return found
        except CannotExpandError as error:
            raise CannotExpandError(f"#{self.at}: {error}") from error

    def _said(self) -> Iterator[Said]:
        events = self.record.events(self.span.start, self.span.end)
        return (event for event in events if isinstance(event, Said))

    def _lines(self) -> Iterator[str]:
        """A list of the messages, each with its place, and then their texts."""
        for one in self._said():
            excerpt = shortened(self._text(one))
            yield f"#{one.at} {_who(one.line)}, {one.line.tokens:,} tokens: {excerpt}"
        for one in self._said():
            yield from ("", f"#{one.at} {_who(one.line)}:", *self._text(one).split("\n"))

    def _matching(self, pattern: str) -> Cut:
        """Lines that match, under the place of each message."""
        found = list[str]()
        units = list[Stretch]()
        start = 0
        said = self._said()
        while batch := list(islice(said, BATCH)):
            texts = [self._text(one) for one in batch]
            for one, text, hits in zip(batch, texts, matches(texts, pattern, find), strict=True):
                if hits:
                    lines = around(text, hits)
                    found.append(f"#{one.at} {_who(one.line)}, {lines.label}:\n{lines.shown}\n")
                    units.append((start, start + len(found[-1])))
                    start += len(found[-1]) + 1
        if not found:
            raise CannotExpandError(f"nothing in its {self.messages:,} messages matches {pattern!r}")
        label = f"{len(found):,} of {self.messages:,} messages match"
        return Cut("\n".join(found), "match", (0, start - 1), label, units)

    def _text(self, said: Said) -> str:
        return f"[{WITHHELD}]" if self.record.live.is_withheld(said.at) else written(said.message)


def source(record: Record, at: int | str) -> Source:
    """The messages behind a place, a message's id, or a negative number counted from the newest message.

    Raises:
        CannotExpandError: there is nothing to expand there, or the originals are withheld.
    """
    place = _place(record, at)
    try:
        event = record.event(place)
    except NotFoundError as error:
        last = record.live.state.next - 1
        raise CannotExpandError(
            f"#{place}: there is no such place; the conversation ends at #{last}"
        ) from error
    match event:
        case Said():
            found = Source(record, place, Span(place, place + 1), 1)
        case Replaced(kind="correct", span=span, shown=(Message() as message, *_)):
            return Source(record, place, span, 1, message)
        case Replaced(span=span):
            messages = record.index_from(span.end) - record.index_from(span.start)
            found = Source(record, place, span, messages)
        case Pinned(lines=(line,)):
            return source(record, line.at)
        case Measured(of=answer):
            return source(record, answer)
        case Undone(of=edit):
            return source(record, edit)
        case Pinned(lines=lines):
            pinned = ", ".join(f"#{line.at}" for line in lines)
            raise CannotExpandError(f"#{place} is not a message: it pins {pinned}; expand one of these")
        case _:
            raise CannotExpandError(f"#{place} is not a message: nothing is hidden there")
    places = (line.at for line in record.entries.lines(found.span))
    if record.live.state.withheld and all(map(record.live.is_withheld, places)):
        raise CannotExpandError(f"#{place}: {WITHHELD}")
    return found


def _place(record: Record, at: int | str) -> int:
    """Raises CannotExpandError if no message has this id, or there are not so many messages."""
    if isinstance(at, int):
        if at >= 0:
            return at
        index = record.live.state.index + at
        said = record.said_from(record.place_of(index)) if index >= 0 else None
        if said is None:
            raise CannotExpandError(f"{at}: the conversation has only {record.live.state.index:,} messages")
        return said.at
    found = record.store.find(record.key, [at]).get(at)
    if found is None and GENERATED_ID.fullmatch(at):
        found = int(at[1:])
    if found is None:
        raise CannotExpandError(f"No message of the conversation has the id {at!r}")
    return found


def _who(line: Line) -> str:
    tools = ", ".join(line.tools)
    return f"{line.role} {tools}" if tools and line.role == "tool" else line.role


def written(message: Message) -> str:
    """The text of all parts of a message, calls and results included."""
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
            short_url = url if url and len(url) < SHORT_URL_CHARS else None
            yield f"[{' '.join(filter(None, (kind, name or short_url)))}]"
        case CompactionMarker(text=text):
            yield text or "[a compaction that only its provider can read]"
        case Opaque(value=value):
            name = value.get("type", "part") if isinstance(value, dict) else "part"
            yield f"[{name}]"
        case _:
            return
