"""Output: JSON for programs, tables for people; errors and progress on stderr."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
import typer

from refold.cli.format import cell_width, clip, one_line, safe, wrapped
from refold.core.codec import dumps
from refold.core.errors import RefoldError

if TYPE_CHECKING:
    from rich.console import Console

PIPED_COLUMNS = 120
"""The width of lines in a pipe."""


def emit(value: Any) -> None:
    """Prints the JSON document of a command."""
    typer.echo(dumps(value))


def pretty(value: Any) -> bytes:
    """Indented JSON."""
    data = dumps(value)
    try:
        return msgspec.json.format(data, indent=2)
    except msgspec.DecodeError:  # a lone surrogate, written as its escape
        return data


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing, and replaces the old one only if no error occurs."""
    path = path.resolve()
    is_special = path.exists() and not path.is_file()  # /dev/stdout must not be replaced
    part = path if is_special else path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        if not is_special:
            part.replace(path)
    except OSError as error:
        raise RefoldError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


def say(text: str) -> None:
    typer.echo(text)


def say_all(text: str) -> None:
    """Prints a text unchanged in a pipe, and without control characters on a terminal."""
    shown = safe(text) if sys.stdout.isatty() else text
    typer.echo(shown.encode("utf-8", "backslashreplace"), nl=not text.endswith("\n"))


def complain(text: str) -> None:
    """Prints one line on stderr."""
    typer.echo(f"refold: {one_line(text)}", err=True)


def console() -> "Console":
    """Standard output, without markup."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    plain = {"markup": False, "emoji": False, "highlight": False}
    return Console(width=None if known else PIPED_COLUMNS, soft_wrap=True, **plain)  # type: ignore[arg-type]


class Column(NamedTuple):
    title: str
    width: int
    is_right: bool = False


Cell = tuple[str, str]
"""A text and its style."""


def fitting(titles: Sequence[str], rows: Sequence[Sequence[Cell]], *, most: int = 24) -> list[Column]:
    """Columns as wide as their content, up to `most`; a title that begins with > is right-aligned."""
    columns = []
    for n, title in enumerate(titles):
        name = title.removeprefix(">")
        widths = [cell_width(row[n][0]) for row in rows if n < len(row) - 1]
        columns.append(Column(name, min(most, max([cell_width(name), *widths])), title != name))
    return columns


class Columns:
    """A table that is printed line by line."""

    def __init__(self, *columns: Column) -> None:
        self.console = console()
        self.columns = columns
        self._width = self.console.width

    def head(self) -> None:
        self.line(*((column.title, "dim") for column in self.columns))

    def line(self, *cells: Cell, wrap: bool = False) -> None:
        """Prints a row. The last cell takes the rest of the line: it is cut, or wrapped."""
        pieces = list[Cell]()
        left = 0
        for column, (cell, style) in zip(self.columns, cells[:-1], strict=False):
            cell = clip(cell, column.width)
            space = " " * (column.width - cell_width(cell))
            pieces.append((f"{space}{cell}  " if column.is_right else f"{cell}{space}  ", style))
            left += column.width + 2
        last, style = cells[-1]
        room = max(8, self._width - left)
        first, *more = wrapped(last, room) if wrap else [clip(last, room)]
        self._print([*pieces, (first, style)])
        for line in more:
            self._print([(" " * left + line, style)])

    def _print(self, pieces: Sequence[Cell]) -> None:
        if self.console.color_system is None:  # much faster for pipes
            sys.stdout.write("".join(text for text, _ in pieces).rstrip() + "\n")
            return
        from rich.text import Text

        text = Text.assemble(*pieces)
        text.rstrip()
        self.console.print(text)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr, if that is a terminal. Yields a function to call as work is done.

    The function takes the amount done since its last call, or `done` and `total` as absolute numbers.
    """
    if not sys.stderr.isatty():
        yield lambda amount=0, *, done=0, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(amount: int | None = None, *, done: int | None = None, total: int | None = None) -> None:
            text = what if total is None else f"{what}, {done:,} of {total:,}"
            bar.update(task, description=text, advance=amount, completed=done, total=total)

        yield advance
