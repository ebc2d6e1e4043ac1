"""The tools that refold offers to a model: expand what was hidden, and search the conversation."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from refold.core.errors import CannotExpandError, RefoldError, SettingError
from refold.core.event import Event, Expiry, Line, Said
from refold.core.expiry import EXPAND, OWN_TOOLS, SEARCH, is_leased
from refold.core.slices import Slice, slice_of
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
MAX_CHARS_PER_TOKEN = 10
"""Of an expanded text: more of it is not even counted."""
MAX_ATTEMPTS = 20
"""To shorten an answer until it is within its limit."""
MAX_KEY_CHARS = 2_000
MAX_ERROR_CHARS = 1_000
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
        self._expansions = Counter[str]()
        """By the first line of the answer, which names the place and the part."""
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
            known = ", ".join(sorted(OWN_TOOLS))
            raise SettingError("name", f"{name!r} is not a refold tool; known: {known}")
        request = str(arguments)
        try:
            given = _read_arguments(name, arguments)
            reason = str(given.pop("reason", ""))
            request = f"{name} {given!r}"
            if name == EXPAND:
                at = _number("at", given["at"])
                return ToolAnswer(self._expand(at, slice_of(given)), at, reason)
            if not isinstance(given["query"], str):
                raise CannotExpandError(f"query: expected a text, got {given['query']!r}")
            limit = _number("limit", given.get("limit", DEFAULT_HITS))
            return ToolAnswer(search(given["query"], min(MAX_HITS, limit)))
        except _NotNowError as error:
            return ToolAnswer(f"{error}.")
        except (RefoldError, RecursionError, ValueError, TypeError) as error:
            key = request[:MAX_KEY_CHARS]
            self._failures[key] += 1
            if self._failures[key] > MAX_EXPLANATIONS:
                return ToolAnswer(
                    "As before: this is not possible, and asking again changes nothing. Go on without it."
                )
            return ToolAnswer(f"{str(error)[:MAX_ERROR_CHARS]}.")

    def _expand(self, at: int, part: Slice) -> str:
        """Raises CannotExpandError if there is nothing to expand, or the model sees it already."""
        count = self.chat.meter.counter.counter.text
        with self.chat.lock:
            live = self.record.live
            max_tokens = self._available_tokens(self.chat.meter.limits.window)
            item = live.item_at(at)
            if item is not None and any(line.at == at for line in item.lines):
                raise _NotNowError(f"#{at} is shown whole, in its own place: read it there")
            found = source(self.record, at)
            note = ", before it was corrected" if at in live.state.corrected else ""
        text = within(found, part, max_tokens, count, note)
        with self.chat.lock:
            for line, shown in self._answers():
                if shown.startswith(f"[refold #{at} ") and text.partition("\n")[2] in shown:
                    raise _NotNowError(f"#{at} ({part}) was expanded at #{line.at}, which is still shown")
            self._answered_tokens += count(text)
        return text

    def _answers(self) -> Iterator[tuple[Line, str]]:
        """Expansions that are shown whole in the next step."""
        live = self.record.live
        for item in live.items:
            for line in item.lines:
                if EXPAND in line.tools and is_leased(line, live.state.step + 1) and line.at in item.span:
                    yield line, self.record.message(line).text

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

    def leased(self, events: Sequence[Event]) -> Sequence[Event]:
        """Makes answers of these tools expire after a few steps, and later each time for the same answer."""
        return [self._leased(event) if isinstance(event, Said) else event for event in events]

    def _leased(self, said: Said) -> Said:
        line = said.line
        if line.answers is None or line.expiry is not None or OWN_TOOLS.isdisjoint(line.tools):
            return said
        steps = self.settings.lease_steps
        header = said.message.text.partition("\n")[0]
        if header.startswith("[refold #"):
            steps *= 2 ** min(MAX_DOUBLINGS, self._expansions[header])
            self._expansions[header] += 1
        line = msgspec.structs.replace(line, expiry=Expiry(after_steps=steps, mode="remove"))
        return msgspec.structs.replace(said, line=line)


class _NotNowError(CannotExpandError):
    """It cannot be expanded now, but perhaps later."""


def _read_arguments(name: str, arguments: Any) -> dict[str, Any]:
    """Raises CannotExpandError if the arguments are not valid."""
    if isinstance(arguments, str | bytes):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError) as error:
            raise CannotExpandError(
                f"The arguments {arguments[:200]!r} are not valid JSON: {error}"
            ) from error
    known = _TOOLS[name][1]
    fields = ", ".join(known)
    if not isinstance(arguments, Mapping):
        raise CannotExpandError(f"The arguments must be an object with {fields}")
    given = {key: value for key, value in arguments.items() if value is not None and value != ""}
    for key in given:
        if key not in known:
            raise CannotExpandError(f"{key!r} is unknown; the tool takes {fields}")
    for key in _REQUIRED[name]:
        if key not in given:
            raise CannotExpandError(f"{key!r} is missing; the tool takes {fields}")
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


def within(found: Source, part: Slice, max_tokens: int, count: Callable[[str], int], note: str) -> str:
    """As much of a part as `max_tokens` allows, and how to get the rest."""
    cut = found.cut(part, max_tokens + 1)  # a line has at least one token
    shown = cut
    chars = MAX_CHARS_PER_TOKEN * max_tokens
    share = min(1.0, chars / max(1, len(cut.shown)), max_tokens / max(1, len(cut.units)))
    name = found.name
    for _ in range(MAX_ATTEMPTS):
        if share < 1:
            shown = cut.beginning(share)
        text = f"[refold #{found.at} {name}{note}: {shown.label}]\n{quoted(shown.shown)}"
        tokens = count(text)
        if tokens <= max_tokens:
            return text
        share *= min(0.95, max_tokens / tokens)
    raise CannotExpandError(
        f"#{found.at}: only {max_tokens:,} tokens are available now; ask again in a few steps"
    )
