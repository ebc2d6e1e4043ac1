"""Handlers of the HTTP API: each is a plain function that runs in a thread."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from refold.core import codec
from refold.core.errors import ConflictError, NotFoundError, SettingError
from refold.core.event import Named, Said
from refold.core.message import Media, Message, Part, ToolResult
from refold.serve import schemas
from refold.serve.conversations import Conversations
from refold.serve.service import Service
from refold.session.export import export_lines
from refold.session.inspect import Inspector
from refold.session.results import (
    CompactionResult,
    ComparedView,
    ConversationRow,
    Decision,
    Explanation,
    Overflow,
    ShownItem,
    ShownMessage,
)
from refold.session.session import Session, forked
from refold.stores.store import Key, Memories

MAX_OWNERS = 20
"""Owners whose conversations one request searches, if the caller may see them all."""
EXPORT_BATCH = 200
"""Lines of an export that are read at a time."""


class ApiRequest(NamedTuple):
    """A validated request to an endpoint."""

    key: Key
    """Of the conversation, if the path names one."""
    owner: str | None
    """Whose conversations; None means all owners'."""
    query: Any
    body: Any


class Handlers:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.store = service.store
        self.conversations = Conversations(service.store)

    @contextmanager
    def _session(self, key: Key) -> Iterator[Session]:
        """
        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.conversations.inspecting(key) as inspector:
            model = inspector.state.model
        with self.service.session(key, model if model and model.isprintable() else None) as session:
            yield session
        self.service.events.appended(key)

    def require(self, key: Key) -> None:
        """
        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.conversations.inspecting(key):
            pass

    def _row(self, key: Key) -> ConversationRow:
        with self.conversations.inspecting(key) as inspector:
            return self.conversations.row(inspector)

    # Conversations

    def all(self, request: ApiRequest) -> schemas.ConversationPage:
        return self.conversations.page(request.owner, request.query)

    def create(self, request: ApiRequest) -> ConversationRow:
        body: schemas.CreateBody = request.body
        key = Key(request.key.owner, body.id or uuid4().hex)
        named = codec.encode(Named(0, body.title, body.model, time.time()))
        try:
            self.store.append(key, [named])
        except ConflictError:
            raise ConflictError(
                f"The conversation {key.conversation!r} already exists; choose another id"
            ) from None
        self.service.events.appended(key)
        return self._row(key)

    def show(self, request: ApiRequest) -> schemas.ConversationDetail:
        key = request.key
        with self._session(key) as session:
            overflow = session.check_overflow()
            price = session.limits.input
        with self.conversations.inspecting(key) as inspector:
            row = self.conversations.row(inspector)
            saved_tokens = inspector.steps.saved_tokens
            spent = inspector.state.spent
            pins = sorted(inspector.pins)
        saved_usd = None if price is None else round(saved_tokens * price / 1_000_000, 6)
        return schemas.ConversationDetail(
            **msgspec.structs.asdict(row),
            window=overflow.limit,
            threshold=overflow.threshold,
            room=overflow.available_tokens,
            overflow=overflow,
            pins=pins,
            cost=schemas.CostEstimate(saved_usd, round(spent, 6), price),
            forks=self.conversations.listed(key)[1],
        )

    def rename(self, request: ApiRequest) -> ConversationRow:
        body: schemas.RenameBody = request.body
        if body.title is None and body.model is None:
            raise SettingError("title, model", "give at least one of them")
        with self._session(request.key) as session:
            session.name(title=body.title, model=body.model)
        return self._row(request.key)

    def erase(self, request: ApiRequest) -> schemas.ErasedConversation:
        with self.conversations.inspecting(request.key):
            gone = self._with_forks(request.key) if request.query.with_forks else [request.key]
            heirs = self.store.erase(request.key, with_forks=request.query.with_forks)
        for key in (*gone, *heirs):
            self.service.forget(key)
        for key in gone:
            self.service.events.erased(key)
        return schemas.ErasedConversation([heir.conversation for heir in heirs])

    def _with_forks(self, key: Key) -> list[Key]:
        """A conversation, its forks, and theirs."""
        rows = list(self.store.conversations(key.owner))
        found = [key]
        for one in found:  # which grows meanwhile
            found += [row.key for row in rows if row.parent == one]
        return found

    # What was recorded, and what is shown

    def messages(self, request: ApiRequest) -> schemas.MessagePage:
        page: schemas.PageQuery = request.query
        with self.conversations.inspecting(request.key) as inspector:
            recorded = inspector.messages(page.start, page.limit)
            rows = [_message_json(inspector, said) for said in recorded]
            return schemas.MessagePage(rows, inspector.state.index)

    def append(self, request: ApiRequest) -> schemas.AppendedPlaces:
        with self._session(request.key) as session:
            return schemas.AppendedPlaces(session.append(request.body.messages, dialect=request.body.dialect))

    def view(self, request: ApiRequest) -> schemas.ViewJson:
        query: schemas.ViewQuery = request.query
        if query.messages and query.at is not None:
            raise SettingError("messages", "is available for the current view only; omit `at`")
        with self._session(request.key) as session:
            window = session.limits.window
            rendered = _request_json(session) if query.messages else {}
        with self.conversations.inspecting(request.key) as inspector:
            view = inspector.view(query.at, query.start, query.limit)
        items = [_item_json(item) for item in view.items]
        return schemas.ViewJson(view.at, view.tokens, window, items, view.total_items, **rendered)

    def edits(self, request: ApiRequest) -> schemas.EditPage:
        page: schemas.PageQuery = request.query
        with self.conversations.inspecting(request.key) as inspector:
            return schemas.EditPage(*inspector.edits(page.start, page.limit))

    def diff(self, request: ApiRequest) -> schemas.DiffJson:
        query: schemas.DiffQuery = request.query
        with self.conversations.inspecting(request.key) as inspector:
            diff = inspector.diff(inspector, query.at, query.to)
        changes = [
            schemas.DiffChangeJson(one.sign, one.seen.at, one.seen.role, one.seen.tokens, one.seen.text)
            for one in diff.changes
        ]
        return schemas.DiffJson(_side_json(diff.old), _side_json(diff.new), changes)

    def explain(self, request: ApiRequest) -> Explanation:
        with self.conversations.inspecting(request.key) as inspector:
            return inspector.explain(request.query.at)

    def savings(self, request: ApiRequest) -> schemas.SavingsJson:
        with self._session(request.key) as session:
            return schemas.SavingsJson(session.savings())

    def steps(self, request: ApiRequest) -> schemas.StepsJson:
        with self._session(request.key) as session:
            budget = session.budget
        with self.conversations.inspecting(request.key) as inspector:
            steps = inspector.steps.steps(request.query.limit)
            return schemas.StepsJson(steps, budget.window, budget.threshold)

    def overflow(self, request: ApiRequest) -> Overflow:
        with self._session(request.key) as session:
            return session.check_overflow()

    def due(self, request: ApiRequest) -> Decision:
        with self._session(request.key) as session:
            return session.should_compact()

    def memories(self, request: ApiRequest) -> schemas.MemoriesJson:
        query: schemas.MemoriesQuery = request.query
        with self._session(request.key) as session:
            if not isinstance(self.store, Memories):
                raise NotFoundError("This store has no memories; use mem0://, hybrid:// or agentcore://")
            found = session.memories(query.q, query.limit, query.namespace)
        return schemas.MemoriesJson([schemas.MemoryJson(*one) for one in found])

    def search(self, request: ApiRequest) -> schemas.SearchHits:
        query: schemas.SearchQuery = request.query
        if query.conversation:
            keys = [Key(request.key.owner, query.conversation)]
        else:
            keys = self._newest(request.owner)
        found = list[schemas.HitJson]()
        for key in keys:
            with self._session(key) as session:
                hits = session.search(query.q, limit=query.limit, everywhere=not query.conversation)
            for hit in hits:
                row = self._row(Key(key.owner, hit.conversation))
                facts = msgspec.structs.asdict(hit)
                del facts["is_corrected"]
                found.append(schemas.HitJson(**facts, owner=key.owner, title=row.title))
        found.sort(key=lambda hit: -hit.score)
        return schemas.SearchHits(found[: query.limit])

    def _newest(self, owner: str | None) -> list[Key]:
        """One conversation of each owner that is body for."""
        found: dict[str, Key] = {}
        for row in self.store.conversations(owner):
            if len(found) < MAX_OWNERS and row.next:
                found.setdefault(row.key.owner, row.key)
        return [*found.values()]

    # What can be done

    def expand(self, request: ApiRequest) -> schemas.ExpandedText:
        body: schemas.ExpandBody = request.body
        with self._session(request.key) as session:
            return schemas.ExpandedText(session.expand(**msgspec.structs.asdict(body)))

    def restore(self, request: ApiRequest) -> schemas.EventPlace:
        with self._session(request.key) as session:
            return schemas.EventPlace(session.restore(request.body.at, why=request.body.why))

    def undo(self, request: ApiRequest) -> schemas.UndoJson:
        with self._session(request.key) as session:
            done = session.undo(request.body.at, why=request.body.why)
            return schemas.UndoJson(int(done), done.of, done.covered_by)

    def pin(self, request: ApiRequest) -> schemas.EventPlace:
        with self._session(request.key) as session:
            return schemas.EventPlace(session.pin(request.body.at, why=request.body.why))

    def unpin(self, request: ApiRequest) -> schemas.EventPlace:
        with self._session(request.key) as session:
            return schemas.EventPlace(session.unpin(request.body.at, why=request.body.why))

    def correct(self, request: ApiRequest) -> schemas.EventPlace:
        with self._session(request.key) as session:
            return schemas.EventPlace(
                session.correct(request.body.at, request.body.message, why=request.body.why)
            )

    def fork(self, request: ApiRequest) -> ConversationRow:
        with self._session(request.key) as session:
            new = forked(session, request.body.id, request.body.at)
        return self._row(new)

    def compact(self, request: ApiRequest) -> CompactionResult:
        body = msgspec.structs.asdict(request.body)
        with self._session(request.key) as session:
            return session.compact(body.pop("strategy"), **body)

    async def lines(self, key: Key) -> AsyncIterator[bytes]:
        """The whole record, as it is read."""
        lines = export_lines(self.store, key)
        while some := await self.service.work(lambda: list(islice(lines, EXPORT_BATCH))):
            yield "".join(f"{line}\n" for line in some).encode()


def _request_json(session: Session) -> dict[str, Any]:
    """The view as the provider takes it."""
    (request,) = session.export(session.dialect, view=True)
    return {"system": None, **codec.loads(request.encode())}


def _message_json(inspector: Inspector, said: Said) -> schemas.MessageJson:
    stored = inspector.stored(said)
    text = said.message.text
    return schemas.MessageJson(
        at=stored.at,
        index=stored.index,
        id=stored.id,
        role=said.line.role,
        time=stored.timestamp,
        tokens=stored.tokens,
        tools=stored.tools,
        tags=stored.tags,
        kind=stored.kind,
        edit=stored.edit,
        shown=stored.shown,
        pinned=stored.is_pinned,
        text=text[: schemas.TEXT_CHARS],
        cut=len(text) > schemas.TEXT_CHARS,
        calls=_calls_json(said.message),
        answers=said.line.answers,
        media=list(_media_json(said.message.parts)),
    )


def _item_json(item: ShownItem) -> schemas.ShownItemJson:
    shown = [_shown_json(one) for one in item.shown]
    if item.edit is None:
        return schemas.ShownItemJson(item.span, None, None, item.tokens, shown)
    return schemas.ShownItemJson(item.span, item.edit.at, item.edit.kind, item.tokens, shown)


def _shown_json(one: ShownMessage) -> schemas.ShownMessageJson:
    text = one.message.text
    return schemas.ShownMessageJson(
        at=one.line.place,
        role=one.role,
        tokens=one.tokens,
        text=text[: schemas.TEXT_CHARS],
        cut=len(text) > schemas.TEXT_CHARS,
        tools=one.tools,
        summary=one.line.summary,
        calls=_calls_json(one.message),
    )


def _calls_json(message: Message) -> list[schemas.CallJson]:
    return [
        schemas.CallJson(call.call_id, call.tool, call.input[: schemas.TEXT_CHARS]) for call in message.calls
    ]


def _media_json(parts: Sequence[Part]) -> Iterator[schemas.MediaJson]:
    for part in parts:
        if isinstance(part, Media):
            yield schemas.MediaJson(part.kind, part.name)
        elif isinstance(part, ToolResult) and not isinstance(part.output, str):
            yield from _media_json(part.output)


def _side_json(view: ComparedView) -> schemas.DiffSideJson:
    return schemas.DiffSideJson(view.at, view.messages, view.tokens)
