"""Endpoints of the HTTP API, declared by a function's signature.

`@Endpoint(method, path, scope)` makes an endpoint of a function that runs in a thread. Of its parameters,
`call`, `session` and `inspector` are provided, the latter two for the conversation that the path names. The
others are what a client sends: in the query of a GET or DELETE, in the JSON body of a POST or PATCH. Their
types and defaults validate it. The OpenAPI description follows from the same signature, the type that is
returned, and the docstring.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, get_type_hints
from urllib.parse import unquote

import msgspec
from msgspec import Meta
from msgspec.structs import asdict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from refold.config.serving import Right
from refold.core import codec
from refold.serve.http_errors import valid_id
from refold.serve.service import Service
from refold.serve.tokens import Caller, require_scope
from refold.session.results import ConversationRow
from refold.session.session import Session
from refold.stores.store import Key

DEFAULT_OWNER = "default"
PROVIDED = ("call", "session", "inspector")
"""Parameters of handlers that clients do not send."""

Owner: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=200, description="Whose conversations; only an admin may name another."),
]


class QueryParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be in the query of every request."""

    owner: Owner | None = None


@dataclass(frozen=True)
class ApiCall:
    """A request whose sender, path, query and body are valid."""

    service: Service
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
        with self.service.conversations.inspecting(key) as inspector:
            model = inspector.state.model
        with self.service.session(key, model if model and model.isprintable() else None) as session:
            yield session
        self.service.events.publish(key)

    def row(self, key: Key) -> ConversationRow:
        with self.service.conversations.inspecting(key) as inspector:
            return self.service.conversations.row(inspector)


class Endpoint:
    """With `stream`, the function returns an ASGI application that sends this media type. With `field`, the
    response is an object in which this field has what the function returns.
    """

    def __init__(
        self,
        method: str,
        path: str,
        scope: Right = "read",
        *,
        status: int = 200,
        stream: str = "",
        field: str = "",
    ) -> None:
        self.method = method
        self.path = path
        self.scope: Right = scope
        self.status = status
        self.stream = stream
        self.field = field

    def __call__(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        types = get_type_hints(handler, include_extras=True)
        self.handler = handler
        self.operation = handler.__name__
        self.summary = handler.__doc__ or ""
        self.provided = [name for name in PROVIDED if name in types]
        self.query: Any = QueryParameters
        self.body: Any = None
        self.answer: Any = types["return"]
        fields: list[Any] = []
        for name, parameter in inspect.signature(handler).parameters.items():
            if name not in PROVIDED:
                default = parameter.default
                is_required = default is parameter.empty
                fields.append((name, types[name], msgspec.NODEFAULT if is_required else default))
        self.sent = [name for name, _, _ in fields]
        name = self.operation.title().replace("_", "")
        options: dict[str, Any] = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        if self.field:
            self.answer = msgspec.defstruct(f"{name}Answer", [(self.field, self.answer)])
        if self.method in ("POST", "PATCH"):
            self.body = msgspec.defstruct(f"{name}Body", fields, **options)
        elif fields:
            self.query = msgspec.defstruct(f"{name}Query", fields, bases=(QueryParameters,), **options)
        self._body_decoder = codec.decoder(self.body)
        ENDPOINTS.append(self)
        return handler

    async def respond(self, service: Service, request: Request) -> ASGIApp:
        """
        Raises:
            HTTPException: the request is invalid, or its token does not allow it.
            RefoldError: the operation failed.
        """
        caller: Caller = request.scope["state"]["caller"]
        require_scope(caller, self.scope)
        query = self._query(request)
        sent = query
        if self.body is not None:
            sent = self._decode(request.state.body)
        owner = _owner(caller, query.owner)
        last_event_id = request.headers.get("last-event-id", "")
        call = ApiCall(service, Key(owner or DEFAULT_OWNER, _id(request)), owner, last_event_id)
        return await service.work(self._run, call, sent)

    def _run(self, call: ApiCall, sent: Any) -> ASGIApp:
        with ExitStack() as stack:
            given = {name: value for name, value in asdict(sent).items() if name in self.sent}
            if "call" in self.provided:
                given["call"] = call
            if "session" in self.provided:
                given["session"] = stack.enter_context(call.session(call.key))
            if "inspector" in self.provided:
                conversations = call.service.conversations
                given["inspector"] = stack.enter_context(conversations.inspecting(call.key))
            answer = self.handler(**given)
        if self.stream:
            return answer  # type: ignore[no-any-return]
        if self.field:
            answer = {self.field: answer}
        return Response(codec.dumps(answer), self.status, media_type="application/json")

    def _query(self, request: Request) -> QueryParameters:
        given = request.query_params
        for name in given:
            if len(given.getlist(name)) > 1:
                raise HTTPException(400, f"query: {name!r} is given more than once")
        try:
            query: QueryParameters = msgspec.convert(dict(given), self.query, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(self.query.__struct_fields__)
            raise HTTPException(400, f"query: {error}; known: {known}") from None
        return query

    def _decode(self, body: bytes) -> Any:
        try:
            return self._body_decoder.decode(body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(400, f"body: {error}; known: {', '.join(self.sent)}") from None


ENDPOINTS: list[Endpoint] = []


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
