"""The description of the API, as OpenAPI 3.1: made of the table of its routes and the types they name."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import msgspec

from refold.core import event, message
from refold.serve import schemas as shapes
from refold.session import results as answers

if TYPE_CHECKING:
    from refold.serve.api import Endpoint

REF = "#/components/schemas/{name}"
MODULES = (shapes, answers, event, message)
"""Where the types are."""
ERRORS = {
    400: "Something in it is not known or not allowed; the message says what.",
    401: "A token is needed.",
    403: "The token does not allow it.",
    404: "There is no such conversation, place or part.",
    405: "It cannot be done here.",
    408: "The request took too long to come.",
    409: "The name is taken, or somebody else was faster.",
    413: "The body is too large.",
    415: "A body must be JSON.",
    429: "There are too many requests; retry-after says when to come again.",
    431: "The headers are too large.",
    500: "Something is wrong here; the log says what.",
    503: "The store cannot be used now.",
}
LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The id of the last event that was seen; it counts more than `after`.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
}


@cache
def described(endpoints: "tuple[Endpoint, ...]") -> Mapping[str, Any]:
    schemas = _schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schemas)
    for one in endpoints:
        schemas.pop(one.query.__name__, None)  # its fields are parameters
    says = "What was said, what the model sees of it, and why."
    token = {"type": "http", "scheme": "bearer", "description": "Where tokens are configured."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "refold", "version": version("refold"), "description": says},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": token}},
        "security": [{"token": []}, {}],
    }


def _operation(one: "Endpoint", schemas: Mapping[str, Any]) -> dict[str, Any]:
    responses = {str(status): _answer(says, shapes.Failure) for status, says in ERRORS.items()}
    operation: dict[str, Any] = {
        "operationId": one.verb,
        "summary": one.says,
        "description": f"Needs the scope `{one.needs}`.",
        "parameters": [*_parameters(one, schemas[one.query.__name__])],
        "responses": {str(one.status): _answer(one.says, one.answer)} | responses,
    }
    if one.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(one.body)}
    return operation


def _parameters(one: "Endpoint", query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "{id}" in one.path:
        yield {"name": "id", "in": "path", "required": True, "schema": msgspec.json.schema(shapes.Id)}
    for name, schema in query["properties"].items():
        is_needed = name in query.get("required", ())
        yield {"name": name, "in": "query", "required": is_needed, "schema": _given(schema)}
    if one.query is shapes.EventsAsked:
        yield LAST_EVENT_ID


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that is not wanted is left out, never null."""
    some = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return some[0] | rest if len(some) == 1 else schema


def _answer(says: str, type: Any) -> dict[str, Any]:
    return {"description": says, "content": _content(type)}


def _content(type: Any) -> dict[str, Any]:
    if isinstance(type, str):
        return {type: {"schema": {"type": "string"}}}
    is_ours = hasattr(type, "__struct_fields__")
    return {"application/json": {"schema": {"$ref": REF.format(name=type.__name__)} if is_ours else {}}}


def _schemas(endpoints: "tuple[Endpoint, ...]") -> dict[str, Any]:
    """Of all types, with what is written under their fields."""
    known = [type for one in endpoints for type in (one.answer, one.query, one.body)]
    types = dict.fromkeys(type for type in (*known, shapes.Failure) if hasattr(type, "__struct_fields__"))
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    for name, schema in schemas.items():
        type = next((getattr(module, name) for module in MODULES if hasattr(module, name)), None)
        for field, says in documented(type):
            if field in schema.get("properties", {}):
                schema["properties"][field].setdefault("description", says)
    return schemas


def documented(type: Any) -> Iterator[tuple[str, str]]:
    """Its fields, each with what is written under it."""
    for one in inspect.getmro(type) if inspect.isclass(type) else ():
        if one.__module__.startswith("refold."):
            (tree,) = ast.parse(dedent(inspect.getsource(one))).body
            for field, below in pairwise(getattr(tree, "body", ())):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(says))):
                        yield name, says
