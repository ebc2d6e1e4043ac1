"""The scripted model of the demo. It acts on what is in view and remembers nothing else.

It lists the folder, reads files page by page, searches for uses of what it finds defined there, and lists the
folder again when the listing is no longer in view. Asked for a line that it no longer sees, it searches,
expands and quotes.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from refold.core.expiry import EXPAND, SEARCH
from refold.testing.stand_in import Reply, StandIn

NAME = "demo"
LIKE = "gpt-5"
"""The model whose tokens and prices it has."""
QUESTION = "In {path} there is one line with `{word}` in it. What does it say, exactly?"
_QUESTION = re.compile(r"In (?P<path>.+) there is one line with `(?P<word>\S+)` in it\.")
_LISTED = re.compile(r"^(?P<size>\d+) bytes, (?P<kind>\w+): (?P<path>.+)$", re.MULTILINE)
_READ_LINES = re.compile(r"lines (?P<first>\d+)-(?P<last>\d+) of (?P<all>\d+)$", re.MULTILINE)
_DEFINED = re.compile(
    r"^\s*(?:export |pub |public |async )*(?:def|class|function|func|fn|struct|interface|type) +(\w{4,})",
    re.MULTILINE,
)
_HIT = re.compile(r"^#(\d+) tool read_file", re.MULTILINE)
LARGE = 100_000
"""A file of more bytes is counted before it is read."""
PAGES = 2
"""Pages that are read of a long file."""
SKIPPED = re.compile(r"\.(lock|min\.js|min\.css|map|svg|csv)$|lock\.(json|yaml)$")
"""Text that is not worth reading."""
PAGE = 0.15
"""The share of the window that one page takes."""
LINE = 12
"""Tokens of a usual line."""
LEAST_LINES = 20
CACHED_FROM = 1_024
"""Tokens; OpenAI caches no shorter prefix, and longer ones in steps of `CACHED_BY`."""
CACHED_BY = 128


class VisibleCall(NamedTuple):
    """A call in view; the result is None if there is none, or if it is not shown whole."""

    tool: str
    arguments: dict[str, Any]
    result: str | None


class ListedFile(NamedTuple):
    path: str
    size: int
    kind: str


class ScriptedReader:
    """Answers requests by what is in them. It only counts its steps besides."""

    def __init__(self, steps: int, page_lines: int) -> None:
        self.steps = steps
        self.page_lines = page_lines
        self.requests = 0

    def __call__(self, request: dict[str, Any], /) -> Reply | str:
        self.requests += 1
        messages = request["messages"]
        users = [n for n, message in enumerate(messages) if message["role"] == "user"]
        question = _QUESTION.match(str(messages[users[-1]]["content"]))
        if question is not None:
            since = len(list(_calls(messages[: users[-1]])))
            return self._answer(question["path"], question["word"], [*_calls(messages)], since)
        calls = [*_calls(messages)]
        if self.requests > self.steps:
            last = _last_path(calls)
            return f"I have read as far as {last}." if last else "There was nothing to read."
        tool, arguments = self._next(calls)
        return Reply(calls=((tool, arguments),))

    # Reading

    def _next(self, calls: Sequence[VisibleCall]) -> tuple[str, dict[str, Any]]:
        path = _last_path(calls)
        match calls[-1] if calls else None:
            case VisibleCall("list_files", _, str(listing)):
                return self._choose(_rows(listing))
            case VisibleCall("count_words"):
                return "read_file", {"path": path, "lines": self.page_lines}
            case VisibleCall("read_file", arguments, str(text)):
                part = _READ_LINES.search(text)
                if part and int(part["last"]) < min(int(part["all"]), PAGES * self.page_lines):
                    return "read_file", {
                        **arguments,
                        "first": int(part["last"]) + 1,
                        "lines": self.page_lines,
                    }
                searched = {call.arguments.get("text") for call in calls if call.tool == "grep"}
                if names := [name for name in _DEFINED.findall(text) if name not in searched]:
                    return "grep", {"text": names[0]}
        return self._after(path, calls) if path else ("list_files", {})

    def _after(self, path: str, calls: Sequence[VisibleCall]) -> tuple[str, dict[str, Any]]:
        """The file after another one, in a listing that is in view; else the next listing."""
        for call in reversed(calls):
            rows = _rows(call.result or "") if call.tool == "list_files" else []
            if any(row.path == path for row in rows):
                places = [row.path for row in rows]
                return self._choose(rows[places.index(path) + 1 :], rows[-1].path)
        return "list_files", {"after": path}

    def _choose(self, rows: Sequence[ListedFile], last: str = "") -> tuple[str, dict[str, Any]]:
        """The first file worth reading; else the next listing, and after the last one the first."""
        for row in rows:
            if row.kind == "text" and row.size > 0 and not SKIPPED.search(row.path):
                if row.size > LARGE:
                    return "count_words", {"path": row.path}
                return "read_file", {"path": row.path, "lines": self.page_lines}
        last = rows[-1].path if rows else last
        return "list_files", {"after": last} if last else {}

    # Answering

    def _answer(self, path: str, word: str, calls: Sequence[VisibleCall], since: int) -> Reply | str:
        tried = [call for call in calls[since:] if call.tool in (SEARCH, EXPAND)]
        for call in calls[since:] if tried else calls:
            if call.tool != EXPAND and (call.tool != "read_file" or call.arguments.get("path") != path):
                continue
            for line in (call.result or "").splitlines()[1:]:
                if word in line:
                    return f"It says: {line.strip()}"
        if not tried:
            return Reply(calls=((SEARCH, {"query": f"{word} tool:read_file"}),))
        expanded = {call.arguments.get("at") for call in tried if call.tool == EXPAND}
        for call in tried:
            for hit in _HIT.findall(call.result or "") if call.tool == SEARCH else ():
                if int(hit) not in expanded:
                    return Reply(calls=((EXPAND, {"at": int(hit), "match": word}),))
        return "I cannot find it."


class DemoModel(StandIn):
    """The reader as a model of OpenAI: refuses what its API refuses, and reports cached tokens."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps = steps
        self.window = window
        self.max_output = window // 8
        reader = ScriptedReader(steps, max(LEAST_LINES, int(PAGE * window / LINE)))
        super().__init__(reader, window=window, max_output=self.max_output, name=NAME, like=LIKE)
        self.keep = 1
        self._before: Sequence[str] = ()
        prune = {"protect": window // 8, "minimum": window // 16, "keep_steps": 2}
        compact = {"system_reserve": 0, "safety_buffer": window // 40, "keep_recent": 4, "prune": prune}
        self.config |= {"agents": {"default": {"compact": compact}}}
        """The default reserves are meant for larger windows."""

    def __call__(self, request: dict[str, Any], /) -> dict[str, Any]:
        answer = super().__call__(request)
        written = [json.dumps(part) for part in (request.get("tools"), *request["messages"])]
        same = 0
        for before, now in zip(self._before, written, strict=False):
            if before != now:
                break
            same += len(now)
        self._before = written
        usage = answer["usage"]
        sent_before = int(usage["prompt_tokens"] * same / sum(map(len, written)))
        usage["prompt_tokens_details"]["cached_tokens"] = cached_tokens(sent_before)
        return answer


def cached_tokens(tokens: int) -> int:
    """How much of a prefix the cache has, if all of it was sent before."""
    return tokens // CACHED_BY * CACHED_BY if tokens >= CACHED_FROM else 0


def _calls(messages: Sequence[dict[str, Any]]) -> Iterator[VisibleCall]:
    """All calls in view, with those results that are shown whole."""
    results = {one["tool_call_id"]: one["content"] for one in messages if one["role"] == "tool"}
    for message in messages:
        for call in message.get("tool_calls") or ():
            function, result = call["function"], results.get(call["id"])
            is_reduced = isinstance(result, str) and result.startswith("[refold ")
            is_whole = isinstance(result, str) and (function["name"] == EXPAND or not is_reduced)
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:  # a call that was reduced
                arguments = {}
            yield VisibleCall(function["name"], arguments, result if is_whole else None)


def _last_path(calls: Sequence[VisibleCall]) -> str:
    return next((call.arguments["path"] for call in reversed(calls) if "path" in call.arguments), "")


def _rows(listing: str) -> list[ListedFile]:
    return [ListedFile(row["path"], int(row["size"]), row["kind"]) for row in _LISTED.finditer(listing)]
