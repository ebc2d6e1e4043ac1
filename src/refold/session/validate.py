"""Validates the arguments of public functions before anything is done."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from refold.config.validate import brief_repr, field_types, validated_fields
from refold.core.errors import SettingError
from refold.core.event import Expiry
from refold.core.expiry import merge_expiries
from refold.core.message import Kind
from refold.core.plan import Policy


def require_int(name: str, value: object) -> int:
    """Raises SettingError if it is not a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(name, f"expected a whole number such as 57, got {brief_repr(value)}")
    return int(value)  # a subclass such as `Undoing` becomes a plain number


def require_name(name: str, value: object) -> str:
    """Raises SettingError if it is not a text, or it is empty."""
    if not isinstance(value, str) or not value:
        raise SettingError(name, f"expected a text of at least one character, got {brief_repr(value)}")
    return value


def model_name(model: str | None) -> str | None:
    """Raises SettingError if it cannot be the name of a model."""
    if model is not None and not require_name("model", model).isprintable():
        raise SettingError("model", f"is not the name of a model: {brief_repr(model)}")
    return model


def require_kind(kind: object) -> None:
    """Raises SettingError if there is no such kind of message."""
    known = get_args(Kind)
    if kind is not None and (not isinstance(kind, str) or kind not in known):
        raise SettingError("kind", f"{brief_repr(kind)} is not known; known are {', '.join(known)}")


def require_policies(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Raises SettingError if it is not a list of functions."""
    if not isinstance(policies, list | tuple):
        raise SettingError("policies", f"expected a list of functions, got {type(policies).__name__}")
    for n, policy in enumerate(policies):
        if not callable(policy):
            raise SettingError(
                f"policies[{n}]",
                f"expected a function of view, budget and count, got {type(policy).__name__}",
            )
    return tuple(policies)


def request_fields(request: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Raises SettingError if it is not a dict."""
    if not isinstance(request, Mapping | None):
        raise SettingError("request", f"expected a dict, got {type(request).__name__}")
    return request or {}


def output_of(request: Mapping[str, Any]) -> int | None:
    """The output limit of a request, if it has one.

    Raises:
        SettingError: it is not a whole number above 0.
    """
    for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
        if request.get(name) is not None:
            if require_int(name, request[name]) < 1:
                raise SettingError(name, f"expected at least 1, got {request[name]}")
            return int(request[name])
    return None


def expiry_of(expiry: object, name: str = "expiry") -> Expiry:
    """Raises SettingError if a field is not known, or its value is not allowed."""
    if not isinstance(expiry, Mapping | Expiry):
        raise SettingError(name, f"expected a refold.Expiry or a dict, got {brief_repr(expiry)}")
    return Expiry(**validated_fields(expiry, field_types(Expiry), lambda path: ".".join((name, *path))))


class Override(msgspec.Struct, frozen=True):
    """Settings of a session, or of one request, that override the configuration."""

    off: bool | None = None
    """Nothing is reduced."""
    keep_originals: bool | None = None
    """False: the model cannot expand what is reduced; a person can restore it. Unset: as configured."""
    tools: tuple[Mapping[str, Expiry], ...] = ()
    """By the name or pattern of tools; `*` is every tool. Later ones beat earlier ones, field by field."""

    @property
    def rules(self) -> list[Expiry]:
        return [rule for one in self.tools for rule in one.values()]

    def then(self, other: "Override") -> "Override":
        """Both; the other one overrides this one field by field."""
        off = self.off if other.off is None else other.off
        keep = self.keep_originals if other.keep_originals is None else other.keep_originals
        return Override(off, keep, (*self.tools, *other.tools))


def override_of(override: "Mapping[str, Any] | Override | None") -> Override:
    """Raises SettingError if a field is not known, or its value is not allowed."""
    if isinstance(override, Override):
        return override
    if not isinstance(override, Mapping | None):
        raise SettingError("override", f"expected a dict, got {type(override).__name__}")
    given = dict(override or {})
    if isinstance(given.get("tools"), Mapping):
        given["tools"] = dict(given["tools"])
        for name, settings in given["tools"].items():
            if isinstance(settings, Mapping) and settings.keys() == {"expire"}:  # as in a settings file
                given["tools"][name] = settings["expire"]
    known = {"off": bool, "keep_originals": bool, **field_types(Expiry), "tools": dict[str, Expiry]}
    asked = validated_fields(given, known, lambda path: ".".join(("override", *path)))
    switches = {name: asked.pop(name, None) for name in ("off", "keep_originals")}
    tools = {name: Expiry(**one) for name, one in asked.pop("tools", {}).items()}
    every = Expiry(**asked)
    if every != Expiry():
        tools["*"] = merge_expiries(every, tools.get("*", Expiry()))
    return Override(**switches, tools=(tools,) if tools else ())
