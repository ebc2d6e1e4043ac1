"""Conversations of a framework that keeps its own history: recorded, and fitted for its models.

The framework passes its whole history again and again. New messages are appended to the record, changed ones
become corrections, and a changed past continues in a fork. What is sent to the model are the framework's own
objects, wherever the view shows them unchanged.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec

from refold.adapters.branches import Branches
from refold.config.config import Source, load_config
from refold.core import codec
from refold.core.draft import PART, Draft, split
from refold.core.errors import ConflictError, MessageError, NotFoundError
from refold.core.event import Line, Replaced, Said
from refold.core.expiry import EXPAND, OWN_TOOLS
from refold.core.message import Message, Text, ToolResult
from refold.core.pairing import (
    NO_RESULT,
    MissingResult,
    OrphanResult,
    Slot,
    original_id,
    repair_pairs,
    with_original_ids,
)
from refold.session.api import DEFAULT_STORE
from refold.session.api import open as open_session
from refold.session.history_sync import (
    CONTENT_ID,
    align,
    are_same,
    common_prefix,
    content_id,
    insert_transient,
    match_request,
)
from refold.session.session import Session
from refold.session.tools import declared
from refold.stores.store import Store, open_store

M = TypeVar("M")
MAX_OPEN_CONVERSATIONS = 500
WARM_CONVERSATIONS = 8
"""The newest of them, whose message objects are remembered between requests."""
DIALECT = "openai-chat"
"""Requests are counted and checked in this dialect, whatever the framework makes of them."""
AGAIN = "\u241e"
"""Separates the id of a repeated message from its number; no id of a framework contains it."""
ADAPTER_TAG = "adapter"
INSERTED_TAG = "adapter:beside"
"""Tags messages that a framework inserted before messages that were recorded earlier."""
CORRECTION = "changed there"
"""The reason that is stored with corrections."""
MOST_ATTEMPTS = 5
"""How often a history is aligned again if other writers win the race for a branch."""


class Converter(Protocol[M]):
    """Converts between a framework's messages and ours."""

    def parse(self, message: M, /) -> Message:
        """With an id, if the framework has one."""

    def render(self, message: Message, original: M | None, /) -> M:
        """The framework's form of a message, which replaces `original` if there is one.

        It has all that the original has besides the content; the original is not modified.
        """


class ModelCall(NamedTuple):
    """What a framework is about to send to a model besides the messages."""

    system: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    """Declarations in the form of OpenAI's chat completions."""
    model: str | None = None
    max_output: int | None = None
    """Tokens."""

    @property
    def request(self) -> dict[str, Any]:
        fields = {"system": self.system, "tools": list(self.tools), "max_completion_tokens": self.max_output}
        return {name: value for name, value in fields.items() if value}


class RequestMatch(NamedTuple, Generic[M]):
    """One request to a model, compared with the history that it was made from.

    Other middleware may have changed messages, left some out, or inserted some: what was changed is recorded
    as the history has it, and what was inserted is sent with this request only.
    """

    history: Sequence[M]
    request: Sequence[M]
    positions: Sequence[int | None]
    """Of each message of the history in the request; None if it was left out."""
    transient: Mapping[int, M]
    """Messages of this request only, by position."""

    @property
    def sent(self) -> Sequence[M]:
        """The history as the request has it."""
        sent = list(self.history)
        for n, position in enumerate(self.positions):
            if position is not None:
                sent[n] = self.request[position]
        return sent

    @classmethod
    def of(
        cls,
        history: Sequence[M],
        request: Sequence[M],
        key: Callable[[M], Hashable],
        is_recorded: Callable[[M], bool] = lambda message: True,
    ) -> "RequestMatch[M]":
        """`key` tells which messages are the same, whatever was changed in them.

        Messages of the request that are not `is_recorded` belong to this request only.
        """
        if are_same(history, request) or history == request:
            return cls(history, request, range(len(request)), {})
        candidates = [n for n, message in enumerate(request) if is_recorded(message)]
        matches = match_request([*map(key, history)], [key(request[n]) for n in candidates])
        position_of = {at: candidates[n] for n, at in matches.items()}
        known = set(position_of.values())
        transient = {n: message for n, message in enumerate(request) if n not in known}
        return cls(history, request, [*map(position_of.get, range(len(history)))], transient)


Fields: TypeAlias = Mapping[str, Any] | tuple[Any, ...]
"""What can be replaced in a message of a framework."""


class _ParsedMessage(NamedTuple):
    """A message that was passed, and what it says."""

    fields: Fields
    """A copy: another object with equal fields says the same."""
    message: Message
    id: str
    content: int


@dataclass(slots=True)
class _KnownMessage:
    """A message of the framework that is recorded."""

    id: str
    places: tuple[int, ...]
    """More than one, since each tool result has a place of its own."""
    is_inserted: bool
    """It stands before messages that were recorded earlier, as a framework's own summary does."""
    content: int = 0
    """A hash of the content, as corrected."""
    is_uncorrectable: bool = False
    """The framework has changed it, and the record cannot: it is shown whole or not at all."""


class AdapterConversation(Generic[M]):
    """The record of a framework's conversation, and what is known of it. Safe to use from threads."""

    def __init__(
        self,
        converter: Converter[M],
        name: str,
        open_session: Callable[[str], Session],
        *,
        has_fixed_model: bool = False,
    ) -> None:
        """With a fixed model, which the adapter was given, the framework's does not replace it."""
        self.lock = RLock()
        self._converter = converter
        self._has_fixed_model = has_fixed_model
        self._open_branches = partial(Branches, name, open_session)
        self._branches: Branches | None = None
        self.forget_objects()

    @property
    def session(self) -> Session:
        """Opened when it is first needed, so that other conversations do not wait for it."""
        with self.lock:
            return self._opened().newest

    def _opened(self) -> Branches:
        if self._branches is None:
            self._branches = self._open_branches()
            self._read_anew()
        return self._branches

    def _read_anew(self) -> None:
        self._known: list[_KnownMessage] = []
        self._known_at: dict[int, int] = {}
        """The known message that each place belongs to."""
        self._next = 0
        self._epoch = self.session.inspect.epoch
        self._catch_up()

    def _catch_up(self) -> None:
        """Reads what was appended; begins anew if the conversation was erased."""
        self.session.get_count()  # which reads what other processes appended
        inspect = self.session.inspect
        if inspect.epoch is not self._epoch:
            self._branches = None
            self._opened()
            return
        if inspect.state.next == self._next:
            return
        groups: dict[tuple[str, bool], list[Said]] = {}
        for event in inspect.events(self._next):
            if isinstance(event, Said) and ADAPTER_TAG in event.tags and event.at not in self._known_at:
                id = str(event.message.id).partition(PART)[0]
                groups.setdefault((id, INSERTED_TAG in event.tags), []).append(event)
        self._next = inspect.state.next
        for (id, is_inserted), events in groups.items():
            pieces = [with_original_ids(event.message) for event in events]
            id = id.partition(AGAIN)[0]
            if id.startswith(CONTENT_ID):  # an earlier version may have derived it otherwise
                id = content_id(pieces)
            known = _KnownMessage(id, tuple(event.at for event in events), is_inserted)
            index = self._add_known(known)
            for n, place in enumerate(known.places):
                line = inspect.state.corrected.get(place)
                edit = inspect.event(line.at) if line is not None else None
                if line is not None and isinstance(edit, Replaced) and edit.why == CORRECTION:
                    self._known_at[line.at] = index
                    pieces[n] = with_original_ids(inspect.message(line))
            known.content = _content_hash(pieces)

    def _add_known(self, message: _KnownMessage) -> int:
        index = len(self._known)
        self._known.append(message)
        self._known_at.update(dict.fromkeys(message.places, index))
        return index

    # What a framework passes

    def record(self, messages: Sequence[M], *, sent: Sequence[M] | None = None) -> None:
        """Records what follows the newest known message, and forgets the framework's objects.

        With `sent`, the messages as a whole request had them, changed messages are corrected as well, and
        unknown ones between known ones are recorded.
        """
        with self.lock:
            self._sync(messages, sent)
            self.forget_objects()

    def forget_objects(self) -> None:
        """Lets the framework's messages be collected. The next sync reads them again."""
        self._parsed: list[_ParsedMessage] = []

    def continues(self, messages: Sequence[M], *, may_be_trimmed: bool = False) -> bool:
        """True if the messages begin with all that is known, or at least end with it."""
        with self.lock:
            self._catch_up()
            known = [message.id for message in self._known if not message.is_inserted]
            passed = [message.id for message in self._parse(messages, self._parsed)]
            if passed[: len(known)] == known:
                return True
            alignment = align(known, passed)
            is_trimmed = alignment.keep == len(known) and any(at is not None for at in alignment.places)
            return may_be_trimmed and is_trimmed

    def knows(self, message: M) -> bool:
        """True if a message with this content, or with its id, is recorded."""
        with self.lock:
            self._catch_up()
            id = self._parse([message], [])[0].id
            return any(known.id == id for known in self._known)

    def _parse(self, messages: Sequence[M], last: list[_ParsedMessage]) -> list[_ParsedMessage]:
        """Messages that say the same as the last ones at the same position are not parsed again."""
        fields = [*map(_fields, messages)]
        same = common_prefix([one.fields for one in last], fields)
        parsed = last[:same]
        for n in range(same, len(messages)):
            if n < len(last) and last[n].fields == fields[n]:
                parsed.append(last[n])
                continue
            message = self._converter.parse(messages[n])
            pieces = split(message)
            id = message.id or content_id(pieces)
            parsed.append(_ParsedMessage(_copy(fields[n]), message, id, _content_hash(pieces)))
        return parsed

    def _sync(self, history: Sequence[M], sent: Sequence[M] | None) -> dict[int, int]:
        """Records what is new, and returns the position of each known message in the history."""
        self._catch_up()
        self._parsed = self._parse(history, self._parsed)
        places = self._align([message.id for message in self._parsed])
        positions = {known: n for n, known in enumerate(places) if known is not None}
        last = max(positions.values(), default=-1)
        new = [n for n, known in enumerate(places) if known is None and (sent is not None or n > last)]
        if new:
            known = self._append([self._parsed[n] for n in new], [n < last for n in new])
            positions.update(zip(known, new, strict=True))
        if sent is not None:
            is_same = are_same(history, sent)
            parsed = self._parsed if is_same else self._parse(sent, self._parsed)
            self._correct_changed(parsed, positions)
        return positions

    def _align(self, ids: Sequence[str]) -> list[int | None]:
        """The known message that each passed one is, in a fork if the past was changed."""
        for _ in range(MOST_ATTEMPTS):
            inserted = {message.id: n for n, message in enumerate(self._known) if message.is_inserted}
            in_order = [n for n, message in enumerate(self._known) if not message.is_inserted]
            passed = [n for n, id in enumerate(ids) if id not in inserted]
            alignment = align([self._known[n].id for n in in_order], [ids[n] for n in passed])
            if alignment.keep == len(in_order):
                places = [inserted.get(id) for id in ids]
                for n, at in zip(passed, alignment.places, strict=False):
                    if at is not None:
                        places[n] = in_order[at]
                return places
            last = self._known[in_order[alignment.keep - 1]]
            self._opened().fork(max(last.places))
            self._read_anew()
        raise ConflictError(f"Other writers change {self.session.conversation!r} at the same time; try again")

    # Writing to the record

    def _append(self, passed: Sequence[_ParsedMessage], is_inserted: Sequence[bool]) -> range:
        """Records new messages; returns their indices among the known ones."""
        times = Counter(message.id for message in self._known)
        messages: list[Message] = []
        for one in passed:
            unique_id = f"{one.id}{AGAIN}{times[one.id]}" if times[one.id] else one.id
            times[one.id] += 1
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
            self._add_known(_KnownMessage(one.id, tuple(places[start:stop]), inserted, one.content))
        if places[0] == self._next:  # otherwise other writers appended, too
            self._next = places[-1] + 1
        return range(first, len(self._known))

    def _correct_changed(self, sent: Sequence[_ParsedMessage], positions: Mapping[int, int]) -> None:
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

    # What the model sees

    def fit(self, history: Sequence[M], call: ModelCall, sent: Sequence[M] | None = None) -> list[M]:
        """Records what is new in a history, and returns the messages to send.

        Raises:
            OverBudgetError: what must be shown is larger than the model's window.
        """
        sent = history if sent is None else sent
        return self.fit_request(RequestMatch(history, sent, range(len(sent)), {}), call)

    def fit_request(self, match: RequestMatch[M], call: ModelCall) -> list[M]:
        """The same for a request that was compared with its history.

        Messages that are unchanged are the request's own objects. Transient messages are sent before the
        message that followed them, and are counted as system text.
        """
        texts = [call.system, *(self._converter.parse(one).text for one in match.transient.values())]
        call = call._replace(system="\n\n".join(filter(None, texts)) or None)
        names = {tool["function"]["name"] for tool in call.tools if "function" in tool}
        messages: list[M] = []
        positions: list[int | None] = []
        with self.lock:
            sent = match.sent
            history_index = self._sync(match.history, sent)
            prepare_session(self.session, None if self._has_fixed_model else call.model, names)
            self.session.fit(dialect=DIALECT, request=call.request)
            for known, group in groupby(self._shown_slots(), lambda pair: pair[0]):
                slots = [slot for _, slot in group]
                if known is None:
                    messages += [self._converter.render(self._message(slot), None) for slot in slots]
                    positions += [None] * len(slots)
                    continue
                n = history_index.get(known)
                messages.append(self._shown(known, slots, None if n is None else sent[n]))
                positions.append(None if n is None else match.positions[n])
        return insert_transient(messages, positions, match.transient)

    def call(self, tool: str, arguments: Any) -> str:
        """The result of a call of refold_expand or refold_search."""
        return self.session.call(tool, arguments)

    async def acall(self, tool: str, arguments: Any) -> str:
        return await asyncio.to_thread(self.call, tool, arguments)

    def _shown_slots(self) -> Iterator[tuple[int | None, Slot]]:
        """The view in order, every call with its result, and the known message of which each is a part."""
        lines: list[Line] = []
        known_of: dict[tuple[int, int], int | None] = {}
        for item in self.session.inspect.items:
            covered = {self._known_at[at] for at in item.span if at in self._known_at}
            known = covered.pop() if len(covered) == 1 else None
            for line in item.lines:
                if not line.apart:
                    lines.append(line)
                    known_of[line.at, line.n] = known
        for slot in repair_pairs(lines)[0]:
            yield known_of[slot.at, slot.n] if isinstance(slot, Line) else None, slot

    def _message(self, slot: Slot) -> Message:
        """With the ids of calls as the framework has them."""
        match slot:
            case MissingResult():
                result = ToolResult(original_id(slot.call), NO_RESULT, slot.tool or None, is_error=True)
                return Message("tool", (result,))
            case OrphanResult():
                text = self.session.inspect.message(slot.line).text
                return Message("user", (Text(f"[refold: a result without its call]\n{text}"),))
        return with_original_ids(self.session.inspect.message(slot))

    def _shown(self, known: int, slots: Sequence[Slot], sent: M | None) -> M:
        """One message of the framework: the sent object if all of it is shown unchanged."""
        message = self._known[known]
        recorded = [slot for slot in slots if isinstance(slot, Line) and slot.at in self._known_at]
        is_whole = len(recorded) == len(slots) and [slot.place for slot in recorded] == [*message.places]
        if sent is not None and (is_whole or message.is_uncorrectable):
            return sent
        pieces = [self._message(slot) for slot in slots]
        first = pieces[0]
        is_mixed = any(piece.role != first.role for piece in pieces)
        role = "user" if is_mixed else first.role
        parts = [part for piece in pieces for part in piece.parts]
        merged = msgspec.structs.replace(first, role=role, parts=tuple(parts), id=None)
        return self._converter.render(merged, sent)


def _fields(message: Any) -> Fields:
    return message if isinstance(message, dict | tuple) else vars(message)


def _copy(fields: Any) -> Any:
    if isinstance(fields, dict):
        return dict(fields)
    return tuple(map(_copy, fields)) if isinstance(fields, tuple) else fields


def _content_hash(pieces: Iterable[Message]) -> int:
    return hash(tuple(codec.dumps(piece.parts) for piece in pieces))


# All conversations of an adapter


class AdapterOptions(TypedDict, total=False):
    """Keyword arguments of every adapter, with the meaning that they have in `refold.open`."""

    store: str | Store | None
    model: str | None
    """Replaces the framework's own name of the model."""
    config: Source
    agent: str | None


class AdapterConversations(Generic[M]):
    """All conversations of one adapter, by the framework's names for them. Safe to use from threads."""

    def __init__(self, converter: Converter[M], **options: Unpack[AdapterOptions]) -> None:
        settings = load_config(options.get("config"))
        self.store = open_adapter_store(options.get("store"), settings.store)
        self._converter = converter
        self._options: dict[str, Any] = {**options, "config": settings, "store": self.store}
        self._open: OrderedDict[tuple[str, str | None], AdapterConversation[M]] = OrderedDict()
        self._lock = RLock()

    def get(self, name: str, owner: str | None = None) -> AdapterConversation[M]:
        """Opens it, if necessary, when it is first used."""
        key = (name, owner)
        with self._lock:
            if key not in self._open:
                opened = partial(open_session, owner=owner, **self._options)
                has_model = self._options.get("model") is not None
                self._open[key] = AdapterConversation(
                    self._converter, name, opened, has_fixed_model=has_model
                )
            self._open.move_to_end(key)
            for cold in [*islice(reversed(self._open), WARM_CONVERSATIONS, WARM_CONVERSATIONS + 1)]:
                self._open[cold].forget_objects()
            while len(self._open) > MAX_OPEN_CONVERSATIONS:
                self._open.popitem(last=False)  # everything it knows is recorded
            return self._open[key]


def open_adapter_store(store: str | Store | None, configured: str | None) -> Store:
    chosen = store if store is not None else configured or DEFAULT_STORE
    return open_store(chosen) if isinstance(chosen, str) else chosen


def prepare_session(session: Session, model: str | None, tool_names: set[str]) -> None:
    """Before a fit: sets the model, and shows handles only if the model is offered refold_expand."""
    if model is not None and model != session.model:
        session.model = model
    session.shows_handles = session.settings.shows_handles and EXPAND in tool_names


def declare_function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool as `ModelCall.tools` has it."""
    about = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": about}


def lookup_tools() -> list[dict[str, Any]]:
    """refold_expand and refold_search as functions: name, description and parameters of each."""
    return [tool["function"] for tool in declared(DIALECT, sorted(OWN_TOOLS))]
