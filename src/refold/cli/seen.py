"""What a view shows and what it hides, gathered once for people and for machines."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from refold.cli.words import iso, saved_percent
from refold.core.event import Line, Replaced, Span
from refold.core.live import Live
from refold.core.message import Message
from refold.core.pairing import repair_pairs
from refold.core.view import Item
from refold.session.session import Session
from refold.stores.record import Record


class Tally(NamedTuple):
    """What was said before a place."""

    messages: int
    tokens: int
    turn: int
    next_turn: int
    """The turn of the first message from there on."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A message in the view."""

    line: Line
    message: Message
    is_task: bool
    is_pinned: bool
    place: int
    """Where it was said, also where something shorter is shown in its place; of a summary, the edit's."""
    said_tokens: int
    rung: str = ""
    """What shows it otherwise in its place: what made it shorter, or corrected it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the record and what stands for it."""

    span: Span
    edit: Replaced | None
    """What decided it; None where the record shows itself."""
    is_merged: bool
    """Other edits hide parts of it too."""
    shown: tuple[Shown, ...]
    before: Tally
    after: Tally

    @property
    def tokens(self) -> int:
        return sum(one.line.tokens for one in self.shown)

    @property
    def said_tokens(self) -> int:
        return self.after.tokens - self.before.tokens

    @property
    def said_messages(self) -> int:
        return self.after.messages - self.before.messages

    @property
    def reduced(self) -> int:
        """Messages said here that are shown otherwise, each in its place."""
        return sum(bool(one.rung) for one in self.shown)

    @property
    def is_in_place(self) -> bool:
        """It is one message, shown otherwise."""
        return len(self.span) == 1 and bool(self.reduced)

    @property
    def whole(self) -> int:
        """Messages said here that are shown as they were said."""
        return sum(one.line.at in self.span for one in self.shown)

    @property
    def hidden(self) -> int:
        return self.said_messages - self.whole - self.reduced


@dataclass(frozen=True, slots=True)
class Sight:
    """A view of one conversation, now or at a place."""

    session: Session
    view: str
    at: int | None
    blocks: tuple[Block, ...]
    said: Tally
    notices: tuple[str, ...]
    """What is mended when this is sent."""

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)

    @property
    def messages(self) -> int:
        return sum(len(block.shown) for block in self.blocks)

    @property
    def shown(self) -> list[Shown]:
        return [one for block in self.blocks for one in block.shown]

    @property
    def saved_percent(self) -> int:
        return saved_percent(self.said.tokens, self.tokens)


def see(session: Session, at: int | None = None) -> Sight:
    """The view now, or right after the event at a place.

    Raises:
        NotFoundError: there is no such place.
    """
    record = session.record
    if at is None:
        live = record.live
    else:
        record.entry(at)
        live = record.as_of(at)
    blocks = tuple(_block(record, live, item) for item in record.with_words(live.freeze()).items)
    state = live.state
    said = Tally(state.index, state.total, state.turn, state.turn)
    notices = repair_pairs([line for item in live.items for line in item.lines])[1]
    return Sight(session, record.view, at, blocks, said, tuple(notices))


def _block(record: Record, live: Live, item: Item) -> Block:
    task = live.state.task
    pinned = {line.at for pin in live.state.pins.values() if pin.holds for line in pin.lines}
    shown = tuple(
        Shown(line, message, bool(task and place == task.at), place in pinned, place, *_told(record, line))
        for line, message in zip(item.lines, item.shown, strict=True)
        for place in [line.place]
    )
    if item.edit is None:
        line = item.lines[0]
        before, after = Tally(0, 0, 0, line.turn), Tally(1, line.tokens, line.turn, 0)
        return Block(item.span, None, False, shown, before, after)
    edit = record.event(item.edit)
    assert isinstance(edit, Replaced)
    before, after = tally(record, item.span.start), tally(record, item.span.end)
    if len(item.span) == len(shown) == 1 and shown[0].place == edit.at:
        said = after.tokens - before.tokens
        shown = (replace(shown[0], place=item.span.start, said_tokens=said, rung=edit.kind),)
    return Block(item.span, edit, item.merged, shown, before, after)


def _told(record: Record, line: Line) -> tuple[int, str]:
    """Tokens that were said in its place, and how it came to be shown otherwise."""
    if line.corrects is None:
        return line.tokens, ""
    return sum(said.tokens for said in record.lines(Span(line.corrects, line.corrects + 1))), "correct"


def tally(record: Record, at: int) -> Tally:
    """Messages and tokens said before a place: the first message from there on knows."""
    said, state = record.said_from(at), record.live.state
    if said is None:
        return Tally(state.index, state.total, state.turn, state.turn)
    line = said.line
    return Tally(said.index, said.total - line.tokens, line.turn - line.asks, line.turn)


def sight_json(sight: Sight) -> dict[str, Any]:
    return {
        "conversation": sight.session.conversation,
        "owner": sight.session.key.owner,
        "view": sight.view,
        "at": sight.at,
        "tokens": {"shown": sight.tokens, "said": sight.said.tokens, "saved_percent": sight.saved_percent},
        "messages": {
            "shown": sight.messages,
            "said": sight.said.messages,
            "whole": sum(block.whole for block in sight.blocks),
            "reduced": sum(block.reduced for block in sight.blocks),
            "hidden": sum(block.hidden for block in sight.blocks),
        },
        "items": list(map(_block_json, sight.blocks)),
        "notices": sight.notices,
    }


def _block_json(block: Block) -> dict[str, Any]:
    edit = block.edit
    return {
        "span": block.span,
        "edit": edit and edit_json(edit),
        "reduced": block.reduced,
        "hidden": block.hidden,
        "tokens": {"said": block.said_tokens, "shown": block.tokens},
        "shown": list(map(shown_json, block.shown)),
    }


def edit_json(edit: Replaced) -> dict[str, Any]:
    return {
        "at": edit.at,
        "kind": edit.kind,
        "why": edit.why,
        "round": edit.round,
        "time": iso(edit.time),
    }


def shown_json(shown: Shown) -> dict[str, Any]:
    line = shown.line
    return {
        "at": line.at,
        "role": line.role,
        "tokens": line.tokens,
        "turn": line.turn,
        "step": line.step,
        "tools": line.tools,
        "is_task": shown.is_task,
        "is_pinned": shown.is_pinned,
        "message": shown.message,
    }
