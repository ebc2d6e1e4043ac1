"""The commands for the service: serve, and token."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import typer

from refold.cli.options import CONFIG, ConfigFile, Json, StoreUrl
from refold.cli.terminal import emit, say
from refold.config.serving import Right, TokenSettings
from refold.core.errors import SettingError

Level: TypeAlias = Literal["debug", "info", "warning", "error"]


def serve(
    host: Annotated[
        str | None, typer.Option("--host", metavar="HOST", help="Where it listens; else 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="0 takes any that is free; else 8787.")
    ] = None,
    upstream_openai: Annotated[
        str | None, typer.Option("--upstream-openai", metavar="URL", help="Such as https://host/v1.")
    ] = None,
    upstream_anthropic: Annotated[
        str | None, typer.Option("--upstream-anthropic", metavar="URL", help="Such as https://host.")
    ] = None,
    log_level: Annotated[
        str, typer.Option("--log-level", metavar="LEVEL", help=f"{', '.join(get_args(Level))}.")
    ] = "info",
    store: StoreUrl = None,
    config: ConfigFile = None,
) -> None:
    """Serve the gateway, the API, live events and the panel.

    Until it is told to stop. Point the base URL of any agent at it, and its conversations are kept and fit
    the model's window. What it logs goes to stderr, one line of JSON each.
    """
    if log_level not in get_args(Level):
        raise typer.BadParameter(f"expected one of {', '.join(get_args(Level))}", param_hint="--log-level")
    upstreams = _given(openai=upstream_openai, anthropic=upstream_anthropic)
    asked = _given(host=host, port=port, upstreams=upstreams or None)
    file = config or (Path(CONFIG) if Path(CONFIG).is_file() else None)
    sources = [*([file] if file else []), {"serve": asked}]
    serving()(store, config=sources, log_level=log_level, tell=_tell)


def token(
    owner: Annotated[
        str, typer.Option("--owner", metavar="NAME", help="Whose conversations it opens.")
    ] = TokenSettings().owner,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="SCOPE", help=f"{', '.join(get_args(Right))}; any number of them."),
    ] = None,
    json: Json = False,
) -> None:
    """A new token for the service, and the lines that make it known.

    The token is shown once and stored nowhere. To take it back, remove its entry from the file, or write
    `revoked: true` into it: a service that runs sees that within a second.
    """
    from refold.serve.tokens import hash_of, new_token

    scopes = list(dict.fromkeys(scope or TokenSettings().scopes))
    for one in scopes:
        if one not in get_args(Right):
            raise typer.BadParameter(f"expected some of {', '.join(get_args(Right))}", param_hint="--scope")
    made = new_token()
    entry = {"hash": hash_of(made), "owner": owner, "scopes": scopes}
    if json:
        emit({"token": made, "entry": entry})
        return
    from yaml import safe_dump

    line = safe_dump(entry, default_flow_style=True, sort_keys=False, width=1_000).strip()
    say(f"{made}\n\n# in {CONFIG}:\nserve:\n  tokens:\n    - {line}")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _tell(url: str) -> None:
    say(f"refold serves {url}")
    say(f"  OPENAI_BASE_URL={url}/openai/v1")
    say(f"  ANTHROPIC_BASE_URL={url}/anthropic")
    say(f"  panel {url}/panel")


def serving() -> Any:
    """What runs the service.

    Raises:
        SettingError: it is not installed.
    """
    try:
        from refold.serve.run import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("refold"):
            raise
        raise SettingError("refold serve", 'is not installed: pip install "refold[serve]"') from error
    return run
