"""The last question of a demo: an exact line that the agent read early and no longer sees."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from refold.core.event import Said
from refold.core.message import ToolResult
from refold.session.session import Session

EARLY = 1 / 2
"""The share of what was read that the line is taken from."""
SHORTEST = 12
LONGEST = 100
"""Characters of a line."""
_VALUE = re.compile(r"""^["']?[A-Za-z_][\w.-]*["']?(?:: \w+)?\s*[:=]\s*.*\d""")
"""A name with a number, which cannot be guessed."""
_PRIVATE = re.compile(r"passw|secret|credential|auth|private|api[_-]?key|\[refold|`", re.IGNORECASE)
"""Text that should not be on a screen, or that would be read as a handle."""
_WORD = re.compile(r"[A-Za-z0-9_]{5,}")


class Question(msgspec.Struct, frozen=True):
    at: int
    """The place of the result that has the line."""
    path: str
    word: str
    line: str
    """The expected answer."""
    is_hidden: bool
    """The view no longer shows it."""


def find_question(session: Session, request: dict[str, Any]) -> Question | None:
    """The best question: hidden before shown, a value before words, early before late.

    None if nothing was read. The word is in no other line of any result, so that there is one answer.
    """
    read: list[tuple[int, ToolResult]] = []
    texts: list[str] = []
    for event in session.events():
        for result in event.message.results if isinstance(event, Said) else ():
            texts += map(str.strip, str(result.output).splitlines())
            if result.tool == "read_file" and not result.is_error:
                read.append((event.at, result))
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
    for at, result in read:
        head, *lines = str(result.output).splitlines()
        path = head.rpartition(": ")[0]
        for line in map(str.strip, lines):
            if SHORTEST <= len(line) <= LONGEST and not _PRIVATE.search(line):
                yield at, path, line


def _word(line: str, texts: list[str]) -> str | None:
    """A word that only this line has: names before numbers, the longest first."""
    words: set[str] = {*_WORD.findall(line)}
    for word in sorted(words, key=lambda word: (word[0].isdigit(), -len(word), word)):
        if all(text.endswith(line) for text in texts if word in text):
            return word
    return None
