"""A message on its way into the record: what it becomes depends on what was said before it."""

from collections.abc import Iterable

import msgspec

from refold.core.event import Event, Expiry, Measured, Said
from refold.core.live import State
from refold.core.message import Kind, Message
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


def split(draft: Draft) -> list[Draft]:
    """One tool result per event; the parts derive their ids from the whole."""
    message = draft.message
    results = message.results
    if len(results) < 2:
        return [draft]
    others = tuple(part for part in message.parts if part not in results)
    shares = ([others] if others else []) + [(result,) for result in results]
    return [
        msgspec.structs.replace(draft, message=_part_of(message, n, parts), raw=None, dialect=None)
        for n, parts in enumerate(shares)
    ]


def _part_of(message: Message, n: int, parts: tuple[object, ...]) -> Message:
    id = message.id if message.id is None or n == 0 else f"{message.id}/{n}"
    return Message(message.role, parts, id, message.meta, message.name)  # type: ignore[arg-type]


def number(drafts: Iterable[Draft], state: State, view: str, estimate: int, time: float) -> list[Event]:
    """The events for messages that are said after `state`, with their places, turns and steps."""
    at, index, turn, step, total = state.next, state.index, state.turn, state.step, state.total
    calls = {id: tool for id, (_, tool) in state.open.items()}
    events: list[Event] = []
    for draft in drafts:
        message = draft.message
        turn += message.role == "user"
        step += message.role == "assistant"
        total += draft.tokens
        line = line_of(message, at, draft.tokens, turn, step)
        known = calls.pop(line.answers, "") if line.answers is not None else ""
        tools = draft.tools or line.tools or ((known,) if known else ())
        line = msgspec.structs.replace(line, tools=tools)
        calls.update(zip(line.calls, line.tools, strict=False))
        rest = (draft.dialect, draft.raw, draft.tags, draft.kind, draft.expiry)
        events.append(Said(line, message, index, total, time, *rest))
        at, index = at + 1, index + 1
        if message.usage is not None:
            events.append(Measured(at, view, line.at, message.usage, estimate, message.model, time))
            at += 1
    return events
