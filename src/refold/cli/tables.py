"""Text for people: conversations, views, explanations, savings and differences."""

from collections.abc import Sequence
from itertools import groupby

from refold.cli.format import full, glance, local, one_line, places, plural, quoted, saved_percent
from refold.cli.terminal import Cell, at_most, fitted, say, table
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
    titles = ["id", ">messages", ">recorded", ">shown", ">saved", "created", "forked from"]
    cells = list(map(_conversation, rows))
    if with_owner:
        titles.insert(0, "owner")
        cells = [[(one_line(row.owner), "cyan"), *line] for row, line in zip(rows, cells, strict=True)]
    table(titles, cells)


def _conversation(row: ConversationRow) -> list[Cell]:
    id = (one_line(row.id), "bold")
    if row.problem is not None:
        return [id, (f"cannot be read: {one_line(row.problem)}", "red")]
    tokens = row.tokens
    is_smaller = tokens.shown < tokens.recorded
    return [
        id,
        (f"{row.messages:,}", ""),
        (f"{tokens.recorded:,}", ""),
        (f"{tokens.shown:,}", ""),
        (f"{saved_percent(tokens.recorded, tokens.shown)} %", "green" if is_smaller else "dim"),
        ("-" if row.created is None else local(row.created.timestamp())[:16], "dim"),
        ("" if row.parent is None else f"{one_line(row.parent.id)} at #{row.parent.at}", "dim"),
    ]


def view(shown: ShownView) -> None:
    """A row for each message in the view, and one for each edit with what it hides."""
    rows = list[list[Cell]]()
    for item in shown.items:
        indent = ""
        if item.edit is not None and not item.is_in_place:
            indent = "  "
            cells = (places(item.span), "", _item_tokens(item), _edit_sentence(item, item.edit))
            rows.append([(cell, EDIT) for cell in cells])
        rows += [_message(item, message, indent) for message in item.shown]
    table(("place", ">turn", ">tokens", "role", "", ""), rows)
    say("")
    _view_footer(shown)


def full_view(shown: ShownView) -> None:
    """The whole text of each message in the view, under a line that says which it is."""
    for item in shown.items:
        if item.edit is not None and not item.is_in_place:
            tokens = _item_tokens(item)
            say(f"{places(item.span)} · {tokens} tokens · {_edit_sentence(item, item.edit)}\n", EDIT)
        for one in item.shown:
            tokens = f"{_message_tokens(item, one)} tokens"
            facts = [f"#{one.at}", one.role, f"turn {one.turn}", tokens, _marks(one)]
            say(" · ".join(filter(None, facts)), f"bold {ROLES[one.role]}")
            say(f"{full(one.message, one.tools)}\n")
    _view_footer(shown)


def _view_footer(shown: ShownView) -> None:
    repairs = [f"repaired when sent: {one_line(notice)}" for notice in shown.notices]
    for repair in at_most(repairs, MAX_REPAIRS):
        say(repair, "yellow")
    name = "" if shown.view == "main" else f" {one_line(shown.view)!r}"
    when = "" if shown.at is None else f" right after #{shown.at}"
    tokens = shown.tokens
    saved = saved_percent(tokens.recorded, tokens.shown)
    sizes = f"{plural(tokens.shown, 'token')} · recorded {tokens.recorded:,} · saved {saved} %"
    count = f"shows {plural(len(shown.shown), 'message')} for {shown.recorded_messages:,} recorded"
    say(f"view{name}{when} {sizes} · {count}", "bold")


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


def _edit_sentence(item: ShownItem, edit: EditRow) -> str:
    """Which edit it is, and what it hides."""
    kind = one_line(edit.kind)
    why = f": {one_line(edit.why)}" if edit.why else ""
    if item.hidden == 0:
        done = f"restored by #{edit.at}" if edit.kind == "restore" else f"rewritten by #{edit.at} {kind}"
        return done + why
    what = plural(item.recorded.messages, "message")
    if item.hidden < item.recorded.messages:
        what = f"{item.hidden:,} of {what}"
    return f"{what} hidden by #{edit.at} {kind}{why}"


def explanation(found: Explanation, conversation: str) -> None:
    """How it is shown, why it stays, and its edits, the newest first."""
    if found.span is None:  # the line of an edit says it all
        how = HOW_SHOWN[found.shown].format(plural(found.tokens, "token"))
        say(f"#{found.at} ({found.role}) {how}", "bold")
    for reason in found.stays:
        say(f"It stays: {reason}.", "green")
    for edit in found.causes:
        before, after = edit.tokens
        about = f"#{edit.at} {one_line(edit.kind)} of {places(edit.span)}, {before:,} → {after:,} tokens"
        say(f"{about}, {edit.state}", EDIT)
        say(f"    {one_line(edit.why) or 'no reason was given'}")
    if not found.causes:
        say("No edit covers it.")
    if found.shown != "whole":
        say(f"Read it: refold expand {quoted(conversation)} {found.at}", "dim")


def savings(found: Sequence[EditSavings]) -> None:
    """What each batch of edits costs and saves, in order."""
    if not found:
        say("No edit has an estimate yet: estimates need a model with known prices.", "bold")
        return
    rows = list[list[Cell]]()
    for one in found:
        rewritten = one.worth.rewritten if one.rewritten is None else one.rewritten
        numbers = (f"{one.worth.removed:,}", f"{rewritten:,}", f"{one.worth.after:,.1f}", f"{one.calls:,}")
        saved = "unknown" if one.saved is None else f"${one.saved:,.4f}"
        plain = [(text, "") for text in (*numbers, saved)]
        rows.append([(f"#{one.at}", EDIT), *plain, (one_line(one.why), "dim")])
    table(("edit", ">removed", ">rewritten", ">pays after", ">calls since", ">saved", "why"), rows)
    known = [one.saved for one in found if one.saved is not None]
    if known:
        say(f"${sum(known):,.4f} saved so far, by the provider's own numbers.", "bold")
    else:
        say("The savings are unknown: no usage was appended, or no prices are known.", "bold")


def diff(found: Diff) -> None:
    """What one view shows and the other does not, in order."""
    changes = [_change(one.sign, one) for one in found.changes]
    old = [_change("-", one) for one in found.old.recorded]
    new = [_change("+", one) for one in found.new.recorded]
    columns = fitted(("", "", ">", "", ""), [*changes, *old, *new])
    if found.parted_at is not None:
        has_past = found.parted_at >= 0
        say(f"Both share the events up to #{found.parted_at}" if has_past else "They share no events", "bold")
        for side, rows in ((found.old, old), (found.new, new)):
            say(f"{one_line(side.conversation)} recorded {plural(len(rows), 'message')} since", "bold")
            for row in rows:
                columns.row(row)
        say("")
    say(f"--- {_compared(found.old)}", "bold")
    say(f"+++ {_compared(found.new)}", "bold")
    if not found:
        say("The two views show the same.", "bold")
        return
    for sign, group in groupby(changes, lambda row: row[0][0]):
        rows = list(group)
        if sign == " ":
            say(f"   … {len(rows):,} shown in both …", "dim")
            continue
        for row in rows:
            columns.row(row)
    counts = f"{len(found.removed):,} removed, {len(found.added):,} added"
    say(f"{counts} · {found.old.tokens:,} → {found.new.tokens:,} tokens", "bold")


def _compared(side: ComparedView) -> str:
    when = "now" if side.at is None else f"right after #{side.at}"
    sizes = f"{plural(side.messages, 'message')} · {plural(side.tokens, 'token')}"
    return f"{one_line(side.conversation)} view {when} · {sizes}"


def _change(sign: str, seen: ShownMessage) -> list[Cell]:
    text = glance(seen.message, seen.tools, is_ours=seen.edit is not None)
    style = CHANGE_STYLES.get(sign, "")
    return [(cell, style) for cell in (sign, f"#{seen.at}", f"{seen.tokens:,}", seen.role, text)]
