"""The command demo: an agent that needs no key reads a folder in a small window, and the panel shows it."""

import os
import sys
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec

from refold.cli.format import one_line, plural, saved_percent
from refold.cli.options import DEFAULT_OWNER, Json, argument, flag, option
from refold.cli.serve import serve_command
from refold.cli.terminal import Columns, emit, say
from refold.core.errors import SettingError
from refold.stores.store import Store, open_store
from refold.stores.url import shown_url

if TYPE_CHECKING:
    from refold.agent.demo.run import DemoResult, DemoStep

COMMAND = "  {:<24} {}"
BAR_CELLS = 10


def demo(
    folder: Annotated[Path, argument("The folder to read; default: the current one.", "FOLDER")] = Path(),
    steps: Annotated[int, option("The number of steps.", "N", min=10, max=5_000)] = 200,
    window: Annotated[int, option("The model's window in tokens.", "N", min=4_000, max=1_000_000)] = 8_000,
    store: Annotated[str | None, option("Where to record it; default: a temporary file.", "URL")] = None,
    panel: Annotated[
        bool | None, flag("Open the panel at the end; default: only in a terminal.", "--panel/--no-panel")
    ] = None,
    json: Json = False,
) -> None:
    """Watch an agent read a folder in a window far too small for it.

    It needs no key and no network: the model is a script. Its tools are real; the folder is only read,
    without hidden files and files with keys. In the end the agent is asked for something that it read early
    and no longer sees. The conversation stays in the store for you to inspect.
    """
    from refold.agent.demo.model import DemoModel
    from refold.agent.demo.run import choose_folder, run_demo

    reading, problem = choose_folder(folder, window)
    note = f"{problem}: refold's own source is read instead" if problem else ""
    if not json:
        files = f"{reading.root.resolve()}, {plural(len(reading.sizes), 'file')}"
        if note:
            say(one_line(note))
        say(one_line(f"A scripted model reads {files}, in a window of {window:,} tokens"))
    model = DemoModel(reading, steps, window)
    with ExitStack() as if_it_fails:
        url = store
        if url is None:  # a folder that only this user can read: the store has copies of files
            new_folder = mkdtemp(prefix="refold-demo-")
            if_it_fails.callback(rmtree, new_folder, ignore_errors=True)
            url = f"sqlite:///{Path(new_folder).as_posix()}/demo.db"
        with closing(open_store(url)) as opened:
            on_step = _ignore_step if json else _step_printer(window)
            outcome = run_demo(reading, model, opened, _unused_id(opened), on_step)
        if_it_fails.pop_all()
    if json:
        emit({"store": shown_url(url), "note": note, **msgspec.to_builtins(outcome)})
        return
    _print_summary(outcome)
    if url.startswith("memory:"):
        say("\nThe conversation was kept in memory only.")
        return
    _print_commands(outcome, shown_url(url), is_kept=store is not None)
    if panel or (panel is None and sys.stdout.isatty()):
        _serve_panel(url, outcome.conversation, model.config)
    else:
        say(COMMAND.format("refold serve", "the panel"))


def _unused_id(store: Store) -> str:
    taken = {row.key.conversation for row in store.conversations(DEFAULT_OWNER)}
    names = ("demo", *(f"demo-{n}" for n in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _ignore_step(step: "DemoStep") -> None:
    """With --json, stdout has the JSON only."""


def _step_printer(window: int) -> Callable[["DemoStep"], None]:
    """Prints the titles of a table; returns the function that prints a step."""
    columns = Columns((">step", "call", ">recorded", ">sent", "window", "saved"), (4, 40, 9, 7, BAR_CELLS))
    columns.head()
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    full, empty = "█░" if is_unicode else "#."

    def show(step: "DemoStep") -> None:
        filled = min(BAR_CELLS, round(BAR_CELLS * step.sent / window))
        try:
            columns.row(
                [
                    (f"{step.step}", ""),
                    (one_line(f"{step.tool} {step.argument}".strip()), ""),
                    (f"{step.recorded:,}", "red" if step.recorded > window else ""),
                    (f"{step.sent:,}", "bold"),
                    (full * filled + empty * (BAR_CELLS - filled), "green"),
                    (", ".join(f"{stage} -{tokens:,}" for stage, tokens in step.saved.items()), "yellow"),
                ]
            )
            sys.stdout.flush()
        except BrokenPipeError:  # the reader is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(0) from None

    return show


def _print_summary(outcome: "DemoResult") -> None:
    ended = "no step refused: try more --steps or a smaller --window"
    if outcome.ended_without:
        ended = f"refused at step {outcome.ended_without}, for good"
    steps = outcome.steps
    most = max(step.sent for step in steps)
    without = sum(step.recorded for step in steps)
    saved = saved_percent(without, sum(step.sent for step in steps))
    lines = {
        "recorded": f"{steps[-1].recorded:,} tokens in {plural(len(steps), 'step')}, none lost",
        "sent": f"never more than {most:,} of {outcome.window:,} tokens",
        "without": ended,
        "saved": f"{saved} % of {without:,} tokens; less in money if the provider caches",
    }
    question = outcome.question
    if question is not None:
        where = "hidden by then" if question.is_hidden else "still in view"
        found = f"found by {' and '.join(outcome.found_by)}" if outcome.found_by else "read in view"
        correct = "exact" if outcome.is_right else "wrong"
        lines["asked"] = f"for the line of {question.path} with `{question.word}`; #{question.at}, {where}"
        lines["answer"] = one_line(outcome.answer)
        lines[""] = f"{correct}; {found}"
    say("")
    for name, text in lines.items():
        say(f"{name:<8}  {one_line(text)}")


def _print_commands(outcome: "DemoResult", url: str, *, is_kept: bool) -> None:
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
