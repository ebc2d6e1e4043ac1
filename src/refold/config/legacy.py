"""Reads settings that are written under an older name, each with one deprecation warning."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from refold.config.sources import SourceValues
from refold.config.validate import Path, brief_repr, validated
from refold.core.errors import SettingError

RENAMED: dict[Path, str] = {
    ("agents", "*", "compact", "economy", "risk"): "max_loss",
    ("agents", "*", "summarizer", "run_in"): "executor",
    ("serve", "plain_http"): "allow_insecure_upstreams",
    ("serve", "limits", "body_pause_s"): "body_idle_s",
    ("serve", "limits", "take_s"): "write_timeout_s",
}
"""Older paths and the name that each setting has now; `*` stands for the name of an agent."""


class Transform(msgspec.Struct, frozen=True):
    type: Literal["assistant"]
    input: Any = None
    output: Any = None
    agent_id: Any = None
    token_limit: int | None = None


def with_current_names(source: SourceValues) -> SourceValues:
    """The same settings under their current names; where a setting has both, the current name counts.

    Raises:
        SettingError: a transform is not valid.
    """
    if not isinstance(source.tree, Mapping):
        return source
    lines = dict(source.lines)
    source = SourceValues(_renamed(source.tree, (), source, lines), source.name, lines)
    agents = source.tree.get("agents")
    for name, agent in agents.items() if isinstance(agents, Mapping) else ():
        if isinstance(agent, Mapping) and agent.get("transforms") is not None:
            source = _without_transforms(source, name, agent)
    return source


def _renamed(value: Any, path: Path, source: SourceValues, lines: dict[Path, str]) -> Any:
    """A part of the settings with current names; `lines` learns where the renamed ones stand."""
    if not isinstance(value, Mapping):
        return value
    current: dict[Any, Any] = {}
    for key, inner in value.items():
        here = (*path, str(key))
        new = RENAMED.get(("agents", "*", *here[2:]) if here[0] == "agents" else here)
        if new is None:
            current[key] = _renamed(inner, here, source, lines)
            continue
        warnings.warn(f"{source.place(here)}: is deprecated; write {new} instead", DeprecationWarning, 5)
        if new not in value:
            current[new] = inner
            lines[*path, new] = source.origin(here)
    return current


def _without_transforms(source: SourceValues, name: str, agent: Mapping[str, Any]) -> SourceValues:
    path: Path = ("agents", str(name))
    limits = _limits(agent["transforms"], source, (*path, "transforms"))
    compact = {"token_threshold": min(limits)} if limits else {}
    instead = f"compact: {{token_threshold: {min(limits)}}}" if limits else "compact: on"
    problem = f"{source.place((*path, 'transforms'))}: is deprecated; write {instead} instead"
    warnings.warn(problem, DeprecationWarning, stacklevel=5)
    lines = dict(source.lines)
    rest = {key: value for key, value in agent.items() if key != "transforms"}
    if rest.get("compact") is None:
        rest["compact"] = compact
        for limit in compact.values():
            lines[*path, "compact", "token_threshold"] = source.origin(limits[limit])
    agents = {**source.tree["agents"], name: rest}
    return msgspec.structs.replace(source, tree={**source.tree, "agents": agents}, lines=lines)


def _limits(transforms: Any, source: SourceValues, path: Path) -> dict[int, Path]:
    """The token limits, and the path of each."""
    if not isinstance(transforms, list | tuple):
        raise SettingError(source.place(path), f"expected a list, got {brief_repr(transforms)}")
    limits = {}
    for n, one in enumerate(transforms):
        here = (*path, str(n))
        values = validated(one, Transform, source.place, here)
        if "type" not in values:
            raise SettingError(source.place(here), "has no type; allowed: 'assistant'")
        if "token_limit" in values:
            limits[values["token_limit"]] = (*here, "token_limit")
    return limits
