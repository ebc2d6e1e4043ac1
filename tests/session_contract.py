"""What sessions do over every store that refold ships: a class to mix in beside `StoreContract`."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Barrier, Thread
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from refold.core.codec import Entry
from refold.core.errors import ConflictError, NotFoundError, OverBudgetError
from refold.core.event import Expiry, Unknown
from refold.core.message import Message, Text, ToolCall, ToolResult
from refold.session.api import load, open
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key, ToolSetting
from refold.testing.embedder import WordEmbedder
from refold.testing.samples import (
    ODD_NAMES,
    assert_view_is_fold,
    examples,
    require_ability,
    unique,
    user_message,
    verified,
)
from refold.testing.store_search import PATIENCE_S

TINY: dict[str, Any] = {"models": {"tiny": {"window": 400, "max_output": 40}}}
"""A window that a handful of messages overflows."""
TEXTS = ["", " ", "\0", "a\0b", "\ud800", "x\udfff\n", "🙂é漢\u2028", '"\\/', "<|endoftext|>", "[refold #1]"]
DEEDS = ["user", "user", "calls", "result", "fit", "compact", "pin", "unpin", "undo", "restore", "reopen"]


def message_with_id(id: str) -> Message:
    return Message("user", (Text(f"message {id}"),), id)


def calls_message(*ids: str) -> Message:
    return Message("assistant", tuple(ToolCall(id, "a tool", "{}") for id in ids))


def act(session: Session, action: str, n: int) -> None:
    """One of the things that users and agents do."""
    match action:
        case "user":
            session.append(user_message(f"{n} words " * n))
        case "calls":
            session.append(calls_message(*(f"call {m}" for m in range(n % 4))))
        case "result":
            session.append(Message("tool", (ToolResult(f"call {n % 4}", "result " * n),)))
        case "fit":
            session.fit()
        case "compact":
            session.compact(keep_recent=n % 5)
        case "undo" if n > 20:
            session.undo()  # the newest
        case "pin" | "unpin" | "undo" | "restore":
            getattr(session, action)(n)


class SessionsContract:
    def test_racing_threads_may_share_a_session(self, store: Any) -> None:
        require_ability(store, "compare-and-append")
        session = open("race", store=store)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: session.append(user_message(f"{n % 4} {n // 4}")), range(80)))
        assert sorted(one.message.text for one in session.get_all()) == sorted(
            f"{n % 4} {n // 4}" for n in range(80)
        )
        assert_view_is_fold(session)

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

    # proves: B9
    def test_what_is_said_or_edited_after_a_fork_stays_on_its_side(self, forks: Any) -> None:
        parent = open("parent", store=forks)
        parent.append([user_message(f"{n} " * 20) for n in range(8)])
        fork = parent.fork("fork", at=5)
        before = fork.view()
        parent.compact(keep_recent=1)
        parent.append(user_message("only here"), id="x")
        assert fork.view() == before
        fork.compact(keep_recent=2)
        shown = parent.view()
        assert fork.append(user_message("only there"), id="x") == 7
        fork.undo()
        assert parent.view() == shown
        for session in (parent, fork):
            assert_view_is_fold(session)

    def test_ids_of_the_shared_past_are_found_and_others_are_not(self, forks: Any) -> None:
        parent = open("parent", store=forks)
        parent.append([message_with_id(str(n)) for n in range(4)])
        fork = parent.fork("fork", at=1)
        assert fork.append(user_message("again"), id="1") == 1
        assert fork.append(user_message("new to the fork"), id="3") == 2
        assert parent.append(user_message("again"), id="3") == 3
        assert fork.fork("fork of the fork").append(
            [message_with_id("0"), message_with_id("3"), message_with_id("4")]
        ) == [0, 2, 3]

    def test_the_same_id_is_stored_once_and_keeps_its_place(self, store: Any) -> None:
        one, other = open("a", store=store), open("a", store=store)
        one.append(user_message("before"))
        assert one.append(user_message("hello"), id="x") == 1
        assert other.append(user_message("hello again"), id="x") == 1
        assert one.append(user_message("hello again"), id="x") == 1
        assert [message.message.text for message in other.get_all()] == ["before", "hello"]

    def test_in_a_batch_known_ids_are_skipped_and_the_rest_is_stored(self, store: Any) -> None:
        session = open("a", store=store)
        assert session.append([message_with_id("1"), message_with_id("2")]) == [0, 1]
        batch: list[Any] = [
            message_with_id("3"),
            message_with_id("2"),
            user_message("no id"),
            message_with_id("4"),
            message_with_id("3"),
        ]
        assert session.append(batch) == [2, 1, 3, 4, 2]
        assert [message.id for message in session.get_all()] == ["1", "2", "3", "m3", "4"]

    def test_an_id_that_threads_race_for_is_stored_once(self, store: Any) -> None:
        require_ability(store, "compare-and-append")
        barrier = Barrier(4)

        def race(_: int) -> list[int]:
            session = open("a", store=store)
            barrier.wait()
            return [session.append(user_message(f"message {n}"), id=str(n)) for n in range(15)]

        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(race, range(4)))
        assert len(verified(store, Key("default", "a"))) == 15
        assert places == [places[0]] * 4
        assert sorted(places[0]) == list(range(15))

    @examples
    @given(st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 25)), min_size=10, max_size=60))
    def test_a_session_opened_from_a_snapshot_equals_the_fold(
        self, shelf: Any, deeds: list[tuple[str, int]]
    ) -> None:
        opening = partial(open, f"conversation {next(unique)}", store=shelf, model="tiny", config=TINY)
        session = opening()
        for deed, n in deeds:
            with suppress(NotFoundError, ConflictError, OverBudgetError):
                act(session, deed, n)
            if deed == "reopen":
                assert_view_is_fold(session)
                session.close()
                session = opening()
                saved = shelf.saved(session.key)
                assert saved["main"].at if list(session.events()) else not saved
            assert_view_is_fold(session)
        assert len(verified(shelf, session.key)) == len(list(session.events()))

    # proves: A13
    def test_settings_are_in_force_in_conversations_opened_after(self, settings: Any) -> None:
        file = {"tools": {"grep": {"expire": {"after_steps": 9, "length": 100}}}}
        before = open("a", store=settings, config=file)
        settings.set_setting(ToolSetting("", "grep", Expiry(after_steps=0)))
        after = open("a", store=settings, config=file)
        assert before.settings.tools["grep"].expire == Expiry(after_steps=9, length=100)
        assert after.settings.tools["grep"].expire == Expiry(after_steps=0, length=100)

    def test_vectors_are_made_once_for_each_embedder(self, searched: Any) -> None:
        embedder = WordEmbedder()
        session = open("a", store=searched, embedder=embedder)
        session.append([user_message("one"), user_message("two")])
        for _ in range(2):
            session.search("three")
        assert embedder.asked == ["one", "two", "three", "three"]
        assert searched.nearest(session.key, "another", bytes(256), 5) == []

    def test_nobody_who_appends_waits_for_an_embedder(self, searched: Any) -> None:
        other, done = open("b", store=searched), list[bool]()

        def slow(texts: Sequence[str]) -> list[list[float]]:
            if not done:
                thread = Thread(target=other.append, args=[user_message("pear")], daemon=True)
                thread.start()
                thread.join(PATIENCE_S)
                done.append(not thread.is_alive())
            return [[1.0, 0.0] for _ in texts]

        session = open("a", store=searched, embedder=slow)
        session.append(user_message("apple"))
        assert [hit.at for hit in session.search("apple")] == [0]
        assert done == [True]
