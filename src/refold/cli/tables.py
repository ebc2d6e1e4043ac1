"""Tables of conversations, views, explanations, savings and differences, as people see them."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import UNSET

from refold.cli.format import full, glance, local, one_line, places, plural, quoted, saved_percent
from refold.cli.terminal import Cell, Column, Columns, console, fitting
from refold.core.event import Span
from refold.session.inspect import Inspector, repairs
from refold.session.results import (
    Change,
    ComparedView,
    ConversationRow,
    Diff,
    EditRow,
    Explanation,
    RecordedCount,
    ShownItem,
    ShownMessage,
    ShownView,
)
from refold.session.savings import EditSavings

ROLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}
EDIT = "bold blue"
MAX_REPAIRS = 3
MAX_CAUSES = 4
"""Edits of one message that are printed, the first of all included."""
CONTEXT = 1
"""Unchanged messages printed around a change."""


def conversations(rows: Sequence[ConversationRow], *, with_owner: bool) -> None:
    cells = [_conversation(row, with_owner) for row in rows]
    owner = ("owner",) if with_owner else ()
    titles = (*owner, "id", ">messages", ">recorded", ">shown", ">saved", "created", "forked from")
    table = Columns(*fitting(titles, cells, most=max(16, min(48, console().width - 64))))
    table.head()
    for line in cells:
        table.line(*line)


def _conversation(row: ConversationRow, with_owner: bool) -> list[Cell]:
    cells: list[Cell] = [(one_line(row.owner), "cyan")] if with_owner else []
    cells.append((one_line(row.id), "bold"))
    if row.problem is not UNSET:
        return [*cells, (f"cannot be read: {one_line(row.problem)}", "red")]
    is_smaller = row.tokens_shown < row.tokens_said
    parent = "" if row.parent is None else f"{one_line(row.parent.id)} at #{row.parent.at}"
    return [
        *cells,
        (f"{row.messages:,}", ""),
        (f"{row.tokens_said:,}", ""),
        (f"{row.tokens_shown:,}", ""),
        (f"{saved_percent(row.tokens_said, row.tokens_shown)} %", "green" if is_smaller else "dim"),
        ("-" if row.created is None else local(row.created.timestamp())[:16], "dim"),
        (parent, "dim"),
    ]


class CountedItem(NamedTuple):
    """An item of a view, and how much of the record it stands for."""

    item: ShownItem
    recorded: RecordedCount

    @property
    def hidden(self) -> int:
        return self.recorded.messages - self.item.whole - self.item.reduced


def count_items(inspector: Inspector, view: ShownView) -> list[CountedItem]:
    counted = []
    for item in view.items:
        if item.edit is None and item.shown:
            line = item.shown[0].line
            recorded = RecordedCount(1, line.tokens, line.turn, line.turn)
        else:
            recorded = inspector.recorded_in(item.span)
        counted.append(CountedItem(item, recorded))
    return counted


def view(inspector: Inspector, shown: ShownView) -> None:
    """A row for each message in the view, and one for each edit with what it hides."""
    rows = list[list[Cell]]()
    for one in count_items(inspector, shown):
        is_plain = one.item.edit is None or one.item.is_in_place
        if not is_plain:
            recorded = one.recorded
            turns = f"{recorded.last_turn}"
            if recorded.first_turn < recorded.last_turn:
                turns = f"{recorded.first_turn}–{recorded.last_turn}"
            tokens = f"{recorded.tokens:,} → {one.item.tokens:,}"
            rows.append(
                [(places(one.item.span), EDIT), (turns, "dim"), (tokens, EDIT), (_edit_sentence(one), EDIT)]
            )
        indent = "" if is_plain else "  "
        rows += [_message(inspector, message, indent) for message in one.item.shown]
    table = Columns(*fitting(("place", ">turn", ">tokens", "role", "", ""), rows))
    table.head()
    for row in rows:
        table.line(*row)
    table.line(("", ""))
    _view_footer(table, inspector, shown)


def full_view(inspector: Inspector, shown: ShownView) -> None:
    """The whole text of each message in the view, under a line that says which it is."""
    table = Columns(Column("", 0))
    for one in count_items(inspector, shown):
        if one.item.edit is not None and not one.item.is_in_place:
            tokens = f"{one.recorded.tokens:,} → {one.item.tokens:,} tokens"
            table.line((f"{places(one.item.span)} · {tokens} · {_edit_sentence(one)}", EDIT), wrap=True)
            table.line(("", ""))
        for message in one.item.shown:
            line = message.line
            unit = "token" if line.tokens == 1 else "tokens"
            tokens = f"{_message_tokens(inspector, message)} {unit}"
            about = [f"#{message.at}", line.role, f"turn {line.turn}", tokens, _marks(message)]
            table.line((" · ".join(filter(None, about)), f"bold {ROLES[line.role]}"))
            table.console.print(full(message.message, line.tools), style="")
            table.line(("", ""))
    _view_footer(table, inspector, shown)


def _view_footer(table: Columns, inspector: Inspector, shown: ShownView) -> None:
    mended = repairs(shown)
    for notice in mended[:MAX_REPAIRS]:
        table.line((f"repaired when sent: {one_line(notice)}", "yellow"))
    if len(mended) > MAX_REPAIRS:
        table.line((f"repaired when sent: {len(mended) - MAX_REPAIRS} more", "yellow"))
    name = "" if inspector.view_name == "main" else f" {one_line(inspector.view_name)!r}"
    when = "" if shown.at is None else f" right after #{shown.at}"
    saved = saved_percent(shown.recorded_tokens, shown.tokens)
    count = f"shows {plural(len(shown.messages), 'message')} for {shown.recorded_messages:,} recorded"
    tokens = f"{plural(shown.tokens, 'token')} · recorded {shown.recorded_tokens:,} · saved {saved} %"
    table.line((f"view{name}{when} {tokens} · {count}", "bold"), wrap=True)


def _message(inspector: Inspector, one: ShownMessage, indent: str) -> list[Cell]:
    line = one.line
    is_ours = one.kind not in ("", "correct") or line.summary
    return [
        (f"{indent}#{one.at}", "dim"),
        (f"{line.turn}", "dim"),
        (_message_tokens(inspector, one), EDIT if one.kind else ""),
        (line.role, ROLES[line.role]),
        (_marks(one), EDIT if one.kind else "bold red"),
        (glance(one.message, line.tools, is_ours=is_ours), ""),
    ]


def _message_tokens(inspector: Inspector, one: ShownMessage) -> str:
    if not one.kind:
        return f"{one.tokens:,}"
    recorded = inspector.recorded_in(Span(one.at, one.at + 1))
    return f"{recorded.tokens:,} → {one.tokens:,}"


def _marks(one: ShownMessage) -> str:
    marks = []
    if one.is_task:
        marks.append("task")
    if one.is_pinned:
        marks.append("pinned")
    if one.kind:
        marks.append(one_line(one.kind))
    return " ".join(marks)


def _edit_sentence(one: CountedItem) -> str:
    """Which edit it is, and what it hides."""
    edit = one.item.edit
    assert edit is not None
    kind = one_line(edit.kind)
    why = f": {one_line(edit.why)}" if edit.why else ""
    if one.item.is_merged:
        return f"{plural(one.hidden, 'message')} hidden by several edits, the newest #{edit.at} {kind}{why}"
    if one.hidden == 0 and edit.kind == "restore":
        return f"restored by #{edit.at}{why}"
    if one.hidden == 0:
        return f"rewritten by #{edit.at} {kind}{why}"
    messages = plural(one.recorded.messages, "message")
    what = messages if one.hidden == one.recorded.messages else f"{one.hidden:,} of {messages}"
    return f"{what} hidden by #{edit.at} {kind}{why}"


def explanation(found: Explanation, conversation: str) -> None:
    """How it is shown, why it stays, and its edits, the newest first."""
    table = Columns(Column("", 2), Column("", 0))
    if found.span is None:  # the line of an edit says it all
        table.line((f"#{found.at} ({found.role}) {_how_shown(found)}", "bold"))
    for reason in found.stays:
        table.line((f"It stays: {reason}.", "green"))
    newest = found.causes
    if len(newest) > MAX_CAUSES:
        newest = newest[: MAX_CAUSES - 1]
    for edit in newest:
        _cause(table, edit)
    if len(newest) < len(found.causes):
        table.line((f"… {len(found.causes) - MAX_CAUSES:,} more: --json has all; the first was", "dim"))
        _cause(table, found.causes[-1])
    if not found.causes:
        table.line(("No edit covers it.", ""))
    if found.shown != "whole":
        table.line((f"Read it: refold expand {quoted(conversation)} {found.at}", "dim"))


def savings(found: Sequence[EditSavings]) -> None:
    """What each batch of edits costs and saves, in order."""
    table = Columns(
        Column("edit", 8),
        Column("removed", 8, is_right=True),
        Column("rewritten", 12, is_right=True),
        Column("pays after", 10, is_right=True),
        Column("calls since", 11, is_right=True),
        Column("saved", 10, is_right=True),
        Column("why", 0),
    )
    if found:
        table.head()
    for one in found:
        rewritten = one.worth.rewritten if one.rewritten is None else one.rewritten
        numbers = (f"{one.worth.removed:,}", f"{rewritten:,}", f"{one.worth.after:,.1f}", f"{one.calls:,}")
        saved = "unknown" if one.saved is None else f"${one.saved:,.4f}"
        cells = [(cell, "") for cell in (*numbers, saved)]
        table.line((f"#{one.at}", EDIT), *cells, (one_line(one.why), "dim"))
    known = [one.saved for one in found if one.saved is not None]
    if not found:
        total = "No edit has an estimate yet: that takes a model whose prices are known."
    elif known:
        total = f"${sum(known):,.4f} saved so far, by the provider's own numbers."
    else:
        total = "The savings are unknown: no usage was appended, or no prices are known."
    table.line((total, "bold"))


def _cause(table: Columns, edit: EditRow) -> None:
    before, after = edit.tokens
    about = f"#{edit.at} {one_line(edit.kind)} of {places(edit.span)}, {before:,} → {after:,} tokens"
    table.line((f"{about}, {edit.state}", EDIT))
    table.line(("", ""), (one_line(edit.why) or "no reason was given", ""), wrap=True)


def _how_shown(found: Explanation) -> str:
    tokens = plural(found.tokens, "token")
    match found.shown:
        case "whole":
            return f"is shown whole, {tokens}"
        case "reduced":
            return f"is reduced to {tokens}"
        case "corrected":
            return f"is corrected: another message is shown in its place, {tokens}"
    return f"is {found.shown}"


def diff(found: Diff) -> None:
    """What one view shows and the other does not, in order."""
    everything = [*(change.seen for change in found.changes), *found.old.said, *found.new.said]
    width = len(f"#{max([seen.at for seen in everything], default=0)}")
    tokens = max((len(f"{seen.tokens:,}") for seen in everything), default=0)
    table = Columns(Column("", 1), Column("", width), Column("", tokens, is_right=True), Column("", 9))
    old = one_line(found.old.conversation)
    new = one_line(found.new.conversation)
    if found.parted_at is None:
        table.line((f"--- {_heading(found.old)}", "bold"))
        table.line((f"+++ {_heading(found.new)}", "bold"))
        counts = f"{len(found.removed):,} no longer shown, {len(found.added):,} newly shown"
    else:
        _since_fork(table, found)
        table.line((f"--- {old} {_heading(found.old)}", "bold"))
        table.line((f"+++ {new} {_heading(found.new)}", "bold"))
        counts = f"{len(found.removed):,} shown only by {old}, {len(found.added):,} only by {new}"
    if not found:
        table.line(("The two views show the same.", "bold"))
        return
    groups = [(is_shared, list(some)) for is_shared, some in groupby(found.changes, lambda c: c.sign == " ")]
    for n, (is_shared, some) in enumerate(groups):
        if is_shared:
            _unchanged(table, some, starts=n == 0, ends=n == len(groups) - 1)
        else:
            _changes(table, some)
    table.line((f"{counts} · {found.old.tokens:,} → {found.new.tokens:,} tokens", "bold"))


def _since_fork(table: Columns, found: Diff) -> None:
    """Where two conversations part, and what each recorded since."""
    has_past = found.parted_at is not None and found.parted_at >= 0
    table.line((f"They part after #{found.parted_at}" if has_past else "They share no events", "bold"))
    for side, sign, style in ((found.old, "-", "red"), (found.new, "+", "green")):
        recorded = f"{one_line(side.conversation)} recorded {plural(len(side.said), 'message')} since"
        table.line((recorded, "bold"))
        for seen in side.said:
            _change(table, sign, seen, style)
    table.line(("", ""))


def _unchanged(table: Columns, side: Sequence[Change], *, starts: bool, ends: bool) -> None:
    """The messages next to a change, and how many more there are."""
    head = 0 if starts else CONTEXT
    tail = 0 if ends else CONTEXT
    left = len(side) - head - tail
    if left <= 1:
        _changes(table, side)
        return
    _changes(table, side[:head])
    table.line((f"   … {left:,} shown in both …", "dim"))
    _changes(table, side[len(side) - tail :])


def _heading(side: ComparedView) -> str:
    when = "now" if side.at is None else f"right after #{side.at}"
    return f"view {when} · {plural(side.messages, 'message')} · {plural(side.tokens, 'token')}"


def _changes(table: Columns, side: Sequence[Change]) -> None:
    for change in side:
        _change(table, change.sign, change.seen, {"-": "red", "+": "green"}.get(change.sign, "dim"))


def _change(table: Columns, sign: str, seen: ShownMessage, style: str) -> None:
    text = glance(seen.message, seen.tools, is_ours=seen.edit is not None)
    cells = (sign, f"#{seen.at}", f"{seen.tokens:,}", seen.role, text)
    table.line(*((cell, style) for cell in cells))
