"""How hard the tests look (`HYPOTHESIS_PROFILE=long pytest` takes its time), and servers that they share."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from servers import ALWAYS, Postgres, Valkey, remove

pytest.register_assert_rewrite(
    "refold.testing", "panel_world"
)  # failures inside the contract show their values
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
os.environ["MEM0_TELEMETRY"] = "False"  # before anybody imports it: nothing is reported from tests
os.environ.setdefault("MEM0_DIR", str(Path(tempfile.gettempdir()) / "refold-mem0"))
settings.register_profile("usual", deadline=None)
settings.register_profile("long", deadline=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes is begun first, so that nobody waits for it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL of one's own, for as long as the tests of this process take."""
    folder = Path(tempfile.mkdtemp(prefix="refold-postgres-"))  # a socket's path must be short
    server = Postgres(folder, "fsync=off", "full_page_writes=off").start()  # it is killed, not its machine
    yield server
    server.kill()
    remove(folder)


@pytest.fixture
def postgres_url(postgres):
    """A new, empty database."""
    return postgres.database()


@pytest.fixture(scope="session")
def valkey():
    """A Valkey of one's own that loses nothing it acknowledged."""
    folder = Path(tempfile.mkdtemp(prefix="refold-valkey-"))
    server = Valkey(folder, *ALWAYS).start()
    yield server
    server.stop()
    remove(folder)


@pytest.fixture
def valkey_url(valkey):
    """The server, with nothing in it."""
    import redis

    with redis.Redis(unix_socket_path=str(valkey.socket)) as client:
        client.flushall()
        client.function_flush()
    return valkey.url
