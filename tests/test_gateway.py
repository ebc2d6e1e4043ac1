"""The official SDKs through the gateway, in front of an upstream that refuses whatever a provider would."""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import loops
from gates import Gate, Quiet, answering, gate
from refold.core.errors import StoreError
from refold.stores.memory import MemoryStore
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import open_store
from served import until
from upstream import Upstream
from upstream_model import is_intact_call, is_intact_text

STEPS = int(os.environ.get("REFOLD_STEPS", "60"))
"""Of a tool loop; 300 take minutes, most of which the SDKs need for themselves."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server


@pytest.fixture
def gated(upstream: Upstream, tmp_path: Path) -> Iterator[Gate]:
    upstream.reset()
    with gate(SQLiteStore(tmp_path / "gate.db"), upstream) as one:
        yield one


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.with_raw_response.create(model="gpt-5", messages=messages, **more)


def answer(client: openai.OpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    said = ask(client, messages, **more).parse().choices[0].message
    return {"role": "assistant", "content": said.content}


# Long loops


LOOPS = {"chat": loops.chat_loop, "responses": loops.responses_loop, "anthropic": loops.anthropic_loop}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_long_tool_loop_never_gets_a_400_and_every_reply_is_intact(
    gated: Gate, name: str, stream: bool
) -> None:
    base = gated.anthropic_url if name == "anthropic" else gated.openai_url
    done = LOOPS[name](base, STEPS, stream)
    assert done.steps == STEPS
    assert all(map(is_intact_text, done.texts))
    assert all(is_intact_call(*call) for call in done.calls)
    (key,) = gated.conversations()
    said = [one for one in gated.said(key) if one.message.role == "assistant"]
    assert len(said) == len(done.replies)
    calls = [(call.call_id, call.tool, json.loads(call.input)) for one in said for call in one.message.calls]
    assert calls == done.calls
    assert [one.message.text for one in said if one.message.text] == done.texts
    assert all(one.message.usage for one in said)
    assert len(gated.bodies()) == len(done.replies)
    assert len(json.dumps(gated.bodies()[-1])) < 40_000 < len(str(done.history))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", LOOPS)
def test_expand_and_search_are_answered_unseen_by_the_client(gated: Gate, name: str, stream: bool) -> None:
    base = gated.anthropic_url if name == "anthropic" else gated.openai_url
    done = LOOPS[name](base, 60, stream, task="You may use refold tools. " + loops.TASK)
    assert not any(tool.startswith("refold") for _, tool, _ in done.calls)
    (key,) = gated.conversations()
    own = [call for one in gated.said(key) for call in one.message.calls if call.tool.startswith("refold")]
    assert own
    answered = [one for one in gated.said(key) if one.message.results and one.tools[0].startswith("refold")]
    assert [one.message.results[0].call_id for one in answered] == [call.call_id for call in own]
    assert done.steps == 60


def test_without_tools_no_handles_are_shown_and_none_are_added(gated: Gate) -> None:
    client, history = gated.openai(), [user("Tell me about the harbor.")]
    for n in range(12):
        history += [answer(client, history), user(f"{n}: " + "more of the ledger " * 150)]
    answer(client, history)
    last = gated.bodies()[-1]
    assert "tools" not in last
    assert len(last["messages"]) < len(history)
    assert "[refold " in json.dumps(last["messages"])
    assert "[refold #" not in json.dumps(last["messages"])


# Which conversation


def test_two_clients_at_once_never_mix(gated: Gate) -> None:
    barrier = threading.Barrier(6)

    def talk(n: int) -> list[str]:
        client, history = gated.openai(), [user("The same first words.")]
        barrier.wait()
        for step in range(8):
            history.append(answer(client, history))
            history.append(user(f"client {n}, step {step}" if step else "The same second words."))
        answer(client, history)
        return [one["content"] for one in history]

    with ThreadPoolExecutor(6) as pool:
        histories = list(pool.map(talk, range(6)))
    stored = [gated.texts(key) for key in gated.conversations()]
    for n, history in enumerate(histories):
        (mine,) = [texts for texts in stored if f"client {n}, step 7" in texts]
        assert mine[:-1] == history


def test_the_same_beginning_continues_a_conversation_however_it_is_written(gated: Gate) -> None:
    client, history = gated.openai(), [user("Hello")]
    history += [answer(client, history), user("Go on")]
    history[0] = {"content": [{"text": "Hello", "type": "text"}], "role": "user"}
    answer(client, history)
    assert gated.texts() == ["Hello", history[1]["content"], "Go on", gated.texts()[-1]]


def test_an_edited_history_forks(gated: Gate) -> None:
    client, history = gated.openai(), [user("Hello")]
    history += [answer(client, history), user("Go on")]
    history.append(answer(client, history))
    first = ask(client, [*history, user("More")])
    other = ask(client, [*history[:2], user("Go elsewhere")])
    old, new = gated.conversations()
    assert (first.headers["x-refold-conversation"], other.headers["x-refold-conversation"]) == (
        old[1],
        new[1],
    )
    assert gated.texts(new)[:3] == ["Hello", history[1]["content"], "Go elsewhere"]
    assert gated.texts(old)[:5] == [*(one["content"] for one in history), "More"]
    parent = next(iter(gated.service.store.conversations())).parent
    assert parent == old


def test_a_history_that_was_answered_already_forks_there(gated: Gate) -> None:
    client = gated.openai()
    one, two = (ask(client, [user("Hello")]).headers["x-refold-conversation"] for _ in range(2))
    assert one != two
    assert [texts[0] for texts in map(gated.texts, gated.conversations())] == ["Hello", "Hello"]


def test_a_retry_after_a_failure_continues(gated: Gate) -> None:
    client = gated.openai()
    with pytest.raises(openai.InternalServerError):
        ask(client, [user("Hello")], extra_headers={"x-upstream-mode": "fail-500"})
    answer(client, [user("Hello")])
    assert gated.texts()[0] == "Hello"
    assert len(gated.said()) == 2


def test_another_key_never_sees_a_conversation(gated: Gate) -> None:
    history = [user("Hello")]
    history += [answer(gated.openai("sk-one"), history), user("Go on")]
    answer(gated.openai("sk-two"), history)
    one, two = gated.conversations()
    assert one.owner != two.owner
    assert "sk-one" not in one.owner
    assert len(gated.said(one)) == 2


def test_the_access_log_names_the_owner_of_what_the_gateway_stored(
    gated: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "refold.request"):
        for key in ("sk-one", "sk-two"):
            ask(gated.openai(key), [user("Hello")])
        lines = until(
            lambda: len(found := [one for one in caplog.records if hasattr(one, "facts")]) == 2 and found
        )
    facts = [line.facts for line in lines]
    logged = [(one["owner"], one["conversation"]) for one in facts]
    assert sorted(logged) == sorted((key.owner, key.conversation) for key in gated.conversations())
    assert len({owner for owner, _ in logged}) == 2


def test_a_header_names_the_conversation(gated: Gate) -> None:
    named = {"x-refold-conversation": "my task/42"}
    client, history = gated.openai(), [user("Hello")]
    history.append(answer(client, history, extra_headers=named))
    answer(client, [*history, user("Go on")], extra_headers=named)
    ask(client, [user("Hello")])
    one, two = gated.conversations()
    assert one.conversation == "my task/42"
    assert len(gated.said(one)) == 4
    assert len(gated.said(two)) == 2
    edited = ask(client, [*history, user("Go elsewhere")], extra_headers=named)
    assert edited.headers["x-refold-conversation"] not in (one.conversation, two.conversation)


def test_a_name_is_enough_where_the_client_sends_only_the_end(gated: Gate) -> None:
    named, client = {"x-refold-conversation": "mine"}, gated.openai()
    history = [user("One")]
    for n in range(8):
        history = [*history, answer(client, history[-3:], extra_headers=named), user(f"More {n}")]
    found = ask(client, [user("Something else")], extra_headers=named)
    assert found.headers["x-refold-conversation"] == "mine"
    assert gated.texts()[:-1] == [one["content"] for one in history[:-1]] + ["Something else"]
    assert len(gated.bodies()[-1]["messages"]) == len(history)


def test_a_conversation_that_others_began_is_continued_under_its_name(gated: Gate) -> None:
    client = gated.openai()
    owner = gated.conversations()[0].owner if ask(client, [user("Who am I?")]) else ""
    from refold.session.api import open

    session = open("mine", store=gated.service.store, owner=owner)
    session.append([user("Hello"), {"role": "assistant", "content": "Yes?"}])
    history = [user("Hello"), {"role": "assistant", "content": "Yes?"}, user("Go on")]
    answer(client, history, extra_headers={"x-refold-conversation": "mine"})
    assert [one.message.text for one in session.get_all()][:3] == ["Hello", "Yes?", "Go on"]
    assert len(session.get_all()) == 4


@pytest.mark.parametrize("engine", ["sqlite", "postgresql", "valkey"])
def test_a_client_may_alternate_between_gateways_on_one_store(
    upstream: Upstream, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fixtures = {"postgresql": "postgres_url", "valkey": "valkey_url"}
    url = request.getfixturevalue(fixtures[engine]) if engine in fixtures else f"sqlite:///{tmp_path}/a.db"
    with gate(open_store(url), upstream) as one, gate(open_store(url), upstream) as other:
        history = [user("Hello")]
        for n in range(6):
            history += [answer((one, other)[n % 2].openai(), history), user(f"Go on {n}")]
        assert one.texts() == [message["content"] for message in history[:-1]]
        edited = [*history[:4], user("Go elsewhere")]
        answer(other.openai(), edited)
        old, new = one.conversations()
        assert one.texts(new)[:5] == [message["content"] for message in edited]
        assert len(one.said(old)) == 12


class Unlocated(MemoryStore):
    """A store that finds ids only in a conversation that is known."""

    locate = None  # type: ignore[assignment]


def test_a_store_that_locates_nothing_needs_the_conversations_name(upstream: Upstream) -> None:
    with gate(Unlocated(), upstream) as gated:
        client, history = gated.openai(), [user("Hello")]
        assert ask(client, history).headers["x-refold-bypass"] == "setting"
        for _ in range(3):
            history += [
                answer(client, history, extra_headers={"x-refold-conversation": "mine"}),
                user("Go on"),
            ]
        assert len(gated.said()) == 6


def test_a_conversation_is_known_again_after_a_restart(upstream: Upstream, tmp_path: Path) -> None:
    history = [user("Hello")]
    for _ in range(3):
        with gate(SQLiteStore(tmp_path / "a.db"), upstream) as gated:
            history += [answer(gated.openai(), history), user("Go on")]
            assert len(gated.conversations()) == 1


def test_system_text_that_changes_is_sent_as_it_is_now(gated: Gate) -> None:
    client, history = gated.openai(), [user("Hello")]
    for hour in range(3):
        system = {"role": "system", "content": f"It is {hour} o'clock."}
        history += [answer(client, [system, *history]), user("Go on")]
        assert gated.bodies()[-1]["messages"][0] == system
    assert len(gated.conversations()) == 1
    claude, messages = gated.anthropic(), [user("Hello")]
    for hour in range(3):
        reply = claude.messages.create(
            model="claude-sonnet-5", max_tokens=100, system=f"It is {hour}.", messages=messages
        )
        messages += [{"role": "assistant", "content": reply.content}, user("Go on")]
        assert gated.bodies()[-1]["system"] == f"It is {hour}."
    assert len(gated.conversations()) == 2


# What goes upstream


def test_what_nobody_edited_goes_as_it_came(gated: Gate) -> None:
    body = {
        "model": "gpt-5",
        "messages": [
            user("Hello"),
            {"role": "assistant", "content": "Yes?", "name": "assistant_1", "refusal": None},
            user("Go on"),
        ],
        "temperature": 0.25,
        "metadata": {"a": "b"},
        "user": "somebody",
    }
    headers = {
        "authorization": "Bearer sk-test",
        "openai-organization": "org",
        "x-custom": "a, b",
        "cookie": "no",
    }
    headers |= {"x-refold-conversation": "mine", "user-agent": "mine/1"}
    found = httpx.post(f"{gated.openai_url}/chat/completions?trace=1", json=body, headers=headers, timeout=30)
    assert found.status_code == 200
    (seen,) = gated.upstream.seen()
    assert seen["body"] == body
    assert seen["path"].endswith("/v1/chat/completions?trace=1")
    sent = {name.lower(): value for name, value in dict(seen["headers"]).items()}
    assert sent["openai-organization"] == "org"
    assert sent["user-agent"] == "mine/1"
    assert "cookie" not in sent
    assert not any(name.startswith("x-refold") for name in sent)


def test_answers_tell_what_was_done(gated: Gate) -> None:
    headers = ask(gated.openai(), [user("Hello")]).headers
    (key,) = gated.conversations()
    assert headers["x-refold-conversation"] == key.conversation
    assert headers["x-refold-edits"] == "0"
    assert int(headers["x-refold-tokens-before"]) == int(headers["x-refold-tokens-sent"]) > 0
    assert "x-refold-bypass" not in headers


def test_marks_for_the_cache_stand_at_the_edit_frontier_and_are_never_too_many(gated: Gate) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    client, history = gated.anthropic(), list[Any]()
    system = [{"type": "text", "text": "You audit.", **mark}]
    for n in range(14):
        text = {"type": "text", "text": f"{n}: " + "the ledger of the harbor " * 100}
        history.append({"role": "user", "content": [text]})
        asked = [*history[:-1], {"role": "user", "content": [{**text, **mark}]}]
        reply = client.messages.create(model="claude-sonnet-5", max_tokens=100, system=system, messages=asked)
        history.append({"role": "assistant", "content": reply.content})
    sent = gated.bodies()[-1]
    marked = [n for n, one in enumerate(sent["messages"]) if "cache_control" in json.dumps(one)]
    assert sent["system"] == system
    assert marked[-1] == len(sent["messages"]) - 1
    assert len(marked) == 2
    assert len(sent["messages"]) < len(history)
    stored = gated.session(gated.conversations()[0])
    assert "cache_control" not in json.dumps(stored.fit(dialect="anthropic").messages)


def test_what_goes_on_at_the_provider_is_recorded_and_passes_unchanged(gated: Gate) -> None:
    client, last = gated.openai(), None
    for text in ("Hello", "Go on", "And on"):
        before = {} if last is None else {"previous_response_id": last}
        last = client.responses.create(model="gpt-5", input=text, **before).id
    assert gated.bodies()[-1]["input"] == "And on"
    assert gated.texts()[::2] == ["Hello", "Go on", "And on"]
    assert len(gated.said()) == 6


def test_a_request_whose_history_nobody_here_saw_passes_unchanged(gated: Gate) -> None:
    body = {"model": "gpt-5", "input": "Go on", "previous_response_id": "resp_123"}
    httpx.post(
        f"{gated.openai_url}/responses", json=body, headers={"authorization": "Bearer sk-test"}, timeout=30
    )
    assert gated.bodies() == [body]


def test_models_and_count_tokens_pass(gated: Gate) -> None:
    assert list(gated.openai().models.list())
    counted = gated.anthropic().messages.count_tokens(model="claude-sonnet-5", messages=[user("Hello")])
    assert counted.input_tokens > 0
    assert gated.conversations() == []


# When something goes wrong


class Down(MemoryStore):
    """A store that cannot be used."""

    is_down = True

    def locate(self, owner: str, ids: Any, /) -> Any:
        if self.is_down:
            raise StoreError("the disk is full")
        return super().locate(owner, ids)


def test_a_store_that_is_back_is_used_again_however_many_requests_came_meanwhile(upstream: Upstream) -> None:
    store = Down()
    with gate(store, upstream) as gated:
        client = gated.openai()
        assert ask(client, [user("Hello")]).headers["x-refold-bypass"] == "store"
        store.is_down = False
        until(lambda: "x-refold-bypass" not in ask(client, [user("Hello")]).headers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_where_our_part_fails_the_request_passes_as_it_came(upstream: Upstream, stream: bool) -> None:
    upstream.reset()
    body = {"model": "gpt-5", "messages": [user("Hello")], "stream": stream}
    with gate(Down(), upstream) as gated:
        for _ in range(2):
            found = httpx.post(
                f"{gated.openai_url}/chat/completions", json=body, headers={"authorization": "Bearer sk-test"}
            )
            ours = {name: value for name, value in found.headers.items() if name.startswith("x-refold")}
            assert (found.status_code, ours) == (200, {"x-refold-bypass": "store"})
        assert gated.bodies() == [body, body]


def test_what_cannot_fit_is_left_to_the_provider_to_refuse(gated: Gate) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        ask(gated.openai(), [user("word " * 20_000)])
    assert caught.value.response.headers["x-refold-bypass"] == "over-budget"
    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_is_refused_by_the_provider(gated: Gate) -> None:
    with pytest.raises(openai.AuthenticationError):
        ask(gated.openai("sk-bad"), [user("Hello")])
    with pytest.raises(anthropic.AuthenticationError):
        gated.anthropic("sk-bad").messages.create(model="claude-sonnet-5", max_tokens=9, messages=[user("a")])


@pytest.mark.parametrize("name", LOOPS)
def test_a_stream_that_is_cut_upstream_ends_as_an_error(gated: Gate, name: str) -> None:
    base = gated.anthropic_url if name == "anthropic" else gated.openai_url
    with pytest.raises((openai.APIError, anthropic.APIError, httpx.HTTPError)):
        LOOPS[name](base, 3, True, headers={"x-upstream-mode": "cut-stream"})
    assert all(one.message.role != "assistant" for one in gated.said())


def test_an_answer_that_is_cut_upstream_is_an_error(gated: Gate) -> None:
    with pytest.raises(openai.APIError):
        ask(gated.openai(), [user("Hello")], extra_headers={"x-upstream-mode": "cut-stream"})


@pytest.mark.parametrize("path", ["/../admin", "/%2e%2e/admin", "/a/..%2fadmin", "/./seen", "/a\\..\\b"])
def test_no_path_leads_out_of_the_upstream(gated: Gate, path: str) -> None:
    host, port = gated.url.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", f"/openai/v1{path}", headers={"authorization": "Bearer sk-test"})
    assert connection.getresponse().status in (400, 404)
    connection.close()
    assert gated.upstream.seen() == []


def test_redirects_are_not_followed(gated: Gate) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(gated.openai(), [user("Hello")], extra_headers={"x-upstream-mode": "redirect"})
    assert caught.value.status_code == 502
    assert len(gated.upstream.seen()) == 1


def test_an_upstream_that_is_not_there_is_a_502(tmp_path: Path, upstream: Upstream) -> None:
    nowhere = {"openai": "http://127.0.0.1:9/v1", "anthropic": "http://127.0.0.1:9"}
    with gate(SQLiteStore(tmp_path / "a.db"), upstream, upstreams=nowhere) as gated:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(gated.openai(), [user("Hello")])
        assert caught.value.status_code == 502


def test_odd_text_survives_both_ways(gated: Gate) -> None:
    text = "NUL \x00, zero\u200bwidth, \u202eright to left, 👩‍👩‍👧, \u2028 and \ufeff"
    reply = ask(gated.openai(), [user(text)], extra_headers={"x-upstream-mode": "echo"}).parse()
    assert reply.choices[0].message.content == text
    assert gated.texts() == [text, text]


# Upstreams and clients that do odd things


@contextmanager
def saying(*replies: tuple[str, bytes]) -> Iterator[tuple[Any, list[Any]]]:
    """An upstream that answers with these bytes of these types, the last again and again; and what it was
    asked.
    """
    asked: list[Any] = []

    class Handler(Quiet):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            kind, data = replies[min(len(asked), len(replies)) - 1]
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with answering(Handler) as addresses:
        yield addresses, asked


JSON, STREAM = "application/json", "text/event-stream"
USAGE = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}


def completion(message: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    said = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return json.dumps(
        {"id": "c", "object": "chat.completion", "choices": [said], "usage": USAGE, **more}
    ).encode()


def events(*values: Any) -> bytes:
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


EXPAND = {
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "refold_expand", "arguments": '{"at": 0}'}}
    ],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def post(gated: Gate, **more: Any) -> httpx.Response:
    body = {"model": "gpt-5", "messages": [user("Hello")], **more}
    return httpx.post(
        f"{gated.openai_url}/chat/completions", json=body, headers={"authorization": "Bearer sk-x"}
    )


def test_a_model_that_calls_our_tools_for_ever_is_stopped() -> None:
    with (
        saying((JSON, completion(EXPAND, "tool_calls"))) as (upstream, asked),
        gate(MemoryStore(), upstream) as gated,
    ):
        found = post(gated, tools=[TOOL]).json()["choices"][0]
    assert len(asked) == 9
    assert "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"


def test_a_clients_tool_that_is_called_like_ours_is_the_clients() -> None:
    own = {"type": "function", "function": {**TOOL["function"], "name": "refold_expand"}}
    with (
        saying((JSON, completion(EXPAND, "tool_calls"))) as (upstream, asked),
        gate(MemoryStore(), upstream) as gated,
    ):
        found = post(gated, tools=[own]).json()["choices"][0]
        assert len(gated.said()) == 2
    assert [one["tools"] for one in asked] == [[own]]
    assert found["message"]["tool_calls"] == EXPAND["tool_calls"]


HI, STOP = chunk({"content": "Hi"}), chunk({}, "stop")
LISTED = [{"id": "1", "function": {"name": "look"}}, None]
ODD = {
    "a usage that is no number": (JSON, completion({"content": "Hi"}, usage={"prompt_tokens": "many"})),
    "content that is a list": (JSON, completion({"content": [{"type": "text", "text": "Hi"}]})),
    "no JSON": (JSON, b"{oops"),
    "another object": (JSON, b'{"object": "other"}'),
    "choices that are null": (STREAM, events(HI, STOP, {"choices": None}, "[DONE]")),
    "something after the end": (STREAM, events(HI, STOP, "[DONE]", {"x": 1})),
    "a call that is null": (STREAM, events(chunk({"tool_calls": LISTED}), STOP, "[DONE]")),
}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "with tools"])
@pytest.mark.parametrize("case", ODD)
def test_an_answer_that_is_not_understood_is_handed_on_whole(case: str, tools: list[Any]) -> None:
    kind, data = ODD[case]
    more = {"tools": tools} if tools else {}
    with saying((kind, data)) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        found = post(gated, stream=kind == STREAM, **more)
        assert found.status_code == 200
        if kind == STREAM:
            assert _data(found.content) == _data(data)
        else:
            assert found.content == data or found.json() == json.loads(data)
        assert gated.texts()[0] == "Hello"


def _data(stream: bytes) -> list[str]:
    """What all events say, in whatever order."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    return sorted(line if line == "[DONE]" else json.dumps(json.loads(line)) for line in lines)


def test_signs_of_life_do_not_keep_an_answer_from_being_kept() -> None:
    data = b"event: ping\ndata: {}\n\n: still here\n\n" + events(
        chunk({"content": "Hi"}), chunk({}, "stop"), "[DONE]"
    )
    with saying((STREAM, data)) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        assert post(gated, stream=True).content == data
        assert gated.texts() == ["Hello", "Hi"]


@pytest.mark.parametrize("status", ["failed", "queued"])
def test_a_response_that_failed_or_is_yet_to_come_is_no_answer(status: str) -> None:
    reply = {"id": "resp_1", "object": "response", "status": status, "output": [], "model": "gpt-5"}
    with saying((JSON, json.dumps(reply).encode())) as (upstream, _), gate(MemoryStore(), upstream) as gated:
        gated.openai().responses.create(model="gpt-5", input="Hello")
        assert gated.texts() == ["Hello"]


def test_retries_of_an_answered_history_that_fail_share_one_fork(gated: Gate) -> None:
    client = gated.openai(max_retries=0)
    answer(client, [user("Hello")])
    for _ in range(3):
        with pytest.raises(openai.InternalServerError):
            ask(client, [user("Hello")], extra_headers={"x-upstream-mode": "fail-500"})
    answer(client, [user("Hello")])
    assert [len(gated.said(key)) for key in gated.conversations()] == [2, 2]


def test_a_fork_that_was_erased_is_not_continued(gated: Gate) -> None:
    client = gated.openai(max_retries=0)
    history = [user("Hello"), {"role": "assistant", "content": "Yes?"}]
    answer(client, history)
    with pytest.raises(openai.InternalServerError):
        ask(client, history, extra_headers={"x-upstream-mode": "fail-500"})
    old, fork = gated.conversations()
    gated.service.store.erase(fork)
    found = ask(client, history)
    assert gated.bodies()[-1]["messages"] == history
    assert found.headers["x-refold-conversation"] not in (old.conversation, fork.conversation)


def test_twins_at_once_are_told_where_they_are(gated: Gate) -> None:
    barrier = threading.Barrier(6)

    def talk(_: int) -> str:
        barrier.wait()
        found = ask(gated.openai(), [user("Hello")], extra_headers={"x-upstream-mode": "slow"})
        return found.headers["x-refold-conversation"]

    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(talk, range(6)))
    assert sorted(told) == sorted(key.conversation for key in gated.conversations())
    assert all(len(gated.said(key)) == 2 for key in gated.conversations())


def test_a_branch_at_the_provider_is_a_fork_here(gated: Gate) -> None:
    client = gated.openai()
    one = client.responses.create(model="gpt-5", input="One").id
    two = client.responses.create(model="gpt-5", input="Two", previous_response_id=one).id
    client.responses.create(model="gpt-5", input="Three", previous_response_id=two)
    client.responses.create(model="gpt-5", input="Other", previous_response_id=one)
    old, new = gated.conversations()
    assert gated.texts(old)[::2] == ["One", "Two", "Three"]
    assert gated.texts(new)[::2] == ["One", "Other"]


def test_branches_at_once_never_see_each_other(gated: Gate) -> None:
    client, shared = gated.openai(), [user("Hello")]
    shared.append(answer(client, shared))
    with ThreadPoolExecutor(8) as pool:
        for trial in range(40):  # it is a matter of luck: one in fifty requests, before it was mended
            barrier = threading.Barrier(8)

            def branch(n: int, trial: int = trial, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                answer(client, [*shared, user(f"branch {n} of {trial}")])

            list(pool.map(branch, range(8)))
    users = [[one["content"] for one in body["messages"] if one["role"] == "user"] for body in gated.bodies()]
    assert {len(said) for said in users[1:]} == {2}


def test_system_text_is_the_clients_whoever_wrote_in_between(upstream: Upstream, tmp_path: Path) -> None:
    upstream.reset()
    with (
        gate(SQLiteStore(tmp_path / "gate.db"), upstream) as one,
        gate(SQLiteStore(tmp_path / "gate.db"), upstream) as other,
    ):
        history = [user("Hello")]
        for gated, rule in ((one, "Be brief."), (other, "Be long."), (one, "Be brief.")):
            said = answer(gated.openai(), [{"role": "system", "content": rule}, *history])
            history += [said, user("Go on")]
    sent = [body["messages"][0]["content"] for body in one.bodies()]
    assert sent == ["Be brief.", "Be long.", "Be brief."]


def test_a_retry_of_what_goes_on_at_the_provider_is_kept_once(gated: Gate) -> None:
    client = gated.openai(max_retries=0)
    first = client.responses.create(model="gpt-5", input="One").id
    more: dict[str, Any] = {"model": "gpt-5", "input": "Two", "previous_response_id": first}
    for _ in range(2):
        with pytest.raises(openai.InternalServerError):
            client.responses.create(**more, extra_headers={"x-upstream-mode": "fail-500"})
    client.responses.create(**more)
    assert gated.texts()[::2] == ["One", "Two"]
    assert len(gated.said()) == 4


def test_branches_at_the_provider_at_once_are_conversations_of_their_own(gated: Gate) -> None:
    client = gated.openai()
    first = client.responses.create(model="gpt-5", input="One").id

    def branch(text: str) -> None:
        client.responses.create(
            model="gpt-5",
            input=text,
            previous_response_id=first,
            extra_headers={"x-upstream-mode": "slow"},
        )

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(branch, ["A", "B", "C"]))
    stored = sorted(gated.texts(key)[2:3] for key in gated.conversations())
    assert stored == [["A"], ["B"], ["C"]]
    assert all(len(gated.said(key)) == 4 for key in gated.conversations())


def test_a_call_of_our_tool_beside_the_clients_is_answered_at_the_provider_too(tmp_path: Path) -> None:
    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": f"fc_{id}",
            "call_id": id,
            "name": name,
            "arguments": arguments,
        }

    def response(id: str, *output: Any) -> tuple[str, bytes]:
        whole = {"id": id, "object": "response", "model": "gpt-5", "status": "completed", "output": output}
        return JSON, json.dumps(whole).encode()

    both = call("a", "refold_search", '{"query": "ledger"}'), call("b", "look", "{}")
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    with (
        saying(response("resp_1", *both), response("resp_2")) as (upstream, asked),
        gate(SQLiteStore(tmp_path / "gate.db"), upstream) as gated,
    ):
        client = gated.openai()
        shown = client.responses.create(model="gpt-5", input="Hello", tools=[tool])
        assert [one.name for one in shown.output] == ["look"]
        done = {"type": "function_call_output", "call_id": "b", "output": "seen"}
        client.responses.create(model="gpt-5", input=[done], previous_response_id="resp_1", tools=[tool])
    assert [one["call_id"] for one in asked[-1]["input"]] == ["a", "b"]


def test_our_tools_are_still_there_after_a_restart(upstream: Upstream, tmp_path: Path) -> None:
    upstream.reset()
    history = [{"role": "system", "content": "Be brief."}, user("stop after 0 steps")]
    for _ in range(2):
        with gate(SQLiteStore(tmp_path / "gate.db"), upstream) as gated:
            history += [answer(gated.openai(), history, tools=[TOOL]), user("Go on")]
    offered = [{one["function"]["name"] for one in body["tools"]} for body in gated.bodies()]
    assert offered[0] == offered[1] > {"look"}


def test_the_clients_own_cache_marks_stay_where_nothing_is_edited(gated: Gate) -> None:
    long, short = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
    body = {
        "model": "claude-sonnet-5",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "You audit.", "cache_control": long}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": short}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": [{"type": "text", "text": "Two", "cache_control": short}]},
        ],
        "cache_control": short,
    }
    headers = {"x-api-key": "sk-ant-test", "anthropic-version": "2023-06-01"}
    found = httpx.post(f"{gated.anthropic_url}/v1/messages", json=body, headers=headers, timeout=30)
    assert found.status_code == 200, found.text
    assert gated.bodies() == [body]
