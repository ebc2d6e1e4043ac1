"""Sessions in a world of their own: its store, clocks, locks, jobs and models instead of real ones."""

import random
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import refold.session.notify
import refold.stores.record
import refold.summaries.prepare
import refold.summaries.write
from refold.core.codec import Entry, Link
from refold.core.errors import RefoldError
from refold.stores.memory import MemoryStore
from refold.stores.store import Key, Snapshot
from refold.summaries.background import BackgroundJob
from refold.summaries.call import CallOutcome
from refold.summaries.summarizer import Ask, Summarizer
from world import Process, Task, World

SNAPSHOT_EVERY = 5
"""Events between two snapshots, so that short conversations have some."""


class SimulatedStore:
    """A store as one process reaches it: whatever `MemoryStore` can be asked goes through the world."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def close(self) -> None:
        pass

    def _ask(self, name: str, *given: Any, **named: Any) -> Any:
        world = self._world
        payment = world.current.payment if world.current and name == "keep_summary" else None

        def effect() -> Any:
            if payment is not None:
                payment.was_kept = True
            answer = getattr(world.engine, name)(*given, **named)
            answer = list(answer) if isinstance(answer, Iterator) else answer
            world.oracle.judge(name, given, named, answer)
            world.counts["committed under a lease"] += name == "append" and named.get("lease") is not None
            return answer

        key = next((one.conversation for one in given if isinstance(one, Key)), "")
        return world.ask(self._process, f"{name} {key}", effect)


class FarStore(SimulatedStore):
    """The same across a network: it answers several questions in one go."""

    def resume(self, key: Key, view: str, /) -> tuple[Snapshot | None, Iterator[Link]]:
        world = self._world

        def effect() -> tuple[Snapshot | None, list[Link]]:
            snapshot = world.engine.saved(key).get(view)
            return snapshot, list(world.engine.read(key, snapshot.at - 1 if snapshot else 0))

        snapshot, links = world.ask(self._process, f"resume {key.conversation}", effect)
        return snapshot, iter(links)

    def fetch(self, key: Key, places: Collection[int], /) -> dict[int, Entry]:
        def effect() -> dict[int, Entry]:
            return {
                link.entry.at: link.entry for link in self._world.engine.read(key) if link.entry.at in places
            }

        found: dict[int, Entry] = self._world.ask(self._process, f"fetch {key.conversation}", effect)
        return found

    def wait(self, key: Key, next: int, seconds: float, /) -> bool:
        found = self._world.ask(
            self._process, f"wait {key.conversation}", lambda: list(self._world.engine.read(key, next))
        )
        return bool(found)


def store_of(world: World, process: Process) -> Any:
    return (FarStore if world.is_far else SimulatedStore)(world, process)


def _through(name: str) -> Callable[..., Any]:
    def asked(self: SimulatedStore, *given: Any, **named: Any) -> Any:
        answer = self._ask(name, *given, **named)
        return iter(answer) if name in STREAMED else answer

    return asked


STREAMED = ("read", "index", "embed", "conversations", "behind")
for _name in dir(MemoryStore):
    if not _name.startswith("_") and not hasattr(SimulatedStore, _name):
        setattr(SimulatedStore, _name, _through(_name))


# What the product uses of this world


class Turnstile:
    """A lock of sessions: whoever waits for it lets others go on."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self) -> None:
        world = _world()
        me = world.task()
        if self._owner is not me:
            if self._owner is not None:
                world.wait(lambda: self._owner is None)
            self._owner = me
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedJob(BackgroundJob):
    """Work on a task of its own in the same process."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        world = _world()
        self._world, self._work = world, work
        self._begun = world.begin(f"{world.task().name} {name}", world.task().process, self._go)

    def _go(self) -> None:
        with suppress(StopIteration, CancelledError, RefoldError):
            self._work().send(None)  # nothing that it awaits ever suspends it

    @property
    def is_running(self) -> bool:
        return not self._begun.has_ended

    def wait(self, seconds: float | None = None) -> bool:
        has_ended = not self.is_running or self._world.wait(lambda: not self.is_running, seconds)
        self._world.stall()
        return has_ended

    def cancel(self) -> None:
        self._begun.is_canceled = True


class Clock:
    """The module `time`, as far as the product uses it."""

    def time(self) -> float:
        world = _world()
        return world.now + (world.current.process.skew if world.current else 0.0)

    def monotonic(self) -> float:
        return _world().now

    def sleep(self, seconds: float) -> None:
        _world().sleep(seconds)


class Named:
    """A random id that is none."""

    @property
    def hex(self) -> str:
        process = _world().task().process
        process.holders += 1
        return f"{process.name} {process.holders}"


def _cancel_here() -> None:
    if _world().task().is_canceled:
        raise CancelledError


async def _slept(seconds: float) -> None:
    _cancel_here()
    _world().sleep(seconds)
    _cancel_here()


async def _called(summarizer: Summarizer, ask: Ask, *, timeout_s: float, loop: object) -> CallOutcome:
    _cancel_here()
    outcome = _world().answered(ask, timeout_s)
    _cancel_here()
    return outcome


_worlds: list[World] = []


def _world() -> World:
    return _worlds[-1]


@contextmanager
def inside(world: World) -> Iterator[None]:
    """Whatever the product does in here, it does in this world."""
    _worlds.append(world)
    random.seed(world.seed)  # by which those who collide step aside
    try:
        yield
    finally:
        _worlds.remove(world)
        for process in world.processes:
            process.is_dead = True


@contextmanager
def simulated() -> Iterator[None]:
    """The product's clocks, locks, jobs and calls of models are those of a world, which `inside` names."""
    clock = Clock()
    with ExitStack() as patches:
        stack = patches.enter_context
        for name, module in list(sys.modules.items()):
            if name.startswith("refold."):
                if getattr(module, "time", None) is time:
                    stack(patch.object(module, "time", clock))
                if hasattr(module, "uuid4"):
                    stack(patch.object(module, "uuid4", Named))
        stack(patch.object(refold.session.notify, "RLock", Turnstile))
        stack(patch.object(refold.summaries.prepare, "BackgroundJob", SimulatedJob))
        stack(patch.object(refold.summaries.prepare, "sleep", _slept))
        stack(patch.object(refold.summaries.write, "call", _called))
        stack(patch.object(refold.stores.record, "SNAPSHOT_EVERY", SNAPSHOT_EVERY))
        yield
