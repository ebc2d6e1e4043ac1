"""The way out: JSON for machines, columns for people, errors and progress beside them on stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
import typer

from refold.cli.words import cell_width, clip, one_line, safe, wrapped
from refold.core.codec import dumps
from refold.core.errors import RefoldError

if TYPE_CHECKING:
    from rich.console import Console

PIPED_COLUMNS = 120
"""How wide a line is where nobody says how wide it may be."""
PATIENCE_S = 1.0
"""What takes longer shows a bar."""


def emit(value: Any) -> None:
    """The one JSON document of a command."""
    typer.echo(dumps(value))


def pretty(value: Any) -> bytes:
    """JSON that people may read too."""
    data = dumps(value)
    try:
        return msgspec.json.format(data, indent=2)
    except msgspec.DecodeError:  # a lone surrogate, written as its escape
        return data


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file to fill. It takes the place of what was there only when all went well."""
    path = path.resolve()
    is_special = path.exists() and not path.is_file()  # such as /dev/stdout: never replaced
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
    """A text as it is, for pipes; people get it with nothing in it that their terminal would obey."""
    shown = safe(text) if sys.stdout.isatty() else text
    typer.echo(shown.encode("utf-8", "backslashreplace"), nl=not text.endswith("\n"))


def complain(text: str) -> None:
    """One line on stderr, whatever is in it."""
    typer.echo(f"refold: {one_line(text)}", err=True)


def console() -> "Console":
    """Standard output for people. Nothing that is printed is taken for markup."""
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
    """Columns as wide as what is in them, up to `most`; a title that begins with > stands to the right."""
    columns = []
    for n, title in enumerate(titles):
        name = title.removeprefix(">")
        widths = [cell_width(row[n][0]) for row in rows if n < len(row) - 1]
        columns.append(Column(name, min(most, max([cell_width(name), *widths])), title != name))
    return columns


class Columns:
    """Lines of cells under each other."""

    def __init__(self, *columns: Column) -> None:
        self.console, self.columns = console(), columns
        self._width = self.console.width

    def head(self) -> None:
        self.line(*((column.title, "dim") for column in self.columns))

    def line(self, *cells: Cell, wrap: bool = False) -> None:
        """A row. Its last cell has the rest of the line: cut there, or going on below."""
        pieces, left = list[Cell](), 0
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
        if self.console.color_system is None:  # many times faster, for pipes
            sys.stdout.write("".join(text for text, _ in pieces).rstrip() + "\n")
            return
        from rich.text import Text

        text = Text.assemble(*pieces)
        text.rstrip()
        self.console.print(text)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each amount done; a bar appears for people who have to wait."""
    begun, done = time.monotonic(), 0
    bar: Any = None
    task: Any = None

    def advance(amount: int = 1) -> None:
        nonlocal bar, task, done
        done += amount
        if bar is not None:
            bar.update(task, completed=done)
        elif time.monotonic() - begun > PATIENCE_S and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            task = bar.add_task(what, total=total, completed=done)
            bar.start()

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def waiting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with how much is done, of how much; it may be called by any thread.

    A bar appears for people who wait longer, also if nothing is ever done, or at once if there are several
    steps.
    """
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    bar = _Bar(what)
    timer = Timer(PATIENCE_S, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar.tell
    finally:
        timer.cancel()
        bar.close()


class _Bar:
    def __init__(self, what: str) -> None:
        self._what, self._lock, self._is_closed = what, Lock(), False
        self._bar: Any = None
        self._task: Any = None

    def show(self) -> None:
        with self._lock:
            if self._bar is not None or self._is_closed:
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=None)
            self._bar.start()

    def tell(self, done: int, of: int) -> None:
        if of == 1:
            return
        self.show()
        with self._lock:
            if not self._is_closed:
                steps = f"{self._what}, {done:,} of {of:,}"
                self._bar.update(self._task, description=steps, completed=done, total=of)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._bar is not None:
                self._bar.stop()
