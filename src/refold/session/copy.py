"""Conversations from one store to another, to the byte: what is there already is not copied again, and every
entry is held against the hash chain on both sides.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from refold.core.codec import GENESIS, Link, chain
from refold.core.errors import ConflictError, CorruptError, RefoldError, StoreError
from refold.stores.store import ConversationInfo, Forks, Key, Settings, Snapshots, Store

BATCH, BATCH_BYTES = 500, 1 << 20
"""What is stored in one go: entries, and their bytes."""


class CopyResult(NamedTuple):
    """What came of one conversation."""

    key: Key
    entries: int
    """How many the other store has of it now."""
    new: int
    """How many of these were copied by this run."""
    problem: str | None = None
    """Why it is not all there, if it is not."""


def copy(
    source: Store,
    target: Store,
    rows: Sequence[ConversationInfo],
    tick: Callable[[int], None] = lambda n: None,
) -> Iterator[CopyResult]:
    """Copies conversations, listed newest first as stores do; `tick` hears of every entry that is there.

    One that cannot be copied does not keep the others from it. The oldest go first, so that the other store
    lists them alike, and a fork finds what it shares.
    """
    there = {row.key: row.next for row in target.conversations()}
    whole = set[Key]()
    for row in reversed(rows):
        entries, new, problem = there.get(row.key, 0), 0, None
        try:
            entries = _begun(source, target, row, there.get(row.key), row.parent in whole)
            tick(entries)
            for count in _copied(source, target, row.key, entries):
                entries, new = entries + count, new + count
                tick(count)
            _keep_snapshots(source, target, row.key, entries)
            whole.add(row.key)
        except RefoldError as error:
            problem = str(error)
        yield CopyResult(row.key, entries, new, problem)


def copy_settings(source: Store, target: Store) -> int:
    """When results expire, as far as it is kept in the store; how many such settings there are."""
    if not isinstance(source, Settings) or not isinstance(target, Settings):
        return 0
    for setting in source.settings():
        target.set_setting(setting)
    return len(source.settings())


def _begun(
    source: Store, target: Store, row: ConversationInfo, there: int | None, is_parent_there: bool
) -> int:
    """The place to go on from.

    Raises:
        ConflictError: the other store has another conversation of that name.
    """
    at = 0 if there is None else min(there, row.next)
    if there is None and is_parent_there and row.parent is not None and isinstance(target, Forks):
        at = row.fork_at
        target.fork(row.parent, row.key, at)
    if _digest(source, row.key, at) != _digest(target, row.key, at):
        raise ConflictError(
            f"{row.key.conversation!r} is there already and is another conversation: delete it there, or"
            " export this one and import it under another id"
        )
    return at


def _copied(source: Store, target: Store, key: Key, start: int) -> Iterator[int]:
    """How many entries were stored and read back, a batch at a time."""
    batch, size, digest = list[Link](), 0, _digest(source, key, start) or GENESIS
    after = digest
    for link in source.read(key, start):
        if link.entry.at != start or chain(digest, link.entry) != link.digest:
            raise CorruptError(f"#{start} is not what was stored there: `refold doctor` says what is damaged")
        batch.append(link)
        start, digest, size = start + 1, link.digest, size + len(link.entry.head) + len(link.entry.body)
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield _stored(target, key, batch, after)
            batch, size, after = [], 0, digest
    if batch:
        yield _stored(target, key, batch, after)


def _stored(target: Store, key: Key, batch: Sequence[Link], after: bytes) -> int:
    target.append(key, [link.entry for link in batch], after=after)
    first = batch[0].entry.at
    if list(target.read(key, first, first + len(batch))) != batch:
        raise CorruptError(f"#{first} and what follows does not come back as it was stored")
    return len(batch)


def _keep_snapshots(source: Store, target: Store, key: Key, entries: int) -> None:
    """Only caches: chained to the entry before them, they are as good in the other store."""
    if isinstance(source, Snapshots) and isinstance(target, Snapshots):
        with suppress(StoreError):
            for view, snapshot in source.saved(key).items():
                if snapshot.at <= entries:
                    target.save(key, view, snapshot)


def _digest(store: Store, key: Key, before: int) -> bytes | None:
    link = next(store.read(key, before - 1, before), None) if before else None
    return GENESIS if not before else None if link is None else link.digest
