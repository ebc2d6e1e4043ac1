"""Your own conversations, to be replayed: exports of refold, files with histories, and stores."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import refold
from refold.cli.bench.probes import extracted
from refold.cli.bench.trace import MODEL, Json, Trace, counted
from refold.core.errors import CorruptError, NotFoundError
from refold.session.export import export_lines, load_lines
from refold.session.files import FileConversation, conversations, export_in, read_file
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key, Store, open_store
from refold.stores.url import shown_url

DIALECT = "openai-chat"
"""Whatever a conversation was in, it is replayed in this one."""
SQLITE = b"SQLite format 3"
ENDINGS = (".json", ".jsonl")
AS_SAID: Json = {"models": {MODEL: {"window": 10**12}}, "agents": {"default": {"compact": "off"}}}


class Which(NamedTuple):
    """Which conversations."""

    owner: str = "default"
    """Of a store."""
    ids: Sequence[str] = ()
    """All where none is named."""


def traces(data: str, which: Which) -> Iterator[Trace]:
    """The conversations of a file, a folder of files, or a store.

    Raises:
        NotFoundError: there is nothing of that name.
        MessageError: says which message of which line cannot be read.
    """
    if "://" in data:
        yield from _stored(data, shown_url(data), which)
        return
    path = Path(data)
    if not path.exists():
        raise NotFoundError(
            f"There is no {data}; give a folder, a file of messages or exports, or the URL of a store"
        )
    files = sorted(one for one in path.iterdir() if one.suffix in ENDINGS) if path.is_dir() else [path]
    if not files:
        raise NotFoundError(f"{data} has no files that end in {' or '.join(ENDINGS)}, and no folder traces")
    for file in files:
        with file.open("rb") as opened:
            is_database = opened.read(len(SQLITE)) == SQLITE
        if is_database:
            yield from _stored(f"sqlite:///{file}", file.stem, which)
        else:
            yield from _read(file)


def _stored(url: str, source: str, which: Which) -> Iterator[Trace]:
    file = Path(url.removeprefix("sqlite:///").partition("?")[0])
    if url.startswith("sqlite:///") and not file.exists():
        raise NotFoundError(f"There is no store at {file}")  # opening it would make one
    store = open_store(url)
    try:
        there = [row.key.conversation for row in store.conversations(which.owner)]
        if missing := sorted(set(which.ids) - set(there)):
            raise NotFoundError(f"There is no conversation {missing[0]!r} in {shown_url(url)}")
        for id in which.ids or there:
            copy = MemoryStore()  # a session on the store itself might be told to memories
            yield _recorded(
                copy, load_lines(export_lines(store, Key(which.owner, id)), copy, None, None), source
            )
    finally:
        store.close()


def _read(file: Path) -> Iterator[Trace]:
    data, store = read_file(str(file)), MemoryStore()
    lines = export_in(data)
    if lines is not None:
        try:
            key = load_lines(lines, store, None, None)
        except CorruptError as error:
            raise CorruptError(f"{file}: {error}") from error
        yield _recorded(store, key, file.stem)
        return
    for n, given in enumerate(conversations(data, str(file)), 1):
        key = Key("default", given.id or f"{file.stem}-{n}")
        session = Session(store, key, model=MODEL)
        session.say(_clean(given).drafts(session.intake()))
        yield _recorded(store, key, str(given.beside.get("source") or file.stem))


def _clean(given: FileConversation) -> FileConversation:
    """The same without what whoever recorded it has added to each message."""
    if not any(isinstance(one, dict) and any(key.startswith("x_") for key in one) for one in given.messages):
        return given
    said = [{k: v for k, v in one.items() if not k.startswith("x_")} for one in given.messages]
    return FileConversation(given.where, {**given.beside, given.name: said}, given.name, None)


def _recorded(store: Store, key: Key, source: str) -> Trace:
    """All that was said in a conversation, as one request; edits that were made of it are left out."""
    said = [one.message for one in Session(store, key).get_all() if not one.message.summary]
    whole = refold.open("whole", store="memory://", model=MODEL, config=AS_SAID)
    whole.append(said)
    messages = whole.fit(dialect=DIALECT).messages
    counts, probes = counted(messages, DIALECT), extracted(messages, key.conversation)
    return Trace(source, DIALECT, messages, counts, probes, id=key.conversation)
