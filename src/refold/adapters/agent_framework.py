"""For Microsoft's Agent Framework: `Agent(client, context_providers=[refold], compaction_strategy=refold)`.

The session is the conversation, unless one is named. As a compaction strategy alone, `RefoldCompaction` sees
only messages: it needs a `conversation`, and records a run's last answer when the next run begins.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import groupby, takewhile
from threading import Lock
from typing import Any, Unpack

from agent_framework import (
    EXCLUDE_REASON_KEY,
    EXCLUDED_KEY,
    ChatContext,
    ChatMiddleware,
    ContextProvider,
    FunctionInvocationContext,
    FunctionTool,
    HistoryProvider,
    SessionContext,
)
from agent_framework import Message as FrameworkMessage

from refold.adapters.agent_framework_converter import REFOLD, AgentFrameworkConverter, has_content, restored
from refold.adapters.conversation import (
    WARM_CONVERSATIONS,
    AdapterConversation,
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    RequestMatch,
    lookup_tools,
)
from refold.core.draft import PART
from refold.core.errors import RefoldError
from refold.core.pairing import with_original_ids
from refold.session.history_sync import content_id, insert_transient

LOCAL_HISTORY = "agent_framework_local_history_persistence"
"""The conversation id if the framework itself loads the history at each call of the model."""
UNNAMED_AGENT = "UnnamedAgent"
"""The author of answers if the agent has no name."""


class RefoldCompaction(ContextProvider):
    """Fits every call of the model. The session's messages stay unchanged. Serves many sessions at once."""

    def __init__(self, *, conversation: str | None = None, **options: Unpack[AdapterOptions]) -> None:
        super().__init__(REFOLD)
        self.converter = AgentFrameworkConverter()
        self._conversations = AdapterConversations(self.converter, **options)
        self._conversation = conversation
        self._tools = [self._tool(**about) for about in lookup_tools()]
        self._declarations: list[dict[str, Any]] = []

    def tools(self) -> list[FunctionTool]:
        """refold_expand and refold_search, for agents that have it as a compaction strategy only."""
        self._declarations = [tool.to_json_schema_spec() for tool in self._tools]
        return list(self._tools)

    async def __call__(self, messages: list[FrameworkMessage]) -> bool:
        """As a strategy only: excluded messages stay in the list, since the next call gets it again."""
        whole = [message for message in messages if REFOLD not in message.additional_properties]
        conversation = self._get(None)
        match = request_match(whole)
        if not match.history:
            return False
        call = ModelCall(tools=self._declarations)
        fitted = await asyncio.to_thread(conversation.fit_request, match, call)
        positions = {id(message): n for n, message in enumerate(whole)}
        fitted_positions = [positions.pop(id(message), None) for message in fitted]
        excluded = {n: _excluded(whole[n]) for n in positions.values()}
        messages[:] = insert_transient([*map(_included, fitted)], fitted_positions, excluded)
        return fitted != match.request

    async def before_run(self, *, agent: Any, session: Any, context: Any, state: dict[str, Any]) -> None:
        run = RunMiddleware(
            self.converter,
            self._get(session.session_id),
            context,
            author=getattr(agent, "name", None) or UNNAMED_AGENT,
            is_loaded=not getattr(agent, "require_per_service_call_history_persistence", False),
        )
        context.metadata[self.source_id] = run
        context.extend_middleware(self.source_id, run)
        context.extend_tools(self.source_id, self._tools)

    async def after_run(self, *, agent: Any, session: Any, context: Any, state: dict[str, Any]) -> None:
        """Records the last answer, which no call of the model follows."""
        answers = context.response.messages if context.response else []
        await asyncio.to_thread(context.metadata[self.source_id].record, context.input_messages, answers)

    def _get(self, session_id: str | None) -> AdapterConversation[FrameworkMessage]:
        return self._conversations.get(_name(self._conversation, session_id))

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> FunctionTool:
        async def run(ctx: FunctionInvocationContext, **arguments: Any) -> str:
            return await self._get(ctx.session.session_id if ctx.session else None).acall(name, arguments)

        return FunctionTool(name=name, description=description, func=run, input_model=parameters)


def _name(conversation: str | None, session_id: str | None) -> str:
    name = conversation or session_id
    if name is None:
        raise RefoldError(
            "The conversation is unknown: pass conversation=…, or put refold in context_providers as well"
        )
    return name


class RunMiddleware(ChatMiddleware):
    """One run of an agent. Before each call of the model, it knows the whole request."""

    def __init__(
        self,
        converter: "AgentFrameworkConverter",
        conversation: AdapterConversation[FrameworkMessage],
        context: SessionContext,
        *,
        author: str,
        is_loaded: bool,
    ) -> None:
        """`is_loaded` says that the history is loaded before the run, not at each call of the model."""
        self._converter = converter
        self._conversation = conversation
        self._context = context
        self._author = author
        self._is_loaded = is_loaded
        self._own: list[FrameworkMessage] = []
        """The session's messages, by their index in the first request."""
        self._last: RequestMatch[FrameworkMessage] | None = None
        """The last request."""

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        by_client = getattr(context.client, "compaction_strategy", None)
        strategy = context.kwargs.get("compaction_strategy") or by_client
        if strategy is None or isinstance(strategy, RefoldCompaction):
            fit = _keep_all if _is_stored_by_service(context) else partial(self._fit, _model_call(context))
            # With a strategy, the framework would annotate stored messages.
            if self._is_loaded and by_client is None:
                context.kwargs["compaction_strategy"] = None
                context.messages = messages = list(context.messages)
                await fit(messages)
            else:
                context.kwargs["compaction_strategy"] = fit
        await call_next()

    async def _fit(self, call: ModelCall, messages: list[FrameworkMessage]) -> bool:
        """The list is for this call alone: what is not shown need not stay in it."""
        if self._last and self._is_loaded:
            self._name_authors(messages)
        match = request_match(messages)
        if not match.history:
            return False

        def fit() -> list[FrameworkMessage]:
            self._last = match._replace(history=self._own_history(messages, match.history))
            return self._conversation.fit_request(self._last, call)

        fitted = [*map(_included, await asyncio.to_thread(fit))]
        if fitted == messages:
            return False
        messages[:] = fitted
        return True

    def _name_authors(self, messages: Sequence[FrameworkMessage]) -> None:
        """New answers are at the end, and are recorded before the framework names their author."""
        authors = self._converter.authors

        def is_new(message: FrameworkMessage) -> bool:
            return message.role in ("assistant", "tool") and message not in authors

        for message in takewhile(is_new, reversed(messages)):
            authors[message] = self._author

    def _own_history(
        self, messages: Sequence[FrameworkMessage], history: Sequence[FrameworkMessage]
    ) -> list[FrameworkMessage]:
        """With the session's own messages for those that other middleware changed, if they are recorded."""
        if not self._last:
            own = self._context.get_messages(include_input=True)
            self._own = own if len(own) == len(messages) else []  # otherwise they cannot be paired
        own_history = list(history)
        indices = {id(message): n for n, message in enumerate(history)}
        for own_message, message in zip(self._own, messages, strict=False):
            is_same = [*map(id, own_message.contents)] == [*map(id, message.contents)]
            if own_message.role != message.role or is_same or id(message) not in indices:
                continue
            if self._conversation.knows(own_message) and not self._conversation.knows(message):
                own_history[indices[id(message)]] = own_message
        return own_history

    def record(self, input: Sequence[FrameworkMessage], answers: Sequence[FrameworkMessage]) -> None:
        """Records what followed the last call of the model, or the whole run if none was fitted."""
        if self._last is None:
            known: Sequence[FrameworkMessage] = recorded_messages(self._conversation)
            new = [*input, *answers]
        else:
            known = self._last.history
            last = _identity(self._last.sent[-1])
            old = [n for n, message in enumerate(answers, 1) if _identity(message) == last]
            new = [*answers[max(old, default=0) :]]
        self._conversation.record([*known, *filter(has_content, new)])


def _identity(message: FrameworkMessage) -> Hashable:
    """Calls and results by their ids, since other middleware may have changed their content."""
    ids = tuple((one.type, one.call_id) for one in message.contents if one.call_id)
    return ids or content_id([AgentFrameworkConverter().parse(message)])


class RefoldHistory(HistoryProvider):
    """Keeps a session's messages in the record instead of the session: its id is enough to continue."""

    def __init__(self, *, conversation: str | None = None, **options: Unpack[AdapterOptions]) -> None:
        super().__init__(f"{REFOLD}_history")
        self._conversations = AdapterConversations(AgentFrameworkConverter(), **options)
        self._conversation = conversation
        self._cache: OrderedDict[str, tuple[object, int, list[FrameworkMessage]]] = OrderedDict()
        """By conversation: the inspector's epoch, how many messages were read, and their converted form."""
        self._lock = Lock()

    async def get_messages(
        self, session_id: str | None, *, state: Any = None, **rest: Any
    ) -> list[FrameworkMessage]:
        """All messages as they were saved. What the model sees of them is up to the compaction strategy."""
        name = _name(self._conversation, session_id)
        messages = await asyncio.to_thread(self._recorded, name)
        if state is not None:
            state["had"] = len(messages)
        return messages

    async def save_messages(
        self, session_id: str | None, messages: Sequence[FrameworkMessage], *, state: Any = None, **rest: Any
    ) -> None:
        """Messages that the strategy recorded during the run are not recorded twice."""
        name = _name(self._conversation, session_id)

        def save() -> None:
            known = self._recorded(name)[: (state or {}).get("had")]
            self._conversations.get(name).record([*known, *filter(has_content, messages)])

        await asyncio.to_thread(save)

    def _recorded(self, name: str) -> list[FrameworkMessage]:
        """Copies of all recorded messages, each converted once."""
        conversation = self._conversations.get(name)
        session = conversation.session
        with self._lock:
            count = session.get_count()
            epoch = session.inspect.epoch
            before, start, messages = self._cache.pop(name, (epoch, 0, []))
            if before is not epoch:  # it was erased, or continued in a branch
                start = 0
                messages = []
            messages = [*messages, *recorded_messages(conversation, start, count)]
            self._cache[name] = (epoch, count, messages)
            if len(self._cache) > WARM_CONVERSATIONS:
                self._cache.popitem(last=False)
            return [_with_properties(message, {}) for message in messages]


def recorded_messages(
    conversation: AdapterConversation[FrameworkMessage], start: int = 0, stop: int | None = None
) -> list[FrameworkMessage]:
    session = conversation.session
    stop = session.get_count() if stop is None else stop
    stored = (
        [with_original_ids(one.message) for one in session.get_range(start, stop)] if start < stop else []
    )
    named = [message for message in stored if message.id]
    parts = groupby(named, lambda message: str(message.id).partition(PART)[0])
    return [restored([*group]) for _, group in parts]


# The messages of a request


def _model_call(context: ChatContext) -> ModelCall:
    options = context.options or {}
    instructions = options.get("instructions") or ()
    tools = options.get("tools") or ()
    return ModelCall(
        instructions if isinstance(instructions, str) else "\n".join(map(str, instructions)),
        [tool.to_json_schema_spec() for tool in tools if isinstance(tool, FunctionTool)],
        options.get("model") or getattr(context.client, "model", None),
        options.get("max_tokens"),
    )


async def _keep_all(messages: list[FrameworkMessage]) -> bool:
    return False


def _is_stored_by_service(context: ChatContext) -> bool:
    """True if the model's service has the history, and only new messages are sent."""
    id = (context.options or {}).get("conversation_id") or context.kwargs.get("conversation_id")
    return bool(id and id != LOCAL_HISTORY) or bool(context.session and context.session.service_session_id)


def request_match(messages: Sequence[FrameworkMessage]) -> RequestMatch[FrameworkMessage]:
    """The history in a request; other messages, such as memories, are in this request only.

    What another strategy excluded is left out. Nothing is passed if the model's service has the rest of the
    history.
    """
    providers = {kind.__name__ for kind in _subclasses(HistoryProvider)}
    request = [message for message in messages if not _is_excluded(message) or _is_excluded_here(message)]
    history: list[FrameworkMessage] = []
    positions: list[int | None] = []
    transient: dict[int, FrameworkMessage] = {}
    for n, message in enumerate(request):
        if _is_history(message, providers):
            history.append(message)
            positions.append(n)
        else:
            transient[n] = message
    if all(message.role == "tool" for message in history):
        return RequestMatch([], request, [], transient)
    return RequestMatch(history, request, positions, transient)


def _is_history(message: FrameworkMessage, providers: set[str]) -> bool:
    """Not added for one run by another kind of provider."""
    source = message.additional_properties.get("_attribution")
    if isinstance(source, dict) and source.get("source_type") not in providers:
        return False
    return has_content(message)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_excluded(message: FrameworkMessage) -> bool:
    return bool(message.additional_properties.get(EXCLUDED_KEY))


def _is_excluded_here(message: FrameworkMessage) -> bool:
    return bool(message.additional_properties.get(EXCLUDE_REASON_KEY) == REFOLD)


def _excluded(message: FrameworkMessage) -> FrameworkMessage:
    if _is_excluded(message):
        return message
    return _with_properties(message, {EXCLUDED_KEY: True, EXCLUDE_REASON_KEY: REFOLD})


def _included(message: FrameworkMessage) -> FrameworkMessage:
    if not _is_excluded_here(message):
        return message
    return _with_properties(message, {EXCLUDED_KEY: False, EXCLUDE_REASON_KEY: None})


def _with_properties(message: FrameworkMessage, properties: dict[str, Any]) -> FrameworkMessage:
    """A copy, since the session may have the message itself."""
    new = object.__new__(type(message))
    new.__dict__ |= message.__dict__
    new.contents = list(message.contents)
    new.additional_properties = {**message.additional_properties, **properties}
    return new
