"""LangChain's own agent, with a scripted model, with and without refold."""

import pytest

pytest.importorskip("langchain")

import asyncio
import contextlib
from collections.abc import Mapping
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
    ScriptedReply,
    SentRequest,
    WindowExceeded,
    failing,
    ledger,
    seal,
)
from contract import STEPS as CALLS
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, SummarizationMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    convert_to_openai_messages,
    trim_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import ToolException, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from pages import printed

import refold
from refold.adapters.langchain import ROLES, RefoldMiddleware
from refold.testing.model import Reply as ModelReply

STEPS = 2_000
SERDE = JsonPlusSerializer()


class Scripted(BaseChatModel):
    """A model that says what a script tells it to."""

    script: Any
    declared: tuple[dict[str, Any], ...] = ()
    model_name: str = MODEL

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.model_copy(update={"declared": tuple(map(convert_to_openai_tool, tools))})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        reply: ScriptedReply = self.script(SentRequest(convert_to_openai_messages(messages), self.declared))
        calls = [{"id": call.id, "name": call.tool, "args": call.arguments} for call in reply.calls]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(reply.text, tool_calls=calls))])


@tool
def read_ledger(number: int) -> str:
    """Reads a ledger."""
    return ledger(number)


@tool
def fail(number: int) -> str:
    """Fails."""
    try:
        return failing(number)
    except ValueError as error:
        raise ToolException(str(error)) from error


fail.handle_tool_error = True


class Masks(AgentMiddleware[Any, Any, Any]):
    """Another middleware, which changes what is sent."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self._mask = mask

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        masked = [
            one.model_copy(update={"content": self._mask(str(one.content))}) for one in request.messages
        ]
        return handler(request.override(messages=masked))


class LangChain:
    """A rig: threads are kept by LangGraph's SQLite checkpointer."""

    hooks = (RefoldMiddleware,)

    def __init__(self, folder: Path) -> None:
        self._folder, self.store = folder, f"sqlite:///{folder}/refold.db"
        self._adapters: dict[str, RefoldMiddleware] = {}

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
        middleware: list[Any] = [Masks(mask)] if mask else []
        middleware += [self._adapter(config)] if with_refold else []
        with SqliteSaver.from_conn_string(f"{self._folder}/{thread}.db") as saver:
            agent = create_agent(
                Scripted(script=script), [read_ledger, fail], middleware=middleware, checkpointer=saver
            )
            said = agent.invoke({"messages": [HumanMessage(text)]}, _config(thread))
        return str(said["messages"][-1].text)

    def _adapter(self, config: Mapping[str, Any]) -> RefoldMiddleware:
        """One for all threads."""
        known = self._adapters.get(repr(config))
        return known or self._adapters.setdefault(
            repr(config), RefoldMiddleware(store=self.store, model=MODEL, config=dict(config))
        )

    def again(self) -> "LangChain":
        return LangChain(self._folder)

    def stored(self, thread: str) -> list[tuple[str, str]]:
        return [(ROLES[message.type], str(message.text)) for message in self._messages(thread)]

    def raw(self, thread: str) -> list[bytes]:
        return [SERDE.dumps_typed(one)[1] for one in self._messages(thread)]

    def _messages(self, thread: str) -> list[BaseMessage]:
        with SqliteSaver.from_conn_string(f"{self._folder}/{thread}.db") as saver:
            found = saver.get_tuple(_config(thread))
            assert found is not None
            messages: list[BaseMessage] = found.checkpoint["channel_values"]["messages"]
        return messages


def _config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}, "recursion_limit": STEPS}


RIG = LangChain


class TestLangChain(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> LangChain:
        return LangChain(tmp_path)

    def test_it_works_without_blocking_the_loop(self, rig: LangChain) -> None:
        middleware = RefoldMiddleware(store=rig.store, model=MODEL, config=CONFIG)
        doors = {name: CheckedModel(LedgerReader(30), task=TASK) for name in "xy"}

        async def run(name: str) -> str:
            model = Scripted(script=doors[name])
            agent = create_agent(model, [read_ledger], middleware=[middleware], checkpointer=InMemorySaver())
            said = await agent.ainvoke({"messages": [HumanMessage(TASK)]}, _config(name))
            return str(said["messages"][-1].text)

        async def both() -> list[str]:
            return await asyncio.gather(run("x"), run("y"))

        assert asyncio.run(both()) == [f"The seal is {seal(3)}."] * 2
        assert [door.faults for door in doors.values()] == [[], []]


def test_what_an_own_trimming_parts_stays_together(tmp_path: Path) -> None:
    """People trim before the model; what is cut away there takes the task along, or the call of a result."""

    class Trims(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            kept = trim_messages(request.messages, max_tokens=31, token_counter=len, strategy="last")
            return handler(request.override(messages=kept))

    def run(*middleware: AgentMiddleware[Any, Any, Any]) -> CheckedModel:
        door = CheckedModel(LedgerReader(2 * CALLS, at_once=2), task=TASK)
        agent = create_agent(
            Scripted(script=door), [read_ledger], middleware=middleware, checkpointer=InMemorySaver()
        )
        with contextlib.suppress(WindowExceeded):
            agent.invoke({"messages": [HumanMessage(TASK)]}, _config("t"))
        return door

    trimmed = run(Trims()).faults
    assert "the task is gone" in trimmed
    assert any("tool" in fault for fault in trimmed)
    for n, others in enumerate(([], [Trims()])):  # instead of it, and beside it
        store = f"sqlite:///{tmp_path}/{n}.db"
        door = run(*others, RefoldMiddleware(store=store, model=MODEL, config=CONFIG))
        assert door.faults == []
        assert len(door.requests) > CALLS


def test_images_and_what_refold_does_not_know_reach_the_model_as_they_were(tmp_path: Path) -> None:
    seen = list[Any]()
    image = {"type": "image", "base64": "aGVsbG8=", "mime_type": "image/png"}
    content = [{"type": "text", "text": "What is this?"}, image]

    class Sees(Scripted):
        def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
            seen.append(messages[-1].content)
            return ChatResult(generations=[ChatGeneration(message=AIMessage("A harbor."))])

    middleware = RefoldMiddleware(store=f"sqlite:///{tmp_path}/a.db", model=MODEL, config=CONFIG)
    agent = create_agent(Sees(script=None), [], middleware=[middleware], checkpointer=InMemorySaver())
    agent.invoke({"messages": [HumanMessage(content)]}, _config("t"))
    assert seen == [content]


def test_a_thread_that_goes_on_from_earlier_goes_on_in_a_conversation_of_its_own(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    middleware = RefoldMiddleware(store=store, model=MODEL, config=CONFIG)
    door = CheckedModel(lambda request: ScriptedReply(f"You said {request.asked}"))
    agent = create_agent(Scripted(script=door), [], middleware=[middleware], checkpointer=InMemorySaver())
    agent.invoke({"messages": [HumanMessage("one")]}, _config("t"))
    earlier = agent.get_state(_config("t")).config
    agent.invoke({"messages": [HumanMessage("two")]}, _config("t"))
    agent.invoke({"messages": [HumanMessage("other")]}, {**earlier, "recursion_limit": STEPS})
    assert [one["content"] for one in door.requests[-1].messages] == ["one", "You said one", "other"]
    with refold.open("t~1", store=store) as chat:
        assert [one.message.text for one in chat.get_all()] == [
            "one",
            "You said one",
            "other",
            "You said other",
        ]


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("langchain_openai")
    days = iter(["monday", "tuesday"])

    def script(request: Any) -> Any:
        day = next(days, None)
        return ModelReply(calls=(("read_log", {"day": day}),)) if day else "On Monday: the disk was full."

    assert printed("langchain.md", tmp_path, script).strip() == "On Monday: the disk was full."
    with refold.open("logs", store=f"sqlite:///{tmp_path}/agent.db") as chat:
        assert chat.get_count() == 6


class Hides(AgentMiddleware[Any, Any, Any]):
    """Hides fish from the model; by copies, or by messages of its own."""

    def __init__(self, *, has_ids: bool) -> None:
        super().__init__()
        self._has_ids = has_ids

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(messages=[self._hidden(one) for one in request.messages]))

    def _hidden(self, message: BaseMessage) -> BaseMessage:
        own = {} if self._has_ids else {"id": None}
        return message.model_copy(
            update={"content": str(message.content).replace("herring", "[fish]"), **own}
        )


@pytest.mark.parametrize("has_ids", [True, False])
def test_what_another_middleware_hides_stays_hidden_and_is_stored_as_it_was_said(
    has_ids: bool, tmp_path: Path
) -> None:
    store, saver = f"sqlite:///{tmp_path}/a.db", InMemorySaver()
    middleware = [Hides(has_ids=has_ids), RefoldMiddleware(store=store, model=MODEL, config=CONFIG)]
    for _ in range(2):
        door = CheckedModel(LedgerReader(30), task=TASK)
        agent = create_agent(Scripted(script=door), [read_ledger], middleware=middleware, checkpointer=saver)
        agent.invoke({"messages": [HumanMessage(f"{TASK} I like herring.")]}, _config("t"))
        assert door.faults == []
        assert not any("herring" in request.text for request in door.requests)
        assert any("[refold #" in request.text for request in door.requests)
    with refold.open("t", store=store) as chat:
        said = [one.message.text for one in chat.get_all()]
    assert said == [str(one.text) for one in agent.get_state(_config("t")).values["messages"]]


@pytest.mark.parametrize("is_dict", [True, False])
def test_what_another_middleware_puts_into_a_request_stays_in_it(is_dict: bool, tmp_path: Path) -> None:
    class Reminds(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            text = f"[reminder {len(request.messages)}]"
            added = {"role": "user", "content": text} if is_dict else HumanMessage(text)
            return handler(request.override(messages=[*request.messages, added]))

    store, door = f"sqlite:///{tmp_path}/a.db", CheckedModel(LedgerReader(20), task=TASK)
    middleware = [Reminds(), RefoldMiddleware(store=store, model=MODEL, config=CONFIG)]
    model = Scripted(script=door)
    agent = create_agent(model, [read_ledger], middleware=middleware, checkpointer=InMemorySaver())
    agent.invoke({"messages": [HumanMessage(TASK)]}, _config("t"))
    assert door.faults == []
    assert all(str(request.messages[-1]["content"]).startswith("[reminder ") for request in door.requests)
    assert all(request.text.count("[reminder ") == 1 for request in door.requests)
    with refold.open("t", store=store) as chat:
        assert [row.key.conversation for row in chat.store.conversations()] == ["t"]
        said = [one.message.text for one in chat.get_all()]
    assert said == [str(one.text) for one in agent.get_state(_config("t")).values["messages"]]


def test_a_run_without_a_thread_stays_one_conversation_whatever_happens_to_its_messages(
    tmp_path: Path,
) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    summarizes = SummarizationMiddleware(
        model=Scripted(script=lambda request: ScriptedReply("A summary.")),
        trigger=("messages", 20),
        keep=("messages", 6),
    )
    middleware = [summarizes, RefoldMiddleware(store=store, model=MODEL, config=CONFIG)]
    for runs in (1, 2):
        door = CheckedModel(LedgerReader(40), task=TASK)
        agent = create_agent(Scripted(script=door), [read_ledger], middleware=middleware)
        said = agent.invoke({"messages": [HumanMessage(TASK)]}, {"recursion_limit": STEPS})
        assert said["messages"][-1].text == f"The seal is {seal(3)}."
        assert set(said) == {"messages"}
        assert door.faults == []
        with refold.open("unused", store=store) as chat:
            assert len([*chat.store.conversations()]) == runs


def test_what_a_thread_removes_is_in_sight_and_what_it_says_otherwise_is_not(tmp_path: Path) -> None:
    middleware = RefoldMiddleware(store=f"sqlite:///{tmp_path}/a.db", model=MODEL, config=CONFIG)
    door = CheckedModel(lambda request: ScriptedReply("ok"))
    agent = create_agent(Scripted(script=door), [], middleware=[middleware], checkpointer=InMemorySaver())
    agent.invoke(
        {"messages": [HumanMessage("swordfish", id="a"), HumanMessage("tuna", id="b")]}, _config("t")
    )
    agent.update_state(_config("t"), {"messages": [HumanMessage("[removed]", id="a"), RemoveMessage(id="b")]})
    agent.invoke({"messages": [HumanMessage("hello")]}, _config("t"))
    assert [one["content"] for one in door.requests[-1].messages] == ["[removed]", "tuna", "ok", "hello"]
