"""For Pydantic AI: `Agent(model, capabilities=[Refold(store=…, conversation=…)])`.

Without a name, the conversation is the one that the run belongs to, as its message history tells.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby, zip_longest
from operator import attrgetter, is_
from typing import Any

from pydantic_ai import AgentRunResult, FunctionToolset, RunContext, Tool
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, SystemPromptPart
from pydantic_ai.models import ModelRequestContext

from refold.adapters.align import standing
from refold.adapters.conversation import Ask, Talks, tools
from refold.adapters.pydantic_ai_messages import SAID, Saying, Words, is_result, saying, to_json
from refold.adapters.synced_history import Otherwise
from refold.config.config import Source
from refold.stores.store import Store

IS_LATE = hasattr(AbstractCapability, "prepare_model_request")
"""From 2.66 on, there is a hook that comes after those of others, when the model is known for certain."""


class Refold(AbstractCapability[Any]):
    """Fits every call of the model; the run's own messages stay as they are."""

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        conversation: str | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        self._conversation = conversation
        self._talks = Talks(Words(), store=store, model=model, config=config, agent=agent)
        self._before: Asked | None = None
        """What the model was asked last in this run."""

    async def for_run(self, ctx: RunContext[Any]) -> "Refold":
        return copy(self)

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        return request_context if IS_LATE else await self.prepare_model_request(ctx, request_context)

    async def prepare_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        asked = self._before = Asked(ctx.messages, request_context.messages, self._before)
        shown = await self._talks.afit(self._name(ctx), asked.said, _ask(request_context, asked))
        request_context.messages = asked.joined(shown)
        return request_context

    async def after_run(self, ctx: RunContext[Any], *, result: AgentRunResult[Any]) -> AgentRunResult[Any]:
        """Keeps the last answer, which no call of the model comes after."""
        said = Asked(result.all_messages(), before=self._before).said
        await asyncio.to_thread(self._talks.keep, self._name(ctx), said)
        return result

    def get_toolset(self) -> FunctionToolset[Any]:
        return FunctionToolset([self._tool(one) for one in tools()])

    def _tool(self, about: dict[str, Any]) -> Tool[Any]:
        async def run(ctx: RunContext[Any], **arguments: Any) -> str:
            return await self._talks.acall(self._name(ctx), about["name"], arguments)

        return Tool.from_schema(run, about["name"], about["description"], about["parameters"], takes_ctx=True)

    def _name(self, ctx: RunContext[Any]) -> str:
        return str(self._conversation or ctx.conversation_id or ctx.run_id)


def _ask(request: ModelRequestContext, asked: "Asked") -> Ask:
    """What the request has beside the history."""
    about = request.model_request_parameters
    added = Asked([message for messages in asked.added.values() for message in messages])
    standing = [part for parts in (*asked.standing.values(), *added.standing.values()) for part in parts]
    system = [part.content for part in about.instruction_parts or ()]
    system += [part.content for part in standing if isinstance(part, SystemPromptPart)]
    system += [Words().read(saying).text for saying in added.sayings]
    system += [to_json(about.output_object.json_schema)] if about.output_object else []
    declared = [
        {"name": one.name, "description": one.description or "", "parameters": one.parameters_json_schema}
        for one in (*about.function_tools, *about.output_tools)
    ]
    return Ask(
        "\n\n".join(system) or None,
        [{"type": "function", "function": one} for one in declared],
        request.model.model_name,
        (request.model_settings or {}).get("max_tokens"),
    )


class Asked:
    """The history, taken apart, and what other capabilities made of it for one request."""

    def __init__(
        self,
        history: Sequence[ModelMessage],
        request: Sequence[ModelMessage] | None = None,
        before: "Asked | None" = None,
    ) -> None:
        self._history = list(history)
        self.sayings: list[Saying] = []
        self.standing: dict[int, list[Any]] = {}
        """Parts that go along, by the message that has them."""
        self.added: dict[int, Sequence[ModelMessage]] = {}
        """What was put before a message of the history, or after all."""
        self._instead: dict[int, ModelMessage] = {}
        """What stands for a message of the history."""
        self._is_whole = request is None or _same(self._history, request)
        if request is not None and not self._is_whole:
            self._compare(request)
        elif request is None and before:  # what was asked last was asked in these words
            self._instead = {n: one for n, one in before._instead.items() if before._is_of(n, self._history)}
        known = self._go_on(before) if before else 0
        begun = len(self.sayings)
        for n, message in enumerate(self._history[known:], known):
            self._take(n, message)
        if before:  # the very same, where it says the same
            for n, (one, two) in enumerate(
                zip(self.sayings[begun:], before.sayings[begun:], strict=False), begun
            ):
                self.sayings[n] = two if one == two else one

    def _is_of(self, n: int, history: Sequence[ModelMessage]) -> bool:
        return n < len(history) and self._history[n] is history[n]

    def _go_on(self, before: "Asked") -> int:
        """Takes over what was there before, but for the newest, which others may have added to meanwhile."""
        known = len(before._history) - 1
        if not _same(before._history[:known], self._history[:known]):
            return 0
        one, two = before._instead, self._instead
        known = min([known, *(n for n in {*one, *two} if one.get(n) is not two.get(n))])
        self.sayings = before.sayings[: bisect_left(before.sayings, known, key=attrgetter("n"))]
        self.standing = {n: parts for n, parts in before.standing.items() if n < known}
        return known

    def _take(self, n: int, message: ModelMessage) -> None:
        """Results come first, as the framework itself has them from the next run on."""
        shown = self._instead.get(n, message)
        if isinstance(shown, ModelResponse):
            own = saying(message, None, n) if shown is not message else None
            self.sayings += [saying(shown, None, n)._replace(own=own)] if shown.parts else []
            return
        said, is_alike = list[Saying](), len(shown.parts) == len(message.parts)
        for place, (part, known) in enumerate(zip_longest(shown.parts, message.parts[: len(shown.parts)])):
            if part.part_kind in SAID:
                own = saying(message, known, n, place) if is_alike and known is not part else None
                said.append(saying(shown, part, n, place)._replace(own=own))
            elif getattr(part, "scope", None) != "request" or n == len(self._history) - 1:
                self.standing.setdefault(n, []).append(part)
        self.sayings += sorted(said, key=lambda one: not is_result(one.part))

    @property
    def said(self) -> list[Saying | Otherwise[Saying]]:
        return [one if one.own is None else Otherwise(one.own, one) for one in self.sayings]

    def _compare(self, request: Sequence[ModelMessage]) -> None:
        """What was taken away is not missed: all that is known is made to fit."""
        stand = standing([*map(id, self._history)], [*map(id, request)])
        due = len(self._history)
        for n in range(len(request) - 1, -1, -1):
            at = stand.get(n)
            if at is None or type(request[n]) is not type(self._history[at]):
                self.added[due] = [request[n], *self.added.get(due, ())]
                continue
            due = at
            if request[n] is not self._history[at]:
                self._instead[at] = request[n]

    def joined(self, shown: Sequence[Saying]) -> list[ModelMessage]:
        """Messages again: the very same, where all of one is shown as it is."""
        if self._is_whole and _same(shown, self.sayings):
            return [*self._history]
        messages, due = list[ModelMessage](), 0
        for n, group in groupby(shown, attrgetter("n")):
            if n is None:
                messages += [one.whole for one in group]
                continue
            messages += self._beside(due, n)
            messages.append(self._message(n, list(group)))
            due = max(due, n + 1)
        return [*messages, *self._beside(due, len(self._history))]

    def _beside(self, due: int, n: int) -> Iterator[ModelMessage]:
        """What goes along with messages that are not shown, up to the one at `n`, or was put between them."""
        last = len(self._history) - 1
        for hidden in range(due, n):
            yield from self.added.get(hidden, ())
            if hidden == last and not (self.sayings and self.sayings[-1].n == last):
                yield self._instead.get(last, self._history[last])  # it says nothing, and is to be answered
            elif hidden in self.standing:
                yield ModelRequest(self.standing[hidden])
        if due <= n:
            yield from self.added.get(n, ())

    def _message(self, n: int, sayings: Sequence[Saying]) -> Any:
        whole: Any = self._instead.get(n, self._history[n])
        if isinstance(whole, ModelResponse):
            return sayings[0].whole
        shown, given = {one.place: one.part for one in sayings}, whole.parts
        kept = [at for at, part in enumerate(given) if at in shown or part.part_kind not in SAID]
        parts = [shown.get(at, given[at]) for at in kept]
        return whole if _same(parts, given) else replace(whole, parts=parts)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
