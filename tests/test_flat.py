"""Older flat records: JSON in `content` is opened where it is parts, left alone where somebody said it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from refold.core.errors import MessageError
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Reasoning,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.dialects.flat import DIALECT, FLAT, parse, steps
from refold.dialects.registry import recognize

START = 1_700_000_000
"""2023-11-14T22:13:20Z"""


def said(content, role="assistant", **fields):
    return parse({"role": role, "content": content, **fields}).parts


def test_a_text_is_a_text():
    assert said("Hello", "user") == (Text("Hello"),)
    assert said("", "user") == (Text(""),)
    assert said(None) == ()


# proves: C8
def test_a_text_that_was_stored_as_json_is_the_text():
    assert said(json.dumps('say "hi"\n'), "user") == (Text('say "hi"\n'),)
    assert said('{"text": "Hello"}', "user") == (Text("Hello"),)
    assert said({"text": "Hello"}, "user") == (Text("Hello"),)


# proves: C8
@pytest.mark.parametrize(
    "pasted",
    [
        '{"a": 1}',
        '{"text": "x", "lang": "en"}',
        '{"type": "text", "text": "x"}',
        "[]",
        "[1, 2, 3]",
        '["a"]',
        '[{"name": "x"}]',
        '[{"type": "Point", "coordinates": [1, 2]}]',
        '[{"type": "text", "value": 1}]',
        '[{"type": "text", "text": "x"}, 5]',
        '"not the whole" of it',
        '[{"type": "text"',
        "null",
        "17",
    ],
)
def test_json_that_somebody_said_stays_what_they_said(pasted):
    assert said(pasted, "user") == (Text(pasted),)


def test_parts_of_the_ai_sdk_are_opened():
    parts = [
        {"type": "reasoning", "text": "hm"},
        {"type": "text", "text": "I look"},
        {"type": "tool-call", "toolCallId": "a", "toolName": "look", "args": {"at": 1}},
    ]
    assert said(json.dumps(parts)) == (Reasoning("hm"), Text("I look"), ToolCall("a", "look", '{"at":1}'))
    answer = [{"type": "tool-result", "toolCallId": "a", "toolName": "look", "result": {"n": 1}}]
    assert said(json.dumps(answer), "tool") == (ToolResult("a", '{"n":1}', "look"),)


def test_parts_of_anthropic_are_opened():
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}},
    ]
    assert said(json.dumps(parts)) == (Reasoning("hm"), ToolCall("a", "look", '{"at":1}'))
    answer = [{"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True}]
    answered = Message("tool", [ToolResult("a", "no", is_error=True)])
    assert parse({"role": "user", "content": json.dumps(answer)}) == answered


def test_parts_of_openai_are_opened():
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "https://e.org/a"}},
        {"type": "output_text", "text": "x", "annotations": []},
    ]
    assert said(json.dumps(parts)) == (Text("see"), Media("image", url="https://e.org/a"), Text("x"))


# proves: C8, C3
def test_parts_of_our_founders_are_opened():
    marker = {"type": "compaction-marker", "summary": "so far", "compactedAt": 5}
    result = {"type": "tool-result", "toolCallId": "a", "toolName": "look", "output": {"n": 1}}
    assert said(json.dumps([{"type": "step-start"}, marker])) == (StepStart(), CompactionMarker(marker))
    assert said([result], "tool") == (ToolResult("a", '{"n":1}', "look"),)


def test_a_ui_message_has_calls_with_their_results():
    parts = [
        {"type": "step-start"},
        {"type": "text", "text": "I look", "state": "done"},
        {"type": "tool-look", "toolCallId": "a", "state": "output-available", "input": {}, "output": [1]},
        {"type": "tool-look", "toolCallId": "b", "state": "output-error", "input": {}, "errorText": "no"},
        {
            "type": "dynamic-tool",
            "toolName": "see",
            "toolCallId": "c",
            "state": "input-available",
            "input": {},
        },
        {"type": "file", "mediaType": "image/png", "url": "https://e.org/a"},
    ]
    record = {"id": "m1", "role": "assistant", "parts": parts}
    assert recognize(record) == DIALECT
    assert parse(record) == Message(
        "assistant",
        [
            StepStart(),
            Text("I look"),
            ToolCall("a", "look", "{}"),
            ToolResult("a", "[1]", "look"),
            ToolCall("b", "look", "{}"),
            ToolResult("b", "no", "look", True),
            ToolCall("c", "see", "{}"),
            Media("image", url="https://e.org/a", mime="image/png"),
        ],
        id="m1",
    )


def test_a_turn_in_one_record_is_cut_where_the_model_spoke_again():
    a, b = (ToolCall("a", "f", "{}"), ToolResult("a", "1")), (ToolCall("b", "f", "{}"), ToolResult("b", "2"))
    turn = [StepStart(), Text("I look"), *a, *b, StepStart(), *a, Text("done")]
    assert [step.parts for step in steps(Message("assistant", turn, id="m"))] == [
        (StepStart(), Text("I look"), *a, *b),
        (StepStart(), *a),
        (Text("done"),),
    ]
    assert [step.id for step in steps(Message("assistant", turn, id="m"))] == ["m", None, None]
    assert steps(Message("user", "x")) == [Message("user", "x")]
    assert steps(Message("user", ())) == [Message("user", ())]


def test_a_ui_message_of_version_4_has_invocations():
    done = {"state": "result", "toolCallId": "a", "toolName": "look", "args": {"at": 1}, "result": "x"}
    both = (ToolCall("a", "look", '{"at":1}'), ToolResult("a", "x", "look"))
    part = {"type": "tool-invocation", "toolInvocation": done}
    assert parse({"role": "assistant", "content": "", "parts": [part]}).parts == both
    assert said("I look", toolInvocations=[done]) == (Text("I look"), *both)
    partial = {"type": "tool-invocation", "toolInvocation": {**done, "state": "partial-call"}}
    assert said([partial]) == (Opaque(partial, DIALECT),)


def test_a_tool_that_the_provider_ran_is_nobodys_call():
    own = [
        {"type": "tool-call", "toolCallId": "a", "toolName": "search", "input": {}, "providerExecuted": True},
        {
            "type": "tool-result",
            "toolCallId": "a",
            "toolName": "search",
            "output": {"type": "text", "value": "x"},
        },
    ]
    text = {"type": "text", "text": "found"}
    assert said(json.dumps([*own, text])) == (*(Opaque(part, "ai-sdk") for part in own), Text("found"))


@pytest.mark.parametrize(
    "calls",
    [
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
        [{"toolCallId": "a", "toolName": "f", "args": {"x": 1}}],
        [{"id": "a", "name": "f", "arguments": '{"x":1}'}],
        [{"id": "a", "name": "f", "input": {"x": 1}}],
    ],
)
def test_calls_may_stand_beside_the_content(calls):
    call = ToolCall("a", "f", '{"x":1}')
    assert said("I call", tool_calls=calls) == (Text("I call"), call)
    assert said("I call", toolCalls=json.dumps(calls)) == (Text("I call"), call)


def test_a_call_that_stands_twice_is_made_once():
    part = {"type": "tool-call", "toolCallId": "a", "toolName": "f", "input": {}}
    assert said(json.dumps([part]), toolCalls=[{"toolCallId": "a", "toolName": "f"}]) == (
        ToolCall("a", "f", "{}"),
    )


def test_what_a_tool_said_stays_as_it_was_said():
    for text in ("plain", '"quoted"', '{"text": "x"}', '[{"type": "text", "text": "x"}]'):
        assert said(text, "tool", tool_call_id="a", tool_name="f") == (ToolResult("a", text, "f"),)
    assert said("x", "tool", toolCallId="a", name="f") == (ToolResult("a", "x", "f"),)
    assert said({"n": 1}, "tool", toolCallId="a") == (ToolResult("a", '{"n":1}'),)
    assert said([{"type": "text", "text": "x"}], "tool", toolCallId="a") == (ToolResult("a", (Text("x"),)),)
    assert said("x", "tool") == (Text("x"),)


# proves: C8
def test_what_is_known_of_a_record_is_kept():
    record = {
        "id": "m1",
        "role": "ai",
        "content": "x",
        "created_at": "2024-01-01",
        "modelId": "gpt-4",
        "finishReason": "stop",
        "isSummary": True,
        "metadata": {"turn": 1},
    }
    assert parse(record) == Message(
        "assistant", "x", id="m1", model="gpt-4", finish="stop", summary=True, meta={"turn": 1}
    )


def test_an_unknown_part_beside_known_ones_is_kept():
    parts = [{"type": "source-url", "url": "https://e.org"}, {"type": "text", "text": "x"}]
    assert said(json.dumps(parts)) == (Opaque(parts[0], DIALECT), Text("x"))
    assert said(parts[:1]) == (Opaque(parts[0], DIALECT),)


@pytest.mark.parametrize(
    "record",
    [
        {"role": "user", "content": "x", "context_id": "c", "index": 0, "timestamp": "2024-01-01"},
        {"role": "tool", "content": "x", "toolCallId": "a", "name": "f"},
        {"role": "user", "content": {"text": "x"}, "created_at": 5},
        {"role": "user", "parts": [{"type": "text", "text": "x"}]},
        {"id": "m1", "role": "assistant", "content": '[{"type": "text", "text": "x"}]'},
        {"role": "assistant", "content": '[{"type": "tool-call", "toolCallId": "a", "toolName": "f"}]'},
        {"role": "assistant", "content": "", "toolCalls": [{"toolCallId": "a", "toolName": "f", "args": {}}]},
        {"role": "tool", "tool_call_id": "a", "content": "x", "timestamp": "2024-01-01"},
        {"role": "human", "content": "x"},
    ],
)
def test_a_row_is_recognized_by_what_no_provider_has_in_a_message(record):
    assert recognize(record) == DIALECT
    assert parse(record).role


@pytest.mark.parametrize(
    "value",
    [
        {"role": "user", "content": "x"},
        {"role": "user", "content": '[{"type": "text", "text": "pasted"}]'},
        {"role": "user", "content": '[{"type": "tool-call", "toolCallId": "pasted"}]'},
        {"role": "user", "content": '{"text": "pasted"}', "id": "m1"},
        {"role": "user", "content": "[1, 2]", "id": "m1"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "parts": [{"text": "for Gemini"}]},
        {"type": "message", "role": "user", "content": "x"},
        {"content": "x", "timestamp": 5},
        "x",
        None,
    ],
)
def test_a_providers_message_is_no_row(value):
    assert recognize(value) != DIALECT


@pytest.mark.parametrize("model", ["gpt-5", "claude-sonnet-5", None])
def test_rows_of_a_flat_history_are_appended_as_they_are_with_their_own_times(model):
    call = [{"type": "tool-call", "toolCallId": "a", "toolName": "add_page", "input": {"slug": "team"}}]
    result = [{"type": "tool-result", "toolCallId": "a", "toolName": "add_page", "output": {"id": 7}}]
    rows = [
        {"id": "m1", "role": "user", "content": '{"text": "Add a page."}', "createdAt": START},
        {"id": "m2", "role": "assistant", "content": json.dumps(call), "createdAt": START * 1000 + 500},
        {"id": "m3", "role": "tool", "content": json.dumps(result), "created_at": "2023-11-14T22:13:22Z"},
        {"id": "m4", "role": "assistant", "content": '[{"type": "text", "text": "Done."}]'},
        {"id": "m5", "role": "assistant", "content": "", "toolCalls": json.loads(json.dumps(call))},
    ]
    together, alone = (refold.open("rows", store="memory://", model=model) for _ in range(2))
    together.append(rows)
    for row in [*rows[:3], *rows[4:]]:
        alone.append(row)
    for chat, count in ((together, 5), (alone, 4)):
        stored = chat.get_all()
        assert len(stored) == count
        assert stored[0].message.text == "Add a page."
        assert [one.timestamp.timestamp() - START for one in stored[:3]] == [0, 0.5, 2]
        assert stored[1].message.calls == stored[-1].message.calls
        assert stored[1].message.calls[0].input == '{"slug":"team"}'
        assert stored[2].message.results[0].output == '{"id":7}'
        assert chat.fit(dialect="openai-chat").messages[0] == {"role": "user", "content": "Add a page."}
    assert together.get_all()[3].message.text == "Done."


@pytest.mark.parametrize("time", ["yesterday", "", -5, 1e300, True, [], {"seconds": 5}])
def test_a_row_whose_time_cannot_be_read_has_the_time_at_which_it_was_appended(time):
    chat = refold.open("rows", store="memory://")
    chat.append([{"role": "user", "content": "x", "created_at": time}, {"role": "user", "content": "y"}])
    first, second = chat.get_all()
    assert first.timestamp == second.timestamp


@pytest.mark.parametrize(
    ("value", "where"), [("x", "m"), ({"content": "x"}, "m.role"), ({"role": "data"}, "m.role")]
)
def test_only_what_is_nobodys_is_refused(value, where):
    with pytest.raises(MessageError) as caught:
        parse(value, "m")
    assert caught.value.where == where


def test_a_row_of_several_results_becomes_a_message_for_each():
    uses = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in ("a", "b")]
    chat = refold.open("rows", store="memory://")
    chat.append({"role": "user", "content": "Go", "createdAt": START})
    chat.append({"role": "assistant", "content": uses, "createdAt": START})
    chat.append({"role": "user", "content": results, "createdAt": START})
    stored = [one.message for one in chat.get_all()]
    assert [message.results for message in stored[2:]] == [(ToolResult("a", "a"),), (ToolResult("b", "b"),)]


fields = st.sampled_from(
    [
        "type",
        "text",
        "content",
        "parts",
        "toolCallId",
        "tool_call_id",
        "toolName",
        "state",
        "tool_calls",
        "id",
        "toolInvocations",
        "toolInvocation",
        "input",
        "url",
        "data",
        "providerExecuted",
        "name",
        "metadata",
    ]
)
kinds = st.sampled_from(
    ["text", "tool-call", "tool-result", "tool-x", "dynamic-tool", "tool-invocation", "file"]
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4) | kinds,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fields, inner, max_size=6),
    max_leaves=24,
)
odd = st.builds(
    lambda role, content, rest, as_text: {
        **rest,
        "role": role,
        "content": json.dumps(content) if as_text else content,
    },
    st.sampled_from(["user", "assistant", "tool", "system"]),
    junk,
    st.dictionaries(fields, junk, max_size=5),
    st.booleans(),
)


@given(junk | odd)
def test_junk_is_understood_or_refused_and_nothing_else(value):
    recognize(value)
    try:
        message = parse(value)
    except MessageError:
        assert not isinstance(value, dict) or value.get("role") not in ("user", "assistant", "tool", "system")
        return
    assert [step.role for step in steps(message)] == [message.role] * len(steps(message))
    assert FLAT.unread(value) == []
