"""Whatever is handed in is stored and fits, or is refused by its place; what was there before stays there."""

import copy
import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from enum import IntEnum, StrEnum
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import refold
from refold import Message, RefoldError, Text, ToolCall, ToolResult
from refold.cli import app
from refold.core.errors import MessageError, SettingError
from refold.core.message import CompactionMarker, Media, Opaque, Reasoning, StepStart, Usage
from refold.dialects.rules.targets import RULES
from refold.session.doctor import examine
from refold.stores.sqlite import SQLiteStore

Json = Any
LONE = "\ud800"
DIALECTS = list(RULES)
MODELS = ["gpt-5", "claude-sonnet-5", "gemini-2.5-pro", None]
FIRST = {"role": "user", "content": "Which files are large?"}
AGAIN = {"role": "user", "content": "Go on."}
IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def opened(model: str | None = "gpt-5", store: Any = "memory://") -> refold.Session:
    """A conversation in which something was said already."""
    session = refold.open("chat", store=store, model=model)
    session.append(FIRST)
    return session


def offer(session: refold.Session, value: Any, **rest: Any) -> RefoldError | None:
    """Appends it. Whatever it is, the session is sound afterwards; gives the refusal, if it was one."""
    before, refusal = list(session.events()), None
    try:
        session.append(value, **rest)
    except RefoldError as error:
        refusal = error
        assert list(session.events()) == before
    assert list(session.events())[: len(before)] == before
    sound(session)
    return refusal


def sound(session: refold.Session) -> None:
    """It takes more, it fits in every dialect, it can be read, exported and loaded."""
    session.append(AGAIN)
    for dialect in DIALECTS:
        sendable(session.fit(dialect=dialect).request)
    assert session.get_all()[-1].message.text == AGAIN["content"]
    assert session.view().messages[0].text == FIRST["content"]
    copied = refold.load(session.export(), store="memory://")
    assert list(copied.events()) == list(session.events())


def sendable(request: Json) -> None:
    """JSON in UTF-8, as the strictest reader takes it."""
    json.dumps(request, ensure_ascii=False, allow_nan=False).encode()


def refused(value: Any, **rest: Any) -> str:
    """What is said of something that must be refused."""
    error = offer(opened(), value, **rest)
    assert isinstance(error, MessageError), error
    return str(error)


def kind(value: object) -> str:
    return type(value).__name__


def nested(depth: int) -> Json:
    value: Json = "x"
    for _ in range(depth):
        value = [value]
    return value


# Any field of any message, replaced by anything


def picture(**more: Json) -> Json:
    return {"type": "image_url", "image_url": {"url": "https://example.org/a.png", **more}}


CHAT: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Look"}, picture(detail="low")], "name": "kim"},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}},
            {"id": "b", "type": "custom", "custom": {"name": "sh", "input": "ls"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "a 1"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "b 2"}]},
    {"role": "assistant", "content": "b."},
]
RESPONSES: list[Json] = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "Look"},
            {"type": "input_image", "image_url": "https://example.org/a.png"},
            {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
        ],
    },
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Hm."}],
        "encrypted_content": "c2Vh",
    },
    {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "ls", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a 1"}]},
    {"type": "custom_tool_call", "call_id": "b", "name": "sh", "input": "ls"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "b 2"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "b."}],
    },
]
ANTHROPIC: list[Json] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}},
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
            },
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "x"},
                "title": "T",
            },
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "ls", "input": {"path": "."}},
            {"type": "tool_use", "id": "b", "name": "ls", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a 1"}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "none", "is_error": True},
            {"type": "text", "text": "And?"},
        ],
    },
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "c2Vh"}]},
]
AI_SDK: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Look"},
            {"type": "image", "image": "https://example.org/a.png", "mediaType": "image/png"},
            {"type": "file", "data": "AAAA", "mediaType": "application/pdf", "filename": "a.pdf"},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "text": "Hm."},
            {"type": "tool-call", "toolCallId": "a", "toolName": "ls", "input": {"path": "."}},
            {
                "type": "tool-call",
                "toolCallId": "s",
                "toolName": "find",
                "input": {},
                "providerExecuted": True,
            },
            {
                "type": "tool-result",
                "toolCallId": "s",
                "toolName": "find",
                "output": {"type": "json", "value": 1},
            },
        ],
    },
    {
        "role": "tool",
        "content": [
            {
                "type": "tool-result",
                "toolCallId": "a",
                "toolName": "ls",
                "output": {"type": "content", "value": [{"type": "text", "text": "a 1"}]},
            },
        ],
    },
    {"role": "assistant", "content": "b."},
]
FLAT: list[Json] = [
    {"id": "m1", "role": "user", "content": "Look", "created_at": "2026-01-01", "context_id": "c"},
    {
        "id": "m2",
        "role": "assistant",
        "parts": [
            {"type": "step-start"},
            {"type": "text", "text": "I look."},
            {
                "type": "tool-ls",
                "toolCallId": "a",
                "state": "output-available",
                "input": {},
                "output": "a 1",
            },
        ],
    },
    {"id": "m3", "role": "assistant", "content": '[{"type": "text", "text": "b."}]', "tool_name": "ls"},
]
HISTORIES = {
    "openai-chat": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "ai-sdk": AI_SDK,
    "flat": FLAT,
}
REPLIES: dict[str, list[Json]] = {
    "chat": [
        {
            "object": "chat.completion",
            "model": "gpt-5",
            "choices": [{"index": 0, "message": CHAT[2], "finish_reason": "tool_calls"}],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }
    ],
    "responses": [
        {
            "object": "response",
            "model": "gpt-5",
            "status": "completed",
            "output": RESPONSES[2:4],
            "usage": {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 1}},
        }
    ],
    "anthropic": [
        {
            "type": "message",
            "role": "assistant",
            "model": "claude-sonnet-5",
            "content": ANTHROPIC[1]["content"],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 9, "output_tokens": 4, "cache_read_input_tokens": 1},
        }
    ],
    "chat-chunks": [
        {"model": "gpt-5", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "I"}}]},
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {
                        "content": " look",
                        "tool_calls": [
                            {
                                "index": 0,
                                "id": "a",
                                "type": "function",
                                "function": {"name": "ls", "arguments": "{"},
                            }
                        ],
                    },
                }
            ]
        },
        {
            "choices": [
                {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}}
            ],
            "usage": {"prompt_tokens": 9, "completion_tokens": 4},
        },
    ],
    "responses-chunks": [
        {"type": "response.created", "response": {"object": "response", "output": []}},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"type": "message", "role": "assistant", "content": []},
        },
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "b."},
        {
            "type": "response.completed",
            "response": {"object": "response", "status": "completed", "output": RESPONSES[-1:]},
        },
    ],
    "anthropic-chunks": [
        {
            "type": "message_start",
            "message": {"type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 9}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I look."}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "a", "name": "ls", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '{"path": "."}'},
        },
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 4},
        },
    ],
}


def places(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every field and entry in it, as the way there; not of what was made too deep."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if len(path) > 10:
        return []
    return [place for key, one in inner for place in ((*path, key), *places(one, (*path, key)))]


def changed(value: Json, path: tuple[Any, ...], change: Any) -> Json:
    """The same with what stands at a place put through `change`; without it where that gives nothing."""
    new, (key, *rest) = copy.copy(value), path
    if rest:
        new[key] = changed(value[key], tuple(rest), change)
        return new
    made = change(value[key])
    if made is DROPPED:
        del new[key]
    elif made is RENAMED and isinstance(new, dict):
        new[f"{key}{LONE}"] = new.pop(key)
    else:
        new[key] = None if made is RENAMED else made
    return new


DROPPED, RENAMED = object(), object()
WORDS = [
    *("", " ", "x", LONE, "é" + LONE * 40, "x" * 100, "user", "assistant", "system", "tool", "bot"),
    *("text", "tool_use", "tool_result", "thinking", "document", "image", "function_call", "reasoning"),
    *("function_call_output", "message", "tool-call", "tool-result", "compaction", "web_search_call"),
    *('{"a": NaN}', '{"a": 1e400}', '{"a": "\\ud800"}', "[1", "NaN", "5" * 5_000, '{"a": {"a": 1}, "a": 2}'),
    *("[" * 300 + "]" * 300, "[" * 100_000, "data:", "data:image/png;base64,!", "https://example.org"),
]
junk = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from([None, True, False, 0, -1, 5, 2**63, 10**400, 1.5, -0.0, 1e308]),
    st.sampled_from([float("nan"), float("inf"), b"x", bytearray(b"x"), 1j, Decimal(1), date(2026, 1, 1)]),
    st.sampled_from([[], {}, (), [None], [5], ["x"], [[]], [{}], ({},), {"type": 5}, {"type": "text"}]),
    st.sampled_from([{"a": LONE}, {LONE: 1}, {1: 2}, {None: 1}, {"type": "text", "text": 5}, {"x": {1}}]),
    st.sampled_from([[{"type": "text", "text": ""}], {"type": "tool_use"}, [{"type": "tool-call"}]]),
    st.builds(object),
    st.builds(nested, st.sampled_from([10, 150, 199, 200, 201, 1_000])),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text('a"\\\ud800é', max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
        max_leaves=6,
    ),
)
changes = st.one_of(
    st.builds(lambda value: lambda _: value, junk),
    st.builds(lambda value: lambda _: value, junk),
    st.builds(lambda value: lambda _: value, junk),
    st.just(lambda _: DROPPED),
    st.just(lambda _: RENAMED),
    st.just(lambda value: [value]),
    st.just(lambda value: {"x": value}),
    st.just(str),
)


@st.composite
def spoiled(draw: st.DrawFn, history: list[Json]) -> list[Json]:
    """A history with one of its fields replaced by something else, or two."""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        found = places(history)
        history = changed(history, draw(st.sampled_from(found)), draw(changes)) if found else history
    return history


def names_a_place(error: RefoldError | None) -> bool:
    return error is None or (
        isinstance(error, MessageError) and bool(re.match(r"messages[.\[]", error.where))
    )


@pytest.mark.parametrize("dialect", HISTORIES)
@given(data=st.data())
def test_a_spoiled_message_is_stored_and_fits_or_is_refused_by_its_place(dialect, data):
    history = data.draw(spoiled(HISTORIES[dialect]))
    session = opened(data.draw(st.sampled_from(MODELS)))
    assert names_a_place(offer(session, history, dialect=data.draw(st.sampled_from([None, dialect]))))


@pytest.mark.parametrize("reply", REPLIES)
@given(data=st.data())
def test_a_spoiled_answer_is_stored_and_fits_or_is_refused_by_its_place(reply, data):
    answer = data.draw(spoiled(REPLIES[reply]))
    assert names_a_place(offer(opened(data.draw(st.sampled_from(MODELS))), answer))


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
def test_a_spoiled_history_is_fitted_or_refused_and_never_touched(dialect, data):
    history = data.draw(spoiled(HISTORIES[dialect]))
    before, model = repr(history), data.draw(st.sampled_from(MODELS[:3]))
    refusal = None
    try:
        sendable(refold.fit(history, model=model))
    except RefoldError as error:
        refusal = error
    assert names_a_place(refusal)
    assert repr(history) == before


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
def test_a_spoiled_file_leaves_with_one_line_or_is_done(dialect, data):
    history = data.draw(spoiled(HISTORIES[dialect]))
    text = json.dumps(history, default=str, skipkeys=True)
    command = data.draw(st.sampled_from(["fit", "check", "count"]))
    rest = () if command == "check" else ("--model", "gpt-5")
    command_line(command, "-", *rest, input=text.encode())


def command_line(*args: str, input: bytes) -> str:
    """What a command prints; an error is one line, and what it prints is UTF-8."""
    done = CliRunner().invoke(app, list(args), input=input)
    assert done.exit_code in (0, 1), (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert all(line.startswith("refold: ") for line in done.stderr.splitlines())
    done.stdout_bytes.decode()
    return done.output


@given(data=st.data())
def test_a_file_with_a_few_bytes_changed_leaves_with_one_line_or_is_done(data):
    text = bytearray(json.dumps(data.draw(st.sampled_from([CHAT, RESPONSES, ANTHROPIC, AI_SDK]))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(
                [b"", b'"', b"\\", b"\xff", b"{", b"]", b"\\ud800", b"1e999", b"NaN", b"\n", b"\0"]
            )
        )
    command_line("fit", "-", "--model", "gpt-5", input=bytes(text))
    command_line("check", "-", input=bytes(text))


# What is no message at all


class Raising:
    def model_dump(self, **_: Any) -> Any:
        raise RuntimeError("not now")


class Giving:
    """Like an SDK's object, as far as that goes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def model_dump(self, **_: Any) -> Any:
        return self if self.value is Giving else self.value


class Broken(Mapping):
    """A mapping that cannot be read."""

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("gone")

    def __iter__(self) -> Any:
        raise RuntimeError("gone")

    def __len__(self) -> int:
        return 1


NO_MESSAGES = [
    *(None, True, 5, 1.5, float("nan"), "Hello", b"{}", {1, 2}, frozenset(), object(), len, refold),
    *(Raising(), Giving(None), Giving(5), Giving([]), Giving(object()), Giving(Giving), Giving({}), Broken()),
    *({}, {"content": "x"}, {"role": None}, {"role": 5}, {"role": []}, {"role": ""}, {LONE: LONE}),
    *({"x": {"role": "user", "content": "x"}}, OrderedDict(role="user", content=b"x"), {1: 2}),
]


@pytest.mark.parametrize("value", NO_MESSAGES, ids=kind)
def test_what_is_no_message_is_refused(value):
    assert refused(value).startswith("message")
    assert refused([AGAIN, value]).startswith("messages[1]")
    with pytest.raises(RefoldError, match=re.escape("messages[1]")):
        refold.fit([AGAIN, value], model="gpt-5")
    for dialect in (*DIALECTS, "flat"):
        assert refused(value, dialect=dialect).startswith("message")


def test_a_generator_is_a_good_list_unless_it_has_nothing_or_no_messages():
    assert opened().append(one for one in [AGAIN, AGAIN]) == [1, 2]
    assert refused(one for one in []).startswith("stream: has nothing in it")
    assert refused(one for one in [AGAIN, 5]).startswith("stream[1]: expected a dict")
    assert refused([AGAIN, (one for one in [AGAIN])]).endswith(
        "got list, which is not the chunks of a stream"
    )
    assert refold.fit((one for one in [FIRST, AGAIN]), model="gpt-5") == [FIRST, AGAIN]
    for value in ("Hello", FIRST, 5, None):
        with pytest.raises(SettingError, match="expected a list of messages"):
            refold.fit(value, model="gpt-5")


def test_of_a_list_with_a_bad_message_nothing_is_stored():
    session = opened()
    for bad in ({"role": "bot", "content": "x"}, {"role": "user", "content": float("inf")}, 5):
        error = offer(session, [AGAIN, AGAIN, bad, AGAIN])
        assert str(error).startswith("messages[2]")
    assert session.get_count() == 1 + 3


# proves: C4
@pytest.mark.parametrize("dialect", HISTORIES)
@pytest.mark.parametrize("role", ["bot", "User", "", LONE, None, 5, [], {}])
def test_a_role_that_nobody_knows_is_refused_with_those_that_are_known(dialect, role):
    said = refused({"role": role, "content": "x"}, dialect=dialect)
    assert said.startswith("message.role: ")
    assert "assistant" in said


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_at_all_is_an_empty_list(dialect):
    session = opened()
    assert session.append([]) == []
    assert offer(session, [], dialect=dialect) is None
    assert refold.fit([], model="gpt-5", dialect=dialect) == []


EMPTY = [
    *({"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": []}),
    *({"role": "assistant", "content": None}, {"role": "system", "content": ""}, {"role": "user"}),
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": [{"type": "text", "text": ""}]},
    {"role": "assistant", "content": [{"type": "text", "text": " "}]},
    {"role": "tool", "tool_call_id": "", "content": ""},
    {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "ls", "arguments": ""}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": []}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "ls", "input": {}}]},
    {"type": "function_call", "call_id": "", "name": "ls", "arguments": ""},
    {"type": "function_call_output", "call_id": "", "output": ""},
    {"type": "reasoning", "summary": []},
    {"role": "tool", "content": []},
    *({"system": ""}, {"system": []}, {"instructions": ""}),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("value", EMPTY, ids=lambda value: json.dumps(value)[:60])
def test_what_is_empty_is_stored_and_never_in_the_way(value, model):
    error = offer(opened(model), value)
    assert error is None or isinstance(error, MessageError)


ODDITIES = [
    {"role": "assistant", "content": "x", "id": "m1"},
    {"role": "assistant", "content": "x", "id": 5, "status": None},
    {"type": "message", "role": "assistant", "content": "x", "id": "m1"},
    *({"type": "reasoning", "id": "r", "summary": odd} for odd in (5, "x", {}, [5], None, 1.5)),
    {"type": "local_shell_call_output", "output": "x"},
    {"role": "user", "content": "x", "tool_calls": None, "audio": [5], "function_call": 5},
    {"role": "assistant", "content": "x", "tool_calls": [5]},
    {"role": "assistant", "content": [{"type": "web_search_tool_result", "content": []}]},
    {"role": "assistant", "content": [{"type": "text", "text": "x", "citations": 5, "cache_control": 5}]},
]


@pytest.mark.parametrize("dialect", [None, *DIALECTS])
@pytest.mark.parametrize("value", ODDITIES, ids=lambda value: json.dumps(value)[:60])
def test_what_has_odd_fields_is_stored_and_fits_or_is_refused_by_its_place(value, dialect):
    error = offer(opened(), value, dialect=dialect)
    assert error is None or (isinstance(error, MessageError) and error.where.startswith("message"))


# Values that JSON does not have


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_by_its_place(number):
    assert refused({**AGAIN, "x": [1, {"y": number}]}).startswith(
        f"message.x[1].y: {number} is not a JSON number"
    )
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": number}}
    said = refused([AGAIN, {"role": "assistant", "content": [call]}])
    assert said.startswith("messages[1].content[0].input.n: ")
    assert refused(Message("user", "x", meta={"n": number})).startswith("message.meta.n: ")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999"])
def test_what_is_no_number_is_refused_in_a_file_too(text):
    file = f'[{{"role": "user", "content": "x", "n": [{text}]}}]'.encode()
    for command in ("fit", "count"):
        told = command_line(command, "-", "--model", "gpt-5", input=file)
        assert told.startswith("refold: stdin: messages[0].n[0]: ")


@pytest.mark.parametrize("text", ['{"n": NaN}', '{"n": 1e400}', "Infinity", '{"a": "\\ud800"}', "{" * 3_000])
@pytest.mark.parametrize("model", MODELS)
def test_a_call_keeps_its_input_as_the_model_wrote_it_and_can_be_sent_anywhere(text, model):
    calls = [{"id": "a", "type": "function", "function": {"name": "ls", "arguments": text}}]
    session = opened(model)
    said = [{"role": "assistant", "content": None, "tool_calls": calls}, CHAT[3]]
    assert offer(session, said) is None
    assert session.get_all()[1].message.calls[0].input == text
    assert session.fit(dialect="openai-chat").messages[1] == said[0]


@pytest.mark.parametrize(
    "value",
    [b"x", bytearray(), {1}, frozenset(), object(), 1j, Decimal(1), date(2026, 1, 1), len, iter([])],
    ids=kind,
)
def test_what_json_has_no_word_for_is_refused_by_its_place(value):
    assert (
        refused({**AGAIN, "x": {"y": [value]}})
        == f"message.x.y[0]: {kind(value)} cannot be represented in JSON"
    )
    assert refused({"role": "user", "content": value}).startswith("message.content: ")
    if not isinstance(value, set | frozenset | Decimal | date):  # of an application's own, JSON is made
        assert refused(Message("user", "x", meta=[value])).startswith("message")


@pytest.mark.parametrize("key", [1, None, 1.5, True, (1, 2), b"x"])
def test_a_key_that_is_no_text_is_refused(key):
    assert (
        refused({**AGAIN, "x": {key: 1}})
        == f"message.x: has the key {key!r}; keys of a JSON object are texts"
    )


class Role(StrEnum):
    user = "user"


class Level(IntEnum):
    high = 3


class Word(str):
    __slots__ = ()


class Share(float):
    __slots__ = ()


def test_kinds_of_text_and_numbers_are_what_they_stand_for():
    session = opened()
    value = {
        Word("role"): Role.user,
        "content": Word("Hé"),
        "x": {"n": Share(0.5), "m": Level.high, "t": (1,)},
    }
    assert offer(session, value) is None
    sent = session.fit().messages[1]
    assert sent == {"role": "user", "content": "Hé", "x": {"n": 0.5, "m": 3, "t": [1]}}
    assert {type(one) for one in (sent["role"], sent["x"]["n"], sent["x"]["m"])} == {str, float, int}


def test_huge_numbers_are_kept_as_far_as_python_can_write_them():
    session = opened()
    assert offer(session, {**AGAIN, "x": [10**400, -(2**64), 1e308, 5e-324]}) is None
    assert session.fit().messages[1]["x"] == [10**400, -(2**64), 1e308, 5e-324]
    assert refused({**AGAIN, "x": 10**5_000}).startswith("message: is not JSON")
    file = f'[{{"role": "user", "content": "x", "n": {"9" * 5_000}}}]'.encode()
    assert "stdin: " in command_line("count", "-", "--model", "gpt-5", input=file)


# Lone surrogates


def surrogates() -> list[Json]:
    """A call and its result in chat form, with half a character everywhere."""
    function = {"name": f"ls{LONE}", "arguments": f'{{"{LONE}": 1}}'}
    return [
        {"role": "user", "content": f"a {LONE} b", f"x{LONE}": {LONE: [LONE]}, "name": f"kim{LONE}"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{LONE}", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": f"c{LONE}", "content": LONE * 3},
    ]


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/chats.db"])
@pytest.mark.parametrize("model", MODELS)
def test_half_characters_are_stored_and_sent_as_something_that_can_be_sent(store, model, tmp_path):
    url = store.format(tmp_path)
    session = opened(model, url)
    assert offer(session, surrogates()) is None
    said, called, answered = session.get_all()[1:4]
    assert said.message.text == f"a {LONE} b"
    assert (called.message.calls[0].call_id, called.message.calls[0].tool) == (f"c{LONE}", f"ls{LONE}")
    assert (answered.message.results[0].call_id, answered.message.text) == (f"c{LONE}", LONE * 3)
    sent = session.fit(dialect="openai-chat")
    assert not [notice for notice in sent.report.notices if "answer" in notice]
    assert sent.messages[1]["content"] == "a \\ud800 b"
    assert sent.messages[2]["tool_calls"][0]["id"] == sent.messages[3]["tool_call_id"]
    for dialect in DIALECTS:
        sendable(session.fit(dialect=dialect).request)


def called(id: str) -> list[Json]:
    """A call without a result, in each dialect."""
    function = {"name": "ls", "arguments": "{}"}
    return [
        {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]},
        {"type": "function_call", "call_id": id, "name": "ls", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": id, "name": "sh", "input": "ls"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "ls", "input": {}}]},
        {
            "role": "assistant",
            "content": [{"type": "tool-call", "toolCallId": id, "toolName": "ls", "input": {}}],
        },
    ]


@pytest.mark.parametrize("id", ["", LONE, f"a{LONE}", LONE * 30, "é" * 30, "x" * 200, "a b"], ids=ascii)
@pytest.mark.parametrize("message", range(5))
def test_a_call_with_any_id_and_no_result_gets_one_in_every_dialect(message, id):
    session = opened()
    assert offer(session, called(id)[message]) is None
    for dialect in DIALECTS:
        sent = session.fit(dialect=dialect)
        assert any("has no result" in notice for notice in sent.report.notices)


def test_half_characters_name_things_as_any_other_do():
    session = opened()
    assert session.append(AGAIN, id=f"id{LONE}", tags=[LONE], tools=[LONE]) == 1
    assert session.append(AGAIN, id=f"id{LONE}") == 1
    assert (session.get_all()[1].id, session.get_all()[1].tags) == (f"id{LONE}", (LONE,))
    sound(session)


def test_half_characters_in_a_file_are_read_and_written_as_utf8():
    file = json.dumps(surrogates()).encode()
    for args in (
        ["fit", "-", "--model", "gpt-5"],
        ["count", "-", "--model", "gpt-5", "--json"],
        ["count", "-"],
    ):
        rest = [] if "--model" in args else ["--model", "claude-sonnet-5"]
        command_line(*args, *rest, input=file)


# Nesting, size, loops


@pytest.mark.parametrize("depth", [201, 1_000, 100_000])
def test_what_nests_too_deeply_is_refused_in_a_few_words(depth):
    value: Json = nested(depth)
    for message in ({**AGAIN, "x": value}, {"role": "user", "content": value}, {"x": value}):
        said = refused(message)
        assert said.endswith("is nested deeper than 200 levels")
        assert len(said) < 200
    assert refused(Message("user", "x", meta=value)).startswith("message")
    with pytest.raises(RefoldError):
        refold.fit([{**AGAIN, "x": value}], model="gpt-5")


def test_what_nests_less_deeply_is_kept():
    session = opened()
    assert offer(session, {**AGAIN, "x": nested(190)}) is None
    assert session.fit().messages[1]["x"] == nested(190)


@pytest.mark.parametrize("depth", [1_000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_a_file_that_nests_too_deeply_is_refused(depth, brackets):
    inner = brackets[:-1] * depth + "1" + brackets[-1] * depth
    file = f'[{{"role": "user", "content": "x", "x": {inner}}}]'.encode()
    for command in ("fit", "count"):
        assert "nested" in command_line(command, "-", "--model", "gpt-5", input=file)
    command_line("check", "-", input=file)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("depth", [150, 197, 198, 199, 200, 201, 900, 100_000])
def test_a_call_may_nest_its_input_as_deeply_as_it_likes(dialect, depth):
    text = '{"a":' * depth + "1" + "}" * depth
    calls = [{"id": "a", "type": "function", "function": {"name": "ls", "arguments": text}}]
    session = opened()
    assert offer(session, [{"role": "assistant", "content": None, "tool_calls": calls}, CHAT[3]]) is None
    sendable(session.fit(dialect=dialect).request)


def test_what_contains_itself_is_refused():
    loop: dict[str, Any] = {"role": "user", "content": "x"}
    loop["x"] = loop
    ring: list[Any] = []
    ring.append(ring)
    for value in (loop, {**AGAIN, "x": ring}, {"role": "user", "content": ring}, Giving(loop)):
        assert "nested deeper" in refused(value)
    assert refused(Message("user", "x", meta=ring)).startswith("message")


@pytest.mark.parametrize(
    "megabytes", [20, pytest.param(100, marks=pytest.mark.skipif(not IS_LONG, reason="long"))]
)
def test_a_huge_message_is_stored_whole_and_hidden_when_it_does_not_fit(megabytes, tmp_path):
    text = "word " * (megabytes * 200_000)
    url = f"sqlite:///{tmp_path}/chats.db"
    with opened(store=url) as session:
        session.append([CHAT[2] | {"tool_calls": CHAT[2]["tool_calls"][:1]}, CHAT[3] | {"content": text}])
        session.append([{"role": "assistant", "content": "Much."}, AGAIN])
        fitted = session.fit()
        assert fitted.messages[0] == FIRST
        share = fitted.report.limit // 4 + 100
        assert fitted.report.tokens.final < share < megabytes * 100_000 < fitted.report.tokens.before
        assert session.expand(2) == text
    with refold.open("chat", store=url) as session:
        assert session.get_all()[2].message.text == text
        session.append(AGAIN)
        sendable(session.fit().request)


def test_a_huge_number_of_small_things_is_taken():
    session = opened()
    assert offer(session, {**AGAIN, "x": [[]] * 200_000, "y": {str(n): n for n in range(100_000)}}) is None
    assert len(json.loads(list(session.events())[1].raw)["x"]) == 200_000


# What a file may hold and a dict cannot


def test_a_key_that_stands_twice_is_kept_as_written_and_the_last_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = '{"role": "user", "content": "first", "content": "last", "x": {"a": 1, "a": 2}}'
    Path("chat.json").write_text(f"[{text}]")
    command_line("import", "chat.json", "--store", "sqlite:///chats.db", input=b"")
    with refold.open("chat", store="sqlite:///chats.db") as session:
        (said,) = session.events()
        assert said.raw.decode() == text
        assert said.message.text == "last"
        assert session.fit().messages == [{"role": "user", "content": "last", "x": {"a": 2}}]


@pytest.mark.parametrize(
    "text",
    [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"[[]]", b"[,]", b"'x'", b"[1] [2]", b"nul", b"<html>"],
)
def test_what_is_no_json_is_refused_by_every_command(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args in (
        ("fit", "-", "--model", "gpt-5"),
        ("count", "-", "--model", "gpt-5"),
        ("import", "-", "--id", "x"),
    ):
        assert command_line(*args, input=text).startswith("refold: stdin")
    assert not list(tmp_path.iterdir())


# SDK objects


def test_an_object_that_fails_is_told_with_its_name():
    assert refused(Raising()) == "message: Raising.model_dump() failed: not now"
    assert refused([AGAIN, {**AGAIN, "x": [Raising()]}]).startswith("messages[1].x[0]: Raising")
    assert refused(Broken()).startswith("message: Broken cannot be read")
    assert refused(Giving({"role": "user", "content": object()})).startswith(
        "message.content: object cannot be"
    )
    assert refused(Giving({"role": "user", "content": "x", "n": float("nan")})).startswith("message.n: nan")
    assert refused({**AGAIN, "x": Giving(nested(300))}).endswith("is nested deeper than 200 levels")


def test_objects_inside_of_messages_are_read_too():
    session = opened()
    part = Giving({"type": "text", "text": "Hi"})
    assert offer(session, {"role": "user", "content": [part]}) is None
    assert offer(session, Giving({"role": "user", "content": "Hi"})) is None
    assert session.fit().messages[1] == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}


# refold's own messages

OWN = [
    *(
        Message("bot", "x"),
        Message(5, "x"),
        Message("user", [5]),
        Message("user", ["x"]),
        Message("user", [{}]),
    ),
    *(Message("user", "x", id=5), Message("user", "x", id=""), Message("user", "x", name=5)),
    *(Message("user", [Text(5)]), Message("user", [Text(None)]), Message("assistant", "x", usage=5)),
    *(Message("user", [ToolCall("a", "ls", "{}")]), Message("assistant", [ToolCall("a", "", "{}")])),
    *(Message("assistant", [ToolCall(1, "ls", "{}")]), Message("assistant", [ToolCall("a", "ls", {})])),
    *(Message("tool", "x"), Message("tool"), Message("tool", [ToolResult(5, "x")])),
    *(Message("user", [Media("image")]), Message("user", [Media("hologram", url="https://example.org")])),
    *(Message("user", [Opaque(5)]), Message("user", [Opaque({})]), Message("user", [Opaque({"type": 5})])),
    *(Message("user", [Opaque({"type": "text"})]), Message("user", [Opaque({"type": "tool_result"})])),
    *(
        Message("user", "x", meta=object()),
        Message("user", "x", meta={1: 2}),
        Message("user", "x", meta=b"x"),
    ),
]
ODD = [
    *(Message("user", LONE), Message("user"), Message("user", ""), Message("user", "x", id=LONE, name=LONE)),
    *(Message("assistant", [Reasoning("")]), Message("assistant", [StepStart()]), Message("assistant")),
    *(
        Message("assistant", [CompactionMarker()]),
        Message("user", [CompactionMarker({"type": "compaction"})]),
    ),
    *(Message("assistant", [ToolCall("", "ls", "")]), Message("assistant", [ToolCall(LONE, LONE, LONE)])),
    *(Message("tool", [ToolResult("", "")]), Message("tool", [ToolResult(LONE, (), LONE)])),
    *(Message("tool", [ToolResult("x" * 500, (Text(""), Media("image", url="x")))]), Message("system", "")),
    *(
        Message("system", [Media("image", url="https://example.org/a.png")]),
        Message("system", [Reasoning("x")]),
    ),
    *(
        Message("user", [Media("file", data="!", mime=LONE, name=LONE)]),
        Message("user", [Media("audio", url="x")]),
    ),
    *(Message("user", [Opaque({"type": "hologram"})]), Message("assistant", [Opaque({"type": LONE}, LONE)])),
    *(Message("assistant", "x", usage=Usage(10**12)), Message("assistant", "x", usage=Usage(-1))),
    *(
        Message("assistant", "x", model=LONE, finish=LONE, error=LONE),
        Message("user", "x", meta={LONE: [LONE]}),
    ),
]


@pytest.mark.parametrize("message", OWN)
def test_a_message_of_refold_that_no_provider_would_take_is_refused(message):
    assert refused(message).startswith("message")
    assert refused([AGAIN, message]).startswith("messages[1]")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("message", ODD)
def test_an_odd_message_of_refold_is_stored_and_fits(message, model):
    session = opened(model)
    assert offer(session, message) is None
    assert session.get_all()[1].message.text == message.text


# What no provider takes in any form is refused before it stands in the way of all that follows

POISON = [
    {"role": "user", "content": [{"text": "x"}]},
    {"role": "user", "content": [{"type": "text", "text": 5}]},
    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "", "arguments": "{}"}}]},
    {"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]},
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": 5}]},
    {"role": "assistant", "content": [{"type": "server_tool_use", "id": [], "name": "x", "input": {}}]},
    {"role": "assistant", "content": [{"type": "compaction", "content": 5}]},
    {"role": "assistant", "content": [{"type": "tool-call", "toolCallId": "a", "toolName": "", "input": {}}]},
    {"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "a", "name": 5, "input": "x"},
    {"type": "function_call_output", "call_id": "a", "output": 5},
    {"type": "compaction", "id": "cmp_1"},
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("value", POISON, ids=lambda value: json.dumps(value)[:80])
def test_a_message_that_could_never_be_sent_is_refused(value, model):
    error = offer(opened(model), [AGAIN, value])
    assert isinstance(error, MessageError), error
    assert error.where.startswith("messages[1]")


# What comes with a message, and what a request asks for


@pytest.mark.parametrize("value", [5, 1.5, "", b"x", [], {}, {1}, object(), nested(100_000)], ids=kind)
def test_what_comes_with_a_message_is_checked(value):
    for name in ("id", "kind", "dialect", *(["expiry"] if value != {} else [])):
        session = opened()
        with pytest.raises(RefoldError):
            session.append(AGAIN, **{name: value})
        assert session.get_count() == 1
        sound(session)
    for name in ("tags", "tools"):
        assert offer(opened(), AGAIN, **{name: [value]}) is None or value != ""


ASKED = [5, 1.5, True, b"x", {1}, object(), [object()], Raising(), [Raising()], [nested(100_000)]]


@pytest.mark.parametrize("value", ASKED, ids=kind)
@pytest.mark.parametrize("model", MODELS)
def test_what_a_request_asks_for_is_checked(value, model):
    session = opened(model)
    for name in ("tools", "override", "dialect", "request"):
        with pytest.raises(RefoldError):
            session.fit(**{name: value})
    for name in ("system", "instructions", "max_tokens"):
        if (name, value) != ("max_tokens", 5):
            with pytest.raises(RefoldError):
                session.fit(request={name: value})
    for name in ("system", "tools"):
        with pytest.raises(RefoldError):
            refold.fit([FIRST], model="gpt-5", **{name: value})
    sound(session)


@pytest.mark.parametrize(
    "tool",
    [
        *(None, 5, "x", LONE, [], {}, {"name": 5}, {"name": LONE}, {"function": 5}, {"type": 5}),
        {"name": "ls", "parameters": 5},
        {"name": "ls", "parameters": {"properties": 5}},
        {"name": "ls", "parameters": {"properties": {"a": 5}, "required": 5}},
        {"name": "ls", "parameters": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": 5}},
        {"name": "ls", "parameters": {"properties": {"a": {"$ref": "#/a"}}, "$defs": {"a": {"$ref": "#/a"}}}},
        {"name": "ls", "input_schema": {"properties": {"a": {"type": [5, {}], "enum": 5}}}},
        {"name": "ls", "description": 5, "parameters": {"properties": {LONE: {"const": LONE}}}},
    ],
    ids=ascii,
)
@pytest.mark.parametrize("model", MODELS)
def test_a_tool_that_is_declared_badly_is_counted_all_the_same(tool, model):
    session = opened(model)
    assert session.fit(tools=[tool]).report.tokens.final > session.fit(tools=[]).report.tokens.final - 1
    assert session.check_overflow(tools=[tool]).current_tokens > 0


# Mistakes that are easily made: each is told in a sentence


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["absent", "null"])
def test_a_message_without_content_is_refused_whatever_the_model_is(content, role, model):
    error = offer(opened(model), {"role": role, **content})
    assert isinstance(error, MessageError)
    assert str(error) == "message.content: is missing: expected a text or a list of parts"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("content", [5, 1.5, True, {"type": "text", "text": "x"}], ids=kind)
def test_content_that_is_neither_a_text_nor_a_list_is_refused_with_what_is_expected(content, model):
    error = offer(opened(model), {"role": "user", "content": content})
    assert str(error) == f"message.content: expected a text or a list of parts, got {kind(content)}"


FROM_ANYWHERE = [
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "tool_calls": None},
    {"role": "developer", "content": "Be brief."},
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    *({"role": "system", "content": "Be brief."}, {"system": "Be brief."}, {"instructions": "Be brief."}),
    *CHAT[:3],
    *RESPONSES,
    *ANTHROPIC[:2],
    *HISTORIES["ai-sdk"][:3],
]


@pytest.mark.parametrize("newest", [None, *(HISTORIES[dialect][1] for dialect in DIALECTS)])
@pytest.mark.parametrize("model", MODELS)
def test_a_dict_of_any_dialect_is_taken_whatever_the_model_is(model, newest):
    for value in FROM_ANYWHERE:
        session = opened(model)
        if newest is not None:
            session.append(newest)
        assert offer(session, value) is None, value


@pytest.mark.parametrize("value", ["nonsense", "Retry-Context", "", 5, ["system"]], ids=repr)
def test_an_unknown_kind_is_refused_with_those_that_are_known(value):
    with pytest.raises(SettingError) as caught:
        opened().append(AGAIN, kind=value)
    known = "action-result, sub-agent-result, user-input, retry-context, system"
    assert str(caught.value).startswith("kind: ")
    assert str(caught.value).endswith(f" is not known; known are {known}")
    for one in known.split(", "):
        assert one in (refold.Session.append.__doc__ or "")
        opened().append(AGAIN, kind=one)  # type: ignore[call-overload]


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/chats.db"])
def test_what_is_appended_to_a_closed_session_is_refused(store, tmp_path):
    session = opened(store=store.format(tmp_path))
    session.close()
    for write in (lambda: session.append(AGAIN), lambda: session.append([AGAIN]), lambda: session.pin(0)):
        with pytest.raises(RefoldError, match=r"^The session of 'chat' is closed; open it again to go on$"):
            write()
    session.close()
    if "sqlite" in store:
        with refold.open("chat", store=store.format(tmp_path)) as again:
            assert again.get_count() == 1
            again.append(AGAIN)


def test_a_policy_that_cannot_be_called_is_refused_when_the_conversation_is_opened():
    with pytest.raises(SettingError, match=r"^policies\[1\]: expected a function of view, budget and count"):
        refold.open("chat", store="memory://", policies=[lambda view, budget, count: [], "prune"])  # type: ignore[list-item]
    with pytest.raises(SettingError, match=r"^policies: expected a list of functions, got function$"):
        refold.open("chat", store="memory://", policies=lambda view, budget, count: [])  # type: ignore[arg-type]


def test_a_policy_that_raises_is_named_with_the_cause():
    def careless(view: Any, budget: Any, count: Any) -> Any:
        return view.item

    config = {"models": {"small": {"window": 1_000, "max_output": 100}}}
    session = refold.open("chat", store="memory://", model="small", config=config, policies=[careless])
    session.append([FIRST, *({"role": "assistant", "content": "word " * 150} for _ in range(6))])
    before = list(session.events())
    with pytest.raises(SettingError, match=r"^policy careless: raised AttributeError: .*item") as caught:
        session.fit()
    assert isinstance(caught.value.__cause__, AttributeError)
    assert list(session.events()) == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("agents:\n  a: {model: x}\n  b: {}\n  a: {}\n", "4: agents.a: is set twice, first on line 2"),
        ("tools: {}\nstore: x\ntools: {}\n", "3: tools: is set twice, first on line 1"),
        (
            "agents:\n  a:\n    compact:\n      max_tokens: 5\n      max_tokens: 6\n",
            "5: agents.a.compact.max_tokens: is set twice, first on line 4",
        ),
    ],
)
def test_a_key_that_stands_twice_in_yaml_is_refused_with_both_lines(text, told, tmp_path):
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    with pytest.raises(SettingError) as caught:
        refold.open("chat", store="memory://", config=file)
    assert str(caught.value) == f"{file}:{told}; remove one of the two"


def test_an_answer_that_is_longer_than_the_window_is_refused(tmp_path):
    file = tmp_path / "agent.yaml"
    file.write_text("models:\n  mine:\n    window: 8000\n    max_output: 9000\n")
    with pytest.raises(SettingError) as caught:
        refold.open("chat", store="memory://", config=file)
    told = "models.mine.max_output: 9,000 is above the window of 8,000"
    assert str(caught.value).startswith(f"{file}:4: {told}")
    with pytest.raises(SettingError, match="above the window of 8,192"):  # which the table knows
        refold.open("chat", store="memory://", config={"models": {"gpt-4": {"max_output": 9_000}}})
    two = [{"models": {"mine": {"window": 8_000}}}, {"models": {"mine": {"max_output": 9_000}}}]
    with pytest.raises(SettingError, match="above the window of 8,000"):
        refold.open("chat", store="memory://", config=two)
    whole = {"models": {"mine": {"window": 8_000, "max_output": 8_000}}}
    refold.open("chat", store="memory://", config=whole)


# A file on disk


def test_after_a_hundred_refusals_the_file_has_what_was_said_and_nothing_else(tmp_path):
    url, said = f"sqlite:///{tmp_path}/chats.db", [FIRST]
    with refold.open("chat", store=url, model="gpt-5") as session:
        session.append(FIRST)
        for n, bad in enumerate([*NO_MESSAGES, *OWN, *POISON]):
            with pytest.raises(RefoldError):
                session.append([{"role": "user", "content": f"{n}"}, bad])
            if n % 10 == 0:
                session.append({"role": "user", "content": f"{n}!"})
                said.append({"role": "user", "content": f"{n}!"})
                assert session.fit().messages == said
    with refold.open("chat", store=url, model="gpt-5") as session:
        assert session.fit().messages == said
    store = SQLiteStore(tmp_path / "chats.db")
    assert not [finding for finding in examine(store) if finding.problem]
    store.close()


@pytest.mark.parametrize("kind", [*refold.RefoldError.__subclasses__(), refold.RefoldError])
def test_an_error_arrives_whole_in_another_process(kind):
    wanted = [one for one in signature(kind.__init__).parameters.values() if one.default is one.empty][1:]
    values = [
        7 if one.annotation in (int, "int") else "here"
        for one in wanted
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    error = kind(*values)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
