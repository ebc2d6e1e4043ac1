"""The URL of a PostgreSQL store: refold's options, and what libpq is told."""

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, quote

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from refold.core.errors import SettingError
from refold.stores.url import ENCODING_HELP, require_between, split_url

KEEPALIVES_S = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
MAX_NAME_BYTES = 63
OPTIONS = (
    "refold's own options are pool_size, timeout_s, statement_timeout_s and schema; all others are libpq's,"
    " such as sslmode, host or target_session_attrs"
)
_OURS: dict[str, Callable[[str], int | float | str]] = {
    "pool_size": int,
    "timeout_s": float,
    "statement_timeout_s": float,
    "schema": str,
}


class PostgresOptions:
    """Where a store is, and how it is used.

    Raises:
        SettingError: an option is not known, or its value is not allowed.
    """

    def __init__(
        self, url: str, pool_size: int, timeout_s: float, statement_timeout_s: float, schema: str | None
    ) -> None:
        self.shown = shown(url)
        where = f"store {self.shown!r}"
        require_between(where, 1, 1e6, pool_size=pool_size)
        require_between(where, 0.001, 1e6, timeout_s=timeout_s, statement_timeout_s=statement_timeout_s)
        if schema is not None and (problem := _name_problem(schema)):
            raise SettingError(where, f"schema {problem}: use another name, or leave it out; {OPTIONS}")
        try:
            known = conninfo_to_dict(url)
        except ProgrammingError as error:
            odd = re.search(r'query parameter: "([a-z_]+)"', "" if "password=" in url else str(error))
            problem = f"{odd[1]} is not an option" if odd else f"is not a PostgreSQL URL; {ENCODING_HELP}"
            raise SettingError(where, f"{problem}; {OPTIONS}") from None
        self.url = url
        self.schema = schema
        self.pool_size = pool_size
        self.timeout_s = timeout_s
        self.limit_s = statement_timeout_s + timeout_s
        """Of one statement, with the round trip and the wait for a lock."""
        waits = {"connect_timeout": max(2, round(timeout_s)), "tcp_user_timeout": round(timeout_s * 1000)}
        defaults = {"application_name": "refold", **waits, **KEEPALIVES_S}
        self.arguments: dict[str, Any] = {name: v for name, v in defaults.items() if name not in known}
        """For libpq, besides the URL."""
        self.settings = {
            "schema": None if schema is None else '"' + schema.replace('"', '""') + '"',
            "statement_ms": str(round(statement_timeout_s * 1000)),
            "lock_ms": str(round(timeout_s * 1000)),
            "idle_ms": str(round(self.limit_s * 1000)),
        }
        """For the query that configures a session."""
        self._options = str(known.get("options") or os.environ.get("PGOPTIONS", ""))

    @property
    def connect_args(self) -> dict[str, Any]:
        """For a pool of another kind, to the same database and schema."""
        arguments = dict(self.arguments)
        if self.schema is not None:
            schema = str(self.settings["schema"]).replace("\\", "\\\\").replace(" ", "\\ ")
            arguments["options"] = f"{self._options} -c search_path={schema}".strip()
        return {"conninfo": self.url, "kwargs": arguments}


def split_options(url: str) -> tuple[str, dict[str, Any]]:
    """Splits the URL for libpq from refold's options.

    Raises:
        SettingError: the URL is ambiguous, or an option is not a number.
    """
    plain = url.partition("?")[0]
    options = dict[str, Any]()
    theirs = list[str]()
    for name, value in parse_qsl(split_url(url).query, keep_blank_values=True):
        if name not in _OURS:
            theirs.append(f"{name}={quote(value, safe='')}")
            continue
        try:
            options[name] = _OURS[name](value)
        except ValueError:
            problem = f"{name}={value} is not a number; {OPTIONS}"
            raise SettingError(f"store {shown(url)!r}", problem) from None
    return f"{plain}?{'&'.join(theirs)}" if theirs else plain, options


def shown(url: str) -> str:
    """A URL to show: without user name, password and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _name_problem(schema: str) -> str:
    """What is wrong with the name of a schema; empty if nothing is."""
    if not 0 < len(schema.encode()) <= MAX_NAME_BYTES:
        return f"is empty or longer than {MAX_NAME_BYTES} bytes"
    if "\0" in schema:
        return "has a NUL in it"
    return "must not be $user, which differs for each user" if schema == "$user" else ""
