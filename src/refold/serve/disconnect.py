"""Clients that go away: how that is seen, and how what is done for them is ended."""

from asyncio import CancelledError, Task, wait
from contextlib import suppress
from typing import Any

from starlette.types import Receive


async def gone(receive: Receive) -> None:
    """Waits until the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: Task[Any]) -> None:
    """Cancels what is not done yet, and waits for that.

    A cancelled task keeps where it was, with all that was known there, until it is asked what came of it.
    """
    for task in tasks:
        task.cancel()
    await wait(tasks)
    for task in tasks:
        if task.cancelled():
            with suppress(CancelledError):
                task.result()
