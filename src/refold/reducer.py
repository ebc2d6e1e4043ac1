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
        self._live, self._left = record.live, set[int]()
        """Places that were looked at and left as they are."""

    def arrive(self, budget: Budget, count: Count, override: Override) -> list[Replaced]:
        """What does not wait for a trigger: results that expire in this step, and those too large to show."""
        live, cap = self.record.live, self.settings.compaction.capping
        if self._live is not live:  # read anew, or begun anew
            self._live, self._left = live, set()
        most = cap.most(budget) if cap else budget.window
        timed = bool(self._expiries) or override.expiry.after_steps is not None
        fixed = {*live.kept, live.state.latest}
        items = [  # most steps end here: in nearly all views there is no such thing
            item
            for item in live.items
            if item.lines
            and (timed or item.lines[0].tokens > most or item.lines[0].expiry is not None)
            and is_reducible(item)
            and item.span.start not in fixed
        ]
        if not items:
            return []
        from refold.policies.expire import Expire  # read only by those who need it

        lines = [item.lines[0] for item in items]
        expire = Expire(self._expiries, override.expiry)
        edits = self._ask(expire, expire.due(lines, live.state.step + 1), budget, count, override)
        if cap is not None:
            edited = {edit.span.start for edit in edits}
            large = [line for line in lines if line.tokens > most and line.at not in edited]
            edits += self._ask(cap, [line for line in large if line.answers], budget, count, override)
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
