"""Compaction on demand: waits for the summarizer, then compacts."""

from collections.abc import Sequence
from datetime import UTC, datetime
from threading import Lock

from refold.core.errors import ConflictError
from refold.core.event import Replaced
from refold.core.message import Message
from refold.core.plan import CompactionRequest
from refold.session.fit import Fitter
from refold.session.notify import Notifier
from refold.session.results import CompactionResult, Compactions
from refold.summaries.lease import CompactionLease

LEASE_S = 60.0
"""The lease of a process that died expires after so many seconds."""


class Compaction:
    """Compacts one view on demand, for one session."""

    def __init__(self, fitter: Fitter, lease: CompactionLease, lock: Notifier) -> None:
        self.fitter = fitter
        self.reducer = fitter.reducer
        self.record = fitter.record
        self._lease = lease
        self._lock = lock
        self._one_at_a_time = Lock()
        """For the threads of this session; other sessions are kept out by the lease."""

    def run(self, order: CompactionRequest, dry_run: bool) -> CompactionResult:
        """With `dry_run` nothing is changed and no model is called.

        Waits for another compaction of the view, at most `summarizer.wait_s` if it is another session's. If
        that leaves nothing to do, returns its result.
        """
        if dry_run:
            with self._lock:
                self.record.catch_up()
                return self._result(self._planned(order), order)
        with self._lock:
            self.record.catch_up()
            round = self.record.live.state.round
        with self._one_at_a_time:
            self._lease.wait_for_others(self.reducer.settings.summarizer.wait_s)
            with self._lock:
                self.record.catch_up()
                if self.record.live.state.round > round and not self._planned(order):
                    return self._result(self._newest_round(), order)
            try:
                self._wait_for_summaries(order)
                with self._lock:
                    self.record.catch_up()
                    edits = [] if self._has_nothing_to_do else self.fitter.compact(order)
                    if not edits and self.record.live.state.round > round:
                        edits = self._newest_round()
                    return self._result(edits, order)
            finally:
                self._lease.end()  # not before the commit: another session would write the same summary

    def run_for_worker(self, order: CompactionRequest, round: int) -> CompactionResult:
        """Compacts for a worker, unless another process has compacted the view or is compacting it.

        Raises:
            ConflictError: another process has compacted the view, or is compacting it.
        """
        lease = self._lease.acquire(LEASE_S)
        if lease is None:
            raise ConflictError("Another process is compacting the view")
        try:
            self._wait_for_summaries(order)
            with self._lock:
                self.record.catch_up()
                if self.record.live.state.round + 1 != round:
                    raise ConflictError("The view was compacted meanwhile")
                edits = [] if self._has_nothing_to_do else self.fitter.compact(order, lease)
                return self._result(edits, order)
        finally:
            self._lease.release(lease)

    def _planned(self, order: CompactionRequest) -> list[Replaced]:
        return [] if self._has_nothing_to_do else self.fitter.planned(order)

    def _newest_round(self) -> list[Replaced]:
        """The edits of the newest compaction, of any process."""
        newest, found = self.record.live.state.round, list[Replaced]()
        for at in range(self.record.live.state.compacted or 0, -1, -1):
            event = self.record.event(at)
            if not isinstance(event, Replaced) or event.view != self.record.view or event.round != newest:
                break
            found.append(event)
        return found[::-1]

    def _result(self, edits: Sequence[Replaced], order: CompactionRequest) -> CompactionResult:
        saved = sum(edit.tokens[0] - edit.tokens[1] for edit in edits)
        is_planned = bool(edits) and edits[-1].at >= self.record.live.state.next
        left = self.record.live.tokens - (saved if is_planned else 0)
        missed_by = 0 if order.target is None else max(0, self.fitter.tokens(left) - order.target)
        if not edits:
            return CompactionResult((), (0, 0), 0, self.record.live.state.round, missed_by)
        new = tuple(one for edit in edits for one in edit.shown if isinstance(one, Message))
        first, last = min(edit.span.start for edit in edits), max(edit.span.end for edit in edits)
        range = (self.record.index_from(first), self.record.index_from(last))
        return CompactionResult(new, range, saved, edits[0].round, missed_by)

    @property
    def summary(self) -> Compactions:
        """The compactions so far, and whether one is running."""
        state = self.record.live.state
        last = self.record.event(state.compacted) if state.compacted is not None else None
        when = datetime.fromtimestamp(last.time, UTC) if isinstance(last, Replaced) else None
        return Compactions(state.round, when, self._lease.is_held)

    @property
    def _has_nothing_to_do(self) -> bool:
        return self.reducer.settings.is_off or not self.record.live.state.next

    def _wait_for_summaries(self, order: CompactionRequest) -> None:
        """Waits for a running summary job, then for the summaries of this compaction; the lock is free."""
        summaries = self.reducer.summaries
        if summaries is None:
            return
        if summaries.job is not None:
            summaries.job.wait()
        with self._lock:
            self.record.catch_up()
            job = None if self._has_nothing_to_do else self.fitter.start_on_demand(order)
        if job is not None:
            job.wait()
