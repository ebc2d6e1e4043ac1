"""Workers: real processes on a real PostgreSQL, paid for by a model that counts, killed and paused."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.config.prompts import SECTIONS
from refold.core.budget import Budget
from refold.core.errors import ConflictError, NotFoundError, SettingError, StoreError
from refold.core.event import Called, Replaced
from refold.core.plan import CompactionRequest
from refold.core.view import fold
from refold.session.session import Session
from refold.session.worker import run
from refold.stores.store import Key, open_store
from refold.summaries.queue import CompactionJob, JobQueue, QueuedJob, WorkerSettings, queue_of
from refold.testing.model import Reply, ScriptedModel
from servers import Postgres, remove

WAIT_S = 60.0
"""For what must happen, in tests that would otherwise never end."""
WORKER = """
import json, sys
from refold.session.worker import run
from refold.summaries import context
from refold.summaries.queue import WorkerSettings

url, config, terms = sys.argv[1], *map(json.loads, sys.argv[2:4])
context.LEASE_S = float(sys.argv[4])
settings = WorkerSettings(**terms)
run(url, config=config, settings=settings, log=lambda text: print(text, file=sys.stderr, flush=True))
"""
BRISK: dict[str, Any] = {"retry_s": 0.2}
GOOD = "\n".join(
    f"## {title}\n- {'The files were read.' if title == 'Work done' else 'none'}" for title in SECTIONS
)
BAD = Reply("oops", 500, {"retry-after-ms": "1"})
TASK = {"role": "user", "content": "Read all the files and tell me the values in them."}
FILES = 14
"""As many as make a compaction necessary."""


@pytest.fixture(autouse=True)
def only_what_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "REFOLD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def queue(postgres_url: str) -> Iterator[JobQueue]:
    store = open_store(postgres_url)
    yield queue_of(store)
    store.close()


def config(server: ScriptedModel | None, executor: str = "worker", **summarizer: Any) -> dict[str, Any]:
    if server is not None:
        summarizer |= {"models": ["openai/a-model"], "base_urls": {"openai": server.openai_url}}
    compact = {"keep_recent": 4, "threshold_percent": 2_400 / 4_500}
    agent = {"compact": compact, "summarizer": {"executor": executor, **summarizer}}
    return {"models": {"m": {"window": 6_000, "max_output": 500}}, "agents": {"default": agent}}


def reading(n: int) -> list[dict[str, Any]]:
    call = {"name": "read_file", "arguments": json.dumps({"path": f"src/file_{n}.py"})}
    lines = "".join(f"value_{n} = {7919 * n + k}\n" for k in range(24))
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{n}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"c{n}", "content": lines},
    ]


def opened(url: str, settings: dict[str, Any], name: str = "c", **more: Any) -> Session:
    return refold.open(name, store=url, model="m", config=settings, **more)


def filled(url: str, settings: dict[str, Any], name: str = "c", files: int = FILES, **more: Any) -> Session:
    """A conversation that needs a compaction, said at once: nothing can be prepared."""
    chat = opened(url, settings, name, **more)
    task = {**TASK, "content": f"{TASK['content']} You are {name!r}."}  # or one summary would do for all
    chat.append([task, *(one for n in range(files) for one in reading(n))])
    return chat


@contextmanager
def working(
    url: str, settings: dict[str, Any], many: int = 1, lease_s: float = 0.5, **terms: Any
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers that are up; they are stopped at the end, whatever they are at."""
    arguments = [json.dumps(settings), json.dumps({**BRISK, **terms}), str(lease_s)]
    command = [sys.executable, "-c", WORKER, url, *arguments]
    processes = [subprocess.Popen(command) for _ in range(many)]
    try:
        until(lambda: alive(url) == many)
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in processes:
            process.wait(WAIT_S)


def alive(url: str) -> int:
    try:
        with psycopg.connect(url) as connection:
            rows = connection.execute("SELECT count(*) FROM procrastinate_workers").fetchone()
            return rows[0] if rows else 0
    except psycopg.errors.UndefinedTable:
        return 0


def until(so: Callable[[], Any]) -> Any:
    """Waits for it to become true."""
    end = time.monotonic() + WAIT_S
    while not (found := so()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)
    return found


def every(queue: JobQueue) -> list[QueuedJob]:
    return queue.list_jobs()


def edits(chat: Session) -> list[Replaced]:
    return [event for event in chat.events() if isinstance(event, Replaced) and event.round]


def calls(chat: Session) -> int:
    return sum(event.calls for event in chat.events() if isinstance(event, Called))


def order(name: str = "c", **facts: Any) -> CompactionJob:
    return CompactionJob(
        "default", name, "main", 1, model="m", order=CompactionRequest("summarize", 4), **facts
    )


def ahead(name: str = "c", **facts: Any) -> CompactionJob:
    facts = {"round": 1, "model": "m", "budget": Budget(window=6_000, output_reserve=500), **facts}
    return CompactionJob("default", name, "main", **facts)


# One summary is paid for


def test_two_workers_and_sessions_at_the_same_work_pay_once(postgres_url, queue):
    """Every session asks, whoever is free writes, and all see the same view."""
    with ScriptedModel(GOOD) as server, working(postgres_url, config(server), 2):
        chats = [filled(postgres_url, config(server))]
        chats += [opened(postgres_url, config(server)) for _ in range(3)]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda chat: chat.fit(), chats))
        assert len(server.requests) == 1
        assert len(every(queue)) == 1
    for chat in chats:
        assert chat.view() == fold(chat.events()) == chats[0].view()
        [edit] = edits(chat)
        assert edit.certificate is not None
        assert edit.certificate.model == "a-model"
        assert calls(chat) == 1


def test_summaries_are_written_ahead_by_a_worker_and_used_when_they_are_needed(postgres_url, queue):
    with ScriptedModel(GOOD) as server, working(postgres_url, config(server)):
        chat = filled(postgres_url, config(server), files=1)
        for n in range(1, 40):
            fitted = chat.fit()
            until(lambda: all(job.status == "done" for job in every(queue)))
            if fitted.report.edits:
                break
            assert chat.chat.summaries.job is None  # no thread of this process
            chat.append(reading(n))
        [job] = [job for job in every(queue) if job.result == "written by a-model"]
        assert job.what == "write ahead"
        assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
        assert len(server.requests) == calls(chat) == 1
        assert chat.view() == fold(chat.events())


def test_twenty_conversations_and_three_workers(postgres_url, queue):
    """Each is compacted once, and jobs of one conversation never run at the same time."""
    names = [f"c{n}" for n in range(20)]
    with ScriptedModel(GOOD) as server:
        chats = [filled(postgres_url, config(server), name) for name in names]
        with ThreadPoolExecutor() as threads:
            tickets = list(threads.map(lambda n: queue.put(order(names[n % 20])), range(60)))
            tickets += [queue.put(ahead(name)) for name in names]
        assert sum(ticket.is_new for ticket in tickets) == 40
        with working(postgres_url, config(server), 3):
            until(lambda: all(job.status == "done" for job in every(queue)))
        assert len(server.requests) == 20
    for chat in chats:
        assert chat.compactions().count == 1
        assert chat.view() == fold(chat.events())
    with psycopg.connect(postgres_url) as connection:
        query = """SELECT job.lock, min(event.id), max(event.id) FROM procrastinate_jobs job
            JOIN procrastinate_events event ON event.job_id = job.id AND event.type <> 'deferred'
            GROUP BY job.lock, job.id ORDER BY job.lock, min(event.id)"""
        spans = connection.execute(query).fetchall()
    for (lock, _, end), (next, start, _) in pairwise(spans):
        assert lock != next or end < start


# Whoever is overtaken


def test_a_worker_that_was_paused_beyond_its_lease_cannot_commit(postgres_url, queue):
    first, second = threading.Event(), threading.Event()
    script = [Reply(GOOD, hang=first), Reply(GOOD, hang=second)]
    with ScriptedModel(script) as server:
        settings = config(server, "thread", wait_s=WAIT_S)
        chat = filled(postgres_url, settings)
        ticket = queue.put(order())
        with working(postgres_url, settings, lease_s=-29.0, lost_s=60.0) as [worker]:  # of 30, one second
            assert server.until(lambda: len(server.requests) == 1, WAIT_S)
            worker.send_signal(signal.SIGSTOP)
            faster = threading.Thread(target=chat.compact, kwargs={"keep_recent": 2})
            faster.start()  # waits for the lease to run out, and takes it
            assert server.until(lambda: len(server.requests) == 2, WAIT_S)
            known = chat.record.live.state.next
            first.set()
            worker.send_signal(signal.SIGCONT)
            refused = until(lambda: queue.get(ticket.id).result)
            assert "no longer holds 'compaction:main'" in refused
            assert [event for event in chat.events(known) if isinstance(event, Replaced)] == []
            second.set()
            faster.join()
            assert ticket.wait(WAIT_S)
            assert queue.get(ticket.id).result == "it was compacted meanwhile"
    assert chat.compactions().count == 1
    assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
    assert len(server.requests) == 2
    assert chat.view() == fold(chat.events())


def test_what_a_killed_worker_was_at_is_done_by_another(postgres_url, queue):
    hanging = threading.Event()
    with ScriptedModel([Reply(GOOD, hang=hanging), GOOD]) as server:
        settings = config(server, timeout_s=1.0)
        chat = filled(postgres_url, settings)
        ticket = queue.put(ahead())
        with working(postgres_url, settings) as [worker]:
            assert server.until(lambda: len(server.requests) == 1, WAIT_S)
            worker.kill()
            worker.wait()
        assert queue.get(ticket.id).status == "running"
        with working(postgres_url, settings, lost_s=2.0):
            assert until(lambda: queue.get(ticket.id).status == "done")
        assert queue.get(ticket.id).result == "written by a-model"
        assert queue.get(ticket.id).attempts >= 2
        chat.fit()
        assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
        assert len(server.requests) == 2  # what the first was answered is not known to anybody


def test_a_step_waits_as_long_as_is_set_and_a_worker_gives_back_what_it_cannot_end(postgres_url, queue):
    with ScriptedModel(Reply(GOOD, hang=threading.Event())) as server:
        chat = filled(postgres_url, config(server, wait_s=0.2))
        ticket = queue.put(ahead())
        with working(postgres_url, config(server), grace_s=0.1) as [worker]:
            assert server.until(lambda: len(server.requests) == 1, WAIT_S)
            notices = chat.fit().report.notices
            assert "No summary was ready after 0.2 s: compacted without a model" in notices
            assert [edit.certificate.model for edit in edits(chat)] == [None]
            worker.terminate()
            assert worker.wait(WAIT_S) == 0
        assert queue.get(ticket.id).status == "queued"


def test_a_worker_outlives_a_restart_of_the_database(postgres, tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="refold-restart-"))
    server = Postgres(folder).start()
    try:
        url = server.database()
        with ScriptedModel(GOOD) as model, working(url, config(model)) as [worker]:
            server.kill()
            server.start()
            chat = filled(url, config(model))
            store = open_store(url)
            ticket = queue_of(store).put(ahead())
            until(lambda: not ticket.is_running and not ticket.has_no_worker)
            assert worker.poll() is None
            assert queue_of(store).get(ticket.id).result == "written by a-model"
            assert chat.view() == fold(chat.events())
    finally:
        server.stop()
        remove(folder)


# When it fails


def once(url: str, settings: Any, **terms: Any) -> list[str]:
    told: list[str] = []
    run(url, config=settings, settings=WorkerSettings(once=True, retry_s=0.0, **terms), log=told.append)
    return told


def test_a_job_is_tried_again_until_it_has_failed_and_then_by_hand(postgres_url, queue):
    replies = [BAD] * 6 + [GOOD]
    with ScriptedModel(replies) as server:
        settings = config(server)
        chat = filled(postgres_url, settings)
        ticket = queue.put(ahead())
        once(postgres_url, settings, attempts=2)
        first = queue.get(ticket.id)
        assert (first.status, first.attempts) == ("queued", 1)
        assert "500 Internal Server Error: oops" in first.result
        once(postgres_url, settings, attempts=2)
        assert queue.get(ticket.id).status == "failed"
        known = queue.put(ahead())
        assert (known.id, known.is_new, known.wait(0)) == (ticket.id, False, True)  # not for this round
        done = CliRunner().invoke(app, ["jobs", "retry", str(ticket.id), "--store", postgres_url])
        assert done.stdout == f"Job {ticket.id} is queued again.\n"
        [told] = once(postgres_url, settings)
        assert told.startswith(f"Job {ticket.id}, c (main): written by a-model")
        assert queue.get(ticket.id).status == "done"
        chat.fit()
        assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]


def test_what_has_failed_is_done_by_rule_and_told(postgres_url, queue):
    with ScriptedModel(BAD) as server, working(postgres_url, config(server), attempts=1):
        chat = filled(postgres_url, config(server))
        ticket = queue.put(ahead())
        assert ticket.wait(WAIT_S)
        asked = len(server.requests)
        notices = chat.fit().report.notices
        assert [edit.certificate.model for edit in edits(chat)] == [None]
        assert any(f"`refold jobs retry {ticket.id}`" in notice for notice in notices)
        assert len(server.requests) == asked


def test_what_is_known_to_be_of_no_use_is_not_asked_for_again_in_the_round(postgres_url, queue):
    with ScriptedModel(GOOD) as server:
        settings = config(server, max_calls=0)
        filled(postgres_url, settings)
        ticket = queue.put(ahead())
        once(postgres_url, settings)
        job = queue.get(ticket.id)
        assert job.status == "done"
        assert "0 of 0 per ten minutes are left" in job.result
        assert queue.put(ahead()).problem == f"Job {job.id}: {job.result}"
        assert queue.put(ahead(round=2)).is_new
        assert server.requests == []


@pytest.mark.parametrize(
    ("errand", "told"),
    [
        (ahead("none"), "there is no such conversation"),
        (ahead(agent="nobody"), "the agent 'nobody' is not configured here"),
        (ahead(round=7), "it was compacted meanwhile"),
        (
            CompactionJob("default", "c", "main", 7, order=CompactionRequest("summarize")),
            "it was compacted meanwhile",
        ),
    ],
)
def test_what_there_is_nothing_to_do_for_ends_with_a_reason(postgres_url, queue, errand, told):
    filled(postgres_url, config(None))
    ticket = queue.put(errand)
    once(postgres_url, config(None))
    job = queue.get(ticket.id)
    assert (job.status, job.result) == ("done", told)


def test_a_worker_without_a_model_says_so(postgres_url, queue):
    filled(postgres_url, config(None))
    ticket = queue.put(ahead())
    once(postgres_url, config(None))
    assert queue.get(ticket.id).status == "failed"
    assert "this worker has no model" in queue.get(ticket.id).result


def test_without_a_worker_summaries_are_written_here_and_the_job_stays(postgres_url, queue):
    with ScriptedModel(GOOD) as server:
        chat = filled(postgres_url, config(server))
        notices = chat.fit().report.notices
        assert any("No worker has been active for 30 s" in notice for notice in notices)
        assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
        assert [job.status for job in every(queue)] == ["queued"]
        once(postgres_url, config(server))
        assert [job.result for job in every(queue)] == ["it was compacted meanwhile"]
        assert len(server.requests) == 1


def test_without_a_queue_summaries_are_written_here(postgres, postgres_url):
    """The role may use the tables of the store, and make none."""
    with ScriptedModel(GOOD) as server:
        filled(postgres_url, config(server, "thread")).close()
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP ROLE IF EXISTS poor")
            connection.execute("CREATE ROLE poor LOGIN")
            for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
                connection.execute(f"GRANT ALL ON ALL {what} IN SCHEMA public TO poor")
        poor = postgres_url.replace("postgres@", "poor@")
        chat = opened(poor, config(server))
        notices = chat.fit().report.notices
        assert any("this role may not create them" in notice for notice in notices)
        assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
        with pytest.raises(StoreError, match="run `refold jobs --store URL` once with a role that may"):
            run(poor, settings=WorkerSettings(once=True))
        store = open_store(postgres_url)
        queue_of(store).create_tables()
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            for what in ("TABLES", "SEQUENCES"):
                connection.execute(f"GRANT ALL ON ALL {what} IN SCHEMA public TO poor")
            assert queue_of(chat.store).put(ahead()).is_new  # made by somebody else
            chat.store.close()
            store.close()
            connection.execute("DROP OWNED BY poor")
            connection.execute("DROP ROLE poor")


def test_the_queue_is_in_the_schema_of_the_store(postgres_url):
    url = f"{postgres_url}&schema=an%20other"
    with ScriptedModel(GOOD) as server:
        chat = filled(url, config(server))
        queue_of(chat.store).put(ahead())
        once(url, config(server))
        chat.fit()
        assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT to_regclass('procrastinate_jobs')").fetchone() == (None,)


def test_many_processes_set_the_queue_up_at_once(postgres_url):
    stores = [open_store(postgres_url) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        tickets = list(threads.map(lambda store: queue_of(store).put(ahead()), stores))
    assert len({ticket.id for ticket in tickets}) == 1
    for store in stores:
        store.close()


# Setting it up


def test_a_store_of_another_kind_is_refused_where_it_is_set():
    with pytest.raises(
        SettingError, match=r"agents\.default\.summarizer\.executor: workers need a PostgreSQL store"
    ):
        opened("memory://", config(None))
    assert refold.fit([TASK], model="m", config=config(None)) == [TASK]
    with pytest.raises(SettingError, match="workers need a PostgreSQL store"):
        run("memory://")


def test_what_is_not_installed_is_named(postgres_url, monkeypatch):
    monkeypatch.setattr("refold.summaries.queue.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r'pip install "refold\[worker\]"'):
        opened(postgres_url, config(None))
    told = invoke(postgres_url, "worker")
    assert (told.exit_code, told.output.count("\n"), "refold[worker]" in told.output) == (2, 1, True)


def test_a_worker_says_that_it_works_only_where_it_can(postgres_url):
    refused = invoke("memory://", "worker")
    assert (refused.exit_code, "working for" in refused.output) == (2, False)
    command = [sys.executable, "-m", "refold", "worker", "--concurrency", "2", "--store", postgres_url]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: alive(postgres_url) == 1)
    finally:
        worker.terminate()
        _, told = worker.communicate(timeout=WAIT_S)
    assert told == f"refold: working for {postgres_url}, 2 at a time; Ctrl-C ends it\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("frobnicate", "expected openai/MODEL, anthropic/MODEL or module:function"),
        ("frob/nicate", "'frob' is not a known provider"),
        ("openai/", "names no model"),
        ("os:name", "expected a function, got a str"),
        ("os:frobnicate", "cannot be loaded"),
    ],
)
def test_who_cannot_write_is_refused_before_there_is_a_job(postgres_url, name, told):
    refused = invoke(postgres_url, "worker", "--once", "--summarizer", name)
    assert (refused.exit_code, told in refused.output) == (2, True), refused.output


@pytest.mark.parametrize("summarizer", [{"models": ["frob/nicate"]}, {"prompts": "prompts"}])
def test_what_is_wrong_with_any_agent_is_told_before_there_is_a_job(postgres_url, tmp_path, summarizer):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "conversation.md").write_text("---\nmodels: [frob/nicate]\n---\n{{ messages }}\n")
    settings = {"agents": {"default": {}, "other": {"summarizer": summarizer}}}
    with pytest.raises(SettingError, match="'frob' is not a known provider"):
        run(postgres_url, config=settings, settings=WorkerSettings(once=True))


def test_importing_refold_imports_no_queue():
    code = "import sys, refold.summaries.queue, refold.cli"
    code += "; assert not {'procrastinate', 'psycopg'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_function_of_ones_own_writes_for_a_worker(postgres_url, queue, tmp_path):
    (tmp_path / "scribe.py").write_text(f"def write(ask):\n    return {GOOD!r}\n")
    (tmp_path / "refold.yaml").write_text(json.dumps(config(None)))
    chat = filled(postgres_url, config(None))
    ticket = queue.put(ahead())
    command = [
        sys.executable,
        "-m",
        "refold",
        "worker",
        "--once",
        "--summarizer",
        "scribe:write",
        "--name",
        "me",
    ]
    done = subprocess.run([*command, "--store", postgres_url], capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"refold: Job {ticket.id}, c (main): written by write")
    assert queue.get(ticket.id).worker == "me"
    chat.fit()
    assert [edit.certificate.model for edit in edits(chat)] == ["write"]
    bad = subprocess.run([*command[:-3], "no:thing"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "--summarizer no:thing: cannot be loaded" in bad.stderr


# Looking at it


def invoke(url: str, *arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [*arguments, "--store", url])


def test_jobs_are_shown_with_what_became_of_them(postgres_url, queue):
    assert invoke(postgres_url, "jobs").stdout.startswith("No jobs are waiting")
    assert invoke(postgres_url, "jobs", "--failed").stdout == "No failed jobs.\n"
    with ScriptedModel(BAD) as server:
        for name in ("done", "failed\n", "queued"):
            filled(postgres_url, config(server), name)
        queue.put(ahead("done", round=9))
        queue.put(ahead("failed\n"))
        once(postgres_url, config(server), attempts=1)
        queue.put(order("queued"))
    shown = invoke(postgres_url, "jobs").stdout
    head, *rows, tip = shown.splitlines()
    assert head.split() == ["id", "status", "conversation", "view", "what", "tries", "age", "worker"]
    assert [row.split()[1] for row in rows] == ["queued", "failed", "done"]
    assert "500 Internal Server Error: oops" in rows[1]
    assert tip.startswith("1 job failed: retry with refold jobs retry ID")
    told = json.loads(invoke(postgres_url, "jobs", "--failed", "--json").stdout)["jobs"]
    assert [(job["conversation"], job["status"], job["attempts"]) for job in told] == [
        ("failed\n", "failed", 1)
    ]
    assert (
        invoke(postgres_url, "jobs", "drop", str(told[0]["id"])).stdout
        == f"Job {told[0]['id']} is dropped.\n"
    )
    assert len(every(queue)) == 2


def test_what_cannot_be_done_with_a_job_is_told(postgres_url, queue):
    ticket = queue.put(ahead())
    for action in (queue.retry, queue.drop):
        with pytest.raises(ConflictError, match=f"Job {ticket.id} is queued; only failed jobs"):
            action(ticket.id)
        with pytest.raises(NotFoundError, match="There is no job 999"):
            action(999)
    assert invoke(postgres_url, "jobs", "again", "1").exit_code == 2
    assert invoke(postgres_url, "jobs", "retry").exit_code == 2
    assert invoke("sqlite:///none.db", "jobs").exit_code in (1, 2)


def test_what_others_put_into_the_queue_is_passed_over(postgres_url, queue):
    ticket = queue.put(ahead())
    foreign = ["{}", '{"errand": 7}', '{"errand": "no JSON"}', '{"errand": "{}"}', "[]"]
    with psycopg.connect(postgres_url) as connection:
        into = "INSERT INTO procrastinate_jobs (queue_name, task_name, args)"
        for args in foreign:
            connection.execute(f"{into} VALUES ('refold', 'theirs', %s)", (args,))
    shown = invoke(postgres_url, "jobs", "--json")
    assert shown.exit_code == 0
    assert [job["id"] for job in json.loads(shown.stdout)["jobs"]] == [ticket.id]
    with pytest.raises(NotFoundError, match=f"There is no job {ticket.id + 1}"):
        queue.get(ticket.id + 1)


def test_a_number_that_no_job_can_have_is_not_found(postgres_url, queue):
    for id in (1 << 63, 10**23):
        for action in (queue.retry, queue.drop):
            with pytest.raises(NotFoundError, match=f"There is no job {id}"):
                action(id)
    assert invoke(postgres_url, "jobs", "retry", "9" * 23).exit_code == 1


def test_a_job_that_failed_is_not_put_back_beside_a_newer_one(postgres_url, queue):
    filled(postgres_url, config(None))
    failed = queue.put(ahead())
    once(postgres_url, config(None))
    queue.put(ahead(round=2))
    with pytest.raises(ConflictError, match="a newer one for the same is active"):
        queue.retry(failed.id)


def test_compacting_can_be_left_to_a_worker(postgres_url, queue, tmp_path):
    with ScriptedModel(GOOD) as server:
        (tmp_path / "refold.yaml").write_text(json.dumps(config(server)))
        chat = filled(postgres_url, config(server))
        left = invoke(postgres_url, "compact", "c", "--model", "m", "--keep", "4", "--later")
        assert left.stdout == "Job 1 waits for a worker; `refold jobs` shows its progress.\n"
        again = json.loads(invoke(postgres_url, "compact", "c", "--later", "--json").stdout)
        assert again == {"did": None, "job": 1}
        assert invoke(postgres_url, "compact", "c", "--later", "--dry-run").exit_code == 2
        once(postgres_url, config(server))
    assert "tokens saved" in queue.get(1).result
    assert [edit.certificate.model for edit in edits(chat)] == ["a-model"]
    assert chat.view() == fold(chat.events())


def test_odd_names_travel(postgres_url, queue):
    locks = set()
    for n, name in enumerate(["a\x00b", "\ud800", "../*{}:'\"", "x" * 500, "🦜"]):
        errand = CompactionJob(name, name, name, n, agent=name)
        ticket = queue.put(errand)
        job = queue.get(ticket.id)
        assert (job.owner, job.conversation, job.view, job.agent) == (name, name, name, name)
        locks.add(errand.lock)
        queue.annotate(ticket.id, told=name)
    assert len(every(queue)) == 5
    assert len(locks) == 5
    assert invoke(postgres_url, "jobs").exit_code == 0
    assert Key("a", "b") == ahead("b").key._replace(owner="a")


def test_what_is_done_for_long_is_forgotten(postgres_url, queue):
    filled(postgres_url, config(None))
    queue.put(ahead("none"))
    failed = queue.put(ahead())
    once(postgres_url, config(None))
    with psycopg.connect(postgres_url) as connection:
        connection.execute("UPDATE procrastinate_events SET at = at - interval '2 days'")
    queue.delete_done()
    assert [job.id for job in every(queue)] == [failed.id]


def test_workers_of_other_queues_are_none_of_ours(postgres_url, queue):
    queue.create_tables()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("INSERT INTO procrastinate_workers DEFAULT VALUES")
    assert queue.put(ahead()).has_no_worker
    queue.recover(1, 60.0)
    assert queue.put(ahead()).is_running
