"""Two writers, one of them killed at a random moment, over and over: nothing acknowledged may be lost.

python tests/crash.py --rounds 1000 [--seed N]
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import refold
from refold.core.codec import GENESIS, chain
from refold.core.view import fold
from refold.models.count import counter
from refold.session import doctor
from refold.stores.sqlite import SQLiteStore

ROUNDS_EACH = 10
"""Rounds in one conversation, before there is another one in the same file."""
DEEDS = 25
"""Things that a writer does in one round."""
PATIENCE_S = 60
TINY = {"models": {"tiny": {"window": 800, "max_output": 80}}}

Deed = list[str] | None
"""The names of messages to say at once, or None: fit the window."""


def plan(seed: int, round: int, writer: str) -> list[Deed]:
    """What a writer does: single messages, batches, and fits that hide older ones."""
    chance = random.Random(f"{seed} {round} {writer}")
    deeds: list[Deed] = []
    said = 0
    for _ in range(DEEDS):
        size = chance.choice([1, 1, 1, 1, 3, 5, 0])
        deeds.append([f"{round} {writer} {said + n}" for n in range(size)] or None)
        said += size
    return deeds


def message(name: str) -> refold.Message:
    """As many words as its name makes of it; some so long that they are compressed."""
    return refold.Message("user", (refold.Text(f"{name} " * (1 + sum(name.encode()) % 30)),), name)


def open_session(path: Path, conversation: str) -> refold.Session:
    return refold.open(conversation, store=f"sqlite:///{path}", model="tiny", config=TINY)


def write(path: Path, conversation: str, deeds: list[Deed], acknowledge: Callable[[str], object]) -> None:
    session = open_session(path, conversation)
    for deed in deeds:
        if deed is None:
            with suppress(refold.OverBudgetError):
                session.fit()
        elif len(deed) == 1:
            session.append(message(deed[0]))
        else:
            session.append([message(name) for name in deed])
        for name in deed or ():
            acknowledge(name)
    if len(deeds[0] or ()) == 1:  # the others leave the log for the next round to recover
        session.close()


class Writer:
    """A process forked from this one, where everything is loaded already."""

    def __init__(self, path: Path, conversation: str, deeds: list[Deed]) -> None:
        self._read, end = os.pipe()
        self._heard = b""
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                signal.alarm(PATIENCE_S)
                write(path, conversation, deeds, lambda name: os.write(end, f"{name}\n".encode()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(end)

    @property
    def acknowledged(self) -> list[str]:
        return self._heard.decode().splitlines()

    def listen(self, lines: int | None = None) -> None:
        """Waits until it has acknowledged so many messages, or has ended."""
        while lines is None or self._heard.count(b"\n") < lines:
            more = os.read(self._read, 65_536)
            if not more:
                break
            self._heard += more

    def end(self) -> int:
        """Waits for it; its exit code, negative for the signal that killed it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.listen()
        os.close(self._read)
        return code


def play(path: Path, seed: int, round: int) -> Counter[str]:
    """One round. What happened in it, by name."""
    chance = random.Random(f"{seed} {round}")
    conversation = f"conversation {round // ROUNDS_EACH}"
    plans = {name: plan(seed, round, name) for name in ("a", "b")}
    writers = {name: Writer(path, conversation, deeds) for name, deeds in plans.items()}
    victim, survivor = chance.sample(list(writers.values()), 2)
    victim.listen(chance.randrange(DEEDS))
    time.sleep(chance.random() * 0.003)
    os.kill(victim.pid, signal.SIGKILL)
    codes = victim.end(), survivor.end()
    assert codes[0] in (0, -signal.SIGKILL), f"the victim failed by itself: {codes[0]}"
    assert codes[1] == 0, f"the survivor failed: {codes[1]}"

    session = open_session(path, conversation)
    kept = 0
    for name, writer in writers.items():
        stored = stored_names(session, f"{round} {name} ")
        wanted = [one for deed in plans[name] for one in deed or ()]
        heard = writer.acknowledged
        assert heard == wanted[: len(heard)]
        assert stored == wanted[: len(stored)], "stored twice, out of order, or never said"
        assert len(stored) >= len(heard), f"acknowledged but lost: {wanted[len(stored) : len(heard)]}"
        ends = {sum(len(deed or ()) for deed in plans[name][:n]) for n in range(DEEDS + 1)}
        assert len(stored) in ends, "half a batch is stored"
        kept += len(heard)
        for deed in plans[name]:  # whoever was killed says all of it again
            session.append([message(one) for one in deed or ()])
        assert stored_names(session, f"{round} {name} ") == wanted
    verify(session)
    session.close()
    killed = codes[0] != 0
    return Counter(rounds=1, killed=killed, acknowledged=kept)


def stored_names(session: refold.Session, start: str) -> list[str]:
    ids = [one.id for one in session.get_all()]
    return [id for id in ids if id.startswith(start)]


def verify(session: refold.Session) -> None:
    """The chain holds from its beginning; the snapshot and what follows it equal the fold."""
    digest = GENESIS
    for place, link in enumerate(session.store.read(session.key)):
        digest = chain(digest, link.entry)
        assert (place, digest) == (link.entry.at, link.digest), f"the chain breaks at {place}"
    expected = fold(list(session.events()))
    again = refold.Session(session.store, session.key)
    assert again.view() == session.view() == expected, "the snapshot is not the fold"
    assert again.view().messages == expected.messages


def summary(path: Path) -> Counter[str]:
    """What is in the file in the end, after a look at all of it."""
    store = SQLiteStore(path)
    assert doctor.examine(store) == []
    found = Counter[str]()
    for row in store.conversations():
        found["snapshots"] += len(store.saved(row.key))
        for link in store.read(row.key):
            found["messages" if link.entry.kind == "said" else "edits"] += 1
    store.close()
    return found


def run(
    rounds: int, seed: int, folder: Path, tell: Callable[[str], None] = lambda line: None
) -> Counter[str]:
    """Plays so many rounds in one file.

    Raises:
        AssertionError: something was lost; says the round, and the file is left as it is.
    """
    path, total, began = folder / "crash.db", Counter[str](), time.monotonic()
    counter(None).text("loads the vocabulary, before any process is forked")
    for round in range(rounds):
        try:
            total += play(path, seed, round)
        except AssertionError as error:
            raise AssertionError(f"round {round} of seed {seed}, in {path}: {error}") from error
        if (round + 1) % 50 == 0:
            tell(f"{round + 1:5,} rounds, {total['killed']:,} killed, {time.monotonic() - began:.0f} s")
    return total + summary(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="refold-crash-"))
    print(f"{asked.rounds:,} rounds of seed {asked.seed} in {folder}", flush=True)
    done = run(asked.rounds, asked.seed, folder, lambda line: print(line, flush=True))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    print(
        f"{done['rounds']:,} rounds, {done['killed']:,} writers killed at work,"
        f" {done['acknowledged']:,} messages acknowledged: none lost, none twice, none out of order;"
        f" {done['messages']:,} messages and {done['edits']:,} edits stored, every chain verified,"
        f" every snapshot equal to its fold; seed {asked.seed}, {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
