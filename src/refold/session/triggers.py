"""Whether to compact: a trigger fired, or a rewrite saves money at the provider's cache."""

import time

import msgspec

from refold.config.settings import Economy
from refold.core.budget import SOON, WINDOW, Budget
from refold.core.cache_cost import CacheTerms, batch, stake
from refold.core.event import Said
from refold.core.plan import must_stay
from refold.models.limits import same_model
from refold.session.conversation import Conversation, FitRequest, RequestExtras
from refold.session.reduce import ReduceRequest, compaction_edits
from refold.session.results import Decision, Overflow

COLD_BATCH = 0.25
"""With a cold cache, a batch of this share of `keep_tokens` is enough."""


class Trigger(msgspec.Struct, frozen=True):
    """True if a trigger fired and nothing keeps it from compacting."""

    fired: tuple[str, ...]
    budget: Budget
    """Of the compaction."""
    obstacle: str = ""
    """Why nothing is compacted although a trigger fired."""
    least: int = 0
    """Tokens of what must be shown, if a trigger fired."""

    def __bool__(self) -> bool:
        return bool(self.fired) and not self.obstacle


def check_triggers(chat: Conversation, budget: Budget, tokens: int) -> Trigger:
    """Which triggers a request of so many tokens sets off, and whether they act."""
    fired = budget.fired(tokens, *_counts_for(chat, budget))
    if not fired:
        return Trigger((), budget)
    live = chat.record.live
    since = live.state.compacted
    is_newer = since is None or (bool(live.items) and live.items[-1].span.end > since)
    acting = fired
    if not is_newer or live.state.index <= chat.messages_at_compaction:
        acting = tuple(name for name in fired if name == WINDOW)  # the others act once on the same messages
    least = chat.least(budget)
    due = budget.compacting(acting, least)
    obstacle = ""
    if not acting:
        obstacle = "nothing was added since the last compaction"
    elif not due.keeps_recent and tokens <= budget.target and tokens < budget.threshold:
        obstacle = f"{tokens:,} tokens are within the target of {budget.target:,}"
    elif tokens < due.due:
        obstacle = f"{least:,} of {tokens:,} tokens cannot be hidden; the next compaction is at {due.due:,}"
    return Trigger(fired, due, obstacle, least)


def nearing(chat: Conversation, budget: Budget, tokens: int) -> Budget | None:
    """The budget of the next compaction, if it is near."""
    near = budget.nearing(tokens, *_counts_for(chat, budget))
    if not near:
        return None
    coming = budget.compacting(near, chat.least(budget))
    return coming.ahead(tokens) if tokens >= SOON * coming.due else None


def _counts_for(chat: Conversation, budget: Budget) -> tuple[int, int]:
    """Turns and messages since the last compaction; zeros if no trigger counts them."""
    if budget.turn_threshold is None and budget.message_threshold is None:
        return 0, 0
    return counts_since_compaction(chat)


def counts_since_compaction(chat: Conversation) -> tuple[int, int]:
    """Turns and messages in the view since the last compaction."""
    since = chat.record.live.state.compacted
    turns = 0
    messages = 0
    summaries = 0  # those that the last edit shows count as one message
    for item in chat.record.live.items:
        for line in item.lines:
            if line.recalled:
                continue
            if since is None or line.at > since:
                turns += line.asks
                messages += 1
            elif line.at == since:
                summaries = 1
    return turns, messages + summaries


def target_obstacle(chat: Conversation, trigger: Trigger) -> str:
    """What keeps a compaction from making the view smaller."""
    if trigger.budget.keeps_recent:
        recent = chat.settings.compaction.keep_recent
        return f"nothing that can be hidden is older than the newest {recent} messages"
    view = chat.record.live.freeze()
    must = {line.at for line in must_stay(view)}
    newest = [line for line in view.lines if line.step >= view.step - 1 and line.at not in must]
    newest_tokens = chat.meter.estimate(sum(line.tokens for line in newest), None)
    if newest_tokens > trigger.least:
        return f"the newest step alone takes {newest_tokens:,} tokens"
    return (
        "system text, tools, the task, the latest user message and pinned messages"
        f" take {trigger.least:,} tokens and cannot be hidden"
    )


def check_overflow(chat: Conversation, request: FitRequest) -> Overflow:
    budget, current = chat.measure(chat.extras_of(request, reuse=True))
    return Overflow(
        is_overflow=current > budget.room,
        is_approaching=current >= 0.9 * budget.room,
        current_tokens=current,
        available_tokens=max(0, budget.room - current),
        limit=budget.window,
        threshold=budget.threshold,
        output_reserve=budget.output,
    )


def decide(chat: Conversation, request: FitRequest) -> Decision:
    """Whether the next `fit` compacts the view, without a model and without changing anything."""
    budget, current = chat.measure(chat.extras_of(request, reuse=True))
    turns, messages = counts_since_compaction(chat)
    if chat.is_off or chat.override.off:
        return Decision((), current, turns, messages)
    trigger = check_triggers(chat, budget, current)
    obstacle = trigger.obstacle
    if trigger and not compaction_edits(chat, ReduceRequest(trigger.budget)):
        obstacle = target_obstacle(chat, trigger)
    return Decision(trigger.fired, current, turns, messages, obstacle)


# The provider's cache


def forced_terms(chat: Conversation, budget: Budget) -> CacheTerms | None:
    """For an edit that is made whatever it costs; None if no prices are known."""
    prices = chat.meter.limits.cached
    if prices is None:
        return None
    return CacheTerms(prices, max(1, chat.record.live.state.step), is_cold(chat), budget.ratio)


def proposal(
    chat: Conversation, extras: RequestExtras, budget: Budget, tokens: int
) -> tuple[Budget, CacheTerms] | None:
    """The target for a view of so many tokens and the terms of the edit; None if it cannot pay."""
    settings = chat.economy
    prices = chat.meter.limits.cached if settings else None
    live = chat.record.live
    state = live.state
    if settings is None or prices is None or not state.step:
        return None
    keep = settings.keep_tokens
    least = chat.least(budget)
    cold = is_cold(chat)
    requested_at = chat.requested.get(extras.text, 0.0)
    # what is cached for other tools may be needed again
    is_new = cold or (bool(chat.requested) and time.time() - requested_at > settings.cache_s)
    if tokens < least or (tokens < chat.declined and not is_new):
        return None
    waited = batch(prices, keep, state.total * budget.ratio / state.step)
    trigger = least + keep + int(COLD_BATCH * keep if is_new else waited)
    if tokens < trigger or trigger >= budget.trigger:  # otherwise the window requires it first
        return None
    calls = state.step  # the next compaction is expected after as many: an edit must pay before that
    if not is_new and state.compacted is not None:
        lines = [line for item in live.items for line in item.lines]
        calls = sum(line.role == "assistant" and line.at > state.compacted for line in lines)
    most = stake(prices, settings.max_loss, state.total, state.carried, state.shown, state.rewritten)
    terms = CacheTerms(prices, calls, cold, budget.ratio, most)
    return budget.down_to(least + keep, trigger), terms


def is_cold(chat: Conversation) -> bool:
    """True if the cache has nothing of this view: it has expired, or the model has changed."""
    state = chat.record.live.state
    if not state.step or not same_model(state.model, chat.model):
        return True
    cache_s = (chat.economy or Economy()).cache_s
    used_at = max(chat.requested.values()) if chat.requested else _answered_at(chat)
    return time.time() - used_at > cache_s


def _answered_at(chat: Conversation) -> float:
    """The time of the newest answer in the view, of any process."""
    for item in reversed(chat.record.live.items):
        if item.edit is None and item.lines and item.lines[0].role == "assistant":
            said = chat.record.event(item.lines[0].at)
            return said.time if isinstance(said, Said) else 0.0
    return 0.0
