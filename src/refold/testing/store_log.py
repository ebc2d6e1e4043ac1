"""Contract of every store: entries, concurrent writers, sessions; batched reads and waiting if supported."""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from threading import Barrier
from typing import Any

import pytest

from refold.core.codec import GENESIS, Entry, chain
from refold.core.errors import ConflictError, NotFoundError
from refold.core.event import Unknown
from refold.core.message import Message, Text
from refold.session.api import load, open
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.record import seal
from refold.stores.shelf import Shelf
from refold.stores.store import Forks, Key, RemoteReads, Snapshot
from refold.testing.samples import (
    KEY,
    ODD_NAMES,
    TINY,
    Reopen,
    assert_all_written,
    assert_view_is_fold,
    calls_message,
    entries,
    entry,
    require_ability,
    require_reopen,
    requires,
    user_message,
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

    def test_racing_threads_may_share_a_session(self, store: Any) -> None:
        require_ability(store, "compare-and-append")
        session = open("race", store=store)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: session.append(user_message(f"{n % 4} {n // 4}")), range(80)))
        assert sorted(one.message.text for one in session.get_all()) == sorted(
            f"{n % 4} {n // 4}" for n in range(80)
        )
        assert_view_is_fold(session)

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


TEXTS = ["", " ", "\0", "a\0b", "\ud800", "x\udfff\n", "🙂é漢\u2028", '"\\/', "<|endoftext|>", "[refold #1]"]


class SessionsContract:
    # proves: B9
    def test_every_text_comes_back_as_it_was_and_is_exported_and_loaded_to_the_byte(self, store: Any) -> None:
        session = open("a", store=store)
        texts = [*TEXTS, "0123456789" * 1_000_000]
        session.append([user_message(text) for text in texts])
        for same in (session, open("a", store=store)):
            assert [one.message.text for one in same.get_all()] == texts
        for target, name in ((store, "b"), (MemoryStore(), "a")):
            copy = load(session.export(), store=target, conversation=name)
            assert list(target.read(copy.key)) == list(store.read(session.key))
            assert [one.message.text for one in copy.get_all()] == texts

    def test_every_name_and_id_is_exported_and_loaded_to_the_byte(self, store: Any) -> None:
        for name in ODD_NAMES:
            session = open(name, store=store, owner=name)
            session.append([Message("user", (Text(id),), id) for id in ODD_NAMES])
            copy = load(session.export(), store=MemoryStore())
            assert copy.key == session.key
            assert list(copy.store.read(copy.key)) == list(store.read(session.key))

    def test_kinds_of_a_newer_version_are_kept_and_passed_over(self, store: Any) -> None:
        session = open("a", store=store)
        session.append([user_message("one"), user_message("two")])
        dreams = [Entry(at, "dreamt", None, b'[1, "\\ud800"]', b'{"of": 1e400}') for at in (2, 3)]
        store.append(session.key, dreams)
        assert session.append(user_message("three")) == 4
        assert [message.text for message in session.view().messages] == ["one", "two", "three"]
        assert [event.kind for event in session.events(2) if isinstance(event, Unknown)] == ["dreamt"] * 2
        copy = load(session.export(), store=store, conversation="b")
        assert verified(store, copy.key) == verified(store, session.key)
        assert_view_is_fold(copy)

    def test_a_session_whose_conversation_was_erased_starts_anew(self, store: Any) -> None:
        session, other = (open("a", store=store, model="tiny", config=TINY) for _ in range(2))
        for said_since in range(4):
            session.append([user_message("the old one " * 9) for _ in range(2)])
            session.fit()
            other.clear()
            other.append([user_message(f"new {n}") for n in range(said_since)])
            assert session.append(user_message("and on")) == said_since
            expected = [f"new {n}" for n in range(said_since)] + ["and on"]
            assert [message["content"] for message in session.fit().messages] == expected
            assert_view_is_fold(session)
            other.clear()
            assert session.fit().messages == []

    def test_erasing_while_others_write_and_read_harms_nobody(self, store: Any) -> None:
        require_ability(store, "compare-and-append")
        writers = [open("a", store=store, model="tiny", config=TINY) for _ in range(2)]

        def work(session: Session) -> None:
            for n in range(40):
                session.append([user_message(f"{n} words " * 9), calls_message(f"call {n}")])
                with suppress(NotFoundError):  # erased while it was looked up
                    session.fit()
                    session.pin(0)
                    session.undo()

        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(work, session) for session in writers]
            while not all(one.done() for one in working):
                store.erase(writers[0].key)
            for one in working:
                one.result()
        store.erase(writers[0].key)
        for session in writers:
            session.append(user_message("anew"))
            assert_view_is_fold(session)
        assert len(verified(store, writers[0].key)) == 2


class BatchesContract:
    batched = requires(RemoteReads, "this store is not across a network")
    watched = batched

    def test_what_is_resumed_is_the_snapshot_and_what_came_after_it(self, batched: Any) -> None:
        assert batched.resume(KEY, "main")[0] is None
        assert list(batched.resume(KEY, "main")[1]) == []
        batched.append(KEY, entries(0, 2_500))
        snapshot, links = batched.resume(KEY, "main")
        assert (snapshot, list(links)) == (None, list(batched.read(KEY)))
        has_snapshots: bool = isinstance(batched, Shelf)
        assert has_snapshots
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
        can_fork: bool = isinstance(batched, Forks)
        if can_fork:
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
            first.append(user_message(f"{n} words " * 9))
            if n % 9 == 0:
                first.fit()
        first.close()
        second = open("a", store=batched, model="tiny", config=TINY)
        assert second.view() == first.view()
        second.append(user_message("one more"))
        assert_view_is_fold(second)

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
        session.append([user_message("old") for _ in range(3)])
        following = session.record.followed(0)
        assert [event and event.at for event in islice(following, 4)] == [0, 1, 2, None]
        store.erase(session.key)
        session.append([user_message("new") for _ in range(5)])
        assert list(following) == []

    def test_events_are_followed_as_they_come_until_all_is_erased(self, store: Any) -> None:
        session = open("a", store=store)
        session.append([user_message("one"), user_message("two")])
        with ThreadPoolExecutor(1) as pool:
            others = open("a", store=store).events(1, follow=True)
            following = pool.submit(lambda: [event.at for event in others])
            for n in range(5):
                session.append(user_message(str(n)))
            seen = open("a", store=store).events(6, follow=True)
            assert next(seen).at == 6
            store.erase(session.key)
            found = following.result()
            assert found == list(range(1, 1 + len(found)))
            assert list(seen) == []
