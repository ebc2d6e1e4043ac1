"""One event for those who watch: its name, its facts, and never more of a text than a glance.

What happened to messages and views is called as in `refold.session.notify`. Besides that there are:

restored   an original stands in its place again
corrected  another message stands in the place of one
recalled   what a service remembers is shown beside a message
undone     an edit, a pin or an undoing was taken back
pinned     messages that stay in every view from now on
named      the conversation was given a title, or a model
lagging    whoever reads too slowly is cut off, and comes back by the id of the last event
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from refold.core import codec
from refold.core.event import Called, Event, Named, Pinned, Replaced, Said, Undone
from refold.core.message import Message
from refold.serve.redact import redacted
from refold.session.notify import UNTOLD, CompactionEvent, Happened, MessageEvent, told
from refold.stores.store import Key

GLANCE_CHARS = 200
LOOKED_AT = 300
"""Characters of a text in which is looked for secrets before it is cut."""
KINDS = dict(zip(UNTOLD, ("restored", "corrected", "recalled"), strict=True))
"""What edits are called that make nothing shorter."""
HEARTBEAT = b": still here\n\n"
LAGGING = b'event: lagging\ndata: {"advice":"reconnect with the id of the last event"}\n\n'
BEGIN = b"retry: 1000\n: watching\n\n"


def stream_frames(key: Key, event: Event, *, with_id: bool) -> bytes:
    """An event of the stream; empty where it is of no interest. The id is how many events were seen then."""
    found = list(_stream(key, event))
    last = len(found) - 1
    return b"".join(
        _frame(kind, facts, event.at + 1 if with_id and n == last else None)
        for n, (kind, facts) in enumerate(found)
    )


def live_frame(key: Key, event: Happened) -> bytes:
    """Something that leaves no event in the stream."""
    return _frame(event.kind, _about(key) | _facts(event))


def is_in_stream(event: Happened) -> bool:
    """Also other processes can read of it: then it is told from there."""
    if isinstance(event, MessageEvent):
        return event.kind != "message-expanded"
    return event.kind == "compaction:failed" and not event.limit


def _stream(key: Key, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
    about = _about(key)
    match event:
        case Said(line=line, index=index, time=time):
            said = {"index": index, "tokens": line.tokens, "time": time}
            yield from ((one.kind, about | _facts(one) | said) for one in told(event, "", 0, 0))
        case Replaced(kind=kind, time=time, tokens=tokens):
            edit = {"edit": event.at, "edit_kind": kind, "view": event.view, "tokens": tokens, "time": time}
            if kind in KINDS:
                own = {"at": event.span.start, "span": event.span, "reason": event.why}
                yield KINDS[kind], _cut(about | own | edit)
            yield from ((one.kind, about | _facts(one) | edit) for one in told(event, "", 0, 0))
        case Undone(at=at, of=of, why=why, time=time):
            yield "undone", _cut(about | {"at": at, "of": of, "reason": why, "time": time})
        case Pinned(at=at, lines=lines, why=why, time=time):
            places = [line.at for line in lines]
            yield "pinned", _cut(about | {"at": at, "places": places, "reason": why, "time": time})
        case Named(at=at, title=title, model=model, time=time):
            yield "named", _cut(about | {"at": at, "title": title, "model": model, "time": time})
        case Called(time=time):
            yield from ((one.kind, about | _facts(one) | {"time": time}) for one in told(event, "", 0, 0))


def _about(key: Key) -> dict[str, Any]:
    return {"conversation": key.conversation, "owner": key.owner}


def _facts(event: Happened) -> dict[str, Any]:
    facts = asdict(event)
    del facts["kind"], facts["conversation"]
    if isinstance(event, CompactionEvent):
        return _cut(facts)
    message = facts.pop("message")
    known = {name: value for name, value in facts.items() if value or name == "at"}
    return _cut(known | ({"text": message.text} if isinstance(message, Message) else {}))


def _cut(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: _glance(value) if isinstance(value, str) else value for name, value in facts.items()}


def _glance(text: str) -> str:
    text = redacted(text[:LOOKED_AT])
    return text if len(text) <= GLANCE_CHARS else f"{text[: GLANCE_CHARS - 1]}…"


def _frame(kind: str, facts: dict[str, Any], id: int | None = None) -> bytes:
    head = b"" if id is None else b"id: %d\n" % id
    return head + b"event: %s\ndata: %s\n\n" % (kind.encode(), codec.dumps(facts))
