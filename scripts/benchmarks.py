"""Puts what the benchmarks print into the pages: each place says by which command.

python scripts/benchmarks.py [WORD …]     only the places whose command has one of the words

A place is `<!-- printed by: COMMAND -->` and all up to `<!-- end -->`. A command that fails changes nothing.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
PLACE = re.compile(r"(<!-- printed by: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MOST_S = 3_600


def main(words: list[str]) -> int:
    failed = 0
    for page in PAGES:
        for _, command, old, _ in PLACE.findall(page.read_text()):
            if words and not any(word in command for word in words):
                continue
            print(f"{page.relative_to(ROOT)}: {command} …", file=sys.stderr, flush=True)
            printed = output_of(command)
            if printed is None:
                failed += 1
            elif printed != old:
                text = page.read_text()
                new = PLACE.sub(lambda m: m[1] + (printed if m[2] == command else m[3]) + m[4], text)  # noqa: B023
                page.write_text(new)
    return min(failed, 1)


def output_of(command: str) -> str | None:
    name, *arguments = shlex.split(command)
    program = [sys.executable, *(["-m", "refold"] if name == "refold" else []), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    try:
        done = subprocess.run(
            program, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=MOST_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return None
    return f"\n{done.stdout.strip()}\n\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
