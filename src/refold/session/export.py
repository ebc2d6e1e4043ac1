"""Export of a conversation as lines of JSON, and import byte for byte, verified by its hash chain."""

import base64
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from refold.core.codec import FORMAT, GENESIS, Entry, chain, dumps
from refold.core.errors import ConflictError, CorruptError, NewerError
from refold.stores.store import Key, Store


def export_lines(store: Store, key: Key) -> Iterator[str]:
    """A header, a line for each event, and a footer with their number, in JSON."""
    yield _dump({"refold": FORMAT, "owner": key.owner, "conversation": key.conversation})
    count = 0
    digest = GENESIS
    for entry, digest in store.read(key):
        count += 1
        line: dict[str, Any] = {"at": entry.at, "kind": entry.kind}
        if entry.id is not None:
            line["id"] = entry.id
        is_json = _is_json(entry.head) and _is_json(entry.body) and _is_json(dumps(entry.id))
        if is_json:
            line |= {"head": msgspec.Raw(entry.head), "body": msgspec.Raw(entry.body)}
        else:  # a lone surrogate, or an event of a newer version
            line["head_base64"] = base64.b64encode(entry.head).decode()
            line["body_base64"] = base64.b64encode(entry.body).decode()
        yield _dump({**line, "digest": digest.hex()})
    yield _dump({"end": count, "digest": digest.hex()})


def load_lines(lines: Iterable[str], store: Store, conversation: str | None, owner: str | None) -> Key:
    """Stores an exported conversation, under another id or owner if one is given.

    Raises:
        CorruptError: a line is not what was exported; says which.
        ConflictError: the store already has a conversation with this id.
    """
    lines = lines.splitlines() if isinstance(lines, str) else lines
    numbered = ((n, line) for n, line in enumerate(lines, 1) if line.strip())
    n, first = next(numbered, (1, ""))
    if not first:
        raise CorruptError("There is nothing to load: the export is empty")
    header = _parse(n, first, dict[str, Any])
    version = header.get("refold")
    if not isinstance(version, int):
        raise CorruptError(f"Line {n}: this is not an export of refold: it names no format")
    if version > FORMAT:
        raise NewerError(f"Line {n}: exported by a newer refold (format {version}; this one knows {FORMAT})")
    name = conversation or header.get("conversation")
    if not isinstance(name, str):
        raise CorruptError(f"Line {n}: the conversation has no id; give it one")
    key = Key(owner or str(header.get("owner", "default")), name)
    entries = list(_entries(numbered))  # all verified before anything is stored
    if next(store.read(key, 0, 1), None) is not None:
        raise ConflictError(
            f"There is a conversation {key.conversation!r} already; load this under another id"
        )
    if entries:
        store.append(key, entries)
    return key


class _Line(msgspec.Struct):
    digest: str
    end: int | None = None
    at: int = -1
    kind: str = ""
    id: str | None = None
    head: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()
    head_base64: str = ""
    body_base64: str = ""


def _entries(numbered: Iterable[tuple[int, str]]) -> Iterator[Entry]:
    digest = GENESIS
    for at, (n, text) in enumerate(numbered):
        line = _parse(n, text, _Line)
        if line.end is not None and (line.end, line.digest) == (at, digest.hex()):
            return
        entry = Entry(line.at, line.kind, line.id, _bytes(n, line, "head"), _bytes(n, line, "body"))
        digest = chain(digest, entry)
        if line.at != at or digest.hex() != line.digest:
            raise CorruptError(f"Line {n}: event {line.at} is not what was exported: the file was changed")
        yield entry
    raise CorruptError("The export is not complete: its last line is missing; export it again")


def _bytes(n: int, line: _Line, name: str) -> bytes:
    try:
        return bytes(getattr(line, name)) or base64.b64decode(getattr(line, f"{name}_base64"), validate=True)
    except ValueError as error:
        raise CorruptError(f"Line {n}: {name}_base64 is not valid base64: {error}") from error


def _parse(n: int, line: str, type: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line.encode("utf-8", "surrogatepass"), type=type)
    except (msgspec.DecodeError, RecursionError) as error:
        with suppress(ValueError, RecursionError):  # an id with a lone surrogate
            return msgspec.convert(json.loads(line), type)
        raise CorruptError(f"Line {n}: {error}") from error


def _dump(value: Any) -> str:
    return dumps(value).decode()


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return b"\n" not in data and b"\r" not in data
