"""Result types returned by `Session`."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec

from refold.core.event import Expiry, Said, Span
from refold.core.message import Kind, Message, Role

EXCERPT_CHARS = 80
"""Length of a title, and of a message in a list of many."""

MessageState: TypeAlias = Literal["whole", "reduced", "hidden", "corrected"]


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of the whole next request: messages, and tools where they were given."""

    before: int
    after: Mapping[str, int]
    """What was left after each kind of reduction that ran."""
    final: int


class RequestTokens(int):
    """The tokens of a request: a number that knows its parts."""

    system: int
    """Of system text beside the messages; what every request takes is counted with its first part."""
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
    """What `fit` did, and why."""

    tokens: TokenCounts
    limit: int
    """The model's window."""
    room: int
    """What is left of it besides the answer's reserve and this request."""
    edits: tuple[EditReport, ...] = ()
    fired: tuple[str, ...] = ()
    """Which triggers made it act."""
    cache_break_at: int | None = None
    """The earliest place that looks different from the last request, for the provider's cache."""
    notices: tuple[str, ...] = ()


class Fitted(msgspec.Struct, frozen=True):
    """A request that fits, in the dialect of its model."""

    messages: list[dict[str, Any]]
    request: dict[str, Any]
    """To splat into the SDK's call: messages and system text, model and tools where they are known."""
    report: Report
    system: Any = None
    """System text, where the dialect has it apart from the messages."""
    settled: int = 0
    """How many messages, from the first on, stay as they are until the next edit: where a provider wants to
    be told what to cache, the last of these is the place. 0 where nothing was edited.
    """

    @property
    def input(self) -> list[dict[str, Any]]:
        """The messages, as OpenAI's Responses call them."""
        return self.messages


class FittedMessages(list[dict[str, Any]]):
    """The list that `refold.fit` returns, with the report of what was done to it."""

    report: Report

    def __init__(self, messages: Iterable[dict[str, Any]], report: Report) -> None:
        super().__init__(messages)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return FittedMessages, (list(self), self.report)


class Overflow(msgspec.Struct, frozen=True):
    """How the next request stands to the model's window. All in tokens."""

    is_overflow: bool
    """It does not leave the answer its room."""
    is_approaching: bool
    """It takes nine tenths of what there is besides that room."""
    current_tokens: int
    available_tokens: int
    limit: int
    """The model's window. A provider may refuse long requests before it is full: then less is available."""
    threshold: int
    """From here on `fit` makes it smaller."""
    output_reserve: int


class Decision(msgspec.Struct, frozen=True):
    """Whether the next `fit` compacts the view: true if a trigger fired and there is something to gain."""

    fired: tuple[str, ...]
    """Which triggers: threshold, token_threshold, turn_threshold, message_threshold."""
    tokens: int
    turns: int
    """Since the last compaction."""
    messages: int
    """Since the last compaction; what stands for the compacted ones is one message."""
    obstacle: str = ""
    """Why `fit` would compact nothing although a trigger fired."""

    def __bool__(self) -> bool:
        return bool(self.fired) and not self.obstacle


class StoredMessage(msgspec.Struct, frozen=True):
    """A message as it was recorded, and how this view shows it."""

    message: Message
    at: int
    index: int
    """Which message of the conversation, counting messages only."""
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
    """Place of the edit that shortens, corrects or hides it in this view now."""
    is_expired: bool = False
    """That edit came from an expiry."""
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
        """The stable id of its nth part."""
        return f"{self.id}.{n}"


_KINDS: dict[str, Kind] = {"user": "user-input", "system": "system", "tool": "action-result"}


def kind_of(said: Said) -> Kind | None:
    """What its sender said it is, or else what its role says."""
    return said.kind or _KINDS.get(said.line.role)


class Hit(msgspec.Struct, frozen=True):
    """A message that was found, or what somebody put in the place of one."""

    conversation: str
    at: int
    """Where it was said; of a correction, where that was said which it corrects."""
    role: str
    tools: tuple[str, ...]
    """That it calls or answers for, as far as they are known."""
    excerpt: str
    """One line from where it says what was asked for."""
    score: float
    """More is better; comparable within one search only."""
    in_view: bool | None
    """The model is shown the whole of it now, in its conversation; None where that cannot be known."""
    time: datetime
    is_corrected: bool = False
    """Something else stands in its place since; false where that cannot be known."""


class CompactionResult(msgspec.Struct, frozen=True):
    """What a compaction on demand did, or would do."""

    summary_messages: tuple[Message, ...]
    """What stands for the messages of the range now."""
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
    """The rule that made it: cap, expire, dedupe, prune, summarize …"""
    why: str
    """With the setting that decided it, and where that was set."""
    span: Span
    tokens: tuple[int, int]
    """Of all it covers, before and after."""
    time: datetime | None
    state: str
    """`in force`, `under a later one`, `taken back`, or which other view it belongs to."""
    round: int = 0
    """Which compaction of the view, from 1; 0 for edits that are none."""
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
    """Tokens that it takes in the view now."""
    causes: tuple[EditRow, ...] = ()
    """Every edit of it, the newest first."""
    stays: tuple[str, ...] = ()
    """Why nothing may hide it."""
    span: Span | None = None
    """What an edit covers."""


class Compactions(msgspec.Struct, frozen=True):
    """How often a view was compacted, when last, and whether somebody is at it now."""

    count: int
    last: datetime | None
    running: bool


class Undoing(int):
    """The place of an undoing, which may be undone in its turn."""

    of: int
    """What was taken back."""
    covered_by: int | None
    """A later edit of the same messages: what was taken back is not seen until that is undone too."""

    def __new__(cls, at: int, of: int, covered_by: int | None = None) -> "Undoing":
        self = super().__new__(cls, at)
        self.of, self.covered_by = of, covered_by
        return self


class ViewTokens(msgspec.Struct, frozen=True):
    """How much of what was recorded a view shows, in tokens."""

    recorded: int
    shown: int
    saved: float = 0.0
    """The share of the recorded tokens that is not shown, from 0 to 1."""


class RecordedCount(msgspec.Struct, frozen=True):
    """Messages recorded in a span."""

    messages: int
    tokens: int
    first_turn: int
    last_turn: int


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
    """It stands for messages that are not shown."""
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
    is_merged: bool
    """True if other edits hide parts of the span too."""
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
