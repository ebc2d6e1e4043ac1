"""For Microsoft's Agent Framework: `Agent(client, context_providers=[refold], compaction_strategy=refold)`.

The session is the conversation, unless one is named. As a compaction strategy alone, `RefoldCompaction` sees
nothing but messages: it must be told the conversation, and hears a run's last answer when the next begins.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, takewhile
from threading import Lock
from typing import Any

from agent_framework import (
    EXCLUDE_REASON_KEY,
    EXCLUDED_KEY,
    ChatContext,
    ChatMiddleware,
    ContextProvider,
    FunctionInvocationContext,
    FunctionTool,
    HistoryProvider,
    SessionContext,
)
from agent_framework import Message as Given

from refold.adapters.agent_framework_messages import REFOLD, Words, says, told
from refold.adapters.conversation import WARM, Ask, Talks, tools
from refold.adapters.synced_history import Otherwise
from refold.adapters.synced_history import shown as as_shown
from refold.config.config import Source
from refold.core.draft import PART
from refold.core.errors import RefoldError
from refold.core.pairing import with_original_ids
from refold.stores.store import Store

LOCAL = "agent_framework_local_history_persistence"
"""The id of conversations whose history the framework itself loads at each call of the model."""
UNNAMED = "UnnamedAgent"
"""What the framework calls the author of an answer when the agent has no name."""


class RefoldCompaction(ContextProvider):
    """Fits every call of the model; the session's messages stay as they are. Serves many sessions at once."""

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        conversation: str | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        super().__init__(REFOLD)
        self._words = Words()
        self._talks = Talks(self._words, store=store, model=model, config=config, agent=agent)
        self._conversation = conversation
        self._tools = [self._tool(one) for one in tools()]
        self._offered: list[dict[str, Any]] = []

    def tools(self) -> list[FunctionTool]:
        """Expand and search, for agents that have it as a strategy only."""
        self._offered = [tool.to_json_schema_spec() for tool in self._tools]
        return list(self._tools)

    async def __call__(self, messages: list[Given]) -> bool:
        """As a strategy only: what is not shown stays in the list, since the next call gets it again."""
        whole = [message for message in messages if REFOLD not in message.additional_properties]
        name, (said, ask) = _name(self._conversation, None), self._said(Ask(tools=self._offered), whole)
        if not said:
            return False
        shown = await self._talks.afit(name, said, ask)
        messages[:] = _placed(whole, said, shown, _left_out)
        return shown != said

    async def before_run(self, *, agent: Any, session: Any, context: Any, state: dict[str, Any]) -> None:
        is_loaded = not getattr(agent, "require_per_service_call_history_persistence", False)
        author = getattr(agent, "name", None) or UNNAMED
        name = _name(self._conversation, session.session_id)
        run = _Run(self, name, author, context, is_loaded=is_loaded)
        context.metadata[self.source_id] = run
        context.extend_middleware(self.source_id, run)
        context.extend_tools(self.source_id, self._tools)

    async def after_run(self, *, agent: Any, session: Any, context: Any, state: dict[str, Any]) -> None:
        """Keeps the last answer, which no call of the model comes after."""
        run, answers = context.metadata[self.source_id], context.response.messages if context.response else []
        await asyncio.to_thread(run.keep, context.input_messages, answers)

    def _said(self, ask: Ask, whole: Sequence[Given]) -> tuple[list[Given], Ask]:
        """What was said, of all that is about to be sent; the rest belongs to what is asked."""
        histories = {kind.__name__ for kind in _kinds(HistoryProvider)}
        said, beside = list[Given](), list[Given]()
        for message in whole:
            (said if _is_said(message, histories) else beside).append(message)
        if all(message.role == "tool" for message in said):  # the rest is at the model's service
            return [], ask
        lent = [message.text for message in beside if not _is_out(message)]
        system = "\n".join(filter(None, [ask.system, *lent]))
        return said, ask._replace(system=system or None)

    def _tool(self, about: dict[str, Any]) -> FunctionTool:
        name = about["name"]

        async def run(ctx: FunctionInvocationContext, **arguments: Any) -> str:
            conversation = _name(self._conversation, ctx.session.session_id if ctx.session else None)
            return await self._talks.acall(conversation, name, arguments)

        return FunctionTool(
            name=name, description=about["description"], func=run, input_model=about["parameters"]
        )


class _Run(ChatMiddleware):
    """One run of an agent: it knows, before each call of the model, all that will be asked for."""

    def __init__(
        self, refold: RefoldCompaction, name: str, author: str, begun: SessionContext, *, is_loaded: bool
    ) -> None:
        """Whether the history `is_loaded`, before the run, or at each call of the model."""
        self._refold, self._name, self._author, self._is_loaded = refold, name, author, is_loaded
        self._begun = begun
        self._own: list[Given] = []
        self._seen: list[Given | Otherwise[Given]] = []

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        by_client = getattr(context.client, "compaction_strategy", None)
        strategy = context.kwargs.get("compaction_strategy") or by_client
        if strategy is None or isinstance(strategy, RefoldCompaction):
            fit = _as_it_is if _is_at_service(context) else partial(self._fit, _ask(context))
            context.kwargs["compaction_strategy"] = fit
            if self._is_loaded and by_client is None:  # it can be done here, where it takes less time
                context.kwargs["compaction_strategy"] = None
                context.messages = messages = list(context.messages)
                await fit(messages)
        await call_next()

    async def _fit(self, ask: Ask, messages: list[Given]) -> bool:
        """The list is for this call alone: what is not shown need not stay in it."""
        if self._seen and self._is_loaded:  # else all is known, or is saved without a name
            self._sign(messages)
        said, ask = self._refold._said(ask, messages)
        if not said:
            return False
        self._seen = await asyncio.to_thread(self._known, messages, said)
        shown = await self._refold._talks.afit(self._name, self._seen, ask)
        if shown != said:
            messages[:] = shown if len(said) == len(messages) else _placed(messages, said, shown)
        return shown != said

    def _sign(self, messages: Sequence[Given]) -> None:
        """What was answered comes last, and is stored before the framework names who answered."""
        authors = self._refold._words.authors

        def is_new(one: Given) -> bool:
            return one.role in ("assistant", "tool") and one not in authors

        for one in takewhile(is_new, reversed(messages)):
            authors[one] = self._author

    def _known(self, messages: Sequence[Given], said: Sequence[Given]) -> list[Given | Otherwise[Given]]:
        """What others say otherwise in a request may be known as the session has it: last answers are."""
        if not self._seen:
            whole = self._begun.get_messages(include_input=True)
            self._own = whole if len(whole) == len(messages) else []  # else it is not told which is which
        own = {id(two): one for one, two in zip(self._own, messages, strict=False) if _is_otherwise(one, two)}
        if not own:
            return [*said]
        talk = self._refold._talks.talk(self._name)

        def known(one: Given) -> Given | Otherwise[Given]:
            mine = own.get(id(one), one)
            return Otherwise(mine, one) if talk.knows(mine) and not talk.knows(one) else one

        return [*map(known, said)]

    def keep(self, asked: Sequence[Given], answers: Sequence[Given]) -> None:
        """What came after the last call of the model, or all that was said where none was fitted."""
        talks = self._refold._talks
        if not self._seen:
            known, new = Recorded(talks).messages(self._name), [*asked, *answers]
        else:
            last = _known_by(as_shown(self._seen[-1]))
            old = max((n for n, message in enumerate(answers, 1) if _known_by(message) == last), default=0)
            known, new = self._seen, [*answers[old:]]
        talks.keep(self._name, [*known, *filter(says, new)])


def _known_by(message: Given) -> Hashable:
    """Calls and results by their ids: others may have said them otherwise in the request."""
    ids = tuple((one.type, one.call_id) for one in message.contents if one.call_id)
    return ids or Words().mark(message)


def _is_otherwise(one: Given, two: Given) -> bool:
    return one.role == two.role and [*map(id, one.contents)] != [*map(id, two.contents)]


class RefoldHistory(HistoryProvider):
    """Keeps a session's messages in the record, not in the session: its id is all it takes to go on."""

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        conversation: str | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        super().__init__(f"{REFOLD}_history")
        self._talks = Talks(Words(), store=store, model=model, config=config, agent=agent)
        self._recorded = Recorded(self._talks)
        self._conversation = conversation

    async def get_messages(self, session_id: str | None, *, state: Any = None, **rest: Any) -> list[Given]:
        """All of them, as they were saved: what the model is shown of them is for the strategy to say."""
        found = await asyncio.to_thread(self._recorded.messages, _name(self._conversation, session_id))
        if state is not None:
            state["had"] = len(found)
        return found

    async def save_messages(
        self, session_id: str | None, messages: Sequence[Given], *, state: Any = None, **rest: Any
    ) -> None:
        """Those that the strategy kept while the run went on are not kept twice."""
        name, had = _name(self._conversation, session_id), (state or {}).get("had")

        def keep() -> None:
            known = self._recorded.messages(name)[:had]
            self._talks.keep(name, [*known, *filter(says, messages)])

        await asyncio.to_thread(keep)


def _name(conversation: str | None, session: str | None) -> str:
    name = conversation or session
    if name is None:
        raise RefoldError("Which conversation? Say conversation=…, or put it in context_providers too")
    return name


class Recorded:
    """All that the framework gave, as it gave it; what was read before is not read again."""

    def __init__(self, talks: Talks[Given]) -> None:
        self._talks, self._lock = talks, Lock()
        self._read: OrderedDict[str, tuple[object, int, list[Given]]] = OrderedDict()
        """By the conversation: the view of it as it was then, how much was read, and what came of it."""

    def messages(self, name: str) -> list[Given]:
        session = self._talks.talk(name).session
        with self._lock:
            count, live = session.get_count(), session.record.live
            before, start, known = self._read.pop(name, (live, 0, []))
            if before is not live:  # erased, or gone on with in a branch
                start, known = 0, []
            said = (
                [with_original_ids(one.message) for one in session.get_range(start, count)]
                if start < count
                else []
            )
            parts = groupby((one for one in said if one.id), lambda one: str(one.id).partition(PART)[0])
            known += [told([*group]) for _, group in parts]
            self._read[name] = (live, count, known)
            if len(self._read) > WARM:
                self._read.popitem(last=False)
            return [_marked(one, {}) for one in known]


# What is about to be sent


def _ask(context: ChatContext) -> Ask:
    options = context.options or {}
    instructions = options.get("instructions") or ()
    offered = options.get("tools") or ()
    return Ask(
        instructions if isinstance(instructions, str) else "\n".join(map(str, instructions)),
        [tool.to_json_schema_spec() for tool in offered if isinstance(tool, FunctionTool)],
        options.get("model") or getattr(context.client, "model", None),
        options.get("max_tokens"),
    )


async def _as_it_is(messages: list[Given]) -> bool:
    return False


def _is_at_service(context: ChatContext) -> bool:
    """The history is kept by the model's service: what is sent is only what is new."""
    id = (context.options or {}).get("conversation_id") or context.kwargs.get("conversation_id")
    return bool(id and id != LOCAL) or bool(context.session and context.session.service_session_id)


def _is_said(message: Given, histories: set[str]) -> bool:
    """Not left out by others, and not lent for one run by what is no history, such as a memory."""
    about = message.additional_properties
    source = about.get("_attribution")
    is_lent = isinstance(source, dict) and source.get("source_type") not in histories
    return not is_lent and says(message) and (not about.get(EXCLUDED_KEY) or _is_left_out(message))


def _kinds(one: type[Any]) -> Iterator[type[Any]]:
    for kind in one.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _is_out(message: Given) -> bool:
    return bool(message.additional_properties.get(EXCLUDED_KEY))


def _is_left_out(message: Given) -> bool:
    """Here, and not by others."""
    return bool(message.additional_properties.get(EXCLUDE_REASON_KEY) == REFOLD)


def _placed(
    whole: Sequence[Given],
    said: Iterable[Given],
    shown: Iterable[Given],
    instead: Callable[[Given], Given] | None = None,
) -> list[Given]:
    """What is shown, in its order among what was never said; with something `instead` of what is left out."""
    places, known = {id(message): n for n, message in enumerate(whole)}, {id(message) for message in said}
    placed, done = list[Given](), 0

    def until(end: int) -> list[Given]:
        between = [one for one in whole[done:end] if instead or id(one) not in known]
        return [instead(one) if instead and id(one) in known else one for one in between]

    for message in shown:
        place = places.get(id(message), -1)
        if place >= done:
            placed += [*until(place), _put_back(message)]
            done = place + 1
        else:
            placed.append(_marked(message, {REFOLD: True}))
    return placed + until(len(whole))


def _left_out(message: Given) -> Given:
    out = {EXCLUDED_KEY: True, EXCLUDE_REASON_KEY: REFOLD}
    return message if _is_left_out(message) else _marked(message, out)


def _put_back(message: Given) -> Given:
    back = {EXCLUDED_KEY: False, EXCLUDE_REASON_KEY: None}
    return _marked(message, back) if _is_left_out(message) else message


def _marked(message: Given, marks: dict[str, Any]) -> Given:
    """A copy: the session may have the message itself."""
    new = object.__new__(type(message))
    new.__dict__ |= message.__dict__
    new.contents = list(message.contents)
    new.additional_properties = {**message.additional_properties, **marks}
    return new
