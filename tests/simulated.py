"""A world of its own for sessions: one clock, tasks that take turns, and a store between them that fails.

All of it follows from a seed: exactly one task runs at a time. Whenever it asks the store, sleeps or waits,
the seed says who goes on, when the request takes effect, and whether its process lives to hear the answer.
"""

import sys
import time
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from random import Random
from threading import Lock, Thread
from typing import Any, NamedTuple
from unittest.mock import patch

import refold.notify
import refold.record
import refold.summaries
import refold.writing
from oracle import Oracle
from refold.core.codec import Entry, Link
from refold.core.errors import RefoldError, StoreError
from refold.core.message import Usage
from refold.job import Job
from refold.stores.memory import MemoryStore
from refold.stores.store import Key, Snapshot
from refold.summarize.call import Outcome
from refold.summarize.summarizer import Answer, Ask, Summarizer

STAYS = 0.4
"""How likely it is that whoever may go on next is the one who goes on."""
LATENCY_S = 0.02
"""What a request to the store takes at most, while nothing is wrong."""
LATE_S = (0.01, 0.1, 1.0, 30.0, 120.0)
"""When a request takes effect that nobody waits for any more."""
PAUSE_S = (0.5, 5.0, 20.0, 50.0, 200.0)
"""Some of them are longer than any lease."""
SNAPSHOT_EVERY = 5
"""Events between two snapshots, so that short conversations have some."""


HEADINGS = "\n".join(
    f"{title}: {{}}" if title == "Done" else f"{title}: none"
    for title in ("Requests", "Done", "Decisions", "State", "Errors", "Pending", "Next")
)
"""A summary that nothing is wrong with."""


class Crashed(BaseException):
    """The process is gone: nothing in it goes on, not even what it would do at its end."""


class Weather(NamedTuple):
    """How likely it is that a request to the store meets with something, and for how many requests."""

    refused: float = 0.0
    """It never got there."""
    lost: float = 0.0
    """It took effect, but the answer never came."""
    late: float = 0.0
    """It takes effect after it was given up."""
    crash: float = 0.0
    """Of the process: before the effect, after it, or long before."""
    pause: float = 0.0
    """Of the process, before the effect or after it."""
    model: float = 0.0
    """The model fails or hangs."""
    skew_s: float = 0.0
    """How far clocks of processes are apart."""
    until: int = 600
    """Requests after which it clears up, so that all come to an end."""


class Process:
    """What crashes and pauses as a whole: a session, and the job that it has begun."""

    def __init__(self, name: str, skew: float) -> None:
        self.name, self.skew = name, skew
        self.is_dead = False
        self.paused_until = 0.0
        self.has_late = False
        """Something of it takes effect that it knows nothing of."""
        self.holders = 0


class Task:
    """Runs while it has the baton."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.process = name, process
        self.gate, self.has_ended, self.is_canceled = Lock(), False, False
        self.faults = 0
        self.ready: Callable[[], bool] | None = None
        """What it waits for."""
        self.payment: Payment | None = None
        """The newest."""
        self.wakes: float | None = 0.0
        """When it goes on in any case."""
        self.gate.acquire()

    def may_run(self, now: float) -> bool:
        if self.process.is_dead:
            return True  # to its end
        if self.process.paused_until > now:
            return False
        return (self.wakes is not None and self.wakes <= now) or (self.ready is not None and self.ready())


class Payment:
    """For one request to a model."""

    def __init__(self, content: tuple[Any, ...], task: Task, *, fails: bool) -> None:
        self.content, self.process, self._task, self._fails = content, task.process, task, fails
        self.was_kept = False
        """Others could have found it."""

    @property
    def is_clean(self) -> bool:
        """Nothing happened to whoever paid, from when its job began to its end."""
        return not (self._fails or self._task.faults or self._task.is_canceled or self.process.has_late)


class World:
    def __init__(self, seed: int, weather: Weather, engine: MemoryStore, *, is_far: bool = False) -> None:
        self.chance = Random(f"refold {seed}")
        self.seed, self.weather, self.engine, self.is_far = seed, weather, engine, is_far
        self.oracle = Oracle()
        self.now = 1_000_000.0
        self.requests = 0
        self.trace: list[tuple[float, str, str, str]] = []
        """When, in which process, what was asked, and what came of it."""
        self.counts = Counter[str]()
        self.payments: list[Payment] = []
        self.processes: list[Process] = []
        self.current: Task | None = None
        self._tasks: list[Task] = []
        self._late: list[tuple[float, Callable[[], object]]] = []
        self.failure: BaseException | None = None
        self._over = Lock()
        self._over.acquire()

    # Tasks take turns

    def process(self, name: str) -> Process:
        self.counts["processes"] += 1
        self.processes.append(Process(name, self.chance.uniform(-1, 1) * self.weather.skew_s))
        return self.processes[-1]

    def begin(self, name: str, process: Process, work: Callable[[], object]) -> Task:
        task = Task(name, process)
        self._tasks.append(task)
        Thread(target=self._run, args=(task, work), name=name, daemon=True).start()
        return task

    def run(self) -> None:
        """Until all tasks have ended.

        Raises:
            AssertionError: one of them found something that must not be.
        """
        if self._tasks:
            self._next().gate.release()
            self._over.acquire()
        self.current = None
        for _, effect in self._late:
            effect()
        if self.failure is not None:
            raise self.failure

    def _run(self, task: Task, work: Callable[[], object]) -> None:
        task.gate.acquire()
        self.current = task
        try:
            if not task.process.is_dead:
                work()
        except Crashed:
            pass
        except BaseException as error:  # it is told where all is told
            self.failure = self.failure or error
        task.has_ended = True
        self._tasks.remove(task)
        if self._tasks and self.failure is None:
            try:
                self._next().gate.release()
                return
            except AssertionError as error:
                self.failure = error
        for other in self._tasks:  # nobody goes on: threads that wait for their turn are let go
            other.process.is_dead = True
        if self._tasks:
            self._tasks[0].gate.release()
        else:
            self._over.release()

    def _next(self) -> Task:
        """Who goes on; where nobody can, time passes until somebody can."""
        while True:
            ready = [task for task in self._tasks if task.may_run(self.now)]
            if ready:
                return ready[0] if len(ready) == 1 else self.chance.choice(ready)
            wakes = [
                max(task.wakes, task.process.paused_until) for task in self._tasks if task.wakes is not None
            ]
            wakes += [
                task.process.paused_until for task in self._tasks if task.process.paused_until > self.now
            ]
            assert wakes, f"all wait for each other: {[task.name for task in self._tasks]}"
            self.now = min(wakes)

    def _switch(self, me: Task) -> None:
        other = self._next()
        if other is not me:
            other.gate.release()
            me.gate.acquire()
            self.current = me
        me.ready, me.wakes = None, 0.0
        if me.process.is_dead:
            raise Crashed

    def task(self) -> Task:
        assert self.current is not None, "only tasks wait"
        return self.current

    def point(self) -> None:
        """Others may go on here."""
        me = self.task()
        self._take_effect()
        if self.chance.random() >= STAYS or me.process.paused_until > self.now:
            self._switch(me)

    def wait(self, ready: Callable[[], bool] | None, seconds: float | None = None) -> bool:
        """Until that is so, or for so long."""
        me = self.task()
        me.ready, me.wakes = ready, None if seconds is None else self.now + seconds
        self._switch(me)
        return ready is None or ready()

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    # What happens to requests

    def ask(self, process: Process, what: str, effect: Callable[[], Any]) -> Any:
        """What the store answers, if it does."""
        task, fate = self.task(), self._fate()
        self.requests += 1
        self.now += self.chance.random() * LATENCY_S
        self.point()
        match fate:
            case "crash":
                self._crash(task, what)
            case "crash-late":
                self._postpone(process, what, effect)
                self._crash(task, what)
            case "refused" | "late":
                if fate == "late":
                    self._postpone(process, what, effect)
                self._tell(task, what, fate)
                raise StoreError(f"{what} was {fate}")
            case "pause":
                self._pause(task)
        answer = self._answered(process, what, effect)
        self.point()
        match fate:
            case "crash-after":
                self._crash(task, what)
            case "lost":
                self._tell(task, what, fate)
                raise StoreError(f"the answer to {what} was lost")
            case "pause-after":
                self._pause(task)
        if isinstance(answer, RefoldError):
            raise answer
        return answer

    def _fate(self) -> str:
        weather, chance = self.weather, self.chance.random()
        if self.requests >= weather.until:
            return "fine"
        for fates, likely in (
            (("refused",), weather.refused),
            (("lost",), weather.lost),
            (("late",), weather.late),
            (("crash", "crash-after", "crash-late"), weather.crash),
            (("pause", "pause-after"), weather.pause),
        ):
            if chance < likely:
                return self.chance.choice(fates)
            chance -= likely
        return "fine"

    def _answered(self, process: Process, what: str, effect: Callable[[], Any]) -> Any:
        try:
            answer = effect()
        except RefoldError as error:
            answer = error
        self.trace.append((self.now, process.name, what, _shown(answer)))
        return answer

    def _postpone(self, process: Process, what: str, effect: Callable[[], Any]) -> None:
        due, process.has_late = self.now + self.chance.choice(LATE_S), True
        self._late.append((due, partial(self._answered, process, f"{what} (late)", effect)))

    def _take_effect(self) -> None:
        due = [one for one in self._late if one[0] <= self.now]
        if due:
            self._late = [one for one in self._late if one[0] > self.now]
            for _, effect in due:
                effect()

    def _tell(self, task: Task, what: str, fate: str) -> None:
        task.faults += 1
        self.counts[fate] += 1
        self.trace.append((self.now, task.process.name, what, fate))

    def _crash(self, task: Task, what: str) -> None:
        self._tell(task, what, "crash")
        self._blame(task.process)
        task.process.is_dead = True
        raise Crashed

    def _pause(self, task: Task) -> None:
        seconds = self.chance.choice(PAUSE_S)
        self._tell(task, f"{seconds} s", "pause")
        self._blame(task.process)
        task.process.paused_until = self.now + seconds
        self._switch(task)

    def stall(self) -> None:
        """Where processes pause, many do between a summary and its use: others take their lease meanwhile."""
        if self.requests < self.weather.until and self.chance.random() < min(0.4, 10 * self.weather.pause):
            self._pause(self.task())

    def _blame(self, process: Process) -> None:
        for task in self._tasks:
            task.faults += task.process is process

    # What models do

    def answered(self, ask: Ask, timeout_s: float) -> Outcome:
        """Sooner or later, or not; a process can crash or pause meanwhile as well."""
        task, process = self.task(), self.task().process
        content = (self.oracle.erased, ask.system, ask.prompt, ask.max_tokens)
        fate, fails = self._fate(), self.chance.random() < self.weather.model
        task.payment = Payment(content, task, fails=fails)
        self.payments.append(task.payment)
        self.counts["asked"] += 1
        self.trace.append((self.now, process.name, "model", f"{len(ask.prompt)}"))
        self.sleep(self.chance.uniform(0, 2 * timeout_s if fails else timeout_s / 2))
        if "crash" in fate:
            self._crash(task, "model")
        if "pause" in fate:
            self._pause(task)
        if fails:
            return Outcome(None, "the model fails", 1)
        said = next((one.text for one in reversed(ask.messages) if one.text), "none")
        text = HEADINGS.format(" ".join(said.split()[:6]))
        return Outcome(Answer(text, "a model", Usage(len(ask.prompt) // 4, 20)), None, 1)


def _shown(answer: Any) -> str:
    if isinstance(answer, RefoldError):
        return f"{type(answer).__name__}: {answer}"
    if isinstance(answer, list | dict):
        return f"{len(answer)}"
    if isinstance(answer, tuple) and not hasattr(answer, "_fields"):
        return " ".join(map(_shown, answer))
    if isinstance(answer, Snapshot):
        return f"{answer.at} {answer.digest.hex()}"
    return answer.hex() if isinstance(answer, bytes) else str(answer)


class SimulatedStore:
    """A store as one process reaches it: whatever `MemoryStore` can be asked goes through the world."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def close(self) -> None:
        pass

    def _ask(self, name: str, *given: Any, **named: Any) -> Any:
        world = self._world
        if self._process.is_dead:  # its garbage is collected
            raise StoreError("this process is gone")

        def effect() -> Any:
            answer = getattr(world.engine, name)(*given, **named)
            answer = list(answer) if isinstance(answer, Iterator) else answer
            world.oracle.judge(name, given, named, answer)
            world.counts["committed under a lease"] += name == "append" and named.get("lease") is not None
            return answer

        payment = world.task().payment if name == "keep_summary" else None
        if payment is not None:
            payment.was_kept = True
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


class SimulatedJob(Job):
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


async def _called(
    summarizer: Summarizer, ask: Ask, *, timeout_s: float, spend: Callable[[], str | None], home: object
) -> Outcome:
    _cancel_here()
    refused = spend()
    if refused is not None:
        return Outcome(None, refused, 0, is_free=True)
    outcome = _world().answered(ask, timeout_s)
    _cancel_here()
    return outcome


_worlds: list[World] = []


def _world() -> World:
    return _worlds[-1]


@contextmanager
def inside(world: World) -> Iterator[None]:
    """Whatever the product does in here, it does in this world."""
    import random

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
        stack(patch.object(refold.notify, "RLock", Turnstile))
        stack(patch.object(refold.summaries, "Job", SimulatedJob))
        stack(patch.object(refold.summaries, "sleep", _slept))
        stack(patch.object(refold.writing, "call", _called))
        stack(patch.object(refold.record, "SNAPSHOT_EVERY", SNAPSHOT_EVERY))
        yield
