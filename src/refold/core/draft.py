"""Messages before they are appended: their places, turns and steps depend on those before them."""

from collections.abc import Iterable
from itertools import zip_longest

import msgspec

from refold.core.event import Event, Expiry, Measured, Piece, Said
from refold.core.live import State
from refold.core.message import Kind, Message, ToolResult, Usage
from refold.core.pairing import first_open_call, unique_call_ids, with_unique_ids
from refold.core.plan import line_of


class Draft(msgspec.Struct, frozen=True):
    """A message that has no place yet."""

    message: Message
    tokens: int
    dialect: str | None = None
    raw: bytes | None = None
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    expiry: Expiry | None = None
    tools: tuple[str, ...] = ()
    """Names of the tools that it is about, if the message does not say."""
    piece: Piece | None = None
    before: int | None = None
    """Number of pieces before it, if it is a piece of a split message."""
    apart: bool = False
    """System text that is sent apart from the messages."""
    is_item: bool = False
    """An item of a reply, which may have come with other items: they are one step."""
    time: float | None = None
    """When it was written, if that was earlier than now."""


PART = "\u241f"
"""Between the id of a split message and the number of a piece; assumed to occur in no id."""


def split(message: Message) -> list[Message]:
    """Messages of the tool role for each tool result, and one for the other parts.

    The other parts follow the results, but those of an assistant come before them.
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
    """The last request for a view, which the usage of its reply measures."""

    view: str
    counted: int = 0
    """Its counted tokens."""
    model: str | None = None
    prefix: str | None = None
    """Digest of system text and tools, if the model's thinking is bound to them."""
    made: int = 0
    """The first free place when it was made."""


def number(drafts: Iterable[Draft], state: State, request: LastRequest, time: float) -> list[Event]:
    """The events of messages appended after `state`, with their places, turns and steps."""
    at = state.next
    index = state.index
    turn = state.turn
    step = state.step
    total = state.total
    speaker = state.speaker
    open_calls = {id: tool for id, (_, tool) in state.open.items()}
    events: list[Event] = []
    for draft in drafts:
        message = draft.message
        is_reply = message.role == "assistant"
        if is_reply and not (draft.is_item and speaker == "assistant"):
            step += 1
        speaker = message.role
        total += draft.tokens
        line = line_of(message, at, draft.tokens, turn, step)
        answers = line.answers
        if answers is not None and answers not in open_calls:
            answers = first_open_call(answers, open_calls)
        called = open_calls.pop(answers, "") if answers is not None else ""
        line = msgspec.structs.replace(
            line,
            calls=unique_call_ids(line.calls),
            answers=answers,
            tools=draft.tools or line.tools or ((called,) if called else ()),
            apart=draft.apart,
            whole=None if draft.before is None else at - draft.before,
            expiry=draft.expiry,
            retry=message.role == "user" and draft.kind == "retry-context",
        )
        if line.asks:
            turn += 1
            line = msgspec.structs.replace(line, turn=turn)
        for id, tool in zip_longest(line.calls, line.tools[: len(line.calls)], fillvalue=""):
            open_calls[id] = tool
        said = Said(
            line,
            with_unique_ids(message, line),
            index,
            total,
            time if draft.time is None else draft.time,
            draft.dialect,
            draft.raw,
            draft.tags,
            draft.kind,
            draft.piece,
        )
        events.append(said)
        at += 1
        index += 1
        has_new_prefix = is_reply and request.prefix not in (None, state.prefix)
        if message.usage is not None or has_new_prefix:
            model = message.model or request.model
            usage = message.usage or Usage(0)
            measured = Measured(
                at, request.view, line.at, usage, request.counted, model, time, request.prefix, request.made
            )
            events.append(measured)
            request = msgspec.structs.replace(request, prefix=None, counted=0)  # each is measured once
            at += 1
    return events
