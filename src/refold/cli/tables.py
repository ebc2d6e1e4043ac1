"""Tables of conversations, views, explanations, savings and differences, as people see them."""

from collections.abc import Sequence
from itertools import groupby

from refold.cli.format import full, glance, local, one_line, places, plural, quoted, saved_percent
from refold.cli.terminal import Cell, Column, Columns, console, fitting
from refold.session.results import (
    ComparedView,
    ConversationRow,
    Diff,
    EditRow,
    Explanation,
    ShownItem,
    ShownMessage,
    ShownView,
)
from refold.session.savings import EditSavings

ROLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}
EDIT = "bold blue"
HOW_SHOWN = {
    "whole": "is shown whole, {}",
    "reduced": "is reduced to {}",
    "corrected": "is corrected: another message is shown in its place, {}",
    "hidden": "is hidden",
}
MAX_REPAIRS = 3
CHANGE_STYLES = {"-": "red", "+": "green"}


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
    if row.problem is not None:
        return [*cells, (f"cannot be read: {one_line(row.problem)}", "red")]
    tokens = row.tokens
    is_smaller = tokens.shown < tokens.recorded
    parent = "" if row.parent is None else f"{one_line(row.parent.id)} at #{row.parent.at}"
    return [
        *cells,
        (f"{row.messages:,}", ""),
        (f"{tokens.recorded:,}", ""),
        (f"{tokens.shown:,}", ""),
        (f"{saved_percent(tokens.recorded, tokens.shown)} %", "green" if is_smaller else "dim"),
        ("-" if row.created is None else local(row.created.timestamp())[:16], "dim"),
        (parent, "dim"),
    ]


def view(shown: ShownView) -> None:
    """A row for each message in the view, and one for each edit with what it hides."""
    rows = list[list[Cell]]()
    for item in shown.items:
        is_plain = item.edit is None or item.is_in_place
        if not is_plain:
            recorded = item.recorded
            turns = f"{recorded.last_turn}"
            if recorded.first_turn < recorded.last_turn:
                turns = f"{recorded.first_turn}–{recorded.last_turn}"
            cells = (places(item.span), turns, _item_tokens(item), _edit_sentence(item))
            rows.append([(cell, "dim" if cell is turns else EDIT) for cell in cells])
        indent = "" if is_plain else "  "
        rows += [_message(item, message, indent) for message in item.shown]
    table = Columns(*fitting(("place", ">turn", ">tokens", "role", "", ""), rows))
    table.head()
    for row in rows:
        table.line(*row)
    table.line(("", ""))
    _view_footer(table, shown)


def full_view(shown: ShownView) -> None:
    """The whole text of each message in the view, under a line that says which it is."""
    table = Columns(Column("", 0))
    for item in shown.items:
        if item.edit is not None and not item.is_in_place:
            about = f"{places(item.span)} · {_item_tokens(item)} tokens · {_edit_sentence(item)}"
            table.line((about, EDIT), wrap=True)
            table.line(("", ""))
        for one in item.shown:
            tokens = _message_tokens(item, one)
            unit = "token" if tokens == "1" else "tokens"
            facts = [f"#{one.at}", one.role, f"turn {one.turn}", f"{tokens} {unit}", _marks(one)]
            table.line((" · ".join(filter(None, facts)), f"bold {ROLES[one.role]}"))
            table.console.print(full(one.message, one.tools), style="")
            table.line(("", ""))
    _view_footer(table, shown)


def _view_footer(table: Columns, shown: ShownView) -> None:
    notices = shown.notices
    for notice in notices[:MAX_REPAIRS]:
        table.line((f"repaired when sent: {one_line(notice)}", "yellow"))
    if len(notices) > MAX_REPAIRS:
        table.line((f"… and {len(notices) - MAX_REPAIRS} more: see --json", "yellow"))
    name = "" if shown.view == "main" else f" {one_line(shown.view)!r}"
    when = "" if shown.at is None else f" right after #{shown.at}"
    tokens = shown.tokens
    saved = saved_percent(tokens.recorded, tokens.shown)
    sizes = f"{plural(tokens.shown, 'token')} · recorded {tokens.recorded:,} · saved {saved} %"
    count = f"shows {plural(len(shown.shown), 'message')} for {shown.recorded_messages:,} recorded"
    table.line((f"view{name}{when} {sizes} · {count}", "bold"), wrap=True)


def _message(item: ShownItem, one: ShownMessage, indent: str) -> list[Cell]:
    is_ours = one.kind not in ("", "correct") or one.is_summary
    return [
        (f"{indent}#{one.at}", "dim"),
        (f"{one.turn}", "dim"),
        (_message_tokens(item, one), EDIT if one.kind else ""),
        (one.role, ROLES[one.role]),
        (_marks(one), EDIT if one.kind else "bold red"),
        (glance(one.message, one.tools, is_ours=is_ours), ""),
    ]


def _message_tokens(item: ShownItem, one: ShownMessage) -> str:
    return _item_tokens(item) if one.kind and item.is_in_place else f"{one.tokens:,}"


def _item_tokens(item: ShownItem) -> str:
    return f"{item.recorded.tokens:,} → {item.tokens:,}"


def _marks(one: ShownMessage) -> str:
    marks = {"task": one.is_task, "pinned": one.is_pinned, one_line(one.kind): bool(one.kind)}
    return " ".join(name for name, has in marks.items() if has)


def _edit_sentence(item: ShownItem) -> str:
    """Which edit it is, and what it hides."""
    edit = item.edit
    assert edit is not None
    kind = one_line(edit.kind)
    why = f": {one_line(edit.why)}" if edit.why else ""
    if item.hidden == 0 and edit.kind == "restore":
        return f"restored by #{edit.at}{why}"
    if item.hidden == 0:
        return f"rewritten by #{edit.at} {kind}{why}"
    what = plural(item.recorded.messages, "message")
    if item.hidden < item.recorded.messages:
        what = f"{item.hidden:,} of {what}"
    by = "several edits, the newest " if item.is_merged else ""
    return f"{what} hidden by {by}#{edit.at} {kind}{why}"


def explanation(found: Explanation, conversation: str) -> None:
    """How it is shown, why it stays, and its edits, the newest first."""
    table = Columns(Column("", 2), Column("", 0))
    if found.span is None:  # the line of an edit says it all
        how = HOW_SHOWN[found.shown].format(plural(found.tokens, "token"))
        table.line((f"#{found.at} ({found.role}) {how}", "bold"))
    for reason in found.stays:
        table.line((f"It stays: {reason}.", "green"))
    for edit in found.causes:
        _cause(table, edit)
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


def diff(found: Diff) -> None:
    """What one view shows and the other does not, in order."""
    everything = [*found.changes, *found.old.recorded, *found.new.recorded]
    width = len(f"#{max([seen.at for seen in everything], default=0)}")
    tokens = max((len(f"{seen.tokens:,}") for seen in everything), default=0)
    table = Columns(Column("", 1), Column("", width), Column("", tokens, is_right=True), Column("", 9))
    if found.parted_at is not None:
        has_past = found.parted_at >= 0
        table.line((f"They part after #{found.parted_at}" if has_past else "They share no events", "bold"))
        for side, sign in ((found.old, "-"), (found.new, "+")):
            recorded = plural(len(side.recorded), "message")
            table.line((f"{one_line(side.conversation)} recorded {recorded} since", "bold"))
            for seen in side.recorded:
                _change(table, sign, seen)
        table.line(("", ""))
    for side, sign in ((found.old, "---"), (found.new, "+++")):
        table.line((f"{sign} {_heading(side)}", "bold"))
    if not found:
        table.line(("The two views show the same.", "bold"))
        return
    for is_shared, group in groupby(found.changes, lambda change: change.sign == " "):
        changes = list(group)
        if is_shared:
            table.line((f"   … {len(changes):,} shown in both …", "dim"))
            continue
        for change in changes:
            _change(table, change.sign, change)
    counts = f"{len(found.removed):,} removed, {len(found.added):,} added"
    table.line((f"{counts} · {found.old.tokens:,} → {found.new.tokens:,} tokens", "bold"))


def _heading(side: ComparedView) -> str:
    when = "now" if side.at is None else f"right after #{side.at}"
    sizes = f"{plural(side.messages, 'message')} · {plural(side.tokens, 'token')}"
    return f"{one_line(side.conversation)} view {when} · {sizes}"


def _change(table: Columns, sign: str, seen: ShownMessage) -> None:
    text = glance(seen.message, seen.tools, is_ours=seen.edit is not None)
    cells = (sign, f"#{seen.at}", f"{seen.tokens:,}", seen.role, text)
    table.line(*((cell, CHANGE_STYLES[sign]) for cell in cells))
