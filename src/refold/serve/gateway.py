"""The gateway: what agents ask of a provider goes through here, and fits.

A request is given its place in a conversation, what is new is stored, and a view that fits goes upstream; the
answer is stored before its last byte is handed on. Where our part fails, the request goes as it came.
"""

import asyncio
import logging
import re
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from refold.core.errors import OverBudgetError, RefoldError, SettingError, StoreError
from refold.serve.disconnect import end, gone
from refold.serve.health import Health, ask
from refold.serve.http_errors import Refused, asked_id
from refold.serve.incoming import Dialect, Incoming, read_request
from refold.serve.recorder import Ledger, Prepared, Turn, calls_of, own_calls
from refold.serve.service import Service
from refold.serve.streaming import Relay, Sent, Step
from refold.serve.upstream import Upstream, UpstreamError, passed_on

ROUNDS = 8
"""In which the model may use our own tools for one answer."""
PATIENCE_S = 20.0
"""For our own part, a summarizer that is waited for included."""
PAUSE_S = 2.0
"""Without our part, once the store could not be used."""
SMALL_BYTES = 65_536
"""A body that is read at once; what is larger is read in a thread."""
_LOG = logging.getLogger("refold.serve")


class Door(NamedTuple):
    """A path, and what is behind it."""

    path: str
    provider: str
    dialect: Dialect | None = None

    @property
    def says(self) -> str:
        """What becomes of a request, in a sentence."""
        if self.dialect is None:
            return f"Anything else of {self.provider}'s, handed on as it is"
        return f"A request in the dialect `{self.dialect}`: kept, made to fit, sent upstream"


DOORS = (
    Door("/openai/v1/chat/completions", "openai", "openai-chat"),
    Door("/openai/v1/responses", "openai", "openai-responses"),
    Door("/anthropic/v1/messages", "anthropic", "anthropic"),
    Door("/openai/v1/{rest:path}", "openai"),
    Door("/anthropic/v1/{rest:path}", "anthropic"),
)
"""What has no dialect is handed on as it is: models, count_tokens, embeddings and whatever else there is."""
BASES = {"openai": "/openai/v1", "anthropic": "/anthropic"}
"""What stands here for the upstream's base URL."""


def routes(service: Service) -> list[BaseRoute]:
    gateway = Gateway(service)
    return [Route(door.path, _Endpoint(gateway, door)) for door in DOORS]


class _Endpoint:
    """An ASGI application. A client that goes away ends all that is done for it, at once."""

    def __init__(self, gateway: "Gateway", door: Door) -> None:
        self._gateway, self._door = gateway, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body() if request.method in ("POST", "PUT", "PATCH") else None
        work = asyncio.create_task(self._gateway.answer(self._door, request, body, send))
        left = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(work, left)
        if not work.cancelled():
            work.result()


class _Down(StoreError):
    """The store could not be used a moment ago."""


class _UnansweredError(Exception):
    """The model only looked something up, and our part failed; the client has seen nothing yet."""


class Gateway:
    def __init__(self, service: Service) -> None:
        self.service, self.ledger, self.upstream = service, Ledger(service), Upstream()
        service.on_close(self.upstream.close)
        self._health = Health(lambda: ask(service.store))
        self._down_until = 0.0
        """When the store is tried again."""

    async def answer(self, door: Door, request: Request, body: bytes | None, send: Send) -> None:
        sent = Sent(request.method, self._url(door, request), passed_on(request.headers.raw))
        told: dict[str, str] = {}
        if door.dialect is not None and request.method == "POST":
            try:
                prepared = await self._prepared(door.dialect, request, body or b"")
            except Refused:
                raise
            except Exception as error:
                told = {"x-refold-bypass": self._reason(error)}
            else:
                relay = Relay(self.upstream, send, sent, _told(prepared))
                try:
                    await self._converse(door.dialect, prepared, relay)
                    return
                except _UnansweredError as error:
                    told = {"x-refold-bypass": str(error)}
        await Relay(self.upstream, send, sent, told).pass_on(body)

    def _url(self, door: Door, request: Request) -> str:
        base = str(getattr(self.service.settings.upstreams, door.provider)).rstrip("/")
        raw: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
        path, query = raw.decode("latin-1").partition("?")[0], request.scope["query_string"].decode("latin-1")
        if any(unquote(part) in (".", "..") for part in re.split(r"/|%2[Ff]|\\", path)):
            raise Refused(400, "a path with . or .. in it leads elsewhere")
        return base + path.removeprefix(BASES[door.provider]) + (f"?{query}" if query else "")

    async def _prepared(self, dialect: Dialect, request: Request, body: bytes) -> Prepared:
        """
        Raises:
            RefoldError: our part cannot be done.
        """
        if len(body) > SMALL_BYTES:
            incoming = await asyncio.to_thread(read_request, dialect, body)  # none that waits for the store
        else:
            incoming = read_request(dialect, body)
        if monotonic() < self._down_until:
            raise _Down
        if self._down_until:  # one tries it, and the others do not wait for what comes of it
            self._down_until = monotonic() + PATIENCE_S
        try:
            async with asyncio.timeout(PATIENCE_S):
                prepared = await self._placed(incoming, request, body)
        except BaseException as error:
            self._down_until = min(self._down_until, monotonic())  # unless it is the store: see `_reason`
            if isinstance(error, TimeoutError) and await self._health.problem() is not None:
                raise StoreError("the store does not answer") from error
            raise
        self._down_until = 0.0
        return prepared

    async def _placed(self, incoming: Incoming, request: Request, body: bytes) -> Prepared:
        agent, wanted = request.headers.get("x-refold-agent"), asked_id(request.headers)
        how = (await self._owner(request), incoming, wanted, agent)
        if incoming.elsewhere:
            work = asyncio.ensure_future(self.service.work(self.ledger.noted, *how, body))
        else:
            work = asyncio.ensure_future(self.service.work(self.ledger.prepare, *how))
        try:
            return await asyncio.shield(work)
        except BaseException:  # whoever asked is gone, or does not wait for it any longer
            work.add_done_callback(self._drop)
            raise

    def _drop(self, work: "asyncio.Future[Prepared]") -> None:
        if not work.cancelled() and work.exception() is None:
            self.ledger.end(work.result().turn)

    async def _owner(self, request: Request) -> str:
        caller = request.scope["state"]["caller"]
        if caller.owner is not None:
            return str(caller.owner)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
        owner = await self.service.owner_of_key(key.strip())
        request.scope["state"]["caller"] = caller._replace(owner=owner)  # for the access log
        return owner

    async def _converse(self, dialect: Dialect, prepared: Prepared, relay: Relay) -> None:
        turn, rounds = prepared.turn, 0

        async def after(reply: dict[str, Any], shown: dict[str, Any]) -> Step:
            nonlocal turn, rounds
            rounds += 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    turn = await self.service.work(self.ledger.answered, turn, reply, shown)
                    if turn.is_complete or rounds > ROUNDS:
                        return Step(None)
                    fitted = await self.service.work(self.ledger.fitted, turn, last=rounds >= ROUNDS)
            except Exception as error:  # the client gets its answer all the same
                reason = self._reason(error)
                facts = {"owner": turn.key.owner, "conversation": turn.key.conversation}
                _LOG.error("an answer was not kept: %s", type(error).__name__, extra={"facts": facts})
                if not _only_looks_up(turn, reply):
                    return Step(None)
                if turn.incoming.is_stream:
                    raise UpstreamError("what the model looked up could not be handed to it") from error
                raise _UnansweredError(reason) from error
            return Step(fitted.body)

        try:
            await relay.converse(dialect, prepared.body, after, hides=turn.injected)
        finally:
            self.ledger.end(prepared.turn)

    def _reason(self, error: Exception) -> str:
        """Why our part was not done, in a word: it is told in a header."""
        match error:
            case OverBudgetError():
                return "over-budget"
            case _Down():
                return "store"
            case StoreError():
                self._down_until = monotonic() + PAUSE_S
                return "store"
            case TimeoutError():  # one conversation's summarizer, as a rule: the others go on
                return "late"
            case SettingError():
                return "setting"
            case RefoldError():
                return "not-understood"
        _LOG.error("the gateway failed", exc_info=error)
        return "error"


def _only_looks_up(turn: Turn, reply: dict[str, Any]) -> bool:
    """There is no answer for the client in it: the model waits for what our tools give."""
    try:
        own = own_calls(turn.incoming, reply) if turn.injected else []
        return bool(own) and len(own) == len(calls_of(turn.incoming, reply))
    except Exception:  # what nobody understands is the client's
        return False


def _told(prepared: Prepared) -> dict[str, str]:
    conversation = {"x-refold-conversation": prepared.turn.key.conversation}
    if prepared.turn.is_elsewhere:
        return conversation
    return conversation | {
        "x-refold-tokens-before": str(prepared.before),
        "x-refold-tokens-sent": str(prepared.sent),
        "x-refold-edits": str(prepared.edits),
    }
