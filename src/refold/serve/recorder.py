"""Records the gateway's requests and replies in conversations, and fits what goes upstream. For threads."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from refold.core import codec
from refold.core.draft import PART, Draft
from refold.core.errors import ConflictError, NotFoundError, SettingError
from refold.core.event import Said
from refold.core.expiry import OWN_TOOLS
from refold.core.message import Message, ToolCall, ToolResult
from refold.dialects import replies
from refold.dialects.registry import DIALECTS
from refold.serve.incoming import PREVIOUS_RESPONSE, IncomingRequest, read_messages, with_cache_control
from refold.serve.service import Service
from refold.session.history_sync import (
    common_prefix,
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
READ_BATCH = 16
"""Events that are read at once, backwards."""
TOOLS_TAG = "refold:tools"
"""Tags the first message of a conversation in which expand and search are offered."""


class FoundConversation(NamedTuple):
    """The conversation that a request belongs to."""

    key: Key
    known: int = 0
    """How many of the request's messages it has."""
    prefix_id: str | None = None
    """The newest one must have this prefix id; None if any may."""
    message_count: int | None = None
    """It must have so many messages; None if any number may."""


class PlacedRequest(NamedTuple):
    """A request that was recorded in a conversation."""

    request: IncomingRequest
    key: Key
    prefix_id: str
    """Of its newest message."""
    message_count: int | None
    """Of the conversation; None if others may append before the reply does."""
    offers_tools: bool = False
    """Expand and search were added to it."""
    replies: tuple[Draft, ...] = ()
    """What was recorded after it."""
    is_complete: bool = False
    """There is an answer for the client: the model does not wait for results of the gateway's tools."""
    is_at_provider: bool = False
    """The history before it is at the provider."""

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
    tokens_before: int = 0
    """Of everything recorded, system and tools included."""
    tokens_sent: int = 0
    edits: int = 0
    """In force in the view."""

    @property
    def headers(self) -> dict[str, str]:
        """Those of the response to the client."""
        headers = {"x-refold-conversation": self.placed.key.conversation}
        if not self.placed.is_at_provider:
            headers["x-refold-tokens-before"] = str(self.tokens_before)
            headers["x-refold-tokens-sent"] = str(self.tokens_sent)
            headers["x-refold-edits"] = str(self.edits)
        return headers


class ProviderResponse(NamedTuple):
    """A response of OpenAI's that requests may refer to."""

    id: str
    """Of its last round; the client knows the id of the first one."""
    prefix_id: str
    outputs: tuple[dict[str, Any], ...] = ()
    """Results of the gateway's tools, which the model called along with the client's."""


class _ConversationFacts(NamedTuple):
    """What need not be read again of a conversation."""

    next: int = -1
    """The first free place when `prefix_id` was its newest."""
    prefix_id: str | None = None
    offers_tools: bool | None = None
    leading: tuple[bytes, ...] | None = None
    """Digests of the leading system messages that were sent last."""


class Recorder:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._pending: Counter[Key] = Counter()
        """Requests that wait for their reply."""
        self._facts: OrderedDict[Key, _ConversationFacts] = OrderedDict()
        self._responses: OrderedDict[tuple[str, str], ProviderResponse] = OrderedDict()
        """By owner and id."""
        self._forks: OrderedDict[str, Key] = OrderedDict()
        """The newest fork after each prefix."""
        self._lock = Lock()
        self._placing = [Lock() for _ in range(64)]
        """Chosen by prefix id: the same request, sent twice, is placed one after the other."""

    # Requests

    def prepare(self, request: IncomingRequest, body: bytes = b"") -> UpstreamRequest:
        """Finds the conversation, records what is new, and fits what goes upstream.

        A request whose history is at the provider goes upstream as it came: its `body`.

        Raises:
            RefoldError: that failed; the request should go upstream as it came.
        """
        for _ in range(MAX_CONFLICTS):
            with suppress(ConflictError):
                return self._prepare(request, body)
        raise ConflictError(f"Others appended to the same conversation {MAX_CONFLICTS} times in a row; retry")

    def _prepare(self, request: IncomingRequest, body: bytes) -> UpstreamRequest:
        """
        Raises:
            ConflictError: the conversation changed meanwhile; try again.
        """
        if request.provider_history is None:
            placed = self._place(request, request.prefix_ids())
            try:
                return self.fit(placed)
            except BaseException:
                self.end(placed)
                raise
        field, id = request.provider_history
        known = self._responses.get((request.owner, id))
        prefix_id = known.prefix_id if known else _provider_prefix_id(request.owner, field, id)
        if field == PREVIOUS_RESPONSE:
            placed = self._place(request, [prefix_id, *request.prefix_ids(after=prefix_id)])
        else:
            placed = self._place_in_provider_conversation(request, prefix_id)
        if known is not None and (known.id != id or known.outputs):
            fields = codec.loads(body)
            items = fields.get("input") or []
            if isinstance(items, str):
                items = [{"role": "user", "content": items}]
            body = codec.dumps(fields | {field: known.id, "input": [*known.outputs, *items]})
        return UpstreamRequest(placed, body)

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
            candidates = [prefix.key]
            if newest_id in self._forks:
                candidates.append(self._forks[newest_id])
            for key in candidates:
                if prefix.length < len(ids) or not self._pending[key]:
                    with suppress(ConflictError):
                        return self._record(request, ids, FoundConversation(key, prefix.length, newest_id))
            key = self._fork(prefix.key, prefix.at, request)
            self._cache(self._forks, newest_id, key)
            return self._record(request, ids, FoundConversation(key, prefix.length, newest_id))

    def _find_by_content(self, request: IncomingRequest, ids: list[str]) -> FoundConversation:
        """The conversation that the client names, if it does: others may have begun it, or the client may
        send only the end of its history. A history that shares nothing with it is appended to it.
        """
        key = Key(request.owner, request.conversation or _new_id())
        if len(ids) > len(request.messages):
            return FoundConversation(key)
        if request.conversation is None:
            return FoundConversation(key, message_count=0)
        digests = [message.digest for message in request.messages]
        with self._session(key, request) as session, session.locked() as inspector:
            count = inspector.state.index
            tail = inspector.place_of(max(0, count - READ_BATCH - 4 * len(digests)))
            recorded = recorded_digests(inspector.events(tail))
            length = overlap([digest for _, digest in recorded], digests)
            if length:
                return FoundConversation(key, length, message_count=count)
            if tail:
                recorded = recorded_digests(inspector.events())
        length = common_prefix([digest for _, digest in recorded], digests)
        if 0 < length < len(recorded):
            return FoundConversation(self._fork(key, recorded[length - 1][0], request), length)
        return FoundConversation(key, length, message_count=count)

    def _record(self, request: IncomingRequest, ids: list[str], found: FoundConversation) -> PlacedRequest:
        """Appends what is new in a request.

        Raises:
            ConflictError: the conversation has changed since it was found.
        """
        skipped = len(ids) - len(request.messages)
        with self._session(found.key, request) as session, session.locked() as inspector:
            count = inspector.state.index
            newest_id = self._newest_prefix_id(session)
            if found.prefix_id not in (None, newest_id) or found.message_count not in (None, count):
                raise ConflictError(f"Another writer appended to {found.key.conversation!r} at this moment")
            offers_tools = not skipped and self._offers_tools(session, request)
            tags = (TOOLS_TAG,) if offers_tools and not count else ()
            drafts = self._system_drafts(session, request, tags, is_new=not count)
            intake = session.intake(request.dialect, reads_own_fields=False)
            new_messages = request.messages[max(0, found.known - skipped) :]
            for message, id in zip(new_messages, ids[max(skipped, found.known) :], strict=True):
                drafts += intake.take(message.values(), id=id, tags=tags).drafts
            session.say(drafts, after=count)
            leading = tuple(message.digest for message in request.leading)
            is_corrected = bool(count and leading) and self._correct_leading(session, request, leading)
            if not is_corrected:  # a correction is an event: then the newest prefix id is read again
                facts = {} if count else {"offers_tools": offers_tools}
                self._remember(session, prefix_id=ids[-1], leading=leading, **facts)
            with self._lock:
                self._pending[found.key] += 1
            count = inspector.state.index
        return PlacedRequest(request, found.key, ids[-1], count, offers_tools, is_at_provider=bool(skipped))

    def _place_in_provider_conversation(self, request: IncomingRequest, prefix_id: str) -> PlacedRequest:
        """Appends to a conversation that the provider keeps: requests come one after the other."""
        found = self._locate(request, [prefix_id]).get(prefix_id)
        key = found[0] if found else Key(request.owner, request.conversation or _new_id())
        with self._session(key, request) as session:
            drafts = self._system_drafts(session, request, is_new=not session.get_count())
            intake = session.intake(request.dialect, reads_own_fields=False)
            for n, message in enumerate(request.messages):
                named: dict[str, Any] = {} if found or n else {"id": prefix_id}
                drafts += intake.take(message.values(), **named).drafts
            session.say(drafts)
        with self._lock:
            self._pending[key] += 1
        return PlacedRequest(request, key, prefix_id, None, is_at_provider=True)

    def _session(self, key: Key, request: IncomingRequest) -> AbstractContextManager[Session]:
        return self.service.session(key, request.model, request.agent)

    def _locate(self, request: IncomingRequest, ids: Sequence[str]) -> Mapping[str, tuple[Key, int]]:
        store = self.service.store
        if isinstance(store, LocatesIds):
            return store.locate(request.owner, ids)
        if request.conversation is None:
            raise SettingError(
                "x-refold-conversation",
                f"{type(store).__name__} cannot find conversations by their content; name the conversation",
            )
        key = Key(request.owner, request.conversation)
        return {id: (key, at) for id, at in store.find(key, ids).items()}

    def _newest_prefix_id(self, session: Session) -> str | None:
        """For a session that is locked."""
        stop = session.inspect.state.next
        known = self._facts.get(session.key, _ConversationFacts())
        if known.next == stop:
            return known.prefix_id
        prefix_id = None
        while stop > 0 and prefix_id is None:
            start = max(0, stop - READ_BATCH)
            for link in session.store.read(session.key, start, stop):
                if link.entry.id is not None and link.entry.id.startswith(LOCATED):
                    prefix_id = link.entry.id.partition(PART)[0]
            stop = start
        self._remember(session, prefix_id=prefix_id, leading=None)
        return prefix_id

    def _remember(self, session: Session, **facts: Any) -> None:
        known = self._facts.get(session.key, _ConversationFacts())
        known = known._replace(next=session.inspect.state.next, **facts)
        self._cache(self._facts, session.key, known)

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
        known = self._facts.get(session.key, _ConversationFacts())
        offers_tools = known.offers_tools
        if offers_tools is None:
            first = next((event for event in session.inspect.events() if isinstance(event, Said)), None)
            if first is not None:
                offers_tools = TOOLS_TAG in first.tags
                self._cache(self._facts, session.key, known._replace(offers_tools=offers_tools))
            elif self.service.settings.inject_tools == "auto":
                offers_tools = bool(request.tools)
            else:
                offers_tools = self.service.settings.inject_tools in ("on", True)
        has_one_answer = request.fields.get("n") in (None, 1)  # of several, the client takes one
        offers_tools = offers_tools and has_one_answer and not request.has_refold_tools
        session.shows_handles = offers_tools
        return offers_tools

    def _system_drafts(
        self, session: Session, request: IncomingRequest, tags: tuple[str, ...] = (), *, is_new: bool
    ) -> list[Draft]:
        """System text to record: all of it in a new conversation, else separate text that changed."""
        intake = session.intake(request.dialect, reads_own_fields=False)
        drafts: list[Draft] = []
        name = DIALECTS[request.dialect].system_field
        if name is not None:
            lines = session.inspect.state.apart
            last = session.inspect.raw(lines[-1].at) if lines else None
            recorded = last.get(name) if isinstance(last, dict) else None
            if (request.system or None) != (recorded or None):
                drafts += intake.take([{name: request.system or ""}], tags=tags).drafts
        if is_new:
            for message in request.leading:
                drafts += intake.take(message.values(), tags=tags).drafts
        return drafts

    def _correct_leading(
        self, session: Session, request: IncomingRequest, digests: tuple[bytes, ...]
    ) -> bool:
        """Shows leading system messages as they are now; returns whether any had changed."""
        if self._facts.get(session.key, _ConversationFacts()).leading == digests:
            return False
        inspector = session.inspect
        recorded = (e for e in inspector.events() if isinstance(e, Said) and not e.line.apart)
        is_corrected = False
        for said, message in zip(recorded, request.leading, strict=False):
            shown = inspector.state.corrected.get(said.at, said.line)
            if content_digest(inspector.message(shown)) != message.digest:
                session.correct(said.at, message.values()[0], why="the client's system text changed")
                is_corrected = True
        return is_corrected

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
            sent = fitted.report.tokens.final
            before = sent + session.hidden_tokens
            edits = {item.edit for item in session.inspect.items if item.edit is not None}
            return UpstreamRequest(placed, codec.dumps(body), before, sent, len(edits))

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
        placed = placed._replace(is_complete=not placed.only_looks_up(reply))
        with self._session(placed.key, placed.request) as session:
            results = []
            for call in placed.calls_in(reply):
                if call.tool in OWN_TOOLS:
                    text = session.call(call.tool, call.input)
                    results.append(Message("tool", (ToolResult(call.call_id, text, call.tool),)))
            prefix_id = self._reply_prefix_id(placed, reply, visible, results) if placed.is_complete else None
            named: dict[str, Any] = {"id": prefix_id} if prefix_id else {}
            intake = session.intake()
            drafts = intake.take([reply], lambda n: "reply", **named).drafts + intake.take(results).drafts
            placed = placed._replace(replies=(*placed.replies, *drafts))
            with suppress(ConflictError):
                return self._append(session, placed, drafts, prefix_id)
        # others appended meanwhile: what follows the request goes to a fork of its own
        found = self.service.store.find(placed.key, [placed.prefix_id])
        if placed.prefix_id not in found:
            raise NotFoundError(f"Conversation {placed.key.conversation!r} was erased meanwhile")
        key = self._fork(placed.key, found[placed.prefix_id], placed.request)
        with self._session(key, placed.request) as session:
            placed = placed._replace(key=key, message_count=session.get_count())
            return self._append(session, placed, placed.replies, prefix_id)

    def _reply_prefix_id(
        self,
        placed: PlacedRequest,
        reply: dict[str, Any],
        visible: dict[str, Any],
        results: Sequence[Message],
    ) -> str | None:
        """Identifies a reply when the client sends it back, or refers to it by its id."""
        request = placed.request
        dialect = DIALECTS[request.dialect]
        prefix_id: str | None = None
        taken = replies.take(visible)
        if taken is not None and not placed.is_at_provider:
            answers = read_messages(request.dialect, [codec.dumps(message) for message in taken.messages])
            if answers:
                prefix_id = request.prefix_ids(*answers)[-1]
        id = reply.get("id")
        visible_id = visible.get("id")
        if not dialect.history_fields or not isinstance(id, str) or not isinstance(visible_id, str):
            return prefix_id
        if placed.is_at_provider:
            prefix_id = _provider_prefix_id(request.owner, PREVIOUS_RESPONSE, visible_id)
        if prefix_id is not None:
            outputs = tuple(item for result in results for item in dialect.render(result)[0])
            response = ProviderResponse(id, prefix_id, outputs)
            self._cache(self._responses, (request.owner, visible_id), response)
        return prefix_id

    def _append(
        self, session: Session, placed: PlacedRequest, drafts: Sequence[Draft], prefix_id: str | None
    ) -> PlacedRequest:
        session.shows_handles = placed.offers_tools
        with session.locked() as inspector:
            session.say(drafts, after=placed.message_count)
            self._remember(session, prefix_id=prefix_id or placed.prefix_id)
            if placed.message_count is None:
                return placed
            return placed._replace(message_count=inspector.state.index)


def _provider_prefix_id(owner: str, *names: str) -> str:
    """Of a history that has a name at the provider."""
    return prefix_ids(repr((owner, *names)).encode("utf-8", "surrogatepass"), [b""])[0]


def _new_id() -> str:
    return f"chat-{uuid4().hex[:16]}"
