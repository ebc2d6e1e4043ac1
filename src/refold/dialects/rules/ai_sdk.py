"""Rules for the model messages of the AI SDK.

G4  a call id is unique until its call has a result (strict: in the whole request)
G5  a result has its call before it, by id
G6  a call has its result in a tool message, before the next user or system message

A call that the provider executes has its result, if any, in an assistant message. An approved or denied call
counts as answered, since the SDK handles the rest.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from msgspec import field

from refold.dialects.rules.request import RequestRules, Violation, is_name, quote

ROLES = ("system", "user", "assistant", "tool")


class AiSdkRules(RequestRules):
    """Read from the SDK's conversion of model messages to prompts, version 6."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"G4", "G5", "G6"})

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
        if role == "user" or role == "system":
            self._begin_turn(index)
        if isinstance(content, list) and role != "system":
            for n, part in enumerate(content):
                self._part(index, n, part, role)
        elif not isinstance(content, str) or role == "tool":
            expected = {"system": "a string", "tool": "a list of parts"}.get(role, "a string or parts")
            self._misshapen(index, f"has {quote(content)} for its content, not {expected}")

    def _at_end(self) -> Iterable[Violation]:
        return self._unanswered("G6")

    def _part(self, index: int, n: int, part: Any, role: str) -> None:
        kind = self._part_type(index, n, part)
        if kind == "text" or kind == "reasoning":
            self._part_text(index, n, part)
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
            if call is not None and self.open_calls.pop(call, None) is not None:
                self.free.add(call)

    def _call(self, index: int, id: str, executed: bool) -> None:
        self._open_call("G4", "G6", index, id)
        if executed:
            del self.open_calls[id]
            self.free.add(id)

    def _result(self, index: int, id: str, role: str) -> None:
        if id in self.free:
            self.free.discard(id)
        elif id not in self.open_calls:
            problem = f"answers {quote(id)}, but no earlier message has an open call of that id"
            self._break("G5", index, problem)
            return
        elif role == "assistant":
            return  # the SDK looks for it in tool messages only
        else:
            call = self.open_calls.pop(id)
            if call.since is not None:
                problem = f"of message {call.at} after message {call.since}; move it before that"
                self._break("G6", index, f"answers {quote(id)} {problem}")
        self._release_id(id)
