"""A strict stand-in for the model providers, on loopback and in its own process; it knows nothing of refold.

POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens and GET /v1/models answer as
the providers do, streaming or not. Every rule of validity is enforced (`upstream_rules`, `upstream_openai`,
`upstream_claude`; the rule's name is in the header `x-broken-rule`), and so is a window of `--window` tokens
(8,000), counted as a quarter of the UTF-8 bytes of all strings. What the model says: `upstream_model`.

An API key is right when it begins with `sk-` and has no `bad` in it.

Faults are asked for by the header `x-upstream-mode` or by the model's name, `fail-429` or `gpt-5+fail-429`:
fail-429      (or 500, 502, 503, 529) the provider's status and body; 429 with `retry-after: 7`, 502 in HTML
cut-stream    the connection is closed in the middle of the answer, streamed or not
error-stream  an error event in the middle of the stream
stall-stream  half of the stream, then nothing more
slow          a pause after each event
hang          no answer ever
garbage       200 and something that is not JSON
redirect      302 to /elsewhere on another host name of this server; /seen shows whether it was followed
huge          a text of 2.3 million characters
echo          the last user's text
unknown       the model does not exist (404)

GET /seen lists what was asked: method, path, headers as they arrived, and body. GET /open says how many
requests are open right now. POST /reset forgets all of it.
"""

import argparse
import asyncio
import hashlib
import json
import selectors
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from upstream_claude import check_anthropic
from upstream_faults import MODES, as_json, fault, request_id, send_stream, send_whole, unknown
from upstream_model import answer
from upstream_openai import check_chat, check_responses
from upstream_rules import Body, Dialect, Refusal, check_model, check_window, parse, prompt_tokens
from upstream_streams import compact, events, whole

SECONDS = 20.0
"""How long the server may take to start, and to answer about itself."""
RULES = {"chat": check_chat, "responses": check_responses, "anthropic": check_anthropic}


class Provider:
    """The server's state: what it was asked, what is open, and the responses it keeps."""

    def __init__(self, window: int, keep: int) -> None:
        self.window = window
        self.seen: deque[tuple[str, str, list[tuple[str, str]], bytes]] = deque(maxlen=keep)
        self.open = 0
        self.responses: dict[str, list[Body]] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=128 * 1024 * 1024, middlewares=[self._note])
        app.router.add_post("/v1/chat/completions", self._model("chat"))
        app.router.add_post("/v1/responses", self._model("responses"))
        app.router.add_post("/v1/messages", self._model("anthropic"))
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        app.router.add_route("*", "/elsewhere", self._elsewhere)
        app.router.add_get("/seen", self._seen)
        app.router.add_get("/open", self._open)
        app.router.add_post("/reset", self._reset)
        return app

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in ("/seen", "/open", "/reset"):
            return await handler(request)
        self.open += 1
        try:
            headers = [
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers
            ]
            self.seen.append((request.method, request.path_qs, headers, await request.read()))
            return await handler(request)
        finally:
            self.open -= 1

    # About itself

    async def _seen(self, _: web.Request) -> web.Response:
        return web.json_response(
            [
                {"method": method, "path": path, "headers": headers, "body": _json_or_text(raw)}
                for method, path, headers, raw in self.seen
            ]
        )

    async def _open(self, _: web.Request) -> web.Response:
        return web.json_response({"open": self.open})

    async def _reset(self, _: web.Request) -> web.Response:
        self.seen.clear()
        self.responses.clear()
        return web.json_response({})

    async def _elsewhere(self, _: web.Request) -> web.Response:
        return web.json_response({"elsewhere": True})

    # What providers have

    async def _models(self, request: web.Request) -> web.Response:
        dialect: Dialect = "anthropic" if "anthropic-version" in request.headers else "chat"
        with _refused(dialect, request) as answered:
            _check_key(request, dialect)
            names = ("claude-sonnet-5", "claude-opus-5") if dialect == "anthropic" else ("gpt-5", "gpt-4o")
            if dialect == "anthropic":
                made = "2026-01-01T00:00:00Z"
                rows = [
                    {"type": "model", "id": name, "display_name": name, "created_at": made} for name in names
                ]
                listed = {"data": rows, "has_more": False, "first_id": names[0], "last_id": names[-1]}
            else:
                rows = [{"id": name, "object": "model", "created": 1, "owned_by": "openai"} for name in names]
                listed = {"object": "list", "data": rows}
            one = request.match_info.get("name")
            if one is not None and one not in names:
                raise unknown(one, dialect)
            return as_json(next(row for row in rows if row["id"] == one) if one else listed)
        return answered[0]

    async def _count(self, request: web.Request) -> web.StreamResponse:
        with _refused("anthropic", request) as answered:
            _check_key(request, "anthropic")
            body = parse(await request.read(), "anthropic")
            mode = _mode(request, check_model(body, "anthropic"))
            faulty = await fault(request, "anthropic", mode, body["model"])
            if faulty is not None:
                return faulty
            check_anthropic(body)
            return as_json({"input_tokens": prompt_tokens(body, "anthropic")})
        return answered[0]

    def _model(self, dialect: Dialect) -> Any:
        async def asked(request: web.Request) -> web.StreamResponse:
            with _refused(dialect, request) as answered:
                return await self._answer(request, dialect)
            return answered[0]

        return asked

    async def _answer(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        _check_key(request, dialect)
        raw = await request.read()
        body = parse(raw, dialect)
        mode = _mode(request, check_model(body, dialect))
        faulty = await fault(request, dialect, mode, body["model"])
        if faulty is not None:
            return faulty
        if dialect == "anthropic" and "max_tokens" not in body:
            raise Refusal("G3", "max_tokens: Field required")
        if dialect == "responses":
            body = self._continued(body)
        RULES[dialect](body)
        sent = check_window(body, dialect, self.window)
        reply = answer(body, dialect, hashlib.sha256(raw).hexdigest(), mode)
        if dialect == "responses" and body.get("store") is not False:
            done = whole(dialect, reply, body, sent)
            said = (
                [{"role": "user", "content": body["input"]}]
                if isinstance(body["input"], str)
                else body["input"]
            )
            self.responses[done["id"]] = [*said, *done["output"]]
            while len(self.responses) > 500:
                del self.responses[next(iter(self.responses))]
        if body.get("stream"):
            return await send_stream(request, dialect, mode, list(events(dialect, reply, body, sent)))
        return await send_whole(request, mode, compact(whole(dialect, reply, body, sent)).encode(), dialect)

    def _continued(self, body: Body) -> Body:
        """With what this server keeps of an earlier response in front."""
        name = body.get("previous_response_id")
        if name is None:
            return body
        if name not in self.responses:
            words = f"Previous response with id '{name}' not found."
            raise Refusal("R1", words, param="previous_response_id", code="previous_response_not_found")
        new = body.get("input")
        items = [{"role": "user", "content": new}] if isinstance(new, str) else new or []
        return {**body, "input": [*self.responses[name], *items], "previous_response_id": None}


@contextmanager
def _refused(dialect: Dialect, request: web.Request) -> Iterator[list[web.Response]]:
    """A refusal inside is the provider's error, left in the list."""
    answered: list[web.Response] = []
    try:
        yield answered
    except Refusal as refusal:
        response = as_json(refusal.body(dialect, request_id(request)), refusal.status)
        response.headers["x-broken-rule"] = refusal.rule
        answered.append(response)


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")


def _mode(request: web.Request, model: str) -> str:
    asked = request.headers.get("x-upstream-mode") or model.rpartition("+")[2]
    return asked if asked in MODES else ""


def _check_key(request: web.Request, dialect: Dialect) -> None:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if dialect == "anthropic":
        key = request.headers.get("x-api-key") or given
        if not key:
            raise Refusal("", "x-api-key header is required", status=401, kind="authentication_error")
        if not key.startswith("sk-") or "bad" in key:
            raise Refusal("", "invalid x-api-key", status=401, kind="authentication_error")
        if "anthropic-version" not in request.headers:
            raise Refusal("", "anthropic-version: header is required")
        return
    if not given:
        words = "You didn't provide an API key. You need to provide your API key in an Authorization header "
        words += (
            "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY), or as the password field (with blank "
        )
        words += (
            "username) if you're accessing the API from your browser and are prompted for a username and "
        )
        words += "password. You can obtain an API key from https://platform.openai.com/account/api-keys."
        raise Refusal("", words, status=401)
    if not given.startswith("sk-") or "bad" in given:
        shown = f"{given[:7]}{'*' * 8}{given[-4:]}"
        words = f"Incorrect API key provided: {shown}. You can find your API key at "
        words += "https://platform.openai.com/account/api-keys."
        raise Refusal("", words, status=401, code="invalid_api_key")


# The process


async def serve(port: int, window: int, keep: int) -> None:
    """Until standard input ends, which it does with the process that started this one."""
    runner = web.AppRunner(Provider(window, keep).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024, shutdown_timeout=0.5)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: sys.stdin.buffer.read1(4096) or ended.set())
    await ended.wait()
    await runner.cleanup()


class Upstream:
    """The server as a context manager; its own calls are short enough to be made inside an event loop."""

    def __init__(self, window: int = 8_000, keep: int = 2_000) -> None:
        self._options = ["--window", str(window), "--keep", str(keep)]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai(self) -> str:
        """What the OpenAI SDK takes as its base URL; Anthropic's takes `url`."""
        return f"{self.url}/v1"

    def seen(self) -> list[dict[str, Any]]:
        """Every request to a provider's path, oldest first."""
        return self._ask("GET", "/seen")

    def open(self) -> int:
        return int(self._ask("GET", "/open")["open"])

    def reset(self) -> None:
        self._ask("POST", "/reset")

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)

    def __enter__(self) -> Self:
        command = [sys.executable, str(Path(__file__).resolve()), "--port", "0", *self._options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(SECONDS) else b""
        if not line:
            self.__exit__()
            raise RuntimeError("the upstream did not start")
        self.port = int(line)
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A strict stand-in for the model providers.")
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--window", type=int, default=8_000, help="tokens of prompt and output together")
    options.add_argument("--keep", type=int, default=2_000, help="how many requests /seen remembers")
    given = options.parse_args()
    asyncio.run(serve(given.port, given.window, given.keep))
