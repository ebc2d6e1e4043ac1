"""Tools as OpenAI's models see them: schemas are written as types, which is shorter than JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

FIELDS, LEVELS = 2_000, 20
"""Limits for a tool, whose schema may refer to itself."""


class Declared(NamedTuple):
    """A tool, declared for any API."""

    name: str
    description: str
    schema: Mapping[str, Any]

    @classmethod
    def of(cls, tool: Any) -> "Declared | None":
        """None for a provider's own tool, which a request only names."""
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            return None
        schemas = [inner[key] for key in ("parameters", "input_schema", "inputSchema") if key in inner]
        if not schemas and inner.get("type", "function") not in ("function", "custom"):
            return None
        description = inner.get("description")
        schema = schemas[0] if schemas and isinstance(schemas[0], Mapping) else {}
        return cls(inner["name"], description if isinstance(description, str) else "", schema)


def typed(tools: Sequence[Declared]) -> str:
    """The tools as types.

    >>> print(typed([Declared("look", "Looks.", {"properties": {"at": {"type": "integer"}}})]))
    # Tools
    <BLANKLINE>
    ## functions
    <BLANKLINE>
    namespace functions {
    <BLANKLINE>
    // Looks.
    type look = (_: {
    at?: number,
    }) => any;
    <BLANKLINE>
    } // namespace functions
    """
    lines = ["# Tools", "", "## functions", "", "namespace functions {", ""]
    for tool in tools:
        given = f"_: {_Types(tool.schema).object(tool.schema)}" if tool.schema.get("properties") else ""
        lines += [*_comment(tool.description), f"type {tool.name} = ({given}) => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


class _Types:
    """Writes one schema as types."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.left = root, FIELDS

    def object(self, schema: Mapping[str, Any], level: int = 0) -> str:
        return "\n".join(["{", *self._fields(schema, level), "}"])

    def _fields(self, schema: Mapping[str, Any], level: int) -> Iterator[str]:
        properties, required = schema.get("properties"), schema.get("required")
        required = required if isinstance(required, list) else ()
        for name, field in properties.items() if isinstance(properties, Mapping) else ():
            known = field if isinstance(field, Mapping) else {}
            yield from _comment(known.get("description"))
            default = f" // default: {_value(known['default'])}" if "default" in known else ""
            yield f"{name}{'' if name in required else '?'}: {self._type(known, level + 1)},{default}"

    def _type(self, schema: Any, level: int) -> str:
        self.left -= 1
        if not isinstance(schema, Mapping) or self.left < 0 or level > LEVELS:
            return "any"
        match schema:
            case {"$ref": str(reference)}:
                known = self.root.get("$defs") or self.root.get("definitions") or {}
                found = known.get(reference.rpartition("/")[2]) if isinstance(known, Mapping) else None
                return self._type(found, level + 1)
            case {"enum": list(values)}:
                return " | ".join(map(_value, values))
            case {"const": value}:
                return _value(value)
            case {"anyOf": list(kinds)} | {"oneOf": list(kinds)} | {"allOf": list(kinds)}:
                return " | ".join(self._type(kind, level + 1) for kind in kinds)
            case {"type": list(kinds)}:
                return " | ".join(self._type({**schema, "type": kind}, level + 1) for kind in kinds)
            case {"type": "array"}:
                return f"{self._type(schema.get('items'), level + 1)}[]"
            case {"type": "object"} | {"properties": _}:
                return self.object(schema, level)
            case {"type": str(kind)}:
                return "number" if kind == "integer" else kind
        return "any"


def _comment(text: Any) -> list[str]:
    return [f"// {line}" for line in text.splitlines()] if isinstance(text, str) else []


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
