"""How long does a search take in a long record, and is every name found where it was said?

Milliseconds of `Session.search` from the query to ten hits with excerpts, at the 50th and 95th of a hundred,
in one conversation and in all of an owner's.
"""

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from random import Random
from typing import Any

import msgspec

import refold
from refold.cli.bench.generate import WORDS, conversation
from refold.core.event import Said
from refold.core.query import parse_query
from refold.session.search import MOST_HITS, find, text_of
from refold.session.session import Session

SIZE = 100_000
BATCH = 500
ASKED = 200
"""Queries of each kind."""
NAME = re.compile(r"(?<!\w)(?:[0-9a-f]{12}|[0-9a-f]{6}|/\w+(?:/\w+)+)(?!\w)")


@dataclass(frozen=True, slots=True)
class Row:
    """Queries of one kind, in milliseconds."""

    kind: str
    p50: float
    p95: float
    everywhere_p50: float
    everywhere_p95: float
    found: float
    """The share that was found where it was said, or in a thousand other places; of common words, the share
    with any hit.
    """


def measure(
    size: int, folder: str, progress: Callable[[int], None] = lambda n: None
) -> tuple[list[Row], float]:
    """The rows, and microseconds that it takes to index a message."""
    random = Random(size)
    chat = refold.open("task", store=f"sqlite:///{folder}/refold.db")
    source = conversation(size, seed=size)
    while batch := list(islice(source, BATCH)):
        chat.append(batch)
        progress(len(batch))
    start = time.perf_counter()
    find(chat.store, chat.key, parse_query("x"), 1)
    index_us = (time.perf_counter() - start) / size * 1e6
    rows = [_row(chat, kind, list(asked)) for kind, asked in _queries(chat, size, random).items()]
    chat.store.close()
    return rows, index_us


def _queries(chat: Session, size: int, random: Random) -> dict[str, list[tuple[str, int | None]]]:
    """Queries of each kind, with the place where each was said, if it must be found there."""
    texts = list(_sampled(chat, size, random))
    named = [(random.choice(names), at) for at, text in texts if (names := NAME.findall(text))]
    runs = [(words, at) for at, text in texts if len(words := text.split()) > 8]
    starts = [(random.randrange(len(words) - 3), words, at) for words, at in runs]
    common = [" ".join(random.sample(WORDS, n)) for n in (1, 1, 2, 3) for _ in range(ASKED // 4)]
    roles = [
        f"{random.choice(WORDS)} role:tool tool:{random.choice(('search', 'query'))}" for _ in range(ASKED)
    ]
    return {
        "names": [(name, at) for name, at in named if "/" not in name],
        "paths": [(name, at) for name, at in named if "/" in name],
        "phrases": [(f'"{_plain(words[n : n + 3])}"', at) for n, words, at in starts],
        "common words": [(text, None) for text in common],
        "prefixes": [(f"{word[: random.randint(3, 5)]}*", None) for word in random.choices(WORDS, k=ASKED)],
        "filters": [(text, None) for text in roles],
        "nothing": [(f"zzz{random.getrandbits(40):x} {random.choice(WORDS)}", None) for _ in range(ASKED)],
    }


def _plain(words: list[str]) -> str:
    return " ".join(words).replace('"', " ")


def _sampled(chat: Session, size: int, random: Random) -> Iterator[tuple[int, str]]:
    for at in sorted(random.sample(range(2, size - 2), min(size - 4, 4 * ASKED))):
        event = chat.record.event(at)
        if isinstance(event, Said):
            yield at, text_of(event)


def _row(chat: Session, kind: str, asked: list[tuple[str, int | None]]) -> Row:
    chosen = asked[:: max(1, len(asked) // ASKED)][:ASKED]
    here, everywhere, found = list[float](), list[float](), 0
    for text, at in chosen:
        start = time.perf_counter()
        hits = chat.search(text)
        here.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        chat.search(text, everywhere=True)
        everywhere.append((time.perf_counter() - start) * 1e3)
        if at is not None and len(hits) == 10:  # said often: it must be somewhere among all
            hits = chat.search(text, limit=MOST_HITS)
        found += bool(hits) if at is None or len(hits) == MOST_HITS else at in {hit.at for hit in hits}
    times = (_at(here, 0.5), _at(here, 0.95), _at(everywhere, 0.5), _at(everywhere, 0.95))
    return Row(kind, *times, round(found / len(chosen), 4))


def _at(times: list[float], share: float) -> float:
    return round(sorted(times)[min(len(times) - 1, int(share * len(times)))], 2)


TITLES = ("asked for", "p50", "p95", "everywhere p50", "p95", "found")


def run(size: int = SIZE, shape: str = "table") -> None:
    """Measures and prints: a table for people, or JSON."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar, tempfile.TemporaryDirectory() as folder:
        task = bar.add_task(f"{size:,} messages", total=size)
        rows, index_us = measure(size, folder, lambda n: bar.advance(task, n))
    if shape == "json":
        told: dict[str, Any] = {"messages": size, "index_us": index_us, "rows": [asdict(row) for row in rows]}
        print(msgspec.json.encode(told).decode())
        return
    from rich.table import Table

    table = Table(*TITLES, title=f"{size:,} messages, milliseconds")
    for row in rows:
        cells = (row.p50, row.p95, row.everywhere_p50, row.everywhere_p95)
        table.add_row(row.kind, *(f"{cell:.1f}" for cell in cells), f"{row.found:.1%}")
    Console().print(table)
    print(f"to index a message: {index_us:.0f} µs")


if __name__ == "__main__":
    sizes = [int(arg) for arg in sys.argv[1:] if arg.isdigit()]
    run(sizes[0] if sizes else SIZE, "json" if "--json" in sys.argv[1:] else "table")
