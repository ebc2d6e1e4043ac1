"""Settings: from a file, a dict or Python, checked, with the place of whatever is wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec

from refold.core.budget import Budget
from refold.core.errors import SettingError
from refold.tokens.limits import ModelLimits, ModelSettings

T = TypeVar("T")


class Compact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a view is made smaller, and by how much. Defaults: see `Budget`."""

    system_reserve: int = 2_000
    output_reserve: int = 4_000
    safety_buffer: int = 5_000
    threshold_percent: float = 0.80
    max_tokens: int | None = None
    token_threshold: int | None = None
    turn_threshold: int | None = None
    message_threshold: int | None = None
    strategy: Literal["sliding-window"] = "sliding-window"


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str | None = None
    compact: Compact | Literal["on", "off"] | bool = True
    """`off` (which YAML reads as false) turns every reduction off."""
    repair: Literal["on", "off"] | bool = True
    """Whether requests that the provider would refuse are mended."""
    counter: Literal["auto", "estimate"] = "auto"
    """How tokens are counted: as the model does, or four characters a token."""

    @property
    def is_off(self) -> bool:
        return self.compact in ("off", False)

    @property
    def repairs(self) -> bool:
        return self.repair not in ("off", False)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: str | None = None
    models: dict[str, ModelSettings] = {}
    """What models take that the table does not know, or knows otherwise."""
    agents: dict[str, AgentSettings] = {}

    def agent(self, name: str | None) -> AgentSettings:
        """The settings of an agent; of the one called `default` where none is named."""
        if name is not None and name not in self.agents:
            known = ", ".join(sorted(self.agents)) or "none"
            raise SettingError(f"agent {name!r}", f"is not configured; configured are: {known}")
        return self.agents.get(name or "default") or AgentSettings()

    def budget(self, agent: AgentSettings, limits: ModelLimits, output: int | None = None) -> Budget:
        """For a model of these limits; `output` is what a request asks for, where it does."""
        compact = agent.compact if isinstance(agent.compact, Compact) else Compact()
        return Budget(
            window=limits.window,
            max_input=limits.max_input,
            output_reserve=min(compact.output_reserve if output is None else output, limits.max_output),
            asked=output is not None,
            system_reserve=compact.system_reserve,
            safety_buffer=compact.safety_buffer,
            threshold_percent=compact.threshold_percent,
            max_tokens=compact.max_tokens,
            token_threshold=compact.token_threshold,
            turn_threshold=compact.turn_threshold,
            message_threshold=compact.message_threshold,
        )


Source: TypeAlias = Config | Mapping[str, Any] | str | Path | None


def load_config(source: Source) -> Config:
    """The configuration in a file (YAML or TOML), a mapping, or none.

    Raises:
        SettingError: says where the fault is and what is allowed there.
    """
    if source is None:
        return Config()
    if isinstance(source, Config):
        return source
    if isinstance(source, str | Path):
        return _checked(_read(Path(source)), str(source))
    if not isinstance(source, Mapping):
        raise SettingError("config", f"expected a file, a dict or a Config, got {type(source).__name__}")
    return _checked(dict(source), "config")


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(str(path), f"cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        import yaml  # 15 ms, paid only by those who have such a file

        return yaml.safe_load(text) or {}
    except (ValueError, RecursionError) as error:
        raise SettingError(str(path), f"is not valid {path.suffix[1:].upper()}: {error}") from error
    except Exception as error:  # yaml.YAMLError: it has no other root
        raise SettingError(str(path), f"is not valid YAML: {error}") from error


def _checked(value: Any, where: str) -> Config:
    _check(value, where)
    return _typed(value, Config, where)


def _typed(value: Any, type: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        allowed = get_args(get_type_hints(type).get(path.removeprefix("."), None))
        if "enum" in problem and allowed:
            problem += f"; allowed: {', '.join(map(repr, allowed))}"
        raise SettingError(where + path, problem) from error


def _check(value: Any, where: str) -> None:
    """What types cannot say: known keys by name, and numbers that make sense together."""
    _known(value, Config, where)
    for name, agent in _mappings(value, "agents"):
        _known(agent, AgentSettings, f"{where}.agents.{name}")
        compact = agent.get("compact") if isinstance(agent, Mapping) else None
        if isinstance(compact, Mapping):
            place = f"{where}.agents.{name}.compact"
            _known(compact, Compact, place)
            _typed(compact, Compact, place)
            _positive(compact, place)
            percent = compact.get("threshold_percent", 0.8)
            if isinstance(percent, int | float) and not 0 < percent <= 1:
                raise SettingError(f"{place}.threshold_percent", f"{percent} is not above 0 and at most 1")
    for name, limits in _mappings(value, "models"):
        _known(limits, ModelSettings, f"{where}.models.{name}")
        _typed(limits, ModelSettings, f"{where}.models.{name}")
        _positive(limits, f"{where}.models.{name}")


def _mappings(value: Any, key: str) -> list[tuple[str, Any]]:
    inner = value.get(key) if isinstance(value, Mapping) else None
    return list(inner.items()) if isinstance(inner, Mapping) else []


def _known(value: Any, type: type[msgspec.Struct], where: str) -> None:
    names = type.__struct_fields__
    for key in value if isinstance(value, Mapping) else ():
        if key not in names:
            raise SettingError(f"{where}.{key}", f"is not known; known here: {', '.join(names)}")


def _positive(value: Any, where: str) -> None:
    for key, number in value.items() if isinstance(value, Mapping) else ():
        if isinstance(number, int | float) and number < (
            1 if key in ("window", "max_tokens", "max_input") else 0
        ):
            raise SettingError(f"{where}.{key}", f"{number} is too small")
