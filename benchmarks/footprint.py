"""What do conversations take in PostgreSQL, how fast do they grow, and what does a worker do in a second?

python -m benchmarks.footprint ../shared/data --store postgresql://…

Recorded conversations are stored message by message, each with a view before every answer, as an agent does.
The database should be an empty one of its own: what is measured are its tables. CPU of the server is that of
the backends, where they run on this machine. The model of the worker answers at once.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

import refold
from refold.cli.bench.generate import conversation
from refold.core.budget import Budget
from refold.session.worker import run
from refold.stores.store import Key, open_store
from refold.summaries.queue import CompactionJob, WorkerSettings, queue_of
from refold.testing.scribe import Scribe

MODEL: dict[str, Any] = {"models": {"m": {"window": 128_000, "max_output": 8_000}}}
SMALL: dict[str, Any] = {"models": {"m": {"window": 8_000, "max_output": 1_000}}}
MOST = 20_000
"""Messages to append, before they come again."""
PARTS = {
    "conversations": ("conversation", "cursor"),
    "entries": ("entry",),
    "snapshots": ("snapshot",),
    "search": ("words", "vector", "indexed"),
    "summaries, leases, notes": (),
}
"""Which tables are told together; all others are the last."""


def recorded(folder: Path) -> list[list[dict[str, Any]]]:
    lines = [line for file in sorted(folder.glob("traces/*.jsonl")) for line in file.open()]
    talks = [[_plain(one) for one in json.loads(line)["messages"]] for line in lines]
    return [talk for talk in talks if talk]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if not name.startswith("x_")}


def store_all(url: str, talks: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Seconds that it took."""
    begun = time.perf_counter()
    with closing(open_store(url)) as store:
        for n, talk in enumerate(talks):
            with refold.open(f"c{n}", store=store, owner=f"o{n}", model="m", config=MODEL) as chat:
                for message in talk:
                    if message["role"] == "assistant":
                        chat.fit()
                    chat.append(message)
    return time.perf_counter() - begun


def sizes(url: str) -> Iterator[tuple[str, int, int, int]]:
    """By part: rows, bytes of the tables, bytes of their indexes."""
    query = """SELECT relname, n_live_tup, pg_table_size(relid), pg_indexes_size(relid)
        FROM pg_stat_user_tables WHERE relname LIKE %s"""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        found = connection.execute(query, ["refold\\_%"]).fetchall()
    left = {name.removeprefix("refold_"): tuple(numbers) for name, *numbers in found}
    for part, names in PARTS.items():
        mine = [left.pop(name) for name in names if name in left] if names else list(left.values())
        if mine:
            rows, tables, indexes = (sum(column) for column in zip(*mine, strict=True))
            yield part, rows, tables, indexes


def appending(url: str, name: str, seconds: float) -> tuple[int, float, float]:
    """How many, by one process in so many seconds; seconds of CPU here, and there where that can be known."""
    messages = cycle(list(conversation(MOST, seed=len(name)))[2:])
    own = f"{url}{'&' if '?' in url else '?'}pool_size=1&application_name={name}"
    with closing(open_store(own)) as store:
        chat = refold.open(name, store=store, owner="bench", model="m", config=MODEL)
        chat.append(next(messages))
        with psycopg.connect(url) as connection:
            query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
            pids = [pid for (pid,) in connection.execute(query, [name])]
        mine, theirs, count = time.process_time(), _cpu(pids), 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            chat.append(next(messages))
            count += 1
        spent = (time.process_time() - mine, _cpu(pids) - theirs)
        store.erase(Key("bench", name))
    return count, *spent


def _cpu(pids: Sequence[int]) -> float:
    """Seconds that processes of this machine have used; 0 for others."""
    ticks = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            ticks += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def working(url: str, jobs: int) -> tuple[float, float, float]:
    """Milliseconds to hand a job over; jobs that one process does in a second; bytes that a job takes."""
    with closing(open_store(url)) as store:
        queue, ends = queue_of(store), list[float]()
        queue.set_up()
        budget = Budget(window=8_000, output_reserve=1_000)
        for n in range(jobs):
            chat = refold.open(f"j{n}", store=store, owner="bench", model="m", config=SMALL)
            chat.append(list(conversation(40, seed=n)))
            begun = time.perf_counter()
            queue.put(CompactionJob("bench", f"j{n}", "main", 1, model="m", budget=budget))
            ends.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        run(url, config=SMALL, summarizer=Scribe(), terms=WorkerSettings(once=True), tell=lambda text: None)
        took = time.perf_counter() - begun
        written = [job for job in queue.posted(("done",)) if re.match("written", job.told or "")]
        with psycopg.connect(url) as connection:
            query = "SELECT sum(pg_total_relation_size(c)) FROM unnest(%s::regclass[]) c"
            [(size,)] = connection.execute(query, [["procrastinate_jobs", "procrastinate_events"]])
    return sorted(ends)[jobs // 2] * 1e3, len(written) / took, float(size) / jobs


def main(
    data: Annotated[Path, typer.Argument(help="The folder with recorded conversations.")],
    store: Annotated[str, typer.Option(help="URL of an empty database: postgresql://….")],
    times: Annotated[int, typer.Option(help="How often each conversation is stored.")] = 4,
    seconds: Annotated[float, typer.Option(help="That appends are measured.")] = 10.0,
    jobs: Annotated[int, typer.Option(help="That a worker does.")] = 200,
) -> None:
    """What conversations take in PostgreSQL."""
    talks = recorded(data) * times
    many, messages = len(talks), sum(map(len, talks))
    said = sum(len(json.dumps(one).encode()) for talk in talks for one in talk)
    store_all(store, talks)
    print(f"{many:,} conversations, {messages / many:.1f} messages each, {said / messages:,.0f} bytes each\n")
    print("| | rows | table | indexes | bytes per message |\n|---|---:|---:|---:|---:|")
    total = 0
    for part, rows, table, indexes in sizes(store):
        total += table + indexes
        each = (table + indexes) / messages
        print(f"| {part} | {rows:,} | {table / 1e6:.1f} MB | {indexes / 1e6:.1f} MB | {each:,.0f} |")
    print(f"\n{total / messages:,.0f} bytes per message, {total / many / 1e3:.1f} kB per conversation")
    print(
        "\n| processes that append | appends a second | CPU here | CPU of the server |\n|---|---:|---:|---:|"
    )
    for processes in (1, 2, 4):
        with get_context("spawn").Pool(processes) as pool:
            given = [(store, f"bench-{n}", seconds) for n in range(processes)]
            done = pool.starmap(appending, given)
        count, here, there = (sum(column) for column in zip(*done, strict=True))
        spent = f"{here / count * 1e6:,.0f} µs | {there / count * 1e6:,.0f} µs"
        print(f"| {processes} | {count / seconds:,.0f} | {spent} |")
    ms, rate, size = working(store, jobs)
    print(f"\na job is handed over in {ms:.1f} ms and takes {size / 1e3:.1f} kB until it is forgotten;")
    print(f"one worker does {rate:.0f} a second, 4 at a time, with a model that answers at once")


if __name__ == "__main__":
    typer.run(main)
