"""Tools from typed Python functions: what the model is told of them, and what it wrote checked against it.

>>> def read(path: str, lines: int = 100) -> str:
...     '''The beginning of a file.'''
>>> Tool.of(read).parameters["required"]
['path']
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from refold.core.errors import SettingError
from refold.core.lease import OWN
from refold.core.message import Media, Text
from refold.summaries.models import sendable

Output: TypeAlias = str | tuple[Text | Media, ...]
FIND = "find_tools"
MOST_FOUND = 8
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Found(msgspec.Struct, frozen=True):
    """An answer that has tools behind it: they are offered for as long as it is in view."""

    text: str
    tools: tuple[str, ...]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call, sync or async. `Tool.of` makes one of its annotations."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of an object."""
    function: Callable[..., Any]
    type: Any = None
    """What arguments are converted to; None takes them as they come."""

    @classmethod
    def of(cls, function: "Callable[..., Any] | Tool", *, name: str = "", description: str = "") -> "Tool":
        """
        Raises:
            SettingError: a model could not call it; says which of its parameters is the reason.
        """
        if isinstance(function, Tool):
            return function
        name = name or getattr(function, "__name__", "")
        if not callable(function) or not _NAME.fullmatch(name):
            raise SettingError("tools", f"expected functions with names of letters and _, got {function!r}")
        about = inspect.getdoc(function) or ""
        type = msgspec.defstruct(name, _fields(function, name, about), forbid_unknown_fields=True)
        try:
            schema = msgspec.json.schema(type)
        except TypeError as error:
            raise SettingError(f"tool {name!r}", f"annotate it with types that JSON has: {error}") from error
        parts = schema.get("$defs", {})
        parameters = parts.pop(schema["$ref"].rpartition("/")[2]) | ({"$defs": parts} if parts else {})
        parameters = {key: value for key, value in parameters.items() if key not in ("title", "description")}
        about = description or _head(about)
        return cls(name=name, description=about, parameters=parameters, function=function, type=type)

    def read(self, written: str) -> dict[str, Any]:
        """The arguments in a call, as the function takes them.

        Raises:
            ValueError: a sentence for the model.
        """
        try:
            given = msgspec.json.decode(written or "{}", type=dict[str, Any])
            if self.type is None:
                return given
            arguments = msgspec.convert(given, self.type, strict=False)  # "5" will do for 5
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ValueError(f"The arguments of {self.name} are wrong: {error}. {self._wanted}") from error
        found = {field: getattr(arguments, field) for field in self.type.__struct_fields__}
        return {field: value for field, value in found.items() if value is not UNSET}

    @property
    def summary(self) -> str:
        """The first line of what it is."""
        return self.description.partition("\n")[0]

    @property
    def _wanted(self) -> str:
        properties, required = self.parameters.get("properties", {}), self.parameters.get("required", ())
        names = [name if name in required else f"{name}?" for name in properties]
        return f"It takes an object with {', '.join(names)}" if names else "It takes none: {}"

    def declared(self, dialect: str) -> dict[str, Any]:
        """As a request in the dialect offers it."""
        about, schema = {"name": self.name, "description": self.description}, dict(self.parameters)
        match dialect:
            case "anthropic":
                return {**about, "input_schema": schema}
            case "openai-responses":
                return {"type": "function", **about, "parameters": schema}
            case "ai-sdk":
                return {"type": "function", **about, "inputSchema": schema}
            case _:
                return {"type": "function", "function": {**about, "parameters": schema}}


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """
    Raises:
        SettingError: two have the same name.
    """
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found or tool.name in OWN:
            raise SettingError("tools", f"there are two that are called {tool.name!r}; rename one")
        found[tool.name] = tool
    return found


def finder(library: Sequence[Tool]) -> Tool:
    """The tool by which others are found, of which there are too many to offer all."""

    def find_tools(query: str) -> Found:
        """Finds more tools that you can use, by words for what they should do."""
        words = re.findall(r"\w+", query.lower())
        ranks = {tool.name: _rank(tool, words) for tool in library}
        best = sorted((t for t in library if ranks[t.name]), key=lambda t: -ranks[t.name])[:MOST_FOUND]
        if not best:
            return Found("No tool has to do with that; try other words.", ())
        lines = [f"{tool.name}: {tool.summary}" for tool in best]
        return Found("\n".join(["You can call these now:", *lines]), tuple(tool.name for tool in best))

    return Tool.of(find_tools, name=FIND)


def output_of(given: Any) -> Output:
    """What a function gave back, as a tool's result: text and images as they are, all else as JSON."""
    match given:
        case None:
            return ""
        case str():
            return sendable(given)
        case Text() | Media():
            return (given,)
        case Iterator():
            return output_of(list(given))
        case list() | tuple() if given and all(isinstance(one, Text | Media) for one in given):
            return tuple(given)
    return msgspec.json.encode(given, enc_hook=str).decode()


def _fields(function: Callable[..., Any], name: str, about: str) -> list[Any]:
    try:
        parameters, hints = (
            inspect.signature(function).parameters,
            get_type_hints(function, include_extras=True),
        )
    except (NameError, TypeError, ValueError) as error:
        raise SettingError(f"tool {name!r}", f"its annotations cannot be read: {error}") from error
    told = _told(about)
    fields: list[Any] = []
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SettingError(f"tool {name!r}", f"a model cannot give it {parameter}; name each")
        hint = hints.get(parameter.name, Any)
        if parameter.name in told:
            hint = Annotated[hint, msgspec.Meta(description=told[parameter.name])]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:  # left out, it is the function's own default
            fields.append((parameter.name, hint | UnsetType, UNSET))
    return fields


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)


def _head(about: str) -> str:
    """A docstring up to its sections."""
    section = _SECTION.search(about)
    return about[: section.start()].strip() if section else about


def _told(about: str) -> dict[str, str]:
    """What the section `Args:` says of each parameter."""
    match = re.search(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", about, re.MULTILINE)
    lines = match[1].splitlines() if match else []
    told: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = re.match(r"\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        if entry:
            name = entry[1]
            told[name] = entry[2]
        elif name and line.strip():
            told[name] += f" {line.strip()}"
    return told


def _rank(tool: Tool, words: Sequence[str]) -> int:
    name, about = tool.name.lower(), tool.description.lower()
    return sum(3 * (word in name) + (word in about) for word in words)
