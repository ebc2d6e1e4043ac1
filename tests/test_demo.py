"""The demo: a model that acts on what it is shown, tools that only read, and what people see of both."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

import refold
from refold.agent.demo import folder as limits
from refold.agent.demo.folder import Folder
from refold.agent.demo.model import QUESTION, DemoModel, ScriptedReader, reading_plan
from refold.agent.demo.run import choose_folder, run_demo
from refold.cli import app
from refold.core.errors import NotFoundError, SettingError
from refold.core.expiry import EXPAND, SEARCH
from refold.dialects.rules.targets import check_request
from refold.stores.store import open_store
from refold.testing.stand_in import StandIn
from served import WAIT_S, until

WINDOW, STEPS = 4_000, 50
OWN = str(Path(refold.__file__).parent)


def filled(root, files=24, lines=90):
    """A folder whose files have one value in each line, which no other line has."""
    for n in range(files):
        path = root / f"part{n % 3}" / f"module_{n:02}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        values = [f"LIMIT_{n}_{k} = {n * 1_000 + k * 7}" for k in range(lines)]
        path.write_text("\n".join([f"def function_{n}():", "    pass", *values]))
    return root


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A whole demo: its folder, its model with all that it was sent, its store and what came of it."""
    root = filled(tmp_path_factory.mktemp("folder"))
    model, store, steps = DemoModel(Folder(root), STEPS, WINDOW), open_store("memory://"), []
    model.keep = None
    outcome = run_demo(Folder(root), model, store, "demo", steps.append)
    return root, model, store, outcome, steps


def demo(*options, code=0):
    result = CliRunner().invoke(app, ["demo", *map(str, options)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


# The run


def test_what_is_hidden_by_the_end_is_found_and_quoted_exactly(shown):
    root, _, _, outcome, _ = shown
    asked = outcome.question
    assert asked.is_hidden
    assert asked.line in (root / asked.path).read_text().splitlines()
    assert outcome.answer == f"It says: {asked.line}"
    assert outcome.is_right
    assert outcome.found_by == (SEARCH, EXPAND)


def test_every_request_is_valid_and_leaves_room_for_the_answer(shown):
    _, model, _, outcome, _ = shown
    assert len(model.requests) == len(outcome.steps)
    for request, step in zip(model.requests, outcome.steps, strict=True):
        assert not check_request("openai-chat", request, tokens=step.sent, room=WINDOW - model.max_output)
    assert model.most_tokens == max(step.sent for step in outcome.steps)


def test_it_goes_on_far_beyond_the_step_at_which_it_would_have_ended(shown):
    outcome = shown[3]
    died = outcome.ended_without
    assert [step.step for step in outcome.steps if step.recorded > WINDOW - shown[1].max_output] == [
        *range(died, len(outcome.steps) + 1)
    ]
    assert outcome.steps[-1].recorded > 3 * WINDOW
    assert all(step.sent <= step.recorded for step in outcome.steps)


def test_until_something_is_hidden_what_is_sent_is_what_was_said(shown):
    steps = shown[3].steps
    first = next(n for n, step in enumerate(steps) if step.saved)
    assert first > 1
    for step in steps[:first]:
        assert step.sent == step.recorded
    assert steps[first].sent < steps[first].recorded


def test_nothing_that_was_read_is_lost(shown):
    root, _, store, _, steps = shown
    folder, chat = Folder(root), refold.open("demo", store=store)
    said = chat.get_all()
    calls = {call.call_id: call for one in said for call in one.message.calls if call.tool == "read_file"}
    results = [result for one in said for result in one.message.results if result.call_id in calls]
    assert len(results) == sum(step.tool == "read_file" for step in steps)
    for result in results:
        assert result.output == folder.read_file(**json.loads(calls[result.call_id].input))


def test_the_steps_are_told_as_they_happen_and_have_the_edits_of_the_record(shown):
    _, _, store, outcome, steps = shown
    assert tuple(steps) == outcome.steps
    edits = [event for event in refold.open("demo", store=store).events() if hasattr(event, "span")]
    told = {stage for step in steps for stage in step.saved}
    assert told
    assert told <= {event.kind for event in edits}
    assert sum(sum(step.saved.values()) for step in steps) <= sum(
        event.tokens[0] - event.tokens[1] for event in edits
    )  # a session that closes prunes once more


def test_the_same_folder_gives_the_same_steps(shown):
    root, _, _, outcome, _ = shown
    folder = Folder(root)
    model = DemoModel(folder, STEPS, WINDOW)
    assert run_demo(folder, model, open_store("memory://"), "demo", lambda step: None) == outcome


# The model


def asked(*messages):
    return {"messages": [{"role": "user", "content": "Work through this folder."}, *messages]}


def called(tool, given, result):
    call = {"id": f"c{tool}{given}", "type": "function"}
    made = {**call, "function": {"name": tool, "arguments": json.dumps(given)}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


def test_it_reads_page_after_page_and_searches_for_what_a_file_defines(tmp_path):
    (tmp_path / "a.lock").write_text("not worth reading")
    (tmp_path / "b.py").write_text("import sys\ndef function():\n" + "    pass\n" * 200)
    (tmp_path / "c.txt").write_text("words")
    calls = list(reading_plan(Folder(tmp_path), 100))
    pages = [("read_file", {"path": "b.py", "first": first, "lines": 100}) for first in (1, 101)]
    rest = ("read_file", {"path": "c.txt", "first": 1, "lines": 100})
    assert calls == [*pages, ("grep", {"text": "function"}), rest]


def test_it_answers_from_view_where_it_can_and_says_so_where_it_cannot_at_all(tmp_path):
    reader = ScriptedReader(Folder(tmp_path), 0, 100)
    question = {"role": "user", "content": QUESTION.format(path="c.txt", word="Widget")}
    read = called("read_file", {"path": "c.txt"}, "c.txt: lines 1-1 of 1\nWidget = 4")
    assert reader(asked(*read, question)) == "It says: Widget = 4"
    ((tool, _),) = reader(asked(question)).calls
    assert tool == SEARCH
    vain = called(SEARCH, {"query": "Widget"}, "Nothing was found.")
    assert reader(asked(question, *vain)) == "I cannot find it."


@pytest.mark.filterwarnings("ignore:The model 'no-such-model'")
def test_a_stand_in_counts_and_costs_like_the_model_it_is_like():
    about = StandIn(["Done."], like="gpt-5").config["models"]["stand-in"]
    assert (about["provider"], about["input"]) == ("openai", 1.25)
    with pytest.raises(SettingError, match="is no model"):
        StandIn(["Done."], like="no-such-model")


# The folder


def test_hidden_files_links_keys_and_what_tools_fill_are_left_out(tmp_path):
    for name in (".env", "server.pem", "node_modules/x.js", ".git/config", "VENV/x.py", "a/kept name ü.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "away.txt").symlink_to(__file__)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.txt")
    assert list(Folder(tmp_path).sizes) == ["a/kept name ü.txt"]


def test_only_text_is_listed_and_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\1\2" * 99)
    (tmp_path / "b.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    (tmp_path / "c.txt").write_bytes(b"")
    folder = Folder(tmp_path)
    assert list(folder.sizes) == ["b.txt"]
    assert folder.read_file("b.txt") == "b.txt: lines 1-1 of 1\ncaf\ufffd"
    assert folder.grep("caf") == "b.txt:1: caf\ufffd"
    for path in ("a.bin", "../b.txt"):
        with pytest.raises(NotFoundError, match="no file"):
            folder.read_file(path)


def test_of_a_vast_file_only_the_beginning_is_read(tmp_path):
    vast = tmp_path / "vast.log"
    vast.write_text("first\n" + "x" * limits.MAX_FILE_BYTES)
    os.truncate(vast, 2**36)  # a hole, which takes no room
    folder = Folder(tmp_path)
    assert folder.read_file("vast.log").startswith("vast.log: lines 1-2 of 2")
    assert len(folder.read_file("vast.log")) < 2 * limits.MAX_LINE_CHARS
    assert folder.text_bytes == limits.MAX_FILE_BYTES


def test_of_very_many_files_some_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_FILES", 10)
    assert len(Folder(filled(tmp_path, files=12, lines=1)).sizes) == 10


def test_a_file_that_is_gone_by_the_time_it_is_read_stops_nothing(tmp_path):
    folder = Folder(filled(tmp_path))
    for path in list(folder.sizes)[1:6]:
        (tmp_path / path).unlink()
    model = DemoModel(folder, STEPS, WINDOW)
    assert run_demo(folder, model, open_store("memory://"), "demo", lambda step: None).is_right


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is closed to this user")
def test_a_file_that_may_not_be_read_is_not_listed(tmp_path):
    (tmp_path / "closed.txt").write_text("x")
    (tmp_path / "closed.txt").chmod(0)
    assert not Folder(tmp_path).sizes


def test_a_folder_with_too_little_to_read_gives_way_to_the_library(tmp_path):
    assert choose_folder(tmp_path, WINDOW)[0].root == Path(OWN)
    assert "has no text" in choose_folder(tmp_path, WINDOW)[1]
    folder, why = choose_folder(filled(tmp_path), WINDOW)
    assert (folder.root, why) == (tmp_path, "")


# The command


def test_a_pipe_gets_a_line_for_each_step_and_nothing_that_moves(tmp_path):
    url = f"sqlite:///{tmp_path}/demo.db"
    result = demo(filled(tmp_path / "f"), "--steps", 20, "--window", WINDOW, "--store", url)
    assert "\x1b" not in result.output
    assert "\r" not in result.output
    numbers = [int(n) for n in re.findall(r"^ *(\d+)  \S", result.stdout, re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert len(numbers) > 20
    for word in ("recorded", "sent", "without", "saved", "asked", "answer", "exact", "refold serve"):
        assert word in result.stdout


def test_json_is_one_document_and_its_store_can_be_looked_into(tmp_path):
    url = f"sqlite:///{tmp_path}/demo.db"
    result = demo(filled(tmp_path / "f"), "--steps", 20, "--window", WINDOW, "--store", url, "--json")
    told = json.loads(result.stdout)
    assert told["store"] == url
    assert told["is_right"]
    looked = CliRunner().invoke(app, ["show", told["conversation"], "--store", url, "--json"])
    assert looked.exit_code == 0
    assert max(step["sent"] for step in told["steps"]) < WINDOW < told["steps"][-1]["recorded"]


def test_a_store_that_is_named_keeps_what_is_in_it(tmp_path):
    url, options = f"sqlite:///{tmp_path}/demo.db", ("--steps", 10, "--window", WINDOW, "--json")
    root = filled(tmp_path / "f")
    first, second = (json.loads(demo(root, "--store", url, *options).stdout) for _ in range(2))
    assert (first["conversation"], second["conversation"]) == ("demo", "demo-2")
    calls = [[(step["tool"], step["argument"]) for step in one["steps"]] for one in (first, second)]
    assert calls[0] == calls[1]  # the second knows the model's counts from the first


def test_the_folder_is_only_read(tmp_path):
    def state():
        found = sorted(path for path in tmp_path.rglob("*"))
        return [(path, path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in found]

    before = [filled(tmp_path), state()][1]
    demo(tmp_path, "--steps", 10, "--window", WINDOW, "--store", "memory://")
    assert state() == before


def test_an_empty_folder_is_said_to_be_so_and_the_library_is_read(tmp_path):
    result = demo(tmp_path, "--steps", 10, "--store", "memory://")
    assert "refold's own source is read instead" in result.stdout
    assert "read_file __init__.py" in result.stdout


def test_without_a_store_it_is_in_a_file_of_its_own_that_only_its_user_can_read(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    demo(tmp_path / "nowhere", code=1)
    assert not any(temporary.iterdir())  # what came to nothing leaves nothing
    told = json.loads(demo(tmp_path, "--steps", 10, "--json").stdout)
    (folder,) = temporary.iterdir()
    assert told["store"] == f"sqlite:///{folder.as_posix()}/demo.db"
    assert os.name == "nt" or folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("options", [("--steps", 0), ("--window", 100), ("--store", "demo.db")])
def test_what_cannot_be_is_wrong_use(tmp_path, options):
    demo(tmp_path, *options, code=2)


COMMAND = [sys.executable, "-m", "refold", "demo", "--steps", "10", "--window", f"{WINDOW}"]


@pytest.mark.skipif(os.name == "nt", reason="there is no such terminal")
def test_a_terminal_gets_lines_that_fit_its_width(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    options = [str(filled(tmp_path)), "--store", "memory://", "--no-panel"]
    with subprocess.Popen([*COMMAND, *options], stdout=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while piece := _piece(ours):
            seen += piece
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert max(len(line) for line in text.splitlines() if re.match(" *\\d+  ", line)) <= 100
    for word in ("█", "of 4,000", "exact"):
        assert word in text


def _piece(terminal):
    try:
        return os.read(terminal, 65_536)
    except OSError:  # so Linux says that nobody writes to it any more
        return b""


@pytest.mark.skipif(os.name == "nt", reason="there is no such signal")
def test_the_panel_is_opened_at_the_conversation_until_it_is_interrupted(tmp_path):
    pytest.importorskip("uvicorn", reason="the service is not installed")
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    environment = {**os.environ, "BROWSER": str(browser)}
    url = f"sqlite:///{tmp_path}/demo.db"
    options = [str(filled(tmp_path / "f")), "--store", url, "--panel"]
    with subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        page = next(line for line in process.stdout if line.startswith("The panel:")).split()[-1]
        address, _, place = page.partition("/panel")
        assert place == "#/c/demo"
        with urllib.request.urlopen(f"{address}/panel", timeout=WAIT_S) as answer:
            assert b"<title>" in answer.read()
        until(opened.exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert opened.read_text().strip() == page


def test_without_the_service_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['uvicorn'] = None; from refold.cli import main; main()"
    url = f"sqlite:///{tmp_path}/demo.db"
    options = ["demo", str(filled(tmp_path / "f")), "--steps", "10", "--store", url, "--panel"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=10 * WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert 'pip install "refold[serve]"' in done.stdout


def test_it_needs_nothing_but_what_refold_itself_needs(tmp_path):
    """No pytest, no SDK, no service: as on a machine where nothing else was installed."""
    extras = (
        "pytest",
        "hypothesis",
        "openai",
        "anthropic",
        "starlette",
        "uvicorn",
        "aiohttp",
        "psycopg",
        "redis",
    )
    program = f"import sys; sys.modules.update(dict.fromkeys({extras})); from refold.cli import main; main()"
    command = [sys.executable, "-c", program, "demo", "--no-panel", "--steps", "20"]
    done = subprocess.run(command, cwd=filled(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "none lost" in done.stdout
