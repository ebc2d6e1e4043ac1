"""How one ask is put to one summarizer: within a time and a budget, and again where that may help."""

import asyncio
from collections.abc import Callable
from math import inf
from random import uniform
from time import monotonic
from typing import Any

import msgspec

from refold.core.errors import MessageError
from refold.core.sound import flaw
from refold.summarize.attempt import GivenUpError, attempt
from refold.summarize.problem import line, problem, status_of, wait_of
from refold.summarize.summarizer import Answer, Ask, Summarizer

RETRIES = 2
"""Requests after the first, at most."""
FIRST_WAIT_S = 0.5
"""Before the first of them, unless the server says how long; twice as long before the next."""


class Outcome(msgspec.Struct, frozen=True):
    """An answer, or the reason why there is none."""

    answer: Answer | None
    problem: str | None
    """One line of at most 300 characters, without secrets."""
    calls: int
    """Requests that were made."""
    still_running: Callable[[], bool] | None = None
    """Whether a request that was given up goes on all the same; None where none was."""


async def call(
    summarizer: Summarizer,
    ask: Ask,
    *,
    timeout_s: float,
    spend: Callable[[], bool],
    loop: asyncio.AbstractEventLoop | None = None,
) -> Outcome:
    """Asks, and asks again after a 429 or 5xx, all within `timeout_s`.

    `spend` is asked before each request; False is that none may be made. Coroutines are awaited here, or on
    `loop` where that runs in another thread; whatever is not a coroutine function runs in a thread.
    """
    deadline = monotonic() + timeout_s
    made, before = 0, ""
    while spend():
        made += 1
        try:
            return Outcome(_answer(await attempt(summarizer, ask, deadline, loop)), None, made)
        except GivenUpError as error:
            late = line(f"timed out after {timeout_s:g} s{before}")
            return Outcome(None, late, made, error.still_running)
        except Exception as error:
            why, wait = problem(error), _wait(error, made)
        if not wait < deadline - monotonic():
            return Outcome(None, why, made)
        before = f"; before that: {why}"
        await asyncio.sleep(wait)
    return Outcome(None, line(f"the budget of calls is used up{before}"), made)


def _wait(error: Exception, made: int) -> float:
    """Seconds before another try; infinite where that would not help."""
    status = status_of(error)
    if made > RETRIES or status is None or not (status == 429 or status >= 500):
        return inf
    told = wait_of(error)
    return FIRST_WAIT_S * 2 ** (made - 1) * uniform(0.5, 1) if told is None else told


def _answer(given: Any) -> Answer:
    answer = Answer(str(given)) if isinstance(given, str) else given
    if not isinstance(answer, Answer) or not isinstance(answer.text, str):
        kind = type(given.text if isinstance(given, Answer) else given).__name__
        raise MessageError("the summary", f"expected a text, got {kind}")
    if torn := flaw(answer.text):
        raise MessageError("the summary", f"there is {torn} in it")
    try:
        return msgspec.convert(msgspec.to_builtins(answer), Answer)
    except (msgspec.ValidationError, TypeError) as error:
        raise MessageError("the summary", f"is not as an answer must be: {error}") from error
