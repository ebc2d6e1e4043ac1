"""Plans the edits of a view and appends them: expiry, caps, and the stages of the ladder."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from refold.config.config import DEFAULT
from refold.core.budget import Budget
from refold.core.cache_cost import CacheTerms
from refold.core.errors import ConflictError
from refold.core.event import Line, Replaced, Worth
from refold.core.expiry import lease_steps
from refold.core.message import Message
from refold.core.plan import CompactionRequest, Edit, Policy, Stamp, applied, is_reducible, settle
from refold.core.view import Item, View
from refold.session.conversation import Conversation
from refold.session.validate import Override
from refold.stores.store import Lease

if TYPE_CHECKING:
    from refold.policies.summarize import UsePrepared

NO_SUMMARIZER = (
    "compact_mode is ai-summary, but no summarizer is set: results are cut to their beginning."
    " Set `summarizer`, or compact_mode: first-n-chars"
)


class ReduceRequest(msgspec.Struct, frozen=True):
    """How far a view is to be reduced, and under which conditions."""

    budget: Budget
    override: Override = Override()
    order: CompactionRequest | None = None
    """Of a compaction on demand."""
    is_compaction: bool = True
    """False if single messages are reduced, in their places."""
    terms: CacheTerms | None = None
    """What a rewrite costs at the provider's cache, if prices are known."""
    lease: Lease | None = None
    """Nothing is appended if another process has taken it over."""
    only_after: int | None = None
    """Nothing is planned if the newest round is another one: the caller measures again."""


def reduce_view(chat: Conversation, policy: Policy, request: ReduceRequest) -> list[Replaced]:
    """Appends the edits that a policy plans; plans again if another writer came first.

    Raises:
        ConflictError: another process has taken over the lease.
    """

    def build() -> Sequence[Replaced]:
        is_outdated = request.only_after not in (None, chat.record.live.state.round)
        return [] if is_outdated else planned_edits(chat, policy, request)

    return [event for event in chat.record.append(build, request.lease) if isinstance(event, Replaced)]


def planned_edits(chat: Conversation, policy: Policy, request: ReduceRequest) -> list[Replaced]:
    """The edits that a policy plans for the view as it is; nothing is changed."""
    live = chat.record.live
    chat.record.load_all(originals=request.is_compaction)
    decoded = dict[tuple[int, int], Message]()

    def words(line: Line) -> Message:
        key = (line.at, line.n)
        if key not in decoded:
            decoded[key] = live.words(line)
        return decoded[key]

    frozen = live.freeze()
    items = tuple(msgspec.structs.replace(item, words=words) for item in frozen.items)
    keep_originals = request.override.keep_originals is not False
    before = msgspec.structs.replace(frozen, items=items, handles=chat.handles and keep_originals)
    round = live.state.round + 1 if request.is_compaction else 0
    stamp = Stamp(live.state.next, time.time(), live.view, round, keep_originals)
    events = list[Replaced]()
    view = before
    for edit in policy(view, request.budget, chat.count):
        certificate = edit.certificate
        if certificate is not None:
            digest = chat.record.digest_before(edit.span.end)
            certificate = msgspec.structs.replace(certificate, digest=digest)
        explained = msgspec.structs.replace(edit, why=_reason_for(chat, edit), certificate=certificate)
        events.append(settle(explained, view, stamp, chat.count))
        stamp = msgspec.structs.replace(stamp, at=stamp.at + 1)
        view = applied(view, events[-1])
    if request.terms is None or not events:
        return events
    worth = _worth_of(request.terms, before, view, events)
    if not request.terms.accepts(worth):
        return []
    return [msgspec.structs.replace(events[0], worth=worth), *events[1:]]


def _reason_for(chat: Conversation, edit: Edit) -> str:
    """Why, with the setting and its origin."""
    if not edit.setting:
        return edit.why
    if edit.setting[0] in ("override", "message"):
        return f"{edit.why} ({edit.setting[-1]} of the {edit.setting[0]})"
    origin = chat.config.origin("agents", chat.agent or DEFAULT, *edit.setting)
    return f"{edit.why} ({'.'.join(edit.setting)}, {origin})"


def _worth_of(terms: CacheTerms, before: View, after: View, edits: Sequence[Replaced]) -> Worth:
    """What edits save together. Messages since the last request are not in the cache in any case."""
    start = min(edit.span.start for edit in edits)
    answers = [
        item.span.start for item in after.items if any(line.role == "assistant" for line in item.lines)
    ]
    newest = max(answers, default=0)
    sent = sum(item.tokens for item in after.items if start <= item.span.start < newest)
    summaries = [edit.certificate for edit in edits if edit.certificate and not edit.certificate.was_cached]
    cost = sum(summary.cost or 0.0 for summary in summaries)
    return terms.weigh(before.tokens - after.tokens, sent, cost)


# Compaction


def compaction_edits(chat: Conversation, request: ReduceRequest) -> list[Replaced]:
    """The edits of a compaction without a model; nothing is changed."""
    return planned_edits(chat, _compaction_policy(chat, request), request)


def compact_view(chat: Conversation, request: ReduceRequest) -> list[Replaced]:
    """Compacts because a trigger fired, or on demand.

    Uses the summaries that a model has written for it, if what they cover is unchanged.

    Raises:
        ConflictError: another process has taken over the lease.
    """
    summaries = chat.summaries
    ready = summaries.ready(chat.record.live.freeze()) if summaries else None
    if summaries is not None and ready is not None:
        from refold.policies.summarize import UsePrepared

        policy = _compaction_policy(chat, request, UsePrepared(ready.prepared))
        edits = list[Replaced]()
        with suppress(ConflictError):  # another process has newer ones
            edits = reduce_view(chat, policy, msgspec.structs.replace(request, lease=ready.lease))
        if not edits and request.only_after not in (None, chat.record.live.state.round):
            return []
        summaries.end_round(ready)
        if edits:
            return edits
    return reduce_view(chat, _compaction_policy(chat, request), request)


def _compaction_policy(
    chat: Conversation, request: ReduceRequest, prepared: "UsePrepared | None" = None
) -> Policy:
    from refold.config import ladder

    return ladder.compaction_policy(chat.settings, chat.policies, request.budget, request.order, prepared)


# Results that expire, or are too large from the first request on


def reduce_new_results(chat: Conversation, budget: Budget, override: Override) -> list[Replaced]:
    """Reduces results that expire in this step or are too large. Needs no trigger."""
    live = chat.record.live
    cap = chat.cap
    of_override = override.rules
    rules = [*chat.expiries.values(), *of_override]
    by_relevance = any(rule.strategy == "relevance" for rule in rules)  # due at any later step, or never
    depends_on = (live, override, live.state.step if by_relevance else None)
    if chat.unchanged[0] != depends_on:
        chat.unchanged = (depends_on, set())
    unchanged = chat.unchanged[1]
    most = cap.most(budget) if cap else budget.window
    is_overridden = any(rule.after_steps is not None for rule in of_override)
    may_expire = bool(chat.expiries) or is_overridden
    items = list[Item]()  # empty in nearly all steps
    for item in live.items:
        line = item.lines[0] if item.lines else None
        if line is None or not (may_expire or line.tokens > most or line.expiry is not None):
            continue
        if line.at in unchanged or not is_reducible(item):
            continue
        if is_overridden or lease_steps(line) is None:
            items.append(item)
    if not items:
        return []
    fixed = {*live.kept, live.state.latest}
    lines = [item.lines[0] for item in items if item.span.start not in fixed]
    request = ReduceRequest(budget, override, is_compaction=False)
    edits = _expire(chat, lines, request)
    if cap is not None:
        gone = {edit.span.start for edit in edits}
        spared = set(chat.prune.exclude_tools) if chat.prune else set[str]()
        large = list[Line]()
        for line in lines:
            if line.answers and line.tokens > most and line.at not in gone and not spared & {*line.tools}:
                large.append(line)
        edits += _reduce_lines(chat, cap, large, request)
    return edits


def _expire(chat: Conversation, lines: Sequence[Line], request: ReduceRequest) -> list[Replaced]:
    from refold.policies.expire import Expire, batches  # read only by those who need it

    live = chat.record.live
    written = {}
    if chat.summaries is not None:
        chat.summaries.reset_if_reopened()
        written = chat.summaries.message_summaries
    expire = Expire(chat.expiries, request.override.tools, told=written)
    together = batches([line for item in live.items for line in item.lines])
    due = expire.due(lines, live.state.step + 1, together)
    rules = {line.at: expire.rule(line, together) for line in due}
    near = _similarities(chat, [line for line in due if rules[line.at].strategy == "relevance"])
    policy = msgspec.structs.replace(expire, only=frozenset(rules), near=near)
    edits = _reduce_lines(chat, policy, due, request)
    wanted = [rule for rule in rules.values() if rule.compact_mode == "ai-summary" and rule.mode != "remove"]
    if edits and wanted and chat.summaries is None and NO_SUMMARIZER not in chat.noticed:
        chat.noticed.add(NO_SUMMARIZER)
        chat.notices.append(NO_SUMMARIZER)
    return edits


def _reduce_lines(
    chat: Conversation, policy: Policy, lines: Sequence[Line], request: ReduceRequest
) -> list[Replaced]:
    """Applies a policy to lines; those that it leaves unchanged are not considered again."""
    edits = reduce_view(chat, policy, request) if lines else []
    chat.unchanged[1].update({line.at for line in lines} - {edit.span.start for edit in edits})
    return edits


def _similarities(chat: Conversation, lines: Sequence[Line]) -> dict[int, float]:
    """The semantic similarity of messages to the current work, by place; empty without an embedder."""
    if chat.similarity is None or not lines:
        return {}
    from refold.policies.expire import current_work
    from refold.policies.text import all_text

    record = chat.record
    recent = current_work([line for item in record.live.items for line in item.lines])
    record.load([*lines, *recent])
    texts = [all_text(record.message(line)) for line in lines]
    work = [all_text(record.message(line)) for line in recent]
    return dict(zip((line.at for line in lines), chat.similarity(texts, work), strict=True))
