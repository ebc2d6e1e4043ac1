"""Contract of every store: entries and concurrent writers; batched reads and waiting if supported."""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from threading import Barrier
from typing import Any

import pytest

from refold.core.codec import GENESIS, Entry, chain
from refold.core.errors import ConflictError
from refold.stores.record import seal
from refold.stores.shelf import Shelf
from refold.stores.store import Key, RemoteReads, Snapshot
from refold.testing.samples import (
    KEY,
    ODD_NAMES,
    Reopen,
    assert_all_written,
    entries,
    entry,
    require_ability,
    require_reopen,
    requires,
    verified,
    write_elsewhere,
    write_numbered,
)


class StreamsContract:
    def test_what_does_not_exist_reads_as_empty(self, store: Any) -> None:
        assert list(store.read(KEY)) == list(store.conversations()) == store.erase(KEY) == []
        assert store.find(KEY, ["a"]) == {}
        assert not isinstance(store, Shelf) or store.saved(KEY) == {}
        assert not isinstance(store, Shelf) or not store.leases(KEY, 0.0)

    def test_entries_come_back_in_order_and_to_the_byte(self, store: Any) -> None:
        bodies = [b"", b"{}", b"x", b"x" * 300, bytes(range(256)), b"\x00" * 9, b'"' + b"ab" * 5000 + b'"']
        new = [Entry(at, "kind", None, body[::-1], body) for at, body in enumerate(bodies)]
        for one in new[:3]:
            store.append(KEY, [one])
        store.append(KEY, new[3:])
        assert verified(store, KEY) == new

    def test_every_digest_is_chained_to_the_one_before(self, store: Any) -> None:
        first = store.append(KEY, [entry(0)])
        last = store.append(KEY, [entry(1, id="an id"), entry(2)])
        assert first == chain(GENESIS, entry(0))
        assert last == chain(chain(first, entry(1, id="an id")), entry(2))
        assert [link.digest for link in store.read(KEY)][::2] == [first, last]

    @pytest.mark.parametrize(
        "places", [[4], [2], [0], [-1], [4, 5], [3, 5], [3, 3], [3, 4, 4], [3, 2], [3, 4, 6, 5], [0, 1, 2, 3]]
    )
    def test_a_batch_at_a_wrong_place_is_a_conflict_and_stores_nothing(
        self, store: Any, places: list[int]
    ) -> None:
        store.append(KEY, entries(0, 3))
        with pytest.raises(ConflictError):
            store.append(KEY, [entry(at, "wrong", id="wrong") for at in places])
        assert verified(store, KEY) == entries(0, 3)
        assert store.find(KEY, ["wrong"]) == {}
        store.append(KEY, entries(3, 5))
        assert verified(store, KEY) == entries(0, 5)

    def test_a_conversation_begins_at_place_0_and_not_elsewhere(self, store: Any) -> None:
        with pytest.raises(ConflictError):
            store.append(KEY, [entry(1)])
        store.append(KEY, [])
        assert list(store.conversations()) == []

    def test_an_append_after_a_digest_that_is_not_the_last_is_a_conflict(self, store: Any) -> None:
        first = store.append(KEY, [entry(0)], after=GENESIS)
        store.erase(KEY)
        other = store.append(KEY, [entry(0, "another record of the same length")])
        with pytest.raises(ConflictError):
            store.append(KEY, [entry(1)], after=first)
        store.append(KEY, [entry(1)], after=other)
        assert len(verified(store, KEY)) == 2

    def test_any_range_is_read_with_or_without_one_kind(self, store: Any) -> None:
        all = [Entry(at, "odd" if at % 2 else "even", None, b"[]", b"") for at in range(6)]
        store.append(KEY, all)
        for start in range(8):
            assert [link.entry for link in store.read(KEY, start)] == all[start:]
            for stop in range(8):
                assert [link.entry for link in store.read(KEY, start, stop)] == all[start:stop]
                but = [link.entry for link in store.read(KEY, start, stop, but="odd")]
                assert but == [one for one in all[start:stop] if one.kind == "even"]

    def test_a_long_stream_is_read_whole(self, store: Any) -> None:
        all = [Entry(at, "rare" if at % 500 == 0 else "often", None, b"[]", b"") for at in range(3001)]
        for start in range(0, 3001, 750):
            store.append(KEY, all[start : start + 750])
        assert verified(store, KEY) == all
        assert [link.entry.at for link in store.read(KEY, but="often")] == list(range(0, 3001, 500))

    def test_conversations_are_listed_newest_first_with_their_next_place(self, store: Any) -> None:
        keys = [Key("one", "a"), Key("two", "a"), Key("one", "b")]
        for n, key in enumerate(keys, 1):
            store.append(key, entries(0, n))
        assert [(row.key, row.next, row.parent) for row in store.conversations()] == [
            (key, n, None) for n, key in reversed(list(enumerate(keys, 1)))
        ]
        assert [row.key for row in store.conversations("one")] == [keys[2], keys[0]]
        assert list(store.conversations("nobody")) == []

    def test_names_that_differ_in_anything_stay_apart(self, store: Any) -> None:
        keys = [Key(*pair) for name in ODD_NAMES for pair in ((name, "a"), ("b", name))]
        for n, key in enumerate(keys):
            store.append(key, [entry(0, str(n), id=key.conversation)])
        assert [verified(store, key) for key in keys] == [
            [entry(0, str(n), id=key.conversation)] for n, key in enumerate(keys)
        ]
        assert [row.key for row in store.conversations()] == keys[::-1]
        assert [row.key for row in store.conversations("a")] == [Key("a", "a")]
        store.erase(keys[0])
        assert sorted(row.key for row in store.conversations()) == sorted(keys[1:])

    def test_what_is_erased_is_gone_and_can_begin_anew(self, store: Any) -> None:
        other = Key(KEY.owner, "another")
        for key in (KEY, other):
            store.append(key, [entry(0, id="an id"), entry(1)])
        assert store.erase(KEY) == []
        assert list(store.read(KEY)) == []
        assert [row.key for row in store.conversations()] == [other]
        assert store.find(KEY, ["an id"]) == {}
        store.append(KEY, [entry(0, "new")])
        assert verified(store, KEY) == [entry(0, "new")]
        assert len(verified(store, other)) == 2

    def test_what_is_stored_outlives_the_store_object(self, store: Any, reopen: Reopen | None) -> None:
        opening = require_reopen(reopen)
        store.append(KEY, entries(0, 3))
        assert verified(opening(), KEY) == entries(0, 3)
        store.close()
        assert verified(opening(), KEY) == entries(0, 3)


class WritersContract:
    # proves: B1
    def test_racing_threads_lose_nothing_and_keep_their_order(self, store: Any) -> None:
        require_ability(store, "compare-and-append")
        barrier = Barrier(6)

        def write(name: int) -> None:
            barrier.wait()
            write_numbered(store, str(name), 30)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(write, range(6)))
        assert_all_written(store, {str(name): 30 for name in range(6)})

    # proves: B1
    def test_racing_processes_lose_nothing_and_keep_their_order(
        self, store: Any, reopen: Reopen | None
    ) -> None:
        require_ability(store, "compare-and-append")
        opening = require_reopen(reopen)
        with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
            names = ["a", "b", "c"]
            list(pool.map(write_elsewhere, [opening] * 3, names, [40] * 3))
        assert_all_written(store, dict.fromkeys(names, 40))

    def test_readers_never_see_half_a_batch(self, store: Any) -> None:
        require_ability(store, "whole-batches")
        with ThreadPoolExecutor(1) as pool:
            batches = [entries(start, start + 5) for start in range(0, 300, 5)]
            writing = pool.submit(lambda: [store.append(KEY, batch) for batch in batches])
            while not writing.done():
                assert len(verified(store, KEY)) % 5 == 0
            writing.result()


class BatchesContract:
    batched = requires(RemoteReads, "this store is not across a network")

    def test_what_is_resumed_is_the_snapshot_and_what_came_after_it(self, batched: Any) -> None:
        assert batched.resume(KEY, "main")[0] is None
        assert list(batched.resume(KEY, "main")[1]) == []
        batched.append(KEY, entries(0, 2_500))
        snapshot, links = batched.resume(KEY, "main")
        assert (snapshot, list(links)) == (None, list(batched.read(KEY)))
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

    def test_entries_of_a_fork_are_fetched_from_both_sides(self, batched: Any, forks: Any) -> None:
        batched.append(KEY, entries(0, 100))
        fork = Key(KEY.owner, "a fork")
        forks.fork(KEY, fork, 60)
        batched.append(fork, entries(60, 70, "of the fork"))
        found = batched.fetch(fork, {10, 59, 60, 69, 70})
        expected = [entry(10), entry(59), entry(60, "of the fork"), entry(69, "of the fork")]
        assert [found[at] for at in sorted(found)] == expected
        assert list(batched.resume(fork, "main")[1]) == list(batched.read(fork))

    def test_whoever_waits_is_told_what_is_there_already(self, batched: Any) -> None:
        assert not batched.wait(KEY, 0, 0.0)
        batched.append(KEY, entries(0, 3))
        assert batched.wait(KEY, 0, 60.0)
        assert batched.wait(KEY, 2, 60.0)
        assert not batched.wait(KEY, 3, 0.0)

    def test_whoever_waits_is_woken_by_an_append(self, batched: Any) -> None:
        batched.append(KEY, entries(0, 3))
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(batched.wait, KEY, 5, 60.0)
            others = pool.submit(batched.wait, Key("nobody", KEY.conversation), 5, 0.3)
            batched.append(KEY, entries(3, 5))
            batched.append(KEY, [entry(5)])
            assert waiting.result()
            assert not others.result()
