"""Order, batches, compare-and-append, ranges, names, erasing: demanded of every store."""

from typing import Any

import pytest

from refold.core.codec import GENESIS, Entry, chain
from refold.core.errors import ConflictError
from refold.stores.store import FindsIds, Key, Leases, Snapshots
from refold.testing.words import KEY, ODD, Reopen, demand, entries, entry, verified


class StreamsContract:
    def test_what_does_not_exist_reads_as_empty(self, store: Any) -> None:
        assert list(store.read(KEY)) == list(store.conversations()) == store.erase(KEY) == []
        assert not isinstance(store, FindsIds) or store.find(KEY, ["a"]) == {}
        assert not isinstance(store, Snapshots) or store.saved(KEY) == {}
        assert not isinstance(store, Leases) or not store.leases(KEY, 0.0)

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
        assert not isinstance(store, FindsIds) or store.find(KEY, ["wrong"]) == {}
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
        keys = [Key(*pair) for name in ODD for pair in ((name, "a"), ("b", name))]
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
        assert not isinstance(store, FindsIds) or store.find(KEY, ["an id"]) == {}
        store.append(KEY, [entry(0, "new")])
        assert verified(store, KEY) == [entry(0, "new")]
        assert len(verified(store, other)) == 2

    def test_what_is_stored_outlives_the_store_object(self, store: Any, reopen: Reopen | None) -> None:
        opening = demand(reopen)
        store.append(KEY, entries(0, 3))
        assert verified(opening(), KEY) == entries(0, 3)
        store.close()
        assert verified(opening(), KEY) == entries(0, 3)
