"""Which call a result answers: calls that came with one id in one reply are told apart by their order.

>>> apart(["a", "b", "a"]) == ("a", "b", f"a{AGAIN}1")
True
"""

from collections.abc import Iterable, Sequence

import msgspec

from refold.core.event import Line
from refold.core.message import Message, Part, ToolCall, ToolResult

AGAIN = "\u241e"
"""Between the id that a call came with and its number: nobody has it in an id of their own."""


def apart(ids: Sequence[str]) -> tuple[str, ...]:
    """The same ids, each of them once: one that was there before gets a number."""
    if len({*ids}) == len(ids):
        return tuple(ids)
    taken: set[str] = set()
    own: list[str] = []
    for id in ids:
        new, n = id, 0
        while new in taken or (n and new in ids):
            n += 1
            new = f"{id}{AGAIN}{n}"
        taken.add(new)
        own.append(new)
    return tuple(own)


def first_of(id: str, waiting: Iterable[str]) -> str:
    """The first of the calls that came with this id; the id itself where none did."""
    own = (other for other in waiting if original_id(other) == id)
    return min(own, key=lambda other: (len(other), other), default=id)


def original_id(id: str) -> str:
    return id.partition(AGAIN)[0]


def is_shared(id: str, ids: Iterable[str]) -> bool:
    """Another of these calls came with the same id."""
    return any(other != id and original_id(other) == original_id(id) for other in ids)


def has_renamed_ids(line: Line) -> bool:
    """Its ids are not those that it came with."""
    return any(AGAIN in id for id in (*line.calls, line.answers or ""))


def paired(message: Message, line: Line) -> Message:
    """A message as it came, with the ids by which its line tells calls apart."""
    if not has_renamed_ids(line):
        return message
    calls = iter(line.calls)

    def own(part: Part) -> Part:
        match part:
            case ToolCall(call_id=id):
                return _named(part, next(calls, id))
            case ToolResult():
                return _named(part, line.answers or "")
        return part

    return msgspec.structs.replace(message, parts=tuple(map(own, message.parts)))


def as_came(message: Message) -> Message:
    """The same with the ids that its sender gave."""
    parts = tuple(
        _named(part, original_id(part.call_id)) if isinstance(part, ToolCall | ToolResult) else part
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts) if parts != message.parts else message


def _named(part: ToolCall | ToolResult, id: str) -> ToolCall | ToolResult:
    is_it = original_id(part.call_id) == original_id(id)
    return msgspec.structs.replace(part, call_id=id) if is_it and part.call_id != id else part
