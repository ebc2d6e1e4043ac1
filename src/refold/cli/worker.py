"""The command that does what sessions hand over: worker."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from refold.cli.options import Access, ConfigFile, StoreUrl
from refold.cli.terminal import complain
from refold.cli.words import one_line
from refold.core.errors import SettingError
from refold.summaries.queue import WorkerSettings


def worker(
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="Jobs at a time.")
    ] = WorkerSettings().concurrency,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Shown by refold jobs; else the machine's.")
    ] = None,
    summarizer: Annotated[
        list[str] | None,
        typer.Option(
            "--summarizer",
            metavar="MODEL",
            help="Who writes: openai/gpt-4o-mini, or your own as module:function. Else the configured.",
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option("--attempts", metavar="N", min=1, help="Before a job has failed.")
    ] = WorkerSettings().attempts,
    grace: Annotated[
        float, typer.Option("--grace", metavar="S", min=0, help="Seconds to end in, told to stop.")
    ] = WorkerSettings().grace_s,
    once: Annotated[bool, typer.Option("--once", help="Do what waits now, and end.")] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
) -> None:
    """Write summaries and compact for sessions, until it is told to stop.

    For agents with `summarizer: {executor: worker}` and a PostgreSQL store. Any number of workers share the
    work, on any number of machines; each needs the configuration that the sessions have.
    """
    from refold.session.worker import run

    access = Access.to(store, config, for_settings=True)
    given = list(map(_summarizer, summarizer or ()))
    settings = WorkerSettings(concurrency=concurrency, attempts=attempts, grace_s=grace, once=once)
    rest: dict[str, Any] = {"config": access.config, "summarizer": given or None, "name": name}
    run(access.given, **rest, settings=settings, log=lambda text: complain(one_line(text)))


def _summarizer(name: str) -> Any:
    """A model by its name, or what stands in a module of the user's."""
    where = f"--summarizer {name}"
    module, is_own, attribute = name.partition(":")
    if "/" in name:
        return name
    if not is_own:
        raise SettingError(where, "expected openai/MODEL, anthropic/MODEL, or your own as module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(where, f"cannot be loaded: {error}") from error
    if not callable(found):
        raise SettingError(where, f"is no function but a {type(found).__name__}")
    return found
