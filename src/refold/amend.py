"""What people do to a view: pin, restore, undo. Each becomes one more event."""

from collections.abc import Sequence

import msgspec

from refold.core import codec
from refold.core.errors import ConflictError, NotFoundError
from refold.core.event import Line, Pinned, Replaced, Span, Undone
from refold.core.live import Cover, Standing
from refold.core.message import Message
from refold.core.plan import Stamp, cost
from refold.core.view import display
from refold.record import Record

REACH = 64
"""Places looked at in one go when the other messages of a group are sought."""


def pin(record: Record, at: int, stamp: Stamp, why: str) -> Pinned:
    """Keeps a message in sight, and with it the whole group of calls and results it belongs to."""
    return Pinned(stamp.at, tuple(group(record, _said(record, at))), why, stamp.time)


def unpin(record: Record, at: int, stamp: Stamp, why: str) -> list[Undone]:
    pins = [place for place, pin in record.live.state.pins.items() if pin.holds]
    pins = [place for place in pins if at in {line.at for line in record.live.state.pins[place].lines}]
    if not pins:
        raise NotFoundError(f"#{at} is not pinned")
    return [Undone(stamp.at + n, place, why, stamp.time) for n, place in enumerate(pins)]


def restore(record: Record, at: int, stamp: Stamp, why: str) -> Replaced:
    """The original stands in its old place again; for the place of an edit, all that it covers."""
    standing = Standing(record.view, record.facts(record.live.state.next))
    own: tuple[Line, ...] = ()
    if isinstance(codec.head(record.entry(at)), Line):
        cover = _hiding(record, standing, at)
        if cover is None:
            raise NotFoundError(f"#{at} is shown already")
        back = [line for line in group(record, _said(record, at)) if line.at in cover.span]
        own = _still_needed(record, cover, back)
    else:
        cover = next((one for one in standing.widest if one.at == at), None)
        if cover is None:
            raise NotFoundError(f"#{at} is no edit that decides what is shown now")
        back = list(record.lines(cover.span))
    shown: list[Message | int] = []
    lines: list[Line] = []
    for n, line in enumerate(display(own, cover.span, {line.at: line for line in back})):
        if line.at in cover.span:
            shown.append(line.at)
            lines.append(line)
        else:  # what the older edit shows besides, said again by this one
            shown.append(record.message(line))
            lines.append(msgspec.structs.replace(line, at=stamp.at, n=n))
    kept = record.live.kept
    tokens = (cost(display(cover.lines, cover.span, kept)), cost(display(lines, cover.span, kept)))
    what = (cover.span, tuple(shown), tuple(lines), "restore")
    return Replaced(stamp.at, stamp.view, *what, why, tokens, stamp.time)


def undo(record: Record, at: int | None, stamp: Stamp, why: str) -> Undone:
    """Takes an edit, a pin or an undoing back; for the place of a message, the edit that hides it.

    Raises:
        NotFoundError: nothing of that kind is in force there.
        ConflictError: an edit made meanwhile is in the way of putting it back.
    """
    standing = Standing(record.view, record.facts(record.live.state.next))
    if at is None:
        at = max(standing.covers, default=None)
        if at is None:
            raise NotFoundError("There is no edit to undo; a pin is taken back by its place")
    elif isinstance(codec.head(record.entry(at)), Line):
        cover = _hiding(record, standing, at)
        if cover is None:
            raise NotFoundError(f"Nothing hides #{at}")
        at = cover.at
    if not standing.holds(at):
        raise NotFoundError(f"#{at} is no edit, pin or undoing that is in force in view {record.view!r}")
    event = Undone(stamp.at, at, why, stamp.time)
    standing.apply(event)
    if not standing.holds(event.at):
        raise ConflictError(f"#{at} cannot be undone: an edit made since is in the way; undo that first")
    return event


def group(record: Record, line: Line) -> list[Line]:
    """A message and what may not be parted from it: the message that calls, and all its results."""
    caller = line if line.calls else None
    start = line.at
    while line.answers is not None and caller is None and start > 0:
        start, stop = max(0, start - REACH), start
        found = [other for other in record.lines(Span(start, stop)) if line.answers in other.calls]
        caller = found[-1] if found else None
    if caller is None:
        return [line]
    waiting = {id for id in caller.calls if record.live.state.open.get(id, (-1,))[0] != caller.at}
    members, start = [caller], caller.at + 1
    while waiting and start < record.live.state.next:
        start, first = start + REACH, start
        for other in record.lines(Span(first, start)):
            if other.answers in waiting:
                waiting.discard(other.answers)
                members.append(other)
    return members


def _hiding(record: Record, standing: Standing, at: int) -> Cover | None:
    """The edit that keeps a message out of sight."""
    item = record.live.item_at(at)
    if item is None or at in {line.at for line in item.lines}:
        return None
    return next((cover for cover in standing.widest if at in cover.span), None)


def _still_needed(record: Record, cover: Cover, back: Sequence[Line]) -> tuple[Line, ...]:
    """What an edit shows, less what it says in place of the messages that come back."""
    span = cover.span
    ids = {id for line in back for id in (line.answers, *line.calls) if id is not None}
    known = {line.at for line in (*cover.lines, *back)}
    all_back = len(span) <= REACH and {line.at for line in record.lines(span)} <= known

    def stays(line: Line) -> bool:
        said_here = line.at == cover.at
        return not said_here or not (all_back or line.answers in ids or ids & {*line.calls})

    return tuple(filter(stays, cover.lines))


def _said(record: Record, at: int) -> Line:
    head = codec.head(record.entry(at))
    if not isinstance(head, Line):
        raise NotFoundError(f"#{at} is no message")
    return head
