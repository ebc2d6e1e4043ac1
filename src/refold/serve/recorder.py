"""Records the gateway's requests and replies in conversations, and fits what goes upstream. For threads."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from refold.core import codec
from refold.core.draft import PART, Draft
from refold.core.errors import ConflictError, SettingError
from refold.core.event import Said
from refold.core.expiry import OWN_TOOLS
from refold.core.message import Message, ToolCall, ToolResult
from refold.dialects import replies
from refold.dialects.registry import DIALECTS
from refold.serve.incoming import PREVIOUS_RESPONSE, IncomingRequest, read_messages, with_cache_control
from refold.serve.service import Service
from refold.session.history_sync import (
    content_digest,
    longest_known_prefix,
    overlap,
    prefix_ids,
    recorded_digests,
)
from refold.session.session import Session, forked
from refold.stores.store import LOCATED, Key, LocatesIds

K = TypeVar("K")
V = TypeVar("V")
MAX_CONFLICTS = 10
CACHED = 20_000
"""Conversations, provider responses and forks that are remembered."""
READ_BATCH_EVENTS = 16
FIRST_EVENTS = 4
"""Before the first message may be system text and names."""
TOOLS_TAG = "refold:tools"
"""Tags the first message of a conversation in which expand and search are offered."""


class FoundConversation(NamedTuple):
    """The conversation that a request belongs to."""

    key: Key
    known: int = 0
    """How many of the request's messages it has."""
    at: int | None = None
    """The place of the newest of these, which no other request or reply may follow; None if any may."""
    message_count: int | None = None
    """It must have so many messages; None if any number may."""


class PlacedRequest(NamedTuple):
    """A request that was recorded in a conversation."""

    request: IncomingRequest
    key: Key
    at: int
    """The place of the newest event then: a fork that answers the request begins after it."""
    message_count: int | None
    """Of the conversation; None if others may append before the reply does."""
    offers_tools: bool = False
    """Expand and search were added to it."""
    replies: tuple[Draft, ...] = ()
    """What was recorded after it."""

    def calls_in(self, reply: dict[str, Any]) -> list[ToolCall]:
        """Calls of a reply; none if the gateway's tools were not offered."""
        calls: list[ToolCall] = []
        taken = replies.take(reply) if self.offers_tools else None
        for message in taken.messages if taken else ():
            calls += DIALECTS[self.request.dialect].parse(message).calls
        return calls

    def only_looks_up(self, reply: dict[str, Any]) -> bool:
        """True if the model called nothing but the gateway's tools: there is no answer for the client yet."""
        calls = self.calls_in(reply)
        return bool(calls) and all(call.tool in OWN_TOOLS for call in calls)


class UpstreamRequest(NamedTuple):
    placed: PlacedRequest
    body: bytes
    headers: dict[str, str]
    """Those of the response to the client."""


class ProviderResponse(NamedTuple):
    """A response of OpenAI's that requests may refer to."""

    id: str
    """Of its last round; the client knows the id of the first one."""
    prefix_id: str
    outputs: tuple[dict[str, Any], ...] = ()
    """Results of the gateway's tools, which the model called along with the client's."""


class Recorder:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._pending: Counter[Key] = Counter()
        """Requests that wait for their reply."""
        self._responses: OrderedDict[tuple[str, str], ProviderResponse] = OrderedDict()
        """By owner and id."""
        self._forks: OrderedDict[str, Key] = OrderedDict()
        """The newest fork after each prefix."""
        self._with_tools: OrderedDict[Key, bool] = OrderedDict()
        """Whether expand and search are offered in a conversation."""
        self._lock = Lock()
        self._placing = [Lock() for _ in range(64)]
        """Chosen by prefix id: the same request, sent twice, is placed one after the other."""

    # Requests

    def prepare(self, request: IncomingRequest) -> UpstreamRequest:
        """Finds the conversation, records what is new, and fits what goes upstream.

        Raises:
            RefoldError: that failed; the request should go upstream as it came.
        """
        for _ in range(MAX_CONFLICTS):
            with suppress(ConflictError):  # the conversation has changed since it was found
                if request.provider_history is not None:
                    return self._prepare_at_provider(request, *request.provider_history)
                placed = self._place(request, request.prefix_ids())
                try:
                    return self.fit(placed)
                except BaseException:
                    self.end(placed)
                    raise
        raise ConflictError(f"Other writers won the race {MAX_CONFLICTS} times in a row; retry")

    def _prepare_at_provider(self, request: IncomingRequest, field: str, id: str) -> UpstreamRequest:
        """A request whose history is at the provider is recorded, and goes upstream as it came."""
        known = self._responses.get((request.owner, id))
        prefix_id = known.prefix_id if known else _provider_prefix_id(request.owner, field, id)
        if field == PREVIOUS_RESPONSE:
            placed = self._place(request, [prefix_id, *request.prefix_ids(after=prefix_id)])
        else:  # the provider appends to it: requests come one after the other
            located = self._locate(request, [prefix_id]).get(prefix_id)
            key = located[0] if located else Key(request.owner, request.conversation or _new_id())
            ids = [None if located else prefix_id, *[None] * (len(request.messages) - 1)]
            placed = self._record(request, ids, FoundConversation(key))._replace(message_count=None)
        body = request.body
        if known is not None and (known.id != id or known.outputs):
            fields = codec.loads(body)
            items = fields.get("input") or []
            if isinstance(items, str):
                items = [{"role": "user", "content": items}]
            body = codec.dumps(fields | {field: known.id, "input": [*known.outputs, *items]})
        return UpstreamRequest(placed, body, {"x-refold-conversation": placed.key.conversation})

    def _place(self, request: IncomingRequest, ids: list[str]) -> PlacedRequest:
        """Records it. `ids` are the prefix ids of its messages, after that of a response at the provider.

        Where the conversation goes on differently after what is known of the history, or is about to, the
        request is a retry or has another past: it goes to a fork.
        """
        with self._placing[hash(ids[-1]) % len(self._placing)]:
            prefix = longest_known_prefix(ids, lambda some: self._locate(request, some))
            if prefix is None:
                return self._record(request, ids, self._find_by_content(request, ids))
            newest_id = ids[prefix.length - 1]
            for key in (prefix.key, self._forks.get(newest_id)):
                if key is not None and (prefix.length < len(ids) or not self._pending[key]):
                    with suppress(ConflictError):
                        return self._record(request, ids, FoundConversation(key, prefix.length, prefix.at))
            key = self._fork(prefix.key, prefix.at, request)
            self._cache(self._forks, newest_id, key)
            return self._record(request, ids, FoundConversation(key, prefix.length, prefix.at))

    def _find_by_content(self, request: IncomingRequest, ids: list[str]) -> FoundConversation:
        """The conversation that the client names, if it does: others may have begun it, or the client may
        send only the end of its history. What does not begin with the end of the record is appended to it.
        """
        key = Key(request.owner, request.conversation or _new_id())
        if len(ids) > len(request.messages):
            return FoundConversation(key)
        if request.conversation is None:
            return FoundConversation(key, message_count=0)
        digests = [message.digest for message in request.messages]
        with self._session(key, request) as session, session.locked() as inspector:
            count = inspector.state.index
            # More events than messages are read: some messages are in pieces.
            end = inspector.place_of(max(0, count - READ_BATCH_EVENTS - 4 * len(digests)))
            recorded = recorded_digests(inspector.events(end))
        return FoundConversation(key, overlap(recorded, digests), message_count=count)

    def _record(
        self, request: IncomingRequest, ids: Sequence[str | None], found: FoundConversation
    ) -> PlacedRequest:
        """Appends what is new in a request.

        Raises:
            ConflictError: the conversation has changed since it was found.
        """
        skipped = len(ids) - len(request.messages)
        known = max(skipped, found.known)
        with self._session(found.key, request) as session, session.locked() as inspector:
            count = inspector.state.index
            is_newest = found.at is None or _is_newest(session, found.at)
            if not is_newest or found.message_count not in (None, count):
                raise ConflictError(f"Another writer appended to {found.key.conversation!r} meanwhile; retry")
            offers_tools = self._offers_tools(session, request)
            session.shows_handles = offers_tools
            intake = session.intake(request.dialect, reads_own_fields=False)
            values = _system_values(session, request)
            tags = (TOOLS_TAG,) if offers_tools and not count else ()
            drafts = [draft for value in values for draft in intake.take([value], tags=tags).drafts]
            for message, id in zip(request.messages[known - skipped :], ids[known:], strict=True):
                drafts += intake.take(message.values(), id=id, tags=tags).drafts
            session.say(drafts, after=count)
            if not count:
                self._cache(self._with_tools, found.key, offers_tools)
            elif request.leading:
                _correct_leading(session, request)
            with self._lock:
                self._pending[found.key] += 1
            state = inspector.state
            return PlacedRequest(request, found.key, state.next - 1, state.index, offers_tools)

    def _session(self, key: Key, request: IncomingRequest) -> AbstractContextManager[Session]:
        return self.service.session(key, request.model, request.agent)

    def _locate(self, request: IncomingRequest, ids: Sequence[str]) -> Mapping[str, tuple[Key, int]]:
        store = self.service.store
        if isinstance(store, LocatesIds):
            return store.locate(request.owner, ids)
        if request.conversation is None:
            raise SettingError(
                "x-refold-conversation",
                "is missing: this store cannot find a conversation by its messages; name it in this header",
            )
        key = Key(request.owner, request.conversation)
        return {id: (key, at) for id, at in store.find(key, ids).items()}

    def _cache(self, cache: OrderedDict[K, V], key: K, value: V) -> None:
        with self._lock:
            cache[key] = value
            cache.move_to_end(key)
            if len(cache) > CACHED:
                cache.popitem(last=False)

    def _fork(self, key: Key, at: int, request: IncomingRequest) -> Key:
        with self._session(key, request) as session:
            return forked(session, _new_id(), at)

    def _offers_tools(self, session: Session, request: IncomingRequest) -> bool:
        """Whether expand and search are added: decided with the first message, for the whole conversation."""
        has_one_answer = request.fields.get("n") in (None, 1)  # of several, the client takes one
        if request.provider_history or request.has_refold_tools or not has_one_answer:
            return False
        if not session.inspect.state.index:
            setting = self.service.settings.inject_tools
            return bool(request.tools) if setting == "auto" else setting in ("on", True)
        offers_tools = self._with_tools.get(session.key)
        if offers_tools is None:
            offers_tools = any(TOOLS_TAG in said.tags for said in _first_messages(session, 1))
            self._cache(self._with_tools, session.key, offers_tools)
        return offers_tools

    def fit(self, placed: PlacedRequest, *, is_last: bool = False) -> UpstreamRequest:
        """The next request to send upstream; the last one of an answer does not offer the gateway's tools."""
        request = placed.request
        with self._session(placed.key, request) as session:
            fields = dict(request.fields)
            if placed.offers_tools and not is_last:
                fields["tools"] = [*request.tools, *session.tools(request.dialect)]
            fitted = session.fit(dialect=request.dialect, request=fields)
            body = fitted.request
            name = DIALECTS[request.dialect].system_field
            if name is not None and not body.get(name):  # as it came, if it came at all
                body.pop(name, None)
                if request.system is not None:
                    body[name] = request.system
            if request.dialect == "anthropic":
                body = with_cache_control(body, fitted.settled, request.raws)
            tokens_sent = fitted.report.tokens.final
            edits = {item.edit for item in session.inspect.items if item.edit is not None}
            headers = {
                "x-refold-conversation": placed.key.conversation,
                "x-refold-tokens-before": str(tokens_sent + session.hidden_tokens),
                "x-refold-tokens-sent": str(tokens_sent),
                "x-refold-edits": str(len(edits)),
            }
            return UpstreamRequest(placed, codec.dumps(body), headers)

    # Replies

    def end(self, placed: PlacedRequest) -> None:
        """No more replies to a request come. Until then, the same request counts as another one."""
        with self._lock:
            self._pending[placed.key] -= 1
            if not self._pending[placed.key]:
                del self._pending[placed.key]

    def record_reply(
        self, placed: PlacedRequest, reply: dict[str, Any], visible: dict[str, Any]
    ) -> PlacedRequest:
        """Records the model's reply, and the results of its calls of the gateway's tools.

        `visible` is what the client sees of it.
        """
        with self._session(placed.key, placed.request) as session:
            results: list[Message] = []
            for call in placed.calls_in(reply):
                if call.tool in OWN_TOOLS:
                    text = session.call(call.tool, call.input)
                    results.append(Message("tool", (ToolResult(call.call_id, text, call.tool),)))
            prefix_id = None
            if not placed.only_looks_up(reply):
                prefix_id = self._reply_prefix_id(placed.request, reply, visible, results)
            intake = session.intake()
            drafts = intake.take([reply], lambda n: "reply", id=prefix_id).drafts
            drafts += intake.take(results).drafts
            placed = placed._replace(replies=(*placed.replies, *drafts))
            with suppress(ConflictError):
                return _append(session, placed, drafts)
        # others appended meanwhile: what follows the request goes to a fork of its own
        key = self._fork(placed.key, placed.at, placed.request)
        with self._session(key, placed.request) as session:
            placed = placed._replace(key=key, message_count=session.get_count())
            return _append(session, placed, placed.replies)

    def _reply_prefix_id(
        self,
        request: IncomingRequest,
        reply: dict[str, Any],
        visible: dict[str, Any],
        results: Sequence[Message],
    ) -> str | None:
        """Identifies a reply when the client sends it back, or refers to it by its id."""
        dialect = DIALECTS[request.dialect]
        id = visible.get("id") if dialect.history_fields else None
        visible_id = id if isinstance(id, str) else None
        prefix_id: str | None = None
        taken = replies.take(visible)
        if request.provider_history is not None:
            if visible_id is not None:
                prefix_id = _provider_prefix_id(request.owner, PREVIOUS_RESPONSE, visible_id)
        elif taken is not None and taken.messages:
            answers = read_messages(request.dialect, list(map(codec.dumps, taken.messages)))
            prefix_id = request.prefix_ids(*answers)[-1]
        if visible_id is not None and prefix_id is not None:
            outputs = tuple(item for result in results for item in dialect.render(result)[0])
            response = ProviderResponse(reply["id"], prefix_id, outputs)
            self._cache(self._responses, (request.owner, visible_id), response)
        return prefix_id


def _is_newest(session: Session, at: int) -> bool:
    """True if no other request or reply comes after a place; for a session that is locked."""
    stop = session.inspect.state.next
    for start in range(at + 1, stop, READ_BATCH_EVENTS):
        for link in session.store.read(session.key, start, min(stop, start + READ_BATCH_EVENTS)):
            id = link.entry.id or ""
            if id.startswith(LOCATED) and PART not in id:  # not a further piece of the same message
                return False
    return at < stop  # else it was erased


def _system_values(session: Session, request: IncomingRequest) -> list[Any]:
    """System text to record: all of it in a new conversation, else separate text that changed."""
    inspector = session.inspect
    values: list[Any] = []
    name = DIALECTS[request.dialect].system_field
    if name is not None:
        lines = inspector.state.apart
        last = inspector.raw(lines[-1].at) if lines else None
        recorded = last.get(name) if isinstance(last, dict) else None
        if (request.system or None) != (recorded or None):
            values.append({name: request.system or ""})
    if not inspector.state.index:
        for message in request.leading:
            values += message.values()
    return values


def _first_messages(session: Session, count: int) -> list[Said]:
    events = session.inspect.events(0, FIRST_EVENTS + count)
    return [event for event in events if isinstance(event, Said) and not event.line.apart][:count]


def _correct_leading(session: Session, request: IncomingRequest) -> None:
    """Shows leading system messages as they are now."""
    inspector = session.inspect
    recorded = _first_messages(session, len(request.leading))
    for said, message in zip(recorded, request.leading, strict=False):
        shown = inspector.state.corrected.get(said.at, said.line)
        if content_digest(inspector.message(shown)) != message.digest:
            session.correct(said.at, message.values()[0], why="the client's system text changed")


def _append(session: Session, placed: PlacedRequest, drafts: Sequence[Draft]) -> PlacedRequest:
    session.shows_handles = placed.offers_tools
    with session.locked() as inspector:
        session.say(drafts, after=placed.message_count)
        if placed.message_count is None:
            return placed
        return placed._replace(message_count=inspector.state.index)


def _provider_prefix_id(owner: str, *names: str) -> str:
    """Of a history that has a name at the provider."""
    return prefix_ids(repr((owner, *names)).encode("utf-8", "surrogatepass"), [b""])[0]


def _new_id() -> str:
    return f"chat-{uuid4().hex[:16]}"
