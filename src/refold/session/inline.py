"""How to copy the messages of a request, so that its caller may do with them what it likes."""

from collections.abc import Callable
from typing import Any, TypeAlias

Copy: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


def copier(message: dict[str, Any]) -> Copy:
    """How to copy a message down to its leaves: every step does it for hundreds of them."""
    nested = [key for key, value in message.items() if isinstance(value, dict | list)]
    if not nested:
        return dict.copy
    if nested == ["tool_calls"] and all(map(_is_plain_call, message["tool_calls"])):
        return _copy_calls
    return _copy


def _is_plain_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return False
    nested = [key for key, value in call.items() if isinstance(value, dict | list)]
    return nested == ["function"] and all(isinstance(value, str) for value in call["function"].values())


def _copy_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _copy(message: dict[str, Any]) -> dict[str, Any]:
    new = message.copy()
    for key, inner in message.items():
        if type(inner) is dict:
            new[key] = _copy(inner)
        elif type(inner) is list:
            new[key] = _copy_list(inner)
    return new


def _copy_list(values: list[Any]) -> list[Any]:
    return [_copy(v) if type(v) is dict else _copy_list(v) if type(v) is list else v for v in values]
