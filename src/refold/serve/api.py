"""The HTTP API: one function per endpoint (see `endpoint.py`), and the types that they return."""

import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import asdict, replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from refold.core import codec
from refold.core.errors import ConflictError, NotFoundError, SettingError
from refold.core.event import Named
from refold.serve.endpoint import ENDPOINTS, ApiCall, Endpoint, endpoint
from refold.serve.events import EventStream
from refold.serve.logs import METHODS
from refold.serve.service import Service
from refold.session.export import export_lines
from refold.session.inspect import Inspector, shorten_texts
from refold.session.results import (
    EXCERPT_CHARS,
    CompactionResult,
    ConversationRow,
    Decision,
    Diff,
    EditRow,
    Explanation,
    Hit,
    Overflow,
    ShownMessage,
    ShownView,
    StoredMessage,
)
from refold.session.savings import EditSavings
from refold.session.session import Session, forked
from refold.session.steps import StepRow
from refold.stores.store import Key, Memories, Memory, with_its_forks

MAX_INTEGER = 1 << 53
"""JavaScript does not represent larger integers exactly."""
ALL = "/api/conversations"
ONE = "/api/conversations/{id}"
MAX_OWNERS = 20
"""Owners whose conversations one request searches, if the caller may see them all."""
EXPORT_BATCH_LINES = 200
TEXT_CHARS = 2_000
"""Longer texts are cut in lists; `expand` returns all of a text."""

Place: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER, description="Place of an event.")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Integer: TypeAlias = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=500)]
HitCount: TypeAlias = Annotated[int, Meta(ge=1, le=100)]
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
Filter: TypeAlias = Annotated[str, Meta(max_length=200)]
Query: TypeAlias = Annotated[str, Meta(min_length=1, max_length=400)]
Match: TypeAlias = Annotated[str, Meta(max_length=1_000)]
Reason: TypeAlias = Annotated[str, Meta(max_length=2_000)]
Row = TypeVar("Row", StoredMessage, ShownMessage)
EventPlace: TypeAlias = Annotated[int, Meta(description="Place of the event that was appended.")]
Part: TypeAlias = str | tuple[int, int] | None
PageStart: TypeAlias = Annotated[Integer, Meta(description="The first; below 0 it counts from the end.")]


# Conversations


class ConversationPage(msgspec.Struct, frozen=True):
    conversations: list[ConversationRow]
    next: str | None
    """The cursor of the next page."""


@endpoint("GET", ALL)
def all(
    call: ApiCall,
    limit: PageSize = 50,
    cursor: Annotated[str | None, Meta(description="What the page before gave as `next`.")] = None,
    q: Annotated[Filter | None, Meta(description="A part of the id or the title.")] = None,
) -> ConversationPage:
    """Conversations, the newest first"""
    return ConversationPage(*call.service.conversations.page(call.owner, limit, cursor, q))


@endpoint("POST", ALL, "append", status=201)
def create(
    call: ApiCall,
    id: Annotated[Id | None, Meta(description="One is made where none is given.")] = None,
    model: ModelName | None = None,
    title: Title | None = None,
) -> ConversationRow:
    """Create a conversation"""
    key = Key(call.key.owner, id or uuid4().hex)
    try:
        call.service.store.append(key, [codec.encode(Named(0, title, model, time.time()))])
    except ConflictError:
        message = f"The conversation {key.conversation!r} already exists; choose another id"
        raise ConflictError(message) from None
    return call.row(key)


class CostEstimate(msgspec.Struct, frozen=True):
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


@endpoint("GET", ONE)
def show(call: ApiCall, session: Session, inspector: Inspector) -> ConversationDetail:
    """A conversation, its size and savings"""
    conversations = call.service.conversations
    price = session.limits.input
    saved_usd = None
    if price is not None:
        saved_usd = round(inspector.steps.saved_tokens * price / 1_000_000, 6)
    return ConversationDetail(
        **asdict(conversations.row(inspector)),
        overflow=session.check_overflow(),
        pins=sorted(inspector.pins),
        cost=CostEstimate(saved_usd, round(inspector.state.spent, 6), price),
        forks=conversations.listed(call.key)[1],
    )


@endpoint("PATCH", ONE, "edit")
def rename(
    call: ApiCall, session: Session, title: Title | None = None, model: ModelName | None = None
) -> ConversationRow:
    """Set the title or the model"""
    if title is None and model is None:
        raise SettingError("title, model", "give at least one of them")
    session.name(title=title, model=model)
    return call.row(call.key)


@endpoint("DELETE", ONE, "admin", field="heirs")
def erase(call: ApiCall, inspector: Inspector, with_forks: bool = False) -> list[str]:
    """Erase the conversation; the heirs are forks, which keep what they shared"""
    store = call.service.store
    erased = with_its_forks(call.key, store.conversations(call.key.owner)) if with_forks else [call.key]
    heirs = store.erase(call.key, with_forks=with_forks)
    for key in (*erased, *heirs):
        call.service.forget(key)
    return [heir.conversation for heir in heirs]


# What was recorded, and what is shown


class MessagePage(msgspec.Struct, frozen=True):
    messages: list[StoredMessage]
    """Texts longer than 2,000 characters are cut and end in …"""
    total: int


@endpoint("GET", f"{ONE}/messages")
def messages(inspector: Inspector, start: PageStart = 0, limit: PageSize = 100) -> MessagePage:
    """Recorded messages, by index"""
    recorded = inspector.messages(start, limit)
    rows = [_with_short_texts(inspector.stored(said), TEXT_CHARS) for said in recorded]
    return MessagePage(rows, inspector.state.index)


@endpoint("POST", f"{ONE}/messages", "append", status=201, field="places")
def append(
    session: Session,
    messages: Annotated[
        list[Any],
        Meta(
            min_length=1,
            max_length=10_000,
            description="In any dialect, each as its provider would write it.",
        ),
    ],
    dialect: Literal["openai-chat", "openai-responses", "anthropic", "ai-sdk"] | None = None,
) -> list[int]:
    """Append messages"""
    return list[int](session.append(messages, dialect=dialect))


class ViewJson(ShownView, frozen=True, kw_only=True):
    """A view. Texts longer than 2,000 characters are cut and end in …"""

    window: int
    messages: list[Any] | UnsetType = UNSET
    system: Any | UnsetType = UNSET


@endpoint("GET", f"{ONE}/view")
def view(
    session: Session,
    inspector: Inspector,
    start: PageStart = 0,
    limit: PageSize = 100,
    at: Annotated[Place | None, Meta(description="As it was right after this event.")] = None,
    messages: Annotated[
        bool, Meta(description="Also the provider's JSON, of all that is shown now.")
    ] = False,
) -> ViewJson:
    """The view: what the model sees, now or after an event"""
    rendered: dict[str, Any] = {}
    if messages:
        if at is not None:
            raise SettingError("messages", "is available for the current view only; omit `at`")
        (request,) = session.export(session.dialect, view=True)
        rendered = {"system": None, **codec.loads(request.encode())}
    view = inspector.view(at, start, limit)
    items = []
    for item in view.items:
        shown = tuple(_with_short_texts(one, TEXT_CHARS) for one in item.shown)
        items.append(replace(item, shown=shown))
    facts = asdict(view) | {"items": tuple(items)}
    return ViewJson(**facts, window=session.limits.window, **rendered)


class EditPage(msgspec.Struct, frozen=True):
    edits: list[EditRow]
    total: int


@endpoint("GET", f"{ONE}/edits")
def edits(inspector: Inspector, start: PageStart = 0, limit: PageSize = 100) -> EditPage:
    """Edits of the view, the oldest first"""
    return EditPage(*inspector.edits(start, limit))


@endpoint("GET", f"{ONE}/diff")
def diff(
    inspector: Inspector,
    at: Place,
    to: Annotated[Place | None, Meta(description="Now, unless given.")] = None,
) -> Diff:
    """The difference of two views, with the beginnings of texts"""
    diff = inspector.diff(inspector, at, to)
    return replace(diff, changes=tuple(_with_short_texts(one, EXCERPT_CHARS) for one in diff.changes))


class StepsJson(msgspec.Struct, frozen=True):
    steps: list[StepRow]
    window: int
    threshold: int


@endpoint("GET", f"{ONE}/steps")
def steps(
    session: Session,
    inspector: Inspector,
    limit: Annotated[int, Meta(ge=1, le=2_000, description="Of more, neighbors become one.")] = 2_000,
) -> StepsJson:
    """What the model saw at each call"""
    budget = session.budget
    return StepsJson(inspector.steps.steps(limit), budget.window, budget.threshold)


@endpoint("GET", f"{ONE}/explain")
def explain(inspector: Inspector, at: Place) -> Explanation:
    """Why a message is shown or not"""
    return inspector.explain(at)


@endpoint("GET", f"{ONE}/savings", field="savings")
def savings(session: Session) -> list[EditSavings]:
    """Expected and actual savings of edits, the oldest first"""
    return session.savings()


@endpoint("GET", f"{ONE}/overflow")
def overflow(session: Session) -> Overflow:
    """How full the model's window is"""
    return session.check_overflow()


@endpoint("GET", f"{ONE}/due")
def due(session: Session) -> Decision:
    """Which triggers would compact the view now"""
    return session.should_compact()


@endpoint("GET", f"{ONE}/memories", field="memories")
def memories(
    session: Session,
    q: Annotated[Query | None, Meta(description="What they are about; without it, all of them.")] = None,
    limit: HitCount = 10,
    namespace: Query | None = None,
) -> list[Memory]:
    """Memories of the store's service"""
    if not isinstance(session.store, Memories):
        raise NotFoundError("This store has no memories; use mem0://, hybrid:// or agentcore://")
    return session.memories(q, limit, namespace)


@endpoint("GET", f"{ONE}/export", stream="application/x-ndjson")
def export(call: ApiCall, inspector: Inspector) -> ASGIApp:
    """The whole record as JSON lines"""
    lines = export_lines(call.service.store, call.key)

    async def batches() -> AsyncIterator[bytes]:
        while some := await call.service.work(lambda: list(islice(lines, EXPORT_BATCH_LINES))):
            yield "".join(f"{line}\n" for line in some).encode()

    return StreamingResponse(batches(), media_type="application/x-ndjson")


@endpoint("GET", f"{ONE}/events", stream="text/event-stream")
def events(
    call: ApiCall,
    after: Annotated[
        Count | None,
        Meta(
            description="How many events were seen; unless given, and without `Last-Event-ID`, only new"
            " events are sent."
        ),
    ] = None,
) -> ASGIApp:
    """Live events"""
    last_id = call.request.headers.get("last-event-id")  # a browser sends it when it reconnects
    if last_id:
        if not (last_id.isascii() and last_id.isdigit() and len(last_id) < 16):
            raise HTTPException(400, "last-event-id: expected the id of an event, a whole number")
        after = int(last_id)
    return EventStream(call.service, call.key, after)


# What can be done


@endpoint("POST", f"{ONE}/expand", field="text")
def expand(
    session: Session,
    at: Annotated[
        Integer | Annotated[str, Meta(min_length=1, max_length=1_000)],
        Meta(description="A place, a message's id, or a negative number: -1 is the newest message."),
    ],
    lines: Annotated[
        Part, Meta(description='Counted from 1, both ends included: "40-50" or [40, 50].')
    ] = None,
    chars: Part = None,
    items: Part = None,
    match: Annotated[
        Match | None, Meta(description="A text, or a regular expression between slashes.")
    ] = None,
    reason: Reason | None = None,
) -> str:
    """The full text at a place"""
    return session.expand(at, lines=lines, chars=chars, items=items, match=match, reason=reason)


@endpoint("POST", f"{ONE}/restore", "edit", field="at")
def restore(session: Session, at: Place, why: Reason = "") -> EventPlace:
    """Show the original again"""
    return session.restore(at, why=why)


class UndoJson(msgspec.Struct, frozen=True):
    at: int
    of: int
    """What was taken back."""
    covered_by: int | None
    """A later edit of the same messages, which still decides what is shown."""


@endpoint("POST", f"{ONE}/undo", "edit")
def undo(
    session: Session,
    at: Annotated[Place | None, Meta(description="The newest edit, unless given.")] = None,
    why: Reason = "",
) -> UndoJson:
    """Take back an edit, a pin or an undoing"""
    done = session.undo(at, why=why)
    return UndoJson(int(done), done.of, done.covered_by)


@endpoint("POST", f"{ONE}/pin", "edit", field="at")
def pin(session: Session, at: Place, why: Reason = "") -> EventPlace:
    """Keep a message in every view"""
    return session.pin(at, why=why)


@endpoint("POST", f"{ONE}/unpin", "edit", field="at")
def unpin(session: Session, at: Place, why: Reason = "") -> EventPlace:
    """Unpin a message"""
    return session.unpin(at, why=why)


@endpoint("POST", f"{ONE}/correct", "edit", field="at")
def correct(session: Session, at: Place, message: str | dict[str, Any], why: Reason = "") -> EventPlace:
    """Correct a message: show another in its place"""
    return session.correct(at, message, why=why)


@endpoint("POST", f"{ONE}/fork", "edit", status=201)
def fork(
    call: ApiCall,
    session: Session,
    id: Id,
    at: Annotated[Place | None, Meta(description="The last event to share; all, unless given.")] = None,
) -> ConversationRow:
    """Fork the conversation"""
    return call.row(forked(session, id, at))


@endpoint("POST", f"{ONE}/compact", "edit")
def compact(
    session: Session,
    strategy: Literal["summarize", "sliding-window", "hierarchical"] | None = None,
    keep_recent: Count | None = None,
    target_tokens: Count | None = None,
    focus: Reason = "",
    dry_run: bool = False,
) -> CompactionResult:
    """Compact the view now"""
    return session.compact(
        strategy, keep_recent=keep_recent, target_tokens=target_tokens, focus=focus, dry_run=dry_run
    )


# Everything


class FoundMessage(Hit, frozen=True, kw_only=True):
    owner: str
    title: str
    """Of the conversation."""


@endpoint("GET", "/api/search", field="hits")
def search(
    call: ApiCall,
    q: Annotated[Query, Meta(description='Words, "a phrase", pref*, tool:NAME, role:ROLE.')],
    conversation: Annotated[str | None, Meta(description="Only there.")] = None,
    limit: HitCount = 10,
) -> list[FoundMessage]:
    """Search recorded messages"""
    newest: dict[str, Key] = {}  # of each owner, whose other conversations its session searches too
    if conversation:
        newest[call.key.owner] = Key(call.key.owner, conversation)
    else:
        for listed in call.service.store.conversations(call.owner):
            if len(newest) < MAX_OWNERS and listed.next:
                newest.setdefault(listed.key.owner, listed.key)
    found: list[FoundMessage] = []
    for owner, key in newest.items():
        with call.session(key) as session:
            hits = session.search(q, limit=limit, everywhere=not conversation)
        for hit in hits:
            row = call.row(Key(owner, hit.conversation))
            found.append(FoundMessage(**asdict(hit), owner=owner, title=row.title))
    found.sort(key=lambda hit: -hit.score)
    return found[:limit]


@endpoint("GET", "/api/events", stream="text/event-stream")
def all_events(call: ApiCall) -> ASGIApp:
    """Live events of all conversations"""
    return EventStream(call.service, call.owner)


@endpoint("GET", "/api/openapi.json")
def openapi(call: ApiCall) -> dict[str, Any]:
    """This description"""
    from refold.serve.openapi import description

    return description()


def _with_short_texts(row: Row, chars: int) -> Row:
    return replace(row, message=shorten_texts(row.message, chars))


# Routes


def routes(service: Service) -> list[Route]:
    paths: dict[str, dict[str, Endpoint]] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method] = one
    return [
        Route(path, partial(_respond, service, endpoints), methods=list(METHODS))
        for path, endpoints in paths.items()
    ]


async def _respond(service: Service, endpoints: dict[str, Endpoint], request: Request) -> ASGIApp:
    if request.method not in endpoints:
        allowed = ", ".join(endpoints)
        message = f"{request.method} is not allowed here; use {allowed}"
        raise HTTPException(405, message, {"allow": allowed})
    return await endpoints[request.method].respond(service, request)
