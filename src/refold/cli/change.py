"""Commands that add to a record, or erase it: undo, restore, correct, pin, unpin, fork, delete."""

from pathlib import Path
from typing import Annotated, Any

import typer

from refold.cli.options import (
    Access,
    At,
    ConfigFile,
    Id,
    Json,
    Owner,
    StoreUrl,
    Why,
    conversing,
    existing,
    place,
)
from refold.cli.terminal import emit, say
from refold.cli.words import one_line, plural, quoted
from refold.core.codec import loads
from refold.core.errors import RefoldError
from refold.core.event import Pinned
from refold.session.session import Session
from refold.stores.store import ConversationInfo, Key

AnyAt = Annotated[
    int | None,
    typer.Argument(
        metavar="[AT]",
        parser=place,
        help="The edit, pin or undoing, or a message that is hidden; else the newest edit.",
        show_default=False,
    ),
]


@conversing
def undo(session: Session, at: AnyAt = None, why: Why = "", json: Json = False) -> None:
    """Take back an edit, a pin or an undoing.

    In any order. Where a later edit covers the same messages, what was taken back is not seen until that is
    undone too: then it says so.

    \b
    Examples:
      refold undo chat        the newest edit
      refold undo chat 57     edit 57, or whatever hides or corrects message 57
    """
    before = session.record.live.tokens
    done = session.undo(at, why=why)
    what = {"did": "undo", "of": done.of, "at": int(done)}
    sentence = f"#{done.of} is undone"
    if done.covered_by is not None:
        what["covered_by"] = done.covered_by
        then = f"refold undo {quoted(session.conversation)} {done.covered_by}"
        sentence += f", but #{done.covered_by} still covers it: {then}"
    _report(session, before, json, what, sentence)


@conversing
def restore(session: Session, at: At, why: Why = "", json: Json = False) -> None:
    """Show what is hidden in its old place again.

    For the place of a message, that message and the calls and results it belongs to; for the place of an
    edit, all that it covers.
    """
    before = session.record.live.tokens
    done = session.restore(at, why=why)
    _report(session, before, json, {"did": "restore", "of": at, "at": done}, f"#{at} is shown again")


@conversing
def correct(
    session: Session,
    at: At,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What it says now; - is stdin.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="The text is in a file.")
    ] = None,
    message: Annotated[
        bool, typer.Option("--message", help="The text is a whole message in JSON, of any dialect.")
    ] = False,
    why: Why = "",
    json: Json = False,
) -> None:
    """Show another text in the place of a message.

    The original stays in the record, and the correction can be undone. The calls that a message makes, or the
    one that it answers, stay as they are.

    \b
    Examples:
      refold correct chat 57 "The invoice is 4711, not 4117."
      refold correct chat 57 --file invoice.txt
      refold correct chat 57 - < invoice.txt
    """
    if (text is None) == (file is None):
        raise typer.BadParameter("give a text, or a file by --file", param_hint="TEXT")
    words = _words(text, file)
    before = session.record.live.tokens
    done = session.correct(at, _parsed(words) if message else words, why=why)
    _report(session, before, json, {"did": "correct", "of": at, "at": done}, f"#{at} is corrected")


def _words(text: str | None, file: Path | None) -> str:
    """As they were given; the line break at the end of a file is the file's."""
    try:
        if file is not None:
            return file.read_text("utf-8").removesuffix("\n")
        return typer.get_text_stream("stdin").read().removesuffix("\n") if text == "-" else text or ""
    except UnicodeDecodeError as error:
        raise RefoldError(f"{file or 'stdin'}: expected a text in UTF-8: {error.reason}") from error


def _parsed(words: str) -> Any:
    try:
        return loads(words.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise RefoldError(f"expected a message in JSON: {error}") from error


@conversing
def pin(session: Session, at: At, why: Why = "", json: Json = False) -> None:
    """Keep a message in every view, with its calls and results."""
    before = session.record.live.tokens
    done = session.pin(at, why=why)
    event = session.record.event(done)
    assert isinstance(event, Pinned)
    places = [line.at for line in event.lines]
    others = [f"#{one}" for one in places if one != at]
    group = f" with {', '.join(others)}, which it cannot be parted from" if others else ""
    what = {"did": "pin", "of": at, "at": done, "places": places}
    _report(session, before, json, what, f"#{at} is pinned{group}")


@conversing
def unpin(session: Session, at: At, why: Why = "", json: Json = False) -> None:
    """Take the pin off a message again."""
    before = session.record.live.tokens
    done = session.unpin(at, why=why)
    _report(session, before, json, {"did": "unpin", "of": at, "at": done}, f"#{at} is no longer pinned")


def _report(session: Session, before: int, json: bool, what: dict[str, Any], sentence: str) -> None:
    after = session.record.live.tokens
    session.close()
    if json:
        about = {"conversation": session.conversation, "view": session.record.view}
        emit(about | what | {"tokens": {"before": before, "after": after}})
    else:
        change = f"{before:,} → {after:,} tokens" if before != after else f"{after:,} tokens as before"
        say(f"{sentence} (event #{what['at']}); the view has {change}. Take it back: {_back(session, what)}")


def _back(session: Session, what: dict[str, Any]) -> str:
    return f"refold undo {quoted(session.conversation)} {what['at']}"


def fork(
    id: Id,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The id of the fork.", show_default=False)],
    at: Annotated[
        int | None, typer.Option("--at", metavar="N", parser=place, help="The last event they share.")
    ] = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Begin a conversation that shares the past of this one."""
    if not new:
        raise typer.BadParameter("an id has at least one character", param_hint="NEW")
    with Access.to(store, config).session(id, owner) as session:
        twin = session.fork(new, at=at)
        shared, count = twin.record.live.state.next - 1, twin.get_count()
    if json:
        emit({"did": "fork", "conversation": new, "forked_from": id, "at": shared, "messages": count})
    else:
        say(f"{one_line(new)} shares {plural(count, 'message')} of {one_line(id)}, up to #{shared}.")


def delete(
    id: Id,
    with_forks: Annotated[bool, typer.Option("--with-forks", help="Its forks too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Erase a conversation for good."""
    access = Access.to(store, config)
    with access.open() as backend:
        key = existing(backend, access.shown, Key(owner, id))
        rows = list(backend.conversations())
        forks = _forks(rows, key, deep=with_forks)
        if not yes:
            _ask(id, forks, with_forks)
        heirs = backend.erase(key, with_forks=with_forks)
    erased = [key, *(forks if with_forks else [])]
    names = [one.conversation for one in erased]
    if json:
        emit({"did": "delete", "erased": names, "kept_by": [heir.conversation for heir in heirs]})
        return
    say(f"Erased: {', '.join(map(one_line, names))}")
    if heirs:
        say(f"What they share lives on in: {', '.join(one_line(heir.conversation) for heir in heirs)}")


def _forks(rows: list[ConversationInfo], key: Key, *, deep: bool) -> list[Key]:
    found = [row.key for row in rows if row.parent == key]
    return found + [inner for one in found if deep for inner in _forks(rows, one, deep=True)]


def _ask(id: str, forks: list[Key], with_forks: bool) -> None:
    names = ", ".join(one_line(fork.conversation) for fork in forks)
    rest = f", and its forks {names}" if with_forks else f" (what its forks {names} share lives on there)"
    try:
        sure = typer.confirm(f"Erase {one_line(id)}{rest if forks else ''} for good?", err=True)
    except typer.Abort:
        sure = False
    if not sure:
        raise RefoldError("Nothing was erased. Answer y, or use --yes")
