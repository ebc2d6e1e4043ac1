"""Which rules of OpenAI Responses does a request break?

R1  an output has its call before it, of its own kind, and nothing answered that yet
R2  a call has an output
R3  a reasoning item is followed by an item of the model's
R4  an item with an id that the model said right after reasoning has that reasoning right before it
R5  where nothing is stored, a reasoning item has its `encrypted_content`
R6  an id begins with `fc_` for a function call, `msg_` for a message, `rs_` for reasoning, or is absent
R7  a `call_id` has at most 64 characters
R8  an output comes before the model's next turn
R9  a compaction item has its `encrypted_content`

A turn of the model begins where an item of the model's follows one of the caller's. Calls that the provider
executes are not paired. Calls and outputs may be at the provider: in the conversation that the request goes
on from, or behind an `item_reference`; then a missing partner is a violation only strictly. Strictly, too, no
`function_call_output` answers a `tool_search_call`, though that is seen accepted, and a call id is used once
in a request; G4 otherwise asks that only of calls that are unanswered.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar, Self

import msgspec

from refold.core.check import Violation
from refold.dialects.rules.judge import Facts, breach, named, quote, unfit, verdict

ROLES = ("user", "assistant", "system", "developer")
OUTPUTS = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "local_shell_call_output": "local_shell_call",
    "shell_call_output": "shell_call",
    "apply_patch_call_output": "apply_patch_call",
    "computer_call_output": "computer_call",
    "tool_search_output": "tool_search_call",
}
"""What the caller answers with, and the call it answers."""
CALLS = frozenset(OUTPUTS.values())
WRITTEN = {"function_call": "arguments", "custom_tool_call": "input"}
HOSTED = frozenset(
    {
        "reasoning",
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
    }
)
"""What the model says beside messages and calls."""
ASIDE = frozenset({"mcp_approval_response", "additional_tools"})
"""What the caller says beside messages and outputs."""
COMPACTIONS = ("compaction", "compaction_summary")
PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}
MAX_ID_CHARS = 64


class ResponsesRules(msgspec.Struct):
    """Read from the API's error texts and its SDK's types, and tried on recorded requests."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"G4", "R1", "R2", "R8"})

    facts: Facts = Facts()
    count: int = 0
    waiting: dict[str, tuple[int, str]] = {}
    """Unanswered calls of the model's newest turn, by id: where they were made, and their type."""
    passed: dict[str, tuple[int, str, int]] = {}
    """Unanswered calls of earlier turns; the third is where the next turn begins."""
    asked: bool = False
    """Whether the caller said something since the model did."""
    thought: int | None = None
    """The item just before, if it is reasoning."""
    referred: bool = False
    taken: set[str] = set()
    broken: list[Violation] = []

    def feed(self, items: Iterable[Any], /) -> None:
        for index, item in enumerate(items, self.count):
            self.count = index + 1
            if not isinstance(item, dict):
                self._odd(index, f"is {quote(item)}, not an object")
                self.thought = None
                continue
            if problem := unfit(item):
                self._break("G1", index, f"has {problem}; it must be JSON in UTF-8")
            kind = item.get("type")
            if kind is None:
                kind = "message" if "role" in item else "item_reference" if "id" in item else None
            if not named(kind):
                self._odd(index, f"has {quote(kind)} for its type and no role")
                self.thought = None
                continue
            self._turn(index, item, kind)
            self._identify(index, item, kind)
            if kind == "message":
                self._message(index, item)
            elif kind in CALLS:
                self._call(index, item, kind)
            elif kind in OUTPUTS:
                self._output(index, item, kind)
            elif kind == "reasoning":
                self._reasoning(index, item)
            elif kind == "item_reference":
                self.referred = True
            elif kind in COMPACTIONS and not named(item.get("encrypted_content")):
                self._break(
                    "R9", index, "is a compaction without its `encrypted_content`; keep it as it came"
                )

    @property
    def violations(self) -> list[Violation]:
        left = {id: at for id, (at, *_) in self.passed.items()}
        left |= {id: at for id, (at, _) in self.waiting.items()}
        found = [breach("R2", at, self._unanswered(id), item="Item") for id, at in left.items()]
        if self.referred and not self.facts.strict:
            found = []
        if self.thought is not None:
            found.append(breach("R3", self.thought, self._unfollowed(), item="Item"))
        return verdict(self.facts, self.count, [*self.broken, *found])

    def copy(self) -> Self:
        new = copy(self)
        new.waiting, new.passed = dict(self.waiting), dict(self.passed)
        new.taken, new.broken = set(self.taken), list(self.broken)
        return new

    def _turn(self, index: int, item: dict[str, Any], kind: str) -> None:
        """Whose item it is: the model's, the caller's, or nobody knows."""
        before, self.thought = self.thought, None
        if kind == "message":
            models = item.get("role") == "assistant"
        elif kind in OUTPUTS or kind in ASIDE:
            models = _hosted(item, kind)
        elif kind in HOSTED or kind in CALLS:
            models = True
        else:
            return
        if not models:
            self.asked = True
            if before is not None:
                self._break("R3", before, self._unfollowed())
            return
        if before is None and self.facts.reasoned and index in self.facts.reasoned and item.get("id"):
            self._break("R4", index, "had a reasoning item right before it; keep that, or leave out the `id`")
        if self.asked:
            self.asked = False
            if self.waiting:
                self.passed.update({id: (*call, index) for id, call in self.waiting.items()})
                self.waiting.clear()

    def _identify(self, index: int, item: dict[str, Any], kind: str) -> None:
        id = item.get("id")
        if kind in PREFIXES:
            if id is not None and not (isinstance(id, str) and id.startswith(PREFIXES[kind])):
                prefix = PREFIXES[kind]
                self._break(
                    "R6", index, f"has {quote(id)} for its id, which begins with {prefix!r} or is absent"
                )
        elif not (named(id) or (id is None and kind != "item_reference")):
            self._odd(index, f"has {quote(id)} for its `id`, which is a string")

    def _message(self, index: int, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            self._odd(index, f"has {quote(role)} for a role, which is one of {', '.join(ROLES)}")
        if isinstance(content, list):
            for n, part in enumerate(content):
                if not isinstance(part, dict) or not named(part.get("type")):
                    self._odd(
                        index, f"has {quote(part)} for part {n} of its content, not an object with a type"
                    )
                elif part["type"] in ("input_text", "output_text") and not isinstance(part.get("text"), str):
                    self._odd(index, f"has {quote(part.get('text'))} for the text of part {n}, not a string")
        elif not isinstance(content, str):
            self._odd(index, f"has {quote(content)} for its content, not a string or parts")

    def _reasoning(self, index: int, item: dict[str, Any]) -> None:
        self.thought = index
        if not isinstance(item.get("summary"), list):
            self._odd(index, f"has {quote(item.get('summary'))} for its summary, not a list")
        if self.facts.store is False and not named(item.get("encrypted_content")):
            self._break(
                "R5", index, "is reasoning without `encrypted_content`; nothing is stored, so leave it out"
            )

    def _call(self, index: int, item: dict[str, Any], kind: str) -> None:
        if _hosted(item, kind):
            return
        if kind in WRITTEN and not (named(item.get("name")) and isinstance(item.get(WRITTEN[kind]), str)):
            self._odd(index, f"is a {kind} without its name and its {WRITTEN[kind]} as a string")
        id: Any = item.get("call_id")
        if not self._usable(index, id):
            return
        if id in self.taken:
            self._break("G4", index, f"uses the call id {quote(id)} again; ids are unique")
        if id in self.passed:
            at, *_ = self.passed.pop(id)
            if self.facts.strict or not self.referred:
                self._break("R2", at, self._unanswered(id))
        self.taken.add(id)
        self.waiting[id] = index, kind

    def _output(self, index: int, item: dict[str, Any], kind: str) -> None:
        if _hosted(item, kind):
            return
        if kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            if not isinstance(output, str | list):
                self._odd(index, f"has {quote(output)} for its output, not a string or parts")
        id: Any = item.get("call_id")
        if id is None and kind == "local_shell_call_output":  # its type has an `id`, whose meaning differs
            open = (id for id, (_, type) in self.waiting.items() if type == "local_shell_call")
            id = next(open, item.get("id"))
        if not self._usable(index, id):
            return
        if id in self.waiting:
            _, made = self.waiting.pop(id)
        elif id in self.passed:
            at, made, since = self.passed.pop(id)
            self._break("R8", index, f"answers {quote(id)} of item {at} after item {since}; it goes before")
        else:
            if self.facts.strict or not (self.facts.stored_elsewhere or self.referred):
                self._break(
                    "R1", index, f"answers {quote(id)}, which no item before it calls and leaves unanswered"
                )
            return
        searched = made == "tool_search_call" and kind == "function_call_output" and not self.facts.strict
        if made != OUTPUTS[kind] and not searched:
            self._break("R1", index, f"answers {quote(id)}, a {made}, with a {kind}; give it its own kind")
        if not self.facts.strict:
            self.taken.discard(id)

    def _usable(self, index: int, id: Any) -> bool:
        if not named(id):
            self._odd(index, f"has {quote(id)} for its `call_id`, which is a string")
            return False
        if len(id) > MAX_ID_CHARS:
            self._break("R7", index, f"has a `call_id` of {len(id)} characters; {MAX_ID_CHARS} are allowed")
        return True

    def _unanswered(self, id: str) -> str:
        return f"calls {quote(id)}, which no output after it answers; each call needs one"

    def _unfollowed(self) -> str:
        return "is reasoning that nothing of the model's follows; keep both, or neither"

    def _odd(self, index: int, problem: str) -> None:
        self._break("S1", index, f"is not shaped like an item of this API: it {problem}")

    def _break(self, rule: str, index: int, problem: str) -> None:
        self.broken.append(breach(rule, index, problem, item="Item"))


def _hosted(item: dict[str, Any], kind: str) -> bool:
    """Whether a tool search is the provider's own, so that nobody else answers it."""
    if kind not in ("tool_search_call", "tool_search_output"):
        return False
    return item.get("execution") == "server" or item.get("call_id") is None
