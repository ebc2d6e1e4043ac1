"""Events as text for server-sent events: a name, facts, and at most the beginning of a message.

Events are named as in `refold.session.notify`. Besides those there are:

restored   an original is shown in its place again
corrected  another message is shown in the place of one
recalled   memories of the store are shown beside a message
undone     an edit, a pin or an undo no longer holds
pinned     messages stay in every view from now on
named      the conversation got a title or a model
lagging    the subscriber reads too slowly and is cut off; it can resume with the id of its last event
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from refold.core import codec
from refold.core.event import Called, Event, Named, Pinned, Replaced, Said, Undone
from refold.core.message import Message
from refold.serve.redact import redacted
from refold.session.notify import NOT_SHORTENING, CompactionEvent, MessageEvent, SessionEvent, session_events
from refold.stores.store import Key

MAX_CHARS = 200
REDACTED_CHARS = 300
"""Longer than what is shown, so that a secret is recognized before it is cut."""
KINDS = dict(zip(NOT_SHORTENING, ("restored", "corrected", "recalled"), strict=True))
"""Event names of edits that shorten nothing."""
HEARTBEAT = b": still here\n\n"
LAGGING = b'event: lagging\ndata: {"advice":"reconnect with the id of the last event"}\n\n'
BEGIN = b"retry: 1000\n: watching\n\n"


def stream_frames(key: Key, event: Event, *, with_id: bool) -> bytes:
    """A stored event as text, empty if subscribers need not know of it. Its id counts the events so far."""
    frames = [_frame(kind, facts) for kind, facts in _described(key, event)]
    if frames and with_id:
        frames[-1] = b"id: %d\n" % (event.at + 1) + frames[-1]
    return b"".join(frames)


def live_frame(key: Key, event: SessionEvent) -> bytes:
    """An event that is not stored, as text."""
    return _frame(event.kind, _about(key) | _facts(event))


def is_in_stream(event: SessionEvent) -> bool:
    """True if the event is stored as well, and so read from there for the subscribers of all processes."""
    if isinstance(event, MessageEvent):
        return event.kind != "message-expanded"
    return event.kind == "compaction:failed" and not event.limit


def _described(key: Key, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and facts of a stored event."""
    about = _about(key)
    extra: dict[str, Any] = {}
    match event:
        case Said(line=line, index=index, time=time):
            extra = {"index": index, "tokens": line.tokens, "time": time}
        case Replaced(kind=kind, time=time, tokens=tokens):
            extra = {"edit": event.at, "edit_kind": kind, "view": event.view, "tokens": tokens, "time": time}
            if kind in KINDS:
                own = {"at": event.span.start, "span": event.span, "reason": event.why}
                yield KINDS[kind], _shortened(about | own | extra)
        case Undone(at=at, of=of, why=why, time=time):
            yield "undone", _shortened(about | {"at": at, "of": of, "reason": why, "time": time})
        case Pinned(at=at, lines=lines, why=why, time=time):
            places = [line.at for line in lines]
            yield "pinned", _shortened(about | {"at": at, "places": places, "reason": why, "time": time})
        case Named(at=at, title=title, model=model, time=time):
            yield "named", _shortened(about | {"at": at, "title": title, "model": model, "time": time})
        case Called(time=time):
            extra = {"time": time}
    for one in session_events(event, "", 0, 0):
        yield one.kind, about | _facts(one) | extra


def _about(key: Key) -> dict[str, Any]:
    return {"conversation": key.conversation, "owner": key.owner}


def _facts(event: SessionEvent) -> dict[str, Any]:
    facts = asdict(event)
    del facts["kind"], facts["conversation"]
    if isinstance(event, CompactionEvent):
        return _shortened(facts)
    message = facts.pop("message")
    known = {name: value for name, value in facts.items() if value or name == "at"}
    if isinstance(message, Message):
        known["text"] = message.text
    return _shortened(known)


def _shortened(facts: dict[str, Any]) -> dict[str, Any]:
    for name, value in facts.items():
        if isinstance(value, str):
            text = redacted(value[:REDACTED_CHARS])
            facts[name] = text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
    return facts


def _frame(kind: str, facts: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), codec.dumps(facts))
