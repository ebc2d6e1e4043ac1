"""Rules for requests of OpenAI Responses.

R1  an output follows a call of its own kind that has no other output
R2  a call has an output
R3  a reasoning item is followed by another item of the model
R4  an item with an id that the model produced right after reasoning still follows that reasoning
R5  with `store: false`, a reasoning item has its `encrypted_content`
R6  an id begins with `fc_` for a function call, `msg_` for a message, `rs_` for reasoning, or is absent
R7  a `call_id` has at most 64 characters
R8  an output comes before the model's next turn
R9  a compaction item has its `encrypted_content`

A turn of the model begins where one of its items follows one of the caller's. Calls that the provider
executes are not paired. If the request continues a conversation stored at the provider, or has an
`item_reference`, the other half of a pair may be there, and its absence is a violation only in strict
checks. Strict checks also report a `function_call_output` for a `tool_search_call` (seen accepted) and a
call id used twice in a request; otherwise G4 requires unique ids only of calls that are unanswered.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from refold.dialects.rules.request import OpenCall, RequestRules, Violation, is_name, quote

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
"""The items with which the caller answers, and the call that each one answers."""
CALLS = frozenset(OUTPUTS.values())
INPUT_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}
MODEL_ITEMS = frozenset(
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
"""Items of the model besides messages and calls."""
CALLER_ITEMS = frozenset({"mcp_approval_response", "additional_tools"})
"""Items of the caller besides messages and outputs."""
COMPACTIONS = ("compaction", "compaction_summary")
PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}
MAX_ID_CHARS = 64
NOT_FOLLOWED = "is reasoning that no item of the model follows; keep both or neither"


class ResponsesRules(RequestRules):
    """Read from the API's error texts and its SDK's types, and tried on recorded requests."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"G4", "R1", "R2", "R8"})
    NOUN: ClassVar[str] = "Item"
    UNANSWERED: ClassVar[str] = "calls {}, which no later output answers; each call needs an output"

    caller_spoke: bool = False
    """The newest item is the caller's."""
    reasoning: int | None = None
    """Index of the item just before, if it is reasoning."""
    has_references: bool = False

    def _check(self, index: int, item: dict[str, Any] | None) -> None:
        kind = None
        if item is not None:
            kind = item.get("type")
            if kind is None and "role" in item:
                kind = "message"
            elif kind is None and "id" in item:
                kind = "item_reference"
            if not is_name(kind):
                self._misshapen(index, f"has {quote(kind)} for its type, and no role")
        if item is None or not is_name(kind):
            self.reasoning = None
            return
        self._turn(index, item, kind)
        self._item_id(index, item, kind)
        if kind == "message":
            self._message(index, item)
        elif kind in CALLS:
            self._call(index, item, kind)
        elif kind in OUTPUTS:
            self._output(index, item, kind)
        elif kind == "reasoning":
            self._reasoning(index, item)
        elif kind == "item_reference":
            self.has_references = True
        elif kind in COMPACTIONS and not is_name(item.get("encrypted_content")):
            self._break("R9", index, "is a compaction without its `encrypted_content`; send it unchanged")

    def _at_end(self) -> Iterable[Violation]:
        if self.facts.strict or not self.has_references:
            yield from self._unanswered("R2")
        if self.reasoning is not None:
            yield self._violation("R3", self.reasoning, NOT_FOLLOWED)

    def _turn(self, index: int, item: dict[str, Any], kind: str) -> None:
        """Whose item it is: the model's, the caller's, or unknown."""
        reasoning_before = self.reasoning
        self.reasoning = None
        if kind == "message":
            is_models = item.get("role") == "assistant"
        elif kind in OUTPUTS or kind in CALLER_ITEMS:
            is_models = _is_hosted_search(item, kind)
        elif kind in MODEL_ITEMS or kind in CALLS:
            is_models = True
        else:
            return
        if not is_models:
            self.caller_spoke = True
            if reasoning_before is not None:
                self._break("R3", reasoning_before, NOT_FOLLOWED)
            return
        if reasoning_before is None and index in self.facts.reasoned and item.get("id"):
            self._break("R4", index, "lost the reasoning item before it; keep that, or leave out the `id`")
        if self.caller_spoke:
            self.caller_spoke = False
            self._begin_turn(index)

    def _item_id(self, index: int, item: dict[str, Any], kind: str) -> None:
        id = item.get("id")
        if kind in PREFIXES:
            prefix = PREFIXES[kind]
            if id is not None and not (isinstance(id, str) and id.startswith(prefix)):
                problem = f"has {quote(id)} for its id, which must begin with {prefix!r} or be absent"
                self._break("R6", index, problem)
        elif not (is_name(id) or (id is None and kind != "item_reference")):
            self._misshapen(index, f"has {quote(id)} for its `id`, not a string")

    def _message(self, index: int, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            self._unknown_role(index, role, ROLES)
        if isinstance(content, list):
            for n, part in enumerate(content):
                if self._part_type(index, n, part) in ("input_text", "output_text"):
                    self._part_text(index, n, part)
        elif not isinstance(content, str):
            self._misshapen(index, f"has {quote(content)} for its content, not a string or parts")

    def _reasoning(self, index: int, item: dict[str, Any]) -> None:
        self.reasoning = index
        if not isinstance(item.get("summary"), list):
            self._misshapen(index, f"has {quote(item.get('summary'))} for its summary, not a list")
        if self.facts.store is False and not is_name(item.get("encrypted_content")):
            problem = "is reasoning without `encrypted_content`, and nothing is stored; leave it out"
            self._break("R5", index, problem)

    def _call(self, index: int, item: dict[str, Any], kind: str) -> None:
        if _is_hosted_search(item, kind):
            return
        if kind in INPUT_FIELDS and not (
            is_name(item.get("name")) and isinstance(item.get(INPUT_FIELDS[kind]), str)
        ):
            self._misshapen(index, f"is a {kind} without its name and its {INPUT_FIELDS[kind]} as a string")
        id: Any = item.get("call_id")
        if not self._check_call_id(index, id):
            return
        if self.has_references and not self.facts.strict:
            self.open_calls.pop(id, None)  # its output may be behind a reference
        self._open_call("G4", "R2", index, id, kind)

    def _output(self, index: int, item: dict[str, Any], kind: str) -> None:
        if _is_hosted_search(item, kind):
            return
        if kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            if not isinstance(output, str | list):
                self._misshapen(index, f"has {quote(output)} for its output, not a string or parts")
        id: Any = item.get("call_id")
        if id is None and kind == "local_shell_call_output":  # its type has an `id`, whose meaning differs
            is_open = (id for id, call in self.open_calls.items() if _is_shell_call(call))
            id = next(is_open, item.get("id"))
        if not self._check_call_id(index, id):
            return
        call = self.open_calls.pop(id, None)
        if call is None:
            if self.facts.strict or not (self.facts.stored_elsewhere or self.has_references):
                problem = f"answers {quote(id)}, but no earlier item has an open call of that id"
                self._break("R1", index, problem)
            return
        if call.since is not None:
            problem = f"of item {call.at} after item {call.since}; move it before that"
            self._break("R8", index, f"answers {quote(id)} {problem}")
        made = call.kind
        is_search = made == "tool_search_call" and kind == "function_call_output" and not self.facts.strict
        if made != OUTPUTS[kind] and not is_search:
            problem = f"answers {quote(id)}, a {made}, with a {kind}, which is of another kind"
            self._break("R1", index, problem)
        self._release_id(id)

    def _check_call_id(self, index: int, id: Any) -> bool:
        if not is_name(id):
            self._misshapen(index, f"has {quote(id)} for its `call_id`, not a string")
            return False
        if len(id) > MAX_ID_CHARS:
            self._break("R7", index, f"has a `call_id` of {len(id)} characters; {MAX_ID_CHARS} are allowed")
        return True


def _is_shell_call(call: OpenCall) -> bool:
    return call.kind == "local_shell_call" and call.since is None


def _is_hosted_search(item: dict[str, Any], kind: str) -> bool:
    """True for a tool search that the provider runs and answers itself."""
    if kind not in ("tool_search_call", "tool_search_output"):
        return False
    return item.get("execution") == "server" or item.get("call_id") is None
