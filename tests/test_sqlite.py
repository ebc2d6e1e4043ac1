"""What only SQLite has: a file, a log beside it, a schema, a disk that fills up, other processes."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import refold
from refold.core.codec import FORMAT
from refold.core.errors import ConflictError, CorruptError, NewerError, RefoldError, SettingError, StoreError
from refold.core.event import Expiry
from refold.stores.sql import migrations
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import Key, Lease, Snapshot, ToolSetting, open_store
from refold.testing.samples import (
    KEY,
    assert_all_written,
    assert_view_is_fold,
    entries,
    user_message,
    verified,
    write_numbered,
)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "refold.db"


@pytest.fixture
def store(path):
    store = SQLiteStore(path)
    yield store
    store.close()


def sql(path: Path, text: str) -> list:
    """What another program sees and does in the same file."""
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


def tables(path: Path) -> set[str]:
    return {name for (name,) in sql(path, "SELECT name FROM sqlite_schema WHERE type = 'table'")}


def texts(session: refold.Session) -> list[str]:
    return [one.message.text for one in session.get_all()]


# Settings


@pytest.mark.parametrize(("query", "level"), [("", 2), ("?synchronous=full", 2), ("?synchronous=normal", 1)])
def test_the_log_is_written_ahead_and_synced_as_asked(path, query, level):
    store = open_store(f"sqlite:///{path}{query}")
    refold.open("a", store=store).append(user_message("hello"))
    store.save(Key("default", "a"), "main", Snapshot(1, b"", b""))  # which need not be synced
    refold.open("a", store=store).append(user_message("hello"))
    writer = store._file._writer.connection
    assert writer.pragma("journal_mode") == "wal"
    assert writer.pragma("synchronous") == level
    assert writer.pragma("secure_delete") == 1


@pytest.mark.parametrize("file", ["", "/", "//", "///", "///:memory:", "a.db", "//a.db", "///?timeout_s=1"])
def test_a_url_that_names_no_file_is_refused(file):
    with pytest.raises(SettingError, match=r"expected sqlite:///file\.db"):
        open_store(f"sqlite:{file}")


@pytest.mark.parametrize(
    "query", ["sync=1", "timeout_s=soon", "timeout_s=-1", "timeout_s=²", "synchronous=no"]
)
def test_an_option_that_is_not_known_is_refused(path, query):
    with pytest.raises(SettingError, match=r"its options are synchronous|is not allowed; expected"):
        open_store(f"sqlite:///{path}?{query}")
    assert not path.exists()


def test_a_relative_path_stays_where_it_was_when_the_folder_changes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    session = refold.open("a", store="sqlite:///refold.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    session.append(user_message("hello"))
    assert texts(session) == texts(refold.open("a", store=f"sqlite:///{tmp_path}/refold.db")) == ["hello"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Schema


def test_an_empty_file_becomes_a_store(path):
    path.touch()
    SQLiteStore(path).append(KEY, entries(0, 1))
    assert sql(path, "SELECT version, format FROM refold_schema") == [(len(migrations("sqlite")), FORMAT)]


def test_the_tables_of_others_are_left_alone(path):
    sql(path, "CREATE TABLE mine (a); INSERT INTO mine VALUES (1), (2)")
    store = SQLiteStore(path)
    store.append(KEY, entries(0, 3))
    store.erase(KEY)
    assert sql(path, "SELECT a FROM mine") == [(1,), (2,)]
    assert all(name.startswith(("refold_", "sqlite_")) for name in tables(path) - {"mine"})


@pytest.mark.parametrize("change", ["version = version + 1", "format = format + 1"])
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_file_of_a_newer_refold_is_refused_and_left_as_it_is(path, change, mode):
    store = SQLiteStore(path)
    store.append(KEY, entries(0, 3))
    store.close()
    sql(path, f"UPDATE refold_schema SET {change}")
    sql(path, f"PRAGMA journal_mode = {mode}")
    before = path.read_bytes()
    with pytest.raises(NewerError, match=r"newer refold.*Upgrade refold"):
        SQLiteStore(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("there", [True, False])
def test_a_migration_that_fails_halfway_leaves_what_was_there(path, monkeypatch, there):
    if there:
        store = SQLiteStore(path)
        store.append(KEY, entries(0, 3))
        store.close()
    before = tables(path)
    broken = "CREATE TABLE refold_new (a); DROP TABLE refold_shelf; INSERT INTO nowhere VALUES (1)"
    with monkeypatch.context() as patch:
        patch.setattr("refold.stores.sql.migrations", lambda engine: (*migrations(engine), broken))
        with pytest.raises(StoreError, match="nowhere"):
            SQLiteStore(path)
    assert tables(path) == before
    assert verified(SQLiteStore(path), KEY) == (entries(0, 3) if there else [])


# proves: A13
@pytest.mark.parametrize("version", range(1, len(migrations("sqlite"))))
def test_an_older_file_is_migrated_and_nothing_in_it_is_lost(path, monkeypatch, version):
    with monkeypatch.context() as patch:
        patch.setattr("refold.stores.sql.migrations", lambda engine: migrations(engine)[:version])
        store = SQLiteStore(path)
        store.append(KEY, entries(0, 3))
        store.close()
    assert sql(path, "SELECT version FROM refold_schema") == [(version,)]
    known = {table for (table,) in sql(path, "SELECT name FROM sqlite_schema")}
    owner, name = (f"x'{text.encode().hex()}'" for text in KEY)
    older = {
        "refold_note": "INSERT INTO refold_note VALUES (x'6e', CAST('a note' AS BLOB))",
        "refold_summary": "INSERT INTO refold_summary VALUES (1, 1, x'64', CAST('words' AS BLOB))",
        "refold_cursor": f"INSERT INTO refold_cursor VALUES ({owner}, {name}, CAST('me' AS BLOB), 2)",
        "refold_lease": "INSERT INTO refold_lease VALUES (1, x'61', x'61', 1, 2.0)",
        "refold_snapshot": "INSERT INTO refold_snapshot VALUES (1, x'61', 3, x'7b7d', x'61')",
    }
    for insert in (insert for table, insert in older.items() if table in known):
        sql(path, insert)
    store = SQLiteStore(path)
    assert verified(store, KEY) == entries(0, 3)
    assert store.settings() == []
    assert store.note("n") == (b"a note" if "refold_note" in known else None)
    summary = store.summary(Key(KEY.owner, "another"), b"d")
    assert summary == (b"words" if "refold_summary" in known else None)
    assert list(store.behind("me")) == ([KEY] if "refold_cursor" in known else [])
    assert store.cursor(KEY, "me") == (2 if "refold_cursor" in known else None)
    store.keep_note("a", b"1")
    store.set_setting(ToolSetting("", "grep", Expiry(after_steps=1)))
    assert store.settings() == [ToolSetting("", "grep", Expiry(after_steps=1))]
    store.keep_summary(KEY, b"a", b"1")
    assert store.summary(KEY, b"a") == b"1"
    store.close()
    assert sql(path, "SELECT version FROM refold_schema") == [(len(migrations("sqlite")),)]


# proves: A13
@pytest.mark.parametrize(
    "values",
    [
        *("after_steps = -1", "after_steps = 1.5", "after_steps = 'soon'", "length = -1", "length = x'00'"),
        *("mode = 'gone'", "mode = 1", "compact_mode = 'zip'", "strategy = ''", "prompt = x'00'"),
        *("threshold = -0.1", "threshold = 1.1", "threshold = 'low'", "agent = NULL", "agent = x'00'"),
        *("tool = ''", "tool = NULL", "tool = 'ls'"),
    ],
)
def test_the_database_itself_refuses_a_setting_that_cannot_be(path, values):
    SQLiteStore(path).close()
    sql(path, "INSERT INTO refold_setting (agent, tool) VALUES ('', 'grep'), ('', 'ls')")
    with pytest.raises(apsw.ConstraintError):
        sql(path, f"UPDATE refold_setting SET {values} WHERE tool = 'grep'")


def test_a_setting_that_somebody_wrote_with_sql_is_in_force(path):
    SQLiteStore(path).close()
    sql(path, "INSERT INTO refold_setting (agent, tool, after_steps, threshold) VALUES ('', 'grep', 2, 1)")
    with refold.open("a", store=f"sqlite:///{path}") as session:
        assert session.settings.tools["grep"].expire == Expiry(after_steps=2, threshold=1.0)
        assert session.config.origin("tools", "grep", "expire", "after_steps") == "database"


def test_many_processes_may_open_a_new_file_at_once(tmp_path):
    program = """
import sys, refold
for url in sys.argv[1:]:
    refold.open("a", store=url).append({"role": "user", "content": "hello"})
"""
    urls = [f"sqlite:///{tmp_path}/{n}.db" for n in range(12)]
    running = [subprocess.Popen([sys.executable, "-c", program, *urls]) for _ in range(3)]
    assert [one.wait() for one in running] == [0, 0, 0]
    assert [len(verified(open_store(url), Key("default", "a"))) for url in urls] == [3] * 12


# Files that are none


def _folder(path: Path) -> None:
    path.mkdir()


def _no_folder(path: Path) -> None:
    path.parent.rmdir()


def _text(path: Path) -> None:
    path.write_text("Dear diary,\n" * 500)


def _short(path: Path) -> None:
    path.write_text("Dear diary")


def _cut(keep: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        store = SQLiteStore(path)
        for start in range(0, 300, 50):
            store.append(Key("default", "a"), entries(start, start + 50, "words " * 30))
        store.close()
        os.truncate(path, int(path.stat().st_size * keep))

    return cut


@pytest.mark.parametrize(
    ("damage", "error", "advice"),
    [
        (_folder, StoreError, "is a folder; name a file in it"),
        (_no_folder, StoreError, "its folder exists"),
        (_text, CorruptError, "not a SQLite database.*backup"),
        (_short, CorruptError, "not a SQLite database.*backup"),
        (_cut(0.9), CorruptError, "damaged.*backup"),
        (_cut(0.5), CorruptError, "damaged.*backup"),
        (_cut(0.001), CorruptError, "damaged.*backup"),
    ],
)
def test_a_file_that_is_no_store_is_an_error_that_says_what_to_do(tmp_path, damage, error, advice):
    path = tmp_path / "folder" / "refold.db"
    path.parent.mkdir()
    damage(path)
    with pytest.raises(error, match=advice):
        texts(refold.open("a", store=f"sqlite:///{path}"))


@pytest.mark.parametrize("name", ["a\x00b", "a\ud800b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_an_error_of_ours(tmp_path, name):
    with pytest.raises(RefoldError, match="another name"):
        refold.open("a", store=f"sqlite:///{tmp_path}/{name}")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE refold_conversation SET name = x'62'",
        "UPDATE refold_conversation SET fork_at = 1",
        "UPDATE refold_entry SET place = place + (9 << 32) WHERE place % 2",
    ],
)
def test_rows_that_somebody_altered_are_found(store, path, change):
    store.append(KEY, entries(0, 4))
    assert list(store.examine()) == []
    sql(path, change)
    assert len(list(store.examine())) == 1


# Disks and permissions


def fill(session: refold.Session) -> list[str]:
    """Says things until the disk is full; returns all that was acknowledged."""
    done = texts(session)

    def say_on() -> None:
        while True:
            text = os.urandom(3000).hex()
            session.append(user_message(text))
            done.append(text)

    with pytest.raises(StoreError, match=r"is full; free some space"):
        say_on()
    return done


def demand_going_on(session: refold.Session, done: list[str]) -> None:
    """Nothing acknowledged is lost, nothing else is there, and the same session goes on."""
    assert texts(session) == done
    assert session.append(user_message("and on")) == len(done)
    assert texts(session) == texts(refold.open("a", store=session.store)) == [*done, "and on"]
    assert len(verified(session.store, session.key)) == len(done) + 1
    assert_view_is_fold(session)


def test_a_full_database_loses_nothing_and_goes_on_when_there_is_room(store):
    session = refold.open("a", store=store)
    session.append(user_message("hello"))
    writer = store._file._writer.connection
    writer.pragma("max_page_count", writer.pragma("page_count") + 40)
    done = fill(session)
    with pytest.raises(StoreError, match="is full"):
        session.append([user_message("short"), user_message(os.urandom(100_000).hex())])
    assert texts(session) == done
    writer.pragma("max_page_count", 1_000_000)
    demand_going_on(session, done)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_room(small_disk):
    (small_disk / "other").write_bytes(bytes(800_000))
    store = SQLiteStore(small_disk / "refold.db")
    session = refold.open("a", store=store)
    done = fill(session)
    assert len(done) > 20
    assert texts(session) == done
    (small_disk / "other").unlink()
    demand_going_on(session, done)
    store.close()
    assert texts(refold.open("a", store=SQLiteStore(small_disk / "refold.db"))) == [*done, "and on"]


@pytest.fixture
def open_folder():
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder
        folder.chmod(0o777)


def in_child(deed: Callable[[], object], *, uid: int | None = None) -> int:
    """Forks this process; the child does `deed` and exits with 0, or with 1 where it failed."""
    pid = os.fork()
    if pid == 0:
        try:
            if uid is not None and os.geteuid() == 0:  # permissions do not bind root
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            deed()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def succeeded(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


def written(path: Path) -> Path:
    store = SQLiteStore(path)
    refold.open("a", store=store).append(user_message("hello"))
    store.close()
    return path


@needs_fork
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_read_only_file_can_be_read_and_says_that_it_cannot_be_written(open_folder, mode):
    path = written(open_folder / "refold.db")
    sql(path, f"PRAGMA journal_mode = {mode}")
    path.chmod(0o444)

    def deed():
        session = refold.open("a", store=f"sqlite:///{path}")
        assert texts(session) == ["hello"]
        assert session.fit().messages == [user_message("hello")]
        for write in (lambda: session.append(user_message("more")), session.clear):
            with pytest.raises(StoreError, match=r"cannot be written.*read-only"):
                write()
        assert texts(session) == ["hello"]
        session.close()

    assert succeeded(in_child(deed, uid=65534))
    path.chmod(0o644)
    assert texts(refold.open("a", store=f"sqlite:///{path}")) == ["hello"]


@needs_fork
@pytest.mark.parametrize("name", ["refold.db", "new.db"])
def test_a_read_only_folder_is_an_error_that_says_so(open_folder, name):
    path = written(open_folder / "refold.db")
    open_folder.chmod(0o555)

    def deed():
        with pytest.raises(StoreError, match=r"read-only|may write there"):
            refold.open("a", store=f"sqlite:///{open_folder / name}")

    assert succeeded(in_child(deed, uid=65534))
    assert texts(refold.open("a", store=f"sqlite:///{path}")) == ["hello"]


def test_a_locked_database_says_so_can_be_read_and_goes_on_when_released(path):
    session = refold.open("a", store=f"sqlite:///{path}?timeout_s=0.2")
    session.append(user_message("one"))
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another process; retry"):
        session.append(user_message("two"))
    assert texts(session) == ["one"]
    other.execute("ROLLBACK")
    assert session.append(user_message("two")) == 1
    assert texts(session) == ["one", "two"]


# Threads and processes


def test_threads_that_append_at_the_same_moment_share_one_commit(store, path):
    commits = []

    def committing() -> bool:
        commits.append(1)
        return False  # go on

    wrong, first = Key("a", "wrong"), Key("a", "first")
    store.append(first, entries(0, 1))
    late, odd = (store.acquire(first, name, "late", 0.0, 1.0) for name in ("late", "odd"))
    store.acquire(first, "late", "current", 1.0, 1.0)
    sql(path, "UPDATE refold_shelf SET value = x'ff' WHERE name = CAST('l:odd' AS BLOB)")
    store._file._writer.connection.set_commit_hook(committing)
    keys = [Key("a", str(n)) for n in range(50)]
    failed: list[type[RefoldError]] = []

    def fail(key: Key, start: int, lease: Lease | None, error: type[RefoldError]) -> None:
        with pytest.raises(error):
            store.append(key, entries(start, start + 1), lease=lease)
        failed.append(error)

    threads = [threading.Thread(target=store.append, args=[key, entries(0, 2)]) for key in keys]
    bad = [(wrong, 5, None, ConflictError), (first, 1, late, ConflictError), (first, 1, odd, CorruptError)]
    threads += [threading.Thread(target=fail, args=one) for one in bad]
    with store._file.writing:
        for thread in threads:
            thread.start()
        while len(store._queue) < 53:
            pass
    for thread in threads:
        thread.join()
    assert len(commits) == 1
    assert len(failed) == 3
    assert [verified(store, key) for key in keys] == [entries(0, 2)] * 50
    assert verified(store, wrong) == []
    assert verified(store, first) == entries(0, 1)


def test_two_stores_on_one_file_see_each_other(path):
    one, other = SQLiteStore(path), SQLiteStore(path)
    tasks = ((one, "0", 30), (other, "1", 30))
    threads = [threading.Thread(target=write_numbered, args=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in (one, other):
        assert_all_written(store, {"0": 30, "1": 30})
    one.close()
    refold.open("more", store=other).append(user_message("hello"))
    assert texts(refold.open("more", store=one)) == ["hello"]


@needs_fork
def test_a_forked_process_and_its_parent_both_go_on(store):
    session = refold.open("race", store=store)
    children = [in_child(lambda n=n: write_numbered(store, f"child{n}", 20)) for n in range(2)]
    write_numbered(store, "parent", 20)
    grandchild = in_child(lambda: [session.append(user_message(f"grandchild {n}")) for n in range(20)])
    assert all(map(succeeded, [*children, grandchild]))
    assert_all_written(store, dict.fromkeys(["parent", "child0", "child1", "grandchild"], 20))


@needs_fork
def test_a_child_that_is_killed_loses_nothing_though_its_parent_closed_the_file(store, path):
    store.append(KEY, entries(0, 1))
    told, tell = os.pipe()
    heard, hear = os.pipe()

    def deed():
        store.append(KEY, entries(1, 2))
        os.write(tell, b".")
        os.read(heard, 1)
        store.append(KEY, entries(2, 4))
        os.write(tell, b".")
        signal.pause()

    pid = in_child(deed)
    os.read(told, 1)
    store.close()
    os.write(hear, b".")
    os.read(told, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert verified(SQLiteStore(path), KEY) == entries(0, 4)


@needs_fork
def test_a_process_forked_while_threads_append_neither_hangs_nor_appends_for_them(store):
    threads = [threading.Thread(target=write_numbered, args=[store, f"thread{n}", 100]) for n in range(3)]
    for thread in threads:
        thread.start()
    children = [in_child(lambda n=n: write_numbered(store, f"child{n}", 10)) for n in range(4)]
    for thread in threads:
        thread.join()
    assert all(map(succeeded, children))
    assert_all_written(store, {f"thread{n}": 100 for n in range(3)} | {f"child{n}": 10 for n in range(4)})


# Erasing and forking


def test_a_fork_copies_no_entry(store, path):
    store.append(KEY, entries(0, 50))
    store.fork(KEY, Key("a", "fork"), 40)
    store.fork(Key("a", "fork"), Key("a", "fork of the fork"), 30)
    assert sql(path, "SELECT count(*) FROM refold_entry") == [(50,)]


def test_what_no_fork_shares_any_more_is_deleted(store, path):
    early, late, last = Key("a", "early"), Key("a", "late"), Key("a", "last")
    store.append(KEY, entries(0, 9))
    store.fork(KEY, early, 2)
    store.fork(KEY, late, 7)
    store.append(late, entries(7, 9))
    store.fork(late, last, 4)
    for erased, kept in ((KEY, 7 + 2), (late, 4), (last, 2), (early, 0)):
        store.erase(erased)
        assert sql(path, "SELECT count(*) FROM refold_entry") == [(kept,)]
        assert list(store.examine()) == []
    assert sql(path, "SELECT count(*) FROM refold_conversation") == [(0,)]


def test_erased_words_are_gone_from_the_file_and_its_log(store, path):
    secrets = [b"swordfish", b"secret owner", b"secret name", b"secret id", b"secret view", b"secret summary"]
    session = refold.open("secret name", store=store, owner="secret owner", view="secret view")
    session.append(user_message("swordfish"), id="secret id")
    for n in range(200):
        session.append(user_message(f"swordfish {n} " * (n % 40)))
    session.compact(keep_recent=3)
    session.store.fork(session.key, Key("secret owner", "a fork"), 0)
    fork = refold.open("a fork", store=store, owner="secret owner")
    fork.append(user_message("innocent"))
    store.acquire(session.key, "secret view", "secret owner", 0.0, 1.0)
    for n in range(3):
        store.keep_summary(session.key, b"secret summary of %d" % n, b"secret summary " * 9)
    session.close()
    reader = SQLiteStore(path)
    packed = [body for (body,) in sql(path, "SELECT body FROM refold_entry WHERE length(body) > 99")]
    secrets += [body[20:60] for body in packed if b"innocent" not in body]

    def found() -> list[bytes]:
        data = b"".join(file.read_bytes() for file in path.parent.iterdir())
        return [secret for secret in secrets if secret in data]

    assert len(found()) == len(secrets) > 50
    assert len(list(reader.conversations())) == 2
    fork.store.erase(fork.key)
    session.clear()
    assert found() == []


def test_words_that_linger_because_somebody_reads_are_told_and_go_with_the_next_erasure(path):
    store = open_store(f"sqlite:///{path}?timeout_s=0.2")
    session = refold.open("a", store=store)
    session.append(user_message("swordfish"))
    other = apsw.Connection(str(path))
    other.execute("BEGIN; SELECT count(*) FROM refold_entry").fetchall()
    with pytest.raises(StoreError, match=r"Erased, but.*erase it again"):
        session.clear()
    assert texts(session) == []
    other.execute("ROLLBACK")
    assert session.clear() == []
    assert not any(b"swordfish" in file.read_bytes() for file in path.parent.iterdir())


def test_nothing_is_lost_when_pythons_own_sqlite_opens_the_same_file(path):
    program = f"""
import os, signal, sqlite3, refold
chat = refold.open("task", store="sqlite:///{path}")
other = refold.open("other", store="sqlite:///{path}")
for n in range(4):
    chat.append({{"role": "user", "content": f"task {{n}}"}})
    other.append({{"role": "user", "content": f"other {{n}}"}})
    mine = sqlite3.connect("{path}")
    mine.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    mine.close()
    assert len(chat.fit().messages) == n + 1
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = SQLiteStore(path)
    for name in ("task", "other"):
        texts = [one.message.text for one in refold.open(name, store=store).get_all()]
        assert texts == [f"{name} {n}" for n in range(4)]


def test_a_deleted_log_is_never_written_over_what_others_stored(path, tmp_path):
    """Python's own sqlite3 deletes the log in use; another process goes on; then this one does."""
    link = tmp_path / "link.db"
    link.symlink_to(path)
    chat = refold.open("task", store=f"sqlite:///{link}")
    chat.append(user_message("one"))
    foreign = sqlite3.connect(path)
    foreign.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    foreign.close()
    program = f"""
import refold
with refold.open("task", store="sqlite:///{path}") as chat:
    for text in ("two", "three"):
        chat.append({{"role": "user", "content": text}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    chat.append(user_message("four"))
    chat.store.close()
    texts = [one.message.text for one in refold.open("task", store=f"sqlite:///{path}").get_all()]
    assert texts == ["one", "two", "three", "four"]
