"""Who wants to know what happens is told of it, once it has happened and nobody holds a lock any more."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

import msgspec

from refold import telemetry
from refold.core.errors import SettingError
from refold.core.event import Called, Event, Replaced, Said, Span
from refold.core.message import Message

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

MOST_PROBLEMS = 20
"""Complaints about callbacks that are kept for the next report."""
TRACED = (
    *("at", "turn", "step", "role", "tools", "reason", "edit", "tokens_saved", "tokens_before"),
    *("tokens_after", "limit", "messages", "was_pruned", "was_summarized"),
)
"""What of an event is traced: never what was said."""


class MessageEvent(msgspec.Struct, frozen=True):
    """Something became of a message, or of those that one edit covers.

    message-added      something was said
    message-expired    a result lasted as many steps as it was set to; what became of it follows
    message-compacted  a message is shown shorter, or several as one: by any rung
    message-removed    only its name is left, or nothing
    message-expanded   it was read again, by a person or the model; nothing is changed
    """

    kind: Literal[
        "message-added", "message-expired", "message-compacted", "message-removed", "message-expanded"
    ]
    conversation: str
    at: int
    """Of the message; the first of those that were folded together."""
    turn: int
    step: int
    role: str
    """Of it, or of the first of several; the same for `tools`."""
    tools: tuple[str, ...] = ()
    reason: str = ""
    """Why, by which setting; of an expansion what was given for it."""
    tokens_saved: int = 0
    """In the view."""
    message: Message | None = None
    """As it is shown now, where it is shown."""
    edit: int | None = None
    """What made it so, for `undo`."""
    span: Span | None = None
    """All that was folded together."""


class CompactionEvent(msgspec.Struct, frozen=True):
    """A view is made smaller, or should have been.

    compaction:start     the view is about to be made smaller; a summary may be waited for now
    compaction:complete  it was; or nothing was worth hiding: then `messages` is 0
    compaction:failed    a model wrote no summary and the rest is done by rule; or it cannot fit
    prune:complete       old results were pruned when the session was closed
    overflow             the request is larger than the window, and nothing can be done about it
    """

    kind: Literal[
        "compaction:start", "compaction:complete", "compaction:failed", "prune:complete", "overflow"
    ]
    conversation: str
    turn: int
    step: int
    reason: str
    """The triggers that fired, `economy` or `on demand`; or what went wrong."""
    tokens_before: int = 0
    """Of the request; the same number when a compaction starts and when it is complete."""
    tokens_after: int = 0
    limit: int = 0
    """The model's window."""
    messages: int = 0
    """Messages that are no longer shown as they were."""
    was_pruned: bool = False
    """Prune was among them, or summaries, below."""
    was_summarized: bool = False
    at: int | None = None
    """Of the first edit."""

    @property
    def tokens_saved(self) -> int:
        return max(0, self.tokens_before - self.tokens_after)


Happened: TypeAlias = MessageEvent | CompactionEvent
OnEvent: TypeAlias = Callable[[Happened], Awaitable[None] | None]


UNTOLD = ("restore", "correct", "recall")
"""Kinds of edits that make nothing shorter."""


class ViewState(NamedTuple):
    """When something happened, and the model's window then."""

    turn: int
    step: int
    limit: int


def callbacks_of(given: OnEvent | Sequence[OnEvent] | None) -> tuple[OnEvent, ...]:
    """
    Raises:
        SettingError: one of them cannot be called.
    """
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for one in found:
        if not callable(one):
            raise SettingError("on_event", f"expected a function, or several; got {type(one).__name__}")
    return found


class Notifier:
    """The lock of a session. What happened under it is told when it is free again."""

    def __init__(self, conversation: str, callbacks: Sequence[OnEvent] = ()) -> None:
        self.conversation, self.callbacks = conversation, tuple(callbacks)
        self.loop: AbstractEventLoop | None = None
        """Where coroutines are run, if the session has an event loop."""
        self.problems: list[str] = []
        self._begun: CompactionEvent | None = None
        """The start of the compaction that is under way."""
        self._lock, self._depth = RLock(), 0
        self._waiting: list[Happened] = []
        self._tasks = set[Any]()

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        told: list[Happened] = []
        if not self._depth and self._waiting:
            told, self._waiting = self._waiting, []
        self._lock.release()
        for event in told:
            _trace(event)
            for callback in self.callbacks:
                self._call(callback, event)

    def tell(self, events: Iterable[Happened]) -> None:
        if self.callbacks or telemetry.is_on():
            self._waiting += events

    def tell_all(self, events: Iterable[Event], turn: int, step: int) -> None:
        """What was appended, in the words of those who watch."""
        self.tell(one for event in events for one in told(event, self.conversation, turn, step))

    def begin(self, now: ViewState, reason: str, tokens: int) -> None:
        """Tells that a compaction starts, once until it ends."""
        if self._begun is None:
            self._begun = self._compaction("compaction:start", now, reason, tokens)
            self.tell([self._begun])

    def end(self, now: ViewState, edits: Sequence[Replaced], messages: int, tokens: int) -> None:
        """So many messages are no longer shown as they were, and the request takes so many tokens now."""
        if self._begun is not None:
            reason, before = self._begun.reason, self._begun.tokens_before
            self._begun = None
            self.tell([self._done("compaction:complete", now, edits, messages, reason, before, tokens)])

    def pruned(self, now: ViewState, edits: Sequence[Replaced], before: int, after: int) -> None:
        if edits:
            done = self._done(
                "prune:complete", now, edits, len(edits), "the session was closed", before, after
            )
            self.tell([done])

    def overflow(self, now: ViewState, reason: str, tokens: int) -> None:
        """The request is larger than the window, and nothing can be done about it."""
        if self._begun is not None:
            self._begun = None
            self.tell([self._compaction("compaction:failed", now, reason, tokens)])
        self.tell([self._compaction("overflow", now, reason, tokens)])

    def taken(self) -> list[str]:
        """What callbacks did wrong, told once."""
        problems, self.problems = self.problems, []
        return problems

    def _done(
        self,
        kind: Any,
        now: ViewState,
        edits: Sequence[Replaced],
        messages: int,
        reason: str,
        before: int,
        after: int,
    ) -> CompactionEvent:
        return msgspec.structs.replace(
            self._compaction(kind, now, reason, before),
            tokens_after=after,
            messages=messages,
            was_pruned=any(edit.kind == "prune" for edit in edits),
            was_summarized=any(edit.certificate is not None for edit in edits),
            at=edits[0].at if edits else None,
        )

    def _compaction(self, kind: Any, now: ViewState, reason: str, tokens: int) -> CompactionEvent:
        return CompactionEvent(
            kind, self.conversation, now.turn, now.step, reason, tokens, tokens, limit=now.limit
        )

    def _call(self, callback: OnEvent, event: Happened) -> None:
        try:
            awaited = callback(event)
            if isawaitable(awaited):
                self._run(self._awaited(awaited, event))
        except Exception as error:  # theirs: it harms nothing here
            self._report(event, error)

    async def _awaited(self, awaited: Awaitable[None], event: Happened) -> None:
        try:
            await awaited
        except Exception as error:
            self._report(event, error)

    def _run(self, work: Any) -> None:
        """In the session's loop, in the one that runs here, or in that of the process."""
        import asyncio  # only those who await pay for it

        from refold.summaries.call import running_loop

        if self.loop is not None and self.loop.is_running():
            self._keep(asyncio.run_coroutine_threadsafe(work, self.loop))
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run_coroutine_threadsafe(work, running_loop()).result()
        else:
            self._keep(loop.create_task(work))

    async def settled(self) -> None:
        """Coroutines that were told of something have ended."""
        import asyncio
        from concurrent.futures import Future

        tasks = [asyncio.wrap_future(one) if isinstance(one, Future) else one for one in (*self._tasks,)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, task: Any) -> None:
        self._tasks.add(task)  # or nobody would, and it might never end
        task.add_done_callback(self._tasks.discard)

    def _report(self, event: Happened, error: Exception) -> None:
        import logging

        problem = f"on_event failed at {event.kind}: {error!r}"
        logging.getLogger("refold").warning(problem, exc_info=error)
        self.problems = [*self.problems, problem][-MOST_PROBLEMS:]


def _trace(event: Happened) -> None:
    """Tells the span that is under way; but not of what is added, or a long run would fill it with that."""
    if not isinstance(event, MessageEvent | CompactionEvent) or event.kind == "message-added":
        return
    hidden = ("reason",) if event.kind in ("message-expanded", "compaction:failed") else ()  # others wrote it
    facts = {name: getattr(event, name, None) for name in TRACED if name not in hidden}
    told = {f"refold.{name.replace('tokens_', 'tokens.')}": value for name, value in facts.items()}
    telemetry.event(f"refold.{event.kind}", {"gen_ai.conversation.id": event.conversation, **told})


def told(event: Event, conversation: str, turn: int, step: int) -> Iterable[Happened]:
    """An event of the stream in the words of those who watch."""
    match event:
        case Said(line=line, message=message):
            facts = (conversation, line.at, line.turn, line.step, line.role, line.tools)
            yield MessageEvent("message-added", *facts, message=message)
        case Replaced(span=span, lines=lines, kind=kind, why=why) if kind not in UNTOLD:
            shown = next((one for one in event.shown if isinstance(one, Message)), None)
            role, tools = (lines[0].role, lines[0].tools) if lines else ("", ())
            saved, many = event.tokens[0] - event.tokens[1], span if len(span) > 1 else None
            where = (conversation, span.start, turn, step, role, tools, why, saved, shown, event.at, many)
            if kind == "expire":
                yield MessageEvent("message-expired", *where)
            is_gone = shown is None or kind == "window" or (kind == "expire" and why.startswith("remove"))
            yield MessageEvent("message-removed" if is_gone else "message-compacted", *where)
        case Called(problem=str(problem)):
            yield CompactionEvent("compaction:failed", conversation, turn, step, problem)
