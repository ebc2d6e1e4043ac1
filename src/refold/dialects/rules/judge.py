"""What is a judge told, what does it answer, and what do all judges ask of a message?

A judge is fed a request and names the rules that it breaks. Three rules are the same everywhere: G1 a message
is JSON, G2 there is one, G3 the request fits the window. S1 says that something has not the shape that the
API documents, so that its other rules could not be asked.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self, TypeGuard

import msgspec

from refold.core.check import Violation
from refold.core.sound import json_problem

_KINDS = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}


class Facts(msgspec.Struct, frozen=True):
    """What is known of a request beside its messages."""

    strict: bool = False
    """Whether to report what is against the rules and was seen accepted nevertheless."""
    tokens: int | None = None
    """What the request takes, the answer's reserve included."""
    room: int | None = None
    """What the window takes."""
    no_prefill: bool = False
    """Anthropic: the model demands that the last message is the user's."""
    system_inside: bool = False
    """Anthropic: the model takes the role `system` inside `messages`."""
    thinking_anywhere: bool = False
    """Anthropic: thinking is adaptive, so that a turn need not begin with it."""
    stale: tuple[int, ...] = ()
    """Anthropic: messages whose signed thinking must be gone, because what it was bound to was edited."""
    marks: int = 0
    """Anthropic: `cache_control` marks outside the messages."""
    stored_elsewhere: bool = False
    """Responses: the conversation goes on from one at the provider, and calls may be there."""
    store: bool | None = None
    """Responses: whether the provider keeps this one."""
    reasoned: tuple[int, ...] = ()
    """Responses: items that the model said right after a reasoning item."""


class Judge(Protocol):
    """Names the rules that one request breaks.

    What it keeps grows with what is open and what is broken, not with what was fed; a strict judge keeps the
    call ids it saw as well.
    """

    VERSION: ClassVar[str]
    """The day on which the rules were last compared with the sources that the judge names."""
    PAIRING: ClassVar[frozenset[str]]
    """Those of its rules that concern the pairing and the order of calls and results."""
    facts: Facts
    """May be replaced at any time; a message is judged by the facts of the moment it is fed."""

    def __init__(self, facts: Facts = ...) -> None: ...

    def feed(self, messages: Iterable[Any], /) -> None:
        """The next messages of the request, in as many goes as you like. Never raises over what they are."""

    @property
    def violations(self) -> list[Violation]:
        """What is broken if the request ends here, in the order of its messages."""

    def copy(self) -> Self:
        """A judge that knows the same and goes on by itself."""


def breach(rule: str, index: int, problem: str, *, item: str = "Message") -> Violation:
    """A violation in a sentence that begins with its place."""
    return Violation(rule, index, f"{item} {index} {problem}")


def verdict(facts: Facts, count: int, found: Iterable[Violation]) -> list[Violation]:
    """What was found, and what is wrong with the request as a whole."""
    whole: list[Violation] = []
    if not count and not facts.stored_elsewhere:
        whole.append(Violation("G2", 0, "The request has no message; it needs at least one"))
    if facts.tokens is not None and facts.room is not None and facts.tokens > facts.room:
        problem = f"The request takes {facts.tokens} tokens; there is room for {facts.room}"
        whole.append(Violation("G3", 0, problem))
    return sorted([*whole, *found], key=lambda violation: violation.index)


def unfit(message: dict[Any, Any]) -> str | None:
    """Why the message cannot be sent as JSON in UTF-8: what is in which field."""
    try:
        if json_problem(message) is None:
            return None
        for field in message:
            if problem := json_problem({field: message[field]}):
                return f"{problem} in {quote(field)}"
    except RecursionError:
        pass
    return "values nested too deeply"


def named(value: Any) -> TypeGuard[str]:
    """Whether it can be the id or the name of something."""
    return isinstance(value, str) and value != ""


def quote(value: Any) -> str:
    """How a sentence mentions a value that may be anything, of any size."""
    if isinstance(value, str):
        return repr(value if len(value) <= 64 else value[:63] + "…")
    return "nothing" if value is None else _KINDS.get(type(value), f"a value of type {type(value).__name__}")
