"""The agent loop: ask the model, run what its reply calls, store every message at once, repeat.

The record is the only state. A run reads what is stored and continues from there, so a run after a crash,
after a limit, or in another process is a run like any other.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isawaitable
from logging import getLogger
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from refold import telemetry
from refold.agent.events import Asked, Heard, Ran, Replied, Result, Waited
from refold.agent.steps import (
    Actions,
    Chat,
    End,
    ExpandMessage,
    Failed,
    Retry,
    Step,
    SubAgent,
    Success,
    parse_call,
    parse_steps,
)
from refold.agent.tools import FoundTools, ToolOutput, tool_output
from refold.core.errors import ConflictError, MessageError, OverBudgetError, RefoldError, SettingError
from refold.core.event import Said
from refold.core.message import Kind, Message, Text, ToolCall, ToolResult, Usage
from refold.dialects.registry import default_dialect
from refold.models.limits import PROVIDERS, provider_of
from refold.session.aio import AsyncSession
from refold.session.notify import OnEvent
from refold.stores.lease_holder import RenewedLease
from refold.stores.shelf import Shelf
from refold.summaries.call import CallTimeoutError, call_once
from refold.summaries.call_errors import describe, retry_after, status_of

if TYPE_CHECKING:
    from refold.agent.agent import Agent

FIRST_WAIT_S = 0.5
"""The wait before the first retry, unless the model's API names one. It doubles with each retry."""
LEASE_S = 30.0
"""A lease that is not renewed expires after this time; one whose process died on this machine, at once."""
FIRST_ID = "system 0"
"""The id of a conversation's first message: of several runs that begin it at once, one stores it."""


class StoppedError(Exception):
    """The run cannot continue now: a limit is reached, or the model does not answer."""


class ToolCallOutcome(NamedTuple):
    """What a tool call came to, as its result message stores it."""

    output: ToolOutput
    kind: Kind = "action-result"
    is_error: bool = False
    tools: Sequence[str] = ()
    """Tools behind the output, if they are others than the called one."""


class AgentRun:
    """One run of an agent: its conversation, its limits, and what it has used of them."""

    def __init__(
        self,
        agent: "Agent",
        session: AsyncSession,
        callbacks: Sequence[OnEvent],
        parent: "AgentRun | None",
        override: Mapping[str, Any] | None = None,
    ) -> None:
        self.agent = agent
        self.session = session
        self.callbacks = callbacks
        self.parent = parent
        self.override = override
        self.inspect = session.inspect
        self.lease: RenewedLease | None = None
        """Two runs of a conversation at once would call its tools twice."""
        if isinstance(session.store, Shelf):
            self.lease = RenewedLease(session.store, session.key, "run", LEASE_S)
        self.steps = 0
        self.retries = 0
        self.cost = 0.0
        self.usage = Usage(0, calls=0)
        self.deadline: float = inf if parent is None else parent.deadline
        if agent.max_seconds is not None:
            self.deadline = min(self.deadline, monotonic() + agent.max_seconds)
        if agent.max_cost is not None and session.limits.input is None:
            raise SettingError(
                "max_cost",
                f"the prices of {session.model!r} are not known; set them in the configuration:"
                f" models: {{{session.model}: {{input: …, output: …}}}}",
            )
        provider = session.limits.provider or provider_of(session.model)
        self.dialect: str = getattr(agent.model, "dialect", None) or default_dialect(provider)

    async def result(self, task: Message) -> Result:
        try:
            with telemetry.agent(self.agent.name, self.session.conversation):
                end = await self._loop(task)
        except (OverBudgetError, StoppedError) as error:
            end = Failed(str(error))
        finally:
            if self.lease is not None:
                await asyncio.to_thread(self.lease.release)
        return Result(end, self.session.conversation, self.steps, self.usage, self.cost)

    async def _loop(self, task: Message) -> End:
        await self._take_lease(task)
        for at in sorted({at for at, _ in self.inspect.state.open.values()}):
            await self._run_calls(self._message_at(at))  # an earlier run ended before they had results
        reply = await self._add_task(task)
        while True:
            reply = reply or await self._next_reply()
            steps = self._steps_of(reply)
            await self.notify(Replied, steps=steps)
            match steps[0]:
                case Success() | Chat() as end:
                    return end
                case Retry(why, None):
                    await self.session.append(Message("user", (Text(why),)), kind="retry-context")
                case _:
                    await self._run_calls(reply)
            reasons = [step.why for step in steps if isinstance(step, Retry)]
            self.retries = self.retries + 1 if len(reasons) == len(steps) else 0
            if self.retries > self.agent.max_retries:
                return Failed(f"{self.retries} replies in a row were unusable. The last one: {reasons[0]}")
            reply = None

    # The task

    async def _take_lease(self, task: Message) -> None:
        """Raises ConflictError if another run holds the lease."""
        if self.lease is not None:
            await asyncio.to_thread(self.lease.acquire)
            self._check_lease()
            if not self.lease.is_held:  # a conversation without messages has no leases
                if not await self._add_system_text(FIRST_ID):
                    await self.session.append(task)
                await asyncio.to_thread(self.lease.acquire)
                self._check_lease()
        await self.session.get_count()  # reads what the run before this one stored meanwhile

    def _check_lease(self) -> None:
        """Raises ConflictError if another run holds the lease, perhaps since it was not renewed in time."""
        rival = self.lease.rival if self.lease else None
        if rival is not None:
            where, pid, *_ = f"{rival.holder} ?".split(" ")
            raise ConflictError(
                f"{self.session.conversation!r} is being run by process {pid} on {where.partition('/')[0]}."
                " Wait until that run ends, or use another conversation. If the process is gone, the lease"
                f" expires within {LEASE_S:g} seconds."
            )

    async def _add_task(self, task: Message) -> Said | None:
        """Appends the task, or returns the newest reply if the task is the latest one already."""
        reply = None
        newest = next(self.inspect.newest_first(), None)
        if newest is not None and newest.line.role == "assistant":
            reply = self._message_at(newest.at)
        latest = self.inspect.state.latest
        is_new = latest is None or self._message_at(latest).message.parts != task.parts
        if self.agent.chat and self.parent is None and reply is not None:
            is_new = is_new or isinstance(self._steps_of(reply)[0], Success | Chat)
        if not is_new:
            return reply
        await self._add_system_text()
        await self.session.append(task)
        return None

    async def _add_system_text(self, id: str | None = None) -> bool:
        """Appends the agent's system text, unless it is the one in force; returns True if it did."""
        text = "\n\n".join(filter(None, (self.agent.system.strip(), self.agent.prompt.strip())))
        in_force = [self.inspect.message(line).text for line in self.inspect.state.apart]
        if not text or in_force == [text]:
            return False
        await self.session.append({"system": text}, id=id)
        return True

    # Asking the model

    async def _next_reply(self) -> Said:
        """Asks the model, with retries, and stores its reply."""
        if self.steps >= self.agent.max_steps:
            raise StoppedError(f"max_steps reached: {self.steps} steps done. Run the task again to continue.")
        self._check_limits()
        self._check_lease()
        tools = await self._offered_tools()
        extra = getattr(self.agent.model, "extra", {})
        fitted = await self.session.fit(dialect=self.dialect, tools=tools or None, request=extra)
        self.steps += 1
        await self.notify(Asked, tokens=fitted.report.tokens.final)
        attempts = 0
        while True:
            try:
                return await self._send(fitted.request)
            except Exception as error:
                seconds = self._retry_delay(error, attempts)
                await self.notify(Waited, why=describe(error), seconds=seconds)
            await self._before_deadline(asyncio.sleep, seconds)
            attempts += 1

    async def _offered_tools(self) -> list[dict[str, Any]]:
        """All tools; of the library, those that a message in view has used or found."""
        names = set(self.agent.tools)
        for item in self.inspect.items:
            for line in item.lines:
                names.update(line.tools)
        offered = [tool.declared(self.dialect) for name, tool in self.agent.known.items() if name in names]
        return offered + await self.session.tools(self.dialect)

    async def _send(self, request: dict[str, Any]) -> Said:
        provider = self.dialect.partition("-")[0]
        name = getattr(self.agent.model, "name", None)
        traced_name = f"{provider}/{name}" if name and provider in PROVIDERS else name
        with telemetry.chat(traced_name, {"gen_ai.conversation.id": self.session.conversation}) as span:
            reply = await self._store_reply(await self._before_deadline(self._call_model, request))
            if usage := reply.message.usage:
                span.note({"gen_ai.usage.input_tokens": usage.input})
                span.note({"gen_ai.usage.output_tokens": usage.output})
            return reply

    async def _call_model(self, request: dict[str, Any]) -> Any:
        """The whole reply; of a stream, the list of its chunks."""
        reply = await call_once(self.agent.model, request, inf, None)
        if hasattr(reply, "__aiter__"):
            chunks = []
            async for chunk in reply:
                chunks.append(chunk)
                await self.notify(Heard, chunk=chunk)
            return chunks
        if isinstance(reply, Iterator):
            return await asyncio.to_thread(list, reply)
        return {"role": "assistant", "content": reply} if isinstance(reply, str) else reply

    async def _store_reply(self, reply: Any) -> Said:
        """Raises MessageError, and stores nothing, if it is not a reply."""
        intake = await self.session.intake()
        if isinstance(reply, list | tuple):
            parsed = await asyncio.to_thread(intake.take, [*reply], "reply[{}]".format)
        else:
            parsed = await asyncio.to_thread(intake.take, [reply], lambda n: "reply")
        roles = [draft.message.role for draft in parsed.drafts]
        if roles[:1] != ["assistant"] or not {*roles} <= {"assistant", "tool"}:
            got = " and ".join(dict.fromkeys(roles)) or "nothing"
            raise MessageError("reply", f"expected a message of the role assistant, got {got}")
        places = await self.session.say(parsed.drafts)
        stored = self._message_at(places[0])
        if usage := stored.message.usage:
            self.usage += usage
            price = self.session.limits.price(usage)
            for run in self._with_parents():
                run.cost += price
        return stored

    def _retry_delay(self, error: Exception, attempts: int) -> float:
        """Seconds until the next attempt. Raises if another attempt would not help."""
        if isinstance(error, RefoldError | StoppedError) and not isinstance(error, MessageError):
            raise error
        status = status_of(error)
        is_final = status is not None and 400 <= status < 500 and status not in (408, 409, 429)
        if is_final or attempts >= self.agent.max_retries:
            raise StoppedError(f"The request to the model failed. {describe(error)}") from error
        requested = retry_after(error)
        return FIRST_WAIT_S * 2**attempts if requested is None else requested

    # Running what the reply calls

    def _steps_of(self, reply: Said) -> tuple[Step, ...]:
        return parse_steps(reply, self.agent.known, self.agent.agents, self.agent.chat)

    async def _run_calls(self, reply: Said) -> None:
        """Runs the calls in a reply that have no result yet, all at once. Each result is stored by itself."""
        self._check_lease()
        open_ids = {id for id, (at, _) in self.inspect.state.open.items() if at == reply.at}
        calls = [call for call in reply.message.calls if call.call_id in open_ids]
        work = [self._run_call(reply, call) for call in calls]
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, BaseException):  # the other calls have their results by now
                raise error

    async def _run_call(self, reply: Said, call: ToolCall) -> None:
        name = f"{reply.at}.{reply.message.calls.index(call)}"  # models may give two calls the same id
        outcome = await self._outcome(reply, call, name)
        result = ToolResult(call.call_id, outcome.output, call.tool, outcome.is_error)
        message = Message("tool", (result,), id=f"result {name}")  # an id is stored once
        await self.session.append(message, kind=outcome.kind, tools=outcome.tools)
        text = message.text
        await self.notify(Ran, call_id=call.call_id, tool=call.tool, output=text, is_error=outcome.is_error)

    async def _outcome(self, reply: Said, call: ToolCall, name: str) -> ToolCallOutcome:
        step = parse_call(reply, call, self.agent.known, self.agent.agents)
        try:
            match step:
                case Retry(why):
                    return ToolCallOutcome(why, "retry-context", is_error=True)
                case ExpandMessage():
                    return ToolCallOutcome(await self.session.call(call.tool, call.input))
                case Actions((action,)):
                    return await self._run_tool(call, action.arguments)
        except StoppedError:
            raise
        except Exception as error:  # for the model to deal with
            return ToolCallOutcome(f"{call.tool} failed: {describe(error)}", is_error=True)
        assert isinstance(step, SubAgent)
        return await self._run_sub_agent(call, step.task, name)

    async def _run_tool(self, call: ToolCall, arguments: dict[str, Any]) -> ToolCallOutcome:
        function = self.agent.known[call.tool].function
        with telemetry.tool(call.tool, self.session.conversation, call.call_id):
            returned = await self._before_deadline(lambda given: function(**given), arguments)
        if isinstance(returned, FoundTools):
            return ToolCallOutcome(returned.text, tools=(call.tool, *returned.tools))
        return ToolCallOutcome(tool_output(returned))

    async def _run_sub_agent(self, call: ToolCall, task: str, name: str) -> ToolCallOutcome:
        agent = self.agent.agents[call.tool]
        callbacks = (*agent.callbacks, *self.callbacks)
        conversation = f"{self.session.conversation}/{name}"
        result = await agent.work(task, conversation, callbacks, self.override, self)
        has_failed = isinstance(result.end, Failed)
        if has_failed:
            self._check_limits()  # if a limit of this run was the reason, a later run continues both
        return ToolCallOutcome(result.text, "sub-agent-result", has_failed)

    # Limits and events

    async def _before_deadline(self, work: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return await call_once(work, argument, self.deadline, None)
        except CallTimeoutError:
            self._check_limits()
            raise

    def _check_limits(self) -> None:
        """
        Raises:
            StoppedError: the time or the money of this run, or of one that it works for, is used up.
        """
        if monotonic() >= self.deadline:
            raise StoppedError("max_seconds reached. Run the task again to continue.")
        for run in self._with_parents():
            most = run.agent.max_cost
            if most is not None and run.cost >= most:
                spent = f"${run.cost:.4f} of ${most:g}"
                raise StoppedError(f"max_cost reached: {spent} spent. Run the task again to continue.")

    def _with_parents(self) -> "Iterator[AgentRun]":
        run: AgentRun | None = self
        while run is not None:
            yield run
            run = run.parent

    def _message_at(self, at: int) -> Said:
        """A stored message, as it was corrected."""
        event = self.inspect.event(at)
        assert isinstance(event, Said)
        corrected = self.inspect.state.corrected.get(at)
        return event if corrected is None else replace(event, message=self.inspect.message(corrected))

    async def notify(self, event: Callable[..., Any], **facts: Any) -> None:
        """Calls the callbacks. Their errors are logged and do not end the run."""
        common = {"agent": self.agent.name, "conversation": self.session.conversation, "step": self.steps}
        for callback in self.callbacks:
            try:
                returned = callback(event(**common, **facts))
                if isawaitable(returned):
                    await returned
            except Exception as error:
                getLogger("refold").warning(f"on_event failed at {event.__name__}: {error!r}", exc_info=error)
