"""One conversation of a framework that keeps its own history, kept in sync with the record.

The framework passes its whole history again and again. New messages are appended to the record, changed ones
become corrections, and a changed past continues in a fork.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import msgspec

from refold.core import codec
from refold.core.draft import PART, Draft, split
from refold.core.errors import ConflictError, MessageError, NotFoundError, RefoldError
from refold.core.event import Replaced, Said
from refold.core.message import Message
from refold.core.pairing import with_original_ids
from refold.session.history_sync import CONTENT_ID, align, common_prefix, content_id
from refold.session.session import Session
from refold.stores.store import Forks, Key, Store

M = TypeVar("M")
AGAIN = "\u241e"
"""Separates the id of a repeated message from its number; no id of a framework contains it."""
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
    """Converts between a framework's messages and ours."""

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


Fields: TypeAlias = Mapping[str, Any] | int
"""What can be replaced in a message of a framework; of a tuple its `id()`, since nothing can."""


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


class _ParsedMessage(NamedTuple):
    """A message that was passed, and what it says."""

    object: Any
    fields: Fields
    """A copy: another object with equal fields says the same."""
    message: Message
    id: str
    content: int


@dataclass(frozen=True, slots=True)
class _PassedMessages:
    """The messages of the last sync. What they say need not be read again."""

    recorded: list[_ParsedMessage] = field(default_factory=list)
    sent: list[_ParsedMessage] = field(default_factory=list)
    """The same as they were sent: other middleware may have changed some of them."""
    positions: dict[int, int] = field(default_factory=dict)
    """Of each known message among them."""
    known_count: int = 0
    """How many messages were known then, in this branch."""


class SyncedHistory(Generic[M]):
    """The record of a framework's conversation, and what is known of it. Safe to use from threads."""

    def __init__(self, converter: Converter[M], name: str, open_session: Callable[[str], Session]) -> None:
        self.lock = RLock()
        self._converter = converter
        self._name = name
        self._open_session = open_session
        self._session: Session | None = None
        self._last = _PassedMessages()

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
        self._last = replace(self._last, positions={})
        self._known: list[_SyncedMessage] = []
        self._sequence: list[int] = []
        """Those of the known messages that were not inserted."""
        self._inserted: dict[str, int] = {}
        self._known_at: dict[int, int] = {}
        """The known message that each place belongs to."""
        self._times: dict[str, int] = {}
        """How often each id was recorded."""
        self._epoch = session.inspect.epoch
        self._count = 0
        self._next = 0
        self._catch_up()

    def _catch_up(self) -> None:
        """Reads what other adapters appended; begins anew if the conversation was erased."""
        session = self.session
        count = session.get_count()
        if session.inspect.epoch is not self._epoch:
            self._open_newest()
            return
        if count == self._count:
            return
        groups: dict[tuple[str, bool], list[Said]] = {}
        for event in session.inspect.events(self._next):
            if isinstance(event, Said) and ADAPTER_TAG in event.tags and event.at not in self._known_at:
                id = str(event.message.id).partition(PART)[0]
                groups.setdefault((id, INSERTED_TAG in event.tags), []).append(event)
        for (id, is_inserted), events in groups.items():
            pieces = [with_original_ids(event.message) for event in events]
            content = _content_hash(map(self._current, events, pieces))
            places = tuple(event.at for event in events)
            known_id = id.partition(AGAIN)[0]
            if known_id.startswith(CONTENT_ID):  # an earlier version may have derived it otherwise
                known_id = content_id(pieces)
            self._add_known(_SyncedMessage(known_id, places, is_inserted, content))
        self._count = count
        self._next = session.inspect.state.next

    def _current(self, said: Said, original: Message) -> Message:
        """A recorded message, as far as a framework has corrected it."""
        inspect = self.session.inspect
        line = inspect.state.corrected.get(said.at)
        edit = inspect.event(line.at) if line is not None else None
        if line is None or not isinstance(edit, Replaced) or edit.why != CORRECTION:
            return original
        self._known_at[line.at] = len(self._known)
        return with_original_ids(inspect.message(line))

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

    def record(
        self, messages: Sequence[Passed[M]], *, is_request: bool = False, keeps_objects: bool = False
    ) -> None:
        """Records what follows the newest known message, and forgets the objects unless a request follows.

        `is_request` says that the messages are a whole request: changed messages are corrected as well, and
        unknown ones between known ones are recorded.
        """
        with self.lock:
            self._sync(messages, is_request=is_request)
            if not keeps_objects:
                self.forget_objects()

    def forget_objects(self) -> None:
        """Lets the framework's messages be collected. The next sync reads them again."""
        self._last = _PassedMessages()

    def continues(self, messages: Sequence[Passed[M]], *, may_be_trimmed: bool = False) -> bool:
        """True if the messages begin with all that is known, or at least end with it."""
        with self.lock:
            self._catch_up()
            known = self._known_ids()
            passed = [message.id for message in self._parse(own(messages), self._last.recorded)]
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
            return self._parse([message], [])[0].id in self._times

    def _known_ids(self) -> list[str]:
        return [self._known[n].id for n in self._sequence]

    def _parse(self, messages: Sequence[M], last: list[_ParsedMessage]) -> list[_ParsedMessage]:
        """Messages that say the same as the last ones at the same position are not parsed again."""
        fields = _fields(messages)
        same = common_prefix([one.fields for one in last], fields)
        parsed = last[:same]
        for n in range(same, len(messages)):
            if n < len(last) and last[n].fields == fields[n]:
                parsed.append(last[n])
                continue
            message = self._converter.parse(messages[n])
            pieces = split(message)
            known_id = message.id or content_id(pieces)
            own_fields = fields[n]
            if not isinstance(own_fields, int):
                own_fields = dict(own_fields)
            content = _content_hash(pieces)
            parsed.append(_ParsedMessage(messages[n], own_fields, message, known_id, content))
        return parsed

    def _sync(self, messages: Sequence[Passed[M]], *, is_request: bool) -> dict[int, int]:
        """Records what is new, and returns the position of each known message among the passed ones."""
        self._catch_up()
        recorded = self._parse(own(messages), self._last.recorded)
        sent = recorded
        if Overridden in set(map(type, messages)):
            sent = self._parse([shown(message) for message in messages], self._last.sent)
        if self._goes_on(recorded, sent):
            positions = self._last.positions
            last = len(self._last.recorded) - 1
            new = [*range(last + 1, len(recorded))]
        else:
            places = self._align([message.id for message in recorded])
            positions = {place: n for n, place in enumerate(places) if place is not None}
            last = max(positions.values(), default=-1)
            if is_request:
                self._correct_changed(sent, positions)
            new = [n for n, place in enumerate(places) if place is None and (is_request or n > last)]
        if new:
            known = self._append([recorded[n] for n in new], [n < last for n in new])
            appended = dict(zip(known, new, strict=True))
            self._correct_changed(sent, appended)
            positions = positions | appended
        self._last = _PassedMessages(recorded, sent, positions, len(self._known))
        return positions

    def _goes_on(self, recorded: list[_ParsedMessage], sent: list[_ParsedMessage]) -> bool:
        """True if all messages of the last sync are recorded, and new ones follow, as in most calls."""
        last = self._last
        count = len(last.recorded)
        if not len(last.positions) == count > 0 or last.known_count != len(self._known):
            return False
        if recorded[:count] != last.recorded or sent[:count] != last.sent:
            return False
        return not any(message.id in self._inserted for message in recorded[count:])

    def _align(self, ids: Sequence[str]) -> list[int | None]:
        """The known message that each passed one is, in a fork if the past was changed."""
        keep, places = self._places(ids)
        for _ in range(MOST_ATTEMPTS):
            if keep is not None:
                self._branch(keep)
                keep, places = self._places(ids)
        return places

    def _places(self, ids: Sequence[str]) -> tuple[int | None, list[int | None]]:
        """How many known messages still hold, None for all, and the known message that each passed one is."""
        in_sequence = [n for n, id in enumerate(ids) if id not in self._inserted]
        alignment = align(self._known_ids(), [ids[n] for n in in_sequence])
        places = [self._inserted.get(id) for id in ids]
        for n, at in zip(in_sequence, alignment.places, strict=False):
            places[n] = None if at is None else self._sequence[at]
        if alignment.keep == len(self._sequence):
            return None, places
        return self._sequence[alignment.keep - 1] + 1, places

    # Writing to the record

    def _append(self, passed: Sequence[_ParsedMessage], is_inserted: Sequence[bool]) -> range:
        """Records new messages; returns their indices among the known ones."""
        times: dict[str, int] = {}
        messages: list[Message] = []
        for one in passed:
            before = times.get(one.id, self._times.get(one.id, 0))
            times[one.id] = before + 1
            unique_id = f"{one.id}{AGAIN}{before}" if before else one.id
            messages.append(msgspec.structs.replace(one.message, id=unique_id))
        taken = self.session.intake().take(messages)
        stops = [*taken.first[1:], len(taken.drafts)]
        drafts: list[Draft] = []
        for inserted, start, stop in zip(is_inserted, taken.first, stops, strict=True):
            tags = (ADAPTER_TAG, INSERTED_TAG) if inserted else (ADAPTER_TAG,)
            drafts += [msgspec.structs.replace(draft, tags=tags) for draft in taken.drafts[start:stop]]
        places = self.session.say(drafts)
        first = len(self._known)
        for one, inserted, start, stop in zip(passed, is_inserted, taken.first, stops, strict=True):
            self._add_known(_SyncedMessage(one.id, tuple(places[start:stop]), inserted, one.content))
        self._count += len(places)
        state = self.session.inspect.state
        if state.index == self._count:  # otherwise other writers appended, too
            self._next = state.next
        return range(first, len(self._known))

    def _correct_changed(self, sent: Sequence[_ParsedMessage], positions: dict[int, int]) -> None:
        """Shows what the framework sends now in the places of recorded messages."""
        for index, n in positions.items():
            known = self._known[index]
            if known.content == sent[n].content:
                continue
            known.content = sent[n].content
            pieces = split(sent[n].message)
            try:
                if len(pieces) != len(known.places):
                    raise MessageError("message", "has other parts")
                for place, piece in zip(known.places, pieces, strict=True):
                    edit_at = self._correct(place, msgspec.structs.replace(piece, id=None))
                    self._known_at[edit_at] = index
            except (NotFoundError, ConflictError):  # it is hidden together with other messages
                pass
            except MessageError:  # it makes or answers other calls
                known.is_uncorrectable = True

    def _correct(self, place: int, message: Message) -> int:
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


def own(messages: Sequence[Passed[M]]) -> Sequence[M]:
    if Overridden not in set(map(type, messages)):
        return cast(Sequence[M], messages)
    return [message.own if isinstance(message, Overridden) else message for message in messages]


def shown(message: Passed[M]) -> M:
    return message.shown if isinstance(message, Overridden) else message


def _fields(messages: Sequence[Any]) -> list[Fields]:
    kinds = set(map(type, messages))
    if all(issubclass(kind, dict) for kind in kinds):
        return list(messages)
    if any(issubclass(kind, tuple) for kind in kinds):
        return list(map(id, messages))
    return list(map(vars, messages))


def _content_hash(pieces: Iterable[Message]) -> int:
    return hash(tuple(codec.dumps(piece.parts) for piece in pieces))
