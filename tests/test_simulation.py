"""A sample of `simulation.py`, which runs a hundred thousand seeds by itself; and what it would find out."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from oracle import Oracle
from refold.core.codec import GENESIS, Link, chain
from refold.stores.memory import MemoryStore
from simulated import simulated
from simulation import play, several

SEEDS = 200
ENOUGH = 1_500
"""Within which any store that is broken here is found out; most of them by the first few."""


def test_no_promise_is_broken_whatever_happens_to_sessions_and_their_requests():
    total, problems = several(0, SEEDS)
    assert problems == []
    happened = ("crash", "pause", "refused", "lost", "late", "conflicts", "erased", "forks", "snapshots")
    assert all(total[name] > 10 for name in happened), total
    assert total["summaries"] > 10
    assert total["committed under a lease"] > 10
    assert total["fenced off"] > 0


def test_a_seed_replays_exactly():
    with simulated():
        for seed in range(20):
            first, again = play(seed), play(seed)
            assert first.trace == again.trace
            assert first.digest == again.digest


def test_a_seed_replays_exactly_in_another_process():
    with simulated():
        expected = [play(seed).digest for seed in range(5)]
    script = "import simulation as s\nwith s.simulated(): print(*[s.play(seed).digest for seed in range(5)])"
    for hashing in ("0", "1"):  # by which sets of texts are in another order
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": hashing},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == expected, done.stderr


class IgnoresTheFence(MemoryStore):
    def append(self, key, entries, /, *, after=None, lease=None):
        return super().append(key, entries, after=after)


class LosesTheCompare(MemoryStore):
    def append(self, key, entries, /, *, after=None, lease=None):
        if key not in self._all or lease is not None:
            return super().append(key, entries, after=after, lease=lease)
        mine = self._all[key]
        digest = mine.links[-1].digest if mine.links else GENESIS
        for entry in entries:
            digest = chain(digest, entry)
            mine.add([Link(entry, digest)])
        return digest


class TakesAnotherRecordForItsOwn(MemoryStore):
    """Only places are compared, so that what was meant for an erased record ends up in a new one."""

    def append(self, key, entries, /, *, after=None, lease=None):
        return super().append(key, entries, lease=lease)


class AcknowledgesBeforeItStores(MemoryStore):
    def __init__(self):
        super().__init__()
        self._appends = count(1)

    def append(self, key, entries, /, *, after=None, lease=None):
        if next(self._appends) % 20 == 0:
            mine = self._all.get(key)
            digest = mine.links[-1].digest if mine else GENESIS
            for entry in entries:
                digest = chain(digest, entry)
            return digest
        return super().append(key, entries, after=after, lease=lease)


class ForgetsIds(MemoryStore):
    def find(self, key, ids, /):
        return {}


class GivesALeaseToEverybody(MemoryStore):
    def acquire(self, key, name, holder, now, seconds, /):
        return super().acquire(key, name, holder, now + 1_000.0, seconds) and super().acquire(
            key, name, holder, now, seconds
        )


class NeverGivesANewFence(MemoryStore):
    def acquire(self, key, name, holder, now, seconds, /):
        lease = super().acquire(key, name, holder, now, seconds)
        if lease is not None:
            lease = self._all[key].leases[name] = lease._replace(fence=1)
        return lease


class ErasesHalf(MemoryStore):
    """Snapshots stay, and so do ids."""

    def erase(self, key, /, *, with_forks=False):
        mine = self._all.get(key)
        heirs = super().erase(key, with_forks=with_forks)
        if mine is not None and not heirs:
            mine.links, mine.leases = [], {}
            self._all[key] = mine
        return heirs


@pytest.mark.parametrize(
    "broken",
    [
        IgnoresTheFence,
        LosesTheCompare,
        TakesAnotherRecordForItsOwn,
        AcknowledgesBeforeItStores,
        ForgetsIds,
        GivesALeaseToEverybody,
        NeverGivesANewFence,
        ErasesHalf,
    ],
)
def test_a_store_that_breaks_a_promise_is_found_out(broken):
    assert found_out(broken)


class FindsNoIds(MemoryStore):
    def find(self, key, ids, /):
        return {}


def test_ids_that_nobody_looks_for_are_stored_twice(monkeypatch):
    monkeypatch.setattr(Oracle, "on_find", lambda *_: None)
    assert "stored twice" in found_out(FindsNoIds)


def test_a_lease_that_everybody_has_is_paid_for_twice(monkeypatch):
    def believe(self, answer, key, name, *_):  # or it would say so before anybody has paid
        if answer is not None:
            self._leases[key, name] = answer

    monkeypatch.setattr(Oracle, "on_acquire", believe)
    assert "paid for more than once" in found_out(GivesALeaseToEverybody)


def found_out(broken):
    """What the first seed finds that finds anything."""
    with simulated():
        return next(filter(None, (play(seed, broken).problem for seed in range(ENOUGH))), "")
