"""The commands that measure: bench retention, cost, speed. Each is loaded when it is used."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

BENCHES = ("retention", "cost", "speed")
"""Each is the function `main` of the module of that name in `refold.cli.bench`."""


class _Command(TyperCommand):
    """`--json` without a file is for stdout, as it is of other commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after = args[args.index("--json") + 1 :] if "--json" in args else ["-"]
        if not after or (after[0].startswith("-") and after[0] != "-"):
            args = [*args[: len(args) - len(after)], "-", *after]
        return super().parse_args(ctx, args)


class _Benches(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in BENCHES if find_spec(f"refold.cli.bench.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        one = typer.Typer(rich_markup_mode=None, add_completion=False)
        one.command(cmd_name, cls=_Command)(import_module(f"refold.cli.bench.{cmd_name}").main)
        return typer.main.get_command(one)


app = typer.Typer(cls=_Benches, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure what is saved and lost, what it costs, and how fast it is.

    Without DATA, on a set that anybody can make again; else on recorded conversations, or on your own.
    """
