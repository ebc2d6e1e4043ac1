"""A model whose answers are written beforehand, behind a real HTTP server on this machine."""

import json
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias
from uuid import uuid4

import msgspec

from refold.core.errors import SettingError
from refold.core.message import Usage

__all__ = ["Reply", "Request", "ScriptedModel"]


class Reply(msgspec.Struct, frozen=True):
    """A plain text is `Reply(text)`."""

    text: str = ""
    """What the model says; where `status` is an error, the message in it."""
    status: int = 200
    headers: Mapping[str, str] = {}
    finish: Literal["stop", "length", "refusal", "tool-calls"] = "stop"
    calls: tuple[tuple[str, Any], ...] = ()
    """Tools that it calls, each with its arguments: an object, or a text for JSON that is none."""
    reasoning: str = ""
    """What it thinks first; without a `text` it is all there is."""
    usage: Usage = Usage(100, 20)
    raw: bytes | None = None
    """The body as it is sent, instead of what `text` and the like would make."""
    hang: Event | None = None
    """Answers when this is set; never, where the server is closed or the client gone before that."""
    cut: bool = False
    """Closes the connection in the middle of the body."""


Request: TypeAlias = dict[str, Any]
"""The JSON that was sent, and under `path` where to."""


def body(reply: Reply, request: Request) -> bytes:
    if reply.raw is not None:
        return reply.raw
    written = (_error if reply.status >= 400 else BODIES[request["path"]])(reply, request)
    return json.dumps(written).encode()


def _error(reply: Reply, request: Request) -> dict[str, Any]:
    """Both APIs have `error.message`; what is beside it in either does not disturb the other."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(reply.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": reply.text, "code": None, "param": None}}


def _completion(reply: Reply, request: Request) -> dict[str, Any]:
    used = reply.usage
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
    if reply.finish == "refusal":
        message |= {"content": None, "refusal": reply.text or "I cannot help with that."}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls := _calls(reply):
        message["tool_calls"] = [
            {"id": f"call_{id}", "type": "function", "function": {"name": name, "arguments": _written(given)}}
            for id, name, given in calls
        ]
    stop = "tool_calls" if calls else "stop"
    reason = {"length": "length", "tool-calls": "tool_calls"}.get(reply.finish, stop)
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": request.get("model"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": used.input,
            "completion_tokens": used.output,
            "total_tokens": used.input + used.output,
            "prompt_tokens_details": {"cached_tokens": used.cache_read},
        },
    }


def _message(reply: Reply, request: Request) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": "c2lnbmVk"})
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    calls = _calls(reply)
    content += [
        {"type": "tool_use", "id": f"toolu_{id}", "name": name, "input": given} for id, name, given in calls
    ]
    stop = "tool_use" if calls else "end_turn"
    reasons = {"length": "max_tokens", "tool-calls": "tool_use", "refusal": "refusal"}
    used = reply.usage
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": request.get("model"),
        "content": content,
        "stop_reason": reasons.get(reply.finish, stop),
        "stop_sequence": None,
        "usage": {
            "input_tokens": used.input - used.cache_read - used.cache_write,
            "output_tokens": used.output,
            "cache_read_input_tokens": used.cache_read,
            "cache_creation_input_tokens": used.cache_write,
        },
    }


def _calls(reply: Reply) -> list[tuple[str, str, Any]]:
    """With an id for each, which no other call has."""
    given = reply.calls or ((("look", {}),) if reply.finish == "tool-calls" else ())
    return [(uuid4().hex[:12], name, arguments) for name, arguments in given]


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


BODIES: dict[str, Callable[[Reply, Request], dict[str, Any]]] = {
    "/v1/chat/completions": _completion,
    "/v1/messages": _message,
}
"""Where each API listens, and how it writes."""

Script: TypeAlias = Callable[[Request], Reply | str] | Sequence[Reply | str] | Reply | str
"""The replies: by the request, or one after the other, of which the last is repeated."""
GLANCE_S = 0.01
"""How often a hanging reply checks whether its client is still connected."""


def scripted_reply(script: Script, request: Request, place: int) -> Reply:
    """The reply to a request; `place` is how many came before it."""
    match script:
        case str() | Reply():
            reply = script
        case Sequence():
            reply = script[min(place, len(script) - 1)]
        case _:
            reply = script(request)
    return Reply(reply) if isinstance(reply, str) else reply


class ScriptedModel:
    """Listens while its `with` block runs.

        with ScriptedModel(["first", Reply("slow down", 429), "all the others"]) as model:
            client = openai.OpenAI(base_url=model.openai_url, api_key="any")

    It imitates the replies and errors of OpenAI's chat completions (`/v1/chat/completions`) and Anthropic's
    messages (`/v1/messages`) as far as clients read them. It does not stream, and it understands nothing: no
    key is checked, no request is refused for what is in it, and no token is counted; the script says what
    was used.
    """

    def __init__(self, script: Script) -> None:
        if not script:
            raise SettingError("script", "expected at least one reply")
        self._script = script
        self._changed = Condition()
        self._closed = Event()
        self.requests: list[Request] = []
        """All requests, in order of arrival."""
        self.in_flight = 0
        """Requests that are neither answered nor dropped."""
        self.most_at_once = 0
        """The highest value of `in_flight`."""

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = Thread(target=self._server.serve_forever, args=(GLANCE_S,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def openai_url(self) -> str:
        """The `base_url` for OpenAI's SDK."""
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The `base_url` for Anthropic's SDK."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def until(self, so: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Waits for something to become true of `requests` or `in_flight`; False if it does not in time."""
        with self._changed:
            return self._changed.wait_for(so, timeout_s)

    @contextmanager
    def _asked(self, request: Request) -> Iterator[Reply]:
        with self._changed:
            place = len(self.requests)
            self.requests.append(request)
            self.in_flight += 1
            self.most_at_once = max(self.most_at_once, self.in_flight)
            self._changed.notify_all()
        try:
            yield self._reply(request, place)
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify_all()

    def _reply(self, request: Request, place: int) -> Reply:
        if request["path"] not in BODIES:
            return Reply(f"only {' and '.join(BODIES)} are answered here", 404)
        try:
            return scripted_reply(self._script, request, place)
        except Exception as error:
            return Reply(f"the script failed: {error!r}", 500)

    def _is_wanted(self, reply: Reply, connection: socket.socket) -> bool:
        """Waits as long as the reply hangs; False where nobody waits for it any more."""
        while reply.hang is not None and not reply.hang.wait(GLANCE_S):
            if self._closed.is_set() or _is_gone(connection):
                return False
        return True


def _is_gone(connection: socket.socket) -> bool:
    """True if the client has closed the connection: it is readable, and nothing is read from it."""
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # whoever hangs up has had enough
            super().handle_error(request, client_address)


def _handler(model: ScriptedModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = {**json.loads(data), "path": self.path}
            with model._asked(request) as reply:
                if model._is_wanted(reply, self.connection):
                    self._send(reply, body(reply, request))
                else:
                    self.close_connection = True

        def _send(self, reply: Reply, content: bytes) -> None:
            self.send_response(reply.status)
            head = {"Content-Type": "application/json", "Content-Length": str(len(content)), **reply.headers}
            for name, value in head.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if reply.cut else content)
            self.close_connection = self.close_connection or reply.cut

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal of whoever runs the tests."""

    return Handler
