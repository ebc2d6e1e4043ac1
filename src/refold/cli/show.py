"""Views, lists and differences as people see them."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from refold.cli.seen import Block, Shown, Sight
from refold.cli.terminal import Cell, Column, Columns, fitting
from refold.cli.words import full, glance, one_line, places, plural, quoted
from refold.session.results import Cause, Change, ComparedView, Diff, Explanation, MessageSummary
from refold.session.savings import EditSavings

ROLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}
EDIT = "bold blue"
MOST_NOTICES = 3
"""Things mended that are told one by one."""
MOST_CAUSES = 4
"""Edits of one message that are told, the first of all included."""
CONTEXT = 1
"""Unchanged messages shown around a change."""


def show(sight: Sight) -> None:
    """A row for each message in the view, and one for each edit with what it hides."""
    rows = [row for block in sight.blocks for row in _rows(block)]
    table = Columns(*fitting(("place", ">turn", ">tokens", "role", "", ""), rows))
    table.head()
    for row in rows:
        table.line(*row)
    _foot(table, sight)


def show_full(sight: Sight) -> None:
    """The whole text of each message in the view, under a line that says which it is."""
    table = Columns(Column("", 0))
    for block in sight.blocks:
        if block.edit is not None and not block.is_in_place:
            tokens = f"{block.said_tokens:,} → {block.tokens:,} tokens"
            table.line((f"{places(block.span)} · {tokens} · {_sentence(block)}", EDIT), wrap=True)
            table.line(("", ""))
        for one in block.shown:
            line = one.line
            tokens = f"{_tokens(one)} token{'s'[: line.tokens != 1]}"
            about = [f"#{one.place}", line.role, f"turn {line.turn}", tokens, _mark(one)]
            table.line((" · ".join(filter(None, about)), f"bold {ROLES[line.role]}"))
            table.console.print(full(one.message, line.tools), style="")
            table.line(("", ""))
    _foot(table, sight, gap=False)


def _foot(table: Columns, sight: Sight, *, gap: bool = True) -> None:
    if gap:
        table.line(("", ""))
    for notice in sight.notices[:MOST_NOTICES]:
        table.line((f"mended when sent: {one_line(notice)}", "yellow"))
    if len(sight.notices) > MOST_NOTICES:
        table.line((f"mended when sent: {len(sight.notices) - MOST_NOTICES} more", "yellow"))
    when = f" right after #{sight.at}" if sight.at is not None else ""
    name = f" {one_line(sight.view)!r}" if sight.view != "main" else ""
    saved = f"saved {sight.saved_percent} %"
    count = f"shows {plural(sight.messages, 'message')} for {sight.said.messages:,} said"
    text = (
        f"view{name}{when} {plural(sight.tokens, 'token')} · said {sight.said.tokens:,} · {saved} · {count}"
    )
    table.line((text, "bold"), wrap=True)


def _rows(block: Block) -> Iterable[list[Cell]]:
    if block.edit is None or block.is_in_place:
        yield from map(_row, block.shown)
        return
    first, last = block.before.next_turn, block.after.turn
    turns = f"{first}–{last}" if first < last else f"{last}"
    tokens = f"{block.said_tokens:,} → {block.tokens:,}"
    yield [(places(block.span), EDIT), (turns, "dim"), (tokens, EDIT), (_sentence(block), EDIT)]
    for one in block.shown:
        yield _row(one, "  ")


def _row(one: Shown, indent: str = "") -> list[Cell]:
    line = one.line
    return [
        (f"{indent}#{one.place}", "dim"),
        (f"{line.turn}", "dim"),
        (_tokens(one), EDIT if one.rung else ""),
        (line.role, ROLES[line.role]),
        (_mark(one), EDIT if one.rung else "bold red"),
        (_words(one), ""),
    ]


def _tokens(one: Shown) -> str:
    return f"{one.said_tokens:,} → {one.line.tokens:,}" if one.rung else f"{one.line.tokens:,}"


def _mark(one: Shown) -> str:
    marks = (("task", one.is_task), ("pinned", one.is_pinned), (one_line(one.rung), one.rung))
    return " ".join(mark for mark, holds in marks if holds)


def _words(one: Shown) -> str:
    is_ours = one.rung not in ("", "correct") or one.line.summary
    return glance(one.message, one.line.tools, is_ours=is_ours)


def _sentence(block: Block) -> str:
    """Which edit it is, and what it hides."""
    edit = block.edit
    assert edit is not None
    kind, why = one_line(edit.kind), f": {one_line(edit.why)}" if edit.why else ""
    if block.is_merged:
        return f"{plural(block.hidden, 'message')} hidden by several edits, the newest #{edit.at} {kind}{why}"
    if block.hidden == 0:
        verb = "restored" if edit.kind == "restore" else "shown anew"
        return f"{verb} by #{edit.at}" + (why if edit.kind == "restore" else f" {kind}{why}")
    some = "" if block.hidden == block.said_messages else f" of {block.said_messages:,}"
    what = f"{block.hidden:,}{some} message{'s'[: block.said_messages != 1]}"
    return f"{what} hidden by #{edit.at} {kind}{why}"


def explain(told: Explanation, conversation: str) -> None:
    """What became of it, why it stays, and the edits that have to do with it, the newest first."""
    page = Columns(Column("", 2), Column("", 0))
    if told.span is None:  # an edit says it all itself
        page.line((f"#{told.at} ({told.role}) {_standing(told)}", "bold"))
    for reason in told.stays:
        page.line((f"It stays: {reason}.", "green"))
    newest = told.causes if len(told.causes) <= MOST_CAUSES else told.causes[: MOST_CAUSES - 1]
    for edit in newest:
        _cause(page, edit)
    if len(newest) < len(told.causes):
        page.line((f"… {len(told.causes) - MOST_CAUSES:,} more: --json has them all; the first was", "dim"))
        _cause(page, told.causes[-1])
    if not told.causes:
        page.line(("No edit has to do with it.", ""))
    if told.shown != "whole":
        page.line((f"Read it: refold expand {quoted(conversation)} {told.at}", "dim"))


def savings(found: Sequence[EditSavings]) -> None:
    """What each batch of edits cost and saved, in order."""
    table = Columns(
        Column("edit", 8),
        Column("removed", 8, is_right=True),
        Column("written anew", 12, is_right=True),
        Column("pays after", 10, is_right=True),
        Column("calls since", 11, is_right=True),
        Column("saved", 10, is_right=True),
        Column("why", 0),
    )
    if found:
        table.head()
    for one in found:
        anew = one.worth.rewritten if one.rewritten is None else one.rewritten
        numbers = (f"{one.worth.removed:,}", f"{anew:,}", f"{one.worth.after:,.1f}", f"{one.calls:,}")
        saved = "not known" if one.saved is None else f"${one.saved:,.4f}"
        cells = [(cell, "") for cell in (*numbers, saved)]
        table.line((f"#{one.at}", EDIT), *cells, (one_line(one.why), "dim"))
    known = [one.saved for one in found if one.saved is not None]
    total = f"${sum(known):,.4f} saved so far, by the provider's own numbers."
    total = total if known else "What came of it is not known: no usage was appended, or no prices are known."
    table.line(
        (total if found else "No edit was weighed yet: that takes a model whose prices are known.", "bold")
    )


def _cause(page: Columns, edit: Cause) -> None:
    tokens = f"{edit.tokens[0]:,} → {edit.tokens[1]:,} tokens"
    about = f"#{edit.at} {one_line(edit.kind)} of {places(edit.span)}, {tokens}, {edit.state}"
    page.line((about, EDIT))
    page.line(("", ""), (one_line(edit.why) or "no reason was given", ""), wrap=True)


def _standing(told: Explanation) -> str:
    tokens = plural(told.tokens, "token")
    known = {"whole": f"is shown whole, {tokens}", "reduced": f"is reduced to {tokens}"}
    known["corrected"] = f"is corrected: something else is shown in its place, {tokens}"
    return known.get(told.shown, f"is {told.shown}")


def diff(found: Diff) -> None:
    """What one view showed and the other does not, and the other way round, in order."""
    everything = [*(change.seen for change in found.changes), *found.old.said, *found.new.said]
    width = len(f"#{max([seen.at for seen in everything], default=0)}")
    tokens = max((len(f"{seen.tokens:,}") for seen in everything), default=0)
    table = Columns(Column("", 1), Column("", width), Column("", tokens, is_right=True), Column("", 9))
    is_same = found.parted_at is None
    names = [one_line(moment.conversation) for moment in (found.old, found.new)]
    if not is_same:
        _since(table, found)
    table.line((f"--- {'' if is_same else names[0] + ' '}{_heading(found.old)}", "bold"))
    table.line((f"+++ {'' if is_same else names[1] + ' '}{_heading(found.new)}", "bold"))
    if not found:
        table.line(("The two views show the same.", "bold"))
        return
    groups = [(is_shared, list(some)) for is_shared, some in groupby(found.changes, lambda c: c.sign == " ")]
    for n, (is_shared, some) in enumerate(groups):
        if is_shared:
            _shared(table, some, starts=n == 0, ends=n == len(groups) - 1)
        else:
            _sides(table, some)
    counts = f"{len(found.removed):,} no longer shown, {len(found.added):,} newly shown"
    if not is_same:
        counts = f"{len(found.removed):,} shown only by {names[0]}, {len(found.added):,} only by {names[1]}"
    table.line((f"{counts} · {found.old.tokens:,} → {found.new.tokens:,} tokens", "bold"))


def _since(table: Columns, found: Diff) -> None:
    """Where two conversations part, and what was said in each since."""
    has_past = found.parted_at is not None and found.parted_at >= 0
    table.line((f"They part after #{found.parted_at}" if has_past else "They have no past in common", "bold"))
    for moment, sign, style in ((found.old, "-", "red"), (found.new, "+", "green")):
        name = one_line(moment.conversation)
        table.line((f"{name} said {plural(len(moment.said), 'message')} since", "bold"))
        for seen in moment.said:
            _side(table, sign, seen, style)
    table.line(("", ""))


def _shared(table: Columns, side: Sequence[Change], *, starts: bool, ends: bool) -> None:
    """The messages next to a change, and how many more there are."""
    head, tail = 0 if starts else CONTEXT, 0 if ends else CONTEXT
    left = len(side) - head - tail
    if left <= 1:
        _sides(table, side)
        return
    _sides(table, side[:head])
    table.line((f"   … {left:,} shown in both …", "dim"))
    _sides(table, side[len(side) - tail :])


def _heading(moment: ComparedView) -> str:
    when = f"right after #{moment.at}" if moment.at is not None else "now"
    return f"view {when} · {plural(moment.messages, 'message')} · {plural(moment.tokens, 'token')}"


def _sides(table: Columns, side: Sequence[Change]) -> None:
    for change in side:
        _side(table, change.sign, change.seen, {"-": "red", "+": "green"}.get(change.sign, "dim"))


def _side(table: Columns, sign: str, seen: MessageSummary, style: str) -> None:
    words = glance(seen.message, seen.tools, is_ours=seen.edit is not None)
    cells = (sign, f"#{seen.at}", f"{seen.tokens:,}", seen.role, words)
    table.line(*((cell, style) for cell in cells))
