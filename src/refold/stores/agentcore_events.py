"""Events of AgentCore Memory, and the conversation that they add up to.

A batch of entries is one event of the conversation's session: a blob with the exact bytes of the entries, and
the messages in them as texts for the service. A batch too large for one event begins with `part` events, and
counts with the `batch` event after them.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import CorruptError, NewerError
from refold.stores.packing import to_text
from refold.stores.store import Key, SpokenMessage

Json: TypeAlias = dict[str, Any]
PackedEntry: TypeAlias = tuple[bytes, bytes | None, bytes, bytes]
"""Kind, id, head and body of an entry."""

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


def payloads(head: Json, entries: Sequence[Entry], messages: Iterable[SpokenMessage]) -> list[list[Json]]:
    """The payload of each event that a batch takes: one, unless it is very large."""
    rows = [(to_bytes(one.kind), None if one.id is None else to_bytes(one.id), *one[3:]) for one in entries]
    data = base64.b64encode(zlib.compress(msgspec.msgpack.encode(rows), 6)).decode()
    chunks = [data[start : start + MAX_BYTES] for start in range(0, len(data), MAX_BYTES)]
    events = list(zip_longest(_grouped(conversational(messages)), chunks))
    parts = len(events) - 1
    result = []
    for n, (texts, chunk) in enumerate(events):
        own = head | ({"parts": parts} if n == parts else {"kind": "part", "n": n})
        blob = f"refold event {VERSION}\n{json.dumps(own)}\n{chunk or ''}"
        result.append([*(texts or ()), {"blob": blob}])
    return result


def conversational(messages: Iterable[SpokenMessage]) -> Iterator[Json]:
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


@dataclass(slots=True)
class KnownConversation:
    """A conversation as far as this process has read it."""

    first: StoredEvent
    """The batch that it began with."""
    tip: str = ""
    """Id of the newest batch that was read."""
    links: list[Link] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        """Tells the conversation from an earlier one of the same name."""
        return str(self.first.head["stream"])

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
