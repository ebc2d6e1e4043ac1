"""An embedder without a model, for tests: texts with the same words are near, or with words said to be alike.

It imitates only the shape of one: the same text always has the same vector, and other words other ones. It
knows nothing of language, so what it finds says nothing of how well a real one finds.
"""

from collections.abc import Sequence
from hashlib import blake2b

from refold.core.query import fold

DIMENSIONS = 256


class WordEmbedder:
    """`alike` are groups of words that mean the same."""

    name = "words"

    def __init__(self, *alike: Sequence[str]) -> None:
        self._same = {word: group[0] for group in alike for word in group}
        self.asked: list[str] = []
        """Every text that it was given, in order."""

    def __call__(self, texts: Sequence[str], /) -> list[list[float]]:
        self.asked += texts
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        vector = [0.0] * DIMENSIONS
        for word in fold(text).split():
            for n, byte in enumerate(blake2b(self._same.get(word, word).encode(), digest_size=32).digest()):
                vector[byte] += 1.0 if n % 2 else -1.0
        return vector
