"""The command config: settings, where they came from, and changes to those in the database."""

import os
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from refold.cli.format import one_line
from refold.cli.options import (
    CONFIG,
    Access,
    ConfigFile,
    Json,
    StoreUrl,
    argument,
    configured,
    default_config,
    option,
)
from refold.cli.terminal import Cell, emit, say, table
from refold.config.config import DEFAULT, Config, with_database, with_stored
from refold.config.prompts import BUILT_IN, Template
from refold.config.serving import ServeSettings
from refold.config.settings import Setting, all_settings
from refold.config.validate import field_types, plain_fields, validated_fields
from refold.core.errors import NotFoundError, StoreError
from refold.core.event import Expiry
from refold.core.expiry import merge_expiries
from refold.session.api import DEFAULT_STORE
from refold.stores.shelf import Shelf
from refold.stores.store import Store, ToolSetting

EVERY = "*"
"""Stands for every agent."""


def config(
    file: Annotated[Path | None, argument("Same as --config.", "FILE")] = None,
    agent: Annotated[str | None, option("Only this agent.", "NAME")] = None,
    set: Annotated[
        list[str] | None,
        option("Set it in the database; AGENT * means all. May be repeated.", "AGENT.TOOL.FIELD=VALUE"),
    ] = None,
    unset: Annotated[
        list[str] | None, option("Unset it in the database. May be repeated.", "AGENT.TOOL[.FIELD]")
    ] = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Print every setting, and where it came from.

    Includes the prompts that the settings select. Settings in the database, which say when the results of a
    tool expire, take precedence over the file.
    """
    if set and unset:
        raise typer.BadParameter("cannot be combined", param_hint="--set, --unset")
    warnings.simplefilter("default", DeprecationWarning)
    used = file or config or default_config()
    in_file = configured(used)
    access = Access(store or in_file.store or DEFAULT_STORE, in_file)
    if set or unset:
        changed = _unset(access, unset) if unset else _set(access, set or [])
        _print_changes(changed, access, json)
        return
    is_there = access.file is None or access.file.exists()
    with access.open() if is_there else nullcontext() as backend:
        found = in_file if backend is None else with_database(in_file, backend)
    general = _general(found, access.shown, store)
    names = dict.fromkeys([agent] if agent is not None else [*(in_file.agents or [DEFAULT]), *found.agents])
    agents = {name: _of_agent(found, None if name == DEFAULT else name) for name in names}
    if json:
        rows = {name: list(map(_json, settings)) for name, settings in agents.items()}
        emit({"file": used and str(used), "settings": list(map(_json, general)), "agents": rows})
        return
    say(
        f"From {one_line(str(used))}"
        if used
        else f"There is no {CONFIG} in this folder: these are the defaults"
    )
    for name, settings in {"": general, **agents}.items():
        say(f"\nagent {one_line(name)}" if name else "")
        _print(settings)


def _of_agent(config: Config, agent: str | None) -> list[Setting]:
    """The settings of an agent, and the prompts that they select."""
    path = ("agents", agent or DEFAULT)
    prompts = config.prompts(agent)
    profile = config.agent(agent).summarizer.profile
    folder = config.origin(*path, "summarizer", "prompts")
    found = list(config.in_force(agent))

    def add(template: Template, *name: str, selected_by: str = DEFAULT) -> None:
        is_own = selected_by == DEFAULT and template.origin != BUILT_IN
        found.append(Setting(("prompts", *name), template.origin, folder if is_own else selected_by))

    add(prompts.system, "system")
    by_profile = config.origin(*path, "summarizer", "profile")
    add(prompts.conversation, "conversation", profile, selected_by=by_profile)
    add(prompts.message, "message")
    for tool, template in prompts.tools.items():
        origin = config.origin(*path, "tools", tool, "expire", "prompt")
        add(template, "message", tool, selected_by=origin)
    return found


def _general(config: Config, url: str, store: str | None) -> list[Setting]:
    """Settings that are not an agent's: the store, models and the service."""
    option = "$REFOLD_STORE" if store == os.environ.get("REFOLD_STORE") else "--store"
    origin = option if store else config.origin("store")
    models = [
        (("models", name, *path), one)
        for name, model in config.models.items()
        for path, one in all_settings(model)
    ]
    limits = [Setting(path, one, config.origin(*path)) for path, one in models if one is not msgspec.UNSET]
    served = all_settings(_without_secrets(config.serve), ("serve",))
    rest = [Setting(path, one, config.origin(*path)) for path, one in served]
    return [Setting(("store",), url, origin), *limits, *rest]


def _without_secrets(serve: ServeSettings) -> msgspec.Struct:
    """Tokens are shown by owner."""
    holders = []
    for one in serve.tokens:
        scopes = "revoked" if one.revoked else " ".join(one.scopes)
        holders.append(f"{one.owner}: {scopes}")
    token = None if serve.token is None else "***"
    return msgspec.structs.replace(serve, token=token, tokens=tuple(holders))


def _print(settings: list[Setting]) -> None:
    rows = list[list[Cell]]()
    for one in settings:
        style = "dim" if one.origin == "default" else "green"
        rows.append([(one_line(one.name), ""), (one_line(one.shown), ""), (one_line(one.origin), style)])
    table(("", "", ""), rows, most=48)


def _json(setting: Setting) -> dict[str, Any]:
    return {"name": setting.name, "value": setting.value, "origin": setting.origin}


# In the database


def _print_changes(changed: list[ToolSetting], access: Access, json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for one in changed:
        rows.append({"agent": one.agent or EVERY, "tool": one.tool, "set": plain_fields(one.expiry)})
    if json:
        emit({"store": access.shown, "settings": rows})
        return
    for row in rows:
        values = ", ".join(f"{name} = {value}" for name, value in row["set"].items()) or "nothing"
        name = f"tool {one_line(row['tool'])!r} of agent {one_line(row['agent'])!r}"
        say(f"Set for {name} in {one_line(access.shown)}: {values}")


def _set(access: Access, texts: list[str]) -> list[ToolSetting]:
    """Sets all of them, or none if one is invalid."""
    new = list(map(_parse_setting, texts))
    for one in new:
        with_stored(access.config, [one])  # fails if the prompt does not exist
    with access.open(create=True) as store:
        stored = _stored(store)
        changed = {}
        for agent, tool, expiry in new:
            stored[agent, tool] = merge_expiries(stored.get((agent, tool), Expiry()), expiry)
            changed[agent, tool] = stored[agent, tool]
        return _save(store, changed)


def _parse_setting(text: str) -> ToolSetting:
    name, _, value = text.partition("=")
    agent, tool, field = _parse_name(name)
    if not field:
        raise typer.BadParameter(
            f"expected AGENT.TOOL.FIELD=VALUE, such as '*.grep.after_steps=3', got {text!r}",
            param_hint="--set",
        )
    fields = {field: value if field == "prompt" else _number(value)}
    return ToolSetting(
        agent, tool, Expiry(**validated_fields(fields, field_types(Expiry), lambda path: f"--set {name}"))
    )


def _unset(access: Access, texts: list[str]) -> list[ToolSetting]:
    """Unsets all of them, or none if one is not set."""
    names = {}
    for text in texts:
        agent, tool, field = _parse_name(text)
        if field not in Expiry.__struct_fields__:  # the name of a tool may contain dots
            agent, tool, field = _parse_name(f"{text}.{EVERY}")
        if not field:
            raise typer.BadParameter(
                f"expected AGENT.TOOL or AGENT.TOOL.FIELD, such as '*.grep', got {text!r}",
                param_hint="--unset",
            )
        names[text] = (agent, tool, field)
    with access.open() as store:
        stored = _stored(store)
        changed = {}
        for text, (agent, tool, field) in names.items():
            before = stored.get((agent, tool), Expiry())
            after = Expiry() if field == EVERY else msgspec.structs.replace(before, **{field: None})
            if before == after:
                raise NotFoundError(
                    f"{text} is not set in {access.shown}; `refold config` prints all settings"
                )
            stored[agent, tool] = after
            changed[agent, tool] = after
        return _save(store, changed)


def _parse_name(name: str) -> tuple[str, str, str]:
    """Agent, tool (which may contain dots) and field. The field is empty if one is missing."""
    agent, _, rest = name.partition(".")
    tool, _, field = rest.rpartition(".")
    is_whole = bool(agent and tool)
    return "" if agent == EVERY else agent, tool, field if is_whole else ""


def _number(text: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _stored(store: Store) -> dict[tuple[str, str], Expiry]:
    if not isinstance(store, Shelf):
        raise StoreError(f"{type(store).__name__} stores no settings; use a configuration file")
    return {(agent, tool): expiry for agent, tool, expiry in store.settings()}


def _save(store: Any, changed: dict[tuple[str, str], Expiry]) -> list[ToolSetting]:
    settings = [ToolSetting(agent, tool, expiry) for (agent, tool), expiry in changed.items()]
    for one in settings:
        store.set_setting(one)
    return settings
