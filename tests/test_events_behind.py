"""Live events where something is in the way: who does not read, a store that fails, what was erased."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

import pytest

import refold
from apis import running
from refold.core.codec import Link
from refold.core.errors import StoreError
from refold.serve import events
from refold.serve.conversations import Conversations
from refold.serve.events import EventBroker, Subscriber
from refold.session.notify import CompactionEvent
from refold.stores.store import Key, Store, open_store
from served import WAIT_S, until
from watchers import say, stuck, watching

TALK = Key("default", "talk")
SAID = [f"new {n}" for n in range(12)]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/log.db"


@pytest.fixture
def run(url):
    with running(url) as service:
        service.http.post("/api/conversations", json={"id": "talk", "model": "m"})
        yield service


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@contextmanager
def broker(store: Store) -> Iterator[EventBroker]:
    hub = EventBroker(Conversations(store))
    yield hub
    hub.close()


class _Minded:
    """A store that does something of the test's before it is read."""

    def __init__(self, store: Store) -> None:
        self.store, self.reads = store, 0
        self.first: Callable[[], Any] = lambda: None

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> Iterator[Link]:
        self.first()
        self.reads += 1
        return self.store.read(key, start, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def texts(feed: Subscriber) -> list[str]:
    return [frame.decode() for one in list(feed.queue) for frame in one.frames]


def talk(url: str, *texts: str) -> None:
    with refold.open(TALK.conversation, store=url, owner=TALK.owner) as chat:
        chat.append([{"role": "user", "content": text} for text in texts])


def compaction(kind: str, reason: str = "") -> CompactionEvent:
    return CompactionEvent(kind, TALK.conversation, 1, 1, reason)


# What was erased


def test_a_conversation_that_is_erased_and_begun_anew_is_told_whole(run):
    """Whether anything of the first one was told or not."""
    for before in (["old"] * 5, ["older"]):
        with watching(run, "/api/events") as watcher:
            say(run, *before)
            until(lambda old=before, w=watcher: len(w.named("message-added")) == len(old))
            run.http.delete("/api/conversations/talk")
            run.http.post("/api/conversations", json={"id": "talk", "model": "m"})
            say(run, *SAID)
            say(run, "the end")
            until(lambda w=watcher: w.told[-1].data.get("text") == "the end")
        told = [one.data["text"] for one in watcher.named("message-added")]
        assert told == [*before, *SAID, "the end"]


def test_one_that_another_process_erased_and_began_anew_is_told_whole(url, loop):
    store = open_store(url)
    talk(url, "old", "older")
    with broker(store) as hub:
        feed = hub.subscribe(None, loop)
        talk(url, "oldest")
        until(lambda: texts(feed))
        before = len(texts(feed))
        store.erase(TALK)
        talk(url, *SAID)
        until(lambda: len(texts(feed)) == before + len(SAID))
    assert all(f'"{text}"' in told for text, told in zip(SAID, texts(feed)[before:], strict=True))


def test_who_watches_a_fork_is_sent_away_when_it_is_erased_with_its_parent(run, loop):
    at, hub = "/api/conversations", run.service.events
    run.http.post(f"{at}/talk/fork", json={"id": "fork"})
    run.http.post(f"{at}/fork/fork", json={"id": "fork of it"})
    feeds = [hub.subscribe(Key("default", id), loop) for id in ("fork", "fork of it")]
    assert run.http.delete(f"{at}/talk?with_forks=true").status_code == 200
    until(lambda: all(feed.is_closed for feed in feeds))


# Who does not read


def test_one_who_does_not_read_keeps_the_service_from_stopping_for_the_grace_time_only(url):
    with running(url, limits={"grace_s": 0.5, "write_timeout_s": 10 * WAIT_S}) as run:
        run.http.post("/api/conversations", json={"id": "talk", "model": "m"})
        with stuck(run, "/api/events"):
            run.server.should_exit = True
            until(lambda: not run.server.server_state.tasks)


def test_one_who_does_not_read_is_cut_off_without_an_end(url, caplog):
    with running(url, limits={"write_timeout_s": 0.5}) as run:
        run.http.post("/api/conversations", json={"id": "talk", "model": "m"})
        with stuck(run, "/api/conversations/talk/events") as slow:
            until(lambda: not run.service.events.subscribers)
            got = b""
            with suppress(ConnectionError):
                while some := slow.recv(65_536):
                    got += some
    assert not got.endswith(b"0\r\n\r\n")
    assert "without completing response" not in caplog.text


def test_who_comes_while_others_do_not_read_is_told_only_what_comes(run):
    with stuck(run, "/api/conversations/talk/events"), watching(run) as fresh:
        (place,) = say(run, "after")
        until(lambda: fresh.told and fresh.told[-1].data["text"] == "after")
        with watching(run, last_event_id=str(place + 1)) as again:
            say(run, "later")
            until(lambda: again.told)
    assert fresh.told[0].data["text"] == "after"
    assert [one.data["text"] for one in again.told] == ["later"]


# What leaves nothing in the record


def test_what_leaves_no_trace_is_told_though_the_store_fails(url, loop, monkeypatch):
    monkeypatch.setattr(events, "POLL_S", 10 * WAIT_S)
    talk(url, "one")
    store = _Minded(open_store(url))

    def fail() -> None:
        store.first = lambda: None
        raise StoreError("busy")

    with broker(store) as hub:
        feed = hub.subscribe(TALK, loop)
        store.first = fail
        hub.publish(TALK, compaction("compaction:complete"))
        (one,) = until(lambda: texts(feed))
    assert "compaction:complete" in one


def test_who_comes_later_is_not_told_what_was_under_way_before(url, loop):
    talk(url, "one")
    store, is_reading, goes_on = _Minded(open_store(url)), Event(), Event()

    def block() -> None:
        store.first = lambda: None
        is_reading.set()
        goes_on.wait(WAIT_S)

    with broker(store) as hub:
        first = hub.subscribe(TALK, loop)
        store.first = block
        hub.publish(TALK)
        assert is_reading.wait(WAIT_S)
        hub.publish(TALK, compaction("compaction:start", "old"))
        hub.unsubscribe(first)
        second = hub.subscribe(TALK, loop)
        goes_on.set()
        hub.publish(TALK, compaction("compaction:start", "new"))
        until(lambda: any('"new"' in one for one in texts(second)))
    assert not any('"old"' in one for one in texts(second))
