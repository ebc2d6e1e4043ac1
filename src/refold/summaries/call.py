"""Calls a summarizer: within a timeout and a budget, with retries, on the event loop of its clients."""

import asyncio
import concurrent.futures
import inspect
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from random import uniform
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold import telemetry
from refold.core import codec
from refold.core.codec import json_problem
from refold.core.errors import MessageError
from refold.core.message import Usage
from refold.stores.daemon_call import DaemonCall
from refold.summaries.call_errors import describe, is_free, retry_after, single_line, status_of
from refold.summaries.summarizer import Answer, Ask, Summarizer

Loop: TypeAlias = asyncio.AbstractEventLoop
RETRIES = 2
FIRST_RETRY_S = 0.5
"""Doubles with each retry; a server's Retry-After wins."""
CANCEL_GRACE_S = 0.5
"""How long a canceled coroutine may clean up before it is abandoned."""
MAX_TOKENS = 2**53 - 1
"""The largest whole number that every JSON reader takes; larger token counts are nonsense."""

codec.decoder(Answer)


class CallTimeoutError(Exception):
    """The deadline passed; `still_running` tells whether the abandoned call is still going on."""

    def __init__(self, still_running: Callable[[], bool]) -> None:
        self.still_running = still_running


class CallOutcome(msgspec.Struct, frozen=True):
    """An answer, or the reason why there is none."""

    answer: Answer | None
    problem: str | None
    """One line of at most 300 characters, without secrets."""
    calls: int
    """Requests that were made."""
    still_running: Callable[[], bool] | None = None
    """Set after a timeout: whether the abandoned request is still going on."""
    is_free: bool = False
    """No request was paid for: each was refused or never arrived."""


async def call(
    summarizer: Summarizer,
    ask: Ask,
    *,
    timeout_s: float,
    spend: Callable[[], str | None],
    loop: Callable[[], Loop] | None = None,
) -> CallOutcome:
    """Calls a summarizer, and again after a 429 or 5xx, all within `timeout_s`.

    `spend` is called before each request and returns the reason if none may be made. Coroutine functions
    run on `loop()` while that loop runs, otherwise on this one; everything else runs in a thread.
    """
    deadline = monotonic() + timeout_s
    calls = 0
    before = ""
    while (refusal := spend()) is None:
        calls += 1
        try:
            return CallOutcome(await _traced_call(summarizer, ask, deadline, loop), None, calls)
        except CallTimeoutError as error:
            problem = single_line(f"timed out after {timeout_s:g} s{before}")
            return CallOutcome(None, problem, calls, error.still_running)
        except Exception as error:
            problem = describe(error)
            wait_s = _retry_wait(error, calls)
            free = is_free(error)
        if not wait_s < deadline - monotonic():
            return CallOutcome(None, problem, calls, is_free=free)
        before = f"; before that: {problem}"
        await asyncio.sleep(wait_s)
    return CallOutcome(None, single_line(f"{refusal}{before}"), calls, is_free=True)


async def _traced_call(
    summarizer: Summarizer, ask: Ask, deadline: float, loop: Callable[[], Loop] | None
) -> Answer:
    name = getattr(summarizer, "name", None)
    attributes: telemetry.Facts = {"gen_ai.request.max_tokens": ask.max_tokens, "refold.round": ask.round}
    with telemetry.chat(name if isinstance(name, str) else None, attributes) as span:
        try:
            answer = _validated(await call_once(summarizer, ask, deadline, loop))
        except CallTimeoutError:
            span.fail("timeout")
            raise
        span.note({"gen_ai.response.model": answer.model, "gen_ai.response.finish_reasons": (answer.finish,)})
        if usage := answer.usage:
            span.note(
                {
                    "gen_ai.usage.input_tokens": usage.input,
                    "gen_ai.usage.output_tokens": usage.output,
                    "gen_ai.usage.cache_read.input_tokens": usage.cache_read,
                    "gen_ai.usage.cache_creation.input_tokens": usage.cache_write,
                }
            )
        return answer


def _retry_wait(error: Exception, calls: int) -> float:
    """Seconds before the next request; infinite if a retry would not help."""
    status = status_of(error)
    if calls > RETRIES or status is None or not (status == 429 or status >= 500):
        return inf
    seconds = retry_after(error)
    return FIRST_RETRY_S * 2 ** (calls - 1) * uniform(0.5, 1) if seconds is None else seconds


def _validated(value: Any) -> Answer:
    answer = Answer(str(value)) if isinstance(value, str) else value
    if not isinstance(answer, Answer) or not isinstance(answer.text, str):
        kind = type(value.text if isinstance(value, Answer) else value).__name__
        raise MessageError("the summary", f"expected a text, got {kind}")
    if problem := json_problem(answer.text):
        raise MessageError("the summary", f"contains {problem}")
    try:
        answer = msgspec.convert(msgspec.to_builtins(answer), Answer)
    except (msgspec.ValidationError, TypeError) as error:
        raise MessageError("the summary", f"is not a valid refold Answer: {error}") from error
    if answer.usage is None:
        return answer
    counts = [min(max(0, count), MAX_TOKENS) for count in msgspec.structs.astuple(answer.usage)]
    return msgspec.structs.replace(answer, usage=Usage(*counts))


# One call: a task here, a task on another event loop, or a thread


async def call_once(
    summarizer: Summarizer, ask: Ask, deadline: float, loop: Callable[[], Loop] | None
) -> Any:
    """What the summarizer returns or raises; `deadline` is on the monotonic clock.

    Raises:
        CallTimeoutError: the deadline has passed.
    """
    if inspect.iscoroutinefunction(summarizer) or inspect.iscoroutinefunction(type(summarizer).__call__):
        return await _result(_start_task(lambda: summarizer(ask), loop), deadline)
    value = await _result(_start_thread(lambda: summarizer(ask)), deadline)
    if inspect.isawaitable(value):
        return await _result(_start_task(lambda: value, loop), deadline)
    return value


class _Result(NamedTuple):
    """Errors are carried as values: futures refuse some, and turn others into cancellation."""

    value: Any = None
    error: BaseException | None = None


class _RunningCall(NamedTuple):
    future: asyncio.Future[_Result]
    still_running: Callable[[], bool]
    cancel: Callable[[], object]


async def _result(running: _RunningCall, deadline: float) -> Any:
    future = running.future
    try:
        await asyncio.wait({future}, timeout=max(0.0, deadline - monotonic()))
    finally:
        is_late = not future.done()
        if is_late:
            running.cancel()
            await asyncio.wait({future}, timeout=CANCEL_GRACE_S)
            if not isinstance(future, asyncio.Task):  # a task is abandoned
                future.cancel()
    if is_late:
        raise CallTimeoutError(running.still_running)
    result = future.result()
    if isinstance(result.error, Exception):
        raise result.error
    if result.error is not None:
        raise RuntimeError(f"it raised {type(result.error).__name__}")
    return result.value


def _start_thread(work: Callable[[], Any]) -> _RunningCall:
    def run() -> _Result:
        try:
            return _Result(work())
        except BaseException as error:
            return _Result(error=error)

    thread = DaemonCall(run, "refold-summarizer")
    waiter = asyncio.wrap_future(thread)
    return _RunningCall(waiter, lambda: thread.is_running, waiter.cancel)


def _start_task(work: Callable[[], Any], loop_of: Callable[[], Loop] | None) -> _RunningCall:
    async def run() -> _Result:
        try:
            return _Result(await work())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # even one that would end the program whose loop this is
            return _Result(error=error)

    loop = loop_of() if loop_of is not None else None
    if loop is not None and loop is not asyncio.get_running_loop() and loop.is_running():
        return _start_task_on(loop, run)
    task = asyncio.ensure_future(run())
    pid = os.getpid()
    return _RunningCall(task, lambda: not task.done() and pid == os.getpid(), task.cancel)


def _start_task_on(loop: Loop, run: Callable[[], Awaitable[_Result]]) -> _RunningCall:
    """A task on another loop; its future is done only once the task has ended there."""
    future = concurrent.futures.Future[_Result]()
    pid = os.getpid()

    async def run_there() -> None:
        if not future.set_running_or_notify_cancel():  # canceled before it began
            return
        try:
            result = await run()
        except asyncio.CancelledError:
            result = _Result(error=RuntimeError("canceled on its own event loop"))
        future.set_result(result)

    task = asyncio.run_coroutine_threadsafe(run_there(), loop)

    def still_running() -> bool:
        return future.running() and pid == os.getpid()  # threads do not survive a fork

    return _RunningCall(asyncio.wrap_future(future), still_running, lambda: future.cancel() or task.cancel())


_SHARED_LOOPS: dict[int, concurrent.futures.Future[Loop]] = {}
"""By process id, since threads do not survive a fork. The parent's loop is not closed: it is in use there."""


def running_loop(preferred: Loop | None = None) -> Loop:
    """`preferred` while it runs, otherwise one loop that lasts as long as the process: SDK clients stay on
    the loop that they were created on."""
    if preferred is not None and preferred.is_running():
        return preferred
    new = concurrent.futures.Future[Loop]()
    shared = _SHARED_LOOPS.setdefault(os.getpid(), new)
    if shared is new:
        try:
            Thread(
                target=_run_forever, args=(asyncio.new_event_loop(), new), name="refold-loop", daemon=True
            ).start()
        except BaseException as error:  # no threads or files are left; the next call tries again
            del _SHARED_LOOPS[os.getpid()]
            new.set_exception(error)
    return shared.result()


def _run_forever(loop: Loop, running: concurrent.futures.Future[Loop]) -> None:
    loop.call_soon(running.set_result, loop)
    while not loop.is_closed():
        with suppress(BaseException):  # the loop is shared: even SystemExit of one task does not end it
            loop.run_forever()
