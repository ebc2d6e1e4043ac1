"""Reads settings that are written under an older name, each with one deprecation warning."""

import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
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
    tree = deepcopy(source.tree)
    lines = dict(source.lines)
    notices: list[str] = []
    for (*parents, old), new in RENAMED.items():
        for path, section in _sections(tree, parents):
            if old not in section:
                continue
            notices.append(f"{source.place((*path, old))}: is deprecated; write {new} instead")
            value = section.pop(old)
            if new not in section:
                section[new] = value
                lines[*path, new] = source.origin((*path, old))
    for path, agent in _sections(tree, ("agents", "*")):
        here = (*path, "transforms")
        if agent.get("transforms") is None:
            continue
        limits = _limits(agent.pop("transforms"), source, here)
        smallest = min(limits, default=None)
        compact = {} if smallest is None else {"token_threshold": smallest}
        instead = f"compact: {{token_threshold: {smallest}}}" if compact else "compact: on"
        notices.append(f"{source.place(here)}: is deprecated; write {instead} instead")
        if agent.get("compact") is None:
            agent["compact"] = compact
            for limit in compact.values():
                lines[*path, "compact", "token_threshold"] = source.origin(limits[limit])
    for notice in notices:
        warnings.warn(notice, DeprecationWarning, stacklevel=5)
    return SourceValues(tree, source.name, lines)


def _sections(tree: Any, pattern: Sequence[str], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The parts of the settings at a path in which `*` stands for any name."""
    if not isinstance(tree, dict):
        return
    if not pattern:
        yield path, tree
        return
    for name in [*tree] if pattern[0] == "*" else pattern[:1]:
        yield from _sections(tree.get(name), pattern[1:], (*path, str(name)))


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
