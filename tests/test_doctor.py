"""Whatever is changed behind refold's back is found, named, and told without a traceback."""

import json
from pathlib import Path
from urllib.parse import quote

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

import refold
from mem0_stub import Mem0Stub
from refold.cli import app
from refold.core import codec
from refold.core.codec import GENESIS, Entry, chain
from refold.core.event import Said
from refold.session.doctor import LACKS, check, examine, missing_features
from refold.stores import store as protocols
from refold.stores.memory import MemoryStore
from refold.stores.record import seal
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import Key
from servers import Valkey
from strategies import streams

SMALL = {"models": {"m": {"window": 1_000, "max_output": 200}}}
KEY = Key("default", "task-42")
FIVE = "place & 0xffffffff = 5"


@pytest.fixture
def file(tmp_path):
    """A store with a compacted conversation of 40 and more events, and another one."""
    url = f"sqlite:///{tmp_path}/chats.db"
    with refold.open("other", store=url) as other:
        other.append({"role": "user", "content": "hello"}, id="hello-1")
    with refold.open("task-42", store=url, model="m", config=SMALL) as chat:
        chat.append({"role": "user", "content": "Which files are large?"}, id="first")
        for n in range(18):
            function = {"name": "ls", "arguments": "{}"}
            calls = [{"id": f"c{n}", "type": "function", "function": function}]
            chat.append({"role": "assistant", "content": None, "tool_calls": calls}, id=f"ask-{n}")
            chat.append({"role": "tool", "tool_call_id": f"c{n}", "content": f"file{n} " * 20})
            chat.fit()
        chat.pin(2)
        undone = chat.undo()
        chat.undo(undone)
    return tmp_path / "chats.db"


def change(file, *statements):
    connection = apsw.Connection(str(file))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def find(file, code=1):
    """What `refold doctor` finds, through the command line."""
    args = ["doctor", "--store", f"sqlite:///{file}"]
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == code, result.output
    told = CliRunner().invoke(app, args)
    assert told.exit_code == code
    assert "Traceback" not in told.output + result.output
    report = json.loads(result.stdout)
    assert report["healthy"] == (code == 0)
    return report["findings"]


def test_a_healthy_store_has_no_findings(file):
    refold.open("task-42", store=f"sqlite:///{file}").fork("branch", at=20)
    assert find(file, code=0) == []
    out = CliRunner().invoke(app, ["doctor", "--store", f"sqlite:///{file}"], env={"COLUMNS": "100"}).stdout
    assert f"refold {refold.__version__} · format {codec.FORMAT}" in out
    assert "SQLite 3." in out
    assert "3 conversations" in out
    assert "No problems" in out


@settings(max_examples=200, deadline=None)
@given(streams(max_size=30))
def test_no_stream_that_refold_can_write_has_a_flaw(events):
    store = MemoryStore()
    kept = [event for event in events if not (isinstance(event, Said) and len(event.message.results) > 1)]
    if kept == events and events:
        store.append(KEY, [codec.encode(event) for event in events])
        with refold.open("task-42", store=store) as session:
            session.record.save()
        assert check(store, KEY) == []


# One thing changed: (statement, places that are named, a word of what is told)
CHANGES = {
    "words": (
        f"UPDATE refold_entry SET body = replace(body, '1', '2') WHERE {FIVE}",
        {5},
        "not what was written",
    ),
    "id": (f"UPDATE refold_entry SET id = x'66' WHERE {FIVE}", {5}, "not what was written"),
    "no id": (f"UPDATE refold_entry SET id = NULL WHERE {FIVE}", {5}, "not what was written"),
    "head": (f"UPDATE refold_entry SET head = replace(head, '[', ' [') WHERE {FIVE}", {5}, "not what was"),
    "tokens": (f"UPDATE refold_entry SET head = replace(head, ',1', ',2') WHERE {FIVE}", {5}, "not what was"),
    "kind": (f"UPDATE refold_entry SET kind = 'dreamt' WHERE {FIVE}", {5}, "not what was written"),
    "digest": (f"UPDATE refold_entry SET digest = zeroblob(16) WHERE {FIVE}", {5}, "not what was written"),
    "packing": (f"UPDATE refold_entry SET body = x'78ff' WHERE {FIVE}", {5}, "cannot be read"),
    "UTF-8": (f"UPDATE refold_entry SET id = x'ff' WHERE {FIVE}", {5}, "cannot be read"),
    "JSON": (f"UPDATE refold_entry SET body = x'7bff' WHERE {FIVE}", {5}, "cannot be understood"),
    "head JSON": (f"UPDATE refold_entry SET head = x'7bff' WHERE {FIVE}", {5}, "cannot be understood"),
    "head shape": (f"UPDATE refold_entry SET head = x'7b7d' WHERE {FIVE}", {5}, "cannot be understood"),
    "no words": (f"UPDATE refold_entry SET body = x'' WHERE {FIVE}", {5}, "cannot be understood"),
    "a number for words": (f"UPDATE refold_entry SET body = 7 WHERE {FIVE}", {5}, ""),
    "text for words": (f"UPDATE refold_entry SET body = 'x' WHERE {FIVE}", {5}, ""),
    "a number for a digest": (f"UPDATE refold_entry SET digest = 7 WHERE {FIVE}", {5}, ""),
    "gone": (f"DELETE FROM refold_entry WHERE {FIVE}", {5}, "missing: #5"),
    "all before gone": (
        "DELETE FROM refold_entry WHERE place & 0xffffffff < 5 AND place >> 32 = 2",
        {0},
        "#0 to",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_event_is_found_where_it_is(file, name):
    statement, places, told = CHANGES[name]
    change(file, statement)
    found = [one for one in find(file) if one["at"] is not None]
    assert {one["at"] for one in found} == places
    assert {one["conversation"] for one in found} == {"task-42"}
    assert told in found[0]["problem"]
    assert "backup" in found[0]["advice"]


def test_two_events_in_each_others_place_are_found(file):
    cid = (2 << 32) + 0
    change(
        file,
        f"UPDATE refold_entry SET place = {cid + 999} WHERE place = {cid + 5}",
        f"UPDATE refold_entry SET place = {cid + 5} WHERE place = {cid + 7}",
        f"UPDATE refold_entry SET place = {cid + 7} WHERE place = {cid + 999}",
    )
    assert {5, 7} <= {one["at"] for one in find(file)} <= {5, 6, 7, 8}


def test_the_end_that_is_missing_is_found_by_the_snapshot(file):
    change(file, "DELETE FROM refold_entry WHERE place & 0xffffffff > 30")
    (found,) = find(file)
    assert "the newest events are missing" in found["problem"]


def test_every_damaged_event_is_named_and_the_first_twenty_in_a_row_are_enough(file):
    change(file, "UPDATE refold_entry SET body = x'78ff' WHERE place & 0xffffffff IN (3, 9, 10)")
    assert {one["at"] for one in find(file)} == {3, 9, 10}
    change(file, "UPDATE refold_entry SET body = x'78ff'")
    assert {one["at"] for one in find(file)} == set(range(20))


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (lambda snapshot: snapshot._replace(digest=bytes(16)), "was altered"),
        (lambda snapshot: snapshot._replace(at=snapshot.at - 1), "was altered"),
        (lambda snapshot: snapshot._replace(at=snapshot.at + 1), "events are missing, or the snapshot"),
        (lambda snapshot: snapshot._replace(body=b"[]"), "was altered"),
    ],
)
def test_a_changed_snapshot_is_found_and_is_only_a_cache(file, alter, told):
    store = SQLiteStore(file)
    store.save(KEY, "main", alter(store.saved(KEY)["main"]))
    store.close()
    (found,) = find(file)
    assert (found["conversation"], found["at"]) == ("task-42", None)
    assert "snapshot" in found["problem"]
    assert told in found["problem"]


@pytest.mark.parametrize("damage", ["value = x'78ff'", "value = x''", "name = x'763aff'"])
def test_a_snapshot_that_cannot_be_read_is_found_and_is_only_a_cache(file, damage):
    hex_name = b"task-42".hex()
    change(
        file,
        f"UPDATE refold_shelf SET {damage} WHERE hex(name) LIKE '763A%' AND hex(scope) LIKE '%{hex_name}'",
    )
    (found,) = find(file)
    assert (found["conversation"], found["at"]) == ("task-42", None)
    assert "a snapshot cannot be read" in found["problem"]


def test_a_snapshot_that_is_sealed_and_wrong_is_found(file):
    store = SQLiteStore(file)
    (snapshot,) = store.saved(KEY).values()
    state = msgspec.json.decode(snapshot.body)
    state[4] += 1  # tokens said
    body = msgspec.json.encode(state)
    last = list(store.read(KEY))[-1].digest
    store.save(KEY, "main", snapshot._replace(body=body, digest=seal(last, body)))
    store.close()
    (found,) = find(file)
    assert "not what the events add up to" in found["problem"]


def test_damage_after_a_snapshot_leaves_the_snapshot_intact(file):
    store = SQLiteStore(file)
    (snapshot,) = store.saved(KEY).values()
    store.close()
    with refold.open("task-42", store=f"sqlite:///{file}") as chat:
        chat.append({"role": "user", "content": "And now?"})
    store = SQLiteStore(file)
    store.save(KEY, "main", snapshot)  # closing has written a newer one
    store.close()
    change(file, f"UPDATE refold_entry SET head = x'7bff' WHERE place = {(2 << 32) + snapshot.at}")
    assert [one["at"] for one in find(file)] == [snapshot.at]


def test_a_snapshot_of_another_version_is_no_flaw(file):
    store = SQLiteStore(file)
    (snapshot,) = store.saved(KEY).values()
    last = list(store.read(KEY))[-1].digest
    store.save(KEY, "main", snapshot._replace(body=b'{"v":2}', digest=seal(last, b'{"v":2}')))
    store.close()
    assert find(file, code=0) == []


@pytest.mark.parametrize(
    ("place", "told"),
    [(0, "role"), (2, "index"), (3, "turn"), (4, "step"), (5, "total"), (6, "calls"), (7, "answers")],
)
def test_numbers_that_are_chained_and_wrong_are_found(place, told):
    store = MemoryStore()
    with refold.open("task-42", store=store) as chat:
        chat.append([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi."}])
        chat.append({"role": "user", "content": "more"})
    entries = [link.entry for link in store.read(KEY)]
    head = msgspec.json.decode(entries[1].head)
    head[place] = {"role": "system", "calls": ["c"], "answers": "c"}.get(told, 99)
    forged = [entries[0], entries[1]._replace(head=msgspec.json.encode(head)), entries[2]]
    again = MemoryStore()
    again.append(KEY, forged)
    found = examine(again)
    assert found[0].at == 1
    assert told in found[0].problem


def test_events_of_kinds_to_come_are_no_flaw():
    store = MemoryStore()
    store.append(KEY, [Entry(0, "dreamt", None, b"[1]", b'{"of":"sheep"}')])
    assert examine(store) == []


def test_a_conversation_that_was_given_another_name_is_found(file):
    change(file, "UPDATE refold_conversation SET name = x'66' WHERE cid = 2")
    assert any("row was altered" in one["problem"] for one in find(file))


def test_a_name_that_is_no_text_does_not_stop_the_examination(file):
    change(file, "UPDATE refold_conversation SET name = x'ff' WHERE cid = 2")
    assert find(file)


def test_entries_of_nobody_are_found(file):
    change(file, "UPDATE refold_entry SET place = place + (7 << 32) WHERE place >> 32 = 2")
    assert find(file)


def test_noise_in_any_page_of_the_file_never_ends_in_a_traceback(file):
    whole, damaged = file.read_bytes(), 0
    for start in range(4096, len(whole), 4096):
        file.write_bytes(whole[: start + 8] + b"\x5a" * 4088 + whole[start + 4096 :])
        for args in (["doctor"], ["list"], ["show", "task-42"], ["log", "task-42"], ["export", "task-42"]):
            result = CliRunner().invoke(app, [*args, "--store", f"sqlite:///{file}"])
            assert isinstance(result.exception, SystemExit | None), args
            damaged += args == ["doctor"] and result.exit_code == 1
    assert damaged > 5  # some pages are empty


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough" * 100, b"SQLite format 3\x00" + b"\xff" * 5000]
)
def test_a_file_that_is_no_database_is_told_as_such(tmp_path, content):
    (tmp_path / "chats.db").write_bytes(content)
    (found,) = find(tmp_path / "chats.db")
    assert "damaged or not a SQLite database" in found["problem"]
    assert found["conversation"] is None


def test_one_conversation_can_be_examined_alone(file):
    change(file, f"UPDATE refold_entry SET body = x'78ff' WHERE {FIVE}")
    for id, code in (("other", 0), ("task-42", 1), ("nope", 1)):
        result = CliRunner().invoke(app, ["doctor", id, "--store", f"sqlite:///{file}"])
        assert result.exit_code == code
    result = CliRunner().invoke(app, ["doctor", "--owner", "alice", "--store", f"sqlite:///{file}", "--json"])
    assert json.loads(result.stdout)["conversations"] == 0


def test_leases_that_are_held_are_shown(file):
    import time

    store = SQLiteStore(file)
    store.acquire(KEY, "compaction:main", "worker-7", time.time(), 3_600)
    store.close()
    result = CliRunner().invoke(app, ["doctor", "--store", f"sqlite:///{file}", "--json"])
    assert result.exit_code == 0
    (lease,) = json.loads(result.stdout)["leases"]
    assert (lease["conversation"], lease["name"], lease["holder"]) == (
        "task-42",
        "compaction:main",
        "worker-7",
    )
    assert "worker-7" in CliRunner().invoke(app, ["doctor", "--store", f"sqlite:///{file}"]).stdout


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The URL of a record with a memory beside it, which refuses one message."""
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    with Mem0Stub() as stub:
        stub.refuses = lambda text: "poison" in text
        record = quote(f"sqlite:///{tmp_path}/record.db", safe="")
        url = f"mem0://alice?host={stub.host}&key={stub.key}&record={record}"
        with refold.open("chat", store=url, model="gpt-5") as chat:
            chat.append([{"role": "user", "content": text} for text in ("one", "poison", "three")])
            assert chat.store.drain(chat.key)
        yield url


def test_what_a_memory_refused_is_told_as_that_with_how_to_hand_it_in_again(memory):
    found = CliRunner().invoke(app, ["doctor", "--store", memory, "--json"])
    (finding,) = json.loads(found.stdout)["findings"]
    assert "#1: mem0 " in finding["problem"]
    assert "refused it" in finding["problem"]
    assert "refold sync --refused" in finding["advice"]
    assert "backup" not in finding["advice"]


def test_sync_tells_each_time_what_was_refused_and_how_to_hand_it_in_again(memory):
    told = CliRunner().invoke(app, ["sync", "--store", memory])
    assert told.stdout == (
        "0 conversations delivered, 0 left, 1 message refused; to retry: `refold sync --refused`\n"
    )
    assert "chat #1 was refused and is skipped: " in told.stderr
    found = json.loads(CliRunner().invoke(app, ["sync", "--store", memory, "--json"]).stdout)
    assert [(one["conversation"], one["at"]) for one in found["refused"]] == [("chat", 1)]


def test_a_note_of_refusals_that_was_altered_keeps_sync_from_nothing_and_is_told(memory, tmp_path):
    change(
        tmp_path / "record.db",
        "UPDATE refold_shelf SET value = x'7b' WHERE CAST(name AS TEXT) LIKE 'refused%'",
    )
    for args in (["sync"], ["sync", "--refused"]):
        told = CliRunner().invoke(app, [*args, "--store", memory])
        assert (told.exit_code, told.stdout) == (1, "0 conversations delivered, 1 left\n")
        assert "The note of refused messages of 'chat' cannot be read" in told.stderr


def test_settings_of_a_server_that_lose_data_are_told_with_what_they_should_be(tmp_path):
    server = Valkey(tmp_path / "valkey").start()
    try:
        found = CliRunner().invoke(app, ["doctor", "--store", server.url, "--json"])
    finally:
        server.stop()
    (finding,) = json.loads(found.stdout)["findings"]
    assert "appendonly is off" in finding["problem"]
    assert finding["advice"] == "set it to yes"


def test_what_a_store_cannot_do_and_does_without_is_shown(file, monkeypatch):
    args = ["doctor", "--store", f"sqlite:///{file}"]
    monkeypatch.setattr(SQLiteStore, "cannot", {"order": "it has none"}, raising=False)
    report = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert report["cannot"] == {"order": "it has none"}
    assert list(report["without"]) == ["waiting for new entries", "memories"]
    shown = CliRunner().invoke(app, args).stdout.splitlines()
    assert "without order: it has none" in shown
    assert "without waiting for new entries: followers of events poll ten times a second" in shown


def test_the_doctor_knows_what_it_means_to_be_without_any_protocol():
    class Bare:
        append = read = find = erase = conversations = close = None

    internal = {"Store", "Memorizer", "MessageListener", "SessionHooks"}
    known = {name for name, one in vars(protocols).items() if getattr(one, "_is_protocol", False)}
    assert {protocol.__name__ for protocol in LACKS} == known - internal - {"Protocol"} | {"Shelf"}
    assert missing_features(Bare()) == dict(LACKS.values())


def test_what_was_changed_is_named_in_words(file):
    change(file, f"UPDATE refold_entry SET body = replace(body, '1', '2') WHERE {FIVE}")
    out = CliRunner().invoke(app, ["doctor", "--store", f"sqlite:///{file}"], env={"COLUMNS": "100"}).stdout
    assert "✗  task-42 #5: is not what was written" in out
    assert "restore it from a backup or an export" in out
    assert out.endswith("1 problem\n")


def test_the_examination_changes_nothing(file):
    before = {path.name: path.read_bytes() for path in Path(file.parent).iterdir()}
    find(file, code=0)
    assert {path.name: path.read_bytes() for path in Path(file.parent).iterdir()} == before


def test_the_chain_is_what_the_format_says(file):
    digest = GENESIS
    store = SQLiteStore(file)
    for entry, stored in store.read(KEY):
        digest = chain(digest, entry)
        assert digest == stored
    store.close()


def test_a_fork_whose_parent_is_lost_hides_no_other_conversation(tmp_path):
    path = tmp_path / "forks.db"
    with refold.open("parent", store=f"sqlite:///{path}") as parent:
        parent.append([{"role": "user", "content": text} for text in ("one", "two")])
        parent.fork("child", at=0).close()
    database = apsw.Connection(str(path))
    database.execute("UPDATE refold_conversation SET parent = 99 WHERE parent IS NOT NULL")
    database.close()
    store = SQLiteStore(path)
    assert {row.key.conversation for row in store.conversations()} == {"parent", "child"}
    found = examine(store)
    store.close()
    assert any("child" in finding.problem for finding in found)
    assert not any(finding.conversation == "parent" for finding in found)
