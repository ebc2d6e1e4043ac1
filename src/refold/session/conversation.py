"""One view of a conversation, with what its next request depends on: settings, model, the last request."""

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from refold.config.config import Config
from refold.core import codec
from refold.core.budget import Budget
from refold.core.draft import LastRequest
from refold.core.errors import SettingError
from refold.core.event import Replaced
from refold.core.plan import Count, Policy, must_stay
from refold.dialects.registry import DIALECTS, TARGETS
from refold.dialects.rules.targets import facts_of
from refold.session.meter import Meter, extras_json
from refold.session.notify import CompactionEvent, CompactionKind, Notifier
from refold.session.render import Renderer, RenderRequest
from refold.session.validate import Override, output_of
from refold.stores.record import Record
from refold.summaries.lease import CompactionLease

if TYPE_CHECKING:
    from refold.session.embedding import Similarity
    from refold.summaries.prepare import SummaryWriter

MAX_RENDERERS = 3
"""Kinds of requests that stay rendered."""
MAX_TOOL_SETS = 20
NO_EXTRAS = b"{}"


class FitRequest(msgspec.Struct, frozen=True):
    """The arguments of one `fit`."""

    dialect: str | None = None
    tools: Sequence[Any] | None = None
    request: Mapping[str, Any] = {}
    """Other fields that it will have, such as `max_tokens` or `store`."""
    override: Override = Override()
    """Of the session and of this request."""


class RequestExtras(NamedTuple):
    """Everything of a request besides its messages, and how those are rendered."""

    text: bytes
    """The JSON, to recognize it: tools are counted once."""
    meter: Meter
    render: RenderRequest
    renderer: Renderer
    budget: Budget
    """Without what depends on the messages."""
    counted: int
    system: Any
    tools: Any


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
        self.cap = self.settings.compaction.capping
        self.prune = self.settings.compaction.pruning
        self.economy = None if is_one_off else self.settings.compaction.economizing
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
        self.started: CompactionEvent | None = None
        """The start of the running compaction."""
        self.sent_until = 0
        """The next free place when the newest request was made."""
        self.sent_edition = -1
        """The edition of the view that it showed."""
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
        self._extras: RequestExtras | None = None
        self._meter: Meter | None = None
        self._renderers: dict[RenderRequest, Renderer] = {}

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
        newest = self.record.newest_dialect
        if self.model is None or newest == "ai-sdk":
            return newest if newest in TARGETS else "openai-chat"
        own = self.meter.dialect
        return newest if newest == "openai-responses" and own == "openai-chat" else own

    # How many tokens a request has

    def extras_of(self, request: FitRequest, *, reuse: bool = False) -> RequestExtras:
        """Everything besides the messages; with `reuse`, what is not passed is that of the newest request."""
        known = self._extras
        text = NO_EXTRAS
        if request.tools is not None or request.request:
            text = extras_json(request.tools, request.request)
        elif reuse and known is not None:
            text = known.text
        dialect = known.render.dialect if reuse and known is not None else request.dialect or self.dialect
        is_known = known is not None and known.text == text and known.render.dialect == dialect
        if known is None or not is_known or known.meter is not self.meter:
            self._extras = known = self._new_extras(text, dialect)
        return known

    @property
    def extras(self) -> RequestExtras:
        """Of the newest request."""
        return self.extras_of(FitRequest(), reuse=True)

    def _new_extras(self, text: bytes, dialect: str) -> RequestExtras:
        """Raises SettingError if no request can be rendered in the dialect, or the extras are not valid."""
        if dialect not in TARGETS:
            raise SettingError("dialect", f"{dialect!r} is not known; known are {', '.join(TARGETS)}")
        meter = self.meter
        request = codec.loads(text)
        counted = meter.extras(request)
        system = request.get("system", request.get("instructions"))
        render = self.render_request(dialect, request, replaces_system=system is not None)
        renderer = self.renderer(render)
        budget = self._budget(output_of(request))
        return RequestExtras(text, meter, render, renderer, budget, counted, system, request.get("tools"))

    def render_request(
        self, dialect: str, request: Mapping[str, Any], *, replaces_system: bool = False
    ) -> RenderRequest:
        """How the messages of a request with these other fields are rendered."""
        flags = self.meter.limits.flags
        facts = msgspec.structs.replace(
            facts_of(request),
            no_prefill="no-prefill" in flags,
            system_inside="system-inside" in flags or not self.meter.is_known,
        )
        return RenderRequest(
            dialect,
            facts,
            binds_thinking="binds-thinking" in flags and DIALECTS[dialect].signs_thinking,
            repair=self.settings.repairs,
            replaces_system=replaces_system,
            sends_own_fields=self.sends_own_fields,
        )

    def renderer(self, request: RenderRequest) -> Renderer:
        if request not in self._renderers:
            if len(self._renderers) > MAX_RENDERERS:
                self._renderers.pop(next(iter(self._renderers)))
            self._renderers[request] = Renderer(self.record, request, self.meter.counter)
        return self._renderers[request]

    def _budget(self, output: int | None = None) -> Budget:
        budget = self.config.budget(self.settings, self.meter.limits, output)
        return msgspec.structs.replace(budget, margin=self.meter.counter.margin)

    def budget(self, extras: RequestExtras | None = None, unsent: int = 0) -> Budget:
        """The budget of a request, or of messages alone; `unsent` is counted for messages and not sent."""
        ratio, constant = self.meter.scale(self.record.live.state.measured)
        base = self._budget() if extras is None else extras.budget
        counted = 0 if extras is None else extras.counted
        return msgspec.structs.replace(
            base, overhead=counted - unsent, unsent=unsent, ratio=ratio, constant=constant
        )

    def measure(self, extras: RequestExtras) -> tuple[Budget, int]:
        """The budget, and the tokens of the next request as it stands: messages, system text and tools."""
        budget = self.budget(extras, extras.renderer.unsent())
        return budget, self.tokens(budget)

    def tokens(self, budget: Budget, added: int = 0) -> int:
        """Tokens of the next request; `added` are counted tokens that come on top."""
        return self.estimate(self.record.live.tokens + budget.overhead + added)

    def estimate(self, counted: int) -> int:
        return self.meter.estimate(counted, self.record.live.state.measured)

    def least(self, budget: Budget) -> int:
        """Tokens of a request that shows nothing but what must be shown."""
        counted = sum(line.tokens for line in must_stay(self.record.live.freeze()))
        return self.meter.estimate(counted + budget.overhead + budget.unsent, None)

    def note_request(self, extras: RequestExtras, counted: int, prefix: str | None) -> None:
        """Remembers the newest request, and when its tools and system text were sent."""
        self.sent_until = self.record.live.state.next
        self.sent_edition = self.record.live.edition
        self.last = LastRequest(self.record.view, counted, self.model, prefix, self.sent_until)
        self.requested[extras.text] = time.time()
        if len(self.requested) > MAX_TOOL_SETS:
            del self.requested[min(self.requested, key=self.requested.__getitem__)]

    @property
    def changed_since_request(self) -> int | None:
        """The earliest place that is shown differently than in the newest request."""
        live = self.record.live
        if live.edition == self.sent_edition or live.state.changed is None:
            return None
        was_sent = not self.sent_until or live.state.changed < self.sent_until
        return live.state.changed if was_sent else None

    # What callbacks are told of compactions

    @property
    def shown(self) -> set[tuple[int, int]]:
        """The messages that are shown now: place, and number among those of one edit."""
        return {(line.at, line.n) for item in self.record.live.items for line in item.lines}

    def tell(
        self,
        kind: CompactionKind,
        reason: str,
        before: int,
        after: int,
        edits: Sequence[Replaced] = (),
        messages: int = 0,
    ) -> CompactionEvent:
        """Tells callbacks about the view: a request of so many tokens, before and after."""
        state = self.record.live.state
        event = CompactionEvent(
            kind,
            self.record.key.conversation,
            state.turn,
            state.step,
            reason,
            before,
            after,
            limit=self.meter.limits.window,
            messages=messages,
            was_pruned=any(edit.kind == "prune" for edit in edits),
            was_summarized=any(edit.certificate is not None for edit in edits),
            at=edits[0].at if edits else None,
        )
        self.lock.tell([event])
        return event

    def begin_compaction(self, reason: str, tokens: int) -> None:
        """Tells of the start of a compaction, once until it ends."""
        if self.started is None:
            self.started = self.tell("compaction:start", reason, tokens, tokens)

    def end_compaction(self, edits: Sequence[Replaced], shown: set[tuple[int, int]], tokens: int) -> None:
        """Tells of the end of a compaction; `shown` are the messages that were shown before it."""
        start = self.started
        if start is not None:
            self.started = None
            changed = len(shown - self.shown) if shown else 0
            self.tell("compaction:complete", start.reason, start.tokens_before, tokens, edits, changed)
