"""Can a value be sent? JSON in UTF-8 has no NaN, no lone surrogates, and no end of depth."""

from math import isfinite
from typing import Any

from refold.core.codec import loads

MAX_DEPTH = 200
"""How deep the JSON of a message may nest."""
AROUND = 5
"""Levels of a message around what a tool is given."""
_PLAIN = frozenset({bool, int, type(None)})


def read(text: str) -> Any:
    """The JSON in a text, such as the input that a model wrote for a tool.

    Raises:
        ValueError: it is none, or none that could be sent on.
    """
    try:
        value = loads(text.encode("utf-8", "surrogatepass"))
        problem = json_problem(value, AROUND)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if problem and "surrogate" not in problem:
        raise ValueError(problem)
    return value


def json_problem(value: Any, depth: int = 0) -> str | None:
    """What keeps a value from being sent as JSON in UTF-8: the first thing that is found, in words."""
    if isinstance(value, dict):
        if depth > MAX_DEPTH:
            return f"values nested deeper than {MAX_DEPTH} levels"
        for key, inner in value.items():
            if type(key) is not str or not key.isascii():
                if not isinstance(key, str):
                    return "a key that is not a string"
                if _torn(key):
                    return "a key with a lone surrogate"
            kind = type(inner)
            if kind is str:
                if not inner.isascii() and _torn(inner):
                    return "a lone surrogate"
            elif kind not in _PLAIN and (problem := json_problem(inner, depth + 1)):
                return problem
        return None
    if isinstance(value, list):
        if depth > MAX_DEPTH:
            return f"values nested deeper than {MAX_DEPTH} levels"
        for inner in value:
            if type(inner) not in _PLAIN and (problem := json_problem(inner, depth + 1)):
                return problem
        return None
    if isinstance(value, str):
        return "a lone surrogate" if not value.isascii() and _torn(value) else None
    if isinstance(value, float):
        return None if isfinite(value) else "a number that is not finite"
    return None if value is None or isinstance(value, int) else f"a {type(value).__name__}, no JSON value,"


def _torn(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
