"""Why a message is shown or not: what was done to it, by which rung, and which setting decided it.

`large_part` says what to do about a message that is shown and too large.
"""

from refold.core.errors import LargePart, NotFoundError
from refold.core.event import Line, Replaced, Said
from refold.core.live import ActiveEdits, ReplacedHead, State
from refold.session.results import Cause, Explanation
from refold.stores.record import Record

REASONS = {
    "task": "it is the task, the first thing the user said",
    "latest": "it is the latest that the user said",
    "pinned": "it is pinned",
    "system": "it is the system text in force",
    "restored": "somebody took back what hid it",
}
"""Why nothing may hide a message."""
SHORTEN = "shorten it, with `correct({at}, …)` where it is stored, or pass long material as a tool result"
ADVICE = {
    "task": ("the task", SHORTEN),
    "latest": ("the latest user message", SHORTEN),
    "pinned": ("pinned", "`unpin({at})`"),
    "system": ("the system text", "shorten it, or move details into a file or tool that the agent reads"),
    "summary": (
        "a summary of hidden messages",
        "show something shorter in its place, with correct(at, …), or shorten the other parts",
    ),
    "result": ("a tool result", "lower `compact.cap.share`, or let the tool return pages"),
    "calls": ("tool calls", "let the agent write large arguments in several calls"),
    "other": ("a message", "shorten it, with `correct({at}, …)` where it is stored"),
}
"""What a large part is called, and what to do about it."""


def explain(record: Record, at: int) -> Explanation:
    """
    Raises:
        NotFoundError: there is no message and no edit at the place.
    """
    event = record.event(at)
    standing = ActiveEdits(record.view, record.facts(record.live.state.next))
    if isinstance(event, Replaced):
        state = _state(event.at, standing) if event.view == record.view else f"of view {event.view!r}"
        only = _cause(record, event.at, state)
        return Explanation(at, "edit", state, event.tokens[1], (only,), span=event.span)
    if not isinstance(event, Said):
        raise NotFoundError(f"#{at} is neither a message nor an edit: there is nothing to explain")
    covers = [one for one in record.facts(record.live.state.next) if isinstance(one, ReplacedHead)]
    over = [one for one in covers if one.view == record.view and at in one.span]
    item = record.live.item_at(at)
    shown = next((line for line in item.lines if line.place == at), None) if item else None
    states = {one.at: _state(one.at, standing) for one in over}
    if shown is not None and shown.at in states:  # a correction is seen through what is above it
        states[shown.at] = "in force"
    causes = tuple(_cause(record, one.at, states[one.at]) for one in reversed(over))
    if shown is not None:
        state, tokens = "whole" if shown.corrects is None else "corrected", shown.tokens
    else:
        tokens = item.tokens if item is not None and len(item.span) == 1 else 0
        state = "reduced" if tokens else "hidden"
    stays = tuple(REASONS[name] for name in _kept(record.live.state, at))
    return Explanation(at, event.line.role, state, tokens, causes, stays)


def large_part(line: Line, state: State, tokens: int) -> LargePart:
    """A message that is too large to be shown, with what to do about it."""
    what, advice = ADVICE[_large_kind(line, state)]
    return LargePart(what, line.role, tokens, advice.format(at=line.place), line.place)


def _large_kind(line: Line, state: State) -> str:
    if line.role == "system":
        return "system"
    if line.summary:
        return "summary"
    for reason in _kept(state, line.place):
        if reason in ADVICE:
            return reason
    if line.answers is not None:
        return "result"
    return "calls" if line.calls else "other"


def _kept(state: State, at: int) -> list[str]:
    """Why a message stays, whatever is done around it: keys of `REASONS`."""
    pinned = {line.at for pin in state.pins.values() if pin.holds for line in pin.lines}
    holds = {
        "task": state.task is not None and state.task.at == at,
        "latest": state.latest == at,
        "pinned": at in pinned,
        "system": at in {line.at for line in state.apart},
        "restored": any(at in span for span in state.spared),
    }
    return [name for name in REASONS if holds[name]]


def _state(at: int, standing: ActiveEdits) -> str:
    if at not in standing.covers:
        return "taken back"
    return "in force" if any(cover.at == at for cover in standing.widest) else "under a later one"


def _cause(record: Record, at: int, state: str) -> Cause:
    edit = record.event(at)
    assert isinstance(edit, Replaced)
    return Cause(at, edit.kind, edit.why, edit.span, edit.tokens, state)
