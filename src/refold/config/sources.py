"""Reads configuration files and dicts, with the line of every value."""

from collections.abc import Iterator, Mapping
from pathlib import Path as File
from typing import Any

import msgspec

from refold.config.validate import Path
from refold.core.errors import SettingError


class SourceValues(msgspec.Struct, frozen=True):
    """The values of one source as plain data, and the line of each."""

    tree: Any
    name: str = "config"
    """The file, `config` for a dict, or `database`."""
    lines: Mapping[Path, str] = {}
    """Such as `agent.yaml:12`, by path."""

    def origin(self, path: Path) -> str:
        """The line of a value, or of the shorthand that stands for it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return self.name

    def place(self, path: Path) -> str:
        """For errors: `agent.yaml:12: agents.a.model`, or `config.agents.a.model`."""
        origin = self.origin(path)
        if origin == "config":
            return ".".join((origin, *path))
        return f"{origin}: {'.'.join(path)}" if path else origin


def read(source: Mapping[str, Any] | str | File) -> SourceValues:
    """Reads a YAML or TOML file, or a dict.

    Raises:
        SettingError: it cannot be read.
    """
    if isinstance(source, Mapping):
        return SourceValues(source)
    if not isinstance(source, str | File):
        raise SettingError(
            "config", f"expected a file, a dict, a Config or a list of these, got {type(source).__name__}"
        )
    file = File(source)
    name = str(source)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(name, f"cannot be read: {error}") from error
    kind = "TOML" if file.suffix == ".toml" else "YAML"
    try:
        if kind == "YAML":
            return _yaml(text, name)
        import tomllib

        return SourceValues(tomllib.loads(text), name)
    except SettingError:
        raise
    except Exception as error:  # the errors of the parsers, which are imported only when needed
        raise SettingError(name, f"is not valid {kind}: {error}") from error


def _yaml(text: str, name: str) -> SourceValues:
    """Raises SettingError if a mapping has the same key twice; YAML would silently take the last."""
    import yaml  # takes 15 ms

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        seen: dict[Path, int] = {}
        for path, line in _lines(node):
            if path in seen and "<<" not in path:  # values of merge keys may be set again
                problem = f"is set twice, first on line {seen[path]}; remove one of the two"
                raise SettingError(f"{name}:{line}: {'.'.join(path)}", problem)
            seen[path] = line
        tree = None if node is None else loader.construct_document(node)  # resolves merge keys
        lines = {path: f"{name}:{line}" for path, line in _lines(node)}
        return SourceValues({} if tree is None else tree, name, lines)
    finally:
        loader.dispose()


def _lines(node: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """The line of every key. Where merge keys repeat a key, the one that counts comes last."""
    inner = node.value if node is not None and not isinstance(node.value, str) else ()
    for n, one in enumerate(inner):
        key, value = one if isinstance(one, tuple) else (one, one)
        here = (*path, str(key.value) if key is not value else str(n))
        yield here, key.start_mark.line + 1
        yield from _lines(value, here)


def merged(old: Mapping[str, Any], new: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
    """New values override old ones, field by field; but an agent's `compact` is taken whole."""
    result = dict(old)
    for key, value in new.items():
        before = old.get(key)
        is_whole = key == "compact" and len(path) == 2
        if isinstance(value, Mapping) and isinstance(before, Mapping) and not is_whole:
            value = merged(before, value, (*path, key))
        result[key] = value
    return result


def leaves(tree: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all values."""
    if not isinstance(tree, Mapping) or not tree:
        yield path
        return
    for key, value in tree.items():
        yield from leaves(value, (*path, key))
