"""Makes a view smaller: what is set to expire, what is too large, and the rungs of the ladder."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from refold.config.config import DEFAULT, AgentSettings, Config
from refold.core.budget import Budget
from refold.core.cache_cost import CacheTerms
from refold.core.errors import ConflictError
from refold.core.event import Certificate, Event, Line, Replaced, Said, Worth
from refold.core.expiry import lease_has_ended, lease_steps
from refold.core.live import Live
from refold.core.message import Message
from refold.core.plan import (
    CompactionRequest,
    Count,
    Edit,
    Policy,
    Stamp,
    applied,
    is_reducible,
    must_stay,
    settle,
)
from refold.core.view import Item, View
from refold.session.results import kind_of
from refold.session.validate import Override
from refold.stores.record import Record
from refold.stores.store import Lease

if TYPE_CHECKING:
    from refold.config.ladder import LadderPlan
    from refold.policies.summarize import SummaryPart
    from refold.session.embedding import Similarity
    from refold.summaries.prepare import MessageToSummarize, SummaryWriter

NONE = Override()


class Reducer:
    """Of one view, by the settings of one agent."""

    def __init__(
        self, record: Record, config: Config, agent: str | None, policies: Sequence[Policy] = ()
    ) -> None:
        self.record, self.config, self.agent = record, config, agent or DEFAULT
        self.settings: AgentSettings = config.agent(agent)
        self.policies = tuple(policies)
        """The user's own rungs: they come first."""
        self.summaries: SummaryWriter | None = None
        """By models, where there are any."""
        self.similarity: Similarity | None = None
        """Of texts, by their meaning, where there is an embedder."""
        self.handles = self.settings.shows_handles
        """Whether what is reduced says how to get it back."""
        self.terms: CacheTerms | None = None
        """What a rewrite costs now, where that is known."""
        self._expiries = {name: tool.expire for name, tool in self.settings.tools.items()}
        self._step = -1
        self._live: Live | None = None  # not asked for before it is needed
        self._left = set[int]()
        """Places that were looked at and left as they are."""
        self._override = NONE
        """For which they were."""
        self.problems = list[str]()
        """For the report of the next request."""
        self._has_told = False
        """That there is no summarizer, though one is wanted."""

    def arrive(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """What does not wait for a trigger: results that expire in this step, and those too large to show."""
        live, cap, step = self.record.live, self.settings.compaction.capping, self.record.live.state.step + 1
        if self._live is not live:  # read anew, or begun anew
            self._live, self._left = live, set()
            if self.summaries is not None:
                self.summaries.reset_if_reopened()
        if self._override != override:
            self._override, self._left = override, set()
        most = cap.most(budget) if cap else budget.window
        is_overridden = any(rule.after_steps is not None for rule in override.rules)
        timed = bool(self._expiries) or is_overridden
        rules = (*self._expiries.values(), *override.rules)
        is_fickle = any(rule.strategy == "relevance" for rule in rules)  # due at any later step, or never
        left = set[int]() if is_fickle and self._step != step else self._left
        fixed, self._step = {*live.kept, live.state.latest}, step
        lines = [  # most steps end here: in nearly all views there is no such thing
            item.lines[0]
            for item in live.items
            if item.lines
            and (timed or item.lines[0].tokens > most or item.lines[0].expiry is not None)
            and item.lines[0].at not in left
            and item.span.start not in fixed
            and is_reducible(item)
            and (is_overridden or lease_steps(item.lines[0]) is None)
        ]
        return self._on_arrival(lines, budget, count, override) if lines else []

    def has_ended_leases(self) -> bool:
        """True if an answer of refold's own tools is still shown whole after its lease."""
        live = self.record.live
        lines = (item.lines[0] for item in live.items if item.edit is None and item.lines)
        return any(lease_has_ended(line, live.state.step + 1) for line in lines)

    def _on_arrival(
        self, lines: Sequence[Line], budget: Budget, count: Count, override: Override
    ) -> list[Replaced]:
        from refold.policies.expire import Expire, batches  # read only by those who need it

        live, cap = self.record.live, self.settings.compaction.capping
        written = self.summaries.message_summaries if self.summaries else {}
        expire = Expire(self._expiries, override.tools, told=written)
        together = batches([line for item in live.items for line in item.lines])
        due = expire.due(lines, live.state.step + 1, together)
        only = frozenset(line.at for line in due)
        near = self._nearness([line for line in due if expire.rule(line, together).strategy == "relevance"])
        policy = msgspec.structs.replace(expire, only=only, near=near)
        edits = self._ask(policy, due, budget, count, override)
        rules = [expire.rule(line, together) for line in due] if edits else []
        if any(rule.compact_mode == "ai-summary" and rule.mode in (None, "compact") for rule in rules):
            self._miss_summarizer()
        if cap is not None:
            gone = {edit.span.start for edit in edits} | {line.at for line in lines if self._is_spared(line)}
            most = cap.most(budget)
            large = [line for line in lines if line.answers and line.tokens > most and line.at not in gone]
            edits += self._ask(cap, large, budget, count, override)
        return edits

    def _miss_summarizer(self) -> None:
        """Says once that results are cut which a model was to summarize, since there is none."""
        if self.summaries is None and not self._has_told:
            self._has_told = True
            self.problems.append(
                "compact_mode is ai-summary, but no summarizer is set: results are cut to their beginning."
                " Set `summarizer`, or compact_mode: first-n-chars"
            )

    def _nearness(self, lines: Sequence[Line]) -> dict[int, float]:
        """How near messages are to the work at hand in meaning, by place; empty without an embedder."""
        if self.similarity is None or not lines:
            return {}
        from refold.policies.expire import current_work
        from refold.policies.importance import all_text

        recent = current_work([line for item in self.record.live.items for line in item.lines])
        self.record.load([*lines, *recent])
        texts, work = ([all_text(self.record.message(line)) for line in some] for some in (lines, recent))
        return dict(zip((line.at for line in lines), self.similarity(texts, work), strict=True))

    def due_for_summary(self, step: int, override: Override) -> "list[MessageToSummarize]":
        """Messages that models are to write about by the time that they expire in a step."""
        from refold.policies.expire import Expire, batches, length_of
        from refold.summaries.prepare import MessageToSummarize

        summaries, live = self.summaries, self.record.live
        rules = (*override.rules, *self._expiries.values())
        if summaries is None or not any(rule.compact_mode == "ai-summary" for rule in rules):
            return []
        summaries.reset_if_reopened()
        expire, fixed = Expire(self._expiries, override.tools), {*live.kept, live.state.latest}
        together = batches([line for item in live.items for line in item.lines])
        bare = {item.lines[0].at: item for item in live.items if item.edit is None and item.lines}
        found = list[MessageToSummarize]()
        for line in expire.due([item.lines[0] for item in bare.values()], step, together):
            rule = expire.rule(line, together)
            wanted = rule.compact_mode == "ai-summary" and rule.mode in (None, "compact")
            length = length_of(rule)
            over = summaries.tried - summaries.pending
            if not wanted or line.at in fixed or (line.at, rule.prompt, length) in over:
                continue
            message = self.record.message(line)
            if len(message.text) > length:
                tool, own = line.tools[0] if line.tools else line.role, line.expiry
                is_own = own is not None and own.prompt is not None and own.prompt == rule.prompt
                said = self.record.event(line.place)
                kind = kind_of(said) if isinstance(said, Said) else None
                about = (is_own, kind or "", line.step)
                found.append(MessageToSummarize(line.at, message, tool, rule.prompt, length, *about))
        return found

    def _is_spared(self, line: Line) -> bool:
        prune = self.settings.compaction.pruning
        return prune is not None and bool({*line.tools} & {*prune.exclude_tools})

    def _ask(
        self, policy: Policy, lines: Sequence[Line], budget: Budget, count: Count, override: Override
    ) -> list[Replaced]:
        """What it does about some lines; those that it leaves alone are not asked about again."""
        edits = self.reduce(policy, budget, count, override, round=False) if lines else []
        self._left |= {line.at for line in lines} - {edit.span.start for edit in edits}
        return edits

    def climb(
        self, budget: Budget, count: Count, override: Override, still: Callable[[], bool] | None = None
    ) -> list[Replaced]:
        """A compaction that triggers set off.

        It is planned only while it is `still` necessary: another writer may compact the view meanwhile.
        """
        return self._reduce_by(self._way(budget), budget, count, override, still=still)

    def _way(self, budget: Budget, order: CompactionRequest | None = None) -> "LadderPlan":
        from refold.config import ladder as rungs

        if order is not None:
            return rungs.on_demand(self.settings, self.policies, order)
        if budget.keeps_recent:
            return rungs.all_but_recent(self.settings)
        return rungs.full_ladder(self.settings, self.policies)

    def economize(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """What pays by the terms, if anything does."""
        from refold.config import ladder as rungs

        return self.reduce(rungs.economy_ladder(self.settings, self.policies), budget, count, override)

    def foreseen(
        self, view: View, budget: Budget, count: Count, order: CompactionRequest | None = None
    ) -> "list[SummaryPart]":
        """What a compaction will summarize."""
        from refold.config import ladder as rungs

        return rungs.parts_to_summarize(self._way(budget, order).by_rule, self.settings, view, budget, count)

    def compact(
        self,
        order: CompactionRequest,
        budget: Budget,
        count: Count,
        override: Override,
        lease: Lease | None = None,
    ) -> list[Replaced]:
        """On demand, after what models wrote for it.

        Raises:
            ConflictError: the `lease` is somebody else's by now.
        """
        return self._reduce_by(self._way(budget, order), budget, count, override, lease=lease)

    def planned(self, budget: Budget, count: Count, order: CompactionRequest | None = None) -> list[Replaced]:
        """What a compaction would do, by rule: nothing is changed."""
        return self._settled(self._way(budget, order).by_rule, budget, count, round=True)

    def _reduce_by(
        self,
        way: "LadderPlan",
        budget: Budget,
        count: Count,
        override: Override = NONE,
        *,
        lease: Lease | None = None,
        still: Callable[[], bool] | None = None,
    ) -> list[Replaced]:
        """What models have written stands for what they wrote about, if that is still as it was."""
        summaries = self.summaries
        ready = summaries.ready(self.record.live.freeze()) if summaries else None
        if summaries is not None and ready is not None:
            from refold.policies.summarize import UsePrepared

            edits = list[Replaced]()
            with suppress(ConflictError):  # another writer has newer ones
                policy = way.by_model(UsePrepared(ready.prepared))
                edits = self.reduce(policy, budget, count, override, lease=ready.lease, still=still)
            summaries.mark_used(ready, edits)
            if edits:
                return edits
        return self.reduce(way.by_rule, budget, count, override, lease=lease, still=still)

    def finish(self, budget: Budget, count: Count) -> list[Replaced]:
        """When a run ends there is no cache to keep warm: old outputs are cleared for the next one."""
        prune = self.settings.compaction.pruning
        if prune is None or self.settings.is_off or self.record.live.tokens < max(prune.limits(budget)):
            return []
        return self.reduce(prune, budget, count)

    def least(self) -> int:
        """What is counted for all that no rung may hide."""
        return sum(line.tokens for line in must_stay(self.record.live.freeze()))

    def reduce(
        self,
        policy: Policy,
        budget: Budget,
        count: Count,
        override: Override = NONE,
        *,
        round: bool = True,
        lease: Lease | None = None,
        still: Callable[[], bool] | None = None,
    ) -> list[Replaced]:
        """Plans on the view as it is, and again if somebody else edits it meanwhile; each time only if it is
        `still` necessary.

        Raises:
            ConflictError: the `lease` is somebody else's by now.
        """
        keep = override.keep_originals is not False

        def build() -> Sequence[Event]:
            if still is not None and not still():
                return []
            return self._settled(policy, budget, count, round=round, keep_originals=keep)

        return [event for event in self.record.append(build, lease) if isinstance(event, Replaced)]

    def _settled(
        self, policy: Policy, budget: Budget, count: Count, *, round: bool, keep_originals: bool = True
    ) -> list[Replaced]:
        live = self.record.live
        self.record.load_all(originals=round)
        view = msgspec.structs.replace(_read_once(live.freeze()), handles=self.handles and keep_originals)
        number = live.state.round + 1 if round else 0
        stamp = Stamp(live.state.next, time.time(), live.view, number, keep_originals)
        events, before = list[Replaced](), view
        for edit in policy(view, budget, count):
            told = msgspec.structs.replace(edit, why=self._because(edit), certificate=self._certified(edit))
            events.append(settle(told, view, stamp, count))
            stamp = msgspec.structs.replace(stamp, at=stamp.at + 1)
            view = applied(view, events[-1])
        if self.terms is None or not round or not events:
            return events
        worth = _weighed(self.terms, before, view, events)
        if not self.terms.accepts(worth):
            return []
        return [msgspec.structs.replace(events[0], worth=worth), *events[1:]]

    def _certified(self, edit: Edit) -> Certificate | None:
        if edit.certificate is None:
            return None
        return msgspec.structs.replace(edit.certificate, digest=self.record.digest_before(edit.span.end))

    def _because(self, edit: Edit) -> str:
        """Why, with the setting that decided it and where that was set."""
        if not edit.setting:
            return edit.why
        if edit.setting[0] in ("override", "message"):
            return f"{edit.why} ({edit.setting[-1]} of the {edit.setting[0]})"
        origin = self.config.origin("agents", self.agent, *edit.setting)
        return f"{edit.why} ({'.'.join(edit.setting)}, {origin})"


def _weighed(terms: CacheTerms, before: View, after: View, edits: Sequence[Replaced]) -> Worth:
    """What edits are worth together. What was said since the last request is new to the cache in any case."""
    start = min(edit.span.start for edit in edits)
    spoken = [item.span.start for item in after.items if any(line.role == "assistant" for line in item.lines)]
    newest = max(spoken, default=0)
    sent = [item.tokens for item in after.items if start <= item.span.start < newest]
    bills = [edit.certificate for edit in edits if edit.certificate and not edit.certificate.was_cached]
    return terms.weigh(before.tokens - after.tokens, sum(sent), sum(bill.cost or 0.0 for bill in bills))


def _read_once(view: View) -> View:
    """The same, but each message is decoded only the first time that it is asked for."""
    known = dict[tuple[int, int], Message]()

    def read(item: Item) -> Item:
        def words(line: Line) -> Message:
            key = (line.at, line.n)
            if key not in known:
                known[key] = item.words(line)
            return known[key]

        return Item(item.span, item.lines, words, item.edit, item.merged)

    return msgspec.structs.replace(view, items=tuple(map(read, view.items)))
