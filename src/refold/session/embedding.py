"""What texts mean, as vectors: a small model on this machine's CPU, with the extra `search`."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from typing import Any, TypeAlias

from refold.core.errors import SettingError

PIECE_CHARS, MOST_PIECES = 1_500, 8
"""What one vector stands for, and how many a message has: what is longer is known by its beginning."""
MOST_VECTORS = 2_000
"""That are remembered while a session lasts."""
Embedder: TypeAlias = Callable[[Sequence[str]], Iterable[Iterable[float]]]
"""From texts to vectors, one for each. If it has a `name`, vectors are kept under it."""


class Model2Vec:
    """A static model by its name on the hub, such as `minishlab/potion-base-8M`, or its folder here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model: Any = None

    def __call__(self, texts: Sequence[str]) -> Iterable[Iterable[float]]:
        """
        Raises:
            SettingError: the extra is not installed, or there is no such model.
        """
        self._model = self._model or _load(self.name)
        vectors: Iterable[Iterable[float]] = self._model.encode(list(texts))
        return vectors


def _load(name: str) -> Any:
    try:
        from model2vec import StaticModel
    except ImportError as error:
        raise SettingError(
            "embedder", f'{name!r} needs the extra `search`: pip install "refold[search]"'
        ) from error
    try:
        return StaticModel.from_pretrained(name)
    except Exception as error:  # a hub that cannot be reached, a name that is not there, a broken file
        raise SettingError("embedder", f"{name!r} cannot be loaded: {error}") from error


def embedder_of(given: Any) -> Embedder | None:
    """
    Raises:
        SettingError: it is no callable and no name of a model.
    """
    if given is None:
        return None
    if callable(given):
        found: Embedder = given
        return found
    if isinstance(given, str) and given:
        return Model2Vec(given)
    raise SettingError(
        "embedder", f"a callable from texts to vectors, or the name of a model; got {type(given).__name__}"
    )


def pieces_of(text: str) -> list[str]:
    """A text in pieces that are each worth a vector."""
    starts = range(0, min(len(text), PIECE_CHARS * MOST_PIECES), PIECE_CHARS)
    return [piece for start in starts if (piece := text[start : start + PIECE_CHARS]).strip()]


def unit_vectors(embedder: Embedder, texts: Sequence[str]) -> list[bytes | None]:
    """Vectors of length 1, as bytes; None for a text whose vector points nowhere.

    Raises:
        ValueError: the embedder returned another number of vectors.
    """
    if not texts:
        return []
    made = [array("f", map(float, vector)) for vector in embedder(texts)]
    if len(made) != len(texts):
        raise ValueError(f"{len(made)} vectors for {len(texts)} texts")
    lengths = [sqrt(sum(x * x for x in vector)) for vector in made]
    return [
        array("f", (x / length for x in vector)).tobytes() if length > 0 else None
        for vector, length in zip(made, lengths, strict=True)
    ]


class Similarity:
    """How near texts are in meaning. Remembers the vectors of what it was asked before."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._known: dict[str, array[float]] = {}

    def __call__(self, texts: Sequence[str], others: Sequence[str]) -> list[float]:
        """For each text, its cosine to the nearest of the others; 0 where the embedder fails."""
        pieces = [pieces_of(text) for text in texts]
        wanted = [piece for other in others for piece in pieces_of(other)]
        try:
            self._learn([*wanted, *(piece for some in pieces for piece in some)])
        except Exception as error:  # whatever an embedder raises: relevance goes by words without it
            warnings.warn(f"Relevance goes by words only: the embedder failed ({error!r})", stacklevel=2)
            return [0.0] * len(texts)
        return [self._nearest(some, wanted) for some in pieces]

    def _learn(self, pieces: Sequence[str]) -> None:
        wanted = dict.fromkeys(pieces)
        new = [piece for piece in wanted if piece not in self._known]
        for piece, data in zip(new, unit_vectors(self._embedder, new), strict=True):
            self._known[piece] = array("f", data or b"")
        for piece in wanted:  # what was wanted last is forgotten last
            self._known[piece] = self._known.pop(piece)
        for piece in list(self._known)[: -max(MOST_VECTORS, len(wanted))]:
            del self._known[piece]

    def _nearest(self, pieces: Sequence[str], others: Sequence[str]) -> float:
        nearest = 0.0
        for piece in pieces:
            for other in others:
                pairs = zip(self._known[piece], self._known[other], strict=False)
                nearest = max(nearest, sum(x * y for x, y in pairs))
        return min(1.0, nearest)
