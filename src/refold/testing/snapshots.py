"""A view to start from, equal to one built from the beginning: for stores that keep snapshots."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.core.errors import ConflictError, NotFoundError, OverBudgetError
from refold.session.api import open
from refold.stores.store import Snapshot, Snapshots
from refold.testing.words import KEY, TINY, calling, demand_folded, do, entries, examples, unique, verified

DEEDS = ["user", "user", "calls", "result", "fit", "compact", "pin", "unpin", "undo", "restore", "reopen"]


class SnapshotsContract:
    @pytest.fixture
    def snapshots(self, store: Any) -> Any:
        return store if isinstance(store, Snapshots) else pytest.skip("this store keeps no snapshots")

    def test_the_newest_snapshot_of_each_view_is_kept(self, snapshots: Any) -> None:
        snapshots.save(KEY, "main", Snapshot(1, b"of nothing", b"digest"))
        assert snapshots.saved(KEY) == {}
        snapshots.append(KEY, entries(0, 9))
        old, new, other = (Snapshot(at, b"\x00x%d" % at, b"digest") for at in (3, 5, 4))
        for view, snapshot in (("main", old), ("main", new), ("main", old), ("an\ud800other", other)):
            snapshots.save(KEY, view, snapshot)
        assert snapshots.saved(KEY) == {"main": new, "an\ud800other": other}
        snapshots.erase(KEY)
        snapshots.append(KEY, entries(0, 9))
        assert snapshots.saved(KEY) == {}

    @examples
    @given(st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 25)), min_size=10, max_size=60))
    def test_a_session_opened_from_a_snapshot_equals_the_fold(
        self, snapshots: Any, deeds: list[tuple[str, int]]
    ) -> None:
        opening = partial(open, f"conversation {next(unique)}", store=snapshots, model="tiny", config=TINY)
        session = opening()
        for deed, n in deeds:
            with suppress(NotFoundError, ConflictError, OverBudgetError):
                do(session, deed, n)
            if deed == "reopen":
                demand_folded(session)
                session.close()
                session = opening()
                saved = snapshots.saved(session.key)
                assert saved["main"].at if list(session.events()) else not saved
            demand_folded(session)
        assert len(verified(snapshots, session.key)) == len(list(session.events()))

    def test_snapshots_are_kept_whatever_the_ids_of_calls_are(self, snapshots: Any) -> None:
        session = open("a", store=snapshots)
        for n in range(80):
            session.append(calling(f"call \ud800 {n}"))
        assert snapshots.saved(session.key)["main"].at >= 64
        demand_folded(open("a", store=snapshots))
