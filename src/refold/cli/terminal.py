"""Output: JSON for programs, text and tables for people; errors and progress on stderr."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, BinaryIO, TypeAlias, TypeVar

import msgspec
import typer

from refold.cli.format import cell_width, clip, one_line, safe
from refold.core.codec import dumps
from refold.core.errors import RefoldError

PIPED_COLUMNS = 120
MIN_LAST = 8
"""The least width of a table's last column."""

Value = TypeVar("Value")
Cell: TypeAlias = tuple[str, str]
"""A text and its style, such as `bold red`."""


def emit(value: Any) -> None:
    """Prints the JSON document of a command."""
    typer.echo(dumps(value))


def answer(value: Value, json: bool, show: Callable[[Value], None]) -> None:
    """Prints what a command found: as JSON, or by the function that shows it to people."""
    if json:
        emit(value)
    else:
        show(value)


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


def say(text: str, style: str = "") -> None:
    typer.echo(_styled(text, style))


def say_all(text: str) -> None:
    """Prints a text unchanged in a pipe, and without control characters on a terminal."""
    shown = safe(text) if sys.stdout.isatty() else text
    typer.echo(shown.encode("utf-8", "backslashreplace"), nl=not text.endswith("\n"))


def complain(text: str) -> None:
    """Prints one line on stderr."""
    typer.echo(f"refold: {one_line(text)}", err=True)


def _styled(text: str, style: str) -> str:
    words = style.split()
    if not text or not words or os.environ.get("NO_COLOR"):
        return text
    if words[-1] not in ("bold", "dim"):
        text = typer.style(text, fg=words[-1], reset=False)
    return typer.style(text, bold="bold" in words or None, dim="dim" in words or None)


class Columns:
    """A table that is printed row by row.

    A title that begins with > is right-aligned. The last cell of a row takes the rest of the line.
    """

    def __init__(self, titles: Sequence[str], widths: Sequence[int]) -> None:
        self._titles = titles
        self._widths = widths
        self._line_width = _line_width()

    def head(self) -> None:
        self.row([(title.removeprefix(">"), "dim") for title in self._titles])

    def row(self, cells: Sequence[Cell]) -> None:
        line = ""
        left = self._line_width
        for title, width, (cell, style) in zip(self._titles, self._widths, cells[:-1], strict=False):
            text = clip(cell, width)
            space = " " * (width - cell_width(text))
            text = _styled(text, style)
            line += f"{space}{text}  " if title.startswith(">") else f"{text}{space}  "
            left -= width + 2
        last, style = cells[-1]
        typer.echo((line + _styled(clip(last, max(MIN_LAST, left)), style)).rstrip())


def fitted(titles: Sequence[str], rows: Sequence[Sequence[Cell]], *, most: int | None = None) -> Columns:
    """Columns as wide as their content, up to `most`; by default, a part of the line."""
    most = most or max(16, min(48, _line_width() - 64))
    widths = []
    for n, title in enumerate(titles[:-1]):
        texts = [title.removeprefix(">"), *(row[n][0] for row in rows if n < len(row) - 1)]
        widths.append(min(most, max(map(cell_width, texts))))
    return Columns(titles, widths)


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], *, most: int | None = None) -> None:
    """Prints a whole table, with its titles if there are any."""
    rows = list(rows)
    columns = fitted(titles, rows, most=most)
    if any(titles):
        columns.head()
    for row in rows:
        columns.row(row)


def at_most(lines: Sequence[str], most: int) -> list[str]:
    """The first lines, and how many there are besides."""
    rest = len(lines) - most
    return [*lines[:most], f"… and {rest:,} more"] if rest > 0 else list(lines)


def _line_width() -> int:
    return get_terminal_size((PIPED_COLUMNS, 24)).columns


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr, if that is a terminal. Yields a function to call with the amount done since.

    The function also takes `completed` and `total` as absolute numbers.
    """
    if not sys.stderr.isatty():
        yield lambda amount=None, **absolute: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount=None, **absolute: bar.update(task, advance=amount, **absolute)
