"""The OpenAPI 3.1 description of the HTTP API, made from the table of its routes and their types."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from textwrap import dedent
from typing import Any

import msgspec

from refold.core import event, message
from refold.serve import schemas
from refold.serve.api import ENDPOINTS, Endpoint
from refold.session import results, savings, steps

REF = "#/components/schemas/{name}"
MODULES = (schemas, results, savings, steps, event, message)
"""Where the types are defined."""
ERRORS = {
    400: "A parameter or field is unknown or invalid; the message says which.",
    401: "A token is required.",
    403: "The token does not allow this.",
    404: "There is no such conversation, place or part.",
    405: "The path does not have this method.",
    408: "The request did not arrive in time.",
    409: "The name is taken, or another writer won the race.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    426: "Websockets are not supported.",
    429: "Too many requests; `retry-after` says when to try again.",
    431: "The headers are too large.",
    500: "An internal error; see the log.",
    503: "The store is unavailable.",
}
LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The id of the last event that was seen; it takes precedence over `after`.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
}


@cache
def description() -> dict[str, Any]:
    components = _components()
    paths: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, components)
    for one in ENDPOINTS:
        components.pop(one.query.__name__, None)  # its fields are parameters
    about = "What was recorded, what the model sees of it, and why."
    token = {"type": "http", "scheme": "bearer", "description": "Required if tokens are configured."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "refold", "version": version("refold"), "description": about},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": token}},
        "security": [{"token": []}, {}],
    }


def _operation(one: Endpoint, components: Mapping[str, Any]) -> dict[str, Any]:
    answer = {one.stream: {"schema": {"type": "string"}}} if one.stream else _content(one.answer)
    responses = {str(one.status): {"description": one.summary, "content": answer}}
    for status, text in ERRORS.items():
        responses[str(status)] = {"description": text, "content": _content(schemas.ErrorAnswer)}
    operation: dict[str, Any] = {
        "operationId": one.operation,
        "summary": one.summary,
        "description": f"Needs the scope `{one.scope}`.",
        "parameters": [*_parameters(one, components[one.query.__name__])],
        "responses": responses,
    }
    if one.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(one.body)}
    return operation


def _parameters(one: Endpoint, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "{id}" in one.path:
        yield {"name": "id", "in": "path", "required": True, "schema": msgspec.json.schema(schemas.Id)}
    for name, schema in query["properties"].items():
        is_required = name in query.get("required", ())
        yield {"name": name, "in": "query", "required": is_required, "schema": _not_null(schema)}
    if one.query is schemas.EventsQuery:
        yield LAST_EVENT_ID


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
    known: list[Any] = [schemas.ErrorAnswer]
    for one in ENDPOINTS:
        known += (one.answer, one.query, one.body)
    types = dict.fromkeys(type for type in known if hasattr(type, "__struct_fields__"))
    _, components = msgspec.json.schema_components(types, ref_template=REF)
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
