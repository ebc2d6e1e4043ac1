"""Reads the conversations to replay.

DATA is one of these:
  a folder with traces/*.jsonl and probes/*.jsonl, one conversation or probe a line
  a file that `refold export` wrote, a JSON or JSONL file of histories, or a folder of such files
  a SQLite file, or the URL of a store
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

import refold
from refold.cli.bench.trace import (
    DIALECT,
    EVERYTHING,
    MODEL,
    Json,
    Probe,
    Trace,
    counted,
    extracted,
    text_of,
    with_key,
)
from refold.cli.options import Access
from refold.core.errors import CorruptError, NotFoundError
from refold.session.export import export_lines
from refold.session.files import conversations, export_in, read_file
from refold.session.session import Session
from refold.stores.url import shown_url

MIN_TOKENS = 8_000
"""Smaller conversations fit any real window."""
SQLITE = b"SQLite format 3"
ENDINGS = (".json", ".jsonl")


def load(
    data: Path | str,
    source: str | None = None,
    least: int = MIN_TOKENS,
    *,
    owner: str = "default",
    ids: Sequence[str] = (),
) -> list[Trace]:
    """The conversations with at least so many tokens, the longest first.

    Raises:
        NotFoundError: there is none.
        MessageError: says which message of which line cannot be read.
    """
    known = list(_read(str(data), owner, ids))
    if source is not None:
        known = [trace for trace in known if trace.source == source]
    sizes = [sum(trace.counts) for trace in known]
    large = [_with_known_probes(trace) for trace, size in zip(known, sizes, strict=True) if size >= least]
    if not large:
        of = f" of source {source!r}" if source else ""
        raise NotFoundError(
            f"{data} has no conversation{of} with {least:,} tokens; the largest of {len(known):,} has"
            f" {max(sizes, default=0):,}. --least TOKENS takes smaller ones"
        )
    return sorted(large, key=lambda trace: -len(trace.messages))


def _read(data: str, owner: str, ids: Sequence[str]) -> Iterator[Trace]:
    if "://" in data:
        yield from _stored(data, shown_url(data), owner, ids)
        return
    path = Path(data)
    if not path.exists():
        raise NotFoundError(
            f"There is no {data}; give a folder, a file of messages or exports, or the URL of a store"
        )
    if (path / "traces").is_dir():
        yield from (trace for trace in _folder(path) if not ids or trace.id in ids)
        return
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in ENDINGS)
        if not files:
            endings = " or ".join(ENDINGS)
            raise NotFoundError(f"{data} has no files that end in {endings}, and no folder traces")
    for file in files:
        with file.open("rb") as opened:
            is_database = opened.read(len(SQLITE)) == SQLITE
        if is_database:
            yield from _stored(f"sqlite:///{file}", file.stem, owner, ids)
        else:
            yield from (trace for trace in _file(file) if not ids or trace.id in ids)


def _folder(folder: Path) -> Iterator[Trace]:
    probes = defaultdict[str, list[Probe]](list)
    for line in _lines(folder / "probes"):
        probes[line["conversation"]].append(msgspec.convert(line, Probe))
    for line in _lines(folder / "traces"):
        if line["format"] != "openai":
            continue
        messages = [_without_notes(message) for message in line["messages"]]
        needed = probes[line["id"]] if probes else extracted(messages, line["id"])
        yield Trace(line["source"], messages, counted(messages), needed, id=line["id"])


def _lines(folder: Path) -> Iterator[Json]:
    for file in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, file.read_bytes().splitlines())


def _without_notes(message: Json) -> Json:
    """The message without fields that the recorder added."""
    return {key: value for key, value in message.items() if not key.startswith("x_")}


def _stored(url: str, source: str, owner: str, ids: Sequence[str]) -> Iterator[Trace]:
    access = Access.to(url, owner=owner)
    with access.open() as store:
        known = [row.key.conversation for row in store.conversations(owner)]
        for key in [access.existing(store, id) for id in ids or known]:
            lines = export_lines(store, key)
            with refold.load(lines, store="memory://") as copy:  # nothing may reach a memory service
                yield _rendered(copy, key.conversation, source)


def _file(file: Path) -> Iterator[Trace]:
    data = read_file(str(file))
    lines = export_in(data)
    if lines is not None:
        try:
            chat = refold.load(lines, store="memory://")
        except CorruptError as error:
            raise CorruptError(f"{file}: {error}") from error
        with chat:
            yield _rendered(chat, chat.conversation, file.stem)
        return
    for n, given in enumerate(conversations(data, str(file)), 1):
        id = given.id or f"{file.stem}-{n}"
        with refold.open(id, store="memory://", model=MODEL) as chat:
            chat.say(given.drafts(chat.intake()))
            yield _rendered(chat, id, str(given.fields.get("source") or file.stem))


def _rendered(chat: Session, id: str, source: str) -> Trace:
    """All recorded messages as one request, without edits and summaries."""
    recorded = [stored.message for stored in chat.get_all() if not stored.message.summary]
    with refold.open(id, store="memory://", model=MODEL, config=EVERYTHING) as whole:
        whole.append(recorded)
        messages = [_without_notes(message) for message in whole.fit(dialect=DIALECT).messages]
    return Trace(source, messages, counted(messages), extracted(messages, id), id=id)


def _with_known_probes(trace: Trace) -> Trace:
    """The trace with only those probes whose value occurs before its use, and with their keys."""
    texts = [text_of(message) for message in trace.messages] if trace.probes else []
    probes: list[Probe] = []
    for probe in trace.probes:
        if any(probe.value in text for text in texts[: probe.use_at]):
            probes.append(with_key(probe, trace.messages))
    return replace(trace, probes=probes, dropped=len(trace.probes) - len(probes))
