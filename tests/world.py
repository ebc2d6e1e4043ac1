"""A world that follows from a seed: one clock, tasks that take turns, and requests that meet with something.

Exactly one task runs at a time. Whenever it asks the store, sleeps or waits, the seed says who goes on, when
the request takes effect, and whether its process lives to hear the answer.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from threading import Lock, Thread
from typing import Any, NamedTuple

from oracle import Oracle
from refold.core.errors import RefoldError, StoreError
from refold.core.message import Usage
from refold.stores.memory import MemoryStore
from refold.stores.store import Snapshot
from refold.summaries.call import CallOutcome
from refold.summaries.summarizer import Answer, Ask

STAYS = 0.4
"""How likely it is that whoever may go on next is the one who goes on."""
LATENCY_S = 0.02
"""What a request to the store takes at most, while nothing is wrong."""
LATE_S = (0.01, 0.1, 1.0, 30.0, 120.0)
"""When a request takes effect that nobody waits for any more."""
PAUSE_S = (0.5, 5.0, 20.0, 50.0, 200.0)
"""Some of them are longer than any lease."""


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
        late, self._late = self._late, []
        for _, effect in late:
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
        if process.is_dead:  # what it would do at its end, or when its garbage is collected
            raise StoreError("this process is gone")
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

    def answered(self, ask: Ask, timeout_s: float) -> CallOutcome:
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
            return CallOutcome(None, "the model fails")
        said = next((one.text for one in reversed(ask.messages) if one.text), "none")
        text = HEADINGS.format(" ".join(said.split()[:6]))
        return CallOutcome(Answer(text, "a model", Usage(len(ask.prompt) // 4, 20)))


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
