"""Who may pay for a summary: for stores that have leases."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from refold.core.errors import ConflictError
from refold.stores.store import Key, Lease, Leases
from refold.testing.words import KEY, Reopen, demand, entries, verified


class LeasesContract:
    @pytest.fixture
    def leases(self, store: Any) -> Any:
        store.append(KEY, entries(0, 1))
        return store if isinstance(store, Leases) else pytest.skip("this store has no leases")

    # proves: C14
    def test_a_lease_has_one_holder_until_it_runs_out(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        assert lease == ("a", "me", lease.fence, 110.0)
        assert leases.acquire(KEY, "a", "you", 109.9, 10.0) is None
        assert list(leases.leases(KEY, 109.9)) == [lease]
        assert list(leases.leases(KEY, 110.0)) == []
        assert leases.acquire(KEY, "a", "you", 110.0, 10.0).holder == "you"
        assert leases.acquire(KEY, "b", "me", 110.0, 10.0).holder == "me"
        assert leases.acquire(Key(KEY.owner, "no such"), "a", "me", 0.0, 10.0) is None

    def test_a_lease_held_again_lasts_longer_and_keeps_its_fence(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a\ud800", "me\x00", 100.0, 10.0)
        assert leases.acquire(KEY, "a\ud800", "me\x00", 105.0, 10.0) == lease._replace(until=115.0)
        assert leases.acquire(KEY, "a\ud800", "me", 114.0, 10.0) is None

    def test_the_fence_grows_with_every_holder(self, leases: Any) -> None:
        held = [leases.acquire(KEY, "a", str(n), 100.0 * n, 10.0) for n in range(5)]
        fences = [lease.fence for lease in held]
        assert fences == sorted(set(fences))
        leases.release(KEY, held[-1])
        assert leases.acquire(KEY, "a", "next", 401.0, 10.0).fence > fences[-1]

    def test_only_the_current_fence_releases_a_lease(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        current = leases.acquire(KEY, "a", "current", 200.0, 10.0)
        leases.release(KEY, late)
        assert list(leases.leases(KEY, 201.0)) == [current]
        leases.release(KEY, current)
        assert list(leases.leases(KEY, 201.0)) == []
        assert leases.acquire(KEY, "a", "next", 201.0, 10.0) is not None

    def test_leases_are_erased_with_the_conversation(self, leases: Any) -> None:
        leases.acquire(KEY, "a", "me", 100.0, 10.0)
        leases.erase(KEY)
        leases.append(KEY, entries(0, 1))
        assert list(leases.leases(KEY, 101.0)) == []
        assert leases.acquire(KEY, "a", "you", 101.0, 10.0) is not None

    def test_a_late_release_frees_nothing_that_began_anew(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        leases.erase(KEY)
        leases.append(KEY, entries(0, 1))
        current = leases.acquire(KEY, "a", "current", 101.0, 10.0)
        leases.release(KEY, late)
        assert list(leases.leases(KEY, 102.0)) == [current]
        leases.append(KEY, entries(1, 2), lease=current)

    # The fence of an append

    def test_the_current_holder_appends_though_its_time_ran_out(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a\ud800", "me\x00", 100.0, 10.0)
        digest = leases.append(KEY, entries(1, 2), lease=lease)
        assert leases.acquire(KEY, "a\ud800", "me\x00", 500.0, 10.0).until > lease.until
        leases.append(KEY, entries(2, 3), after=digest, lease=lease)
        assert leases.append(KEY, [], lease=lease)
        assert verified(leases, KEY) == entries(0, 3)

    # proves: C14
    def test_a_late_holder_appends_nothing(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        current = leases.acquire(KEY, "a", "current", 200.0, 10.0)
        for batch in (entries(1, 3), entries(7, 8), []):
            with pytest.raises(ConflictError, match=r"'late' no longer holds 'a'"):
                leases.append(KEY, batch, lease=late)
        assert verified(leases, KEY) == entries(0, 1)
        leases.append(KEY, entries(1, 2, "current"), lease=current)
        with pytest.raises(ConflictError, match="goes on at 2"):
            leases.append(KEY, entries(1, 2), lease=current)
        leases.append(KEY, entries(2, 3))
        assert verified(leases, KEY) == entries(0, 1) + entries(1, 2, "current") + entries(2, 3)

    def test_a_released_lease_appends_nothing_until_it_is_acquired_again(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        leases.release(KEY, lease)
        with pytest.raises(ConflictError, match="acquire it again"):
            leases.append(KEY, entries(1, 2), lease=lease)
        assert verified(leases, KEY) == entries(0, 1)
        leases.append(KEY, entries(1, 2), lease=leases.acquire(KEY, "a", "me", 105.0, 10.0))
        assert verified(leases, KEY) == entries(0, 2)

    @pytest.mark.parametrize(
        "other", [{"name": "b"}, {"holder": "you"}, {"holder": "me\x00"}, {"fence": 9}, {"fence": 0}]
    )
    def test_a_lease_that_differs_from_the_current_one_appends_nothing(
        self, leases: Any, other: dict[str, Any]
    ) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        leases.acquire(KEY, "b", "you", 100.0, 10.0)
        with pytest.raises(ConflictError, match="no longer holds"):
            leases.append(KEY, entries(1, 2), lease=lease._replace(**other))
        assert verified(leases, KEY) == entries(0, 1)

    def test_a_lease_is_of_one_conversation_and_goes_with_it(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        other = Key(KEY.owner, "another")
        for stored in ([], entries(0, 1)):
            leases.append(other, stored)
            with pytest.raises(ConflictError, match="no longer holds"):
                leases.append(other, entries(len(stored), len(stored) + 1), lease=lease)
            assert verified(leases, other) == stored
        leases.erase(KEY)
        with pytest.raises(ConflictError, match="no longer holds"):
            leases.append(KEY, entries(0, 1), lease=lease)
        assert [row.key for row in leases.conversations()] == [other]

    def test_a_late_holder_disturbs_nobody_who_appends_at_the_same_moment(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        current = leases.acquire(KEY, "a", "current", 200.0, 10.0)
        keys = [Key(KEY.owner, str(n)) for n in range(4)]
        barrier = Barrier(8)

        def write(key: Key, start: int, lease: Lease | None, text: str) -> int:
            """How many of ten appends were refused."""
            barrier.wait()
            refused = 0
            for at in range(start, start + 10):
                try:
                    leases.append(key, entries(at, at + 1, text), lease=lease)
                except ConflictError:
                    refused += 1
            return refused

        tasks = [(key, 0, None, "") for key in keys] + [(KEY, 1, current, "current")]
        tasks += [(KEY, 1, late, "late")] * 3
        with ThreadPoolExecutor(8) as pool:
            refused = list(pool.map(write, *zip(*tasks, strict=True)))
        assert refused == [0] * 5 + [10] * 3
        assert [verified(leases, key) for key in keys] == [entries(0, 10)] * 4
        assert verified(leases, KEY) == entries(0, 1) + entries(1, 11, "current")

    def test_a_late_holder_is_told_from_the_current_one_when_the_store_is_opened_again(
        self, leases: Any, reopen: Reopen | None
    ) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        other: Any = demand(reopen)()
        other.append(KEY, entries(1, 2), lease=late)
        current = other.acquire(KEY, "a", "current", 200.0, 10.0)
        for store in (leases, other):
            with pytest.raises(ConflictError, match="no longer holds"):
                store.append(KEY, entries(2, 3), lease=late)
        leases.append(KEY, entries(2, 3), lease=current)
        assert verified(other, KEY) == entries(0, 3)
        other.close()
