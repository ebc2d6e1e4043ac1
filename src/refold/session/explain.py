"""Why a message is shown or not: which edits cover it, which rule made them, which setting decided it.

`large_part` says what to do about a message that is shown and too large.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from refold.core.errors import LargePart, NotFoundError
from refold.core.event import Line, Replaced, Said
from refold.core.live import Live, State
from refold.core.view import ActiveEdits
from refold.session.results import EditRow, Explanation, MessageState, utc
from refold.stores.record import Record

REASONS = {
    "task": "it is the task, the first message of the user",
    "latest": "it is the latest message of the user",
    "pinned": "it is pinned",
    "system": "it is the current system text",
    "restored": "the edit that hid it was taken back",
}
"""Why nothing may hide a message."""
SHORTEN = "shorten it, with `correct({at}, …)` if it is stored, or pass long material as a tool result"
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
    "other": ("a message", SHORTEN),
}
"""What a large part is called, and what to do about it."""


def explain(record: Record, at: int) -> Explanation:
    """Raises NotFoundError if there is no message and no edit at the place."""
    event = record.event(at)
    if isinstance(event, Replaced):
        edit = edit_rows(record, [event.at])[0]
        return Explanation(at, "edit", edit.state, event.tokens[1], (edit,), span=event.span)
    if not isinstance(event, Said):
        raise NotFoundError(f"#{at} is neither a message nor an edit: there is nothing to explain")
    state, edit_at, tokens = message_state(record.live, at)
    causes = edit_rows(record, [edit.at for edit in replacements(record) if at in edit.span][::-1])
    if state == "corrected":  # a correction is shown even where a wider edit covers the message
        causes = [replace(one, state="in force") if one.at == edit_at else one for one in causes]
    stays = tuple(REASONS[name] for name in _reasons_to_stay(record.live.state, at))
    return Explanation(at, event.line.role, state, tokens, tuple(causes), stays)


def message_state(live: Live, at: int) -> tuple[MessageState, int | None, int]:
    """How a recorded message is shown now, the edit that makes it so, and the tokens that are shown."""
    item = live.item_at(at)
    if item is None:
        return "hidden", None, 0
    line = next((line for line in item.lines if line.place == at), None)
    if line is not None and line.corrects is None:
        return "whole", None, line.tokens
    if line is not None:
        return "corrected", line.at, line.tokens
    if len(item.span) == 1 and item.tokens:
        return "reduced", item.edit, item.tokens
    return "hidden", item.edit, 0


def replacements(record: Record) -> list[Replaced]:
    """Every edit of the view, the oldest first, including those that were taken back."""
    heads = record.entries.facts(record.live.state.next)
    return [head for head in heads if isinstance(head, Replaced) and head.view == record.view]


def edit_rows(record: Record, places: Iterable[int]) -> list[EditRow]:
    """The edits at these places, with what became of them."""
    active = ActiveEdits(record.view, record.entries.facts(record.live.state.next))
    in_force = {edit.at for edit in active.outermost}
    rows = []
    for at in places:
        edit = record.event(at)
        assert isinstance(edit, Replaced)
        if edit.view != record.view:
            state = f"of view {edit.view!r}"
        elif at in in_force:
            state = "in force"
        else:
            state = "under a later one" if at in active.edits else "taken back"
        rows.append(edit_row(edit, state))
    return rows


def edit_row(edit: Replaced, state: str = "in force") -> EditRow:
    summary = edit.certificate
    return EditRow(
        at=edit.at,
        kind=edit.kind,
        why=edit.why,
        span=edit.span,
        tokens=edit.tokens,
        time=utc(edit.time),
        state=state,
        round=edit.round,
        model=summary.model if summary else None,
        cost=summary.cost if summary else None,
    )


def pinned_places(state: State) -> set[int]:
    return {line.at for pin in state.pins.values() if pin.holds for line in pin.lines}


def large_part(line: Line, state: State, tokens: int) -> LargePart:
    """A message that is too large to be shown, with what to do about it."""
    what, advice = ADVICE[_large_kind(line, state)]
    return LargePart(what, line.role, tokens, advice.format(at=line.place), line.place)


def _large_kind(line: Line, state: State) -> str:
    if line.role == "system":
        return "system"
    if line.summary:
        return "summary"
    for reason in _reasons_to_stay(state, line.place):
        if reason in ADVICE:
            return reason
    if line.answers is not None:
        return "result"
    return "calls" if line.calls else "other"


def _reasons_to_stay(state: State, at: int) -> list[str]:
    """Why a message stays, whatever is done around it: keys of `REASONS`."""
    holds = {
        "task": state.task is not None and state.task.at == at,
        "latest": state.latest == at,
        "pinned": at in pinned_places(state),
        "system": at in {line.at for line in state.apart},
        "restored": any(at in span for span in state.spared),
    }
    return [name for name in REASONS if holds[name]]
