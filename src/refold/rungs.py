"""The rungs of the ladder, by the settings of an agent. Loaded only when a view must become smaller."""

from collections.abc import Sequence

from refold.core.budget import Budget
from refold.core.plan import Count, Plan, Policy
from refold.core.view import View
from refold.policies.hierarchy import Hierarchy
from refold.policies.ladder import Ladder, climb
from refold.policies.shrink import Shrink
from refold.policies.summarize import Summarize
from refold.policies.window import Window
from refold.settings import AgentSettings


def ladder(settings: AgentSettings, own: Sequence[Policy] = ()) -> Ladder:
    """All of them, the user's own first."""
    compact = settings.compaction
    cheap = [rung for rung in (settings.deduping, compact.pruning) if rung]
    spared = compact.pruning.exclude_tools if compact.pruning else ()
    return Ladder((*own, *cheap, strategy(settings, compact.strategy), Shrink(spared)))


def strategy(settings: AgentSettings, name: str, keep_recent: int | None = None, fill: bool = True) -> Policy:
    """What becomes of messages that no longer fit; `fill` keeps more than the newest where they do."""
    keep = settings.compaction.keep_recent if keep_recent is None else keep_recent
    if name == "sliding-window":
        return Window(None if fill else keep)
    most = settings.summarizer.max_tokens
    return Hierarchy(keep, most, fill) if name == "hierarchical" else Summarize(keep, most, fill)


def down_to_target(settings: AgentSettings, own: Sequence[Policy], name: str, keep_recent: int) -> Policy:
    """One strategy, and whatever else it takes to get there."""
    rungs = (*own, strategy(settings, name, keep_recent), Shrink())

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        return climb(rungs, view, budget, count)[1]

    return policy
