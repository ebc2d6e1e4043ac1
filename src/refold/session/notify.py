"""Callbacks for what happens in a session, called after the session's lock was released."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import msgspec

from refold import telemetry
from refold.core.errors import SettingError
from refold.core.event import Called, Event, Replaced, Said, Span
from refold.core.live import State
from refold.core.message import Message

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

MAX_PROBLEMS = 20
"""Failures of callbacks that are kept for the next report."""
TRACED = (
    *("at", "turn", "step", "role", "tools", "reason", "edit", "tokens_saved", "tokens_before"),
    *("tokens_after", "limit", "messages", "was_pruned", "was_summarized"),
)
"""Fields of an event that are traced; never the text of a message."""


CompactionKind: TypeAlias = Literal[
    "compaction:start", "compaction:complete", "compaction:failed", "prune:complete", "overflow"
]


class MessageEvent(msgspec.Struct, frozen=True):
    """A message, or all that one edit covers, was added or changed in the view.

    message-added      a message was recorded
    message-expired    a result lasted its number of steps; an event with what became of it follows
    message-compacted  a message is shown shorter, or several as one, by any rule
    message-removed    only the name of a message is left in the view, or nothing
    message-expanded   a person or the model read it again; nothing is changed
    """

    kind: Literal[
        "message-added", "message-expired", "message-compacted", "message-removed", "message-expanded"
    ]
    conversation: str
    at: int
    """Of the message; of several, the place of the first."""
    turn: int
    step: int
    role: str
    """Of the message, or of the first of several; the same for `tools`."""
    tools: tuple[str, ...] = ()
    reason: str = ""
    """Why, and by which setting; for an expansion, the reason that was given."""
    tokens_saved: int = 0
    """In the view."""
    message: Message | None = None
    """As it is shown now; None if it is not."""
    edit: int | None = None
    """The place of the edit, for `undo`."""
    span: Span | None = None
    """All that the edit covers, if it is more than one message."""


class CompactionEvent(msgspec.Struct, frozen=True):
    """A view was compacted, or could not be.

    compaction:start     a compaction begins; it may wait for a summary
    compaction:complete  the compaction ended; `messages` is 0 if nothing was worth hiding
    compaction:failed    a model wrote no summary, so that rules do the rest; or the request cannot fit
    prune:complete       old results were pruned when the session was closed
    overflow             the request is larger than the window, and nothing more can be hidden
    """

    kind: CompactionKind
    conversation: str
    turn: int
    step: int
    reason: str
    """The triggers that fired, `economy` or `on demand`; or what failed."""
    tokens_before: int = 0
    """Of the request; the same number at the start of a compaction and at its end."""
    tokens_after: int = 0
    limit: int = 0
    """The model's window."""
    messages: int = 0
    """Messages that are no longer shown as they were."""
    was_pruned: bool = False
    was_summarized: bool = False
    at: int | None = None
    """The place of the first edit."""

    @property
    def tokens_saved(self) -> int:
        return max(0, self.tokens_before - self.tokens_after)


SessionEvent: TypeAlias = MessageEvent | CompactionEvent
OnEvent: TypeAlias = Callable[[SessionEvent], Awaitable[None] | None]

NOT_SHORTENING = ("restore", "correct", "recall")
"""Kinds of edits that shorten nothing."""


def callbacks_of(given: OnEvent | Sequence[OnEvent] | None) -> tuple[OnEvent, ...]:
    """Raises SettingError if one of them cannot be called."""
    if given is None:
        return ()
    callbacks = tuple(given) if isinstance(given, list | tuple) else (given,)
    for callback in callbacks:
        if not callable(callback):
            raise SettingError("on_event", f"expected a function, or several; got {type(callback).__name__}")
    return callbacks


class Notifier:
    """The lock of a session. Callbacks are called for what happened under it, once it is released."""

    def __init__(self, conversation: str, callbacks: Sequence[OnEvent] = ()) -> None:
        self.conversation = conversation
        self.callbacks = tuple(callbacks)
        self.loop: AbstractEventLoop | None = None
        """Runs callbacks that are coroutines, if the session has an event loop."""
        self.problems: list[str] = []
        self._lock = RLock()
        self._depth = 0
        self._waiting: list[SessionEvent] = []
        self._tasks = set[Any]()

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        due: list[SessionEvent] = []
        if not self._depth and self._waiting:
            due = self._waiting
            self._waiting = []
        self._lock.release()
        for event in due:
            _trace(event)
            for callback in self.callbacks:
                self._call(callback, event)

    @property
    def is_heard(self) -> bool:
        return bool(self.callbacks) or telemetry.is_on()

    def tell(self, events: Iterable[SessionEvent]) -> None:
        if self.is_heard:
            self._waiting += events

    def appended(self, events: Iterable[Event], state: State) -> None:
        """Tells of events that were appended to the record."""
        if self.is_heard:
            for event in events:
                self._waiting += session_events(event, self.conversation, state.turn, state.step)

    def take_problems(self) -> list[str]:
        """Failures of callbacks since the last call."""
        problems = self.problems
        self.problems = []
        return problems

    def _call(self, callback: OnEvent, event: SessionEvent) -> None:
        try:
            awaited = callback(event)
            if isawaitable(awaited):
                self._run(self._awaited(awaited, event))
        except Exception as error:  # a callback must not harm the session
            self._report(event, error)

    async def _awaited(self, awaited: Awaitable[None], event: SessionEvent) -> None:
        try:
            await awaited
        except Exception as error:
            self._report(event, error)

    def _run(self, work: Any) -> None:
        """In the session's event loop, in the one that runs here, or in that of the process."""
        import asyncio  # slow to import, and not needed without coroutines

        from refold.summaries.call import running_loop

        task: Any
        if self.loop is not None and self.loop.is_running():
            task = asyncio.run_coroutine_threadsafe(work, self.loop)
        else:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                asyncio.run_coroutine_threadsafe(work, running_loop()).result()
                return
            task = loop.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Waits until all callbacks that are coroutines have ended."""
        import asyncio
        from concurrent.futures import Future

        tasks = [asyncio.wrap_future(one) if isinstance(one, Future) else one for one in (*self._tasks,)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self, event: SessionEvent, error: Exception) -> None:
        import logging

        problem = f"on_event failed at {event.kind}: {error!r}"
        logging.getLogger("refold").warning(problem, exc_info=error)
        self.problems = [*self.problems, problem][-MAX_PROBLEMS:]


def _trace(event: SessionEvent) -> None:
    """Adds an event to the current span; not for added messages, which would fill the span of a long run."""
    if event.kind == "message-added":
        return
    is_quoting = event.kind in ("message-expanded", "compaction:failed")  # models and people write the reason
    facts: dict[str, Any] = {"gen_ai.conversation.id": event.conversation}
    for name in TRACED:
        if name != "reason" or not is_quoting:
            facts[f"refold.{name.replace('tokens_', 'tokens.')}"] = getattr(event, name, None)
    telemetry.event(f"refold.{event.kind}", facts)


def session_events(event: Event, conversation: str, turn: int, step: int) -> Iterable[SessionEvent]:
    """The events that callbacks get for a stored event."""
    match event:
        case Said(line=line, message=message):
            yield MessageEvent(
                "message-added",
                conversation,
                line.at,
                line.turn,
                line.step,
                line.role,
                line.tools,
                message=message,
            )
        case Replaced(span=span, lines=lines, kind=kind, why=why) if kind not in NOT_SHORTENING:
            shown = next((one for one in event.shown if isinstance(one, Message)), None)
            is_gone = shown is None or kind == "window" or (kind == "expire" and why.startswith("remove"))
            changed = MessageEvent(
                "message-removed" if is_gone else "message-compacted",
                conversation,
                span.start,
                turn,
                step,
                role=lines[0].role if lines else "",
                tools=lines[0].tools if lines else (),
                reason=why,
                tokens_saved=event.tokens[0] - event.tokens[1],
                message=shown,
                edit=event.at,
                span=span if len(span) > 1 else None,
            )
            if kind == "expire":
                yield msgspec.structs.replace(changed, kind="message-expired")
            yield changed
        case Called(problem=str(problem)):
            yield CompactionEvent("compaction:failed", conversation, turn, step, problem)
