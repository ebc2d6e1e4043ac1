"""Does an append wait for a summary? Appends beside a model that hangs, as a ratio to appends without one.

python -m benchmarks.waiting [--appends 2000] [--rounds 5]

Two conversations in two files take turns, so that whatever else the machine does hits both alike. One of
them has asked a model for a summary, over HTTP and with the official SDK, and waits for its answer.
"""

import gc
import tempfile
import time
from pathlib import Path
from statistics import median
from threading import Event
from typing import Annotated, Any

import typer

import refold
from refold.session.session import Session
from refold.summaries.providers import ModelSummarizer
from refold.testing.model import Reply, ScriptedModel

MODEL: dict[str, Any] = {"models": {"small": {"window": 40_000, "max_output": 1_000}}}
SETTINGS: dict[str, Any] = {"timeout_s": 600.0, "wait_s": 0.0}
FILL = 140
"""Messages that bring a conversation to where its summary is prepared."""


def opened(path: Path, summarizer: ModelSummarizer | None) -> Session:
    config = MODEL | {"agents": {"default": {"summarizer": SETTINGS}}}
    session = refold.open("c", store=f"sqlite:///{path}", model="small", config=config, summarizer=summarizer)
    session.append([_message(n, 150) for n in range(FILL)])
    session.fit()
    return session


def _message(n: int, words: int = 20) -> dict[str, Any]:
    role = "assistant" if n % 2 else "user"
    return {"role": role, "content": f"item {n} of " + " ".join(f"word{n + k}" for k in range(words))}


def measure(appends: int) -> tuple[list[float], list[float]]:
    """Seconds of each append: without a summary under way, and beside one that hangs."""
    with tempfile.TemporaryDirectory() as folder, ScriptedModel(Reply(hang=Event())) as server:
        model = ModelSummarizer("openai/gpt-4o-mini", base_url=server.openai_url, api_key="none")
        sessions = opened(Path(folder) / "a.db", None), opened(Path(folder) / "b.db", model)
        server.until(lambda: server.in_flight == 1)
        times: tuple[list[float], list[float]] = ([], [])
        gc.disable()
        for n in range(appends):
            for k in (0, 1) if n % 2 else (1, 0):
                start = time.perf_counter()
                sessions[k].append(_message(n))
                times[k].append(time.perf_counter() - start)
        gc.enable()
        assert server.in_flight == 1, "the summary did not hang"
        for session in sessions:
            session.close()
    return times


def at(share: float, times: list[float]) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def main(
    appends: Annotated[int, typer.Option(help="In each conversation, each time.")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Times that it is measured.")] = 5,
) -> None:
    """How much longer an append takes while a summary hangs."""
    runs = [measure(appends) for _ in range(rounds)]
    for share in (0.5, 0.9, 0.99):
        ratios = [at(share, beside) / at(share, alone) for alone, beside in runs]
        alone, beside = (median(at(share, run[k]) for run in runs) * 1e6 for k in (0, 1))
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"p{share * 100:.0f}: {alone:,.0f} → {beside:,.0f} µs, ratio {median(ratios):.2f} ({each})")


if __name__ == "__main__":
    typer.run(main)
