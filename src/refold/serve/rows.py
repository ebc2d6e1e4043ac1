"""What lists say of conversations, remembered until they change."""

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import dropwhile
from threading import Lock
from typing import Generic, TypeVar

import msgspec

from refold.core import codec
from refold.core.errors import CorruptError, NotFoundError, SettingError
from refold.core.event import Unknown
from refold.serve.schemas import ListAsked, Parent, Row
from refold.serve.schemas import Rows as Page
from refold.serve.steps import Walk
from refold.session.inspect import parse
from refold.stores.record import Record
from refold.stores.store import ConversationInfo, Key, Leases, Store

GIST_CHARS = 80
MOST_ROWS, MOST_RECORDS = 10_000, 64
"""Remembered at a time."""
LOOKED_AT = 2_000
"""Conversations in which one request looks for a title: the next page goes on from there."""

T = TypeVar("T")


class Recent(Generic[T]):
    """The values that were used last, so many of them. For several threads."""

    def __init__(self, most: int) -> None:
        self._most, self._lock, self._values = most, Lock(), OrderedDict[Hashable, T]()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            value = self._values.setdefault(key, made)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
            return value


class Held:
    """A record to read from, for one thread at a time, apart from the sessions that go on with it."""

    def __init__(self, record: Record) -> None:
        self.record, self.lock = record, Lock()
        self._walk: Walk | None = None

    @property
    def walk(self) -> Walk:
        if self._walk is None or not self._walk.follows(self.record):
            self._walk = Walk(self.record)
        self._walk.go_on(self.record)
        return self._walk


class Rows:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows = Recent[Row](MOST_ROWS)
        self._records = Recent[Held](MOST_RECORDS)
        self._listed = Recent[ConversationInfo](MOST_ROWS)

    @contextmanager
    def held(self, key: Key) -> Iterator[Held]:
        """A conversation as it is now.

        Raises:
            NotFoundError: there is none of that name.
        """
        if next(self._store.read(key, 0, 1), None) is None:
            raise NotFoundError(f"There is no conversation {key.conversation!r}")
        held = self._records.get(key, lambda: Held(Record(self._store, key, "main", parse)))
        with held.lock:
            held.record.catch_up()
            yield held

    def row(self, record: Record) -> Row:
        """One of a record that is at hand."""
        key = record.key
        known = self._listed.get((key, record.digest_before(1)), lambda: self.listed(key)[0])
        return self._now(_row(known, record), key)

    def listed(self, key: Key) -> tuple[ConversationInfo, list[str]]:
        """What the store's list says of a conversation, and the names of its forks."""
        rows = list(self._store.conversations(key.owner))
        forks = [row.key.conversation for row in rows if row.parent == key]
        return next((row for row in rows if row.key == key), ConversationInfo(key, time.time(), 0)), forks

    def page(self, owner: str | None, asked: ListAsked) -> Page:
        """Some of an owner's, or of everybody's, the newest first."""
        found, last, looked = list[Row](), None, 0
        wanted = (asked.q or "").casefold()
        for listed in _after(self._store.conversations(owner), asked.cursor):
            if last is not None and (len(found) == asked.limit or looked == LOOKED_AT):
                return Page(found, _cursor(last))
            last, looked = listed, looked + 1
            row = self._rows.get(listed, partial(self._read, listed))
            if wanted in row.id.casefold() or wanted in row.title.casefold():
                found.append(self._now(row, listed.key))
        return Page(found, None)

    def _read(self, listed: ConversationInfo) -> Row:
        try:
            return _row(listed, Record(self._store, listed.key, "main", parse))
        except CorruptError:  # the others are still worth seeing
            return _row(listed, None)

    def _now(self, row: Row, key: Key) -> Row:
        """With what changes and leaves no event."""
        held = self._store.leases(key, time.time()) if isinstance(self._store, Leases) else ()
        if not any(lease.name == "compaction:main" for lease in held):
            return row
        return msgspec.structs.replace(row, status="compacting")


def _row(listed: ConversationInfo, record: Record | None) -> Row:
    live = record.live if record is not None else None
    parent = listed.parent and Parent(listed.parent.conversation, listed.fork_at - 1)
    said, shown = (live.state.total, live.tokens) if live else (0, 0)
    return Row(
        id=listed.key.conversation,
        owner=listed.key.owner,
        title=_title(record) if record else listed.key.conversation,
        model=live.state.model if live else None,
        created=datetime.fromtimestamp(listed.created, UTC),
        updated=_updated(record) if record else None,
        messages=live.state.index if live else 0,
        events=live.state.next if live else listed.next,
        tokens_said=said,
        tokens_shown=shown,
        saved=round(max(0.0, 1 - shown / said), 4) if said else 0.0,
        edits=sum(item.edit is not None for item in live.items) if live else 0,
        compactions=live.state.round if live else 0,
        status="idle",
        parent=parent,
    )


def _title(record: Record) -> str:
    state = record.live.state
    if state.title:
        return state.title
    words = " ".join(record.message(state.task).text.split()) if state.task else ""
    return f"{words[: GIST_CHARS - 1]}…" if len(words) > GIST_CHARS else words or record.key.conversation


def _updated(record: Record) -> datetime | None:
    """When the newest event happened, as far as it can be known."""
    event = record.event(record.live.state.next - 1)
    return None if isinstance(event, Unknown) else datetime.fromtimestamp(event.time, UTC)


def _cursor(listed: ConversationInfo) -> str:
    return urlsafe_b64encode(codec.dumps([listed.created, *listed.key])).decode()


def _after(rows: Iterator[ConversationInfo], cursor: str | None) -> Iterator[ConversationInfo]:
    """Those after the one that a cursor names, or after its time, should it be gone."""
    if cursor is None:
        return rows
    try:
        created, *key = msgspec.json.decode(urlsafe_b64decode(cursor), type=tuple[float, str, str])
    except ValueError:
        raise SettingError("cursor", "is none that a page gave as `next`; leave it out to begin") from None
    ahead = dropwhile(
        lambda row: row.created > created or (row.created == created and row.key != Key(*key)), rows
    )
    return (row for row in ahead if row.key != Key(*key))
