"""The next request: whether it is too large, what is done about it, and how it looks."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from refold.core import codec
from refold.core.budget import SOON, WINDOW, Budget
from refold.core.draft import Draft, LastRequest
from refold.core.errors import NotFoundError, OverBudgetError, SettingError
from refold.core.event import Line, Replaced
from refold.core.live import MeasuredHead
from refold.core.message import Usage
from refold.core.plan import CompactionRequest, must_stay
from refold.core.view import View
from refold.dialects.message_list import LIST
from refold.dialects.registry import TARGETS
from refold.dialects.shape import APART
from refold.policies.expire import EndLeases
from refold.session.cache_economy import CacheEconomy
from refold.session.explain import large_part
from refold.session.extras import NOTHING, RequestExtras, beside_text
from refold.session.meter import Meter
from refold.session.notify import Notifier, ViewState
from refold.session.reduce import Reducer
from refold.session.render import Rendered, Renderer, RenderRequest
from refold.session.results import Decision, EditReport, Fitted, Overflow, Report, TokenCounts
from refold.session.validate import Override, override_of
from refold.stores.record import Record
from refold.stores.store import Lease
from refold.summaries.lease import CompactionLease

if TYPE_CHECKING:
    from refold.policies.summarize import SummaryPart
    from refold.summaries.background import BackgroundJob, PendingWork
    from refold.summaries.prepare import MessageToSummarize

MOST_PAGES = 3
"""Kinds of requests that are kept rendered."""
MOST_NAMED = 3
"""The largest parts that an `OverBudgetError` names."""
SMALL_PART = 0.05
"""Of what must be shown: smaller parts are not named, unless all of them are small."""


class FitRequest(msgspec.Struct, frozen=True):
    """What is asked of one request."""

    dialect: str | None = None
    tools: Sequence[Any] | None = None
    override: Mapping[str, Any] | None = None
    request: Mapping[str, Any] = {}
    """Other fields that it will have, such as `max_tokens` or `store`."""


class Trigger(msgspec.Struct, frozen=True):
    """Whether a compaction begins now: true if a trigger fired and nothing keeps it from acting."""

    fired: tuple[str, ...]
    budget: Budget
    """Of the compaction."""
    obstacle: str = ""
    """Why nothing is compacted although a trigger fired."""

    def __bool__(self) -> bool:
        return bool(self.fired) and not self.obstacle


class Fitter:
    """Makes the requests of one view. Not for several threads at once."""

    def __init__(self, reducer: Reducer, model: str | None, notifier: Notifier) -> None:
        self.reducer, self.record, self.model, self.notifier = reducer, reducer.record, model, notifier
        self.config, self.settings = reducer.config, reducer.settings
        self.thrift = CacheEconomy(self.record, self.settings.compaction)
        self.last = LastRequest(self.record.view)
        """The newest request."""
        self._meter: Meter | None = None
        self._pages: dict[RenderRequest, Renderer] = {}
        self._known = NOTHING
        self._spoken: str | None = None
        self._dialect: str | None = None
        """Of the newest request."""
        self._heard_at = 0
        self._has_worked = False
        self._sent = 0
        """The first place that was not yet said when the newest request was made."""
        self._mended = 0
        """Tokens that mending added to the newest request."""
        self._is_noticed = False
        """A report said what keeps the view from its target."""
        self._acted = -1
        """Messages that there were when a trigger last acted here."""
        self.override = Override()
        """Of every request; what one asks for beats it."""
        self.sends_own = False
        """Fields of messages that are for refold are sent as they came."""

    @property
    def meter(self) -> Meter:
        """For the model as it is now: it may be changed at any time."""
        if self._meter is None or self._meter.model != self.model:
            self._meter = Meter(self.record.store, self.config, self.model, self.settings.counter)
            self._pages.clear()
        return self._meter

    @property
    def dialect(self) -> str:
        """The model's own, unless what was said makes it clear that it is spoken to in another."""
        spoken = self._latest_dialect()
        if self.model is None or spoken == "ai-sdk":
            return spoken if spoken in TARGETS else "openai-chat"
        own = self.meter.dialect
        return spoken if spoken == "openai-responses" and own == "openai-chat" else own

    def heard(self, drafts: Sequence[Draft]) -> None:
        """Remembers in which dialect the newest message came."""
        self._spoken = next((d.dialect for d in reversed(drafts) if d.dialect), self._spoken)
        self._heard_at, self._has_worked = self.record.live.state.next, True

    def _latest_dialect(self) -> str | None:
        if self._spoken is None or self._heard_at != self.record.live.state.next:
            self._heard_at = self.record.live.state.next
            lines = [line for item in self.record.live.items[-8:] for line in item.lines]
            found = (codec.dialect_of(self.record.entry(line.at)) for line in reversed(lines))
            with suppress(NotFoundError):  # erased by somebody else, this very moment
                self._spoken = next(filter(None, found), self._spoken)
        return self._spoken

    def learn(self, usage: Usage, gauge: MeasuredHead | None) -> None:
        """What the provider says that the newest request took; `gauge` measured the one before it."""
        if self.last.counted and usage.input and usage.calls == 1:
            self.meter.learn(self.last.counted, usage.input, gauge)
        self.last = LastRequest(self.record.view, model=self.model)  # each is measured once

    # How much it is

    def overflow(self, wish: FitRequest) -> Overflow:
        budget, current = self._measured(self._beside(wish, kept=True))
        return Overflow(
            is_overflow=current > budget.room,
            is_approaching=current >= 0.9 * budget.room,
            current_tokens=current,
            available_tokens=max(0, budget.room - current),
            limit=budget.window,
            threshold=budget.threshold,
            output_reserve=budget.output,
        )

    def decide(self, wish: FitRequest) -> Decision:
        budget, current = self._measured(self._beside(wish, kept=True))
        turns, messages = self._since_compaction()
        if self.settings.is_off or self.override.off:
            return Decision((), current, turns, messages)
        trigger = self._trigger(budget, current)
        obstacle = trigger.obstacle
        if trigger and not self.reducer.planned(trigger.budget, self.meter.counter.message):
            obstacle = self._in_the_way(trigger.budget)
        return Decision(trigger.fired, current, turns, messages, obstacle)

    def _trigger(self, budget: Budget, tokens: int) -> Trigger:
        """Which triggers a request of so many tokens sets off, and whether they act."""
        counts = budget.turn_threshold is not None or budget.message_threshold is not None
        fired = budget.fired(tokens, *(self._since_compaction() if counts else (0, 0)))
        if not fired:
            return Trigger((), budget)
        acting = fired
        if not self._has_news:  # the user's triggers act once on the same messages
            acting = tuple(name for name in fired if name == WINDOW)
        least = self._least(budget)
        due = budget.compacting(acting, least)
        obstacle = ""
        if not acting:
            obstacle = "nothing was added since the last compaction"
        elif not due.keeps_recent and tokens <= budget.target and tokens < budget.threshold:
            obstacle = f"{tokens:,} tokens are within the target of {budget.target:,}"
        elif tokens < due.due:
            obstacle = (
                f"{least:,} of {tokens:,} tokens cannot be hidden; the next compaction is at {due.due:,}"
            )
        return Trigger(fired, due, obstacle)

    @property
    def _has_news(self) -> bool:
        """Messages were added since the last compaction."""
        since = self.record.live.state.compacted
        newest = self.record.live.items[-1] if self.record.live.items else None
        is_newer = since is None or (newest is not None and newest.span.end > since)
        return is_newer and self.record.live.state.index > self._acted

    def _least(self, budget: Budget) -> int:
        """Tokens of a request that shows nothing but what must be shown."""
        return self.meter.estimate(self.reducer.least() + budget.overhead + budget.unsent, None)

    def _in_the_way(self, budget: Budget) -> str:
        """What keeps a compaction from making the view smaller."""
        if budget.keeps_recent:
            recent = self.settings.compaction.keep_recent
            return f"nothing that can be hidden is older than the newest {recent} messages"
        view = self.record.live.freeze()
        must = {line.at for line in must_stay(view)}
        newest = [line for line in view.lines if line.step >= view.step - 1 and line.at not in must]
        newest_tokens = self.meter.estimate(sum(line.tokens for line in newest), None)
        least = self._least(budget)
        if newest_tokens > least:
            return f"the newest step alone takes {newest_tokens:,} tokens"
        return (
            "system text, tools, the task, the latest user message and pinned messages"
            f" take {least:,} tokens and cannot be hidden"
        )

    def _measured(self, beside: RequestExtras, dialect: str | None = None) -> tuple[Budget, int]:
        """The budget, and what the next request takes as it stands: messages, system text and tools."""
        budget = self._budget(beside, unsent=self._unsent(beside, dialect))
        return budget, self._measured_now(budget)

    def _unsent(self, beside: RequestExtras, dialect: str | None = None) -> int:
        """What is counted for messages and not sent in a dialect; by default in the newest request's."""
        return self._page(self._ask(dialect or self._dialect or self.dialect, beside)).unsent()

    def _since_compaction(self) -> tuple[int, int]:
        """Turns and messages in the view."""
        since = self.record.live.state.compacted
        lines = [line for item in self.record.live.items for line in item.lines if not line.recalled]
        if since is None:
            return sum(line.asks for line in lines), len(lines)
        new = [line for line in lines if line.at > since]
        return sum(line.asks for line in new), len(new) + any(line.at == since for line in lines)

    @property
    def budget(self) -> Budget:
        """As it is set, for the model as it is now."""
        return self.config.budget(self.settings, self.meter.limits)

    def _budget(self, beside: RequestExtras, target: int | None = None, unsent: int = 0) -> Budget:
        budget = self.config.budget(self.settings, self.meter.limits, beside.output)
        ratio, constant = self.meter.scale(self.record.live.state.gauge)
        return msgspec.structs.replace(
            budget,
            overhead=beside.counted - unsent,
            unsent=unsent,
            max_tokens=budget.max_tokens if target is None else target,
            ratio=ratio,
            margin=self.meter.counter.margin,
            constant=constant,
        )

    def _beside(self, wish: FitRequest, *, kept: bool = False) -> RequestExtras:
        """What stands beside the messages: as before, if it is `kept` and nothing is given."""
        if kept and wish.tools is None and not wish.request:
            return self._known
        text = beside_text(wish.tools, wish.request)
        if self._known.text != text or self._known.meter is not self.meter:
            self._known = RequestExtras.of(text, self.meter)
        return self._known

    # Summaries, ahead of their time

    def awaited(self, wish: FitRequest) -> "PendingWork | None":
        """What the next request would be the better for, if somebody waits for it."""
        summaries, override = self.reducer.summaries, self.override.then(override_of(wish.override))
        if summaries is None or self.settings.is_off or override.off:
            return None
        messages = self.reducer.due_for_summary(self.record.live.state.step + 1, override)
        budget, tokens = self._measured(self._beside(wish), wish.dialect or self.dialect)
        trigger = self._trigger(budget, tokens)
        due = bool(trigger) and summaries.ready(self.record.live.freeze()) is None
        if due:
            self.notifier.begin(self._moment, ", ".join(trigger.fired), tokens)
        under_way = summaries.running if due else summaries.job
        if under_way is not None:
            return under_way if due or messages else None
        due = due and not summaries.was_tried
        return self._prepare(messages, trigger.budget if due else None, due) if due or messages else None

    def _prepare_soon(self, budget: Budget, tokens: int, override: Override) -> None:
        """Begins what will be needed at the trigger, and what will expire in the step after this one."""
        summaries = self.reducer.summaries
        if summaries is None or not summaries.writes_ahead or summaries.job is not None:
            return
        messages = self.reducer.due_for_summary(self.record.live.state.step + 2, override)
        ahead = None
        if not summaries.was_tried and summaries.running is None:
            ahead = self._nearing(budget, tokens)
        if ahead is not None and summaries.ready(self.record.live.freeze()) is not None:
            ahead = None
        if ahead is not None or messages:
            self._prepare(messages, ahead)

    def _nearing(self, budget: Budget, tokens: int) -> Budget | None:
        """The budget of the compaction that is near, if one is."""
        near = budget.nearing(tokens, *self._since_compaction())
        if not near:
            return None
        coming = budget.compacting(near, self._least(budget))
        return coming.ahead(tokens) if tokens >= SOON * coming.due else None

    def _prepare(
        self, messages: "Sequence[MessageToSummarize]", ahead: Budget | None, is_due: bool = False
    ) -> "PendingWork | None":
        summaries = self.reducer.summaries
        assert summaries is not None
        handed = None if ahead is None else summaries.enqueue_for(ahead, is_due=is_due)
        if handed is None or messages:
            return self.start_summaries(messages, None if handed else ahead, is_due)
        return handed

    def start_summaries(
        self, messages: "Sequence[MessageToSummarize]", ahead: Budget | None, is_due: bool = False
    ) -> "BackgroundJob":
        """Has models write summaries in the background, in this process."""
        summaries = self.reducer.summaries
        assert summaries is not None
        view, count = self._at_hand(), self.meter.counter.message

        def parts() -> "list[SummaryPart]":
            return self.reducer.foreseen(view, ahead, count) if ahead is not None else []

        return summaries.prepare(view, parts, messages, is_due=is_due)

    def _at_hand(self) -> View:
        """The view as a value, for another thread."""
        view = self.record.live.freeze()
        self.record.load(view.lines)
        return msgspec.structs.replace(self.record.with_words(view), handles=self.reducer.handles)

    def ordered(self, order: CompactionRequest) -> "BackgroundJob | None":
        """What an order would be the better for, if somebody waits for it."""
        summaries = self.reducer.summaries
        if summaries is None:
            return None
        summaries.discard_ready()
        if order.strategy == "sliding-window":
            return None
        self.notifier.begin(self._moment, "on demand", self._measured(self._known)[1])
        view, count = self._at_hand(), self.meter.counter.message
        budget = self._on_demand(order)
        return summaries.prepare(
            view,
            lambda: self.reducer.foreseen(view, budget, count, order),
            focus=order.focus,
            lease_wait_s=self.settings.summarizer.wait_s,
            keeps_lease=True,
        )

    # Making it

    def fit(
        self, wish: FitRequest, told: Sequence[str] = (), lease: CompactionLease | None = None
    ) -> Fitted | None:
        """The next request; None if it is to be compacted and another holder of the `lease` is at it.

        `told` is what else the report says.
        """
        override = self.override.then(override_of(wish.override))
        off = self.settings.is_off or override.off
        beside, count = self._beside(wish), self.meter.counter.message
        ask = self._ask(wish.dialect or self.dialect, beside)
        self._dialect = ask.dialect
        budget, before = self._measured(beside)
        if before > budget.room and not off:
            self._demand_room(budget, beside)
        trigger = self._trigger(budget, before)
        if lease is not None and not off and trigger and lease.is_held_elsewhere:
            return None
        edits = [] if off else self.reducer.arrive(budget, count, override)
        now = before
        if edits:
            budget, now = self._measured(beside)
            trigger = self._trigger(budget, now)
        fired = trigger.fired
        notices = [*told, *self._heard_of_summaries(), *self.notifier.taken()]
        if not off:
            edits += self._made_smaller(budget, now, override, notices, trigger)
            edits += self._end_leases(budget, override)
            fired = fired or (("economy",) if any(edit.worth for edit in edits) else ())
        page = self._render(ask, beside)
        final = self._total(budget, page)
        if page.mended and not off and final >= (budget.room if fired else budget.threshold):
            more = msgspec.structs.replace(budget, overhead=budget.overhead + page.mended)
            edits += self.reducer.climb(more, count, override)
            fired = fired or ("threshold",)
            page = self._render(ask, beside)
            final = self._total(budget, page)
        notices += [
            *map(_left_out, (e for e in edits if e.certificate and e.certificate.left_out)),
            *page.notices,
        ]
        self._mended = page.mended
        if final > budget.room:
            if not off:
                raise self._too_much(final, budget, beside, self.record.live.freeze().lines)
            self.notifier.overflow(self._moment, "compaction is off", final)
            notices.append(f"The request has {final:,} tokens; there is room for {budget.room:,}")
        self.notifier.end(self._moment, (), 0, final)  # another writer compacted the view first
        counted = self.record.live.tokens + budget.overhead + page.mended
        if not off:
            self._prepare_soon(budget, final, override)
        prefix = self._prefix(page, beside) if ask.binds_thinking else None
        self.last = LastRequest(self.record.view, counted, self.model, prefix, self.record.live.state.next)
        self.thrift.asked(beside.text)
        if page.system is not None and beside.system is not None:
            notices.append("System text is given beside the messages: the record's own is not sent")
        tokens = TokenCounts(before, self._after(edits, counted, final), final)
        sent = [edit.span.start for edit in edits if not 0 < self._sent <= edit.span.start]
        changed, self._sent = [page.break_at, *sent], self.record.live.state.next
        report = Report(
            tokens,
            limit=budget.window,
            room=max(0, budget.room - final),
            edits=tuple(_told(edit, budget.ratio) for edit in edits),
            fired=fired,
            cache_break_at=min((at for at in changed if at is not None), default=None),
            notices=tuple(notices),
        )
        request = self._request(ask.dialect, page, wish)
        return Fitted(page.messages, request, report, page.system, page.settled)

    def _end_leases(self, budget: Budget, override: Override) -> list[Replaced]:
        """Puts away answers whose lease has ended, where the provider's cache loses nothing by it."""
        if not self.reducer.has_ended_leases():
            return []
        since = 0 if self.thrift.is_cold(self.meter) else self.record.live.state.changed
        if since is None:
            return []
        count = self.meter.counter.message
        return self.reducer.reduce(EndLeases(since), budget, count, override, round=False)

    def _made_smaller(
        self, budget: Budget, tokens: int, override: Override, notices: list[str], trigger: Trigger
    ) -> list[Replaced]:
        """Since it must be, or since it pays."""
        prices = self.meter.limits.cached
        if not trigger.fired:
            self._is_noticed = self._is_noticed and tokens > budget.target
            return self._economize(budget, tokens, override) if self.thrift.economy else []
        self.reducer.terms = self.thrift.terms(prices, budget, self.meter) if prices else None
        try:
            return self._compact(budget, override, notices, trigger)
        finally:
            self.reducer.terms = None

    def _economize(self, budget: Budget, tokens: int, override: Override) -> list[Replaced]:
        """Puts away what costs more to carry than to hide, long before the window forces it."""
        due = self.thrift.due(tokens, self._least(budget), budget, self.meter, self._known.text)
        if due is None:
            return []
        lower, self.reducer.terms = due
        before = self._shown
        try:
            edits = self.reducer.economize(lower, self.meter.counter.message, override)
        finally:
            self.reducer.terms = None
        self.thrift.found(tokens, bool(edits))
        if edits:
            self.notifier.begin(self._moment, "economy", tokens)
            self._end(edits, before, budget)
        return edits

    @property
    def _shown(self) -> set[tuple[int, int]]:
        """Which messages are shown now."""
        return {(line.at, line.n) for item in self.record.live.items for line in item.lines}

    def _end(self, edits: Sequence[Replaced], before: set[tuple[int, int]], budget: Budget) -> None:
        """Those who watch are told what came of a compaction."""
        self.notifier.end(self._moment, edits, len(before - self._shown), self._measured_now(budget))

    def _compact(
        self, budget: Budget, override: Override, notices: list[str], trigger: Trigger
    ) -> list[Replaced]:
        """Acts on the triggers that fired, and says once what keeps it from its target."""
        fired = ", ".join(trigger.fired)
        if not trigger:
            self._say_once(notices, f"{fired} fired, but nothing was compacted: {trigger.obstacle}")
            return []
        compacting = msgspec.structs.replace(trigger.budget, overhead=trigger.budget.overhead + self._mended)
        round = self.record.live.state.round

        def still() -> bool:
            if self.record.live.state.round == round:
                return True
            return bool(self._trigger(budget, self._measured_now(budget)))

        self.notifier.begin(self._moment, fired, self._measured_now(budget))
        before = self._shown
        edits = self.reducer.climb(compacting, self.meter.counter.message, override, still)
        self._end(edits, before, budget)
        self._acted = self.record.live.state.index
        after = self._measured_now(budget)
        if not edits:
            self._say_once(
                notices, f"{fired} fired, but nothing was compacted: {self._in_the_way(compacting)}"
            )
        elif not compacting.keeps_recent and after > budget.enough:
            told = f"Compacted to {after:,} tokens (target {budget.target:,}): {self._in_the_way(budget)}."
            next_at = max(compacting.due, compacting.trigger)
            self._say_once(notices, f"{told} Next compaction at {next_at:,}." if next_at > after else told)
        else:
            self._is_noticed = False
        return edits

    def _say_once(self, notices: list[str], notice: str) -> None:
        """Until the view is within its target again."""
        if not self._is_noticed:
            notices.append(notice)
        self._is_noticed = True

    def _heard_of_summaries(self) -> list[str]:
        source = self.reducer.summaries or self.reducer
        problems, source.problems = source.problems, []
        return problems

    def _demand_room(self, budget: Budget, beside: RequestExtras) -> None:
        """
        Raises:
            OverBudgetError: what nothing may hide is too much by itself; then nothing is changed.
        """
        least = self._least(budget)
        if least > budget.room:
            raise self._too_much(least, budget, beside, must_stay(self.record.live.freeze()))

    def _too_much(
        self, tokens: int, budget: Budget, beside: RequestExtras, lines: Sequence[Line]
    ) -> OverBudgetError:
        """The error for a request of so many tokens that must show these messages."""
        ratio, _ = self.meter.scale(None)
        state = self.record.live.state
        parts = [large_part(line, state, round(line.tokens * ratio)) for line in lines]
        parts += beside.large_parts(ratio)
        largest = sorted(parts, key=lambda part: part.tokens, reverse=True)[:MOST_NAMED]
        least = min(SMALL_PART * tokens, largest[0].tokens) if largest else 0
        named = [part for part in largest if part.tokens >= least]
        error = OverBudgetError(tokens, budget.room, budget.window, named)
        self.notifier.overflow(self._moment, str(error), tokens)
        return error

    def _measured_now(self, budget: Budget) -> int:
        return self.meter.estimate(self.record.live.tokens + budget.overhead, self.record.live.state.gauge)

    def _after(self, edits: Sequence[Replaced], counted: int, final: int) -> dict[str, int]:
        """What was left after each kind of reduction."""
        saved = {edit.kind: 0 for edit in edits}
        for edit in edits:
            saved[edit.kind] += edit.tokens[0] - edit.tokens[1]
        left, after = counted + sum(saved.values()), dict[str, int]()
        for kind, tokens in saved.items():
            left -= tokens
            after[kind] = self.meter.estimate(left, self.record.live.state.gauge)
        return after | dict.fromkeys(list(after)[-1:], final)

    def _total(self, budget: Budget, page: Rendered) -> int:
        counted = self.record.live.tokens + budget.overhead + page.mended
        return self.meter.estimate(counted, self.record.live.state.gauge)

    def _request(self, dialect: str, page: Rendered, wish: FitRequest) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model} if self.model else {}
        if page.system is not None:
            request[APART.get(dialect, "system")] = page.system
        request[LIST.get(dialect, "messages")] = page.messages
        return request | ({"tools": list(wish.tools)} if wish.tools else {}) | dict(wish.request)

    def _ask(self, dialect: str, beside: RequestExtras) -> RenderRequest:
        if dialect not in TARGETS:
            raise SettingError("dialect", f"{dialect!r} is not known; known are {', '.join(TARGETS)}")
        flags = self.meter.limits.flags
        inside = "system-inside" in flags or not self.meter.is_known
        known = {"no_prefill": "no-prefill" in flags, "system_inside": inside}
        binds = "binds-thinking" in flags and dialect == "anthropic"
        facts = msgspec.structs.replace(beside.facts, **known)
        given = beside.system is not None
        rest = {"repair": self.settings.repairs, "system_beside": given, "sends_own": self.sends_own}
        return RenderRequest(dialect, facts, binds, **rest)

    def exported(self, record: Record, dialect: str) -> dict[str, Any]:
        """The `messages` of a record in a dialect, and `system` where the dialect has it apart from them.

        They are rendered and mended as `fit` does it, but may end with the assistant's answer in any case.
        """
        ask = self._ask(dialect, NOTHING)
        ask = msgspec.structs.replace(ask, facts=msgspec.structs.replace(ask.facts, no_prefill=False))
        page = Renderer(record, ask, self.meter.counter).render()
        system = {} if page.system is None else {"system": page.system}
        return {**system, "messages": page.messages}

    def _render(self, ask: RenderRequest, beside: RequestExtras) -> Rendered:
        page = self._page(ask).render()
        if ask.binds_thinking and self.record.live.state.prefix not in (None, self._prefix(page, beside)):
            return self._page(msgspec.structs.replace(ask, all_stale=True)).render()
        return page

    def _prefix(self, page: Rendered, beside: RequestExtras) -> str:
        system = page.system if beside.system is None else beside.system
        return blake2b(codec.dumps([system, beside.tools]), digest_size=8).hexdigest()

    def _page(self, ask: RenderRequest) -> Renderer:
        if ask not in self._pages:
            while len(self._pages) > MOST_PAGES:
                self._pages.pop(next(iter(self._pages)))
            self._pages[ask] = Renderer(self.record, ask, self.meter.counter)
        return self._pages[ask]

    def finish(self) -> None:
        """Prunes, where that is worth it and the conversation has gone on here."""
        if self._has_worked and not self.override.off:
            before = self.record.live.tokens
            edits = self.reducer.finish(self._budget(NOTHING), self.meter.counter.message)
            self.notifier.pruned(self._moment, edits, before, self.record.live.tokens)

    def planned(self, order: CompactionRequest) -> list[Replaced]:
        """What a compaction on demand would do by rule."""
        return self.reducer.planned(self._on_demand(order), self.meter.counter.message, order)

    def _on_demand(self, order: CompactionRequest) -> Budget:
        return self._budget(NOTHING, order.target, self._unsent(self._known))

    def tokens(self, counted: int) -> int:
        """What messages that are counted so take in the next request."""
        return self.meter.estimate(counted - self._unsent(self._known), self.record.live.state.gauge)

    def compact(self, order: CompactionRequest, lease: Lease | None = None) -> list[Replaced]:
        count, budget = self.meter.counter.message, self._on_demand(order)
        self.notifier.begin(self._moment, "on demand", self._measured(self._known)[1])
        before, edits = self._shown, list[Replaced]()
        try:
            edits = self.reducer.compact(order, budget, count, self.override, lease)
        finally:
            self._end(edits, before, self._measured(self._known)[0])
        return edits

    @property
    def _moment(self) -> ViewState:
        state = self.record.live.state
        return ViewState(state.turn, state.step, self.meter.limits.window)


def _left_out(edit: Replaced) -> str:
    many = edit.certificate.left_out if edit.certificate else 0
    return f"{many} of the user's rules found no room in #{edit.at}; they are in their originals only"


def _told(edit: Replaced, ratio: float) -> EditReport:
    saved = round((edit.tokens[0] - edit.tokens[1]) * ratio)
    return EditReport(edit.at, edit.span, edit.kind, edit.why, saved)
