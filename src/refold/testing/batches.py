"""What is answered in one go, and waking those who wait: demanded of stores that do either."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from refold.session.api import open
from refold.stores.record import seal
from refold.stores.store import BatchReads, Forks, Key, Snapshot, Snapshots, Watchable
from refold.testing.words import KEY, TINY, demand_folded, entries, entry, said


class BatchesContract:
    @pytest.fixture
    def batched(self, store: Any) -> Any:
        return store if _has(store, BatchReads) else pytest.skip("this store answers one question at a time")

    @pytest.fixture
    def watched(self, store: Any) -> Any:
        return store if _has(store, Watchable) else pytest.skip("nobody can wait for this store")

    def test_what_is_resumed_is_the_snapshot_and_what_came_after_it(self, batched: Any) -> None:
        assert batched.resume(KEY, "main")[0] is None
        assert list(batched.resume(KEY, "main")[1]) == []
        batched.append(KEY, entries(0, 2_500))
        snapshot, links = batched.resume(KEY, "main")
        assert (snapshot, list(links)) == (None, list(batched.read(KEY)))
        assert _has(batched, Snapshots)
        before = next(batched.read(KEY, 1_999, 2_000))
        kept = Snapshot(2_000, b"{}", seal(before.digest, b"{}"))
        batched.save(KEY, "main", kept)
        snapshot, links = batched.resume(KEY, "main")
        assert (snapshot, list(links)) == (kept, list(batched.read(KEY, 1_999)))
        assert batched.resume(KEY, "another")[0] is None
        assert batched.resume(Key("nobody", KEY.conversation), "main")[0] is None

    def test_entries_are_fetched_by_their_places_wherever_they_stand(self, batched: Any) -> None:
        assert batched.fetch(KEY, {0, 7}) == batched.fetch(KEY, set()) == {}
        batched.append(KEY, entries(0, 100))
        assert batched.fetch(KEY, {3, 50, 99, 100, 4_000}) == {at: entry(at) for at in (3, 50, 99)}
        if _has(batched, Forks):
            fork = Key(KEY.owner, "a fork")
            batched.fork(KEY, fork, 60)
            batched.append(fork, entries(60, 70, "of the fork"))
            found = batched.fetch(fork, {10, 59, 60, 69, 70})
            expected = [entry(10), entry(59), entry(60, "of the fork"), entry(69, "of the fork")]
            assert [found[at] for at in sorted(found)] == expected
            assert list(batched.resume(fork, "main")[1]) == list(batched.read(fork))

    def test_a_session_that_comes_back_begins_where_the_last_one_was(self, batched: Any) -> None:
        first = open("a", store=batched, model="tiny", config=TINY)
        for n in range(100):
            first.append(said(f"{n} words " * 9))
            if n % 9 == 0:
                first.fit()
        first.close()
        second = open("a", store=batched, model="tiny", config=TINY)
        assert second.view() == first.view()
        second.append(said("one more"))
        demand_folded(second)

    def test_whoever_waits_is_told_what_is_there_already(self, watched: Any) -> None:
        assert not watched.wait(KEY, 0, 0.0)
        watched.append(KEY, entries(0, 3))
        assert watched.wait(KEY, 0, 60.0)
        assert watched.wait(KEY, 2, 60.0)
        assert not watched.wait(KEY, 3, 0.0)

    def test_whoever_waits_is_woken_by_an_append(self, watched: Any) -> None:
        watched.append(KEY, entries(0, 3))
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(watched.wait, KEY, 5, 60.0)
            others = pool.submit(watched.wait, Key("nobody", KEY.conversation), 5, 0.3)
            watched.append(KEY, entries(3, 5))
            watched.append(KEY, [entry(5)])
            assert waiting.result()
            assert not others.result()

    def test_a_record_that_is_begun_anew_is_not_the_one_that_was_followed(self, store: Any) -> None:
        session = open("a", store=store)
        session.append([said("old") for _ in range(3)])
        following = session.record.followed(0)
        assert [event and event.at for event in islice(following, 4)] == [0, 1, 2, None]
        store.erase(session.key)
        session.append([said("new") for _ in range(5)])
        assert list(following) == []

    def test_events_are_followed_as_they_come_until_all_is_erased(self, store: Any) -> None:
        session = open("a", store=store)
        session.append([said("one"), said("two")])
        with ThreadPoolExecutor(1) as pool:
            others = open("a", store=store).events(1, follow=True)
            following = pool.submit(lambda: [event.at for event in others])
            for n in range(5):
                session.append(said(str(n)))
            seen = open("a", store=store).events(6, follow=True)
            assert next(seen).at == 6
            store.erase(session.key)
            found = following.result()
            assert found == list(range(1, 1 + len(found)))
            assert list(seen) == []


def _has(store: object, protocol: type[Any]) -> bool:
    return isinstance(store, protocol)
