"""Generates conversations of an agent at work, the same for the same seed, and runs a benchmark on them.

python -m benchmarks.made retention --brief          generates the data set and runs `refold bench retention`
python -m benchmarks.made --seed 1 --out FOLDER      writes another one into a folder

Tools return records in JSON and in text, small and very large, sometimes an error, sometimes what they
returned before. Calls use exact values of earlier results, most of them recent, some very old. The size of
results, the number of their values, how far back values are taken from and how often they are taken again
resemble recorded agents. Which values are needed is known here, so that nobody has to look for them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import typer

from refold.cli.bench.generate import WORDS
from refold.cli.bench.trace import MIN_GAP, Json, Probe, Trace

STEPS = (32, 40, 48, 64, 96, 128, 320)
"""Calls of the conversations, each once with one request of the user's and once with many."""
USES = (0, 1, 1, 1, 2, 3)
"""Values of earlier results that a call takes."""
NEAR_MU, NEAR_SIGMA, FAR = 1.3, 1.0, 0.12
"""How far back a value is taken from: most are few messages away, one in eight is anywhere."""
NEIGHBORS = 3
"""Results about so far back that it may be in: a large one has more to take."""
SIZE_MU, SIZE_SIGMA, LARGEST = 6.2, 1.4, 40_000
"""Characters of a result."""
KEYS, NOTE = (1, 3), (8, 40)
"""Exact values of a record, and the words beside them."""
AGAIN = 0.3
"""How many of the values that a call takes were in a call before."""
ERRORS, REPEATS, SPOKEN, NAMED, CORRECTED = 0.06, 0.06, 0.4, 0.25, 0.2
"""How many calls fail, are made again, have words beside them, and values in these; how many requests are a
rule."""
TURN = (4, 12)
"""Calls between two messages of the user's, where there are many."""
SYSTEM = "You are an operations agent. Use the tools, one call at a time, and never invent an identifier. "
REASONS = ("timed out after 30 s", "permission denied", "rate limit exceeded", "no such record", "conflict")


def traces(seed: int = 0) -> Iterator[Trace]:
    """The data set."""
    for n, steps in enumerate(STEPS):
        for turns in ("one turn", "many turns"):
            id = f"{turns} {n}"
            work = Work(Random(f"{seed} {id}"), id)
            work.run(steps, has_many_turns=turns == "many turns")
            yield Trace(f"made, {turns}", work.messages, (), work.probes, id=id)


def write(folder: Path, seed: int = 0) -> None:
    """Write the data set as `refold bench` reads it."""
    lines: list[bytes] = []
    probes: list[bytes] = []
    for trace in traces(seed):
        line = {"id": trace.id, "source": trace.source, "format": "openai", "messages": trace.messages}
        lines.append(msgspec.json.encode(line))
        probes += [msgspec.json.encode(probe) for probe in trace.probes]
    for name, content in (("traces", lines), ("probes", probes)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "made.jsonl").write_bytes(b"\n".join(content))


@dataclass(slots=True)
class Work:
    """One conversation in the making."""

    random: Random
    id: str
    messages: list[Json] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    said: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """By message: the keys and values that a result brought."""
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    """Values that were in a call, and their keys."""
    answered: list[tuple[str, str, str]] = field(default_factory=list)
    """Tools, arguments and results, for those that are asked again."""

    def run(self, steps: int, *, has_many_turns: bool) -> None:
        self._say("system", SYSTEM + self._prose(120))
        self._say("user", "Go through the open cases and settle each one. " + self._prose(40))
        until = self.random.randint(*TURN)
        for n in range(steps):
            if has_many_turns and n == until:
                self._turn()
                until = n + self.random.randint(*TURN)
            self._step(n)
        self._say("assistant", "All open cases are settled. " + self._prose(30))

    def _turn(self) -> None:
        self._say("assistant", "That is done. " + self._prose(20))
        rule = "From now on you must never change a closed case. " if self._chance(CORRECTED) else ""
        self._say("user", f"{rule}Now the next ones: {self._prose(12)}")

    def _step(self, n: int) -> None:
        if self.answered and self._chance(REPEATS):
            self._call(*self.random.choice(self.answered[-10:]), {})
            return
        used = {} if not self.said else dict(self._picked() for _ in range(self.random.choice(USES)))
        tool = (
            self.random.choice(("find", "read", "list", "update", "check")) + f"_{self.random.choice(NOUNS)}"
        )
        arguments = json.dumps({**used, "page": n})
        if self._chance(ERRORS):
            reason = self.random.choice(REASONS)
            self._call(
                tool, arguments, f"Error {self.random.randint(400, 599)}: {tool} failed: {reason}", used
            )
            return
        text, brought = self._result()
        self._call(tool, arguments, text, used)
        self.answered.append((tool, arguments, text))
        self.said[len(self.messages) - 1] = brought
        for _, value in brought:
            self.first.setdefault(value, len(self.messages) - 1)
            self.last[value] = len(self.messages) - 1

    def _picked(self) -> tuple[str, str]:
        """A key and a value out of the result that is about so far away."""
        here, first = len(self.messages), min(self.said)
        back = self.random.lognormvariate(NEAR_MU, NEAR_SIGMA)
        wanted = self.random.randint(first, here) if self._chance(FAR) else here - MIN_GAP - back
        if self.used and self._chance(AGAIN):
            value = min(self.used, key=lambda one: (abs(self.last[one] - wanted), one))
            return self.used[value], value
        near = sorted(self.said, key=lambda place: (abs(place - wanted), place))[:NEIGHBORS]
        return self.random.choice([one for place in near for one in self.said[place]])

    def _call(self, tool: str, arguments: str, result: str, used: dict[str, str]) -> None:
        here, id = len(self.messages), f"call_{self.random.getrandbits(64):016x}"
        for key, value in used.items():
            gap = here - self.last[value]
            if gap >= MIN_GAP:
                places = (self.first[value], self.last[value], here)
                roles = (self.messages[place]["role"] for place in places[:2])
                self.probes.append(Probe(self.id, value, key, *places, *roles))
            self.last[value], self.used[value] = here, key
        words = self._words() if self._chance(SPOKEN) else None
        call = {"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": words, "tool_calls": [call]})
        for again in (value for _, value in self._mentioned(result)):
            self.last[again] = here + 1
        self.messages.append({"role": "tool", "tool_call_id": id, "content": result})

    def _words(self) -> str:
        """What is said beside a call: often about a value that a result has just brought."""
        text, here = self._prose(self.random.randint(4, 30)), len(self.messages)
        if not self.said or not self._chance(NAMED):
            return text
        key, value = self.random.choice(self.said[max(self.said)])
        self.last[value], self.used[value] = here, key
        return f"{text} The {key} is {value}."

    def _mentioned(self, result: str) -> list[tuple[str, str]]:
        """What a result brings that was there before."""
        before = (place for place in self.said if self.messages[place]["content"] == result)
        return next((self.said[place] for place in before), [])

    def _result(self) -> tuple[str, list[tuple[str, str]]]:
        size = min(LARGEST, int(self.random.lognormvariate(SIZE_MU, SIZE_SIGMA)))
        keys = self.random.sample(sorted(VALUES), self.random.randint(*KEYS))
        write = self.random.choice((_json, _json, _pretty, _log, _labels, _table))
        records, text = list[Json](), ""
        while len(text) < size:  # twice as many each time, so that large ones are written a few times only
            for _ in range(max(1, len(records))):
                record: Json = {key: VALUES[key](self.random) for key in keys}
                record["note"] = self._prose(self.random.randint(*NOTE))
                record["state"] = self.random.choice(("open", "closed", "waiting"))
                records.append(record)
            text = write(records)
        return text, [(key, record[key]) for record in records for key in keys]

    def _say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def _prose(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words)).capitalize() + "."

    def _chance(self, share: float) -> bool:
        return self.random.random() < share


NOUNS = ("orders", "invoices", "tickets", "hosts", "files", "releases")
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def _code(random: Random, length: int) -> str:
    return "".join(random.choices(LETTERS, k=length))


def _path(random: Random) -> str:
    one, two, three = random.choices(WORDS, k=3)
    return f"src/{one}/{two}_{three}{random.randint(1, 999)}.py"


def _email(random: Random) -> str:
    return f"{random.choice(WORDS)}.{random.choice(WORDS)}{random.randint(10, 9_999)}@example.com"


VALUES: dict[str, Callable[[Random], str]] = {
    "order_id": lambda random: f"ORD-{random.randrange(10**7):07}",
    "customer_id": lambda random: f"cus_{random.getrandbits(40):010x}",
    "invoice": lambda random: f"INV-{random.randint(2019, 2026)}-{random.randrange(10**5):05}",
    "tracking_number": lambda random: _code(random, 12),
    "email": _email,
    "commit": lambda random: f"{random.getrandbits(48):012x}",
    "path": _path,
    "amount": lambda random: f"{random.randint(100, 99_999)}.{random.randrange(100):02}",
    "due_at": lambda random: (
        f"2026-{random.randint(1, 12):02}-{random.randint(1, 28):02}T"
        f"{random.randrange(24):02}:{random.randrange(60):02}:{random.randrange(60):02}"
    ),
    "host": lambda random: f"{random.choice(WORDS)}-{random.randint(100, 9_999)}.internal",
    "build": lambda random: f"{random.randrange(20)}.{random.randrange(90)}.{random.randint(1_000, 99_999)}",
}


# How tools answer


def _json(records: list[Json]) -> str:
    return json.dumps(records)


def _pretty(records: list[Json]) -> str:
    return json.dumps({"total": len(records), "results": records}, indent=2)


def _log(records: list[Json]) -> str:
    return "\n".join(
        f"[{n:05}] INFO " + " ".join(f"{k}={v}" for k, v in one.items()) for n, one in enumerate(records)
    )


def _labels(records: list[Json]) -> str:
    return "\n\n".join("\n".join(f"{key}: {value}" for key, value in one.items()) for one in records)


def _table(records: list[Json]) -> str:
    rows = [list(records[0]), *(list(map(str, one.values())) for one in records)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(
    context: typer.Context,
    bench: Annotated[str | None, typer.Argument(help="retention or cost, and its options.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed makes another data set.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the data set into this folder.")] = None,
) -> None:
    """Generate the data set, and run `refold bench` on it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        write(folder, seed)
        if bench is not None:
            command = [sys.executable, "-m", "refold", "bench", bench, str(folder), *context.args]
            raise typer.Exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    app = typer.Typer(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(main)
    app()
