"""Rules for requests of Anthropic Messages.

A1  the first message is a user message (strict only: the API was seen to accept others)
A2  a system message inside `messages` is not first, follows a user message or an assistant message that ends
    with a server tool use, and does not precede a user message; strict: the model supports it, and there are
    no two in a row
A3  the user message right after a tool use has its result
A4  the assistant message right before a tool result has its use
A5  tool results come first in a user message
A6  a tool use has one result; its id is unique until then (strict: in the whole request)
A7  no text follows a tool use in the same message
A8  a server tool result follows its use in the same turn; only the last turn may lack a result
A9  no text is empty or whitespace (inside a tool result, whitespace is refused only in strict checks)
A10 at most 4 `cache_control` marks, none on an empty text
A11 thinking is signed; if the last assistant message uses tools, thinking precedes its text and tool uses
A12 thinking that was bound to messages since edited is removed
A13 the last message is a user message, for models that do not continue an assistant message
A14 a compaction block has its content
A15 the input of a tool use is an object

The API reads consecutive messages of one role as one message. A turn continues where a user message answers
the tools of the assistant message before it.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from msgspec import field

from refold.dialects.rules.request import RequestRules, Violation, has_cache_mark, is_name, quote

ROLES = ("user", "assistant", "system")
MAX_MARKS = 4
SERVER_USES = ("server_tool_use", "mcp_tool_use")
USES = ("tool_use", *SERVER_USES)
THINKING_SEALS = {"thinking": "signature", "redacted_thinking": "data"}
"""The kinds of thinking, and the field that proves that nobody changed it."""
UNANSWERED = "uses the tool {}, but the message after it has no result; each use needs one"


class AnthropicRules(RequestRules):
    """Read from the API's error texts, documentation and SDK types, and tried on recorded requests."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"A3", "A4", "A5", "A6", "A7", "A8"})

    role: str = ""
    """Whose message it is now; messages of one role in a row are one message."""
    last_role: str = ""
    """Role of the newest message, system messages aside."""
    last_block: str = ""
    """Type of the newest block."""
    has_content: bool = False
    """This message has text or a tool use or, if it is a user's, anything but results."""
    has_thinking: bool = False
    has_uses: bool = False
    is_resumed: bool = False
    """Results answered the newest turn, so that it goes on."""
    uses: dict[str, int] = field(default_factory=dict)
    """Tool uses of the newest assistant message without a result, by id: the message that has them."""
    results: set[str] = field(default_factory=set)
    """Uses that this user message answers."""
    server_uses: dict[str, int] = field(default_factory=dict)
    """Server tool uses of the newest turn without a result."""
    empty_reply: int | None = None
    """An assistant message without content, which only the last one may be."""
    late_thinking: int | None = None
    """A message whose thinking comes after text or a use of the newest assistant message."""
    marks: int = 0
    last_mark: int = 0

    def _check(self, index: int, message: dict[str, Any] | None) -> None:
        if self.empty_reply is not None:
            self._break("A9", self.empty_reply, "has no content; only the last message may be empty")
            self.empty_reply = None
        if message is None:
            return
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            self._unknown_role(index, role, ROLES)
            return
        if role != self.role:
            self._begin(index, role)
        elif role == "system" and self.facts.strict:
            self._break("A2", index, "is the second system message in a row; join them")
        if content == "" or content == []:
            if role == "assistant":
                self.empty_reply = index
            else:
                self._break("A9", index, "has no content; it needs some")
        elif isinstance(content, str):
            if content.isspace():
                self._break("A9", index, "has only whitespace for its content; it needs some text")
            self._text(index)
        elif isinstance(content, list):
            for n, block in enumerate(content):
                self._block(index, n, block)
        else:
            self._misshapen(index, f"has {quote(content)} for its content, not a string or blocks")

    def _at_end(self) -> Iterable[Violation]:
        for id, at in self.uses.items():
            yield self._violation("A3", at, UNANSWERED.format(quote(id)))
        if self.late_thinking is not None and (self.has_uses or self.role != "assistant"):
            problem = "has thinking after text or a tool use; thinking comes first"
            yield self._violation("A11", self.late_thinking, problem)
        total = self.marks + self.facts.marks
        if total > MAX_MARKS:
            problem = f"has the last of {total} `cache_control` marks; {MAX_MARKS} are allowed"
            yield self._violation("A10", self.last_mark, problem)
        if self.facts.no_prefill and self.last_role == "assistant":
            problem = "is the assistant's and comes last; the model requires that the last one is the user's"
            yield self._violation("A13", self.count - 1, problem)

    def _begin(self, index: int, role: str) -> None:
        """A message of another role than the one before."""
        before = self.role
        self.role = role
        if self.uses and not (before == "assistant" and role == "user"):
            for id, at in self.uses.items():
                self._break("A3", at, UNANSWERED.format(quote(id)))
            self.uses.clear()
        if before == "assistant" and not self.has_uses:
            self.late_thinking = None
        if role == "assistant":
            self._begin_reply(index, before)
        elif role == "system":
            self._begin_system(index, before)
        elif before == "system":
            self._break("A2", index, "is a user message after a system message; put the system message last")
        if role != "system":
            self.last_role = role
        self.has_content = self.has_thinking = self.has_uses = False
        self.results.clear()

    def _begin_reply(self, index: int, before: str) -> None:
        if not self.is_resumed:
            for id, at in self.server_uses.items():
                problem = f"uses the server tool {quote(id)} without a result; keep both or neither"
                self._break("A8", at, problem)
            self.server_uses.clear()
        self.late_thinking = None
        self.is_resumed = False
        if not before and self.facts.strict:
            self._break("A1", index, "comes first and is the assistant's; begin with a user message")

    def _begin_system(self, index: int, before: str) -> None:
        if not before:
            self._break("A2", index, "is a system message and comes first; put its text in `system`")
        elif before == "assistant" and self.last_block not in SERVER_USES:
            self._break("A2", index, "is a system message after an assistant message; put it after a user's")
        elif self.facts.strict and not self.facts.system_inside:
            self._break(
                "A2", index, "is a system message, which this model does not accept; put its text in `system`"
            )

    def _block(self, index: int, n: int, block: Any) -> None:
        if problem := _shape_problem(block, n, self.role):
            self._misshapen(index, problem)
            return
        kind: str = block["type"]
        self._block_content(index, n, block)
        if found := _cache_marks(block):
            self.marks += found
            self.last_mark = index
        if kind == "text":
            self._text(index)
            return
        self.last_block = kind
        if kind == "tool_use":
            self._take_id("A6", index, block["id"])
            self.uses[block["id"]] = index
            self.has_uses = self.has_content = True
        elif kind == "tool_result":
            self._result(index, block["tool_use_id"])
        elif kind in THINKING_SEALS:
            if index in self.facts.stale:
                self._break("A12", index, f"has {kind} that was bound to what was edited; leave it out")
            if self.has_content and not self.has_thinking and not self.facts.thinking_anywhere:
                self.late_thinking = index
            self.has_thinking = True
        elif kind in SERVER_USES:
            self._take_id("A6", index, block["id"])
            self.server_uses[block["id"]] = index
        elif kind.endswith("_tool_result"):
            id = block["tool_use_id"]
            if self.role == "assistant" and id in self.server_uses:
                del self.server_uses[id]
                self._release_id(id)
            else:
                problem = f"has a result of the server tool use {quote(id)} without that use"
                self._break("A8", index, f"{problem}; keep both or neither")
        elif self.role == "user":
            self.has_content = True

    def _block_content(self, index: int, n: int, block: dict[str, Any]) -> None:
        """The rules that a block can break by itself."""
        kind, content = block["type"], block.get("content")
        if kind == "text":
            if not block["text"] or block["text"].isspace():
                self._blank_text(index, n, block)
        elif kind in USES and not isinstance(block.get("input"), dict):
            problem = f"has {quote(block.get('input'))} for the input of block {n}, not an object"
            self._break("A15", index, problem)
        elif kind == "tool_result" and isinstance(content, list):
            self._result_blocks(index, n, content)
        elif kind == "tool_result" and content is not None and not isinstance(content, str):
            self._break(
                "S1", index, f"has {quote(content)} for the content of block {n}, not a string or blocks"
            )
        elif kind in THINKING_SEALS and not is_name(block.get(THINKING_SEALS[kind])):
            self._break("A11", index, f"has unsigned {kind} in block {n}; send it unchanged or not at all")
        elif kind == "compaction":
            summary = block.get("content", "")
            is_sealed = summary == "" and is_name(block.get("encrypted_content"))
            if not (summary is None or is_name(summary) or is_sealed):
                self._break("A14", index, f"has a compaction without content in block {n}; send it unchanged")

    def _result_blocks(self, index: int, n: int, content: list[Any]) -> None:
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("text") if kind == "text" else None
            if not is_name(kind) or (kind == "text" and not isinstance(text, str)):
                problem = f"has {quote(part)} inside block {n}, not a block with a type and its text"
                self._break("S1", index, problem)
            elif text == "" or (self.facts.strict and text and text.isspace()):
                self._blank_text(index, n, part)

    def _blank_text(self, index: int, n: int, block: dict[str, Any]) -> None:
        self._break("A9", index, f"has an empty text in block {n}; leave it out")
        if has_cache_mark(block):
            problem = f"has a `cache_control` mark on the empty text of block {n}; mark another block"
            self._break("A10", index, problem)

    def _text(self, index: int) -> None:
        if self.has_uses and self.role == "assistant":
            self._break("A7", index, "has text after a tool use; text comes first")
        self.has_content = True
        self.last_block = "text"

    def _result(self, index: int, id: str) -> None:
        if id in self.uses:
            del self.uses[id]
            self.results.add(id)
            self.is_resumed = True
            self._release_id(id)
            if self.has_content:
                self._break(
                    "A5", index, f"has the result of {quote(id)} after other content; results come first"
                )
        elif id in self.results:
            self._break("A6", index, f"has a second result of {quote(id)}; a use has one")
        else:
            problem = f"has a result of {quote(id)}, but the message before it has no such tool use"
            self._break("A4", index, problem)


def _shape_problem(block: Any, n: int, role: str) -> str | None:
    """Why block `n` of a message cannot be checked; None if it has the shape of its type."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        text = block.get("text")
        return None if isinstance(text, str) else f"has {quote(text)} for the text of block {n}, not a string"
    if not is_name(kind):
        return f"has {quote(block)} for block {n} of its content, not an object with a type"
    if kind in USES or kind in THINKING_SEALS:
        if role != "assistant":
            return f"has block {n} of type {kind}, which only an assistant message can have"
        if kind in USES and not (is_name(block.get("id")) and is_name(block.get("name"))):
            return f"has block {n} of type {kind} without an id and a name"
        if kind == "thinking" and not isinstance(block.get("thinking"), str):
            return f"has {quote(block.get('thinking'))} for the thinking of block {n}, not a string"
    elif kind.endswith("tool_result"):
        if kind == "tool_result" and role != "user":
            return f"has block {n} of type {kind}, which only a user message can have"
        if not is_name(block.get("tool_use_id")):
            return f"has block {n} of type {kind} without its `tool_use_id`"
    return None


def _cache_marks(block: dict[str, Any]) -> int:
    """The `cache_control` marks on a block and on the blocks inside it."""
    content = block.get("content")
    inner = content if isinstance(content, list) else ()
    return sum(map(has_cache_mark, (block, *inner)))
