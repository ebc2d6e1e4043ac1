"""Files with conversations: what is in them, message by message, with the place of whatever is wrong."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from refold.core import codec
from refold.core.draft import Draft
from refold.core.errors import MessageError, NotFoundError
from refold.intake import drafts

BOM = b"\xef\xbb\xbf"
ANTHROPIC = ("tool_use", "tool_result")
"""Blocks that OpenAI chat does not have. Taken for unknown parts, a call would lose its result."""


@dataclass(frozen=True, slots=True)
class Given:
    """One conversation as it stands in a file."""

    where: str
    """The file, and the line where it has several."""
    value: Any
    """All of it, decoded: a list of messages or an object that has one."""
    raw: list[bytes] | None
    """The messages as they are written; None where only json could read them."""

    @property
    def id(self) -> str | None:
        id = self.value.get("id") if isinstance(self.value, dict) else None
        return id if isinstance(id, str) and id else None

    @property
    def messages(self) -> list[Any]:
        messages: list[Any] = self.value["messages"] if isinstance(self.value, dict) else self.value
        return messages

    @property
    def system(self) -> Any:
        """System text that stands beside the messages."""
        return self.value.get("system") if isinstance(self.value, dict) else None

    @property
    def tools(self) -> list[Any] | None:
        tools = self.value.get("tools") if isinstance(self.value, dict) else None
        if tools is not None and not isinstance(tools, list):
            raise MessageError(f"{self.where}: tools", f"expected a list, got {type(tools).__name__}")
        return tools

    @property
    def count(self) -> int:
        return len(self.messages) + bool(self.system)

    def drafts(self, advance: Callable[[int], None] = lambda n: None) -> Iterator[Draft]:
        """The messages, parsed and counted; system text first.

        Raises:
            MessageError: says which message of which line.
        """
        if self.system:
            yield from drafts({"role": "system", "content": self.system}, f"{self.where}: system")
        for n, message in enumerate(self.messages):
            where = f"{self.where}: messages[{n}]"
            if not isinstance(message, dict):
                raise MessageError(where, f"a message is an object, not {type(message).__name__}")
            _refuse_anthropic(message, where)
            try:
                yield from drafts(message, where, raw=self.raw[n] if self.raw else None)
            except RecursionError as error:
                raise MessageError(where, "is nested too deeply") from error
            advance(1)


def read_file(path: str) -> bytes:
    """A file, or standard input for `-`."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror or error}") from error
    return data.removeprefix(BOM)


def export_in(data: bytes) -> list[str] | None:
    """The lines of an export of refold; None if it is none."""
    first, *rest = data.lstrip().split(b"\n")
    header = None
    with suppress(ValueError, RecursionError):
        header = codec.loads(first)
    if not isinstance(header, dict) or "refold" not in header:
        return None
    return [line.decode("utf-8", "surrogateescape") for line in (first, *rest)]


def conversations(data: bytes, name: str) -> list[Given]:
    """Those of a file: one, or one a line."""
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if len(lines) > 1 and _is_object(lines[0][1]):
        return [given(line, f"{name}: line {n}") for n, line in lines]
    return [given(data, name)]


def given(data: bytes, where: str) -> Given:
    """One conversation: a list of messages, or an object with such a list.

    Raises:
        MessageError: it is something else.
    """
    if not data.strip():
        raise MessageError(where, "is empty; expected a JSON list of messages or an object with `messages`")
    value = _decode(data, where)
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        what = "has no list `messages`" if isinstance(value, dict) else f"is a JSON {type(value).__name__}"
        raise MessageError(where, f"{what}; expected a list of messages or an object with `messages`")
    return Given(where, value, _as_written(data, isinstance(value, dict)))


class _Object(msgspec.Struct):
    messages: list[msgspec.Raw]


def _as_written(data: bytes, is_object: bool) -> list[bytes] | None:
    try:
        if is_object:
            return list(map(bytes, msgspec.json.decode(data, type=_Object).messages))
        return list(map(bytes, msgspec.json.decode(data, type=list[msgspec.Raw])))
    except msgspec.DecodeError:  # lone surrogates: json reads them, and they are written anew
        return None


def _decode(data: bytes, where: str) -> Any:
    try:
        return codec.loads(data)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MessageError(f"{where}: {place}", f"is not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise MessageError(f"{where}: byte {error.start}", "is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise MessageError(where, f"is not JSON that can be read: {error}") from error


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(codec.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_anthropic(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    for n, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in ANTHROPIC:
            problem = f"{part['type']!r} is an Anthropic block; only OpenAI chat messages can be read yet"
            raise MessageError(f"{where}.content[{n}]", problem)
