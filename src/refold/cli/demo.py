"""The command demo: an agent that needs no key reads a folder in a small window, and the panel shows it."""

import os
import shutil
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from refold.cli.format import one_line, plural, saved_percent
from refold.cli.options import Json
from refold.cli.serve import serve_command
from refold.cli.terminal import Column, Columns, emit, say
from refold.core.errors import SettingError
from refold.stores.store import Store, open_store
from refold.stores.url import shown_url

if TYPE_CHECKING:
    from refold.agent.demo.run import DemoResult, DemoStep

OWNER = "default"
COMMAND = "  {:<24} {}"
BAR_CELLS = 10


def demo(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The folder to read; default: the current one.", show_default=False
        ),
    ] = Path(),
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=10, max=5_000, help="The number of steps.")
    ] = 200,
    window: Annotated[
        int,
        typer.Option("--window", metavar="N", min=4_000, max=1_000_000, help="The model's window in tokens."),
    ] = 8_000,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="Where to record it; default: a temporary file."),
    ] = None,
    panel: Annotated[
        bool | None,
        typer.Option(
            "--panel/--no-panel",
            help="Open the panel at the end; default: only in a terminal.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Watch an agent read a folder in a window far too small for it.

    It needs no key and no network: the model is a script that acts on what it sees. Its tools are real; the
    folder is only read, without hidden files and files with keys. In the end the agent is asked for something
    that it read early and no longer sees. The conversation stays in the store for you to inspect.
    """
    from refold.agent.demo.model import DemoModel
    from refold.agent.demo.run import choose_folder, run_demo

    with _recorded(store) as (url, opened):
        model = DemoModel(steps, window)
        reading, problem = choose_folder(folder, window)
        note = f"{problem}: refold's own source is read instead" if problem else ""
        files = f"{reading.root.resolve()}, {plural(len(reading.sizes), 'file')}"
        title = f"A scripted model reads {files}, in a window of {window:,} tokens"
        on_step = ignore_step if json else step_printer(window, [text for text in (note, title) if text])
        outcome = run_demo(reading, model, opened, _unused_id(opened), on_step)
    if json:
        emit({"store": shown_url(url), "note": note, **msgspec.to_builtins(outcome)})
        return
    _sum_up(outcome)
    if url.startswith("memory:"):
        say("\nThe conversation was kept in memory only.")
        return
    _say_commands(outcome, shown_url(url), is_kept=store is not None)
    if panel or (panel is None and sys.stdout.isatty()):
        _serve_panel(url, outcome.conversation, model.config)
    else:
        say(COMMAND.format("refold serve", "the panel"))


@contextmanager
def _recorded(given: str | None) -> Iterator[tuple[str, Store]]:
    """The given store, or a new file that only this user can read, since it contains copies of files."""
    folder = None if given else Path(mkdtemp(prefix="refold-demo-"))
    url = given or f"sqlite:///{(folder or Path()).as_posix()}/demo.db"
    try:
        with closing(open_store(url)) as opened:
            yield url, opened
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _unused_id(store: Store) -> str:
    taken = {row.key.conversation for row in store.conversations(OWNER)}
    names = ("demo", *(f"demo-{n}" for n in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _sum_up(outcome: "DemoResult") -> None:
    ended = "no step refused: try more --steps or a smaller --window"
    if outcome.ended_without:
        ended = f"refused at step {outcome.ended_without}, for good"
    unlimited = f"with an unlimited window {outcome.sent_without:,} tokens sent instead of {outcome.sent:,}"
    saved = saved_percent(outcome.sent_without, outcome.sent)
    prices = f"at the prices of {outcome.prices}, including its cache"
    money = f"{_usd(outcome.cost)} instead of {_usd(outcome.cost_without)}"
    lines = {
        "recorded": f"{outcome.recorded:,} tokens in {plural(len(outcome.steps), 'step')}, none lost",
        "sent": f"never more than {outcome.most_sent:,} of {outcome.window:,} tokens",
        "without": f"{ended}; {unlimited}",
        "saved": f"{saved} % of the tokens sent; {prices}, {money}",
    }
    question = outcome.question
    if question is not None:
        where = "hidden by then" if question.is_hidden else "still in view"
        found = f"found by {' and '.join(outcome.found_by)}" if outcome.found_by else "read in view"
        correct = "exact" if outcome.is_right else "wrong"
        lines["asked"] = f"for the line of {question.path} with `{question.word}`; #{question.at}, {where}"
        lines["answer"] = f"{outcome.answer} ({correct}; {found})"
    say("")
    columns = Columns(Column("", max(map(len, lines))))
    for name, text in lines.items():
        columns.line((name, "bold"), (one_line(text), ""), wrap=True)


def _usd(money: float) -> str:
    return f"${money:.2f}" if money >= 1 else f"${money:.4f}"


def _say_commands(outcome: "DemoResult", url: str, *, is_kept: bool) -> None:
    """Commands to inspect it with."""
    name = outcome.conversation
    at = outcome.question.at if outcome.question else 0
    say("\nTo inspect it" + (":" if is_kept else " (it stays until you delete the file):"))
    say(f"  {'set' if os.name == 'nt' else 'export'} REFOLD_STORE={url}")
    say(COMMAND.format(f"refold show {name}", "what the model sees"))
    say(COMMAND.format(f"refold explain {name} {at}", f"why #{at} is shown or not"))
    say(COMMAND.format(f"refold undo {name}", "undoes the newest edit"))


def _serve_panel(url: str, conversation: str, settings: dict[str, Any]) -> None:
    """Serves the panel until Ctrl-C, and opens it if there is a browser."""
    try:
        run = serve_command()
    except SettingError:
        say(COMMAND.format("refold serve", 'the panel, after pip install "refold[serve]"'))
        return

    def tell(address: str) -> None:
        page = f"{address}/panel#/c/{quote(conversation, safe='')}"
        say(f"\nThe panel: {page}\nCtrl-C ends it.")
        if _has_browser():
            # In a thread, as some browsers block until they are closed.
            Thread(target=webbrowser.open, args=(page,), daemon=True).start()

    run(url, config=[settings, {"serve": {"port": 0}}], log_level="error", tell=tell)


def _has_browser() -> bool:
    """True for a graphical or configured browser; a text browser would take over the terminal."""
    is_named = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return is_named or sys.platform in ("win32", "darwin")


def ignore_step(step: "DemoStep") -> None:
    """With --json, stdout has the JSON only."""


def step_printer(window: int, titles: Sequence[str]) -> Callable[["DemoStep"], None]:
    """Prints the titles; returns a function that prints a step."""
    table = Columns(
        Column("step", 4, is_right=True),
        Column("call", 40),
        Column("recorded", 9, is_right=True),
        Column("sent", 7, is_right=True),
        Column("window", BAR_CELLS),
        Column("edits", 0),
    )
    for title in titles:
        say(one_line(title))
    table.head()

    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    full, empty = "█░" if is_unicode else "#."

    def show(step: "DemoStep") -> None:
        filled = min(BAR_CELLS, round(BAR_CELLS * step.sent / window))
        try:
            table.line(
                (f"{step.step}", ""),
                (one_line(f"{step.tool} {step.argument}".strip()), ""),
                (f"{step.recorded:,}", "red" if step.recorded > window else ""),
                (f"{step.sent:,}", "bold"),
                (full * filled + empty * (BAR_CELLS - filled), "green"),
                (", ".join(f"{one.stage} -{one.tokens_saved:,}" for one in step.edits), "yellow"),
            )
            sys.stdout.flush()
        except BrokenPipeError:  # the reader is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(0) from None

    return show
