"""A conversation that lasts: say things, ask for a view that fits, see what was done and take it back."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload
from uuid import uuid4

from refold import amend, expansion
from refold.answers import (
    CompactionResult,
    Compactions,
    Decision,
    Explanation,
    Fitted,
    Overflow,
    StoredMessage,
    stored,
)
from refold.asked import fields, model_name, named, whole
from refold.config import AgentSettings, Config, demand_sense, with_database
from refold.core.draft import PART, Draft, number
from refold.core.errors import ConflictError, RefoldError, SettingError, StoreError
from refold.core.event import Event, Expiry, Replaced, Said
from refold.core.message import Kind, Message
from refold.core.plan import Policy, Stamp
from refold.core.view import View
from refold.explain import explain
from refold.fitter import Fitter, Wish
from refold.formats.dialects import FORMATS, format_of
from refold.intake import Intake
from refold.record import Record
from refold.reducer import Order, Reducer
from refold.stores.store import Forks, Ids, Key, Leases, Snapshots, Store
from refold.transfer import export_lines

if TYPE_CHECKING:
    from refold.summaries import Summaries

STRATEGIES = ("summarize", "sliding-window", "hierarchical")
WAITS = 3
"""For what is under way, for what is begun then, and for what came of both."""
LEASE_S = 60.0
"""After so many seconds a compaction whose process died is nobody's."""


class Session:
    """One conversation through one view. Safe to use from several threads.

    Nothing that is said is ever changed or lost; what `fit` hides can be undone.
    """

    def __init__(
        self,
        store: Store,
        key: Key,
        *,
        model: str | None = None,
        agent: str | None = None,
        config: Config | None = None,
        view: str = "main",
        policies: Sequence[Policy] = (),
        summarizer: Any = None,
        owns_store: bool = False,
    ) -> None:
        self.store, self.key = store, key
        self.config = with_database(config or Config(), store)
        self.settings: AgentSettings = self.config.agent(agent)
        self._agent, self._owns_store, self._summarizer = agent, owns_store, summarizer
        self._lock, self._holder = RLock(), uuid4().hex
        self.record = Record(store, key, view, parse)
        """What is underneath, for faces and tools."""
        self.reducer = Reducer(self.record, self.config, agent, policies)
        self.fitter = Fitter(self.reducer, model_name(model) or self.settings.model)
        self.reducer.summaries = self._summaries()
        if self.settings.compaction.max_tokens is not None:
            place = self.config.place("agents", agent or "default", "compact", "max_tokens")
            demand_sense(self.settings, self.fitter.budget, place)

    def _summaries(self) -> "Summaries | None":
        if self._summarizer is None and not self.settings.summarizer.models:
            return None
        from refold.desk import Desk
        from refold.summaries import Summaries, summarizers_of

        given = summarizers_of(self._summarizer, self.settings.summarizer.base_urls)
        facts = (self.record, self.config, self._agent, self._holder)
        return Summaries(Desk(*facts, lambda: self.fitter.meter.limits.window), given, self._lock)

    @property
    def conversation(self) -> str:
        return self.key.conversation

    @property
    def model(self) -> str | None:
        """Whose window must not be exceeded. May be changed at any time."""
        return self.fitter.model

    @model.setter
    def model(self, model: str | None) -> None:
        self.fitter.model = model_name(model)

    # Saying

    @overload
    def append(
        self,
        message: list[Any] | tuple[Any, ...],
        *,
        tags: Sequence[str] = (),
        kind: Kind | None = None,
        expiry: Expiry | None = None,
        tools: Sequence[str] = (),
        dialect: str | None = None,
    ) -> list[int]: ...
    @overload
    def append(
        self,
        message: Any,
        *,
        id: str | None = None,
        tags: Sequence[str] = (),
        kind: Kind | None = None,
        expiry: Expiry | None = None,
        tools: Sequence[str] = (),
        dialect: str | None = None,
    ) -> int: ...
    def append(
        self,
        message: Any,
        *,
        id: str | None = None,
        tags: Sequence[str] = (),
        kind: Kind | None = None,
        expiry: Expiry | None = None,
        tools: Sequence[str] = (),
        dialect: str | None = None,
    ) -> int | list[int]:
        """Stores a message, or all of a list or none; returns its place, or their places.

        A message is a dict in any dialect, an SDK's message, a whole SDK reply, or a `refold.Message`; a
        list may also be the chunks of a stream. An id that was appended before is stored once: its
        place is returned again. When this returns, the message is safe on disk.
        """
        beside: dict[str, Any] = {"id": id, "tags": tags, "kind": kind, "expiry": expiry, "tools": tools}
        beside = {name: value for name, value in beside.items() if value is not None and value != ()}
        intake = self.intake(dialect)
        if not isinstance(message, list | tuple):
            return self.say(intake.take([message], lambda n: "message", **beside).drafts)[0]
        if id is not None:
            raise SettingError("id", "names one message, not a list; give each a refold.Message with its id")
        taken = intake.take(message, **beside)
        places = self.say(taken.drafts)
        return [places[n] for n in taken.first]

    def intake(self, dialect: str | None = None) -> Intake:
        """How messages are taken in: counted for the model, in a dialect or in the one each is in."""
        if dialect is not None:
            format_of(named("dialect", dialect))
        return Intake(self.fitter.meter.counter, self.fitter.dialect, dialect)

    def say(self, drafts: Sequence[Draft]) -> list[int]:
        """Stores messages that are parsed and counted already; returns their places."""
        ids = [draft.message.id for draft in drafts if draft.message.id is not None]
        places: dict[str, int] = {}
        with self._lock:

            def build() -> Sequence[Event]:
                nonlocal places
                places = self.store.find(self.key, ids) if ids and isinstance(self.store, Ids) else {}
                new, seen = list[Draft](), set[str | None](places)
                for draft in drafts:
                    id = draft.message.id
                    if id is None or (id not in seen and id.partition(PART)[0] not in places):
                        new.append(draft)
                        seen.add(id)
                return number(new, self.record.live.state, self.fitter.last, time.time())

            gauge = self.record.live.state.gauge
            said = [event for event in self.record.append(build) if isinstance(event, Said)]
            self.fitter.heard(drafts)
            for usage in [event.message.usage for event in said if event.message.usage]:
                self.fitter.learn(usage, gauge)
        places |= {event.message.id: event.at for event in said if event.message.id is not None}
        unnamed = iter([event.at for event in said if event.message.id is None])
        return [
            next(unnamed)
            if (id := draft.message.id) is None
            else places.get(id, places.get(id.partition(PART)[0], 0))
            for draft in drafts
        ]

    # What the model sees

    def fit(
        self,
        *,
        dialect: str | None = None,
        tools: Sequence[Any] | None = None,
        override: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> Fitted:
        """The next request: everything if it fits, else what must be there and the newest that fits.

        `request` is what else will be in it, such as `max_tokens` or `store`: it is heeded and handed on.

        Raises:
            OverBudgetError: what must be shown is larger than the window.
        """
        named("dialect", "unset" if dialect is None else dialect)
        wish = Wish(dialect, tools, override, fields(request))
        if self.reducer.summaries is not None:
            self._wait(wish)
        with self._lock:
            self.record.catch_up()
            return self.fitter.fit(wish)

    def _wait(self, wish: Wish) -> None:
        """For what models are writing, as long as is set; nobody else waits, since the lock is free."""
        wait_s, summaries = self.settings.summarizer.wait_s, self.reducer.summaries
        until = time.monotonic() + wait_s
        for _ in range(WAITS if summaries is not None else 0):
            with self._lock:
                self.record.catch_up()
                awaited = self.fitter.awaited(wish)
            if awaited is None or summaries is None:
                return
            if not awaited.wait(max(0.0, until - time.monotonic())):
                summaries.problems.append(f"No summary was ready after {wait_s:g} s: this is done by rule")
                return

    def check_overflow(
        self, *, tools: Sequence[Any] | None = None, request: Mapping[str, Any] | None = None
    ) -> Overflow:
        """How the next request stands to the model's window, tools and system text included.

        What stands beside the messages is as in the last `fit` unless it is given.
        """
        with self._lock:
            self.record.catch_up()
            return self.fitter.overflow(Wish(tools=tools, request=fields(request)))

    def should_compact(
        self, *, tools: Sequence[Any] | None = None, request: Mapping[str, Any] | None = None
    ) -> Decision:
        """Whether the next `fit` would make the view smaller, and because of what."""
        with self._lock:
            self.record.catch_up()
            return self.fitter.decide(Wish(tools=tools, request=fields(request)))

    def view(self, at: int | None = None) -> View:
        """What the model sees now, or saw right after the event at a place."""
        with self._lock:
            self.record.catch_up()
            live = self.record.live if at is None else self.record.as_of(whole("at", at))
            return self.record.with_words(live.freeze())

    def compact(
        self,
        strategy: str | None = None,
        *,
        keep_recent: int | None = None,
        target_tokens: int | None = None,
        focus: str = "",
        dry_run: bool = False,
    ) -> CompactionResult:
        """Makes the view smaller now: down to the newest messages, or to a number of tokens.

        Strategies are summarize, sliding-window and hierarchical; unset, the configured one. A summarizer is
        waited for. `focus` is what a summary should tell most about. With `dry_run` nothing is changed and no
        model is asked: the result is what would be done by rule.
        """
        strategy = self.settings.compaction.strategy if strategy is None else strategy
        if strategy not in STRATEGIES:
            raise SettingError("strategy", f"{strategy!r} is not known; known: {', '.join(STRATEGIES)}")
        for name, given in (("keep_recent", keep_recent), ("target_tokens", target_tokens)):
            if given is not None and whole(name, given) < 0:
                raise SettingError(name, f"expected 0 or more, got {given}")
        order = Order(strategy, keep_recent, target_tokens, named("focus", focus) if focus else "")
        if not dry_run:
            self._wait_for_summaries(order)
        with self._lock:
            self.record.catch_up()
            edits = list[Replaced]()
            if not self.settings.is_off and self.record.live.state.next:
                with nullcontext() if dry_run else self._lease():
                    edits = self.fitter.compact(order, dry_run)
            if not edits:
                return CompactionResult((), (0, 0), 0, self.record.live.state.round)
            new = tuple(one for edit in edits for one in edit.shown if isinstance(one, Message))
            first, last = min(edit.span.start for edit in edits), max(edit.span.end for edit in edits)
            range = (self.record.index_from(first), self.record.index_from(last))
            saved = sum(edit.tokens[0] - edit.tokens[1] for edit in edits)
            return CompactionResult(new, range, saved, edits[0].round)

    def _wait_for_summaries(self, order: Order) -> None:
        summaries = self.reducer.summaries
        if summaries is None or self.settings.is_off or not self.get_count():
            return
        before = summaries.job
        if before is not None:
            before.wait()
        with self._lock:
            self.record.catch_up()
            with self._lease():  # or somebody else is at it
                pass
            job = self.fitter.ordered(order)
        if job is not None:
            job.wait()

    def compactions(self) -> Compactions:
        with self._lock:
            self.record.catch_up()
            state = self.record.live.state
            last = self.record.event(state.compacted) if state.compacted is not None else None
            when = datetime.fromtimestamp(last.time, UTC) if isinstance(last, Replaced) else None
            held = self.store.leases(self.key, time.time()) if isinstance(self.store, Leases) else ()
            running = any(lease.name == self._compaction for lease in held)
            return Compactions(state.round, when, running)

    @property
    def _compaction(self) -> str:
        """The lease that says somebody is at it."""
        return f"compaction:{self.record.view}"

    @contextmanager
    def _lease(self) -> Iterator[None]:
        """One compaction at a time per view."""
        if not isinstance(self.store, Leases):
            yield
            return
        lease = self.store.acquire(self.key, self._compaction, self._holder, time.time(), LEASE_S)
        if lease is None:
            raise ConflictError(f"{self.conversation!r} is being compacted by somebody else; try again")
        try:
            yield
        finally:  # it runs out, but stays known: what was written under it may still be used
            self.store.acquire(self.key, self._compaction, self._holder, time.time(), 0.0)

    # What was said

    def get_all(self) -> list[StoredMessage]:
        with self._lock:
            self.record.catch_up()
            return [self._stored(event) for event in self.record.events() if isinstance(event, Said)]

    def get_range(self, start: int, end: int) -> list[StoredMessage]:
        """Messages by index, counting messages only, the end exclusive."""
        with self._lock:
            self.record.catch_up()
            found = []
            for event in self.record.events(self.record.place_of(max(0, whole("start", start)))):
                if isinstance(event, Said):
                    if event.index >= whole("end", end):
                        break
                    found.append(self._stored(event))
            return found

    def get_recent(
        self, max_messages: int = 50, max_tokens: int | None = None, include_system: bool = True
    ) -> list[StoredMessage]:
        """The newest messages within both limits, in the order they were said."""
        found: list[StoredMessage] = []
        tokens, most = 0, whole("max_messages", max_messages)
        limit = None if max_tokens is None else whole("max_tokens", max_tokens)
        with self._lock:
            self.record.catch_up()
            for event in self.record.backwards():
                tokens += event.line.tokens if include_system or event.line.role != "system" else 0
                if len(found) >= most or (limit is not None and tokens > limit):
                    break
                if include_system or event.line.role != "system":
                    found.append(self._stored(event))
        return found[::-1]

    def get_count(self) -> int:
        with self._lock:
            self.record.catch_up()
            return self.record.live.state.index

    def messages_since_compaction(self) -> list[StoredMessage]:
        with self._lock:
            self.record.catch_up()
            since = self.record.live.state.compacted
            events = self.record.events(0 if since is None else since + 1)
            return [self._stored(event) for event in events if isinstance(event, Said)]

    def events(self, after: int = 0) -> Iterator[Event]:
        """What happened, in order; `after` is how many events to leave out, those seen already."""
        return self.record.events(max(0, whole("after", after)))

    def _stored(self, said: Said) -> StoredMessage:
        item = self.record.live.item_at(said.at)
        if item is None or item.edit is None or said.at in {line.at for line in item.lines}:
            return stored(said, self.conversation)
        edit = self.record.event(item.edit)
        expired = isinstance(edit, Replaced) and edit.kind == "expire"
        tokens = item.tokens if len(item.span) == 1 else 0
        return stored(said, self.conversation, edit=item.edit, is_expired=expired, shown_tokens=tokens)

    def expand(self, at: int) -> str:
        """The whole text behind a place: of a message, or of all that an edit stands for.

        Raises:
            CannotExpandError: there is nothing to show again.
        """
        with self._lock:
            self.record.catch_up()
            return expansion.expand(self.record, whole("at", at))

    def explain(self, at: int) -> Explanation:
        """Why a message is in the view or out of it: what was done, by which rung, by which setting."""
        with self._lock:
            self.record.catch_up()
            return explain(self.record, whole("at", at))

    # What people do

    def undo(self, at: int | None = None, *, why: str = "") -> int:
        """Takes back an edit, a pin or an undoing, the newest edit unless a place is given.

        For the place of a message, the edit that hides it. Returns the place of the undoing.
        """
        of = None if at is None else whole("at", at)
        return self._amend(lambda stamp: [amend.undo(self.record, of, stamp, why)], why)

    def restore(self, at: int, *, why: str = "") -> int:
        """Shows the original in its old place again, with the calls and results it belongs to."""
        return self._amend(lambda stamp: [amend.restore(self.record, whole("at", at), stamp, why)], why)

    def pin(self, at: int, *, why: str = "") -> int:
        """Keeps a message in every view, whatever is reduced around it."""
        return self._amend(lambda stamp: [amend.pin(self.record, whole("at", at), stamp, why)], why)

    def unpin(self, at: int, *, why: str = "") -> int:
        return self._amend(lambda stamp: amend.unpin(self.record, whole("at", at), stamp, why), why)

    def _amend(self, make: Callable[[Stamp], Sequence[Event]], why: str) -> int:
        if not isinstance(why, str):
            raise SettingError("why", f"expected a text, got {why!r}")
        with self._lock:
            self.record.catch_up()

            def build() -> Sequence[Event]:
                live = self.record.live
                return make(Stamp(live.state.next, time.time(), live.view))

            return self.record.append(build)[-1].at

    def fork(self, new_id: str, *, at: int | None = None) -> "Session":
        """A conversation that shares this one's past up to and including a place, all of it unless given."""
        if not isinstance(self.store, Forks):
            raise StoreError(f"{type(self.store).__name__} cannot fork; export and load under another id")
        with self._lock:
            self.record.catch_up()
            stop = self.record.live.state.next if at is None else self.record.end_of(whole("at", at))
            new = Key(self.key.owner, named("new_id", new_id))
            self.store.fork(self.key, new, stop)
            if isinstance(self.store, Snapshots):  # those of the shared past are the fork's as well
                self.record.save()
                with suppress(StoreError):
                    for view, snapshot in self.store.saved(self.key).items():
                        if snapshot.at <= stop:
                            self.store.save(new, view, snapshot)
            settings: dict[str, Any] = {"model": self.model, "agent": self._agent, "config": self.config}
            settings |= {"policies": self.reducer.policies, "summarizer": self._summarizer}
            return Session(self.store, new, **settings, view=self.record.view)

    def export(self) -> Iterator[str]:
        """The whole record as lines of JSON, for `refold.load`."""
        return export_lines(self.store, self.key)

    def clear(self, *, with_forks: bool = False) -> list[Key]:
        """Erases the conversation for good. Forks keep what they share, and are returned."""
        with self._lock:
            heirs = self.store.erase(self.key, with_forks=with_forks)
            self.record.catch_up()
            return heirs

    def close(self) -> None:
        """Prunes for the next run, keeps a snapshot, and closes the store where the session opened it."""
        if self.reducer.summaries is not None:
            self.reducer.summaries.close()
        with self._lock:
            with suppress(RefoldError):  # the record is whole without it
                self.fitter.finish()
            self.record.save()
            self.fitter.meter.save()
            if self._owns_store:
                self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse(dialect: str, value: Any) -> Message:
    if dialect not in FORMATS:
        raise StoreError(f"A message in the dialect {dialect!r}, which only a newer refold can read")
    return FORMATS[dialect].parse(value)
