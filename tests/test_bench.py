"""`refold bench` on stores, exports and histories, with configurations compared; and the maintainers' own."""

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import made, peers, plot
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.cli.bench import speed
from refold.cli.bench.recorded import load
from refold.cli.bench.replay import Arm, replay
from refold.cli.bench.retention import LOST, SAVED, arms_of
from refold.cli.bench.trace import extracted
from refold.core.errors import NotFoundError, SettingError

STEPS = (32,)


@pytest.fixture
def data(monkeypatch, tmp_path_factory):
    """A folder with the generated data set, of few conversations."""
    monkeypatch.setattr(made, "STEPS", STEPS)
    folder = tmp_path_factory.mktemp("made")
    made.write(folder)
    return folder


@pytest.fixture
def traces(data):
    return load(data)


def run(*arguments: object, code: int = 0):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def stored(trace, url: str, id: str) -> None:
    with refold.open(id, store=url, model="gpt-5") as chat:
        chat.append(list(trace.messages))


# The generated data set


def test_the_same_seed_makes_the_same_conversations_and_another_one_others(monkeypatch):
    monkeypatch.setattr(made, "STEPS", STEPS)
    one, same, other = ([trace.messages for trace in made.traces(seed)] for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_what_is_made_is_large_has_one_turn_or_many_and_errors_repeats_json_and_text(monkeypatch, tmp_path):
    monkeypatch.setattr(made, "STEPS", (96,))
    made.write(tmp_path)
    sets = load(tmp_path)
    assert {trace.source for trace in sets} == {"made, one turn", "made, many turns"}
    for trace in sets:
        users = [message for message in trace.messages if message["role"] == "user"]
        assert (len(users) == 1) is (trace.source == "made, one turn")
        results = [message["content"] for message in trace.messages if message["role"] == "tool"]
        assert any(text.startswith("Error ") for text in results)
        assert len(set(results)) < len(results)
        assert {text[0] in "[{" for text in results} == {True, False}
        assert max(map(len, results)) > 8_000
        assert trace.dropped == 0


def test_values_that_were_made_to_be_needed_are_those_that_are_found(traces):
    for trace in traces:
        known, found = {p.value for p in trace.probes}, {p.value for p in extracted(trace.messages)}
        assert len(known) > 20
        assert len(known & found) >= 0.95 * len(known)
        assert len(found - known) <= 0.05 * len(found)


# Where conversations come from


def test_an_export_a_history_and_a_database_are_replayed_alike(traces, tmp_path):
    trace, url = traces[0], f"sqlite:///{tmp_path}/agent.db"
    stored(trace, url, "chat")
    with refold.open("chat", store=url) as chat:
        (tmp_path / "export.jsonl").write_text("\n".join(chat.export()))
    (tmp_path / "history.json").write_text(json.dumps(trace.messages))
    lines = [json.dumps({"id": n, "messages": trace.messages}) for n in ("a", "b")]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    counts = {}
    for data in (url, tmp_path / "agent.db", tmp_path / "export.jsonl", tmp_path / "history.json"):
        (found,) = load(data)
        assert [message["role"] for message in found.messages] == [m["role"] for m in trace.messages]
        counts[str(data)] = [(p.value, p.key, p.first, p.use_at) for p in found.probes]
        assert replay(found, Arm("everything")).numbers["lost"] == 0
    assert len({json.dumps(one) for one in counts.values()}) == 1
    assert all(len(one) > 20 for one in counts.values())
    assert [found.id for found in load(tmp_path / "lines.jsonl")] == ["a", "b"]
    assert len(load(tmp_path)) == 4  # of a folder, all its exports and histories


def test_of_a_store_only_those_are_taken_that_are_named(traces, tmp_path):
    url = f"sqlite:///{tmp_path}/agent.db"
    for id, trace in zip(("one", "other"), traces, strict=True):
        stored(trace, url, id)
    arguments = (url, "--budget", 50, "--jobs", 1, "--no-controls", "--json")
    both = json.loads(run("retention", *arguments).stdout)
    one = json.loads(run("retention", *arguments, "--conversation", "one").stdout)
    assert [rows[-1]["numbers"]["conversations"] for rows in (both, one)] == [2, 1]
    missing = run("retention", url, "--conversation", "nobody", code=1)
    assert "nobody" in missing.stderr
    assert "other.db" in run("retention", f"sqlite:///{tmp_path}/other.db", code=1).stderr
    assert not (tmp_path / "other.db").exists()


def test_edits_that_were_made_of_a_conversation_are_left_out_of_its_replay(traces, tmp_path):
    url = f"sqlite:///{tmp_path}/agent.db"
    stored(traces[0], url, "chat")
    (before,) = load(url)
    with refold.open("chat", store=url, model="gpt-5") as chat:
        chat.compact(keep_recent=4)
    (after,) = load(url)
    assert after == before


def test_what_is_not_there_or_too_small_is_told(tmp_path):
    with pytest.raises(NotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"\.jsonl"):
        load(tmp_path)
    small = tmp_path / "small.json"
    small.write_text(json.dumps([{"role": "user", "content": "Hello."}]))
    told = run("retention", small, code=1)
    assert "--least" in told.stderr
    small.write_text("{")
    assert "small.json" in run("retention", small, code=1).stderr


def test_a_folder_with_traces_but_no_probes_gets_them_from_the_record(traces, tmp_path):
    (tmp_path / "traces").mkdir()
    line = {"id": "x", "source": "mine", "format": "openai", "messages": traces[0].messages}
    (tmp_path / "traces" / "mine.jsonl").write_text(json.dumps(line))
    (found,) = load(tmp_path)
    assert [p.value for p in found.probes] == [p.value for p in extracted(traces[0].messages)]


# What the command prints


def test_the_command_prints_tables_and_says_that_the_controls_hold(data):
    done = run("retention", data, "--budget", 25, "--jobs", 1)
    for text in (
        "refold 25 %",
        "newest 25 %",
        "everything",
        "nothing",
        "The controls hold",
        "after 4 or more",
    ):
        assert text in done.stdout


def test_all_numbers_and_the_lost_values_are_printed_as_json_and_can_be_drawn(data):
    rows = json.loads(run("retention", data, "--budget", 25, "--jobs", 1, "--json").stdout)
    totals = {row["arm"]["name"]: row for row in rows if row["source"] == "total"}
    assert (totals["everything"]["lost"], totals["nothing"]["lost"]) == (0, 1)
    assert 0 < totals["refold"]["lost"] < totals["least"]["lost"]
    assert len(totals["refold"]["lost_values"]) == totals["refold"]["numbers"]["lost"]
    picture = ElementTree.fromstring(plot.retention(rows))
    assert picture.tag.endswith("svg")
    assert "refold" in "".join(picture.itertext())


def test_markdown_is_for_documents(data):
    done = run("retention", data, "--budget", 50, "--jobs", 1, "--no-controls", "--markdown")
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 3 * 3 + 2  # three tables; the first has two sources more
    assert {row.count("|") for row in rows} == {14, 7}
    brief = run("retention", data, "--budget", 50, "--jobs", 1, "--no-controls", "--markdown", "--brief")
    assert len([line for line in brief.stdout.splitlines() if line.startswith("|")]) == 3


def test_no_probe_is_kept_apart_from_its_key_where_everything_is_shown(traces):
    run = replay(traces[0], Arm("everything"))
    assert run.numbers["keyed"] > 10
    assert (run.numbers["bare"], run.numbers["lost"]) == (0, 0)


# Configurations


@pytest.fixture
def policies(tmp_path):
    """One that does nothing, and one that hides results soon; both name a model that nobody may call."""
    off = tmp_path / "off.yaml"
    off.write_text("agents: {default: {compact: off}}")
    tight = tmp_path / "tight.yaml"
    tight.write_text(
        "models: {tiny: {window: 9000, max_output: 500}}\n"
        "agents: {default: {model: tiny, summarizer: {models: [openai/gpt-4o-mini]},"
        " compact: {system_reserve: 0, safety_buffer: 0, output_reserve: 500, strategy: sliding-window}}}"
    )
    return off, tight


def test_configurations_are_compared_with_the_default_in_their_own_windows(policies, data):
    files = ",".join(map(str, policies))
    rows = json.loads(
        run("retention", data, "--policy", files, "--jobs", 1, "--no-controls", "--json").stdout
    )
    totals = {row["arm"]["name"]: row for row in rows if row["source"] == "total"}
    assert list(totals) == ["default", "off", "tight"]
    assert [totals[name]["numbers"].get("batches", 0) for name in ("default", "off")] == [0, 0]
    assert totals["tight"]["saved"] > 0.2
    assert totals["tight"]["lost"] > totals["off"]["lost"] == 0


def test_configurations_are_compared_under_budgets_where_there_are_some(policies, traces):
    arms = arms_of("50", ",".join(map(str, policies)), None, None, own_windows=False)
    assert list(map(str, arms)) == ["default 50 %", "off 50 %", "tight 50 %"]
    default, off, tight = (replay(traces[0], arm) for arm in arms)
    same = replay(traces[0], Arm("refold", 50))
    assert default.numbers == same.numbers  # what refold does by itself
    assert off.numbers["saved"] <= 0 < tight.numbers["saved"]
    assert tight.numbers["lost"] >= default.numbers["lost"]


def test_an_agent_of_a_configuration_can_be_meant(policies):
    _, tight = policies
    tight.write_text(tight.read_text().replace("default:", "coder:"))
    arms = arms_of("50", str(tight), None, "coder", own_windows=True)
    assert arms[1].config(1).agent("coder").compaction.strategy == "sliding-window"
    assert arms[1].config(1).agent("coder").summarizer.models == ()


def test_what_is_wrong_with_a_configuration_or_a_budget_is_told_before_anything_is_replayed(tmp_path):
    (tmp_path / "bad.yaml").write_text("agents: {default: {compct: off}}")
    assert "compct" in run("retention", tmp_path, "--policy", tmp_path / "bad.yaml", code=2).stderr
    assert "nowhere.yaml" in run("retention", tmp_path, "--policy", "nowhere.yaml", code=2).stderr
    (tmp_path / "low.yaml").write_text("agents: {default: {compact: {max_tokens: 0}}}")
    assert (
        "max_tokens"
        in run("retention", tmp_path, "--policy", tmp_path / "low.yaml", "--no-controls", code=2).stderr
    )
    with pytest.raises(SettingError, match="fifty"):
        arms_of("fifty", None, None, None, own_windows=False)


# Pictures and the others


def test_a_picture_is_well_formed_whatever_its_names_are():
    points = [plot.Point("<a & b>", '"50" %', 0.5, 0.01), plot.Point("c", "", -0.01, 0.3)]
    drawn = ElementTree.fromstring(plot.scatter("Saved & <lost>", "x", "y", points))
    texts = [text for text in drawn.itertext() if text.strip()]
    assert "<a & b>" in texts
    assert ElementTree.fromstring(plot.scatter("none", "x", "y", []))


def test_speed_is_measured_as_ratios(monkeypatch):
    monkeypatch.setattr(speed, "STEPS_PER_SIZE", 3)
    assert "× floor" in run("speed", 20).stdout
    rows = json.loads(run("speed", 20, "--json").stdout)
    assert [row["messages"] for row in rows] == [20]
    assert "smallest is 2" in run("speed", 1, code=2).stderr


def test_a_peer_is_measured_beside_refold_on_the_same_messages(monkeypatch):
    taken = list[dict]()
    monkeypatch.setattr(peers, "STEPS", 6)
    monkeypatch.setattr(peers, "PEERS", {"list": peers.Peer("typer", "adds", lambda folder: taken.extend)})
    row = peers.measure("list", 10)
    assert (row.steps, row.messages, len(taken)) == (6, 10, 22)
    (cells,) = peers.table([row]).rows
    assert cells[0].startswith("list (typer ")


def test_benchmarks_are_loaded_when_they_are_used():
    loaded = "{name for name in sys.modules if name.startswith('refold.cli.bench.')}"
    program = f"import sys, refold.cli; sys.exit({loaded} != {{'refold.cli.bench.commands'}})"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    listed = run("--help").stdout
    assert "retention" in listed
    assert "speed" in listed


PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def test_what_the_page_prints_has_the_columns_that_the_commands_print():
    """Where they differ, `python scripts/benchmarks.py` puts it right."""
    places = re.findall(r"<!-- printed by: (.+?) -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    columns = {"bench retention": (SAVED, LOST), "bench speed": (speed.TITLES,), "peers.py": (peers.TITLES,)}
    told = {name: text for name in columns for command, text in places if name in command}
    for name, tables in columns.items():
        for titles in tables:
            assert f"| {' | '.join(titles)} |" in told[name]


def test_a_place_in_a_page_gets_what_its_command_prints(tmp_path, monkeypatch):
    path = Path(__file__).parents[1] / "scripts" / "benchmarks.py"
    spec = spec_from_file_location("benchmarks", path)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = tmp_path / "page.md"
    begin = "<!-- printed by: python -c 'print({})' -->\n"
    page.write_text(f"a\n{begin.format(6 * 7)}old\n<!-- end -->\nb {begin.format('1/0')}old\n<!-- end -->\n")
    monkeypatch.setattr(script, "PAGES", (page,))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main([]) == 1  # one of them fails, and keeps what it had
    assert page.read_text() == (
        f"a\n{begin.format(42)}\n42\n\n<!-- end -->\nb {begin.format('1/0')}old\n<!-- end -->\n"
    )
