"""What goes through the gateway stays what it was, in every dialect: pictures, headers, errors, and requests
that our own part cannot handle.
"""

import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest

from gates import Gate, Quiet, answering, gate
from refold.core.message import Message
from refold.stores.memory import MemoryStore
from refold.stores.sqlite import SQLiteStore
from served import WAIT_S
from upstream import Upstream
from upstream_faults import FAILURES

PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4).decode()
URL = f"data:image/png;base64,{PNG}"
GONE_S = 1.0
"""In which the upstream's call must have ended, once a client went away."""


class Dialect(NamedTuple):
    path: str
    field: str
    """Of the request, where the history is."""
    picture: list[Any]
    fields: dict[str, Any]
    headers: dict[str, str]

    def asked(self, *said: Any, **more: Any) -> dict[str, Any]:
        return {**self.fields, self.field: [*said], **more}

    def answer(self, reply: dict[str, Any]) -> list[Any]:
        """The part of a reply that a client sends back."""
        match reply:
            case {"choices": [{"message": message}]}:
                return [{name: message[name] for name in ("role", "content")}]
            case {"output": output}:
                return output
        return [{"role": "assistant", "content": reply["content"]}]


BEARER = {"authorization": "Bearer sk-test"}
CLAUDE = {"x-api-key": "sk-ant-test", "anthropic-version": "2023-06-01"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
DIALECTS = {
    "openai-chat": Dialect(
        "/openai/v1/chat/completions",
        "messages",
        [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": URL}}],
        {"model": "gpt-5"},
        BEARER,
    ),
    "openai-responses": Dialect(
        "/openai/v1/responses",
        "input",
        [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": URL}],
        {"model": "gpt-5"},
        BEARER,
    ),
    "anthropic": Dialect(
        "/anthropic/v1/messages",
        "messages",
        [{"type": "text", "text": "What is it?"}, {"type": "image", "source": SOURCE}],
        {"model": "claude-sonnet-5", "max_tokens": 100},
        CLAUDE,
    ),
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server


@pytest.fixture
def gated(upstream: Upstream, tmp_path: Path) -> Iterator[Gate]:
    upstream.reset()
    with gate(SQLiteStore(tmp_path / "gate.db"), upstream) as one:
        yield one


@pytest.fixture(params=DIALECTS)
def dialect(request: Any) -> Dialect:
    return DIALECTS[request.param]


def post(gated: Gate, dialect: Dialect, body: Any, **headers: str) -> httpx.Response:
    named = dialect.headers | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(gated.url + dialect.path, json=body, headers=named, timeout=WAIT_S)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ours(found: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in found.headers.items() if name.startswith("x-refold")}


HELLO = user("Hello")


def test_pictures_go_as_they_came_now_and_with_what_comes_after_them(gated: Gate, dialect: Dialect) -> None:
    asked = dialect.asked(user(dialect.picture))
    found = post(gated, dialect, asked)
    assert (found.status_code, ours(found).get("x-refold-bypass")) == (200, None), found.text
    more = dialect.asked(*asked[dialect.field], *dialect.answer(found.json()), user("And the color?"))
    assert post(gated, dialect, more).status_code == 200
    sent = [[one for one in body[dialect.field] if one["role"] == "user"] for body in gated.bodies()]
    assert sent == [asked[dialect.field], [user(dialect.picture), user("And the color?")]]
    first: Message = gated.said()[0].message
    assert PNG in repr(first)


def test_fields_that_a_client_gives_its_messages_are_the_providers(gated: Gate, dialect: Dialect) -> None:
    own = {"metadata": {"ticket": 7}, "tags": "any", "expiry": "2026-01-01", "error": None}
    asked = dialect.asked(user("Hello") | own)
    found = post(gated, dialect, asked)
    assert "x-refold-bypass" not in ours(found)
    assert gated.bodies()[0][dialect.field] == asked[dialect.field]
    (first,) = [one for one in gated.said() if one.message.text == "Hello"]
    assert ("any" in first.tags, first.expiry) == (False, None)


HEADERS = {
    "accept": "application/json",
    "anthropic-beta": "context-management-2025-06-27",
    "idempotency-key": "a-1",
    "openai-beta": "assistants=v2",
    "openai-organization": "org",
    "openai-project": "project",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "user-agent": "mine/1",
    "x-custom": "a, b",
    "x-stainless-retry-count": "0",
    "x-stainless-runtime": "CPython",
}
KEPT_BACK = {"cookie": "no", "origin": "http://localhost", "x-refold-agent": "default", "forwarded": "for=me"}


def test_all_headers_of_a_client_go_upstream_but_those_that_are_for_us(gated: Gate, dialect: Dialect) -> None:
    sent = dialect.headers | HEADERS | {"content-type": "application/json"}
    body, host = json.dumps(dialect.asked(HELLO)), gated.url.removeprefix("http://")
    headers = sent | KEPT_BACK | {"origin": f"http://{host}"}
    found = httpx.post(gated.url + dialect.path, content=body, headers=headers, timeout=WAIT_S)
    assert found.status_code == 200, found.text
    (seen,) = gated.upstream.seen()
    came = {name.lower(): value for name, value in dict(seen["headers"]).items()}
    of_the_hop = {"host", "content-length", "accept-encoding"}
    assert {name: value for name, value in came.items() if name not in of_the_hop} == sent


@pytest.mark.parametrize("mode", [*FAILURES, "fail-502"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_upstreams_errors_pass_faithfully(gated: Gate, dialect: Dialect, mode: str, stream: bool) -> None:
    body, headers = dialect.asked(HELLO, stream=stream), dialect.headers | {"x-upstream-mode": mode}
    path = "/v1" + dialect.path.partition("/v1")[2]
    direct = httpx.post(gated.upstream.url + path, json=body, headers=headers, timeout=WAIT_S)
    through = httpx.post(gated.url + dialect.path, json=body, headers=headers, timeout=WAIT_S)
    assert _told(through) == _told(direct)
    for name in ("retry-after", "content-type", "x-ratelimit-remaining-requests"):
        assert through.headers.get(name) == direct.headers.get(name)


def _told(found: httpx.Response) -> tuple[int, Any]:
    """Without the id of the request, which is another each time."""
    if not found.headers["content-type"].startswith("application/json"):
        return found.status_code, found.content
    return found.status_code, {k: v for k, v in found.json().items() if k != "request_id"}


class Buggy(MemoryStore):
    """Something in it was never thought of."""

    def append(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("sk-secret division")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_passes_as_it_came_where_refold_has_a_bug(
    upstream: Upstream, dialect: Dialect, stream: bool
) -> None:
    upstream.reset()
    body = dialect.asked(HELLO, stream=stream)
    with gate(Buggy(), upstream) as gated:
        found = post(gated, dialect, body)
        assert (found.status_code, ours(found)) == (200, {"x-refold-bypass": "error"})
        assert gated.bodies() == [body]


@pytest.mark.parametrize("said", [7, {"role": "user", "content": [{"type": "hologram"}, 3]}, None])
def test_a_request_that_refold_does_not_understand_is_left_to_the_provider(
    gated: Gate, dialect: Dialect, said: Any
) -> None:
    body = dialect.asked(said)
    found = post(gated, dialect, body, x_upstream_mode="fail-503")
    assert (found.status_code, ours(found)) == (503, {"x-refold-bypass": "not-understood"})
    assert gated.bodies() == [body]
    assert gated.conversations() == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_ends_the_upstreams_call_within_a_second(
    dialect: Dialect, stream: bool
) -> None:
    is_asked, is_gone, ended = Event(), Event(), SimpleQueue[bool]()

    class Waiting(Quiet):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if stream:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b": hello\n\n")
                self.wfile.flush()
            is_asked.set()
            is_gone.wait(WAIT_S)
            self.connection.settimeout(GONE_S)
            try:
                ended.put(self.connection.recv(1) == b"")
            except ConnectionError:
                ended.put(True)
            except TimeoutError:
                ended.put(False)
            self.close_connection = True

    with answering(Waiting) as upstream, gate(MemoryStore(), upstream) as gated:
        body = json.dumps(dialect.asked(HELLO, stream=stream)).encode()
        host, port = gated.url.removeprefix("http://").split(":")
        headers = {"host": f"{host}:{port}", "content-type": "application/json", **dialect.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with socket.create_connection((host, int(port)), WAIT_S) as client:
            start = f"POST {dialect.path} HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n"
            client.sendall(start.encode() + body)
            assert is_asked.wait(WAIT_S)
        is_gone.set()
        assert ended.get(timeout=WAIT_S)
