"""The nearest vectors, by comparing all of them; with numpy if it is installed."""

from array import array
from collections.abc import Iterable
from heapq import nlargest
from operator import mul
from typing import TypeVar

T = TypeVar("T")


def nearest(vector: bytes, rows: Iterable[tuple[T, bytes]], limit: int) -> list[tuple[T, float]]:
    """The names with the nearest vectors and their cosines, the nearest first; other lengths are skipped."""
    kept = [row for row in rows if len(row[1]) == len(vector)]
    best: dict[T, float] = {}
    for (name, _), score in zip(kept, _cosines(vector, [blob for _, blob in kept]), strict=True):
        if score > best.get(name, -2.0):
            best[name] = score
    return nlargest(limit, best.items(), key=lambda one: one[1])


def _cosines(vector: bytes, blobs: list[bytes]) -> list[float]:
    if not blobs:
        return []
    try:
        import numpy
    except ImportError:
        query = array("f", vector)
        return [sum(map(mul, query, memoryview(blob).cast("f"))) for blob in blobs]
    matrix = numpy.frombuffer(b"".join(blobs), numpy.float32).reshape(len(blobs), -1)
    scores: list[float] = (matrix @ numpy.frombuffer(vector, numpy.float32)).tolist()
    return scores
