"""Is a view a valid request? The rules that hold for any provider, and the mending of what breaks them.

`check` judges, `repair` mends; neither uses the other. Pairing is by id, never by adjacency.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from refold.core.event import Line


class Violation(msgspec.Struct, frozen=True):
    rule: str
    index: int
    """Which message of the request."""
    message: str


class Check(msgspec.Struct):
    """Which general rules a request breaks, and where. Lines may come in several goes.

    G2 there is a message; G5 a result has its call before it; G6 a call has its result after it.
    An id may be used again once its call was answered.
    """

    count: int = 0
    waiting: dict[str, int] = {}
    broken: list[Violation] = []

    def feed(self, lines: Iterable[Line]) -> None:
        for index, line in enumerate(lines, self.count):
            self.count = index + 1
            if line.answers is not None and self.waiting.pop(line.answers, None) is None:
                self._break("G5", index, f"Result for {line.answers!r} has no call before it")
            for call in dict.fromkeys(line.calls):
                if call in self.waiting:
                    self._break("G6", self.waiting[call], f"Call {call!r} is made again unanswered")
                self.waiting[call] = index

    @property
    def violations(self) -> list[Violation]:
        empty = [] if self.count else [Violation("G2", 0, "A request needs at least one message")]
        left = [Violation("G6", i, f"Call {call!r} has no result") for call, i in self.waiting.items()]
        return [*empty, *self.broken, *left]

    def _break(self, rule: str, index: int, message: str) -> None:
        self.broken.append(Violation(rule, index, message))


def check(lines: Iterable[Line]) -> list[Violation]:
    judge = Check()
    judge.feed(lines)
    return judge.violations


class Missing(msgspec.Struct, frozen=True):
    """Stands for the result that a call never got."""

    call: str
    tool: str


class Orphan(msgspec.Struct, frozen=True):
    """A result without its call, to be shown as labelled text."""

    line: Line


Slot: TypeAlias = Line | Missing | Orphan


class Order(msgspec.Struct):
    """Whether each group of calls is answered completely and right after it, as far as lines came."""

    waiting: set[str] = set()
    kept: bool = True

    def feed(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if line.answers is not None:
                self.kept &= line.answers in self.waiting
                self.waiting.discard(line.answers)
            elif self.waiting:
                self.kept = False
            if line.calls:
                self.waiting.update(line.calls)


def repair(lines: Sequence[Line]) -> tuple[list[Slot], list[str]]:
    """The same with every call answered right after it, and a notice for each thing mended.

    Of two results for one call the last wins.
    """
    caller: dict[str, int] = {}  # call id to the newest line that makes it
    groups: dict[int, dict[str, int]] = {}  # line that calls, to its results by call id
    orphans: set[int] = set()
    notices: list[str] = []
    for i, line in enumerate(lines):
        if line.answers is not None and line.answers in caller:
            group = groups.setdefault(caller[line.answers], {})
            if line.answers in group:
                old = lines[group.pop(line.answers)].at
                notices.append(f"#{old} left out: #{line.at} answers the same call")
            group[line.answers] = i
        elif line.answers is not None:
            orphans.add(i)
            notices.append(f"#{line.at} shown as text: the call {line.answers!r} it answers is not there")
        caller.update(dict.fromkeys(line.calls, i))
    slots: list[Slot] = []
    for i, line in enumerate(lines):
        if i in orphans:
            slots.append(Orphan(line))
        elif line.answers is None:
            group = groups.get(i, {})
            slots += [line, *(lines[j] for j in group.values())]
            for call, tool in _unanswered(line, group):
                notices.append(f"#{line.at}: {call!r} was never answered; an error stands for its result")
                slots.append(Missing(call, tool))
    return slots, notices


def _unanswered(line: Line, group: dict[str, int]) -> list[tuple[str, str]]:
    tools = line.tools if len(line.tools) == len(line.calls) else ("",) * len(line.calls)
    named = dict(zip(line.calls, tools, strict=True))
    return [(call, tool) for call, tool in named.items() if call not in group]
