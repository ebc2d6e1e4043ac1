"""Work that goes on elsewhere while its owner does something else: in a thread of its own."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from threading import Event, Thread
from typing import Protocol, TypeVar

T = TypeVar("T")


class PendingWork(Protocol):
    """Work that can be waited for, whoever does it."""

    @property
    def problem(self) -> str | None:
        """Why it came to nothing before, and is not tried again."""

    @property
    def is_running(self) -> bool: ...

    def wait(self, seconds: float | None = None, /) -> bool:
        """Whether it has ended by then."""


class BackgroundJob:
    """Runs a coroutine to its end, or until it is canceled. Whatever it raises is its own business."""

    problem = None

    def __init__(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        self._work = work
        self._done, self._canceled, self._pid = Event(), False, os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        run = copy_context().run  # so that it is traced as a part of what began it
        self._thread = Thread(target=run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._done.is_set() and self._pid == os.getpid()  # threads do not come with a fork

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended by then."""
        return not self.is_running or self._done.wait(seconds)

    def cancel(self) -> None:
        self._canceled = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    def _run(self) -> None:
        with suppress(BaseException):  # not even one that would end a program: it is not this one's to end
            asyncio.run(self._main())
        self._done.set()

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if not self._canceled:
                await self._work()
        finally:
            self._done.set()  # whatever it left running is nobody's to wait for


async def in_thread(work: Callable[[], T]) -> T:
    """In a thread that nobody has to wait for when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # nobody is there any more
            loop.call_soon_threadsafe(tell, result, error)

    Thread(target=run, daemon=True).start()
    return await done
