"""What is wrong with a request, and the mending of what every provider refuses: calls and results unpaired.

Pairing is by id, never by adjacency.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from refold.core.event import Line
from refold.core.pairing import is_shared, original_id


class Violation(msgspec.Struct, frozen=True):
    rule: str
    index: int
    """Which message of the request."""
    message: str


class Missing(msgspec.Struct, frozen=True):
    """Stands for the result that a call never got."""

    call: str
    tool: str


class Orphan(msgspec.Struct, frozen=True):
    """A result without its call, to be shown as labelled text."""

    line: Line


Slot: TypeAlias = Line | Missing | Orphan


def repair(lines: Sequence[Line]) -> tuple[list[Slot], list[str]]:
    """The same with every call answered right after it, and a notice for each thing mended.

    Of two results for one call the last wins, unless several calls came with its id: then it is one too many.
    """
    caller: dict[str, int] = {}  # call id to the newest line that makes it
    groups: dict[int, dict[str, int]] = {}  # line that calls, to its results by call id
    orphans: set[int] = set()
    notices: list[str] = []
    for i, line in enumerate(lines):
        if line.answers is not None and line.answers in caller:
            group = groups.setdefault(caller[line.answers], {})
            if line.answers in group and is_shared(line.answers, lines[caller[line.answers]].calls):
                notices.append(f"#{line.at} left out: the calls that came with its id have their results")
                continue
            if line.answers in group:
                old = lines[group.pop(line.answers)].at
                notices.append(f"#{old} left out: #{line.at} answers the same call")
            group[line.answers] = i
        elif line.answers is not None:
            orphans.add(i)
            notices.append(
                f"#{line.at} shown as text: the call {original_id(line.answers)!r} it answers is not there"
            )
        caller.update(dict.fromkeys(line.calls, i))
    slots: list[Slot] = []
    for i, line in enumerate(lines):
        if i in orphans:
            slots.append(Orphan(line))
        elif line.answers is None:
            group = groups.get(i, {})
            slots += [line, *(lines[j] for j in group.values())]
            for call, tool in _unanswered(line, group):
                notices.append(
                    f"#{line.at}: {original_id(call)!r} was never answered; an error stands for its result"
                )
                slots.append(Missing(call, tool))
    return slots, notices


def _unanswered(line: Line, group: dict[str, int]) -> list[tuple[str, str]]:
    tools = line.tools if len(line.tools) == len(line.calls) else ("",) * len(line.calls)
    named = dict(zip(line.calls, tools, strict=True))
    return [(call, tool) for call, tool in named.items() if call not in group]
