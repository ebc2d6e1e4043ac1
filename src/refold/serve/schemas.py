"""Queries, request bodies and answers of the HTTP API. Its OpenAPI description is made from these types."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from refold.session.results import ConversationRow, EditRow, Hit, Overflow, ShownView, StoredMessage
from refold.session.savings import EditSavings
from refold.session.steps import StepRow

MAX_INTEGER = 1 << 53
"""JavaScript does not represent larger integers exactly."""

Place: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER, description="Place of an event.")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
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
ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[ -~]+$")]
Title: TypeAlias = Annotated[str, Meta(max_length=300)]
Reason: TypeAlias = Annotated[str, Meta(max_length=2_000)]
Owner: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=200, description="Whose conversations; only an admin may name another."),
]


class QueryParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be in the query of every request."""

    owner: Owner | None = None


class JsonBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent as JSON."""


class JsonAnswer(msgspec.Struct, frozen=True):
    """What is answered as JSON."""


# Conversations


class ListQuery(QueryParameters, frozen=True):
    limit: Many = 50
    cursor: str | None = None
    """What the page before gave as `next`."""
    q: Annotated[str, Meta(max_length=200)] | None = None
    """A part of the id or the title."""


class CreateBody(JsonBody, frozen=True):
    id: Id | None = None
    """One is made where none is given."""
    model: ModelName | None = None
    title: Title | None = None


class RenameBody(JsonBody, frozen=True):
    title: Title | None = None
    model: ModelName | None = None


class ConversationPage(JsonAnswer, frozen=True):
    conversations: list[ConversationRow]
    next: str | None
    """The cursor of the next page."""


class CostEstimate(JsonAnswer, frozen=True):
    """In USD, at the model's price for input that no cache had: an estimate."""

    saved_usd: float | None
    """What was not sent with each call; None where the price is not known."""
    spent_usd: float
    """What summaries cost."""
    input_price_per_million: float | None


class ConversationDetail(ConversationRow, frozen=True, kw_only=True):
    """A conversation by itself."""

    overflow: Overflow
    pins: list[int]
    cost: CostEstimate
    forks: list[str]


class EraseQuery(QueryParameters, frozen=True):
    with_forks: bool = False


class ErasedConversation(JsonAnswer, frozen=True):
    heirs: list[str]
    """Forks, which keep what they shared."""


# What was recorded, and what is shown


class PageQuery(QueryParameters, frozen=True):
    start: Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)] = 0
    """The first; below 0 it counts from the end."""
    limit: Many = 100


class MessagePage(JsonAnswer, frozen=True):
    messages: list[StoredMessage]
    """Texts longer than 2,000 characters are cut and end in …"""
    total: int


class AppendBody(JsonBody, frozen=True):
    messages: Annotated[list[Any], Meta(min_length=1, max_length=10_000)]
    """In any dialect, each as its provider would write it."""
    dialect: Literal["openai-chat", "openai-responses", "anthropic", "ai-sdk"] | None = None


class AppendedPlaces(JsonAnswer, frozen=True):
    places: list[int]


class ViewQuery(PageQuery, frozen=True):
    at: Place | None = None
    """As it was right after this event."""
    messages: bool = False
    """Also the provider's JSON, of all that is shown now."""


class ViewJson(ShownView, frozen=True, kw_only=True):
    """A view. Texts longer than 2,000 characters are cut and end in …"""

    window: int
    messages: list[Any] | UnsetType = UNSET
    system: Any | UnsetType = UNSET


class EditPage(JsonAnswer, frozen=True):
    edits: list[EditRow]
    total: int


class DiffQuery(QueryParameters, frozen=True, kw_only=True):
    at: Place
    to: Place | None = None
    """Now, unless given."""


class StepsQuery(QueryParameters, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=2_000)] = 2_000
    """Of more, neighbors become one."""


class StepsJson(JsonAnswer, frozen=True):
    steps: list[StepRow]
    window: int
    threshold: int


# What can be done


class SavingsJson(JsonAnswer, frozen=True):
    savings: list[EditSavings]
    """The oldest first."""


class PlaceQuery(QueryParameters, frozen=True, kw_only=True):
    at: Place


class ExpandBody(JsonBody, frozen=True, kw_only=True):
    at: (
        Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
        | Annotated[str, Meta(min_length=1, max_length=1_000)]
    )
    """A place, a message's id, or a negative number: -1 is the newest message."""
    lines: str | tuple[int, int] | None = None
    """Counted from 1, both ends included: "40-50" or [40, 50]."""
    chars: str | tuple[int, int] | None = None
    items: str | tuple[int, int] | None = None
    match: Annotated[str, Meta(max_length=1_000)] | None = None
    """A text, or a regular expression between slashes."""
    reason: Reason | None = None


class ExpandedText(JsonAnswer, frozen=True):
    text: str


class PlaceBody(JsonBody, frozen=True, kw_only=True):
    at: Place
    why: Reason = ""


class UndoBody(JsonBody, frozen=True, kw_only=True):
    at: Place | None = None
    """The newest edit, unless given."""
    why: Reason = ""


class CorrectBody(JsonBody, frozen=True, kw_only=True):
    at: Place
    message: str | dict[str, Any]
    why: Reason = ""


class EventPlace(JsonAnswer, frozen=True):
    at: int
    """Place of the event that this is."""


class UndoJson(JsonAnswer, frozen=True):
    at: int
    of: int
    """What was taken back."""
    covered_by: int | None
    """A later edit of the same messages, which still decides what is shown."""


class ForkBody(JsonBody, frozen=True, kw_only=True):
    id: Id
    at: Place | None = None
    """The last event to share; all, unless given."""


class CompactBody(JsonBody, frozen=True, kw_only=True):
    strategy: Literal["summarize", "sliding-window", "hierarchical"] | None = None
    keep_recent: Count | None = None
    target_tokens: Count | None = None
    focus: Reason = ""
    dry_run: bool = False


class SearchQuery(QueryParameters, frozen=True, kw_only=True):
    q: Annotated[str, Meta(min_length=1, max_length=400)]
    """Words, "a phrase", pref*, tool:NAME, role:ROLE."""
    conversation: str | None = None
    """Only there."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class MemoriesQuery(QueryParameters, frozen=True, kw_only=True):
    q: Annotated[str, Meta(min_length=1, max_length=400)] | None = None
    """What they have to do with; without it, what there is."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 10
    namespace: Annotated[str, Meta(min_length=1, max_length=400)] | None = None


class MemoryJson(JsonAnswer, frozen=True):
    """Something that a service learned from conversations, in words of its own."""

    id: str
    text: str
    score: float | None = None
    """How near it is to what was asked; more is nearer."""
    namespace: str | None = None
    created: float | None = None


class MemoriesJson(JsonAnswer, frozen=True):
    memories: list[MemoryJson]


class FoundMessage(Hit, frozen=True, kw_only=True):
    owner: str
    title: str
    """Of the conversation."""


class SearchHits(JsonAnswer, frozen=True):
    hits: list[FoundMessage]


class EventsQuery(QueryParameters, frozen=True):
    after: Count | None = None
    """How many events were seen; unless given, and without `Last-Event-ID`, only new events are sent."""


# What went wrong


class ErrorJson(JsonAnswer, frozen=True):
    code: str
    message: str
    """Where, why, and what to do."""


class ErrorAnswer(JsonAnswer, frozen=True):
    error: ErrorJson
