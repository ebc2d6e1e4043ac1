"""Streamed replies: handed on chunk by chunk, and stored as one message once they are complete."""

from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sized
from typing import Any, NamedTuple

from refold.core.errors import MessageError
from refold.core.message import Message

ASYNC = "is an async stream, which only a session of refold.aopen reads"


def is_stream(value: object) -> bool:
    """Whether it is an iterator or an SDK's stream; not a collection, and not an SDK's message."""
    is_message = isinstance(value, Message) or hasattr(value, "model_dump")
    return isinstance(value, Iterable) and not isinstance(value, Sized) and not is_message


def is_async_stream(value: object) -> bool:
    return isinstance(value, AsyncIterable) and not hasattr(value, "model_dump")


def chunks_of(stream: object, where: str) -> list[Any]:
    """All that a stream gives, read to its end.

    Raises:
        MessageError: it is async, or gives nothing.
    """
    if not isinstance(stream, Iterable):
        raise MessageError(where, ASYNC)
    chunks = list(stream)
    if not chunks:
        raise MessageError(
            where, "has nothing in it; if it was read already, append what it gave, or use record_stream"
        )
    return chunks


def demand_stream(stream: object) -> None:
    """
    Raises:
        MessageError: it is nothing that gives chunks.
    """
    gives = isinstance(stream, Iterable | AsyncIterable) and not isinstance(stream, str | bytes | Mapping)
    if not gives or hasattr(stream, "model_dump"):
        raise MessageError("stream", f"expected a stream or its chunks, got {type(stream).__name__}")


class Unfinished(NamedTuple):
    """A recorded stream that did not come to its end."""

    chunks: list[Any]
    keep_partial: bool
    problem: str

    @property
    def notice(self) -> str:
        is_lost = self.chunks and not self.keep_partial
        hint = "; record_stream(…, keep_partial=True) stores what came" if is_lost else ""
        return f"A streamed reply was not stored: {self.problem}{hint}"


class StreamRecording:
    """The chunks of a stream that is being recorded.

    Where nobody reads on, the interpreter collects the tape, at any moment and in any thread: what is on it
    then is only put among the unfinished streams, since no lock may be taken there.
    """

    def __init__(self, keep_partial: bool, unfinished: deque[Unfinished]) -> None:
        self.chunks: list[Any] = []
        self.keep_partial = keep_partial
        self.is_over = False
        self._unfinished = unfinished

    def fail(self, problem: str) -> None:
        self.is_over = True
        self._unfinished.append(Unfinished(self.chunks, self.keep_partial, problem))

    def leave(self, problem: str) -> None:
        """Nobody reads on: what came so far is all there is."""
        if self.chunks and not self.is_over:
            self.fail(problem)

    def __del__(self) -> None:
        self.leave("it was not read to its end")
