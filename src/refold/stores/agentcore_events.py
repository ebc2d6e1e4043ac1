"""What is in an event: one blob with the exact bytes, and beside it what was said, for the service."""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold.core.codec import Entry, Link, chain, to_bytes
from refold.core.errors import CorruptError, NewerError
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


class Seen(NamedTuple):
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


def seen(event: Json) -> Seen | None:
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
                return Seen(event["eventId"], json.loads(head), data)
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


def links(batch: Seen, parts: Sequence[Seen]) -> list[Link]:
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
        raise CorruptError(f"Event {batch.id} was altered: its digest is another")
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
