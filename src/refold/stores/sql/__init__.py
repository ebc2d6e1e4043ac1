"""SQL as files, numbered migrations and named queries, a folder per engine; and what the engines share."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from refold.core.codec import FORMAT, to_bytes
from refold.core.errors import NewerError
from refold.core.event import Expiry
from refold.stores.packing import to_text
from refold.stores.store import StoreProblem, ToolSetting

RunQuery: TypeAlias = Callable[..., list[Any]]
"""Runs a query by its name, with its values by name."""


@cache
def queries(engine: str) -> dict[str, str]:
    text = (files(__package__) / engine / "queries.sql").read_text()
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {name: query.strip() for name, query in zip(parts[1::2], parts[2::2], strict=True)}


@cache
def migrations(engine: str) -> tuple[str, ...]:
    """What leads from an empty database to the current schema, in order."""
    found = [file for file in (files(__package__) / engine).iterdir() if file.name[0].isdigit()]
    return tuple(file.read_text() for file in sorted(found, key=lambda file: file.name))


def is_current(run: RunQuery, engine: str, where: str) -> bool:
    """False if the database is empty or older.

    Raises:
        NewerError: only a newer refold knows it.
    """
    return _versions(run, engine, where) == (len(migrations(engine)), FORMAT)


def migrate(run: RunQuery, engine: str, where: str, execute: Callable[[str], object]) -> None:
    """Must be called in a transaction that nobody else can be in."""
    schema, _ = _versions(run, engine, where)
    for step in migrations(engine)[schema:]:
        execute(step)
    run("create_schema")
    run("clear_schema")
    run("set_schema", version=len(migrations(engine)), format=FORMAT)


def _versions(run: RunQuery, engine: str, where: str) -> tuple[int, int]:
    """Of the schema and the format; zeros for an empty database."""
    rows = run("get_schema") if run("has_schema")[0][0] else []
    schema, format = rows[0] if rows else (0, 0)
    if schema > len(migrations(engine)) or format > FORMAT:
        raise NewerError(
            f"{where} was written by a newer refold (schema {schema}, format {format}; this one"
            f" knows {len(migrations(engine))} and {FORMAT}). Upgrade refold to open it; nothing was changed."
        )
    return schema, format


def delete_unshared(run: RunQuery, cid: int | None, seal: Callable[[int], object]) -> None:
    """Deletes what no fork shares of an erased conversation, then the same of its erased ancestors."""
    while cid is not None and (rows := run("buried", cid=cid)):
        parent, fork_at, shared = rows[0]
        keep = max(fork_at, shared or 0)
        for query in ("erase_entries", "erase_words", "erase_vectors"):
            run(query, cid=cid, at=keep)
        if keep > fork_at:
            seal(cid)
            return
        for (fork,) in run("hand_over", cid=cid, parent=parent):
            seal(fork)
        run("erase_followed", cid=cid)
        run("erase_conversation", cid=cid)
        cid = parent


def read_settings(run: RunQuery) -> list[ToolSetting]:
    found: list[ToolSetting] = []
    for row in run("settings"):
        texts: list[Any] = [to_text(value) if isinstance(value, bytes) else value for value in row]
        agent, tool, *values = texts
        found.append(ToolSetting(agent, tool, Expiry(*values)))
    return found


def write_setting(run: RunQuery, setting: ToolSetting) -> None:
    name = {"agent": to_bytes(setting.agent), "tool": to_bytes(setting.tool)}
    values = {field: getattr(setting.expiry, field) for field in Expiry.__struct_fields__}
    values["prompt"] = None if values["prompt"] is None else to_bytes(values["prompt"])
    run("unset_setting", **name)
    if setting.expiry != Expiry():
        run("set_setting", **name, **values)


def row_problems(
    where: str, altered: Iterable[bytes | None], strays: Iterable[Sequence[Any]]
) -> Iterator[StoreProblem]:
    """Problems of the names of altered conversations, and of counts of rows that belong to none."""
    for name in altered:
        shown_name = (name or b"(erased)").decode("utf-8", "replace")
        yield StoreProblem(f"conversation {shown_name!r}", "its row was altered: name, owner or fork")
    for what, count in strays:
        yield StoreProblem(where, f"{count} {what} belong to no conversation")
