"""One conversation of a framework, bound to one of ours: what it says is kept, what its model sees fits."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from threading import RLock
from typing import Any, Generic, NamedTuple

import msgspec

from refold.adapters.synced_history import Kept, M, Otherwise, Tongue, shown
from refold.config.config import Source, load_config
from refold.core.event import Line, Span
from refold.core.expiry import EXPAND, OWN_TOOLS
from refold.core.message import Message, Text, ToolResult
from refold.core.pairing import MissingResult, OrphanResult, original_id, repair_pairs, with_original_ids
from refold.session.api import DEFAULT_STORE
from refold.session.api import open as opened
from refold.session.render import STAND_IN
from refold.session.session import Session
from refold.session.tools import declared
from refold.stores.store import Store, open_store

KEPT = 500
"""Conversations that stay open."""
WARM = 8
"""The newest of them, of which is remembered what the framework handed over last."""
WORDS = 1_000
"""Messages that stand for others, of which the words are kept at hand."""
PLACEMENT = "openai-chat"
"""Requests are measured and judged in this dialect, whatever the framework makes of them."""


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


class _Piece(NamedTuple):
    """Something to be shown: a line as it was said, or what stands for it."""

    of: int | None
    """The message that it is, or is a part of."""
    line: Line | None
    message: Message | None = None


class Talk(Kept[M]):
    """What is kept of a conversation, and what is shown of it."""

    def _begin(self, session: Session) -> None:
        self._words: dict[tuple[int, int], Message] = {}
        super()._begin(session)

    def fit(self, messages: "Sequence[M | Otherwise[M]]", ask: Ask) -> list[M]:
        """What the model is to see instead of all these messages.

        Raises:
            OverBudgetError: what must be shown is larger than the model's window.
        """
        with self.lock:
            where, session = self._take(messages, is_asked=True), self.session
            if ask.model is not None and ask.model != session.model:
                session.model = ask.model
            names = {tool["function"]["name"] for tool in ask.tools if "function" in tool}
            session.reducer.handles = session.settings.shows_handles and EXPAND in names
            session.fit(dialect=PLACEMENT, request=ask.request)
            fitted = list[M]()
            for of, pieces in groupby(self._pieces(), lambda piece: piece.of):
                if of is None:
                    fitted += [self.tongue.write(one.message, None) for one in pieces if one.message]
                else:
                    given = shown(messages[where[of]]) if of in where else None
                    fitted.append(self._whole(of, list(pieces), given))
            return fitted

    def _pieces(self) -> Iterator[_Piece]:
        """All that is shown, in order, every call with its result."""
        items, spans = self.session.record.live.items, dict[tuple[int, int], Span]()
        for item in items:
            if item.edit is not None:
                spans.update(((line.at, line.n), item.span) for line in item.lines)
        for slot in repair_pairs([line for item in items for line in item.lines if not line.apart])[0]:
            if not isinstance(slot, Line):
                yield _Piece(None, None, self._stand_in(slot))
            elif slot.at in self._of:
                yield _Piece(self._of[slot.at], slot)
            else:
                yield _Piece(self._part_of(spans.get((slot.at, slot.n), ())), None, self._said(slot))

    def _part_of(self, span: Iterable[int]) -> int | None:
        """The one message that an edit stands for, or for a part of."""
        known = (self._of[at] for at in span if at in self._of)
        first = next(known, None)
        return first if all(one == first for one in known) else None

    def _whole(self, of: int, pieces: list[_Piece], given: M | None) -> M:
        """A message of the framework's: its own where all of it stands as it was said."""
        is_all = [piece.line and piece.line.place for piece in pieces] == [*self._known[of].places]
        if given is not None and (is_all or of in self._whole_only):
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
            known = self._words[line.at, line.n] = with_original_ids(self.session.record.message(line))
        return known

    def _stand_in(self, slot: MissingResult | OrphanResult) -> Message:
        if isinstance(slot, MissingResult):
            result = ToolResult(original_id(slot.call), STAND_IN, slot.tool or None, is_error=True)
            return Message("tool", (result,))
        return Message("user", (Text(f"[refold: a result without its call]\n{self._said(slot.line).text}"),))

    # What the model asks for

    def call(self, name: str, arguments: Any) -> str:
        """What expand or search answer."""
        return self.session.call(name, arguments)


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
            for old in [*islice(reversed(self._open), WARM, WARM + 1)]:
                self._open[old].forget()
            while len(self._open) > KEPT:
                self._open.popitem(last=False)  # all it knows is stored
            return self._open[name]

    def _session(self, name: str) -> Session:
        return opened(name, store=self.store, **self._how)

    def keep(self, name: str, messages: "Sequence[M | Otherwise[M]]", *, is_asked: bool = False) -> None:
        """See `Talk.keep`."""
        self.talk(name).keep(messages, is_asked=is_asked)

    def fit(self, name: str, messages: "Sequence[M | Otherwise[M]]", ask: Ask) -> list[M]:
        """See `Talk.fit`. The model that the adapter was given counts more than the framework's."""
        return self.talk(name).fit(messages, ask._replace(model=None) if self._has_model else ask)

    async def afit(self, name: str, messages: "Sequence[M | Otherwise[M]]", ask: Ask) -> list[M]:
        """The same without keeping an event loop waiting."""
        return await asyncio.to_thread(self.fit, name, messages, ask)

    def call(self, name: str, tool: str, arguments: Any) -> str:
        """What expand or search answer in a conversation."""
        return self.talk(name).call(tool, arguments)

    async def acall(self, name: str, tool: str, arguments: Any) -> str:
        return await asyncio.to_thread(self.call, name, tool, arguments)


def tools() -> list[dict[str, Any]]:
    """Expand and search as functions: name, description and parameters of each."""
    return [one["function"] for one in declared(PLACEMENT, sorted(OWN_TOOLS))]
