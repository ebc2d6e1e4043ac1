"""Endpoints of the HTTP API, declared by a function's signature.

`@endpoint(method, path, scope)` makes an endpoint of a function that runs in a thread. Of its parameters,
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
    request: Request
    key: Key
    """Of the conversation, if the path names one."""
    owner: str | None
    """Whose conversations; None means all owners'."""

    @contextmanager
    def session(self, key: Key) -> Iterator[Session]:
        """Raises NotFoundError if there is no such conversation."""
        with self.service.conversations.inspecting(key) as inspector:
            model = inspector.state.model
        with self.service.session(key, model if model and model.isprintable() else None) as session:
            yield session
        self.service.events.publish(key)

    def row(self, key: Key) -> ConversationRow:
        with self.service.conversations.inspecting(key) as inspector:
            return self.service.conversations.row(inspector)


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str
    scope: Right
    handler: Callable[..., Any]
    query: Any
    """The type of its query."""
    body: Any
    """The type of its body; None if it has none."""
    answer: Any
    status: int
    stream: str
    field: str

    @property
    def operation(self) -> str:
        return self.handler.__name__

    @property
    def summary(self) -> str:
        return self.handler.__doc__ or ""

    async def respond(self, service: Service, request: Request) -> ASGIApp:
        """
        Raises:
            HTTPException: the request is invalid, or its token does not allow it.
            RefoldError: the operation failed.
        """
        caller: Caller = request.state.caller
        require_scope(caller, self.scope)
        try:
            given = dict(request.query_params)
            if len(given) < len(request.query_params.multi_items()):
                raise HTTPException(400, "query: a parameter is given more than once")
            query = msgspec.convert(given, self.query, strict=False)
        except msgspec.ValidationError as error:
            raise HTTPException(400, f"query: {error}; known: {_names(self.query)}") from None
        sent = query
        if self.body is not None:
            try:
                sent = codec.decoder(self.body).decode(request.state.body or b"{}")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise HTTPException(400, f"body: {error}; known: {_names(self.body)}") from None
        owner = _owner(caller, query.owner)
        call = ApiCall(service, request, Key(owner or DEFAULT_OWNER, _id(request)), owner)
        return await service.work(self._run, call, sent)

    def _run(self, call: ApiCall, sent: Any) -> ASGIApp:
        parameters = inspect.signature(self.handler).parameters
        given = {name: getattr(sent, name) for name in parameters if name not in PROVIDED}
        with ExitStack() as stack:
            if "call" in parameters:
                given["call"] = call
            if "session" in parameters:
                given["session"] = stack.enter_context(call.session(call.key))
            if "inspector" in parameters:
                given["inspector"] = stack.enter_context(call.service.conversations.inspecting(call.key))
            answer = self.handler(**given)
        if self.stream:
            return answer  # type: ignore[no-any-return]
        if self.field:
            answer = {self.field: answer}
        return Response(codec.dumps(answer), self.status, media_type="application/json")


ENDPOINTS: list[Endpoint] = []


def endpoint(
    method: str, path: str, scope: Right = "read", *, status: int = 200, stream: str = "", field: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """With `stream`, the function returns an ASGI application that sends this media type. With `field`, the
    response is an object in which this field has what the function returns.
    """

    def declare(handler: Callable[..., Any]) -> Callable[..., Any]:
        types = get_type_hints(handler, include_extras=True)
        fields: list[Any] = []
        for name, parameter in inspect.signature(handler).parameters.items():
            if name not in PROVIDED:
                default = () if parameter.default is parameter.empty else (parameter.default,)
                fields.append((name, types[name], *default))
        name = handler.__name__.title().replace("_", "")
        options: dict[str, Any] = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        body = None
        query: Any = QueryParameters
        if method in ("POST", "PATCH"):
            body = msgspec.defstruct(f"{name}Body", fields, **options)
        elif fields:
            query = msgspec.defstruct(f"{name}Query", fields, bases=(QueryParameters,), **options)
        answer = types["return"]
        if field:
            answer = msgspec.defstruct(f"{name}Answer", [(field, answer)])
        ENDPOINTS.append(Endpoint(method, path, scope, handler, query, body, answer, status, stream, field))
        return handler

    return declare


def _names(sent: Any) -> str:
    return ", ".join(sent.__struct_fields__)


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
