"""Tables of numbers, for a terminal and in Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from refold.cli import terminal
from refold.cli.terminal import say


class BenchTable(NamedTuple):
    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    """Columns from the left that are no numbers."""


def show(tables: Sequence[BenchTable], *, markdown: bool = False) -> None:
    """Prints the tables one after the other."""
    for one in tables:
        if markdown:
            marks = ["---"] * one.texts + ["---:"] * (len(one.titles) - one.texts)
            lines = [f"| {' | '.join(row)} |" for row in (one.titles, marks, *one.rows)]
            say("\n".join((f"{one.caption}:", "", *lines, "")))
            continue
        say(one.caption, "bold")
        titles = [*one.titles[: one.texts], *(f">{title}" for title in one.titles[one.texts :])]
        rows = [[(cell, "") for cell in row] for row in one.rows]
        terminal.table([*titles, ""], [[*row, ("", "")] for row in rows], most=200)  # nothing is cut
        say("")
