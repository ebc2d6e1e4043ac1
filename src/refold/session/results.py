"""Result types returned by `Session`."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec

from refold.core.errors import RefoldError
from refold.core.event import Expiry, Said, Span
from refold.core.message import Kind, Message, Role

EXCERPT_CHARS = 80
"""Length of a title, and of a message in a list of many."""

MessageState: TypeAlias = Literal["whole", "reduced", "hidden", "corrected"]


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of the whole request: messages, system text, and the tools if they were given."""

    before: int
    after: Mapping[str, int]
    """The tokens after each stage that changed something, by its name."""
    final: int


class RequestTokens(int):
    """The tokens of a request, as a number, with those of its parts."""

    system: int
    """Of separate system text. The fixed overhead of a request is counted with its first part."""
    tools: int
    messages: tuple[int, ...]
    """Of each message, in order."""

    def __new__(cls, system: int, tools: int, messages: tuple[int, ...]) -> "RequestTokens":
        self = super().__new__(cls, system + tools + sum(messages))
        self.system = system
        self.tools = tools
        self.messages = messages
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestTokens, (self.system, self.tools, self.messages)


class EditReport(msgspec.Struct, frozen=True):
    place: int
    span: Span
    kind: str
    why: str
    tokens_saved: int


class Report(msgspec.Struct, frozen=True):
    """The edits that `fit` made, and why."""

    tokens: TokenCounts
    limit: int
    """The model's window."""
    room: int
    """Tokens of the window that neither the reserve for the answer nor this request takes."""
    edits: tuple[EditReport, ...] = ()
    fired: tuple[str, ...] = ()
    """The triggers that fired."""
    cache_break_at: int | None = None
    """The earliest place that differs from the last request, where the provider's cache ends."""
    notices: tuple[str, ...] = ()


class Fitted(msgspec.Struct, frozen=True):
    """A request that fits, in the dialect of its model."""

    messages: list[dict[str, Any]]
    request: dict[str, Any]
    """Keyword arguments for the SDK's call: messages, system text, and model and tools if they are known."""
    report: Report
    system: Any = None
    """System text, if the dialect has a field of its own for it."""
    settled: int = 0
    """How many messages from the first on will not change before the next edit; a cache mark belongs on the
    last of them. 0 if nothing was edited.
    """

    @property
    def input(self) -> list[dict[str, Any]]:
        """The messages, under the name of OpenAI's Responses API."""
        return self.messages


class FittedMessages(list[dict[str, Any]]):
    """The list that `refold.fit` returns, with its report."""

    report: Report

    def __init__(self, messages: Iterable[dict[str, Any]], report: Report) -> None:
        super().__init__(messages)
        self.report = report


class Overflow(msgspec.Struct, frozen=True):
    """The size of the next request and the model's window, in tokens."""

    is_overflow: bool
    """True if the request leaves too little room for the answer."""
    is_approaching: bool
    """True if the request takes nine tenths of the rest of the window."""
    current_tokens: int
    available_tokens: int
    limit: int
    """The model's window. If the provider limits requests below it, less is available."""
    threshold: int
    """The size from which on `fit` compacts."""
    output_reserve: int


class Decision(msgspec.Struct, frozen=True):
    """Whether the next `fit` compacts the view: true if a trigger fired and compacting helps."""

    fired: tuple[str, ...]
    """Triggers: threshold, token_threshold, turn_threshold, message_threshold."""
    tokens: int
    turns: int
    """Since the last compaction."""
    messages: int
    """Since the last compaction; a summary counts as one message."""
    obstacle: str = ""
    """Why `fit` compacts nothing although a trigger fired."""

    def __bool__(self) -> bool:
        return bool(self.fired) and not self.obstacle


class StoredMessage(msgspec.Struct, frozen=True):
    """A recorded message, and how the view shows it."""

    message: Message
    at: int
    index: int
    """Its number among the messages of the conversation, from 0."""
    id: str
    conversation: str
    tokens: int
    turn: int
    step: int
    timestamp: datetime
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    tools: tuple[str, ...] = ()
    expiry: Expiry | None = None
    edit: int | None = None
    """Place of the edit that shortens, corrects or hides it in the view now."""
    is_expired: bool = False
    """True if the edit is an expiration."""
    shown_tokens: int = 0
    keeps_original: bool = True
    """False if it was hidden with `keep_originals: false`."""
    shown: MessageState = "whole"
    is_pinned: bool = False

    @property
    def was_compacted(self) -> bool:
        return self.edit is not None

    @property
    def can_expand(self) -> bool:
        return self.edit is not None and self.keeps_original

    @property
    def original_length(self) -> int:
        """Characters of its text."""
        return len(self.message.text)

    @property
    def tokens_saved(self) -> int:
        return self.tokens - self.shown_tokens if self.edit is not None else 0

    def part_id(self, n: int) -> str:
        """The stable id of part `n`."""
        return f"{self.id}.{n}"


_KINDS: dict[str, Kind] = {"user": "user-input", "system": "system", "tool": "action-result"}


def kind_of(said: Said) -> Kind | None:
    """The kind that was given with the message, or else the one of its role."""
    return said.kind or _KINDS.get(said.line.role)


class Hit(msgspec.Struct, frozen=True):
    """A search result: a recorded message, or a correction of one."""

    conversation: str
    at: int
    """The place of the recorded message, also for a correction."""
    role: str
    tools: tuple[str, ...]
    """Names of the tools that it calls or answers for, if they are known."""
    excerpt: str
    """The matching part, in one line."""
    score: float
    """Higher is better; comparable within one search only."""
    in_view: bool | None
    """True if the view of its conversation shows it whole now; None if that is not known."""
    time: datetime
    is_corrected: bool = False
    """True if a correction has replaced it; false if that is not known."""

    @property
    def author(self) -> str:
        """The role; of a result, with the tools."""
        return " ".join((self.role, *self.tools)) if self.role == "tool" else self.role


class CompactionResult(msgspec.Struct, frozen=True):
    """The result of a compaction on demand, or of its dry run."""

    summary_messages: tuple[Message, ...]
    """The messages that now stand for the range."""
    compacted_range: tuple[int, int]
    """Message indices, the end exclusive."""
    tokens_saved: int
    round: int
    missed_by: int = 0
    """Tokens of the view above `target_tokens`; 0 if the target was reached, or none was given."""
    problems: tuple[str, ...] = ()
    """Why a model's summary was not used, for each that failed."""


class EditRow(msgspec.Struct, frozen=True, kw_only=True):
    """An edit of a view, whether it still holds or not."""

    at: int
    kind: str
    """The stage or verb that made it: cap, expire, dedupe, prune, summarize, restore …"""
    why: str
    """The reason, with the setting that decided it and where that was set."""
    span: Span
    tokens: tuple[int, int]
    """Tokens of its span, before and after."""
    time: datetime | None
    state: str
    """`in force`, `under a later one`, `taken back`, or the other view that it belongs to."""
    round: int = 0
    """The number of the compaction in the view, from 1; 0 for other edits."""
    model: str | None = None
    """The model that wrote the summary."""
    cost: float | None = None


class Explanation(msgspec.Struct, frozen=True):
    """Why a message is in the view or out of it."""

    at: int
    role: str
    """Of the message; `edit` for an edit."""
    shown: str
    """A message: `whole`, `corrected`, `reduced` or `hidden`. An edit: its state."""
    tokens: int
    """Tokens that the view shows for it now."""
    causes: tuple[EditRow, ...] = ()
    """All edits of it, the newest first."""
    stays: tuple[str, ...] = ()
    """The reasons why no edit may hide it."""
    span: Span | None = None
    """The span of an edit."""


class Compactions(msgspec.Struct, frozen=True):
    """The number of compactions of a view, the last one, and whether one is running now."""

    count: int
    last: datetime | None
    running: bool


class Undoing(int):
    """The place of an undo, which can itself be undone."""

    of: int
    """The place of the undone edit, pin or undo."""
    covered_by: int | None
    """A later edit of the same messages, which hides the effect until it is undone as well."""

    def __new__(cls, at: int, of: int, covered_by: int | None = None) -> "Undoing":
        self = super().__new__(cls, at)
        self.of, self.covered_by = of, covered_by
        return self


class ViewTokens(msgspec.Struct, frozen=True):
    """Tokens that were recorded and tokens that the view shows."""

    recorded: int
    shown: int
    saved: float = 0.0
    """The share of the recorded tokens that is not shown, from 0 to 1."""


class RecordedCount(msgspec.Struct, frozen=True):
    """Messages recorded in a span."""

    messages: int
    tokens: int


class ShownMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a view, or a recorded message by itself."""

    at: int
    """Place where it was recorded, also if it is shortened or corrected; of a summary, place of the edit."""
    role: Role
    tokens: int
    turn: int
    step: int
    tools: tuple[str, ...]
    """Names of the tools that it calls or answers for, as far as they are known."""
    edit: int | None = None
    """Place of the edit that wrote it, if it is not shown as recorded."""
    n: int = 0
    """Which of the messages that this edit wrote."""
    kind: str = ""
    """Kind of that edit, if this stands for one message; `correct` for a correction."""
    is_task: bool = False
    is_pinned: bool = False
    is_summary: bool = False
    """True for a summary of messages that are not shown."""
    message: Message

    @property
    def text(self) -> str:
        """The beginning of its text in one line; of a call, the tool and its input."""
        texts = [self.message.text, *(f"{call.tool} {call.input}" for call in self.message.calls)]
        return shortened(" ".join(texts))


class ShownItem(msgspec.Struct, frozen=True, kw_only=True):
    """A span of the record, and the messages that the view shows for it."""

    span: Span
    edit: EditRow | None
    """The edit that decided it; null if the record shows itself."""
    recorded: RecordedCount
    tokens: int
    """Tokens that are shown."""
    whole: int
    """Messages of the span that are shown as recorded."""
    reduced: int
    """Messages of the span that are shown shortened or corrected, each in its place."""
    hidden: int
    """Messages of the span that are not shown."""
    shown: tuple[ShownMessage, ...]

    @property
    def is_in_place(self) -> bool:
        """True for a single message that is shortened or corrected."""
        return len(self.span) == 1 and bool(self.reduced)


class ShownView(msgspec.Struct, frozen=True, kw_only=True):
    """A view, now or right after an event, or some of its items."""

    conversation: str
    owner: str
    view: str
    at: int | None
    """Right after which event; null is now."""
    tokens: ViewTokens
    recorded_messages: int
    items: tuple[ShownItem, ...]
    total_items: int
    next: int
    """The first place after it."""
    notices: tuple[str, ...] = ()
    """What is repaired when it is sent, such as a call without its result; only of a whole view."""

    @property
    def shown(self) -> list[ShownMessage]:
        return [one for item in self.items for one in item.shown]


class ForkPoint(msgspec.Struct, frozen=True):
    id: str
    at: int
    """The last event that both share."""


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in a list of many."""

    id: str
    owner: str
    title: str
    """As given, else the beginning of the first request, else the id."""
    model: str | None = None
    created: datetime | None
    updated: datetime | None = None
    """When the newest event happened."""
    messages: int = 0
    events: int
    tokens: ViewTokens = ViewTokens(0, 0)
    edits: int = 0
    """Edits that decide what is shown now."""
    compactions: int = 0
    status: Literal["idle", "compacting"] = "idle"
    parent: ForkPoint | None = None
    problem: str | None = None
    """Why it cannot be read, if it cannot."""


class ComparedView(msgspec.Struct, frozen=True):
    """One of the two views that are compared."""

    conversation: str
    view: str
    at: int | None
    """Right after which event; null is now."""
    messages: int
    tokens: int
    recorded: tuple[ShownMessage, ...] = ()
    """Messages recorded since the two conversations parted."""


class Change(ShownMessage, frozen=True, kw_only=True):
    """A message of one of two views, or of both."""

    sign: Literal[" ", "-", "+"]
    """In both, only in the old or only in the new."""


class Diff(msgspec.Struct, frozen=True):
    """What one view shows and another does not: true if there is anything."""

    old: ComparedView
    new: ComparedView
    changes: tuple[Change, ...]
    """All that either shows, in order."""
    parted_at: int | None = None
    """Of two conversations, the last event that they share."""

    @property
    def removed(self) -> list[Change]:
        return [change for change in self.changes if change.sign == "-"]

    @property
    def added(self) -> list[Change]:
        return [change for change in self.changes if change.sign == "+"]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)


def shortened(text: str, chars: int = EXCERPT_CHARS) -> str:
    """The beginning of a text in one line, at most so many characters.

    >>> shortened("one  two\\nthree", 10)
    'one two t…'
    """
    line = " ".join(text[: 10 * chars].split())
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def utc(seconds: float) -> datetime | None:
    """A point in time; None if the calendar has no such date."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def error_text(error: Exception) -> str:
    """The message of an error; of one that refold did not raise, with its type."""
    return str(error) if isinstance(error, RefoldError) else f"{type(error).__name__}: {error}"
