"""Every store that refold ships, held to the same contract."""

from functools import partial
from pathlib import Path

import pytest

from refold.stores.agentcore import AgentCoreStore
from refold.stores.memory import MemoryStore
from refold.stores.postgres import PostgresStore
from refold.stores.redis import RedisStore
from refold.stores.shelf import Shelf
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import Forks, Memories, RemoteReads, SearchIndex
from refold.testing import StoreContract
from session_contract import SessionsContract


# proves: B4a
class TestMemory(StoreContract, SessionsContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()


# proves: B4b
class TestSQLite(StoreContract, SessionsContract):
    @pytest.fixture
    def reopen(self, tmp_path):
        return partial(SQLiteStore, tmp_path / "refold.db")

    @pytest.fixture
    def store(self, reopen):
        store = reopen()
        yield store
        store.close()


ROWS = {
    "forks": Forks,
    "snapshots: opens at once": Shelf,
    "leases: one summary paid for": Shelf,
    "settings in the store": Shelf,
    "an index for search": SearchIndex,
    "waits for others' appends": RemoteReads,
    "memories": Memories,
}


def test_the_page_on_stores_says_what_each_can_do():
    text = (Path(__file__).parents[1] / "docs" / "stores" / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    stores = {"memory": MemoryStore, "sqlite": SQLiteStore, "postgresql": PostgresStore}
    stores |= {"redis": RedisStore, "agentcore": AgentCoreStore}
    names, told = table[0], {row[0]: row for row in table[2:]}
    for name, store in stores.items():
        for row, protocol in ROWS.items():
            verbs = [verb for verb in vars(protocol) if verb[0] != "_"]
            has = all(hasattr(store, verb) for verb in verbs)
            assert told[row][names.index(name)] == ("yes" if has else "no"), (name, row)
        able = "compare-and-append" not in getattr(store, "cannot", {})
        assert told["compare-and-append"][names.index(name)] == ("yes" if able else "no")
