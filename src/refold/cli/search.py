"""The command that finds what was said: search."""

from typing import Annotated

import typer
from msgspec.structs import asdict

from refold.cli.options import Access, ConfigFile, Json, Owner, StoreUrl, existing, ids
from refold.cli.terminal import Cell, Columns, console, emit, fitting, progress, say
from refold.cli.words import one_line
from refold.core.query import parse_query
from refold.session.inspect import parse
from refold.session.results import Hit
from refold.session.search import find, hits, limit_of
from refold.stores.store import Key, Scope

Only = Annotated[
    str | None,
    typer.Option("--conversation", metavar="ID", help="Only in this one.", autocompletion=ids),
]


def search(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to look for.", show_default=False)],
    conversation: Only = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="At most so many.")] = 10,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Where something was said, the best first.

    Words, "a phrase", pref*, tool:NAME, role:user. A name such as src/a/b.py or getUserById is found as it
    is written. What no model sees any more is found too.
    """
    query, most = parse_query(text), limit_of(limit)
    access = Access.to(store, config)
    with access.open() as backend:
        scope: Scope = owner
        if conversation is not None:
            scope = existing(backend, access.shown, Key(owner, conversation), for_reading=True)
        with progress("Reading") as advance:
            found = find(backend, scope, query, most, parse, tick=advance)
        told = hits(backend, query, found, most, parse)
    if json:
        emit({"store": access.shown, "owner": owner, "query": text, "hits": [asdict(hit) for hit in told]})
    elif told:
        _print(told)
    else:
        say("Nothing found. Try fewer or other words, or the beginning of one, as in data*.")
    if not told:
        raise typer.Exit(1)


def _print(told: list[Hit]) -> None:
    rows = list(map(_row, told))
    titles = ("id", ">place", "who", "said", "")
    table = Columns(*fitting(titles, rows, most=max(12, console().width // 6)))
    for row in rows:
        table.line(*row)


def _row(hit: Hit) -> list[Cell]:
    who = " ".join((hit.role, *hit.tools)) if hit.role == "tool" else hit.role
    shown, note = "" if hit.in_view else "dim", "(before it was corrected) " if hit.is_corrected else ""
    return [
        (one_line(hit.conversation), "bold"),
        (f"#{hit.at}", ""),
        (one_line(who), "cyan"),
        (f"{hit.time.astimezone():%Y-%m-%d %H:%M}", "dim"),
        (note + one_line(hit.excerpt), shown),
    ]
