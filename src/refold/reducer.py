"""Makes a view smaller: what is set to expire, what is too large, and the rungs of the ladder."""

import time
from collections.abc import Sequence

import msgspec

from refold.asked import Override
from refold.config import DEFAULT, AgentSettings, Config
from refold.core.budget import Budget
from refold.core.event import Event, Line, Replaced
from refold.core.message import Message
from refold.core.plan import Count, Edit, Policy, Stamp, applied, settle
from refold.core.view import Item, View
from refold.policies.expire import Expire
from refold.policies.hierarchy import Hierarchy
from refold.policies.ladder import Ladder
from refold.policies.reduced import is_reducible
from refold.policies.shrink import Shrink, must_stay
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
        self.handles = self.settings.shows_handles
        """Whether what is reduced says how to get it back."""
        self._expiries = {name: tool.expire for name, tool in self.settings.tools.items()}
        self._is_fickle = any(expiry.strategy == "relevance" for expiry in self._expiries.values())
        """What is not due now may be due at any later step, whatever its age."""
        self._live, self._left = record.live, set[int]()
        """Places that were looked at and left as they are."""

    def arrive(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """What does not wait for a trigger: results that expire in this step, and those too large to show."""
        live, compact = self.record.live, self.settings.compaction
        if self._live is not live:  # read anew, or begun anew
            self._live, self._left = live, set()
        fixed = {*live.kept, live.state.latest}
        lines = [item.lines[0] for item in live.items if is_reducible(item) and item.span.start not in fixed]
        expire = Expire(self._expiries, override.expiry)
        edits = self._ask(expire, expire.due(lines, live.state.step + 1), budget, count, override)
        if cap := compact.capping:
            most = cap.most(budget)
            large = [line for line in lines if line.tokens > most and line.answers is not None]
            edits += self._ask(cap, large, budget, count, override)
        return edits

    def _ask(
        self, policy: Policy, lines: Sequence[Line], budget: Budget, count: Count, override: Override
    ) -> list[Replaced]:
        """What it does about some lines; those that it leaves alone are not asked about again."""
        again = override != NONE or self._is_fickle
        if not lines or (not again and all(line.at in self._left for line in lines)):
            return []
        edits = self.reduce(policy, budget, count, override, round=False)
        self._left |= {line.at for line in lines} - {edit.span.start for edit in edits}
        return edits

    def climb(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """All rungs, as far as it takes."""
        compact = self.settings.compaction
        own = [self.settings.deduping, compact.pruning]
        spared = compact.pruning.exclude_tools if compact.pruning else ()
        last = (self.strategy(compact.strategy), Shrink(spared))
        rungs = (*self.policies, *(rung for rung in own if rung), *last)
        return self.reduce(Ladder(rungs), budget, count, override)

    def finish(self, budget: Budget, count: Count) -> list[Replaced]:
        """When a run ends there is no cache to keep warm: old outputs are cleared for the next one."""
        prune = self.settings.compaction.pruning
        if prune is None or self.settings.is_off or self.record.live.tokens < max(prune.limits(budget)):
            return []
        return self.reduce(prune, budget, count)

    def least(self) -> int:
        """What is counted for all that no rung may hide."""
        return sum(line.tokens for line in must_stay(self.record.live.freeze()))

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
