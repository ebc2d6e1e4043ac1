"""Is the strict upstream what the providers are? Their own SDKs drive it, with nothing of refold between."""

import ast
import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import loops
from upstream import Upstream
from upstream_cases import BROKEN, NEEDS, VALID, calls, tool, user
from upstream_claude import check_anthropic
from upstream_model import is_intact_call, is_intact_text
from upstream_openai import check_chat, check_responses
from upstream_rules import Refusal

HERE = Path(__file__).parent
RECORDINGS = HERE.parents[1] / "shared" / "data" / "recordings"
STEPS = 30
WAIT = 10.0
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1_024}, "max_tokens": 4_000}
ODD = "".join(map(chr, [*range(0x500), *range(0x2000, 0x2100), *range(0x1F600, 0x1F680), 0x10FFFF]))
PATHS = {"chat": "/chat/completions", "responses": "/responses", "anthropic": "/v1/messages"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def upstream():
    with Upstream() as server:
        yield server


@pytest.fixture(scope="module")
def wide():
    """The same with room for a whole loop."""
    with Upstream(window=1_000_000) as server:
        yield server


@pytest.fixture(autouse=True)
def _forget(upstream):
    upstream.reset()


def client_of(dialect: str, server: Upstream, key: str = "sk-test", **more: Any) -> Any:
    kind = anthropic.Anthropic if dialect == "anthropic" else openai.OpenAI
    url = server.url if dialect == "anthropic" else server.openai
    return kind(base_url=url, api_key=key, max_retries=0, timeout=WAIT, **more)


def ask(dialect: str, server: Upstream, body: dict[str, Any], **more: Any) -> Any:
    """One request by the SDK's own transport, whatever the body."""
    with client_of(dialect, server, **more) as client:
        return client.post(PATHS[dialect], body={"model": "m", "max_tokens": 100, **body}, cast_to=object)


def say(dialect: str, server: Upstream, text: str = "Hello", stream: bool = False, **more: Any) -> Any:
    """One question by the SDK's own words; of a stream, all its events."""
    model = more.pop("model", "claude-sonnet-5" if dialect == "anthropic" else "gpt-5")
    user = [{"role": "user", "content": text}]
    with client_of(dialect, server, **more) as client:
        if dialect == "responses":
            reply = client.responses.create(model=model, input=user, stream=stream)
        elif dialect == "chat":
            reply = client.chat.completions.create(model=model, messages=user, stream=stream)
        else:
            reply = client.messages.create(model=model, messages=user, max_tokens=100, stream=stream)
        return list(reply) if stream else reply


def text_of(dialect: str, reply: Any) -> str:
    if isinstance(reply, list):
        return "".join(_delta(event) for event in reply)
    if dialect == "responses":
        return reply.output_text
    return reply.choices[0].message.content if dialect == "chat" else reply.content[0].text


def _delta(event: Any) -> str:
    if event.__class__.__name__ == "ChatCompletionChunk":
        return event.choices[0].delta.content or ""
    delta = getattr(event, "delta", None)
    return delta if isinstance(delta, str) else getattr(delta, "text", None) or ""


def within(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


DIALECTS = pytest.mark.parametrize("dialect", list(PATHS))
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def test_it_imports_nothing_of_refold():
    for path in [*HERE.glob("upstream*.py"), HERE / "loops.py", HERE / "test_upstream.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "refold"], path


# Loops


@STREAMS
@pytest.mark.parametrize(
    ("loop", "more"),
    [
        (loops.chat_loop, {}),
        (loops.responses_loop, {}),
        (loops.responses_loop, {"store": True}),
        (loops.anthropic_loop, {}),
        (loops.anthropic_loop, THINKING),
        (loops.anthropic_loop, {"model": "claude-sonnet-5-5", **THINKING}),
    ],
    ids=["chat", "responses", "responses-stored", "anthropic", "anthropic-thinking", "anthropic-bound"],
)
def test_the_sdks_drive_a_tool_loop(wide, loop, more, stream):
    done = loop(wide.url if loop is loops.anthropic_loop else wide.openai, STEPS, stream, **more)
    assert done.steps == STEPS
    assert all(map(is_intact_text, done.texts))
    assert all(is_intact_call(*call) for call in done.calls)
    assert {tool for _, tool, _ in done.calls} == set(loops.TOOLS)
    assert len(done.calls) > STEPS  # some at once
    assert len(done.texts) > 1  # some with text before
    assert all(reply.usage for reply in done.replies)
    thought = {"thinking", "reasoning"} & {part.type for one in done.replies for part in _parts(one)}
    assert bool(thought) == (loop is loops.responses_loop or "thinking" in more)


def _parts(reply: Any) -> list[Any]:
    return getattr(reply, "output", None) or getattr(reply, "content", None) or []


def test_a_loop_may_leave_its_history_to_the_provider(wide):
    with client_of("responses", wide) as client:
        tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
        reply = client.responses.create(model="gpt-5", input="Look; stop after 3 steps", tools=tools)
        for step in (1, 2, 3):
            output = [
                {"type": "function_call_output", "call_id": item.call_id, "output": f"step {step}"}
                for item in reply.output
                if item.type == "function_call"
            ]
            assert output
            reply = client.responses.create(
                model="gpt-5", input=output, tools=tools, previous_response_id=reply.id
            )
        assert reply.output_text.startswith("Done after 3 steps")


def test_a_handle_is_opened_where_the_task_asks_for_it(upstream):
    tools = [
        TOOL,
        {"type": "function", "function": {"name": "refold_expand", "parameters": {"type": "object"}}},
    ]
    called = []
    for step in (3, 4, 10):
        messages = [
            {"role": "user", "content": "Look, use refold tools, stop after 50 steps"},
            calls("c"),
            {**tool("c"), "content": f"step {step} [refold #57 look: 900 tokens]"},
        ]
        reply = ask("chat", upstream, {"messages": messages, "tools": tools})
        functions = [one["function"] for one in reply["choices"][0]["message"]["tool_calls"]]
        called.append([(one["name"], json.loads(one["arguments"]).get("at")) for one in functions])
    assert called == [[("refold_expand", 57)], [("look", None)], [("refold_expand", 57), ("look", None)]]


def test_the_newest_result_says_how_far_the_task_is(upstream):
    shown = [user("Look; stop after 30 steps"), calls("a"), {**tool("a"), "content": "step 29"}]
    assert ask("chat", upstream, {"messages": shown, "tools": [TOOL]})["choices"][0]["message"]["tool_calls"]
    shown[-1]["content"] = "step 30"
    reply = ask("chat", upstream, {"messages": shown, "tools": [TOOL]})["choices"][0]["message"]
    assert reply["content"].startswith("Done after 30 steps")


@STREAMS
@DIALECTS
def test_odd_characters_come_back_unchanged(upstream, dialect, stream):
    reply = say(dialect, upstream, ODD, stream, model="echo")
    assert text_of(dialect, reply) == ODD


# Rules


@pytest.mark.parametrize(
    ("dialect", "rule", "messages", "said"), BROKEN, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_broken_rule_is_refused_in_the_providers_words(wide, dialect, rule, messages, said):
    name = "input" if dialect == "responses" else "messages"
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        ask(dialect, wide, {name: messages, **NEEDS.get(rule, {})})
    refused = caught.value
    assert refused.response.headers["x-broken-rule"] == rule
    assert refused.status_code == (404 if "not persisted" in said else 400)
    error = refused.response.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    assert {"param", "code"} <= set(error) or dialect == "anthropic"


def test_every_rule_has_a_request_that_breaks_it():
    tried = {rule for _, rule, *_ in BROKEN} | {"G1", "G3"}
    assert tried >= {f"C{number}" for number in range(1, 11)} | {f"A{number}" for number in range(1, 16)}
    assert tried >= {f"R{number}" for number in range(1, 10) if number != 8} | {"G1", "G2", "G3", "G4"}


@pytest.mark.parametrize(("dialect", "messages"), VALID)
def test_a_valid_request_is_answered(upstream, dialect, messages):
    assert ask(
        dialect, upstream, {"input" if dialect == "responses" else "messages": messages, "store": False}
    )


@DIALECTS
@pytest.mark.parametrize("raw", [b'{"a": "\\ud800"}', b'{"a": NaN}', b'{"a": "\xff"}', b"{", b"[]"])
def test_what_is_not_json_is_refused(upstream, dialect, raw):
    url = upstream.url + (PATHS[dialect] if dialect == "anthropic" else f"/v1{PATHS[dialect]}")
    headers = {"Authorization": "Bearer sk-test", "anthropic-version": "2023-06-01"}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, raw, headers), timeout=WAIT)
    with caught.value as refused:
        assert (refused.status, refused.headers["x-broken-rule"]) == (400, "G1")
        assert "JSON" in json.load(refused)["error"]["message"]


def test_recorded_requests_that_were_accepted_are_valid():
    if not RECORDINGS.is_dir():
        pytest.skip("notice: ../shared/data is not here, so no recorded request is tried")
    known = {"A1", "A2", "A6", "A8"}  # seen accepted, and still never to be made: strict
    checks = {
        "openai_chat": check_chat,
        "openai_responses": lambda body: check_responses(body, own=False),
        "anthropic_messages": lambda body: check_anthropic(body, own=False),
        "anthropic_count_tokens": lambda body: check_anthropic(body, own=False),
    }
    accepted, refused = 0, set()
    for name, check in checks.items():
        for line in (RECORDINGS / f"api_{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["status"] == 200:
                rule = _refusal(check, row["request"])
                accepted += rule is None
                refused |= {rule} - {None}
    assert refused <= known
    assert accepted > 300


def _refusal(check: Callable[[Any], None], body: Any) -> str | None:
    try:
        check(body)
    except Refusal as refusal:
        return refusal.rule
    return None


def test_streams_have_the_shape_of_recorded_ones(wide):
    if not RECORDINGS.is_dir():
        pytest.skip("notice: ../shared/data is not here, so no recorded request is tried")
    for dialect, name in (
        ("chat", "openai_chat"),
        ("responses", "openai_responses"),
        ("anthropic", "anthropic_messages"),
    ):
        rows = map(json.loads, (RECORDINGS / f"api_{name}.jsonl").read_text().splitlines())
        real = {
            shape for row in rows if isinstance(row["response"], str) for shape in _shapes(row["response"])
        }
        looks = {"type": "object", "properties": {}}
        tools = {"chat": TOOL, "responses": {"type": "function", "name": "look", "parameters": looks}}
        given = {"input" if dialect == "responses" else "messages": [user()], "stream": True}
        given["tools"] = [tools.get(dialect, {"name": "look", "input_schema": looks})]
        given |= {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
        ours = set(_shapes(ask(dialect, wide, given))) | set(
            _shapes(ask(dialect, wide, {**given, "tools": []}))
        )
        assert ours
        assert ours <= real, ours - real


def _shapes(stream: str) -> list[tuple[Any, ...]]:
    """Each event's type, the names of its fields, and those of what it is about."""
    shapes = []
    for event in map(json.loads, re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)):
        about = [event.get(name) for name in ("delta", "content_block", "item", "part", "message")]
        about += [choice["delta"] for choice in event.get("choices") or []]
        inner = [name for one in about if isinstance(one, dict) for name in one]
        shapes.append((event.get("type"), *sorted(event), "in it", *sorted(inner)))
    return shapes


# The window


@DIALECTS
def test_the_window_is_enforced(upstream, dialect):
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
        say(dialect, upstream, "word " * 8_000)
    error = caught.value.response.json()["error"]
    assert caught.value.response.headers["x-broken-rule"] == "G3"
    if dialect == "anthropic":
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 8000 maximum", error["message"])
    else:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("dialect", "said"), [("chat", "7900 in the completion"), ("anthropic", "exceed context limit")]
)
def test_the_output_asked_for_is_part_of_the_window(upstream, dialect, said):
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=said):
        ask(dialect, upstream, {"messages": [user("word " * 200)], "max_tokens": 7_900})


def test_tokens_are_counted_as_they_are_reported(upstream):
    with client_of("anthropic", upstream) as client:
        asked = {"model": "claude-sonnet-5", "messages": [user("word " * 400)]}
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == client.messages.create(max_tokens=9, **asked).usage.input_tokens
        assert counted == pytest.approx(500, abs=20)


# Keys, models and faults


@DIALECTS
def test_a_wrong_key_is_refused(upstream, dialect):
    with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)) as caught:
        say(dialect, upstream, key="sk-bad-12345678")
    error = caught.value.response.json()["error"]
    assert "invalid x-api-key" in error["message"] or error["code"] == "invalid_api_key"
    assert "12345678" not in error["message"]


def test_models_are_listed_in_both_dialects(upstream):
    with client_of("chat", upstream) as one, client_of("anthropic", upstream) as other:
        assert [model.id for model in one.models.list()] == ["gpt-5", "gpt-4o"]
        assert [model.id for model in other.models.list()] == ["claude-sonnet-5", "claude-opus-5"]
        assert other.models.retrieve("claude-opus-5").id == "claude-opus-5"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        say("chat", upstream, model="unknown")


@STREAMS
@DIALECTS
@pytest.mark.parametrize("status", [429, 500, 502, 503, 529])
def test_a_failure_has_its_status_and_body(upstream, dialect, stream, status):
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        say(dialect, upstream, stream=stream, default_headers={"x-upstream-mode": f"fail-{status}"})
    response = caught.value.response
    assert response.status_code == status
    assert response.headers.get("retry-after") == ("7" if status == 429 else None)
    if status == 529 and dialect == "anthropic":
        assert response.json()["error"] == {"type": "overloaded_error", "message": "Overloaded"}
    if status == 502:
        assert response.text.startswith("<html>")


@STREAMS
@DIALECTS
def test_an_answer_that_is_cut_never_ends_cleanly(upstream, dialect, stream):
    with pytest.raises(Exception, match=r"(?i)connection|closed|incomplete"):
        say(dialect, upstream, stream=stream, model="gpt-5+cut-stream")


@pytest.mark.parametrize("dialect", ["chat", "anthropic"])
def test_an_error_may_come_in_the_middle_of_a_stream(upstream, dialect):
    with pytest.raises((openai.APIError, anthropic.APIError), match=r"(?i)overloaded|had an error"):
        say(dialect, upstream, stream=True, model="gpt-5+error-stream")


def test_an_error_in_a_stream_of_responses_is_its_last_event(upstream):
    events = say("responses", upstream, stream=True, model="gpt-5+error-stream")
    assert (events[0].type, events[-1].type) == ("response.created", "error")


@DIALECTS
@pytest.mark.parametrize("mode", ["hang", "stall-stream"])
def test_a_call_that_gets_no_answer_is_open_until_its_client_leaves(upstream, dialect, mode):
    async def leave() -> None:
        kind = anthropic.AsyncAnthropic if dialect == "anthropic" else openai.AsyncOpenAI
        url = upstream.url if dialect == "anthropic" else upstream.openai
        async with kind(base_url=url, api_key="sk-test", max_retries=0, timeout=WAIT) as client:
            name = "input" if dialect == "responses" else "messages"
            body = {"model": mode, "max_tokens": 9, "stream": True, name: [user()]}
            asked = asyncio.create_task(client.post(PATHS[dialect], body=body, cast_to=object))
            assert await asyncio.to_thread(within, lambda: upstream.open() == 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert await asyncio.to_thread(within, lambda: upstream.open() == 0)

    asyncio.run(leave())


def test_slow_events_come_one_by_one(upstream):
    reply = say("chat", upstream, "Take your time", True, model="slow")
    assert is_intact_text(text_of("chat", reply))


@DIALECTS
def test_a_redirect_leads_to_another_host(upstream, dialect):
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        say(dialect, upstream, model="redirect", http_client=_unfollowing(dialect))
    assert caught.value.response.headers["location"].startswith("http://localhost:")
    assert "/elsewhere" not in [row["path"] for row in upstream.seen()]


def test_a_redirect_that_is_followed_is_seen(upstream):
    say("chat", upstream, model="redirect")
    assert upstream.seen()[-1]["path"] == "/elsewhere"


def _unfollowing(dialect: str) -> Any:
    kind = anthropic.DefaultHttpxClient if dialect == "anthropic" else openai.DefaultHttpxClient
    return kind(follow_redirects=False)


@STREAMS
@DIALECTS
def test_a_huge_answer_is_whole(upstream, dialect, stream):
    text = text_of(dialect, say(dialect, upstream, stream=stream, model="huge"))
    assert len(text) > 2_000_000
    assert is_intact_text(text)


def test_what_is_not_json_comes_back_as_an_answer_too(upstream):
    with pytest.raises((openai.APIError, ValueError)):
        text_of("chat", say("chat", upstream, model="garbage"))


def test_what_was_asked_is_seen_as_it_arrived(upstream):
    say("anthropic", upstream, "Hello", default_headers={"X-Odd-Case": "yes"})
    (row,) = upstream.seen()
    assert (row["method"], row["path"]) == ("POST", "/v1/messages")
    assert ["X-Odd-Case", "yes"] in row["headers"]
    assert row["body"]["messages"] == [user()]
    upstream.reset()
    assert upstream.seen() == []
