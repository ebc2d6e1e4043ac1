"""Configuration from files, dicts, the database and Python, merged; every value knows its origin."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as File
from typing import Any, TypeAlias

import msgspec

from refold.config.legacy import with_current_names
from refold.config.prompts import Prompts, conversation_template, load, message_template
from refold.config.serving import ServeSettings
from refold.config.settings import AgentSettings, Compact, Setting, ToolSettings, all_settings
from refold.config.sources import SourceValues, leaves, merged, read
from refold.config.validate import Path, brief_repr, field_types, plain_fields, validated_fields
from refold.core import codec
from refold.core.budget import Budget
from refold.core.errors import SettingError
from refold.core.event import Expiry
from refold.core.expiry import merge_expiries
from refold.models.limits import PROVIDERS, ModelLimits, ModelSettings, find
from refold.stores.shelf import Shelf
from refold.stores.store import Store, ToolSetting

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
"""The origin of values that are not set, and the agent where none is named."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: str | None = None
    """The store's URL, unless the code or `--store` names one; unset, `sqlite:///refold.db`."""
    models: dict[str, ModelSettings] = {}
    """Limits and prices by model name; they override the built-in table."""
    agents: dict[str, AgentSettings] = {}
    """By name; `default` applies where none is named."""
    tools: dict[str, ToolSettings] = {}
    """`expire` by tool name, for every agent; an agent's own tools override it, field by field."""
    serve: ServeSettings = ServeSettings()
    """For `refold serve`."""
    origins: dict[Path, str] = {}
    """Where each value was set."""
    tree: dict[str, Any] = {}
    """What was set, as plain data: what another source is merged with."""

    def __eq__(self, other: object) -> bool:
        """True if all settings are equal, wherever they were set."""
        return isinstance(other, Config) and all(getattr(self, n) == getattr(other, n) for n in SETTINGS)

    def agent(self, name: str | None) -> AgentSettings:
        """The settings of an agent, with the tools of every agent; without a name, of `default`."""
        if name is not None and name not in self.agents:
            known = ", ".join(sorted(self.agents)) or "none"
            raise SettingError(f"agent {name!r}", f"is not configured; configured: {known}")
        own = self.agents.get(name or DEFAULT) or AgentSettings()
        tools = dict(self.tools)
        for tool, settings in own.tools.items():
            tools[tool] = ToolSettings(
                merge_expiries(tools.get(tool, ToolSettings()).expire, settings.expire)
            )
        return msgspec.structs.replace(own, tools=tools)

    def origin(self, *path: str) -> str:
        """Where a value was set, such as `agent.yaml:12`, `config` or `database`; otherwise `default`.

        For a tool of an agent, that may be the `tools` of every agent.
        """
        return self.origins.get(path) or self.origins.get(path[2:]) or DEFAULT

    def place(self, *path: str) -> str:
        """The name of a value in errors."""
        return SourceValues({}, lines=self.origins).place(path)

    def in_force(self, agent: str | None = None) -> list[Setting]:
        """Every setting of an agent and its tools."""
        found = all_settings(self.agent(agent))
        return [Setting(path, one, self.origin("agents", agent or DEFAULT, *path)) for path, one in found]

    def prompts(self, agent: str | None = None) -> Prompts:
        """The prompts for the summarizers of an agent, read from disk.

        Raises:
            SettingError: a template is missing or not valid.
        """
        settings = self.agent(agent)
        summarizer = settings.summarizer
        path = ("agents", agent or DEFAULT)
        folder = None if summarizer.prompts is None else File(summarizer.prompts)
        prompts_path = (*path, "summarizer", "prompts")
        with self._errors_at(prompts_path):
            system = load("system", folder)
            message = message_template(None, folder)
            load("conversation", folder)  # its errors are not those of the profile
        with self._errors_at((*path, "summarizer", "profile"), prompts_path):
            conversation = conversation_template(summarizer.profile, folder)
        tools = {}
        for tool, tool_settings in settings.tools.items():
            expire = tool_settings.expire
            if expire.prompt is not None or expire.compact_mode == "ai-summary":
                prompt_path = ("tools", tool, "expire", "prompt")
                with self._errors_at((*path, *prompt_path), prompt_path):
                    tools[tool] = message_template(expire.prompt, folder)
        return Prompts(system, conversation, message, tools)

    def has_summarizers(self, agent: str | None = None) -> bool:
        """True if models for summaries are named in the settings, or in the front matter of a prompt."""
        settings = self.agent(agent)
        if settings.summarizer.models:
            return True
        own_prompts = (settings.summarizer.prompts, *(tool.expire.prompt for tool in settings.tools.values()))
        if not any(own_prompts):  # built-in prompts name no models
            return False
        prompts = self.prompts(agent)
        return any(one.models for one in (prompts.conversation, prompts.message, *prompts.tools.values()))

    @contextmanager
    def _errors_at(self, *paths: Path) -> Iterator[None]:
        """Errors of a prompt file name the setting that led to it: the first of these that is set."""
        try:
            yield
        except SettingError as error:
            path = next((path for path in paths if path in self.origins), paths[0])
            raise SettingError(self.place(*path), str(error)) from error

    def budget(self, agent: AgentSettings, limits: ModelLimits, output: int | None = None) -> Budget:
        """For a model with these limits; `output` is the output limit of the request, if it has one."""
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


SETTINGS = {name: hint for name, hint in field_types(Config).items() if name not in ("origins", "tree")}
codec.decoder(Config)

OneSource: TypeAlias = Config | Mapping[str, Any] | str | File
Source: TypeAlias = OneSource | Sequence[OneSource] | None


def load_config(source: Source) -> Config:
    """The configuration in a file (YAML or TOML), a dict, or several of these: later ones override earlier
    ones.

    An agent's `compact` is taken whole from the last source that has one; everything else field by field.

    Raises:
        SettingError: says where the error is and what is allowed there.
    """
    if source is None or (isinstance(source, Config) and source.origins):
        return source or Config()
    several: Sequence[Any] = source if isinstance(source, list | tuple) else [source]
    return merge_sources(list(map(_source_values, several)))


def _source_values(source: OneSource) -> SourceValues:
    if not isinstance(source, Config):
        return with_current_names(read(source))
    return SourceValues(source.tree or plain_fields(source), lines=source.origins)


def with_database(config: Config, store: Store) -> Config:
    """Settings in the store's database override the configuration, field by field."""
    return with_stored(config, store.settings() if isinstance(store, Shelf) else ())


def with_stored(config: Config, rows: Sequence[ToolSetting]) -> Config:
    """Settings in given rows of a database override the configuration.

    Raises:
        SettingError: a value is not allowed.
    """
    return merge_sources([_source_values(config), _database_source(rows, config)]) if rows else config


def merge_sources(sources: Sequence[SourceValues]) -> Config:
    """Later sources override earlier ones.

    Raises:
        SettingError: a value is not allowed.
    """
    tree: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for source in sources:
        if not isinstance(source.tree, Mapping):
            raise SettingError(source.name, f"expected settings by name; known here: {', '.join(SETTINGS)}")
        values = validated_fields(source.tree, SETTINGS, source.place)
        _check_agents(values, source)
        tree = merged(tree, values)
        origins |= {path: source.origin(path) for path in leaves(values)}
    kept = {path: origins[path] for path in leaves(tree) if path}
    config = msgspec.structs.replace(msgspec.convert(tree, Config), origins=kept, tree=tree)
    _check_output_limits(config)
    _check_prompts(config)
    return config


def _check_output_limits(config: Config) -> None:
    """Raises SettingError if a model's max_output is larger than its window."""
    for model, settings in config.models.items():
        window = find(model, config.models).limits.window
        if isinstance(settings.max_output, int) and settings.max_output > window:
            place = config.place("models", model, "max_output")
            raise SettingError(
                place,
                f"{settings.max_output:,} is above the window of {window:,} tokens, which must hold request"
                " and answer; set less, or a larger window",
            )


def _check_prompts(config: Config) -> None:
    """If any prompt is set, all are read, so that errors show up now and not in the first summary."""
    if any(path[-1] in ("prompts", "profile", "prompt") for path in config.origins):
        for name in config.agents or (None,):
            config.prompts(name)


def _check_agents(tree: dict[str, Any], source: SourceValues) -> None:
    """Raises SettingError if a target is above its trigger, or a base URL is none."""
    for name, agent in tree.get("agents", {}).items():
        compact = agent.get("compact")
        numbers = compact if isinstance(compact, dict) else {}
        target = numbers.get("max_tokens")
        trigger = numbers.get("token_threshold")
        if target is not None and trigger is not None and target > trigger:
            place = source.place(("agents", name, "compact", "max_tokens"))
            raise SettingError(place, f"{target:,} is above the token_threshold of {trigger:,}; set less")
        for provider, url in agent.get("summarizer", {}).get("base_urls", {}).items():
            place = source.place(("agents", name, "summarizer", "base_urls", provider))
            if provider not in PROVIDERS:
                raise SettingError(place, f"is not known; known here: {', '.join(PROVIDERS)}")
            if not url.startswith(("http://", "https://")):
                problem = f"expected an address such as https://host/v1, got {brief_repr(url)}"
                raise SettingError(place, problem)


def _database_source(rows: Sequence[ToolSetting], config: Config) -> SourceValues:
    """The database's settings, for every agent and for single ones: they override both in files."""
    names = dict.fromkeys([*config.agents, *(row.agent for row in rows if row.agent)])
    agents = {name: _tools([row for row in rows if row.agent in ("", name)]) for name in names}
    return SourceValues({**_tools([row for row in rows if not row.agent]), "agents": agents}, "database")


def _tools(rows: Sequence[ToolSetting]) -> dict[str, Any]:
    tools: dict[str, Any] = {}
    for _, tool, expiry in sorted(rows, key=lambda row: row.agent):  # those of every agent first
        tools[tool] = {"expire": merge_expiries(tools.get(tool, {}).get("expire", Expiry()), expiry)}
    return {"tools": tools}
