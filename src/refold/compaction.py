"""Compaction on demand: what models write for it is waited for, and then it is done."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from refold.answers import CompactionResult, Compactions
from refold.core.errors import ConflictError
from refold.core.event import Replaced
from refold.core.message import Message
from refold.core.plan import CompactionRequest
from refold.fitter import Fitter
from refold.notify import Notifier
from refold.stores.store import Leases

LEASE_S = 60.0
"""After so many seconds a compaction whose process died is nobody's."""


class Compaction:
    """Of one view, for one session."""

    def __init__(self, fitter: Fitter, holder: str, lock: Notifier) -> None:
        self.fitter, self.reducer, self.record = fitter, fitter.reducer, fitter.record
        self._holder, self._lock = holder, lock
        self._name = f"compaction:{self.record.view}"

    def carry_out(self, order: CompactionRequest, dry_run: bool) -> CompactionResult:
        """With `dry_run` nothing is changed and nobody is asked: the result is what would be done by rule."""
        if not dry_run:
            self._wait(order)
        with self._lock:
            self.record.catch_up()
            edits = list[Replaced]()
            if dry_run or not self._has_nothing_to_do:
                with self._announced(not dry_run):
                    edits = [] if self._has_nothing_to_do else self.fitter.compact(order, dry_run)
            return self._result(edits)

    def fenced(self, order: CompactionRequest, round: int) -> CompactionResult:
        """The same for a round and for whoever may be overtaken: then nothing is changed.

        Raises:
            ConflictError: that round was, or somebody else is at it.
        """
        store, key = self.record.store, self.record.key
        assert isinstance(store, Leases)
        lease = store.acquire(key, self._name, self._holder, time.time(), LEASE_S)
        if lease is None:
            raise ConflictError("Somebody else compacts it now")
        try:
            self._wait(order)
            with self._lock:
                self.record.catch_up()
                if self.record.live.state.round + 1 != round:
                    raise ConflictError("It was compacted meanwhile")
                return self._result(
                    [] if self._has_nothing_to_do else self.fitter.compact(order, False, lease)
                )
        finally:
            store.release(key, lease)

    def _result(self, edits: Sequence[Replaced]) -> CompactionResult:
        if not edits:
            return CompactionResult((), (0, 0), 0, self.record.live.state.round)
        new = tuple(one for edit in edits for one in edit.shown if isinstance(one, Message))
        first, last = min(edit.span.start for edit in edits), max(edit.span.end for edit in edits)
        range = (self.record.index_from(first), self.record.index_from(last))
        saved = sum(edit.tokens[0] - edit.tokens[1] for edit in edits)
        return CompactionResult(new, range, saved, edits[0].round)

    @property
    def known(self) -> Compactions:
        """Of those that were, and whether somebody is at it now."""
        store, state = self.record.store, self.record.live.state
        last = self.record.event(state.compacted) if state.compacted is not None else None
        when = datetime.fromtimestamp(last.time, UTC) if isinstance(last, Replaced) else None
        held = store.leases(self.record.key, time.time()) if isinstance(store, Leases) else ()
        return Compactions(state.round, when, any(lease.name == self._name for lease in held))

    @property
    def _has_nothing_to_do(self) -> bool:
        return self.reducer.settings.is_off or not self.record.live.state.next

    def _wait(self, order: CompactionRequest) -> None:
        """For what was begun before, and for what is ordered now; the lock is free meanwhile."""
        summaries = self.reducer.summaries
        if summaries is None:
            return
        if summaries.job is not None:
            summaries.job.wait()
        with self._lock:
            self.record.catch_up()
            job = None if self._has_nothing_to_do else self.fitter.ordered(order)
        if job is not None:
            job.wait()

    @contextmanager
    def _announced(self, is_wanted: bool) -> Iterator[None]:
        """Others see that somebody is at it. An edit needs no leave: the record tells who was faster."""
        store, key, summaries = self.record.store, self.record.key, self.reducer.summaries
        is_mine = isinstance(store, Leases) and summaries is not None and summaries.desk.turn.is_mine
        if not is_wanted or not isinstance(store, Leases) or is_mine:  # or else it ends with the job
            yield
            return
        lease = store.acquire(key, self._name, self._holder, time.time(), LEASE_S)
        try:
            yield
        finally:  # it runs out, but stays known: what was written under it may still be used
            if lease is not None:
                store.acquire(key, self._name, self._holder, time.time(), 0.0)
