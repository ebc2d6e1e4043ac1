"""What every store must do, as tests: subclass `StoreContract`, say how to open yours, run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path / "log")

        @pytest.fixture
        def reopen(self, tmp_path):  # only where what is stored outlives the process
            return partial(MyStore, tmp_path / "log")

Streams and writers are demanded of every store; a shelf, ids, forks, settings and search of those
that have them (`refold.stores.shelf` and `refold.stores.store` say what each is).
What a store says in `cannot` that its engine is not able to do is skipped, with its own words.
Adapters have an `AdapterContract`. Both need pytest and hypothesis, which refold itself does not, and neither
do the fakes beside them: models, services and an embedder.
`pytest.register_assert_rewrite("refold.testing")` in a conftest.py makes failures talk.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refold.testing.adapters import AdapterContract
    from refold.testing.store import StoreContract

__all__ = ["AdapterContract", "StoreContract"]

_HOMES = {"AdapterContract": "adapters", "StoreContract": "store"}


def __getattr__(name: str) -> Any:
    """Loaded when they are asked for: whoever needs a fake has no pytest, perhaps."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
