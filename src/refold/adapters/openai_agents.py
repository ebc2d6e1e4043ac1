"""For OpenAI's Agents SDK: `Runner.run(agent, text, session=session, run_config=session.run_config())`.

The session stores every item as it came; its run configuration makes what the model sees fit, at every call.
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
)
from agents.models import get_default_model
from agents.run_config import CallModelData, ModelInputData
from agents.tool_context import ToolContext

from refold.adapters.conversation import tools
from refold.adapters.openai_agents_messages import History, Item, Standing, is_part, same, standing_in
from refold.adapters.synced_history import BRANCH, GAPS, is_fork
from refold.config.config import DEFAULT, Source, load_config
from refold.core import codec
from refold.core.errors import ConflictError, StoreError
from refold.session.api import DEFAULT_STORE
from refold.session.api import open as opened
from refold.session.session import Session
from refold.stores.store import Forks, Store, open_store

KEPT = 32
"""Histories at hand that are not the session's own: of agents that are tools, and what a handoff filtered."""


class _Run(NamedTuple):
    """What was shown last in a task, and in those that it starts."""

    by: "RefoldSession"
    task: object
    history: History
    own: History
    early: list[Item]
    """What was shown of the session's own, and so stored, before the SDK adds it."""


_RUN: ContextVar[_Run | None] = ContextVar("refold_run", default=None)


class RefoldSession:
    """The SDK's session and its storage. Several runs may use it at once, in any thread.

    `pop_item` goes on in a fork, while the record keeps what was popped; `clear_session` erases all of it.
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
        self.session_id, self._model, settings = conversation, model, load_config(config)
        where = store if store is not None else settings.store or DEFAULT_STORE
        self._store = open_store(where) if isinstance(where, str) else where
        self._how: dict[str, Any] = {"model": model, "agent": agent, "config": settings}
        here = {"agents": {agent or DEFAULT: {"summarizer": {"run_in": "thread"}}}}
        self._aside = {**self._how, "config": load_config([settings, here])}
        self._lock, self._branches = RLock(), [0]
        self._history: History | None = None
        self._others: deque[History] = deque(maxlen=KEPT)
        self._declared: dict[int, tuple[list[Any], dict[str, Any]]] = {}

    # What the SDK stores

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """As they were added: all, or the newest."""
        _RUN.set(None)  # a run begins with this
        most = self.session_settings.limit if limit is None and self.session_settings else limit
        items = await asyncio.to_thread(lambda: self._newest().items())
        start = 0 if most is None else max(0, len(items) - most)
        copies: list[Any] = codec.loads(codec.dumps(items[start:]))
        return copies

    async def add_items(self, items: list[Any]) -> None:
        await asyncio.to_thread(self._add, items, _RUN.get())

    async def pop_item(self) -> Any:
        """The newest, which from now on neither the SDK nor the model sees."""
        return await asyncio.to_thread(self._pop)

    async def clear_session(self) -> None:
        """Erases the conversation for good."""
        await asyncio.to_thread(self._clear)

    def _add(self, items: Sequence[Item], run: _Run | None) -> None:
        with self._lock:
            early = run.early if run and run.own is self._own else []
            new = items[len(early) :] if same(early, items) else items
            early.clear()
            self._own.add(new)

    def _pop(self) -> Any:
        with self._lock:
            own = self._newest()
            items, places = own.items(), own.places
            if not items:
                return None
            first = places.index(places[-1])  # of those that the model said at once
            self._history = self._forked(own.session, places[first - 1] if first else None)
            self._history.add(items[first:-1])
            return items[-1]

    def _forked(self, session: Session, at: int | None) -> History:
        """One that goes on after a place, or from the beginning, under the first name that is free."""
        for ahead in range(1, 1 + GAPS):
            new = session.key._replace(conversation=self._name(ahead))
            if any(session.store.read(new, 0, 1)):
                continue
            if at is not None:
                session.fork(new.conversation, at=at)
            elif isinstance(session.store, Forks):
                session.store.fork(session.key, new, 0)
            else:
                kind = type(session.store).__name__
                raise StoreError(f"{kind} cannot fork, so that nothing can be popped: clear the session")
            self._branches.append(self._branches[-1] + ahead)
            fork = self._open(0)
            fork.name(title=self.session_id)  # so that there is something in it
            return History(fork)
        raise ConflictError(
            f"{self._name(1)} and so on are conversations of others: pop from another session"
        )

    def _clear(self) -> None:
        """All that is the session's own, and no others that only have such a name."""
        with self._lock:
            self._newest()
            while self._branches:
                self._open(0).clear()
                self._branches.pop()
            self._branches, self._history = [0], None

    @property
    def _own(self) -> History:
        with self._lock:
            return self._history or self._newest()

    def _newest(self) -> History:
        """Of the newest fork, where something was popped: perhaps by another process."""
        with self._lock:
            own, ahead = self._history or History(self._open(0)), 1
            while ahead <= GAPS:
                of, key = own.session.key, own.session.key._replace(conversation=self._name(ahead))
                if any(self._store.read(key, 0, 1)) and is_fork(self._store, key, of):
                    self._branches.append(self._branches[-1] + ahead)
                    own, ahead = History(self._open(0)), 1
                else:
                    ahead += 1
            self._history = own
            return own

    def _open(self, ahead: int) -> Session:
        return opened(self._name(ahead), store=self._store, **self._how)

    def _name(self, ahead: int) -> str:
        n = self._branches[-1] + ahead
        return f"{self.session_id}{BRANCH}{n}" if n else self.session_id

    # What the model sees

    def run_config(self, *, call_model_input_filter: Any = None, **rest: Any) -> RunConfig:
        """With which every call of the model fits; `rest` is whatever else a run configuration has.

        A filter of your own comes first: what it says otherwise, or puts in, is shown so and not stored.
        """

        async def fitted(data: CallModelData[Any]) -> ModelInputData:
            given = deepcopy(data.model_data.input) if call_model_input_filter else []
            made = call_model_input_filter(data) if call_model_input_filter else data.model_data
            made = await made if isawaitable(made) else made
            request = standing_in(given, made.input) if call_model_input_filter else Standing(made.input)
            return await self._fitted(replace(data, model_data=made), config, request)

        config = RunConfig(call_model_input_filter=fitted, **rest)
        return config

    async def _fitted(
        self, data: CallModelData[Any], config: RunConfig, standing: Standing
    ) -> ModelInputData:
        given, run, task = data.model_data, _RUN.get(), asyncio.current_task()
        request = await self._request(data, config)
        if standing.passing:  # counted with the instructions
            lent = [
                request.get("instructions"),
                *(codec.dumps(one).decode() for one in standing.passing.values()),
            ]
            request["instructions"] = "\n\n".join(filter(None, lent))
        model = self._model or _model_of(data.agent, config)

        def fitted() -> tuple[_Run, list[Any]] | None:
            may_be_own = not standing.is_otherwise and self._may_be_own(run, task)
            found = self._whose(standing.items, data.agent.name, may_be_own=may_be_own)
            if found is None:
                return None
            (history, new), own = found, self._own
            history.add(new)
            early = run.early if run and run.own is own else []
            early = [*early, *new] if history is own else early
            return _Run(self, task, history, own, early), standing.placed(history.fit(request, model))

        done = await asyncio.to_thread(fitted)
        if done is None:
            return given
        _RUN.set(done[0])
        return given if done[1] == given.input else ModelInputData(done[1], given.instructions)

    def _may_be_own(self, run: _Run | None, task: object) -> bool:
        """Not where an agent is a tool of the one that was shown something last."""
        return run is None or (run.task is task and (run.by is not self or run.history is self._own))

    def _whose(self, items: list[Any], name: str, *, may_be_own: bool) -> tuple[History, list[Item]] | None:
        """The history that these are of, and those of them that are new to it; None for a part of one."""
        with self._lock:
            known = self._own.covered(items) if may_be_own else None
            if known is not None:
                return self._own, items[known:]
            for other in self._others:
                known = other.covered(items, all_of_it=True)
                if known is not None:
                    return other, items[known:]
            if is_part(items):
                return None
            self._others.append(History(opened(name or "agent", store="memory://", **self._aside)))
            return self._others[-1], items

    async def _request(self, data: CallModelData[Any], config: RunConfig) -> dict[str, Any]:
        settings = data.agent.model_settings.resolve(config.model_settings)
        beside = {"instructions": data.model_data.instructions, "max_output_tokens": settings.max_tokens}
        fields: dict[str, Any] = {**beside, **await self._offered(data)}
        return {name: value for name, value in fields.items() if value is not None}

    async def _offered(self, data: CallModelData[Any]) -> dict[str, Any]:
        """Tools and the answer's shape. Declared once: an agent has the same at every call, as a rule."""
        agent = data.agent
        parts = [agent, agent.output_type, *agent.tools, *agent.handoffs, *agent.mcp_servers]
        known, fields = self._declared.get(id(agent), ([], {}))
        if len(known) != len(parts) or any(one is not two for one, two in zip(known, parts, strict=True)):
            more = await agent.get_mcp_tools(RunContextWrapper(data.context)) if agent.mcp_servers else []
            declared = [_declaration(tool) for tool in [*agent.tools, *more, *agent.handoffs]]
            fields = {"tools": declared or None, "text": _shape(agent.output_type)}
            if len(self._declared) >= KEPT:
                self._declared.clear()
            self._declared[id(agent)] = (parts, fields)
        return fields

    # What the model asks for

    def tools(self) -> list[Any]:
        """Expand and search, for `Agent(tools=[*tools, *session.tools()])`."""
        return [self._tool(**about) for about in tools()]

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> FunctionTool:
        async def answer(context: ToolContext[Any], arguments: str) -> str:
            run = _RUN.get()
            history = run.history if run and run.by is self else self._own
            return await asyncio.to_thread(history.session.call, name, arguments)

        return FunctionTool(name, description, parameters, answer, strict_json_schema=False)


def _declaration(tool: Any) -> dict[str, Any]:
    match tool:
        case FunctionTool():
            about = (tool.name, tool.description, tool.params_json_schema)
        case Handoff():
            about = (tool.tool_name, tool.tool_description, tool.input_json_schema)
        case Agent():
            about = (Handoff.default_tool_name(tool), Handoff.default_tool_description(tool), {})
        case _:
            return {"type": str(tool.name)}
    return {"type": "function", **dict(zip(("name", "description", "parameters"), about, strict=True))}


def _shape(output: Any) -> dict[str, Any] | None:
    if output is None or output is str:
        return None
    shape = output if isinstance(output, AgentOutputSchemaBase) else AgentOutputSchema(output)
    schema = None if shape.is_plain_text() else shape.json_schema()
    return schema and {"format": {"type": "json_schema", "name": "final_output", "schema": schema}}


def _model_of(agent: Agent[Any], config: RunConfig) -> str | None:
    model = config.model or agent.model or get_default_model()
    name = model if isinstance(model, str) else getattr(model, "model", None)
    return name if isinstance(name, str) else None
