"""Events of AgentCore Memory and what they add up to: conversations, cached in this process.

An event has one blob with the exact bytes of a batch, and the messages in it as text for the service. A
conversation begins with an event in its own session: its first batch, or the pointer of a fork. The batches
of a fork are on a branch of the session where its past is, its home.
"""

import base64
import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any, NamedTuple, Self, TypeAlias

import msgspec

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import CorruptError, NewerError
from refold.stores.agentcore_client import ActorSession, AgentCoreClient, Branch
from refold.stores.store import Key, SpokenMessage

Json: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[bytes, bytes | None, bytes, bytes]
"""Kind, id, head and body of an entry."""

VERSION = 1
MARK = re.compile(r"refold event (\d{1,9})\n")
"""What our blobs begin with, and the version."""
MOST_TEXT = 100_000
"""Characters of one text that the service takes, counted as UTF-16 does."""
MOST_ITEMS = 99
"""Texts in one event; the blob is the hundredth item."""
MOST_BYTES = 1_000_000
"""Of the blob in one event, and again of the texts in it: far from where the service was seen to refuse."""
ROLES = {"user": "USER", "assistant": "ASSISTANT", "tool": "TOOL"}


class StoredEvent(NamedTuple):
    """One of our events, as it was listed."""

    id: str
    head: Json
    """What it is (`kind`), whose (`owner`, `conversation`), of which `stream`, and more for each kind."""
    data: str

    @property
    def kind(self) -> str:
        return str(self.head["kind"])

    @property
    def stream(self) -> str:
        return str(self.head["stream"])

    @property
    def key(self) -> Key:
        return Key(self.head["owner"], self.head["conversation"])


def stored_event(event: Json) -> StoredEvent | None:
    """None for an event of somebody else.

    Raises:
        NewerError: only a newer refold can read it.
        CorruptError: it is not what was written.
    """
    for item in event.get("payload", ()):
        blob = item.get("blob")
        if isinstance(blob, str) and (mark := MARK.match(blob)):
            if int(mark[1]) > VERSION:
                raise NewerError(f"Event {event['eventId']} is of a newer refold; upgrade to read it")
            head, _, data = blob[mark.end() :].partition("\n")
            try:
                return StoredEvent(event["eventId"], json.loads(head), data)
            except ValueError as error:
                raise CorruptError(f"Event {event['eventId']} was altered: {error}") from error
    return None


def payload(head: Json, texts: Iterable[Json] = (), data: str = "") -> list[Json]:
    return [*texts, {"blob": f"refold event {VERSION}\n{json.dumps(head)}\n{data}"}]


def packed(entries: Sequence[Entry], said: Iterable[SpokenMessage]) -> list[tuple[Sequence[Json], str]]:
    """A batch, as texts and data for each of the events that hold it: one, unless it is very large."""
    rows = [(to_bytes(one.kind), one.id if one.id is None else to_bytes(one.id), *one[3:]) for one in entries]
    data = base64.b64encode(zlib.compress(msgspec.msgpack.encode(rows), 6)).decode()
    chunks = [data[start : start + MOST_BYTES] for start in range(0, len(data), MOST_BYTES)]
    groups: list[Sequence[Json]] = list(grouped(conversational(said)))
    count = max(len(chunks), len(groups))
    chunks += [""] * (count - len(chunks))
    return list(zip([*groups, *[()] * (count - len(groups))], chunks, strict=True))


def links(batch: StoredEvent, parts: Sequence[StoredEvent]) -> list[Link]:
    """The entries of a batch.

    Raises:
        CorruptError: they are not what was written.
    """
    head = batch.head
    try:
        packed = base64.b64decode("".join(one.data for one in (*parts, batch)), validate=True)
        rows = msgspec.msgpack.decode(
            zlib.decompress(packed), type=list[tuple[bytes, bytes | None, bytes, bytes]]
        )
        digest, result = bytes.fromhex(head["previous"]), list[Link]()
        for at, (kind, id, top, body) in enumerate(rows, head["at"]):
            entry = Entry(at, _text(kind), None if id is None else _text(id), top, body)
            digest = chain(digest, entry)
            result.append(Link(entry, digest))
    except (ValueError, zlib.error, msgspec.DecodeError) as error:
        raise CorruptError(f"Event {batch.id} cannot be unpacked: {error}") from error
    if digest.hex() != head["last"]:
        raise CorruptError(f"Event {batch.id} was altered: its digest does not match")
    return result


def conversational(said: Iterable[SpokenMessage]) -> Iterator[Json]:
    """What the service's strategies read; cut where it is too long for them, which the blob is not."""
    for one in said:
        text = one.text.replace("\0", " ").encode("utf-16-le", "replace")[: 2 * MOST_TEXT]
        if (shown := text.decode("utf-16-le", "ignore")).strip():
            yield {"conversational": {"role": ROLES.get(one.role, "OTHER"), "content": {"text": shown}}}


def grouped(items: Iterable[Json]) -> Iterator[Sequence[Json]]:
    """As many as fit into an event each."""
    group, size = list[Json](), 0
    for item in items:
        more = len(json.dumps(item))
        if group and (len(group) == MOST_ITEMS or size + more > MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


ENDLESS = 1 << 62


class SharedPast(NamedTuple):
    """A past that is shared: entries of a stream, up to a place."""

    stream: str
    stop: int


class Ancestor(NamedTuple):
    key: Key
    stream: str
    fork_at: int
    """The first place that is not shared with it."""
    home: ActorSession


class StoredBatch(NamedTuple):
    """An event that counts, and the places before `stop` are known with it."""

    stop: int
    id: str
    nonce: str
    parts: tuple[str, ...]


@dataclass(slots=True)
class KnownConversation:
    key: Key
    begun: StoredEvent
    """The event that it began with."""
    home: ActorSession
    branch: Branch | None = None
    line: tuple[SharedPast, ...] = ()
    of: tuple[Ancestor, ...] = ()
    """What it is a fork of, the nearest first."""
    links: list[Link] = field(default_factory=list)
    marks: list[StoredBatch] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    size: int = 0
    _batches: dict[tuple[str, int, str], list[StoredEvent]] = field(default_factory=dict)
    _parts: dict[str, dict[int, StoredEvent]] = field(default_factory=dict)

    @classmethod
    def begin(cls, begun: StoredEvent, place: ActorSession) -> Self:
        """Of the event that stands at the beginning of a session."""
        head = begun.head
        if begun.kind != "fork":
            return cls(begun.key, begun, place)
        branch = Branch(*head["branch"]) if head["branch"] else None
        line = tuple(SharedPast(*one) for one in head["line"])
        return cls(begun.key, begun, ActorSession(*head["home"]), branch, line, ancestors(begun))

    @property
    def stream(self) -> str:
        return self.begun.stream

    @property
    def nonce(self) -> str:
        """Of whoever began it."""
        return str(self.begun.head["nonce"])

    @property
    def tip(self) -> str:
        """The newest event that counts."""
        return self.marks[-1].id if self.marks else self.begun.id

    @property
    def digest(self) -> bytes:
        return self.links[-1].digest if self.links else GENESIS

    def mark(self, at: int) -> StoredBatch | None:
        """The event that holds a place."""
        low, high = 0, len(self.marks)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.marks[middle].stop > at else (middle + 1, high)
        return self.marks[low] if low < len(self.marks) else None

    def line_until(self, at: int) -> tuple[SharedPast, ...]:
        """The past that a fork at a place shares."""
        all = (*self.line, SharedPast(self.stream, at))
        starts = (0, *(segment.stop for segment in all))
        cut = (SharedPast(one.stream, min(one.stop, at)) for one in all)
        return tuple(one for one, start in zip(cut, starts, strict=False) if start < one.stop)

    def take(self, events: Iterable[StoredEvent]) -> None:
        """Goes on with what continues what is known. Of two that claim a place, the first by id counts."""
        stops = dict(self.line) | {self.stream: ENDLESS}
        for one in events:
            if one.kind == "part" and one.stream in stops:
                self._parts.setdefault(one.head["nonce"], {})[one.head["n"]] = one
            elif one.kind == "batch" and len(self.links) <= one.head["at"] < stops.get(one.stream, 0):
                claim = (one.stream, one.head["at"], one.head["previous"])
                self._batches.setdefault(claim, []).append(one)
        while (batch := self._next()) is not None:
            stop, parts = self._segment.stop, self._whole(batch) or ()
            new = [link for link in links(batch, parts) if link.entry.at < stop]
            del self._batches[batch.stream, batch.head["at"], batch.head["previous"]]
            self._parts.pop(batch.head["nonce"], None)
            self.links += new
            self.places |= {link.entry.id: link.entry.at for link in new if link.entry.id is not None}
            self.size += sum(len(link.entry.head) + len(link.entry.body) for link in new)
            ids = tuple(part.id for part in parts)
            self.marks.append(StoredBatch(len(self.links), batch.id, batch.head["nonce"], ids))

    @property
    def _segment(self) -> SharedPast:
        at = len(self.links)
        return next((one for one in self.line if at < one.stop), SharedPast(self.stream, ENDLESS))

    def _next(self) -> StoredEvent | None:
        claims = self._batches.get((self._segment.stream, len(self.links), self.digest.hex()), [])
        return min((one for one in claims if self._whole(one) is not None), default=None)

    def _whole(self, batch: StoredEvent) -> Sequence[StoredEvent] | None:
        """The parts of a batch; None where some are missing."""
        parts = self._parts.get(batch.head["nonce"], {})
        count = batch.head["parts"]
        return [parts[n] for n in range(count)] if len(parts) >= count else None


def ancestors(event: StoredEvent) -> tuple[Ancestor, ...]:
    """What the fork that an event tells of is a fork of."""
    rows = event.head["of"]
    return tuple(Ancestor(Key(*key), stream, at, ActorSession(*home)) for key, stream, at, home in rows)


MOST_KNOWN = 256
"""Conversations that are kept; more are forgotten whole."""
MOST_KNOWN_BYTES = 64_000_000
LOCKS = 64


class ConversationCache:
    """Safe to use from many threads: those who look at the same conversation wait for each other."""

    def __init__(self, service: AgentCoreClient) -> None:
        self._service = service
        self._known: OrderedDict[ActorSession, KnownConversation] = OrderedDict()
        self._keeping = Lock()
        self._locks = [RLock() for _ in range(LOCKS)]

    def locked(self, place: ActorSession) -> RLock:
        return self._locks[hash(place) % LOCKS]

    def known(self, place: ActorSession) -> KnownConversation | None:
        """The conversation of a session as it was when it was last looked at."""
        return self._known.get(place)

    def forget(self, place: ActorSession) -> None:
        with self._keeping:
            self._known.pop(place, None)

    def fresh(self, place: ActorSession, key: Key | None = None) -> KnownConversation | None:
        """The conversation of a session as it is now; None where there is none, or one of another key."""
        with self.locked(place):
            known = self._known.get(place)
            if known is None or key not in (None, known.key) or not self._extend(place, known):
                known = self._load(place, key)
            self._keep(place, known)
            return known

    def _keep(self, place: ActorSession, known: KnownConversation | None) -> None:
        with self._keeping:
            self._known.pop(place, None)
            if known is not None:
                self._known[place] = known
            size = sum(one.size for one in self._known.values())
            while len(self._known) > MOST_KNOWN or (size > MOST_KNOWN_BYTES and len(self._known) > 1):
                size -= self._known.popitem(last=False)[1].size

    def _extend(self, place: ActorSession, known: KnownConversation) -> bool:
        """Takes in what is new; False where the conversation is no longer the one that was known."""
        is_elsewhere = known.home != place
        if is_elsewhere and self._service.event(place, known.begun.id) is None:
            return False
        events, is_there = self._service.since(known.home, known.tip, known.branch and known.branch.name)
        new = [one for event in reversed(events) if (one := stored_event(event)) is not None]
        if not is_there or any(one.kind == "grave" and one.stream == known.stream for one in new):
            return False
        known.take(new)
        return True

    def _load(self, place: ActorSession, key: Key | None) -> KnownConversation | None:
        ours = self.ours(place)
        buried = {one.stream for one in ours if one.kind == "grave"}
        firsts = [one for one in ours if _begins(one) and one.stream not in buried]
        mine = [one for one in firsts if self._service.place(one.key) == place and key in (None, one.key)]
        if not mine:
            return None
        known = KnownConversation.begin(min(mine), place)
        known.take(ours if known.branch is None else self.ours(known.home, known.branch.name))
        return known if known.links or known.begun.kind == "fork" else None

    def ours(self, place: ActorSession, branch: str | None = None) -> list[StoredEvent]:
        """The events that are ours, the oldest first."""
        events = list(self._service.events(place, branch))
        return [one for event in reversed(events) if (one := stored_event(event)) is not None]


def _begins(event: StoredEvent) -> bool:
    head = event.head
    return event.kind == "fork" or (event.kind == "batch" and head["root"] and head["at"] == 0)
