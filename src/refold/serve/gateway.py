"""The gateway: requests of agents to their provider are recorded, made to fit, and sent upstream.

A request is placed in a conversation, what is new in it is stored, and a view that fits goes upstream; the
answer is stored before its last byte is passed on. If refold's part fails, the request goes as it came.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from refold.core.errors import OverBudgetError, RefoldError, SettingError, StoreError
from refold.serve.http_errors import requested_id
from refold.serve.http_protocol import until_disconnect
from refold.serve.incoming import ClientDialect, read_request
from refold.serve.logs import METHODS
from refold.serve.recorder import PlacedRequest, Recorder, UpstreamRequest
from refold.serve.service import Service
from refold.serve.streaming import Forwarder
from refold.serve.tokens import credential_of
from refold.serve.upstream import UpstreamError, request_headers

MAX_LOOKUP_ROUNDS = 8
"""In which the model may use the gateway's own tools for one answer."""
TIMEOUT_S = 20.0
"""For refold's part of a request, including the wait for a summarizer."""
STORE_RETRY_S = 2.0
"""Requests bypass a store that failed for so long."""
_LOG = logging.getLogger("refold.serve")


class GatewayRoute(NamedTuple):
    path: str
    provider: str
    dialect: ClientDialect | None = None

    @property
    def description(self) -> str:
        if self.dialect is None:
            return f"Any other request to {self.provider}, passed on as it is"
        return f"A request in the dialect `{self.dialect}`: recorded, made to fit, sent upstream"


ROUTES = (
    GatewayRoute("/openai/v1/chat/completions", "openai", "openai-chat"),
    GatewayRoute("/openai/v1/responses", "openai", "openai-responses"),
    GatewayRoute("/anthropic/v1/messages", "anthropic", "anthropic"),
    GatewayRoute("/openai/v1/{rest:path}", "openai"),
    GatewayRoute("/anthropic/v1/{rest:path}", "anthropic"),
)
BASE_PATHS = {"openai": "/openai/v1", "anthropic": "/anthropic"}
"""Replaced by the base URL of the upstream."""


def routes(service: Service) -> list[Route]:
    gateway = Gateway(service)
    return [Route(one.path, _Endpoint(gateway, one), methods=list(METHODS)) for one in ROUTES]


@dataclass(frozen=True)
class _Endpoint:
    """A route as an ASGI application."""

    gateway: "Gateway"
    route: GatewayRoute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(self.gateway.answer(self.route, Request(scope), send), receive)


class _BypassError(Exception):
    """refold's part failed before the client received anything; the message is the value of the header."""


class Gateway:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.recorder = Recorder(service)
        self._store_down_until = 0.0

    async def answer(self, route: GatewayRoute, request: Request, send: Send) -> None:
        body: bytes | None = getattr(request.state, "body", None)
        upstream = partial(
            self.service.upstream.request,
            request.method,
            self._url(route, request),
            request_headers(request.headers.raw),
        )
        headers: dict[str, str] = {}
        if route.dialect is not None and body is not None and request.method == "POST":
            try:
                prepared = await self._prepare(route.dialect, request, body)
                hides_tools = prepared.placed.offers_tools
                forwarder = Forwarder(
                    upstream, send, prepared.headers, route.dialect, hides_tools=hides_tools
                )
                await self._converse(prepared, forwarder)
                return
            except _BypassError as error:
                headers = {"x-refold-bypass": str(error)}
        await Forwarder(upstream, send, headers).forward(body)

    def _url(self, route: GatewayRoute, request: Request) -> str:
        base = str(getattr(self.service.settings.upstreams, route.provider)).rstrip("/")
        raw: bytes = request.scope["raw_path"]
        path = raw.decode("latin-1").partition("?")[0].removeprefix(BASE_PATHS[route.provider])
        query = request.scope["query_string"].decode("latin-1")
        return f"{base}{path}?{query}" if query else base + path

    async def _prepare(self, dialect: ClientDialect, request: Request, body: bytes) -> UpstreamRequest:
        """Raises _BypassError if that failed, or if the store failed a moment ago."""
        if monotonic() < self._store_down_until:
            raise _BypassError("store")
        if self._store_down_until:  # this request tries the store; others bypass it meanwhile
            self._store_down_until = monotonic() + TIMEOUT_S
        try:
            async with asyncio.timeout(TIMEOUT_S):
                caller = request.state.caller
                if caller.owner is None:
                    owner = await self.service.owner_of_key(credential_of(request.headers))
                    caller = caller._replace(owner=owner)
                    request.state.caller = caller  # for the access log
                conversation = requested_id(request.headers)
                agent = request.headers.get("x-refold-agent")

                def prepare() -> UpstreamRequest:
                    incoming = read_request(dialect, body, caller.owner, conversation, agent)
                    return self.recorder.prepare(incoming)

                work = asyncio.ensure_future(self.service.work(prepare))
                try:
                    prepared = await asyncio.shield(work)
                except BaseException:  # the client has gone, or does not wait any longer
                    work.add_done_callback(self._abandon)
                    raise
            self._store_down_until = 0.0
            return prepared
        except BaseException as error:
            self._store_down_until = min(self._store_down_until, monotonic())  # the next one may try
            if not isinstance(error, Exception):
                raise
            if isinstance(error, TimeoutError) and await self.service.health.problem() is not None:
                error = StoreError("the store does not answer")
            raise _BypassError(self._bypass_reason(error)) from error

    def _abandon(self, work: "asyncio.Future[UpstreamRequest]") -> None:
        if not work.cancelled() and work.exception() is None:
            self.recorder.end(work.result().placed)

    async def _converse(self, request: UpstreamRequest, forwarder: Forwarder) -> None:
        """Sends requests until there is an answer for the client, and records each reply.

        Raises:
            _BypassError: what the model looked up could not be sent to it.
        """
        placed = request.placed
        body: bytes | None = request.body
        rounds = 0
        try:
            while body is not None:
                received = await forwarder.receive(body)
                if received is None:
                    break
                rounds += 1
                placed, body = await self._record_reply(placed, *received, rounds)
            await forwarder.finish()
        except UpstreamError as error:
            await forwarder.fail(error)
        finally:
            self.recorder.end(request.placed)

    async def _record_reply(
        self, placed: PlacedRequest, reply: dict[str, Any], visible: dict[str, Any], rounds: int
    ) -> tuple[PlacedRequest, bytes | None]:
        """Returns the body of the next request, if the model only looked something up; else None."""

        def record() -> tuple[PlacedRequest, bytes | None]:
            recorded = self.recorder.record_reply(placed, reply, visible)
            if rounds > MAX_LOOKUP_ROUNDS or not placed.only_looks_up(reply):
                return recorded, None
            return recorded, self.recorder.fit(recorded, is_last=rounds == MAX_LOOKUP_ROUNDS).body

        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self.service.work(record)
        except Exception as error:  # the client gets its answer all the same
            reason = self._bypass_reason(error)
            facts = {"owner": placed.key.owner, "conversation": placed.key.conversation}
            _LOG.error(
                "a reply was passed on without being recorded: %s",
                type(error).__name__,
                extra={"facts": facts},
            )
            only_looks_up = False
            with suppress(Exception):  # a reply that is not understood goes to the client
                only_looks_up = placed.only_looks_up(reply)
            if not only_looks_up:
                return placed, None
            if placed.request.fields.get("stream") is True:
                raise UpstreamError(
                    "the result of refold_expand or refold_search could not be sent to the model"
                ) from error
            raise _BypassError(reason) from error

    def _bypass_reason(self, error: Exception) -> str:
        """Why refold's part failed: the value of the header `x-refold-bypass`."""
        match error:
            case OverBudgetError():
                return "over-budget"
            case StoreError():
                self._store_down_until = monotonic() + STORE_RETRY_S
                return "store"
            case TimeoutError():  # usually the summarizer of one conversation: others are not affected
                return "late"
            case SettingError():
                return "setting"
            case RefoldError():
                return "not-understood"
        _LOG.error("a request was passed on unchanged because of an internal error", exc_info=error)
        return "error"
