"""Files with conversations: what is in them, message by message, with the place of whatever is wrong."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from refold.core import codec
from refold.core.draft import Draft
from refold.core.errors import MessageError, NotFoundError
from refold.formats.dialects import spoken
from refold.intake import Intake

BOM = b"\xef\xbb\xbf"
LISTS = ("messages", "input")
"""What the list of messages is called in a request."""
APART = {"system": "anthropic", "instructions": "openai-responses"}
"""What system text is called that stands beside them, and in which dialect."""
BATCH = 500
"""Messages that are read in one go."""


@dataclass(frozen=True, slots=True)
class Given:
    """One conversation as it stands in a file."""

    where: str
    """The file, and the line where it has several."""
    value: Any
    """All of it, decoded: a list of messages or an object that has one."""
    name: str
    """What the list is called."""
    raw: list[bytes] | None
    """The messages as they are written; None where only json could read them."""

    @property
    def id(self) -> str | None:
        id = self.value.get("id") if isinstance(self.value, dict) else None
        return id if isinstance(id, str) and id else None

    @property
    def messages(self) -> list[Any]:
        messages: list[Any] = self.value[self.name] if isinstance(self.value, dict) else self.value
        return messages

    @property
    def system(self) -> dict[str, Any]:
        """System text that stands beside the messages, by its name; nothing where there is none."""
        beside = self.value if isinstance(self.value, dict) else {}
        return next(({name: beside[name]} for name in APART if beside.get(name)), {})

    @property
    def tools(self) -> list[Any] | None:
        tools = self.value.get("tools") if isinstance(self.value, dict) else None
        if tools is not None and not isinstance(tools, list):
            raise MessageError(f"{self.where}: tools", f"expected a list, got {type(tools).__name__}")
        return tools

    @property
    def dialect(self) -> str | None:
        """The one its messages are in, where that is clear."""
        found = spoken(self.messages)
        if (
            found is None
            and isinstance(self.value, dict)
            and (self.name == "input" or "instructions" in self.value)
        ):
            return "openai-responses"
        return found or ("anthropic" if isinstance(self.system.get("system"), list) else None)

    @property
    def count(self) -> int:
        return len(self.messages) + bool(self.system)

    def drafts(self, intake: Intake, advance: Callable[[int], None] = lambda n: None) -> list[Draft]:
        """The messages, parsed and counted; system text first.

        Raises:
            MessageError: says which message of which line.
        """
        known = intake._replace(default=self.dialect or intake.default)
        drafts: list[Draft] = []
        for name, text in self.system.items():
            own = APART[name] == (known.dialect or known.default)
            apart = {name: text} if own else {"role": "system", "content": text}
            drafts += known.take([apart], partial(_only, f"{self.where}: {name}")).drafts
            advance(1)
        items = (known.dialect or known.default) == "openai-responses"  # one answer may have many of them
        step = len(self.messages) if items else BATCH
        for start in range(0, len(self.messages), step or 1):
            stop = start + step
            where = f"{self.where}: {self.name}[{{}}]".format
            raw = self.raw[start:stop] if self.raw else None
            drafts += known.take(self.messages[start:stop], partial(_shifted, where, start), raw).drafts
            advance(len(self.messages[start:stop]))
        return drafts


def _only(where: str, n: int) -> str:
    return where


def _shifted(where: Callable[[int], str], start: int, n: int) -> str:
    return where(start + n)


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
    if isinstance(value, list):
        return Given(where, value, "messages", _as_written(data))
    if not isinstance(value, dict):
        expected = "expected a list of messages or an object with `messages`"
        raise MessageError(where, f"is a JSON {type(value).__name__}; {expected}")
    for name in LISTS:
        if isinstance(value.get(name), list):
            return Given(where, value, name, _as_written(data, name))
    if isinstance(value.get("input"), str):  # what Responses take for one message of the user's
        return Given(where, {**value, "input": [{"role": "user", "content": value["input"]}]}, "input", None)
    raise MessageError(where, "has no list `messages` or `input`; expected one, or a list of messages")


def _as_written(data: bytes, name: str | None = None) -> list[bytes] | None:
    try:
        if name is not None:
            data = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])[name])
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
