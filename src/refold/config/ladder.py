"""The policies of the ladder, by the settings of an agent. Imported only when a view is compacted."""

from collections.abc import Sequence

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
from refold.policies.summarize import Summarize, SummaryPart, UsePrepared, Window, summary_limit

ECONOMY_REASON = "to carry it costs more than to hide it"
MODEL_SUMMARY_MARGIN = 1.25
"""How much longer a model's summary may be than one by rule, where room is scarce."""

SEGMENTS = 4
"""Of the hierarchical strategy: how many stay before they are merged into an era."""

codec.decoder(Edit)


def compaction_policy(
    settings: AgentSettings,
    own: Sequence[Policy],
    budget: Budget,
    order: CompactionRequest | None = None,
    prepared: UsePrepared | None = None,
) -> Policy:
    """The policy of a compaction: on demand if there is an `order`, else because a trigger fired.

    A turn or message trigger compacts down to the newest messages. A trigger by tokens runs all policies, the
    user's own first, until the target is reached.

    `own` are the user's policies. `prepared` shows summaries that a model wrote for this compaction.
    """
    if order is not None:
        return on_demand(settings, own, order, prepared)
    compact = settings.compaction
    if budget.keeps_recent:
        newest = prepared or strategy(settings, compact.strategy, compact.keep_recent, fill=False)
        why = f"a turn or message trigger fired: keep the newest {compact.keep_recent}"
        return with_reason(newest, why, ("compact", "keep_recent"))
    in_place = in_place_rules(settings, own)
    ladder = Ladder((*in_place, strategy(settings, compact.strategy), Shrink(spared_tools(settings))))
    return ladder if prepared is None else with_prepared(prepared, in_place, ladder)


def on_demand(
    settings: AgentSettings, own: Sequence[Policy], order: CompactionRequest, prepared: UsePrepared | None
) -> Policy:
    """The requested strategy; to reach a number of tokens, every other policy as well."""
    if order.target is None:
        keep = settings.compaction.keep_recent if order.keep_recent is None else order.keep_recent
        order = msgspec.structs.replace(order, keep_recent=keep)
        stage = prepared or strategy(settings, order.strategy, keep, fill=False, focus=order.focus)
        return with_reason(stage, order.why)
    first = [checked_policy(policy) for policy in own]
    if prepared is not None:
        first = [with_reason(prepared, order.why)]
    stage = strategy(settings, order.strategy, order.keep_recent or 0, fill=True, focus=order.focus)
    last = Shrink(spared_tools(settings), spare_newest=False)
    stages = (*first, with_reason(stage, order.why), with_reason(last, order.why))

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        return run_stages(stages, view, budget, count)[1]

    return policy


def with_reason(stage: Policy, why: str, setting: tuple[str, ...] = ()) -> Policy:
    """The same policy, whose edits give this reason."""

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        plan = stage(view, budget, count)
        return [msgspec.structs.replace(edit, why=why, setting=setting) for edit in plan]

    return policy


def economy_ladder(settings: AgentSettings, own: Sequence[Policy] = ()) -> Policy:
    """The policies that may save money: none of them cuts text, and none repeats an edit that was undone."""
    ladder = Ladder((*in_place_rules(settings, own), strategy(settings, settings.compaction.strategy)))

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        plan = ladder(view, budget, count)
        if any(edit.span.meets(span) for edit in plan for span in view.spared):
            return ()
        return plan

    return with_reason(policy, ECONOMY_REASON, ("compact", "economy"))


def in_place_rules(settings: AgentSettings, own: Sequence[Policy]) -> list[Policy]:
    """The policies that keep every message in its place: ended leases first, then the user's own."""
    dedupe = settings.deduping
    stages = (dedupe and except_tools(dedupe, spared_tools(settings)), settings.compaction.pruning)
    return [EndLeases(), *map(checked_policy, own), *filter(None, stages)]


def with_prepared(prepared: UsePrepared, in_place: Sequence[Policy], ladder: Ladder) -> Policy:
    """The prepared summaries and the policies in place; if that is not enough, the whole ladder."""

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        after, plan = run_stages((prepared, *in_place), view, budget, count)
        enough = budget.counted(budget.enough) - budget.overhead
        if after.tokens <= enough and any(edit.certificate is not None for edit in plan):
            return plan
        return Ladder((prepared, *ladder.stages))(view, budget, count)

    return policy


def parts_to_summarize(
    policy: Policy, max_tokens: int | None, view: View, budget: Budget, count: Count
) -> list[SummaryPart]:
    """The parts of the view that a policy will replace by summaries, each with its longest length.

    `max_tokens` is the setting of the summarizer.
    """
    parts = list[SummaryPart]()
    most = summary_limit(max_tokens, budget)
    for edit in policy(view, budget, count):
        old = select_again(view, edit.span, [one for one in edit.shown if isinstance(one, int)])
        first = edit.shown[0] if edit.shown else None
        if edit.certificate is None or old is None or not isinstance(first, Message):
            continue
        level = level_of(first.text)
        size = most // 3 if level == "segment" else most
        if edit.kind == "shrink":  # room is scarce
            size = min(size, max(count(first), int(count(first) * MODEL_SUMMARY_MARGIN)))
        parts.append(SummaryPart.of(old, size, edit.kind, level, edit.focus))
    return parts


def spared_tools(settings: AgentSettings) -> tuple[str, ...]:
    prune = settings.compaction.pruning
    return prune.exclude_tools if prune else ()


def except_tools(stage: Policy, tools: Sequence[str]) -> Policy:
    """The same policy, without edits of results of these tools."""

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        spared = {item.span for item in view.items for line in item.lines if {*line.tools} & {*tools}}
        return [edit for edit in stage(view, budget, count) if edit.span not in spared]

    return policy if tools else stage


def strategy(
    settings: AgentSettings, name: str, keep_recent: int | None = None, fill: bool = True, focus: str = ""
) -> Policy:
    """The policy for messages that no longer fit; `fill` keeps more than the newest if there is room."""
    keep = settings.compaction.keep_recent if keep_recent is None else keep_recent
    if name == "sliding-window":
        return Window(None if fill else keep)
    most = settings.summarizer.max_tokens
    segments = SEGMENTS if name == "hierarchical" else None
    return Summarize(keep, most, fill, focus, segments)


def checked_policy(own: Policy) -> Policy:
    """A user's policy whose plan is validated.

    Raises:
        SettingError: it raised an error, or returned something that is not an edit of the view.
    """

    def policy(view: View, budget: Budget, count: Count, /) -> Plan:
        name = getattr(own, "__name__", type(own).__name__)
        try:
            plan = own(view, budget, count)
        except Exception as error:  # a user's function may raise anything
            raise SettingError(f"policy {name}", f"raised {type(error).__name__}: {error}") from error
        if not isinstance(plan, list | tuple):
            raise SettingError(f"policy {name}", f"expected a list of edits, got {type(plan).__name__}")
        return [_checked_edit(edit, view, f"policy {name}, edit {n}") for n, edit in enumerate(plan)]

    return policy


def _checked_edit(edit: object, view: View, where: str) -> Edit:
    if not isinstance(edit, Edit):
        raise SettingError(where, f"expected a refold.core.plan.Edit, got {type(edit).__name__}")
    try:
        valid = msgspec.convert(msgspec.to_builtins(edit), Edit)
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as error:
        raise SettingError(where, f"is not a valid edit: {error}") from error
    problem = _span_problem(valid, view) or _pairing_problem(valid, view)
    if problem is not None:
        raise SettingError(where, problem)
    return valid


def _span_problem(edit: Edit, view: View) -> str | None:
    covered = [item for item in view.items if item.span.meets(edit.span)]
    if not covered or not all(edit.span.covers(item.span) for item in covered):
        return f"covers {edit.span}, which is not a whole number of items of the view"
    if edit.span.start < 0 or edit.span.end > max(view.next, covered[-1].span.end):
        return f"covers {edit.span}, which is beyond the end of the record"
    places = {line.at for item in covered for line in item.lines}
    missing = [one for one in edit.shown if isinstance(one, int) and one not in places]
    return f"names #{missing[0]}, which is not shown in {edit.span}" if missing else None


def _pairing_problem(edit: Edit, view: View) -> str | None:
    """Says that an edit separates a call from its result."""
    before = [line for item in view.items if item.span.meets(edit.span) for line in item.lines]
    named = {line.at: line for line in before}
    after = [named[one] if isinstance(one, int) else line_of(one, -1, 0, 0, 0) for one in edit.shown]
    answered = {line.answers for line in view.lines}
    calls = {id for line in before for id in line.calls} - {id for line in after for id in line.calls}
    results = {line.answers for line in before if line.answers} - {line.answers for line in after}
    if results - calls:
        return f"hides the result of the call {min(results - calls)!r} but not the call"
    if left := (calls & answered) - results:
        return f"hides the call {min(left)!r} but not its result"
    return None
