"""Google ADK's own runner and agents, with a scripted model, with and without refold."""

import pytest

pytest.importorskip("google.adk")

import asyncio
import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

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
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.base_events_summarizer import BaseEventsSummarizer
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin
from google.adk.plugins.multimodal_tool_results_plugin import MultimodalToolResultsPlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.adk.workflow import Workflow
from google.genai import types
from pages import program
from pydantic import BaseModel

import refold
from refold.adapters.adk import GENERATED_ID, RefoldPlugin
from refold.core.message import Media, Text

APP, USER = "ledgers", "ann"


class Scripted(BaseLlm):
    """A model that says what a script tells it to."""

    model: str = MODEL
    script: Any
    gives_ids: bool = False

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        tools = [one for tool in llm_request.config.tools or [] for one in tool.function_declarations or []]
        system = llm_request.config.system_instruction
        messages = [*([{"role": "system", "content": system}] if system else []), *chat(llm_request.contents)]
        offered = [tool_declaration(one.name or "", one.description, _schema(one)) for one in tools]
        reply: ScriptedReply = self.script(SentRequest(messages, offered))
        parts = [types.Part(text=reply.text)] if reply.text else []
        for call in reply.calls:
            id = f"call_{uuid4().hex}" if self.gives_ids else None
            parts.append(
                types.Part(function_call=types.FunctionCall(id=id, name=call.tool, args=call.arguments))
            )
        yield LlmResponse(content=types.Content(role="model", parts=parts))


def _schema(tool: types.FunctionDeclaration) -> Any:
    schema = tool.parameters_json_schema or tool.parameters
    return schema.model_dump(mode="json", exclude_none=True) if isinstance(schema, BaseModel) else schema


class Pairing(Gemini):
    """A model of which ADK knows that it pairs calls and results by their ids."""

    use_interactions_api: bool = True
    script: Any
    gives_ids: bool = False
    generate_content_async = Scripted.generate_content_async


class Stateful(Pairing):
    """The same, when the provider keeps what was said."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        async for response in super().generate_content_async(llm_request, stream):
            yield response.model_copy(update={"interaction_id": "i-1"})


def chat(contents: Sequence[types.Content]) -> list[dict[str, Any]]:
    """As OpenAI's chat has them; calls without ids are answered in their order, as for Gemini."""
    messages, waiting = list[dict[str, Any]](), list[tuple[str, str]]()
    for content in contents:
        calls, said = [], []
        for part in content.parts or []:
            if call := part.function_call:
                id = call.id or f"nameless-{len(messages)}-{len(calls)}"
                waiting.append((id, call.name or ""))
                function = {"name": call.name, "arguments": json.dumps(call.args)}
                calls.append({"id": id, "type": "function", "function": function})
            elif result := part.function_response:
                own = next(
                    (one for one in waiting if result.id in (None, one[0]) and one[1] == result.name), None
                )
                waiting.remove(own) if own else None
                id = own[0] if own else result.id or "unknown"
                messages.append({"role": "tool", "tool_call_id": id, "content": text_of(result)})
            elif part.inline_data:
                data = b64encode(part.inline_data.data or b"").decode()
                url = f"data:{part.inline_data.mime_type};base64,{data}"
                said.append({"type": "image_url", "image_url": {"url": url}})
            elif part.text:
                said.append({"type": "text", "text": part.text})
        role = "assistant" if content.role == "model" else "user"
        plain = said[0]["text"] if len(said) == 1 and said[0]["type"] == "text" else said or None
        if said or calls:
            messages.append({"role": role, "content": plain, **({"tool_calls": calls} if calls else {})})
    return messages


def text_of(result: types.FunctionResponse) -> str:
    response = result.response or {}
    text = response.get("result", response.get("error"))
    images = [
        b64encode(part.inline_data.data or b"").decode() for part in result.parts or [] if part.inline_data
    ]
    return "".join([text if isinstance(text, str) else json.dumps(response, default=repr), *images])


def read_ledger(number: int) -> str:
    """Reads a ledger."""
    return ledger(number)


def fail(number: int) -> str:
    """Fails."""
    return failing(number)


def excuse(tool: Any, args: Any, tool_context: Any, error: Exception) -> dict[str, Any]:
    return {"error": str(error)}


def said(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


class Masks(BasePlugin):
    """Another plugin, which changes what is sent."""

    def __init__(self, mask: Mask) -> None:
        super().__init__("masks")
        self._mask = mask

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> None:
        said = [content.model_dump_json() for content in llm_request.contents]
        llm_request.contents = [types.Content.model_validate_json(self._mask(one)) for one in said]


class ADK:
    """A rig: sessions are kept by ADK's SQLite service."""

    hooks = (RefoldPlugin,)
    gives_ids = False

    def __init__(self, folder: Path) -> None:
        self._folder, self.store = folder, f"sqlite:///{folder}/refold.db"
        self._adapters: dict[str, RefoldPlugin] = {}

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
        plugins: list[BasePlugin] = [Masks(mask)] if mask else []
        plugins += [self.adapter(config)] if with_refold else []
        return asyncio.run(self.say(thread, said(text), self.agent(script), plugins))

    def agent(self, script: Script, **more: Any) -> LlmAgent:
        model = Scripted(script=script, gives_ids=self.gives_ids)
        tools = [read_ledger, fail, *more.pop("tools", [])]
        return LlmAgent(name="reader", model=model, tools=tools, on_tool_error_callback=excuse, **more)

    async def say(
        self, thread: str, message: types.Content, agent: Any, plugins: Sequence[BasePlugin], **more: Any
    ) -> str:
        """What the agents answer."""
        app = App(name=APP, root_agent=agent, plugins=list(plugins), **more)
        service, answer = self._service(thread), ""
        runner = Runner(app=app, session_service=service)
        if await service.get_session(app_name=APP, user_id=USER, session_id=thread) is None:
            await service.create_session(app_name=APP, user_id=USER, session_id=thread)
        async for event in runner.run_async(user_id=USER, session_id=thread, new_message=message):
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or [])
        return answer

    def adapter(self, config: Mapping[str, Any] = CONFIG) -> RefoldPlugin:
        """One for all sessions."""
        known = self._adapters.get(repr(config))
        return known or self._adapters.setdefault(
            repr(config), RefoldPlugin(store=self.store, model=MODEL, config=dict(config))
        )

    def again(self) -> "ADK":
        return type(self)(self._folder)

    def session(self, thread: str) -> Session:
        found = asyncio.run(self._service(thread).get_session(app_name=APP, user_id=USER, session_id=thread))
        assert found is not None
        return found

    def _service(self, thread: str) -> SqliteSessionService:
        return SqliteSessionService(f"{self._folder}/{thread}.db")

    def stored(self, thread: str) -> list[tuple[str, str]]:
        contents = [event.content for event in self.session(thread).events if event.content]
        return [(one["role"], _plain(one["content"])) for one in chat(contents)]

    def raw(self, thread: str) -> list[bytes]:
        return [event.model_dump_json().encode() for event in self.session(thread).events]


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else ""


class InMemory(ADK):
    """The same, with sessions that live as long as this process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sessions = InMemorySessionService()

    def again(self) -> "InMemory":
        other = type(self)(self._folder)
        other._sessions = self._sessions
        return other

    def _service(self, thread: str) -> Any:
        return self._sessions


class WithIds(InMemory):
    """With a model that names its calls itself, which ADK passes through."""

    gives_ids = True


RIG = InMemory


class TestADK(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> ADK:
        return ADK(tmp_path)


class TestADKWithAModelThatNamesItsCalls(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> ADK:
        return WithIds(tmp_path)


@pytest.fixture
def rig(tmp_path: Path) -> InMemory:
    return InMemory(tmp_path)


class Watcher(BasePlugin):
    """Remembers every event as it was when it was made, and the contents of every request."""

    def __init__(self) -> None:
        super().__init__("watcher")
        self.made: list[str] = []
        self.left: list[str] = []

    async def on_event_callback(self, *, invocation_context: Any, event: Any) -> None:
        self.made.append(event.model_dump_json())

    async def after_run_callback(self, *, invocation_context: Any) -> None:
        self.left = [event.model_dump_json() for event in invocation_context.session.events[1:]]


class Shortener(BasePlugin):
    """What one would write: long results are cut in the request, where they stand."""

    def __init__(self) -> None:
        super().__init__("shortener")

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> None:
        for content in llm_request.contents[:-1]:
            for part in content.parts or []:
                if part.function_response and part.function_response.response:
                    text = part.function_response.response["result"]
                    part.function_response.response["result"] = text[:50]


@pytest.mark.parametrize("is_naive", [True, False])
def test_the_events_of_a_session_stay_as_they_were_to_the_byte(rig: InMemory, is_naive: bool) -> None:
    """A request shares its words with the session: who cuts them there cuts what is stored."""
    watcher, door = Watcher(), CheckedModel(LedgerReader(30), window=WINDOW)
    plugins = [Shortener() if is_naive else rig.adapter(), watcher]
    asyncio.run(rig.say("t", said(TASK), rig.agent(door), plugins))
    assert (watcher.left == watcher.made) is not is_naive
    shortened = [text for text in door.requests[-1].results if len(text) == 50]
    assert shortened if is_naive else "[refold" in door.requests[-1].text


LONG = 200
"""Calls in one turn: the whole of it is the newest turn."""


class Notes(BaseEventsSummarizer):
    """Writes that there was something."""

    async def maybe_summarize_events(self, *, events: list[Event]) -> Event:
        text = types.Content(role="model", parts=[types.Part(text="Some ledgers were read.")])
        compaction = EventCompaction(
            start_timestamp=events[0].timestamp, end_timestamp=events[-1].timestamp, compacted_content=text
        )
        actions = EventActions(compaction=compaction)
        return Event(author="user", invocation_id=Event.new_id(), actions=actions)


def test_the_own_compaction_of_adk_loses_the_task_in_a_long_turn_and_refold_does_not(rig: InMemory) -> None:
    config = EventsCompactionConfig(summarizer=Notes(), token_threshold=4_000, event_retention_size=6)
    bare, door = CheckedModel(LedgerReader(LONG), task=TASK), CheckedModel(LedgerReader(LONG), task=TASK)
    own = rig.say("bare", said(TASK), rig.agent(bare), [], events_compaction_config=config)
    assert asyncio.run(own) == "I do not know any more."
    assert "the task is gone" in bare.faults
    fitted = rig.say("both", said(TASK), rig.agent(door), [rig.adapter()], events_compaction_config=config)
    assert asyncio.run(fitted) == f"The seal is {seal(3)}."
    assert door.faults == []


def test_the_context_filter_of_adk_cannot_shorten_a_long_turn_and_refold_can(rig: InMemory) -> None:
    bare, door = CheckedModel(LedgerReader(LONG), task=TASK), CheckedModel(LedgerReader(LONG), task=TASK)
    filter = ContextFilterPlugin(num_invocations_to_keep=1)
    with pytest.raises(Exception, match="the window has"):
        asyncio.run(rig.say("bare", said(TASK), rig.agent(bare), [filter]))
    filtered = rig.say("both", said(TASK), rig.agent(door), [filter, rig.adapter()])
    assert asyncio.run(filtered) == f"The seal is {seal(3)}."
    assert door.faults == []


@pytest.mark.parametrize(("is_pairing", "ids"), [(False, "name"), (True, GENERATED_ID)])
def test_what_a_filter_leaves_out_is_shown_like_the_rest(rig: InMemory, is_pairing: bool, ids: str) -> None:
    """With the ids that ADK gives to calls, where the model is told those."""
    plugins, model = (
        [ContextFilterPlugin(num_invocations_to_keep=1), rig.adapter()],
        Pairing if is_pairing else Scripted,
    )
    doors = [CheckedModel(LedgerReader(2, wanted=1), task=TASK) for _ in range(2)]
    for text, door in zip((TASK, "Again, please."), doors, strict=True):
        agent = LlmAgent(name="reader", model=model(model=MODEL, script=door), tools=[read_ledger])
        asyncio.run(rig.say("t", said(text), agent, plugins))
        assert door.faults == []
    calls = [call for one in doors[1].requests[-1].messages for call in one.get("tool_calls", ())]
    assert [call["id"][:4] for call in calls] == [ids] * 4
    assert kept(rig, "t") == rig.stored("t")


def kept(rig: ADK, conversation: str) -> list[tuple[str, str]]:
    with refold.open(conversation, store=rig.store) as chat:
        return [(one.message.role, one.message.text) for one in chat.get_all()]


def test_a_message_is_known_by_the_id_of_its_event_and_stored_once(rig: InMemory) -> None:
    for _ in range(3):
        rig.run("t", TASK, CheckedModel(LedgerReader(3)))
    with refold.open("t", store=rig.store) as chat:
        ids = [one.id for one in chat.get_all()]
    assert ids == [event.id for event in rig.session("t").events]


def test_calls_that_broke_off_are_kept_and_mended(rig: InMemory) -> None:
    """ADK leaves out those of the calls that have no result; the others have theirs."""
    calls = (ScriptedCall("", "read_ledger", {"number": 1}), ScriptedCall("", "fail", {"number": 2}))
    replies = iter(
        [ScriptedReply("Both.", calls), ScriptedReply("The first is there."), ScriptedReply("Yes.")]
    )
    door = CheckedModel(lambda request: next(replies), task=TASK)
    agent = LlmAgent(name="reader", model=Scripted(script=door), tools=[read_ledger, fail])
    with pytest.raises(ValueError, match="ledger 2 is missing"):
        asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()]))
    assert kept(rig, "t") == rig.stored("t") != []
    assert asyncio.run(rig.say("t", said("And?"), agent, [rig.adapter()])) == "The first is there."
    assert asyncio.run(rig.say("t", said("Is it?"), agent, [rig.adapter()])) == "Yes."
    assert door.faults == []
    assert ledger(1) in door.requests[-1].results
    assert kept(rig, "t") == rig.stored("t")


def test_images_pass_through(rig: InMemory) -> None:
    image = types.Part(inline_data=types.Blob(data=b"not really a picture", mime_type="image/png"))
    message = types.Content(role="user", parts=[types.Part(text=TASK), image])
    door = CheckedModel(LedgerReader(30), task=b64encode(b"not really a picture").decode())
    assert asyncio.run(rig.say("t", message, rig.agent(door), [rig.adapter()])) == f"The seal is {seal(3)}."
    assert door.faults == []
    with refold.open("t", store=rig.store) as chat:
        assert chat.get_range(0, 1)[0].message.parts[1] == Media(
            "image", data=b64encode(b"not really a picture").decode(), mime="image/png"
        )


def test_it_works_without_async_too(rig: InMemory) -> None:
    door, service = CheckedModel(LedgerReader(30), task=TASK), InMemorySessionService()
    app = App(name=APP, root_agent=rig.agent(door), plugins=[rig.adapter()])
    runner = Runner(app=app, session_service=service, auto_create_session=True)
    events = list(runner.run(user_id=USER, session_id="t", new_message=said(TASK)))
    assert events[-1].content.parts[0].text == f"The seal is {seal(3)}."
    assert door.faults == []


def test_instructions_that_move_with_the_conversation_are_in_every_request_and_not_in_the_record(
    rig: InMemory,
) -> None:
    """With a static instruction, ADK puts the other one among the contents, each time in another place."""
    door = CheckedModel(LedgerReader(30), task="Be brief.")
    agent = rig.agent(door, static_instruction="You read ledgers.", instruction="Be brief.")
    assert asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()])) == f"The seal is {seal(3)}."
    assert door.faults == []
    assert {request.text.count("Be brief.") for request in door.requests} == {1}
    assert all("Be brief." in str(request.messages[-1]) for request in door.requests[1:])
    assert kept(rig, "t") == rig.stored("t")


def test_agents_that_hand_over_to_each_other_share_the_session(rig: InMemory) -> None:
    """What others did is told to an agent in words, so each has a conversation beside the session's."""

    def hands_over(request: SentRequest) -> ScriptedReply:
        return ScriptedReply("Please.", (ScriptedCall("", "transfer_to_agent", {"agent_name": next(names)}),))

    def reads(request: SentRequest) -> ScriptedReply:
        if question not in request.text:
            return first(request)
        return second(request) if len(clerk.requests) == 2 else hands_over(request)

    question, first, second = "And which has ledger 5?", LedgerReader(40), LedgerReader(30, wanted=5)
    names, clerk = iter(["reader", "clerk", "reader"]), CheckedModel(hands_over, task=TASK)
    door = CheckedModel(reads, task=TASK)
    agents = [rig.agent(door, description="Reads ledgers.")]
    agent = LlmAgent(name="clerk", model=Scripted(script=clerk), sub_agents=agents)
    for text, n in ((TASK, 3), (question, 5)):
        asked = len(door.requests)
        assert asyncio.run(rig.say("t", said(text), agent, [rig.adapter()])) == f"The seal is {seal(n)}."
        assert all(text in request.text for request in door.requests[asked:])
        assert kept(rig, "t") == rig.stored("t")
    assert door.faults == clerk.faults == []
    assert "[clerk] said:" in door.requests[0].text
    assert "[reader] `transfer_to_agent` tool returned" in clerk.requests[1].text


def test_agents_that_run_in_parallel_do_not_mix(rig: InMemory) -> None:
    doors = {
        name: CheckedModel(LedgerReader(30, wanted=n), task=TASK) for n, name in enumerate(("ann", "bob"), 2)
    }
    agents = [rig.agent(door).model_copy(update={"name": name}) for name, door in doors.items()]
    asyncio.run(rig.say("t", said(TASK), ParallelAgent(name="both", sub_agents=agents), [rig.adapter()]))
    assert [door.faults for door in doors.values()] == [[], []]
    answers = [text for role, text in kept(rig, "t") if text.startswith("The seal")]
    assert sorted(answers) == sorted(f"The seal is {seal(n)}." for n in (2, 3))
    assert kept(rig, "t") == rig.stored("t")


def test_an_agent_that_is_a_tool_has_a_conversation_of_its_own(rig: InMemory) -> None:
    door = CheckedModel(LedgerReader(30), task="Which seal has ledger 3?")
    moves = iter(
        [
            ScriptedReply("", (ScriptedCall("", "reader", {"request": "Which seal has ledger 3?"}),)),
            ScriptedReply("Done."),
        ]
    )
    clerk = CheckedModel(lambda request: next(moves), task=TASK)
    agent = rig.agent(clerk, tools=[AgentTool(rig.agent(door, description="Reads."))])
    assert asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()])) == "Done."
    assert door.faults == clerk.faults == []
    assert clerk.requests[1].results == [f"The seal is {seal(3)}."]
    assert kept(rig, "t") == rig.stored("t")


def test_what_was_rewound_is_not_told_again(rig: InMemory) -> None:
    for text in (TASK, "Forget this."):
        rig.run("t", text, CheckedModel(LedgerReader(2, wanted=1)))
    app = App(name=APP, root_agent=rig.agent(lambda request: ScriptedReply("Well.")), plugins=[rig.adapter()])
    runner = Runner(app=app, session_service=rig._service("t"))
    second = next(event for event in rig.session("t").events if "Forget" in event.model_dump_json())
    rewound = runner.rewind_async(
        user_id=USER, session_id="t", rewind_before_invocation_id=second.invocation_id
    )
    asyncio.run(rewound)
    door = CheckedModel(lambda request: ScriptedReply("Well."), task=TASK)
    rig.run("t", "Where were we?", door)
    assert "Forget" not in door.requests[0].text
    assert ("user", "Forget this.") in kept(rig, "t")
    assert [text for role, text in kept(rig, "t~1") if role == "user"] == [TASK, "Where were we?"]


@pytest.mark.parametrize("first", [None, {"status": "pending"}])
def test_a_result_that_comes_later_reaches_the_model(rig: InMemory, first: Any) -> None:
    async def order(what: str) -> Any:
        """Orders something."""
        return first

    def script(request: SentRequest) -> ScriptedReply:
        return next(replies, None) or read(request)

    read, replies = (
        LedgerReader(30),
        iter(
            [
                ScriptedReply("", (ScriptedCall("", "order", {"what": "ink"}),)),
                ScriptedReply("It is ordered."),
            ][: 1 + bool(first)]
        ),
    )
    door = CheckedModel(script, task=TASK)
    agent = rig.agent(door, tools=[LongRunningFunctionTool(order)])
    asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()]))
    asyncio.run(rig.say("t", said("Go on meanwhile."), agent, [rig.adapter()]))
    call = next(one for event in rig.session("t").events for one in event.get_function_calls())
    result = types.FunctionResponse(id=call.id, name="order", response={"status": "it is here"})
    later = types.Content(role="user", parts=[types.Part(function_response=result)])
    read.looked_up = 9  # it is tired of looking
    for message in (later, said("Thanks.")):
        asyncio.run(rig.say("t", message, agent, [rig.adapter()]))
        assert door.requests[-1].text.count("it is here") == 1
    assert door.faults == []
    with refold.open("t", store=rig.store) as chat:
        assert [one.id for one in chat.get_all()] == [event.id for event in rig.session("t").events]


def test_what_adk_and_the_application_tell_each_other_is_not_told_the_model(rig: InMemory) -> None:
    replies = iter(
        [
            ScriptedReply("", (ScriptedCall("", "read_ledger", {"number": 1}),)),
            ScriptedReply("I see."),
            ScriptedReply("I see."),
        ]
    )
    door = CheckedModel(lambda request: next(replies), task=TASK)
    model = Scripted(script=door)
    tools = [FunctionTool(read_ledger, require_confirmation=True)]
    agent = LlmAgent(name="reader", model=model, tools=tools)
    asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()]))
    asked = [one for event in rig.session("t").events for one in event.get_function_calls()]
    (asks,) = (one for one in asked if one.name == "adk_request_confirmation")
    yes = types.FunctionResponse(id=asks.id, name=asks.name, response={"confirmed": True})
    answer = types.Content(role="user", parts=[types.Part(function_response=yes)])
    assert asyncio.run(rig.say("t", answer, agent, [rig.adapter()])) == "I see."
    assert door.faults == []
    assert f"seal {seal(1)}" in door.requests[-1].text
    with refold.open("t", store=rig.store) as chat:
        assert "adk_request_confirmation" not in "".join(chat.export())


def test_sessions_of_two_users_with_the_same_id_do_not_mix(rig: InMemory) -> None:
    service, answers = InMemorySessionService(), {}
    for user in ("ann", "bob", "ann"):
        door = CheckedModel(lambda request: ScriptedReply("Yes."), task=f"I am {user}.")
        app = App(name=APP, root_agent=rig.agent(door), plugins=[rig.again().adapter()])
        runner = Runner(app=app, session_service=service, auto_create_session=True)
        list(runner.run(user_id=user, session_id="t", new_message=said(f"I am {user}.")))
        assert door.faults == []
        answers[user] = door.requests[0].text
    assert "bob" not in answers["ann"]
    assert "ann" not in answers["bob"]
    assert kept(rig, "t") == [("user", "I am ann."), ("assistant", "Yes.")] * 2
    assert kept(rig, f"{APP}/bob/t") == [("user", "I am bob."), ("assistant", "Yes.")]


class Mask(BasePlugin):
    """Hides names from models."""

    def __init__(self) -> None:
        super().__init__("mask")

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> None:
        llm_request.contents = [self._masked(content) for content in llm_request.contents]

    def _masked(self, content: types.Content) -> types.Content:
        return types.Content.model_validate_json(content.model_dump_json().replace("Ann", "[name]"))


def test_what_another_plugin_hides_stays_hidden(rig: InMemory) -> None:
    door = CheckedModel(lambda request: ScriptedReply("Hello, Ann."))
    for _ in range(3):
        asyncio.run(rig.say("t", said("I am Ann."), rig.agent(door), [Mask(), rig.adapter()]))
    assert all("Ann" not in request.text for request in door.requests)
    assert door.requests[-1].text.count("[name]") == 5
    assert "Ann" in rig.session("t").events[0].model_dump_json()
    with refold.open("t", store=rig.store) as record:
        assert all("Ann" not in message.text for message in record.view().messages[:-1])


def test_what_another_plugin_hides_in_one_turn_is_shown_again_in_the_next(rig: InMemory) -> None:
    """What was there at the last call is not looked at again, but for what is told otherwise."""
    door, hides = (
        CheckedModel(lambda request: ScriptedReply("Hello, Ann.")),
        [False, True, True, False, False],
    )
    for n, is_hidden in enumerate(hides):
        plugins = [*([Mask()] if is_hidden else []), rig.adapter()]
        asyncio.run(rig.say("t", said("I am Ann."), rig.agent(door), plugins))
        shown = (door.requests[-1].text.count("Ann"), door.requests[-1].text.count("[name]"))
        assert shown == ((0, 2 * n + 1) if is_hidden else (2 * n + 1, 0))
    assert door.faults == []


def test_an_agent_that_wants_no_history_is_told_none(rig: InMemory) -> None:
    first, second = (
        CheckedModel(LedgerReader(30), task=TASK),
        CheckedModel(LedgerReader(30, wanted=2), task="And of ledger 2?"),
    )
    for text, door, n in ((TASK, first, 3), ("And of ledger 2?", second, 2)):
        agent = rig.agent(door, include_contents="none")
        assert asyncio.run(rig.say("t", said(text), agent, [rig.adapter()])) == f"The seal is {seal(n)}."
        assert door.faults == []
    assert all(TASK not in request.text for request in second.requests)
    assert kept(rig, "t") == rig.stored("t")


def test_how_a_delegated_task_was_done_stays_with_the_agent_that_did_it(rig: InMemory) -> None:
    read = LedgerReader(30)

    def works(request: SentRequest) -> ScriptedReply:
        said = read(request)
        return (
            said
            if said.calls
            else ScriptedReply("", (ScriptedCall("", "finish_task", {"result": said.text}),))
        )

    door = CheckedModel(works, task="Which seal has ledger 3?")
    moves = iter(
        [
            ScriptedReply("", (ScriptedCall("", "reader", {"request": "Which seal has ledger 3?"}),)),
            ScriptedReply("Done."),
        ]
    )
    clerk = CheckedModel(lambda request: next(moves), task=TASK)
    reader = rig.agent(door, description="Reads.", mode="task")
    agent = LlmAgent(name="clerk", model=Scripted(script=clerk), sub_agents=[reader])
    assert asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()])) == "Done."
    assert door.faults == clerk.faults == []
    assert clerk.requests[1].results == [f"The seal is {seal(3)}."]
    assert kept(rig, "t") == [
        ("user", TASK),
        ("assistant", ""),
        ("tool", f"The seal is {seal(3)}."),
        ("assistant", "Done."),
    ]


def test_the_agents_of_a_workflow_are_fitted_each_for_itself(rig: InMemory) -> None:
    doors = [
        CheckedModel(LedgerReader(30), task=TASK),
        CheckedModel(LedgerReader(30, wanted=5), task=f"The seal is {seal(3)}."),
    ]
    agents = [
        rig.agent(door).model_copy(update={"name": name}) for name, door in zip("ab", doors, strict=True)
    ]
    flow = Workflow(name="flow", edges=[("START", *agents)])
    assert asyncio.run(rig.say("t", said(TASK), flow, [rig.adapter()])) == f"The seal is {seal(5)}."
    assert [door.faults for door in doors] == [[], []]
    assert kept(rig, "t") == rig.stored("t")


def test_what_a_tool_shows_beside_its_result_is_shown(rig: InMemory) -> None:
    """Media go with the result; the rest is put beside it by a plugin of ADK's, for one request."""

    def draw() -> list[types.Part]:
        """Draws."""
        image = types.Part(inline_data=types.Blob(data=b"a sketch", mime_type="image/png"))
        return [image, types.Part(text="Take care of it.")]

    replies = iter(
        [ScriptedReply("", (ScriptedCall("", "draw", {}),)), ScriptedReply("Nice."), ScriptedReply("Indeed.")]
    )
    roomy = {"models": {MODEL: {"window": 100_000, "max_output": 500}}}
    door, plugins = (
        CheckedModel(lambda request: next(replies)),
        [MultimodalToolResultsPlugin(), rig.adapter(roomy)],
    )
    agent = rig.agent(door, tools=[draw])
    assert asyncio.run(rig.say("t", said(TASK), agent, plugins)) == "Nice."
    assert asyncio.run(rig.say("t", said("Is it not?"), agent, plugins)) == "Indeed."
    assert door.faults == []
    image = b64encode(b"a sketch").decode()
    assert all(image in request.text for request in door.requests[1:])
    beside = [request.text.count("Take care") for request in door.requests[1:]]
    assert beside[0] == beside[1] + 1
    with refold.open("t", store=rig.store) as chat:
        result = chat.get_range(2, 3)[0].message.results[0]
    assert Media("image", data=image, mime="image/png") in result.output
    assert Text("Take care of it.") in result.output


def test_ids_that_adk_gives_are_told_where_the_model_needs_them(rig: InMemory) -> None:
    door = CheckedModel(LedgerReader(30), task=TASK)
    agent = LlmAgent(name="reader", model=Pairing(model=MODEL, script=door), tools=[read_ledger])
    assert asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()])) == f"The seal is {seal(3)}."
    assert door.faults == []
    calls = [call for one in door.requests[-1].messages for call in one.get("tool_calls", ())]
    assert {call["id"][:4] for call in calls} == {GENERATED_ID}


def test_a_request_that_goes_on_at_the_provider_is_sent_as_it_is(rig: InMemory) -> None:
    door = CheckedModel(lambda request: ScriptedReply("Well."))
    agent = LlmAgent(name="reader", model=Stateful(model=MODEL, script=door), tools=[read_ledger])
    for text in (TASK, "And?"):
        asyncio.run(rig.say("t", said(text), agent, [rig.adapter()]))
    assert [one["content"] for one in door.requests[-1].messages[1:]] == ["And?"]
    assert kept(rig, "t") == rig.stored("t")


class Answer(BaseModel):
    seal: str


def test_an_agent_that_answers_by_a_schema_is_offered_no_tools(rig: InMemory) -> None:
    """Many models take only one of both."""
    door = CheckedModel(lambda request: ScriptedReply(Answer(seal=seal(3)).model_dump_json()))
    agent = LlmAgent(name="reader", model=Scripted(script=door), output_schema=Answer)
    asyncio.run(rig.say("t", said(TASK), agent, [rig.adapter()]))
    assert door.requests[0].tools == []


class Google(BaseHTTPRequestHandler):
    """Google's API, as far as the program of a page needs it."""

    script: Any

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        contents = [types.Content.model_validate_json(json.dumps(one)) for one in asked["contents"]]
        tools = [
            tool_declaration(one["name"], one.get("description"), one)
            for tool in asked["tools"]
            for one in tool["functionDeclarations"]
        ]
        reply = type(self).script(SentRequest(chat(contents), tools))
        calls = [{"functionCall": {"name": call.tool, "args": call.arguments}} for call in reply.calls]
        content = {"role": "model", "parts": calls or [{"text": reply.text}]}
        body = json.dumps({"candidates": [{"content": content, "finishReason": "STOP"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    def script(request: SentRequest) -> ScriptedReply:
        requests.append(request)
        day = next(days, None)
        return (
            ScriptedReply("", (ScriptedCall("", "read_log", {"day": day}),))
            if day
            else ScriptedReply("On Monday: the disk was full.")
        )

    requests, days = list[SentRequest](), iter(["monday", "tuesday"])
    handler = type("Scripted", (Google,), {"script": staticmethod(script)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        there = {"GOOGLE_GEMINI_BASE_URL": f"http://127.0.0.1:{server.server_port}", "GOOGLE_API_KEY": "any"}
        command = [sys.executable, "-c", program("adk.md")]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **there}, capture_output=True, text=True, timeout=120
        )
        server.shutdown()
    assert done.stdout == "On Monday: the disk was full.\n", done.stderr
    assert requests[-1].tools == ["read_log", "refold_expand", "refold_search"]
    with refold.open("logs", store=f"sqlite:///{tmp_path}/agent.db") as chat:
        assert chat.get_count() == 6
