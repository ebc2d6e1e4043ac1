"""A record and a memory: whatever becomes of the service, nothing waits for it and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from threading import Condition, Event, Thread
from urllib.parse import quote

import pytest

import refold
from refold.core.errors import MessageError, SettingError, StoreError
from refold.recall import spoken
from refold.session import parse
from refold.stores import hybrid
from refold.stores.hybrid import HybridStore, Refused
from refold.stores.memory import MemoryStore
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import (
    Attended,
    Cursors,
    Examined,
    Key,
    Leases,
    Listening,
    Memories,
    Memory,
    Notes,
    Searched,
    Spoken,
    open_store,
    shown_url,
)
from refold.testing import StoreContract
from refold.testing.agentcore import AgentCoreStub
from refold.testing.mem0 import Mem0Stub
from refold.testing.words import ODD

KEY = Key("default", "chat")


class Notebook:
    """A service that writes down what it is told, and can be made to fail."""

    def __init__(self, name: str = "notebook") -> None:
        self.name = name
        self.said: dict[Key, list[Spoken]] = {}
        self.calls: list[tuple[Key, int]] = []
        """How many messages each came with."""
        self.is_down = False
        self.refuses = ""
        self.gate: Event | None = None
        self.entered = Event()
        self.changed = Condition()

    def remember(self, key: Key, said: Sequence[Spoken], /) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        with self.changed:
            self.calls.append((key, len(said)))
            self.changed.notify_all()
            if self.is_down:
                raise StoreError("the service is down")
            if self.refuses and any(self.refuses in one.text for one in said):
                raise MessageError("message", f"has {self.refuses!r} in it")
            self.said.setdefault(key, []).extend(said)

    def memories(self, key, query, limit, namespace, /):
        return [Memory(str(one.at), one.text) for one in self.said.get(key, [])][:limit]

    def forget(self, key: Key, /) -> None:
        if self.is_down:
            raise StoreError("the service is down")
        self.said.pop(key, None)

    def close(self) -> None:
        pass

    def texts(self, key: Key = KEY) -> list[str]:
        return [one.text for one in self.said.get(key, [])]

    def until(self, so, timeout_s=10.0) -> bool:
        with self.changed:
            return self.changed.wait_for(so, timeout_s)


@pytest.fixture
def notebook():
    return Notebook()


def listening(store: HybridStore) -> HybridStore:
    store.listen(spoken(parse))
    return store


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def opened(store: HybridStore, id: str = "chat") -> refold.Session:
    return refold.open(
        id, store=store, model="gpt-5", config={"agents": {"default": {"counter": "estimate"}}}
    )


# The contract


def over_sqlite(path, host):
    record = quote(f"sqlite:///{path}", safe="")
    return open_store(f"mem0://?record={record}&host={quote(host)}&key={Mem0Stub.key}&recall=0")


class TestMem0OverSQLite(StoreContract):
    @pytest.fixture
    def reopen(self, tmp_path):
        with Mem0Stub() as stub:
            yield partial(over_sqlite, tmp_path / "refold.db", stub.host)

    @pytest.fixture
    def store(self, reopen):
        store = reopen()
        yield store
        store.close()


class TestHybridOverMemory(StoreContract):
    @pytest.fixture
    def store(self):
        store = HybridStore(MemoryStore(), Notebook())
        yield store
        store.close()


def test_it_can_do_what_its_record_can_and_has_memories(notebook):
    class Plain:
        """A record that has nothing but streams and cursors."""

        def __init__(self):
            inner = MemoryStore()
            for verb in (
                "append",
                "read",
                "erase",
                "conversations",
                "close",
                "cursor",
                "set_cursor",
                "behind",
            ):
                setattr(self, verb, getattr(inner, verb))

    rich, plain = HybridStore(MemoryStore(), notebook), HybridStore(Plain(), notebook)
    for protocol in (Leases, Notes, Searched):
        assert isinstance(rich, protocol)
        assert not isinstance(plain, protocol)
    for protocol in (Memories, Listening, Attended, Cursors):
        assert isinstance(rich, protocol)
        assert isinstance(plain, protocol)
    assert not isinstance(rich, Examined)
    chat = opened(plain)
    chat.append([user("one"), user("two")])
    chat.close()
    assert notebook.until(lambda: notebook.texts() == ["one", "two"])
    assert chat.clear() == []
    assert notebook.said == {}


def test_a_record_without_cursors_is_refused(notebook):
    class Bare:
        pass

    with pytest.raises(SettingError, match="Bare keeps no cursors"):
        HybridStore(Bare(), notebook)


# Handing over


def test_what_is_said_is_handed_over_in_order_and_once(notebook):
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    texts = [f"message {n}" for n in range(50)]
    for text in texts:
        chat.append(user(text))
    chat.close()
    store.close()
    assert notebook.texts() == texts
    assert [one.at for one in notebook.said[KEY]] == list(range(50))
    assert {one.role for one in notebook.said[KEY]} == {"user"}


def test_only_what_people_models_and_tools_said_is_handed_over(notebook):
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    call = {"id": "a", "type": "function", "function": {"name": "refold_expand", "arguments": '{"at": 1}'}}
    other = {"id": "b", "type": "function", "function": {"name": "psql", "arguments": "{}"}}
    chat.append({"role": "system", "content": "never handed over"})
    chat.append(user("a question"))
    chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
    chat.append({"role": "tool", "tool_call_id": "a", "content": "the original"})
    chat.append({"role": "assistant", "content": None, "tool_calls": [other]})
    chat.append({"role": "tool", "tool_call_id": "b", "content": "4711"})
    chat.append({"role": "assistant", "content": "an answer"})
    chat.pin(1)
    chat.compact(keep_recent=1)
    chat.close()
    store.close()
    assert notebook.texts() == ["a question", "psql {}", "4711", "an answer"]


def test_an_append_does_not_wait_for_a_slow_service(notebook):
    notebook.gate = Event()
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    chat.append(user("first"))
    assert notebook.entered.wait(10)
    for n in range(200):  # while the service has not answered the first
        chat.append(user(f"message {n}"))
    assert notebook.calls == []
    notebook.gate.set()
    assert notebook.until(lambda: len(notebook.texts()) == 201)
    assert len(notebook.calls) < 30  # what came meanwhile went in batches
    store.close()


def test_a_service_that_is_down_is_asked_again_and_then_has_all(notebook):
    notebook.is_down = True
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    for n in range(5):
        chat.append(user(f"message {n}"))
    assert notebook.until(lambda: len(notebook.calls) > 1)
    assert store.problem == "the service is down"
    assert [one.message.text for one in chat.get_all()] == [f"message {n}" for n in range(5)]
    notebook.is_down = False
    assert notebook.until(lambda: len(notebook.texts()) == 5)
    assert notebook.texts() == [f"message {n}" for n in range(5)]
    store.close()


def test_closing_does_not_wait_for_a_service_that_is_down_and_the_next_session_hands_over(notebook, tmp_path):
    notebook.is_down = True
    store = HybridStore(SQLiteStore(tmp_path / "a.db"), notebook)
    chat = opened(store)
    chat.append([user("one"), user("two")])
    assert notebook.until(lambda: notebook.calls)
    chat.close()
    store.close()
    notebook.is_down = False
    again = HybridStore(SQLiteStore(tmp_path / "a.db"), notebook)
    assert again.left() == [KEY]
    opened(again)
    assert notebook.until(lambda: notebook.texts() == ["one", "two"])
    again.close()
    assert HybridStore(SQLiteStore(tmp_path / "a.db"), notebook).left() == []


def test_a_refused_message_is_passed_over_alone_and_noted(notebook):
    notebook.refuses = "poison"
    store = HybridStore(MemoryStore(), notebook, sync="end")
    chat = opened(store)
    chat.append([user("one"), user("poison"), user("three"), user("poison again"), user("five")])
    chat.close()
    store.close()
    assert notebook.texts() == ["one", "three", "five"]
    assert [(one.at, "poison" in one.why) for one in store.refused(KEY)] == [(1, True), (3, True)]
    assert store.refused(Key("default", "another")) == []
    chat.clear()
    assert store.refused(KEY) == []


def test_the_doctor_is_told_of_what_was_refused(notebook, tmp_path):
    notebook.refuses = "poison"
    store = listening(HybridStore(SQLiteStore(tmp_path / "a.db"), notebook))
    chat = opened(store)
    chat.append(user("poison"))
    assert store.drain(KEY)
    assert store.refused(KEY) == [Refused(KEY, 0, "message: has 'poison' in it")]
    assert ["refused" in flaw.problem for flaw in store.examine()] == [True]
    store.close()


@pytest.mark.parametrize("sync", ["immediate", "batch", "end"])
def test_each_way_of_syncing_has_all_when_the_session_ends(notebook, sync):
    store = HybridStore(MemoryStore(), notebook, sync=sync, batch_size=3, batch_s=1e6)
    with opened(store) as chat:
        for n in range(7):
            chat.append(user(f"message {n}"))
        if sync == "end":
            assert notebook.calls == []
        if sync == "batch":
            assert notebook.until(lambda: len(notebook.texts()) >= 3)
    assert notebook.until(lambda: len(notebook.texts()) == 7)
    store.close()


def test_a_batch_goes_when_its_time_has_come(notebook):
    store = HybridStore(MemoryStore(), notebook, sync="batch", batch_size=1_000, batch_s=0.05)
    chat = opened(store)
    chat.append(user("one"))
    assert notebook.until(lambda: notebook.texts() == ["one"])
    store.close()


def test_at_the_end_of_a_store_what_no_session_ended_is_handed_over(notebook):
    store = HybridStore(MemoryStore(), notebook, sync="end")
    opened(store).append(user("one"))
    store.close()
    assert notebook.texts() == ["one"]


def test_two_memories_of_one_record_follow_it_each_by_itself():
    record, one, other = MemoryStore(), Notebook("one"), Notebook("other")
    other.is_down = True
    first, second = HybridStore(record, one), HybridStore(record, other)
    opened(first).append(user("hello"))
    assert one.until(lambda: one.texts() == ["hello"])
    opened(second).append(user("again"))
    other.is_down = False
    assert other.until(lambda: other.texts() == ["hello", "again"])
    first.close()
    second.close()


def test_what_another_process_is_handing_over_is_left_to_it(notebook, monkeypatch):
    monkeypatch.setattr(hybrid, "PATIENCE_S", 0.0)
    record = MemoryStore()
    mine, theirs = (listening(HybridStore(record, notebook)) for _ in range(2))
    opened(mine).append(user("one"))
    assert notebook.until(lambda: notebook.texts() == ["one"])
    with theirs._alone(KEY) as is_alone:
        assert is_alone
        with pytest.raises(StoreError, match="being handed over"):
            mine.erase(KEY)
        assert not mine.drain(KEY, 0.0)
    assert mine.drain(KEY)
    mine.erase(KEY)
    assert notebook.said == {}


def test_a_conversation_from_before_is_handed_over_from_its_beginning_once_it_goes_on(notebook):
    record = MemoryStore()
    opened(record).append([user("old"), user("older")])
    store = HybridStore(record, notebook)
    chat = opened(store)
    assert store.left() == []
    chat.append(user("new"))
    assert notebook.until(lambda: notebook.texts() == ["old", "older", "new"])
    store.close()


def test_a_fork_is_handed_over_from_where_it_goes_its_own_way(notebook):
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    chat.append([user("one"), user("two"), user("three")])
    fork = chat.fork("fork", at=1)
    fork.append(user("another three"))
    key = Key("default", "fork")
    assert notebook.until(lambda: notebook.texts(key) == ["another three"] and len(notebook.texts()) == 3)
    chat.clear(with_forks=True)
    assert notebook.said == {}
    store.close()


# Erasing


def test_a_service_that_cannot_be_reached_keeps_a_conversation_from_being_erased(notebook):
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    chat.append(user("one"))
    assert notebook.until(lambda: notebook.texts() == ["one"])
    notebook.is_down = True
    with pytest.raises(StoreError, match="down"):
        chat.clear()
    assert [one.message.text for one in chat.get_all()] == ["one"]
    notebook.is_down = False
    chat.clear()
    assert notebook.said == {}
    assert chat.get_all() == []
    chat.append(user("anew"))
    assert notebook.until(lambda: notebook.texts() == ["anew"])
    store.close()


def test_nothing_that_was_on_its_way_lands_after_it_was_forgotten(notebook):
    notebook.gate = Event()
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    chat.append(user("one"))
    assert notebook.entered.wait(10)
    erased = Event()

    def erase():
        chat.clear()
        erased.set()

    thread = Thread(target=erase)
    thread.start()
    assert not erased.is_set()
    notebook.gate.set()
    thread.join(10)
    store.close()
    assert notebook.said == {}
    assert list(store.conversations()) == []


def test_erased_and_begun_anew_elsewhere_it_is_handed_over_too(notebook, tmp_path):
    store = HybridStore(SQLiteStore(tmp_path / "a.db"), notebook)
    chat = opened(store)
    chat.append(user("one"))
    assert store.drain(KEY)
    SQLiteStore(tmp_path / "a.db").erase(KEY)
    chat.append(user("two"))
    assert notebook.until(lambda: notebook.texts() == ["one", "two"])
    store.close()


# Processes

CHILD = """
import os, sys
os.environ["MEM0_TELEMETRY"] = "False"
import refold
chat = refold.open("chat", store=sys.argv[1], model="gpt-5")
for n in range(30):
    chat.append({"role": "user", "content": f"message {n}"})
print("said", flush=True)
sys.stdin.read()
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MEM0_TELEMETRY": "False", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "refold", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("sync", ["immediate", "end"])
def test_what_a_killed_process_said_and_did_not_hand_over_is_handed_over_by_sync(tmp_path, sync):
    with Mem0Stub() as stub:
        stub.fault = "down"
        memory = f"mem0://alice?host={stub.host}&key={stub.key}"
        record = quote(f"sqlite:///{tmp_path}/a.db", safe="")
        url = f"hybrid://?record={record}&memory={quote(memory, safe='')}&sync={sync}"
        child = subprocess.Popen([sys.executable, "-c", CHILD, url], stdin=-1, stdout=-1, stderr=-3)
        assert child.stdout.readline() == b"said\n"
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        failed = run("sync", "--store", url, "--json")
        assert failed.returncode == 1
        assert [one["conversation"] for one in json.loads(failed.stdout)["left"]] == ["chat"]
        assert stub.key not in failed.stderr
        assert stub.texts == []
        stub.fault = None
        done = run("sync", "--store", url)
        assert (done.returncode, done.stdout.strip()) == (0, "1 conversation handed over, 0 left"), (
            done.stderr
        )
        assert stub.texts == [f"message {n}" for n in range(30)]
        again = run("sync", "--store", url, "--json")
        assert json.loads(again.stdout) == {"conversations": 0, "left": [], "refused": []}


def test_a_forked_process_has_a_thread_of_its_own(tmp_path):
    code = """
import os, sys, refold
chat = refold.open("chat", store=sys.argv[1], model="gpt-5")
chat.append({"role": "user", "content": "parent"})
if os.fork() == 0:
    chat.append({"role": "user", "content": "child"})
    chat.close()
    os._exit(0)
os.wait()
chat.close()
"""
    with Mem0Stub() as stub:
        record = quote(f"sqlite:///{tmp_path}/a.db", safe="")
        url = f"mem0://alice?host={stub.host}&key={stub.key}&record={record}"
        environment = {**os.environ, "MEM0_TELEMETRY": "False"}
        subprocess.run([sys.executable, "-c", code, url], check=True, env=environment, timeout=60)
        run("sync", "--store", url)
        assert sorted({*stub.texts}) == ["child", "parent"]


@pytest.mark.parametrize("engine", ["postgres_url", "valkey_url"])
def test_the_record_may_be_any_store_that_keeps_cursors(engine, request, notebook):
    store = HybridStore(open_store(request.getfixturevalue(engine)), notebook)
    with opened(store) as chat:
        chat.append([user("one"), user("two")])
        assert notebook.until(lambda: notebook.texts() == ["one", "two"])
        fork = chat.fork("fork", at=0)
        fork.append(user("three"))
        assert notebook.until(lambda: notebook.texts(fork.key) == ["three"])
        assert store.drain(KEY)
        assert store.drain(fork.key)
        assert store.left() == []
        chat.clear(with_forks=True)
    assert notebook.said == {}
    store.close()


def test_agentcore_can_be_the_memory(tmp_path, monkeypatch):
    with AgentCoreStub() as stub:
        for name, value in stub.environment.items():
            monkeypatch.setenv(name, value)
        memory, record = quote(f"{stub.url}/alice", safe=""), quote(f"sqlite:///{tmp_path}/a.db", safe="")
        with refold.open("chat", store=f"hybrid://?record={record}&memory={memory}", model="gpt-5") as chat:
            chat.append([user("one"), user("two")])
            assert chat.store.drain(chat.key)
            assert stub.calls.count("CreateEvent") == 1
            chat.clear()
            assert "DeleteEvent" in stub.calls


# The way in


def test_a_url_says_which_record_and_which_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("MEM0_API_KEY", "a-key")
    record = quote(f"sqlite:///{tmp_path}/a.db", safe="")
    store = open_store(
        f"hybrid://?record={record}&memory=mem0%3A%2F%2Falice&sync=batch&batch_size=7&batch_s=0.5"
    )
    assert (store.sync, store.batch_size, store.batch_s) == ("batch", 7, 0.5)
    assert isinstance(store.record, SQLiteStore)
    assert store.recalls
    store.close()


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("", "expected hybrid://"),
        ("record=memory%3A%2F%2F", "expected hybrid://"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&more=1", "expected hybrid://"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&sync=later", "sync is immediate, batch or end"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&batch_size=0", "batch_size is a number"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&batch_s=soon", "batch_size is a number"),
        ("record=memory%3A%2F%2F&memory=sqlite%3A%2F%2F%2Fa.db", "memory is mem0://"),
        ("record=nothing%3A%2F%2F&memory=mem0%3A%2F%2Fa", "expected memory://"),
    ],
)
def test_a_url_that_says_something_else_is_refused(query, problem, monkeypatch):
    monkeypatch.setenv("MEM0_API_KEY", "a-key")
    with pytest.raises(SettingError, match=problem):
        open_store(f"hybrid://?{query}")


def test_no_password_and_no_key_is_shown():
    inner = quote("postgresql://me:secret@host/db", safe="")
    memory = quote("mem0://alice?key=secret&host=http://x", safe="")
    for url in (
        f"hybrid://?record={inner}&memory={memory}",
        "mem0://alice?key=secret",
        f"mem0://alice?record={inner}&key=secret",
        "postgresql://me:secret@host/db",
    ):
        assert "secret" not in shown_url(url)
    assert shown_url("sqlite:///a.db?timeout_s=3") == "sqlite:///a.db?timeout_s=3"


def test_odd_names_are_handed_over_apart(notebook):
    store = HybridStore(MemoryStore(), notebook, sync="end")
    for name in ODD:
        opened(store, name).append(user(name + "!"))
    store.close()
    assert {key.conversation: texts for key in notebook.said if (texts := notebook.texts(key))} == {
        name: [name + "!"] for name in ODD
    }
