"""The same conversation for code that awaits: every verb of `Session`, run off the event loop."""

from asyncio import AbstractEventLoop, get_running_loop, to_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from itertools import islice
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from refold import opening
from refold.answers import Diff
from refold.asked import whole
from refold.core.event import Event
from refold.job import in_thread
from refold.session import Session

P = ParamSpec("P")
T = TypeVar("T")
CHUNK = 200
"""Lines or events fetched in one go."""


def _awaited(
    verb: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate["AsyncSession", P], Awaitable[T]]:
    @wraps(verb)
    async def twin(self: "AsyncSession", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await to_thread(verb, self.sync, *args, **kwargs)

    return twin


class AsyncSession:
    """A thin twin of `Session`: the same words, the same events for the same input."""

    def __init__(self, session: Session, loop: AbstractEventLoop | None = None) -> None:
        self.sync = session
        """The session that does the work."""
        session.notifier.loop = loop
        if session.reducer.summaries is not None:
            session.reducer.summaries.desk.loop = loop

    append = _awaited(Session.append)
    say = _awaited(Session.say)
    intake = _awaited(Session.intake)
    fit = _awaited(Session.fit)
    check_overflow = _awaited(Session.check_overflow)
    should_compact = _awaited(Session.should_compact)
    view = _awaited(Session.view)
    compact = _awaited(Session.compact)
    compactions = _awaited(Session.compactions)
    get_all = _awaited(Session.get_all)
    get_range = _awaited(Session.get_range)
    get_recent = _awaited(Session.get_recent)
    get_count = _awaited(Session.get_count)
    messages_since_compaction = _awaited(Session.messages_since_compaction)
    expand = _awaited(Session.expand)
    tools = _awaited(Session.tools)
    call = _awaited(Session.call)
    before_step = _awaited(Session.before_step)
    after_step = _awaited(Session.after_step)
    explain = _awaited(Session.explain)
    savings = _awaited(Session.savings)
    search = _awaited(Session.search)
    memories = _awaited(Session.memories)
    undo = _awaited(Session.undo)
    restore = _awaited(Session.restore)
    correct = _awaited(Session.correct)
    pin = _awaited(Session.pin)
    unpin = _awaited(Session.unpin)
    name = _awaited(Session.name)
    clear = _awaited(Session.clear)

    @property
    def conversation(self) -> str:
        return self.sync.conversation

    @property
    def model(self) -> str | None:
        return self.sync.model

    @model.setter
    def model(self, model: str | None) -> None:
        self.sync.model = model

    async def diff(
        self, at: int | None = None, to: int | None = None, *, other: "AsyncSession | Session | None" = None
    ) -> Diff:
        with_ = other.sync if isinstance(other, AsyncSession) else other
        return await to_thread(self.sync.diff, at, to, other=with_)

    async def close(self) -> None:
        """The same, and waits for coroutines that were told of something."""
        await to_thread(self.sync.close)
        await self.sync.notifier.settled()

    async def fork(self, new_id: str, *, at: int | None = None) -> "AsyncSession":
        return AsyncSession(await to_thread(self.sync.fork, new_id, at=at), get_running_loop())

    def events(self, after: int = 0, *, follow: bool = False) -> AsyncIterator[Event]:
        start = max(0, whole("after", after))
        return _followed(self.sync.record.followed(start)) if follow else _each(self.sync.events(start))

    def export(self) -> AsyncIterator[str]:
        return _each(self.sync.export())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _each(source: Iterator[T]) -> AsyncIterator[T]:
    while chunk := await to_thread(lambda: list(islice(source, CHUNK))):
        for one in chunk:
            yield one


async def _followed(source: Iterator[T | None]) -> AsyncIterator[T]:
    """In threads of their own: who waits for what others say keeps nobody else from working."""

    def some() -> tuple[list[T], bool]:
        found = list[T]()
        for one in source:
            if one is None or len(found) == CHUNK:
                return ([*found, one] if one is not None else found), False
            found.append(one)
        return found, True

    is_over = False
    while not is_over:
        found, is_over = await in_thread(some)
        for one in found:
            yield one


def _opening(make: Callable[P, Session]) -> Callable[P, Awaitable[AsyncSession]]:
    @wraps(make)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> AsyncSession:
        return AsyncSession(await to_thread(make, *args, **kwargs), get_running_loop())

    return twin


aopen = _opening(opening.open)
