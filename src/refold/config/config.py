"""Settings: from files, dicts, the database and Python, made one, each knowing where it came from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as File
from typing import Any, TypeAlias

import msgspec

from refold.config.legacy import modern
from refold.config.prompts import Prompts, conversation_template, load, message_template
from refold.config.serving import ServeSettings
from refold.config.settings import AgentSettings, Compact, Setting, ToolSettings, every
from refold.config.sources import SourceValues, leaves, merged, read
from refold.config.validate import Path, given, hints, shown, vet_fields
from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import SettingError
from refold.core.event import Expiry
from refold.core.expiry import merge_expiries
from refold.models.limits import PROVIDERS, ModelLimits, ModelSettings, find
from refold.stores.store import Settings, Store, ToolSetting

__all__ = [
    "AgentSettings",
    "Compact",
    "Config",
    "Source",
    "load_config",
    "with_database",
    "with_stored",
]

DEFAULT = "default"
"""The origin of what nobody set, and the agent of those who name none."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: str | None = None
    """The store's URL, where neither the code nor `--store` names one; unset, `sqlite:///refold.db`."""
    models: dict[str, ModelSettings] = {}
    """By name: what models take that the table does not know, or knows otherwise."""
    agents: dict[str, AgentSettings] = {}
    """By name; `default` is for those who name none."""
    tools: dict[str, ToolSettings] = {}
    """`expire`, by the tool's name, for every agent, which may say otherwise, field by field."""
    serve: ServeSettings = ServeSettings()
    """Of `refold serve`."""
    origins: dict[Path, str] = {}
    """Where what was set was set. Two that say the same are equal, wherever they say it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and all(getattr(self, n) == getattr(other, n) for n in SOURCED)

    def agent(self, name: str | None) -> AgentSettings:
        """The settings of an agent; of the one called `default` where none is named."""
        if name is not None and name not in self.agents:
            known = ", ".join(sorted(self.agents)) or "none"
            raise SettingError(f"agent {name!r}", f"is not configured; configured are: {known}")
        own = self.agents.get(name or DEFAULT) or AgentSettings()
        tools = dict(self.tools)
        for tool, settings in own.tools.items():
            tools[tool] = ToolSettings(
                merge_expiries(tools.get(tool, ToolSettings()).expire, settings.expire)
            )
        return msgspec.structs.replace(own, tools=tools)

    def origin(self, *path: str) -> str:
        """Where a value was set, such as `agent.yaml:12`, `config` or `database`; or `default`.

        What an agent has from the tools of every agent came from there.
        """
        return self.origins.get(path) or self.origins.get(path[2:]) or DEFAULT

    def place(self, *path: str) -> str:
        """How an error names a value."""
        return SourceValues({}, lines=self.origins).place(path)

    def in_force(self, agent: str | None = None) -> list[Setting]:
        """Every setting of an agent, those of its tools included."""
        found = every(self.agent(agent))
        return [Setting(path, one, self.origin("agents", agent or DEFAULT, *path)) for path, one in found]

    def prompts(self, agent: str | None = None) -> Prompts:
        """What summarizers are asked for an agent, read anew.

        Raises:
            SettingError: a template is not there, or not as it must be.
        """
        settings, path = self.agent(agent), ("agents", agent or DEFAULT)
        summarizer = settings.summarizer
        folder = None if summarizer.prompts is None else File(summarizer.prompts)
        own, profile = (*path, "summarizer", "prompts"), (*path, "summarizer", "profile")
        with self._blaming(own):
            system, message = load("system", folder), message_template(None, folder)
            load("conversation", folder)  # what is wrong with it is not the profile's fault
        with self._blaming(profile, own):
            conversation = conversation_template(summarizer.profile, folder)
        tools = {}
        for tool, expire in ((tool, one.expire) for tool, one in settings.tools.items()):
            if expire.prompt is not None or expire.compact_mode == "ai-summary":
                here = ("tools", tool, "expire", "prompt")
                with self._blaming((*path, *here), here):
                    tools[tool] = message_template(expire.prompt, folder)
        return Prompts(system, conversation, message, tools)

    def has_writers(self, agent: str | None = None) -> bool:
        """Whether models are named to write summaries: in the settings, or before the text of a prompt."""
        settings = self.agent(agent)
        own = (settings.summarizer.prompts, *(one.expire.prompt for one in settings.tools.values()))
        if settings.summarizer.models or not any(own):  # built-in prompts name none
            return bool(settings.summarizer.models)
        prompts = self.prompts(agent)
        return any(one.models for one in (prompts.conversation, prompts.message, *prompts.tools.values()))

    @contextmanager
    def _blaming(self, *paths: Path) -> Iterator[None]:
        """What is wrong with a file is told with the setting that led to it: the first that is set."""
        try:
            yield
        except SettingError as error:
            path = next((path for path in paths if path in self.origins), paths[0])
            raise SettingError(self.place(*path), str(error)) from error

    def budget(self, agent: AgentSettings, limits: ModelLimits, output: int | None = None) -> Budget:
        """For a model of these limits; `output` is what a request asks for, where it does."""
        compact = agent.compaction
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


SOURCED = {name: hint for name, hint in hints(Config).items() if name != "origins"}
"""What a source may say."""
codec.decoder(Config)

One: TypeAlias = Config | Mapping[str, Any] | str | File
Source: TypeAlias = One | Sequence[One] | None


def load_config(source: Source) -> Config:
    """The configuration in a file (YAML or TOML), a dict, or several of these: later ones beat earlier ones.

    An agent's `compact` is taken whole from the last that has one; all else goes field by field.

    Raises:
        SettingError: says where the fault is and what is allowed there.
    """
    if source is None or (isinstance(source, Config) and source.origins):
        return source or Config()
    several: Sequence[Any] = source if isinstance(source, list | tuple) else [source]
    return resolved([_told(one) if isinstance(one, Config) else modern(read(one)) for one in several])


def with_database(config: Config, store: Store) -> Config:
    """What is set in the store's database beats the configuration, field by field."""
    return with_stored(config, store.settings() if isinstance(store, Settings) else ())


def with_stored(config: Config, rows: Sequence[ToolSetting]) -> Config:
    """The same with rows that a database has, or might have.

    Raises:
        SettingError: something in them is not allowed.
    """
    return resolved([_told(config), _stored(rows, config)]) if rows else config


def resolved(sources: Sequence[SourceValues]) -> Config:
    """One configuration of all that was said, later ones beating earlier ones.

    Raises:
        SettingError: something in one of them is not allowed.
    """
    tree: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for said in sources:
        if not isinstance(said.tree, Mapping):
            raise SettingError(said.name, f"expected settings by name, known here: {', '.join(SOURCED)}")
        vetted = vet_fields(said.tree, SOURCED, said.place)
        _demand_consistent(vetted, said)
        tree = merged(tree, vetted)
        origins |= {path: said.origin(path) for path in leaves(vetted)}
    kept = {path: origins[path] for path in leaves(tree) if path}
    config = msgspec.structs.replace(msgspec.convert(tree, Config), origins=kept)
    _demand_room_for_input(config)
    _demand_prompts(config)
    return config


def _demand_room_for_input(config: Config) -> None:
    """
    Raises:
        SettingError: a model's longest answer is said to be longer than its window.
    """
    for model, settings in config.models.items():
        window = find(model, config.models).limits.window
        if isinstance(settings.max_output, int) and settings.max_output > window:
            place = config.place("models", model, "max_output")
            raise SettingError(
                place,
                f"{settings.max_output:,} is above the window of {window:,} tokens, which holds the request"
                " and its answer; set less, or a larger window",
            )


def _demand_prompts(config: Config) -> None:
    """Of those who set any, all are read, so that what is wrong with one is told before it is needed."""
    if any(path[-1] in ("prompts", "profile", "prompt") for path in config.origins):
        for name in config.agents or (None,):
            config.prompts(name)


def _demand_consistent(tree: dict[str, Any], said: SourceValues) -> None:
    for name, agent in tree.get("agents", {}).items():
        compact = agent.get("compact")
        numbers = compact if isinstance(compact, dict) else {}
        target, trigger = numbers.get("max_tokens"), numbers.get("token_threshold")
        if target is not None and trigger is not None and target > trigger:
            place = said.place(("agents", name, "compact", "max_tokens"))
            raise SettingError(place, f"{target:,} is above the token_threshold of {trigger:,}; set less")
        for provider, url in agent.get("summarizer", {}).get("base_urls", {}).items():
            _demand_address(provider, url, said.place(("agents", name, "summarizer", "base_urls", provider)))


def _demand_address(provider: str, url: str, place: str) -> None:
    if provider not in PROVIDERS:
        raise SettingError(place, f"is not known; known here: {', '.join(PROVIDERS)}")
    if not url.startswith(("http://", "https://")):
        raise SettingError(place, f"expected an address such as https://host/v1, got {shown(url)}")


def _told(config: Config) -> SourceValues:
    said = {path[:n] for path in config.origins for n in range(1, len(path) + 1)}
    tree = {name: one for name, one in given(config, said).items() if name in SOURCED}
    return SourceValues(tree, lines=config.origins)


def _stored(rows: Sequence[ToolSetting], config: Config) -> SourceValues:
    """What a database says, of every agent and of single ones: it beats what files say of either."""
    names = dict.fromkeys([*config.agents, *(row.agent for row in rows if row.agent)])
    agents = {name: _tools([row for row in rows if row.agent in ("", name)]) for name in names}
    return SourceValues({**_tools([row for row in rows if not row.agent]), "agents": agents}, "database")


def _tools(rows: Sequence[ToolSetting]) -> dict[str, Any]:
    tools: dict[str, Any] = {}
    for _, tool, expiry in sorted(rows, key=lambda row: row.agent):  # every agent's come first
        tools[tool] = {"expire": merge_expiries(tools.get(tool, {}).get("expire", Expiry()), expiry)}
    return {"tools": tools}
