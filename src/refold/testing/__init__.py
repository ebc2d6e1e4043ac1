"""What every store must do, as tests: subclass `StoreContract`, say how to open yours, run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path / "log")

        @pytest.fixture
        def reopen(self, tmp_path):  # only where what is stored outlives the process
            return partial(MyStore, tmp_path / "log")

Streams, writers and sessions are demanded of every store; ids, forks, snapshots, leases, notes,
summaries, settings, search and cursors of those that have them (`refold.stores.store` says what each is).
What a store says in `cannot` that its engine is not able to do is skipped, with its own words.
For tests only: this needs pytest and hypothesis, which refold itself does not.
`pytest.register_assert_rewrite("refold.testing")` in a conftest.py makes failures talk.
"""

import pytest

from refold.testing.batches import BatchesContract
from refold.testing.cursors import CursorsContract
from refold.testing.forks import ForksContract
from refold.testing.ids import IdsContract, LocatedContract
from refold.testing.leases import LeasesContract
from refold.testing.notes import NotesContract
from refold.testing.search import SearchContract
from refold.testing.sessions import SessionsContract
from refold.testing.settings import SettingsContract
from refold.testing.snapshots import SnapshotsContract
from refold.testing.streams import StreamsContract
from refold.testing.summaries import SummariesContract
from refold.testing.words import Reopen
from refold.testing.writers import WritersContract

__all__ = ["StoreContract"]


class StoreContract(
    StreamsContract,
    WritersContract,
    SessionsContract,
    IdsContract,
    LocatedContract,
    ForksContract,
    SnapshotsContract,
    LeasesContract,
    NotesContract,
    SummariesContract,
    SettingsContract,
    SearchContract,
    BatchesContract,
    CursorsContract,
):
    """All of it. The fixture `store` gives a new, empty store."""

    @pytest.fixture
    def reopen(self) -> Reopen | None:
        """What opens the same store again, in other processes too, and so can be pickled; or None."""
        return None
