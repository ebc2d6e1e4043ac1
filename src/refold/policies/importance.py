"""Importance and relevance of results, without a model.

A result is important if the agent uses its exact values in later calls, and so are other results of the same
tool; new values and errors count as well.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import log

import msgspec

from refold.core.event import Line
from refold.core.lazy import regex
from refold.core.view import Item, View
from refold.policies.text import all_text, exact_words, plain_words

SOON = 3
"""A use within so many steps says that the agent wanted the result."""
ENOUGH = 4
"""Used values that make a result as important as it can be."""
IDENTIFIER = 3.0
"""Weight of an identifier, in words of prose."""
MIN_WEIGHT = 4.0  # one word of a short message is not all of it
MAX_WEIGHT = 12.0  # not every word of a long message has to match
_MARK = regex(
    r"\b(?:error|exception|traceback|failed|denied|must|never|always|decided|instead|because|constraint)\b",
    re.IGNORECASE,
)
_READS = regex(
    r"^(?:\w+[_.-])?(?:read|get|list|search|find|fetch|view|open|cat|ls|grep|query|lookup|show)",
    re.IGNORECASE,
)


class ViewReading(msgspec.Struct, frozen=True, dict=True):
    """The words of a view's messages; each message is read once, on first use."""

    view: View

    @cached_property
    def _items(self) -> dict[tuple[int, int], Item]:
        return {(line.at, line.n): item for item in self.view.items for line in item.lines}

    @cached_property
    def _words(self) -> dict[tuple[int, int], frozenset[str]]:
        return {}

    def text(self, *lines: Line) -> str:
        """All text of some lines."""
        return "\n".join(all_text(self._items[line.at, line.n].words(line)) for line in lines)

    def words(self, line: Line) -> frozenset[str]:
        key = (line.at, line.n)
        if key not in self._words:
            self._words[key] = exact_words(self.text(line))
        return self._words[key]

    @cached_property
    def used(self) -> dict[str, list[int]]:
        """The steps in which the agent wrote each word."""
        used = dict[str, list[int]]()
        for line in self.view.lines:
            if line.role == "assistant":
                for word in self.words(line):
                    used.setdefault(word, []).append(line.step)
        return used

    @cached_property
    def first(self) -> dict[str, int]:
        """The place where each word occurs first."""
        first = dict[str, int]()
        for line in self.view.lines:
            for word in self.words(line):
                first.setdefault(word, line.at)
        return first

    def used_later(self, line: Line) -> int:
        """How many exact values of a result the agent used later."""
        return sum(any(step > line.step for step in self.used.get(word, ())) for word in self.words(line))

    @cached_property
    def reuse(self) -> dict[str, float]:
        """For each tool, the share of its results that were used later."""
        seen = dict[str, list[bool]]()
        for line in self.view.lines:
            if line.answers is not None and line.tools and line.step + 1 < self.view.step:
                seen.setdefault(line.tools[0], []).append(self.used_later(line) > 0)
        return {tool: sum(found) / len(found) for tool, found in seen.items()}

    def importance(self, line: Line) -> float:
        """From 0 to 1."""
        words = self.words(line)
        taken = self.used_later(line)
        soon = any(0 < step - line.step <= SOON for word in words for step in self.used.get(word, ()))
        new = sum(self.first.get(word) == line.at for word in words)
        tool = line.tools[0] if line.tools else ""
        marked = _MARK.search(self.text(line)) is not None
        return (
            0.30 * min(1.0, taken / ENOUGH)
            + 0.10 * soon
            + 0.20 * self.reuse.get(tool, 0.5)
            + 0.15 * min(1.0, new / 10)
            + 0.10 * marked
            + 0.15 * (_READS.match(tool) is None)
        )

    @cached_property
    def _prose(self) -> dict[tuple[int, int], frozenset[str]]:
        return {}

    def prose(self, line: Line) -> frozenset[str]:
        key = (line.at, line.n)
        if key not in self._prose:
            self._prose[key] = plain_words(self.text(line))
        return self._prose[key]

    @cached_property
    def frequency(self) -> Counter[str]:
        """In how many results each word occurs."""
        found = Counter[str]()
        for line in self._results:
            found.update(self.words(line) | self.prose(line))
        return found

    @cached_property
    def _results(self) -> list[Line]:
        return [line for line in self.view.lines if line.answers is not None]

    def _weight(self, words: Iterable[str]) -> float:
        """The sum of the words' weights; words that many results have weigh less."""
        most = log(len(self._results) + 1) or 1.0
        return sum((most - log(max(1, self.frequency[word]))) / most for word in words)

    def _covered(self, line: Line, message: Line) -> float:
        """The share of a message's words that a result has."""
        exact, prose = self.words(message), self.prose(message)
        whole = IDENTIFIER * self._weight(exact) + self._weight(prose)
        shared = IDENTIFIER * self._weight(exact & self.words(line)) + self._weight(prose & self.prose(line))
        return min(1.0, shared / min(max(whole, MIN_WEIGHT), MAX_WEIGHT))

    def relevance(self, line: Line, recent: Sequence[Line]) -> float:
        """How much a result has to do with recent messages, from 0 to 1."""
        words = self.words(line)
        exact = frozenset[str]().union(*map(self.words, recent))
        shared = len(words & exact) / min(len(words), ENOUGH) if words else 0.0
        used = 0.7 * min(1.0, shared) + 0.3 * min(1.0, self.used_later(line) / ENOUGH)
        return max([used, *(self._covered(line, message) for message in recent)])
