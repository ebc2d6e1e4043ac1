"""Which rules of OpenAI Chat Completions does a request break?

C1  a tool message answers a call that an earlier assistant message makes and nothing answered yet
C2  every call is answered
C3  nothing stands between an assistant message and the last answer to its calls
C4  a message makes at most 128 calls
C5  a text has at most 10,485,760 characters
C6  a call id has at most 40 characters
C7  after the system messages, the first message is no tool message
C8  a message has content or calls
C9  `tool_calls` is absent rather than empty; null is seen accepted
C10 a call's arguments are a string

G4, a call id is unique, holds as long as its call is unanswered; strictly, for the whole request.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar, Self

import msgspec

from refold.core.check import Violation
from refold.dialects.rules.judge import Facts, breach, named, quote, unfit, verdict

ROLES = ("user", "assistant", "tool", "system", "developer", "function")
MAX_CALLS = 128
MAX_CHARS = 10_485_760
MAX_ID_CHARS = 40
INSTEAD = ("refusal", "audio", "function_call")
"""What an assistant may send in place of content and calls."""


class ChatRules(msgspec.Struct):
    """Read from the API's error texts and its published schema, and tried on recorded requests."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"C1", "C2", "C3", "C7", "G4"})

    facts: Facts = Facts()
    count: int = 0
    begun: bool = False
    waiting: dict[str, int] = {}
    """Unanswered calls of the newest assistant message, by id: where they were made."""
    passed: dict[str, tuple[int, int]] = {}
    """Unanswered calls that something stands after: where they were made, where that is."""
    taken: set[str] = set()
    broken: list[Violation] = []

    def feed(self, messages: Iterable[Any], /) -> None:
        for index, message in enumerate(messages, self.count):
            self.count = index + 1
            if not isinstance(message, dict):
                self._odd(index, f"is {quote(message)}, not an object")
                self._interrupt(index)
                continue
            if problem := unfit(message):
                self._break("G1", index, f"has {problem}; it must be JSON in UTF-8")
            role = message.get("role")
            if role == "tool":
                self._result(index, message)
                continue
            if self.waiting:
                self._interrupt(index)
            if role == "user" or role == "assistant":
                self.begun = True
            elif role not in ROLES:
                self._odd(index, f"has {quote(role)} for a role, which is one of {', '.join(ROLES)}")
                self.begun = True
                continue
            instead = False
            if "tool_calls" in message:
                instead = self._calls(index, message["tool_calls"], role)
            if role == "assistant" and not instead:
                instead = any(message.get(field) for field in INSTEAD)
            self._content(index, message.get("content"), instead)

    @property
    def violations(self) -> list[Violation]:
        left = {id: at for id, (at, _) in self.passed.items()} | self.waiting
        found = [breach("C2", at, self._unanswered(id)) for id, at in left.items()]
        return verdict(self.facts, self.count, [*self.broken, *found])

    def copy(self) -> Self:
        new = copy(self)
        new.waiting, new.passed = dict(self.waiting), dict(self.passed)
        new.taken, new.broken = set(self.taken), list(self.broken)
        return new

    def _content(self, index: int, content: Any, instead: bool) -> None:
        if isinstance(content, str):
            if len(content) > MAX_CHARS:
                self._long(index, len(content))
        elif isinstance(content, list):
            for n, part in enumerate(content):
                if not isinstance(part, dict) or not named(part.get("type")):
                    self._odd(
                        index, f"has {quote(part)} for part {n} of its content, not an object with a type"
                    )
                elif part["type"] == "text":
                    text = part.get("text")
                    if not isinstance(text, str):
                        self._odd(index, f"has {quote(text)} for the text of part {n}, not a string")
                    elif len(text) > MAX_CHARS:
                        self._long(index, len(text))
        elif content is not None:
            self._odd(index, f"has {quote(content)} for its content, not a string or parts")
        if not instead and (content is None or content == []):
            self._break("C8", index, "has neither content nor calls; give it one of them")

    def _calls(self, index: int, calls: Any, role: Any) -> bool:
        if calls is None:
            if self.facts.strict:
                self._break("C9", index, "has null for `tool_calls`; leave the field out")
            return False
        if not isinstance(calls, list) or role != "assistant":
            whose = "only an assistant makes calls" if role != "assistant" else "not a list of calls"
            self._odd(index, f"has {quote(calls)} for `tool_calls`; {whose}")
            return False
        if not calls:
            self._break("C9", index, "has an empty `tool_calls`; leave the field out")
        if len(calls) > MAX_CALLS:
            self._break("C4", index, f"makes {len(calls)} calls; {MAX_CALLS} are allowed")
        for n, call in enumerate(calls):
            self._call(index, n, call)
        return bool(calls)

    def _call(self, index: int, n: int, call: Any) -> None:
        id = call.get("id") if isinstance(call, dict) else None
        if not named(id):
            self._odd(index, f"makes call {n} with {quote(id)} for its id, which is a string")
            return
        if id in self.taken:
            self._break("G4", index, f"uses the call id {quote(id)} again; ids are unique")
        if id in self.passed:
            at, _ = self.passed.pop(id)
            self._break("C2", at, self._unanswered(id))
        if len(id) > MAX_ID_CHARS:
            self._break("C6", index, f"has a call id of {len(id)} characters; {MAX_ID_CHARS} are allowed")
        self.taken.add(id)
        self.waiting[id] = index
        made, field = call.get("function"), "arguments"
        if made is None:
            made, field = call.get("custom"), "input"
        if not isinstance(made, dict) or not named(made.get("name")):
            self._odd(index, f"makes call {n} without a function and its name")
        elif not isinstance(made.get(field), str):
            self._break(
                "C10", index, f"has {quote(made.get(field))} for the {field} of call {n}, not a string"
            )

    def _result(self, index: int, message: dict[str, Any]) -> None:
        id = message.get("tool_call_id")
        if not named(id):
            self._odd(index, f"has {quote(id)} for its `tool_call_id`, which is a string")
        elif id in self.waiting:
            del self.waiting[id]
            self._answered(id)
        elif id in self.passed:
            at, since = self.passed.pop(id)
            self._answered(id)
            self._break(
                "C3", index, f"answers {quote(id)} of message {at} after message {since}; it goes before"
            )
        elif self.begun:
            self._break(
                "C1", index, f"answers {quote(id)}, which no message before it calls and leaves unanswered"
            )
        if not self.begun:
            self._break("C7", index, "comes first and is a tool message; begin with a user's")
            self.begun = True
        if "tool_calls" in message:
            self._calls(index, message["tool_calls"], "tool")
        self._content(index, message.get("content"), False)

    def _answered(self, id: str) -> None:
        if not self.facts.strict:
            self.taken.discard(id)

    def _interrupt(self, index: int) -> None:
        self.passed.update({id: (at, index) for id, at in self.waiting.items()})
        self.waiting.clear()

    def _unanswered(self, id: str) -> str:
        return f"calls {quote(id)}, which no tool message after it answers; each call needs one"

    def _long(self, index: int, chars: int) -> None:
        self._break("C5", index, f"has a text of {chars} characters; {MAX_CHARS} are allowed")

    def _odd(self, index: int, problem: str) -> None:
        self._break("S1", index, f"is not shaped like a message of this API: it {problem}")

    def _break(self, rule: str, index: int, problem: str) -> None:
        self.broken.append(breach(rule, index, problem))
