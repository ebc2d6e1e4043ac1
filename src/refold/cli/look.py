"""Commands that read: list, show, explain, expand, log, diff."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from refold.cli import show as page
from refold.cli.log import Names, emit_lines, emit_log, events, followed, print_log
from refold.cli.options import (
    ALL_OWNERS,
    DEFAULT_OWNER,
    Access,
    At,
    AtOrId,
    ConfigFile,
    Id,
    Json,
    Owner,
    StoreUrl,
    blaming_damage,
    existing,
    place,
    reading,
)
from refold.cli.seen import see, sight_json
from refold.cli.terminal import Cell, Columns, console, emit, fitting, progress, say, say_all
from refold.cli.words import iso, local, one_line, saved_percent
from refold.core.errors import CannotExpandError
from refold.core.live import Live
from refold.core.slices import slice_of
from refold.session.doctor import told
from refold.session.inspect import parse
from refold.session.results import ComparedView, Diff, MessageSummary
from refold.session.session import Session
from refold.stores.record import Record
from refold.stores.store import ConversationInfo, Key, Store

PastPlace = Annotated[
    int | None, typer.Option("--at", metavar="N", parser=place, help="As it was right after event N.")
]
Place2 = Annotated[
    int | None,
    typer.Argument(metavar="AT2", parser=place, help="The other place; else now.", show_default=False),
]
Place1 = Annotated[
    int | None,
    typer.Argument(metavar="AT", parser=place, help="A place, such as 57.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class _Listed:
    row: ConversationInfo
    live: Live | None
    problem: str | None

    @property
    def parent(self) -> str:
        row = self.row
        return "" if row.parent is None else f"{one_line(row.parent.conversation)} at #{row.fork_at - 1}"


def list_(
    all_owners: Annotated[
        bool, typer.Option("--all-owners", help="Everybody's, with the owner of each; as --owner '*'.")
    ] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = DEFAULT_OWNER,
    json: Json = False,
) -> None:
    """What there is, and how much of it is shown.

    A conversation belongs to an owner: `default` unless --owner says otherwise. What the gateway stores
    belongs to the owner of the token, or else to a name made of the API key.
    """
    all_owners = all_owners or owner == ALL_OWNERS
    access = Access.to(store, config)
    with access.open() as backend, blaming_damage("The list of conversations"):
        rows = list(backend.conversations(None if all_owners else owner))
        is_empty = not rows and next(iter(backend.conversations()), None) is None
        found = []
        with progress("Reading", len(rows)) as advance:
            for row in rows:
                found.append(_open(backend, row))
                advance(1)
    if json:
        whose = ALL_OWNERS if all_owners else owner
        emit({"store": access.shown, "owner": whose, "conversations": list(map(_listed_json, found))})
    elif found:
        _list(found, with_owner=all_owners)
    elif is_empty:
        say(f"No conversations yet in {one_line(access.shown)}. Add one with: refold import FILE")
    else:
        others = "Other owners have conversations: `refold list --all-owners`."
        say(f"No conversations of {owner!r} in {one_line(access.shown)}. {others}")
    if any(one.problem for one in found):
        raise typer.Exit(1)


def _open(store: Store, row: ConversationInfo) -> _Listed:
    try:
        return _Listed(row, Record(store, row.key, "main", parse).live, None)
    except Exception as error:  # damaged: the others are still worth seeing
        return _Listed(row, None, told(error))


def _listed_json(one: _Listed) -> dict[str, Any]:
    row, live = one.row, one.live
    parent = None if row.parent is None else {"conversation": row.parent.conversation, "at": row.fork_at - 1}
    tokens = None
    if live is not None:
        said, shown = live.state.total, live.tokens
        tokens = {"said": said, "shown": shown, "saved_percent": saved_percent(said, shown)}
    return {
        "id": row.key.conversation,
        "owner": row.key.owner,
        "messages": None if live is None else live.state.index,
        "tokens": tokens,
        "created": iso(row.created),
        "forked_from": parent,
        "problem": one.problem,
    }


def _list(found: list[_Listed], *, with_owner: bool) -> None:
    rows = [_row(one, with_owner) for one in found]
    owner = ("owner",) if with_owner else ()
    titles = (*owner, "id", ">messages", ">said", ">shown", ">saved", "created", "forked from")
    table = Columns(*fitting(titles, rows, most=max(16, min(48, console().width - 60))))
    table.head()
    for row in rows:
        table.line(*row)


def _row(one: _Listed, with_owner: bool) -> list[Cell]:
    cells: list[Cell] = [(one_line(one.row.key.owner), "cyan")] if with_owner else []
    cells.append((one_line(one.row.key.conversation), "bold"))
    if one.live is None:
        return [*cells, (f"cannot be read: {one_line(one.problem or '')}", "red")]
    said, shown = one.live.state.total, one.live.tokens
    return [
        *cells,
        (f"{one.live.state.index:,}", ""),
        (f"{said:,}", ""),
        (f"{shown:,}", ""),
        (f"{saved_percent(said, shown)} %", "green" if shown < said else "dim"),
        (local(one.row.created)[:16], "dim"),
        (one.parent, "dim"),
    ]


@reading
def show(
    session: Session,
    at: PastPlace = None,
    full: Annotated[bool, typer.Option("--full", help="Whole texts.")] = False,
    json: Json = False,
) -> None:
    """What the model sees, and what is hidden from it by which edit."""
    sight = see(session, at)
    if json:
        emit(sight_json(sight))
    elif full:
        page.show_full(sight)
    else:
        page.show(sight)


@reading
def explain(session: Session, at: At, json: Json = False) -> None:
    """Why a message is in the view or out of it.

    Says whether it is shown whole, shorter or not at all, what keeps it there, and every edit that has to
    do with it, the newest first, with the setting that decided it and where that was set.
    """
    told = session.explain(at)
    if json:
        emit({"conversation": session.conversation, "view": session.record.view, **asdict(told)})
    else:
        page.explain(told, session.conversation)


@reading
def savings(session: Session, json: Json = False) -> None:
    """What edits were expected to save in money, and what they did.

    An edit makes the provider's cache forget what comes after it, and every later request shorter. It is
    known where the model's prices are; what came of it, where answers are appended with their usage.
    """
    found = session.savings()
    if json:
        rows = [asdict(one) for one in found]
        emit({"conversation": session.conversation, "view": session.record.view, "savings": rows})
    else:
        page.savings(found)


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
        str | None, typer.Option("--match", metavar="TEXT", help="Only where this text is, or /a pattern/.")
    ] = None,
    json: Json = False,
) -> None:
    """The text of a message, or of all that an edit stands for.

    \b
    Examples:
      refold expand chat 57
      refold expand chat -1
      refold expand chat 57 --lines 1-40
      refold expand chat 57 --match "error"
      refold expand chat 57 --match "/line [0-9]+/"
    """
    asked = {"lines": lines, "items": items, "chars": chars, "match": match}
    part = {name: value for name, value in asked.items() if value is not None}
    try:
        slice_of(part)
    except CannotExpandError as error:
        raise typer.BadParameter(str(error)) from error
    text = session.expand(at, **part)
    if json:
        emit({"at": at, **part, "text": text})
    else:
        say_all(text)


def log(
    id: Id,
    after: Annotated[
        int | None, typer.Option("--after", metavar="N", parser=place, help="Only what came after event N.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="At most so many events.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what anybody appends.")] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """What happened: every event, in order.

    With --follow it goes on, whoever appends, until Ctrl-C; with --json too, one document a line.
    """
    if follow and limit is not None:
        raise typer.BadParameter("has no end to be limited", param_hint="--follow")
    access = Access.to(store, config)
    with access.open() as backend:
        key = existing(backend, access.shown, Key(owner, id), for_reading=True)
        start = 0 if after is None else after + 1
        found = followed(backend, key, start) if follow else events(backend, key, start, limit)
        if json:
            damaged = emit_lines(found) if follow else emit_log(key, found)
        else:
            damaged = print_log(found, Names(backend, key))
    if damaged:
        raise typer.Exit(1)


@reading
def diff(
    session: Session,
    at: Place1 = None,
    at2: Place2 = None,
    with_: Annotated[
        str | None, typer.Option("--with", metavar="OTHER", help="Compare with this conversation instead.")
    ] = None,
    json: Json = False,
) -> None:
    """What the view showed then and not now, and the other way round.

    With another conversation, such as a fork: where they part, what each said since, and what each shows;
    the places are then one of each.

    \b
    Examples:
      refold diff chat 120               since event 120
      refold diff chat 120 180           from one moment to another
      refold diff chat --with chat-2     a fork and where it came from
    """
    if at is None and with_ is None:
        raise typer.BadParameter("give a place, or another conversation by --with", param_hint="AT")
    other = None if with_ is None else _other(session, with_)
    found = session.diff(at, at2, other=other)
    if json:
        emit(_diff_json(found, session.record.view))
    else:
        page.diff(found)


def _other(session: Session, id: str) -> Session:
    key = existing(session.store, "this store", Key(session.key.owner, id))
    return Session(session.store, key, config=session.config, view=session.record.view)


def _diff_json(found: Diff, view: str) -> dict[str, Any]:
    about: dict[str, Any] = {"conversation": found.old.conversation, "view": view}
    if found.parted_at is not None:
        since = {"removed": found.old.said, "added": found.new.said}
        said = {name: list(map(_seen_json, side)) for name, side in since.items()}
        about |= {"with": found.new.conversation, "parted_at": found.parted_at, "said": said}
    ends = {"from": _moment_json(found.old), "to": _moment_json(found.new)}
    sides = {"removed": found.removed, "added": found.added}
    return about | ends | {name: list(map(_seen_json, side)) for name, side in sides.items()}


def _moment_json(moment: ComparedView) -> dict[str, Any]:
    return {"at": moment.at, "tokens": moment.tokens, "messages": moment.messages}


def _seen_json(seen: MessageSummary) -> dict[str, Any]:
    return asdict(seen) | {"text": seen.text}
