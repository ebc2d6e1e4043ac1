"""Reading a conversation: what was recorded, what the model sees of it, and how one became the other.

Whoever shows a conversation, to people or to programs, reads it here and nowhere below.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from refold.core import codec
from refold.core.errors import StoreError
from refold.core.event import Event, Line, Said
from refold.core.live import State
from refold.core.message import Message
from refold.core.view import Item
from refold.dialects.registry import FORMATS
from refold.stores.record import Record
from refold.stores.store import Key, Store


class Inspector:
    """Reads one view of one conversation, as of the last `refresh`. It changes nothing.

    For one thread at a time: `Session.locked` gives the inspector of a session that others may use.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    @classmethod
    def open(cls, store: Store, key: Key, view: str = "main") -> Self:
        """Reads a conversation that no session is open for.

        Raises:
            CorruptError: what is stored is not what was written.
        """
        return cls(Record(store, key, view, parse))

    def refresh(self) -> None:
        """Takes in what was appended since, by any process."""
        self._record.catch_up()

    # Where it stands

    @property
    def key(self) -> Key:
        return self._record.key

    @property
    def view_name(self) -> str:
        return self._record.view

    @property
    def state(self) -> State:
        """Counts and places: messages and tokens recorded, turn, step, calls that are not answered."""
        return self._record.live.state

    @property
    def tokens(self) -> int:
        """Tokens of the messages that are shown."""
        return self._record.live.tokens

    @property
    def edition(self) -> int:
        """Changes whenever something other than the end of the view does."""
        return self._record.live.edition

    @property
    def epoch(self) -> object:
        """Another object once the conversation was erased: what was remembered of it no longer holds."""
        return self._record.live

    @property
    def items(self) -> Sequence[Item]:
        """The view: stretches of the record, and the lines that stand for each."""
        return self._record.live.items

    def item_at(self, place: int) -> Item | None:
        return self._record.live.item_at(place)

    # What was recorded

    def event(self, at: int) -> Event:
        """
        Raises:
            NotFoundError: there is no such place.
        """
        return self._record.event(at)

    def events(self, start: int = 0, stop: int | None = None) -> Iterator[Event]:
        return self._record.events(start, stop)

    def raw(self, at: int) -> Any:
        """The provider's JSON that a message came as; None if it came otherwise."""
        came = codec.came(self._record.entry(at))
        return came.value if came is not None else None

    def message(self, line: Line) -> Message:
        """The words behind a line of the view."""
        return self._record.message(line)

    def newest_first(self) -> Iterator[Said]:
        """The recorded messages, from the newest backwards."""
        return self._record.backwards()

    def place_of(self, index: int) -> int:
        """The place of the message with an index; messages are counted from 0."""
        return self._record.place_of(index)


def parse(dialect: str, value: Any) -> Message:
    """
    Raises:
        StoreError: only a newer refold knows this dialect.
    """
    if dialect not in FORMATS:
        raise StoreError(f"A message in the dialect {dialect!r}, which only a newer refold can read")
    return FORMATS[dialect].parse(value)
