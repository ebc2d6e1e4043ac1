"""Conversations in AWS Bedrock AgentCore Memory: a batch is an event, with its exact bytes and its messages.

A batch of entries is one event of the conversation's session: a blob with the exact bytes of the entries, and
the messages in them as texts, from which the service learns. A batch too large for one event begins with
`part` events, and counts with the `batch` event after them. The service has no compare-and-append, so one
process at a time may write a conversation.
"""

import base64
import json
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from secrets import token_hex
from threading import RLock
from typing import Any, ClassVar, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, CorruptError, MessageError, NewerError, SettingError, StoreError
from refold.stores.agentcore_client import ActorSession, AgentCoreClient, Json, digest
from refold.stores.hybrid_sync import BoundedDict
from refold.stores.packing import to_text
from refold.stores.store import Ability, ConversationInfo, Key, Lease, Memory, SpokenMessage, require_next
from refold.stores.url import ANY, SECONDS, SWITCH, parse_options, shown_url

PackedEntry: TypeAlias = tuple[bytes, bytes | None, bytes, bytes]
"""Kind, id, head and body of an entry."""

LOOKS = 6
"""How often an event that was created is looked for in the list, less and less often."""
MAX_CONCURRENT_DELETES = 8
MAX_CACHED_CONVERSATIONS = 100
LOCKS = 64
OPTIONS = {"region": ANY, "long_term": SWITCH, "namespace": ANY, "timeout_s": SECONDS}
VERSION = 1
MARK = re.compile(r"refold event (\d{1,9})\n")
"""The beginning of refold's blobs, with their version."""
MAX_TEXT = 100_000
"""Characters of one text that the service takes, counted as UTF-16 does."""
MAX_TEXTS = 99
"""Texts in one event; the blob is its hundredth item."""
MAX_BYTES = 1_000_000
"""Of the blob in one event, and again of its texts: far from where the service was seen to refuse."""
ROLES = {"user": "USER", "assistant": "ASSISTANT", "tool": "TOOL"}


class StoredEvent(NamedTuple):
    """One of refold's events, as it was listed."""

    id: str
    head: Json
    """`kind`, `owner`, `conversation` and `stream`; of a batch also `at`, `previous`, `last` and `parts`."""
    data: str

    @property
    def kind(self) -> str:
        return str(self.head["kind"])

    @property
    def key(self) -> Key:
        return Key(self.head["owner"], self.head["conversation"])


@dataclass(slots=True)
class KnownConversation:
    """A conversation as far as this process has read it; empty if there is none."""

    first: StoredEvent | None = None
    """The batch that it began with."""
    tip: str = ""
    """Id of the newest batch that was read."""
    links: list[Link] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        """Tells the conversation from an earlier one of the same name."""
        return "" if self.first is None else str(self.first.head["stream"])

    @property
    def digest(self) -> bytes:
        return self.links[-1].digest if self.links else GENESIS

    def take(self, events: Iterable[StoredEvent]) -> None:
        """Adds the batches that continue the conversation. Of two at the same place, the one with the
        smaller id counts.
        """
        parts: dict[str, dict[int, StoredEvent]] = {}
        for one in sorted(events):
            head = one.head
            if head["stream"] != self.stream or one.kind not in ("batch", "part"):
                continue
            before = parts.setdefault(head["nonce"], {})
            if one.kind == "part":
                before[head["n"]] = one
                continue
            continues = head["at"] == len(self.links) and head["previous"] == self.digest.hex()
            if continues and len(before) == head["parts"]:
                new = _links([*(before[n] for n in sorted(before)), one])
                self.links += new
                self.places |= {link.entry.id: link.entry.at for link in new if link.entry.id is not None}
                self.tip = one.id


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
        self._known = BoundedDict[ActorSession, KnownConversation](MAX_CACHED_CONVERSATIONS)
        """As they were when they were last read."""
        self._locks = [RLock() for _ in range(LOCKS)]

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        place = self._client.place(key)
        with self._lock(place):
            known = self._cached(place, key)
            try:
                require_next(key, entries, len(known.links), known.digest, after)
            except ConflictError:  # the cache may be out of date
                known = self._fresh(place, key)
                require_next(key, entries, len(known.links), known.digest, after)
            return self._add(place, key, known, entries) if entries else known.digest

    def _add(
        self, place: ActorSession, key: Key, known: KnownConversation, entries: Sequence[Entry]
    ) -> bytes:
        at = entries[0].at
        previous = known.digest
        last = previous
        for entry in entries:
            last = chain(last, entry)
        nonce = token_hex(8)
        stream = known.stream or token_hex(8)
        head: Json = {"kind": "batch", "owner": key.owner, "conversation": key.conversation}
        head |= {"stream": stream, "nonce": nonce, "time": time.time()}
        head |= {"at": at, "previous": previous.hex(), "last": last.hex(), "root": True}
        messages = filter(None, map(self._spoken, entries)) if self._spoken is not None else ()
        *parts, batch = _payloads(head, entries, messages)
        for n, part in enumerate(parts):
            self._client.create(place, part, digest(to_bytes(nonce), b"%d" % n), known.tip)
        # A retry after a lost answer has the same token, so that the service ignores it.
        token = digest(*map(to_bytes, (*place, stream, f"{at}", previous.hex())))
        id = self._client.create(place, batch, token, known.tip)
        is_new = known.first is None
        for look in range(LOOKS):
            if look:
                time.sleep(0.01 * 4**look)
            now = self._fresh(place, key)
            if not is_new and now.stream != stream:
                self._client.delete(place, id)
                raise ConflictError(f"{key.conversation!r} was erased meanwhile")
            stored = now.links[at : at + len(entries)]
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
        with self._lock(place):
            known = self._cached(place, key)
            if stop is None or stop > len(known.links):
                known = self._fresh(place, key)
            links = known.links[max(0, start) : stop]
        return (link for link in links if link.entry.kind != but)

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        places = self._fresh(self._client.place(key), key).places
        return {id: places[id] for id in ids if id in places}

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        actors = self._client.actors() if owner is None else [self._client.place(Key(owner, "")).actor]
        found: list[ConversationInfo] = []
        for actor in actors:
            for session in self._client.sessions(actor):
                known = self._fresh(ActorSession(actor, session), None)
                if known.first is not None and owner in (None, known.first.key.owner):
                    created = known.first.head["time"]
                    found.append(ConversationInfo(known.first.key, created, len(known.links)))
        yield from sorted(found, key=lambda one: one.created, reverse=True)

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Deletes the session's events one by one, the conversation's first batch before all others: what is
        left of an interrupted erasure is not visible, and the next erasure deletes it.
        """
        place = self._client.place(key)
        with self._lock(place):
            first = self._fresh(place, key).first
            events = {event["eventId"]: stored_event(event) for event in self._client.events(place)}
            if first is not None:
                self._client.delete(place, first.id)
            others = [id for id, one in events.items() if (first if one is None else one.key == key)]
            with ThreadPoolExecutor(MAX_CONCURRENT_DELETES) as pool:
                list(pool.map(lambda id: self._client.delete(place, id), others))
            self._known.pop(place, None)
            if first is not None:
                self._client.forget_records(place)
        return []

    def _lock(self, place: ActorSession) -> RLock:
        return self._locks[hash(place) % LOCKS]

    def _cached(self, place: ActorSession, key: Key | None) -> KnownConversation:
        known = self._known.get(place)
        if known is None or known.first is None or key not in (None, known.first.key):
            return KnownConversation()
        return known

    def _fresh(self, place: ActorSession, key: Key | None) -> KnownConversation:
        """The conversation as it is now. `key` None takes any."""
        with self._lock(place):
            known = self._cached(place, key)
            if known.first is not None:
                events, is_there = self._client.since(place, known.tip)
                if is_there:
                    known.take(_ours(events))
                    return known
            ours = _ours(self._client.events(place))
            for first in sorted(ours):
                is_first = first.kind == "batch" and first.head["at"] == 0
                if is_first and key in (None, first.key) and self._client.place(first.key) == place:
                    known = KnownConversation(first)
                    known.take(ours)
                    if known.links:
                        self._known[place] = known
                        return known
            self._known.pop(place, None)
            return KnownConversation()

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
                if texts := list(_conversational([one])):
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
    memory_id, actor, options = _parsed(url)
    return AgentCoreStore(memory_id, actor, **options)


def memorizer(url: str) -> AgentCoreMemorizer:
    """The memory of a hybrid store, by the same URL. Models are shown what it learned, except with
    `long_term=0`.
    """
    memory_id, actor, options = _parsed(url)
    shown = options.pop("long_term", True)
    return AgentCoreMemorizer(AgentCoreClient(memory_id, actor, **options), long_term=shown)


def _parsed(url: str) -> tuple[str, str | None, dict[str, Any]]:
    where = f"store {shown_url(url)!r}"
    parts = urlsplit(url)
    memory_id = unquote(parts.netloc)
    if parts.scheme != "agentcore" or not memory_id or "@" in memory_id:
        known = ", ".join(OPTIONS)
        raise SettingError(where, f"expected agentcore://MEMORY_ID/ACTOR; its options are {known}")
    return memory_id, unquote(parts.path.strip("/")) or None, parse_options(where, parts.query, OPTIONS)


def _ours(events: Iterable[Json]) -> list[StoredEvent]:
    return [one for one in map(stored_event, events) if one is not None]


def stored_event(event: Json) -> StoredEvent | None:
    """None for an event of another program.

    Raises:
        NewerError: only a newer refold can read it.
        CorruptError: it was altered.
    """
    for item in event.get("payload", ()):
        blob = item.get("blob")
        mark = MARK.match(blob) if isinstance(blob, str) else None
        if mark is not None:
            if int(mark[1]) > VERSION:
                raise NewerError(f"A newer refold wrote event {event['eventId']}; upgrade to read it")
            head, _, data = blob[mark.end() :].partition("\n")
            try:
                return StoredEvent(event["eventId"], json.loads(head), data)
            except ValueError as error:
                raise CorruptError(f"Event {event['eventId']} was altered: {error}") from error
    return None


def _payloads(head: Json, entries: Sequence[Entry], messages: Iterable[SpokenMessage]) -> list[list[Json]]:
    """The payload of each event that a batch takes: one, unless it is very large."""
    rows = [(to_bytes(one.kind), None if one.id is None else to_bytes(one.id), *one[3:]) for one in entries]
    data = base64.b64encode(zlib.compress(msgspec.msgpack.encode(rows), 6)).decode()
    chunks = [data[start : start + MAX_BYTES] for start in range(0, len(data), MAX_BYTES)]
    events = list(zip_longest(_grouped(_conversational(messages)), chunks))
    parts = len(events) - 1
    result = []
    for n, (texts, chunk) in enumerate(events):
        own = head | ({"parts": parts} if n == parts else {"kind": "part", "n": n})
        blob = f"refold event {VERSION}\n{json.dumps(own)}\n{chunk or ''}"
        result.append([*(texts or ()), {"blob": blob}])
    return result


def _conversational(messages: Iterable[SpokenMessage]) -> Iterator[Json]:
    """Messages as the service's strategies read them, cut to the length that the service takes."""
    for one in messages:
        data = one.text.replace("\0", " ").encode("utf-16-le", "replace")[: 2 * MAX_TEXT]
        text = data.decode("utf-16-le", "ignore")
        if text.strip():
            yield {"conversational": {"role": ROLES.get(one.role, "OTHER"), "content": {"text": text}}}


def _grouped(items: Iterable[Json]) -> Iterator[list[Json]]:
    """As many items as fit into an event each."""
    group: list[Json] = []
    size = 0
    for item in items:
        more = len(json.dumps(item))
        if group and (len(group) == MAX_TEXTS or size + more > MAX_BYTES):
            yield group
            group = []
            size = 0
        group.append(item)
        size += more
    if group:
        yield group


def _links(events: Sequence[StoredEvent]) -> list[Link]:
    """The entries of a batch, from its parts and itself.

    Raises:
        CorruptError: it was altered.
    """
    batch = events[-1]
    result: list[Link] = []
    try:
        packed = base64.b64decode("".join(one.data for one in events), validate=True)
        rows = msgspec.msgpack.decode(zlib.decompress(packed), type=list[PackedEntry])
        digest = bytes.fromhex(batch.head["previous"])
        for at, (kind, id, head, body) in enumerate(rows, batch.head["at"]):
            entry = Entry(at, to_text(kind), None if id is None else to_text(id), head, body)
            digest = chain(digest, entry)
            result.append(Link(entry, digest))
    except (ValueError, zlib.error, msgspec.DecodeError) as error:
        raise CorruptError(f"Event {batch.id} cannot be unpacked: {error}") from error
    if digest.hex() != batch.head["last"]:
        raise CorruptError(f"Event {batch.id} was altered: its digest does not match")
    return result
