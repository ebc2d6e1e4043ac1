"""A stand-in for Mem0's service, behind a real HTTP server on this machine."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

from refold.testing.model import GLANCE_S, _Server

Fault: TypeAlias = Literal["down", "slow", "reject", "forbid", "throttle", "cut"]
ENTITIES = ("user_id", "agent_id", "app_id", "run_id")
FIELDS = {
    "add": "messages metadata infer enable_graph filters timestamp expiration_date structured_data_schema"
    " custom_categories custom_instructions agent_custom_instructions user_id agent_id app_id run_id",
    "search": "query filters metadata top_k rerank threshold fields categories show_expired reference_date"
    " latest_only keyword_search",
    "list": "filters start_date end_date categories show_expired latest_only",
    "filters": "AND OR NOT user_id agent_id app_id run_id created_at updated_at timestamp categories metadata"
    " keywords memory_ids",
}
"""What each may have."""
NOTHING: dict[str, Any] = {"id": "", "metadata": {}, "categories": [], **dict.fromkeys(ENTITIES)}


class _Problem(Exception):
    def __init__(self, status: int, detail: str) -> None:
        self.status, self.detail = status, detail


class Asked(NamedTuple):
    """One request that came in."""

    verb: str
    path: str
    query: dict[str, str]
    body: Any


class Mem0Stub:
    """Listens while its `with` block runs.

        with Mem0Stub() as stub:
            store = open_store(f"mem0://alice?host={stub.host}&key={stub.key}")

    It answers what the Python client of Mem0 2.x calls (ping, add, search, list, get, delete, events) in the
    shapes that Mem0's documentation shows, and refuses fields and filters that the documentation does not
    know. It is written from that documentation and from the client's source, not from the service, which
    was never asked. It understands nothing: with inference each text of a user becomes a memory, without it
    each message does, and a search counts common words.
    """

    key = "a-key"

    def __init__(self) -> None:
        self.memories: list[dict[str, Any]] = []
        self.asked: list[Asked] = []
        """All requests but pings, in order of arrival."""
        self.fault: Fault | None = None
        """down: no answer; slow: none until `go_on`; reject: 400; forbid: 403; throttle: 429; cut: done,
        and no answer.
        """
        self.refuses: Callable[[str], bool] = lambda text: False
        """Texts of messages that are answered with 400."""
        self.lags = False
        """What is added stays pending until `settle`."""
        self.go_on = Event()
        self._events: dict[str, str] = {}
        self._waiting: list[tuple[str, list[dict[str, Any]]]] = []
        self._changed = Condition()
        self._port = 0

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, args=(GLANCE_S,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def texts(self) -> list[str]:
        """What is remembered, in the order it came."""
        return [one["memory"] for one in self.memories]

    def until(self, so: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Waits for something to become true of this; False if it does not in time."""
        with self._changed:
            return self._changed.wait_for(so, timeout_s)

    def settle(self) -> None:
        """What was pending is worked through."""
        with self._changed:
            for event, new in self._waiting:
                self.memories += new
                self._events[event] = "SUCCEEDED"
            self._waiting = []

    # What is asked

    def answer(self, verb: str, path: str, query: dict[str, str], body: Any, token: str) -> Any:
        if token != f"Token {self.key}":
            raise _Problem(401, "Invalid API key")
        match verb, path.strip("/").split("/"):
            case "GET", ["v1", "ping"]:
                return {"status": "ok", "org_id": "an-org", "project_id": "a-project", "user_email": None}
            case "POST", ["v3", "memories", "add"]:
                return self._add(body)
            case "POST", ["v3", "memories", "search"]:
                return self._search(body)
            case "POST", ["v3", "memories"]:
                return self._list(body, query)
            case "GET", ["v1", "event", id] if id in self._events:
                return {"id": id, "status": self._events[id]}
            case "GET", ["v1", "memories", id]:
                return self._one(unquote(id))
            case "DELETE", ["v1", "memories", id]:
                self.memories.remove(self._one(unquote(id)))
                return {"message": "Memory deleted successfully!"}
            case "DELETE", ["v1", "batch"]:
                ids = {one["memory_id"] for one in body["memories"]}
                if not 1 <= len(ids) <= 1000:
                    raise _Problem(400, "memories: expected 1 to 1000")
                self.memories = [one for one in self.memories if one["id"] not in ids]
                return {"message": f"Successfully deleted {len(ids)} memories"}
            case "DELETE", ["v1", "memories"]:
                whose = {name: query[name] for name in ENTITIES if name in query}
                if not whose or {*query} - {*ENTITIES}:
                    raise _Problem(400, "One of the filters: user_id, agent_id, app_id, run_id is required")
                self.memories = [one for one in self.memories if not _matches(one, whose)]
                return {"message": "Memories deleted successfully!"}
        raise _Problem(404, "Not found")

    def _add(self, body: Any) -> Any:
        _demand(body, "add")
        whose = {name: body[name] for name in ENTITIES if name in body}
        if not whose or not all(isinstance(id, str) and id.strip() and id != "*" for id in whose.values()):
            raise _Problem(400, "At least one of user_id, agent_id, app_id, run_id is required")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise _Problem(400, "messages: expected a list of {role, content}")
        if any(self.refuses(message["content"]) for message in messages):
            raise _Problem(400, "messages: this content is not taken")
        infer = body.get("infer", True)
        said = [one["content"] for one in messages if one["role"] == "user" or not infer]
        now, none = datetime.now(UTC).isoformat(), dict.fromkeys(ENTITIES)
        new = [
            {"id": str(uuid4()), "memory": text, "metadata": body.get("metadata") or {}, "categories": []}
            | {"created_at": now, "updated_at": now, **none, **whose}
            for text in said
        ]
        event = str(uuid4())
        self._events[event] = "PENDING" if self.lags else "SUCCEEDED"
        if self.lags:
            self._waiting.append((event, new))
        else:
            self.memories += new
        return {"message": "Memory processing has been queued", "status": "PENDING", "event_id": event}

    def _search(self, body: Any) -> Any:
        _demand(body, "search")
        asked = _words(body.get("query") or "")
        if not asked:
            raise _Problem(400, "query: may not be blank")
        found = [(len(asked & _words(one["memory"])) / len(asked), one) for one in self._matching(body)]
        best = sorted(found, key=lambda pair: -pair[0])
        least, most = body.get("threshold", 0.1), body.get("top_k", 10)
        if not 1 <= most <= 1000:
            raise _Problem(400, "top_k: expected 1 to 1000")
        return {"results": [{**one, "score": score} for score, one in best if score >= least][:most]}

    def _list(self, body: Any, query: dict[str, str]) -> Any:
        _demand(body, "list")
        if {*query} - {"page", "page_size"}:
            raise _Problem(400, f"unknown parameters: {sorted(query)}")
        page, size = int(query.get("page", 1)), int(query.get("page_size", 100))
        if page < 1 or not 1 <= size <= 100:
            raise _Problem(400, "page_size: expected 1 to 100")
        found = self._matching(body)[::-1]
        after = f"{self.host}/v3/memories/?page={page + 1}" if len(found) > page * size else None
        shown = found[(page - 1) * size : page * size]
        return {"count": len(found), "next": after, "previous": None, "results": shown}

    def _matching(self, body: Any) -> list[dict[str, Any]]:
        filters = body.get("filters")
        if not isinstance(filters, dict) or not _entities(filters):
            raise _Problem(400, "filters: at least one of user_id, agent_id, app_id, run_id is required")
        _matches(NOTHING, filters)  # wrong ones are refused whatever there is
        return [one for one in self.memories if _matches(one, filters)]

    def _one(self, id: str) -> dict[str, Any]:
        found = next((one for one in self.memories if one["id"] == id), None)
        if found is None:
            raise _Problem(404, "Memory not found")
        return found


def _demand(body: Any, what: str) -> None:
    unknown = {*body} - {*FIELDS[what].split()} if isinstance(body, dict) else {"no object"}
    if unknown:
        raise _Problem(400, f"{what}: unknown fields: {sorted(unknown)}")


def _is_message(value: Any) -> bool:
    is_pair = isinstance(value, dict) and {*value} == {"role", "content"}
    return is_pair and value["role"] in ("user", "assistant") and isinstance(value["content"], str)


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.casefold())}


def _entities(filters: Any) -> set[str]:
    """Those that filters speak of, wherever in them."""
    if isinstance(filters, list):
        return {name for one in filters for name in _entities(one)}
    inner = [_entities(value) for name, value in filters.items() if name in ("AND", "OR", "NOT")]
    return {name for name in filters if name in ENTITIES}.union(*inner)


def _matches(one: dict[str, Any], filters: dict[str, Any]) -> bool:
    """As the documentation has it: entities that are not spoken of are none."""
    unspoken = {*ENTITIES} - _entities(filters)
    return all(one[name] is None for name in unspoken) and _holds(one, filters)


def _holds(one: dict[str, Any], filters: Any) -> bool:
    _demand(filters, "filters")
    return all(_is_so(one, name, value) for name, value in filters.items())


def _is_so(one: dict[str, Any], name: str, value: Any) -> bool:
    match name, value:
        case (("AND" | "OR" | "NOT"), list()):
            held = [_holds(one, inner) for inner in value]
            return all(held) if name == "AND" else any(held) if name == "OR" else not any(held)
        case "metadata", dict():
            return all(one["metadata"].get(key) == inner for key, inner in value.items())
        case "categories", {"in": list(wanted)}:
            return any(category in wanted for category in one["categories"])
        case "memory_ids", list():
            return one["id"] in value
        case _, "*" if name in ENTITIES:
            return one[name] is not None
        case _, str() if name in ENTITIES:
            return bool(one[name] == value)
    raise _Problem(400, f"filters: {name} cannot be {value!r}")


def _handler(stub: Mem0Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def _answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            body, fault = json.loads(data) if data else None, stub.fault
            is_ping = parts.path == "/v1/ping/"
            if fault == "slow" and not is_ping:
                with stub._changed:
                    stub.asked.append(Asked(self.command, parts.path, query, body))
                    stub._changed.notify_all()
                stub.go_on.wait()
            if fault == "down":
                self.close_connection = True
                return
            status, answer = self._done(parts.path, query, body, None if is_ping else fault)
            with stub._changed:
                if not is_ping and fault != "slow":
                    stub.asked.append(Asked(self.command, parts.path, query, body))
                stub._changed.notify_all()
            if fault == "cut" and not is_ping:
                self.close_connection = True
                return
            self._send(status, json.dumps(answer).encode())

        do_GET = do_POST = do_DELETE = _answer

        def _done(self, path: str, query: dict[str, str], body: Any, fault: Fault | None) -> tuple[int, Any]:
            if fault == "reject":
                return 400, {"detail": "this is not taken"}
            if fault == "forbid":
                return 403, {"detail": "You do not have permission to perform this action."}
            if fault == "throttle":
                return 429, {"detail": "Request was throttled."}
            try:
                with stub._changed:
                    token = self.headers.get("Authorization") or ""
                    return 200, stub.answer(self.command, path, query, body, token)
            except _Problem as problem:
                return problem.status, {"detail": problem.detail}

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal of whoever runs the tests."""

    return Handler
