"""Tools that refold offers to a model: to see again what was hidden, and to find what was said."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from refold.config.settings import AgentSettings
from refold.core.errors import CannotExpandError, NotFoundError, RefoldError, SettingError
from refold.core.event import Event, Expiry, Said
from refold.core.expiry import EXPAND, OWN_TOOLS, SEARCH, is_leased
from refold.core.message import Message, ToolCall
from refold.core.slices import Cut, Slice, item_spans, line_spans, slice_of
from refold.policies.shorten import quoted
from refold.session.expand import Source, source
from refold.stores.record import Record

SHARE = 1 / 8
"""Of the window, that one answer may take where no limit is set."""
IN_A_STEP, AT_ONCE = 2, 4
"""How many answers of full length there may be in one step, and how many may be shown at the same time."""
LEAST = 48
"""Tokens below which an answer says nothing."""
PATIENCE = 2
"""How often the same impossible request is explained."""
LONGEST = 3
"""How often a lease is doubled for what is asked for again and again."""
HITS, MOST_HITS = 5, 20
MOST = 1 / 4
"""Of the window, that an answer may take whatever is set."""
KEY = 2_000
"""Characters by which a request is known again."""
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
    """The tools as a dialect has them."""
    found = list[dict[str, Any]]()
    for name in names:
        about, fields = _TOOLS[name]
        schema = {"type": "object", "properties": fields, "required": _REQUIRED[name]}
        match dialect:
            case "anthropic":
                found.append({"name": name, "description": about, "input_schema": schema})
            case "openai-responses":
                strict = {"parameters": schema, "strict": False}  # or all that is optional would be required
                found.append({"type": "function", "name": name, "description": about, **strict})
            case "ai-sdk":
                found.append({"type": "function", "name": name, "description": about, "inputSchema": schema})
            case _:
                inner = {"name": name, "description": about, "parameters": schema}
                found.append({"type": "function", "function": inner})
    return found


class ToolAnswer(msgspec.Struct, frozen=True):
    """An answer to a model, and what was expanded for it."""

    text: str
    at: int | None = None
    reason: str = ""


class Toolbox:
    """Of one session: it remembers what was asked in vain, and what is asked for again and again."""

    def __init__(self, record: Record, settings: AgentSettings) -> None:
        self.record, self.settings = record, settings
        self._in_vain, self._again = Counter[str](), Counter[tuple[int, Slice]]()
        self._answered = (0, 0)
        """The newest step in which there were answers, and their tokens."""

    def call(
        self,
        name: str,
        arguments: Any,
        lock: AbstractContextManager[object],
        window: int,
        count: Callable[[str], int],
        search: Callable[[str, int], str],
    ) -> ToolAnswer:
        """What a tool answers. Whatever a model wrote, the answer is a text that it can act on.

        The lock is held only while the view is looked at: whatever takes long, nobody else waits for.

        Raises:
            SettingError: there is no such tool.
        """
        if not isinstance(name, str) or name not in OWN_TOOLS:
            raise SettingError(
                "name", f"{name!r} is no tool of refold's; known: {', '.join(sorted(OWN_TOOLS))}"
            )
        try:
            given = _read(name, arguments)
            if name == SEARCH:
                if not isinstance(given["query"], str):
                    raise CannotExpandError(f"query is a text, got {given['query']!r}")
                return ToolAnswer(
                    search(given["query"], min(MOST_HITS, _number("limit", given.get("limit", HITS))))
                )
            at, part = _number("at", given["at"]), slice_of(given)
            with lock:
                most, found = self._most(window), self._source(at, part)
                note = ", before it was corrected" if at in self.record.live.state.corrected else ""
            answer = ToolAnswer(within(found, part, most, count, note), at, str(given.get("reason", "")))
            self._answered = (self._answered[0], self._answered[1] + count(answer.text))
            self._in_vain.pop(_key(name, arguments), None)
            return answer
        except (RefoldError, RecursionError, ValueError, TypeError) as error:
            return ToolAnswer(self._refused(_key(name, arguments), error))

    def _most(self, window: int) -> int:
        """Tokens that an answer may take now."""
        most = min(self.settings.expand.max_tokens or int(SHARE * window), int(MOST * window))
        live, step = self.record.live, self.record.live.state.step
        if self._answered[0] != step:
            self._answered = (step, 0)
        lines = [line for item in live.items for line in item.lines if is_leased(line, step + 1)]
        said = sum(line.tokens for line in lines if line.step == step)
        new = max(said, self._answered[1])  # of which some may not be said yet
        used = sum(line.tokens for line in lines) - said + new
        left = min(IN_A_STEP * most - new, AT_ONCE * most - used)
        if used and left < LEAST:
            raise _LaterError(
                "What was expanded before takes all the room that is set aside for it. Use it now; it is"
                f" hidden again after {self.settings.expand.lease_steps} steps, and then there is room"
            )
        return max(LEAST, min(most, left))

    def _source(self, at: int, part: Slice) -> Source:
        self._demand_hidden(at, part)
        return source(self.record, at)

    def _demand_hidden(self, at: int, part: Slice) -> None:
        """
        Raises:
            CannotExpandError: it is in sight: as it was said, or because it was expanded just now.
        """
        item = self.record.live.item_at(at)
        if item is not None and at in {line.at for line in item.lines}:
            raise _LaterError(f"#{at} is shown whole, in its own place: read it there")
        calls, step = dict[str | None, ToolCall](), self.record.live.state.step + 1
        for line, span in ((line, one.span) for one in self.record.live.items for line in one.lines):
            if EXPAND in line.tools and line.calls:
                calls |= {call.call_id: call for call in self.record.message(line).calls}
            elif (
                is_leased(line, step)
                and line.at in span
                and line.answers in calls
                and _quietly(calls[line.answers]) == (at, part)
                and _shows(self.record.message(line), at)
            ):
                raise _LaterError(f"#{at} ({part}) was expanded at #{line.at}, which is still shown")

    def _refused(self, key: str, error: Exception) -> str:
        """A sentence the first times; then one that ends the matter, unless it is a matter of time."""
        self._in_vain[key] += not isinstance(error, _LaterError)
        if self._in_vain[key] > PATIENCE:
            return "As before: this cannot be had, and asking again changes nothing. Go on without it."
        return f"{str(error)[:1_000]}."

    def leased(self, events: Sequence[Event]) -> Sequence[Event]:
        """What is about to be said: answers of these tools are shown for a few steps only.

        What is expanded again and again stays longer each time.
        """
        if not any(isinstance(event, Said) and event.line.answers and _is_own(event) for event in events):
            return events
        calls = {call.call_id: call for e in events if isinstance(e, Said) for call in e.message.calls}
        return [self._lease(event, calls) if isinstance(event, Said) else event for event in events]

    def _lease(self, said: Said, calls: Mapping[str, ToolCall]) -> Said:
        line = said.line
        if line.answers is None or not _is_own(said) or line.expiry is not None:
            return said
        steps, call = self.settings.expand.lease_steps, calls.get(line.answers) or self._call(line.answers)
        asked = _quietly(call) if call is not None and call.tool == EXPAND else None
        if asked is not None and _shows(said.message, asked[0]):
            steps *= 2 ** min(LONGEST, self._again[asked])
            self._again[asked] += 1
        line = msgspec.structs.replace(line, expiry=Expiry(after_steps=steps, mode="remove"))
        return msgspec.structs.replace(said, line=line)

    def _call(self, id: str) -> ToolCall | None:
        at, _ = self.record.live.state.open.get(id, (None, ""))
        event = self.record.event(at) if at is not None else None
        calls = event.message.calls if isinstance(event, Said) else ()
        return next((call for call in calls if call.call_id == id), None)


class _LaterError(CannotExpandError):
    """It cannot be had now."""


def _key(name: str, arguments: Any) -> str:
    """The same for the same request, whatever reason it has."""
    try:
        given = msgspec.json.decode(arguments) if isinstance(arguments, str | bytes) else arguments
        same = {key: given[key] for key in sorted(given) if key != "reason"}
        return f"{name} {same!r}"[:KEY]
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError, LookupError):
        return f"{name} {type(arguments).__name__} {arguments if isinstance(arguments, str) else ''}"[:KEY]


def _shows(message: Message, at: int) -> bool:
    """It is what was expanded, and no refusal."""
    return message.text.startswith(f"[refold #{at} ")


def _is_own(said: Said) -> bool:
    return any(tool in OWN_TOOLS for tool in said.line.tools)


def _read(name: str, arguments: Any) -> Mapping[str, Any]:
    """
    Raises:
        CannotExpandError: they are no arguments of the tool.
    """
    if isinstance(arguments, str | bytes):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError) as error:
            raise CannotExpandError(f"The arguments are no JSON: {error}") from error
    known = _TOOLS[name][1]
    if not isinstance(arguments, Mapping):
        raise CannotExpandError(f"The arguments are an object with {', '.join(known)}")
    given = {key: value for key, value in arguments.items() if value is not None and value != ""}
    unknown = [str(key) for key in given if key not in known]
    missing = [key for key in _REQUIRED[name] if key not in given]
    if unknown or missing:
        problem = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]!r} is missing"
        raise CannotExpandError(f"{problem}; the arguments are {', '.join(known)}")
    return given


def _number(name: str, value: Any) -> int:
    text = value.strip().lstrip("#") if isinstance(value, str) else ""
    if text.isascii() and text.isdecimal() and len(text) < 16:
        return int(text)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**53:
        raise CannotExpandError(f"{name} is a whole number, 0 or more; got {value!r}")
    return int(value)


def _quietly(call: ToolCall) -> tuple[int, Slice] | None:
    """What a call asks for, if it can be read at all."""
    try:
        given = _read(EXPAND, call.input)
        return _number("at", given["at"]), slice_of(given)
    except (NotFoundError, RecursionError):
        return None


def within(found: Source, part: Slice, most: int, count: Callable[[str], int], note: str) -> str:
    """A part as far as there is room for it, and how to get the rest."""
    end = None
    if not found.is_one and part.way in ("", "lines"):  # a line has at least one token
        start, last = part.range if part.way else (1, None)
        end = start + most if last is None or last > start + most else None
        part = Slice("lines", (start, end or last))
    cut = found.cut(part)
    if end is not None and len(line_spans(cut.text)) > most:
        cut = msgspec.structs.replace(cut, label=f"{cut.label}; go on with lines {end + 1}-")

    def told(shown: str, label: str) -> str:
        return f"[refold #{found.at} {found.name}{note}: {label}]\n{quoted(shown)}"

    whole = told(cut.shown, cut.label)
    tokens = count(whole)
    if tokens <= most:
        return whole
    share = min(1.0, most / max(1, tokens))
    while share > 0.001:
        answer = told(*_first(cut, part, share))
        if count(answer) <= most:
            return answer
        share *= 0.85
    raise CannotExpandError(f"#{found.at}: there is room for {most:,} tokens only; ask again in a few steps")


def _first(cut: Cut, part: Slice, share: float) -> tuple[str, str]:
    """The first share of a part, in whole lines, items or matches if it can be, and what it is."""
    way, units, first, of = _units(cut, part)
    many = int(len(units) * share)
    start = cut.spans[0][0]
    if many and way == "match":
        shown = "\n".join(cut.text[start:end] for start, end in units[:many])
        return shown, f"{cut.label}; the first {many} of {len(units)} stretches"
    if many:
        last = first + many - 1
        known = f" of {of}" if cut.first is None else ""
        return cut.text[
            start : units[many - 1][1]
        ], f"{way} {first}-{last}{known}; go on with {way} {last + 1}-"
    end = start + max(1, int(sum(end - start for start, end in cut.spans) * share))
    return cut.text[start:end], f"chars {start}-{end} of {len(cut.text)}; go on with chars {end}-"


def _units(cut: Cut, part: Slice) -> tuple[str, Sequence[tuple[int, int]], int, int]:
    """What a part can be taken apart into, the number of the first, and how many there are in all."""
    if part.way == "match":
        return "match", cut.spans, 1, len(cut.spans)
    lines = line_spans(cut.text)
    way = part.way or ("lines" if len(lines) > 1 else "items")
    spans = lines if way == "lines" else item_spans(cut.text) if way == "items" else []
    start, end = cut.spans[0]
    inside = [n for n, span in enumerate(spans, 1) if start <= span[0] and span[1] <= end]
    first = (inside[0] if inside else 1) + (cut.first or 1) - 1
    return way, [spans[n - 1] for n in inside], first, len(spans)
