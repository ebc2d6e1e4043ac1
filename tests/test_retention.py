"""The measure of what is lost, measured: on a conversation whose losses are known."""

import json
import random
from pathlib import Path

import pytest

from refold.cli.bench.recorded import load
from refold.cli.bench.replay import Arm, Run, replay
from refold.cli.bench.retention import failed_controls
from refold.cli.bench.trace import Trace, counted, extracted, has_key_near, key_of, text_of
from refold.core.errors import NotFoundError

CODES = ("QX7-4411", "QX7-9032")
"""What the first and the last result say, and later calls need."""


@pytest.fixture
def data(tmp_path):
    """A conversation of about 7,000 tokens whose values stand far from their use, and near."""
    for folder, line in (("traces", conversation()), *(("probes", probe) for probe in probes())):
        (tmp_path / folder).mkdir(exist_ok=True)
        with (tmp_path / folder / "made.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return tmp_path


@pytest.fixture
def trace(data):
    (trace,) = load(data, least=1_000)
    return trace


def conversation() -> dict:
    chance = random.Random(7)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Cancel my bookings."},
    ]
    for n in range(20):
        noise = " ".join(str(chance.randrange(10**6)) for _ in range(100))
        said = {0: CODES[0], 19: CODES[1]}.get(n, "nothing")
        messages += called(f"c{n}", {"page": n}, f"{noise} {said}", x_stop_reason="toolUse")
    messages += called("far", {"code": f"{CODES[0]}\n"}, "done") + called("near", {"code": CODES[1]}, "done")
    return {"id": "made/1", "source": "made", "format": "openai", "messages": messages}


def called(id: str, arguments: dict, result: str, **extra: str) -> list[dict]:
    call = {"id": id, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], **extra}
    return [asked, {"role": "tool", "tool_call_id": id, "content": result}]


def probes() -> list[dict]:
    places = {CODES[0]: (3, 42), CODES[1]: (41, 44), "never said": (3, 42)}
    return [
        {"conversation": "made/1", "value": value, "kind": "id", "first": at, "last": at, "use_at": use}
        for value, (at, use) in places.items()
    ]


def test_what_is_loaded_can_be_sent_and_has_only_probes_that_can_be_found(trace):
    assert not any(key.startswith("x_") for message in trace.messages for key in message)
    assert [probe.value for probe in trace.probes] == [*CODES]
    assert trace.dropped == 1


def test_small_conversations_are_left_out(data):
    with pytest.raises(NotFoundError, match="--least"):
        load(data)


def test_keeping_everything_loses_nothing_and_saves_nothing(trace):
    run = replay(trace, Arm("everything"))
    assert (run.numbers["calls"], run.numbers["lost"], run.numbers["saved"]) == (22, 0, 0)
    assert run.share("kept", "prior") == 1
    assert run.broken.total() == 0


def test_keeping_nothing_loses_all(trace):
    run = replay(trace, Arm("nothing"))
    assert run.lost == [*trace.probes]
    assert run.share("saved", "full") > 0.9


def test_a_value_that_is_cut_is_lost_and_one_that_is_shown_is_not(trace):
    run = replay(trace, Arm("newest"), budget=3_000)
    assert [probe.value for probe in run.lost] == [CODES[0]]
    assert run.numbers["batches"] > 0
    assert 0 < run.share("saved", "full") < 1
    assert run.share("kept", "prior") < 1


def test_what_is_refused_is_lost_and_nothing_is_sent(trace):
    run = replay(trace, Arm("newest"), budget=30)
    assert run.lost == [*trace.probes]
    assert run.numbers["refused"] > 0
    assert run.numbers["refused_full"] <= run.numbers["saved"]


def test_values_are_found_in_the_arguments_of_calls_however_they_are_written():
    (asked, _) = called("c", {"path": "C:\\Temp\\ü", "note": 'a "quoted" one'}, "done")
    for value in ("C:\\Temp\\ü", 'a "quoted" one', "look", '"tool_calls":['):
        assert value in text_of(asked)


def test_what_is_lost_from_view_can_be_had_by_one_expansion_and_by_a_search(trace):
    run = replay(trace, Arm("newest"), budget=3_000)
    assert [run.numbers[name] for name in ("lost", "expandable", "searchable")] == [1, 1, 1]
    nothing = replay(trace, Arm("nothing"))
    assert [nothing.numbers[name] for name in ("lost", "expandable", "searchable")] == [2, 0, 2]


def test_expanded_answers_that_were_put_away_are_not_unreachable(trace):
    asked, _ = called("own", {"at": 3}, "")
    asked["tool_calls"][0]["function"]["name"] = "refold_expand"
    answer = f"[refold #3 tool look: lines 1-1 of 1]\n{trace.messages[3]['content']}"
    looked_up = [asked, {"role": "tool", "tool_call_id": "own", "content": answer}]
    messages = [*trace.messages[:12], *looked_up, *trace.messages[12:]]
    whole = Trace(trace.source, messages, counted(messages))
    run = replay(whole, Arm("refold"), budget=3_000)
    assert run.numbers["hidden"] > 0
    assert run.broken["unreachable"] == 0


def test_losses_are_told_by_the_compactions_before_them(trace):
    run = replay(trace, Arm("newest"), budget=3_000)
    after = {name: count for name, count in run.numbers.items() if " after " in name and count}
    assert sum(count for name, count in after.items() if name.startswith("probes")) == 2
    (lost,) = (name for name in after if name.startswith("lost"))
    assert lost != "lost after 0"


def test_controls_that_do_not_behave_are_told(trace):
    rows = [replay(trace, Arm(name)) for name in ("everything", "nothing")]
    for row in rows:
        row.source = "total"
    assert not list(failed_controls(rows))
    rows[0].numbers["lost"] += 1
    rows[1].numbers["lost"] -= 1
    assert list(failed_controls(rows)) == [
        "keeping everything loses 1 of 2 values",
        "keeping nothing loses 1 of 2 values",
    ]


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"user": {"id": "QX7-4411"}}', "id"),
        ('{"codes": ["QX7-0000", "QX7-4411"]}', "codes"),
        ('{"output": "seat: 4A\\nbooking: QX7-4411"}', "booking"),
        ("level=info booking=QX7-4411 state=open", "booking"),
        ("**Booking:** QX7-4411", "Booking"),
        ("It is QX7-4411 then.", ""),
        ('{"QX7-4411": "open"}', ""),
        ("nothing of the kind", ""),
    ],
)
def test_the_key_of_a_value_is_what_stands_beside_it(content, key):
    assert key_of({"role": "tool", "content": content}, CODES[0]) == key


@pytest.mark.parametrize(
    ("text", "is_near"),
    [
        ('{"order_id":"QX7-4411"}', True),
        ("Order ID: QX7-4411", True),
        ("order_id=QX7-0000 " + "QX7-0001 " * 60 + "QX7-4411", True),  # a key begins a line of values
        ("order_id=QX7-0000\n" + "QX7-0001 " * 60 + "QX7-4411", False),
        ("my_order_ids: QX7-4411", False),
        ("order_id", False),
    ],
)
def test_a_key_is_kept_where_it_stands_near_its_value(text, is_near):
    assert has_key_near(text, CODES[0], "order_id") is is_near


def test_needed_values_are_those_of_results_that_later_calls_have():
    messages = [
        {"role": "user", "content": "Look at USER-1."},
        *called("a", {"id": "USER-1", "page": "OWN-7"}, "ORD-1: USER-1 OWN-7 ORD-2 near"),
        *called("b", {"id": "ORD-1"}, "nothing"),
        *called("c", {"ids": ["ORD-1", "ORD-2", "USER-1", "OWN-7"], "what": "near"}, "nothing"),
        *called("d", {"command": "cancel --order=ORD-2 'ORD-1'"}, "nothing"),
    ]
    found = [(probe.value, probe.first, probe.last, probe.use_at) for probe in extracted(messages)]
    assert found == [("ORD-2", 2, 2, 5), ("ORD-1", 2, 3, 5)] or found == [
        ("ORD-1", 2, 3, 5),
        ("ORD-2", 2, 2, 5),
    ]


def test_the_numbers_of_several_runs_add_up(trace):
    one, other = replay(trace, Arm("nothing")), replay(trace, Arm("everything"))
    one.add(other)
    assert (one.numbers["conversations"], one.numbers["probes"], one.numbers["lost"]) == (2, 4, 2)


DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason="the recorded conversations are not here")
@pytest.mark.parametrize(("percent", "lost", "saved"), [(50, 0.01, 0.35), (25, 0.03, 0.60), (10, 0.10, 0.75)])
def test_recorded_conversations_keep_what_they_needed_later(percent, lost, saved):
    whole = Run(Arm("refold", percent), "total")
    for trace in load(DATA):
        whole.add(replay(trace, Arm("refold", percent)))
    assert whole.share("lost", "probes") <= lost
    assert whole.share("saved", "full") >= saved
    assert not +whole.broken  # all valid, all reachable, the task and the latest there, prefixes kept
    assert whole.numbers["hidden"] > 0
