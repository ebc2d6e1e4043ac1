"""Decides whether compacting a view now saves money, given what a rewrite costs at the provider's cache."""

import time
from typing import TYPE_CHECKING

from refold.config.settings import Economy
from refold.core import codec
from refold.core.budget import Budget
from refold.core.cache_cost import CacheTerms, batch, stake
from refold.core.event import Said
from refold.models.limits import same_model

if TYPE_CHECKING:
    from refold.session.conversation import Conversation

REGROWTH = 1.1
"""How much a view must grow before a rejected compaction is considered again."""
MAX_TOOL_SETS = 20
COLD_BATCH = 0.25
"""With a cold cache, a batch of this share of `keep_tokens` is enough."""


class CacheUse:
    """When requests were made, and with which tools and system text."""

    def __init__(self) -> None:
        self.requested: dict[bytes, float] = {}
        """The time of the last request, by the JSON of its tools and system text."""
        self.declined = 0
        """Below so many tokens, compacting is not considered again."""

    @property
    def requested_at(self) -> float:
        return max(self.requested.values(), default=0.0)

    def note_request(self, extras: bytes) -> None:
        self.requested[extras] = time.time()
        if len(self.requested) > MAX_TOOL_SETS:
            del self.requested[min(self.requested, key=self.requested.__getitem__)]

    def note_result(self, tokens: int, *, pays: bool) -> None:
        """Whether compacting a view of so many tokens saved money."""
        self.declined = 0 if pays else int(tokens * REGROWTH)


def forced_terms(chat: "Conversation", budget: Budget) -> CacheTerms | None:
    """For an edit that is made whatever it costs; None if no prices are known."""
    prices = chat.meter.limits.cached
    if prices is None:
        return None
    return CacheTerms(prices, max(1, chat.record.live.state.step), is_cold(chat), budget.ratio)


def proposal(chat: "Conversation", tokens: int, budget: Budget) -> tuple[Budget, CacheTerms] | None:
    """The target for a view of so many tokens and the terms of the edit; None if it cannot pay."""
    settings = chat.economy
    prices = chat.meter.limits.cached
    state = chat.record.live.state
    if settings is None or prices is None or not state.step:
        return None
    keep = settings.keep_tokens
    least = chat.least(budget)
    cold = is_cold(chat)
    is_new = cold or _is_new(chat)
    if tokens < least or (tokens < chat.cache_use.declined and not is_new):
        return None
    waited = batch(prices, keep, state.total * budget.ratio / state.step)
    trigger = least + keep + int(COLD_BATCH * keep if is_new else waited)
    if tokens < trigger or trigger >= budget.trigger:  # otherwise the window requires it first
        return None
    calls = state.step if is_new else _calls_since_compaction(chat)
    most = stake(prices, settings.max_loss, state.total, state.carried, state.shown, state.rewritten)
    terms = CacheTerms(prices, calls, cold, budget.ratio, most)
    return budget.down_to(least + keep, trigger), terms


def _calls_since_compaction(chat: "Conversation") -> int:
    """The next compaction is expected after as many calls: an edit must pay before that."""
    live = chat.record.live
    if live.state.compacted is None:
        return live.state.step
    lines = [line for item in live.items for line in item.lines]
    return sum(line.role == "assistant" and line.at > live.state.compacted for line in lines)


def _is_new(chat: "Conversation") -> bool:
    """True if nothing is cached for these tools. What is cached for others may be needed again."""
    requested = chat.cache_use.requested
    return bool(requested) and time.time() - requested.get(chat.extras.text, 0.0) > _cache_s(chat)


def is_cold(chat: "Conversation") -> bool:
    """True if the cache has nothing of this view: it has expired, or the model has changed."""
    state = chat.record.live.state
    if not state.step or not same_model(state.model, chat.model):
        return True
    return time.time() - (chat.cache_use.requested_at or _answered_at(chat)) > _cache_s(chat)


def _cache_s(chat: "Conversation") -> float:
    return (chat.economy or Economy()).cache_s


def _answered_at(chat: "Conversation") -> float:
    """The time of the newest answer in the view, of any process."""
    for item in reversed(chat.record.live.items):
        if item.edit is None and item.lines and item.lines[0].role == "assistant":
            event = codec.decode(chat.record.entry(item.lines[0].at), chat.record.parse)
            return event.time if isinstance(event, Said) else 0.0
    return 0.0
