"""The OpenAPI 3.1 description of the HTTP API, made from the table of its routes and their types."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from textwrap import dedent
from typing import Any

import msgspec

from refold.core import event, message
from refold.serve import api
from refold.serve.endpoint import ENDPOINTS, Endpoint
from refold.serve.http_errors import ERRORS, ErrorAnswer
from refold.session import results, savings, steps
from refold.stores import store

REF = "#/components/schemas/{name}"
MODULES = (api, results, savings, steps, store, event, message)
"""Where the types are defined."""
LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The id of the last event that was seen; it takes precedence over `after`.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
}


@cache
def description() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    about = "What was recorded, what the model sees of it, and why."
    token = {"type": "http", "scheme": "bearer", "description": "Required if tokens are configured."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "refold", "version": version("refold"), "description": about},
        "paths": paths,
        "components": {"schemas": _components(), "securitySchemes": {"token": token}},
        "security": [{"token": []}, {}],
    }


def _operation(one: Endpoint) -> dict[str, Any]:
    answer = {one.stream: {"schema": {"type": "string"}}} if one.stream else _content(one.answer)
    responses = {str(one.status): {"description": one.summary, "content": answer}}
    for status, error in ERRORS.items():
        responses[str(status)] = {"description": error.meaning, "content": _content(ErrorAnswer)}
    operation: dict[str, Any] = {
        "operationId": one.operation,
        "summary": one.summary,
        "description": f"Needs the scope `{one.scope}`.",
        "parameters": list(_parameters(one)),
        "responses": responses,
    }
    if one.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(one.body)}
    return operation


def _parameters(one: Endpoint) -> Iterator[dict[str, Any]]:
    if "{id}" in one.path:
        yield {"name": "id", "in": "path", "required": True, "schema": msgspec.json.schema(api.Id)}
    query = schema_of(one.query)
    for name, schema in query["properties"].items():
        is_required = name in query.get("required", ())
        yield {"name": name, "in": "query", "required": is_required, "schema": _not_null(schema)}
    if one.operation == "events":
        yield LAST_EVENT_ID


def schema_of(type: Any) -> dict[str, Any]:
    """The JSON schema of a query or a body."""
    _, components = msgspec.json.schema_components([type])
    schema: dict[str, Any] = components[type.__name__]
    return schema


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """An optional parameter is omitted, never null."""
    options = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(options) != 1:
        return schema
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return {**options[0], **rest}


def _content(type: Any) -> dict[str, Any]:
    if not hasattr(type, "__struct_fields__"):
        return {"application/json": {"schema": {}}}
    return {"application/json": {"schema": {"$ref": REF.format(name=type.__name__)}}}


def _components() -> dict[str, Any]:
    """Schemas of all types; the docstring under a field is its description."""
    types: list[Any] = [ErrorAnswer]
    for one in ENDPOINTS:
        types += [type for type in (one.answer, one.body) if hasattr(type, "__struct_fields__")]
    _, components = msgspec.json.schema_components(dict.fromkeys(types), ref_template=REF)
    for name, schema in components.items():
        type = next((getattr(module, name) for module in MODULES if hasattr(module, name)), None)
        for field, text in documented(type):
            if field in schema.get("properties", {}):
                schema["properties"][field].setdefault("description", text)
    return components


def documented(type: Any) -> Iterator[tuple[str, str]]:
    """The fields of a type that have a docstring, and the docstrings."""
    for one in inspect.getmro(type) if inspect.isclass(type) else ():
        if one.__module__.startswith("refold."):
            (tree,) = ast.parse(dedent(inspect.getsource(one))).body
            for field, below in pairwise(getattr(tree, "body", ())):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        yield name, text
