"""Plans and appends edits: expiry, caps, and the stages of the ladder."""

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
    """Edits one view, by the settings of one agent."""

    def __init__(
        self, record: Record, config: Config, agent: str | None, policies: Sequence[Policy] = ()
    ) -> None:
        self.record = record
        self.config = config
        self.agent = agent or DEFAULT
        self.settings: AgentSettings = config.agent(agent)
        self.policies = tuple(policies)
        """The user's own; they run first."""
        self.summaries: SummaryWriter | None = None
        self.similarity: Similarity | None = None
        """Set if there is an embedder."""
        self.handles = self.settings.shows_handles
        """Edited messages show a handle for `refold_expand`."""
        self.cache_terms: CacheTerms | None = None
        """What a rewrite costs now, if prices are known."""
        self._expiries = {name: tool.expire for name, tool in self.settings.tools.items()}
        self._step = -1
        self._live: Live | None = None  # loaded when needed
        self._left_unchanged = set[int]()
        """Places that were considered and left unchanged."""
        self._override = NONE
        """The override they were considered with."""
        self.problems = list[str]()
        """For the report of the next request."""
        self._has_warned = False

    def reduce_new_results(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """Reduces results that expire in this step or are too large. Needs no trigger."""
        live, cap, step = self.record.live, self.settings.compaction.capping, self.record.live.state.step + 1
        if self._live is not live:  # the record was reopened
            self._live, self._left_unchanged = live, set()
            if self.summaries is not None:
                self.summaries.reset_if_reopened()
        if self._override != override:
            self._override, self._left_unchanged = override, set()
        most = cap.most(budget) if cap else budget.window
        is_overridden = any(rule.after_steps is not None for rule in override.rules)
        timed = bool(self._expiries) or is_overridden
        rules = (*self._expiries.values(), *override.rules)
        by_relevance = any(rule.strategy == "relevance" for rule in rules)  # due at any later step, or never
        left = set[int]() if by_relevance and self._step != step else self._left_unchanged
        fixed, self._step = {*live.kept, live.state.latest}, step
        lines = [  # empty in nearly all steps
            item.lines[0]
            for item in live.items
            if item.lines
            and (timed or item.lines[0].tokens > most or item.lines[0].expiry is not None)
            and item.lines[0].at not in left
            and item.span.start not in fixed
            and is_reducible(item)
            and (is_overridden or lease_steps(item.lines[0]) is None)
        ]
        return self._reduce_lines(lines, budget, count, override) if lines else []

    def has_ended_leases(self) -> bool:
        """True if an answer of refold's own tools is still shown whole after its lease."""
        live = self.record.live
        lines = (item.lines[0] for item in live.items if item.edit is None and item.lines)
        return any(lease_has_ended(line, live.state.step + 1) for line in lines)

    def _reduce_lines(
        self, lines: Sequence[Line], budget: Budget, count: Count, override: Override
    ) -> list[Replaced]:
        from refold.policies.expire import Expire, batches  # read only by those who need it

        live, cap = self.record.live, self.settings.compaction.capping
        written = self.summaries.message_summaries if self.summaries else {}
        expire = Expire(self._expiries, override.tools, told=written)
        together = batches([line for item in live.items for line in item.lines])
        due = expire.due(lines, live.state.step + 1, together)
        only = frozenset(line.at for line in due)
        near = self._similarities(
            [line for line in due if expire.rule(line, together).strategy == "relevance"]
        )
        policy = msgspec.structs.replace(expire, only=only, near=near)
        edits = self._apply_to(policy, due, budget, count, override)
        rules = [expire.rule(line, together) for line in due] if edits else []
        if any(rule.compact_mode == "ai-summary" and rule.mode in (None, "compact") for rule in rules):
            self._warn_no_summarizer()
        if cap is not None:
            gone = {edit.span.start for edit in edits} | {line.at for line in lines if self._is_spared(line)}
            most = cap.most(budget)
            large = [line for line in lines if line.answers and line.tokens > most and line.at not in gone]
            edits += self._apply_to(cap, large, budget, count, override)
        return edits

    def _warn_no_summarizer(self) -> None:
        """Warns once that results are cut instead of summarized."""
        if self.summaries is None and not self._has_warned:
            self._has_warned = True
            self.problems.append(
                "compact_mode is ai-summary, but no summarizer is set: results are cut to their beginning."
                " Set `summarizer`, or compact_mode: first-n-chars"
            )

    def _similarities(self, lines: Sequence[Line]) -> dict[int, float]:
        """The semantic similarity of messages to the current work, by place; empty without an embedder."""
        if self.similarity is None or not lines:
            return {}
        from refold.policies.expire import current_work
        from refold.policies.importance import all_text

        recent = current_work([line for item in self.record.live.items for line in item.lines])
        self.record.load([*lines, *recent])
        texts, work = ([all_text(self.record.message(line)) for line in some] for some in (lines, recent))
        return dict(zip((line.at for line in lines), self.similarity(texts, work), strict=True))

    def due_for_summary(self, step: int, override: Override) -> "list[MessageToSummarize]":
        """Messages that expire in a step and are summarized by a model."""
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

    def _apply_to(
        self, policy: Policy, lines: Sequence[Line], budget: Budget, count: Count, override: Override
    ) -> list[Replaced]:
        """Applies a policy to lines; those that it leaves unchanged are not considered again."""
        edits = self.reduce(policy, budget, count, override, round=False) if lines else []
        self._left_unchanged |= {line.at for line in lines} - {edit.span.start for edit in edits}
        return edits

    def compact_to_target(
        self, budget: Budget, count: Count, override: Override, still: Callable[[], bool] | None = None
    ) -> list[Replaced]:
        """Compacts because a trigger fired, if it is `still` necessary: another writer may have compacted."""
        return self._reduce_with(self._ladder_plan(budget), budget, count, override, still=still)

    def _ladder_plan(self, budget: Budget, order: CompactionRequest | None = None) -> "LadderPlan":
        from refold.config import ladder

        if order is not None:
            return ladder.on_demand(self.settings, self.policies, order)
        if budget.keeps_recent:
            return ladder.all_but_recent(self.settings)
        return ladder.full_ladder(self.settings, self.policies)

    def economize(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """Compacts if that saves money by the `cache_terms`."""
        from refold.config import ladder

        return self.reduce(ladder.economy_ladder(self.settings, self.policies), budget, count, override)

    def parts_to_summarize(
        self, view: View, budget: Budget, count: Count, order: CompactionRequest | None = None
    ) -> "list[SummaryPart]":
        """The parts of the view that a compaction will summarize."""
        from refold.config import ladder

        return ladder.parts_to_summarize(
            self._ladder_plan(budget, order).by_rule, self.settings, view, budget, count
        )

    def compact(
        self,
        order: CompactionRequest,
        budget: Budget,
        count: Count,
        override: Override,
        lease: Lease | None = None,
    ) -> list[Replaced]:
        """Compacts on demand, with prepared summaries if there are any.

        Raises:
            ConflictError: another process has taken over the `lease`.
        """
        return self._reduce_with(self._ladder_plan(budget, order), budget, count, override, lease=lease)

    def planned(self, budget: Budget, count: Count, order: CompactionRequest | None = None) -> list[Replaced]:
        """The edits of a compaction without a model; nothing is changed."""
        return self._plan_events(self._ladder_plan(budget, order).by_rule, budget, count, round=True)

    def _reduce_with(
        self,
        plan: "LadderPlan",
        budget: Budget,
        count: Count,
        override: Override = NONE,
        *,
        lease: Lease | None = None,
        still: Callable[[], bool] | None = None,
    ) -> list[Replaced]:
        """Uses prepared summaries if what they cover is unchanged."""
        summaries = self.summaries
        ready = summaries.ready(self.record.live.freeze()) if summaries else None
        if summaries is not None and ready is not None:
            from refold.policies.summarize import UsePrepared

            edits = list[Replaced]()
            with suppress(ConflictError):  # another process has newer ones
                policy = plan.by_model(UsePrepared(ready.prepared))
                edits = self.reduce(policy, budget, count, override, lease=ready.lease, still=still)
            summaries.mark_used(ready, edits)
            if edits:
                return edits
        return self.reduce(plan.by_rule, budget, count, override, lease=lease, still=still)

    def finish(self, budget: Budget, count: Count) -> list[Replaced]:
        """Prunes at the end of a run, when no cache is lost."""
        prune = self.settings.compaction.pruning
        if prune is None or self.settings.is_off or self.record.live.tokens < max(prune.limits(budget)):
            return []
        return self.reduce(prune, budget, count)

    def minimum_tokens(self) -> int:
        """Counted tokens of what no edit may hide."""
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
        """Appends the planned edits; plans again if another writer came first and it is `still` necessary.

        Raises:
            ConflictError: another process has taken over the `lease`.
        """
        keep = override.keep_originals is not False

        def build() -> Sequence[Event]:
            if still is not None and not still():
                return []
            return self._plan_events(policy, budget, count, round=round, keep_originals=keep)

        return [event for event in self.record.append(build, lease) if isinstance(event, Replaced)]

    def _plan_events(
        self, policy: Policy, budget: Budget, count: Count, *, round: bool, keep_originals: bool = True
    ) -> list[Replaced]:
        live = self.record.live
        self.record.load_all(originals=round)
        view = msgspec.structs.replace(_decoding_once(live.freeze()), handles=self.handles and keep_originals)
        number = live.state.round + 1 if round else 0
        stamp = Stamp(live.state.next, time.time(), live.view, number, keep_originals)
        events, before = list[Replaced](), view
        for edit in policy(view, budget, count):
            explained = msgspec.structs.replace(
                edit, why=self._reason_for(edit), certificate=self._with_digest(edit)
            )
            events.append(settle(explained, view, stamp, count))
            stamp = msgspec.structs.replace(stamp, at=stamp.at + 1)
            view = applied(view, events[-1])
        if self.cache_terms is None or not round or not events:
            return events
        worth = _worth_of(self.cache_terms, before, view, events)
        if not self.cache_terms.accepts(worth):
            return []
        return [msgspec.structs.replace(events[0], worth=worth), *events[1:]]

    def _with_digest(self, edit: Edit) -> Certificate | None:
        if edit.certificate is None:
            return None
        return msgspec.structs.replace(edit.certificate, digest=self.record.digest_before(edit.span.end))

    def _reason_for(self, edit: Edit) -> str:
        """Why, with the setting and its origin."""
        if not edit.setting:
            return edit.why
        if edit.setting[0] in ("override", "message"):
            return f"{edit.why} ({edit.setting[-1]} of the {edit.setting[0]})"
        origin = self.config.origin("agents", self.agent, *edit.setting)
        return f"{edit.why} ({'.'.join(edit.setting)}, {origin})"


def _worth_of(terms: CacheTerms, before: View, after: View, edits: Sequence[Replaced]) -> Worth:
    """What edits save together. Messages since the last request are not in the cache in any case."""
    start = min(edit.span.start for edit in edits)
    spoken = [item.span.start for item in after.items if any(line.role == "assistant" for line in item.lines)]
    newest = max(spoken, default=0)
    sent = [item.tokens for item in after.items if start <= item.span.start < newest]
    bills = [edit.certificate for edit in edits if edit.certificate and not edit.certificate.was_cached]
    return terms.weigh(before.tokens - after.tokens, sum(sent), sum(bill.cost or 0.0 for bill in bills))


def _decoding_once(view: View) -> View:
    """The same view; each message is decoded once."""
    known = dict[tuple[int, int], Message]()

    def read(item: Item) -> Item:
        def words(line: Line) -> Message:
            key = (line.at, line.n)
            if key not in known:
                known[key] = item.words(line)
            return known[key]

        return Item(item.span, item.lines, words, item.edit, item.merged)

    return msgspec.structs.replace(view, items=tuple(map(read, view.items)))
