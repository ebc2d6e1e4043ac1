"""Result types returned by `Session`."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec

from refold.core.event import Expiry, Said, Span
from refold.core.message import Kind, Message
from refold.core.pairing import with_original_ids

GIST = 80
"""Characters of a message in a list of many."""


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
    """A message as it was said, with what the engine knows of it."""

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
    """Place of the edit that hides it from this view now."""
    is_expired: bool = False
    """That edit came from an expiry."""
    shown_tokens: int = 0
    keeps_original: bool = True
    """False if it was hidden with `keep_originals: false`."""

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


def stored(said: Said, conversation: str, **seen: Any) -> StoredMessage:
    line = said.line
    return StoredMessage(
        with_original_ids(said.message),
        line.at,
        said.index,
        said.message.id or f"m{line.at}",
        conversation,
        line.tokens,
        line.turn,
        line.step,
        datetime.fromtimestamp(said.time, UTC),
        said.tags,
        kind_of(said),
        line.tools,
        said.expiry,
        **seen,
    )


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
    """Tokens of the view above `target_tokens`; 0 where the target was reached, or none was given."""


class Cause(msgspec.Struct, frozen=True):
    """An edit that has to do with a message."""

    at: int
    kind: str
    """The rung: cap, expire, dedupe, prune, summarize …"""
    why: str
    """With the setting that decided it, and where that was set."""
    span: Span
    tokens: tuple[int, int]
    """Of all it covers, before and after."""
    state: str
    """`in force`, `under a later one` or `taken back`."""


class Explanation(msgspec.Struct, frozen=True):
    """Why a message is in the view or out of it."""

    at: int
    role: str
    """Of the message; `edit` for an edit."""
    shown: str
    """A message: `whole`, `corrected`, `reduced` or `hidden`. An edit: its state."""
    tokens: int
    """That it takes in the view now."""
    causes: tuple[Cause, ...] = ()
    """What was done to it, the newest first."""
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


class MessageSummary(msgspec.Struct, frozen=True):
    """A message that somebody saw, or said."""

    at: int
    """Where it was said, also where something else is shown in its place; of a summary, the edit's place."""
    role: str
    tokens: int
    message: Message
    tools: tuple[str, ...] = ()
    edit: int | None = None
    """What shows it otherwise than it was said."""

    @property
    def text(self) -> str:
        """What it says, in one line; of a call, its name and input."""
        words = [self.message.text, *(f"{call.tool} {call.input}" for call in self.message.calls)]
        text = " ".join(" ".join(words).split())
        return text if len(text) <= GIST else f"{text[: GIST - 1]}…"


class ComparedView(msgspec.Struct, frozen=True):
    """One of the two views that are compared."""

    conversation: str
    at: int | None
    """Right after which event; None is now."""
    messages: int
    tokens: int
    said: tuple[MessageSummary, ...] = ()
    """What was said there since the two conversations parted."""


Sign: TypeAlias = Literal[" ", "-", "+"]


class Change(msgspec.Struct, frozen=True):
    sign: Sign
    """In both, only in the old or only in the new."""
    seen: MessageSummary


class Diff(msgspec.Struct, frozen=True):
    """What one view shows and another does not: true if there is anything."""

    old: ComparedView
    new: ComparedView
    changes: tuple[Change, ...]
    """All that either shows, in order."""
    parted_at: int | None = None
    """Of two conversations, the last event that they share."""

    @property
    def removed(self) -> list[MessageSummary]:
        return [change.seen for change in self.changes if change.sign == "-"]

    @property
    def added(self) -> list[MessageSummary]:
        return [change.seen for change in self.changes if change.sign == "+"]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)
