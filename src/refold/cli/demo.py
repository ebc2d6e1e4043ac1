"""The command demo: an agent that needs no key reads a folder in a small window, and the panel shows it."""

import os
import shutil
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from refold.cli.demo_table import Table, watching
from refold.cli.options import Json
from refold.cli.serve import serving
from refold.cli.terminal import Column, Columns, emit, say
from refold.cli.words import one_line, plural, saved_percent
from refold.core.errors import SettingError
from refold.stores.store import Store, open_store
from refold.stores.url import shown_url

if TYPE_CHECKING:
    from refold.agent.demo.run import DemoResult

OWNER = "default"
COMMAND = "  {:<24} {}"


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What it reads; else this one.", show_default=False)
    ] = Path(),
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=10, max=5_000, help="How long it reads.")
    ] = 200,
    window: Annotated[
        int, typer.Option("--window", metavar="N", min=4_000, max=1_000_000, help="Of the model, in tokens.")
    ] = 8_000,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="Where it is recorded; else in a temporary file."),
    ] = None,
    panel: Annotated[
        bool | None,
        typer.Option(
            "--panel/--no-panel",
            help="Open the panel in the end; unless said, in a terminal only.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Watch an agent read a folder in a window far too small for it.

    It needs no key and no network: the model is a script that acts on what it is shown. Its tools are real;
    the folder is only read, without what is hidden in it or holds keys. In the end it is asked for something
    that it read early and sees no more. What was said stays in the store, for you to look at.
    """
    from refold.agent.demo.model import DemoModel
    from refold.agent.demo.run import choose_folder, run_demo

    with _recorded(store) as (url, opened):
        model, (reading, why) = DemoModel(steps, window), choose_folder(folder, window)
        note = f"{why}: refold's own source is read instead" if why else ""
        files = f"{reading.root.resolve()}, {plural(len(reading.files), 'file')}"
        title = f"A scripted model reads {files}, in a window of {window:,} tokens"
        titles = [one_line(text) for text in (note, title) if text]
        with watching(Table(window, titles, is_aside=json)) as tell:
            outcome = run_demo(reading, model, opened, _free(opened), tell)
    if json:
        emit({"store": shown_url(url), "note": note, **msgspec.to_builtins(outcome)})
        return
    _sum_up(outcome)
    if url.startswith("memory:"):
        say("\nIt was kept in memory, and is gone now.")
        return
    _point(outcome, shown_url(url), is_kept=store is not None)
    if panel or (panel is None and sys.stdout.isatty()):
        _show(url, outcome.conversation, model.config)
    else:
        say(COMMAND.format("refold serve", "the panel"))


@contextmanager
def _recorded(given: str | None) -> Iterator[tuple[str, Store]]:
    """The store: the one that is named, or a file that only this user can read, as files are copied to it."""
    folder = None if given else Path(mkdtemp(prefix="refold-demo-"))
    url = given or f"sqlite:///{(folder or Path()).as_posix()}/demo.db"
    try:
        with closing(open_store(url)) as opened:
            yield url, opened
    except BaseException:  # half a demo is of no use
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _free(store: Store) -> str:
    """A name for the conversation that nothing has yet."""
    taken = {row.key.conversation for row in store.conversations(OWNER)}
    names = ("demo", *(f"demo-{n}" for n in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _sum_up(outcome: "DemoResult") -> None:
    """What came of it, in a few lines."""
    less, died, asked = (
        saved_percent(outcome.sent_without, outcome.sent),
        outcome.ended_without,
        outcome.question,
    )
    ended = (
        f"refused at step {died}, for good"
        if died
        else "no step refused: try more --steps or a smaller --window"
    )
    endless = f"in a window without end {outcome.sent_without:,} tokens sent, not {outcome.sent:,}"
    prices = f"at the prices of {outcome.prices}, its cache counted in"
    money = f"{_usd(outcome.cost)} instead of {_usd(outcome.cost_without)}"
    lines = {
        "said": f"{outcome.said:,} tokens in {plural(len(outcome.steps), 'step')}; all of it is kept",
        "sent": f"never more than {outcome.most_sent:,} of {outcome.window:,} tokens",
        "without": f"{ended}; {endless}",
        "saved": f"{less} % of the tokens sent; {prices}, {money}",
    }
    if asked is not None:
        where = "hidden by then" if asked.is_hidden else "still in view"
        how = f"found by {' and '.join(outcome.found_by)}" if outcome.found_by else "read in view"
        lines["asked"] = f"what the line of {asked.path} with `{asked.word}` says; #{asked.at}, {where}"
        lines["answer"] = f"{outcome.answer} ({'exact' if outcome.is_right else 'wrong'}; {how})"
    say("")
    columns = Columns(Column("", max(map(len, lines))))
    for name, text in lines.items():
        columns.line((name, "bold"), (one_line(text), ""), wrap=True)


def _usd(money: float) -> str:
    return f"${money:.2f}" if money >= 1 else f"${money:.4f}"


def _point(outcome: "DemoResult", url: str, *, is_kept: bool) -> None:
    """Where it is, and how to look at it."""
    name, at = outcome.conversation, outcome.question.at if outcome.question else 0
    say("\nTo look at it" + (":" if is_kept else "; it stays until you delete the file:"))
    say(f"  {'set' if os.name == 'nt' else 'export'} REFOLD_STORE={url}")
    say(COMMAND.format(f"refold show {name}", "what the model sees"))
    say(COMMAND.format(f"refold explain {name} {at}", f"why #{at} is shown or not"))
    say(COMMAND.format(f"refold undo {name}", "takes the newest edit back"))


def _show(url: str, conversation: str, settings: dict[str, Any]) -> None:
    """Serves the panel until Ctrl-C, and opens it where there is a browser."""
    try:
        run = serving()
    except SettingError:
        say(COMMAND.format("refold serve", 'the panel, after pip install "refold[serve]"'))
        return

    def tell(address: str) -> None:
        page = f"{address}/panel#/c/{quote(conversation, safe='')}"
        say(f"\nThe panel: {page}\nCtrl-C ends it.")
        if _has_browser():
            Thread(target=webbrowser.open, args=(page,), daemon=True).start()  # some end when they are closed

    run(url, config=[settings, {"serve": {"port": 0}}], log_level="error", tell=tell)


def _has_browser() -> bool:
    """One with a window, or one that was named; none that would take over the terminal unasked."""
    is_named = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return is_named or sys.platform in ("win32", "darwin")
