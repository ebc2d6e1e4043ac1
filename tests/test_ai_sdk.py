"""The AI SDK's messages: what is understood, what stays the provider's own, what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.core.errors import MessageError
from refold.core.message import Media, Message, Opaque, Reasoning, StepStart, Text, ToolCall, ToolResult
from refold.dialects.ai_sdk import AI_SDK, DIALECT, parse, render


def call(id, **more):
    return {"type": "tool-call", "toolCallId": id, "toolName": "look", "input": {"at": 1}, **more}


def result(id, output, **more):
    return {"type": "tool-result", "toolCallId": id, "toolName": "look", "output": output, **more}


def said(*content):
    return parse({"role": "assistant", "content": list(content)}).parts


def told(output):
    (part,) = parse({"role": "tool", "content": [result("a", output)]}).parts
    return part.output, part.is_error


def test_a_text_is_a_text_in_every_role_that_speaks():
    for role in ("system", "user", "assistant"):
        assert parse({"role": role, "content": "x"}) == Message(role, "x")


def test_what_an_assistant_says_is_understood():
    assert said(
        {"type": "reasoning", "text": "hm", "providerOptions": {"anthropic": {"signature": "s"}}},
        {"type": "text", "text": "I look"},
        call("a"),
    ) == (Reasoning("hm"), Text("I look"), ToolCall("a", "look", '{"at":1}'))


def test_calls_of_version_4_have_args():
    old = {"type": "tool-call", "toolCallId": "a", "toolName": "look", "args": {"at": 1}}
    assert said(old) == (ToolCall("a", "look", '{"at":1}'),)


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "image", "image": "https://e.org/a"}, Media("image", url="https://e.org/a")),
        (
            {"type": "image", "image": "data:image/png;base64,AA"},
            Media("image", url="data:image/png;base64,AA"),
        ),
        (
            {"type": "image", "image": "AA", "mediaType": "image/gif"},
            Media("image", data="AA", mime="image/gif"),
        ),
        (
            {"type": "image", "image": "AA", "mimeType": "image/gif"},
            Media("image", data="AA", mime="image/gif"),
        ),
        (
            {"type": "file", "data": "AA", "mediaType": "audio/wav"},
            Media("audio", data="AA", mime="audio/wav"),
        ),
        (
            {"type": "file", "data": "AA", "mediaType": "application/pdf", "filename": "a.pdf"},
            Media("file", data="AA", mime="application/pdf", name="a.pdf"),
        ),
        (
            {"type": "file", "data": {"type": "url", "url": "https://e.org/a"}, "mediaType": "image"},
            Media("image", url="https://e.org/a", mime="image"),
        ),
        (
            {"type": "file", "data": {"type": "data", "data": "AA"}, "mediaType": "text/csv"},
            Media("file", data="AA", mime="text/csv"),
        ),
    ],
)
def test_files_of_every_version_are_understood(part, media):
    assert parse({"role": "user", "content": [part]}).parts == (media,)


# proves: C11
@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "data": {"type": "reference", "reference": {"openai": "f1"}}, "mediaType": "text"},
        {"type": "file", "data": {"type": "text", "text": "a,b"}, "mediaType": "text/csv"},
        {"type": "image", "image": {"0": 137}},
        {"type": "reasoning-file", "data": "AA", "mediaType": "image/png"},
        {"type": "tool-approval-request", "approvalId": "p", "toolCallId": "a"},
        {"type": "custom", "kind": "openai.compaction"},
        {"type": "hologram"},
        {"text": "no type"},
        {"type": 5},
    ],
)
def test_what_is_not_known_is_kept(part):
    assert said(part) == (Opaque(part, DIALECT),)
    (rendered,), lost = render(Message("assistant", (Opaque(part, DIALECT),)))
    assert rendered == {"role": "assistant", "content": [part]}
    assert lost == []


def test_a_tool_that_the_provider_ran_stays_where_it_is():
    own = call("a", providerExecuted=True), result("a", {"type": "json", "value": []})
    assert said(*own, call("b"))[:2] == tuple(Opaque(part, DIALECT) for part in own)
    assert said(call("c"), result("c", {"type": "text", "value": "x"}))[0] == Opaque(call("c"), DIALECT)
    assert AI_SDK.results({"role": "assistant", "content": list(own)}) == []


def test_results_that_come_late_from_the_provider_stay_too():
    late = result("a", {"type": "text", "value": "x"})
    assert said(late) == (Opaque(late, DIALECT),)


@pytest.mark.parametrize(
    ("output", "understood"),
    [
        ({"type": "text", "value": "x"}, ("x", False)),
        ({"type": "json", "value": {"a": [1.0]}}, ('{"a":[1.0]}', False)),
        ({"type": "error-text", "value": "no"}, ("no", True)),
        ({"type": "error-json", "value": None}, ("null", True)),
        ({"type": "execution-denied", "reason": "too dear"}, ("too dear", True)),
        ({"type": "execution-denied"}, ("Tool call execution denied.", True)),
        ("plain", ("plain", False)),
        ({"rows": 3}, ('{"rows":3}', False)),
        ({"type": "verse", "value": 1}, ('{"type":"verse","value":1}', False)),
    ],
)
def test_every_kind_of_output_is_understood(output, understood):
    assert told(output) == understood


def test_an_output_may_have_parts():
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image-data", "data": "AA", "mediaType": "image/png"},
        {"type": "image-url", "url": "https://e.org/a"},
        {"type": "media", "data": "AA", "mediaType": "image/png"},
        {"type": "file-data", "data": "AA", "mediaType": "text/csv", "filename": "a.csv"},
        {"type": "file-id", "fileId": "f1"},
    ]
    assert told({"type": "content", "value": parts}) == (
        (
            Text("see"),
            Media("image", data="AA", mime="image/png"),
            Media("image", url="https://e.org/a"),
            Media("image", data="AA", mime="image/png"),
            Media("file", data="AA", mime="text/csv", name="a.csv"),
            Opaque({"type": "file-id", "fileId": "f1"}, DIALECT),
        ),
        False,
    )


def test_results_of_version_4_are_understood():
    old = {"type": "tool-result", "toolCallId": "a", "toolName": "look", "result": {"n": 1}, "isError": True}
    nothing = {"type": "tool-result", "toolCallId": "b", "toolName": "look"}
    assert parse({"role": "tool", "content": [old, nothing]}).parts == (
        ToolResult("a", '{"n":1}', "look", True),
        ToolResult("b", "", "look"),
    )


def test_results_stand_together_with_approvals():
    approval = {"type": "tool-approval-response", "approvalId": "p", "approved": True}
    message = {"role": "tool", "content": [approval, result("a", "x"), result("b", "y")]}
    assert AI_SDK.results(message) == [1, 2]
    assert AI_SDK.unread(message) == []
    assert parse(message).parts[0] == Opaque(approval, DIALECT)
    assert render(parse(message))[0][0]["content"][0] == approval


def test_a_message_of_our_own_becomes_a_valid_one():
    parts = [Reasoning("hm"), Text("I look"), StepStart(), ToolCall("a", "look", '{"at": 1}')]
    content = [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "I look"}, call("a")]
    assert render(Message("assistant", parts)) == ([{"role": "assistant", "content": content}], [])
    assert render(Message("user", "x")) == ([{"role": "user", "content": "x"}], [])
    assert render(Message("user", ())) == ([{"role": "user", "content": ""}], [])
    assert render(Message("system", [Text("a"), Text("b")])) == ([{"role": "system", "content": "ab"}], [])


def test_a_call_that_is_no_json_is_sent_as_text():
    assert (
        render(Message("assistant", [ToolCall("a", "f", "{broken")]))[0][0]["content"][0]["input"]
        == "{broken"
    )


def test_results_come_right_after_their_calls():
    parts = [Text("go on"), ToolResult("a", "x", "look"), ToolResult("b", "no", is_error=True)]
    answers = [
        result("a", {"type": "text", "value": "x"}),
        {**result("b", {"type": "error-text", "value": "no"}), "toolName": "unknown"},
    ]
    tool, user = {"role": "tool", "content": answers}, {"role": "user", "content": "go on"}
    assert render(Message("user", parts)) == ([tool, user], [])
    assert [message["role"] for message in render(Message("assistant", parts))[0]] == ["assistant", "tool"]


def test_files_are_sent_in_a_form_that_every_version_takes():
    files = [
        Media("image", data="AA", mime="image/gif"),
        Media("file", url="https://e.org/a.pdf", name="a.pdf"),
        Media("audio", data="AA", mime="wav"),
    ]
    (user,), _ = render(Message("user", files))
    assert user["content"] == [
        {"type": "image", "image": "AA", "mediaType": "image/gif"},
        {
            "type": "file",
            "data": "https://e.org/a.pdf",
            "mediaType": "application/octet-stream",
            "filename": "a.pdf",
        },
        {"type": "file", "data": "AA", "mediaType": "audio/wav"},
    ]
    (assistant,), _ = render(Message("assistant", files[:1]))
    assert assistant["content"] == [{"type": "file", "data": "AA", "mediaType": "image/gif"}]
    (tool,), _ = render(Message("tool", [ToolResult("a", (Text("see"), *files[:2]))]))
    assert tool["content"][0]["output"]["value"] == [
        {"type": "text", "text": "see"},
        {"type": "image-data", "data": "AA", "mediaType": "image/gif"},
        {"type": "file-url", "url": "https://e.org/a.pdf"},
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message("user", "x", name="Ann"), ["the author's name"]),
        (Message("user", [Text("x"), Reasoning("hm")]), ["reasoning"]),
        (
            Message("assistant", [Opaque({"type": "server_tool_use"}, "anthropic")]),
            ["a server_tool_use of anthropic"],
        ),
        (Message("system", [Media("image", data="AA")]), ["image data of the system"]),
        (Message("system", [Opaque({"type": "verse"}, DIALECT)]), ["a verse of the system"]),
        (
            Message("tool", [ToolResult("a", (Media("image", url="https://e.org"),), "f", True)]),
            ["that a result is an error"],
        ),
    ],
)
def test_what_cannot_be_said_is_named(message, words):
    assert render(message)[1] == words


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([], "m"),
        ({"role": "developer", "content": "x"}, "m.role"),
        ({"role": "user"}, "m.content"),
        ({"role": "user", "content": [5]}, "m.content[0]"),
        ({"role": "tool", "content": "x"}, "m.content"),
        ({"role": "user", "content": [call("a")]}, "m.content[0].type"),
        ({"role": "user", "content": [result("a", "x")]}, "m.content[0].type"),
        ({"role": "assistant", "content": [call(5)]}, "m.content[0].toolCallId"),
        ({"role": "assistant", "content": [call("a", toolName=None)]}, "m.content[0].toolName"),
        ({"role": "tool", "content": [result("a", "x"), result(None, "x")]}, "m.content[1].toolCallId"),
        (
            {"role": "tool", "content": [result("a", {"type": "content", "value": [5]})]},
            "m.content[0].output.value[0]",
        ),
    ],
)
def test_what_is_wrong_is_named(value, where):
    with pytest.raises(MessageError) as caught:
        parse(value, "m")
    assert caught.value.where == where


fields = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "value",
        "data",
        "image",
        "url",
        "input",
        "output",
        "providerExecuted",
    ]
)
kinds = st.sampled_from(
    [
        "text",
        "tool-call",
        "tool-result",
        "file",
        "image",
        "image-data",
        "reasoning",
        "json",
        "error-json",
        "content",
    ]
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | kinds,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fields, inner, max_size=6),
    max_leaves=24,
)
blocks = st.dictionaries(fields, junk, max_size=3).flatmap(
    lambda block: kinds.map(lambda kind: {"toolCallId": "a", "toolName": "f", **block, "type": kind})
)
odd = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "tool", "system"]),
    junk | st.lists(blocks | junk, max_size=4),
)


@given(junk | odd)
def test_junk_is_understood_or_refused_and_nothing_else(value):
    try:
        message = parse(value)
    except MessageError:
        return
    rendered, _ = render(message)
    assert AI_SDK.unread(value) == []
    assert len(AI_SDK.results(value)) == len(message.results)
    assert all(parse(one).role in ("user", "assistant", "tool", "system") for one in rendered)


outputs = st.one_of(st.text(), st.lists(st.text().map(Text), max_size=2).map(tuple))
parts = st.one_of(
    st.builds(Text, st.text()),
    st.builds(Reasoning, st.text()),
    st.builds(ToolCall, st.text(min_size=1), st.text(), st.just('{"a":1.0}')),
)


# proves: C11
@given(st.lists(parts, min_size=1, max_size=5))
def test_what_we_write_we_read_again(said):
    message = Message("assistant", said)
    assert [parse(one) for one in render(message)[0]] == [message]


@given(
    st.lists(st.builds(ToolResult, st.text(min_size=1), outputs, st.text(min_size=1)), min_size=1, max_size=3)
)
def test_the_results_that_we_write_we_read_again(said):
    message = Message("tool", said)
    assert [parse(one) for one in render(message)[0]] == [message]
