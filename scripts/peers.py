"""Measures a step of other libraries beside one of refold, each in an environment of its own; one table.

python scripts/peers.py [NAME …] [--sizes 100,1000] [--json FILE] [--markdown]

The libraries clash, and refold needs none of them: environments are kept in .venvs/peer-….
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 900
"""For the measurements in one environment."""
ENVIRONMENTS = {
    "langchain": (
        ("langchain>=1.4", "langgraph-checkpoint-sqlite"),
        ("trim_messages", "SummarizationMiddleware", "ContextEditingMiddleware", "SqliteSaver"),
    ),
    "openai-agents": (("openai-agents>=0.24",), ("SQLiteSession",)),
    "llama-index": (("llama-index-core",), ("Memory",)),
}
"""What is installed, and which peers of `benchmarks.peers` are in it."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(ENVIRONMENTS)}; all unless given")
    parser.add_argument("--sizes", default="100,1000,10000", help="messages")
    parser.add_argument("--json", metavar="FILE", help="all numbers")
    parser.add_argument("--markdown", action="store_true", help="a table for documents")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ENVIRONMENTS):
        parser.error(f"there is no {', '.join(unknown)}; known: {', '.join(ENVIRONMENTS)}")
    names = given.names or [*ENVIRONMENTS]
    found = [rows for name in names if (rows := measured(name, given.sizes)) is not None]
    rows = [row for some in found for row in some]
    if rows:
        tell(rows, markdown=given.markdown)
    if given.json:
        Path(given.json).write_text(json.dumps(rows))
    return 0 if len(found) == len(names) else 1


def measured(name: str, sizes: str) -> list[dict[str, Any]] | None:
    """The rows of one environment; nothing where it cannot be made or fails."""
    packages, peers = ENVIRONMENTS[name]
    print(f"{name} …", file=sys.stderr, flush=True)
    python = ROOT / ".venvs" / f"peer-{name}" / "bin" / "python"
    command = [python, "-m", "benchmarks.peers", *peers, "--sizes", sizes, "--json"]
    try:
        install(python, packages)
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=MOST_S)
    except subprocess.CalledProcessError as error:
        print(f"{name}: {' '.join(map(str, error.cmd[1:4]))} ended with {error.returncode}", file=sys.stderr)
        return None
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {MOST_S} s", file=sys.stderr)
        return None
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def install(python: Path, packages: tuple[str, ...]) -> None:
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = {"cwd": ROOT, "check": True, "stdout": subprocess.DEVNULL, "env": os.environ}
    subprocess.run([*pip, "-e", ".", *packages], **done)  # type: ignore[call-overload]


def tell(rows: list[dict[str, Any]], *, markdown: bool) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from benchmarks.peers import PeerRow, table

    from refold.cli.bench.speed import Times
    from refold.cli.bench.tables import show

    times = {name: [Times(**row[name]) for row in rows] for name in ("theirs", "ours", "fit")}
    read = [
        PeerRow(**{f.name: times[f.name][n] if f.name in times else row[f.name] for f in fields(PeerRow)})
        for n, row in enumerate(rows)
    ]
    show([table(read)], markdown=markdown)


if __name__ == "__main__":
    sys.exit(main())
