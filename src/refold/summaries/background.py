"""Background work: a coroutine in a thread of its own, and what can be waited for."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Event
from typing import Protocol, TypeVar

from refold.stores.daemon_call import DaemonCall

T = TypeVar("T")


class PendingWork(Protocol):
    """Work of another thread or process."""

    @property
    def problem(self) -> str | None:
        """Why it failed before and is not tried again."""

    @property
    def is_running(self) -> bool: ...

    def wait(self, seconds: float | None = None, /) -> bool:
        """True if it has ended by then."""


class BackgroundJob:
    """Runs a coroutine to its end or until it is canceled. Errors of the coroutine are dropped."""

    problem = None

    def __init__(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        self._work = work
        self._done = Event()
        self._canceled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = DaemonCall(lambda: asyncio.run(self._main()), name)
        self._thread.add_done_callback(lambda _: self._done.set())

    @property
    def is_running(self) -> bool:
        return not self._done.is_set() and self._thread.is_running

    def wait(self, seconds: float | None = None) -> bool:
        """True if it has ended by then."""
        return not self.is_running or self._done.wait(seconds)

    def cancel(self) -> None:
        self._canceled = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop was closed just now
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            if not self._canceled:
                await self._work()
        finally:
            self._done.set()  # waiters do not wait for tasks that it left behind


async def in_thread(work: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, in a daemon thread: the process does not wait for it at exit."""
    return await asyncio.wrap_future(DaemonCall(work, "refold-thread"))
