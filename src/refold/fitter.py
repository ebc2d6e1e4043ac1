"""The next request: whether it is too large, what is done about it, and how it looks."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from refold.answers import Decision, EditReport, Fitted, Overflow, Report, TokenCounts
from refold.asked import Override, override_of
from refold.beside import NOTHING, Beside, beside_text
from refold.core import codec
from refold.core.budget import SOON, Budget
from refold.core.draft import Draft, Request
from refold.core.errors import NotFoundError, OverBudgetError, SettingError
from refold.core.event import Replaced
from refold.core.live import Gauge
from refold.core.message import Usage
from refold.core.view import View
from refold.formats.dialects import TARGETS
from refold.formats.sheet import APART, LIST
from refold.meter import Meter
from refold.notify import Moment, Notifier
from refold.page import Ask, Page, Rendered
from refold.policies.leases import EndLeases
from refold.reducer import Order, Reducer
from refold.stores.store import Lease
from refold.thrift import Thrift

if TYPE_CHECKING:
    from refold.job import Job, UnderWay
    from refold.policies.summarize import Part
    from refold.summaries import Told

MOST_PAGES = 3
"""Kinds of requests that are kept rendered."""


class Wish(msgspec.Struct, frozen=True):
    """What is asked of one request."""

    dialect: str | None = None
    tools: Sequence[Any] | None = None
    override: Mapping[str, Any] | None = None
    request: Mapping[str, Any] = {}
    """Other fields that it will have, such as `max_tokens` or `store`."""


class Fitter:
    """Makes the requests of one view. Not for several threads at once."""

    def __init__(self, reducer: Reducer, model: str | None, notifier: Notifier) -> None:
        self.reducer, self.record, self.model, self.notifier = reducer, reducer.record, model, notifier
        self.config, self.settings = reducer.config, reducer.settings
        self.thrift = Thrift(self.record, self.settings.compaction)
        self.last = Request(self.record.view)
        """The newest request."""
        self._meter: Meter | None = None
        self._pages: dict[Ask, Page] = {}
        self._known = NOTHING
        self._spoken: str | None = None
        self._heard_at = 0
        self._has_worked = False
        self._sent = 0
        """The first place that was not yet said when the newest request was made."""
        self._mended = 0
        """Tokens that mending added to the newest request."""
        self._told = False
        """That the target cannot be reached."""

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
        spoken = self._heard()
        if self.model is None or spoken == "ai-sdk":
            return spoken if spoken in TARGETS else "openai-chat"
        own = self.meter.dialect
        return spoken if spoken == "openai-responses" and own == "openai-chat" else own

    def heard(self, drafts: Sequence[Draft]) -> None:
        """Remembers in which dialect the newest message came."""
        self._spoken = next((d.dialect for d in reversed(drafts) if d.dialect), self._spoken)
        self._heard_at, self._has_worked = self.record.live.state.next, True

    def _heard(self) -> str | None:
        if self._spoken is None or self._heard_at != self.record.live.state.next:
            self._heard_at = self.record.live.state.next
            lines = [line for item in self.record.live.items[-8:] for line in item.lines]
            found = (codec.dialect_of(self.record.entry(line.at)) for line in reversed(lines))
            with suppress(NotFoundError):  # erased by somebody else, this very moment
                self._spoken = next(filter(None, found), self._spoken)
        return self._spoken

    def learn(self, usage: Usage, gauge: Gauge | None) -> None:
        """What the provider says that the newest request took; `gauge` measured the one before it."""
        if self.last.counted and usage.input and usage.calls == 1:
            self.meter.learn(self.last.counted, usage.input, gauge)
        self.last = Request(self.record.view, model=self.model)  # each is measured once

    # How much it is

    def overflow(self, wish: Wish) -> Overflow:
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

    def decide(self, wish: Wish) -> Decision:
        budget, current = self._measured(self._beside(wish, kept=True))
        turns, messages = self._since_compaction()
        fired = () if self.settings.is_off else budget.fired(current, turns, messages)
        return Decision(fired, current, turns, messages)

    def _measured(self, beside: Beside) -> tuple[Budget, int]:
        """The budget, and what the next request takes as it stands: messages, system text and tools."""
        budget = self._budget(beside)
        counted = self.record.live.tokens + budget.overhead
        return budget, self.meter.estimate(counted, self.record.live.state.gauge)

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

    def _budget(self, beside: Beside, target: int | None = None) -> Budget:
        budget = self.config.budget(self.settings, self.meter.limits, beside.output)
        ratio, constant = self.meter.scale(self.record.live.state.gauge)
        return msgspec.structs.replace(
            budget,
            overhead=beside.counted,
            max_tokens=budget.max_tokens if target is None else target,
            ratio=ratio,
            margin=self.meter.counter.margin,
            constant=constant,
        )

    def _beside(self, wish: Wish, *, kept: bool = False) -> Beside:
        """What stands beside the messages: as before, if it is `kept` and nothing is given."""
        if kept and wish.tools is None and not wish.request:
            return self._known
        text = beside_text(wish.tools, wish.request)
        if self._known.text != text or self._known.meter is not self.meter:
            self._known = Beside.of(text, self.meter)
        return self._known

    # Summaries, ahead of their time

    def awaited(self, wish: Wish) -> "UnderWay | None":
        """What the next request would be the better for, if somebody waits for it."""
        summaries, override = self.reducer.summaries, override_of(wish.override)
        if summaries is None or self.settings.is_off or override.off:
            return None
        messages = self.reducer.to_tell(self.record.live.state.step + 1, override)
        budget, tokens = self._measured(self._beside(wish))
        lifted = self._lifted(budget)
        fired = budget.fired(tokens, *self._since_compaction())
        due = bool(fired) and tokens >= max(lifted.due, min(budget.threshold, budget.target + 1))
        due = due and summaries.ready(self.record.live.freeze()) is None
        if due:
            self.begin(", ".join(fired))
        under_way = summaries.under_way if due else summaries.job
        if under_way is not None:
            return under_way if due or messages else None
        due = due and not summaries.was_tried
        return self._prepare(messages, lifted if due else None, due) if due or messages else None

    def _prepare_soon(self, budget: Budget, tokens: int, override: Override) -> None:
        """Begins what will be needed at the trigger, and what will expire in the step after this one."""
        summaries = self.reducer.summaries
        if summaries is None or not summaries.ahead or summaries.job is not None:
            return
        messages = self.reducer.to_tell(self.record.live.state.step + 2, override)
        turns, count = self._since_compaction()
        lifted = self._lifted(budget)
        near = (
            tokens >= lifted.soon
            or turns + 1 >= (budget.turn_threshold or turns + 2)
            or count >= SOON * (budget.message_threshold or 2 * count + 2)
        )
        near = near and not summaries.was_tried
        near = near and summaries.ready(self.record.live.freeze()) is None
        near = near and summaries.under_way is None
        if near or messages:
            self._prepare(messages, lifted.ahead(tokens) if near else None)

    def _prepare(
        self, messages: "Sequence[Told]", ahead: Budget | None, is_due: bool = False
    ) -> "UnderWay | None":
        summaries = self.reducer.summaries
        assert summaries is not None
        handed = None if ahead is None else summaries.handed_over(ahead, is_due=is_due)
        if handed is None or messages:
            return self.written(messages, None if handed else ahead, is_due)
        return handed

    def written(self, messages: "Sequence[Told]", ahead: Budget | None, is_due: bool = False) -> "Job | None":
        """Begins to write what models can write ahead of need, in this process."""
        summaries = self.reducer.summaries
        assert summaries is not None
        view, count = self._at_hand(), self.meter.counter.message

        def parts() -> "list[Part]":
            return self.reducer.foreseen(view, ahead, count) if ahead is not None else []

        return summaries.prepare(view, parts, messages, is_due=is_due)

    def _at_hand(self) -> View:
        """The view as a value, for another thread."""
        view = self.record.live.freeze()
        self.record.load(view.lines)
        return msgspec.structs.replace(self.record.with_words(view), handles=self.reducer.handles)

    def _lifted(self, budget: Budget) -> Budget:
        return budget.above(self.meter.estimate(self.reducer.least() + budget.overhead, None))

    def ordered(self, order: Order) -> "Job | None":
        """What an order would be the better for, if somebody waits for it."""
        summaries = self.reducer.summaries
        if summaries is None:
            return None
        summaries.forget()
        if order.strategy == "sliding-window":
            return None
        self.begin("on demand")
        view, count = self._at_hand(), self.meter.counter.message
        budget = self._budget(NOTHING, order.target)
        return summaries.prepare(
            view,
            lambda: self.reducer.ordered(order, view, budget, count),
            focus=order.focus,
            patience_s=self.settings.summarizer.wait_s,
        )

    # Making it

    def fit(self, wish: Wish, told: Sequence[str] = ()) -> Fitted:
        """`told` is what else the report says."""
        override = override_of(wish.override)
        off = self.settings.is_off or override.off
        beside, count = self._beside(wish), self.meter.counter.message
        budget, before = self._measured(beside)
        if before > budget.room and not off:
            self._demand_room(budget)
        edits = [] if off else self.reducer.arrive(budget, count, override)
        budget, now = self._measured(beside) if edits else (budget, before)
        counts = budget.turn_threshold is not None or budget.message_threshold is not None
        fired = budget.fired(now, *(self._since_compaction() if counts else (0, 0)))
        notices = [*told, *self._heard_of_summaries(), *self.notifier.taken()]
        if not off:
            edits += self._made_smaller(budget, now, override, notices, fired)
            edits += self._end_leases(budget, override)
            fired = fired or (("economy",) if any(edit.worth for edit in edits) else ())
        ask = self._ask(wish.dialect or self.dialect, beside)
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
                raise self._too_much(final, budget)
            self.notifier.overflow(self._moment, "compaction is off", final)
            notices.append(f"The request has {final:,} tokens; there is room for {budget.room:,}")
        self.notifier.over(self._moment, final)  # somebody else was faster
        counted = self.record.live.tokens + budget.overhead + page.mended
        if not off:
            self._prepare_soon(budget, final, override)
        prefix = self._prefix(page, beside) if ask.binds_thinking else None
        self.last = Request(self.record.view, counted, self.model, prefix, self.record.live.state.next)
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
        self, budget: Budget, tokens: int, override: Override, notices: list[str], fired: Sequence[str]
    ) -> list[Replaced]:
        """Since it must be, or since it pays."""
        prices = self.meter.limits.cached
        if not fired:
            return self._economize(budget, tokens, override) if self.thrift.economy else []
        self.reducer.terms = self.thrift.terms(prices, budget, self.meter) if prices else None
        try:
            return self._climb(budget, tokens, override, notices, fired)
        finally:
            self.reducer.terms = None

    def _economize(self, budget: Budget, tokens: int, override: Override) -> list[Replaced]:
        """Puts away what costs more to carry than to hide, long before the window forces it."""
        least = self.meter.estimate(self.reducer.least() + budget.overhead, None)
        due = self.thrift.due(tokens, least, budget, self.meter, self._known.text)
        if due is None:
            return []
        lower, self.reducer.terms = due
        try:
            edits = self.reducer.economize(lower, self.meter.counter.message, override)
        finally:
            self.reducer.terms = None
        self.thrift.found(tokens, bool(edits))
        if edits:
            self.begin("economy")
            self.notifier.end(self._moment, edits, tokens)
        return edits

    def _climb(
        self, budget: Budget, tokens: int, override: Override, notices: list[str], fired: Sequence[str]
    ) -> list[Replaced]:
        """Acts on triggers that fired, once there is enough to gain above what must be there."""
        if tokens < budget.threshold and tokens <= budget.target:
            notices.append(
                f"{', '.join(fired)} fired, but {tokens:,} tokens are within {budget.target:,}:"
                " nothing is hidden"
            )
            return []
        least = self.meter.estimate(self.reducer.least() + budget.overhead, None)
        lifted = budget.above(least)
        lifted = msgspec.structs.replace(lifted, overhead=lifted.overhead + self._mended)
        edits = list[Replaced]()

        round = self.record.live.state.round

        def still() -> bool:
            if self.record.live.state.round == round:
                return True
            now = self._measured_now(budget)
            return now >= lifted.due and bool(budget.fired(now, *self._since_compaction()))

        if tokens >= lifted.due:
            self.begin(", ".join(fired))
            edits = self.reducer.climb(lifted, self.meter.counter.message, override, still)
            self.notifier.end(self._moment, edits, tokens)
        after = self._measured_now(budget)
        if after > (budget.enough if edits else budget.target) and not self._told:
            notices.append(
                f"{after:,} tokens are left, more than the {budget.target:,} that were wanted:"
                f" {least:,} of them must be there; more is done from {max(lifted.due, lifted.trigger):,} on"
            )
        self._told = after > budget.target
        return edits

    def _heard_of_summaries(self) -> list[str]:
        summaries = self.reducer.summaries
        if summaries is None:
            return []
        problems, summaries.problems = summaries.problems, []
        return problems

    def _demand_room(self, budget: Budget) -> None:
        """
        Raises:
            OverBudgetError: what nothing may hide is too much by itself; then nothing is changed.
        """
        least = self.meter.estimate(self.reducer.least() + budget.overhead, None)
        if least > budget.room:
            raise self._too_much(least, budget)

    def _too_much(self, tokens: int, budget: Budget) -> OverBudgetError:
        error = OverBudgetError(tokens, budget.room, budget.window)
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

    def _request(self, dialect: str, page: Rendered, wish: Wish) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model} if self.model else {}
        if page.system is not None:
            request[APART.get(dialect, "system")] = page.system
        request[LIST.get(dialect, "messages")] = page.messages
        return request | ({"tools": list(wish.tools)} if wish.tools else {}) | dict(wish.request)

    def _ask(self, dialect: str, beside: Beside) -> Ask:
        if dialect not in TARGETS:
            raise SettingError("dialect", f"{dialect!r} is not known; known are {', '.join(TARGETS)}")
        flags = self.meter.limits.flags
        inside = "system-inside" in flags or not self.meter.is_known
        known = {"no_prefill": "no-prefill" in flags, "system_inside": inside}
        binds = "binds-thinking" in flags and dialect == "anthropic"
        facts = msgspec.structs.replace(beside.facts, **known)
        given = beside.system is not None
        return Ask(dialect, facts, binds, repair=self.settings.repairs, system_beside=given)

    def _render(self, ask: Ask, beside: Beside) -> Rendered:
        page = self._page(ask).render()
        if ask.binds_thinking and self.record.live.state.prefix not in (None, self._prefix(page, beside)):
            return self._page(msgspec.structs.replace(ask, all_stale=True)).render()
        return page

    def _prefix(self, page: Rendered, beside: Beside) -> str:
        system = page.system if beside.system is None else beside.system
        return blake2b(codec.dumps([system, beside.tools]), digest_size=8).hexdigest()

    def _page(self, ask: Ask) -> Page:
        if ask not in self._pages:
            while len(self._pages) > MOST_PAGES:
                self._pages.pop(next(iter(self._pages)))
            self._pages[ask] = Page(self.record, ask, self.meter.counter)
        return self._pages[ask]

    def finish(self) -> None:
        """Prunes, where that is worth it and the conversation has gone on here."""
        if self._has_worked:
            before = self.record.live.tokens
            edits = self.reducer.finish(self._budget(NOTHING), self.meter.counter.message)
            self.notifier.pruned(self._moment, edits, before)

    def compact(self, order: Order, dry_run: bool, lease: Lease | None = None) -> list[Replaced]:
        count, budget = self.meter.counter.message, self._budget(NOTHING, order.target)
        if dry_run:
            return self.reducer.planned(order, budget, count)
        self.begin("on demand")
        before = self.record.live.tokens
        try:
            edits = self.reducer.compact(order, budget, count, lease)
            self.notifier.end(self._moment, edits, before)
        finally:
            self.notifier.over(self._moment, before)
        return edits

    def begin(self, reason: str) -> None:
        """Those who watch are told that the view is being made smaller."""
        self.notifier.begin(self._moment, reason, self._measured_now(self._budget(self._known)))

    @property
    def _moment(self) -> Moment:
        state = self.record.live.state
        return Moment(state.turn, state.step, self.meter.limits.window)


def _left_out(edit: Replaced) -> str:
    many = edit.certificate.left_out if edit.certificate else 0
    return f"{many} of the user's rules found no room in #{edit.at}; they are in their originals only"


def _told(edit: Replaced, ratio: float) -> EditReport:
    saved = round((edit.tokens[0] - edit.tokens[1]) * ratio)
    return EditReport(edit.at, edit.span, edit.kind, edit.why, saved)
