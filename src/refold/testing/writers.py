"""Many writers at once, none of whom loses anything: demanded of every store."""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from threading import Barrier
from typing import Any

from refold.session.api import open
from refold.testing.words import (
    KEY,
    Reopen,
    demand,
    demand_able,
    demand_folded,
    demand_numbered,
    entries,
    said,
    verified,
    write_elsewhere,
    write_numbered,
)


class WritersContract:
    # proves: B1
    def test_racing_threads_lose_nothing_and_keep_their_order(self, store: Any) -> None:
        demand_able(store, "compare-and-append")
        barrier = Barrier(6)

        def write(name: int) -> None:
            barrier.wait()
            write_numbered(store, str(name), 30)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(write, range(6)))
        demand_numbered(store, {str(name): 30 for name in range(6)})

    def test_racing_threads_may_share_a_session(self, store: Any) -> None:
        demand_able(store, "compare-and-append")
        session = open("race", store=store)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: session.append(said(f"{n % 4} {n // 4}")), range(80)))
        assert sorted(one.message.text for one in session.get_all()) == sorted(
            f"{n % 4} {n // 4}" for n in range(80)
        )
        demand_folded(session)

    # proves: B1
    def test_racing_processes_lose_nothing_and_keep_their_order(
        self, store: Any, reopen: Reopen | None
    ) -> None:
        demand_able(store, "compare-and-append")
        opening = demand(reopen)
        with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
            names = ["a", "b", "c"]
            list(pool.map(write_elsewhere, [opening] * 3, names, [40] * 3))
        demand_numbered(store, dict.fromkeys(names, 40))

    def test_readers_never_see_half_a_batch(self, store: Any) -> None:
        demand_able(store, "whole-batches")
        with ThreadPoolExecutor(1) as pool:
            batches = [entries(start, start + 5) for start in range(0, 300, 5)]
            writing = pool.submit(lambda: [store.append(KEY, batch) for batch in batches])
            while not writing.done():
                assert len(verified(store, KEY)) % 5 == 0
            writing.result()
