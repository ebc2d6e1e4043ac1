"""Builds the next request: measures it, compacts the view if it is too large, and renders it."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from refold.core import codec
from refold.core.budget import WINDOW, Budget
from refold.core.errors import LargePart, OverBudgetError
from refold.core.event import Line, Replaced
from refold.core.expiry import lease_has_ended
from refold.core.plan import must_stay
from refold.dialects.registry import DIALECTS
from refold.policies.expire import EndLeases
from refold.session.ahead import prepare_soon
from refold.session.conversation import Conversation, FitRequest, RequestExtras
from refold.session.explain import large_part
from refold.session.reduce import ReduceRequest, compact_view, reduce_new_results, reduce_view
from refold.session.render import Rendered
from refold.session.results import EditReport, Fitted, Report, TokenCounts
from refold.session.triggers import Trigger, check_triggers, forced_terms, is_cold, proposal, target_obstacle
from refold.session.validate import Override

MAX_NAMED_PARTS = 3
"""The largest parts that an `OverBudgetError` names."""
SMALL_PART = 0.05
"""Of what must be shown: smaller parts are not named, unless all of them are small."""
REGROWTH = 1.1
"""How much a view must grow before a rejected compaction is considered again."""
ABOVE_TARGET = "above target"
"""Noticed once until the view is within its target again."""


class Reduced(msgspec.Struct, frozen=True):
    """What was done to a view so that the next request fits."""

    budget: Budget
    edits: list[Replaced]
    fired: tuple[str, ...]
    """The triggers that fired, or `economy`."""
    notice: str = ""
    """Why the view is above its target."""


def fit(chat: Conversation, request: FitRequest, *, yields: bool = False) -> Fitted | None:
    """The next request; None if it `yields` to another process that is compacting the view.

    Raises:
        OverBudgetError: what must be shown is larger than the window.
    """
    override = request.override
    is_off = chat.is_off or bool(override.off)
    extras = chat.extras_of(request)
    budget, before = chat.measure(extras)
    trigger = check_triggers(chat, budget, before)
    reduced = Reduced(budget, [], trigger.fired)
    if not is_off:
        if trigger.least > budget.room:
            lines = must_stay(chat.record.live.freeze())
            raise _over_budget_error(chat, trigger.least, budget, extras, lines)
        if yields and trigger and chat.lease.is_held_elsewhere:
            return None
        reduced = _reduce(chat, extras, override, budget, before, trigger)
        budget = reduced.budget
    rendered, prefix = _render(chat, extras)
    final = chat.tokens(budget, rendered.repair_tokens)
    most = budget.room if reduced.fired else budget.threshold
    if rendered.repair_tokens and not is_off and final >= most:  # compact once more for what repairs added
        more = msgspec.structs.replace(budget, overhead=budget.overhead + rendered.repair_tokens)
        edits = reduced.edits + compact_view(chat, ReduceRequest(more, override))
        reduced = msgspec.structs.replace(reduced, edits=edits, fired=reduced.fired or (WINDOW,))
        rendered, prefix = _render(chat, extras)
        final = chat.tokens(budget, rendered.repair_tokens)
    chat.repair_tokens = rendered.repair_tokens
    if final > budget.room:
        if not is_off:
            raise _over_budget_error(chat, final, budget, extras, chat.record.live.freeze().lines)
        chat.tell("overflow", "compaction is off", final, final)
    if chat.started is not None:  # another writer compacted the view first
        chat.end_compaction((), set(), final)
    report = _report(chat, reduced, rendered, extras, before, final)
    if chat.summaries is not None and not is_off:
        prepare_soon(chat, chat.summaries, budget, final, override)
    chat.note_request(extras, chat.record.live.tokens + budget.overhead + rendered.repair_tokens, prefix)
    dialect = DIALECTS[extras.render.dialect]
    fields: dict[str, Any] = {"model": chat.model} if chat.model else {}
    if rendered.system is not None:
        fields[dialect.system_field or "system"] = rendered.system
    fields[dialect.list_field] = rendered.messages
    if request.tools:
        fields["tools"] = list(request.tools)
    fields.update(request.request)
    return Fitted(rendered.messages, fields, report, rendered.system, rendered.settled)


# Reducing the view


def _reduce(
    chat: Conversation,
    extras: RequestExtras,
    override: Override,
    budget: Budget,
    tokens: int,
    trigger: Trigger,
) -> Reduced:
    """Reduces new results, compacts if a trigger fired or it saves money, and ends leases."""
    edits = reduce_new_results(chat, budget, override)
    if edits:
        budget, tokens = chat.measure(extras)
        trigger = check_triggers(chat, budget, tokens)
    fired = trigger.fired
    notice = ""
    if trigger:
        compacted, notice = _compact(chat, budget, override, trigger)
        edits += compacted
    elif fired:
        notice = f"{', '.join(fired)} fired, but nothing was compacted: {trigger.obstacle}"
    else:
        saving = _economize(chat, extras, budget, tokens, override)
        edits += saving
        fired = ("economy",) if saving else ()
    if not notice and (trigger.fired or tokens <= budget.target):
        chat.noticed.discard(ABOVE_TARGET)
    edits += _end_leases(chat, budget, override)
    return Reduced(budget, edits, fired, notice)


def _compact(
    chat: Conversation, budget: Budget, override: Override, trigger: Trigger
) -> tuple[list[Replaced], str]:
    """Compacts because a trigger fired; the text says why the target cannot be reached, if it cannot."""
    fired = ", ".join(trigger.fired)
    round = chat.record.live.state.round
    chat.begin_compaction(fired, chat.tokens(budget))
    shown = chat.shown
    overhead = trigger.budget.overhead + chat.repair_tokens  # what was repaired once is repaired again
    compacting = msgspec.structs.replace(trigger.budget, overhead=overhead)
    request = ReduceRequest(compacting, override, terms=forced_terms(chat, budget), only_after=round)
    edits = compact_view(chat, request)
    after = chat.tokens(budget)
    if not edits and chat.record.live.state.round != round:  # another writer compacted the view first
        again = check_triggers(chat, budget, after)
        return _compact(chat, budget, override, again) if again else ([], "")
    chat.end_compaction(edits, shown, after)
    chat.messages_at_compaction = chat.record.live.state.index
    if edits and (trigger.budget.keeps_recent or after <= budget.enough):
        return edits, ""
    obstacle = target_obstacle(chat, trigger)
    if not edits:
        return [], f"{fired} fired, but nothing was compacted: {obstacle}"
    notice = f"Compacted to {after:,} tokens (target {budget.target:,}): {obstacle}."
    next_at = max(compacting.due, compacting.trigger)
    return edits, f"{notice} Next compaction at {next_at:,}." if next_at > after else notice


def _economize(
    chat: Conversation, extras: RequestExtras, budget: Budget, tokens: int, override: Override
) -> list[Replaced]:
    """Hides what costs more to send than to rewrite."""
    due = proposal(chat, extras, budget, tokens) if chat.economy else None
    if due is None:
        return []
    from refold.config import ladder

    target, terms = due
    shown = chat.shown
    policy = ladder.economy_ladder(chat.settings, chat.policies)
    edits = reduce_view(chat, policy, ReduceRequest(target, override, terms=terms))
    chat.declined = 0 if edits else int(tokens * REGROWTH)
    if edits:
        chat.begin_compaction("economy", tokens)
        chat.end_compaction(edits, shown, chat.tokens(budget))
    return edits


def _end_leases(chat: Conversation, budget: Budget, override: Override) -> list[Replaced]:
    """Hides expanded texts whose lease has ended, where that costs no cache."""
    live = chat.record.live
    for item in live.items:
        if item.edit is None and item.lines and lease_has_ended(item.lines[0], live.state.step + 1):
            break
    else:
        return []
    since = 0 if is_cold(chat) else live.state.changed
    if since is None:
        return []
    return reduce_view(chat, EndLeases(since), ReduceRequest(budget, override, is_compaction=False))


def prune_at_close(chat: Conversation) -> None:
    """Prunes at the end of a run, when no cache is lost."""
    if chat.prune is None or chat.is_off or chat.override.off:
        return
    budget = chat.budget()
    before = chat.record.live.tokens
    if before < max(chat.prune.limits(budget)):
        return
    edits = reduce_view(chat, chat.prune, ReduceRequest(budget))
    if edits:
        after = chat.record.live.tokens
        chat.tell("prune:complete", "the session was closed", before, after, edits, len(edits))


# The request


def _render(chat: Conversation, extras: RequestExtras) -> tuple[Rendered, str | None]:
    """The request, and a digest of its system text and tools if signed thinking is bound to them."""
    rendered = extras.renderer.render()
    if not extras.render.binds_thinking:
        return rendered, None
    system = rendered.system if extras.system is None else extras.system
    prefix = blake2b(codec.dumps([system, extras.tools]), digest_size=8).hexdigest()
    if chat.record.live.state.prefix not in (None, prefix):
        rendered = chat.renderer(msgspec.structs.replace(extras.render, all_stale=True)).render()
    return rendered, prefix


def _report(
    chat: Conversation, reduced: Reduced, rendered: Rendered, extras: RequestExtras, before: int, final: int
) -> Report:
    budget = reduced.budget
    notices = chat.notices
    chat.notices = []
    if chat.summaries is not None:
        notices += chat.summaries.take_problems()
    notices += chat.lock.take_problems()
    if reduced.notice and ABOVE_TARGET not in chat.noticed:
        chat.noticed.add(ABOVE_TARGET)
        notices.append(reduced.notice)
    edits = list[EditReport]()
    saved = dict[str, int]()
    for edit in reduced.edits:
        if edit.certificate and edit.certificate.left_out:
            notices.append(
                f"{edit.certificate.left_out} of the user's rules did not fit into the summary #{edit.at};"
                " only the originals have them"
            )
        less = edit.tokens[0] - edit.tokens[1]
        saved[edit.kind] = saved.get(edit.kind, 0) + less
        edits.append(EditReport(edit.at, edit.span, edit.kind, edit.why, round(less * budget.ratio)))
    notices += rendered.notices
    if final > budget.room:
        notices.append(
            f"Compaction is off: the request has {final:,} tokens, there is room for {budget.room:,}"
        )
    if rendered.system is not None and extras.system is not None:
        notices.append("The request has its own system text; the recorded one is not sent")
    counted = chat.record.live.tokens + budget.overhead + rendered.repair_tokens + sum(saved.values())
    after = dict[str, int]()
    for kind, tokens in saved.items():
        counted -= tokens
        after[kind] = chat.estimate(counted)
    if after:
        after[kind] = final
    return Report(
        TokenCounts(before, after, final),
        limit=budget.window,
        room=max(0, budget.room - final),
        edits=tuple(edits),
        fired=reduced.fired,
        cache_break_at=0 if rendered.is_system_new else chat.changed_since_request,
        notices=tuple(notices),
    )


def _over_budget_error(
    chat: Conversation, tokens: int, budget: Budget, extras: RequestExtras, lines: Sequence[Line]
) -> OverBudgetError:
    """The error for a request of so many tokens with these messages."""
    ratio, _ = chat.meter.scale(None)
    state = chat.record.live.state
    parts = [large_part(line, state, round(line.tokens * ratio)) for line in lines]
    system = round(chat.meter.counter.system(extras.system) * ratio)
    rest = round(extras.counted * ratio) - system
    if system:
        advice = "shorten it, or let the agent read details"
        parts.append(LargePart("the system text", "system", system, advice))
    if rest:
        number = len(extras.tools or ())
        parts.append(LargePart(f"{number} in all", "tools", rest, "offer fewer, or shorter descriptions"))
    largest = sorted(parts, key=lambda part: part.tokens, reverse=True)[:MAX_NAMED_PARTS]
    least = min(SMALL_PART * tokens, largest[0].tokens) if largest else 0
    named = [part for part in largest if part.tokens >= least]
    error = OverBudgetError(tokens, budget.room, budget.window, named)
    if chat.started is not None:
        chat.started = None
        chat.tell("compaction:failed", str(error), tokens, tokens)
    chat.tell("overflow", str(error), tokens, tokens)
    return error
