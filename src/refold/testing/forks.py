"""One past, several futures: for stores that can fork."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.core.codec import Entry
from refold.core.errors import ConflictError, NotFoundError
from refold.session.api import open
from refold.stores.store import Forks, Key, SelfCheck
from refold.testing.words import KEY, demand_folded, entries, examples, named, said, unique, verified

DEEDS = ["append", "append", "fork", "fork", "erase", "erase with forks"]


class ForksContract:
    @pytest.fixture
    def forks(self, store: Any) -> Any:
        return store if isinstance(store, Forks) else pytest.skip("this store cannot fork")

    # proves: B9
    def test_a_fork_can_be_made_at_every_place_and_goes_on_from_there(self, forks: Any) -> None:
        forks.append(KEY, entries(0, 4))
        for at in range(5):
            fork = Key(KEY.owner, f"fork {at}")
            forks.fork(KEY, fork, at)
            assert verified(forks, fork) == entries(0, at)
            row = next(iter(forks.conversations()))
            assert (row.key, row.next, row.parent, row.fork_at) == (fork, at, KEY, at)
            forks.append(fork, entries(at, at + 2, "fork"))
            assert verified(forks, fork) == entries(0, at) + entries(at, at + 2, "fork")
        assert verified(forks, KEY) == entries(0, 4)

    def test_a_fork_of_what_is_not_there_or_to_what_is_there_is_refused(self, forks: Any) -> None:
        forks.append(KEY, entries(0, 2))
        new = Key(KEY.owner, "new")
        for of, at in ((KEY, 3), (KEY, -1), (new, 0)):
            with pytest.raises(NotFoundError):
                forks.fork(of, Key(KEY.owner, "newer"), at)
        forks.fork(KEY, new, 1)
        for taken in (new, KEY):
            with pytest.raises(ConflictError):
                forks.fork(KEY, taken, 1)
        assert [row.key for row in forks.conversations()] == [new, KEY]

    # proves: B9
    def test_what_is_said_or_edited_after_a_fork_stays_on_its_side(self, forks: Any) -> None:
        parent = open("parent", store=forks)
        parent.append([said(f"{n} " * 20) for n in range(8)])
        fork = parent.fork("fork", at=5)
        before = fork.view()
        parent.compact(keep_recent=1)
        parent.append(said("only here"), id="x")
        assert fork.view() == before
        fork.compact(keep_recent=2)
        shown = parent.view()
        assert fork.append(said("only there"), id="x") == 7
        fork.undo()
        assert parent.view() == shown
        for session in (parent, fork):
            demand_folded(session)

    def test_ids_of_the_shared_past_are_found_and_others_are_not(self, forks: Any, ids: Any) -> None:
        parent = open("parent", store=ids)
        parent.append([named(str(n)) for n in range(4)])
        fork = parent.fork("fork", at=1)
        assert fork.append(said("again"), id="1") == 1
        assert fork.append(said("new to the fork"), id="3") == 2
        assert parent.append(said("again"), id="3") == 3
        assert fork.fork("fork of the fork").append([named("0"), named("3"), named("4")]) == [0, 2, 3]

    def test_forks_twenty_deep_read_as_one_stream(self, forks: Any) -> None:
        keys = [Key(KEY.owner, str(n)) for n in range(21)]
        forks.append(keys[0], entries(0, 2))
        for n, (parent, fork) in enumerate(pairwise(keys), 1):
            forks.fork(parent, fork, 2 * n)
            forks.append(fork, entries(2 * n, 2 * n + 2))
        assert verified(forks, keys[-1]) == entries(0, 42)
        assert [link.entry.at for link in forks.read(keys[-1], 7, 12)] == [7, 8, 9, 10, 11]
        assert all(forks.erase(key) for key in keys[:-1:2])
        assert verified(forks, keys[-1]) == entries(0, 42)
        forks.erase(keys[1], with_forks=True)
        assert list(forks.conversations()) == []

    def test_a_fork_inherits_what_it_shares_with_an_erased_parent_and_is_named(self, forks: Any) -> None:
        forks.append(KEY, entries(0, 6))
        early, late, twin = (Key(KEY.owner, name) for name in ("early", "late", "twin"))
        for fork, at in ((early, 2), (late, 4), (twin, 4)):
            forks.fork(KEY, fork, at)
            forks.append(fork, entries(at, at + 1, fork.conversation))
        assert sorted(forks.erase(KEY)) == [early, late, twin]
        assert list(forks.read(KEY)) == []
        forks.append(KEY, entries(0, 1, "anew"))
        for fork, at in ((early, 2), (late, 4), (twin, 4)):
            assert verified(forks, fork) == entries(0, at) + entries(at, at + 1, fork.conversation)
        assert {row.key: (row.parent, row.fork_at) for row in forks.conversations()} == dict.fromkeys(
            (KEY, early, late, twin), (None, 0)
        )

    def test_erasing_with_forks_spares_those_who_only_share_a_past(self, forks: Any) -> None:
        forks.append(KEY, entries(0, 6))
        one, other, child = (Key(KEY.owner, name) for name in ("one", "other", "child"))
        forks.fork(KEY, one, 3)
        forks.fork(KEY, other, 5)
        forks.fork(other, child, 4)
        forks.erase(KEY)
        assert forks.erase(other, with_forks=True) == []
        assert [row.key for row in forks.conversations()] == [one]
        assert verified(forks, one) == entries(0, 3)

    def test_an_erased_link_of_a_chain_leaves_both_ends_whole(self, forks: Any) -> None:
        middle, last = Key(KEY.owner, "middle"), Key(KEY.owner, "last")
        forks.append(KEY, entries(0, 3))
        forks.fork(KEY, middle, 2)
        forks.append(middle, entries(2, 5, "middle"))
        forks.fork(middle, last, 4)
        assert forks.erase(middle) == [last]
        assert verified(forks, KEY) == entries(0, 3)
        assert verified(forks, last) == entries(0, 2) + entries(2, 4, "middle")
        row = next(iter(forks.conversations()))
        assert (row.key, row.parent, row.fork_at, row.next) == (last, KEY, 2, 4)
        assert forks.erase(KEY) == [last]
        assert verified(forks, last) == entries(0, 2) + entries(2, 4, "middle")

    @examples
    @given(st.lists(st.tuples(st.sampled_from(DEEDS), *[st.integers(0, 9)] * 3), min_size=5, max_size=40))
    def test_any_forks_and_erasures_leave_every_other_stream_as_it_was(
        self, forks: Any, deeds: list[tuple[str, int, int, int]]
    ) -> None:
        owner = f"owner {next(unique)}"
        streams: dict[Key, list[Entry]] = {}
        parents: dict[Key, Key | None] = {}
        for deed, a, b, n in deeds:
            key, new = Key(owner, str(a % 5)), Key(owner, str(b % 5))
            stream = streams.get(key, [])
            children = [fork for fork, parent in parents.items() if parent == key]
            match deed:
                case "append":
                    more = entries(len(stream), len(stream) + n % 3 + 1, f"{key.conversation} {n}")
                    forks.append(key, more)
                    streams[key] = stream + more
                    parents.setdefault(key, None)
                case "fork" if stream and new not in streams:
                    forks.fork(key, new, min(n, len(stream)))
                    streams[new], parents[new] = stream[:n], key
                case "erase":
                    assert sorted(forks.erase(key)) == sorted(children)
                    parents |= dict.fromkeys(children, parents.pop(key, None))
                    streams.pop(key, None)
                case "erase with forks":
                    assert forks.erase(key, with_forks=True) == []
                    for gone in (doomed := [key]):
                        doomed += [fork for fork, parent in parents.items() if parent == gone]
                        streams.pop(gone, None)
                    for gone in doomed:
                        parents.pop(gone, None)
            listed = {row.key: (row.next, row.parent) for row in forks.conversations(owner)}
            assert listed == {key: (len(stream), parents[key]) for key, stream in streams.items()}
            for key, stream in streams.items():
                assert verified(forks, key) == stream
        assert not isinstance(forks, SelfCheck) or not list(forks.examine())
