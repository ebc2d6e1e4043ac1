"""A call in a daemon thread, as a future."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class DaemonCall(Future[T]):
    """Runs `work` with the caller's context variables. The process does not wait for it at exit."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        super().__init__()
        self._work = work
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()
        Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self.running() and self._pid == os.getpid()  # threads do not survive a fork

    def _run(self) -> None:
        try:
            self.set_result(self._work())
        except BaseException as error:
            self.set_exception(error)
