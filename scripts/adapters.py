"""Runs the tests of each adapter in an environment of its own, since the frameworks clash; prints one table.

python scripts/adapters.py [NAME …] [--bench] [-k EXPRESSION]

Environments are kept in .venvs; --bench also measures what each adapter adds to a call of the model.
What was skipped is told with its reason below the table.
"""

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 900
"""For installing one adapter, for its tests, and for measuring it."""
COUNTS = re.compile(r"\d+ (?:passed|failed|errors?|skipped|deselected)")


class Adapter(NamedTuple):
    extra: str
    module: str
    package: str
    """Of which the version is told."""
    beside: tuple[str, ...] = ()
    """What only its tests need."""


ADAPTERS = {
    "langchain": Adapter(
        "langchain", "langchain", "langchain", ("langgraph-checkpoint-sqlite", "langchain-openai")
    ),
    "openai-agents": Adapter("openai-agents", "openai_agents", "openai-agents"),
    "pydantic-ai": Adapter("pydantic-ai", "pydantic_ai", "pydantic-ai-slim", ("pydantic-ai-slim[openai]",)),
    "adk": Adapter("adk", "adk", "google-adk"),
    "strands": Adapter("strands", "strands", "strands-agents", ("strands-agents[openai]",)),
    "agent-framework": Adapter(
        "agent-framework", "agent_framework", "agent-framework-core", ("agent-framework-openai",)
    ),
    "litellm": Adapter("litellm", "litellm", "litellm", ("litellm[proxy]",)),
    "mcp": Adapter("mcp", "mcp", "mcp"),
    "mcp-1": Adapter("mcp", "mcp", "mcp", ("mcp<2",)),
}


class Row(NamedTuple):
    name: str
    version: str
    result: str
    seconds: float
    is_good: bool
    adds: str = ""
    """To a call of the model."""
    skipped: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(ADAPTERS)}; all unless given")
    parser.add_argument("--bench", action="store_true", help="measure what each adds to a call of the model")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose names match, as pytest has it")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ADAPTERS):
        parser.error(f"there is no adapter {', '.join(unknown)}; known: {', '.join(ADAPTERS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this runs in the background
    only = ["-k", given.k] if given.k else []
    rows = [run(name, only, with_bench=given.bench) for name in given.names or ADAPTERS]
    print(table(rows, with_bench=given.bench))
    return 0 if all(row.is_good for row in rows) else 1


def table(rows: Sequence[Row], *, with_bench: bool) -> str:
    cells = [("adapter", "version", "result", *(["beyond fit"] if with_bench else []), "seconds")]
    for row in rows:
        adds = [row.adds] if with_bench else []
        cells.append((row.name, row.version, row.result, *adds, f"{row.seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, tuple("-" * width for width in widths))
    lines = [" | ".join(map(str.ljust, one, widths)) for one in cells]
    skipped = [f"{row.name}: {reason}" for row in rows for reason in row.skipped]
    return "\n".join(["", *(f"| {line} |" for line in lines), *(["", *skipped] if skipped else [])])


def run(name: str, only: Sequence[str], *, with_bench: bool) -> Row:
    """Whatever goes wrong is told in its row."""
    adapter, begun = ADAPTERS[name], time.monotonic()
    print(f"{name} …", flush=True)
    python = ROOT / ".venvs" / name / "bin" / "python"
    try:
        install(python, adapter)
        show = f"from importlib.metadata import version; print(version({adapter.package!r}))"
        version = output([python, "-c", show], check=True).stdout.strip()
    except subprocess.SubprocessError as error:
        print(error)
        return Row(name, "", "cannot be installed", time.monotonic() - begun, is_good=False)
    tests = ROOT / "tests" / "adapters" / f"test_{adapter.module}.py"
    command = [python, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-rs", str(tests), *only]
    try:
        done = output(command)
    except subprocess.TimeoutExpired:
        return Row(name, version, f"not done after {MOST_S} s", MOST_S, is_good=False)
    told = done.stdout.strip().splitlines() or ["nothing was told"]
    skipped = tuple(line for line in told if line.startswith("SKIPPED"))
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    adds = measured(python, tests) if with_bench and adapter.package != "mcp" else ""
    result = ", ".join(COUNTS.findall(told[-1])) or told[-1]
    is_good = done.returncode == 0
    return Row(name, version, result, time.monotonic() - begun, is_good, adds, skipped)


def measured(python: Path, tests: Path) -> str:
    try:
        done = output([python, "-W", "ignore", "-m", "benchmarks.adapters", str(tests)])
    except subprocess.TimeoutExpired:
        return f"not done after {MOST_S} s"
    if done.returncode:
        print(done.stderr)
        return "not measured"
    return done.stdout.strip().splitlines()[-1]


def output(command: Sequence[Any], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_S, check=check)


def install(python: Path, adapter: Adapter) -> None:
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = ["-e", f".[{adapter.extra}]", "pytest>=9", "hypothesis>=6.150", *adapter.beside]
    quiet = {"stdout": subprocess.DEVNULL, "timeout": MOST_S}
    subprocess.run([*pip, *wanted], cwd=ROOT, check=True, **quiet)


if __name__ == "__main__":
    sys.exit(main())
