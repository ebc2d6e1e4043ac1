"""A conversation that lasts: say things, ask for a view that fits, see what was done and take it back."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload
from uuid import uuid4
from weakref import WeakSet

import msgspec

from refold import telemetry
from refold.config.config import AgentSettings, Config, with_database
from refold.core import codec
from refold.core.draft import PART, Draft, number
from refold.core.errors import ConflictError, MessageError, RefoldError, SettingError, StoreError
from refold.core.event import Event, Expiry, Line, Named, Said
from refold.core.expiry import EXPAND, SEARCH
from refold.core.live import State
from refold.core.message import Kind, Message
from refold.core.plan import CompactionRequest, Policy, Stamp
from refold.core.query import parse_query
from refold.core.slices import slice_of
from refold.core.view import View
from refold.dialects.chunks import INTERRUPTED
from refold.dialects.registry import TARGETS, find_dialect
from refold.models.limits import ModelLimits, find
from refold.session import edits as amend
from refold.session import expand as expansion
from refold.session.compaction import Compaction
from refold.session.embedding import Similarity, embedder_of
from refold.session.export import export_lines
from refold.session.fit import FitRequest, Fitter
from refold.session.inspect import Inspector, parse
from refold.session.intake import Intake
from refold.session.notify import MessageEvent, Notifier, OnEvent, callbacks_of
from refold.session.reduce import Reducer
from refold.session.results import (
    CompactionResult,
    Compactions,
    Decision,
    Diff,
    Explanation,
    Fitted,
    Hit,
    Overflow,
    StoredMessage,
    Undoing,
)
from refold.session.savings import EditSavings
from refold.session.streams import (
    ASYNC,
    StreamRecording,
    Unfinished,
    chunks_of,
    demand_stream,
    is_async_stream,
    is_stream,
)
from refold.session.tools import Toolbox, declared
from refold.session.validate import (
    Override,
    model_name,
    override_of,
    request_fields,
    require_int,
    require_kind,
    require_name,
    require_policies,
)
from refold.stores.record import Record
from refold.stores.store import (
    FindsIds,
    Forks,
    Key,
    Memories,
    Memory,
    MessageListener,
    SessionHooks,
    Snapshots,
    Store,
)
from refold.summaries.lease import CompactionLease

if TYPE_CHECKING:
    from refold.core.budget import Budget
    from refold.session.memories import MemoryRecall
    from refold.summaries.background import PendingWork
    from refold.summaries.prepare import SummaryWriter

Part: TypeAlias = str | int | Sequence[int | None] | None
"""Which lines, characters or items."""
STRATEGIES = ("summarize", "sliding-window", "hierarchical")
WAITS = 3
"""For what is under way, for what is begun then, and for what came of both."""
UNEDITED = ""
"""A view that no edit is made in, since no view can have this name."""


class Session:
    """One conversation through one view. Safe to use from several threads.

    Nothing that is said is ever changed or lost; what `fit` hides can be undone.
    """

    def __init__(
        self,
        store: Store,
        key: Key,
        *,
        model: str | None = None,
        agent: str | None = None,
        config: Config | None = None,
        view: str = "main",
        policies: Sequence[Policy] = (),
        summarizer: Any = None,
        embedder: Any = None,
        on_event: OnEvent | Sequence[OnEvent] | None = None,
        override: Mapping[str, Any] | Override | None = None,
        owns_store: bool = False,
        sends_own_fields: bool = False,
    ) -> None:
        """`sends_own_fields` leaves fields such as `tags` in a message that came as a provider's JSON."""
        self.store, self.key = store, key
        self.config = with_database(config or Config(), store)
        self.settings: AgentSettings = self.config.agent(agent)
        self._agent, self._owns_store, self._summarizer = agent, owns_store, summarizer
        self._embedder = embedder_of(embedder)
        self._is_closed = False
        self._unfinished = deque[Unfinished]()
        self._tapes = WeakSet[StreamRecording]()
        """Streams that were recorded and did not come to their end."""
        self._notices = list[str]()
        """For the next report."""
        self.notifier = self._lock = Notifier(key.conversation, callbacks_of(on_event))
        """The lock: whoever watches is told when it is free again."""
        self.record = Record(store, key, view, parse)
        self._inspector = Inspector(self.record)
        """What is underneath, for faces and tools."""
        self.reducer = Reducer(self.record, self.config, agent, require_policies(policies))
        self.reducer.similarity = Similarity(self._embedder) if self._embedder else None
        self.fitter = Fitter(self.reducer, model_name(model) or self.settings.model, self._lock)
        self.fitter.override = override_of(override)
        self.fitter.sends_own_fields = sends_own_fields
        self._lease = CompactionLease(store, key, view, uuid4().hex)
        self.compaction = Compaction(self.fitter, self._lease, self._lock)
        self.toolbox = Toolbox(self.record, self.settings)
        self.record.heard = partial(_heard, self._lock)
        self._recall = self._attended()
        self.reducer.summaries = self._summaries()

    def _summaries(self) -> "SummaryWriter | None":
        hand_over = self._handing_over()
        if self._summarizer is None and not self.config.has_summarizers(self._agent) and hand_over is None:
            return None
        from refold.summaries.context import SummaryContext
        from refold.summaries.prepare import SummaryWriter, summarizers_of

        given = summarizers_of(self._summarizer, self.settings.summarizer.base_urls)
        facts = (self.record, self.config, self._agent, self._lease)
        summaries = SummaryWriter(
            SummaryContext(*facts, lambda: self.fitter.meter.limits.window), given, self._lock
        )
        summaries.enqueue = hand_over
        return summaries

    def _handing_over(self) -> "Callable[[Budget, int], PendingWork] | None":
        """To workers, where that is how it is set up."""
        if self.settings.summarizer.executor != "worker":
            return None
        from refold.summaries.queue import CompactionJob, queue_of

        path = ("agents", self._agent or "default", "summarizer", "executor")
        queue = queue_of(self.store, self.config.place(*path))

        def hand_over(budget: "Budget", round: int) -> "PendingWork":
            names: dict[str, Any] = {"agent": self._agent, "model": self.model}
            facts: dict[str, Any] = {**names, "handles": self.reducer.handles, "budget": budget}
            return queue.put_if_served(CompactionJob(*self.key, self.record.view, round, **facts))

        return hand_over

    def _attended(self) -> "MemoryRecall | None":
        """A store that learns from what is said is told of this session, and asked what it remembers."""
        store, recalls = self.store, isinstance(self.store, Memories) and self.store.recalls
        if recalls or isinstance(store, MessageListener):
            from refold.session.memories import MemoryRecall, spoken

            if isinstance(store, MessageListener):
                store.listen(spoken(parse))
            if isinstance(store, SessionHooks):
                store.begin(self.key)
            return MemoryRecall(store, self.key) if isinstance(store, Memories) and recalls else None
        return None

    @property
    def conversation(self) -> str:
        return self.key.conversation

    @property
    def model(self) -> str | None:
        """Whose window must not be exceeded. May be changed at any time."""
        return self.fitter.model

    @model.setter
    def model(self, model: str | None) -> None:
        self.fitter.model = model_name(model)

    @property
    def limits(self) -> ModelLimits:
        """What the model takes and costs."""
        return self.fitter.meter.limits

    @property
    def dialect(self) -> str:
        """The API's message format that requests are written in."""
        return self.fitter.dialect

    @property
    def budget(self) -> "Budget":
        """How many tokens the next request may have, and from how many on the view is made smaller."""
        return self.fitter.budget

    @property
    def shows_handles(self) -> bool:
        """True if what is hidden is marked with its place, such as `#57`, for `refold_expand`."""
        return self.reducer.handles

    @shows_handles.setter
    def shows_handles(self, shows_handles: bool) -> None:
        self.reducer.handles = shows_handles

    @property
    def hidden_tokens(self) -> int:
        """Tokens that the view leaves out of what was recorded, as the model counts them."""
        with self._lock:
            live = self.record.live
            return self.fitter.meter.counter.tokens(max(0, live.state.total - live.tokens))

    @property
    def inspect(self) -> Inspector:
        """Reads what was recorded and what is shown, as of the last call of this session."""
        return self._inspector

    @contextmanager
    def locked(self) -> Iterator[Inspector]:
        """Keeps other threads of this session from appending or editing while a block runs."""
        with self._lock:
            self.record.catch_up()
            yield self._inspector

    # Saying

    @overload
    def append(
        self,
        message: list[Any] | tuple[Any, ...],
        *,
        tags: Sequence[str] = (),
        kind: Kind | None = None,
        expiry: Expiry | None = None,
        tools: Sequence[str] = (),
        dialect: str | None = None,
    ) -> list[int]: ...
    @overload
    def append(
        self,
        message: Any,
        *,
        id: str | None = None,
        tags: Sequence[str] = (),
        kind: Kind | None = None,
        expiry: Expiry | None = None,
        tools: Sequence[str] = (),
        dialect: str | None = None,
    ) -> int: ...
    def append(
        self,
        message: Any,
        *,
        id: str | None = None,
        tags: Sequence[str] = (),
        kind: Kind | None = None,
        expiry: Expiry | None = None,
        tools: Sequence[str] = (),
        dialect: str | None = None,
    ) -> int | list[int]:
        """Stores a message, or all of a list or none; returns its place, or their places.

        A message is a dict in any dialect, an SDK's message, a whole SDK reply, or a `refold.Message`; a
        list may also be the chunks of a stream. A stream of an SDK, or any iterator of its chunks, is read to
        its end and becomes one message; `record_stream` hands the chunks on meanwhile. An id that was
        appended before is stored once: its place is returned again. When this returns, the message is safe
        on disk.

        `kind` says what the message is, where its role does not: `action-result` (what a tool answered),
        `sub-agent-result`, `user-input`, `retry-context` (in the user's place, it only tells the model to
        try again: it is no request) or `system`. Unset, it follows from the role.

        Raises:
            MessageError: something in it cannot be understood; nothing was stored.
            SettingError: an argument is not allowed, such as an unknown `kind`.
            StoreError: the session was closed, or the store cannot be used.
        """
        require_kind(kind)
        beside: dict[str, Any] = {"id": id, "tags": tags, "kind": kind, "expiry": expiry, "tools": tools}
        beside = {name: value for name, value in beside.items() if value is not None and value != ()}
        intake = self.intake(dialect)
        if is_stream(message) or is_async_stream(message):
            taken = intake.take(chunks_of(message, "stream"), "stream[{}]".format, **beside)
            is_one = taken.is_stream
        elif isinstance(message, list | tuple):
            taken = intake.take(message, **beside)
            is_one = False
        else:
            taken = intake.take([message], lambda n: "message", **beside)
            is_one = True
        if id is not None and not is_one and not taken.is_stream:
            raise SettingError("id", "names one message, not a list; give each a refold.Message with its id")
        places = self.say(taken.drafts)
        return places[0] if is_one else [places[n] for n in taken.first]

    def record_stream(self, stream: Iterable[Any], *, keep_partial: bool = False) -> Iterator[Any]:
        """Hands on the chunks of a streamed reply as they come; when the stream ends, the reply is stored.

        If the stream breaks, or is not read to its end, nothing is stored and the next report has a notice;
        with `keep_partial`, what came is stored, and its `finish` is `interrupted`.

        Raises:
            MessageError: it is no stream, or its chunks cannot be understood; nothing was stored.
        """
        demand_stream(stream)
        if not isinstance(stream, Iterable):
            raise MessageError("stream", ASYNC)
        return self._recorded(stream, self._tape(keep_partial))

    def _recorded(self, stream: Iterable[Any], tape: StreamRecording) -> Iterator[Any]:
        try:
            for chunk in stream:
                tape.chunks.append(chunk)
                yield chunk
        except GeneratorExit:  # nobody reads on: the tape leaves what it has when it is collected
            raise
        except BaseException as error:
            tape.fail(f"it broke off with {type(error).__name__}: {error}")
            self._settle_streams()
            raise
        self._finish_stream(tape)

    def _tape(self, keep_partial: bool) -> StreamRecording:
        self._demand_open()
        tape = StreamRecording(keep_partial, self._unfinished)
        self._tapes.add(tape)
        return tape

    def _finish_stream(self, tape: StreamRecording) -> None:
        """Stores what was recorded of a stream that ended."""
        tape.is_over = True
        if not tape.chunks:
            tape.fail("it had no chunks, or was read already")
            return
        taken = self.intake().take(tape.chunks, "stream[{}]".format)
        if taken.drafts[0].message.finish == INTERRUPTED and not tape.keep_partial:
            tape.fail("it ended before the model had finished")
            return
        self.say(taken.drafts)

    def _settle_streams(self) -> None:
        """Stores what came of streams that were not read to their end, or leaves a notice of each."""
        while self._unfinished:
            stream = self._unfinished.popleft()
            if not stream.keep_partial or not stream.chunks:
                self._notices.append(stream.notice)
                continue
            try:
                self.say(self.intake().take(stream.chunks, "stream[{}]".format).drafts)
            except RefoldError as error:
                self._notices.append(f"{stream.notice}; what came of it cannot be stored: {error}")

    def intake(self, dialect: str | None = None, *, reads_own_fields: bool = True) -> Intake:
        """Parses and counts messages for the model: in a dialect, or in the one that each is in.

        Without `reads_own_fields`, fields such as `tags` belong to the provider.
        """
        if dialect is not None:
            find_dialect(require_name("dialect", dialect))
        with self._lock:  # the dialect is that of the newest message, which may have to be read first
            return Intake(self.fitter.meter.counter, self.fitter.dialect, dialect, reads_own_fields)

    def say(self, drafts: Sequence[Draft], *, after: int | None = None) -> list[int]:
        """Stores messages that are parsed and counted already; returns their places.

        `after` is how many messages must have been said until then.

        Raises:
            ConflictError: more were said, or fewer; nothing was stored.
        """
        self._demand_open()
        self._settle_streams()
        ids = [draft.message.id for draft in drafts if draft.message.id is not None]
        places: dict[str, int] = {}
        with self._lock:

            def build() -> Sequence[Event]:
                nonlocal places
                if after not in (None, self.record.live.state.index):
                    raise ConflictError(f"{self.conversation!r} went on: it no longer has {after} messages")
                places = self.store.find(self.key, ids) if ids and isinstance(self.store, FindsIds) else {}
                new, seen = list[Draft](), set[str | None](places)
                for draft in drafts:
                    id = draft.message.id
                    if id is None or (id not in seen and id.partition(PART)[0] not in places):
                        new.append(draft)
                        seen.add(id)
                state = self.record.live.state
                return self.toolbox.leased(number(new, state, self.fitter.last, time.time()))

            gauge = self.record.live.state.measured
            said = [event for event in self.record.append(build) if isinstance(event, Said)]
            self.fitter.note_dialect(drafts)
            for usage in [event.message.usage for event in said if event.message.usage]:
                self.fitter.learn(usage, gauge)
        places |= {event.message.id: event.at for event in said if event.message.id is not None}
        unnamed = iter([event.at for event in said if event.message.id is None])
        return [
            next(unnamed)
            if (id := draft.message.id) is None
            else places.get(id, places.get(id.partition(PART)[0], 0))
            for draft in drafts
        ]

    def _demand_open(self) -> None:
        """
        Raises:
            StoreError: the session was closed.
        """
        if self._is_closed:
            raise StoreError(f"The session of {self.conversation!r} is closed; open it again to go on")

    # What the model sees

    def fit(
        self,
        *,
        dialect: str | None = None,
        tools: Sequence[Any] | None = None,
        override: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> Fitted:
        """The next request: everything if it fits, else what must be there and the newest that fits.

        `override` beats the settings, and what `open` was given, field by field (see
        docs/configuration.md); what it reduces stays reduced in later requests until it is undone.
        `request` is what else will be in it, such as `max_tokens` or `store`: it is heeded and handed on.

        Raises:
            OverBudgetError: what must be shown is larger than the window.
        """
        require_name("dialect", "unset" if dialect is None else dialect)
        wish = FitRequest(dialect, tools, override, request_fields(request))
        with telemetry.work("fit", self.conversation) as span:
            self._settle_streams()
            told = self._remembered(self._recall) if self._recall is not None else ()
            if self.reducer.summaries is not None:
                self._wait(wish)
            fitted = self._fit(wish, told, self._lease)
            if fitted is None:  # a second compaction waits for the first, and then goes on without it
                self._lease.wait_for_others(self.settings.summarizer.wait_s)
                fitted = self._fit(wish, told)
            assert fitted is not None
            report, tokens = fitted.report, fitted.report.tokens
            span.note({"refold.tokens.before": tokens.before, "refold.tokens.final": tokens.final})
            span.note({"refold.edits": len(report.edits), "refold.limit": report.limit})
            return fitted

    def _fit(
        self, wish: FitRequest, told: Sequence[str], lease: CompactionLease | None = None
    ) -> Fitted | None:
        with self._lock:
            self.record.catch_up()
            fitted = self.fitter.fit(wish, [*told, *self._notices], lease)
            if fitted is not None:
                self._notices.clear()
            return fitted

    def before_step(
        self,
        *,
        tools: Sequence[Any] | None = None,
        override: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> Fitted:
        """For loops of your own: what the next call of the model is made with."""
        return self.fit(tools=tools, override=override, request=request)

    def after_step(self, reply: Any, *results: Any) -> list[int]:
        """The same after it: keeps the model's reply and the results of its calls, all or none.

        The reply may be a stream, or the list of its chunks: it is read to its end.
        """
        places: list[int] = self.append([reply, *results])
        return places

    def _remembered(self, recall: "MemoryRecall") -> Sequence[str]:
        """Shows what is remembered beside the user's newest message; returns what went wrong."""
        with self._lock:
            self.record.catch_up()
            said = recall.due(self.record)
        found = recall.ask(said) if said is not None else ()  # nobody else waits: the lock is free
        if said is not None and found:
            with self._lock:
                self.record.catch_up()
                self.record.append(lambda: recall.shown(self.record, said, found, self.fitter.meter))
        return recall.taken()

    def memories(
        self, query: str | None = None, limit: int = 10, namespace: str | None = None
    ) -> list[Memory]:
        """What the store's service learned from conversations: what is nearest to a query, or what there is.

        Raises:
            StoreError: the store has no memories, or the service does not answer.
        """
        from refold.session.search import limit_of

        if not isinstance(self.store, Memories):
            kind, known = type(self.store).__name__, "mem0://, hybrid:// and agentcore:// have them"
            raise StoreError(f"{kind} has no memories; {known}")
        asked = None if query is None else require_name("query", query)
        where = None if namespace is None else require_name("namespace", namespace)
        return list(self.store.memories(self.key, asked, limit_of(limit), where))

    def _wait(self, wish: FitRequest) -> None:
        """For what models are writing, as long as is set; nobody else waits, since the lock is free."""
        wait_s, summaries = self.settings.summarizer.wait_s, self.reducer.summaries
        until = time.monotonic() + wait_s
        for _ in range(WAITS if summaries is not None else 0):
            with self._lock:
                self.record.catch_up()
                awaited = self.fitter.pending_summaries(wish)
            if awaited is None or summaries is None:
                return
            if not awaited.wait(max(0.0, until - time.monotonic())):
                summaries.problems.append(
                    f"No summary was ready after {wait_s:g} s: compacted without a model"
                )
                return

    def check_overflow(
        self, *, tools: Sequence[Any] | None = None, request: Mapping[str, Any] | None = None
    ) -> Overflow:
        """How the next request stands to the model's window, tools and system text included.

        What stands beside the messages is as in the last `fit` unless it is given.
        """
        with self._lock:
            self.record.catch_up()
            return self.fitter.overflow(FitRequest(tools=tools, request=request_fields(request)))

    def should_compact(
        self, *, tools: Sequence[Any] | None = None, request: Mapping[str, Any] | None = None
    ) -> Decision:
        """Whether the next `fit` would make the view smaller, and because of what."""
        with self._lock:
            self.record.catch_up()
            return self.fitter.decide(FitRequest(tools=tools, request=request_fields(request)))

    def view(self, at: int | None = None) -> View:
        """What the model sees now, or saw right after the event at a place."""
        self._settle_streams()
        with self._lock:
            self.record.catch_up()
            live = self.record.live if at is None else self.record.as_of(require_int("at", at))
            return self.record.with_words(live.freeze())

    def compact(
        self,
        strategy: str | None = None,
        *,
        keep_recent: int | None = None,
        target_tokens: int | None = None,
        focus: str = "",
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CompactionResult:
        """Makes the view smaller now: down to the newest messages, or to a number of tokens.

        Strategies are summarize, sliding-window and hierarchical; unset, the configured one. A summarizer is
        waited for. `focus` is what a summary should tell most about. With `dry_run` nothing is changed and no
        model is asked: the result is what would be done by rule. `on_progress` is called, by any thread, with
        how many requests for summaries are answered, and of how many.
        """
        strategy = self.settings.compaction.strategy if strategy is None else strategy
        if strategy not in STRATEGIES:
            raise SettingError("strategy", f"{strategy!r} is not known; known: {', '.join(STRATEGIES)}")
        for name, given in (("keep_recent", keep_recent), ("target_tokens", target_tokens)):
            if given is not None and require_int(name, given) < 0:
                raise SettingError(name, f"expected 0 or more, got {given}")
        order = CompactionRequest(
            strategy, keep_recent, target_tokens, require_name("focus", focus) if focus else ""
        )
        with telemetry.work("compact", self.conversation) as span:
            summaries = self.reducer.summaries
            if summaries is not None:
                summaries.context.progress = on_progress
            result = self.compaction.run(order, dry_run)
            if summaries is not None:
                result = msgspec.structs.replace(result, problems=tuple(summaries.problems))
            span.note({"refold.tokens.saved": result.tokens_saved, "refold.strategy": strategy})
            return result

    def compactions(self) -> Compactions:
        with self._lock:
            self.record.catch_up()
            return self.compaction.summary

    # What was said

    def get_all(self) -> list[StoredMessage]:
        self._settle_streams()
        with self._lock:
            self.record.catch_up()
            return [
                self._inspector.stored(event) for event in self.record.events() if isinstance(event, Said)
            ]

    def get_range(self, start: int, end: int) -> list[StoredMessage]:
        """Messages by index, counting messages only, the end exclusive."""
        self._settle_streams()
        with self._lock:
            self.record.catch_up()
            found = []
            for event in self.record.events(self.record.place_of(max(0, require_int("start", start)))):
                if isinstance(event, Said):
                    if event.index >= require_int("end", end):
                        break
                    found.append(self._inspector.stored(event))
            return found

    def get_recent(
        self, max_messages: int = 50, max_tokens: int | None = None, include_system: bool = True
    ) -> list[StoredMessage]:
        """The newest messages within both limits, in the order they were said.

        What the store remembers of use comes before them, in one message with the tag `memory` and no place:
        where there is a limit, in a quarter of it at most and never instead of the newest message.
        """
        self._settle_streams()
        found: list[StoredMessage] = []
        most = require_int("max_messages", max_messages)
        limit = None if max_tokens is None else max(0, require_int("max_tokens", max_tokens))
        memory: list[StoredMessage] = []
        tokens = 0
        with self._lock:
            self.record.catch_up()
            for event in self.record.backwards():
                tokens += event.line.tokens if include_system or event.line.role != "system" else 0
                if len(found) >= most or (limit is not None and tokens > limit):
                    break
                if include_system or event.line.role != "system":
                    found.append(self._inspector.stored(event))
        if self._recall is not None and found:
            room = None if limit is None else min(limit // 4, limit - found[0].tokens)
            memory = self._recall.beside(self.record, self._lock, self.fitter.meter, room)
        while found and limit is not None and sum(one.tokens for one in (*memory, *found)) > limit:
            found.pop()
        return [*memory, *found[::-1]]

    def get_count(self) -> int:
        self._settle_streams()
        with self._lock:
            self.record.catch_up()
            return self.record.live.state.index

    def messages_since_compaction(self) -> list[StoredMessage]:
        with self._lock:
            self.record.catch_up()
            since = self.record.live.state.compacted
            events = self.record.events(0 if since is None else since + 1)
            return [self._inspector.stored(event) for event in events if isinstance(event, Said)]

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[Event]:
        """What happened, in order; `after` is how many events to leave out, those seen already.

        With `follow` it goes on with what anybody appends, in any process, until the conversation is erased.
        """
        start = max(0, require_int("after", after))
        if not follow:
            return self.record.events(start)
        return (event for event in self.record.followed(start) if event is not None)

    # Getting it back

    def expand(
        self,
        at: int | str,
        *,
        lines: Part = None,
        chars: Part = None,
        items: Part = None,
        match: str | None = None,
        reason: str | None = None,
    ) -> str:
        """The text of a message, or of all that an edit stands for. Changes nothing.

        `at` is a place, a message's id, or a negative number: -1 is the newest message.
        A part of it by `lines` or `items`, counted from 1, both ends included: (40, 50) or "40-50"; by
        `chars`, a Python slice; or the lines that `match` a text, or a regular expression between slashes.

        Raises:
            CannotExpandError: there is nothing to show again, or no such part.
        """
        part = slice_of({"lines": lines, "chars": chars, "items": items, "match": match})
        with telemetry.work("expand", self.conversation):
            with self._lock:
                self.record.catch_up()
                found = expansion.source(self.record, at if isinstance(at, str) else require_int("at", at))
            text = expansion.text_of(found, part)  # which may take long: nobody else waits for it
            self._tell_expanded(found.at, reason or "")
            return text

    def _tell_expanded(self, at: int, reason: str) -> None:
        head, state = codec.head(self.record.entry(at)), self.record.live.state
        role, tools = (head.role, head.tools) if isinstance(head, Line) else ("", ())
        event = MessageEvent(
            "message-expanded", self.conversation, at, state.turn, state.step + 1, role, tools, reason
        )
        with self._lock:
            self._lock.tell([event])

    def tools(self, dialect: str | None = None) -> list[dict[str, Any]]:
        """Expand and search as tools, for the request; where no handles are shown, search alone."""
        if dialect is not None:
            find_dialect(require_name("dialect", dialect))
        return declared(
            dialect or self.fitter.dialect, (EXPAND, SEARCH) if self.reducer.handles else (SEARCH,)
        )

    def call(self, name: str, arguments: Any) -> str:
        """Runs one of these tools; append what it returns as the tool's result.

        `arguments` are a JSON text or a mapping. What cannot be done comes back as a sentence for the model.
        """
        with telemetry.tool(str(name), self.conversation):
            with self._lock:
                self.record.catch_up()
                meter = self.fitter.meter
                facts = (meter.limits.window, meter.counter.counter.text, self._found)
            asked = self.toolbox.call(name, arguments, self._lock, *facts)
            if asked.at is not None:
                self._tell_expanded(asked.at, asked.reason)
            return asked.text

    def _found(self, query: str, limit: int) -> str:
        from refold.session.search import as_tool_text

        hits = self.search(query, limit=limit)
        shown = [hit for hit in hits if not self.record.live.is_withheld(hit.at)]
        return as_tool_text(shown, handles=self.reducer.handles)

    def explain(self, at: int) -> Explanation:
        """Why a message is in the view or out of it: what was done, by which rung, by which setting."""
        with self._lock:
            self.record.catch_up()
            return self._inspector.explain(require_int("at", at))

    def savings(self) -> list[EditSavings]:
        """Which edits were made to save money or tokens, what was expected of each, and what came of it."""
        model = self.record.live.state.model or self.fitter.model
        prices = find(model, self.config.models).limits.cached if model else None
        return self._inspector.savings(prices)

    def search(self, query: str, *, limit: int = 10, everywhere: bool = False) -> list[Hit]:
        """What was said here, or `everywhere` in the owner's conversations, that has to do with a query.

        Words, "a phrase", pref*, tool:NAME, role:ROLE. The best comes first.

        Raises:
            SettingError: there is nothing to look for, or the limit is out of range.
        """
        from refold.session import search as searching

        asked, most = parse_query(query), searching.limit_of(limit)
        scope = self.key.owner if everywhere else self.key
        found = searching.find(self.store, scope, asked, most, parse, self._embedder)
        with self._lock:
            self.record.catch_up()
            return searching.hits(self.store, asked, found, most, parse, self.record)

    # What people do

    def undo(self, at: int | None = None, *, why: str = "") -> Undoing:
        """Takes back an edit, a pin or an undoing, the newest edit unless a place is given.

        For the place of a message, the edit that corrects or hides it. Returns the place of the undoing,
        which knows what was taken back (`of`) and which edit still covers that (`covered_by`).

        Raises:
            NotFoundError: nothing of that kind is in force there.
            ConflictError: it took an edit back that cannot stand any more, since another is in the way.
        """
        asked, done = None if at is None else require_int("at", at), list[tuple[int, int | None]]()

        def make(stamp: Stamp) -> Sequence[Event]:
            event, covered_by = amend.undo(self.record, asked, stamp, why)
            done.append((event.of, covered_by))
            return [event]

        return Undoing(self._amend(make, why), *done[-1])

    def restore(self, at: int, *, why: str = "") -> int:
        """Shows the original in its old place again, with the calls and results it belongs to."""
        return self._amend(lambda stamp: [amend.restore(self.record, require_int("at", at), stamp, why)], why)

    def correct(self, at: int, message: Any, *, why: str = "") -> int:
        """Shows another message in the place of one that was said, which stays in the record.

        It is whatever `append` takes, or a text, which keeps all but what the message says. It counts like
        what was said: it is shown as it is where the message would be, and summaries are made of it.

        Raises:
            MessageError: it is of another role, or answers or makes other calls.
            NotFoundError: no message was said there, or it is hidden: restore it first.
        """
        new = message if isinstance(message, str) else self._one(message)
        place, count = require_int("at", at), self.fitter.meter.counter.message
        return self._amend(lambda stamp: [amend.correct(self.record, place, new, count, stamp, why)], why)

    def _one(self, message: Any) -> Message:
        drafts = self.intake().take([message], lambda n: "message").drafts
        if len(drafts) != 1:
            raise MessageError("message", f"is {len(drafts)} when taken apart; correct each in its own place")
        return drafts[0].message

    def diff(self, at: int | None = None, to: int | None = None, *, other: "Session | None" = None) -> Diff:
        """What the view showed right after the event at a place and does not right after another, or now.

        With `other`, a fork or any conversation: what this one shows, now or at a place, and that does not.
        """
        if at is None and to is None and other is None:
            raise SettingError("at", "with what? Give a place, or another conversation as `other`")
        if other is not None and not isinstance(other, Session):
            raise SettingError("other", f"expected a session, got {type(other).__name__}")
        old, new = (None if one is None else require_int(name, one) for name, one in (("at", at), ("to", to)))
        with self._lock:
            self.record.catch_up()
            theirs = self._inspector
            if other is not None:
                theirs = Inspector.open(other.store, other.key, other.record.view)
            return self._inspector.diff(theirs, old, new)

    def pin(self, at: int, *, why: str = "") -> int:
        """Keeps a message in every view, whatever is reduced around it."""
        return self._amend(lambda stamp: [amend.pin(self.record, require_int("at", at), stamp, why)], why)

    def unpin(self, at: int, *, why: str = "") -> int:
        return self._amend(lambda stamp: amend.unpin(self.record, require_int("at", at), stamp, why), why)

    def name(self, *, title: str | None = None, model: str | None = None) -> int:
        """Gives the conversation a title, or a model, for lists of many; what is not given stays."""
        if title is not None and not isinstance(title, str):
            raise SettingError("title", f"expected a text, got {title!r}")
        given = (title, model_name(model))
        return self._amend(lambda stamp: [Named(stamp.at, *given, stamp.time)], "")

    def _amend(self, make: Callable[[Stamp], Sequence[Event]], why: str) -> int:
        if not isinstance(why, str):
            raise SettingError("why", f"expected a text, got {why!r}")
        self._demand_open()
        with self._lock:
            self.record.catch_up()

            def build() -> Sequence[Event]:
                live = self.record.live
                return make(Stamp(live.state.next, time.time(), live.view))

            return self.record.append(build)[-1].at

    def fork(self, new_id: str, *, at: int | None = None) -> "Session":
        """A conversation that shares this one's past up to and including a place, all of it unless given."""
        new = forked(self, new_id, at)
        settings: dict[str, Any] = {"model": self.model, "agent": self._agent, "config": self.config}
        settings |= {"policies": self.reducer.policies, "summarizer": self._summarizer}
        settings |= {"embedder": self._embedder, "override": self.fitter.override}
        settings["on_event"] = self._lock.callbacks
        return Session(self.store, new, **settings, view=self.record.view)

    def export(self, format: str | None = None, *, view: bool = False) -> Iterator[str]:
        """The whole record as lines of JSON, for `refold.load`.

        With a `format` (`openai-chat`, `openai-responses`, `anthropic` or `ai-sdk`), one line: a JSON object
        with the `messages` as that API takes them, and `system` where the API has it apart. These are all
        messages as they were said, without any edit, or with `view` those that the model is shown now.
        """
        if format is None:
            if view:
                raise SettingError("view", "needs a format such as openai-chat: a record is exported whole")
            return export_lines(self.store, self.key)
        if format not in TARGETS:
            raise SettingError("format", f"{format!r} is not known; known are {', '.join(TARGETS)}")
        return self._exported(format, view)

    def _exported(self, format: str, view: bool) -> Iterator[str]:
        with self._lock:
            self.record.catch_up()
            record = self.record if view else Record(self.store, self.key, UNEDITED, parse)
            request = self.fitter.export_request(record, format)
        yield codec.dumps(request).decode()

    def clear(self, *, with_forks: bool = False) -> list[Key]:
        """Erases the conversation for good. Forks keep what they share, and are returned."""
        with self._lock:
            heirs = self.store.erase(self.key, with_forks=with_forks)
            self.record.catch_up()
            return heirs

    def close(self) -> None:
        """Prunes for the next run, keeps a snapshot, and closes the store where the session opened it.

        Nothing can be appended after that.
        """
        if not self._is_closed:
            for tape in self._tapes:
                tape.leave("the session was closed before it was read to its end")
            self._settle_streams()
        if self.reducer.summaries is not None:
            self.reducer.summaries.close()
        with telemetry.work("close", self.conversation), self._lock:
            with suppress(RefoldError):  # the record is whole without it
                self.fitter.finish()
            self.record.save()
            self.fitter.meter.save()
            if isinstance(self.store, SessionHooks):
                self.store.end(self.key)
            if self._owns_store:
                self.store.close()
            self._is_closed = True
        self.reducer.summaries = None  # they refer back to the session

    def save_snapshot(self) -> None:
        """Saves a snapshot, so that the conversation opens faster; unlike `close`, it prunes nothing."""
        with self._lock:
            self.record.save()

    def __repr__(self) -> str:
        """One line, of what is known already: nothing is read for it."""
        live = self.record.known
        facts = f"owner={self.key.owner!r} model={self.model!r} view={self.record.view!r}"
        size = f"recorded={live.state.index} tokens={live.tokens}"
        return f"<refold.Session {self.conversation!r} {facts} {size}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def forked(session: Session, new_id: str, at: int | None = None) -> Key:
    """The same as `fork`, without a session for what is new."""
    store, record = session.store, session.record
    if not isinstance(store, Forks):
        raise StoreError(f"{type(store).__name__} cannot fork; export and load under another id")
    with session.notifier:
        record.catch_up()
        stop = record.live.state.next if at is None else record.end_of(require_int("at", at))
        new = Key(session.key.owner, require_name("new_id", new_id))
        store.fork(session.key, new, stop)
        if isinstance(store, Snapshots):  # those of the shared past are the fork's as well
            record.save()
            with suppress(StoreError):
                for view, snapshot in store.saved(session.key).items():
                    if snapshot.at <= stop:
                        store.save(new, view, snapshot)
        return new


def _heard(notifier: Notifier, events: Sequence[Event], state: State) -> None:
    notifier.tell_all(events, state.turn, state.step)
