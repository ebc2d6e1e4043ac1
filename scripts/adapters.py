"""Runs the tests of each adapter in an environment of its own, since the frameworks clash; prints one table.

python scripts/adapters.py [NAME …] [--bench]

Environments are kept in .venvs; --bench also measures what each adapter adds to a call of the model.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 900
"""For the tests of one adapter."""


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
    "agent-framework": Adapter("agent-framework", "agent_framework", "agent-framework-core"),
    "litellm": Adapter("litellm", "litellm", "litellm"),
    "mcp": Adapter("mcp", "mcp", "mcp"),
    "mcp-1": Adapter("mcp", "mcp", "mcp", ("mcp<2",)),
}


class Row(NamedTuple):
    name: str
    version: str
    result: str
    seconds: float
    is_good: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(ADAPTERS)}; all unless given")
    parser.add_argument("--bench", action="store_true", help="measure what each adds to a call of the model")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ADAPTERS):
        parser.error(f"there is no adapter {', '.join(unknown)}; known: {', '.join(ADAPTERS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this runs in the background
    rows = [run(name, with_bench=given.bench) for name in given.names or ADAPTERS]
    print(f"\n| {'adapter':<16} | {'version':<10} | {'result':<44} | seconds |")
    print(f"|{'-' * 18}|{'-' * 12}|{'-' * 46}|--------:|")
    for row in rows:
        print(f"| {row.name:<16} | {row.version:<10} | {row.result:<44} | {row.seconds:>7.0f} |")
    return 0 if all(row.is_good for row in rows) else 1


def run(name: str, *, with_bench: bool) -> Row:
    adapter, begun = ADAPTERS[name], time.monotonic()
    print(f"{name} …", flush=True)
    python = ROOT / ".venvs" / name / "bin" / "python"
    try:
        install(python, adapter)
    except subprocess.CalledProcessError as error:
        return Row(name, "", f"cannot be installed: pip ended with {error.returncode}", 0, is_good=False)
    show = [python, "-c", f"from importlib.metadata import version; print(version({adapter.package!r}))"]
    version = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
    tests = ROOT / "tests" / "adapters" / f"test_{adapter.module}.py"
    command = [python, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", str(tests)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return Row(name, version, f"not done after {MOST_S} s", MOST_S, is_good=False)
    told = done.stdout.strip().splitlines()
    result = re.sub(r" in [\d.]+s.*|=", "", told[-1]).strip() if told else "nothing was told"
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    if with_bench and not done.returncode:
        bench = [python, "-m", "refold.bench.adapters", str(tests)]
        measured = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, timeout=MOST_S)
        result += f", {(measured.stdout.strip().splitlines() or ['not measured'])[-1]}"
    return Row(name, version, result, time.monotonic() - begun, is_good=done.returncode == 0)


def install(python: Path, adapter: Adapter) -> None:
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = ["-e", f".[{adapter.extra}]", "pytest>=9", "hypothesis>=6.150", *adapter.beside]
    subprocess.run([*pip, *wanted], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())
