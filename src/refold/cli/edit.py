"""Commands that edit, fork or erase a conversation: undo, restore, correct, pin, unpin, fork, delete."""

from pathlib import Path
from typing import Annotated, Any

import typer

from refold.cli.format import one_line, plural, quoted
from refold.cli.options import (
    Access,
    At,
    Id,
    Json,
    Why,
    argument,
    flag,
    option,
    place,
    with_owner,
    with_session,
)
from refold.cli.terminal import emit, say
from refold.core.codec import loads
from refold.core.errors import RefoldError
from refold.core.event import Pinned
from refold.session.session import Session
from refold.stores.store import with_its_forks

UNDO_HELP = "An edit, a pin, an undo or a hidden message; default: the newest edit."


@with_session
def undo(
    session: Session,
    at: Annotated[int | None, argument(UNDO_HELP, "[AT]", parser=place)] = None,
    why: Why = "",
    json: Json = False,
) -> None:
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
    text: Annotated[str | None, argument("The new text; - reads stdin.", "TEXT")] = None,
    file: Annotated[Path | None, option("Read the text from a file.", "FILE")] = None,
    message: Annotated[bool, flag("The text is a message in JSON, in any dialect.", "--message")] = False,
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
    given: Any = text
    try:
        if file is not None:
            given = file.read_text("utf-8").removesuffix("\n")
        elif text == "-":
            given = typer.get_text_stream("stdin").read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RefoldError(f"{file or 'stdin'} is not UTF-8: {error.reason}") from error
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


@with_owner
def fork(
    access: Access,
    id: Id,
    new: Annotated[str, argument("The id of the fork.", "NEW")],
    at: Annotated[
        int | None, option("The last event that both share; default: the newest.", "N", parser=place)
    ] = None,
    json: Json = False,
) -> None:
    """Fork a conversation: the new one shares its events up to a place."""
    if not new:
        raise typer.BadParameter("expected at least one character", param_hint="NEW")
    with access.session(id) as session:
        state = session.fork(new, at=at).inspect.state
    shared = state.next - 1
    if json:
        emit({"did": "fork", "conversation": new, "forked_from": id, "at": shared, "messages": state.index})
    else:
        say(f"{one_line(new)} shares {plural(state.index, 'message')} of {one_line(id)}, up to #{shared}.")


@with_owner
def delete(
    access: Access,
    id: Id,
    with_forks: Annotated[bool, flag("Erase its forks too.", "--with-forks")] = False,
    yes: Annotated[bool, flag("Do not ask for confirmation.", "--yes", "-y")] = False,
    json: Json = False,
) -> None:
    """Erase a conversation. This cannot be undone."""
    with access.open() as backend:
        key = access.existing(backend, id)
        erased = with_its_forks(key, backend.conversations()) if with_forks else [key]
        names = [one.conversation for one in erased]
        shown = ", ".join(map(one_line, names))
        if json and not yes:
            raise RefoldError("Nothing was erased. With --json nothing is asked: use --yes")
        try:
            is_sure = yes or typer.confirm(f"Erase {shown}? This cannot be undone.", err=True)
        except typer.Abort:  # no answer
            is_sure = False
        if not is_sure:
            raise RefoldError("Nothing was erased. Answer y, or use --yes")
        heirs = [heir.conversation for heir in backend.erase(key, with_forks=with_forks)]
    if json:
        emit({"did": "delete", "erased": names, "kept_by": heirs})
        return
    say(f"Erased: {shown}")
    if heirs:
        say(f"Shared events are kept by: {', '.join(map(one_line, heirs))}")
