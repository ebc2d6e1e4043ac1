"""Regular expressions of strangers: matched in a process of their own, which ends when its time is over."""

import json
import re
import sys
from collections.abc import Sequence

from refold.core.errors import CannotExpandError

SECONDS = 2.0
PATTERN, TEXT = 1_000, 20_000_000
"""Characters that a pattern and a text may have."""
HITS = 100_000
"""What is found after so many is not told."""
_WORK = (
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
    """Where the pattern matches in each of them, whatever the pattern is.

    Raises:
        CannotExpandError: it is no regular expression, is too long, or takes too long.
    """
    if len(pattern) > PATTERN:
        raise CannotExpandError(f"a regular expression has at most {PATTERN:,} characters; ask for a text")
    if sum(map(len, texts)) > TEXT:
        raise CannotExpandError(f"more than {TEXT:,} characters are too many for a pattern; ask for a text")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CannotExpandError(f"/{pattern}/ is no regular expression: {error}; ask for a text") from error
    import subprocess  # only those who need it pay for it

    work = [sys.executable, "-I", "-S", "-c", _WORK]
    try:
        done = subprocess.run(
            work,
            input=json.dumps([pattern, list(texts), HITS]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotExpandError(
            f"/{pattern}/ takes more than {SECONDS:g} s; ask for a simpler one"
        ) from error
    except OSError as error:
        raise CannotExpandError(
            f"no regular expression can be matched here: {error}; ask for a text"
        ) from error
    if done.returncode:
        raise CannotExpandError(f"/{pattern}/ cannot be matched; ask for a text")
    return [[(start, end) for start, end in hits] for hits in json.loads(done.stdout)]
