"""Tables for a terminal and in Markdown."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 170
"""Characters of a line where stdout is not a terminal."""


class BenchTable(NamedTuple):
    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    ends: Sequence[int] = ()
    """Rows after which there is a line."""
    texts: int = 1
    """Columns from the left that are no numbers."""


def show(tables: Sequence[BenchTable], *, markdown: bool = False) -> None:
    """Print the tables one after the other."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        if markdown:
            print(_in_markdown(table))
            continue
        printed = Table(title=table.caption, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for n, title in enumerate(table.titles):
            printed.add_column(title, justify="left" if n < table.texts else "right")
        for n, row in enumerate(table.rows):
            printed.add_row(*row, end_section=n in table.ends)
        console.print(printed)


def _in_markdown(table: BenchTable) -> str:
    marks = ["---"] * table.texts + ["---:"] * (len(table.titles) - table.texts)
    lines = [f"| {' | '.join(row)} |" for row in (table.titles, marks, *table.rows)]
    return "\n".join((f"{table.caption}:", "", *lines, ""))
