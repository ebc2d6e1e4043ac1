"""For OpenAI's Agents SDK: `Runner.run(agent, text, session=session, run_config=session.run_config())`.

The session records every item as it came; its run configuration fits every call of the model.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from inspect import isawaitable
from threading import RLock
from typing import Any, NamedTuple

from agents import (
    Agent,
    AgentOutputSchema,
    AgentOutputSchemaBase,
    FunctionTool,
    Handoff,
    RunConfig,
    RunContextWrapper,
    SessionSettings,
    handoff,
)
from agents.models import get_default_model
from agents.models.openai_responses import Converter
from agents.run_config import CallModelData, ModelInputData
from agents.tool_context import ToolContext

from refold.adapters.branches import Branches
from refold.adapters.conversation import RequestMatch, lookup_tools, open_adapter_store
from refold.adapters.openai_agents_items import Item, ItemHistory, begins_with, content_key, lacks_calls
from refold.config.config import DEFAULT, Source, load_config
from refold.core import codec
from refold.session.api import open as open_session
from refold.session.history_sync import are_same, insert_transient
from refold.session.session import Session
from refold.stores.store import Store

OTHER_HISTORIES = 32
"""Remembered histories of agents that are tools, and of filtered handoffs."""
DECLARED_AGENTS = 32
"""Agents whose tool declarations are remembered."""


class _RunState(NamedTuple):
    """What was sent last in a task, and in the tasks that it started."""

    session: "RefoldSession"
    task: object
    history: ItemHistory
    own: ItemHistory
    """The session's own history at that time."""
    recorded: list[Item]
    """Items of the session's own history that were recorded before the SDK adds them."""


_RUN: ContextVar[_RunState | None] = ContextVar("refold_run", default=None)


class RefoldSession:
    """A session of the SDK and its storage. Several runs may use it at once, in any thread.

    `pop_item` continues in a fork, and the record keeps the popped item; `clear_session` erases everything.
    """

    session_settings: SessionSettings | None = None

    def __init__(
        self,
        conversation: str,
        *,
        store: str | Store | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        settings = load_config(config)
        in_thread = {"agents": {agent or DEFAULT: {"summarizer": {"executor": "thread"}}}}
        self.session_id = conversation
        self._model = model
        self._store = open_adapter_store(store, settings.store)
        self._settings: dict[str, Any] = {"model": model, "agent": agent, "config": settings}
        self._settings_of_others = {**self._settings, "config": load_config([settings, in_thread])}
        self._lock = RLock()
        self._history: ItemHistory | None = None
        self._others: deque[ItemHistory] = deque(maxlen=OTHER_HISTORIES)
        self._declared: dict[int, tuple[list[Any], dict[str, Any]]] = {}

    # Storage

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """The items as they were added: all, or the newest."""
        _RUN.set(None)  # a run begins with this
        if limit is None and self.session_settings:
            limit = self.session_settings.limit
        items = await asyncio.to_thread(lambda: self._newest().items())
        start = 0 if limit is None else max(0, len(items) - limit)
        copies: list[Any] = codec.loads(codec.dumps(items[start:]))
        return copies

    async def add_items(self, items: list[Any]) -> None:
        await asyncio.to_thread(self._add, items, _RUN.get())

    async def pop_item(self) -> Any:
        """Removes the newest item from what the SDK and the model see."""
        return await asyncio.to_thread(self._pop)

    async def clear_session(self) -> None:
        """Erases the conversation for good."""
        await asyncio.to_thread(self._clear)

    def _add(self, items: Sequence[Item], run: _RunState | None) -> None:
        with self._lock:
            recorded = run.recorded if run and run.own is self._own else []
            new = items[len(recorded) :] if begins_with(items, recorded) else items
            recorded.clear()
            self._own.add(new)

    def _pop(self) -> Any:
        with self._lock:
            own = self._newest()
            while items := own.items():
                first = own.places.index(own.places[-1])  # of the items in the same reply
                if self._branches.fork(own.places[first - 1] if first else None):
                    self._newest().add(items[first:-1])
                    return items[-1]
                own = self._newest()  # another process has popped an item meanwhile
            return None

    def _clear(self) -> None:
        """Erases all branches, and no other conversations that have the name of one."""
        with self._lock:
            for name in reversed(Branches(self.session_id, self._open).names):
                self._open(name).clear()
            self._history = None

    @property
    def _own(self) -> ItemHistory:
        with self._lock:
            return self._history or self._newest()

    def _newest(self) -> ItemHistory:
        """Of the newest branch, since another process may have popped an item."""
        with self._lock:
            if self._history is None:
                self._branches = Branches(self.session_id, self._open)
            else:
                self._branches.follow()
            if self._history is None or self._history.session is not self._branches.newest:
                self._history = ItemHistory(self._branches.newest)
            return self._history

    def _open(self, name: str) -> Session:
        return open_session(name, store=self._store, **self._settings)

    # What the model sees

    def run_config(self, *, call_model_input_filter: Any = None, **rest: Any) -> RunConfig:
        """A run configuration with which every call of the model fits; `rest` are its other fields.

        A filter of your own runs first: what it changes or inserts is sent, and not recorded.
        """

        async def fit(data: CallModelData[Any]) -> ModelInputData:
            if call_model_input_filter is None:
                items = data.model_data.input
                return await self._fit(data, config, RequestMatch.of(items, items, content_key))
            before = deepcopy(data.model_data.input)
            filtered = call_model_input_filter(data)
            if isawaitable(filtered):
                filtered = await filtered
            match = RequestMatch.of(before, filtered.input, content_key)
            return await self._fit(replace(data, model_data=filtered), config, match)

        config = RunConfig(call_model_input_filter=fit, **rest)
        return config

    async def _fit(
        self, data: CallModelData[Any], config: RunConfig, match: RequestMatch[Any]
    ) -> ModelInputData:
        run = _RUN.get()
        task = asyncio.current_task()
        request = await self._request(data, config)
        if match.transient:  # counted with the instructions
            texts = [codec.dumps(item).decode() for item in match.transient.values()]
            request["instructions"] = "\n\n".join(filter(None, [request.get("instructions"), *texts]))
        model = self._model or _model_name(data.agent, config)

        def fit() -> tuple[_RunState, list[Any]] | None:
            may_be_own = match.history == match.sent and self._may_be_own(run, task)
            positions = [n for n in match.positions if n is not None]
            items = [match.request[n] for n in positions]
            found = self._find_history(items, data.agent.name, may_be_own=may_be_own)
            if found is None:
                return None
            history, new = found
            own = self._own
            history.add(new)
            recorded = run.recorded if run and run.own is own else []
            if history is own:
                recorded = [*recorded, *new]
            state = _RunState(self, task, history, own, recorded)
            fitted = history.fit(request, model)
            if not match.transient:
                return state, fitted
            position_of = dict(zip(map(content_key, items), positions, strict=True))
            fitted_positions = [position_of.get(content_key(item)) for item in fitted]
            return state, insert_transient(fitted, fitted_positions, match.transient)

        fitted = await asyncio.to_thread(fit)
        if fitted is None:
            return data.model_data
        state, items = fitted
        _RUN.set(state)
        if items == data.model_data.input:
            return data.model_data
        return ModelInputData(items, data.model_data.instructions)

    def _may_be_own(self, run: _RunState | None, task: object) -> bool:
        """False if the agent is a tool of the one whose request was sent last."""
        if run is None:
            return True
        return run.task is task and (run.session is not self or run.history is self._own)

    def _find_history(
        self, items: list[Any], name: str, *, may_be_own: bool
    ) -> tuple[ItemHistory, list[Item]] | None:
        """The history that the items belong to, and the new ones of them; None for a part of a history."""
        with self._lock:
            known = self._own.count_known(items) if may_be_own else None
            if known is not None:
                return self._own, items[known:]
            for other in self._others:
                known = other.count_known(items, whole=True)
                if known is not None:
                    return other, items[known:]
            if lacks_calls(items):
                return None
            session = open_session(name or "agent", store="memory://", **self._settings_of_others)
            self._others.append(ItemHistory(session))
            return self._others[-1], items

    async def _request(self, data: CallModelData[Any], config: RunConfig) -> dict[str, Any]:
        settings = data.agent.model_settings.resolve(config.model_settings)
        fields: dict[str, Any] = {
            "instructions": data.model_data.instructions,
            "max_output_tokens": settings.max_tokens,
            **await self._declarations(data),
        }
        return {name: value for name, value in fields.items() if value}

    async def _declarations(self, data: CallModelData[Any]) -> dict[str, Any]:
        """Tools and the output's schema, cached, since an agent's calls usually have the same."""
        agent = data.agent
        parts = [agent, agent.output_type, *agent.tools, *agent.handoffs, *agent.mcp_servers]
        known, fields = self._declared.get(id(agent), ([], {}))
        if are_same(known, parts):
            return fields
        tools = [*agent.tools]
        if agent.mcp_servers:
            tools += await agent.get_mcp_tools(RunContextWrapper(data.context))
        handoffs = [one if isinstance(one, Handoff) else handoff(one) for one in agent.handoffs]
        fields = {"tools": Converter.convert_tools(tools, handoffs).tools}
        output = agent.output_type
        if output is not None and not isinstance(output, AgentOutputSchemaBase):
            output = AgentOutputSchema(output)
        text = Converter.get_response_format(output)
        if isinstance(text, dict):  # a plain text has no format
            fields["text"] = text
        if len(self._declared) >= DECLARED_AGENTS:
            self._declared.clear()
        self._declared[id(agent)] = (parts, fields)
        return fields

    def tools(self) -> list[Any]:
        """refold_expand and refold_search, for `Agent(tools=[*tools, *session.tools()])`."""
        return [self._tool(**about) for about in lookup_tools()]

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> FunctionTool:
        async def invoke(context: ToolContext[Any], arguments: str) -> str:
            run = _RUN.get()
            history = run.history if run and run.session is self else self._own
            return await asyncio.to_thread(history.session.call, name, arguments)

        return FunctionTool(name, description, parameters, invoke, strict_json_schema=False)


def _model_name(agent: Agent[Any], config: RunConfig) -> str | None:
    model = config.model or agent.model or get_default_model()
    name = model if isinstance(model, str) else getattr(model, "model", None)
    return name if isinstance(name, str) else None
