"""PostgreSQL for real: the contract, and what only a server can do to a store."""

import os
import re
import signal
import socket
import tempfile
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier, Event, Thread
from urllib.parse import quote
from uuid import uuid4

import psycopg
import pytest
from benchmarks.stores import Relay, relayed

import refold
from passwords import ODD_PASSWORDS, shown_parts
from proxy import Proxy
from refold.core.codec import GENESIS, Entry, chain
from refold.core.errors import (
    ConflictError,
    CorruptError,
    NewerError,
    NotFoundError,
    SettingError,
    StoreError,
)
from refold.core.event import Expiry
from refold.core.query import SearchText, parse_query
from refold.stores import sql
from refold.stores.postgres import PostgresStore, from_url
from refold.stores.postgres_index import MAX_TERMS_BYTES, key_digest, owner_digest
from refold.stores.store import Key, ToolSetting, open_store
from refold.testing import StoreContract
from refold.testing.samples import KEY, ODD_NAMES, entries, entry, user_message, verified
from servers import Postgres, remove
from session_contract import SessionsContract
from uses import uses

names = count()
SIZES = ("pool_size", "timeout_s", "statement_timeout_s")
OFF = ("0", "-1", "1" + "0" * 30)
PAGES = Path(__file__).parents[1] / "docs" / "stores"


@pytest.fixture(scope="module")
def database(postgres):
    """One database for many tests: each has a schema of its own in it, which is made faster."""
    return postgres.database()


@pytest.fixture
def reopen(database):
    return partial(PostgresStore, database, schema=f"test {next(names)}")


@pytest.fixture
def store(reopen):
    store = reopen()
    yield store
    store.close()


# proves: B4c
class TestPostgres(StoreContract, SessionsContract):
    @pytest.fixture
    def reopen(self, reopen):
        return reopen


def run(store, text, *values):
    """As an administrator would, beside the store."""
    with psycopg.connect(store.pool.options.url, autocommit=True) as connection:
        store.pool.configure(connection)
        cursor = connection.execute(text, values or None)
        return cursor.fetchall() if cursor.description else []


# Opening


def test_a_url_opens_a_store_and_its_options_are_taken_out(postgres_url):
    for scheme in ("postgresql", "postgres"):
        url = postgres_url.replace("postgresql", scheme)
        options = "&pool_size=3&timeout_s=2.5&statement_timeout_s=7&schema=Od%22d%20one&application_name=mine"
        store = open_store(url + options)
        ((name, path, statement, lock),) = run(
            store,
            "SELECT current_setting('application_name'), current_setting('search_path'),"
            " current_setting('statement_timeout'), current_setting('lock_timeout')",
        )
        assert (path, statement, lock) == ('"Od""d one"', "7s", "2500ms")
        assert name == "mine"
        assert store.pool.options.pool_size == 3
        store.close()
    assert [row.key for row in from_url(postgres_url).conversations()] == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        *(
            (f"{name}={value}", f"{name}={value} is not allowed; expected a number")
            for name in SIZES
            for value in ("x", "", "1e", "nan")
        ),
        *(
            (f"{name}={value}", rf"{name}=\S+ is not allowed; expected \S+ to 1,000,000")
            for name in SIZES
            for value in OFF
        ),
        ("pool_size=1.5", "pool_size=1.5 is not allowed; expected a number"),
        ("timeout_s=0.0001", "expected 0.001 to 1,000,000"),
        ("schema=a%00b", "a schema has 1 to 63 bytes, no NUL"),
        ("schema=%24user", r"is not \$user"),
        ("schema=", r"a schema has 1 to 63 bytes.*pool_size, timeout_s, statement_timeout_s and schema"),
        (f"schema={'é' * 32}", "a schema has 1 to 63 bytes"),
        ("poolsize=3", r"poolsize is not an option.*pool_size, timeout_s, statement_timeout_s and schema"),
    ],
)
def test_an_option_that_is_not_known_or_not_allowed_is_refused(postgres_url, query, problem):
    with pytest.raises(SettingError, match=problem):
        open_store(f"{postgres_url}&{query}")


@pytest.mark.parametrize(
    "query",
    ["port=abc", "port=99999", "sslmode=bogus", "connect_timeout=x", "service=nobody", "options=-c%20a%3D1"],
)
def test_what_can_never_work_is_told_at_once(postgres_url, query):
    with pytest.raises(StoreError, match=r"cannot be reached: .*check the URL and the server"):
        open_store(f"{postgres_url}&{query}&timeout_s=300")


def test_a_server_without_encryption_is_told_at_once_where_that_is_demanded(postgres, postgres_url):
    with Proxy(postgres.socket) as between:
        name = postgres_url.partition("?")[0].rpartition("/")[2]
        url = f"postgresql://postgres@127.0.0.1:{between.port}/{name}?timeout_s=300"
        with pytest.raises(StoreError, match="does not support SSL"):
            open_store(f"{url}&sslmode=require")
        open_store(url).close()


@pytest.mark.parametrize("port", ["abc", "99999", "-1", "1,localhost:x"])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(SettingError, match="a port is a number up to 65535"):
        open_store(f"postgresql://localhost:{port}/x")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cr3t@localhost:1/x?timeout_s=0.2",
        "postgresql://me:s3cr3t@localhost/x?bad=1",
        "postgresql://me:s3cr3t@localhost/x?pool_size=0&password=s3cr3t",
        "postgresql://me:s3cr3t%zz@localhost/x",
        "postgresql://me:s3cr3t?s3cr3t/s3cr3t@localhost:1/x?timeout_s=0.2",
        "postgresql://localhost:1/x?password=s3cr3t&timeout_s=0.2",
        "postgresql://no.such.host.invalid/x?password=s3cr3t&timeout_s=0.2",
    ],
)
def test_no_error_shows_a_password(url):
    with pytest.raises((StoreError, SettingError)) as caught:
        open_store(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cr3t" not in str(error)
        error = error.__cause__


@pytest.mark.parametrize("password", ODD_PASSWORDS)
def test_no_part_of_an_odd_password_is_shown_whether_it_is_encoded_or_not(password):
    for url in (
        f"postgresql://me:{password}@localhost:1/x",
        f"postgresql://me:{quote(password, safe='')}@localhost:1/x",
        f"postgresql://me:s@localhost:1/x?password={password}",
    ):
        with pytest.raises((StoreError, SettingError)) as caught:
            open_store(url)
        assert shown_parts(password, caught.value) == set()


def test_characters_that_end_a_password_are_told_with_how_to_write_them():
    for password in ("p@ss", "p/ss", "p?ss", "p#ss", "p%ss", "p[ss"):
        with pytest.raises(SettingError, match=r"percent-encode .* @ is %40"):
            open_store(f"postgresql://me:{password}@localhost:1/x")


def test_a_server_that_asks_for_a_password_gets_the_right_one():
    folder, password = Path(tempfile.mkdtemp(prefix="refold-scram-")), "p@ss/w?rd#1: 100%"
    server = Postgres(folder, "fsync=off", password=password).start()
    try:
        url = server.database()
        with psycopg.connect(url) as connection:
            assert connection.pgconn.used_password
        open_store(url).close()
        for given, problem in {":XQ7%40": "password authentication failed", "": "no password"}.items():
            with pytest.raises(StoreError, match=f"cannot be reached.*{problem}") as caught:
                open_store(url.replace(f":{quote(password, safe='')}", given) + "&timeout_s=300")
            assert shown_parts("XQ7@", caught.value) == set()
    finally:
        server.kill()
        remove(folder)


def test_a_wrong_password_or_database_is_told_at_once(postgres, postgres_url):
    with pytest.raises(StoreError, match=r'cannot be reached.*"nobody" does not exist'):
        PostgresStore(postgres.url_of("nobody"), timeout_s=300)
    with pytest.raises(StoreError, match=r'role "nobody" does not exist'):
        PostgresStore(postgres_url.replace("postgres@", "nobody:s3cr3t@"), timeout_s=300)


def test_a_server_that_never_answered_is_not_waited_for():
    for host in ("localhost:1", "no.such.host.invalid", f"{'a' * 70}.invalid"):
        with pytest.raises(StoreError, match=rf"{host}/x cannot be reached: .*check the URL"):
            PostgresStore(f"postgresql://{host}/x", timeout_s=300)


def test_a_server_that_accepts_and_never_answers_is_given_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(StoreError, match=r"cannot be reached"),
    ):
        PostgresStore(f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x", timeout_s=0.3)


def test_places_that_no_number_of_the_server_holds_are_not_there(store):
    store.append(KEY, entries(0, 2))
    for far in (1 << 32, 1 << 64, 10**30):
        assert list(store.read(KEY, far)) == list(store.read(KEY, far, far + 1)) == []
        assert [link.entry for link in store.read(KEY, -far, far)] == entries(0, 2)
        assert store.fetch(KEY, [far, -far]) == {}
        assert not store.wait(KEY, far, 0.0)
        chat = refold.open("a", store=store, model="gpt-5")
        for deed in (chat.pin, chat.restore, chat.expand, chat.undo, chat.view):
            with pytest.raises(NotFoundError):
                deed(far)


# Migrations


def opened(url):
    store = PostgresStore(url)
    store.append(Key("somebody", uuid4().hex), entries(0, 1))
    store.close()


def test_many_processes_may_open_an_empty_database_at_once(postgres_url):
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        list(pool.map(opened, [postgres_url] * 8))
    store = PostgresStore(postgres_url)
    assert run(store, "SELECT count(*) FROM refold_schema") == [(1,)]
    assert {row.next for row in store.conversations()} == {1}
    store.close()


@pytest.mark.parametrize("change", ["version = version + 1", "format = format + 1"])
def test_a_database_of_a_newer_refold_is_refused(store, reopen, change):
    run(store, f"UPDATE refold_schema SET {change}")
    with pytest.raises(NewerError, match="Upgrade refold"):
        reopen()


# proves: A13
@pytest.mark.parametrize(
    "values",
    [
        *("after_steps = -1", "length = -1", "mode = 'gone'", "compact_mode = 'zip'", "strategy = ''"),
        *("threshold = -0.1", "threshold = 1.1", "agent = NULL", "tool = ''", "tool = NULL", "tool = 'ls'"),
    ],
)
def test_the_database_itself_refuses_a_setting_that_cannot_be(store, values):
    for tool in ("grep", "ls"):
        store.set_setting(ToolSetting("", tool, Expiry(after_steps=1)))
    with pytest.raises(psycopg.IntegrityError):
        run(store, f"UPDATE refold_setting SET {values} WHERE tool = 'grep'")
    assert {one.expiry for one in store.settings()} == {Expiry(after_steps=1)}


# proves: A13
@pytest.mark.parametrize("version", [1, 5])
def test_an_older_database_is_migrated_and_nothing_in_it_is_lost(reopen, monkeypatch, version):
    steps = sql.migrations("postgres")
    with monkeypatch.context() as patch:
        patch.setattr("refold.stores.sql.migrations", lambda engine: steps[:version])
        old = reopen()
        of = {"key": key_digest(KEY), "owner_key": owner_digest(KEY.owner), "owner": b"somebody"}
        of |= {"name": KEY.conversation.encode(), "genesis": GENESIS}
        add = "refold_add(%(key)s, %(owner_key)s, %(owner)s, %(name)s, 1.0, NULL, NULL, 0, %(genesis)s)"
        ((cid,),) = run_named(old, f"SELECT {add}", of)
        digest = GENESIS
        for one in entries(0, 3):
            digest = chain(digest, one)
            row = {"cid": cid, "at": one.at, "head": one.head, "body": one.body, "digest": digest}
            insert = "INSERT INTO refold_entry VALUES (%(cid)s, %(at)s, 'noted', NULL, "
            insert += "%(head)s, %(body)s, %(digest)s)"
            run_named(old, insert, row)
        for insert in (
            "INSERT INTO refold_note VALUES ('a', 'a note')",
            "INSERT INTO refold_cursor VALUES (%(key)s, %(owner)s, %(name)s, 'me', 2)",
            f"INSERT INTO refold_summary (cid, digest, body) VALUES ({cid}, 'a', 'a summary')",
            f"INSERT INTO refold_lease VALUES ({cid}, 'a', 'me', 1, 1.0)",
            f"INSERT INTO refold_snapshot VALUES ({cid}, 'main', 2, '{{}}', 'a')",
            "INSERT INTO refold_setting (agent, tool, after_steps) VALUES ('', 'grep', 1)",
        ):
            run_named(old, insert, of)
        old.close()
    new = reopen()
    assert verified(new, KEY) == entries(0, 3)
    assert list(new.index(KEY, lambda one: None)) == [3]
    assert (new.note("a"), new.cursor(KEY, "me"), list(new.behind("me"))) == (b"a note", 2, [KEY])
    assert new.summary(Key(KEY.owner, "another"), b"a") == b"a summary"
    assert new.settings() == [ToolSetting("", "grep", Expiry(after_steps=1))]
    new.append(KEY, entries(3, 4), lease=new.acquire(KEY, "a", "you", 0.0, 1.0))
    new.erase(KEY)
    assert run(new, "SELECT count(*) FROM refold_shelf") == [(1,)]
    new.close()


def run_named(store, text, values):
    with psycopg.connect(store.pool.options.url, autocommit=True) as connection:
        store.pool.configure(connection)
        cursor = connection.execute(text, values)
        return cursor.fetchall() if cursor.description else []


def test_a_migration_that_fails_halfway_leaves_what_was_there(reopen, monkeypatch):
    steps = sql.migrations("postgres")
    with monkeypatch.context() as patch:
        broken = (*steps, "CREATE TABLE refold_new (a integer); SELECT 1 / 0")
        patch.setattr("refold.stores.sql.migrations", lambda engine: broken)
        with pytest.raises(StoreError, match="division by zero"):
            reopen()
    store = reopen()
    assert run(store, "SELECT to_regclass('refold_new')") == [(None,)]
    store.close()


def test_a_migration_takes_the_time_it_takes(reopen, monkeypatch):
    reopen().close()
    slow = (*sql.migrations("postgres"), "SELECT pg_sleep(0.5)")
    monkeypatch.setattr("refold.stores.sql.migrations", lambda engine: slow)
    reopen(statement_timeout_s=0.1, timeout_s=0.1).close()


def test_a_migration_waits_for_those_who_write(store, reopen, monkeypatch):
    store.append(KEY, entries(0, 1))
    more = (*sql.migrations("postgres"), "CREATE INDEX refold_new ON refold_entry (kind)")
    monkeypatch.setattr("refold.stores.sql.migrations", lambda engine: more)
    waits = "query LIKE 'CREATE INDEX refold_new%' AND now() - query_start > interval '0.5 s'"
    with psycopg.connect(store.pool.options.url) as writer, ThreadPoolExecutor(1) as pool:
        store.pool.configure(writer)
        writer.execute("UPDATE refold_entry SET at = at")
        opening = pool.submit(reopen, timeout_s=0.1, statement_timeout_s=0.1)
        until(
            lambda: opening.done() or run(store, f"SELECT count(*) FROM pg_stat_activity WHERE {waits}")[0][0]
        )
        assert not opening.done()
        writer.rollback()
        opening.result(30).close()


def test_who_opens_a_store_while_it_is_migrated_is_told(store, reopen, monkeypatch):
    more = (*sql.migrations("postgres"), "SELECT 1")
    monkeypatch.setattr("refold.stores.sql.migrations", lambda engine: more)
    with psycopg.connect(store.pool.options.url) as migrating:
        migrating.execute(sql.queries("postgres")["lock_schema"])
        with pytest.raises(StoreError, match=r"another migration is running.*retry later"):
            reopen(timeout_s=0.2, statement_timeout_s=0.1)
    reopen().close()


def test_a_user_who_may_not_create_tables_uses_those_that_are_there(postgres, postgres_url):
    owner = PostgresStore(postgres_url)
    user = f"user_{next(names)}"
    for right in (
        f"CREATE ROLE {user} LOGIN",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {user}",
    ):
        run(owner, right)
    store = PostgresStore(postgres_url.replace("postgres@", f"{user}@"))
    store.append(KEY, entries(0, 3))
    assert list(store.index(KEY, lambda one: SearchText.of("apple", (), "user"))) == [3]
    assert len(store.search(KEY, parse_query("apple"), 9)) == 3
    assert store.erase(KEY) == []
    empty = postgres.database().replace("postgres@", f"{user}@")
    with pytest.raises(StoreError, match=r"permission denied.*grant those listed"):
        PostgresStore(empty)
    for one in (store, owner):
        one.close()


def test_schemas_of_one_database_do_not_see_each_other(database):
    stores = [PostgresStore(database, schema=f"apart {n}") for n in range(2)]
    stores[0].append(KEY, entries(0, 2))
    assert list(stores[1].conversations()) == []
    stores[1].append(KEY, entries(0, 1, "other"))
    assert verified(stores[0], KEY) == entries(0, 2)
    for store in stores:
        store.close()


# Appending


def test_what_is_asked_for_often_takes_one_round_trip(postgres_url):
    with relayed(postgres_url) as (url, relay):
        assert relay is not None
        store = PostgresStore(url, pool_size=1)
        session = refold.open("long", store=store, owner=KEY.owner)
        session.append([user_message(f"message {n}") for n in range(3_000)])
        session.close()
        key, digest, taken = session.key, None, Counter[str]()
        for n in range(8):  # until all is prepared
            for name, deed in {
                "append": lambda: store.append(KEY, [entry(n)], after=digest),  # noqa: B023
                "resume": lambda: [*store.resume(key, "main")[1]],
                "fetch": lambda: store.fetch(key, range(0, 3_000, 40)),
                "find": lambda: store.find(key, ["a", "b", "c"]),
                "acquire": lambda: store.acquire(key, "a", "me", 1.0, 1.0),
                "conversations": lambda: list(store.conversations()),
                "open": lambda: refold.open("long", store=store, owner=KEY.owner).view().messages,
            }.items():
                before = relay.round_trips
                result = deed()
                taken[name] = relay.round_trips - before
                if name == "append":
                    digest = result
        assert taken.pop("open") <= 3
        assert taken.pop("acquire") == 2
        assert max(taken.values()) == 1
        store.close()


def test_large_batches_are_stored_whole_and_read_in_pieces(store, monkeypatch):
    monkeypatch.setattr("refold.stores.postgres.STATEMENT_BYTES", 15 << 20)
    body = os.urandom(10 << 20)
    many = [Entry(at, "said", str(at), b"[]", b"%d" % at) for at in range(5_000)]
    large = [Entry(at, "noted", None, b"[]", b"%d" % at + body) for at in range(5_000, 5_003)]
    small = [entry(at) for at in range(5_003, 5_005)]
    store.append(KEY, [*many, *large, *small], after=GENESIS)
    assert verified(store, KEY) == [*many, *large, *small]
    assert [link.entry.at for link in store.read(KEY, 4_998, but="said")] == list(range(5_000, 5_005))
    assert store.find(KEY, ["7", "4999"]) == {"7": 7, "4999": 4_999}
    with pytest.raises(ConflictError):
        store.append(KEY, [*large, *small])
    assert len(store.fetch(KEY, {1, 5_002, 5_004})) == 3


def test_a_large_batch_that_meets_a_conflict_in_the_middle_leaves_nothing(store, monkeypatch):
    monkeypatch.setattr("refold.stores.postgres.STATEMENT_BYTES", 1)
    store.append(KEY, entries(0, 2))
    columns = "kind, id, head, body, digest FROM refold_entry WHERE at = 0"
    run(store, f"INSERT INTO refold_entry SELECT cid, 7, {columns}")
    with pytest.raises(ConflictError):
        store.append(KEY, entries(2, 9))
    run(store, "DELETE FROM refold_entry WHERE at = 7")
    assert verified(store, KEY) == entries(0, 2)
    store.append(KEY, entries(2, 9))
    assert verified(store, KEY) == entries(0, 9)


def test_what_an_administrator_set_for_transactions_does_no_harm(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        setting = "default_transaction_isolation TO serializable"
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting}")
    store = PostgresStore(postgres_url)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: refold.open("a", store=store).append(user_message(str(n))), range(40)))
    assert len(verified(store, Key("default", "a"))) == 40
    store.close()


def test_names_and_ids_of_any_length_and_any_text_are_found(store):
    long = "🙂\x00\ud800" * 5_000
    store.append(Key(long, long), [entry(0, id=long), entry(1, id=long[:-1])])
    assert store.find(Key(long, long), [long, long[:-1]]) == {long: 0, long[:-1]: 1}
    lease = store.acquire(Key(long, long), long, long, 1.0, 1.0)
    store.append(Key(long, long), [entry(2)], lease=lease)
    store.set_cursor(Key(long, long), long, 1)
    assert list(store.behind(long)) == [Key(long, long)]
    assert [row.key for row in store.conversations(long)] == [Key(long, long)]
    for name in ODD_NAMES:
        assert list(store.read(Key(name, long))) == list(store.conversations(name)) == []


# When a connection or the server breaks


@pytest.fixture
def server():
    folder = Path(tempfile.mkdtemp(prefix="refold-own-"))
    server = Postgres(folder).start()
    yield server
    server.kill()
    remove(folder)


def cut(store):
    """Ends all connections of a store, as an administrator may."""
    mine = "application_name = 'refold' AND datname = current_database()"
    ended = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}"
    with psycopg.connect(store.pool.options.url, autocommit=True) as connection:
        connection.execute(ended)


def test_connections_that_were_ended_are_replaced_and_nobody_notices(postgres_url):
    store = PostgresStore(postgres_url)
    with ThreadPoolExecutor(8) as pool:  # all connections of the pool
        list(pool.map(lambda n: store.append(Key("a", str(n)), entries(0, 1)), range(64)))
    for n in range(5):
        cut(store)
        store.append(KEY, entries(n, n + 1))
        cut(store)
        assert verified(store, KEY) == entries(0, n + 1)
        assert store.fork(KEY, Key("a", f"fork {n}"), n) is None
    store.close()


def test_appends_are_stored_exactly_once_while_connections_are_ended(postgres_url):
    store, done = PostgresStore(postgres_url), Event()

    def disturb():
        while not done.wait(0.01):
            cut(store)

    disturbing = Thread(target=disturb)
    disturbing.start()
    digest = GENESIS
    try:
        for n in range(100):
            digest = store.append(KEY, [entry(n)], after=digest)
    finally:
        done.set()
        disturbing.join()
    assert verified(store, KEY) == entries(0, 100)
    store.close()


class Cutting(Relay):
    """Cuts a connection when an answer comes: what was asked has been done, and nobody hears of it."""

    left: int | None = None
    """Answers that still come through; None for all."""
    cuts = 0
    meanwhile = staticmethod(lambda: None)
    """Happens before anybody knows."""

    def _pass(self, one, other, asks, answered):
        class Way:
            shutdown = one.shutdown

            def recv(way, size):
                data = one.recv(size)
                if asks or not data or self.left is None:
                    return data
                self.left -= 1
                if self.left >= 0:
                    return data
                self.left = None
                self.cuts += 1
                self.meanwhile()
                return b""

        super()._pass(Way(), other, asks, answered)


@pytest.fixture
def cutting(postgres, postgres_url, tmp_path_factory):
    folder = Path(tempfile.mkdtemp(prefix="refold-relay-"))

    def connect():
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(postgres.socket))
        return made

    relay = Cutting(folder, ".s.PGSQL.5432", connect)
    store = PostgresStore(postgres_url.replace(str(postgres.folder), str(folder)), pool_size=1)
    store.append(Key("a", "to prepare"), entries(0, 1))
    yield store, relay
    store.close()
    relay.close()
    remove(folder)


def test_an_append_whose_answer_was_lost_is_found_and_not_stored_again(cutting, postgres_url):
    (store, relay), digest = cutting, GENESIS
    other = PostgresStore(postgres_url)
    for n in range(0, 20, 2):
        before, digest = digest, chain(digest, entry(n))

        def go_on(at=n + 1, after=digest):  # before it is tried again
            other.append(KEY, [entry(at)], after=after)

        relay.meanwhile, relay.left = go_on, 0
        assert store.append(KEY, [entry(n)], after=before) == digest
        digest = chain(digest, entry(n + 1))
    assert relay.cuts == 10
    assert verified(other, KEY) == entries(0, 20)
    other.close()


def test_an_append_that_was_cut_off_and_lost_the_race_is_a_conflict(cutting, postgres_url):
    store, relay = cutting
    other = PostgresStore(postgres_url)

    def instead():
        other.erase(KEY)
        other.append(KEY, entries(0, 3, "somebody else"))

    relay.meanwhile, relay.left = instead, 0
    with pytest.raises(ConflictError):
        store.append(KEY, entries(0, 1), after=GENESIS)
    assert verified(other, KEY) == entries(0, 3, "somebody else")
    other.close()


@pytest.mark.parametrize(
    "deed",
    [
        lambda store, key: store.append(key, entries(3, 4)),
        lambda store, key: store.append(key, entries(3, 6)),
        lambda store, key: store.fork(key, Key("a", f"fork of {key.conversation}"), 2),
        lambda store, key: store.acquire(key, "a", "me", 1.0, 9.0),
        lambda store, key: store.keep_summary(key, b"a", b"b"),
        lambda store, key: store.set_cursor(key, "a", 2),
        lambda store, key: list(store.index(key, lambda one: SearchText.of("apple", (), "user"))),
        lambda store, key: store.erase(key),
    ],
)
def test_whatever_is_cut_off_is_done_once(cutting, deed, monkeypatch):
    store, relay = cutting
    monkeypatch.setattr("refold.stores.postgres.STATEMENT_BYTES", 1)  # so that a batch is several statements
    found = set()
    for n in count():  # each of the answers in turn
        key, cuts = Key("a", str(n)), relay.cuts
        store.append(key, entries(0, 3))
        relay.left = n
        deed(store, key)
        is_whole, relay.left = relay.cuts == cuts, None
        fork = [entry.body for entry in verified(store, Key("a", f"fork of {key.conversation}"))]
        leases = [(one.name, one.fence) for one in store.leases(key, 2.0)]
        hits = len(store.search(key, parse_query("apple"), 9))
        kept = (store.summary(key, b"a"), store.cursor(key, "a"), hits)
        found.add((len(verified(store, key)), *fork, *leases, kept))
        if is_whole:
            break
    assert relay.cuts >= 1
    assert len(found) == 1
    assert not list(store.examine())


class Hanging(Relay):
    """Takes what is asked, and on some connections brings no answers any more."""

    def __init__(self, *args):
        self.hung, self.free = Event(), Event()
        super().__init__(*args)

    def hang_those_there(self):
        before, self.hung = self.hung, Event()
        before.set()

    def _pass(self, one, other, asks, answered):
        hung = self.hung

        class Way:
            shutdown = one.shutdown

            def recv(way, size):
                data = one.recv(size)
                if hung.is_set() and not asks:
                    self.free.wait(60)
                return data

        super()._pass(Way(), other, asks, answered)


@pytest.fixture
def hanging(postgres, postgres_url):
    folder = Path(tempfile.mkdtemp(prefix="refold-relay-"))

    def connect():
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(postgres.socket))
        return made

    relay = Hanging(folder, ".s.PGSQL.5432", connect)
    yield relay, partial(PostgresStore, postgres_url.replace(str(postgres.folder), str(folder)))
    relay.free.set()
    relay.close()
    remove(folder)


def test_a_peer_that_answers_no_more_is_given_up_and_what_was_asked_is_done_once(hanging, postgres_url):
    relay, opened = hanging
    store, all_there = opened(pool_size=3, statement_timeout_s=0.3, timeout_s=3), Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: store.pool.run(lambda run: all_there.wait(30)), range(3)))
        digest = store.append(KEY, entries(0, 1))
        relay.hang_those_there()
        tried = pool.submit(store.append, KEY, entries(1, 2), after=digest)
        assert tried.result(30) == chain(digest, entry(1))
        assert verified(store, KEY) == entries(0, 2)
    store.close()


def test_peers_that_never_answer_again_are_told_in_time(hanging):
    relay, opened = hanging
    store = opened(statement_timeout_s=0.2, timeout_s=0.2)
    digest = store.append(KEY, entries(0, 1))
    relay.hung.set()
    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(store.append, KEY, entries(1, 2), after=digest)
        with pytest.raises(StoreError, match=r"may or may not be stored: read, or append again"):
            tried.result(30)
        pool.submit(store.close).result(30)


def test_a_server_that_is_killed_and_restarted_loses_nothing_acknowledged(server):
    store = PostgresStore(server.database(), timeout_s=30)
    done, acknowledged = Event(), list[bytes]()

    def write():
        digest = GENESIS
        while not done.is_set():
            digest = store.append(KEY, [entry(len(acknowledged))], after=digest)
            acknowledged.append(digest)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        for end in (server.kill, server.stop, server.kill):
            before = len(acknowledged)
            while len(acknowledged) < before + 20:
                assert not writing.done(), writing.result()
            end()
            server.start()
        done.set()
        writing.result()
    assert [link.digest for link in store.read(KEY)] == acknowledged
    store.close()


def test_a_server_that_stays_away_is_told_with_what_to_do(server):
    store = PostgresStore(server.database(), timeout_s=0.5)
    store.append(KEY, entries(0, 1))
    server.kill()
    with pytest.raises(StoreError, match=r"may or may not be stored|cannot be reached"):
        store.append(KEY, entries(1, 2), after=GENESIS)
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        list(store.read(KEY))
    assert "may or may not" not in str(caught.value)
    server.start()
    assert verified(store, KEY) == entries(0, 1)
    store.close()


def test_a_read_that_was_cut_off_leaves_nothing_unknown(server):
    store = PostgresStore(server.database(), timeout_s=0.5)
    store.append(KEY, entries(0, 1))
    server.kill()
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        list(store.read(KEY))
    assert "may or may not" not in str(caught.value)
    store.close()


def test_a_server_that_was_waited_for_in_vain_is_not_waited_for_again_until_it_answers(server):
    store = PostgresStore(server.database(), timeout_s=0.3)
    chat = refold.open("a", store=store, model="gpt-5")
    chat.append(user_message("apple"))
    server.kill()
    with pytest.raises(StoreError, match="cannot be reached"):
        list(store.read(KEY))
    store.pool.timeout_s = 100
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(StoreError, match="cannot be reached"):
            pool.submit(chat.search, "apple").result(30)
        pool.submit(chat.close).result(30)
        server.start()
        assert len(verified(store, chat.key)) == 1
        server.kill()
        waiting = pool.submit(verified, store, chat.key)
        server.start()
        assert len(waiting.result(30)) == 1
    store.close()


def test_closing_waits_for_no_server_that_is_away(server):
    store = PostgresStore(server.database(), timeout_s=500)
    store.append(KEY, entries(0, 1))
    server.kill()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(store.close).result(30)


def test_why_a_connection_cannot_be_set_up_is_told(reopen):
    store = reopen(timeout_s=0.3)
    store.pool.options.settings["lock_ms"] = "frobnicate"
    cut(store)
    with pytest.raises(StoreError, match=r"cannot be reached: invalid value .*frobnicate"):
        list(store.read(KEY))
    store.close()


def test_a_statement_that_takes_too_long_is_stopped_and_told(database):
    store = PostgresStore(database, schema="slow", statement_timeout_s=0.2)
    slow = "refold_hold(of bytea) RETURNS bigint LANGUAGE sql AS 'SELECT 1 FROM pg_sleep(60)'"
    run(store, f"CREATE OR REPLACE FUNCTION {slow}")
    with pytest.raises(StoreError, match=r"took too long.*statement_timeout_s"):
        store.acquire(KEY, "a", "me", 1.0, 1.0)
    store.append(KEY, entries(0, 1))
    store.close()


def test_a_conversation_that_somebody_holds_is_told(reopen):
    store = reopen(timeout_s=0.2)
    store.append(KEY, entries(0, 1))
    with psycopg.connect(store.pool.options.url) as connection:
        store.pool.configure(connection)
        connection.execute("SELECT refold_hold(key) FROM refold_conversation")
        with pytest.raises(StoreError, match="holds the conversation for too long"):
            store.append(KEY, entries(1, 2))
        store.append(Key("a", "another"), entries(0, 1))
    store.append(KEY, entries(1, 2))
    store.close()


def test_a_pool_that_is_too_small_is_told(reopen):
    store, waiting, free = reopen(pool_size=1, timeout_s=0.2), Event(), Event()
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(store.pool.run, lambda run: waiting.set() or free.wait(30))
        assert waiting.wait(30)
        with pytest.raises(StoreError, match=r"none of its 1 connections was free.*larger pool_size"):
            list(store.read(KEY))
        free.set()
        holding.result()
    assert list(store.read(KEY)) == []
    store.close()


# Processes and threads


def test_a_forked_process_and_its_parent_both_go_on(store):
    store.append(KEY, entries(0, 1))
    stop = Event()
    threads = [Thread(target=lambda n=n: hammer(store, Key("a", str(n)), stop)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(1, 6):
            pid = os.fork()
            if pid == 0:
                try:
                    signal.alarm(60)
                    store.append(KEY, entries(n, n + 1))
                    assert store.wait(KEY, n, 60.0)
                    os._exit(0 if verified(store, KEY) == entries(0, n + 1) else 1)
                finally:
                    os._exit(2)
            assert os.waitpid(pid, 0)[1] == 0
            assert verified(store, KEY) == entries(0, n + 1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def hammer(store, key, stop):
    for n in count():
        if stop.is_set():
            return
        store.append(key, [entry(n)])


def test_a_closed_store_is_used_no_more(store, reopen):
    store.append(KEY, entries(0, 1))
    store.close()
    store.close()
    for use in uses(store).values():
        with pytest.raises(StoreError, match="was closed; open the store again"):
            use()
    other = reopen()
    assert verified(other, KEY) == entries(0, 1)
    other.close()


def test_a_session_may_be_closed_twice(postgres_url):
    chat = refold.open("a", store=postgres_url, model="gpt-5")
    chat.append({"role": "user", "content": "Hello."})
    chat.close()
    chat.close()


def test_who_waited_in_vain_leaves_his_turn_to_others(reopen):
    store, held, free = reopen(pool_size=1, timeout_s=1.0), Event(), Event()
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(store.pool.run, lambda run: held.set() or free.wait(30))
        assert held.wait(30)
        for _ in range(3):
            with pytest.raises(StoreError, match="none of its 1 connections was free"):
                store.append(KEY, entries(0, 1))
        free.set()
        holding.result()
    store.append(KEY, entries(0, 1))
    store.close()


def test_what_connects_beside_the_pool_keeps_the_options_of_the_url(postgres_url):
    store = PostgresStore(f"{postgres_url}&options=-c%20work_mem%3D5MB", schema="a b")
    beside = store.pool.options.connect_args
    with psycopg.connect(beside["conninfo"], **beside["kwargs"]) as connection:
        assert connection.execute("SHOW work_mem").fetchone() == ("5MB",)
        assert connection.execute("SELECT current_schema()").fetchone() == ("a b",)
    store.close()


def test_no_thread_and_no_connection_is_left_when_a_store_is_closed(postgres_url):
    before = set(threading.enumerate())
    store = PostgresStore(postgres_url)
    store.append(KEY, entries(0, 1))
    assert not store.wait(KEY, 5, 0.05)
    store.close()
    assert set(threading.enumerate()) - before == set()
    mine = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        until(lambda: connection.execute(mine).fetchone() == (0,))


def until(there):
    for _ in range(3_000):
        if there():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")


def append_elsewhere(reopen, at):
    store = reopen()
    store.append(KEY, entries(at, at + 1))
    store.close()


def test_whoever_waits_sees_what_another_process_appends(store, reopen):
    store.append(KEY, entries(0, 1))
    with ThreadPoolExecutor(3) as threads, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for at in (1, 2):
            waiting = [threads.submit(store.wait, KEY, at, 500.0) for _ in range(2)]
            pool.submit(append_elsewhere, reopen, at).result()
            assert [one.result() for one in waiting] == [True, True]


def test_the_same_entries_are_taken_in_once_whoever_comes_first(store, reopen):
    store.append(KEY, [entry(at, f"apple {at}") for at in range(350)])
    others = [reopen() for _ in range(3)]

    def words(one):
        return SearchText.of(one.body.decode(), (), "user")

    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda one: sum(one.index(KEY, words)), [store, *others]))
    assert sum(taken) == 350
    assert len(store.search(KEY, parse_query("apple"), 1_000)) == 350
    for one in others:
        one.close()


# Searching


def test_phrases_are_found_wherever_they_stand_in_a_long_text(store):
    numbers = " ".join(f"n{n:06d}" for n in range(60_000))
    text = f"the first words {numbers} red apple and apple tree {numbers[::-1]} the last words"
    store.append(
        KEY, [Entry(0, "said", None, b"[]", text.encode()), entry(1, "apple red"), entry(2, "n059999")]
    )
    assert len(numbers) > MAX_TERMS_BYTES

    def found(asked):
        for _ in store.index(KEY, lambda one: SearchText.of(one.body.decode(), ("a tool",), "tool")):
            pass
        return sorted(hit.at for hit in store.search(KEY, parse_query(asked), 10))

    for asked, places in {
        '"first words"': [0],
        '"last words"': [0],
        '"red apple"': [0],
        "apple red": [0, 1],
        "n059999": [0, 2],
        '"n059998 n059999 red"': [0],
        '"n059999 apple"': [],
        "n0599*": [0, 2],
        "nowhere": [],
        "tool:a* tree": [0],
        "role:user": [],
    }.items():
        assert found(asked) == places, asked


def test_a_tool_with_a_name_of_any_length_is_found(store):
    long = "Tool 🙂\x00\ud800" * 500
    store.append(KEY, [entry(0), entry(1)])
    tools = iter([(long + "a",), (long + "b",)])
    assert list(store.index(KEY, lambda one: SearchText("", "", next(tools), "tool"))) == [2]
    query = parse_query("tool:x")
    for tool, places in ((long + "A", [0]), (long + "b", [1]), (long + "*", [0, 1]), (long, [])):
        asked = type(query)((), (tool,))
        assert sorted(hit.at for hit in store.search(KEY, asked, 9)) == places


# Health


@pytest.mark.parametrize(
    "change",
    [
        "owner = '\\x41'",
        "name = '\\x41'",
        "created = created + 1",
        "fork_at = 1",
        "base = '\\x00'",
        "parent = cid",
    ],
)
def test_rows_that_somebody_altered_are_found(store, change):
    store.append(KEY, entries(0, 3))
    assert list(store.examine()) == []
    run(store, f"UPDATE refold_conversation SET {change}")
    assert ["altered" in flaw.problem for flaw in store.examine()] == [True]


def test_rows_that_belong_to_nothing_are_found(store):
    store.append(KEY, entries(0, 3))
    assert list(store.index(KEY, lambda one: SearchText.of("apple", (), "user"))) == [3]
    run(store, "DELETE FROM refold_conversation")
    assert [flaw.problem for flaw in store.examine()] == ["3 entries belong to no conversation"]
    run(store, "DELETE FROM refold_entry WHERE at = 1")
    assert "1 places in the index belong to no conversation" in [flaw.problem for flaw in store.examine()]


def test_a_body_that_somebody_altered_is_an_error_of_ours_and_a_snapshot_is_passed_over(store):
    session = refold.open("a", store=store)
    session.append([user_message(f"message {n} " * 400) for n in range(70)])
    session.close()
    for altered in ("x!", "70 x!", "700000000000000000000000 "):
        run(store, "UPDATE refold_shelf SET value = %s::bytea WHERE name LIKE 'v:%%'", altered)
        assert store.resume(session.key, "main")[0] is None
        assert len(refold.open("a", store=store).view().messages) == 70
    run(store, "UPDATE refold_entry SET body = 'x!' WHERE at = 3")
    with pytest.raises(CorruptError, match="cannot be unpacked"):
        list(store.read(session.key))


def test_erasing_leaves_no_row_behind(store):
    fork = Key(KEY.owner, "fork")
    store.append(KEY, [entry(at, "apple") for at in range(9)])
    store.fork(KEY, fork, 4)
    store.append(fork, [entry(4)])
    for key in (KEY, fork):
        store.acquire(key, "a", "me", 1.0, 1.0)
        store.keep_summary(key, b"a", b"b")
        store.set_cursor(key, "a", 1)
        list(store.index(key, lambda one: SearchText.of("apple", (), "user")))
        list(store.embed(key, "e", lambda some: [[b"\0" * 8]] * len(some)))
    assert store.erase(KEY) == [fork]
    kept = run(store, "SELECT count(*), (SELECT count(*) FROM refold_words) FROM refold_entry")
    assert kept == [(5, 5)]
    assert store.erase(fork) == []
    for table in sorted(name for (name,) in run(store, TABLES)):
        assert run(store, f"SELECT count(*) FROM {table}") == [(table == "refold_schema",)], table


TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"


FORKS = """SELECT refold_add(sha256(n::text::bytea), p.owner_key, p.owner, n::text::bytea, 1, p.family, p.cid,
    1, e.digest) FROM generate_series(1, %s) n, refold_conversation p JOIN refold_entry e USING (cid)
    WHERE e.at = 0 AND p.key = %s"""


@pytest.fixture
def few_locks():
    """A server that has room for some hundreds of locks."""
    folder = Path(tempfile.mkdtemp(prefix="refold-locks-"))
    server = Postgres(folder, "fsync=off", "max_locks_per_transaction=10", "max_connections=30").start()
    yield server
    server.kill()
    remove(folder)


def test_more_forks_than_the_server_has_locks_are_erased_and_others_go_on(few_locks):
    store = PostgresStore(few_locks.database(), pool_size=4)
    store.append(KEY, entries(0, 2))
    run(store, FORKS, 4_000, key_digest(KEY))
    other, stop = Key("a", "another"), Event()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(hammer, store, other, stop)
        try:
            assert store.erase(KEY, with_forks=True) == []
        finally:
            stop.set()
        writing.result(30)
    assert [row.key for row in store.conversations()] == [other]
    assert run(store, "SELECT count(*) FROM refold_conversation") == [(1,)]
    store.close()


def test_a_server_without_room_for_locks_is_tried_again_and_told(few_locks):
    store = PostgresStore(few_locks.database(), timeout_s=0.3)
    store.append(KEY, entries(0, 1))
    with psycopg.connect(store.pool.options.url) as greedy:
        with pytest.raises(psycopg.errors.OutOfMemory):
            greedy.execute("SELECT pg_advisory_lock(n) FROM generate_series(1, 1000000) n")
        with pytest.raises(StoreError, match=r"most often for locks; .*max_locks_per_transaction"):
            store.append(KEY, entries(1, 2))
        tries, store.pool.timeout_s = list[bool](), 60

        def hold(run):
            tries.append(run.is_retry)
            return run("hold", key=key_digest(KEY))

        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(store.pool.transact, hold)
            until(lambda: holding.done() or len(tries) > 2)
            greedy.rollback()
            greedy.execute("SELECT pg_advisory_unlock_all()")
            holding.result(30)
    store.append(KEY, entries(1, 2))
    assert verified(store, KEY) == entries(0, 2)
    store.close()


def test_an_erasure_that_is_cut_off_goes_on_with_the_next(reopen, monkeypatch):
    monkeypatch.setattr("refold.stores.postgres.MAX_ERASED", 3)
    store, forks = reopen(timeout_s=0.2), [Key("a", f"fork {n}") for n in range(10)]
    store.append(KEY, entries(0, 2))
    for n, fork in enumerate(forks):
        store.fork(forks[n - 1] if n % 3 else KEY, fork, 1)
        store.append(fork, entries(1, 3))
    with psycopg.connect(store.pool.options.url) as holder:
        store.pool.configure(holder)
        holder.execute("SELECT refold_hold(%s)", (key_digest(forks[5]),))
        with pytest.raises(StoreError, match="holds the conversation for too long"):
            store.erase(KEY, with_forks=True)
    assert [row.key for row in store.conversations()] == [*reversed(forks[:7]), KEY]
    assert verified(store, forks[6]) == entries(0, 3)
    assert not list(store.examine())
    assert store.erase(KEY, with_forks=True) == []
    assert run(store, "SELECT (SELECT count(*) FROM refold_conversation), count(*) FROM refold_entry") == [
        (0, 0)
    ]
    store.close()


# Locating


SAME = """SELECT refold_append(sha256((o || '/' || n)::bytea), %s, o::bytea, n::text::bytea, 1, false, 0,
    decode(repeat('00', 16), 'hex'), NULL, NULL, NULL, ARRAY['said'::bytea], ARRAY['~same'::bytea],
    ARRAY[''::bytea], ARRAY['{}'::bytea], ARRAY['x'::bytea])
    FROM (SELECT %s AS o) o, generate_series(1, 1000) n"""


def test_an_id_that_many_said_is_located_without_looking_at_all_of_them(store):
    for owner in ("other", "o"):
        run(store, SAME, owner_digest(owner), owner)
    run(store, "ANALYZE")
    assert store.locate("o", ["~same", "~none"]) == {"~same": (Key("o", "1000"), 0)}
    asked = {"owner_key": owner_digest("o"), "ids": [b"~same", b"~none"]}
    with psycopg.connect(store.pool.options.url) as connection:
        store.pool.configure(connection)
        query = sql.queries("postgres")["locate"]
        ((((plan,),),),) = [connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", asked).fetchall()]
    assert looked_at(plan["Plan"]) < 20


def looked_at(plan):
    """Rows of tables, in a plan that was carried out."""
    mine = plan["Actual Rows"] * plan["Actual Loops"] if "Relation Name" in plan else 0
    return mine + sum(map(looked_at, plan.get("Plans", ())))


# The pages


def test_the_example_on_the_page_runs(postgres_url, capsys):
    page = (PAGES / "postgresql.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(block.replace("postgresql://app:secret@db.example/refold", postgres_url), {})
    assert "why the import fails" in capsys.readouterr().out


def test_the_statements_of_the_page_on_scaling_partition_a_store(store, reopen):
    page = (PAGES / "scaling-postgresql.md").read_text()
    (statements,) = re.findall(r"^```sql\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:1]
    for n in range(40):
        store.append(Key("a", str(n)), [entry(at, "apple", id=str(at)) for at in range(5)])
    indexes = "SELECT indexname, replace(indexdef, ' ONLY ', ' ') FROM pg_indexes"
    indexes += " WHERE schemaname = current_schema() AND tablename = 'refold_entry' ORDER BY 1"
    before = run(store, indexes)
    assert len(before) == 4
    store.close()
    run(store, statements)
    store = reopen()
    assert run(store, indexes) == before
    store.append(Key("a", "7"), [entry(5)])
    store.fork(Key("a", "7"), KEY, 3)
    assert len(verified(store, Key("a", "7"))) == 6
    assert store.find(KEY, ["2", "4"]) == {"2": 2}
    assert Counter(row.next for row in store.conversations()) == {3: 1, 6: 1, 5: 39}
    with pytest.raises(ConflictError):
        store.append(Key("a", "7"), [entry(5)])
    filled = "SELECT count(*) FROM (SELECT tableoid FROM refold_entry GROUP BY 1) t"
    assert run(store, filled)[0][0] > 10
    assert not list(store.examine())
    assert store.erase(Key("a", "7")) == [KEY]
    assert verified(store, KEY) == [entry(at, "apple", id=str(at)) for at in range(3)]
