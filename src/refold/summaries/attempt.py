"""How one request is under way: a task here, a task on another event loop, or a thread; and given up."""

import asyncio
import concurrent.futures
import inspect
import os
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from refold.summaries.summarizer import Ask, Summarizer

Loop: TypeAlias = asyncio.AbstractEventLoop
GRACE_S = 0.5
"""What a canceled coroutine gets to clean up before it is left alone."""


class GivenUpError(Exception):
    """It took too long; `still_running` says whether it goes on all the same."""

    def __init__(self, still_running: Callable[[], bool]) -> None:
        self.still_running = still_running


async def attempt(summarizer: Summarizer, ask: Ask, deadline: float, home: Callable[[], Loop] | None) -> Any:
    """What the summarizer gives, or raises; `deadline` is on the monotonic clock, coroutines run at `home`.

    Raises:
        GivenUpError: the deadline has passed.
    """
    if inspect.iscoroutinefunction(summarizer) or inspect.iscoroutinefunction(type(summarizer).__call__):
        return await _end(_as_task(lambda: summarizer(ask), home), deadline)
    given = await _end(_in_thread(lambda: summarizer(ask)), deadline)
    if inspect.isawaitable(given):
        return await _end(_as_task(lambda: given, home), deadline)
    return given


class _Ended(NamedTuple):
    """An error is carried as a value: futures refuse some, and turn others into cancellation."""

    given: Any = None
    error: BaseException | None = None


class _Under(NamedTuple):
    way: asyncio.Future[_Ended]
    still_running: Callable[[], bool]
    cancel: Callable[[], object]


async def _end(under: _Under, deadline: float) -> Any:
    way = under.way
    try:
        await asyncio.wait({way}, timeout=max(0.0, deadline - monotonic()))
    finally:
        late = not way.done()
        if late:
            under.cancel()
            await asyncio.wait({way}, timeout=GRACE_S)
            if not isinstance(way, asyncio.Task):  # a task is left alone from here on
                way.cancel()
    if late:
        raise GivenUpError(under.still_running)
    ended = way.result()
    if isinstance(ended.error, Exception):
        raise ended.error
    if ended.error is not None:
        raise RuntimeError(f"it raised {type(ended.error).__name__}")
    return ended.given


def _in_thread(work: Callable[[], Any]) -> _Under:
    """A daemon of its own: neither the interpreter nor `asyncio.run` waits for its end."""
    future: concurrent.futures.Future[_Ended] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            ended = _Ended(work())
        except BaseException as error:
            ended = _Ended(error=error)
        future.set_result(ended)

    thread = Thread(target=copy_context().run, args=(run,), name="refold-summarizer", daemon=True)
    thread.start()
    way = asyncio.wrap_future(future)
    return _Under(way, thread.is_alive, way.cancel)


def _as_task(work: Callable[[], Any], home: Callable[[], Loop] | None) -> _Under:
    """On the loop that is its `home`, if that is running in another thread; here otherwise."""

    async def run() -> _Ended:
        try:
            return _Ended(await work())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # not even one that would end the program whose loop this is
            return _Ended(error=error)

    loop = home() if home is not None else None
    if loop is not None and loop is not asyncio.get_running_loop() and loop.is_running():
        return _elsewhere(run, loop)
    task, pid = asyncio.ensure_future(run()), os.getpid()
    return _Under(task, lambda: not task.done() and pid == os.getpid(), task.cancel)


def _elsewhere(run: Callable[[], Awaitable[_Ended]], loop: Loop) -> _Under:
    """A task on another loop, which has ended only when it has ended there."""
    future, pid = concurrent.futures.Future[_Ended](), os.getpid()

    async def there() -> None:
        if not future.set_running_or_notify_cancel():  # given up before it was begun
            return
        try:
            ended = await run()
        except asyncio.CancelledError:
            ended = _Ended(error=RuntimeError("canceled on its own event loop"))
        future.set_result(ended)

    task = asyncio.run_coroutine_threadsafe(there(), loop)

    def still_running() -> bool:
        return future.running() and pid == os.getpid()  # threads do not come with a fork

    return _Under(asyncio.wrap_future(future), still_running, lambda: future.cancel() or task.cancel())
