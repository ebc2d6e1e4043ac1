"""Why a message is shown or not: what was done to it, by which rung, and which setting decided it."""

from refold.answers import Cause, Explanation
from refold.core.errors import NotFoundError
from refold.core.event import Replaced, Said
from refold.core.live import Cover, Standing
from refold.record import Record


def explain(record: Record, at: int) -> Explanation:
    """
    Raises:
        NotFoundError: there is no message and no edit at the place.
    """
    event = record.event(at)
    standing = Standing(record.view, record.facts(record.live.state.next))
    if isinstance(event, Replaced):
        state = _state(event.at, standing) if event.view == record.view else f"of view {event.view!r}"
        only = _cause(record, event.at, state)
        return Explanation(at, "edit", state, event.tokens[1], (only,), span=event.span)
    if not isinstance(event, Said):
        raise NotFoundError(f"#{at} is neither a message nor an edit: there is nothing to explain")
    covers = [one for one in record.facts(record.live.state.next) if isinstance(one, Cover)]
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
    return Explanation(at, event.line.role, state, tokens, causes, _kept(record, event))


def _kept(record: Record, said: Said) -> tuple[str, ...]:
    """Why it stays, whatever is done around it."""
    state = record.live.state
    reasons = {
        "it is the task, the first thing the user said": state.task is not None and state.task.at == said.at,
        "it is the latest that the user said": state.latest == said.at,
        "it is pinned": any(
            pin.holds and said.at in {line.at for line in pin.lines} for pin in state.pins.values()
        ),
        "it is the system text in force": said.at in {line.at for line in state.apart},
        "somebody took back what hid it": any(said.at in span for span in state.spared),
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def _state(at: int, standing: Standing) -> str:
    if at not in standing.covers:
        return "taken back"
    return "in force" if any(cover.at == at for cover in standing.widest) else "under a later one"


def _cause(record: Record, at: int, state: str) -> Cause:
    edit = record.event(at)
    assert isinstance(edit, Replaced)
    return Cause(at, edit.kind, edit.why, edit.span, edit.tokens, state)
