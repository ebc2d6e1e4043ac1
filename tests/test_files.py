"""Requests in files, in every dialect: what fit, check, count and import read, print and give back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.dialects.rules.targets import RULES

RECORDINGS = Path(__file__).parents[2] / "shared" / "data" / "recordings"
FILES = sorted(RECORDINGS.glob("*.jsonl")) if RECORDINGS.exists() else []
STORE = "sqlite:///chats.db"
ASK = {"role": "user", "content": "Which files are large?"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test in a folder of its own, 100 columns wide, with a small and a large model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REFOLD_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    small, large = "{window: 1000, max_output: 200}", "{window: 10000000, flags: [system-inside]}"
    write("refold.yaml", f"models: {{small: {small}, large: {large}}}")
    return tmp_path


def write(name, value):
    Path(name).write_text(value if isinstance(value, str) else json.dumps(value))
    return name


def run(*args, code=0, input=None):
    """One command; its exit code must be `code`."""
    text = input if input is None or isinstance(input, str) else json.dumps(input)
    result = CliRunner().invoke(app, list(map(str, args)), input=text)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def ask(*args, **rest):
    """What a command answers in JSON."""
    return json.loads(run(*args, "--json", **rest).stdout)


def fit(request, *args, model="large", **rest):
    """What `fit` gives back for a request."""
    return json.loads(run("fit", "-", "--model", model, *args, input=request, **rest).stdout)


def report(request, *args, model="large"):
    return json.loads(run("fit", "-", "--model", model, "--report", "-", *args, input=request).stderr)


# The same conversation in every dialect: a question, then steps with a call and its result.


def chat(steps=1, text="a 1"):
    messages = [{"role": "system", "content": "Be brief."}, ASK]
    for n in range(steps):
        function = {"name": "ls", "arguments": '{"path": "."}'}
        call = {"id": f"c{n}", "type": "function", "function": function}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": f"c{n}", "content": text}]
    return [*messages, {"role": "assistant", "content": "b."}, {"role": "user", "content": "Thanks."}]


def responses(steps=1, text="a 1"):
    items = [ASK]
    for n in range(steps):
        reasoning = {"type": "reasoning", "id": f"rs_{n}", "summary": [], "encrypted_content": "c2Vh"}
        call = {"type": "function_call", "id": f"fc_{n}", "call_id": f"c{n}", "name": "ls", "arguments": "{}"}
        items += [reasoning, call, {"type": "function_call_output", "call_id": f"c{n}", "output": text}]
    said = {"type": "output_text", "text": "b.", "annotations": []}
    answer = {
        "type": "message",
        "role": "assistant",
        "content": [said],
        "id": "msg_1",
        "status": "completed",
    }
    return [*items, answer, {"role": "user", "content": "Thanks."}]


def anthropic(steps=1, text="a 1"):
    messages = [ASK]
    for n in range(steps):
        uses = [
            {"type": "tool_use", "id": f"t{n}{m}", "name": "ls", "input": {"path": "."}} for m in range(2)
        ]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": text} for use in uses]
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
        messages += [{"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, *uses]}]
        messages += [{"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}]
    return [*messages, {"role": "assistant", "content": "b."}, {"role": "user", "content": "Thanks."}]


def ai_sdk(steps=1, text="a 1"):
    messages = [{"role": "system", "content": "Be brief."}, ASK]
    for n in range(steps):
        about = {"toolCallId": f"c{n}", "toolName": "ls"}
        said = {"type": "text", "text": "I look."}
        output = {"type": "text", "value": text}
        messages += [{"role": "assistant", "content": [said, {"type": "tool-call", **about, "input": {}}]}]
        messages += [{"role": "tool", "content": [{"type": "tool-result", **about, "output": output}]}]
    return [*messages, {"role": "assistant", "content": "b."}, {"role": "user", "content": "Thanks."}]


LISTS = {"openai-chat": chat, "openai-responses": responses, "anthropic": anthropic, "ai-sdk": ai_sdk}


def requests(steps=1, text="a 1"):
    """A whole request in each dialect, with keys on both sides of the messages."""
    declared = {"name": "ls", "description": "Lists files.", "parameters": SCHEMA}
    marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    return {
        "openai-chat": {
            "temperature": 0.10,
            "messages": chat(steps, text),
            "tools": [{"type": "function", "function": declared}],
            "model": "gpt-5",
        },
        "openai-responses": {
            "store": False,
            "instructions": "Be brief.",
            "input": responses(steps, text),
            "tools": [{"type": "function", **declared}],
            "model": "gpt-5",
        },
        "anthropic": {
            "max_tokens": 200,
            "system": [marked],
            "messages": anthropic(steps, text),
            "tools": [{"name": "ls", "description": "Lists files.", "input_schema": SCHEMA}],
            "model": "claude-sonnet-4-5",
        },
        "ai-sdk": {
            "maxRetries": 3,
            "system": "Be brief.",
            "messages": ai_sdk(steps, text)[1:],
            "tools": {"ls": {"description": "Lists files.", "inputSchema": SCHEMA}},
        },
    }


def listed(request):
    """The name of the list in a request."""
    return "input" if "input" in request else "messages"


DIALECTS = list(LISTS)
GIVEN = [
    *(pytest.param(dialect, LISTS[dialect](), id=f"{dialect}-list") for dialect in DIALECTS),
    *(pytest.param(dialect, request, id=f"{dialect}-request") for dialect, request in requests().items()),
    pytest.param("openai-responses", {"model": "gpt-5", "input": "Hello"}, id="openai-responses-text"),
    pytest.param(
        "openai-responses", {"instructions": "Be brief.", "input": "Hello"}, id="openai-responses-instructed"
    ),
    pytest.param("anthropic", {"system": "Be brief.", "messages": anthropic()}, id="anthropic-system-text"),
]
BROKEN = {
    "openai-chat": (chat()[:3], "C2", 2),
    "openai-responses": ([responses()[0], *responses()[2:3]], "R2", 1),
    "anthropic": (anthropic()[:2], "A3", 1),
    "ai-sdk": ([*ai_sdk()[:3], ASK], "G6", 2),
}


# Fit


@pytest.mark.parametrize("model", ["gpt-5", "claude-sonnet-5", "large"])
@pytest.mark.parametrize(("dialect", "request_"), GIVEN)
def test_what_fits_comes_back_as_it_was_given_to_the_letter(dialect, request_, model):
    assert json.dumps(fit(request_, model=model)) == json.dumps(request_)
    assert json.dumps(fit(request_, "--dialect", dialect, model=model)) == json.dumps(request_)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_list_that_does_not_fit_comes_back_shorter_and_valid(dialect):
    given = LISTS[dialect](12, "file " * 60)
    out = fit(given, model="small")
    assert 3 < len(out) < len(given)
    assert ASK in out
    assert out[-2:] == given[-2:]
    assert ask("check", "-", "--dialect", dialect, input=out)["valid"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_that_does_not_fit_keeps_all_its_keys_in_their_order(dialect):
    given = requests(12, "file " * 60)[dialect]
    out = fit(given, model="small")
    name = listed(given)
    assert list(out) == list(given)
    assert json.dumps(out | {name: []}) == json.dumps(given | {name: []})
    assert len(out[name]) < len(given[name])
    assert ASK in out[name]
    assert ask("check", "-", input=out)["valid"]


def test_an_input_that_is_one_text_stays_one():
    assert fit({"input": "Hello", "store": True}) == {"input": "Hello", "store": True}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("model", ["claude-sonnet-5", "gpt-5"])
def test_system_text_inside_the_list_stays_there(role, model):
    given = [{"role": role, "content": "Be brief."}, ASK]
    assert fit(given, model=model) == given
    assert fit({"messages": given}, model=model) == {"messages": given}


def test_system_text_inside_the_list_stays_there_where_the_api_wants_it_apart():
    given = [{"role": "system", "content": "Be brief."}, *anthropic()]
    assert fit(given, model="claude-sonnet-5") == given


@pytest.mark.parametrize("model", ["gpt-5", "claude-sonnet-5"])
@pytest.mark.parametrize("messages", [*(LISTS[name]() for name in DIALECTS), chat()[:2], [ASK]])
def test_the_function_and_the_command_give_the_same(messages, model):
    assert refold.fit(messages, model=model) == fit(messages, model=model) == messages


def test_the_answer_that_a_request_asks_for_has_its_room():
    messages = chat(8, "file " * 40)
    short = fit({"messages": messages, "max_tokens": 50}, model="small")["messages"]
    long = fit({"messages": messages, "max_tokens": 200}, model="small")["messages"]
    assert len(long) <= len(short)
    asked = report({"messages": chat(), "max_tokens": 50}, model="small")
    assert asked["room"] == report({"messages": chat(), "max_tokens": 150}, model="small")["room"] + 100


def test_a_request_that_goes_on_at_the_provider_keeps_results_whose_call_is_there():
    given = {"previous_response_id": "resp_1", "input": [responses()[3]]}
    assert fit(given) == given
    assert fit({"input": [responses()[3]]}) != {"input": [responses()[3]]}


def test_system_text_and_tools_take_room():
    plain = report({"messages": anthropic()})["tokens"]["before"]
    tools = requests()["anthropic"]["tools"]
    assert report({"messages": anthropic(), "system": "Be brief. " * 50})["tokens"]["before"] > plain + 90
    assert report({"messages": anthropic(), "tools": tools})["tokens"]["before"] > plain
    by_name = {"messages": ai_sdk(), "tools": requests()["ai-sdk"]["tools"]}
    assert report(by_name)["tokens"]["before"] > report({"messages": ai_sdk()})["tokens"]["before"]


def test_a_file_is_told_in_one_line():
    write("chat.json", chat())
    tokens = report(chat())["tokens"]["final"]
    said = run("fit", "chat.json", "--model", "large", "-o", "out.json").stdout
    assert said == f"out.json: 6 messages, {tokens} tokens\n"
    write("chat.json", chat(12, "file " * 60))
    said = run("fit", "chat.json", "--model", "small", "-o", "out.json").stdout
    assert said.startswith(f"out.json: {len(json.loads(Path('out.json').read_text()))} messages for 28, ")
    assert said.endswith(" % saved\n")


def test_what_was_mended_is_told_on_stderr():
    done = run("fit", "-", "--model", "large", input=chat()[:3])
    assert done.stderr == "refold: #2: the call 'c0' has no result; an error stands for it\n"
    assert len(json.loads(done.stdout)) == 4
    orphans = [ASK, *({"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(9))]
    told = run("fit", "-", "--model", "large", input=orphans).stderr.splitlines()
    assert len(told) == 6
    assert told[-1] == "refold: … and 4 more"
    assert len(report(orphans)["notices"]) == 9


# proves: C8
def test_rows_of_a_table_come_out_as_the_model_wants_them():
    rows = [{"role": "human", "content": "Hello", "created_at": "2026-01-01"}]
    assert fit(rows) == fit(rows, "--dialect", "flat") == [{"role": "user", "content": "Hello"}]
    with_system = [{"role": "system", "content": "Be brief.", "created_at": "2026-01-01"}, *rows]
    assert refold.fit(with_system, model="claude-sonnet-5")[1] == {"role": "user", "content": "Hello"}


def test_lone_surrogates_come_out_as_json_that_everybody_can_read():
    text = run("fit", "-", "--model", "large", input='[{"role": "user", "content": "a \\ud83d b"}]').stdout
    assert json.loads(text.encode())[0]["content"] == "a \\ud83d b"


def test_a_request_too_large_for_its_model_leaves_with_one():
    done = run("fit", "-", "--model", "small", input=[{"role": "user", "content": "much " * 2_000}], code=1)
    assert done.stderr.startswith("refold: What must be shown needs ")
    assert done.stdout == ""


# Check


def test_a_request_that_does_not_fit_its_model_breaks_the_rule_of_the_window():
    long = [{"role": "user", "content": "word " * 9_000}]
    text = json.dumps({"model": "gpt-4", "messages": long}).encode()
    done = CliRunner().invoke(app, ["check", "-", "--json"], input=text)
    assert (done.exit_code, [fault["rule"] for fault in json.loads(done.stdout)["violations"]]) == (1, ["G3"])
    fits = json.dumps({"model": "gpt-5", "messages": long}).encode()
    assert CliRunner().invoke(app, ["check", "-"], input=fits).exit_code == 0


@pytest.mark.parametrize(("dialect", "request_"), GIVEN)
def test_a_valid_request_is_told_so(dialect, request_):
    answer = ask("check", "-", input=request_)
    assert answer == {
        "valid": True,
        "violations": [],
        "dialect": dialect,
        "rules": RULES[dialect].VERSION,
    }
    count = 1 if isinstance(request_, dict) and isinstance(request_.get("input"), str) else None
    messages = request_ if isinstance(request_, list) else request_[listed(request_)]
    plural = "1 message" if count else f"{len(messages)} messages"
    told = run("check", "-", input=request_).stdout
    assert told == f"valid: {plural} by the rules for {dialect} ({RULES[dialect].VERSION})\n"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_broken_rule_is_told_with_its_place(dialect):
    messages, rule, index = BROKEN[dialect]
    answer = ask("check", "-", input=messages, code=1)
    assert (answer["valid"], answer["dialect"]) == (False, dialect)
    assert {"rule", "index", "message"} == answer["violations"][0].keys()
    found = {(fault["rule"], fault["index"]) for fault in answer["violations"]}
    assert (rule, index) in found
    name = "input" if dialect == "openai-responses" else "messages"
    *rows, last = run("check", "-", input={name: messages}, code=1).stdout.splitlines()
    assert any(row.startswith(f"{rule}  {name}[{index}]: ") for row in rows)
    assert last.startswith(f"invalid: {len(answer['violations'])} violation")


def test_a_dialect_given_is_the_one_that_counts():
    assert ask("check", "-", "--dialect", "openai-chat", input=chat())["valid"]
    assert ask("check", "-", "--dialect", "anthropic", input=chat(), code=1)["dialect"] == "anthropic"
    plain = {"input": "Hello"}
    assert ask("check", "-", "--dialect", "openai-chat", input=plain)["dialect"] == "openai-chat"


def test_messages_that_could_be_in_several_dialects_are_in_that_of_the_model():
    answers = [ASK, {"role": "assistant", "content": " "}]
    assert ask("check", "-", input=answers)["dialect"] == "openai-chat"
    told = ask("check", "-", "--model", "claude-sonnet-5", input=answers, code=1)
    assert (told["dialect"], told["violations"][0]["rule"]) == ("anthropic", "A9")
    named = {"model": "claude-sonnet-5", "messages": answers}
    assert ask("check", "-", input=named, code=1)["dialect"] == "anthropic"


def test_strict_tells_what_was_seen_accepted_too():
    messages = [*chat()[:2], {"role": "assistant", "content": "Hm.", "tool_calls": None}]
    assert ask("check", "-", input=messages)["valid"]
    assert ask("check", "-", "--strict", input=messages, code=1)["violations"][0]["rule"] == "C9"


def test_what_only_some_models_demand_is_asked_of_those():
    write("flags.yaml", "models: {strict-one: {window: 9000, provider: anthropic, flags: [no-prefill]}}")
    messages = anthropic()[:-1]
    assert ask("check", "-", input=messages)["valid"]
    args = ("check", "-", "--model", "strict-one", "--config", "flags.yaml")
    assert ask(*args, input=messages, code=1)["violations"][0]["rule"] == "A13"


def test_a_request_without_messages_is_no_request():
    answer = ask("check", "-", input=[], code=1)
    assert [fault["rule"] for fault in answer["violations"]] == ["G2"]
    assert "G2  messages: The request has no message" in run("check", "-", input=[], code=1).stdout


def test_what_cannot_be_parsed_can_still_be_judged():
    for messages in ([1], [{"role": "bot"}], [{"role": "user", "content": 5}], [None, "x", []]):
        answer = ask("check", "-", input=messages, code=1)
        assert {fault["rule"] for fault in answer["violations"]} <= {"S1", "C8"}
    assert ask("check", "-", input='[{"role": "user", "content": "x", "n": NaN}]', code=1)["violations"]


# Count


@pytest.mark.parametrize("model", ["gpt-5", "claude-sonnet-5", "gemini-2.5-pro"])
@pytest.mark.parametrize(("dialect", "request_"), GIVEN)
def test_the_parts_add_up_to_what_fit_counts(dialect, request_, model):
    counted = ask("count", "-", "--model", model, input=request_)
    assert list(counted) == ["model", "total", "system", "tools", "messages"]
    assert counted["model"] == model
    rows = counted["messages"]
    assert all(list(row) == ["index", "role", "tokens"] for row in rows)
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert all(row["tokens"] > 0 for row in rows)
    parts = [counted["system"], counted["tools"], *(row["tokens"] for row in rows)]
    assert sum(parts) == counted["total"] == report(request_, model=model)["tokens"]["before"]
    beside = request_ if isinstance(request_, dict) else {}
    assert bool(counted["system"]) == ("system" in beside or "instructions" in beside)
    assert bool(counted["tools"]) == ("tools" in beside)


def test_a_message_has_the_role_that_it_has_in_the_file():
    counted = ask("count", "-", "--model", "gpt-5", input=anthropic())
    assert [row["role"] for row in counted["messages"]] == [one["role"] for one in anthropic()]
    counted = ask("count", "-", "--model", "gpt-5", input=responses())
    roles = ["user", "assistant", "assistant", "tool", "assistant", "user"]
    assert [row["role"] for row in counted["messages"]] == roles


def test_the_table_has_a_row_for_each_message_and_says_what_it_is():
    counted = ask("count", "-", "--model", "gpt-5", input=requests()["openai-responses"])
    lines = run("count", "-", "--model", "gpt-5", input=requests()["openai-responses"]).stdout.splitlines()
    assert lines[0].split() == ["index", "tokens", "role"]
    assert lines[1].split() == [str(counted["system"]), "system", "Be", "brief."]
    assert lines[2].split() == [str(counted["tools"]), "tools", "1", "declaration"]
    tokens = [row["tokens"] for row in counted["messages"]]
    assert lines[3].split() == ["0", str(tokens[0]), "user", *ASK["content"].split()]
    assert lines[5].split() == ["2", str(tokens[2]), "assistant", "→", "ls({})"]
    assert lines[-1] == f"{counted['total']} tokens for gpt-5: less than 0.1 % of its window of 400,000"
    assert len({len(line[:14].rstrip()) for line in lines[:-1]}) == 1


def test_a_large_request_is_told_as_a_part_of_the_window():
    said = run("count", "-", "--model", "small", input=[{"role": "user", "content": "word " * 500}]).stdout
    assert said.splitlines()[-1].startswith("5")
    assert said.endswith(" % of its window of 1,000\n")


def test_an_empty_request_takes_nothing():
    counted = ask("count", "-", "--model", "gpt-5", input=[])
    assert counted == {"model": "gpt-5", "total": 0, "system": 0, "tools": 0, "messages": []}


def test_four_characters_a_token_where_the_configuration_says_so():
    write("refold.yaml", "agents: {default: {counter: estimate}}")
    request = {"system": "x" * 40, "messages": [{"role": "user", "content": "y" * 400}]}
    counted = ask("count", "-", "--model", "gpt-5", input=request)
    assert (counted["system"], counted["messages"][0]["tokens"]) == (14, 104)


# Import


@pytest.mark.parametrize(("dialect", "request_"), GIVEN)
def test_a_request_is_imported_and_can_be_sent_again(dialect, request_):
    write("task.json", request_)
    done = ask("import", "task.json", "--model", "gpt-5", "--store", STORE)
    with refold.open("task", store=STORE, model="large", config="refold.yaml") as session:
        fitted = session.fit(dialect=dialect)
        assert done["conversations"] == [{"id": "task", "messages": session.get_count(), "tokens": _tokens()}]
        roles = [one.message.role for one in session.get_all()]
    beside = request_ if isinstance(request_, dict) else {}
    messages = beside.get(listed(beside), request_)
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    apart = beside.get("system") or beside.get("instructions")
    if dialect in ("openai-responses", "anthropic"):
        assert json.dumps(fitted.messages) == json.dumps(messages)
        assert fitted.system == apart
    else:
        assert json.dumps(fitted.messages[bool(apart) :]) == json.dumps(messages)
    assert roles[0] == ("system" if apart else fitted.messages[0]["role"])


def _tokens():
    return refold.open("task", store=STORE).view().tokens


def test_an_answer_of_many_items_is_one_message_however_long_the_file_is():
    write("task.json", responses(400))
    run("import", "task.json", "--store", STORE)
    with refold.open("task", store=STORE, model="large", config="refold.yaml") as session:
        assert session.fit(dialect="openai-responses").messages == responses(400)
        assert session.get_count() == 803


# What all of them have in common

COMMANDS = [("fit", "--model", "large"), ("check",), ("count", "--model", "large")]
commands = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


@commands
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_file_is_read_as_standard_input_is(command, dialect):
    write("request.json", requests()[dialect])
    piped = run(command[0], "-", *command[1:], input=requests()[dialect])
    assert run(command[0], "request.json", *command[1:]).stdout == piped.stdout
    assert piped.stderr == ""


@commands
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "stdin: is empty; expected a JSON list of messages"),
        (" \n\n", "stdin: is empty"),
        ("{}", "stdin: has no list `messages` or `input`"),
        ('"hello"', "stdin: is a JSON str"),
        ("null", "stdin: is a JSON NoneType"),
        ("[", "stdin: line 1, column"),
        ('[{"role": "user", "content": "x"},]', "stdin: line 1, column"),
        ('{"messages": 5}', "stdin: has no list"),
        ('{"messages": []}\n{"messages": []}', "stdin: has 2 conversations, one a line; give one of them"),
        ('{"refold": 1, "conversation": "x"}\n', "stdin: is an export of refold; `refold import`"),
        ("[" * 100_000, "stdin: is nested too deeply"),
        ('{"messages": ' + "[" * 5_000 + "]" * 5_000 + "}", "stdin: is nested too deeply"),
    ],
)
def test_a_file_that_has_no_request_leaves_with_one(command, text, told):
    done = run(command[0], "-", *command[1:], input=text, code=1)
    assert done.stderr.startswith(f"refold: {told}")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2]], ids=["fit", "count"])
@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ([ASK, {"role": "bot"}], "messages[1].role: 'bot' is not one of"),
        ({"input": [ASK, 5]}, "input[1]: expected a dict"),
        ({"messages": [ASK], "tools": 5}, "tools: expected a list, got int"),
        ({"messages": [ASK], "system": 5}, "system: expected a text or a list of blocks, got int"),
        ({"input": [ASK], "instructions": 5}, "instructions: expected a text or a list of blocks"),
    ],
)
def test_what_is_wrong_in_a_request_is_told_by_its_place(command, request_, told):
    done = run(command[0], "-", *command[1:], input=request_, code=1)
    assert done.stderr.startswith(f"refold: stdin: {told}")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_an_answer_of_no_length_is_told_by_its_place():
    for asked in ("x", -1, 0, True):
        done = run("fit", "-", "--model", "large", input={"messages": [ASK], "max_tokens": asked}, code=1)
        assert done.stderr.startswith("refold: stdin: max_tokens: expected")


@commands
def test_a_file_that_cannot_be_read_leaves_with_one(command, folder):
    for name in ("missing.json", str(folder)):
        assert " cannot be read: " in run(command[0], name, *command[1:], code=1).stderr


@commands
def test_a_dialect_that_is_not_known_is_wrong_use_and_the_known_are_named(command):
    done = run(command[0], "-", *command[1:], "--dialect", "klingon", input=chat(), code=2)
    assert all(dialect in done.stderr for dialect in DIALECTS)
    assert done.stdout == ""


@pytest.mark.parametrize("args", [("fit", "-"), ("count", "-"), ("check",), ("fit",)])
def test_what_is_left_out_is_wrong_use(args):
    run(*args, input=chat(), code=2)


@commands
def test_a_setting_that_is_wrong_leaves_with_two(command):
    write("bad.yaml", "models: {m: {windw: 8000}}")
    told = run(command[0], "-", *command[1:], "--config", "bad.yaml", input=chat(), code=2).stderr
    assert told.startswith("refold: bad.yaml:1: models.m.windw: is not known")


@pytest.mark.parametrize("command", ["fit", "check", "count", "import"])
def test_a_model_that_is_not_known_is_told_in_one_line(command):
    model = f"nobody-{command}"
    rest = ("--id", "x", "--store", STORE) if command == "import" else ()
    done = run(command, "-", "--model", model, *rest, input=chat())
    assert done.stderr.startswith(f"refold: The model '{model}' is not known: its window is assumed to be")
    assert done.stderr.count("\n") == 1
    assert done.stdout


def test_the_process_itself_tells_an_unknown_model_in_one_line():
    write("request.json", {"model": "nobody", "messages": chat()})
    args = [sys.executable, "-m", "refold", "count", "request.json", "--model", "nobody", "--json"]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.stderr.startswith("refold: The model 'nobody' is not known")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["total"] > 0
    done = subprocess.run([*args[:3], "check", "request.json"], capture_output=True, text=True)
    assert done.stderr == ""


def test_no_standard_input_at_all_is_told():
    args = [sys.executable, "-m", "refold", "check", "-"]
    done = subprocess.run(" ".join([*args, "<&-"]), shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "refold: There is no standard input to read from\n")


# Progress


@pytest.mark.parametrize("what", ["fit", "count", "import"])
def test_a_bar_shows_on_a_terminal_and_only_there(what):
    pty = pytest.importorskip("pty")
    write("task.json", responses(700))
    rest = ["--store", STORE] if what == "import" else []
    args = [sys.executable, "-m", "refold", what, "task.json", "--model", "gpt-5", *rest]
    env = os.environ | {"TERM": "xterm"}
    screen, terminal = pty.openpty()
    with Path("out.txt").open("wb") as out:
        process = subprocess.Popen(args, stdout=out, stderr=terminal, env=env)
    os.close(terminal)
    shown = _all_of(screen)
    assert process.wait() == 0
    assert {"fit": "Reading", "count": "Counting", "import": "Storing"}[what] in shown
    assert b"\x1b" not in Path("out.txt").read_bytes()
    quiet = subprocess.run([*args, "--append"] if rest else args, capture_output=True, check=True)
    assert quiet.stderr == b""


def _all_of(screen):
    """What is written to a terminal until nobody has it open any more."""
    shown = b""
    try:
        while piece := os.read(screen, 65_536):
            shown += piece
    except OSError:  # how Linux says that it was the last
        pass
    finally:
        os.close(screen)
    return shown.decode("utf-8", "replace")


# Recorded requests


@pytest.mark.skipif(not FILES, reason="the recorded requests are not beside the project")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_provider_accepted_is_valid_and_comes_back_as_it_was(file):
    accepted = [one for one in map(json.loads, file.read_text().splitlines()) if one["status"] == 200]
    assert accepted
    for number, request in enumerate(one["request"] for one in accepted):
        told = ask("check", "-", input=request)
        assert told["valid"], (number, told)
        out = fit(request)
        assert _compact(out) == _compact(request), number


def _compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
