"""Edits by people: pin, restore, correct, undo. Each is one more event."""

from collections.abc import Iterable, Sequence

import msgspec

from refold.core import codec
from refold.core.errors import ConflictError, MessageError, NotFoundError
from refold.core.event import Line, Pinned, Replaced, Said, Span, Undone
from refold.core.message import Message, Part, Reasoning, Text, ToolCall
from refold.core.pairing import original_id, unique_call_ids, with_unique_ids
from refold.core.plan import Count, Stamp, cost, line_of
from refold.core.view import ActiveEdits, display
from refold.stores.record import Record

REACH = 64
"""Places that are read at a time to find the message with a call."""
CHANGED = "#{} was recorded or erased just now; try again"


def pin(record: Record, at: int, stamp: Stamp, why: str) -> Pinned:
    """Keeps a message in every view, and with it the calls and results it belongs to."""
    return Pinned(stamp.at, tuple(group(record, _said(record, at))), why, stamp.time)


def unpin(record: Record, at: int, stamp: Stamp, why: str) -> list[Undone]:
    pins = record.live.state.pins.items()
    places = [place for place, pin in pins if pin.holds and any(line.at == at for line in pin.lines)]
    if not places:
        raise NotFoundError(f"#{at} is not pinned")
    return [Undone(stamp.at + n, place, why, stamp.time) for n, place in enumerate(places)]


def restore(record: Record, at: int, stamp: Stamp, why: str) -> Replaced:
    """Shows the original in its place again; for the place of an edit, all that it covers."""
    active = _active_edits(record)
    own: tuple[Line, ...] = ()
    if isinstance(codec.head(record.entry(at)), Line):
        cover = _hiding(record, active, at)
        if cover is None:
            raise NotFoundError(f"#{at} is shown already")
        back = [line for line in group(record, _said(record, at)) if line.at in cover.span]
        own = _still_needed(record, cover, back)
    else:
        cover = next((one for one in active.outermost if one.at == at), None)
        if cover is None:
            raise NotFoundError(f"#{at} is not an edit that decides what is shown now")
        back = list(record.entries.lines(cover.span))
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
    if not item.lines and item.edit is None:
        raise NotFoundError(f"#{at} is no longer shown: newer system text replaced it; correct that")
    cover = Replaced(stamp.at, stamp.view, item.span, (), (), "", "", (0, 0), stamp.time)
    if len(item.span) > 1:  # an edit that covers other messages, too, shows it
        outer = next((one for one in _active_edits(record).outermost if at in one.span), None)
        if outer is None:
            raise NotFoundError(CHANGED.format(at))
        cover = outer
    is_in_place = len(item.span) == 1 and len(item.lines) == 1 and not item.is_folded
    if not is_in_place and all(line.place != at for line in item.lines):
        by = cover.at if len(item.span) > 1 else item.edit
        raise NotFoundError(f"#{at} is hidden by #{by}; restore #{at} first, then correct it")
    message = _in_place_of(said, new)
    old = said.line
    line = line_of(message, stamp.at, count(message), old.turn, old.step)
    facts = {name: getattr(old, name) for name in ("apart", "whole", "expiry", "retry", "wordless")}
    line = msgspec.structs.replace(line, tools=line.tools or old.tools, corrects=at, **facts)
    return _edit(record, stamp, cover, display(cover.lines, cover.span, {at: line}), "correct", why, message)


def undo(record: Record, at: int | None, stamp: Stamp, why: str) -> tuple[Undone, int | None]:
    """Takes back an edit, a pin or an undo; for the place of a message, the edit that hides it.

    Also returns the edit that still decides what is shown there, if this changes nothing in the view.

    Raises:
        NotFoundError: no edit, pin or undo is in force there.
        ConflictError: a later edit is in the way of putting it back.
    """
    active = _active_edits(record)
    if at is None:
        at = max(active.edits, default=None)
        if at is None:
            raise NotFoundError("There is no edit to undo; to take back a pin, give its place")
    elif isinstance(codec.head(record.entry(at)), Line):
        at = _edit_of(record, active, at)
    if not active.holds(at):
        raise NotFoundError(f"#{at} is not an edit, pin or undo that is in force in view {record.view!r}")
    event = Undone(stamp.at, at, why, stamp.time)
    edits = dict(active.edits)
    before = (active.outermost, _kept(record, active))
    active.apply(event)
    if not active.holds(event.at):
        other = active.blocking_edit(at)
        raise ConflictError(f"#{at} cannot be undone: #{other} is in the way; undo #{other} first")
    if before != (active.outermost, _kept(record, active)):
        return event, None
    switched = [(edits | active.edits)[one].span for one in edits.keys() ^ active.edits.keys()]
    over = (one.at for one in active.outermost if any(one.span.covers(span) for span in switched))
    return event, next(over, None)


def _edit_of(record: Record, active: ActiveEdits, at: int) -> int:
    """The place of the edit that corrects or hides a message."""
    item = record.live.item_at(at)
    for line in item.lines if item else ():
        if line.corrects == at and active.holds(line.at):
            return line.at
    cover = _hiding(record, active, at)
    if cover is None:
        raise NotFoundError(f"Nothing hides #{at}")
    return cover.at


def _active_edits(record: Record) -> ActiveEdits:
    return ActiveEdits(record.view, record.entries.facts(record.live.state.next))


def group(record: Record, line: Line) -> list[Line]:
    """A message with the calls and results it belongs to: the message that calls, and all its results."""
    caller = line if line.calls else _caller(record, line)
    if caller is None:
        return [line]
    open_calls = record.live.state.open
    answered = {id for id in caller.calls if open_calls.get(id, (-1,))[0] != caller.at}
    members = [caller]
    for other in record.entries.lines(Span(caller.at + 1, record.live.state.next)):
        if not answered:
            break
        if other.answers in answered:
            answered.discard(other.answers)
            members.append(other)
    return members


def _caller(record: Record, result: Line) -> Line | None:
    """The newest message before a result that makes its call."""
    start = result.at
    while result.answers is not None and start > 0:
        stop = start
        start = max(0, start - REACH)
        callers = [line for line in record.entries.lines(Span(start, stop)) if result.answers in line.calls]
        if callers:
            return callers[-1]
    return None


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
    """The correction, with the ids of the call that the corrected message answers and the calls it makes.

    Raises:
        MessageError: it has another role, or other calls.
    """
    line = said.line
    if isinstance(new, str):
        new = msgspec.structs.replace(said.message, parts=_with_text(said.message, new))
    new = msgspec.structs.replace(new, id=None, usage=None, summary=line.summary)
    if new.role != line.role:
        raise MessageError("message.role", f"expected {line.role} as in #{said.at}, got {new.role}")
    calls = unique_call_ids([original_id(call.call_id) for call in new.calls])
    new = with_unique_ids(new, msgspec.structs.replace(line, calls=calls))
    if [result.call_id for result in new.results] != ([] if line.answers is None else [line.answers]):
        answered = line.answers or "no call"
        raise MessageError("message", f"#{said.at} answers {answered}; its correction must do so too")
    if sorted(call.call_id for call in new.calls) != sorted(line.calls):
        made = ", ".join(line.calls) or "none"
        problem = f"the calls of #{said.at} ({made}) must stay; a text in place of a message keeps them"
        raise MessageError("message", problem)
    return new


def _with_text(message: Message, text: str) -> tuple[Part, ...]:
    """The parts with another text; of an assistant, only the calls stay, since it thought of the old text."""
    if message.results:
        return tuple(msgspec.structs.replace(result, output=text) for result in message.results)
    if message.role == "assistant":
        return (*([Text(text)] if text or not message.calls else []), *message.calls)
    rest = [part for part in message.parts if not isinstance(part, Text | Reasoning | ToolCall)]
    return (Text(text), *rest)


def _kept(record: Record, active: ActiveEdits) -> dict[int, Line | None]:
    """The corrections of messages that no edit hides."""
    corrected = active.corrected
    return {at: corrected.get(at) for at in record.live.kept}


def _hiding(record: Record, active: ActiveEdits, at: int) -> Replaced | None:
    """The edit that hides a message."""
    item = record.live.item_at(at)
    if item is None or at in {line.at for line in item.lines}:
        return None
    return next((cover for cover in active.outermost if at in cover.span), None)


def _still_needed(record: Record, cover: Replaced, back: Sequence[Line]) -> tuple[Line, ...]:
    """What an edit shows, without what stands for the messages that come back."""
    ids = {line.answers for line in back} - {None}
    ids.update(*(line.calls for line in back))
    shown = {line.at for line in (*cover.lines, *back)}
    is_all = all(line.at in shown for line in record.entries.lines(cover.span))

    def stays(line: Line) -> bool:
        return line.at != cover.at or not (is_all or ids & {line.answers, *line.calls})

    return tuple(filter(stays, cover.lines))


def _said(record: Record, at: int) -> Line:
    head = codec.head(record.entry(at))
    if not isinstance(head, Line):
        raise NotFoundError(f"#{at} is not a message")
    return head
