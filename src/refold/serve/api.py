"""The API: what each of its routes needs, takes and answers; its description is made of the same table."""

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
from refold.serve import schemas as shapes
from refold.serve.handlers import Verbs, Wish
from refold.serve.http_errors import valid_id
from refold.serve.schemas import Asked, Body
from refold.serve.service import Service
from refold.serve.sse import EventStream
from refold.serve.tokens import Caller, require_scope
from refold.session.results import CompactionResult, Decision, Explanation, Overflow
from refold.stores.store import Key

DEFAULT_OWNER = "default"
ALL, ONE = "/api/conversations", "/api/conversations/{id}"
LINES, EVENTS = "application/x-ndjson", "text/event-stream"

T = TypeVar("T")


class Endpoint(NamedTuple):
    method: str
    path: str
    needs: Right
    verb: str
    says: str
    answer: Any
    """A type, or a content type."""
    query: type[Asked] = Asked
    body: type[Body] | None = None
    status: int = 200


def _get(path: str, verb: str, says: str, answer: Any, query: type[Asked] = Asked) -> Endpoint:
    return Endpoint("GET", path, "read", verb, says, answer, query)


def _post(
    path: str, verb: str, says: str, answer: Any, body: type[Body], needs: Right = "edit", status: int = 200
) -> Endpoint:
    return Endpoint("POST", path, needs, verb, says, answer, body=body, status=status)


ENDPOINTS = (
    _get(ALL, "all", "Conversations, the newest first", shapes.Rows, shapes.ListAsked),
    _post(ALL, "create", "Begin a conversation", shapes.Row, shapes.NewConversation, "append", 201),
    _get(f"{ONE}/messages", "messages", "What was said, by index", shapes.Messages, shapes.Paged),
    _post(f"{ONE}/messages", "append", "Say all of it", shapes.Places, shapes.NewMessages, "append", 201),
    _get(f"{ONE}/view", "view", "What the model sees, now or then", shapes.Viewed, shapes.ViewAsked),
    _get(f"{ONE}/edits", "edits", "What was done to the view, the oldest first", shapes.Edits, shapes.Paged),
    _get(f"{ONE}/diff", "diff", "What two views do not share", shapes.Difference, shapes.DiffAsked),
    _get(f"{ONE}/steps", "steps", "What each call of the model saw", shapes.Steps, shapes.StepsAsked),
    _get(f"{ONE}/explain", "explain", "Why a message is shown or not", Explanation, shapes.AtAsked),
    _get(f"{ONE}/savings", "savings", "What edits were to save, and did", shapes.Savings),
    _get(f"{ONE}/overflow", "overflow", "How the next request stands to the window", Overflow),
    _get(f"{ONE}/due", "due", "Which triggers would make the view smaller now", Decision),
    _get(f"{ONE}/memories", "memories", "What a memory store learned", shapes.Learned, shapes.MemoriesAsked),
    _get(f"{ONE}/export", "export", "The whole record, as lines of JSON", LINES),
    _get(f"{ONE}/events", "events", "What happens, live", EVENTS, shapes.EventsAsked),
    _post(f"{ONE}/expand", "expand", "The text behind a place", shapes.Expanded, shapes.Expand, "read"),
    _post(f"{ONE}/restore", "restore", "Show the original again", shapes.Done, shapes.AtBody),
    _post(f"{ONE}/undo", "undo", "Take back an edit, a pin or an undoing", shapes.Undoing, shapes.Undo),
    _post(f"{ONE}/pin", "pin", "Keep a message in every view", shapes.Done, shapes.AtBody),
    _post(f"{ONE}/unpin", "unpin", "No longer keep it", shapes.Done, shapes.AtBody),
    _post(f"{ONE}/correct", "correct", "Show another message in its place", shapes.Done, shapes.Correct),
    _post(f"{ONE}/fork", "fork", "Another with the same past", shapes.Row, shapes.Fork, status=201),
    _post(f"{ONE}/compact", "compact", "Make the view smaller now", CompactionResult, shapes.Compact),
    _get(ONE, "show", "A conversation, with what it takes and saves", shapes.Detail),
    Endpoint("PATCH", ONE, "edit", "rename", "Give it a title or a model", shapes.Row, body=shapes.Names),
    Endpoint("DELETE", ONE, "admin", "erase", "Erase it for good", shapes.Erased, shapes.EraseAsked),
    _get("/api/search", "search", "What was said about something", shapes.Hits, shapes.SearchAsked),
    _get("/api/events", "all_events", "What happens in all conversations, live", EVENTS),
    _get("/api/openapi.json", "openapi", "This description", dict[str, Any]),
)
"""Where two paths match, the first counts."""

_BODIES = {one.body: codec.decoder(one.body) for one in ENDPOINTS if one.body is not None}


def routes(service: Service) -> list[Route]:
    verbs, paths = Verbs(service), dict.fromkeys(endpoint.path for endpoint in ENDPOINTS)
    found = [Route(path, Methods(service, verbs, path)) for path in paths]
    return [*found, Route("/api/{rest:path}", Methods(service, verbs, None))]


def _unquoted(id: str) -> str:
    """An id as it is, from a path that is matched as it was sent: there may be a slash in it.

    Raises:
        HTTPException: it is no text.
    """
    try:
        return unquote(id, errors="strict")
    except UnicodeDecodeError as error:
        raise HTTPException(400, "an id in a path is UTF-8, percent-encoded") from error


class Methods:
    """All that can be done at one path."""

    def __init__(self, service: Service, verbs: Verbs, path: str | None) -> None:
        self._service, self._verbs = service, verbs
        self._known = {one.method: one for one in ENDPOINTS if one.path == path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if not self._known:
            raise HTTPException(404, "there is nothing here; /api/openapi.json says what there is")
        endpoint = self._known.get(request.method)
        if endpoint is None:
            allowed = ", ".join(self._known)
            raise HTTPException(
                405, f"{request.method} cannot be done here; allowed: {allowed}", {"allow": allowed}
            )
        answer = await self._answered(request, endpoint)
        await answer(scope, receive, send)

    async def _answered(self, request: Request, endpoint: Endpoint) -> ASGIApp:
        """
        Raises:
            HTTPException: it is not allowed, or not understood.
            RefoldError: it cannot be done.
        """
        caller: Caller = request.scope["state"]["caller"]
        require_scope(caller, endpoint.needs)
        query = _query(request, endpoint.query)
        owner = _owner(caller, query.owner)
        id = request.path_params.get("id")
        key = Key(owner or DEFAULT_OWNER, valid_id(_unquoted(id)) if id is not None else "")
        body = _body(await request.body(), endpoint.body) if endpoint.body is not None else None
        wish, service = Wish(key, owner, query, body), self._service
        match endpoint.verb:
            case "openapi":
                from refold.serve.openapi import described

                return Response(codec.dumps(described(ENDPOINTS)), media_type="application/json")
            case "events":
                return EventStream(service, key, _seen(request, getattr(query, "after", None)))
            case "all_events":
                return EventStream(service, owner, None)
            case "export":
                await service.work(self._verbs.demand, key)
                return StreamingResponse(self._verbs.lines(key), media_type=LINES)
        do: Callable[[Wish], Any] = getattr(self._verbs, endpoint.verb)
        text = await service.work(lambda: codec.dumps(do(wish)))
        return Response(text, endpoint.status, media_type="application/json")


def _owner(caller: Caller, asked: str | None) -> str | None:
    """Whose conversations are meant; None is everybody's."""
    if asked is None or asked == caller.owner:
        return caller.owner
    if caller.owner is not None and "admin" not in caller.scopes:
        raise HTTPException(403, "owner: this token is of another; only an admin may name one")
    return asked


def _query(request: Request, type: type[T]) -> T:
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise HTTPException(400, f"query: {twice!r} is given more than once")
    try:
        return msgspec.convert(dict(given), type, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(type.__struct_fields__)  # type: ignore[attr-defined]
        raise HTTPException(400, f"query: {error}; known: {known}") from None


def _body(body: bytes, type: type[Body]) -> Any:
    try:
        return _BODIES[type].decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(type.__struct_fields__)
        raise HTTPException(400, f"body: {error}; known: {known}") from None


def _seen(request: Request, after: int | None) -> int | None:
    """How many events a client has seen, by its own account; a browser says it when it comes again."""
    told = request.headers.get("last-event-id", "")
    if not told:
        return after
    if not (told.isascii() and told.isdigit() and len(told) < 16):
        raise HTTPException(400, "last-event-id: expected the id of an event, a whole number")
    return int(told)
