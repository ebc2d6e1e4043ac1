"""A proxy before a server that cuts connections after so many bytes: at every point of an append's exchange.

python tests/proxy.py postgresql|valkey [--every 1]
"""

import argparse
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Literal, NamedTuple, Self

import refold
from hammer import retried
from refold.stores.store import Key, open_store
from refold.testing.samples import assert_view_is_fold, verified
from servers import ALWAYS, Postgres, Valkey, remove

Way = Literal["asked", "answered"]
WAYS: tuple[Way, Way] = ("asked", "answered")
"""What the client sends, and what the server sends."""
ABRUPT = struct.pack("ii", 1, 0)
"""A connection is reset instead of ended."""


class Proxy:
    """On a port of this machine, before a server's socket in a file."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self.on_cut: Callable[[Way], None] | None = None
        """Is told before a connection ends."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = Lock()
        self._way: Way | None = None
        self._left = 0
        self._is_abrupt = False
        self._open = set[socket.socket]()
        self.passed = Counter[str]()
        """Bytes, by the way they went."""
        self.cuts = 0
        Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def cut(self, way: Way | None, after: int = 0, *, abrupt: bool = False) -> None:
        """Lets so many more bytes pass on a way, and then ends the connection that the next one comes by."""
        with self._lock:
            self._way, self._left, self._is_abrupt = way, after, abrupt

    def close(self) -> None:
        self._socket.close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._server))
            except OSError:
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open |= {client, server}
            for way, source, sink in zip(WAYS, (client, server), (server, client), strict=True):
                Thread(target=self._pump, args=(way, source, sink, client), daemon=True).start()

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                whole = len(data)
                with self._lock:
                    is_cut = self._way == way and whole > self._left
                    if self._way == way:
                        data = data[: self._left]
                        self._left -= len(data)
                    if is_cut:
                        self._way, self.cuts = None, self.cuts + 1
                        if self._is_abrupt:
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
                    self.passed[way] += len(data)
                sink.sendall(data)
                if is_cut:
                    if self.on_cut is not None:
                        self.on_cut(way)
                    break
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._open.discard(one)


class Done(NamedTuple):
    points: int
    cuts: int
    stored: Counter[str]
    """Messages that were there at the moment of the cut, by the way that was cut."""
    errors: Counter[str]
    """What the caller was told, and retried; of other cuts the store itself made good."""


class Cutting:
    """Appends by way of a proxy, one message for each point at which the connection is cut."""

    def __init__(self, engine: str, proxy: Proxy, direct: str) -> None:
        self._proxy, self._direct = proxy, open_store(direct)
        name = direct.partition("?")[0].rpartition("/")[2]
        self._url = (
            f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}"
            if engine == "postgresql"
            else f"redis://127.0.0.1:{proxy.port}"
        )
        self._points, self._stored, self._errors = 0, Counter[str](), Counter[str]()
        self._expected: dict[str, list[str]] = {}
        self._saying = (Key("default", ""), "")
        proxy.on_cut = self._look

    def _look(self, way: Way) -> None:
        key, name = self._saying
        self._stored[way] += name in self._direct.find(key, [name])  # type: ignore[attr-defined]

    def established(self, *every: int) -> None:
        """On a connection that is there already."""
        store = open_store(self._url)
        session = refold.open("established", store=store)
        self._cut_all(partial(self._say, session), every)
        store.close()

    def anew(self, *every: int) -> None:
        """On a connection that is made for it: all that is said at its beginning is cut as well."""
        self._cut_all(self._say_anew, every)

    def _cut_all(self, say: Callable[[str], None], every: Sequence[int]) -> None:
        say("warm")
        for way, stride in zip(WAYS, every, strict=True):
            before = self._proxy.passed[way]
            say(f"{way} uncut.")
            for n in range(0, self._proxy.passed[way] - before, stride):
                self._proxy.cut(way, n, abrupt=n % 2 == 1)
                say(f"{way} {n:06}")
                self._proxy.cut(None)
                self._points += 1

    def _say_anew(self, name: str) -> None:
        where = f"anew {name}"  # each in a conversation of its own: it is read at its beginning

        def append() -> int:
            store = open_store(self._url)
            try:
                return _append(refold.open(where, store=store), name)
            finally:
                store.close()

        self._acknowledge(where, name, append)

    def _say(self, session: refold.Session, name: str) -> None:
        self._acknowledge(session.conversation, name, lambda: _append(session, name))

    def _acknowledge(self, where: str, name: str, append: Callable[[], int]) -> None:
        """Whoever is told an error tries again, with the same id."""
        expected = self._expected.setdefault(where, [])
        expected.append(name)
        self._saying = (Key("default", where), name)
        place = retried(append, self._errors)
        assert place == len(expected) - 1, f"{name!r} was acknowledged at {place}"

    def demand(self) -> Done:
        """Each is there once, in order."""
        for where, names in self._expected.items():
            assert [entry.id for entry in verified(self._direct, Key("default", where))] == names
        assert_view_is_fold(refold.open("established", store=self._direct))
        self._direct.close()
        return Done(self._points, self._proxy.cuts, self._stored, self._errors)


def _append(session: refold.Session, name: str) -> int:
    return session.append({"role": "user", "content": f"This is {name}."}, id=name)


def run(
    engine: str, server: Postgres | Valkey, direct: str, established: Sequence[int], anew: Sequence[int]
) -> Done:
    """Cuts at every so many bytes of what is asked, and of what is answered.

    Raises:
        AssertionError: a message is lost, stored twice or out of order.
    """
    with Proxy(server.socket) as proxy:
        cutting = Cutting(engine, proxy, direct)
        cutting.established(*established)
        cutting.anew(*anew)
        return cutting.demand()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("postgresql", "valkey"))
    parser.add_argument("--every", type=int, default=1, help="bytes between two points")
    asked = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="refold-cuts-")), time.monotonic()
    server = Postgres(folder) if asked.engine == "postgresql" else Valkey(folder, *ALWAYS)
    server.start()
    direct = server.database() if isinstance(server, Postgres) else server.url
    every = (asked.every, asked.every)
    done = run(asked.engine, server, direct, every, every)
    server.stop()
    remove(folder)
    for error, many in done.errors.most_common(20):
        print(f"{many:6,} × {error}")
    print(
        f"{asked.engine}: {done.points:,} points, {done.cuts:,} connections cut, of which"
        f" {done.stored['answered']:,} kept the answer to what was stored already from whoever asked;"
        f" {sum(done.errors.values()):,} errors were retried; each is there once, in order;"
        f" {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
