"""Rules for the model messages of the AI SDK.

G4  a call id is unique as long as its call has no result; strictly, in the whole request
G5  a result has its call before it, by id
G6  a call has its result in a tool message, before the next user or system message

A call that the provider executes has its result, if any, in an assistant message. An approved or denied call
counts as answered, since the SDK handles the rest.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from msgspec import field

from refold.dialects.rules.targets import RequestRules, Violation, is_name, quote

ROLES = ("system", "user", "assistant", "tool")
UNANSWERED = "calls {}, which no later tool message answers; each call needs a result"


class AiSdkRules(RequestRules):
    """Read from the SDK's conversion of model messages to prompts, version 6."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"G4", "G5", "G6"})

    waiting: dict[str, int] = field(default_factory=dict)
    """Calls without a result, by id: the message that makes them."""
    passed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Calls without a result before a user or system message: the message that makes them, and that one."""
    free: set[str] = field(default_factory=set)
    """Calls whose result is optional: executed by the provider, or approved."""
    approvals: dict[str, str] = field(default_factory=dict)
    """Open approval requests: the call that each is about."""

    def _check(self, index: int, message: dict[str, Any] | None) -> None:
        if message is None:
            return
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            self._unknown_role(index, role, ROLES)
            return
        if self.waiting and (role == "user" or role == "system"):
            self.passed.update({id: (at, index) for id, at in self.waiting.items()})
            self.waiting.clear()
        if isinstance(content, list) and role != "system":
            for n, part in enumerate(content):
                self._part(index, n, part, role)
        elif not isinstance(content, str) or role == "tool":
            expected = {"system": "a string", "tool": "a list of parts"}.get(role, "a string or parts")
            self._misshapen(index, f"has {quote(content)} for its content, not {expected}")

    def _at_end(self) -> Iterable[Violation]:
        for id, (at, _) in self.passed.items():
            yield self._violation("G6", at, UNANSWERED.format(quote(id)))
        for id, at in self.waiting.items():
            yield self._violation("G6", at, UNANSWERED.format(quote(id)))

    def _part(self, index: int, n: int, part: Any, role: str) -> None:
        kind = part.get("type") if isinstance(part, dict) else None
        if not is_name(kind):
            self._misshapen(
                index, f"has {quote(part)} for part {n} of its content, not an object with a type"
            )
        elif kind == "text" or kind == "reasoning":
            if not isinstance(part.get("text"), str):
                self._misshapen(
                    index, f"has {quote(part.get('text'))} for the text of part {n}, not a string"
                )
        elif kind == "tool-call" or kind == "tool-result":
            id = part.get("toolCallId")
            if not is_name(id) or not is_name(part.get("toolName")):
                self._misshapen(index, f"has part {n} without a `toolCallId` and a `toolName`")
            elif role == "user" or (kind == "tool-call" and role == "tool"):
                self._misshapen(index, f"has a {kind} for part {n}, which the role {role} cannot have")
            elif kind == "tool-call":
                self._call(index, id, part.get("providerExecuted") is True)
            else:
                self._result(index, id, role)
        elif kind == "tool-approval-request":
            if is_name(part.get("approvalId")) and is_name(part.get("toolCallId")):
                self.approvals[part["approvalId"]] = part["toolCallId"]
        elif kind == "tool-approval-response" and is_name(part.get("approvalId")):
            call = self.approvals.pop(part["approvalId"], None)
            if call is not None and (call in self.waiting or call in self.passed):
                self.waiting.pop(call, None)
                self.passed.pop(call, None)
                self.free.add(call)

    def _call(self, index: int, id: str, executed: bool) -> None:
        self._take_id("G4", index, id)
        if id in self.passed:
            at, _ = self.passed.pop(id)
            self._break("G6", at, UNANSWERED.format(quote(id)))
        if executed:
            self.free.add(id)
        else:
            self.waiting[id] = index

    def _result(self, index: int, id: str, role: str) -> None:
        if id in self.free:
            self.free.discard(id)
        elif id not in self.waiting and id not in self.passed:
            self._break(
                "G5", index, f"answers {quote(id)}, but no earlier message has an open call of that id"
            )
            return
        elif role == "assistant":
            return  # the SDK looks for it in tool messages only
        elif id in self.waiting:
            del self.waiting[id]
        else:
            at, since = self.passed.pop(id)
            problem = f"answers {quote(id)} of message {at} after message {since}; move it before that"
            self._break("G6", index, problem)
        self._release_id(id)
