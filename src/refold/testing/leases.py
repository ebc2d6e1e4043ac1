"""Who may pay for a summary: for stores that have leases."""

from typing import Any

import pytest

from refold.stores.store import Key, Leases
from refold.testing.words import KEY, entries


class LeasesContract:
    @pytest.fixture
    def leases(self, store: Any) -> Any:
        store.append(KEY, entries(0, 1))
        return store if isinstance(store, Leases) else pytest.skip("this store has no leases")

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
