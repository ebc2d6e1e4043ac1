"""What was let go is gone, though nobody looks for what is left: with the collector off, but for the last."""

import asyncio
import gc
import json
import socket
from collections import deque
from collections.abc import Iterator
from threading import Barrier, Thread
from typing import Any

import pytest

import refold
from gates import Quiet, answering, gate
from refold.config.config import load_config
from refold.core.view import Item
from refold.serve import service
from refold.serve.conversations import Conversations
from refold.serve.events import EventBroker
from refold.serve.incoming import read_request
from refold.serve.recorder import Recorder
from refold.serve.run import COLLECT
from refold.serve.service import Service
from refold.serve.streaming import Forwarder
from refold.stores.record import Record
from refold.stores.store import Key, open_store
from refold.testing.scribe import Scribe
from served import WAIT_S, until

LINES = 100
SAID = [{"role": "user", "content": f"line {n}"} for n in range(LINES)]
TIMES = 10


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/log.db"


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what was there before does not count
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(params=[None, Scribe()], ids=["plain", "with summaries"])
def serving(request, url):
    one = Service(load_config(None), open_store(url), summarizer=request.param)
    yield one
    one.close()


def count(kind: type) -> int:
    return sum(isinstance(one, kind) for one in gc.get_objects())


def talk(serving: Service, name: str) -> Key:
    key = Key("default", name)
    with serving.session(key) as session:
        session.append(SAID)
        session.fit()
    return key


def test_a_session_that_is_no_longer_kept(serving, monkeypatch):
    monkeypatch.setattr(service, "MAX_OPEN_SESSIONS", 2)
    for n in range(TIMES):
        talk(serving, f"talk{n}")
    assert count(Item) < 4 * LINES


def test_a_session_that_two_threads_want_at_once_is_opened_once(serving, monkeypatch):
    key, both, opened = talk(serving, "talk"), Barrier(2), []
    serving.forget(key)
    new = serving._open

    def noted(wanted):
        opened.append(wanted)
        return new(wanted)

    def use() -> None:
        both.wait(WAIT_S)
        with serving.session(key) as session:
            session.fit()

    monkeypatch.setattr(serving, "_open", noted)
    threads = [Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    del threads, thread
    assert len(opened) == 1
    assert count(Record) == 1


def test_a_conversation_that_is_erased(serving):
    for n in range(TIMES):
        key = talk(serving, f"talk{n}")
        serving.store.erase(key)
        serving.forget(key)
    assert count(Item) == 0
    assert list(serving.store.conversations()) == []


def test_a_conversation_that_is_erased_while_somebody_is_at_it(serving):
    key = talk(serving, "talk")
    with serving.session(key) as session:
        serving.store.erase(key)
        serving.forget(key)
        assert session.get_count() == 0
    del session
    assert count(Record) == 0
    assert list(serving.store.conversations()) == []


def test_forks_that_nobody_has_gone_on_with(serving):
    key, recorder = talk(serving, "talk"), Recorder(serving)
    body = json.dumps({"messages": SAID}).encode()
    request = read_request("openai-chat", body)._replace(owner=key.owner)
    before = count(Item)
    for _ in range(TIMES):
        recorder._fork(key, LINES - 1, request)
    assert count(Item) == before


def test_those_who_watch_and_leave(url):
    with refold.open("talk", store=url) as chat:
        chat.append(SAID)
        key = chat.key
    del chat
    hub = EventBroker(Conversations(open_store(url)))
    with asyncio.Runner() as runner:
        for _ in range(TIMES):
            feed = hub.subscribe(key, runner.get_loop())
            hub.unsubscribe(feed)
        assert count(Item) == LINES  # for the next who reads it
        hub.close()


def test_rows_of_a_list(serving):
    for n in range(TIMES):
        key = talk(serving, f"talk{n}")
        serving.forget(key)
    assert len(serving.conversations.page(None, TIMES)[0]) == TIMES
    assert count(Item) == 0


class _Endless(Quiet):
    """Begins to answer, and never ends."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": "Well"}}
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        self.wfile.flush()
        self.rfile.read()
        self.close_connection = True


def test_a_request_whose_client_left_in_the_middle_of_the_answer(url):
    body = json.dumps({"model": "gpt-5", "stream": True, "messages": SAID}).encode()
    with answering(_Endless) as upstream, gate(open_store(url), upstream) as gated:
        host, port = gated.url.removeprefix("http://").split(":")
        head = f"host: {host}:{port}\r\nauthorization: Bearer sk-test\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), WAIT_S) as client:
            client.sendall(f"POST /openai/v1/chat/completions HTTP/1.1\r\n{head}".encode() + body)
            got = b""
            while b"Well" not in got:
                got += client.recv(65_536)
            assert count(Forwarder) == 1
        until(lambda: count(Forwarder) == 0)


class _Ring:
    """What holds itself: only the collector ends it."""

    __slots__ = ("own",)
    ended = 0

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        _Ring.ended += 1


def test_what_holds_itself_and_has_grown_old_is_found_before_there_are_three_million_of_it():
    before, most, in_use = gc.get_threshold(), 3_000_000, deque[_Ring](maxlen=10_000)
    gc.set_threshold(*COLLECT)
    gc.enable()
    try:
        made = 0
        while made - _Ring.ended < most and not _Ring.ended:
            in_use.append(_Ring())
            made += 1
    finally:
        gc.set_threshold(*before)
    assert _Ring.ended > made // 2
