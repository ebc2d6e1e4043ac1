"""How one ask is put to one summarizer: within a time and a budget, and again where that may help."""

import asyncio
from collections.abc import Callable
from math import inf
from random import uniform
from time import monotonic
from typing import Any

import msgspec

from refold import telemetry
from refold.core import codec
from refold.core.codec import json_problem
from refold.core.errors import MessageError
from refold.core.message import Usage
from refold.summaries.attempt import GivenUpError, attempt
from refold.summaries.problem import is_free, line, problem, status_of, wait_of
from refold.summaries.summarizer import Answer, Ask, Summarizer

RETRIES = 2
"""Requests after the first, at most."""
FIRST_WAIT_S = 0.5
"""Before the first of them, unless the server says how long; twice as long before the next."""
MOST_TOKENS = 2**53 - 1
"""Of one kind in one answer: what is more is nonsense, and no JSON number everywhere."""

codec.decoder(Answer)


class CallOutcome(msgspec.Struct, frozen=True):
    """An answer, or the reason why there is none."""

    answer: Answer | None
    problem: str | None
    """One line of at most 300 characters, without secrets."""
    calls: int
    """Requests that were made."""
    still_running: Callable[[], bool] | None = None
    """Whether a request that was given up goes on all the same; None where none was."""
    is_free: bool = False
    """The last request was refused or never got there: it costs nothing, as those before it."""


async def call(
    summarizer: Summarizer,
    ask: Ask,
    *,
    timeout_s: float,
    spend: Callable[[], str | None],
    home: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> CallOutcome:
    """Asks, and asks again after a 429 or 5xx, all within `timeout_s`.

    `spend` is asked before each request, and says why none may be made. Coroutines are awaited here, or on
    the loop that is their `home` while that runs; whatever is not a coroutine function runs in a thread.
    """
    deadline = monotonic() + timeout_s
    made, before = 0, ""
    while (refused := spend()) is None:
        made += 1
        try:
            return CallOutcome(await _asked(summarizer, ask, deadline, home), None, made)
        except GivenUpError as error:
            late = line(f"timed out after {timeout_s:g} s{before}")
            return CallOutcome(None, late, made, error.still_running)
        except Exception as error:
            why, wait, free = problem(error), _wait(error, made), is_free(error)
        if not wait < deadline - monotonic():
            return CallOutcome(None, why, made, is_free=free)
        before = f"; before that: {why}"
        await asyncio.sleep(wait)
    return CallOutcome(None, line(f"{refused}{before}"), made, is_free=True)


async def _asked(
    summarizer: Summarizer, ask: Ask, deadline: float, home: Callable[[], asyncio.AbstractEventLoop] | None
) -> Answer:
    """One request, in sight of those who trace."""
    name = getattr(summarizer, "name", None)
    facts: telemetry.Facts = {"gen_ai.request.max_tokens": ask.max_tokens, "refold.round": ask.round}
    with telemetry.chat(name if isinstance(name, str) else None, facts) as span:
        try:
            answer = _answer(await attempt(summarizer, ask, deadline, home))
        except GivenUpError:
            span.fail("timeout")
            raise
        span.note({"gen_ai.response.model": answer.model, "gen_ai.response.finish_reasons": (answer.finish,)})
        if used := answer.usage:
            span.note({"gen_ai.usage.input_tokens": used.input, "gen_ai.usage.output_tokens": used.output})
            cached = {"read": used.cache_read, "creation": used.cache_write}
            span.note({f"gen_ai.usage.cache_{way}.input_tokens": many for way, many in cached.items()})
        return answer


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
    if torn := json_problem(answer.text):
        raise MessageError("the summary", f"there is {torn} in it")
    try:
        known = msgspec.convert(msgspec.to_builtins(answer), Answer)
    except (msgspec.ValidationError, TypeError) as error:
        raise MessageError("the summary", f"is not as an answer must be: {error}") from error
    return msgspec.structs.replace(known, usage=known.usage and _usage(known.usage))


def _usage(told: Usage) -> Usage:
    """As it was told, within what can be added up."""
    return Usage(*(min(max(0, count), MOST_TOKENS) for count in msgspec.structs.astuple(told)))
