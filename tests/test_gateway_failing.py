"""What the gateway does when its own part fails, is slow, or meets an upstream that should not be trusted."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from gates import Gate, Quiet, answering, gate
from refold.config.config import load_config
from refold.core.errors import StoreError
from refold.serve import gateway, incoming
from refold.serve.service import PROBED, SECRET, Service
from refold.stores.memory import MemoryStore
from refold.stores.store import Key, Store
from served import WAIT_S, until

JSON, STREAM = "application/json", "text/event-stream"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Asked(SimpleNamespace):
    """A request as an upstream got it: `headers` by their names in small letters, and `body`."""


@contextmanager
def upstream(*replies: tuple[str, bytes], **headers: str) -> Iterator[tuple[Any, list[Asked]]]:
    """Answers with these bytes of these types, the last again and again, and with these headers; and what it
    was asked. It has a name: of an address, clients keep no cookies.
    """
    asked: list[Asked] = []

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(Asked(headers={k.lower(): v for k, v in self.headers.items()}, body=body))
            kind, data = replies[min(len(asked), len(replies)) - 1]
            self.send_response(200)
            for name, value in {"content-type": kind, "content-length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

    with answering(Handler, "localhost") as addresses:
        yield addresses, asked


def completion(message: dict[str, Any], finish: str = "stop") -> tuple[str, bytes]:
    said = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return JSON, json.dumps({"id": "c", "object": "chat.completion", "choices": [said]}).encode()


def chunks(*deltas: tuple[dict[str, Any], str | None]) -> tuple[str, bytes]:
    events = [
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": d, "finish_reason": f}],
        }
        for d, f in deltas
    ]
    return STREAM, "".join(f"data: {line}\n\n" for line in [*map(json.dumps, events), "[DONE]"]).encode()


HI = completion({"content": "Hi"})
HELLO = {"model": "gpt-5", "messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/chat/completions"
KEY = {"authorization": "Bearer sk-x"}


def call(tool: str, n: int = 0) -> dict[str, Any]:
    function = {"name": tool, "arguments": '{"at": 0}'}
    return {"index": n, "id": f"call_{n}", "type": "function", "function": function}


def post(gated: Gate, path: str = CHAT, wait_s: float = WAIT_S, headers: Any = None, **more: Any) -> Any:
    url, named = gated.openai_url + path, KEY | (headers or {})
    return httpx.post(url, json={**HELLO, **more}, headers=named, timeout=wait_s)


def bypass(gated: Gate, **headers: str) -> str | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return post(gated, headers=named).headers.get("x-refold-bypass")


def ours(found: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in found.headers.items() if name.startswith("x-refold")}


# A store that fails


class Forgetful(MemoryStore):
    """A store that takes what is asked, and then nothing more."""

    appended = 0

    def append(self, *args: Any, **how: Any) -> Any:
        self.appended += 1
        if self.appended > 1:
            raise StoreError("the disk is full")
        return super().append(*args, **how)


def test_where_a_look_up_cannot_be_kept_the_request_goes_as_it_came() -> None:
    looks = completion({"content": None, "tool_calls": [call("refold_expand")]}, "tool_calls")
    with upstream(looks, HI) as (up, asked), gate(Forgetful(), up) as gated:
        found = post(gated, tools=[TOOL])
    assert found.json() == json.loads(HI[1])
    assert ours(found) == {"x-refold-bypass": "store"}
    assert [len(one.body["tools"]) for one in asked] == [3, 1]


def test_a_stream_in_which_a_look_up_cannot_be_kept_ends_as_an_error() -> None:
    looks = chunks(({"role": "assistant", "tool_calls": [call("refold_expand")]}, None), ({}, "tool_calls"))
    got: list[bytes] = []
    with upstream(looks) as (up, asked), gate(Forgetful(), up) as gated:
        request = {"json": {**HELLO, "tools": [TOOL], "stream": True}, "headers": KEY, "timeout": WAIT_S}
        with (
            httpx.stream("POST", gated.openai_url + CHAT, **request) as found,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            got.extend(found.iter_raw())
    assert b"event: error" in b"".join(got)
    assert b'finish_reason":"' not in b"".join(got)
    assert len(asked) == 1


def test_a_call_of_the_clients_tool_is_handed_on_also_where_it_cannot_be_kept() -> None:
    calls = [call("refold_expand"), call("look", 1)]
    both = completion({"content": None, "tool_calls": calls}, "tool_calls")
    with upstream(both) as (up, asked), gate(Forgetful(), up) as gated:
        (choice,) = post(gated, tools=[TOOL]).json()["choices"]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["look"]
    assert len(asked) == 1


def test_calls_that_nobody_understands_are_handed_on() -> None:
    odd = completion({"content": "Hi", "tool_calls": [call("refold_expand") | {"id": 5}]}, "tool_calls")
    with upstream(odd) as (up, _), gate(MemoryStore(), up) as gated:
        found = post(gated, tools=[TOOL])
    assert found.status_code == 200
    assert found.json()["choices"][0]["message"]["content"] == "Hi"


class Shaky(MemoryStore):
    """A store that fails, or hangs, when it is told to."""

    is_down = False
    hangs_for = ""
    """The conversation that it hangs with."""
    hung = 0

    def __init__(self) -> None:
        super().__init__()
        self.free = Event()

    def read(self, key: Key, /, *args: Any) -> Any:
        if key == PROBED and self.is_down:
            raise StoreError("the disk is full")
        if key.conversation == self.hangs_for:
            self.hung += 1
            self.free.wait(WAIT_S)
        return super().read(key, *args)

    def locate(self, owner: str, ids: Any, /) -> Any:
        if self.is_down and not self.hangs_for:
            raise StoreError("the disk is full")
        return super().locate(owner, ids)


@pytest.fixture
def shaky() -> Shaky:
    return Shaky()


@pytest.fixture
def gated(shaky: Shaky, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """In front of it; a store that was down is tried again by the next request."""
    monkeypatch.setattr(gateway, "STORE_RETRY_S", 0)
    with upstream(HI) as (up, _), gate(shaky, up) as one:
        yield one
        shaky.free.set()


def test_one_slow_conversation_does_not_send_the_others_past_us(
    gated: Gate, shaky: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(gateway, "STORE_RETRY_S", WAIT_S)
    shaky.hangs_for = "slow"
    assert bypass(gated, x_refold_conversation="slow") == "late"
    assert bypass(gated) is None


def test_a_store_that_hangs_and_is_not_healthy_is_waited_for_once(
    gated: Gate, shaky: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(gateway, "STORE_RETRY_S", WAIT_S)
    shaky.is_down, shaky.hangs_for = True, "slow"
    assert bypass(gated, x_refold_conversation="slow") == "store"
    hung = shaky.hung
    assert bypass(gated, x_refold_conversation="slow") == "store"
    assert shaky.hung == hung


def test_a_request_that_fails_for_another_reason_leaves_the_next_one_to_try_the_store(
    gated: Gate, shaky: Shaky
) -> None:
    shaky.is_down = True
    assert bypass(gated) == "store"
    shaky.is_down = False
    assert bypass(gated, x_refold_agent="nobody") == "setting"
    assert bypass(gated) is None


def test_after_a_failure_one_request_tries_the_store_while_the_others_bypass_it(
    gated: Gate, shaky: Shaky
) -> None:
    shaky.is_down = True
    assert bypass(gated) == "store"
    shaky.is_down, shaky.hangs_for = False, "slow"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bypass, gated, x_refold_conversation="slow")
        until(lambda: shaky.hung)
        assert [bypass(gated) for _ in range(3)] == ["store"] * 3
        assert not first.done()
        shaky.free.set()
        assert first.result() is None
    assert bypass(gated) is None


def test_a_client_that_leaves_leaves_the_next_one_to_try_the_store(
    gated: Gate, shaky: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "TIMEOUT_S", 2 * WAIT_S)
    shaky.is_down = True
    assert bypass(gated) == "store"
    shaky.is_down, shaky.hangs_for = False, "slow"
    with pytest.raises(httpx.ReadTimeout):
        post(gated, headers={"x-refold-conversation": "slow"}, wait_s=1.0)
    assert shaky.hung
    until(lambda: bypass(gated) is None)


def test_a_large_request_is_read_while_others_are_answered(
    gated: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = Event(), Event()

    def read(*how: Any) -> Any:
        begun.set()
        assert answered.wait(WAIT_S / 3)
        return incoming.read_request(*how)

    monkeypatch.setattr(gateway, "read_request", read)
    messages = [{"role": "user", "content": f"{n}"} for n in range(3_000)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, gated, messages=messages)
        assert begun.wait(WAIT_S)
        assert httpx.get(f"{gated.url}/healthz", timeout=WAIT_S).status_code == 200
        answered.set()
        assert "x-refold-bypass" not in asked.result().headers


# Whose a key is


class Shelfless:
    """A store with nothing but logs."""

    def __init__(self) -> None:
        inner = MemoryStore()
        for verb in ("append", "read", "find", "erase", "conversations", "close"):
            setattr(self, verb, getattr(inner, verb))


def test_a_key_has_one_owner_however_many_ask_first() -> None:
    one = Service(load_config({}), cast(Store, Shelfless()))

    async def first() -> list[str]:
        return await asyncio.gather(*(one.owner_of_key("sk-x") for _ in range(8)))

    try:
        assert len(set(asyncio.run(first()))) == 1
    finally:
        one.close()


class Raced(MemoryStore):
    """Two look for the secret before one of them keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self._both = Barrier(2)

    def note(self, name: str, /) -> bytes | None:
        found = super().note(name)
        if name == SECRET and found is None:
            self._both.wait(WAIT_S)
        return found


def test_a_key_has_one_owner_in_processes_that_begin_at_once() -> None:
    store = Raced()
    services = [Service(load_config({}), store) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: asyncio.run(one.owner_of_key("sk-x")), services))
    third = Service(load_config({}), store)
    assert {*found, asyncio.run(third.owner_of_key("sk-x"))} == {found[0]}
    for one in (*services, third):
        one.close()


# What an upstream says and gets


def test_no_cookie_is_kept_for_an_upstream_nor_handed_to_the_client() -> None:
    with upstream(HI, set_cookie="id=4711; Path=/") as (up, asked), gate(MemoryStore(), up) as gated:
        found = [post(gated), post(gated), post(gated, "/embeddings")]
    assert len(asked) == 3
    assert not any("cookie" in one.headers for one in asked)
    assert not any("set-cookie" in one.headers for one in found)


def test_an_upstream_neither_opens_us_to_other_origins_nor_speaks_for_us() -> None:
    said = {
        "access_control_allow_origin": "*",
        "Access_Control_Allow_Credentials": "true",
        "x_refold_bypass": "store",
        "X_Refold_Conversation": "another",
        "x_ratelimit_remaining": "7",
    }
    with upstream(HI, **said) as (up, _), gate(MemoryStore(), up) as gated:
        ways = [
            post(gated),
            httpx.post(f"{gated.openai_url}/embeddings", json={}, headers=KEY, timeout=WAIT_S),
        ]
    for found in ways:
        assert found.headers["x-ratelimit-remaining"] == "7"
        assert not any(name.startswith("access-control") for name in found.headers)
        assert "x-refold-bypass" not in found.headers
        assert "another" not in found.headers.get("x-refold-conversation", "")


def test_a_key_goes_to_its_own_upstream_only() -> None:
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-sonnet-5"}
    message |= {"content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"}
    with upstream(HI) as (one, at_openai), upstream((JSON, json.dumps(message).encode())) as (two, at_claude):
        to = {"openai": one.openai, "anthropic": two.url}
        with gate(MemoryStore(), one, upstreams=to) as gated:
            for path in (CHAT, "/responses", "/embeddings"):
                post(gated, path)
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                key = {"x-api-key": "sk-ant-y"}
                httpx.post(gated.anthropic_url + path, json=HELLO, headers=key, timeout=WAIT_S)
    assert [one.headers.get("authorization") for one in at_openai] == ["Bearer sk-x"] * 3
    assert [one.headers.get("x-api-key") for one in at_claude] == ["sk-ant-y"] * 2
    assert "sk-ant-y" not in str(at_openai)
    assert "sk-x" not in str(at_claude)
