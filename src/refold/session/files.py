"""Reads conversations from files: JSON in any dialect, one conversation or several. Errors name the place."""

import json
import sys
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
"""Fields of a request that may have its messages."""
EXPECTED = "expected a JSON list of messages, or an object with such a list as `messages` or `input`"


@dataclass(frozen=True, slots=True)
class FileConversation:
    """A conversation in a file, or in a request."""

    where: str
    """The file, and the line if it has several conversations; empty for a request."""
    value: Any
    """All of it, decoded: a list of messages, or an object that has one."""
    name: str
    """The field of the list."""
    raw: list[bytes] | None
    """The JSON of each message as it is written; None if it has to be written anew."""

    @property
    def id(self) -> str | None:
        id = self.fields.get("id")
        return id if isinstance(id, str) and id else None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the request, without its messages."""
        request = self.value if isinstance(self.value, dict) else {}
        return {name: value for name, value in request.items() if name != self.name}

    @property
    def messages(self) -> list[Any]:
        messages = self.value[self.name] if isinstance(self.value, dict) else self.value
        return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages

    @property
    def system(self) -> dict[str, Any]:
        """The field of the request with its system text; empty if there is none.

        Raises:
            MessageError: the field has no text.
        """
        for name in SYSTEM_FIELDS:
            if text := self.fields.get(name):
                if not isinstance(text, str | list | dict):
                    problem = f"expected a text or a list of blocks, got {type(text).__name__}"
                    raise MessageError(self.inside(name), problem)
                return {name: text}
        return {}

    @property
    def tools(self) -> list[Any] | None:
        """The tools that are declared; the AI SDK has them by name."""
        tools = self.fields.get("tools")
        if isinstance(tools, dict):
            named = tools.items()
            return [{"name": name, **tool} if isinstance(tool, dict) else tool for name, tool in named]
        if tools is not None and not isinstance(tools, list):
            raise MessageError(self.inside("tools"), f"expected a list, got {type(tools).__name__}")
        return tools

    @property
    def dialect(self) -> str | None:
        """The dialect of its messages, if that is clear."""
        found = spoken(self.messages)
        if found is not None:
            return found
        if isinstance(self.value, dict) and (self.name == "input" or "instructions" in self.value):
            return RESPONSES
        if isinstance(self.fields.get("system"), list):
            return "anthropic"
        first = self.messages[0] if self.messages else None
        has_system = isinstance(first, dict) and first.get("role") in ("system", "developer")
        return "openai-chat" if has_system else None

    def drafts(self, intake: Intake) -> list[Draft]:
        """All messages, parsed and counted, after the system text of the request.

        Raises:
            MessageError: says which message of which line.
        """
        known = intake._replace(default=self.dialect or intake.default)
        drafts = list[Draft]()
        for name, text in self.system.items():
            blocks = text if isinstance(text, list) else [text]
            if not all(isinstance(block, dict) and "role" in block for block in blocks):  # AI SDK messages
                is_own = SYSTEM_FIELDS[name] == (known.dialect or known.default)
                blocks = [{name: text} if is_own else {"role": "system", "content": text}]
            drafts += known.take(blocks, lambda _: self.inside(name)).drafts  # noqa: B023
        return drafts + self.said(intake)

    def said(self, intake: Intake) -> list[Draft]:
        """The messages, parsed and counted, without the system text of the request.

        Raises:
            MessageError: says which message of which line.
        """
        known = intake._replace(default=self.dialect or intake.default)
        return known.take(self.messages, self.place, self.raw).drafts

    def place(self, n: int) -> str:
        """Where a message stands, for an error."""
        return self.inside(f"{self.name}[{n}]")

    def inside(self, field: str) -> str:
        """Where a field of the request stands, for an error."""
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
    lines = data.lstrip().split(b"\n")
    if "refold" not in _object(lines[0]):
        return None
    return [line.decode("utf-8", "surrogateescape") for line in lines]


def conversations(data: bytes, name: str) -> list[FileConversation]:
    """The conversations of a file: a single one, one per line, or one with a message per line."""
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    first = _object(lines[0][1]) if len(lines) > 1 else {}
    if not first:
        return [_parse(data, name)]
    if "role" in first:
        messages = [_decode(line, f"{name}: line {n}") for n, line in lines]
        written = _as_written(b"[" + b",".join(line for _, line in lines) + b"]")
        return [FileConversation(name, messages, "messages", written)]
    return [_parse(line, f"{name}: line {n}") for n, line in lines]


def conversation(data: bytes, name: str) -> FileConversation:
    """The only conversation of a file.

    Raises:
        MessageError: the file has several, or an export of refold.
    """
    if export_in(data) is not None:
        raise MessageError(name, "is an export of refold; `refold import` stores it, `refold show` shows it")
    found = conversations(data, name)
    if len(found) > 1:
        raise MessageError(name, f"has {len(found):,} conversations, one a line; give one of them")
    return found[0]


def _parse(data: bytes, where: str) -> FileConversation:
    if not data.strip():
        raise MessageError(where, f"is empty; {EXPECTED}")
    value = _decode(data, where)
    if isinstance(value, list):
        return FileConversation(where, value, "messages", _as_written(data))
    if not isinstance(value, dict):
        raise MessageError(where, f"is a JSON {type(value).__name__}; {EXPECTED}")
    for name in LISTS:
        if isinstance(value.get(name), list):
            return FileConversation(where, value, name, _as_written(data, name))
    if isinstance(value.get("input"), str):  # the Responses API takes a text for a single user message
        return FileConversation(where, value, "input", None)
    raise MessageError(where, f"has no list `messages` or `input`; {EXPECTED}")


def _as_written(data: bytes, name: str | None = None) -> list[bytes] | None:
    try:
        if name is not None:
            data = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])[name])
        return list(map(bytes, msgspec.json.decode(data, type=list[msgspec.Raw])))
    except msgspec.DecodeError:  # lone surrogates, which only json reads
        return None


def _decode(data: bytes, where: str) -> Any:
    try:
        return codec.loads(data)
    except json.JSONDecodeError as error:
        place = f"{where}: line {error.lineno}, column {error.colno}"
        raise MessageError(place, f"is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise MessageError(where, "is nested too deeply to be read") from error
    except UnicodeDecodeError as error:
        raise MessageError(where, "is not UTF-8") from error
    except ValueError as error:  # a number that is too long
        raise MessageError(where, f"is not JSON: {error}") from error


def _object(line: bytes) -> dict[str, Any]:
    """The object in a line; empty if the line has none."""
    try:
        value = codec.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def intake_for(config: Config, model: str | None, dialect: str | None) -> Intake:
    """Parses and counts the messages of a file, for a model, in a dialect or in the one each is in."""
    if dialect is not None:
        find_dialect(dialect)
    settings = config.agent(None)
    meter = Meter(None, config, model or settings.model, settings.counter)
    return Intake(meter.counter, meter.dialect, dialect)
