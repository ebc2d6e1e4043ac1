"""The commands that serve: serve, token, mcp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias, get_args

import typer

from refold.cli.options import CONFIG, Access, ConfigFile, Json, StoreUrl, default_config, option, with_owner
from refold.cli.terminal import emit, say
from refold.config.serving import Right, TokenSettings
from refold.core.errors import SettingError

Level: TypeAlias = Literal["debug", "info", "warning", "error"]


def serve(
    host: Annotated[str | None, option("The address to listen on; default: 127.0.0.1.", "HOST")] = None,
    port: Annotated[int | None, option("The port; 0 takes any free one; default: 8787.", "N")] = None,
    upstream_openai: Annotated[str | None, option("Such as https://host/v1.", "URL")] = None,
    upstream_anthropic: Annotated[str | None, option("Such as https://host.", "URL")] = None,
    log_level: Annotated[Level, option(f"{', '.join(get_args(Level))}.", "LEVEL")] = "info",
    store: StoreUrl = None,
    config: ConfigFile = None,
) -> None:
    """Serve the gateway, the API, live events and the panel.

    Point the base URL of any agent at the gateway: it records conversations and fits them into the model's
    window. Logs go to stderr, one JSON object per line.
    """
    upstreams = _given(openai=upstream_openai, anthropic=upstream_anthropic)
    settings = _given(host=host, port=port, upstreams=upstreams or None)
    file = config or default_config()
    sources = [*([file] if file else []), {"serve": settings}]
    serve_command()(store, config=sources, log_level=log_level, tell=_say_addresses)


def token(
    owner: Annotated[
        str, option("The owner whose conversations it gives access to.", "NAME")
    ] = TokenSettings().owner,
    scope: Annotated[
        list[str] | None, option(f"{', '.join(get_args(Right))}; may be repeated.", "SCOPE")
    ] = None,
    json: Json = False,
) -> None:
    """Create a token for the service.

    Prints the token, which is stored nowhere, and the settings that enable it. To revoke it, remove its
    entry from the file, or add `revoked: true` to it: a running service reads the change within a second.
    """
    from refold.serve.tokens import hash_of, new_token

    scopes = list(dict.fromkeys(scope or TokenSettings().scopes))
    if wrong := [one for one in scopes if one not in get_args(Right)]:
        raise typer.BadParameter(
            f"{wrong[0]!r} is not one of {', '.join(get_args(Right))}", param_hint="--scope"
        )
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


def _say_addresses(url: str) -> None:
    say(f"refold serves {url}")
    say(f"  OPENAI_BASE_URL={url}/openai/v1")
    say(f"  ANTHROPIC_BASE_URL={url}/anthropic")
    say(f"  panel {url}/panel")


def serve_command() -> Callable[..., None]:
    """The function that runs the service.

    Raises:
        SettingError: the extra is not installed.
    """
    with requiring_extra("serve"):
        from refold.serve.run import run
    return run


@contextmanager
def requiring_extra(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("refold"):
            raise
        raise SettingError(f"refold {name}", f'is not installed: pip install "refold[{name}]"') from error


HTTP_HELP = "Serve HTTP on 127.0.0.1, at /mcp; 0 takes any free port. Default: stdin and stdout."


@with_owner
def mcp(
    access: Access,
    http: Annotated[int | None, option(HTTP_HELP, "PORT", min=0, max=65_535)] = None,
) -> None:
    """Serve conversations to an MCP client, as tools and resources.

    A client can list, show, expand, search and explain the owner's conversations, undo edits and append
    messages. Logs go to stderr.

    \b
    Examples:
      refold mcp --store sqlite:////home/ann/agent.db     as the command in a client's configuration
      refold mcp --http 8788                              for clients that connect to an address
    """
    with requiring_extra("mcp"):
        from refold.adapters.mcp import run
    with access.open(create=True) as backend:
        run(backend, owner=access.owner, config=access.config, http=http, tell=_say_mcp_address)


def _say_mcp_address(url: str) -> None:
    say(f"refold serves MCP at {url}")
