"""Summaries by models: asked for in the background, checked, and kept until they are needed."""

import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar
from weakref import finalize

import msgspec

from refold.config.prompts import message_template
from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import RefoldError, SettingError, StoreError
from refold.core.event import Called, Replaced, Span
from refold.core.view import View
from refold.policies.expire import MessageKey
from refold.policies.summarize import Part, PreparedSummary
from refold.stores.store import Lease
from refold.summaries.background import BackgroundJob, PendingWork
from refold.summaries.context import SummaryContext, digest_of
from refold.summaries.models import named
from refold.summaries.prompt import SummaryInput, matter_of
from refold.summaries.summarizer import Summarizer
from refold.summaries.write import MessageToSummarize, NoSummaryError, Writer, name_of

__all__ = ["MessageToSummarize", "ReadySummaries", "SummaryWriter", "summarizers_of"]

T = TypeVar("T")
AGAIN_S = 0.1
"""Between two looks at whether somebody else still writes."""


class ReadySummaries(msgspec.Struct, frozen=True):
    """SummaryWriter that wait for their moment."""

    prepared: tuple[PreparedSummary, ...]
    lease: Lease | None
    """Whoever took it since has newer ones."""


codec.decoder(ReadySummaries)


class SummaryWriter:
    """Of one view, for one session: one job at a time."""

    def __init__(
        self, desk: SummaryContext, summarizers: Sequence[Summarizer], lock: AbstractContextManager[object]
    ) -> None:
        self.desk, self.record, self._lock = desk, desk.record, lock
        self.ahead = True
        """Whether anything is written before it is needed."""
        self.told: dict[MessageKey, str] = {}
        """What was written about single messages."""
        self.tried: set[MessageKey] = set()
        """Of which messages that was wanted, whatever came of it."""
        self.pending: set[MessageKey] = set()
        """Of which of them it is being written."""
        self.problems: list[str] = []
        """Why models were done without, since somebody last looked."""
        self.again: str | None = None
        """Why the newest job came to nothing, where it may not another time."""
        self.hand_over: Callable[[Budget, int], PendingWork] | None = None
        """Has somebody else write for a budget, in a round, where that is how it is set up."""
        self._own = tuple(summarizers)
        self._models = _models((*desk.prompts.conversation.models, *desk.settings.models), desk)
        self._job: BackgroundJob | None = None
        self._handed: PendingWork | None = None
        self._ready: ReadySummaries | None = None
        self._end = finalize(self, desk.lease.end)
        self._live = self.record.live
        self._tried = self._forgotten = 0
        """The round that was written for already, and up to which place nothing counts that was."""

    @property
    def can_write(self) -> bool:
        """There is a model here."""
        return bool(self._own or self._models)

    @property
    def job(self) -> BackgroundJob | None:
        """What is under way here."""
        return self._job if self._job is not None and self._job.is_running else None

    @property
    def under_way(self) -> PendingWork | None:
        """What is under way, here or elsewhere."""
        if self._handed is not None and not self._handed.is_running:
            self._handed = None
        return self.job or self._handed

    @property
    def was_tried(self) -> bool:
        """SummaryWriter for the next compaction were asked for, whatever came of it."""
        return self._tried == self.record.live.state.round + 1

    def prepare(
        self,
        view: View,
        parts: Callable[[], Sequence[Part]],
        messages: Sequence[MessageToSummarize] = (),
        focus: str | None = None,
        *,
        is_due: bool = False,
        patience_s: float = 0.0,
        keeps_lease: bool = False,
    ) -> BackgroundJob | None:
        """Begins to write summaries of messages, and of the parts that are found then, unless it is at it.

        `view` must have its words at hand: it is read by another thread. Where a compaction `is_due`, it is
        the last chance. Somebody else who writes is waited for as long as patience lasts. With `keeps_lease`
        the caller ends the lease, after it has committed what was written.
        """
        if self.job is not None:
            return self.job
        self.reset_if_reopened()
        self.again = None
        state, tip = self.record.live.state, self.record.tip
        round, made = state.round + 1, state.next
        self.desk.begin(made, tip)
        self.pending = {one.key for one in messages}
        self.tried |= self.pending

        async def work() -> None:
            try:
                await write()
            except Exception as error:
                self.again = f"{type(error).__name__}: {error}"
                raise

        async def write() -> None:
            found = parts()
            if (found or is_due) and not self.desk.is_gone:
                self._tried = round
            if not found and not messages:
                return
            lease = await self._turn(patience_s)
            if lease is None and self.desk.lease.is_needed:  # somebody else is at it: another time
                self.again = "somebody else writes a summary now"
                if patience_s:
                    self.problems.append("Somebody else writes a summary now: this is done by rule")
                self.tried -= self.pending
                self.pending.clear()
                return
            found = [] if self._is_written(view) else found
            try:
                for one in messages:
                    text = await self._tell(one, view)
                    if text and not self.desk.is_gone:
                        self.told[one.key] = text
                    self.pending.discard(one.key)
                about = {"round": round, "focus": focus, "made": made, "tip": tip}
                matters = [matter_of(part, view, self.record, **about) for part in found]
                done = [await self._write(matter) for matter in matters if matter.is_new]
                if self._is_held(lease):
                    self._keep(ReadySummaries(tuple(one for one in done if one), lease))
            finally:
                self.pending.clear()
                if not keeps_lease:
                    self.desk.lease.end()

        self._job = BackgroundJob(work, f"refold-summaries-{self.record.key.conversation}")
        return self._job

    def _is_written(self, view: View) -> bool:
        """Another writer has written it."""
        kept = self.desk.kept(self._place, ReadySummaries)
        return kept is not None and any(self._is_as_it_was(one, view) for one in kept.prepared)

    def _is_held(self, lease: Lease | None) -> bool:
        """Nobody else took it meanwhile, or has written what is newer."""
        held = self.desk.acquire() if lease is not None else None
        if lease is not None and (held is None or held.fence != lease.fence):
            self.again = "somebody else took over"
            return False
        return True

    def handed_over(self, budget: Budget, *, is_due: bool = False) -> PendingWork | None:
        """Somebody else is asked to write what a budget will need; None where it has to be done here."""
        if self.hand_over is None:
            return None
        round = self.record.live.state.round + 1
        try:
            self._handed = self.hand_over(budget, round)
        except StoreError as error:
            self.problems.append(f"{error}. Summaries are written here instead")
            return None
        if is_due:
            self._tried = round
            self.problems += [self._handed.problem] if self._handed.problem else []
        return self._handed

    async def _turn(self, patience_s: float) -> Lease | None:
        until = time.monotonic() + patience_s
        while (lease := self.desk.acquire()) is None and self.desk.lease.is_needed:
            if time.monotonic() >= until:
                break
            await sleep(AGAIN_S)
        return lease

    def ready(self, view: View) -> ReadySummaries | None:
        """What can stand in the view now, written by this process or another."""
        self.reset_if_reopened()
        found = self._ready or self.desk.kept(self._place, ReadySummaries)
        if found is None:
            return None
        fresh = tuple(one for one in found.prepared if self._is_as_it_was(one, view))
        if self._ready is not None:
            gone = [one for one in found.prepared if one not in fresh]
            self._tell_unused(gone, "what it stands for is not as it was")
        self._ready = ReadySummaries(fresh, found.lease) if fresh else None
        return self._ready

    def forget(self) -> None:
        """What was written for another occasion is not for this one."""
        self.reset_if_reopened()
        if self._ready is not None:
            self._tell_unused(self._ready.prepared, "another was ordered")
        self._ready, self._forgotten = None, self.record.live.state.next

    def used(self, ready: ReadySummaries, edits: Sequence[Replaced]) -> None:
        """They stand in the view by these edits, or never will."""
        stand = [edit for edit in edits if edit.certificate and edit.certificate.model]
        idle = [one for one in ready.prepared if not any(edit.span.covers(one.brief.span) for edit in stand)]
        self._tell_unused(idle, "it would save too little, or there is a newer one")
        self._ready, self._forgotten = None, self.record.live.state.next
        self.desk.keep(self._place, ReadySummaries((), None))  # nobody else finds them ready
        if ready.lease is not None:
            self.desk.lease.release(ready.lease)

    def reset_if_reopened(self) -> None:
        """Where the record was begun anew, nothing is known of it yet."""
        if self._live is not self.record.live:
            self._live, self._ready, self._tried, self._forgotten = self.record.live, None, 0, 0
            self._handed = None
            self.told.clear()
            self.tried.clear()

    def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
            self._job.wait(1.0)
        self._end()

    def _is_as_it_was(self, one: PreparedSummary, view: View) -> bool:
        is_known = one.made >= self._forgotten and one.tip == self.record.digest_before(one.made)
        return is_known and one.part(view) is not None and not self._is_used(one, view)

    def _is_used(self, one: PreparedSummary, view: View) -> bool:
        """A model's summary stands there already: this one, or a newer one."""
        met = [item for item in view.items if item.span.meets(one.brief.span) and item.is_folded]
        edits = [
            self.record.stored(item.edit) for item in met if item.edit is not None and item.edit >= one.made
        ]
        return any(
            isinstance(edit, Replaced) and edit.certificate and edit.certificate.model for edit in edits
        )

    def _tell_unused(self, prepared: Iterable[PreparedSummary], why: str) -> None:
        for one in prepared:
            places = _places(one.brief.span)
            self.problems.append(f"The summary of {places} by {one.certificate.model} was not used: {why}")

    @property
    def _place(self) -> bytes:
        """Where what is ready is kept for other processes."""
        return digest_of("ready", *self.record.key, self.record.view)

    def _keep(self, ready: ReadySummaries) -> None:
        if ready.prepared:
            self._ready = ready
            self.desk.keep(self._place, ready)

    # By one summarizer after the other

    async def _write(self, matter: SummaryInput) -> PreparedSummary | None:
        candidates = self._own or self._models
        return await self._first(candidates, matter.brief.span, lambda writer: writer.summary(matter))

    async def _tell(self, one: MessageToSummarize, view: View) -> str | None:
        try:
            prompt = f"{one.prompt}\n" if one.is_own and one.prompt else one.prompt
            template = message_template(prompt, self.desk.folder)
            candidates = self._own or _models(template.models, self.desk) or self._models
        except SettingError as error:
            self.problems.append(str(error))
            return None
        task = next((item.words(line).text for item in view.items for line in item.lines if line.asks), "")
        span = Span(one.at, one.at + 1)
        return await self._first(candidates, span, lambda writer: writer.about(one, template, task))

    async def _first(
        self, candidates: Sequence[Summarizer], span: Span, work: Callable[[Writer], Awaitable[T]]
    ) -> T | None:
        """What the first of them writes who can; why others could not is told."""
        for summarizer in candidates:
            if self.desk.is_hung(summarizer):  # one call at a time, also where one is given up
                name = name_of(summarizer)
                self.again = f"{name} has not come back yet"
                self.problems.append(f"{name} was given up and has not come back yet: it is not asked")
                continue
            writer = Writer(self.desk, summarizer, span)
            try:
                done = await work(writer)
            except NoSummaryError as error:
                self._tell_called(writer, str(error))
                if error.is_final:
                    return None
                self.again = f"{writer.name}: {error}"
            except BaseException:  # it was ended in the middle, and may be paid for all the same
                self._tell_called(writer, "it was ended")
                raise
            else:
                self._tell_called(writer, None)
                self.again = None
                return done
        return None

    def _tell_called(self, writer: Writer, problem: str | None) -> None:
        """What came of it, in the record."""
        if problem is not None:
            self.problems.append(f"{writer.name} wrote no summary of {_places(writer.span)}: {problem}")
        if not writer.calls and problem is None:
            return  # somebody had paid for it before
        facts = (writer.name, problem, writer.calls, writer.usage, writer.cost, time.time())
        with suppress(RefoldError), self._lock:
            self.record.catch_up()
            self.record.append(lambda: [] if self.desk.is_gone else [self._called(writer.span, *facts)])
            self.desk.settled(writer.calls, writer.cost)

    def _called(self, span: Span, *facts: Any) -> Called:
        return Called(self.record.live.state.next, self.record.view, span, *facts)


def summarizers_of(given: Any, base_urls: Mapping[str, str]) -> tuple[Summarizer, ...]:
    """What a user hands in: a callable, the name of a model, or several of these.

    Raises:
        SettingError: it is none of these.
    """
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found = [named(one, base_urls) if isinstance(one, str) else one for one in several]
    for one in found:
        if not callable(one):
            wanted = "expected a callable or the name of a model"
            raise SettingError("summarizer", f"{wanted}, got {type(one).__name__}")
    return tuple(found)


def _models(names: Sequence[str], desk: SummaryContext) -> tuple[Summarizer, ...]:
    return tuple(named(name, desk.settings.base_urls) for name in dict.fromkeys(names))


def _places(span: Span) -> str:
    return f"#{span.start}" if len(span) == 1 else f"#{span.start}-{span.end - 1}"
