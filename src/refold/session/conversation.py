"""One view of a conversation, with what its next request depends on: settings, model, the last request."""

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from refold.config.config import Config
from refold.core import codec
from refold.core.budget import Budget
from refold.core.draft import Draft, LastRequest
from refold.core.errors import NotFoundError, SettingError
from refold.core.event import Measured
from refold.core.message import Usage
from refold.core.plan import Count, Policy, must_stay
from refold.dialects.registry import DIALECTS, TARGETS
from refold.session.meter import NO_EXTRAS, FitRequest, Meter, RequestExtras, extras_json
from refold.session.notify import Notifier, ViewState
from refold.session.render import Renderer, RenderRequest
from refold.session.validate import Override
from refold.stores.record import Record
from refold.summaries.lease import CompactionLease

if TYPE_CHECKING:
    from refold.session.embedding import Similarity
    from refold.summaries.prepare import SummaryWriter

MAX_RENDERERS = 3
"""Kinds of requests that stay rendered."""
MAX_TOOL_SETS = 20
DIALECT_ITEMS = 8
"""The newest items of the view, among which the dialect of the newest message is looked for."""


class Conversation:
    """One view of a record, for one session. Used by one thread at a time, under `lock`.

    It decides nothing: `fit`, `triggers`, `reduce`, `ahead` and `compaction` have the functions that do. What
    it remembers between two requests is the newest request, and caches.
    """

    def __init__(
        self,
        record: Record,
        config: Config,
        agent: str | None,
        model: str | None,
        lease: CompactionLease,
        lock: Notifier,
        *,
        policies: Sequence[Policy] = (),
        similarity: "Similarity | None" = None,
        override: Override = Override(),  # noqa: B008
        sends_own_fields: bool = False,
        is_one_off: bool = False,
    ) -> None:
        self.record = record
        self.config = config
        self.agent = agent
        self.settings = config.agent(agent)
        self.is_off = self.settings.is_off
        self.compact = self.settings.compaction
        self.cap = self.compact.capping
        self.prune = self.compact.pruning
        self.economy = None if is_one_off else self.compact.economizing
        self.expiries = {name: tool.expire for name, tool in self.settings.tools.items()}
        self.policies = policies
        """The user's own; they run first."""
        self.similarity = similarity
        """Set if there is an embedder."""
        self.override = override
        """For every request; the override of a single request wins."""
        self.sends_own_fields = sends_own_fields
        """Fields of messages that are for refold are sent too."""
        self.is_one_off = is_one_off
        """There is one request only: nothing is expanded later, nor prepared for the next request."""
        self.handles = self.settings.shows_handles and not is_one_off
        """Edited messages show a handle for `refold_expand`."""
        self.lease = lease
        self.lock = lock
        """Tells callbacks what happened, once it is released."""
        self.one_at_a_time = Lock()
        """For compactions on demand by threads of this session; the lease keeps other sessions out."""
        self.summaries: SummaryWriter | None = None
        self.model = model
        """May be changed at any time."""

        self.notices: list[str] = []
        """For the next report."""
        self.noticed: set[str] = set()
        """What a report has said and the next ones do not repeat."""
        self.extras = NO_EXTRAS
        """Of the newest request."""
        self.sent_dialect: str | None = None
        self.sent_until = 0
        """The next free place when the newest request was made."""
        self.repair_tokens = 0
        """Tokens that repairs added to the newest request."""
        self.last = LastRequest(record.view)
        """The newest request, until a reply has measured it."""
        self.requested: dict[bytes, float] = {}
        """The time of the last request, by the JSON of its tools and system text."""
        self.declined = 0
        """Below so many tokens, compacting to save money is not considered again."""
        self.messages_at_compaction = -1
        """The number of messages when a trigger last compacted."""
        self.unchanged: tuple[object, set[int]] = (None, set())
        """Places of results that cannot be reduced, and what that depends on."""
        self._meter: Meter | None = None
        self._renderers: dict[RenderRequest, Renderer] = {}
        self._spoken: str | None = None
        self._spoken_at = -1

    # The model

    @property
    def meter(self) -> Meter:
        """For the current model."""
        if self._meter is None or self._meter.model != self.model:
            self._meter = Meter(self.record.store, self.config, self.model, self.settings.counter)
            self._renderers.clear()
        return self._meter

    @property
    def count(self) -> Count:
        return self.meter.counter.message

    @property
    def dialect(self) -> str:
        """The model's own, unless the newest messages are in another one that it accepts."""
        if self._spoken_at != self.record.live.state.next:
            self._spoken_at = self.record.live.state.next
            lines = [line for item in self.record.live.items[-DIALECT_ITEMS:] for line in item.lines]
            found = (codec.dialect_of(self.record.entry(line.at)) for line in reversed(lines))
            with suppress(NotFoundError):  # erased just now by another process
                self._spoken = next(filter(None, found), self._spoken)
        newest = self._spoken
        if self.model is None or newest == "ai-sdk":
            return newest if newest in TARGETS else "openai-chat"
        own = self.meter.dialect
        return newest if newest == "openai-responses" and own == "openai-chat" else own

    def note_dialect(self, drafts: Sequence[Draft]) -> None:
        """Remembers the dialect of messages that were appended just now."""
        found = (draft.dialect for draft in reversed(drafts))
        self._spoken = next(filter(None, found), self._spoken)
        self._spoken_at = self.record.live.state.next

    def learn(self, usage: Usage, measured: Measured | None) -> None:
        """Calibrates with the provider's usage of the newest request; `measured` is the one before it."""
        if self.last.counted and usage.input and usage.calls == 1:
            self.meter.learn(self.last.counted, usage.input, measured)
        self.last = LastRequest(self.record.view, model=self.model)  # a request is measured once

    def note_request(self, request: LastRequest) -> None:
        """Remembers the newest request, and when its tools and system text were sent."""
        self.last = request
        self.sent_until = self.record.live.state.next
        self.requested[self.extras.text] = time.time()
        if len(self.requested) > MAX_TOOL_SETS:
            del self.requested[min(self.requested, key=self.requested.__getitem__)]

    # How many tokens a request has

    @property
    def shown(self) -> set[tuple[int, int]]:
        """The messages that are shown now: place, and number among those of one edit."""
        return {(line.at, line.n) for item in self.record.live.items for line in item.lines}

    @property
    def state(self) -> ViewState:
        state = self.record.live.state
        return ViewState(state.turn, state.step, self.meter.limits.window)

    def extras_of(self, request: FitRequest, *, reuse: bool = False) -> RequestExtras:
        """Everything besides the messages; with `reuse`, that of the newest request if none is passed."""
        is_empty = request.tools is None and not request.request
        if reuse and is_empty:
            return self.extras
        text = NO_EXTRAS.text if is_empty else extras_json(request.tools, request.request)
        if self.extras.text != text or self.extras.meter is not self.meter:
            self.extras = RequestExtras.of(text, self.meter)
        return self.extras

    def budget(self, extras: RequestExtras, *, target: int | None = None, unsent: int = 0) -> Budget:
        """The budget of a request with these extras; `target` overrides the number of tokens to reach."""
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

    def measure(self, extras: RequestExtras, kind: RenderRequest | None = None) -> tuple[Budget, int]:
        """The budget, and the tokens of the next request as it stands: messages, system text and tools."""
        budget = self.budget(extras, unsent=self.unsent(extras, kind))
        return budget, self.tokens(budget)

    def unsent(self, extras: RequestExtras, kind: RenderRequest | None = None) -> int:
        """What is counted for messages and not sent in a kind of request; by default the newest one's."""
        kind = kind or self.render_request(self.sent_dialect or self.dialect, extras)
        return self.renderer(kind).unsent()

    def tokens(self, budget: Budget, added: int = 0) -> int:
        """Tokens of the next request; `added` are counted tokens that come on top."""
        return self.estimate(self.record.live.tokens + budget.overhead + added)

    def estimate(self, counted: int) -> int:
        return self.meter.estimate(counted, self.record.live.state.measured)

    def least(self, budget: Budget) -> int:
        """Tokens of a request that shows nothing but what must be shown."""
        counted = sum(line.tokens for line in must_stay(self.record.live.freeze()))
        return self.meter.estimate(counted + budget.overhead + budget.unsent, None)

    # What is rendered

    def render_request(self, dialect: str, extras: RequestExtras) -> RenderRequest:
        """
        Raises:
            SettingError: no request can be rendered in the dialect.
        """
        if dialect not in TARGETS:
            raise SettingError("dialect", f"{dialect!r} is not known; known are {', '.join(TARGETS)}")
        flags = self.meter.limits.flags
        facts = msgspec.structs.replace(
            extras.facts,
            no_prefill="no-prefill" in flags,
            system_inside="system-inside" in flags or not self.meter.is_known,
        )
        return RenderRequest(
            dialect,
            facts,
            binds_thinking="binds-thinking" in flags and DIALECTS[dialect].signs_thinking,
            repair=self.settings.repairs,
            replaces_system=extras.system is not None,
            sends_own_fields=self.sends_own_fields,
        )

    def renderer(self, request: RenderRequest) -> Renderer:
        if request not in self._renderers:
            if len(self._renderers) > MAX_RENDERERS:
                self._renderers.pop(next(iter(self._renderers)))
            self._renderers[request] = Renderer(self.record, request, self.meter.counter)
        return self._renderers[request]

    def export(self, record: Record, dialect: str) -> dict[str, Any]:
        """The `messages` of a record in a dialect, and `system` where the dialect has it apart.

        Unlike those of `fit`, they may end with the assistant's answer for every model.
        """
        request = self.render_request(dialect, NO_EXTRAS)
        facts = msgspec.structs.replace(request.facts, no_prefill=False)
        request = msgspec.structs.replace(request, facts=facts)
        rendered = Renderer(record, request, self.meter.counter).render()
        system = {} if rendered.system is None else {"system": rendered.system}
        return {**system, "messages": rendered.messages}
