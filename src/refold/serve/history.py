"""What a stored conversation tells of where a request belongs in it."""

from collections.abc import Iterable, Sequence
from typing import Any

from refold.core import codec
from refold.core.draft import PART
from refold.core.event import Event, Said
from refold.core.message import Message, Part, ToolResult
from refold.serve.identify import essence
from refold.session.session import Session
from refold.stores.store import LOCATED

NEAR = 16
"""Events that are read at once, backwards."""


def apart(session: Session, name: str) -> Any:
    """The newest system text that stands apart, as it came."""
    lines = session.record.live.state.apart
    came = codec.came(session.record.entry(lines[-1].at)) if lines else None
    return came.value.get(name) if came is not None and isinstance(came.value, dict) else None


def newest_mark(session: Session, stop: int) -> str | None:
    """The newest mark before a place."""
    while stop > 0:
        start = max(0, stop - NEAR)
        for link in reversed(list(session.store.read(session.key, start, stop))):
            if link.entry.id is not None and link.entry.id.startswith(LOCATED):
                return link.entry.id.partition(PART)[0]
        stop = start
    return None


def units_said(events: Iterable[Event]) -> list[tuple[int, bytes]]:
    """What clients would send of what was said: place and digest of each message, made whole again."""
    found: list[tuple[int, bytes]] = []
    parts: list[Part] = []
    for said in events:
        if not isinstance(said, Said) or (said.line.role == "system" and not found):
            continue
        parts += said.message.parts
        if said.piece is not None and said.piece.n + 1 < said.piece.of:
            continue
        role = (
            "user" if said.piece and not all(isinstance(one, ToolResult) for one in parts) else said.line.role
        )
        found.append((said.at, essence(Message(role, tuple(parts)))))
        parts = []
    return found


def overlap(said: Sequence[bytes], units: Sequence[bytes]) -> int:
    """How many of the newest that were said come first in the history."""
    most = min(len(said), len(units))
    begun = (n for n in range(most, 0, -1) if said[-n] == units[0])
    return next((n for n in begun if said[-n:] == units[:n]), 0)
