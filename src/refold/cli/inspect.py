"""Commands that read conversations: list, show, explain, savings, expand, diff, search."""

from typing import Annotated, Any

import typer
from msgspec import UNSET
from msgspec.structs import asdict

from refold.cli import tables
from refold.cli.format import iso, one_line, saved_percent
from refold.cli.options import (
    ALL_OWNERS,
    DEFAULT_OWNER,
    Access,
    At,
    AtOrId,
    ConfigFile,
    Json,
    Owner,
    StoreUrl,
    existing,
    ids,
    place,
    reading,
    reporting_damage,
)
from refold.cli.tables import CountedItem, count_items
from refold.cli.terminal import Cell, Columns, console, emit, fitting, progress, say, say_all
from refold.core.errors import CannotExpandError
from refold.core.query import parse_query
from refold.core.slices import slice_of
from refold.session.inspect import Inspector, conversation_row, parse, repairs
from refold.session.results import ComparedView, ConversationRow, Diff, Hit, ShownMessage, ShownView
from refold.session.search import find, hits, limit_of
from refold.session.session import Session
from refold.stores.store import Key, Scope


def list_(
    all_owners: Annotated[
        bool, typer.Option("--all-owners", help="List every owner's conversations; same as --owner '*'.")
    ] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = DEFAULT_OWNER,
    json: Json = False,
) -> None:
    """List conversations, and how much of each the model sees.

    A conversation belongs to an owner: `default` unless --owner names another. Conversations that the gateway
    records belong to the owner of the token, or else to a name derived from the API key.
    """
    all_owners = all_owners or owner == ALL_OWNERS
    access = Access.to(store, config)
    with access.open() as backend, reporting_damage("The list of conversations"):
        listed = list(backend.conversations(None if all_owners else owner))
        is_empty = not listed and next(iter(backend.conversations()), None) is None
        rows = []
        with progress("Reading", len(listed)) as advance:
            for one in listed:
                rows.append(conversation_row(backend, one))
                advance(1)
    if json:
        whose = ALL_OWNERS if all_owners else owner
        emit({"store": access.shown, "owner": whose, "conversations": list(map(_row_json, rows))})
    elif rows:
        tables.conversations(rows, with_owner=all_owners)
    elif is_empty:
        say(f"No conversations yet in {one_line(access.shown)}. Add one with: refold import FILE")
    else:
        others = "Other owners have conversations: `refold list --all-owners`."
        say(f"No conversations of {owner!r} in {one_line(access.shown)}. {others}")
    if any(row.problem is not UNSET for row in rows):
        raise typer.Exit(1)


def _row_json(row: ConversationRow) -> dict[str, Any]:
    is_damaged = row.problem is not UNSET
    tokens = {
        "said": row.tokens_said,
        "shown": row.tokens_shown,
        "saved_percent": saved_percent(row.tokens_said, row.tokens_shown),
    }
    parent = None
    if row.parent is not None:
        parent = {"conversation": row.parent.id, "at": row.parent.at}
    return {
        "id": row.id,
        "owner": row.owner,
        "messages": None if is_damaged else row.messages,
        "tokens": None if is_damaged else tokens,
        "created": row.created and row.created.isoformat(),
        "forked_from": parent,
        "problem": row.problem if is_damaged else None,
    }


@reading
def show(
    session: Session,
    at: Annotated[
        int | None,
        typer.Option("--at", metavar="N", parser=place, help="Show the view right after event N."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole texts.")] = False,
    json: Json = False,
) -> None:
    """Show what the model sees, and which edits hide the rest."""
    inspector = session.inspect
    view = inspector.view(at)
    if json:
        emit(_view_json(inspector, view))
    elif full:
        tables.full_view(inspector, view)
    else:
        tables.view(inspector, view)


def _view_json(inspector: Inspector, view: ShownView) -> dict[str, Any]:
    items = count_items(inspector, view)
    return {
        "conversation": inspector.key.conversation,
        "owner": inspector.key.owner,
        "view": inspector.view_name,
        "at": view.at,
        "tokens": {
            "shown": view.tokens,
            "said": view.recorded_tokens,
            "saved_percent": saved_percent(view.recorded_tokens, view.tokens),
        },
        "messages": {
            "shown": len(view.messages),
            "said": view.recorded_messages,
            "whole": sum(one.item.whole for one in items),
            "reduced": sum(one.item.reduced for one in items),
            "hidden": sum(one.hidden for one in items),
        },
        "items": list(map(_item_json, items)),
        "notices": repairs(view),
    }


def _item_json(one: CountedItem) -> dict[str, Any]:
    edit = one.item.edit
    edit_json = None
    if edit is not None:
        edit_json = {name: getattr(edit, name) for name in ("at", "kind", "why", "round")}
        edit_json["time"] = iso(edit.time)
    return {
        "span": one.item.span,
        "edit": edit_json,
        "reduced": one.item.reduced,
        "hidden": one.hidden,
        "tokens": {"said": one.recorded.tokens, "shown": one.item.tokens},
        "shown": list(map(_shown_json, one.item.shown)),
    }


def _shown_json(shown: ShownMessage) -> dict[str, Any]:
    facts = {name: getattr(shown.line, name) for name in ("at", "role", "tokens", "turn", "step", "tools")}
    return {**facts, "is_task": shown.is_task, "is_pinned": shown.is_pinned, "message": shown.message}


@reading
def explain(session: Session, at: At, json: Json = False) -> None:
    """Explain why a message is in the view or not.

    Prints whether it is shown whole, shorter or not at all, what keeps it in the view, and every edit of it,
    the newest first, with the setting that decided it and where that was set.
    """
    explanation = session.explain(at)
    if json:
        view = session.inspect.view_name
        emit({"conversation": session.conversation, "view": view, **asdict(explanation)})
    else:
        tables.explanation(explanation, session.conversation)


@reading
def savings(session: Session, json: Json = False) -> None:
    """Show what edits were expected to save, and what they saved.

    An edit makes every later request shorter, but invalidates the provider's cache after it. The estimate
    needs the model's prices; the actual savings need replies that were appended with their usage.
    """
    found = session.savings()
    if json:
        rows = [asdict(one) for one in found]
        view = session.inspect.view_name
        emit({"conversation": session.conversation, "view": view, "savings": rows})
    else:
        tables.savings(found)


@reading
def expand(
    session: Session,
    at: AtOrId,
    lines: Annotated[str | None, typer.Option("--lines", metavar="A-B", help="Only these lines.")] = None,
    items: Annotated[
        str | None,
        typer.Option("--items", metavar="A-B", help="Only these items of a list, or rows."),
    ] = None,
    chars: Annotated[
        str | None,
        typer.Option("--chars", metavar="A-B", help="Only these characters, from 0 up to B."),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option("--match", metavar="TEXT", help="Only lines with this text, or with /a pattern/."),
    ] = None,
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
    text = session.expand(at, **part)
    if json:
        emit({"at": at, **part, "text": text})
    else:
        say_all(text)


@reading
def diff(
    session: Session,
    at: Annotated[
        int | None,
        typer.Argument(metavar="AT", parser=place, help="A place, such as 57.", show_default=False),
    ] = None,
    at2: Annotated[
        int | None,
        typer.Argument(metavar="AT2", parser=place, help="Another place; default: now.", show_default=False),
    ] = None,
    with_: Annotated[
        str | None, typer.Option("--with", metavar="OTHER", help="Compare with this conversation instead.")
    ] = None,
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
        key = existing(session.store, "this store", Key(session.key.owner, with_))
        other = Session(session.store, key, config=session.config, view=session.inspect.view_name)
    found = session.diff(at, at2, other=other)
    if json:
        emit(_diff_json(found, session.inspect.view_name))
    else:
        tables.diff(found)


def _diff_json(found: Diff, view: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"conversation": found.old.conversation, "view": view}
    if found.parted_at is not None:
        since = {
            "removed": list(map(_compared_json, found.old.said)),
            "added": list(map(_compared_json, found.new.said)),
        }
        facts |= {"with": found.new.conversation, "parted_at": found.parted_at, "said": since}
    return {
        **facts,
        "from": _side_json(found.old),
        "to": _side_json(found.new),
        "removed": list(map(_compared_json, found.removed)),
        "added": list(map(_compared_json, found.added)),
    }


def _side_json(side: ComparedView) -> dict[str, Any]:
    return {"at": side.at, "tokens": side.tokens, "messages": side.messages}


def _compared_json(seen: ShownMessage) -> dict[str, Any]:
    names = ("at", "role", "tokens", "message", "tools", "edit", "text")
    return {name: getattr(seen, name) for name in names}


def search(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to search for.", show_default=False)],
    conversation: Annotated[
        str | None,
        typer.Option(
            "--conversation", metavar="ID", help="Search in this conversation only.", autocompletion=ids
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="The largest number of results.")] = 10,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = DEFAULT_OWNER,
    json: Json = False,
) -> None:
    """Search recorded messages, the best match first.

    The query has words, "a phrase", pref*, tool:NAME, role:user. A name such as src/a/b.py or getUserById is
    found as it is written. Messages that the model no longer sees are found too.
    """
    query = parse_query(text)
    most = limit_of(limit)
    access = Access.to(store, config)
    with access.open() as backend:
        scope: Scope = owner
        if conversation is not None:
            scope = existing(backend, access.shown, Key(owner, conversation), for_reading=True)
        with progress("Reading") as advance:
            candidates = find(backend, scope, query, most, parse, tick=advance)
        found = hits(backend, query, candidates, most, parse)
    if json:
        emit({"store": access.shown, "owner": owner, "query": text, "hits": [asdict(hit) for hit in found]})
    elif found:
        rows = list(map(_hit_cells, found))
        table = Columns(
            *fitting(("id", ">place", "role", "time", ""), rows, most=max(12, console().width // 6))
        )
        for row in rows:
            table.line(*row)
    else:
        say("Nothing found. Try fewer or other words, or the beginning of one, as in data*.")
    if not found:
        raise typer.Exit(1)


def _hit_cells(hit: Hit) -> list[Cell]:
    who = " ".join((hit.role, *hit.tools)) if hit.role == "tool" else hit.role
    note = "(before it was corrected) " if hit.is_corrected else ""
    return [
        (one_line(hit.conversation), "bold"),
        (f"#{hit.at}", ""),
        (one_line(who), "cyan"),
        (f"{hit.time.astimezone():%Y-%m-%d %H:%M}", "dim"),
        (note + one_line(hit.excerpt), "" if hit.in_view else "dim"),
    ]
