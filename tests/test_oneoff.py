"""Helpers for a request that is not stored: count, check, limits, and the report of a fit."""

import json
import pickle
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionMessage
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.dialects.registry import TARGETS

TOOL = {"name": "look", "description": "Looks something up.", "input_schema": {"type": "object"}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How large is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "4711 bytes " * 50},
]
CLAUDE = {
    "system": "Be brief.",
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "How large is it?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "4711"}]},
    ],
}
RESPONSES = [
    {"role": "user", "content": [{"type": "input_text", "text": "How large is it?"}]},
    {"type": "reasoning", "id": "r", "summary": []},
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "4711"},
]
SMALL = {"models": {"small": {"window": 2_000, "max_output": 200, "provider": "openai"}}}


def command(tmp_path: Path, request: object, *args: str) -> dict:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request))
    return json.loads(CliRunner().invoke(app, [args[0], str(file), *args[1:], "--json"]).stdout)


# Count


@pytest.mark.parametrize(
    ("request_", "model"),
    [({"messages": CHAT}, "gpt-5"), (CLAUDE, "claude-sonnet-4-5"), ({"messages": RESPONSES}, "gpt-5")],
)
def test_count_gives_the_number_of_tokens_that_the_command_prints(request_, model, tmp_path):
    tokens = refold.count(**request_, model=model)
    told = command(tmp_path, request_, "count", "--model", model)
    assert tokens == told["total"] == tokens.system + tokens.tools + sum(tokens.messages)
    assert (tokens.system, tokens.tools) == (told["system"], told["tools"])
    assert list(tokens.messages) == [row["tokens"] for row in told["messages"]]


def test_count_is_a_number_that_can_be_pickled_and_printed():
    tokens = refold.count(CHAT, model="gpt-5")
    assert json.dumps(tokens) == str(int(tokens))
    assert pickle.loads(pickle.dumps(tokens)).messages == tokens.messages


def test_count_takes_what_append_takes_and_leaves_it_as_it_was():
    mine = refold.Message("user", (refold.Text("Hello"),))
    reply = ChatCompletionMessage(role="assistant", content="Yes?")
    given = [mine, reply, CHAT[1]]
    assert len(refold.count(given, model="gpt-5").messages) == 3
    assert given == [mine, reply, CHAT[1]]


def test_count_follows_the_configuration():
    estimate = {"agents": {"default": {"counter": "estimate"}}}
    one = refold.count(CHAT, model="gpt-5")
    assert refold.count(CHAT, model="gpt-5", config=estimate) != one


# Check


@pytest.mark.parametrize("cut", [False, True])
def test_check_finds_what_the_command_finds(cut, tmp_path):
    messages = CHAT[:3] if cut else CHAT
    found = refold.check(messages)
    told = command(tmp_path, messages, "check")
    assert [one.rule for one in found] == (["C2"] if cut else [])
    violations = [{"rule": one.rule, "index": one.index, "message": one.message} for one in found]
    assert told["violations"] == violations
    assert told["valid"] == (not found)


def test_check_judges_by_the_dialect_that_is_named():
    assert refold.check(CHAT, dialect="openai-chat") == []
    assert refold.check(CHAT, dialect="anthropic") != []
    mine = [refold.Message("user", (refold.Text("Hello"),))]
    for dialect in TARGETS:
        assert refold.check(mine, dialect=dialect) == []


def test_check_with_a_model_knows_its_window_and_what_stands_beside_the_messages():
    long = [{"role": "user", "content": "Hello"}]
    assert refold.check(long, model="gpt-4") == []
    assert [one.rule for one in refold.check(long, model="gpt-4", system="word " * 9_000)] == ["G3"]


def test_check_reports_what_is_no_message_and_raises_nothing():
    assert [one.rule for one in refold.check([5, None], dialect="openai-chat")] == ["S1", "S1"]


# Limits


def test_limits_are_those_of_the_registry_or_of_the_configuration():
    known = refold.limits("gpt-4o")
    assert (known.window, known.max_output) == (128_000, 16_384)
    assert refold.limits("small", config=SMALL).window == 2_000
    with pytest.warns(UserWarning, match="never-heard-of"):
        assert refold.limits("never-heard-of").window == 128_000


# Fit


def test_a_one_off_fit_returns_a_list_with_its_report():
    fitted = refold.fit([*CHAT[:3], CHAT[3] | {"content": "word " * 3_000}], model="small", config=SMALL)
    assert isinstance(fitted, list)
    assert [message["role"] for message in fitted] == ["system", "user", "assistant", "tool"]
    assert fitted.report.tokens.before > 3_000
    assert fitted.report.tokens.final < 2_000
    assert [edit.kind for edit in fitted.report.edits] == ["cap"]
    assert json.loads(json.dumps(fitted)) == fitted
    again = pickle.loads(pickle.dumps(fitted))
    assert (again, again.report) == (fitted, fitted.report)


# Wrong use


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (lambda: refold.count("Hello", model="gpt-5"), "messages: expected a list of messages, got str"),
        (lambda: refold.check({"messages": CHAT}), "messages: expected a list of messages, got dict"),
        (lambda: refold.count(CHAT, model=""), "model: expected a text of at least one character"),
        (lambda: refold.limits(None), "model: expected a text of at least one character"),
        (lambda: refold.count([{"role": "user", "content": 5}], model="gpt-5"), "messages[0].content"),
        (lambda: refold.count(CHAT, model="gpt-5", system=5), "system: expected a text or a list of blocks"),
        (lambda: refold.count(CHAT, model="gpt-5", tools="look"), "tools: expected a list"),
        (lambda: refold.count(CHAT, model="gpt-5", dialect="latin"), "dialect: 'latin' is not known"),
        (lambda: refold.check(CHAT, dialect="flat"), "dialect: 'flat' is none of openai-chat"),
    ],
)
def test_wrong_use_is_told_with_the_argument(do, told):
    with pytest.raises(refold.RefoldError) as caught:
        do()
    assert told in str(caught.value)
