"""The scripted model of the demo. It acts on what is in view and remembers nothing else.

It lists the folder, reads files page by page, searches for uses of what it finds defined there, and lists the
folder again when the listing is no longer in view. Asked for a line that it no longer sees, it searches,
expands and quotes.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from refold.core.expiry import EXPAND, SEARCH
from refold.testing.stand_in import Reply, StandIn

LIKE = "gpt-5"
"""The model whose tokens and prices it has."""
QUESTION = "In {path} there is one line with `{word}` in it. What does it say, exactly?"
_QUESTION = re.compile(r"In (?P<path>.+) there is one line with `(?P<word>\S+)` in it\.")
_LISTED = re.compile(r"^\d+ bytes: (.+)$", re.MULTILINE)
_READ_LINES = re.compile(r"lines \d+-(?P<last>\d+) of (?P<all>\d+)$", re.MULTILINE)
_DEFINED = re.compile(
    r"^\s*(?:export |pub |public |async )*(?:def|class|function|func|fn|struct|interface|type) +(\w{4,})",
    re.MULTILINE,
)
_HIT = re.compile(r"^#(\d+) tool read_file", re.MULTILINE)
PAGES = 2
"""Pages that are read of a long file."""
SKIPPED = re.compile(r"\.(lock|min\.js|min\.css|map|svg|csv)$|lock\.(json|yaml)$")
"""Text that is not worth reading."""
PAGE = 0.15
"""The share of the window that one page takes."""
LINE = 12
"""Tokens of a usual line."""
MIN_LINES = 20
CACHED_FROM = 1_024
"""Tokens; OpenAI caches no shorter prefix, and longer ones in steps of `CACHED_BY`."""
CACHED_BY = 128


class VisibleCall(NamedTuple):
    """A call in view; the result is empty if there is none, or if it is not shown whole."""

    tool: str
    arguments: dict[str, Any]
    result: str


class ScriptedReader:
    """Answers requests by what is in them. It only counts its steps besides."""

    def __init__(self, steps: int, page_lines: int) -> None:
        self.steps = steps
        self.page_lines = page_lines
        self.requests = 0

    def __call__(self, request: dict[str, Any], /) -> Reply | str:
        self.requests += 1
        messages = request["messages"]
        calls = list(_calls(messages))
        tasks = [message["content"] for message in messages if message["role"] == "user"]
        question = _QUESTION.match(str(tasks[-1]))
        if question is not None:
            return _answer(question["path"], question["word"], calls)
        if self.requests > self.steps:
            last = _last_path(calls)
            return f"I have read as far as {last}." if last else "There was nothing to read."
        return Reply(calls=(self._next(calls),))

    def _next(self, calls: Sequence[VisibleCall]) -> tuple[str, dict[str, Any]]:
        """The rest of what was read last, else uses of what it defines, else the next file."""
        path = _last_path(calls)
        last = calls[-1] if calls else VisibleCall("", {}, "")
        part = _READ_LINES.search(last.result)
        if last.tool == "read_file" and part:
            read = int(part["last"])
            if read < min(int(part["all"]), PAGES * self.page_lines):
                return "read_file", {"path": path, "first": read + 1, "lines": self.page_lines}
            searched = {call.arguments.get("text") for call in calls if call.tool == "grep"}
            for name in _DEFINED.findall(last.result):
                if name not in searched:
                    return "grep", {"text": name}
        return self._next_file(path, calls)

    def _next_file(self, path: str, calls: Sequence[VisibleCall]) -> tuple[str, dict[str, Any]]:
        """The first file worth reading in a new listing, or after `path` in it; else the next listing."""
        listings = [call.result for call in calls if call.tool == "list_files" and call.result]
        listed = _LISTED.findall(listings[-1]) if listings else []
        if path in listed:
            following = listed[listed.index(path) + 1 :]
        elif calls and calls[-1].tool == "list_files":
            following = listed
        else:  # the listing that has it is no longer in view
            return "list_files", {"after": path} if path else {}
        for one in following:
            if not SKIPPED.search(one):
                return "read_file", {"path": one, "lines": self.page_lines}
        return "list_files", {"after": listed[-1]} if listed else {}


def _answer(path: str, word: str, calls: Sequence[VisibleCall]) -> Reply | str:
    """The line, if a page of the file or an expansion shows it; else a search, else an expansion."""
    for call in calls:
        if call.tool == EXPAND or (call.tool == "read_file" and call.arguments.get("path") == path):
            for line in call.result.splitlines()[1:]:
                if word in line:
                    return f"It says: {line.strip()}"
    searches = [call.result for call in calls if call.tool == SEARCH]
    if not searches:
        return Reply(calls=((SEARCH, {"query": f"{word} tool:read_file"}),))
    expanded = [call.arguments.get("at") for call in calls if call.tool == EXPAND]
    for hit in map(int, _HIT.findall(searches[-1])):
        if hit not in expanded:
            return Reply(calls=((EXPAND, {"at": hit, "match": word}),))
    return "I cannot find it."


class DemoModel(StandIn):
    """The reader as a model of OpenAI: refuses what its API refuses, and reports cached tokens."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps = steps
        self.window = window
        self.max_output = window // 8
        reader = ScriptedReader(steps, max(MIN_LINES, int(PAGE * window / LINE)))
        super().__init__(reader, window=window, max_output=self.max_output, name="demo", like=LIKE)
        self.keep = 1
        self._before: Sequence[str] = ()
        prune = {"protect": window // 8, "minimum": window // 16, "keep_steps": 2}
        compact = {"system_reserve": 0, "safety_buffer": window // 40, "keep_recent": 4, "prune": prune}
        self.config |= {"agents": {"default": {"compact": compact}}}
        """The default reserves are meant for larger windows."""

    def __call__(self, request: dict[str, Any], /) -> dict[str, Any]:
        answer = super().__call__(request)
        parts = [json.dumps(part) for part in (request.get("tools"), *request["messages"])]
        pairs = zip(self._before, parts, strict=False)
        same = [new for _, new in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        self._before = parts
        usage = answer["usage"]
        sent_before = int(usage["prompt_tokens"] * sum(map(len, same)) / sum(map(len, parts)))
        usage["prompt_tokens_details"]["cached_tokens"] = cached_tokens(sent_before)
        return answer


def cached_tokens(tokens: int) -> int:
    """How much of a prefix the cache has, if all of it was sent before."""
    return tokens // CACHED_BY * CACHED_BY if tokens >= CACHED_FROM else 0


def _calls(messages: Sequence[dict[str, Any]]) -> Iterator[VisibleCall]:
    results = {one["tool_call_id"]: one["content"] for one in messages if one["role"] == "tool"}
    for message in messages:
        for call in message.get("tool_calls") or ():
            tool = call["function"]["name"]
            result = str(results.get(call["id"]) or "")
            if tool != EXPAND and result.startswith("[refold "):
                result = ""
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:  # a call that was reduced
                arguments = {}
            yield VisibleCall(tool, arguments, result)


def _last_path(calls: Sequence[VisibleCall]) -> str:
    return next((call.arguments["path"] for call in reversed(calls) if "path" in call.arguments), "")
