"""What a session makes of a store: odd texts, newer kinds, sudden erasure. Demanded of every store."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from refold.core.codec import Entry
from refold.core.errors import NotFoundError
from refold.core.event import Unknown
from refold.core.message import Message, Text
from refold.session.api import load, open
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.testing.words import ODD, TINY, calling, demand_able, demand_folded, said, verified

TEXTS = ["", " ", "\0", "a\0b", "\ud800", "x\udfff\n", "🙂é漢\u2028", '"\\/', "<|endoftext|>", "[refold #1]"]


class SessionsContract:
    # proves: B9
    def test_every_text_comes_back_as_it_was_and_is_exported_and_loaded_to_the_byte(self, store: Any) -> None:
        session = open("a", store=store)
        texts = [*TEXTS, "0123456789" * 1_000_000]
        session.append([said(text) for text in texts])
        for same in (session, open("a", store=store)):
            assert [one.message.text for one in same.get_all()] == texts
        for target, name in ((store, "b"), (MemoryStore(), "a")):
            copy = load(session.export(), store=target, conversation=name)
            assert list(target.read(copy.key)) == list(store.read(session.key))
            assert [one.message.text for one in copy.get_all()] == texts

    def test_every_name_and_id_is_exported_and_loaded_to_the_byte(self, store: Any) -> None:
        for name in ODD:
            session = open(name, store=store, owner=name)
            session.append([Message("user", (Text(id),), id) for id in ODD])
            copy = load(session.export(), store=MemoryStore())
            assert copy.key == session.key
            assert list(copy.store.read(copy.key)) == list(store.read(session.key))

    def test_kinds_of_a_newer_version_are_kept_and_passed_over(self, store: Any) -> None:
        session = open("a", store=store)
        session.append([said("one"), said("two")])
        dreams = [Entry(at, "dreamt", None, b'[1, "\\ud800"]', b'{"of": 1e400}') for at in (2, 3)]
        store.append(session.key, dreams)
        assert session.append(said("three")) == 4
        assert [message.text for message in session.view().messages] == ["one", "two", "three"]
        assert [event.kind for event in session.events(2) if isinstance(event, Unknown)] == ["dreamt"] * 2
        copy = load(session.export(), store=store, conversation="b")
        assert verified(store, copy.key) == verified(store, session.key)
        demand_folded(copy)

    def test_a_session_whose_conversation_was_erased_starts_anew(self, store: Any) -> None:
        session, other = (open("a", store=store, model="tiny", config=TINY) for _ in range(2))
        for said_since in range(4):
            session.append([said("the old one " * 9) for _ in range(2)])
            session.fit()
            other.clear()
            other.append([said(f"new {n}") for n in range(said_since)])
            assert session.append(said("and on")) == said_since
            expected = [f"new {n}" for n in range(said_since)] + ["and on"]
            assert [message["content"] for message in session.fit().messages] == expected
            demand_folded(session)
            other.clear()
            assert session.fit().messages == []

    def test_erasing_while_others_write_and_read_harms_nobody(self, store: Any) -> None:
        demand_able(store, "compare-and-append")
        writers = [open("a", store=store, model="tiny", config=TINY) for _ in range(2)]

        def work(session: Session) -> None:
            for n in range(40):
                session.append([said(f"{n} words " * 9), calling(f"call {n}")])
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
            session.append(said("anew"))
            demand_folded(session)
        assert len(verified(store, writers[0].key)) == 2
