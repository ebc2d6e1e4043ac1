"""Does a step cost more when the conversation is longer? Times as ratios to a floor in the same run.

The floor of an append is a bare INSERT into SQLite with the same durability. The floor of a fit is a
walk over the cached counts of what is shown, and the encoding of the request's body. The floor of a first
count is the tokenizer alone on the same texts.
"""

import gc
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import apsw
import msgspec
import typer

import refold
from refold.cli.bench.generate import conversation
from refold.cli.bench.tables import Sheet, show, write
from refold.core.message import Message
from refold.dialects import openai_chat
from refold.models.count import counter, encoder

SIZES = (100, 1_000, 10_000, 100_000)
STEPS = 200
"""Messages appended and fitted, one by one, at each size."""
BATCH = 500
COUNTED = 5_000
"""Messages that are counted for the first time."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of many steps, in microseconds: the usual one, and the average with its snapshots and edits."""

    median_us: float
    mean_us: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Times":
        return cls(round(median(seconds) * 1e6, 1), round(mean(seconds) * 1e6, 1))

    def over(self, floor: "Times") -> str:
        return f"{self.median_us / floor.median_us:.2f} / {self.mean_us / floor.mean_us:.2f}"

    def __str__(self) -> str:
        return f"{self.median_us:,.0f} / {self.mean_us:,.0f} µs"


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One size."""

    messages: int
    append: Times
    raw_append: Times
    fit: Times
    floor: Times
    shown: int
    open_ms: float
    file_mb: float
    raw_file_mb: float

    @property
    def file_ratio(self) -> float:
        return self.file_mb / self.raw_file_mb


class RawLog:
    """What somebody would write who only wants the messages kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = apsw.Connection(str(path))
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute(
            "CREATE TABLE log (conversation TEXT, at INTEGER, body TEXT, PRIMARY KEY (conversation, at))"
        )
        self.at = 0

    def append(self, messages: list[dict[str, Any]]) -> None:
        if len(messages) > 1:
            self.db.execute("BEGIN")
        for message in messages:
            body = msgspec.json.encode(message).decode()
            self.db.execute("INSERT INTO log VALUES (?, ?, ?)", ("task", self.at, body))
            self.at += 1
        if len(messages) > 1:
            self.db.execute("COMMIT")


def measure(size: int, folder: Path, progress: Callable[[int], None] = lambda n: None) -> SpeedRow:
    url, raw = f"sqlite:///{folder}/refold-{size}.db", RawLog(folder / f"raw-{size}.db")
    source = conversation(size + 2 * STEPS, seed=size)
    with refold.open("task", store=url) as chat:
        for batch in batches(source, size):
            chat.append(batch)
            raw.append(batch)
            chat.fit()
            progress(len(batch))
        file_mb, raw_mb = _megabytes(folder, f"refold-{size}"), _megabytes(folder, f"raw-{size}")
        appends, raws, fits, floors = list[float](), list[float](), list[float](), list[float]()
        gc.collect()
        gc.disable()
        for step in batches(source, 2 * STEPS, 2):
            for message in step:
                appends.append(timed(lambda m=message: chat.append(m)))  # type: ignore[misc]
                raws.append(timed(lambda m=message: raw.append([m])))  # type: ignore[misc]
            fits.append(timed(chat.fit))
            shown = chat.fit().messages
            counts = [line.tokens for line in chat.view().lines]
            floors.append(timed(lambda s=shown, c=counts: _floor(s, c)))  # type: ignore[misc]
        gc.enable()
    opens = [timed(lambda: _open(url)) for _ in range(15)]
    append, raw_append, fit, floor = map(Times.of, (appends, raws, fits, floors))
    open_ms = Times.of(opens).median_us / 1_000
    return SpeedRow(size, append, raw_append, fit, floor, len(shown), open_ms, file_mb, raw_mb)


def _floor(messages: list[dict[str, Any]], counts: list[int]) -> bytes:
    total = 0
    for count in counts:
        total += count
    return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": total})


def _open(url: str) -> None:
    chat = refold.open("task", store=url)
    chat.fit()
    chat.store.close()


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def batches(
    source: Iterator[dict[str, Any]], count: int, size: int = BATCH
) -> Iterator[list[dict[str, Any]]]:
    while count > 0 and (batch := list(islice(source, min(size, count)))):
        yield batch
        count -= len(batch)


def _megabytes(folder: Path, stem: str) -> float:
    """The file and what is still in its write-ahead log, after a checkpoint."""
    db = apsw.Connection(str(folder / f"{stem}.db"))
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return sum(file.stat().st_size for file in folder.glob(f"{stem}.db*")) / 1e6


def count_ratio(tries: int = 5) -> float:
    """How fast messages are counted that were never seen, as a share of the tokenizer's own speed."""
    from splintr import Tokenizer

    messages = [openai_chat.parse(message) for message in conversation(COUNTED, seed=1)]
    texts = [text for message in messages for text in _texts(message)]
    own, ours = list[float](), list[float]()
    for _ in range(tries):
        encode = Tokenizer.from_pretrained("o200k_base").encode_flat
        encoder.cache_clear()  # a new one, for it remembers what it has seen
        count = counter("gpt-5")
        count.text("loads the vocabulary")
        own.append(timed(lambda e=encode: [len(e(text)) for text in texts]))  # type: ignore[misc]
        ours.append(timed(lambda c=count: [c.message(message) for message in messages]))  # type: ignore[misc]
    return min(own) / min(ours)


def _texts(message: Message) -> Iterator[str]:
    for call in message.calls:
        yield from (call.tool, call.input)
    yield message.name or ""
    yield message.text


def import_cpu_ms(tries: int = 5) -> float:
    """CPU of `import refold` in a new interpreter, beyond that of an empty program."""
    return (_cpu("import refold", tries) - _cpu("pass", tries)) * 1e3


def _cpu(program: str, tries: int) -> float:
    times = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(times)


TITLES = ("messages", "append", "× raw", "fit", "× floor", "shown", "open + fit", "file", "× raw")


def _cells(row: SpeedRow) -> tuple[str, ...]:
    append = (f"{row.append}", row.append.over(row.raw_append))
    fit = (f"{row.fit}", row.fit.over(row.floor), f"{row.shown:,}", f"{row.open_ms:.1f} ms")
    return (f"{row.messages:,}", *append, *fit, f"{row.file_mb:,.2f} MB", f"{row.file_ratio:.2f}")


def main(
    sizes: Annotated[list[int] | None, typer.Argument(metavar="SIZE", help="Messages.", min=2)] = None,
    peers: Annotated[bool, typer.Option(help="Also other libraries, those that are installed here.")] = True,
    numbers: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="All numbers; - for stdout.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for documents.")] = False,
) -> None:
    """Whether a step costs more when the conversation is longer.

    An append is measured beside a bare INSERT of the same durability, a fit beside a walk over what is shown
    and the encoding of the request. Other libraries are measured in the same run where they are installed;
    `python scripts/peers.py` installs each apart.

    \b
    Examples:
      refold bench speed                   100 to 100,000 messages
      refold bench speed 100 1000          only these
    """
    from rich.console import Console
    from rich.progress import Progress

    from refold.cli.bench import peers as others

    rows = []
    with Progress(console=Console(stderr=True)) as bar, tempfile.TemporaryDirectory() as folder:
        for size in sizes or SIZES:
            task = bar.add_task(f"{size:,} messages", total=size)
            rows.append(measure(size, Path(folder), lambda n, task=task: bar.advance(task, n)))  # type: ignore[misc]
    counted, imported = count_ratio(), import_cpu_ms()
    names = others.installed() if peers else []
    beside = others.run(names, [size for size in sizes or SIZES if size <= max(others.SIZES)])
    if str(numbers) != "-":
        show(
            [Sheet("A step, by the messages before it", TITLES, list(map(_cells, rows)), texts=0)],
            markdown=markdown,
        )
        print("Times are median / mean; ratios are to the floor of the same run.")
        print(f"First count: {counted:.2f} of the tokenizer's own speed.")
        print(f"Import refold: {imported:.0f} ms of CPU.")
        if beside:
            show([others.sheet(beside)], markdown=markdown)
        elif peers:
            print("No other library is installed here; `python scripts/peers.py` measures them apart.")
    if numbers:
        ratios = {"count_ratio": counted, "import_cpu_ms": imported}
        told = {"rows": [asdict(row) for row in rows], "peers": [asdict(row) for row in beside], **ratios}
        write(numbers, msgspec.json.encode(told))


if __name__ == "__main__":
    typer.run(main)
