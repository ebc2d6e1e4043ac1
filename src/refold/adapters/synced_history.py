"""What a framework says in one conversation: stored once, known again, corrected where it is changed."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from operator import is_
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from refold.adapters.align import aligned
from refold.core import codec
from refold.core.draft import PART, Draft, split
from refold.core.errors import ConflictError, MessageError, NotFoundError, RefoldError
from refold.core.event import Replaced, Said
from refold.core.message import Message
from refold.core.pairing import with_original_ids
from refold.session.session import Session
from refold.stores.store import Forks, Key, Store

M = TypeVar("M")
AGAIN = "\u241e"
"""Between an id and how often it was said before: nobody has it in an id of their own."""
SEEN = 1_000
"""Marks that are remembered beside some for each of the known."""
OURS, BESIDE = "adapter", "adapter:beside"
"""Tags of what a framework said, and of what it put before something that was said before."""
CHANGED = "changed there"
"""Why something is corrected."""
GAPS, TRIES = 5, 5
"""Names of branches that somebody else's conversations may have; how often others may be faster."""
BRANCH = "~"
"""Between the name of a conversation and the number of one that goes on from a changed past."""


class Tongue(Protocol[M]):
    """How a framework says things.

    One whose messages are objects may have `content_of`: what in a message is replaced when it is said
    otherwise; else it is all that the object has.
    """

    def mark(self, message: M, /) -> Hashable:
        """The same for what says the same. Of this only a hash is kept."""

    def read(self, message: M, /) -> Message:
        """What it says; with an id, where the framework gives it one."""

    def write(self, message: Message, original: M | None, /) -> M:
        """The same in the framework's words: like the original, but for what is said, where there is one.

        The original is never changed.
        """


class Otherwise(NamedTuple, Generic[M]):
    """A message that others say otherwise in one request: its own words are stored, theirs are shown."""

    own: M
    shown: M


class _Known(NamedTuple):
    """A message of the framework's that is stored."""

    id: str
    places: tuple[int, ...]
    beside: bool = False
    """It stands before what was said before it: a summary of the framework's, as a rule."""


class _Seen(NamedTuple):
    """A message as the framework hands it over: by which it is known, and a hash of all that it says."""

    id: str
    says: int


class Handed(NamedTuple):
    """Messages as they were handed over, and all that they are made of."""

    messages: list[Any]
    values: list[object]

    content_of: Callable[[Any], object] | None = None

    def begins(self, messages: Sequence[Any]) -> bool:
        """They begin with the very same objects, made of the very same: no words are looked at."""
        known = messages[: len(self.messages)]
        is_same = len(known) == len(self.messages) and all(map(is_, self.messages, known))
        return is_same and all(map(is_, self.values, self._values(known)))

    def add(self, messages: Sequence[Any]) -> "Handed":
        self.messages.extend(messages)
        self.values.extend(self._values(messages))
        return self

    def _values(self, messages: Sequence[Any]) -> Iterable[object]:
        """What can be put in place of something else in them; a tuple stays what it is."""
        kinds = set(map(type, messages))
        if all(issubclass(kind, dict) for kind in kinds):
            return chain.from_iterable(map(dict.values, messages))
        if any(issubclass(kind, tuple) for kind in kinds):
            return ()
        if self.content_of is not None:
            return map(self.content_of, messages)
        return chain.from_iterable(vars(one).values() for one in messages)


class _Given(NamedTuple):
    """What the framework handed over last."""

    handed: Handed
    newest: int
    """The last of the known that is in it."""
    where: dict[int, int]
    """Which of the messages each of the known is."""


class Kept(Generic[M]):
    """By the framework's own name for it; the past that was changed goes on in branches of it."""

    def __init__(self, tongue: Tongue[M], name: str, opened: Callable[[str], Session]) -> None:
        self.tongue, self.lock, self._name, self._opened = tongue, RLock(), name, opened
        self._seen: dict[int, _Seen] = {}
        """By the hash of a mark: no words are held."""
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """Opened when it is first asked for: who talks of something else does not wait for it."""
        with self.lock:
            if self._session is None:
                self._open_newest()
            assert self._session is not None
            return self._session

    def _open_newest(self) -> None:
        session, self._branches = newest(self._name, self._opened)
        self._begin(session)

    def _begin(self, session: Session) -> None:
        """Nothing is known of a conversation until it is caught up with."""
        self._session = session
        self._known: list[_Known] = []
        self._says: list[int] = []
        """What each of the known says, as it stands: a hash."""
        self._whole_only: set[int] = set()
        """What could not be corrected, and so is never shown in part."""
        self._order: list[str] = []
        self._said_at: list[int] = []
        self._beside: dict[str, int] = {}
        self._of: dict[int, int] = {}
        self._times: dict[str, int] = {}
        self._last: _Given | None = None
        self._live, self._heard, self._next = session.record.live, 0, 0
        self._catch_up()

    def _catch_up(self) -> None:
        """Hears what others have said meanwhile; begins anew where the conversation was erased."""
        session = self.session
        count, live = session.get_count(), session.record.live
        if live is not self._live:
            return self._open_newest()
        if count != self._heard:
            wholes: dict[tuple[str, bool], list[Said]] = {}
            for event in session.record.events(self._next):
                if isinstance(event, Said) and OURS in event.tags and event.at not in self._of:
                    whole = str(event.message.id).partition(PART)[0], BESIDE in event.tags
                    wholes.setdefault(whole, []).append(event)
            for (id, is_beside), said in wholes.items():
                known = _Known(id.partition(AGAIN)[0], tuple(one.at for one in said), is_beside)
                self._know(known, _says(self._stands(one) for one in said))
            self._heard, self._next = count, live.state.next
        return None

    def _stands(self, said: Said) -> Message:
        """What is in its place now, as far as the framework has corrected it."""
        record = self.session.record
        line = record.live.state.corrected.get(said.at)
        edit = record.event(line.at) if line is not None else None
        if line is None or not isinstance(edit, Replaced) or edit.why != CHANGED:
            return with_original_ids(said.message)
        self._of[line.at] = len(self._known)
        return with_original_ids(record.message(line))

    def _know(self, said: _Known, says: int) -> None:
        self._of.update(dict.fromkeys(said.places, len(self._known)))
        if said.beside:
            self._beside[said.id] = len(self._known)
        else:
            self._order.append(said.id)
            self._said_at.append(len(self._known))
        self._known.append(said)
        self._says.append(says)
        self._times[said.id] = self._times.get(said.id, 0) + 1

    def forget(self) -> None:
        """Lets go of what the framework handed over last: all of it is looked at again."""
        self._last = None

    # What was said

    def keep(self, messages: "Sequence[M | Otherwise[M]]", *, is_asked: bool = False) -> None:
        """Stores what came after all that is known: the rest was asked before, maybe in other words.

        What `is_asked` now is as it stands in a request: it is corrected, too.
        """
        with self.lock:
            self._take(messages, is_asked=is_asked)
            self.forget()

    def goes_on(self, messages: "Sequence[M | Otherwise[M]]", *, may_be_trimmed: bool = False) -> bool:
        """They begin with all that is known, or at least end in it."""
        with self.lock:
            self._catch_up()
            known, order = self._order, [self._look(one).id for one in messages]
            if order[: len(known)] == known or not may_be_trimmed:
                return order[: len(known)] == known
            there = aligned(known, order)
            return there.keep == len(known) and any(place is not None for place in there.places)

    def knows(self, message: M) -> bool:
        """It was said, in these words or under this id."""
        with self.lock:
            self._catch_up()
            return self._look(message).id in self._times

    def _take(self, messages: "Sequence[M | Otherwise[M]]", *, is_asked: bool) -> dict[int, int]:
        """Stores what is new among all that the framework has; which of the messages each of the known is.

        What is asked counts as it stands there: what was known in other words is corrected.
        """
        self._catch_up()
        last = self._last if self._last and self._last.newest == self._said_at[-1] else None
        begun = len(last.handed.messages) if last and last.handed.begins(messages) else 0
        if last is None or not begun or self._is_any_beside(messages[begun:]):
            content_of = getattr(self.tongue, "content_of", None)
            where, handed = self._find(messages, is_asked=is_asked), Handed([], [], content_of).add(messages)
        else:
            where, handed = last.where, last.handed
            self._add(messages, range(begun, len(messages)), where)
            handed.add(messages[begun:])
        self._last = _Given(handed, self._said_at[-1], where) if len(where) == len(messages) > 0 else None
        return where

    def _is_any_beside(self, messages: "Sequence[M | Otherwise[M]]") -> bool:
        return bool(self._beside) and any(self._look(one).id in self._beside for one in messages)

    def _find(self, messages: "Sequence[M | Otherwise[M]]", *, is_asked: bool) -> dict[int, int]:
        seen = [self._look(message) for message in messages]
        order = [one.id for one in seen]
        keep, places = self._places(order)
        for _ in range(TRIES):
            if keep is not None:
                self._branch(keep)
                keep, places = self._places(order)
        where = {place: n for n, place in enumerate(places) if place is not None}
        last = max(where.values(), default=-1)
        for place, n in where.items() if is_asked else ():
            if self._says[place] != seen[n].says:
                self._correct(place, messages[n])
        new = [n for n, place in enumerate(places) if place is None and (is_asked or n > last)]
        self._add(messages, new, where, last)
        return where

    def _places(self, order: Sequence[str]) -> tuple[int | None, list[int | None]]:
        """How much still holds, where that is not all, and which of the known each one is."""
        mine = [n for n, id in enumerate(order) if id not in self._beside] if self._beside else None
        there = aligned(self._order, order if mine is None else [order[n] for n in mine])
        places = [self._beside.get(id) for id in order]
        for n, place in zip(range(len(order)) if mine is None else mine, there.places, strict=False):
            places[n] = None if place is None else self._said_at[place]
        keep = self._said_at[there.keep - 1] + 1 if there.keep < len(self._order) else None
        return keep, places

    def _look(self, message: "M | Otherwise[M]") -> _Seen:
        if isinstance(message, Otherwise):
            return _Seen(self._look(message.own).id, self._look(message.shown).says)
        mark = hash(self.tongue.mark(message))
        seen = self._seen.get(mark)
        if seen is None:
            read = self.tongue.read(message)
            if len(self._seen) > 4 * len(self._known) + SEEN:  # something says something else each time
                self._seen.clear()
            seen = self._seen[mark] = _Seen(read.id or digest(read), _says(split(read)))
        return seen

    def _correct(self, of: int, message: "M | Otherwise[M]") -> None:
        """The framework has something else there now: that is shown, where anything is shown of it."""
        new, places = split(self.tongue.read(shown(message))), self._known[of].places
        self._says[of] = self._look(message).says
        try:
            if len(new) != len(places):
                raise MessageError("message", "has other parts")
            for place, part in zip(places, new, strict=True):
                self._of[self._put(place, msgspec.structs.replace(part, id=None))] = of
        except (NotFoundError, ConflictError):  # it is hidden together with others
            pass
        except MessageError:  # it answers something else, or nothing: it is shown as it is, or not at all
            self._whole_only.add(of)

    def _put(self, place: int, message: Message) -> int:
        try:
            return self.session.correct(place, message, why=CHANGED)
        except NotFoundError:
            item = self.session.record.live.item_at(place)
            if item is None or len(item.span) > 1:
                raise
        self.session.restore(place, why=CHANGED)  # what is shown of it was made of the old words
        return self.session.correct(place, message, why=CHANGED)

    def _add(
        self,
        messages: "Sequence[M | Otherwise[M]]",
        new: Sequence[int],
        where: dict[int, int],
        last: int = -1,
    ) -> None:
        """Says those of the messages; what stands before the `last` that is known stands beside."""
        if not new:
            return
        own = [one.own if isinstance(one, Otherwise) else one for one in (messages[n] for n in new)]
        seen, times = [self._look(one) for one in own], dict[str, int]()
        said = list[Message]()
        for message, one in zip(own, seen, strict=True):
            again = times.get(one.id, self._times.get(one.id, 0))
            times[one.id] = again + 1
            id = f"{one.id}{AGAIN}{again}" if again else one.id
            said.append(msgspec.structs.replace(self.tongue.read(message), id=id))
        taken = self.session.intake().take(said)
        stops = [*taken.first[1:], len(taken.drafts)]
        drafts = list[Draft]()
        for n, first, stop in zip(new, taken.first, stops, strict=True):
            tags = (OURS, BESIDE) if n < last else (OURS,)
            drafts += [msgspec.structs.replace(one, tags=tags) for one in taken.drafts[first:stop]]
        places, begun = self.session.say(drafts), len(self._known)
        for n, one, first, stop in zip(new, seen, taken.first, stops, strict=True):
            where[len(self._known)] = n
            self._know(_Known(one.id, tuple(places[first:stop]), n < last), one.says)
        self._heard += len(places)
        state = self.session.record.live.state
        if state.index == self._heard:  # else others were there, too
            self._next = state.next
        for of, n in enumerate(new, begun):
            if self._look(messages[n]).says != self._says[of]:
                self._correct(of, messages[n])

    def _branch(self, keep: int) -> None:
        """The framework's past was changed: it goes on from there in a conversation of its own."""
        session, last, known = self.session, max(self._known[keep - 1].places), self._branches
        if not isinstance(session.store, Forks):
            kind = type(session.store).__name__
            raise RefoldError(
                f"The history of {self._name!r} was changed, and {kind} cannot fork: "
                "leave what was said as it is, begin another conversation, or use a store that can"
            )
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


def newest(name: str, opened: Callable[[str], Session]) -> tuple[Session, int]:
    """The newest branch of a conversation, and its number; one that only has such a name is none."""
    session, branches, n = opened(name), 0, 1
    while session.get_count() and n <= branches + GAPS:
        branch = opened(f"{name}{BRANCH}{n}")
        if branch.get_count() and is_fork(branch.store, branch.key, session.key):
            session, branches = branch, n
        n += 1
    return session, branches


def is_fork(store: Store, key: Key, of: Key) -> bool:
    return any(row.key == key and row.parent == of for row in store.conversations(key.owner))


def digest(message: Message) -> str:
    """Of all that is said, by which a message without an id is known again."""
    return f"said-{blake2b(codec.dumps([message.role, message.parts]), digest_size=12).hexdigest()}"


def shown(message: "M | Otherwise[M]") -> M:
    return message.shown if isinstance(message, Otherwise) else message


def _says(message: Iterable[Message]) -> int:
    """Of all the parts that it is stored in."""
    return hash(tuple(codec.dumps(part.parts) for part in message))
