"""Whole replies and streams: recorded ones and odd ones, complete and cut off."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.core.errors import MessageError
from refold.core.message import Usage
from refold.dialects import anthropic, openai_chat, openai_responses
from refold.dialects.replies import ParsedReply, collect, take
from sse import events

DATA = Path(__file__).parents[2] / "shared" / "data" / "recordings"
FORMATS = {"anthropic_messages": anthropic, "openai_chat": openai_chat, "openai_responses": openai_responses}
recorded = pytest.mark.skipif(not DATA.exists(), reason="the recorded replies are not beside the project")


def recordings(name, kind):
    lines = (DATA / f"api_{name}.jsonl").read_text().splitlines()
    found = [one for one in map(json.loads, lines) if one["status"] == 200]
    return [one["response"] for one in found if isinstance(one["response"], kind)]


def alone(usage):
    """The same, however often the model was called for it."""
    return usage and msgspec.structs.replace(usage, calls=1)


def usage_of(usage):
    if not usage:
        return None
    if "prompt_tokens" in usage:
        input, output, details = usage["prompt_tokens"], usage["completion_tokens"], "prompt_tokens_details"
    else:
        input, output, details = usage["input_tokens"], usage["output_tokens"], "input_tokens_details"
    if "cache_read_input_tokens" in usage:
        read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return Usage(input + read + written, output, read, written)
    more = usage[details]
    return Usage(input, output, more["cached_tokens"], more.get("cache_write_tokens", 0))


def messages_of(reply):
    if "choices" in reply:
        return [reply["choices"][0]["message"]]
    return reply["output"] if "output" in reply else [{"role": "assistant", "content": reply["content"]}]


@recorded
@pytest.mark.parametrize("name", FORMATS)
def test_every_recorded_reply_is_taken_as_it_came(name):
    for value in recordings(name, dict):
        if str(value.get("object")).startswith("response."):  # a compaction, a count of tokens
            assert take(value) is None
            continue
        reply = take(value)
        assert alone(reply.usage) == usage_of(value["usage"])
        assert reply.messages == messages_of(value)
        assert (reply.dialect, reply.model) == (FORMATS[name].DIALECT, value["model"])
        assert reply.finish
        for message in reply.messages:
            FORMATS[name].parse(message)
            assert take(message) is None


@recorded
@pytest.mark.parametrize("name", FORMATS)
def test_every_recorded_stream_is_collected(name):
    shapes = {shape for value in recordings(name, dict) for shape in shapes_of(messages_of_any(value))}
    for text in recordings(name, str):
        chunks = events(text)
        before = json.dumps(chunks)
        reply = collect(chunks)
        assert json.dumps(chunks) == before
        assert reply.messages
        assert alone(reply.usage) == usage_of(last_usage(chunks))
        assert reply.finish not in (None, "interrupted")
        assert reply.model
        for message in reply.messages:
            FORMATS[name].parse(message)
        assert shapes_of(reply.messages) <= shapes


@recorded
@pytest.mark.parametrize("name", FORMATS)
def test_a_recorded_stream_may_be_cut_off_anywhere(name):
    for text in recordings(name, str):
        whole, chunks = collect(events(text)), events(text)
        for end in range(1, len(chunks) - 1):
            reply = collect(chunks[:end])
            for message in reply.messages:
                FORMATS[name].parse(message)
            assert said(reply) <= said(whole) + 30
        for end in range(0, len(text), max(1, len(text) // 50)):
            collect(events(text[:end]))


@recorded
def test_a_response_without_its_last_events_says_the_same():
    def understood(chunks):
        parsed = map(openai_responses.parse, collect(chunks).messages)
        return [(message.text, message.calls) for message in parsed if message.text or message.calls]

    for text in recordings("openai_responses", str):
        chunks = events(text)
        began = [chunk for chunk in chunks[:-1] if chunk["type"] != "response.output_item.done"]
        assert understood(chunks) == understood(chunks[:-1])
        if not any("tool_search_call" in json.dumps(chunk) for chunk in chunks):  # these come without deltas
            assert understood(chunks) == understood(began)


def messages_of_any(reply):
    return messages_of(reply) if "choices" in reply or "content" in reply or "output" in reply else []


def last_usage(chunks):
    nested = [chunk.get("response") or chunk.get("message") or chunk for chunk in chunks]
    return {key: n for one in nested for key, n in (one.get("usage") or {}).items()}


def said(reply):
    return len(json.dumps(reply.messages))


def shapes_of(messages):
    """The fields of messages and of their blocks, but for those that say null or nothing."""
    blocks = [
        block for message in messages for block in message.get("content") or () if isinstance(block, dict)
    ]
    optional = ("citations", "annotations", "caller", "refusal", "tool_calls", "content", "phase")
    return {
        (one.get("type"), tuple(sorted(key for key in one if key not in optional)))
        for one in [*messages, *blocks]
    }


def chat(**message):
    return {"object": "chat.completion", "choices": [{"message": {"role": "assistant", **message}}]}


def test_an_ordinary_message_is_no_reply():
    for value in (
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "x", "usage": {"input_tokens": 1}},
        {"type": "message", "role": "assistant", "content": [], "id": "msg_1", "status": "completed"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"object": "text_completion", "choices": [{"text": "x"}]},
        {"choices": []},
        [],
        "x",
        None,
    ):
        assert take(value) is None
    assert collect([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]) is None
    assert collect([chat(content="x")]) is None
    assert collect([{"type": "message", "role": "user", "content": "x"}]) is None
    assert collect([{"type": "ping"}]) is None
    assert collect([]) is None


def test_what_is_refused_when_sent_back_is_left_out():
    sound = {"id": "audio_1", "data": "AAAA", "transcript": "Hello", "expires_at": 5}
    value = chat(content=None, refusal=None, annotations=[], tool_calls=[], function_call=None, audio=sound)
    assert take(value).messages == [
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": {"id": "audio_1"}}
    ]


def test_fields_that_we_do_not_know_are_kept():
    assert take(chat(content="x", reasoning_content="hm")).messages[0]["reasoning_content"] == "hm"


def test_tokens_from_the_cache_are_counted_once():
    counts = {"input_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    value = {"type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
    assert take({**value, "usage": {**counts, "output_tokens": 7}}).usage == Usage(125, 7, 100, 20)
    assert take({**value, "usage": {"input_tokens": 5, "cache_read_input_tokens": None}}).usage == Usage(5)
    details = {
        "prompt_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
        "cache_read_input_tokens": 3,
    }
    assert take({**chat(content="x"), "usage": details}).usage == Usage(5, 0, 3)


def delta(index=0, finish=None, **fields):
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": index, "delta": fields, "finish_reason": finish}],
    }


def piece(index, **fields):
    return {"index": index, **fields}


def test_the_pieces_of_a_chat_stream_are_joined():
    reply = collect(
        [
            {"object": "", "choices": [], "prompt_filter_results": []},
            delta(role="assistant", content="", refusal=None),
            delta(reasoning_content="h", content=None),
            delta(reasoning_content="m"),
            delta(content="I "),
            delta(content="other choice", index=1),
            delta(content="look"),
            delta(tool_calls=[piece(0, id="a", type="function", function={"name": "f", "arguments": ""})]),
            delta(tool_calls=[piece(0, function={"arguments": '{"x"'})]),
            delta(tool_calls=[piece(1, id="b", function={"name": "g"})]),
            delta(tool_calls=[piece(0, id="a", function={"name": "f", "arguments": ": 1}"})]),
            delta(finish="tool_calls"),
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}, "model": "m"},
        ]
    )
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"type": "function", "id": "b", "function": {"arguments": "", "name": "g"}},
    ]
    message = {"role": "assistant", "content": "I look", "refusal": None, "reasoning_content": "hm"}
    assert reply == ParsedReply(
        "openai-chat", [{**message, "tool_calls": calls}], Usage(9, 4), "m", "tool_calls"
    )


@pytest.mark.parametrize("index", [0, None])
def test_servers_that_cannot_count_are_understood(index):
    number = {} if index is None else {"index": index}
    calls = [
        [{**number, "id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        for id in "ab"
    ]
    (message,) = collect([delta(tool_calls=call) for call in calls]).messages
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]


def test_numbered_details_go_on_where_they_began():
    thought = {"type": "reasoning.text", "index": 0, "format": "v1"}
    chunks = [delta(reasoning_details=[{**thought, "text": text}]) for text in ("h", "m")]
    assert collect(chunks).messages[0]["reasoning_details"] == [{**thought, "text": "hm"}]


def test_content_that_began_as_parts_goes_on_as_text():
    thought = {"type": "thinking", "thinking": []}
    chunks = [delta(content=[thought]), delta(content="I "), delta(content="look")]
    assert collect(chunks).messages[0]["content"] == [thought, {"type": "text", "text": "I look"}]


def test_a_cut_chat_stream_keeps_what_came():
    call = [piece(0, id="a", type="function", function={"name": "f", "arguments": '{"x'})]
    reply = collect([delta(content="I"), delta(tool_calls=call), {"error": {"message": "overloaded"}}])
    assert reply.finish == "interrupted"
    assert reply.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"x'
    assert collect([delta(role="assistant", content="")]).messages == []


START = {"type": "message_start", "message": {"model": "m", "usage": {"input_tokens": 9, "output_tokens": 1}}}
STOP = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}}


def begin(index, **block):
    return {"type": "content_block_start", "index": index, "content_block": block}


def more(index, **delta):
    return {"type": "content_block_delta", "index": index, "delta": delta}


def end(index):
    return {"type": "content_block_stop", "index": index}


def test_the_pieces_of_an_anthropic_stream_are_joined():
    reply = collect(
        [
            START,
            begin(0, type="thinking", thinking="", signature=""),
            more(0, type="thinking_delta", thinking="h"),
            {"type": "ping"},
            more(0, type="thinking_delta", thinking="m"),
            more(0, type="signature_delta", signature="s"),
            end(0),
            begin(1, type="text", text="", citations=None),
            more(1, type="text_delta", text="I look"),
            more(1, type="citations_delta", citation={"n": 1}),
            more(1, type="citations_delta", citation={"n": 2}),
            end(1),
            begin(2, type="compaction", content=None),
            more(2, type="compaction_delta", content="so far", encrypted_content="e"),
            end(2),
            begin(3, type="tool_use", id="a", name="f", input={}),
            more(3, type="input_json_delta", partial_json=""),
            more(3, type="input_json_delta", partial_json='{"x": '),
            more(3, type="input_json_delta", partial_json="1.0}"),
            end(3),
            begin(4, type="tool_use", id="b", name="g", input={}),
            more(4, type="input_json_delta", partial_json=""),
            end(4),
            STOP,
            {"type": "message_stop"},
        ]
    )
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I look", "citations": [{"n": 1}, {"n": 2}]},
        {"type": "compaction", "content": "so far", "encrypted_content": "e"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1.0}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]
    message = {"role": "assistant", "content": content}
    assert reply == ParsedReply("anthropic", [message], Usage(9, 5), "m", "tool_use")


def test_a_cut_anthropic_stream_keeps_what_came_in_a_form_that_is_taken_back():
    use = begin(0, type="tool_use", id="a", name="f", input={})
    server = begin(0, type="server_tool_use", id="s", name="web_search", input={})
    query = more(0, type="input_json_delta", partial_json='{"query": "Os')
    thought = begin(0, type="thinking", thinking="", signature="")
    unsent = '[interrupted server_tool_use: web_search {"_partial":"{\\"query\\": \\"Os"}]'
    for chunks, content in (
        (
            [use, query],
            [{"type": "tool_use", "id": "a", "name": "f", "input": {"_partial": '{"query": "Os'}}],
        ),
        ([use], [{"type": "tool_use", "id": "a", "name": "f", "input": {"_partial": ""}}]),
        ([use, end(0)], [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]),
        (
            [thought, more(0, type="thinking_delta", thinking="Let me")],
            [{"type": "text", "text": "[interrupted thinking: Let me]"}],
        ),
        ([server, query], [{"type": "text", "text": unsent}]),
        ([begin(0, type="text", text=""), more(0, text="I")], [{"type": "text", "text": "I"}]),
    ):
        reply = collect([START, *chunks, {"type": "error", "error": {"type": "overloaded_error"}}])
        assert reply == ParsedReply(
            "anthropic", [{"role": "assistant", "content": content}], Usage(9, 1), "m", "interrupted"
        )
    assert collect([START, thought]).messages == []
    assert collect([START]).messages == []


def test_input_that_the_model_never_finished_is_kept_in_a_whole_stream_too():
    broken = more(0, type="input_json_delta", partial_json='{"x": ')
    use = begin(0, type="tool_use", id="a", name="f", input={})
    reply = collect([START, use, broken, end(0), STOP])
    assert (reply.messages[0]["content"][0]["input"], reply.finish) == ({"_partial": '{"x": '}, "tool_use")


def response(kind, **fields):
    return {"type": f"response.{kind}", **fields}


FIRST = response(
    "created", response={"object": "response", "model": "m", "status": "in_progress", "output": []}
)


def test_a_finished_response_says_it_all_itself():
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    counts = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
    last = {"object": "response", "model": "m", "status": "incomplete", "output": [item], "usage": counts}
    reply = collect([FIRST, response("incomplete", response=last)])
    assert reply == ParsedReply("openai-responses", [item], Usage(9, 4, 2), "m", "incomplete")
    silent = response("completed", response={**last, "output": []})
    done = response("output_item.done", output_index=0, item=item)
    assert collect([FIRST, done, silent]).messages == [item]


def test_a_cut_response_keeps_what_came():
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "", "status": "in_progress"}
    reply = collect(
        [
            FIRST,
            response("output_item.added", output_index=0, item=reasoning),
            response("output_item.done", output_index=0, item={**reasoning, "encrypted_content": "e"}),
            response("output_item.added", output_index=1, item=message),
            response("output_text.delta", output_index=1, content_index=0, delta="I "),
            response("output_text.delta", output_index=1, content_index=0, delta="look"),
            response("output_item.added", output_index=2, item=call),
            response("function_call_arguments.delta", output_index=2, delta='{"x'),
            response("output_item.added", output_index=3, item=reasoning),
            response("reasoning_summary_text.delta", output_index=3, summary_index=0, delta="hm"),
        ]
    )
    text = {"type": "output_text", "text": "I look", "annotations": []}
    thought = {"type": "output_text", "text": "[interrupted reasoning: hm]", "annotations": []}
    assert reply == ParsedReply(
        "openai-responses",
        [
            {**reasoning, "encrypted_content": "e"},
            {**message, "status": "incomplete", "content": [text]},
            {**call, "status": "incomplete", "arguments": '{"x'},
            {"type": "message", "role": "assistant", "content": [thought]},
        ],
        None,
        "m",
        "interrupted",
    )


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"object": "chat.completion"}, "reply"),
        ({"choices": [{"message": 5}]}, "reply"),
        ({"object": "response", "output": [5]}, "reply"),
        ({**chat(content="x"), "usage": {"prompt_tokens": "5"}}, "reply"),
        ({**chat(content="x"), "usage": 5}, "reply"),
        ({"type": "message", "role": "assistant", "stop_reason": None, "usage": {}}, "reply"),
    ],
)
def test_a_bad_reply_says_where(value, where):
    with pytest.raises(MessageError) as caught:
        take(value)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("chunks", "where"),
    [
        ([delta(content="x"), {"role": "user"}], "chunks[1]"),
        ([delta(content="x"), 5], "chunks[1]"),
        ([delta(tool_calls=[5])], "chunks[0]"),
        ([START, more(0, text="x")], "chunks[1]"),
        ([START, begin([])], "chunks[1]"),
        ([FIRST, response("output_text.delta", output_index=0, delta="x")], "chunks[1]"),
    ],
)
def test_a_chunk_that_does_not_belong_says_where(chunks, where):
    with pytest.raises(MessageError) as caught:
        collect(chunks)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([START, {"type": "content_block_start", "content_block": {}}], "the field 'index' is missing"),
        ([START, more(0, text="x")], "no chunk before it began the block or item that it continues"),
        ([delta(tool_calls=[5])], "a field has a value of another type than the API documents"),
    ],
)
def test_a_chunk_that_does_not_belong_says_what_is_wrong_with_it(chunks, problem):
    with pytest.raises(MessageError, match=problem) as caught:
        collect(chunks)
    assert "Error" not in caught.value.problem


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"object": "chat.completion"}, "the field 'choices' is missing"),
        ({"object": "response", "output": ["x"]}, "a field has a value of another type"),
        (
            {**chat(content="x"), "usage": {"prompt_tokens": "5"}},
            "prompt_tokens is '5', not a number of tokens",
        ),
    ],
)
def test_a_bad_reply_says_what_is_wrong_with_it(value, problem):
    with pytest.raises(MessageError, match=problem) as caught:
        take(value)
    assert "Error" not in caught.value.problem


fields = st.sampled_from(
    ["index", "delta", "content", "text", "usage", "input", "id", "choices", "tool_calls", "function", "item"]
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=4),
    max_leaves=12,
)
good = [
    START,
    begin(0, type="tool_use", input={}),
    more(0, partial_json="{"),
    end(0),
    STOP,
    FIRST,
    delta(content="x"),
]
good += [
    response("output_item.added", output_index=0, item={"type": "reasoning", "summary": []}),
    response("reasoning_summary_text.delta", output_index=0, summary_index=0, delta="x"),
    delta(tool_calls=[piece(0, id="a", function={"name": "f"})]),
]
odd = st.builds(
    lambda chunk, change: {**chunk, **change},
    st.sampled_from(good),
    st.dictionaries(fields, junk, max_size=2),
)


@given(st.lists(st.sampled_from(good) | odd | junk, max_size=6))
def test_junk_is_collected_or_refused_and_nothing_else(chunks):
    try:
        reply = collect(chunks)
    except MessageError:
        return
    assert reply is None or all(isinstance(message, dict) for message in reply.messages)


@given(
    junk
    | st.builds(
        lambda value, change: {**value, **change}, st.just(chat(content="x")), st.dictionaries(fields, junk)
    )
)
def test_junk_is_taken_or_refused_and_nothing_else(value):
    try:
        reply = take(value)
    except MessageError:
        return
    assert reply is None or all(isinstance(message, dict) for message in reply.messages)
