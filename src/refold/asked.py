"""What callers ask for, checked before anything is done."""

from collections.abc import Mapping
from typing import Any

from refold.core.errors import SettingError


def whole(name: str, value: object) -> int:
    """
    Raises:
        SettingError: it is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(name, f"expected a whole number such as 57, got {shown(value)}")
    return value


def named(name: str, value: object) -> str:
    """
    Raises:
        SettingError: it is no name.
    """
    if not isinstance(value, str) or not value:
        raise SettingError(name, f"expected a text of at least one character, got {shown(value)}")
    return value


def model_name(model: str | None) -> str | None:
    """
    Raises:
        SettingError: no model can be called that.
    """
    if model is not None and not named("model", model).isprintable():
        raise SettingError("model", f"is no name of a model: {shown(model)}")
    return model


def shown(value: object) -> str:
    """How a sentence mentions a value that may be anything."""
    return repr(value)[:64] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def fields(request: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """
    Raises:
        SettingError: it is no dict.
    """
    if not isinstance(request, Mapping | None):
        raise SettingError("request", f"expected a dict, got {type(request).__name__}")
    return request or {}


def output_of(request: Mapping[str, Any]) -> int | None:
    """How long an answer a request asks for, where it says so.

    Raises:
        SettingError: it is no whole number above 0.
    """
    for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
        if request.get(name) is not None:
            if whole(name, request[name]) < 1:
                raise SettingError(name, f"expected at least 1, got {request[name]}")
            return int(request[name])
    return None


def is_off(override: Mapping[str, Any] | None) -> bool:
    if not isinstance(override, Mapping | None):
        raise SettingError("override", f"expected a dict, got {type(override).__name__}")
    for key in override or ():
        if key != "off":
            raise SettingError(f"override.{key}", "is not known; known here: off")
    return bool(override and override["off"])
