"""Summaries by models: written in the background, checked, and kept until a compaction uses them."""

import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

import msgspec

from refold.config.prompts import message_template
from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import RefoldError, SettingError, StoreError
from refold.core.event import Called, Replaced, Span
from refold.core.plan import Count, Policy
from refold.core.view import View
from refold.policies.expire import MessageKey
from refold.policies.summarize import SummaryPart
from refold.stores.store import Lease
from refold.summaries.background import BackgroundJob, PendingWork
from refold.summaries.context import SummaryContext, digest_of
from refold.summaries.prompt import SummaryInput, summary_input, task_of
from refold.summaries.providers import summarizer_by_name
from refold.summaries.summarizer import Summarizer
from refold.summaries.write import MessageToSummarize, NoSummaryError, Writer, name_of

if TYPE_CHECKING:
    from refold.summaries.queue import CompactionJob, JobQueue

T = TypeVar("T")
LEASE_POLL_S = 0.1


class ReadySummaries(msgspec.Struct, frozen=True):
    """Summaries that the next compaction can use."""

    prepared: tuple[SummaryPart, ...]
    lease: Lease | None
    """Under which they were written: a later holder has newer ones."""


codec.decoder(ReadySummaries)


class SummaryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a job summarizes: the parts of a view that a compaction will replace, and single messages."""

    view: View
    """Its messages are loaded: the job's thread reads it."""
    window: int
    """Of the conversation's model."""
    count: Count
    messages: Sequence[MessageToSummarize] = ()
    policy: Policy | None = None
    """Of the compaction, by rule; None: only messages are summarized."""
    budget: Budget = Budget()
    """Of the compaction."""
    focus: str | None = None
    is_due: bool = False
    """The compaction is happening now."""
    lease_wait_s: float = 0.0
    keeps_lease: bool = False
    """The caller ends the lease, after it has committed the summaries."""

    def parts(self, max_tokens: int | None) -> list[SummaryPart]:
        """The parts of the view to summarize, found as the compaction would find them."""
        from refold.config.ladder import parts_to_summarize

        if self.policy is None:
            return []
        return parts_to_summarize(self.policy, max_tokens, self.view, self.budget, self.count)


class SummaryWriter:
    """Writes the summaries of one view, for one session: one job at a time."""

    def __init__(
        self,
        context: SummaryContext,
        summarizers: Sequence[Summarizer],
        lock: AbstractContextManager[object],
        queue: "JobQueue | None" = None,
    ) -> None:
        self.context = context
        self.record = context.record
        self._lock = lock
        self._queue = queue
        """For workers, if that is configured."""
        self.message_summaries: dict[MessageKey, str] = {}
        self.tried: set[MessageKey] = set()
        """Messages that were to be summarized by themselves, with or without success."""
        self.pending: set[MessageKey] = set()
        """Those of `tried` that are being summarized."""
        self.problems: list[str] = []
        """Why no model's summary was used; for the next report."""
        self.retry_reason: str | None = None
        """Why the newest job failed, if it may succeed later."""
        self._own = tuple(summarizers)
        self._models = self._by_name((*context.prompts.conversation.models, *context.settings.models))
        self._job: BackgroundJob | None = None
        self._enqueued: PendingWork | None = None
        self._ready: ReadySummaries | None = None
        self._release_at_exit = finalize(self, context.lease.end)
        self._live = self.record.live
        self._tried_round = 0
        self._valid_from = 0
        """Summaries written before this place are not used."""

    @property
    def can_write(self) -> bool:
        """True if this process has a model."""
        return bool(self._own or self._models)

    @property
    def job(self) -> BackgroundJob | None:
        """The running job of this process."""
        return self._job if self._job is not None and self._job.is_running else None

    @property
    def running(self) -> PendingWork | None:
        """The running job, of this process or a worker."""
        if self._enqueued is not None and not self._enqueued.is_running:
            self._enqueued = None
        return self.job or self._enqueued

    @property
    def was_tried(self) -> bool:
        """True if summaries for the next compaction were requested, with or without success."""
        return self._tried_round == self.record.live.state.round + 1

    def start(self, plan: SummaryPlan) -> BackgroundJob:
        """Starts to write the summaries of a plan, unless a job is running; returns the running job."""
        if self.job is not None:
            return self.job
        self.reset_if_reopened()
        self.retry_reason = None
        self.context.start(self.record.live.state.next, self.record.tip, plan.window)
        self.pending = {one.key for one in plan.messages}
        self.tried |= self.pending
        work = partial(self._work, plan, self.record.live.state.round + 1)
        self._job = BackgroundJob(work, f"refold-summaries-{self.record.key.conversation}")
        return self._job

    async def _work(self, plan: SummaryPlan, round: int) -> None:
        try:
            await self._write(plan, round)
        except Exception as error:
            self.retry_reason = f"{type(error).__name__}: {error}"

    async def _write(self, plan: SummaryPlan, round: int) -> None:
        """Writes the summaries of a plan for a round of compaction."""
        parts = plan.parts(self.context.settings.max_tokens)
        if (parts or plan.is_due) and not self.context.is_erased:
            self._tried_round = round
        if not parts and not plan.messages:
            return
        lease = await self._acquire_lease(plan.lease_wait_s)
        if lease is None and self.context.lease.is_needed:
            self.retry_reason = "another process is writing a summary of this view"
            if plan.lease_wait_s:
                self.problems.append(f"Compacted without a model: {self.retry_reason}")
            self.tried -= self.pending
            self.pending.clear()
            return
        if self._is_written(plan.view):
            parts = []
        try:
            for one in plan.messages:
                text = await self._summarize_message(one, plan.view)
                if text and not self.context.is_erased:
                    self.message_summaries[one.key] = text
                self.pending.discard(one.key)
            prepared = list[SummaryPart]()
            for part in parts:
                part = msgspec.structs.replace(part, made=self.context.covered, tip=self.context.digest)
                source = summary_input(part, plan.view, self.record, round=round, focus=plan.focus)
                summary = await self._summarize(source) if source and source.is_new else None
                if summary is not None:
                    prepared.append(summary)
            if self._still_holds(lease) and prepared:
                self._ready = ReadySummaries(tuple(prepared), lease)
                self.context.cache(self._cache_key, self._ready)
        finally:
            self.pending.clear()
            if not plan.keeps_lease:
                self.context.lease.end()

    def _is_written(self, view: View) -> bool:
        """True if another process has written the summaries."""
        cached = self.context.cached(self._cache_key, ReadySummaries)
        return cached is not None and any(self._is_valid(one, view) for one in cached.prepared)

    async def _acquire_lease(self, wait_s: float) -> Lease | None:
        until = time.monotonic() + wait_s
        while (lease := self.context.acquire_lease()) is None and self.context.lease.is_needed:
            if time.monotonic() >= until:
                break
            await sleep(LEASE_POLL_S)
        return lease

    def _still_holds(self, lease: Lease | None) -> bool:
        if lease is None:
            return True
        held = self.context.acquire_lease()
        if held is None or held.fence != lease.fence:
            self.retry_reason = "another process took over the lease"
            return False
        return True

    def enqueue(self, job: "CompactionJob", *, is_due: bool = False) -> PendingWork | None:
        """Has a worker write the summaries of the next compaction; None if this process must write them."""
        from refold.summaries.queue import WORKER_TIMEOUT_S

        if self._queue is None:
            return None
        try:
            handle = self._queue.put(job)
        except StoreError as error:
            self.problems.append(f"{error}. Summaries are written in this process instead")
            return None
        if handle.has_no_worker:
            self.problems.append(
                f"No worker has been active for {WORKER_TIMEOUT_S:g} s; `refold worker` starts one. Summaries"
                " are written in this process instead"
            )
            return None
        self._enqueued = handle
        if is_due:
            self._tried_round = job.round
            self.problems += [self._enqueued.problem] if self._enqueued.problem else []
        return self._enqueued

    def ready(self, view: View) -> ReadySummaries | None:
        """The summaries that can be used in the view now, written by this process or another."""
        self.reset_if_reopened()
        found = self._ready or self.context.cached(self._cache_key, ReadySummaries)
        if found is None:
            return None
        valid = tuple(one for one in found.prepared if self._is_valid(one, view))
        self._ready = ReadySummaries(valid, found.lease) if valid else None
        return self._ready

    def discard_ready(self) -> None:
        """Summaries that were written for an automatic compaction are not used for one on demand."""
        self.reset_if_reopened()
        self._ready = None
        self._valid_from = self.record.live.state.next

    def end_round(self, ready: ReadySummaries) -> None:
        """The compaction that they were written for is over: nobody uses them any more."""
        self.discard_ready()
        self.context.cache(self._cache_key, ReadySummaries((), None))
        if ready.lease is not None:
            self.context.lease.release(ready.lease)

    def reset_if_reopened(self) -> None:
        """Forgets everything if the record was read anew, as after an erasure."""
        if self._live is not self.record.live:
            self._live = self.record.live
            self._ready = None
            self._tried_round = 0
            self._valid_from = 0
            self._enqueued = None
            self.message_summaries.clear()
            self.tried.clear()

    def take_problems(self) -> list[str]:
        """Problems since the last call."""
        problems = self.problems
        self.problems = []
        return problems

    def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
            self._job.wait(1.0)
        self._release_at_exit()

    def _is_valid(self, one: SummaryPart, view: View) -> bool:
        """True if it covers what the view still shows, and no newer model's summary does."""
        if one.made < self._valid_from or one.tip != self.record.digest_before(one.made):
            return False
        if one.selection(view) is None:
            return False
        for item in view.items:
            if item.is_folded and item.edit is not None and item.edit >= one.made:
                edit = self.record.stored(item.edit) if item.span.meets(one.span) else None
                if isinstance(edit, Replaced) and edit.certificate and edit.certificate.model:
                    return False
        return True

    @property
    def _cache_key(self) -> bytes:
        """Under which other processes find the ready summaries."""
        return digest_of("ready", *self.record.key, self.record.view)

    # One summarizer after the other

    async def _summarize(self, source: SummaryInput) -> SummaryPart | None:
        candidates = self._own or self._models
        return await self._first_success(
            candidates, source.part.span, lambda writer: writer.summarize(source)
        )

    async def _summarize_message(self, one: MessageToSummarize, view: View) -> str | None:
        try:
            prompt = f"{one.prompt}\n" if one.is_own and one.prompt else one.prompt
            template = message_template(prompt, self.context.prompt_folder)
            candidates = self._own or self._by_name(template.models) or self._models
        except SettingError as error:
            self.problems.append(str(error))
            return None
        return await self._first_success(
            candidates,
            Span(one.at, one.at + 1),
            lambda writer: writer.summarize_message(one, template, task_of(view)),
        )

    async def _first_success(
        self, candidates: Sequence[Summarizer], span: Span, write: Callable[[Writer], Awaitable[T]]
    ) -> T | None:
        for summarizer in candidates:
            abandoned = self.context.abandoned.get(id(summarizer))
            if abandoned is not None and abandoned.is_running:
                self.retry_reason = f"the call of {name_of(summarizer)} that timed out has not ended"
                self.problems.append(f"{name_of(summarizer)} was not called: {self.retry_reason}")
                continue
            writer = Writer(self.context, summarizer, span)
            try:
                result = await write(writer)
            except NoSummaryError as error:
                self._record_calls(writer, str(error))
                if error.is_final:
                    return None
                self.retry_reason = f"{writer.name}: {error}"
            except BaseException:  # canceled; the provider may bill it all the same
                self._record_calls(writer, "it was canceled")
                raise
            else:
                self._record_calls(writer, None)
                self.retry_reason = None
                return result
        return None

    def _record_calls(self, writer: Writer, problem: str | None) -> None:
        if problem is not None:
            self.problems.append(f"{writer.name} wrote no summary of {_places(writer.span)}: {problem}")
        if not writer.calls and problem is None:
            return  # the answer was cached
        now = time.time()

        def build() -> list[Called]:
            if self.context.is_erased:
                return []
            at = self.record.live.state.next
            paid = (writer.calls, writer.usage, writer.cost, now)
            return [Called(at, self.record.view, writer.span, writer.name, problem, *paid)]

        with suppress(RefoldError), self._lock:
            self.record.catch_up()
            self.record.append(build)
            self.context.mark_recorded(writer.calls, writer.cost)

    def _by_name(self, models: Sequence[str]) -> tuple[Summarizer, ...]:
        return summarizers_of(list(dict.fromkeys(models)), self.context.settings.base_urls)


def summarizers_of(value: Any, base_urls: Mapping[str, str]) -> tuple[Summarizer, ...]:
    """The summarizers of a `summarizer` argument: a callable, the name of a model, or several of these.

    Raises:
        SettingError: it is something else.
    """
    if value is None:
        return ()
    found = list[Summarizer]()
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, str):
            one = summarizer_by_name(one, base_urls)
        if not callable(one):
            raise SettingError(
                "summarizer", f"expected a callable or the name of a model, got {type(one).__name__}"
            )
        found.append(one)
    return tuple(found)


def _places(span: Span) -> str:
    return f"#{span.start}" if len(span) == 1 else f"#{span.start}-{span.end - 1}"
