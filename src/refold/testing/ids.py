"""The same message is stored once: for stores that find entries by id."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from refold.opening import open
from refold.stores.store import Ids, Key
from refold.testing.words import KEY, ODD, demand_able, entry, named, said, verified


class IdsContract:
    @pytest.fixture
    def ids(self, store: Any) -> Any:
        return store if isinstance(store, Ids) else pytest.skip("this store does not find entries by id")

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
