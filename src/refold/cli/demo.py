"""The command demo: an agent that needs no key reads a folder in a small window, and the panel shows it."""

import os
import shutil
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
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
from refold.stores.store import Store, open_store, shown_url

if TYPE_CHECKING:
    from refold.demo.run import Outcome

OWNER = "default"


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="What it reads; else this one.", show_default=False)
    ] = Path(),
    steps: Annotated[int, typer.Option("--steps", min=10, max=5_000, help="How long it reads.")] = 200,
    window: Annotated[
        int, typer.Option("--window", min=4_000, max=1_000_000, help="Of the model, in tokens.")
    ] = 8_000,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="Where it is recorded; else in a temporary file."),
    ] = None,
    panel: Annotated[
        bool | None,
        typer.Option(
            "--panel/--no-panel", help="Open the panel then; else in a terminal.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Watch an agent read a folder in a window that is far too small for it.

    It needs no key and no network: the model is a script that acts on what it is shown. Its tools are real;
    the folder is only read, without what is hidden in it or holds keys. In the end it is asked for something
    that it read early and sees no more. What was said stays in the store, for you to look at.
    """
    from refold.demo.model import Model
    from refold.demo.run import chosen, run

    with _recorded(store) as (url, opened):
        reading, why = chosen(folder, window)
        note = f"{why}: refold's own source is read instead" if why else ""
        files = f"{reading.root.resolve()}, {plural(len(reading.files), 'file')}"
        title = f"A scripted model reads {files}, in a window of {window:,} tokens"
        with watching(Table(window, [*([note] if note else []), title], is_aside=json)) as tell:
            outcome = run(reading, opened, _free(opened), steps=steps, window=window, tell=tell)
        opened.close()
        if json:
            emit({"store": shown_url(url), "note": note, **msgspec.to_builtins(outcome)})
            return
        _conclude(outcome, shown_url(url), is_kept=store is not None)
        if panel or (panel is None and sys.stdout.isatty()):
            _show(url, outcome.conversation, Model(steps, window, 1).config)
        else:
            say(f"  panel    refold serve --store {shown_url(url)}")


@contextmanager
def _recorded(given: str | None) -> Iterator[tuple[str, Store]]:
    """The store: the one that is named, or a file that only this user can read, as files are copied to it."""
    folder = None if given else Path(mkdtemp(prefix="refold-demo-"))
    url = given or f"sqlite:///{(folder or Path()).as_posix()}/demo.db"
    try:
        yield url, open_store(url)
    except BaseException:  # half a demo is of no use
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _free(store: Store) -> str:
    """A name for the conversation that nothing has yet."""
    taken = {row.key.conversation for row in store.conversations(OWNER)}
    names = ("demo", *(f"demo-{n}" for n in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _conclude(outcome: "Outcome", url: str, *, is_kept: bool) -> None:
    less, died = saved_percent(outcome.sent_without, outcome.sent), outcome.ended_without
    ended = f"refused at step {died}, for good" if died else "no step refused: try a smaller --window"
    lines = [
        ("said", f"{outcome.said:,} tokens in {plural(len(outcome.steps), 'step')}; all of it is kept"),
        ("sent", f"never more than {outcome.most_sent:,} of {outcome.window:,} tokens"),
        (
            "without",
            f"{ended}; in a window without end {outcome.sent_without:,} tokens sent, not {outcome.sent:,}",
        ),
        (
            "saved",
            f"{less} % of the tokens sent; at the prices of {outcome.prices}, its cache counted in,"
            f" ${outcome.cost:.2f} instead of ${outcome.cost_without:.2f}",
        ),
    ]
    if asked := outcome.question:
        where = "hidden by then" if asked.is_hidden else "still in view"
        how = f"found by {', '.join(outcome.found_by)}" if outcome.found_by else "read there"
        lines += [
            (
                "asked",
                f"what the line of {asked.path} with `{asked.word}` says, read at #{asked.at}, {where}",
            ),
            ("answer", f"{one_line(outcome.answer)} ({'exact' if outcome.is_right else 'wrong'}; {how})"),
        ]
    say("")
    columns = Columns(Column("", max(len(name) for name, _ in lines)))
    for name, text in lines:
        columns.line((name, "bold"), (one_line(text), ""), wrap=True)
    at = asked.at if asked else 2
    say(f"\nIt is kept in {url}" + ("" if is_kept else ", until you delete that") + ". Look at it:")
    say(f"  view     refold show {outcome.conversation} --store {url}")
    say(f"  why      refold explain {outcome.conversation} {at} --store {url}")
    say(f"  undo     refold undo {outcome.conversation} --store {url}")


def _show(url: str, conversation: str, models: dict[str, Any]) -> None:
    """Serves the panel until Ctrl-C, and opens it where there is a browser."""
    try:
        run = serving()
    except SettingError:
        say(f'  panel    pip install "refold[serve]", then refold serve --store {shown_url(url)}')
        return

    def tell(address: str) -> None:
        page = f"{address}/panel#/c/{quote(conversation, safe='')}"
        opened = "" if _browse(page) else ", for your browser"
        say(f"  panel    {page}{opened}; Ctrl-C ends it")

    run(url, config=[models, {"serve": {"port": 0}}], log_level="error", tell=tell)


def _browse(page: str) -> bool:
    """Whether a browser opens it; none that would take over the terminal."""
    has_screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if not has_screen and sys.platform not in ("win32", "darwin"):
        return False
    with suppress(webbrowser.Error, OSError):
        return webbrowser.open(page)
    return False
