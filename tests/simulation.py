"""Sessions of one conversation in a simulated world, by a seed: whatever happens to them, promises are kept.

python tests/simulation.py --seeds 100000 [--first N] [--processes 2]
python tests/simulation.py --seed N --verbose
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from random import Random
from typing import Any, NamedTuple

from refold.config.config import load_config
from refold.core import codec
from refold.core.errors import CorruptError, NotFoundError, OverBudgetError, RefoldError, StoreError
from refold.core.message import Message, Text
from refold.core.view import fold
from refold.dialects.rules.targets import check_request
from refold.session.inspect import parse
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key
from simulated import inside, simulated, store_of
from world import Crashed, Process, Weather, World

CONVERSATION = Key("somebody", "a conversation")
SETTINGS: dict[str, Any] = {
    "models": {"tiny": {"window": 260, "max_output": 20}},
    "agents": {
        "default": {"summarizer": {"max_tokens": 90, "window": 2_000, "timeout_s": 30, "wait_s": 10}},
        "sliding": {"compact": {"strategy": "sliding-window"}},
    },
}
CONFIG = load_config(SETTINGS)
WORDS = ("river stone amber falcon maple copper lantern meadow harbor velvet thunder willow").split()  # noqa: SIM905
STEPS_ASIDE_S = 1.0
"""How long somebody waits before another try, at most."""


class Model:
    """A summarizer. What it does is up to the world."""

    name = "a model"

    def __call__(self, ask: Any, /) -> str:
        raise AssertionError("the world answers for it")


MODEL = Model()


class Plan(NamedTuple):
    """What a seed makes of the world."""

    weather: Weather
    actors: tuple[str, ...]
    is_far: bool
    """Whether the store answers in batches, as those across a network do."""


def plan(seed: int) -> Plan:
    chance = Random(f"plan {seed}")
    likely: dict[str, float] = {}
    if chance.random() > 0.15:  # else nothing happens but that all work at once
        likely = {name: chance.choice((0.0, 0.01, 0.04)) for name in ("refused", "lost", "late")}
        likely |= {name: chance.choice((0.0, 0.004, 0.012)) for name in ("crash", "pause")}
        likely |= {"model": chance.choice((0.0, 0.0, 0.3)), "skew_s": chance.choice((0.0, 0.0, 30.0))}
    if chance.random() < 0.3:  # several who would pay for the same summary
        actors = ["writer"] * chance.choice((1, 2)) + ["compactor"] * chance.choice((2, 3))
        likely |= {"pause": chance.choice((0.0, 0.04, 0.1))}
    else:
        actors = ["writer"] * chance.choice((1, 2, 2, 3))
        actors += ["fitter"] * chance.choice((0, 1, 1)) + ["compactor"] * chance.choice((0, 1, 1, 2))
        actors += ["editor"] * chance.choice((0, 0, 1)) + ["forker"] * chance.choice((0, 0, 1))
        actors += ["eraser"] * (chance.random() < 0.2)
    return Plan(Weather(**likely), tuple(actors), chance.random() < 0.5)


class Actor:
    """Somebody who works on conversations, in one process after the other."""

    def __init__(self, world: World, kind: str, name: str) -> None:
        self.world, self.name, self.kind = world, name, kind
        self.chance = Random(f"{world.seed} {name}")
        self.deeds: dict[str, Callable[[Session], None]] = {
            "writer": self._write,
            "fitter": self._fit,
            "compactor": self._compact,
            "editor": self._edit,
            "forker": self._fork,
            "eraser": self._erase,
        }
        self.left = {"writer": 7, "eraser": 3, "forker": 2}.get(kind, 4)
        self.said = 0
        """How many messages it began to say."""
        self.key = CONVERSATION
        self.acknowledged: dict[str, tuple[int, int, Key]] = {}
        """The place of each message, how often something was erased before it was said, and where."""
        self._waiting: list[str] = []

    def live(self) -> None:
        """Until it has done what it is here for, or there is no world any more."""
        world, lives = self.world, 0
        world.sleep(self.chance.random() * {"writer": 0.0, "eraser": 1.0}.get(self.kind, 10.0))
        while self.left > 0:
            task, lives, seconds = world.task(), lives + 1, 0.0
            process = task.process = world.process(f"{self.name}.{lives}")
            try:
                self._work(process)
            except Crashed:
                if world.failure is not None:
                    raise
                seconds = 20.0
            except StoreError as error:
                self._bear(error)
                seconds = STEPS_ASIDE_S
            except NotFoundError:
                if not world.oracle.erased:
                    raise
            process.is_dead = True  # so that nothing happens when its garbage is collected
            task.process = Process(f"{self.name} (nowhere)", 0.0)
            world.sleep(self.chance.random() * seconds)

    def _work(self, process: Process) -> None:
        session = self._open(process, self.key)
        while self.left > 0:
            self.deeds[self.kind](session)
            self.left -= 1
            self.world.counts["deeds"] += 1
            if not self.left or self.chance.random() < 0.3:
                demand_live(self.world, session)
            self.world.sleep(self.chance.choice((0.0, 0.01, 0.5, 5.0)))
        if self.chance.random() < 0.5:
            session.close()
            demand_live(self.world, session)

    def _open(self, process: Process, key: Key) -> Session:
        agent = None if self.kind in ("compactor", "editor") else "sliding"
        summarizer = MODEL if self.kind in ("compactor", "editor") else None
        rest: dict[str, Any] = {"agent": agent, "summarizer": summarizer, "model": "tiny"}
        return Session(store_of(self.world, process), key, config=CONFIG, **rest)

    # What they do

    def _write(self, session: Session) -> None:
        if not self._waiting:
            many = self.chance.choice((1, 1, 1, 2, 3))
            self._waiting = [f"{self.name} {self.said + n}" for n in range(many)]
            self.said += many
        self._say(session, self._waiting)
        self._waiting = []
        if self.chance.random() < 0.2:
            self._fit(session)

    def _say(self, session: Session, names: list[str]) -> None:
        """Until it is acknowledged: whoever retries says the same ids again."""
        messages = [self._message(name) for name in names]
        while True:
            before = self.world.oracle.erased
            try:
                places = session.append(messages) if len(messages) > 1 else [session.append(messages[0])]
                break
            except StoreError as error:
                self._bear(error)
                self.world.counts["retries"] += 1
                if self.chance.random() < 0.05:
                    return  # nobody knows whether it was stored
                self.world.sleep(self.chance.random() * STEPS_ASIDE_S)
        for name, place in zip(names, places, strict=True):
            self.acknowledged[name] = (place, before, session.key)

    def _message(self, name: str) -> Message:
        """As many words as its name makes of it."""
        many = 4 + sum(name.encode()) % 14
        text = " ".join(WORDS[(len(name) + n * n) % len(WORDS)] for n in range(many))
        role = "user" if sum(name.encode()) % 3 else "assistant"
        return Message(role, (Text(f"{name} {text}"),), name)

    def _fit(self, session: Session) -> None:
        try:
            fitted = session.fit()
        except OverBudgetError:
            self.world.counts["over budget"] += 1
            return
        if not fitted.messages:
            return  # nothing was said yet
        report = fitted.report
        found = check_request("openai-chat", fitted.request, tokens=report.tokens.final, room=240)
        assert not found, f"{self.name} got an invalid request: {found}"
        self.world.counts["fits"] += 1

    def _compact(self, session: Session) -> None:
        match self.chance.choice(("fit", "compact", "compact")):
            case "fit":
                self._fit(session)
            case "compact":
                session.compact(keep_recent=self.chance.choice((1, 2, 4)))

    def _edit(self, session: Session) -> None:
        at = self.chance.randrange(max(1, session.get_count()))
        deeds: list[Callable[[], object]] = [
            lambda: session.pin(at),
            lambda: session.unpin(at),
            lambda: session.undo(),
            lambda: session.restore(at),
            lambda: session.correct(at, f"{self.name} corrects {at}"),
            lambda: session.compact(keep_recent=3),
        ]
        try:
            self.chance.choice(deeds)()
            self.world.counts["amended"] += 1
        except StoreError as error:
            self._bear(error)
        except RefoldError:
            self.world.counts["refused amendments"] += 1

    def _bear(self, error: StoreError) -> None:
        """Whoever meets with one tries again. What is stored is never damaged; but whoever reads while all is
        erased and begun anew may find another record where the words of the first were."""
        if isinstance(error, CorruptError):
            self.world.counts["erased under a reader"] += 1
            if not self.world.oracle.erased:
                raise AssertionError(f"{self.name} found the record damaged") from error

    def _fork(self, session: Session) -> None:
        try:
            fork = session.fork(f"a fork by {self.name}, {self.left}", at=None)
        except StoreError:
            raise
        except RefoldError:
            return  # there is nothing to fork, or there is one already: an answer was lost
        self.world.counts["forks"] += 1
        self.said += 1
        self._say(fork, [f"{self.name} {self.said - 1}"])
        self._fit(fork)
        demand_live(self.world, fork)

    def _erase(self, session: Session) -> None:
        self.world.sleep(self.chance.choice((0.0, 0.5, 5.0)))
        session.clear(with_forks=self.chance.random() < 0.5)
        self.world.counts["erased"] += 1


# What must hold


def demand_live(world: World, session: Session) -> None:
    """What a session shows is what `fold` makes of the record, as far as it knows that."""
    record = session.record
    if not record._known:
        return
    next = record._live.state.next
    entries, digests = world.oracle.entries.get(session.key, []), world.oracle.digests.get(session.key, [])
    if next == 0 or len(entries) < next or digests[next - 1].hex() != record.tip:
        return  # erased since then
    events = [codec.decode(entry, parse) for entry in entries[:next]]
    assert record._live.freeze() == fold(events), (
        f"{session.key.conversation}: not what the record makes of it"
    )
    world.counts["views compared"] += 1


def demand_all(world: World, actors: list[Actor]) -> None:
    """Of the world as it is in the end."""
    oracle, engine = world.oracle, world.engine
    for key, entries in oracle.entries.items():
        links = list(engine.read(key))
        assert [link.entry for link in links] == entries, f"{key.conversation}: not what was acknowledged"
        digest = codec.GENESIS
        for place, link in enumerate(links):
            digest = codec.chain(digest, link.entry)
            assert (link.entry.at, link.digest) == (place, digest), f"the chain breaks at {place}"
        events = [codec.decode(entry, parse) for entry in entries]
        again, expected = Session(engine, key), fold(events)
        assert again.view() == expected, "the snapshot and what came after it are not the fold"
        assert again.view().messages == expected.messages
        world.counts["snapshots"] += len(engine.saved(key))
        world.counts["events"] += len(entries)
        ids = [entry.id for entry in entries if entry.id is not None]
        assert len(ids) == len(set(ids)), f"stored twice: {[id for id, n in Counter(ids).items() if n > 1]}"
        said = {f"{actor.name} {n}" for actor in actors for n in range(actor.said)}
        assert said.issuperset(ids), f"never said: {set(ids) - said}"
        for actor in actors:
            numbers = [int(id.split()[-1]) for id in ids if id.startswith(f"{actor.name} ")]
            assert numbers == sorted(numbers), f"{actor.name} said it in another order: {numbers}"
    assert {row.key for row in engine.conversations()} == set(oracle.entries)
    demand_acknowledged(world, actors)
    demand_paid_once(world)


def demand_acknowledged(world: World, actors: list[Actor]) -> None:
    for actor in actors:
        for name, (place, erased, key) in actor.acknowledged.items():
            world.counts["acknowledged"] += 1
            if erased < world.oracle.erased:
                continue
            entries = world.oracle.entries.get(key, [])
            assert place < len(entries), f"{name!r} was acknowledged and is gone"
            assert entries[place].id == name, f"{name!r} was acknowledged and is not at {place}"


def demand_paid_once(world: World) -> None:
    """Unless something happened to whoever paid first, or clocks disagree on who may."""
    good = [payment for payment in world.payments if payment.was_kept and payment.is_clean]
    paid = Counter(payment.content for payment in good)
    world.counts["summaries"] += len(paid)
    if not world.weather.skew_s:
        twice = [content for content, n in paid.items() if n > 1]
        who = [payment.process.name for payment in good if payment.content in twice]
        assert not twice, f"paid for more than once: {who}"


# Running it


class Outcome(NamedTuple):
    seed: int
    counts: Counter[str]
    digest: str
    """Of all that happened."""
    problem: str | None
    trace: list[tuple[float, str, str, str]]


def play(seed: int, make: Callable[[], MemoryStore] = MemoryStore) -> Outcome:
    """One world, from its beginning to its end; to be called within `simulated()`."""
    what = plan(seed)
    world = World(seed, what.weather, make(), is_far=what.is_far)
    names = Counter[str]()
    actors = list[Actor]()
    problem = None
    with inside(world):
        for kind in what.actors:
            names[kind] += 1
            actors.append(Actor(world, kind, f"{kind}{names[kind]}"))
            world.begin(actors[-1].name, world.process(actors[-1].name), actors[-1].live)
        try:
            world.run()
            world.begin("judge", world.process("judge"), lambda: demand_all(world, actors))
            world.run()
        except BaseException as error:
            problem = "".join(traceback.format_exception(error))
    world.counts["requests"] += world.requests
    world.counts["fenced off"] += sum("no longer holds" in told for *_, told in world.trace)
    world.counts["conflicts"] += sum(told.startswith("ConflictError") for *_, told in world.trace)
    digest = blake2b(repr(world.trace).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Outcome(seed, world.counts, digest, problem, world.trace)


def several(
    first: int, many: int, make: Callable[[], MemoryStore] = MemoryStore
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """So many seeds from the first on: what happened, and what must not have."""
    total, problems = Counter[str](), list[tuple[int, str]]()
    with simulated():
        for seed in range(first, first + many):
            outcome = play(seed, make)
            total += outcome.counts
            total["seeds"] += 1
            if outcome.problem:
                problems.append((seed, outcome.problem))
    return total, problems


def batches(first: int, seeds: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + seeds, size):
        yield start, min(size, first + seeds - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="all that happens, one line each")
    asked = parser.parse_args()
    if asked.seed is not None:
        return replay(asked.seed, asked.verbose)
    began, total, problems = time.monotonic(), Counter[str](), list[tuple[int, str]]()
    with ProcessPoolExecutor(asked.processes) as pool:
        size = max(1, min(500, asked.seeds // (2 * asked.processes)))
        for done, found in pool.map(several, *zip(*batches(asked.first, asked.seeds, size), strict=True)):
            total += done
            problems += found
            print(
                f"{total['seeds']:7,} seeds, {total['requests']:,} requests, {total['crash']:,} crashes,"
                f" {len(problems)} problems, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    alike = {problem.splitlines()[-1][:60]: (seed, problem) for seed, problem in reversed(problems)}
    for seed, problem in list(alike.values())[:9]:
        print(f"\nseed {seed}:\n{problem}")
    print("\n" + "\n".join(f"{count:12,} {name}" for name, count in sorted(total.items())))
    if problems:
        print(f"{len(problems)} seeds broke a promise: {[seed for seed, _ in problems][:50]}")
    else:
        print(f"{total['seeds']:,} seeds, no promise broken, {time.monotonic() - began:.0f} s")
    return bool(problems)


def replay(seed: int, verbose: bool) -> int:
    print(plan(seed))
    with simulated():
        outcome = play(seed)
    for now, process, asked, answer in outcome.trace if verbose else ():
        print(f"{now - 1_000_000:10.3f}  {process:14} {asked:40} {answer[:90]}")
    print(dict(outcome.counts))
    print(outcome.problem or f"no promise broken; the digest of all that happened is {outcome.digest}")
    return bool(outcome.problem)


if __name__ == "__main__":
    sys.exit(main())
