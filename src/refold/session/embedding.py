"""Embeddings: any callable, or a small model on this machine's CPU with the extra `search`."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import sqrt
from typing import Any, TypeAlias

from refold.core.errors import SettingError
from refold.stores.nearest import nearest

PIECE_CHARS = 1_500
"""Of the text behind one vector."""
MAX_PIECES_PER_MESSAGE = 8
MAX_CACHED_VECTORS = 2_000
Embedder: TypeAlias = Callable[[Sequence[str]], Iterable[Iterable[float]]]
"""From texts to vectors, one for each. If it has a `name`, vectors are stored under it."""


class Model2Vec:
    """A static model, by its name on the hub such as `minishlab/potion-base-8M`, or by its folder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model: Any = None

    def __call__(self, texts: Sequence[str]) -> Iterable[Iterable[float]]:
        """Raises SettingError if the extra is not installed, or there is no such model."""
        if self._model is None:
            self._model = self._load()
        vectors: Iterable[Iterable[float]] = self._model.encode(list(texts))
        return vectors

    def _load(self) -> Any:
        try:
            from model2vec import StaticModel

            return StaticModel.from_pretrained(self.name)
        except ImportError as error:
            problem = f'{self.name!r} needs the extra `search`: pip install "refold[search]"'
            raise SettingError("embedder", problem) from error
        except Exception as error:  # the hub cannot be reached, the name is unknown, a file is broken
            raise SettingError("embedder", f"{self.name!r} cannot be loaded: {error}") from error


def embedder_of(given: Any) -> Embedder | None:
    """Raises SettingError if it is neither a callable nor the name of a model."""
    if isinstance(given, str) and given:
        return Model2Vec(given)
    if given is not None and not callable(given):
        expected = "expected a callable from texts to vectors, or the name of a model"
        raise SettingError("embedder", f"{expected}; got {type(given).__name__}")
    embedder: Embedder | None = given
    return embedder


def pieces_of(text: str) -> list[str]:
    """A text in pieces, each for one vector."""
    starts = range(0, min(len(text), PIECE_CHARS * MAX_PIECES_PER_MESSAGE), PIECE_CHARS)
    pieces = [text[start : start + PIECE_CHARS] for start in starts]
    return [piece for piece in pieces if piece.strip()]


def unit_vectors(embedder: Embedder, texts: Sequence[str]) -> list[bytes | None]:
    """Vectors of length 1, as bytes; None for a text whose vector is zero.

    Raises:
        ValueError: the embedder returned another number of vectors.
    """
    if not texts:
        return []
    vectors = [array("f", map(float, vector)) for vector in embedder(texts)]
    if len(vectors) != len(texts):
        raise ValueError(f"{len(vectors)} vectors for {len(texts)} texts")
    return list(map(_unit_vector, vectors))


def _unit_vector(vector: "array[float]") -> bytes | None:
    length = sqrt(sum(x * x for x in vector))
    return array("f", (x / length for x in vector)).tobytes() if length > 0 else None


class Similarity:
    """How near texts are in meaning. Caches vectors."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._vectors: dict[str, bytes | None] = {}

    def __call__(self, texts: Sequence[str], others: Sequence[str]) -> list[float]:
        """For each text, its cosine to the nearest of the others; 0 if the embedder fails."""
        pieces = list(map(pieces_of, texts))
        other_pieces = list(chain.from_iterable(map(pieces_of, others)))
        try:
            self._embed([*other_pieces, *chain.from_iterable(pieces)])
        except Exception as error:  # an embedder may raise anything; relevance by words does not need it
            warnings.warn(f"Relevance goes by words only: the embedder failed ({error!r})", stacklevel=2)
            return [0.0] * len(texts)
        known = [(None, vector) for piece in other_pieces if (vector := self._vectors[piece])]
        return [self._nearest(some, known) for some in pieces]

    def _embed(self, pieces: Sequence[str]) -> None:
        if len(self._vectors) > MAX_CACHED_VECTORS:
            self._vectors.clear()
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._vectors]
        self._vectors.update(zip(new, unit_vectors(self._embedder, new), strict=True))

    def _nearest(self, pieces: Sequence[str], others: Sequence[tuple[None, bytes]]) -> float:
        best = 0.0
        for piece in pieces:
            if vector := self._vectors[piece]:
                best = max([best, *(cosine for _, cosine in nearest(vector, others, 1))])
        return min(1.0, best)
