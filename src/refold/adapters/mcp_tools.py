"""The MCP tools and resources: a plain function for each, run in a thread, that returns JSON or text."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, dropwhile, islice
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from pydantic import BeforeValidator, Field

from refold.config.config import Config
from refold.core.codec import dumps
from refold.core.draft import part_id
from refold.core.errors import MessageError, NotFoundError
from refold.core.event import Line
from refold.core.message import Message
from refold.core.slices import slice_of
from refold.session.expand import written
from refold.session.inspect import conversation_row
from refold.session.results import Hit, ShownItem, ShownMessage
from refold.session.search import search
from refold.session.session import Session
from refold.session.validate import require_name
from refold.stores.store import ConversationInfo, Key, Store

OPEN_SESSIONS = 64
LIST_ROWS = 100
CACHED_ROWS = 10_000
MAX_ANSWER_CHARS = 100_000
TEXT_CHARS = 2_000
"""Longer texts are cut in lists; `expand` returns all of a text."""
NOTE_CHARS = 2_000
"""Reserved for the note that says how to get the rest."""
MAX_MESSAGES = 2_000
"""Messages or items that are read for one answer: it never has room for more."""


def _to_text(given: Any) -> Any:
    """Accepts a range as text, as a number or as a pair: [40, 50] becomes 40:50."""
    match given:
        case None:
            return ""
        case int() if not isinstance(given, bool):
            return str(given)
        case [int(), int() | None]:
            return ":".join("" if end is None else str(end) for end in given)
    return given


def _to_place(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    number = given.strip().removeprefix("#")
    digits = number.removeprefix("-")
    return int(number) if digits.isascii() and digits.isdigit() else given


AS_TEXT = BeforeValidator(_to_text)
AS_PLACE = BeforeValidator(_to_place)
ConversationId = Annotated[str, Field(description="The id of the conversation, from list_conversations")]
Place = Annotated[int, AS_PLACE, Field(description="The place of a message or an edit")]
PlaceOrId = Annotated[
    int | str,
    AS_PLACE,
    Field(description="The place of a message or an edit, a message's id, or -1 for the newest message"),
]
ViewTime = Annotated[
    int | None, AS_PLACE, Field(description="Show the view as it was right after this event; default: now")
]
UndoPlace = Annotated[
    int | None,
    AS_PLACE,
    Field(description="The place of an edit, a pin, an undo or a hidden message; default: the newest edit"),
]
After = Annotated[str, AS_TEXT, Field(description="To continue a list: the last id of the previous one")]
SearchIn = Annotated[str, AS_TEXT, Field(description="The id of a conversation; default: search all")]
Lines = Annotated[str, AS_TEXT, Field(description="Only these lines, counted from 1, such as 40-50")]
Items = Annotated[
    str, AS_TEXT, Field(description="Only these items of a list or rows of a table, such as 1-5")
]
Chars = Annotated[str, AS_TEXT, Field(description="Only these characters, counted from 0, such as 0-2000")]
Match = Annotated[str, AS_TEXT, Field(description="Only lines with this text, or /a regular expression/")]
SearchText = Annotated[str, Field(description='Words, "a phrase", prefix*, tool:NAME, role:user')]
Limit = Annotated[int, Field(description="The largest number of results, from 1 to 1000")]
Messages = Annotated[
    list[dict[str, Any]],
    Field(
        description="In order, each in the format of OpenAI, Anthropic or the AI SDK, such as"
        ' {"role": "user", "content": "Hello"}; a message with an "id" is stored once'
    ),
]


class Tools:
    """The tools for one owner: other owners' conversations do not exist for it."""

    def __init__(self, store: Store, owner: str, config: Config) -> None:
        self.store = store
        self.owner = require_name("owner", owner)
        self.config = config
        self._opened = lru_cache(OPEN_SESSIONS)(self._open)  # all that a session knows is stored
        self._row = lru_cache(CACHED_ROWS)(partial(conversation_row, store))

    def list_conversations(self, after: After = "") -> str:
        """Lists conversations, the newest first: id, title, messages, tokens recorded and shown."""
        listed: Iterator[ConversationInfo] = self.store.conversations(self.owner)
        if after:
            listed = islice(dropwhile(lambda row: row.key.conversation != after, listed), 1, None)
        rows = [self._row(row) for row in islice(listed, LIST_ROWS)]
        has_more = next(listed, None) is not None

        def rest(n: int) -> str:
            last = rows[n - 1].id if n else after
            return f"There are more; continue with after: {_json(last)}"

        return _page({"owner": self.owner}, "conversations", rows, rest, total=len(rows) + has_more)

    def show_view(self, conversation: ConversationId, at: ViewTime = None) -> str:
        """Shows what the model sees: every message, or what stands for hidden ones. Long texts are cut."""
        session = self._session(conversation)
        with session.locked() as inspector:
            view = inspector.view(at, start=-MAX_MESSAGES)
        about: dict[str, Any] = {
            "conversation": conversation,
            "tokens": view.tokens.shown,
            "total_items": view.total_items,
        }
        if at is not None:
            about["at"] = at
        items = view.items
        rows = list(map(_item_json, items))

        def rest(n: int) -> str:
            first = items[len(items) - n].span.start if n else view.next
            earlier = f"; show_view with at: {first - 1} shows the earlier ones" if first else ""
            return f"These are the newest {n:,} of {view.total_items:,} items{earlier}."

        return _page(about, "items", rows, rest, total=view.total_items, newest=True)

    def expand(
        self,
        conversation: ConversationId,
        at: PlaceOrId,
        lines: Lines = "",
        items: Items = "",
        chars: Chars = "",
        match: Match = "",
    ) -> str:
        """Returns the full text of a message, or of all that an edit stands for, or a part of it."""
        given = {"lines": lines, "items": items, "chars": chars, "match": match}
        part = {name: value for name, value in given.items() if value}
        session = self._session(conversation)
        text = session.expand(at, **part)
        if len(text) <= MAX_ANSWER_CHARS:
            return text
        with session.locked() as inspector:
            return inspector.expand_within(at, slice_of(part), MAX_ANSWER_CHARS)

    def search(self, query: SearchText, conversation: SearchIn = "", limit: Limit = 10) -> str:
        """Finds recorded messages, also hidden ones, the best match first, in one conversation or in all."""
        found: Sequence[Hit]
        if conversation:
            found = self._session(conversation).search(query, limit=limit)
        else:
            found = search(self.store, self.owner, query, limit)
        rest = "These are the best {:,}; search for something more specific.".format
        return _page({"total": len(found)}, "hits", found, rest)

    def explain(self, conversation: ConversationId, at: Place) -> str:
        """Explains why a message is shown whole, shorter or not at all: which edits, which settings."""
        explanation = self._session(conversation).explain(at)
        about = {"conversation": conversation, **msgspec.structs.asdict(explanation)}
        causes = about.pop("causes")
        rest = "The newest {:,} edits of it; explain with the place of an edit explains that edit.".format
        return _page(about, "causes", causes, rest)

    def undo(self, conversation: ConversationId, at: UndoPlace = None) -> str:
        """Undoes an edit, a pin or another undo, so that what it hid is shown again."""
        session = self._session(conversation)
        undone = session.undo(at, why="asked for by an MCP client")
        answer = {"conversation": conversation, "at": int(undone), "of": undone.of}
        if undone.covered_by is not None:
            answer["covered_by"] = undone.covered_by
        return _json(answer | {"tokens": session.inspect.tokens})

    def append(self, conversation: ConversationId, messages: Messages) -> str:
        """Appends messages to a conversation, existing or new: all of them or none."""
        places = _append(self._session(conversation, is_new=True), messages)
        rest = "The first {:,}; all of them are stored.".format
        return _page({"conversation": conversation}, "places", places, rest)

    # Resources

    def conversations(self) -> str:
        """Conversations, the newest first."""
        return self.list_conversations()

    def conversation(self, id: str) -> str:
        """The messages of a conversation as they were recorded."""
        session = self._session(self._decoded(id))
        with session.locked() as inspector:
            total = inspector.state.index
            end = inspector.state.next
            newest = list(islice(inspector.newest_first(), MAX_MESSAGES))[::-1]
        about: dict[str, Any] = {"conversation": session.conversation, "total": total}
        rows = [{"index": one.index, **_message_json(one.line, one.message)} for one in newest]

        def rest(n: int) -> str:
            first = newest[len(newest) - n].at if n else end
            return f"These are the newest {n:,} messages; expand shows any message before #{first}."

        return _page(about, "messages", rows, rest, total=total, newest=True)

    def view(self, id: str) -> str:
        """What the model sees of a conversation."""
        return self.show_view(self._decoded(id))

    def ids(self) -> list[str]:
        """Ids of the newest conversations."""
        return [row.key.conversation for row in islice(self.store.conversations(self.owner), LIST_ROWS)]

    def _decoded(self, id: str) -> str:
        """The id in a resource's address: some SDK versions decode it, others do not."""
        is_stored = next(self.store.read(Key(self.owner, id), 0, 1), None) is not None
        return id if is_stored else unquote(id)

    def _session(self, id: str, *, is_new: bool = False) -> Session:
        """Raises NotFoundError if the owner has no such conversation."""
        key = Key(self.owner, require_name("conversation", id))
        if not is_new and next(self.store.read(key, 0, 1), None) is None:
            raise NotFoundError(f"There is no conversation {id!r}; list_conversations shows all")
        return self._opened(key)

    def _open(self, key: Key) -> Session:
        session = Session(self.store, key, config=self.config)
        model = session.inspect.state.model
        if model and model.isprintable():
            session.model = model
        return session


# Answers


def escape_surrogates(text: str) -> str:
    """Replaces half characters, which JSON cannot hold, by their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def truncate(text: str) -> str:
    """The last resort for an answer that is too long."""
    note = f"\n[refold: cut at {MAX_ANSWER_CHARS:,} characters; ask for less]"
    return text if len(text) <= MAX_ANSWER_CHARS else text[: MAX_ANSWER_CHARS - len(note)] + note


def _json(value: Any) -> str:
    return dumps(value).decode()


def _page(
    about: dict[str, Any],
    name: str,
    rows: Sequence[Any],
    rest: Callable[[int], str],
    *,
    total: int | None = None,
    newest: bool = False,
) -> str:
    """JSON with as many rows as there is room for, the first or the newest.

    If rows are left out, a note says how to get them: `rest` writes it, given how many rows there are.
    """
    texts = [_json(row) for row in rows]
    if newest:
        texts.reverse()
    room = MAX_ANSWER_CHARS - NOTE_CHARS - len(_json(about))
    lengths = accumulate(len(text) + 1 for text in texts)
    kept = texts[: sum(length <= room for length in lengths)]
    if len(kept) < (len(rows) if total is None else total):
        about = {**about, "note": rest(len(kept))}
    if newest:
        kept.reverse()
    return f'{_json(about)[:-1]},"{name}":[{",".join(kept)}]}}'


def _item_json(item: ShownItem) -> dict[str, Any]:
    """A model reads this: an item and its messages without what it can do without."""
    facts: dict[str, Any] = {"span": item.span, "tokens": item.tokens}
    if item.edit is not None:
        facts["edit"] = item.edit
    return {**facts, "shown": [_message_json(one, one.message) for one in item.shown]}


def _message_json(about: Line | ShownMessage, message: Message) -> dict[str, Any]:
    text = written(message)
    facts: dict[str, Any] = {"at": about.at, "role": about.role, "tokens": about.tokens}
    if about.tools:
        facts["tools"] = about.tools
    facts["text"] = text[:TEXT_CHARS]
    if len(text) > TEXT_CHARS:
        facts["cut"] = True
    return facts


def _append(session: Session, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Stores all messages or none; a message with an id beside its role is stored once.

    Raises:
        MessageError: one of them cannot be stored; nothing was.
    """
    ids = dict[int, str]()
    plain = []
    for n, message in enumerate(messages):
        if _has_own_id(message):
            ids[n] = message["id"]
            if not isinstance(ids[n], str) or not ids[n]:
                raise MessageError(f"messages[{n}].id", "expected a text of at least one character")
            message = {key: value for key, value in message.items() if key != "id"}
        plain.append(message)
    taken = session.intake().take(plain)
    drafts = list(taken.drafts)
    ends = [*taken.first[1:], len(drafts)]
    for n, id in ids.items():
        for part, place in enumerate(range(taken.first[n], ends[n])):
            message_part = msgspec.structs.replace(drafts[place].message, id=part_id(id, part))
            drafts[place] = msgspec.structs.replace(drafts[place], message=message_part)
    places = session.say(drafts)
    return [places[n] for n in taken.first]


def _has_own_id(message: dict[str, Any]) -> bool:
    """The id of an item with a type is the provider's; that of a UI message is read anyway."""
    return "id" in message and "role" in message and not {"type", "parts"} & message.keys()
