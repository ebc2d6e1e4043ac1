"""Compaction on demand: waits for the summarizer, then compacts."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from refold.core.errors import ConflictError
from refold.core.event import Replaced
from refold.core.message import Message
from refold.core.plan import CompactionRequest
from refold.session.ahead import start_summaries
from refold.session.conversation import Conversation
from refold.session.reduce import ReduceRequest, compact_view, compaction_edits
from refold.session.results import CompactionResult, Compactions
from refold.stores.store import Lease

LEASE_S = 60.0
"""The lease of a process that died expires after so many seconds."""


def compact(chat: Conversation, order: CompactionRequest, *, dry_run: bool = False) -> CompactionResult:
    """Compacts a view. With `dry_run` nothing is changed and no model is called.

    Waits for another compaction of the view, at most `summarizer.wait_s` if it is another session's. If
    that leaves nothing to do, returns its result.
    """
    with chat.lock:
        chat.record.catch_up()
        if dry_run:
            return _result(chat, _planned(chat, order), order)
        round = chat.record.live.state.round
    with chat.one_at_a_time:
        chat.lease.wait_for_others(chat.settings.summarizer.wait_s)
        with chat.lock:
            chat.record.catch_up()
            if chat.record.live.state.round > round and not _planned(chat, order):
                return _result(chat, _newest_round(chat), order)
        try:
            _wait_for_summaries(chat, order)
            with chat.lock:
                chat.record.catch_up()
                edits = _compact(chat, order)
                if not edits and chat.record.live.state.round > round:
                    edits = _newest_round(chat)
                return _result(chat, edits, order)
        finally:
            chat.lease.end()  # not before the commit: another session would write the same summary


def compact_for_worker(chat: Conversation, order: CompactionRequest, round: int) -> CompactionResult:
    """Compacts for a worker.

    Raises:
        ConflictError: another process has compacted the view, or is compacting it.
    """
    lease = chat.lease.acquire(LEASE_S)
    if lease is None:
        raise ConflictError("Another process is compacting the view")
    try:
        _wait_for_summaries(chat, order)
        with chat.lock:
            chat.record.catch_up()
            if chat.record.live.state.round + 1 != round:
                raise ConflictError("The view was compacted meanwhile")
            return _result(chat, _compact(chat, order, lease), order)
    finally:
        chat.lease.release(lease)


def compactions(chat: Conversation) -> Compactions:
    """The compactions so far, and whether one is running."""
    state = chat.record.live.state
    last = chat.record.event(state.compacted) if state.compacted is not None else None
    when = datetime.fromtimestamp(last.time, UTC) if isinstance(last, Replaced) else None
    return Compactions(state.round, when, chat.lease.is_held)


def _compact(chat: Conversation, order: CompactionRequest, lease: Lease | None = None) -> list[Replaced]:
    if _has_nothing_to_do(chat):
        return []
    chat.begin_compaction("on demand", chat.measure(chat.extras)[1])
    shown = chat.shown
    edits = list[Replaced]()
    try:
        edits = compact_view(chat, _request(chat, order, lease))
    finally:
        chat.end_compaction(edits, shown, chat.measure(chat.extras)[1])
    return edits


def _planned(chat: Conversation, order: CompactionRequest) -> list[Replaced]:
    """The edits without a model."""
    return [] if _has_nothing_to_do(chat) else compaction_edits(chat, _request(chat, order))


def _has_nothing_to_do(chat: Conversation) -> bool:
    return chat.is_off or not chat.record.live.state.next


def _request(chat: Conversation, order: CompactionRequest, lease: Lease | None = None) -> ReduceRequest:
    """The target of an order is of messages alone, without tools and separate system text."""
    budget = chat.budget(unsent=chat.extras.renderer.unsent())
    if order.target is not None:
        budget = msgspec.structs.replace(budget, max_tokens=order.target)
    return ReduceRequest(budget, chat.override, order, lease=lease)


def _newest_round(chat: Conversation) -> list[Replaced]:
    """The edits of the newest compaction, of any process."""
    record = chat.record
    found = list[Replaced]()
    for at in range(record.live.state.compacted or 0, -1, -1):
        event = record.event(at)
        if not isinstance(event, Replaced) or event.view != record.view:
            break
        if event.round != record.live.state.round:
            break
        found.append(event)
    return found[::-1]


def _result(chat: Conversation, edits: Sequence[Replaced], order: CompactionRequest) -> CompactionResult:
    live = chat.record.live
    saved = sum(edit.tokens[0] - edit.tokens[1] for edit in edits)
    is_planned = bool(edits) and edits[-1].at >= live.state.next
    left = live.tokens - (saved if is_planned else 0)
    missed_by = 0
    if order.target is not None:
        missed_by = max(0, chat.estimate(left - chat.extras.renderer.unsent()) - order.target)
    if not edits:
        return CompactionResult((), (0, 0), 0, live.state.round, missed_by)
    new = tuple(one for edit in edits for one in edit.shown if isinstance(one, Message))
    first = chat.record.index_from(min(edit.span.start for edit in edits))
    last = chat.record.index_from(max(edit.span.end for edit in edits))
    return CompactionResult(new, (first, last), saved, edits[0].round, missed_by)


def _wait_for_summaries(chat: Conversation, order: CompactionRequest) -> None:
    """Waits for a running summary job, then for the summaries of this compaction; the lock is free."""
    summaries = chat.summaries
    if summaries is None:
        return
    if summaries.job is not None:
        summaries.job.wait()
    with chat.lock:
        chat.record.catch_up()
        if _has_nothing_to_do(chat):
            return
        summaries.discard_ready()
        if order.strategy == "sliding-window":
            return
        chat.begin_compaction("on demand", chat.measure(chat.extras)[1])
        job = start_summaries(chat, summaries, _request(chat, order).budget, order)
    job.wait()
