"""For Google's Agent Development Kit: `App(…, plugins=[RefoldPlugin(store=…)])`.

A session is a conversation, and its events are recorded. An agent that sees other contents than the session's
events, since other agents speak in it too, has a conversation of its own: `SESSION/AGENT`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any, Unpack

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions.session import Session
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from refold.adapters.adk_converter import DIALECT, AdkConverter, EventContent, functions
from refold.adapters.conversation import (
    MAX_OPEN_CONVERSATIONS,
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    RequestMatch,
    declare_function,
    lookup_tools,
)
from refold.session.history_sync import match_request

INTERNAL_FUNCTIONS = (
    "adk_request_credential",
    "adk_request_confirmation",
    "adk_request_input",
    "adk_framework",
)
"""Functions between ADK and the application, which models do not see."""
GENERATED_ID = "adk-"
"""The prefix of call ids that ADK generates. Most models do not see those."""
MAX_REMEMBERED_SESSIONS = 100


class RefoldPlugin(BasePlugin):
    """Fits every call of a model. The session's events stay unchanged. Serves many sessions at once."""

    def __init__(self, **options: Unpack[AdapterOptions]) -> None:
        super().__init__("refold")
        self._conversations = AdapterConversations(AdkConverter(), **options)
        self._tools = [_LookupTool(run=self._run_tool, **about) for about in lookup_tools()]
        self._owners: dict[str, list[str]] = {}
        """The owner of the conversation that has a session's id as its name."""
        self._sessions: dict[Hashable, SessionEvents] = {}
        self._lock = Lock()

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        config = llm_request.config
        # Many models take functions neither with tools of their provider nor with a schema for the answer.
        has_functions = any(getattr(tool, "function_declarations", None) for tool in config.tools or ())
        if has_functions or not (config.tools or config.response_schema or config.response_json_schema):
            llm_request.append_tools([one for one in self._tools if one.name not in llm_request.tools_dict])
        await asyncio.to_thread(self._fit, callback_context, llm_request)

    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        await asyncio.to_thread(self._record, invocation_context.session)

    async def on_run_error_callback(self, *, invocation_context: InvocationContext, error: Exception) -> None:
        await asyncio.to_thread(self._record, invocation_context.session)

    def _record(self, session: Session) -> None:
        """Records the last answer, which no call of a model follows."""
        self._conversations.get(self._name(session)).record(self._events(session).contents)
        self._sessions.pop((*_owner(session), session.id, None), None)

    def _fit(self, context: CallbackContext, request: LlmRequest) -> None:
        contents = request.contents
        events = self._events(context.session, context.branch)
        name, is_whole = self._conversation(context, events)
        conversation = self._conversations.get(name)
        match, contents_of = _request_match(contents, events, context.agent_name, is_whole)
        if request.previous_interaction_id or not match.history:  # the provider has the history
            conversation.record(match.history)
            return
        fitted = conversation.fit_request(match, _model_call(request))
        with_ids = _shows_generated_ids(contents)
        request.contents = [contents_of.get(id(one)) or _copy(one.content, with_ids) for one in fitted]

    def _events(self, session: Session, branch: str | None = None) -> "SessionEvents":
        key = (*_owner(session), session.id, branch)
        current = _without_rewound(session.events)
        with self._lock:
            events = self._sessions.pop(key, None)
            if events is None or not events.is_beginning_of(current):
                events = SessionEvents(branch, _owner(session))
            events.read(current)
            self._sessions[key] = events
            if len(self._sessions) > MAX_REMEMBERED_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            return events

    def _conversation(self, context: CallbackContext, events: "SessionEvents") -> tuple[str, bool]:
        """The conversation of an agent's requests, and whether it is the whole session."""
        name = self._name(context.session)
        agent = context.get_invocation_context().agent
        without_history = getattr(agent, "include_contents", "default") == "none"
        if not (without_history or context.branch or events.authors - {context.agent_name, "user"}):
            return name, True
        invocation = context.invocation_id if without_history else None
        return "/".join(filter(None, (name, context.branch, context.agent_name, invocation))), False

    def _name(self, session: Session) -> str:
        """The session's id, prefixed if a session of another owner has the same id."""
        owner = _owner(session)
        if session.id not in self._owners:
            if len(self._owners) > MAX_OPEN_CONVERSATIONS:
                self._owners.clear()  # the record has them
            first = self._conversations.get(session.id).session.get_range(0, 1)
            meta = first[0].message.meta if first else None
            known = meta.get(DIALECT, owner) if isinstance(meta, dict) else owner
            self._owners.setdefault(session.id, known)
        return session.id if self._owners[session.id] == owner else "/".join([*owner, session.id])

    async def _run_tool(self, tool: str, arguments: dict[str, Any], context: ToolContext) -> str:
        def run() -> str:
            name, _ = self._conversation(context, self._events(context.session, context.branch))
            return self._conversations.get(name).call(tool, arguments)

        return await asyncio.to_thread(run)


class _LookupTool(BaseTool):
    def __init__(
        self,
        name: str,
        description: str,
        parameters: dict[str, Any],
        run: Callable[[str, dict[str, Any], ToolContext], Awaitable[str]],
    ) -> None:
        super().__init__(name=name, description=description)
        self._parameters = parameters
        self._run = run

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name, description=self.description, parameters_json_schema=self._parameters
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> str:
        return await self._run(self.name, args, tool_context)


def _owner(session: Session) -> list[str]:
    return [session.app_name, session.user_id]


def _model_call(request: LlmRequest) -> ModelCall:
    config = request.config
    tools: list[dict[str, Any]] = []
    for tool in config.tools or ():
        for declared in getattr(tool, "function_declarations", None) or ():
            schema = declared.parameters_json_schema
            if schema is None and declared.parameters is not None:
                schema = declared.parameters.model_dump(mode="json", exclude_none=True)
            tools.append(declare_function(declared.name or "", declared.description, schema))
    return ModelCall(_text(config.system_instruction), tools, request.model, config.max_output_tokens)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n\n".join(map(_text, value))
    if value is None or isinstance(value, str):
        return value or ""
    return _text(getattr(value, "parts", None) or getattr(value, "text", None))


# The events of a session, and which of them a request shows


class SessionEvents:
    """The events of a session that models see."""

    def __init__(self, branch: str | None, owner: Sequence[str]) -> None:
        self.events: list[Event] = []
        self.keys: list[Hashable] = []
        """The content of each event, as `_key` gives it."""
        self.contents: list[EventContent] = []
        """The same objects in every request, by which an unchanged history is recognized."""
        self.results_of: dict[int, int] = {}
        """For an event with calls, the first event with a result of them."""
        self._branch = branch
        self._owner = owner
        self._read: list[Event] = []
        self._calls: dict[str | None, int] = {}
        self._answered: set[str | None] = set()
        self._answered_again: set[str | None] = set()
        """Ids of calls with more than one result."""

    @property
    def authors(self) -> set[str]:
        return {event.author for event in self.events}

    def is_beginning_of(self, events: Sequence[Event]) -> bool:
        n = len(self._read)
        return n <= len(events) and (n == 0 or events[n - 1] is self._read[-1])

    def read(self, events: Sequence[Event]) -> None:
        for event in events[len(self._read) :]:
            self._read.append(event)
            if _is_visible(event, self._branch):
                self._add(event)

    def _add(self, event: Event) -> None:
        n = len(self.events)
        content = event.content or types.Content()
        key = _key(content)
        for function in functions(content):
            if isinstance(function, types.FunctionCall):
                self._calls[function.id] = n
                self._answered.discard(function.id)
                continue
            call_at = self._calls.get(function.id, -1)
            if self.results_of.setdefault(call_at, n) < n or call_at < n - 1:
                key = event.id  # ADK moves a later result to its call
            if function.id in self._answered:
                self._answered_again.add(function.id)
            self._answered.add(function.id)
        self.events.append(event)
        self.keys.append(key)
        self.contents.append(EventContent(content, event, self._owner))

    def is_changed_by_adk(self, at: int, content: types.Content) -> bool:
        """By later results, or since calls without results are left out."""
        own = [*functions(self.events[at].content)]
        if not self._answered_again.isdisjoint(function.id for function in own):
            return True
        return [one.name for one in own] != [one.name for one in functions(content)]


def _without_rewound(events: Sequence[Event]) -> list[Event]:
    current: list[Event] = []
    for event in events:
        rewound = event.actions.rewind_before_invocation_id
        if rewound:
            invocations = [one.invocation_id for one in current]
            if rewound in invocations:
                del current[invocations.index(rewound) :]
        else:
            current.append(event)
    return current


def _is_visible(event: Event, branch: str | None) -> bool:
    content = event.content
    if content is None or not content.role:
        return False
    if event.branch and "@" in event.branch and not (branch or "").startswith(event.branch):
        return False  # it belongs to the inner work of a tool
    names = [function.name for function in functions(content)]
    if names:
        return not any(name in INTERNAL_FUNCTIONS for name in names)
    for part in content.parts or ():
        if part.thought_signature or (not part.thought and any(vars(part).values())):
            return True
    return False


def _key(content: types.Content) -> Hashable:
    """The content without the ids of calls, whose hash is known for the strings that ADK passes on."""
    key: list[Hashable] = [content.role]
    for part in content.parts or ():
        if part.text is not None:
            key.append(part.text)
        elif function := part.function_call or part.function_response:
            is_call = isinstance(function, types.FunctionCall)
            fields = function.args if is_call else function.response
            key.append((is_call, function.name, _frozen(fields or {})))
        else:
            key.append(repr(part.inline_data or part.file_data or part))
    return tuple(key)


def _frozen(fields: Mapping[str, Any]) -> Hashable:
    values = tuple(fields.items())
    try:
        hash(values)
    except TypeError:  # there are lists or objects among them
        return repr(values)
    return values


def _request_match(
    contents: Sequence[types.Content], events: SessionEvents, agent: str, is_whole: bool
) -> tuple[RequestMatch[EventContent], dict[int, types.Content]]:
    """What is recorded: the whole session, or what the agent sees of it, with changes by other plugins.

    The second value has the request's own contents, by the `id` of the event content that each stands for.
    """
    others = events.authors - {agent, "user"}
    event_keys = list(events.keys)
    for at, event in enumerate(events.events):
        if event.author in others:
            event_keys[at] = event.author
    keys = [_quoted_author(content, others) or _key(content) for content in contents]
    places = match_request(event_keys, keys)
    for position, content in enumerate(contents):
        if position not in places and any(part.function_response for part in content.parts or ()):
            result_at = events.results_of.get(places.get(position - 1, -1))
            if result_at is not None:
                places[position] = result_at
    position_of = {at: n for n, at in places.items()}
    request = [EventContent(content) for content in contents]
    merged: set[int] = set()
    history: list[EventContent] = []
    positions: list[int | None] = []
    for at, own in enumerate(events.contents):
        n = position_of.get(at)
        if n is not None:
            is_changed = keys[n] != events.keys[at]
            if is_changed and is_whole and events.is_changed_by_adk(at, contents[n]):
                merged.add(n)
            elif is_changed:
                own = EventContent(contents[n], own.event, own.owner)
            request[n] = own
        elif not is_whole:
            continue
        history.append(own)
        positions.append(n)
    transient = {n: one for n, one in enumerate(request) if n not in places}
    contents_of = {id(one): contents[n] for n, one in enumerate(request) if n not in merged}
    return RequestMatch(history, request, positions, transient), contents_of


def _quoted_author(content: types.Content, authors: set[str]) -> str | None:
    """The agent whose event a content quotes, after a sentence about it."""
    parts = content.parts or []
    if not authors or content.role != "user" or len(parts) < 2:
        return None
    text = parts[1].text or ""
    return next((author for author in authors if text.startswith(f"[{author}]")), None)


def _shows_generated_ids(contents: Sequence[types.Content]) -> bool:
    """True if the newest call without an id of the model's own has the one that ADK generated."""
    for content in reversed(contents):
        for function in functions(content):
            if not function.id or function.id.startswith(GENERATED_ID):
                return bool(function.id)
    return False


def _copy(content: types.Content, with_ids: bool) -> types.Content:
    """A copy, since ADK and other plugins modify the contents of a request."""
    parts = [part.model_copy() for part in content.parts or ()]
    for part in parts:
        for name in ("function_call", "function_response"):
            function = getattr(part, name)
            if not with_ids and function and function.id and function.id.startswith(GENERATED_ID):
                setattr(part, name, function.model_copy(update={"id": None}))
    return content.model_copy(update={"parts": parts})
