"""OpenAI's Agents SDK itself, with a scripted model, with and without refold."""

import pytest

pytest.importorskip("agents")

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    Model,
    ModelResponse,
    ModelSettings,
    OpenAIResponsesCompactionSession,
    RunConfig,
    Runner,
    Session,
    SessionSettings,
    SQLiteSession,
    ToolOutputImage,
    Usage,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.extensions import ToolOutputTrimmer, handoff_filters
from agents.models.chatcmpl_converter import Converter
from agents.run_config import ModelInputData
from contract import (
    CONFIG,
    ENDLESS,
    MODEL,
    STEPS,
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
    WindowExceeded,
    failing,
    ledger,
    seal,
    tool_declaration,
)
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from pages import program

import refold
from refold.adapters.openai_agents import RefoldSession
from refold.adapters.openai_agents_items import ItemHistory
from refold.core.errors import OverBudgetError
from refold.dialects.rules.request import Facts
from refold.dialects.rules.targets import RULES
from refold.testing.model import Reply as ModelReply
from refold.testing.model import ScriptedModel

set_tracing_disabled(True)
PIXEL = "data:image/png;base64,aGVsbG8="
IMAGE = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}


class Scripted(Model):
    """A model that says what a script tells it to, and may think before it calls a tool."""

    def __init__(self, script: Script, *, thinks: bool = False) -> None:
        self.script, self.model, self.thinks = script, MODEL, thinks
        self.inputs: list[list[Any]] = []

    async def get_response(
        self, system_instructions: Any, input: Any, model_settings: Any, tools: Any, *args: Any, **rest: Any
    ) -> ModelResponse:
        return ModelResponse(self._output(system_instructions, input, tools), Usage(), None)

    async def stream_response(
        self, system_instructions: Any, input: Any, model_settings: Any, tools: Any, *args: Any, **rest: Any
    ) -> Any:
        facts: dict[str, Any] = {"id": "resp_1", "created_at": 0.0, "model": MODEL, "object": "response"}
        facts |= {"tools": [], "parallel_tool_calls": True, "tool_choice": "auto"}
        response = Response(output=self._output(system_instructions, input, tools), **facts)
        yield ResponseCompletedEvent(response=response, sequence_number=0, type="response.completed")

    def _output(self, system: str | None, input: list[Any], tools: list[Any]) -> list[Any]:
        self.inputs.append(input)
        messages = [dict(one) for one in Converter.items_to_messages(input)]
        own = [{"role": "system", "content": system}] if system else []
        offered = [tool_declaration(tool.name, tool.description, tool.params_json_schema) for tool in tools]
        reply = self.script(SentRequest([*own, *messages], offered))
        n = uuid4()
        text = ResponseOutputText(text=reply.text, type="output_text", annotations=[])
        rest: dict[str, Any] = {"content": [text], "role": "assistant", "status": "completed"}
        said = [ResponseOutputMessage(id=f"msg_{n}", type="message", **rest)] if reply.text else []
        thought = [ResponseReasoningItem(id=f"rs_{n}", summary=[], type="reasoning")] if self.thinks else []
        return [*thought, *said, *(_call(f"fc_{n}_{k}", call) for k, call in enumerate(reply.calls))]

    @property
    def faults(self) -> list[str]:
        """What OpenAI would refuse of the items that came."""
        found = list[str]()
        for items in self.inputs:
            judge = RULES["openai-responses"](Facts())
            judge.feed([_sent(item) for item in items])
            found += [f"{fault.rule}: {fault.message}" for fault in judge.violations]
        return found


def _sent(item: Any) -> Any:
    """What the SDK's model for Responses makes of an item."""
    return {key: value for key, value in item.items() if (key, value) != ("id", "__fake_id__")}


def _call(id: str, call: ScriptedCall) -> ResponseFunctionToolCall:
    arguments = json.dumps(call.arguments)
    rest: dict[str, Any] = {"call_id": call.id, "name": call.tool, "arguments": arguments}
    return ResponseFunctionToolCall(id=id, type="function_call", **rest)


@function_tool
def read_ledger(number: int) -> str:
    """Reads a ledger."""
    return ledger(number)


@function_tool(failure_error_function=lambda context, error: str(error))
def fail(number: int) -> str:
    """Fails."""
    return failing(number)


def masks(mask: Mask) -> Any:
    """Another filter, which changes what is sent."""

    def masked(value: Any) -> Any:
        match value:
            case {"text": str(text)}:
                return {**value, "text": mask(text)}
            case {"output": str(text)}:
                return {**value, "output": mask(text)}
            case {"content": str(text)}:
                return {**value, "content": mask(text)}
            case {"content": list(parts)}:
                return {**value, "content": [*map(masked, parts)]}
        return value

    return lambda data: ModelInputData([*map(masked, data.model_data.input)], data.model_data.instructions)


class Agents:
    """A rig: threads are kept by refold's session, or else by the SDK's own."""

    hooks = (RefoldSession, ItemHistory)

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
        session: Any = self.session(thread, config) if with_refold else self.bare(thread)
        own = session.tools() if with_refold else []
        agent = Agent("reader", tools=[read_ledger, fail, *own], model=Scripted(script))
        filters = {"call_model_input_filter": masks(mask)} if mask else {}
        config = session.run_config(**filters) if with_refold else RunConfig(**filters)
        run = Runner.run(agent, text, session=session, max_turns=None, run_config=config)
        return str(asyncio.run(run).final_output)

    def session(self, thread: str, config: Mapping[str, Any] = CONFIG) -> RefoldSession:
        return RefoldSession(thread, store=self.store, model=MODEL, config=dict(config))

    def bare(self, thread: str) -> SQLiteSession:
        return SQLiteSession(thread, self._folder / "bare.db")

    def again(self) -> "Agents":
        return Agents(self._folder)

    def stored(self, thread: str) -> list[tuple[str, str]]:
        said = list[tuple[str, str]]()
        for item in asyncio.run(self.session(thread).get_items()):
            goes_on = item.get("type") == "function_call" and said and said[-1][0] == "assistant"
            said += [] if goes_on else [(_role(item), _text(item))]
        return said

    def raw(self, thread: str) -> list[bytes]:
        kept = asyncio.run(self.bare(thread).get_items()) or _items(self.session(thread))
        return [json.dumps(item).encode() for item in kept]


def _role(item: Any) -> str:
    return "tool" if item.get("type") == "function_call_output" else item.get("role", "assistant")


def _text(item: Any) -> str:
    content = item.get("output", item.get("content", ""))
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


RIG = Agents


class TestOpenAIAgents(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Agents:
        return Agents(tmp_path)


@pytest.fixture
def threads(tmp_path: Path) -> Agents:
    return Agents(tmp_path)


def _agent(session: RefoldSession, model: Model, **rest: Any) -> Agent[Any]:
    return Agent("reader", tools=[read_ledger, *session.tools()], model=model, **rest)


def _run(session: RefoldSession, agent: Agent[Any], text: Any = TASK, **rest: Any) -> str:
    run = Runner.run(agent, text, session=session, run_config=session.run_config(**rest), max_turns=None)
    return str(asyncio.run(run).final_output)


def _items(session: RefoldSession, limit: int | None = None) -> list[Any]:
    return asyncio.run(session.get_items(limit))


# Ways to run it


def test_a_stream_fits_and_what_it_asked_is_stored_once(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(40), task=TASK)
    model = Scripted(door)

    async def run() -> str:
        config = session.run_config()
        agent = _agent(session, model)
        result = Runner.run_streamed(agent, TASK, session=session, run_config=config, max_turns=None)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    assert asyncio.run(run()) == f"The seal is {seal(3)}."
    assert door.faults == model.faults == []
    assert [text for role, text in threads.stored("t") if role == "user"] == [TASK]


def test_a_second_stream_shows_its_question_before_the_sdk_adds_it(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(30), task=TASK)
    _run(session, _agent(session, Scripted(door)))
    second = CheckedModel(lambda request: ScriptedReply(f"You asked: {request.asked}"), task=TASK)

    async def run() -> None:
        for _ in range(2):  # the same words again are said again
            agent, config = _agent(session, Scripted(second)), session.run_config()
            async for _ in Runner.run_streamed(
                agent, "And?", session=session, run_config=config
            ).stream_events():
                pass

    asyncio.run(run())
    assert second.faults == []
    assert [request.asked for request in second.requests] == ["And?", "And?"]
    assert threads.stored("t")[-4:] == [("user", "And?"), ("assistant", "You asked: And?")] * 2


def test_it_runs_without_a_loop_of_ones_own(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(30), task=TASK)
    agent, config = _agent(session, Scripted(door)), session.run_config()
    said = Runner.run_sync(agent, TASK, session=session, run_config=config, max_turns=None)
    assert said.final_output == f"The seal is {seal(3)}."
    assert door.faults == []


def test_a_guardrail_beside_the_first_call_changes_nothing(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(30), task=TASK)

    def allow(*args: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    agent = _agent(session, Scripted(door), input_guardrails=[InputGuardrail(allow)])
    assert _run(session, agent) == f"The seal is {seal(3)}."
    assert door.faults == []


def test_system_text_tools_and_the_answer_asked_for_have_their_room(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(30), task=TASK)
    rules = "Be careful with herring. " * 300
    settings = ModelSettings(max_tokens=450)
    agent = _agent(session, Scripted(door), instructions=rules, model_settings=settings)
    assert _run(session, agent) == f"The seal is {seal(3)}."
    assert door.faults == []
    assert max(map(door.tokens, door.requests)) <= WINDOW - 450
    assert all(request.messages[0] == {"role": "system", "content": rules} for request in door.requests)


def test_what_cannot_fit_is_said_so_and_the_question_is_kept(threads: Agents) -> None:
    session = threads.session("t")
    with pytest.raises(OverBudgetError):
        _run(session, _agent(session, Scripted(CheckedModel(LedgerReader(1)))), "word " * 20_000)
    assert len(_items(session)) == 1


# What is stored

ODD: list[Any] = [
    {"role": "user", "content": "Grüße \U0001f41f \ud83d", "type": "message"},
    {"content": [{"text": "Look.", "type": "input_text"}, IMAGE], "role": "user"},
    {"summary": [], "id": "rs_1", "type": "reasoning", "encrypted_content": "secret"},
    {
        "action": {"type": "search", "query": "x"},
        "id": "ws_1",
        "status": "completed",
        "type": "web_search_call",
    },
    {
        "_agents_tool_description": "Reads.",
        "id": "__fake_id__",
        "arguments": '{ "n": 1 }',
        "call_id": "c1",
        "_agents_tool_title": "Read",
        "name": "read",
        "type": "function_call",
    },
    {"arguments": "{}", "call_id": "c2", "name": "read", "type": "function_call", "id": "c2"},
    {
        "call_id": "c1",
        "output": "one",
        "type": "function_call_output",
        "unheard_of": {"b": 1, "a": [1.5, None]},
    },
    {"call_id": "c2", "output": [{"text": "two", "type": "input_text"}], "type": "function_call_output"},
    {"type": "hosted_by_somebody", "made_up": True},
    {
        "id": "__fake_id__",
        "content": [{"annotations": [], "text": "Done.", "type": "output_text"}],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    },
    {"role": "assistant", "content": "Done."},
]


@pytest.mark.parametrize("at_once", [1, 3, len(ODD)])
def test_items_come_back_byte_for_byte(threads: Agents, at_once: int) -> None:
    session = threads.session("t")
    for n in range(0, len(ODD), at_once):
        asyncio.run(session.add_items(ODD[n : n + at_once]))
    for one in (session, threads.again().session("t")):
        assert json.dumps(_items(one)) == json.dumps(ODD)
        assert [_items(one, limit) for limit in (0, 2, 99)] == [[], ODD[-2:], ODD]
    session.session_settings = SessionSettings(limit=3)
    assert _items(session) == ODD[-3:]
    assert _items(session, 4) == ODD[-4:]


def test_it_is_a_session_and_nobody_can_change_what_it_has(threads: Agents) -> None:
    session = threads.session("t")
    assert isinstance(session, Session)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    asyncio.run(session.add_items(items))
    _items(session)[0]["content"][0]["text"] = "ho"
    assert _items(session) == items


def test_what_has_an_id_is_stored_once_in_a_turn_and_what_has_none_each_time(threads: Agents) -> None:
    session = threads.session("t")
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "read", "arguments": "{}"}
    asked = {"role": "user", "content": "again"}
    made_up = {"id": "__fake_id__", "type": "message", "role": "assistant", "content": "Hm."}
    for items in ([asked], [asked], [call], [call, made_up], [made_up]):
        asyncio.run(session.add_items(items))
    assert _items(session) == [asked, asked, call, made_up, made_up]


def test_notes_and_ids_that_no_api_takes_are_not_sent(threads: Agents) -> None:
    session, model = threads.session("t"), Scripted(CheckedModel(lambda request: ScriptedReply("Well.")))
    hosted = (
        "hosted_by_somebody",
        "web_search_call",
    )  # which chat completions, here the script's, do not have
    asyncio.run(session.add_items([item for item in ODD if item.get("type") not in hosted]))
    _run(session, _agent(session, model), "So?")
    assert model.faults == []
    assert "_agents_" not in json.dumps(model.inputs)
    assert IMAGE in model.inputs[0][1]["content"]


def test_what_others_append_is_there_too(threads: Agents) -> None:
    session = threads.session("t")
    asyncio.run(session.add_items([{"role": "user", "content": "hi"}]))
    assert len(_items(session)) == 1
    with refold.open("t", store=threads.store) as chat:
        chat.append({"role": "assistant", "content": [{"type": "text", "text": "ho"}]}, dialect="openai-chat")
    assert _items(session)[-1] == {"role": "assistant", "content": "ho"}
    door = CheckedModel(lambda request: ScriptedReply("Well."))
    _run(session, _agent(session, Scripted(door)), "So?")
    assert [one["content"] for one in door.requests[0].messages] == ["hi", "ho", "So?"]


def test_images_of_users_and_tools_reach_the_model_as_they_were(threads: Agents) -> None:
    @function_tool
    def look() -> ToolOutputImage:
        """Looks out of the window."""
        return ToolOutputImage(image_url=PIXEL)

    replies = iter([ScriptedReply("", (ScriptedCall("c1", "look", {}),)), ScriptedReply("A harbor.")])
    wide = {"models": {MODEL: {"window": 50_000, "max_output": 500}}}
    session, model = threads.session("t", wide), Scripted(lambda request: next(replies))
    asked = {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, IMAGE]}
    agent = Agent("sees", tools=[look, *session.tools()], model=model)
    assert _run(session, agent, [asked]) == "A harbor."
    assert [request[0] for request in model.inputs] == [asked, asked]
    assert model.inputs[1][-1]["output"] == [{"type": "input_image", "image_url": PIXEL}]


# Taking back


def test_what_was_popped_is_gone_for_the_model_and_kept_in_the_record(threads: Agents) -> None:
    session, door = (
        threads.session("t"),
        CheckedModel(lambda request: ScriptedReply(f"You said {request.asked}")),
    )
    for text in ("one", "two"):
        _run(session, _agent(session, Scripted(door)), text)
    assert [_text(asyncio.run(session.pop_item())) for _ in range(2)] == ["You said two", "two"]
    for again in (session, threads.again().session("t")):
        assert list(map(_text, _items(again))) == ["one", "You said one"]
    _run(session, _agent(session, Scripted(door)), "three")
    assert [one["content"] for one in door.requests[-1].messages] == ["one", "You said one", "three"]
    with refold.open("t", store=threads.store) as chat:
        said = [one.message.text for one in chat.get_all()]
    assert said == ["one", "You said one", "two", "You said two"]


def test_of_an_answer_in_several_items_one_is_popped_and_at_last_all(threads: Agents) -> None:
    session = threads.session("t")
    asyncio.run(session.add_items(ODD))
    other = threads.session("t")
    assert _items(other) == ODD
    for n in range(len(ODD), 0, -1):
        assert asyncio.run(session.pop_item()) == ODD[n - 1]
        assert _items(other) == ODD[: n - 1]
    assert asyncio.run(session.pop_item()) is None
    asyncio.run(session.add_items(ODD[:1]))
    assert _items(threads.again().session("t")) == ODD[:1]


def test_clearing_erases_all_of_it(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(lambda request: ScriptedReply("Well."))
    other = threads.session("t")
    _run(session, _agent(session, Scripted(door)), "a secret")
    asyncio.run(session.pop_item())
    assert len(_items(other)) == 1
    asyncio.run(session.clear_session())
    assert _items(session) == _items(other) == _items(threads.again().session("t")) == []
    for name in ("t", "t~1"):
        with refold.open(name, store=threads.store) as chat:
            assert chat.get_count() == 0
    _run(session, _agent(session, Scripted(door)), "anew")
    assert [one["content"] for one in door.requests[-1].messages] == ["anew"]


# What else runs under the same configuration


@pytest.mark.parametrize("asked", ["Read them.", TASK])
def test_an_agent_that_is_a_tool_has_a_history_of_its_own(threads: Agents, asked: str) -> None:
    """Also one that is asked the very same: it has the same configuration, and the SDK stores none of it."""
    session = threads.session("t")
    reader = LedgerReader(60, wanted=1)
    inner = CheckedModel(reader, task=asked)
    clerk = Agent("clerk", tools=[read_ledger, *session.tools()], model=Scripted(inner))
    replies = iter(
        [ScriptedReply("", (ScriptedCall("c1", "ask_clerk", {"input": asked}),)), ScriptedReply("Thank you.")]
    )
    door = CheckedModel(lambda request: next(replies), task=TASK)
    own = [clerk.as_tool("ask_clerk", "Asks the clerk.", max_turns=1_000), *session.tools()]
    agent = Agent("boss", instructions="Ask.", tools=own, model=Scripted(door))
    assert _run(session, agent) == "Thank you."
    assert inner.faults == door.faults == []
    assert door.requests[-1].results == [f"The seal is {seal(1)}."]
    assert reader.looked_up > 0
    assert len(_items(session)) == 4
    with refold.open("t", store=threads.store) as chat:
        assert [one.message.role for one in chat.get_all()] == ["user", "assistant", "tool", "assistant"]


def _renamed(script: Script) -> Script:
    """Within a run, the SDK wants an id of its own for each call."""

    def renamed(request: SentRequest) -> ScriptedReply:
        text, calls = script(request)
        return ScriptedReply(text, tuple(call._replace(id=f"heir_{call.id}") for call in calls))

    return renamed


def _handing_over(session: RefoldSession, door: CheckedModel, **how: Any) -> Agent[Any]:
    heir = Agent("heir", tools=[read_ledger, *session.tools()], model=Scripted(_renamed(door)))
    moves: Any = iter(
        [*[LedgerReader(30)] * 30, lambda _: ScriptedReply("", (ScriptedCall("c1", "transfer_to_heir", {}),))]
    )
    model = Scripted(lambda request: next(moves)(request))
    return Agent("first", tools=[read_ledger], handoffs=[handoff(heir, **how)], model=model)


def test_after_a_handoff_the_next_agent_goes_on(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(30), task=TASK)
    assert _run(session, _handing_over(session, door)) == f"The seal is {seal(3)}."
    assert door.faults == []
    assert "transfer_to_heir" in door.requests[0].text


def test_what_a_handoff_hides_from_the_next_agent_stays_hidden(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(60, wanted=50), task=TASK)
    agent = _handing_over(session, door, input_filter=handoff_filters.remove_all_tools)
    assert _run(session, agent) == f"The seal is {seal(50)}."
    assert door.faults == []
    assert door.requests[0].results == []
    assert len([item for item in _items(session) if item.get("type") == "function_call_output"]) >= 60
    later = CheckedModel(LedgerReader(0, wanted=50), task=TASK)
    assert _run(session, _agent(session, Scripted(later)), "Once more?") == f"The seal is {seal(50)}."
    assert later.faults == []


def test_a_history_that_was_told_anew_for_a_handoff_is_what_the_next_agent_sees(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(10))
    told = {"role": "user", "content": "The first agent has read thirty ledgers."}

    def tell(data: Any) -> Any:
        return data.clone(input_history=(told,), pre_handoff_items=(), new_items=())

    _run(session, _handing_over(session, door, input_filter=tell))
    assert door.faults == []
    assert [request.messages[0] for request in door.requests] == [told] * len(door.requests)
    assert [len(request.results) for request in door.requests[:4]] == [0, 1, 2, 3]


def test_a_call_that_waited_for_approval_goes_on(threads: Agents) -> None:
    @function_tool(needs_approval=True)
    def burn(number: int) -> str:
        """Burns a ledger."""
        return f"ledger {number} is burnt"

    session, reader = threads.session("t"), LedgerReader(20)
    moves: list[Script] = [
        *[reader] * 20,
        lambda request: ScriptedReply("", (ScriptedCall("b", "burn", {"number": 3}),)),
    ]
    script = iter([*moves, lambda request: ScriptedReply(request.results[-1])])
    door = CheckedModel(lambda request: next(script)(request), task=TASK)
    agent = Agent("reader", tools=[read_ledger, burn, *session.tools()], model=Scripted(door))

    async def run() -> str:
        rest: dict[str, Any] = {"session": session, "run_config": session.run_config(), "max_turns": None}
        waiting = await Runner.run(agent, TASK, **rest)
        state = waiting.to_state()
        state.approve(waiting.interruptions[0])
        return str((await Runner.run(agent, state, **rest)).final_output)

    assert asyncio.run(run()) == "ledger 3 is burnt"
    assert door.faults == []
    calls = [item["call_id"] for item in _items(session) if item.get("type") == "function_call"]
    assert calls == [*(f"call_{n}" for n in range(1, 21)), "b"]


def test_what_a_provider_keeps_is_handed_on_as_it_is(threads: Agents) -> None:
    session = threads.session("t")
    model = Scripted(lambda request: ScriptedReply("", (ScriptedCall("c1", "read_ledger", {"number": 1}),)))
    agent = _agent(session, model)

    async def run() -> None:
        config = session.run_config()
        await Runner.run(agent, TASK, run_config=config, conversation_id="conv_1", max_turns=2)

    with pytest.raises(Exception, match="Max turns"):
        asyncio.run(run())
    assert [item["type"] for item in model.inputs[1]] == ["function_call_output"]


def test_thoughts_stay_with_what_follows_from_them(threads: Agents) -> None:
    session, door = threads.session("t"), CheckedModel(LedgerReader(60), task=TASK)
    model = Scripted(door, thinks=True)
    assert _run(session, _agent(session, model)) == f"The seal is {seal(3)}."
    assert door.faults == model.faults == []
    assert any(item.get("type") == "reasoning" for item in model.inputs[-1])


# What the SDK's own means do not do

BARE: dict[str, Callable[[Agents], tuple[Any, RunConfig]]] = {
    "a session": lambda threads: (threads.bare("t"), RunConfig()),
    "a session with a limit": lambda threads: (
        threads.bare("t"),
        RunConfig(session_settings=SessionSettings(limit=10)),
    ),
    "a session that compacts": lambda threads: (
        OpenAIResponsesCompactionSession(
            "t", threads.bare("t"), client=object(), should_trigger_compaction=lambda _: True
        ),
        RunConfig(),
    ),
    "a filter that trims outputs": lambda threads: (
        threads.bare("t"),
        RunConfig(call_model_input_filter=ToolOutputTrimmer()),
    ),
}


@pytest.mark.parametrize("means", BARE)
def test_the_sdk_alone_overflows_inside_the_loop(threads: Agents, means: str) -> None:
    session, config = BARE[means](threads)
    door = CheckedModel(LedgerReader())
    agent = Agent("reader", tools=[read_ledger], model=Scripted(door))
    with pytest.raises(WindowExceeded):
        asyncio.run(Runner.run(agent, TASK, session=session, run_config=config, max_turns=None))
    own = threads.session("t")
    door = CheckedModel(LedgerReader(), task=TASK)
    assert _run(own, _agent(own, Scripted(door))) == f"The seal is {seal(3)}."
    assert len(door.requests) > STEPS
    assert door.faults == []


def test_a_limit_of_the_sdks_loses_the_task_after_a_long_turn_and_refold_does_not(threads: Agents) -> None:
    """Inside the turn it does nothing, and the next one is shown only its end."""

    def second(session: Any, config: RunConfig) -> CheckedModel:
        """What the model sees after a turn of many calls, in a window that is large enough for it."""
        doors = [
            CheckedModel(LedgerReader(), window=ENDLESS),
            CheckedModel(lambda request: ScriptedReply("Yes."), task=TASK),
        ]
        for door, text in zip(doors, (TASK, "Sure?"), strict=True):
            agent = Agent("reader", tools=[read_ledger], model=Scripted(door))
            asyncio.run(Runner.run(agent, text, session=session, run_config=config, max_turns=None))
        assert len(doors[0].requests) > STEPS
        return doors[1]

    limit = SessionSettings(limit=10)
    assert second(threads.bare("t"), RunConfig(session_settings=limit)).faults == ["the task is gone"]
    own = threads.session("t")
    assert second(own, own.run_config(session_settings=limit)).faults == []


def test_a_trimmed_history_does_not_part_a_result_from_its_call(threads: Agents) -> None:
    def newest(history: list[Any], new: list[Any]) -> list[Any]:
        return [*history[-3:], *new]

    def faults(session: Any, filter: Any = None) -> list[str]:
        config = RunConfig(session_input_callback=newest, call_model_input_filter=filter)
        doors = (
            CheckedModel(LedgerReader(4, at_once=2)),
            CheckedModel(lambda request: ScriptedReply("It is as I said."), task=TASK),
        )
        for door, text in zip(doors, (TASK, "Sure?"), strict=True):
            agent = Agent("reader", tools=[read_ledger], model=Scripted(door))
            asyncio.run(Runner.run(agent, text, session=session, run_config=config))
        return doors[1].faults

    bare, own = threads.bare("t"), threads.session("t")
    trimmed = faults(bare)
    assert "the task is gone" in trimmed
    assert any("answers" in fault for fault in trimmed)
    assert faults(own, own.run_config().call_model_input_filter) == []
    for session in (bare, own):  # a limit alone parts them, too
        items: Any = asyncio.run(session.get_items(limit=5))
        assert [item.get("type", "message") for item in items][:2] == ["function_call_output"] * 2


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_limit_trims_nothing_that_there_is_room_for(threads: Agents, limit: int) -> None:
    """The SDK leaves results out whose calls it cut away."""
    session = threads.session("t")
    _run(session, _agent(session, Scripted(CheckedModel(LedgerReader(4, at_once=2)))))
    door = CheckedModel(lambda request: ScriptedReply("It is as I said."), task=TASK)
    model = Scripted(door)
    _run(session, _agent(session, model), "Sure?", session_settings=SessionSettings(limit=limit))
    assert door.faults == model.faults == []
    assert door.requests[0].results == [ledger(n) for n in range(1, 5)]


def test_a_call_whose_result_was_popped_is_mended(threads: Agents) -> None:
    session = threads.session("t")
    _run(session, _agent(session, Scripted(CheckedModel(LedgerReader(4, at_once=2)))))
    for _ in range(2):
        asyncio.run(session.pop_item())
    door = CheckedModel(lambda request: ScriptedReply("I see."), task=TASK)
    model = Scripted(door)
    _run(session, _agent(session, model), "Go on.")
    assert door.faults == model.faults == []
    assert door.requests[0].results[:3] == [ledger(n) for n in range(1, 4)]
    assert "never returned a result" in door.requests[0].results[3]


def test_calls_of_several_turns_that_share_their_ids_all_keep_their_results(threads: Agents) -> None:
    """The SDK hands on only the newest of them."""
    session, bare = threads.session("t"), threads.bare("t")

    def results(session: Any, config: RunConfig) -> list[str]:
        doors = [CheckedModel(LedgerReader(2, wanted=n), task=TASK) for n in (1, 2, 1)]
        for door in doors:
            agent = Agent("reader", tools=[read_ledger], model=Scripted(door))
            asyncio.run(Runner.run(agent, TASK, session=session, run_config=config))
        assert session is bare or [door.faults for door in doors] == [[], [], []]
        return doors[2].requests[0].results

    assert results(session, session.run_config()) == [ledger(1), ledger(2)] * 2
    assert len(results(bare, RunConfig())) < 4


# The page


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    """As it stands, but for the API that is spoken: the scripted model speaks chat completions."""
    days = iter(["monday", "tuesday"])

    def script(request: Any) -> Any:
        day = next(days, None)
        return ModelReply(calls=(("read_log", {"day": day}),)) if day else "On Monday: the disk was full."

    spoken = "import agents; agents.set_default_openai_api('chat_completions')\n"
    with ScriptedModel(script) as model:
        there = {"OPENAI_BASE_URL": model.openai_url, "OPENAI_API_KEY": "any"}
        done = subprocess.run(
            [sys.executable, "-c", spoken + program("openai-agents.md")],
            cwd=tmp_path,
            env={**os.environ, **there, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "On Monday: the disk was full."
    assert all(len(json.dumps(request)) < 100_000 for request in model.requests)
    with refold.open("logs", store=f"sqlite:///{tmp_path}/agent.db") as chat:
        assert [one.message.role for one in chat.get_all()] == [
            "user",
            *["assistant", "tool"] * 2,
            "assistant",
        ]


def test_a_conversation_that_only_has_the_name_of_a_fork_is_left_alone(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    with refold.open("t~1", store=store) as chat:
        chat.append({"role": "user", "content": "somebody else's"})
    said = [{"role": "user", "content": f"mine {n}"} for n in range(3)]
    asyncio.run(RefoldSession("t", store=store).add_items(list(said)))
    session = RefoldSession("t", store=store)
    assert _items(session) == said
    assert asyncio.run(session.pop_item()) == said[2]
    assert _items(RefoldSession("t", store=store)) == said[:2]
    for n in (1, 0):
        assert asyncio.run(RefoldSession("t", store=store).pop_item()) == said[n]
    session = RefoldSession("t", store=store)
    assert _items(session) == []
    asyncio.run(session.add_items(said[:1]))
    assert _items(RefoldSession("t", store=store)) == said[:1]
    asyncio.run(RefoldSession("t", store=store).clear_session())
    assert _items(RefoldSession("t", store=store)) == []
    with refold.open("t~1", store=store) as chat:
        assert [one.message.text for one in chat.get_all()] == ["somebody else's"]
        assert [row.key.conversation for row in chat.store.conversations() if row.next] == ["t~1"]


def test_a_filter_of_one_s_own_comes_first_and_what_it_puts_in_stays_in_its_request(tmp_path: Path) -> None:
    def reminds(data: Any) -> ModelInputData:
        data.model_data.input.append({"role": "user", "content": f"[reminder {len(data.model_data.input)}]"})
        return data.model_data

    session = RefoldSession("t", store=f"sqlite:///{tmp_path}/a.db", model=MODEL, config=CONFIG)
    model = Scripted(door := CheckedModel(LedgerReader(30), task=TASK))
    config = session.run_config(call_model_input_filter=reminds)
    run = Runner.run(_agent(session, model), TASK, session=session, run_config=config, max_turns=100)
    assert asyncio.run(run).final_output == f"The seal is {seal(3)}."
    assert door.faults == model.faults == []
    assert all(request.text.count("[reminder ") == 1 for request in door.requests)
    assert all(str(items[-1]["content"]).startswith("[reminder ") for items in model.inputs)
    texts = [_text(item) for item in _items(session)]
    assert texts.count(TASK) == 1
    assert "[reminder " not in "".join(texts)
    assert any("[refold #" in request.text for request in door.requests)


def test_what_a_filter_of_one_s_own_hides_stays_hidden(tmp_path: Path) -> None:
    async def hides(data: Any) -> ModelInputData:
        text = json.dumps(data.model_data.input).replace("herring", "[fish]")
        return ModelInputData(json.loads(text), data.model_data.instructions)

    session = RefoldSession("t", store=f"sqlite:///{tmp_path}/a.db", model=MODEL, config=CONFIG)
    config = session.run_config(call_model_input_filter=hides)
    for question in (f"{TASK} I like herring.", "Which fish? Not herring?"):
        model = Scripted(door := CheckedModel(LedgerReader(30)))
        agent = _agent(session, model)
        asyncio.run(Runner.run(agent, question, session=session, run_config=config, max_turns=100))
        assert door.faults == model.faults == []
        assert not any("herring" in request.text for request in door.requests)
        assert any("[refold #" in request.text for request in door.requests)
    texts = [_text(item) for item in _items(session)]
    assert texts.count(f"{TASK} I like herring.") == texts.count("Which fish? Not herring?") == 1
    assert texts.count(ledger(2)) == 2
