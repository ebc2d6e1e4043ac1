"""Makes a view smaller: what is set to expire, what is too large, and the rungs of the ladder."""

import time
from collections.abc import Sequence

import msgspec

from refold.asked import Override
from refold.config import DEFAULT, AgentSettings, Config
from refold.core.budget import Budget
from refold.core.event import Event, Replaced
from refold.core.plan import Count, Edit, Policy, Stamp, applied, settle
from refold.policies.expire import Expire
from refold.policies.hierarchy import Hierarchy
from refold.policies.ladder import Ladder
from refold.policies.shrink import Shrink
from refold.policies.summarize import Summarize
from refold.policies.window import Window
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
        self._expiries = {name: tool.expire for name, tool in self.settings.tools.items()}

    def arrive(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """What does not wait for a trigger: results that expire in this step, and those too large to show."""
        expire = Expire(self._expiries, override.expiry)
        cap = self.settings.compaction.capping
        most = budget.counted(int(budget.window * cap.share)) if cap else budget.window
        rungs = list[Policy]()
        lines = [item.lines[0] for item in self.record.live.items if item.edit is None and item.lines]
        if any(map(expire.concerns, lines)):
            rungs.append(expire)
        if cap and any(line.tokens > most for line in lines if line.answers is not None):
            rungs.append(cap)
        return [edit for rung in rungs for edit in self.reduce(rung, budget, count, override, round=False)]

    def climb(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """All rungs, as far as it takes."""
        compact = self.settings.compaction
        own = [self.settings.deduping, compact.pruning]
        rungs = [*self.policies, *(rung for rung in own if rung), self.strategy(compact.strategy), Shrink()]
        return self.reduce(Ladder(tuple(rungs)), budget, count, override)

    def strategy(self, name: str, keep_recent: int | None = None, fill: bool = True) -> Policy:
        """What becomes of messages that no longer fit; `fill` keeps more than the newest where they do."""
        keep = self.settings.compaction.keep_recent if keep_recent is None else keep_recent
        if name == "sliding-window":
            return Window(None if fill else keep)
        most = self.settings.summarizer.max_tokens
        if name == "hierarchical":
            return Hierarchy(keep, most, fill)
        return Summarize(keep, most, fill)

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
        kept = override.keep_originals
        handles = self.settings.shows_handles if kept is None else kept and self.settings.shows_handles

        def build() -> Sequence[Event]:
            live = self.record.live
            self.record.load([line for item in live.items for line in item.lines])
            view = msgspec.structs.replace(live.freeze(), handles=handles)
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
