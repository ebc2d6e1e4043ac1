"""SQL as files: numbered migrations and named queries, a folder per engine."""

import re
from functools import cache
from importlib.resources import files

from refold.core.codec import FORMAT
from refold.core.errors import NewerError


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


def require_known(where: str, schema: int, known_schema: int, format: int) -> None:
    """
    Raises:
        NewerError: only a newer refold knows the schema or the format of a database.
    """
    if schema > known_schema or format > FORMAT:
        raise NewerError(
            f"{where} was written by a newer refold (schema {schema}, format {format}; this one"
            f" knows {known_schema} and {FORMAT}). Upgrade refold to open it; nothing was changed."
        )
