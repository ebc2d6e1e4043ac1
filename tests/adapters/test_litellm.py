"""LiteLLM itself in a plain tool loop: awaited and not, by a router, and behind its proxy."""

import pytest

pytest.importorskip("litellm")

import asyncio
import copy
import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request as Posted
from urllib.request import urlopen

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or else it asks the network for prices

import litellm
from contract import (
    CONFIG,
    MODEL,
    STEPS,
    TASK,
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
)
from litellm.integrations.custom_logger import CustomLogger
from pages import printed
from pydantic import BaseModel

import refold
from refold.adapters.litellm import ChatMessage, LiteLLMConverter, RefoldHook
from refold.core.expiry import OWN_TOOLS
from refold.core.message import Message, Text, ToolResult, Usage
from refold.stores.store import Key, open_store
from refold.testing.model import Reply as ModelReply
from refold.testing.model import ScriptedModel

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": NUMBER}} for name in ("read_ledger", "fail")
]


class Scripted(litellm.CustomLLM):
    """A provider whose models say what their scripts tell them to."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, Script] = {}

    def model(self, script: Script) -> str:
        """The name of a model that it is the script of."""
        name = f"model-{id(script)}"
        self.scripts[name] = script
        return f"scripted/{name}"

    def completion(self, model: str, messages: Sequence[Any], **rest: Any) -> Any:
        tools = rest["optional_params"].get("tools") or ()
        said = [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in messages]
        reply = self.scripts[model](SentRequest(said, tools))
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.calls:
            message["tool_calls"] = [_written(call) for call in reply.calls]
        return litellm.ModelResponse(choices=[{"message": message}], model=model)

    async def acompletion(self, *args: Any, **rest: Any) -> Any:
        return self.completion(*args, **rest)


def _written(call: ScriptedCall) -> dict[str, Any]:
    function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


PROVIDER = Scripted()
litellm.custom_provider_map = [{"provider": "scripted", "custom_handler": PROVIDER}]


@pytest.fixture(autouse=True)
def nobody_else_is_called() -> Iterator[None]:
    yield
    litellm.callbacks = []
    for name in ("input_callback", "success_callback", "failure_callback", "_async_success_callback"):
        getattr(litellm, name).clear()


class Loop:
    """A tool loop as people write it: LiteLLM has none, and keeps nothing."""

    def __init__(self, hook: RefoldHook | None, thread: str | None, model: str) -> None:
        self.hook, self.thread = hook, thread
        self.history: list[Any] = []
        self.request: dict[str, Any] = {"model": model, "tools": [*TOOLS, *(hook.tools() if hook else [])]}
        if thread is not None:
            self.request["metadata"] = {"session_id": thread}

    def run(self, text: str) -> str:
        self.history.append({"role": "user", "content": text})
        complete = self.hook.completion if self.hook else litellm.completion
        while not self._is_done(complete(messages=self.history, **self.request)):
            pass
        return str(self.history[-1]["content"])

    async def arun(self, text: str, complete: Any = litellm.acompletion) -> str:
        self.history.append({"role": "user", "content": text})
        while not self._is_done(await complete(messages=self.history, **self.request)):
            pass
        return str(self.history[-1]["content"])

    def _is_done(self, response: Any) -> bool:
        message = response.choices[0].message
        self.history.append(self._kept(message))
        for call in message.tool_calls or ():
            said = self._called(call.function.name, json.loads(call.function.arguments))
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return not message.tool_calls

    def _kept(self, message: Any) -> Any:
        return json.loads(message.model_dump_json())

    def _called(self, name: str, arguments: dict[str, Any]) -> str:
        if name in OWN_TOOLS and self.hook is not None and self.thread is not None:
            return self.hook.call(name, arguments, conversation=self.thread)
        try:
            return {"read_ledger": ledger, "fail": failing}[name](**arguments)
        except ValueError as error:
            return f"Error: {error}"


class Masks(CustomLogger):
    """Another callback, which changes what is sent."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self._mask = mask

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any]:
        said = [{**one, "content": self._mask(one["content"] or "")} for one in kwargs["messages"]]
        return {**kwargs, "messages": said}


class LiteLLM:
    """A rig: what the loop keeps of a thread is in a file."""

    hooks = (RefoldHook,)

    def __init__(self, folder: Path, *, awaits: bool = True) -> None:
        self._folder, self._awaits, self.store = folder, awaits, f"sqlite:///{folder}/refold.db"
        self._adapters: dict[str, RefoldHook] = {}

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
        hook = self._adapter(config) if with_refold else None
        if mask and not self._awaits:
            pytest.skip("LiteLLM asks no callback before `completion`")
        litellm.callbacks = [*([Masks(mask)] if mask else []), *([hook] if hook else [])]
        loop, file = Loop(hook, thread, PROVIDER.model(script)), self._folder / f"{thread}.json"
        loop.history = self._history(thread)
        try:
            return asyncio.run(loop.arun(text)) if self._awaits else loop.run(text)
        finally:
            file.write_text(json.dumps(loop.history))

    def _adapter(self, config: Mapping[str, Any]) -> RefoldHook:
        """One for all threads."""
        known = self._adapters.get(repr(config))
        return known or self._adapters.setdefault(repr(config), hook_of(self.store, config))

    def again(self) -> "LiteLLM":
        return LiteLLM(self._folder, awaits=self._awaits)

    def stored(self, thread: str) -> list[tuple[str, str]]:
        return [(one["role"], one["content"] or "") for one in self._history(thread)]

    def raw(self, thread: str) -> list[bytes]:
        return [json.dumps(one).encode() for one in self._history(thread)]

    def _history(self, thread: str) -> list[Any]:
        file = self._folder / f"{thread}.json"
        return list(json.loads(file.read_text())) if file.exists() else []


RIG = LiteLLM


def hook_of(store: str, config: Mapping[str, Any] = CONFIG) -> RefoldHook:
    return RefoldHook(store=store, model=MODEL, config=dict(config))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/refold.db"


@pytest.fixture
def hook(store: str) -> RefoldHook:
    made = hook_of(store)
    litellm.callbacks = [made]
    return made


def kept(store: str, conversation: str, owner: str | None = None) -> list[str]:
    with refold.open(conversation, store=store, owner=owner) as chat:
        return [one.message.text for one in chat.get_all()]


def listed(store: str) -> list[Key]:
    """All conversations that say something, of all owners."""
    return [one.key for one in open_store(store).conversations() if one.next]


def echo(request: SentRequest) -> ScriptedReply:
    return ScriptedReply(f"You said {request.asked}")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(messages: Sequence[Any], script: Script = echo, **rest: Any) -> str:
    response = await litellm.acompletion(model=PROVIDER.model(script), messages=messages, **rest)
    return str(response.choices[0].message.content)


class TestAwaited(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> LiteLLM:
        return LiteLLM(tmp_path)


class TestWithoutAwait(AdapterContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> LiteLLM:
        return LiteLLM(tmp_path, awaits=False)


# What is sent


def test_loops_that_run_at_once_in_one_event_loop_do_not_mix(hook: RefoldHook) -> None:
    doors = {name: CheckedModel(LedgerReader(30), task=f"{TASK} ({name})") for name in "xy"}

    async def both() -> list[str]:
        loops = {name: Loop(hook, name, PROVIDER.model(door)) for name, door in doors.items()}
        return await asyncio.gather(*(loop.arun(f"{TASK} ({name})") for name, loop in loops.items()))

    assert asyncio.run(both()) == [f"The seal is {seal(3)}."] * 2
    assert [door.faults for door in doors.values()] == [[], []]


def test_a_router_is_fitted_too(hook: RefoldHook, store: str) -> None:
    door = CheckedModel(LedgerReader(40), task=TASK)
    router = litellm.Router(
        model_list=[{"model_name": "mine", "litellm_params": {"model": PROVIDER.model(door)}}]
    )
    loop = Loop(hook, "routed", "mine")
    assert asyncio.run(loop.arun(TASK, router.acompletion)) == f"The seal is {seal(3)}."
    assert door.faults == []
    assert len(kept(store, "routed")) == len(loop.history)


def test_litellms_own_trimming_loses_the_task_or_a_call_and_refold_does_not(store: str) -> None:
    class Trims(Loop):
        """Trims before each request, as LiteLLM's documentation has it."""

        def run(self, text: str) -> str:
            self.history.append(user(text))
            trimmed = self.history
            while not self._is_done(litellm.completion(messages=trimmed, **self.request)):
                trimmed = litellm.utils.trim_messages(self.history, max_tokens=5_000)
            return str(self.history[-1]["content"])

    def faults(hook: RefoldHook | None) -> set[str]:
        door = CheckedModel(LedgerReader(2 * STEPS, at_once=2), task=TASK)
        loop = (Loop if hook else Trims)(hook, "trimmed", PROVIDER.model(door))
        with suppress(litellm.APIConnectionError):  # the window is exceeded
            loop.run(TASK)
        assert hook is None or len(door.requests) > STEPS
        return set(door.faults)

    trimmed = faults(None)
    assert "the task is gone" in trimmed
    assert any("tool" in fault for fault in trimmed)
    assert faults(hook_of(store)) == set()


def test_what_the_loop_itself_trimmed_away_is_still_there(hook: RefoldHook, store: str) -> None:
    door = CheckedModel(echo, task="one")
    said = [user("one")]

    async def talk() -> None:
        for text in ("two", "three", "four"):
            said.append(
                {"role": "assistant", "content": await ask(said[-2:], door, metadata={"session_id": "t"})}
            )
            said.append(user(text))
        await ask(said[-2:], door, metadata={"session_id": "t"})

    asyncio.run(talk())
    assert door.faults == []
    assert [one["content"] for one in door.requests[-1].messages] == [one["content"] for one in said]
    assert kept(store, "t") == [*(one["content"] for one in said), "You said four"]


def test_images_and_what_refold_does_not_know_reach_the_model_as_they_were(hook: RefoldHook) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    text = {"type": "text", "text": "What is this?", "cache_control": {"type": "ephemeral"}}
    thought = {
        "role": "assistant",
        "content": "Hm.",
        "thinking_blocks": [{"type": "thinking", "signature": "x"}],
    }
    said = [user("Look."), thought, {"role": "user", "content": [text, image], "name": "ann"}]
    before = copy.deepcopy(said)
    door = CheckedModel(lambda request: ScriptedReply("A harbor."))
    assert asyncio.run(ask(said, door, metadata={"session_id": "t"})) == "A harbor."
    assert door.requests[0].messages == before
    assert said == before


def test_the_system_text_is_sent_first_and_may_change(hook: RefoldHook, store: str) -> None:
    door = CheckedModel(echo)

    def led(text: str, *said: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": text}, *said]

    async def talk() -> None:
        first = await ask(led("It is noon.", user("one")), door, metadata={"session_id": "t"})
        later = led("It is one.", user("one"), {"role": "assistant", "content": first}, user("two"))
        await ask(later, door, metadata={"session_id": "t"})

    asyncio.run(talk())
    assert [one["content"] for one in door.requests[1].messages] == [
        "It is one.",
        "one",
        "You said one",
        "two",
    ]
    assert kept(store, "t") == ["one", "You said one", "two", "You said two"]


def test_what_is_too_long_is_litellms_own_error_and_a_router_falls_back(store: str) -> None:
    doors = {"small": CheckedModel(echo), "large": CheckedModel(echo, window=100_000)}
    models = {name: PROVIDER.model(door) for name, door in doors.items()}
    windows = {models["small"]: {"window": 8_000}, models["large"]: {"window": 100_000}}
    litellm.callbacks = [RefoldHook(store=store, config={"models": windows})]
    router = litellm.Router(
        model_list=[{"model_name": name, "litellm_params": {"model": one}} for name, one in models.items()],
        context_window_fallbacks=[{"small": ["large"]}],
    )
    said = [user("word " * 20_000)]
    with pytest.raises(litellm.ContextWindowExceededError, match=r"needs .* tokens"):
        asyncio.run(litellm.acompletion(model=models["small"], messages=said))
    asyncio.run(router.acompletion(model="small", messages=said))
    assert [len(door.requests) for door in doors.values()] == [0, 1]


def test_what_is_no_message_is_a_bad_request_that_says_what_is_wrong(hook: RefoldHook) -> None:
    with pytest.raises(litellm.BadRequestError, match=r"message\.role"):
        asyncio.run(ask([{"role": "nobody", "content": "Hello"}]))
    with pytest.raises(litellm.BadRequestError, match="an object, not str"):
        asyncio.run(ask(["Hello"]))


def test_requests_that_are_no_chat_pass_as_they_are(hook: RefoldHook) -> None:
    request = {"model": "m", "input": ["Hello"], "messages": [user("Hello")]}
    assert asyncio.run(hook.async_pre_call_deployment_hook(request, "aembedding")) is None
    assert asyncio.run(hook.async_pre_call_hook(None, None, request, "embeddings")) is None


def test_the_hook_of_the_proxy_fits_for_who_calls_it_by_hand(hook: RefoldHook, store: str) -> None:
    said = [user(TASK)]
    for n in range(1, 60):
        call = _written(ScriptedCall(f"call_{n}", "read_ledger", {"number": n}))
        said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        said.append({"role": "tool", "tool_call_id": f"call_{n}", "content": ledger(n)})
    data = {"model": MODEL, "messages": said, "metadata": {"session_id": "by-hand"}}
    fitted = asyncio.run(hook.async_pre_call_hook(None, None, data, "acompletion"))
    assert fitted is not None
    door = CheckedModel(echo, task=TASK)
    door(SentRequest(fitted["messages"]))
    assert door.faults == []
    assert len(kept(store, "by-hand")) == len(said) == len(data["messages"])


def test_what_litellm_lets_nobody_change_is_told(hook: RefoldHook) -> None:
    """It asks no callback before `completion`, and what is given by its place is out of reach."""
    said = [user("Hello")]
    with ScriptedModel("Hello.") as model:
        there = {"api_base": model.openai_url, "api_key": "any"}
        with pytest.warns(match=r"call RefoldHook\.completion"):
            litellm.completion(model="openai/gpt-4.1", messages=said, **there)
        with pytest.warns(match="by keyword"):
            asyncio.run(litellm.acompletion("openai/gpt-4.1", said, **there))
        with warnings.catch_warnings(record=True, action="always") as told:
            hook.completion("openai/gpt-4.1", said, **there)
    assert not [one for one in told if "not fitted" in str(one.message)]
    assert [request["messages"] for request in model.requests] == [said] * 3


# What is kept


def test_an_answer_is_kept_once_however_it_is_sent_back(hook: RefoldHook, store: str) -> None:
    class AsItCame(Loop):
        def _kept(self, message: Any) -> Any:
            return message

    class InOwnWords(Loop):
        def _kept(self, message: Any) -> Any:
            calls = [call.model_dump() for call in message.tool_calls or ()]
            for call in calls:
                call["function"]["arguments"] = json.dumps(
                    json.loads(call["function"]["arguments"]), indent=1
                )
            text = f"{message.content or ''} "
            return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}

    for kind in (AsItCame, InOwnWords):
        name = kind.__name__
        loop = kind(hook, name, PROVIDER.model(CheckedModel(LedgerReader(8, wanted=8))))
        asyncio.run(loop.arun(TASK))
        assert len(kept(store, name)) == len(loop.history) == 18
    with refold.open("InOwnWords", store=store) as chat:
        inputs = [call.input for one in chat.get_all() for call in one.message.calls]
    assert inputs == [f'{{"number": {n}}}' for n in range(1, 9)]  # as the model wrote them


@pytest.mark.parametrize("awaits", [True, False])
def test_the_answer_of_a_stream_is_kept(store: str, awaits: bool) -> None:
    told = threading.Event()

    class Tells(RefoldHook):
        def _record_answer(self, id: Any, response: Any) -> None:
            super()._record_answer(id, response)
            told.set()

    hook = Tells(store=store, model=MODEL, config=CONFIG)
    litellm.callbacks = [hook]
    request: dict[str, Any] = {"model": "gpt-4o", "messages": [user("Hello")], "stream": True}
    request |= {"mock_response": "A good day to you.", "metadata": {"session_id": "streamed"}}

    async def awaited() -> None:
        async for _ in await litellm.acompletion(**request):
            pass
        assert await asyncio.to_thread(told.wait, 30)

    if awaits:
        asyncio.run(awaited())
    else:
        assert len(list(hook.completion(**request))) > 1
        assert told.wait(30)
    assert kept(store, "streamed") == ["Hello", "A good day to you."]


def test_what_a_provider_counted_is_kept_with_its_answer(hook: RefoldHook, store: str) -> None:
    with ScriptedModel(ModelReply("Hello.")) as model:
        there = {"api_base": model.openai_url, "api_key": "any", "metadata": {"session_id": "counted"}}
        asyncio.run(litellm.acompletion(model="openai/gpt-4.1", messages=[user("Hello")], **there))
    with refold.open("counted", store=store) as chat:
        usage = chat.get_all()[-1].message.usage
    assert usage is not None
    assert (usage.input, usage.output) == (100, 20)


# Which conversation


def test_a_changed_past_goes_on_in_a_conversation_of_its_own(hook: RefoldHook, store: str) -> None:
    door = CheckedModel(echo)

    async def talk() -> list[dict[str, Any]]:
        said = [user("one")]
        for text in ("two", "three"):
            said.append({"role": "assistant", "content": await ask(said, door, metadata={"session_id": "t"})})
            said.append(user(text))
        await ask(said, door, metadata={"session_id": "t"})
        changed = [*said[:2], user("other")]
        await ask(changed, door, metadata={"session_id": "t"})
        return changed

    changed = asyncio.run(talk())
    assert door.requests[-1].messages == changed
    assert len(kept(store, "t")) == 6
    (other,) = {one.conversation for one in listed(store)} - {"t"}
    assert other.startswith("t~h")
    assert kept(store, other) == ["one", "You said one", "other", "You said other"]


def test_a_changed_past_of_a_conversation_with_a_name_is_a_branch_of_it(hook: RefoldHook, store: str) -> None:
    """Also of one that belongs to a key of the proxy."""
    for metadata in ({}, {"user_api_key": "hash-of-ann"}):
        named = {"refold_conversation": "mine", **metadata}
        for text in ("one", "two"):
            assert asyncio.run(ask([user("Hello"), user(text)], metadata=named)) == f"You said {text}"
    assert {one.conversation for one in listed(store)} == {"mine", "mine~1"}
    for owner in {one.owner for one in listed(store)}:
        assert kept(store, "mine", owner) == ["Hello", "one", "You said one"]
        assert kept(store, "mine~1", owner) == ["Hello", "two", "You said two"]


def test_histories_of_one_session_do_not_mix(hook: RefoldHook, store: str) -> None:
    """Who traces puts all that is asked for one purpose into one session, whoever asks it."""
    reader, titles = (
        CheckedModel(LedgerReader(20), task=TASK),
        CheckedModel(lambda request: ScriptedReply("Herring")),
    )
    loop = Loop(hook, "traced", PROVIDER.model(reader))

    async def run() -> None:
        for n in range(3):
            await loop.arun(TASK if not n else "Again.")
            title = [user(f"A title for number {n}, please.")]
            assert await ask(title, titles, metadata={"session_id": "traced"}) == "Herring"
            assert titles.requests[-1].messages == title

    asyncio.run(run())
    assert reader.faults == []
    assert not any("title" in request.text for request in reader.requests)
    assert len(kept(store, "traced")) == len(loop.history)


def test_without_a_name_a_history_is_known_again_by_what_was_said(store: str) -> None:
    """Two that begin alike, and with the same words, are two; a new process goes on with the first."""
    doors = [CheckedModel(lambda request, n=n: ScriptedReply(f"{request.asked}, says {n}")) for n in range(2)]
    said = [[user("one")], [user("one")]]

    async def step(text: str) -> None:
        for history, door in zip(said, doors, strict=True):
            history.append({"role": "assistant", "content": await ask(history, door)})
            history.append(user(text))

    litellm.callbacks = [hook_of(store)]
    for text in ("two", "three", "four"):
        asyncio.run(step(text))
    for history, door in zip(said, doors, strict=True):
        assert door.requests[-1].messages == history[:-2]
    names = [one.conversation for one in listed(store)]
    assert len(names) == 2
    assert all(name.startswith("chat-") for name in names)
    litellm.callbacks = [hook_of(store)]
    asyncio.run(ask(said[0], doors[0]))
    assert [one.conversation for one in listed(store)] == names
    assert kept(store, min(names, key=len)) == [*(one["content"] for one in said[0]), "four, says 0"]


def test_the_same_request_twice_at_once_is_two_conversations_once_the_answers_differ(store: str) -> None:
    litellm.callbacks = [hook_of(store)]
    answers = iter(["heads", "tails"])
    door = CheckedModel(lambda request: ScriptedReply(next(answers)))

    async def toss() -> list[str]:
        return await asyncio.gather(*(ask([user("Toss a coin.")], door) for _ in range(2)))

    async def go_on(answer: str) -> None:
        said = [user("Toss a coin."), {"role": "assistant", "content": answer}, user("And?")]
        after = CheckedModel(echo)
        await ask(said, after)
        assert after.requests[0].messages == said

    for answer in asyncio.run(toss()):
        asyncio.run(go_on(answer))
    told = [kept(store, one.conversation) for one in listed(store)]
    assert sorted(one[1] for one in told) == ["heads", "tails"]
    assert all(len(one) == 4 for one in told)


def test_a_name_of_refolds_own_counts_more_than_a_session(hook: RefoldHook, store: str) -> None:
    names = {"session_id": "session", "refold_conversation": "mine"}
    asyncio.run(ask([user("Hello")], metadata=names))
    asyncio.run(ask([user("Good day")], litellm_session_id="other", metadata={"trace": 1}))
    assert [kept(store, name) for name in ("mine", "other", "session")] == [
        ["Hello", "You said Hello"],
        ["Good day", "You said Good day"],
        [],
    ]


def test_nobody_sees_what_was_said_with_another_key_of_the_proxy(hook: RefoldHook, store: str) -> None:
    door = CheckedModel(echo)
    for key in ("hash-of-ann", "hash-of-bob"):
        asyncio.run(ask([user(f"I am {key}")], door, metadata={"session_id": "s", "user_api_key": key}))
    assert [request.messages for request in door.requests] == [
        [user("I am hash-of-ann")],
        [user("I am hash-of-bob")],
    ]
    owners = {one.owner for one in listed(store)}
    assert len(owners) == 2
    assert "default" not in owners
    assert [len(kept(store, "s", owner)) for owner in owners] == [2, 2]


# How it is said


def test_what_is_written_anew_keeps_ids_and_what_stood_beside() -> None:
    long = "call_" + "x" * 80
    result = Message("tool", (ToolResult(long, "short"),))
    told = {"role": "tool", "tool_call_id": long, "content": "a long one", "name": "read", "extra": {"a": 1}}
    assert LiteLLMConverter().render(result, ChatMessage.of(told)).value == {**told, "content": "short"}
    assert LiteLLMConverter().render(result, None).value == {
        "role": "tool",
        "tool_call_id": long,
        "content": "short",
    }
    call = {**_written(ScriptedCall(long, "read", {})), "index": 0}
    asked = {"role": "assistant", "content": "See. " * 9, "tool_calls": [call], "reasoning_content": "hm"}
    parts = (Text("See."), *LiteLLMConverter().parse(ChatMessage.of(asked)).calls)
    shorter = LiteLLMConverter().render(Message("assistant", parts), ChatMessage.of(asked)).value
    assert shorter == {**asked, "content": "See."}
    without = LiteLLMConverter().render(Message("assistant", parts[:1]), ChatMessage.of(asked)).value
    assert without == {"role": "assistant", "content": "See.", "reasoning_content": "hm"}


def test_an_object_says_what_a_dict_says_whatever_its_class_names() -> None:
    class Loose(BaseModel, extra="allow"):
        pass

    said = {
        "role": "assistant",
        "content": "Hm.",
        "tool_calls": [_written(ScriptedCall("call_1", "f", {"n": 1}))],
    }
    call = said["tool_calls"][0]
    objects = Loose(**{**said, "tool_calls": [Loose(**{**call, "function": Loose(**call["function"])})]})
    assert ChatMessage.of(objects).digest == ChatMessage.of(said).digest
    assert LiteLLMConverter().parse(ChatMessage.of(objects)) == LiteLLMConverter().parse(ChatMessage.of(said))


@pytest.mark.parametrize(
    ("one", "other"), [('{"n": -1}', '{"n": -2}'), ('{"n": 1}', '{"n": "1"}'), ("{", "}")]
)
def test_calls_that_ask_for_something_else_are_told_apart(one: str, other: str) -> None:
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": text}}
        for text in (one, other)
    ]
    said = [ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [call]}) for call in calls]
    assert said[0].digest != said[1].digest


# The proxy and the page


@contextmanager
def proxy(folder: Path, upstream: str) -> Iterator[str]:
    """LiteLLM's proxy on this machine, with the hook in its configuration; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "hooks.py").write_text(
        "from refold.adapters.litellm import RefoldHook\n"
        f"hook = RefoldHook(store='sqlite:///{folder}/refold.db', config={{'models': {{'gpt-4.1':"
        " {'window': 8_000, 'max_output': 500}}})\n"
    )
    model = {"model": "openai/gpt-4.1", "api_base": upstream, "api_key": "any"}
    settings = {
        "model_list": [{"model_name": "mine", "litellm_params": model}],
        "litellm_settings": {"callbacks": "hooks.hook"},
        "general_settings": {"master_key": "sk-test"},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    start = "from litellm import run_server; run_server()"
    command = [sys.executable, "-u", "-c", start, "--config", "config.yaml", "--host", "127.0.0.1"]
    running = subprocess.Popen(
        [*command, "--port", str(port)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert running.stdout is not None
        told = list[str]()
        while not told or "Uvicorn running" not in told[-1]:
            told.append(running.stdout.readline())
            assert told[-1], "".join(told)
        threading.Thread(target=running.stdout.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        running.terminate()
        running.wait(30)


@pytest.mark.skipif(not find_spec("fastapi_sso"), reason="needs litellm[proxy]")
def test_behind_the_proxy_every_request_of_a_long_loop_fits(tmp_path: Path) -> None:
    reader = LedgerReader(40, wanted=40)
    door = CheckedModel(reader, task=TASK)

    def script(request: dict[str, Any]) -> ModelReply:
        sent = SentRequest(request["messages"], request["tools"])
        reply = door(sent)
        calls = tuple((call.tool, call.arguments) for call in reply.calls)
        return ModelReply(reply.text, calls=calls, usage=Usage(door.tokens(sent), 20))

    def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
        head = {"Authorization": "Bearer sk-test", "Content-Type": "application/json"}
        head["x-litellm-session-id"] = "proxied"
        with urlopen(Posted(url, json.dumps(body).encode(), head), timeout=60) as answer:
            message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message

    history: list[dict[str, Any]] = [user(TASK)]
    with ScriptedModel(script) as model, proxy(tmp_path, model.openai_url) as url:
        while history[-1]["role"] != "assistant":
            message = ask(url, {"model": "mine", "messages": history, "tools": TOOLS})
            history.append(message)
            for call in message.get("tool_calls") or ():
                said = ledger(**json.loads(call["function"]["arguments"]))
                history.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    assert history[-1]["content"] == f"The seal is {seal(40)}."
    assert door.faults == []
    assert len(door.requests) == 41
    assert kept(f"sqlite:///{tmp_path}/refold.db", "proxied") == [one["content"] or "" for one in history]


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    days = iter(["monday", "tuesday"])

    def script(request: Any) -> Any:
        day = next(days, None)
        return ModelReply(calls=(("read_log", {"day": day}),)) if day else "On Monday: the disk was full."

    assert printed("litellm.md", tmp_path, script).strip() == "On Monday: the disk was full."
    assert len(kept(f"sqlite:///{tmp_path}/agent.db", "logs")) == 6
