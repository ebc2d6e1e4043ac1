"""The command that hands over what a memory store was not told yet: sync."""

from typing import Annotated

import typer

from refold.cli.options import Access, ConfigFile, Json, StoreUrl
from refold.cli.terminal import complain, emit, progress, say
from refold.cli.words import plural
from refold.core.errors import RefoldError, SettingError
from refold.session import parse
from refold.stores.store import Key

WithRefused = Annotated[
    bool, typer.Option("--refused", help="Hand in again what was refused and passed over.")
]


def sync(
    refused: WithRefused = False, store: StoreUrl = None, config: ConfigFile = None, json: Json = False
) -> None:
    """Hand over what was said and a memory store was not told yet.

    For stores with a memory, such as mem0:// and hybrid://. It is done by itself as conversations go on;
    this is for what a crash or a service that was down has left.
    """
    from refold.recall import spoken
    from refold.stores.hybrid import HybridStore

    access = Access.to(store, config)
    problems = list[tuple[Key, str]]()
    with access.open() as backend:
        if not isinstance(backend, HybridStore):
            raise SettingError(f"store {access.shown!r}", "has no memory beside it to hand anything to")
        backend.listen(spoken(parse))
        passed_over = [one.key for one in backend.refused()] if refused else []
        keys = list(dict.fromkeys([*backend.left(), *passed_over]))
        with progress("Handing over", len(keys)) as advance:
            for key in keys:
                try:
                    if not backend.drain(key, with_refused=refused):
                        problems.append((key, "somebody else is handing it over"))
                except RefoldError as error:
                    problems.append((key, str(error)))
                advance(1)
        still = [one for key in keys for one in backend.refused(key)]
    if json:
        left = [{**key._asdict(), "problem": why} for key, why in problems]
        passed = [{**key._asdict(), "at": at, "problem": why} for key, at, why in still]
        emit({"conversations": len(keys), "left": left, "refused": passed})
    else:
        for (_, conversation), why in problems:
            complain(f"{conversation}: {why}")
        for (_, conversation), at, why in still:
            complain(f"{conversation} #{at} was refused and is passed over: {why}")
        done = plural(len(keys) - len(problems), "conversation")
        say(f"{done} handed over, {len(problems)} left")
    if problems:
        raise typer.Exit(1)
