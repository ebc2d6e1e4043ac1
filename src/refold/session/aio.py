"""`AsyncSession`: every verb of `Session`, run in a thread, for code that awaits."""

from asyncio import AbstractEventLoop, get_running_loop, to_thread
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import AbstractContextManager
from functools import wraps
from itertools import islice
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from refold.config.config import AgentSettings, Config
from refold.core.budget import Budget
from refold.core.event import Event
from refold.models.limits import ModelLimits
from refold.session import api
from refold.session.conversation import Conversation
from refold.session.inspect import Inspector
from refold.session.results import Diff
from refold.session.session import Session
from refold.session.streams import StreamRecording, is_async_stream, require_stream
from refold.session.validate import require_int
from refold.stores.record import Record
from refold.stores.store import Key, Store
from refold.summaries.background import in_thread

P = ParamSpec("P")
T = TypeVar("T")
_END = object()
FETCHED_AT_ONCE = 200


def _awaited(
    verb: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate["AsyncSession", P], Awaitable[T]]:
    """The verb in a thread; async streams among its arguments are read first, on the event loop."""

    @wraps(verb)
    async def twin(self: "AsyncSession", /, *args: Any, **kwargs: Any) -> T:
        read = [await _read(one) for one in args]
        named = {name: await _read(one) for name, one in kwargs.items()}
        return await to_thread(verb, self.sync, *read, **named)

    return cast(Callable[Concatenate["AsyncSession", P], Awaitable[T]], twin)


def _same(name: str) -> Any:
    """An attribute of the session that does the work."""
    return property(
        lambda self: getattr(self.sync, name), lambda self, value: setattr(self.sync, name, value)
    )


async def _read(value: Any) -> Any:
    """An iterator of all its chunks for an async stream; anything else as it is."""
    if isinstance(value, list | tuple):
        return [await _read(one) for one in value] if any(map(is_async_stream, value)) else value
    return iter([chunk async for chunk in value]) if is_async_stream(value) else value


class _Recording(AsyncIterator[Any]):
    """Hands on the chunks of a stream, async or not, and stores the reply when it ends.

    It is not a generator: an abandoned async generator is closed by a task, perhaps after the next request.
    """

    def __init__(self, stream: Any, tape: StreamRecording, finish: Callable[[StreamRecording], None]) -> None:
        self._tape = tape
        self._finish = finish
        self._chunks = aiter(stream if is_async_stream(stream) else _in_threads(stream))

    async def __anext__(self) -> Any:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            if not self._tape.is_over:
                await to_thread(self._finish, self._tape)
            raise
        except BaseException as error:  # the next verb settles it, in a thread
            self._tape.break_off(error)
            raise
        self._tape.chunks.append(chunk)
        return chunk


async def _in_threads(stream: Iterable[Any]) -> AsyncIterator[Any]:
    chunks = iter(stream)
    while (chunk := await to_thread(next, chunks, _END)) is not _END:
        yield chunk


class AsyncSession:
    """A thin twin of `Session`: the same verbs, the same events for the same input."""

    def __init__(self, session: Session, loop: AbstractEventLoop | None = None) -> None:
        self.sync = session
        """The session that does the work."""
        session.chat.lock.loop = loop
        if session.chat.summaries is not None:
            session.chat.summaries.context.loop = loop

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
    save_snapshot = _awaited(Session.save_snapshot)

    model: str | None = _same("model")
    shows_handles: bool = _same("shows_handles")
    store: Store = _same("store")
    key: Key = _same("key")
    config: Config = _same("config")
    settings: AgentSettings = _same("settings")
    conversation: str = _same("conversation")
    chat: Conversation = _same("chat")
    record: Record = _same("record")
    limits: ModelLimits = _same("limits")
    dialect: str = _same("dialect")
    budget: Budget = _same("budget")
    hidden_tokens: int = _same("hidden_tokens")
    inspect: Inspector = _same("inspect")
    locked: Callable[[], AbstractContextManager[Inspector]] = _same("locked")

    async def diff(
        self, at: int | None = None, to: int | None = None, *, other: "AsyncSession | Session | None" = None
    ) -> Diff:
        with_ = other.sync if isinstance(other, AsyncSession) else other
        return await to_thread(self.sync.diff, at, to, other=with_)

    def record_stream(
        self, stream: AsyncIterable[Any] | Iterable[Any], *, keep_partial: bool = False
    ) -> AsyncIterator[Any]:
        """Like `Session.record_stream`, for `async for`; the stream may be async or not."""
        require_stream(stream)
        return _Recording(stream, self.sync._begin_stream(keep_partial), self.sync._finish_stream)

    async def close(self) -> None:
        """Like `Session.close`; also waits for callbacks that are coroutines."""
        await to_thread(self.sync.close)
        await self.sync.chat.lock.settled()

    async def fork(self, new_id: str, *, at: int | None = None) -> "AsyncSession":
        return AsyncSession(await to_thread(self.sync.fork, new_id, at=at), get_running_loop())

    def events(self, after: int = 0, *, follow: bool = False) -> AsyncIterator[Event]:
        start = max(0, require_int("after", after))
        return _fetched(self.sync.record.followed(start) if follow else self.sync.events(start))

    def export(self, format: str | None = None, *, view: bool = False) -> AsyncIterator[str]:
        return _fetched(self.sync.export(format, view=view))

    def __repr__(self) -> str:
        return repr(self.sync).replace("Session", "AsyncSession", 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _fetched(source: Iterator[T | None]) -> AsyncIterator[T]:
    """What an iterator gives, without None; it waits in threads of its own, to leave other verbs theirs."""

    def fetch() -> list[T | None]:
        found = list[T | None]()
        for one in islice(source, FETCHED_AT_ONCE):
            found.append(one)
            if one is None:  # what is there is not kept back until more comes
                break
        return found

    while found := await in_thread(fetch):
        for one in found:
            if one is not None:
                yield one


class Opening(Coroutine[Any, Any, AsyncSession]):
    """Returned by `aopen`: await it for the session, or enter it with `async with`, which also closes it."""

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


aopen = _opening(api.open)
