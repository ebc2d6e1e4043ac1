"""The command sync: delivers pending messages to a memory store."""

from typing import TYPE_CHECKING, Annotated

import typer

from refold.cli.format import plural
from refold.cli.options import Access, Json, flag, with_store
from refold.cli.terminal import at_most, complain, emit, progress, say
from refold.core.errors import CorruptError, RefoldError, SettingError
from refold.stores.store import Key

if TYPE_CHECKING:
    from refold.stores.hybrid import HybridStore
    from refold.stores.hybrid_sync import RefusedMessage

MAX_PRINTED_MESSAGES = 50


@with_store
def sync(
    access: Access,
    refused: Annotated[bool, flag("Deliver messages again that the memory refused.", "--refused")] = False,
    json: Json = False,
) -> None:
    """Deliver pending messages to a memory store.

    For stores with a memory, such as mem0:// and hybrid://. Delivery is automatic; this command delivers what
    a crash or an outage has left. Messages that the memory refused are skipped, and named each
    time, until --refused delivers them again.
    """
    from refold.session.memories import spoken
    from refold.stores.hybrid import HybridStore

    problems: dict[Key, str] = {}
    with access.open() as backend:
        if not isinstance(backend, HybridStore):
            raise SettingError(f"store {access.shown!r}", "has no memory to deliver to")
        backend.listen(spoken)
        skipped = [one.key for one in _refused(backend, {})] if refused else []
        keys = list(dict.fromkeys([*backend.left(), *skipped]))
        with progress("Delivering", len(keys)) as advance:
            for key in keys:
                try:
                    if not backend.drain(key, with_refused=refused):
                        problems[key] = "another process is delivering it"
                except RefoldError as error:
                    problems[key] = str(error)
                advance(1)
        done = len(keys) - len(problems)
        still = _refused(backend, problems)
    if json:
        left = [{**key._asdict(), "problem": why} for key, why in problems.items()]
        passed = [{**key._asdict(), "at": at, "problem": why} for key, at, why in still]
        emit({"conversations": len(keys), "left": left, "refused": passed})
    else:
        for key, why in problems.items():
            complain(f"{key.conversation}: {why}")
        lines = [f"{key.conversation} #{at} was refused and is skipped: {why}" for key, at, why in still]
        for line in at_most(lines, MAX_PRINTED_MESSAGES):
            complain(line)
        result = f"{plural(done, 'conversation')} delivered, {len(problems)} left"
        if still:
            result += f", {plural(len(still), 'message')} refused; to retry: `refold sync --refused`"
        say(result)
    if problems:
        raise typer.Exit(1)


def _refused(store: "HybridStore", problems: dict[Key, str]) -> "list[RefusedMessage]":
    """Refused messages of all conversations; a list that cannot be read is one more problem."""
    found: list[RefusedMessage] = []
    for key in store.refusing():
        try:
            found += store.refused(key)
        except CorruptError as error:
            problems[key] = str(error)
    return found
