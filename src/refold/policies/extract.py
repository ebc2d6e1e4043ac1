"""Summaries by rule, without a model: requests, rules, tool calls, errors and exact values.

They are extracted from the messages that the summary covers, and from earlier summaries.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain, islice

import msgspec

from refold.core.event import Line
from refold.core.lazy import regex
from refold.core.message import Message, Text, ToolCall
from refold.core.plan import Count
from refold.policies.outline import DENSE, LONG, outline, outline_of_skeleton
from refold.policies.sections import (
    CALL_SEPARATOR,
    OLDER,
    PROSE,
    SECTION_SCORES,
    SummaryEntry,
    narrative_entries,
    pair,
    quote_line,
    read,
    render,
)
from refold.policies.text import (
    RULE_CHARS,
    SENTENCE_CHARS,
    SENTENCES,
    clip,
    demands,
    exactness,
    is_demand,
    vocabulary,
    words,
)

REQUEST_CHARS = 400
CALL_CHARS = 100
ERROR_CHARS = 240
DONE_REQUEST_CHARS = 120
DONE_REQUEST_SCORE = 3.4
TASK = "the task, which stands above as it was said"
MIN_PATH_SCORE = 1.6
MIN_VALUE_SCORE = 1.2
MAX_VALUES = 12_000
"""Values of all messages together that are considered."""
MIN_VALUES = 80
"""Values of each message that are considered at least."""
ERROR_WITHIN = 200
"""A result that is an error says so within its first characters."""
SAME_STATEMENT = 0.6
"""The share of an earlier statement's words that a newer text has if it says the same."""
FOCUS_SCORE = 2.0
"""Added for an entry about the focus."""
TEMPORARY = ("state", "pending", "next")
"""Sections that hold only at the time they are written."""
EARLIER = "earlier: "
_DECISION = regex(
    r"\b(?:decided|decision|instead of|rather than|agreed|will use|chose|rejected|ruled out)\b", re.IGNORECASE
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
_REQUEST = regex(r"#(\d+) \((\w+)\) (.*)$")
_FILE = regex(r"[\w-]+\.[a-z]{1,4}")


class Written(msgspec.Struct, frozen=True):
    """What a model wrote, without the sentences that were struck."""

    entries: tuple[SummaryEntry, ...] = ()
    states: Mapping[int, str] = {}
    """States of requests, by place."""


NOTHING = Written()


def extract(
    said: Sequence[tuple[Line, Message]],
    active: int | None,
    elsewhere: set[str],
    task: int | None = None,
    written: Written = NOTHING,
    focus: Set[str] = frozenset(),
    following: Sequence[tuple[Line, Message]] = (),
) -> tuple[SummaryEntry, ...]:
    """The entries from messages and earlier summaries in their order, and from what a model has `written`.

    `active` is the place of the current request. Values that are `elsewhere` in the view are not repeated,
    and the `task` is only named, since every view shows it. Entries with a word of the `focus` score higher.
    Messages `following` the covered ones may answer the last request.
    """
    entries = list(written.entries)
    told = vocabulary("\n".join(entry.text for entry in entries))
    if task is not None:
        state = "active" if task == active else written.states.get(task) or _known_state(task, said)
        entries.append(SummaryEntry("requests", f"#{task} ({state}) {TASK}", SECTION_SCORES["requests"]))
    size = max(1, len(said))
    most = max(MIN_VALUES, MAX_VALUES // size)
    for n, (line, message) in enumerate(said):
        fresh = n / size  # the newer the better
        later = [*islice(said, n + 1, None), *following]
        if message.summaries:
            earlier = read(message.text)
            if message.markers:  # a provider's summary has no sections
                earlier = narrative_entries(message.summaries.split("\n"))
            known = [entry for entry in earlier if not entry.text.endswith(TASK)]
            entries += _updated_entries(known, later, active, written.states)
            if told:  # a newer narrative takes the place of the older one, but may lack its values
                narrative = "\n".join(entry.text for entry in known if entry.section == "narrative")
                entries += _values(Message("assistant", (Text(narrative),)), line, fresh, most)
        if line.summary:
            continue
        if (line.asks or line.role == "system") and not line.tools:
            entries += _request_and_rules(line, message, later, active, fresh, written.states)
        if line.role == "assistant":
            entries += [entry for call in message.calls for entry in _call(call, fresh)]
            entries += _decisions(message.text, fresh)
        if line.answers is not None:
            entries += _errors(line, message, later)
        entries += _values(message, line, fresh, most)
    if told:
        entries = [entry for entry in entries if entry in written.entries or not _is_replaced(entry, told)]
    return tuple(_without_duplicates(entries, elsewhere | told, focus))


def _known_state(task: int, said: Sequence[tuple[Line, Message]]) -> str:
    """The state of the task in the newest summary."""
    known = "".join(message.text for line, message in reversed(said) if line.summary)
    found = re.search(rf"^- #{task} \((\w+)\) {re.escape(TASK)}", known, re.MULTILINE)
    return found[1] if found and found[1] != "active" else "open"


def _is_replaced(entry: SummaryEntry, told: set[str]) -> bool:
    """True if a newer text replaces the entry."""
    if entry.section in ("done", "decisions"):
        own = [word for word in words(entry.text) if len(word) > 3]
        return sum(word in told for word in own) >= SAME_STATEMENT * len(own)
    if entry.section == "files":
        return entry.text in told
    return entry.section in (*TEMPORARY, "notes", "narrative")


def _request_and_rules(
    line: Line,
    message: Message,
    later: Sequence[tuple[Line, Message]],
    active: int | None,
    fresh: float,
    states: Mapping[int, str],
) -> Iterator[SummaryEntry]:
    """A request and its state, and its rules, word for word."""
    shown = list[str]()
    if line.role == "user":
        known = _state(later)
        state = "active" if line.at == active else known if known != "open" else states.get(line.at, known)
        text = _short(message.text, REQUEST_CHARS)
        yield _request(line.at, state, text, fresh)
        shown = [*demands(text)]
    for rule in demands(message.text):
        if not any(rule in one for one in shown):
            yield SummaryEntry(
                "rules", clip(rule, RULE_CHARS), SECTION_SCORES["rules"] + fresh + 1.0, must=True
            )


def _request(at: int, state: str, text: str, fresh: float) -> SummaryEntry:
    """A request that is done or superseded is shortened and scores lower, unless it has a rule in it."""
    must = any(demands(text))
    is_over = state in ("done", "superseded")
    text = clip(text, DONE_REQUEST_CHARS) if is_over and not must else text
    score = (DONE_REQUEST_SCORE if is_over else SECTION_SCORES["requests"]) + fresh
    return SummaryEntry("requests", f"#{at} ({state}) {text}", score, must)


def _state(later: Iterable[tuple[Line, Message]]) -> str:
    """The state of a request, by the messages up to the next request."""
    state = "open"
    for line, other in later:
        if line.retry:  # the message before it was no answer
            state = "open"
        elif other.role == "assistant" and not other.calls and state == "open":
            state = "done"
        elif other.role == "user" and not line.wordless:
            return "superseded" if _CHANGED.search(other.text) else state
    return state


def _updated_entries(
    known: Iterable[SummaryEntry],
    later: Sequence[tuple[Line, Message]],
    active: int | None,
    states: Mapping[int, str],
) -> Iterator[SummaryEntry]:
    """The entries of an earlier summary, with their present states."""
    known = list(known)
    places = [int(at[1]) for at in map(_REQUEST.match, (entry.text for entry in known)) if at]
    newest = max(places, default=None) if _state(later) == "done" else None  # answered since
    for entry in known:
        found = _REQUEST.match(entry.text) if entry.section == "requests" else None
        if found is not None:
            at, state = int(found[1]), found[2]
            now = "active" if at == active else "done" if at == newest else states.get(at, "open")
            yield _request(at, now if state in ("open", "active") else state, found[3], -OLDER)
        elif entry.section in TEMPORARY and later:
            text = f"{EARLIER}{entry.text.removeprefix(EARLIER)}"
            yield entry._replace(section="notes", text=text, score=SECTION_SCORES["notes"])
        else:
            yield entry._replace(must=entry.section == "rules")


def _call(call: ToolCall, fresh: float) -> Iterator[SummaryEntry]:
    given = _short(outline(call.input).cut(CALL_CHARS) or call.input, CALL_CHARS).replace(CALL_SEPARATOR, " ")
    yield SummaryEntry("calls", f"{call.tool.replace(': ', ' ')}: {given}", SECTION_SCORES["calls"] + fresh)
    for word in words(call.input):
        if (
            ("/" in word or _FILE.fullmatch(word))
            and exactness(word) >= MIN_PATH_SCORE
            and len(word) < CALL_CHARS
        ):
            yield SummaryEntry("files", word, SECTION_SCORES["files"] + fresh)


def _decisions(text: str, fresh: float) -> Iterator[SummaryEntry]:
    """Sentences of the agent that state a decision."""
    for sentence in chain.from_iterable(map(SENTENCES.split, text[:20_000].split("\n"))):
        if len(sentence) > 12 and (_DECISION.search(sentence) or is_demand(sentence)):
            yield SummaryEntry(
                "decisions", _short(sentence, SENTENCE_CHARS), SECTION_SCORES["decisions"] + fresh - 1.0
            )


def _errors(line: Line, message: Message, later: Iterable[tuple[Line, Message]]) -> Iterator[SummaryEntry]:
    text = message.text
    thrown = _THROWN.search(text)
    found = thrown or _FAILED.search(text[:20_000])
    told = any(result.is_error for result in message.results) or (found and found.start() < ERROR_WITHIN)
    if not told and not thrown:
        return
    next_call = next((call for _, other in later for call in other.calls), None)
    then = f" → {next_call.tool} {_short(next_call.input, 60)}" if next_call else ""
    tool = line.tools[0] if line.tools else "tool"
    what = found.group() if found and len(text) > ERROR_CHARS else text
    yield SummaryEntry("errors", f"{tool}: {_short(what, ERROR_CHARS)}{then}", SECTION_SCORES["errors"])


def _values(message: Message, line: Line, fresh: float, most: int) -> Iterator[SummaryEntry]:
    """The exact values of a message, at most `most` of each text."""
    more = {"user": 1.5, "assistant": 1.0}.get(line.role, 0.0) + fresh
    for text in (message.text, *(call.input for call in message.calls)):
        found = outline_of_skeleton(text.partition("\n")[2]) if text.startswith("[refold ") else outline(text)
        pieces = [piece for piece in found.pieces if not piece.is_line and len(piece.text) <= 2 * LONG]
        if len(pieces) > most:
            best = sorted(range(len(pieces)), key=lambda n: -pieces[n].rank)[:most]
            pieces = [pieces[n] for n in sorted(best)]
        for value, rank, key, _ in pieces:
            if "\n" not in value:
                yield SummaryEntry("values", f"{key}={value}" if key else value, min(rank, 4.0) + more)


def _without_duplicates(
    entries: Iterable[SummaryEntry], elsewhere: set[str], focus: Set[str]
) -> Iterator[SummaryEntry]:
    """Each entry once, with its highest score, at its first position."""
    found = dict[tuple[str, str], SummaryEntry]()
    times = Counter[tuple[str, str]]()
    for entry in entries:
        if entry.section == "narrative":  # unchanged, with its blank lines
            yield entry._replace(text=quote_line(entry.text))
            continue
        key = (entry.section, pair(entry.text)[1] if entry.section == "values" else entry.text)
        times[key] += 1
        old = found.get(key)
        if old is None or entry.score > old.score:
            has_key = old is not None and pair(old.text)[0]  # a value keeps its key, if it had one
            found[key] = entry._replace(text=old.text) if old is not None and has_key else entry
    for key, (section, text, value, must) in found.items():
        if section == "values" and (key[1] in elsewhere or value < MIN_VALUE_SCORE):
            continue
        rank = value + min(0.9, 0.3 * (times[key] - 1)) - len(text) / (400 if section in PROSE else 80)
        if focus and not vocabulary(text.casefold()).isdisjoint(focus):
            rank += FOCUS_SCORE
        yield SummaryEntry(section, quote_line(text), rank, must)


def _short(text: str, chars: int) -> str:
    """The text on one line."""
    return clip(" ".join(filter(None, map(str.strip, text.split("\n")))), chars)


def _fitting(
    entries: Sequence[SummaryEntry], chars: int, fits: Callable[[Sequence[SummaryEntry]], bool], used: int
) -> list[SummaryEntry]:
    """As many entries as fit, by score; `chars` is an estimate of what fits, with `used` for the header."""
    ranked = sorted(range(len(entries)), key=lambda n: (not entries[n].must, -entries[n].score))

    def of(most: int) -> list[SummaryEntry]:
        return [entries[n] for n in sorted(ranked[:most])]

    # begin with the estimate, since rendering and counting a long text is slow
    sizes = accumulate((len(entries[n].text) + 2 for n in ranked), initial=used)
    most = max(sum(size < chars for size in sizes), sum(entry.must for entry in entries))
    step = max(1, len(ranked) // 16)
    while most < len(ranked) and fits(of(most + step)):
        most += step
    while most > 0 and not fits(of(most)):
        most -= max(1, most // 24)
    return of(most)


class Summary(msgspec.Struct, frozen=True):
    message: Message
    entries: tuple[SummaryEntry, ...]
    """What is in it."""
    left_out: int = 0
    """How many entries that must stay do not fit."""


def summary(
    said: Sequence[tuple[Line, Message]],
    *,
    header: str,
    active: int | None,
    elsewhere: set[str],
    tokens: int,
    count: Count,
    task: int | None = None,
    written: Written = NOTHING,
    at_most: int = 0,
    focus: Set[str] = frozenset(),
    later: Sequence[tuple[Line, Message]] = (),
) -> Summary:
    """A summary of at most `tokens`, or `at_most` if the entries that must stay need them.

    `header` begins the first line, which ends with how much is shown.
    """

    def message(entries: Sequence[SummaryEntry], shown: str = "0,000") -> Message:
        text = render(f"[{header}; {shown} shown]", entries)
        return Message("user", (Text(text),), summary=True)

    found = extract(said, active, elsewhere, task, written, focus, later)
    if at_most > tokens:
        least = [entry for entry in found if entry.must]
        tokens = max(tokens, min(count(message(least)), at_most))
    used = len(message(()).text)
    entries = _fitting(found, int(tokens * DENSE), lambda some: count(message(some)) <= tokens, used)
    shown = count(message(entries, f"{count(message(entries)):,}"))
    left_out = sum(entry.must for entry in found) - sum(entry.must for entry in entries)
    return Summary(message(entries, f"{shown:,}"), tuple(entries), left_out)
