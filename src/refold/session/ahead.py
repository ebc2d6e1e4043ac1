"""Summaries by models, started before a compaction uses them: the same plan, computed early."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from refold.config.config import DEFAULT
from refold.core.budget import Budget
from refold.core.plan import CompactionRequest
from refold.session.conversation import Conversation
from refold.session.meter import FitRequest
from refold.session.reduce import due_for_summary
from refold.session.triggers import check_triggers, nearing
from refold.session.validate import Override

if TYPE_CHECKING:
    from refold.summaries.background import BackgroundJob, PendingWork
    from refold.summaries.prepare import SummaryWriter
    from refold.summaries.write import MessageToSummarize


def summary_writer(chat: Conversation, summarizer: Any) -> "SummaryWriter | None":
    """Writes the summaries of a view; None if no model and no worker is configured.

    Raises:
        SettingError: `summarizer` is not a callable or the name of a model, or there is no queue for workers.
    """
    settings = chat.settings.summarizer
    has_worker = settings.executor == "worker"
    if summarizer is None and not has_worker and not chat.config.has_summarizers(chat.agent):
        return None
    from refold.summaries.context import SummaryContext
    from refold.summaries.prepare import SummaryWriter, summarizers_of

    queue = None
    if has_worker:
        from refold.summaries.queue import queue_of

        place = chat.config.place("agents", chat.agent or DEFAULT, "summarizer", "executor")
        queue = queue_of(chat.record.store, place)
    context = SummaryContext(chat.record, chat.config, chat.agent, chat.lease)
    return SummaryWriter(context, summarizers_of(summarizer, settings.base_urls), chat.lock, queue)


def pending_summaries(chat: Conversation, request: FitRequest) -> "PendingWork | None":
    """The job that the next request should wait for, started if necessary."""
    summaries = chat.summaries
    override = request.override
    if summaries is None or chat.is_off or override.off:
        return None
    messages = due_for_summary(chat, chat.record.live.state.step + 1, override)
    budget, tokens = chat.measure(chat.extras_of(request), request.dialect or chat.dialect)
    trigger = check_triggers(chat, budget, tokens)
    due = bool(trigger) and summaries.ready(chat.record.live.freeze()) is None
    if due:
        chat.lock.begin(chat.state, ", ".join(trigger.fired), tokens)
    under_way = summaries.running if due else summaries.job
    if under_way is not None:
        return under_way if due or messages else None
    due = due and not summaries.was_tried
    return _prepare(chat, messages, trigger.budget if due else None, due) if due or messages else None


def prepare_soon(chat: Conversation, budget: Budget, tokens: int, override: Override) -> None:
    """Starts summaries for a compaction that is near, and of messages that expire in the next step."""
    summaries = chat.summaries
    if summaries is None or chat.is_one_off or summaries.job is not None:
        return
    messages = due_for_summary(chat, chat.record.live.state.step + 2, override)
    ahead = None
    if not summaries.was_tried and summaries.running is None:
        ahead = nearing(chat, budget, tokens)
    if ahead is not None and summaries.ready(chat.record.live.freeze()) is not None:
        ahead = None
    if ahead is not None or messages:
        _prepare(chat, messages, ahead)


def _prepare(
    chat: Conversation, messages: "Sequence[MessageToSummarize]", ahead: Budget | None, is_due: bool = False
) -> "PendingWork | None":
    assert chat.summaries is not None
    handed = None if ahead is None else _enqueue(chat, ahead, is_due)
    if handed is None or messages:
        return start_summaries(chat, messages, None if handed else ahead, is_due)
    return handed


def _enqueue(chat: Conversation, budget: Budget, is_due: bool) -> "PendingWork | None":
    """Has a worker write the summaries, if that is configured; None if this process must write them."""
    assert chat.summaries is not None
    if chat.settings.summarizer.executor != "worker":
        return None
    from refold.summaries.queue import CompactionJob

    record = chat.record
    job = CompactionJob(
        *record.key,
        record.view,
        record.live.state.round + 1,
        agent=chat.agent,
        model=chat.model,
        handles=chat.handles,
        budget=budget,
    )
    return chat.summaries.enqueue(job, is_due=is_due)


def start_summaries(
    chat: Conversation, messages: "Sequence[MessageToSummarize]", ahead: Budget | None, is_due: bool = False
) -> "BackgroundJob":
    """Has models write summaries in the background, in this process."""
    from refold.config import ladder
    from refold.summaries.prepare import SummaryPlan

    assert chat.summaries is not None
    plan = SummaryPlan(
        view=chat.loaded_view(),
        window=chat.meter.limits.window,
        count=chat.count,
        messages=messages,
        policy=None if ahead is None else ladder.compaction_policy(chat.settings, chat.policies, ahead),
        budget=ahead or Budget(),
        is_due=is_due,
    )
    return chat.summaries.start(plan)


def start_on_demand(chat: Conversation, order: CompactionRequest, budget: Budget) -> "BackgroundJob | None":
    """The job that a compaction on demand waits for."""
    if chat.summaries is None:
        return None
    chat.summaries.discard_ready()
    if order.strategy == "sliding-window":
        return None
    from refold.config import ladder
    from refold.summaries.prepare import SummaryPlan

    chat.lock.begin(chat.state, "on demand", chat.measure(chat.extras)[1])
    plan = SummaryPlan(
        view=chat.loaded_view(),
        window=chat.meter.limits.window,
        count=chat.count,
        policy=ladder.compaction_policy(chat.settings, chat.policies, budget, order),
        budget=budget,
        focus=order.focus,
        lease_wait_s=chat.settings.summarizer.wait_s,
        keeps_lease=True,
    )
    return chat.summaries.start(plan)
