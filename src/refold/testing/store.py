"""Everything that is demanded of a store, in one class to subclass."""

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
