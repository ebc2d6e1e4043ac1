"""Every store that refold ships, held to the same contract."""

from functools import partial

import pytest

from refold.stores.memory import MemoryStore
from refold.stores.sqlite import SQLiteStore
from refold.testing import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestSQLite(StoreContract):
    @pytest.fixture
    def reopen(self, tmp_path):
        return partial(SQLiteStore, tmp_path / "refold.db")

    @pytest.fixture
    def store(self, reopen):
        store = reopen()
        yield store
        store.close()
