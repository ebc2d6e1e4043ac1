"""The message list of a request, built message by message in the order and form that a dialect requires."""

from typing import Any

import msgspec

from refold.core.event import Piece
from refold.dialects import anthropic
from refold.dialects.dialect import Dialect


class LastMessage(msgspec.Struct, frozen=True):
    """The blocks that the newest message was joined from."""

    group: int
    """Place of the first block of the recorded message that they belong to; -1 if they belong to several."""
    blocks: tuple[int, ...]


class MessageList(msgspec.Struct):
    dialect: Dialect
    system_inside: bool = True
    """The model accepts system messages between others."""
    messages: list[dict[str, Any]] = []
    notices: list[str] = []
    apart: Any = None
    leading: list[Any] = []
    last: LastMessage | None = None
    """Of the newest message, if others may still be joined to it."""

    @property
    def system(self) -> Any:
        """The value of the request's system field."""
        own = [self.apart] if self.apart is not None else []
        return anthropic.system_of([*own, *self.leading])

    def add(self, value: Any, at: int, piece: Piece | None = None, came: bool = False) -> None:
        """Appends a message. `came`: it is as its sender wrote it, not rendered."""
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
        if self.dialect.result_type and isinstance(placed.get("content"), list) and (piece or not came):
            self._join(placed, LastMessage(at - piece.n if piece else -1, piece.blocks if piece else ()))
        else:
            self.messages.append(placed)
            self.last = None

    def _placed(self, value: dict[str, Any], at: int, came: bool) -> dict[str, Any] | None:
        """Moves leading system text to the system field, and makes the first message a user message."""
        if value.get("role") == "system":
            if not self.messages:
                self.leading.append(value["content"])
                return None
            if came and self.system_inside:
                return value
            self.notices.append(f"#{at}: system text between messages is sent as a user message")
            return anthropic.as_user(value)
        if value.get("role") == "assistant" and not self.messages and not came:
            self.messages.append({"role": "user", "content": anthropic.BEGIN})
            self.notices.append(f"#{at}: added a user message before it, which the API requires at the start")
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
