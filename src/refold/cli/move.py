"""Commands that bring conversations in and out: import, export."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from refold.cli.options import (
    DEFAULT_OWNER,
    Access,
    ConfigFile,
    DialectOption,
    InFile,
    Json,
    OutFile,
    Owner,
    StoreUrl,
    blaming_damage,
    existing,
    intake_for,
)
from refold.cli.options import ids as known_ids
from refold.cli.terminal import emit, progress, say, writing
from refold.cli.words import one_line, plural, quoted
from refold.config.config import Config
from refold.core.draft import Draft
from refold.core.errors import ConflictError, MessageError, RefoldError, StoreError
from refold.dialects.registry import TARGETS
from refold.session.export import export_lines, load_lines
from refold.session.files import FileConversation, conversations, export_in, read_file
from refold.session.intake import Intake
from refold.session.session import Session
from refold.stores.store import Key, Store

BATCH = 5_000
"""Messages stored in one go."""
MOST_NAMED = 10
"""Conversations that an import names one by one."""


class _Stored(NamedTuple):
    id: str
    messages: int
    tokens: int


def import_(
    file: InFile,
    id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Its id; else the one in the file, or its name.")
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Go on with a conversation there is.")] = False,
    dialect: DialectOption = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Whose tokens are counted.")
    ] = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
    json: Json = False,
) -> None:
    """Store conversations from a file.

    The file has an export of refold, a JSON list of messages in any dialect, a request with such a list
    as `messages` or `input`, or a line for each conversation. The JSON of a message is kept as it is written.
    """
    access = Access.to(store, config)
    data = read_file(file)
    lines = export_in(data)
    if lines is not None:
        with access.open(create=True) as backend:
            key = load_lines(lines, backend, id, owner)
            state = Session(backend, key).record.live.state
            done = [_Stored(key.conversation, state.index, state.total)]
    else:
        name = "stdin" if file == "-" else file
        intake = intake_for(access.config, model, dialect)
        drafts = _drafts(conversations(data, name), id, file, intake)
        with access.open(create=True) as backend:
            done = _store(backend, drafts, owner, append)
    if json:
        emit({"did": "import", "store": access.shown, "conversations": [one._asdict() for one in done]})
        return
    for one in done[:MOST_NAMED]:
        say(f"{one_line(one.id)}: {plural(one.messages, 'message')}, {plural(one.tokens, 'token')}")
    if len(done) > MOST_NAMED:
        say(f"… and {len(done) - MOST_NAMED:,} more conversations")
    say(f"See it: refold show {quoted(done[0].id)}" if len(done) == 1 else "See them: refold list")


def _drafts(
    found: Sequence[FileConversation], id: str | None, file: str, intake: Intake
) -> dict[str, list[Draft]]:
    """All messages by conversation, understood before anything is stored."""
    if id is not None and len(found) > 1:
        raise typer.BadParameter(
            f"the file has {len(found)} conversations, one id is not enough", param_hint="--id"
        )
    drafts: dict[str, list[Draft]] = {}
    with progress("Reading", sum(one.count for one in found)) as advance:
        for n, one in enumerate(found, 1):
            name = id or one.id or _named_after(file, n if len(found) > 1 else None)
            if name in drafts:
                raise ConflictError(f"{one.where}: the id {name!r} stands in the file twice")
            drafts[name] = one.drafts(intake, advance)
            if not drafts[name]:
                raise MessageError(one.where, "has no messages: there is nothing to store")
    return drafts


def _named_after(file: str, n: int | None) -> str:
    stem = Path(file).stem if file != "-" else ""
    if not stem:
        raise typer.BadParameter("say which conversation this is", param_hint="--id")
    return stem if n is None else f"{stem}-{n}"


def _store(store: Store, drafts: dict[str, list[Draft]], owner: str, append: bool) -> list[_Stored]:
    taken = {row.key.conversation for row in store.conversations(owner)} & drafts.keys()
    if taken and not append:
        name = min(taken)
        raise ConflictError(
            f"There is a conversation {name!r} already; --append adds to it, --id stores under another id"
        )
    done = []
    with progress("Storing", sum(map(len, drafts.values()))) as advance:
        for id, new in drafts.items():
            with blaming_damage(id):
                session = Session(store, Key(owner, id))
            for start in range(0, len(new), BATCH):
                batch = new[start : start + BATCH]
                try:
                    session.say(batch)
                except RefoldError as error:
                    raise StoreError(
                        f"{error} ({start:,} of {len(new):,} messages of {id!r} are stored)"
                    ) from error
                advance(len(batch))
            session.record.save()  # no run has ended here: nothing is pruned
            done.append(_Stored(id, len(new), sum(one.tokens for one in new)))
    return done


def export(
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="ID…", help="The conversations.", autocompletion=known_ids, show_default=False
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="F", help=f"As an API takes it: {', '.join(TARGETS)}."),
    ] = None,
    view: Annotated[
        bool,
        typer.Option("--view", help="With --format: what the model is shown now, not all that was said."),
    ] = False,
    out: OutFile = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = DEFAULT_OWNER,
    json: Json = False,
) -> None:
    """Write a whole record as lines, for `refold import`.

    With --format, for evals and fine-tuning: a line for each conversation, a JSON object with its `messages`
    as the API takes them, and `system` where the API has it apart.

    \b
    Examples:
      refold export chat -o chat.jsonl                            to the byte, for `refold import`
      refold export chat other --format openai-chat -o train.jsonl
      refold export chat --format anthropic --view                what the model is shown now
    """
    if format is None and view:
        raise typer.BadParameter("needs --format: a record is exported whole", param_hint="--view")
    if format is None and len(ids) > 1:
        raise typer.BadParameter("several conversations need --format", param_hint="ID")
    access = Access.to(store, config)
    with access.open() as backend:
        keys = [existing(backend, access.shown, Key(owner, id), for_reading=True) for id in ids]
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
    told: dict[str, Any]
    if format is not None:
        told = {"did": "export", "conversations": ids, "format": format, "file": str(out)}
        sentence = f"{plural(count, 'conversation')} in {one_line(str(out))}"
    else:
        count -= 2  # the first and the last line are no events
        told = {"did": "export", "conversation": ids[0], "events": count, "file": str(out)}
        sentence = f"{one_line(ids[0])}: {plural(count, 'event')} in {one_line(str(out))}"
    if json:
        emit(told)
    else:
        say(sentence)


def _exported(
    store: Store, config: Config, keys: Sequence[Key], format: str | None, view: bool
) -> Iterator[bytes]:
    for key in keys:
        with blaming_damage(key.conversation):
            lines = Session(store, key, config=config).export(format, view=view) if format else None
            for line in lines or export_lines(store, key):
                yield line.encode() + b"\n"
