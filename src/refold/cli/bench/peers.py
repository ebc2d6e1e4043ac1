"""How fast is a step of other libraries, beside one of refold in the same process?

python -m refold.cli.bench.peers NAME [SIZE …]     NAME is installed; `python scripts/peers.py` installs all

A step is what has to happen before each call of a model: two new messages are taken in, and the next request
is made. They do not do the same: some keep nothing on disk, and some never make a history smaller.
"""

import asyncio
import gc
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

import refold
from refold.cli.bench.generate import conversation
from refold.cli.bench.speed import Times, batches, timed
from refold.cli.bench.tables import Sheet, show, write
from refold.cli.bench.trace import MODEL, Json
from refold.core.codec import dumps
from refold.core.errors import NotFoundError, SettingError

SIZES = (100, 1_000, 10_000)
STEPS, LEAST_STEPS = 50, 5
TURN = 20
"""Messages of a turn."""
BATCH = 500
"""Messages that are taken in at once until the size is reached."""
MOST_S = 30.0
"""For one size: who takes longer is measured in fewer steps, or not at all."""
WINDOW = 128_000
ROOM = 100_000
"""Tokens above which those act that can."""
Step: TypeAlias = Callable[[list[Json]], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library, and what it does at each step."""

    package: str
    does: str
    begin: Callable[[Path], Step]
    is_durable: bool = False


def _trim(folder: Path) -> Step:
    from langchain_core.messages import convert_to_messages, trim_messages
    from langchain_core.messages.utils import count_tokens_approximately

    said: list[Any] = []
    rest: Json = {"token_counter": count_tokens_approximately, "include_system": True}

    def step(new: list[Json]) -> object:
        said.extend(convert_to_messages(new))
        return trim_messages(said, max_tokens=ROOM, strategy="last", **rest)

    return step


def _scripted() -> Any:
    from langchain_core.language_models.fake_chat_models import FakeListChatModel

    return FakeListChatModel(responses=["What happened before, in a sentence."])


def _summarize(folder: Path) -> Step:
    from langchain.agents.middleware import SummarizationMiddleware
    from langchain_core.messages import convert_to_messages

    middleware = SummarizationMiddleware(model=_scripted(), trigger=("tokens", ROOM), keep=("messages", 20))
    said: list[Any] = []

    def step(new: list[Json]) -> object:
        said.extend(convert_to_messages(new))
        changed: Any = middleware.before_model({"messages": said}, None)
        if changed is not None:
            said[:] = changed["messages"][1:]  # the first says that all are removed
        return changed

    return step


def _edit(folder: Path) -> Step:
    from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
    from langchain.agents.middleware.types import ModelRequest
    from langchain_core.messages import convert_to_messages

    middleware = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=ROOM)])
    model, said = _scripted(), list[Any]()

    def step(new: list[Json]) -> object:
        said.extend(convert_to_messages(new))
        rest: Json = {"system_message": None, "tools": [], "tool_choice": None, "response_format": None}
        request = ModelRequest(model=model, messages=said, state={"messages": said}, runtime=None, **rest)
        return middleware.wrap_model_call(request, lambda edited: edited.messages)

    return step


def _checkpoint(folder: Path) -> Step:
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import MessagesState, StateGraph

    database = sqlite3.connect(folder / "checkpoints.db", check_same_thread=False)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", lambda state: {})
    graph.set_entry_point("work")
    compiled = graph.compile(checkpointer=SqliteSaver(database))
    thread = {"configurable": {"thread_id": "task"}}

    def step(new: list[Json]) -> object:
        compiled.update_state(thread, {"messages": new}, as_node="work")
        return compiled.get_state(thread).values["messages"]

    return step


def _agents_session(folder: Path) -> Step:
    from agents import SQLiteSession

    session, runner = SQLiteSession("task", folder / "session.db"), asyncio.Runner()

    async def one(new: list[Any]) -> object:
        await session.add_items(new)
        return await session.get_items()

    return lambda new: runner.run(one(new))


def _memory(folder: Path) -> Step:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.memory import Memory

    url, runner = f"sqlite+aiosqlite:///{folder}/memory.db", asyncio.Runner()
    memory = Memory.from_defaults("task", token_limit=WINDOW, async_database_uri=url)

    async def one(new: list[Json]) -> object:
        beside = [{k: v for k, v in message.items() if k not in ("role", "content")} for message in new]
        await memory.aput_messages(
            [
                ChatMessage(role=message["role"], content=message["content"], additional_kwargs=rest)
                for message, rest in zip(new, beside, strict=True)
            ]
        )
        return await memory.aget()

    return lambda new: runner.run(one(new))


PEERS = {
    "trim_messages": Peer("langchain-core", "cuts a list", _trim),
    "SummarizationMiddleware": Peer("langchain", "counts, and summarizes at a limit", _summarize),
    "ContextEditingMiddleware": Peer("langchain", "counts, and clears old results", _edit),
    "SqliteSaver": Peer("langgraph-checkpoint-sqlite", "saves and loads the state", _checkpoint, True),
    "SQLiteSession": Peer("openai-agents", "saves, and loads all items", _agents_session, True),
    "Memory": Peer("llama-index-core", "saves, archives at a limit, and loads", _memory, True),
}
"""By the name of their class or function."""


def installed() -> list[str]:
    """The peers that could be measured here."""
    return [name for name, peer in PEERS.items() if _version(peer)]


def _version(peer: Peer) -> str | None:
    try:
        return version(peer.package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer at one size."""

    peer: str
    version: str
    does: str
    is_durable: bool
    messages: int
    steps: int
    """0 where it was too slow to be measured."""
    theirs: Times
    ours: Times
    """Appending and fitting, on disk."""
    fit: Times


def _turns(messages: int, seed: int) -> Iterator[Json]:
    """A conversation where the user says something after every ten calls: some cut between turns only."""
    for n, message in enumerate(conversation(messages, seed)):
        if n > 2 and n % TURN == 2:
            yield {"role": "assistant", "content": "That is done."}
            yield {"role": "user", "content": "Go on with the next ones."}
        yield message


def measure(name: str, size: int, advance: Callable[[int], None] = lambda n: None) -> PeerRow:
    """Refold and then a peer, step by step, on the same history of so many messages."""
    peer, source = PEERS[name], _turns(size + 2 * STEPS, seed=size)
    theirs, appends, fits = list[float](), list[float](), list[float]()
    limits = {"models": {MODEL: {"window": WINDOW, "max_output": 1_000}}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        step, taken_s = peer.begin(folder), 0.0
        with refold.open("task", store=f"sqlite:///{folder}/refold.db", model=MODEL, config=limits) as chat:
            for batch in batches(source, size, BATCH):
                chat.append(batch)
                chat.fit()
                advance(len(batch))
                if taken_s < MOST_S:
                    taken_s += timed(lambda batch=batch: step(batch))  # type: ignore[misc]
            steps = list(batches(source, 2 * STEPS, 2))
            gc.collect()
            gc.disable()
            for new in steps:
                appends.append(timed(lambda new=new: chat.append(new)))  # type: ignore[misc]
                fits.append(timed(chat.fit))
            for new in steps:
                if taken_s + sum(theirs) > MOST_S:
                    break
                theirs.append(timed(lambda new=new: step(new)))  # type: ignore[misc]
            gc.enable()
    both = [append + fit for append, fit in zip(appends, fits, strict=True)]
    is_measured = len(theirs) >= LEAST_STEPS
    times = [Times.of(some) if is_measured else Times(0, 0) for some in (theirs, both, fits)]
    told = (name, _version(peer) or "", peer.does, peer.is_durable, size)
    return PeerRow(*told, len(theirs) if is_measured else 0, *times)


TITLES = (
    *("library", "at each step it", "kept", "messages", "theirs", "refold, on disk"),
    *("× refold's append + fit", "× refold's fit"),
)


def sheet(rows: Sequence[PeerRow]) -> Sheet:
    """Their times, and as multiples of refold's in the same run."""
    return Sheet(
        "A step of others and of refold",
        TITLES,
        [_cells(row) for row in rows],
        [n for n, row in enumerate(rows[:-1]) if rows[n + 1].peer != row.peer],
        texts=3,
    )


def _cells(row: PeerRow) -> list[str]:
    kept = "on disk" if row.is_durable else "in memory"
    told = [f"{row.peer} ({PEERS[row.peer].package} {row.version})", row.does, kept, f"{row.messages:,}"]
    if not row.steps:
        return [*told, f"over {MOST_S:.0f} s", "–", "–", "–"]
    alone = "–" if row.is_durable else row.theirs.over(row.fit)
    return [*told, str(row.theirs), str(row.ours), row.theirs.over(row.ours), alone]


def run(names: Sequence[str], sizes: Sequence[int]) -> list[PeerRow]:
    """All of them at all sizes, with a bar."""
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    with Progress(console=Console(stderr=True)) as bar:
        for name in names:
            for size in sizes:
                task = bar.add_task(f"{name}, {size:,} messages", total=size)
                rows.append(measure(name, size, lambda n, task=task: bar.advance(task, n)))  # type: ignore[misc]
                bar.remove_task(task)
    return rows


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which; else all there are.")
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="N,N,…", help="Messages.")] = ",".join(map(str, SIZES)),
    numbers: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="- for stdout.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table for documents.")] = False,
) -> None:
    """How fast a step of other libraries is, beside one of refold."""
    if unknown := sorted(set(names or ()) - set(PEERS)):
        raise SettingError("NAME", f"{unknown[0]!r} is unknown; known: {', '.join(PEERS)}")
    wanted = names or installed()
    if missing := [name for name in wanted if not _version(PEERS[name])]:
        packages = ", ".join(PEERS[name].package for name in missing)
        raise NotFoundError(f"{packages} is not installed here; `python scripts/peers.py` installs it apart")
    rows = run(wanted, [int(size) for size in sizes.split(",")])
    if str(numbers) != "-":
        show([sheet(rows)], markdown=markdown)
    if numbers:
        write(numbers, dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    typer.run(main)
