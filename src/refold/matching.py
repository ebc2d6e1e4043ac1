"""Regular expressions of strangers: matched in a process of their own, which ends when its time is over."""

import json
import re
import sys

from refold.core.errors import CannotExpandError

SECONDS = 2.0
PATTERN, TEXT = 1_000, 20_000_000
"""Characters that a pattern and a text may have."""
HITS = 10_000
"""What is found after so many is not told."""
_WORK = (
    "import json, re, sys\n"
    "pattern, text, most = json.load(sys.stdin)\n"
    "hits = []\n"
    "for found in re.finditer(pattern, text, re.MULTILINE):\n"
    "    hits.append(found.span())\n"
    "    if len(hits) == most: break\n"
    "json.dump(hits, sys.stdout)\n"
)


def find(pattern: str, text: str) -> list[tuple[int, int]]:
    """Where the pattern matches, whatever the pattern is.

    Raises:
        CannotExpandError: it is no regular expression, is too long, or takes too long.
    """
    if len(pattern) > PATTERN or len(text) > TEXT:
        raise CannotExpandError(f"A regular expression has at most {PATTERN:,} characters; ask for a text")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CannotExpandError(f"/{pattern}/ is no regular expression: {error}; ask for a text") from error
    import subprocess  # only those who need it pay for it

    work = [sys.executable, "-I", "-S", "-c", _WORK]
    try:
        done = subprocess.run(
            work, input=json.dumps([pattern, text, HITS]), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CannotExpandError(
            f"/{pattern}/ takes more than {SECONDS:g} s; ask for a simpler one"
        ) from error
    except OSError as error:
        raise CannotExpandError(
            f"No regular expression can be matched here: {error}; ask for a text"
        ) from error
    if done.returncode:
        raise CannotExpandError(f"/{pattern}/ cannot be matched; ask for a text")
    return [(start, end) for start, end in json.loads(done.stdout) if end > start]
