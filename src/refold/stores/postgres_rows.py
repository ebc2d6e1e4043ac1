"""How names and entries stand in rows of PostgreSQL: all as bytes, since its texts refuse some characters."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from refold.core.codec import Entry, to_bytes
from refold.core.errors import CorruptError
from refold.stores.packing import unpack
from refold.stores.store import Key


@lru_cache(10_000)
def owner_digest(owner: str) -> bytes:
    return blake2b(to_bytes(owner), digest_size=16).digest()


@lru_cache(10_000)
def key_digest(key: Key) -> bytes:
    """What a conversation is found by, whatever is in its name and however long that is."""
    return blake2b(to_bytes(key.conversation), digest_size=16, key=owner_digest(key.owner)).digest()


def to_entry(row: Sequence[Any]) -> Entry:
    """
    Raises:
        CorruptError: it was altered.
    """
    at, kind, id, head, body, *_ = row
    return Entry(at, to_text(kind), None if id is None else to_text(id), head, unpack(body))


def to_text(data: bytes) -> str:
    """
    Raises:
        CorruptError: it was altered.
    """
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptError(f"A stored name or id is no text: {data!r}") from error
