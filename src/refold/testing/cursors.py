"""How far somebody has followed: for stores that keep cursors."""

from typing import Any

import pytest

from refold.stores.store import Cursors, Forks, Key, SelfCheck
from refold.testing.words import KEY, ODD, Reopen, demand, entries

OTHER = Key(KEY.owner, "another")
STRANGER = Key("somebody else", KEY.conversation)


class CursorsContract:
    @pytest.fixture
    def cursors(self, store: Any) -> Any:
        return store if isinstance(store, Cursors) else pytest.skip("this store keeps no cursors")

    def test_a_cursor_is_unset_until_it_is_set_and_never_goes_back(self, cursors: Any) -> None:
        cursors.append(KEY, entries(0, 4))
        assert cursors.cursor(KEY, "a") is None
        for next, known in ((0, 0), (3, 3), (1, 3), (4, 4), (0, 4)):
            cursors.set_cursor(KEY, "a", next)
            assert cursors.cursor(KEY, "a") == known
        assert [cursors.cursor(KEY, name) for name in ("b", "A", "", "a ")] == [None] * 4

    def test_a_cursor_may_be_set_before_the_conversation_begins(self, cursors: Any) -> None:
        cursors.set_cursor(KEY, "a", 0)
        assert cursors.cursor(KEY, "a") == 0
        assert list(cursors.behind("a")) == list(cursors.conversations()) == []
        cursors.append(KEY, entries(0, 1))
        assert list(cursors.behind("a")) == [KEY]

    def test_those_are_behind_that_have_entries_at_or_after_their_cursor(self, cursors: Any) -> None:
        for key, entered, cursor in ((KEY, 3, 2), (OTHER, 3, 3), (STRANGER, 3, 0)):
            cursors.append(key, entries(0, entered))
            cursors.set_cursor(key, "a", cursor)
        cursors.append(Key(KEY.owner, "never followed"), entries(0, 3))
        assert sorted(cursors.behind("a")) == sorted([KEY, STRANGER])
        assert list(cursors.behind("b")) == []
        cursors.set_cursor(KEY, "a", 3)
        cursors.append(OTHER, entries(3, 4))
        assert sorted(cursors.behind("a")) == sorted([OTHER, STRANGER])

    def test_odd_names_and_owners_are_kept_apart(self, cursors: Any) -> None:
        names = [*ODD, ""]
        for n, name in enumerate(names):
            cursors.append(Key(name, KEY.conversation), entries(0, 1))
            cursors.set_cursor(Key(name, KEY.conversation), "a", n)
            cursors.set_cursor(KEY, name + "a cursor", n)
        assert [cursors.cursor(Key(name, KEY.conversation), "a") for name in names] == [*range(len(names))]
        assert [cursors.cursor(KEY, name + "a cursor") for name in names] == [*range(len(names))]
        assert list(cursors.behind("a")) == [Key(names[0], KEY.conversation)]

    def test_cursors_are_erased_with_the_conversation_and_with_no_other(self, cursors: Any) -> None:
        for key in (KEY, OTHER, STRANGER):
            cursors.append(key, entries(0, 2))
            cursors.set_cursor(key, "a", 1)
        cursors.set_cursor(KEY, "b", 1)
        cursors.erase(KEY)
        cursors.append(KEY, entries(0, 2))
        assert [cursors.cursor(KEY, name) for name in ("a", "b")] == [None, None]
        assert sorted(cursors.behind("a")) == sorted([OTHER, STRANGER])
        assert not isinstance(cursors, SelfCheck) or not list(cursors.examine())

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_fork_has_cursors_of_its_own(self, cursors: Any, at: int) -> None:
        can_fork: bool = isinstance(cursors, Forks)
        if not can_fork:
            pytest.skip("this store cannot fork")
        fork = Key(KEY.owner, "a fork")
        cursors.append(KEY, entries(0, 2))
        cursors.set_cursor(KEY, "a", 2)
        cursors.fork(KEY, fork, at)
        assert cursors.cursor(fork, "a") is None
        cursors.set_cursor(fork, "a", at)
        assert list(cursors.behind("a")) == []
        cursors.append(fork, entries(at, at + 1, "fork"))
        assert list(cursors.behind("a")) == [fork]
        cursors.set_cursor(fork, "b", 0)
        assert list(cursors.behind("b")) == [fork]
        cursors.erase(KEY)
        assert (cursors.cursor(fork, "a"), list(cursors.behind("a"))) == (at, [fork])
        cursors.append(KEY, entries(0, 1))
        cursors.fork(fork, OTHER, at)
        cursors.set_cursor(OTHER, "a", 0)
        cursors.erase(fork, with_forks=True)
        assert [cursors.cursor(key, "a") for key in (fork, OTHER)] == [None, None]

    def test_cursors_are_there_when_the_store_is_opened_again(
        self, cursors: Any, reopen: Reopen | None
    ) -> None:
        opening = demand(reopen)
        cursors.append(KEY, entries(0, 2))
        cursors.set_cursor(KEY, "a", 1)
        other: Any = opening()
        assert (other.cursor(KEY, "a"), list(other.behind("a"))) == (1, [KEY])
        other.set_cursor(KEY, "a", 2)
        other.close()
        assert (cursors.cursor(KEY, "a"), list(cursors.behind("a"))) == (2, [])
