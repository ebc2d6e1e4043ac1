"""Commands that read conversations: list, show, explain, savings, expand, diff, search."""

from functools import partial
from typing import Annotated

import typer

from refold.cli import tables
from refold.cli.format import one_line, quoted
from refold.cli.options import (
    Access,
    At,
    AtOrId,
    Json,
    argument,
    flag,
    ids,
    option,
    place,
    reading,
    reporting_damage,
    with_owner,
)
from refold.cli.terminal import Cell, answer, emit, progress, say, say_all, table
from refold.core.errors import CannotExpandError, NotFoundError
from refold.core.slices import slice_of
from refold.session.inspect import conversation_row
from refold.session.results import Hit
from refold.session.search import search as search_messages
from refold.session.session import Session
from refold.stores.store import Key, Scope

ALL_OWNERS = "*"
"""What --owner takes for every owner."""


@with_owner
def list_(
    access: Access,
    all_owners: Annotated[
        bool, flag("List every owner's conversations; same as --owner '*'.", "--all-owners")
    ] = False,
    json: Json = False,
) -> None:
    """List conversations, and how much of each the model sees.

    A conversation belongs to an owner: `default` unless --owner names another. Conversations that the gateway
    records belong to the owner of the token, or else to a name derived from the API key.
    """
    owner = ALL_OWNERS if all_owners else access.owner
    all_owners = owner == ALL_OWNERS
    with access.open() as backend, reporting_damage("The list of conversations"):
        listed = list(backend.conversations(None if all_owners else owner))
        is_empty = not listed and next(iter(backend.conversations()), None) is None
        rows = []
        with progress("Reading", len(listed)) as advance:
            for one in listed:
                rows.append(conversation_row(backend, one))
                advance(1)
    if json:
        emit({"store": access.shown, "owner": owner, "conversations": rows})
    elif rows:
        tables.conversations(rows, with_owner=all_owners)
    elif is_empty:
        say(f"No conversations yet in {one_line(access.shown)}. Add one with: refold import FILE")
    else:
        others = "Other owners have conversations: `refold list --all-owners`."
        say(f"No conversations of {owner!r} in {one_line(access.shown)}. {others}")
    if any(row.problem is not None for row in rows):
        raise typer.Exit(1)


@reading
def show(
    session: Session,
    at: Annotated[int | None, option("Show the view right after event N.", "N", parser=place)] = None,
    full: Annotated[bool, flag("Print whole texts.", "--full")] = False,
    json: Json = False,
) -> None:
    """Show what the model sees, and which edits hide the rest."""
    answer(session.inspect.view(at), json, tables.full_view if full else tables.view)


@reading
def explain(session: Session, at: At, json: Json = False) -> None:
    """Explain why a message is in the view or not.

    Prints whether it is shown whole, shorter or not at all, what keeps it in the view, and every edit of it,
    the newest first, with the setting that decided it and where that was set.
    """
    answer(session.explain(at), json, partial(tables.explanation, conversation=session.conversation))


@reading
def savings(session: Session, json: Json = False) -> None:
    """Show what edits were expected to save, and what they saved.

    An edit makes every later request shorter, but invalidates the provider's cache after it. The estimate
    needs the model's prices; the actual savings need replies that were appended with their usage.
    """
    answer({"savings": session.savings()}, json, lambda found: tables.savings(found["savings"]))


@reading
def expand(
    session: Session,
    at: AtOrId,
    lines: Annotated[str | None, option("Only these lines.", "A-B")] = None,
    items: Annotated[str | None, option("Only these items of a list, or rows.", "A-B")] = None,
    chars: Annotated[str | None, option("Only these characters, from 0 up to B.", "A-B")] = None,
    match: Annotated[str | None, option("Only lines with this text, or with /a pattern/.", "TEXT")] = None,
    json: Json = False,
) -> None:
    """Print the full text of a message, or of what an edit hides.

    \b
    Examples:
      refold expand chat 57
      refold expand chat -1
      refold expand chat 57 --lines 1-40
      refold expand chat 57 --match "error"
      refold expand chat 57 --match "/line [0-9]+/"
    """
    given = {"lines": lines, "items": items, "chars": chars, "match": match}
    part = {name: value for name, value in given.items() if value is not None}
    try:
        slice_of(part)
    except CannotExpandError as error:
        raise typer.BadParameter(str(error)) from error
    found = {"at": at, **part, "text": session.expand(at, **part)}
    answer(found, json, lambda found: say_all(found["text"]))


@reading
def diff(
    session: Session,
    at: Annotated[int | None, argument("A place, such as 57.", "AT", parser=place)] = None,
    at2: Annotated[int | None, argument("Another place; default: now.", "AT2", parser=place)] = None,
    with_: Annotated[str | None, option("Compare with this conversation instead.", "OTHER", "--with")] = None,
    json: Json = False,
) -> None:
    """Show what one view shows and another does not.

    Compares the view at two moments. With another conversation, such as a fork: where they part, what each
    recorded since, and what each shows; AT and AT2 are then a place in each.

    \b
    Examples:
      refold diff chat 120               since event 120
      refold diff chat 120 180           from one moment to another
      refold diff chat --with chat-2     a conversation and its fork
    """
    if at is None and with_ is None:
        raise typer.BadParameter("give a place, or another conversation by --with", param_hint="AT")
    other = None
    if with_ is not None:
        key = Key(session.key.owner, with_)
        other = Session(session.store, key, config=session.config, view=session.inspect.view_name)
        if not other.inspect.state.next:
            advice = f"`refold list --owner {quoted(key.owner)}` shows those of this owner"
            raise NotFoundError(f"There is no conversation {with_!r} to compare with. {advice}")
    answer(session.diff(at, at2, other=other), json, tables.diff)


@with_owner
def search(
    access: Access,
    text: Annotated[str, argument("What to search for.", "TEXT")],
    conversation: Annotated[
        str | None, option("Search in this conversation only.", "ID", autocompletion=ids)
    ] = None,
    limit: Annotated[int, option("The largest number of results.", "N")] = 10,
    json: Json = False,
) -> None:
    """Search recorded messages, the best match first.

    The query has words, "a phrase", pref*, tool:NAME, role:user. A name such as src/a/b.py or getUserById is
    found as it is written. Messages that the model no longer sees are found too.
    """
    with access.open() as backend:
        scope: Scope = access.owner
        if conversation is not None:
            scope = access.existing(backend, conversation, for_reading=True)
        with progress("Reading") as advance:
            found = search_messages(backend, scope, text, limit, advance)
    if json:
        emit({"store": access.shown, "owner": access.owner, "query": text, "hits": found})
    elif found:
        table(("id", ">place", "role", "time", "text"), map(_hit_cells, found))
    else:
        say("Nothing found. Try fewer or other words, or the beginning of one, as in data*.")
    if not found:
        raise typer.Exit(1)


def _hit_cells(hit: Hit) -> list[Cell]:
    note = "(before it was corrected) " if hit.is_corrected else ""
    return [
        (one_line(hit.conversation), "bold"),
        (f"#{hit.at}", ""),
        (one_line(hit.author), "cyan"),
        (f"{hit.time.astimezone():%Y-%m-%d %H:%M}", "dim"),
        (note + one_line(hit.excerpt), "" if hit.in_view else "dim"),
    ]
