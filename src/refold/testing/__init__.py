"""Tests for stores of your own, and fakes for your own tests.

`store.py` puts the contract together from `store_log.py`, `store_forks.py`, `store_search.py` and
`store_values.py`. `stand_in.py` and `model.py` are fake models, `scribe.py` a fake summarizer.

`StoreContract` tests what every store must do. Subclass it, and say how your store is opened:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path / "log")

        @pytest.fixture
        def reopen(self, tmp_path):  # only if what is stored outlives the process
            return partial(MyStore, tmp_path / "log")

Every store must pass the tests of streams and writers; those of a shelf, ids, forks and search run if the
store has the methods (`refold.stores.shelf`, `refold.stores.store`). What it lists in `cannot` is skipped.
The contract needs pytest and hypothesis, which refold does not install; the fakes need neither.
`pytest.register_assert_rewrite("refold.testing")` in a conftest.py makes failed assertions show their values.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refold.testing.store import StoreContract

__all__ = ["StoreContract"]


def __getattr__(name: str) -> Any:
    """Imports the contract when it is first used: the fakes must work without pytest."""
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from refold.testing.store import StoreContract

    return StoreContract
