"""Replies of the OpenAI and Anthropic SDKs: what a provider said goes back to it as it came."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

import refold
from refold.core.event import Measured
from refold.core.message import Usage

DATA = Path(__file__).parents[2] / "shared" / "data" / "recordings"
recorded = pytest.mark.skipif(not DATA.exists(), reason="the recorded replies are not beside the project")


class Cut(list):
    """The events of a stream after which the line goes dead."""


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(json.loads(body))
        answer = self.server.answers.pop(0)
        is_cut = self.close_connection = isinstance(answer, Cut)
        kind = "application/json" if isinstance(answer, dict) else "text/event-stream"
        data = (json.dumps(answer) if isinstance(answer, dict) else sse(answer)).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data) + is_cut))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Provider(ThreadingHTTPServer):
    """Says what it was told to, in turn, and remembers what it was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked = [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


def sse(stream):
    if isinstance(stream, str):
        return stream
    named = [(f"event: {one['type']}\n" if "type" in one else "", json.dumps(one)) for one in stream]
    return "".join(f"{name}data: {text}\n\n" for name, text in named)


class Api(NamedTuple):
    resource: str
    field: str
    """Where a request has its messages."""
    model: str
    said: list[Any]
    """What the provider says, as it is sent back."""
    reply: dict[str, Any]
    chunks: list[dict[str, Any]]
    """The same as a stream."""
    results: list[dict[str, Any]]
    """How its documentation answers the call."""
    words: Callable[[Any], Any]
    """What its documentation takes from a reply to send it back."""
    usage: Usage
    finish: str
    more: dict[str, Any]


USER = {"role": "user", "content": "How is the weather in Oslo?"}
INPUT = {"city": "Oslo", "units": {"wind": "m/s", "heat": "C"}, "hours": 6.0}
ARGUMENTS = json.dumps(INPUT)


def chat_api() -> Api:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    message = {"role": "assistant", "content": "I look", "refusal": None, "tool_calls": [call]}
    counts = {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 30}}
    head = {"id": "chatcmpl-1", "created": 1, "model": "gpt-5-2025-08-07"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}

    def chunk(finish=None, **delta):
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return {**head, "object": "chat.completion.chunk", "choices": choices}

    chunks = [
        chunk(role="assistant", content="", refusal=None),
        *(chunk(content=text) for text in ("I ", "look")),
        chunk(tool_calls=[{"index": 0, **call, "function": {"name": "weather", "arguments": ""}}]),
        *(chunk(tool_calls=[{"index": 0, "function": {"arguments": text}}]) for text in halves(ARGUMENTS)),
        chunk("tool_calls"),
        {**head, "object": "chat.completion.chunk", "choices": [], "usage": counts},
    ]
    reply = {**head, "object": "chat.completion", "choices": [choice], "usage": counts}
    results = [{"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    words, usage = attrgetter("choices"), Usage(40, 9, 30)
    return Api(
        "chat.completions", "messages", "gpt-5", [message], reply, chunks, results,
        lambda reply: words(reply)[0].message, usage, "tool_calls", {},
    )  # fmt: skip


def responses_api() -> Api:
    thought = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "c2VjcmV0"}
    text = {"type": "output_text", "annotations": [], "logprobs": [], "text": "I look"}
    message = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [text],
    }
    call = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1"}
    call |= {"name": "weather", "arguments": ARGUMENTS}
    counts = {"input_tokens": 40, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 30}}
    reply = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "error": None}
    reply |= {"model": "gpt-5-2025-08-07", "output": [thought, message, call], "tools": [], "usage": counts}
    started = {**reply, "status": "in_progress", "output": [], "usage": None}

    def event(kind, **fields):
        return {"type": f"response.{kind}", "sequence_number": 1, **fields}

    def item(n, began, *pieces):
        begin = event("output_item.added", output_index=n, item=began)
        return [begin, *pieces, event("output_item.done", output_index=n, item=reply["output"][n])]

    part = {"output_index": 1, "content_index": 0, "item_id": "msg_1"}
    begun = event("content_part.added", **part, part={**text, "text": ""})
    says = [event("output_text.delta", **part, delta=piece, logprobs=[]) for piece in ("I ", "look")]
    asks = [
        event("function_call_arguments.delta", output_index=2, item_id="fc_1", delta=piece)
        for piece in halves(ARGUMENTS)
    ]
    chunks = [event("created", response=started), *item(0, thought)]
    chunks += item(1, {**message, "status": "in_progress", "content": []}, begun, *says)
    chunks += item(2, {**call, "status": "in_progress", "arguments": ""}, *asks)
    chunks.append(event("completed", response=reply))
    results = [{"type": "function_call_output", "call_id": "call_1", "output": "rain"}]
    return Api(
        "responses", "input", "gpt-5", reply["output"], reply, chunks, results,
        lambda reply: reply.output, Usage(40, 9, 30), "completed", {"store": False},
    )  # fmt: skip


def anthropic_api() -> Api:
    thought = {"type": "thinking", "thinking": "Rain?", "signature": "c2lnbmVk"}
    text = {"type": "text", "text": "I look"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": INPUT}
    counts = {"input_tokens": 4, "cache_creation_input_tokens": 6, "cache_read_input_tokens": 30}
    counts["output_tokens"] = 9
    reply = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-sonnet-5-20260217"}
    reply |= {
        "content": [thought, text, use],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": counts,
    }
    started = {**reply, "content": [], "stop_reason": None, "usage": {**counts, "output_tokens": 1}}

    def block(n, began, *deltas):
        begin = {"type": "content_block_start", "index": n, "content_block": began}
        more = [{"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas]
        return [begin, *more, {"type": "content_block_stop", "index": n}]

    signed = {"type": "signature_delta", "signature": "c2lnbmVk"}
    thinks = {"type": "thinking_delta", "thinking": "Rain?"}
    says = [{"type": "text_delta", "text": piece} for piece in ("I ", "look")]
    asks = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *halves(ARGUMENTS))]
    chunks = [{"type": "message_start", "message": started}, {"type": "ping"}]
    chunks += block(0, {**thought, "thinking": "", "signature": ""}, thinks, signed)
    chunks += block(1, {**text, "text": ""}, *says) + block(2, {**use, "input": {}}, *asks)
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    chunks.append({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 9}})
    chunks.append({"type": "message_stop"})
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    said = [{"role": "assistant", "content": reply["content"]}]
    return Api(
        "messages", "messages", "claude-sonnet-5", said, reply, chunks, [{"role": "user", "content": [result]}],
        lambda reply: {"role": "assistant", "content": reply.content}, Usage(40, 9, 30, 6), "tool_use",
        {"max_tokens": 1_024},
    )  # fmt: skip


def halves(text):
    return text[:9], text[9:]


APIS = {"openai-chat": chat_api(), "openai-responses": responses_api(), "anthropic": anthropic_api()}
FILES = {
    "openai-chat": "openai_chat",
    "openai-responses": "openai_responses",
    "anthropic": "anthropic_messages",
}


@pytest.fixture
def provider():
    with Provider() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=APIS)
def dialect(request):
    return request.param


@pytest.fixture
def api(dialect):
    return APIS[dialect]


def connected(dialect, provider, kind=""):
    name = "Anthropic" if dialect == "anthropic" else "OpenAI"
    sdk = pytest.importorskip(name.lower())
    http = getattr(sdk, f"Default{kind}HttpxClient")(trust_env=False)
    client = getattr(sdk, kind + name)
    return client(base_url=provider.url, api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def client(dialect, provider):
    with connected(dialect, provider) as client:
        yield client


@pytest.fixture
def ask(client, api):
    return attrgetter(f"{api.resource}.create")(client)


@pytest.fixture
def store(tmp_path):
    return f"sqlite:///{tmp_path / 'trip.db'}"


@pytest.fixture
def chat(api, store):
    with refold.open("trip", store=store, model=api.model) as chat:
        chat.append(USER)
        yield chat


def compact(value, sort=False):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=sort)


def same(one, other):
    """The same JSON, whatever the order of its keys: SDK objects have one of their own."""
    return compact(one, True) == compact(other, True)


def as_said(api):
    return [USER, *api.said, *api.results]


@pytest.mark.parametrize("whole", [True, False], ids=["the whole reply", "its words alone"])
def test_a_reply_goes_back_as_it_came_and_as_the_sdk_itself_would_send_it(api, provider, ask, chat, whole):
    provider.answers += [api.reply] * 3
    reply = ask(**chat.fit(request=api.more).request)
    words = api.words(reply)
    chat.append(reply if whole else words)
    chat.append(api.results)
    fitted = chat.fit(request=api.more)
    assert same(fitted.messages, as_said(api))
    assert fitted.report.notices == ()
    ask(**fitted.request)
    history = [USER, *(words if isinstance(words, list) else [words]), *api.results]
    ask(model=api.model, **{api.field: history}, **api.more)
    ours, theirs = provider.asked[1:]
    assert ours == fitted.request
    assert compact(ours[api.field]) == compact(theirs[api.field]) == compact(fitted.messages)


def test_a_stream_goes_back_as_if_it_had_come_in_one_piece(api, provider, ask, chat):
    provider.answers += [api.chunks, api.reply]
    chat.append(list(ask(**chat.fit(request=api.more).request, stream=True)))
    chat.append(api.results)
    fitted = chat.fit(request=api.more)
    assert same(fitted.messages, as_said(api))
    ask(**fitted.request)
    assert provider.asked[1] == fitted.request


def test_the_events_of_a_helper_go_back_like_the_stream_they_are_made_of(api, provider, client, chat):
    provider.answers.append(api.chunks)
    with attrgetter(f"{api.resource}.stream")(client)(**chat.fit(request=api.more).request) as stream:
        chat.append(list(stream))
    chat.append(api.results)
    assert same(chat.fit().messages, as_said(api))


def test_the_raw_json_of_a_reply_keeps_the_order_of_its_keys(api, provider, client, chat):
    provider.answers.append(api.reply)
    raw = attrgetter(f"{api.resource}.with_raw_response.create")(client)
    chat.append(raw(**chat.fit(request=api.more).request).http_response.json())
    chat.append(api.results)
    assert compact(chat.fit().messages) == compact(as_said(api))


@pytest.mark.parametrize("stream", [False, True], ids=["in one piece", "as a stream"])
def test_usage_model_and_finish_are_in_the_record_for_good(api, provider, ask, chat, store, stream):
    provider.answers.append(api.chunks if stream else api.reply)
    request = chat.fit(request=api.more).request
    reply = list(ask(**request, stream=True)) if stream else ask(**request)
    chat.append(reply)
    shown = chat.fit().messages
    for opened in (chat, refold.open("trip", store=store, model=api.model)):
        (measured,) = [event for event in opened.events() if isinstance(event, Measured)]
        assert (measured.of, measured.usage, measured.model) == (1, api.usage, api.model)
        assert measured.usage.input == 40
        message = opened.get_all()[-1].message
        assert (message.model, message.finish) == (api.reply["model"], api.finish)
        assert compact(opened.fit().messages) == compact(shown)


def test_what_the_sdk_parsed_for_its_user_is_not_said_back(provider, tmp_path):
    client = connected("openai-chat", provider)
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    tool = pytest.importorskip("openai").pydantic_function_tool(Weather, name="weather")
    text, call = '{"city":"Oslo"}', {"id": "c", "type": "function"}
    call["function"] = {"name": "weather", "arguments": text}
    plain, asking = {"role": "assistant", "content": text, "refusal": None}, {"tool_calls": [call]}
    with client:
        for message in (plain, plain | asking):
            reply = APIS["openai-chat"].reply | {"choices": [{"message": message, "finish_reason": "stop"}]}
            provider.answers.append(reply)
            ask = client.chat.completions.parse
            reply = ask(model="gpt-5", messages=[USER], response_format=Weather, tools=[tool])
            assert reply.choices[0].message.parsed == Weather(city="Oslo")
            for value in (reply, reply.choices[0].message):
                assert same(stored(value, "openai-chat"), message)
        reply = json.loads(json.dumps(APIS["openai-responses"].reply))
        reply["output"][1]["content"][0]["text"] = reply["output"][2]["arguments"] = text
        provider.answers.append(reply)
        parsed = client.responses.parse(model="gpt-5", input=[USER], text_format=Weather, tools=[tool])
        assert parsed.output[2].parsed_arguments == parsed.output_parsed == Weather(city="Oslo")
        for value in (parsed, parsed.output):
            assert same(stored(value, "openai-responses"), reply["output"])


def stored(value, dialect):
    """The JSON that is kept of something that is appended."""
    chat = refold.open("one", store="memory://")
    chat.append(value, dialect=dialect)
    (said,) = [event for event in chat.events() if not isinstance(event, Measured)]
    return json.loads(said.raw)
