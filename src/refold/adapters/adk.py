"""For Google's Agent Development Kit: `App(…, plugins=[RefoldPlugin(store=…)])`.

The session is the conversation, and its events are what is stored. An agent that is told something else than
the session, since others speak in it too, has a conversation of its own beside it: `SESSION/AGENT`.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions.session import Session
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from refold.adapters.adk_messages import DIALECT, Told, Words, functions
from refold.adapters.conversation import KEPT, Ask, Talks, tools
from refold.adapters.synced_history import AGAIN
from refold.config.config import Source
from refold.core.draft import PART
from refold.stores.store import Store

NOT_SAID = ("adk_request_credential", "adk_request_confirmation", "adk_request_input", "adk_framework")
"""Functions by which ADK and the application speak to each other; models are not told of them."""
MADE_UP = "adk-"
"""How the ids begin that ADK gives to calls; most models are not told those."""
ACTIVE = 100
"""Sessions of which is remembered what was said, while they run."""


class RefoldPlugin(BasePlugin):
    """Fits every call of a model; the session's own events stay as they are. Serves many sessions at once."""

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        super().__init__("refold")
        self._talks = Talks(Words(), store=store, model=model, config=config, agent=agent)
        self._tools = [_Tool(one, self._answer) for one in tools()]
        self._whose: dict[str, list[str]] = {}
        self._heard: dict[Hashable, _Said] = {}
        self._lock = Lock()

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        if _takes_functions(llm_request.config):
            llm_request.append_tools([one for one in self._tools if one.name not in llm_request.tools_dict])
        await asyncio.to_thread(self._fit, callback_context, llm_request)

    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        """Keeps the last answer, which no call of a model comes after."""
        await asyncio.to_thread(self._keep, invocation_context.session)

    async def on_run_error_callback(self, *, invocation_context: InvocationContext, error: Exception) -> None:
        await asyncio.to_thread(self._keep, invocation_context.session)

    def _keep(self, session: Session) -> None:
        """What came after the last request; the rest was told, perhaps not in the same words."""
        said, whose, name = self._said(session), _whose(session), self._name(session)
        newest = self._talks.talk(name).session.get_recent(1)
        last = (newest[-1].id or "").partition(AGAIN)[0].partition(PART)[0] if newest else ""
        known = next((at for at, event in enumerate(said.events) if event.id == last), -1)
        self._talks.keep(name, [Told(_content(event), event, whose) for event in said.events[known + 1 :]])
        self._heard.pop((*whose, session.id, None), None)

    def _fit(self, context: CallbackContext, request: LlmRequest) -> None:
        contents, said = request.contents, self._said(context.session, context.branch)
        name, is_all = self._conversation(context, said)
        keys = said.keys_of(contents)
        places = _matched(keys, said, context.agent_name)
        units = [*said.told] if is_all and keys == said.keys else _units(contents, keys, places, said, is_all)
        if request.previous_interaction_id or not units:  # the provider has what was said before
            return self._talks.keep(name, units)
        passing = {n: contents[n] for n in range(len(contents)) if n not in places}
        shown = self._talks.fit(name, units, _ask(request, passing.values()))
        same = {id(said.told[at]): contents[n] for n, at in places.items() if keys[n] == said.keys[at]}
        has_ids = _has_ids(contents)
        request.contents = [same.get(id(one)) or _copied(one.content, has_ids) for one in shown]
        for n, content in passing.items():
            after = {said.events[at].id for other, at in places.items() if other > n}
            at = next((k for k, one in enumerate(shown) if one.event and one.event.id in after), len(shown))
            shown.insert(at, Told(content))
            request.contents.insert(at, content)
        return None

    def _said(self, session: Session, branch: str | None = None) -> "_Said":
        key = (*_whose(session), session.id, branch)
        with self._lock:
            said = self._heard.pop(key, None)
            if said is None or not said.goes_on(session.events):
                said = _Said(branch, _whose(session))
            said.hear(session.events)
            self._heard[key] = said
            if len(self._heard) > ACTIVE:
                del self._heard[next(iter(self._heard))]
            return said

    def _conversation(self, context: CallbackContext, said: "_Said") -> tuple[str, bool]:
        """Where an agent's requests are fitted, and whether that is all of the session."""
        agent, name = context.get_invocation_context().agent, self._name(context.session)
        is_now = getattr(agent, "include_contents", "default") == "none"
        if not (is_now or context.branch or said.authors - {context.agent_name, "user"}):
            return name, True
        apart = (context.branch, context.agent_name, context.invocation_id if is_now else None)
        return "/".join([name, *filter(None, apart)]), False

    def _name(self, session: Session) -> str:
        """The session's id, with more to it where a session of somebody else has the same."""
        whose = _whose(session)
        if session.id not in self._whose:
            if len(self._whose) > KEPT:
                self._whose.clear()  # it is stored
            first = self._talks.talk(session.id).session.get_range(0, 1)
            meta = first[0].message.meta if first else None
            self._whose.setdefault(session.id, meta.get(DIALECT, whose) if isinstance(meta, dict) else whose)
        return session.id if self._whose[session.id] == whose else "/".join([*whose, session.id])

    async def _answer(self, tool: str, arguments: dict[str, Any], context: ToolContext) -> str:
        def run() -> str:
            name, _ = self._conversation(context, self._said(context.session, context.branch))
            return self._talks.call(name, tool, arguments)

        return await asyncio.to_thread(run)


class _Tool(BaseTool):
    def __init__(
        self, about: dict[str, Any], answer: Callable[[str, dict[str, Any], ToolContext], Awaitable[str]]
    ) -> None:
        super().__init__(name=about["name"], description=about["description"])
        self._parameters, self._answer = about["parameters"], answer

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name, description=self.description, parameters_json_schema=self._parameters
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> str:
        return await self._answer(self.name, args, tool_context)


def _takes_functions(config: types.GenerateContentConfig) -> bool:
    """Many models take them neither beside tools of their provider's nor with a schema for the answer."""
    other = config.tools or config.response_schema or config.response_json_schema
    return not other or any(getattr(tool, "function_declarations", None) for tool in config.tools or ())


def _ask(request: LlmRequest, passing: Iterable[types.Content]) -> Ask:
    """What stands in this request only is counted with the system text."""
    config = request.config
    system = "\n\n".join(filter(None, [_text(config.system_instruction), *map(_text, passing)]))
    declared = [getattr(tool, "function_declarations", None) or () for tool in config.tools or ()]
    functions = [_function(one) for some in declared for one in some]
    return Ask(system, functions, request.model, config.max_output_tokens)


def _function(declared: types.FunctionDeclaration) -> dict[str, Any]:
    schema = declared.parameters_json_schema
    if schema is None and declared.parameters is not None:
        schema = declared.parameters.model_dump(mode="json", exclude_none=True)
    about = {"name": declared.name, "description": declared.description or "", "parameters": schema or {}}
    return {"type": "function", "function": about}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n\n".join(map(_text, value))
    if value is None or isinstance(value, str):
        return value or ""
    return _text(getattr(value, "parts", None) or getattr(value, "text", None))


# What was said in a session


class _Call(NamedTuple):
    tool: str | None
    arguments: Any


class _Result(NamedTuple):
    tool: str | None
    response: Any


class _Said:
    """All that was said and still holds, but for what ADK tells itself."""

    def __init__(self, branch: str | None, whose: Sequence[str]) -> None:
        self.events: list[Event] = []
        self.keys: list[list[Any]] = []
        self.told: list[Told] = []
        """The same objects each time: by them it is known that nothing was changed."""
        self.authors: set[str] = set()
        self._branch, self._whose, self._heard = branch, whose, list[Event]()
        self._numbers, self._began = list[int](), dict[str, int]()
        self.answers: dict[int, int] = {}
        """For an event with calls, the first that has results of them."""
        self._calls: dict[str | None, int] = {}
        self._answered: set[str | None] = set()
        self._renewed: set[str | None] = set()
        """Ids of calls that had more than one result."""

    def goes_on(self, events: Sequence[Event]) -> bool:
        """These are those that were heard, or more."""
        n = len(self._heard)
        return n <= len(events) and (n == 0 or events[n - 1] is self._heard[-1])

    def hear(self, events: Sequence[Event]) -> None:
        for n, event in enumerate(events[len(self._heard) :], len(self._heard)):
            self._heard.append(event)
            self._began.setdefault(event.invocation_id, n)
            since = event.actions.rewind_before_invocation_id
            if since:
                left = bisect_left(self._numbers, self._began.get(since, n))
                del self.events[left:], self.keys[left:], self.told[left:], self._numbers[left:]
                self.authors = {one.author for one in self.events}
                self.answers = {at: to for at, to in self.answers.items() if to < left}
            elif _is_said(event, self._branch):
                self._numbers.append(n)
                self._add(event)

    def _add(self, event: Event) -> None:
        self.keys.append(_key(_content(event)))
        self.events.append(event)
        self.told.append(Told(_content(event), event, self._whose))
        self.authors.add(event.author)
        for one in functions(event.content):
            if isinstance(one, types.FunctionCall):
                self._calls[one.id] = len(self.events) - 1
                self._answered.discard(one.id)
            else:
                self.answers.setdefault(self._calls.get(one.id, -1), len(self.events) - 1)
                self._renewed |= self._answered & {one.id}
                self._answered.add(one.id)

    def keys_of(self, contents: Sequence[types.Content]) -> list[list[Any]]:
        """The very keys of the events where, as a rule, a request repeats those from the first on."""
        own = zip(contents, self.keys, strict=False)
        keys = [key if _is_made_of(one, key) else _key(one) for one, key in own]
        return keys + [_key(one) for one in contents[len(keys) :]]

    def is_told_otherwise(self, at: int, key: list[Any]) -> bool:
        """By ADK: changed by what came later, or without calls that have no result."""
        ids = {one.id for one in functions(self.events[at].content)}
        return bool(ids & self._renewed) or _tools(self.keys[at]) != _tools(key)


def _is_said(event: Event, branch: str | None) -> bool:
    content = event.content
    if content is None or not content.role:
        return False
    if event.branch and "@" in event.branch and not (branch or "").startswith(event.branch):
        return False  # it is how a tool did its work
    names = [one.name for one in functions(content)]
    if names:
        return not any(name in NOT_SAID for name in names)
    return any(
        part.thought_signature or (not part.thought and any(vars(part).values()))
        for part in content.parts or ()
    )


def _key(content: types.Content) -> list[Any]:
    """What it says, without the ids of calls. Quick to compare where the words are the very same."""
    key: list[Any] = [content.role]
    for part in content.parts or ():
        if part.text is not None:
            key.append(part.text)
        elif call := part.function_call:
            key.append(_Call(call.name, call.args))
        elif result := part.function_response:
            key.append(_Result(result.name, result.response))
        else:
            key.append(part.inline_data or part.file_data or vars(part))
    return key


def _is_made_of(content: types.Content, key: list[Any]) -> bool:
    """Of the very same words: none are compared."""
    parts = content.parts or ()
    if len(parts) != len(key) - 1 or content.role != key[0]:
        return False
    for n, part in enumerate(parts, 1):
        own, fields = key[n], part.__dict__  # quicker than its attributes, and there are many
        if (text := fields["text"]) is not None:
            if text is not own:
                return False
        elif type(own) is _Call and (call := fields["function_call"]) is not None:
            if call.args is not own[1] or call.name != own[0]:
                return False
        elif type(own) is _Result and (result := fields["function_response"]) is not None:
            if result.response is not own[1] or result.name != own[0]:
                return False
        else:
            return False
    return True


def _tools(key: list[Any]) -> list[str | None]:
    return [one.tool for one in key if isinstance(one, _Call | _Result)]


def _kinds(key: list[Any]) -> list[Any]:
    return [key[0], *map(type, key[1:])]


def _content(event: Event) -> types.Content:
    return event.content or types.Content()


def _whose(session: Session) -> list[str]:
    return [session.app_name, session.user_id]


# What an agent is told of it


def _matched(keys: Sequence[list[Any]], said: _Said, agent: str) -> dict[int, int]:
    """Which content tells of which event; the others stand in this request only."""
    found, stop = dict[int, int](), len(said.events)
    is_alone = said.authors <= {agent, "user"}
    if is_alone and keys == said.keys:
        return dict(enumerate(range(stop)))
    for n in range(len(keys) - 1, -1, -1):
        at = stop - 1
        if is_alone and at >= 0 and keys[n] == said.keys[at]:
            found[n] = stop = at
        elif not any(isinstance(one, _Result) for one in keys[n]):
            while at >= 0 and not _tells(keys[n], said.keys[at], said.events[at].author, agent):
                at -= 1
            if at >= 0:
                found[n] = stop = at
    for n in range(1, len(keys)):  # results come after their calls, wherever the event is
        if n not in found and any(isinstance(one, _Result) for one in keys[n]):
            at = said.answers.get(found.get(n - 1, -1), -1)
            if at >= 0:
                found[n] = at
    ends = [(-1, -1), *sorted(found.items()), (len(keys), len(said.events))]
    for (n, at), (m, to) in pairwise(ends):
        if m - n == to - at > 1:  # perhaps somebody changed what they say
            gap = [(n + k, at + k) for k in range(1, m - n)]
            if all(_kinds(keys[one]) == _kinds(said.keys[two]) for one, two in gap):
                found.update(gap)
    return found


def _tells(key: list[Any], own: list[Any], author: str, agent: str) -> bool:
    if author not in (agent, "user"):  # in words, after a sentence about that
        return key[0] == "user" and len(key) > 2 and str(key[2]).startswith(f"[{author}]")
    if key == own:
        return True
    # without calls that have no result, or with more beside
    return key[0] == own[0] and len(key) > 1 and (_is_within(key, own) or _is_within(own, key))


def _is_within(some: list[Any], others: list[Any]) -> bool:
    rest = iter(others)
    return all(one in rest for one in some)


def _units(
    contents: Sequence[types.Content],
    keys: Sequence[list[Any]],
    places: Mapping[int, int],
    said: _Said,
    is_all: bool,
) -> list[Told]:
    """What is kept: all of the session, or what is told of it; in other words where somebody changed them."""
    told, units = {at: n for n, at in places.items()}, list[Told]()
    for at, own in enumerate(said.told):
        n = told.get(at)
        is_same = n is not None and keys[n] == said.keys[at]
        if n is None or is_same or (is_all and said.is_told_otherwise(at, keys[n])):
            units += [own] if is_all or is_same else []
        else:
            units.append(Told(contents[n], own.event, own.whose, is_all))
    return units


def _has_ids(contents: Sequence[types.Content]) -> bool:
    """Whether this request's model is told the ids that ADK gives."""
    found = (one.id for content in reversed(contents) for one in functions(content))
    return next((bool(id) for id in found if not id or id.startswith(MADE_UP)), False)


def _copied(content: types.Content, has_ids: bool) -> types.Content:
    """For a request to own."""
    parts = [part.model_copy() for part in content.parts or ()]
    for part in parts if not has_ids else ():
        for name in ("function_call", "function_response"):
            one = getattr(part, name)
            if one and one.id and one.id.startswith(MADE_UP):
                setattr(part, name, one.model_copy(update={"id": None}))
    return content.model_copy(update={"parts": parts})
