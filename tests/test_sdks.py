"""Replies of the OpenAI and Anthropic SDKs: what a provider said goes back to it as it came."""

import asyncio
import json
import warnings
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import pytest

import refold
from refold.core.errors import MessageError
from refold.core.event import Measured, Said
from refold.core.message import Usage
from refold.dialects.replies import collect
from sse import events

DATA = Path(__file__).parents[2] / "shared" / "data" / "recordings"
USER = {"role": "user", "content": "How is the weather in Oslo?"}
INPUT = {"city": "Oslo", "units": {"wind": "m/s", "heat": "C"}, "hours": 6.0}
ARGUMENTS = json.dumps(INPUT)
HALVES = (ARGUMENTS[:9], ARGUMENTS[9:])


class Api(NamedTuple):
    dialect: str
    resource: str
    model: str
    field: str
    reply: dict[str, Any]
    chunks: list[dict[str, Any]]
    """The same as a stream."""
    results: list[dict[str, Any]]
    more: dict[str, Any]

    @property
    def said(self):
        return said_in(self.reply)


def said_in(reply):
    if "choices" in reply:
        return [reply["choices"][0]["message"]]
    return reply["output"] if "output" in reply else [{"role": "assistant", "content": reply["content"]}]


def words_in(reply):
    """The same in an SDK's object, as its documentation has it."""
    if hasattr(reply, "choices"):
        return [reply.choices[0].message]
    return reply.output if hasattr(reply, "output") else [{"role": "assistant", "content": reply.content}]


def chat_api():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    message = {"role": "assistant", "content": "I look", "refusal": None, "tool_calls": [call]}
    counts = {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 30}}
    head = {"id": "chatcmpl-1", "created": 1, "model": "gpt-5-2025-08-07"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    reply = {**head, "object": "chat.completion", "choices": [choice], "usage": counts}
    began = {"index": 0, **call, "function": {"name": "weather", "arguments": ""}}
    deltas = [{"role": "assistant", "content": "", "refusal": None}, {"content": "I "}, {"content": "look"}]
    pieces = [began, *({"index": 0, "function": {"arguments": text}} for text in HALVES)]
    deltas += [{"tool_calls": [piece]} for piece in pieces]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices += [[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], []]
    chunks = [{**head, "object": "chat.completion.chunk", "choices": one} for one in choices]
    chunks[-1]["usage"] = counts
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    return Api("openai-chat", "chat.completions", "gpt-5", "messages", reply, chunks, [result], {})


def responses_api():
    thought = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "c2VjcmV0"}
    text = {"type": "output_text", "annotations": [], "logprobs": [], "text": "I look"}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [text]}
    call = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "weather"}
    output = [thought, message | {"status": "completed"}, call | {"arguments": ARGUMENTS}]
    counts = {"input_tokens": 40, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 30}}
    reply = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "error": None}
    reply |= {"model": "gpt-5-2025-08-07", "output": output, "tools": [], "usage": counts}
    began = [thought, message | {"content": []}, call | {"arguments": ""}]
    deltas = [[], [("content_part.added", {"content_index": 0, "part": text | {"text": ""}})]]
    deltas[1] += [("output_text.delta", {"content_index": 0, "delta": piece}) for piece in ("I ", "look")]
    deltas += [[("function_call_arguments.delta", {"delta": piece}) for piece in HALVES]]
    pieces = [("created", {"response": reply | {"status": "in_progress", "output": [], "usage": None}})]
    for n, item in enumerate(output):
        more = [("output_item.added", {"item": began[n]}), *deltas[n], ("output_item.done", {"item": item})]
        pieces += [(kind, {"output_index": n, "item_id": item["id"], **fields}) for kind, fields in more]
    pieces += [("completed", {"response": reply})]
    chunks = [{"type": f"response.{kind}", "sequence_number": 1, **fields} for kind, fields in pieces]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    return Api("openai-responses", "responses", "gpt-5", "input", reply, chunks, [result], {"store": False})


def anthropic_api():
    thought = {"type": "thinking", "thinking": "Rain?", "signature": "c2lnbmVk"}
    text = {"type": "text", "text": "I look"}
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": INPUT}
    counts = {"input_tokens": 4, "cache_creation_input_tokens": 6, "cache_read_input_tokens": 30}
    stop, last = {"stop_reason": "tool_use", "stop_sequence": None}, {"output_tokens": 9}
    reply = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-sonnet-5-20260217"}
    reply |= {"content": [thought, text, use], **stop, "usage": counts | last}
    began = [thought | {"thinking": "", "signature": ""}, text | {"text": ""}, use | {"input": {}}]
    thinks = [{"type": f"{key}_delta", key: thought[key]} for key in ("thinking", "signature")]
    says = [{"type": "text_delta", "text": piece} for piece in ("I ", "look")]
    asks = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *HALVES)]
    started = reply | {"content": [], "stop_reason": None, "usage": counts | {"output_tokens": 1}}
    chunks = [{"type": "message_start", "message": started}, {"type": "ping"}]
    for n, deltas in enumerate((thinks, says, asks)):
        chunks += [{"type": "content_block_start", "index": n, "content_block": began[n]}]
        chunks += [{"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas]
        chunks += [{"type": "content_block_stop", "index": n}]
    chunks += [{"type": "message_delta", "delta": stop, "usage": last}, {"type": "message_stop"}]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
    said, model = [{"role": "user", "content": [result]}], "claude-sonnet-5"
    return Api("anthropic", "messages", model, "messages", reply, chunks, said, {"max_tokens": 1_024})


APIS = [chat_api(), responses_api(), anthropic_api()]


class Cut(list):
    """The events of a stream after which the line goes dead."""


class Gated(list):
    """The events of a stream, of which only the first is sent until the gate is opened."""

    def __init__(self, events):
        super().__init__(events)
        self.gate = Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(json.loads(body))
        answer = self.server.answers.pop(0)
        is_json, is_cut = isinstance(answer, dict), isinstance(answer, Cut)
        data = (json.dumps(answer) if is_json else sse(answer)).encode()
        self.close_connection = is_cut
        self.send_response(200)
        self.send_header("content-type", "application/json" if is_json else "text/event-stream")
        self.send_header("content-length", str(len(data) + is_cut))
        self.end_headers()
        if isinstance(answer, Gated):
            first = sse(answer[:1]).encode()
            self.wfile.write(first)
            assert answer.gate.wait(20)
            data = data.removeprefix(first)
        self.wfile.write(data)


def sse(stream):
    if isinstance(stream, str):
        return stream
    names = [f"event: {event['type']}\n" if "type" in event else "" for event in stream]
    return "".join(f"{name}data: {json.dumps(event)}\n\n" for name, event in zip(names, stream, strict=True))


@pytest.fixture
def provider():
    """Says what is in its `answers`, in turn, and remembers what it was asked."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers, server.asked = [], []
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=APIS, ids=lambda api: api.dialect)
def api(request):
    return request.param


def connect(api, provider, kind=""):
    name = "Anthropic" if api.dialect == "anthropic" else "OpenAI"
    sdk = pytest.importorskip(name.lower())
    http = getattr(sdk, f"Default{kind}HttpxClient")(trust_env=False)
    url = f"http://127.0.0.1:{provider.server_port}"
    return getattr(sdk, kind + name)(base_url=url, api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def hear(api, provider):
    """What the SDK makes of an answer to a request."""
    with connect(api, provider) as client:

        def hear(answer, request, verb="create", **more):
            provider.answers.append(answer)
            return attrgetter(f"{api.resource}.{verb}")(client)(**request, **more)

        yield hear


@pytest.fixture
def chat(api, tmp_path):
    with refold.open("trip", store=f"sqlite:///{tmp_path / 'trip.db'}", model=api.model) as chat:
        chat.append(USER)
        yield chat


@pytest.fixture
def first(api, chat):
    return chat.fit(dialect=api.dialect, request=api.more).request


def compact(value, sort=False):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=sort)


def same(one, other):
    """The same JSON but for the order of keys: SDK objects have one of their own."""
    return compact(one, True) == compact(other, True)


def stored(value, dialect):
    """The JSON that is kept of something that is appended."""
    chat = refold.open("one", store="memory://")
    with warnings.catch_warnings(action="error", category=UserWarning):
        chat.append(value, dialect=dialect)
    (said,) = [event for event in chat.events() if isinstance(event, Said)]
    kept = json.loads(said.raw)
    return kept if isinstance(kept, list) else [kept]


@pytest.mark.parametrize("is_whole", [True, False], ids=["the whole reply", "its words alone"])
def test_a_reply_goes_back_as_the_sdk_would_send_it(api, provider, hear, chat, first, is_whole):
    reply = hear(api.reply, first)
    words = words_in(reply)
    chat.append(reply if is_whole else words)
    chat.append(api.results)
    fitted = chat.fit(request=api.more)
    assert same(fitted.messages, [USER, *api.said, *api.results])
    assert fitted.report.notices == ()
    hear(api.reply, fitted.request)
    hear(api.reply, first | {api.field: [USER, *words, *api.results]})
    asked, ours, theirs = provider.asked
    assert (asked, ours) == (first, fitted.request)
    assert compact(ours[api.field]) == compact(theirs[api.field]) == compact(fitted.messages)


def test_a_stream_goes_back_as_if_it_had_come_in_one_piece(api, provider, hear, chat, first):
    with hear(api.chunks, first, "stream") as helper:
        for chunks in (list(helper), list(hear(api.chunks, first, stream=True))):
            chat.append(chunks)
            chat.append(api.results)
    fitted = chat.fit(request=api.more)
    assert same(fitted.messages, [USER, *(2 * [*api.said, *api.results])])
    hear(api.reply, fitted.request)
    assert provider.asked[-1] == fitted.request


def test_the_raw_json_of_a_reply_keeps_the_order_of_its_keys(api, hear, chat, first):
    chat.append(hear(api.reply, first, "with_raw_response.create").http_response.json())
    chat.append(api.results)
    assert compact(chat.fit().messages) == compact([USER, *api.said, *api.results])


# proves: C4
@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["in one piece", "as a stream"])
def test_usage_model_and_finish_are_in_the_record_for_good(api, hear, chat, first, tmp_path, stream):
    reply = hear(api.chunks if stream else api.reply, first, **stream)
    chat.append(list(reply) if stream else reply)
    usage = Usage(40, 9, 30, 6 if api.dialect == "anthropic" else 0)
    finish = {"openai-chat": "tool_calls", "openai-responses": "completed"}.get(api.dialect, "tool_use")
    with refold.open("trip", store=f"sqlite:///{tmp_path / 'trip.db'}", model=api.model) as again:
        for opened in (chat, again):
            (measured,) = [event for event in opened.events() if isinstance(event, Measured)]
            assert (measured.of, measured.usage, measured.usage.input) == (1, usage, 40)
            message = opened.get_all()[-1].message
            assert (message.model, message.finish) == (api.reply["model"], finish)
        assert compact(again.fit().messages) == compact(chat.fit().messages)


@pytest.mark.parametrize("end", [1, 3, 5, -3])
def test_what_came_before_the_line_went_dead_is_kept(api, provider, hear, chat, first, end):
    got = []
    with pytest.raises(Exception, match="onnection"):
        got.extend(iter(hear(Cut(api.chunks[:end]), first, stream=True)))
    chat.append(got)
    message = chat.get_all()[-1].message
    assert (message.model, message.finish) == (api.reply["model"], "interrupted")
    assert "I look".startswith(message.text) or "Rain?" in message.text
    fitted = chat.fit(dialect=api.dialect, request=api.more)
    hear(api.reply, fitted.request)
    assert provider.asked[-1] == fitted.request


def test_a_chunk_by_itself_is_refused(api, hear, chat, first):
    for chunk in hear(api.chunks, first, stream=True):
        with pytest.raises(MessageError):
            chat.append(chunk)
    assert chat.get_count() == 1


def test_what_the_sdk_parsed_for_its_user_is_not_said_back(api, hear, first):
    class Weather(pytest.importorskip("pydantic").BaseModel):
        city: str

    answer = json.loads(json.dumps(api.reply).replace("I look", '{\\"city\\": \\"Oslo\\"}'))
    quiet = json.loads(json.dumps(answer))
    said_in(quiet)[-1].pop("tool_calls", None)
    shapes = {"openai-chat": "response_format", "openai-responses": "text_format"}
    shape = {shapes.get(api.dialect, "output_format"): Weather}
    for one in (answer, quiet):
        reply = hear(one, first, "parse", **shape)
        assert "city='Oslo'" in repr(reply)
        for value in (reply, words_in(reply)):
            assert same(stored(value, api.dialect), said_in(one))


def test_what_the_sdk_does_not_know_goes_back_and_nobody_is_warned(api, hear, first):
    novel = {"type": "novel", "id": "n_1", "deep": {"b": None, "a": [1.0, "\ud83d"]}}
    answer = json.loads(json.dumps(api.reply))
    if api.dialect == "openai-chat":
        said_in(answer)[0]["novel"] = novel
    else:
        answer["content" if api.dialect == "anthropic" else "output"].insert(1, novel)
    reply = hear(answer, first)
    for value in (reply, words_in(reply)):
        assert same(stored(value, api.dialect), said_in(answer))


def test_of_sound_only_its_id_is_said_back():
    sound = {"id": "audio_1", "data": "AAAA", "expires_at": 5, "transcript": "Hello"}
    types = pytest.importorskip("openai.types.chat")
    message = types.ChatCompletionMessage(role="assistant", content=None, audio=sound)
    expected = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    assert same(stored(message, "openai-chat"), [expected])


def test_a_list_may_mix_replies_their_words_and_messages(api, hear, chat, first):
    reply = hear(api.reply, first)
    more = refold.Message("user", "And now?")
    places = chat.append([reply, *api.results, more, *words_in(reply), *api.results])
    assert places[:3] == [1, 3, 4]
    said = [*api.said, *api.results]
    assert same(chat.fit().messages, [USER, *said, {"role": "user", "content": "And now?"}, *said])


# Streams, as the SDKs have them


@pytest.fixture(params=["create", "stream"], ids=["stream=True", "the SDK's helper"])
def streamed(request, hear, first):
    """A stream as the SDK gives it."""

    @contextmanager
    def streamed(events):
        if request.param == "stream":
            with hear(events, first, "stream") as helper:
                yield helper
        else:
            yield hear(events, first, stream=True)

    return streamed


def test_a_stream_is_appended_as_the_sdk_gives_it(api, chat, streamed):
    with streamed(api.chunks) as stream:
        place = chat.append(stream)
    assert place == 1
    chat.append(api.results)
    assert same(chat.fit(request=api.more).messages, [USER, *api.said, *api.results])
    assert chat.get_all()[1].message.usage.input == 40


def test_a_step_may_end_with_a_stream_an_iterator_or_a_list_of_chunks(api, chat, streamed):
    for give in (lambda stream: stream, iter, list):
        with streamed(api.chunks) as stream:
            places = chat.after_step(give(stream), *api.results)
        assert places[0] == chat.get_all()[-2].at
        assert places[1] == chat.get_all()[-1].at
    assert same(chat.fit(request=api.more).messages, [USER, *(3 * [*api.said, *api.results])])


def test_chunks_are_handed_on_as_they_come_and_stored_when_the_stream_ends(api, chat, streamed):
    events = Gated(api.chunks)
    with streamed(events) as stream:
        recorded = chat.record_stream(stream)
        got = [next(recorded)]
        assert not events.gate.is_set()
        assert chat.get_count() == 1
        events.gate.set()
        got += recorded
    assert chat.get_count() == 2
    other = refold.open("other", store="memory://", model=api.model)
    other.append(got)
    assert other.get_all()[0].message == chat.get_all()[1].message
    chat.append(api.results)
    fitted = chat.fit(request=api.more)
    assert same(fitted.messages, [USER, *api.said, *api.results])
    assert fitted.report.notices == ()


NOT_STORED = "A streamed reply was not stored: "


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("end", ["breaks", "is abandoned", "ends early", "is read by code that fails"])
def test_of_a_stream_that_is_not_read_to_its_end_nothing_is_stored_unless_told_to(
    api, hear, chat, first, end, keep_partial
):
    some = api.chunks[:-3]
    stream = hear(Cut(some) if end == "breaks" else some, first, stream=True)
    with suppress(Exception):
        for _ in chat.record_stream(stream, keep_partial=keep_partial):
            if end == "is abandoned":
                break
            if end == "is read by code that fails":
                raise LookupError
    stored = chat.get_all()[1:]
    assert len(stored) == keep_partial
    for one in stored:
        assert (one.message.finish, one.message.model) == ("interrupted", api.reply["model"])
    notices = chat.fit(request=api.more).report.notices
    told = [notice for notice in notices if notice.startswith(NOT_STORED)]
    assert len(told) == (not keep_partial)
    assert all("keep_partial=True" in notice for notice in told)
    assert not any(notice.startswith(NOT_STORED) for notice in chat.fit(request=api.more).report.notices)


def test_what_breaks_a_stream_reaches_the_caller_and_is_named_in_the_notice(api, hear, chat, first):
    with pytest.raises(Exception, match="onnection") as caught:
        list(chat.record_stream(hear(Cut(api.chunks[:3]), first, stream=True)))
    (notice,) = chat.fit().report.notices
    assert notice.startswith(f"{NOT_STORED}it broke off with {type(caught.value).__name__}: ")


def test_a_stream_that_breaks_while_it_is_appended_leaves_nothing(api, hear, chat, first):
    with pytest.raises(Exception, match="onnection"):
        chat.append(hear(Cut(api.chunks[:3]), first, stream=True))
    with pytest.raises(Exception, match="onnection"):
        chat.after_step(hear(Cut(api.chunks[:3]), first, stream=True), *api.results)
    assert chat.get_count() == 1


def test_a_stream_that_was_read_already_is_refused(api, hear, chat, first):
    stream = hear(api.chunks, first, stream=True)
    list(stream)
    with pytest.raises(MessageError, match=r"^stream: has nothing in it"):
        chat.append(stream)
    assert list(chat.record_stream(stream)) == []
    assert chat.fit().report.notices == (f"{NOT_STORED}it had no chunks, or was read already",)


def test_what_is_left_of_a_stream_is_stored_before_what_comes_next(api, hear, chat, first):
    for _ in chat.record_stream(hear(api.chunks[:-3], first, stream=True), keep_partial=True):
        break
    chat.append({"role": "user", "content": "Go on."})
    assert [one.message.role for one in chat.get_all()] == ["user", "assistant", "user"]


def test_what_came_of_a_stream_is_stored_when_the_session_is_closed(api, hear, chat, first):
    stream = chat.record_stream(hear(api.chunks[:-3], first, stream=True), keep_partial=True)
    next(stream)
    chat.close()
    again = refold.open(chat.conversation, store=chat.store)
    assert [one.message.role for one in again.get_all()] == ["user", "assistant"]
    del stream


@pytest.mark.parametrize(
    "value", [None, 5, "text", b"text", {"role": "user"}, object()], ids=lambda one: type(one).__name__
)
def test_what_is_no_stream_cannot_be_recorded(value):
    chat = refold.open("one", store="memory://")
    with pytest.raises(MessageError, match=r"^stream: expected a stream or its chunks, got "):
        chat.record_stream(value)


def test_a_whole_reply_is_no_stream(api, hear, chat, first):
    with pytest.raises(MessageError, match=r"^stream: expected a stream or its chunks, got "):
        chat.record_stream(hear(api.reply, first))


def in_async(api, provider, play):
    """Plays a coroutine of a conversation and of a function that asks the provider."""

    async def run():
        opened = await refold.aopen("trip", store="memory://", model=api.model)
        async with connect(api, provider, "Async") as client, opened as chat:
            await chat.append(USER)
            fitted = await chat.fit(dialect=api.dialect, request=api.more)

            def ask(events, verb="create", **more):
                provider.answers.append(events)
                return attrgetter(f"{api.resource}.{verb}")(client)(**fitted.request, **more)

            return await play(chat, ask)

    return asyncio.run(run())


def test_async_streams_are_appended_and_recorded_the_same(api, provider):
    async def play(chat, ask):
        assert await chat.append(await ask(api.chunks, stream=True)) == 1
        await chat.append(api.results)
        async with ask(api.chunks, "stream") as helper:
            await chat.after_step(helper, *api.results)
        got = [chunk async for chunk in chat.record_stream(await ask(api.chunks, stream=True))]
        await chat.append(api.results)
        assert len(got) >= len(api.chunks) - 1  # without the ping
        assert [chunk async for chunk in chat.record_stream(got)] == got  # no async stream is fine too
        await chat.append(api.results)
        await chat.append(iter(got))
        await chat.append(api.results)
        fitted = await chat.fit(request=api.more)
        assert fitted.report.notices == ()
        return fitted.messages

    assert same(in_async(api, provider, play), [USER, *(5 * [*api.said, *api.results])])


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("end", ["breaks", "is abandoned", "ends early", "is cancelled"])
def test_of_an_async_stream_that_is_not_read_to_its_end_nothing_is_stored_unless_told_to(
    api, provider, end, keep_partial
):
    some = api.chunks[:-3]
    events = {"breaks": Cut, "is cancelled": Gated}.get(end, list)(some)

    async def read(chat, ask, came):
        async for _ in chat.record_stream(await ask(events, stream=True), keep_partial=keep_partial):
            came.set()
            if end == "is abandoned":
                break

    async def play(chat, ask):
        came = asyncio.Event()
        reading = asyncio.ensure_future(read(chat, ask, came))
        await came.wait()
        if end == "is cancelled":
            reading.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await reading
        if end == "is cancelled":
            events.gate.set()
        fitted = await chat.fit(request=api.more)
        return await chat.get_all(), fitted.report.notices

    stored, notices = in_async(api, provider, play)
    assert [one.message.finish for one in stored[1:]] == ["interrupted"] * keep_partial
    assert sum(notice.startswith(NOT_STORED) for notice in notices) == (not keep_partial)


def test_an_async_stream_is_refused_by_a_session_that_cannot_await_it(api, provider):
    async def play(chat, ask):
        stream = await ask(api.chunks, stream=True)
        for take in (chat.sync.append, chat.sync.record_stream, chat.sync.after_step):
            with pytest.raises(
                MessageError, match=r"is an async stream, which only a session of refold\.aopen"
            ):
                take(stream)
        await stream.close()

    in_async(api, provider, play)


def test_async_code_says_the_same(api, provider):
    async def talk():
        opened = await refold.aopen("trip", store="memory://", model=api.model)
        async with connect(api, provider, "Async") as client, opened as chat:
            ask = attrgetter(f"{api.resource}.create")(client)
            await chat.append(USER)
            fitted = await chat.fit(dialect=api.dialect, request=api.more)
            await chat.append(await ask(**fitted.request))
            await chat.append(api.results)
            fitted = await chat.fit(request=api.more)
            await chat.append([chunk async for chunk in await ask(**fitted.request, stream=True)])
            await chat.append(api.results)
            assert provider.asked[-1] == fitted.request | {"stream": True}
            return (await chat.fit()).messages

    provider.answers += [api.reply, api.chunks]
    assert same(asyncio.run(talk()), [USER, *(2 * [*api.said, *api.results])])


@pytest.mark.skipif(not DATA.exists(), reason="the recorded replies are not beside the project")
def test_every_recorded_answer_goes_back_as_it_came(api, hear):
    blank = {"model": api.model, api.field: [], **api.more}
    name = {"anthropic": "anthropic_messages"}.get(api.dialect, api.dialect.replace("-", "_"))
    lines = (DATA / f"api_{name}.jsonl").read_text().splitlines()
    for one in [one for one in map(json.loads, lines) if one["status"] == 200]:
        answer = one["response"]
        if isinstance(answer, str):
            objects, said = [list(hear(answer, blank, stream=True))], collect(events(answer)).messages
        elif str(answer.get("object")).startswith("response."):  # a compaction, a count of tokens
            continue
        else:
            objects, said = [hear(answer, blank)], said_in(answer)
            with suppress(ValueError):  # older than the SDK
                objects.append(type(objects[0]).model_validate(answer))
        for value in objects:
            with warnings.catch_warnings(action="error", category=UserWarning):
                sent = sent_back(api, one["request"], value)
            assert compact(said, True)[1:-1] in compact(sent, True)


def sent_back(api, request, value):
    """The messages after an answer to a recorded request, with a result for every call in it."""
    chat = refold.open("run", store="memory://")
    history = request.get("messages", request.get("input"))
    history = [{"role": "user", "content": history}] if isinstance(history, str) else history
    chat.append(history, dialect=api.dialect)
    chat.append(value)
    for call in chat.get_all()[-1].message.calls:
        chat.append(json.loads(json.dumps(api.results).replace("call_1", call.call_id)))
    elsewhere = {key: request[key] for key in ("previous_response_id", "conversation") if key in request}
    return chat.fit(dialect=api.dialect, override={"off": True}, request=elsewhere).messages
