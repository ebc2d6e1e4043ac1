"""The rungs of the ladder, by the settings of an agent. Loaded only when a view must become smaller."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from refold.config.settings import AgentSettings
from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import SettingError
from refold.core.message import Message
from refold.core.plan import CompactionRequest, Count, Edit, Plan, Policy, line_of
from refold.core.view import View
from refold.policies.expire import EndLeases
from refold.policies.ladder import Ladder, run_stages
from refold.policies.sections import level_of
from refold.policies.selection import select_again
from refold.policies.shrink import Shrink
from refold.policies.summarize import Hierarchy, Summarize, SummaryPart, UsePrepared, Window, summary_limit

THRIFTY = "to carry it costs more than to hide it"
ROOMIER = 1.25
"""How much longer a model's summary may be than one by rule, where there is little room."""

codec.decoder(Edit)


class LadderPlan(NamedTuple):
    """How a view is made smaller, without a model and with what models have written."""

    by_rule: Policy
    by_model: Callable[[UsePrepared], Policy]


def down_the_ladder(settings: AgentSettings, own: Sequence[Policy] = ()) -> LadderPlan:
    """All rungs, the user's own first, as far as the target needs them."""
    last = (strategy(settings, settings.compaction.strategy), Shrink(spared_tools(settings)))
    cheap_rungs = cheap(settings, own)
    whole = Ladder((*cheap_rungs, *last))
    return LadderPlan(whole, lambda swap: swapped(swap, cheap_rungs, whole))


def all_but_recent(settings: AgentSettings) -> LadderPlan:
    """The configured strategy, down to the newest messages."""
    compact = settings.compaction
    rung = strategy(settings, compact.strategy, compact.keep_recent, fill=False)
    why = f"a turn or message trigger fired: keep the newest {compact.keep_recent}"
    setting = ("compact", "keep_recent")
    return LadderPlan(because(rung, why, setting), lambda swap: because(swap, why, setting))


def on_demand(settings: AgentSettings, own: Sequence[Policy], order: CompactionRequest) -> LadderPlan:
    """The strategy that was asked for; down to a number of tokens by whatever else it takes."""
    keep = settings.compaction.keep_recent if order.keep_recent is None else order.keep_recent
    if order.target is None:
        order = msgspec.structs.replace(order, keep_recent=keep)
        rung = strategy(settings, order.strategy, keep, fill=False, focus=order.focus)
        return LadderPlan(because(rung, order.why), lambda swap: because(swap, order.why))
    rung = strategy(settings, order.strategy, order.keep_recent or 0, fill=True, focus=order.focus)
    last = Shrink(spared_tools(settings), spare_newest=False)

    def down_to_target(*first: Policy) -> Policy:
        rungs = (*first, because(rung, order.why), because(last, order.why))

        def policy(view: View, budget: Budget, count: Count, /) -> Plan:
            return run_stages(rungs, view, budget, count)[1]

        return policy

    return LadderPlan(
        down_to_target(*map(vetted, own)), lambda swap: down_to_target(because(swap, order.why))
    )


def because(rung: Policy, why: str, setting: tuple[str, ...] = ()) -> Policy:
    """The same policy, whose edits give this reason."""

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        plan = rung(view, budget, count)
        return [msgspec.structs.replace(edit, why=why, setting=setting) for edit in plan]

    return policy


def thrifty(settings: AgentSettings, own: Sequence[Policy] = ()) -> Policy:
    """Those that are climbed to save money: nothing is cut for it that could stand whole or be put away.

    What somebody took an edit back from stays as it is, until the window asks for it.
    """
    ladder = Ladder((*cheap(settings, own), strategy(settings, settings.compaction.strategy)))

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        plan = ladder(view, budget, count)
        if any(edit.span.meets(span) for edit in plan for span in view.spared):
            return ()
        return plan

    return because(policy, THRIFTY, ("compact", "economy"))


def cheap(settings: AgentSettings, own: Sequence[Policy]) -> list[Policy]:
    """Those that leave every message in its place: ended leases first, then the user's own."""
    dedupe = settings.deduping
    rungs = (dedupe and sparing(dedupe, spared_tools(settings)), settings.compaction.pruning)
    return [EndLeases(), *map(vetted, own), *filter(None, rungs)]


def swapped(swap: UsePrepared, cheap: Sequence[Policy], whole: Ladder) -> Policy:
    """What was written ahead, and no more than the cheap rungs if that is enough; else all of them."""

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        after, plan = run_stages((swap, *cheap), view, budget, count)
        enough = budget.counted(budget.enough) - budget.overhead
        if after.tokens <= enough and any(edit.certificate is not None for edit in plan):
            return plan
        return Ladder((swap, *whole.stages))(view, budget, count)

    return policy


def foreseen(
    policy: Policy, settings: AgentSettings, view: View, budget: Budget, count: Count
) -> list[SummaryPart]:
    """What a policy will have summarized, as long as a summary may be."""
    parts = list[SummaryPart]()
    most = summary_limit(settings.summarizer.max_tokens, budget)
    for edit in policy(view, budget, count):
        old = select_again(view, edit.span, [one for one in edit.shown if isinstance(one, int)])
        first = edit.shown[0] if edit.shown else None
        if edit.certificate is None or old is None or not isinstance(first, Message):
            continue
        level = level_of(first.text)
        size = most // 3 if level == "segment" else most
        if edit.kind == "shrink":  # there is less room than for any other
            size = min(size, max(count(first), int(count(first) * ROOMIER)))
        parts.append(SummaryPart(old, size, edit.kind, level, edit.focus))
    return parts


def spared_tools(settings: AgentSettings) -> tuple[str, ...]:
    prune = settings.compaction.pruning
    return prune.exclude_tools if prune else ()


def sparing(rung: Policy, tools: Sequence[str]) -> Policy:
    """The same, but what some tools said stays as it is."""

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        spared = {item.span for item in view.items for line in item.lines if {*line.tools} & {*tools}}
        return [edit for edit in rung(view, budget, count) if edit.span not in spared]

    return policy if tools else rung


def strategy(
    settings: AgentSettings, name: str, keep_recent: int | None = None, fill: bool = True, focus: str = ""
) -> Policy:
    """What becomes of messages that no longer fit; `fill` keeps more than the newest where they do."""
    keep = settings.compaction.keep_recent if keep_recent is None else keep_recent
    if name == "sliding-window":
        return Window(None if fill else keep)
    most = settings.summarizer.max_tokens
    if name == "hierarchical":
        return Hierarchy(keep, most, fill, focus=focus)
    return Summarize(keep, most, fill, focus)


def vetted(own: Policy) -> Policy:
    """A user's policy, whose plan is looked at before anything of it is written.

    Raises:
        SettingError: it raised something, or returned what cannot be an edit of the view.
    """

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        name = getattr(own, "__name__", type(own).__name__)
        try:
            plan = own(view, budget, count)
        except Exception as error:  # a user's function may raise anything
            raise SettingError(f"policy {name}", f"raised {type(error).__name__}: {error}") from error
        if not isinstance(plan, list | tuple):
            raise SettingError(f"policy {name}", f"expected a list of edits, got {type(plan).__name__}")
        return [_vetted(edit, view, f"policy {name}, edit {n}") for n, edit in enumerate(plan)]

    return policy


def _vetted(edit: object, view: View, where: str) -> Edit:
    if not isinstance(edit, Edit):
        raise SettingError(where, f"expected a refold.core.plan.Edit, got {type(edit).__name__}")
    try:
        sound = msgspec.convert(msgspec.to_builtins(edit), Edit)
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as error:
        raise SettingError(where, f"is not as an edit must be: {error}") from error
    problem = _misplaced(sound, view) or _parted(sound, view)
    if problem is not None:
        raise SettingError(where, problem)
    return sound


def _misplaced(edit: Edit, view: View) -> str | None:
    covered = [item for item in view.items if item.span.meets(edit.span)]
    if not covered or not all(edit.span.covers(item.span) for item in covered):
        return f"covers {edit.span}, which are not whole items of the view"
    if edit.span.start < 0 or edit.span.end > max(view.next, covered[-1].span.end):
        return f"covers {edit.span}, which goes beyond the record"
    places = {line.at for item in covered for line in item.lines}
    missing = [one for one in edit.shown if isinstance(one, int) and one not in places]
    return f"names #{missing[0]}, which is not shown in {edit.span}" if missing else None


def _parted(edit: Edit, view: View) -> str | None:
    """A call without its result, or a result without its call."""
    before = [line for item in view.items if item.span.meets(edit.span) for line in item.lines]
    named = {line.at: line for line in before}
    after = [named[one] if isinstance(one, int) else line_of(one, -1, 0, 0, 0) for one in edit.shown]
    answered = {line.answers for line in view.lines}
    calls = {id for line in before for id in line.calls} - {id for line in after for id in line.calls}
    results = {line.answers for line in before if line.answers} - {line.answers for line in after}
    if results - calls:
        return f"hides the result of the call {min(results - calls)!r} and not the call"
    if left := (calls & answered) - results:
        return f"hides the call {min(left)!r} and not its result"
    return None
