"""Bodies as stores keep them: compressed where it is worth it.

>>> unpack(pack(b"{}")), len(pack(b"again and " * 1_000)) < 100
(b'{}', True)
"""

import zlib

from refold.core.errors import CorruptError

SMALL_BYTES = 1_000
"""Bodies up to this size are not worth compressing."""


def pack(body: bytes) -> bytes:
    if len(body) <= SMALL_BYTES and body[:1] != b"x":
        return body
    packed = zlib.compress(body, 1)
    return packed if len(packed) < len(body) or body[:1] == b"x" else body


def unpack(body: bytes) -> bytes:
    """
    Raises:
        CorruptError: it was altered.
    """
    if body[:1] != b"x":
        return body
    try:
        return zlib.decompress(body)
    except zlib.error as error:
        raise CorruptError(f"A stored body cannot be unpacked: {error}") from error
