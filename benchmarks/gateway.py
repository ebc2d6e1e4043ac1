"""What does the gateway cost? Requests through it beside the same requests straight to the upstream.

python -m benchmarks.gateway [--rates 100,200] [--seconds 20] [--stalled 500] [--slow 500]

Conversations of some fifty messages go on turn by turn, at a fixed rate whether answers come or not; what is
late counts from when it should have been sent. Upstream, gateway (`refold serve`, on SQLite, durable) and
clients are processes of their own on the same machine. The upstream answers at once. What it takes
to write a page and be sure of it, on the same disk, is measured between the requests; a request needs two.
"""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, NamedTuple

import aiohttp
import typer
from aiohttp import web

CONVERSATIONS = 200
MESSAGES = 50
PAGE = 4_096
DRIP_S, FILL_S, ROUNDS = 2.0, 5.0, 5
"""Between two bytes of a slow client; until those who do not read are sent nothing more; and how often all is
measured alone and beside them.
"""
_NUMBERS = count()
KEY = {"authorization": "Bearer sk-bench"}
REPLY = "The ledger was read as far as the next invoice, and nothing was missing in it. " * 2


class Times(NamedTuple):
    """Of requests, in seconds."""

    direct: list[float]
    through: list[float]
    syncs: list[float]


# The upstream


def upstream(listener: socket.socket) -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        said = {"role": "assistant", "content": f"{REPLY}{len(body['messages'])}"}
        usage = {"prompt_tokens": 2_000, "completion_tokens": 40, "total_tokens": 2_040}
        choices = [{"index": 0, "message": said, "finish_reason": "stop"}]
        whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "gpt-5", "choices": choices}
        return web.json_response(whole | {"usage": usage})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, sock=listener, print=None, access_log=None)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Addresses of the upstream and of the gateway, and the gateway's process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        to = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        listener.set_inheritable(True)
        fd = listener.fileno()
        code = f"import socket; from benchmarks import gateway; gateway.upstream(socket.socket(fileno={fd}))"
        behind = subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd])
    command = [
        sys.executable,
        "-m",
        "refold",
        "serve",
        "--port",
        "0",
        "--store",
        f"sqlite:///{folder}/bench.db",
    ]
    command += ["--upstream-openai", to, "--log-level", "warning"]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, cwd=folder)
    try:
        assert gateway.stdout is not None
        url = next(word for line in gateway.stdout for word in line.split() if word.startswith("http://"))
        yield to, f"{url.rstrip('/')}/openai/v1", gateway.pid
    finally:
        for process in (gateway, behind):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


# The load


class Conversation:
    def __init__(self, n: int) -> None:
        self.n, self.history = n, [{"role": "system", "content": "You audit the ledgers of a harbor."}]
        for k in range(MESSAGES // 2 - 6):
            self.say(k)
            self.history.append({"role": "assistant", "content": f"{REPLY}{n} {k}"})

    def say(self, k: int) -> None:
        words = " ".join(f"word{self.n + k + i}" for i in range(30))
        self.history.append({"role": "user", "content": f"{self.n} {k}: {words}"})

    async def go_on(self, client: aiohttp.ClientSession, base: str) -> None:
        self.say(len(self.history))
        body = {"model": "gpt-5", "messages": self.history}
        async with client.post(f"{base}/chat/completions", json=body, headers=KEY) as answer:
            reply = await answer.json()
            assert answer.status == 200, reply
            assert "x-refold-bypass" not in answer.headers, answer.headers
        self.history.append(reply["choices"][0]["message"])


def conversations() -> list[Conversation]:
    """New ones: they begin somewhat shorter than they are meant to be, and grow as they go on."""
    return [Conversation(next(_NUMBERS)) for _ in range(CONVERSATIONS)]


async def paced(rate: float, seconds: float, bases: Sequence[str], folder: Path) -> Times:
    """Turns of new conversations, at a fixed rate, with each of these in turn."""
    times, talks = Times([], [], []), [conversations() for _ in bases]
    kinds = (times.direct, times.through)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for group, base in zip(talks, bases, strict=True):
            for one in group:
                await one.go_on(client, base)

        async def turn(kind: int, talk: Conversation, due: float) -> None:
            await talk.go_on(client, bases[kind])
            kinds[kind].append(time.perf_counter() - due)
            idle.append(talk)

        for kind in range(len(bases)):
            start, tasks, idle = time.perf_counter() + 0.2, set[asyncio.Task[None]](), deque(talks[kind])
            for n in range(int(rate * seconds)):
                due = start + n / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                while not idle:
                    await asyncio.sleep(0.001)
                tasks.add(asyncio.create_task(turn(kind, idle.popleft(), due)))
                if kind and n % int(rate) == 0:
                    times.syncs.append(await asyncio.to_thread(synced, folder))
            await asyncio.gather(*tasks)
    return times


def synced(folder: Path) -> float:
    """Seconds that it takes to write a page and to be sure of it."""
    with (folder / "page").open("ab") as file:
        start = time.perf_counter()
        file.write(os.urandom(PAGE))
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start


# Those who cost and give nothing


@asynccontextmanager
async def idlers(url: str, stalled: int, slow: int) -> AsyncIterator[None]:
    """Clients that listen to events and never read them, and clients that send a byte now and then."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    listen = f"GET /api/events HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/event-stream\r\n\r\n"
    post = f"POST /openai/v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    post += "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
    writers = []
    for text in [listen] * stalled + [post] * slow:
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(text.encode())
        writers.append(writer)

    async def drip() -> None:
        while True:
            for writer in writers[stalled:]:
                with suppress(OSError):
                    writer.write(b" ")
                await asyncio.sleep(DRIP_S / slow)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(drip())
    try:
        await asyncio.sleep(2)
        yield
    finally:
        task.cancel()
        for writer in writers:
            writer.close()


def memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1_024


def percentile(values: Sequence[float], n: int) -> float:
    return quantiles(values, n=100)[n - 1] * 1_000


def row(name: str, times: Times) -> str:
    sync = 2 * median(times.syncs) * 1_000
    cells = [f"{percentile(kind, n):.1f}" for kind in times[:2] for n in (50, 99)]
    over = [percentile(times.through, n) - percentile(times.direct, n) - sync for n in (50, 99)]
    return f"| {name} | {' | '.join(cells)} | {sync:.1f} | {over[0]:.1f} | {over[1]:.1f} |"


def main(
    rates: Annotated[str, typer.Option(help="Requests a second.")] = "100,200",
    seconds: Annotated[float, typer.Option(help="For each.")] = 20.0,
    stalled: Annotated[int, typer.Option(help="Clients of events that never read.")] = 500,
    slow: Annotated[int, typer.Option(help="Clients that send a byte now and then.")] = 500,
) -> None:
    """How much longer a request takes through the gateway than straight to the upstream."""
    typer.echo("| requests/s | direct p50 ms | p99 | through p50 | p99 | two syncs | overhead p50 | p99 |")
    typer.echo("|---|---:|---:|---:|---:|---:|---:|---:|")
    for rate in map(float, rates.split(",")):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, serving(Path(folder)) as (to, through, _):
            typer.echo(
                row(
                    f"{rate:g}",
                    asyncio.run(paced(rate, seconds, (to, through), Path(folder))),
                )
            )
    if stalled or slow:
        with (
            tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
            serving(Path(folder)) as (to, through, pid),
        ):
            asyncio.run(_beside(to, through, pid, stalled, slow, seconds, Path(folder)))


async def _beside(
    to: str, through: str, pid: int, stalled: int, slow: int, seconds: float, folder: Path
) -> None:
    rate, ratios = 100.0, list[float]()
    alone, beside = Times([], [], []), Times([], [], [])
    taken = list[float]()
    for _ in range(3):  # as many conversations as the service keeps open
        await paced(rate, 1.0, (through,), folder)
    for _ in range(ROUNDS):  # in turns, since disks and neighbors have moods
        bare = await paced(rate, seconds / 2, (to, through), folder)
        before = memory_mb(pid)
        async with idlers(through, stalled, slow):
            await paced(rate, FILL_S, (through,), folder)
            crowded = await paced(rate, seconds / 2, (to, through), folder)
            taken.append(memory_mb(pid) - before)
        ratios.append(percentile(crowded.through, 99) / percentile(bare.through, 99))
        for whole, part in zip((*alone, *beside), (*bare, *crowded), strict=True):
            whole += part
    typer.echo(row(f"{rate:g}, alone", alone))
    typer.echo(row(f"{rate:g}, beside {stalled} stalled and {slow} slow clients", beside))
    typer.echo(
        f"\nthey take up to {max(taken):.0f} MB of memory;"
        f" p99 {percentile(beside.through, 99) / percentile(alone.through, 99):.2f} times,"
        f" by round {median(ratios):.2f} ({', '.join(f'{one:.2f}' for one in ratios)})"
    )


if __name__ == "__main__":
    typer.run(main)
