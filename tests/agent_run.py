"""An agent over a folder of real files, once in peace and once killed over and over: the same comes of both.

python tests/agent_run.py --steps 500 --kills 50 [--seed N]

The model stands in for a real one: it refuses every request that is invalid or larger than its window, and
its final answer is a digest of every result that it was ever shown. The tools are real and log their runs.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from refold.agent import Agent, Asked, Success
from refold.models.count import counter
from refold.session import doctor
from refold.session.api import open as open_session
from refold.stores.sqlite import SQLiteStore
from refold.testing.stand_in import Reply, StandIn

WINDOW = 16_000
LONGEST = 2_500
"""Characters of a result, so few that the newest are shown whole: the model sees what the tool gave."""
SETTLED = 100
"""Steps after which the memory of the process must not grow any more."""
GROWTH_KB = 10_000
"""What is not growth: caches of a fixed size that fill, and how the allocator breathes."""
PATIENCE_S = 600
SOURCE = Path(__file__).parents[1] / "src"
TASK = "Read the folder and tell me its digest. Never delete anything."


class Folder:
    """Real files, and tools over them that say which runs they made."""

    def __init__(self, root: Path) -> None:
        self.files, self.notes, self.log = root / "files", root / "notes", root / "runs.log"
        self.names = sorted(str(path.relative_to(self.files)) for path in self.files.rglob("*.py"))
        self.notes.mkdir(exist_ok=True)

    @property
    def runs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _ran(self, call: str) -> None:
        end = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(end, f"{call}\n".encode())
        os.close(end)

    def list_files(self, call: str, start: int = 0) -> list[str]:
        """Names of files, twenty at a time."""
        self._ran(call)
        return self.names[start : start + 20]

    def read_file(self, call: str, name: str, start: int = 0) -> str:
        """A part of a file."""
        self._ran(call)
        return (self.files / name).read_text(encoding="utf-8", errors="replace")[start : start + LONGEST]

    async def grep(self, call: str, word: str) -> str:
        """Lines with a word in them."""
        self._ran(call)
        found = []
        for name in self.names:
            for n, line in enumerate((self.files / name).read_text("utf-8", "replace").splitlines(), 1):
                if word in line:
                    found.append(f"{name}:{n}: {line.strip()}")
            if sum(map(len, found)) > LONGEST:
                break
        return "\n".join(found)[:LONGEST]

    def note(self, call: str, text: str) -> str:
        """Keeps a note."""
        self._ran(call)
        (self.notes / f"{call}.txt").write_text(text)
        return f"noted {len(text)} characters"


class Script:
    """What the model says: all that it knows is in the request."""

    def __init__(self, steps: int, seed: int, names: list[str]) -> None:
        self.steps, self.seed, self.names = steps, seed, names

    def __call__(self, request: dict) -> Reply | str:
        messages = request["messages"]
        last = next((n for n in reversed(range(len(messages))) if messages[n]["role"] == "assistant"), None)
        step, digest = 0, ""
        if last is not None:
            step, digest = re.fullmatch(r"Step (\d+), digest (\w*)", messages[last]["content"]).groups()
            digest = self._digest(digest, messages[last], messages[last + 1 :])
        if int(step) == self.steps:
            return f"The digest is {digest}."
        return Reply(f"Step {int(step) + 1}, digest {digest}", calls=self._calls(int(step) + 1, messages))

    def _digest(self, digest: str, asked: dict, results: Iterable[dict]) -> str:
        """Of all that was shown so far; what refold itself answers depends on what was hidden when."""
        shown = {one["tool_call_id"]: one["content"] for one in results if one["role"] == "tool"}
        own = [c for c in asked["tool_calls"] if not c["function"]["name"].startswith("refold_")]
        text = "\0".join([digest, *(shown[call["id"]] for call in own)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _calls(self, step: int, messages: list[dict]) -> tuple[tuple[str, dict], ...]:
        chance = random.Random(f"{self.seed} {step}")
        calls: list[tuple[str, dict]] = []
        kinds = ["list_files", "read_file", "grep", "note"]  # each once: of two alike only one is shown
        for n, one in enumerate(chance.sample(kinds, chance.choice([1, 1, 2, 3]))):
            call, name = {"call": f"{step}.{n}"}, chance.choice(self.names)
            more = {
                "list_files": {"start": chance.randrange(len(self.names))},
                "read_file": {"name": name, "start": 100 * chance.randrange(40)},
                "grep": {"word": chance.choice(["return", "Raises", "session", "budget", "digest"])},
                "note": {"text": f"{name} " * chance.randrange(1, 30)},
            }[one]
            calls.append((one, call | more))
        hidden = re.findall(r"\[refold #(\d+) ", json.dumps(messages))
        if hidden and step % 5 == 0:
            calls.append(("refold_expand", {"at": int(chance.choice(hidden)), "lines": "1-10"}))
        if step % 11 == 0:
            calls.append(("refold_search", {"query": "budget", "limit": 2}))
        return tuple(calls)


def agent_for(root: Path, steps: int, seed: int, on_event: Callable[[object], None] | None = None) -> Agent:
    folder = Folder(root)
    model = StandIn(Script(steps, seed, folder.names), window=WINDOW)
    model.keep = 1
    tools = [folder.list_files, folder.read_file, folder.grep, folder.note]
    rest = {"store": f"sqlite:///{root / 'agent.db'}", "max_steps": steps + 1, "on_event": on_event}
    return Agent("reader", model, tools, config=model.config, **rest)


class Worker:
    """A process that runs the agent and tells every step, with the memory that it takes then."""

    def __init__(self, root: Path, steps: int, seed: int, conversation: str) -> None:
        self._read, end = os.pipe()
        self._heard = b""
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                signal.alarm(PATIENCE_S)
                work(root, steps, seed, conversation, lambda line: os.write(end, f"{line}\n".encode()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(end)

    @property
    def lines(self) -> list[str]:
        return self._heard.decode().splitlines()

    def listen(self, lines: int | None = None) -> None:
        while lines is None or self._heard.count(b"\n") < lines:
            more = os.read(self._read, 65_536)
            if not more:
                break
            self._heard += more

    def end(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.listen()
        os.close(self._read)
        return code


def work(root: Path, steps: int, seed: int, conversation: str, tell: Callable[[str], object]) -> None:
    def told(event: object) -> None:
        if isinstance(event, Asked):
            tell(f"{event.step} {event.tokens} {memory_kb()}")

    result = agent_for(root, steps, seed, told).run(TASK, conversation=conversation)
    assert isinstance(result.end, Success), result.text
    tell(f"end {result.text}")


def memory_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


class Told:
    """What is stored of a conversation: which calls were made, and which have a result."""

    def __init__(self, root: Path, conversation: str) -> None:
        with open_session(conversation, store=f"sqlite:///{root / 'agent.db'}") as chat:
            said = chat.get_all()
        calls = {call.call_id: call for one in said for call in one.message.calls}
        self.results = Counter(result.call_id for one in said for result in one.message.results)
        inputs = {id: json.loads(call.input) for id, call in calls.items()}
        outputs = {result.call_id: result.output for one in said for result in one.message.results}
        self.outputs = {inputs[id]["call"]: outputs[id] for id in outputs if "call" in inputs[id]}
        self.calls, self.steps = len(calls), max((one.step for one in said), default=0)


class Peace(NamedTuple):
    """How a run goes that nobody disturbs."""

    answer: str
    outputs: dict[str, object]
    memory_kb: list[int]
    """In each step."""
    tokens: int
    """Of the largest request."""


def in_peace(root: Path, steps: int, seed: int) -> Peace:
    worker = Worker(root, steps, seed, "in peace")
    assert worker.end() == 0, "the run in peace failed"
    *lines, end = worker.lines
    rows = [list(map(int, line.split())) for line in lines]
    assert len(rows) == steps + 1
    told = Told(root, "in peace")
    assert set(told.results.values()) == {1}, "a result is stored twice"
    assert len(told.results) == told.calls, "a call has no result"
    assert Counter(Folder(root).runs) == Counter(told.outputs.keys()), "each tool runs once"
    return Peace(end, told.outputs, [row[2] for row in rows], max(row[1] for row in rows))


def killed(root: Path, steps: int, seed: int, kills: int, peace: Peace) -> Counter[str]:
    """Runs that are killed and resumed until there were so many kills, each to the same end."""
    chance, total, round = random.Random(seed), Counter[str](), 0
    while total["kills"] < kills:
        round += 1
        conversation, is_done = f"round {round}", False
        while not is_done:
            before, ran = Told(root, conversation), len(Folder(root).runs)
            worker = Worker(root, steps, seed, conversation)
            if total["kills"] < kills:
                worker.listen(chance.randrange(1, max(3, 2 * steps // kills)))
                time.sleep(chance.random() * 0.01)
                os.kill(worker.pid, signal.SIGKILL)
            code = worker.end()
            assert code in (0, -signal.SIGKILL), f"it failed by itself: {code}"
            total["kills"] += code != 0
            again = before.outputs.keys() & set(Folder(root).runs[ran:])
            assert not again, f"{sorted(again)} ran again although their results were stored"
            total["tools run"] += len(Folder(root).runs) - ran
            is_done = code == 0
        total["rounds"] += 1
        assert worker.lines[-1] == peace.answer, f"{conversation} came to another end: {worker.lines[-1]}"
        told = Told(root, conversation)
        assert set(told.results.values()) == {1}, "a result is stored twice"
        assert len(told.results) == told.calls, "a call has no result"
        assert told.outputs == peace.outputs, "other things were done"
        total["results"] += len(told.outputs)
        assert told.steps == steps + 1, "a step was made twice"
    return total


def run(steps: int, kills: int, seed: int, root: Path) -> dict[str, object]:
    """
    Raises:
        AssertionError: says what went wrong; the folder is left as it is.
    """
    shutil.copytree(SOURCE, root / "files", ignore=shutil.ignore_patterns("__pycache__", "*.json", "*.pyc"))
    counter(None).text("loads the vocabulary, before any process is forked")
    began = time.monotonic()
    peace = in_peace(root, steps, seed)
    settled, after = peace.memory_kb[: SETTLED + 1], peace.memory_kb[SETTLED + 1 :]
    grown = max(after, default=0) - max(settled)
    seconds = time.monotonic() - began
    (root / "runs.log").unlink()
    total = killed(root, steps, seed, kills, peace)
    store = SQLiteStore(root / "agent.db")
    faults = doctor.examine(store)
    store.close()
    assert not faults, faults
    assert grown < GROWTH_KB, f"the process grew by {grown:,} kB after step {SETTLED}"
    return {
        "answer": peace.answer.removeprefix("end "),
        "most_tokens": peace.tokens,
        "memory_kb": (max(settled), peace.memory_kb[-1]),
        "grown_kb": grown,
        "seconds": (seconds, time.monotonic() - began - seconds),
        **total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="refold-agent-"))
    print(f"{asked.steps:,} steps, {asked.kills:,} kills, seed {asked.seed} in {root}", flush=True)
    done = run(asked.steps, asked.kills, asked.seed, root)
    shutil.rmtree(root)
    print("\n".join(f"{name:12} {value}" for name, value in done.items()))


if __name__ == "__main__":
    sys.exit(main())
