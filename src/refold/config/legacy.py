"""Settings as they were written before there was `compact`, read as they are written now."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from refold.config.sources import SourceValues
from refold.config.validate import Path, shown, vet
from refold.core.errors import SettingError


class Transform(msgspec.Struct, frozen=True):
    type: Literal["assistant"]
    input: Any = None
    output: Any = None
    agent_id: Any = None
    token_limit: int | None = None


def modern(said: SourceValues) -> SourceValues:
    """The same with `compact` for `transforms`, and a warning; where an agent has both, `compact` counts.

    Raises:
        SettingError: a transform of which nothing can be made.
    """
    agents = said.tree.get("agents") if isinstance(said.tree, Mapping) else None
    for name, agent in agents.items() if isinstance(agents, Mapping) else ():
        if isinstance(agent, Mapping) and agent.get("transforms") is not None:
            said = _without_transforms(said, name, agent)
    return said


def _without_transforms(said: SourceValues, name: str, agent: Mapping[str, Any]) -> SourceValues:
    path: Path = ("agents", str(name))
    limits = _limits(agent["transforms"], said, (*path, "transforms"))
    compact = {"token_threshold": min(limits)} if limits else {}
    instead = f"compact: {{token_threshold: {min(limits)}}}" if limits else "compact: on"
    problem = f"{said.place((*path, 'transforms'))}: is deprecated; write {instead} instead"
    warnings.warn(problem, DeprecationWarning, stacklevel=5)
    lines, rest = dict(said.lines), {key: one for key, one in agent.items() if key != "transforms"}
    if rest.get("compact") is None:
        rest["compact"] = compact
        for limit in compact.values():
            lines[*path, "compact", "token_threshold"] = said.origin(limits[limit])
    agents = {**said.tree["agents"], name: rest}
    return msgspec.structs.replace(said, tree={**said.tree, "agents": agents}, lines=lines)


def _limits(transforms: Any, said: SourceValues, path: Path) -> dict[int, Path]:
    """The token limits among them, and where each stands."""
    if not isinstance(transforms, list | tuple):
        raise SettingError(said.place(path), f"expected a list, got {shown(transforms)}")
    limits = {}
    for n, one in enumerate(transforms):
        here = (*path, str(n))
        vetted = vet(one, Transform, said.place, here)
        if "type" not in vetted:
            raise SettingError(said.place(here), "has no type; allowed: 'assistant'")
        if "token_limit" in vetted:
            limits[vetted["token_limit"]] = (*here, "token_limit")
    return limits
