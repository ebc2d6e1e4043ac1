"""Pages of a conversation: what was said, what is shown, what was done and what that changed."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Literal

from refold.core.event import Line, Replaced, Said
from refold.core.live import ActiveEdits, Live, ReplacedHead
from refold.core.message import Media, Message, Part, ToolResult
from refold.core.view import Item, View
from refold.serve.rows import Held
from refold.serve.schemas import (
    TEXT_CHARS,
    Call,
    DiffAsked,
    DiffChange,
    Difference,
    DiffMoment,
    Edit,
    Edits,
    Medium,
    Messages,
    Paged,
    SaidMessage,
    Shown,
    ShownItem,
    ShownMessage,
    ViewAsked,
    Viewed,
)
from refold.session.compare import compare
from refold.session.results import ComparedView, stored
from refold.stores.record import Record


def messages(held: Held, asked: Paged) -> Messages:
    """By index, counting messages only."""
    record, total = held.record, held.record.live.state.index
    start = _start(asked.start, total)
    place = record.place_of(start) if start < total else record.live.state.next
    said = (event for event in record.events(place, record.live.state.next) if isinstance(event, Said))
    pinned = pins(record.live)
    found = [_said(record, event, event.at in pinned) for event in islice(said, asked.limit)]
    return Messages(found, total)


def pins(live: Live) -> set[int]:
    return {line.at for pin in live.state.pins.values() if pin.holds for line in pin.lines}


def _said(record: Record, said: Said, is_pinned: bool) -> SaidMessage:
    known, line, (shown, edit) = stored(said, ""), said.line, _standing(record.live, said.at)
    text = said.message.text
    return SaidMessage(
        at=said.at,
        index=said.index,
        id=known.id,
        role=line.role,
        time=known.timestamp,
        tokens=line.tokens,
        tools=line.tools,
        tags=said.tags,
        kind=known.kind,
        edit=edit,
        shown=shown,
        pinned=is_pinned,
        text=text[:TEXT_CHARS],
        cut=len(text) > TEXT_CHARS,
        calls=_calls(said.message),
        answers=line.answers,
        media=list(_media(said.message.parts)),
    )


def _standing(live: Live, at: int) -> tuple[Shown, int | None]:
    """How a message is shown now, and the edit that makes it so."""
    item = live.item_at(at)
    if item is None:
        return "hidden", None
    line = next((line for line in item.lines if line.place == at), None)
    if line is not None:
        return ("whole", None) if line.corrects is None else ("corrected", line.at)
    return "reduced" if len(item.span) == 1 and item.tokens else "hidden", item.edit


def _calls(message: Message) -> list[Call]:
    return [Call(call.call_id, call.tool, call.input[:TEXT_CHARS]) for call in message.calls]


def _media(parts: Sequence[Part]) -> Iterator[Medium]:
    for part in parts:
        if isinstance(part, Media):
            yield Medium(part.kind, part.name)
        elif isinstance(part, ToolResult) and not isinstance(part.output, str):
            yield from _media(part.output)


def view(held: Held, asked: ViewAsked, window: int) -> Viewed:
    """What the model sees now, or saw right after an event; of its items, a page."""
    record = held.record
    live = record.live if asked.at is None else record.as_of(asked.at)
    start = _start(asked.start, len(live.items))
    page = record.with_words(View(tuple(live.items[start : start + asked.limit])))
    items = [_item(record, item) for item in page.items]
    return Viewed(asked.at, live.tokens, window, items, len(live.items))


def _item(record: Record, item: Item) -> ShownItem:
    edit = None if item.edit is None else record.event(item.edit)
    kind = edit.kind if isinstance(edit, Replaced) else None
    return ShownItem(item.span, item.edit, kind, item.tokens, [_shown(item, line) for line in item.lines])


def _shown(item: Item, line: Line) -> ShownMessage:
    message = item.words(line)
    text = message.text
    facts = (text[:TEXT_CHARS], len(text) > TEXT_CHARS, line.tools, line.summary)
    return ShownMessage(line.place, line.role, line.tokens, *facts, _calls(message))


def edits(held: Held, asked: Paged) -> Edits:
    """The oldest first, those that were taken back included."""
    record = held.record
    facts = list(record.facts(record.live.state.next))
    standing = ActiveEdits(record.view, facts)
    covers = [fact for fact in facts if isinstance(fact, ReplacedHead) and fact.view == record.view]
    start = _start(asked.start, len(covers))
    widest = {cover.at for cover in standing.widest}
    return Edits(
        [_edit(record, cover, standing, widest) for cover in covers[start : start + asked.limit]],
        len(covers),
    )


def _edit(record: Record, cover: ReplacedHead, standing: ActiveEdits, widest: set[int]) -> Edit:
    edit = record.event(cover.at)
    assert isinstance(edit, Replaced)
    state: Literal["in force", "under a later one", "taken back"] = "taken back"
    if cover.at in standing.covers:
        state = "in force" if cover.at in widest else "under a later one"
    by = edit.certificate
    return Edit(
        at=edit.at,
        kind=edit.kind,
        why=edit.why,
        span=edit.span,
        tokens=edit.tokens,
        time=datetime.fromtimestamp(edit.time, UTC),
        state=state,
        model=by.model if by else None,
        cost=by.cost if by else None,
    )


def diff(held: Held, asked: DiffAsked) -> Difference:
    found = compare(held.record, held.record, asked.at, asked.to)
    changes = [
        DiffChange(change.sign, seen.at, seen.role, seen.tokens, seen.text)
        for change in found.changes
        for seen in [change.seen]
    ]
    return Difference(_moment(found.old), _moment(found.new), changes)


def _moment(moment: ComparedView) -> DiffMoment:
    return DiffMoment(moment.at, moment.messages, moment.tokens)


def _start(start: int, total: int) -> int:
    return start if start >= 0 else max(0, total + start)
