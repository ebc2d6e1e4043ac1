"""Who gets in, with what, and what never gets out. Each test fails without the line that it is about."""

import asyncio
import hmac
import json
import logging
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from refold.config.config import load_config
from refold.config.validate import validated_fields
from refold.core.errors import SettingError
from refold.serve import api, app, gateway, logs
from refold.serve.guard import MAX_CALLERS, RateLimit
from refold.serve.http_errors import error_body, requested_id, valid_id
from refold.serve.http_protocol import MAX_HEADER_BYTES, MAX_UNSENT_BYTES
from refold.serve.logs import redacted
from refold.serve.run import check_safe
from refold.serve.service import Service
from refold.serve.tokens import ALL_SCOPES, Caller, Tokens, credential_of, hash_of, new_token
from refold.stores.memory import MemoryStore
from served import behind_the_guard, running, until, whole_service

ANN, BEN, DAN, EVE = (f"rft_{name}{'0a1B2c3D4e5F6g7H8' * 2}" for name in ("ann", "ben", "dan", "eve"))
TOKENS = [
    {"hash": hash_of(ANN), "owner": "ann", "scopes": ["read", "append"]},
    {"hash": hash_of(BEN), "owner": "ben", "scopes": ["read"]},
    {"hash": hash_of(DAN), "owner": "dan", "scopes": ["append"]},
    {"hash": hash_of(EVE), "owner": "eve", "scopes": ["admin"], "revoked": True},
]
PATHS = ("/healthz", "/metrics", "/api/echo", "/openai/v1/echo", "/panel/page", "/nowhere")


@pytest.fixture(scope="module")
def open_():
    with behind_the_guard() as served:
        yield served


@pytest.fixture(scope="module")
def closed():
    with behind_the_guard(
        token="the-one-token", tokens=TOKENS, hosts=["agents.example", "x.example:444"]
    ) as served:
        yield served


# Where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "machine.example"])
def test_other_machines_need_a_token(host):
    with pytest.raises(SettingError, match="no token is set"):
        check_safe(load_config({"serve": {"host": host}}))
    check_safe(load_config({"serve": {"host": host, "token": "t"}}))
    check_safe(load_config({"serve": {"host": host, "tokens": TOKENS}}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host):
    check_safe(load_config({"serve": {"host": host}}))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://models.example/v1", "without encryption"),
        ("ftp://models.example", "expected an address"),
        ("file:///etc/passwd", "expected an address"),
        ("models.example", "expected an address"),
        ("https://me:word@models.example", "password"),
        ("https://models.example/v1?key=1", "expected an address"),
        ("https://models.example:99999", "address"),
        ("https://", "expected an address"),
    ],
)
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_an_upstream_that_is_not_safe_is_refused_at_the_start(url, why, provider):
    with pytest.raises(SettingError, match=why) as caught:
        check_safe(load_config({"serve": {"upstreams": {provider: url}}}))
    assert "word" not in str(caught.value).replace("password", "")


def test_plain_http_goes_to_this_machine_or_where_it_is_asked_for():
    check_safe(load_config({"serve": {"upstreams": {"openai": "http://127.0.0.1:1234/v1"}}}))
    plain = {"upstreams": {"openai": "http://models.example/v1"}, "allow_insecure_upstreams": True}
    check_safe(load_config({"serve": plain}))


# Tokens


def test_without_tokens_the_user_of_the_machine_may_do_everything(open_):
    assert json.loads(open_.ask("/api/echo").body) == {
        "bytes": 0,
        "owner": None,
        "scopes": sorted(ALL_SCOPES),
    }
    assert json.loads(open_.post("/openai/v1/echo").body)["scopes"] == ["append", "read"]


@pytest.mark.parametrize("path", ["/api/echo", "/metrics", "/openai/v1/echo", "/nowhere"])
@pytest.mark.parametrize("token", [None, "", "wrong", EVE, hash_of(ANN), ANN[:-1], f"Bearer {ANN}"])
def test_nobody_comes_in_without_a_token_that_is_known(closed, path, token):
    before = len(closed.entered)
    assert closed.ask(path, x_refold_token=token).status == 401
    assert closed.ask(path, authorization=f"Basic {token}").status == 401
    assert len(closed.entered) == before


@pytest.mark.parametrize("path", ["/healthz", "/panel/page"])
def test_what_tells_nothing_is_open_and_gives_no_rights(closed, path):
    assert closed.ask(path).status == 200
    assert json.loads(closed.ask("/healthz").body)["scopes"] == []


def test_a_token_says_whose_it_is_and_what_it_allows(closed):
    assert json.loads(closed.ask("/api/echo", authorization=f"Bearer {ANN}").body) == {
        "bytes": 0,
        "owner": "ann",
        "scopes": ["append", "read"],
    }
    assert json.loads(closed.ask("/api/echo", x_refold_token="the-one-token").body) == {
        "bytes": 0,
        "owner": "default",
        "scopes": sorted(ALL_SCOPES),
    }


def test_on_the_gateway_authorization_is_the_key_of_the_upstream(closed):
    assert closed.post("/openai/v1/echo", authorization=f"Bearer {ANN}").status == 401
    assert closed.post("/openai/v1/echo", authorization="Bearer sk-x", x_refold_token=ANN).status == 200


def test_the_gateway_needs_the_right_to_append(closed):
    assert closed.ask("/openai/v1/echo", x_refold_token=BEN).status == 200
    answer = closed.post("/openai/v1/echo", x_refold_token=BEN)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert answer.headers["connection"] == "close"  # its body was not read
    assert closed.ask("/openai/v1/echo", method="DELETE", x_refold_token=BEN).status == 403
    only = [{"hash": hash_of(ANN), "owner": "ann", "scopes": ["append"]}]
    with behind_the_guard(tokens=only) as gateway:
        assert gateway.ask("/openai/v1/echo", x_refold_token=ANN).status == 200


def test_every_hash_is_compared_whichever_it_is(monkeypatch):
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    tokens = Tokens(load_config({"serve": {"tokens": TOKENS[:2]}}))
    for token in (ANN, BEN, "wrong", ""):
        compared.clear()
        tokens.caller_of(token)
        assert [known for _, known in compared] == [one["hash"] for one in TOKENS[:2]]
        assert {len(asked) for asked, _ in compared} == {64}


def test_a_token_is_taken_back_while_the_service_runs(tmp_path: Path):
    file, now = tmp_path / "refold.yaml", [0.0]
    write = lambda *entries: file.write_text(json.dumps({"serve": {"tokens": entries}}))  # noqa: E731
    write(*TOKENS)
    tokens = Tokens(load_config(file), file, clock=lambda: now[0])
    assert tokens.caller_of(ANN) == Caller("ann", frozenset(("read", "append")))
    write({**TOKENS[0], "revoked": True}, TOKENS[1])
    now[0] += 1
    assert tokens.caller_of(ANN) is None
    assert tokens.caller_of(BEN) is not None
    write(TOKENS[0])
    now[0] += 1
    assert tokens.caller_of(ANN) is not None
    assert tokens.caller_of(BEN) is None


@pytest.mark.parametrize("content", ["serve: {tokens: [{hash: short}]}", "serve: [", "serve: {nonsense: 1}"])
def test_a_file_that_cannot_be_read_leaves_the_tokens_as_they_were(tmp_path: Path, content, caplog):
    file, now = tmp_path / "refold.yaml", [0.0]
    file.write_text(json.dumps({"serve": {"tokens": TOKENS}}))
    tokens = Tokens(load_config(file), file, clock=lambda: now[0])
    file.write_text(content)
    now[0] += 1
    assert tokens.caller_of(ANN) is not None
    assert tokens.caller_of("wrong") is None
    assert "could not reload the tokens" in caplog.text


def test_a_file_without_tokens_lets_nobody_in(tmp_path: Path):
    file, now = tmp_path / "refold.yaml", [0.0]
    file.write_text(json.dumps({"serve": {"tokens": TOKENS}}))
    tokens = Tokens(load_config(file), file, clock=lambda: now[0])
    file.write_text("{}")
    now[0] += 1
    assert tokens.caller_of(ANN) is None
    assert tokens.are_needed


def test_where_all_tokens_are_revoked_nobody_comes_in():
    revoked = [{**one, "revoked": True} for one in TOKENS]
    with behind_the_guard(tokens=revoked) as served:
        for path in ("/api/echo", "/openai/v1/echo", "/metrics"):
            assert served.ask(path).status == 401
            assert served.ask(path, x_refold_token=ANN).status == 401
        assert served.entered == []


def test_a_file_in_which_all_tokens_are_revoked_closes_what_was_open(tmp_path: Path):
    file = tmp_path / "refold.yaml"
    file.write_text("{}")
    tokens = Tokens(load_config(file), file)
    file.write_text(json.dumps({"serve": {"tokens": [{**TOKENS[0], "revoked": True}]}}))
    tokens.reload()
    assert tokens.are_needed


@pytest.mark.parametrize(
    "serve",
    [
        {"token": ""},
        {"tokens": [{}]},
        {"tokens": [{"hash": ANN}]},
        {"tokens": [{"hash": hash_of(ANN).upper()}]},
        {"tokens": [{"hash": hash_of(ANN), "owner": ""}]},
        {"tokens": [{"hash": hash_of(ANN), "scopes": []}]},
        {"tokens": [{"hash": hash_of(ANN), "scopes": ["all"]}]},
        {"tokens": {"hash": hash_of(ANN)}},
        {"token": 12345678},
        {"tokens": [{"hash": 12345678}]},
    ],
)
def test_a_token_that_makes_no_sense_is_refused_and_not_told(serve):
    with pytest.raises(SettingError) as caught:
        Tokens(load_config({"serve": serve}))
    assert not re.search(f"{ANN}|{hash_of(ANN)}|12345678", str(caught.value), re.IGNORECASE)


# proves: X28
def test_credentials_are_told_apart_whatever_header_carries_them():
    aws = "AWS4-HMAC-SHA256 Credential={}/20260101/eu/bedrock/aws4_request, Signature={}"
    sent = [
        {"x-api-key": "a"},
        {"authorization": "Bearer b"},
        {"authorization": "Basic c"},
        {"api-key": "d"},
        {"x-goog-api-key": "e"},
        {"authorization": aws.format("AKIA1", "1")},
        {"authorization": aws.format("AKIA2", "1")},
        {"x-api-key": "a", "authorization": "Bearer b"},
        {},
    ]
    assert len({credential_of(Headers(one)) for one in sent}) == len(sent)
    assert credential_of(Headers({"authorization": "bearer  a "})) == "a"
    assert credential_of(Headers({"authorization": aws.format("AKIA1", "2")})) == "AKIA1"


def test_tokens_are_random_and_long():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) >= 43 + len("rft_") for token in tokens)  # 256 bits in 43 characters


# Host and Origin


HOSTS = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost:1",
    "localhost@evil",
    "[::1]:1",
    "",
    "a b",
    None,
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", [*HOSTS, None])
def test_a_host_that_is_not_ours_is_refused_on_every_route(open_, path, host):
    before = len(open_.entered)
    assert open_.ask(path, host=host).status == 403
    assert len(open_.entered) == before


def test_two_hosts_are_none(open_):
    with open_.socket() as client:
        client.sendall(b"GET /api/echo HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert client.recv(4_096).split()[1] in (b"400", b"403")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "localhost."])
def test_our_own_names_are_known(open_, name):
    assert open_.ask("/api/echo", host=f"{name}:{open_.port}").status == 200
    assert open_.ask("/api/echo", host=name).status == 200


def test_other_names_are_known_where_they_are_set(closed):
    for host in ("agents.example", "agents.example:443", "Agents.Example", "x.example:444"):
        assert closed.ask("/healthz", host=host).status == 200
    for host in ("agents.example:1", "x.example", "y.agents.example"):
        assert closed.ask("/healthz", host=host).status == 403


ORIGINS = [
    *("null", "http://evil.example", "https://evil.example", "http://localhost:3000", "http://localhost"),
    *("file://", "http://127.0.0.1.evil.example", "", "http://localhost@evil", "chrome-extension://abcdef"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_others_may_not_ask_on_any_route(open_, path, origin, method):
    before = len(open_.entered)
    answer = open_.ask(path, method, b"{}", origin=origin, content_type="application/json")
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert len(open_.entered) == before


def test_our_own_pages_may(open_, closed):
    for name in ("localhost", "127.0.0.1"):
        assert open_.ask("/api/echo", origin=f"http://{name}:{open_.port}").status == 200
    assert closed.ask("/healthz", host="agents.example", origin="https://agents.example").status == 200
    assert closed.ask("/healthz", host="agents.example", origin="https://agents.example:3000").status == 403


def test_no_answer_allows_other_origins(open_):
    for method in ("GET", "OPTIONS", "POST"):
        for origin in ("http://evil.example", f"http://localhost:{open_.port}"):
            answer = open_.ask("/api/echo", method, origin=origin, access_control_request_method="POST")
            assert not [name for name in answer.headers if name.startswith("access-control")]


# All of it


@pytest.fixture(scope="module")
def whole():
    with whole_service(MemoryStore(), tokens=TOKENS) as served:
        yield served


def all_paths() -> list[str]:
    """Of every route that there is."""
    service = Service(load_config(None), MemoryStore())
    routes = [one for part in (app, gateway, api) for one in part.routes(service)]
    service.close()
    return sorted({re.sub(r"\{.*?\}", "x", one.path) for one in routes})


@pytest.mark.parametrize("path", all_paths())
def test_every_route_is_behind_the_guard(whole, path):
    for method in ("GET", "POST", "DELETE"):
        how = {"content_type": "application/json", "x_refold_token": ANN}
        assert whole.ask(path, method, b"{}", **how, host="evil.example").status == 403
        assert whole.ask(path, method, b"{}", **how, origin="null").status == 403
        is_open = path == "/healthz" or path.startswith("/panel")
        assert is_open or whole.ask(path, method, b"{}", content_type="application/json").status == 401
    assert whole.ask(path, "POST", b"{}", x_refold_token=ANN, content_type="text/plain").status == 415


def test_what_was_counted_is_for_those_who_may_read(whole):
    assert whole.ask("/metrics", x_refold_token=BEN).status == 200
    assert whole.ask("/metrics", x_refold_token=DAN).status == 403


# What is sent


@pytest.mark.parametrize("path", ["/api/echo", "/openai/v1/echo", "/nowhere"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"],
)
def test_what_is_not_json_is_refused(open_, path, method, kind):
    before = len(open_.entered)
    assert open_.ask(path, method, b"{}", content_type=kind).status == 415
    assert len(open_.entered) == before


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken(open_, kind):
    assert open_.post("/api/echo", content_type=kind).status == 200


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS", "PROPFIND", "CONNECT", "BREW", "get"])
def test_methods_that_are_not_known_are_refused(open_, method):
    before = len(open_.entered)
    assert open_.ask("/api/echo", method).status in (400, 405)
    assert len(open_.entered) == before


def test_websockets_are_refused(open_):
    before = len(open_.entered)
    headers = {"upgrade": "websocket", "connection": "Upgrade", "sec_websocket_version": "13"}
    answer = open_.ask("/api/echo", **headers, sec_websocket_key="dGhlIHNhbXBsZSBub25jZQ==")
    assert answer.status == 426
    assert len(open_.entered) == before


@pytest.mark.parametrize(
    "path", ["/api/%00", "/api/a%0ab", "/api/%7f", "/api/%c2%85", "/openai/v1/../../x", "/openai/v1/%2e%2e/x"]
)
def test_paths_with_control_characters_or_steps_are_refused(open_, path):
    before = len(open_.entered)
    assert open_.ask(path).status == 400
    assert len(open_.entered) == before


@pytest.mark.parametrize("id", ["", "x" * 501, "a\x85b", "é\x7f"])
def test_ids_in_headers_are_looked_at(open_, id):
    before = len(open_.entered)
    assert open_.ask("/openai/v1/echo", x_refold_conversation=id).status == 400
    assert len(open_.entered) == before


@pytest.mark.parametrize("id", ["x", "x" * 500, "task 42/é—👩‍🚀", "../..", "<b>"])
def test_ids_may_be_almost_anything(open_, id):
    assert valid_id(id) == id
    assert open_.ask("/openai/v1/echo", x_refold_conversation=id).status == 200
    assert requested_id(Headers(raw=[(b"x-refold-conversation", id.encode())])) == id


@pytest.mark.parametrize("id", ["", "x" * 501, "\n", "a\0", "\ud800", "\u2028"])
def test_ids_have_some_characters_and_none_of_them_control(id):
    with pytest.raises(HTTPException):
        valid_id(id)


# Limits


def test_a_body_that_is_too_large_is_not_read(open_):
    """Only its length is sent: whoever waited for the body would wait for ever."""
    before = len(open_.entered)
    with open_.socket() as client:
        client.sendall(head("POST", "content-type: application/json", f"content-length: {64 * 2**20 + 1}"))
        assert status(client) == 413
    assert len(open_.entered) == before


def test_a_body_of_unknown_length_is_read_only_up_to_the_limit():
    with behind_the_guard(max_body_mb=0.1) as served, served.socket() as client:
        client.sendall(head("POST", "content-type: application/json", "transfer-encoding: chunked"))
        with suppress(OSError):
            for _ in range(11):
                client.sendall(b"2800\r\n" + b"x" * 10_240 + b"\r\n")
        assert status(client) == 413  # and the body has no end


def test_a_body_just_as_large_as_allowed_is_taken():
    with behind_the_guard(max_body_mb=0.5) as served:
        assert json.loads(served.post("/api/echo", b"x" * 2**19).body)["bytes"] == 2**19
        assert served.post("/api/echo", b"x" * (2**19 + 1)).status == 413
        chunks = iter([b"x" * 2**18, b"x" * 2**18])
        assert served.post("/api/echo", chunks, transfer_encoding="chunked").status == 200


def test_an_answer_is_read_also_by_those_who_send_before_they_read():
    """Were the connection closed at once, the client would get a reset instead."""
    with behind_the_guard(max_body_mb=16) as served:
        for connection in ("keep-alive", "close"):
            assert served.post("/api/echo", b"x" * 20 * 2**20, connection=connection).status == 413


def test_who_goes_on_sending_after_the_answer_is_cut_off():
    with behind_the_guard() as served, served.socket() as client:
        client.sendall(head("POST", "content-type: text/plain", "transfer-encoding: chunked"))
        assert status(client) == 415

        def is_cut() -> bool:
            try:
                client.sendall(b"1\r\nx\r\n")
            except OSError:
                return True
            return False

        until(is_cut)


@pytest.mark.parametrize("begun", [b"GET /", b"GET /api/echo HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_headers_that_come_byte_by_byte_are_given_up(begun):
    with behind_the_guard(limits={"header_s": 0.5}) as served, served.socket() as client:
        client.sendall(begun)
        client.setblocking(False)
        assert dripped(client).split()[1] == b"408"
        assert served.entered == []


def test_headers_of_a_second_request_have_a_time_too():
    with behind_the_guard(limits={"header_s": 0.5}) as served, served.socket() as client:
        client.sendall(head("GET"))
        assert status(client) == 200
        client.sendall(b"GET /api/echo HTTP/1.1\r\nHost: loc")
        client.setblocking(False)
        assert dripped(client).split()[1] == b"408"
        assert len(served.entered) == 1


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"x-%d: %s\r\n" % (n, b"y" * 500) for n in range(140)),
        b"x-long: " + b"y" * 70_000 + b"\r\n",
        b"x-endless: " + b"y" * 400_000,
        b"x-endless: y\r\n" * 6_000,
    ],
)
def test_headers_have_at_most_64_kb(open_, headers):
    before = len(open_.entered)
    with open_.socket() as client:
        client.sendall(head("GET")[:-2] + headers)
        client.sendall(b"\r\n" if headers.endswith(b"\n") else b"yyyy")
        assert status(client) == 431
    assert len(open_.entered) == before


def test_a_url_counts_too(open_):
    with open_.socket() as client:
        client.sendall(b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status(client) == 431


def test_60_kb_of_headers_are_taken(open_):
    assert open_.ask("/api/echo", x_large="y" * 60_000).status == 200


def test_a_body_that_stops_is_given_up():
    with behind_the_guard(limits={"body_idle_s": 0.3}) as served, served.socket() as client:
        client.sendall(head("POST", "content-type: application/json", "content-length: 100") + b"{")
        assert status(client) == 408


def test_a_body_that_comes_byte_by_byte_is_given_up():
    with behind_the_guard(limits={"body_s": 0.8, "body_idle_s": 0.5}) as served, served.socket() as client:
        client.sendall(head("POST", "content-type: application/json", "content-length: 100000"))
        client.setblocking(False)
        assert dripped(client).split()[1] == b"408"


@pytest.mark.parametrize("begun", [b"", b"\r\n"])
def test_who_asks_nothing_is_let_go(begun):
    with behind_the_guard(limits={"idle_s": 0.4}) as served:
        with served.socket() as client:
            client.sendall(begun)
            assert client.recv(1) == b""
        with served.socket() as client:
            client.sendall(head("GET"))
            assert status(client) == 200
            client.sendall(begun)
            assert client.recv(1) == b""


def test_empty_lines_do_not_keep_a_connection():
    with behind_the_guard(limits={"idle_s": 0.5}) as served, served.socket() as client:
        client.setblocking(False)
        assert dripped(client, b"\r\n") == b""


def test_who_takes_nothing_of_an_answer_is_let_go():
    with behind_the_guard(limits={"write_timeout_s": 0.3}) as served, served.socket() as client:
        client.sendall(head("GET", path="/api/flood"))
        until(lambda: served.server.server_state.connections and served.entered)
        until(lambda: not served.server.server_state.connections)


def test_who_does_not_read_holds_little_memory():
    unsent = []

    async def drops() -> Any:
        while True:
            unsent.extend(one.transport.get_write_buffer_size() for one in server.server_state.connections)
            yield b"x" * 1_024
            await asyncio.sleep(0)

    with running(StreamingResponse(drops()), load_config({"serve": {"port": 0}})) as (url, server):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            client.sendall(head("GET"))
            until(lambda: [one for one in server.server_state.connections if one.flow.write_paused])
            assert 0 < max(unsent) < 2 * MAX_UNSENT_BYTES
        until(lambda: not server.server_state.connections)


def test_a_stream_is_not_idle():
    with behind_the_guard(
        limits={"idle_s": 0.3, "header_s": 0.3, "body_idle_s": 0.2, "body_s": 0.2}
    ) as served:
        assert served.ask("/api/stream?s=1").body.endswith(b"data: 2\n\n")


def test_a_caller_who_asks_too_often_is_told_when_to_come_back():
    with behind_the_guard(tokens=TOKENS, limits={"requests_per_s": 0.01, "burst": 3}) as served:
        asked = [served.ask("/api/echo", x_refold_token=ANN) for _ in range(4)]
        assert [one.status for one in asked] == [200, 200, 200, 429]
        assert int(asked[-1].headers["retry-after"]) in range(90, 102)
        assert served.ask("/api/echo", x_refold_token=BEN).status == 200
        assert served.ask("/healthz").status == 200


def test_who_asks_is_not_who_they_say_a_proxy_was_asked_by():
    with behind_the_guard(limits={"requests_per_s": 0.01, "burst": 2}) as served:
        asked = [served.ask("/api/echo", x_forwarded_for=f"192.0.2.{n}").status for n in range(3)]
        assert asked == [200, 200, 429]


def test_drops_come_back_with_time_and_callers_are_forgotten():
    rate = RateLimit(per_s=2, burst=2)
    assert [rate.wait_s("a", 0) for _ in range(3)] == [0, 0, 0.5]
    assert [rate.wait_s("a", 0.5), rate.wait_s("a", 0.5)] == [0, 0.5]
    assert rate.wait_s("a", 100) == rate.wait_s("a", 100) == 0 < rate.wait_s("a", 100)
    for n in range(MAX_CALLERS + 10):
        rate.wait_s(n, 100)
    assert len(rate._buckets) == MAX_CALLERS


def test_too_many_requests_at_once_are_refused():
    with behind_the_guard(limits={"requests": 2}) as served, served.socket() as one, served.socket() as two:
        for client in (one, two):
            client.sendall(b"GET /api/stream?s=20 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert status(client) == 200
        answer = served.ask("/api/echo")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert served.ask("/healthz").status == 200
        one.close()
        two.close()
        until(lambda: served.ask("/api/echo").status == 200)


def test_too_many_connections_are_refused():
    with behind_the_guard(limits={"connections": 3}) as served:
        clients = [served.socket() for _ in range(3)]
        with served.socket() as client:
            assert status(client) == 503
        for client in clients:
            client.close()
        until(lambda: served.ask("/api/echo").status == 200)


# What goes out


@pytest.mark.parametrize("path", ["/panel/page", "/openai/v1/page"])
def test_pages_run_no_scripts_but_our_own(open_, path):
    headers = open_.ask(path).headers
    rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/api/echo", "/api/broken", "/healthz", "/nowhere"])
def test_answers_are_kept_by_nobody_and_taken_for_nothing_else(open_, path):
    headers = open_.ask(path).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert "server" not in headers


def test_the_gateway_adds_nothing_to_json(open_):
    assert set(open_.post("/openai/v1/echo").headers) == {"date", "content-length", "content-type"}


@pytest.mark.parametrize(("path", "code"), [("/api/broken", 500), ("/api/storeless", 503)])
def test_errors_show_nothing_of_the_inside(open_, path, code):
    answer = open_.ask(path)
    assert answer.status == code
    assert not re.search(rb"hunter2|secret|internal\b.*\.|Runtime|Traceback|postgres|File", answer.body)


def test_errors_are_short_whatever_they_quote():
    assert len(error_body(400, "x" * 10**6)) < 3_000


def test_what_is_not_http_is_answered_in_json(open_):
    with open_.socket() as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        answer = client.recv(4_096)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"


# Secrets

SECRETS = [
    "sk-proj-Ab3dEf6hIj9lMn2pQr5tUv8x",
    "sk-ant-api03-0123456789abcdefABCDEF_-x",
    ANN,
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "AKIA0123456789ABCDEF",
    "xoxb-0123456789-abcdefghij",
    "AIzaSy0123456789abcdefghijklmnopqrstuvw",
    "hf_0123456789abcdefghijABCDEFGHIJ",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc123_-xyz",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "around", ["{}", "key {} was refused", '{{"a": "{}"}}', "https://host/v1?x={}&y=1", "'{}'"]
)
def test_what_looks_like_a_key_is_hidden(secret, around):
    assert secret[8:] not in redacted(around.format(secret))


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer hunter2hunter2",
        "authorization: Basic aHVudGVyMjpodW50ZXIy hunter",
        '{"x-api-key": "hunter2"}',
        '"headers": "{\\"x-api-key\\": \\"hunter2\\"}"',
        "api_key=hunter2",
        "password='hunter2'",
        "postgresql://me:hunter2@host/db",
        "redis://:hunter2@host",
        "x-refold-token: hunter2",
        "token=hunter2&x=1",
        "bearer hunter2hunter2",
    ],
)
def test_what_is_named_like_a_secret_is_hidden(text):
    told = redacted(text)
    assert "hunter2" not in told
    assert "aHVudGVy" not in told
    assert "***" in told


@pytest.mark.parametrize(
    "text",
    [
        "tokens_before=1200, max_tokens: 4000, token_threshold 6000",
        "The view needs 12,000 tokens; there is room for 8,000",
        "https://host:8787/v1/chat sk-learn risk-averse task-42 disk-0123456789",
        "#57 web_search: 12,431 tokens",
        "a token is needed here",
    ],
)
def test_plain_words_stay(text):
    assert redacted(text) == text


@pytest.mark.parametrize(
    "piece", ["sk-", "eyJ-", "://a:", "token:", "bearer ", "-----BEGIN PRIVATE KEY-----", "-"]
)
def test_no_text_takes_the_redactor_long(piece):
    """Two hundred thousand characters: what takes the square of that would not end."""
    assert redacted(piece * (200_000 // len(piece)))


def test_all_that_is_logged_goes_through_the_redactor(capsys, monkeypatch):
    import sys

    root, before = logging.getLogger(), logging.getLogger().handlers
    try:
        logs.configure("info", secrets=["hunter2"], to=sys.stderr)
        for name in ("uvicorn.error", "refold.serve", "aiohttp.client", "asyncio"):
            try:
                raise ValueError(f"{SECRETS[0]} and hunter2")
            except ValueError:
                logging.getLogger(name).exception("with %s", SECRETS[1], extra={"facts": {"key": SECRETS[2]}})
    finally:
        root.handlers = before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["from"] for line in lines] == ["uvicorn.error", "refold.serve", "aiohttp.client", "asyncio"]
    told = json.dumps(lines)
    assert "ValueError: sk-*** and ***" in told
    assert not [secret for secret in (*SECRETS, "hunter2") if secret[8:] in told and secret in told]


@pytest.mark.parametrize("secret", SECRETS)
def test_an_error_that_quotes_a_secret_hides_it(secret):
    with whole_service(MemoryStore()) as served:
        answer = served.ask(f"/api/conversations/{secret}")
    assert answer.status == 404
    assert secret[8:].encode() not in answer.body
    assert "***" in answer.error["message"]


def test_of_a_request_only_what_is_harmless_is_logged(closed, caplog):
    caplog.set_level("INFO", "refold.request")
    headers = {"x_api_key": "sk-not-to-be-seen", "cookie": "c=not-to-be-seen", "x_refold_token": ANN}
    closed.ask("/api/echo?q=not-to-be-seen", **headers, user_agent="an agent", x_request_id="not-to-be-seen")
    closed.ask("/not-to-be-seen", **headers)
    closed.ask("/api/not-to-be-seen", "PROPFIND", authorization="Bearer not-to-be-seen")
    rows = until(lambda: [one.facts for one in caplog.records if hasattr(one, "facts")][-3:])
    assert rows[0] | {"id": "", "ms": 0} == {
        "id": "",
        "ms": 0,
        "method": "GET",
        "route": "/api/echo",
        "status": 200,
        "owner": "ann",
        "user-agent": "an agent",
    }
    assert "not-to-be-seen" not in json.dumps(rows)
    assert ANN not in json.dumps(rows)


def test_errors_about_settings_tell_no_secrets():
    with pytest.raises(SettingError) as caught:
        validated_fields({"token": 4711}, {"token": str}, ".".join)
    assert "4711" not in str(caught.value)


# What sockets say


def head(method: str, *headers: str, path: str = "/api/echo") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


def status(client: socket.socket) -> int:
    """Of the next answer; its body is small and comes with it."""
    data = b""
    while b"\r\n\r\n" not in data and (more := client.recv(65_536)):
        data += more
    return int(data.split()[1])


def dripped(client: socket.socket, byte: bytes = b"x") -> bytes:
    """Sends one byte after the other until there is an answer, or the connection is gone."""
    found: list[bytes] = []

    def is_answered() -> bool:
        with suppress(BlockingIOError):
            found.append(client.recv(4_096))
            return True
        try:
            client.send(byte)
        except OSError:
            found.append(b"")
        return bool(found)

    until(is_answered)
    return found[0]
