"""The next request: whether it is too large, what is done about it, and how it looks."""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from refold.answers import Decision, EditReport, Fitted, Overflow, Report, TokenCounts
from refold.asked import is_off
from refold.beside import NOTHING, Beside, beside_text
from refold.config import AgentSettings, Config
from refold.core import codec
from refold.core.budget import Budget
from refold.core.draft import Draft, Request
from refold.core.errors import OverBudgetError, SettingError
from refold.core.event import Event, Replaced
from refold.core.live import Gauge
from refold.core.message import Usage
from refold.core.plan import Policy, Stamp, settle
from refold.formats.dialects import TARGETS
from refold.formats.sheet import APART, LIST
from refold.meter import Meter
from refold.page import Ask, Page, Rendered
from refold.policies.window import Window
from refold.record import Record

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

    def __init__(self, record: Record, config: Config, settings: AgentSettings, model: str | None) -> None:
        self.record, self.config, self.settings, self.model = record, config, settings, model
        self.last = Request(record.view)
        """The newest request."""
        self._meter: Meter | None = None
        self._pages: dict[Ask, Page] = {}
        self._known = NOTHING
        self._spoken: str | None = None
        self._heard_at = 0

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
        self._heard_at = self.record.live.state.next

    def _heard(self) -> str | None:
        if self._spoken is None or self._heard_at != self.record.live.state.next:
            self._heard_at = self.record.live.state.next
            lines = [line for item in self.record.live.items[-8:] for line in item.lines]
            found = (codec.dialect_of(self.record.entry(line.at)) for line in reversed(lines))
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
        lines = [line for item in self.record.live.items for line in item.lines]
        if since is None:
            return sum(line.role == "user" for line in lines), len(lines)
        new = [line for line in lines if line.at > since]
        return sum(line.role == "user" for line in new), len(new) + any(line.at == since for line in lines)

    def _budget(self, beside: Beside, target: int | None = None) -> Budget:
        budget = self.config.budget(self.settings, self.meter.limits, beside.output)
        ratio, constant = self.meter.scale(self.record.live.state.gauge)
        return msgspec.structs.replace(
            budget,
            overhead=beside.counted,
            max_tokens=budget.max_tokens if target is None else target,
            ratio=ratio,
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

    # Making it

    def fit(self, wish: Wish) -> Fitted:
        off = self.settings.is_off or is_off(wish.override)
        beside = self._beside(wish)
        budget, before = self._measured(beside)
        counts = budget.turn_threshold is not None or budget.message_threshold is not None
        fired = budget.fired(before, *(self._since_compaction() if counts else (0, 0)))
        wants = fired and not off and (before >= budget.threshold or before > budget.target)
        edits = self.reduce(budget, Window()) if wants else []
        ask = self._ask(wish.dialect or self.dialect, beside)
        page = self._render(ask, beside)
        final = self._total(budget, page)
        if page.mended and not off and final >= (budget.room if fired else budget.threshold):
            more = msgspec.structs.replace(budget, overhead=budget.overhead + page.mended)
            edits, fired = [*edits, *self.reduce(more, Window())], fired or ("threshold",)
            page = self._render(ask, beside)
            final = self._total(budget, page)
        notices = list(page.notices)
        if final > budget.room:
            if not off:
                raise OverBudgetError(final, budget.room, budget.window)
            notices.append(f"The request has {final:,} tokens; there is room for {budget.room:,}")
        elif fired and not off and not edits:
            notices.append(_unchanged(fired, before, budget))
        counted = self.record.live.tokens + budget.overhead + page.mended
        prefix = self._prefix(page, beside) if ask.binds_thinking else None
        self.last = Request(self.record.view, counted, self.model, prefix, self.record.live.state.next)
        if page.system is not None and beside.system is not None:
            notices.append("System text is given beside the messages: the record's own is not sent")
        tokens = TokenCounts(before, {edit.kind: final for edit in edits}, final)
        changed = [page.break_at, *(edit.span.start for edit in edits)]
        report = Report(
            tokens,
            limit=budget.window,
            room=max(0, budget.room - final),
            edits=tuple(map(_told, edits)),
            fired=fired,
            cache_break_at=min((at for at in changed if at is not None), default=None),
            notices=tuple(notices),
        )
        return Fitted(page.messages, self._request(ask.dialect, page, wish), report, page.system)

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

    def compact(self, policy: Policy, target: int | None) -> list[Replaced]:
        return self.reduce(self._budget(NOTHING, target), policy)

    def reduce(self, budget: Budget, policy: Policy) -> list[Replaced]:
        """Plans on the view as it is, and again if somebody else edits it meanwhile."""
        count = self.meter.counter.message

        def build() -> Sequence[Event]:
            live = self.record.live
            view, round = live.freeze(), live.state.round + 1
            stamp = Stamp(live.state.next, time.time(), live.view, round)
            plan = policy(view, budget, count)
            return [
                settle(edit, view, msgspec.structs.replace(stamp, at=stamp.at + n), count)
                for n, edit in enumerate(plan)
            ]

        return [event for event in self.record.append(build) if isinstance(event, Replaced)]


def _told(edit: Replaced) -> EditReport:
    return EditReport(edit.at, edit.span, edit.kind, edit.why, edit.tokens[0] - edit.tokens[1])


def _unchanged(fired: Sequence[str], tokens: int, budget: Budget) -> str:
    what = ", ".join(fired)
    if tokens < budget.threshold and tokens <= budget.target:
        return f"{what} fired, but {tokens:,} tokens are within {budget.target:,}: nothing is hidden"
    return f"Over {budget.threshold:,} tokens, but there is nothing left to hide"
