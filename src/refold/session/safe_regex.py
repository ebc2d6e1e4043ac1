"""Regular expressions from outside: matched in a process of their own, which ends when its time is up."""

import json
import re
import sys
from collections.abc import Sequence

from refold.core.errors import CannotExpandError

TIMEOUT_S = 2.0
MAX_PATTERN_CHARS = 1_000
MAX_TEXT_CHARS = 20_000_000
MAX_MATCHES = 100_000
_PROGRAM = (
    "import json, re, sys\n"
    "pattern, texts, most = json.load(sys.stdin)\n"
    "found, pattern = [], re.compile(pattern, re.MULTILINE)\n"
    "for text in texts:\n"
    "    hits = []\n"
    "    for hit in pattern.finditer(text):\n"
    "        if most and hit.end() > hit.start():\n"
    "            hits.append(hit.span())\n"
    "            most -= 1\n"
    "    found.append(hits)\n"
    "json.dump(found, sys.stdout)\n"
)


def find(pattern: str, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Where the pattern matches in each text.

    Raises:
        CannotExpandError: the pattern is not valid, is too long, or takes too long.
    """
    if len(pattern) > MAX_PATTERN_CHARS or sum(map(len, texts)) > MAX_TEXT_CHARS:
        limits = f"has at most {MAX_PATTERN_CHARS:,} characters, and searches at most {MAX_TEXT_CHARS:,}"
        raise CannotExpandError(f"a regular expression {limits}; ask for a text")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"/{pattern}/ is not a valid regular expression: {error}; ask for a text"
        raise CannotExpandError(problem) from error
    import subprocess  # slow to import, and rarely needed

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([pattern, list(texts), MAX_MATCHES]),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"/{pattern}/ takes more than {TIMEOUT_S:g} s; ask for a simpler one"
        raise CannotExpandError(problem) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotExpandError(f"/{pattern}/ cannot be matched; ask for a text") from error
    return [list(map(tuple, hits)) for hits in json.loads(done.stdout)]
