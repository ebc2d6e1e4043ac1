"""The scripted model: it decides by what it is shown, and remembers nothing that it is not shown.

It reads a listing and takes from it what is worth reading, goes on in what it reads, looks for who else uses
what it found there, and asks for the rest of the listing when that is no longer in view. Asked for something
that it no longer sees, it searches, expands and quotes.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from refold.core.lease import EXPAND, SEARCH
from refold.testing.stand_in import Reply, StandIn

NAME, LIKE = "demo", "gpt-5"
"""The model, and the one whose tokens and prices it has."""
QUESTION = "In {path} there is one line with `{word}` in it. What does it say, exactly?"
_ASKED = re.compile(r"In (?P<path>.+) there is one line with `(?P<word>\S+)` in it\.")
_ROW = re.compile(r"^(?P<size>\d+) bytes, (?P<kind>\w+): (?P<path>.+)$", re.MULTILINE)
_PART = re.compile(r"lines (?P<first>\d+)-(?P<last>\d+) of (?P<all>\d+)$", re.MULTILINE)
_DEFINED = re.compile(
    r"^\s*(?:export |pub |public |async )*(?:def|class|function|func|fn|struct|interface|type) +(\w{4,})",
    re.MULTILINE,
)
_HIT = re.compile(r"^#(\d+) tool read_file", re.MULTILINE)
LARGE = 100_000
"""Bytes of a file that is counted before it is read."""
PAGES = 2
"""Of a long file."""
ENOUGH = re.compile(r"\.(lock|min\.js|min\.css|map|svg|csv)$|lock\.(json|yaml)$")
"""Text that nobody reads."""
PAGE, LINE, LEAST_LINES = 0.15, 12, 20
"""The share of the window that is read at a time, the tokens of a usual line, and the shortest page."""
CACHED_FROM, CACHED_BY = 1_024, 128
"""Tokens from which on OpenAI's cache keeps the beginning of a request, and in which steps."""


class Call(NamedTuple):
    """A call in view, and what came of it; None as long as nothing did, or where that is not shown whole."""

    tool: str
    given: dict[str, Any]
    result: str | None


class Row(NamedTuple):
    path: str
    size: int
    kind: str


class Reader:
    """Answers requests by what is in them. All that it knows besides is how many steps it may take."""

    def __init__(self, steps: int, page_lines: int) -> None:
        self.steps, self.page_lines, self.asked = steps, page_lines, 0

    def __call__(self, request: dict[str, Any], /) -> Reply | str:
        self.asked += 1
        messages = request["messages"]
        users = [n for n, message in enumerate(messages) if message["role"] == "user"]
        question = _ASKED.match(str(messages[users[-1]]["content"]))
        if question is not None:
            since = len(list(_calls(messages[: users[-1]])))
            return self._answer(question["path"], question["word"], [*_calls(messages)], since)
        calls = [*_calls(messages)]
        if self.asked > self.steps:
            last = _last_path(calls)
            return f"I have read as far as {last}." if last else "There was nothing to read."
        tool, given = self._next(calls)
        return Reply(calls=((tool, given),))

    # Reading

    def _next(self, calls: Sequence[Call]) -> tuple[str, dict[str, Any]]:
        path = _last_path(calls)
        match calls[-1] if calls else None:
            case Call("list_files", _, str(listing)):
                return self._choose(_rows(listing))
            case Call("count_words"):
                return "read_file", {"path": path, "lines": self.page_lines}
            case Call("read_file", given, str(text)):
                part = _PART.search(text)
                if part and int(part["last"]) < min(int(part["all"]), PAGES * self.page_lines):
                    return "read_file", {**given, "first": int(part["last"]) + 1, "lines": self.page_lines}
                searched = {call.given.get("text") for call in calls if call.tool == "grep"}
                if names := [name for name in _DEFINED.findall(text) if name not in searched]:
                    return "grep", {"text": names[0]}
        return self._after(path, calls) if path else ("list_files", {})

    def _after(self, path: str, calls: Sequence[Call]) -> tuple[str, dict[str, Any]]:
        """What follows a file, in a listing that is still in view or in the next one."""
        for call in reversed(calls):
            rows = _rows(call.result or "") if call.tool == "list_files" else []
            if any(row.path == path for row in rows):
                places = [row.path for row in rows]
                return self._choose(rows[places.index(path) + 1 :], rows[-1].path)
        return "list_files", {"after": path}

    def _choose(self, rows: Sequence[Row], last: str = "") -> tuple[str, dict[str, Any]]:
        """The first file that is worth it; else the next listing, and after the last one the first."""
        for row in rows:
            if row.kind == "text" and row.size > 0 and not ENOUGH.search(row.path):
                if row.size > LARGE:
                    return "count_words", {"path": row.path}
                return "read_file", {"path": row.path, "lines": self.page_lines}
        last = rows[-1].path if rows else last
        return "list_files", {"after": last} if last else {}

    # Answering

    def _answer(self, path: str, word: str, calls: Sequence[Call], since: int) -> Reply | str:
        tried = [call for call in calls[since:] if call.tool in (SEARCH, EXPAND)]
        for call in calls[since:] if tried else calls:
            is_it = call.tool == EXPAND or (call.tool == "read_file" and call.given.get("path") == path)
            for line in (call.result or "").splitlines()[1:] if is_it else ():
                if word in line:
                    return f"It says: {line.strip()}"
        if not tried:
            return Reply(calls=((SEARCH, {"query": f"{word} tool:read_file"}),))
        hits = [int(at) for call in tried if call.tool == SEARCH for at in _HIT.findall(call.result or "")]
        opened = {call.given.get("at") for call in tried if call.tool == EXPAND}
        for at in hits:
            if at not in opened:
                return Reply(calls=((EXPAND, {"at": at, "match": word}),))
        return "I cannot find it."


class Model(StandIn):
    """The reader as a model of OpenAI's: refuses what they would refuse, and says what their cache had."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps, self.window, self.max_output = steps, window, window // 8
        reader = Reader(steps, max(LEAST_LINES, int(PAGE * window / LINE)))
        super().__init__(reader, window=window, max_output=self.max_output, name=NAME, like=LIKE)
        self.keep = 1
        self._before: Sequence[str] = ()
        prune = {"protect": window // 8, "minimum": window // 16, "keep_steps": 2}
        compact = {"system_reserve": 0, "safety_buffer": window // 40, "keep_recent": 4, "prune": prune}
        self.config |= {"agents": {"default": {"compact": compact}}}
        """Besides the model, what its agent reserves and keeps: the usual is meant for larger windows."""

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
        known = int(usage["prompt_tokens"] * same / sum(map(len, written)))
        usage["prompt_tokens_details"]["cached_tokens"] = cached(known)
        return answer


def cached(tokens: int) -> int:
    """What a cache has of a beginning that was sent before."""
    return tokens // CACHED_BY * CACHED_BY if tokens >= CACHED_FROM else 0


def _calls(messages: Sequence[dict[str, Any]]) -> Iterator[Call]:
    """All calls in view, with their results as far as they are shown whole."""
    results = {one["tool_call_id"]: one["content"] for one in messages if one["role"] == "tool"}
    for message in messages:
        for call in message.get("tool_calls") or ():
            function, result = call["function"], results.get(call["id"])
            is_reduced = isinstance(result, str) and result.startswith("[refold ")
            is_whole = isinstance(result, str) and (function["name"] == EXPAND or not is_reduced)
            try:
                given = json.loads(function["arguments"])
            except ValueError:  # a call that was reduced
                given = {}
            yield Call(function["name"], given, result if is_whole else None)


def _last_path(calls: Sequence[Call]) -> str:
    return next((call.given["path"] for call in reversed(calls) if "path" in call.given), "")


def _rows(listing: str) -> list[Row]:
    return [Row(row["path"], int(row["size"]), row["kind"]) for row in _ROW.finditer(listing)]
