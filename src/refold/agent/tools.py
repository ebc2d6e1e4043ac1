"""Tools made from typed Python functions: their declarations for the model, and the parsing of its arguments.

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
from refold.core.expiry import OWN_TOOLS
from refold.core.message import Media, Text
from refold.dialects.registry import DIALECTS
from refold.summaries.providers import without_surrogates

ToolOutput: TypeAlias = str | tuple[Text | Media, ...]
MOST_FOUND = 8
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")


class FoundTools(msgspec.Struct, frozen=True):
    """The result of a search in the library. Its tools are offered for as long as it is in view."""

    text: str
    tools: tuple[str, ...]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call, sync or async. `Tool.of` derives one from annotations."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of an object."""
    function: Callable[..., Any]
    type: Any = None
    """The struct that arguments are converted to; None passes them on unconverted."""

    @classmethod
    def of(cls, function: "Callable[..., Any] | Tool", *, name: str = "", description: str = "") -> "Tool":
        """Raises SettingError, which names the parameter, if a model cannot call the function."""
        if isinstance(function, Tool):
            return function
        name = name or getattr(function, "__name__", "")
        if not callable(function) or not _NAME.fullmatch(name):
            raise SettingError(
                "tools", f"expected functions named with letters, digits, _ or -; got {function!r}"
            )
        doc = inspect.getdoc(function) or ""
        type = msgspec.defstruct(name, _fields(function, name, doc), forbid_unknown_fields=True)
        try:
            schema = msgspec.json.schema(type)
        except TypeError as error:
            raise SettingError(f"tool {name!r}", f"annotate it with types that JSON has: {error}") from error
        definitions = schema.get("$defs", {})
        parameters = definitions.pop(schema["$ref"].rpartition("/")[2])
        for field in ("title", "description"):
            parameters.pop(field, None)
        if definitions:
            parameters["$defs"] = definitions
        if not description:
            section = _SECTION.search(doc)
            description = doc[: section.start()].strip() if section else doc
        return cls(name=name, description=description, parameters=parameters, function=function, type=type)

    def parse_arguments(self, written: str) -> dict[str, Any]:
        """The arguments of a call, converted to what the function takes.

        Raises:
            ValueError: a sentence for the model.
        """
        try:
            values = msgspec.json.decode(written or "{}", type=dict[str, Any])
            if self.type is None:
                return values
            converted = msgspec.convert(values, self.type, strict=False)  # "5" is accepted for 5
        except (msgspec.MsgspecError, UnicodeError) as error:
            names = ", ".join(self.parameters.get("properties", {})) or "none"
            raise ValueError(f"The arguments of {self.name} are wrong: {error}. It takes: {names}") from error
        arguments = {field: getattr(converted, field) for field in self.type.__struct_fields__}
        return {field: value for field, value in arguments.items() if value is not UNSET}

    def declared(self, dialect: str) -> dict[str, Any]:
        """The declaration for requests in a dialect."""
        return DIALECTS[dialect].declare_tool(self.name, self.description, dict(self.parameters))


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Raises SettingError if two tools have the same name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found or tool.name in OWN_TOOLS:
            raise SettingError("tools", f"two tools are named {tool.name!r}; rename one")
        found[tool.name] = tool
    return found


def library_search(library: Sequence[Tool]) -> Tool:
    """A tool that finds others, for a library too large to offer all of it."""

    def find_tools(query: str) -> FoundTools:
        """Finds more tools that you can use, by words for what they should do."""
        words = re.findall(r"\w+", query.lower())
        ranks = {tool.name: _rank(tool, words) for tool in library}
        matching = [tool for tool in library if ranks[tool.name]]
        if not matching:
            return FoundTools("No tool matches that; try other words.", ())
        best = sorted(matching, key=lambda tool: -ranks[tool.name])[:MOST_FOUND]
        lines = [f"{tool.name}: {tool.description.partition(chr(10))[0]}" for tool in best]
        return FoundTools("\n".join(["You can call these now:", *lines]), tuple(tool.name for tool in best))

    return Tool.of(find_tools)


def _rank(tool: Tool, words: Sequence[str]) -> int:
    name = tool.name.lower()
    description = tool.description.lower()
    return sum(3 * (word in name) + (word in description) for word in words)


def tool_output(returned: Any) -> ToolOutput:
    """What a function returned, as a tool result: text and media as they are, anything else as JSON."""
    match returned:
        case None:
            return ""
        case str():
            return without_surrogates(returned)
        case Text() | Media():
            return (returned,)
        case Iterator():
            return tool_output(list(returned))
        case list() | tuple() if returned and all(isinstance(one, Text | Media) for one in returned):
            return tuple(returned)
    return msgspec.json.encode(returned, enc_hook=str).decode()


def _fields(function: Callable[..., Any], name: str, doc: str) -> list[Any]:
    """The parameters as fields of a struct, described by the docstring's section `Args:`."""
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise SettingError(f"tool {name!r}", f"its annotations cannot be read: {error}") from error
    descriptions = _parameter_docs(doc)
    fields: list[Any] = []
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SettingError(f"tool {name!r}", f"a model cannot pass {parameter}; name each parameter")
        hint = hints.get(parameter.name, Any)
        if parameter.name in descriptions:
            hint = Annotated[hint, msgspec.Meta(description=descriptions[parameter.name])]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:  # if the model leaves it out, the function's own default applies
            fields.append((parameter.name, hint | UnsetType, UNSET))
    return fields


def _parameter_docs(doc: str) -> dict[str, str]:
    section = _ARGUMENTS.search(doc)
    descriptions: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        entry = _ARGUMENT.match(line)
        if entry:
            name = entry[1]
            descriptions[name] = entry[2]
        elif name and line.strip():
            descriptions[name] += f" {line.strip()}"
    return descriptions
