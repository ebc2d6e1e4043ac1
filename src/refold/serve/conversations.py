"""The conversations of a store, for reading: lists, and inspectors that stay open until they are not used."""

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import dropwhile
from threading import Lock

import msgspec

from refold.core import codec
from refold.core.errors import NotFoundError, SettingError
from refold.session.inspect import Inspector, conversation_row
from refold.session.results import ConversationRow
from refold.stores.shelf import Shelf
from refold.stores.store import ConversationInfo, Key, Store

CACHED_ROWS = 10_000
CACHED_INSPECTORS = 64
MAX_SCANNED = 2_000
"""Conversations that one request scans for a title; the next page continues from there."""


class Conversations:
    def __init__(self, store: Store) -> None:
        self.store = store
        self._row_of = lru_cache(CACHED_ROWS)(partial(conversation_row, store))
        self._opened = lru_cache(CACHED_INSPECTORS)(lambda key: (Inspector.open(store, key), Lock()))
        self._listed = lru_cache(CACHED_ROWS)(lambda key, first_digest: self.listed(key)[0])

    @contextmanager
    def inspecting(self, key: Key) -> Iterator[Inspector]:
        """A conversation as it is now, for this thread alone.

        Raises:
            NotFoundError: there is no such conversation.
        """
        inspector, lock = self._opened(key)
        with lock:
            inspector.refresh()
            if not inspector.state.next:
                raise NotFoundError(f"There is no conversation {key.conversation!r}")
            yield inspector

    def row(self, inspector: Inspector) -> ConversationRow:
        listed = self._listed(inspector.key, inspector.first_digest)
        return self._with_status(inspector.conversation(listed), inspector.key)

    def listed(self, key: Key) -> tuple[ConversationInfo, list[str]]:
        """The conversation as the store lists it, and the ids of its forks."""
        rows = list(self.store.conversations(key.owner))
        forks = [row.key.conversation for row in rows if row.parent == key]
        return next((row for row in rows if row.key == key), ConversationInfo(key, time.time(), 0)), forks

    def page(
        self, owner: str | None, limit: int, cursor: str | None = None, text: str | None = None
    ) -> tuple[list[ConversationRow], str | None]:
        """Conversations of one owner, or of all, the newest first; and the cursor of the next page.

        `text` is a part of their ids or titles.
        """
        found: list[ConversationRow] = []
        wanted = (text or "").casefold()
        last: ConversationInfo | None = None
        for scanned, listed in enumerate(_after(self.store.conversations(owner), cursor)):
            if last is not None and (len(found) == limit or scanned == MAX_SCANNED):
                return found, urlsafe_b64encode(codec.dumps([last.created, *last.key])).decode()
            last = listed
            row = self._row_of(listed)
            if wanted in row.id.casefold() or wanted in row.title.casefold():
                found.append(self._with_status(row, listed.key))
        return found, None

    def _with_status(self, row: ConversationRow, key: Key) -> ConversationRow:
        """The status is not cached: a lease leaves no event."""
        leases = self.store.leases(key, time.time()) if isinstance(self.store, Shelf) else ()
        if not any(lease.name == "compaction:main" for lease in leases):
            return row
        return msgspec.structs.replace(row, status="compacting")


def _after(rows: Iterator[ConversationInfo], cursor: str | None) -> Iterator[ConversationInfo]:
    """The rows after the one that a cursor names, or after its time if it was erased."""
    if cursor is None:
        return rows
    try:
        created, *names = msgspec.json.decode(urlsafe_b64decode(cursor), type=tuple[float, str, str])
    except ValueError:
        raise SettingError("cursor", "is not the `next` of a page; omit it to start at the newest") from None
    key = Key(*names)

    def is_before(row: ConversationInfo) -> bool:
        return row.created > created or (row.created == created and row.key != key)

    return (row for row in dropwhile(is_before, rows) if row.key != key)
