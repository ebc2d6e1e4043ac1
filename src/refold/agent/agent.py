"""An agent: its model, tools and limits, and the ways to run it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeAlias
from uuid import uuid4

from refold.agent.events import AgentEvent, Ended, Result
from refold.agent.loop import AgentRun
from refold.agent.models import Model, model_by_name
from refold.agent.tools import Tool, by_name, library_search
from refold.config.config import AgentSettings, Config, Source, load_config
from refold.core.errors import SettingError
from refold.core.message import Message, Text
from refold.models.limits import find
from refold.session.aio import aopen
from refold.session.api import DEFAULT_STORE
from refold.session.notify import OnEvent, callbacks_of
from refold.session.validate import require_name
from refold.stores.store import Store, open_store

PROMPTS = {True: "prompt.md", False: "prompt-no-handles.md"}
"""The default prompt about the loop, by whether reduced messages show handles."""
CONFIG = "refold.yaml"
COMPACT_AFTER_MESSAGES = 100
KEEP_RECENT = 20
TARGET = 0.5
"""The share of the threshold that a compaction leaves."""

Task: TypeAlias = str | Message
Override: TypeAlias = Mapping[str, Any] | None


class Agent:
    """A model with tools, and a record that outlives it.

        agent = Agent("reader", "gpt-5", tools=[read_file], store="sqlite:///agent.db")
        print(agent.run("What is in README.md?").text)

    `model` is a name or a callable; `tools` and `library` are typed functions. Tools of the library are
    offered only while a message in view has found or used them. `sub_agents` are offered as tools that take a
    task. With `chat` every text is for the user, who answers with the next `run`. Limits apply to each run.
    """

    def __init__(
        self,
        name: str,
        model: str | Model,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        sub_agents: Sequence["Agent"] = (),
        config: Source = None,
        *,
        store: str | Store | None = None,
        description: str = "",
        system: str = "",
        prompt: str | None = None,
        library: Sequence[Callable[..., Any] | Tool] = (),
        chat: bool = False,
        summarizer: Any = None,
        max_steps: int = 100,
        max_cost: float | None = None,
        max_seconds: float | None = None,
        max_retries: int = 3,
        on_event: OnEvent | Sequence[OnEvent] | None = None,
    ) -> None:
        limits: dict[str, float] = {"max_steps": max_steps, "max_retries": max_retries}
        optional = {"max_cost": max_cost, "max_seconds": max_seconds}
        limits |= {name: most for name, most in optional.items() if most is not None}
        for limit, most in limits.items():
            if type(most) not in (int, float) or most < 0:
                raise SettingError(limit, f"expected a number, 0 or more; got {most!r}")
        for argument, given in {"tools": tools, "library": library, "sub_agents": sub_agents}.items():
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise SettingError(argument, f"expected a list, got {type(given).__name__}")
        for agent in sub_agents:
            if not isinstance(agent, Agent):
                raise SettingError("sub_agents", f"expected agents, got {type(agent).__name__}")
        self.name = name
        self.description = description
        self.chat = chat
        self.model: Model = model_by_name(model) if isinstance(model, str) else model
        self.agents = {agent.name: agent for agent in sub_agents}
        self.library = by_name(map(Tool.of, library))
        offered = [*map(Tool.of, tools), *map(_as_tool, sub_agents)]
        if library:
            offered.append(library_search([*self.library.values()]))
        self.tools = by_name(offered)
        self.known = by_name([*self.tools.values(), *self.library.values()])
        self.config, self.settings = _configured(load_config(config), name, self.model)
        settings = self.config.agent(self.settings)
        self.system = system or settings.system_prompt or ""
        if prompt is None:
            prompt = Path(__file__).with_name(PROMPTS[settings.shows_handles]).read_text("utf-8")
        self.prompt = prompt
        self.summarizer = summarizer
        self.callbacks = callbacks_of(on_event)
        self.max_steps = max_steps
        self.max_retries = max_retries
        self.max_cost = max_cost
        self.max_seconds = max_seconds
        self._given_store = store
        self._store = None if isinstance(store, str) else store

    @classmethod
    def from_config(
        cls, name: str, config: Source = CONFIG, *, model: str | Model | None = None, **given: Any
    ) -> Self:
        """The agent that is configured under a name or an `id`, with its model and `system_prompt`.

        `config` is the file `refold.yaml` unless given; `given` are other arguments of `Agent`.

        Raises:
            SettingError: no such agent is configured, or it has no model and none is passed.
        """
        loaded = load_config(config)
        ids = {settings.id: key for key, settings in loaded.agents.items() if settings.id is not None}
        key = name if name in loaded.agents else ids.get(name, name)
        chosen = model or loaded.agent(key).model
        if chosen is None:
            place = loaded.place("agents", key, "model")
            raise SettingError(place, "is not set; set it there, or pass from_config(…, model=…)")
        return cls(key, chosen, config=loaded, **given)

    def run(self, task: Task, *, conversation: str | None = None, override: Override = None) -> Result:
        """Works on a task until it is done or a limit is reached. See `arun`."""
        return asyncio.run(self.arun(task, conversation=conversation, override=override))

    async def arun(self, task: Task, *, conversation: str | None = None, override: Override = None) -> Result:
        """The async form of `run`.

        A `conversation` that exists is continued. If its latest task is this one, the run continues at the
        step where that one stopped, or returns its answer; otherwise the task is appended. `override` beats
        the settings in this run and its sub-agents (see `refold.open`).
        """
        return await self.work(task, conversation, self.callbacks, override)

    def stream(
        self, task: Task, *, conversation: str | None = None, override: Override = None
    ) -> Iterator[AgentEvent]:
        """The events of a run as they happen. The last one is `Ended`, with the result."""
        with asyncio.Runner() as runner:
            events = self.astream(task, conversation=conversation, override=override)

            async def next_event() -> AgentEvent | None:
                return await anext(events, None)

            while (event := runner.run(next_event())) is not None:
                yield event

    async def astream(
        self, task: Task, *, conversation: str | None = None, override: Override = None
    ) -> AsyncIterator[AgentEvent]:
        """The async form of `stream`. Closing the iterator cancels the run."""
        events = asyncio.Queue[AgentEvent | None]()
        loop = asyncio.get_running_loop()

        def put(event: Any) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        callbacks = (*self.callbacks, put)
        run = asyncio.create_task(self.work(task, conversation, callbacks, override))
        run.add_done_callback(lambda _: put(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await run
        finally:
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

    async def work(
        self,
        task: Task,
        conversation: str | None,
        callbacks: Sequence[OnEvent],
        override: Override,
        parent: AgentRun | None = None,
    ) -> Result:
        """One run, for a caller or for a parent run. The view is pruned when it ends, also after an error."""
        if not isinstance(task, Message):
            task = Message("user", (Text(require_name("task", task)),))
        store = self.store if parent is None or self._given_store is not None else parent.session.store
        session = await aopen(
            conversation or f"{self.name}-{uuid4().hex[:12]}",
            store=store,
            model=getattr(self.model, "name", None),
            agent=self.settings,
            config=self.config,
            summarizer=self.summarizer,
            on_event=list(callbacks),
            override=override,
        )
        async with session:
            run = AgentRun(self, session, callbacks, parent, override)
            result = await run.result(task)
        await run.notify(Ended, result=result)
        return result

    @property
    def store(self) -> Store:
        """The store of all runs, opened when it is first needed."""
        if self._store is None:
            given = self._given_store or self.config.store or DEFAULT_STORE
            self._store = open_store(given) if isinstance(given, str) else given
        return self._store

    def close(self) -> None:
        """Closes the store if the agent opened it. Not needed before the process ends."""
        if self._store is not None and self._store is not self._given_store:
            self._store.close()
        self._store = None


def _as_tool(agent: Agent) -> Tool:
    def work(task: str) -> None: ...

    rule = "A separate agent: its task must contain all that it needs to know."
    description = f"{agent.description} {rule}".strip()
    return Tool.of(work, name=agent.name, description=description)


def _configured(config: Config, name: str, model: Model) -> tuple[Config, str]:
    """The configuration over the defaults for loops, and the key of the agent's settings in it."""
    agent = name if name in config.agents else "default"
    settings = config.agents.get(agent) or AgentSettings()
    limits = find(getattr(model, "name", None) or settings.model, config.models).limits
    target = int(TARGET * config.budget(AgentSettings(), limits).threshold)
    compact = {"message_threshold": COMPACT_AFTER_MESSAGES, "keep_recent": KEEP_RECENT, "max_tokens": target}
    return load_config([{"agents": {agent: {"compact": compact}}}, config]), agent
