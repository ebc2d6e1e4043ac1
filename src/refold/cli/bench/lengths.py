"""Conversations of a given length: recorded ones are cut, or go on with the next of the same source."""

from collections.abc import Iterator, Sequence
from itertools import count, groupby

from refold.cli.bench.trace import Json, Trace


def pieces(traces: Sequence[Trace], steps: int) -> list[Trace]:
    """All of them in pieces of so many answers; what is left of each source is joined, too."""
    found, rests = list[Trace](), list[tuple[str, list[Json]]]()
    chats, numbers = [trace for trace in traces if trace.dialect == "openai-chat"], count()
    for source, some in groupby(sorted(chats, key=_source), key=_source):
        *whole, rest = _cut([_told_apart(trace, next(numbers)) for trace in some], steps)
        found += [_trace(source, piece) for piece in whole]
        rests.append((source, rest))
    *mixed, _ = _cut([rest for _, rest in rests if rest], steps)
    return [*found, *(_trace("mixed", piece) for piece in mixed)]


def _cut(talks: Sequence[list[Json]], steps: int) -> Iterator[list[Json]]:
    """Pieces, each with the system text and the first request of its conversation; the last is a rest."""
    piece, answers = list[Json](), 0
    for talk in talks:
        first = next((one for one in talk if one["role"] == "user"), None)
        head = [one for one in talk if one["role"] in ("system", "developer")][:1]
        head += [first] if first is not None else []
        for message in talk:
            if not piece and message not in head:
                piece = [*head]
            if message["role"] in ("system", "developer") and piece:
                continue
            piece.append(message)
            answers += message["role"] == "assistant"
            if answers == steps:
                yield piece
                piece, answers = [], 0
    yield piece


def _told_apart(trace: Trace, n: int) -> list[Json]:
    """Ids of calls with the number of their conversation: others may have the same."""

    def renamed(message: Json) -> Json:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": f"{call['id']}.{n}"} for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            message["tool_call_id"] = f"{message['tool_call_id']}.{n}"
        return message

    return [renamed(message) for message in trace.messages]


def _source(trace: Trace) -> str:
    return trace.source


def _trace(source: str, messages: list[Json]) -> Trace:
    return Trace(source, "openai-chat", messages, ())
