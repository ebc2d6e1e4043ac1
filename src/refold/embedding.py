"""What texts mean, as vectors: a small model on this machine's CPU, with the extra `search`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from refold.core.errors import SettingError

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
