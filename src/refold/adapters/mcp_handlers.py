"""What an MCP client can ask for: a plain function for each tool, run in a thread, that answers a text."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from itertools import dropwhile, islice
from threading import Lock
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import BeforeValidator, Field

from refold.adapters import mcp_format as words
from refold.config.config import Config
from refold.core.errors import NotFoundError
from refold.core.query import parse_query
from refold.session import search as searching
from refold.session.inspect import parse
from refold.session.session import Session
from refold.session.validate import require_name
from refold.stores.record import Record
from refold.stores.store import ConversationInfo, Key, Store

KEPT = 64
"""Conversations that stay open."""
ROWS, ROWS_KNOWN = 100, 10_000
"""In one list, and remembered until they change."""


def _text(given: Any) -> Any:
    """As a text, however it was written: null is none, [40, 50] is 40:50."""
    match given:
        case None:
            return ""
        case int() if not isinstance(given, bool):
            return str(given)
        case [int(), int() | None]:
            return ":".join("" if end is None else str(end) for end in given)
    return given


def _place(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    number = given.strip().removeprefix("#")
    digits = number.removeprefix("-")
    return int(number) if digits.isascii() and digits.isdigit() else given


AS_TEXT, AS_PLACE = BeforeValidator(_text), BeforeValidator(_place)
Id = Annotated[str, Field(description="The id of the conversation, as list_conversations has it")]
At = Annotated[int, AS_PLACE, Field(description="The place of a message or an edit")]
AtOrId = Annotated[
    int | str,
    AS_PLACE,
    Field(description="The place of a message or an edit, a message's id, or -1 for the newest message"),
]
Then = Annotated[int | None, AS_PLACE, Field(description="As it was right after the event here; else now")]
Edit = Annotated[
    int | None,
    AS_PLACE,
    Field(description="The place of an edit, pin or undoing, or of a hidden message; else the newest edit"),
]
After = Annotated[str, AS_TEXT, Field(description="To go on with a list: the last id in it")]
Only = Annotated[str, AS_TEXT, Field(description="The id of a conversation to search in; else in all")]
Lines = Annotated[str, AS_TEXT, Field(description="Only these lines, counted from 1, such as 40-50")]
Items = Annotated[
    str, AS_TEXT, Field(description="Only these items of a list or rows of a table, such as 1-5")
]
Chars = Annotated[str, AS_TEXT, Field(description="Only these characters, counted from 0, such as 0-2000")]
Match = Annotated[str, AS_TEXT, Field(description="Only lines with this text, or /a regular expression/")]
Query = Annotated[str, Field(description='Words, "a phrase", prefix*, tool:NAME, role:user')]
Limit = Annotated[int, Field(description="At most so many, from 1 to 1000")]
Messages = Annotated[
    list[dict[str, Any]],
    Field(
        description="In order, each as OpenAI, Anthropic or the AI SDK has it, such as"
        ' {"role": "user", "content": "Hello"}; with an "id" beside the role, it is stored once'
    ),
]


class Verbs:
    """For one owner: another's conversations are not there."""

    def __init__(self, store: Store, owner: str, config: Config) -> None:
        self.store, self.owner, self.config = store, require_name("owner", owner), config
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._lock = Lock()
        self._read = lru_cache(ROWS_KNOWN)(self._read_anew)

    def list_conversations(self, after: After = "") -> str:
        """Conversations, the newest first: id, title, messages, and tokens that were said and are shown."""
        listed: Iterator[ConversationInfo] = self.store.conversations(self.owner)
        if after:
            listed = islice(dropwhile(lambda row: row.key.conversation != after, listed), 1, None)
        rows = [self._row(row) for row in islice(listed, ROWS)]
        is_all = next(listed, None) is None

        def rest(n: int) -> str:
            last = rows[n - 1]["id"] if n else after
            return f"There are more; go on with after: {words.told(last)}"

        total = len(rows) + (not is_all)
        return words.page({"owner": self.owner}, "conversations", rows, rest, total=total)

    def show_view(self, conversation: Id, at: Then = None) -> str:
        """What the model sees of a conversation: every message, or what stands for those that are hidden."""
        return words.viewed(self._session(conversation), at)

    def expand(
        self,
        conversation: Id,
        at: AtOrId,
        lines: Lines = "",
        items: Items = "",
        chars: Chars = "",
        match: Match = "",
    ) -> str:
        """The whole text of a message, or of all that an edit stands for, or one part of it."""
        asked = {"lines": lines, "items": items, "chars": chars, "match": match}
        part = {name: value for name, value in asked.items() if value}
        return words.expanded(self._session(conversation), at, part)

    def search(self, query: Query, conversation: Only = "", limit: Limit = 10) -> str:
        """Where something was said, the best first, in one conversation or in all; also what is hidden."""
        if conversation:
            return words.found(self._session(conversation).search(query, limit=limit))
        asked, most = parse_query(query), searching.limit_of(limit)
        found = searching.find(self.store, self.owner, asked, most, parse)
        return words.found(searching.hits(self.store, asked, found, most, parse))

    def explain(self, conversation: Id, at: At) -> str:
        """Why a message is shown whole, shorter or not at all: by which edit and which setting."""
        return words.explained(conversation, self._session(conversation).explain(at))

    def undo(self, conversation: Id, at: Edit = None) -> str:
        """Takes back an edit, a pin or an undoing, so that what it hid is shown again."""
        session = self._session(conversation)
        done = session.undo(at, why="asked for by an MCP client")
        answer = {"conversation": conversation, "at": int(done), "of": done.of}
        if done.covered_by is not None:
            answer["covered_by"] = done.covered_by
        return words.told(answer | {"tokens_shown": session.record.live.tokens})

    def append(self, conversation: Id, messages: Messages) -> str:
        """Stores messages at the end of a conversation, there already or new: all of them or none."""
        places = words.appended(self._session(conversation, is_new=True), messages)
        rest = "The first {:,}; all of them are stored.".format
        return words.page({"conversation": conversation}, "places", places, rest)

    # As resources

    def conversations(self) -> str:
        """Conversations, the newest first."""
        return self.list_conversations()

    def conversation(self, id: str) -> str:
        """What was said in a conversation, as it was said."""
        return words.said(self._session(self._known(id)))

    def view(self, id: str) -> str:
        """What the model sees of a conversation."""
        return words.viewed(self._session(self._known(id)), None)

    def ids(self) -> list[str]:
        """Of the newest conversations."""
        return [row.key.conversation for row in islice(self.store.conversations(self.owner), ROWS)]

    def _known(self, id: str) -> str:
        """An id from an address, decoded already or not: that depends on the SDK."""
        is_there = next(self.store.read(Key(self.owner, id), 0, 1), None) is not None
        return id if is_there else unquote(id)

    # Conversations

    def _key(self, id: str) -> Key:
        """
        Raises:
            NotFoundError: the owner has no such conversation.
        """
        key = Key(self.owner, require_name("conversation", id))
        if next(self.store.read(key, 0, 1), None) is None:
            raise NotFoundError(f"There is no conversation {id!r}; list_conversations shows what there is")
        return key

    def _session(self, id: str, *, is_new: bool = False) -> Session:
        key = Key(self.owner, require_name("conversation", id)) if is_new else self._key(id)
        session = self._open.get(id) or self._opened(key)
        with self._lock:
            session = self._open.setdefault(id, session)  # another thread may have been faster
            self._open.move_to_end(id)
            while len(self._open) > KEPT:
                self._open.popitem(last=False)  # all it knows is stored
        return session

    def _opened(self, key: Key) -> Session:
        session = Session(self.store, key, config=self.config)
        model = session.record.live.state.model
        session.model = model if model and model.isprintable() else session.model
        return session

    def _row(self, listed: ConversationInfo) -> dict[str, Any]:
        try:
            return self._read(listed)
        except Exception:  # damaged: the others are still worth seeing
            return words.row(listed, None)

    def _read_anew(self, listed: ConversationInfo) -> dict[str, Any]:
        return words.row(listed, Record(self.store, listed.key, "main", parse))
