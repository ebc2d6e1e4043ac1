"""OpenAI chat: what is understood, what is kept, what is refused."""

import pytest

from refold.core.errors import MessageError
from refold.core.message import Media, Message, Opaque, Reasoning, Text, ToolCall, ToolResult
from refold.dialects.openai_chat import parse, render


# proves: C3, C11
def test_every_kind_of_content_is_understood():
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_data": "BBBB", "filename": "a.pdf"}},
        {"type": "hologram", "size": 3},
    ]
    assert parse({"role": "user", "content": content}).parts == (
        Text("look"),
        Media("image", url="https://example.org/a.png"),
        Media("audio", data="AAAA", mime="wav"),
        Media("file", data="BBBB", name="a.pdf"),
        Opaque({"type": "hologram", "size": 3}, "openai-chat"),
    )


def test_calls_keep_their_arguments_as_written():
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1.0, "a":2'}},
        {"id": "b", "type": "custom", "custom": {"name": "g", "input": "raw text"}},
    ]
    message = parse({"role": "assistant", "content": None, "tool_calls": calls})
    assert message.parts == (ToolCall("a", "f", '{"b": 1.0, "a":2'), ToolCall("b", "g", "raw text"))


def test_a_developer_message_is_a_system_message():
    assert parse({"role": "developer", "content": "x"}).role == "system"


def test_results_may_have_parts():
    message = parse({"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]})
    assert message.parts == (ToolResult("a", (Text("x"),)),)
    assert message.text == "x"


def test_a_message_of_our_own_becomes_valid_chat():
    message = Message("assistant", [Reasoning("hm"), Text("I look"), ToolCall("a", "f", "{}")], name="bot")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look", "name": "bot", "tool_calls": [call]}
    assert render(message) == ([said], ["reasoning"])
    pictured = Message("user", [Text("see"), Media("image", data="AA", mime="image/gif")])
    url = {"url": "data:image/gif;base64,AA"}
    assert render(pictured)[0][0]["content"][1] == {"type": "image_url", "image_url": url}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([], "m"),
        ({"role": 5}, "m.role"),
        ({"role": "user", "content": {}}, "m.content"),
        ({"role": "user", "content": "x", "name": 5}, "m.name"),
        ({"role": "tool", "tool_call_id": 5}, "m.tool_call_id"),
        ({"role": "assistant", "tool_calls": {}}, "m.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "m.tool_calls[0]"),
    ],
)
def test_what_is_wrong_is_named(value, where):
    with pytest.raises(MessageError) as caught:
        parse(value, "m")
    assert caught.value.where == where
