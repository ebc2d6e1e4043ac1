"""What goes into the API and what comes out of it: plain values, from which its description is made."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from refold.core.event import Span
from refold.session.results import Overflow
from refold.session.savings import EditSavings

TEXT_CHARS = 2_000
"""Of a message in a list; what is longer is read by `expand`."""
WINDOW = 1 << 53
"""Whole numbers beyond this are not the same in every language."""

Place: TypeAlias = Annotated[int, Meta(ge=0, le=WINDOW, description="Place of an event.")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=WINDOW)]
Many: TypeAlias = Annotated[int, Meta(ge=1, le=500)]
Id: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=500,
        pattern=r"^[^\x00-\x1f\x7f-\x9f]+$",
        description="Without control characters.",
    ),
]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[ -~]+$")]
"""Of a model."""
Title: TypeAlias = Annotated[str, Meta(max_length=300)]
Reason: TypeAlias = Annotated[str, Meta(max_length=2_000)]
Owner: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=200, description="Whose conversations; only an admin may name another."),
]


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be in the query of every request."""

    owner: Owner | None = None


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent as JSON."""


class Answer(msgspec.Struct, frozen=True):
    """What is answered as JSON."""


# Conversations


class ListAsked(Asked, frozen=True):
    limit: Many = 50
    cursor: str | None = None
    """What the page before gave as `next`."""
    q: Annotated[str, Meta(max_length=200)] | None = None
    """A part of the id or the title."""


class NewConversation(Body, frozen=True):
    id: Id | None = None
    """One is made where none is given."""
    model: Name | None = None
    title: Title | None = None


class Names(Body, frozen=True):
    title: Title | None = None
    model: Name | None = None


class Parent(Answer, frozen=True):
    id: str
    at: int
    """The last event that both share."""


class Row(Answer, frozen=True, kw_only=True):
    """A conversation in a list of many."""

    id: str
    owner: str
    title: str
    """As given, else the beginning of the first request, else the id."""
    model: str | None
    created: datetime
    updated: datetime | None
    """When the newest event happened."""
    messages: int
    events: int
    tokens_said: int
    tokens_shown: int
    saved: float
    """The share of what was said that is not shown, from 0 to 1."""
    edits: int
    """That decide what is shown now."""
    compactions: int
    status: Literal["idle", "compacting"]
    parent: Parent | None = None


class Rows(Answer, frozen=True):
    conversations: list[Row]
    next: str | None
    """The cursor of the next page."""


class Cost(Answer, frozen=True):
    """In USD, at the model's price for input that no cache had: an estimate."""

    saved_usd: float | None
    """What was not sent with each call; None where the price is not known."""
    spent_usd: float
    """What summaries cost."""
    input_price_per_million: float | None


class Detail(Row, frozen=True, kw_only=True):
    """A conversation by itself."""

    window: int
    threshold: int
    """Tokens from which on the view is made smaller."""
    room: int
    """What is left before the answer's own."""
    overflow: Overflow
    pins: list[int]
    cost: Cost
    forks: list[str]


class EraseAsked(Asked, frozen=True):
    with_forks: bool = False


class Erased(Answer, frozen=True):
    heirs: list[str]
    """Forks, which keep what they shared."""


# What was said, and what is shown


class Paged(Asked, frozen=True):
    start: Annotated[int, Meta(ge=-WINDOW, le=WINDOW)] = 0
    """The first; below 0 it counts from the end."""
    limit: Many = 100


class Call(Answer, frozen=True):
    id: str
    tool: str
    input: str


class Medium(Answer, frozen=True):
    kind: str
    name: str | None = None


Shown: TypeAlias = Literal["whole", "reduced", "hidden", "corrected"]


class SaidMessage(Answer, frozen=True, kw_only=True):
    at: int
    index: int
    id: str
    role: str
    time: datetime
    tokens: int
    tools: tuple[str, ...]
    tags: tuple[str, ...]
    kind: str | None
    edit: int | None
    """Place of the edit that shows it otherwise, or not at all."""
    shown: Shown
    pinned: bool
    text: str
    cut: bool
    """The text is longer than this."""
    calls: list[Call]
    answers: str | None
    """Id of the call that it answers."""
    media: list[Medium]


class Messages(Answer, frozen=True):
    messages: list[SaidMessage]
    total: int


class NewMessages(Body, frozen=True):
    messages: Annotated[list[Any], Meta(min_length=1, max_length=10_000)]
    """In any dialect, each as its provider would write it."""
    dialect: Literal["openai-chat", "openai-responses", "anthropic", "ai-sdk"] | None = None


class Places(Answer, frozen=True):
    places: list[int]


class ViewAsked(Paged, frozen=True):
    at: Place | None = None
    """As it was right after this event."""
    messages: bool = False
    """Also the provider's JSON, of all that is shown now."""


class ShownMessage(Answer, frozen=True):
    at: int
    role: str
    tokens: int
    text: str
    cut: bool
    tools: tuple[str, ...]
    summary: bool
    calls: list[Call] = []


class ShownItem(Answer, frozen=True):
    """A stretch of the record and what stands for it."""

    span: Span
    edit: int | None
    kind: str | None
    """Of the edit."""
    tokens: int
    shown: list[ShownMessage]


class Viewed(Answer, frozen=True):
    at: int | None
    tokens: int
    window: int
    items: list[ShownItem]
    total_items: int
    messages: list[Any] | UnsetType = UNSET
    system: Any | UnsetType = UNSET


class Edit(Answer, frozen=True, kw_only=True):
    at: int
    kind: str
    why: str
    span: Span
    tokens: tuple[int, int]
    """Shown before and after."""
    time: datetime
    state: Literal["in force", "under a later one", "taken back"]
    model: str | None = None
    """Who wrote the summary."""
    cost: float | None = None


class Edits(Answer, frozen=True):
    edits: list[Edit]
    total: int


class DiffAsked(Asked, frozen=True, kw_only=True):
    at: Place
    to: Place | None = None
    """Now, unless given."""


class DiffMoment(Answer, frozen=True):
    at: int | None
    messages: int
    tokens: int


class DiffChange(Answer, frozen=True):
    sign: Literal[" ", "-", "+"]
    at: int
    role: str
    tokens: int
    text: str


class Difference(Answer, frozen=True):
    old: DiffMoment
    new: DiffMoment
    changes: list[DiffChange]


class StepsAsked(Asked, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=2_000)] = 2_000
    """Of more, neighbors become one."""


class Kinds(msgspec.Struct):
    """Tokens that the model saw."""

    system: int = 0
    user: int = 0
    assistant: int = 0
    tool: int = 0
    summary: int = 0


class Step(msgspec.Struct):
    """One call of the model."""

    step: int
    at: int
    """Place of its answer."""
    tokens: Kinds
    sent: int
    """Input tokens as its provider counted them, else as they were estimated."""
    edits: int
    """Made since the step before."""


class Steps(Answer, frozen=True):
    steps: list[Step]
    window: int
    threshold: int


# What can be done


class Savings(Answer, frozen=True):
    savings: list[EditSavings]
    """The oldest first."""


class AtAsked(Asked, frozen=True, kw_only=True):
    at: Place


class Expand(Body, frozen=True, kw_only=True):
    at: Annotated[int, Meta(ge=-WINDOW, le=WINDOW)] | Annotated[str, Meta(min_length=1, max_length=1_000)]
    """A place, a message's id, or a negative number: -1 is the newest message."""
    lines: str | tuple[int, int] | None = None
    """Counted from 1, both ends included: "40-50" or [40, 50]."""
    chars: str | tuple[int, int] | None = None
    items: str | tuple[int, int] | None = None
    match: Annotated[str, Meta(max_length=1_000)] | None = None
    """A text, or a regular expression between slashes."""
    reason: Reason | None = None


class Expanded(Answer, frozen=True):
    text: str


class AtBody(Body, frozen=True, kw_only=True):
    at: Place
    why: Reason = ""


class Undo(Body, frozen=True, kw_only=True):
    at: Place | None = None
    """The newest edit, unless given."""
    why: Reason = ""


class Correct(Body, frozen=True, kw_only=True):
    at: Place
    message: str | dict[str, Any]
    why: Reason = ""


class Done(Answer, frozen=True):
    at: int
    """Place of the event that this is."""


class Undoing(Answer, frozen=True):
    at: int
    of: int
    """What was taken back."""
    covered_by: int | None
    """A later edit of the same messages, which still decides what is shown."""


class Fork(Body, frozen=True, kw_only=True):
    id: Id
    at: Place | None = None
    """The last event to share; all, unless given."""


class Compact(Body, frozen=True, kw_only=True):
    strategy: Literal["summarize", "sliding-window", "hierarchical"] | None = None
    keep_recent: Count | None = None
    target_tokens: Count | None = None
    focus: Reason = ""
    dry_run: bool = False


class SearchAsked(Asked, frozen=True, kw_only=True):
    q: Annotated[str, Meta(min_length=1, max_length=400)]
    """Words, "a phrase", pref*, tool:NAME, role:ROLE."""
    conversation: str | None = None
    """Only there."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class MemoriesAsked(Asked, frozen=True, kw_only=True):
    q: Annotated[str, Meta(min_length=1, max_length=400)] | None = None
    """What they have to do with; without it, what there is."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 10
    namespace: Annotated[str, Meta(min_length=1, max_length=400)] | None = None


class Memory(Answer, frozen=True):
    """Something that a service learned from conversations, in words of its own."""

    id: str
    text: str
    score: float | None = None
    """How near it is to what was asked; more is nearer."""
    namespace: str | None = None
    created: float | None = None


class Learned(Answer, frozen=True):
    memories: list[Memory]


class FoundMessage(Answer, frozen=True):
    conversation: str
    owner: str
    at: int
    role: str
    tools: tuple[str, ...]
    excerpt: str
    score: float
    in_view: bool | None
    time: datetime
    title: str


class Hits(Answer, frozen=True):
    hits: list[FoundMessage]


class EventsAsked(Asked, frozen=True):
    after: Count | None = None
    """How many events were seen; unless given, and without `Last-Event-ID`, only what comes is told."""


# What went wrong


class Problem(Answer, frozen=True):
    code: str
    message: str
    """Where, why, and what to do."""


class Failure(Answer, frozen=True):
    error: Problem
