"""Tools that refold offers to a model: to see again what was hidden, and to find what was said."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from refold.core import codec
from refold.core.errors import CannotExpandError, NotFoundError, RefoldError, SettingError
from refold.core.event import Event, Expiry, Said
from refold.core.lease import EXPAND, OWN, SEARCH, is_leased
from refold.core.message import ToolCall
from refold.core.slices import Cut, Slice, item_spans, line_spans, slice_of
from refold.expansion import Source, source
from refold.policies.reduced import quoted
from refold.record import Record
from refold.settings import AgentSettings

SHARE = 1 / 8
"""Of the window, that one answer may take where no limit is set."""
AT_ONCE = 2
"""How many answers of full length may be shown at the same time."""
LEAST = 48
"""Tokens below which an answer says nothing."""
PATIENCE = 2
"""How often the same impossible request is explained."""
LONGEST = 3
"""How often a lease is doubled for what is asked for again and again."""
HITS, MOST_HITS = 5, 20
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
                found.append({"type": "function", "name": name, "description": about, "parameters": schema})
            case "ai-sdk":
                found.append({"type": "function", "name": name, "description": about, "inputSchema": schema})
            case _:
                inner = {"name": name, "description": about, "parameters": schema}
                found.append({"type": "function", "function": inner})
    return found


class Asked(msgspec.Struct, frozen=True):
    """An answer to a model, and what was expanded for it."""

    text: str
    at: int | None = None
    reason: str = ""


class Toolbox:
    """Of one session: it remembers what was asked in vain, and what is asked for again and again."""

    def __init__(self, record: Record, settings: AgentSettings) -> None:
        self.record, self.settings = record, settings
        self._in_vain = Counter[bytes]()
        self._again = Counter[int]()

    def call(
        self,
        name: str,
        arguments: Any,
        window: int,
        count: Callable[[str], int],
        search: Callable[[str, int], str],
    ) -> Asked:
        """What a tool answers. Whatever a model wrote, the answer is a text that it can act on.

        Raises:
            SettingError: there is no such tool.
        """
        if name not in OWN:
            raise SettingError("name", f"{name!r} is no tool of refold's; known: {', '.join(sorted(OWN))}")
        given: Mapping[str, Any] = {}
        try:
            given = _read(name, arguments)
            if name == SEARCH:
                limit = min(MOST_HITS, _whole("limit", given.get("limit", HITS)))
                return Asked(search(str(given["query"]), limit))
            most = self._most(window)
            at = _place(given["at"])
            return Asked(self._expanded(at, slice_of(given), most, count), at, str(given.get("reason", "")))
        except (RefoldError, RecursionError) as error:
            return Asked(self._refused(name, given, str(error)))

    def _most(self, window: int) -> int:
        """Tokens that an answer may take now."""
        most = self.settings.expand.max_tokens or int(SHARE * window)
        live = self.record.live
        lines = [line for item in live.items for line in item.lines if is_leased(line, live.state.step + 1)]
        left = AT_ONCE * most - sum(line.tokens for line in lines)
        if left < LEAST:
            raise CannotExpandError(
                "What was expanded before takes all the room that is set aside for it. Use it now; it is"
                f" hidden again after {self.settings.expand.lease_steps} steps, and then there is room"
            )
        return min(most, left)

    def _expanded(self, at: int, part: Slice, most: int, count: Callable[[str], int]) -> str:
        self._demand_hidden(at, part)
        found = source(self.record, at)
        if not found.is_one and part.way in ("", "lines"):  # a line has at least one token
            start, end = part.range if part.way else (1, None)
            part = Slice("lines", (start, min(end or start + most, start + most)))
        is_old = found.is_one and found.span.start in self.record.live.state.corrected
        return _within(found, part, most, count, ", before it was corrected" if is_old else "")

    def _demand_hidden(self, at: int, part: Slice) -> None:
        """
        Raises:
            CannotExpandError: it is in sight: as it was said, or because it was expanded just now.
        """
        item = self.record.live.item_at(at)
        if item is not None and at in {line.at for line in item.lines}:
            raise CannotExpandError(f"#{at} is shown whole, in its own place: read it there")
        calls, step = dict[str | None, ToolCall](), self.record.live.state.step + 1
        for line, span in ((line, one.span) for one in self.record.live.items for line in one.lines):
            if EXPAND in line.tools and line.calls:
                calls |= {call.call_id: call for call in self.record.message(line).calls}
            elif (
                is_leased(line, step)
                and line.at in span
                and line.answers in calls
                and _quietly(calls[line.answers]) == (at, part)
            ):
                raise CannotExpandError(f"#{at} ({part}) was expanded at #{line.at}, which is still shown")

    def _refused(self, name: str, given: Mapping[str, Any], problem: str) -> str:
        """A sentence the first times; then one that ends the matter."""
        key = codec.dumps([name, {key: given[key] for key in sorted(given) if key != "reason"}])
        self._in_vain[key] += 1
        if self._in_vain[key] > PATIENCE:
            return "As before: this cannot be had, and asking again changes nothing. Go on without it."
        return f"{problem[:1_000]}."

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
        if asked is not None:
            steps *= 2 ** min(LONGEST, self._again[asked[0]])
            self._again[asked[0]] += 1
        line = msgspec.structs.replace(line, expiry=Expiry(after_steps=steps, mode="remove"))
        return msgspec.structs.replace(said, line=line)

    def _call(self, id: str) -> ToolCall | None:
        at, _ = self.record.live.state.open.get(id, (None, ""))
        event = self.record.event(at) if at is not None else None
        calls = event.message.calls if isinstance(event, Said) else ()
        return next((call for call in calls if call.call_id == id), None)


def _is_own(said: Said) -> bool:
    return any(tool in OWN for tool in said.line.tools)


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


def _place(value: Any) -> int:
    text = value.strip().lstrip("#") if isinstance(value, str) else value
    if isinstance(text, str) and text.isdecimal() and len(text) < 16:
        return int(text)
    return _whole("at", value)


def _whole(name: str, value: Any) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 0:
        raise CannotExpandError(f"{name} is a whole number, got {value!r}")
    return int(value)


def _quietly(call: ToolCall) -> tuple[int, Slice] | None:
    """What a call asks for, if it can be read at all."""
    try:
        given = _read(EXPAND, call.input)
        return _place(given["at"]), slice_of(given)
    except (NotFoundError, RecursionError):
        return None


def _within(found: Source, part: Slice, most: int, count: Callable[[str], int], note: str) -> str:
    """A part as far as there is room for it, and how to get the rest."""
    cut = found.cut(part)

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
