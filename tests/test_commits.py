"""From the model's answer to the view: whatever dies, hurries or changes in between, one view is valid."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import refold
from refold.core.event import Called, Replaced
from refold.core.view import fold
from refold.dialects.rules.targets import check_request
from refold.session import compaction
from refold.testing.scribe import Scribe

TINY = {"models": {"m": {"window": 6_000, "max_output": 500}}}
HERE = Path(__file__).parent


def opened(path, summarizer=None, **settings):
    compact = {"threshold_percent": 2_400 / 4_500}
    config = TINY | {"agents": {"default": {"compact": compact, "summarizer": settings}}}
    return refold.open("c", store=f"sqlite:///{path}", model="m", config=config, summarizer=summarizer)


def step(chat, n):
    call = {"name": "read", "arguments": json.dumps({"path": f"src/file_{n}.py"})}
    asked = [{"id": f"c{n}", "type": "function", "function": call}]
    said = {"role": "tool", "tool_call_id": f"c{n}", "content": f"value_{n} = {n * 7919}\n" * 12}
    chat.append([{"role": "assistant", "content": None, "tool_calls": asked}, said])


def near(chat, n=0):
    """Up to the soft threshold: a summary is being written, and the view is still whole."""
    if not n:
        chat.append({"role": "user", "content": "Read all files."})
    while chat.chat.summaries._job is None:
        step(chat, n)
        assert not chat.fit().report.edits
        n += 1
    assert chat.chat.summaries._job.wait(20)
    return n


def beyond(chat, n):
    """On, until the view is made smaller."""
    while not (fitted := chat.fit()).report.edits:
        step(chat, n)
        n += 1
    assert not check_request("openai-chat", fitted.request)
    assert fold(chat.events()) == chat.view()
    return n


def edits(chat):
    return [event for event in chat.events() if isinstance(event, Replaced) and event.certificate]


DIES = """
import os, sys
sys.path.insert(0, {here!r})
from test_commits import Scribe, near, opened
chat = opened({path!r}, Scribe())
print(near(chat), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_dies_between_the_answer_and_the_commit_loses_nothing_and_nobody_pays_again(tmp_path):
    path = str(tmp_path / "c.db")
    script = DIES.format(here=str(HERE), path=path)
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    scribe = Scribe()
    with opened(path, scribe) as chat:
        assert not edits(chat)
        before = len(list(chat.events()))
        beyond(chat, int(died.stdout))
        (edit,) = edits(chat)
        assert edit.certificate.model == "Scribe"
        assert edit.at >= before
        assert not scribe.asked


FORKS = """
import os, sys
from threading import Event
sys.path.insert(0, {here!r})
from test_commits import opened, step
begun, go = Event(), Event()

def writes(ask):
    begun.set()
    go.wait(20)
    return ""

chat = opened({path!r}, writes, wait_s=0)
chat.append({{"role": "user", "content": "Read all files."}})
for n in range(30):
    step(chat, n)
chat.fit()
assert begun.wait(20)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(chat.compactions().running)
go.set()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_fork_that_ends_does_not_end_the_lease_of_the_one_that_writes(tmp_path):
    script = FORKS.format(here=str(HERE), path=str(tmp_path / "c.db"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


# proves: C14
def test_two_processes_that_commit_at_once_leave_one_summary(tmp_path):
    path = tmp_path / "c.db"
    with opened(path, Scribe()) as chat:
        n = near(chat)
        for k in range(n, n + 3):
            step(chat, k)
    script = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from test_commits import Scribe, opened
chat = opened({str(path)!r}, Scribe(), max_calls=0)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(3):
    chat.fit()
"""
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [one.stdout.readline() for one in both] == ["ready\n"] * 2
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    assert [one.wait(60) for one in both] == [0, 0]
    for one in both:
        one.stdin.close()
        one.stdout.close()
    with opened(path) as chat:
        (edit,) = edits(chat)
        assert edit.certificate.model == "Scribe"
        assert fold(chat.events()) == chat.view()
        assert not check_request("openai-chat", chat.fit().request)


def begun_anew(chat):
    chat.clear()
    chat.append({"role": "user", "content": "Read other files."})
    for n in range(100, 116):
        step(chat, n)


def test_no_summary_stands_for_what_has_changed(tmp_path):
    with opened(tmp_path / "c.db", Scribe(), max_calls=1) as chat:
        n = near(chat)
        chat.pin(3)
        known = len(list(chat.events()))
        beyond(chat, n)
        assert {edit.certificate.model for edit in edits(chat) if edit.at >= known} == {None}


# proves: C14
def test_a_finished_summary_is_used_although_somebody_else_compacted_by_rule_meanwhile(tmp_path):
    scribe = Scribe()
    with opened(tmp_path / "c.db", scribe, max_calls=1) as chat:
        n = near(chat)
        with opened(chat.store.path) as other:
            assert other.compact(keep_recent=8).tokens_saved > 0
        by_rule = edits(chat)[-1]
        beyond(chat, n)
        assert len(scribe.asked) == 1
        written = edits(chat)[-1]
        assert (by_rule.certificate.model, written.certificate.model) == (None, "Scribe")
        assert written.span.covers(by_rule.span)
        assert all(at in written.shown[0].text for at in ("src/file_0.py", "src/file_1.py"))


def test_what_was_written_about_an_erased_conversation_stands_in_no_other(tmp_path):
    scribe = Scribe()
    with opened(tmp_path / "c.db", scribe) as chat:
        n = near(chat)
        begun_anew(chat)
        beyond(chat, n + 200)
        (edit,) = edits(chat)
        assert edit.certificate.model == "Scribe"
        assert len(scribe.asked) == 2
        text = edit.shown[0].text
        assert "src/file_10" in text
        assert "src/file_0.py" not in text


def test_a_late_summary_is_not_committed_once_somebody_else_holds_the_lease(tmp_path):
    path = tmp_path / "c.db"
    with opened(path, Scribe(), max_calls=1) as chat:
        n = near(chat)
        ready = chat.chat.summaries._ready
        taken = chat.store.acquire(chat.key, "compaction:main", "another", time.time() + 3600, 60.0)
        assert taken.fence > ready.lease.fence
        while not chat.fit().report.edits:
            step(chat, n)
            n += 1
        assert [edit.certificate.model for edit in edits(chat)] == [None]


# proves: C14
def test_two_sessions_do_not_pay_for_the_same_summary(tmp_path):
    path = tmp_path / "c.db"
    one, other = Scribe(), Scribe()
    with opened(path, one) as first, opened(path, other) as second:
        n = near(first)
        second.fit()
        if second.chat.summaries._job:
            second.chat.summaries._job.wait(20)
        beyond(second, n)
        assert len(one.asked) == 1
        assert not other.asked
        assert [edit.certificate.model for edit in edits(first)] == ["Scribe"]


# proves: C14
def test_a_dead_holders_lease_runs_out(tmp_path):
    path, scribe = tmp_path / "c.db", Scribe()
    with opened(path, scribe) as chat:
        chat.append({"role": "user", "content": "Read all files."})
        chat.store.acquire(chat.key, "compaction:main", "dead", time.time() - 100, 60.0)
        near(chat, 1)
        assert len(scribe.asked) == 1


# proves: C14
def test_while_somebody_else_writes_nobody_else_does_and_the_work_goes_on(tmp_path):
    path, scribe = tmp_path / "c.db", Scribe()
    with opened(path, scribe) as chat:
        chat.append({"role": "user", "content": "Read all files."})
        chat.store.acquire(chat.key, "compaction:main", "alive", time.time(), 600.0)
        beyond(chat, 1)
        assert not scribe.asked
        assert not [event for event in chat.events() if isinstance(event, Called)]
        assert chat.compact(keep_recent=1).tokens_saved > 0
        assert not scribe.asked


class Slow:
    """A summarizer that writes when it is told to."""

    def __init__(self):
        self.begun, self.go, self.asked = threading.Event(), threading.Event(), []

    def __call__(self, ask):
        self.asked.append(ask)
        self.begun.set()
        self.go.wait(20)
        return "The agent reads files one after another."


# proves: C14
@pytest.mark.parametrize("has_summarizer", [True, False])
def test_a_second_compaction_waits_for_the_first_and_returns_what_it_did(
    tmp_path, has_summarizer, monkeypatch
):
    writes = Slow()
    path, scribe = tmp_path / "c.db", Scribe()
    with opened(path, writes) as first, opened(path, scribe if has_summarizer else None) as second:
        commit = compaction.compact_view

        def commit_late(chat, *args, **named):  # the second may not begin between the writing and the commit
            if chat is first.chat:
                time.sleep(0.3)
            return commit(chat, *args, **named)

        monkeypatch.setattr(compaction, "compact_view", commit_late)
        first.append({"role": "user", "content": "Read all files."})
        for n in range(8):
            step(first, n)
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(first.compact, keep_recent=4)
            assert writes.begun.wait(20)
            other = pool.submit(second.compact, keep_recent=4)
            assert second.append({"role": "assistant", "content": "Meanwhile."})  # nobody waits to append
            assert not other.done()
            writes.go.set()
            assert other.result(20) == one.result(20)
        (edit,) = edits(first)
        assert edit.certificate.model == "Slow"
        assert not scribe.asked


# proves: C14
def test_threads_of_one_session_compact_one_after_the_other(tmp_path):
    writes = Slow()
    with opened(tmp_path / "c.db", writes) as chat:
        chat.append({"role": "user", "content": "Read all files."})
        for n in range(8):
            step(chat, n)
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(chat.compact, keep_recent=4)
            assert writes.begun.wait(20)
            other = pool.submit(chat.compact, keep_recent=4)
            writes.go.set()
            assert one.result(20) == other.result(20)
        assert len(writes.asked) == len(edits(chat)) == 1


# proves: C14
def test_a_request_without_a_summarizer_waits_for_a_compaction_that_is_under_way(tmp_path):
    writes = Slow()
    path = tmp_path / "c.db"
    with opened(path, writes) as first, opened(path) as second:
        first.append({"role": "user", "content": "Read all files."})
        for n in range(30):
            step(first, n)
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(first.compact, keep_recent=4)
            assert writes.begun.wait(20)
            other = pool.submit(second.fit)
            assert not other.done()
            writes.go.set()
            assert one.result(20).tokens_saved > 0
            assert other.result(20).report.edits == ()
        assert [edit.certificate.model for edit in edits(first)] == ["Slow"]


def test_a_summary_that_was_used_is_ready_for_nobody_else(tmp_path):
    """Each request in a session of its own, as in a web application."""
    path, scribe = tmp_path / "c.db", Scribe()
    for n in range(60):
        with opened(path, scribe) as chat:
            if not n:
                chat.append({"role": "user", "content": "Read all files."})
            step(chat, n)
            chat.fit()
            if chat.chat.summaries._job:
                chat.chat.summaries._job.wait(20)
    with opened(path) as chat:
        models = [edit.certificate.model for edit in edits(chat)]
    assert len(models) > 3
    assert set(models) == {"Scribe"}
