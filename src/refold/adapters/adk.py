"""For Google's Agent Development Kit: `App(…, plugins=[RefoldPlugin(store=…)])`.

A session is a conversation, and its events are recorded. An agent that sees other contents than the session's
events, since other agents speak in it too, has a conversation of its own: `SESSION/AGENT`.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, Unpack

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
    OPEN_CONVERSATIONS,
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    RequestMatch,
    declare_function,
    lookup_tools,
)
from refold.core.draft import PART
from refold.session.synced_history import AGAIN, Passed

INTERNAL_FUNCTIONS = (
    "adk_request_credential",
    "adk_request_confirmation",
    "adk_request_input",
    "adk_framework",
)
"""Functions between ADK and the application, which models do not see."""
GENERATED_ID = "adk-"
"""The prefix of call ids that ADK generates. Most models do not see those."""
ACTIVE_SESSIONS = 100
"""Sessions whose events are remembered between requests."""


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
        events = self._events(session)
        conversation = self._conversations.get(self._name(session))
        newest = conversation.session.get_recent(1)
        last_id = (newest[-1].id or "").partition(AGAIN)[0].partition(PART)[0] if newest else ""
        recorded = next((n for n, event in enumerate(events.events, 1) if event.id == last_id), 0)
        conversation.record(events.contents[recorded:])
        self._sessions.pop((*_owner(session), session.id, None), None)

    def _fit(self, context: CallbackContext, request: LlmRequest) -> None:
        contents = request.contents
        events = self._events(context.session, context.branch)
        name, is_whole = self._conversation(context, events)
        conversation = self._conversations.get(name)
        keys = events.keys_of(contents)
        places = _match(keys, events, context.agent_name)
        match = _request_match(contents, keys, places, events, is_whole)
        if request.previous_interaction_id or not match.passed:  # the provider has the history
            conversation.record(match.passed)
            return
        fitted = conversation.fit_request(match, _model_call(request))
        own = {id(content) for content in contents}
        with_ids = _shows_generated_ids(contents)
        request.contents = [
            one.content if id(one.content) in own else _copy(one.content, with_ids) for one in fitted
        ]

    def _events(self, session: Session, branch: str | None = None) -> "SessionEvents":
        key = (*_owner(session), session.id, branch)
        with self._lock:
            events = self._sessions.pop(key, None)
            if events is None or not events.is_beginning_of(session.events):
                events = SessionEvents(branch, _owner(session))
            events.read(session.events)
            self._sessions[key] = events
            if len(self._sessions) > ACTIVE_SESSIONS:
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
            if len(self._owners) > OPEN_CONVERSATIONS:
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


# The events of a session


class _CallKey(NamedTuple):
    tool: str | None
    arguments: Any


class _ResultKey(NamedTuple):
    tool: str | None
    response: Any


class SessionEvents:
    """The events of a session that models see, without those that were rewound."""

    def __init__(self, branch: str | None, owner: Sequence[str]) -> None:
        self.events: list[Event] = []
        self.keys: list[list[Any]] = []
        """The content of each event, as `_key` gives it."""
        self.contents: list[EventContent] = []
        """The same objects in every request, by which an unchanged history is recognized."""
        self.authors: set[str] = set()
        self.results_of: dict[int, int] = {}
        """For an event with calls, the first event with a result of them."""
        self._branch = branch
        self._owner = owner
        self._read: list[Event] = []
        self._numbers: list[int] = []
        """The number of each of `events` among those that were read."""
        self._invocations: dict[str, int] = {}
        """The number of each invocation's first event."""
        self._calls: dict[str | None, int] = {}
        self._answered: set[str | None] = set()
        self._answered_again: set[str | None] = set()
        """Ids of calls with more than one result."""

    def is_beginning_of(self, events: Sequence[Event]) -> bool:
        n = len(self._read)
        return n <= len(events) and (n == 0 or events[n - 1] is self._read[-1])

    def read(self, events: Sequence[Event]) -> None:
        for n, event in enumerate(events[len(self._read) :], len(self._read)):
            self._read.append(event)
            self._invocations.setdefault(event.invocation_id, n)
            rewound = event.actions.rewind_before_invocation_id
            if rewound:
                left = bisect_left(self._numbers, self._invocations.get(rewound, n))
                del self.events[left:], self.keys[left:], self.contents[left:], self._numbers[left:]
                self.authors = {one.author for one in self.events}
                self.results_of = {at: to for at, to in self.results_of.items() if to < left}
            elif _is_visible(event, self._branch):
                self._numbers.append(n)
                self._add(event)

    def _add(self, event: Event) -> None:
        n = len(self.events)
        content = event.content or types.Content()
        self.events.append(event)
        self.keys.append(_key(content))
        self.contents.append(EventContent(content, event, self._owner))
        self.authors.add(event.author)
        for function in functions(content):
            if isinstance(function, types.FunctionCall):
                self._calls[function.id] = n
                self._answered.discard(function.id)
                continue
            self.results_of.setdefault(self._calls.get(function.id, -1), n)
            if function.id in self._answered:
                self._answered_again.add(function.id)
            self._answered.add(function.id)

    def keys_of(self, contents: Sequence[types.Content]) -> list[list[Any]]:
        """The same key objects as those of the events, for contents that repeat them."""
        keys: list[list[Any]] = []
        for content, key in zip(contents, self.keys, strict=False):
            keys.append(key if _has_key(content, key) else _key(content))
        return keys + [_key(content) for content in contents[len(keys) :]]

    def is_changed_by_adk(self, at: int, key: list[Any]) -> bool:
        """By later results, or since calls without results are left out."""
        ids = {function.id for function in functions(self.events[at].content)}
        return bool(ids & self._answered_again) or _tool_names(self.keys[at]) != _tool_names(key)


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


def _key(content: types.Content) -> list[Any]:
    """The content without the ids of calls. Comparing keys is quick if they share their strings."""
    key: list[Any] = [content.role]
    for part in content.parts or ():
        if part.text is not None:
            key.append(part.text)
        elif call := part.function_call:
            key.append(_CallKey(call.name, call.args))
        elif result := part.function_response:
            key.append(_ResultKey(result.name, result.response))
        else:
            key.append(part.inline_data or part.file_data or vars(part))
    return key


def _has_key(content: types.Content, key: list[Any]) -> bool:
    """True if the content consists of the same objects as the key: nothing is compared by value."""
    parts = content.parts or ()
    if len(parts) != len(key) - 1 or content.role != key[0]:
        return False
    for part, own in zip(parts, key[1:], strict=True):
        fields = part.__dict__  # faster than attributes
        text = fields["text"]
        call = fields["function_call"]
        result = fields["function_response"]
        if text is not None:
            is_same = text is own
        elif call is not None and type(own) is _CallKey:
            is_same = call.args is own.arguments and call.name == own.tool
        elif result is not None and type(own) is _ResultKey:
            is_same = result.response is own.response and result.name == own.tool
        else:
            return False
        if not is_same:
            return False
    return True


def _tool_names(key: list[Any]) -> list[str | None]:
    return [one.tool for one in key if isinstance(one, _CallKey | _ResultKey)]


# Which events a request shows


def _match(keys: Sequence[list[Any]], events: SessionEvents, agent: str) -> dict[int, int]:
    """The event of each content; contents without one are in this request only."""
    stop = len(events.events)
    is_alone = events.authors <= {agent, "user"}
    if is_alone and keys == events.keys:
        return dict(enumerate(range(stop)))
    found: dict[int, int] = {}
    results = {n for n, key in enumerate(keys) if any(isinstance(one, _ResultKey) for one in key)}
    for n in range(len(keys) - 1, -1, -1):
        at = stop - 1
        if is_alone and at >= 0 and keys[n] == events.keys[at]:
            found[n] = stop = at
        elif n not in results:
            while at >= 0 and not _shows(keys[n], events.keys[at], events.events[at].author, agent):
                at -= 1
            if at >= 0:
                found[n] = stop = at
    for n in sorted(results - {0}):  # results follow their calls, wherever their event is
        at = events.results_of.get(found.get(n - 1, -1), -1)
        if n not in found and at >= 0:
            found[n] = at
    ends = [(-1, -1), *sorted(found.items()), (len(keys), len(events.events))]
    for (n, at), (next_n, next_at) in pairwise(ends):
        if next_n - n == next_at - at > 1:  # contents between two known ones may be changed events
            gap = [(n + k, at + k) for k in range(1, next_n - n)]
            if all(_kinds(keys[one]) == _kinds(events.keys[two]) for one, two in gap):
                found.update(gap)
    return found


def _shows(key: list[Any], own: list[Any], author: str, agent: str) -> bool:
    if author not in (agent, "user"):  # ADK quotes other agents, after a sentence about it
        return key[0] == "user" and len(key) > 2 and str(key[2]).startswith(f"[{author}]")
    if key == own:
        return True
    # Calls without a result are left out; plugins may add parts.
    return key[0] == own[0] and len(key) > 1 and (_is_within(key, own) or _is_within(own, key))


def _is_within(some: list[Any], others: list[Any]) -> bool:
    rest = iter(others)
    return all(one in rest for one in some)


def _kinds(key: list[Any]) -> list[Any]:
    return [key[0], *map(type, key[1:])]


def _request_match(
    contents: Sequence[types.Content],
    keys: Sequence[list[Any]],
    places: Mapping[int, int],
    events: SessionEvents,
    is_whole: bool,
) -> RequestMatch[EventContent]:
    """What is recorded: the whole session, or what the agent sees of it, with changes by other plugins."""
    request = [EventContent(content) for content in contents]
    position_of = {at: n for n, at in places.items()}
    passed: list[Passed[EventContent]] = []
    positions: list[int | None] = []
    for at, own in enumerate(events.contents):
        n = position_of.get(at)
        if n is None:
            if not is_whole:
                continue
            passed.append(own)
        elif keys[n] == events.keys[at]:
            passed.append(own)
        elif is_whole and events.is_changed_by_adk(at, keys[n]):
            passed.append(own)
            request[n] = own
        else:
            passed.append(EventContent(contents[n], own.event, own.owner))
        positions.append(n)
    transient = {n: one for n, one in enumerate(request) if n not in places}
    return RequestMatch(request, passed, positions, transient)


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
