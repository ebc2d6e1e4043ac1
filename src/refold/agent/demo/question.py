"""What the agent is asked in the end: an exact line that it read early and no longer sees."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from refold.core.event import Said
from refold.core.message import ToolResult
from refold.session.session import Session

EARLY = 1 / 2
"""Of all that was read, from which the line is taken."""
SHORTEST, LONGEST = 12, 100
"""Characters of a line that is worth asking for."""
_VALUE = re.compile(r"""^["']?[A-Za-z_][\w.-]*["']?(?:: \w+)?\s*[:=]\s*.*\d""")
"""A name with a number, which nobody could guess."""
_PRIVATE = re.compile(r"passw|secret|credential|auth|private|api[_-]?key|\[refold|`", re.IGNORECASE)
"""What is better not shown on a screen, or would be read as something else."""
_WORD = re.compile(r"[A-Za-z0-9_]{5,}")


class Question(msgspec.Struct, frozen=True):
    at: int
    """Where the file was read."""
    path: str
    word: str
    line: str
    """The answer."""
    is_hidden: bool
    """It is not in view any more."""


def question_about(record: Session, request: dict[str, Any]) -> Question | None:
    """The best there is: hidden before shown, a value before words, early before late.

    None if nothing was read. The word is in no other line that any tool gave, so that there is one answer.
    """
    events = [event for event in record.events() if isinstance(event, Said)]
    results = [(event.at, one) for event in events for one in event.message.results]
    read = [(at, one) for at, one in results if one.tool == "read_file" and not one.is_error]
    texts = [line.strip() for _, one in results for line in str(one.output).splitlines()]
    shown = "\n".join(str(message.get("content")) for message in request["messages"])
    early = read[: max(1, int(EARLY * len(read)))]
    best: tuple[int, Question] | None = None
    for at, path, line in _lines(early):
        is_hidden = line not in shown
        rank = 2 * (not is_hidden) + (_VALUE.match(line) is None)
        if best is not None and best[0] <= rank:
            continue
        if word := _word(line, texts):
            best = rank, Question(at, path, word, line, is_hidden)
            if not rank:
                break
    return best[1] if best else None


def _lines(read: list[tuple[int, ToolResult]]) -> Iterator[tuple[int, str, str]]:
    for at, one in read:
        head, *lines = str(one.output).splitlines()
        path = head.rpartition(": ")[0]
        for line in map(str.strip, lines):
            if SHORTEST <= len(line) <= LONGEST and not _PRIVATE.search(line):
                yield at, path, line


def _word(line: str, texts: list[str]) -> str | None:
    """A word by which the line is known: names before numbers, the longest first."""
    words: set[str] = {*_WORD.findall(line)}
    for word in sorted(words, key=lambda word: (word[0].isdigit(), -len(word), word)):
        if all(text.endswith(line) for text in texts if word in text):
            return word
    return None
