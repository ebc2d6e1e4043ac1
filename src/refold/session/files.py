"""Files with conversations: what is in them, message by message, with the place of whatever is wrong."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from refold.config.config import Config
from refold.core import codec
from refold.core.draft import Draft
from refold.core.errors import MessageError, NotFoundError
from refold.dialects.registry import SYSTEM_FIELDS, find_dialect, spoken
from refold.session.intake import Intake
from refold.session.meter import Meter

RESPONSES = "openai-responses"
BOM = b"\xef\xbb\xbf"
LISTS = ("messages", "input")
"""Names of the list of messages in a request."""


@dataclass(frozen=True, slots=True)
class FileConversation:
    """One conversation as it stands in a file."""

    where: str
    """The file, and the line where it has several; empty where it is in no file."""
    value: Any
    """All of it, decoded: a list of messages or an object that has one."""
    name: str
    """What the list is called."""
    raw: list[bytes] | None
    """The messages as they are written; None where only json could read them."""

    @property
    def id(self) -> str | None:
        id = self.beside.get("id")
        return id if isinstance(id, str) and id else None

    @property
    def beside(self) -> dict[str, Any]:
        """All that the request has but its messages."""
        whole = self.value if isinstance(self.value, dict) else {}
        return {name: value for name, value in whole.items() if name != self.name}

    @property
    def messages(self) -> list[Any]:
        said = self.value[self.name] if isinstance(self.value, dict) else self.value
        return [{"role": "user", "content": said}] if isinstance(said, str) else said

    @property
    def system(self) -> dict[str, Any]:
        """System text that stands beside the messages, by its name; nothing where there is none.

        Raises:
            MessageError: it is something else than text.
        """
        beside = self.beside
        name = next((name for name in SYSTEM_FIELDS if beside.get(name)), None)
        if name is None:
            return {}
        if not isinstance(beside[name], str | list | dict):
            kind = type(beside[name]).__name__
            raise MessageError(self.inside(name), f"expected a text or a list of blocks, got {kind}")
        return {name: beside[name]}

    @property
    def tools(self) -> list[Any] | None:
        """The tools that are declared; the AI SDK has them by name."""
        tools = self.beside.get("tools")
        if isinstance(tools, dict):
            return [
                {"name": name, **tool} if isinstance(tool, dict) else tool for name, tool in tools.items()
            ]
        if tools is not None and not isinstance(tools, list):
            raise MessageError(self.inside("tools"), f"expected a list, got {type(tools).__name__}")
        return tools

    @property
    def dialect(self) -> str | None:
        """The one its messages are in, where that is clear."""
        found = spoken(self.messages)
        if found is not None:
            return found
        if isinstance(self.value, dict) and (self.name == "input" or "instructions" in self.value):
            return RESPONSES
        if isinstance(self.beside.get("system"), list):
            return "anthropic"
        leading = self.messages[0] if self.messages else None
        inside = isinstance(leading, dict) and leading.get("role") in ("system", "developer")
        return "openai-chat" if inside else None

    @property
    def count(self) -> int:
        return len(self.messages) + bool(self.system)

    def drafts(self, intake: Intake) -> list[Draft]:
        """All messages, parsed and counted; system text beside them first.

        Raises:
            MessageError: says which message of which line.
        """
        known = intake._replace(default=self.dialect or intake.default)
        drafts = list[Draft]()
        for name, text in self.system.items():
            blocks = text if isinstance(text, list) else [text]
            if not all(isinstance(block, dict) and "role" in block for block in blocks):  # so has the AI SDK
                is_own = SYSTEM_FIELDS[name] == (known.dialect or known.default)
                blocks = [{name: text} if is_own else {"role": "system", "content": text}]
            drafts += known.take(blocks, lambda _: self.inside(name)).drafts  # noqa: B023
        return drafts + self.said(intake)

    def said(self, intake: Intake) -> list[Draft]:
        """The messages, parsed and counted, without system text that stands beside them.

        Raises:
            MessageError: says which message of which line.
        """
        known = intake._replace(default=self.dialect or intake.default)
        return known.take(self.messages, self.place, self.raw).drafts

    def place(self, n: int) -> str:
        """Where a message stands, for people."""
        return self.inside(f"{self.name}[{n}]")

    def inside(self, field: str) -> str:
        """Where a field of the request stands, for people."""
        return f"{self.where}: {field}" if self.where else field


def read_file(path: str) -> bytes:
    """A file, or standard input for `-`."""
    try:
        if path == "-" and sys.stdin is None:
            raise NotFoundError("There is no standard input to read from")
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


def conversations(data: bytes, name: str) -> list[FileConversation]:
    """Those of a file: one, one a line, or one that has a line for each message, as tables are dumped."""
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    first = _object(lines[0][1]) if len(lines) > 1 else None
    if first is None:
        return [given(data, name)]
    if "role" in first:
        messages = [_decode(line, f"{name}: line {n}") for n, line in lines]
        written = _as_written(b"[" + b",".join(line for _, line in lines) + b"]")
        return [FileConversation(name, messages, "messages", written)]
    return [given(line, f"{name}: line {n}") for n, line in lines]


def conversation(data: bytes, name: str) -> FileConversation:
    """The only one of a file.

    Raises:
        MessageError: it has several, or an export of refold.
    """
    if export_in(data) is not None:
        raise MessageError(name, "is an export of refold; `refold import` stores it, `refold show` shows it")
    found = conversations(data, name)
    if len(found) > 1:
        raise MessageError(name, f"has {len(found):,} conversations, one a line; give one of them")
    return found[0]


def given(data: bytes, where: str) -> FileConversation:
    """One conversation: a list of messages, or an object with such a list.

    Raises:
        MessageError: it is something else.
    """
    if not data.strip():
        raise MessageError(where, "is empty; expected a JSON list of messages or an object with `messages`")
    value = _decode(data, where)
    if isinstance(value, list):
        return FileConversation(where, value, "messages", _as_written(data))
    if not isinstance(value, dict):
        expected = "expected a list of messages or an object with `messages`"
        raise MessageError(where, f"is a JSON {type(value).__name__}; {expected}")
    for name in LISTS:
        if isinstance(value.get(name), list):
            return FileConversation(where, value, name, _as_written(data, name))
    if isinstance(value.get("input"), str):  # what Responses take for one message of the user's
        return FileConversation(where, value, "input", None)
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
    except RecursionError as error:
        raise MessageError(where, "is nested too deeply to be read") from error
    except ValueError as error:
        raise MessageError(where, f"is not JSON that can be read: {error}") from error


def _object(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None if it has none."""
    try:
        value = codec.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def intake_for(config: Config, model: str | None, dialect: str | None) -> Intake:
    """Parses and counts the messages of a file, for a model, in a dialect or in the one each is in."""
    if dialect is not None:
        find_dialect(dialect)
    settings = config.agent(None)
    meter = Meter(None, config, model or settings.model, settings.counter)
    return Intake(meter.counter, meter.dialect, dialect)
