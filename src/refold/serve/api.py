"""Routes of the HTTP API: the scope, query, body and answer of each, also for the OpenAPI description."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from refold.config.serving import Right
from refold.core import codec
from refold.serve import schemas
from refold.serve.handlers import ApiRequest, Handlers
from refold.serve.http_errors import valid_id
from refold.serve.schemas import JsonBody, QueryParameters
from refold.serve.service import Service
from refold.serve.sse import EventStream
from refold.serve.tokens import Caller, require_scope
from refold.session.results import CompactionResult, ConversationRow, Decision, Explanation, Overflow
from refold.stores.store import Key

DEFAULT_OWNER = "default"
ALL, ONE = "/api/conversations", "/api/conversations/{id}"
LINES, EVENTS = "application/x-ndjson", "text/event-stream"

T = TypeVar("T")


class Endpoint(NamedTuple):
    method: str
    path: str
    scope: Right
    operation: str
    summary: str
    answer: Any
    """A type, or a media type."""
    query: type[QueryParameters] = QueryParameters
    body: type[JsonBody] | None = None
    status: int = 200


def _get(
    path: str, operation: str, summary: str, answer: Any, query: type[QueryParameters] = QueryParameters
) -> Endpoint:
    return Endpoint("GET", path, "read", operation, summary, answer, query)


def _post(
    path: str,
    operation: str,
    summary: str,
    answer: Any,
    body: type[JsonBody],
    scope: Right = "edit",
    status: int = 200,
) -> Endpoint:
    return Endpoint("POST", path, scope, operation, summary, answer, body=body, status=status)


ENDPOINTS = (
    _get(ALL, "all", "Conversations, the newest first", schemas.ConversationPage, schemas.ListQuery),
    _post(ALL, "create", "Create a conversation", ConversationRow, schemas.CreateBody, "append", 201),
    _get(
        f"{ONE}/messages", "messages", "Recorded messages, by index", schemas.MessagePage, schemas.PageQuery
    ),
    _post(
        f"{ONE}/messages",
        "append",
        "Append messages",
        schemas.AppendedPlaces,
        schemas.AppendBody,
        "append",
        201,
    ),
    _get(
        f"{ONE}/view",
        "view",
        "The view: what the model sees, now or after an event",
        schemas.ViewJson,
        schemas.ViewQuery,
    ),
    _get(f"{ONE}/edits", "edits", "Edits of the view, the oldest first", schemas.EditPage, schemas.PageQuery),
    _get(f"{ONE}/diff", "diff", "The difference of two views", schemas.DiffJson, schemas.DiffQuery),
    _get(f"{ONE}/steps", "steps", "What the model saw at each call", schemas.StepsJson, schemas.StepsQuery),
    _get(f"{ONE}/explain", "explain", "Why a message is shown or not", Explanation, schemas.PlaceQuery),
    _get(f"{ONE}/savings", "savings", "Expected and actual savings of edits", schemas.SavingsJson),
    _get(f"{ONE}/overflow", "overflow", "How full the model's window is", Overflow),
    _get(f"{ONE}/due", "due", "Which triggers would compact the view now", Decision),
    _get(
        f"{ONE}/memories",
        "memories",
        "Memories of the store's service",
        schemas.MemoriesJson,
        schemas.MemoriesQuery,
    ),
    _get(f"{ONE}/export", "export", "The whole record as JSON lines", LINES),
    _get(f"{ONE}/events", "events", "Live events", EVENTS, schemas.EventsQuery),
    _post(
        f"{ONE}/expand",
        "expand",
        "The full text at a place",
        schemas.ExpandedText,
        schemas.ExpandBody,
        "read",
    ),
    _post(f"{ONE}/restore", "restore", "Show the original again", schemas.EventPlace, schemas.PlaceBody),
    _post(
        f"{ONE}/undo", "undo", "Take back an edit, a pin or an undoing", schemas.UndoJson, schemas.UndoBody
    ),
    _post(f"{ONE}/pin", "pin", "Keep a message in every view", schemas.EventPlace, schemas.PlaceBody),
    _post(f"{ONE}/unpin", "unpin", "Unpin a message", schemas.EventPlace, schemas.PlaceBody),
    _post(
        f"{ONE}/correct",
        "correct",
        "Correct a message: show another in its place",
        schemas.EventPlace,
        schemas.CorrectBody,
    ),
    _post(f"{ONE}/fork", "fork", "Fork the conversation", ConversationRow, schemas.ForkBody, status=201),
    _post(f"{ONE}/compact", "compact", "Compact the view now", CompactionResult, schemas.CompactBody),
    _get(ONE, "show", "A conversation, its size and savings", schemas.ConversationDetail),
    Endpoint(
        "PATCH", ONE, "edit", "rename", "Set the title or the model", ConversationRow, body=schemas.RenameBody
    ),
    Endpoint(
        "DELETE",
        ONE,
        "admin",
        "erase",
        "Erase the conversation",
        schemas.ErasedConversation,
        schemas.EraseQuery,
    ),
    _get("/api/search", "search", "Search recorded messages", schemas.SearchHits, schemas.SearchQuery),
    _get("/api/events", "all_events", "Live events of all conversations", EVENTS),
    _get("/api/openapi.json", "openapi", "This description", dict[str, Any]),
)
"""If two paths match, the first one is used."""

_BODIES = {one.body: codec.decoder(one.body) for one in ENDPOINTS if one.body is not None}


def routes(service: Service) -> list[Route]:
    handlers = Handlers(service)
    paths = dict.fromkeys(endpoint.path for endpoint in ENDPOINTS)
    found = [Route(path, ApiPath(service, handlers, path)) for path in paths]
    return [*found, Route("/api/{rest:path}", ApiPath(service, handlers, None))]


def _unquoted(id: str) -> str:
    """The id in a path. Paths are matched before they are decoded, so an id may contain a slash.

    Raises:
        HTTPException: it is not UTF-8.
    """
    try:
        return unquote(id, errors="strict")
    except UnicodeDecodeError as error:
        raise HTTPException(400, "the id in the path is not percent-encoded UTF-8") from error


class ApiPath:
    """One path and its methods."""

    def __init__(self, service: Service, handlers: Handlers, path: str | None) -> None:
        self._service = service
        self._handlers = handlers
        self._methods = {one.method: one for one in ENDPOINTS if one.path == path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if not self._methods:
            raise HTTPException(404, "there is no such route; /api/openapi.json lists them all")
        endpoint = self._methods.get(request.method)
        if endpoint is None:
            allowed = ", ".join(self._methods)
            raise HTTPException(
                405, f"{request.method} is not allowed here; use {allowed}", {"allow": allowed}
            )
        answer = await self._respond(request, endpoint)
        await answer(scope, receive, send)

    async def _respond(self, request: Request, endpoint: Endpoint) -> ASGIApp:
        """
        Raises:
            HTTPException: the request is invalid, or its token does not allow it.
            RefoldError: the operation failed.
        """
        caller: Caller = request.scope["state"]["caller"]
        require_scope(caller, endpoint.scope)
        query = _query(request, endpoint.query)
        owner = _owner(caller, query.owner)
        id = request.path_params.get("id")
        key = Key(owner or DEFAULT_OWNER, valid_id(_unquoted(id)) if id is not None else "")
        body = _body(await request.body(), endpoint.body) if endpoint.body is not None else None
        service = self._service
        match endpoint.operation:
            case "openapi":
                from refold.serve.openapi import description

                return Response(codec.dumps(description(ENDPOINTS)), media_type="application/json")
            case "events":
                return EventStream(service, key, _events_seen(request, getattr(query, "after", None)))
            case "all_events":
                return EventStream(service, owner, None)
            case "export":
                await service.work(self._handlers.require, key)
                return StreamingResponse(self._handlers.lines(key), media_type=LINES)
        handle: Callable[[ApiRequest], Any] = getattr(self._handlers, endpoint.operation)
        api_request = ApiRequest(key, owner, query, body)
        text = await service.work(lambda: codec.dumps(handle(api_request)))
        return Response(text, endpoint.status, media_type="application/json")


def _owner(caller: Caller, named: str | None) -> str | None:
    """Whose conversations the request is about; None means all owners'."""
    if named is None or named == caller.owner:
        return caller.owner
    if caller.owner is not None and "admin" not in caller.scopes:
        raise HTTPException(403, "owner: this token belongs to another owner; only an admin may name one")
    return named


def _query(request: Request, type: type[T]) -> T:
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    for name in names:
        if names.count(name) > 1:
            raise HTTPException(400, f"query: {name!r} is given more than once")
    try:
        return msgspec.convert(dict(given), type, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(type.__struct_fields__)  # type: ignore[attr-defined]
        raise HTTPException(400, f"query: {error}; known: {known}") from None


def _body(body: bytes, type: type[JsonBody]) -> Any:
    try:
        return _BODIES[type].decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(type.__struct_fields__)
        raise HTTPException(400, f"body: {error}; known: {known}") from None


def _events_seen(request: Request, after: int | None) -> int | None:
    """How many events the client has seen; a browser sends `Last-Event-ID` when it reconnects."""
    last_id = request.headers.get("last-event-id", "")
    if not last_id:
        return after
    if not (last_id.isascii() and last_id.isdigit() and len(last_id) < 16):
        raise HTTPException(400, "last-event-id: expected the id of an event, a whole number")
    return int(last_id)
