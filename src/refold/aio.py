"""The same conversation for code that awaits: every verb of `Session`, run off the event loop."""

from asyncio import AbstractEventLoop, get_running_loop, to_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import wraps
from itertools import islice
from operator import attrgetter
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from refold import opening
from refold.answers import Diff
from refold.asked import whole
from refold.compaction import Compaction
from refold.config import AgentSettings, Config
from refold.core.event import Event
from refold.fitter import Fitter
from refold.job import in_thread
from refold.notify import Notifier
from refold.record import Record
from refold.reducer import Reducer
from refold.session import Session
from refold.stores.store import Key, Store
from refold.toolbox import Toolbox

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


def _same(name: str) -> Any:
    """An attribute of the session that does the work."""
    return property(attrgetter(f"sync.{name}"))


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

    store: Store = _same("store")
    key: Key = _same("key")
    config: Config = _same("config")
    settings: AgentSettings = _same("settings")
    conversation: str = _same("conversation")
    notifier: Notifier = _same("notifier")
    record: Record = _same("record")
    reducer: Reducer = _same("reducer")
    fitter: Fitter = _same("fitter")
    compaction: Compaction = _same("compaction")
    toolbox: Toolbox = _same("toolbox")

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

    def export(self, format: str | None = None, *, view: bool = False) -> AsyncIterator[str]:
        return _each(self.sync.export(format, view=view))

    def __repr__(self) -> str:
        return repr(self.sync).replace("Session", "AsyncSession", 1)

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


class Opening(Coroutine[Any, Any, AsyncSession]):
    """What `aopen` returns: await it for the session, or enter it with `async with`, which closes it too."""

    def __init__(self, opened: Coroutine[Any, Any, AsyncSession]) -> None:
        self._opened = opened
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        return self._opened.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opened
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def send(self, value: Any, /) -> Any:
        return self._opened.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opened.throw(*error)

    def close(self) -> None:
        self._opened.close()


def _opening(make: Callable[P, Session]) -> Callable[P, Opening]:
    async def opened(*args: P.args, **kwargs: P.kwargs) -> AsyncSession:
        return AsyncSession(await to_thread(make, *args, **kwargs), get_running_loop())

    @wraps(make)
    def twin(*args: P.args, **kwargs: P.kwargs) -> Opening:
        return Opening(opened(*args, **kwargs))

    return twin


aopen = _opening(opening.open)
