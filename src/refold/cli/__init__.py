"""The command line: `refold` and `python -m refold`, one module per group of commands, and `bench/`.

Begin with `options.py`: what commands share, and how they open a store or a conversation. `terminal.py`,
`tables.py` and `format.py` print. This module puts the commands together and turns errors into exit codes.
"""

import sys
import warnings
from collections.abc import Callable
from errno import EPIPE
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from refold.cli import (
    compact,
    config,
    demo,
    doctor,
    edit,
    files,
    inspect,
    learn,
    log,
    serve,
    sync,
    transfer,
    worker,
)
from refold.cli.bench import commands as bench
from refold.cli.terminal import complain
from refold.core.errors import RefoldError, SettingError

EXAMPLES = """\b
Examples:
  refold demo                        an agent reads this folder in a small window: no key, no network
  refold import chat.json            import a list of messages of OpenAI, Anthropic or the AI SDK
  refold show chat                   what the model sees, and what is hidden
  refold explain chat 57             why #57 is shown, shortened or hidden
  refold expand chat 57              the full text of #57
  refold search 'ERR-4711 tool:psql' search all conversations
  refold compact chat --keep 10      summarize all but the newest ten messages
  refold undo chat                   undo the newest edit
  refold fit chat.json --model gpt-5 -o small.json
  refold serve                       a gateway for any agent, an API and a panel

\b
Exit codes: 0 success, 1 the answer is no (not found, invalid, damaged), 2 wrong usage.
"""


class _Group(TyperGroup):
    """Prints refold's errors and warnings in one line each, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: complain(str(message))
                return super().invoke(ctx)
        except RefoldError as error:
            complain(str(error))
            raise typer.Exit(2 if isinstance(error, SettingError) else 1) from error
        except OSError as error:
            if error.errno == EPIPE:  # the reader of a pipe has exited: not an error
                raise
            complain(str(error))
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,  # rich takes longer to load than everything else
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(is_given: bool) -> None:
    if is_given:
        from refold import __version__

        typer.echo(f"refold {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def refold(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Record everything an agent says, and show the model a view that fits."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "import": transfer.import_,
    "export": transfer.export,
    "copy": transfer.copy,
    "list": inspect.list_,
    "show": inspect.show,
    "explain": inspect.explain,
    "savings": inspect.savings,
    "expand": inspect.expand,
    "search": inspect.search,
    "log": log.log,
    "diff": inspect.diff,
    "compact": compact.compact,
    "undo": edit.undo,
    "restore": edit.restore,
    "correct": edit.correct,
    "pin": edit.pin,
    "unpin": edit.unpin,
    "fork": edit.fork,
    "delete": edit.delete,
    "fit": files.fit,
    "check": files.check,
    "count": files.count,
    "config": config.config,
    "learn": learn.learn,
    "doctor": doctor.doctor,
    "sync": sync.sync,
    "worker": worker.worker,
    "jobs": worker.jobs,
    "serve": serve.serve,
    "token": serve.token,
    "mcp": serve.mcp,
}
for _name, _command in COMMANDS.items():
    # A negative number, as in `refold expand chat -1`, looks like an option.
    _settings = {"ignore_unknown_options": True} if _name == "expand" else None
    app.command(_name, context_settings=_settings)(_command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs one command and exits with its code."""
    for stream in (sys.stdout, sys.stderr):  # print an escape for what the terminal cannot
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="refold")
