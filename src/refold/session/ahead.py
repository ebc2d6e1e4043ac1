"""Summaries by models, started before a compaction uses them: the same plan, computed early."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from refold.config.config import DEFAULT
from refold.core.budget import Budget
from refold.core.event import Said
from refold.core.plan import CompactionRequest
from refold.session.conversation import Conversation, FitRequest
from refold.session.results import kind_of
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
    messages = _due_for_summary(chat, summaries, chat.record.live.state.step + 1, override)
    budget, tokens = chat.measure(chat.extras_of(request))
    trigger = check_triggers(chat, budget, tokens)
    is_due = bool(trigger) and summaries.ready(chat.record.live.freeze()) is None
    if is_due:
        chat.begin_compaction(", ".join(trigger.fired), tokens)
    elif not messages:
        return None
    under_way = summaries.running if is_due else summaries.job
    if under_way is not None:
        return under_way
    is_due = is_due and not summaries.was_tried
    return _prepare(chat, summaries, messages, trigger.budget if is_due else None, is_due)


def prepare_soon(
    chat: Conversation, summaries: "SummaryWriter", budget: Budget, tokens: int, override: Override
) -> None:
    """Starts summaries for a compaction that is near, and of messages that expire in the next step."""
    if chat.is_one_off or summaries.job is not None:
        return
    messages = _due_for_summary(chat, summaries, chat.record.live.state.step + 2, override)
    ahead = None
    if not summaries.was_tried and summaries.running is None:
        ahead = nearing(chat, budget, tokens)
    if ahead is not None and summaries.ready(chat.record.live.freeze()) is not None:
        ahead = None
    _prepare(chat, summaries, messages, ahead)


def _due_for_summary(
    chat: Conversation, summaries: "SummaryWriter", step: int, override: Override
) -> "list[MessageToSummarize]":
    """Messages that expire in a step and are summarized by a model."""
    rules = (*override.rules, *chat.expiries.values())
    if not any(rule.compact_mode == "ai-summary" for rule in rules):
        return []
    from refold.policies.expire import Expire, batches, length_of
    from refold.summaries.write import MessageToSummarize

    live = chat.record.live
    summaries.reset_if_reopened()
    expire = Expire(chat.expiries, override.tools)
    fixed = {*live.kept, live.state.latest}
    together = batches([line for item in live.items for line in item.lines])
    whole = [item.lines[0] for item in live.items if item.edit is None and item.lines]
    was_tried = summaries.tried - summaries.pending
    found = list[MessageToSummarize]()
    for line in expire.due(whole, step, together):
        rule = expire.rule(line, together)
        length = length_of(rule)
        if rule.compact_mode != "ai-summary" or rule.mode not in (None, "compact") or line.at in fixed:
            continue
        message = chat.record.message(line)
        if (line.at, rule.prompt, length) in was_tried or len(message.text) <= length:
            continue
        said = chat.record.event(line.place)
        kind = kind_of(said) if isinstance(said, Said) else None
        own = line.expiry.prompt if line.expiry else None
        one = MessageToSummarize(
            line.at,
            message,
            tool=line.tools[0] if line.tools else line.role,
            prompt=rule.prompt,
            length=length,
            is_own=own is not None and own == rule.prompt,
            kind=kind or "",
            step=line.step,
        )
        found.append(one)
    return found


def _prepare(
    chat: Conversation,
    summaries: "SummaryWriter",
    messages: "Sequence[MessageToSummarize]",
    ahead: Budget | None,
    is_due: bool = False,
) -> "PendingWork | None":
    """Starts the summaries of a compaction, by a worker if that is configured, and those of messages."""
    handed = None
    if ahead is not None and chat.settings.summarizer.executor == "worker":
        from refold.summaries.queue import CompactionJob

        record = chat.record
        job = CompactionJob(
            *record.key,
            record.view,
            record.live.state.round + 1,
            agent=chat.agent,
            model=chat.model,
            handles=chat.handles,
            budget=ahead,
        )
        handed = summaries.enqueue(job, is_due=is_due)
    here = ahead if handed is None else None
    if here is None and not messages:
        return handed
    return start_summaries(chat, summaries, here, messages=messages, is_due=is_due)


def start_summaries(
    chat: Conversation,
    summaries: "SummaryWriter",
    budget: Budget | None,
    order: CompactionRequest | None = None,
    *,
    messages: "Sequence[MessageToSummarize]" = (),
    is_due: bool = False,
) -> "BackgroundJob":
    """Has models write summaries in the background, in this process: of messages, and of a compaction.

    For a compaction on demand (`order`), the caller ends the lease.
    """
    from refold.config import ladder
    from refold.summaries.prepare import SummaryPlan

    policy = None
    if budget is not None:
        policy = ladder.compaction_policy(chat.settings, chat.policies, budget, order)
    frozen = chat.record.live.freeze()
    chat.record.load(frozen.lines)
    view = msgspec.structs.replace(chat.record.with_words(frozen), handles=chat.handles)
    plan = SummaryPlan(
        view=view,
        window=chat.meter.limits.window,
        count=chat.count,
        messages=messages,
        policy=policy,
        budget=budget or Budget(),
        is_due=is_due,
        focus=order.focus if order else None,
        lease_wait_s=chat.settings.summarizer.wait_s if order else 0.0,
        keeps_lease=order is not None,
    )
    return summaries.start(plan)
