"""One conversation of a framework, kept in sync with the record.

A framework passes its whole history again and again. New messages are appended to the record, changed ones
become corrections, and a changed past continues in a fork.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from operator import is_
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from refold.adapters.align import align, are_same
from refold.core import codec
from refold.core.draft import PART, Draft, split
from refold.core.errors import ConflictError, MessageError, NotFoundError, RefoldError
from refold.core.event import Line, Replaced, Said
from refold.core.message import Message
from refold.core.pairing import with_original_ids
from refold.session.session import Session
from refold.stores.store import Forks, Key, Store

M = TypeVar("M")
AGAIN = "\u241e"
"""Separates the id of a repeated message from its number; no id of a framework contains it."""
CACHED_FINGERPRINTS = 1_000
CACHED_MESSAGES = 1_000
ADAPTER_TAG = "adapter"
"""Tags messages that an adapter recorded."""
INSERTED_TAG = "adapter:beside"
"""Tags messages that a framework inserted before messages that were recorded earlier."""
CORRECTION = "changed there"
"""The reason that is stored with corrections."""
BRANCH = "~"
"""Separates the name of a conversation from the number of its branch."""
MOST_GAPS = 5
"""Branch names in a row that other conversations may have taken."""
MOST_ATTEMPTS = 5
"""How often a branch is begun anew if other writers win the race."""


class Converter(Protocol[M]):
    """Converts between a framework's messages and ours.

    If messages are mutable objects, it may have `content_of`: the attribute that is replaced when a message
    is changed. By default, all attributes are compared.
    """

    def fingerprint(self, message: M, /) -> Hashable:
        """Equal for messages with equal content. Only its hash is kept."""

    def parse(self, message: M, /) -> Message:
        """With an id, if the framework has one."""

    def render(self, message: Message, original: M | None, /) -> M:
        """The framework's form of a message, which replaces `original` if there is one.

        It has all that the original has besides the content; the original is not modified.
        """


class Overridden(NamedTuple, Generic[M]):
    """A message that other middleware changed for one request: `own` is recorded, `shown` is sent."""

    own: M
    shown: M


Passed: TypeAlias = M | Overridden[M]
"""A message as a framework passes it to `SyncedHistory`."""


@dataclass(slots=True)
class _SyncedMessage:
    """A message of the framework that is recorded."""

    id: str
    places: tuple[int, ...]
    """More than one, since each tool result has a place of its own."""
    is_inserted: bool
    """It stands before messages that were recorded earlier, as a framework's own summary does."""
    content: int
    """A hash of the content, as corrected."""
    is_uncorrectable: bool = False
    """The framework has changed it, and the record cannot: it is shown whole or not at all."""


class _Identity(NamedTuple):
    id: str
    content: int


class _PassedObjects(Generic[M]):
    """The message objects of the last sync, to find out without comparing contents what is unchanged."""

    def __init__(self, content_of: Callable[[M], object] | None) -> None:
        self.messages: list[Passed[M]] = []
        self._values: list[object] = []
        self._content_of = content_of

    def begins(self, messages: Sequence[Passed[M]]) -> bool:
        """True if `messages` begins with the same objects, and none of them was modified."""
        head = messages[: len(self.messages)]
        return are_same(self.messages, head) and all(map(is_, self._values, self._values_of(head)))

    def extend(self, messages: Sequence[Passed[M]]) -> None:
        self.messages.extend(messages)
        self._values.extend(self._values_of(messages))

    def _values_of(self, messages: Sequence[Any]) -> Iterable[object]:
        """Everything in the messages that can be replaced; nothing in tuples can."""
        kinds = set(map(type, messages))
        if all(issubclass(kind, dict) for kind in kinds):
            return chain.from_iterable(map(dict.values, messages))
        if any(issubclass(kind, tuple) for kind in kinds):
            return ()
        if self._content_of is not None:
            return map(self._content_of, messages)
        return chain.from_iterable(vars(message).values() for message in messages)


class SyncedHistory(Generic[M]):
    """The record of a framework's conversation, and what is known of it. Safe to use from threads."""

    def __init__(self, converter: Converter[M], name: str, open_session: Callable[[str], Session]) -> None:
        self.lock = RLock()
        self._converter = converter
        self._name = name
        self._open_session = open_session
        self._session: Session | None = None
        self._identities: dict[int, _Identity] = {}
        """By the hash of a fingerprint."""

    @property
    def session(self) -> Session:
        """Opened when it is first needed, so that other conversations do not wait for it."""
        with self.lock:
            if self._session is None:
                self._open_newest()
            assert self._session is not None
            return self._session

    def _open_newest(self) -> None:
        session = self._open_session(self._name)
        self._branch_number = 0
        for branch, number in newer_branches(self._name, session, 0, self._open_session):
            session = branch
            self._branch_number = number
        self._begin(session)

    def _begin(self, session: Session) -> None:
        self._session = session
        self._known: list[_SyncedMessage] = []
        self._sequence: list[int] = []
        """Those of the known messages that were not inserted."""
        self._inserted: dict[str, int] = {}
        self._known_at: dict[int, int] = {}
        """The known message that each place belongs to."""
        self._times: dict[str, int] = {}
        """How often each id was recorded."""
        self._messages: dict[tuple[int, int], Message] = {}
        self._last: _PassedObjects[M] | None = None
        self._positions: dict[int, int] = {}
        """The position of each known message in `_last`."""
        self._newest = -1
        """The newest known message after the last sync."""
        self._epoch = session.inspect.epoch
        self._count = 0
        self._next = 0
        self._catch_up()

    def _catch_up(self) -> None:
        """Reads what other adapters appended; begins anew if the conversation was erased."""
        session = self.session
        count = session.get_count()
        if session.inspect.epoch is not self._epoch:
            return self._open_newest()
        if count == self._count:
            return None
        parts: dict[tuple[str, bool], list[Said]] = {}
        for event in session.inspect.events(self._next):
            if isinstance(event, Said) and ADAPTER_TAG in event.tags and event.at not in self._known_at:
                id = str(event.message.id).partition(PART)[0]
                parts.setdefault((id, INSERTED_TAG in event.tags), []).append(event)
        for (id, is_inserted), events in parts.items():
            content = _content_hash(self._current(event) for event in events)
            places = tuple(event.at for event in events)
            self._add_known(_SyncedMessage(id.partition(AGAIN)[0], places, is_inserted, content))
        self._count = count
        self._next = session.inspect.state.next
        return None

    def _current(self, said: Said) -> Message:
        """A recorded message, as far as a framework has corrected it."""
        inspect = self.session.inspect
        line = inspect.state.corrected.get(said.at)
        edit = inspect.event(line.at) if line is not None else None
        if line is None or not isinstance(edit, Replaced) or edit.why != CORRECTION:
            return with_original_ids(said.message)
        self._known_at[line.at] = len(self._known)
        return self._message(line)

    def _message(self, line: Line) -> Message:
        """With the ids of calls as the framework has them."""
        message = self._messages.get((line.at, line.n))
        if message is None:
            if len(self._messages) >= CACHED_MESSAGES:
                self._messages.clear()
            message = with_original_ids(self.session.inspect.message(line))
            self._messages[line.at, line.n] = message
        return message

    def _add_known(self, message: _SyncedMessage) -> None:
        index = len(self._known)
        self._known_at.update(dict.fromkeys(message.places, index))
        self._known.append(message)
        self._times[message.id] = self._times.get(message.id, 0) + 1
        if message.is_inserted:
            self._inserted[message.id] = index
        else:
            self._sequence.append(index)

    # What a framework passes

    def record(self, messages: Sequence[Passed[M]], *, is_request: bool = False) -> None:
        """Records what follows the newest known message, and forgets the objects.

        `is_request` says that the messages are a whole request: changed messages are corrected as well, and
        unknown ones between known ones are recorded.
        """
        with self.lock:
            self._sync(messages, is_request=is_request)
            self.forget_objects()

    def forget_objects(self) -> None:
        """Lets the framework's messages be collected. The next sync compares contents again."""
        self._last = None

    def continues(self, messages: Sequence[Passed[M]], *, may_be_trimmed: bool = False) -> bool:
        """True if the messages begin with all that is known, or at least end with it."""
        with self.lock:
            self._catch_up()
            known = self._known_ids()
            passed = [self._identify(message).id for message in messages]
            if passed[: len(known)] == known:
                return True
            if not may_be_trimmed:
                return False
            alignment = align(known, passed)
            return alignment.keep == len(known) and any(at is not None for at in alignment.places)

    def knows(self, message: M) -> bool:
        """True if a message with this content, or with its id, is recorded."""
        with self.lock:
            self._catch_up()
            return self._identify(message).id in self._times

    def _known_ids(self) -> list[str]:
        return [self._known[n].id for n in self._sequence]

    def _sync(self, messages: Sequence[Passed[M]], *, is_request: bool) -> dict[int, int]:
        """Records what is new, and returns the position of each known message among the passed ones."""
        self._catch_up()
        last = self._last
        if last is not None and self._newest == self._sequence[-1] and last.begins(messages):
            start = len(last.messages)
            new = messages[start:]
            if not (self._inserted and any(self._identify(one).id in self._inserted for one in new)):
                self._append(messages, range(start, len(messages)), self._positions)
                last.extend(new)
                self._newest = self._sequence[-1]
                return self._positions
        positions = self._align(messages, is_request=is_request)
        self._last = None
        if len(positions) == len(messages) > 0:
            self._last = _PassedObjects(getattr(self._converter, "content_of", None))
            self._last.extend(messages)
            self._newest = self._sequence[-1]
            self._positions = positions
        return positions

    def _align(self, messages: Sequence[Passed[M]], *, is_request: bool) -> dict[int, int]:
        identities = [self._identify(message) for message in messages]
        ids = [identity.id for identity in identities]
        keep, places = self._places(ids)
        for _ in range(MOST_ATTEMPTS):
            if keep is not None:
                self._branch(keep)
                keep, places = self._places(ids)
        positions = {known: n for n, known in enumerate(places) if known is not None}
        last = max(positions.values(), default=-1)
        if is_request:
            for known, n in positions.items():
                if self._known[known].content != identities[n].content:
                    self._correct(known, messages[n])
        new = [n for n, known in enumerate(places) if known is None and (is_request or n > last)]
        self._append(messages, new, positions, last)
        return positions

    def _places(self, ids: Sequence[str]) -> tuple[int | None, list[int | None]]:
        """How many known messages still hold, None for all, and the known message that each passed one is."""
        own = [n for n, id in enumerate(ids) if id not in self._inserted]
        alignment = align(self._known_ids(), [ids[n] for n in own])
        places = [self._inserted.get(id) for id in ids]
        for n, at in zip(own, alignment.places, strict=False):
            places[n] = None if at is None else self._sequence[at]
        if alignment.keep == len(self._sequence):
            return None, places
        return self._sequence[alignment.keep - 1] + 1, places

    def _identify(self, message: Passed[M]) -> _Identity:
        if isinstance(message, Overridden):
            return _Identity(self._identify(message.own).id, self._identify(message.shown).content)
        key = hash(self._converter.fingerprint(message))
        identity = self._identities.get(key)
        if identity is None:
            parsed = self._converter.parse(message)
            if len(self._identities) > 4 * len(self._known) + CACHED_FINGERPRINTS:
                self._identities.clear()
            identity = _Identity(parsed.id or content_id(parsed), _content_hash(split(parsed)))
            self._identities[key] = identity
        return identity

    # Writing to the record

    def _append(
        self,
        messages: Sequence[Passed[M]],
        new: Sequence[int],
        positions: dict[int, int],
        last: int = -1,
    ) -> None:
        """Records the `new` ones of the messages; those before the `last` known one were inserted."""
        if not new:
            return
        own: list[M] = []
        for n in new:
            message = messages[n]
            own.append(message.own if isinstance(message, Overridden) else message)
        identities = [self._identify(message) for message in own]
        times: dict[str, int] = {}
        parsed: list[Message] = []
        for message, identity in zip(own, identities, strict=True):
            id = identity.id
            before = times.get(id, self._times.get(id, 0))
            times[id] = before + 1
            unique_id = f"{id}{AGAIN}{before}" if before else id
            parsed.append(msgspec.structs.replace(self._converter.parse(message), id=unique_id))
        taken = self.session.intake().take(parsed)
        stops = [*taken.first[1:], len(taken.drafts)]
        drafts: list[Draft] = []
        for n, start, stop in zip(new, taken.first, stops, strict=True):
            tags = (ADAPTER_TAG, INSERTED_TAG) if n < last else (ADAPTER_TAG,)
            drafts += [msgspec.structs.replace(draft, tags=tags) for draft in taken.drafts[start:stop]]
        places = self.session.say(drafts)
        first_known = len(self._known)
        for n, identity, start, stop in zip(new, identities, taken.first, stops, strict=True):
            positions[len(self._known)] = n
            self._add_known(
                _SyncedMessage(identity.id, tuple(places[start:stop]), n < last, identity.content)
            )
        self._count += len(places)
        state = self.session.inspect.state
        if state.index == self._count:  # otherwise other writers appended, too
            self._next = state.next
        for known, n in enumerate(new, first_known):
            if self._identify(messages[n]).content != self._known[known].content:
                self._correct(known, messages[n])

    def _correct(self, index: int, message: Passed[M]) -> None:
        """Shows what the framework has now in the place of a recorded message."""
        known = self._known[index]
        known.content = self._identify(message).content
        parts = split(self._converter.parse(shown(message)))
        try:
            if len(parts) != len(known.places):
                raise MessageError("message", "has other parts")
            for place, part in zip(known.places, parts, strict=True):
                self._known_at[self._correct_place(place, msgspec.structs.replace(part, id=None))] = index
        except (NotFoundError, ConflictError):  # it is hidden together with other messages
            pass
        except MessageError:  # it makes or answers other calls
            known.is_uncorrectable = True

    def _correct_place(self, place: int, message: Message) -> int:
        try:
            return self.session.correct(place, message, why=CORRECTION)
        except NotFoundError:
            item = self.session.inspect.item_at(place)
            if item is None or len(item.span) > 1:
                raise
        self.session.restore(place, why=CORRECTION)  # its short form was made of the old content
        return self.session.correct(place, message, why=CORRECTION)

    def _branch(self, keep: int) -> None:
        """Continues in a fork after the known messages that still hold."""
        session = self.session
        before = self._branch_number
        if not isinstance(session.store, Forks):
            kind = type(session.store).__name__
            raise RefoldError(
                f"The past of {self._name!r} was changed, and {kind} cannot fork: leave"
                " earlier messages unchanged, begin another conversation, or use a store that can fork"
            )
        last_place = max(self._known[keep - 1].places)
        for number in range(before + 1, before + 1 + MOST_GAPS):
            try:
                branch = session.fork(branch_name(self._name, number), at=last_place)
            except ConflictError:  # another writer won the race: its branch may be the one that is needed
                self._open_newest()
                if self._branch_number > before:
                    return
                continue
            self._branch_number = number
            self._begin(branch)
            return
        raise ConflictError(
            f"{self._name!r} cannot fork: {branch_name(self._name, before + 1)} and the names after it belong"
            " to other conversations"
        )


def newer_branches(
    name: str, session: Session, number: int, open_session: Callable[[str], Session]
) -> Iterator[tuple[Session, int]]:
    """The branches of a conversation that follow the one with a number, each a fork of the one before."""
    candidate = number + 1
    while candidate <= number + MOST_GAPS:
        key = session.key._replace(conversation=branch_name(name, candidate))
        if any(session.store.read(key, 0, 1)) and _is_fork(session.store, key, session.key):
            session = open_session(key.conversation)
            number = candidate
            yield session, number
        candidate += 1


def branch_name(name: str, number: int) -> str:
    return f"{name}{BRANCH}{number}" if number else name


def _is_fork(store: Store, key: Key, of: Key) -> bool:
    """False for another conversation that has the name of a branch."""
    return any(row.key == key and row.parent == of for row in store.conversations(key.owner))


def content_id(message: Message) -> str:
    """The id of a message that has none: a digest of its content."""
    return f"said-{blake2b(codec.dumps([message.role, message.parts]), digest_size=12).hexdigest()}"


def hashable(value: Any) -> Hashable:
    """JSON as tuples. Strings stay as they are: they cache their hash."""
    if isinstance(value, dict):
        return (*value, *map(hashable, value.values()))
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def shown(message: Passed[M]) -> M:
    return message.shown if isinstance(message, Overridden) else message


def _content_hash(parts: Iterable[Message]) -> int:
    return hash(tuple(codec.dumps(part.parts) for part in parts))
