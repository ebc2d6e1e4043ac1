"""Live events: nothing is missed, nothing comes twice, and who does not read costs next to nothing."""

import asyncio
import socket
import subprocess
import sys

import pytest

import refold
from apis import running, tool_loop
from refold.serve import events, service
from refold.serve.conversations import Conversations
from refold.serve.events import EventBroker
from refold.session.notify import MessageEvent
from refold.stores.store import Key, open_store
from refold.testing.scribe import Scribe
from served import WAIT_S, until
from watchers import Told, say, watching

WRITER = """
import sys, refold
chat = refold.open("talk", store=sys.argv[1])
for n in range(int(sys.argv[2])):
    chat.append({"role": "user", "content": f"{sys.argv[3]} {n}"})
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/log.db"


@pytest.fixture
def run(url):
    with running(url) as service:
        service.http.post("/api/conversations", json={"id": "talk", "model": "m"})
        yield service


def test_what_is_said_is_told_with_its_place_and_a_glance_of_its_text(run):
    with watching(run) as watcher:
        (place,) = say(run, "x" * 500)
        (one,) = until(lambda: watcher.named("message-added"))
    assert (one.id, one.data["at"], one.data["role"]) == (place + 1, place, "user")
    assert len(one.data["text"]) == 200


def test_an_id_beyond_the_end_goes_on_from_the_end(run):
    with watching(run, Last_Event_ID="5000") as watcher:
        (place,) = say(run, "hello")
        (one,) = until(lambda: watcher.named("message-added"))
    assert one.id == place + 1


def test_what_looks_like_a_secret_is_not_told(run):
    with watching(run) as watcher:
        say(run, "my key is sk-proj-0123456789abcdefghij")
        (one,) = until(lambda: watcher.named("message-added"))
    assert "0123456789" not in one.data["text"]


# proves: C12
def test_everything_that_is_done_is_told(run):
    run.http.post("/api/conversations/talk/messages", json={"messages": tool_loop(30)})
    with watching(run) as watcher:
        at = "/api/conversations/talk"
        run.http.post(f"{at}/compact", json={"target_tokens": 2_000})
        run.http.post(f"{at}/pin", json={"at": 3, "why": "it matters"})
        run.http.post(f"{at}/expand", json={"at": 4, "reason": "to see"})
        until(lambda: watcher.named("message-expanded"))  # not in the log: in no order with the rest
        run.http.post(f"{at}/correct", json={"at": 1, "message": "Find the boat to Oslo."})
        run.http.post(f"{at}/undo", json={})
        run.http.patch(at, json={"title": "Oslo"})
        until(lambda: watcher.named("named"))
    names = [one.event for one in watcher.told]
    done = names.index("compaction:complete")
    assert names.index("compaction:start") < done
    assert names.index("message-compacted") < done
    rest = ["pinned", "message-expanded", "corrected", "undone", "named"]
    assert [name for name in names if name in rest] == rest
    (start,), (complete,) = watcher.named("compaction:start"), watcher.named("compaction:complete")
    assert start.data["reason"] == "on demand"
    assert start.data["tokens_before"] > 4_000
    assert start.data["limit"] == 8_000
    assert complete.data["tokens_after"] < complete.data["tokens_before"]
    assert complete.data["messages"] >= 1
    assert {"was_pruned", "was_summarized"} <= set(complete.data)
    assert (start.id, complete.id) == (None, None)


# proves: C12
def test_a_summary_is_told_when_it_begins_and_when_it_is_done(url):
    with running(url, summarizer=Scribe()) as run:
        run.http.post("/api/conversations", json={"id": "talk", "model": "m"})
        run.http.post("/api/conversations/talk/messages", json={"messages": tool_loop(30)})
        with watching(run) as watcher:
            run.http.post("/api/conversations/talk/compact", json={"strategy": "summarize"})
            (complete,) = until(lambda: watcher.named("compaction:complete"))
    assert complete.data["was_summarized"] is True


# proves: C12
def test_what_is_pruned_at_the_end_is_told_with_its_tokens(run, monkeypatch):
    monkeypatch.setattr(service, "MAX_OPEN_SESSIONS", 0)  # so a session ends as soon as nobody uses it
    with watching(run) as watcher:
        run.http.post("/api/conversations/talk/messages", json={"messages": tool_loop(30)})
        (told,) = until(lambda: watcher.named("prune:complete"))
    assert told.data["was_pruned"] is True
    assert told.data["tokens_before"] > told.data["tokens_after"] > 0
    assert watcher.named("compaction:start") == []


def test_who_comes_back_goes_on_where_it_was(run):
    with watching(run) as watcher:
        say(run, "one", "two", "three")
        until(lambda: len(watcher.named("message-added")) == 3)
    say(run, "four", "five")
    with watching(run, last_event_id=str(watcher.told[0].id)) as again:
        say(run, "six")
        until(lambda: len(again.told) == 5)
    assert [one.data["text"] for one in again.told] == ["two", "three", "four", "five", "six"]
    with watching(run, "/api/conversations/talk/events?after=0") as whole:
        until(lambda: len(whole.told) == 7)
    assert [one.id for one in whole.told] == [1, 2, 3, 4, 5, 6, 7]


def test_who_comes_first_is_told_only_what_comes(run):
    say(run, "before")
    with watching(run) as watcher:
        say(run, "after")
        until(lambda: watcher.told)
    assert [one.data["text"] for one in watcher.told] == ["after"]


def test_nothing_is_missed_and_nothing_comes_twice_while_other_processes_write(run, url):
    """Clients come and go meanwhile, and each goes on with the id it has."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, url, "150", name]) for name in ("ann", "bob")]
    seen, last = list[Told](), "0"
    try:
        while len([one for one in seen if one.event == "message-added"]) < 300:
            with watching(run, last_event_id=last) as watcher:
                many = min(40, 300 - len([one for one in seen if one.event == "message-added"]))
                until(lambda n=many, w=watcher: len(w.named("message-added")) >= n)
            seen += watcher.told
            last = str(watcher.last)
    finally:
        assert [writer.wait(WAIT_S) for writer in writers] == [0, 0]
    ids = [one.id for one in seen]
    assert ids == list(range(1, len(ids) + 1))
    texts = [one.data["text"] for one in seen if one.event == "message-added"]
    assert sorted(texts) == sorted(f"{who} {n}" for who in ("ann", "bob") for n in range(150))


def test_one_who_does_not_read_is_cut_off_and_comes_back_by_its_id(run):
    """The others are told all the same."""
    end = 16_001  # more than a socket takes for one who does not read
    with socket.create_connection(("127.0.0.1", run.port), WAIT_S) as slow:
        slow.sendall(b"GET /api/conversations/talk/events?after=0 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        with watching(run) as quick:
            until(lambda: run.service.events.subscribers == 2)
            say(run, *["y" * 400] * 8_000)
            say(run, *["y" * 400] * 8_000)
            until(lambda: quick.told and quick.last == end)
        got = b""
        while b"event: lagging" not in got[-70_000:]:
            got += slow.recv(65_536)
    ids = [int(line[4:]) for line in got.split(b"\n") if line.startswith(b"id: ")]
    assert ids == list(range(1, len(ids) + 1))
    with watching(run, last_event_id=str(ids[-1])) as again:
        until(lambda: again.told and again.last == end)
    assert [one.id for one in again.told] == list(range(ids[-1] + 1, end + 1))


def test_a_quiet_stream_is_kept_alive(run, monkeypatch):
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    with watching(run) as watcher:
        until(lambda: len(watcher.comments) >= 4)


def test_a_client_that_goes_away_is_forgotten(run, monkeypatch):
    monkeypatch.setattr(events, "HEARTBEAT_S", 10 * WAIT_S)  # it is noticed before anything is sent
    with socket.create_connection(("127.0.0.1", run.port), WAIT_S) as client:
        client.sendall(b"GET /api/conversations/talk/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        until(lambda: run.service.events.subscribers == 1)
    until(lambda: run.service.events.subscribers == 0)


def test_streams_end_when_the_service_does(url):
    with running(url, limits={"grace_s": 10 * WAIT_S}) as run:
        run.http.post("/api/conversations", json={"id": "talk"})
        with watching(run) as one, watching(run, "/api/events") as every:
            run.server.should_exit = True
            until(lambda: one.is_over and every.is_over)


def test_a_stream_ends_when_its_conversation_is_erased(run):
    with watching(run) as watcher:
        run.http.delete("/api/conversations/talk")
        until(lambda: watcher.is_over)
    assert run.http.get("/api/conversations/talk/events").status_code == 404


def test_all_conversations_can_be_watched_at_once(run, url):
    with watching(run, "/api/events") as watcher:
        say(run, "here")
        run.http.post("/api/conversations/talk/fork", json={"id": "fork"})
        say(run, "in the fork", id="fork")
        with refold.open("elsewhere", store=url) as other:  # as another process would
            other.append({"role": "user", "content": "there"})
        until(lambda: len(watcher.named("message-added")) == 3)
    told = {(one.data["conversation"], one.data["text"]) for one in watcher.told}
    assert told == {("talk", "here"), ("fork", "in the fork"), ("elsewhere", "there")}
    assert {one.id for one in watcher.told} == {None}


@pytest.mark.parametrize("id", ["x", "-1", "1.5", "9" * 30])
def test_an_id_that_is_none_is_refused(run, id):
    answer = run.http.get("/api/conversations/talk/events", headers={"last-event-id": id})
    assert answer.status_code == 400
    assert "last-event-id" in answer.json()["error"]["message"]


def test_the_beginning_of_a_conversation_is_told_whoever_said_it(url):
    """Another process said the first message, this one the second, before anybody looked."""
    with asyncio.Runner() as runner:
        hub = EventBroker(Conversations(open_store(url)))
        feed = hub.subscribe(None, runner.get_loop())
        with refold.open("new", store=url) as other:
            other.append({"role": "user", "content": "first"})
        with refold.open("new", store=url, on_event=lambda event: hub.publish(other.key, event)) as chat:
            chat.append({"role": "user", "content": "second"})
        until(lambda: len(feed.queue) == 2)
        hub.close()


def test_what_leaves_no_trace_in_a_fork_does_not_tell_its_past_again(url):
    with asyncio.Runner() as runner, refold.open("talk", store=url) as chat:
        chat.append([{"role": "user", "content": f"{n}"} for n in range(20)])
        hub, key = EventBroker(Conversations(open_store(url))), Key(chat.key.owner, "fork")
        feed = hub.subscribe(None, runner.get_loop())
        fork = chat.fork("fork")
        told = MessageEvent("message-expanded", "fork", 3, 1, 1, "user")
        hub.publish(key, told)
        fork.append({"role": "user", "content": "new"})
        hub.publish(key)
        until(lambda: any(b'"new"' in one.frames[0] for one in list(feed.queue)))
        assert len(feed.queue) == 2
        hub.close()
        fork.close()
