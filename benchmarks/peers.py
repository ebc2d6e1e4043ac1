"""How long a step of other libraries takes, beside one of refold in the same process.

python -m benchmarks.peers [NAME …] [--sizes 100,1000] [--json] [--markdown]

Without names, all that are installed; `python scripts/peers.py` installs each library in an environment of
its own. A step is what has to happen before each model call: two new messages are appended, and the next
request is made. The libraries do not do the same work: some store nothing, and some never reduce a history.
"""

import asyncio
import gc
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

import refold
from refold.cli.bench.generate import conversation
from refold.cli.bench.speed import Times, batches, seconds
from refold.cli.bench.tables import BenchTable, show
from refold.cli.bench.trace import MODEL, Json
from refold.core.codec import dumps
from refold.core.errors import NotFoundError, SettingError

SIZES = (100, 1_000, 10_000)
STEPS = 50
MIN_STEPS = 5
TURN = 20
"""Messages of a turn."""
BATCH = 500
"""Messages that are appended at once until the size is reached."""
MAX_S = 30.0
"""For one size; a slower library is measured in fewer steps, or not at all."""
WINDOW = 128_000
ROOM = 100_000
"""Tokens above which libraries reduce a history, if they can."""
Step: TypeAlias = Callable[[list[Json]], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """A class or function of another library, and what it does at each step."""

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


def installed() -> list[str]:
    """The peers that can be measured in this environment."""
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
    """0 if it was too slow to be measured."""
    theirs: Times
    ours: Times
    """Append and fit, on disk."""
    fit: Times


def _turns(messages: int, seed: int) -> Iterator[Json]:
    """A conversation with many turns: some libraries cut between turns only."""
    for n, message in enumerate(conversation(messages, seed)):
        if n > 2 and n % TURN == 2:
            yield {"role": "assistant", "content": "That is done."}
            yield {"role": "user", "content": "Go on with the next ones."}
        yield message


def measure(name: str, size: int, advance: Callable[[int], None] = lambda n: None) -> PeerRow:
    """Measure refold and then a peer, step by step, after the same history of so many messages."""
    peer, source = PEERS[name], _turns(size + 2 * STEPS, seed=size)
    theirs, appends, fits = list[float](), list[float](), list[float]()
    limits = {"models": {MODEL: {"window": WINDOW, "max_output": 1_000}}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        step = peer.begin(folder)
        taken_s = 0.0
        with refold.open("task", store=f"sqlite:///{folder}/refold.db", model=MODEL, config=limits) as chat:
            for batch in batches(source, size, BATCH):
                chat.append(batch)
                chat.fit()
                advance(len(batch))
                if taken_s < MAX_S:
                    taken_s += seconds(partial(step, batch))
            steps = list(batches(source, 2 * STEPS, 2))
            gc.collect()
            gc.disable()
            for new in steps:
                appends.append(seconds(partial(chat.append, new)))
                fits.append(seconds(chat.fit))
            for new in steps:
                if taken_s + sum(theirs) > MAX_S:
                    break
                theirs.append(seconds(partial(step, new)))
            gc.enable()
    both = [append + fit for append, fit in zip(appends, fits, strict=True)]
    is_measured = len(theirs) >= MIN_STEPS
    times = [Times.of(some) if is_measured else Times(0, 0) for some in (theirs, both, fits)]
    told = (name, _version(peer) or "", peer.does, peer.is_durable, size)
    return PeerRow(*told, len(theirs) if is_measured else 0, *times)


TITLES = (
    *("library", "at each step it", "kept", "messages", "theirs", "refold, on disk"),
    *("× refold's append + fit", "× refold's fit"),
)


def table(rows: Sequence[PeerRow]) -> BenchTable:
    """Times, and their ratios to refold's in the same run."""
    return BenchTable("A step of others and of refold", TITLES, [_cells(row) for row in rows], texts=3)


def _cells(row: PeerRow) -> list[str]:
    kept = "on disk" if row.is_durable else "in memory"
    told = [f"{row.peer} ({PEERS[row.peer].package} {row.version})", row.does, kept, f"{row.messages:,}"]
    if not row.steps:
        return [*told, f"over {MAX_S:.0f} s", "–", "–", "–"]
    alone = "–" if row.is_durable else row.theirs.over(row.fit)
    return [*told, str(row.theirs), str(row.ours), row.theirs.over(row.ours), alone]


def run(names: Sequence[str], sizes: Sequence[int]) -> list[PeerRow]:
    """Measure these peers at these sizes, with a progress bar."""
    rows = []
    with Progress(console=Console(stderr=True)) as bar:
        for name in names:
            for size in sizes:
                task = bar.add_task(f"{name}, {size:,} messages", total=size)
                rows.append(measure(name, size, partial(bar.advance, task)))
                bar.remove_task(task)
    return rows


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which; else all there are.")
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="N,N,…", help="Messages.")] = ",".join(map(str, SIZES)),
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table for documents.")] = False,
) -> None:
    """Measure how long a step of other libraries takes, beside one of refold."""
    if unknown := sorted(set(names or ()) - set(PEERS)):
        raise SettingError("NAME", f"{unknown[0]!r} is unknown; known: {', '.join(PEERS)}")
    wanted = names or installed()
    if missing := [name for name in wanted if not _version(PEERS[name])]:
        packages = ", ".join(PEERS[name].package for name in missing)
        raise NotFoundError(f"{packages} is not installed here; `python scripts/peers.py` installs it apart")
    rows = run(wanted, [int(size) for size in sizes.split(",")])
    if as_json:
        print(dumps([asdict(row) for row in rows]).decode())
    else:
        show([table(rows)], markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
