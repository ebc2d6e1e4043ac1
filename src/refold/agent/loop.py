"""The loop: ask the model, do what its reply asks for, store each thing the moment it is there, and again.

The record is the only state. A run looks at what is stored and goes on from there, so that a run after a
crash, after a limit, or in another process is a run like any other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isawaitable
from logging import getLogger
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from refold import telemetry
from refold.agent.claim import Claim
from refold.agent.events import Asked, Heard, Ran, Replied, Result, Waited
from refold.agent.steps import (
    Action,
    Actions,
    Chat,
    End,
    ExpandMessage,
    Failed,
    Retry,
    Step,
    SubAgent,
    Success,
    read,
)
from refold.agent.tools import Found, Output, output_of
from refold.core.errors import MessageError, OverBudgetError, RefoldError, SettingError
from refold.core.event import Said
from refold.core.message import Kind, Message, Text, ToolCall, ToolResult, Usage
from refold.models.limits import PROVIDERS
from refold.session.aio import AsyncSession
from refold.session.notify import OnEvent
from refold.summaries.attempt import GivenUpError, attempt
from refold.summaries.problem import problem, status_of, wait_of

if TYPE_CHECKING:
    from refold.agent.agent import Agent

FIRST_WAIT_S = 0.5
"""Before a model that failed is asked again, unless it says how long; twice as long each time."""


FIRST = "system 0"
"""The id of what begins a conversation: of several that begin it at a time, one does."""


class StoppedError(Exception):
    """The run cannot go on now: a limit is reached, or the model is out of reach."""


class Answered(NamedTuple):
    """What a call came to."""

    output: Output
    kind: Kind = "action-result"
    is_error: bool = False
    tools: Sequence[str] = ()
    """Those behind it, where they are not the one that was called."""


class Run:
    """One run of an agent: its conversation, what it may take, and what it has taken so far."""

    def __init__(
        self,
        agent: "Agent",
        session: AsyncSession,
        callbacks: Sequence[OnEvent],
        parent: "Run | None",
        override: Mapping[str, Any] | None = None,
    ) -> None:
        self.agent, self.session, self.callbacks, self.parent = agent, session, callbacks, parent
        self.override = override
        self.record, self.meter = session.sync.record, session.sync.fitter.meter
        self.claim = Claim(session.sync.store, session.sync.key)
        self.dialect: str = getattr(agent.model, "dialect", None) or self.meter.dialect
        self.steps, self.retries, self.cost, self.usage = 0, 0, 0.0, Usage(0, calls=0)
        own = inf if agent.max_seconds is None else monotonic() + agent.max_seconds
        self.deadline: float = own if parent is None else min(own, parent.deadline)
        if agent.max_cost is not None and self.meter.limits.input is None:
            raise SettingError(
                "max_cost",
                f"the prices of {self.meter.model!r} are not known; say what they are in the configuration:"
                f" models: {{{self.meter.model}: {{input: …, output: …}}}}",
            )

    async def result(self, task: Message) -> Result:
        try:
            with telemetry.agent(self.agent.name, self.session.conversation):
                end = await self._go(task)
        except (OverBudgetError, StoppedError) as error:
            end = Failed(str(error))
        finally:
            await asyncio.to_thread(self.claim.release)
        return Result(end, self.session.conversation, self.steps, self.usage, self.cost)

    async def _go(self, task: Message) -> End:
        await self._begin(task)
        for at in sorted({at for at, _ in self.record.live.state.open.values()}):
            await self._act(self._said(at))  # what a run before this one left undone
        reply = await self._listen(task)
        while True:
            reply = reply or await self._ask()
            steps = self._read(reply)
            await self.tell(Replied, steps=steps)
            match steps[0]:
                case Success() | Chat() as end:
                    return end
                case Retry(why, None):
                    await self.session.append(Message("user", (Text(why),)), kind="retry-context")
                case _:
                    await self._act(reply)
            useless = [step.why for step in steps if isinstance(step, Retry)]
            self.retries = self.retries + 1 if len(useless) == len(steps) else 0
            if self.retries > self.agent.max_retries:
                return Failed(f"{self.retries} replies in a row were of no use. To the last: {useless[0]}")
            reply = None

    # What is asked of the agent

    async def _begin(self, task: Message) -> None:
        """From here on nobody else runs it.

        Raises:
            ConflictError: somebody else does.
        """
        if not await asyncio.to_thread(self.claim.take):
            if not await self._introduce(FIRST):
                await self.session.append(task)
            await asyncio.to_thread(self.claim.take)
        await asyncio.to_thread(self.record.catch_up)  # what the one before did meanwhile

    async def _listen(self, task: Message) -> Said | None:
        """Takes the task in, unless it is the one at hand: then the newest reply, if nothing followed it."""
        newest, latest = next(self.record.backwards(), None), self.record.live.state.latest
        newest = newest and self._said(newest.at)  # as it was corrected
        reply = newest if newest and newest.line.role == "assistant" else None
        is_answered = reply is not None and isinstance(self._read(reply)[0], Success | Chat)
        is_another = latest is None or self._said(latest).message.parts != task.parts
        if is_another or (is_answered and self.agent.chat and self.parent is None):
            await self._introduce()
            await self.session.append(task)
            return None
        return reply

    async def _introduce(self, id: str | None = None) -> bool:
        """Tells the model who it is, unless it was told so before; whether it did."""
        text = "\n\n".join(filter(None, (self.agent.system.strip(), self.agent.prompt.strip())))
        told = [self.record.message(line).text for line in self.record.live.state.apart]
        is_new = bool(text) and told != [text]
        if is_new:
            await self.session.append({"system": text}, id=id)
        return is_new

    # Asking the model

    async def _ask(self) -> Said:
        """The model's next reply, which is stored by then."""
        if self.steps >= self.agent.max_steps:
            raise StoppedError(f"max_steps: {self.steps} steps were made. Run it again to go on.")
        self._demand_means()
        self.claim.demand()
        offered, extra = await self._offered(), getattr(self.agent.model, "extra", {})
        fitted = await self.session.fit(dialect=self.dialect, tools=offered or None, request=extra)
        self.steps += 1
        await self.tell(Asked, tokens=fitted.report.tokens.final)
        tries = 0
        while True:
            try:
                return await self._told(fitted.request)
            except Exception as error:
                seconds = self._wait(error, tries)
                await self.tell(Waited, why=problem(error), seconds=seconds)
            await self._in_time(asyncio.sleep, seconds)
            tries += 1

    async def _told(self, request: dict[str, Any]) -> Said:
        """One request, in sight of those who trace."""
        provider, _, _ = self.dialect.partition("-")
        name = getattr(self.agent.model, "name", None)
        named = f"{provider}/{name}" if name and provider in PROVIDERS else name
        with telemetry.chat(named, {"gen_ai.conversation.id": self.session.conversation}) as span:
            said = await self._keep(await self._in_time(self._hear, request))
            if used := said.message.usage:
                tokens = {"input": used.input, "output": used.output}
                span.note({f"gen_ai.usage.{way}_tokens": many for way, many in tokens.items()})
            return said

    async def _offered(self) -> list[dict[str, Any]]:
        """All tools, of those in the library only what something in view has to do with."""
        seen = {tool for item in self.record.live.items for line in item.lines for tool in line.tools}
        known, tools = self.agent.known, self.agent.tools
        offered = [tool for name, tool in known.items() if name in tools or name in seen]
        return [*(tool.declared(self.dialect) for tool in offered), *await self.session.tools(self.dialect)]

    async def _hear(self, request: dict[str, Any]) -> Any:
        """All that the model gives."""
        given = await attempt(self.agent.model, request, inf, None)  # type: ignore[arg-type]
        if hasattr(given, "__aiter__"):
            chunks = []
            async for chunk in given:
                chunks.append(chunk)
                await self.tell(Heard, chunk=chunk)
            return chunks
        if isinstance(given, Iterator):
            return await asyncio.to_thread(list, given)
        return {"role": "assistant", "content": given} if isinstance(given, str) else given

    async def _keep(self, reply: Any) -> Said:
        """
        Raises:
            MessageError: it is no reply; nothing was stored.
        """
        is_list = isinstance(reply, list | tuple)
        values, where = ([*reply], "reply[{}]") if is_list else ([reply], "reply")
        intake = await self.session.intake()
        drafts = (await asyncio.to_thread(intake.take, values, where.format)).drafts
        roles = [draft.message.role for draft in drafts]
        if roles[:1] != ["assistant"] or not {*roles} <= {"assistant", "tool"}:
            got = " and ".join(dict.fromkeys(roles)) or "nothing"
            raise MessageError("reply", f"expected a message of the role assistant, got {got}")
        said = self._said((await self.session.say(drafts))[0])
        if usage := said.message.usage:
            self.usage += usage
            run: Run | None = self
            while run is not None:  # whoever it works for pays as well
                run.cost += self.meter.limits.price(usage)
                run = run.parent
        return said

    def _wait(self, error: Exception, tries: int) -> float:
        """Seconds before the model is asked again; or `error` is raised, where that would be of no use."""
        if isinstance(error, RefoldError | StoppedError) and not isinstance(error, MessageError):
            raise error
        status = status_of(error)
        is_final = status is not None and 400 <= status < 500 and status not in (408, 409, 429)
        if is_final or tries >= self.agent.max_retries:
            raise StoppedError(f"The model could not be asked. {problem(error)}") from error
        told = wait_of(error)
        return FIRST_WAIT_S * 2**tries if told is None else told

    # Doing what it asks for

    def _read(self, reply: Said) -> tuple[Step, ...]:
        return read(reply, self.agent.known, self.agent.agents, self.agent.chat)

    async def _act(self, reply: Said) -> None:
        """Runs the calls in a reply that have no result yet, all at once; each result is stored by itself."""
        self.claim.demand()
        waiting = {id for id, (at, _) in self.record.live.state.open.items() if at == reply.at}
        todo = [(call, work) for call, work in self._work(reply) if call.call_id in waiting]
        answers = (self._answer(reply, call, work) for call, work in todo)
        for error in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(error, BaseException):  # the others have their results by now
                raise error

    def _work(self, reply: Said) -> Iterator[tuple[ToolCall, Callable[[], Awaitable[Answered]]]]:
        for step in self._read(reply):
            match step:
                case Actions(actions):
                    yield from ((one.call, partial(self._use, one)) for one in actions)
                case ExpandMessage(calls):
                    yield from ((call, partial(self._look, call)) for call in calls)
                case SubAgent(call, task):
                    yield call, partial(self._delegate, call, task, _name(reply, call))
                case Retry(why, ToolCall() as call):
                    yield call, partial(self._refuse, why)

    async def _answer(self, reply: Said, call: ToolCall, work: Callable[[], Awaitable[Answered]]) -> None:
        output, kind, is_error, tools = await work()
        result = ToolResult(call.call_id, output, call.tool, is_error)
        message = Message("tool", (result,), id=f"result {_name(reply, call)}")  # by which it is stored once
        await self.session.append(message, kind=kind, tools=tools)
        await self.tell(Ran, call_id=call.call_id, tool=call.tool, output=message.text, is_error=is_error)

    async def _use(self, action: Action) -> Answered:
        function = self.agent.known[action.call.tool].function
        try:
            with telemetry.tool(action.call.tool, self.session.conversation, action.call.call_id):
                given = await self._in_time(lambda arguments: function(**arguments), action.arguments)
            if isinstance(given, Found):
                return Answered(given.text, tools=(action.call.tool, *given.tools))
            return Answered(output_of(given))
        except StoppedError:
            raise
        except Exception as error:  # the model's to deal with
            return Answered(f"{action.call.tool} failed: {problem(error)}", is_error=True)

    async def _look(self, call: ToolCall) -> Answered:
        try:
            return Answered(await self.session.call(call.tool, call.input))
        except Exception as error:  # or each run after this one would end here
            return Answered(f"{call.tool} failed: {problem(error)}", is_error=True)

    async def _refuse(self, why: str) -> Answered:
        return Answered(why, "retry-context", is_error=True)

    async def _delegate(self, call: ToolCall, task: str, name: str) -> Answered:
        agent = self.agent.agents[call.tool]
        callbacks = (*agent.callbacks, *self.callbacks)
        conversation = f"{self.session.conversation}/{name}"
        result = await agent.work(task, conversation, callbacks, self, self.override)
        if isinstance(result.end, Failed):
            self._demand_means()  # or it goes on when this one does
        return Answered(result.text, "sub-agent-result", isinstance(result.end, Failed))

    # Within limits, and in sight

    async def _in_time(self, work: Callable[[Any], Any], given: Any) -> Any:
        try:
            return await attempt(work, given, self.deadline, None)
        except GivenUpError:
            self._demand_means()
            raise

    def _demand_means(self) -> None:
        """
        Raises:
            StoppedError: there is no time or no money left, here or where this is done for.
        """
        if monotonic() >= self.deadline:
            raise StoppedError("max_seconds: the time is used up. Run it again to go on.")
        run: Run | None = self
        while run is not None:
            most = run.agent.max_cost
            if most is not None and run.cost >= most:
                raise StoppedError(f"max_cost: ${run.cost:.4f} of ${most:g} is spent. Run it again to go on.")
            run = run.parent

    def _said(self, at: int) -> Said:
        event, corrected = self.record.event(at), self.record.live.state.corrected.get(at)
        assert isinstance(event, Said)
        return event if corrected is None else replace(event, message=self.record.message(corrected))

    async def tell(self, event: Callable[..., Any], **facts: Any) -> None:
        """Whoever watches; what they do wrong harms nothing here."""
        known = {"agent": self.agent.name, "conversation": self.session.conversation, "step": self.steps}
        for callback in self.callbacks:
            try:
                told = callback(event(**known, **facts))
                if isawaitable(told):
                    await told
            except Exception as error:
                getLogger("refold").warning(f"on_event failed at {event.__name__}: {error!r}", exc_info=error)


def _name(reply: Said, call: ToolCall) -> str:
    """Of one call, in all of a conversation: models may give two the same id."""
    return f"{reply.at}.{reply.message.calls.index(call)}"
