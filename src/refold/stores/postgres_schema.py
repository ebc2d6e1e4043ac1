"""The tables of a PostgreSQL store: created, migrated, and refused if only a newer refold knows them."""

import psycopg

from refold.core.codec import FORMAT
from refold.core.errors import StoreError
from refold.stores.postgres_connection import PostgresQueries
from refold.stores.postgres_pool import PostgresPool
from refold.stores.sql import migrations, require_known

OLDEST_SERVER = 13


def open_schema(pool: PostgresPool) -> None:
    """Creates or migrates the tables, in one transaction, if they are not there or older.

    Raises:
        NewerError: only a newer refold knows them.
        StoreError: the server is too old, or uses another encoding.
    """

    def work(run: PostgresQueries) -> None:
        _require_server(pool, run)
        if _version(pool, run) != (len(migrations("postgres")), FORMAT):
            with run.connection.transaction():
                _migrate(pool, run)

    pool.run(work)


def _require_server(pool: PostgresPool, run: PostgresQueries) -> None:
    info = run.connection.info
    if info.server_version < OLDEST_SERVER * 10_000:
        raise StoreError(f"{pool.shown} is older than PostgreSQL {OLDEST_SERVER}; upgrade the server")
    encoding = info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreError(f"{pool.shown} uses the encoding {encoding}; create a database with UTF8")


def _migrate(pool: PostgresPool, run: PostgresQueries) -> None:
    run.lift_timeouts()
    try:
        run("lock_schema")
    except psycopg.errors.LockNotAvailable as error:
        problem = f"another migration is running and did not finish within {pool.timeout_s:g} s"
        raise StoreError(f"{pool.shown}: {problem}; retry later") from error
    run("lift_lock_timeout")
    if pool.options.schema is not None and not run("has_namespace", name=pool.options.schema)[0][0]:
        run.connection.execute(f"CREATE SCHEMA {pool.options.settings['schema']}".encode())
    version, _ = _version(pool, run)
    for step in migrations("postgres")[version:]:
        run.connection.execute(step.encode())
    for query in ("create_schema", "clear_schema"):
        run(query)
    run("set_schema", version=len(migrations("postgres")), format=FORMAT)


def _version(pool: PostgresPool, run: PostgresQueries) -> tuple[int, int]:
    """Of the schema and of the format."""
    rows = run("get_schema") if run("has_schema")[0][0] else []
    version, format = rows[0] if rows else (0, 0)
    require_known(pool.shown, version, len(migrations("postgres")), format)
    return version, format
