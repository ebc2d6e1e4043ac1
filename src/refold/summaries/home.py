"""Where coroutines run that have no event loop of their own: on one that lasts as long as the process."""

import asyncio
import os
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

_HOMES: dict[int, Future[asyncio.AbstractEventLoop]] = {}
"""By process: threads do not come with a fork. What came along is not closed: its owner still uses it."""


def home(own: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """`own` while that runs, else that of this process: a client is on the same one in every call."""
    if own is not None and own.is_running():
        return own
    new = Future[asyncio.AbstractEventLoop]()
    known = _HOMES.setdefault(os.getpid(), new)
    if known is new:
        try:
            Thread(target=_run, args=(asyncio.new_event_loop(), new), name="refold-home", daemon=True).start()
        except BaseException as error:  # no thread or no file is left: another time, perhaps
            del _HOMES[os.getpid()]
            new.set_exception(error)
    return known.result()


def _run(loop: asyncio.AbstractEventLoop, running: Future[asyncio.AbstractEventLoop]) -> None:
    loop.call_soon(running.set_result, loop)
    while not loop.is_closed():
        with suppress(BaseException):  # not even one that would end a program ends what others live on
            loop.run_forever()
