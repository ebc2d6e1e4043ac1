"""Builds the next request: measures it, compacts the view if it is too large, and renders it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from refold.core import codec
from refold.core.budget import SOON, WINDOW, Budget
from refold.core.draft import Draft, LastRequest
from refold.core.errors import NotFoundError, OverBudgetError, SettingError
from refold.core.event import Line, Measured, Replaced
from refold.core.message import Usage
from refold.core.plan import CompactionRequest, must_stay
from refold.core.view import View
from refold.dialects.registry import DIALECTS, TARGETS
from refold.policies.expire import EndLeases
from refold.session.cache_economy import CacheEconomy
from refold.session.explain import large_part
from refold.session.meter import NO_EXTRAS, Meter, RequestExtras, extras_json
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

MAX_RENDERERS = 3
"""Kinds of requests that stay rendered."""
MAX_NAMED_PARTS = 3
"""The largest parts that an `OverBudgetError` names."""
SMALL_PART = 0.05
"""Of what must be shown: smaller parts are not named, unless all of them are small."""


class FitRequest(msgspec.Struct, frozen=True):
    """The arguments of one `fit`."""

    dialect: str | None = None
    tools: Sequence[Any] | None = None
    override: Mapping[str, Any] | None = None
    request: Mapping[str, Any] = {}
    """Other fields that it will have, such as `max_tokens` or `store`."""


class Trigger(msgspec.Struct, frozen=True):
    """True if a trigger fired and nothing keeps it from compacting."""

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
        self.reducer = reducer
        self.record = reducer.record
        self.model = model
        self.notifier = notifier
        self.config = reducer.config
        self.settings = reducer.settings
        self.economy = CacheEconomy(self.record, self.settings.compaction)
        self.last = LastRequest(self.record.view)
        self._meter: Meter | None = None
        self._renderers: dict[RenderRequest, Renderer] = {}
        self._extras = NO_EXTRAS
        self._newest_dialect: str | None = None
        self._dialect: str | None = None
        """The dialect of the newest request."""
        self._dialect_read_at = 0
        self._has_appended = False
        self._sent_until = 0
        """The next free place when the newest request was made."""
        self._repair_tokens = 0
        """Tokens that repairs added to the newest request."""
        self._has_noticed = False
        """A report has said why the view is above its target."""
        self._messages_at_compaction = -1
        """The number of messages when a trigger last compacted."""
        self.override = Override()
        """For every request; the override of a single request wins."""
        self.sends_own_fields = False
        """Fields of messages that are for refold are sent too."""

    @property
    def meter(self) -> Meter:
        """For the current model, which may change at any time."""
        if self._meter is None or self._meter.model != self.model:
            self._meter = Meter(self.record.store, self.config, self.model, self.settings.counter)
            self._renderers.clear()
        return self._meter

    @property
    def dialect(self) -> str:
        """The model's own, unless the newest messages are in another one that it accepts."""
        newest = self._latest_dialect()
        if self.model is None or newest == "ai-sdk":
            return newest if newest in TARGETS else "openai-chat"
        own = self.meter.dialect
        return newest if newest == "openai-responses" and own == "openai-chat" else own

    def note_dialect(self, drafts: Sequence[Draft]) -> None:
        """Remembers the dialect of the newest message."""
        self._newest_dialect = next((d.dialect for d in reversed(drafts) if d.dialect), self._newest_dialect)
        self._dialect_read_at, self._has_appended = self.record.live.state.next, True

    def _latest_dialect(self) -> str | None:
        if self._newest_dialect is None or self._dialect_read_at != self.record.live.state.next:
            self._dialect_read_at = self.record.live.state.next
            lines = [line for item in self.record.live.items[-8:] for line in item.lines]
            found = (codec.dialect_of(self.record.entry(line.at)) for line in reversed(lines))
            with suppress(NotFoundError):  # erased just now by another process
                self._newest_dialect = next(filter(None, found), self._newest_dialect)
        return self._newest_dialect

    def learn(self, usage: Usage, measured: Measured | None) -> None:
        """Calibrates with the provider's usage of the newest request; `measured` is the one before it."""
        if self.last.counted and usage.input and usage.calls == 1:
            self.meter.learn(self.last.counted, usage.input, measured)
        self.last = LastRequest(self.record.view, model=self.model)  # a request is measured once

    # How much it is

    def overflow(self, fit_request: FitRequest) -> Overflow:
        budget, current = self._measured(self._extras_of(fit_request, reuse=True))
        return Overflow(
            is_overflow=current > budget.room,
            is_approaching=current >= 0.9 * budget.room,
            current_tokens=current,
            available_tokens=max(0, budget.room - current),
            limit=budget.window,
            threshold=budget.threshold,
            output_reserve=budget.output,
        )

    def decide(self, fit_request: FitRequest) -> Decision:
        budget, current = self._measured(self._extras_of(fit_request, reuse=True))
        turns, messages = self._since_compaction()
        if self.settings.is_off or self.override.off:
            return Decision((), current, turns, messages)
        trigger = self._trigger(budget, current)
        obstacle = trigger.obstacle
        if trigger and not self.reducer.planned(trigger.budget, self.meter.counter.message):
            obstacle = self._target_obstacle(trigger.budget)
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
        return is_newer and self.record.live.state.index > self._messages_at_compaction

    def _least(self, budget: Budget) -> int:
        """Tokens of a request that shows nothing but what must be shown."""
        return self.meter.estimate(self.reducer.minimum_tokens() + budget.overhead + budget.unsent, None)

    def _target_obstacle(self, budget: Budget) -> str:
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

    def _measured(self, extras: RequestExtras, dialect: str | None = None) -> tuple[Budget, int]:
        """The budget, and what the next request takes as it stands: messages, system text and tools."""
        budget = self._budget(extras, unsent=self._unsent(extras, dialect))
        return budget, self._measured_now(budget)

    def _unsent(self, extras: RequestExtras, dialect: str | None = None) -> int:
        """What is counted for messages and not sent in a dialect; by default in the newest request's."""
        return self._renderer_for(
            self._render_request(dialect or self._dialect or self.dialect, extras)
        ).unsent()

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

    def _budget(self, extras: RequestExtras, target: int | None = None, unsent: int = 0) -> Budget:
        budget = self.config.budget(self.settings, self.meter.limits, extras.output)
        ratio, constant = self.meter.scale(self.record.live.state.measured)
        return msgspec.structs.replace(
            budget,
            overhead=extras.counted - unsent,
            unsent=unsent,
            max_tokens=budget.max_tokens if target is None else target,
            ratio=ratio,
            margin=self.meter.counter.margin,
            constant=constant,
        )

    def _extras_of(self, fit_request: FitRequest, *, reuse: bool = False) -> RequestExtras:
        """Everything besides the messages; with `reuse`, that of the last request if none is passed."""
        if reuse and fit_request.tools is None and not fit_request.request:
            return self._extras
        text = extras_json(fit_request.tools, fit_request.request)
        if self._extras.text != text or self._extras.meter is not self.meter:
            self._extras = RequestExtras.of(text, self.meter)
        return self._extras

    # Summaries

    def pending_summaries(self, fit_request: FitRequest) -> "PendingWork | None":
        """The job that the next request should wait for, started if necessary."""
        summaries, override = self.reducer.summaries, self.override.then(override_of(fit_request.override))
        if summaries is None or self.settings.is_off or override.off:
            return None
        messages = self.reducer.due_for_summary(self.record.live.state.step + 1, override)
        budget, tokens = self._measured(self._extras_of(fit_request), fit_request.dialect or self.dialect)
        trigger = self._trigger(budget, tokens)
        due = bool(trigger) and summaries.ready(self.record.live.freeze()) is None
        if due:
            self.notifier.begin(self._view_state, ", ".join(trigger.fired), tokens)
        under_way = summaries.running if due else summaries.job
        if under_way is not None:
            return under_way if due or messages else None
        due = due and not summaries.was_tried
        return self._prepare(messages, trigger.budget if due else None, due) if due or messages else None

    def _prepare_soon(self, budget: Budget, tokens: int, override: Override) -> None:
        """Starts summaries for a compaction that is near, and of messages that expire in the next step."""
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
        """The budget of the next compaction, if it is near."""
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
        view, count = self._loaded_view(), self.meter.counter.message

        def parts() -> "list[SummaryPart]":
            return self.reducer.parts_to_summarize(view, ahead, count) if ahead is not None else []

        return summaries.prepare(view, parts, messages, is_due=is_due)

    def _loaded_view(self) -> View:
        """The view with its messages loaded, for another thread."""
        view = self.record.live.freeze()
        self.record.load(view.lines)
        return msgspec.structs.replace(self.record.with_words(view), handles=self.reducer.handles)

    def start_on_demand(self, order: CompactionRequest) -> "BackgroundJob | None":
        """The job that a compaction on demand should wait for."""
        summaries = self.reducer.summaries
        if summaries is None:
            return None
        summaries.discard_ready()
        if order.strategy == "sliding-window":
            return None
        self.notifier.begin(self._view_state, "on demand", self._measured(self._extras)[1])
        view, count = self._loaded_view(), self.meter.counter.message
        budget = self._on_demand(order)
        return summaries.prepare(
            view,
            lambda: self.reducer.parts_to_summarize(view, budget, count, order),
            focus=order.focus,
            lease_wait_s=self.settings.summarizer.wait_s,
            keeps_lease=True,
        )

    # The request

    def fit(
        self, fit_request: FitRequest, notices: Sequence[str] = (), lease: CompactionLease | None = None
    ) -> Fitted | None:
        """The next request; None if it needs a compaction and another process holds the `lease`.

        `notices` are added to the report.
        """
        override = self.override.then(override_of(fit_request.override))
        off = self.settings.is_off or override.off
        extras, count = self._extras_of(fit_request), self.meter.counter.message
        render_request = self._render_request(fit_request.dialect or self.dialect, extras)
        self._dialect = render_request.dialect
        budget, before = self._measured(extras)
        if before > budget.room and not off:
            self._require_room(budget, extras)
        trigger = self._trigger(budget, before)
        if lease is not None and not off and trigger and lease.is_held_elsewhere:
            return None
        edits = [] if off else self.reducer.reduce_new_results(budget, count, override)
        now = before
        if edits:
            budget, now = self._measured(extras)
            trigger = self._trigger(budget, now)
        fired = trigger.fired
        notices = [*notices, *self._take_problems(), *self.notifier.taken()]
        if not off:
            edits += self._compact_or_economize(budget, now, override, notices, trigger)
            edits += self._end_leases(budget, override)
            fired = fired or (("economy",) if any(edit.worth for edit in edits) else ())
        rendered = self._render(render_request, extras)
        final = self._total(budget, rendered)
        if rendered.repair_tokens and not off and final >= (budget.room if fired else budget.threshold):
            more = msgspec.structs.replace(budget, overhead=budget.overhead + rendered.repair_tokens)
            edits += self.reducer.compact_to_target(more, count, override)
            fired = fired or ("threshold",)
            rendered = self._render(render_request, extras)
            final = self._total(budget, rendered)
        notices += [
            *map(_left_out_notice, (e for e in edits if e.certificate and e.certificate.left_out)),
            *rendered.notices,
        ]
        self._repair_tokens = rendered.repair_tokens
        if final > budget.room:
            if not off:
                raise self._over_budget_error(final, budget, extras, self.record.live.freeze().lines)
            self.notifier.overflow(self._view_state, "compaction is off", final)
            notices.append(
                f"Compaction is off: the request has {final:,} tokens, there is room for {budget.room:,}"
            )
        self.notifier.end(self._view_state, (), 0, final)  # another writer compacted the view first
        counted = self.record.live.tokens + budget.overhead + rendered.repair_tokens
        if not off:
            self._prepare_soon(budget, final, override)
        prefix = self._prefix(rendered, extras) if render_request.binds_thinking else None
        self.last = LastRequest(self.record.view, counted, self.model, prefix, self.record.live.state.next)
        self.economy.note_request(extras.text)
        if rendered.system is not None and extras.system is not None:
            notices.append("The request has its own system text; the recorded one is not sent")
        tokens = TokenCounts(before, self._tokens_after(edits, counted, final), final)
        sent = [edit.span.start for edit in edits if not 0 < self._sent_until <= edit.span.start]
        changed, self._sent_until = [rendered.break_at, *sent], self.record.live.state.next
        report = Report(
            tokens,
            limit=budget.window,
            room=max(0, budget.room - final),
            edits=tuple(_edit_report(edit, budget.ratio) for edit in edits),
            fired=fired,
            cache_break_at=min((at for at in changed if at is not None), default=None),
            notices=tuple(notices),
        )
        request = self._request(render_request.dialect, rendered, fit_request)
        return Fitted(rendered.messages, request, report, rendered.system, rendered.settled)

    def _end_leases(self, budget: Budget, override: Override) -> list[Replaced]:
        """Hides expanded texts whose lease has ended, where that costs no cache."""
        if not self.reducer.has_ended_leases():
            return []
        since = 0 if self.economy.is_cold(self.meter) else self.record.live.state.changed
        if since is None:
            return []
        count = self.meter.counter.message
        return self.reducer.reduce(EndLeases(since), budget, count, override, round=False)

    def _compact_or_economize(
        self, budget: Budget, tokens: int, override: Override, notices: list[str], trigger: Trigger
    ) -> list[Replaced]:
        """Compacts because a trigger fired, or because it saves money."""
        prices = self.meter.limits.cached
        if not trigger.fired:
            self._has_noticed = self._has_noticed and tokens > budget.target
            return self._economize(budget, tokens, override) if self.economy.settings else []
        self.reducer.cache_terms = self.economy.forced_terms(prices, budget, self.meter) if prices else None
        try:
            return self._compact(budget, override, notices, trigger)
        finally:
            self.reducer.cache_terms = None

    def _economize(self, budget: Budget, tokens: int, override: Override) -> list[Replaced]:
        """Hides what costs more to send than to rewrite."""
        due = self.economy.proposal(tokens, self._least(budget), budget, self.meter, self._extras.text)
        if due is None:
            return []
        lower, self.reducer.cache_terms = due
        before = self._shown
        try:
            edits = self.reducer.economize(lower, self.meter.counter.message, override)
        finally:
            self.reducer.cache_terms = None
        self.economy.note_result(tokens, bool(edits))
        if edits:
            self.notifier.begin(self._view_state, "economy", tokens)
            self._end(edits, before, budget)
        return edits

    @property
    def _shown(self) -> set[tuple[int, int]]:
        """The messages that are shown now."""
        return {(line.at, line.n) for item in self.record.live.items for line in item.lines}

    def _end(self, edits: Sequence[Replaced], before: set[tuple[int, int]], budget: Budget) -> None:
        """Notifies the end of a compaction."""
        self.notifier.end(self._view_state, edits, len(before - self._shown), self._measured_now(budget))

    def _compact(
        self, budget: Budget, override: Override, notices: list[str], trigger: Trigger
    ) -> list[Replaced]:
        """Compacts, and says once why the target cannot be reached."""
        fired = ", ".join(trigger.fired)
        if not trigger:
            self._notice_once(notices, f"{fired} fired, but nothing was compacted: {trigger.obstacle}")
            return []
        compacting = msgspec.structs.replace(
            trigger.budget, overhead=trigger.budget.overhead + self._repair_tokens
        )
        round = self.record.live.state.round

        def still() -> bool:
            if self.record.live.state.round == round:
                return True
            return bool(self._trigger(budget, self._measured_now(budget)))

        self.notifier.begin(self._view_state, fired, self._measured_now(budget))
        before = self._shown
        edits = self.reducer.compact_to_target(compacting, self.meter.counter.message, override, still)
        self._end(edits, before, budget)
        self._messages_at_compaction = self.record.live.state.index
        after = self._measured_now(budget)
        if not edits:
            self._notice_once(
                notices, f"{fired} fired, but nothing was compacted: {self._target_obstacle(compacting)}"
            )
        elif not compacting.keeps_recent and after > budget.enough:
            notice = (
                f"Compacted to {after:,} tokens (target {budget.target:,}): {self._target_obstacle(budget)}."
            )
            next_at = max(compacting.due, compacting.trigger)
            self._notice_once(
                notices, f"{notice} Next compaction at {next_at:,}." if next_at > after else notice
            )
        else:
            self._has_noticed = False
        return edits

    def _notice_once(self, notices: list[str], notice: str) -> None:
        """Once until the view is within its target again."""
        if not self._has_noticed:
            notices.append(notice)
        self._has_noticed = True

    def _take_problems(self) -> list[str]:
        source = self.reducer.summaries or self.reducer
        problems, source.problems = source.problems, []
        return problems

    def _require_room(self, budget: Budget, extras: RequestExtras) -> None:
        """
        Raises:
            OverBudgetError: what cannot be hidden is too large by itself.
        """
        least = self._least(budget)
        if least > budget.room:
            raise self._over_budget_error(least, budget, extras, must_stay(self.record.live.freeze()))

    def _over_budget_error(
        self, tokens: int, budget: Budget, extras: RequestExtras, lines: Sequence[Line]
    ) -> OverBudgetError:
        """The error for a request of so many tokens with these messages."""
        ratio, _ = self.meter.scale(None)
        state = self.record.live.state
        parts = [large_part(line, state, round(line.tokens * ratio)) for line in lines]
        parts += extras.large_parts(ratio)
        largest = sorted(parts, key=lambda part: part.tokens, reverse=True)[:MAX_NAMED_PARTS]
        least = min(SMALL_PART * tokens, largest[0].tokens) if largest else 0
        named = [part for part in largest if part.tokens >= least]
        error = OverBudgetError(tokens, budget.room, budget.window, named)
        self.notifier.overflow(self._view_state, str(error), tokens)
        return error

    def _measured_now(self, budget: Budget) -> int:
        return self.meter.estimate(self.record.live.tokens + budget.overhead, self.record.live.state.measured)

    def _tokens_after(self, edits: Sequence[Replaced], counted: int, final: int) -> dict[str, int]:
        """The tokens after each kind of edit."""
        saved = {edit.kind: 0 for edit in edits}
        for edit in edits:
            saved[edit.kind] += edit.tokens[0] - edit.tokens[1]
        left, after = counted + sum(saved.values()), dict[str, int]()
        for kind, tokens in saved.items():
            left -= tokens
            after[kind] = self.meter.estimate(left, self.record.live.state.measured)
        return after | dict.fromkeys(list(after)[-1:], final)

    def _total(self, budget: Budget, rendered: Rendered) -> int:
        counted = self.record.live.tokens + budget.overhead + rendered.repair_tokens
        return self.meter.estimate(counted, self.record.live.state.measured)

    def _request(self, dialect: str, rendered: Rendered, fit_request: FitRequest) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model} if self.model else {}
        if rendered.system is not None:
            request[DIALECTS[dialect].system_field or "system"] = rendered.system
        request[DIALECTS[dialect].list_field] = rendered.messages
        return (
            request
            | ({"tools": list(fit_request.tools)} if fit_request.tools else {})
            | dict(fit_request.request)
        )

    def _render_request(self, dialect: str, extras: RequestExtras) -> RenderRequest:
        if dialect not in TARGETS:
            raise SettingError("dialect", f"{dialect!r} is not known; known are {', '.join(TARGETS)}")
        flags = self.meter.limits.flags
        inside = "system-inside" in flags or not self.meter.is_known
        known = {"no_prefill": "no-prefill" in flags, "system_inside": inside}
        binds = "binds-thinking" in flags and DIALECTS[dialect].signs_thinking
        facts = msgspec.structs.replace(extras.facts, **known)
        has_system = extras.system is not None
        rest = {
            "repair": self.settings.repairs,
            "replaces_system": has_system,
            "sends_own_fields": self.sends_own_fields,
        }
        return RenderRequest(dialect, facts, binds, **rest)

    def export_request(self, record: Record, dialect: str) -> dict[str, Any]:
        """The `messages` of a record in a dialect, and `system` where the dialect has it apart.

        Unlike those of `fit`, they may end with the assistant's answer for every model.
        """
        render_request = self._render_request(dialect, NO_EXTRAS)
        render_request = msgspec.structs.replace(
            render_request, facts=msgspec.structs.replace(render_request.facts, no_prefill=False)
        )
        rendered = Renderer(record, render_request, self.meter.counter).render()
        system = {} if rendered.system is None else {"system": rendered.system}
        return {**system, "messages": rendered.messages}

    def _render(self, render_request: RenderRequest, extras: RequestExtras) -> Rendered:
        rendered = self._renderer_for(render_request).render()
        if render_request.binds_thinking and self.record.live.state.prefix not in (
            None,
            self._prefix(rendered, extras),
        ):
            return self._renderer_for(msgspec.structs.replace(render_request, all_stale=True)).render()
        return rendered

    def _prefix(self, rendered: Rendered, extras: RequestExtras) -> str:
        system = rendered.system if extras.system is None else extras.system
        return blake2b(codec.dumps([system, extras.tools]), digest_size=8).hexdigest()

    def _renderer_for(self, render_request: RenderRequest) -> Renderer:
        if render_request not in self._renderers:
            while len(self._renderers) > MAX_RENDERERS:
                self._renderers.pop(next(iter(self._renderers)))
            self._renderers[render_request] = Renderer(self.record, render_request, self.meter.counter)
        return self._renderers[render_request]

    def finish(self) -> None:
        """Prunes if this session has appended messages."""
        if self._has_appended and not self.override.off:
            before = self.record.live.tokens
            edits = self.reducer.finish(self._budget(NO_EXTRAS), self.meter.counter.message)
            self.notifier.pruned(self._view_state, edits, before, self.record.live.tokens)

    def planned(self, order: CompactionRequest) -> list[Replaced]:
        """The edits of a compaction on demand, without a model."""
        return self.reducer.planned(self._on_demand(order), self.meter.counter.message, order)

    def _on_demand(self, order: CompactionRequest) -> Budget:
        return self._budget(NO_EXTRAS, order.target, self._unsent(self._extras))

    def tokens(self, counted: int) -> int:
        """What messages that are counted so take in the next request."""
        return self.meter.estimate(counted - self._unsent(self._extras), self.record.live.state.measured)

    def compact(self, order: CompactionRequest, lease: Lease | None = None) -> list[Replaced]:
        count, budget = self.meter.counter.message, self._on_demand(order)
        self.notifier.begin(self._view_state, "on demand", self._measured(self._extras)[1])
        before, edits = self._shown, list[Replaced]()
        try:
            edits = self.reducer.compact(order, budget, count, self.override, lease)
        finally:
            self._end(edits, before, self._measured(self._extras)[0])
        return edits

    @property
    def _view_state(self) -> ViewState:
        state = self.record.live.state
        return ViewState(state.turn, state.step, self.meter.limits.window)


def _left_out_notice(edit: Replaced) -> str:
    many = edit.certificate.left_out if edit.certificate else 0
    return f"{many} of the user's rules did not fit into the summary #{edit.at}; only the originals have them"


def _edit_report(edit: Replaced, ratio: float) -> EditReport:
    saved = round((edit.tokens[0] - edit.tokens[1]) * ratio)
    return EditReport(edit.at, edit.span, edit.kind, edit.why, saved)
