"""Validates settings: known names, values of their type, numbers in their range."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from refold.core.errors import SettingError

Path: TypeAlias = tuple[str, ...]
Place: TypeAlias = Callable[[Path], str]
"""Formats a path for errors."""


class Range(NamedTuple):
    low: float = 0
    high: float = 10**12
    is_open: bool = False
    """Excludes `low` itself."""

    def problem(self, number: float) -> str | None:
        """What is wrong with a number outside of the range."""
        if number < self.low or (self.is_open and number == self.low):
            least = f"more than {self.low}" if self.is_open else f"{self.low} or more"
            return f"{number} is too small: expected {least}"
        if number <= self.high:
            return None
        problem = f"{number} is too large: expected at most {self.high:,}"
        if self.high == 1 and number <= 100:
            return f"{problem}; for {number:g} % write {number / 100:g}"
        return problem


RANGES = {
    **dict.fromkeys(("window", "max_input", "max_tokens", "token_threshold"), Range(1)),
    **dict.fromkeys(("threshold_percent", "similarity", "share"), Range(0, 1, is_open=True)),
    **dict.fromkeys(("threshold", "max_loss"), Range(0, 1)),
    "lease_steps": Range(1),
    "timeout_s": Range(0, 86_400, is_open=True),
    **dict.fromkeys(("wait_s", "grace_s", "cache_s"), Range(0, 86_400)),
    **dict.fromkeys(
        ("header_s", "body_s", "body_idle_s", "write_timeout_s", "idle_s"), Range(0, 86_400, is_open=True)
    ),
    **dict.fromkeys(("burst", "requests", "connections"), Range(1)),
    "requests_per_s": Range(0, is_open=True),
    "max_body_mb": Range(0, 1_024, is_open=True),
    "port": Range(0, 65_535),
}
"""By setting name; other numbers are 0 or more."""
SECRETS = ("token", "hash")
"""Settings that errors never quote."""

TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple[str, ...]: "a list of texts",
}


def validated(value: Any, hint: Any, place: Place, path: Path = ()) -> Any:
    """The value as plain data, without nulls, and with on and off as booleans.

    Raises:
        SettingError: it is not of the type `hint`.
    """
    kinds = accepted_types(hint)
    if bool in kinds and isinstance(value, str) and value in ("on", "off"):
        value = value == "on"
    for kind in kinds:
        if is_struct(kind):
            short = _shorthand(kind)
            if short and isinstance(value, str):
                value = {short: [value]}
            elif short and isinstance(value, list | tuple):
                value = {short: value}
            if isinstance(value, Mapping | msgspec.Struct):
                return validated_fields(value, field_types(kind), place, path)
        elif get_origin(kind) is dict:
            if isinstance(value, Mapping):
                inner = get_args(kind)[1]
                null: Any = {} if is_struct(inner) else None  # an agent may have no settings
                items = (
                    (key, null if one is None else one, at) for key, one, at in _items(value, place, path)
                )
                return {key: validated(one, inner, place, at) for key, one, at in items if one is not None}
        elif lists_structs(kind):
            if isinstance(value, list | tuple):
                inner = get_args(kind)[0]
                return [validated(one, inner, place, (*path, str(n))) for n, one in enumerate(value)]
        elif _is(value, kind):
            problem = RANGES.get(path[-1], Range()).problem(value) if kind in (int, float) else None
            if problem:
                raise SettingError(place(path), problem)
            return value
    got = f"a {type(value).__name__}" if path[-1:] and path[-1] in SECRETS else brief_repr(value)
    raise SettingError(place(path), f"expected {_expected(kinds)}, got {got}")


def validated_fields(value: Any, known: Mapping[str, Any], place: Place, path: Path = ()) -> dict[str, Any]:
    """The same for named values, each of its own type."""
    values = {}
    for key, one, here in _items(value, place, path):
        if key not in known:
            similar = _similar(key, known)
            hint = f" (did you mean {similar}?)" if similar else ""
            raise SettingError(place(here), f"is not known{hint}; known here: {', '.join(known)}")
        if one is not None:
            values[key] = validated(one, known[key], place, here)
    return values


def plain_fields(value: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct that differ from their defaults."""
    plain = {}
    for field in msgspec.structs.fields(value):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        if getattr(value, field.name) != default:
            plain[field.name] = getattr(value, field.name)
    return plain


@cache
def field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct)


@cache
def accepted_types(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have, without None and UNSET."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind not in (NoneType, msgspec.UnsetType))


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, msgspec.Struct)


def _shorthand(struct: type[msgspec.Struct]) -> str | None:
    """The field that a bare text or list is for."""
    return getattr(struct, "SHORTHAND", None)


def holds_structs(hint: Any) -> bool:
    """True for structs by name."""
    return any(get_origin(kind) is dict and is_struct(get_args(kind)[1]) for kind in accepted_types(hint))


def lists_structs(kind: Any) -> bool:
    return get_origin(kind) is tuple and is_struct(get_args(kind)[0])


def brief_repr(value: object) -> str:
    """A value for an error message; of anything but plain values, the type."""
    return repr(value)[:64] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _similar(key: str, known: Mapping[str, Any]) -> str | None:
    """The known name that is most similar, or the path to one a level further down."""
    from difflib import get_close_matches  # only when something is wrong

    paths = dict[str, str]()
    for name, hint in known.items():
        for kind in accepted_types(hint):
            if is_struct(kind):
                for inner in field_types(kind):
                    paths.setdefault(inner, f"{name}.{inner}")
    paths.update({name: name for name in known})
    found = get_close_matches(key.lower(), paths, n=1, cutoff=0.7)
    if len(key) > 2:
        found += [name for name in paths if name.startswith(key.lower())]
    return paths[found[0]] if found else None


def _items(value: Any, place: Place, path: Path) -> Iterator[tuple[str, Any, Path]]:
    for key, one in (plain_fields(value) if isinstance(value, msgspec.Struct) else value).items():
        if not isinstance(key, str):
            raise SettingError(place((*path, brief_repr(key))), "is not a name; write it in quotes")
        yield key, one, (*path, key)


def _is(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError):
        return False
    return True


def _expected(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        if is_struct(kind):
            short = _shorthand(kind)
            words += [f"a text or a list of texts ({short})"] if short else []
            words.append(f"some of {', '.join(field_types(kind))}")
        elif get_origin(kind) is dict:
            inner = get_args(kind)[1]
            words.append(f"names, each with {'its settings' if is_struct(inner) else _expected((inner,))}")
        elif lists_structs(kind):
            words.append(f"a list, each with {_expected((get_args(kind)[0],))}")
        elif get_origin(kind) is Literal and bool in kinds:
            words.append(", ".join(get_args(kind)))
        elif get_origin(kind) is Literal:
            words.append(f"one of {', '.join(map(repr, get_args(kind)))}")
        elif get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Literal:
            words.append(f"a list of {', '.join(map(repr, get_args(get_args(kind)[0])))}")
        elif kind is not bool or kinds == (bool,):
            words.append(TYPE_NAMES.get(kind, str(kind)))
    return ", or ".join(words)
