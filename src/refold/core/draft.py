"""A message on its way into the record: what it becomes depends on what was said before it."""

from collections.abc import Iterable, Mapping

import msgspec

from refold.core.event import Event, Expiry, Line, Measured, Piece, Said
from refold.core.live import State
from refold.core.message import Kind, Message, ToolResult, Usage
from refold.core.pairing import first_open_call, unique_call_ids, with_unique_ids
from refold.core.plan import line_of


class Draft(msgspec.Struct, frozen=True):
    """A message and all that is known of it before it has a place."""

    message: Message
    tokens: int
    dialect: str | None = None
    raw: bytes | None = None
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    expiry: Expiry | None = None
    tools: tuple[str, ...] = ()
    """Names of the tools behind it, where the message itself does not say."""
    piece: Piece | None = None
    before: int | None = None
    """How many parts of the same message come before it, where one was taken apart."""
    apart: bool = False
    """System text that stands apart from the messages."""
    time: float | None = None
    """When it was said, where that was before it came here."""


PART = "\u241f"
"""Between the id of a message and the number of its part: nobody has it in an id of their own."""


def split(message: Message) -> list[Message]:
    """One tool result per message, with the tool's role; the parts derive their ids from the whole.

    What a user says beside results comes after them, what an assistant says comes before.
    """
    results = [Message("tool", (result,), meta=message.meta) for result in message.results]
    others = tuple(part for part in message.parts if not isinstance(part, ToolResult))
    if not results or (message.role == "tool" and len(results) == 1):
        return [message]
    rest = [msgspec.structs.replace(message, parts=others)] if others else []
    parts = [*rest, *results] if message.role == "assistant" else [*results, *rest]
    return [msgspec.structs.replace(part, id=part_id(message.id, n)) for n, part in enumerate(parts)]


def part_id(id: str | None, n: int) -> str | None:
    return id and (f"{id}{PART}{n}" if n else id)


class LastRequest(msgspec.Struct, frozen=True):
    """The last request that was made of a view, which a reply with its usage measures."""

    view: str
    counted: int = 0
    """Its tokens, not corrected."""
    model: str | None = None
    prefix: str | None = None
    """System text and tools, as a digest, where the model's thinking is bound to them."""
    made: int = 0
    """The first place that was free when it was made."""


def number(drafts: Iterable[Draft], state: State, request: LastRequest, time: float) -> list[Event]:
    """The events for messages that are said after `state`, with their places, turns and steps."""
    at, index, turn, step, total = state.next, state.index, state.turn, state.step, state.total
    speaker = state.speaker
    waiting = _Waiting(state.open)
    events: list[Event] = []
    for draft in drafts:
        message = draft.message
        retry = message.role == "user" and draft.kind == "retry-context"
        goes_on = draft.dialect == "openai-responses" and speaker == "assistant"  # item by item
        step += message.role == "assistant" and not goes_on
        speaker = message.role
        total += draft.tokens
        line = line_of(message, at, draft.tokens, turn, step)
        calls, (answers, known) = unique_call_ids(line.calls), waiting.answered(line.answers)
        tools = draft.tools or line.tools or ((known,) if known else ())
        whole = None if draft.before is None else at - draft.before
        known_too = {"apart": draft.apart, "whole": whole, "expiry": draft.expiry, "retry": retry}
        line = msgspec.structs.replace(line, calls=calls, answers=answers, tools=tools, **known_too)
        if line.asks:
            turn += 1
            line = msgspec.structs.replace(line, turn=turn)
        waiting.add(line)
        message = with_unique_ids(message, line)
        rest = (draft.dialect, draft.raw, draft.tags, draft.kind, draft.piece)
        said_at = time if draft.time is None else draft.time
        events.append(Said(line, message, index, total, said_at, *rest))
        at, index = at + 1, index + 1
        renewed = request.prefix not in (None, state.prefix) and message.role == "assistant"
        if message.usage is not None or renewed:
            usage, model = message.usage or Usage(0), message.model or request.model
            measured = (usage, request.counted, model, time, request.prefix, request.made)
            events.append(Measured(at, request.view, line.at, *measured))
            request = msgspec.structs.replace(request, prefix=None, counted=0)  # each is measured once
            at += 1
    return events


class _Waiting:
    """Calls that have no result yet, while more is said."""

    def __init__(self, open: Mapping[str, tuple[int, str]]) -> None:
        self._open, self._made, self._answered = open, dict[str, str](), set[str]()

    def add(self, line: Line) -> None:
        names = (*line.tools, *("" for _ in line.calls))
        self._made.update(zip(line.calls, names, strict=False))

    def answered(self, id: str | None) -> tuple[str | None, str]:
        """The call that a result with this id answers, and its tool."""
        if id is None:
            return None, ""
        if not self._waits(id):
            id = first_open_call(id, filter(self._waits, (*self._made, *self._open)))
        self._answered.add(id)
        return id, self._made.pop(id, "") or self._open.get(id, (0, ""))[1]

    def _waits(self, id: str) -> bool:
        return id in self._made or (id in self._open and id not in self._answered)
