"""Reads settings that are written under an older name, each with one deprecation warning."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

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
    current = _CurrentNames(source, dict(source.lines), [])
    tree = current.renamed(source.tree, ())
    for notice in current.notices:
        warnings.warn(notice, DeprecationWarning, stacklevel=5)
    return SourceValues(tree, source.name, current.lines)


class _CurrentNames(NamedTuple):
    source: SourceValues
    lines: dict[Path, str]
    """Also of the renamed settings."""
    notices: list[str]

    def renamed(self, value: Any, path: Path) -> Any:
        """A part of the settings with current names."""
        if not isinstance(value, Mapping):
            return value
        current: dict[Any, Any] = {}
        for key, inner in value.items():
            here = (*path, str(key))
            new = RENAMED.get(("agents", "*", *here[2:]) if here[0] == "agents" else here)
            if new is None:
                current[key] = self.renamed(inner, here)
                continue
            self._notice(here, new)
            if new not in value:
                current[new] = inner
                self.lines[*path, new] = self.source.origin(here)
        if path[:1] == ("agents",) and len(path) == 2 and value.get("transforms") is not None:
            self._replace_transforms(current, path)
        return current

    def _replace_transforms(self, agent: dict[Any, Any], path: Path) -> None:
        """Sets `compact` by the smallest limit of the `transforms`, unless the agent has a `compact`."""
        here = (*path, "transforms")
        limits = _limits(agent.pop("transforms"), self.source, here)
        smallest = min(limits, default=None)
        compact = {} if smallest is None else {"token_threshold": smallest}
        self._notice(here, f"compact: {{token_threshold: {smallest}}}" if compact else "compact: on")
        if agent.get("compact") is None:
            agent["compact"] = compact
            if smallest is not None:
                self.lines[*path, "compact", "token_threshold"] = self.source.origin(limits[smallest])

    def _notice(self, path: Path, instead: str) -> None:
        self.notices.append(f"{self.source.place(path)}: is deprecated; write {instead} instead")


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
