"""Microsoft Agent Framework's own agent, with a scripted model, with and without refold."""

import pytest

pytest.importorskip("agent_framework")

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_framework import (
    EXCLUDED_KEY,
    Agent,
    AgentSession,
    BaseChatClient,
    CharacterEstimatorTokenizer,
    ChatMiddleware,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    ContextProvider,
    ContextWindowCompactionStrategy,
    FunctionInvocationLayer,
    HistoryProvider,
    InMemoryHistoryProvider,
    Message,
    ResponseStream,
    SlidingWindowStrategy,
    TruncationStrategy,
    apply_compaction,
    tool,
)
from agent_framework.observability import ChatTelemetryLayer
from contract import (
    CONFIG,
    MODEL,
    TASK,
    WINDOW,
    AdapterContract,
    CheckedModel,
    LedgerReader,
    Mask,
    Script,
    ScriptedCall,
    ScriptedReply,
    SentRequest,
    failing,
    ledger,
    seal,
    tool_declaration,
)
from pages import printed

import refold
from refold.adapters.agent_framework import RefoldCompaction, RefoldHistory, RunMiddleware
from refold.stores.memory import MemoryStore
from refold.testing.model import Reply as ModelReply

RULES = "\n".join(f"Rule {n}: barrels of herring are counted twice." for n in range(500))
"""Most of the window."""
LARGE = {"models": {MODEL: {"window": 100_000, "max_output": 500}}}


class Scripted(FunctionInvocationLayer, ChatMiddlewareLayer, ChatTelemetryLayer, BaseChatClient):
    """A model that says what a script tells it to, with the layers that the framework's own clients have."""

    def __init__(self, script: Script, **rest: Any) -> None:
        limits = {"max_iterations": 1_000, "include_detailed_errors": True}
        super().__init__(function_invocation_configuration=limits, **rest)
        self.model, self._script = MODEL, script

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **rest: Any
    ) -> Any:
        if stream:
            return ResponseStream(self._streamed(messages, options), finalizer=ChatResponse.from_updates)
        return self._answered(messages, options)

    async def _answered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatResponse:
        contents = self._said(messages, options)
        return ChatResponse(messages=[Message("assistant", contents)])

    async def _streamed(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Any:
        contents = self._said(messages, options)
        for content in contents:
            if content.type == "text" and content.text:
                for word in content.text.partition(" "):
                    yield ChatResponseUpdate(contents=[Content.from_text(word)], role="assistant")
            else:
                yield ChatResponseUpdate(contents=[content], role="assistant")

    def _said(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[Content]:
        system = options.get("instructions")
        sent = [{"role": "system", "content": system}] if system else []
        sent += [one for message in messages for one in chat(message)]
        tools = [
            tool_declaration(tool.name, tool.description, tool.parameters())
            for tool in options.get("tools") or ()
        ]
        reply: ScriptedReply = self._script(SentRequest(sent, tools))
        said = [Content.from_text(reply.text)] if reply.text else []
        return said + [
            Content.from_function_call(call.id, call.tool, arguments=json.dumps(call.arguments))
            for call in reply.calls
        ]


def chat(message: Message) -> list[dict[str, Any]]:
    """A message as OpenAI's chat has it."""
    results = [content for content in message.contents if content.type == "function_result"]
    if results:
        return [{"role": "tool", "tool_call_id": one.call_id, "content": one.result} for one in results]
    calls = [
        {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in message.contents
        if one.type == "function_call"
    ]
    images = [
        {"type": "image_url", "image_url": {"url": one.uri}}
        for one in message.contents
        if one.type in ("data", "uri")
    ]
    text: Any = message.text
    if images:
        text = [{"type": "text", "text": message.text}, *images]
    return [{"role": message.role, "content": text, **({"tool_calls": calls} if calls else {})}]


@tool
def read_ledger(number: int) -> str:
    """Reads a ledger."""
    return ledger(number)


@tool
def fail(number: int) -> str:
    """Fails."""
    return failing(number)


async def answer(agent: Agent, text: Any, session: AgentSession | None, stream: bool = False) -> str:
    if stream:
        run = agent.run(text, session=session, stream=True)
        return "".join([update.text async for update in run if update.role == "assistant"]) and (
            (await run.get_final_response()).messages[-1].text
        )
    return (await agent.run(text, session=session)).messages[-1].text


class Masks(ChatMiddleware):
    """Another middleware, which changes what is sent."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    async def process(self, context: Any, call_next: Any) -> None:
        context.messages = [
            Message(one.role, [*map(self._masked, one.contents)], message_id=one.message_id)
            for one in context.messages
        ]
        await call_next()

    def _masked(self, content: Content) -> Content:
        match content.type:
            case "text":
                return Content.from_text(self._mask(content.text or ""))
            case "function_result":
                return Content.from_function_result(content.call_id, result=self._mask(str(content.result)))
        return content


class AgentFramework:
    """A rig: sessions, with their messages in them, are kept in files."""

    hooks = (RefoldCompaction, RefoldHistory, RunMiddleware)
    stream = False

    def __init__(self, folder: Path) -> None:
        self._folder, self.store = folder, f"sqlite:///{folder}/refold.db"
        self._adapters: dict[str, RefoldCompaction] = {}

    def run(
        self,
        thread: str,
        text: str,
        script: Script,
        *,
        with_refold: bool = True,
        config: Mapping[str, Any] = CONFIG,
        mask: Mask | None = None,
    ) -> str:
        session = self._session(thread)
        layers = [Masks(mask)] if mask else []
        agent = self._agent(Scripted(script), self._adapter(config) if with_refold else None, layers)
        try:
            return asyncio.run(answer(agent, text, session, self.stream))
        finally:
            self._file(thread).write_text(json.dumps(session.to_dict()))

    def _agent(self, client: Scripted, adapter: RefoldCompaction | None, layers: list[Any]) -> Agent:
        providers = [*self._histories(), *([adapter] if adapter else [])]
        return Agent(
            client,
            tools=[read_ledger, fail],
            context_providers=providers,
            compaction_strategy=adapter,
            middleware=layers or None,
        )

    def _histories(self) -> list[HistoryProvider]:
        return [InMemoryHistoryProvider()]

    def _adapter(self, config: Mapping[str, Any]) -> RefoldCompaction:
        """One for all sessions."""
        known = self._adapters.get(repr(config))
        return known or self._adapters.setdefault(
            repr(config), RefoldCompaction(store=self.store, model=MODEL, config=dict(config))
        )

    def _file(self, thread: str) -> Path:
        return self._folder / f"{thread}.json"

    def _session(self, thread: str) -> AgentSession:
        file = self._file(thread)
        if file.exists():
            return AgentSession.from_dict(json.loads(file.read_text()))
        return AgentSession(session_id=thread)

    def again(self) -> "AgentFramework":
        return type(self)(self._folder)

    def stored(self, thread: str) -> list[tuple[str, str]]:
        return [pair for message in self._messages(thread) for pair in told(message)]

    def raw(self, thread: str) -> list[bytes]:
        return [json.dumps(message.to_dict()).encode() for message in self._messages(thread)]

    def _messages(self, thread: str) -> list[Message]:
        return list(self._session(thread).state["in_memory"]["messages"])


def told(message: Message) -> list[tuple[str, str]]:
    """Role and text; results that came together are one message each, as they are in the record."""
    results = [content.result for content in message.contents if content.type == "function_result"]
    return [("tool", str(result)) for result in results] or [(message.role, message.text)]


RIG = AgentFramework


class TestRun(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> AgentFramework:
        return AgentFramework(tmp_path)


class Streamed(AgentFramework):
    stream = True


class TestStream(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> AgentFramework:
        return Streamed(tmp_path)


class Recorded(AgentFramework):
    """A rig whose sessions are empty: their messages are in the record."""

    def _histories(self) -> list[HistoryProvider]:
        return [RefoldHistory(store=self.store)]

    def _session(self, thread: str) -> AgentSession:
        return AgentSession(session_id=thread)

    def _messages(self, thread: str) -> list[Message]:
        return asyncio.run(RefoldHistory(store=self.store).get_messages(thread))


class TestHistory(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> AgentFramework:
        return Recorded(tmp_path)


# As a strategy alone


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/refold.db"


def alone(store: str, script: Script, **rest: Any) -> Agent:
    strategy = RefoldCompaction(store=store, conversation="alone", model=MODEL, config=CONFIG)
    tools = [read_ledger, fail, *strategy.tools()]
    return Agent(Scripted(script), tools=tools, compaction_strategy=strategy, **rest)


def record(store: str, conversation: str) -> list[tuple[str, str]]:
    with refold.open(conversation, store=store) as chat:
        return [(one.message.role, one.message.text) for one in chat.get_all()]


def ask(agent: Agent, *texts: Any, session: AgentSession | None = None, stream: bool = False) -> list[str]:
    async def run() -> list[str]:
        return [await answer(agent, text, session, stream) for text in texts]

    return asyncio.run(run())


def kept(session: AgentSession) -> list[tuple[str, str]]:
    return [pair for message in session.state["in_memory"]["messages"] for pair in told(message)]


@pytest.mark.parametrize("stream", [False, True])
def test_as_a_strategy_alone_it_fits_a_long_loop(store: str, stream: bool) -> None:
    door, session = CheckedModel(LedgerReader(), task=TASK), AgentSession()
    assert ask(alone(store, door), TASK, session=session, stream=stream) == [f"The seal is {seal(3)}."]
    assert len(door.requests) > 200
    assert door.faults == []
    assert kept(session)[:-1] == record(store, "alone")
    assert "refold" not in json.dumps(session.to_dict()["state"]["in_memory"]).replace("refold_search", "")


def test_as_a_strategy_alone_it_hears_the_last_answer_when_the_next_run_begins(store: str) -> None:
    session, agent = AgentSession(), alone(store, CheckedModel(LedgerReader(3)))
    ask(agent, TASK, "Thank you.", session=session)
    assert record(store, "alone") == kept(session)[:-1]
    assert ("assistant", f"The seal is {seal(3)}.") in record(store, "alone")


def test_as_a_strategy_alone_it_asks_for_a_conversation(store: str) -> None:
    agent = Agent(Scripted(CheckedModel(LedgerReader(2))), compaction_strategy=RefoldCompaction(store=store))
    with pytest.raises(refold.RefoldError, match="conversation=…"):
        ask(agent, TASK)


def test_as_a_strategy_alone_it_knows_again_what_it_left_out(store: str) -> None:
    @tool
    def read_all() -> str:
        """Reads everything, which is more than the window holds."""
        return "\n".join(map(ledger, range(1, 31)))

    steps = iter([*(ScriptedCall(f"call_{n}", "read_all", {}) for n in range(6)), None])

    def script(request: SentRequest) -> ScriptedReply:
        call = next(steps)
        return ScriptedReply("", (call,)) if call else ScriptedReply("Done.")

    door, session = CheckedModel(script, task=TASK), AgentSession()
    strategy = RefoldCompaction(store=store, conversation="alone", model=MODEL, config=CONFIG)
    agent = Agent(Scripted(door), tools=[read_all, *strategy.tools()], compaction_strategy=strategy)
    assert ask(agent, TASK, session=session) == ["Done."]
    assert door.faults == []
    assert record(store, "alone") == kept(session)[:-1]


def loop(steps: int) -> list[Message]:
    said = [Message("user", [TASK])]
    for n in range(1, steps + 1):
        call = Content.from_function_call(f"call_{n}", "read_ledger", arguments=f'{{"number": {n}}}')
        result = Content.from_function_result(f"call_{n}", result=ledger(n))
        said += [Message("assistant", [f"Now ledger {n}.", call]), Message("tool", [result])]
    return said


def sent(messages: list[Message], strategy: RefoldCompaction) -> list[Message]:
    return asyncio.run(apply_compaction(messages, strategy=strategy))


def test_as_a_strategy_alone_it_leaves_the_list_whole_and_shows_what_was_restored(
    store: str,
) -> None:
    strategy = RefoldCompaction(store=store, conversation="alone", model=MODEL, config=CONFIG)
    given = loop(40)
    messages = list(given)
    assert ledger(3) not in [text for one in sent(messages, strategy) for _, text in told(one)]
    left = [one for one in messages if one.additional_properties[EXCLUDED_KEY]]
    assert ledger(3) in [text for one in left for _, text in told(one)]
    assert not any(one.additional_properties[EXCLUDED_KEY] for one in given)
    with refold.open("alone", store=store) as chat:
        chat.restore(next(one.at for one in chat.get_all() if one.message.text == ledger(3)))
    assert ledger(3) in [text for one in sent(messages, strategy) for _, text in told(one)]


def test_a_result_that_came_late_is_sent_once_and_after_its_call(store: str) -> None:
    strategy = RefoldCompaction(store=store, conversation="alone", model=MODEL, config=CONFIG)
    said = loop(40)
    for n in (2, 20, 60):
        said.insert(n, Message("user", [f"Wait, {n}."]))
    messages = list(said)
    door = CheckedModel(lambda request: ScriptedReply(), task=TASK)
    for steps in (41, 42, 43):
        door(SentRequest([one for message in sent(messages, strategy) for one in chat(message)]))
        messages += loop(steps)[-2:]
        said += loop(steps)[-2:]
    assert door.faults == []
    assert record(store, "alone") == [pair for message in said[:-2] for pair in told(message)]


def test_as_a_context_provider_alone_it_does_everything(store: str) -> None:
    adapter = RefoldCompaction(store=store, model=MODEL, config=CONFIG)
    door, session = CheckedModel(LedgerReader(60, wanted=1), task=TASK), AgentSession()
    agent = Agent(Scripted(door), tools=[read_ledger], context_providers=[adapter])
    assert ask(agent, TASK, session=session) == [f"The seal is {seal(1)}."]
    assert door.faults == []
    assert record(store, session.session_id) == kept(session)


def test_a_client_may_have_the_strategy(store: str) -> None:
    adapter = RefoldCompaction(store=store, model=MODEL, config=CONFIG)
    door, session = CheckedModel(LedgerReader(40), task=TASK), AgentSession()
    client = Scripted(door, compaction_strategy=adapter)
    agent = Agent(client, tools=[read_ledger], context_providers=[adapter])
    assert ask(agent, TASK, session=session) == [f"The seal is {seal(3)}."]
    assert door.faults == []
    assert record(store, session.session_id) == kept(session)


def test_tools_that_the_agent_has_already_are_not_offered_twice(store: str) -> None:
    adapter = RefoldCompaction(store=store, model=MODEL, config=CONFIG)
    door = CheckedModel(LedgerReader(1, wanted=1))
    agent = Agent(Scripted(door), tools=[read_ledger, *adapter.tools()], context_providers=[adapter])
    ask(agent, TASK)
    assert sorted(door.requests[0].tools) == ["read_ledger", "refold_expand", "refold_search"]


# Faults of the framework's own strategies


OWN = [
    SlidingWindowStrategy(keep_last_groups=12),
    TruncationStrategy(max_n=7_000, compact_to=5_000, tokenizer=CharacterEstimatorTokenizer()),
    ContextWindowCompactionStrategy(max_context_window_tokens=WINDOW, max_output_tokens=500),
]


def test_the_task_that_other_strategies_lose_in_one_long_turn_is_there(store: str) -> None:
    for strategy in OWN:
        door = CheckedModel(LedgerReader(), task=TASK, window=2 * WINDOW)  # they count otherwise
        agent = Agent(Scripted(door), tools=[read_ledger], compaction_strategy=strategy)
        assert ask(agent, TASK, session=AgentSession()) == ["I do not know any more."]
        assert "the task is gone" in door.faults
    door = CheckedModel(LedgerReader(), task=TASK)
    assert ask(alone(store, door), TASK, session=AgentSession()) == [f"The seal is {seal(3)}."]
    assert door.faults == []


# What is said, and what is not


def provided(store: str, script: Script, *providers: Any, tools: Sequence[Any] = (), **rest: Any) -> Agent:
    adapter = RefoldCompaction(store=store, model=MODEL, config=CONFIG)
    given = {"tools": [read_ledger, *tools], "context_providers": [*providers, adapter], **rest}
    return Agent(Scripted(script), **given)


def lines(store: str, conversation: str) -> list[str]:
    return [f"{role}: {text}" for role, text in record(store, conversation)]


def test_instructions_and_tools_have_room(store: str) -> None:
    door, session = CheckedModel(LedgerReader(40), task=TASK), AgentSession()
    assert ask(provided(store, door, instructions=RULES), TASK, session=session) == [
        f"The seal is {seal(3)}."
    ]
    assert door.faults == []
    assert all(request.messages[0]["content"] == RULES for request in door.requests)


def test_images_pass_through(store: str) -> None:
    pixel = Content.from_data(b"\x89PNG\r\n\x1a\n", "image/png")
    linked = Content.from_uri("https://example.org/herring.jpg", media_type="image/jpeg")
    door, session = CheckedModel(LedgerReader(3)), AgentSession()
    agent = provided(store, door)
    ask(agent, Message("user", ["What is this? " + TASK, pixel, linked]), session=session)
    urls = [part["image_url"]["url"] for part in door.requests[-1].messages[0]["content"][1:]]
    assert urls == [pixel.uri, linked.uri]
    with refold.open(session.session_id, store=store) as chat:
        assert [part.url for part in chat.get_all()[0].message.parts[1:]] == urls


def test_an_image_that_a_tool_shows_reaches_the_model(store: str) -> None:
    @tool
    def look() -> list[Content]:
        """Looks."""
        return [Content.from_text("A herring."), Content.from_data(b"\x89PNG\r\n\x1a\n", "image/png")]

    seen = list[Any]()

    class Watched(Scripted):
        def _said(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[Content]:
            seen.extend(item.type for one in messages[-1].contents for item in one.items or ())
            return super()._said(messages, options)

    replies = iter([ScriptedReply("", (ScriptedCall("call_1", "look", {}),)), ScriptedReply("A herring.")])
    adapter = RefoldCompaction(store=store, conversation="looks", model=MODEL, config=LARGE)
    client = Watched(CheckedModel(lambda request: next(replies)))
    ask(Agent(client, tools=[look], context_providers=[adapter]), "Look.")
    assert seen == ["text", "data"]
    with refold.open("looks", store=store) as chat:
        (result,) = chat.get_all()[2].message.results
    assert [type(part).__name__ for part in result.output] == ["Text", "Media"]


def test_messages_are_known_again_by_their_ids(store: str) -> None:
    session, door = AgentSession(session_id="ids"), CheckedModel(lambda request: ScriptedReply("Yes."))
    agent = provided(store, door)
    ask(agent, Message("user", ["Is it so?"], message_id="mine"), session=session)
    session.state["in_memory"]["messages"][0].contents[0].text = "Is it not so?"
    ask(agent, Message("user", ["Is it so?"], message_id="another"), session=session)
    assert [one["content"] for one in door.requests[1].messages] == ["Is it not so?", "Yes.", "Is it so?"]
    assert lines(store, "ids") == ["user: Is it so?", "assistant: Yes.", "user: Is it so?", "assistant: Yes."]
    with refold.open("ids", store=store) as chat:
        assert [one.message.id for one in chat.get_all()][::2] == ["mine", "another"]


def test_ids_that_the_framework_counts_are_not_taken_for_names(store: str) -> None:
    """Each run here begins a list of its own, and so the first message is msg_0 in both."""
    door = CheckedModel(lambda request: ScriptedReply("Yes."))
    ask(alone(store, door), "One.", "Two.")
    assert lines(store, "alone") == ["user: One.", "user: Two."]
    assert [one["content"] for one in door.requests[1].messages] == ["One.", "Two."]


def test_a_history_that_was_cut_short_is_not_stored_again(store: str) -> None:
    session, door = AgentSession(session_id="cut"), CheckedModel(LedgerReader(6))
    agent = provided(store, door)
    ask(agent, TASK, session=session)
    before = record(store, "cut")
    session.state["in_memory"]["messages"] = session.state["in_memory"]["messages"][-3:]
    ask(agent, "And the seal of ledger 3?", session=session)
    assert record(store, "cut")[: len(before)] == before
    assert record(store, "cut")[len(before)] == ("user", "And the seal of ledger 3?")
    assert TASK in door.requests[-1].text
    assert door.faults == []


def test_a_history_whose_end_was_changed_goes_on_from_there(store: str) -> None:
    session, door = (
        AgentSession(session_id="edited"),
        CheckedModel(lambda request: ScriptedReply(f"To {request.asked}")),
    )
    agent = provided(store, door)
    ask(agent, "One.", "Two.", session=session)
    del session.state["in_memory"]["messages"][2:]
    ask(agent, "Three.", session=session)
    assert [one["content"] for one in door.requests[-1].messages] == ["One.", "To One.", "Three."]
    assert lines(store, "edited")[-2:] == ["user: Two.", "assistant: To Two."]
    assert lines(store, "edited~1")[-2:] == ["user: Three.", "assistant: To Three."]


class Almanac(ContextProvider):
    """Lends a message to every run, which is not a part of the conversation."""

    def __init__(self) -> None:
        super().__init__("almanac")
        self.days = 0

    async def before_run(self, *, context: Any, **rest: Any) -> None:
        self.days += 1
        context.extend_messages(self, [Message("user", [f"It is day {self.days}.\n{RULES}"])])


def test_what_is_lent_to_a_run_is_shown_and_not_stored(store: str) -> None:
    session, door = AgentSession(session_id="lent"), CheckedModel(LedgerReader(30))
    agent = provided(store, door, Almanac())
    assert ask(agent, TASK, "Thank you.", session=session)[0] == f"The seal is {seal(3)}."
    assert all("It is day 1." in request.text for request in door.requests[:-1])
    assert "It is day 2." in door.requests[-1].text
    assert "It is day 1." not in door.requests[-1].text
    assert record(store, "lent") == kept(session)
    assert door.faults == []


def test_another_strategy_is_left_alone_and_the_run_is_kept(store: str) -> None:
    session, door = AgentSession(session_id="other"), CheckedModel(LedgerReader(12, wanted=12))
    agent = provided(store, door, compaction_strategy=SlidingWindowStrategy(keep_last_groups=2))
    ask(agent, TASK, session=session)
    assert max(len(request.messages) for request in door.requests) == 4
    assert record(store, "other") == kept(session)


def test_a_run_without_a_session_is_a_conversation_of_its_own(store: str) -> None:
    door = CheckedModel(lambda request: ScriptedReply(f"To {request.asked}"))
    ask(provided(store, door), "One.", "Two.")
    assert [len(request.messages) for request in door.requests] == [1, 1]


class Hosted(Scripted):
    """A model whose service keeps the history."""

    STORES_BY_DEFAULT = True

    async def _answered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatResponse:
        response = await super()._answered(messages, options)
        response.conversation_id = "conv_1"
        return response


def test_a_history_at_the_service_is_recorded_and_passed_on_unchanged(store: str) -> None:
    sent = list[list[str]]()
    replies = iter(
        [
            ScriptedReply("", (ScriptedCall("call_1", "read_ledger", {"number": 1}),)),
            ScriptedReply("Read."),
            ScriptedReply("Yes."),
        ]
    )

    def script(request: SentRequest) -> ScriptedReply:
        sent.append([one["role"] for one in request.messages])
        return next(replies)

    adapter = RefoldCompaction(store=store, model=MODEL, config=CONFIG)
    agent = Agent(
        Hosted(script), tools=[read_ledger], context_providers=[adapter], compaction_strategy=adapter
    )
    session = AgentSession(session_id="hosted")
    ask(agent, "Read ledger 1.", "Done?", session=session)
    assert sent == [["user"], ["tool"], ["user"]]
    said = ["Read ledger 1.", "", ledger(1), "Read.", "Done?", "Yes."]
    assert [text for _, text in record(store, "hosted")] == said


def test_as_a_strategy_alone_it_passes_on_what_answers_calls_that_only_the_service_has(store: str) -> None:
    replies = iter(
        [ScriptedReply("", (ScriptedCall("call_1", "read_ledger", {"number": 1}),)), ScriptedReply("Read.")]
    )
    door = CheckedModel(lambda request: next(replies))
    strategy = RefoldCompaction(store=store, conversation="c", model=MODEL, config=CONFIG)
    agent = Agent(Hosted(door), tools=[read_ledger], compaction_strategy=strategy)
    assert ask(agent, "Read ledger 1.", session=AgentSession()) == ["Read."]
    assert door.requests[1].messages == [{"role": "tool", "tool_call_id": "call_1", "content": ledger(1)}]


@pytest.mark.parametrize("in_record", [False, True])
def test_a_history_that_is_loaded_at_every_call_is_fitted_too(store: str, in_record: bool) -> None:
    session, door = AgentSession(session_id="calls"), CheckedModel(LedgerReader(40), task=TASK)
    histories = [RefoldHistory(store=store)] if in_record else []
    agent = provided(store, door, *histories, require_per_service_call_history_persistence=True)
    assert ask(agent, TASK, "Thank you.", session=session)[0] == f"The seal is {seal(3)}."
    assert door.faults == []
    said = [text for _, text in record(store, "calls")]
    assert len(said) == 2 * len(door.requests)  # two questions, and two answers without a result
    assert [text for text in said if text.startswith("Ledger")][:40] == [ledger(n) for n in range(1, 41)]


@pytest.mark.parametrize("in_record", [False, True])
def test_a_call_that_needs_approval_waits_for_it(store: str, in_record: bool) -> None:
    @tool(approval_mode="always_require")
    def burn(number: int) -> str:
        """Burns a ledger."""
        return f"Ledger {number} is ash."

    session = AgentSession(session_id="approved")
    replies = iter(
        [
            ScriptedReply("", (ScriptedCall("call_1", "burn", {"number": 1}),)),
            ScriptedReply("Burnt."),
            ScriptedReply("Gone."),
        ]
    )
    door = CheckedModel(lambda request: next(replies))
    agent = provided(store, door, *([RefoldHistory(store=store)] if in_record else []), tools=[burn])

    async def run() -> None:
        asked = await agent.run("Burn ledger 1.", session=session)
        (request,) = asked.user_input_requests
        await agent.run(Message("user", [request.to_function_approval_response(True)]), session=session)
        await agent.run("Is it gone?", session=session)

    asyncio.run(run())
    assert door.faults == []
    assert door.requests[1].results == door.requests[2].results == ["Ledger 1 is ash."]
    said = ["Burn ledger 1.", "", "Ledger 1 is ash.", "Burnt.", "Is it gone?", "Gone."]
    assert [text for _, text in record(store, "approved")] == said


# A history in the record


def rich() -> list[Message]:
    thought = Content.from_text_reasoning(id="rs_1", text="Hm.", protected_data="c2VjcmV0")
    call = Content.from_function_call("call_1", "read_ledger", arguments={"number": 1}, id="occurrence-1")
    twin = Content.from_function_call(
        "call_2", "fail", arguments='{"number": 2}', additional_properties={"fc": 7}
    )
    result = Content.from_function_result("call_1", result=ledger(1), id="occurrence-1")
    image = [Content.from_text("See:"), Content.from_data(b"\x89PNG\r\n\x1a\n", "image/png")]
    failed = Content.from_function_result("call_2", result=image, exception="ValueError")
    return [
        Message(
            "user", ["Hello", Content.from_uri("https://example.org/a.pdf", media_type="application/pdf")]
        ),
        Message("assistant", [thought, "Well.", call, twin], message_id="resp_1", author_name="Clerk"),
        Message("tool", [result, failed], additional_properties={"took": 3}),
        Message("assistant", [Content.from_hosted_file("file_1"), "Done."]),
        Message(
            "user", ["Hello", Content.from_uri("https://example.org/a.pdf", media_type="application/pdf")]
        ),
        Message("user", ["Again"], message_id="twice"),
        Message("user", ["Again"], message_id="twice"),
    ]


def test_a_history_gives_back_what_it_was_given(store: str) -> None:
    async def saved() -> list[Message]:
        history = RefoldHistory(store=store)
        await history.save_messages("s", rich()[:3])
        await history.save_messages("s", rich()[3:])
        return await RefoldHistory(store=store).get_messages("s")

    assert [message.to_dict() for message in asyncio.run(saved())] == [
        message.to_dict() for message in rich()
    ]


def test_histories_of_sessions_do_not_mix(store: str) -> None:
    async def saved() -> list[list[Message]]:
        history = RefoldHistory(store=store)
        await history.save_messages("a", [Message("user", ["Hello"])])
        await history.save_messages("b", [Message("user", ["Hello"]), Message("assistant", ["Hi"])])
        return [await history.get_messages(session) for session in "abc"]

    assert [[one.text for one in said] for said in asyncio.run(saved())] == [["Hello"], ["Hello", "Hi"], []]


def test_without_a_strategy_a_history_gives_the_agent_everything(store: str) -> None:
    door = CheckedModel(LedgerReader(3))
    agent = Agent(Scripted(door), tools=[read_ledger], context_providers=[RefoldHistory(store=store)])
    ask(agent, TASK, "And again?", session=AgentSession(session_id="plain"))
    assert [one["role"] for one in door.requests[-1].messages] == [
        role for role, _ in record(store, "plain")
    ][:-1]
    assert door.requests[-1].results == [ledger(n) for n in (1, 2, 3)]


class Listening(Scripted):
    """A model that notes whose words it was shown."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.authors: list[list[str | None]] = []

    def _said(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[Content]:
        self.authors.append([message.author_name for message in messages])
        return super()._said(messages, options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_history_names_who_answered_and_requests_are_as_without_refold(store: str, stream: bool) -> None:
    def asked(*providers: ContextProvider) -> tuple[list[list[str | None]], list[str | None]]:
        client = Listening(CheckedModel(LedgerReader(3, wanted=None), window=100_000))
        agent = Agent(client, name="Clerk", tools=[read_ledger], context_providers=providers)
        session = AgentSession(session_id="named")
        prefilled = [Message("user", [TASK]), Message("assistant", ["I begin."])]
        ask(agent, prefilled, "Thank you.", session=session, stream=stream)
        kept = asyncio.run(providers[0].get_messages("named", state=session.state.get("in_memory")))
        return client.authors, [message.author_name for message in kept]

    fitting = RefoldCompaction(store=store, model=MODEL, config=LARGE)
    shown, named = asked(RefoldHistory(store=store), fitting)
    assert (shown, named) == asked(InMemoryHistoryProvider())
    assert named == [None, None, *["Clerk"] * 7, None, "Clerk"]


# The page


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("agent_framework_openai")
    days = iter(["monday", "tuesday"])

    def script(request: Any) -> Any:
        day = next(days, None)
        return ModelReply(calls=(("read_log", {"day": day}),)) if day else "On Monday: the disk was full."

    assert printed("agent-framework.md", tmp_path, script).strip() == "On Monday: the disk was full."
    assert [role for role, _ in record(f"sqlite:///{tmp_path}/agent.db", "logs")] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]


def test_a_history_reads_what_is_new_and_gives_out_copies() -> None:
    class Watched(MemoryStore):
        entries = 0

        def read(self, *asked: Any, **more: Any) -> Any:
            for link in super().read(*asked, **more):
                self.entries += 1
                yield link

    async def run() -> list[int]:
        watched, read = Watched(), list[int]()
        history = RefoldHistory(store=watched)
        for n in range(20):
            await history.save_messages("s", [Message("user", [f"word {n}"])], state={"had": n})
            before = watched.entries
            found = await history.get_messages("s")
            read.append(watched.entries - before)
            assert [one.text for one in found] == [f"word {k}" for k in range(n + 1)]
            found[0].contents.clear()
            found[0].additional_properties["own"] = 1
        return read

    read = asyncio.run(run())
    assert max(read[2:]) == read[2]


def test_what_another_middleware_hides_stays_hidden_and_is_not_stored_again_when_the_run_ends(
    store: str,
) -> None:
    class Hides(ChatMiddleware):
        async def process(self, context: Any, call_next: Any) -> None:
            context.messages = [
                Message(one.role, [*map(self._hidden, one.contents)]) for one in context.messages
            ]
            await call_next()

        def _hidden(self, content: Content) -> Content:
            if content.type != "function_result":
                return content
            return Content.from_function_result(
                content.call_id, result=str(content.result).replace("herring", "[fish]")
            )

    session, fitting = AgentSession(session_id="s"), RefoldCompaction(store=store, model=MODEL, config=CONFIG)
    for _ in range(2):
        door = CheckedModel(LedgerReader(3), task=TASK)  # it ends with what is hidden
        agent = Agent(
            Scripted(door),
            tools=[read_ledger],
            context_providers=[InMemoryHistoryProvider(), fitting],
            middleware=[Hides()],
        )
        asyncio.run(agent.run(TASK, session=session))
        assert not any("herring" in request.text for request in door.requests)
    with refold.open("s", store=store) as chat:
        said = [one.message.text for one in chat.get_all() if one.message.role == "tool"]
        assert [row.key.conversation for row in chat.store.conversations()] == ["s"]
    assert sum(text.startswith("Ledger 2,") for text in said) == 2


@pytest.mark.parametrize("in_record", [False, True])
def test_answers_that_another_middleware_masks_are_known_again_in_every_run(
    store: str, in_record: bool
) -> None:
    steps = iter(["read", "The first is herring.", "read", "The second is herring.", "Herring it is."])

    def script(request: SentRequest) -> ScriptedReply:
        step = next(steps)
        call = ScriptedCall(f"call_{len(door.requests)}", "read_ledger", {"number": 1})
        return ScriptedReply("", (call,)) if step == "read" else ScriptedReply(step)

    door, session = CheckedModel(script), AgentSession(session_id="masked")
    history = RefoldHistory(store=store) if in_record else InMemoryHistoryProvider()
    agent = provided(store, door, history, middleware=[Masks(lambda text: text.replace("herring", "[fish]"))])
    ask(agent, "One.", "Two.", "Three.", session=session)
    assert not any("herring" in request.text for request in door.requests)
    assert [one["content"] for one in door.requests[-1].messages if one["content"].startswith("The ")] == [
        "The first is [fish].",
        "The second is [fish].",
    ]
    assert [text for role, text in record(store, "masked") if role == "assistant" and text] == [
        "The first is herring.",
        "The second is herring.",
        "Herring it is.",
    ]
    with refold.open("masked", store=store) as chat:
        assert [row.key.conversation for row in chat.store.conversations()] == ["masked"]
