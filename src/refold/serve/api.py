"""The HTTP API: one function per route, run in a thread.

The decorator of a function names its method, path and scope. It is called with the parameters that it names:
`query` and `body` are validated by their types, `session` and `inspector` are those of the conversation in
the path. OpenAPI is made from these types, the type that is returned, and the docstring.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, get_type_hints
from urllib.parse import unquote
from uuid import uuid4

import msgspec
from msgspec.structs import asdict, replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from refold.config.serving import Right
from refold.core import codec
from refold.core.errors import ConflictError, NotFoundError, SettingError
from refold.core.event import Named
from refold.serve import schemas
from refold.serve.conversations import Conversations
from refold.serve.events import EventStream
from refold.serve.http_errors import valid_id
from refold.serve.schemas import JsonBody, QueryParameters
from refold.serve.service import Service
from refold.serve.tokens import Caller, require_scope
from refold.session.export import export_lines
from refold.session.inspect import Inspector, shorten_texts
from refold.session.results import (
    EXCERPT_CHARS,
    CompactionResult,
    ConversationRow,
    Decision,
    Diff,
    Explanation,
    Overflow,
    ShownMessage,
    StoredMessage,
)
from refold.session.session import Session, forked
from refold.stores.store import Key, Memories

DEFAULT_OWNER = "default"
ALL = "/api/conversations"
ONE = "/api/conversations/{id}"
MAX_OWNERS = 20
"""Owners whose conversations one request searches, if the caller may see them all."""
EXPORT_BATCH = 200
"""Lines of an export that are read at a time."""
TEXT_CHARS = 2_000
"""Longer texts are cut in lists; `expand` returns all of a text."""

Row = TypeVar("Row", StoredMessage, ShownMessage)


class Endpoint:
    """Declares a handler, as its decorator. With `stream`, it returns an application that sends this type."""

    def __init__(
        self, method: str, path: str, scope: Right = "read", *, status: int = 200, stream: str = ""
    ) -> None:
        self.method = method
        self.path = path
        self.scope: Right = scope
        self.status = status
        self.stream = stream

    def __call__(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        types = get_type_hints(handler)
        self.handler = handler
        self.operation = handler.__name__
        self.summary = handler.__doc__ or ""
        self.answer: Any = types.pop("return")
        self.parameters = tuple(types)
        self.query: type[QueryParameters] = types.get("query", QueryParameters)
        self.body: type[JsonBody] | None = types.get("body")
        self.body_decoder = codec.decoder(self.body)
        ENDPOINTS.append(self)
        return handler


ENDPOINTS: list[Endpoint] = []


@dataclass(frozen=True)
class ApiCall:
    """A request whose sender, path, query and body are valid."""

    service: Service
    conversations: Conversations
    key: Key
    """Of the conversation, if the path names one."""
    owner: str | None
    """Whose conversations; None means all owners'."""
    last_event_id: str

    @contextmanager
    def session(self, key: Key) -> Iterator[Session]:
        """
        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.conversations.inspecting(key) as inspector:
            model = inspector.state.model
        with self.service.session(key, model if model and model.isprintable() else None) as session:
            yield session
        self.service.events.appended(key)

    def row(self, key: Key) -> ConversationRow:
        with self.conversations.inspecting(key) as inspector:
            return self.conversations.row(inspector)


# Conversations


@Endpoint("GET", ALL)
def all(call: ApiCall, query: schemas.ListQuery) -> schemas.ConversationPage:
    """Conversations, the newest first"""
    return call.conversations.page(call.owner, query)


@Endpoint("POST", ALL, "append", status=201)
def create(call: ApiCall, body: schemas.CreateBody) -> ConversationRow:
    """Create a conversation"""
    key = Key(call.key.owner, body.id or uuid4().hex)
    named = codec.encode(Named(0, body.title, body.model, time.time()))
    try:
        call.service.store.append(key, [named])
    except ConflictError:
        message = f"The conversation {key.conversation!r} already exists; choose another id"
        raise ConflictError(message) from None
    call.service.events.appended(key)
    return call.row(key)


@Endpoint("GET", ONE)
def show(call: ApiCall, session: Session, inspector: Inspector) -> schemas.ConversationDetail:
    """A conversation, its size and savings"""
    price = session.limits.input
    saved_usd = None
    if price is not None:
        saved_usd = round(inspector.steps.saved_tokens * price / 1_000_000, 6)
    return schemas.ConversationDetail(
        **asdict(call.conversations.row(inspector)),
        overflow=session.check_overflow(),
        pins=sorted(inspector.pins),
        cost=schemas.CostEstimate(saved_usd, round(inspector.state.spent, 6), price),
        forks=call.conversations.listed(call.key)[1],
    )


@Endpoint("PATCH", ONE, "edit")
def rename(call: ApiCall, session: Session, body: schemas.RenameBody) -> ConversationRow:
    """Set the title or the model"""
    if body.title is None and body.model is None:
        raise SettingError("title, model", "give at least one of them")
    session.name(title=body.title, model=body.model)
    return call.row(call.key)


@Endpoint("DELETE", ONE, "admin")
def erase(call: ApiCall, inspector: Inspector, query: schemas.EraseQuery) -> schemas.ErasedConversation:
    """Erase the conversation"""
    store = call.service.store
    gone = [call.key]
    if query.with_forks:
        rows = list(store.conversations(call.key.owner))
        for one in gone:  # which grows meanwhile, by forks of forks
            gone += [row.key for row in rows if row.parent == one]
    heirs = store.erase(call.key, with_forks=query.with_forks)
    for key in (*gone, *heirs):
        call.service.forget(key)
    for key in gone:
        call.service.events.erased(key)
    return schemas.ErasedConversation([heir.conversation for heir in heirs])


# What was recorded, and what is shown


@Endpoint("GET", f"{ONE}/messages")
def messages(inspector: Inspector, query: schemas.PageQuery) -> schemas.MessagePage:
    """Recorded messages, by index"""
    recorded = inspector.messages(query.start, query.limit)
    rows = [_with_short_texts(inspector.stored(said), TEXT_CHARS) for said in recorded]
    return schemas.MessagePage(rows, inspector.state.index)


@Endpoint("POST", f"{ONE}/messages", "append", status=201)
def append(session: Session, body: schemas.AppendBody) -> schemas.AppendedPlaces:
    """Append messages"""
    return schemas.AppendedPlaces(session.append(body.messages, dialect=body.dialect))


@Endpoint("GET", f"{ONE}/view")
def view(session: Session, inspector: Inspector, query: schemas.ViewQuery) -> schemas.ViewJson:
    """The view: what the model sees, now or after an event"""
    rendered: dict[str, Any] = {}
    if query.messages:
        if query.at is not None:
            raise SettingError("messages", "is available for the current view only; omit `at`")
        (request,) = session.export(session.dialect, view=True)
        rendered = {"system": None, **codec.loads(request.encode())}
    view = inspector.view(query.at, query.start, query.limit)
    items = []
    for item in view.items:
        shown = tuple(_with_short_texts(one, TEXT_CHARS) for one in item.shown)
        items.append(replace(item, shown=shown))
    facts = asdict(view) | {"items": tuple(items)}
    return schemas.ViewJson(**facts, window=session.limits.window, **rendered)


@Endpoint("GET", f"{ONE}/edits")
def edits(inspector: Inspector, query: schemas.PageQuery) -> schemas.EditPage:
    """Edits of the view, the oldest first"""
    return schemas.EditPage(*inspector.edits(query.start, query.limit))


@Endpoint("GET", f"{ONE}/diff")
def diff(inspector: Inspector, query: schemas.DiffQuery) -> Diff:
    """The difference of two views, with the beginnings of texts"""
    diff = inspector.diff(inspector, query.at, query.to)
    return replace(diff, changes=tuple(_with_short_texts(one, EXCERPT_CHARS) for one in diff.changes))


@Endpoint("GET", f"{ONE}/steps")
def steps(session: Session, inspector: Inspector, query: schemas.StepsQuery) -> schemas.StepsJson:
    """What the model saw at each call"""
    budget = session.budget
    return schemas.StepsJson(inspector.steps.steps(query.limit), budget.window, budget.threshold)


@Endpoint("GET", f"{ONE}/explain")
def explain(inspector: Inspector, query: schemas.PlaceQuery) -> Explanation:
    """Why a message is shown or not"""
    return inspector.explain(query.at)


@Endpoint("GET", f"{ONE}/savings")
def savings(session: Session) -> schemas.SavingsJson:
    """Expected and actual savings of edits"""
    return schemas.SavingsJson(session.savings())


@Endpoint("GET", f"{ONE}/overflow")
def overflow(session: Session) -> Overflow:
    """How full the model's window is"""
    return session.check_overflow()


@Endpoint("GET", f"{ONE}/due")
def due(session: Session) -> Decision:
    """Which triggers would compact the view now"""
    return session.should_compact()


@Endpoint("GET", f"{ONE}/memories")
def memories(session: Session, query: schemas.MemoriesQuery) -> schemas.MemoriesJson:
    """Memories of the store's service"""
    if not isinstance(session.store, Memories):
        raise NotFoundError("This store has no memories; use mem0://, hybrid:// or agentcore://")
    found = session.memories(query.q, query.limit, query.namespace)
    return schemas.MemoriesJson([schemas.MemoryJson(*one) for one in found])


@Endpoint("GET", f"{ONE}/export", stream="application/x-ndjson")
def export(call: ApiCall, inspector: Inspector) -> ASGIApp:
    """The whole record as JSON lines"""
    lines = export_lines(call.service.store, call.key)

    async def batches() -> AsyncIterator[bytes]:
        while some := await call.service.work(lambda: list(islice(lines, EXPORT_BATCH))):
            yield "".join(f"{line}\n" for line in some).encode()

    return StreamingResponse(batches(), media_type="application/x-ndjson")


@Endpoint("GET", f"{ONE}/events", stream="text/event-stream")
def events(call: ApiCall, query: schemas.EventsQuery) -> ASGIApp:
    """Live events"""
    seen = query.after
    last_id = call.last_event_id  # a browser sends it when it reconnects
    if last_id:
        if not (last_id.isascii() and last_id.isdigit() and len(last_id) < 16):
            raise HTTPException(400, "last-event-id: expected the id of an event, a whole number")
        seen = int(last_id)
    return EventStream(call.service, call.key, seen)


# What can be done


@Endpoint("POST", f"{ONE}/expand")
def expand(session: Session, body: schemas.ExpandBody) -> schemas.ExpandedText:
    """The full text at a place"""
    return schemas.ExpandedText(session.expand(**asdict(body)))


@Endpoint("POST", f"{ONE}/restore", "edit")
def restore(session: Session, body: schemas.PlaceBody) -> schemas.EventPlace:
    """Show the original again"""
    return schemas.EventPlace(session.restore(body.at, why=body.why))


@Endpoint("POST", f"{ONE}/undo", "edit")
def undo(session: Session, body: schemas.UndoBody) -> schemas.UndoJson:
    """Take back an edit, a pin or an undoing"""
    done = session.undo(body.at, why=body.why)
    return schemas.UndoJson(int(done), done.of, done.covered_by)


@Endpoint("POST", f"{ONE}/pin", "edit")
def pin(session: Session, body: schemas.PlaceBody) -> schemas.EventPlace:
    """Keep a message in every view"""
    return schemas.EventPlace(session.pin(body.at, why=body.why))


@Endpoint("POST", f"{ONE}/unpin", "edit")
def unpin(session: Session, body: schemas.PlaceBody) -> schemas.EventPlace:
    """Unpin a message"""
    return schemas.EventPlace(session.unpin(body.at, why=body.why))


@Endpoint("POST", f"{ONE}/correct", "edit")
def correct(session: Session, body: schemas.CorrectBody) -> schemas.EventPlace:
    """Correct a message: show another in its place"""
    return schemas.EventPlace(session.correct(body.at, body.message, why=body.why))


@Endpoint("POST", f"{ONE}/fork", "edit", status=201)
def fork(call: ApiCall, session: Session, body: schemas.ForkBody) -> ConversationRow:
    """Fork the conversation"""
    return call.row(forked(session, body.id, body.at))


@Endpoint("POST", f"{ONE}/compact", "edit")
def compact(session: Session, body: schemas.CompactBody) -> CompactionResult:
    """Compact the view now"""
    return session.compact(**asdict(body))


# Everything


@Endpoint("GET", "/api/search")
def search(call: ApiCall, query: schemas.SearchQuery) -> schemas.SearchHits:
    """Search recorded messages"""
    keys = [Key(call.key.owner, query.conversation or "")]
    if not query.conversation:
        keys = _newest_by_owner(call)
    found: list[schemas.FoundMessage] = []
    for key in keys:
        with call.session(key) as session:
            hits = session.search(query.q, limit=query.limit, everywhere=not query.conversation)
        for hit in hits:
            row = call.row(Key(key.owner, hit.conversation))
            found.append(schemas.FoundMessage(**asdict(hit), owner=key.owner, title=row.title))
    found.sort(key=lambda hit: -hit.score)
    return schemas.SearchHits(found[: query.limit])


def _newest_by_owner(call: ApiCall) -> list[Key]:
    found: dict[str, Key] = {}
    for row in call.service.store.conversations(call.owner):
        if len(found) < MAX_OWNERS and row.next:
            found.setdefault(row.key.owner, row.key)
    return [*found.values()]


@Endpoint("GET", "/api/events", stream="text/event-stream")
def all_events(call: ApiCall) -> ASGIApp:
    """Live events of all conversations"""
    return EventStream(call.service, call.owner, None)


@Endpoint("GET", "/api/openapi.json")
def openapi(call: ApiCall) -> dict[str, Any]:
    """This description"""
    from refold.serve.openapi import description

    return description()


# Requests


def routes(service: Service) -> list[Route]:
    paths: dict[str, dict[str, Endpoint]] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method] = one
    conversations = Conversations(service.store)
    found = [Route(path, ApiPath(service, conversations, methods)) for path, methods in paths.items()]
    return [*found, Route("/api/{rest:path}", ApiPath(service, conversations, {}))]


class ApiPath:
    """One path and its methods, as an ASGI application."""

    def __init__(self, service: Service, conversations: Conversations, methods: dict[str, Endpoint]) -> None:
        self._service = service
        self._conversations = conversations
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            HTTPException: the request is invalid, or its token does not allow it.
            RefoldError: the operation failed.
        """
        request = Request(scope, receive)
        if not self._methods:
            raise HTTPException(404, "there is no such route; /api/openapi.json lists them all")
        endpoint = self._methods.get(request.method)
        if endpoint is None:
            allowed = ", ".join(self._methods)
            message = f"{request.method} is not allowed here; use {allowed}"
            raise HTTPException(405, message, {"allow": allowed})
        caller: Caller = request.scope["state"]["caller"]
        require_scope(caller, endpoint.scope)
        query = _query(request, endpoint.query)
        body = None
        if endpoint.body is not None:
            body = _body(await request.body(), endpoint)
        owner = _owner(caller, query.owner)
        key = Key(owner or DEFAULT_OWNER, _id(request))
        last_event_id = request.headers.get("last-event-id", "")
        call = ApiCall(self._service, self._conversations, key, owner, last_event_id)
        answer = await self._service.work(_answer, endpoint, call, query, body)
        await answer(scope, receive, send)


def _answer(endpoint: Endpoint, call: ApiCall, query: QueryParameters, body: Any) -> ASGIApp:
    with ExitStack() as stack:
        given: dict[str, Any] = {"call": call, "query": query, "body": body}
        if "session" in endpoint.parameters:
            given["session"] = stack.enter_context(call.session(call.key))
        if "inspector" in endpoint.parameters:
            given["inspector"] = stack.enter_context(call.conversations.inspecting(call.key))
        answer = endpoint.handler(**{name: given[name] for name in endpoint.parameters})
    if endpoint.stream:
        return answer  # type: ignore[no-any-return]
    return Response(codec.dumps(answer), endpoint.status, media_type="application/json")


def _id(request: Request) -> str:
    """The id in the path, or "". Paths are matched before they are decoded, so an id may contain a slash."""
    id = request.path_params.get("id")
    if id is None:
        return ""
    try:
        return valid_id(unquote(id, errors="strict"))
    except UnicodeDecodeError as error:
        raise HTTPException(400, "the id in the path is not percent-encoded UTF-8") from error


def _owner(caller: Caller, named: str | None) -> str | None:
    """Whose conversations the request is about; None means all owners'."""
    if named is None or named == caller.owner:
        return caller.owner
    if caller.owner is not None and "admin" not in caller.scopes:
        raise HTTPException(403, "owner: this token belongs to another owner; only an admin may name one")
    return named


def _query(request: Request, type: type[QueryParameters]) -> QueryParameters:
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    for name in names:
        if names.count(name) > 1:
            raise HTTPException(400, f"query: {name!r} is given more than once")
    try:
        return msgspec.convert(dict(given), type, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(type.__struct_fields__)
        raise HTTPException(400, f"query: {error}; known: {known}") from None


def _body(body: bytes, endpoint: Endpoint) -> Any:
    try:
        return endpoint.body_decoder.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(endpoint.body.__struct_fields__ if endpoint.body else ())
        raise HTTPException(400, f"body: {error}; known: {known}") from None


# Answers


def _with_short_texts(row: Row, chars: int) -> Row:
    return replace(row, message=shorten_texts(row.message, chars))
