"""Conversations that move from one store to another."""

import json

import pytest
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.core.codec import Entry
from refold.core.errors import StoreError
from refold.core.event import Expiry
from refold.session.copy import copy, copy_settings
from refold.stores.memory import MemoryStore
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import Key, ToolSetting
from refold.testing.samples import ODD_NAMES, assert_view_is_fold, entries, user_message, verified
from session_contract import TINY


@pytest.fixture(params=["memory", "sqlite", "postgresql", "valkey"])
def target(request, tmp_path):
    match request.param:
        case "memory":
            store = MemoryStore()
        case "sqlite":
            store = SQLiteStore(tmp_path / "target.db")
        case "postgresql":
            store = refold.open("x", store=request.getfixturevalue("postgres_url")).store
        case "valkey":
            store = refold.open("x", store=request.getfixturevalue("valkey_url")).store
    yield store
    store.close()


@pytest.fixture
def source(tmp_path):
    store = SQLiteStore(tmp_path / "source.db")
    yield store
    store.close()


def rows(store):
    return list(store.conversations())


def demand_same(source, target):
    assert [row.key for row in rows(target)] == [row.key for row in rows(source)]
    for row in rows(source):
        assert list(target.read(row.key)) == list(source.read(row.key))
        verified(target, row.key)


def test_everything_arrives_to_the_byte_and_in_the_same_order(source, target):
    for name in ODD_NAMES:
        session = refold.open(name, store=source, owner=name, model="tiny", config=TINY)
        session.append(
            [refold.Message("user", (f"{name} words " * 40,)[0], id=name), user_message("and more")]
        )
    done = list(copy(source, target, rows(source)))
    assert all(one.problem is None and one.new == one.events for one in done)
    demand_same(source, target)


def test_a_copied_conversation_goes_on_where_it_was(source, target):
    first = refold.open("a", store=source, model="tiny", config=TINY)
    for n in range(80):
        first.append(user_message(f"{n} words " * 9))
        first.fit()
    first.undo()
    list(copy(source, target, rows(source)))
    second = refold.open("a", store=target, model="tiny", config=TINY)
    assert second.view() == first.view()
    second.append(user_message("and on"))
    assert_view_is_fold(second)


def test_forks_stay_forks_and_forks_of_erased_ones_are_whole(source, target):
    session = refold.open("a", store=source)
    session.append([user_message(str(n)) for n in range(10)])
    fork = session.fork("b", at=4)
    fork.append(user_message("of the fork"))
    fork.fork("c").append(user_message("of its fork"))
    list(copy(source, target, rows(source)))
    demand_same(source, target)
    assert [(row.key, row.parent, row.fork_at) for row in rows(target)] == [
        (row.key, row.parent, row.fork_at) for row in rows(source)
    ]


def test_a_fork_whose_parent_is_not_copied_is_copied_whole(source, target):
    session = refold.open("a", store=source)
    session.append([user_message(str(n)) for n in range(10)])
    session.fork("b", at=4)
    list(copy(source, target, [row for row in rows(source) if row.key.conversation == "b"]))
    (only,) = rows(target)
    assert (only.key.conversation, only.parent, only.next) == ("b", None, 5)
    assert list(target.read(only.key)) == list(source.read(only.key))


def test_what_is_there_is_not_copied_again_and_what_is_new_is(source, target):
    session = refold.open("a", store=source)
    session.append([user_message(str(n)) for n in range(1_200)])
    assert [one.new for one in copy(source, target, rows(source))] == [1_200]
    assert [one.new for one in copy(source, target, rows(source))] == [0]
    session.append([user_message("new"), user_message("newer")])
    assert [(one.events, one.new) for one in copy(source, target, rows(source))] == [(1_202, 2)]
    demand_same(source, target)


class Breaking(MemoryStore):
    """Fails at every nth append."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def append(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise StoreError("the line is cut")
        return super().append(*args, **kwargs)


def test_an_interrupted_copy_is_taken_up_where_it_ended(source):
    for name in "abc":
        refold.open(name, store=source).append([user_message(str(n)) for n in range(1_700)])
    target = Breaking(6)
    done = list(copy(source, target, rows(source)))
    assert [one.problem for one in done] == [None, "the line is cut", None]
    assert [one.events for one in done] == [1_700, 500, 1_700]
    again = list(copy(source, target, rows(source)))
    assert [one.new for one in again] == [0, 1_200, 0]
    for row in rows(source):
        assert list(target.read(row.key)) == list(source.read(row.key))


def test_another_conversation_of_that_name_is_left_alone(source, target):
    refold.open("a", store=source).append([user_message("one"), user_message("two")])
    refold.open("a", store=target).append([user_message("eins"), user_message("zwei"), user_message("drei")])
    before = list(target.read(Key("default", "a")))
    (done,) = copy(source, target, rows(source))
    assert "a different conversation" in done.problem
    assert list(target.read(Key("default", "a"))) == before


def test_damage_is_not_copied(target):
    class Damaged(MemoryStore):
        def read(self, *args, **kwargs):
            for link in super().read(*args, **kwargs):
                entry = link.entry
                yield link._replace(entry=Entry(*entry[:4], b'"altered"')) if entry.at == 7 else link

    source = Damaged()
    source.append(Key("default", "a"), entries(0, 20))
    (done,) = copy(source, target, rows(source))
    assert "#7" in done.problem
    assert done.events == 0


def test_settings_come_along(source, target):
    source.set_setting(ToolSetting("", "grep", Expiry(after_steps=3)))
    assert copy_settings(source, target) == 1
    assert list(target.settings()) == list(source.settings())


def test_the_command_copies_tells_and_can_be_run_again(tmp_path):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    for owner in ("ann", "bob"):
        with refold.open("chat", store=urls[0], owner=owner) as session:
            session.append([user_message("hello"), user_message("there")])
    run = CliRunner().invoke(app, ["copy", *urls, "--owner", "ann"])
    assert (run.exit_code, run.stdout) == (0, "1 conversation: 2 events copied\n")
    run = CliRunner().invoke(app, ["copy", *urls, "--json"])
    told = json.loads(run.stdout)
    assert [(one["owner"], one["new"]) for one in told["conversations"]] == [("ann", 0), ("bob", 2)]
    assert CliRunner().invoke(app, ["copy", urls[0], urls[0]]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--id", "nothing"], "There is no conversation 'nothing' in"),
        (["--id", "chat", "--id", "nothing"], "There is no conversation 'nothing' in"),
        (["--owner", "nobody"], "There are no conversations of owner 'nobody' in"),
        (["--id", "chat", "--owner", "nobody"], "There is no conversation 'chat' of owner 'nobody' in"),
    ],
)
def test_what_is_not_there_is_told_and_leaves_nothing_behind(tmp_path, options, told):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    with refold.open("chat", store=urls[0], owner="ann") as session:
        session.append(user_message("hello"))
    run = CliRunner().invoke(app, ["copy", *urls, *options])
    assert (run.exit_code, run.stdout) == (1, "")
    assert told in run.stderr
    assert [file.name for file in tmp_path.glob("two*")] == []


def test_messages_keep_the_time_at_which_they_were_said(source, target):
    session = refold.open("chat", store=source)
    session.append([user_message("hello"), user_message("there")])
    list(copy(source, target, rows(source)))
    times = [[one.timestamp for one in refold.open("chat", store=one).get_all()] for one in (source, target)]
    assert times[0] == times[1]
