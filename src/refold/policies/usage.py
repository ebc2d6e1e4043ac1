"""Which results later steps needed: those with exact values that the agent used, and those it read again.

A result added in step 3 whose value the agent writes in step 8 was needed for 5 steps. The newest result
that has the value counts as needed. Once the agent has written the value, no result is needed for it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from refold.core.budget import Budget
from refold.core.event import Event, Expiry, Line, Replaced, Said, Undone
from refold.core.expiry import EXPAND, uses_own_tools
from refold.core.message import Message, Reasoning, Text, ToolCall
from refold.core.plan import Count
from refold.core.view import fold
from refold.policies.evidence import Evidence, flattened
from refold.policies.expire import LENGTH, Batches, Expire, batches
from refold.policies.outline import LONG
from refold.policies.text import all_text, exactness, vocabulary

EXACT = 2.0
"""The `exactness` of words that nobody writes by chance."""
MIN_VALUE_CHARS = 3
REDUCED = Expiry(mode="compact", compact_mode="skeleton", length=LENGTH)
"""How proposed settings reduce results: to their exact values."""


class UsedResult(msgspec.Struct, frozen=True):
    """A result of a tool, and what its expiry would save."""

    line: Line
    requests: int
    """Requests that would have it if it was never hidden."""
    saved: int
    """Tokens that each request saves after its expiry."""
    is_error: bool = False
    had_expired: bool = False
    """It expired, so that later uses are known only if it was read again."""


class Need(NamedTuple):
    """A step that took something from a result."""

    of: Line
    """The result."""
    step: int
    only_in: tuple[frozenset[int], ...] = ()
    """For each value, the results that would lose it by expiry; once all of them expired, it is gone."""
    is_asked: bool = False
    """The result was hidden, and was expanded or restored."""

    @property
    def steps(self) -> int:
        """The steps for which it was needed."""
        return self.step - self.of.step


class UsageHistory(msgspec.Struct, frozen=True):
    """What a conversation shows about how long results are needed."""

    steps: int
    """The number of requests."""
    tokens: int
    """Tokens of all requests if nothing had ever been hidden."""
    results: tuple[UsedResult, ...]
    needs: tuple[Need, ...]
    together: Batches = {}
    """Tools whose results came in one message and expire together."""


def past(events: Iterable[Event], count: Count, since: int = 0) -> UsageHistory:
    """The usage of results in a conversation. What a fork shares, before `since`, counts for its parent."""
    events = list(events)
    view = fold(event for event in events if not isinstance(event, Replaced))
    said = [event for event in events if isinstance(event, Said)]
    results = {one.at: one for one in said if _is_result(one.line)}
    tools = {tool: msgspec.structs.replace(REDUCED, after_steps=0) for tool in _tools(results.values())}
    plan = Expire(tools)(view, Budget(), count)
    left = {edit.span.start: one for edit in plan for one in edit.shown if isinstance(one, Message)}
    edits = [event for event in events if isinstance(event, Replaced)]
    expired = {at for edit in edits if edit.kind == "expire" for at in edit.span}
    steps = view.step - 1
    return UsageHistory(
        steps,
        sum(one.line.tokens * (steps - one.line.step) for one in said if one.at >= since),
        tuple(
            UsedResult(
                one.line,
                steps - one.line.step,
                one.line.tokens - count(left[at]) if at in left else 0,
                any(result.is_error for result in one.message.results),
                at in expired,
            )
            for at, one in results.items()
            if at >= since
        ),
        (*_used(said, left, since), *_asked(events, results, since)),
        batches(view.lines),
    )


def _is_result(line: Line) -> bool:
    return line.answers is not None and bool(line.tools) and not uses_own_tools(line)


def _tools(results: Iterable[Said]) -> set[str]:
    return {tool for one in results for tool in one.line.tools}


def _used(said: Sequence[Said], left: Mapping[int, Message], since: int) -> Iterator[Need]:
    """Values that the agent wrote and that only results had."""
    known = _WordIndex()
    for one in said:
        needs = defaultdict[int, list[frozenset[int]]](list)
        is_new_reply = one.line.role == "assistant" and one.at >= since
        for value in values(one.message) if is_new_reply else ():
            holders = known.holders(value)
            if not holders or not all(_is_result(line) for line in holders):
                continue
            needed = needs[holders[-1].at]
            if all(_is_gone(value, left.get(line.at)) for line in holders):
                needed.append(frozenset(line.at for line in holders))
        for at, only_in in needs.items():
            yield Need(known.lines[at], one.line.step, tuple(only_in))
        if not uses_own_tools(one.line):
            known.add(one.line, one.message)


def _is_gone(value: str, left: Message | None) -> bool:
    return left is not None and not Evidence((left.text,)).stands(value)


def values(message: Message) -> set[str]:
    """The values in a message of the agent that may come from a result: exact words, and tool arguments.

    >>> call = ToolCall("1", "book", '{"who": "Mia Li", "flight": "HAT078"}')
    >>> sorted(values(Message("assistant", (call, Text("I book it for 2024-05-20.")))))
    ['2024-05-20', 'hat078', 'mia li']
    """
    given = [text for call in message.calls for text in _given(call)]
    texts = [part.text for part in message.parts if isinstance(part, Text | Reasoning)]
    exact = {word for word in vocabulary("\n".join((*texts, *given))) if exactness(word) >= EXACT}
    whole = {text for text in given if len(text) <= LONG}
    return {value.casefold() for value in exact | whole if len(value) >= MIN_VALUE_CHARS}


def _given(call: ToolCall) -> Iterator[str]:
    try:
        yield from _strings(json.loads(call.input))
    except (ValueError, RecursionError):
        yield call.input


def _strings(value: Any) -> Iterator[str]:
    match value:
        case dict() | list():
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _strings(inner)
        case str():
            yield value
        case _:
            yield json.dumps(value)


class _WordIndex:
    """The messages in which each word occurs."""

    def __init__(self) -> None:
        self.lines = dict[int, Line]()
        self._texts = dict[int, Evidence]()
        self._places = defaultdict[str, list[int]](list)

    def add(self, line: Line, message: Message) -> None:
        """Add a message without its reasoning, which the next request may not have."""
        parts = tuple(part for part in message.parts if not isinstance(part, Reasoning))
        text = Evidence((all_text(Message(message.role, parts)),))
        self.lines[line.at] = line
        self._texts[line.at] = text
        for atom in text.words:
            self._places[atom].append(line.at)

    def holders(self, value: str) -> list[Line]:
        """The messages that have the value, the newest last."""
        places = min((self._places.get(atom, []) for atom in flattened(value).split()), key=len, default=[])
        return [self.lines[at] for at in places if self._texts[at].stands(value)]


def _asked(events: Sequence[Event], results: Mapping[int, Said], since: int) -> Iterator[Need]:
    """Hidden results that the agent expanded or people restored."""
    edits = {event.at: event for event in events if isinstance(event, Replaced) and len(event.span) == 1}
    step = 0
    for event in events:
        places = list[int]()
        match event:
            case Said(line=line, message=message):
                step = line.step
                calls = [call for call in message.calls if call.tool == EXPAND]
                places = [at for call in calls for at in _place(call)]
            case Replaced(kind="restore", span=span):
                places = [span.start] if len(span) == 1 else []
            case Undone(of=of):
                places = [of] if of in edits and edits[of].kind == "expire" else []
        for at in places if event.at >= since else ():
            place = edits[at].span.start if at in edits else at
            if place in results:
                now = step + (not isinstance(event, Said))  # people restore it for the next step
                yield Need(results[place].line, now, (frozenset((place,)),), is_asked=True)


def _place(call: ToolCall) -> Iterator[int]:
    try:
        yield int(json.loads(call.input)["at"])
    except (ValueError, TypeError, KeyError, RecursionError):  # a model may write anything
        return
