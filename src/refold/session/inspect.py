"""Reading a conversation: what was recorded, what the model sees of it, and how one became the other.

CLI, HTTP API, MCP server and panel show what an `Inspector` returns. They read nothing below it.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, Self

from msgspec.structs import asdict, replace

from refold.core import codec
from refold.core.cache_cost import Prices
from refold.core.errors import NewerError
from refold.core.event import Event, Line, Replaced, Said, Unknown
from refold.core.live import Live, State
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)
from refold.core.pairing import repair_pairs, with_original_ids
from refold.core.slices import Slice
from refold.core.view import Item, View
from refold.dialects.registry import DIALECTS
from refold.session.explain import edit_row, edit_rows, explain, message_state, pinned_places, replacements
from refold.session.results import (
    Change,
    ComparedView,
    ConversationRow,
    Diff,
    EditRow,
    Explanation,
    ForkPoint,
    RecordedCount,
    ShownItem,
    ShownMessage,
    ShownView,
    StoredMessage,
    ViewTokens,
    error_text,
    kind_of,
    shortened,
    utc,
)
from refold.session.savings import EditSavings, edit_savings
from refold.session.steps import StepHistory
from refold.stores.record import Record, follow
from refold.stores.store import ConversationInfo, Key, Store


class Inspector:
    """Reads one view of one conversation, as of the last `refresh`. It changes nothing.

    For one thread at a time: `Session.locked` gives the inspector of a session that others may use.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._steps: StepHistory | None = None

    @classmethod
    def open(cls, store: Store, key: Key, view: str = "main") -> Self:
        """Reads a conversation that no session is open for.

        Raises:
            CorruptError: what is stored is not what was written.
        """
        return cls(Record(store, key, view, parse))

    def refresh(self) -> None:
        """Reads what was appended since, by any process."""
        self._record.catch_up()

    # The current state

    @property
    def key(self) -> Key:
        return self._record.key

    @property
    def view_name(self) -> str:
        return self._record.view

    @property
    def state(self) -> State:
        """Counts and places: messages and tokens recorded, turn, step, calls without a result."""
        return self._record.live.state

    @property
    def tokens(self) -> int:
        """Tokens of the messages that are shown."""
        return self._record.live.tokens

    @property
    def epoch(self) -> object:
        """Another object once the conversation was erased: what was remembered of it no longer holds."""
        return self._record.live

    @property
    def items(self) -> Sequence[Item]:
        """The view: spans of the record, and the lines that stand for each."""
        return self._record.live.items

    @property
    def pins(self) -> set[int]:
        """Places of the pinned messages."""
        return pinned_places(self.state)

    @property
    def first_digest(self) -> str:
        """Tells this conversation from another that is begun under its id after it was erased."""
        return self._record.digest_before(1)

    def item_at(self, place: int) -> Item | None:
        return self._record.live.item_at(place)

    def conversation(self, listed: ConversationInfo) -> ConversationRow:
        """Its row in a list; `listed` is what the store's own list has of it."""
        state = self.state
        title = state.title
        if not title and state.task is not None:
            title = shortened(self.message(state.task).text)
        updated = None
        if state.next:
            newest = self.event(state.next - 1)
            updated = None if isinstance(newest, Unknown) else utc(newest.time)
        return ConversationRow(
            id=listed.key.conversation,
            owner=listed.key.owner,
            title=title or listed.key.conversation,
            model=state.model,
            created=utc(listed.created),
            updated=updated,
            messages=state.index,
            events=state.next,
            tokens=_view_tokens(self._record.live),
            edits=sum(item.edit is not None for item in self.items),
            compactions=state.round,
            parent=_fork_point(listed),
        )

    # What was recorded

    def event(self, at: int) -> Event:
        """Raises NotFoundError if there is no such place."""
        return self._record.event(at)

    def events(self, start: int = 0, stop: int | None = None) -> Iterator[Event]:
        return self._record.events(start, stop)

    def raw(self, at: int) -> Any:
        """The provider's JSON that a message came as; None if it came otherwise."""
        came = codec.came(self._record.entry(at))
        return came.value if came is not None else None

    def message(self, line: Line) -> Message:
        """The message behind a line of the view."""
        return self._record.message(line)

    def newest_first(self) -> Iterator[Said]:
        """The recorded messages, from the newest backwards."""
        return self._record.backwards()

    def messages(self, start: int = 0, limit: int | None = None) -> Iterator[Said]:
        """The recorded messages by index; a negative start counts from the end."""
        first = from_end(start, self.state.index)
        if first >= self.state.index:
            return iter(())
        events = self._record.events(self._record.place_of(first), self.state.next)
        return islice((event for event in events if isinstance(event, Said)), limit)

    def stored(self, said: Said) -> StoredMessage:
        """A recorded message, and how the view shows it."""
        state, edit_at, tokens = message_state(self._record.live, said.at)
        edit = None if edit_at is None else self.event(edit_at)
        line = said.line
        return StoredMessage(
            message=with_original_ids(said.message),
            at=line.at,
            index=said.index,
            id=said.message.id or f"m{line.at}",
            conversation=self.key.conversation,
            tokens=line.tokens,
            turn=line.turn,
            step=line.step,
            timestamp=datetime.fromtimestamp(said.time, UTC),
            tags=said.tags,
            kind=kind_of(said),
            tools=line.tools,
            expiry=said.expiry,
            edit=edit_at,
            is_expired=isinstance(edit, Replaced) and edit.kind == "expire",
            shown_tokens=0 if edit is None else tokens,
            keeps_original=edit is None or not self._record.live.is_withheld(said.at),
            shown=state,
            is_pinned=said.at in self.pins,
        )

    def place_of(self, index: int) -> int:
        """The place of the message with an index; messages are counted from 0."""
        return self._record.place_of(index)

    # What is shown

    def view(self, at: int | None = None, start: int = 0, limit: int | None = None) -> ShownView:
        """What the model sees now, or saw right after the event at a place; all items, or some of them.

        Raises:
            NotFoundError: there is no such place.
        """
        record = self._record
        live = record.live if at is None else record.as_of(at)
        first = from_end(start, len(live.items))
        stop = None if limit is None else first + limit
        items = record.with_words(View(tuple(live.items[first:stop]))).items
        notices: Sequence[str] = ()
        if first == 0 and stop is None:
            notices = repair_pairs([line for item in items for line in item.lines])[1]
        return ShownView(
            conversation=self.key.conversation,
            owner=self.key.owner,
            view=self.view_name,
            at=at,
            tokens=_view_tokens(live),
            recorded_messages=live.state.index,
            items=tuple(self._shown_item(item, live.state) for item in items),
            total_items=len(live.items),
            next=live.state.next,
            notices=tuple(notices),
        )

    def _shown_item(self, item: Item, state: State) -> ShownItem:
        edit = None if item.edit is None else self.event(item.edit)
        assert edit is None or isinstance(edit, Replaced)
        pinned = pinned_places(state)
        shown = []
        for line in item.lines:
            at = line.place
            kind = "" if line.corrects is None else "correct"
            if edit is not None and len(item.span) == len(item.lines) == 1 and at == edit.at:
                at = item.span.start
                kind = edit.kind
            message = _shown_message(
                line,
                item.words(line),
                at=at,
                edit=None if line.at in item.span else line.at,
                kind=kind,
                is_task=state.task is not None and line.place == state.task.at,
                is_pinned=line.place in pinned,
            )
            shown.append(message)
        recorded = self._recorded_in(item)
        whole = sum(one.edit is None for one in shown)
        reduced = sum(bool(one.kind) for one in shown)
        return ShownItem(
            span=item.span,
            edit=None if edit is None else edit_row(edit),
            recorded=recorded,
            tokens=item.tokens,
            whole=whole,
            reduced=reduced,
            hidden=recorded.messages - whole - reduced,
            shown=tuple(shown),
        )

    def _recorded_in(self, item: Item) -> RecordedCount:
        """Each message knows how many were recorded up to it, and with how many tokens."""
        if item.edit is None and item.lines:
            return RecordedCount(1, item.lines[0].tokens)
        state = self.state
        first = self._record.said_from(item.span.start)
        after = self._record.said_from(item.span.end)
        if first is None:
            return RecordedCount(0, 0)
        messages = state.index if after is None else after.index
        tokens = state.total if after is None else after.total - after.line.tokens
        return RecordedCount(messages - first.index, tokens - first.total + first.line.tokens)

    def edits(self, start: int = 0, limit: int | None = None) -> tuple[list[EditRow], int]:
        """The edits of the view, the oldest first, including those that were taken back; and how many."""
        places = [edit.at for edit in replacements(self._record)]
        first = from_end(start, len(places))
        stop = None if limit is None else first + limit
        return edit_rows(self._record, places[first:stop]), len(places)

    def explain(self, at: int) -> Explanation:
        """Raises NotFoundError if there is no message and no edit at the place."""
        return explain(self._record, at)

    def savings(self, prices: Prices | None) -> list[EditSavings]:
        return list(edit_savings(self.events(), self.view_name, prices))

    @property
    def steps(self) -> StepHistory:
        """What the model saw at each of its calls."""
        if self._steps is None or not self._steps.follows(self._record):
            self._steps = StepHistory(self._record)
        self._steps.catch_up(self._record)
        return self._steps

    def expand_within(self, at: int | str, part: Slice, max_chars: int) -> str:
        """As much of the text behind a place as there is room for, and how to get the rest."""
        from refold.session.expand import source
        from refold.session.tools import within

        return within(source(self._record, at), part, max_chars, len, "")

    # Two views side by side

    def diff(self, other: "Inspector", at: int | None, to: int | None) -> Diff:
        """Compares this view, now or right after an event, with another view, or with itself at another time.

        Raises:
            NotFoundError: there is no such place.
        """
        shared = None if other is self else self._shared_events(other)
        before = self.view(at).shown
        after = other.view(to).shown
        keys_before = [_identity(one, shared) for one in before]
        keys_after = [_identity(one, shared) for one in after]
        matcher = SequenceMatcher(None, keys_before, keys_after, autojunk=False)
        changes = list[Change]()
        for tag, i, j, k, m in matcher.get_opcodes():
            if tag == "equal":
                changes += [Change(sign=" ", **asdict(message)) for message in after[k:m]]
            else:
                changes += [Change(sign="-", **asdict(message)) for message in before[i:j]]
                changes += [Change(sign="+", **asdict(message)) for message in after[k:m]]
        old = self._compared(at, before, shared)
        new = other._compared(to, after, shared)
        return Diff(old, new, tuple(changes), None if shared is None else shared - 1)

    def _shared_events(self, other: "Inspector") -> int:
        """How many events two conversations share: the digest of an event stands for all before it."""
        low = 0
        high = min(self.state.next, other.state.next)
        while low < high:
            middle = (low + high + 1) // 2
            if self._record.digest_before(middle) == other._record.digest_before(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _compared(self, at: int | None, shown: Sequence[ShownMessage], shared: int | None) -> ComparedView:
        since = []
        if shared is not None:
            stop = None if at is None else self._record.end_of(at)
            events = self._record.events(shared, stop)
            since = [
                _shown_message(one.line, one.message, at=one.at) for one in events if isinstance(one, Said)
            ]
        tokens = sum(one.tokens for one in shown)
        return ComparedView(self.key.conversation, self.view_name, at, len(shown), tokens, tuple(since))


def conversation_row(store: Store, listed: ConversationInfo) -> ConversationRow:
    """The row of any conversation in a store's list. If it is damaged, the row says so."""
    try:
        return Inspector.open(store, listed.key).conversation(listed)
    except Exception as error:  # the other rows are still worth seeing
        return ConversationRow(
            id=listed.key.conversation,
            owner=listed.key.owner,
            title=listed.key.conversation,
            created=utc(listed.created),
            events=listed.next,
            parent=_fork_point(listed),
            problem=error_text(error),
        )


def follow_links(store: Store, key: Key, start: int) -> Iterator[codec.Link]:
    """The stored events from a place on, and then whatever any process appends, until it is erased."""
    return (link for link in follow(store, key, start) if link is not None)


def from_end(start: int, total: int) -> int:
    """A start that counts from the end if it is negative."""
    return start if start >= 0 else max(0, total + start)


def _fork_point(listed: ConversationInfo) -> ForkPoint | None:
    if listed.parent is None:
        return None
    return ForkPoint(listed.parent.conversation, listed.fork_at - 1)


def _view_tokens(live: Live) -> ViewTokens:
    recorded = live.state.total
    saved = 0.0
    if recorded:
        saved = round(max(0.0, 1 - live.tokens / recorded), 4)
    return ViewTokens(recorded, live.tokens, saved)


def _shown_message(line: Line, message: Message, **facts: Any) -> ShownMessage:
    return ShownMessage(
        role=line.role,
        tokens=line.tokens,
        turn=line.turn,
        step=line.step,
        tools=line.tools,
        n=line.n,
        is_summary=line.summary,
        message=message,
        **facts,
    )


def _identity(shown: ShownMessage, shared: int | None) -> tuple[object, ...]:
    """What makes two messages the same: their place, or their content after two conversations parted."""
    place = shown.at if shown.edit is None else shown.edit
    if shared is None or place < shared:
        return (place, shown.n)
    message = shown.message
    return (message.role, codec.dumps(Message(message.role, message.parts, name=message.name)))


def shorten_texts(message: Message, chars: int) -> Message:
    """The message for a list: longer texts are cut and end in …, and the data of media are left out."""
    return replace(message, parts=tuple(_shorten(part, chars) for part in message.parts), meta=None)


def _shorten(part: Part, chars: int) -> Part:
    match part:
        case Text() | Reasoning():
            return replace(part, text=_cut(part.text, chars))
        case CompactionMarker():
            return CompactionMarker(_cut(part.text, chars))
        case ToolCall():
            return replace(part, input=_cut(part.input, chars))
        case ToolResult(output=str(text)):
            return replace(part, output=_cut(text, chars))
        case ToolResult(output=tuple(inner)):
            return replace(part, output=tuple(_shorten(one, chars) for one in inner))
        case Media():
            return Media(part.kind, mime=part.mime, name=part.name)
        case Opaque(value=value):
            return Opaque({"type": value.get("type")} if isinstance(value, dict) else None, part.dialect)
    return part


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}…"


def parse(dialect: str, value: Any) -> Message:
    """Raises NewerError if only a newer refold knows this dialect."""
    if dialect not in DIALECTS:
        raise NewerError(f"A stored message has the dialect {dialect!r}; upgrade refold to read it")
    return DIALECTS[dialect].parse(value)
