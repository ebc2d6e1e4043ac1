"""Whether a step takes longer when the conversation is longer: times as ratios to a floor in the same run.

The floor of an append is a bare INSERT into SQLite with the same durability. The floor of a fit is a walk
over the cached counts of what is shown, and the encoding of the request.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median

import apsw
import msgspec

import refold
from refold.cli.bench.generate import conversation
from refold.cli.bench.tables import BenchTable
from refold.cli.bench.trace import Json
from refold.cli.terminal import progress

SIZES = (100, 1_000, 10_000, 100_000)
STEPS_PER_SIZE = 200
BATCH = 500
OPENINGS = 15
TITLES = ("messages", "append", "× raw", "fit", "× floor", "shown", "open + fit", "file", "× raw")


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of many steps; the mean includes snapshots and edits."""

    median_us: float
    mean_us: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        return cls(round(median(seconds) * 1e6, 1), round(mean(seconds) * 1e6, 1))

    def over(self, floor: "Times") -> str:
        return f"{self.median_us / floor.median_us:.2f} / {self.mean_us / floor.mean_us:.2f}"

    def __str__(self) -> str:
        return f"{self.median_us:,.0f} / {self.mean_us:,.0f} µs"


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """The times at one size of conversation."""

    messages: int
    append: Times
    raw_append: Times
    fit: Times
    floor: Times
    shown: int
    open_ms: float
    file_mb: float
    raw_file_mb: float


def measure_all(sizes: Sequence[int]) -> list[SpeedRow]:
    """Measures each size, with a progress bar."""
    rows: list[SpeedRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            with progress(f"{size:,} messages", size) as advance:
                rows.append(measure(size, Path(folder), advance))
    return rows


def table(rows: Sequence[SpeedRow]) -> BenchTable:
    cells: list[list[str]] = []
    for row in rows:
        append = [f"{row.append}", row.append.over(row.raw_append)]
        fit = [f"{row.fit}", row.fit.over(row.floor)]
        file = [f"{row.file_mb:,.2f} MB", f"{row.file_mb / row.raw_file_mb:.2f}"]
        cells.append([f"{row.messages:,}", *append, *fit, f"{row.shown:,}", f"{row.open_ms:.1f} ms", *file])
    return BenchTable("A step, by the messages before it", TITLES, cells, texts=0)


def measure(size: int, folder: Path, advance: Callable[[int], None]) -> SpeedRow:
    """Appends and fits step by step, after so many messages."""
    url = f"sqlite:///{folder}/refold-{size}.db"
    raw = RawLog(folder / f"raw-{size}.db")
    source = conversation(size + 2 * STEPS_PER_SIZE, seed=size)
    appends: list[float] = []
    raw_appends: list[float] = []
    fits: list[float] = []
    floors: list[float] = []
    with refold.open("task", store=url) as chat:
        for batch in batches(source, size):
            chat.append(batch)
            raw.append(batch)
            chat.fit()
            advance(len(batch))
        file_mb = _megabytes(folder, f"refold-{size}")
        raw_mb = _megabytes(folder, f"raw-{size}")
        gc.collect()
        gc.disable()
        for step in batches(source, 2 * STEPS_PER_SIZE, 2):
            for message in step:
                appends.append(seconds(partial(chat.append, message)))
                raw_appends.append(seconds(partial(raw.append, [message])))
            fits.append(seconds(chat.fit))
            shown = chat.fit().messages
            counts = [line.tokens for line in chat.view().lines]
            floors.append(seconds(partial(_floor, shown, counts)))
        gc.enable()
    opens = [seconds(partial(_open, url)) for _ in range(OPENINGS)]
    return SpeedRow(
        size,
        append=Times.of(appends),
        raw_append=Times.of(raw_appends),
        fit=Times.of(fits),
        floor=Times.of(floors),
        shown=len(shown),
        open_ms=median(opens) * 1e3,
        file_mb=file_mb,
        raw_file_mb=raw_mb,
    )


class RawLog:
    """A table of messages: what a program would write that only wants to keep them."""

    def __init__(self, path: Path) -> None:
        self._db = apsw.Connection(str(path))
        self._db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
        self._db.execute("CREATE TABLE log (id TEXT, at INTEGER, body TEXT, PRIMARY KEY (id, at))")
        self._at = 0

    def append(self, messages: Sequence[Json]) -> None:
        if len(messages) > 1:
            self._db.execute("BEGIN")
        for message in messages:
            body = msgspec.json.encode(message).decode()
            self._db.execute("INSERT INTO log VALUES (?, ?, ?)", ("task", self._at, body))
            self._at += 1
        if len(messages) > 1:
            self._db.execute("COMMIT")


def _floor(messages: list[Json], counts: list[int]) -> bytes:
    total = 0
    for count in counts:
        total += count
    return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": total})


def _open(url: str) -> None:
    chat = refold.open("task", store=url)
    chat.fit()
    chat.store.close()


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def batches(source: Iterator[Json], count: int, size: int = BATCH) -> Iterator[list[Json]]:
    """The next `count` messages, in batches."""
    while count > 0 and (batch := list(islice(source, min(size, count)))):
        yield batch
        count -= len(batch)


def _megabytes(folder: Path, stem: str) -> float:
    """The size of the file and of its write-ahead log, after a checkpoint."""
    db = apsw.Connection(str(folder / f"{stem}.db"))
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return sum(file.stat().st_size for file in folder.glob(f"{stem}.db*")) / 1e6
