"""The command line: what `refold` and `python -m refold` do."""

import sys
import warnings
from collections.abc import Callable
from errno import EPIPE
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from refold.cli import (
    change,
    checkup,
    compact,
    config,
    copy,
    demo,
    files,
    jobs,
    learn,
    look,
    mcp,
    move,
    search,
    serve,
    sync,
    worker,
)
from refold.cli.bench import commands as bench
from refold.cli.terminal import complain
from refold.core.errors import RefoldError, SettingError

EXAMPLES = """\b
Examples:
  refold demo                        an agent reads this folder in a small window: no key, no network
  refold import chat.json            store a list of messages, of OpenAI, Anthropic or the AI SDK
  refold list                        what there is
  refold show chat                   what the model sees, and what is hidden
  refold show chat --at 120          what it saw right after event 120
  refold explain chat 57             why #57 is shown, shorter or not at all
  refold savings chat                what edits saved, by the provider's own numbers
  refold expand chat 57              all of it
  refold search 'ERR-4711 tool:psql' where something was said, in any conversation
  refold compact chat --keep 10      summarize all but the newest ten messages
  refold undo chat                   take back the newest edit
  refold correct chat 57 "4711"      show another text in the place of #57
  refold fit chat.json --model gpt-5 -o small.json
  refold check request.json          would the provider take it?
  refold count request.json --model gpt-5
  refold config                      every setting, and where it came from
  refold copy sqlite:///refold.db postgresql://db/agents
  refold learn                       how long each tool's results were needed, as settings
  refold doctor                      is all as it was written?
  refold sync                        tell a memory store what it was not told yet
  refold worker                      write summaries for sessions on other machines
  refold jobs                        what is handed to workers, and what came of it
  refold serve                       a gateway for any agent, an API and a panel
  refold token --owner ann           a token for those who come from other machines
  refold mcp                         what was said, as tools for any MCP client
  refold bench retention             what is saved and what is lost, on a set or on your own conversations

\b
Exit codes: 0 done, 1 the answer is no (not found, invalid, damaged), 2 wrong use.
"""


class _Group(TyperGroup):
    """Tells our errors and warnings in one line each, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: complain(str(message))
                return super().invoke(ctx)
        except RefoldError as error:
            complain(str(error))
            raise typer.Exit(2 if isinstance(error, SettingError) else 1) from error
        except OSError as error:
            if error.errno == EPIPE:  # the reader has enough: no fault
                raise
            complain(str(error))
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,  # plain help is there at once: rich takes longer to load than all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from refold import __version__

        typer.echo(f"refold {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def refold(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Which refold this is.")
    ] = False,
) -> None:
    """Everything an agent said, and the view of it that the model sees."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "import": move.import_,
    "export": move.export,
    "copy": copy.copy,
    "list": look.list_,
    "show": look.show,
    "explain": look.explain,
    "savings": look.savings,
    "expand": look.expand,
    "search": search.search,
    "log": look.log,
    "diff": look.diff,
    "compact": compact.compact,
    "undo": change.undo,
    "restore": change.restore,
    "correct": change.correct,
    "pin": change.pin,
    "unpin": change.unpin,
    "fork": change.fork,
    "delete": change.delete,
    "fit": files.fit,
    "check": files.check,
    "count": files.count,
    "config": config.config,
    "learn": learn.learn,
    "doctor": checkup.doctor,
    "sync": sync.sync,
    "worker": worker.worker,
    "jobs": jobs.jobs,
    "serve": serve.serve,
    "token": serve.token,
    "mcp": mcp.mcp,
}
GROUPS: dict[str, typer.Typer] = {"bench": bench.app}
"""Commands that have commands."""
NEGATIVE = {"expand": {"ignore_unknown_options": True}}
"""Commands whose arguments may be negative numbers, which look like options."""
for _name, _command in COMMANDS.items():
    app.command(_name, context_settings=NEGATIVE.get(_name))(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def main() -> None:
    """Runs one command and leaves with its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character gets its escape
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="refold")
