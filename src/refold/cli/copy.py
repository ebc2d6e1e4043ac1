"""The command that brings conversations from one store to another: copy."""

from typing import Annotated

import typer

from refold.cli.options import Access, Json
from refold.cli.terminal import complain, emit, progress, say
from refold.cli.words import one_line, plural
from refold.core.errors import NotFoundError
from refold.session.copy import CopyResult, copy_settings
from refold.session.copy import copy as copied
from refold.stores.store import ConversationInfo, Store
from refold.stores.url import shown_url


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The URL of a store.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TO", help="The URL of another.", show_default=False)],
    id: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="Only this conversation; may be given again."),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="NAME", help="Only what is theirs; else everybody's.")
    ] = None,
    json: Json = False,
) -> None:
    """Copy conversations from one store to another.

    Whole records, to the byte, each entry verified by the hash chain and read back. What is there already is
    not copied again: run it again after it was interrupted, or to bring over what was said since. Forks stay
    forks where both stores have them. Nothing is changed in FROM.
    """
    if source == target:
        raise typer.BadParameter("is the same store", param_hint="TO")
    with Access.to(source, None).open() as old:
        rows = _chosen(old, source, owner, id)  # before there is anything of the other
        with Access.to(target, None).open(create=True) as new:
            with progress("Copying", sum(row.next for row in rows)) as advance:
                done = list(copied(old, new, rows, advance))
            settings = 0 if id or owner is not None else copy_settings(old, new)
    failed = [one for one in done if one.problem]
    if json:
        told = [{"owner": one.key.owner, "conversation": one.key.conversation, **_json(one)} for one in done]
        facts = {"from": shown_url(source), "to": shown_url(target), "settings": settings}
        emit({"did": "copy", **facts, "conversations": told})
    else:
        for one in failed:
            complain(f"{one_line(one.key.conversation)}: {one.problem}")
        entries, there = sum(one.new for one in done), sum(one.entries - one.new for one in done)
        known = f", {there:,} there already" if there else ""
        say(f"{plural(len(done), 'conversation')}: {plural(entries, 'event')} copied{known}")
    if failed:
        raise typer.Exit(1)


def _chosen(store: Store, url: str, owner: str | None, ids: list[str] | None) -> list[ConversationInfo]:
    rows = list(store.conversations(owner))
    whose = "" if owner is None else f" of {owner!r}"
    if missing := {*(ids or ())} - {row.key.conversation for row in rows}:
        raise NotFoundError(f"There is no conversation {min(missing)!r}{whose} in {shown_url(url)}")
    if whose and not rows:
        raise NotFoundError(f"There is no conversation{whose} in {shown_url(url)}")
    return [row for row in rows if not ids or row.key.conversation in ids]


def _json(one: CopyResult) -> dict[str, object]:
    return {"events": one.entries, "new": one.new, "problem": one.problem}
