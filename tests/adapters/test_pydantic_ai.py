"""Pydantic AI's own agent, with a scripted model, with and without refold."""

import pytest

pytest.importorskip("pydantic_ai")

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract import (
    CONFIG,
    MODEL,
    TASK,
    AdapterContract,
    CheckedModel,
    LedgerReader,
    Mask,
    Script,
    ScriptedCall,
    ScriptedReply,
    SentRequest,
    WindowExceeded,
    failing,
    ledger,
    seal,
    tool_declaration,
)
from pages import printed
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext, UsageLimits, capture_run_messages
from pydantic_ai.capabilities import AbstractCapability, ProcessHistory
from pydantic_ai.messages import (
    BinaryContent,
    CachePoint,
    ImageUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    NativeToolCallPart,
    NativeToolReturnPart,
    RetryFeedbackPart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage

import refold
from refold.adapters.pydantic_ai import HistoryPart, PydanticAIConverter, Refold
from refold.core.message import Media, Message, Reasoning, Text, ToolCall, ToolResult
from refold.session.history_sync import content_id
from refold.stores.store import open_store
from refold.testing.model import Reply as ModelReply

ANY = UsageLimits(request_limit=None)


def scripted(script: Script) -> FunctionModel:
    """A model that says what a script tells it to."""

    def ask(messages: list[ModelMessage], info: AgentInfo) -> ScriptedReply:
        tools = [
            tool_declaration(one.name, one.description, one.parameters_json_schema)
            for one in info.function_tools
        ]
        return script(SentRequest(chat(messages, info.instructions), tools))

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        reply = ask(messages, info)
        calls = [ToolCallPart(call.tool, call.arguments, call.id) for call in reply.calls]
        return ModelResponse([*([TextPart(reply.text)] if reply.text else []), *calls])

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        reply = ask(messages, info)
        words = reply.text.split(" ") if not reply.calls else []  # a text ends what is streamed
        for n, word in enumerate(words):
            yield f" {word}" if n else word
        for n, call in enumerate(reply.calls, 1):
            yield {n: DeltaToolCall(call.tool, json.dumps(call.arguments), tool_call_id=call.id)}

    return FunctionModel(answer, stream_function=stream, model_name=MODEL)


def chat(messages: list[ModelMessage], instructions: str | None = None) -> list[dict[str, Any]]:
    """As OpenAI's chat has them."""
    said: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for message in messages:
        if isinstance(message, ModelResponse):
            said.append(_answer(message))
            continue
        for part in message.parts:
            match part:
                case ToolReturnPart(tool_call_id=id):
                    said.append({"role": "tool", "tool_call_id": id, "content": part.model_response_str()})
                case SystemPromptPart(content=text):
                    said.append({"role": "system", "content": text})
                case UserPromptPart(content=str(text)):
                    said.append({"role": "user", "content": text})
                case _:
                    said.append({"role": "user", "content": str(part)})
    return said


def _answer(message: ModelResponse) -> dict[str, Any]:
    calls = [
        {"id": call.tool_call_id, "type": "function", "function": function}
        for call in message.tool_calls
        for function in [{"name": call.tool_name, "arguments": call.args_as_json_str()}]
    ]
    return {"role": "assistant", "content": message.text or None, **({"tool_calls": calls} if calls else {})}


def read_ledger(number: int) -> str:
    """Reads a ledger."""
    return ledger(number)


def fail(number: int) -> str:
    """Fails."""
    try:
        return failing(number)
    except ValueError as error:
        raise ModelRetry(str(error)) from error


class Masks(AbstractCapability[Any]):
    """Another capability, which changes what is sent."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
        request_context.messages = [*map(self._masked, request_context.messages)]
        return request_context

    def _masked(self, message: Any) -> Any:
        return replace(message, parts=[self._part(part) for part in message.parts])

    def _part(self, part: Any) -> Any:
        content = getattr(part, "content", None)
        return replace(part, content=self._mask(content)) if isinstance(content, str) else part


class PydanticAI:
    """A rig: threads are kept as people keep them, as JSON that the next run is given."""

    hooks = (Refold,)

    def __init__(self, folder: Path) -> None:
        self._folder, self.store = folder, f"sqlite:///{folder}/refold.db"

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
        agent = self.agent(thread, script, with_refold=with_refold, config=config, mask=mask)
        with capture_run_messages() as messages:
            try:
                return agent.run_sync(text, message_history=self._history(thread), usage_limits=ANY).output
            finally:
                self._file(thread).write_bytes(ModelMessagesTypeAdapter.dump_json(messages))

    def agent(
        self,
        thread: str,
        script: Script,
        *,
        with_refold: bool = True,
        config: Mapping[str, Any] = CONFIG,
        mask: Mask | None = None,
    ) -> Agent[None, str]:
        own = Refold(store=self.store, conversation=thread, model=MODEL, config=dict(config))
        capabilities = [*([Masks(mask)] if mask else []), *([own] if with_refold else [])]
        return Agent(scripted(script), tools=[read_ledger, fail], capabilities=capabilities)

    def again(self) -> "PydanticAI":
        return PydanticAI(self._folder)

    def stored(self, thread: str) -> list[tuple[str, str]]:
        said = chat(self._history(thread))
        return [(one["role"], one["content"] or "") for one in said]

    def raw(self, thread: str) -> list[bytes]:
        """But for what each request took, which is less with refold."""
        said = [
            replace(one, usage=RequestUsage()) if isinstance(one, ModelResponse) else one
            for one in self._history(thread)
        ]
        return [ModelMessagesTypeAdapter.dump_json([one]) for one in said]

    def _history(self, thread: str) -> list[ModelMessage]:
        file = self._file(thread)
        return ModelMessagesTypeAdapter.validate_json(file.read_bytes()) if file.exists() else []

    def _file(self, thread: str) -> Path:
        return self._folder / f"{thread}.json"


RIG = PydanticAI


class TestPydanticAI(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> PydanticAI:
        return PydanticAI(tmp_path)

    @pytest.mark.parametrize("how", ["run", "run_stream", "iter"])
    def test_it_works_however_it_is_run(self, rig: PydanticAI, how: str) -> None:
        doors = {name: CheckedModel(LedgerReader(30), task=TASK) for name in "xy"}

        async def both() -> list[str]:
            return await asyncio.gather(*(said(how, rig.agent(name, doors[name])) for name in "xy"))

        assert asyncio.run(both()) == [f"The seal is {seal(3)}."] * 2
        assert [door.faults for door in doors.values()] == [[], []]
        assert kept(rig.store, "x")[0] == ("user", TASK)
        assert kept(rig.store, "x")[-1] == ("assistant", f"The seal is {seal(3)}.")


async def said(how: str, agent: Agent[None, str]) -> str:
    match how:
        case "run":
            return (await agent.run(TASK, usage_limits=ANY)).output
        case "run_stream":
            async with agent.run_stream(TASK, usage_limits=ANY) as stream:
                return [text async for text in stream.stream_text()][-1]
    async with agent.iter(TASK, usage_limits=ANY) as run:
        async for _ in run:
            pass
    assert run.result is not None
    return run.result.output


def kept(store: str, conversation: str) -> list[tuple[str, str]]:
    with refold.open(conversation, store=store) as chat:
        return [(one.message.role, one.message.text) for one in chat.get_all()]


def names(store: str) -> list[str]:
    """All conversations."""
    return sorted(one.key.conversation for one in open_store(store).conversations())


def fitting(store: str, conversation: str | None = "t") -> Refold:
    return Refold(store=store, conversation=conversation, model=MODEL, config=CONFIG)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db"


def test_what_a_run_is_given_of_an_earlier_one_is_not_stored_twice(store: str) -> None:
    """Whether it is the same objects or went through JSON, and whatever the instructions say by then."""
    days = iter(["monday", "tuesday", "friday"])
    looks = ScriptedReply("", (ScriptedCall("call_1", "look", {"a": 1}),))
    door = CheckedModel(lambda request: ScriptedReply("Seen.") if request.results else looks)

    class Found(BaseModel):
        place: str
        numbers: tuple[int, ...]

    agent = Agent(scripted(door), system_prompt="You look.", capabilities=[fitting(store)])

    @agent.tool_plain(name="look")
    def _(a: int) -> Found:
        return Found(place="harbor", numbers=(1, 2))

    @agent.system_prompt(dynamic=True)
    def _() -> str:
        return f"It is {next(days)}."

    @agent.instructions
    def _(ctx: RunContext[None]) -> str:
        return f"Step {ctx.run_step}, run {ctx.run_id}."

    first = agent.run_sync("Where?")
    second = agent.run_sync("Sure?", message_history=first.all_messages())
    loaded = ModelMessagesTypeAdapter.validate_json(second.all_messages_json())
    agent.run_sync("Really?", message_history=loaded)
    found = '{"place":"harbor","numbers":[1,2]}'
    assert kept(store, "t") == [
        ("user", "Where?"),
        ("assistant", ""),
        ("tool", found),
        ("assistant", "Seen."),
        ("user", "Sure?"),
        ("assistant", "Seen."),
        ("user", "Really?"),
        ("assistant", "Seen."),
    ]
    assert names(store) == ["t"]
    system = [one["content"] for one in door.requests[-1].messages if one["role"] == "system"]
    assert system[1:] == ["You look.", "It is friday."]


def test_what_is_said_while_tools_run_is_not_stored_twice_where_the_framework_moves_it(store: str) -> None:
    """It stands between the results in the run that said it, and after them in all later ones."""
    calls = tuple(ScriptedCall(id, "look", {}) for id in ("c1", "c2"))
    door = CheckedModel(
        lambda request: ScriptedReply("Seen.") if request.results else ScriptedReply("", calls)
    )
    agent = Agent(scripted(door), capabilities=[fitting(store)])

    @agent.tool(name="look")
    def _(ctx: RunContext[None]) -> str:
        ctx.enqueue(f"By the way, {ctx.tool_call_id}.")
        return f"A harbor, {ctx.tool_call_id}."

    first = agent.run_sync("Look.").all_messages()
    agent.run_sync("Sure?", message_history=first)
    assert [text for _, text in kept(store, "t")][2:] == [
        *["A harbor, c1.", "A harbor, c2.", "By the way, c1.", "By the way, c2."],
        *["Seen.", "Sure?", "Seen."],
    ]
    assert names(store) == ["t"]
    assert door.faults == []


def test_a_run_belongs_to_the_conversation_that_the_framework_says(store: str) -> None:
    agent = Agent(scripted(lambda request: ScriptedReply("Yes.")), capabilities=[fitting(store, None)])
    first = agent.run_sync("One?", conversation_id="a")
    agent.run_sync("Other?", conversation_id="b")
    agent.run_sync("Two?", message_history=first.all_messages())
    assert [text for role, text in kept(store, "a") if role == "user"] == ["One?", "Two?"]
    assert [text for role, text in kept(store, "b") if role == "user"] == ["Other?"]


def test_a_run_that_goes_on_from_earlier_goes_on_in_a_conversation_of_its_own(store: str) -> None:
    door = CheckedModel(lambda request: ScriptedReply(f"You said {request.asked}"))
    agent = Agent(scripted(door), capabilities=[fitting(store)])
    first = agent.run_sync("one").all_messages()
    agent.run_sync("two", message_history=first)
    agent.run_sync("other", message_history=first)
    assert [one["content"] for one in door.requests[-1].messages] == ["one", "You said one", "other"]
    assert [text for _, text in kept(store, "t~1")] == ["one", "You said one", "other", "You said other"]


def test_images_and_what_refold_does_not_know_reach_the_model_as_they_were(store: str) -> None:
    image = BinaryContent(b"a harbor", media_type="image/png", vendor_metadata={"detail": "high"})
    prompt = ["What is this?", image, ImageUrl("https://example.org/a.png")]
    searched = [
        ThinkingPart("Hm.", signature="s", provider_name="p"),
        NativeToolCallPart("web_search", {"query": "harbors"}, "n1", provider_name="p"),
        NativeToolReturnPart("web_search", {"found": 3}, "n1", provider_name="p"),
    ]
    replies = [[*searched, ToolCallPart("photo", {}, "c1")], [TextPart("A harbor.")], [TextPart("Yes.")]]
    seen = list[list[ModelMessage]]()

    def sees(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(messages)
        return ModelResponse(replies.pop(0))

    def agent() -> Agent[None, str]:
        wide = {"models": {MODEL: {"window": 100_000}}}  # an image takes some
        made = Agent(
            FunctionModel(sees),
            capabilities=[Refold(store=store, conversation="t", model=MODEL, config=wide)],
        )
        made.tool_plain(name="photo")(lambda: ["Another.", image])
        return made

    first = agent().run_sync(prompt).all_messages()
    assert seen[1][0].parts[0].content == prompt
    assert list(seen[1][1].parts[:3]) == searched
    assert seen[1][2].parts[0].content == ["Another.", image]
    loaded = ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(first))
    agent().run_sync("Sure?", message_history=loaded)
    assert seen[2][:4] == loaded
    assert len(kept(store, "t")) == 6
    replies.append([TextPart("Yes!")])
    agent().run_sync("Really?")  # it is given nothing: all comes from the record
    plain = replace(image, vendor_metadata=None)
    assert seen[3][0].parts[0].content == ["What is this?", plain, prompt[2]]
    assert seen[3][2].parts[0].content == ["Another.", plain]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_sliding_window_loses_the_task_and_results_where_refold_does_not(store: str, at_once: int) -> None:
    """As people write it: the newest messages, whatever they belong to."""

    def newest(messages: list[ModelMessage]) -> list[ModelMessage]:
        return messages[-9:]

    def run(*capabilities: AbstractCapability[Any]) -> tuple[CheckedModel, list[ModelMessage]]:
        door = CheckedModel(LedgerReader(40 * at_once, at_once=at_once), task=TASK)
        agent = Agent(scripted(door), tools=[read_ledger], capabilities=capabilities)
        with capture_run_messages() as messages, contextlib.suppress(WindowExceeded):
            agent.run_sync(TASK, usage_limits=ANY)
        return door, messages

    door, messages = run(ProcessHistory(newest))
    assert "the task is gone" in door.faults
    assert sum(isinstance(one, ModelRequest) for one in newest(messages[:-1])) == 5
    assert len(door.requests[-1].results) == 4 * at_once  # the fifth lost its call, and was dropped
    assert len(messages) < 12  # and so has the run
    door, messages = run(fitting(store))
    assert door.faults == []
    assert len(messages) > 80
    door, messages = run(ProcessHistory(newest), fitting(store, "beside"))
    assert door.faults == []
    assert len(kept(store, "beside")) > 80


def test_a_task_is_not_lost_in_one_turn_of_many_calls(store: str) -> None:
    """The window of a capability that changes requests only, with refold before it or after it."""

    class Newest(AbstractCapability[Any]):
        async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
            request_context.messages = request_context.messages[-7:]
            return request_context

    def faults(*capabilities: AbstractCapability[Any]) -> list[str]:
        door = CheckedModel(LedgerReader(200), task=TASK)
        agent = Agent(scripted(door), tools=[read_ledger], capabilities=capabilities)
        agent.run_sync(TASK, usage_limits=ANY)
        return door.faults

    assert set(faults(Newest())) == {"the task is gone"}
    assert faults(Newest(), fitting(store, "after")) == []


def test_what_others_change_in_one_request_reaches_the_model_and_is_not_stored(store: str) -> None:
    class Minds(AbstractCapability[Any]):
        async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
            hidden = [self._hides(one) for one in request_context.messages]
            request_context.messages = [*hidden, ModelRequest([UserPromptPart("Be brief.")])]
            return request_context

        def _hides(self, message: ModelMessage) -> ModelMessage:
            parts = [
                replace(part, content="My number is ***.") if "4711" in str(part.content) else part
                for part in message.parts
                if isinstance(part, UserPromptPart)
            ]
            return replace(message, parts=parts) if parts else message

    door = CheckedModel(LedgerReader(20), task="My number is ***.")
    agent = Agent(scripted(door), tools=[read_ledger], capabilities=[fitting(store), Minds()])
    agent.run_sync("My number is 4711.", usage_limits=ANY)
    assert door.faults == []
    assert not any("4711" in request.text for request in door.requests)
    assert all(request.text.count("Be brief.") == 1 for request in door.requests)
    assert door.requests[-1].messages[-1]["content"] == "Be brief."
    assert [text for role, text in kept(store, "t") if role == "user"] == ["My number is 4711."]


def test_system_prompts_and_instructions_are_in_every_request_and_counted(store: str) -> None:
    long = "Mind the herring. " * 1_100
    door = CheckedModel(LedgerReader(40), task=long)
    said = {"system_prompt": long, "instructions": "Be exact."}
    agent = Agent(scripted(door), **said, tools=[read_ledger], capabilities=[fitting(store)])
    assert agent.run_sync(TASK, usage_limits=ANY).output == f"The seal is {seal(3)}."
    assert door.faults == []
    assert all(TASK in request.text and "Be exact." in request.text for request in door.requests)


def test_a_system_prompt_stays_when_the_message_that_had_it_is_hidden(store: str) -> None:
    """It came in the middle, with a question that was settled long ago."""
    door = CheckedModel(LedgerReader(30))
    agent = Agent(scripted(door), tools=[read_ledger], capabilities=[fitting(store)])
    history = agent.run_sync(TASK, usage_limits=ANY).all_messages()
    note = ModelRequest([SystemPromptPart("The ledgers are secret."), UserPromptPart("Mind it. " * 500)])
    noted = [*history, note, ModelResponse([TextPart("I do.")])]
    door = CheckedModel(LedgerReader(60), task="The ledgers are secret.")
    agent = Agent(scripted(door), tools=[read_ledger], capabilities=[fitting(store)])
    agent.run_sync("Read on, and tell me the seal of ledger 3.", message_history=noted, usage_limits=ANY)
    assert door.faults == []
    assert door.requests[-1].text.count("Mind it.") < 500


def test_a_run_without_a_question_is_answered_by_its_instructions(store: str) -> None:
    agent = Agent(
        scripted(CheckedModel(LedgerReader(30))), tools=[read_ledger], capabilities=[fitting(store)]
    )
    history = agent.run_sync(TASK, usage_limits=ANY).all_messages()
    seen = list[ModelMessage]()

    def leaves(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(messages[-1])
        return ModelResponse([TextPart(f"I {info.instructions}.")])

    leaving = Agent(FunctionModel(leaves), instructions="take my leave", capabilities=[fitting(store)])
    assert leaving.run_sync(message_history=history).output == "I take my leave."
    assert isinstance(seen[0], ModelRequest)
    assert kept(store, "t")[-2:] == [
        ("assistant", f"The seal is {seal(3)}."),
        ("assistant", "I take my leave."),
    ]


def test_output_that_is_asked_for_again_is_kept_like_all_else(store: str) -> None:
    replies = iter([ScriptedReply("No idea."), ScriptedReply("42")])
    agent = Agent(scripted(lambda request: next(replies)), capabilities=[fitting(store)])

    @agent.output_validator
    def _(text: str) -> str:
        if not text.isdigit():
            raise ModelRetry("a number, please")
        return text

    result = agent.run_sync("How many?")
    (feedback,) = result.all_messages()[2].parts
    assert isinstance(feedback, RetryFeedbackPart)
    told = feedback.model_response()
    assert [text for _, text in kept(store, "t")] == ["How many?", "No idea.", told, "42"]


def test_what_a_provider_says_that_a_request_took_is_kept(store: str) -> None:
    def says(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        took = RequestUsage(input_tokens=100, output_tokens=20, cache_read_tokens=10)
        return ModelResponse([TextPart("Yes.")], usage=took, provider_name="p")

    Agent(FunctionModel(says), capabilities=[fitting(store)]).run_sync("So?")
    Agent(scripted(lambda request: ScriptedReply("No.")), capabilities=[fitting(store, "made up")]).run_sync(
        "So?"
    )
    with refold.open("t", store=store) as chat:
        usage = chat.get_all()[-1].message.usage
    assert usage is not None
    assert (usage.input, usage.output, usage.cache_read) == (100, 20, 10)
    with refold.open("made up", store=store) as chat:
        assert chat.get_all()[-1].message.usage is None


def test_what_is_said_anew_is_like_the_original_but_for_its_words() -> None:
    thought = ThinkingPart("Hm.", signature="s", provider_name="p")
    call = ToolCallPart("look", '{"a": 1}', "c1", id="fc_1", provider_name="p")
    response = ModelResponse([thought, TextPart("A long story."), call], model_name="m")
    converter, given = PydanticAIConverter(), HistoryPart(response)
    message = converter.parse(given)
    assert message.parts == (Reasoning("Hm."), Text("A long story."), ToolCall("c1", "look", '{"a":1}'))
    short = converter.render(Message("assistant", (Text("A story."), message.calls[0])), given)
    assert short.message == replace(response, parts=[TextPart("A story."), call])
    cut = converter.render(Message("assistant", (ToolCall("c1", "look", "{}"),)), given)
    assert list(cut.message.parts) == [replace(call, args="{}")]
    assert list(response.parts) == [thought, TextPart("A long story."), call]
    assert converter.render(message, None).message.parts == [
        TextPart("A long story."),
        ToolCallPart("look", '{"a":1}', "c1"),
    ]


def test_results_and_prompts_said_anew_keep_what_goes_with_them() -> None:
    image = BinaryContent(b"a harbor", media_type="image/png", identifier="photo")
    returned = ToolReturnPart("look", ["A long story.", image], "c1", metadata={"own": 1}, outcome="failed")
    request = ModelRequest([returned, UserPromptPart(["See?", image])])
    converter = PydanticAIConverter()
    result, prompt = HistoryPart(request, returned), HistoryPart(request, request.parts[1], 1)
    photo = Media("image", data=image.base64, mime="image/png")
    assert converter.parse(result).parts == (
        ToolResult("c1", (Text("A long story."), photo), "look", is_error=True),
    )
    short = converter.render(Message("tool", (ToolResult("c1", "A story."),)), result)
    assert short == result._replace(part=replace(returned, content="A story."))
    assert converter.render(Message("user", (Text("S"), photo)), prompt).part.content == ["S", image]
    assert converter.render(Message("user", (Text("S"), photo)), prompt).part.content[1] is image
    alone = converter.render(Message("tool", (ToolResult("c1", "Gone.", "look", is_error=True),)), None)
    assert alone.message.parts == [
        replace(alone.message.parts[0], tool_name="look", content="Gone.", outcome="failed")
    ]


def test_things_are_known_by_what_they_say_not_by_how_they_are_written() -> None:
    def mark(part: Any) -> Any:
        return content_id([converter.parse(HistoryPart(ModelRequest([part]), part))])

    def call(args: Any) -> Any:
        response = ModelResponse([TextPart(""), ToolCallPart("look", args, "c1")])
        return content_id([converter.parse(HistoryPart(response))])

    converter = PydanticAIConverter()
    found = ToolReturnPart("look", {"a": (1, 2)}, "c1")
    assert mark(found) == mark(ToolReturnPart("look", '{"a":[1,2]}', "c1"))
    assert mark(found) != mark(ToolReturnPart("look", '{"a":[1,2]}', "c2"))
    assert mark(UserPromptPart("So?")) == mark(UserPromptPart(["So?", CachePoint()]))
    assert mark(UserPromptPart("So?")) != mark(UserPromptPart("So!"))
    assert call('{ "a": 1 }') == call({"a": 1}) != call('{"a"')


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    days = iter(["monday", "tuesday"])

    def script(request: Any) -> Any:
        day = next(days, None)
        return ModelReply(calls=(("read_log", {"day": day}),)) if day else "On Monday: the disk was full."

    assert printed("pydantic-ai.md", tmp_path, script).splitlines() == ["On Monday: the disk was full."] * 2
    assert len(kept(f"sqlite:///{tmp_path}/agent.db", "logs")) == 8


def test_what_others_hide_stays_hidden_when_it_is_shortened(store: str) -> None:
    class Hides(AbstractCapability[Any]):
        async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
            request_context.messages = [self._hidden(one) for one in request_context.messages]
            return request_context

        def _hidden(self, message: ModelMessage) -> ModelMessage:
            parts: list[Any] = [
                replace(part, content=part.content.replace("herring", "[fish]"))
                if isinstance(getattr(part, "content", None), str)
                else part
                for part in message.parts
            ]
            return replace(message, parts=parts)

    history = list[ModelMessage]()
    for question in (f"{TASK} I like herring.", "Which fish? Not herring?"):
        door = CheckedModel(LedgerReader(30))
        agent = Agent(scripted(door), tools=[read_ledger], capabilities=[Hides(), fitting(store)])
        result = agent.run_sync(question, message_history=history, usage_limits=ANY)
        history = result.all_messages()
        assert door.faults == []
        assert not any("herring" in request.text for request in door.requests)
        assert any("[refold #" in request.text for request in door.requests)
    assert names(store) == ["t"]
    assert next(text for role, text in kept(store, "t") if role == "tool") == ledger(1)
