"""Commands that edit, fork or erase a conversation: undo, restore, correct, pin, unpin, fork, delete."""

from pathlib import Path
from typing import Annotated, Any

import typer

from refold.cli.format import one_line, plural, quoted
from refold.cli.options import (
    Access,
    At,
    ConfigFile,
    Id,
    Json,
    Owner,
    StoreUrl,
    Why,
    existing,
    place,
    with_session,
)
from refold.cli.terminal import emit, say
from refold.core.codec import loads
from refold.core.errors import RefoldError
from refold.core.event import Pinned
from refold.session.session import Session
from refold.stores.store import Key

UndoPlace = Annotated[
    int | None,
    typer.Argument(
        metavar="[AT]",
        parser=place,
        help="An edit, a pin, an undo or a hidden message; default: the newest edit.",
        show_default=False,
    ),
]


@with_session
def undo(session: Session, at: UndoPlace = None, why: Why = "", json: Json = False) -> None:
    """Undo an edit, a pin or another undo.

    Edits can be undone in any order. If a later edit covers the same messages, they stay hidden until that
    edit is undone too; the output says so.

    \b
    Examples:
      refold undo chat        the newest edit
      refold undo chat 57     edit 57, or whatever hides or corrects message 57
    """
    before = session.inspect.tokens
    undone = session.undo(at, why=why)
    facts = {"did": "undo", "of": undone.of, "at": int(undone)}
    sentence = f"#{undone.of} is undone"
    if undone.covered_by is not None:
        facts["covered_by"] = undone.covered_by
        next_command = f"refold undo {quoted(session.conversation)} {undone.covered_by}"
        sentence += f", but #{undone.covered_by} still covers it: {next_command}"
    _report(session, before, json, facts, sentence)


@with_session
def restore(session: Session, at: At, why: Why = "", json: Json = False) -> None:
    """Show hidden messages again, in their old place.

    AT is the place of a message, which is restored with the calls and results it belongs to, or the place of
    an edit, which restores everything it covers.
    """
    before = session.inspect.tokens
    done = session.restore(at, why=why)
    _report(session, before, json, {"did": "restore", "of": at, "at": done}, f"#{at} is shown again")


@with_session
def correct(
    session: Session,
    at: At,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The new text; - reads stdin.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the text from a file.")
    ] = None,
    message: Annotated[
        bool, typer.Option("--message", help="The text is a message in JSON, in any dialect.")
    ] = False,
    why: Why = "",
    json: Json = False,
) -> None:
    """Show another text in the place of a message.

    The original stays in the record, and the correction can be undone. The calls of the message, or the call
    that it answers, do not change.

    \b
    Examples:
      refold correct chat 57 "The invoice is 4711, not 4117."
      refold correct chat 57 --file invoice.txt
      refold correct chat 57 - < invoice.txt
    """
    if (text is None) == (file is None):
        raise typer.BadParameter("give either a text or --file", param_hint="TEXT")
    given: Any
    try:
        if file is not None:
            given = file.read_text("utf-8")
        else:
            given = typer.get_text_stream("stdin").read() if text == "-" else text
    except UnicodeDecodeError as error:
        raise RefoldError(f"{file or 'stdin'} is not UTF-8: {error.reason}") from error
    if text is None or text == "-":
        given = given.removesuffix("\n")
    if message:
        try:
            given = loads(given.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise RefoldError(f"--message: the text is not JSON: {error}") from error
    before = session.inspect.tokens
    done = session.correct(at, given, why=why)
    _report(session, before, json, {"did": "correct", "of": at, "at": done}, f"#{at} is corrected")


@with_session
def pin(session: Session, at: At, why: Why = "", json: Json = False) -> None:
    """Keep a message in every view, with its calls and results."""
    before = session.inspect.tokens
    done = session.pin(at, why=why)
    event = session.inspect.event(done)
    assert isinstance(event, Pinned)
    places = [line.at for line in event.lines]
    others = [f"#{one}" for one in places if one != at]
    group = f" with {', '.join(others)}, its calls and results" if others else ""
    facts = {"did": "pin", "of": at, "at": done, "places": places}
    _report(session, before, json, facts, f"#{at} is pinned{group}")


@with_session
def unpin(session: Session, at: At, why: Why = "", json: Json = False) -> None:
    """Unpin a message."""
    before = session.inspect.tokens
    done = session.unpin(at, why=why)
    _report(session, before, json, {"did": "unpin", "of": at, "at": done}, f"#{at} is no longer pinned")


def _report(session: Session, before: int, json: bool, facts: dict[str, Any], sentence: str) -> None:
    after = session.inspect.tokens
    session.close()
    if json:
        about = {"conversation": session.conversation, "view": session.inspect.view_name}
        emit(about | facts | {"tokens": {"before": before, "after": after}})
        return
    tokens = f"{before:,} → {after:,} tokens"
    undo_command = f"refold undo {quoted(session.conversation)} {facts['at']}"
    say(f"{sentence} (event #{facts['at']}); the view has {tokens}. Undo it: {undo_command}")


def fork(
    id: Id,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The id of the fork.", show_default=False)],
    at: Annotated[
        int | None,
        typer.Option(
            "--at", metavar="N", parser=place, help="The last event that both share; default: the newest."
        ),
    ] = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Fork a conversation: the new one shares its events up to a place."""
    if not new:
        raise typer.BadParameter("expected at least one character", param_hint="NEW")
    with Access.to(store, config).session(id, owner) as session:
        state = session.fork(new, at=at).inspect.state
        shared = state.next - 1
        count = state.index
    if json:
        emit({"did": "fork", "conversation": new, "forked_from": id, "at": shared, "messages": count})
    else:
        say(f"{one_line(new)} shares {plural(count, 'message')} of {one_line(id)}, up to #{shared}.")


def delete(
    id: Id,
    with_forks: Annotated[bool, typer.Option("--with-forks", help="Erase its forks too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Erase a conversation. This cannot be undone."""
    access = Access.to(store, config)
    with access.open() as backend:
        key = existing(backend, access.shown, Key(owner, id))
        erased = [key]
        if with_forks:
            rows = list(backend.conversations())
            for one in erased:  # it grows: forks of forks follow
                erased += [row.key for row in rows if row.parent == one]
        names = [one.conversation for one in erased]
        if json and not yes:
            raise RefoldError("Nothing was erased. With --json nothing is asked: use --yes")
        question = f"Erase {', '.join(map(one_line, names))}? This cannot be undone."
        try:
            is_sure = yes or typer.confirm(question, err=True)
        except typer.Abort:  # no answer
            is_sure = False
        if not is_sure:
            raise RefoldError("Nothing was erased. Answer y, or use --yes")
        heirs = backend.erase(key, with_forks=with_forks)
    if json:
        emit({"did": "delete", "erased": names, "kept_by": [heir.conversation for heir in heirs]})
        return
    say(f"Erased: {', '.join(map(one_line, names))}")
    if heirs:
        say(f"Shared events are kept by: {', '.join(one_line(heir.conversation) for heir in heirs)}")
