"""The command that hands over what a memory store was not told yet: sync."""

from typing import TYPE_CHECKING, Annotated

import typer

from refold.cli.options import Access, ConfigFile, Json, StoreUrl
from refold.cli.terminal import complain, emit, progress, say
from refold.cli.words import plural
from refold.core.errors import CorruptError, RefoldError, SettingError
from refold.session.inspect import parse
from refold.stores.store import Key

if TYPE_CHECKING:
    from refold.stores.hybrid import HybridStore
    from refold.stores.hybrid_sync import RefusedMessage

MOST_REFUSED = 50
"""Messages told one by one to people."""

WithRefused = Annotated[
    bool, typer.Option("--refused", help="Hand in again what was refused and passed over.")
]


def sync(
    refused: WithRefused = False, store: StoreUrl = None, config: ConfigFile = None, json: Json = False
) -> None:
    """Hand over what was said and a memory store was not told yet.

    For stores with a memory, such as mem0:// and hybrid://. It is done by itself as conversations go on;
    this is for what a crash or a service that was down has left. What the memory refused while it took
    others is passed over and named each time, until --refused hands it in again.
    """
    from refold.session.memories import spoken
    from refold.stores.hybrid import HybridStore

    access = Access.to(store, config)
    problems = list[tuple[Key, str]]()
    with access.open() as backend:
        if not isinstance(backend, HybridStore):
            raise SettingError(f"store {access.shown!r}", "has no memory beside it to hand anything to")
        backend.listen(spoken(parse))
        passed_over = [one.key for one in _refused(backend, [])] if refused else []
        keys = list(dict.fromkeys([*backend.left(), *passed_over]))
        with progress("Handing over", len(keys)) as advance:
            for key in keys:
                try:
                    if not backend.drain(key, with_refused=refused):
                        problems.append((key, "somebody else is handing it over"))
                except RefoldError as error:
                    problems.append((key, str(error)))
                advance(1)
        done = len(keys) - len(problems)
        still = _refused(backend, problems)
    if json:
        left = [{**key._asdict(), "problem": why} for key, why in problems]
        passed = [{**key._asdict(), "at": at, "problem": why} for key, at, why in still]
        emit({"conversations": len(keys), "left": left, "refused": passed})
    else:
        for (_, conversation), why in problems:
            complain(f"{conversation}: {why}")
        for (_, conversation), at, why in still[:MOST_REFUSED]:
            complain(f"{conversation} #{at} was refused and is passed over: {why}")
        if len(still) > MOST_REFUSED:
            complain(f"… and {len(still) - MOST_REFUSED:,} more: see --json")
        told = f"{plural(done, 'conversation')} handed over, {len(problems)} left"
        tip = f", {plural(len(still), 'message')} refused; to try again: `refold sync --refused`"
        say(told + tip if still else told)
    if problems:
        raise typer.Exit(1)


def _refused(store: "HybridStore", problems: list[tuple[Key, str]]) -> "list[RefusedMessage]":
    """What was passed over of all conversations; a note of it that cannot be read is one more problem."""
    found: list[RefusedMessage] = []
    for key in store.refusing():
        try:
            found += store.refused(key)
        except CorruptError as error:
            problems.append((key, str(error)))
    return found
