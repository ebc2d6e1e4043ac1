"""What each persistence setting of a server can lose: `python tests/redis_loss.py` prints a table.

Four writers append messages, one after the other, until the server is killed in the middle; it is started
again, and what was acknowledged and is not there is lost. A kill does not lose what the kernel has yet to
write, as a power cut does. So the server's writes to its append-only file and its fsyncs are followed with
strace; a copy of the file is cut off behind what had been written when the last fsync began that came to its
end, and a server is started on that copy. A power cut at that moment can lose no more, as long as the disk
does not lie.
"""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import uniform
from typing import NamedTuple

from refold.core.codec import GENESIS, Entry
from refold.core.errors import StoreError
from refold.stores.redis import from_url
from refold.stores.store import Key
from servers import Valkey, remove

WRITERS = 4
ROUNDS = 5
SECONDS = (2.0, 4.0)
BODY = b'{"raw":{"role":"user","content":"' + b"words " * 50 + b'"}}'

AOF = ("--appendonly", "yes", "--appendfsync")
SETTINGS: dict[str, tuple[Sequence[str], str]] = {
    'nothing (`save ""`, `appendonly no`)': ((), ""),
    "snapshots as Valkey comes (`save 3600 1 300 100 60 10000`)": (("--save", "3600 1 300 100 60 10000"), ""),
    "snapshots every second (`save 1 1`)": (("--save", "1 1"), ""),
    "`appendonly yes`, `appendfsync everysec`": ((*AOF, "everysec"), ""),
    "the same, and `?wait_aof=1`": ((*AOF, "everysec"), "?wait_aof=1"),
    "`appendonly yes`, `appendfsync always`": ((*AOF, "always"), ""),
}


class Loss(NamedTuple):
    acknowledged: int
    lost: int
    seconds: float
    """Between the first that was lost and the end."""


def main() -> None:
    traced = shutil.which("strace") is not None
    print("| what the server keeps | lost when it is killed | lost when the power is cut |")
    print("|---|---|---|")
    for name, (options, query) in SETTINGS.items():
        kills, cuts = zip(*(one_round(options, query, traced) for _ in range(ROUNDS)), strict=True)
        print(f"| {name} | {told(kills)} | {told(cuts) if traced else 'not measured'} |", flush=True)


def told(losses: Sequence[Loss | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    lost, all = sum(loss.lost for loss in known), sum(loss.acknowledged for loss in known)
    if not lost:
        return f"0 of {all:,}"
    return f"{lost:,} of {all:,}, up to the last {max(loss.seconds for loss in known):.1f} s"


def one_round(options: Sequence[str], query: str, traced: bool) -> tuple[Loss, Loss | None]:
    """What was lost by a kill, and by a power cut at the same moment."""
    folder = Path(tempfile.mkdtemp(prefix="refold-loss-"))
    copy = folder / "copy"
    server = Valkey(folder / "server", *options).start()
    try:
        trace = Trace(server, folder / "trace") if traced and "--appendonly" in options else None
        with ThreadPoolExecutor(WRITERS) as pool:
            writing = [pool.submit(write, server.url + query, str(n)) for n in range(WRITERS)]
            time.sleep(uniform(*SECONDS))
            end = time.monotonic()
            server.kill()
            times = [one.result() for one in writing]
        shutil.copytree(folder / "server", copy, ignore=shutil.ignore_patterns("*.sock"))
        server.start()
        killed = lost(server, times, end)
        server.stop()
        if trace is None:
            cut = killed if traced else None  # snapshots are on disk before they get their name
        else:
            trace.cut_off(copy)
            server = Valkey(copy, *options).start()
            cut = lost(server, times, end)
    finally:
        server.stop()
        remove(folder)
    return killed, cut


def write(url: str, name: str) -> list[float]:
    """When each message was acknowledged."""
    times, digest = list[float](), GENESIS
    store = from_url(url + ("&" if "?" in url else "?") + "timeout_s=2")
    while True:
        try:
            digest = store.append(Key("", name), [Entry(len(times), "said", None, b"[]", BODY)], after=digest)
        except StoreError:
            return times
        times.append(time.monotonic())


def lost(server: Valkey, times: Sequence[Sequence[float]], end: float) -> Loss:
    store = from_url(server.url)
    there = {row.key.conversation: row.next for row in store.conversations()}
    gone = [at for n, acknowledged in enumerate(times) for at in acknowledged[there.get(str(n), 0) :]]
    return Loss(sum(map(len, times)), len(gone), end - min(gone, default=end))


class Trace:
    """How much of its append-only file a server has brought to the disk."""

    def __init__(self, server: Valkey, file: Path) -> None:
        self._file = file
        process = server._process
        assert process is not None
        command = ["strace", "-f", "-y", "-e", "trace=write,fdatasync,fsync", "-o", str(file)]
        self._process = subprocess.Popen([*command, "-p", str(process.pid)], stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        self._process.stderr.readline()  # it is attached
        (aof,) = server.folder.glob("appendonlydir/*.incr.aof")
        self._name, self._before = aof.name, aof.stat().st_size

    def cut_off(self, copy: Path) -> None:
        self._process.wait()
        with (copy / "appendonlydir" / self._name).open("r+b") as aof:
            aof.truncate(self._before + self._safe_bytes())

    def _safe_bytes(self) -> int:
        written = safe = 0
        begun: dict[str, int] = {}
        for thread, line in self._lines():
            if wrote := re.search(r"\bwrite.* = (\d+)$", line):
                written += int(wrote[1])
            elif "sync(" in line and "unfinished" in line:
                begun[thread] = written
            elif "sync resumed" in line:
                safe = max(safe, begun.pop(thread, 0))
            elif "sync(" in line:
                safe = written
        return safe

    def _lines(self) -> Iterator[tuple[str, str]]:
        """What was done to the append-only file, by which thread."""
        ours = dict[str, bool]()
        for line in self._file.read_text(errors="replace").splitlines():
            thread, _, rest = line.partition(" ")
            if "resumed>" not in rest:
                ours[thread] = self._name in rest
            if ours.get(thread):
                yield thread, rest


if __name__ == "__main__":
    main()
