"""How one request is under way: a task here, a task on another event loop, or a thread; and given up."""

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable
from contextvars import copy_context
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from refold.summarize.summarizer import Ask, Summarizer

Loop: TypeAlias = asyncio.AbstractEventLoop
GRACE_S = 0.5
"""What a canceled coroutine gets to clean up before it is left alone."""


class GivenUpError(Exception):
    """It took too long; `still_running` says whether it goes on all the same."""

    def __init__(self, still_running: Callable[[], bool]) -> None:
        self.still_running = still_running


async def attempt(summarizer: Summarizer, ask: Ask, deadline: float, loop: Loop | None) -> Any:
    """What the summarizer gives, or raises; `deadline` is on the monotonic clock.

    Raises:
        GivenUpError: the deadline has passed.
    """
    if inspect.iscoroutinefunction(summarizer) or inspect.iscoroutinefunction(type(summarizer).__call__):
        return await _end(_as_task(lambda: summarizer(ask), loop), deadline)
    given = await _end(_in_thread(lambda: summarizer(ask)), deadline)
    if inspect.isawaitable(given):
        return await _end(_as_task(lambda: given, loop), deadline)
    return given


class _Ended(NamedTuple):
    """An error is carried as a value: futures refuse some, and turn others into cancellation."""

    given: Any = None
    error: BaseException | None = None


class _Under(NamedTuple):
    way: asyncio.Future[_Ended]
    still_running: Callable[[], bool]
    elsewhere: bool = False


async def _end(under: _Under, deadline: float) -> Any:
    way = under.way
    try:
        await asyncio.wait({way}, timeout=max(0.0, deadline - monotonic()))
    finally:
        late = not way.done()
        if late:
            way.cancel()
            await asyncio.wait({way}, timeout=GRACE_S)
    if late:
        raise GivenUpError(under.still_running)
    if way.cancelled() and under.elsewhere:
        raise RuntimeError("canceled on its own event loop")
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
    return _Under(asyncio.wrap_future(future), thread.is_alive)


def _as_task(work: Callable[[], Any], loop: Loop | None) -> _Under:
    """On `loop`, if that is running in another thread; here otherwise."""
    tasks: list[asyncio.Task[Any] | None] = []

    async def run() -> _Ended:
        tasks.append(asyncio.current_task())
        try:
            return _Ended(await work())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # not even one that would end the program whose loop this is
            return _Ended(error=error)

    def still_running() -> bool:
        return any(task and not task.done() for task in tasks)

    if loop is None or loop is asyncio.get_running_loop() or not loop.is_running():
        return _Under(asyncio.ensure_future(run()), still_running)
    there = asyncio.run_coroutine_threadsafe(run(), loop)
    return _Under(asyncio.wrap_future(there), still_running, elsewhere=True)
