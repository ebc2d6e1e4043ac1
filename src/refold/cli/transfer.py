"""Commands that move conversations between files and stores: import, export, copy."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from refold.cli.format import one_line, plural, quoted
from refold.cli.options import (
    Access,
    DialectOption,
    InFile,
    Json,
    OutFile,
    argument,
    flag,
    option,
    reporting_damage,
    with_owner,
)
from refold.cli.options import ids as known_ids
from refold.cli.terminal import at_most, complain, emit, progress, say, writing
from refold.config.config import Config
from refold.core.draft import Draft
from refold.core.errors import ConflictError, MessageError, NotFoundError, RefoldError, StoreError
from refold.dialects.registry import TARGETS
from refold.session.copy import copy as copy_conversations
from refold.session.copy import copy_settings
from refold.session.export import export_lines, load_lines
from refold.session.files import conversations, export_in, intake_for, read_file
from refold.session.session import Session
from refold.stores.store import Key, Store
from refold.stores.url import shown_url

MESSAGES_PER_TRANSACTION = 5_000
MAX_PRINTED_CONVERSATIONS = 10


class ImportedConversation(msgspec.Struct, frozen=True):
    id: str
    messages: int
    tokens: int


@with_owner
def import_(
    access: Access,
    file: InFile,
    id: Annotated[
        str | None, option("The id; default: the id in the file, or the file's name.", "ID")
    ] = None,
    append: Annotated[bool, flag("Append to an existing conversation.", "--append")] = False,
    dialect: DialectOption = None,
    model: Annotated[str | None, option("The model whose tokens are counted.", "M")] = None,
    json: Json = False,
) -> None:
    """Import conversations from a file.

    The file contains an export of refold, a JSON list of messages in any dialect, a request with such a list
    as `messages` or `input`, or one conversation per line. The JSON of each message is kept byte for byte.
    """
    data = read_file(file)
    lines = export_in(data)
    # Nothing is stored before everything is parsed.
    drafts = _drafts(data, id, file, access.config, model, dialect) if lines is None else {}
    with access.open(create=True) as backend:
        if lines is None:
            done = _store(backend, drafts, access.owner, append)
        else:
            key = load_lines(lines, backend, id, access.owner)
            state = Session(backend, key).inspect.state
            done = [ImportedConversation(key.conversation, state.index, state.total)]
    if json:
        emit({"did": "import", "store": access.shown, "conversations": done})
        return
    texts = list[str]()
    for one in done:
        texts.append(f"{one_line(one.id)}: {plural(one.messages, 'message')}, {plural(one.tokens, 'token')}")
    for text in at_most(texts, MAX_PRINTED_CONVERSATIONS):
        say(text)
    say(f"Show it: refold show {quoted(done[0].id)}" if len(done) == 1 else "List them: refold list")


def _drafts(
    data: bytes, id: str | None, file: str, config: Config, model: str | None, dialect: str | None
) -> dict[str, list[Draft]]:
    """The messages of a file by the conversations they go to."""
    found = conversations(data, "stdin" if file == "-" else file)
    if id is not None and len(found) > 1:
        raise typer.BadParameter(f"the file has {len(found)} conversations", param_hint="--id")
    intake = intake_for(config, model, dialect)
    drafts: dict[str, list[Draft]] = {}
    with progress("Reading", sum(len(one.messages) for one in found)) as advance:
        for n, one in enumerate(found, 1):
            name = id or one.id
            if not name and file == "-":
                raise typer.BadParameter("required, as stdin has no file name", param_hint="--id")
            if not name:
                name = f"{Path(file).stem}-{n}" if len(found) > 1 else Path(file).stem
            if name in drafts:
                raise ConflictError(f"{one.where}: the file has the id {name!r} twice")
            drafts[name] = one.drafts(intake)
            advance(len(one.messages))
            if not drafts[name]:
                raise MessageError(one.where, "has no messages")
    return drafts


def _store(
    store: Store, drafts: dict[str, list[Draft]], owner: str, append: bool
) -> list[ImportedConversation]:
    taken = {row.key.conversation for row in store.conversations(owner)} & drafts.keys()
    if taken and not append:
        name = min(taken)
        raise ConflictError(
            f"The conversation {name!r} already exists; --append adds to it, --id imports under another id"
        )
    done = []
    with progress("Storing", sum(map(len, drafts.values()))) as advance:
        for id, new in drafts.items():
            with reporting_damage(id):
                session = Session(store, Key(owner, id))
            for start in range(0, len(new), MESSAGES_PER_TRANSACTION):
                batch = new[start : start + MESSAGES_PER_TRANSACTION]
                try:
                    session.say(batch)
                except RefoldError as error:
                    raise StoreError(
                        f"{error} ({start:,} of {len(new):,} messages of {id!r} are stored)"
                    ) from error
                advance(len(batch))
            session.save_snapshot()  # not close: no run has ended, so nothing is pruned
            done.append(ImportedConversation(id, len(new), sum(one.tokens for one in new)))
    return done


@with_owner
def export(
    access: Access,
    ids: Annotated[list[str], argument("The conversations.", "ID…", autocompletion=known_ids)],
    format: Annotated[str | None, option(f"The format of an API: {', '.join(TARGETS)}.", "F")] = None,
    view: Annotated[
        bool, flag("With --format: the current view instead of all recorded messages.", "--view")
    ] = False,
    out: OutFile = None,
    json: Json = False,
) -> None:
    """Export the whole record as JSON lines, for `refold import`.

    With --format, for evals and fine-tuning: one line per conversation, a JSON object with its `messages` in
    the API's format, and `system` if the API has it as a separate field.

    \b
    Examples:
      refold export chat -o chat.jsonl                            byte for byte, for `refold import`
      refold export chat other --format openai-chat -o train.jsonl
      refold export chat --format anthropic --view                the current view
    """
    if format is None and view:
        raise typer.BadParameter("requires --format", param_hint="--view")
    if format is None and len(ids) > 1:
        raise typer.BadParameter("several conversations require --format", param_hint="ID")
    with access.open() as backend:
        keys = [access.existing(backend, id, for_reading=True) for id in ids]
        lines = _exported(backend, access.config, keys, format, view)
        if out is None:
            for line in lines:
                typer.echo(line, nl=False)
            return
        count = 0
        with writing(out) as file:
            for line in lines:
                file.write(line)
                count += 1
    name = one_line(str(out))
    if json:
        emit({"did": "export", "conversations": ids, "format": format, "file": str(out), "lines": count})
    elif format is not None:
        say(f"{plural(count, 'conversation')} in {name}")
    else:
        say(f"{one_line(ids[0])}: {plural(count - 2, 'event')} in {name}")  # first and last lines are none


def _exported(
    store: Store, config: Config, keys: Sequence[Key], format: str | None, view: bool
) -> Iterator[bytes]:
    for key in keys:
        with reporting_damage(key.conversation):
            lines = Session(store, key, config=config).export(format, view=view) if format else None
            for line in lines or export_lines(store, key):
                yield line.encode() + b"\n"


def copy(
    source: Annotated[str, argument("The URL of the source store.", "FROM")],
    target: Annotated[str, argument("The URL of the target store.", "TO")],
    id: Annotated[list[str] | None, option("Only this conversation; may be repeated.", "ID")] = None,
    owner: Annotated[str | None, option("Only this owner's conversations; default: all.", "NAME")] = None,
    json: Json = False,
) -> None:
    """Copy conversations from one store to another.

    Copies whole records byte for byte, and verifies each event by the hash chain on both sides. What TO
    already has is not copied again: run it again after an interruption, or to copy new events. Forks stay
    forks if both stores support them. FROM is not changed.
    """
    if source == target:
        raise typer.BadParameter("is the same store as FROM", param_hint="TO")
    with Access.to(source).open() as old:
        rows = list(old.conversations(owner))
        of_owner = "" if owner is None else f" of owner {owner!r}"
        if missing := {*(id or ())} - {row.key.conversation for row in rows}:
            raise NotFoundError(f"There is no conversation {min(missing)!r}{of_owner} in {shown_url(source)}")
        if of_owner and not rows:
            raise NotFoundError(f"There are no conversations{of_owner} in {shown_url(source)}")
        rows = [row for row in rows if not id or row.key.conversation in id]
        with Access.to(target).open(create=True) as new:
            with progress("Copying", sum(row.next for row in rows)) as advance:
                copied = list(copy_conversations(old, new, rows, advance))
            settings = 0 if id or owner is not None else copy_settings(old, new)
    failed = [one for one in copied if one.problem]
    if json:
        facts = {"from": shown_url(source), "to": shown_url(target), "settings": settings}
        emit({"did": "copy", **facts, "conversations": copied})
    else:
        for one in failed:
            complain(f"{one_line(one.conversation)}: {one.problem}")
        new_events = sum(one.new for one in copied)
        old_events = sum(one.events for one in copied) - new_events
        skipped = f", {old_events:,} already there" if old_events else ""
        say(f"{plural(len(copied), 'conversation')}: {plural(new_events, 'event')} copied{skipped}")
    if failed:
        raise typer.Exit(1)
