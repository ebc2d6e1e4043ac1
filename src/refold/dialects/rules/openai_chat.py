"""Rules for requests of OpenAI Chat Completions.

C1  a tool message answers an open call of an earlier assistant message
C2  every call is answered
C3  no message comes between an assistant message and the last result of its calls
C4  a message makes at most 128 calls
C5  a text has at most 10,485,760 characters
C6  a call id has at most 40 characters
C7  the first message after the system messages is not a tool message
C8  a message has content or calls
C9  `tool_calls` is absent rather than empty (null was seen accepted)
C10 a call's arguments are a string

G4: a call id is unique until its call has a result (strict: in the whole request).
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from refold.dialects.rules.request import RequestRules, Violation, is_name, quote

ROLES = ("user", "assistant", "tool", "system", "developer", "function")
MAX_CALLS = 128
MAX_CHARS = 10_485_760
MAX_ID_CHARS = 40
CONTENT_ALTERNATIVES = ("refusal", "audio", "function_call")
"""Fields that an assistant message may have instead of content and calls."""


class ChatRules(RequestRules):
    """Read from the API's error texts and its published schema, and tried on recorded requests."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"C1", "C2", "C3", "C7", "G4"})

    begun: bool = False

    def _check(self, index: int, message: dict[str, Any] | None) -> None:
        role = message.get("role") if message is not None else None
        if message is not None and role == "tool":
            self._result(index, message)
            return
        self._begin_turn(index)
        if message is None:
            return
        if role not in ROLES:
            self._unknown_role(index, role, ROLES)
            self.begun = True
            return
        if role == "user" or role == "assistant":
            self.begun = True
        is_complete = "tool_calls" in message and self._calls(index, message["tool_calls"], role)
        if role == "assistant" and not is_complete:
            is_complete = any(message.get(field) for field in CONTENT_ALTERNATIVES)
        self._content(index, message.get("content"), needs_content=not is_complete)

    def _at_end(self) -> Iterable[Violation]:
        return self._unanswered("C2")

    def _content(self, index: int, content: Any, *, needs_content: bool) -> None:
        if isinstance(content, str):
            self._text(index, content)
        elif isinstance(content, list):
            for n, part in enumerate(content):
                if self._part_type(index, n, part) == "text":
                    self._text(index, self._part_text(index, n, part) or "")
        elif content is not None:
            self._misshapen(index, f"has {quote(content)} for its content, not a string or parts")
        if needs_content and (content is None or content == []):
            self._break("C8", index, "has neither content nor calls; it needs one of them")

    def _text(self, index: int, text: str) -> None:
        if len(text) > MAX_CHARS:
            self._break("C5", index, f"has a text of {len(text)} characters; {MAX_CHARS} are allowed")

    def _calls(self, index: int, calls: Any, role: Any) -> bool:
        """True if the message makes calls."""
        if calls is None:
            if self.facts.strict:
                self._break("C9", index, "has null for `tool_calls`; leave the field out")
            return False
        if role != "assistant":
            self._misshapen(index, "has `tool_calls`, which only an assistant message can have")
            return False
        if not isinstance(calls, list):
            self._misshapen(index, f"has {quote(calls)} for `tool_calls`, not a list of calls")
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
        if not is_name(id):
            self._misshapen(index, f"has {quote(id)} for the id of call {n}, not a string")
            return
        self._open_call("G4", "C2", index, id)
        if len(id) > MAX_ID_CHARS:
            self._break("C6", index, f"has a call id of {len(id)} characters; {MAX_ID_CHARS} are allowed")
        function, field = call.get("function"), "arguments"
        if function is None:
            function, field = call.get("custom"), "input"
        if not isinstance(function, dict) or not is_name(function.get("name")):
            self._misshapen(index, f"makes call {n} without a function and its name")
        elif not isinstance(function.get(field), str):
            problem = f"has {quote(function.get(field))} for the {field} of call {n}, not a string"
            self._break("C10", index, problem)

    def _result(self, index: int, message: dict[str, Any]) -> None:
        id = message.get("tool_call_id")
        if not is_name(id):
            self._misshapen(index, f"has {quote(id)} for its `tool_call_id`, not a string")
        elif id in self.open_calls:
            call = self.open_calls.pop(id)
            self._release_id(id)
            if call.since is not None:
                problem = f"of message {call.at} after message {call.since}; move it before that"
                self._break("C3", index, f"answers {quote(id)} {problem}")
        elif self.begun:
            problem = f"answers {quote(id)}, but no earlier message has an open call of that id"
            self._break("C1", index, problem)
        if not self.begun:
            self._break("C7", index, "is a tool message and comes first; begin with a user message")
            self.begun = True
        if "tool_calls" in message:
            self._calls(index, message["tool_calls"], "tool")
        self._content(index, message.get("content"), needs_content=True)
