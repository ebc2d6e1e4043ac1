"""A request in the making: messages put one after another as a dialect wants them."""

from typing import Any

import msgspec

from refold.core.event import Piece
from refold.formats import ai_sdk, anthropic, openai_chat, openai_responses
from refold.formats.dialects import FORMATS

APART = {anthropic.DIALECT: "system", openai_responses.DIALECT: "instructions"}
"""The field of the request that has the system text, where it stands apart from the messages."""
LEADING = {anthropic.DIALECT}
"""Where system messages at the beginning belong there too."""
JOINS = {anthropic.DIALECT, ai_sdk.DIALECT}
"""Where the results of one step stand in one message."""
LIST = {openai_responses.DIALECT: "input"}
"""What the list of messages is called, where it is not `messages`."""
PLAIN = {openai_chat.DIALECT}
"""Where messages stand just as they are given: nothing is joined, nothing apart."""


class Last(msgspec.Struct, frozen=True):
    """What the newest message was put together from."""

    group: int
    """Where the message began that its blocks were taken from; -1 where they come from several."""
    blocks: tuple[int, ...]


class Sheet(msgspec.Struct):
    dialect: str
    messages: list[dict[str, Any]] = []
    notices: list[str] = []
    apart: Any = None
    leading: list[Any] = []
    last: Last | None = None
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
        apart = APART.get(self.dialect)
        if apart is not None and apart in value and "role" not in value and "type" not in value:
            self.apart = value[apart]  # the newest counts
        elif value.get("role") == "system" and self.dialect in LEADING and not self._takes(value, at, came):
            pass
        elif (
            self.dialect not in JOINS
            or (came and piece is None)
            or not isinstance(value.get("content"), list)
        ):
            self.messages.append(value)
            self.last = None
        else:
            self._join(value, Last(at - piece.n if piece else -1, piece.blocks if piece else ()))

    def _takes(self, value: dict[str, Any], at: int, came: bool) -> bool:
        """System text at the beginning goes apart; later it stays only if it came so."""
        if not self.messages:
            self.leading.append(value["content"])
            return False
        if came:
            return True
        self.messages.append(anthropic.as_user(value))
        self.notices.append(f"#{at}: system text between messages is shown as the user's")
        self.last = None
        return False

    def _join(self, value: dict[str, Any], new: Last) -> None:
        results = FORMATS[self.dialect].results
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
            self.last = Last(new.group, tuple(places[n] for n in order))
        else:  # results first
            first = {*results({"content": blocks})}
            order = sorted(range(len(blocks)), key=lambda n: n not in first)
            self.last = Last(-1, ())
        self.messages[-1] = {**before, "content": [blocks[n] for n in order]}
