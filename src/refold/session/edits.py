"""Edits by people: pin, restore, correct, undo. Each is one more event."""

from collections.abc import Iterable, Sequence

import msgspec

from refold.core import codec
from refold.core.errors import ConflictError, MessageError, NotFoundError
from refold.core.event import Line, Pinned, Replaced, Said, Span, Undone
from refold.core.message import Message, Part, Reasoning, Text, ToolCall
from refold.core.pairing import original_id, unique_call_ids, with_unique_ids
from refold.core.plan import Count, Stamp, cost, line_of
from refold.core.view import ActiveEdits, Item, display
from refold.stores.record import Record

REACH = 64
"""Places that are read at a time when the other messages of a group are looked for."""
CHANGED = "#{} was recorded or erased just now; try again"


def pin(record: Record, at: int, stamp: Stamp, why: str) -> Pinned:
    """Keeps a message in every view, and with it the calls and results it belongs to."""
    return Pinned(stamp.at, tuple(group(record, _said(record, at))), why, stamp.time)


def unpin(record: Record, at: int, stamp: Stamp, why: str) -> list[Undone]:
    pins = [place for place, pin in record.live.state.pins.items() if pin.holds]
    pins = [place for place in pins if at in {line.at for line in record.live.state.pins[place].lines}]
    if not pins:
        raise NotFoundError(f"#{at} is not pinned")
    return [Undone(stamp.at + n, place, why, stamp.time) for n, place in enumerate(pins)]


def restore(record: Record, at: int, stamp: Stamp, why: str) -> Replaced:
    """Shows the original in its place again; for the place of an edit, all that it covers."""
    standing = ActiveEdits(record.view, record.facts(record.live.state.next))
    own: tuple[Line, ...] = ()
    if isinstance(codec.head(record.entry(at)), Line):
        cover = _hiding(record, standing, at)
        if cover is None:
            raise NotFoundError(f"#{at} is shown already")
        back = [line for line in group(record, _said(record, at)) if line.at in cover.span]
        own = _still_needed(record, cover, back)
    else:
        cover = next((one for one in standing.outermost if one.at == at), None)
        if cover is None:
            raise NotFoundError(f"#{at} is not an edit that decides what is shown now")
        back = list(record.lines(cover.span))
    places = {line.at: line for line in back}
    return _edit(record, stamp, cover, display(own, cover.span, places), "restore", why)


def correct(record: Record, at: int, new: Message | str, count: Count, stamp: Stamp, why: str) -> Replaced:
    """Shows another message in the place of a recorded one; for a text, one with this text.

    Raises:
        MessageError: it has another role, or answers or makes other calls.
        NotFoundError: there is no message, or it is hidden together with others.
    """
    said = record.event(_said(record, at).at)
    item = record.live.item_at(at)
    if item is None or not isinstance(said, Said):
        raise NotFoundError(CHANGED.format(at))
    message = _in_place_of(said, new)
    line = line_of(message, stamp.at, count(message), said.line.turn, said.line.step)
    told = {"tools": line.tools or said.line.tools, "corrects": at}
    told |= {name: getattr(said.line, name) for name in ("apart", "whole", "expiry", "retry", "wordless")}
    line = msgspec.structs.replace(line, **told)
    cover = Replaced(stamp.at, stamp.view, item.span, (), (), "", "", (0, 0), stamp.time)
    if len(item.span) > 1:  # an edit that covers other messages, too, shows it
        standing = ActiveEdits(record.view, record.facts(record.live.state.next))
        covers = [one for one in standing.outermost if at in one.span]
        if not covers:
            raise NotFoundError(CHANGED.format(at))
        cover = covers[0]
    if not item.lines and item.edit is None:
        raise NotFoundError(f"#{at} is no longer shown: newer system text replaced it; correct that")
    if not _is_shown(item, at):
        by = cover.at if len(item.span) > 1 else item.edit
        raise NotFoundError(f"#{at} is hidden by #{by}; restore #{at} first, then correct it")
    return _edit(record, stamp, cover, display(cover.lines, cover.span, {at: line}), "correct", why, message)


def undo(record: Record, at: int | None, stamp: Stamp, why: str) -> tuple[Undone, int | None]:
    """Takes back an edit, a pin or an undo; for the place of a message, the edit that hides it.

    Also returns the edit that still decides what is shown there, if this changes nothing in the view.

    Raises:
        NotFoundError: no edit, pin or undo is in force there.
        ConflictError: a later edit is in the way of putting it back.
    """
    standing = ActiveEdits(record.view, record.facts(record.live.state.next))
    if at is None:
        at = max(standing.edits, default=None)
        if at is None:
            raise NotFoundError("There is no edit to undo; to take back a pin, give its place")
    elif isinstance(codec.head(record.entry(at)), Line):
        item = record.live.item_at(at)
        own = [line.at for line in item.lines if line.corrects == at] if item else []
        if own and standing.holds(own[0]):
            at = own[0]
        else:
            cover = _hiding(record, standing, at)
            if cover is None:
                raise NotFoundError(f"Nothing hides #{at}")
            at = cover.at
    if not standing.holds(at):
        raise NotFoundError(f"#{at} is not an edit, pin or undo that is in force in view {record.view!r}")
    event = Undone(stamp.at, at, why, stamp.time)
    covers = dict(standing.edits)
    seen = (standing.outermost, _kept(record, standing))
    standing.apply(event)
    if not standing.holds(event.at):
        other = standing.blocking_edit(at)
        raise ConflictError(f"#{at} cannot be undone: #{other} is in the way; undo #{other} first")
    if seen != (standing.outermost, _kept(record, standing)):
        return event, None
    changed = [(covers | standing.edits)[one].span for one in covers.keys() ^ standing.edits.keys()]
    over = (one.at for one in standing.outermost if any(one.span.covers(span) for span in changed))
    return event, next(over, None)


def group(record: Record, line: Line) -> list[Line]:
    """A message with the calls and results it belongs to: the message that calls, and all its results."""
    caller = line if line.calls else None
    start = line.at
    while line.answers is not None and caller is None and start > 0:
        stop = start
        start = max(0, start - REACH)
        found = [other for other in record.lines(Span(start, stop)) if line.answers in other.calls]
        caller = found[-1] if found else None
    if caller is None:
        return [line]
    waiting = {id for id in caller.calls if record.live.state.open.get(id, (-1,))[0] != caller.at}
    members = [caller]
    start = caller.at + 1
    while waiting and start < record.live.state.next:
        for other in record.lines(Span(start, start + REACH)):
            if other.answers in waiting:
                waiting.discard(other.answers)
                members.append(other)
        start += REACH
    return members


def _edit(
    record: Record,
    stamp: Stamp,
    cover: Replaced,
    lines: Iterable[Line],
    kind: str,
    why: str,
    new: Message | None = None,
) -> Replaced:
    """An edit of what another one covers; it shows again what else that one shows."""
    shown = list[Message | int]()
    told = list[Line]()
    for n, line in enumerate(lines):
        if line.at == stamp.at and new is not None:
            shown.append(new)
            line = msgspec.structs.replace(line, n=n)
        elif line.place in cover.span:
            shown.append(line.at)
        else:
            shown.append(record.message(line))
            line = msgspec.structs.replace(line, at=stamp.at, n=n)
        told.append(line)
    live = record.live
    span = cover.span
    kept = live.kept | {line.place: line for line in told if line.place in live.kept}
    first = live.item_at(span.start)
    tokens = (first.tokens if first else 0, cost(display(told, span, kept)))
    return Replaced(stamp.at, stamp.view, span, tuple(shown), tuple(told), kind, why, tokens, stamp.time)


def _in_place_of(said: Said, new: Message | str) -> Message:
    """The correction, with the role of the corrected message, the call it answers and the calls it makes.

    Raises:
        MessageError: it has others.
    """
    line = said.line
    at = said.at
    if isinstance(new, str):
        new = msgspec.structs.replace(said.message, parts=_with_text(said.message, new))
    new = msgspec.structs.replace(new, id=None, usage=None, summary=line.summary)
    if new.role != line.role:
        raise MessageError("message.role", f"expected {line.role} as in #{at}, got {new.role}")
    calls = unique_call_ids([original_id(call.call_id) for call in new.calls])
    new = with_unique_ids(new, msgspec.structs.replace(line, calls=calls))
    if tuple(result.call_id for result in new.results) != (
        (line.answers,) if line.answers is not None else ()
    ):
        raise MessageError("message", f"#{at} answers {line.answers or 'no call'}; its correction does too")
    if sorted(call.call_id for call in new.calls) != sorted(line.calls):
        made = f"the calls {', '.join(line.calls)}" if line.calls else "no calls"
        problem = f"#{at} makes {made}; its correction does too"
        raise MessageError("message", f"{problem}. A text in place of a message keeps them")
    return new


def _with_text(message: Message, text: str) -> tuple[Part, ...]:
    """The parts with another text; of an assistant, only the calls stay, since it thought of the old text."""
    if message.results:
        return tuple(msgspec.structs.replace(result, output=text) for result in message.results)
    if message.role == "assistant":
        return (*([Text(text)] if text or not message.calls else []), *message.calls)
    rest = [part for part in message.parts if not isinstance(part, Text | Reasoning | ToolCall)]
    return (Text(text), *rest)


def _is_shown(item: Item, at: int) -> bool:
    """True for a message that is shown whole, corrected or shortened in its place."""
    in_place = len(item.span) == 1 and len(item.lines) == 1 and not item.is_folded
    return in_place or any(line.place == at for line in item.lines)


def _kept(record: Record, standing: ActiveEdits) -> dict[int, Line | None]:
    """The corrections of messages that no edit hides."""
    corrected = standing.corrected
    return {at: corrected.get(at) for at in record.live.kept}


def _hiding(record: Record, standing: ActiveEdits, at: int) -> Replaced | None:
    """The edit that hides a message."""
    item = record.live.item_at(at)
    if item is None or at in {line.at for line in item.lines}:
        return None
    return next((cover for cover in standing.outermost if at in cover.span), None)


def _still_needed(record: Record, cover: Replaced, back: Sequence[Line]) -> tuple[Line, ...]:
    """What an edit shows, without what stands for the messages that come back."""
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
        raise NotFoundError(f"#{at} is not a message")
    return head
