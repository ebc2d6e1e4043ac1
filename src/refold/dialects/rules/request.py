"""The base of all rules: a class for each API is fed the messages of a request and names what they break.

Three rules hold for all: G1 a message is JSON, G2 a request has a message, G3 the request fits the window.
S1 reports a message without the shape that the API documents, to which other rules cannot be applied.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, ClassVar, NamedTuple, Self, TypeGuard

import msgspec

from refold.core.codec import json_problem

_KINDS = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}


class Violation(msgspec.Struct, frozen=True):
    rule: str
    index: int
    """Which message of the request."""
    message: str


class OpenCall(NamedTuple):
    """A call without a result."""

    at: int
    """Index of the message that makes it."""
    kind: str
    since: int | None = None
    """Index of the message that begins the next turn, if there is one: its result comes too late."""


class Facts(msgspec.Struct, frozen=True):
    """What is known of a request besides its messages."""

    strict: bool = False
    """Also report what the API documents as an error but was seen to accept."""
    tokens: int | None = None
    """Tokens of the request, including the reserve for the answer."""
    room: int | None = None
    """Tokens that fit into the window."""
    no_prefill: bool = False
    """Anthropic: the model requires that the last message is the user's."""
    system_inside: bool = False
    """Anthropic: the model accepts the role `system` inside `messages`."""
    thinking_anywhere: bool = False
    """Anthropic: thinking is adaptive, so that a turn need not begin with it."""
    stale: tuple[int, ...] = ()
    """Anthropic: messages that must not have signed thinking, because what it was bound to was edited."""
    marks: int = 0
    """Anthropic: `cache_control` marks outside the messages."""
    stored_elsewhere: bool = False
    """Responses: the request continues a conversation stored at the provider, which may have the calls."""
    store: bool | None = None
    """Responses: whether the provider stores this request."""
    reasoned: tuple[int, ...] = ()
    """Responses: items that the model produced directly after a reasoning item."""


class RequestRules(msgspec.Struct):
    """The rules of one API, applied to one request as its messages are fed.

    The state grows with open calls and violations, not with the number of messages; with `facts.strict` also
    with the number of call ids.
    """

    VERSION: ClassVar[str]
    """The day on which the rules were last compared with their sources."""
    PAIRING: ClassVar[frozenset[str]]
    """The rules about pairing and order of calls and results."""
    NOUN: ClassVar[str] = "Message"
    UNANSWERED: ClassVar[str] = "calls {}, which no later tool message answers; each call needs a result"

    facts: Facts = Facts()
    """May be replaced at any time; a message is checked with the facts at the time it is fed."""
    count: int = 0
    taken: set[str] = set()
    """Call ids in use."""
    broken: list[Violation] = []
    open_calls: dict[str, OpenCall] = {}
    """Calls without a result, by id."""

    def feed(self, messages: Iterable[Any], /) -> None:
        """Check the next messages of the request. Never raises, whatever they are."""
        for index, message in enumerate(messages, self.count):
            self.count = index + 1
            if not isinstance(message, dict):
                self._misshapen(index, f"is {quote(message)}, not an object")
                self._check(index, None)
                continue
            if problem := json_fault(message):
                self._break("G1", index, f"has {problem}; a request must be JSON in UTF-8")
            self._check(index, message)

    @property
    def violations(self) -> list[Violation]:
        """The violations if the request ends here, in the order of its messages."""
        facts = self.facts
        found: list[Violation] = []
        if not self.count and not facts.stored_elsewhere:
            found.append(Violation("G2", 0, "The request has no message; it needs at least one"))
        if facts.tokens is not None and facts.room is not None and facts.tokens > facts.room:
            problem = f"The request takes {facts.tokens} tokens; the window has room for {facts.room}"
            found.append(Violation("G3", 0, problem))
        return sorted([*found, *self.broken, *self._at_end()], key=lambda violation: violation.index)

    def copy(self) -> Self:
        """A copy that can be fed independently."""
        new = copy(self)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, dict | set | list):
                setattr(new, name, value.copy())
        return new

    def _check(self, index: int, message: dict[str, Any] | None) -> None:
        """Check one message; None is something that is not an object."""
        raise NotImplementedError

    def _at_end(self) -> Iterable[Violation]:
        """What is broken if nothing follows, such as calls without results."""
        raise NotImplementedError

    def _violation(self, rule: str, index: int, problem: str) -> Violation:
        return Violation(rule, index, f"{self.NOUN} {index} {problem}")

    def _break(self, rule: str, index: int, problem: str) -> None:
        self.broken.append(self._violation(rule, index, problem))

    def _misshapen(self, index: int, problem: str) -> None:
        self._break("S1", index, f"does not have the shape that this API expects: it {problem}")

    def _unknown_role(self, index: int, role: Any, roles: Iterable[str]) -> None:
        self._misshapen(index, f"has the role {quote(role)}, which is not one of {', '.join(roles)}")

    def _part_type(self, index: int, n: int, part: Any) -> str | None:
        kind = part.get("type") if isinstance(part, dict) else None
        if is_name(kind):
            return kind
        self._misshapen(index, f"has {quote(part)} for part {n} of its content, not an object with a type")
        return None

    def _part_text(self, index: int, n: int, part: dict[str, Any]) -> str | None:
        text = part.get("text")
        if isinstance(text, str):
            return text
        self._misshapen(index, f"has {quote(text)} for the text of part {n}, not a string")
        return None

    def _open_call(self, unique: str, answered: str, index: int, id: str, kind: str = "") -> None:
        """A message makes a call; `unique` and `answered` are the rules about its id and its result."""
        self._take_id(unique, index, id)
        before = self.open_calls.get(id)
        if before is not None and before.since is not None:
            del self.open_calls[id]
            self._break(answered, before.at, self.UNANSWERED.format(quote(id)))
        self.open_calls[id] = OpenCall(index, kind)

    def _begin_turn(self, index: int) -> None:
        """Open calls should have been answered before this message."""
        for id, call in self.open_calls.items():
            if call.since is None:
                self.open_calls[id] = call._replace(since=index)

    def _unanswered(self, rule: str) -> Iterable[Violation]:
        for id, call in self.open_calls.items():
            yield self._violation(rule, call.at, self.UNANSWERED.format(quote(id)))

    def _take_id(self, rule: str, index: int, id: str) -> None:
        if id in self.taken:
            self._break(rule, index, f"uses the call id {quote(id)} again; ids must be unique")
        self.taken.add(id)

    def _release_id(self, id: str) -> None:
        """Once a call has its result, its id may be used again, unless the rules are strict."""
        if not self.facts.strict:
            self.taken.discard(id)


def has_cache_mark(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("cache_control") is not None


def json_fault(message: dict[Any, Any]) -> str | None:
    """Why the message cannot be sent as JSON in UTF-8, and in which field; None if it can."""
    for field, value in message.items() if json_problem(message) else ():
        if problem := json_problem({field: value}):
            return f"{problem} in {quote(field)}"
    return None


def is_name(value: Any) -> TypeGuard[str]:
    """True for what can be an id or a name: a string that is not empty."""
    return isinstance(value, str) and value != ""


def quote(value: Any) -> str:
    """How a sentence mentions a value of any type and size."""
    if isinstance(value, str):
        return repr(value if len(value) <= 64 else value[:63] + "…")
    if value is None:
        return "nothing"
    return _KINDS.get(type(value), f"a value of type {type(value).__name__}")
