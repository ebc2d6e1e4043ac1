"""What conversations of a given length cost: recorded ones are cut, or joined with the next of their source.

python -m benchmarks.lengths ../shared/data [--steps 40,200] [--brief] [--markdown] [--json]

`refold bench cost` has the same table for conversations as they are. Without DATA, on the generated data set
of `benchmarks.made`.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import Annotated

import typer

from benchmarks import made
from benchmarks.ways import OTHERS
from refold.cli.bench.cost import CAPTION, WAYS, brief_table, measure, table, to_json
from refold.cli.bench.recorded import load
from refold.cli.bench.tables import show
from refold.cli.bench.trace import Json, Trace

MIN_TOKENS = 2_000
"""Smaller conversations are left out."""
MODELS = ("claude-sonnet-5", "gpt-5")
ALL_WAYS = [WAYS[0], *OTHERS, *WAYS[1:]]


def pieces(traces: Sequence[Trace], steps: int) -> list[Trace]:
    """The conversations in pieces of so many replies; the rests of all sources are joined, too."""
    found: list[Trace] = []
    rests: list[list[Json]] = []
    numbers = count()
    for source, some in groupby(sorted(traces, key=_source), key=_source):
        *whole, rest = _cut([_with_unique_ids(trace, next(numbers)) for trace in some], steps)
        found += [Trace(source, piece, ()) for piece in whole]
        if rest:
            rests.append(rest)
    *mixed, _ = _cut(rests, steps)
    return [*found, *(Trace("mixed", piece, ()) for piece in mixed)]


def _cut(conversations: Sequence[list[Json]], steps: int) -> Iterator[list[Json]]:
    """Pieces, each with the system text and the first request of its conversation; the last is a rest."""
    piece: list[Json] = []
    replies = 0
    for messages in conversations:
        head = [message for message in messages if message["role"] in ("system", "developer")][:1]
        head += [message for message in messages if message["role"] == "user"][:1]
        for message in messages:
            if not piece and message not in head:
                piece = [*head]
            if message["role"] in ("system", "developer") and piece:
                continue
            piece.append(message)
            replies += message["role"] == "assistant"
            if replies == steps:
                yield piece
                piece = []
                replies = 0
    yield piece


def _with_unique_ids(trace: Trace, n: int) -> list[Json]:
    """The messages with the number of their conversation in the ids of calls."""
    messages: list[Json] = []
    for message in trace.messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": f"{call['id']}.{n}"} for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            message["tool_call_id"] = f"{message['tool_call_id']}.{n}"
        messages.append(message)
    return messages


def _source(trace: Trace) -> str:
    return trace.source


def _size(trace: Trace) -> int:
    return -len(trace.messages)


def main(
    data: Annotated[str | None, typer.Argument(help="As for `refold bench cost`.")] = None,
    steps: Annotated[str, typer.Option(help="Replies of a conversation.")] = "40,200",
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    brief: Annotated[bool, typer.Option("--brief")] = False,
    markdown: Annotated[bool, typer.Option("--markdown")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    traces = load(data, least=MIN_TOKENS) if data else sorted(made.traces(), key=_size)
    rows = {f"{n} steps": measure(pieces(traces, int(n)), MODELS, ALL_WAYS, jobs) for n in steps.split(",")}
    if as_json:
        print(json.dumps({name: to_json(some) for name, some in rows.items()}))
    elif brief:
        show([brief_table(rows)], markdown=markdown)
    else:
        tables = [table(some, f"{CAPTION}, {name}") for name, some in rows.items()]
        show(tables, markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
