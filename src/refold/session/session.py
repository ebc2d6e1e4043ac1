"""`Session`: one conversation, with everything that can be done with it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack, overload
from uuid import uuid4
from weakref import WeakSet

import msgspec

from refold import telemetry
from refold.config.config import AgentSettings, Config, with_database
from refold.core import codec
from refold.core.draft import Draft
from refold.core.errors import MessageError, RefoldError, SettingError, StoreError
from refold.core.event import Event, Expiry, Line, Named, Said, Undone
from refold.core.expiry import EXPAND, SEARCH
from refold.core.message import Kind
from refold.core.plan import CompactionRequest, Policy, Stamp
from refold.core.query import parse_query
from refold.core.slices import slice_of
from refold.core.view import View
from refold.dialects.chunks import INTERRUPTED
from refold.dialects.registry import TARGETS, find_dialect
from refold.models.limits import ModelLimits, find
from refold.policies.shorten import quoted
from refold.session import compaction, edits, expand, fit, triggers
from refold.session.ahead import pending_summaries, summary_writer
from refold.session.conversation import Conversation, FitRequest
from refold.session.copy import copy_snapshots
from refold.session.embedding import Similarity, embedder_of
from refold.session.export import export_lines
from refold.session.inspect import Inspector, parse
from refold.session.intake import Intake, append_drafts
from refold.session.notify import MessageEvent, Notifier, OnEvent, callbacks_of
from refold.session.render import Renderer
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
    chunks_of,
    is_async_stream,
    is_stream,
    require_stream,
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
from refold.stores.store import Forks, Key, Memories, Memory, MessageListener, SessionHooks, Store
from refold.summaries.lease import CompactionLease

if TYPE_CHECKING:
    from refold.core.budget import Budget
    from refold.session.memories import MemoryRecall

Part: TypeAlias = str | int | Sequence[int | None] | None
"""Which lines, characters or items."""
STRATEGIES = ("summarize", "sliding-window", "hierarchical")
WAITS = 3
"""For a job that is running, for one that is started then, and for what came of both."""
UNEDITED = ""
"""No edit is made in a view with this name, since no view can have it."""


class MessageFields(TypedDict, total=False):
    """Arguments of `append`, for type checkers."""

    tags: Sequence[str]
    kind: Kind | None
    expiry: Expiry | None
    tools: Sequence[str]
    dialect: str | None


class Session:
    """One conversation through one view. Safe to use from several threads.

    Recorded messages are never changed or lost; what `fit` hides can be shown again.
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
        is_one_off: bool = False,
    ) -> None:
        """With `sends_own_fields`, fields such as `tags` are sent where a message came as a provider's JSON.
        A session that `is_one_off` makes one request: nothing is prepared for the next one.
        """
        self.store = store
        self.key = key
        self.config = with_database(config or Config(), store)
        self.settings: AgentSettings = self.config.agent(agent)
        self._lock = Notifier(key.conversation, callbacks_of(on_event))
        """Calls callbacks once it is released."""
        self.record = Record(store, key, view, parse, self._lock.appended)
        self._summarizer = summarizer
        self._embedder = embedder_of(embedder)
        self.chat = Conversation(
            self.record,
            self.config,
            agent,
            model_name(model) or self.settings.model,
            CompactionLease(store, key, view, uuid4().hex),
            self._lock,
            policies=require_policies(policies),
            similarity=Similarity(self._embedder) if self._embedder else None,
            override=override_of(override),
            sends_own_fields=sends_own_fields,
            is_one_off=is_one_off,
        )
        """What the functions behind `fit` and `compact` work on."""
        self.chat.summaries = summary_writer(self.chat, summarizer)
        self._toolbox = Toolbox(self.chat)
        self._inspector = Inspector(self.record)
        self._recordings = WeakSet[StreamRecording]()
        """Of streams that are being read."""
        self._unfinished = deque[StreamRecording]()
        self._recall = self._begin()
        self._has_appended = False
        self._owns_store = owns_store
        self._is_closed = False

    def _begin(self) -> "MemoryRecall | None":
        """Tells the store that a session begins; returns what asks it for memories, if it has any."""
        recalls = isinstance(self.store, Memories) and self.store.recalls
        if not recalls and not isinstance(self.store, MessageListener):
            return None
        from refold.session.memories import MemoryRecall, spoken

        if isinstance(self.store, MessageListener):
            self.store.listen(spoken)
        if isinstance(self.store, SessionHooks):
            self.store.begin(self.key)
        return MemoryRecall(self.store, self.key) if isinstance(self.store, Memories) and recalls else None

    @property
    def conversation(self) -> str:
        """The id of the conversation."""
        return self.key.conversation

    @property
    def model(self) -> str | None:
        """The model whose window must not be exceeded. May be changed at any time."""
        return self.chat.model

    @model.setter
    def model(self, model: str | None) -> None:
        self.chat.model = model_name(model)

    @property
    def limits(self) -> ModelLimits:
        """What the model takes and costs."""
        return self.chat.meter.limits

    @property
    def dialect(self) -> str:
        """The API's message format that requests are written in."""
        return self.chat.dialect

    @property
    def budget(self) -> "Budget":
        """How many tokens the next request may have, and from how many on the view is compacted."""
        return self.config.budget(self.settings, self.limits)

    @property
    def shows_handles(self) -> bool:
        """True if what is hidden is marked with its place, such as `#57`, for `refold_expand`."""
        return self.chat.handles

    @shows_handles.setter
    def shows_handles(self, shows_handles: bool) -> None:
        self.chat.handles = shows_handles

    @property
    def hidden_tokens(self) -> int:
        """Recorded tokens that the view leaves out, as the model counts them."""
        with self._lock:
            live = self.record.live
            return self.chat.meter.counter.tokens(max(0, live.state.total - live.tokens))

    @property
    def inspect(self) -> Inspector:
        """Reads what was recorded and what is shown, as of the last call of this session."""
        return self._inspector

    @contextmanager
    def locked(self) -> Iterator[Inspector]:
        """Keeps other threads of this session from appending or editing while a block runs."""
        self._settle_streams()
        with self._lock:
            self.record.catch_up()
            yield self._inspector

    # Recording

    @overload
    def append(self, message: list[Any] | tuple[Any, ...], **fields: Unpack[MessageFields]) -> list[int]: ...
    @overload
    def append(self, message: Any, *, id: str | None = None, **fields: Unpack[MessageFields]) -> int: ...
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
        fields: dict[str, Any] = {"id": id, "tags": tags, "kind": kind, "expiry": expiry, "tools": tools}
        given = {name: value for name, value in fields.items() if value is not None and value != ()}
        intake = self.intake(dialect)
        is_list = isinstance(message, list | tuple)
        if is_list:
            parsed = intake.take(message, **given)
        elif is_stream(message) or is_async_stream(message):
            parsed = intake.take(chunks_of(message, "stream"), "stream[{}]".format, **given)
            is_list = not parsed.is_stream
        else:
            parsed = intake.take([message], lambda n: "message", **given)
        if id is not None and is_list and not parsed.is_stream:
            raise SettingError("id", "names one message, not a list; give each a refold.Message with its id")
        places = self.say(parsed.drafts)
        return [places[n] for n in parsed.first] if is_list else places[0]

    def record_stream(self, stream: Iterable[Any], *, keep_partial: bool = False) -> Iterator[Any]:
        """Hands on the chunks of a streamed reply as they come; when the stream ends, the reply is stored.

        If the stream breaks off or is not read to its end, nothing is stored and the next report has a
        notice; with `keep_partial`, what came is stored, and its `finish` is `interrupted`.

        Raises:
            MessageError: it is not a stream, or its chunks cannot be understood; nothing was stored.
        """
        require_stream(stream)
        if not isinstance(stream, Iterable):
            raise MessageError("stream", ASYNC)
        return self._recorded(stream, self._begin_stream(keep_partial))

    def _recorded(self, stream: Iterable[Any], recording: StreamRecording) -> Iterator[Any]:
        try:
            for chunk in stream:
                recording.chunks.append(chunk)
                yield chunk
        except GeneratorExit:  # nobody reads on; the recording is settled when it is collected
            raise
        except BaseException as error:
            recording.break_off(error)
            self._settle_streams()
            raise
        self._finish_stream(recording)

    def _begin_stream(self, keep_partial: bool) -> StreamRecording:
        """For `_finish_stream`, once it has all chunks."""
        self._require_open()
        recording = StreamRecording(keep_partial, self._unfinished)
        self._recordings.add(recording)
        return recording

    def _finish_stream(self, recording: StreamRecording) -> None:
        """Stores the reply of a stream that ended."""
        recording.is_over = True
        if not recording.chunks:
            recording.fail("it had no chunks, or was read already")
            return
        drafts = self.intake().take(recording.chunks, "stream[{}]".format).drafts
        if drafts[0].message.finish == INTERRUPTED and not recording.keep_partial:
            recording.fail("it ended before the model had finished")
            return
        self.say(drafts)

    def _settle_streams(self) -> None:
        """Stores what came of streams that were not read to their end, or leaves a notice of each."""
        while self._unfinished:
            stream = self._unfinished.popleft()
            if not stream.keep_partial or not stream.chunks:
                self.chat.notices.append(stream.notice)
                continue
            try:
                self.say(self.intake().take(stream.chunks, "stream[{}]".format).drafts)
            except RefoldError as error:
                self.chat.notices.append(f"{stream.notice}; what came of it cannot be stored: {error}")

    def intake(self, dialect: str | None = None, *, reads_own_fields: bool = True) -> Intake:
        """Parses and counts messages for the model: in a dialect, or each in its own.

        Without `reads_own_fields`, fields such as `tags` belong to the provider.
        """
        if dialect is not None:
            find_dialect(require_name("dialect", dialect))
        with self._lock:  # the dialect is that of the newest message, which may have to be read first
            return Intake(self.chat.meter.counter, self.chat.dialect, dialect, reads_own_fields)

    def say(self, drafts: Sequence[Draft], *, after: int | None = None) -> list[int]:
        """Stores messages that are parsed and counted; returns their places.

        `after` is the number of messages that the conversation must have until then.

        Raises:
            ConflictError: it has more or fewer messages; nothing was stored.
        """
        self._require_open()
        self._settle_streams()
        with self._lock:
            self._has_appended = True
            return append_drafts(self.chat, self._toolbox, drafts, after)

    def _require_open(self) -> None:
        """Raises StoreError if the session was closed."""
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
        """The next request: the whole conversation if it fits, otherwise a compacted view of it.

        `override` beats the settings, and what `open` was given, field by field (see
        docs/configuration.md); what it reduces stays reduced in later requests until it is undone.
        `request` has the other fields of the request, such as `max_tokens` or `store`: they are taken into
        account and handed on.

        Raises:
            OverBudgetError: what must be shown is larger than the window.
        """
        require_name("dialect", "unset" if dialect is None else dialect)
        overrides = self.chat.override
        if override is not None:
            overrides = overrides.then(override_of(override))
        asked = FitRequest(dialect, tools, request_fields(request), overrides)
        with telemetry.work("fit", self.conversation) as span:
            if self._recall is not None:
                self._show_memories(self._recall)
            if self.chat.summaries is not None:
                self._wait_for_summaries(asked)
            with self.locked():
                fitted = fit.fit(self.chat, asked, yields=True)
            if fitted is None:  # another process is compacting: wait for it, then go on without it
                self.chat.lease.wait_for_others(self.settings.summarizer.wait_s)
                with self.locked():
                    fitted = fit.fit(self.chat, asked)
            assert fitted is not None
            tokens = fitted.report.tokens
            span.note({"refold.tokens.before": tokens.before, "refold.tokens.final": tokens.final})
            span.note({"refold.edits": len(fitted.report.edits), "refold.limit": fitted.report.limit})
            return fitted

    def _show_memories(self, recall: "MemoryRecall") -> None:
        """Shows what the store remembers before the user's newest message."""
        with self.locked():
            said = recall.due(self.record)
        found = recall.ask(said) if said is not None else ()  # the lock is free meanwhile
        with self.locked():
            self.chat.notices += recall.take_problems()
            if said is not None and found:
                self.record.append(lambda: recall.shown(self.record, said, found, self.chat.meter))

    def _wait_for_summaries(self, request: FitRequest) -> None:
        """Waits for summaries that are being written, at most `summarizer.wait_s`; the lock is free."""
        wait_s = self.settings.summarizer.wait_s
        until = time.monotonic() + wait_s
        for _ in range(WAITS):
            with self.locked():
                pending = pending_summaries(self.chat, request)
            if pending is None:
                return
            if not pending.wait(max(0.0, until - time.monotonic())):
                self.chat.notices.append(
                    f"No summary was ready after {wait_s:g} s: compacted without a model"
                )
                return

    def before_step(
        self,
        *,
        tools: Sequence[Any] | None = None,
        override: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> Fitted:
        """For your own agent loop: the request of the next call of the model."""
        return self.fit(tools=tools, override=override, request=request)

    def after_step(self, reply: Any, *results: Any) -> list[int]:
        """For your own agent loop: records the model's reply and the results of its calls, all or none.

        The reply may be a stream, or the list of its chunks: it is read to its end.
        """
        places: list[int] = self.append([reply, *results])
        return places

    def memories(
        self, query: str | None = None, limit: int = 10, namespace: str | None = None
    ) -> list[Memory]:
        """What the store's service learned from conversations: the nearest to a query, or any.

        Raises:
            StoreError: the store has no memories, or the service does not answer.
        """
        from refold.session.search import limit_of

        if not isinstance(self.store, Memories):
            kind = type(self.store).__name__
            raise StoreError(f"{kind} has no memories; mem0://, hybrid:// and agentcore:// have them")
        asked = None if query is None else require_name("query", query)
        where = None if namespace is None else require_name("namespace", namespace)
        return list(self.store.memories(self.key, asked, limit_of(limit), where))

    def check_overflow(
        self, *, tools: Sequence[Any] | None = None, request: Mapping[str, Any] | None = None
    ) -> Overflow:
        """Compares the next request with the model's window, tools and system text included.

        Tools and other fields are those of the last `fit` unless they are given.
        """
        with self.locked():
            return triggers.check_overflow(
                self.chat, FitRequest(tools=tools, request=request_fields(request))
            )

    def should_compact(
        self, *, tools: Sequence[Any] | None = None, request: Mapping[str, Any] | None = None
    ) -> Decision:
        """Whether the next `fit` would compact the view, and which triggers would make it."""
        asked = FitRequest(tools=tools, request=request_fields(request))
        with self.locked():
            return triggers.decide(self.chat, asked)

    def view(self, at: int | None = None) -> View:
        """What the model sees now, or saw right after the event at a place."""
        with self.locked():
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
        """Compacts the view now: down to the newest messages, or to a number of tokens.

        Strategies are summarize, sliding-window and hierarchical; unset, the configured one. Waits for a
        summarizer. `focus` is what a summary should say most about. With `dry_run` nothing is changed and no
        model is called: the result is what would be done by rule. `on_progress` is called, in any thread,
        with the number of answered requests for summaries, and of all of them.
        """
        strategy = self.settings.compaction.strategy if strategy is None else strategy
        if strategy not in STRATEGIES:
            raise SettingError("strategy", f"{strategy!r} is not known; known: {', '.join(STRATEGIES)}")
        for name, given in (("keep_recent", keep_recent), ("target_tokens", target_tokens)):
            if given is not None and require_int(name, given) < 0:
                raise SettingError(name, f"expected 0 or more, got {given}")
        focus = require_name("focus", focus) if focus else ""
        order = CompactionRequest(strategy, keep_recent, target_tokens, focus)
        summaries = self.chat.summaries
        with telemetry.work("compact", self.conversation) as span:
            if summaries is not None:
                summaries.context.progress = on_progress
            result = compaction.compact(self.chat, order, dry_run=dry_run)
            if summaries is not None:
                result = msgspec.structs.replace(result, problems=tuple(summaries.problems))
            span.note({"refold.tokens.saved": result.tokens_saved, "refold.strategy": strategy})
            return result

    def compactions(self) -> Compactions:
        """How often the view was compacted, when last, and whether it is being compacted now."""
        with self.locked():
            return compaction.compactions(self.chat)

    # What was recorded

    def get_all(self) -> list[StoredMessage]:
        """All recorded messages."""
        with self.locked():
            return self._stored(0)

    def get_range(self, start: int, end: int) -> list[StoredMessage]:
        """Messages by index, counting messages only, the end exclusive."""
        with self.locked():
            first = self.record.place_of(max(0, require_int("start", start)))
            return self._stored(first, require_int("end", end))

    def _stored(self, place: int, end: int | None = None) -> list[StoredMessage]:
        """The messages from a place on, up to an index."""
        found = list[StoredMessage]()
        for event in self.record.events(place):
            if isinstance(event, Said):
                if end is not None and event.index >= end:
                    break
                found.append(self._inspector.stored(event))
        return found

    def get_recent(
        self, max_messages: int = 50, max_tokens: int | None = None, include_system: bool = True
    ) -> list[StoredMessage]:
        """The newest messages within both limits, the oldest first.

        Memories of the store come before them, in one message with the tag `memory` and no place: with a
        limit, in a quarter of it at most and never instead of the newest message.
        """
        most = require_int("max_messages", max_messages)
        limit = None if max_tokens is None else max(0, require_int("max_tokens", max_tokens))
        found: list[StoredMessage] = []
        memory: list[StoredMessage] = []
        tokens = 0
        with self.locked():
            for event in self.record.backwards():
                is_wanted = include_system or event.line.role != "system"
                tokens += event.line.tokens if is_wanted else 0
                if len(found) >= most or (limit is not None and tokens > limit):
                    break
                if is_wanted:
                    found.append(self._inspector.stored(event))
        if self._recall is not None and found:
            room = None if limit is None else min(limit // 4, limit - found[0].tokens)
            with self.locked():
                latest = self.record.live.state.latest
                said = None if latest is None else self.record.event(latest)
            memory = self._recall.stored(said if isinstance(said, Said) else None, self.chat.meter, room)
        while found and limit is not None and sum(one.tokens for one in (*memory, *found)) > limit:
            found.pop()
        return [*memory, *found[::-1]]

    def get_count(self) -> int:
        """The number of recorded messages."""
        with self.locked():
            return self.record.live.state.index

    def messages_since_compaction(self) -> list[StoredMessage]:
        """The messages that were recorded after the last compaction."""
        with self.locked():
            since = self.record.live.state.compacted
            return self._stored(0 if since is None else since + 1)

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[Event]:
        """The events of the log, in order; `after` is how many to leave out, those seen already.

        With `follow` it goes on with what any process appends, until the conversation is erased.
        """
        start = max(0, require_int("after", after))
        if not follow:
            return self.record.events(start)
        return (event for event in self.record.followed(start) if event is not None)

    # Expansion and search

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
        """The text of a message, or of all messages that an edit covers. Changes nothing.

        `at` is a place, a message's id, or a negative number: -1 is the newest message.
        A part of it by `lines` or `items`, counted from 1, both ends included: (40, 50) or "40-50"; by
        `chars`, a Python slice; or the lines that `match` a text, or a regular expression between slashes.

        Raises:
            CannotExpandError: there is nothing to expand, or no such part.
        """
        part = slice_of({"lines": lines, "chars": chars, "items": items, "match": match})
        with telemetry.work("expand", self.conversation):
            with self.locked():
                found = expand.source(self.record, at if isinstance(at, str) else require_int("at", at))
            text = quoted(found.cut(part).shown)  # which may take long; the lock is free
            self._tell_expanded(found.at, reason or "")
            return text

    def _tell_expanded(self, at: int, reason: str) -> None:
        head = codec.head(self.record.entry(at))
        state = self.record.live.state
        event = MessageEvent(
            "message-expanded",
            self.conversation,
            at,
            state.turn,
            state.step + 1,
            role=head.role if isinstance(head, Line) else "",
            tools=head.tools if isinstance(head, Line) else (),
            reason=reason,
        )
        with self._lock:
            self._lock.tell([event])

    def tools(self, dialect: str | None = None) -> list[dict[str, Any]]:
        """The tools `refold_expand` and `refold_search`, for the request; without handles, only search."""
        if dialect is not None:
            find_dialect(require_name("dialect", dialect))
        names = (EXPAND, SEARCH) if self.chat.handles else (SEARCH,)
        return declared(dialect or self.chat.dialect, names)

    def call(self, name: str, arguments: Any) -> str:
        """Runs one of these tools; append the returned text as the tool's result.

        `arguments` are a JSON text or a mapping. What cannot be done is returned as a sentence for the model.
        """
        with telemetry.tool(str(name), self.conversation):
            with self._lock:
                self.record.catch_up()
            answer = self._toolbox.call(name, arguments, self._found)
            if answer.at is not None:
                self._tell_expanded(answer.at, answer.reason)
            return answer.text

    def _found(self, query: str, limit: int) -> str:
        from refold.session.search import as_tool_text

        hits = self.search(query, limit=limit)
        shown = [hit for hit in hits if not self.record.live.is_withheld(hit.at)]
        return as_tool_text(shown, handles=self.chat.handles)

    def explain(self, at: int) -> Explanation:
        """Why a message is in the view or out of it: which edit, by which stage, by which setting."""
        with self.locked():
            return self._inspector.explain(require_int("at", at))

    def savings(self) -> list[EditSavings]:
        """The edits that were made to save money or tokens: what each was expected to save, and did save."""
        model = self.record.live.state.model or self.model
        prices = find(model, self.config.models).limits.cached if model else None
        return self._inspector.savings(prices)

    def search(self, query: str, *, limit: int = 10, everywhere: bool = False) -> list[Hit]:
        """Messages of this conversation that match a query, or `everywhere` in the owner's conversations.

        Words, "a phrase", pref*, tool:NAME, role:ROLE. The best comes first.

        Raises:
            SettingError: the query is empty, or the limit is out of range.
        """
        from refold.session import search as searching

        parsed = parse_query(query)
        most = searching.limit_of(limit)
        scope = self.key.owner if everywhere else self.key
        found = searching.find(self.store, scope, parsed, most, self._embedder)
        with self.locked():
            return searching.hits(self.store, parsed, found, most, self.record)

    # Edits by people

    def undo(self, at: int | None = None, *, why: str = "") -> Undoing:
        """Takes back an edit, a pin or an undo, the newest edit unless a place is given.

        For the place of a message, the edit that corrects or hides it. Returns the place of the undo, with
        what was taken back (`of`) and which edit still covers that (`covered_by`).

        Raises:
            NotFoundError: no edit, pin or undo is in force there.
            ConflictError: another edit is in the way of taking it back.
        """
        place = None if at is None else require_int("at", at)
        covers = list[int | None]()

        def make(stamp: Stamp) -> Sequence[Event]:
            event, covered_by = edits.undo(self.record, place, stamp, why)
            covers.append(covered_by)
            return [event]

        event = self._edit(make, why)
        assert isinstance(event, Undone)
        return Undoing(event.at, event.of, covers[-1])

    def restore(self, at: int, *, why: str = "") -> int:
        """Shows the original in its old place again, with the calls and results it belongs to."""
        place = require_int("at", at)
        return self._edit(lambda stamp: [edits.restore(self.record, place, stamp, why)], why).at

    def correct(self, at: int, message: Any, *, why: str = "") -> int:
        """Shows another message in the place of a recorded one, which stays in the log.

        `message` is whatever `append` takes, or a text, which replaces what the message says and keeps the
        rest. A correction is treated like a recorded message: it is shown where that would be, and
        summaries are made of it.

        Raises:
            MessageError: it has another role, or answers or makes other calls.
            NotFoundError: there is no message, or it is hidden: restore it first.
        """
        new = message
        if not isinstance(message, str):
            drafts = self.intake().take([message], lambda n: "message").drafts
            if len(drafts) != 1:
                problem = f"is {len(drafts)} when taken apart; correct each in its own place"
                raise MessageError("message", problem)
            new = drafts[0].message
        place = require_int("at", at)
        count = self.chat.count
        return self._edit(lambda stamp: [edits.correct(self.record, place, new, count, stamp, why)], why).at

    def diff(self, at: int | None = None, to: int | None = None, *, other: "Session | None" = None) -> Diff:
        """What the view showed right after the event at a place, compared with another place, or with now.

        With `other`, a fork or any conversation: what this one shows, now or at a place, compared with that.
        """
        if at is None and to is None and other is None:
            raise SettingError("at", "with what? Give a place, or another conversation as `other`")
        if other is not None and not isinstance(other, Session):
            raise SettingError("other", f"expected a session, got {type(other).__name__}")
        old = None if at is None else require_int("at", at)
        new = None if to is None else require_int("to", to)
        with self.locked():
            theirs = self._inspector
            if other is not None:
                theirs = Inspector.open(other.store, other.key, other.record.view)
            return self._inspector.diff(theirs, old, new)

    def pin(self, at: int, *, why: str = "") -> int:
        """Keeps a message in every view, whatever is reduced around it."""
        place = require_int("at", at)
        return self._edit(lambda stamp: [edits.pin(self.record, place, stamp, why)], why).at

    def unpin(self, at: int, *, why: str = "") -> int:
        """Takes a pin off again."""
        place = require_int("at", at)
        return self._edit(lambda stamp: edits.unpin(self.record, place, stamp, why), why).at

    def name(self, *, title: str | None = None, model: str | None = None) -> int:
        """Gives the conversation a title, or a model, for lists; what is not given stays."""
        if title is not None and not isinstance(title, str):
            raise SettingError("title", f"expected a text, got {title!r}")
        model = model_name(model)
        return self._edit(lambda stamp: [Named(stamp.at, title, model, stamp.time)], "").at

    def _edit(self, make: Callable[[Stamp], Sequence[Event]], why: str) -> Event:
        """Appends events that `make` returns for the view as it is; returns the last one."""
        if not isinstance(why, str):
            raise SettingError("why", f"expected a text, got {why!r}")
        self._require_open()

        def build() -> Sequence[Event]:
            live = self.record.live
            return make(Stamp(live.state.next, time.time(), live.view))

        with self.locked():
            return self.record.append(build)[-1]

    # Copies, and the end

    def fork(self, new_id: str, *, at: int | None = None) -> "Session":
        """A conversation that shares the log of this one up to and including a place, or all of it."""
        return Session(
            self.store,
            forked(self, new_id, at),
            model=self.model,
            agent=self.chat.agent,
            config=self.config,
            view=self.record.view,
            policies=self.chat.policies,
            summarizer=self._summarizer,
            embedder=self._embedder,
            on_event=self._lock.callbacks,
            override=self.chat.override,
        )

    def export(self, format: str | None = None, *, view: bool = False) -> Iterator[str]:
        """The whole log as lines of JSON, for `refold.load`.

        With a `format` (`openai-chat`, `openai-responses`, `anthropic` or `ai-sdk`), one line: a JSON object
        with the `messages` as that API takes them, and `system` where the API has it apart. These are all
        messages as recorded, without any edit, or with `view` those that the model is shown now.
        """
        if format is None:
            if view:
                raise SettingError("view", "needs a format such as openai-chat: a record is exported whole")
            return export_lines(self.store, self.key)
        if format not in TARGETS:
            raise SettingError("format", f"{format!r} is not known; known are {', '.join(TARGETS)}")
        return self._exported(format, view)

    def _exported(self, format: str, view: bool) -> Iterator[str]:
        with self.locked():
            record = self.record if view else Record(self.store, self.key, UNEDITED, parse)
            render = self.chat.render_request(format, {})
            facts = msgspec.structs.replace(render.facts, no_prefill=False)  # it may end with an answer
            render = msgspec.structs.replace(render, facts=facts)
            rendered = Renderer(record, render, self.chat.meter.counter).render()
        system = {} if rendered.system is None else {"system": rendered.system}
        yield codec.dumps({**system, "messages": rendered.messages}).decode()

    def clear(self, *, with_forks: bool = False) -> list[Key]:
        """Erases the conversation for good. Forks keep what they share, and are returned."""
        with self._lock:
            heirs = self.store.erase(self.key, with_forks=with_forks)
            self.record.catch_up()
            return heirs

    def close(self) -> None:
        """Prunes for the next run, saves a snapshot, and closes the store if the session opened it.

        Nothing can be appended after that.
        """
        if not self._is_closed:
            for recording in self._recordings:
                recording.abandon()
            self._settle_streams()
        if self.chat.summaries is not None:
            self.chat.summaries.close()
        with telemetry.work("close", self.conversation), self._lock:
            with suppress(RefoldError):  # the log is complete without it
                if self._has_appended:
                    fit.prune_at_close(self.chat)
            self.record.save()
            self.chat.meter.save()
            if isinstance(self.store, SessionHooks):
                self.store.end(self.key)
            if self._owns_store:
                self.store.close()
            self._is_closed = True
            self.chat.summaries = None

    def save_snapshot(self) -> None:
        """Saves a snapshot, so that the conversation opens faster; unlike `close`, it prunes nothing."""
        with self._lock:
            self.record.save()

    def __repr__(self) -> str:
        """One line, without reading anything."""
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
    """Forks like `Session.fork`, without opening a session for the fork."""
    store = session.store
    record = session.record
    if not isinstance(store, Forks):
        raise StoreError(f"{type(store).__name__} cannot fork; export and load under another id")
    with session.locked():
        stop = record.live.state.next if at is None else record.end_of(require_int("at", at))
        new = Key(session.key.owner, require_name("new_id", new_id))
        store.fork(session.key, new, stop)
        record.save()
        copy_snapshots(store, session.key, store, new, stop)
        return new
