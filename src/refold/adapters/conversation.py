"""What all adapters share: the conversations of a framework, recorded, and fitted for its models."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from threading import RLock
from typing import Any, Generic, NamedTuple, TypedDict

import msgspec

from refold.config.config import Source, load_config
from refold.core.event import Line, Span
from refold.core.expiry import EXPAND, OWN_TOOLS
from refold.core.message import Message, Text, ToolResult
from refold.core.pairing import (
    NO_RESULT,
    MissingResult,
    OrphanResult,
    original_id,
    repair_pairs,
    with_original_ids,
)
from refold.session.api import DEFAULT_STORE
from refold.session.api import open as open_session
from refold.session.history_sync import are_same, insert_transient, match_request
from refold.session.session import Session
from refold.session.synced_history import Converter, M, Overridden, Passed, SyncedHistory, shown
from refold.session.tools import declared
from refold.stores.store import Store, open_store

OPEN_CONVERSATIONS = 500
"""Conversations that are kept open."""
WARM_CONVERSATIONS = 8
"""The newest of them, whose message objects are remembered between requests."""
DIALECT = "openai-chat"
"""Requests are counted and checked in this dialect, whatever the framework makes of them."""


class AdapterOptions(TypedDict, total=False):
    """Keyword arguments of every adapter, with the meaning that they have in `refold.open`."""

    store: str | Store | None
    model: str | None
    """Replaces the framework's own name of the model."""
    config: Source
    agent: str | None


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


class FittedMessage(NamedTuple, Generic[M]):
    message: M
    position: int | None
    """Of the passed message that it is, or is a short form of."""


class RequestMatch(NamedTuple, Generic[M]):
    """One request to a model, compared with the history that it was made from.

    Other middleware may have changed messages, left some out, or inserted some: what was changed is recorded
    as the history has it, and what was inserted is sent with this request only.
    """

    request: Sequence[M]
    passed: list[Passed[M]]
    """The history, with what was changed for this request."""
    positions: list[int | None]
    """Of each passed message in the request; None if it was left out."""
    transient: dict[int, M]
    """Messages of this request only, by position."""

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
            return cls(request, list(history), [*range(len(request))], {})
        candidates = [n for n, message in enumerate(request) if is_recorded(message)]
        matches = match_request([*map(key, history)], [key(request[n]) for n in candidates])
        position_of = {at: candidates[n] for n, at in matches.items()}
        passed: list[Passed[M]] = []
        for at, own in enumerate(history):
            sent = request[position_of[at]] if at in position_of else own
            passed.append(own if own == sent else Overridden(own, sent))
        known = set(position_of.values())
        transient = {n: message for n, message in enumerate(request) if n not in known}
        return cls(request, passed, [*map(position_of.get, range(len(history)))], transient)

    def merge(self, fitted: Sequence[FittedMessage[M]]) -> list[M]:
        """The messages to send: unchanged ones as the request has them, and the transient ones in between."""
        messages: list[M] = []
        positions: list[int | None] = []
        for message, n in fitted:
            position = None if n is None else self.positions[n]
            if n is not None and position is not None and message is shown(self.passed[n]):
                message = self.request[position]
            messages.append(message)
            positions.append(position)
        return insert_transient(messages, positions, self.transient)


class _ShownPart(NamedTuple):
    """A part of the view: a recorded line, or a message that stands for it."""

    known: int | None
    """The known message that it is, or is a part of."""
    line: Line | None
    message: Message | None = None


class AdapterConversation(SyncedHistory[M]):
    """A synced history, and what the framework's model is to see of it."""

    has_fixed_model = False
    """The adapter was given a model, which the framework's does not replace."""

    def fit_request(self, match: RequestMatch[M], call: ModelCall) -> list[M]:
        """Records what is new in the history of a request, and returns the messages to send.

        Transient messages are counted as system text.

        Raises:
            OverBudgetError: what must be shown is larger than the model's window.
        """
        texts = [call.system, *(self._converter.parse(one).text for one in match.transient.values())]
        call = call._replace(system="\n\n".join(filter(None, texts)) or None)
        return match.merge(self._fit(match.passed, call))

    def fit(self, messages: Sequence[Passed[M]], call: ModelCall) -> list[M]:
        """The same for a history that nobody changed or added to."""
        return [message for message, _ in self._fit(messages, call)]

    async def afit(self, messages: Sequence[Passed[M]], call: ModelCall) -> list[M]:
        return await asyncio.to_thread(self.fit, messages, call)

    def _fit(self, messages: Sequence[Passed[M]], call: ModelCall) -> list[FittedMessage[M]]:
        with self.lock:
            positions = self._sync(messages, is_request=True)
            names = {tool["function"]["name"] for tool in call.tools if "function" in tool}
            prepare_session(self.session, None if self.has_fixed_model else call.model, names)
            self.session.fit(dialect=DIALECT, request=call.request)
            fitted: list[FittedMessage[M]] = []
            for known, group in groupby(self._shown_parts(), lambda part: part.known):
                if known is None:
                    for part in group:
                        if part.message:
                            fitted.append(FittedMessage(self._converter.render(part.message, None), None))
                    continue
                position = positions.get(known)
                passed = None if position is None else shown(messages[position])
                fitted.append(FittedMessage(self._joined(known, list(group), passed), position))
            return fitted

    def call(self, tool: str, arguments: Any) -> str:
        """The result of a call of refold_expand or refold_search."""
        return self.session.call(tool, arguments)

    async def acall(self, tool: str, arguments: Any) -> str:
        return await asyncio.to_thread(self.call, tool, arguments)

    def _shown_parts(self) -> Iterator[_ShownPart]:
        """The view in order, every call with its result."""
        lines: list[Line] = []
        spans: dict[tuple[int, int], Span] = {}
        for item in self.session.inspect.items:
            lines += [line for line in item.lines if not line.apart]
            if item.edit is not None:
                spans.update(((line.at, line.n), item.span) for line in item.lines)
        for slot in repair_pairs(lines)[0]:
            if not isinstance(slot, Line):
                yield _ShownPart(None, None, self._replacement(slot))
            elif slot.at in self._known_at:
                yield _ShownPart(self._known_at[slot.at], slot)
            else:
                span = spans.get((slot.at, slot.n), ())
                covered = {self._known_at[at] for at in span if at in self._known_at}
                known = covered.pop() if len(covered) == 1 else None
                yield _ShownPart(known, None, self._message(slot))

    def _message(self, line: Line) -> Message:
        """With the ids of calls as the framework has them."""
        return with_original_ids(self.session.inspect.message(line))

    def _joined(self, known: int, parts: list[_ShownPart], passed: M | None) -> M:
        """One message of the framework: the passed object if all of it is shown unchanged."""
        message = self._known[known]
        is_whole = [part.line and part.line.place for part in parts] == [*message.places]
        if passed is not None and (is_whole or message.is_uncorrectable):
            return passed
        messages: list[Message] = []
        for part in parts:
            content = self._message(part.line) if part.line else part.message
            if content is not None:
                messages.append(content)
        first = messages[0]
        is_mixed = any(one.role != first.role for one in messages)
        role = "user" if is_mixed else first.role
        content_parts = [part for one in messages for part in one.parts]
        merged = msgspec.structs.replace(first, role=role, parts=tuple(content_parts), id=None)
        return self._converter.render(merged, passed)

    def _replacement(self, slot: MissingResult | OrphanResult) -> Message:
        if isinstance(slot, MissingResult):
            result = ToolResult(original_id(slot.call), NO_RESULT, slot.tool or None, is_error=True)
            return Message("tool", (result,))
        text = self._message(slot.line).text
        return Message("user", (Text(f"[refold: a result without its call]\n{text}"),))


class AdapterConversations(Generic[M]):
    """All conversations of one adapter, by the framework's names for them. Safe to use from threads."""

    def __init__(
        self,
        converter: Converter[M],
        *,
        store: str | Store | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        settings = load_config(config)
        self.store = open_adapter_store(store, settings.store)
        self._converter = converter
        self._settings: dict[str, Any] = {"model": model, "agent": agent, "config": settings}
        self._open: OrderedDict[tuple[str, str | None], AdapterConversation[M]] = OrderedDict()
        self._lock = RLock()

    def get(self, name: str, owner: str | None = None) -> AdapterConversation[M]:
        """Opens it, if necessary, when it is first used."""
        key = (name, owner)
        with self._lock:
            if key not in self._open:
                opened = partial(open_session, store=self.store, owner=owner, **self._settings)
                self._open[key] = AdapterConversation(self._converter, name, opened)
                self._open[key].has_fixed_model = self._settings["model"] is not None
            self._open.move_to_end(key)
            for cold in [*islice(reversed(self._open), WARM_CONVERSATIONS, WARM_CONVERSATIONS + 1)]:
                self._open[cold].forget_objects()
            while len(self._open) > OPEN_CONVERSATIONS:
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
