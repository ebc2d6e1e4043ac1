"""The command line as people and scripts use it: what it prints, what it does, how it leaves."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from typer.testing import CliRunner

import refold
from refold.cli import COMMANDS, app
from refold.cli.format import glance
from refold.core.codec import Entry
from refold.core.event import Measured
from refold.core.message import ToolResult, Usage
from refold.dialects.registry import TARGETS
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import Key

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
SMALL = {
    "models": {"m": {"window": 1_000, "max_output": 200, "provider": "openai"}},
    "agents": {
        "default": {
            "compact": {"strategy": "sliding-window", "prune": "off", "threshold_percent": 400 / 750},
            "dedupe": "off",
        }
    },
}
STORE = "sqlite:///chats.db"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test in a folder of its own, 100 columns wide, with nothing set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REFOLD_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(*args, code=0, input=None, store=STORE):
    """One command; its exit code must be `code`."""
    options = ["--store", store] if store and args[0] in COMMANDS and args[0] != "fit" else []
    result = CliRunner().invoke(app, [*map(str, args), *options], input=input)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def ask(*args, code=0, **rest):
    """What a command answers in JSON."""
    return json.loads(run(*args, "--json", code=code, **rest).stdout)


def shown_in(sight):
    return [one for item in sight["items"] for one in item["shown"]]


def counted(sight, name):
    return sum(item[name] for item in sight["items"])


def user(text):
    return {"role": "user", "content": text}


def call(id, name="ls", arguments="{}", text=None):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


def write(name, value):
    Path(name).write_text(value if isinstance(value, str) else json.dumps(value))
    return name


@pytest.fixture
def chat():
    """A compacted conversation: a system text, the task, six calls with results, the oldest hidden."""
    with refold.open("task-42", store=STORE, model="m", config=SMALL) as session:
        session.append([{"role": "system", "content": "Be brief."}, user("Which files are large?")])
        for n in range(6):
            session.append([call(f"c{n}", "ls", f'{{"path": "dir{n}"}}'), result(f"c{n}", f"file{n} " * 30)])
            session.fit()
    return session


LADDER = {
    "models": {"m": {"window": 2_000, "max_output": 200, "provider": "openai"}},
    "agents": {
        "default": {"compact": {"keep_recent": 4, "cap": {"share": 0.1}, "threshold_percent": 800 / 1_500}}
    },
}


@pytest.fixture
def ladder():
    """A conversation with a summary of its beginning and a newest result that is capped in its place."""
    with refold.open("climb", store=STORE, model="m", config=LADDER) as session:
        session.append([{"role": "system", "content": "Be brief."}, user("Which files are large?")])
        for n in range(12):
            session.append([call(f"c{n}", "ls", f'{{"path": "dir{n}"}}'), result(f"c{n}", f"file{n} " * 30)])
            session.fit()
        listed = "\n".join(f"-rw-r--r-- {9_000 + n} report-{n:02}.pdf" for n in range(40))
        session.append([call("big", "ls", '{"path": "reports"}'), result("big", listed)])
        session.fit()
    return session


@pytest.fixture
def capped(ladder):
    """The place of its capped result."""
    (item,) = [item for item in ask("show", "climb")["items"] if item["reduced"]]
    return item["span"][0]


@pytest.fixture
def edit(chat):
    """The place of its newest edit."""
    return [event.at for event in refold.open("task-42", store=STORE).events() if hasattr(event, "span")][-1]


@pytest.fixture
def end(chat):
    """The place that its next event will have."""
    return len(list(refold.open("task-42", store=STORE).events()))


# In general


def test_without_arguments_it_prints_help():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_in_one_line_what_it_does(name):
    assert run(name, "--help", store=None).stdout.startswith(f"Usage: root {name}")
    overview = CliRunner().invoke(app, ["--help"]).stdout
    line = next(line for line in overview.splitlines() if line.startswith(f"  {name} "))
    assert not line.endswith("...")


def test_it_tells_its_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"refold {refold.__version__}\n"


def test_python_m_refold_works():
    python = subprocess.run([sys.executable, "-m", "refold", "--version"], capture_output=True, text=True)
    assert (python.returncode, python.stdout) == (0, f"refold {refold.__version__}\n")


def test_help_loads_neither_rich_nor_sqlite():
    script = """
import sys
from refold.cli import app
try:
    app(["--help"])
finally:
    print({"rich", "apsw", "yaml"} & sys.modules.keys(), file=sys.stderr)
"""
    python = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert python.stderr == "set()\n"


@pytest.mark.parametrize(
    "args",
    [
        ["frobnicate"],
        ["show"],
        ["show", "task-42", "--at", "x"],
        ["undo", "task-42", "-1"],
        ["explain", "task-42"],
        ["explain", "task-42", "x"],
        ["log", "task-42", "--limit", "0"],
        ["compact"],
        ["compact", "task-42", "--keep", "-1"],
        ["fit", "chat.json"],
        ["list", "--store", "gopher://x"],
        ["list", "--config", "missing.yaml"],
    ],
)
def test_wrong_use_leaves_with_two(args):
    run(*args, code=2, store=None)


def test_a_setting_that_is_wrong_leaves_with_two_and_says_where():
    write("refold.yaml", "models: {m: {windw: 8000}}")
    told = run("list", code=2, store=None).stderr
    assert told.startswith(
        "refold: refold.yaml:1: models.m.windw: is not known (did you mean window?); known here: window,"
    )
    assert told.count("\n") == 1


READING = [
    ("list",),
    ("show", "x"),
    ("log", "x"),
    ("explain", "x", "1"),
    ("expand", "x", "1"),
    ("diff", "x", "1"),
    ("export", "x"),
    ("doctor",),
    ("compact", "x"),
    ("undo", "x"),
    ("restore", "x", "1"),
    ("pin", "x", "1"),
    ("unpin", "x", "1"),
    ("fork", "x", "y"),
    ("delete", "x", "--yes"),
]


@pytest.mark.parametrize("args", READING, ids=lambda args: args[0])
def test_only_an_import_makes_a_store(args, folder):
    for more in ([], ["--json"]):
        result = run(*args, *more, code=1)
        assert result.stderr.startswith("refold: There is no store at chats.db")
        assert result.stdout == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("args", [args for args in READING if len(args) > 1], ids=lambda args: args[0])
def test_an_unknown_conversation_leaves_with_one_and_the_way_to_the_known(chat, args):
    told = run(args[0], "task-24", *args[2:], code=1).stderr
    assert "no conversation 'task-24'" in told
    assert "refold list" in told
    assert "'task-42'" in told
    assert told.count("\n") == 1


def test_the_store_is_the_option_else_the_variable_else_the_file_else_the_default(monkeypatch):
    write("chat.json", [user("hello")])
    run("import", "chat.json", store="sqlite:///option.db")
    run("import", "chat.json", store=None)
    write("refold.yaml", "store: sqlite:///file.db")
    run("import", "chat.json", store=None)
    write("other.yaml", "store: sqlite:///other.db")
    run("import", "chat.json", "--config", "other.yaml", store=None)
    monkeypatch.setenv("REFOLD_STORE", "sqlite:///variable.db")
    run("import", "chat.json", store=None)
    for name in ("option", "refold", "file", "other", "variable"):
        assert [row["id"] for row in ask("list", store=f"sqlite:///{name}.db")["conversations"]] == ["chat"]
    assert ask("list", store=None)["store"] == "sqlite:///variable.db"


def test_a_place_may_be_written_as_it_is_shown(chat):
    assert ask("show", "task-42", "--at", "#3") == ask("show", "task-42", "--at", "3")


# Import and export


def test_a_list_of_messages_is_imported_under_the_name_of_its_file():
    write("chat.json", [user("hello"), {"role": "assistant", "content": "Hi."}])
    done = ask("import", "chat.json")
    assert [(one["id"], one["messages"]) for one in done["conversations"]] == [("chat", 2)]
    assert refold.open("chat", store=STORE).get_count() == 2
    assert "refold show other" in run("import", "chat.json", "--id", "other").stdout


def test_system_text_beside_the_messages_comes_first():
    write("chat.json", {"system": "Be brief.", "messages": [user("hello")], "tools": []})
    run("import", "chat.json")
    roles = [one.message.role for one in refold.open("chat", store=STORE).get_all()]
    assert roles == ["system", "user"]


def test_json_lines_are_a_conversation_each_with_its_own_id():
    lines = [json.dumps({"id": f"run/{n}", "messages": [user(f"task {n}")]}) for n in range(12)]
    write("runs.jsonl", "\n".join([*lines, '{"messages": [{"role": "user", "content": "no id"}]}', ""]))
    said = run("import", "runs.jsonl").stdout
    assert "run/0: 1 message" in said
    assert "… and 3 more" in said
    ids = {row["id"] for row in ask("list")["conversations"]}
    assert ids == {*(f"run/{n}" for n in range(12)), "runs-13"}
    run("import", "runs.jsonl", "--id", "one", code=2)


def test_what_was_written_is_kept_as_it_was_written():
    text = '{"role": "user",   "content": "1e2 is \\u0031\\u0030\\u0030", "x_usage": {"n": 1.50}}'
    write("chat.json", f"[{text}]")
    run("import", "chat.json")
    (said,) = refold.open("chat", store=STORE).events()
    assert said.raw.decode() == text


def test_pieces_of_a_message_keep_numbers_as_they_were_written():
    calls = [{"type": "tool_use", "id": id, "name": "add", "input": {}} for id in "ab"]
    results = [f'{{"type":"tool_result","tool_use_id":"{id}","content":"1","n":1.50}}' for id in "ab"]
    messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": calls}]
    text = f'{{"role":"user","content":[{", ".join(results)}],"x_cost":2e1}}'
    write("chat.json", f"[{json.dumps(messages)[1:-1]}, {text}]")
    run("import", "chat.json")
    pieces = [event.raw.decode() for event in refold.open("chat", store=STORE).events(after=2)]
    assert pieces == [f'{{"role":"user","content":[{one}],"x_cost":2e1}}' for one in results]


@pytest.mark.parametrize("is_list", [True, False], ids=["a list", "a line for each"])
def test_rows_of_a_table_are_imported_as_they_are_with_their_own_times(is_list):
    calls = [{"toolCallId": "a", "toolName": "add_page", "args": {"slug": "team"}}]
    result = [{"type": "tool-result", "toolCallId": "a", "toolName": "add_page", "output": {"id": 7}}]
    rows = [
        {"id": "m1", "session_id": "s", "role": "user", "content": '{"text": "Add a page."}'},
        {"id": "m2", "session_id": "s", "role": "assistant", "content": "", "toolCalls": calls},
        {"id": "m3", "session_id": "s", "role": "tool", "content": json.dumps(result)},
    ]
    rows = [row | {"created_at": 1_700_000_000 + n} for n, row in enumerate(rows)]
    lines = [json.dumps(row) for row in rows]
    Path("rows.json").write_text(f"[{','.join(lines)}]" if is_list else "\n".join(lines))
    run("import", "rows.json")
    told = run("log", "rows").stdout.splitlines()
    assert [line.split("said")[1].strip() for line in told[:3]] == [
        "user: Add a page.",
        'assistant: → add_page({"slug":"team"})',
        'tool: ← add_page: {"id":7}',
    ]
    with refold.open("rows", store=STORE) as chat:
        times = [one.timestamp.timestamp() for one in chat.get_all()]
    assert times == [1_700_000_000.0, 1_700_000_001.0, 1_700_000_002.0]


def test_text_that_is_no_proper_unicode_is_imported_all_the_same():
    write("chat.json", '[{"role": "user", "content": "half a \\ud83d pair"}]')
    run("import", "chat.json")
    assert refold.open("chat", store=STORE).get_all()[0].message.text == "half a \ud83d pair"
    assert "\\ud83d" in run("show", "chat").stdout
    assert ask("show", "chat")["items"][0]["shown"][0]["message"]["parts"][0]["text"] == "half a \ud83d pair"


def test_standard_input_needs_an_id():
    messages = json.dumps([user("hello")])
    assert "--id" in run("import", "-", code=2, input=messages).stderr
    run("import", "-", "--id", "piped", input=messages)
    assert ask("show", "piped")["recorded_messages"] == 1


def test_a_file_with_a_byte_order_mark_is_read():
    Path("chat.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([user("hello")]).encode())
    run("import", "chat.json")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("5", "expected a JSON list of messages"),
        ("[1]", "messages[0]: expected a dict"),
        ("[]", "has no messages"),
        ("{}", "has no list `messages`"),
        ('[{"role": "user"', "line 1, column"),
        ('[\n{"role": "user",}]', "line 2, column"),
        ('[{"role": "user", "content": "\xff"}]', "is not UTF-8"),
        ('[{"role": "bot", "content": "x"}]', "chat.json: messages[0].role: 'bot' is not one of"),
        ('{"messages": []}\n{"messages": [{"role": "bot"}]}', "line 1: has no messages"),
        ('{"messages": [1]}\n', "messages[0]"),
        (
            '{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n' * 2,
            "line 2: the file has the id 'a' twice",
        ),
        (
            '[{"role": "user", "content": [{"type": "tool_result"}]}]',
            "messages[0].content[0].tool_use_id: expected",
        ),
        ('[{"role": "user", "content": ' + "[" * 5_000 + "]" * 5_000 + "}]", "chat.json"),
        ('[{"role": "user", "content": "x", "n": NaN}]', "not a JSON number"),
        ('{"refold": 99}', "newer refold"),
        ('{"refold": 1, "conversation": "x"}\n{"at": 0}', "Line 2"),
    ],
)
def test_a_bad_file_is_told_by_place_and_nothing_is_stored(text, told, folder):
    Path("chat.json").write_bytes(text.encode("latin-1"))
    assert told in run("import", "chat.json", code=1).stderr
    if "refold" not in text:
        assert [path.name for path in folder.iterdir()] == ["chat.json"]


def test_a_file_that_is_not_there_leaves_with_one():
    assert "No such file" in run("import", "missing.json", code=1).stderr


def test_an_import_does_not_touch_a_conversation_there_is_unless_told_to():
    write("chat.json", [user("hello")])
    run("import", "chat.json")
    assert "--append" in run("import", "chat.json", code=1).stderr
    assert ask("show", "chat")["recorded_messages"] == 1
    run("import", "chat.json", "--append")
    assert ask("show", "chat")["recorded_messages"] == 2


def test_an_export_is_imported_to_the_byte(chat):
    lines = run("export", "task-42").stdout
    write("task.jsonl", lines)
    assert ask("import", "task.jsonl", "--id", "copy")["conversations"][0]["id"] == "copy"
    copied = run("export", "copy").stdout
    assert copied.splitlines()[1:] == lines.splitlines()[1:]
    assert "already" in run("import", "task.jsonl", code=1).stderr
    altered = write("bad.jsonl", lines.replace("file3", "file8"))
    assert "the file was changed" in run("import", altered, code=1).stderr


@pytest.mark.parametrize("format", TARGETS)
def test_an_export_in_a_format_is_a_valid_request_of_all_that_was_said_or_of_the_view(chat, format):
    whole = ask_lines("export", "task-42", "--format", format)
    view = ask_lines("export", "task-42", "--format", format, "--view")
    assert [len(whole), len(view)] == [1, 1]
    for one in (*whole, *view):
        assert one.keys() <= {"messages", "system"}
        assert ("system" in one) == (format == "anthropic")
        assert refold.check(one["messages"], dialect=format, system=one.get("system")) == []
    text = json.dumps(whole)
    assert all(f"file{n} file{n}" in text for n in range(6))
    assert "file0 file0" not in json.dumps(view)
    session = refold.open("task-42", store=STORE, model="m", config=SMALL)
    assert view[0]["messages"] == session.fit(dialect=format).messages


def ask_lines(*args):
    return [json.loads(line) for line in run(*args).stdout.splitlines()]


def test_an_export_of_several_conversations_has_a_line_for_each_in_their_order(chat):
    refold.open("hers", store=STORE, owner="alice").append(user("hello"))
    done = run("export", "hers", "task-42", "--format", "openai-chat")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {"messages": [user("hello")]}
    assert len(second["messages"]) == 14
    assert "'hers' belongs to the owner 'alice'" in done.stderr
    told = ask("export", "hers", "task-42", "--format", "ai-sdk", "-o", "out.jsonl")
    names = {"conversations": ["hers", "task-42"], "format": "ai-sdk", "file": "out.jsonl"}
    assert told == {"did": "export", **names, "lines": 2}
    assert len(Path("out.jsonl").read_text().splitlines()) == 2
    run("import", "out.jsonl")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["a", "b"], "several conversations require --format"),
        (["a", "--view"], "requires --format"),
        (["task-42", "--format", "latin"], "'latin' is not known; known are openai-chat"),
    ],
)
def test_an_export_that_makes_no_sense_is_wrong_use(chat, args, told):
    assert told in " ".join(run("export", *args, code=2).stderr.split())


def test_an_export_goes_to_a_file_in_full_or_not_at_all(chat, folder):
    done = ask("export", "task-42", "-o", "out.jsonl")
    lines = Path("out.jsonl").read_text().splitlines()
    assert done == {
        "did": "export",
        "conversations": ["task-42"],
        "format": None,
        "file": "out.jsonl",
        "lines": len(lines),
    }
    damage("UPDATE refold_entry SET body = x'78ff' WHERE place & 0xffffffff = 5")
    run("export", "task-42", "-o", "out.jsonl", code=1)
    assert Path("out.jsonl").read_text().splitlines() == lines
    run("export", "task-42", "-o", "nowhere/out.jsonl", code=1)
    assert {path.name for path in folder.iterdir()} == {"chats.db", "out.jsonl"}


def test_an_import_shows_everything(folder):
    long = [part for n in range(8) for part in (user("go"), call(f"c{n}"), result(f"c{n}", "word " * 10_000))]
    run("import", write("long.json", long))
    assert ask("show", "long")["tokens"]["saved"] == 0


# List


def test_an_empty_store_says_how_to_fill_it(folder):
    SQLiteStore(folder / "chats.db").close()
    assert "refold import FILE" in run("list").stdout
    assert ask("list") == {"store": STORE, "owner": "default", "conversations": []}


def test_a_list_has_what_was_said_and_what_is_shown(chat):
    run("fork", "task-42", "branch", "--at", "3")
    head, branch, task = run("list").stdout.splitlines()
    assert head.split() == ["id", "messages", "recorded", "shown", "saved", "created", "forked", "from"]
    assert branch.endswith("task-42 at #3")
    assert task.split()[:2] == ["task-42", "14"]
    row = ask("list")["conversations"][1]
    assert (row["id"], row["messages"], row["parent"]) == ("task-42", 14, None)
    assert row["tokens"]["recorded"] > row["tokens"]["shown"] > 0
    assert f"{int(100 * row['tokens']['saved'])} %" in task


def test_a_list_is_of_one_owner_and_says_how_to_list_the_others():
    refold.open("hers", store=STORE, owner="alice").append(user("hello"))
    for owner in ("default", "nobody"):
        told = run("list", "--owner", owner).stdout
        others = "Other owners have conversations: `refold list --all-owners`."
        assert told == f"No conversations of {owner!r} in {STORE}. {others}\n"
        assert ask("list", "--owner", owner)["conversations"] == []
    assert [row["id"] for row in ask("list", "--owner", "alice")["conversations"]] == ["hers"]
    assert ask("show", "hers", "--owner", "alice")["owner"] == "alice"


@pytest.mark.parametrize("option", [["--all-owners"], ["--owner", "*"]])
def test_a_list_of_all_owners_names_the_owner_of_each_conversation(option):
    refold.open("mine", store=STORE).append(user("hello"))
    refold.open("hers", store=STORE, owner="alice").append(user("hello"))
    head, *rows = run("list", *option).stdout.splitlines()
    assert head.split()[:3] == ["owner", "id", "messages"]
    assert sorted(row.split()[:2] for row in rows) == [["alice", "hers"], ["default", "mine"]]
    found = ask("list", *option)
    assert found["owner"] == "*"
    assert {row["id"]: row["owner"] for row in found["conversations"]} == {"mine": "default", "hers": "alice"}


BY_ID = [("show",), ("log",), ("explain", 0), ("expand", 0), ("savings",), ("doctor",), ("diff", 0)]


@pytest.mark.parametrize(("name", "rest"), [(name, rest) for name, *rest in BY_ID])
def test_a_reading_command_finds_the_only_conversation_of_an_id_and_says_whose_it_is(name, rest):
    chat = refold.open("hers", store=STORE, owner="alice")
    chat.append([user("hello"), {"role": "assistant", "content": "hi"}])
    done = run(name, "hers", *rest, "--json")
    assert done.stderr == "refold: 'hers' belongs to the owner 'alice' (--owner alice)\n"
    json.loads(done.stdout)
    refold.open("hers", store=STORE, owner="bob").append(user("hello"))
    told = run(name, "hers", *rest, code=1).stderr
    assert "The owner 'bob' or 'alice' has one: give --owner" in told
    assert run(name, "hers", *rest, "--owner", "alice").stderr == ""


def test_a_command_that_changes_a_conversation_needs_its_owner():
    refold.open("hers", store=STORE, owner="alice").append(user("hello"))
    told = run("pin", "hers", 0, code=1).stderr
    assert "The owner 'alice' has one: give --owner" in told
    assert run("delete", "hers", "--yes", code=1).stderr == told
    run("pin", "hers", 0, "--owner", "alice")


def test_a_conversation_that_is_not_there_is_told_with_the_way_to_all_of_them():
    refold.open("mine", store=STORE).append(user("hello"))
    told = run("show", "none", code=1).stderr
    assert told.endswith(". `refold list --all-owners` shows every conversation\n")


def test_a_damaged_conversation_does_not_hide_the_others(chat):
    refold.open("whole", store=STORE).append(user("hello"))
    damage("UPDATE refold_entry SET head = x'00' WHERE place & 0xffffffff = 5", "DELETE FROM refold_shelf")
    shown = run("list", code=1).stdout
    assert "cannot be read" in shown
    assert "whole" in shown
    assert {row["id"]: row["problem"] is None for row in ask("list", code=1)["conversations"]} == {
        "whole": True,
        "task-42": False,
    }


# Show


def test_show_has_a_row_for_each_message_and_one_for_what_an_edit_hides(chat, edit):
    sight = ask("show", "task-42")
    lines = run("show", "task-42").stdout.splitlines()
    assert lines[0].split() == ["place", "turn", "tokens", "role"]
    assert lines[1].split()[:4] == ["#0", "0", "7", "system"]
    assert "task  Which files are large?" in lines[2]
    hidden = sight["items"][2]
    start, end = hidden["span"]
    tokens = f"{hidden['recorded']['tokens']:,} → {hidden['tokens']:,}"
    rest = f"messages hidden by #{edit} window: only the newest that fit"
    assert f"#{start}–#{end - 1}" in lines[3]
    assert f"{tokens}  {hidden['hidden']} {rest}" in lines[3]
    assert "earlier messages are not shown here]" in "".join(lines[4:6])
    assert any('→ ls({"path": "dir5"})' in line for line in lines)
    assert any("← ls: file5 file5" in line for line in lines)
    view, said = sight["tokens"]["shown"], sight["tokens"]["recorded"]
    percent = int(100 * sight["tokens"]["saved"])
    foot = f"view {view} tokens · recorded {said:,} · saved {percent} %"
    assert lines[-1] == f"{foot} · shows {len(shown_in(sight))} messages for 14 recorded"
    assert all(len(line) <= 100 for line in lines)


def test_show_in_json_accounts_for_every_message(chat, edit):
    sight = ask("show", "task-42")
    assert sum(item["recorded"]["tokens"] for item in sight["items"]) == sight["tokens"]["recorded"]
    assert sum(item["tokens"] for item in sight["items"]) == sight["tokens"]["shown"]
    shown = shown_in(sight)
    originals = [one for one in shown if one["at"] != edit]
    assert counted(sight, "hidden") + len(originals) == sight["recorded_messages"] == 14
    assert sight["items"][2]["edit"]["kind"] == "window"
    assert [one["at"] for one in shown if one["is_task"]] == [1]


def test_a_message_that_is_reduced_in_its_place_is_one_row(ladder, capped):
    lines = run("show", "climb").stdout.splitlines()
    (row,) = [line for line in lines if re.match(rf"#{capped}\b", line)]
    (item,) = [item for item in ask("show", "climb")["items"] if item["reduced"]]
    tokens = f"{item['recorded']['tokens']:,} → {item['tokens']:,}"
    assert re.search(rf"1 +{tokens}  tool +cap +← ls: -rw-r--r-- 9000 report-00.pdf", row)
    assert "[refold" not in row
    assert not any(f"#{item['edit']['at']}" in line for line in lines)
    full = run("show", "climb", "--full").stdout
    assert f"#{capped} · tool · turn 1 · {tokens} tokens · cap\n← ls: [refold #{capped} ls: " in full


def test_every_message_is_whole_or_reduced_or_hidden(ladder):
    now = ask("show", "climb")
    assert counted(now, "reduced") == 1
    assert counted(now, "hidden") > 0
    for at in range(len(list(refold.open("climb", store=STORE).events()))):
        sight = ask("show", "climb", "--at", at)
        in_place = counted(sight, "whole") + counted(sight, "reduced")
        assert in_place + counted(sight, "hidden") == sight["recorded_messages"]
        summaries = sum(item["hidden"] > 0 for item in sight["items"])
        assert len(shown_in(sight)) == in_place + summaries
        assert sight["tokens"]["recorded"] == sum(item["recorded"]["tokens"] for item in sight["items"])


def test_what_an_edit_says_is_cut_to_its_row(ladder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, *rows = run("show", "climb").stdout.splitlines()
    assert any("summarize: " in row and row.endswith("…") for row in rows)
    assert all(re.match(r" *#", row) for row in rows[: rows.index("")])


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("[refold #2 ls: 900 tokens, 40 lines; 212 shown]\nname=a", "name=a"),
        ("[refold ls: 900 characters; first 500 shown]\nname=a", "name=a"),
        ("[refold #2 ls: 900 tokens; same as #12]", "same as #12"),
        ("[refold #2 ls: 9 tokens; nearly the same as #4, but for]\nb", "nearly the same as #4, but for b"),
        ("[refold #2 ls: 900 tokens; 0 shown]", "(nothing)"),
        ("[gone] in my own words; all of it", "[gone] in my own words; all of it"),
    ],
)
def test_what_is_reduced_is_shown_without_the_line_that_names_it(text, seen):
    shown = refold.Message("tool", (ToolResult("c1", text, "ls"),))
    assert glance(shown, is_ours=True) == f"← ls: {seen}"


def test_what_somebody_said_is_never_taken_for_ours():
    refold.open("forged", store=STORE).append(user("[refold #1 x: 5 tokens; 2 shown]\nhello"))
    assert "user  task  [refold #1 x: 5 tokens; 2 shown] hello" in run("show", "forged").stdout


def test_show_at_a_place_is_what_the_model_saw_then(chat, edit):
    then = ask("show", "task-42", "--at", edit - 1)
    assert then["at"] == edit - 1
    assert then["tokens"]["shown"] > ask("show", "task-42", "--at", edit)["tokens"]["shown"]
    session = refold.open("task-42", store=STORE)
    for at in range(edit + 1):
        seen, view = ask("show", "task-42", "--at", at), session.view(at)
        assert seen["tokens"]["shown"] == view.tokens
        assert len(shown_in(seen)) == len(view.messages)
        assert sum(item["recorded"]["tokens"] for item in seen["items"]) == seen["tokens"]["recorded"]
    assert f"right after #{edit - 1}" in run("show", "task-42", "--at", edit - 1).stdout
    assert "has no place 999" in run("show", "task-42", "--at", 999, code=1).stderr


def test_show_marks_what_is_pinned(chat):
    run("pin", "task-42", 3)
    shown = [one for item in ask("show", "task-42")["items"] for one in item["shown"]]
    assert {one["at"] for one in shown if one["is_pinned"]} == {2, 3}
    rows = [line for line in run("show", "task-42").stdout.splitlines() if "pinned" in line]
    assert [row.split()[0] for row in rows] == ["#2", "#3"]
    assert "messages hidden" in run("show", "task-42").stdout


def test_show_tells_restored_from_hidden(chat, edit, end):
    run("restore", "task-42", edit, "--why", "needed again")
    assert f"restored by #{end}: needed again" in run("show", "task-42").stdout
    assert ask("show", "task-42")["tokens"]["saved"] == 0


def test_show_full_has_whole_texts(chat):
    assert "file5 " * 30 in run("show", "task-42", "--full").stdout.replace("\n", " ")
    assert "hidden by" in run("show", "task-42", "--full").stdout


def test_show_tells_what_is_mended_when_sent():
    write("chat.json", [user("go"), call("c1"), user("stop")])
    run("import", "chat.json")
    assert "repaired when sent: #1: the call 'c1' has no result" in run("show", "chat").stdout
    assert len(ask("show", "chat")["notices"]) == 1


def test_another_view_shows_what_it_shows(chat):
    assert ask("show", "task-42", "--view", "reviewer")["tokens"]["saved"] == 0
    assert "view 'reviewer'" in run("show", "task-42", "--view", "reviewer").stdout


HOSTILE = [
    "\x1b[31mred\x1b[0m \x07bell \x9b2J \x7f",
    "[bold]markup[/bold] [/] :smile: [link=http://x]",
    "right \u202eto left\u2066 and \u200b nothing \U000e0041 \ufeff",
    "lines\r\nand\rreturns\u2028and\u2029more\x0b\x0c\x85",
    "half a \ud83d pair",
    "日本語のとても長い文章" * 30,
    "👨‍👩‍👧‍👦 🇩🇪 e\u0301 ﷽" * 30,
    "",
]


@pytest.mark.parametrize("args", [("show",), ("show", "--full"), ("log",), ("diff",)], ids=" ".join)
def test_nothing_in_a_message_reaches_the_terminal_as_more_than_text(args):
    with refold.open("bad\x1b[31m [red]", store=STORE) as chat:
        for n, text in enumerate(HOSTILE):
            chat.append([user(text), call(f"c{n}", f"tool{text}", text, text), result(f"c{n}", text)])
    name, *options = args
    places = (0,) if name == "diff" else ()
    out = run(name, "bad\x1b[31m [red]", *places, *options).stdout
    out += run("list").stdout + run("show", "\x1b]0;x\x07", code=1).stderr
    for char in "\x1b\x07\x9b\x7f\r\u202e\u2066\u200b\ufeff\u2028\x0b\x85\ud83d\U000e0041":
        assert char not in out
    assert "\\x1b[31mred" in out
    assert "\\u202e" in out
    assert "\\ud83d" in out
    assert "[bold]markup[/bold] [/] :smile:" in out


def test_wide_characters_do_not_break_the_table():
    from rich.cells import cell_len

    refold.open("wide", store=STORE).append([user(text) for text in HOSTILE])
    lines = run("show", "wide").stdout.splitlines()
    assert all(cell_len(line) <= 100 for line in lines)
    assert lines[6].endswith("…")


def test_a_long_view_is_as_wide_as_the_terminal(chat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, run("show", "task-42").stdout.splitlines()[:-1])) <= 60


# Explain and expand


def test_explain_says_what_was_done_and_which_setting_decided_it(ladder, capped):
    at = next(item["edit"]["at"] for item in ask("show", "climb")["items"] if item["reduced"])
    told = ask("explain", "climb", capped)
    assert list(told) == ["at", "role", "shown", "tokens", "causes", "stays", "span"]
    (cause,) = told["causes"]
    assert (told["shown"], cause["at"], cause["kind"], cause["state"]) == ("reduced", at, "cap", "in force")
    before, after = cause["tokens"]
    assert told["tokens"] == after < before
    assert run("explain", "climb", capped).stdout.splitlines() == [
        f"#{capped} (tool) is reduced to {after} tokens",
        f"#{at} cap of #{capped}, {before} → {after} tokens, in force",
        f"    {before} tokens are more than 10% of the window (compact.cap.share, config)",
        f"Read it: refold expand climb {capped}",
    ]
    assert run("explain", "climb", at).stdout.splitlines()[0].startswith(f"#{at} cap of #{capped}, ")


def test_explain_says_why_something_stays_or_is_hidden(ladder):
    task = run("explain", "climb", 1).stdout.splitlines()
    assert task[0].startswith("#1 (user) is shown whole, ")
    assert task[1] == "It stays: it is the task, the first message of the user."
    assert run("explain", "climb", 2).stdout.startswith("#2 (assistant) is hidden\n")
    run("pin", "climb", 3)
    assert "It stays: it is pinned." in run("explain", "climb", 2).stdout
    assert "No edit covers it." in run("explain", "climb", 0).stdout


def test_explain_has_every_edit_the_newest_first_and_what_became_of_it(chat, edit, end):
    def states():
        return [(cause["at"], cause["state"]) for cause in ask("explain", "task-42", 2)["causes"]]

    run("restore", "task-42", 2, "--why", "needed\x1b[31m again")
    assert states()[:2] == [(end, "in force"), (edit, "under a later one")]
    told = run("explain", "task-42", 2).stdout
    assert re.match(rf"#2 \(assistant\) is shown whole, .*\n#{end} restore of #2–#.*, in force\n", told)
    assert "    needed\\x1b[31m again\n" in told
    run("undo", "task-42", end)
    assert states()[:2] == [(end, "taken back"), (edit, "in force")]
    assert "is neither a message nor an edit" in run("explain", "task-42", end + 1, code=1).stderr
    run("explain", "task-42", 999, code=1)


def test_expand_prints_the_whole_text_and_nothing_else(ladder, capped):
    said = next(one.message.text for one in ladder.get_all() if one.at == capped)
    assert run("expand", "climb", capped).stdout == said + "\n"
    assert ask("expand", "climb", capped) == {"at": capped, "text": said}
    summary = next(item["edit"]["at"] for item in ask("show", "climb")["items"] if item["hidden"])
    hidden = run("expand", "climb", summary)
    assert "#3 tool ls:\n" + "file0 " * 30 in hidden.stdout
    assert "no such place" in run("expand", "climb", 999, code=1).stderr


def test_expand_adds_no_empty_line_and_takes_what_is_no_unicode():
    refold.open("odd", store=STORE).append([user("two\nlines\n"), user("half a \ud83d pair")])
    assert run("expand", "odd", 0).stdout == "two\nlines\n"
    assert run("expand", "odd", 1).stdout == "half a \\ud83d pair\n"


def test_expand_takes_an_id_or_a_number_counted_from_the_newest_message():
    chat = refold.open("named", store=STORE)
    chat.append(user("one"), id="first")
    chat.append(user("two"))
    assert run("expand", "named", "first").stdout == "one\n"
    assert run("expand", "named", "-1").stdout == "two\n"
    assert run("expand", "named", "-2", "--chars", "0-1").stdout == "o\n"
    assert "has the id 'third'" in run("expand", "named", "third", code=1).stderr


def test_a_pipe_gets_a_text_as_it_is_and_a_terminal_what_is_safe():
    pty = pytest.importorskip("pty")
    refold.open("red", store=STORE).append(user("a\x1b[31mb"))
    args = [sys.executable, "-m", "refold", "expand", "red", "0", "--store", STORE]
    assert subprocess.run(args, capture_output=True).stdout == b"a\x1b[31mb\n"
    screen, terminal = pty.openpty()
    subprocess.run(args, stdout=terminal, check=True)
    assert os.read(screen, 100) == b"a\\x1b[31mb\r\n"


# Log and diff


def test_the_log_has_every_event_in_order(chat, edit, end):
    run("pin", "task-42", 3, "--why", "the key")
    run("undo", "task-42", edit)
    store = SQLiteStore("chats.db")
    entry = Entry(end + 2, "dreamt", None, b"[]", b'{"of":"\\u001bsheep"}')
    store.append(Key("default", "task-42"), [entry])
    store.close()
    lines = run("log", "task-42").stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [f"#{at}" for at in range(end + 3)]
    assert "user: Which files are large?" in lines[1]
    assert "window, " in lines[edit]
    assert "only the newest" in lines[edit]
    assert lines[end].endswith("#2, #3 pinned: the key")
    assert f"undoes #{edit}" in lines[end + 1]
    assert "newer refold" in lines[end + 2]
    assert lines[-1] == f"{end + 3} events"


def test_the_log_in_json_has_the_events_as_they_are(chat, edit):
    run("undo", "task-42")
    log = ask("log", "task-42")
    assert (log["conversation"], log["owner"]) == ("task-42", "default")
    kinds = {event["event"]: event for event in log["events"]}
    assert {"at", "event", "time", "role", "tokens", "turn", "step", "index", "message"} <= kinds[
        "said"
    ].keys()
    replaced = kinds["replaced"]
    assert (replaced["kind"], replaced["view"]) == ("window", "main")
    assert replaced["tokens"][0] > replaced["tokens"][1]
    assert kinds["undone"]["of"] == edit
    assert kinds["said"]["time"].endswith("Z")


def test_the_log_can_be_read_in_pieces(chat):
    whole = ask("log", "task-42")["events"]
    assert ask("log", "task-42", "--after", 4, "--limit", 3)["events"] == whole[5:8]
    assert ask("log", "task-42", "--after", 999)["events"] == []


def test_the_log_has_what_a_provider_measured():
    answer = refold.Message("assistant", "Hi.", usage=Usage(120, 5, 100), model="m")
    chat = refold.open("task", store=STORE)
    chat.append([user("hello"), answer])
    assert isinstance(list(chat.events())[-1], Measured)
    assert "#1 used 120 in (100 cached), 5 out by m" in run("log", "task").stdout
    assert ask("log", "task")["events"][-1]["usage"]["cache_read"] == 100


def test_a_damaged_event_does_not_hide_what_follows_in_the_log(chat):
    damage("UPDATE refold_entry SET body = x'78ff' WHERE place & 0xffffffff = 5")
    out = run("log", "task-42", code=1).stdout
    assert "#5" in out
    assert "cannot be read" in out
    assert "#6" in out
    events = ask("log", "task-42", code=1)["events"]
    assert ["problem" in event for event in events[:8]] == [False] * 5 + [True] + [False] * 2


def signed(diff, sign):
    return [one["at"] for one in diff["changes"] if one["sign"] == sign]


def test_a_diff_has_what_went_and_what_came(chat, edit):
    changed = ask("diff", "task-42", edit - 1)
    before, after = ask("show", "task-42", "--at", edit - 1), ask("show", "task-42")
    old = {one["at"] for item in before["items"] for one in item["shown"]}
    new = {one["at"] for item in after["items"] for one in item["shown"]}
    assert signed(changed, "-") == sorted(old - new)
    assert {*signed(changed, "+")} == new - old
    assert changed["old"] == {
        "conversation": "task-42",
        "view": "main",
        "at": edit - 1,
        "messages": len(shown_in(before)),
        "tokens": before["tokens"]["shown"],
        "recorded": [],
    }
    lines = run("diff", "task-42", edit - 1).stdout.splitlines()
    assert lines[0].startswith(f"--- task-42 view right after #{edit - 1} · ")
    assert lines[1].startswith("+++ task-42 view now · ")
    assert sum(line.startswith("-  #") for line in lines) == len(old - new)
    assert sum(line.startswith("+  #") for line in lines) == len(new - old)
    count = f"{len(old - new)} removed, {len(new - old)} added"
    assert lines[-1].startswith(count)


def test_a_diff_of_two_places_goes_from_the_first_to_the_second(chat):
    assert signed(ask("diff", "task-42", 1, 3), "+") == [2, 3]
    assert signed(ask("diff", "task-42", 3, 1), "-") == [2, 3]
    assert "show the same" in run("diff", "task-42", 3, 3).stdout
    run("diff", "task-42", 999, code=1)
    missing = run("diff", "task-42", "--with", "nowhere", code=1).stderr
    assert "'nowhere'" in missing
    assert "refold list --owner default" in " ".join(missing.split())


# What people do


def test_undo_takes_back_the_newest_edit_and_can_be_undone(chat, edit, end):
    shown = ask("show", "task-42")["tokens"]["shown"]
    done = ask("undo", "task-42")
    assert done == {
        "conversation": "task-42",
        "view": "main",
        "did": "undo",
        "of": edit,
        "at": end,
        "tokens": {"before": shown, "after": ask("show", "task-42")["tokens"]["shown"]},
    }
    assert done["tokens"]["after"] > shown
    assert f"#{end} is undone" in run("undo", "task-42", end).stdout
    assert ask("show", "task-42")["tokens"]["shown"] == shown


def test_undo_by_the_place_of_a_hidden_message(chat, edit):
    assert ask("undo", "task-42", 2)["of"] == edit
    assert "Nothing hides #0" in run("undo", "task-42", 0, code=1).stderr


def test_what_cannot_be_undone_restored_or_unpinned_leaves_with_one(chat, edit):
    run("restore", "task-42", 1, code=1)
    run("unpin", "task-42", 1, code=1)
    run("pin", "task-42", edit, code=1)
    run("pin", "task-42", 999, code=1)


def test_restore_shows_a_message_again_with_what_it_belongs_to(chat):
    done = ask("restore", "task-42", 2)
    assert done["did"] == "restore"
    assert done["tokens"]["after"] > done["tokens"]["before"]
    assert {2, 3} <= {one["at"] for item in ask("show", "task-42")["items"] for one in item["shown"]}


def test_pin_and_unpin(chat):
    assert ask("pin", "task-42", 3)["places"] == [2, 3]
    assert "with #2" in run("pin", "task-42", 3).stdout
    assert ask("unpin", "task-42", 3)["did"] == "unpin"
    run("unpin", "task-42", 3, code=1)


def test_a_fork_shares_the_past_up_to_a_place(chat):
    done = ask("fork", "task-42", "branch", "--at", 3)
    assert done == {
        "did": "fork",
        "conversation": "branch",
        "forked_from": "task-42",
        "at": 3,
        "messages": 4,
    }
    assert "14 messages" in run("fork", "task-42", "whole").stdout
    assert "already" in run("fork", "task-42", "branch", code=1).stderr
    run("fork", "task-42", "late", "--at", 999, code=1)


def test_delete_asks_first(chat):
    assert "Nothing was erased" in run("delete", "task-42", code=1, input="n\n").stderr
    assert "Nothing was erased" in run("delete", "task-42", code=1, input="").stderr
    refused = run("delete", "task-42", "--json", code=1, input="y\n")
    assert refused.stdout == ""
    assert "use --yes" in refused.stderr
    assert ask("list")["conversations"]
    assert run("delete", "task-42", input="y\n").stdout.endswith("Erased: task-42\n")
    assert not ask("list")["conversations"]


def test_delete_names_the_forks_that_keep_what_they_share(chat):
    run("fork", "task-42", "branch")
    run("fork", "branch", "twig")
    assert ask("delete", "task-42", "--yes") == {
        "did": "delete",
        "erased": ["task-42"],
        "kept_by": ["branch"],
    }
    assert ask("show", "twig")["recorded_messages"] == 14
    assert ask("delete", "branch", "--with-forks", "--yes")["erased"] == ["branch", "twig"]
    assert not ask("list")["conversations"]


def test_a_damaged_conversation_can_be_deleted(chat):
    damage("UPDATE refold_entry SET body = x'78ff', head = x'00'", "UPDATE refold_shelf SET value = x'78ff'")
    run("show", "task-42", code=1)
    run("delete", "task-42", "--yes")


# Fit


@pytest.fixture
def long_chat():
    messages = [{"role": "system", "content": "Be brief."}, user("Which files are large?")]
    for n in range(8):
        messages += [call(f"c{n}"), result(f"c{n}", f"file{n} " * 40)]
    compact = "agents: {default: {compact: {threshold_percent: 0.5334}}}"
    write("small.yaml", f"models: {{m: {{window: 1000, max_output: 200}}}}\n{compact}\n")
    return messages


def test_fit_keeps_the_shape_of_a_list(long_chat):
    write("chat.json", long_chat)
    args = ("fit", "chat.json", "--model", "m", "--config", "small.yaml")
    messages = json.loads(run(*args).stdout)
    assert len(messages) < len(long_chat)
    assert messages[:2] == long_chat[:2]
    assert messages[-2:] == long_chat[-2:]
    assert messages == refold.fit(long_chat, model="m", config="small.yaml")
    run(*args, "-o", "out.json")
    assert json.loads(Path("out.json").read_text()) == messages


def test_fit_keeps_the_shape_of_an_object(long_chat):
    given = {
        "model": "x",
        "system": "Answer in French.",
        "messages": long_chat,
        "tools": [{"type": "function"}],
    }
    write("chat.json", given)
    out = json.loads(run("fit", "chat.json", "--model", "m", "--config", "small.yaml").stdout)
    assert out | {"messages": []} == given | {"messages": []}
    assert list(out) == list(given)
    assert out["messages"][:2] == long_chat[:2]
    assert len(out["messages"]) < len(long_chat)


def test_fit_reports_what_it_did(long_chat):
    args = ("fit", write("chat.json", long_chat), "--model", "m", "--config", "small.yaml", "--report")
    done = run(*args, "-")
    report = json.loads(done.stderr)
    assert json.loads(done.stdout)
    assert report["tokens"]["before"] > report["tokens"]["final"]
    assert [edit["kind"] for edit in report["edits"]] == ["summarize"]
    run(*args, "report.json")
    assert json.loads(Path("report.json").read_text()) == report


def test_fit_reads_the_configuration_of_the_folder_and_standard_input(long_chat):
    Path("small.yaml").rename("refold.yaml")
    out = run("fit", "-", "--model", "m", input=json.dumps(long_chat)).stdout
    assert len(json.loads(out)) < len(long_chat)


def test_fit_stores_nothing(long_chat, folder):
    write("chat.json", long_chat)
    before = sorted(folder.iterdir())
    run("fit", "chat.json", "--model", "m")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ('[{"role": "user", "content": 5}]', 1, "messages[0].content"),
        ('{"messages": [], "tools": 5}', 1, "tools: expected a list"),
        ("[", 1, "line 1, column"),
        (json.dumps([user("much " * 2_000)]), 1, "there is room for"),
    ],
)
def test_what_cannot_be_fitted_leaves_with_one_and_says_why(text, code, told, long_chat):
    write("chat.json", text)
    result = run("fit", "chat.json", "--model", "m", "--config", "small.yaml", code=code)
    assert told in result.stderr
    assert result.stdout == ""


def test_a_dialect_that_is_not_known_is_wrong_use(long_chat):
    write("chat.json", long_chat)
    assert "openai-chat" in run("fit", "chat.json", "--model", "m", "--dialect", "klingon", code=2).stderr


# Real conversations, and the real process


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"recorded conversations are not at {TRACES}")
def test_recorded_conversations_are_imported_shown_and_healthy(folder):
    for name in ("mini_swe_agent", "pi_coding_agent", "toolbench"):
        path = TRACES / f"{name}.jsonl"
        given = [json.loads(line) for line in path.read_text().splitlines()]
        done = ask("import", path)["conversations"]
        assert [(one["id"], one["messages"]) for one in done] == [
            (one["id"], len(one["messages"])) for one in given
        ]
    long = "pi_coding_agent/large-session"
    config = {"models": {"m": {"window": 8_000, "max_output": 1_000}}}
    with refold.open(long, store=STORE, model="m", config=config) as session:
        session.fit()
    sight = ask("show", long)
    assert sum(item["recorded"]["tokens"] for item in sight["items"]) == sight["tokens"]["recorded"]
    assert sight["tokens"]["saved"] > 0.9
    for name in ("show", "log"):
        assert run(name, long).stdout
    assert " removed, " in run("diff", long, 500).stdout
    assert ask("doctor")["healthy"]


def test_a_reader_that_goes_away_is_no_error(chat):
    big = refold.open("big", store=STORE)
    big.append([user("word " * 50) for _ in range(3_000)])
    shell = f"{sys.executable} -m refold log big --store {STORE} | head -1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("#0")
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_gets_escapes(chat):
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    args = [sys.executable, "-m", "refold", "show", "task-42", "--store", STORE]
    done = subprocess.run(args, capture_output=True, encoding="latin-1", env=env)
    assert done.returncode == 0
    assert "\\u2190 ls: file5" in done.stdout


def test_a_process_leaves_with_the_code_of_its_command(chat):
    def leave(*args):
        done = subprocess.run([sys.executable, "-m", "refold", *args], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode

    assert leave("show", "task-42", "--store", STORE) == 0
    assert leave("show", "nope", "--store", STORE) == 1
    assert leave("show") == 2
    assert leave("list", "--store", "gopher://") == 2


def damage(*statements):
    """Changes the file behind refold's back."""
    import apsw

    connection = apsw.Connection("chats.db")
    for statement in statements:
        connection.execute(statement)
    connection.close()


# Settings


def in_force(*args, agent="default", **rest):
    """The settings of an agent by name, each with its origin."""
    rows = ask("config", *args, **rest)["agents"][agent]
    return {row["name"]: (row["value"], row["origin"]) for row in rows}


def test_without_a_file_the_defaults_are_in_force_and_it_says_so(folder):
    told = run("config", store=None).stdout
    assert told.startswith("There is no refold.yaml in this folder: these are the defaults\n")
    assert re.search(r"^store +sqlite:///refold.db +default$", told, re.MULTILINE)
    assert re.search(r"^compact.keep_recent +10 +default$", told, re.MULTILINE)
    assert re.search(r"^handles +on +default$", told, re.MULTILINE)
    assert list(folder.iterdir()) == []


def test_every_setting_in_force_is_told_with_the_line_it_came_from():
    text = "models: {m: {window: 800}}\nagents:\n  a: {model: m}\n  b:\n    compact: off\n"
    write("refold.yaml", text)
    told = run("config", store=None).stdout
    assert told.startswith("From refold.yaml\n")
    assert re.search(r"^models.m.window +800 +refold.yaml:1$", told, re.MULTILINE)
    assert re.search(r"^agent a\nmodel +m +refold.yaml:3$", told, re.MULTILINE)
    assert re.search(r"^agent b\n.*\ncompact +off +refold.yaml:5$", told, re.MULTILINE)
    assert "agent a" not in run("config", "--agent", "b").stdout
    assert ask("config", write("other.yaml", text))["file"] == "other.yaml"
    assert in_force("--config", "other.yaml", agent="b")["compact"] == (False, "other.yaml:5")
    assert "configured: a, b" in run("config", "--agent", "c", code=2).stderr


def test_the_store_in_force_is_told_with_where_it_came_from(monkeypatch):
    def store(*args, **rest):
        return ask("config", *args, **rest)["settings"][0]

    assert store() == {"name": "store", "value": STORE, "origin": "--store"}
    write("refold.yaml", "store: sqlite:///file.db")
    assert store(store=None)["origin"] == "refold.yaml:1"
    monkeypatch.setenv("REFOLD_STORE", "sqlite:///variable.db")
    assert store(store=None) == {"name": "store", "value": "sqlite:///variable.db", "origin": "$REFOLD_STORE"}


def test_several_settings_are_set_at_once_all_or_none():
    two = ["--set", "*.grep.after_steps=3", "--set", "*.grep.mode=remove", "--set", "a.ls.after_steps=1"]
    expected = [
        {"agent": "*", "tool": "grep", "set": {"after_steps": 3, "mode": "remove"}},
        {"agent": "a", "tool": "ls", "set": {"after_steps": 1}},
    ]
    assert ask("config", *two)["settings"] == expected
    run("config", "--set", "*.grep.after_steps=5", "--set", "*.grep.mode=nothing", code=2)
    rows = {row["name"]: row["value"] for row in ask("config")["agents"]["default"]}
    assert rows["tools.grep.expire.after_steps"] == 3
    run("config", "--unset", "*.grep.mode", "--unset", "a.none", code=1)
    told = run("config", "--unset", "*.grep.mode", "--unset", "a.ls").stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in told] == ["after_steps = 3", "nothing"]


def test_what_is_set_in_the_database_is_in_force_until_it_is_unset():
    write("refold.yaml", "agents: {a: {tools: {my.grep: {expire: {length: 9, after_steps: 5}}}}}")
    told = run("config", "--set", "*.my.grep.after_steps=0").stdout
    assert told == f"Set for tool 'my.grep' of agent '*' in {STORE}: after_steps = 0\n"
    (found,) = ask("config", "--set", "a.my.grep.prompt=42")["settings"]
    assert found["set"] == {"prompt": "42"}
    (found,) = ask("config", "--set", "a.my.grep.threshold=0.5")["settings"]
    assert found["set"] == {"prompt": "42", "threshold": 0.5}
    expire = "tools.my.grep.expire"
    found = in_force(agent="a")
    assert found[f"{expire}.after_steps"] == (0, "database")
    assert found[f"{expire}.length"] == (9, "refold.yaml:1")
    assert found[f"{expire}.prompt"] == ("42", "database")
    assert in_force("--agent", "default")[f"{expire}.after_steps"] == (0, "database")
    run("config", "--unset", "a.my.grep.prompt")
    assert in_force(agent="a")[f"{expire}.prompt"] == (None, "default")
    run("config", "--unset", "*.my.grep")
    assert in_force(agent="a")[f"{expire}.after_steps"] == (5, "refold.yaml:1")
    assert "is not set in" in run("config", "--unset", "*.my.grep", code=1).stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--set", "a.grep.after_steps"], "expected a whole number, got ''"),
        (["--set", "a.grep.after_steps=-1"], "--set a.grep.after_steps: -1 is too small"),
        (["--set", "a.grep.mode=gone"], "'none', 'remove', 'compact'"),
        (["--set", "a.grep.until=5"], "known here: after_steps"),
        (["--set", "grep.mode=none"], "expected AGENT.TOOL.FIELD=VALUE"),
        (["--unset", "grep"], "expected AGENT.TOOL"),
        (["--unset", "a.b", "--set", "a.b.mode=none"], "cannot be combined"),
    ],
)
def test_a_setting_that_cannot_be_is_not_set(args, told, folder):
    assert told in run("config", *args, code=2).stderr
    assert list(folder.iterdir()) == []


def test_only_setting_makes_a_store(folder):
    assert "There is no store" in run("config", "--unset", "a.grep", code=1).stderr
    run("config")
    assert list(folder.iterdir()) == []
    run("config", "--set", "a.grep.mode=none")
    assert [path.name for path in folder.iterdir()] == ["chats.db"]


def test_an_older_way_to_write_it_is_told():
    write("refold.yaml", "agents: {a: {transforms: [{type: assistant, token_limit: 600}]}}")
    told = run("config", store=None)
    assert "refold.yaml:1: agents.a.transforms: is deprecated; write compact" in told.stderr
    assert re.search(r"^compact.token_threshold +600 +refold.yaml:1$", told.stdout, re.MULTILINE)


def test_a_log_is_followed_as_others_append(chat):
    session = refold.open("live", store=STORE)
    session.append(user("one"))
    args = [sys.executable, "-m", "refold", "log", "live", "--follow", "--json", "--store", STORE]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as following:
        assert json.loads(following.stdout.readline())["at"] == 0
        session.append([user("two"), user("three")])
        assert [json.loads(following.stdout.readline())["at"] for _ in range(2)] == [1, 2]
        session.clear()
        assert following.stdout.read() == ""
    assert following.returncode == 0
    assert "cannot be combined" in run("log", "task-42", "--follow", "--limit", 3, code=2).stderr


def test_a_password_in_a_url_is_never_printed(chat):
    url = "postgresql://somebody:s3cret@127.0.0.1:1/db?timeout_s=0.2"
    for args in (["list"], ["doctor"], ["show", "a"], ["config"]):
        done = CliRunner().invoke(app, [*args, "--store", url])
        assert "s3cret" not in done.output


@pytest.mark.parametrize("command", [["list"], ["show", "x"], ["savings", "x"], ["learn"], ["doctor"]])
def test_a_database_of_somebody_else_is_not_written_to(tmp_path, command):
    path = tmp_path / "theirs.db"
    with closing(apsw.Connection(str(path))) as theirs:
        theirs.execute("CREATE TABLE t (a)")
    before = path.read_bytes()
    result = CliRunner().invoke(app, [*command, "--store", f"sqlite:///{path}"])
    assert result.exit_code == 1
    assert "something else" in str(result.exception) + result.output
    assert path.read_bytes() == before
