"""Calls a summarizer within a timeout, on the event loop of its clients. Retries are its SDK's."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import msgspec

from refold import telemetry
from refold.core import codec
from refold.core.codec import json_problem
from refold.core.errors import MessageError
from refold.core.message import Usage
from refold.stores.daemon_call import DaemonCall
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.summaries.call_errors import describe, is_free
from refold.summaries.summarizer import Answer, Ask, Summarizer

T = TypeVar("T")
Loop: TypeAlias = asyncio.AbstractEventLoop
CANCEL_GRACE_S = 0.5
"""How long a canceled coroutine may clean up before it is abandoned."""
MAX_TOKENS = 2**53 - 1
"""The largest whole number that every JSON reader takes; larger token counts are nonsense."""

codec.decoder(Answer)


class CallTimeoutError(Exception):
    """The deadline passed; a coroutine was canceled, but a thread goes on."""

    def __init__(self, thread: DaemonCall[Any] | None = None) -> None:
        self.thread = thread


class CallOutcome(msgspec.Struct, frozen=True):
    """An answer, or the reason why there is none."""

    answer: Answer | None
    problem: str | None = None
    """One line of at most 300 characters, without secrets."""
    is_free: bool = False
    """The request was refused or never arrived, so that nobody pays for it."""
    abandoned: DaemonCall[Any] | None = None
    """The thread that goes on after a timeout."""


async def call(
    summarizer: Summarizer, ask: Ask, *, timeout_s: float, loop: Callable[[], Loop] | None = None
) -> CallOutcome:
    """Coroutine functions run on `loop()` while that loop runs, otherwise on this one; everything else runs
    in a thread."""
    try:
        return CallOutcome(await _traced_call(summarizer, ask, monotonic() + timeout_s, loop))
    except CallTimeoutError as error:
        return CallOutcome(None, f"timed out after {timeout_s:g} s", abandoned=error.thread)
    except Exception as error:
        return CallOutcome(None, describe(error), is_free(error))


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


async def call_once(
    work: Callable[[T], Any], argument: T, deadline: float, loop: Callable[[], Loop] | None
) -> Any:
    """What the callable returns or raises; `deadline` is on the monotonic clock.

    Raises:
        CallTimeoutError: the deadline has passed.
    """
    if inspect.iscoroutinefunction(work) or inspect.iscoroutinefunction(type(work).__call__):
        return await _before(deadline, _start_task(lambda: work(argument), loop))
    thread = DaemonCall(lambda: _run(work, argument), "refold-summarizer")
    try:
        value = await _before(deadline, asyncio.wrap_future(thread))
    except CallTimeoutError:
        raise CallTimeoutError(thread) from None
    if inspect.isawaitable(value):
        return await _before(deadline, _start_task(lambda: value, loop))
    return value


async def _before(deadline: float, future: "asyncio.Future[Any]") -> Any:
    try:
        await asyncio.wait({future}, timeout=max(0.0, deadline - monotonic()))
    finally:
        is_late = not future.done()
        if is_late:
            future.cancel()
            await asyncio.wait({future}, timeout=CANCEL_GRACE_S)
    if is_late:
        raise CallTimeoutError
    if future.cancelled():
        raise RuntimeError("canceled on its own event loop")
    return future.result()


def _run(work: Callable[[T], Any], argument: T) -> Any:
    try:
        return work(argument)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(f"it raised {type(error).__name__}") from error  # a future takes no other


def _start_task(
    work: Callable[[], Awaitable[Any]], loop_of: Callable[[], Loop] | None
) -> "asyncio.Future[Any]":
    async def run() -> Any:
        try:
            return await work()
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # would end the program whose loop this is
            raise RuntimeError(f"it raised {type(error).__name__}") from error

    loop = loop_of() if loop_of is not None else None
    if loop is None or loop is asyncio.get_running_loop() or not loop.is_running():
        return asyncio.ensure_future(run())
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))


class _SharedLoop:
    """An event loop in a thread, which lasts as long as the process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._loop: Loop | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Threads do not survive a fork, so the child starts its own loop."""
        keep_for_parent(self._loop)
        self._lock = Lock()
        self._loop = None

    def get(self) -> Loop:
        with self._lock:
            if self._loop is None:
                has_started = Event()
                self._loop = asyncio.new_event_loop()
                self._loop.call_soon(has_started.set)
                Thread(target=_run_forever, args=(self._loop,), name="refold-loop", daemon=True).start()
                has_started.wait()
            return self._loop


def _run_forever(loop: Loop) -> None:
    while not loop.is_closed():
        with suppress(BaseException):  # even SystemExit of one task does not end it for the others
            loop.run_forever()


_shared_loop = _SharedLoop()


def running_loop(preferred: Loop | None = None) -> Loop:
    """`preferred` while it runs, otherwise one that all share: SDK clients stay on the loop that they were
    created on."""
    return preferred if preferred is not None and preferred.is_running() else _shared_loop.get()
