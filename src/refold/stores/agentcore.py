"""Conversations in AWS Bedrock AgentCore Memory: a batch is an event, with its exact bytes and its messages.

What the service learns from the messages is available as memories. The service has no compare-and-append, so
one process at a time may write a conversation.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from threading import RLock
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, MessageError, SettingError, StoreError
from refold.stores.agentcore_client import ActorSession, AgentCoreClient, digest
from refold.stores.agentcore_events import (
    Json,
    KnownConversation,
    StoredEvent,
    conversational,
    payloads,
    stored_event,
)
from refold.stores.hybrid_sync import BoundedDict
from refold.stores.store import Ability, ConversationInfo, Key, Lease, Memory, SpokenMessage, require_next
from refold.stores.url import shown_url

LOOKS = 6
"""How often an event that was created is looked for in the list, less and less often."""
DELETERS = 8
"""Events that are deleted at the same time."""
MAX_KNOWN = 100
"""Conversations that are cached."""
LOCKS = 64
OPTIONS = ("region", "long_term", "namespace", "timeout_s")


class AgentCoreStore:
    """One memory at AgentCore, for all owners. Safe to use from many threads of one process.

    The owner is the actor and the conversation the session. Where an `actor` is given, it is that of the
    default owner, and others are actors of their own (`ACTOR:OWNER`).

    The service's limits: a text is cut after 100,000 characters for the service, not in the record; a batch
    whose texts or bytes are more than 1 MB takes several events and counts with the last; events expire after
    the days (7 to 365) that the memory was created with, and the record with them.
    """

    cannot: ClassVar[Mapping[Ability, str]] = {
        "compare-and-append": "AgentCore Memory has no compare-and-append: let one process at a time write a"
        " conversation. If two write at the same moment, one of them gets a ConflictError as soon as the"
        " service lists both events; until then, both may believe that they wrote"
    }

    def __init__(
        self,
        memory_id: str,
        actor: str | None = None,
        *,
        region: str | None = None,
        client: Any = None,
        long_term: bool = False,
        namespace: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """`client` is boto3's for bedrock-agentcore, if you have one; it has its own timeouts and retries.
        With `long_term`, models are shown what the service learned; `namespace` is where that is, as the
        memory's strategies name it, such as `/facts/{actorId}/`. `timeout_s` is for one request with its
        retries.
        """
        self._client = AgentCoreClient(
            memory_id, actor, region=region, client=client, namespace=namespace, timeout_s=timeout_s
        )
        self._long_term = long_term
        self._spoken: Callable[[Entry], SpokenMessage | None] | None = None
        self._known = BoundedDict[ActorSession, KnownConversation](MAX_KNOWN)
        self._locks = [RLock() for _ in range(LOCKS)]

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        place = self._client.place(key)
        with self._locked(place):
            known = self._cached(place, key)
            try:
                _require_next(key, known, entries, after)
            except ConflictError:  # the cache may be out of date
                known = self._fresh(place, key)
                _require_next(key, known, entries, after)
            return self._add(place, key, known, entries) if entries else _digest(known)

    def _add(
        self, place: ActorSession, key: Key, known: KnownConversation | None, entries: Sequence[Entry]
    ) -> bytes:
        at = entries[0].at
        previous = _digest(known)
        last = previous
        for entry in entries:
            last = chain(last, entry)
        nonce = token_hex(8)
        stream = token_hex(8) if known is None else known.stream
        head: Json = {"kind": "batch", "owner": key.owner, "conversation": key.conversation}
        head |= {"stream": stream, "nonce": nonce, "time": time.time()}
        head |= {"at": at, "previous": previous.hex(), "last": last.hex(), "root": True}
        messages = filter(None, map(self._spoken, entries)) if self._spoken is not None else ()
        *parts, batch = payloads(head, entries, messages)
        tip = known.tip if known else ""
        for n, part in enumerate(parts):
            self._client.create(place, part, digest(to_bytes(nonce), b"%d" % n), tip)
        # A retry after a lost answer has the same token, so that the service ignores it.
        token = digest(*map(to_bytes, (*place, stream, f"{at}", previous.hex())))
        id = self._client.create(place, batch, token, tip)
        for look in range(LOOKS):
            if look:
                time.sleep(0.01 * 4**look)
            now = self._fresh(place, key)
            if known is not None and (now is None or now.stream != stream):
                self._client.delete(place, id)
                raise ConflictError(f"{key.conversation!r} was erased meanwhile")
            stored = now.links[at : at + len(entries)] if now is not None else []
            if stored and stored[-1].digest == last:
                return last
            if stored:
                raise ConflictError(f"{key.conversation!r}: another writer appended at {at}")
        raise StoreError(f"Event {id} was created, but AgentCore Memory does not list it yet; retry")

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        """Entries before `stop` that were read before are not requested again: a place never changes."""
        place = self._client.place(key)
        with self._locked(place):
            known = self._cached(place, key)
            if known is None or stop is None or stop > len(known.links):
                known = self._fresh(place, key)
            links = known.links[max(0, start) : stop] if known else []
        return (link for link in links if link.entry.kind != but)

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        known = self._fresh(self._client.place(key), key)
        return {id: known.places[id] for id in ids if id in known.places} if known else {}

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        actors = self._client.actors() if owner is None else [self._client.place(Key(owner, "")).actor]
        found: list[ConversationInfo] = []
        for actor in actors:
            for session in self._client.sessions(actor):
                known = self._fresh(ActorSession(actor, session), None)
                if known is not None and owner in (None, known.first.key.owner):
                    found.append(
                        ConversationInfo(known.first.key, known.first.head["time"], len(known.links))
                    )
        yield from sorted(found, key=lambda one: one.created, reverse=True)

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Deletes the session's events one by one, the conversation's first batch before all others: what is
        left of an interrupted erasure is not visible, and the next erasure deletes it.
        """
        place = self._client.place(key)
        with self._locked(place):
            known = self._fresh(place, key)
            events = {event["eventId"]: stored_event(event) for event in self._client.events(place)}
            if known is not None:
                self._client.delete(place, known.first.id)
            others = [id for id, one in events.items() if (known if one is None else one.key == key)]
            with ThreadPoolExecutor(DELETERS) as pool:
                list(pool.map(lambda id: self._client.delete(place, id), others))
            self._known.pop(place, None)
            if known is not None:
                self._client.forget_records(place)
        return []

    def _locked(self, place: ActorSession) -> RLock:
        return self._locks[hash(place) % LOCKS]

    def _cached(self, place: ActorSession, key: Key | None) -> KnownConversation | None:
        """The conversation as it was when it was last read."""
        known = self._known.get(place)
        return known if known is not None and key in (None, known.first.key) else None

    def _fresh(self, place: ActorSession, key: Key | None) -> KnownConversation | None:
        """The conversation as it is now; None if there is none. `key` None takes any."""
        with self._locked(place):
            known = self._cached(place, key)
            if known is not None:
                events, is_there = self._client.since(place, known.tip)
                if is_there:
                    known.take(_ours(events))
                    return known
            ours = _ours(self._client.events(place))
            for first in sorted(ours):
                if first.kind == "batch" and first.head["at"] == 0 and self._is_of(place, key, first):
                    known = KnownConversation(first)
                    known.take(ours)
                    if known.links:
                        self._known[place] = known
                        return known
            self._known.pop(place, None)
            return None

    def _is_of(self, place: ActorSession, key: Key | None, event: StoredEvent) -> bool:
        return key in (None, event.key) and self._client.place(event.key) == place

    # What the service learns

    def listen(self, spoken: Callable[[Entry], SpokenMessage | None], /) -> None:
        self._spoken = spoken

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> list[Memory]:
        return self._client.memories(key, query, limit, namespace)

    @property
    def recalls(self) -> bool:
        return self._long_term

    def close(self) -> None:
        self._client.close()


class AgentCoreMemorizer:
    """Delivers each message as an event without a blob; a message that is delivered again is one event."""

    def __init__(self, client: AgentCoreClient, *, long_term: bool = True) -> None:
        self._client = client
        self.recalls = long_term
        """Whether models are shown what the service learned."""

    @property
    def name(self) -> str:
        return f"agentcore://{self._client.memory_id}/{self._client.actor or ''}"

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        place = self._client.place(key)
        for one in said:
            token = digest(*map(to_bytes, (*place, *key, f"{one.at} {one.time!r}")))
            try:
                if texts := list(conversational([one])):
                    self._client.create(place, texts, token)
            except StoreError as error:
                if self._client.code(error) in ("ValidationException", "InvalidInputException", "413"):
                    raise MessageError(f"message {one.at} of {key.conversation!r}", str(error)) from error
                raise

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> list[Memory]:
        return self._client.memories(key, query, limit, namespace)

    def forget(self, key: Key, /) -> None:
        """The events, and the records whose namespace has `{sessionId}`; other records are the actor's."""
        place = self._client.place(key)
        for event in list(self._client.events(place)):
            self._client.delete(place, event["eventId"])
        self._client.forget_records(place)

    def close(self) -> None:
        self._client.close()


def from_url(url: str) -> AgentCoreStore:
    """The store behind `agentcore://MEMORY_ID/ACTOR`; without an actor, it is the owner.

    Options: `?region=us-west-2`, `?long_term=1` (models are shown what the service learned),
    `?namespace=/facts/{actorId}/` (where that is), `?timeout_s=10`. The endpoint and the credentials are from
    the SDK's own variables and files.
    """
    memory_id, actor, options = _options(url, long_term="0")
    return AgentCoreStore(memory_id, actor, **options)


def memorizer(url: str) -> AgentCoreMemorizer:
    """The memory of a hybrid store, by the same URL. Models are shown what it learned, except with
    `long_term=0`.
    """
    memory_id, actor, options = _options(url, long_term="1")
    shown = options.pop("long_term")
    return AgentCoreMemorizer(AgentCoreClient(memory_id, actor, **options), long_term=shown)


def _options(url: str, *, long_term: str) -> tuple[str, str | None, dict[str, Any]]:
    where, parts = f"store {shown_url(url)!r}", urlsplit(url)
    memory_id, actor = unquote(parts.netloc), unquote(parts.path.strip("/")) or None
    options: dict[str, Any] = {"timeout_s": "10", "long_term": long_term}
    options |= parse_qsl(parts.query, keep_blank_values=True)
    is_one = parts.scheme == "agentcore" and memory_id and "@" not in memory_id
    if not is_one or not options.keys() <= set(OPTIONS):
        known = ", ".join(OPTIONS)
        raise SettingError(where, f"expected agentcore://MEMORY_ID/ACTOR; its options are {known}")
    if options["long_term"] not in ("0", "1"):
        raise SettingError(where, "long_term is 0 or 1")
    if not options["timeout_s"].replace(".", "", 1).isdecimal() or not float(options["timeout_s"]):
        raise SettingError(where, "timeout_s is a number of seconds")
    options |= {"timeout_s": float(options["timeout_s"]), "long_term": options["long_term"] == "1"}
    return memory_id, actor, options


def _ours(events: Iterable[Json]) -> list[StoredEvent]:
    return [one for one in map(stored_event, events) if one is not None]


def _require_next(
    key: Key, known: KnownConversation | None, entries: Sequence[Entry], after: bytes | None
) -> None:
    require_next(key, entries, len(known.links) if known else 0, _digest(known), after)


def _digest(known: KnownConversation | None) -> bytes:
    return GENESIS if known is None else known.digest
