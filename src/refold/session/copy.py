"""Copies conversations from one store to another, byte for byte.

What the target already has is not copied again, and every entry is verified against the hash chain.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from refold.core.codec import GENESIS, Link, chain
from refold.core.errors import ConflictError, CorruptError, RefoldError, StoreError
from refold.stores.shelf import Shelf
from refold.stores.store import ConversationInfo, Forks, Key, Store

BATCH_ENTRIES = 500
BATCH_BYTES = 1 << 20


class CopyResult(msgspec.Struct, frozen=True):
    """The outcome for one conversation."""

    owner: str
    conversation: str
    events: int
    """In the target now."""
    new: int
    """Copied by this run."""
    problem: str | None = None
    """Why the copy is not complete."""


def copy(
    source: Store,
    target: Store,
    rows: Sequence[ConversationInfo],
    tick: Callable[[int], None] = lambda n: None,
) -> Iterator[CopyResult]:
    """Copies conversations, listed newest first as stores do; `tick` counts the entries in the target.

    If one cannot be copied, the others still are. The oldest go first, so that the target lists them in the
    same order and a fork finds its parent.
    """
    existing = {row.key: row.next for row in target.conversations()}
    complete: set[Key] = set()
    for row in reversed(rows):
        entries = existing.get(row.key, 0)
        new = 0
        problem = None
        try:
            entries = _start(source, target, row, existing.get(row.key), row.parent in complete)
            tick(entries)
            for count in _copy_entries(source, target, row.key, entries):
                entries += count
                new += count
                tick(count)
            copy_snapshots(source, row.key, target, row.key, entries)
            complete.add(row.key)
        except RefoldError as error:
            problem = str(error)
        yield CopyResult(*row.key, entries, new, problem)


def copy_settings(source: Store, target: Store) -> int:
    """Copies the settings of tools that are kept in the store; returns how many there are."""
    if not isinstance(source, Shelf) or not isinstance(target, Shelf):
        return 0
    for setting in source.settings():
        target.set_setting(setting)
    return len(source.settings())


def _start(
    source: Store, target: Store, row: ConversationInfo, existing: int | None, has_parent: bool
) -> int:
    """The place from which entries are missing in the target.

    Raises:
        ConflictError: the target has a different conversation with this id.
    """
    at = 0 if existing is None else min(existing, row.next)
    if existing is None and has_parent and row.parent is not None and isinstance(target, Forks):
        at = row.fork_at
        target.fork(row.parent, row.key, at)
    if _digest(source, row.key, at) != _digest(target, row.key, at):
        raise ConflictError(
            f"The target already has a different conversation {row.key.conversation!r}: delete it there, or"
            " export this one and import it under another id"
        )
    return at


def _copy_entries(source: Store, target: Store, key: Key, start: int) -> Iterator[int]:
    """Copies entries in batches; yields how many were stored and read back."""
    digest = _digest(source, key, start) or GENESIS
    after = digest
    batch: list[Link] = []
    size = 0
    for link in source.read(key, start):
        if link.entry.at != start or chain(digest, link.entry) != link.digest:
            raise CorruptError(f"Event #{start} is damaged in the source; `refold doctor` shows the details")
        batch.append(link)
        start += 1
        digest = link.digest
        size += len(link.entry.head) + len(link.entry.body)
        if len(batch) == BATCH_ENTRIES or size >= BATCH_BYTES:
            yield _stored(target, key, batch, after)
            batch = []
            size = 0
            after = digest
    if batch:
        yield _stored(target, key, batch, after)


def _stored(target: Store, key: Key, batch: Sequence[Link], after: bytes) -> int:
    target.append(key, [link.entry for link in batch], after=after)
    first = batch[0].entry.at
    if list(target.read(key, first, first + len(batch))) != batch:
        raise CorruptError(f"The target does not return event #{first} and later ones as they were stored")
    return len(batch)


def copy_snapshots(source: Store, key: Key, target: Store, new: Key, entries: int) -> None:
    """Copies the snapshots of the first entries: each is chained to them, and so valid wherever they are."""
    if isinstance(source, Shelf) and isinstance(target, Shelf):
        with suppress(StoreError):  # they are only caches
            for view, snapshot in source.saved(key).items():
                if snapshot.at <= entries:
                    target.save(new, view, snapshot)


def _digest(store: Store, key: Key, before: int) -> bytes | None:
    if not before:
        return GENESIS
    link = next(store.read(key, before - 1, before), None)
    return None if link is None else link.digest
