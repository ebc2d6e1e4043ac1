"""What callers ask for, checked before anything is done."""

from collections.abc import Mapping, Sequence
from typing import Any

from refold.core.errors import SettingError
from refold.tokens.count import count_json


def whole(name: str, value: object) -> int:
    """
    Raises:
        SettingError: it is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(name, f"expected a whole number such as 57, got {value!r}")
    return value


def named(name: str, value: object) -> str:
    """
    Raises:
        SettingError: it is no name.
    """
    if not isinstance(value, str) or not value:
        raise SettingError(name, f"expected a text of at least one character, got {value!r}")
    return value


def tool_tokens(tools: Sequence[Any]) -> int:
    if not isinstance(tools, list | tuple):
        raise SettingError("tools", f"expected a list, got {type(tools).__name__}")
    try:
        return count_json(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError("tools", f"are not JSON: {error}") from error


def is_off(override: Mapping[str, Any] | None) -> bool:
    if not isinstance(override, Mapping | None):
        raise SettingError("override", f"expected a dict, got {type(override).__name__}")
    for key in override or ():
        if key != "off":
            raise SettingError(f"override.{key}", "is not known; known here: off")
    return bool(override and override["off"])
