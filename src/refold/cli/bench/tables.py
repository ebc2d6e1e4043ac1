"""Tables, for people and for documents."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from refold.core.errors import StoreError

WIDE = 170
"""Characters of a line where nobody's terminal says how many there are."""


class Sheet(NamedTuple):
    """A table and what it is about."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    ends: Sequence[int] = ()
    """Rows after which something else begins."""
    texts: int = 1
    """Columns from the left that are no numbers."""


def show(sheets: Sequence[Sheet], *, markdown: bool = False) -> None:
    """Prints them one after the other."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for sheet in sheets:
        if markdown:
            print(in_markdown(sheet))
            continue
        table = Table(title=sheet.caption, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for n, title in enumerate(sheet.titles):
            table.add_column(title, justify="left" if n < sheet.texts else "right")
        for n, row in enumerate(sheet.rows):
            table.add_row(*row, end_section=n in sheet.ends)
        console.print(table)


def in_markdown(sheet: Sheet) -> str:
    marks = ["---"] * sheet.texts + ["---:"] * (len(sheet.titles) - sheet.texts)
    lines = [f"| {' | '.join(row)} |" for row in (sheet.titles, marks, *sheet.rows)]
    return "\n".join((f"{sheet.caption}:", "", *lines, ""))


def write(file: Path, data: bytes) -> None:
    """Puts it into a file, or on stdout for `-`.

    Raises:
        StoreError: that is not possible there.
    """
    if str(file) == "-":
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.flush()
        return
    try:
        file.write_bytes(data)
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror or error}") from error
