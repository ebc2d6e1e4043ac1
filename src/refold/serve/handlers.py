"""What the API can do: everything that a session can, each verb a plain function to be run in a thread."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from refold.core import codec
from refold.core.errors import ConflictError, NotFoundError, SettingError
from refold.core.event import Named
from refold.serve import reading
from refold.serve import schemas as shapes
from refold.serve.rows import Rows
from refold.serve.service import Service
from refold.session.explain import explain
from refold.session.export import export_lines
from refold.session.render import Renderer, RenderRequest
from refold.session.results import CompactionResult, Decision, Explanation, Overflow
from refold.session.session import Session, forked
from refold.stores.store import Key, Memories

MOST_OWNERS = 20
"""Whose conversations are searched, where one may see everybody's."""
LINES = 200
"""Of an export, that are read in one go."""


class Wish(NamedTuple):
    """What is asked of an endpoint."""

    key: Key
    """Of the conversation, where the path names one."""
    owner: str | None
    """Whose; None is everybody's."""
    query: Any
    body: Any


class Verbs:
    def __init__(self, service: Service) -> None:
        self.service, self.store, self.rows = service, service.store, Rows(service.store)

    @contextmanager
    def _session(self, key: Key) -> Iterator[Session]:
        """
        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.rows.held(key) as held:
            model = held.record.live.state.model
        with self.service.session(key, model if model and model.isprintable() else None) as session:
            yield session
        self.service.events.appended(key)

    def demand(self, key: Key) -> None:
        """
        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.rows.held(key):
            pass

    def _row(self, key: Key) -> shapes.Row:
        with self.rows.held(key) as held:
            return self.rows.row(held.record)

    # Conversations

    def all(self, wish: Wish) -> shapes.Rows:
        return self.rows.page(wish.owner, wish.query)

    def create(self, wish: Wish) -> shapes.Row:
        asked: shapes.NewConversation = wish.body
        key = Key(wish.key.owner, asked.id or uuid4().hex)
        named = codec.encode(Named(0, asked.title, asked.model, time.time()))
        try:
            self.store.append(key, [named])
        except ConflictError:
            raise ConflictError(
                f"There is a conversation {key.conversation!r} already; choose another id"
            ) from None
        self.service.events.appended(key)
        return self._row(key)

    def show(self, wish: Wish) -> shapes.Detail:
        key = wish.key
        with self._session(key) as session:
            overflow, price = session.check_overflow(), session.fitter.meter.limits.input
        with self.rows.held(key) as held:
            row, saved, spent = (
                self.rows.row(held.record),
                held.walk.saved_tokens,
                held.record.live.state.spent,
            )
            pins = sorted(reading.pins(held.record.live))
        saved_usd = None if price is None else round(saved * price / 1_000_000, 6)
        return shapes.Detail(
            **msgspec.structs.asdict(row),
            window=overflow.limit,
            threshold=overflow.threshold,
            room=overflow.available_tokens,
            overflow=overflow,
            pins=pins,
            cost=shapes.Cost(saved_usd, round(spent, 6), price),
            forks=self.rows.listed(key)[1],
        )

    def rename(self, wish: Wish) -> shapes.Row:
        asked: shapes.Names = wish.body
        if asked.title is None and asked.model is None:
            raise SettingError("title, model", "nothing is given: say at least one of them")
        with self._session(wish.key) as session:
            session.name(title=asked.title, model=asked.model)
        return self._row(wish.key)

    def erase(self, wish: Wish) -> shapes.Erased:
        with self.rows.held(wish.key):
            gone = self._with_forks(wish.key) if wish.query.with_forks else [wish.key]
            heirs = self.store.erase(wish.key, with_forks=wish.query.with_forks)
        for key in (*gone, *heirs):
            self.service.forget(key)
        for key in gone:
            self.service.events.erased(key)
        return shapes.Erased([heir.conversation for heir in heirs])

    def _with_forks(self, key: Key) -> list[Key]:
        """A conversation, its forks, and theirs."""
        rows, found = list(self.store.conversations(key.owner)), [key]
        for one in found:
            found += [row.key for row in rows if row.parent == one]
        return found

    # What was said, and what is shown

    def messages(self, wish: Wish) -> shapes.Messages:
        with self.rows.held(wish.key) as held:
            return reading.messages(held, wish.query)

    def append(self, wish: Wish) -> shapes.Places:
        with self._session(wish.key) as session:
            return shapes.Places(session.append(wish.body.messages, dialect=wish.body.dialect))

    def view(self, wish: Wish) -> shapes.Viewed:
        asked: shapes.ViewAsked = wish.query
        if asked.messages and asked.at is not None:
            raise SettingError("messages", "can be had of the view as it is now; leave out `at`")
        with self._session(wish.key) as session:
            window = session.fitter.meter.limits.window
            rendered = _rendered(session) if asked.messages else None
        with self.rows.held(wish.key) as held:
            viewed = reading.view(held, asked, window)
        if rendered is None:
            return viewed
        return msgspec.structs.replace(viewed, messages=rendered.messages, system=rendered.system)

    def edits(self, wish: Wish) -> shapes.Edits:
        with self.rows.held(wish.key) as held:
            return reading.edits(held, wish.query)

    def diff(self, wish: Wish) -> shapes.Difference:
        with self.rows.held(wish.key) as held:
            return reading.diff(held, wish.query)

    def explain(self, wish: Wish) -> Explanation:
        with self.rows.held(wish.key) as held:
            return explain(held.record, wish.query.at)

    def savings(self, wish: Wish) -> shapes.Savings:
        with self._session(wish.key) as session:
            return shapes.Savings(session.savings())

    def steps(self, wish: Wish) -> shapes.Steps:
        with self._session(wish.key) as session:
            budget = session.fitter.budget
        with self.rows.held(wish.key) as held:
            return shapes.Steps(held.walk.steps(wish.query.limit), budget.window, budget.threshold)

    def overflow(self, wish: Wish) -> Overflow:
        with self._session(wish.key) as session:
            return session.check_overflow()

    def due(self, wish: Wish) -> Decision:
        with self._session(wish.key) as session:
            return session.should_compact()

    def memories(self, wish: Wish) -> shapes.Learned:
        asked: shapes.MemoriesAsked = wish.query
        with self._session(wish.key) as session:
            if not isinstance(self.store, Memories):
                raise NotFoundError(
                    "The store has no memories; mem0://, hybrid:// and agentcore:// have them"
                )
            found = session.memories(asked.q, asked.limit, asked.namespace)
        return shapes.Learned([shapes.Memory(*one) for one in found])

    def search(self, wish: Wish) -> shapes.Hits:
        asked: shapes.SearchAsked = wish.query
        found = list[shapes.FoundMessage]()
        for key in (
            [Key(wish.key.owner, asked.conversation)] if asked.conversation else self._newest(wish.owner)
        ):
            with self._session(key) as session:
                hits = session.search(asked.q, limit=asked.limit, everywhere=not asked.conversation)
            for hit in hits:
                title = self._row(Key(key.owner, hit.conversation)).title
                facts = (hit.at, hit.role, hit.tools, hit.excerpt, hit.score, hit.in_view, hit.time)
                found.append(shapes.FoundMessage(hit.conversation, key.owner, *facts, title))
        found.sort(key=lambda hit: -hit.score)
        return shapes.Hits(found[: asked.limit])

    def _newest(self, owner: str | None) -> list[Key]:
        """One conversation of each owner that is asked for."""
        found: dict[str, Key] = {}
        for row in self.store.conversations(owner):
            if len(found) < MOST_OWNERS and row.next:
                found.setdefault(row.key.owner, row.key)
        return [*found.values()]

    # What can be done

    def expand(self, wish: Wish) -> shapes.Expanded:
        asked: shapes.Expand = wish.body
        with self._session(wish.key) as session:
            return shapes.Expanded(session.expand(**msgspec.structs.asdict(asked)))

    def restore(self, wish: Wish) -> shapes.Done:
        with self._session(wish.key) as session:
            return shapes.Done(session.restore(wish.body.at, why=wish.body.why))

    def undo(self, wish: Wish) -> shapes.Undoing:
        with self._session(wish.key) as session:
            done = session.undo(wish.body.at, why=wish.body.why)
            return shapes.Undoing(int(done), done.of, done.covered_by)

    def pin(self, wish: Wish) -> shapes.Done:
        with self._session(wish.key) as session:
            return shapes.Done(session.pin(wish.body.at, why=wish.body.why))

    def unpin(self, wish: Wish) -> shapes.Done:
        with self._session(wish.key) as session:
            return shapes.Done(session.unpin(wish.body.at, why=wish.body.why))

    def correct(self, wish: Wish) -> shapes.Done:
        with self._session(wish.key) as session:
            return shapes.Done(session.correct(wish.body.at, wish.body.message, why=wish.body.why))

    def fork(self, wish: Wish) -> shapes.Row:
        with self._session(wish.key) as session:
            new = forked(session, wish.body.id, wish.body.at)
        return self._row(new)

    def compact(self, wish: Wish) -> CompactionResult:
        asked = msgspec.structs.asdict(wish.body)
        with self._session(wish.key) as session:
            return session.compact(asked.pop("strategy"), **asked)

    async def lines(self, key: Key) -> AsyncIterator[bytes]:
        """The whole record, as it is read."""
        lines = export_lines(self.store, key)
        while some := await self.service.work(lambda: list(islice(lines, LINES))):
            yield "".join(f"{line}\n" for line in some).encode()


def _rendered(session: Session) -> Any:
    """The view in the words of its provider, mended where that must be."""
    with session.notifier:
        session.record.catch_up()
        meter = session.fitter.meter
        return Renderer(session.record, RenderRequest(session.fitter.dialect), meter.counter).render()
