"""Token counts of images, documents and sounds, from their first bytes and each provider's rule."""

import re
from base64 import b64decode
from collections.abc import Callable
from math import ceil, floor, sqrt
from typing import TypeAlias

import msgspec

from refold.core.message import Media

USUAL = (1920, 1080)
"""Pixels of an image of unknown size: a screen."""
LARGEST = 65_535
"""Pixels of a side; a header with more is ignored."""
HEADER_BYTES = 256 * 1024
"""Bytes of an image that are searched for its size, which follows the metadata of a camera."""
SCANNED_BYTES = 8 * 1024 * 1024
"""Bytes of a document in which pages are counted; the rest is assumed to be similar."""
PAGE_BYTES = 30_000
"""Bytes of a page, in a document that does not list its pages."""
SOUND_BYTES_PER_SECOND = 4_000
"""For a sound of unknown length: compressed speech."""

Rule: TypeAlias = Callable[[int, int], int]
"""Tokens by width and height in pixels."""
MOST_CROPS = 64


class Tiles(msgspec.Struct, frozen=True):
    """OpenAI: scaled to 2048 pixels and a short side of 768, then so many tokens for each square of 512."""

    base: int
    tile: int

    def __call__(self, width: int, height: int) -> int:
        scale = min(1.0, 2048 / max(width, height))
        scale = min(scale, 768 / min(width, height))
        return self.base + self.tile * ceil(width * scale / 512) * ceil(height * scale / 512)


class Patches(msgspec.Struct, frozen=True):
    """OpenAI: squares of 32 pixels, up to a budget and a longest side, times a factor.

    >>> Patches(1.0, 1_536, 2_048)(1800, 2400)
    1452
    """

    factor: float
    budget: int
    side: int

    def __call__(self, width: int, height: int) -> int:
        scale = min(1.0, self.side / max(width, height))
        wide, high = width * scale, height * scale
        if ceil(wide / 32) * ceil(high / 32) > self.budget:
            shrink = sqrt(32 * 32 * self.budget / (wide * high))
            wide, high = wide * shrink, high * shrink
            shrink = min(max(1, floor(wide / 32)) / (wide / 32), max(1, floor(high / 32)) / (high / 32))
            wide, high = floor(wide * shrink + 1e-6), floor(high * shrink + 1e-6)
        return ceil(min(self.budget, ceil(wide / 32) * ceil(high / 32)) * self.factor)


class Grid(msgspec.Struct, frozen=True):
    """Anthropic and others: squares of so many pixels, scaled down to a budget.

    >>> Grid(28, 1_568, 1_568)(1920, 1080), Grid(28, 2_576, 4_784)(3840, 2160)
    (1560, 4784)
    """

    pixels: int
    side: int
    budget: int

    def __call__(self, width: int, height: int) -> int:
        scale = min(1.0, self.side / max(width, height))
        columns, rows = self._cells(width, height, scale)
        if columns * rows <= self.budget:
            return columns * rows
        scales = [n * self.pixels / width for n in range(1, columns)]
        scales += [n * self.pixels / height for n in range(1, rows)]
        grids = [self._cells(width, height, smaller) for smaller in scales if smaller < scale]
        return max((wide * high for wide, high in grids if wide * high <= self.budget), default=self.budget)

    def _cells(self, width: int, height: int, scale: float) -> tuple[int, int]:
        wide, high = width * scale / self.pixels, height * scale / self.pixels
        return max(1, ceil(wide - 1e-9)), max(1, ceil(high - 1e-9))


class Crops(msgspec.Struct, frozen=True):
    """Google, up to Gemini 2.5: one tile for a small image, else crops of two thirds of the short side."""

    tile: int = 258

    def __call__(self, width: int, height: int) -> int:
        if max(width, height) <= 384:
            return self.tile
        unit = max(1, floor(min(width, height) / 1.5))
        return self.tile * min(MOST_CROPS, ceil(width / unit) * ceil(height / unit))


class Flat(msgspec.Struct, frozen=True):
    """The same number for each image."""

    tokens: int

    def __call__(self, width: int, height: int) -> int:
        return self.tokens


class Rates(msgspec.Struct, frozen=True):
    """The tokens of media for one model."""

    image: Rule
    page: int = 1_500
    """Of a PDF: its text, and its image if the provider reads that, too."""
    second: float = 32
    """Of sound."""

    def tokens(self, media: Media) -> int:
        found = media.inline
        if media.kind == "image":
            return self.image(*(size(_head(found[1])) if found else None) or USUAL)
        if media.kind == "audio":
            return ceil(self.second * (seconds(_head(found[1]), len(found[1]) * 3 // 4) if found else 60))
        return self.page * (_pages(found[1]) if found else 1)


def words(media: Media) -> str | None:
    """The text of a text file; None for other media."""
    found = media.inline
    if media.kind != "file" or found is None or not found[0].startswith("text/"):
        return None
    return _bytes(found[1]).decode("utf-8", "replace")


def size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of a PNG, JPEG, GIF or WebP; None for anything else."""
    found = None
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        found = _int(data[16:20]), _int(data[20:24])
    elif data.startswith(b"\xff\xd8"):
        found = _jpeg(data)
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        found = _little(data[6:8]), _little(data[8:10])
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = _webp(data)
    return found if found and 0 < min(found) <= max(found) <= LARGEST else None


def pages(data: bytes) -> int:
    """The number of pages of a PDF: as it lists them, as its header says, or by its length."""
    listed = len(_PAGE.findall(data))
    said = _PAGES.search(data[:2048])
    return listed or (int(said[1]) if said else 0) or max(1, ceil(len(data) / PAGE_BYTES))


def seconds(head: bytes, length: int) -> float:
    """The length of a sound in seconds: a WAV says how many bytes a second has."""
    said = _little(head[28:32]) if head[:4] == b"RIFF" and head[8:12] == b"WAVE" else 0
    return length / max(said, SOUND_BYTES_PER_SECOND)


_PAGE = re.compile(rb"/Type\s*/Page(?![a-zA-Z])")
_PAGES = re.compile(rb"/Linearized[^>]*/N\s+(\d{1,6})\b")


def _jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        kind = data[at + 1]
        if kind == 0xFF:  # padding
            at += 1
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return _int(data[at + 7 : at + 9]), _int(data[at + 5 : at + 7])
        else:
            at += 2 + _int(data[at + 2 : at + 4])
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    match data[12:16]:
        case b"VP8 ":
            return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF
        case b"VP8L":
            bits = _little(data[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return _little(data[24:27]) + 1, _little(data[27:30]) + 1
    return None


def _int(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _pages(data: str) -> int:
    scanned = data[: SCANNED_BYTES // 3 * 4]
    return round(pages(_bytes(scanned)) * len(data) / max(1, len(scanned))) or 1


def _head(data: str) -> bytes:
    return _bytes(data[: HEADER_BYTES // 3 * 4])


def _bytes(data: str) -> bytes:
    """The decoded base64; empty if it is invalid."""
    try:
        return b64decode(data + "=" * (-len(data) % 4))
    except ValueError:
        return b""
