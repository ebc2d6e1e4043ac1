"""What was hidden, read again: a message as it was said, or all that an edit stands for."""

from collections.abc import Iterator

from refold.core.errors import CannotExpandError, NotFoundError
from refold.core.event import Replaced, Said, Span
from refold.core.message import Media, Message, Opaque, Part, Text, ToolCall, ToolResult
from refold.policies.reduced import quoted
from refold.record import Record

GIST = 80
"""Characters of a message in a list of many."""


def expand(record: Record, at: int) -> str:
    """The whole text behind a place.

    Raises:
        CannotExpandError: there is no message and no edit there.
    """
    try:
        event = record.event(at)
    except NotFoundError as error:
        raise CannotExpandError(f"#{at}: there is no such place in this conversation") from error
    match event:
        case Said(message=message):
            return quoted(written(message))
        case Replaced(span=span):
            return quoted(_all(record, span))
        case _:
            what = type(event).__name__.lower()
            raise CannotExpandError(f"#{at} is no message and no summary, but something {what}")


def _all(record: Record, span: Span) -> str:
    said = [event for event in record.events(span.start, span.end) if isinstance(event, Said)]
    listed = [f"#{one.at} {_who(one)}, {one.line.tokens:,} tokens: {_gist(one.message)}" for one in said]
    return "\n\n".join(
        ["\n".join(listed), *(f"#{one.at} {_who(one)}:\n{written(one.message)}" for one in said)]
    )


def _who(said: Said) -> str:
    tools = ", ".join(said.line.tools)
    return f"{said.line.role} {tools}" if tools and said.line.role == "tool" else said.line.role


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
