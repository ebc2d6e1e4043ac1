"""Converts SDK objects and dicts to JSON values, and rejects everything that JSON cannot represent."""

from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

import msgspec

from refold.core.codec import MAX_JSON_DEPTH, dumps
from refold.core.errors import MessageError
from refold.core.message import Message

T = TypeVar("T")
LONG_PLACE = 100
"""Characters of a place in an error message."""
EXPECTED = "expected a dict, an SDK object or a refold.Message"
PARSED = ("parsed", "parsed_arguments", "parsed_output")
"""Fields that SDKs add to replies, and that the providers refuse in requests."""


def checked(value: Any, type: type[T], where: str) -> T:
    """The value as it will be read from the store.

    Raises:
        MessageError: it has the wrong type, or JSON cannot represent it.
    """
    try:
        builtins = msgspec.to_builtins(value, builtin_types=(bytes, bytearray))  # rejected by to_json
        found = to_json(builtins, where)
        dumps(found)
        return msgspec.convert(found, type)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise MessageError(where + path.rstrip("`"), problem) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(where, f"is not JSON: {error}") from error


def encoded(value: Any, where: str) -> bytes:
    try:
        return dumps(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise MessageError(where, f"is not JSON: {error}") from error


def plain(value: Any, where: str) -> Any:
    """Returns a refold message unchanged, and anything else as JSON.

    Raises:
        MessageError: JSON cannot represent it.
    """
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping) and not hasattr(value, "model_dump"):
        raise MessageError(where, f"{EXPECTED}, got {type(value).__name__}")
    try:
        found = to_json(value, where)
    except MessageError:
        raise
    except Exception as error:  # objects of SDKs may raise anything
        raise MessageError(where, f"{type(value).__name__} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise MessageError(where, f"{type(value).__name__}.model_dump() gives a {type(found).__name__}")
    if isinstance(value, Mapping):
        return found
    from refold.dialects import replies  # only for those who hand in an SDK's objects

    return replies.returnable(found)


def to_json(value: Any, where: str, depth: int = 0) -> Any:
    """The JSON value that an SDK object, a mapping, or any kind of text or number stands for.

    Raises:
        MessageError: JSON has no value for a part of it, such as NaN or infinity, which some encoders would
            silently write as null.
    """
    if depth > MAX_JSON_DEPTH:
        raise MessageError(where[:LONG_PLACE] + "…", f"is nested deeper than {MAX_JSON_DEPTH} levels")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            if not isfinite(value):
                raise MessageError(where, f"{value} is not a JSON number; send it as text")
            return float.__float__(value)
        case Mapping():
            mapping = {}
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise MessageError(where, f"has the key {key!r}; keys of a JSON object are texts")
                is_text = type(inner) is str
                mapping[str.__str__(key)] = inner if is_text else to_json(inner, f"{where}.{key}", depth + 1)
            return mapping
        case list() | tuple():
            found = []
            for n, inner in enumerate(value):
                found.append(inner if type(inner) is str else to_json(inner, f"{where}[{n}]", depth + 1))
            return found
    if not hasattr(value, "model_dump"):
        raise MessageError(where, f"{type(value).__name__} cannot be represented in JSON")
    return to_json(_dumped(value, where), where, depth)


def _dumped(value: Any, where: str) -> Any:
    """The fields that the provider set: a field that it did not send must not be sent back to it."""
    options = {"mode": "json", "exclude_unset": True, "by_alias": True, "exclude": _parsed_fields(value)}
    try:
        for supported in ({**options, "warnings": False}, options):
            with suppress(TypeError, ValueError):  # an older pydantic, or another class with this method
                return value.model_dump(**supported)
        return value.model_dump()
    except Exception as error:  # objects of SDKs may raise anything
        raise MessageError(where, f"{type(value).__name__}.model_dump() failed: {error}") from error


def _parsed_fields(value: Any) -> dict[Any, Any] | None:
    """The paths of `PARSED` fields in an SDK object, as `model_dump` takes them."""
    named = getattr(value, "__dict__", {}) if hasattr(value, "model_dump") else {}
    fields = enumerate(value) if isinstance(value, list) else named.items()
    found = {key: True if key in PARSED else _parsed_fields(inner) for key, inner in fields}
    return {key: inner for key, inner in found.items() if inner} or None
