"""The steps of a demo as they happen: a table that moves for people, a line each for pipes."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from refold.cli.words import clip, one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from refold.agent.demo.run import DemoStep

ROWS, AROUND = 16, 9
"""Rows at most, and lines of the screen that are left for all else."""
CELLS = 10
"""Of the bar in each row."""
HEADS = ("step", "call", "said", "sent", "window", "edits")
FRAMES_S = 12


class Table:
    """What was told so far, as far as there is room for it."""

    def __init__(self, window: int, titles: Sequence[str], *, is_aside: bool = False) -> None:
        self.window, self.titles, self.is_aside = window, titles, is_aside
        self.steps: deque[DemoStep] = deque(maxlen=ROWS)

    @property
    def stream(self) -> Any:
        """Where JSON is wanted on stdout, people look at stderr."""
        return sys.stderr if self.is_aside else sys.stdout

    def cells(self, step: "DemoStep", full: str = "█", empty: str = "░") -> tuple[str, ...]:
        filled = min(CELLS, round(CELLS * step.sent / self.window))
        saved = ", ".join(f"{one.rung} -{one.tokens_saved:,}" for one in step.edits)
        call = one_line(f"{step.tool} {step.argument}".strip())
        bar = full * filled + empty * (CELLS - filled)
        return f"{step.step}", call, f"{step.said:,}", f"{step.sent:,}", bar, saved

    def line(self, step: "DemoStep") -> str:
        """For pipes."""
        number, call, said, sent, bar, edits = self.cells(step, "#", ".")
        return f"{number:>4}  {clip(call, 44):<44}  {said:>9}  {sent:>7}  {bar}  {edits}".rstrip()

    def frame(self, console: "Console") -> "RenderableType":
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
        for head in HEADS:
            is_number = head in ("step", "said", "sent")
            wide = 1 if head in ("call", "edits") else None
            style = {"sent": "bold", "window": "green", "edits": "yellow"}.get(head, "")
            justify: Any = "right" if is_number else "left"
            grid.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", ratio=wide, style=style)
        marks = ("█", "░") if (console.encoding or "").startswith("utf") else ("#", ".")
        for step in [*self.steps][-max(3, console.height - AROUND) :]:
            cells = [Text(cell) for cell in self.cells(step, *marks)]
            if step.said > self.window:  # without refold
                cells[HEADS.index("said")].stylize("red")
            grid.add_row(*cells)
        return Group(*(Text(title) for title in self.titles), "", grid, "", *self._bars(console, marks[0]))

    def _bars(self, console: "Console", mark: str) -> "Iterator[RenderableType]":
        """All that was said against what is sent, on one scale."""
        from rich.text import Text

        if self.steps:
            newest, width = self.steps[-1], max(10, console.width - 40)
            most = max(newest.said, self.window)
            fit = round(width * min(newest.said, self.window) / most)
            over = mark * (round(width * newest.said / most) - fit)
            more = f"{newest.said / self.window:.1f} windows"
            yield Text.assemble("said  ", (mark * fit, "green"), (over, "red"), f" {newest.said:,}, {more}")
            sent = mark * max(1, round(width * newest.sent / most))
            yield Text.assemble("sent  ", (sent, "green"), f" {newest.sent:,} of {self.window:,}")


def _print(table: Table, step: "DemoStep") -> None:
    try:
        print(table.line(step), flush=True)
    except BrokenPipeError:  # nobody reads any more: no reason to go on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(0) from None


@contextmanager
def watching(table: Table) -> Iterator[Callable[["DemoStep"], None]]:
    """Gives a function to call with each step."""
    if not table.stream.isatty():
        if table.is_aside:
            yield lambda step: None
            return
        for title in table.titles:
            print(title)
        print(f"{'step':>4}  {'call':<44}  {'said':>9}  {'sent':>7}  {'window':<10}  edits")
        yield partial(_print, table)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=table.stream, highlight=False, emoji=False, markup=False)
    with Live(
        console=console, refresh_per_second=FRAMES_S, get_renderable=lambda: table.frame(console)
    ) as live:

        def tell(step: "DemoStep") -> None:
            table.steps.append(step)

        yield tell
        live.refresh()
