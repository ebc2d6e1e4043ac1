"""Makes a view smaller: what is set to expire, what is too large, and the rungs of the ladder."""

import time
from collections.abc import Sequence

import msgspec

from refold.asked import Override
from refold.config import DEFAULT, AgentSettings, Config
from refold.core.budget import Budget
from refold.core.event import Event, Line, Replaced
from refold.core.message import Message
from refold.core.plan import Count, Edit, Policy, Stamp, applied, is_reducible, must_stay, settle
from refold.core.view import Item, View
from refold.record import Record

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
        self.handles = self.settings.shows_handles
        """Whether what is reduced says how to get it back."""
        self._expiries = {name: tool.expire for name, tool in self.settings.tools.items()}
        self._is_fickle = any(expiry.strategy == "relevance" for expiry in self._expiries.values())
        """What is not due now may be due at any later step, whatever its age."""
        self._step = -1
        self._live, self._left = record.live, set[int]()
        """Places that were looked at and left as they are."""

    def arrive(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """What does not wait for a trigger: results that expire in this step, and those too large to show."""
        live, cap, step = self.record.live, self.settings.compaction.capping, self.record.live.state.step + 1
        if self._live is not live:  # read anew, or begun anew
            self._live, self._left = live, set()
        most = cap.most(budget) if cap else budget.window
        timed = bool(self._expiries) or override.expiry.after_steps is not None
        left = set[int]() if override != NONE or (self._is_fickle and self._step != step) else self._left
        fixed, self._step = {*live.kept, live.state.latest}, step
        lines = [  # most steps end here: in nearly all views there is no such thing
            item.lines[0]
            for item in live.items
            if item.lines
            and (timed or item.lines[0].tokens > most or item.lines[0].expiry is not None)
            and item.lines[0].at not in left
            and item.span.start not in fixed
            and is_reducible(item)
        ]
        return self._on_arrival(lines, budget, count, override) if lines else []

    def _on_arrival(
        self, lines: Sequence[Line], budget: Budget, count: Count, override: Override
    ) -> list[Replaced]:
        from refold.policies.expire import Expire, batches  # read only by those who need it

        live, cap = self.record.live, self.settings.compaction.capping
        expire = Expire(self._expiries, override.expiry)
        together = batches([line for item in live.items for line in item.lines])
        due = expire.due(lines, live.state.step + 1, together)
        only = frozenset(line.at for line in due)
        edits = self._ask(msgspec.structs.replace(expire, only=only), due, budget, count, override)
        if cap is not None:
            gone = {edit.span.start for edit in edits} | {line.at for line in lines if self._is_spared(line)}
            most = cap.most(budget)
            large = [line for line in lines if line.answers and line.tokens > most and line.at not in gone]
            edits += self._ask(cap, large, budget, count, override)
        return edits

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

    def climb(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """All rungs, as far as it takes."""
        from refold import rungs

        return self.reduce(rungs.ladder(self.settings, self.policies), budget, count, override)

    def compact(
        self, strategy: str, keep_recent: int | None, reach: bool, budget: Budget, count: Count
    ) -> list[Replaced]:
        """On demand: down to the newest messages, or to `reach` the budget's target by whatever it takes."""
        from refold import rungs

        if reach:
            policy = rungs.down_to_target(self.settings, self.policies, strategy, keep_recent or 0)
        else:
            policy = rungs.strategy(self.settings, strategy, keep_recent, fill=False)
        return self.reduce(policy, budget, count)

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
    ) -> list[Replaced]:
        """Plans on the view as it is, and again if somebody else edits it meanwhile."""
        handles = self.handles and override.keep_originals is not False

        def build() -> Sequence[Event]:
            live = self.record.live
            self.record.load([line for item in live.items for line in item.lines])
            view = msgspec.structs.replace(_read_once(live.freeze()), handles=handles)
            stamp = Stamp(live.state.next, time.time(), live.view, live.state.round + 1 if round else 0)
            events = list[Replaced]()
            for edit in policy(view, budget, count):
                told = msgspec.structs.replace(edit, why=self._because(edit))
                events.append(
                    settle(told, view, msgspec.structs.replace(stamp, at=stamp.at + len(events)), count)
                )
                view = applied(view, events[-1])
            return events

        return [event for event in self.record.append(build) if isinstance(event, Replaced)]

    def _because(self, edit: Edit) -> str:
        """Why, with the setting that decided it and where that was set."""
        if not edit.setting:
            return edit.why
        if edit.setting[0] in ("override", "message"):
            return f"{edit.why} ({edit.setting[-1]} of the {edit.setting[0]})"
        origin = self.config.origin("agents", self.agent, *edit.setting)
        return f"{edit.why} ({'.'.join(edit.setting)}, {origin})"


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
