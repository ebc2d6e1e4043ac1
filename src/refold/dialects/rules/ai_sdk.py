"""Which general rules does a list of the AI SDK's model messages break?

G4  a call id is unique as long as its call is unanswered; strictly, for the whole request
G5  a result has its call before it, by id
G6  a call has its result in a tool message, before the next user or system message

A call that the provider executes has its result, if any, in an assistant message. An approved or denied call
counts as answered, since the SDK itself sees to the rest.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar, Self

import msgspec

from refold.core.check import Violation
from refold.dialects.rules.judge import Facts, breach, named, quote, unfit, verdict

ROLES = ("system", "user", "assistant", "tool")


class AiSdkRules(msgspec.Struct):
    """Read from the SDK's conversion of model messages to prompts, version 6."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"G4", "G5", "G6"})

    facts: Facts = Facts()
    count: int = 0
    waiting: dict[str, int] = {}
    """Unanswered calls by id: where they were made."""
    passed: dict[str, tuple[int, int]] = {}
    """Unanswered calls that a user or system message stands after: where they were made, where that is."""
    free: set[str] = set()
    """Calls whose result may come or not: executed by the provider, or approved."""
    approvals: dict[str, str] = {}
    """Approvals asked for, and the calls they are about."""
    taken: set[str] = set()
    broken: list[Violation] = []

    def feed(self, messages: Iterable[Any], /) -> None:
        for index, message in enumerate(messages, self.count):
            self.count = index + 1
            if not isinstance(message, dict):
                self._odd(index, f"is {quote(message)}, not an object")
                continue
            if problem := unfit(message):
                self._break("G1", index, f"has {problem}; it must be JSON in UTF-8")
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                self._odd(index, f"has {quote(role)} for a role, which is one of {', '.join(ROLES)}")
                continue
            if self.waiting and (role == "user" or role == "system"):
                self.passed.update({id: (at, index) for id, at in self.waiting.items()})
                self.waiting.clear()
            if isinstance(content, list) and role != "system":
                for n, part in enumerate(content):
                    self._part(index, n, part, role)
            elif not isinstance(content, str) or role == "tool":
                allowed = {"system": "a string", "tool": "a list of parts"}.get(role, "a string or parts")
                self._odd(index, f"has {quote(content)} for its content, which is {allowed}")

    @property
    def violations(self) -> list[Violation]:
        left = {id: at for id, (at, _) in self.passed.items()} | self.waiting
        found = [breach("G6", at, self._unanswered(id)) for id, at in left.items()]
        return verdict(self.facts, self.count, [*self.broken, *found])

    def copy(self) -> Self:
        new = copy(self)
        new.waiting, new.passed, new.free = dict(self.waiting), dict(self.passed), set(self.free)
        new.approvals, new.taken, new.broken = dict(self.approvals), set(self.taken), list(self.broken)
        return new

    def _part(self, index: int, n: int, part: Any, role: str) -> None:
        kind = part.get("type") if isinstance(part, dict) else None
        if not named(kind):
            self._odd(index, f"has {quote(part)} for part {n} of its content, not an object with a type")
        elif kind == "text" or kind == "reasoning":
            if not isinstance(part.get("text"), str):
                self._odd(index, f"has {quote(part.get('text'))} for the text of part {n}, not a string")
        elif kind == "tool-call" or kind == "tool-result":
            id, tool = part.get("toolCallId"), part.get("toolName")
            if not named(id) or not named(tool):
                self._odd(index, f"has part {n} without a `toolCallId` and a `toolName`")
            elif role == "user" or (kind == "tool-call" and role == "tool"):
                self._odd(index, f"has a {kind} for part {n}, which is not for the role {role}")
            elif kind == "tool-call":
                self._call(index, id, part.get("providerExecuted") is True)
            else:
                self._result(index, id, role)
        elif (
            kind == "tool-approval-request"
            and named(part.get("approvalId"))
            and named(part.get("toolCallId"))
        ):
            self.approvals[part["approvalId"]] = part["toolCallId"]
        elif kind == "tool-approval-response" and named(part.get("approvalId")):
            self._approve(self.approvals.pop(part["approvalId"], None))

    def _call(self, index: int, id: str, executed: bool) -> None:
        if id in self.taken:
            self._break("G4", index, f"uses the call id {quote(id)} again; ids are unique")
        if id in self.passed:
            at, _ = self.passed.pop(id)
            self._break("G6", at, self._unanswered(id))
        self.taken.add(id)
        if executed:
            self.free.add(id)
        else:
            self.waiting[id] = index

    def _result(self, index: int, id: str, role: str) -> None:
        if id in self.free:
            self.free.discard(id)
        elif id not in self.waiting and id not in self.passed:
            self._break(
                "G5", index, f"answers {quote(id)}, which no message before it calls and leaves unanswered"
            )
            return
        elif role == "assistant":
            return  # the SDK looks for it in tool messages only
        elif id in self.waiting:
            del self.waiting[id]
        else:
            at, since = self.passed.pop(id)
            self._break(
                "G6", index, f"answers {quote(id)} of message {at} after message {since}; it goes before"
            )
        if not self.facts.strict:
            self.taken.discard(id)

    def _approve(self, id: str | None) -> None:
        if id is not None and (id in self.waiting or id in self.passed):
            self.waiting.pop(id, None)
            self.passed.pop(id, None)
            self.free.add(id)

    def _unanswered(self, id: str) -> str:
        return f"calls {quote(id)}, which no tool message after it answers; each call needs one"

    def _odd(self, index: int, problem: str) -> None:
        self._break("S1", index, f"is not shaped like a message of this API: it {problem}")

    def _break(self, rule: str, index: int, problem: str) -> None:
        self.broken.append(breach(rule, index, problem))
