"""What is worth keeping, without asking a model: what was used, what is new, what went wrong, what is gone.

All of it is read off the words: a result whose exact values the agent takes up in later calls matters, and
so do the other results of the same tool.
"""

import re
from collections.abc import Iterable
from functools import cached_property, lru_cache

import msgspec

from refold.core.event import Line
from refold.core.message import CompactionMarker, Message, Reasoning, Text, ToolCall, ToolResult
from refold.core.regex import regex
from refold.core.view import Item, View
from refold.policies.outline import PLAIN, SHORT, vocabulary, worth

SOON = 3
"""Steps within which a use tells that a result was what the agent was after."""
ENOUGH = 4
"""Values taken up that make a result as important as it can be."""
_MARK = regex(
    r"\b(?:error|exception|traceback|failed|denied|must|never|always|decided|instead|because|constraint)\b",
    re.IGNORECASE,
)
_READS = regex(
    r"^(?:\w+[_.-])?(?:read|get|list|search|find|fetch|view|open|cat|ls|grep|query|lookup|show)",
    re.IGNORECASE,
)


def exact_words(text: str) -> frozenset[str]:
    """The words of a text that could not be guessed. What stays in a view is looked at again and again."""
    return _known(text) if len(text) < SHORT else _exact(text)


def _exact(text: str) -> frozenset[str]:
    return frozenset(word for word in vocabulary(text) if worth(word) >= PLAIN)


_known = lru_cache(maxsize=256)(_exact)


def all_text(message: Message) -> str:
    """Everything a message says, calls and reasoning included."""
    parts = list[str]()
    for part in message.parts:
        match part:
            case ToolCall(tool=tool, input=input):
                parts.append(f"{tool} {input}")
            case Text(text=text) | Reasoning(text=text) | ToolResult(output=str(text)):
                parts.append(text)
            case CompactionMarker(text=text):
                parts.append(text)
            case ToolResult(output=tuple(inner)):
                parts += [one.text for one in inner if isinstance(one, Text)]
            case _:
                pass
    return "\n".join(parts)


class Reading(msgspec.Struct, frozen=True, dict=True):
    """A view whose words were looked at. Each message is read once, when it is asked for."""

    view: View

    @cached_property
    def _items(self) -> dict[tuple[int, int], Item]:
        return {(line.at, line.n): item for item in self.view.items for line in item.lines}

    @cached_property
    def _words(self) -> dict[tuple[int, int], frozenset[str]]:
        return {}

    def words(self, line: Line) -> frozenset[str]:
        key = (line.at, line.n)
        if key not in self._words:
            self._words[key] = exact_words(all_text(self._items[key].words(line)))
        return self._words[key]

    @cached_property
    def used(self) -> dict[str, list[int]]:
        """In which steps the agent itself wrote a word."""
        used = dict[str, list[int]]()
        for line in self.view.lines:
            if line.role == "assistant":
                for word in self.words(line):
                    used.setdefault(word, []).append(line.step)
        return used

    @cached_property
    def first(self) -> dict[str, int]:
        """Where a word occurs for the first time."""
        first = dict[str, int]()
        for line in self.view.lines:
            for word in self.words(line):
                first.setdefault(word, line.at)
        return first

    def taken_up(self, line: Line) -> int:
        """How many of its exact values the agent wrote later."""
        return sum(any(step > line.step for step in self.used.get(word, ())) for word in self.words(line))

    @cached_property
    def reuse(self) -> dict[str, float]:
        """For each tool, the share of its results that were taken up later."""
        seen = dict[str, list[bool]]()
        for line in self.view.lines:
            if line.answers is not None and line.tools and line.step + 1 < self.view.step:
                seen.setdefault(line.tools[0], []).append(self.taken_up(line) > 0)
        return {tool: sum(found) / len(found) for tool, found in seen.items()}

    def importance(self, line: Line) -> float:
        """From 0 to 1."""
        words = self.words(line)
        taken = self.taken_up(line)
        soon = any(0 < step - line.step <= SOON for word in words for step in self.used.get(word, ()))
        new = sum(self.first.get(word) == line.at for word in words)
        tool = line.tools[0] if line.tools else ""
        marked = _MARK.search(all_text(self._items[line.at, line.n].words(line))) is not None
        return (
            0.30 * min(1.0, taken / ENOUGH)
            + 0.10 * soon
            + 0.20 * self.reuse.get(tool, 0.5)
            + 0.15 * min(1.0, new / 10)
            + 0.10 * marked
            + 0.15 * (_READS.match(tool) is None)
        )

    def relevance(self, line: Line, recent: frozenset[str]) -> float:
        """How much of it has to do with the work at hand, from 0 to 1."""
        words = self.words(line)
        shared = len(words & recent) / min(len(words), ENOUGH) if words else 0.0
        return 0.7 * min(1.0, shared) + 0.3 * min(1.0, self.taken_up(line) / ENOUGH)

    def text(self, lines: Iterable[Line]) -> str:
        """All that stands in some of its lines."""
        return "\n".join(all_text(self._items[line.at, line.n].words(line)) for line in lines)
