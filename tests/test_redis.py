"""Redis and Valkey: the contract on real servers, and what is Redis's own."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import randrange
from select import select
from threading import Barrier, Thread
from urllib.parse import quote

import pytest
import redis
from benchmarks.stores import relayed
from redis.crc import key_slot

from passwords import ODD_PASSWORDS, shown_parts
from refold.core.codec import GENESIS, Entry, chain
from refold.core.errors import CorruptError, NotFoundError, SettingError, StoreError
from refold.core.event import Expiry
from refold.session.api import open
from refold.stores import redis_connection
from refold.stores.redis import from_url
from refold.stores.redis_index import STALE_US, SWEEP_EVERY, ConversationList, RedisKeys, encode_name, member
from refold.stores.shelf import SETTING
from refold.stores.store import Key, Snapshot, ToolSetting, open_store
from refold.testing import StoreContract
from refold.testing.samples import KEY, ODD_NAMES, entries, entry, user_message, verified
from servers import ALWAYS, Valkey, remove
from session_contract import SessionsContract
from uses import uses

OTHER = Key(KEY.owner, "another")
SECONDS = 30.0
"""How long something may take that happens soon."""
NAMES = RedisKeys("refold")
NUMBERS = ("ttl_s", "timeout_s", "db", "max_connections", "health_check_interval", "socket_connect_timeout")
ODD_NUMBERS = ("-1", "nan", "inf", "x", "", "1e30", "9" * 30)


# proves: B4d
class TestValkey(StoreContract, SessionsContract):
    @pytest.fixture
    def reopen(self, valkey_url):
        return partial(from_url, valkey_url)

    @pytest.fixture
    def store(self, reopen):
        store = reopen()
        yield store
        store.close()


# proves: B4d
class TestValkeyCluster(StoreContract, SessionsContract):
    """Three nodes, so that most keys are on another one than their neighbors."""

    test_a_session_opened_from_a_snapshot_equals_the_fold = None  # slow, and all in one slot

    @pytest.fixture
    def reopen(self, cluster):
        for node in cluster:
            node.client().flushall()
        return partial(from_url, f"{cluster[0].address}?cluster=1")

    @pytest.fixture
    def store(self, reopen):
        store = reopen()
        yield store
        store.close()


class Node(Valkey):
    def client(self, **options):
        return redis.Redis(unix_socket_path=str(self.socket), protocol=2, **options)

    @property
    def address(self):
        return f"redis://127.0.0.1:{self.port}"


@pytest.fixture(scope="session")
def cluster():
    with ExitStack() as stack:
        nodes = []
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "yes")
        for n in range(3):
            nodes.append(Node(folder(stack), *options, port=free_port()).start())
            stack.callback(nodes[-1].stop)
            slots = [16_384 * n // 3, 16_384 * (n + 1) // 3 - 1]
            nodes[n].client().execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
            nodes[n].client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[n].port)
        for node in nodes:
            until(partial(is_whole, node))
        yield nodes


def is_whole(node):
    info = node.client().cluster("INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"


@pytest.fixture
def server():
    """One to be killed, filled and forbidden things."""
    with ExitStack() as stack:
        node = Node(folder(stack), *ALWAYS).start()
        stack.callback(node.kill)
        yield node


@pytest.fixture
def raw(valkey_url, valkey):
    return redis.Redis(unix_socket_path=str(valkey.socket), protocol=2)


@pytest.fixture
def store(valkey_url):
    store = from_url(valkey_url)
    yield store
    store.close()


def folder(stack):
    path = Path(tempfile.mkdtemp(prefix="refold-valkey-"))  # a socket's path must be short
    stack.callback(remove, path)
    return path


def free_port():
    """A node of a cluster needs the one 10,000 above it too."""
    while True:
        port = randrange(20_000, 30_000)
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


def until(holds):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def fill(store, key):
    """A conversation with something under each of its keys."""
    store.append(key, [Entry(0, "said", "an id", b"[0]", b"{}"), entry(1)])
    store.append(key, entries(2, 4))
    store.save(key, "main", Snapshot(2, b"{}", b"digest"))
    store.keep_summary(key, b"a", b"1")
    store.set_cursor(key, "me", 1)
    store.acquire(key, "main", "me", 0.0, 1.0)


def expiries(raw, key):
    """When each of its keys expires; -1 is never, and those that are not there are left out."""
    found = [raw.pexpiretime(name) for name in NAMES.of(key)]
    return [at for at in found if at != -2]


# Names and slots


# proves: B4d
def test_all_keys_of_a_conversation_are_in_one_slot_whatever_it_is_called(store, raw):
    for name in ODD_NAMES:
        fill(store, Key(name, name))
        assert len(set(map(slot, NAMES.of(Key(name, name))))) == 1
    assert raw.zcard(NAMES.all) == len(ODD_NAMES)
    assert all(re.fullmatch(rb"refold:\{\w+\}:[\w:]+", name) for name in raw.keys("*"))


def slot(name):
    return key_slot(name.encode())


def test_stores_with_other_prefixes_do_not_meet(valkey_url):
    one, other = from_url(f"{valkey_url}?prefix=one"), from_url(f"{valkey_url}?prefix=two:2")
    one.append(KEY, entries(0, 2))
    one.keep_note("a", b"1")
    assert list(other.conversations()) == list(other.read(KEY)) == []
    assert other.note("a") is None


# Expiry


# proves: B4d
def test_all_keys_of_a_conversation_expire_at_the_same_moment(store, raw):
    fill(store, KEY)
    store.fork(KEY, OTHER, 3)
    store.keep_summary(OTHER, b"b", b"2")
    store.append(OTHER, [entry(3, id="another id")])
    week_ms = 7 * 24 * 3600 * 1000
    for key in (KEY, OTHER):
        ends = expiries(raw, key)
        assert len(ends) == 4
        assert len(set(ends)) == 1
        assert 0.98 * week_ms < ends[0] - time.time() * 1000 <= week_ms
    assert list(store.examine()) == []


def test_what_nobody_uses_is_gone_from_every_list(valkey_url, store):
    brief = from_url(f"{valkey_url}?ttl_s=0.3")
    store.append(OTHER, entries(0, 1))
    fill(brief, KEY)
    for fork in ("a fork", "a fork that stays"):
        brief.fork(KEY, Key(KEY.owner, fork), 2)
    list(store.read(Key(KEY.owner, "a fork that stays")))  # kept as long as its last user wants
    until(lambda: [row.key.conversation for row in store.conversations()] == ["a fork that stays", "another"])
    assert list(store.read(KEY)) == []
    assert store.find(KEY, ["an id"]) == store.saved(KEY) == {}
    assert (store.cursor(KEY, "me"), store.summary(OTHER, b"a")) == (None, None)
    assert next(store.conversations())[2:] == (2, None, 0)
    assert store.erase(OTHER) == []
    store.append(KEY, entries(0, 1, "anew"))
    assert next(store.conversations()).key == KEY


USES = {
    "append": lambda store: store.append(KEY, entries(4, 5)),
    "read": lambda store: list(store.read(KEY, 1, 2)),
    "read but": lambda store: list(store.read(KEY, but="said")),
    "resume": lambda store: store.resume(KEY, "main"),
    "fetch": lambda store: store.fetch(KEY, [1]),
    "wait": lambda store: store.wait(KEY, 9, 0.0),
    "cursor": lambda store: store.set_cursor(KEY, "me", 2),
    "summary": lambda store: store.keep_summary(KEY, b"b", b"2"),
}


# proves: B4d
@pytest.mark.parametrize("use", USES)
def test_using_a_conversation_puts_off_when_it_expires(store, raw, use):
    fill(store, KEY)
    before = grow_old(raw, 3_600_000 * 24 * 6)
    USES[use](store)
    (after,) = set(expiries(raw, KEY))
    assert after > before + 3_600_000 * 24 * 5


def grow_old(raw, ms):
    """As if nobody had used it for so long; when it expires now."""
    head = NAMES.of(KEY)[0]
    raw.hset(head, "used", int(raw.hget(head, "used")) - ms)
    for name in NAMES.of(KEY):
        raw.pexpireat(name, raw.pexpiretime(name) - ms)
    (ends,) = set(expiries(raw, KEY))
    return ends


def test_nothing_expires_where_it_was_told_not_to(valkey_url, store, raw):
    lasting = from_url(f"{valkey_url}?ttl_s=0")
    fill(lasting, KEY)
    fill(store, OTHER)
    assert set(expiries(raw, KEY)) == {-1}
    list(lasting.read(OTHER))
    assert set(expiries(raw, OTHER)) == {-1}
    list(store.read(KEY))
    assert set(expiries(raw, KEY)) != {-1}


def test_notes_and_settings_never_expire(valkey_url, raw):
    brief = from_url(f"{valkey_url}?ttl_s=0.1")
    brief.keep_note("a", b"1")
    brief.set_setting(ToolSetting("", "grep", Expiry(after_steps=1)))
    assert [raw.pttl(name) for name in (NAMES.value(None, "x")[0], NAMES.value(None, SETTING)[0])] == [-1, -1]


# The list of conversations


def listing(store):
    return ConversationList(store._connection, NAMES)


def test_who_stops_before_a_conversation_begins_leaves_nothing_to_see(store, raw):
    listing(store).enroll(KEY)
    assert list(store.conversations()) == []
    store.append(KEY, entries(0, 1))
    assert [row.key for row in store.conversations()] == [KEY]


def test_what_was_enrolled_too_long_ago_is_struck_off_and_may_not_begin(store, raw):
    order = int(listing(store).enroll(KEY)) - STALE_US - 1
    for name in (NAMES.all, NAMES.owned(member(KEY))):
        raw.zadd(name, {member(KEY): order})
    late = store._connection.call("append", NAMES.of(KEY), 0, 0, GENESIS, b"", order, *[b""] * 5, b"s", b"")
    assert late == [b"late", b"", b""]
    assert list(store.conversations()) == []
    assert raw.zcard(NAMES.all) == raw.zcard(NAMES.owned(member(KEY))) == 0
    store.append(KEY, entries(0, 1))
    assert [row.key for row in store.conversations(KEY.owner)] == [KEY]


def test_who_comes_second_leaves_the_list_as_it_was(store, raw):
    for key in (KEY, OTHER):
        store.append(key, entries(0, 1))
    with pytest.raises(Exception, match="goes on at 1"):
        store.append(KEY, entries(0, 1))
    assert [row.key for row in store.conversations()] == [OTHER, KEY]
    store.erase(KEY)
    assert raw.zcard(NAMES.all) == 1


def test_a_list_that_was_lost_comes_back_with_use(store, raw):
    for key in (KEY, OTHER):
        store.append(key, entries(0, 1))
    before = list(store.conversations())
    raw.delete(NAMES.all, NAMES.owned(member(KEY)))
    assert list(store.conversations()) == []
    store.append(OTHER, entries(1, 2))
    grow_old(raw, 3_600_000 * 24)
    list(store.read(KEY))
    assert list(store.conversations()) == before[1:]


def test_rows_of_what_expired_are_struck_off_as_others_begin(store, raw):
    expired = {member(Key(KEY.owner, f"expired {n}")): n for n in range(100)}
    for name in (NAMES.all, NAMES.owned(member(KEY))):
        raw.zadd(name, expired)
    for n in count():
        store.append(Key(KEY.owner, str(n)), entries(0, 1))
        if raw.zcard(NAMES.all) == raw.zcard(NAMES.owned(member(KEY))) == n + 1:
            return


def test_conversations_of_the_same_moment_have_an_order(store):
    keys = [Key(KEY.owner, str(n)) for n in range(450)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.append(key, entries(0, 1)), keys))
    rows = list(store.conversations())
    assert sorted(row.key for row in rows) == sorted(keys)
    created = [row.created for row in rows]
    assert created == sorted(set(created), reverse=True)


# Forks


def test_a_long_fork_is_whole_and_leaves_no_draft(store, raw):
    store.append(KEY, [entry(at, id=str(at)) for at in range(2_500)])
    store.fork(KEY, OTHER, 2_345)
    assert verified(store, OTHER) == [entry(at, id=str(at)) for at in range(2_345)]
    assert store.find(OTHER, ["7", "2344", "2345"]) == {"7": 7, "2344": 2344}
    assert not [name for name in raw.keys("*") if b"draft" in name]


def test_a_client_whose_clock_is_an_hour_late_can_fork(store, monkeypatch):
    store.append(KEY, entries(0, 3))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    store.fork(KEY, OTHER, 2)
    assert verified(store, OTHER) == entries(0, 2)


def test_a_draft_that_expires_before_it_is_done_is_refused(store, raw, monkeypatch):
    store.append(KEY, entries(0, 2_500))
    add = store._locations.add

    def expire(key, ids):
        raw.delete(*raw.keys("*draft*"), "nothing")
        add(key, ids)

    monkeypatch.setattr(store._locations, "add", expire)
    with pytest.raises(StoreError, match="expired before it was done; retry"):
        store.fork(KEY, OTHER, 2_345)
    assert verified(store, OTHER) == []


def forks_in(raw, key):
    return [name for name in raw.hkeys(NAMES.of(key)[0]) if name.startswith(b"f:")]


def test_a_fork_that_is_erased_is_forgotten_by_its_parent_and_those_below_are_not(store, raw):
    below = Key(KEY.owner, "below")
    store.append(KEY, entries(0, 2))
    store.fork(KEY, OTHER, 2)
    store.fork(OTHER, below, 1)
    assert store.erase(OTHER) == [below]
    assert forks_in(raw, KEY) == [b"f:" + listing(store).row(below).name]
    store.fork(KEY, OTHER, 2)
    store.fork(OTHER, Key(KEY.owner, "lower"), 1)
    assert store.erase(OTHER, with_forks=True) == []
    assert len(forks_in(raw, KEY)) == 1
    store.erase(KEY, with_forks=True)
    assert list(store.conversations()) == []


def test_forks_that_expired_are_forgotten_as_others_are_made(store, raw):
    store.append(KEY, entries(0, 1))
    young = int(listing(store).enroll(OTHER))
    names = {order: b"f:" + encode_name(OTHER, b"%d" % order) for order in (1, 2, young)}
    raw.hset(NAMES.of(KEY)[0], mapping=dict.fromkeys(names.values(), ""))
    raw.set(NAMES.clock, (young // SWEEP_EVERY + 1_000_000) * SWEEP_EVERY - 1)  # it is time to look
    fork = Key(KEY.owner, "fork")
    store.fork(KEY, fork, 1)
    made = b"f:" + listing(store).row(fork).name
    assert set(forks_in(raw, KEY)) == {names[young], made}  # the young one may still be made
    assert store.erase(KEY) == [fork]


# Located


def said_in(raw, id):
    return raw.zrange(NAMES.located(KEY.owner, id), 0, -1)


def test_what_was_erased_leaves_its_name_nowhere(valkey_url, raw):
    lasting = from_url(f"{valkey_url}?ttl_s=0")
    lasting.append(KEY, [entry(at, id=f"~{at}" if at % 3 else str(at)) for at in range(1_500)])
    lasting.fork(KEY, OTHER, 3)
    lasting.erase(KEY)
    assert len(raw.keys("*:said:*")) == 2
    assert said_in(raw, "~1") == said_in(raw, "~2") == [b"another"]
    lasting.erase(OTHER)
    assert raw.keys("*") == [NAMES.clock.encode()]


@pytest.mark.parametrize("options", ["", "?ttl_s=0"])
def test_looking_for_an_id_puts_off_when_it_is_forgotten(valkey_url, raw, options):
    store, name = from_url(valkey_url + options), NAMES.located(KEY.owner, "~x")
    store.append(KEY, [entry(0, id="~x")])
    before = raw.pttl(name)
    raw.pexpire(name, 100_000)
    assert store.locate(KEY.owner, ["~x"]) == {"~x": (KEY, 0)}
    assert (before == -1) == (options == "?ttl_s=0")
    assert raw.pttl(name) == -1 if before == -1 else raw.pttl(name) > 100_000


def test_what_a_fork_shares_is_located_there_when_all_that_said_it_expired(store, raw):
    middle, lowest = Key(KEY.owner, "middle"), Key(KEY.owner, "lowest")
    store.append(KEY, [entry(0, id="~x")])
    store.fork(KEY, middle, 1)
    store.append(middle, [entry(1, id="~y")])
    store.fork(middle, lowest, 2)
    store.append(lowest, [entry(2, id="~z")])
    places = {"~y": (middle, 1), "~z": (lowest, 2)}
    for gone, found in (
        (None, {"~x": (KEY, 0), **places}),
        (middle, {"~x": (KEY, 0), "~y": (lowest, 1), "~z": (lowest, 2)}),
        (KEY, {id: (lowest, at) for at, id in enumerate(("~x", "~y", "~z"))}),
    ):
        if gone is not None:
            raw.delete(*NAMES.of(gone))
        assert store.locate(KEY.owner, ["~x", "~y", "~z"]) == found


def test_nothing_is_acknowledged_that_cannot_be_located(store, raw):
    raw.set(NAMES.located(KEY.owner, "~x"), "something else")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store.append(KEY, [entry(0, id="~x")])
    assert verified(store, KEY) == []
    store.append(KEY, [entry(0, id="~y")])
    assert store.locate(KEY.owner, ["~y"]) == {"~y": (KEY, 0)}


def test_names_of_what_is_not_there_are_struck_off_when_it_is_too_late_to_come(store, raw):
    store.append(KEY, [entry(0, id="~x")])
    store.append(OTHER, entries(0, 1))
    old, now = (int(time.time() - ago_s) for ago_s in (STALE_US / 1_000_000 + 60, 0))
    name = NAMES.located(KEY.owner, "~x")
    raw.zadd(name, {KEY.conversation: old, "another": old, "expired": old, "coming": now})
    assert store.locate(KEY.owner, ["~x"]) == {"~x": (KEY, 0)}
    assert set(said_in(raw, "~x")) == {KEY.conversation.encode(), b"coming"}


def test_an_id_that_many_said_takes_two_round_trips_to_say_and_three_to_locate(valkey_url):
    keys = [Key(KEY.owner, str(n)) for n in range(9)]
    ids = ["~x", "~not there", *(f"~{key.conversation}" for key in keys)]
    with relayed(valkey_url) as (url, relay):
        store = from_url(url)
        for key in keys:
            store.append(key, [entry(0, id="~x"), entry(1, id=f"~{key.conversation}")])
        digest = store.append(keys[0], [entry(2)])
        before = relay.round_trips
        store.append(keys[0], [entry(3, id="~y")], after=digest)
        assert relay.round_trips == before + 2
        assert store.locate(KEY.owner, ids).keys() == set(ids) - {"~not there"}
        assert relay.round_trips == before + 2 + 3
        store.close()


# When things break


def test_a_server_that_lost_the_scripts_is_given_them_again(store, raw):
    store.append(KEY, entries(0, 1))
    raw.script_flush()
    store.append(KEY, entries(1, 2))
    assert verified(store, KEY) == entries(0, 2)


def test_a_server_that_never_keeps_the_scripts_is_given_up(store, raw, monkeypatch):
    loads = list[None]()
    monkeypatch.setattr(redis_connection, "_load_scripts", lambda client: loads.append(None))
    raw.script_flush()
    with pytest.raises(StoreError, match="cannot be used: No matching script"):
        store.append(KEY, entries(0, 1))
    assert len(loads) == 2


def test_a_user_who_may_not_run_scripts_is_told(server):
    client = server.client()
    client.execute_command("ACL", "SETUSER", "me", "on", ">secret", "~refold:*", "+@all", "-evalsha")
    store = from_url(f"unix://me:secret@{server.socket}")
    with pytest.raises(StoreError, match="does not allow it"):
        list(store.read(KEY))


def test_a_user_needs_no_rights_but_those_in_the_docs(server):
    rights = ("~refold:*", "+@read", "+@write", "+@connection", "-@dangerous", "+time", "+waitaof")
    ways = ("+evalsha", "+script|load")
    page = (Path(__file__).parents[1] / "docs/stores/redis.md").read_text()
    assert all(f"`{right}`" in page for right in (*rights, *ways, "+info"))
    server.client().execute_command("ACL", "SETUSER", "me", "on", ">secret", *rights, *ways, "+info")
    store = from_url(f"unix://me:secret@{server.socket}?wait_aof=1")
    fill(store, KEY)
    store.append(OTHER, [entry(0, id="~x")])
    assert store.locate(KEY.owner, ["~x"]) == {"~x": (OTHER, 0)}
    deeds = uses(store)
    for name in [*deeds.keys() - {"append", "erase"}, "erase"]:
        deeds[name]()
    assert store.erase(OTHER) == []


def test_a_store_goes_on_after_its_server_was_killed(server):
    store = from_url(server.url)
    digest = store.append(KEY, entries(0, 2))
    server.kill()
    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(store.append, KEY, entries(2, 3), after=digest)
        server.start()
        assert appending.result() == chain(digest, entry(2))
    assert verified(store, KEY) == entries(0, 3)


def test_a_server_that_stays_away_is_named_and_nothing_waits_for_ever(server):
    store = from_url(f"{server.url}?timeout_s=0.2")
    digest = store.append(KEY, entries(0, 1))
    server.kill()
    with pytest.raises(StoreError, match=r"did not answer for 0.2 s.*Nothing acknowledged is lost"):
        store.append(KEY, entries(1, 2))
    with pytest.raises(StoreError, match="the last write may or may not be stored"):
        store.append(KEY, entries(1, 2), after=digest)
    reads = (
        "read",
        "resume",
        "fetch",
        "find",
        "locate",
        "conversations",
        "cursor",
        "note",
        "settings",
        "summary",
    )
    for name in (*reads, "saved", "leases", "behind", "wait", "examine"):
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            uses(store)[name]()
        assert "may or may not" not in str(caught.value)
    with pytest.raises(StoreError, match="cannot be reached"):
        from_url(server.url)


def test_a_server_that_was_waited_for_in_vain_is_not_waited_for_again_until_it_answers(server):
    store = from_url(f"{server.url}?timeout_s=0.2")
    chat = open("a", store=store, model="gpt-5")
    chat.append(user_message("apple"))
    server.kill()
    with pytest.raises(StoreError, match="did not answer"):
        list(store.read(KEY))
    store._connection.timeout_s = 100
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(StoreError, match="cannot be reached"):
            pool.submit(chat.search, "apple").result(SECONDS)
        pool.submit(chat.close).result(SECONDS)
        server.start()
        assert len(verified(store, chat.key)) == 1
        server.kill()
        waiting = pool.submit(verified, store, chat.key)
        server.start()
        assert len(waiting.result(SECONDS)) == 1


def test_a_server_that_accepts_and_never_answers_is_given_up():
    for options in ("", "&cluster=1"):
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreError, match="imeout"):
            from_url(f"redis://127.0.0.1:{silent.getsockname()[1]}?timeout_s=0.2{options}")


def test_a_peer_that_answers_no_more_is_given_up(server):
    cutter = Cutter(server.folder, server.socket)
    store = from_url(f"unix://{cutter.path}?timeout_s=0.3")
    store.append(KEY, entries(0, 1))
    cutter.hangs = True
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreError, match=r"did not answer for 0.3 s"):
        pool.submit(store.append, KEY, entries(1, 2)).result(SECONDS)
    cutter.hangs = False
    assert verified(store, KEY)[:1] == entries(0, 1)
    cutter.close()


class Cutter:
    """Between a store and its server; cuts connections when told: before a command, or before its answer."""

    def __init__(self, folder, target):
        self.path, self._target = folder / "cutter.sock", target
        self.cuts, self.hangs = [], False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, client):
        cut = None
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(str(self._target))
            while True:
                for one in select([client, server], [], [])[0]:
                    data = one.recv(1 << 20)
                    if one is client:
                        cut = self.cuts.pop(0) if self.cuts else None
                    if not data or cut == ("before" if one is client else "after"):
                        return
                    if not self.hangs:
                        (server if one is client else client).sendall(data)

    def close(self):
        self._listener.close()


@pytest.mark.parametrize("wait", ["0", "1"])
@pytest.mark.parametrize("cuts", [["before"], ["after"], ["before", "before"], ["after", "after"]])
def test_an_append_whose_connection_is_cut_is_stored_once(server, cuts, wait):
    cutter = Cutter(server.folder, server.socket)
    store = from_url(f"unix://{cutter.path}?wait_aof={wait}")
    digest = store.append(KEY, entries(0, 2))
    cutter.cuts += cuts
    digest = store.append(KEY, [entry(2, id="an id"), entry(3)], after=digest)
    cutter.cuts += cuts
    with pytest.raises(Exception, match="goes on at 4"):
        store.append(KEY, [entry(2, id="an id"), entry(7)])
    cutter.cuts += cuts
    store.fork(KEY, OTHER, 3)
    assert not cutter.cuts
    assert verified(store, KEY) == [*entries(0, 2), entry(2, id="an id"), entry(3)]
    assert [link.digest for link in store.read(KEY)][-1] == digest
    assert [row.key for row in store.conversations()] == [OTHER, KEY]
    cutter.close()


def test_what_passes_is_waited_for(server):
    store, client = from_url(server.url), server.client()
    digest = store.append(KEY, entries(0, 1))
    client.config_set("busy-reply-threshold", 1)
    with ThreadPoolExecutor(3) as pool:
        busy = pool.submit(server.client(socket_timeout=None).eval, "while true do end", 0)
        until(lambda: is_busy(client))
        appending = pool.submit(store.append, KEY, entries(1, 2), after=digest)
        client.script_kill()
        digest = appending.result()
        with pytest.raises(redis.ResponseError):
            busy.result()
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        appending = pool.submit(store.append, KEY, entries(2, 3), after=digest)
        client.execute_command("REPLICAOF", "NO", "ONE")
        appending.result()
    assert verified(store, KEY) == entries(0, 3)


def is_busy(client):
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_a_full_server_says_so_and_can_still_be_read_and_emptied(server):
    store, client = from_url(server.url), server.client()
    fill(store, KEY)
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreError, match=r"is full \(maxmemory\): nothing was stored"):
        store.append(KEY, entries(4, 5))
    with pytest.raises(StoreError, match="is full"):
        store.append(OTHER, entries(0, 1))
    assert len(verified(store, KEY)) == 4
    assert [row.key for row in store.conversations()] == [KEY]
    assert store.erase(KEY) == []
    assert list(store.conversations()) == []


def test_the_doctor_is_told_of_settings_that_lose_data(server, store):
    assert list(store.examine()) == []
    other, client = from_url(server.url), server.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    assert [re.split("[:,]", flaw.problem)[0] for flaw in other.examine()] == [
        "maxmemory-policy is allkeys-lru",
        "appendonly is off",
    ]
    for name, value in (
        ("maxmemory-policy", "noeviction"),
        ("appendonly", "yes"),
        ("appendfsync", "everysec"),
    ):
        client.config_set(name, value)
    assert list(other.examine()) == []
    (flaw,) = from_url(f"{server.url}?wait_aof=1").examine()
    assert flaw.problem.startswith("WAITAOF of Valkey answers before the disk does")


def test_a_conversation_of_which_keys_were_evicted_is_refused_and_found(store, raw):
    fill(store, KEY)
    raw.delete(NAMES.of(KEY)[1])
    with pytest.raises(CorruptError, match="some of its keys were evicted"):
        store.append(KEY, entries(4, 5))
    assert [flaw.problem for flaw in store.examine()] == ["its head and its log do not belong together"]
    store.erase(KEY)
    fill(store, KEY)
    raw.persist(NAMES.of(KEY)[2])
    assert [flaw.problem for flaw in store.examine()] == ["its keys do not expire together"]


# Durability and round trips


def test_a_conversation_that_is_not_certain_to_be_listed_is_not_begun(server):
    hopeful = from_url(f"{server.url}?wait_aof=1,1&timeout_s=2")
    with pytest.raises(StoreError, match="read it before you write it again"):
        hopeful.append(KEY, entries(0, 1))
    store = from_url(server.url)
    assert verified(store, KEY) == []
    store.append(KEY, entries(0, 1))
    assert verified(hopeful, KEY) == entries(0, 1)


def test_an_answer_has_an_end_in_bytes(store):
    large = [Entry(at, "said", None, b"{}", os.urandom(1_000_000)) for at in range(25)]
    large += [Entry(at, "noted", None, b"{}", os.urandom(1_000_000)) for at in range(25, 50)]
    store.append(KEY, large)
    keys = NAMES.of(KEY)
    for verb, args in (("read", (0, 0, "", b"")), ("read", (0, 0, "", b"said")), ("resume", (0, b"main"))):
        answer = store._connection.call(verb, keys, *args)
        assert 8_000_000 <= sum(map(len, answer)) <= 9_100_000
    assert [link.entry for link in store.read(KEY)] == large
    assert [link.entry for link in store.read(KEY, but="said")] == large[25:]
    assert [link.entry for link in store.resume(KEY, "main")[1]] == large
    fetched = store._connection.call("fetch", keys, 0, *range(50))
    assert 8_000_000 <= sum(map(len, fetched)) <= 9_100_000
    assert store.fetch(KEY, [*range(50), 99, 10**30]) == dict(enumerate(large))
    store.fork(KEY, OTHER, 40)
    assert [link.entry for link in store.read(OTHER)] == large[:40]


def test_an_append_waits_until_it_is_on_disk_if_told_to(server):
    store, client = from_url(f"{server.url}?wait_aof=1"), server.client()
    store.append(KEY, entries(0, 1))
    before = waits(client)
    store.append(KEY, entries(1, 2))
    assert waits(client) == before + 1
    hopeful = from_url(f"{server.url}?wait_aof=1,1&timeout_s=2")
    with pytest.raises(StoreError, match="It may be stored: read it"):
        hopeful.append(KEY, entries(2, 3))
    assert verified(store, KEY) == entries(0, 3)
    client.config_set("appendonly", "no")
    with pytest.raises(StoreError, match=r"cannot wait_aof, which needs .* 7\.2 and appendonly yes"):
        from_url(f"{server.url}?wait_aof=1")


def waits(client):
    return client.info("commandstats").get("cmdstat_waitaof", {"calls": 0})["calls"]


@pytest.mark.parametrize("options", ["", "?wait_aof=1"])
def test_what_is_done_often_takes_one_round_trip(server, options):  # nobody else uses this server
    raw = server.client()
    store = from_url(server.url + options)
    digest = store.append(KEY, [entry(at, id=str(at)) for at in range(900)])
    store.save(KEY, "main", Snapshot(500, b"{}", b"digest"))
    lease = store.acquire(KEY, "main", "me", 0.0, 1.0)
    deeds = {
        "append": lambda: store.append(KEY, [entry(900, id="an id")], after=digest, lease=lease),
        "resume": lambda: list(store.resume(KEY, "main")[1]),
        "fetch": lambda: store.fetch(KEY, range(0, 900, 3)),
        "read": lambda: list(store.read(KEY, 10, 900)),
        "find": lambda: store.find(KEY, ["1", "899", "not there"]),
        "acquire": lambda: store.acquire(KEY, "main", "me", 0.0, 1.0),
        "save": lambda: store.save(KEY, "main", Snapshot(600, b"{}", b"digest")),
        "summary": lambda: store.keep_summary(KEY, b"a", b"1"),
    }
    trips = {name: round_trips(raw, deed) for name, deed in deeds.items()}
    assert trips == {**dict.fromkeys(deeds, 1), "acquire": 2, "summary": 4}
    assert round_trips(raw, lambda: store.append(OTHER, entries(0, 1))) == 2
    assert round_trips(raw, lambda: list(store.conversations())) == 3  # a page, its heads, no more pages


def round_trips(raw, deed):
    """How often the server had something to read; the larger commands come in one piece here."""
    before = raw.info("stats")["total_reads_processed"]
    deed()
    return raw.info("stats")["total_reads_processed"] - before - 1


# Processes


def append_elsewhere(url, start, stop):
    from_url(url).append(KEY, entries(start, stop))


def test_whoever_waits_is_woken_by_another_process(store, valkey_url):
    store.append(KEY, entries(0, 1))
    with ThreadPoolExecutor(1) as threads, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        waiting = threads.submit(store.wait, KEY, 1, SECONDS)
        pool.submit(append_elsewhere, valkey_url, 1, 2).result()
        assert waiting.result()


def test_a_closed_store_is_used_no_more(store, valkey_url):
    store.append(KEY, entries(0, 1))
    store.close()
    store.close()
    for use in uses(store).values():
        with pytest.raises(StoreError, match="was closed; open the store again"):
            use()
    assert verified(from_url(valkey_url), KEY) == entries(0, 1)


def test_a_session_may_be_closed_twice(valkey_url):
    chat = open("a", store=valkey_url, model="gpt-5")
    chat.append({"role": "user", "content": "Hello."})
    chat.close()
    chat.close()


def test_threads_that_come_first_together_share_their_connections(store):
    store._connection.after_fork()
    both = Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: (both.wait(30), store._connection._connected())[1], range(2))
    assert one is other


def test_a_store_can_be_used_on_both_sides_of_a_fork(store):
    store.append(KEY, entries(0, 1))
    pid = os.fork()
    if pid == 0:
        try:
            store.append(KEY, entries(1, 2))
        finally:
            os._exit(0)
    store.append(OTHER, entries(0, 1))
    assert os.waitpid(pid, 0)[1] == 0
    store.append(KEY, entries(2, 3))
    assert verified(store, KEY) == entries(0, 3)


# Opening


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("ttl_s=-1", "seconds, or 0 for never"),
        ("ttl_s=", "seconds, or 0 for never"),
        ("timeout_s=soon", "timeout_s=soon is not allowed"),
        ("timeout_s=0.0", "expected seconds"),
        ("wait_aof=2", "1, or 1,2 for two replicas besides"),
        ("cluster=yes", "0 or 1"),
        ("prefix={a}", "letters, digits"),
        ("retries=3", "'retries' is not known; its options are cluster, prefix,"),
        ("password=secret", "'password' is not known"),
        ("db=one", "expected the number of a database"),
        ("cluster=1", "reached by redis://"),
        *((f"{name}={value}", f"{name}={value} is not allowed") for name in NUMBERS for value in ODD_NUMBERS),
        ("max_connections=0", "a number above 0"),
        ("socket_connect_timeout=0", "expected seconds"),
        ("timeout_s=0.0001", "expected 0.001 to 1,000,000"),
        ("client_name=", "expected a value"),
    ],
)
def test_options_that_are_not_allowed_are_named(valkey_url, options, problem):
    with pytest.raises(SettingError, match=problem.replace("(", ".")) as caught:
        open_store(f"{valkey_url}?{options}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "rest",
    [
        "/abc",
        "/-1",
        "/1/2",
        "/0x1",
        "/3?cluster=1",
        "?cluster=1&db=3",
        "/0?prefix=a#b",
        ":abc",
        ":99999",
        "/0#1@a",
    ],
)
def test_an_address_that_says_something_else_than_it_seems_is_refused(rest):
    with pytest.raises(SettingError, match=r"number of a database|only database 0|port|host begins"):
        open_store(f"redis://localhost{rest}")


@pytest.mark.parametrize("password", ODD_PASSWORDS)
def test_no_part_of_an_odd_password_is_shown_whether_it_is_encoded_or_not(password):
    for url in (
        f"redis://me:{password}@localhost:1/0",
        f"redis://:{quote(password, safe='')}@localhost:1",
        f"unix://me:{password}@/no/where.sock",
        f"redis://me:s@localhost:1/x?password={password}",
    ):
        with pytest.raises((StoreError, SettingError)) as caught:
            open_store(url)
        assert shown_parts(password, caught.value) == set()


def test_characters_that_end_a_password_are_told_with_how_to_write_them():
    for password in ("p@ss", "p/ss", "p?ss", "p#ss", "p[ss"):
        with pytest.raises(SettingError, match=r"percent-encode .* @ is %40"):
            open_store(f"redis://me:{password}@localhost:1/0")


def test_an_odd_password_gets_in_where_it_is_encoded(server):
    server.client().config_set("requirepass", "p@ss/w?rd#1: 100%")
    open_store(f"unix://:{quote('p@ss/w?rd#1: 100%', safe='')}@{server.socket}").close()


def test_places_that_no_number_of_the_server_holds_are_not_there(store):
    store.append(KEY, entries(0, 2))
    for far in (1 << 53, 1 << 64, 10**30):
        assert list(store.read(KEY, far)) == list(store.read(KEY, far, far + 1)) == []
        assert [link.entry for link in store.read(KEY, -far, far)] == entries(0, 2)
        assert [*store.read(KEY, 0, far, but="noted")] == []
        assert store.fetch(KEY, [far, -far]) == {}
        assert not store.wait(KEY, far, 0.0)
        chat = open("a", store=store, model="gpt-5")
        for deed in (chat.pin, chat.restore, chat.expand, chat.undo, chat.view):
            with pytest.raises(NotFoundError):
                deed(far)


def test_options_of_the_driver_are_passed_on(valkey_url, raw):
    store = open_store(f"{valkey_url}?db=3&client_name=somebody&ttl_s=60&timeout_s=2.5")
    store.append(KEY, entries(0, 1))
    assert any(one["name"] == "somebody" for one in raw.client_list())
    assert raw.dbsize() == 0


def test_a_wrong_password_is_refused_at_once_and_never_shown(server):
    server.client().config_set("requirepass", "correct")
    for url in (f"unix://:hunter2@{server.socket}", f"unix://me:hunter2@{server.socket}", server.url):
        with pytest.raises(StoreError, match="refuses the user name or the password") as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)
    open_store(f"unix://:correct@{server.socket}").close()


def test_a_server_that_is_not_there_is_named_at_once():
    for url in (
        "unix:///nowhere/at.sock",
        "redis://me:hunter2@127.0.0.1:1/0",
        "redis://127.0.0.1:1?cluster=1",
    ):
        with pytest.raises(StoreError, match=r"cannot be reached: .*check the URL") as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)


def test_without_the_driver_the_extra_is_named():
    code = """if True:
        import sys
        sys.modules["redis"] = None
        from refold.core.errors import SettingError
        from refold.stores.store import open_store
        try:
            open_store("redis://")
        except SettingError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'pip install "refold[redis]"' in done.stdout


# Clusters


def test_a_cluster_is_told_from_a_server(cluster, server, valkey_url):
    store = open_store(cluster[0].address)
    with pytest.raises(StoreError, match="add cluster=1"):
        [store.append(Key("", str(n)), entries(0, 1)) for n in range(99)]
    with ExitStack() as stack:
        alone = Node(folder(stack), port=free_port()).start()
        stack.callback(alone.stop)
        with pytest.raises(StoreError, match="leave cluster=1 out"):
            open_store(f"{alone.address}?cluster=1")


def test_a_slot_may_move_while_it_is_in_use(cluster):
    store = open_store(f"{cluster[0].address}?cluster=1&wait_aof=1")
    names = NAMES.of(KEY)
    store.erase(KEY)
    digest = store.append(KEY, entries(0, 2))
    number = slot(names[0])
    source = next(node for node in cluster if node.client().cluster("COUNTKEYSINSLOT", number))
    target = next(node for node in cluster if node is not source)
    ids = {node: node.client().execute_command("CLUSTER", "MYID").decode() for node in cluster}
    target.client().execute_command("CLUSTER", "SETSLOT", number, "IMPORTING", ids[source])
    source.client().execute_command("CLUSTER", "SETSLOT", number, "MIGRATING", ids[target])
    with ThreadPoolExecutor(1) as pool:
        there = source.client().execute_command("CLUSTER", "GETKEYSINSLOT", number, 99)
        move(source, target, there[:1])
        appending = pool.submit(store.append, KEY, entries(2, 3), after=digest)  # its keys are in two places
        move(source, target, there[1:])
        for node in (target, source):
            node.client().execute_command("CLUSTER", "SETSLOT", number, "NODE", ids[target])
        digest = appending.result()
    store.append(KEY, entries(3, 4), after=digest)
    assert verified(store, KEY) == entries(0, 4)
    assert target.client().cluster("COUNTKEYSINSLOT", number) == len(there)


def move(source, target, names):
    if names:
        source.client().execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)


def test_a_session_on_a_cluster_is_a_session(cluster):
    url = f"{cluster[1].address}?cluster=1"
    with open("a session", store=url, model="gpt-5") as chat:
        chat.append([user_message(f"message {n}") for n in range(20)])
        assert [one.message.text for one in open("a session", store=url).get_all()][:2] == [
            "message 0",
            "message 1",
        ]
        assert [hit.at for hit in chat.search("message 7")][:1] == [7]
