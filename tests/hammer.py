"""Many processes append to a store at once, while its server is killed over and over: nothing is lost.

python tests/hammer.py postgresql|valkey|sqlite [--writers 8] [--messages 1000] [--conversations 1]
                       [--kill-every SECONDS] [--timeout-s SECONDS]
"""

import argparse
import re
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import refold
from refold.core.errors import RefoldError
from refold.stores.store import Store, open_store
from refold.testing.samples import assert_view_is_fold, verified
from servers import ALWAYS, Postgres, Valkey, remove

ENGINES = ("postgresql", "valkey", "sqlite")
PATIENCE_S = 120.0
"""How long a writer tries to get one message stored."""
AGAIN_S = 0.05
"""Between two tries."""


class Heard(NamedTuple):
    """What a writer was told that is stored."""

    conversation: str
    name: str
    place: int
    seconds: float


class Server(NamedTuple):
    url: str
    kill: Callable[[], None] | None
    """Ends it as a power cut would, and starts it again."""


@contextmanager
def serving(engine: str) -> Iterator[Server]:
    """A server of one's own, with nothing in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"refold-{engine}-"))  # a socket's path must be short
    if engine == "sqlite":
        yield Server(f"sqlite:///{folder}/log.db", None)
    else:
        server = Postgres(folder) if engine == "postgresql" else Valkey(folder, *ALWAYS)
        server.start()

        def kill() -> None:
            server.kill()
            server.start()

        try:
            yield Server(server.database() if isinstance(server, Postgres) else server.url, kill)
        finally:
            server.stop()
    remove(folder)


# In the writers' own processes


def message(name: str) -> refold.Message:
    return refold.Message("user", (refold.Text(f"{name} " * (1 + sum(name.encode()) % 30)),), name)


def write(url: str, writer: int, messages: int, conversations: int, told: Connection) -> None:
    """Says its messages one by one, each to the next conversation, and tells what is acknowledged."""
    errors = Counter[str]()
    try:
        store = retried(lambda: open_store(url), errors)
        sessions: dict[int, refold.Session] = {}
        for n in range(messages):
            name, where = f"writer {writer} {n}", n % conversations
            if where not in sessions:
                sessions[where] = retried(partial(refold.open, conversation(where), store=store), errors)
            began = time.monotonic()
            place = retried(partial(sessions[where].append, message(name)), errors)
            told.send(Heard(conversation(where), name, place, time.monotonic() - began))
        store.close()
    except BaseException:
        told.send(traceback.format_exc())
    told.send(errors)


def retried(work, errors: Counter[str]):
    """What it gives in the end. Whatever a store raises on purpose is worth another try; nothing else is."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return work()
        except RefoldError as error:
            errors[f"{type(error).__name__}: {error}"] += 1
            if time.monotonic() > until:
                raise
            time.sleep(AGAIN_S)


def conversation(n: int) -> str:
    return f"conversation {n}"


# In this one


class Done(NamedTuple):
    acknowledged: int
    seconds: float
    kills: int
    longest: float
    """Seconds that one message took, all its tries included."""
    errors: Counter[str]
    """What writers were told meanwhile, and retried."""


def run(
    engine: str,
    writers: int,
    messages: int,
    conversations: int,
    *,
    kill_every: float = inf,
    kill_each: float = inf,
    timeout_s: float | None = None,
) -> Done:
    """Kills the server every so many seconds, and each time that so many messages were acknowledged.

    `timeout_s` is the store's own patience; the shorter it is, the more errors the writers see.

    Raises:
        AssertionError: something was lost, stored twice or out of order, or a writer was told nonsense.
    """
    with serving(engine) as server:
        open_store(server.url).close()  # whatever has to be made is made once
        url = server.url
        if timeout_s is not None:
            url += f"{'&' if '?' in url else '?'}timeout_s={timeout_s:g}"
        spawn, began, kills = get_context("spawn"), time.monotonic(), 0
        heard, errors, failed = list[Heard](), Counter[str](), list[str]()
        pipes = list[Any]()
        for n in range(writers):
            ours, theirs = spawn.Pipe(duplex=False)
            spawn.Process(target=write, args=(url, n, messages, conversations, theirs)).start()
            theirs.close()
            pipes.append(ours)
        due, goal = began + kill_every, kill_each
        while pipes:
            for pipe in wait(pipes, None if due == inf else max(0.0, due - time.monotonic())):
                try:
                    match pipe.recv():
                        case Heard() as one:
                            heard.append(one)
                        case Counter() as told:
                            errors += told
                        case problem:
                            failed.append(problem)
                except EOFError:
                    pipes.remove(pipe)
            if pipes and server.kill and (time.monotonic() >= due or len(heard) >= goal):
                server.kill()
                kills, due, goal = kills + 1, time.monotonic() + kill_every, len(heard) + kill_each
        seconds = time.monotonic() - began
        assert not failed, f"{len(failed)} writers failed:\n{failed[0]}"
        assert len(heard) == writers * messages
        store = open_store(server.url)
        demand(store, heard, writers, conversations)
        store.close()
        return Done(len(heard), seconds, kills, max(one.seconds for one in heard), errors)


def demand(store: Store, heard: list[Heard], writers: int, conversations: int) -> None:
    """All that was acknowledged is there once, in its place and in its writer's order, and nothing else."""
    told = defaultdict[str, dict[str, int]](dict)
    for one in heard:
        told[one.conversation][one.name] = one.place
    rows = list(store.conversations())
    assert sorted(row.key.conversation for row in rows) == sorted(map(conversation, range(conversations)))
    for row in rows:
        entries = verified(store, row.key)
        ids = [entry.id for entry in entries]
        assert len(ids) == len(set(ids)), f"stored twice: {[id for id, n in Counter(ids).items() if n > 1]}"
        lost = told[row.key.conversation].keys() - ids
        assert not lost, f"{len(lost)} were acknowledged and are lost, such as {min(lost)!r}"
        assert {entry.id: entry.at for entry in entries} == told[row.key.conversation]
        for writer in range(writers):
            numbers = [int(id.split()[-1]) for id in ids if id and id.startswith(f"writer {writer} ")]
            assert numbers == sorted(numbers), f"writer {writer} said them in another order"
        assert_view_is_fold(refold.open(row.key.conversation, store=store))


def alike(errors: Counter[str]) -> Counter[str]:
    """By their words, whatever numbers and places are in them."""
    found = Counter[str]()
    for error, many in errors.items():
        found[re.sub(r"\d+", "N", error)] += many
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--messages", type=int, default=1_000, help="of each writer")
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--kill-every", type=float, default=inf, metavar="SECONDS")
    parser.add_argument("--timeout-s", type=float, metavar="SECONDS", help="the store's own patience")
    asked = parser.parse_args()
    if asked.engine == "sqlite" and asked.kill_every < inf:
        parser.error("sqlite has no server to kill; tests/crash.py kills its writers")
    what = (asked.engine, asked.writers, asked.messages, asked.conversations)
    done = run(*what, kill_every=asked.kill_every, timeout_s=asked.timeout_s)
    for error, many in alike(done.errors).most_common():
        print(f"{many:7,} × {error}")
    print(
        f"{asked.engine}: {asked.writers} processes × {asked.messages:,} messages to {asked.conversations}"
        f" conversations in {done.seconds:.1f} s, {done.acknowledged / done.seconds:,.0f} a second;"
        f" the server was killed {done.kills} times, {sum(done.errors.values()):,} errors were retried, one"
        f" message took {done.longest:.1f} s at most; all there once, in order, every chain verified"
    )


if __name__ == "__main__":
    sys.exit(main())
