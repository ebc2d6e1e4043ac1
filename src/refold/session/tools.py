"""The tools that refold offers to a model: expand what was hidden, and search the conversation."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from refold.core.errors import CannotExpandError, NotFoundError, RefoldError, SettingError
from refold.core.event import Event, Expiry, Said
from refold.core.expiry import EXPAND, OWN_TOOLS, SEARCH, is_leased
from refold.core.message import Message, ToolCall
from refold.core.slices import Cut, Slice, item_spans, line_spans, slice_of
from refold.dialects.registry import DIALECTS
from refold.policies.shorten import quoted
from refold.session.conversation import Conversation
from refold.session.expand import Source, source

DEFAULT_SHARE = 1 / 8
"""Of the window, for one answer, unless `expand.max_tokens` is set."""
MAX_SHARE = 1 / 4
"""Of the window, for one answer, whatever is set."""
ANSWERS_PER_STEP = 2
"""Of full length."""
ANSWERS_SHOWN = 4
"""Of full length, at the same time."""
MIN_TOKENS = 48
"""An answer with fewer tokens would say nothing."""
MAX_EXPLANATIONS = 2
"""Of the same impossible request."""
MAX_DOUBLINGS = 3
"""Of the lease of what is expanded again and again."""
MAX_KEY_CHARS = 2_000
DEFAULT_HITS = 5
MAX_HITS = 20
_PART = {"type": "string"}
_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    EXPAND: (
        "Shows again what a [refold #N …] line stands for: all of it, or one part.",
        {
            "at": {"type": "integer", "description": "The N of #N"},
            "lines": {**_PART, "description": "Such as 40-50"},
            "items": {**_PART, "description": "Of a list or table, such as 1-5"},
            "chars": {**_PART, "description": "Such as 0-2000"},
            "match": {**_PART, "description": "Lines with a text, or /regex/"},
            "reason": _PART,
        },
    ),
    SEARCH: (
        "Finds what was said earlier in this conversation, also what is no longer shown.",
        {
            "query": {**_PART, "description": 'Words, "a phrase", prefix*, tool:name, role:user'},
            "limit": {"type": "integer"},
        },
    ),
}
_REQUIRED = {EXPAND: ["at"], SEARCH: ["query"]}


def declared(dialect: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """Tool declarations in a dialect."""
    declare = DIALECTS[dialect].declare_tool
    found: list[dict[str, Any]] = []
    for name in names:
        about, fields = _TOOLS[name]
        schema = {"type": "object", "properties": fields, "required": _REQUIRED[name]}
        found.append(declare(name, about, schema))
    return found


class ToolAnswer(msgspec.Struct, frozen=True):
    """The answer to a tool call, and the place that it expands."""

    text: str
    at: int | None = None
    reason: str = ""


class Toolbox:
    """Runs the tools of one session."""

    def __init__(self, chat: Conversation) -> None:
        self.chat = chat
        self.record = chat.record
        self.settings = chat.settings.expand
        self._failures = Counter[str]()
        """How often each impossible request was made, whatever its reason."""
        self._expansions = Counter[tuple[int, Slice]]()
        self._answered_step = 0
        self._answered_tokens = 0
        """Of the answers in that step."""

    def call(self, name: str, arguments: Any, search: Callable[[str, int], str]) -> ToolAnswer:
        """Runs a tool. Whatever the model wrote as arguments, the answer is a text that it can act on.

        The lock is held only while the view is read, not during work that may take long.

        Raises:
            SettingError: there is no such tool.
        """
        if not isinstance(name, str) or name not in OWN_TOOLS:
            raise SettingError(
                "name", f"{name!r} is not a refold tool; known: {', '.join(sorted(OWN_TOOLS))}"
            )
        key = ""
        try:
            given = _read_arguments(name, arguments)
            request = {field: given[field] for field in _TOOLS[name][1] if field in given}
            request.pop("reason", None)
            key = f"{name} {request!r}"[:MAX_KEY_CHARS]
            if name == SEARCH:
                if not isinstance(given["query"], str):
                    raise CannotExpandError(f"query: expected a text, got {given['query']!r}")
                limit = _number("limit", given.get("limit", DEFAULT_HITS))
                return ToolAnswer(search(given["query"], min(MAX_HITS, limit)))
            at = _number("at", given["at"])
            part = slice_of(given)
            count = self.chat.meter.counter.counter.text
            with self.chat.lock:
                max_tokens = self._available_tokens(self.chat.meter.limits.window)
                self._check_hidden(at, part)
                found = source(self.record, at)
                note = ", before it was corrected" if at in self.record.live.state.corrected else ""
            text = within(found, part, max_tokens, count, note)
            self._answered_tokens += count(text)
            self._failures.pop(key, None)
            return ToolAnswer(text, at, str(given.get("reason", "")))
        except (RefoldError, RecursionError, ValueError, TypeError) as error:
            return ToolAnswer(self._refusal(key or str(error)[:MAX_KEY_CHARS], error))

    def _available_tokens(self, window: int) -> int:
        """How many tokens an answer may have now.

        Raises:
            CannotExpandError: earlier answers take all of them.
        """
        limit = self.settings.max_tokens or int(DEFAULT_SHARE * window)
        limit = min(limit, int(MAX_SHARE * window))
        step = self.record.live.state.step
        if self._answered_step != step:
            self._answered_step = step
            self._answered_tokens = 0
        recorded = 0
        earlier = 0
        for item in self.record.live.items:
            for line in item.lines:
                if is_leased(line, step + 1):
                    recorded += line.tokens if line.step == step else 0
                    earlier += line.tokens if line.step != step else 0
        new = max(recorded, self._answered_tokens)  # some answers may not be recorded yet
        used = earlier + new
        left = min(ANSWERS_PER_STEP * limit - new, ANSWERS_SHOWN * limit - used)
        if used and left < MIN_TOKENS:
            raise _NotNowError(
                "What was expanded before takes all the room that is set aside for it. Use it now; it is"
                f" hidden again after {self.settings.lease_steps} steps, and then there is room"
            )
        return max(MIN_TOKENS, min(limit, left))

    def _check_hidden(self, at: int, part: Slice) -> None:
        """
        Raises:
            CannotExpandError: the model sees it already, in its place or in an earlier answer.
        """
        item = self.record.live.item_at(at)
        if item is not None and at in {line.at for line in item.lines}:
            raise _NotNowError(f"#{at} is shown whole, in its own place: read it there")
        calls: dict[str | None, ToolCall] = {}
        step = self.record.live.state.step + 1
        for item in self.record.live.items:
            for line in item.lines:
                if EXPAND in line.tools and line.calls:
                    calls |= {call.call_id: call for call in self.record.message(line).calls}
                elif (
                    is_leased(line, step)
                    and line.at in item.span
                    and line.answers in calls
                    and _requested(calls[line.answers]) == (at, part)
                    and _is_expansion(self.record.message(line), at)
                ):
                    raise _NotNowError(f"#{at} ({part}) was expanded at #{line.at}, which is still shown")

    def _refusal(self, key: str, error: Exception) -> str:
        """What is wrong, the first times; then that asking again is of no use, unless it may be later."""
        self._failures[key] += not isinstance(error, _NotNowError)
        if self._failures[key] > MAX_EXPLANATIONS:
            return "As before: this cannot be had, and asking again changes nothing. Go on without it."
        return f"{str(error)[:1_000]}."

    def leased(self, events: Sequence[Event]) -> Sequence[Event]:
        """Makes answers of these tools expire after a few steps; longer each time for the same expansion."""
        calls: dict[str, ToolCall] = {}
        found = list[Event]()
        for event in events:
            if isinstance(event, Said):
                calls |= {call.call_id: call for call in event.message.calls}
                event = self._lease(event, calls)
            found.append(event)
        return found

    def _lease(self, said: Said, calls: Mapping[str, ToolCall]) -> Said:
        line = said.line
        if line.answers is None or line.expiry is not None or OWN_TOOLS.isdisjoint(line.tools):
            return said
        call = calls.get(line.answers)
        if call is None and line.answers in self.record.live.state.open:
            at, _ = self.record.live.state.open[line.answers]
            asking = self.record.event(at)
            if isinstance(asking, Said):
                call = next((one for one in asking.message.calls if one.call_id == line.answers), None)
        steps = self.settings.lease_steps
        requested = _requested(call) if call is not None and call.tool == EXPAND else None
        if requested is not None and _is_expansion(said.message, requested[0]):
            steps *= 2 ** min(MAX_DOUBLINGS, self._expansions[requested])
            self._expansions[requested] += 1
        line = msgspec.structs.replace(line, expiry=Expiry(after_steps=steps, mode="remove"))
        return msgspec.structs.replace(said, line=line)


class _NotNowError(CannotExpandError):
    """It cannot be expanded now, but perhaps later."""


def _is_expansion(message: Message, at: int) -> bool:
    """True for the text of a place; False for a refusal."""
    return message.text.startswith(f"[refold #{at} ")


def _read_arguments(name: str, arguments: Any) -> Mapping[str, Any]:
    """
    Raises:
        CannotExpandError: the arguments are not valid.
    """
    if isinstance(arguments, str | bytes):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError) as error:
            raise CannotExpandError(
                f"The arguments {arguments[:200]!r} are not valid JSON: {error}"
            ) from error
    known = _TOOLS[name][1]
    if not isinstance(arguments, Mapping):
        raise CannotExpandError(f"The arguments must be an object with {', '.join(known)}")
    given = {key: value for key, value in arguments.items() if value is not None and value != ""}
    unknown = [str(key) for key in given if key not in known]
    missing = [key for key in _REQUIRED[name] if key not in given]
    if unknown or missing:
        problem = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]!r} is missing"
        raise CannotExpandError(f"{problem}; the tool takes {', '.join(known)}")
    return given


def _number(name: str, value: Any) -> int:
    text = value.strip().lstrip("#") if isinstance(value, str) else ""
    if text.isascii() and text.isdecimal() and len(text) < 16:
        return int(text)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**53:
        raise CannotExpandError(f"{name}: expected a whole number, 0 or more; got {value!r}")
    return int(value)


def _requested(call: ToolCall) -> tuple[int, Slice] | None:
    """The place and part that a call asks for; None if its arguments are not valid."""
    try:
        given = _read_arguments(EXPAND, call.input)
        return _number("at", given["at"]), slice_of(given)
    except (NotFoundError, RecursionError):
        return None


def within(found: Source, part: Slice, max_tokens: int, count: Callable[[str], int], note: str) -> str:
    """As much of a part as `max_tokens` allows, and how to get the rest."""
    end = None
    if not found.is_one and part.way in ("", "lines"):
        start, last = part.range if part.way else (1, None)
        if last is None or last > start + max_tokens:  # a line has at least one token
            end = start + max_tokens
        part = Slice("lines", (start, end or last))
    cut = found.cut(part)
    if end is not None and len(line_spans(cut.text)) > max_tokens:
        cut = msgspec.structs.replace(cut, label=f"{cut.label}; go on with lines {end + 1}-")

    def answer(shown: str, label: str) -> str:
        return f"[refold #{found.at} {found.name}{note}: {label}]\n{quoted(shown)}"

    text = answer(cut.shown, cut.label)
    tokens = count(text)
    if tokens <= max_tokens:
        return text
    share = min(1.0, max_tokens / max(1, tokens))
    while share > 0.001:
        text = answer(*_first_share(cut, part, share))
        if count(text) <= max_tokens:
            return text
        share *= 0.85
    raise CannotExpandError(
        f"#{found.at}: only {max_tokens:,} tokens are available now; ask again in a few steps"
    )


def _first_share(cut: Cut, part: Slice, share: float) -> tuple[str, str]:
    """The first share of a part, if possible in whole lines, items or matches, and its label."""
    way, units, first, total = _units(cut, part)
    many = int(len(units) * share)
    start = cut.spans[0][0]
    if many and way == "match":
        shown = "\n".join(cut.text[start:end] for start, end in units[:many])
        return shown, f"{cut.label}; the first {many} of {len(units)} stretches"
    if many:
        last = first + many - 1
        known = f" of {total}" if cut.first is None else ""
        shown = cut.text[start : units[many - 1][1]]
        return shown, f"{way} {first}-{last}{known}; go on with {way} {last + 1}-"
    end = start + max(1, int(sum(end - start for start, end in cut.spans) * share))
    return cut.text[start:end], f"chars {start}-{end} of {len(cut.text)}; go on with chars {end}-"


def _units(cut: Cut, part: Slice) -> tuple[str, Sequence[tuple[int, int]], int, int]:
    """The units of a part and their kind, the number of the first, and how many there are in all."""
    if part.way == "match":
        return "match", cut.spans, 1, len(cut.spans)
    lines = line_spans(cut.text)
    way = part.way or ("lines" if len(lines) > 1 else "items")
    spans: Sequence[tuple[int, int]] = []
    if way == "lines":
        spans = lines
    elif way == "items":
        spans = item_spans(cut.text)
    start, end = cut.spans[0]
    inside = [n for n, span in enumerate(spans, 1) if start <= span[0] and span[1] <= end]
    first = (inside[0] if inside else 1) + (cut.first or 1) - 1
    return way, [spans[n - 1] for n in inside], first, len(spans)
