"""Which rules of Anthropic Messages does a request break?

A1  the first message is the user's: strictly, since another is seen accepted
A2  `system` inside the messages is not first, comes behind a user's message or an assistant's that ends in a
    server tool's use, and not before a user's; strictly, only where the model takes it, and once in a row
A3  a tool use has its result in the user message right after it
A4  a tool result has its tool use in the assistant message right before it
A5  in a user message the results come before all else
A6  a use has one result, and an id is unique as long as it is unanswered; strictly, for the whole request
A7  no text after a tool use in the same message
A8  a server tool's result has its use before it in the same turn, and only the last turn may lack a result
A9  no text is empty or whitespace; inside a tool result, whitespace is against it only strictly
A10 at most 4 `cache_control` marks, none on an empty text
A11 thinking is signed; the last assistant message, if it uses tools, has its thinking before text and uses
A12 thinking that was bound to what was edited is gone
A13 the last message is the user's, for models that demand it
A14 a compaction block has its content
A15 a tool use has an object for its input

Messages of one role in a row are one message, as the API reads them. A turn goes on where a user's message
answers the tools of the assistant's before it.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar, Self

import msgspec

from refold.core.check import Violation
from refold.dialects.rules.anthropic_block import SERVER_USES, THINKING, flaws, marks, misshapen
from refold.dialects.rules.judge import Facts, breach, quote, unfit, verdict

ROLES = ("user", "assistant", "system")
MAX_MARKS = 4


class AnthropicRules(msgspec.Struct):
    """Read from the API's error texts, documentation and SDK types, and tried on recorded requests."""

    VERSION: ClassVar[str] = "2026-11-15"
    PAIRING: ClassVar[frozenset[str]] = frozenset({"A3", "A4", "A5", "A6", "A7", "A8"})

    facts: Facts = Facts()
    count: int = 0
    role: str = ""
    """Whose message it is now; one message as long as it stays the same."""
    speaker: str = ""
    """Who spoke last, system messages aside."""
    ends: str = ""
    """The type of the newest block."""
    spoke: bool = False
    """Whether this message has text or a tool use or, if a user's, anything but results."""
    thought: bool = False
    called: bool = False
    resumed: bool = False
    """Whether results answered the newest turn, so that it goes on."""
    uses: dict[str, int] = {}
    """Tool uses of the newest assistant message that have no result, by id: where they are."""
    results: set[str] = set()
    """Uses that this user message answers."""
    served: dict[str, int] = {}
    """Server tool uses of the newest turn that have no result."""
    hollow: int | None = None
    """An assistant message without content, which only the last may be."""
    behind: int | None = None
    """Thinking of the newest assistant message that text or a use stands before."""
    marks: int = 0
    marked: int = 0
    """Where the newest mark is."""
    taken: set[str] = set()
    broken: list[Violation] = []

    def feed(self, messages: Iterable[Any], /) -> None:
        for index, message in enumerate(messages, self.count):
            self.count = index + 1
            if self.hollow is not None:
                self._break("A9", self.hollow, "has no content, which only the last message may lack")
                self.hollow = None
            if not isinstance(message, dict):
                self._odd(index, f"is {quote(message)}, not an object")
                continue
            if problem := unfit(message):
                self._break("G1", index, f"has {problem}; it must be JSON in UTF-8")
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                self._odd(index, f"has {quote(role)} for a role, which is one of {', '.join(ROLES)}")
                continue
            if role != self.role:
                self._begin(index, role)
            elif role == "system" and self.facts.strict:
                self._break("A2", index, "is the second system message in a row; make them one")
            if content == "" or content == []:
                self._lacking(index)
            elif isinstance(content, str):
                if content.isspace():
                    self._break("A9", index, "has nothing but whitespace for its content; say something")
                self._text(index)
            elif isinstance(content, list):
                for n, block in enumerate(content):
                    self._block(index, n, block)
            else:
                self._odd(index, f"has {quote(content)} for its content, not a string or blocks")

    @property
    def violations(self) -> list[Violation]:
        found = [breach("A3", at, self._unanswered(id)) for id, at in self.uses.items()]
        if self.behind is not None and (self.called or self.role != "assistant"):
            found.append(breach("A11", self.behind, "has thinking behind text or a tool use; it comes first"))
        total = self.marks + self.facts.marks
        if total > MAX_MARKS:
            problem = f"has the last of {total} `cache_control` marks; {MAX_MARKS} are allowed"
            found.append(breach("A10", self.marked, problem))
        if self.facts.no_prefill and self.speaker == "assistant":
            problem = "ends the request and is not the user's, which the model demands"
            found.append(breach("A13", self.count - 1, problem))
        return verdict(self.facts, self.count, [*self.broken, *found])

    def copy(self) -> Self:
        new = copy(self)
        new.uses, new.served, new.results = dict(self.uses), dict(self.served), set(self.results)
        new.taken, new.broken = set(self.taken), list(self.broken)
        return new

    def _begin(self, index: int, role: str) -> None:
        """A message of another role than the one before."""
        before, self.role = self.role, role
        if self.uses and not (before == "assistant" and role == "user"):
            for id, at in self.uses.items():
                self._break("A3", at, self._unanswered(id))
            self.uses.clear()
        if before == "assistant" and not self.called:
            self.behind = None
        if role == "assistant":
            self._reply(index, before)
        elif role == "system":
            self._system(index, before)
        elif before == "system":
            self._break("A2", index, "is a user's behind a system message; put that behind it")
        if role != "system":
            self.speaker = role
        self.spoke = self.thought = self.called = False
        self.results.clear()

    def _reply(self, index: int, before: str) -> None:
        if not self.resumed:
            for id, at in self.served.items():
                problem = f"uses the server tool {quote(id)} without a result; keep both or neither"
                self._break("A8", at, problem)
            self.served.clear()
        self.behind, self.resumed = None, False
        if not before and self.facts.strict:
            self._break("A1", index, "comes first and is the assistant's; begin with a user's")

    def _system(self, index: int, before: str) -> None:
        if not before:
            problem = "that comes first; put its text in `system`"
        elif before == "assistant" and self.ends not in SERVER_USES:
            problem = "behind an assistant's; put it behind a user's"
        elif self.facts.strict and not self.facts.system_inside:
            problem = "that this model does not take; put its text in `system`"
        else:
            return
        self._break("A2", index, f"is a system message {problem}")

    def _lacking(self, index: int) -> None:
        if self.role == "assistant":
            self.hollow = index
        else:
            self._break("A9", index, "has no content; say something")

    def _block(self, index: int, n: int, block: Any) -> None:
        if why := misshapen(block, n, self.role):
            self._odd(index, why)
            return
        for rule, problem in flaws(block, n, self.facts.strict):
            self._break(rule, index, problem)
        kind: str = block["type"]
        if found := marks(block):
            self.marks += found
            self.marked = index
        if kind == "text":
            self._text(index)
            return
        self.ends = kind
        if kind == "tool_use":
            self._take(index, block["id"])
            self.uses[block["id"]] = index
            self.called = self.spoke = True
        elif kind == "tool_result":
            self._result(index, block["tool_use_id"])
        elif kind in THINKING:
            self._thinking(index, kind)
        elif kind in SERVER_USES:
            self._take(index, block["id"])
            self.served[block["id"]] = index
        elif kind.endswith("_tool_result"):
            self._served(index, block["tool_use_id"])
        elif self.role == "user":
            self.spoke = True

    def _text(self, index: int) -> None:
        if self.called and self.role == "assistant":
            self._break("A7", index, "has text behind a tool use; it comes before")
        self.spoke = True
        self.ends = "text"

    def _result(self, index: int, id: str) -> None:
        if id in self.uses:
            del self.uses[id]
            self.results.add(id)
            self.resumed = True
            self._release(id)
            if self.spoke:
                self._break(
                    "A5", index, f"has the result of {quote(id)} behind other content; it comes first"
                )
        elif id in self.results:
            self._break("A6", index, f"has a second result of {quote(id)}; a use has one")
        else:
            self._break("A4", index, f"has a result of {quote(id)}, which the message before it does not use")

    def _served(self, index: int, id: str) -> None:
        if self.role == "assistant" and id in self.served:
            del self.served[id]
            self._release(id)
        else:
            problem = f"has the result of the server tool {quote(id)} without its use; keep both or neither"
            self._break("A8", index, problem)

    def _thinking(self, index: int, kind: str) -> None:
        if index in self.facts.stale:
            self._break("A12", index, f"has {kind} that was bound to what was edited; leave it out")
        if self.spoke and not self.thought and not self.facts.thinking_anywhere:
            self.behind = index
        self.thought = True

    def _take(self, index: int, id: str) -> None:
        if id in self.taken:
            self._break("A6", index, f"uses the id {quote(id)} again; ids are unique")
        self.taken.add(id)

    def _release(self, id: str) -> None:
        if not self.facts.strict:
            self.taken.discard(id)

    def _unanswered(self, id: str) -> str:
        return f"uses the tool {quote(id)}, of which the message behind it has no result; each use needs one"

    def _odd(self, index: int, problem: str) -> None:
        self._break("S1", index, f"is not shaped like a message of this API: it {problem}")

    def _break(self, rule: str, index: int, problem: str) -> None:
        self.broken.append(breach(rule, index, problem))
