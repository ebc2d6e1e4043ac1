"""AgentCore Memory without AWS, for tests: a server on loopback that boto3 talks to as to the real one.

    with AgentCoreStub() as stub:
        os.environ |= stub.environment
        store = open_store(stub.url)

Every request is read and checked by botocore's own model of the service: required members, types, lengths,
patterns, enums. Events are listed newest first, in pages; branches, client tokens, sessions, actors, records
and errors are there. What the model does not say is imitated from what the documentation and people who
watched the service report: an event's id begins with the milliseconds of its timestamp, an event without a
branch is on `main`, a new branch needs a root, a known client token is ignored.

Not imitated: signatures and permissions, quotas, expiry, meaning (records are found by the words they share
with a query), and extraction: `learn` says what is learned of a text. So what works here has not been shown
to work at AWS.
"""

import base64
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import RLock, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.model import OperationModel, Shape
from botocore.session import get_session
from botocore.validate import ParamValidator

Json: TypeAlias = dict[str, Any]
Learn: TypeAlias = Callable[[str, str, str, str], tuple[str, str] | None]
"""From actor, session, role and text to the namespace and the text of a record; None is nothing."""

SERVICE = "bedrock-agentcore"
MEMORY = "refold_test-0123456789"
MOST_BYTES = 10_000_000
"""Of one request; a larger one is answered with 413, as the service was seen to do."""


class Fault(NamedTuple):
    """What happens instead of, or after, an operation."""

    operation: str
    """Its name, or empty for every operation."""
    status: int
    code: str
    """Empty: the operation takes effect, and then the connection is cut without an answer."""


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class _Event:
    actor: str
    session: str
    body: Json
    """As it is answered, its payload included."""
    listed: int = 0
    """The first call that lists it."""

    @property
    def id(self) -> str:
        return str(self.body["eventId"])

    @property
    def branch(self) -> str:
        return str(self.body["branch"]["name"])


@dataclass(slots=True)
class AgentCoreStub:
    """One memory. Everything may be looked at and changed while it runs."""

    memory_id: str = MEMORY
    page: int = 100
    """The most that is listed at a time, whatever is asked for."""
    most_bytes: int = MOST_BYTES
    learn: Learn | None = None
    endpoint_url: str = ""
    calls: list[str] = field(default_factory=list)
    """The operations that were asked for, in order."""
    seconds: float = 0.0
    """How long every answer takes."""
    remembers_tokens: bool = True
    """Whether a client token that was used before is known again."""
    lag: int = 0
    """How many calls it takes until an event that was created is listed."""
    _events: dict[str, _Event] = field(default_factory=dict)
    _sessions: dict[tuple[str, str], float] = field(default_factory=dict)
    _tokens: dict[str, Json] = field(default_factory=dict)
    _records: dict[str, Json] = field(default_factory=dict)
    _faults: list[Fault] = field(default_factory=list)
    _lock: RLock = field(default_factory=RLock)
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        self._server = server = _server(self)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """For `open_store`, where the environment is that of the stub."""
        return f"agentcore://{self.memory_id}"

    @property
    def environment(self) -> dict[str, str]:
        """What leads the SDK here, with credentials that open nothing."""
        return {
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": self.endpoint_url,
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    # For tests

    def fail(self, code: str, status: int, *, operation: str = "", times: int = 1) -> None:
        """The next so many calls of an operation (of any, unless named) are answered with an error."""
        with self._lock:
            self._faults += [Fault(operation, status, code)] * times

    def cut(self, operation: str = "", times: int = 1) -> None:
        """The next so many calls take effect, and then the connection is cut instead of an answer."""
        self.fail("", 0, operation=operation, times=times)

    def events(self, actor: str | None = None, session: str | None = None) -> list[Json]:
        """What is stored, the oldest first."""
        with self._lock:
            return [
                one.body
                for one in sorted(self._events.values(), key=lambda one: one.id)
                if actor in (None, one.actor) and session in (None, one.session)
            ]

    def add_record(self, namespace: str, text: str, strategy: str = "a-strategy") -> str:
        """As an extraction would; returns the record's id."""
        id = f"mem-{secrets.token_hex(20)}"
        with self._lock:
            self._records[id] = {
                "memoryRecordId": id,
                "content": {"text": text},
                "memoryStrategyId": strategy,
                "namespaces": [namespace],
                "createdAt": time.time(),
            }
        return id

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """The operations asked for inside the block, once it is left."""
        before, during = len(self.calls), list[str]()
        yield during
        during += self.calls[before:]

    # Answering

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Json]:
        """Raises:
        Refusal: with what the service would answer.
        ConnectionAbortedError: it took effect, and there is no answer.
        """
        parts = urlsplit(path)
        operation, given = _routed(method, parts.path)
        if len(body) > self.most_bytes:
            raise Refusal(413, "", "")
        with self._lock:
            self.calls.append(operation.name)
            fault = next((one for one in self._faults if one.operation in ("", operation.name)), None)
            if fault is not None:
                self._faults.remove(fault)
        if self.seconds:
            time.sleep(self.seconds)
        if fault is not None and fault.code:
            raise Refusal(fault.status, fault.code, "as the test wanted it")
        asked = _parsed(operation, given, parse_qs(parts.query), body)
        if asked.pop("memoryId") != self.memory_id:
            raise Refusal(404, "ResourceNotFoundException", "Memory not found")
        verb: Callable[[Json], Json] | None = getattr(self, f"_{operation.name}", None)
        if verb is None:
            raise Refusal(501, "ServiceException", f"The stub has no {operation.name}")
        with self._lock:
            result = verb(asked)
        if fault is not None:
            raise ConnectionAbortedError
        return int(operation.http.get("responseCode", 200)), result

    def _CreateEvent(self, asked: Json) -> Json:
        token = asked.get("clientToken")
        if self.remembers_tokens and token in self._tokens:
            return {"event": self._tokens[token]}
        actor, session = asked["actorId"], asked.get("sessionId") or f"s{secrets.token_hex(16)}"
        branch = asked.get("branch", {"name": "main"})
        if branch["name"] != "main":
            branch = self._rooted(actor, session, branch)
        seconds = asked["eventTimestamp"].timestamp()
        body = {
            "memoryId": self.memory_id,
            "actorId": actor,
            "sessionId": session,
            "eventId": f"{round(seconds * 1000):019d}#{secrets.token_hex(4)}",
            "eventTimestamp": round(seconds, 3),
            "payload": asked["payload"],
            "branch": branch,
        } | ({"metadata": asked["metadata"]} if "metadata" in asked else {})
        self._events[body["eventId"]] = _Event(actor, session, body, len(self.calls) + self.lag)
        self._sessions.setdefault((actor, session), time.time())
        if token is not None:
            self._tokens[token] = body
        self._extract(actor, session, asked)
        return {"event": body}

    def _rooted(self, actor: str, session: str, branch: Json) -> Json:
        same = (one.body["branch"] for one in self._of(actor, session) if one.branch == branch["name"])
        known = next(same, None)
        root = self._events.get(branch.get("rootEventId", ""))
        if known is not None and branch.get("rootEventId", known["rootEventId"]) == known["rootEventId"]:
            return dict(known)
        if known is not None or root is None or (root.actor, root.session) != (actor, session):
            raise _invalid("branch.rootEventId: a branch begins at an event of its session, and once")
        return branch

    def _extract(self, actor: str, session: str, asked: Json) -> None:
        if self.learn is None or asked.get("extractionMode") == "SKIP":
            return
        for item in asked["payload"]:
            if (said := item.get("conversational")) is not None:
                learned = self.learn(actor, session, said["role"], said["content"]["text"])
                if learned is not None:
                    self.add_record(*learned)

    def _GetEvent(self, asked: Json) -> Json:
        return {"event": self._event(asked).body}

    def _DeleteEvent(self, asked: Json) -> Json:
        del self._events[self._event(asked).id]
        return {"eventId": asked["eventId"]}

    def _event(self, asked: Json) -> _Event:
        found = self._events.get(asked["eventId"])
        if found is None or (found.actor, found.session) != (asked["actorId"], asked["sessionId"]):
            raise Refusal(404, "ResourceNotFoundException", "Event not found")
        return found

    def _of(self, actor: str, session: str) -> list[_Event]:
        return [one for one in self._events.values() if (one.actor, one.session) == (actor, session)]

    def _ListEvents(self, asked: Json) -> Json:
        found = self._of(asked["actorId"], asked["sessionId"])
        found = [one for one in found if one.listed <= len(self.calls)]
        found = sorted(found, key=lambda one: one.id, reverse=True)
        wanted = asked.get("filter", {})
        if "branch" in wanted:
            found = self._on(found, wanted["branch"])
        for test in wanted.get("eventMetadata", []):
            found = [one for one in found if _passes(one.body.get("metadata", {}), test)]
        bodies = [one.body for one in found]
        if not asked.get("includePayloads", True):
            bodies = [{name: value for name, value in one.items() if name != "payload"} for one in bodies]
        return self._paged("events", bodies, "eventId", asked)

    def _on(self, found: list[_Event], wanted: Json) -> list[_Event]:
        """What is on a branch, and with its parents what was there before each began."""
        name, last, result = wanted["name"], "~", list[_Event]()
        while True:
            mine = [one for one in found if one.branch == name and one.id <= last]
            result += mine
            root = mine[0].body["branch"].get("rootEventId") if mine else None
            if not wanted.get("includeParentBranches") or root not in self._events:
                return sorted(result, key=lambda one: one.id, reverse=True)
            name, last = self._events[root].branch, root

    def _ListSessions(self, asked: Json) -> Json:
        busy = {(one.actor, one.session) for one in self._events.values()}
        rows = [
            {"sessionId": session, "actorId": actor, "createdAt": created}
            for (actor, session), created in self._sessions.items()
            if actor == asked["actorId"] and (not asked.get("filter") or (actor, session) in busy)
        ]
        return self._paged("sessionSummaries", rows, "sessionId", asked)

    def _ListActors(self, asked: Json) -> Json:
        actors = dict.fromkeys(actor for actor, _ in self._sessions)
        return self._paged("actorSummaries", [{"actorId": actor} for actor in actors], "actorId", asked)

    def _ListMemoryRecords(self, asked: Json) -> Json:
        return self._paged("memoryRecordSummaries", self._under(asked), "memoryRecordId", asked)

    def _RetrieveMemoryRecords(self, asked: Json) -> Json:
        criteria = asked["searchCriteria"]
        words = set(criteria["searchQuery"].lower().split())
        scored = [
            record | {"score": len(words & set(record["content"]["text"].lower().split())) / len(words)}
            for record in self._under(asked)
        ]
        scored = sorted((one for one in scored if one["score"]), key=lambda one: -one["score"])
        found = scored[: criteria.get("topK", 10)]
        return self._paged("memoryRecordSummaries", found, "memoryRecordId", asked)

    def _under(self, asked: Json) -> list[Json]:
        exact, path = asked.get("namespace"), asked.get("namespacePath")
        if (exact is None) == (path is None):
            raise _invalid("either namespace or namespacePath is required")
        inside = f"/{path.strip('/')}/".replace("//", "/") if path is not None else ""
        return [
            record
            for record in self._records.values()
            for namespace in record["namespaces"]
            if namespace == exact or (path is not None and f"/{namespace.strip('/')}/".startswith(inside))
        ]

    def _BatchDeleteMemoryRecords(self, asked: Json) -> Json:
        ids = [record["memoryRecordId"] for record in asked["records"]]
        gone = [id for id in ids if self._records.pop(id, None)]
        done = [{"memoryRecordId": id, "status": "SUCCEEDED"} for id in gone]
        failed = [{"memoryRecordId": id, "status": "FAILED"} for id in ids if id not in gone]
        return {"successfulRecords": done, "failedRecords": failed}

    def _paged(self, name: str, rows: list[Json], id: str, asked: Json) -> Json:
        """A page goes on behind the last row of the one before, also where that was deleted meanwhile."""
        size = min(asked.get("maxResults", 20), self.page)
        start = 0
        if token := asked.get("nextToken"):
            try:
                place, last = json.loads(base64.urlsafe_b64decode(token))
            except ValueError:
                raise _invalid("nextToken is none of ours") from None
            behind = (n for n, row in enumerate(rows) if row[id] == last)
            start = next(behind, place - 1) + 1
            if name == "events":
                start = next((n for n, row in enumerate(rows) if row[id] < last), len(rows))
        result: Json = {name: rows[start : start + size]}
        if start + size < len(rows):
            mark = json.dumps([start + size - 1, rows[start + size - 1][id]]).encode()
            result["nextToken"] = base64.urlsafe_b64encode(mark).decode()
        return result


# Reading requests by botocore's model


@cache
def _routes() -> list[tuple[str, re.Pattern[str], OperationModel]]:
    model = get_session().get_service_model(SERVICE)
    result = []
    for operation in map(model.operation_model, model.operation_names):
        uri = operation.http["requestUri"].partition("?")[0].rstrip("/")
        pattern = re.sub(r"\{(\w+)\+?\}", r"(?P<\1>[^/]+)", uri)
        result.append((operation.http["method"], re.compile(pattern), operation))
    return result


def _routed(method: str, path: str) -> tuple[OperationModel, Json]:
    """The operation that a path stands for, and what the path says."""
    for verb, route, operation in _routes():
        if verb == method and (match := route.fullmatch(path.rstrip("/"))):
            return operation, {name: unquote(value) for name, value in match.groupdict().items()}
    raise Refusal(404, "UnknownOperationException", f"{method} {path}")


def _parsed(operation: OperationModel, given: Json, query: dict[str, list[str]], body: bytes) -> Json:
    """The members of a request, checked."""
    try:
        asked = json.loads(body) if body else {}
    except ValueError as error:
        raise Refusal(400, "SerializationException", str(error)) from None
    shape = operation.input_shape
    if shape is None or not isinstance(asked, dict):
        raise Refusal(400, "SerializationException", "expected an object")
    for name, member in shape.members.items():
        where, called = member.serialization.get("location"), member.serialization.get("name", name)
        if where is not None:
            asked.pop(name, None)
        if where == "uri":
            asked[name] = given[called]
        elif where == "querystring" and called in query:
            asked[name] = query[called][0]
    members = {name: _typed(value, shape.members.get(name)) for name, value in asked.items()}
    errors = ParamValidator().validate(members, shape)
    problems = [errors.generate_report()] if errors.has_errors() else list(_problems(members, shape, ""))
    if problems:
        raise _invalid("; ".join(problems)[:2_000])
    return members


def _typed(value: Any, shape: Shape | None) -> Any:
    """JSON as the values that the model means: times are numbers of seconds there."""
    if shape is None or value is None or getattr(shape, "is_document_type", False):
        return value
    if shape.type_name == "timestamp" and isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    if shape.type_name == "structure" and isinstance(value, dict):
        return {name: _typed(one, shape.members.get(name)) for name, one in value.items()}
    if shape.type_name == "list" and isinstance(value, list):
        return [_typed(one, shape.member) for one in value]
    if shape.type_name == "map" and isinstance(value, dict):
        return {name: _typed(one, shape.value) for name, one in value.items()}
    return value


def _problems(value: Any, shape: Shape, where: str) -> Iterator[str]:
    """What botocore's own check of parameters leaves to the service: most, patterns and enums."""
    if getattr(shape, "is_document_type", False):
        return
    facts = shape.metadata
    size = value if isinstance(value, int | float) else len(value) if hasattr(value, "__len__") else None
    if size is not None and "max" in facts and size > facts["max"]:
        yield f"{where}: {size} is more than {facts['max']}"
    if isinstance(value, str):
        if "pattern" in facts and not re.fullmatch(facts["pattern"], value):
            yield f"{where}: does not match {facts['pattern']}"
        if getattr(shape, "enum", None) and value not in shape.enum:
            yield f"{where}: {value!r} is none of {shape.enum}"
    elif shape.type_name == "structure":
        for name, one in value.items():
            yield from _problems(one, shape.members[name], f"{where}.{name}")
    elif shape.type_name == "list":
        for n, one in enumerate(value):
            yield from _problems(one, shape.member, f"{where}[{n}]")
    elif shape.type_name == "map":
        for name, one in value.items():
            yield from _problems(name, shape.key, f"{where} key")
            yield from _problems(one, shape.value, f"{where}.{name}")


def _passes(metadata: Json, test: Json) -> bool:
    there = test["left"]["metadataKey"] in metadata
    if test["operator"] != "EQUALS_TO":
        return there is bool(test["operator"] == "EXISTS")
    wanted = test.get("right", {}).get("metadataValue")
    return bool(there and metadata[test["left"]["metadataKey"]] == wanted)


def _invalid(problem: str) -> Refusal:
    return Refusal(400, "ValidationException", problem)


def _server(stub: AgentCoreStub) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind = ""
            try:
                status, result = stub.answer(self.command, self.path, body)
            except Refusal as refusal:
                status, kind = refusal.status, refusal.code
                result = {"message": str(refusal), "reason": "CannotParse"} if kind else {}
            except ConnectionAbortedError:
                self.close_connection = True
                return
            data = json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if kind:
                self.send_header("x-amzn-ErrorType", kind)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_PUT = _serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server
