"""Pairing of tool calls and results by id, and the repair of pairs that are not complete.

Calls of one reply that share an id get unique ids by their order; the stored message keeps its own ids.

>>> unique_call_ids(["a", "b", "a"]) == ("a", "b", f"a{ID_SEPARATOR}1")
True
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from refold.core.event import Line
from refold.core.message import Message, Part, ToolCall, ToolResult

ID_SEPARATOR = "\u241e"
"""Between an original id and its number; assumed to occur in no id."""


def unique_call_ids(ids: Sequence[str]) -> tuple[str, ...]:
    """The same ids, with a number appended to each repeated one."""
    if len({*ids}) == len(ids):
        return tuple(ids)
    taken: set[str] = set()
    unique: list[str] = []
    for id in ids:
        new, n = id, 0
        while new in taken or (n and new in ids):
            n += 1
            new = f"{id}{ID_SEPARATOR}{n}"
        taken.add(new)
        unique.append(new)
    return tuple(unique)


def first_open_call(id: str, open_ids: Iterable[str]) -> str:
    """The first open call whose original id is `id`; `id` itself if there is none."""
    candidates = (other for other in open_ids if original_id(other) == id)
    return min(candidates, key=lambda other: (len(other), other), default=id)


def original_id(id: str) -> str:
    return id.partition(ID_SEPARATOR)[0]


def shares_original_id(id: str, ids: Iterable[str]) -> bool:
    """True if another of `ids` has the same original id."""
    return any(other != id and original_id(other) == original_id(id) for other in ids)


def has_renamed_ids(line: Line) -> bool:
    return ID_SEPARATOR in (line.answers or "") or any(ID_SEPARATOR in id for id in line.calls)


def with_unique_ids(message: Message, line: Line) -> Message:
    """The message with the unique ids of its line in place of the original ones."""
    if not has_renamed_ids(line):
        return message
    call_ids = iter(line.calls)

    def renamed(part: Part) -> Part:
        match part:
            case ToolCall(call_id=id):
                return _with_id(part, next(call_ids, id))
            case ToolResult():
                return _with_id(part, line.answers or "")
        return part

    return msgspec.structs.replace(message, parts=tuple(map(renamed, message.parts)))


def with_original_ids(message: Message) -> Message:
    """The message with the ids that its sender gave."""
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, ToolCall | ToolResult):
            part = _with_id(part, original_id(part.call_id))
        parts.append(part)
    new_parts = tuple(parts)
    return msgspec.structs.replace(message, parts=new_parts) if new_parts != message.parts else message


def _with_id(part: ToolCall | ToolResult, id: str) -> ToolCall | ToolResult:
    if part.call_id == id or original_id(part.call_id) != original_id(id):
        return part
    return msgspec.structs.replace(part, call_id=id)


NO_RESULT = "The call was interrupted: it never returned a result."
"""Shown as the result of a call that has none."""


class MissingResult(msgspec.Struct, frozen=True):
    """Stands for the result of a call that has none."""

    call: str
    tool: str


class OrphanResult(msgspec.Struct, frozen=True):
    """A result without its call, shown as labelled text."""

    line: Line


Slot: TypeAlias = Line | MissingResult | OrphanResult


def repair_pairs(lines: Sequence[Line]) -> tuple[list[Slot], list[str]]:
    """The lines with every call directly followed by its results, and a notice for each repair.

    Of two results of one call the last counts, unless several calls share its id: then it is left out.
    """
    caller: dict[str, int] = {}  # call id → index of the newest line that makes the call
    groups: dict[int, dict[str, int]] = {}  # index of a calling line → its results by call id
    orphans: set[int] = set()
    notices: list[str] = []
    for i, line in enumerate(lines):
        id = line.answers
        if id is not None and id in caller:
            group = groups.setdefault(caller[id], {})
            if id in group and shares_original_id(id, lines[caller[id]].calls):
                notices.append(f"#{line.at} is left out: every call with its id already has a result")
                continue
            if id in group:
                old = lines[group.pop(id)].at
                notices.append(f"#{old} is left out: #{line.at} is a later result of the same call")
            group[id] = i
        elif id is not None:
            orphans.add(i)
            notices.append(f"#{line.at} is shown as text: its call {original_id(id)!r} is not shown")
        caller.update(dict.fromkeys(line.calls, i))
    slots: list[Slot] = []
    for i, line in enumerate(lines):
        if i in orphans:
            slots.append(OrphanResult(line))
        elif line.answers is None:
            group = groups.get(i, {})
            slots.append(line)
            slots += [lines[j] for j in group.values()]
            tools = line.tools if len(line.tools) == len(line.calls) else ("",) * len(line.calls)
            for call, tool in dict(zip(line.calls, tools, strict=True)).items():
                if call not in group:
                    slots.append(MissingResult(call, tool))
                    notices.append(
                        f"#{line.at}: the call {original_id(call)!r} has no result; an error stands for it"
                    )
    return slots, notices
