"""Streamed replies: handed on chunk by chunk, and stored as one message once they are complete."""

from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sized
from typing import Any

from refold.core.errors import MessageError
from refold.core.message import Message

ASYNC = "is an async stream, which only a session of refold.aopen reads"


def is_stream(value: object) -> bool:
    """True for an iterator or an SDK's stream; not for a collection or an SDK's message."""
    is_message = isinstance(value, Message) or hasattr(value, "model_dump")
    return isinstance(value, Iterable) and not isinstance(value, Sized) and not is_message


def is_async_stream(value: object) -> bool:
    return isinstance(value, AsyncIterable) and not hasattr(value, "model_dump")


def chunks_of(stream: object, where: str) -> list[Any]:
    """All chunks of a stream, which is read to its end.

    Raises:
        MessageError: it is async, or has no chunks.
    """
    if not isinstance(stream, Iterable):
        raise MessageError(where, ASYNC)
    chunks = list(stream)
    if not chunks:
        raise MessageError(
            where, "has nothing in it; if it was read already, append what it gave, or use record_stream"
        )
    return chunks


def require_stream(stream: object) -> None:
    """Raises MessageError if it is not a stream or a list of chunks."""
    has_chunks = isinstance(stream, Iterable | AsyncIterable) and not isinstance(
        stream, str | bytes | Mapping
    )
    if not has_chunks or hasattr(stream, "model_dump"):
        raise MessageError("stream", f"expected a stream or its chunks, got {type(stream).__name__}")


class StreamRecording:
    """The chunks of a stream that is being recorded.

    If the stream is abandoned, the interpreter collects the recording at any moment and in any thread. No
    lock may be taken there, so the recording only adds itself to the unfinished ones.
    """

    def __init__(self, keep_partial: bool, unfinished: "deque[StreamRecording]") -> None:
        self.chunks: list[Any] = []
        self.keep_partial = keep_partial
        self.is_over = False
        self._unfinished = unfinished
        self._problem = ""

    @property
    def notice(self) -> str:
        is_lost = self.chunks and not self.keep_partial
        hint = "; record_stream(…, keep_partial=True) stores what came" if is_lost else ""
        return f"A streamed reply was not stored: {self._problem}{hint}"

    def fail(self, problem: str) -> None:
        self.is_over = True
        self._problem = problem
        self._unfinished.append(self)

    def break_off(self, error: BaseException) -> None:
        self.fail(f"it broke off with {type(error).__name__}: {error}")

    def abandon(self) -> None:
        """Nobody reads on; a stream that was never begun has no chunks and leaves nothing."""
        if self.chunks and not self.is_over:
            self.fail("it was not read to its end")

    def __del__(self) -> None:
        self.abandon()
