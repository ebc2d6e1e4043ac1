"""How streams end on their way through the gateway, whatever an upstream makes of them."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from gates import Gate, Quiet, answering, gate
from refold.serve import streaming as streaming_module
from refold.stores.memory import MemoryStore

WAIT_S = 10
Stream = Callable[[], Iterable[bytes]]


@contextmanager
def streaming(*rounds: Stream) -> Iterator[tuple[Any, list[Any]]]:
    """An upstream that answers with these streams, one piece after another; and what it was asked."""
    asked: list[Any] = []

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                for piece in rounds[len(asked) - 1]():
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
            except OSError:  # nobody listens any longer
                self.close_connection = True

    with answering(Handler) as addresses:
        yield addresses, asked


def written(*values: Any) -> bytes:
    named = [(f"event: {one['type']}\n" if "type" in one else "", json.dumps(one)) for one in values]
    return "".join(f"{name}data: {data}\n\n" for name, data in named).encode()


def at_once(*values: Any, end: bytes = b"") -> Stream:
    return lambda: [written(*values) + end]


def told(found: bytes) -> list[Any]:
    """What a client is told, but for the end mark."""
    lines = [line[6:] for line in found.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# What models say in the three dialects


DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


COUNTS = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
USAGE = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": COUNTS}
SEARCH = {"name": "refold_search", "arguments": '{"query": "x"}'}
OWN = {"index": 0, "id": "1", "type": "function", "function": SEARCH}
CHAT = [chunk({"role": "assistant", "content": "Hi"}), chunk({}, "stop")]
CHAT_OWN = [chunk({"role": "assistant", "tool_calls": [OWN]}), chunk({}, "tool_calls"), USAGE]


def response(id: str, *output: Any, status: str = "completed") -> dict[str, Any]:
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    about = {"id": id, "object": "response", "model": "gpt-5", "usage": usage}
    return {**about, "status": status, "output": output}


CALL = {"type": "function_call", "id": "fc", "call_id": "1", **SEARCH, "status": "completed"}
TEXT = {"type": "output_text", "text": "Hi", "annotations": []}
MESSAGE = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [TEXT]}
CREATED = {"type": "response.created", "response": response("r", status="in_progress")}


def responded(item: dict[str, Any]) -> list[Any]:
    return [
        CREATED,
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response("r", item)},
    ]


BEGUN = {"id": "m", "type": "message", "role": "assistant", "model": "claude-sonnet-5", "content": []}
START = {"type": "message_start", "message": {**BEGUN, "stop_reason": None, "usage": {"input_tokens": 1}}}


def blocks(block: dict[str, Any], delta: dict[str, Any], stop: str) -> list[Any]:
    return [
        START,
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 1}},
    ]


CLAUDE = blocks({"type": "text", "text": ""}, {"type": "text_delta", "text": "Hi"}, "end_turn")
CLAUDE_OWN = blocks(
    {"type": "tool_use", "id": "1", "name": "refold_search", "input": {}},
    {"type": "input_json_delta", "partial_json": '{"query": "x"}'},
    "tool_use",
)
OVER = {"type": "message_stop"}
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
FAILED = {"error": {"type": "server_error", "message": "Overloaded"}}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOLS = {
    "chat": [{"type": "function", "function": LOOK}],
    "responses": [{"type": "function", **LOOK}],
    "anthropic": [{"name": "look", "input_schema": LOOK["parameters"]}],
}


def ask(gated: Gate, dialect: str, history: Iterable[Any] = (), **more: Any) -> httpx.Response:
    said = [*history, {"role": "user", "content": "Hello"}]
    match dialect:
        case "chat":
            url, body = f"{gated.openai_url}/chat/completions", {"model": "gpt-5", "messages": said}
        case "responses":
            url, body = f"{gated.openai_url}/responses", {"model": "gpt-5", "input": said}
        case _:
            url = f"{gated.anthropic_url}/v1/messages"
            body = {"model": "claude-sonnet-5", "max_tokens": 100, "messages": said}
    headers = {"authorization": "Bearer sk-test"}
    return httpx.post(url, json={**body, "stream": True, **more}, headers=headers, timeout=WAIT_S)


# Errors


ROUNDS = {
    "chat": (at_once(*CHAT_OWN, end=DONE), at_once(CHAT[0], FAILED, end=DONE), FAILED),
    "responses": (at_once(*responded(CALL)), at_once(CREATED, OVERLOADED), OVERLOADED),
    "anthropic": (at_once(*CLAUDE_OWN, OVER), at_once(*CLAUDE[:3], OVERLOADED), OVERLOADED),
}


@pytest.mark.parametrize("dialect", ROUNDS)
def test_an_error_after_our_own_tools_were_used_is_the_last_that_is_told(dialect: str) -> None:
    first, second, error = ROUNDS[dialect]
    with streaming(first, second) as (upstream, asked), gate(MemoryStore(), upstream) as gated:
        found = ask(gated, dialect, tools=TOOLS[dialect])
        assert len(asked) == 2
        assert told(found.content)[-1] == error
        assert "Hi" not in gated.texts()


def test_the_usage_at_the_end_is_that_of_all_rounds() -> None:
    first, second = at_once(*CLAUDE_OWN, OVER), at_once(*CLAUDE, OVER)
    with streaming(first, second) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        found = ask(gated, "anthropic", tools=TOOLS["anthropic"])
        (delta,) = [one for one in told(found.content) if one["type"] == "message_delta"]
        assert delta["usage"] == {"input_tokens": 2, "output_tokens": 2}


@pytest.mark.parametrize("tools", [[], TOOLS["anthropic"]], ids=["plain", "with tools"])
def test_a_message_without_its_stop_was_cut_off(tools: list[Any]) -> None:
    with streaming(at_once(*CLAUDE)) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(gated, "anthropic", **({"tools": tools} if tools else {}))
        assert gated.texts() == ["Hello"]


ENDED_BADLY = {
    "chat": at_once(*CHAT, FAILED, end=DONE),
    "anthropic": at_once(*CLAUDE, OVERLOADED),
}


@pytest.mark.parametrize("has_tools", [False, True], ids=["plain", "with tools"])
@pytest.mark.parametrize("dialect", ENDED_BADLY)
def test_an_error_before_a_stream_is_over_is_told_and_nothing_is_kept(dialect: str, has_tools: bool) -> None:
    more = {"tools": TOOLS[dialect]} if has_tools else {}
    with streaming(ENDED_BADLY[dialect]) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        found = ask(gated, dialect, **more)
        assert told(found.content)[-1] == (FAILED if dialect == "chat" else OVERLOADED)
        assert gated.texts() == ["Hello"]


def test_a_chat_that_finishes_without_an_end_mark_is_complete() -> None:
    with streaming(at_once(*CHAT)) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        assert ask(gated, "chat").content == written(*CHAT)
        assert gated.texts() == ["Hello", "Hi"]


# Time


class Counted:
    """A pattern, and how many bytes it was searched for in."""

    def __init__(self, pattern: Any) -> None:
        self.pattern, self.bytes = pattern, 0

    def finditer(self, text: bytes, start: int = 0) -> Any:
        self.bytes += len(text) - start
        return self.pattern.finditer(text, start)


def test_a_long_event_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(streaming_module._EVENT_END)
    monkeypatch.setattr(streaming_module, "_EVENT_END", counted)
    data = written(chunk({"role": "assistant", "content": "abc" * 2**20}), CHAT[1]) + DONE
    pieces = [data[n : n + 2**15] for n in range(0, len(data), 2**15)]
    with streaming(lambda: pieces) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        assert ask(gated, "chat").content == data
    assert len(data) <= counted.bytes < 1.1 * len(data)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_events_that_come_byte_by_byte_are_understood(newline: bytes) -> None:
    events = [written(one).replace(b"\n", newline) for one in (*CLAUDE, OVER)]

    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for one in b"".join(events):
                yield bytes([one])

    async def read() -> list[tuple[bytes, Any]]:
        return [one async for some in streaming_module._events(Content()) for one in some]  # type: ignore[arg-type]

    assert asyncio.run(read()) == list(zip(events, [*CLAUDE, OVER], strict=True))


OVER_AND_OUT = {
    "chat": written(*CHAT) + DONE,
    "responses": written(*responded(MESSAGE)),
    "anthropic": written(*CLAUDE, OVER),
}


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "chatty"])
@pytest.mark.parametrize("dialect", OVER_AND_OUT)
def test_nobody_waits_for_an_upstream_to_hang_up(
    dialect: str, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_module, "CLOSE_S", 0.2)
    hangs_up = threading.Event()

    def holding() -> Iterator[bytes]:
        yield OVER_AND_OUT[dialect]
        while not hangs_up.wait(2 * WAIT_S if is_silent else 0.05):
            yield b": still here\n\n"

    with streaming(holding) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        try:
            assert ask(gated, dialect).content.startswith(OVER_AND_OUT[dialect])
            assert gated.texts() == ["Hello", "Hi"]
        finally:
            hangs_up.set()


# Several answers


def test_all_of_several_answers_are_finished_in_a_conversation_that_has_our_tools() -> None:
    several = [chunk({"role": "assistant", "content": "Hi"}, index=n) for n in range(2)]
    several += [chunk({}, "stop", n) for n in range(2)]
    history = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Hi"}]
    one, two = at_once(*CHAT, end=DONE), at_once(*several, end=DONE)
    with streaming(one, two, one) as (upstream, asked), gate(MemoryStore(), upstream) as gated:
        ask(gated, "chat", messages=history[:1], tools=TOOLS["chat"])
        found = ask(gated, "chat", history, tools=TOOLS["chat"], n=2)
        assert told(found.content) == several
        more = [*history, {"role": "user", "content": "Hello"}, history[1]]
        ask(gated, "chat", more, tools=TOOLS["chat"])
        assert len(gated.conversations()) == 1
    assert [len(one["tools"]) for one in asked] == [3, 1, 3]
