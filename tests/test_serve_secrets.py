"""The keys of clients, and tokens, are nowhere to be found afterwards, whatever was asked and went wrong."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from refold.core.errors import CorruptError
from refold.stores.packing import unpack
from served import WAIT_S, until
from test_gateway_faithful import DIALECTS, Dialect
from test_serve_run import Process, started
from upstream import Upstream

KNOWN, UNKNOWN = "sk-proj-Ab3dEf6hIj9lMn2pQr5tUv8x", "sk-orchid-river-lantern-moss"
"""A key that looks like one, and one that nobody would take for a key."""
TOKEN = "walnut-meadow-copper-tide"
REAL = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
"""What virtual tables hold is in others, and those that made them may be newer than Python's SQLite."""
SAID = "marmalade for breakfast"
MODES = ("", "fail-500", "redirect", "cut-stream", "error-stream", "garbage")


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server


def keyed(dialect: Dialect, key: str) -> dict[str, str]:
    own = {"x-api-key": key} if "x-api-key" in dialect.headers else {"authorization": f"Bearer {key}"}
    return dialect.headers | own


def stored(folder: Path) -> str:
    """All that is in the store, and all files that it consists of as they are."""
    found = [one.read_bytes() for one in folder.glob("refold.db*")]
    with sqlite3.connect(folder / "refold.db") as db:
        tables = [name for (name,) in db.execute(REAL)]
        for table in tables:
            for row in db.execute(f'SELECT * FROM "{table}"'):
                found += [_plain(value) for value in row if isinstance(value, bytes)]
                found += [value.encode() for value in row if isinstance(value, str)]
    return b"\n".join(found).decode("latin-1")


def _plain(value: bytes) -> bytes:
    try:
        return unpack(value)
    except CorruptError:
        return value


def ask_all(service: Process, **headers: str) -> list[str]:
    """In every dialect, with every key and every fault; what was answered by the service itself."""
    told = list[str]()
    for dialect in DIALECTS.values():
        for key in (KNOWN, UNKNOWN):
            for mode in MODES:
                body = dialect.asked({"role": "user", "content": SAID}, stream=mode.endswith("stream"))
                named = keyed(dialect, key) | headers | ({"x-upstream-mode": mode} if mode else {})
                try:
                    found = httpx.post(service.url + dialect.path, json=body, headers=named, timeout=WAIT_S)
                except httpx.HTTPError as error:
                    told.append(repr(error))
                else:
                    told += [str(found.headers.items()), found.text]
    for secret in (KNOWN, UNKNOWN, TOKEN):
        named = headers | {"authorization": f"Bearer {secret}"}
        for path in (f"/api/conversations/{KNOWN}", "/api/nothing", "/nothing", "/metrics"):
            told.append(service.ask(path, **named)[1].decode().replace("nothing", ""))
    return told


class Listening:
    """What is told of everything that happens, as it is written."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.told = list[str]()
        self._url, self._headers = url, headers
        Thread(target=self._listen, daemon=True).start()
        until(lambda: self.told)

    def _listen(self) -> None:
        with httpx.stream("GET", self._url, headers=self._headers, timeout=WAIT_S) as answer:
            self.told += answer.iter_text()


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "with a token"])
def test_no_key_and_no_token_is_in_the_store_in_a_log_an_event_an_export_or_an_error(
    tmp_path: Path, upstream: Upstream, is_open: bool
) -> None:
    to = {"openai": upstream.openai, "anthropic": upstream.url}
    settings: dict[str, Any] = {"upstreams": to} | ({} if is_open else {"token": TOKEN})
    (tmp_path / "refold.yaml").write_text(json.dumps({"serve": settings}))
    headers = {} if is_open else {"x-refold-token": TOKEN}
    with started(tmp_path, "--log-level", "debug") as service:
        events = Listening(f"{service.url}/api/events", headers).told
        answers = ask_all(service, **headers)
        listed = service.ask("/api/conversations?limit=100", **headers)[1].decode()
        rows = json.loads(listed)["conversations"]
        until(lambda: "".join(events).count(SAID) >= len(rows))
        at = [f"/api/conversations/{quote(row['id'])}/export?owner={quote(row['owner'])}" for row in rows]
        exports = [service.ask(path, **headers)[1].decode() for path in at]
        assert service.stop() == 0
    places = {"store": stored(tmp_path), "log": (tmp_path / "log").read_text(), "list": listed}
    places |= {"events": "".join(events), "exports": "".join(exports), "answers": "".join(answers)}
    assert {name for name, text in places.items() if SAID in text} >= {"store", "events", "exports", "list"}
    assert "redirect" in places["log"]
    for secret in (KNOWN, UNKNOWN, TOKEN):
        assert [name for name, text in places.items() if secret in text] == []
