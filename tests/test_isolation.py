"""Two owners with the same ids do whatever can be done on one store: neither finds a trace of the other."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refold
from agentcore_stub import AgentCoreStub
from mem0_stub import Mem0Stub
from refold.core.errors import ConflictError, RefoldError, StoreError
from refold.stores.hybrid import HybridStore
from refold.stores.memory import MemoryStore
from refold.stores.shelf import Shelf
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import (
    LOCATED,
    Forks,
    FoundPlace,
    Key,
    LocatesIds,
    Memories,
    RemoteReads,
    Snapshot,
    Store,
    open_store,
)
from refold.testing.samples import ODD_NAMES, verified
from session_contract import TINY

MARKS = ("quetzalcoatl", "tyrannosaurus")
"""Words of one owner each, in all that the owner says: the other must never be shown them."""
NAMES = [
    *ODD_NAMES,
    "b:c",
    "a:b:c",
    "a\r\nb",
    "[a]",
    "a?",
    "a}b",
    "{a}b",
    "$a",
    "a;b",
    "null",
    "default",
    "a\0\0b",
]
NAMES = list(dict.fromkeys(NAMES))
DIGEST = b"of what both had summarized"
UNABLE = "this store has no such thing"
numbers = count()


class Step(NamedTuple):
    owner: int
    deed: str
    where: int
    """Which of the conversations."""
    n: int


class Script(NamedTuple):
    owners: tuple[str, str]
    conversations: tuple[str, ...]
    steps: list[Step]


class Owner:
    """What one owner can do, by way of a session and of the store itself. Every answer is looked at."""

    def __init__(self, store: Store, name: str, which: int, conversations: Sequence[str], run: int) -> None:
        self.store, self.name, self.run = store, name, run
        self.mark, self.other = MARKS[which], MARKS[1 - which]
        self.ids = [*conversations, f"{self.mark} alone"]

    def do(self, step: Step) -> Any:
        """What came of it: an error is an answer too, and tells no more than others."""
        key = Key(self.name, self.ids[step.where % len(self.ids)])
        deed = getattr(self, step.deed)
        try:
            with refold.open(
                key.conversation, store=self.store, owner=self.name, model="tiny", config=TINY
            ) as session:
                answer = deed(session, step.n)
                return list(answer) if isinstance(answer, Iterator) else answer
        except StoreError:
            raise
        except RefoldError as error:
            return error

    # By the session

    def say(self, session, n):
        return session.append({"role": "user", "content": f"{self.mark} says {n} words " * (n + 1)})

    def say_many(self, session, n):
        ids = [f"id {n}", f"id {n + 1}", f"{self.mark} {n}", f"{LOCATED}{n}"]
        return session.append(
            [refold.Message("user", (refold.Text(f"{self.mark} as {id}"),), id) for id in ids]
        )

    def fit(self, session, n):
        return session.fit().messages

    def compact(self, session, n):
        return session.compact(keep_recent=n % 3)

    def search(self, session, n):
        found = session.search(self.other), session.search(f"{self.other[:5]}* words", everywhere=n % 2 == 0)
        return [hit for hits in found for hit in hits]

    def search_own(self, session, n):
        hits = session.search(self.mark, everywhere=True, limit=50)
        return [hit.at for hit in hits] and hits

    def expand(self, session, n):
        return session.expand(n)

    def call(self, session, n):
        asked = {"refold_expand": {"at": n}, "refold_search": {"query": self.other}}
        return [session.call(name, arguments) for name, arguments in asked.items()]

    def amend(self, session, n):
        return [session.pin, session.unpin, session.restore, session.undo, session.explain][n % 5](n)

    def correct(self, session, n):
        return session.correct(n, f"{self.mark} meant {n}")

    def fork(self, session, n):
        """Onto the id of another conversation, which the other owner may have."""
        with session.fork(self.ids[n % len(self.ids)]) as fork:
            return [one.message.text for one in fork.get_all()]

    def export(self, session, n):
        return session.export()

    def events(self, session, n):
        return session.events(n)

    def view(self, session, n):
        return session.view().messages, session.check_overflow(), session.compactions()

    def clear(self, session, n):
        return session.clear(with_forks=n % 2 == 0)

    def memories(self, session, n):
        if not isinstance(self.store, Memories):
            return []
        query = self.other if n % 2 else None
        return self.store.memories(session.key, query, 50, None)

    # By the store

    def read(self, session, n):
        key = session.key
        found: list[Any] = list(self.store.read(key, n)), list(self.store.conversations(self.name))
        if isinstance(self.store, RemoteReads):
            snapshot, links = self.store.resume(key, "main")
            found += (snapshot, list(links), self.store.fetch(key, range(9)))
        return found

    def listed(self, session, n):
        return sorted((row.key, row.next, row.parent) for row in self.store.conversations(self.name))

    def find(self, session, n):
        ids = [f"{start} {m}" for start in ("id", *MARKS) for m in range(9)]
        return self.store.find(session.key, ids)

    def locate(self, session, n):
        """Which were found; of several that said the same, and of heirs, each store may tell another."""
        if not isinstance(self.store, LocatesIds):
            return UNABLE
        found = self.store.locate(self.name, [f"{LOCATED}{m}" for m in range(9)])
        for id, (key, at) in found.items():
            assert key.owner == self.name
            assert [link.entry.id for link in self.store.read(key, at, at + 1)] == [id]
        return sorted(found)

    def keep(self, session, n):
        if isinstance(self.store, Shelf):
            self.store.keep_summary(session.key, DIGEST, f"{self.mark} {n}".encode())

    def kept(self, session, n):
        return self.store.summary(session.key, DIGEST) if isinstance(self.store, Shelf) else UNABLE

    def save(self, session, n):
        if isinstance(self.store, Shelf):
            self.store.save(session.key, f"{n % 2}", Snapshot(1_000 + n, self.mark.encode(), b""))

    def saved(self, session, n):
        return self.store.saved(session.key) if isinstance(self.store, Shelf) else None

    def acquire(self, session, n):
        if isinstance(self.store, Shelf):
            return self.store.acquire(session.key, "shared", f"{self.mark} {n % 2}", 100.0 * n, 50.0)
        return UNABLE

    def leases(self, session, n):
        return self.store.leases(session.key, 10.0) if isinstance(self.store, Shelf) else None

    def set_cursor(self, session, n):
        if isinstance(self.store, Shelf):
            self.store.set_cursor(session.key, f"shared {self.run}", n)

    def cursor(self, session, n):
        return (
            self.store.cursor(session.key, f"shared {self.run}") if isinstance(self.store, Shelf) else UNABLE
        )

    def wait(self, session, n):
        return self.store.wait(session.key, n, 0.0) if isinstance(self.store, RemoteReads) else None

    # All there is

    def all(self) -> Any:
        """As it is stored."""
        keys = sorted(row.key for row in self.store.conversations(self.name))
        assert all(key.owner == self.name for key in keys)
        found = [(key, verified(self.store, key)) for key in keys]
        for key in keys if isinstance(self.store, Shelf) else ():
            found.append((key, self.store.saved(key)))
            found.append((key, [one for one in self.store.leases(key, 0.0) if one.name == "shared"]))
            found.append((key, self.store.summary(key, DIGEST)))
            found.append((key, self.store.cursor(key, f"shared {self.run}")))
        return found

    def said(self) -> Any:
        """In words, as it would be for an owner who is alone."""
        found = dict[str, Any]()
        for row in self.store.conversations(self.name):
            session = refold.open(row.key.conversation, store=self.store, owner=self.name)
            view = [message.text for message in session.view().messages]
            found[row.key.conversation] = ([(one.at, one.message.text) for one in session.get_all()], view)
        return found


DEEDS = [
    *("say", "say", "say_many", "say_many", "fit", "compact", "search", "search_own", "expand", "call"),
    *("amend", "correct", "fork", "export", "events", "view", "clear", "memories", "read", "listed", "find"),
    *("locate", "keep", "kept", "save", "saved", "acquire", "leases", "set_cursor", "cursor", "wait"),
]
ALIKE = {"say", "say_many", "expand", "fork", "find", "locate", "kept", "acquire", "cursor", "correct"}
"""Deeds whose answers are the same for an owner who is alone on another store."""
steps = st.builds(Step, st.integers(0, 1), st.sampled_from(DEEDS), st.integers(0, 3), st.integers(0, 8))


@st.composite
def scripts(draw) -> Script:
    owners = draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=2, unique=True))
    conversations = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    begun = [Step(owner, "say_many", where, 0) for owner in (0, 1) for where in range(len(conversations) + 1)]
    return Script((owners[0], owners[1]), tuple(conversations), begun + draw(st.lists(steps, max_size=25)))


def demand_apart(store: Store, script: Script) -> None:
    """No answer has the other's mark, no deed changes what is the other's, all is as if each were alone."""
    run = next(numbers)
    owners = [Owner(store, name, n, script.conversations, run) for n, name in enumerate(script.owners)]
    alone = [Owner(MemoryStore(), one.name, n, script.conversations, run) for n, one in enumerate(owners)]
    for step in script.steps:
        if step.deed == "fork" and not isinstance(store, Forks):
            continue
        me, other, twin = owners[step.owner], owners[1 - step.owner], alone[step.owner]
        before = other.all()
        answer = me.do(step)
        expected = twin.do(step)
        assert me.other not in repr(answer).lower().replace(repr(me.other), ""), step
        assert other.all() == before, step
        if step.deed in ALIKE and answer is not UNABLE:
            assert shown(answer) == shown(expected), step
    for me, twin in zip(owners, alone, strict=True):
        assert me.said() == twin.said()
        assert me.other not in repr(me.said())


def shown(answer: Any) -> Any:
    """Fences and messages of errors differ from store to store."""
    if isinstance(answer, RefoldError):
        return type(answer)
    return (answer.holder, answer.until) if hasattr(answer, "fence") else answer


def emptied(store: Store) -> Store:
    for row in list(store.conversations()):
        with suppress(RefoldError):
            store.erase(row.key, with_forks=True)
    return store


def generated(examples: int):
    """That many scripts, on a store that the test's fixture keeps open."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return lambda test: settings(max_examples=examples, suppress_health_check=quiet)(given(scripts())(test))


@generated(100)
def test_two_owners_in_memory(script):
    demand_apart(MemoryStore(), script)


@pytest.fixture
def sqlite(tmp_path):
    store = SQLiteStore(tmp_path / "log.db")
    yield store
    store.close()


@generated(30)
def test_two_owners_in_sqlite(sqlite, script):
    demand_apart(emptied(sqlite), script)


@pytest.fixture
def opened(request):
    store = open_store(request.getfixturevalue(request.param))
    yield store
    store.close()


@pytest.mark.parametrize("opened", ["postgres_url", "valkey_url"], indirect=True)
@generated(15)
def test_two_owners_on_a_server(opened, script):
    demand_apart(emptied(opened), script)


@generated(8)
def test_two_owners_at_agentcore(script):
    with (
        AgentCoreStub() as stub,
        pytest.MonkeyPatch.context() as patch,
    ):  # what was learned outlives an erasure
        stub.learn = lambda actor, session, role, text: (f"/facts/{actor}/", text)
        for name, value in stub.environment.items():
            patch.setenv(name, value)
        store = open_store(f"agentcore://{stub.memory_id}?namespace=/facts/{{actorId}}/&long_term=1")
        demand_apart(store, script)
        store.close()


@pytest.fixture(params=["mem0", "mem0 for one user", "mem0 by session"])
def remembering(request, tmp_path):
    """A record with a memory beside it that is told at once."""
    with Mem0Stub() as stub:
        user = "somebody" if "user" in request.param else ""
        level = "session" if "session" in request.param else "user"
        store = open_store(
            f"mem0://{user}?host={stub.host}&key={stub.key}&level={level}&record=sqlite:///{tmp_path}/log.db"
        )
        assert isinstance(store, HybridStore)
        yield store
        store.close()


@generated(5)
def test_two_owners_with_memories(remembering, script):
    demand_apart(emptied(remembering), script)


def test_another_owners_lease_commits_nothing_here(postgres_url, valkey_url, tmp_path):
    for url in (postgres_url, valkey_url, f"sqlite:///{tmp_path}/log.db", "memory://"):
        store = open_store(url)
        mine, theirs = Key("a", "b"), Key("a:b", "b")
        sessions = [refold.open(key.conversation, store=store, owner=key.owner) for key in (mine, theirs)]
        for session in sessions:
            session.append({"role": "user", "content": "something"})
        lease = store.acquire(theirs, "shared", "they", 100.0, 50.0)
        entry = next(store.read(mine)).entry._replace(at=1, id=None)
        with pytest.raises(ConflictError):
            store.append(mine, [entry], lease=lease)
        store.release(mine, lease)
        assert list(store.leases(theirs, 101.0)) == [lease]
        store.close()


class TellsSummaries(MemoryStore):
    def shelved(self, name, owner=None, /):
        return super().shelved(name)


class SearchesAll(MemoryStore):
    """Its index has the words of all owners."""

    def index(self, scope, words, /):
        self.words = words
        return iter(())

    def embed(self, scope, embedder, vectors, /):
        return iter(())

    def nearest(self, scope, embedder, vector, limit, /):
        return []

    def search(self, scope, query, limit, /):
        found = []
        for row in super().conversations():
            texts = ((link.entry.at, self.words(link.entry)) for link in self.read(row.key))
            found += [FoundPlace(row.key, at, 1.0) for at, one in texts if one and query.matches(one)]
        return found[:limit]


class ListsAll(MemoryStore):
    def conversations(self, owner=None, /):
        return super().conversations()


class JoinsNames(MemoryStore):
    """Ids are looked for by owner and conversation in one text."""

    def find(self, key, ids, /):
        known = {":".join(other): other for other in reversed(self._all)}
        return super().find(known.get(":".join(key), key), ids)


class LocatesAll(MemoryStore):
    """Ids that are found without a conversation are found without an owner, too."""

    def locate(self, owner, ids, /):
        owners = list(dict.fromkeys(key.owner for key in self._all))
        found = map(super().locate, owners, [ids] * len(owners))
        return {id: where for one in found for id, where in one.items()}


class ErasesByConversation(MemoryStore):
    def erase(self, key, /, *, with_forks=False):
        for other in [other for other in self._all if other.conversation == key.conversation]:
            super().erase(other, with_forks=with_forks)
        return []


@pytest.mark.parametrize(
    "broken", [TellsSummaries, SearchesAll, ListsAll, JoinsNames, LocatesAll, ErasesByConversation]
)
def test_a_store_that_mixes_owners_up_is_found_out(broken):
    begun = [Step(owner, "say_many", where, 0) for owner in (0, 1) for where in (0, 1)]
    deeds = ("keep", "kept", "search", "find", "locate", "listed", "say_many", "clear")
    script = Script(
        ("a:b", "a"), ("c", "b:c"), begun + [Step(n // 8 % 2, deeds[n % 8], 0, n % 3) for n in range(48)]
    )
    demand_apart(MemoryStore(), script)
    with pytest.raises(AssertionError):
        demand_apart(broken(), script)
