"""How stores keep bodies and texts: bodies are compressed where that helps, texts are bytes.

>>> unpack(pack(b"{}")), len(pack(b"again and " * 1_000)) < 100
(b'{}', True)
"""

import zlib
from hashlib import blake2b

from refold.core.codec import to_bytes
from refold.core.errors import CorruptError
from refold.stores.store import Key

MIN_COMPRESSED_BYTES = 1_000


def pack(body: bytes) -> bytes:
    """A body that begins with `x` is always compressed, so that `unpack` can tell the two apart."""
    must_compress = body[:1] == b"x"
    if len(body) <= MIN_COMPRESSED_BYTES and not must_compress:
        return body
    packed = zlib.compress(body, 1)
    return packed if must_compress or len(packed) < len(body) else body


def unpack(body: bytes) -> bytes:
    """Raises CorruptError if the body was altered."""
    if body[:1] != b"x":
        return body
    try:
        return zlib.decompress(body)
    except zlib.error as error:
        raise CorruptError(f"A stored body cannot be unpacked: {error}") from error


def to_text(data: bytes) -> str:
    """Raises CorruptError if the bytes were altered."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except (UnicodeDecodeError, AttributeError) as error:
        raise CorruptError(f"A stored name or id is not valid text: {data!r}") from error


def key_digest(key: Key) -> str:
    """A name of a conversation that any service accepts, whatever characters the conversation's own has."""
    owner, conversation = map(to_bytes, key)
    return blake2b(b"%d:%b%b" % (len(owner), owner, conversation), digest_size=16).hexdigest()
