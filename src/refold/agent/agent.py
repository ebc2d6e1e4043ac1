"""An agent: what it is told, what it may use and spend, and the ways to run it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from refold.agent.events import AgentEvent, Ended, Result
from refold.agent.loop import Run
from refold.agent.models import Model, model_of
from refold.agent.tools import Tool, by_name, finder
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
"""What every agent is told of the loop, by whether what is reduced shows how to get it back;
`Agent(prompt=…)` says something else instead."""
CONFIG = "refold.yaml"
"""The file that `Agent.from_config` reads unless another is given."""
COMPACT_AFTER, KEEP_RECENT, TARGET = 100, 20, 0.5
"""Messages before a compaction, messages that it leaves alone, and the share of the threshold it leaves."""


class Agent:
    """A model with tools, and a record that outlives it.

        agent = Agent("reader", "gpt-5", tools=[read_file], store="sqlite:///agent.db")
        print(agent.run("What is in README.md?").text)

    `model` is a name or a callable; `tools` and `library` are typed functions, of which those in the library
    are offered only while something in view has to do with them. `sub_agents` are offered as tools that take
    a task. With `chat` every text is for the user, who answers with the next `run`. Limits are of one run.
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
        self.name, self.description, self.chat = name, description, chat
        self.model: Model = model_of(model) if isinstance(model, str) else model
        limits: dict[str, float | None] = {"max_steps": max_steps, "max_retries": max_retries}
        for limit, most in (limits | {"max_cost": max_cost, "max_seconds": max_seconds}).items():
            if type(most) not in ((int, float) if most is not None else (type(None),)) or (most or 0) < 0:
                raise SettingError(limit, f"expected a number, 0 or more; got {most!r}")
        for several, given in (("tools", tools), ("library", library), ("sub_agents", sub_agents)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise SettingError(several, f"expected a list, got {type(given).__name__}")
        for agent in sub_agents:
            if not isinstance(agent, Agent):
                raise SettingError("sub_agents", f"expected agents, got {type(agent).__name__}")
        self.agents = {agent.name: agent for agent in sub_agents}
        self.library = by_name(map(Tool.of, library))
        found = [finder([*self.library.values()])] if library else []
        helpers = [_task(agent) for agent in sub_agents]
        self.tools = by_name([*map(Tool.of, tools), *helpers, *found])
        self.known = by_name([*self.tools.values(), *self.library.values()])
        self.config, self.settings = _configured(load_config(config), name, self.model)
        own = self.config.agent(self.settings)
        told = Path(__file__).with_name(PROMPTS[own.shows_handles])
        self.system = system or own.system_prompt or ""
        self.prompt = told.read_text("utf-8") if prompt is None else prompt
        self.summarizer, self.callbacks = summarizer, callbacks_of(on_event)
        self.max_steps, self.max_retries = max_steps, max_retries
        self.max_cost, self.max_seconds = max_cost, max_seconds
        self._given, self._opened = store, None if isinstance(store, str) else store

    @classmethod
    def from_config(
        cls, name: str, config: Source = CONFIG, *, model: str | Model | None = None, **given: Any
    ) -> Self:
        """The agent that a configuration has under a name or an `id`, with its model and `system_prompt`.

        `config` is the file `refold.yaml` unless given; `given` is whatever else `Agent` takes.

        Raises:
            SettingError: there is no such agent, or neither it nor the caller names a model.
        """
        loaded = load_config(config)
        ids = {settings.id: key for key, settings in loaded.agents.items() if settings.id is not None}
        key = name if name in loaded.agents else ids.get(name, name)
        chosen = model or loaded.agent(key).model
        if chosen is None:
            place = loaded.place("agents", key, "model")
            raise SettingError(place, "is not set; name a model there, or give from_config(…, model=…)")
        return cls(key, chosen, config=loaded, **given)

    def run(
        self,
        task: str | Message,
        *,
        conversation: str | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> Result:
        """Works on a task until it is done, or a limit is reached. See `arun`."""
        return asyncio.run(self.arun(task, conversation=conversation, override=override))

    async def arun(
        self,
        task: str | Message,
        *,
        conversation: str | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> Result:
        """The same for code that awaits.

        A `conversation` that exists is gone on with: where the task is what was asked last, at the step where
        that stopped, and a task that has its answer gets that one; where it is another, with that task.
        `override` beats the settings in this run, its sub-agents included (see `refold.open`).
        """
        name = conversation or f"{self.name}-{uuid4().hex[:12]}"
        return await self.work(task, name, self.callbacks, override=override)

    def stream(
        self,
        task: str | Message,
        *,
        conversation: str | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> Iterator[AgentEvent]:
        """The events of a run as they happen; the last is `Ended`, with its result."""
        with asyncio.Runner() as runner:
            events = self.astream(task, conversation=conversation, override=override)

            async def following() -> AgentEvent | None:
                return await anext(events, None)

            while (event := runner.run(following())) is not None:
                yield event

    async def astream(
        self,
        task: str | Message,
        *,
        conversation: str | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[AgentEvent]:
        """The same for code that awaits. Who stops listening stops the run."""
        events, loop = asyncio.Queue[AgentEvent | None](), asyncio.get_running_loop()

        def put(event: Any) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        name = conversation or f"{self.name}-{uuid4().hex[:12]}"
        run = asyncio.create_task(self.work(task, name, (*self.callbacks, put), override=override))
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
        task: str | Message,
        conversation: str,
        callbacks: Sequence[OnEvent],
        parent: Run | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> Result:
        """One run, of itself or for another one. The view is pruned when it ends, however it ends."""
        asked = task if isinstance(task, Message) else Message("user", (Text(require_name("task", task)),))
        session = await aopen(
            conversation,
            store=self.store if parent is None or self._given is not None else parent.session.sync.store,
            model=getattr(self.model, "name", None),
            agent=self.settings,
            config=self.config,
            summarizer=self.summarizer,
            on_event=list(callbacks),
            override=override,
        )
        async with session:
            run = Run(self, session, callbacks, parent, override)
            result = await run.result(asked)
        await run.tell(Ended, result=result)
        return result

    @property
    def store(self) -> Store:
        """Opened when it is first needed, for all runs."""
        if self._opened is None:
            given = self._given or self.config.store or DEFAULT_STORE
            self._opened = open_store(given) if isinstance(given, str) else given
        return self._opened

    def close(self) -> None:
        """Closes the store, where the agent opened it. Needed only where the process goes on without it."""
        if self._opened is not None and self._opened is not self._given:
            self._opened.close()
        self._opened = None


def _task(agent: Agent) -> Tool:
    """An agent as a tool of another one."""

    def work(task: str) -> None: ...

    about = f"{agent.description} An agent of its own: its task says all that it needs to know.".strip()
    return Tool.of(work, name=agent.name, description=about)


def _configured(config: Config, name: str, model: Model) -> tuple[Config, str]:
    """What is configured over what loops have by default, and under which name: its own, or `default`."""
    agent = name if name in config.agents else "default"
    settings = config.agents.get(agent) or AgentSettings()
    limits = find(getattr(model, "name", None) or settings.model, config.models).limits
    target = int(TARGET * config.budget(AgentSettings(), limits).threshold)
    compact = {"message_threshold": COMPACT_AFTER, "keep_recent": KEEP_RECENT, "max_tokens": target}
    return load_config([{"agents": {agent: {"compact": compact}}}, config]), agent
