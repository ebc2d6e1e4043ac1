"""What was hidden, read again: a message as it was said, or all that an edit stands for, or a part of it."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from refold.core.errors import CannotExpandError, NotFoundError
from refold.core.event import Line, Replaced, Said
from refold.core.message import Media, Message, Opaque, Part, Text, ToolCall, ToolResult
from refold.core.slices import Cut, Slice, around, cut, matches
from refold.matching import find
from refold.policies.reduced import quoted
from refold.record import Record

GIST = 80
"""Characters of a message in a list of many."""


class Source(NamedTuple):
    """What stands behind a place: one message, or those that a summary stands for."""

    at: int
    said: Sequence[Said]
    is_one: bool
    is_whole: bool = True
    """Nothing of it was left unread."""

    @property
    def name(self) -> str:
        """Whose words they are."""
        return _who(self.said[0].line) if self.is_one else f"{len(self.said):,} messages"

    @property
    def text(self) -> str:
        if self.is_one:
            return written(self.said[0].message)
        listed = [
            f"#{one.at} {_who(one.line)}, {one.line.tokens:,} tokens: {_gist(one.message)}"
            for one in self.said
        ]
        texts = (f"#{one.at} {_who(one.line)}:\n{written(one.message)}" for one in self.said)
        return "\n\n".join(["\n".join(listed), *texts])

    def cut(self, part: Slice) -> Cut:
        """
        Raises:
            CannotExpandError: it has no such part.
        """
        try:
            if part.way == "match" and not self.is_one:
                return self._matching(part.pattern)
            return cut(self.text, part, find)
        except CannotExpandError as error:
            raise CannotExpandError(f"#{self.at}: {error}") from error

    def _matching(self, pattern: str) -> Cut:
        """What matches, under the place that it comes from."""
        texts = [written(one.message) for one in self.said]
        starts = [0, *accumulate(len(text) + 1 for text in texts)]
        hits = dict[int, list[tuple[int, int]]]()
        for start, end in matches("\n".join(texts), pattern, find):
            n = bisect_right(starts, start) - 1
            hits.setdefault(n, []).append((start - starts[n], min(end - starts[n], len(texts[n]))))
        found = list[str]()
        for n, own in hits.items():
            one = around(texts[n], own)
            found.append(f"#{self.said[n].at} {_who(self.said[n].line)}, {one.label}:\n{one.shown}")
        text = "\n\n".join(found)
        return Cut(text, ((0, len(text)),), f"{len(hits):,} of {len(self.said):,} messages match")


def source(record: Record, at: int, most: int | None = None) -> Source:
    """What stands behind a place; of a summary, no more than the first `most` of its messages are read.

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
            return Source(at, (event,), is_one=True)
        case Replaced(span=span):
            said = (one for one in record.events(span.start, span.end) if isinstance(one, Said))
            found = list(said if most is None else islice(said, most + 1))
            is_whole = most is None or len(found) <= most
            return Source(at, found[:most], len(found) == 1 and len(span) == 1, is_whole)
        case _:
            what = type(event).__name__.lower()
            raise CannotExpandError(f"#{at} is no message and no summary, but something {what}")


def expand(record: Record, at: int, part: Slice) -> str:
    """The text behind a place, or a part of it; a handle that somebody wrote into it is doubled.

    Raises:
        CannotExpandError: there is no message and no edit there, or no such part.
    """
    return quoted(source(record, at).cut(part).shown)


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
        case Opaque(value=value):
            yield f"[{value.get('type', 'part') if isinstance(value, dict) else 'part'}]"
        case _:
            return
