"""Strands' own agent, with a scripted model, with and without refold."""

import pytest

pytest.importorskip("strands")

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

from contract import (
    CONFIG,
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
from pages import program
from strands import Agent, tool
from strands.agent.conversation_manager import (
    ConversationManager,
    NullConversationManager,
    SlidingWindowConversationManager,
    SummarizingConversationManager,
)
from strands.hooks import BeforeModelCallEvent
from strands.middleware import InvokeModelStage
from strands.models import Model
from strands.plugins import Plugin
from strands.session import FileSessionManager
from strands.types.exceptions import ContextWindowOverflowException
from strands.vended_plugins.context_injector import ContextInjector

import refold
from refold.adapters.strands import RefoldPlugin, StrandsConverter
from refold.core.message import Usage


class Scripted(Model):
    """A model that says what a script tells it to."""

    def __init__(self, script: Script, *, is_stateful: bool = False, **config: Any) -> None:
        self.script, self._is_stateful, self._config = script, is_stateful, {"model_id": MODEL, **config}
        self.seen: list[Any] = []
        """The messages of each request, as Strands has them."""

    @property
    def stateful(self) -> bool:
        return self._is_stateful

    def update_config(self, **config: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return self._config

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(
        self, messages: Any, tool_specs: Any = None, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        self.seen.append(messages)
        tools = [
            tool_declaration(spec["name"], spec["description"], spec["inputSchema"]["json"])
            for spec in tool_specs or ()
        ]
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        request = SentRequest([*system, *(one for each in messages for one in as_chat(each))], tools)
        for event in events(self.script(request)):
            yield event


class Refusing(Scripted):
    """The same, but a request that is too long is refused in Strands' own words."""

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            async for event in super().stream(*args, **kwargs):
                yield event
        except WindowExceeded as error:
            raise ContextWindowOverflowException(str(error)) from error


def events(reply: ScriptedReply) -> list[Any]:
    said = list[Any]()
    if reply.text:
        said += [{"contentBlockStart": {"start": {}}}, {"contentBlockDelta": {"delta": {"text": reply.text}}}]
        said.append({"contentBlockStop": {}})
    for call in reply.calls:
        use = {"toolUseId": call.id, "name": call.tool}
        said.append({"contentBlockStart": {"start": {"toolUse": use}}})
        said.append({"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(call.arguments)}}}})
        said.append({"contentBlockStop": {}})
    stop = {"messageStop": {"stopReason": "tool_use" if reply.calls else "end_turn"}}
    return [{"messageStart": {"role": "assistant"}}, *said, stop]


def as_chat(message: Any) -> list[dict[str, Any]]:
    """A message as OpenAI's chat has it: one for each result, then the rest."""
    said, calls, chat = list[Any](), list[Any](), list[dict[str, Any]]()
    for block in message["content"]:
        match block:
            case {"text": text}:
                said.append({"type": "text", "text": text})
            case {"image": {"format": form, "source": {"bytes": data}}}:
                url = f"data:image/{form};base64,{b64encode(data).decode()}"
                said.append({"type": "image_url", "image_url": {"url": url}})
            case {"toolUse": {"toolUseId": id, "name": name, "input": input}}:
                function = {"name": name, "arguments": json.dumps(input)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"toolResult": {"toolUseId": id, "content": content}}:
                chat.append({"role": "tool", "tool_call_id": id, "content": _text(content)})
    if message["role"] == "assistant":
        return [{"role": "assistant", "content": said or None, **({"tool_calls": calls} if calls else {})}]
    return [*chat, {"role": "user", "content": said}] if said else chat


def _text(content: Any) -> str:
    return "".join(block.get("text", "") for block in content)


@tool
def read_ledger(number: int) -> str:
    """Reads a ledger."""
    return ledger(number)


@tool
def fail(number: int) -> str:
    """Fails."""
    return failing(number)


class Masks(Plugin):
    """Another plugin, which changes what is sent."""

    name = "masks"

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self._mask = mask

    def init_agent(self, agent: Agent) -> None:
        agent.add_middleware(
            InvokeModelStage.Input, lambda one: one.replace(messages=self._masked(one.messages))
        )

    def _masked(self, value: Any) -> Any:
        match value:
            case str():
                return self._mask(value)
            case dict():
                return {key: self._masked(one) for key, one in value.items()}
            case list():
                return [*map(self._masked, value)]
        return value


class Strands:
    """A rig: threads are kept by Strands' file sessions."""

    hooks = (RefoldPlugin,)

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
        plugin = RefoldPlugin(store=self.store, conversation=thread, model=MODEL, config=dict(config))
        agent = Agent(
            Scripted(script),
            tools=[read_ledger, fail],
            plugins=[*([Masks(mask)] if mask else []), *([plugin] if with_refold else [])],
            session_manager=self._session(thread),
            callback_handler=None,
        )
        return str(agent(text)).strip()

    def _session(self, thread: str) -> FileSessionManager:
        return FileSessionManager(thread, storage_dir=str(self._folder / "sessions"))

    def again(self) -> "Strands":
        return Strands(self._folder)

    def stored(self, thread: str) -> list[tuple[str, str]]:
        kept = self._session(thread).list_messages(thread, "default")
        return [said for one in kept for said in spoken(one.to_message())]

    def raw(self, thread: str) -> list[bytes]:
        kept = self._session(thread).list_messages(thread, "default")
        return [json.dumps(one.to_dict()).encode() for one in kept]


def spoken(message: Any) -> list[tuple[str, str]]:
    """Role and text of a message, or of each result in it."""
    results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
    return [("tool", _text(result["content"])) for result in results] or [
        (message["role"], _text(message["content"]))
    ]


RIG = Strands


class TestStrands(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Strands:
        return Strands(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/refold.db"


def plugin(store: str, conversation: str | None = "t") -> RefoldPlugin:
    return RefoldPlugin(store=store, conversation=conversation, model=MODEL, config=CONFIG)


def agent_of(model: Scripted, *plugins: Any, **more: Any) -> Agent:
    return Agent(model, tools=[read_ledger, fail], plugins=list(plugins), callback_handler=None, **more)


def kept(store: str, conversation: str = "t") -> list[tuple[str, str]]:
    with refold.open(conversation, store=store) as chat:
        return [(one.message.role, one.message.text) for one in chat.get_all()]


def in_sight(store: str) -> list[str]:
    with refold.open("t", store=store) as chat:
        return [message.text for message in chat.view().messages]


def spoken_by(agent: Agent) -> list[tuple[str, str]]:
    return [said for message in agent.messages for said in spoken(message)]


def said(role: str, text: str) -> Any:
    return {"role": role, "content": [{"text": text}]}


def echo(request: SentRequest) -> ScriptedReply:
    return ScriptedReply(f"You said {request.messages[-1]['content'][-1]['text']}")


# Ways to run an agent


def called(agent: Agent, text: str) -> str:
    return str(agent(text))


def awaited(agent: Agent, text: str) -> str:
    return str(asyncio.run(agent.invoke_async(text)))


def streamed(agent: Agent, text: str) -> str:
    async def run() -> str:
        told = [event["data"] async for event in agent.stream_async(text) if "data" in event]
        return str(told[-1])

    return asyncio.run(run())


@pytest.mark.parametrize("run", [called, awaited, streamed])
def test_it_works_whichever_way_the_agent_is_run(run: Callable[[Agent, str], str], store: str) -> None:
    door = CheckedModel(LedgerReader(40), task=TASK)
    agent = agent_of(Scripted(door), plugin(store), conversation_manager=NullConversationManager())
    assert run(agent, TASK).strip() == f"The seal is {seal(3)}."
    assert door.faults == []
    assert kept(store) == spoken_by(agent)


def test_one_plugin_serves_agents_that_run_at_once(store: str) -> None:
    shared, doors = (
        plugin(store, None),
        [CheckedModel(LedgerReader(25), task=f"{TASK} ({n})") for n in range(3)],
    )
    agents = [agent_of(Scripted(door), shared) for door in doors]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one.invoke_async(f"{TASK} ({n})") for n, one in enumerate(agents)))

    assert [str(one).strip() for one in asyncio.run(all_of_them())] == [f"The seal is {seal(3)}."] * 3
    assert [door.faults for door in doors] == [[], [], []]
    assert [kept(store, agent.session_id)[0][1] for agent in agents] == [f"{TASK} ({n})" for n in range(3)]


# What Strands does to its own messages


def test_the_task_of_a_long_turn_outlives_the_sliding_window(store: str) -> None:
    """Strands drops what came first, inside the turn, when its model refuses a request."""
    bare, door = CheckedModel(LedgerReader(), task=TASK), CheckedModel(LedgerReader(), task=TASK)
    with suppress(Exception):
        agent_of(Refusing(bare))(TASK)
    assert "the task is gone" in bare.faults
    agent = agent_of(Refusing(door), plugin(store))
    assert str(agent(TASK)).strip() == f"The seal is {seal(3)}."
    assert len(door.requests) > STEPS
    assert door.faults == []


def test_what_is_trimmed_away_at_the_end_of_a_run_is_in_the_record_and_in_sight(store: str) -> None:
    agent = agent_of(Scripted(CheckedModel(LedgerReader(60))), plugin(store))
    agent(TASK)
    assert len(agent.messages) <= 40
    assert TASK not in str(agent.messages)
    before = kept(store)
    assert before[:3] == [("user", TASK), ("assistant", "Now ledger 1."), ("tool", ledger(1))]
    door = CheckedModel(LedgerReader(0), task=TASK)
    agent.model = Scripted(door)
    assert str(agent("Once more?")).strip() == f"The seal is {seal(3)}."
    assert door.faults == []
    assert kept(store)[: len(before)] == before
    assert kept(store)[len(before)] == ("user", "Once more?")


def test_a_pinned_task_is_there_in_a_new_process(store: str, tmp_path: Path) -> None:
    """Strands counts what it removed, so that a session it restores begins after what was pinned."""

    def run(script: Script, text: str, *plugins: RefoldPlugin) -> str:
        thread = "pinned" if plugins else "bare"
        session = FileSessionManager(thread, storage_dir=str(tmp_path))
        manager = SlidingWindowConversationManager(window_size=20, pin_first=1)
        agent = agent_of(Scripted(script), *plugins, session_manager=session, conversation_manager=manager)
        return str(agent(text)).strip()

    bare, door = CheckedModel(LedgerReader(0), task=TASK), CheckedModel(LedgerReader(0), task=TASK)
    run(LedgerReader(15), TASK)
    run(bare, "Go on.")
    assert "the task is gone" in bare.faults
    run(LedgerReader(15), TASK, plugin(store))
    assert run(door, "Go on.", plugin(store)) == f"The seal is {seal(3)}."
    assert door.faults == []


class KeepsLast(ConversationManager):
    """People's own: the last few messages, before every call."""

    def register_hooks(self, registry: Any, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, lambda event: self.apply_management(event.agent))

    def apply_management(self, agent: Agent, **kwargs: Any) -> None:
        del agent.messages[:-3]

    def reduce_context(self, agent: Agent, e: Exception | None = None, **kwargs: Any) -> None: ...


def test_a_result_is_not_parted_from_its_call(store: str) -> None:
    bare, door = (
        CheckedModel(LedgerReader(20, at_once=2), task=TASK),
        CheckedModel(LedgerReader(20, at_once=2), task=TASK),
    )
    agent_of(Scripted(bare), conversation_manager=KeepsLast())(TASK)
    assert any("tool" in fault for fault in bare.faults)
    agent = agent_of(Scripted(door), plugin(store), conversation_manager=KeepsLast())
    assert str(agent(TASK)).strip() == f"The seal is {seal(3)}."
    assert door.faults == []
    assert [text for role, text in kept(store) if text.startswith("Ledger")] == [
        ledger(n) for n in range(1, 21)
    ]


def test_a_summary_that_strands_makes_does_not_make_anything_be_said_twice(store: str) -> None:
    manager = SummarizingConversationManager()
    agent = agent_of(Scripted(LedgerReader(12)), plugin(store), conversation_manager=manager)
    agent(TASK)
    before = kept(store)
    agent.model = Scripted(lambda request: ScriptedReply("Ledgers were read."))
    manager.reduce_context(agent)
    assert TASK not in str(agent.messages)
    agent.model = Scripted(door := CheckedModel(LedgerReader(0), task=TASK))
    assert str(agent("Once more?")).strip() == f"The seal is {seal(3)}."
    assert door.faults == []
    assert kept(store)[: len(before)] == before
    later = kept(store)[len(before) :]
    assert later[:2] == [("user", "Ledgers were read."), ("user", "Once more?")]
    assert not any(text.startswith("Ledger ") for _, text in later)


def test_what_was_redacted_is_not_shown_again(store: str) -> None:
    class Guarded(Scripted):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async for event in super().stream(*args, **kwargs):
                if "messageStop" in event and len(self.seen) == 1:
                    yield {"redactContent": {"redactUserContentMessage": "[taken out]"}}
                yield event

    model = Guarded(lambda request: ScriptedReply("I see."))
    agent = agent_of(model, plugin(store))
    agent("The password is swordfish.")
    assert in_sight(store) == ["[taken out]", "I see."]
    agent("What did I say?")
    assert [text for message in model.seen[-1] for _, text in spoken(message)] == [
        "[taken out]",
        "I see.",
        "What did I say?",
    ]
    assert len(kept(store)) == 4


def test_what_was_changed_in_place_is_shown_as_it_is_now(store: str) -> None:
    model = Scripted(echo)
    agent = agent_of(model, plugin(store))
    agent("one")
    agent.messages[0]["content"][0]["text"] = "uno"
    agent("two")
    assert [spoken(message)[0][1] for message in model.seen[-1]] == ["uno", "You said one", "two"]
    assert in_sight(store)[0] == "uno"
    assert [text for _, text in kept(store)] == ["one", "You said one", "two", "You said two"]


def test_a_history_that_goes_on_from_earlier_goes_on_in_a_conversation_of_its_own(store: str) -> None:
    agent = agent_of(Scripted(echo), plugin(store))
    agent("one")
    agent("two")
    del agent.messages[2:]
    agent("other")
    assert [text for _, text in kept(store)] == ["one", "You said one", "two", "You said two"]
    assert [text for _, text in kept(store, "t~1")] == ["one", "You said one", "other", "You said other"]


# What is stored, and where


def test_a_history_that_comes_without_ids_is_not_stored_again(store: str) -> None:
    """Strands gives new ids to messages that an application kept for itself."""
    history = [said("user", "one"), said("assistant", "You said one")]
    for text in ("two", "three"):
        agent_of(Scripted(echo), plugin(store), messages=deepcopy(history))(text)
        history += [said("user", text), said("assistant", f"You said {text}")]
    assert kept(store) == [(one["role"], one["content"][0]["text"]) for one in history]


def test_an_agent_that_remembers_nothing_goes_on_in_its_conversation(store: str) -> None:
    agent_of(Scripted(echo), plugin(store))("one")
    model = Scripted(echo)
    agent_of(model, plugin(store))("two")
    assert [text for message in model.seen[0] for _, text in spoken(message)] == [
        "one",
        "You said one",
        "two",
    ]
    assert [text for _, text in kept(store)] == ["one", "You said one", "two", "You said two"]


def test_without_a_name_the_conversation_is_the_session(store: str, tmp_path: Path) -> None:
    for id, name in ((None, "s1"), ("writer", "s1/writer")):
        for text in ("one", "two"):
            session = FileSessionManager("s1", storage_dir=str(tmp_path))
            agent_of(Scripted(echo), plugin(store, None), session_manager=session, agent_id=id)(text)
        assert [text for _, text in kept(store, name)] == ["one", "You said one", "two", "You said two"]


def test_an_agent_whose_messages_were_taken_away_begins_another_conversation(store: str) -> None:
    """As Strands does with an agent that is a tool, before each call."""
    model = Scripted(echo)
    agent = agent_of(model, plugin(store, None))
    for text in ("one", "two"):
        agent.messages = []
        agent(text)
    assert [len(messages) for messages in model.seen] == [1, 1]
    assert kept(store, f"{agent.session_id}/1")[0] == ("user", "two")


def test_a_model_that_keeps_the_conversation_itself_is_only_listened_to(store: str) -> None:
    model = Scripted(echo, is_stateful=True)
    agent = agent_of(model, plugin(store))
    agent("one")
    agent("two")
    assert [len(messages) for messages in model.seen] == [1, 1]
    assert [text for _, text in kept(store)] == ["one", "You said one", "two", "You said two"]


def test_search_and_expand_are_tools_like_others(store: str) -> None:
    agent = agent_of(Scripted(LedgerReader(20)), plugin(store), record_direct_tool_call=False)
    agent(TASK)
    found = agent.tool.refold_search(query=f'"{seal(7)}"')
    assert f"seal {seal(7)}" in found["content"][0]["text"]
    refused = agent.tool.refold_expand(at=9_999)
    assert refused["content"][0]["text"]


# What a request is


@pytest.mark.parametrize("wanted", [{"max_tokens": 3_000}, {"params": {"max_completion_tokens": 3_000}}])
def test_the_model_is_known_by_its_name_and_the_length_of_its_answer_is_left_to_it(
    wanted: dict[str, Any], store: str
) -> None:
    reserve = {"compact": {"output_reserve": 100, "system_reserve": 0, "safety_buffer": 0}}
    models = {"small": {"window": WINDOW, "max_output": 4_000}}
    config = {"models": models, "agents": {"default": reserve}}
    door = CheckedModel(LedgerReader(40), task=TASK, answer=3_000)
    own = RefoldPlugin(store=store, conversation="t", config=config)
    agent = agent_of(Scripted(door, model_id="small", **wanted), own, system_prompt="Be brief.")
    assert str(agent(TASK)).strip() == f"The seal is {seal(3)}."
    assert door.faults == []
    assert door.requests[-1].messages[0] == {"role": "system", "content": "Be brief."}


def test_user_and_assistant_take_turns_even_where_strands_lets_them_not(store: str) -> None:
    def breaks(request: SentRequest) -> ScriptedReply:
        raise ConnectionError("the model is gone")

    model = Scripted(breaks)
    agent = agent_of(model, plugin(store))
    with pytest.raises(ConnectionError):
        agent(TASK)
    model.script = door = CheckedModel(LedgerReader(60), task=TASK)
    agent("Go on.")
    assert door.faults == []
    for messages in model.seen:
        assert all(one["role"] != two["role"] for one, two in pairwise(messages))
        assert messages[0]["content"][0] == {"text": TASK}


def test_what_a_user_says_beside_results_comes_after_all_of_them(store: str) -> None:
    calls = [{"toolUse": {"toolUseId": id, "name": "read_ledger", "input": {}}} for id in ("a", "b")]
    result = {"toolResult": {"toolUseId": "a", "status": "success", "content": [{"text": "Read."}]}}
    history = [
        said("user", TASK),
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [result, {"text": "Hurry."}]},
    ]
    model = Scripted(door := CheckedModel(lambda request: ScriptedReply("Done.")))
    agent_of(model, plugin(store), messages=history)("Go on.")
    assert door.faults == []
    *_, answers = model.seen[0]
    assert [next(iter(block)) for block in answers["content"]] == ["toolResult", "toolResult", "text", "text"]
    assert [(role, text) for role, text in kept(store)][2:5] == [
        ("tool", "Read."),
        ("user", "Hurry."),
        ("user", "Go on."),
    ]


@pytest.mark.parametrize("first", [True, False])
def test_what_other_plugins_put_into_a_request_reaches_the_model_and_not_the_record(
    first: bool, store: str
) -> None:
    injector = ContextInjector(lambda context: "It is noon.", trigger="everyTurn")
    plugins = [injector, plugin(store)] if first else [plugin(store), injector]
    model = Scripted(door := CheckedModel(LedgerReader(40), task=TASK))
    agent_of(model, *plugins)(TASK)
    assert all("It is noon." in messages[-1]["content"][-1]["text"] for messages in model.seen)
    assert sum(text.count("It is noon.") for _, text in kept(store)) == 0
    assert len(door.requests) > 40


def test_what_other_plugins_put_into_a_request_stays_in_it_when_its_message_is_too_long(store: str) -> None:
    @tool
    def read_all() -> str:
        """Reads everything."""
        return "".join(map(ledger, range(60)))

    injector = ContextInjector(lambda context: "It is noon.", trigger="everyTurn")
    replies = iter([ScriptedReply("", (ScriptedCall("1", "read_all", {}),)), ScriptedReply("Read.")])
    model = Scripted(CheckedModel(lambda request: next(replies)))
    agent = agent_of(model, injector, plugin(store))
    agent.tool_registry.process_tools([read_all])
    assert str(agent(TASK)).strip() == "Read."
    result, injected = model.seen[-1][-1]["content"]
    assert "[refold #" in result["toolResult"]["content"][0]["text"]
    assert injected == {"text": "It is noon."}


def test_what_another_plugin_leaves_out_is_in_sight(store: str) -> None:
    class Shortens(Plugin):
        name = "shortens"

        def init_agent(self, agent: Agent) -> None:
            agent.add_middleware(InvokeModelStage.Input, lambda one: one.replace(messages=one.messages[-3:]))

    model = Scripted(door := CheckedModel(LedgerReader(20), task=TASK))
    agent = agent_of(model, Shortens(), plugin(store), conversation_manager=NullConversationManager())
    assert str(agent(TASK)).strip() == f"The seal is {seal(3)}."
    assert door.faults == []
    assert kept(store) == spoken_by(agent)


def test_what_others_do_to_a_request_does_not_change_the_agent(store: str) -> None:
    def spoils(context: Any) -> Any:
        for message in context.messages:
            for block in message["content"]:
                block.clear()
        return context.replace(messages=[said("user", "spoiled")])

    agent = agent_of(
        Scripted(LedgerReader(30)), plugin(store), conversation_manager=NullConversationManager()
    )
    agent(TASK)
    before = deepcopy(agent.messages)
    agent.add_middleware(InvokeModelStage.Input, spoils)
    agent.model = Scripted(lambda request: ScriptedReply("Spoiled."))
    agent("Go on.")
    assert agent.messages[: len(before)] == before


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x20\0\0\0\x20"
IMAGE = {"image": {"format": "png", "source": {"bytes": PNG}}}
BLOCKS = {
    "text": {"text": "Hello."},
    "image": IMAGE,
    "image-elsewhere": {
        "image": {"format": "png", "source": {"location": {"type": "s3", "uri": "s3://a/b"}}}
    },
    "document": {"document": {"format": "pdf", "name": "deed", "source": {"bytes": b"%PDF-1.7"}}},
    "document-of-text": {"document": {"format": "md", "name": "notes", "source": {"bytes": b"# Notes"}}},
    "video": {"video": {"format": "mp4", "source": {"bytes": b"moving"}}},
    "audio": {"audio": {"format": "wav", "source": {"bytes": b"sounding"}}},
    "unknown": {"hologram": {"shape": b"round", "of": ["light"]}},
    "call": {"toolUse": {"toolUseId": "1", "name": "look", "input": {"at": ["sea", 1.5, None]}}},
    "result": {"toolResult": {"toolUseId": "1", "status": "success", "content": [{"text": "Blue."}, IMAGE]}},
    "failure": {"toolResult": {"toolUseId": "1", "status": "error", "content": [{"text": "Fog."}]}},
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_what_is_said_again_from_the_record_is_what_was_said(block: Any, store: str) -> None:
    role = "assistant" if "toolUse" in block else "user"
    converter = StrandsConverter()
    message = converter.parse({"role": role, "content": [deepcopy(block)]})
    with refold.open("t", store=store) as chat:
        chat.append(message)
        (stored,) = chat.get_all()
    assert converter.render(stored.message, None) == {"role": role, "content": [block]}


def test_what_is_not_for_the_record_stays_with_a_message_that_is_said_otherwise() -> None:
    thinking = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "signed"}}}
    cited = {"citationsContent": {"content": [{"text": "It is blue."}], "citations": [{"title": "Sea"}]}}
    mark = {"cachePoint": {"type": "default"}}
    original = {"role": "assistant", "content": [thinking, cited, mark, {"text": "long"}], "tracking_id": "a"}
    converter, before = StrandsConverter(), deepcopy(original)
    message = converter.parse(original)
    shorter = refold.Message("assistant", (*message.parts[:2], refold.Text("short")))
    written = converter.render(shorter, original)
    assert written["content"][0] is not thinking
    assert written == {
        "role": "assistant",
        "content": [thinking, cited, {"text": "short"}, mark],
        "tracking_id": "a",
    }
    assert converter.render(message, None)["content"] == [{"text": "It is blue."}, {"text": "long"}]
    assert original == before


def test_cache_points_that_move_change_nothing() -> None:
    converter = StrandsConverter()
    plain = said("user", "Hello.")
    marked = {**plain, "content": [*plain["content"], {"cachePoint": {"type": "default"}}]}
    assert converter.parse(plain) == converter.parse(marked)


def test_images_reach_the_model_as_they_were_also_when_strands_has_dropped_them(store: str) -> None:
    @tool
    def photograph(number: int) -> Any:
        """Takes a picture."""
        return {"status": "success", "content": [{"text": f"Picture {number}"}, IMAGE]}

    replies = iter(
        [
            ScriptedReply("", (ScriptedCall("1", "photograph", {"number": 1}),)),
            *[ScriptedReply("A harbor.")] * 3,
        ]
    )
    model = Scripted(lambda request: next(replies))
    manager = SlidingWindowConversationManager(window_size=2)
    agent = agent_of(model, plugin(store), conversation_manager=manager)
    agent.tool_registry.process_tools([photograph])
    agent([{"text": "What is this?"}, IMAGE])
    agent("And now?")
    assert "What is this?" not in str(agent.messages)
    agent("Still?")
    for shown in model.seen[1:]:
        assert shown[0]["content"] == [{"text": "What is this?"}, IMAGE]
        assert shown[2]["content"][0]["toolResult"]["content"] == [{"text": "Picture 1"}, IMAGE]
    assert [spoken(message)[0][1] for message in model.seen[-1]] == [
        "What is this?",
        "",
        "Picture 1",
        "A harbor.",
        "And now?",
        "A harbor.",
        "Still?",
    ]


def test_what_a_call_took_is_kept_with_its_answer(store: str) -> None:
    used = {"inputTokens": 100, "outputTokens": 20, "totalTokens": 150, "cacheReadInputTokens": 30}

    class Costly(Scripted):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async for event in super().stream(*args, **kwargs):
                yield event
            yield {"metadata": {"usage": used, "metrics": {"latencyMs": 1}}}

    agent_of(Costly(echo), plugin(store))("one")
    with refold.open("t", store=store) as chat:
        assert chat.get_all()[-1].message.usage == Usage(130, 20, 30)


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """With another model: nothing else of it is replaced."""
    days = iter(["monday", "tuesday"])

    def script(request: SentRequest) -> ScriptedReply:
        day = next(days, None)
        calls = (ScriptedCall(f"call_{day}", "read_log", {"day": day}),) if day else ()
        return ScriptedReply("" if day else "On Monday: the disk was full.", calls)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strands.models.BedrockModel", lambda **config: Scripted(script, **config))
    exec(compile(program("strands.md"), "strands.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip().endswith("On Monday: the disk was full.")
    with refold.open("logs", store=f"sqlite:///{tmp_path}/agent.db") as chat:
        assert chat.get_count() == 6


def hides(value: Any) -> Any:
    match value:
        case str():
            return value.replace("herring", "[fish]")
        case dict():
            return {key: hides(one) for key, one in value.items()}
        case list():
            return [hides(one) for one in value]
    return value


def test_what_another_plugin_hides_stays_hidden_when_it_is_shortened(store: str) -> None:
    class Hides(Plugin):
        name = "hides"

        def init_agent(self, agent: Agent) -> None:
            agent.add_middleware(
                InvokeModelStage.Input, lambda one: one.replace(messages=hides(one.messages))
            )

    model = Scripted(lambda request: ScriptedReply(""))
    agent = agent_of(model, Hides(), plugin(store), conversation_manager=NullConversationManager())
    for question in (f"{TASK} I like herring.", "Which fish? Not herring?"):
        model.script = door = CheckedModel(LedgerReader(30))
        agent(question)
        assert door.faults == []
        assert not any("herring" in request.text for request in door.requests)
        assert any("[refold #" in request.text for request in door.requests)
    assert kept(store) == spoken_by(agent)
    assert "herring" not in "".join(in_sight(store))


def test_a_message_that_another_plugin_puts_into_a_request_stays_in_it(store: str) -> None:
    class Reminds(Plugin):
        name = "reminds"

        def init_agent(self, agent: Agent) -> None:
            agent.add_middleware(InvokeModelStage.Input, self._reminded)

        def _reminded(self, context: Any) -> Any:
            number = said("user", f"[reminder {len(context.messages)}]")
            return context.replace(messages=[*context.messages, number])

    model = Scripted(door := CheckedModel(LedgerReader(20), task=TASK))
    agent = agent_of(model, Reminds(), plugin(store), conversation_manager=NullConversationManager())
    agent(TASK)
    assert door.faults == []
    assert all("[reminder " in messages[-1]["content"][-1]["text"] for messages in model.seen)
    assert all(request.text.count("[reminder ") == 1 for request in door.requests)
    assert kept(store) == spoken_by(agent)
