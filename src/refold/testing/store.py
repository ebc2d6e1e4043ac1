"""Everything that is demanded of a store, in one class to subclass."""

import pytest

from refold.testing.samples import Reopen
from refold.testing.store_forks import ForksContract, IdsContract, LocatedContract
from refold.testing.store_log import BatchesContract, StreamsContract, WritersContract
from refold.testing.store_search import SearchContract
from refold.testing.store_values import SettingsContract, ShelfContract


class StoreContract(
    StreamsContract,
    WritersContract,
    IdsContract,
    LocatedContract,
    ForksContract,
    ShelfContract,
    SettingsContract,
    SearchContract,
    BatchesContract,
):
    """All of it. The fixture `store` gives a new, empty store."""

    @pytest.fixture
    def reopen(self) -> Reopen | None:
        """What opens the same store again, in other processes too, and so can be pickled; or None."""
        return None
