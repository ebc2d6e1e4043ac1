"""The scripted model of the demo.

It reads file after file, and searches for uses of what each defines. Asked for a line, it looks at what is in
view and remembers nothing else: it quotes the line if it sees it; otherwise it searches, expands and quotes.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice
from typing import Any

from refold.agent.demo.folder import Folder
from refold.core.expiry import EXPAND, SEARCH
from refold.testing.stand_in import Reply, StandIn

LIKE = "gpt-5"
"""The model whose tokens it has."""
QUESTION = "In {path} there is one line with `{word}` in it. What does it say, exactly?"
_QUESTION = re.compile(r"In (?P<path>.+) there is one line with `(?P<word>\S+)` in it\.")
_DEFINED = re.compile(
    r"^\s*(?:export |pub |public |async )*(?:def|class|function|func|fn|struct|interface|type) +(\w{4,})"
)
_HIT = re.compile(r"^#(\d+) tool read_file", re.MULTILINE)
SKIPPED = re.compile(r"\.(lock|min\.js|min\.css|map|svg|csv)$|lock\.(json|yaml)$")
"""Text that is not worth reading."""
PAGES = 2
"""Pages that are read of a long file."""
PAGE = 0.15
"""The share of the window that one page takes."""
LINE_TOKENS = 12
MIN_LINES = 20


class ScriptedReader:
    """Makes so many steps in a folder, again from its first file if necessary; then answers."""

    def __init__(self, folder: Folder, steps: int, page_lines: int) -> None:
        self._calls = islice(cycle(reading_plan(folder, page_lines)), steps)

    def __call__(self, request: dict[str, Any], /) -> Reply | str:
        messages = request["messages"]
        tasks = [message["content"] for message in messages if message["role"] == "user"]
        question = _QUESTION.match(str(tasks[-1]))
        if question is not None:
            return _answer(question["path"], question["word"], messages)
        call = next(self._calls, None)
        return "I have read enough." if call is None else Reply(calls=(call,))


def reading_plan(folder: Folder, page_lines: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls that read the beginning of each file, and search for the first name that it defines."""
    for path in folder.sizes:
        if SKIPPED.search(path):
            continue
        with suppress(OSError):  # it was deleted meanwhile
            lines = folder.lines(path)[: PAGES * page_lines]
            for first in range(1, len(lines) + 1, page_lines):
                yield "read_file", {"path": path, "first": first, "lines": page_lines}
            for name in filter(None, map(_DEFINED.match, lines)):
                yield "grep", {"text": name[1]}
                break


def _answer(path: str, word: str, messages: Sequence[dict[str, Any]]) -> Reply | str:
    """The line, if a page of the file or an expansion shows it; else a search, else an expansion."""
    results = {one["tool_call_id"]: str(one["content"]) for one in messages if one["role"] == "tool"}
    found = ""
    expanded: list[int] = []
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        tool = call["function"]["name"]
        result = results.get(call["id"], "")
        if tool == SEARCH:
            found = result
        if tool == EXPAND:
            expanded.append(json.loads(call["function"]["arguments"])["at"])
        if tool == EXPAND or result.startswith(f"{path}: lines "):
            for line in result.splitlines()[1:]:
                if word in line:
                    return f"It says: {line.strip()}"
    if not found:
        return Reply(calls=((SEARCH, {"query": f"{word} tool:read_file"}),))
    for hit in map(int, _HIT.findall(found)):
        if hit not in expanded:
            return Reply(calls=((EXPAND, {"at": hit, "match": word}),))
    return "I cannot find it."


class DemoModel(StandIn):
    """The reader as a model of OpenAI: refuses what its API refuses."""

    def __init__(self, folder: Folder, steps: int, window: int) -> None:
        self.steps = steps
        self.window = window
        self.max_output = window // 8
        reader = ScriptedReader(folder, steps, max(MIN_LINES, int(PAGE * window / LINE_TOKENS)))
        super().__init__(reader, window=window, max_output=self.max_output, name="demo", like=LIKE)
        self.keep = 1
        prune = {"protect": window // 8, "minimum": window // 16, "keep_steps": 2}
        compact = {"system_reserve": 0, "safety_buffer": window // 40, "keep_recent": 4, "prune": prune}
        self.config |= {"agents": {"default": {"compact": compact}}}
        """The default reserves are meant for larger windows."""
