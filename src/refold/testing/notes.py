"""Small things that outlive conversations: for stores that keep notes."""

from typing import Any

import pytest

from refold.stores.store import Notes
from refold.testing.words import KEY, Reopen, entries


class NotesContract:
    @pytest.fixture
    def notes(self, store: Any) -> Any:
        return store if isinstance(store, Notes) else pytest.skip("this store keeps no notes")

    def test_a_note_is_what_was_kept_last_under_its_name(self, notes: Any) -> None:
        assert notes.note("a") is None
        notes.keep_note("a", b"1")
        notes.keep_note("b\ud800\x00", b"\x00\xff")
        notes.keep_note("a", b"2")
        assert (notes.note("a"), notes.note("b\ud800\x00"), notes.note("A")) == (b"2", b"\x00\xff", None)

    def test_notes_outlive_the_conversations_they_came_from(self, notes: Any) -> None:
        notes.append(KEY, entries(0, 1))
        notes.keep_note("a", b"1")
        notes.erase(KEY)
        assert notes.note("a") == b"1"

    def test_notes_are_there_when_the_store_is_opened_again(self, notes: Any, reopen: Reopen | None) -> None:
        if reopen is None:
            pytest.skip("what is in this store goes with the process")
        notes.keep_note("a", b"1")
        other = reopen()
        assert other.note("a") == b"1"  # type: ignore[attr-defined]
        other.close()
