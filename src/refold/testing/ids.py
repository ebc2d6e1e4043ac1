"""The same message is stored once: for stores that find entries by id."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from refold.session.api import open
from refold.stores.store import LOCATED, FindsIds, Key, LocatesIds
from refold.testing.words import KEY, ODD, demand_able, entry, named, said, verified


class IdsContract:
    @pytest.fixture
    def ids(self, store: Any) -> Any:
        return store if isinstance(store, FindsIds) else pytest.skip("this store does not find entries by id")

    def test_the_same_id_is_stored_once_and_keeps_its_place(self, ids: Any) -> None:
        one, other = open("a", store=ids), open("a", store=ids)
        one.append(said("before"))
        assert one.append(said("hello"), id="x") == 1
        assert other.append(said("hello again"), id="x") == 1
        assert one.append(said("hello again"), id="x") == 1
        assert [message.message.text for message in other.get_all()] == ["before", "hello"]

    def test_in_a_batch_known_ids_are_skipped_and_the_rest_is_stored(self, ids: Any) -> None:
        session = open("a", store=ids)
        assert session.append([named("1"), named("2")]) == [0, 1]
        batch: list[Any] = [named("3"), named("2"), said("no id"), named("4"), named("3")]
        assert session.append(batch) == [2, 1, 3, 4, 2]
        assert [message.id for message in session.get_all()] == ["1", "2", "3", "m3", "4"]

    def test_an_id_that_threads_race_for_is_stored_once(self, ids: Any) -> None:
        demand_able(ids, "compare-and-append")
        barrier = Barrier(4)

        def race(_: int) -> list[int]:
            session = open("a", store=ids)
            barrier.wait()
            return [session.append(said(f"message {n}"), id=str(n)) for n in range(15)]

        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(race, range(4)))
        assert len(verified(ids, Key("default", "a"))) == 15
        assert places == [places[0]] * 4
        assert sorted(places[0]) == list(range(15))

    def test_ids_that_differ_in_anything_are_different(self, ids: Any) -> None:
        ids.append(KEY, [entry(at, id=id) for at, id in enumerate(ODD)])
        assert ids.find(KEY, [*ODD, "not there"]) == {id: at for at, id in enumerate(ODD)}
        assert ids.find(KEY, ODD[3:4]) == {ODD[3]: 3}
        assert ids.find(KEY, []) == ids.find(Key("b", KEY.conversation), ODD) == {}


class LocatedContract:
    @pytest.fixture
    def located(self, store: Any) -> Any:
        return store if isinstance(store, LocatesIds) else pytest.skip("this store does not locate ids")

    def test_an_id_is_located_in_whatever_conversation_of_the_owner_said_it(self, located: Any) -> None:
        ids = [f"{LOCATED}{n}" for n in range(6)]
        one, other, stranger = Key("o", "one"), Key("o", "../* {two}"), Key("p", "one")
        located.append(one, [entry(n, id=ids[n]) for n in range(3)])
        located.append(other, [entry(0, id=ids[3]), entry(1, id="another"), entry(2)])
        located.append(stranger, [entry(0, id=ids[4]), entry(1, id=ids[0])])
        assert located.locate("o", ids) == {**{ids[n]: (one, n) for n in range(3)}, ids[3]: (other, 0)}
        assert located.locate("p", ids) == {ids[4]: (stranger, 0), ids[0]: (stranger, 1)}
        assert located.locate("q", ids) == located.locate("o", []) == {}

    def test_of_several_that_said_the_same_the_newest_is_located(self, located: Any) -> None:
        old, new = Key("o", "old"), Key("o", "new")
        located.append(old, [entry(0, id="~x")])
        located.append(new, [entry(0), entry(1, id="~x")])
        located.append(old, [entry(1)])
        assert located.locate("o", ["~x"]) == {"~x": (new, 1)}
        located.erase(new)
        assert located.locate("o", ["~x"]) == {"~x": (old, 0)}
        located.erase(old)
        assert located.locate("o", ["~x"]) == {}

    def test_what_forks_share_is_located_where_it_was_said_and_then_in_those_that_keep_it(
        self, located: Any, forks: Any
    ) -> None:
        parent, fork, below = Key("o", "parent"), Key("o", "fork"), Key("o", "below")
        located.append(parent, [entry(n, id=f"~{n}") for n in range(4)])
        located.fork(parent, fork, 2)
        located.fork(fork, below, 1)
        located.append(fork, [entry(2, id="~own")])
        assert located.locate("o", ["~0", "~3", "~own"]) == {
            "~0": (parent, 0),
            "~3": (parent, 3),
            "~own": (fork, 2),
        }
        located.erase(parent)
        found = located.locate("o", ["~0", "~1", "~3"])
        assert found.keys() == {"~0", "~1"}
        assert found["~0"] in [(fork, 0), (below, 0)]
        assert found["~1"] == (fork, 1)
        located.erase(fork)
        assert located.locate("o", ["~0", "~1", "~own"]) == {"~0": (below, 0)}
