"""Clients that watch: they read what is told, and keep it."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from typing import Any, NamedTuple

import httpx

from apis import Running
from served import WAIT_S, until


class Told(NamedTuple):
    id: int | None
    event: str
    data: dict[str, Any]


class Watcher:
    """A client that reads what is told, in a thread of its own."""

    def __init__(self, response: httpx.Response) -> None:
        self.told: list[Told] = []
        self.comments: list[str] = []
        self.is_over = False
        self._response = response
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.comments)  # from now on nothing is missed

    def _read(self) -> None:
        facts: dict[str, str] = {}
        try:
            for line in self._response.iter_lines():
                name, _, value = line.partition(": ")
                if line.startswith(":"):
                    self.comments.append(line)
                elif line:
                    facts[name] = value
                elif "event" in facts:
                    id = facts.get("id")
                    self.told.append(Told(int(id) if id else None, facts["event"], json.loads(facts["data"])))
                    facts = {}
        except httpx.HTTPError:
            pass
        self.is_over = True

    def named(self, *names: str) -> list[Told]:
        return [one for one in self.told if one.event in names]

    @property
    def last(self) -> int:
        return next(one.id for one in reversed(self.told) if one.id is not None)


@contextmanager
def watching(run: Running, path: str = "/api/conversations/talk/events", **headers: str) -> Iterator[Watcher]:
    with httpx.Client(base_url=run.url, timeout=WAIT_S) as http:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with http.stream("GET", path, headers=named) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Watcher(response)


def say(run: Running, *texts: str, id: str = "talk") -> list[int]:
    said = [{"role": "user", "content": text} for text in texts]
    answer = run.http.post(f"/api/conversations/{id}/messages", json={"messages": said})
    assert answer.status_code == 201, answer.text
    return answer.json()["places"]


@contextmanager
def stuck(run: Running, path: str) -> Iterator[socket.socket]:
    """One who reads nothing, and of whom the service knows it."""
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.settimeout(WAIT_S)
        client.connect(("127.0.0.1", run.port))
        before = run.service.events.subscribers
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        until(lambda: run.service.events.subscribers > before)
        connections = run.server.server_state.connections
        while not any(one.flow.write_paused for one in list(connections)):
            say(run, *["y" * 400] * 100)
        yield client
