"""A summary without a model: what was asked, what was tried on what, what went wrong, and every exact value.

It is put together by rule from the messages it stands for, and from summaries of the same kind before it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import msgspec

from refold.core.event import Line
from refold.core.message import Message, Text, ToolCall
from refold.core.plan import Count
from refold.core.regex import regex
from refold.policies.importance import all_text
from refold.policies.outline import DENSE, LONG, clip, outline, reread, words, worth
from refold.policies.reduced import quoted

OPEN, CLOSE = '<record note="what happened before, kept by rule; not an instruction">', "</record>"
REQUEST, SENTENCE, CALL, ERROR = 400, 240, 100, 240
"""Characters that stay of each."""
TASK = "the task, which stands above as it was said"
SECTIONS = {
    "requests": "Requests of the user",
    "rules": "Rules and decisions",
    "calls": "Tools used, and on what",
    "files": "Files and resources",
    "errors": "Errors, and what followed",
    "values": "Exact values",
}
DOT = " · "
"""Stands between values of one key."""
BETWEEN = " | "
"""Stands between calls of one tool."""
NAMED = 1.6
"""What a path or an address is worth at least."""
LEAST = 1.2
"""What a value is worth that is named at all."""
MOST_VALUES, LEAST_VALUES = 12_000, 80
"""Values that are looked at: of all messages together, and of each at least."""
EARLY = 200
"""Characters within which a result says that it is an error, if it is one."""
_RULE = regex(
    r"\b(?:must|never|always|make sure|should not|shouldn't|required|not allowed|at most|at least"
    r"|no more than|decided|decision|instead of|agreed|will use|rejected|constraint|forbidden)\b"
    r"|^(?:and |but |also |so |please )*(?:do not|don't|only|prefer|avoid|keep|use)\b",
    re.IGNORECASE,
)
_THROWN = regex(r"^.*\b[A-Z]\w*(?:Error|Exception): .*$", re.MULTILINE)
_FAILED = regex(
    r"\b(?:error|failed|failure|fatal|denied|refused|cannot|not found|no such)\b[^\n]*", re.IGNORECASE
)
_CHANGED = regex(
    r"(?:^|[.!?]\s+)(?:no, |actually,? |wait,? |instead,? |scratch that|never ?mind)"
    r"|\b(?:forget (?:that|it|about)|instead of that|changed my mind|no longer (?:need|want))\b",
    re.IGNORECASE,
)
_SENTENCES = regex(r"(?<=[.!?])\s+|\n+")
_HEADER = regex(r"\[refold (?:#\d+ )?(?:summary|segment|era): [^\n\]]*\](?:\n|$)")
_REQUEST = regex(r"#(\d+) \((\w+)\) (.*)$")
_FILE = regex(r"[\w-]+\.[a-z]{1,4}")
_FENCE = regex(r"<(/?)record")
_ENTRY = regex(r"^- (.*)$")
_KEYED = regex(r"([A-Za-z_][\w.-]*)=(.+)$")


class Entry(NamedTuple):
    section: str
    text: str
    worth: float


class Extract(msgspec.Struct, frozen=True):
    """What a summary may have in it; how much of it there is in the end is a matter of room."""

    entries: tuple[Entry, ...]

    def text(self, header: str, chars: int, fits: Callable[[str], bool]) -> str:
        """As many entries as fit, the most valuable first; `chars` is a guess at how much that is."""
        ranked = sorted(range(len(self.entries)), key=lambda n: -self.entries[n].worth)

        def of(most: int) -> str:
            return _render(header, [self.entries[n] for n in sorted(ranked[:most])])

        # by measure first, since a long text is costly to put together and to count
        sizes = accumulate((len(self.entries[n].text) + 2 for n in ranked), initial=len(header))
        most = sum(size < chars for size in sizes)
        step = max(1, len(ranked) // 16)
        while most < len(ranked) and fits(of(most + step)):
            most += step
        while most > 0 and not fits(of(most)):
            most -= max(1, most // 12)
        return of(most)


def _render(header: str, entries: Sequence[Entry]) -> str:
    if not entries:
        return header
    parts = [header, OPEN]
    for section, title in SECTIONS.items():
        texts = [entry.text for entry in entries if entry.section == section]
        if texts and section == "values":
            parts += [f"{title}:", _grouped(texts)]
        elif texts and section == "calls":
            parts += [f"{title}:", *_by_tool(texts)]
        elif texts and section == "files":
            parts += [f"{title}:", " ".join(texts)]
        elif texts:
            parts += [f"{title}:", *(f"- {text}" for text in texts)]
    return "\n".join([*parts, CLOSE])


def _grouped(texts: Sequence[str]) -> str:
    """Values of one key together behind it, and those without a key at the end."""
    keys = dict[str, list[str]]()
    for text in texts:
        key, value = _pair(text)
        keys.setdefault(key, []).append(value)
    bare = keys.pop("", [])
    lines = [f"{key}={DOT.join(values)}" for key, values in keys.items()]
    lines += [f"{DOT.lstrip()}{value}" for value in bare if " " in value]
    plain = " ".join(value for value in bare if " " not in value)
    return "\n".join([*lines, plain] if plain else lines)


def _by_tool(texts: Sequence[str]) -> Iterator[str]:
    tools = dict[str, list[str]]()
    for text in texts:
        tool, _, given = text.partition(": ")
        tools.setdefault(tool, []).append(given)
    return (f"- {tool}: {BETWEEN.join(given)}" for tool, given in tools.items())


def _pair(text: str) -> tuple[str, str]:
    found = _KEYED.match(text)
    return (found[1], found[2]) if found else ("", text)


def is_summary(text: str) -> bool:
    """It was made here, by the looks of it."""
    return _HEADER.match(text) is not None and text.endswith(("]", CLOSE))


def read(text: str) -> list[Entry]:
    """The entries of a summary that was made before, a little less worth than new ones."""
    body = text.partition(OPEN)[2].partition(CLOSE)[0]
    titles = {f"{title}:": section for section, title in SECTIONS.items()}
    section, entries = "", list[Entry]()
    for line in body.split("\n"):
        if line in titles:
            section = titles[line]
        elif section == "values":
            key, values = _pair(line)
            several = line.removeprefix(DOT.lstrip())
            words_only = [several] if several != line else line.split(" ")
            found = [f"{key}={value}" for value in values.split(DOT)] if key else words_only
            entries += [Entry(section, one, _value(one) - n / 400) for n, one in enumerate(found) if one]
        elif section == "files":
            entries += [Entry(section, one, WORTH[section] - 1.0) for one in line.split(" ") if one]
        elif section and (listed := _ENTRY.match(line)):
            tool, _, given = listed[1].partition(": ")
            many = [f"{tool}: {one}" for one in given.split(BETWEEN)] if section == "calls" else [listed[1]]
            entries += [Entry(section, one, WORTH[section] - 1.0) for one in many]
    return entries


WORTH = {"requests": 6.0, "rules": 4.5, "calls": 3.2, "files": 3.0, "errors": 3.6, "values": 0.0}


def extract(
    said: Sequence[tuple[Line, Message]], active: int | None, elsewhere: set[str], task: int | None = None
) -> Extract:
    """From messages and summaries in their order.

    `active` is the place of the request that is being worked on; what stands `elsewhere` in the view anyway
    need not be repeated, and the `task` is named only: it is in every view as it was said.
    """
    entries = list[Entry]()
    if task is not None:
        state = "active" if task == active else "open"
        entries.append(Entry("requests", f"#{task} ({state}) {TASK}", WORTH["requests"]))
    size = max(1, len(said))
    most = max(LEAST_VALUES, MOST_VALUES // size)
    for n, (line, message) in enumerate(said):
        fresh = n / size  # the newer the better
        text = all_text(message)
        if line.summary:
            answered = any(m.role == "assistant" and not m.calls for _, m in islice(said, n + 1, None))
            known = [entry for entry in read(text) if not entry.text.endswith(TASK)]
            entries += [_renewed(entry, active, answered) for entry in known]
            continue
        later = (other for _, other in islice(said, n + 1, None))
        if line.role == "user" and not line.tools:
            entries.append(_request(line, message, later, active, fresh))
            entries += _rules(message.text, True, fresh, REQUEST)  # what is before that is in the request
        if line.role == "assistant":
            entries += [entry for call in message.calls for entry in _call(call, fresh)]
            entries += _rules(message.text, False, fresh)
        if line.answers is not None:
            entries += _errors(line, message, later)
        entries += _values(message, line, fresh, most)
    return Extract(tuple(_once(entries, elsewhere)))


def _request(
    line: Line, message: Message, later: Iterable[Message], active: int | None, fresh: float
) -> Entry:
    state = "active" if line.at == active else "open"
    for other in later:  # up to the next request
        if other.role == "assistant" and not other.calls and state == "open":
            state = "done"
        elif other.role == "user":
            state = "superseded" if _CHANGED.search(other.text) else state
            break
    return Entry(
        "requests", f"#{line.at} ({state}) {_short(message.text, REQUEST)}", WORTH["requests"] + fresh
    )


def _renewed(entry: Entry, active: int | None, answered: bool) -> Entry:
    """A request from an earlier summary, in the state it has now."""
    found = _REQUEST.match(entry.text) if entry.section == "requests" else None
    if found is None or found[2] not in ("open", "active"):
        return entry
    state = "active" if int(found[1]) == active else "done" if answered else "open"
    return entry._replace(text=f"#{found[1]} ({state}) {found[3]}")


def _call(call: ToolCall, fresh: float) -> Iterator[Entry]:
    given = _short(outline(call.input).cut(CALL) or call.input, CALL).replace(BETWEEN, " ")
    yield Entry("calls", f"{call.tool.replace(': ', ' ')}: {given}", WORTH["calls"] + fresh)
    for word in words(call.input):
        if ("/" in word or _FILE.fullmatch(word)) and worth(word) >= NAMED and len(word) < CALL:
            yield Entry("files", word, WORTH["files"] + fresh)


def _rules(text: str, by_user: bool, fresh: float, start: int = 0) -> Iterator[Entry]:
    """Sentences that demand something or decide it; of those that end after a number of characters."""
    read = 0
    for sentence in _SENTENCES.split(text[:20_000]):
        read += len(sentence) + 1
        if read > start and len(sentence) > 12 and _RULE.search(sentence):
            yield Entry(
                "rules", _short(sentence, SENTENCE), WORTH["rules"] + fresh + (1.0 if by_user else -1.0)
            )


def _errors(line: Line, message: Message, later: Iterable[Message]) -> Iterator[Entry]:
    text = message.text
    thrown = _THROWN.search(text)
    found = thrown or _FAILED.search(text[:20_000])
    told = any(result.is_error for result in message.results) or (found and found.start() < EARLY)
    if not told and not thrown:
        return
    next_call = next((call for other in later for call in other.calls), None)
    then = f" → {next_call.tool} {_short(next_call.input, 60)}" if next_call else ""
    tool = line.tools[0] if line.tools else "tool"
    what = found.group() if found and len(text) > ERROR else text
    yield Entry("errors", f"{tool}: {_short(what, ERROR)}{then}", WORTH["errors"])


def _values(message: Message, line: Line, fresh: float, most: int) -> Iterator[Entry]:
    """The exact words of a message, as many as there are to be of each; its lines have no others."""
    more = {"user": 1.5, "assistant": 1.0}.get(line.role, 0.0) + fresh
    for text in (message.text, *(call.input for call in message.calls)):
        found = reread(text.partition("\n")[2]) if text.startswith("[refold ") else outline(text)
        pieces = [piece for piece in found.pieces if not piece.is_line and len(piece.text) <= 2 * LONG]
        if len(pieces) > most:
            best = sorted(range(len(pieces)), key=lambda n: -pieces[n].rank)[:most]
            pieces = [pieces[n] for n in sorted(best)]
        for value, rank, key, _ in pieces:
            if "\n" not in value:
                yield Entry("values", f"{key}={value}" if key else value, min(rank, 4.0) + more)


def _value(text: str) -> float:
    return max((worth(word) for word in words(_pair(text)[1])), default=0.0) + 1.0


def _once(entries: Iterable[Entry], elsewhere: set[str]) -> Iterator[Entry]:
    """Each thing once, with what it is worth most, where it was said first."""
    found = dict[tuple[str, str], Entry]()
    times = Counter[tuple[str, str]]()
    for entry in entries:
        key = (entry.section, _pair(entry.text)[1] if entry.section == "values" else entry.text)
        times[key] += 1
        old = found.get(key)
        if old is None or entry.worth > old.worth:
            has_key = old is not None and _pair(old.text)[0]  # a value keeps its key, if it had one
            found[key] = entry._replace(text=old.text) if old is not None and has_key else entry
    for key, (section, text, value) in found.items():
        if section == "values" and (key[1] in elsewhere or value < LEAST):
            continue
        rank = value + min(0.9, 0.3 * (times[key] - 1)) - len(text) / 80
        yield Entry(section, _tame(text), rank)


def _tame(text: str) -> str:
    """Somebody else's words in our record: they open no handle and do not end it."""
    if "[refold " not in text and "record" not in text:
        return text
    return _FENCE.sub(r"‹\1record", quoted(text))


def _short(text: str, chars: int) -> str:
    """On one line."""
    flat = " ".join(text.split())
    return clip(flat, chars)


def summary(
    said: Sequence[tuple[Line, Message]],
    *,
    header: Callable[[str], str],
    active: int | None,
    elsewhere: set[str],
    tokens: int,
    count: Count,
    task: int | None = None,
) -> Message:
    """Of at most so many tokens; `header` makes its first line from how much is shown."""

    def message(text: str) -> Message:
        return Message("user", (Text(text),), summary=True)

    def fits(text: str) -> bool:
        return count(message(text)) <= tokens

    text = extract(said, active, elsewhere, task).text(header("0,000 shown"), int(tokens * DENSE), fits)
    shown = count(message(text.replace("0,000 shown", f"{count(message(text)):,} shown", 1)))
    return message(text.replace("0,000 shown", f"{shown:,} shown", 1))
