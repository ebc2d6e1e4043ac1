"""A request in the making: messages put one after another as a dialect wants them."""

from typing import Any

import msgspec

from refold.core.event import Piece
from refold.dialects import anthropic
from refold.dialects.dialect import Dialect


class LastMessage(msgspec.Struct, frozen=True):
    """What the newest message was put together from."""

    group: int
    """Where the message began that its blocks were taken from; -1 where they come from several."""
    blocks: tuple[int, ...]


class MessageList(msgspec.Struct):
    dialect: Dialect
    system_inside: bool = True
    """The model takes system text between messages, where it came so."""
    messages: list[dict[str, Any]] = []
    notices: list[str] = []
    apart: Any = None
    leading: list[Any] = []
    last: LastMessage | None = None
    """Of the newest message, where others may still be joined to it."""

    @property
    def system(self) -> Any:
        """What stands apart from the messages."""
        own = [self.apart] if self.apart is not None else []
        return anthropic.system_of([*own, *self.leading])

    def add(self, value: Any, at: int, piece: Piece | None = None, came: bool = False) -> None:
        """Puts a message at the end. `came` says that it stands as its sender wrote it."""
        if isinstance(value, list):
            for item in value:
                self.add(item, at, None, came)
            return
        if self.dialect.stands_apart(value):
            self.apart = value[self.dialect.system_field]  # the newest counts
            return
        placed = self._placed(value, at, came) if self.dialect.hoists_system else value
        if placed is None:
            return
        if self.dialect.joins_results and isinstance(placed.get("content"), list) and (piece or not came):
            self._join(placed, LastMessage(at - piece.n if piece else -1, piece.blocks if piece else ()))
        else:
            self.messages.append(placed)
            self.last = None

    def _placed(self, value: dict[str, Any], at: int, came: bool) -> dict[str, Any] | None:
        """System text at the beginning goes apart, and later it stays only if it came so; the user begins."""
        if value.get("role") == "system":
            if not self.messages:
                self.leading.append(value["content"])
                return None
            if came and self.system_inside:
                return value
            self.notices.append(f"#{at}: system text between messages is shown as the user's")
            return anthropic.as_user(value)
        if value.get("role") == "assistant" and not self.messages and not came:
            self.messages.append({"role": "user", "content": anthropic.BEGIN})
            self.notices.append(f"#{at}: a note of the user's stands before it, as the API wants it")
        return value

    def _join(self, value: dict[str, Any], new: LastMessage) -> None:
        results = self.dialect.results
        last, before = self.last, self.messages[-1] if self.messages else {}
        same = last is not None and last.group == new.group >= 0
        joins = same or (results(before) and results(value))
        if last is None or before["role"] != value["role"] or not joins:
            self.messages.append(value)
            self.last = new
            return
        blocks, places = [*before["content"], *value["content"]], (*last.blocks, *new.blocks)
        if same:  # in the order in which they came
            order = sorted(range(len(blocks)), key=places.__getitem__)
            self.last = LastMessage(new.group, tuple(places[n] for n in order))
        else:  # results first
            first = {*results({"content": blocks})}
            order = sorted(range(len(blocks)), key=lambda n: n not in first)
            self.last = LastMessage(-1, ())
        self.messages[-1] = {**before, "content": [blocks[n] for n in order]}
