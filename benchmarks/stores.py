"""What does a store cost beside its own engine? Appends as ratios to the same driver's bare insert.

python -m benchmarks.stores --store postgresql://… [--messages 100000] [--appends 2000]

The store and the floor take turns, so that whatever else the machine and the server do hits both alike. The
floor inserts the same bytes and nothing else: a row under a primary key in PostgreSQL and SQLite, an XADD in
Redis. Round trips are counted on the way, by a relay that sees what passes. A table and a stream named
refold_floor are made and dropped; the conversations are erased.
"""

import gc
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import typer

import refold
from refold.cli.bench.generate import conversation
from refold.core import codec
from refold.core.codec import GENESIS, Entry, chain
from refold.stores.store import Key, Store, open_store

OWNER = "bench"
BATCH = 500
MODEL: dict[str, Any] = {"models": {"m": {"window": 200_000, "max_output": 8_000}}}


class Floor(Protocol):
    """What somebody would write who only wants the bytes kept."""

    def append(self, entry: Entry, digest: bytes) -> None: ...

    def close(self) -> None: ...


class PostgresFloor:
    def __init__(self, url: str) -> None:
        import psycopg

        self.places = count()
        self.connection = psycopg.connect(_of_the_engine(url), autocommit=True)
        self.connection.execute("DROP TABLE IF EXISTS refold_floor")
        self.connection.execute(
            "CREATE TABLE refold_floor (cid bigint, at bigint, kind bytea, id bytea, head bytea, body bytea,"
            " digest bytea, PRIMARY KEY (cid, at))"
        )

    def append(self, entry: Entry, digest: bytes) -> None:
        values = (1, next(self.places), entry.kind.encode(), None, entry.head, entry.body, digest)
        insert = "INSERT INTO refold_floor VALUES (%s, %s, %s, %s, %s, %s, %s)"
        self.connection.execute(insert, values, prepare=True)

    def close(self) -> None:
        self.connection.execute("DROP TABLE refold_floor")
        self.connection.close()


class RedisFloor:
    def __init__(self, url: str) -> None:
        import redis

        self.client = redis.Redis.from_url(_of_the_engine(url))
        self.client.delete("refold_floor")

    def append(self, entry: Entry, digest: bytes) -> None:
        fields: Any = {"kind": entry.kind, "head": entry.head, "body": entry.body, "digest": digest}
        self.client.xadd("refold_floor", fields)

    def close(self) -> None:
        self.client.delete("refold_floor")
        self.client.close()


class SQLiteFloor:
    """In a file beside the store's."""

    def __init__(self, url: str) -> None:
        import apsw

        self.path = Path(url.removeprefix("sqlite:///").partition("?")[0] + ".floor")
        self.places = count()
        self.connection = apsw.Connection(str(self.path))
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self.connection.execute(f"PRAGMA {pragma}")
        self.connection.execute("CREATE TABLE log (at INTEGER PRIMARY KEY, kind, head, body, digest)")

    def append(self, entry: Entry, digest: bytes) -> None:
        values = (next(self.places), entry.kind, entry.head, entry.body, digest)
        self.connection.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", values)

    def close(self) -> None:
        self.connection.close()
        for file in self.path.parent.glob(self.path.name + "*"):
            file.unlink()


def floor(url: str) -> Floor:
    match urlsplit(url).scheme:
        case "postgresql" | "postgres":
            return PostgresFloor(url)
        case "redis" | "rediss" | "unix":
            return RedisFloor(url)
        case "sqlite":
            return SQLiteFloor(url)
        case scheme:
            raise typer.BadParameter(f"there is no floor for {scheme}://")


def _of_the_engine(url: str) -> str:
    """The URL without options that are refold's own."""
    plain, _, query = url.partition("?")
    theirs = ("host=", "port=", "user=", "password=", "dbname=", "ssl", "db=")
    return f"{plain}?{'&'.join(one for one in query.split('&') if one.startswith(theirs))}"


class Relay:
    """Stands between clients and a server on a socket, and counts how often a client waits for an answer."""

    def __init__(self, folder: Path, name: str, connect: Callable[[], socket.socket]) -> None:
        self.path, self.round_trips = folder / name, 0
        self._connect = connect
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen()
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server, answered = self._connect(), [True]
                for pair in ((client, server, True), (server, client, False)):
                    Thread(target=self._pass, args=(*pair, answered), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, asks: bool, answered: list[bool]) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 20):
                self.round_trips += asks and answered[0]
                answered[0] = not asks
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


@contextmanager
def relayed(url: str) -> Iterator[tuple[str, Relay | None]]:
    """The same store behind a relay that counts; none for an engine that needs no socket."""
    with tempfile.TemporaryDirectory() as folder:
        parts = urlsplit(url)
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        match parts.scheme:
            case "postgresql" | "postgres":
                from psycopg.conninfo import conninfo_to_dict

                known = conninfo_to_dict(_of_the_engine(url))
                host, port = str(known.get("host") or "localhost"), int(known.get("port") or 5432)
                target = _unix(f"{host}/.s.PGSQL.{port}") if host.startswith("/") else _tcp(host, port)
                kept = [one for one in parts.query.split("&") if not one.startswith(("host=", "port="))]
                query = "&".join(filter(None, [*kept, f"host={folder}"]))
                relay = Relay(Path(folder), ".s.PGSQL.5432", target)
                url = f"postgresql://{user}{parts.path}?{query}"
            case "redis":
                target = _tcp(parts.hostname or "localhost", parts.port or 6379)
                relay = Relay(Path(folder), "redis.sock", target)
                query = "&".join(filter(None, [parts.query, f"db={parts.path.strip('/') or 0}"]))
                url = f"unix://{user}{relay.path}?{query}"
            case "unix":
                relay = Relay(Path(folder), "redis.sock", _unix(parts.path))
                url = f"unix://{user}{relay.path}?{parts.query}"
            case _:
                yield url, None
                return
        with closing(relay):
            yield url, relay


def _unix(path: str) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(path)
        return made

    return connect


def _tcp(host: str, port: int) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection((host, port))


def entries(messages: int) -> Iterator[Entry]:
    """Of the size that messages have."""
    for at, message in enumerate(conversation(messages, seed=7)):
        body = codec.dumps({"time": time.time(), "dialect": "openai-chat", "raw": message})
        yield Entry(at, "said", None, b'["assistant",120,%d,1,1,4000]' % at, body)


def appends(store: Store, beside: Floor, many: int) -> tuple[list[float], list[float]]:
    """Seconds of each append: through the store, and bare."""
    key, digest = Key(OWNER, uuid4().hex), GENESIS
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    for entry in entries(many):
        after, digest = digest, chain(digest, entry)

        def through(entry: Entry = entry, after: bytes = after) -> None:
            store.append(key, [entry], after=after)

        def bare(entry: Entry = entry, digest: bytes = digest) -> None:
            beside.append(entry, digest)

        for k in (0, 1) if entry.at % 2 else (1, 0):
            times[k].append(_time((through, bare)[k]))
    gc.enable()
    store.erase(key)
    return times


def view(url: str, messages: int) -> tuple[float, int | None]:
    """Milliseconds and round trips until whoever opens a conversation has its view with all its words."""
    name = uuid4().hex
    with refold.open(name, store=url, owner=OWNER, model="m", config=MODEL) as chat:
        source = conversation(messages, seed=3)
        while batch := [message for message, _ in zip(source, range(BATCH), strict=False)]:
            chat.append(batch)
            chat.fit()
    with relayed(url) as (behind, relay), closing(open_store(behind)) as store:
        times, trips = list[float](), list[int]()
        for _ in range(9):
            before = relay.round_trips if relay else 0
            times.append(_time(lambda: _view(store, name)))
            trips.append(relay.round_trips - before if relay else 0)
        store.erase(Key(OWNER, name))
    return at(0.5, times) * 1e3, min(trips) if relay else None


def _view(store: Store, name: str) -> None:
    chat = refold.open(name, store=store, owner=OWNER, model="m", config=MODEL)
    assert len(chat.view().messages) > 1


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def at(share: float, times: list[float]) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def main(
    store: Annotated[str, typer.Option(help="URL of a store: postgresql://, redis://, unix://, sqlite:///.")],
    messages: Annotated[int, typer.Option(help="Of the conversation that is opened; 0 for none.")] = 100_000,
    appended: Annotated[int, typer.Option("--appends", help="Appends that are measured.")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Times that appends are measured.")] = 3,
) -> None:
    """How much longer an append takes than a bare insert, and what it takes to open a long conversation."""
    with closing(open_store(store)) as opened, closing(floor(store)) as beside:
        appends(opened, beside, 200)  # connections are made, statements prepared
        runs = [appends(opened, beside, appended) for _ in range(rounds)]
    print("| append | through the store | bare insert | ratio | of each round |")
    print("|---|---:|---:|---:|---|")
    for share in (0.5, 0.95):
        ours, bare = (sorted(at(share, run[k]) * 1e6 for run in runs)[rounds // 2] for k in (0, 1))
        ratios = sorted(at(share, run[0]) / at(share, run[1]) for run in runs)
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        middle = ratios[rounds // 2]
        print(f"| p{share * 100:.0f} | {ours:,.0f} µs | {bare:,.0f} µs | {middle:.2f} | {each} |")
    if messages:
        ms, trips = view(store, messages)
        told = "no network" if trips is None else f"{trips} round trips"
        print(f"\nopen + view of {messages:,} messages: {ms:.1f} ms, {told}")


if __name__ == "__main__":
    typer.run(main)
