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
from typer.testing import CliRunner

import refold
from agentcore_stub import AgentCoreStub
from mem0_stub import Mem0Stub
from refold.cli import app
from refold.core.errors import CorruptError, MessageError, SettingError, StoreError
from refold.session.memories import spoken
from refold.stores import hybrid, hybrid_sync
from refold.stores.hybrid import HybridStore
from refold.stores.hybrid_sync import BoundedDict, RefusedMessage
from refold.stores.memory import MemoryStore
from refold.stores.shelf import Shelf
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import (
    Forks,
    Key,
    LocatesIds,
    Memories,
    Memory,
    MessageListener,
    SelfCheck,
    SessionHooks,
    SpokenMessage,
    open_store,
)
from refold.stores.url import shown_url
from refold.testing import StoreContract
from refold.testing.samples import ODD_NAMES
from session_contract import SessionsContract

KEY = Key("default", "chat")


class Notebook:
    """A service that writes down what it is told, and can be made to fail."""

    def __init__(self, name: str = "notebook") -> None:
        self.name = name
        self.said: dict[Key, list[SpokenMessage]] = {}
        self.calls: list[tuple[Key, int]] = []
        """How many messages each came with."""
        self.forgotten = 0
        self.is_down = self.forgets_nothing = False
        self.refuses: str | None = None
        self.gate: Event | None = None
        self.entered = Event()
        self.changed = Condition()

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        with self.changed:
            self.calls.append((key, len(said)))
            self.changed.notify_all()
            if self.is_down:
                raise StoreError("the service is down")
            if self.refuses is not None and any(self.refuses in one.text for one in said):
                raise MessageError("message", f"has {self.refuses!r} in it")
            self.said.setdefault(key, []).extend(said)

    def memories(self, key, query, limit, namespace, /):
        return [Memory(str(one.at), one.text) for one in self.said.get(key, [])][:limit]

    def forget(self, key: Key, /) -> None:
        with self.changed:
            self.forgotten += 1
            self.changed.notify_all()
            if self.is_down or self.forgets_nothing:
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
    store.listen(spoken)
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


# proves: B4f
class TestMem0OverSQLite(StoreContract, SessionsContract):
    @pytest.fixture
    def reopen(self, tmp_path):
        with Mem0Stub() as stub:
            yield partial(over_sqlite, tmp_path / "refold.db", stub.host)

    @pytest.fixture
    def store(self, reopen):
        store = reopen()
        yield store
        store.close()


# proves: B4g
class TestHybridOverMemory(StoreContract, SessionsContract):
    @pytest.fixture
    def store(self):
        store = HybridStore(MemoryStore(), Notebook())
        yield store
        store.close()


def test_it_can_do_what_its_record_can_and_has_memories(notebook):
    class Plain:
        """A record that has nothing but streams and a shelf."""

        def __init__(self):
            inner = MemoryStore()
            shelf = [verb for verb in vars(Shelf) if not verb.startswith("_")]
            for verb in (*shelf, "append", "read", "find", "erase", "conversations", "close"):
                setattr(self, verb, getattr(inner, verb))

    rich, plain = HybridStore(MemoryStore(), notebook), HybridStore(Plain(), notebook)
    for protocol in (Forks, LocatesIds):
        assert isinstance(rich, protocol)
        assert not isinstance(plain, protocol)
    for protocol in (Memories, MessageListener, SessionHooks, Shelf):
        assert isinstance(rich, protocol)
        assert isinstance(plain, protocol)
    assert not isinstance(rich, SelfCheck)
    chat = opened(plain)
    chat.append([user("one"), user("two")])
    chat.close()
    assert notebook.until(lambda: notebook.texts() == ["one", "two"])
    assert chat.clear() == []
    assert notebook.said == {}


def test_a_record_without_a_shelf_is_refused(notebook):
    class Bare:
        pass

    with pytest.raises(SettingError, match="Bare has no shelf"):
        HybridStore(Bare(), notebook)


# Handing over


# proves: B4g
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


# proves: B4g
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


# proves: B4g, E7
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


# proves: B4g
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


def test_what_was_taken_one_by_one_is_not_handed_over_again_when_the_service_fails(notebook, monkeypatch):
    notebook.refuses = "poison"
    store = listening(HybridStore(MemoryStore(), notebook, sync="end"))
    opened(store).append([user("one"), user("two"), user("poison"), user("four"), user("five")])
    remember = notebook.remember

    def fail_at_five(key, said):
        notebook.is_down = said[0].text == "five"
        remember(key, said)

    monkeypatch.setattr(notebook, "remember", fail_at_five)
    with pytest.raises(StoreError, match="down"):
        store.drain(KEY)
    monkeypatch.undo()
    notebook.is_down = False
    assert [one.at for one in store.refused(KEY)] == [2]
    assert store.drain(KEY)
    assert notebook.texts() == ["one", "two", "four", "five"]


def test_the_doctor_is_told_of_what_was_refused(notebook, tmp_path):
    notebook.refuses = "poison"
    store = listening(HybridStore(SQLiteStore(tmp_path / "a.db"), notebook))
    chat = opened(store)
    chat.append([user("poison"), user("food")])
    assert store.drain(KEY)
    assert store.refused(KEY) == store.refused() == [RefusedMessage(KEY, 0, "has 'poison' in it")]
    assert ["refused" in flaw.problem for flaw in store.examine()] == [True]
    store.close()


def test_only_where_something_was_refused_is_it_asked_what(monkeypatch, tmp_path):
    asked = list[str]()
    note = SQLiteStore.note
    with Mem0Stub() as stub:
        stub.refuses = lambda text: "poison" in text
        record = quote(f"sqlite:///{tmp_path}/a.db", safe="")
        url = f"mem0://alice?host={stub.host}&key={stub.key}&record={record}"
        store = listening(open_store(url))
        for n in range(20):
            chat = opened(store, f"chat {n}")
            chat.append([user("poison" if n == 7 else "drink"), user("food")])
            assert store.drain(chat.key)
        monkeypatch.setattr(SQLiteStore, "note", lambda self, name: asked.append(name) or note(self, name))
        assert len(list(store.examine())) == 1
        assert [(one.key.conversation, one.at) for one in store.refused()] == [("chat 7", 0)]
        store.close()
        ran = CliRunner().invoke(app, ["sync", "--refused", "--store", url, "--json"])
        assert [one["conversation"] for one in json.loads(ran.stdout)["refused"]] == ["chat 7"]
    assert len(set(asked)) == 1


def test_a_service_that_refuses_everything_is_as_good_as_down_and_then_has_all(notebook):
    notebook.refuses = ""
    store = HybridStore(MemoryStore(), notebook)
    chat = opened(store)
    texts = [f"message {n}" for n in range(300)]
    chat.append([user(text) for text in texts])
    with pytest.raises(StoreError, match=r"notebook refuses .* from #0 on"):
        store.drain(KEY)
    assert notebook.until(lambda: store.problem is not None)
    assert len(notebook.calls) < 100  # it is not asked for every message
    assert (store.left(), store.refused(KEY)) == ([KEY], [])
    notebook.refuses = None
    assert store.drain(KEY)
    assert notebook.texts() == texts
    store.close()


def test_a_service_that_begins_to_refuse_everything_is_told_the_rest_later(notebook):
    store = listening(HybridStore(MemoryStore(), notebook, sync="end"))
    chat = opened(store)
    chat.append([user("one"), user("two")])
    assert store.drain(KEY)
    notebook.refuses = ""
    chat.append([user(f"message {n}") for n in range(50)])
    for _ in range(3):
        with pytest.raises(StoreError, match="from #2 on"):
            store.drain(KEY)
    notebook.refuses = None
    assert store.drain(KEY)
    assert (len(notebook.texts()), store.refused(KEY)) == (52, [])


def test_a_service_that_refuses_all_conversations_is_left_alone_for_a_while(notebook, monkeypatch):
    monkeypatch.setattr(hybrid_sync, "WAIT_S", 1e6)
    monkeypatch.setattr(hybrid_sync, "LONGEST_WAIT_S", 1e6)
    notebook.refuses = ""
    store = HybridStore(MemoryStore(), notebook)
    chats = [opened(store, f"chat {n}") for n in range(20)]
    for chat in chats:
        chat.append(user("hello"))
    assert notebook.until(lambda: len(notebook.calls) >= 2)
    follower = store._sync
    with follower._changed:
        assert follower._changed.wait_for(lambda: follower._delivering is None, 10)
    store.close()
    assert len(notebook.calls) == 2  # one may be refused for what it says, two are not
    assert len(store.left()) == 20


@pytest.mark.parametrize("batch_size", [1, 20])
def test_a_refused_message_at_the_end_waits_for_another_that_is_taken(notebook, batch_size):
    notebook.refuses = "poison"
    store = listening(HybridStore(MemoryStore(), notebook, sync="end", batch_size=batch_size))
    chat = opened(store)
    chat.append(user("poison"))
    with pytest.raises(StoreError, match="accepted nothing else meanwhile"):
        store.drain(KEY)
    chat.append(user("food"))
    assert store.drain(KEY)
    assert (notebook.texts(), [one.at for one in store.refused(KEY)]) == (["food"], [0])


def test_what_is_refused_while_other_conversations_are_taken_is_passed_over(notebook):
    notebook.refuses = "poison"
    store = listening(HybridStore(MemoryStore(), notebook, sync="end"))
    opened(store).append(user("poison"))
    with pytest.raises(StoreError):
        store.drain(KEY)
    other = opened(store, "other")
    other.append(user("food"))
    assert store.drain(other.key)
    assert store.drain(KEY)
    assert [one.at for one in store.refused(KEY)] == [0]
    assert store.left() == []


def test_all_that_was_refused_is_noted_and_can_be_handed_in_again(notebook, tmp_path):
    notebook.refuses = "poison"
    store = listening(HybridStore(SQLiteStore(tmp_path / "a.db"), notebook, sync="end"))
    chat = opened(store)
    for n in range(150):
        chat.append([user(f"poison {n}"), user(f"food {n}")])
    assert store.drain(KEY)
    assert [one.at for one in store.refused(KEY)] == list(range(0, 300, 2))
    notebook.refuses = "poison 1"
    assert store.drain(KEY, with_refused=True)
    assert [one.at for one in store.refused(KEY)] == [2 * n for n in range(150) if str(n).startswith("1")]
    notebook.refuses = None
    assert store.drain(KEY, with_refused=True)
    assert store.refused(KEY) == []
    assert sorted(notebook.texts()) == sorted(
        f"{what} {n}" for n in range(150) for what in ("poison", "food")
    )
    store.close()


def test_two_who_note_what_was_refused_do_not_lose_each_others(notebook):
    notebook.refuses = "poison"
    record = MemoryStore()
    stores = [listening(HybridStore(record, notebook, sync="end")) for _ in range(2)]
    chats = [opened(store, f"chat {n}") for n, store in enumerate(stores)]

    def told(n):
        for _ in range(20):
            chats[n].append([user("poison"), user("food")])
            stores[n].drain(chats[n].key)

    threads = [Thread(target=told, args=[n]) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(stores[0].refused(chat.key)) for chat in chats] == [20, 20]


@pytest.mark.parametrize("note", [b"{", b"x?", b"[]", b'{"of": 1, "refused": 7}', b"\xff"])
def test_a_damaged_note_of_what_was_refused_is_told_and_holds_up_nothing(notebook, tmp_path, note):
    notebook.refuses = "poison"
    store = listening(HybridStore(SQLiteStore(tmp_path / "a.db"), notebook, sync="end"))
    chat = opened(store)
    chat.append([user("poison"), user("food")])
    assert store.drain(KEY)
    store.record.keep_note(store._sync._refusal_note(KEY), note)
    with pytest.raises(CorruptError):
        store.refused(KEY)
    assert ["cannot be" in flaw.problem for flaw in store.examine()] == [True]
    chat.append([user("more poison"), user("more food")])
    assert store.drain(KEY)
    assert [one.at for one in store.refused(KEY)] == [2]
    store.close()


def test_nothing_counts_as_handed_over_where_nobody_said_what_entries_say(notebook):
    record = MemoryStore()
    store = HybridStore(record, notebook, sync="end")
    chat = opened(store)
    chat.append(user("one"))
    deaf = HybridStore(record, notebook)
    with pytest.raises(StoreError, match="refold sync"):
        deaf.drain(KEY)
    assert deaf.left() == [KEY]
    store.close()
    assert notebook.texts() == ["one"]


# proves: B4g
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


# proves: B4g
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
    with theirs._sync.exclusive(KEY) as is_alone:
        assert is_alone
        with pytest.raises(StoreError, match="being delivered"):
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


def test_no_append_goes_through_the_list_of_conversations(notebook):
    class Long(MemoryStore):
        listed = 0

        def conversations(self, owner=None, /):
            self.listed += 1
            return super().conversations(owner)

    record = Long()
    old = opened(record)
    old.append([user("one"), user("two")])
    killed = HybridStore(record, notebook, sync="end")
    for name in ("chat", "new"):
        chat = opened(killed, name)
        chat.append(user("three"))
    assert record.listed == 0
    store = listening(HybridStore(record, notebook))
    notebook.is_down = True
    for _ in range(2):
        with pytest.raises(StoreError, match="down"):
            store.drain(KEY)
    notebook.is_down = False
    assert sorted(store.left()) == [KEY, chat.key]
    assert all(map(store.drain, store.left()))
    assert (notebook.texts(), notebook.texts(chat.key)) == (["one", "two", "three"], ["three"])
    assert record.listed == 0


def test_a_conversation_with_much_to_tell_lets_others_have_their_turn(notebook):
    store = HybridStore(MemoryStore(), notebook, batch_size=1)
    notebook.gate = Event()
    long, short = opened(store, "long"), opened(store, "short")
    long.append([user(f"message {n}") for n in range(50)])
    assert notebook.entered.wait(10)
    short.append(user("hello"))
    notebook.gate.set()
    assert notebook.until(lambda: len(notebook.calls) == 51)
    assert notebook.calls.index((short.key, 1)) <= hybrid_sync.BATCHES_PER_TURN + 1
    assert notebook.texts(long.key) == [f"message {n}" for n in range(50)]
    store.close()


def test_what_is_recent_may_be_set_by_many_threads():
    recent, problems = BoundedDict[int, int](2), []

    def work(first):
        try:
            for n in range(30_000):
                recent[(first + n) % 5] = n
        except KeyError as error:
            problems.append(error)

    threads = [Thread(target=work, args=[n]) for n in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    assert (problems, len(recent)) == ([], 2)


def test_a_memory_that_cannot_be_closed_keeps_no_record_open(notebook):
    class Stubborn(Notebook):
        def close(self):
            raise StoreError("not now")

    class Closed(MemoryStore):
        is_closed = False

        def close(self):
            self.is_closed = True

    record = Closed()
    with pytest.raises(StoreError, match="not now"):
        HybridStore(record, Stubborn()).close()
    assert record.is_closed


# Erasing


def test_what_landed_after_an_erasure_elsewhere_is_forgotten_by_the_next_erasure(notebook, monkeypatch):
    monkeypatch.setattr(hybrid_sync, "WAIT_S", 1e6)
    notebook.gate, notebook.forgets_nothing = Event(), True
    record = MemoryStore()
    store = listening(HybridStore(record, notebook))
    opened(store).append(user("secret"))
    assert notebook.entered.wait(10)
    record.erase(KEY)
    notebook.gate.set()
    assert notebook.until(lambda: notebook.forgotten)
    notebook.forgets_nothing = False
    store.erase(KEY)
    assert notebook.said == {}
    store.close()


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


def test_a_slow_service_holds_up_the_erasing_of_no_other_conversation(notebook, monkeypatch):
    store = listening(HybridStore(MemoryStore(), notebook))
    other = opened(store, "other")
    other.append(user("two"))
    assert store.drain(other.key)
    notebook.entered.clear()
    notebook.gate = Event()
    opened(store).append(user("one"))
    assert notebook.entered.wait(10)
    monkeypatch.setattr(hybrid, "PATIENCE_S", 0.0)
    other.clear()
    assert other.get_all() == []
    notebook.gate.set()
    store.close()


def test_the_right_to_hand_over_is_renewed_while_the_service_is_waited_for(notebook, monkeypatch):
    monkeypatch.setattr(hybrid_sync, "LEASE_S", 0.3)
    monkeypatch.setattr(hybrid, "PATIENCE_S", 0.0)
    renewed = Condition()

    class Renewed(MemoryStore):
        first = last = 0.0

        def acquire(self, *asked):
            with renewed:
                lease = super().acquire(*asked)
                self.last = lease.until if lease else self.last
                self.first = self.first or self.last
                renewed.notify_all()
                return lease

    record = Renewed()
    notebook.gate = Event()
    mine, theirs = HybridStore(record, notebook), HybridStore(record, notebook)
    opened(mine).append(user("one"))
    assert notebook.entered.wait(10)
    with renewed:
        assert renewed.wait_for(lambda: record.last > record.first + 0.6, 10)  # it would have run out by then
    with pytest.raises(StoreError, match="being delivered"):
        theirs.erase(KEY)
    notebook.gate.set()
    assert mine.drain(KEY)
    theirs.erase(KEY)
    assert notebook.said == {}
    mine.close()


@pytest.mark.parametrize("forgets_at_once", [True, False])
@pytest.mark.parametrize("is_begun_anew", [True, False])
def test_what_lands_after_it_was_erased_elsewhere_is_forgotten(notebook, forgets_at_once, is_begun_anew):
    notebook.gate = Event()
    notebook.forgets_nothing = not forgets_at_once
    record = MemoryStore()
    store = listening(HybridStore(record, notebook))
    opened(store).append([user("a"), user("secret")])
    assert notebook.entered.wait(10)
    record.erase(KEY)  # by nobody who would ask the memory
    if is_begun_anew:
        opened(record).append([user("b"), user("c"), user("d")])
    notebook.gate.set()
    assert notebook.until(lambda: notebook.forgotten)
    notebook.forgets_nothing = False
    assert notebook.until(lambda: KEY not in notebook.said or "secret" not in notebook.texts())
    anew = opened(store)
    anew.append(user("anew"))
    expected = [*("bcd" if is_begun_anew else ""), "anew"]
    assert notebook.until(lambda: notebook.texts() == expected)
    store.close()


def test_a_closed_record_is_left_alone_by_who_still_waits_for_the_service(notebook, monkeypatch):
    monkeypatch.setattr(hybrid_sync, "PATIENCE_S", 0.0)
    late = list[str]()

    class Closed(MemoryStore):
        is_closed = False

        def close(self):
            self.is_closed = True

        def __getattribute__(self, name):
            if not name.startswith("_") and name not in ("is_closed", "close") and self.is_closed:
                late.append(name)
            return super().__getattribute__(name)

    notebook.gate = Event()
    store = HybridStore(Closed(), notebook)
    opened(store).append([user("one"), user("two")])
    assert notebook.entered.wait(10)
    thread = store._sync._thread
    store.close()
    notebook.gate.set()
    thread.join(10)
    assert (thread.is_alive(), late) == (False, [])
    store.record.is_closed = False
    assert store.left() == [KEY]  # so it is handed over again


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
        assert (done.returncode, done.stdout.strip()) == (0, "1 conversation delivered, 0 left"), done.stderr
        assert stub.texts == [f"message {n}" for n in range(30)]
        again = run("sync", "--store", url, "--json")
        assert json.loads(again.stdout) == {"conversations": 0, "left": [], "refused": []}


def test_what_was_refused_is_handed_in_again_by_sync(tmp_path):
    with Mem0Stub() as stub:
        stub.refuses = lambda text: "poison" in text
        record = quote(f"sqlite:///{tmp_path}/a.db", safe="")
        url = f"mem0://alice?host={stub.host}&key={stub.key}&record={record}"
        with refold.open("chat", store=url, model="gpt-5") as chat:
            chat.append([user("one"), user("poison"), user("three")])
            assert chat.store.drain(chat.key)
        again = run("sync", "--refused", "--store", url, "--json")
        assert [one["at"] for one in json.loads(again.stdout)["refused"]] == [1]
        stub.refuses = lambda text: False
        assert json.loads(run("sync", "--store", url, "--json").stdout)["conversations"] == 0
        done = run("sync", "--refused", "--store", url)
        assert (done.returncode, done.stdout.strip()) == (0, "1 conversation delivered, 0 left")
        assert sorted(stub.texts) == ["one", "poison", "three"]
        assert json.loads(run("sync", "--refused", "--store", url, "--json").stdout)["conversations"] == 0


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
            assert stub.calls.count("CreateEvent") == 2
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
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&more=1", "its options are record, memory, sync"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&sync=later", "expected immediate, batch or end"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&batch_size=0", "expected a number of messages"),
        ("record=memory%3A%2F%2F&memory=mem0%3A%2F%2Fa&batch_s=soon", "expected a number of seconds"),
        ("record=memory%3A%2F%2F&memory=sqlite%3A%2F%2F%2Fa.db", "memory is mem0://"),
        ("record=nothing%3A%2F%2F&memory=mem0%3A%2F%2Fa", "expected memory://"),
        ("record=mem0%3A%2F%2Fb&memory=mem0%3A%2F%2Fa", "a record is sqlite://, postgresql://, redis:// or"),
        ("record=hybrid%3A%2F%2F%3Fa&memory=mem0%3A%2F%2Fa", "a record is sqlite://"),
        ("record=agentcore%3A%2F%2Fa&memory=mem0%3A%2F%2Fa", "a record is sqlite://"),
    ],
)
def test_a_url_that_says_something_else_is_refused(query, problem, monkeypatch):
    monkeypatch.setenv("MEM0_API_KEY", "a-key")
    with pytest.raises(SettingError, match=problem):
        open_store(f"hybrid://?{query}")


def test_a_way_of_syncing_that_is_not_known_is_refused(notebook):
    with pytest.raises(SettingError, match="sync is immediate, batch or end, not 'later'"):
        HybridStore(MemoryStore(), notebook, sync="later")


def test_a_record_that_has_a_memory_is_refused_before_it_is_opened(notebook, monkeypatch, tmp_path):
    monkeypatch.setenv("MEM0_API_KEY", "a-key")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SettingError, match=r"'mem0://b\?key=\*\*\*' has a memory already; a record is sqlite://"
    ):
        open_store(f"mem0://a?record={quote('mem0://b?key=secret', safe='')}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SettingError, match="HybridStore has a memory already; a record is sqlite://"):
        HybridStore(HybridStore(MemoryStore(), notebook), notebook)


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
    for name in ODD_NAMES:
        opened(store, name).append(user(name + "!"))
    store.close()
    assert {key.conversation: texts for key in notebook.said if (texts := notebook.texts(key))} == {
        name: [name + "!"] for name in ODD_NAMES
    }
