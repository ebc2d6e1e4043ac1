"""One conversation of a framework, bound to one of ours: what it says is kept, what its model sees fits."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from refold.adapters.align import aligned
from refold.config import Source, load_config
from refold.core import codec
from refold.core.check import Missing, Orphan, repair
from refold.core.draft import PART, Draft
from refold.core.errors import ConflictError, RefoldError
from refold.core.event import Line, Said, Span
from refold.core.lease import EXPAND, OWN
from refold.core.message import Message, Text, ToolResult
from refold.core.pairing import as_came, came_as
from refold.opening import DEFAULT_STORE
from refold.opening import open as opened
from refold.page import STAND_IN
from refold.session import Session
from refold.stores.store import Forks, Key, Store, open_store
from refold.toolbox import declared

M = TypeVar("M")
KEPT = 500
"""Conversations that stay open."""
AGAIN = "\u241e"
"""Between an id and how often it was said before: nobody has it in an id of their own."""
WORDS = 1_000
"""Messages that stand for others, of which the words are kept at hand."""
OURS, BESIDE = "adapter", "adapter:beside"
"""Tags of what a framework said, and of what it put before something that was said before."""
GAPS, TRIES = 5, 5
"""Names of branches that somebody else's conversations may have; how often others may be faster."""
BRANCH = "~"
"""Between the name of a conversation and the number of one that goes on from a changed past."""
PLACEMENT = "openai-chat"
"""Requests are measured and judged in this dialect, whatever the framework makes of them."""


class Tongue(Protocol[M]):
    """How a framework says things."""

    def mark(self, message: M, /) -> Hashable:
        """By which it is known again while this process lives. Cheap: all are asked at every call."""

    def read(self, message: M, /) -> Message:
        """What it says; with an id, where the framework gives it one."""

    def write(self, message: Message, original: M | None, /) -> M:
        """The same in the framework's words: like the original, but for what is said, where there is one.

        The original is never changed.
        """


class Ask(NamedTuple):
    """What a framework is about to ask a model, but for the messages."""

    system: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    """Their declarations, as OpenAI's chat has them."""
    model: str | None = None
    output: int | None = None
    """How long an answer is asked for, in tokens."""

    @property
    def request(self) -> dict[str, Any]:
        fields = {"system": self.system, "tools": list(self.tools), "max_completion_tokens": self.output}
        return {name: value for name, value in fields.items() if value}


class _Known(NamedTuple):
    """A message of the framework's that is stored."""

    id: str
    places: tuple[int, ...]
    beside: bool = False
    """It stands before what was said before it: a summary of the framework's, as a rule."""


class _Piece(NamedTuple):
    """Something to be shown: a line as it was said, or what stands for it."""

    of: int | None
    """The message that it is, or is a part of."""
    line: Line | None
    message: Message | None = None


class Talk(Generic[M]):
    """By the framework's own name for it; the past that was changed goes on in branches of it."""

    def __init__(self, tongue: Tongue[M], name: str, opened: Callable[[str], Session]) -> None:
        self.tongue, self.lock, self._name, self._opened = tongue, RLock(), name, opened
        self._ids: dict[Hashable, str] = {}
        self._marks: dict[str, Hashable] = {}
        self._open_newest()

    def _open_newest(self) -> None:
        """The newest branch; a conversation that only has such a name is none."""
        session, self._branches = self._opened(self._name), 0
        n = 1
        while session.get_count() and n <= self._branches + GAPS:
            branch = self._opened(f"{self._name}{BRANCH}{n}")
            if branch.get_count() and _is_fork(branch, session.key):
                session, self._branches = branch, n
            n += 1
        self._begin(session)

    def _begin(self, session: Session) -> None:
        """Reads what is known of a conversation; once, since afterwards it is only added to."""
        self.session = session
        self._known: list[_Known] = []
        self._order: list[str] = []
        self._said_at: list[int] = []
        self._beside: dict[str, int] = {}
        self._of: dict[int, int] = {}
        self._times: dict[str, int] = {}
        self._words: dict[tuple[int, int], Message] = {}
        parts: dict[tuple[str, bool], list[int]] = {}
        for event in session.record.events() if session.get_count() else ():
            if isinstance(event, Said) and event.message.id is not None and OURS in event.tags:
                whole = event.message.id.partition(PART)[0], BESIDE in event.tags
                parts.setdefault(whole, []).append(event.at)
        for (id, is_beside), places in parts.items():
            self._know(_Known(id.partition(AGAIN)[0], tuple(places), is_beside))

    def _know(self, said: _Known) -> None:
        self._of.update(dict.fromkeys(said.places, len(self._known)))
        if said.beside:
            self._beside[said.id] = len(self._known)
        else:
            self._order.append(said.id)
            self._said_at.append(len(self._known))
        self._known.append(said)
        self._times[said.id] = self._times.get(said.id, 0) + 1

    # What was said

    def keep(self, messages: Sequence[M]) -> dict[int, M]:
        """Stores what is new among all that the framework has; which of the known each message is."""
        with self.lock:
            order = [self._id(message) for message in messages]
            keep, places = self._places(order)
            for _ in range(TRIES):
                if keep is not None:
                    self._branch(keep)
                    keep, places = self._places(order)
            new = [n for n, place in enumerate(places) if place is None]
            last = max((n for n, place in enumerate(places) if place is not None), default=-1)
            begun = len(self._known)
            self._say([messages[n] for n in new], [order[n] for n in new], [n < last for n in new])
            given = {place: one for place, one in zip(places, messages, strict=True) if place is not None}
            return given | {begun + n: messages[at] for n, at in enumerate(new)}

    def _places(self, order: Sequence[str]) -> tuple[int | None, list[int | None]]:
        """How much still holds, where that is not all, and which of the known each one is."""
        mine = [n for n, id in enumerate(order) if id not in self._beside] if self._beside else None
        there = aligned(self._order, order if mine is None else [order[n] for n in mine])
        places = [self._beside.get(id) for id in order]
        for n, place in zip(range(len(order)) if mine is None else mine, there.places, strict=False):
            places[n] = None if place is None else self._said_at[place]
        keep = self._said_at[there.keep - 1] + 1 if there.keep < len(self._order) else None
        return keep, places

    def _id(self, message: M) -> str:
        mark = self.tongue.mark(message)
        known = self._ids.get(mark)
        if known is not None:
            return known
        read = self.tongue.read(message)
        id = self._ids[mark] = read.id or _digest(read)
        if self._marks.setdefault(id, mark) != mark:
            self._marks[id] = mark
            self._correct(id, read)
        return id

    def _correct(self, id: str, message: Message) -> None:
        """The framework has something else under the same id now: it is shown in its place."""
        places = next((said.places for said in reversed(self._known) if said.id == id), ())
        if len(places) == 1:
            self.session.correct(places[0], msgspec.structs.replace(message, id=None), why="changed there")

    def _say(self, messages: Sequence[M], order: Sequence[str], beside: Sequence[bool]) -> None:
        if not messages:
            return
        said = list[Message]()
        times = dict[str, int]()
        for message, id in zip(messages, order, strict=True):
            n = times.get(id, self._times.get(id, 0))
            times[id] = n + 1
            own = f"{id}{AGAIN}{n}" if n else id
            said.append(msgspec.structs.replace(self.tongue.read(message), id=own))
        taken = self.session.intake().take(said)
        stops = [*taken.first[1:], len(taken.drafts)]
        drafts = list[Draft]()
        for is_beside, first, stop in zip(beside, taken.first, stops, strict=True):
            tags = (OURS, BESIDE) if is_beside else (OURS,)
            drafts += [msgspec.structs.replace(one, tags=tags) for one in taken.drafts[first:stop]]
        places = self.session.say(drafts)
        for id, is_beside, first, stop in zip(order, beside, taken.first, stops, strict=True):
            self._know(_Known(id, tuple(places[first:stop]), is_beside))

    def _branch(self, keep: int) -> None:
        """The framework's past was changed: it goes on from there in a conversation of its own."""
        session, last, known = self.session, max(self._known[keep - 1].places), self._branches
        if not isinstance(session.store, Forks):
            raise RefoldError(f"The history was changed, and {type(session.store).__name__} cannot fork")
        for n in range(known + 1, known + 1 + GAPS):
            try:
                branch = session.fork(f"{self._name}{BRANCH}{n}", at=last)
            except ConflictError:  # somebody else was faster: what is known may be theirs by now
                self._open_newest()
                if self._branches > known:
                    return
                continue
            self._branches = n
            self._begin(branch)
            return
        raise ConflictError(f"There are conversations {self._name}{BRANCH}1 and so on that are no branches")

    # What is shown

    def fit(self, messages: Sequence[M], ask: Ask) -> list[M]:
        """What the model is to see instead of all these messages.

        Raises:
            OverBudgetError: what must be shown is larger than the model's window.
        """
        with self.lock:
            given, session = self.keep(messages), self.session
            if ask.model is not None and ask.model != session.model:
                session.model = ask.model
            names = {tool["function"]["name"] for tool in ask.tools if "function" in tool}
            session.reducer.handles = session.settings.shows_handles and EXPAND in names
            session.fit(dialect=PLACEMENT, request=ask.request)
            shown = list[M]()
            for of, pieces in groupby(self._pieces(), lambda piece: piece.of):
                if of is None:
                    shown += [self.tongue.write(one.message, None) for one in pieces if one.message]
                else:
                    shown.append(self._whole(self._known[of], list(pieces), given.get(of)))
            return shown

    def _pieces(self) -> Iterator[_Piece]:
        """All that is shown, in order, every call with its result."""
        items, spans = self.session.record.live.items, dict[tuple[int, int], Span]()
        for item in items:
            if item.edit is not None:
                spans.update(((line.at, line.n), item.span) for line in item.lines)
        for slot in repair([line for item in items for line in item.lines if not line.apart])[0]:
            if not isinstance(slot, Line):
                yield _Piece(None, None, self._stand_in(slot))
            elif slot.at in self._of:
                yield _Piece(self._of[slot.at], slot)
            else:
                yield _Piece(self._part_of(spans.get((slot.at, slot.n), ())), None, self._said(slot))

    def _part_of(self, span: Iterable[int]) -> int | None:
        """The one message that an edit stands for, or for a part of."""
        found = {self._of[at] for at in span if at in self._of}
        return found.pop() if len(found) == 1 else None

    def _whole(self, known: _Known, pieces: list[_Piece], given: M | None) -> M:
        """A message of the framework's: its own where all of it stands as it was said."""
        if given is not None and [piece.line and piece.line.at for piece in pieces] == [*known.places]:
            return given
        words = (self._said(piece.line) if piece.line else piece.message for piece in pieces)
        said = [one for one in words if one is not None]
        roles = dict.fromkeys(one.role for one in said)
        parts = tuple(part for one in said for part in one.parts)
        role = "user" if len(roles) > 1 else said[0].role
        return self.tongue.write(msgspec.structs.replace(said[0], role=role, parts=parts, id=None), given)

    def _said(self, line: Line) -> Message:
        """With the ids of calls as they came."""
        known = self._words.get((line.at, line.n))
        if known is None:
            if len(self._words) >= WORDS:
                self._words.clear()
            known = self._words[line.at, line.n] = as_came(self.session.record.message(line))
        return known

    def _stand_in(self, slot: Missing | Orphan) -> Message:
        if isinstance(slot, Missing):
            result = ToolResult(came_as(slot.call), STAND_IN, slot.tool or None, is_error=True)
            return Message("tool", (result,))
        return Message("user", (Text(f"[refold: a result without its call]\n{self._said(slot.line).text}"),))

    # What the model asks for

    def call(self, name: str, arguments: Any) -> str:
        """What expand or search answer."""
        with self.lock:
            session = self.session
        return session.call(name, arguments)


class Talks(Generic[M]):
    """All conversations of one adapter, by the framework's own names for them. From any thread."""

    def __init__(
        self,
        tongue: Tongue[M],
        *,
        store: str | Store | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
        **rest: Any,
    ) -> None:
        self._tongue, self._config = tongue, load_config(config)
        where = store if store is not None else self._config.store or DEFAULT_STORE
        self.store = open_store(where) if isinstance(where, str) else where
        self._how: dict[str, Any] = {"model": model, "agent": agent, "config": self._config, **rest}
        self._has_model = model is not None
        self._open: OrderedDict[str, Talk[M]] = OrderedDict()
        self._lock = RLock()

    def talk(self, name: str) -> Talk[M]:
        with self._lock:
            if name not in self._open:
                self._open[name] = Talk(self._tongue, name, self._session)
            self._open.move_to_end(name)
            while len(self._open) > KEPT:
                self._open.popitem(last=False)  # all it knows is stored
            return self._open[name]

    def _session(self, name: str) -> Session:
        return opened(name, store=self.store, **self._how)

    def keep(self, name: str, messages: Sequence[M]) -> None:
        self.talk(name).keep(messages)

    def fit(self, name: str, messages: Sequence[M], ask: Ask) -> list[M]:
        """See `Talk.fit`. The model that the adapter was given counts more than the framework's."""
        return self.talk(name).fit(messages, ask._replace(model=None) if self._has_model else ask)

    async def afit(self, name: str, messages: Sequence[M], ask: Ask) -> list[M]:
        """The same without keeping an event loop waiting."""
        return await asyncio.to_thread(self.fit, name, messages, ask)

    def call(self, name: str, tool: str, arguments: Any) -> str:
        """What expand or search answer in a conversation."""
        return self.talk(name).call(tool, arguments)

    async def acall(self, name: str, tool: str, arguments: Any) -> str:
        return await asyncio.to_thread(self.call, name, tool, arguments)


def _is_fork(branch: Session, of: Key) -> bool:
    rows = branch.store.conversations(branch.key.owner)
    return any(row.key == branch.key and row.parent == of for row in rows)


def tools() -> list[dict[str, Any]]:
    """Expand and search as functions: name, description and parameters of each."""
    return [one["function"] for one in declared(PLACEMENT, sorted(OWN))]


def _digest(message: Message) -> str:
    """Of all that is said, by which a message without an id is known again."""
    return f"said-{blake2b(codec.dumps([message.role, message.parts]), digest_size=12).hexdigest()}"
